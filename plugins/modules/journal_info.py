#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: the last lines of the host's journal."""

from __future__ import annotations

DOCUMENTATION = r"""
module: journal_info
short_description: Read the host's journal
description:
  - Returns the last lines of C(journal.jsonl) in O(state_dir), every step's begin and end, oldest first.
  - Torn lines, which a kill may leave, are passed over. A journal that does not exist has no lines.
author: [Relight authors (@relight)]
attributes:
  check_mode:
    support: full
    description: Looks only.
options:
  state_dir:
    description: Where the host keeps its journal.
    type: path
    required: true
  lines:
    description: How many lines to return at the most.
    type: int
    default: 400
"""

EXAMPLES = r"""
- name: Read the journal
  relight.recovery.journal_info:
    state_dir: /var/lib/relight
  register: journal
"""

RETURN = r"""
journal:
  description: The lines, oldest first.
  returned: success
  type: list
  elements: dict
"""

from collections import deque

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils.journal import Journal


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "lines": {"type": "int", "default": 400},
        },
        supports_check_mode=True,
    )
    try:
        lines = deque(Journal(module.params["state_dir"]).lines(), maxlen=module.params["lines"])
    except OSError as error:
        module.fail_json(msg=f"{module.params['state_dir']}: the journal cannot be read: {error}")
    module.exit_json(changed=False, journal=list(lines))


if __name__ == "__main__":
    main()
