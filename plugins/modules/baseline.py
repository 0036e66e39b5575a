#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, bounded looks, one judgement, the host's copy written, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: baseline
short_description: Record the known-good state of a host
version_added: 0.1.0
description:
  - Looks at the services, at the running server's own environment and command line, at mounts by UUID and at the digests of
    the weights, puts that together with what gates saw (O(gates)), writes it as readable YAML into O(folder) on the
    controller, and keeps a copy in O(state_dir) on the host.
  - Refuses to record a host without a running, answering server, or one that could not be looked at in full.
  - With O(after_the_fact) it refuses nothing, gathers from unit files and old logs what a broken host no longer shows, and
    marks the baseline so. It never replaces the baseline of a healthy host.
  - Environments are read by an allow-list (C(NCCL_), C(SGLANG_), C(CUDA_), C(RELIGHT_)), and secrets are taken out of
    command lines where they are read.
attributes:
  check_mode:
    support: full
    description: Writes nothing, and shows the difference.
  diff_mode:
    support: full
    description: Shows the baseline before and after. The difference is printed without diff mode too.
options:
  host:
    description: The host's name in the inventory.
    type: str
    required: true
  folder:
    description: Where the controller writes C(relight_baseline.yml).
    type: str
    required: true
  known:
    description: The baseline that the controller has. Read from O(folder); not for setting.
    type: dict
  after_the_fact:
    description: Whether the host may be broken.
    type: bool
    default: false
  port:
    description: The server's port.
    type: int
    required: true
  server_host:
    description: The address on which the server listens.
    type: str
    default: 127.0.0.1
  our_units:
    description: Units of ours.
    type: list
    elements: str
    default: []
  units:
    description: Further units whose state belongs to the baseline.
    type: list
    elements: str
    default: []
  logs:
    description: Logs of the server, the likeliest first. Read with O(after_the_fact) where no server runs.
    type: list
    elements: path
    default: []
  paths:
    description: Paths whose mounts belong to the baseline.
    type: list
    elements: path
    default: []
  inventory_command:
    description: The command by which the inventory would start the server. Recorded with O(after_the_fact) where nothing else tells.
    type: list
    elements: str
    default: []
  inventory_environment:
    description: The environment that goes with O(inventory_command).
    type: dict
    default: {}
  model_dir:
    description: The model's directory. All its files are digested.
    type: path
    required: true
  dataset:
    description: The training data.
    type: path
    required: true
  dump_dir:
    description: The dump directory. That a reboot wipes it is meant.
    type: path
    required: true
  gates:
    description: What gates saw, by their names. C(weights_check), C(dataset_check), C(hs_patch_check) and C(topology_check) count.
    type: dict
    default: {}
  look_seconds:
    description: How long each look may take.
    type: float
    default: 60.0
  digest_seconds:
    description: How long the weights may be read. What is read by then is remembered, and the next run goes on there.
    type: float
    default: 3600.0
  state_dir:
    description: Where the host keeps its journal, lock, caches and its copy of the baseline. It must survive a reboot.
    type: path
    required: true
extends_documentation_fragment:
  - relight.recovery.common
  - relight.recovery.act
  - relight.recovery.manager
"""

EXAMPLES = r"""
- name: Record what this host is when it is well
  relight.recovery.baseline:
    host: "{{ inventory_hostname }}"
    folder: "{{ relight_baseline_dir }}"
    port: 30000
    our_units: [relight-sglang, relight-extract]
    paths: [/, /data]
    model_dir: /data/models/Kimi-K2.5
    dataset: /data/train.jsonl
    dump_dir: /dev/shm/relight
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description: The verdict with its evidence and problems. Only V(pass) and V(warn) are recorded.
  returned: always
  type: dict
baseline:
  description: The known-good state.
  returned: always
  type: dict
recorded:
  description: Whether it is what controller and host have now, or in check mode would have.
  returned: always
  type: bool
actions:
  description: What was written, or in check mode would be, as sentences.
  returned: always
  type: list
  elements: str
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import adoption, baseline, bounded, digests, glue, services
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict


def model_files(path: str) -> list[str]:
    """The names of the files that make a model. Raises OSError."""
    return sorted(name for name in os.listdir(path) if not name.startswith(".") and os.path.isfile(os.path.join(path, name)))


def digest(path: str, state_dir: str, write: bool, seconds: float) -> digests.Digests:
    return digests.of(path, model_files(path), digests.Cache(state_dir, write), seconds)


def gather(module: AnsibleModule) -> baseline.Gathered:
    """Every look within its limit; what fails is an error that the gate tells."""
    params = module.params
    where = adoption.Where(
        port=params["port"],
        host=params["server_host"],
        our_units=tuple(params["our_units"]),
        units=tuple(params["units"]),
        logs=tuple(params["logs"]),
        paths=tuple(params["paths"]),
        inventory_command=tuple(params["inventory_command"]),
        inventory_environment={str(name): str(value) for name, value in params["inventory_environment"].items()},
        after_the_fact=params["after_the_fact"],
    )
    errors: list[str] = []

    def look(function, args, seconds):  # type: ignore[no-untyped-def]
        try:
            return bounded.call(function, args, seconds)
        except (bounded.TimedOut, bounded.ChildFailed) as error:
            errors.append(str(error))
            return None

    manager = services.from_params(params)
    try:
        found_services = bounded.call(adoption.look_at_services, (where, manager), params["look_seconds"])
    except (bounded.TimedOut, bounded.ChildFailed):
        found_services = None
    server = look(adoption.look_at_server, (where, manager), params["look_seconds"])
    mounts = look(adoption.look_at_mounts, (where.paths,), params["look_seconds"]) or []
    args = (params["model_dir"], params["state_dir"], not module.check_mode, params["digest_seconds"])
    read = look(digest, args, params["digest_seconds"] + params["look_seconds"]) or digests.Digests({})
    return baseline.Gathered(
        host=params["host"],
        after_the_fact=params["after_the_fact"],
        services=found_services,
        server=server,
        mounts=mounts,
        model_dir=params["model_dir"],
        dataset=params["dataset"],
        dump_dir=params["dump_dir"],
        digests={name: value for name, value in read.found.items() if value},
        undigested=len(read.unread),
        gates=params["gates"],
        errors=tuple(errors),
    )


def run(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    state_dir, known = params["state_dir"], params["known"] or None
    copy, copy_error = baseline.read_copy(state_dir)
    found = gather(module)
    gate = baseline.judge(found, copy, copy_error, known)
    made = baseline.make(found, known)
    recorded = gate.verdict <= Verdict.WARN and not baseline.keeps(known, found.after_the_fact)
    actions = [f"write the host's copy, {os.path.join(state_dir, baseline.COPY)}"] if recorded and copy != made else []
    if actions and not module.check_mode:
        baseline.write_copy(state_dir, made)
    return glue.Outcome(gate, changed=bool(actions), actions=actions, more={"baseline": made, "recorded": recorded})


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.ACT,
            **services.OPTIONS,
            "state_dir": {"type": "path", "required": True},
            "host": {"type": "str", "required": True},
            "folder": {"type": "str", "required": True},
            "known": {"type": "dict"},
            "after_the_fact": {"type": "bool", "default": False},
            "port": {"type": "int", "required": True},
            "server_host": {"type": "str", "default": "127.0.0.1"},
            "our_units": {"type": "list", "elements": "str", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "logs": {"type": "list", "elements": "path", "default": []},
            "paths": {"type": "list", "elements": "path", "default": []},
            "inventory_command": {"type": "list", "elements": "str", "default": []},
            "inventory_environment": {"type": "dict", "default": {}},
            "model_dir": {"type": "path", "required": True},
            "dataset": {"type": "path", "required": True},
            "dump_dir": {"type": "path", "required": True},
            "gates": {"type": "dict", "default": {}},
            "look_seconds": {"type": "float", "default": 60.0},
            "digest_seconds": {"type": "float", "default": 3600.0},
        },
        supports_check_mode=True,
    )
    glue.main(module, "baseline", lambda: run(module), acts=True)


if __name__ == "__main__":
    main()
