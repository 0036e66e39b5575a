#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, bounded looks, one judgement, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: topology_check
short_description: Is the GPU stack whole and as in the baseline?
version_added: 0.1.0
description:
  - Looks at the device files that CUDA opens (C(nvidia-uvm) among them, their major numbers, and whether a container lets
    them be opened), at the versions of user libraries and kernel module, and through NVML at every GPU's PCI address, links,
    NUMA node, persistence mode and ECC, and compares all that with O(baseline).
  - Where GPUs reach each other over PCIe alone, warns of an IOMMU that translates and of bridges whose ACS redirects.
  - With O(collective=run) and two or more GPUs that nothing computes on, reduces over all of them with the interpreter and
    the environment that will serve. A collective that hangs is found by its limit, and the rank that the others wait for
    is named.
  - Without GPUs (O(gpu_count=0)) it passes and says so.
  - Without root it may not be able to open device files, and does not see ACS, which is then null in the evidence. With
    control groups of version 2 the device allow-list cannot be read; what opening the files tells counts.
attributes:
  check_mode:
    support: full
    description: Looks only. The all-reduce is not run in check mode.
options:
  gpu_count:
    description: How many GPUs the host has. 0 says that the server runs on CPUs.
    type: int
    required: true
  baseline:
    description: What C(adopt) recorded of the GPUs, the C(topology) part of the host's baseline.
    type: dict
    default: {}
  python:
    description: The interpreter that serves. Without it, versions of torch and NCCL are not asked for.
    type: path
  env:
    description: The environment of the launch.
    type: dict
    default: {}
  nvml_library:
    description: Where libnvidia-ml.so.1 lies, if the loader does not find it.
    type: path
  collective:
    description: Whether to run the all-reduce. It is left out where a process computes on a GPU.
    type: str
    choices: [none, run]
    default: none
  backend:
    description: What reduces. V(gloo) reduces on CPUs, for hosts without NVIDIA GPUs and for tests.
    type: str
    choices: [nccl, gloo]
    default: nccl
  collective_bytes:
    description: How much each rank reduces.
    type: int
    default: 268435456
  collective_rounds:
    description: How many all-reduces are timed, after two that are not.
    type: int
    default: 5
  collective_seconds:
    description: How long all of it may take, the start of the interpreters included.
    type: float
    default: 120.0
extends_documentation_fragment:
  - relight.recovery.common
"""

EXAMPLES = r"""
- name: See whether the GPUs are as they were
  relight.recovery.topology_check:
    gpu_count: 8
    baseline: "{{ relight_baseline.topology }}"
    python: /opt/sglang/bin/python

- name: See whether they can work together
  relight.recovery.topology_check:
    gpu_count: 8
    python: /opt/sglang/bin/python
    env: {NCCL_P2P_LEVEL: SYS}
    collective: run
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems.
    - Evidence is what C(adopt) records, among others C(driver), C(kernel_module), C(libraries), C(cuda), C(nccl), C(gpus),
      C(memory_limit_bytes), and C(bus_gb_s), the bus bandwidth of the all-reduce as nccl-tests count it.
  returned: always
  type: dict
actions:
  description: Always empty, a look does nothing.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import glue, topology
from ansible_collections.relight.recovery.plugins.module_utils.collective import Plan


def query(module: AnsibleModule) -> topology.Query:
    params = module.params
    env = {str(name): str(value) for name, value in params["env"].items()}
    reduce = params["collective"] == "run" and params["python"] and not module.check_mode
    plan = Plan(
        python=params["python"] or "",
        env=env,
        size=params["gpu_count"],
        backend=params["backend"],
        bytes=params["collective_bytes"],
        rounds=params["collective_rounds"],
        limit_seconds=params["collective_seconds"],
    )
    return topology.Query(
        gpu_count=params["gpu_count"],
        baseline=params["baseline"],
        python=params["python"],
        env=env,
        nvml_library=params["nvml_library"],
        collective=plan if reduce else None,
    )


def run(module: AnsibleModule) -> glue.Outcome:
    asked = query(module)
    seen = topology.look(asked) if asked.gpu_count else topology.Seen()
    return glue.Outcome(topology.judge(seen, asked))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            "gpu_count": {"type": "int", "required": True},
            "baseline": {"type": "dict", "default": {}},
            "python": {"type": "path"},
            "env": {"type": "dict", "default": {}},
            "nvml_library": {"type": "path"},
            "collective": {"type": "str", "choices": ["none", "run"], "default": "none"},
            "backend": {"type": "str", "choices": ["nccl", "gloo"], "default": "nccl"},
            "collective_bytes": {"type": "int", "default": 1 << 28},
            "collective_rounds": {"type": "int", "default": 5},
            "collective_seconds": {"type": "float", "default": 120.0},
        },
        supports_check_mode=True,
    )
    glue.main(module, "topology_check", lambda: run(module))


if __name__ == "__main__":
    main()
