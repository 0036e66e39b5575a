# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Options that every gate shares."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
author: [Relight authors (@relight)]
options:
  state_dir:
    description:
      - Where the host keeps its journal, lock and caches. It must survive a reboot.
      - Without it nothing is journaled.
    type: path
  run:
    description: The name of the recovery run, for the journal.
    type: str
    default: ''
  stage:
    description: The stage of the runbook that this step belongs to, for the journal.
    type: str
    default: ''
"""
