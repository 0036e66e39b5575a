# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Bring one unit to a wanted state, and nothing else: what module `unit` does. Actions are the same sentences with --check."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import procs, redact, services
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.glue import Outcome
from ansible_collections.relight.recovery.plugins.module_utils.services import UNIT_HASH, Manager, Unit, UnitSpec

OURS = "Written by Relight."  # in the first line of each unit file of ours
TAIL_LINES = 8


@dataclass(frozen=True)
class Allowed:
    """What may be stopped although it is not ours: the inventory's list and the consents given."""

    units: Collection[str]
    consent: Collection[str]

    def unit(self, manager: Manager, name: str) -> bool:
        return name in {manager.canonical(listed) for listed in self.units} or f"disable:unit:{name}" in self.consent


def file_text(path: str | None) -> str:
    try:
        with open(path or "", encoding="utf-8") as handle:
            return handle.read()
    except FileNotFoundError:
        return ""


def facts(name: str, unit: Unit | None, log: str) -> dict[str, Any]:
    """The unit as the module returns it."""
    marks = procs.environment(unit.pid, ("RELIGHT_",)) if unit and unit.pid else None
    return {
        "name": name,
        "state": unit.state if unit else "absent",
        "pid": unit.pid if unit else None,
        "hash": (marks or {}).get(UNIT_HASH),
        "exit_status": unit.exit_status if unit else None,
        "log": log,
    }


def started(manager: Manager, spec: UnitSpec, check: bool) -> Outcome:
    """Install the unit and start it; restart it only where its configuration differs from what runs."""
    name = manager.canonical(spec.name)
    path, text = manager.unit_file(spec.name), manager.render(spec)
    before, unit = file_text(path), manager.units().get(name)
    if before and OURS not in before.splitlines()[0]:
        return refused(name, f"{path} was not written by Relight", "give the unit of ours another name, or remove that file")
    running_hash = facts(name, unit, "")["hash"] if unit and unit.up else None
    differs = before != text
    stale = unit is not None and unit.up and (differs or running_hash not in (None, spec.hash))
    start = unit is None or not unit.up or stale
    actions = [f"write {path}"] if differs else []
    actions += [f"stop {name}: its configuration changed"] if stale else []
    actions += [f"start {name}"] if start else []
    diff = {"before": redact_lines(before), "after": redact_lines(text), "before_header": path, "after_header": path}
    outcome = Outcome(Gate("unit", {"hash": spec.hash}), bool(actions), actions, diff if differs else None)
    if not check:
        if start:
            make_log_folder(spec)
            manager.install(spec.name, spec)
        unit = manager.start(spec.name, spec.start_seconds + 15)
        outcome.gate.problems += not_running(name, unit, spec.stdout)
    outcome.more["unit"] = {**facts(name, unit, spec.stdout), "hash": spec.hash}
    return outcome


def make_log_folder(spec: UnitSpec) -> None:
    """The log's directory, owned by the unit's user where we make it."""
    folder = os.path.dirname(spec.stdout)
    if folder and not os.path.isdir(folder):
        os.makedirs(folder)
        if spec.user and os.geteuid() == 0:
            entry = pwd.getpwnam(spec.user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)


def not_running(name: str, unit: Unit, log: str) -> list[Problem]:
    """A unit that ended by itself with exit 0 has done its work."""
    if unit.state == "running" or (unit.state == "stopped" and unit.exit_status == 0):
        return []
    what = f"{unit.state} ({unit.detail}); its log ends: {tail(log)}"
    return [Problem("unit-not-running", name, what, f"mend what its log says ({log}), then run recover.yml again")]


def tail(log: str) -> str:
    """The last lines of a log, redacted, on one line."""
    try:
        with open(log, "rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - 4096))
            lines = handle.read().decode(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return " | ".join(redact.text(line.strip()) for line in lines[-TAIL_LINES:] if line.strip()) or "(empty)"


def redact_lines(text: str) -> str:
    return "\n".join(redact.text(line) for line in text.splitlines()) + "\n" if text else ""


def refused(name: str, what: str, remedy: str, consent: str | None = None, code: str = "unit-foreign") -> Outcome:
    return Outcome(Gate("unit", problems=[Problem(code, name, what, remedy, Verdict.FAIL, consent)]))


def stopped(manager: Manager, name: str, allowed: Allowed, seconds: float, check: bool, remove: bool = False) -> Outcome:
    """Stop a unit of ours, or a listed one; with `remove`, take a unit of ours away."""
    name = manager.canonical(name)
    unit = manager.units().get(name)
    ours = OURS in file_text(unit.file if unit else manager.unit_file(name))
    if unit is not None and not ours and (remove or not allowed.unit(manager, name)):
        return refused(name, "is not a unit of ours", "name it in relight_disable_units, or stop it by hand")
    verb = "remove" if remove else "stop"
    needed = ours if remove else bool(unit and unit.up)
    actions = [f"{verb} {name}"] if needed else []
    if needed and not check:
        if remove:
            manager.remove(name)
        else:
            manager.stop(name, seconds)
        unit = manager.units().get(name)
    outcome = Outcome(Gate("unit"), bool(actions), actions)
    if needed and not check and unit is not None and unit.up:
        outcome.gate.problems.append(Problem("unit-not-stopped", name, unit.detail, "look at its processes: gpu_free names them"))
    outcome.more["unit"] = facts(name, unit, "")
    return outcome


def disabled(manager: Manager, name: str, allowed: Allowed, state_dir: str, seconds: float, mask: bool, check: bool) -> Outcome:
    """Take a unit out of service: stopped, and nothing starts it again. A host that has no such unit is as it should be."""
    name = manager.canonical(name)
    unit = manager.units().get(name)
    outcome = Outcome(Gate("unit"))
    if unit is not None:
        plan = manager.plan_disable(name, mask)
        if not manager.is_disabled(plan):
            if not allowed.unit(manager, name):
                return not_listed(name)
            outcome.changed, outcome.actions = True, [disabling(name)]
            if not check:
                services.disable(manager, name, state_dir, seconds, mask)
                unit = manager.units().get(name)
                if not manager.is_disabled(plan):
                    remedy = "stop it by hand and see what starts it"
                    outcome.gate.problems.append(Problem("unit-not-stopped", name, "is still up after it was disabled", remedy))
    outcome.more["unit"] = facts(name, unit, "")
    return outcome


def disabling(name: str) -> str:
    return f"disable unit {name}: stop it, end its processes, and keep it from starting again"


def not_listed(name: str) -> Outcome:
    consent = f"disable:unit:{name}"
    return refused(name, "the inventory does not list it as one that may be stopped", paste(consent), consent, "unit-not-listed")


def paste(consent: str) -> str:
    """The remedy of what needs consent; the play that judges adds the whole line to paste."""
    return f'if it may be stopped, add "{consent}" to relight_consent'


def enabled(manager: Manager, name: str, state_dir: str, check: bool) -> Outcome:
    """Put back what `disabled` took away; the unit is not started."""
    name = manager.canonical(name)
    record = services.Disabled(state_dir)
    plan = record.read().get(name)
    outcome = Outcome(Gate("unit"))
    if plan is not None:
        outcome.changed, outcome.actions = True, [f"put unit {name} back as it was before it was disabled"]
        if not check:
            manager.enable(plan)
            record.drop(name)
    outcome.more["unit"] = facts(name, manager.units().get(name), "")
    return outcome
