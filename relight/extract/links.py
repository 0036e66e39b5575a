# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Which server may add to a store: one that is what the configuration says, and that continuity links to what is there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils.dumpfile import NORM, Server
from ansible_collections.relight.recovery.plugins.module_utils.layouts import UnknownLayout, layout
from ansible_collections.relight.recovery.plugins.module_utils.store import Runs, Store

from relight.extract.config import FOLDER, BadInput, Config, GiveUp

PROVENANCE = ("sglang", "plugin", "torch", "tp", "model_path", "dtype")


def open_store(config: Config) -> Store:
    """The store of a configuration, which need not exist yet. Raises BadInput."""
    try:
        norm_wanted(config)
        store = Store(config.store, layout(config.layout, os.path.join(config.state_dir, FOLDER)))
    except UnknownLayout as error:
        raise BadInput(str(error)) from error
    if not os.path.isdir(config.store) and not os.path.isdir(os.path.dirname(os.path.abspath(config.store))):
        raise BadInput(f"the directory of the store {config.store} is missing: is its disk mounted?")
    return store


def identity(config: Config, dtype: str) -> dict[str, Any]:
    """What must be equal for a sample to count."""
    return {**config.identity, "layers": list(config.layers), "norm": norm_wanted(config), "dtype": config.identity.get("dtype") or dtype}


def norm_wanted(config: Config) -> str:
    """Which final state the store holds: the identity's word, else what its layout usually holds. Raises BadInput."""
    norms = layout(config.layout).norms
    norm = str(config.identity.get("norm") or norms[0])
    if norm not in norms:
        raise BadInput(f"the layout {config.layout} holds the final state {' or '.join(norms)}-norm, and the identity says {norm!r}")
    return norm


def norm_of(server: Server) -> str:
    """Which final state the server's plugin dumps. One that can dump another says so in server.json and in each dump."""
    return str(server.fields.get("norm", NORM))


def dtype_of(server: Server) -> str:
    return str(server.fields.get("dtype", "")).rpartition(".")[2]


def passed(runs: Runs, instance: str) -> dict[str, Any] | None:
    """The link that lets this instance add samples, or None. The latest word counts."""
    link = next((link for link in reversed(runs.links) if link.get("instance") == instance), None)
    return link if link is not None and link.get("verdict") == "pass" else None


def link(instance: str, verdict: str, samples: int, quantiles: Mapping[str, Any], note: str = "") -> dict[str, Any]:
    """An entry of runs.json's links."""
    made: dict[str, Any] = {
        "instance": instance,
        "verdict": verdict,
        "samples": samples,
        "quantiles": dict(quantiles),
        "time": round(time.time(), 3),
    }
    return {**made, "note": note} if note else made


def judge_server(config: Config, server: Server) -> None:
    """Is it the server that the configuration is about? Raises GiveUp."""
    where = f"the server at {config.server}"
    if server.layers != tuple(config.layers):
        told = f"{where} dumps the layers {list(server.layers)}, the configuration wants {config.layers}"
        raise GiveUp(f"{told}: launch it with RELIGHT_DUMP_LAYERS set so")
    if server.hidden_size != config.hidden_size:
        raise GiveUp(f"{where} has hidden size {server.hidden_size}, the configuration says {config.hidden_size}: it serves another model")
    if norm_of(server) != norm_wanted(config):
        told = f"{where} dumps the final state {norm_of(server)}-norm, the layout {config.layout} holds it {norm_wanted(config)}-norm"
        raise GiveUp(f"{told}: extract to the layout specforge, then `relight export` makes the other of it")
    told, wanted = dtype_of(server), config.identity.get("dtype")
    if told and wanted and told != wanted:
        raise GiveUp(f"{where} computes in {told}, the configuration wants {wanted}: launch it with --dtype {wanted}")


def judge_identity(config: Config, runs: Runs) -> None:
    """Are the samples that are there of the same identity as those that would come? Raises BadInput."""
    old = runs.identity
    if old is None:
        return
    new = identity(config, str(old.get("dtype", "")))
    known = [name for name in sorted(old.keys() & new.keys()) if old[name] not in ("", None) and new[name] not in ("", None)]
    other = [name for name in known if old[name] != new[name]]
    if other:
        told = "; ".join(f"{name} was {_short(old[name])}, is {_short(new[name])}" for name in other)
        raise BadInput(f"the samples in {config.store} are of another identity ({told}): mend the configuration, or start a new store")


def admit(store: Store, config: Config, server: Server, empty: bool) -> str:
    """Let a server add to the store and name its run. Raises GiveUp when it may not, OSError, ValueError."""
    judge_server(config, server)
    runs = store.runs()
    if passed(runs, server.instance) is None:
        if not empty:
            raise GiveUp(
                f"no passed continuity check links the server instance {server.instance[:8]} at {config.server} to the samples "
                f"in {config.store}: run `relight continuity` (`relight recover` does), then start the extraction again"
            )
        store.add_link(link(server.instance, "pass", 0, {}, "nothing to compare: the store was empty"))
    kept = identity(config, dtype_of(server))
    name = run_name(server.instance, kept)
    if runs.identity_of(name) is None:
        provenance = {key: server.fields[key] for key in PROVENANCE if key in server.fields}
        store.add_run(name, kept, provenance, round(time.time(), 3), server.instance)
    return name


def run_name(instance: str, kept: Mapping[str, Any]) -> str:
    """One run for a server instance and an identity, however often the client starts."""
    digest = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{instance[:8]}-{digest}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
