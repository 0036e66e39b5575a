# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict of a run and its report, from what the gates said. Pure: records in, report out.

A run's folder on the controller holds `run.json` (name, expected hosts, what kind of run) and `<host>.jsonl`
(one record a gate, written as it is judged), so that a killed run leaves a report that says not-clear.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
STAGES = (
    "assess",
    "storage",
    "host",
    "quiesce",
    "free",
    "verify",
    "restore",
    "launch",
    "ready",
    "continuity",
    "resume",
    "report",
)
CLEAR = "clear"
WARNINGS = "clear-with-warnings"
RESUMED = "resumed"
NOT_CLEAR = "not-clear"
GOOD = (CLEAR, WARNINGS, RESUMED)  # the verdicts on which a front exits 0
PLANNED = "depends-on-planned-act"
PLANNED_SHOWN = 3  # acts of a check run in its one sentence; the report has them all


@dataclass(frozen=True)
class Run:
    """What a run set out to do. `kind` is the playbook's name; `tags` is empty for a run of every stage."""

    name: str
    kind: str
    hosts: tuple[str, ...]
    check: bool
    tags: tuple[str, ...]
    started: float
    consent: tuple[str, ...] = ()
    command: str = "ansible-playbook recover.yml"
    refused: str = ""  # why the run was refused before any host was touched


@dataclass
class HostReport:
    """One host's part of the report."""

    verdict: str
    reason: str
    stages: list[dict[str, Any]] = field(default_factory=list)
    gates: list[dict[str, Any]] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    consents_needed: list[str] = field(default_factory=list)
    samples: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)


def sentence(problem: dict[str, Any]) -> str:
    """A problem as an operator reads it: where, what, what to do."""
    return f"{problem['where']}: {problem['what']}. {problem['remedy'][:1].upper()}{problem['remedy'][1:]}. [{problem['code']}]"


def paste_line(run: Run, consents: list[str]) -> str:
    """The command that grants the consents, those already granted included."""
    names = ", ".join(f'"{name}"' for name in sorted({*run.consent, *consents}))
    return f"{run.command} -e '{{\"relight_consent\": [{names}]}}'"


def _last_by_gate(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    last: dict[str, dict[str, Any]] = {}
    for record in records:
        last[record["gate"]["name"]] = record
    return last


def _judged(run: Run, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gates that the verdict rests on: in a recovery the looks before the first act are history."""
    return [r for r in records if run.kind != "recover" or r["stage"] != "assess"]


def host_verdict(run: Run, records: list[dict[str, Any]], closed: dict[str, Any] | None) -> tuple[str, str]:
    """The verdict and the sentence that gives its reason."""
    stopped = next((r for r in records if r.get("stopped")), None)
    if stopped:
        return NOT_CLEAR, stopped.get("message") or f"stopped at {stopped['stage']}: {stopped['gate']['summary']}"
    if closed is None:
        return NOT_CLEAR, "the host was not reached" if not records else "the run did not come to its end"
    if run.check:
        return NOT_CLEAR, f"a check run proves nothing; {_plan(records)}"
    if run.tags:
        return NOT_CLEAR, f"only {', '.join(run.tags)} ran; run without tags for the all-clear"
    last = _last_by_gate(_judged(run, records))
    if not last:
        return NOT_CLEAR, "no gate was judged"
    for record in last.values():
        if record["gate"]["verdict"] not in ("pass", "warn"):
            return NOT_CLEAR, f"{record['gate']['name']}: {record['gate']['summary']}"
    progress = last.get("extraction_progress")
    if run.kind == "recover" and progress is None:
        return NOT_CLEAR, "the extraction was not looked at"
    if progress and not progress["gate"]["evidence"].get("finished"):
        if not progress["gate"]["evidence"].get("advancing"):
            return NOT_CLEAR, "the extraction is neither finished nor seen to advance"
        if "continuity_check" in last or run.kind != "recover":
            return RESUMED, "continuity holds and the extraction advances"
        return NOT_CLEAR, "the extraction advances but its continuity was not checked"
    warned = [r["gate"]["name"] for r in last.values() if r["gate"]["verdict"] == "warn"]
    if warned:
        return WARNINGS, f"warnings from {', '.join(warned)}"
    return CLEAR, "every gate passes"


def _plan(records: list[dict[str, Any]]) -> str:
    acts = [action for record in records for action in record.get("actions", [])]
    more = f", and {len(acts) - PLANNED_SHOWN} more in the report" if len(acts) > PLANNED_SHOWN else ""
    return f"it plans: {', '.join(acts[:PLANNED_SHOWN])}{more}" if acts else "it plans no act"


def _stages(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Begin, end and worst verdict of each stage, in the order in which they were first seen."""
    order = ["pass", "warn", "fail", "unknown"]
    stages: dict[str, dict[str, Any]] = {}
    for record in records:
        begin = record["time"] - max(record["gate"]["seconds"], record.get("waited_seconds", 0.0))
        stage = stages.setdefault(
            record["stage"], {"name": record["stage"], "begin": begin, "end": record["time"], "verdict": "pass", "changed": False}
        )
        stage["begin"] = min(stage["begin"], begin)
        stage["end"] = max(stage["end"], record["time"])
        if record["stage"] == STAGES[0] or not record.get("assessed"):  # an acting stage is as good as what it went on with
            stage["verdict"] = max(stage["verdict"], record["gate"]["verdict"], key=order.index)
        stage["changed"] = stage["changed"] or bool(record.get("changed"))
    for stage in stages.values():
        stage["seconds"] = round(stage["end"] - stage["begin"], 3)
    return list(stages.values())


def samples_and_tokens(records: list[dict[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """What became of the samples: counted from the store's inventories before, at quarantine, and after."""
    inventories = [r["gate"]["evidence"] for r in records if r["gate"]["name"] == "shard_inventory" and "total" in r["gate"]["evidence"]]
    if not inventories:
        return {}, {}
    after = inventories[-1]
    moves = [e for e in inventories if "quarantined" in e]
    quarantined = sum(e["quarantined"] for e in moves)
    before = moves[0] if moves else inventories[0]
    added = after["intact"] - before["intact"]
    # What was moved is a record's sample if that record is missing since; a file of no record is not redone.
    lost = quarantined if before is inventories[0] else min(quarantined, max(0, before["missing"] - inventories[0]["missing"]))
    redone = max(0, min(lost, added))
    tokens_redone = sum(e.get("tokens_quarantined", 0) for e in moves) if redone == lost else 0
    probes = sum(r["gate"]["evidence"].get("probe_tokens", 0) for r in records)
    samples = {
        "total": after["total"],
        "intact_before": before["intact"],
        "torn": before.get("torn", 0),
        "corrupt": before.get("corrupt", 0),
        "quarantined": quarantined,
        "redone": redone,
        "new": added - redone,
        "intact": after["intact"],
        "missing": after["missing"],
    }
    tokens = {
        "intact": after.get("tokens_intact", 0),
        "redone": tokens_redone,
        "probes": probes,
    }
    return samples, tokens


def host_report(run: Run, lines: list[dict[str, Any]]) -> HostReport:
    """One host's report from the lines of its record file."""
    records = [line for line in lines if line.get("kind") == "gate"]
    closed = next((line for line in reversed(lines) if line.get("kind") == "closed"), None)
    verdict, reason = host_verdict(run, records, closed)
    samples, tokens = samples_and_tokens(records)
    before: dict[str, dict[str, Any]] = {}
    for record in records:
        before.setdefault(record["gate"]["name"], record)
    needed = sorted(
        {p["consent"] for r in records for p in r["gate"]["problems"] if p.get("consent") and p["consent"] not in run.consent}
        if verdict == NOT_CLEAR
        else set()
    )
    return HostReport(
        verdict=verdict,
        reason=reason,
        stages=_stages(records),
        gates=[
            {
                "name": name,
                "before": before[name]["gate"],
                "before_stage": before[name]["stage"],
                "after": last["gate"],
                "after_stage": last["stage"],
            }
            for name, last in _last_by_gate(records).items()
        ],
        actions=[action for record in records for action in record.get("actions", [])],
        consents_needed=needed,
        samples=samples,
        tokens=tokens,
        timeline=(closed or {}).get("journal", []),
    )


def report(run: Run, lines_by_host: dict[str, list[dict[str, Any]]], now: float) -> dict[str, Any]:
    """The whole report. Its verdict is the worst host's; a run without hosts is not clear."""
    hosts = {host: host_report(run, lines_by_host.get(host, [])) for host in run.hosts}
    order = [CLEAR, WARNINGS, RESUMED, NOT_CLEAR]
    verdict = max((h.verdict for h in hosts.values()), key=order.index, default=NOT_CLEAR)
    needed = sorted({name for h in hosts.values() for name in h.consents_needed})
    return {
        "schema": SCHEMA,
        "verdict": verdict,
        "refused": run.refused,
        "run": run.name,
        "kind": run.kind,
        "check": run.check,
        "tags": list(run.tags),
        "started": run.started,
        "written": now,
        "seconds": round(now - run.started, 1),
        "hosts": {host: vars(part) for host, part in hosts.items()},
        "consents_needed": needed,
        "paste": paste_line(run, needed) if needed else None,
    }
