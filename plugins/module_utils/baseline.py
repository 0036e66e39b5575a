# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The known-good state of a host: put together from what the gates saw and what adoption looked at, compared, kept.

The controller's copy rules; the host keeps one in its state directory. Two baselines are equal where everything but the time
of recording is.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import durable
from ansible_collections.relight.recovery.plugins.module_utils.adoption import Server, wiped_by_a_reboot
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict

SCHEMA = 1
COPY = "baseline.json"
TOPOLOGY = [
    "driver",
    "kernel_module",
    "cuda",
    "nccl",
    "torch",
    "torch_cuda",
    "container",
    "memory_limit_bytes",
    "gpus",
    "nccl_environment",
    "bus_gb_s",
]
WEIGHTS = ("fingerprint", "shards", "tensors", "bytes")
DATASET = ("records", "tokens", "bytes", "digest")
HIDDEN_STATES = ("mode", "architecture", "model_layers", "layers_wanted", "layers_passed", "layers_captured")
SOFTWARE = ("python_version", "sglang_version", "plugin_version")
VOLATILE = ("time",)


class Unreadable(Exception):
    """A baseline is there and is none, or was written by a newer Relight; the message is for the operator."""


@dataclass(frozen=True)
class Gathered:
    """All that a baseline is made of. `gates` are the evidence of gates, by their names."""

    host: str
    after_the_fact: bool = False
    services: list[dict[str, Any]] | None = None
    server: Server | None = None
    mounts: list[dict[str, Any]] = field(default_factory=list)
    model_dir: str = ""
    dataset: str = ""
    dump_dir: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    undigested: int = 0
    gates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: tuple[str, ...] = ()


def make(found: Gathered, known: Mapping[str, Any] | None, now: float | None = None) -> dict[str, Any]:
    """The baseline as it is written. Where it equals the known one, the known time stays."""
    gates = found.gates
    topology = _some(gates.get("topology_check"), TOPOLOGY)
    if topology.get("gpus"):
        topology["memory_limit_bytes"] = gates["topology_check"].get("memory_limit_bytes")  # no limit is worth knowing
        if found.server and found.server.environment:  # what really ran, not what the inventory says
            own = found.server.environment
            topology["nccl_environment"] = {name: own[name] for name in sorted(own) if name.startswith("NCCL_")}
    before = (known or {}).get("topology") or {}
    if topology.get("gpus") and topology.get("bus_gb_s") is None and before.get("bus_gb_s") is not None:
        topology["bus_gb_s"] = before["bus_gb_s"]  # measured on idle GPUs once; a busy host keeps the number
    server = found.server
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "host": found.host,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "after_the_fact": found.after_the_fact,
        "services": found.services,
        "server": None
        if server is None
        else {
            "found_in": server.source,
            "unit": server.unit,
            "command": list(server.command),
            "environment": dict(server.environment),
            **({"arguments": dict(server.arguments)} if server.arguments else {}),
        },
        "mounts": found.mounts,
        "weights": {"path": found.model_dir, **_some(gates.get("weights_check"), WEIGHTS), "digests": dict(sorted(found.digests.items()))},
        "dataset": {"path": found.dataset, **_some(gates.get("dataset_check"), DATASET)},
        "software": _some(gates.get("hs_patch_check"), SOFTWARE),
        "hidden_states": _some(gates.get("hs_patch_check"), HIDDEN_STATES),
        "topology": topology if topology.get("gpus") else {},
    }
    if known and equal(made, known):
        made["time"] = known["time"]
    return made


def _some(evidence: Mapping[str, Any] | None, names: tuple[str, ...] | list[str]) -> dict[str, Any]:
    return {name: evidence[name] for name in names if evidence.get(name) is not None} if evidence else {}


def equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """By content, whatever wrote it: as JSON, without what changes by itself."""
    return _plain(one) == _plain(other)


def _plain(value: Mapping[str, Any]) -> str:
    return json.dumps({key: item for key, item in value.items() if key not in VOLATILE}, sort_keys=True)


def judge(found: Gathered, copy: Mapping[str, Any] | None, copy_error: str | None, known: Mapping[str, Any] | None) -> Gate:
    """May this be recorded as known-good? After the fact nothing refuses, and everything that is lacking is a warning."""
    gate = Gate("baseline", _evidence(found))
    gate.problems += [*_server_problems(found), *_other_problems(found, copy, copy_error, known)]
    if found.after_the_fact:
        gate.problems = [replace(problem, verdict=min(problem.verdict, Verdict.WARN)) for problem in gate.problems]
    return gate


def _evidence(found: Gathered) -> dict[str, Any]:
    return {
        "after_the_fact": found.after_the_fact,
        "services": len(found.services or ()),
        "server": found.server.source if found.server else None,
        "mounts": len(found.mounts),
        "weights_digests": len(found.digests),
        "gates": sorted(name for name, evidence in found.gates.items() if evidence),
    }


def _server_problems(found: Gathered) -> list[Problem]:
    server = found.server
    if server is None:
        return [Problem("server-not-found", "server", "no running server was found", "start it, or adopt after the fact")]
    problems = []
    if not server.readable:
        what = "its environment or command line cannot be read"
        problems.append(Problem("server-unreadable", "server", what, "set relight_become: true", Verdict.UNKNOWN))
    if server.healthy is False:
        what = "it does not answer /health with 200"
        problems.append(Problem("server-unhealthy", "server", what, "adopt a healthy host, or adopt after the fact"))
    words = [*server.command, *server.environment.values()]
    for path in wiped_by_a_reboot(words, found.dump_dir):
        what = "the server uses it, and a reboot wipes it"
        remedy = "keep it elsewhere, or list it in relight_restore_files"
        problems.append(Problem("needs-what-a-reboot-wipes", path, what, remedy, Verdict.WARN))
    return problems


def _other_problems(
    found: Gathered, copy: Mapping[str, Any] | None, copy_error: str | None, known: Mapping[str, Any] | None
) -> list[Problem]:
    problems = []
    if found.services is None:
        what = "the service manager does not answer, so the services are left out"
        remedy = "correct relight_service_manager and relight_supervisor_socket"
        problems.append(Problem("manager-unreachable", "service manager", what, remedy, Verdict.UNKNOWN))
    for error in found.errors:
        what = f"it could not be looked at: {error}"
        problems.append(Problem("baseline-incomplete", "baseline", what, "see why, then run adopt.yml again", Verdict.UNKNOWN))
    if found.undigested:
        what = f"{found.undigested} files of the weights are not read yet"
        remedy = "run adopt.yml again, it goes on where it stopped; or raise adopt_seconds"
        problems.append(Problem("weights-undigested", found.model_dir, what, remedy, Verdict.UNKNOWN))
    if not found.digests and not found.undigested:
        what = "no file of the model could be digested"
        problems.append(Problem("weights-undigested", found.model_dir, what, "correct relight_model_dir", Verdict.UNKNOWN))
    if keeps(known, found.after_the_fact):
        what = "a baseline of the healthy host is there; what is gathered after the fact does not replace it"
        problems.append(Problem("baseline-kept", found.host, what, "remove relight_baseline.yml first if it must go", Verdict.WARN))
    return problems + differences(copy, copy_error, known)


def keeps(known: Mapping[str, Any] | None, after_the_fact: bool) -> bool:
    """Whether the known baseline stays whatever was found: a broken host does not overwrite what is known of the healthy one."""
    return bool(known) and after_the_fact and not (known or {}).get("after_the_fact")


def differences(copy: Mapping[str, Any] | None, copy_error: str | None, known: Mapping[str, Any] | None) -> list[Problem]:
    """Does the host's copy say what the controller's says?"""
    again = "the controller's rules; run adopt.yml again once you know which is right"
    if copy_error:
        return [Problem("baseline-differs", COPY, copy_error, again, Verdict.WARN)]
    if copy and known and not equal(copy, known):
        parts = sorted(name for name in {*copy, *known} - set(VOLATILE) if copy.get(name) != known.get(name))
        what = f"the host's copy differs from the controller's in {', '.join(parts)}"
        return [Problem("baseline-differs", COPY, what, again, Verdict.WARN)]
    if copy and not known:
        what = "the host was adopted, and this controller has no baseline of it"
        return [Problem("baseline-differs", COPY, what, "take it from the controller that adopted the host", Verdict.WARN)]
    return []


def check(
    known: Mapping[str, Any] | None,
    copy: Mapping[str, Any] | None,
    copy_error: str | None,
    host: str,
    required: bool,
    serving: Mapping[str, Any] | None = None,
) -> Gate:
    """The gate of an ordinary run: is there a baseline, is it this host's, does the host's copy agree, and will the same serve?

    `serving` is the evidence of hs_patch_check, where it looked.
    """
    gate = Gate("baseline_check", {"baseline": bool(known), "copy": bool(copy)})
    gate.problems += differences(copy, copy_error, known)
    if not known:
        if required and not gate.problems:
            what = "nothing says what this host should be: continuity alone carries the proof"
            gate.problems.append(Problem("no-baseline", host, what, "run adopt.yml once the host is clear", Verdict.WARN))
        return gate
    schema = known.get("schema")
    gate.evidence.update(time=known.get("time"), after_the_fact=bool(known.get("after_the_fact")))
    if not isinstance(schema, int) or schema > SCHEMA:
        what = f"its schema is {schema!r}, this Relight reads {SCHEMA}"
        gate.problems.append(Problem("baseline-newer", host, what, "update Relight, or adopt again", Verdict.UNKNOWN))
    if known.get("host") != host:
        what = f"the baseline is that of {known.get('host')}"
        gate.problems.append(Problem("baseline-other-host", host, what, "adopt this host", Verdict.FAIL))
    if not copy and not copy_error:
        what = "the host has no copy: its state directory is new, or was lost"
        gate.problems.append(Problem("baseline-differs", COPY, what, "run adopt.yml once the host is clear", Verdict.WARN))
    gate.problems += _serving_problems(known, serving or {})
    return gate


def _serving_problems(known: Mapping[str, Any], serving: Mapping[str, Any]) -> list[Problem]:
    """Versions may change, and continuity then proves that nothing else did; the layers that are captured may not."""
    problems = []
    software, states = known.get("software") or {}, known.get("hidden_states") or {}
    for name in SOFTWARE:
        if software.get(name) and serving.get(name) and software[name] != serving[name]:
            what = f"{serving[name]}, the baseline says {software[name]}"
            remedy = "set it back, or let continuity prove it and adopt again"
            problems.append(Problem("version-differs", name.replace("_version", ""), what, remedy, Verdict.WARN))
    before, now = states.get("layers_captured"), serving.get("layers_captured")
    if before and now and list(before) != list(now):
        what = f"the outputs of layers {now} would be captured, the baseline says {before}"
        remedy = "correct relight_dump_layers, or go back to the SGLang version of the baseline"
        problems.append(Problem("baseline-layers", "hidden states", what, remedy))
    return problems


# The host's copy


def read_copy(state_dir: str) -> tuple[dict[str, Any] | None, str | None]:
    """The host's copy, or why it cannot be read."""
    path = os.path.join(state_dir, COPY)
    try:
        with open(path, encoding="utf-8") as handle:
            value = json.load(handle)
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"the host's copy cannot be read: {error}"
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
        return None, "the host's copy is no baseline"
    return value, None


def write_copy(state_dir: str, value: Mapping[str, Any]) -> bool:
    """Write the host's copy where it differs. Raises OSError."""
    if read_copy(state_dir)[0] == value:
        return False
    os.makedirs(state_dir, exist_ok=True)
    durable.write_json(os.path.join(state_dir, COPY), dict(value), 0o600)
    return True
