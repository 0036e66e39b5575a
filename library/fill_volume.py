#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Fault injector: fill a volume to the last block."""

from __future__ import annotations

import errno
import json
import os
import time
from typing import Any

DOCUMENTATION = r"""
module: fill_volume
short_description: Fill a volume with a drill file until nothing fits
description:
  - Writes O(file) until the file system answers ENOSPC, and then keeps it full while what was running there notices.
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
  file:
    description: The drill file, on the volume that is to be full.
    type: path
    required: true
  progress:
    description:
      - A progress.json of the resume client. The volume is topped up until its phase is O(until_phase) and neither its
        phase nor its records in flight have changed for O(stable_seconds).
    type: path
  until_phase:
    description: The phase that says that the client has noticed.
    type: str
    default: waiting-for-room
  stable_seconds:
    description: For how long the progress must stand still.
    type: float
    default: 4.0
  limit_seconds:
    description: How long to wait for that before failing.
    type: float
    default: 120.0
"""

EXAMPLES = r"""
- name: Fill the data volume
  fill_volume:
    drill_target: "{{ relight_drill_target }}"
    marker: /etc/relight-drill-target
    file: /data/drill.fill
"""

RETURN = r"""
actions:
  description: What was broken, in sentences.
  returned: always
  type: list
  elements: str
bytes:
  description: The size of the drill file.
  returned: always
  type: int
progress:
  description: The client's last progress, when O(progress) is given.
  returned: when progress is given
  type: dict
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


def top_up(fd: int) -> int:
    """Write until nothing fits, in smaller and smaller pieces. Returns the bytes written. Raises OSError but for ENOSPC."""
    written = 0
    for size in (1 << 20, 1 << 12, 1):
        piece = b"\xa5" * size
        while True:
            try:
                count = os.write(fd, piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
            written += count
            if count < size:
                break
    return written


def read_progress(path: str) -> dict[str, Any]:
    """The client's progress, or nothing while there is none."""
    try:
        with open(path, encoding="utf-8") as handle:
            value: dict[str, Any] = json.load(handle)
            return value
    except (OSError, ValueError):
        return {}


def hold(fd: int, path: str, phase: str, stable_seconds: float, limit_seconds: float) -> tuple[dict[str, Any], bool]:
    """Keep the volume full until the client stands still in `phase`. Returns its progress and whether it came to that."""
    deadline = time.monotonic() + limit_seconds
    last: tuple[Any, ...] = ()
    since = time.monotonic()
    while time.monotonic() < deadline:
        if top_up(fd):
            since = time.monotonic()
        progress = read_progress(path)
        now = (progress.get("phase"), progress.get("done"), tuple(progress.get("in_flight", ())))
        if now != last or now[0] != phase:
            last, since = now, time.monotonic()
        elif time.monotonic() - since >= stable_seconds:
            return progress, True
        time.sleep(0.05)
    return read_progress(path), False


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "drill_target": {"type": "bool", "required": True},
            "marker": {"type": "path", "required": True},
            "record": {"type": "path"},
            "file": {"type": "path", "required": True},
            "progress": {"type": "path"},
            "until_phase": {"type": "str", "default": "waiting-for-room"},
            "stable_seconds": {"type": "float", "default": 4.0},
            "limit_seconds": {"type": "float", "default": 120.0},
        },
        supports_check_mode=True,
    )
    guard(module)
    params = module.params
    if module.check_mode:
        module.exit_json(changed=True, actions=[f"would fill the volume of {params['file']}"], bytes=0)
    fd = os.open(params["file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        top_up(fd)
        progress: dict[str, Any] = {}
        noticed = True
        if params["progress"]:
            waits = (params["until_phase"], params["stable_seconds"], params["limit_seconds"])
            progress, noticed = hold(fd, params["progress"], *waits)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if not noticed:
        module.fail_json(msg=f"the volume is full, but the client is not in phase {params['until_phase']}: {progress}")
    note(params["record"], fill={"file": params["file"], "bytes": size, "progress": progress})
    module.exit_json(changed=True, actions=[f"filled the volume with {size} bytes in {params['file']}"], bytes=size, progress=progress)


if __name__ == "__main__":
    main()
