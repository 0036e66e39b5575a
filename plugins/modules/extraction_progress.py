#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: how far is the extraction, and has it come as far as the play waits for?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: extraction_progress
short_description: How far is the extraction?
description:
  - Reads the client's C(progress.json) in O(state_dir) and tells whether the extraction is finished, advancing, silent or ended.
  - An action plugin of the same name runs this module in short polls until O(goal) is reached, and prints a line when something moves.
extends_documentation_fragment: [relight.recovery.common, relight.recovery.poll]
attributes:
  check_mode:
    support: full
    description: Looks only. A check run does not wait.
options:
  goal:
    description:
      - What to wait for.
      - V(none) looks once, V(first_samples) waits until a first sample of this run is in the store, V(finished) until all are.
    type: str
    choices: [none, first_samples, finished]
    default: none
  missing:
    description: How many samples the store's inventory finds missing now. With V(0) there is nothing to wait for.
    type: int
  pid:
    description: The client that is waited for; what another wrote before it is no progress.
    type: int
"""

EXAMPLES = r"""
- name: Wait for the first new samples
  relight.recovery.extraction_progress:
    state_dir: /var/lib/relight
    goal: first_samples
    wait_seconds: 3600
"""

RETURN = r"""
gate:
  description: The verdict with its evidence and problems.
  returned: always
  type: dict
settled:
  description: Whether waiting is over.
  returned: always
  type: bool
progress:
  description: Where the extraction is, in one line.
  returned: always
  type: str
  sample: "extracting: 120/160 samples, 96 tokens/s, 31 s left"
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import glue, progress
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.journal import boot_id


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.POLL,
            "goal": {"type": "str", "choices": list(progress.GOALS), "default": "none"},
            "missing": {"type": "int"},
            "pid": {"type": "int"},
        },
        supports_check_mode=True,
    )

    def call() -> glue.Outcome:
        state_dir = module.params["state_dir"]
        missing = module.params["missing"]
        if not state_dir:
            problem = Problem("no-state-dir", "state_dir", "is not set", "set relight_state_dir in the inventory", Verdict.UNKNOWN)
            return glue.Outcome(Gate("extraction_progress", problems=[problem]), more={"settled": True, "progress": "unknown"})
        seen = progress.look(state_dir, time.time(), boot_id(), module.params["pid"])
        if module.check_mode and missing and not seen.alive:
            what = f"{missing} samples are missing; the real run starts the client"
            planned = Problem("depends-on-planned-act", "relight-extract", what, "run without --check", Verdict.UNKNOWN)
            return glue.Outcome(Gate("extraction_progress", problems=[planned]), more={"settled": True, "progress": what})
        gate, settled, line = progress.judge(seen, missing, module.params["goal"])
        return glue.Outcome(gate, more={"settled": settled, "progress": line})

    glue.main(module, "extraction_progress", call)


if __name__ == "__main__":
    main()
