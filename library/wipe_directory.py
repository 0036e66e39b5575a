#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Fault injector: empty a directory, as a reboot empties /tmp."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

DOCUMENTATION = r"""
module: wipe_directory
short_description: Remove all that a directory holds
description:
  - Removes everything below O(path); the directory itself stays. Links are removed, not followed.
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
  path:
    description: The directory, at least three levels below the root.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Wipe the scripts
  wipe_directory:
    drill_target: "{{ relight_drill_target }}"
    marker: /etc/relight-drill-target
    path: /srv/extraction/scripts
"""

RETURN = r"""
actions:
  description: What was broken, in sentences.
  returned: always
  type: list
  elements: str
removed:
  description: The names that were removed, sorted.
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


def wipe(path: str) -> list[str]:
    """Remove what `path` holds and return the names. Raises OSError."""
    names = sorted(os.listdir(path))
    for name in names:
        victim = os.path.join(path, name)
        if os.path.isdir(victim) and not os.path.islink(victim):
            shutil.rmtree(victim)
        else:
            os.unlink(victim)
    return names


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "drill_target": {"type": "bool", "required": True},
            "marker": {"type": "path", "required": True},
            "record": {"type": "path"},
            "path": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    guard(module)
    path = os.path.realpath(module.params["path"])
    if len([part for part in path.split("/") if part]) < 3:
        module.fail_json(msg=f"refused: {path} is too near the root")
    try:
        names = sorted(os.listdir(path)) if module.check_mode else wipe(path)
    except OSError as error:
        module.fail_json(msg=f"cannot wipe {path}: {error}")
    if not module.check_mode:
        note(module.params["record"], wiped={"path": path, "names": names})
    module.exit_json(changed=bool(names), actions=[f"removed {os.path.join(path, name)}" for name in names], removed=names)


if __name__ == "__main__":
    main()
