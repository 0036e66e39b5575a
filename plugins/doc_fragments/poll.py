# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Options of gates that the play waits for; the action plugin of the same name takes them."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  wait_seconds:
    description:
      - How long to wait until the gate settles; V(0) looks once.
      - The wait is made of short polls, so that a dropped connection costs one poll. Running again attaches.
    type: float
    default: 0.0
  poll_seconds:
    description: The pause between two polls.
    type: float
    default: 2.0
"""
