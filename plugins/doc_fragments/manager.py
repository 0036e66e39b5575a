# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Options that say how to reach the host's service manager."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  manager:
    description:
      - The host's service manager.
      - V(auto) is systemd where PID 1 is systemd, else supervisord where O(supervisor_socket) is given, else none.
    type: str
    choices: [auto, systemd, supervisord, none]
    default: auto
  supervisor_socket:
    description: The unix socket on which supervisord answers XML-RPC.
    type: path
  supervisor_conf_dir:
    description: The directory of C(*.conf) files that supervisord includes. Ours go there.
    type: path
"""
