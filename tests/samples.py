# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Small samples and stores for tests: `fill(folder, [12, 7, 30])` is a store with three samples and its fixed records."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from random import Random

import xxhash
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import TensorBytes
from ansible_collections.relight.recovery.plugins.module_utils.dataset import FixedWriter
from ansible_collections.relight.recovery.plugins.module_utils.layouts import Sample, layout
from ansible_collections.relight.recovery.plugins.module_utils.records import Raw, id_bytes, record_digest, token_digest
from ansible_collections.relight.recovery.plugins.module_utils.store import Entry, Store

HIDDEN = 8
RUN = "run-1"
IDENTITY = {"layers": [1, 14, 26], "norm": "post", "dtype": "float32", "hidden_size": HIDDEN, "weights": "w1"}


def ids_of(index: int, tokens: int) -> list[int]:
    return [1000 * index + number for number in range(tokens)]


def mask_of(tokens: int) -> list[int]:
    return [int(number >= tokens // 2) for number in range(tokens)]


def floats(count: int, seed: int) -> bytes:
    random = Random(seed)
    return array("f", (random.uniform(-1, 1) for _ in range(count))).tobytes()


def sample(
    index: int,
    tokens: int,
    *,
    ids: list[int] | None = None,
    mask: list[int] | None = None,
    run: str = RUN,
    extra: dict[str, str] | None = None,
    states: bytes | None = None,
    hidden: int = HIDDEN,
) -> Sample:
    """Sample `index` of a run of `tokens` tokens; the rest is made up from the index, unless it is given."""
    ids = ids_of(index, tokens) if ids is None else ids
    mask = mask_of(tokens) if mask is None else mask
    tensors = {
        "input_ids": TensorBytes("int64", (tokens,), id_bytes(ids)),
        "loss_mask": TensorBytes("int64", (tokens,), id_bytes(mask)),
        "hidden_state": TensorBytes("float32", (1, tokens, hidden), floats(tokens * hidden, index) if states is None else states),
        "aux_hidden_state": TensorBytes("float32", (1, tokens, 3 * hidden), floats(3 * tokens * hidden, -index)),
    }
    told = {"layers": "[1, 14, 26]", "norm": "post", "dtype": "float32"} if extra is None else extra
    return Sample(index, tokens, token_digest(ids), run, tensors, told)


def put(store: Store, item: Sample) -> Entry:
    return store.add(item, xxhash.xxh3_128(), 1000.0 + item.index)


def fix(folder: Path, lengths: list[int], names: list[str | None] | None = None) -> Path:
    """The fixed records of records of these lengths, with these ids where they are given."""
    with FixedWriter(str(folder), {"tokenizer_digest": "t"}) as writer:
        for index, tokens in enumerate(lengths):
            ids, mask = ids_of(index, tokens), mask_of(tokens)
            writer.append(Raw(index, names[index] if names else None, record_digest(ids, mask)), ids, mask)
    return folder


@dataclass(frozen=True)
class Filled:
    store: Store
    dataset: Path

    def file(self, index: int) -> Path:
        return Path(self.store.path_of(index))


def fill(folder: Path, lengths: list[int], but: tuple[int, ...] = (), kind: str = "specforge", norm: str = "post") -> Filled:
    """A store with a sample for each length, but for the indices in `but`, beside its fixed records."""
    names: list[str | None] = [f"conv {index}" for index in range(len(lengths))]
    dataset = fix(folder / "dataset", lengths, names if kind == "modelopt" else None)
    store = Store(str(folder / "store"), layout(kind, str(dataset)))
    store.add_run(RUN, {**IDENTITY, "norm": norm}, {"sglang": "0.5.23"}, 1.0, "instance-1")
    for index, tokens in enumerate(lengths):
        if index not in but:
            put(store, sample(index, tokens, extra={"layers": "[1, 14, 26]", "norm": norm, "dtype": "float32"}))
    return Filled(store, dataset)
