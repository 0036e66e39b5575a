#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation only: the work is done on the controller by the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_close
short_description: Close a host and write the report
description:
  - Writes C(report.json) and C(report.html) of the run, and prints the host's verdict.
  - Runs on the controller only.
author: [Relight authors (@relight)]
attributes:
  check_mode:
    support: full
    description: Changes nothing on a host in any mode; a check run reports to a folder of its own.
options:
  ended:
    description: Whether the host came to the end of its stages. A host that did not is C(not-clear).
    type: bool
    default: false
  journal:
    description: The host's journal lines, for the report's timeline.
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- name: Write the report
  relight.recovery.run_close:
    ended: true
"""

RETURN = r"""
verdict:
  description: The host's verdict.
  returned: success
  type: str
  sample: clear
report:
  description: Where report.json lies on the controller.
  returned: success
  type: str
  sample: /home/op/relight-report/report.json
"""
