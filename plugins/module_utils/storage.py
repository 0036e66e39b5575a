# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Is a path on the right, healthy, writable storage with room for the run? And the removal of what was consented to.

Everything that touches the storage may hang and is called through `bounded`: these functions are what runs in the child.
"""

from __future__ import annotations

import errno
import heapq
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import durable, kernel_log, mounts
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.journal import Journal

PROBE = ".relight-probe-"
PROBE_BYTES = 4096
BY_UUID = "/dev/disk/by-uuid"
LARGEST = 20  # how many files are kept in mind while walking
OFFERED = 5  # how many of them are named at the most
WALK_ENTRIES = 2_000_000
CONSENT = "remove:"
SPENT = "spent"


@dataclass(frozen=True)
class Large:
    """A file that takes room. `bytes` is what it takes on the disk; `identity` tells it from a later one of its name.

    The identity leaves the device's number out, which a reboot may change.
    """

    path: str
    bytes: int
    identity: tuple[int, int, int]
    open_by: int | None = None


@dataclass(frozen=True)
class KnownMount:
    """A mount of the baseline beside what is there now; `now` is None where the path is gone. `hung`: it did not answer."""

    path: str
    before: dict[str, Any]
    now: dict[str, Any] | None
    hung: bool = False


@dataclass(frozen=True)
class Storage:
    """What was seen of a path. `write_errno` is of the timed write; None where it went well or was not tried."""

    path: str
    exists: bool = True
    mount: mounts.Mount | None = None
    is_mount_point: bool = False
    uuid_device: tuple[int, int] | None = None
    total_bytes: int = 0
    free_bytes: int = 0
    total_inodes: int = 0
    free_inodes: int = 0
    write_seconds: float | None = None
    write_errno: int | None = None
    largest: tuple[Large, ...] = ()
    walked_all: bool = True
    log: kernel_log.Log | None = None
    devices: frozenset[str] = frozenset()
    known_mounts: tuple[KnownMount, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the small write failed for want of room."""
        return self.write_errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Need:
    """What the run asks of the storage."""

    bytes: int = 0
    inodes: int = 0
    reserve_bytes: int = 0
    mounted: bool = False
    uuid: str | None = None
    kernel_log: str = "auto"  # auto | required | off
    moved_to: str | None = None  # the UUID of the file system that a migration of ours moved the data to

    def short_bytes(self, seen: Storage) -> int:
        return max(0, max(self.bytes + self.reserve_bytes, PROBE_BYTES) - seen.free_bytes)

    def short_inodes(self, seen: Storage) -> int:
        """File systems that count no inodes (btrfs) are never short of them."""
        return max(0, self.inodes - seen.free_inodes) if seen.total_inodes else 0


def look(path: str, uuid: str | None) -> Storage:
    """Where the path lies and how much room there is. Raises OSError."""
    if not os.path.isdir(path):
        return Storage(path, exists=False)
    real = os.path.realpath(path)
    mount = mounts.holding(real, mounts.read())
    room = os.statvfs(real)
    return Storage(
        path,
        mount=mount,
        is_mount_point=mount is not None and mount.point == real,
        uuid_device=_device(uuid) if uuid else None,
        total_bytes=room.f_blocks * room.f_frsize,
        free_bytes=room.f_bavail * room.f_frsize,
        total_inodes=room.f_files,
        free_inodes=room.f_favail,
    )


def _device(uuid: str) -> tuple[int, int] | None:
    try:
        number = os.stat(os.path.join(BY_UUID, uuid)).st_rdev
    except FileNotFoundError:
        return None
    return os.major(number), os.minor(number)


def try_write(path: str) -> tuple[float, int | None]:
    """Create, sync and remove a small file: the seconds that it took, and the errno where it failed."""
    _sweep_probes(path)
    name = os.path.join(path, f"{PROBE}{os.getpid()}")
    start = time.monotonic()
    failed = None
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(PROBE_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        durable.fsync_directory(path)
    except OSError as error:
        failed = error.errno or errno.EIO
    try:
        os.unlink(name)
    except FileNotFoundError:
        pass
    except OSError as error:
        failed = failed or error.errno
    return time.monotonic() - start, failed


def _sweep_probes(path: str) -> None:
    """Take away what a probe that was killed left behind."""
    for name in os.listdir(path):
        pid = name[len(PROBE) :]
        if name.startswith(PROBE) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            try:
                os.unlink(os.path.join(path, name))
            except OSError:
                pass  # the write that follows tells what is wrong


def inside(path: str, folders: tuple[str, ...]) -> bool:
    """Whether a real path is one of the real folders or below one."""
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def find_largest(path: str, kept: tuple[str, ...], named: frozenset[str] = frozenset()) -> tuple[tuple[Large, ...], bool]:
    """The largest regular files below `path` on its own device and outside of `kept`, with those `named`, largest first.

    Also whether everything was walked.
    """
    real = os.path.realpath(path)
    device = os.stat(real).st_dev
    folders = tuple(os.path.realpath(folder) for folder in kept)
    heap: list[tuple[int, str, tuple[int, int, int]]] = []
    also: list[tuple[int, str, tuple[int, int, int]]] = []
    entries = 0
    for name, status in _files(real, device, folders):
        entries += 1
        if entries > WALK_ENTRIES:
            break
        item = (status.st_blocks * 512, name, identity(status))
        if name in named:
            also.append(item)
        elif len(heap) < LARGEST:
            heapq.heappush(heap, item)
        else:
            heapq.heappushpop(heap, item)
    found = [Large(name, size, who) for size, name, who in sorted(heap + also, reverse=True) if size > 0]
    held = open_by({(device, file.identity[0]) for file in found})
    return tuple(replace(file, open_by=held.get((device, file.identity[0]))) for file in found), entries <= WALK_ENTRIES


def identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _files(root: str, device: int, kept: tuple[str, ...]) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files, links not followed; folders that cannot be read or lie on another device are left out."""
    todo = [] if inside(root, kept) else [root]
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if status.st_dev != device or inside(entry.path, kept):
                continue
            if stat.S_ISDIR(status.st_mode):
                todo.append(entry.path)
            elif stat.S_ISREG(status.st_mode) and not entry.name.startswith((PROBE, durable.TEMPORARY)):
                yield entry.path, status


def open_by(inodes: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Which of the (device, inode) pairs a process that we may look into has open, and a pid of such."""
    found: dict[tuple[int, int], int] = {}
    for pid in [name for name in os.listdir("/proc") if name.isdigit()] if inodes else []:
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for number in numbers:
            try:
                status = os.stat(f"/proc/{pid}/fd/{number}")
            except OSError:
                continue
            if (status.st_dev, status.st_ino) in inodes:
                found[status.st_dev, status.st_ino] = int(pid)
    return found


# ---- judging -----------------------------------------------------------------------------------------------------


def judge(seen: Storage, need: Need, offers: tuple[Offer, ...] = ()) -> Gate:
    """Compare what was seen with what the run needs. `offers` are the files that could make room."""
    gate = Gate("storage_check", _evidence(seen, need))
    if not seen.exists:
        gate.problems.append(Problem("storage-path-missing", seen.path, "there is no such directory", "mount or create it"))
        return gate
    gate.problems += [
        *_mount_problems(seen, need),
        *_baseline_problems(seen, need),
        *_log_problems(seen, need),
        *_write_problems(seen),
        *_room_problems(seen, need, offers),
    ]
    return gate


def _evidence(seen: Storage, need: Need) -> dict[str, Any]:
    mount = seen.mount
    return {
        "mount_point": mount.point if mount else None,
        "fstype": mount.fstype if mount else None,
        "source": mount.source if mount else None,
        "total_bytes": seen.total_bytes,
        "free_bytes": seen.free_bytes,
        "free_inodes": seen.free_inodes,
        "need_bytes": need.bytes,
        "reserve_bytes": need.reserve_bytes,
        "need_inodes": need.inodes,
        "write_seconds": round(seen.write_seconds, 4) if seen.write_seconds is not None else None,
        "walked_all": seen.walked_all,
        "kernel_log": _log_evidence(seen),
        "baseline_mounts": len(seen.known_mounts),
    }


def _log_evidence(seen: Storage) -> Any:
    if seen.log is None:
        return "not asked for"
    if seen.log.error:
        return f"not read: {seen.log.error}"
    mine = kernel_log.of(seen.log, seen.devices)
    return {"events": len(mine), "of_other_devices": len(seen.log.events) - len(mine)}


def _mount_problems(seen: Storage, need: Need) -> list[Problem]:
    found = []
    if need.mounted and not seen.is_mount_point:
        point = seen.mount.point if seen.mount else "nothing"
        what = f"nothing is mounted there: it is a bare directory on {point}, and what is written there would fill that"
        found.append(Problem("storage-not-mounted", seen.path, what, f"mount {seen.path}"))
    elif need.uuid and seen.uuid_device is None:
        found.append(Problem("storage-device-missing", seen.path, f"no device has the UUID {need.uuid}", "attach it, or correct the UUID"))
    elif need.uuid and seen.mount and seen.uuid_device != seen.mount.device:
        what = f"{seen.mount.source} is mounted there, not the device with the UUID {need.uuid}"
        found.append(Problem("storage-other-device", seen.path, what, "mount the right device"))
    if seen.mount and seen.mount.read_only:
        remedy = "see the kernel's log for why, repair the file system, then mount -o remount,rw"
        found.append(Problem("storage-read-only", seen.path, f"{seen.mount.point} is mounted read-only", remedy))
    return found


def _baseline_problems(seen: Storage, need: Need) -> list[Problem]:
    """Is every path where it was when the host was adopted? Devices are named by what survives a reboot."""
    found = []
    again = "mount the right device; if the change was meant, run adopt.yml again once the host is clear"
    for known in seen.known_mounts:
        before, now = known.before, known.now
        if known.hung:
            remedy = "see the storage behind it; a frozen reader cannot be killed"
            found.append(Problem("mount-hung", known.path, "the mount did not answer", remedy, Verdict.UNKNOWN))
        elif now is None:
            what = f"it is gone; in the baseline it lay on {before.get('mount_point')}"
            found.append(Problem("storage-not-baseline", known.path, what, again))
        elif need.moved_to and now.get("uuid") == need.moved_to:
            continue  # our own migration moved it
        elif before.get("mount_point") != now["mount_point"]:
            what = f"it lies on {now['mount_point']} now, in the baseline on {before.get('mount_point')}"
            found.append(Problem("storage-not-baseline", known.path, what, again))
        elif before.get("uuid") and now["uuid"] is None:
            what = f"the UUID of what is mounted there cannot be told; the baseline says {before['uuid']}"
            remedy = "look with become; in a container, show /dev/disk to it"
            found.append(Problem("storage-uuid-unknown", known.path, what, remedy, Verdict.UNKNOWN))
        elif before.get("uuid") and now["uuid"] != before["uuid"]:
            what = f"the file system {now['uuid']} is mounted there, in the baseline {before['uuid']}"
            found.append(Problem("storage-not-baseline", known.path, what, again))
        elif before.get("by_id") and now["by_id"] and now["by_id"] != before["by_id"]:
            what = f"the same file system lies on {now['by_id']} now, in the baseline on {before['by_id']}: one of them may be a copy"
            remedy = "see which disk is meant; a copy must not be mounted beside its original"
            found.append(Problem("storage-other-disk", known.path, what, remedy, Verdict.WARN))
        elif not before.get("uuid") and before.get("source") and now["source"] and now["source"] != before["source"]:
            what = f"{now['source']} is mounted there, in the baseline {before['source']}"
            found.append(Problem("storage-not-baseline", known.path, what, again))
    return found


def _log_problems(seen: Storage, need: Need) -> list[Problem]:
    """What the kernel said of this storage since boot: of the last minutes it fails, older it warns."""
    if seen.log is None:
        return []
    if seen.log.error:
        if need.kernel_log != "required":
            return []
        return [Problem("kernel-log-unreadable", "kernel log", seen.log.error, "set relight_become: true", Verdict.UNKNOWN)]
    events = kernel_log.of(seen.log, seen.devices)
    if not events:
        return []
    recent = seen.log.now - events[-1].seconds <= kernel_log.RECENT_SECONDS
    remedy = "see the disk (smartctl, nvme smart-log) and the storage behind it; read what was written since before trusting it"
    verdict = Verdict.FAIL if recent else Verdict.WARN
    return [Problem("storage-errors-logged", seen.path, kernel_log.sentence(events, seen.log.now), remedy, verdict)]


def _write_problems(seen: Storage) -> list[Problem]:
    """A write that fails for want of room is told by the room."""
    if seen.write_errno is None or seen.refused:
        return []
    if seen.write_errno == errno.EROFS and seen.mount and seen.mount.read_only:
        return []
    what = f"a write of {PROBE_BYTES} bytes fails: {os.strerror(seen.write_errno)}"
    if seen.write_errno in (errno.EACCES, errno.EPERM):
        return [Problem("storage-no-permission", seen.path, what, "look as the user that writes there, or with become", Verdict.UNKNOWN)]
    return [Problem("storage-write-fails", seen.path, what, "see the kernel's log; trust no file written since without reading it")]


def _room_problems(seen: Storage, need: Need, offers: tuple[Offer, ...]) -> list[Problem]:
    found = []
    short = need.short_bytes(seen)
    if short or (seen.refused and seen.free_inodes):
        told = f"{short} bytes short of the run's need" if short else f"a write fails: {os.strerror(seen.write_errno or 0)}"
        for offer in offers:
            held = f", open by pid {offer.file.open_by}" if offer.file.open_by else ""
            what = f"{told}; this file takes {offer.file.bytes} bytes{held}"
            remedy = "end that process first" if held else "consent to its removal, or make room another way"
            found.append(Problem("storage-full", offer.file.path, what, remedy, consent=None if held else offer.consent))
        if not offers:
            found.append(Problem("storage-full", seen.path, told, "make room: no file of size lies there but the run's own"))
    lacking = need.short_inodes(seen)
    if lacking or (seen.refused and seen.total_inodes and not seen.free_inodes):
        what = f"{lacking or 'all'} inodes short of the run's need"
        found.append(Problem("storage-inodes", seen.path, what, "remove or pack small files"))
    return found


# ---- making room -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """A file and the exact name that consents to its removal."""

    file: Large
    consent: str


def spent_on(journal: Journal) -> dict[str, list[tuple[int, int, int]]]:
    """Which files each consent was spent on, by the journal."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for line in journal.lines():
        if line.get("event") == SPENT and isinstance(line.get("consent"), str) and isinstance(line.get("identity"), list):
            found.setdefault(line["consent"], []).append(tuple(line["identity"]))
    return found


def consent_for(file: Large, spent: dict[str, list[tuple[int, int, int]]]) -> str:
    """The name that consents to this very file. A name that was spent on an earlier file of that path counts no more."""
    name, number = f"{CONSENT}{file.path}", 1
    while name in spent and file.identity not in spent[name]:
        number += 1
        name = f"{CONSENT}{file.path}#{number}"
    return name


def offers(seen: Storage, need: Need, spent: dict[str, list[tuple[int, int, int]]]) -> tuple[Offer, ...]:
    """The fewest largest files that would make up for what is short, a few at the most."""
    missing = max(need.short_bytes(seen), 1)
    chosen: list[Offer] = []
    for file in seen.largest:
        if missing <= 0 or len(chosen) >= OFFERED:
            break
        chosen.append(Offer(file, consent_for(file, spent)))
        missing -= 0 if file.open_by else file.bytes
    return tuple(chosen)


def paths_of(granted: frozenset[str]) -> frozenset[str]:
    """The paths that consents may speak of; with and without a number behind, since a name may hold a # itself."""
    names = [name[len(CONSENT) :] for name in granted if name.startswith(CONSENT)]
    return frozenset([*names, *(name.rpartition("#")[0] for name in names if "#" in name)])


def consented(seen: Storage, granted: frozenset[str], spent: dict[str, list[tuple[int, int, int]]]) -> list[Offer]:
    """The files that were found and are consented to by their whole name, and that nobody has open."""
    named = [Offer(file, consent_for(file, spent)) for file in seen.largest]
    return [offer for offer in named if offer.consent in granted and offer.file.open_by is None]


def sentence(offer: Offer) -> str:
    return f"remove {offer.file.path} ({offer.file.bytes} bytes), by consent {offer.consent}"


def remove(path: str, file: Large, kept: tuple[str, ...]) -> bool:
    """Remove this very file, looked at once more. False where it is gone. Raises OSError where it is not what was consented to."""
    real = os.path.realpath(path)
    folder = os.path.realpath(os.path.dirname(file.path))
    target = os.path.join(folder, os.path.basename(file.path))
    if target != file.path or not inside(folder, (real,)) or inside(target, tuple(os.path.realpath(keep) for keep in kept)):
        raise OSError(errno.EPERM, f"{file.path} does not lie below {path} outside the store")
    try:
        status = os.stat(target, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode) or identity(status) != file.identity or status.st_dev != os.stat(real).st_dev:
        raise OSError(errno.EPERM, f"{file.path} is no longer the file that was consented to")
    if open_by({(status.st_dev, status.st_ino)}):
        raise OSError(errno.EBUSY, f"{file.path} was opened meanwhile")
    os.unlink(target)
    durable.fsync_directory(folder)
    return True
