#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one look at a volume that someone else mounts, one judgement, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: storage_attached
short_description: Is a data volume right that was moved by hand or is mounted from outside?
version_added: 0.1.0
description:
  - Verifies and never mounts. In a container the mounts are made outside, and the table of mounts is not asked for.
  - Looks that the right file system is mounted at O(path) and will be at the next boot, by UUID and with C(nofail), that the
    inventory's paths are there, and that no unit still names a former path.
  - Where the old copy can still be read, every file of it must be in the new one with the same length, and the newest ones with
    the same bytes.
extends_documentation_fragment: [relight.recovery.common]
attributes:
  check_mode:
    support: full
    description: Looks only.
options:
  path:
    description: The mount point of the data.
    type: path
    default: /data
  uuid:
    description: The UUID of the file system that must be mounted there.
    type: str
    default: ''
  fstab:
    description: The table of mounts.
    type: path
    default: /etc/fstab
  paths:
    description: Paths of the inventory that must exist.
    type: list
    elements: path
    default: []
  former_paths:
    description: Where the data lay before. Units and the inventory must name them no more.
    type: list
    elements: path
    default: []
  unit_folders:
    description: Where unit files are looked for.
    type: list
    elements: path
    default: [/etc/systemd/system, /usr/local/lib/systemd/system, /etc/supervisor/conf.d]
  old_copy:
    description: Where the old copy can still be read.
    type: path
  read_bytes:
    description: How much of the old copy is compared byte by byte, the newest files first.
    type: int
    default: 10737418240
  mounts_from:
    description:
      - Who mounts the volume. V(outside) does not ask for the table of mounts nor for a guard, as in a container.
      - V(auto) takes a container for one whose mounts come from outside.
    type: str
    choices: [auto, here, outside]
    default: auto
  look_seconds:
    description: How long the volume may take to answer.
    type: float
    default: 20.0
  compare_seconds:
    description: How long the comparison may take.
    type: float
    default: 3600.0
"""

EXAMPLES = r"""
- name: See whether what was moved by hand is right
  relight.recovery.storage_attached:
    path: /data
    uuid: 0b8a6b0e-6e1c-4f57-9a53-0d2b7d1d5c11
    paths: [/data/models, /data/train.jsonl]
    former_paths: [/mnt/ceph]
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems.
    - Evidence is what is mounted, whether from outside, its guard, and how much of an old copy was compared.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import attached, bounded, glue
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict


def run(params: dict) -> glue.Outcome:
    wish = attached.Wish(
        data=params["path"].rstrip("/") or "/",
        uuid=params["uuid"],
        fstab=params["fstab"],
        paths=tuple(path for path in params["paths"] if path),
        former=tuple(path.rstrip("/") for path in params["former_paths"]),
        unit_folders=tuple(params["unit_folders"]),
        old_copy=params["old_copy"] or "",
        read_bytes=params["read_bytes"],
        mounts_from=params["mounts_from"],
    )
    try:
        gate = attached.judge(wish, attached.look(wish, params["look_seconds"], params["compare_seconds"]))
    except bounded.TimedOut as error:
        problem = Problem(
            "mount-hung", wish.data, str(error), "see the storage behind it; a frozen writer cannot be killed", Verdict.UNKNOWN
        )
        gate = Gate(attached.NAME, problems=[problem])
    return glue.Outcome(gate)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            "path": {"type": "path", "default": "/data"},
            "uuid": {"type": "str", "default": ""},
            "fstab": {"type": "path", "default": "/etc/fstab"},
            "paths": {"type": "list", "elements": "path", "default": []},
            "former_paths": {"type": "list", "elements": "path", "default": []},
            "unit_folders": {"type": "list", "elements": "path", "default": list(attached.UNIT_FOLDERS)},
            "old_copy": {"type": "path"},
            "read_bytes": {"type": "int", "default": 10 << 30},
            "mounts_from": {"type": "str", "choices": ["auto", "here", "outside"], "default": "auto"},
            "look_seconds": {"type": "float", "default": 20.0},
            "compare_seconds": {"type": "float", "default": 3600.0},
        },
        supports_check_mode=True,
    )
    glue.main(module, attached.NAME, lambda: run(module.params))


if __name__ == "__main__":
    main()
