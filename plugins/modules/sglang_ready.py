#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one poll, one judgement, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_ready
short_description: Can the SGLang server really do the work?
version_added: 0.1.0
description:
  - Takes one poll of a server's readiness and says whether there is anything left to wait for (RV(settled)). The action
    plugin of the same name repeats it for O(wait_seconds), so that a dropped connection costs one poll. It waits as long as
    there is progress, and ends at once on a line that no server survives, which it quotes.
  - "The stages, in order: spawned, args, init, loading, loaded (by every rank), kv, capturing, warmup, fired-up, port,
    health, generation, dump."
  - The last two are real. A generation of one token and a marked request whose dump is read and compared are sent once
    for each server instance, when the server is fired up and O(probe) is set; C(probe_tokens) in the evidence says how
    many tokens they had. Later calls on the same instance ask C(/health) alone, which costs an idle server one token and a
    busy one none.
  - A live shell around a dead server, a progress bar at 100% (one rank draws it), and a C(/health) of 200 on a wedged
    engine are not taken for readiness. Lines that another start left in the same log are passed over; stamps are read
    in this host's time zone.
  - Without the rights to read the server's processes, whose port it is may be unknown; the probes decide then.
attributes:
  check_mode:
    support: full
    description: Sends no probe. A server that a planned act would start is V(unknown), C(depends-on-planned-act).
options:
  host:
    description: The address that the server listens on.
    type: str
    default: 127.0.0.1
  port:
    description: The port that the server listens on.
    type: int
    default: 30000
  unit:
    description: The unit that runs the server. Its process is asked of the service manager.
    type: str
    default: relight-sglang
  pid:
    description: The server's process, for a host without a service manager. Wins over O(unit).
    type: int
  log:
    description: The file that the unit's output goes to. Without it only answers and probes can tell.
    type: path
  probe:
    description: Whether to send the generation and the dump probe to an instance that has not proven itself yet.
    type: bool
    default: false
  reprobe:
    description: Whether to send them although the instance has proven itself.
    type: bool
    default: false
  dump_dir:
    description: The directory that the server dumps to. Without it no dump is asked for.
    type: path
  layers:
    description: The layers, as layer outputs, that the dump must hold.
    type: list
    elements: int
  stall_seconds:
    description: After how long without any progress a start counts as stalled.
    type: float
    default: 600.0
  http_seconds:
    description: How long C(/health) may take. The server itself waits 20 seconds for its engine.
    type: float
    default: 30.0
  generation_seconds:
    description: How long the generation of one token may take before the server counts as wedged.
    type: float
    default: 60.0
  dump_seconds:
    description: How long the dump of the marked request may take.
    type: float
    default: 30.0
extends_documentation_fragment:
  - relight.recovery.common
  - relight.recovery.poll
  - relight.recovery.manager
"""

EXAMPLES = r"""
- name: Wait until the server works, as long as it gets on
  relight.recovery.sglang_ready:
    log: /var/lib/relight/log/relight-sglang.log
    state_dir: /var/lib/relight
    dump_dir: /dev/shm/relight
    layers: [1, 29, 57]
    probe: true
    wait_seconds: 7200
    poll_seconds: 5

- name: See whether it still answers
  relight.recovery.sglang_ready:
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems. It is V(unknown) while the server gets on.
    - Evidence is among others the C(stage), C(stage_seconds) since the start, C(ranks) and C(ranks_loaded),
      C(probe_tokens) of this call and the sums C(probe_tokens_total) and C(health_requests_total).
  returned: always
  type: dict
settled:
  description: Whether waiting longer would change nothing.
  returned: always
  type: bool
progress:
  description: Where the server is, in a clause.
  returned: always
  type: str
  sample: loading weights 12/64
actions:
  description: Always empty, a look does nothing.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import bounded, glue, readiness, services
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict

WAITS = ("stall_seconds", "http_seconds", "generation_seconds", "dump_seconds")
ALIKE = ("host", "port", "unit", "log", "dump_dir", "probe", "reprobe", *WAITS)


def unit_pid(module: AnsibleModule) -> int | None:
    """The server's process as the service manager knows it. Raises ManagerError."""
    if module.params["pid"] is not None:
        return int(module.params["pid"])
    manager = services.from_params(module.params)
    unit = manager.units().get(manager.canonical(module.params["unit"]))
    return unit.pid if unit else None


def unseen(code: str, where: str, what: str, remedy: str) -> glue.Outcome:
    problem = Problem(code, where, what, remedy, Verdict.UNKNOWN)
    return glue.Outcome(Gate("sglang_ready", problems=[problem]), more={"settled": True, "progress": what})


def poll(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    layers = tuple(params["layers"]) if params["layers"] is not None else None
    target = readiness.Target(layers=layers, check=module.check_mode, **{name: params[name] for name in ALIKE})
    try:
        seen, memory = readiness.look(target, unit_pid(module), readiness.recall(params["state_dir"]))
    except services.ManagerError as error:
        return unseen("manager-unreachable", params["unit"], str(error), "start the service manager, or correct its socket")
    except (bounded.TimedOut, bounded.ChildFailed) as error:
        return unseen("look-hung", "/proc", str(error), "look for processes in D state: the host may need a reboot")
    judged = readiness.judge(seen, target)
    evidence = judged.gate.evidence
    evidence.update(probe_tokens_total=memory.probe_tokens, health_requests_total=memory.health_requests)
    if not module.check_mode:
        try:
            readiness.remember(params["state_dir"], memory)
        except OSError as error:  # a full disk must not hide the verdict; the next poll looks afresh
            evidence["memory_error"] = str(error)
    return glue.Outcome(judged.gate, more={"settled": judged.settled, "progress": judged.progress})


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            **glue.POLL,
            **services.OPTIONS,
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "default": 30000},
            "unit": {"type": "str", "default": "relight-sglang"},
            "pid": {"type": "int"},
            "log": {"type": "path"},
            "probe": {"type": "bool", "default": False},
            "reprobe": {"type": "bool", "default": False},
            "dump_dir": {"type": "path"},
            "layers": {"type": "list", "elements": "int"},
            "stall_seconds": {"type": "float", "default": 600.0},
            "http_seconds": {"type": "float", "default": 30.0},
            "generation_seconds": {"type": "float", "default": 60.0},
            "dump_seconds": {"type": "float", "default": 30.0},
            "wait_seconds": {"type": "float", "default": 0.0},
            "poll_seconds": {"type": "float", "default": 2.0},
        },
        supports_check_mode=True,
    )
    glue.main(module, "sglang_ready", lambda: poll(module))


if __name__ == "__main__":
    main()
