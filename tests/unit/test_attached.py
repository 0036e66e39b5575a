# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""storage_attached: what is said of a volume that someone else mounted."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import attached, fstab, mounts
from ansible_collections.relight.recovery.plugins.module_utils.attached import Compared, Seen, Wish

A, B = "aaaaaaaa-0000-0000-0000-000000000001", "bbbbbbbb-0000-0000-0000-000000000002"
GOOD_LINE = f"UUID={A} /data xfs defaults,nofail,x-systemd.device-timeout=300s 0 0\n"
MOUNT = mounts.Mount("/data", "xfs", "/dev/nvme1n1p1", (259, 1), read_only=False)
GOOD = Seen(mount=MOUNT, uuid=A, lines=tuple(fstab.parse(GOOD_LINE)), guard="immutable")
WISH = Wish("/data", uuid=A)


def table(*lines: str) -> Seen:
    return replace(GOOD, lines=tuple(fstab.parse("".join(lines))))


@pytest.mark.parametrize(
    ("seen", "verdict", "codes"),
    [
        (GOOD, "pass", []),
        (replace(GOOD, mount=None), "fail", ["attached-not-mounted"]),
        (replace(GOOD, uuid=B), "fail", ["attached-other-device", "attached-fstab-differs"]),
        (replace(GOOD, uuid=None), "warn", ["attached-uuid-unseen"]),
        (replace(GOOD, mount=replace(MOUNT, read_only=True)), "fail", ["attached-read-only"]),
        (replace(GOOD, guard=""), "warn", ["attached-not-guarded"]),
        (replace(GOOD, guard=None), "pass", []),
        (table(), "fail", ["attached-not-in-fstab"]),
        (table("/dev/nvme1n1p1 /data xfs defaults,nofail 0 0\n"), "fail", ["attached-by-device-name"]),
        (table("/dev/disk/by-id/nvme-X /data xfs nofail 0 0\n"), "pass", []),
        (table(f"UUID={B} /data xfs nofail 0 0\n"), "fail", ["attached-fstab-differs"]),
        (table(f"UUID={A.upper()} /data xfs defaults 0 0\n"), "warn", ["attached-no-nofail"]),
        (table(GOOD_LINE, GOOD_LINE), "fail", ["attached-twice-in-fstab"]),
        # In a container the table of mounts is another host's.
        (replace(table(), outside=True, uuid=None, guard=""), "warn", ["attached-uuid-unseen"]),
        (replace(GOOD, absent=("/data/models",)), "fail", ["attached-path-missing"]),
        (replace(GOOD, stale_units=(("/etc/systemd/system/x.service", "/mnt/ceph"),)), "warn", ["attached-stale-path"]),
        (replace(GOOD, old=Compared(3, 10, (("a", "is not there"),), 1)), "fail", ["attached-file-differs"]),
        (replace(GOOD, old=Compared(3, 10, unreadable=1)), "warn", ["attached-old-unreadable"]),
        (replace(GOOD, old_error="did not answer"), "warn", ["attached-old-unreadable"]),
    ],
)
def test_judge(seen, verdict, codes):
    gate = attached.judge(WISH, seen)
    assert (gate.verdict.word, [problem.code for problem in gate.problems]) == (verdict, codes)


def test_the_remedy_is_the_line_to_paste():
    gate = attached.judge(WISH, table("/dev/sdb1 /data xfs noatime 0 0\n"))
    line = f"UUID={A} /data xfs defaults,noatime,nofail,x-systemd.device-timeout=300s 0 0"
    assert gate.problems[0].remedy.endswith(line)


def test_an_inventory_that_names_the_former_path():
    gate = attached.judge(replace(WISH, paths=("/mnt/ceph/models", "/mnt/cephfs"), former=("/mnt/ceph",)), GOOD)
    assert [(problem.code, problem.where) for problem in gate.problems] == [("attached-path-stale", "/mnt/ceph/models")]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ExecStart=/usr/bin/x /mnt/ceph/data", True),
        ("RequiresMountsFor=/mnt/ceph", True),
        ("X=/mnt/ceph\n", True),
        ("X='/mnt/ceph'", True),
        ("/mnt/cephfs", False),
        ("/srv/mnt/ceph", False),
        ("/mnt/ceph-2 and /mnt/ceph", True),
    ],
)
def test_paths_are_found_whole(text, named):
    assert attached.names_path(text, "/mnt/ceph") is named


def test_the_old_copy_is_compared_newest_first(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        (folder / "sub").mkdir(parents=True)
        for index in range(4):
            (folder / "sub" / f"{index}").write_bytes(bytes([index]) * 1000)
            os.utime(folder / "sub" / f"{index}", (index, index))
    assert attached.compare(str(old), str(new), 1 << 20) == Compared(4, 4000)
    (new / "sub/0").write_bytes(b"!" * 1000)
    (new / "sub/3").write_bytes(b"!" * 1000)
    (new / "sub/1").unlink()
    (new / "sub/2").write_bytes(b"short")
    found = attached.compare(str(old), str(new), 1500)
    assert sorted(found.wrong) == [
        ("sub/0", "has other bytes there"),
        ("sub/1", "is not there"),
        ("sub/2", "has 5 bytes there, 1000 in the old copy"),
        ("sub/3", "has other bytes there"),
    ]
    assert [path for path, _ in attached.compare(str(old), str(new), 1000).wrong if path in ("sub/0", "sub/3")] == ["sub/3"]
