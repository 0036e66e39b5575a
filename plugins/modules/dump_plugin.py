#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one call, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dump_plugin
short_description: Relight's wheel in the SGLang environment, so that the server can dump hidden states
description:
  - Installs the wheel of the wheelhouse into the environment of O(python), without dependencies, unless the very same content is there.
  - What was installed where is recorded in O(state_dir), and O(state=absent) takes out all of that and nothing else.
  - Nothing is exchanged under a server that runs from the environment; without the right to see that, the verdict is unknown.
extends_documentation_fragment:
  - relight.recovery.common
  - relight.recovery.act
attributes:
  check_mode:
    support: full
    description: Tells the same actions and changes nothing.
options:
  state_dir:
    description: Where the host keeps its journal and the record of what was installed. It must survive a reboot.
    required: true
  python:
    description: The interpreter that serves SGLang. Needed for O(state=present).
    type: path
  wheelhouse:
    description: A folder on the host that C(relight wheelhouse) made. Needed for O(state=present).
    type: path
  index:
    description:
      - The content of the controller's C(wheelhouse.json). A wheelhouse on the host that is another is refused.
      - With it, check mode can tell the actions before the wheels are on the host.
    type: dict
  state:
    description: Whether the plugin is there.
    type: str
    choices: [present, absent]
    default: present
"""

EXAMPLES = r"""
- name: Install the dump plugin
  relight.recovery.dump_plugin:
    python: /opt/sglang/bin/python
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
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import dump_plugin, glue


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.ACT,
            "state_dir": {"type": "path", "required": True},
            "python": {"type": "path"},
            "wheelhouse": {"type": "path"},
            "index": {"type": "dict"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ("python", "wheelhouse"))],
        supports_check_mode=True,
    )
    glue.main(module, "dump_plugin", lambda: dump_plugin.call(module.params, module.check_mode), acts=True)


if __name__ == "__main__":
    main()
