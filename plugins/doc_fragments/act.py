# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Options that every act shares, beside those of every gate."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  consent:
    description:
      - A list of exact names of what may be destroyed or disabled although the inventory does not list it.
      - A bare string is refused. Names are matched whole against what is found on the host.
    type: raw
  lock_wait_seconds:
    description: How long to wait for another process that holds this host's recovery lock before refusing.
    type: float
    default: 60.0
"""
