"""Which mount holds a path, by recorded lines of the kernel and by this machine's own."""

import os

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import mounts

LINES = r"""22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro
31 22 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw
40 22 259:1 / /data rw,relatime shared:9 - xfs /dev/nvme0n1p1 ro,attr2
41 40 0:50 /sub /data/with\040space rw - nfs4 host:/a\134b rw
42 22 259:2 / /data2 rw - xfs /dev/nvme1n1 rw
43 40 0:60 / /data rw - tmpfs over rw
"""


@pytest.mark.parametrize(
    ("path", "point", "fstype"),
    [
        ("/", "/", "ext4"),
        ("/dev/shm/relight", "/dev/shm", "tmpfs"),
        ("/dev/shmother", "/", "ext4"),
        ("/data", "/data", "tmpfs"),  # the later mount covers the earlier
        ("/data/with space/x", "/data/with space", "nfs4"),
        ("/data2", "/data2", "xfs"),
    ],
)
def test_the_mount_that_holds_a_path(path, point, fstype):
    mount = mounts.holding(path, mounts.parse(LINES))
    assert (mount.point, mount.fstype) == (point, fstype)


def test_what_a_line_says():
    nfs = mounts.parse(LINES)[3]
    assert (nfs.source, nfs.root, nfs.device, nfs.read_only) == ("host:/a\\b", "/sub", (0, 50), False)
    assert mounts.parse(LINES)[2].read_only  # the file system is, although the mount is not


def test_this_machine():
    device = os.stat("/proc").st_dev
    mount = mounts.of("/proc/self")
    assert (mount.point, mount.fstype, mount.device) == ("/proc", "proc", (os.major(device), os.minor(device)))
