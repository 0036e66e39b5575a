# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""How far is the extraction? Judged from progress.json, which the client replaces each second, and its unit."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict

STALE_SECONDS = 30.0  # the client beats each second; a beat this old is no beat
LAST_PHASES = ("done", "drained", "failed", "stopped")  # what the client says of itself when it ends
GOALS = ("none", "first_samples", "finished")


@dataclass(frozen=True)
class Seen:
    """`progress` is progress.json, None where there is none; `alive` says whether the client's process lives."""

    progress: dict[str, Any] | None
    alive: bool
    age_seconds: float


def look(state_dir: str, now: float, boot: str, pid: int | None = None) -> Seen:
    """Read progress.json. With `pid`, what another client wrote before this one is no progress.

    Raises OSError where it cannot be read, ValueError where it is not the client's.
    """
    path = os.path.join(state_dir, "progress.json")
    try:
        with open(path, encoding="utf-8") as handle:
            progress = json.load(handle)
    except FileNotFoundError:
        return Seen(None, pid is not None and _alive(pid), 0.0)
    if not isinstance(progress, dict) or not isinstance(progress.get("pid"), int):
        raise ValueError(f"{path} is not the extraction's progress")
    same_boot = progress.get("boot_id") == boot
    if pid is not None and (progress["pid"] != pid or not same_boot):
        return Seen(None, _alive(pid), 0.0)
    return Seen(progress, same_boot and _alive(progress["pid"]), now - float(progress.get("time", 0)))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as handle:
            return handle.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def judge(seen: Seen, missing: int | None, goal: str) -> tuple[Gate, bool, str]:
    """The gate, whether waiting for `goal` is over, and a line that shows where the extraction is.

    `missing` is what the store's inventory finds missing now, None where it was not looked at. With nothing missing and
    no client the extraction is finished; a client that says done while samples are missing is not believed.
    """
    gate = Gate("extraction_progress")
    progress = seen.progress
    if missing == 0 and not seen.alive:
        gate.evidence = {"finished": True, "advancing": False, "missing": 0}
        return gate, True, "every sample is in the store"
    if progress is None:
        what = "has not written any progress yet" if seen.alive else "is not running and has written no progress"
        gate.problems.append(Problem("extraction-not-begun", "relight-extract", what, "look at its log", Verdict.FAIL))
        gate.evidence = {"finished": False, "advancing": False}
        return gate, not seen.alive, "the client starts" if seen.alive else "no client"
    said_done = progress.get("phase") == "done" and progress.get("done") == progress.get("total")
    finished = said_done and not missing
    advancing = seen.alive and seen.age_seconds < STALE_SECONDS and progress.get("this_run", 0) > 0
    gate.evidence = {
        "finished": finished,
        "advancing": advancing,
        "phase": progress.get("phase"),
        "total": progress.get("total"),
        "done": progress.get("done"),
        "this_run": progress.get("this_run"),
        "tokens_done": progress.get("tokens_done"),
        "tokens_per_s": progress.get("tokens_per_s"),
        "bytes": progress.get("bytes"),
        "eta_seconds": progress.get("eta_seconds"),
        "age_seconds": round(seen.age_seconds, 1),
    }
    line = _line(progress)
    if finished:
        return gate, True, line
    if not seen.alive:
        left = f", but {missing} are missing" if missing and said_done else ""
        what = (
            progress.get("error")
            or f"the client ended in phase {progress.get('phase')} at {progress.get('done')} of {progress.get('total')}{left}"
        )
        remedy = "mend that and run recover.yml again: it resumes"
        if not progress.get("error") and progress.get("phase") not in LAST_PHASES:
            what += " without a last word, as one that is killed"
            remedy = "run recover.yml again: it resumes; if it ends so once more, its log and the kernel's (out of memory?) may tell why"
        gate.problems.append(Problem("extraction-ended", "relight-extract", what, remedy, Verdict.FAIL))
        return gate, True, line
    if seen.age_seconds >= STALE_SECONDS:
        what = f"lives, but its last beat is {seen.age_seconds:.0f} s old"
        gate.problems.append(
            Problem("extraction-silent", "relight-extract", what, "look at its log and at the store's disk", Verdict.UNKNOWN)
        )
        return gate, False, line
    if goal == "none":
        return gate, True, line
    if goal == "first_samples" and advancing:
        return gate, True, line
    return gate, False, line


def _line(progress: dict[str, Any]) -> str:
    rate = progress.get("tokens_per_s") or 0
    left = progress.get("eta_seconds")
    time_left = f", {left / 60:.0f} min left" if isinstance(left, (int, float)) and left >= 90 else f", {left:.0f} s left" if left else ""
    return f"{progress.get('phase')}: {progress.get('done')}/{progress.get('total')} samples, {rate:.0f} tokens/s{time_left}"
