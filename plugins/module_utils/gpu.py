# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Who holds the GPUs (or, on a host without any, its memory) and the server's port? `look` looks, `judge` judges, `free` frees.

A holder is a process that NVML lists (compute, graphics, MPS), that has a device file open, that listens on one of our
ports, or, where no GPU is expected, that keeps memory as a member of a service. Holders are judged by the unit they
belong to, since a unit brings its processes back.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import bounded, nvml, procs, services
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.glue import Outcome
from ansible_collections.relight.recovery.plugins.module_utils.units import disabling, file_text, paste

MIB = 1 << 20
LOOK_SECONDS = 30.0
SETTLE_SECONDS = 60.0  # after the last kill: how long the driver and the kernel may take to give memory back
STUCK_SECONDS = 2.0  # how long a holder must stay in D state to count as stuck
LISTED_AT_MOST = 64  # holders in the evidence
# Programs that belong to the GPU host itself. Killing them harms: monitoring that dies by SIGKILL has frozen GPUs.
PROTECTED = (
    "nvidia-persistenced",
    "nvidia-fabricmanager",
    "nv-fabricmanager",
    "nv-hostengine",
    "nvidia-dcgm",
    "dcgm-exporter",
    "gpud",
    "Xorg",
    "Xwayland",
    "gnome-shell",
    "systemd-logind",
)


@dataclass(frozen=True)
class Query:
    """Where to look, and what counts."""

    gpu_count: int
    ports: tuple[int, ...] = ()
    our_units: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    protected: tuple[str, ...] = PROTECTED
    holder_min_mib: int = 64
    threshold_mib: int = 64
    host_memory: bool = True
    nvml_library: str | None = None
    device_prefix: str = "/dev/nvidia"
    planned: tuple[str, ...] = ()  # units that an earlier step of this check run would have disabled


@dataclass(frozen=True)
class Holder:
    """One process (`process` is None where no visible one has the pid) and what it holds.

    `bond` to a unit of ours: `ours` for the running instance, `left` for what a former one left behind, else empty.
    `surely` is False where the pid may be that of another pid namespace.
    """

    pid: int | None
    process: procs.Process | None
    unit: str | None = None
    bond: str = ""
    gpu_mib: tuple[tuple[int, int | None], ...] = ()
    devices: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    surely: bool = True

    @property
    def mib(self) -> int:
        return sum(mib or 0 for _gpu, mib in self.gpu_mib)

    @property
    def resident_mib(self) -> int:
        return self.process.rss_bytes // MIB if self.process else 0


@dataclass(frozen=True)
class Seen:
    """All that a look found. The errors say what could not be looked at."""

    gpus: tuple[nvml.Gpu, ...] = ()
    holders: tuple[Holder, ...] = ()
    unreadable: int = 0
    nvml_error: str | None = None
    manager_error: str | None = None


# Looking


def look(query: Query, manager: services.Manager) -> Seen:
    """Look at the GPUs, the processes and the ports, each within its limit. Raises TimedOut where /proc hangs."""
    gpus: tuple[nvml.Gpu, ...] = ()
    nvml_error = None
    if query.gpu_count:
        try:
            gpus = bounded.call(nvml.read, (query.nvml_library,), LOOK_SECONDS)
        except bounded.TimedOut:
            nvml_error = f"NVML did not answer within {LOOK_SECONDS:g} s"
        except bounded.ChildFailed as error:
            nvml_error = str(error)
    holders, unreadable, manager_error = bounded.call(_holders, (query, manager, gpus), LOOK_SECONDS)
    return Seen(gpus, holders, unreadable, nvml_error, manager_error)


def _holders(query: Query, manager: services.Manager, gpus: tuple[nvml.Gpu, ...]) -> tuple[tuple[Holder, ...], int, str | None]:
    """The holders, how many processes could not be looked into, and why the service manager could not be asked."""
    processes = procs.every()
    files = procs.open_files((query.device_prefix, "socket:"))
    devices = {pid: tuple(name for name in names if name.startswith(query.device_prefix)) for pid, names in files.held.items()}
    devices = {pid: names for pid, names in devices.items() if names} if query.gpu_count else {}
    ports: dict[int | None, list[int]] = {}
    for listener in procs.listeners(query.ports, files):
        ports.setdefault(listener.pid, []).append(listener.port)
    on_gpu: dict[int, dict[int, int | None]] = {}
    for gpu in gpus:
        for held in gpu.held:
            of_pid = on_gpu.setdefault(held.pid, {})
            of_pid[gpu.index] = max(of_pid.get(gpu.index) or 0, held.mib or 0) if held.mib is not None else of_pid.get(gpu.index)
    by_memory = not query.gpu_count and query.host_memory
    wanted = {pid for pid in (*devices, *ports, *on_gpu) if pid is not None}
    try:
        units = manager.units()
        owners = manager.owners(processes if by_memory else wanted, processes)
        error = None
    except services.ManagerError as problem:
        units, owners, error = {}, {}, str(problem)
    if by_memory:
        wanted |= _by_memory(query, processes, units, owners)
    instances = {name: _instance(name, units[name], processes, manager) for name in _canonical(query.our_units, manager) if name in units}
    everywhere = procs.sees_all_pids()
    found = []
    for pid in sorted(wanted):
        unit = owners.get(pid)
        process = _really_stuck(processes.get(pid))
        found.append(
            Holder(
                pid=pid,
                process=process,
                unit=unit,
                bond=_bond(process, unit, instances, _canonical(query.our_units, manager)),
                gpu_mib=tuple(sorted(on_gpu.get(pid, {}).items())),
                devices=devices.get(pid, ()),
                ports=tuple(sorted(ports.get(pid, ()))),
                surely=everywhere or pid not in on_gpu or pid in devices,
            )
        )
    found += [Holder(None, None, ports=(port,)) for port in ports.get(None, ())]
    unreadable = [pid for pid in files.unreadable if pid in processes and processes[pid].ppid != procs.KERNEL_THREADS]
    return tuple(found), len(unreadable) if query.gpu_count else 0, error


def _really_stuck(process: procs.Process | None) -> procs.Process | None:
    """The process as it is once it left D state, which any read from a disk puts it in for a moment; else as it was."""
    if process is None or not process.stuck:
        return process
    deadline = time.monotonic() + STUCK_SECONDS
    while time.monotonic() < deadline:
        now = procs.read(process.pid)
        if now is None or not now.stuck:
            return now
        time.sleep(0.02)
    return process


def _canonical(names: Collection[str], manager: services.Manager) -> set[str]:
    return {manager.canonical(name) for name in names}


def _by_memory(query: Query, processes: dict[int, procs.Process], units: dict[str, services.Unit], owners: dict[int, str]) -> set[int]:
    """Members of services that together keep enough memory to count. The distribution's own services are the host."""
    total: dict[str, int] = {}
    for pid, unit in owners.items():
        total[unit] = total.get(unit, 0) + processes[pid].rss_bytes
    large = {unit for unit, size in total.items() if size >= query.holder_min_mib * MIB and not (unit in units and units[unit].vendor)}
    return {pid for pid, unit in owners.items() if unit in large}


@dataclass(frozen=True)
class Instance:
    """The running instance of a unit of ours: its tree, its hash, and whether that is the installed one."""

    members: frozenset[int]
    start_time: int
    hash: str | None
    present: bool


def _instance(name: str, unit: services.Unit, processes: dict[int, procs.Process], manager: services.Manager) -> Instance | None:
    main = processes.get(unit.pid or 0)
    if main is None or not unit.up:
        return None
    running = (procs.environment(main.pid) or {}).get(services.UNIT_HASH)
    written = re.search(r"Configuration ([0-9a-f]+)\.", file_text(unit.file))
    present = running is None or written is None or running == written[1]
    return Instance(frozenset(procs.tree(main.pid, processes)), main.start_time, running, present)


def _bond(process: procs.Process | None, unit: str | None, instances: dict[str, Instance | None], ours: set[str]) -> str:
    """Ours: in the tree of the running instance, or started since and marked by it with the present hash."""
    if process is None or unit not in ours:
        return ""
    instance = instances.get(unit or "")
    if instance is None or not instance.present:
        return "left"
    if process.pid in instance.members:
        return "ours"
    marked = (procs.environment(process.pid) or {}).get(services.UNIT_HASH)
    return "ours" if instance.hash is not None and marked == instance.hash and process.start_time >= instance.start_time else "left"


# Judging


@dataclass(frozen=True)
class Group:
    """The holders that go together: those of one unit, or one process without. `kind` is what judge makes of them."""

    name: str
    unit: str | None
    kind: str
    holders: tuple[Holder, ...]
    consent: str | None = None


def groups(seen: Seen, query: Query, listed: Collection[str], consent: Collection[str]) -> list[Group]:
    """The holders by unit, each with its kind. Pure."""
    sorted_out: dict[tuple[str, str], list[Holder]] = {}
    for holder in seen.holders:
        kind = _kind(holder, query)
        name = holder.unit if holder.unit and kind in ("left", "ours", "foreign", "protected") else f"process {holder.pid}"
        sorted_out.setdefault((name, kind), []).append(holder)
    found = []
    for (name, kind), holders in sorted_out.items():
        unit = holders[0].unit
        needs = None
        if kind == "foreign":
            needs = f"disable:unit:{unit}" if unit else f"kill:pid:{holders[0].pid}"
            kind = "planned" if unit in query.planned else "listed" if unit in listed else "granted" if needs in consent else "unlisted"
        found.append(Group(name, unit, kind, tuple(holders), needs if kind == "unlisted" else None))
    return sorted(found, key=lambda group: group.name)


def _kind(holder: Holder, query: Query) -> str:
    process = holder.process
    if process is None or not holder.surely:
        return "invisible"
    if is_protected(holder, query.protected):
        return "protected"
    if process.zombie:
        return "zombie"
    if holder.bond == "ours":
        return "ours"
    if process.stuck and not holder.unit and not holder.ports:
        return "stuck"
    return "left" if holder.bond == "left" else "foreign"


def is_protected(holder: Holder, protected: Collection[str]) -> bool:
    """By the program's name (cut to 15 characters by the kernel), or by its unit's. Pure."""
    process = holder.process
    unit = (holder.unit or "").rpartition(".service")[0] or holder.unit
    return (process is not None and any(process.name == name[:15] for name in protected)) or unit in protected


ACTABLE = ("listed", "granted", "left")
FINE = ("ours", "protected")


def judge(seen: Seen, query: Query, listed: Collection[str] = (), consent: Collection[str] = ()) -> Gate:
    """Nothing but ours may hold what the server needs. Pure."""
    found = groups(seen, query, listed, consent)
    gate = Gate("gpu_free", evidence(seen, query, found))
    gate.problems += _unlooked(seen, query)
    for group in found:
        problem = _problem(group, query)
        if problem:
            gate.problems.append(problem)
    gate.problems += _memory(seen, query, found)
    return gate


def _unlooked(seen: Seen, query: Query) -> list[Problem]:
    """What could not be looked at: never a pass."""
    problems = []
    if seen.nvml_error:
        remedy = "see that the driver is loaded (nvidia-smi -L); after an upgrade, reboot"
        problems.append(Problem("nvml-unreadable", "NVML", seen.nvml_error, remedy, Verdict.UNKNOWN))
    elif len(seen.gpus) < query.gpu_count:
        what = f"{len(seen.gpus)} GPUs are seen, {query.gpu_count} expected"
        problems.append(Problem("gpu-count", "NVML", what, "look for Xid 79 in the kernel log, or correct relight_gpu_count"))
    for gpu in seen.gpus:
        if gpu.error:
            remedy = "reset the GPU or reboot the host"
            problems.append(Problem("gpu-unreadable", f"GPU {gpu.index}", gpu.error, remedy, Verdict.UNKNOWN))
    if seen.manager_error:
        remedy = "start the service manager, or correct relight_service_manager and relight_supervisor_socket"
        problems.append(Problem("manager-unreachable", "service manager", seen.manager_error, remedy, Verdict.UNKNOWN))
    if seen.unreadable:
        what = f"the open files of {seen.unreadable} processes cannot be read"
        problems.append(Problem("holders-unreadable", "/proc", what, "set relight_become: true", Verdict.UNKNOWN))
    return problems


def _problem(group: Group, query: Query) -> Problem | None:
    """What a group of holders means, or None where it is fine."""
    held = describe(group)
    where = group.name
    if group.kind == "ours":
        return None
    if group.kind == "planned":
        return Problem("depends-on-planned-act", where, f"would be disabled first: {held}", "run without --check", Verdict.UNKNOWN)
    if group.kind == "protected":
        large = sum(holder.mib for holder in group.holders) > query.threshold_mib or any(holder.ports for holder in group.holders)
        remedy = "it is never touched: stop it through its own unit if the server needs the room"
        return Problem("gpu-holder-protected", where, held, remedy, Verdict.WARN) if large else None
    if group.kind == "invisible":
        if group.holders[0].pid is None:
            remedy = "set relight_become: true; if it stays, look from the host outside this container"
            return Problem(
                "port-holder-invisible", f"port {group.holders[0].ports[0]}", "is held by a process not seen", remedy, Verdict.UNKNOWN
            )
        remedy = "look from the host outside this container (nvidia-smi there) and end it there"
        return Problem("gpu-holder-invisible", where, f"of another pid namespace, {held}", remedy)
    if group.kind == "stuck":
        return Problem("gpu-holder-stuck", where, f"in D state, no signal reaches it: {held}", "reboot the host (reboot-required)")
    if group.kind == "zombie":
        return Problem("gpu-holder-zombie", where, f"dead and not buried: {held}", "end its parent; if it stays, reboot the host")
    if group.kind == "left":
        return Problem("gpu-holder-left", where, f"left by a former start of ours: {held}", "recover.yml ends it")
    if group.kind in ("listed", "granted"):
        return Problem("gpu-holder-listed", where, held, "recover.yml stops and disables it" if group.unit else "recover.yml ends it")
    return Problem("gpu-holder-unlisted", where, held, paste(group.consent or ""), Verdict.FAIL, group.consent)


def describe(group: Group) -> str:
    """The group in one clause: pids, user, command, and what it holds."""
    first = group.holders[0].process
    parts = [", ".join(f"pid {holder.pid}" for holder in group.holders[:8]) + (", ..." if len(group.holders) > 8 else "")]
    if first:
        parts.append(f"user {first.user}, {first.command}")
    per_gpu: dict[int, int] = {}
    for holder in group.holders:
        for index, mib in holder.gpu_mib:
            per_gpu[index] = per_gpu.get(index, 0) + (mib or 0)
    if per_gpu:
        parts.append("holds " + ", ".join(f"{mib} MiB on GPU {index}" for index, mib in sorted(per_gpu.items())))
    devices = sorted({name for holder in group.holders for name in holder.devices})
    if devices and not per_gpu:
        parts.append("has open " + ", ".join(devices[:4]))
    ports = sorted({port for holder in group.holders for port in holder.ports})
    if ports:
        parts.append("listens on port " + ", ".join(map(str, ports)))
    if not per_gpu and not devices:
        parts.append(f"keeps {sum(holder.resident_mib for holder in group.holders)} MiB resident")
    return "; ".join(parts)


def _memory(seen: Seen, query: Query, found: list[Group]) -> list[Problem]:
    """Memory in use that no holder explains. Where a holder does not say how much it holds, it is taken to explain all."""
    problems = []
    vague = {index for group in found for holder in group.holders for index, mib in holder.gpu_mib if mib is None}
    known: dict[int, int] = {}
    for group in found:
        for holder in group.holders:
            for index, mib in holder.gpu_mib:
                known[index] = known.get(index, 0) + (mib or 0)
    shared = any(holder.devices and not holder.gpu_mib for group in found for holder in group.holders if group.kind not in FINE)
    for gpu in seen.gpus:
        rest = gpu.used_mib - known.get(gpu.index, 0)
        if gpu.error or gpu.index in vague or shared or rest <= query.threshold_mib:
            continue
        if gpu.reserved_mib is None:
            what = f"{rest} MiB in use, which this driver does not tell from its own reserve"
            problems.append(Problem("gpu-memory-unclear", f"GPU {gpu.index}", what, "use a driver of branch 510 or newer", Verdict.UNKNOWN))
        elif known.get(gpu.index) and any(group.kind == "ours" for group in found):
            continue  # a context's share that its list entry does not count
        else:
            what = f"{rest} MiB in use by nothing that is seen here"
            remedy = "look from the host outside this container; else reset the GPU or reboot"
            problems.append(Problem("gpu-memory-unaccounted", f"GPU {gpu.index}", what, remedy))
    return problems


def evidence(seen: Seen, query: Query, found: list[Group]) -> dict[str, Any]:
    """Numbers and names for the report."""
    kinds = [group.kind for group in found for _holder in group.holders]
    listed = [(group, holder) for group in found for holder in group.holders]
    return {
        "gpu_count": len(seen.gpus),
        "expected_gpu_count": query.gpu_count,
        "ports": list(query.ports),
        "ours": kinds.count("ours"),
        "foreign": sum(kind not in FINE for kind in kinds),
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "total_mib": gpu.total_mib,
                "used_mib": gpu.used_mib,
                "reserved_mib": gpu.reserved_mib,
                "error": gpu.error,
            }
            for gpu in seen.gpus
        ],
        "holders": [
            {
                "pid": holder.pid,
                "kind": group.kind,
                "unit": holder.unit,
                "user": holder.process.user if holder.process else None,
                "command": holder.process.command if holder.process else None,
                "state": holder.process.state if holder.process else None,
                "start_time_ticks": holder.process.start_time if holder.process else None,
                "gpu_mib": {str(index): mib for index, mib in holder.gpu_mib},
                "resident_mib": holder.resident_mib,
                "devices": list(holder.devices),
                "ports": list(holder.ports),
            }
            for group, holder in listed[:LISTED_AT_MOST]
        ],
    }


# Freeing


@dataclass
class Task:
    """What `free` works with."""

    query: Query
    manager: services.Manager
    consent: Collection[str]
    state_dir: str
    stable_seconds: float
    term_seconds: float
    check: bool
    listed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        planned = tuple(sorted(_canonical(self.query.planned, self.manager)))
        self.query = replace(self.query, planned=planned if self.check else ())
        self.listed = _canonical(self.query.units, self.manager)

    def look(self) -> tuple[Gate, list[Group]]:
        seen = look(self.query, self.manager)
        return judge(seen, self.query, self.listed, self.consent), groups(seen, self.query, self.listed, self.consent)


def report(task: Task) -> Outcome:
    return Outcome(task.look()[0])


def free(task: Task) -> Outcome:
    """Stop and end all that may be, after the whole plan was checked; or touch nothing. Then prove that it stays free."""
    gate, found = task.look()
    if gate.verdict <= Verdict.WARN:
        return Outcome(gate)
    plan = [group for group in found if group.kind in ACTABLE]
    if not plan or _blocked(gate):
        return Outcome(gate)
    actions = [sentence(group) for group in plan]
    if task.check:
        what = f"{len(plan)} holders would be stopped first"
        planned = Problem("depends-on-planned-act", "gpu_free", what, "run without --check", Verdict.UNKNOWN)
        return Outcome(Gate("gpu_free", gate.evidence, [planned]), True, actions)
    for group in plan:
        _end(group, task)
    return Outcome(_settle({group.name for group in plan}, task), True, actions)


def _blocked(gate: Gate) -> bool:
    """Whether anything but what the plan ends is wrong. Memory that nobody explains may go with what is ended."""
    mended = ("gpu-holder-listed", "gpu-holder-left", "gpu-memory-unaccounted", "depends-on-planned-act")
    return any(problem.verdict > Verdict.WARN and problem.code not in mended for problem in gate.problems)


def sentence(group: Group) -> str:
    """The action on a group. Pids of a unit are left out: its manager may have changed them since they were seen."""
    if group.kind == "left":
        return f"end what a former start of {group.unit} left behind"
    if group.unit:
        return disabling(group.unit)
    process = group.holders[0].process
    return f"end {group.name} (user {process.user}, {process.command})" if process else f"end {group.name}"


def _end(group: Group, task: Task) -> None:
    """The owner first, so that it starts nothing anew; then the processes, each surely the one that was seen."""
    if group.unit and group.kind != "left":
        services.disable(task.manager, group.unit, task.state_dir, task.term_seconds)
    elif group.unit and any(holder.pid == _main_pid(group.unit, task) for holder in group.holders):
        task.manager.stop(group.unit, task.term_seconds)
    procs.terminate([holder.process for holder in group.holders if holder.process], task.term_seconds)


def _main_pid(unit: str, task: Task) -> int | None:
    found = task.manager.units().get(unit)
    return found.pid if found else None


def _settle(names: set[str], task: Task) -> Gate:
    """Look again until nothing is held for `stable_seconds` on end; end what shows up of the same units meanwhile."""
    deadline = time.monotonic() + SETTLE_SECONDS + task.stable_seconds
    since: float | None = None
    while True:
        gate, found = task.look()
        now = time.monotonic()
        if gate.verdict <= Verdict.WARN:
            since = now if since is None else since
            if now - since >= task.stable_seconds:
                return gate
        else:
            since = None
            stray = [holder.process for group in found if group.name in names and group.unit for holder in group.holders]
            for process in stray:
                if process:
                    procs.send(process, signal.SIGKILL)
            stuck = [process for process in stray if process and process.stuck]
            if now >= deadline or stuck:
                gate.problems += [_reboot(process) for process in stuck]
                return gate
        time.sleep(0.2)  # neither the driver nor the kernel tells when memory comes back


def _reboot(process: procs.Process) -> Problem:
    what = f"in D state after SIGKILL: {process.command}"
    return Problem("gpu-holder-stuck", f"process {process.pid}", what, "reboot the host (reboot-required)")
