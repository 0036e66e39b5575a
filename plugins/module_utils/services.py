# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""One way to speak to a host's service manager, be it systemd or supervisord: see, start, stop, disable, install, and
tell whose process a pid is. The two kinds live in `systemd` and `supervisord`; here is what they share.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

from ansible_collections.relight.recovery.plugins.module_utils import durable, procs

# The options of doc fragment relight.recovery.manager.
OPTIONS: dict[str, dict[str, Any]] = {
    "manager": {"type": "str", "default": "auto", "choices": ["auto", "systemd", "supervisord", "none"]},
    "supervisor_socket": {"type": "path"},
    "supervisor_conf_dir": {"type": "path"},
}
UNIT = "RELIGHT_UNIT"
UNIT_HASH = "RELIGHT_UNIT_HASH"
CLEAN_EXITS = (0, 2, 3, 4, 5)  # the client's own ends, which a restart would only repeat
POLL_SECONDS = 0.05


class ManagerError(Exception):
    """The service manager cannot be reached or refuses; the message is for the operator."""


@dataclass(frozen=True)
class Unit:
    """A service as its manager knows it. `state`: running, starting, stopping, stopped, failed or disabled.

    `kept` says that the manager brings it back by itself: at boot or when it ends. `vendor` marks what the distribution
    ships.
    """

    name: str
    state: str
    pid: int | None = None
    file: str | None = None
    kept: bool = False
    vendor: bool = False
    detail: str = ""
    exit_status: int | None = None

    @property
    def up(self) -> bool:
        return self.state in ("running", "starting", "stopping")


@dataclass(frozen=True)
class UnitSpec:
    """A unit of ours. Its hash covers all of this, and the digests of the files it watches."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str | None = None
    stdout: str = ""
    restart: bool = False
    start_seconds: int = 1
    stop_seconds: int = 20
    requires_mounts: tuple[str, ...] = ()
    watched: Mapping[str, str] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        whole = json.dumps(asdict(self), sort_keys=True, default=list)
        return hashlib.sha256(whole.encode()).hexdigest()[:16]

    @property
    def variables(self) -> dict[str, str]:
        """The environment with the two marks by which a process of ours is known."""
        return {**self.environment, UNIT: self.name, UNIT_HASH: self.hash}


def watched(paths: Iterable[str]) -> dict[str, str]:
    """The sha256 of each file whose change calls for a restart; `missing` for one that is not there. Raises OSError."""
    found = {}
    for path in sorted(set(paths)):
        digest = hashlib.sha256()
        try:
            with open(path, "rb") as handle:
                for chunk in iter(lambda: handle.read(1 << 20), b""):
                    digest.update(chunk)
        except FileNotFoundError:
            found[path] = "missing"
        else:
            found[path] = digest.hexdigest()
    return found


class Manager(Protocol):
    """What a kind of service manager can do. Every method raises ManagerError."""

    kind: str

    def units(self) -> dict[str, Unit]:
        """All units by name, those that we disabled included."""

    def canonical(self, name: str) -> str:
        """The name as the manager writes it (vllm becomes vllm.service)."""

    def unit_file(self, name: str) -> str:
        """Where a unit of ours is installed."""

    def render(self, spec: UnitSpec) -> str:
        """The text of that file. Raises ManagerError for what the format cannot say."""

    def install(self, name: str, spec: UnitSpec) -> bool:
        """Write the file and load it, without starting it; a running older one is stopped. True where it differed."""

    def remove(self, name: str) -> bool:
        """Stop the unit and take its file away. True where there was one."""

    def start(self, name: str, seconds: float) -> Unit:
        """Start it and wait until the manager calls it running, or failed, or `seconds` have passed."""

    def stop(self, name: str, seconds: float) -> Unit:
        """Stop it and wait; what does not end within `seconds` is killed."""

    def plan_disable(self, name: str, mask: bool = False) -> dict[str, Any]:
        """What `disable` will do, with what it takes to undo it. Changes nothing."""

    def is_disabled(self, plan: Mapping[str, Any]) -> bool:
        """Whether there is nothing left to do for `disable`."""

    def disable(self, plan: Mapping[str, Any], seconds: float) -> None:
        """Stop the unit and see that nothing starts it again."""

    def enable(self, plan: Mapping[str, Any]) -> bool:
        """Undo `disable`, without starting the unit. True where something was changed."""

    def owners(self, pids: Iterable[int], processes: Mapping[int, procs.Process]) -> dict[int, str]:
        """The unit that each pid belongs to; pids of none are left out."""


def owner_of(manager: Manager, pid: int) -> str | None:
    """The unit that a process belongs to, orphans included."""
    return manager.owners([pid], procs.every()).get(pid)


class NoManager:
    """A host without a service manager that we know: no units, and processes of nobody."""

    kind = "none"

    def units(self) -> dict[str, Unit]:
        return {}

    def canonical(self, name: str) -> str:
        return name

    def owners(self, pids: Iterable[int], processes: Mapping[int, procs.Process]) -> dict[int, str]:
        return {}

    def __getattr__(self, name: str) -> Any:
        raise ManagerError("this host has neither systemd nor a supervisord that we were told of: set relight_supervisor_socket")


def manager(kind: str, socket: str | None = None, conf_dir: str | None = None) -> Manager:
    """The host's service manager. `auto`: systemd where PID 1 is systemd, else the supervisord we are told of."""
    # Imported here: both kinds import this module.
    from ansible_collections.relight.recovery.plugins.module_utils import supervisord, systemd

    if kind == "auto":
        kind = "systemd" if os.path.isdir("/run/systemd/system") else "supervisord" if socket else "none"
    if kind == "systemd":
        return systemd.Systemd()
    if kind == "supervisord":
        if not socket:
            raise ManagerError("supervisor_socket is not set: relight_supervisor_socket says where supervisord listens")
        return supervisord.Supervisord(socket, conf_dir)
    return cast(Manager, NoManager())  # what it lacks, it refuses in one sentence


def from_params(params: Mapping[str, Any]) -> Manager:
    """The manager that a module's options name."""
    return manager(params["manager"], params["supervisor_socket"], params["supervisor_conf_dir"])


class Disabled:
    """disabled.json in the state directory: what we took out of service, with what it takes to put it back."""

    def __init__(self, state_dir: str | None) -> None:
        self.path = os.path.join(state_dir, "disabled.json") if state_dir else None

    def read(self) -> dict[str, dict[str, Any]]:
        """By unit name. Raises OSError, and ValueError for a file that is not ours."""
        if self.path is None:
            return {}
        try:
            with open(self.path, encoding="utf-8") as handle:
                return dict(json.load(handle)["units"])
        except FileNotFoundError:
            return {}

    def add(self, plan: Mapping[str, Any]) -> None:
        """Record a plan before it is carried out. The first record of a unit stays: it knows the state before us."""
        units = self.read()
        if plan["unit"] not in units:
            self._write({**units, plan["unit"]: {**plan, "time": round(time.time(), 3)}})

    def drop(self, name: str) -> None:
        units = self.read()
        if units.pop(name, None) is not None:
            self._write(units)

    def _write(self, units: Mapping[str, Any]) -> None:
        if self.path is not None:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            durable.write_json(self.path, {"schema": 1, "units": dict(units)})


def disable(found: Manager, name: str, state_dir: str | None, seconds: float, mask: bool = False) -> None:
    """Disable a unit and end all its processes, orphans included.

    The record is written first, so that a kill in between loses no way back. Raises ManagerError.
    """
    plan = found.plan_disable(name, mask)
    Disabled(state_dir).add(plan)
    processes = procs.every()
    members = [processes[pid] for pid, owner in found.owners(processes, processes).items() if owner == plan["unit"]]
    found.disable(plan, seconds)
    procs.terminate(members, seconds)


def wait_state(look: Any, wanted: tuple[str, ...], seconds: float) -> Unit:
    """Ask until the unit's state is one of `wanted` or the time is over; return it as last seen."""
    deadline = time.monotonic() + seconds
    while True:
        unit: Unit = look()
        if unit.state in wanted or time.monotonic() >= deadline:
            return unit
        time.sleep(POLL_SECONDS)  # neither manager tells of a change without being asked
