# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Can the server really do the work? A predicate over what was seen of it: process, log, port, answers, and a dump.

`look` gathers one poll's worth, `judge` decides. What is waited for is told as unknown and not settled.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import bounded, dumpfile, durable, procs, redact, sglang_log
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.journal import boot_id
from ansible_collections.relight.recovery.plugins.module_utils.services import UNIT

SCHEMA = 1
STAGES = ("spawned", *sglang_log.LOG_STAGES, "port", "health", "generation", "dump")
GENERATION_IDS = (1, 2, 3)
DUMP_IDS = (3, 1, 4, 1, 5)
SHELLS = frozenset(("sh", "bash", "dash", "ash", "zsh", "ksh", "fish", "su", "sudo", "nohup", "env", "setsid", "timeout", "tini"))
SERVES = re.compile(r"sglang(?:[./]srt)?[./]launch_server|(?:^|[ /])sglang serve|^sglang::")
DUMP_POLL_SECONDS = 0.05
LOG_SECONDS = 60.0


@dataclass(frozen=True)
class Target:
    """Which server, and how it may be asked."""

    host: str = "127.0.0.1"
    port: int = 30000
    unit: str = ""
    log: str | None = None
    dump_dir: str | None = None
    layers: tuple[int, ...] | None = None
    probe: bool = False
    reprobe: bool = False
    check: bool = False
    stall_seconds: float = 600.0
    http_seconds: float = 30.0
    generation_seconds: float = 60.0
    dump_seconds: float = 30.0


@dataclass(frozen=True)
class Answer:
    """What one HTTP request came to. `status` is None where none came; `timed_out` says that the time was up."""

    status: int | None
    text: str = ""
    timed_out: bool = False
    tokens: int = 0

    @property
    def good(self) -> bool:
        return self.status == 200


@dataclass(frozen=True)
class Dump:
    """What the dump probe came to. `came` is False where neither the dump nor an error appeared in time."""

    came: bool = True
    error: str | None = None
    faults: tuple[str, ...] = ()
    tokens: int = 0

    @property
    def good(self) -> bool:
        return self.came and self.error is None and not self.faults


@dataclass(frozen=True)
class Seen:
    """One poll. None means: not looked at, or it could not be seen.

    `alive` is whether the unit's process is there; `serving` whether a server is in its tree and not a shell alone.
    `holder` says who listens on the port: ours, nobody, unknown, or the process in words (`holder_foreign`).
    """

    alive: bool | None = None
    serving: bool | None = None
    log: sglang_log.Log | None = None
    log_error: str | None = None
    holder: str = "nobody"
    holder_foreign: bool = False
    health: Answer | None = None
    generation: Answer | None = None
    dump: Dump | None = None
    announced: Mapping[str, Any] | None = None
    proven: bool = False  # this instance generated and dumped in an earlier poll
    batches_moved: bool = False
    idle_seconds: float = 0.0
    age_seconds: float | None = None


@dataclass(frozen=True)
class Judgement:
    gate: Gate
    settled: bool
    stage: str
    progress: str


def is_server(name: str, command: str) -> bool:
    """Whether a process is the server itself, and not a shell whose command line speaks of it."""
    words = command.split()
    program = os.path.basename(words[0]).lstrip("-") if words else ""
    return name not in SHELLS and program not in SHELLS and bool(SERVES.search(command) or SERVES.search(name))


def stage_of(seen: Seen) -> str:
    """The furthest stage that was proven."""
    if seen.dump and seen.dump.good:
        return "dump"
    if seen.generation and seen.generation.good:
        return "generation"
    if seen.health and seen.health.good and told_enough(seen.log):
        return "health"
    if seen.holder == "ours" and told_enough(seen.log):
        return "port"
    return (seen.log.stage if seen.log else None) or "spawned"


def marker(seen: Seen) -> str:
    """Changes whenever the server gets on. Access lines do not count: our own requests make them."""
    log = seen.log
    told = (log.lines, log.batches, log.loading) if log else None
    return f"{stage_of(seen)} {told} {seen.serving} {seen.health.status if seen.health else None}"


def progress_of(seen: Seen) -> str:
    """One clause for people: where the server is."""
    stage = stage_of(seen)
    log = seen.log
    if stage == "loading" and log:
        ranks = f", {len(log.loaded_ranks)} of {log.ranks} ranks loaded" if log.ranks and log.ranks > 1 else ""
        text = f"loading weights {log.loading[0]}/{log.loading[1]}{ranks}" if log.loading else f"loading weights{ranks}"
    else:
        text = {
            "spawned": "starting" if seen.serving is not False else "no server process yet",
            "args": "importing",
            "init": "joining the ranks",
            "loaded": "weights loaded",
            "kv": "memory pool made",
            "capturing": "capturing graphs",
            "warmup": "warming up",
            "fired-up": "fired up, the port is not open",
            "port": f"port open, /health answers {_answer(seen.health)}",
            "health": "healthy",
            "generation": "generates",
            "dump": "generates and dumps",
        }[stage]
    return text


def _answer(answer: Answer | None) -> str:
    if answer is None:
        return "nothing"
    return "too late" if answer.timed_out else str(answer.status or answer.text)


def judge(seen: Seen, target: Target) -> Judgement:
    """The verdict on one poll. The first rule that has something to say decides."""
    gate = Gate("sglang_ready", _evidence(seen))
    where = f"{target.host}:{target.port}"
    settled = True
    for rule in (_absent_by_plan, _foreign_port, _dead, _unfinished, _failed_probe, _unproven):
        found = rule(seen, target, where)
        if found:
            problem, settled = found
            gate.problems.append(problem)
            break
    return Judgement(gate, settled, stage_of(seen), progress_of(seen))


def _evidence(seen: Seen) -> dict[str, Any]:
    log = seen.log
    begin = log.since or log.times.get("args") if log else None
    times = log.times if log and begin else {}
    return {
        "stage": stage_of(seen),
        "stage_seconds": {name: round(stamp - (begin or 0), 1) for name, stamp in times.items() if stamp is not None},
        "ranks": log.ranks if log else None,
        "ranks_loaded": len(log.loaded_ranks) if log else None,
        "log_says": log.says() if log else seen.log_error or "there is no log",
        "port_held_by": seen.holder,
        "health": _answer(seen.health),
        "instance": (seen.announced or {}).get("instance"),
        "proven_before": seen.proven,
        "probe_tokens": sum(probe.tokens for probe in (seen.generation, seen.dump) if probe),
        "age_seconds": round(seen.age_seconds, 1) if seen.age_seconds is not None else None,
        "idle_seconds": round(seen.idle_seconds, 1),
    }


def _absent_by_plan(seen: Seen, target: Target, where: str) -> tuple[Problem, bool] | None:
    if not target.check or seen.alive or seen.alive is None:
        return None
    what = "no server runs yet; what starts it was not done in check mode"
    return Problem("depends-on-planned-act", where, what, "run recover.yml without --check", Verdict.UNKNOWN), True


def _foreign_port(seen: Seen, target: Target, where: str) -> tuple[Problem, bool] | None:
    if not seen.holder_foreign:
        return None
    remedy = "stop it: recover.yml does where its unit is listed in the inventory or consented to"
    return Problem("port-taken", where, f"the port is held by {seen.holder}, not by {target.unit or 'our server'}", remedy), True


def _dead(seen: Seen, target: Target, where: str) -> tuple[Problem, bool] | None:
    log = seen.log
    if log and log.doomed and log.cause:
        return Problem("server-fatal", where, f'the server died of "{log.cause}"', "mend this cause, then run recover.yml again"), True
    if log and log.stopped:
        return Problem("server-stopped", where, "the server was stopped on request (SIGTERM)", "run recover.yml to start it"), True
    if seen.alive is not False and not (log and log.doomed):
        return None
    last = f': its log says "{log.cause or log.last_line}"' if log and log.last_line else ""
    if not last and seen.alive is False:
        return Problem("server-absent", where, f"no server runs for {target.unit or 'this port'}", "run recover.yml to start it"), True
    return Problem("server-dead", where, f"the server is gone{last}", "read its log, then run recover.yml again"), True


def told_enough(log: sglang_log.Log | None) -> bool:
    """Whether the log is no reason to wait: it tells of the end of the start, or of no stage at all."""
    return log is None or log.cut or log.was_ready or not log.times


def _unfinished(seen: Seen, target: Target, where: str) -> tuple[Problem, bool] | None:
    """Still on its way, or stalled there; a log that does not show its beginning proves nothing by itself."""
    log = seen.log
    if seen.proven and ((seen.health and seen.health.good) or seen.batches_moved):
        return None  # a long prefill keeps /health waiting: work that goes on says more
    if seen.alive and seen.holder in ("ours", "unknown") and seen.health and seen.health.good and told_enough(log):
        return None
    if seen.alive and seen.idle_seconds >= target.stall_seconds:
        what = f"no progress for {seen.idle_seconds:.0f} s: {progress_of(seen)}"
        return Problem("server-stalled", where, what, "read its log and the kernel's; recover.yml restarts it once it was stopped"), True
    if log and log.cut:
        what = "the log's beginning is not here: how many ranks have loaded is unknown"
        return Problem("log-cut", where, what, "wait for later stages, or name the whole log", Verdict.UNKNOWN), False
    if seen.alive is None:
        return Problem("server-unseen", where, "no server process was seen", "look with the rights to see it", Verdict.UNKNOWN), False
    return Problem("server-starting", where, progress_of(seen), "wait: it gets on", Verdict.UNKNOWN), False


def _failed_probe(seen: Seen, target: Target, where: str) -> tuple[Problem, bool] | None:
    generation, dump = seen.generation, seen.dump
    restart = "stop the server and run recover.yml again"
    if generation and generation.timed_out:
        if seen.batches_moved:
            return Problem("server-busy", where, "a generation took too long, but batches go on", "wait", Verdict.UNKNOWN), False
        what = f"/health answers {_answer(seen.health)}, but a generation of one token does not end within {target.generation_seconds:g} s"
        return Problem("server-wedged", where, what, restart), True
    if generation and not generation.good:
        return Problem("generation-failed", where, f"/generate answers {_answer(generation)}: {generation.text}", restart), True
    if dump is None:
        return None
    place = target.dump_dir or where
    if dump.error is not None:
        return Problem(
            "dump-refused", place, f"the server refused to dump: {dump.error}", "mend this cause, then run recover.yml again"
        ), True
    if not dump.came:
        silent = "no dump plugin of this server announced itself, and " if not seen.announced else ""
        what = f"{silent}no dump of a marked request came within {target.dump_seconds:g} s"
        return Problem(
            "dump-missing", place, what, "see hs_patch_check: the server's environment, or its plugin, is not the right one"
        ), True
    if dump.faults:
        return Problem("dump-wrong", place, "; ".join(dump.faults), "see hs_patch_check: another plugin, layers or model than wanted"), True
    return None


def _unproven(seen: Seen, target: Target, where: str) -> tuple[Problem, bool] | None:
    done = seen.generation and seen.generation.good and (target.dump_dir is None or (seen.dump and seen.dump.good))
    if seen.proven or done:
        return None
    why = "check mode sends none" if target.check else "none was asked for"
    what = f"it answers /health, but no generation has proven this instance: {why}"
    return Problem("server-unproven", where, what, "look with probe: true, outside check mode", Verdict.UNKNOWN), True


# ---- the look ----------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """ready.json: what one poll leaves for the next, of one server process, and the sums over all of them."""

    key: str = ""
    marker: str = ""
    since: float = 0.0  # on the monotonic clock, which goes on from process to process
    log: dict[str, Any] = field(default_factory=dict)
    inode: int = 0
    offset: int = 0
    proven_instance: str | None = None
    probe_tokens: int = 0
    health_requests: int = 0

    def for_key(self, key: str) -> Memory:
        """This memory, or a fresh one where it is of another process. The sums stay."""
        if self.key == key:
            return self
        return Memory(key=key, since=time.monotonic(), probe_tokens=self.probe_tokens, health_requests=self.health_requests)


def recall(state_dir: str | None) -> Memory:
    """What the last poll left; nothing where it left nothing that can be read."""
    if not state_dir:
        return Memory()
    try:
        with open(os.path.join(state_dir, "ready.json"), encoding="utf-8") as handle:
            value = json.load(handle)
        return Memory(**value["memory"]) if value["schema"] == SCHEMA else Memory()
    except (OSError, ValueError, KeyError, TypeError):
        return Memory()


def remember(state_dir: str | None, memory: Memory) -> None:
    """Leave it for the next poll. Raises OSError."""
    if state_dir:
        os.makedirs(state_dir, exist_ok=True)
        durable.write_json(os.path.join(state_dir, "ready.json"), {"schema": SCHEMA, "memory": memory.__dict__})


def started_at(process: procs.Process) -> float:
    """When a process began, as seconds since the epoch."""
    with open("/proc/uptime", encoding="ascii") as handle:
        uptime = float(handle.read().split()[0])
    return time.time() - uptime + process.start_time / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Host:
    """What /proc shows of the server: its process, its tree, and who holds the port."""

    root: procs.Process | None
    tree: frozenset[int]
    serving: bool
    holder: str
    holder_foreign: bool


def look_at_host(pid: int | None, unit: str, port: int) -> Host:
    """Read /proc. Runs in a bounded child."""
    processes = procs.every()
    root = processes.get(pid) if pid else None
    if root and root.zombie:
        root = None
    tree = procs.tree(root.pid, processes) if root else set()
    serving = any(is_server(processes[member].name, processes[member].command) for member in tree)
    files = procs.open_files(("socket:",))
    holders = procs.listeners([port], files)
    ours = {item.pid for item in holders if item.pid is not None and (item.pid in tree or (root and _marked(item.pid, unit)))}
    if not holders:
        holder, foreign = "nobody", False
    elif ours:
        holder, foreign = "ours", False
    elif tree.intersection(files.unreadable) and all(item.pid is None for item in holders):
        holder, foreign = "unknown", False
    else:
        holder, foreign = _in_words(holders, processes), True
    return Host(root, frozenset(tree), serving, holder, foreign)


def _marked(pid: int, unit: str) -> bool:
    """Whether a process that left the tree was still started by our unit."""
    return bool(unit) and (procs.environment(pid, ("RELIGHT_",)) or {}).get(UNIT) == unit


def _in_words(holders: list[procs.Listener], processes: Mapping[int, procs.Process]) -> str:
    known = [processes[item.pid] for item in holders if item.pid is not None and item.pid in processes]
    if not known:
        return "a process that cannot be seen from here"
    return f"pid {known[0].pid} ({known[0].command})"


def ask(host: str, port: int, method: str, path: str, body: Any, seconds: float) -> Answer:
    """One HTTP request, bounded as a whole in a child: a server that sends a byte now and then does not hold us."""
    try:
        status, data = bounded.call(_request, (host, port, method, path, body, seconds), seconds)
    except bounded.TimedOut:
        return Answer(None, f"no answer within {seconds:g} s", timed_out=True)
    except bounded.ChildFailed as error:
        return Answer(None, str(error), timed_out=error.kind in ("TimeoutError", "timeout"))
    return Answer(status, redact.text(data.decode(errors="replace"))[:300])


def _request(host: str, port: int, method: str, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1" if host in ("0.0.0.0", "::") else host, port, timeout=seconds)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(1 << 20)
    finally:
        connection.close()


def _generate(target: Target, rid: str, ids: tuple[int, ...], new_tokens: int) -> Answer:
    """Send one small request; take it back where it does not end in time, so that probes never pile up."""
    body = {"rid": rid, "input_ids": list(ids), "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0}}
    answer = ask(target.host, target.port, "POST", "/generate", body, target.generation_seconds)
    if answer.timed_out:
        ask(target.host, target.port, "POST", "/abort_request", {"rid": rid}, min(2.0, target.http_seconds))
    return Answer(answer.status, answer.text, answer.timed_out, len(ids))


def announced(target: Target, tree: frozenset[int]) -> dict[str, Any] | None:
    """What the plugin of this very server wrote when it loaded; None for no such file or one of another process."""
    if not target.dump_dir:
        return None
    try:
        with open(os.path.join(target.dump_dir, "server.json"), encoding="utf-8") as handle:
            value = json.load(handle)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get("pid") in tree and value.get("boot_id") in (None, boot_id()) else None


def probe_dump(target: Target, about: Mapping[str, Any] | None) -> Dump:
    """Ask for one marked dump, judge it, and take it away."""
    folder = target.dump_dir or ""
    rid = f"relight-probe-{secrets.token_hex(8)}"
    path = os.path.join(folder, rid)
    answer = _generate(target, rid, DUMP_IDS, 0)
    if not answer.good:
        return Dump(error=f"/generate answers {_answer(answer)}: {answer.text}", tokens=len(DUMP_IDS))
    try:
        if not _wait_for(path, f"{path}.error", target.dump_seconds):
            return Dump(came=False, tokens=len(DUMP_IDS))
        if os.path.exists(f"{path}.error"):
            return Dump(error=_error_text(f"{path}.error"), tokens=len(DUMP_IDS))
        about = about or {}
        expected = dumpfile.asked(rid, DUMP_IDS, target.layers, about.get("hidden_size"), about.get("instance"))
        return Dump(faults=tuple(dumpfile.faults(path, expected)), tokens=len(DUMP_IDS))
    finally:
        for name in (path, f"{path}.error"):
            try:
                os.unlink(name)
            except FileNotFoundError:
                pass


def _wait_for(path: str, other: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (os.path.exists(path) or os.path.exists(other)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(DUMP_POLL_SECONDS)  # the plugin renames the file into place; there is nothing to be told by
    return True


def _error_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as handle:
            return redact.text(str(json.load(handle)["error"]))[:300]
    except (ValueError, KeyError, TypeError):
        return "without a reason that can be read"


def look(target: Target, pid: int | None, memory: Memory) -> tuple[Seen, Memory]:
    """One poll: cheap looks first, and requests only to a server that is far enough for them."""
    host: Host = bounded.call(look_at_host, (pid, target.unit, target.port), 30.0)
    root = host.root
    memory = memory.for_key(f"{boot_id()} {root.pid} {root.start_time}" if root else f"{boot_id()} none")
    since = started_at(root) if root else None
    log, log_error = _read_log(target, memory, since)
    seen = Seen(
        alive=root is not None,
        serving=host.serving if root else None,
        log=log,
        log_error=log_error,
        holder=host.holder,
        holder_foreign=host.holder_foreign,
        age_seconds=time.time() - since if since else None,
    )
    if root and host.holder in ("ours", "unknown") and not (log and (log.doomed or log.stopped)):
        seen = _ask_server(seen, target, host, memory)
    if log and any(answer and not answer.good for answer in (seen.health, seen.generation)):  # what did the engine do meanwhile?
        now, log_error = _read_log(target, memory, since)
        seen = _with(seen, log=now, log_error=log_error, batches_moved=bool(now and now.batches > log.batches))
    return _with(seen, idle_seconds=_idle(seen, memory)), memory


def _with(seen: Seen, **changes: Any) -> Seen:
    return Seen(**{**seen.__dict__, **changes})


def _read_log(target: Target, memory: Memory, since: float | None) -> tuple[sglang_log.Log | None, str | None]:
    """The log up to now, or why it cannot be read."""
    if not target.log:
        return None, None
    try:
        log = sglang_log.from_plain(memory.log) if memory.log else sglang_log.Log(since=since)
    except TypeError:
        log = sglang_log.Log(since=since)
        memory.inode = memory.offset = 0
    try:
        position = sglang_log.Position(memory.inode, memory.offset)
        log, at = bounded.call(sglang_log.follow, (target.log, log, position), LOG_SECONDS)
    except (bounded.TimedOut, bounded.ChildFailed) as error:
        return None, str(error)
    memory.log, memory.inode, memory.offset = log.plain(), at.inode, at.offset
    return log, None


def _ask_server(seen: Seen, target: Target, host: Host, memory: Memory) -> Seen:
    about = announced(target, host.tree)
    instance = str((about or {}).get("instance") or memory.key)
    proven = memory.proven_instance == instance
    memory.health_requests += 1
    health = ask(target.host, target.port, "GET", "/health", None, target.http_seconds)
    seen = _with(seen, announced=about, health=health, proven=proven)
    if not (health.good and told_enough(seen.log) and target.probe and not target.check) or (proven and not target.reprobe):
        return seen
    generation = _generate(target, f"probe-{secrets.token_hex(8)}", GENERATION_IDS, 1)
    memory.probe_tokens += generation.tokens
    seen = _with(seen, generation=generation, proven=False)
    if generation.good and target.dump_dir:
        dump = probe_dump(target, about)
        memory.probe_tokens += dump.tokens
        seen = _with(seen, dump=dump)
    done = generation.good and (target.dump_dir is None or (seen.dump is not None and seen.dump.good))
    memory.proven_instance = instance if done else None
    return seen


def _idle(seen: Seen, memory: Memory) -> float:
    """How long the server has not got on."""
    now = marker(seen)
    if now != memory.marker:
        memory.marker, memory.since = now, time.monotonic()
    return time.monotonic() - memory.since
