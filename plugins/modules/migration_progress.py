#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: how far is the copy of a storage migration, and is it over?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: migration_progress
short_description: How far is the copy of a storage migration?
version_added: 0.1.0
description:
  - Reads what the copy service writes in O(state_dir) and tells whether its pass is done, advancing, silent or ended.
  - Files of the source that could not be read are warnings, with the index of the sample that each was.
  - An action plugin of the same name runs this module in short polls until the pass is over, and prints a line when something moves.
extends_documentation_fragment: [relight.recovery.common, relight.recovery.poll, relight.recovery.manager]
attributes:
  check_mode:
    support: full
    description: Looks only. A check run does not wait.
options:
  state_dir:
    description: Where the host keeps the migration's record.
    type: path
    required: true
  wanted:
    description:
      - Which pass to wait for. V(live) may run while the source is written to, V(final) makes the target equal to it.
    type: str
    choices: [live, final]
    default: live
  path:
    description: The directory that is moved.
    type: path
    default: /data
  store:
    description: The directory of samples in it, for the indices of those that could not be read.
    type: path
  layout:
    description: The store's layout.
    type: str
    default: specforge
"""

EXAMPLES = r"""
- name: Wait for the copy
  relight.recovery.migration_progress:
    state_dir: /var/lib/relight
    wanted: live
    wait_seconds: 86400
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
  description: Where the copy is, in one line.
  returned: always
  type: str
  sample: "live pass, copying: 1200/90000 files, 12 %, 1830 MB/s, 118 min left, at hidden_states/rows_0-2000/data_17.ckpt"
unread_samples:
  description: The indices of the samples that could not be read from the source.
  returned: always
  type: list
  elements: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import glue, migration, migration_watch, services
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict


def look(params: dict) -> glue.Outcome:
    seen = migration_watch.look(params["state_dir"])
    samples = migration_watch.samples_of(seen.progress, params["path"], params["store"] or "", params["layout"])
    gate, settled, line = migration_watch.judge(seen, params["wanted"], unit_up(params), samples)
    return glue.Outcome(gate, more={"settled": settled, "progress": line, "unread_samples": sorted(samples.values())})


def unit_up(params: dict) -> bool:
    """Whether the manager calls the service up; a manager that cannot be asked says nothing."""
    try:
        manager = services.from_params(params)
        unit = manager.units().get(manager.canonical(migration.UNIT))
    except services.ManagerError:
        return False
    return unit is not None and unit.up


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.POLL,
            **services.OPTIONS,
            "state_dir": {"type": "path", "required": True},
            "wanted": {"type": "str", "choices": list(migration_watch.PASSES), "default": "live"},
            "path": {"type": "path", "default": "/data"},
            "store": {"type": "path"},
            "layout": {"type": "str", "default": "specforge"},
        },
        supports_check_mode=True,
    )

    def call() -> glue.Outcome:
        outcome = look(module.params)
        if module.check_mode and not outcome.more["settled"]:
            outcome.more["settled"] = True
        if module.check_mode and outcome.gate.verdict >= Verdict.FAIL:
            return glue.Outcome(migration_watch.planned(outcome.gate), more={**outcome.more, "settled": True})
        return outcome

    glue.main(module, migration_watch.NAME, call)


if __name__ == "__main__":
    main()
