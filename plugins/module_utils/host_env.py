# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Our environment on a host: is it there, whole, and the one that the wheelhouse makes? If not, build it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import environments, wheelhouse
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem
from ansible_collections.relight.recovery.plugins.module_utils.glue import Outcome

NAME = "host_env"
OLDEST = (3, 9)


@dataclass(frozen=True)
class Wanted:
    """What the options ask for."""

    venv: str
    wheelhouse: str
    python: str
    extras: tuple[str, ...]
    index: Any


def bad(code: str, where: str, what: str, remedy: str) -> Outcome:
    return Outcome(Gate(NAME, problems=[Problem(code, where, what, remedy)]))


def present(wanted: Wanted, check_mode: bool) -> Outcome:
    """Build and put in place what is not. Raises OSError."""
    place = environments.look_at(wanted.venv)
    if place.kind == "foreign":
        remedy = f"move {wanted.venv} away, or set relight_venv to another path"
        return bad("host-env-in-the-way", wanted.venv, "it is there and Relight did not make it", remedy)
    try:
        base = environments.ask(wanted.python)
    except environments.StepFailed as error:
        return bad("host-env-python", wanted.python, str(error), "set host_setup_python to a Python of the host that runs")
    if tuple(int(part) for part in base.version.split(".")) < OLDEST:
        return bad(
            "host-env-python", wanted.python, f"it is Python {base.version}, 3.9 is the oldest", "set host_setup_python to a newer one"
        )
    try:
        house = wheelhouse.choose(wanted.wheelhouse, wanted.index, check_mode)
    except wheelhouse.BadWheelhouse as error:
        remedy = "make it again on the controller with `relight wheelhouse DIR`, and set relight_wheelhouse to DIR"
        return bad("host-env-wheelhouse", wanted.wheelhouse, str(error), remedy)
    env = environments.environment(wanted.venv, house, base, wanted.extras)
    whole = environments.is_whole(env.folder)
    linked = place.kind == "link" and os.path.abspath(place.target) == env.folder
    actions = [] if whole else [f"Build the host environment {env.folder} from {len(house.files)} wheels"]
    actions += [] if linked else [f"Point {wanted.venv} to {env.folder}"]
    evidence = {"venv": wanted.venv, "folder": env.folder, "python": base.version, "wheels": len(house.files), "wheelhouse": house.digest}
    outcome = Outcome(Gate(NAME, evidence), bool(actions), actions, more={"venv": wanted.venv})
    if check_mode or not actions:
        return outcome
    try:
        if not whole:
            os.makedirs(os.path.dirname(wanted.venv), exist_ok=True)
            environments.build(env, base, wanted.wheelhouse, house, wanted.extras)
        if not environments.is_whole(env.folder):
            raise environments.StepFailed("it was built, yet its Python does not find relight")
    except environments.StepFailed as error:
        outcome = bad(
            "host-env-build",
            env.folder,
            str(error),
            f"see that the wheelhouse was made for Python {base.version} (relight wheelhouse --python)",
        )
        outcome.changed = True
        return outcome
    if not linked:
        environments.switch(env)
    return outcome


def absent(venv: str, check_mode: bool) -> Outcome:
    """Take away every environment that we made at this name. Raises OSError."""
    folders = environments.ours(venv)
    actions = [f"Remove the host environment {folder}" for folder in folders]
    if actions and not check_mode:
        environments.remove(venv)
    return Outcome(Gate(NAME, {"venv": venv, "removed": len(folders)}), bool(actions), actions)


def call(params: dict[str, Any], python: str, check_mode: bool) -> Outcome:
    """What the module does with its options; `python` is the host's own, used where no other is named."""
    venv = os.path.abspath(params["venv"])
    if params["state"] == "absent":
        return absent(venv, check_mode)
    extras: Sequence[str] = params["extras"]
    return present(Wanted(venv, params["wheelhouse"], params["python"] or python, tuple(extras), params["index"]), check_mode)
