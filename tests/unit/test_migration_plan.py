# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a storage migration: disks by what names them for good, and what is said before the first change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import blockdev, migration_plan, mounts
from ansible_collections.relight.recovery.plugins.module_utils.blockdev import Content, Disk
from ansible_collections.relight.recovery.plugins.module_utils.migration import Record
from ansible_collections.relight.recovery.plugins.module_utils.migration_plan import Seen, Source, Wish

TIB = 1 << 40
NEW = Disk("/dev/nvme1n1", (259, 1), 15 * TIB, ("/dev/disk/by-id/nvme-M_S1", "/dev/disk/by-id/nvme-eui.1", "serial:S1"), "M")
TWIN = replace(NEW, device="/dev/nvme2n1", number=(259, 2), names=("/dev/disk/by-id/nvme-M_S2", "serial:S2"))
ROOT = Disk("/dev/sda", (8, 0), TIB, ("serial:R",), used_by=("mounted at /",))
OLD_MOUNT = mounts.Mount("/data", "ext4", "/dev/sdb", (8, 16), read_only=False)
SOURCE = Source(OLD_MOUNT, uuid="old", device="/dev/sdb", used_bytes=10 * TIB, used_inodes=300_000)
WISH = Wish("/data", "serial:S1", "/var/lib/relight")
SEEN = Seen(None, (NEW, TWIN, ROOT), (NEW,), Content(True), NEW, "", True, SOURCE, ())
RECORD = Record(
    "m1", "preparing", "/data", "/data", "old", "/dev/sdb", "ext4", NEW.name, "u1", "xfs", "/new", "/old", "/etc/fstab", "", True
)


def said(seen, wish=WISH, granted=()):
    gate, plan = migration_plan.judge(wish, seen, frozenset(granted))
    return [problem.code for problem in gate.problems], [problem.consent for problem in gate.problems if problem.consent], plan


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("serial:S1", [NEW]),
        ("S2", [TWIN]),
        ("/dev/disk/by-id/nvme-M_S1", []),  # a link that is not there now
        ("/dev/nvme1n1", []),
        ("serial:none", []),
        ("nvme1n1", []),
    ],
)
def test_a_disk_is_found_by_what_lasts(wanted, found):
    assert blockdev.matching(wanted, [NEW, TWIN, ROOT]) == found


def test_two_disks_of_one_serial_number_are_ambiguous():
    both = [NEW, replace(TWIN, names=("serial:S1",))]
    assert blockdev.matching("serial:S1", both) == both
    codes, consents, plan = said(replace(SEEN, matched=tuple(both), content=None, device=None))
    assert (codes, consents, plan) == (["target-ambiguous"], [], [])


def test_the_consent_names_the_disk_as_the_inventory_does():
    assert said(SEEN)[:2] == (["target-not-consented"], ["wipe:serial:S1"])
    assert said(SEEN, replace(WISH, target="/dev/disk/by-id/nvme-eui.1"))[1] == ["wipe:/dev/disk/by-id/nvme-eui.1"]
    assert said(SEEN, granted=["wipe:serial:S2"])[0] == ["target-not-consented"]
    codes, _, plan = said(SEEN, granted=["wipe:serial:S1"])
    assert codes == []
    assert plan[0] == "format /dev/disk/by-id/nvme-M_S1: a GPT with one partition and xfs, by consent wipe:serial:S1"


def test_what_a_disk_holds_is_part_of_the_consent():
    full = replace(SEEN, content=Content(False, "ext4-1234", "holds ext4 1234", "ext4", "1234"))
    assert said(full, granted=["wipe:serial:S1"])[:2] == (["target-not-empty"], ["wipe:serial:S1#ext4-1234"])
    assert said(full, granted=["wipe:serial:S1#ext4-1234"])[0] == []
    parted = replace(full, matched=(replace(NEW, partitions=("nvme1n1p1",)),))
    assert said(parted, granted=["wipe:serial:S1", "wipe:serial:S1#ext4-1234"])[:2] == (["target-has-partitions"], [])


def test_a_consent_is_spent_on_one_migration():
    spent = replace(SEEN, spent={"wipe:serial:S1": "m0"})
    assert said(spent, granted=["wipe:serial:S1"])[:2] == (["target-not-consented"], ["wipe:serial:S1#2"])
    # The very migration that spent it and was cut short goes on, with the disk half formatted.
    begun = replace(SEEN, record=RECORD, spent={"wipe:serial:S1": "m1"}, content=Content(False, "unknown", "holds data"))
    assert said(begun)[0] == []
    # What someone else has put there since is not ours to overwrite.
    theirs = replace(begun, content=Content(False, "xfs-9", "holds xfs 9", "xfs", "9"))
    assert said(theirs)[0] == ["target-not-empty"]


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({"source": replace(SOURCE, used_bytes=15 * TIB)}, ["target-too-small"]),
        ({"source": replace(SOURCE, nested=("/data/x",))}, ["source-nested-mounts"]),
        ({"source": replace(SOURCE, under=(2, ("a", "b")))}, ["mount-point-not-empty"]),
        ({"source": replace(SOURCE, state_inside=True)}, ["state-on-source"]),
        ({"source": replace(SOURCE, hung=True)}, ["source-hung"]),
        ({"source": replace(SOURCE, mount=replace(OLD_MOUNT, root="/sub"))}, ["source-is-bind"]),
        ({"source": Source()}, ["source-not-mounted"]),
        ({"exclusive": False}, ["target-in-use"]),
        ({"matched": (replace(NEW, used_by=("held by dm-0",)),)}, ["target-in-use"]),
        ({"matched": (replace(NEW, read_only=True),)}, ["target-read-only"]),
        ({"matched": ()}, ["target-missing"]),
        ({"missing_tools": ("mkfs.xfs",)}, ["migration-tools-missing"]),
        ({"record": replace(RECORD, phase="copied", target="serial:other")}, ["migration-to-another"]),
    ],
)
def test_what_speaks_against_it_is_said_before_the_first_change(change, codes):
    found, _, plan = said(replace(SEEN, **change), granted=["wipe:serial:S1"])
    assert (found, plan) == (codes, [])


def test_room_counts_what_the_run_will_still_write():
    assert said(SEEN, replace(WISH, need_bytes=4 * TIB), ["wipe:serial:S1"])[0] == []
    assert said(SEEN, replace(WISH, need_bytes=4 * TIB, reserve_bytes=TIB), ["wipe:serial:S1"])[0] == ["target-too-small"]
    many = replace(SEEN, source=replace(SOURCE, used_inodes=2 * 10**9))
    assert said(many, replace(WISH, fstype="ext4"), ["wipe:serial:S1"])[0] == ["target-few-inodes"]


def test_a_lost_source_is_never_one_that_answers():
    lost = replace(WISH, lost=True)
    assert said(SEEN, lost, ["wipe:serial:S1"])[0] == ["source-not-lost"]
    codes, _, plan = said(replace(SEEN, source=Source()), lost, ["wipe:serial:S1"])
    assert codes == []
    assert not any("copy" in action for action in plan)


def test_links_are_sorted_as_people_know_disks(tmp_path):
    device = tmp_path / "nvme0n1"
    device.touch()
    (tmp_path / "links").mkdir()
    for name in ("wwn-0x5", "nvme-eui.0025", "nvme-KIOXIA_S1_1", "nvme-KIOXIA_S1"):
        (tmp_path / "links" / name).symlink_to(device)
    names = blockdev._links(str(tmp_path / "links"))[str(device)]
    assert [name.rpartition("/")[2] for name in names][:2] == ["nvme-KIOXIA_S1", "nvme-KIOXIA_S1_1"]
