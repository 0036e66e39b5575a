#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, bounded looks, one judgement, removal of what was consented to, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: storage_check
short_description: Is a directory on the right, writable storage with room for the run?
version_added: 0.1.0
description:
  - Asks the kernel which mount holds O(path), compares it with what is expected, measures the room and the inodes, and
    writes, syncs and removes a small file in a bounded time. A storage that does not answer is V(unknown).
  - Short of room, it names the largest files below O(path) that are not the run's own, each with the consent that lets
    V(relieved) remove it.
  - V(relieved) removes exactly the files that were consented to by their whole name, if they are regular files on the same
    device outside O(store) and O(keep) and no process has them open. Each consent is spent, in the journal, on the file
    that it removed; a later file of the same name asks for another one.
  - Without root, a file that only another user's process has open is not seen to be open.
attributes:
  check_mode:
    support: full
    description:
      - Writes nothing, the small file included, and returns the same actions. Room that planned removals would make is
        V(unknown), C(depends-on-planned-act).
options:
  path:
    description: The directory that the run writes to.
    type: path
    required: true
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
  mounted:
    description: Whether O(path) itself must be a mount point. A bare directory under a missing mount then fails.
    type: bool
    default: false
  uuid:
    description: The UUID of the file system that must be mounted there.
    type: str
  baseline_mounts:
    description:
      - The mounts that C(adopt) recorded, the C(mounts) part of the host's baseline. Each is compared by mount point, UUID and
        stable disk name. What a migration of ours moved (by the record in O(state_dir)) may differ.
    type: list
    elements: dict
    default: []
  kernel_log:
    description:
      - Whether to look in the kernel's log for errors of this storage's devices. With V(auto) a log that may not be read is
        told in the evidence, with V(required) it is V(unknown).
    type: str
    choices: [auto, required, "off"]
    default: auto
  store:
    description: The directory of samples. Nothing in it is ever offered or removed.
    type: path
  keep:
    description: Further files and directories that are the run's own, as the model, the dataset and the state directory.
    type: list
    elements: path
    default: []
  state:
    description: V(reported) looks. V(relieved) also removes what was consented to, where there is too little room.
    type: str
    choices: [reported, relieved]
    default: reported
  look_seconds:
    description: How long the storage may take to answer a look.
    type: float
    default: 10.0
  write_seconds:
    description: How long the small write may take.
    type: float
    default: 20.0
  walk_seconds:
    description: How long the search for large files may take.
    type: float
    default: 60.0
extends_documentation_fragment:
  - relight.recovery.common
  - relight.recovery.act
"""

EXAMPLES = r"""
- name: See whether the samples still to come fit
  relight.recovery.storage_check:
    path: /data
    mounted: true
    need_bytes: 2500000000000
    store: /data/hidden_states
    keep: [/data/models, /data/train.jsonl]

- name: Remove what was consented to
  relight.recovery.storage_check:
    path: /data
    need_bytes: 2500000000000
    store: /data/hidden_states
    state: relieved
    state_dir: /var/lib/relight
    consent: ["remove:/data/old-checkpoint.tar"]
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems, after the removal where there was one.
    - Evidence is C(mount_point), C(fstype), C(source), C(total_bytes), C(free_bytes), C(free_inodes), what was needed, and
      the C(write_seconds) of the small write, and C(kernel_log), how many lines tell of errors, or why it was not read.
  returned: always
  type: dict
actions:
  description: What was removed, or in check mode would be, as sentences.
  returned: always
  type: list
  elements: str
"""

from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import adoption, bounded, consent, glue, kernel_log, migration, storage
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.journal import Journal


def kept(module: AnsibleModule) -> tuple[str, ...]:
    """What is the run's own: never offered, never removed."""
    params = module.params
    return tuple(path for path in (params["store"], params["state_dir"], *params["keep"]) if path)


def look(module: AnsibleModule, need: storage.Need, granted: frozenset[str]) -> storage.Storage:
    """One bounded look, with the timed write where it makes sense, and the large files where room is short."""
    params = module.params
    path = params["path"]
    seen = bounded.call(storage.look, (path, params["uuid"]), params["look_seconds"])
    seen = replace(seen, known_mounts=tuple(known_mount(before, params["look_seconds"]) for before in params["baseline_mounts"]))
    if not seen.exists:
        return seen
    if need.kernel_log != "off":
        devices = kernel_log.family(seen.mount.source) if seen.mount else frozenset()
        seen = replace(seen, log=read_log(params["look_seconds"]), devices=devices)
    if not module.check_mode and not (seen.mount and seen.mount.read_only) and (seen.is_mount_point or not need.mounted):
        seconds, failed = bounded.call(storage.try_write, (path,), params["write_seconds"])
        seen = replace(seen, write_seconds=seconds, write_errno=failed)
    if need.short_bytes(seen) or seen.refused:
        args = (path, kept(module), storage.paths_of(granted))
        largest, whole = bounded.call(storage.find_largest, args, params["walk_seconds"])
        seen = replace(seen, largest=largest, walked_all=whole)
    return seen


def known_mount(before: dict[str, Any], seconds: float) -> storage.KnownMount:
    """What is there now of one mount of the baseline. Each is asked by itself, so that a hung one is named."""
    path = str(before.get("path"))
    try:
        now = bounded.call(adoption.look_at_mounts, ((path,),), seconds)
    except (bounded.TimedOut, bounded.ChildFailed):
        return storage.KnownMount(path, before, None, hung=True)
    return storage.KnownMount(path, before, now[0] if now else None)


def read_log(seconds: float) -> kernel_log.Log:
    try:
        return bounded.call(kernel_log.read, (), seconds)
    except (bounded.TimedOut, bounded.ChildFailed) as error:
        return kernel_log.Log(error=str(error))


def moved_to(state_dir: str | None) -> str | None:
    """The UUID of the file system that a migration of ours moved the data to and that is in use."""
    try:
        record = migration.read(state_dir) if state_dir else None
    except (OSError, migration.NotOurs, TypeError):
        return None
    moved = record is not None and record.reached("cut_over") and record.phase != "rolled_back"
    return record.target_uuid if record and moved else None


def relieve(module: AnsibleModule, chosen: list[storage.Offer], journal: Journal) -> tuple[list[str], list[Problem]]:
    """Remove each file, its consent spent first: after a kill in between, the next run still removes this very file."""
    done: list[str] = []
    failed: list[Problem] = []
    for offer in chosen:
        if not module.check_mode:
            journal.write(storage.SPENT, consent=offer.consent, identity=list(offer.file.identity))
            try:
                bounded.call(storage.remove, (module.params["path"], offer.file, kept(module)), module.params["write_seconds"])
            except (bounded.TimedOut, bounded.ChildFailed) as error:
                failed.append(Problem("remove-failed", offer.file.path, str(error), "see why, then run recover.yml again"))
                continue
        done.append(storage.sentence(offer))
    return done, failed


def run(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    need = storage.Need(
        bytes=params["need_bytes"],
        inodes=params["need_inodes"],
        reserve_bytes=params["reserve_bytes"],
        mounted=params["mounted"],
        uuid=params["uuid"],
        kernel_log=params["kernel_log"],
        moved_to=moved_to(params["state_dir"]),
    )
    granted = consent.read(params["consent"])
    journal = Journal(params["state_dir"], params["run"], params["stage"], "storage_check")
    actions: list[str] = []
    failed: list[Problem] = []
    try:
        spent = storage.spent_on(journal)
        seen = look(module, need, granted)
        full = bool(need.short_bytes(seen)) or seen.refused
        chosen = storage.consented(seen, granted, spent) if full and params["state"] == "relieved" else []
        actions, failed = relieve(module, chosen, journal)
        if actions and module.check_mode:
            return glue.Outcome(planned(seen, need, chosen, spent), changed=True, actions=actions)
        if actions:
            seen = look(module, need, granted)
        gate = storage.judge(seen, need, storage.offers(seen, need, storage.spent_on(journal)))
    except bounded.TimedOut as error:
        remedy = "see the storage behind it; a frozen writer cannot be killed"
        gate = Gate("storage_check", problems=[Problem("mount-hung", params["path"], str(error), remedy, Verdict.UNKNOWN)])
    except bounded.ChildFailed as error:
        remedy = "look with become, and see the kernel's log"
        gate = Gate("storage_check", problems=[Problem("storage-unreadable", params["path"], str(error), remedy, Verdict.UNKNOWN)])
    gate.problems += failed
    return glue.Outcome(gate, changed=bool(actions), actions=actions)


def planned(seen: storage.Storage, need: storage.Need, chosen: list[storage.Offer], spent: dict[str, list[tuple[int, int, int]]]) -> Gate:
    """The gate in check mode: as it would be after the removals, and unknown where only they would make the room."""
    gone = {offer.file.path for offer in chosen}
    freed = sum(offer.file.bytes for offer in chosen)
    after = replace(seen, free_bytes=seen.free_bytes + freed, largest=tuple(file for file in seen.largest if file.path not in gone))
    gate = storage.judge(after, need, storage.offers(after, need, spent))
    gate.evidence["free_bytes"] = seen.free_bytes
    what = f"the removal of {len(chosen)} files was not done in check mode"
    gate.problems.append(Problem("depends-on-planned-act", seen.path, what, "run recover.yml without --check", Verdict.UNKNOWN))
    return gate


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.ACT,
            "path": {"type": "path", "required": True},
            "need_bytes": {"type": "int", "default": 0},
            "need_inodes": {"type": "int", "default": 0},
            "reserve_bytes": {"type": "int", "default": 0},
            "mounted": {"type": "bool", "default": False},
            "uuid": {"type": "str"},
            "baseline_mounts": {"type": "list", "elements": "dict", "default": []},
            "kernel_log": {"type": "str", "choices": ["auto", "required", "off"], "default": "auto"},
            "store": {"type": "path"},
            "keep": {"type": "list", "elements": "path", "default": []},
            "state": {"type": "str", "choices": ["reported", "relieved"], "default": "reported"},
            "look_seconds": {"type": "float", "default": 10.0},
            "write_seconds": {"type": "float", "default": 20.0},
            "walk_seconds": {"type": "float", "default": 60.0},
        },
        required_if=[("state", "relieved", ("state_dir",))],
        supports_check_mode=True,
    )
    glue.main(module, "storage_check", lambda: run(module), acts=module.params["state"] == "relieved")


if __name__ == "__main__":
    main()
