# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`relight export`: samples from one layout to another, or to another place, without the server.

Each sample is read against the digest in its manifest, written durably, read back from the disk and entered in the new store's
manifest; killed at any moment and run again, it goes on. What the new layout needs and the old one lacks is computed where that
is exact, marked where it is a surrogate, and refused otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from ansible_collections.relight.recovery.plugins.module_utils import ckpt, inventory, surveying
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import TensorBytes
from ansible_collections.relight.recovery.plugins.module_utils.dataset import BadDataset, FixedRecords
from ansible_collections.relight.recovery.plugins.module_utils.layouts import (
    POST,
    PRE,
    SURROGATE,
    Sample,
    Seen,
    UnknownLayout,
    Unsupported,
    layout,
)
from ansible_collections.relight.recovery.plugins.module_utils.records import id_bytes
from ansible_collections.relight.recovery.plugins.module_utils.store import Entry, Locked, NewerStore, Runs, Store

from relight.extract import norms, selection, transfer
from relight.extract.config import BAD_INPUT, DONE, GAVE_UP, SOME_GIVEN_UP, STOPPED, BadInput, GiveUp
from relight.extract.missing import file_digest
from relight.extract.progress import human_bytes
from relight.extract.states import file_of, raw_rows, to_float32, to_raw
from relight.hostlook import look_at_content

LINE_SECONDS = 5.0
NAMED = 8


class Unusable(Exception):
    """A sample that is not exported; the message is a clause about it."""


@dataclass
class Tally:
    """What became of the samples."""

    wanted: int = 0
    there: int = 0
    made: int = 0
    bytes: int = 0
    surrogates: int = 0
    left: dict[int, str] = field(default_factory=dict)

    def sentence(self) -> str:
        told = f"{self.there + self.made} of {self.wanted} samples are exported, {self.made} of them now ({human_bytes(self.bytes)})"
        if self.surrogates:
            told += f", {self.surrogates} with a surrogate of the state before the norm"
        if self.left:
            names = ", ".join(str(index) for index in sorted(self.left)[:NAMED])
            told += f"; not exported: {len(self.left)}, sample {names} ({self.left[min(self.left)]})"
        return told


@dataclass(frozen=True)
class Means:
    """What conversions may use: the fixed records for masks, the model's last norm, and leave to make surrogates."""

    records: FixedRecords | None = None
    norm: norms.FinalNorm | None = None
    surrogate: bool = False


class Export:
    """From one store to another. The caller holds the lock of the new one."""

    def __init__(self, source: Store, target: Store, means: Means) -> None:
        self.source, self.target, self.means = source, target, means
        self.runs: Runs = source.runs()
        self.entries = source.entries()
        self.tally = Tally()
        self.stopping = False
        self._runs_told: set[str] = set()

    def run(self, indices: Sequence[int], there: frozenset[int]) -> None:
        """Export what is not there yet. Raises GiveUp, OSError."""
        last = time.monotonic()
        self.tally.wanted, self.tally.there = len(indices), len(there.intersection(indices))
        for index in indices:
            if self.stopping:
                return
            if index in there:
                continue
            try:
                self._one(index)
            except (Unusable, ckpt.Torn, ckpt.Strange, Unsupported, UnknownLayout, BadDataset) as error:
                self.tally.left[index] = str(error)
            now = time.monotonic()
            if now - last >= LINE_SECONDS:
                last = now
                say(self.tally.sentence())

    def _one(self, index: int) -> None:
        entry = self.entries.get(index)
        if entry is None:
            raise Unusable("is not in the manifest: let the inventory judge and enter it first")
        self._judge_run(entry)
        path = self.source.path_of(index)
        try:
            if file_digest(path, os.path.getsize(path)) != entry.digest:
                raise Unusable("does not match the digest in its manifest")
            seen = self.source.layout.look(path)
        except FileNotFoundError:
            raise Unusable("is in the manifest only") from None
        except OSError as error:
            raise Unusable(f"cannot be read: {error.strerror or error}") from None
        with file_of(path) as file:
            sample = self._sample(entry, seen, file)
            self._tell_run(sample)
            made = self.target.add(sample, xxhash.xxh3_128(), time.time())
        self._judge_written(made)
        self.tally.made += 1
        self.tally.bytes += made.bytes

    def _judge_run(self, entry: Entry) -> None:
        """Only samples of one identity go together."""
        if entry.run == inventory.ADOPTED:
            return
        own = self.runs.identity_of(entry.run)
        if own is None:
            raise Unusable(f"is of the run {entry.run!r}, which runs.json does not know")
        other = inventory.differing(self.runs.identity or {}, own)
        if other:
            raise Unusable(f"is of another identity ({other[0]})")

    def _sample(self, entry: Entry, seen: Seen, file: memoryview) -> Sample:
        """The sample in the store's own words, with the final state that the new layout holds. Raises Unusable."""
        if (seen.token_digest, seen.tokens) != (entry.token_digest, entry.tokens):
            raise Unusable("holds other tokens than its manifest says")
        final, aux = raw_rows(file, seen.final, seen.dtype), raw_rows(file, seen.aux, seen.dtype)
        blocks = aux.shape[1] // final.shape[1]
        if self.target.layout.blocks not in (None, blocks):
            raise Unusable(f"has {blocks} auxiliary layers, the layout {self.target.layout.name} holds {self.target.layout.blocks}")
        data, norm = self._final(seen, final)
        tensors = {
            "input_ids": TensorBytes("int64", (seen.tokens,), seen.ids),
            "loss_mask": TensorBytes("int64", (seen.tokens,), id_bytes(list(self._mask(entry, seen)))),
            "hidden_state": TensorBytes(seen.dtype, (1, *final.shape), data),
            "aux_hidden_state": TensorBytes(seen.dtype, (1, *aux.shape), np.ascontiguousarray(aux).data.cast("B")),
        }
        extra = {**self._origin(entry, seen), "norm": norm, "dtype": seen.dtype}
        return Sample(entry.index, seen.tokens, seen.token_digest, entry.run, tensors, extra)

    def _origin(self, entry: Entry, seen: Seen) -> dict[str, str]:
        """What the file tells of its layers, else its run."""
        layers = (self.runs.identity_of(entry.run) or {}).get("layers")
        told = seen.extra.get("layers") or (json.dumps(layers) if layers else "")
        return {"layers": told} if told else {}

    def _mask(self, entry: Entry, seen: Seen) -> bytes:
        """The record's mask, which must be the file's where that keeps one. Raises Unusable, BadDataset."""
        records = self.means.records
        if records is None:
            if seen.mask is None and self.target.layout.name != "speculators":
                raise Unusable("keeps no loss mask: give the fixed records with --dataset")
            return bytes(seen.mask or bytes(seen.tokens))
        if entry.index >= len(records) or records.items[entry.index].token_digest != seen.token_digest:
            raise Unusable("is not of the fixed record of its index")
        mask = records.read(entry.index).mask
        if seen.mask is not None and bytes(seen.mask) != mask:
            raise Unusable("has another loss mask than its record")
        return mask

    def _final(self, seen: Seen, final: Any) -> tuple[ckpt.Buffer, str]:
        """The final state as the new layout holds it, and which it is. Raises Unusable."""
        have = seen.extra.get("norm") or seen.norm or self.source.layout.norms[0]
        holds = self.target.layout.norms
        if have in holds or (have == SURROGATE and PRE in holds):
            self.tally.surrogates += have == SURROGATE
            return np.ascontiguousarray(final).data.cast("B"), have
        if have == SURROGATE:
            raise Unusable("holds a surrogate of the state before the norm: export from the store that it was made of")
        if have not in (PRE, POST):
            raise Unusable(f"says that its final state is {have!r}-norm, which is not known")
        norm = self.means.norm
        if norm is None:
            raise Unusable(f"holds the final state {have}-norm, the new layout {holds[0]}-norm: give the model with --model")
        states = to_float32(final.tobytes(), seen.dtype).reshape(final.shape)
        if have == PRE:
            return to_raw(norm.apply(states), seen.dtype), POST
        if not self.means.surrogate:
            raise Unusable(
                "holds the final state after the norm; the one before it can only be made up to a factor a token: allow it with --surrogate"
            )
        norm.judge_undoable()
        raw = to_raw(norm.undo(states), seen.dtype)
        try:
            norm.judge_back(to_float32(raw, seen.dtype).reshape(final.shape), states, seen.dtype)
        except ValueError as error:
            raise Unusable(str(error)) from None
        self.tally.surrogates += 1
        return raw, SURROGATE

    def _tell_run(self, sample: Sample) -> None:
        """Enter the sample's run in the new store, once. Raises GiveUp, OSError."""
        if sample.run in self._runs_told or sample.run == inventory.ADOPTED:
            return
        old = next(item for item in self.runs.runs if item.get("run") == sample.run)
        identity = {**old.get("identity", {}), "norm": sample.extra["norm"]}
        known = self.target.runs().identity_of(sample.run)
        if known is None:
            about: dict[str, Any] = {"layout": self.source.layout.name, "store": os.path.abspath(self.source.path)}
            if self.means.norm is not None:
                about["norm_digest"] = self.means.norm.digest
            provenance = {**old.get("provenance", {}), "exported_from": about}
            self.target.add_run(sample.run, identity, provenance, old.get("started", 0), old.get("instance", ""))
        elif inventory.differing(known, identity):
            name = inventory.differing(known, identity)[0]
            raise GiveUp(f"{self.target.path} knows the run {sample.run} with another {name}: export into a directory of its own")
        self._runs_told.add(sample.run)

    def _judge_written(self, made: Entry) -> None:
        """From the disk, not from memory. Raises GiveUp."""
        path = self.target.path_of(made.index)
        with open(path, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest, seen = file_digest(path, made.bytes), self.target.layout.look(path)
        if digest != made.digest or seen.token_digest != made.token_digest:
            raise GiveUp(f"{path} reads back other bytes than were written: see to the disk of {self.target.path}")


# --- the command -------------------------------------------------------------------------------------------------------


class _Side(argparse.Action):
    """`--layout` belongs to the `--from` or `--to` before it."""

    def __call__(self, parser: Any, space: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if option == "--layout":
            side = getattr(space, "side", "from")
            setattr(space, f"{side}_layout", values)
        else:
            space.side = (option or "").lstrip("-")
            setattr(space, f"{space.side}_store", values)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="relight export", description="Copy samples into another layout, or to another place.")
    parser.set_defaults(from_layout="specforge", to_layout=None, from_store=None, to_store=None)
    parser.add_argument("--from", action=_Side, metavar="STORE", help="the store to read")
    parser.add_argument("--to", action=_Side, metavar="DIR", help="the store to make or go on with; with one --layout also HOST:DIR")
    parser.add_argument("--layout", action=_Side, metavar="NAME", help="after --from and after --to: specforge, speculators or modelopt")
    parser.add_argument("--dataset", metavar="DIR", help="the fixed records: `dataset` in the state directory")
    parser.add_argument("--model", metavar="DIR", help="the model, for the weight of its last norm")
    parser.add_argument("--surrogate", action="store_true", help="allow a state before the norm that is right up to a factor a token")
    parser.add_argument("--only", metavar="A-B,C", help="these samples alone")
    parser.add_argument("--indices", metavar="FILE", help="the samples that a file names alone")
    options = parser.parse_args(argv)
    if not options.from_store or not options.to_store:
        parser.error("--from and --to are needed")
    return options


def say(text: str) -> None:
    print(f"relight export: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `relight export`; the exit code."""
    options = _options(argv)
    try:
        wanted = selection.chosen(options.only, options.indices)
        source = Store(options.from_store, layout(options.from_layout, options.dataset))
        if not os.path.isdir(source.path):
            raise BadInput(f"there is no store {source.path}")
        if options.to_layout not in (None, options.from_layout) and transfer.is_remote(options.to_store):
            raise BadInput("another layout is made here; then carry it to another host with a second export, of that layout alone")
        if options.to_layout in (None, options.from_layout):
            return transfer.run(source, options.to_store, wanted, say)
        code, sentence = _convert(options, source, wanted)
    except (BadInput, UnknownLayout, Locked) as error:
        code, sentence = BAD_INPUT, str(error)
    except BadDataset as error:
        code, sentence = BAD_INPUT, f"the fixed records cannot be read: {error}"
    except (GiveUp, NewerStore) as error:
        code, sentence = GAVE_UP, str(error)
    except (OSError, ValueError) as error:
        code, sentence = GAVE_UP, f"{error}; mend that, then run it again: it goes on where it was"
    say(sentence)
    return code


def _convert(options: argparse.Namespace, source: Store, wanted: frozenset[int] | None) -> tuple[int, str]:
    """Raises BadInput, GiveUp, and what reading and writing raise."""
    target = Store(options.to_store, layout(options.to_layout, options.dataset))
    if os.path.realpath(target.path) == os.path.realpath(source.path):
        raise BadInput("the new store must be another directory than the old one")
    records = FixedRecords(options.dataset) if options.dataset else None
    try:
        with target.exclusive("relight export"):
            target.sweep()
            work = Export(source, target, Means(records, _norm(options, source), options.surrogate))
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: setattr(work, "stopping", True))
            indices = sorted(work.entries if wanted is None else wanted)
            if not indices:
                raise BadInput(f"no manifest in {source.path} knows a sample: let the inventory judge and enter them first")
            work.run(indices, _there(target, options.dataset))
    finally:
        if records is not None:
            records.close()
    code = STOPPED if work.stopping else SOME_GIVEN_UP if work.tally.left else DONE
    return code, ("stopped: " if code == STOPPED else "") + work.tally.sentence()


def _norm(options: argparse.Namespace, source: Store) -> norms.FinalNorm | None:
    """The model's last norm, where it is named. Raises BadInput."""
    if not options.model:
        return None
    for index in source.entries():
        with suppress(ckpt.Torn, ckpt.Strange, OSError):
            return norms.load(options.model, source.layout.look(source.path_of(index)).hidden_size)
    return None


def _there(target: Store, dataset: str | None) -> frozenset[int]:
    """What is exported already and intact; what is not goes to quarantine and is made again. Raises BadInput, OSError."""
    tally = inventory.take(
        target.path, target.layout.name, dataset, None, "headers", look_at_content, lambda found: surveying.enter(target, found)
    )
    strange = [found for found in tally.found if found.verdict in (inventory.FOREIGN, inventory.UNJUDGED)]
    if strange:
        raise BadInput(f"{target.path} holds {len(strange)} files of something else ({strange[0].path} {strange[0].why}): export elsewhere")
    utc = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for found in tally.found:
        if found.verdict in inventory.MOVED:
            target.quarantine(found.path, found.verdict, utc, found.why)
    return frozenset(tally.intact_indices())
