#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one bounded run of the host environment's continuity check, its gate out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: continuity_check
short_description: Does this server compute what the sample store holds?
version_added: 0.1.0
description:
  - Has the host environment extract some intact samples again (C(relight continuity)) and compares them with what is
    stored, by per-token quantiles of relative error, each captured layer and the final state on its own.
  - The verdict is kept as a link in the store's C(runs.json). The extraction client adds nothing for a server instance
    that no passed link covers.
  - A server instance that has passed is passed at once, and an empty store has nothing to compare; no request is sent then.
  - A mismatch says what it looks like, as far as the captured states tell (other layers, other norm, other weights or
    precision, other tokens, values that are not finite).
  - The run belongs to the owner of O(config) where this module runs as root.
attributes:
  check_mode:
    support: full
    description: Sends nothing and answers V(unknown), C(depends-on-planned-act).
options:
  host_python:
    description: The interpreter of Relight's environment on the host.
    type: path
    required: true
  config:
    description: The client's configuration.
    type: path
    required: true
  samples:
    description: How many samples are extracted again.
    type: int
    default: 4
  seconds:
    description: How long the whole check may take.
    type: float
    default: 1800.0
extends_documentation_fragment:
  - relight.recovery.common
"""

EXAMPLES = r"""
- name: Extract some intact samples again and compare
  relight.recovery.continuity_check:
    host_python: /opt/relight/venv/bin/python
    config: /var/lib/relight/extract.json
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems. Evidence holds the C(quantiles) of each block, the C(tolerance) that
      they were held against, and C(probe_tokens), the tokens that were sent to the server.
  returned: always
  type: dict
actions:
  description: Always empty, a look does nothing.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import continuity, continuity_run, glue


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            "host_python": {"type": "path", "required": True},
            "config": {"type": "path", "required": True},
            "samples": {"type": "int", "default": 4},
            "seconds": {"type": "float", "default": 1800.0},
        },
        supports_check_mode=True,
    )
    params = module.params

    def call() -> glue.Outcome:
        if module.check_mode:
            what = "the server that a real run starts or keeps is not asked"
            return glue.Outcome(continuity.unknown("depends-on-planned-act", what, "run without --check"))
        return glue.Outcome(continuity_run.gate(params["host_python"], params["config"], params["samples"], params["seconds"]))

    glue.main(module, continuity.GATE, call)


if __name__ == "__main__":
    main()
