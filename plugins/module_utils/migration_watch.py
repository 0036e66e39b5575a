# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""How far is the copy of a migration? Judged from the service's progress.json and whether it lives."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import layouts, migration
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.journal import boot_id
from ansible_collections.relight.recovery.plugins.module_utils.migration import Record

NAME = "migration_progress"
PASSES = ("live", "final")
SILENT_SECONDS = 60.0
NAMED = 10
REMEDIES = {
    "target-full": "the new disk has less room than the source needs: see what was written to the source meanwhile",
    "target-io-error": "see the kernel's log; a disk that fails now is not the one to move to",
    "target-hung": "see the new disk and the kernel's log",
    "target-not-staged": "run recover.yml again: it mounts the target",
    "source-hung": "see the storage behind the source; what was copied is kept",
    "source-unreadable": "see the kernel's log; the source cannot even be listed",
    "source-changing": "see who writes there; the source must be read-only for the final pass",
    "copy-differs": "run again: those files are copied anew; if it happens again the new disk is not to be trusted",
    "copy-broke": "see the service's log",
}


@dataclass(frozen=True)
class Seen:
    """`progress` is what the service wrote last, None where it has written nothing for this migration."""

    record: Record | None
    progress: dict[str, Any] | None
    alive: bool
    age_seconds: float


def look(state_dir: str) -> Seen:
    """Raises OSError, migration.NotOurs."""
    record = migration.read(state_dir)
    try:
        with open(os.path.join(migration.folder(state_dir), "progress.json"), encoding="utf-8") as handle:
            value = json.load(handle)
    except (FileNotFoundError, ValueError):
        value = None
    if record is None or not isinstance(value, dict) or value.get("id") != record.id:
        return Seen(record, None, False, 0.0)
    return Seen(
        record, value, value.get("boot_id") == boot_id() and _is_service(value.get("pid")), time.time() - float(value.get("time", 0))
    )


def _is_service(pid: Any) -> bool:
    """Whether that pid is still the service, and no later process of its number."""
    try:
        with open(f"/proc/{int(pid)}/cmdline", "rb") as handle:
            return b"migration_service" in handle.read(4096)
    except (OSError, TypeError, ValueError):
        return False


def judge(seen: Seen, wanted: str, unit_up: bool, samples: Mapping[str, int]) -> tuple[Gate, bool, str]:
    """The gate, whether waiting is over, and a line that shows where the copy is.

    `unit_up` says that the service's unit is up although it has written nothing yet; `samples` are the indices of unread files.
    """
    gate = Gate(NAME)
    record, progress = seen.record, seen.progress
    if record is None or record.reached("cutting_over") or not record.source:
        gate.evidence = {"phase": record.phase if record else "none", "finished": True}
        return gate, True, "nothing to copy"
    current = progress is not None and (progress.get("pass") == wanted or progress.get("pass") == "final")
    if progress is None or not current:
        gate.evidence = {"phase": record.phase, "finished": False}
        if unit_up:
            return gate, False, f"the {wanted} pass starts"
        gate.problems.append(Problem("copy-not-begun", migration.UNIT, f"the {wanted} pass has not begun", "look at its log"))
        return gate, True, "no copy"
    numbers = ("files_total", "files_done", "bytes_total", "bytes_done", "bytes_per_s", "eta_seconds", "copied_files", "copied_bytes")
    counts = ("read_back_files", "read_back_bytes", "unreadable_files", "changing_files", "differing_files")
    gate.evidence = {"phase": progress.get("phase"), "pass": progress.get("pass"), "finished": progress.get("phase") == "done"}
    gate.evidence.update({name: progress.get(name) for name in (*numbers, *counts)})
    line = _line(progress)
    gate.problems += _unread(progress, samples)
    error = progress.get("error")
    if progress.get("phase") == "failed" and not seen.alive:
        code = str((error or {}).get("code", "copy-broke"))
        gate.problems.append(Problem(code, migration.UNIT, str((error or {}).get("what", "")), REMEDIES.get(code, REMEDIES["copy-broke"])))
        gate.problems += [
            Problem("copy-differs", path, why, REMEDIES["copy-differs"])
            for path, why in list(progress.get("differing", {}).items())[:NAMED]
        ]
        return gate, True, line
    if progress.get("phase") == "done":
        return gate, True, line
    if not seen.alive:
        if unit_up:
            return gate, False, line
        what = f"the service ended in phase {progress.get('phase')}, at {line}"
        gate.problems.append(Problem("copy-ended", migration.UNIT, what, "run recover.yml again: it goes on where it was"))
        return gate, True, line
    if seen.age_seconds > SILENT_SECONDS:
        what = f"lives, but its last beat is {seen.age_seconds:.0f} s old"
        gate.problems.append(Problem("copy-silent", migration.UNIT, what, "look at its log and at both disks", Verdict.UNKNOWN))
    return gate, False, line


def _unread(progress: Mapping[str, Any], samples: Mapping[str, int]) -> list[Problem]:
    """What of the source could not be read. It does not stop the rest; its samples become missing ones."""
    found = []
    remedy = "their samples are extracted again; other files must come from a backup"
    for path, why in list(progress.get("unreadable", {}).items())[:NAMED]:
        index = f" (sample {samples[path]})" if path in samples else ""
        found.append(Problem("source-file-unread", path, f"{why}{index}", remedy, Verdict.WARN))
    more = int(progress.get("unreadable_files") or 0) - len(found)
    if more > 0:
        found.append(Problem("source-file-unread", "the source", f"{more} more files could not be read", remedy, Verdict.WARN))
    return found


def samples_of(progress: Mapping[str, Any] | None, data: str, store_dir: str, layout: str) -> dict[str, int]:
    """Which sample each unread file is, for those that are samples."""
    if not progress or not store_dir.startswith(f"{data.rstrip('/')}/"):
        return {}
    prefix = store_dir[len(data.rstrip("/")) + 1 :].rstrip("/")
    kind = layouts.layout(layout)
    found = {}
    for path in progress.get("unreadable", {}):
        index = kind.index_of(path[len(prefix) + 1 :]) if path.startswith(f"{prefix}/") else None
        if index is not None:
            found[path] = index
    return found


def _line(progress: Mapping[str, Any]) -> str:
    total, done = int(progress.get("bytes_total") or 0), int(progress.get("bytes_done") or 0)
    left = progress.get("eta_seconds")
    time_left = f", {left / 60:.0f} min left" if isinstance(left, (int, float)) and left >= 90 else f", {left:.0f} s left" if left else ""
    share = f"{100 * done / total:.0f} %" if total else "100 %"
    rate = (progress.get("bytes_per_s") or 0) / 1e6
    at = f", at {progress['current']}" if progress.get("current") else ""
    files = f"{progress.get('files_done')}/{progress.get('files_total')} files"
    return f"{progress.get('pass')} pass, {progress.get('phase')}: {files}, {share}, {rate:.0f} MB/s{time_left}{at}"


def planned(gate: Gate) -> Gate:
    """The gate of a check run, which starts no copy."""
    what = f"no copy runs in check mode ({gate.problems[-1].what})"
    return Gate(NAME, gate.evidence, [Problem("depends-on-planned-act", migration.UNIT, what, "run without --check", Verdict.UNKNOWN)])
