#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one bounded look, one judgement, a sweep where asked for, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tmpfs_check
short_description: Is the dump directory's tmpfs large and empty enough for the coming run?
version_added: 0.1.0
description:
  - Looks at the file system that holds O(path), at the shared memory in it and at our dumps, and compares the room with
    what the run needs at its fullest. The memory limit of a container is counted too.
  - V(swept) removes the segments whose creator is proven dead by the pid in their name and that no process has open or
    mapped; and of O(dump_dir) the dumps that no client waits for, since no process of the unit C(relight-extract) lives.
  - Without root, processes of other users are not looked into; a segment whose own user has such processes stays.
  - A name that tells no pid (C(nccl-*), C(cuda.shm.*)) is counted, never swept.
attributes:
  check_mode:
    support: full
    description: Removes nothing and returns the same actions.
options:
  path:
    description: A directory on the tmpfs.
    type: path
    default: /dev/shm
  dump_dir:
    description: Where the server dumps to. It need not exist yet.
    type: path
  need_bytes:
    description: Bytes that the run holds there at its fullest.
    type: int
    required: true
  reserve_bytes:
    description: Bytes that must stay free for NCCL and SGLang.
    type: int
    default: 4294967296
  state:
    description: V(reported) looks. V(swept) also removes what dead processes left.
    type: str
    choices: [reported, swept]
    default: reported
  look_seconds:
    description: How long the look may take.
    type: float
    default: 30.0
extends_documentation_fragment:
  - relight.recovery.common
  - relight.recovery.act
"""

EXAMPLES = r"""
- name: See whether the dumps fit
  relight.recovery.tmpfs_check:
    need_bytes: 60000000000
    dump_dir: /dev/shm/relight

- name: Sweep what the dead server left
  relight.recovery.tmpfs_check:
    need_bytes: 60000000000
    dump_dir: /dev/shm/relight
    state: swept
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems, after the sweep where there was one.
    - Evidence is among others C(total_bytes), C(free_bytes), C(reclaimable_bytes), C(family_bytes) and
      C(memory_limit_bytes).
  returned: always
  type: dict
actions:
  description: What was removed, or in check mode would be, as sentences.
  returned: always
  type: list
  elements: str
"""

from dataclasses import replace

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import bounded, glue, tmpfs
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict


def unknown(code: str, path: str, error: Exception) -> glue.Outcome:
    problem = Problem(code, path, str(error), "see the mount and the kernel's log, or look with become", Verdict.UNKNOWN)
    return glue.Outcome(Gate("tmpfs_check", problems=[problem]))


def without(seen: tmpfs.Tmpfs, gone: list[tmpfs.Segment]) -> tmpfs.Tmpfs:
    """What will be seen once these are removed."""
    kept = [tuple(item for item in group if item not in gone) for group in (seen.segments, seen.dumps)]
    return replace(seen, segments=kept[0], dumps=kept[1], free_bytes=seen.free_bytes + sum(item.bytes for item in gone))


def run(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    args = (params["path"], params["dump_dir"])
    actions: list[str] = []
    failed: list[Problem] = []
    try:
        seen = bounded.call(tmpfs.look, args, params["look_seconds"])
        orphans = seen.orphans if params["state"] == "swept" else []
        for orphan in orphans:
            try:
                if module.check_mode or tmpfs.sweep(orphan):
                    actions.append(tmpfs.sentence(orphan))
            except OSError as error:
                failed.append(Problem("sweep-failed", orphan.path, str(error), "sweep as its owner, or with become"))
        if module.check_mode:
            seen = without(seen, orphans)
        elif actions:
            seen = bounded.call(tmpfs.look, args, params["look_seconds"])
    except bounded.TimedOut as error:
        return unknown("mount-hung", params["path"], error)
    except bounded.ChildFailed as error:
        return unknown("tmpfs-unreadable", params["path"], error)
    gate = tmpfs.judge(seen, params["need_bytes"], params["reserve_bytes"])
    gate.problems += failed
    if module.check_mode and actions:
        what = f"the sweep of {len(actions)} files was not done in check mode"
        gate.problems.append(Problem("depends-on-planned-act", params["path"], what, "run recover.yml without --check", Verdict.UNKNOWN))
    return glue.Outcome(gate, changed=bool(actions), actions=actions)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.ACT,
            "path": {"type": "path", "default": "/dev/shm"},
            "dump_dir": {"type": "path"},
            "need_bytes": {"type": "int", "required": True},
            "reserve_bytes": {"type": "int", "default": 4 << 30},
            "state": {"type": "str", "choices": ["reported", "swept"], "default": "reported"},
            "look_seconds": {"type": "float", "default": 30.0},
        },
        required_if=[("state", "swept", ("state_dir",))],
        supports_check_mode=True,
    )
    glue.main(module, "tmpfs_check", lambda: run(module), acts=module.params["state"] == "swept")


if __name__ == "__main__":
    main()
