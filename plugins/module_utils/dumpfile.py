# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Is one dump of the plugin what its request asked for? One judgement for the gate and for the client.

Standard library only; a caller with array arithmetic hands in a faster look at the values.
"""

from __future__ import annotations

import array
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Optional

from ansible_collections.relight.recovery.plugins.module_utils import safetensors
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import Buffer, TensorBytes
from ansible_collections.relight.recovery.plugins.module_utils.records import token_digest, token_digest_of_bytes

FORMAT = "relight-dump-1"
NORM = "post"
SERVER_FILE = "server.json"
IDS, FINAL, AUX = "input_ids", "hidden_state", "aux_hidden_state"
# Kinds of faults.
FILE, META, INSTANCE, TOKENS, VALUES = "file", "metadata", "instance", "tokens", "values"
STATES = ("float32", "float16", "bfloat16")

# What is wrong with the raw little-endian numbers of a dtype, as the end of a sentence, or None.
ValueLook = Callable[[Buffer, str], Optional[str]]


class BadDump(Exception):
    """A dump that must not become a sample; the message says why, `kind` what is wrong in a word."""

    def __init__(self, message: str, kind: str = META) -> None:
        super().__init__(message)
        self.kind = kind


class OtherInstance(BadDump):
    """A dump of another life of the server than the request was sent to."""


@dataclass(frozen=True)
class Server:
    """What the plugin wrote about the server that loaded it."""

    instance: str
    layers: tuple[int, ...]
    hidden_size: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """What the dump of one request must be. None: not known here, and so not compared."""

    rid: str
    digest: str
    tokens: int
    layers: tuple[int, ...] | None = None
    hidden_size: int | None = None
    instance: str | None = None
    norm: str = NORM


@dataclass(frozen=True)
class Dump:
    """A judged dump. Its tensors are views of the mapped file."""

    tensors: Mapping[str, TensorBytes]
    dtype: str
    meta: Mapping[str, str]


@dataclass(frozen=True)
class Fault:
    kind: str
    what: str


def asked(
    rid: str, ids: Iterable[int], layers: tuple[int, ...] | None = None, hidden_size: int | None = None, instance: str | None = None
) -> Expected:
    """What is expected of a request for these ids."""
    known = tuple(ids)
    return Expected(rid, token_digest(known), len(known), layers, hidden_size, instance)


def read_server(dump_dir: str) -> Server | None:
    """The server's own word about itself, or None where it has not written one that can be read."""
    try:
        with open(os.path.join(dump_dir, SERVER_FILE), encoding="utf-8") as handle:
            fields = json.load(handle)
        layers = tuple(int(layer) for layer in fields["layers"])
        return Server(str(fields["instance"]), layers, int(fields["hidden_size"]), fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- judging -----------------------------------------------------------------------------------------------------------


def value_fault(states: Buffer, dtype: str) -> str | None:
    """What no hidden state looks like: a number that is not finite, or nothing but zeros. Unknown dtypes are not judged."""
    data = bytes(states)
    if data.count(0) == len(data):
        return "is all zeros"
    exponent = {"bfloat16": ("H", 0x7F80), "float16": ("H", 0x7C00), "float32": ("I", 0x7F800000)}.get(dtype)
    if exponent:
        code, mask = exponent
        broken = sum(1 for bits in _native(data, code) if bits & mask == mask)
    elif dtype == "float64":
        broken = sum(1 for value in _native(data, "d") if not math.isfinite(value))
    else:
        broken = 0
    return f"holds {broken} values that are not finite" if broken else None


def _native(data: bytes, code: str) -> array.array[Any]:
    values: array.array[Any] = array.array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


@contextmanager
def judged(path: str, want: Expected, look: ValueLook = value_fault) -> Iterator[Dump]:
    """The dump at `path`, judged; valid within the block. Raises BadDump for the first thing that is wrong, OSError."""
    try:
        with safetensors.mapped(path) as (header, tensors):
            for fault in _faults(header.metadata, tensors, want, look):
                raise (OtherInstance if fault.kind == INSTANCE else BadDump)(fault.what, fault.kind)
            yield Dump(tensors, tensors[FINAL].dtype, header.metadata)
    except safetensors.BadFile as error:
        raise BadDump(f"the dump is {error.kind}: {error}", FILE) from None


def faults(path: str, want: Expected, look: ValueLook = value_fault) -> list[str]:
    """All that is wrong with the dump at `path`, as sentences; none when it is right. Raises OSError where it cannot be read."""
    try:
        with safetensors.mapped(path) as (header, tensors):
            return [fault.what for fault in _faults(header.metadata, tensors, want, look)]
    except safetensors.BadFile as error:
        return [f"the dump is {error.kind}: {error}"]


def _faults(metadata: Mapping[str, str], tensors: Mapping[str, TensorBytes], want: Expected, look: ValueLook) -> Iterator[Fault]:
    yield from _metadata_faults(metadata, want)
    yield from _tensor_faults(tensors, want, look)


def _metadata_faults(metadata: Mapping[str, str], want: Expected) -> Iterator[Fault]:
    wanted = [
        (META, "format", FORMAT),
        (META, "rid", want.rid),
        (INSTANCE, "instance", want.instance),
        (TOKENS, "tokens", str(want.tokens)),
        (TOKENS, "token_digest", want.digest),
        (META, "norm", want.norm),
    ]
    for kind, key, value in wanted:
        if value is not None and metadata.get(key) != value:
            yield Fault(kind, f"{key} is {metadata.get(key)!r}, not {value!r}")
    if want.layers is not None and _layers(metadata.get("layers", "")) != want.layers:
        yield Fault(META, f"layers are {metadata.get('layers')!r}, not {list(want.layers)}")


def _layers(text: str) -> tuple[int, ...] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return tuple(value) if isinstance(value, list) and all(isinstance(item, int) for item in value) else None


def _tensor_faults(tensors: Mapping[str, TensorBytes], want: Expected, look: ValueLook) -> Iterator[Fault]:
    absent = [name for name in (IDS, FINAL, AUX) if name not in tensors]
    if absent:
        yield from (Fault(META, f"it holds no {name}") for name in absent)
        return
    wrong = list(_shape_faults(tensors, want))
    if wrong:
        yield from wrong
        return
    if token_digest_of_bytes(memoryview(tensors[IDS].buffer)) != want.digest:
        yield Fault(TOKENS, "input_ids are not those of the request")
    for name in (FINAL, AUX):
        said = look(tensors[name].buffer, tensors[name].dtype)
        if said:
            yield Fault(VALUES, f"{name} {said}")


def _shape_faults(tensors: Mapping[str, TensorBytes], want: Expected) -> Iterator[Fault]:
    width = want.hidden_size or (tensors[FINAL].shape[-1] if tensors[FINAL].shape else 0)
    blocks = 3 if want.layers is None else len(want.layers)
    shapes = {IDS: (want.tokens,), FINAL: (1, want.tokens, width), AUX: (1, want.tokens, blocks * width)}
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            yield Fault(TOKENS if name == IDS else META, f"{name} has the shape {list(tensors[name].shape)}, not {list(shape)}")
    if tensors[IDS].dtype != "int64":
        yield Fault(META, f"input_ids are {tensors[IDS].dtype}, not int64")
    if tensors[FINAL].dtype not in STATES or tensors[AUX].dtype != tensors[FINAL].dtype:
        yield Fault(META, f"the states are {tensors[FINAL].dtype} and {tensors[AUX].dtype}")
