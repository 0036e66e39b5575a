#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one call, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_env
short_description: Our Python environment on the host, from a wheelhouse, without a network
description:
  - Builds the environment beside its name, as O(venv) with a key appended that changes with the wheels, the extras and the base
    interpreter, marks it when it is whole, and then points the link O(venv) to it in one step.
  - A build that was killed is made anew. The former environment stays until O(state=absent), so what runs from it goes on running.
  - Every wheel is read and compared with its digest first. Nothing is taken from a registry.
extends_documentation_fragment:
  - relight.recovery.common
  - relight.recovery.act
attributes:
  check_mode:
    support: full
    description: Tells the same actions and changes nothing.
options:
  state_dir:
    description: Where the host keeps its journal and lock. It must survive a reboot.
    required: true
  venv:
    description: Where the environment is found. It becomes a link.
    type: path
    required: true
  wheelhouse:
    description: A folder on the host that C(relight wheelhouse) made. Needed for O(state=present).
    type: path
  index:
    description:
      - The content of the controller's C(wheelhouse.json). A wheelhouse on the host that is another is refused.
      - With it, check mode can tell the actions before the wheels are on the host.
    type: dict
  python:
    description: The interpreter to build with; by default the one that runs this module.
    type: path
  extras:
    description: The extras of the wheel to install.
    type: list
    elements: str
    default: [host]
  state:
    description: Whether the environment is there.
    type: str
    choices: [present, absent]
    default: present
"""

EXAMPLES = r"""
- name: Build the host environment
  relight.recovery.host_env:
    venv: /opt/relight/venv
    wheelhouse: /var/lib/relight/wheelhouse
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description: The verdict with its evidence and problems.
  returned: always
  type: dict
actions:
  description: What was done, or in check mode what would be done.
  returned: always
  type: list
  elements: str
venv:
  description: Where the environment is found.
  returned: when it is there
  type: str
"""

import sys

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import glue, host_env


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.ACT,
            "state_dir": {"type": "path", "required": True},
            "venv": {"type": "path", "required": True},
            "wheelhouse": {"type": "path"},
            "index": {"type": "dict"},
            "python": {"type": "path"},
            "extras": {"type": "list", "elements": "str", "default": ["host"]},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ("wheelhouse",))],
        supports_check_mode=True,
    )
    glue.main(module, "host_env", lambda: host_env.call(module.params, sys.executable, module.check_mode), acts=True)


if __name__ == "__main__":
    main()
