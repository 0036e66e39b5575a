# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the host environment's continuity check, bounded, and reads its verdict."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from dataclasses import fields
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import bounded, continuity
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict

_REMEDY_ENVIRONMENT = "run `relight recover --tags host` (host_setup makes the environment), or correct relight_venv"


def gate(host_python: str, config: str, samples: int, seconds: float) -> Gate:
    """The verdict of `relight continuity`; unknown where it cannot be had."""
    if not os.access(host_python, os.X_OK):
        return continuity.unknown("no-host-environment", f"{host_python} is not there", _REMEDY_ENVIRONMENT)
    argv = [host_python, "-m", "relight", "continuity", "--config", config, "--samples", str(samples)]
    try:
        status, out, err = bounded.call(_run, (argv, _owner(config)), seconds)
    except bounded.TimedOut:
        what = f"it did not end within {seconds:g} s"
        return continuity.unknown("continuity-slow", what, "see whether the server gets on; raise extraction_resume_continuity_seconds")
    except bounded.ChildFailed as error:
        return continuity.unknown("no-host-environment", f"{host_python} cannot be run: {error}", _REMEDY_ENVIRONMENT)
    return read(out, f"exit status {status}: {_last_line(err)}")


def read(out: str, otherwise: str) -> Gate:
    """The gate that the check printed as its last line; without one, unknown with what there was instead."""
    try:
        value = json.loads(out.strip().splitlines()[-1])
        problems = [_problem(item) for item in value["problems"]]
        found = Gate(value["name"], value["evidence"], problems)
        if found.verdict.word != value["verdict"]:
            raise ValueError("its verdict is not that of its problems")
    except (ValueError, IndexError, KeyError, TypeError):
        return continuity.unknown("no-host-environment", f"the check printed no verdict ({otherwise})", _REMEDY_ENVIRONMENT)
    return found


def _problem(item: dict[str, Any]) -> Problem:
    known = {entry.name for entry in fields(Problem)}
    return Problem(**{**{name: value for name, value in item.items() if name in known}, "verdict": Verdict[item["verdict"].upper()]})


def _owner(config: str) -> str | None:
    """Whom the run belongs to: root's run for a user's store would leave files that the user cannot open."""
    try:
        uid = os.stat(config).st_uid
        return None if os.geteuid() != 0 or uid == 0 else pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        return None


def _run(argv: list[str], user: str | None) -> tuple[int, str, str]:
    """In the bounded child. Raises OSError."""
    if user is not None:
        entry = pwd.getpwnam(user)
        os.initgroups(user, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", cwd="/", check=False)
    return done.returncode, done.stdout[-1_000_000:], done.stderr[-4000:]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1][:300]
