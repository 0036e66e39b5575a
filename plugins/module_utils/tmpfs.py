# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Is a tmpfs large and empty enough for the coming run? And the sweep of what dead processes left in it.

A segment is swept only when its creator is proven dead, by the pid in its name, and no process has it open or mapped.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import mounts, procs
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.services import UNIT

# Names of shared memory, with the creator's pid where they tell it.
FAMILIES = (
    ("sglang", re.compile(r"sgl_shm_.+_(\d+)_[^_]+$")),
    ("sglang", re.compile(r"multi_tokenizer_args_(\d+)$")),
    ("sglang", re.compile(r"sglang_loads_")),
    ("nccl", re.compile(r"nccl-")),
    ("cuda", re.compile(r"cuda\.shm\.")),
    ("torch", re.compile(r"torch_(\d+)_")),
    ("loky", re.compile(r"sem\.loky-(\d+)-")),
)
DUMP_TEMPORARY = re.compile(r"\.relight-.+\.(\d+)\.tmp$")
DUMP = re.compile(r"relight-[A-Za-z0-9._-]+$")
EXTRACT_UNIT = "relight-extract"
INIT = 1
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
NAMED = 10  # how many segments are told one by one


@dataclass(frozen=True)
class Segment:
    """A file in the tmpfs. `creator_alive` is None where its name does not tell who made it.

    `open_by` is a process that has it open or mapped; `surely_free` says that no process which could have it was hidden.
    """

    path: str
    family: str
    bytes: int
    inode: tuple[int, int] = (0, 0)
    uid: int = 0
    creator: int | None = None
    creator_alive: bool | None = None
    open_by: int | None = None
    surely_free: bool = True

    @property
    def orphan(self) -> bool:
        """Whether it may be swept."""
        return self.creator_alive is False and self.open_by is None and self.surely_free


@dataclass(frozen=True)
class Tmpfs:
    """What was seen. `extracting` is the pid of a live resume client of ours, whose dumps are not leftovers."""

    path: str
    fstype: str = "tmpfs"
    total_bytes: int = 0
    free_bytes: int = 0
    segments: tuple[Segment, ...] = ()
    dumps: tuple[Segment, ...] = ()
    extracting: int | None = None
    foreign_bytes: int = 0
    memory_limit_bytes: int | None = None
    memory_available_bytes: int | None = None

    @property
    def orphans(self) -> list[Segment]:
        return [segment for segment in (*self.segments, *self.dumps) if segment.orphan]


def look(path: str, dump_dir: str | None = None) -> Tmpfs:
    """Read the file system that holds `path`, its segments, and the dumps. Raises OSError where it cannot be read."""
    room = os.statvfs(path)
    mount = mounts.of(path)
    processes = procs.every()
    boot = _boot_time()
    extracting = _extracting(processes)
    segments, foreign = _segments(path, processes, boot)
    dumps = _dumps(dump_dir, processes, boot, extracting) if dump_dir else []
    segments, dumps = _users(segments, dumps)
    return Tmpfs(
        path,
        fstype=mount.fstype if mount else "",
        total_bytes=room.f_blocks * room.f_frsize,
        free_bytes=room.f_bavail * room.f_frsize,
        segments=tuple(segments),
        dumps=tuple(dumps),
        extracting=extracting,
        foreign_bytes=foreign,
        memory_limit_bytes=memory_limit(),
        memory_available_bytes=_available(),
    )


def _boot_time() -> float:
    with open("/proc/stat", encoding="ascii") as handle:
        return next(float(line.split()[1]) for line in handle if line.startswith("btime "))


def _extracting(processes: dict[int, procs.Process]) -> int | None:
    """A live process of our extract unit, known by the mark in its environment."""
    for pid in sorted(processes):
        marks = procs.environment(pid, ("RELIGHT_",)) or {}
        if marks.get(UNIT) == EXTRACT_UNIT and not processes[pid].zombie:
            return pid
    return None


def _alive(pid: int, made: float, processes: dict[int, procs.Process], boot: float) -> bool:
    """Whether the creator lives. A process that began after the file was made only has its number."""
    process = processes.get(pid)
    return process is not None and not process.zombie and boot + process.start_time / CLOCK_TICKS <= made + 2


def _segments(path: str, processes: dict[int, procs.Process], boot: float) -> tuple[list[Segment], int]:
    """The segments of known families, and the bytes of what is nobody's that we know."""
    found = []
    foreign = 0
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        family, creator = family_of(entry.name)
        if not stat.S_ISREG(status.st_mode):
            continue
        if family is None:
            ours = DUMP.match(entry.name) or DUMP_TEMPORARY.match(entry.name)
            foreign += 0 if ours else status.st_blocks * 512
            continue
        alive = _alive(creator, min(status.st_mtime, status.st_ctime), processes, boot) if creator else None
        found.append(_segment(entry.path, family, status, creator, alive))
    return found, foreign


def family_of(name: str) -> tuple[str | None, int | None]:
    """The family that a name belongs to, and the pid that it tells."""
    for family, pattern in FAMILIES:
        match = pattern.match(name)
        if match:
            return family, int(match.group(1)) if match.groups() else None
    return None, None


def _segment(path: str, family: str, status: os.stat_result, creator: int | None, alive: bool | None) -> Segment:
    return Segment(path, family, status.st_blocks * 512, (status.st_dev, status.st_ino), status.st_uid, creator, alive)


def _dumps(folder: str, processes: dict[int, procs.Process], boot: float, extracting: int | None) -> list[Segment]:
    """Our dumps: leftovers where no client runs that would fetch them; half-written ones belong to their writer."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    found = []
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        half = DUMP_TEMPORARY.match(entry.name)
        if not stat.S_ISREG(status.st_mode) or not (half or DUMP.match(entry.name)):
            continue
        if half:
            creator = int(half.group(1))
            alive = _alive(creator, min(status.st_mtime, status.st_ctime), processes, boot)
            found.append(_segment(entry.path, "half dump", status, creator, alive))
        else:
            found.append(_segment(entry.path, "dump", status, extracting, extracting is not None))
    return found


def _users(segments: list[Segment], dumps: list[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Fill in who uses the candidates for the sweep. /proc is searched only for those that the kernel cannot clear."""
    candidates = [segment for segment in (*segments, *dumps) if segment.creator_alive is False]
    cleared = {segment.inode for segment in candidates if nobody_uses(segment.path)}
    doubtful = {segment.inode for segment in candidates} - cleared
    users, hidden = users_of(doubtful) if doubtful else ({}, set())

    def filled(segment: Segment) -> Segment:
        if segment.creator_alive is not False:
            return segment
        free = segment.inode in cleared or segment.uid not in hidden
        return replace(segment, open_by=users.get(segment.inode), surely_free=free)

    return [filled(segment) for segment in segments], [filled(segment) for segment in dumps]


def nobody_uses(path: str) -> bool:
    """Whether the kernel vouches that no process of any user or namespace has the file open or mapped.

    It grants a write lease on that condition alone (fcntl(2), F_SETLEASE). False also where it does not say.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def users_of(inodes: Iterable[tuple[int, int]]) -> tuple[dict[tuple[int, int], int], set[int]]:
    """A process that has each (device, inode) open or mapped, and the users whose processes could not be looked into.

    Such a process matters for files of its own user alone: a segment is made for its user's own processes. The init
    process, which containers and sandboxes guard, uses no segment of others and does not count.
    """
    wanted = set(inodes)
    found: dict[tuple[int, int], int] = {}
    hidden: set[int] = set()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            used = _mapped(pid) | _opened(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            try:
                if pid != INIT:
                    hidden.add(os.stat(f"/proc/{pid}").st_uid)
            except OSError:
                pass
            continue
        found.update(dict.fromkeys(used & wanted, pid))
    return found, hidden


def _opened(pid: int) -> set[tuple[int, int]]:
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            status = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return found


def _mapped(pid: int) -> set[tuple[int, int]]:
    found = set()
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as handle:
        for line in handle:
            fields = line.split(None, 5)
            if fields[4] != "0":
                major, _colon, minor = fields[3].partition(":")
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return found


def memory_limit(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int | None:
    """The least memory limit of the control groups that this process is in: the pages of a tmpfs count into it."""
    try:
        with open(own, encoding="utf-8") as handle:
            lines = handle.read().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found += _limits(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(os.path.join(root, "memory"), path, "memory.limit_in_bytes")
    return min(found, default=None)


def _limits(root: str, path: str, name: str) -> list[int]:
    """The limits on the way from a group up to the root."""
    found = []
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts) + 1):
        try:
            with open(os.path.join(root, *parts[:depth], name), encoding="ascii") as handle:
                value = handle.read().strip()
        except OSError:
            continue
        if value.isdigit() and int(value) < 1 << 60:  # cgroup v1 writes "none" as a number near 2^63
            found.append(int(value))
    return found


def _available() -> int | None:
    with open("/proc/meminfo", encoding="ascii") as handle:
        for line in handle:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def judge(seen: Tmpfs, need_bytes: int, reserve_bytes: int) -> Gate:
    """Compare what was seen with what the run needs at its fullest, and what must stay free for NCCL and SGLang."""
    orphans = seen.orphans
    held = sum(dump.bytes for dump in seen.dumps if not dump.orphan)  # the run's own need, already taken
    reclaimable = sum(orphan.bytes for orphan in orphans)
    whole = need_bytes + reserve_bytes
    short = whole - held - seen.free_bytes
    gate = Gate("tmpfs_check", _evidence(seen, need_bytes, reserve_bytes, reclaimable))
    if seen.fstype != "tmpfs":
        what = f"it lies on {seen.fstype or 'an unknown file system'}, not on a tmpfs: each dump would go to that disk"
        gate.problems.append(Problem("tmpfs-not-tmpfs", seen.path, what, "mount a tmpfs there, or name another directory"))
    gate.problems += _orphan_problems(orphans)
    for segment in (*seen.segments, *seen.dumps):
        if segment.creator_alive is False and not segment.orphan:
            user = f"pid {segment.open_by}" if segment.open_by else "a process that cannot be looked into"
            what = f"its creator, process {segment.creator}, is gone, but {user} may use its {segment.bytes} bytes"
            gate.problems.append(Problem("tmpfs-in-use", segment.path, what, "end that process, or look with become", Verdict.WARN))
    if short > 0:
        gate.problems.append(
            Problem("tmpfs-small", seen.path, f"{short} bytes short of the run's need", _remedy(seen, short, reclaimable, whole))
        )
    limit = seen.memory_limit_bytes
    if limit is not None and limit < whole:
        what = f"the memory limit of {limit} bytes is below the {whole} bytes that the tmpfs must hold: the OOM killer would come first"
        gate.problems.append(Problem("tmpfs-memory-limit", seen.path, what, "raise the container's limit, or lower the byte budget"))
    return gate


def _orphan_problems(orphans: list[Segment]) -> list[Problem]:
    remedy = "state: swept removes it"
    found = []
    for orphan in orphans[:NAMED]:
        code = "dump-stale" if "dump" in orphan.family else "tmpfs-orphan"
        found.append(Problem(code, orphan.path, _why(orphan), remedy, Verdict.WARN))
    if len(orphans) > NAMED:
        rest = orphans[NAMED:]
        what = f"{len(rest)} more, {sum(orphan.bytes for orphan in rest)} bytes"
        found.append(Problem("tmpfs-orphan", os.path.dirname(rest[0].path), what, remedy, Verdict.WARN))
    return found


def _why(orphan: Segment) -> str:
    if orphan.creator is None:
        return f"{orphan.bytes} bytes of an attempt that no client waits for"
    return f"{orphan.bytes} bytes of process {orphan.creator}, which is gone"


def _remedy(seen: Tmpfs, short: int, reclaimable: int, whole: int) -> str:
    if reclaimable >= short:
        return "state: swept frees enough"
    if whole > seen.total_bytes:
        return f"mount -o remount,size={whole} {seen.path}, or lower the byte budget"
    unknown = [segment.path for segment in seen.segments if segment.creator_alive is None]
    if unknown:
        return f"see whether anybody still uses {', '.join(unknown[:3])}: the name does not tell; or lower the byte budget"
    return "see what else fills it, or lower the byte budget"


def _evidence(seen: Tmpfs, need_bytes: int, reserve_bytes: int, reclaimable: int) -> dict[str, Any]:
    families: dict[str, int] = {}
    for segment in (*seen.segments, *seen.dumps):
        families[segment.family] = families.get(segment.family, 0) + segment.bytes
    return {
        "fstype": seen.fstype,
        "total_bytes": seen.total_bytes,
        "free_bytes": seen.free_bytes,
        "need_bytes": need_bytes,
        "reserve_bytes": reserve_bytes,
        "reclaimable_bytes": reclaimable,
        "family_bytes": dict(sorted(families.items())),
        "unknown_creator_bytes": sum(segment.bytes for segment in seen.segments if segment.creator_alive is None),
        "foreign_bytes": seen.foreign_bytes,
        "segments": len(seen.segments),
        "dumps": len(seen.dumps),
        "extracting_pid": seen.extracting,
        "memory_limit_bytes": seen.memory_limit_bytes,
        "memory_available_bytes": seen.memory_available_bytes,
    }


def sentence(orphan: Segment) -> str:
    return f"remove {orphan.path}: {_why(orphan)}"


def sweep(orphan: Segment) -> bool:
    """Remove this very file. False where it is gone or another file has its name. Raises OSError."""
    try:
        status = os.stat(orphan.path, follow_symlinks=False)
        if (status.st_dev, status.st_ino) != orphan.inode:
            return False
        os.unlink(orphan.path)
    except FileNotFoundError:
        return False
    return True
