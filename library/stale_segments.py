#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Fault injector: shared-memory segments and half dumps of processes that are gone."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

DOCUMENTATION = r"""
module: stale_segments
short_description: Leave segments of dead processes
description:
  - Starts a child, lets it write half a dump into O(dump_dir) and a segment into O(shm_dir), and kills it, so that the pids in
    their names are real and dead.
  - A fault injector for drills. It refuses unless O(drill_target=true) and the file O(marker) exists on the host.
author: [Relight authors (@relight)]
attributes:
  check_mode: {support: full, description: Says what it would break and breaks nothing.}
options:
  drill_target:
    description: Whether the inventory says that this host may be broken on purpose (relight_drill_target).
    type: bool
    required: true
  marker:
    description: A file whose presence on the host says the same.
    type: path
    required: true
  record:
    description: A JSON file on the host that gets an entry for what was broken, so that a proof can compare.
    type: path
  dump_dir:
    description: The directory that the server dumps hidden states to.
    type: path
    required: true
  shm_dir:
    description: Where processes keep shared memory.
    type: path
    default: /dev/shm
  mib:
    description: The size of the segment, and of the half dump.
    type: int
    default: 8
"""

EXAMPLES = r"""
- name: Leave stale segments
  stale_segments:
    drill_target: "{{ relight_drill_target }}"
    marker: /etc/relight-drill-target
    dump_dir: /dev/shm/relight
"""

RETURN = r"""
actions:
  description: What was broken, in sentences.
  returned: always
  type: list
  elements: str
segments:
  description: The paths of what was left.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule


def guard(module: AnsibleModule) -> None:
    """Refuse every host that is not meant to be broken."""
    if not module.params["drill_target"]:
        module.fail_json(msg="refused: the inventory does not say relight_drill_target: true for this host")
    if not os.path.isfile(module.params["marker"]):
        module.fail_json(msg=f"refused: this host does not carry the drill mark {module.params['marker']}")


def note(path: str | None, **entry: Any) -> None:
    """Add what was broken to the drill's record, a JSON object."""
    if path is None:
        return
    try:
        with open(path, encoding="utf-8") as handle:
            record = json.load(handle)
    except FileNotFoundError:
        record = {}
    record.update(entry)
    with open(f"{path}.tmp", "w", encoding="utf-8") as handle:
        json.dump(record, handle, indent=1, sort_keys=True)
    os.rename(f"{path}.tmp", path)


def leave(dump_dir: str, shm_dir: str, size: int) -> list[str]:
    """Let a process die over its segments. Returns their paths. Raises OSError."""
    os.makedirs(dump_dir, exist_ok=True)
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for path in paths(dump_dir, shm_dir, os.getpid()):
                with open(path, "wb") as handle:
                    handle.write(b"\x5a" * size)
            os.write(done, b"1")
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(done)
    wrote = os.read(ready, 1)
    os.close(ready)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not wrote:
        raise OSError(28, "the child could not write", shm_dir)
    return paths(dump_dir, shm_dir, pid)


def paths(dump_dir: str, shm_dir: str, pid: int) -> list[str]:
    """A dump that its writer never renamed, and a segment such as SGLang's ranks share."""
    return [os.path.join(dump_dir, f".relight-drill000-7-1.{pid}.tmp"), os.path.join(shm_dir, f"psm_relight_drill.{pid}")]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "drill_target": {"type": "bool", "required": True},
            "marker": {"type": "path", "required": True},
            "record": {"type": "path"},
            "dump_dir": {"type": "path", "required": True},
            "shm_dir": {"type": "path", "default": "/dev/shm"},
            "mib": {"type": "int", "default": 8},
        },
        supports_check_mode=True,
    )
    guard(module)
    params = module.params
    if module.check_mode:
        module.exit_json(changed=True, actions=[f"would leave segments in {params['dump_dir']} and {params['shm_dir']}"], segments=[])
    try:
        segments = leave(params["dump_dir"], params["shm_dir"], params["mib"] << 20)
    except OSError as error:
        module.fail_json(msg=f"cannot leave segments: {error}")
    note(params["record"], segments=segments)
    module.exit_json(changed=True, actions=[f"left {path}, whose process is dead" for path in segments], segments=segments)


if __name__ == "__main__":
    main()
