# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The acts of a storage migration. Each looks first, does only what is not done, and converges after a kill anywhere.

The order is what makes it safe: a consent is spent before the disk is touched, the record is written before the step that it
names, the table of mounts is edited before the mounts are changed, and nothing of the source is ever written.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import (
    bare,
    blockdev,
    bounded,
    copier,
    durable,
    fstab,
    holders,
    migration,
    migration_plan,
    mounts,
    services,
    units,
)
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.glue import Outcome
from ansible_collections.relight.recovery.plugins.module_utils.journal import Journal, boot_id
from ansible_collections.relight.recovery.plugins.module_utils.migration import Record
from ansible_collections.relight.recovery.plugins.module_utils.migration_plan import (
    FORMATTED,
    LABEL,
    LAZY,
    NAME,
    RECLAIM,
    SPENT,
    Seen,
    Wish,
)
from ansible_collections.relight.recovery.plugins.module_utils.migration_service import Job

FORMAT_SECONDS = 900.0
MOUNT_SECONDS = 120.0
PARTITION_SECONDS = 20.0
ORPHAN_SECONDS = 60.0
NAMED = 10
PLANNED = "depends-on-planned-act"
UTILS = "ansible_collections.relight.recovery.plugins.module_utils"
SERVICE = f"{UTILS}.migration_service"
SERVICE_MODULES = ("migration_service", "copier", "durable", "journal", "migration")


class Stop(Exception):
    """An act cannot go on; the problem says why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


@dataclass
class Context:
    """What an act works with. `actions` are the sentences of what was done."""

    wish: Wish
    journal: Journal
    granted: frozenset[str]
    check: bool
    manager: services.Manager
    our_units: tuple[str, ...]
    python: str
    log: str
    workers: int = 4
    stall_seconds: float = 120.0
    stop_seconds: float = 600.0
    actions: list[str] = field(default_factory=list)
    gate: Gate = field(default_factory=lambda: Gate(NAME))

    @property
    def state_dir(self) -> str:
        return self.wish.state_dir

    def save(self, record: Record, phase: str | None = None, **more: Any) -> Record:
        new = replace(record.at(phase, time.time()) if phase else record, **more)
        migration.write(self.state_dir, new)
        return new

    def outcome(self, **more: Any) -> Outcome:
        return Outcome(self.gate, bool(self.actions), self.actions, more=more)


def stop(code: str, where: str, what: str, remedy: str, consent: str | None = None, verdict: Verdict = Verdict.FAIL) -> Stop:
    return Stop(Problem(code, where, what, remedy, verdict, consent))


def command(*words: str, seconds: float = MOUNT_SECONDS, given: str | None = None) -> str:
    """Run one command that changes the host. Raises Stop where it fails or does not end."""
    try:
        done = blockdev.run(*words, seconds=seconds, given=given)
    except blockdev.CannotLook as error:
        raise stop("migration-command-failed", words[0], str(error), "see the kernel's log and the device") from None
    if done.returncode:
        said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:]) or f"exit status {done.returncode}"
        raise stop("migration-command-failed", words[0], f"{' '.join(words)}: {said}", "mend what it says, then run again")
    return done.stdout


def act(state: str, context: Context) -> Outcome:
    """Look, judge, and bring the migration to this state."""
    if state == "released":  # on a host that never had a migration, nothing of its disks is looked at
        return _guarded(release, context, migration_plan.unseen(migration.read(context.state_dir)))
    seen = migration_plan.look(context.wish, context.journal)
    deadline = time.monotonic() + ORPHAN_SECONDS
    while migration_plan.begun(seen) and not seen.ours and not seen.exclusive and time.monotonic() < deadline:
        time.sleep(0.5)  # what a killed run of ours had started is still formatting, and tells nobody when it ends
        seen = migration_plan.look(context.wish, context.journal)
    if state in ENDS:
        return _guarded(ENDS[state], context, seen)
    gate, plan = migration_plan.judge(context.wish, seen, context.granted)
    context.gate = gate
    if state == "planned" or gate.verdict >= Verdict.FAIL or migration_plan.finished(seen):
        return Outcome(gate, more={"plan": plan})
    if context.check:
        return _checked(state, context, seen, plan)
    return _guarded(STATES[state], context, seen)


def _guarded(step: Any, context: Context, seen: Seen) -> Outcome:
    try:
        step(context, seen)
    except Stop as stopped:
        context.gate.problems.append(stopped.problem)
    except services.ManagerError as error:
        context.gate.problems.append(Problem("migration-no-manager", "this host", str(error), "the copy runs as a unit of its own"))
    record = migration.read(context.state_dir)
    context.gate.evidence["phase"] = record.phase if record else "none"
    return context.outcome()


def _checked(state: str, context: Context, seen: Seen, plan: list[str]) -> Outcome:
    """With --check: the first act tells the whole plan, the others wait for it."""
    if state == "prepared":
        return Outcome(context.gate, True, plan, more={"plan": plan})
    what = "the migration's earlier steps were not done in check mode"
    context.gate.problems.append(Problem(PLANNED, context.wish.data, what, "run without --check", Verdict.UNKNOWN))
    return Outcome(context.gate, more={"plan": plan})


# --- prepare -----------------------------------------------------------------------------------------------------------


def prepare(context: Context, seen: Seen) -> None:
    """Format where that is consented to and not done, and mount the target where nobody else writes. Raises Stop."""
    wish, record = context.wish, seen.record
    if record is not None and record.phase == "reclaimed":
        migration.archive(context.state_dir, record)
        record = None
    if record is None or (record.phase in ("planned", "rolled_back") and not seen.ours):
        record = migration_plan.new_record(wish, seen, uuid.uuid4().hex[:12], str(uuid.uuid4()))
    if migration_plan.to_format(seen):
        record = _format(context, seen, record)
        seen = replace(seen, record=record)
    device = _device(record)
    if record.phase == "rolled_back":
        _begin_again(context, record, device)
    if not _is_mounted(device, wish.stage):
        if record.phase == "cutting_over" and _is_mounted(device, wish.data):
            return
        try:
            _mount(device, wish.stage, record.fstype, record.options, 0o700)
        except Stop:
            if record.phase != "preparing":
                raise
            record = _format(context, seen, record)  # the formatting was cut short
            _mount(_device(record), wish.stage, record.fstype, record.options, 0o700)
        context.actions.append(f"mount the new file system at {wish.stage}")
    room = os.statvfs(wish.stage)
    short = 0 if record.reached("copied") else migration_plan.need_bytes(wish, seen) - room.f_bavail * room.f_frsize
    if short > 0 and not record.reached("prepared"):
        raise stop("target-too-small", wish.target, f"{short} bytes short", "attach a larger disk, or make room at the source first")
    if not record.reached("cutting_over"):
        _write_marker(wish.stage, record)
    if not record.reached("prepared"):
        context.save(record, "prepared", source_uuid=seen.source.uuid or record.source_uuid)


def _begin_again(context: Context, record: Record, device: str) -> None:
    """After a roll-back: what the earlier passes said of the source holds no more, and the target leaves its place aside."""
    for name in ("progress.json", "job.json"):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(migration.folder(context.state_dir), name))
    durable.fsync_directory(migration.folder(context.state_dir))
    if _is_mounted(device, record.aside):
        command("umount", record.aside)
        context.actions.append(f"unmount {record.aside}")


def _write_marker(stage: str, record: Record) -> None:
    path = os.path.join(stage, migration.MARKER)
    if not os.path.exists(path):
        with durable.replacing(path, 0o600) as handle:
            handle.write(record.id.encode())


def _format(context: Context, seen: Seen, record: Record) -> Record:
    """Spend the consent, then write partition table and file system, whose UUID was chosen before. Raises Stop."""
    disk, content = seen.disk, seen.content
    if disk is None or content is None:
        raise stop("target-missing", context.wish.target, "is not there", "attach it")
    consent = migration_plan.wipe_consent(context.wish, seen)
    record = context.save(record, "preparing")
    if seen.spent.get(consent) != record.id:
        context.journal.write(SPENT, consent=consent, migration=record.id, identity=[disk.name, disk.size_bytes, content.fingerprint])
    device = disk.device
    if record.partitioned and not disk.partition:
        script = f"label: gpt\nlabel-id: {uuid.uuid5(uuid.NAMESPACE_OID, record.id)}\nname={LABEL}, type=L\n"
        blockdev.run("sfdisk", "--quiet", "--wipe", "always", "--wipe-partitions", "always", device, given=script)
        device = _partition(disk)
    if record.fstype == "xfs":
        command("mkfs.xfs", "-q", "-f", "-K", "-L", LABEL, "-m", f"uuid={record.target_uuid}", device, seconds=FORMAT_SECONDS)
    else:
        words = ("-q", "-F", "-F", "-m", "0", "-E", "nodiscard", "-L", LABEL, "-U", record.target_uuid, device)
        command("mkfs.ext4", *words, seconds=FORMAT_SECONDS)
    _settle()
    context.journal.write(FORMATTED, device=device, uuid=record.target_uuid, migration=record.id, consent=consent)
    context.actions.append(f"format {disk.name} as {record.fstype} {record.target_uuid}, by consent {consent}")
    return record


def _settle() -> None:
    if shutil.which("udevadm", path=migration_plan.SEARCH) and os.path.isdir("/run/udev"):
        with suppress(blockdev.CannotLook):
            blockdev.run("udevadm", "settle", "--timeout=15", seconds=20)


def _partition(disk: blockdev.Disk) -> str:
    """The new partition's device, once the kernel shows it. Raises Stop."""
    deadline = time.monotonic() + PARTITION_SECONDS
    asked = False
    while True:
        _settle()
        found = blockdev.disks()
        whole = next((one for one in found if one.device == disk.device), None)
        part = blockdev.partition_of(whole, found) if whole else None
        if part and os.path.exists(part.device):
            return part.device
        if not asked:  # a kernel without that kind of table is told of the partitions
            blockdev.run("partx", "-a", disk.device)
            asked = True
        elif time.monotonic() > deadline:
            raise stop("migration-command-failed", disk.device, "its new partition does not appear", "partprobe, then run again")
        else:
            time.sleep(0.2)  # the kernel re-reads the table in its own time


def _device(record: Record) -> str:
    """The device that carries the new file system now. Raises Stop."""
    found = [disk for disk in blockdev.disks() if blockdev.uuid_of(disk.device) == record.target_uuid]
    if len(found) != 1:
        what = f"{len(found) or 'no'} devices carry the file system {record.target_uuid}"
        raise stop("target-missing", record.target, what, "attach the disk that the migration began with, and no copy of it")
    return found[0].device


def _number(device: str) -> tuple[int, int]:
    number = os.stat(device).st_rdev
    return os.major(number), os.minor(number)


def _top(point: str) -> mounts.Mount | None:
    return next((mount for mount in reversed(mounts.read()) if mount.point == point), None)


def _is_mounted(device: str, point: str) -> bool:
    mount = _top(point)
    return mount is not None and mount.device == _number(device)


def _mount(device: str, point: str, fstype: str, options: str, mode: int = 0o755) -> None:
    """Mount a device on a path that carries nothing. Raises Stop."""
    try:
        os.makedirs(point, mode=mode, exist_ok=True)
    except OSError as error:
        raise stop("migration-command-failed", point, f"cannot be made: {error.strerror}", "make it by hand") from None
    if _top(point) is not None:
        raise stop("mount-point-taken", point, "something else is mounted there", "unmount it, or set another path")
    kind = ["-t", fstype] if fstype else []
    command("mount", *kind, "-o", options or "defaults", device, point)


# --- copy --------------------------------------------------------------------------------------------------------------


def progress(state_dir: str) -> dict[str, Any] | None:
    """What the copy service wrote last."""
    try:
        with open(os.path.join(migration.folder(state_dir), "progress.json"), encoding="utf-8") as handle:
            value = json.load(handle)
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def pass_done(state_dir: str, record: Record, final: bool) -> bool:
    """Whether that pass has come to its end for this migration; a final one counts only if it began when the source stood still."""
    seen = progress(state_dir)
    done = seen is not None and seen.get("id") == record.id and seen.get("phase") == "done"
    if not final:
        return record.reached("copied") or done
    if seen is None or not done or seen.get("pass") != "final" or not _still(record):
        return False
    return bool(seen.get("boot_id") == record.still_boot and float(seen.get("began_at") or 0) >= record.still_at)


def _still(record: Record) -> bool:
    """Whether nobody can have written to the source since it was made to stand still."""
    mount = _top(record.data)
    return record.still_boot == boot_id() and (mount is None or mount.read_only or record.times.get("frozen", 0) > 0)


def copy_live(context: Context, seen: Seen) -> None:
    _start(context, seen, final=False)


def copy_final(context: Context, seen: Seen) -> None:
    record = _staged(context, seen)
    if record.reached("cutting_over") or context.wish.lost:
        return
    if not record.reached("copied"):
        raise stop("copy-not-done", context.wish.data, "the first pass is not over", "let it end, then run again")
    if not _still(record):
        raise stop("source-not-quiesced", context.wish.data, "is still writable", "run state quiesced first")
    _start(context, seen, final=True)


def _staged(context: Context, seen: Seen) -> Record:
    """The record of a migration whose target is mounted. Raises Stop."""
    record = seen.record
    if record is None or not record.reached("prepared"):
        raise stop("migration-not-prepared", context.wish.data, "the target is not prepared", "run state prepared first")
    if not record.reached("cutting_over") and not seen.is_target(seen.mounted_at(context.wish.stage)):
        raise stop("migration-not-prepared", context.wish.stage, "the target is not mounted there", "run state prepared first")
    return record


def _start(context: Context, seen: Seen, final: bool) -> None:
    """Have the service do a pass that is not done. One that is at it is left alone. Raises Stop, services.ManagerError."""
    record = _staged(context, seen)
    if context.wish.lost or record.reached("cutting_over") or pass_done(context.state_dir, record, final):
        return
    folder = migration.folder(context.state_dir)
    code = _write_code(folder)
    job = Job(
        id=record.id,
        source=record.data,
        target=record.stage,
        folder=folder,
        final=final,
        digest=_digest_of(context.python),
        workers=context.workers,
        stall_seconds=context.stall_seconds,
    )
    path = os.path.join(folder, "job.json")
    text = json.dumps(asdict(job), indent=1, sort_keys=True)
    if units.file_text(path) != text:
        with durable.replacing(path, 0o600) as handle:
            handle.write(text.encode())
    spec = services.UnitSpec(
        name=migration.UNIT,
        command=(context.python, "-m", SERVICE, path),
        environment={"PYTHONPATH": code, "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=context.log,
        start_seconds=0,
        stop_seconds=20,
        watched=services.watched([path]),
    )
    outcome = units.started(context.manager, spec, False)
    if outcome.actions:
        context.actions.append(f"start the {job.name} pass of the copy from {record.data} to {record.stage} ({migration.UNIT})")
    context.gate.problems += [
        replace(problem, code="copy-not-running") if problem.code == "unit-not-running" else problem for problem in outcome.gate.problems
    ]


def _digest_of(python: str) -> str:
    """The best digest that this interpreter makes. Raises Stop where it does not run."""
    probe = "try:\n import xxhash; xxhash.xxh3_128; print(1)\nexcept Exception: print(0)"
    said = command(python, "-c", probe, seconds=60).strip()
    return copier.XXH3 if said.endswith("1") else copier.BLAKE2B


def _write_code(folder: str) -> str:
    """Put the service's own code where the unit finds it: a module's code is gone when the module ends."""
    root = os.path.join(folder, "code")
    target = os.path.join(root, *UTILS.split("."))
    os.makedirs(target, mode=0o700, exist_ok=True)
    for name in SERVICE_MODULES:
        loader = getattr(sys.modules[f"{UTILS}.{name}"], "__loader__", None)
        text = loader.get_source(f"{UTILS}.{name}") if loader else None
        if text is None:
            raise stop("migration-command-failed", name, "its source cannot be read", "run from a checkout or an installed collection")
        path = os.path.join(target, f"{name}.py")
        if units.file_text(path) != text:
            with durable.replacing(path, 0o600) as handle:
                handle.write(text.encode())
    return root


# --- quiesce -----------------------------------------------------------------------------------------------------------


def quiesce(context: Context, seen: Seen) -> None:
    """No writer is left: ours are stopped, others are named and refused, the source becomes read-only. Raises Stop."""
    record = _staged(context, seen)
    if context.wish.lost or record.reached("cutting_over"):
        return
    if not pass_done(context.state_dir, record, final=False):
        raise stop("copy-not-done", context.wish.data, "the first pass is not over", "let it end, then run again")
    if not record.reached("copied"):
        record = context.save(record, "copied")
    if _still(record):
        return
    _free(context, context.wish.data)
    mount = _top(record.data)
    if mount is not None and not mount.read_only:
        record = _make_read_only(context, record)
    context.save(record, still_boot=boot_id(), still_at=time.clock_gettime(time.CLOCK_BOOTTIME))


def _holders(context: Context, path: str) -> list[tuple[holders.Holder, str]]:
    """Who holds the file system, with the unit that each belongs to."""
    found = bounded.call(holders.look, (path, os.getpid()), 30.0)
    pids = [holder.process.pid for holder in found if holder.process]
    owners = bounded.call(_owners, (context.manager, pids), 30.0) if pids else {}
    return [(holder, owners.get(holder.process.pid, "") if holder.process else "") for holder in found]


def _owners(manager: services.Manager, pids: list[int]) -> dict[int, str]:
    from ansible_collections.relight.recovery.plugins.module_utils import procs  # in a child: reading all of /proc may hang

    return manager.owners(pids, procs.every())


def _free(context: Context, path: str) -> None:
    """Stop our units that hold it; refuse while anyone else does. Raises Stop."""
    ours = {context.manager.canonical(name) for name in (*context.our_units, migration.UNIT)}
    held = _holders(context, path)
    for unit in sorted({unit for _holder, unit in held if unit in ours}):
        context.manager.stop(unit, context.stop_seconds)
        context.actions.append(f"stop {unit}: it holds {path}")
    left = _holders(context, path) if any(unit in ours for _holder, unit in held) else held
    lazily = f"{LAZY}{path}" in context.granted
    others = [(holder, unit) for holder, unit in left if not (lazily and holder.process and holder.process.stuck)]
    for holder, unit in others[1:NAMED]:
        context.gate.problems.append(_held(context, path, holder, unit))
    if others:
        raise Stop(_held(context, path, *others[0]))


def _held(context: Context, path: str, holder: holders.Holder, unit: str) -> Problem:
    stuck = bool(holder.process and holder.process.stuck)
    if stuck:
        remedy = "bring its storage back; or consent to leave it behind: the mount is then taken away lazily"
        return Problem("source-held", path, holder.told, remedy, consent=f"{LAZY}{path}")
    where = f" (unit {unit})" if unit else ""
    remedy = f"stop unit {unit}" if unit else "end it"
    return Problem("source-held", path, f"{holder.told}{where}", f"{remedy}, then run again")


def _make_read_only(context: Context, record: Record) -> Record:
    """Raises Stop where it cannot be made so, unless a frozen source may be left behind."""
    lazily = f"{LAZY}{record.data}" in context.granted
    try:
        done = blockdev.run("mount", "-o", "remount,ro", record.data, seconds=30 if lazily else MOUNT_SECONDS)
        failed = done.stderr.strip() if done.returncode else ""
    except blockdev.CannotLook as error:
        failed = str(error)
    if not failed:
        context.actions.append(f"remount {record.data} read-only")
        return record
    if not lazily:
        remedy = "see who writes there (lsof), also from other namespaces; a frozen source can be left with consent"
        raise stop("source-not-read-only", record.data, failed, remedy, consent=f"{LAZY}{record.data}")
    record = context.save(record, times={**record.times, "frozen": round(time.time(), 3)})
    what = f"could not be made read-only ({failed}); by consent it is copied as it is"
    context.gate.problems.append(Problem("source-frozen", record.data, what, "see the list of what was not read", Verdict.WARN))
    return record


# --- cut over ----------------------------------------------------------------------------------------------------------


def cut_over(context: Context, seen: Seen) -> None:
    """The new file system takes the old one's place, for now and for every boot. Raises Stop, fstab.NotVerified."""
    record = _staged(context, seen)
    wish = context.wish
    if not record.reached("cutting_over"):
        if not wish.lost and not pass_done(context.state_dir, record, final=True):
            raise stop("copy-not-verified", wish.data, "the final pass is not over, or the source was writable since", "run state verified")
        record = context.save(record, "verified")
        record = _plan_table(context, record)
    device = _device(record)
    _edit_table(context, record.fstab, record.data, [record.fstab_line])
    if not _is_mounted(device, record.data):
        _leave(context, record.data)
        record = _put_guard(context, record)
        _unmark(context, record)
        _mount(device, record.data, record.fstype, mount_options(record.fstab_line))
        context.actions.append(f"mount the new file system at {record.data}")
    record = _put_guard(context, record)
    if _is_mounted(device, record.stage):
        _unmark(context, record)
        command("umount", record.stage)
        with suppress(OSError):
            os.rmdir(record.stage)
    _put_aside(context, record.source_uuid, record.source_fstype, record)
    if not _is_mounted(device, record.data):
        raise stop("cut-over-not-true", record.data, "the new file system is not what is mounted there", "see what mounts it")
    context.save(record, "cut_over")


def _plan_table(context: Context, record: Record) -> Record:
    lines = fstab.of_point(fstab.parse(fstab.read(record.fstab)), record.data)
    line = fstab.entry(
        record.target_uuid, record.data, record.fstype, lines[0] if lines else None, context.wish.device_timeout, record.options
    )
    return context.save(record, "cutting_over", fstab_before=[one.raw for one in lines], fstab_line=line)


def _edit_table(context: Context, path: str, point: str, lines: list[str]) -> None:
    """Have exactly these lines for the mount point. Raises Stop."""
    before = fstab.read(path)
    after = fstab.replaced(before, point, lines)
    if after == before:
        return
    try:
        backup = fstab.write(path, after)
    except fstab.NotVerified as error:
        raise stop("fstab-not-verified", path, str(error), "findmnt --verify refuses the new table; mend it by hand") from None
    context.actions.append(f"edit {path}: {(lines or ['no line'])[0].strip()}" + (f" (backup {backup})" if backup else ""))
    if os.path.isdir("/run/systemd/system"):
        command("systemctl", "daemon-reload")


def mount_options(line: str) -> str:
    """The options of a table's line that mount(8) is given."""
    options = fstab.parse(line)[0].options
    return ",".join(option for option in options if option != "nofail" and not option.startswith("x-")) or "defaults"


def _leave(context: Context, point: str) -> None:
    """Unmount what is there, once nobody holds it. Raises Stop."""
    while _top(point) is not None:
        _free(context, point)
        lazily = f"{LAZY}{point}" in context.granted
        try:
            done = blockdev.run("umount", point, seconds=30 if lazily else MOUNT_SECONDS)
            failed = done.stderr.strip() if done.returncode else ""
        except blockdev.CannotLook as error:
            failed = str(error)
        if failed and not lazily:
            raise stop("source-held", point, failed, "see who holds it, also from other namespaces", consent=f"{LAZY}{point}")
        if failed:
            command("umount", "--lazy", point)
        context.actions.append(f"unmount {'lazily ' if failed else ''}the file system at {point}")


def _unmark(context: Context, record: Record) -> None:
    """The finished copy no longer carries the mark of an unfinished one, and its root has the source's time again."""
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(record.stage, migration.MARKER))
    lines = durable.read_lines(os.path.join(migration.folder(context.state_dir), "tree.jsonl"))
    root = next((line for line in lines if line.get("path") == ""), None)
    if root is not None and os.stat(record.stage).st_mtime_ns != root["mtime_ns"]:
        os.utime(record.stage, ns=(root["mtime_ns"], root["mtime_ns"]))
    durable.fsync_directory(record.stage)


def _put_guard(context: Context, record: Record) -> Record:
    """Raises Stop where the bare directory cannot be guarded at all."""
    if record.guarded:
        return record
    os.makedirs(record.data, mode=0o755, exist_ok=True)
    try:
        guard = bare.guarded(record.data) or bare.guard(record.data)
    except (bounded.TimedOut, bounded.ChildFailed) as error:
        raise stop("mount-point-not-guarded", record.data, str(error), "see the file system that holds the mount point") from None
    context.actions.append(f"guard the bare directory {record.data} against writes ({guard})")
    return context.save(record, guarded=guard)


def _put_aside(context: Context, uuid_: str, fstype: str, record: Record) -> None:
    """Mount what was left, read-only, where it can be looked at. One that cannot be read is left alone."""
    if not uuid_ or record.times.get("frozen"):
        return
    found = [disk for disk in blockdev.disks() if blockdev.uuid_of(disk.device) == uuid_]
    if len(found) != 1 or _top(record.aside) is not None:
        return
    try:
        _mount(found[0].device, record.aside, fstype, "ro", 0o700)
    except Stop as stopped:
        context.gate.problems.append(replace(stopped.problem, code="aside-not-mounted", where=record.aside, verdict=Verdict.WARN))
        return
    context.actions.append(f"mount the old file system read-only at {record.aside}")


# --- roll back ---------------------------------------------------------------------------------------------------------


def roll_back(context: Context, seen: Seen) -> None:
    """The old file system takes its place again; the new one is kept, read-only, aside. Raises Stop."""
    record = seen.record
    context.gate = Gate(NAME, migration_plan.evidence(context.wish, seen))
    if record is None or record.phase == "rolled_back":
        return
    if record.phase == "reclaimed":
        raise stop("migration-reclaimed", record.data, "the old disk was given up: there is nothing to go back to", "none")
    if context.check:
        context.actions.append(f"mount the old file system {record.source_uuid} at {record.data} again, and put {record.fstab} back")
        return
    if record.phase in ("planned", "preparing"):
        context.save(record, "rolled_back")
        return
    _stop_copy(context)
    if not record.reached("cutting_over"):
        _give_up(context, record)
        return
    if not record.source_uuid:
        raise stop("migration-no-way-back", record.data, "the old disk was lost before the migration", "none: stay on the new one")
    _tell_changes(context, record)
    old = [disk for disk in blockdev.disks() if blockdev.uuid_of(disk.device) == record.source_uuid]
    if len(old) != 1:
        what = f"{len(old) or 'no'} devices carry the old file system {record.source_uuid}"
        raise stop("migration-no-way-back", record.data, what, "attach the old disk; nothing was changed")
    device = old[0].device
    _edit_table(context, record.fstab, record.data, record.fstab_before)
    if not _is_mounted(device, record.data):
        if _top(record.aside) is not None:
            command("umount", record.aside)
        _leave(context, record.data)
        options = mount_options(record.fstab_before[0]) if record.fstab_before else "defaults"
        _mount(device, record.data, record.source_fstype, options)
        context.actions.append(f"mount the old file system {record.source_uuid} at {record.data}")
    mount = _top(record.data)
    if mount is not None and mount.read_only:
        command("mount", "-o", "remount,rw", record.data)
    _put_aside(context, record.target_uuid, record.fstype, record)
    context.save(record, "rolled_back", fstab_before=[], fstab_line="", times={}, still_boot="")


def _stop_copy(context: Context) -> None:
    unit = context.manager.units().get(context.manager.canonical(migration.UNIT))
    if unit is not None and unit.up:
        context.manager.stop(unit.name, 20)
        context.actions.append(f"stop {unit.name}")


def _give_up(context: Context, record: Record) -> None:
    """Leave a migration that has not cut over: the source is written to again, the copy stays where it is. Raises Stop."""
    if _top(record.stage) is not None:
        command("umount", record.stage)
        context.actions.append(f"unmount {record.stage}")
    mount = _top(record.data)
    if mount is not None and mount.read_only:
        command("mount", "-o", "remount,rw", record.data)
        context.actions.append(f"remount {record.data} read-write")
    context.save(record, "rolled_back", times={}, still_boot="")


def _changed_since(path: str, since: float) -> tuple[int, int]:
    count = size = 0
    for folder, _folders, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                if status.st_ctime > since:
                    count, size = count + 1, size + status.st_size
    return count, size


def _tell_changes(context: Context, record: Record) -> None:
    since = record.times.get("cut_over") or time.time()
    try:
        count, size = bounded.call(_changed_since, (record.data, since + 1), 600.0)
    except (bounded.TimedOut, bounded.ChildFailed):
        return
    context.gate.evidence.update(changed_since_files=count, changed_since_bytes=size)
    if count:
        what = f"{count} files ({size} bytes) were written on the new disk since the move; they stay there, at {record.aside}"
        context.gate.problems.append(Problem("rollback-leaves-files", record.data, what, "fetch them from there", Verdict.WARN))


# --- reclaim -----------------------------------------------------------------------------------------------------------


def reclaim(context: Context, seen: Seen) -> None:
    """Give the old disk up: with consent, and only if the manifest proves that all of it was copied and read back. Raises Stop."""
    record = seen.record
    context.gate = Gate(NAME, migration_plan.evidence(context.wish, seen))
    if record is None:
        raise stop("migration-none", context.wish.data, "this host has had no migration", "none")
    if record.phase == "reclaimed":
        return
    if record.phase != "cut_over":
        raise stop("reclaim-too-early", record.data, f"the migration is in phase {record.phase}", "finish it first")
    if not record.source_uuid:
        raise stop("reclaim-nothing", record.data, "there was no old file system that could be read", "see to the old disk by hand")
    device = _device(record)
    if not _is_mounted(device, record.data):
        raise stop("migrated-not-mounted", record.data, "the new file system is not mounted there", "mount it first")
    old = [disk for disk in blockdev.disks() if blockdev.uuid_of(disk.device) == record.source_uuid]
    if len(old) != 1:
        what = f"{len(old) or 'no'} devices carry the old file system {record.source_uuid}"
        raise stop("reclaim-nothing", record.data, what, "see to the old disk by hand")
    if _top(record.aside) is None:
        _put_aside(context, record.source_uuid, record.source_fstype, record)
    unproven = bounded.call(_unproven, (record.aside, migration.folder(context.state_dir)), 3600.0)
    if unproven:
        for path, why in unproven[1:NAMED]:
            context.gate.problems.append(Problem("reclaim-unproven", path, why, "copy it by hand, or wipe the old disk by hand"))
        raise stop("reclaim-unproven", unproven[0][0], unproven[0][1], "copy it by hand, or wipe the old disk by hand")
    consent = migration_plan.consent_for(f"{RECLAIM}{record.source_uuid}", seen.spent, record.id)
    if consent not in context.granted:
        what = f"{old[0].device} ({old[0].name or 'no lasting name'}) can be given up: every file of it was copied and read back"
        raise stop("reclaim-not-consented", record.data, what, "consent to wiping its file system", consent=consent)
    if context.check:
        context.actions.append(f"wipe the signatures of {old[0].device} ({record.source_uuid}), by consent {consent}")
        return
    _leave(context, record.aside)
    if not blockdev.opens_exclusively(old[0].device):
        raise stop("target-in-use", old[0].device, "something still holds it", "see what: lsof, dmsetup, mdadm")
    context.journal.write(SPENT, consent=consent, migration=record.id, identity=[old[0].name, old[0].size_bytes, record.source_uuid])
    command("wipefs", "--all", "--quiet", old[0].device)
    with suppress(OSError):
        os.rmdir(record.aside)
    context.actions.append(f"wipe the signatures of {old[0].device} ({record.source_uuid}), by consent {consent}")
    context.save(record, "reclaimed")


# --- leave -------------------------------------------------------------------------------------------------------------


def release(context: Context, seen: Seen) -> None:
    """What Relight put on the host for the migration goes: the unit and the guard. Mounts, table, data and manifests stay. Raises Stop."""
    record = seen.record
    context.gate = Gate(NAME, migration_plan.evidence(context.wish, seen))
    name = context.manager.canonical(migration.UNIT)
    if name in context.manager.units() and units.OURS in units.file_text(context.manager.unit_file(migration.UNIT)):
        context.actions.append(f"remove {name}")
        if not context.check:
            context.manager.remove(migration.UNIT)
    if record is None or not record.guarded:
        return
    context.actions.append(f"take the guard ({record.guarded}) off the bare directory {record.data}")
    if context.check:
        return
    try:
        bare.guard(record.data, on=False)
    except (bounded.TimedOut, bounded.ChildFailed) as error:
        remedy = "see the file system that holds the mount point"
        raise stop("mount-point-not-guarded", record.data, f"the guard stays: {error}", remedy) from None
    context.save(record, guarded="")


def _unproven(path: str, folder: str) -> list[tuple[str, str]]:
    """What of the old tree the manifest does not prove, up to a few. Raises OSError."""
    entries = migration.read_manifest(os.path.join(folder, "manifest.jsonl"))
    known = {line["path"] for line in durable.read_lines(os.path.join(folder, "tree.jsonl"))}
    known |= {name for line in durable.read_lines(os.path.join(folder, "tree.jsonl")) for name in line.get("links", [])}
    found: list[tuple[str, str]] = []
    if not os.path.ismount(path):
        raise OSError(errno.ENOENT, "the old file system is not mounted", path)
    for parent, folders, names in os.walk(path, onerror=_raise):
        for name in (*folders, *names):
            full = os.path.join(parent, name)
            status = os.lstat(full)
            inner = os.path.relpath(full, path)
            entry = entries.get(inner)
            if copier.is_regular(status):
                if entry is None or not entry.verified:
                    found.append((full, "was never read back from the new disk"))
                elif (entry.bytes, entry.mtime_ns, entry.ctime_ns) != (status.st_size, status.st_mtime_ns, status.st_ctime_ns):
                    found.append((full, "was changed after it was copied"))
            elif inner not in known:
                found.append((full, "is not in the manifest"))
            if len(found) >= NAMED:
                return found
    return found


def _raise(error: OSError) -> None:
    raise error


STATES = {
    "prepared": prepare,
    "copied": copy_live,
    "quiesced": quiesce,
    "verified": copy_final,
    "cut_over": cut_over,
}
ENDS = {"rolled_back": roll_back, "reclaimed": reclaim}
