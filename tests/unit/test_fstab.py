# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""fstab: what is not ours is kept to the byte, whatever it looks like."""

from __future__ import annotations

import os
import shutil

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import fstab
from hypothesis import given
from hypothesis import strategies as st

UUID = "11111111-2222-3333-4444-555555555555"
ODD = (
    "# /etc/fstab: a comment with /data in it\n"
    "\n"
    "UUID=aaaa-bbbb  /  ext4\terrors=remount-ro 0 1\r\n"
    "  /dev/sdb1\t/data   xfs  noatime,logbsize=256k,x-systemd.after=net.target  0  0\n"
    "tmpfs /tmp\n"
    "nonsense\n"
    "LABEL=with\\040space /mnt/with\\040space auto noauto,user 0 0 # trailing words\n"
    "server:/export /data/nested nfs _netdev 0 0"
)
NEW = fstab.entry(UUID, "/data", "xfs", None, 90)


def test_only_our_line_changes_and_stays_in_its_place():
    lines = ODD.splitlines(keepends=True)
    assert fstab.replaced(ODD, "/data", [NEW]) == "".join([*lines[:3], NEW, *lines[4:]])
    assert fstab.replaced(ODD, "/data/", [NEW]) == fstab.replaced(ODD, "/data", [NEW])


def test_the_way_back_is_to_the_byte():
    old = [line.raw for line in fstab.of_point(fstab.parse(ODD), "/data")]
    assert fstab.replaced(fstab.replaced(ODD, "/data", [NEW]), "/data", old) == ODD


def test_a_table_without_the_mount_point_gets_a_last_line():
    assert fstab.replaced("a b c\n# end", "/data", [NEW]) == "a b c\n# end\n" + NEW
    assert fstab.replaced("", "/data", [NEW]) == NEW
    assert fstab.replaced("a b c\n# end\n" + NEW, "/data", []) == "a b c\n# end\n"


def test_two_lines_for_one_mount_point_become_one():
    text = "a /data ext4\nb /x ext4\nc /data xfs\n"
    assert fstab.replaced(text, "/data", [NEW]) == NEW + "b /x ext4\n"


@pytest.mark.parametrize(
    ("old", "options"),
    [
        (None, "defaults,nofail,x-systemd.device-timeout=90s"),
        ("/dev/sdb1 /data ext4 noatime,data=writeback,nofail 0 2\n", "defaults,noatime,nofail,x-systemd.device-timeout=90s"),
        (
            "UUID=1 /data xfs defaults,x-systemd.device-timeout=5,nosuid,logbsize=256k,x-gvfs-hide 0 0\n",
            "defaults,nosuid,x-gvfs-hide,nofail,x-systemd.device-timeout=90s",
        ),
    ],
)
def test_what_the_old_line_said_of_the_mount_is_taken_over_and_what_of_its_file_system_is_not(old, options):
    line = fstab.entry(UUID, "/data", "xfs", fstab.parse(old)[0] if old else None, 90)
    assert line == f"UUID={UUID} /data xfs {options} 0 0\n"


def test_names_with_odd_letters_survive():
    line = fstab.entry(UUID, "/my data\t#1\\", "ext4", None, 9)
    assert len(line.split()) == 6
    assert fstab.parse(line)[0].point == "/my data\t#1\\"
    assert fstab.parse(line)[0].uuid == UUID


@given(st.text(alphabet=st.sampled_from("/dat aUID=#\\040\t\n\r\x0b\x0cxfs,é\udcff"), max_size=200))
def test_any_text_is_kept(text):
    assert "".join(line.raw for line in fstab.parse(text)) == text
    lines = fstab.of_point(fstab.parse(text), "/da")
    if not lines:
        assert fstab.replaced(text, "/da", []) == (text if text.endswith("\n") or not text else text + "\n")


def test_the_file_keeps_mode_owner_and_attributes_and_leaves_a_backup(tmp_path):
    path = tmp_path / "fstab"
    path.write_text("# mine\n")
    os.chmod(path, 0o640)
    os.setxattr(path, "user.label", b"kept")
    if os.geteuid() == 0:
        os.chown(path, 12, 34)
    before = os.stat(path)
    backup = fstab.write(str(path), "# mine\n# more\n")
    after = os.stat(path)
    assert path.read_text() == "# mine\n# more\n"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert os.getxattr(path, "user.label") == b"kept"
    assert backup is not None
    assert open(backup).read() == "# mine\n"
    assert fstab.write(str(path), "# mine\n# more\n") is None
    assert sorted(os.listdir(tmp_path)) == ["fstab", os.path.basename(backup)]


@pytest.mark.skipif(shutil.which("findmnt") is None, reason="needs findmnt")
def test_findmnt_refuses_a_new_fault_and_puts_up_with_old_ones(tmp_path):
    path = tmp_path / "fstab"
    old = "UUID=00000000-0000-0000-0000-00000000dead /nowhere/at/all ext4 defaults 0 2\n"
    path.write_text(old)
    assert fstab.errors(str(path))
    fstab.write(str(path), f"{old}# harmless\n")
    with pytest.raises(fstab.NotVerified, match="/not/there"):
        fstab.write(str(path), f"{old}UUID=00000000-0000-0000-0000-00000000beef /not/there xfs defaults 0 0\n")
    assert path.read_text() == f"{old}# harmless\n"
