# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What the log of one start of an SGLang server tells: how far it came, and what killed it. Fed line by line.

The state is plain data, so that the next poll goes on where this one ended. Text is redacted as it is read.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import redact

LOG_STAGES = ("args", "init", "loading", "loaded", "kv", "capturing", "warmup", "fired-up")
MOST_CAUSES = 20

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STAMPED = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?((?: [A-Z]+\d+)*)\] ?(.*)")
STAMP_INSIDE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
PROGRESS = re.compile(r"[Ll]oading (?:safetensors )?(?:checkpoint )?shards:.*?\| *(\d+)/(\d+)")
ACCESS = re.compile(r'INFO: +[\d.a-f:\[\]]+:\d+ - "')
BATCH = re.compile(r"(?:Prefill|Decode) batch")
MARKS = (
    ("init", re.compile(r"Init (?:torch distributed|parallel) begin")),
    ("loading", re.compile(r"Load weight begin")),
    ("loaded", re.compile(r"Load weight end")),
    ("kv", re.compile(r"KV Cache is allocated|Memory pool end")),
    ("capturing", re.compile(r"Capture .*graph begin|Capturing batches")),
    ("warmup", re.compile(r"Uvicorn running on")),
    ("fired-up", re.compile(r"The server is fired up and ready to roll")),
)
SIZES = {name: re.compile(rf"(?<![a-z_]){name}'?[=:] ?(\d+)") for name in ("tp_size", "pp_size", "dp_size", "nnodes")}
DP_ATTENTION = re.compile(r"enable_dp_attention'?[=:] ?True")

# What ends a server, by how surely it does. The first of the surest kind is quoted.
REFUSED, DEADLY, SUSPECT, LAST_WORDS = range(4)
REFUSAL = re.compile(r"Relight(?: dump plugin)?(?: [\w.+-]+)? refuses to start: .*")
# What only another start writes after one was stopped, should it end before its arguments are logged.
BEGINNING = re.compile(r"launch_server\.py:\d+: |^usage: | refuses to start: ")
DYING_HEAD = re.compile(r"hit an exception|[Ff]ailed to launch|[Ii]nitialization failed")
DYING = re.compile(r"SIGQUIT received|Received sigquit|[Rr]ank \d+ scheduler (?:is dead|died)|Scheduler died")
DEADLY_LINE = re.compile(r"\[Errno 98\].*|.*[Aa]ddress already in use.*|.*EADDRINUSE.*|^[\w.-]+: error: .*")
SUSPECT_LINE = re.compile(
    r"out of memory|OutOfMemoryError|Not enough memory|NCCL error|nccl(?:System|UnhandledCuda|Internal|Remote)Error"
    r"|illegal memory access|Bus error|SIGBUS|exit ?code[ :=]*-7\b|[Ss]egmentation fault|SIGSEGV|No space left on device"
    r"|SafetensorError|Fatal Python error"
)
HARMLESS = re.compile(r"[Ww]arning|WARN\b|Ignore import error")
TRACEBACK = "Traceback (most recent call last):"
CHAINED = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")


@dataclass
class Log:
    """One start as its log tells it. `since` is when the process began: older lines are another start's."""

    since: float | None = None
    ranks: int | None = None
    loaded_ranks: list[str] = field(default_factory=list)
    loading: tuple[int, int] | None = None
    times: dict[str, float | None] = field(default_factory=dict)  # stage: when its line was stamped
    cut: bool = False
    stopped: bool = False
    dying: bool = False
    causes: list[list[Any]] = field(default_factory=list)  # [kind, text], in order
    lines: int = 0  # without access lines: what moves while the server gets on
    batches: int = 0
    last_line: str = ""
    trace_open: bool = False
    trace_deadly: bool = False
    trace_chained: bool = False
    trace_cause: int | None = None

    @property
    def stage(self) -> str | None:
        """The furthest stage that was reached by every rank."""
        reached = [name for name in LOG_STAGES if name in self.times]
        if reached and reached[-1] == "loaded" and not self.all_loaded:
            return "loading"
        return reached[-1] if reached else None

    @property
    def all_loaded(self) -> bool:
        """Whether as many ranks have loaded as the arguments ask for; False where the arguments were not seen."""
        return self.ranks is not None and len(self.loaded_ranks) >= self.ranks

    @property
    def was_ready(self) -> bool:
        return "fired-up" in self.times

    @property
    def doomed(self) -> bool:
        """Whether a line was seen after which no server lives, be its process still there or not."""
        surest = min((kind for kind, _words in self.causes), default=LAST_WORDS)
        return self.dying or surest <= DEADLY or (surest == SUSPECT and not self.was_ready)

    @property
    def cause(self) -> str | None:
        """The first of the surest causes, to be quoted; of our own refusals all, since each must be mended."""
        refusals = [text for kind, text in self.causes if kind == REFUSED]
        if refusals:
            return " ".join(dict.fromkeys(refusals))
        return min(self.causes, key=lambda cause: cause[0])[1] if self.causes else None

    def says(self) -> str:
        """The log's own answer: fatal, stopped, ready, starting or unknown (its beginning is not here)."""
        if self.doomed:
            return "fatal"
        if self.stopped:
            return "stopped"
        if self.was_ready:
            return "ready"
        return "unknown" if self.cut or not self.times else "starting"

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def from_plain(value: dict[str, Any]) -> Log:
    """Raises TypeError for what `plain` did not write."""
    log = Log(**value)
    log.loading = tuple(log.loading) if log.loading else None  # type: ignore[assignment]
    return log


def feed(log: Log, line: str) -> Log:
    """Take one whole line. Returns the log to go on with: a fresh one where the line shows that another start began."""
    line = line.rstrip("\n").rpartition("\r")[2]
    line = COLOUR.sub("", line) if "\x1b" in line else line
    line = _after_bar(log, line)
    found = STAMPED.match(line)
    stamp = _seconds(found.group(1)) if found else None
    if stamp is not None and log.since is not None and stamp < int(log.since) - 1:
        return Log(since=log.since)
    tag, text = (found.group(2).strip(), found.group(3)) if found else ("", line)
    if text.startswith("server_args="):
        log = Log(since=log.since, lines=log.lines, batches=log.batches)
        log.ranks = _ranks(text)
        log.times["args"] = stamp
        log.last_line = "server_args=..."
        return log
    if log.stopped and BEGINNING.search(text):
        log = Log(since=log.since, lines=log.lines, batches=log.batches)
    if ACCESS.search(text):
        return log
    log.lines += 1
    if text.strip():
        log.last_line = text.strip()
    if BATCH.match(text):
        log.batches += 1
    elif not _trace(log, text, stamp is not None):
        _progress(log, text)
        _marks(log, text, tag, stamp)
        _endings(log, text)
    return log


def _after_bar(log: Log, line: str) -> str:
    """The stamped line that another rank wrote behind an unfinished progress bar, or the line as it is."""
    if "shards:" not in line:
        return line
    stamp = STAMP_INSIDE.search(line)
    if stamp is None or stamp.start() == 0:
        return line
    _progress(log, line[: stamp.start()])
    return line[stamp.start() :]


@lru_cache(maxsize=64)
def _seconds(stamp: str) -> float:
    """A stamp of this host's time zone as seconds since the epoch; many lines in a row share one."""
    return time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S"))


def peek(log: Log, unfinished: str) -> None:
    """Take the progress bar that the log ends with; its line is not over."""
    _progress(log, unfinished)


def _ranks(text: str) -> int:
    """How many ranks this host runs, by the arguments."""
    sizes = {name: int(found.group(1)) for name, found in ((name, pattern.search(text)) for name, pattern in SIZES.items()) if found}
    replicas = 1 if DP_ATTENTION.search(text) else sizes.get("dp_size", 1)
    whole = sizes.get("tp_size", 1) * sizes.get("pp_size", 1) * replicas
    return max(1, whole // max(1, sizes.get("nnodes", 1)))


def _progress(log: Log, text: str) -> None:
    found = PROGRESS.findall(text)
    if found:
        log.loading = (int(found[-1][0]), int(found[-1][1]))
        log.cut = log.cut or "args" not in log.times


def _marks(log: Log, text: str, tag: str, stamp: float | None) -> None:
    for stage, pattern in MARKS:
        if pattern.search(text):
            log.cut = log.cut or "args" not in log.times
            log.times.setdefault(stage, stamp)
            if stage == "loaded" and tag not in log.loaded_ranks:
                log.loaded_ranks.append(tag)
            return
    if "SIGTERM received" in text:
        log.stopped = True


def _endings(log: Log, text: str) -> None:
    """Note lines that tell why a server ends. Once it was asked to stop, what its parts say in falling is no cause."""
    if log.stopped:
        return
    refused = REFUSAL.search(text)
    if refused:
        _cause(log, REFUSED, refused.group(0))
    elif DYING.search(text):
        log.dying = True
    elif HARMLESS.search(text):
        return
    elif DEADLY_LINE.search(text):
        _cause(log, DEADLY, text)
    elif SUSPECT_LINE.search(text):
        _cause(log, SUSPECT, text)


def _cause(log: Log, kind: int, text: str) -> int | None:
    if len(log.causes) >= MOST_CAUSES:
        return None
    log.causes.append([kind, redact.text(text.strip())[:300]])
    return len(log.causes) - 1


def _trace(log: Log, text: str, stamped: bool) -> bool:
    """Follow a traceback to the exception that it ends with; True where the line was part of one."""
    if text.endswith(TRACEBACK):
        if not log.trace_chained:
            log.trace_deadly = bool(DYING_HEAD.search(text))
            log.trace_cause = None
        log.trace_open, log.trace_chained = True, False
        return True
    if CHAINED.match(text):
        log.trace_chained = log.trace_cause is not None
        return True
    if not log.trace_open or stamped:
        return False
    if EXCEPTION.match(text):
        _end_trace(log, text)
    return True


def _end_trace(log: Log, text: str) -> None:
    """The first exception of a chain is the cause; what it led to is told beside it."""
    log.trace_open = False
    if log.stopped:
        return
    if log.trace_cause is not None:
        first = log.causes[log.trace_cause]
        first[1] = f"{first[1].partition(' (then ')[0]} (then {redact.text(text)[:200]})"
        return
    refused = REFUSAL.search(text)
    surely = DEADLY if log.trace_deadly else SUSPECT if SUSPECT_LINE.search(text) else LAST_WORDS
    log.trace_cause = _cause(log, REFUSED, refused.group(0)) if refused else _cause(log, surely, text)
    log.dying = log.dying or log.trace_deadly


@dataclass
class Position:
    """How far the file was read: to which byte of which inode."""

    inode: int = 0
    offset: int = 0


def follow(path: str, log: Log, at: Position) -> tuple[Log, Position]:
    """Read on from `at`. A file that was rotated or truncated is read from its beginning. Raises OSError."""
    with open(path, "rb") as handle:
        status = os.fstat(handle.fileno())
        offset = at.offset if at.inode == status.st_ino and at.offset <= status.st_size else 0
        handle.seek(offset)
        for line in handle:
            if not line.endswith(b"\n"):
                peek(log, line.decode(errors="replace"))
                break
            offset += len(line)
            log = feed(log, line.decode(errors="replace"))
    log.last_line = redact.text(log.last_line)[:300]
    return log, Position(status.st_ino, offset)
