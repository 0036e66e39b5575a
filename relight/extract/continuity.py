# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m relight continuity --config FILE`: does this server compute what the store holds? Prints a gate result as JSON.

Some intact samples are extracted again and compared with what is stored. The verdict becomes a link in runs.json; without a
passed one the client adds nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ansible_collections.relight.recovery.plugins.module_utils import ckpt, continuity, dumpfile
from ansible_collections.relight.recovery.plugins.module_utils.continuity import FINAL, Block, Quantiles, Sample, Seen
from ansible_collections.relight.recovery.plugins.module_utils.dataset import FixedRecords
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.store import Entry, Locked, Store

from relight.extract import links
from relight.extract.config import BadInput, Config, GiveUp, load
from relight.extract.fetch import Away, DumpWatch, Fetcher, Names, Refused, session
from relight.extract.missing import file_digest
from relight.extract.prepare import fixed_records
from relight.extract.states import file_of, states_of, to_float32, value_fault

TRIES = 3
CANDIDATES = 4  # times the samples wanted: some may turn out not to be intact
Array = np.ndarray[Any, Any]


class Unanswered(Exception):
    """The server went away under the check, which had sent it so many tokens."""

    def __init__(self, message: str, probe_tokens: int) -> None:
        super().__init__(message)
        self.probe_tokens = probe_tokens


def choose(entries: Sequence[Entry], wanted: int) -> list[Entry]:
    """Candidates, best first: the newest, then the longest, the shortest and what lies between them, each once."""
    if not entries:
        return []
    newest = sorted(entries, key=lambda entry: (-entry.time, entry.index))[: max(1, wanted // 2)]
    by_length = sorted(entries, key=lambda entry: (-entry.tokens, entry.index))
    count = wanted * CANDIDATES
    spread = [by_length[round(part * (len(by_length) - 1) / max(1, count - 1))] for part in _outside_in(count)]
    chosen: dict[int, Entry] = {}
    for entry in [*newest, *spread]:
        chosen.setdefault(entry.index, entry)
    return list(chosen.values())


def _outside_in(count: int) -> Iterator[int]:
    """0, last, middle, then the rest in order."""
    first = [0, count - 1, count // 2]
    yield from first
    yield from (part for part in range(count) if part not in first)


def relative_errors(stored: Array, new: Array) -> Array:
    """Per token: the norm of the difference over the norm of what is stored. Rows are tokens."""
    scale = np.linalg.norm(stored, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.linalg.norm(new - stored, axis=1) / scale
    return np.where(scale > 0, errors, np.linalg.norm(new, axis=1))


@dataclass
class Pool:
    """The errors of every pair of a stored and a new block, over all tokens of all samples."""

    layers: Sequence[int]
    pairs: dict[tuple[str, str], list[Array]] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)

    def add(self, stored: Mapping[str, Array], new: Mapping[str, Array]) -> float:
        """Take in a sample; the worst median error among its own blocks."""
        worst = 0.0
        for name, old in stored.items():
            self.nonfinite[name] = self.nonfinite.get(name, 0) + int((~np.isfinite(new[name]).all(axis=1)).sum())
            for other, states in new.items():
                errors = relative_errors(old, states)
                self.pairs.setdefault((name, other), []).append(errors)
                if name == other:
                    worst = max(worst, float(np.quantile(errors, 0.5)))
        return worst

    def blocks(self) -> tuple[Block, ...]:
        """Every stored block against the new one of its name, and which new block lies nearest."""
        names = sorted({name for name, _ in self.pairs}, key=lambda name: (name == FINAL, name))
        medians = {pair: float(np.quantile(np.concatenate(errors), 0.5)) for pair, errors in self.pairs.items()}
        found = []
        for name in names:
            like = min(names, key=lambda other: medians[name, other])
            found.append(Block(name, _quantiles(np.concatenate(self.pairs[name, name])), like, medians[name, like], self.nonfinite[name]))
        return tuple(found)


def _quantiles(errors: Array) -> Quantiles:
    p50, p90, p99 = (float(value) for value in np.quantile(errors, [0.5, 0.9, 0.99]))
    return Quantiles(p50, p90, p99, float(errors.max()))


def blocks_of(final: Array, aux: Array, layers: Sequence[int]) -> dict[str, Array]:
    """States by block name; rows are tokens."""
    width = final.shape[1]
    named = {str(layer): aux[:, number * width : (number + 1) * width] for number, layer in enumerate(layers)}
    return {**named, FINAL: final}


@contextmanager
def stored_states(store: Store, entry: Entry) -> Iterator[tuple[str, Array, Array]]:
    """A stored sample's dtype, final and auxiliary states as float32, rows are tokens. Raises OSError, ckpt.Torn, ckpt.Strange."""
    path = store.path_of(entry.index)
    seen = store.layout.look(path)
    with file_of(path) as file:
        yield seen.dtype, *states_of(file, seen)


class Probe:
    """One continuity check against a live server."""

    def __init__(self, config: Config, store: Store, records: FixedRecords, server: dumpfile.Server, fetcher: Fetcher) -> None:
        self.config, self.store, self.records, self.server, self.fetcher = config, store, records, server, fetcher
        self.names = Names()
        self.pool = Pool(config.layers)
        self.probe_tokens = 0
        self.dtype = ""

    async def run(self, candidates: Sequence[Entry], wanted: int) -> Seen:
        """Extract and compare until `wanted` intact samples were compared. Raises Away, GiveUp."""
        samples: list[Sample] = []
        for entry in candidates:
            if len(samples) == wanted:
                break
            if self._intact(entry):
                samples.append(await self._one(entry))
        return Seen(self.server.instance, self.dtype or "float32", tuple(samples), self.pool.blocks(), self.probe_tokens)

    def _intact(self, entry: Entry) -> bool:
        """To the last byte: a corrupt sample must not speak against the server."""
        record = self.records.items[entry.index] if entry.index < len(self.records) else None
        try:
            path = self.store.path_of(entry.index)
            digest = file_digest(path, os.stat(path).st_size)
        except (OSError, ckpt.Torn):
            return False
        return record is not None and record.token_digest == entry.token_digest and digest == entry.digest

    async def _one(self, entry: Entry) -> Sample:
        """Raises Away."""
        ids = self.records.read(entry.index).ids
        for attempt in range(1, TRIES + 1):
            rid = self.names.rid(self.server.instance, entry.index)
            want = dumpfile.Expected(
                rid,
                entry.token_digest,
                entry.tokens,
                tuple(self.config.layers),
                self.config.hidden_size,
                self.server.instance,
                links.norm_wanted(self.config),
            )
            try:
                self.probe_tokens += entry.tokens
                path = await self.fetcher.fetch(rid, ids)
                return self._compare(entry, path, want)
            except dumpfile.BadDump as error:
                what = "of other tokens" if error.kind == dumpfile.TOKENS else "not that of the sample"
                return Sample(entry.index, entry.tokens, 0.0, f"the server's dump is {what}: {error}", _code(error))
            except Refused as error:
                if attempt == TRIES:
                    return Sample(
                        entry.index, entry.tokens, 0.0, f"the server gave no dump in {TRIES} tries: {error}", "continuity-no-dump"
                    )
            finally:
                self.fetcher.watch.forget(rid)
        raise AssertionError("unreachable")

    def _compare(self, entry: Entry, path: str, want: dumpfile.Expected) -> Sample:
        """Raises BadDump."""
        with dumpfile.judged(path, want, value_fault) as dump, stored_states(self.store, entry) as (stored_dtype, final, aux):
            if stored_dtype != dump.dtype:
                raise dumpfile.BadDump(f"its states are {dump.dtype}, the stored ones {stored_dtype}")
            self.dtype = dump.dtype
            width = self.config.hidden_size
            new_final = to_float32(dump.tensors[dumpfile.FINAL].buffer, dump.dtype).reshape(-1, width)
            new_aux = to_float32(dump.tensors[dumpfile.AUX].buffer, dump.dtype).reshape(-1, width * len(self.config.layers))
            layers = self.config.layers
            worst = self.pool.add(blocks_of(final, aux, layers), blocks_of(new_final, new_aux, layers))
        return Sample(entry.index, entry.tokens, worst)


def _code(error: dumpfile.BadDump) -> str:
    """What kind of mismatch a refused dump is."""
    if error.kind == dumpfile.VALUES:
        return "continuity-nonfinite"
    return "continuity-other-tokens" if error.kind == dumpfile.TOKENS else "continuity-other-dump"


async def check(config: Config, store: Store, samples: int) -> Gate:
    """The verdict on the server that runs now, kept as a link. Raises BadInput, GiveUp, Unanswered, OSError, ValueError."""
    server = dumpfile.read_server(config.dump_dir)
    if server is None:
        what = f"no server with the dump plugin has written {dumpfile.SERVER_FILE} in {config.dump_dir}"
        return continuity.unknown("continuity-no-server", what, "start the server, wait until it is ready, then run continuity again")
    runs = store.runs()
    links.judge_server(config, server)
    links.judge_identity(config, runs)
    known = links.passed(runs, server.instance)
    if known is not None:
        return continuity.already_linked(server.instance, known)
    with store.exclusive("relight continuity"):
        entries = [entry for entry in store.entries().values() if os.path.exists(store.path_of(entry.index))]
        if not entries and _holds_files(store):
            remedy = "run the inventory (`relight recover` does): it enters whole samples in the manifest"
            return continuity.unknown("continuity-empty", f"{store.path} holds samples that no manifest lists", remedy)
        if not entries:
            gate = continuity.nothing_to_compare(server.instance)
            store.add_link(links.link(server.instance, gate.verdict.word, 0, {}, "nothing to compare"))
            return gate
        with fixed_records(config) as records:
            seen = await _probe(config, store, records, server, choose(entries, samples), samples)
        gate = continuity.judge(seen)
        if gate.verdict in (Verdict.PASS, Verdict.FAIL):
            store.add_link(links.link(server.instance, gate.verdict.word, len(seen.samples), gate.evidence["quantiles"]))
        return gate


def _holds_files(store: Store) -> bool:
    """Are there samples, listed or not? Raises OSError."""
    return any(name.endswith(store.layout.suffixes) for shard in store.shards() for name in os.listdir(os.path.join(store.path, shard)))


async def _probe(
    config: Config, store: Store, records: FixedRecords, server: dumpfile.Server, candidates: Sequence[Entry], wanted: int
) -> Seen:
    watch = DumpWatch(config.dump_dir)
    watching = asyncio.create_task(watch.run())
    try:
        async with session() as http:
            fetcher = Fetcher(http, config.server, watch, config.request_seconds, config.dump_seconds, config.max_new_tokens)
            probe = Probe(config, store, records, server, fetcher)
            try:
                return await probe.run(candidates, wanted)
            except Away as error:
                raise Unanswered(str(error), probe.probe_tokens) from error
    finally:
        watching.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the gate; 0 when it passed, else 1."""
    parser = argparse.ArgumentParser(prog="relight continuity", description="Compare what this server computes with what the store holds.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration: extract.json in the state directory")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="how many samples are extracted again (default: 4)")
    options = parser.parse_args(argv)
    start = time.monotonic()
    gate = _gate(options.config, max(1, options.samples))
    print(json.dumps(gate.result(time.monotonic() - start), sort_keys=True), flush=True)
    return 0 if gate.verdict is Verdict.PASS else 1


def _gate(path: str, samples: int) -> Gate:
    """Whatever goes wrong is a verdict."""
    try:
        config = load(path)
        return asyncio.run(check(config, links.open_store(config), samples))
    except (BadInput, GiveUp) as error:
        remedy = "mend it, then run continuity again"
        return Gate(continuity.GATE, {"probe_tokens": 0}, [Problem("continuity-wrong-server", path, str(error), remedy)])
    except Unanswered as error:
        remedy = "see why the server does not answer, then run continuity again"
        return continuity.unknown("continuity-no-server", str(error), remedy, error.probe_tokens)
    except Locked as error:
        return continuity.unknown("continuity-store-locked", str(error), "stop the client that writes it, then run continuity again")
    except Exception as error:  # what nobody thought of is no pass either
        return continuity.unknown(
            "continuity-broken", f"{type(error).__name__}: {error}", "mend what the message names, then run continuity again"
        )


if __name__ == "__main__":
    sys.exit(main())
