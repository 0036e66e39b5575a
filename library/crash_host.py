#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Fault injector: end every process of a host at once, as a power cut does, and boot it again."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

DOCUMENTATION = r"""
module: crash_host
short_description: Kill a service manager and all that it runs, or boot it again
description:
  - With O(state=down), sends SIGKILL to the service manager first, so that nothing is restarted, and then to every process
    of its session tree, until none is left.
  - With O(state=up), presses the power button (SIGUSR1) of the process named in O(power_button) and waits for the service manager.
  - A fault injector for drills. It refuses unless O(drill_target=true) and the file O(marker) exists on the host.
author: [Relight authors (@relight)]
attributes:
  check_mode: {support: full, description: Says what it would break and breaks nothing.}
options:
  drill_target:
    description: Whether the inventory says that this host may be broken on purpose (relight_drill_target).
    type: bool
    required: true
  marker:
    description: A file whose presence on the host says the same.
    type: path
    required: true
  record:
    description: A JSON file on the host that gets an entry for what was broken, so that a proof can compare.
    type: path
  state:
    description: Whether to cut the power or to boot.
    type: str
    choices: [down, up]
    required: true
  manager_pid_file:
    description: The pid file of the service manager.
    type: path
    required: true
  power_button:
    description: A file that holds the pid of the process that boots the service manager on SIGUSR1. Needed to boot.
    type: path
  socket:
    description: The service manager's socket, which appears when it has booted. Needed to boot.
    type: path
"""

EXAMPLES = r"""
- name: Cut the power
  crash_host:
    drill_target: "{{ relight_drill_target }}"
    marker: /etc/relight-drill-target
    state: down
    manager_pid_file: /run/supervisord.pid
"""

RETURN = r"""
actions:
  description: What was broken, in sentences.
  returned: always
  type: list
  elements: str
killed:
  description: The pids that were killed.
  returned: with O(state=down)
  type: list
  elements: int
"""

from ansible.module_utils.basic import AnsibleModule


def guard(module: AnsibleModule) -> None:
    """Refuse every host that is not meant to be broken."""
    if not module.params["drill_target"]:
        module.fail_json(msg="refused: the inventory does not say relight_drill_target: true for this host")
    if not os.path.isfile(module.params["marker"]):
        module.fail_json(msg=f"refused: this host does not carry the drill mark {module.params['marker']}")


def note(path: str | None, **entry: Any) -> None:
    """Add what was broken to the drill's record, a JSON object."""
    if path is None:
        return
    try:
        with open(path, encoding="utf-8") as handle:
            record = json.load(handle)
    except FileNotFoundError:
        record = {}
    record.update(entry)
    with open(f"{path}.tmp", "w", encoding="utf-8") as handle:
        json.dump(record, handle, indent=1, sort_keys=True)
    os.rename(f"{path}.tmp", path)


def parents() -> dict[int, int]:
    """Each live process and its parent; zombies are not live."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as handle:
                    state, parent = handle.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state not in "ZX":
                found[int(name)] = int(parent)
    return found


def tree(root: int, seen: dict[int, int]) -> set[int]:
    """`root` and all that descends from it."""
    members = {root} & seen.keys()
    while True:
        more = {pid for pid, parent in seen.items() if parent in members} - members
        if not more:
            return members
        members |= more


def cut(manager: int, limit_seconds: float = 30.0) -> list[int]:
    """SIGKILL the manager and its whole tree. The manager goes first: it would restart what dies before it."""
    victims = tree(manager, parents())
    for pid in sorted(victims, key=lambda pid: pid != manager):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + limit_seconds
    while victims & parents().keys():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still there after SIGKILL: {sorted(victims & parents().keys())}")
        time.sleep(0.05)
    return sorted(victims)


def boot(button: str, socket: str, limit_seconds: float = 30.0) -> None:
    """Press the power button and wait until the service manager listens."""
    try:
        os.unlink(socket)
    except FileNotFoundError:
        pass
    with open(button, encoding="ascii") as handle:
        os.kill(int(handle.read()), signal.SIGUSR1)
    deadline = time.monotonic() + limit_seconds
    while not os.path.exists(socket):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{socket} did not appear")
        time.sleep(0.05)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "drill_target": {"type": "bool", "required": True},
            "marker": {"type": "path", "required": True},
            "record": {"type": "path"},
            "state": {"type": "str", "choices": ["down", "up"], "required": True},
            "manager_pid_file": {"type": "path", "required": True},
            "power_button": {"type": "path"},
            "socket": {"type": "path"},
        },
        required_if=[("state", "up", ("power_button", "socket"))],
        supports_check_mode=True,
    )
    guard(module)
    params = module.params
    if module.check_mode:
        what = "kill the service manager and all that it runs" if params["state"] == "down" else "boot the host"
        module.exit_json(changed=True, actions=[f"would {what}"], killed=[])
    try:
        if params["state"] == "down":
            with open(params["manager_pid_file"], encoding="ascii") as handle:
                killed = cut(int(handle.read()))
            note(params["record"], killed=killed, killed_at=round(time.time(), 3))
            module.exit_json(changed=True, actions=[f"killed {len(killed)} processes: {killed}"], killed=killed)
        boot(params["power_button"], params["socket"])
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"cannot set the power {params['state']}: {error}")
    module.exit_json(changed=True, actions=["booted the service manager"])


if __name__ == "__main__":
    main()
