# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What a storage migration would do, and whether it may: everything is looked at and judged before the first change."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import bare, blockdev, bounded, migration, mounts
from ansible_collections.relight.recovery.plugins.module_utils.blockdev import Content, Disk
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.journal import Journal
from ansible_collections.relight.recovery.plugins.module_utils.migration import Record

NAME = "storage_migrate"
WIPE, RECLAIM, LAZY = "wipe:", "reclaim:", "lazy-umount:"
SPENT, FORMATTED = "spent", "formatted"
LABEL = "relight-data"
FILE_SYSTEMS = ("xfs", "ext4")
SPARE = {"xfs": 0.02, "ext4": 0.06}  # what a file system takes of a disk for itself
LOG_BYTES = 80 << 20
EXT4_BYTES_PER_INODE = 16384
SEARCH = "/usr/sbin:/sbin:/usr/bin:/bin"


@dataclass(frozen=True)
class Wish:
    """What the inventory asks for."""

    data: str
    target: str
    state_dir: str
    fstype: str = "xfs"
    partitioned: bool = True
    lost: bool = False
    need_bytes: int = 0
    need_inodes: int = 0
    reserve_bytes: int = 0
    stage: str = "/mnt/relight-new"
    aside: str = "/mnt/relight-old"
    fstab: str = "/etc/fstab"
    options: str = "noatime"
    device_timeout: int = 300
    look_seconds: float = 20.0


@dataclass(frozen=True)
class Source:
    """The volume that is to be left. `hung` where it does not answer."""

    mount: mounts.Mount | None = None
    hung: bool = False
    uuid: str = ""
    device: str = ""
    used_bytes: int = 0
    used_inodes: int = 0
    nested: tuple[str, ...] = ()
    under: tuple[int, tuple[str, ...]] = (0, ())
    state_inside: bool = False


@dataclass(frozen=True)
class Seen:
    """All that was looked at."""

    record: Record | None
    found: tuple[Disk, ...]
    matched: tuple[Disk, ...]
    content: Content | None
    device: Disk | None  # what carries the file system: the disk, or its one partition
    device_uuid: str
    exclusive: bool
    source: Source
    missing_tools: tuple[str, ...]
    spent: Mapping[str, str] = field(default_factory=dict)
    mounted: tuple[mounts.Mount, ...] = ()

    @property
    def disk(self) -> Disk | None:
        return self.matched[0] if len(self.matched) == 1 else None

    @property
    def ours(self) -> bool:
        """Whether the target carries the file system of this host's migration."""
        return self.record is not None and self.device_uuid == self.record.target_uuid

    def mounted_at(self, point: str) -> mounts.Mount | None:
        """What is mounted there on top."""
        return next((mount for mount in reversed(self.mounted) if mount.point == point), None)

    def is_target(self, mount: mounts.Mount | None) -> bool:
        return mount is not None and self.device is not None and self.ours and mount.device == self.device.number


# --- looking -----------------------------------------------------------------------------------------------------------


def spent_on(journal: Journal) -> dict[str, str]:
    """Which migration each consent was spent on, by the journal."""
    return {
        line["consent"]: line["migration"]
        for line in journal.lines()
        if line.get("event") == SPENT and isinstance(line.get("consent"), str) and isinstance(line.get("migration"), str)
    }


def unseen(record: Record | None) -> Seen:
    """The record alone, with nothing looked at."""
    return Seen(record, (), (), None, None, "", False, Source(), ())


def look(wish: Wish, journal: Journal) -> Seen:
    """Raises OSError, blockdev.CannotLook, migration.NotOurs, bounded.TimedOut, bounded.ChildFailed."""
    record = migration.read(wish.state_dir)
    found = bounded.call(blockdev.disks, (), wish.look_seconds)
    matched = bounded.call(blockdev.matching, (wish.target, found), wish.look_seconds) if wish.target else []
    content = device = None
    uuid, exclusive = "", False
    if len(matched) == 1:
        content, device, uuid, exclusive = bounded.call(_target, (matched[0], found), 3 * wish.look_seconds)
    tools = ["blkid", "wipefs", "findmnt", "mount", "umount", f"mkfs.{wish.fstype}", *(["sfdisk"] if wish.partitioned else [])]
    return Seen(
        record=record,
        found=tuple(found),
        matched=tuple(matched),
        content=content,
        device=device,
        device_uuid=uuid,
        exclusive=exclusive,
        source=_source(wish),
        missing_tools=tuple(tool for tool in tools if not shutil.which(tool, path=f"{os.environ.get('PATH', '')}:{SEARCH}")),
        spent=spent_on(journal),
        mounted=tuple(mounts.read()),
    )


def _target(disk: Disk, found: list[Disk]) -> tuple[Content, Disk, str, bool]:
    content = blockdev.content(disk)
    device = blockdev.partition_of(disk, found) or disk
    return content, device, blockdev.uuid_of(device.device), blockdev.opens_exclusively(disk.device)


def _source(wish: Wish) -> Source:
    table = mounts.read()
    mount = next((mount for mount in reversed(table) if mount.point == wish.data), None)
    if mount is None:
        return Source()
    nested = tuple(sorted({other.point for other in table if other.point.startswith(f"{wish.data}/")}))
    try:
        room = bounded.call(os.statvfs, (wish.data,), wish.look_seconds)
        inside = bounded.call(_device_of, (wish.state_dir,), wish.look_seconds) == mount.device
    except bounded.TimedOut:
        return Source(mount=mount, hung=True, nested=nested, device=mount.source)
    under = bare.names(wish.data)
    return Source(
        mount=mount,
        uuid=bounded.call(blockdev.uuid_of, (mount.source,), wish.look_seconds) if mount.source.startswith("/dev/") else "",
        device=mount.source,
        used_bytes=(room.f_blocks - room.f_bfree) * room.f_frsize,
        used_inodes=room.f_files - room.f_ffree,
        nested=nested,
        under=(under[0], tuple(under[1])),
        state_inside=inside,
    )


def _device_of(path: str) -> tuple[int, int]:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    number = os.stat(path).st_dev
    return os.major(number), os.minor(number)


# --- judging: pure -----------------------------------------------------------------------------------------------------


def consent_for(base: str, spent: Mapping[str, str], of: str = "") -> str:
    """The name that is asked for. One that was spent on another migration counts no more."""
    name, number = base, 1
    while name in spent and spent[name] != of:
        number += 1
        name = f"{base}#{number}"
    return name


def wipe_consent(wish: Wish, seen: Seen) -> str:
    """What formatting this disk takes: its stable name, as the inventory has it, and with it what would be destroyed, if anything."""
    if seen.disk is None or seen.content is None:
        return ""
    begun = seen.record.id if seen.record and seen.record.phase == "preparing" else ""
    base = f"{WIPE}{wish.target if wish.target in seen.disk.names else seen.disk.name}"
    if begun and any(migrated == begun and name.startswith(base) for name, migrated in seen.spent.items()):
        return next(name for name, migrated in seen.spent.items() if migrated == begun and name.startswith(base))
    return consent_for(base if seen.content.empty else f"{base}#{seen.content.fingerprint}", seen.spent)


def begun(seen: Seen) -> bool:
    """Whether the consent was spent on this very migration and the formatting may have been cut short."""
    record = seen.record
    return record is not None and record.phase == "preparing" and record.id in seen.spent.values()


def room_bytes(wish: Wish, seen: Seen) -> int:
    """What a file system on the target will hold, carefully."""
    size = seen.device.size_bytes if seen.device else 0
    return max(0, size - LOG_BYTES - int(size * SPARE[wish.fstype]))


def need_bytes(wish: Wish, seen: Seen) -> int:
    return seen.source.used_bytes + wish.need_bytes + wish.reserve_bytes


def to_format(seen: Seen) -> bool:
    return not seen.ours


def finished(seen: Seen) -> bool:
    return seen.record is not None and seen.record.phase in ("cut_over", "reclaimed")


def actions(wish: Wish, seen: Seen) -> list[str]:
    """The whole plan as sentences."""
    source, disk = seen.source, seen.disk
    name = disk.name if disk else wish.target
    plan = []
    if to_format(seen):
        table = "a GPT with one partition and " if wish.partitioned and not (disk and disk.partition) else ""
        plan.append(f"format {name}: {table}{wish.fstype}, by consent {wipe_consent(wish, seen)}")
    if not seen.is_target(seen.mounted_at(wish.stage)):
        plan.append(f"mount it at {wish.stage}")
    if not wish.lost:
        plan += [
            f"copy {source.used_bytes} bytes in about {source.used_inodes} files from {wish.data}, and read every file back",
            f"stop our writers, make {wish.data} read-only, and copy what changed meanwhile",
        ]
    plan.append(f"edit {wish.fstab} so that {wish.data} is the new file system")
    plan.append(f"mount it at {wish.data}" + ("" if wish.lost else f", and the old one read-only at {wish.aside}"))
    plan.append(f"guard the bare directory {wish.data} against writes")
    return plan


def judge(wish: Wish, seen: Seen, granted: frozenset[str]) -> tuple[Gate, list[str]]:
    """The gate, and the plan's actions; none where the migration is done or may not begin."""
    gate = Gate(NAME, evidence(wish, seen))
    record = seen.record
    if record is not None and finished(seen) and wish.data == record.data and (seen.ours or wish.target in ("", record.target)):
        gate.problems += _done_problems(wish, seen)
        return gate, []
    gate.problems += [*_name_problems(wish, seen), *_source_problems(wish, seen, granted)]
    if seen.missing_tools:
        what = f"not installed: {', '.join(seen.missing_tools)}"
        gate.problems.append(
            Problem("migration-tools-missing", "this host", what, "install them: util-linux, fdisk, xfsprogs or e2fsprogs")
        )
    if seen.disk is not None and seen.content is not None:
        gate.problems += [*_disk_problems(wish, seen, granted), *_room_problems(wish, seen)]
    return gate, [] if any(p.verdict >= Verdict.FAIL for p in gate.problems) else actions(wish, seen)


def evidence(wish: Wish, seen: Seen) -> dict[str, Any]:
    source, disk, record = seen.source, seen.disk, seen.record
    return {
        "phase": record.phase if record else "none",
        "migration": record.id if record else None,
        "target": disk.name if disk else wish.target or None,
        "target_device": disk.device if disk else None,
        "target_bytes": disk.size_bytes if disk else None,
        "target_holds": seen.content.told or "nothing" if seen.content else None,
        "target_uuid": record.target_uuid if record else None,
        "source_uuid": source.uuid or (record.source_uuid if record else ""),
        "source_device": source.device or None,
        "used_bytes": source.used_bytes,
        "used_inodes": source.used_inodes,
        "need_bytes": need_bytes(wish, seen),
        "room_bytes": room_bytes(wish, seen),
    }


def _done_problems(wish: Wish, seen: Seen) -> list[Problem]:
    record = seen.record
    mount = seen.mounted_at(wish.data)
    if record is None or mount is None:
        what = f"the migration is done, but nothing is mounted at {wish.data}"
        return [Problem("migrated-not-mounted", wish.data, what, f"mount {wish.data}; see why its device came late or not at all")]
    number = next((disk.number for disk in seen.found if disk.device == mount.source), mount.device)
    mine = seen.device.number if seen.device and seen.ours else None
    if mine is not None and mine not in (mount.device, number):
        what = f"{mount.source} is mounted there, not the file system {record.target_uuid} that the data was moved to"
        return [Problem("migrated-other-device", wish.data, what, "unmount it and mount the right one, or roll back")]
    return []


def _name_problems(wish: Wish, seen: Seen) -> list[Problem]:
    record = seen.record
    free = [disk for disk in seen.found if not disk.used_by and not disk.partition and disk.name]
    listed = ", ".join(f"{disk.name} ({disk.size_bytes} bytes)" for disk in free) or "none"
    if not wish.target:
        return [Problem("target-not-named", "storage_migration_target", "is not set", f"set it to one of the disks nobody uses: {listed}")]
    kernel = [disk for disk in seen.found if disk.device == wish.target]
    if not seen.matched and kernel:
        other = kernel[0].name or "nothing that lasts"
        what = f"{wish.target} is a name that may mean another disk after a reboot"
        return [Problem("target-name-unstable", wish.target, what, f"name the disk by what lasts: {other}")]
    if not seen.matched:
        return [Problem("target-missing", wish.target, "no disk of this host bears that name", f"attach it, or name one of: {listed}")]
    if len(seen.matched) > 1:
        those = ", ".join(f"{disk.device} ({disk.names[-1] if disk.names else 'no name'})" for disk in seen.matched)
        return [
            Problem("target-ambiguous", wish.target, f"several disks bear that name: {those}", "name it by its link in /dev/disk/by-id")
        ]
    over = record is None or finished(seen) or record.phase in ("planned", "rolled_back")
    if record is not None and not over and not seen.ours and record.target != seen.matched[0].name:
        what = f"a migration to {record.target} is under way (phase {record.phase})"
        return [Problem("migration-to-another", wish.target, what, "finish that one, or run playbooks/rollback.yml first")]
    return []


def _source_problems(wish: Wish, seen: Seen, granted: frozenset[str]) -> list[Problem]:
    source = seen.source
    found = []
    if wish.lost:
        if source.mount and not source.hung and not seen.is_target(source.mount):
            remedy = "unmount it, or set storage_migration_source to mounted so that it is copied"
            found.append(Problem("source-not-lost", wish.data, f"{source.mount.source} is mounted there and answers", remedy))
        return found
    if source.mount is None:
        resumed = seen.record is not None and seen.record.phase == "cutting_over"
        if not resumed:
            remedy = "mount it; if its disk is lost for good, set storage_migration_source to lost"
            found.append(Problem("source-not-mounted", wish.data, "nothing is mounted there, so there is nothing to copy", remedy))
        return found
    if source.hung:
        consent = f"{LAZY}{wish.data}"
        if consent not in granted:
            what = f"{source.mount.source} does not answer within {wish.look_seconds:g} s"
            remedy = "bring its storage back; or consent to leave it as it is: what can be read of it is copied"
            found.append(Problem("source-hung", wish.data, what, remedy, consent=consent))
    if source.nested:
        what = f"further file systems are mounted below it: {', '.join(source.nested)}"
        found.append(Problem("source-nested-mounts", wish.data, what, "unmount them, or move them by hand"))
    if source.under[0] and not seen.is_target(source.mount):
        some = ", ".join(source.under[1])
        what = f"the bare directory under the mount holds {source.under[0]} names ({some}): written while nothing was mounted"
        found.append(Problem("mount-point-not-empty", wish.data, what, "look at them through a bind mount of / and move them away"))
    if source.state_inside:
        found.append(Problem("state-on-source", wish.state_dir, f"lies on the volume {wish.data}", "keep relight_state_dir on another"))
    if source.mount.root != "/":
        found.append(Problem("source-is-bind", wish.data, f"shows only {source.mount.root} of its file system", "use strategy attached"))
    return found


def _disk_problems(wish: Wish, seen: Seen, granted: frozenset[str]) -> list[Problem]:
    disk, content = seen.disk, seen.content
    if disk is None or content is None:
        return []
    name = disk.name or disk.device
    mine = {wish.stage, wish.data, wish.aside}
    used = [who for who in disk.used_by if not (seen.ours and who.startswith("mounted at ") and who[11:] in mine)]
    if used:
        return [Problem("target-in-use", name, ", ".join(used), "name another disk, or free this one")]
    if not disk.names:
        return [Problem("target-name-unstable", disk.device, "has no name that lasts", "use a disk with a serial number or a wwn")]
    if disk.read_only:
        return [Problem("target-read-only", name, "the disk is read-only", "see why, or name another")]
    if seen.ours:
        return []
    if not seen.exclusive:
        return [Problem("target-in-use", name, "something holds it open exclusively", "see what: lsof, dmsetup, mdadm")]
    if begun(seen) and not _foreign(seen):
        return []
    if disk.partitions:
        return [Problem("target-has-partitions", name, content.told, "look at them; if they may go, remove them by hand (wipefs)")]
    consent = wipe_consent(wish, seen)
    if consent in granted:
        return []
    told = "it is empty" if content.empty else f"it {content.told}, which would be destroyed"
    code = "target-not-consented" if content.empty else "target-not-empty"
    what = f"{disk.device}, {disk.size_bytes} bytes, {disk.model or 'model unknown'}: {told}"
    return [Problem(code, name, what, "if this is the disk and it may be formatted, consent", consent=consent)]


def _foreign(seen: Seen) -> bool:
    """Whether a disk that we had begun to format now carries a file system that is not ours."""
    return bool(seen.content and seen.content.fstype and seen.record and seen.content.uuid != seen.record.target_uuid)


def _room_problems(wish: Wish, seen: Seen) -> list[Problem]:
    if seen.ours and seen.record is not None and seen.record.reached("prepared"):
        return []  # judged on the file system itself
    short = need_bytes(wish, seen) - room_bytes(wish, seen)
    found = []
    where = seen.disk.name if seen.disk else wish.target
    if short > 0:
        what = f"{short} bytes short of what the source holds, the run will still write and the reserve"
        found.append(Problem("target-too-small", where, what, "attach a larger disk, or make room at the source first"))
    inodes = (seen.device.size_bytes if seen.device else 0) // EXT4_BYTES_PER_INODE
    if wish.fstype == "ext4" and seen.source.used_inodes + wish.need_inodes > inodes:
        what = f"ext4 would have {inodes} inodes, fewer than the files"
        found.append(Problem("target-few-inodes", where, what, "set storage_migration_fstype to xfs"))
    return found


def new_record(wish: Wish, seen: Seen, id_: str, uuid: str) -> Record:
    """The record of a migration that begins now."""
    source = seen.source
    return Record(
        id=id_,
        phase="planned",
        data=wish.data,
        source="" if wish.lost else wish.data,
        source_uuid=source.uuid,
        source_device=source.device,
        source_fstype=source.mount.fstype if source.mount else "",
        target=seen.disk.name if seen.disk else wish.target,
        target_uuid=uuid,
        fstype=wish.fstype,
        stage=wish.stage,
        aside=wish.aside,
        fstab=wish.fstab,
        options=wish.options,
        partitioned=wish.partitioned and not (seen.disk is not None and seen.disk.partition),
        size_bytes=seen.disk.size_bytes if seen.disk else 0,
        times={"planned": round(time.time(), 3)},
    )
