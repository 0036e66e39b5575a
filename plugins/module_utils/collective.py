# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A bounded all-reduce over all GPUs, under the very environment of the launch: does it end, is it right, how fast is it?

One process a rank, of the interpreter that serves. A collective that hangs is no error anywhere: it is found here by its
limit, and the rank that keeps the others waiting by what each rank told last.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ansible_collections.relight.recovery.plugins.module_utils import collective_rank, redact
from ansible_collections.relight.recovery.plugins.module_utils.gate import Problem

SILENT_SECONDS = 2.0  # without a beat for so long a rank counts as silent
KEPT_LINES = 20
# Of our own environment, what a rank gets beside the launch's: nothing that changes what Python imports or NCCL does.
KEPT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "USER")


@dataclass(frozen=True)
class Plan:
    """What is to be reduced by whom. `bytes` is each rank's share."""

    python: str
    env: Mapping[str, str]
    size: int
    backend: str = "nccl"
    bytes: int = 1 << 28
    rounds: int = 5
    limit_seconds: float = 120.0


@dataclass(frozen=True)
class Rank:
    """What one rank told last. `state` is the kernel's letter of its process at the end, empty once it is gone."""

    number: int
    phase: str = "starting"
    entered: int = 0
    silent_seconds: float = 0.0
    state: str = ""
    exit: int | None = None
    right: bool | None = None
    seconds: tuple[float, ...] = ()
    said: str = ""

    @property
    def done(self) -> bool:
        return bool(self.seconds)


@dataclass(frozen=True)
class Reduced:
    """How it went. `error` says why it could not even be begun."""

    plan: Plan
    ranks: tuple[Rank, ...] = ()
    seconds: float = 0.0
    torch: str | None = None
    nccl: str | None = None
    timed_out: bool = False
    error: str | None = None

    @property
    def bus_gb_s(self) -> float | None:
        """The bus bandwidth, as nccl-tests count it, by the median of the slowest rank's rounds."""
        if not self.ranks or not all(rank.done for rank in self.ranks):
            return None
        slowest = max(statistics.median(rank.seconds) for rank in self.ranks)
        return 2 * (self.plan.size - 1) / self.plan.size * self.plan.bytes / slowest / 1e9


@dataclass
class _Running:
    """A rank's process and what came of it so far."""

    process: subprocess.Popen[bytes]
    rank: Rank
    heard: float
    rest: bytes = b""
    lines: list[str] = field(default_factory=list)


def run(plan: Plan) -> Reduced:
    """Reduce. Never takes longer than the limit and a moment; leaves no process that SIGKILL can end."""
    source = collective_rank.__loader__.get_source(collective_rank.__name__)  # type: ignore[union-attr]
    meeting = tempfile.mkdtemp(prefix="relight-collective-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    running: list[_Running] = []
    told: dict[str, str | None] = {}
    start = time.monotonic()
    try:
        for number in range(plan.size):
            running.append(_start(plan, number, str(source), os.path.join(meeting, "store")))
        timed_out = _follow(running, start + plan.limit_seconds, told)
        ranks = tuple(_ended(one) for one in running)
    except OSError as error:
        return Reduced(plan, error=f"{plan.python} cannot be run: {error.strerror}")
    finally:
        for one in running:
            _kill(one.process)
        shutil.rmtree(meeting, ignore_errors=True)
    return Reduced(plan, ranks, time.monotonic() - start, told.get("torch"), told.get("nccl"), timed_out)


def _start(plan: Plan, number: int, source: str, meeting: str) -> _Running:
    question = {
        "rank": number,
        "size": plan.size,
        "backend": plan.backend,
        "bytes": plan.bytes,
        "rounds": plan.rounds,
        "meeting": meeting,
        "limit_seconds": plan.limit_seconds,
    }
    kept = {key: value for key, value in os.environ.items() if key in KEPT}
    process = subprocess.Popen(
        [plan.python, "-B", "-c", source, json.dumps(question)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**kept, **plan.env},
        cwd="/",  # an interpreter imports from where it stands
        start_new_session=True,
    )
    return _Running(process, Rank(number), time.monotonic())


def _follow(running: list[_Running], deadline: float, told: dict[str, str | None]) -> bool:
    """Listen until all are done, one has failed, or the time is over; whether it was over."""
    poll = select.poll()
    by_fd = {one.process.stdout.fileno(): one for one in running if one.process.stdout}
    for fd in by_fd:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    while by_fd and not any(one.rank.exit for one in running):
        left = deadline - time.monotonic()
        if left <= 0:
            return True
        for fd, _event in poll.poll(min(left, 1.0) * 1000):
            chunk = os.read(fd, 1 << 16)
            if chunk:
                _hear(by_fd[fd], chunk, told)
                continue
            poll.unregister(fd)
            one = by_fd.pop(fd)
            with suppress(subprocess.TimeoutExpired):
                one.rank = replace(one.rank, exit=one.process.wait(5))
    return False


def _hear(one: _Running, chunk: bytes, told: dict[str, str | None]) -> None:
    *lines, one.rest = (one.rest + chunk).split(b"\n")
    for line in lines:
        try:
            value = json.loads(line)
            rank = replace(one.rank, phase=str(value["phase"]), entered=int(value["entered"]))
            if "seconds" in value:
                rank = replace(rank, seconds=tuple(float(second) for second in value["seconds"]), right=bool(value["right"]))
        except (ValueError, KeyError, TypeError):
            one.lines = [*one.lines, line.decode(errors="replace")][-KEPT_LINES:]
            continue
        one.rank, one.heard = rank, time.monotonic()
        told.update({key: value[key] for key in ("torch", "nccl") if key in value})


def _ended(one: _Running) -> Rank:
    said = [line.strip() for line in one.lines if line.strip()]
    return replace(
        one.rank,
        state=_state(one.process.pid) if one.rank.exit is None else "",
        silent_seconds=time.monotonic() - one.heard,
        said=redact.text(said[-1]) if said else "",
    )


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as handle:
            return handle.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the rank and what it started. One stuck in the kernel is left behind, not waited for."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout:
        process.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)


# Judging


def judge(done: Reduced) -> list[Problem]:
    """What the all-reduce tells of the GPUs and their links. Pure."""
    if done.error:
        return [Problem("collective-failed", "all-reduce", done.error, "set relight_sglang_python to the interpreter that serves")]
    failed = [rank for rank in done.ranks if rank.exit]
    if failed:
        rank = failed[0]
        what = f"rank {rank.number} ended with {rank.exit} while {rank.phase}: {rank.said or 'it said nothing'}"
        return [Problem("collective-failed", f"GPU {rank.number}", what, "mend what it says; NCCL_DEBUG=INFO tells more")]
    if not all(rank.done for rank in done.ranks):
        return [_hang(done)]
    wrong = [str(rank.number) for rank in done.ranks if not rank.right]
    if wrong:
        what = f"rank {', '.join(wrong)} got a wrong sum: data is damaged on its way"
        return [Problem("collective-wrong", "all-reduce", what, "take the GPU or link out of service; look for ECC and NVLink errors")]
    return []


def _hang(done: Reduced) -> Problem:
    """Name who keeps the others waiting: stopped or silent ranks, else those that entered the fewest rounds."""
    limit = f"no end within {done.plan.limit_seconds:g} s"
    waiting = [rank for rank in done.ranks if not rank.done]
    silent = [rank for rank in waiting if rank.state in ("T", "t", "D") or rank.silent_seconds > SILENT_SECONDS]
    order = ("starting", "importing", "joining", "reducing", "done")
    places = [(order.index(rank.phase) if rank.phase in order else 0, rank.entered) for rank in waiting]
    behind = [rank for rank, place in zip(waiting, places) if place == min(places)] if len(set(places)) > 1 else []
    suspects = silent or behind
    remedy = "NCCL_DEBUG=INFO tells more; look for Xid in the kernel log, and try NCCL_P2P_DISABLE=1 to tell links from GPUs"
    if not suspects:
        phases = ", ".join(sorted({rank.phase for rank in waiting}))
        what = f"{limit}: all {len(waiting)} ranks live and wait for each other while {phases}"
        return Problem("collective-hang", "all-reduce", what, remedy)
    names = ", ".join(_name(rank) for rank in suspects)
    return Problem("collective-hang", f"GPU {suspects[0].number}", f"{limit}: the others wait for {names}", remedy)


def _name(rank: Rank) -> str:
    how = {"T": "stopped", "t": "stopped", "D": "in D state"}.get(rank.state)
    how = how or (f"silent for {rank.silent_seconds:.0f} s" if rank.silent_seconds > SILENT_SECONDS else "behind")
    return f"rank {rank.number} ({how}, {rank.phase}, {rank.entered} rounds entered)"
