# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A store looked at by children that may hang, judged as a gate, and its doubtful files moved to quarantine."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import bounded, inventory
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.inventory import Found, Request, Tally
from ansible_collections.relight.recovery.plugins.module_utils.layouts import layout
from ansible_collections.relight.recovery.plugins.module_utils.store import Entry, Store

NAMED = 10  # files of one verdict that get a problem each; the rest is counted
REMEDIES = {
    inventory.UNJUDGED: "see why it cannot be read; nothing was moved",
    inventory.UNREAD: "look at depth headers or content",
}


class Hung(Exception):
    """A look did not go on within its limit. `name` is the file that it was at, or ''."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Failed(Exception):
    """A look ended with an error; `kind` is that of the exception."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Plan:
    """How to look: the whole store's request, the host environment's interpreter, and how long a look may stand still."""

    request: Request
    host_python: str | None
    stall_seconds: float


# --- children ----------------------------------------------------------------------------------------------------------


def _raw_lines(process: subprocess.Popen[bytes], stall_seconds: float) -> Iterator[bytes]:
    """The child's lines as they come. Raises TimeoutError where none comes within the limit."""
    if process.stdout is None:
        raise ValueError("the child was started without a pipe")
    fd, rest = process.stdout.fileno(), b""
    while True:
        if not select.select([fd], [], [], stall_seconds)[0]:
            raise TimeoutError
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _spawned(plan: Plan, request: Request) -> Iterator[dict[str, Any]]:
    """A survey by the host environment. Raises Hung, Failed."""
    asked = os.memfd_create("relight-request")
    with open(asked, "w+b") as handle:
        handle.write(json.dumps(asdict(request)).encode())
        handle.seek(0)
        argv = [plan.host_python or "", "-m", "relight.hostlook"]
        try:
            process = subprocess.Popen(
                argv, stdin=handle, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/"
            )
        except OSError as error:
            raise Failed(str(error), "NoHostEnvironment") from None
    name, ended = "", False
    try:
        for raw in _raw_lines(process, plan.stall_seconds):
            line = json.loads(raw)
            if "error" in line:
                raise Failed(line["error"], line["kind"])
            name = line.get("now", name)
            ended = ended or "end" in line
            yield line
    except TimeoutError:
        raise Hung(name) from None
    finally:
        _end(process)
    if not ended:
        raise Failed(f"{plan.host_python} cannot look into samples (exit status {process.returncode})", "NoHostEnvironment")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what still runs; a child that is stuck in the kernel is left behind, not waited for."""
    if process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    if process.poll() is None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    if process.stdout is not None:
        process.stdout.close()


def _listed(request: Request) -> list[dict[str, Any]]:
    return list(inventory.survey(request))


def _forked(plan: Plan, request: Request) -> list[dict[str, Any]]:
    """A survey by this Python, whole or not at all. Raises Hung, Failed."""
    try:
        return bounded.call(_listed, (request,), 10 * plan.stall_seconds)
    except bounded.TimedOut:
        raise Hung("") from None
    except bounded.ChildFailed as error:
        raise Failed(str(error), error.kind) from None


def _folder(plan: Plan, folder: str, tally: Tally, enter: Callable[[Found], None]) -> None:
    """Take in one directory. A file at which a look hangs is unjudged, and the look begins again without it. Raises Hung, Failed."""
    request = replace(plan.request, folder=folder)
    done: list[str] = []
    hung = 0
    while True:
        request = replace(request, skip=tuple(done))
        try:
            for line in _spawned(plan, request) if plan.host_python else _forked(plan, request):
                if "found" in line:
                    done.append(os.path.basename(line["found"]["path"]))
                if (hung and "found" in line and line["found"]["verdict"] == inventory.MISSING) or "temporaries" not in line or not hung:
                    tally.add(line)
                    if line.get("found", {}).get("enter"):
                        enter(tally.enter[-1])
            return
        except Hung as error:
            hung += 1
            if not error.name or hung > 3:
                raise
            done.append(error.name)
            path = inventory.inside(folder, error.name)
            index = layout(plan.request.layout, plan.request.dataset).index_of(path)
            what = f"did not answer within {plan.stall_seconds:g} s"
            tally.add({"found": asdict(Found(path, index, inventory.UNJUDGED, what))})


def look(plan: Plan, enter: Callable[[Found], None] = lambda found: None) -> Tally:
    """Look at the whole store. Raises Hung (with the directory as its name), Failed.

    `enter` is called for each sample that has earned a line in the manifest as soon as it was read.
    """
    tally = Tally()
    try:
        _folder(plan, "", tally, enter)
        for folder in list(tally.shards):
            try:
                _folder(plan, folder, tally, enter)
            except Hung as error:
                raise Hung(os.path.join(folder, error.name)) from None
    except Hung as error:
        raise Hung(os.path.join(plan.request.store, error.name)) from None
    return tally


def usable(plan: Plan) -> Plan:
    """The plan without a host environment where there is none. Raises Failed where the depth asks for one."""
    if plan.host_python:
        probe = replace(plan, request=replace(plan.request, store="/nonexistent", dataset=None, layout="specforge", folder=""))
        try:
            for _line in _spawned(probe, probe.request):
                pass
            return plan
        except Hung:
            problem = f"{plan.host_python} does not answer"
        except Failed as error:
            problem = str(error)
    else:
        problem = "host_python is not set"
    if plan.request.depth == "content":
        raise Failed(problem, "NoHostEnvironment")
    return replace(plan, host_python=None)


# --- judging: pure -----------------------------------------------------------------------------------------------------


def refusal(error: Hung | Failed, path: str) -> Problem:
    """What is said when the store could not be looked at."""
    if isinstance(error, Hung):
        return Problem("store-hung", error.name, "does not answer", "see to the mount that holds it", Verdict.UNKNOWN)
    if error.kind == "NoHostEnvironment":
        remedy = "the host stage of recover.yml installs it; or look at depth headers"
        return Problem("no-host-environment", path, str(error), remedy, Verdict.UNKNOWN)
    if error.kind == "UnknownLayout":
        return Problem("store-layout-unknown", path, str(error), "set relight_store_layout to one of them")
    if error.kind == "NewerStore":
        return Problem("store-newer", path, str(error), "use the Relight that wrote it, or a newer one")
    if error.kind in ("ValueError", "JSONDecodeError"):
        remedy = "put runs.json back from a copy; it says which samples belong together"
        return Problem("runs-broken", path, str(error), remedy, Verdict.UNKNOWN)
    if error.kind == "BadDataset":
        return Problem(
            "fixed-records-broken", path, str(error), "put the state directory's dataset folder back from a copy", Verdict.UNKNOWN
        )
    return Problem("store-unreadable", path, str(error), "make it readable for this user, or run with become", Verdict.UNKNOWN)


def _problems_of(verdict: str, found: list[Found]) -> Iterator[Problem]:
    worry = {inventory.UNJUDGED: Verdict.UNKNOWN, inventory.UNREAD: Verdict.WARN}.get(verdict, Verdict.FAIL)
    remedy = REMEDIES.get(verdict, "recover.yml quarantines and redoes it")
    for item in found[:NAMED]:
        yield Problem(f"sample-{verdict}", item.path, item.why, remedy, worry)
    if len(found) > NAMED:
        yield Problem(f"sample-{verdict}", "the store", f"{len(found) - NAMED} more files are {verdict}", remedy, worry)


def judge(tally: Tally) -> Gate:
    """The gate of a store that was looked at. Samples that are missing are numbers, not problems."""
    gate = Gate("shard_inventory", tally.evidence())
    for verdict in (*inventory.MOVED, inventory.UNJUDGED, inventory.UNREAD):
        gate.problems += _problems_of(verdict, [item for item in tally.found if item.verdict == verdict])
    if tally.adopted:
        remedy = "none needed: their content was read, and the continuity check vouches for them"
        trust = ", ".join(f"{count} by {name}" for name, count in tally.trusted.items() if count and name != inventory.WRITTEN)
        what = f"{tally.adopted} samples were made before this store had manifests; trusted {trust}"
        gate.problems.append(Problem("samples-adopted", "the store", what, remedy, Verdict.WARN))
    if not tally.fixed and tally.intact:
        remedy = "put the state directory's dataset folder back, or let the client fix the records again"
        what = "no fixed records: the samples' tokens could not be compared with those of their records"
        gate.problems.append(Problem("no-fixed-records", "the store", what, remedy, Verdict.WARN))
    return gate


# --- acting ------------------------------------------------------------------------------------------------------------


def moves(tally: Tally) -> list[Found]:
    """What quarantine is for, in the order of the store."""
    return [item for item in tally.found if item.verdict in inventory.MOVED]


def actions(tally: Tally) -> list[str]:
    """What `act` does, as sentences."""
    moved = [f"move {item.path} to quarantine: {item.verdict}, {item.why}" for item in moves(tally)]
    return moved + [f"enter {item.path} in its manifest, which lacks it" for item in tally.enter]


def enter(place: Store, found: Found) -> None:
    """Enter one sample in its manifest. Hold the store's lock. Raises OSError."""
    if found.enter is not None:
        place.enter(os.path.dirname(found.path), Entry(**found.enter))


def act(place: Store, tally: Tally, entered: Collection[str] = ()) -> Tally:
    """Move and enter what `actions` says, but for the paths that are entered already; returns what the store holds then.

    Hold the store's lock. Raises OSError.
    """
    utc = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    moved = moves(tally)
    for item in moved:
        with suppress(FileNotFoundError):  # moved by a life of this act that was killed
            place.quarantine(item.path, item.verdict, utc, item.why)
    for item in tally.enter:
        if item.path not in entered:
            enter(place, item)
    return tally.after(moved)
