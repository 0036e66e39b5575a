#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one unit brought to its state, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit
short_description: Install, start, stop or disable one service, under systemd or supervisord
description:
  - Keeps a unit of ours installed and running. It is restarted only where its configuration differs from what runs or
    where it does not run. The configuration is known by a hash over the command, environment, directory, user, limits
    and the contents of the files in O(watch); each process of the unit carries it as C(RELIGHT_UNIT_HASH).
  - Takes a foreign unit out of service with V(disabled), if it is listed in O(units) or consented to. What was done is
    recorded in C(disabled.json) in O(state_dir), and V(enabled) undoes it.
  - A unit's log is appended to and never truncated.
extends_documentation_fragment: [relight.recovery.common, relight.recovery.act, relight.recovery.manager]
attributes:
  check_mode: {support: full, description: Lists the same actions and changes nothing.}
  diff_mode: {support: full, description: "Shows the unit file before and after, secrets masked."}
options:
  state_dir:
    description: Where the host keeps its journal, its lock and the record of what was disabled. It must survive a reboot.
    type: path
    required: true
  name:
    description: The unit's name; for systemd C(.service) may be left out.
    type: str
    required: true
  state:
    description:
      - V(started) installs the unit and waits until its manager calls it running.
      - V(stopped) stops it.
      - V(disabled) stops it and keeps it from starting again.
      - V(enabled) undoes V(disabled) without starting the unit.
      - V(absent) removes a unit of ours.
    type: str
    choices: [started, stopped, disabled, enabled, absent]
    default: started
  command:
    description: The command's words, taken literally. Needed for V(started).
    type: list
    elements: str
  environment:
    description: Variables of the unit's processes.
    type: dict
    default: {}
  directory:
    description: The unit's working directory.
    type: path
    default: /
  user:
    description: Whom the unit runs as; by default as the service manager runs things.
    type: str
  stdout:
    description: The log that standard output and error are appended to.
    type: path
  restart:
    description: Whether the manager starts it again after a crash. The clean ends of the client (0, 2, 3, 4, 5) are none.
    type: bool
    default: false
  start_seconds:
    description: How long the unit must live to be called running. V(0) for one that may end at once.
    type: int
    default: 1
  stop_seconds:
    description: How long after SIGTERM it is killed.
    type: int
    default: 20
  requires_mounts:
    description: Paths whose file systems must be mounted (systemd).
    type: list
    elements: path
    default: []
  watch:
    description: Small files whose change calls for a restart.
    type: list
    elements: path
    default: []
  units:
    description: Foreign units that may be stopped and disabled.
    type: list
    elements: str
    default: []
  mask:
    description: Mask as well (systemd). Units that only others start are always masked.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Serve
  relight.recovery.unit:
    name: relight-sglang
    command: [/opt/sglang/bin/python, -m, sglang.launch_server, --model-path, /data/model]
    environment: {RELIGHT_DUMP_DIR: /dev/shm/relight}
    stdout: /var/log/relight/sglang.log
    state_dir: /var/lib/relight

- name: Take the old service out of the way
  relight.recovery.unit:
    name: vllm
    state: disabled
    units: [vllm]
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description: The verdict with its evidence and problems.
  returned: always
  type: dict
actions:
  description: What was done, or in check mode would be done, as sentences.
  returned: always
  type: list
  elements: str
unit:
  description: The unit as it is now.
  returned: when the unit was looked at
  type: dict
  contains:
    name: {description: Its name as the manager writes it., type: str, returned: always}
    state: {description: 'Running, starting, stopping, stopped, failed, disabled or absent.', type: str, returned: always}
    pid: {description: Its main process., type: int, returned: when it runs}
    hash: {description: The hash of its configuration., type: str, returned: when known}
    exit_status: {description: How it ended by itself., type: int, returned: when known}
    log: {description: Its log., type: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import consent, glue, redact, services, units


def act(params: dict, check: bool) -> glue.Outcome:
    manager = services.from_params(params)
    name, state, seconds = params["name"], params["state"], params["stop_seconds"]
    allowed = units.Allowed(params["units"], consent.read(params["consent"]))
    if state == "started":
        return units.started(manager, spec_of(params), check)
    if state == "disabled":
        return units.disabled(manager, name, allowed, params["state_dir"], seconds, params["mask"], check)
    if state == "enabled":
        return units.enabled(manager, name, params["state_dir"], check)
    return units.stopped(manager, name, allowed, seconds, check, remove=state == "absent")


def spec_of(params: dict) -> services.UnitSpec:
    return services.UnitSpec(
        name=params["name"],
        command=tuple(params["command"]),
        environment=params["environment"],
        directory=params["directory"],
        user=params["user"],
        stdout=params["stdout"] or "",
        restart=params["restart"],
        start_seconds=params["start_seconds"],
        stop_seconds=params["stop_seconds"],
        requires_mounts=tuple(params["requires_mounts"]),
        watched=services.watched(params["watch"]),
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.ACT,
            **services.OPTIONS,
            "state_dir": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "default": "started", "choices": ["started", "stopped", "disabled", "enabled", "absent"]},
            "command": {"type": "list", "elements": "str"},
            "environment": {"type": "dict", "default": {}},
            "directory": {"type": "path", "default": "/"},
            "user": {"type": "str"},
            "stdout": {"type": "path"},
            "restart": {"type": "bool", "default": False},
            "start_seconds": {"type": "int", "default": 1},
            "stop_seconds": {"type": "int", "default": 20},
            "requires_mounts": {"type": "list", "elements": "path", "default": []},
            "watch": {"type": "list", "elements": "path", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "mask": {"type": "bool", "default": False},
        },
        required_if=[("state", "started", ["command"])],
        supports_check_mode=True,
    )
    options = {**module.params, "environment": {key: str(value) for key, value in module.params["environment"].items()}}
    # The result repeats the options: without secrets.
    module.params["environment"] = redact.environment(options["environment"], ("",))
    module.params["command"] = redact.words(options["command"] or [])
    glue.main(module, f"unit:{options['name']}", lambda: act(options, module.check_mode), acts=True)


if __name__ == "__main__":
    main()
