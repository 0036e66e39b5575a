#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one look or one freeing, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_free
short_description: Does anything but ours hold the GPUs and the server's port? Optionally, free them
description:
  - A holder is a process that NVML lists as compute, graphics or MPS client, that has a file below O(device_prefix) open, or
    that listens on one of O(ports). Memory is read by NVML's second version, which leaves out the driver's own reserve.
  - With O(gpu_count=0) the accelerator is the host itself. Holders are then the processes that listen on O(ports), and,
    with O(host_memory), members of services that together keep O(holder_min_mib) or more resident. Services that the
    distribution ships are the host's own.
  - Holders of O(our_units) that belong to the running instance with the present configuration are evidence, not problems.
  - V(free) checks the whole plan first. If one holder may not be touched, none is. Otherwise the owning unit is stopped
    and disabled before its processes are ended (SIGTERM, then SIGKILL, by pidfd), and it is then proved that all is free
    and stays so for O(stable_seconds).
  - Without root, other users' open files cannot be read; with GPUs the verdict is then unknown.
extends_documentation_fragment: [relight.recovery.common, relight.recovery.act, relight.recovery.manager]
attributes:
  check_mode: {support: full, description: Lists the same actions and changes nothing.}
options:
  state:
    description: V(reported) only looks; V(free) acts and needs O(state_dir).
    type: str
    choices: [reported, free]
    default: reported
  gpu_count:
    description: How many GPUs the host must have. Fewer is a failure.
    type: int
    required: true
  ports:
    description: TCP ports that the server needs.
    type: list
    elements: int
    default: []
  our_units:
    description: Units of ours.
    type: list
    elements: str
    default: []
  units:
    description: Foreign units that the inventory lists as ones that may be stopped and disabled.
    type: list
    elements: str
    default: []
  protected:
    description: Names of programs or units that are never touched, beside the GPU's own system services and display servers.
    type: list
    elements: str
    default: []
  planned:
    description: In check mode, units that an earlier step of the same run would have disabled. No action is listed for them.
    type: list
    elements: str
    default: []
  holder_min_mib:
    description: With O(gpu_count=0), the resident memory from which a service counts as a holder.
    type: int
    default: 64
  threshold_mib:
    description: GPU memory in use, beyond the driver's reserve and known holders, that still counts as free.
    type: int
    default: 64
  host_memory:
    description: With O(gpu_count=0), whether services that keep memory are holders.
    type: bool
    default: true
  nvml_library:
    description: An absolute path of NVML, where the loader does not find it.
    type: path
  device_prefix:
    description: How the names of the GPUs' device files begin.
    type: path
    default: /dev/nvidia
  stable_seconds:
    description: How long all must stay free after the last act.
    type: float
    default: 3.0
  term_seconds:
    description: How long after SIGTERM a process is killed.
    type: float
    default: 10.0
"""

EXAMPLES = r"""
- name: See who holds the GPUs
  relight.recovery.gpu_free:
    gpu_count: 8
    ports: [30000]
    our_units: [relight-sglang, relight-extract]

- name: Free them of what the inventory lists, and of what was consented to
  relight.recovery.gpu_free:
    state: free
    gpu_count: 8
    ports: [30000]
    our_units: [relight-sglang, relight-extract]
    units: [vllm.service]
    consent: ["disable:unit:forgotten.service"]
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description: The verdict with its evidence (GPUs and holders) and problems.
  returned: always
  type: dict
actions:
  description: What was done, or in check mode would be done, as sentences.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import consent, glue, gpu, services


def act(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    query = gpu.Query(
        gpu_count=params["gpu_count"],
        ports=tuple(params["ports"]),
        our_units=tuple(params["our_units"]),
        units=tuple(params["units"]),
        protected=(*gpu.PROTECTED, *params["protected"]),
        planned=tuple(params["planned"]),
        holder_min_mib=params["holder_min_mib"],
        threshold_mib=params["threshold_mib"],
        host_memory=params["host_memory"],
        nvml_library=params["nvml_library"],
        device_prefix=params["device_prefix"],
    )
    task = gpu.Task(
        query=query,
        manager=services.from_params(params),
        consent=consent.read(params["consent"]),
        state_dir=params["state_dir"],
        stable_seconds=params["stable_seconds"],
        term_seconds=params["term_seconds"],
        check=module.check_mode,
    )
    return gpu.free(task) if params["state"] == "free" else gpu.report(task)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.ACT,
            **services.OPTIONS,
            "state": {"type": "str", "default": "reported", "choices": ["reported", "free"]},
            "gpu_count": {"type": "int", "required": True},
            "ports": {"type": "list", "elements": "int", "default": []},
            "our_units": {"type": "list", "elements": "str", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "protected": {"type": "list", "elements": "str", "default": []},
            "planned": {"type": "list", "elements": "str", "default": []},
            "holder_min_mib": {"type": "int", "default": 64},
            "threshold_mib": {"type": "int", "default": 64},
            "host_memory": {"type": "bool", "default": True},
            "nvml_library": {"type": "path"},
            "device_prefix": {"type": "path", "default": "/dev/nvidia"},
            "stable_seconds": {"type": "float", "default": 3.0},
            "term_seconds": {"type": "float", "default": 10.0},
        },
        required_if=[("state", "free", ["state_dir"])],
        supports_check_mode=True,
    )
    glue.main(module, "gpu_free", lambda: act(module), acts=module.params["state"] == "free")


if __name__ == "__main__":
    main()
