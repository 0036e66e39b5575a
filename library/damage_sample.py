#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Fault injector: tear samples of a store, or flip bytes in them."""

from __future__ import annotations

import glob
import json
import os
import random
import zipfile
from typing import Any

DOCUMENTATION = r"""
module: damage_sample
short_description: Damage intact samples of a store
description:
  - Picks whole files (a zip whose every entry has its right CRC) among the largest third, by a seed.
  - V(torn) cuts a file short under its final name, as a write that the crash interrupted. V(flipped) changes bytes in the
    middle and keeps size and time, as a bad block does.
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
  store:
    description: The directory of the sample store.
    type: path
    required: true
  pattern:
    description: Which files are samples, as a glob below O(store).
    type: str
    default: rows_*/data_*.ckpt
  damage:
    description: What to do to them.
    type: str
    choices: [torn, flipped]
    required: true
  count:
    description: How many samples.
    type: int
    default: 1
  seed:
    description: Which samples and which bytes.
    type: int
    default: 1
"""

EXAMPLES = r"""
- name: Leave a half-written sample
  damage_sample:
    drill_target: "{{ relight_drill_target }}"
    marker: /etc/relight-drill-target
    store: /data/hidden_states
    damage: torn
"""

RETURN = r"""
actions:
  description: What was broken, in sentences.
  returned: always
  type: list
  elements: str
victims:
  description: The damaged files, relative to the store.
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


def whole(path: str) -> bool:
    """Is it a zip file whose every entry has its right CRC?"""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def pick(paths: list[str], count: int, rnd: random.Random) -> list[str]:
    """`count` whole files among the largest third. Raises ValueError when there are too few."""
    by_size = sorted(paths, key=lambda path: (os.path.getsize(path), path))
    large = by_size[-max(len(by_size) // 3, 1) :]
    rnd.shuffle(large)
    victims: list[str] = []
    for path in large:
        if len(victims) < count and whole(path):
            victims.append(path)
    if len(victims) < count:
        raise ValueError(f"only {len(victims)} of {count} whole samples among the largest third")
    return victims


def tear(path: str, rnd: random.Random) -> None:
    """Keep between a third and two thirds of the file."""
    size = os.path.getsize(path)
    os.truncate(path, rnd.randrange(size // 3, 2 * size // 3))


def flip(path: str, rnd: random.Random) -> None:
    """Invert eight bytes in the middle third. Size, times and name stay."""
    before = os.stat(path)
    with open(path, "r+b") as handle:
        for _ in range(8):
            offset = rnd.randrange(before.st_size // 3, 2 * before.st_size // 3)
            handle.seek(offset)
            byte = handle.read(1)
            handle.seek(offset)
            handle.write(bytes([byte[0] ^ 0xFF]))
        handle.flush()
        os.fsync(handle.fileno())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "drill_target": {"type": "bool", "required": True},
            "marker": {"type": "path", "required": True},
            "record": {"type": "path"},
            "store": {"type": "path", "required": True},
            "pattern": {"type": "str", "default": "rows_*/data_*.ckpt"},
            "damage": {"type": "str", "choices": ["torn", "flipped"], "required": True},
            "count": {"type": "int", "default": 1},
            "seed": {"type": "int", "default": 1},
        },
        supports_check_mode=True,
    )
    guard(module)
    params = module.params
    rnd = random.Random(params["seed"])
    try:
        victims = pick(glob.glob(os.path.join(params["store"], params["pattern"])), params["count"], rnd)
        if not module.check_mode:
            for path in victims:
                (tear if params["damage"] == "torn" else flip)(path, rnd)
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"cannot damage a sample of {params['store']}: {error}")
    names = [os.path.relpath(path, params["store"]) for path in victims]
    if not module.check_mode:
        note(params["record"], **{params["damage"]: names})
    verb = {"torn": "tore", "flipped": "flipped bytes in"}[params["damage"]]
    module.exit_json(changed=True, actions=[f"{verb} {name}" for name in names], victims=names)


if __name__ == "__main__":
    main()
