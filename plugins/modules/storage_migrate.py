#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one step of a storage migration, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: storage_migrate
short_description: Move the data volume to a new disk, verified, resumable, reversible
version_added: 0.1.0
description:
  - Each state is a step that looks first and does only what is not done. Run in order they move O(path) to O(target).
  - The source is read and never written. What is destroyed is named by a consent, which is spent once, in the journal.
  - The copy itself is a unit of its own on the host, C(relight-migrate); M(relight.recovery.migration_progress) waits for it.
extends_documentation_fragment: [relight.recovery.common, relight.recovery.act, relight.recovery.manager]
attributes:
  check_mode:
    support: full
    description: V(prepared) returns the whole plan as its actions; the later states wait for it. Nothing is changed.
options:
  state_dir:
    description: Where the host keeps the migration's record and manifest. It must not lie on the volume that is moved.
    type: path
    required: true
  state:
    description:
      - V(planned) looks and judges; it changes nothing.
      - V(prepared) formats the target, with consent, and mounts it at O(staging).
      - V(copied) starts the first pass of the copy, while writers may still run.
      - V(quiesced) stops our units that hold the volume, refuses while others do, and makes it read-only.
      - V(verified) starts the final pass, which copies what changed and reads back what was not.
      - V(cut_over) edits the table of mounts and mounts the new file system in place of the old one, which goes aside, read-only.
      - V(rolled_back) undoes it all, until the old disk is reclaimed.
      - V(reclaimed) gives the old disk up, with consent and by the manifest's proof.
      - V(released) takes the unit and the guard of the bare directory away, for when Relight leaves the host.
    type: str
    choices: [planned, prepared, copied, quiesced, verified, cut_over, rolled_back, reclaimed, released]
    default: planned
  path:
    description: The mount point that is moved.
    type: path
    default: /data
  target:
    description:
      - The new disk by what names it for good; its link in C(/dev/disk/by-id), or C(serial:), C(wwn:), C(uuid:), C(loop:) and a value.
      - A kernel name such as C(/dev/nvme0n1) is refused. It may be another disk after a reboot.
    type: str
    default: ''
  source:
    description: V(lost) where the old volume is gone for good and nothing can be copied.
    type: str
    choices: [mounted, lost]
    default: mounted
  fstype:
    description: The new file system.
    type: str
    choices: [xfs, ext4]
    default: xfs
  partitioned:
    description: Whether the disk gets a GPT with one partition; else the file system takes the whole disk.
    type: bool
    default: true
  options:
    description: Mount options of the new file system, beside those that the old line of the table has.
    type: str
    default: noatime
  device_timeout:
    description: How many seconds a boot waits for the device before it goes on without it.
    type: int
    default: 300
  need_bytes:
    description: Bytes that the run will still write.
    type: int
    default: 0
  need_inodes:
    description: Files that the run will still create.
    type: int
    default: 0
  reserve_bytes:
    description: Bytes that must stay free beside.
    type: int
    default: 0
  staging:
    description: Where the target is mounted until it takes the volume's place.
    type: path
    default: /mnt/relight-new
  aside:
    description: Where the old file system is mounted afterwards, read-only.
    type: path
    default: /mnt/relight-old
  fstab:
    description: The table of mounts.
    type: path
    default: /etc/fstab
  our_units:
    description: Units of ours that may be stopped when the volume must stand still.
    type: list
    elements: str
    default: [relight-extract, relight-sglang]
  host_python:
    description: The interpreter that copies. One that has xxhash digests fastest. Where it is not there, the module's own copies.
    type: path
  log:
    description: The log of the copy service.
    type: path
    default: /var/log/relight/relight-migrate.log
  workers:
    description: How many files are copied at a time.
    type: int
    default: 4
  stall_seconds:
    description: How long a read of the source may stand still before its file is listed and left.
    type: float
    default: 120.0
  stop_seconds:
    description: How long a unit of ours may take to end, samples in flight included.
    type: int
    default: 600
  look_seconds:
    description: How long a look at the volume or the disk may take.
    type: float
    default: 20.0
"""

EXAMPLES = r"""
- name: See what a migration would do
  relight.recovery.storage_migrate:
    target: /dev/disk/by-id/nvme-KIOXIA_15T_5CD0A00TTEST
    state_dir: /var/lib/relight

- name: Format the new disk and mount it aside
  relight.recovery.storage_migrate:
    state: prepared
    target: /dev/disk/by-id/nvme-KIOXIA_15T_5CD0A00TTEST
    consent: ["wipe:/dev/disk/by-id/nvme-KIOXIA_15T_5CD0A00TTEST"]
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems.
    - Evidence names both file systems, the phase that the migration is in, what the source holds and what fits.
  returned: always
  type: dict
actions:
  description: What was done, or in check mode would be, as sentences.
  returned: always
  type: list
  elements: str
plan:
  description: All that the migration would do from here.
  returned: when nothing speaks against it
  type: list
  elements: str
"""

import os
import sys

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import (
    blockdev,
    bounded,
    consent,
    glue,
    migration,
    migration_acts,
    migration_plan,
    services,
)
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.journal import Journal


def context(module: AnsibleModule) -> migration_acts.Context:
    params = module.params
    wish = migration_plan.Wish(
        data=params["path"].rstrip("/") or "/",
        target=params["target"],
        lost=params["source"] == "lost",
        **{name: params[name] for name in ("state_dir", "fstype", "partitioned", "options", "device_timeout", "look_seconds")},
        **{name: params[name] for name in ("need_bytes", "need_inodes", "reserve_bytes", "aside", "fstab")},
        stage=params["staging"],
    )
    return migration_acts.Context(
        wish=wish,
        journal=Journal(params["state_dir"], params["run"], params["stage"], "storage_migrate"),
        granted=consent.read(params["consent"]),
        check=module.check_mode,
        manager=services.from_params(params),
        our_units=tuple(params["our_units"]),
        python=params["host_python"] if os.access(params["host_python"] or "", os.X_OK) else sys.executable,
        log=params["log"],
        workers=params["workers"],
        stall_seconds=params["stall_seconds"],
        stop_seconds=params["stop_seconds"],
    )


def run(module: AnsibleModule) -> glue.Outcome:
    """One step, or a gate that says why it could not even look."""
    path = module.params["path"]
    try:
        return migration_acts.act(module.params["state"], context(module))
    except bounded.TimedOut as error:
        problem = Problem("mount-hung", path, str(error), "see the storage behind it; a frozen writer cannot be killed", Verdict.UNKNOWN)
    except (bounded.ChildFailed, blockdev.CannotLook) as error:
        problem = Problem("migration-cannot-look", path, str(error), "look with become; see the kernel's log", Verdict.UNKNOWN)
    except migration.NotOurs as error:
        problem = Problem("migration-record-strange", path, str(error), "use the Relight that wrote it", Verdict.UNKNOWN)
    return glue.Outcome(Gate(migration_plan.NAME, problems=[problem]))


def main() -> None:
    states = ["planned", "prepared", "copied", "quiesced", "verified", "cut_over", "rolled_back", "reclaimed", "released"]
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.ACT,
            **services.OPTIONS,
            "state_dir": {"type": "path", "required": True},
            "state": {"type": "str", "choices": states, "default": "planned"},
            "path": {"type": "path", "default": "/data"},
            "target": {"type": "str", "default": ""},
            "source": {"type": "str", "choices": ["mounted", "lost"], "default": "mounted"},
            "fstype": {"type": "str", "choices": list(migration_plan.FILE_SYSTEMS), "default": "xfs"},
            "partitioned": {"type": "bool", "default": True},
            "options": {"type": "str", "default": "noatime"},
            "device_timeout": {"type": "int", "default": 300},
            "need_bytes": {"type": "int", "default": 0},
            "need_inodes": {"type": "int", "default": 0},
            "reserve_bytes": {"type": "int", "default": 0},
            "staging": {"type": "path", "default": "/mnt/relight-new"},
            "aside": {"type": "path", "default": "/mnt/relight-old"},
            "fstab": {"type": "path", "default": "/etc/fstab"},
            "our_units": {"type": "list", "elements": "str", "default": ["relight-extract", "relight-sglang"]},
            "host_python": {"type": "path"},
            "log": {"type": "path", "default": "/var/log/relight/relight-migrate.log"},
            "workers": {"type": "int", "default": 4},
            "stall_seconds": {"type": "float", "default": 120.0},
            "stop_seconds": {"type": "int", "default": 600},
            "look_seconds": {"type": "float", "default": 20.0},
        },
        supports_check_mode=True,
    )
    glue.main(module, "storage_migrate", lambda: run(module), acts=module.params["state"] != "planned")


if __name__ == "__main__":
    main()
