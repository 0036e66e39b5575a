#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one look, one judgement, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: baseline_check
short_description: Is there a baseline of this host, and does the host's copy agree with it?
version_added: 0.1.0
description:
  - Compares the controller's baseline with the copy that the host keeps in O(state_dir). Whether the host is as the baseline
    says is asked by the gates that look at the things themselves.
attributes:
  check_mode:
    support: full
    description: Looks only, in every mode.
options:
  host:
    description: The host's name in the inventory.
    type: str
    required: true
  baseline:
    description: The controller's baseline; empty where there is none.
    type: dict
    default: {}
  serving:
    description: The evidence of M(relight.recovery.hs_patch_check). Versions and captured layers are compared with the baseline.
    type: dict
    default: {}
  required:
    description: Whether a host without a baseline is V(warn).
    type: bool
    default: false
  state_dir:
    description: Where the host keeps its journal, lock, caches and its copy of the baseline. It must survive a reboot.
    type: path
    required: true
extends_documentation_fragment:
  - relight.recovery.common
"""

EXAMPLES = r"""
- name: See whether controller and host mean the same baseline
  relight.recovery.baseline_check:
    host: "{{ inventory_hostname }}"
    baseline: "{{ relight_baseline }}"
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description: The verdict with its evidence and problems.
  returned: always
  type: dict
actions:
  description: Always empty, a look does nothing.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import baseline, glue


def run(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    copy, copy_error = baseline.read_copy(params["state_dir"])
    return glue.Outcome(baseline.check(params["baseline"], copy, copy_error, params["host"], params["required"], params["serving"]))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            "state_dir": {"type": "path", "required": True},
            "host": {"type": "str", "required": True},
            "baseline": {"type": "dict", "default": {}},
            "serving": {"type": "dict", "default": {}},
            "required": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    glue.main(module, "baseline_check", lambda: run(module))


if __name__ == "__main__":
    main()
