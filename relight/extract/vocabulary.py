# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`relight vocab-mapping`: SpecForge's vocab_mapping.pt (d2t, t2d), built from the whole dataset whatever is extracted so far.

A draft model that knows N of the target's tokens gets those that its loss meets most often; of tokens that are met equally often
the lower ids, so that the same dataset always makes the same file. The file keeps what it was made of, and can be checked.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from ansible_collections.relight.recovery.plugins.module_utils import ckpt
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import TensorBytes
from ansible_collections.relight.recovery.plugins.module_utils.dataset import BadDataset, FixedRecords
from ansible_collections.relight.recovery.plugins.module_utils.durable import replacing
from ansible_collections.relight.recovery.plugins.module_utils.weights import CONFIG, INDEX

from relight.extract.config import BAD_INPUT, DONE, GAVE_UP, BadInput
from relight.extract.states import Array

BATCH_TOKENS = 1 << 22
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Mapping:
    """`used` are the target ids that the draft model knows, in order; `about` says what they were counted from."""

    used: Array
    target_size: int
    about: dict[str, str]

    @property
    def d2t(self) -> Array:
        """What is added to a draft id to make the target's."""
        return self.used - np.arange(len(self.used), dtype="<i8")

    @property
    def t2d(self) -> Array:
        """Which target ids the draft model knows."""
        known = np.zeros(self.target_size, dtype=np.bool_)
        known[self.used] = True
        return known

    @property
    def fingerprint(self) -> str:
        state = blake2b(json.dumps(self.about, sort_keys=True).encode(), digest_size=16)
        state.update(self.d2t.astype("<i8").tobytes() + self.t2d.tobytes())
        return state.hexdigest()


def count(records: FixedRecords, target_size: int, max_length: int | None) -> Array:
    """How often the loss meets each token. Raises BadInput for a token beyond the vocabulary, BadDataset."""
    counts = np.zeros(target_size, dtype="<i8")
    waiting: list[Array] = []
    held = 0
    for index in range(len(records)):
        tokens = records.read(index)
        ids = np.asarray(tokens.ids, dtype="<i8")[:max_length]
        chosen = ids[np.frombuffer(tokens.mask, dtype=np.uint8)[:max_length] == 1]
        if len(chosen) and int(chosen.max()) >= target_size:
            raise BadInput(f"record {index} holds the token {int(chosen.max())}, the model's vocabulary has {target_size}")
        waiting.append(chosen)
        held += len(chosen)
        if held >= BATCH_TOKENS or index == len(records) - 1:
            counts += np.bincount(np.concatenate(waiting), minlength=target_size)
            waiting, held = [], 0
    return counts


def build(records: FixedRecords, draft_size: int, target_size: int, max_length: int | None = None) -> Mapping:
    """The mapping of a dataset. Raises BadInput, BadDataset."""
    if not 0 < draft_size <= target_size:
        raise BadInput(f"a draft vocabulary of {draft_size} does not fit into the target's {target_size}")
    counts = count(records, target_size, max_length)
    used = np.sort(np.lexsort((np.arange(target_size), -counts))[:draft_size]).astype("<i8")
    total = int(counts.sum())
    about = {
        "dataset": records.digest,
        "records": str(len(records)),
        "max_length": str(max_length or ""),
        "tokens": str(total),
        "tokens_known": str(int(counts[used].sum())),
    }
    return Mapping(used, target_size, about)


def write(path: str, mapping: Mapping) -> None:
    """As torch.save would write {"d2t", "t2d"}, durably, with what it was made of beside them. Raises OSError."""
    tensors = {
        "d2t": TensorBytes("int64", mapping.d2t.shape, mapping.d2t.astype("<i8").tobytes()),
        "t2d": TensorBytes("bool", mapping.t2d.shape, mapping.t2d.tobytes()),
    }
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with replacing(path) as handle:
        ckpt.write(handle, tensors, {**mapping.about, "fingerprint": mapping.fingerprint})


def read(path: str) -> tuple[Array, Array, dict[str, str]]:
    """d2t, t2d and what the file says of its origin. Raises BadInput."""
    try:
        header = ckpt.read_header(path)
        broken = ckpt.broken_entries(path, header)
        d2t, t2d = header.tensors["d2t"], header.tensors["t2d"]
        if broken or d2t.dtype != "int64" or t2d.dtype != "bool" or len(d2t.shape) != 1 or len(t2d.shape) != 1:
            raise BadInput(f"{path} is damaged, or not a mapping of SpecForge")
        values = np.frombuffer(ckpt.read_tensor(path, d2t), "<i8"), np.frombuffer(ckpt.read_tensor(path, t2d), np.bool_)
    except (ckpt.Torn, ckpt.Strange, KeyError) as error:
        raise BadInput(f"{path} is not a mapping of SpecForge: it {error}") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    return values[0], values[1], header.extra


def faults(path: str, want: Mapping) -> list[str]:
    """What is wrong with a file that should be this mapping, as sentences. Raises BadInput."""
    d2t, t2d, extra = read(path)
    found = []
    if len(d2t) != len(want.used) or len(t2d) != want.target_size:
        return [f"maps {len(d2t)} of {len(t2d)} tokens, not {len(want.used)} of {want.target_size}"]
    if not np.array_equal(np.flatnonzero(t2d), d2t + np.arange(len(d2t))):
        found.append("contradicts itself: the tokens that t2d marks are not those of d2t")
    elif not np.array_equal(d2t, want.d2t):
        found.append(f"knows other tokens than the whole dataset asks for ({int((t2d & ~want.t2d).sum())} of {len(d2t)} differ)")
    if extra.get("fingerprint", want.fingerprint) != want.fingerprint:
        found.append("was made of another dataset or with another length")
    return found


# --- the model ---------------------------------------------------------------------------------------------------------


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as handle:
            value = json.load(handle)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}


def _size(config: dict[str, Any], name: str) -> int | None:
    nested = config.get("text_config")
    value = config.get(name, nested.get(name) if isinstance(nested, dict) else None)
    return value if isinstance(value, int) else None


def trainer_notes(model_dir: str) -> list[str]:
    """What SpecForge's target head must be told of this model, or does not find in it. Raises BadInput."""
    config, notes = _json(os.path.join(model_dir, CONFIG)), []
    for name in ("hidden_size", "vocab_size"):
        if name not in config and _size(config, name) is not None:
            notes.append(
                f"its config has {name} inside text_config, and SpecForge's target head reads it at the top: give it a config of its own"
            )
    if len(glob.glob(os.path.join(glob.escape(model_dir), "*.index.json"))) != 1:
        return [*notes, f"SpecForge's target head wants one *.index.json beside the weights: write {INDEX}"]
    names = _json(glob.glob(os.path.join(glob.escape(model_dir), "*.index.json"))[0]).get("weight_map", {})
    heads = [name for name in names if name == HEAD or name.endswith(f".{HEAD}")]
    if HEAD in heads:
        return notes
    if heads:
        return [*notes, f"its head is called {heads[0]}, not {HEAD}: set lm_head_key to that in SpecForge's configuration"]
    return [*notes, f"it has no {HEAD}: where the head is the embedding, set lm_head_key to the embedding's name"]


# --- the command -------------------------------------------------------------------------------------------------------


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="relight vocab-mapping", description="Make or check SpecForge's vocab_mapping.pt.")
    parser.add_argument("--dataset", required=True, metavar="DIR", help="the fixed records: `dataset` in the state directory")
    parser.add_argument("--to", required=True, metavar="FILE", help="the file to make, or with --check to look at")
    parser.add_argument("--draft-vocab-size", type=int, metavar="N", help="how many tokens the draft model knows")
    parser.add_argument("--draft-config", metavar="FILE", help="the draft model's configuration, which says so too")
    parser.add_argument("--target-vocab-size", type=int, metavar="N", help="how many tokens the model knows; else --model says so")
    parser.add_argument("--model", metavar="DIR", help="the model's directory")
    parser.add_argument("--max-length", type=int, metavar="N", help="count the first N tokens of a record, as the trainer cuts them")
    parser.add_argument("--check", action="store_true", help="say whether the file is the one that the dataset asks for")
    return parser.parse_args(argv)


def _sizes(options: argparse.Namespace) -> tuple[int, int]:
    """The sizes of the draft's and the target's vocabulary. Raises BadInput."""
    draft, target = options.draft_vocab_size, options.target_vocab_size
    if draft is None and options.draft_config:
        draft = _size(_json(options.draft_config), "draft_vocab_size")
    if target is None and options.model:
        target = _size(_json(os.path.join(options.model, CONFIG)), "vocab_size")
    if draft is None or target is None:
        missing = "--draft-vocab-size or --draft-config" if draft is None else "--target-vocab-size or --model"
        raise BadInput(f"give {missing}, with the size of the vocabulary")
    return draft, target


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 when the file is right, 1 when a check finds it wrong."""
    options = _options(argv)
    try:
        draft, target = _sizes(options)
        with FixedRecords(options.dataset) as records:
            mapping = build(records, draft, target, options.max_length)
        if not options.check:
            write(options.to, mapping)
        wrong = faults(options.to, mapping)
        notes = trainer_notes(options.model) if options.model else []
    except (BadInput, BadDataset, FileNotFoundError) as error:
        print(f"relight vocab-mapping: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f"relight vocab-mapping: {error}", file=sys.stderr)
        return GAVE_UP
    for note in notes:
        print(f"note: {options.model}: {note}")
    known, total = int(mapping.about["tokens_known"]), int(mapping.about["tokens"])
    for fault in wrong:
        print(f"{options.to} {fault}")
    if not wrong:
        share = f"{100 * known / total:.2f}% of {total} tokens" if total else "no token"
        print(f"{options.to}: {draft} of {target} tokens, {share} that the loss meets, fingerprint {mapping.fingerprint}")
    return 1 if wrong else DONE
