# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""One record of the training data: its normal form and its digests. Pure; standard library only, Python 3.9 and newer."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

ID_KEYS = ("id", "conversation_id", "uuid")
TEXT_KEYS = ("messages", "conversations")
# ShareGPT's names of the speakers, and ours.
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system", "tool": "tool"}
_DIGEST_BYTES = 16


class BadRecord(Exception):
    """A record that cannot be used; the message is one sentence about it."""


@dataclass(frozen=True)
class Raw:
    """A record as the dataset has it: token ids with their mask, or messages that are yet to be tokenized.

    `source` is the digest of what the record says, so that a changed record is seen without a tokenizer.
    """

    position: int
    id: str | None
    source: str
    input_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None


def id_bytes(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int64, the form in which they are stored and digested. Raises OverflowError, TypeError."""
    words = array("q", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def token_digest_of_bytes(data: bytes | bytearray | memoryview) -> str:
    """The token digest of ids that are little-endian int64 already."""
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def token_digest(ids: Iterable[int]) -> str:
    """The digest that ties a sample to its record's tokens."""
    return token_digest_of_bytes(id_bytes(ids))


def record_digest(ids: Iterable[int], mask: Iterable[int]) -> str:
    """The digest of a fixed record: its token ids and its loss mask."""
    data, flags = id_bytes(ids), bytes(mask)
    state = blake2b(digest_size=_DIGEST_BYTES)
    state.update(len(data).to_bytes(8, "little"))
    state.update(data)
    state.update(flags)
    return state.hexdigest()


class Whole:
    """The digest of a whole dataset, fed with its records' digests in order."""

    def __init__(self) -> None:
        self._state = blake2b(digest_size=_DIGEST_BYTES)

    def add(self, digest: str) -> None:
        self._state.update(bytes.fromhex(digest))

    def hexdigest(self) -> str:
        return self._state.hexdigest()


def _digest_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()


def _integers(value: Any) -> tuple[int, ...] | None:
    """A list of integers, also one that is wrapped in a list of one, as tensors of shape [1, L] are written."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return None
    return tuple(value)


def _ids_and_mask(raw: dict[str, Any], where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ids = _integers(raw["input_ids"])
    if not ids:
        raise BadRecord(f"{where}: input_ids is not a list of token ids")
    if not all(0 <= item < 1 << 31 for item in ids):
        raise BadRecord(f"{where}: input_ids holds a number that is no token id")
    if "loss_mask" not in raw:
        raise BadRecord(f"{where}: input_ids without a loss_mask")
    mask = _integers([int(item) if isinstance(item, bool) else item for item in _flat(raw["loss_mask"])])
    if mask is None or not all(item in (0, 1) for item in mask):
        raise BadRecord(f"{where}: loss_mask is not a list of zeros and ones")
    if len(mask) != len(ids):
        raise BadRecord(f"{where}: loss_mask has {len(mask)} entries for {len(ids)} token ids")
    return ids, mask


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return value if isinstance(value, list) else [None]


def _messages(turns: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{where}: its messages are not a list of turns")
    found: list[dict[str, str]] = []
    for number, turn in enumerate(turns):
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadRecord(f"{where}: turn {number} lacks a role or a text")
        if role not in ROLES:
            raise BadRecord(f"{where}: turn {number} has the unknown role {role[:40]!r}")
        found.append({"role": ROLES[role], "content": content})
    if not any(turn["content"].strip() for turn in found):
        raise BadRecord(f"{where}: all its turns are empty")
    return tuple(found)


def normalise(raw: Any, position: int) -> Raw:
    """One entry of a dataset in normal form; `position` counts from 0. Raises BadRecord."""
    where = f"record {position}"
    if not isinstance(raw, dict):
        raise BadRecord(f"{where}: is not an object")
    name = next((raw[key] for key in ID_KEYS if isinstance(raw.get(key), (str, int)) and not isinstance(raw.get(key), bool)), None)
    identity = None if name is None else str(name)
    if raw.get("input_ids") is not None:
        ids, mask = _ids_and_mask(raw, where)
        return Raw(position, identity, record_digest(ids, mask), input_ids=ids, loss_mask=mask)
    for key in TEXT_KEYS:
        if raw.get(key) is not None:
            turns = _messages(raw[key], where)
            return Raw(position, identity, _digest_json(turns), messages=turns)
    raise BadRecord(f"{where}: has neither input_ids nor messages")


def equal_ids(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether two sequences hold the same token ids, whatever their types."""
    return len(left) == len(right) and id_bytes(left) == id_bytes(right)
