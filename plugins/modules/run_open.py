#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation only: the work is done on the controller by the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_open
short_description: Say what a run expects before anything runs
description:
  - Refuses an empty group, an unknown tag, a host without its required variables and a malformed O(ignore:relight_consent).
  - Writes C(report.json) and C(report.html) with every expected host as C(not-clear), so that a run that is killed or reaches nobody
    says so.
  - Runs on the controller only and sets the fact C(relight_run), the run's name.
author: [Relight authors (@relight)]
attributes:
  check_mode:
    support: full
    description: Changes nothing on a host in any mode; a check run reports to a folder of its own.
options:
  group:
    description: The inventory group to recover, or one of its hosts. Several are parted by commas.
    type: str
    required: true
  kind:
    description: Which playbook this is.
    type: str
    required: true
  report_dir:
    description: Where to report, unless the hosts' own C(relight_report_dir) says otherwise.
    type: path
    required: true
  required:
    description: Names of variables that every host must have.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Open the run
  relight.recovery.run_open:
    group: relight
    kind: recover
    report_dir: /home/op/relight-report
    required: [relight_gpu_count]
"""

RETURN = r"""
run:
  description: The run's name.
  returned: success
  type: str
  sample: 20261201T143000-1f2e
report:
  description: Where report.json lies on the controller.
  returned: success
  type: str
  sample: /home/op/relight-report/report.json
"""
