# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Is a data volume right that someone else has moved or mounted? Looks only: nothing is mounted, edited or copied here.

For containers whose mounts come from outside (Proxmox mpN), and for data that was moved by hand.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import bare, blockdev, bounded, fstab, mounts
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict

NAME = "storage_attached"
UNIT_FOLDERS = ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/etc/supervisor/conf.d")
UNIT_BYTES = 1 << 20
NAMED = 10
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Wish:
    """What must be true."""

    data: str
    uuid: str = ""
    fstab: str = "/etc/fstab"
    paths: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    unit_folders: tuple[str, ...] = UNIT_FOLDERS
    old_copy: str = ""
    read_bytes: int = 0
    mounts_from: str = "auto"


@dataclass(frozen=True)
class Compared:
    """The old copy against the new one: what is missing or differs, as (path, what), and how much was compared."""

    files: int = 0
    bytes_read: int = 0
    wrong: tuple[tuple[str, str], ...] = ()
    wrong_files: int = 0
    unreadable: int = 0


@dataclass(frozen=True)
class Seen:
    """What was looked at. `uuid` is None where the device cannot be asked from here."""

    mount: mounts.Mount | None = None
    uuid: str | None = None
    outside: bool = False
    lines: tuple[fstab.Line, ...] = ()
    guard: str | None = None
    absent: tuple[str, ...] = ()
    stale_units: tuple[tuple[str, str], ...] = ()
    old: Compared | None = None
    old_error: str = ""
    state: dict[str, Any] = field(default_factory=dict)


# --- looking -----------------------------------------------------------------------------------------------------------


def from_outside(wish: Wish) -> bool:
    """Whether the mounts of this host are made by another: so told, or seen."""
    return wish.mounts_from == "outside" or (wish.mounts_from == "auto" and in_container())


def in_container() -> bool:
    if os.path.exists("/run/systemd/container") or os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return True
    try:
        with open("/proc/1/environ", "rb") as handle:
            return any(word.startswith(b"container=") for word in handle.read(1 << 16).split(b"\0"))
    except OSError:
        return False


def look(wish: Wish, seconds: float, compare_seconds: float) -> Seen:
    """Raises OSError, bounded.TimedOut where the volume itself does not answer, bounded.ChildFailed."""
    table = mounts.read()
    mount = next((one for one in reversed(table) if one.point == wish.data), None)
    lines = tuple(fstab.of_point(fstab.parse(fstab.read(wish.fstab)), wish.data))
    stale = tuple(_stale_units(wish))
    if mount is None:
        return Seen(lines=lines, outside=from_outside(wish), stale_units=stale)
    absent = bounded.call(_absent, (wish.paths,), seconds)
    uuid = None
    if os.path.exists(mount.source):
        uuid = bounded.call(blockdev.uuid_of, (mount.source,), seconds) or None
    try:
        guard: str | None = bare.guarded(wish.data)
    except (bounded.ChildFailed, bounded.TimedOut):
        guard = None  # without root, or in a container that may not look
    old, error = None, ""
    if wish.old_copy:
        try:
            old = bounded.call(compare, (wish.old_copy, wish.data, wish.read_bytes), compare_seconds)
        except (bounded.ChildFailed, bounded.TimedOut) as failed:
            error = str(failed)
    return Seen(mount, uuid, from_outside(wish), lines, guard, tuple(absent), stale, old, error)


def _absent(paths: tuple[str, ...]) -> list[str]:
    return [path for path in paths if path and not os.path.lexists(path)]


def _stale_units(wish: Wish) -> Iterator[tuple[str, str]]:
    """Unit files that still name a former path, as (file, path)."""
    for folder in wish.unit_folders if wish.former else ():
        for parent, _folders, names in os.walk(folder):
            for name in sorted(names):
                path = os.path.join(parent, name)
                try:
                    if not stat.S_ISREG(os.lstat(path).st_mode) or os.path.getsize(path) > UNIT_BYTES:
                        continue
                    with open(path, encoding="utf-8", errors="replace") as handle:
                        text = handle.read()
                except OSError:
                    continue
                yield from ((path, former) for former in wish.former if names_path(text, former))


def names_path(text: str, path: str) -> bool:
    """Whether a text names this path or something below it, and not another that begins alike."""
    at = text.find(path)
    while at >= 0:
        after = text[at + len(path) : at + len(path) + 1]
        before = text[at - 1 : at] if at else ""
        if (not after or not (after.isalnum() or after in "._-")) and not (before.isalnum() or before in ("/", ".", "_", "-")):
            return True
        at = text.find(path, at + 1)
    return False


def compare(old: str, new: str, read_bytes: int) -> Compared:
    """Every file of the old copy: is it in the new one with the same length; and the newest of them byte by byte."""
    files, wrong, unreadable = 0, [], 0
    newest: list[tuple[int, str]] = []
    for parent, _folders, names in os.walk(old):
        for name in names:
            path = os.path.join(parent, name)
            inner = os.path.relpath(path, old)
            try:
                status = os.lstat(path)
            except OSError:
                unreadable += 1
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            files += 1
            try:
                have = os.lstat(os.path.join(new, inner))
            except FileNotFoundError:
                wrong.append((inner, "is not there"))
                continue
            if have.st_size != status.st_size:
                wrong.append((inner, f"has {have.st_size} bytes there, {status.st_size} in the old copy"))
            else:
                newest.append((status.st_mtime_ns, inner))
    read = 0
    for _moment, inner in sorted(newest, reverse=True):
        if read >= read_bytes:
            break
        try:
            same, count = _same(os.path.join(old, inner), os.path.join(new, inner))
        except OSError:
            unreadable += 1
            continue
        read += count
        if not same:
            wrong.append((inner, "has other bytes there"))
    return Compared(files, read, tuple(wrong[: 2 * NAMED]), len(wrong), unreadable)


def _same(one: str, two: str) -> tuple[bool, int]:
    count = 0
    with open(one, "rb", buffering=0) as a, open(two, "rb", buffering=0) as b:
        while True:
            left, right = a.read(CHUNK_BYTES), b.read(CHUNK_BYTES)
            count += len(left)
            if left != right:
                return False, count
            if not left:
                return True, count


# --- judging: pure -----------------------------------------------------------------------------------------------------


def judge(wish: Wish, seen: Seen) -> Gate:
    """Compare what was seen with what must be true."""
    gate = Gate(NAME, _evidence(seen))
    if seen.mount is None:
        remedy = "attach it (pct set ... -mpN for a container), or mount it" if seen.outside else f"mount {wish.data}"
        gate.problems.append(Problem("attached-not-mounted", wish.data, "nothing is mounted there", remedy))
    else:
        gate.problems += [*_mount_problems(wish, seen, seen.mount), *_path_problems(wish, seen)]
    if not seen.outside:
        gate.problems += _table_problems(wish, seen)
    for path, former in seen.stale_units[:NAMED]:
        gate.problems.append(
            Problem("attached-stale-path", path, f"still names {former}", "correct it; it would fail or write there", Verdict.WARN)
        )
    gate.problems += _old_problems(wish, seen)
    return gate


def _evidence(seen: Seen) -> dict[str, Any]:
    mount = seen.mount
    return {
        "source": mount.source if mount else None,
        "fstype": mount.fstype if mount else None,
        "uuid": seen.uuid,
        "mounted_from_outside": seen.outside,
        "guard": seen.guard,
        "compared_files": seen.old.files if seen.old else 0,
        "compared_bytes": seen.old.bytes_read if seen.old else 0,
    }


def _mount_problems(wish: Wish, seen: Seen, mount: mounts.Mount) -> Iterator[Problem]:
    if wish.uuid and seen.uuid is None:
        what = f"which file system {mount.source} is cannot be seen from here"
        yield Problem("attached-uuid-unseen", wish.data, what, "look on the host that mounts it: blkid", Verdict.WARN)
    elif wish.uuid and seen.uuid != wish.uuid.lower():
        yield Problem("attached-other-device", wish.data, f"{mount.source} is {seen.uuid}, not {wish.uuid}", "mount the right one")
    if mount.read_only:
        yield Problem("attached-read-only", wish.data, "is mounted read-only", "see why; mount -o remount,rw")
    if seen.guard == "" and not seen.outside:
        what = "the bare directory under the mount is not guarded: without the mount, writes would fill the disk below"
        yield Problem(
            "attached-not-guarded", wish.data, what, f"umount {wish.data} && chattr +i {wish.data} && mount {wish.data}", Verdict.WARN
        )


def _path_problems(wish: Wish, seen: Seen) -> Iterator[Problem]:
    for path in seen.absent:
        yield Problem(
            "attached-path-missing", path, "the inventory names it, but it is not there", "correct the inventory, or finish the move"
        )
    for path in wish.paths:
        for former in wish.former:
            if path == former or path.startswith(f"{former.rstrip('/')}/"):
                yield Problem("attached-path-stale", path, f"the inventory still names the former path {former}", "correct the inventory")


def _table_problems(wish: Wish, seen: Seen) -> Iterator[Problem]:
    uuid = seen.uuid or wish.uuid or "UUID"
    fstype = seen.mount.fstype if seen.mount else "xfs"
    line = fstab.entry(uuid, wish.data, fstype, seen.lines[0] if seen.lines else None, 300).strip()
    if not seen.lines:
        yield Problem("attached-not-in-fstab", wish.fstab, f"does not mount {wish.data} at the next boot", f"add the line: {line}")
        return
    if len(seen.lines) > 1:
        yield Problem("attached-twice-in-fstab", wish.fstab, f"has {len(seen.lines)} lines for {wish.data}", f"keep one: {line}")
    for entry in seen.lines:
        if entry.spec.startswith("/dev/") and not entry.spec.startswith(("/dev/disk/by-", "/dev/mapper/")):
            what = f"names the volume {entry.spec}, which may be another disk at the next boot"
            yield Problem("attached-by-device-name", wish.fstab, what, f"name it by its UUID: {line}")
        elif entry.uuid and seen.uuid and entry.uuid != seen.uuid:
            what = f"would mount {entry.uuid} at the next boot, not {seen.uuid}, which is mounted now"
            yield Problem("attached-fstab-differs", wish.fstab, what, f"correct it: {line}")
        if "nofail" not in entry.options:
            what = f"a boot stops where the device of {wish.data} is late or gone"
            yield Problem("attached-no-nofail", wish.fstab, what, f"add nofail and a device timeout: {line}", Verdict.WARN)


def _old_problems(wish: Wish, seen: Seen) -> Iterator[Problem]:
    if seen.old_error:
        yield Problem("attached-old-unreadable", wish.old_copy, seen.old_error, "none: nothing vouches for the move then", Verdict.WARN)
    if seen.old is None:
        return
    for path, what in seen.old.wrong[:NAMED]:
        yield Problem("attached-file-differs", path, what, f"copy it again from {wish.old_copy}, unless it was changed since on purpose")
    if seen.old.wrong_files > NAMED:
        more = f"{seen.old.wrong_files - NAMED} more files of the old copy are missing or differ"
        yield Problem("attached-file-differs", wish.data, more, f"copy them again from {wish.old_copy}")
    if seen.old.unreadable:
        what = f"{seen.old.unreadable} files of the old copy could not be compared"
        yield Problem("attached-old-unreadable", wish.old_copy, what, "none: nothing vouches for those", Verdict.WARN)
