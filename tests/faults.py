# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Every seeded fault of the tests' tables with the verdict and the codes that it gets: `python -m tests.faults` writes docs/faults.md."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
from ansible_collections.relight.recovery.plugins.module_utils import baseline, collective, digests, storage, topology, weights
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate
from safetensors.numpy import load_file, save_file

from tests.harness import ROOT
from tests.unit import test_baseline, test_ceph, test_kernel_log, test_topology, test_weights

FILE = ROOT / "docs" / "faults.md"
HEAD = """\
# Seeded faults

Each row is a test: the fault is made, and the gate must answer with this verdict and these problem codes. What each code
means and what to do is in [problems](problems). This table is written by `python -m tests.faults`, and a test compares the
two.

| fault | gate | verdict | code |
| --- | --- | --- | --- |
"""
Row = tuple[str, str, str, str]


def row(fault: str, gate: Gate) -> Row:
    codes = list(dict.fromkeys(problem.code for problem in gate.problems))
    return fault, gate.name, gate.verdict.word, ", ".join(codes)


# --- weights ----------------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _swap(model: Path) -> None:
    one, two = (model / name for name in test_weights.NAMES[:2])
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def _rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = load_file(path)
    change(value)
    save_file(value, path)


SHARD = test_weights.NAMES[1]
WEIGHTS: dict[str, Callable[[Path], Any]] = {
    "a shard is missing": lambda model: (model / SHARD).unlink(),
    "a shard is one byte short": lambda model: (model / SHARD).write_bytes((model / SHARD).read_bytes()[:-1]),
    "a shard was cut and extended again with zeros": lambda model: (model / SHARD).write_bytes(
        (model / SHARD).read_bytes()[:-40] + bytes(40)
    ),
    "a shard is longer than its header says": lambda model: (model / SHARD).write_bytes((model / SHARD).read_bytes() + b"x"),
    "a shard is empty": lambda model: (model / SHARD).write_bytes(b""),
    "one bit of a shard is flipped": lambda model: _flip(model / SHARD),
    "two shards are swapped": _swap,
    "a shard of another checkpoint lies beside": lambda model: save_file({"x": numpy.zeros(2)}, model / "model-00004-of-00004.safetensors"),
    "a shard lacks a tensor that the index names": lambda model: _rewrite(model / SHARD, lambda value: value.popitem()),
    "the index is torn": lambda model: (model / "model.safetensors.index.json").write_text("{"),
    "the index is missing": lambda model: (model / "model.safetensors.index.json").unlink(),
    "config.json is missing": lambda model: (model / "config.json").unlink(),
    "config.json is of a wider model": lambda model: test_weights.edit(model / "config.json", lambda config: config.update(hidden_size=99)),
    "config.json is of a deeper model": lambda model: test_weights.edit(
        model / "config.json", lambda config: config.update(num_hidden_layers=9)
    ),
    "config.json has a space more": lambda model: (model / "config.json").write_text((model / "config.json").read_text() + " "),
    "the tokenizer is missing": lambda model: (model / "tokenizer.json").unlink(),
    "the model is gone": lambda model: model.rename(model.with_name("elsewhere")),
}


def of_weights() -> Iterator[Row]:
    """Each fault on a model whose baseline is known: fingerprint and all digests."""
    for fault, change in WEIGHTS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = test_weights.build(Path(folder) / "model")
            (model / "tokenizer.json").write_text("{}")
            names = sorted(path.name for path in model.iterdir())
            known = digests.of(str(model), names, digests.Cache(None), 60).found
            fingerprint = weights.look(str(model)).fingerprint
            change(model)
            expected = weights.Expected(fingerprint=fingerprint, digests={name: str(value) for name, value in known.items()}, complete=True)
            seen = weights.look(str(model), weights.Reading(tuple(names)))
            yield row(fault, weights.judge(seen, expected))


# --- the tables of the other tests ------------------------------------------------------------------------------------


def of_topology() -> Iterator[Row]:
    for fault, (seen, codes) in test_topology.FAULTS.items():
        if codes:
            yield row(fault, topology.judge(seen, topology.Query(2, baseline=test_topology.BASELINE)))
    for ranks, says in test_topology.HANGS:
        gate = Gate(topology.NAME, problems=collective.judge(collective.Reduced(test_topology.PLAN, ranks, timed_out=True)))
        yield row(f"the all-reduce hangs: {says}", gate)


def of_storage() -> Iterator[Row]:
    for fault, (before, now, more, codes) in test_kernel_log.MOUNTS.items():
        if codes:
            known = (storage.KnownMount("/data", before, now, **more),)
            yield row(f"mounts: {fault}", storage.judge(test_kernel_log.seen(known_mounts=known), storage.Need(moved_to="u9")))
    for fault, (log, asked, codes) in test_kernel_log.LOGS.items():
        if codes:
            yield row(f"kernel log: {fault}", storage.judge(test_kernel_log.seen(log=log), storage.Need(kernel_log=asked)))


def of_ceph() -> Iterator[Row]:
    for fault, (change, _verdict, _code) in test_ceph.FAULTS.items():
        yield row(fault, test_ceph.judged(test_ceph.changed(change)))
    for name in ("nearfull", "backfillfull", "full", "paused"):
        yield row(f"a real cluster that is {name}", test_ceph.judged(test_ceph.recorded(name)))


def of_baseline() -> Iterator[Row]:
    for fault, (found, copy, known, _verdict, codes) in test_baseline.FAULTS.items():
        if codes != []:
            yield row(f"adopting: {fault}", baseline.judge(found, copy, None, known))
    for case, (known, copy, error, required, _verdict, codes) in test_baseline.CHECKS.items():
        if codes:
            yield row(f"baselines: {case}", baseline.check(known, copy, error, "h1", required))


def of_serving() -> Iterator[Row]:
    for case, (serving, codes) in test_baseline.SERVES.items():
        if codes:
            known = test_baseline.KNOWN
            yield row(f"what will serve: {case}", baseline.check(known, known, None, "h1", False, serving))


def table() -> str:
    parts = (of_weights, of_topology, of_storage, of_ceph, of_baseline, of_serving)
    lines = [f"| {' | '.join(cells)} |" for part in parts for cells in part()]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(table())
    print(json.dumps({"rows": table().count("\n") - HEAD.count("\n")}))
