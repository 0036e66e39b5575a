# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Our wheel in the user's SGLang environment: put in without dependencies, recorded, and taken out again."""

from __future__ import annotations

import os
import zipfile
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import environments, wheelhouse
from ansible_collections.relight.recovery.plugins.module_utils.environments import Installed, Interpreter, Users
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.glue import Outcome
from ansible_collections.relight.recovery.plugins.module_utils.wheelhouse import Wheelhouse

NAME = "dump_plugin"
PLANNED = "depends-on-planned-act"


def bad(code: str, where: str, what: str, remedy: str, verdict: Verdict = Verdict.FAIL) -> Outcome:
    return Outcome(Gate(NAME, problems=[Problem(code, where, what, remedy, verdict)]))


def judge_users(users: Users, prefix: str) -> Problem | None:
    """Files are never exchanged under a server that runs from them."""
    if users.pids:
        pids = ", ".join(str(pid) for pid in users.pids)
        return Problem(
            "dump-plugin-in-use",
            prefix,
            f"SGLang runs from this environment (pid {pids}), and its files are not exchanged under it",
            "stop that server, or list its unit so that recover.yml stops it",
        )
    if users.unseen:
        pids = ", ".join(str(pid) for pid in users.unseen)
        return Problem(
            "dump-plugin-users-unseen",
            prefix,
            f"it cannot be told from which environment pid {pids} runs SGLang",
            "run as root, or as the user of that process (relight_become)",
            Verdict.UNKNOWN,
        )
    return None


def look(target: Interpreter, folder: str, house: Wheelhouse) -> Installed | None:
    """What is installed, compared with the wheel; None where something is and the wheel is yet to come. Raises OSError."""
    wheel = os.path.join(folder, house.relight)
    if environments.dist_infos(target.purelib) and not os.path.exists(wheel):
        return None
    return environments.installed(target.purelib, wheel)


def present(target: Interpreter, folder: str, house: Wheelhouse, state_dir: str, check_mode: bool) -> Outcome:
    """Raises OSError, StepFailed."""
    found = look(target, folder, house)
    evidence = {"python": target.python, "site_packages": target.purelib, "wheel": house.relight}
    if found is None:
        what = "whether the Relight in it is the one of the wheelhouse shows when that is on the host"
        outcome = bad(PLANNED, target.python, what, "run without --check", Verdict.UNKNOWN)
        outcome.gate.evidence = evidence
        return outcome
    gate = Gate(NAME, {**evidence, "found": found.state, "version": found.version})
    if found.state == "editable":
        remedy = "nothing, if that is meant; else `pip uninstall relight` there and run again"
        gate.problems.append(
            Problem("dump-plugin-editable", target.prefix, "Relight is there as an editable install and stays", remedy, Verdict.WARN)
        )
    if found.state in ("same", "editable"):
        return Outcome(gate)
    in_use = judge_users(environments.users_of(target.prefix), target.prefix)
    if in_use:
        gate.problems.append(in_use)
        return Outcome(gate)
    actions = [f"Install Relight's dump plugin into the environment of {target.python}, without dependencies"]
    if not check_mode:
        installs = environments.read_installs(state_dir)
        before = installs.get(target.prefix, {"before": found.version or None})["before"]
        entry = {"python": target.python, "wheel": house.relight, "sha256": house.files[house.relight], "before": before}
        environments.write_installs(state_dir, {**installs, target.prefix: entry})
        environments.install_wheel(target, folder, house)
        after = environments.installed(target.purelib, os.path.join(folder, house.relight))
        gate.evidence.update(found=after.state, version=after.version)
        if after.state != "same":
            raise environments.StepFailed(f"pip ended well, yet what lies in {target.purelib} is not the wheel's content")
    return Outcome(gate, True, actions)


def absent(state_dir: str, check_mode: bool) -> Outcome:
    """Take out of every environment what we recorded to have put in, and nothing else. Raises OSError."""
    installs = environments.read_installs(state_dir)
    outcome = Outcome(Gate(NAME, {"recorded": len(installs)}))
    for prefix, entry in sorted(installs.items()):
        problem, action = take_out(prefix, entry["python"], check_mode)
        if problem:
            outcome.gate.problems.append(problem)
            continue
        if action:
            outcome.actions.append(action)
        if not check_mode:
            installs = {name: value for name, value in installs.items() if name != prefix}
            environments.write_installs(state_dir, installs)
    outcome.changed = bool(outcome.actions)
    return outcome


def take_out(prefix: str, python: str, check_mode: bool) -> tuple[Problem | None, str | None]:
    """What stands against it, or what is done. Neither where the environment or the wheel in it is gone. Raises OSError."""
    if not os.path.isdir(prefix):
        return None, None
    try:
        target = environments.ask(python)
    except environments.StepFailed as error:
        return Problem("dump-plugin-python", python, str(error), f"mend that environment, or remove {prefix} whole"), None
    if not environments.dist_infos(target.purelib):
        return None, None
    in_use = judge_users(environments.users_of(target.prefix), target.prefix)
    if in_use:
        return in_use, None
    if not check_mode:
        environments.uninstall_wheel(target)
    return None, f"Remove Relight's dump plugin from the environment of {python}"


def call(params: dict[str, Any], check_mode: bool) -> Outcome:
    """What the module does with its options. Raises OSError."""
    if params["state"] == "absent":
        return absent(params["state_dir"], check_mode)
    python, folder = params["python"], params["wheelhouse"]
    try:
        target = environments.ask(python)
    except environments.StepFailed as error:
        return bad("dump-plugin-python", python, str(error), "set relight_sglang_python to the interpreter that serves")
    try:
        return present(target, folder, wheelhouse.choose(folder, params["index"], check_mode), params["state_dir"], check_mode)
    except wheelhouse.BadWheelhouse as error:
        remedy = "make it again on the controller with `relight wheelhouse DIR`, and set relight_wheelhouse to DIR"
        return bad("dump-plugin-wheelhouse", folder, str(error), remedy)
    except (environments.StepFailed, zipfile.BadZipFile) as error:
        return bad("dump-plugin-failed", target.prefix, str(error), "mend what it says, then run again: the install is made anew")
