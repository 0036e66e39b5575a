#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Documentation only: the work is done on the controller by the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: judge
short_description: Record what a gate said and stop the host where it must not go on
description:
  - A verdict of C(fail) or C(unknown) stops the host with one sentence a problem; C(warn) and C(pass) go on.
  - In check mode a finding that an act of the real run would mend by then does not stop.
  - Runs on the controller only; the result goes to the run's report.
author: [Relight authors (@relight)]
attributes:
  check_mode:
    support: full
    description: Changes nothing on a host in any mode; a check run reports to a folder of its own.
options:
  result:
    description: The registered result of a gate.
    type: dict
    required: true
  stops:
    description: Whether a bad verdict stops the host. An assessment only records.
    type: bool
    default: true
  after_acts:
    description:
      - Whether the gate looks at what earlier acts of the run produce.
      - A check run then does not stop at it once an act is planned.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Go on only if the weights are whole
  relight.recovery.judge:
    result: "{{ __assess_weights }}"
"""

RETURN = r"""
verdict:
  description: The gate's verdict.
  returned: success
  type: str
  sample: pass
summary:
  description: The gate's worst finding in one line.
  returned: success
  type: str
  sample: as it should be
"""
