#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation only: the work is done on the controller by the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: consents
short_description: Stop before the first act and name all that is in its way
description:
  - Looks through what the assessment recorded for findings that recovery may not touch without consent.
  - Stops the host with the exact line to paste when consent for one of them is missing.
  - Stops the host also where one of the gates in O(beyond) found something wrong, since no act of recovery mends that.
  - Runs on the controller only.
author: [Relight authors (@relight)]
attributes:
  check_mode:
    support: full
    description: Changes nothing on a host in any mode; a check run reports to a folder of its own.
options:
  beyond:
    description: The gates that look at what recovery is given, such as weights and training data.
    type: list
    elements: str
    default: []
  passed_over:
    description: The gates whose consents are not asked for, since a later step makes them needless.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Stop before the first change for all that is in its way
  relight.recovery.consents:
    beyond: [weights_check, dataset_check]
"""

RETURN = r"""
needed:
  description: The names that are not yet consented to.
  returned: success
  type: list
  elements: str
  sample: []
"""
