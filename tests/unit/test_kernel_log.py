# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of disks, and what storage_check makes of that and of the baseline's mounts."""

from __future__ import annotations

import os

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import kernel_log, storage
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict
from hypothesis import given
from hypothesis import strategies as st

LINES = {
    "I/O error, dev nvme0n1, sector 817024 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2": ("I/O error", "nvme0n1"),
    "blk_update_request: I/O error, dev sda, sector 2048 op 0x0:(READ)": ("I/O error", "sda"),
    "blk_update_request: critical medium error, dev sdb, sector 7": ("I/O error", "sdb"),
    "Buffer I/O error on dev vdb1, logical block 9, lost async page write": ("I/O error", "vdb1"),
    "Buffer I/O error on device dm-3, logical block 9": ("I/O error", "dm-3"),
    "EXT4-fs error (device vdb1): ext4_journal_check_start:83: comm python3: Detected aborted journal": ("file system error", "vdb1"),
    "EXT4-fs (vdb1): Remounting filesystem read-only": ("read-only", "vdb1"),
    "JBD2: Error -5 detected when updating journal superblock for vdb1-8.": ("I/O error", "vdb1"),
    "XFS (rbd0): log I/O error -5": ("file system error", "rbd0"),
    "XFS (nvme0n1p1): Filesystem has been shut down due to log error (0x2).": ("file system error", "nvme0n1p1"),
    'XFS (sda1): metadata I/O error in "xfs_trans_read_buf_map" at daddr 0x2': ("file system error", "sda1"),
    "BTRFS error (device sdc: state EA): bdev /dev/sdc errs: wr 1": ("file system error", "sdc"),
    "BTRFS: error (device sdc) in btrfs_commit_transaction:2409: errno=-5 IO failure; forced readonly": ("read-only", "sdc"),
    "nvme nvme0: Disabling device after reset failure: -19": ("device lost", "nvme0"),
    "nvme nvme1: I/O 22 QID 4 timeout, reset controller": ("device lost", "nvme1"),
    "sd 2:0:0:0: [sdd] tag#0 FAILED Result: hostbyte=DID_NO_CONNECT driverbyte=DRIVER_OK": ("device lost", "sdd"),
    "attempt to access beyond end of device loop0: rw=2049, want=8 limit=4": ("beyond its end", "loop0"),
    "EXT4-fs (vdb1): mounted filesystem with ordered data mode": None,
    "XFS (sda1): Mounting V5 Filesystem": None,
    "nvme nvme0: 8/0/0 default/read/poll queues": None,
    "usb 1-1: new high-speed USB device": None,
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_understood(line):
    found = [(event.kind, event.device) for event in kernel_log.parse([f"3,1,5000000,-;{line}\n SUBSYSTEM=block\n"])]
    assert found == ([LINES[line]] if LINES[line] else [])


@given(st.lists(st.text(max_size=200), max_size=20))
def test_garbage_is_no_event_and_no_crash(records):
    assert all(event.device for event in kernel_log.parse(records))


def test_a_log_is_read_to_its_end_and_one_that_is_not_there_says_so(tmp_path):
    (tmp_path / "kmsg").write_text("".join(f"3,{n},{n}000000,-;Buffer I/O error on dev sda1, logical block {n}\n" for n in range(3)))
    seen = kernel_log.read(str(tmp_path / "kmsg"))
    assert [event.seconds for event in seen.events] == [0, 1, 2]
    assert "No such file" in kernel_log.read(str(tmp_path / "none")).error


def test_a_device_is_its_partition_disk_controller_and_members(tmp_path):
    block = tmp_path / "class/block"
    disk = tmp_path / "devices/nvme0n1"
    (disk / "nvme0n1p2").mkdir(parents=True)
    (disk / "nvme0n1p2/partition").write_text("2\n")
    block.mkdir(parents=True)
    (block / "nvme0n1p2").symlink_to(disk / "nvme0n1p2")
    (block / "nvme0n1").symlink_to(disk)
    (tmp_path / "devices/dm-0/slaves/nvme0n1p2").mkdir(parents=True)
    (block / "dm-0").symlink_to(tmp_path / "devices/dm-0")
    assert kernel_log.family("/dev/dm-0", str(tmp_path)) == {"dm-0", "nvme0n1p2", "nvme0n1", "nvme0"}
    assert kernel_log.family("tmpfs", str(tmp_path)) == frozenset()


def event(device="vdb1", seconds=5000.0):
    return kernel_log.Event("I/O error", device, seconds, f"Buffer I/O error on dev {device}")


def seen(**more):
    return storage.Storage("/data", total_bytes=1 << 40, free_bytes=1 << 39, devices=frozenset({"vdb", "vdb1"}), **more)


UNREAD = kernel_log.Log(error="/dev/kmsg: Operation not permitted")
LOGS = {
    "nothing": (kernel_log.Log((), 6000.0), "auto", []),
    "errors five minutes ago": (kernel_log.Log((event(),), 5300.0), "auto", [("storage-errors-logged", Verdict.FAIL)]),
    "errors an hour ago, of its disk": (kernel_log.Log((event("vdb"),), 9000.0), "auto", [("storage-errors-logged", Verdict.WARN)]),
    "errors of another disk": (kernel_log.Log((event("sda"),), 5300.0), "auto", []),
    "it may not be read": (UNREAD, "auto", []),
    "it may not be read and was asked for": (UNREAD, "required", [("kernel-log-unreadable", Verdict.UNKNOWN)]),
    "it was not asked for": (None, "off", []),
}


@pytest.mark.parametrize("case", LOGS)
def test_errors_of_this_storage_count_and_new_ones_more(case):
    log, asked, wanted = LOGS[case]
    gate = storage.judge(seen(log=log), storage.Need(kernel_log=asked))
    assert [(problem.code, problem.verdict) for problem in gate.problems] == wanted
    if log is UNREAD:
        assert gate.evidence["kernel_log"].startswith("not read: ")


MOUNT = {"path": "/data", "mount_point": "/data", "fstype": "xfs", "uuid": "u1", "by_id": "nvme-A", "source": None}
FAIL, WARN, UNKNOWN = Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN
NFS = {**MOUNT, "uuid": None, "by_id": None, "source": "server:/a"}
MOUNTS = {
    "as it was": (MOUNT, MOUNT, {}, []),
    "the device's name changed": (MOUNT, {**MOUNT}, {}, []),
    "another file system": (MOUNT, {**MOUNT, "uuid": "u2"}, {}, [("storage-not-baseline", FAIL)]),
    "nothing is mounted there": (MOUNT, {**MOUNT, "mount_point": "/", "uuid": "u0"}, {}, [("storage-not-baseline", FAIL)]),
    "the path is gone": (MOUNT, None, {}, [("storage-not-baseline", FAIL)]),
    "a copy on another disk": (MOUNT, {**MOUNT, "by_id": "nvme-B"}, {}, [("storage-other-disk", WARN)]),
    "the UUID cannot be told": (MOUNT, {**MOUNT, "uuid": None}, {}, [("storage-uuid-unknown", UNKNOWN)]),
    "it hangs": (MOUNT, None, {"hung": True}, [("mount-hung", UNKNOWN)]),
    "another NFS export": (NFS, {**NFS, "source": "server:/b"}, {}, [("storage-not-baseline", FAIL)]),
    "the same NFS export": (NFS, NFS, {}, []),
    "moved by our migration": (MOUNT, {**MOUNT, "uuid": "u9"}, {}, []),
}


@pytest.mark.parametrize("case", MOUNTS)
def test_mounts_against_the_baseline(case):
    before, now, more, wanted = MOUNTS[case]
    known = (storage.KnownMount("/data", before, now, **more),)
    gate = storage.judge(seen(known_mounts=known), storage.Need(moved_to="u9"))
    assert [(problem.code, problem.verdict) for problem in gate.problems] == wanted


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log may not be read here")
def test_the_real_log_is_read_without_waiting():
    assert kernel_log.read().error is None
