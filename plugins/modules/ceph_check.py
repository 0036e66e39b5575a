#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one bounded look, one judgement, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ceph_check
short_description: Is the Ceph cluster under a host's disks well, and is there room?
version_added: 0.1.0
description:
  - Asks the cluster for its health, its pools, its OSDs and its flags, and judges by the fullest OSD - once one of them is
    full, every write of every guest waits, although the guest's own file system looks half empty.
  - Runs on a host with an admin's key, to which the task is delegated.
attributes:
  check_mode:
    support: full
    description: Looks only, in every mode.
options:
  command:
    description: How to call ceph there, as a list of words.
    type: list
    elements: str
    default: [ceph]
  need_bytes:
    description: Bytes that the run will still write.
    type: int
    default: 0
  pools:
    description: The pools that the host's disks lie in. Without it room is judged only where the cluster has one pool.
    type: list
    elements: str
    default: []
  timeout_seconds:
    description: How long the cluster may take to accept a connection; each answer may take twice as long.
    type: float
    default: 15.0
extends_documentation_fragment:
  - relight.recovery.common
"""

EXAMPLES = r"""
- name: See whether the cluster takes writes
  relight.recovery.ceph_check:
    need_bytes: 2500000000000
    pools: [vm-disks]
  delegate_to: "{{ groups['relight_ceph_admin'] | first }}"

- name: See it with cephadm
  relight.recovery.ceph_check:
    command: [cephadm, shell, --, ceph]
  delegate_to: "{{ groups['relight_ceph_admin'] | first }}"
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems.
    - Evidence is among others C(status), C(fullest_osd), C(fullest_percent), C(pools_max_avail_bytes) and the ratios.
  returned: always
  type: dict
actions:
  description: Always empty, a look does nothing.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import bounded, ceph, glue
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict


def run(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    seconds = params["timeout_seconds"]
    try:
        texts = bounded.call(ceph.ask, (tuple(params["command"]), seconds), 2 * seconds * len(ceph.COMMANDS) + 5)
        cluster = ceph.parse(texts)
    except (bounded.TimedOut, bounded.ChildFailed, ceph.Unreadable) as error:
        remedy = "correct the group relight_ceph_admin, or relight_ceph_command; then look at the monitors"
        return glue.Outcome(Gate(ceph.NAME, problems=[Problem("ceph-unreadable", "ceph", str(error), remedy, Verdict.UNKNOWN)]))
    return glue.Outcome(ceph.judge(cluster, ceph.Need(params["need_bytes"], tuple(params["pools"]))))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            "command": {"type": "list", "elements": "str", "default": ["ceph"]},
            "need_bytes": {"type": "int", "default": 0},
            "pools": {"type": "list", "elements": "str", "default": []},
            "timeout_seconds": {"type": "float", "default": 15.0},
        },
        supports_check_mode=True,
    )
    glue.main(module, "ceph_check", lambda: run(module))


if __name__ == "__main__":
    main()
