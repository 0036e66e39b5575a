#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, a bounded look at the store, one judgement, and in state quarantined the moves that it asks for."""

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_inventory
short_description: Which samples of a store are intact, torn, corrupt, foreign or missing?
version_added: 0.1.0
description:
  - Judges every file that a trainer's reader would list by its content. A name, a size or an entry in the manifest proves nothing.
  - A sample is C(intact) when its structure is whole, its length, token ids and loss mask are those of its record, and its
    run has the identity of the present one; at depth V(content) also when its bytes match the digest in the manifest.
  - A file that no manifest knows is read whole whatever the depth, and is intact when its own checksums hold.
  - C(torn) is a file that ends too early, C(corrupt) one with other bytes than were written, C(foreign) one that belongs to
    another run, record or place, C(doubtful) one whose values cannot be states. C(missing) are evidence, not a problem.
  - What the operating system does not let this user read, or what hangs, is V(unknown), and is never moved.
  - With O(state=quarantined), files that are torn, corrupt, foreign or doubtful are moved to C(quarantine) in the store, with the
    reason, under names that no reader lists. Nothing is deleted. Intact files that the manifest lacks are entered in it.
    While a client writes the store, nothing is moved.
  - Samples that no manifest knows, such as those of a store that was made without Relight, are read newest first and entered one by
    one as adopted, with what they are trusted by. A kill makes none of those be read again.
  - Killed at any moment and run again, it ends in the same state.
attributes:
  check_mode:
    support: full
    description: Returns the actions that it would take, and takes none.
options:
  store:
    description: The directory of the samples. One that does not exist yet holds no samples.
    type: path
    required: true
  layout:
    description:
      - How the store is laid out, one of C(specforge), C(speculators) and C(modelopt).
      - Samples of C(modelopt) are named by the ids of their records, so judging them needs the fixed records or a manifest.
    type: str
    default: specforge
  dataset:
    description:
      - The directory of the fixed records, with which token ids are compared.
      - Where it is the training data itself, the fixed records in the C(dataset) folder of O(state_dir) are taken if they exist;
        without them its records are counted only.
    type: path
  identity:
    description:
      - What must be equal for a sample to count, such as its layers, norm and dtype.
      - Without it the identity of the latest run in the store's C(runs.json) is taken.
    type: dict
  depth:
    description:
      - V(names) compares names and sizes with the manifests, for a quick status.
      - V(headers) reads structure, token ids and masks.
      - V(content) reads every byte; it needs O(host_python).
    type: str
    choices: [names, headers, content]
    default: headers
  host_python:
    description: The interpreter of the host environment, which digests and looks at values.
    type: path
  missing_file:
    description: Where to write the indices that have no sample, as a JSON list. Not written in check mode.
    type: path
  stall_seconds:
    description: How long a look may stand still before what it is at counts as hanging.
    type: float
    default: 60.0
  state:
    description: V(reported) looks only; V(quarantined) moves what is not intact out of the readers' sight.
    type: str
    choices: [reported, quarantined]
    default: reported
extends_documentation_fragment:
  - relight.recovery.common
  - relight.recovery.act
"""

EXAMPLES = r"""
- name: See what the store holds
  relight.recovery.shard_inventory:
    store: /data/hidden_states
    state_dir: /var/lib/relight
    dataset: /var/lib/relight/dataset

- name: After an unclean boot, put aside what is not intact, byte for byte
  relight.recovery.shard_inventory:
    store: /data/hidden_states
    state_dir: /var/lib/relight
    dataset: /var/lib/relight/dataset
    depth: content
    host_python: /opt/relight/venv/bin/python
    missing_file: /var/lib/relight/missing.json
    state: quarantined
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems.
    - Evidence is C(total), C(tokens_total), the number of samples C(intact), C(torn), C(corrupt), C(foreign), C(doubtful),
      C(unjudged), C(unread) and C(missing), C(bytes), C(tokens_intact), C(adopted), C(not_in_manifest), C(temporary_files) and
      C(files_in_quarantine); C(trusted_by) counts what the intact ones are trusted by, C(written) (a digest made while Relight wrote
      them), C(checksums) or C(values) (read whole since), C(structure); C(compared_by_continuity) is how many samples passed
      checks have compared; with O(state=quarantined) also C(quarantined) and C(tokens_quarantined). Kinds are counted as they
      were found, C(missing) as it is in the end.
  returned: always
  type: dict
actions:
  description: What was moved or entered, or in check mode would be.
  returned: always
  type: list
  elements: str
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import glue, surveying
from ansible_collections.relight.recovery.plugins.module_utils.dataset import HEADER
from ansible_collections.relight.recovery.plugins.module_utils.durable import write_json
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.inventory import Found, Request, Tally
from ansible_collections.relight.recovery.plugins.module_utils.layouts import UnknownLayout, layout
from ansible_collections.relight.recovery.plugins.module_utils.store import Locked, Store


def _dataset(params: dict[str, Any]) -> str | None:
    fixed = os.path.join(params["state_dir"], "dataset") if params["state_dir"] else ""
    given = params["dataset"]
    if given and os.path.exists(os.path.join(given, HEADER)):
        return given
    return fixed if os.path.exists(os.path.join(fixed, HEADER)) else given


def _look(module: AnsibleModule, enter: Callable[[Found], None] = lambda found: None) -> Tally:
    params = module.params
    request = Request(params["store"], params["layout"], _dataset(params), params["identity"], params["depth"])
    return surveying.look(surveying.usable(surveying.Plan(request, params["host_python"], params["stall_seconds"])), enter)


class _Writing:
    """The store, locked from the first write on, so that a look that finds nothing to do leaves no trace."""

    def __init__(self, place: Store) -> None:
        self.place = place
        self.entered: set[str] = set()
        self._held = ExitStack()
        self._locked = False

    def lock(self) -> None:
        """Raises Locked, OSError."""
        if not self._locked:
            self._held.enter_context(self.place.exclusive("shard_inventory"))
            self._locked = True

    def enter(self, found: Found) -> None:
        """Enter a sample at once, so that a kill does not make it be read again. Raises OSError."""
        try:
            self.lock()
        except Locked:  # told at the end
            return
        surveying.enter(self.place, found)
        self.entered.add(found.path)

    def close(self) -> None:
        self._held.close()


def _write_missing(module: AnsibleModule, tally: Tally) -> None:
    path = module.params["missing_file"]
    if path and not module.check_mode:
        write_json(path, list(tally.missing()))


def _quarantined(gate: Gate, tally: Tally) -> Gate:
    moved = surveying.moves(tally)
    gate.evidence.update(quarantined=len(moved), tokens_quarantined=sum(item.tokens for item in moved))
    return gate


def _report(module: AnsibleModule) -> glue.Outcome:
    tally = _look(module)
    _write_missing(module, tally)
    return glue.Outcome(surveying.judge(tally))


def _busy(tally: Tally, path: str, what: str) -> glue.Outcome:
    gate = surveying.judge(tally)
    gate.problems.append(Problem("store-busy", path, f"{what}; nothing was moved", "none: its writer judges samples itself", Verdict.WARN))
    return glue.Outcome(gate)


def _quarantine(module: AnsibleModule) -> glue.Outcome:
    place = Store(module.params["store"], layout(module.params["layout"], _dataset(module.params)))
    if module.check_mode:
        return _planned(module, place)
    writing = _Writing(place)
    try:
        return _done(module, place, writing)
    finally:
        writing.close()


def _planned(module: AnsibleModule, place: Store) -> glue.Outcome:
    tally = _look(module)
    actions = surveying.actions(tally)
    writer = place.writer() if actions else None
    if writer:
        return _busy(tally, place.path, f"the store is being written by {writer}")
    return glue.Outcome(_quarantined(surveying.judge(tally), tally), bool(actions), actions)


def _done(module: AnsibleModule, place: Store, writing: _Writing) -> glue.Outcome:
    tally = _look(module, writing.enter)
    actions = surveying.actions(tally)
    if not actions:
        _write_missing(module, tally)
        return glue.Outcome(_quarantined(surveying.judge(tally), tally))
    try:
        writing.lock()
        place.retell()
        after = surveying.act(place, tally, writing.entered)
    except Locked as error:
        return _busy(tally, place.path, str(error))
    _write_missing(module, after)
    return glue.Outcome(_quarantined(surveying.judge(after), tally), True, actions)


def run(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    try:
        if params["state"] == "quarantined":
            return _quarantine(module)
        return _report(module)
    except (surveying.Hung, surveying.Failed) as error:
        problem = surveying.refusal(error, params["store"])
    except UnknownLayout as error:
        problem = surveying.refusal(surveying.Failed(str(error), "UnknownLayout"), params["store"])
    return glue.Outcome(Gate("shard_inventory", problems=[problem]))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "store": {"type": "path", "required": True},
            "layout": {"type": "str", "default": "specforge"},
            "dataset": {"type": "path"},
            "identity": {"type": "dict"},
            "depth": {"type": "str", "choices": ["names", "headers", "content"], "default": "headers"},
            "host_python": {"type": "path"},
            "missing_file": {"type": "path"},
            "stall_seconds": {"type": "float", "default": 60.0},
            "state": {"type": "str", "choices": ["reported", "quarantined"], "default": "reported"},
            **glue.COMMON,
            **glue.ACT,
        },
        required_if=[("state", "quarantined", ["state_dir"])],
        supports_check_mode=True,
    )
    glue.main(module, "shard_inventory", lambda: run(module), acts=module.params["state"] == "quarantined")


if __name__ == "__main__":
    main()
