# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""One dump of the server, judged: is it whole, of this request, of these tokens, of these layers, and finite?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from ansible_collections.relight.recovery.plugins.module_utils import safetensors_file
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import Buffer, TensorBytes
from ansible_collections.relight.recovery.plugins.module_utils.records import token_digest_of_bytes

FORMAT = "relight-dump-1"
NORM = "post"
SERVER_FILE = "server.json"
IDS, FINAL, AUX = "input_ids", "hidden_state", "aux_hidden_state"
# Per dtype: its bits as an integer type, and the exponent that NaN and infinity have.
_EXPONENTS = {"float32": ("<u4", 0x7F800000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80)}
_CHUNK = 1 << 22  # elements looked at in one go, so that a sample of gigabytes costs megabytes


class BadDump(Exception):
    """A dump that must not become a sample; the message says why."""


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
    """What the dump of one request must be."""

    rid: str
    instance: str
    digest: str
    tokens: int
    layers: tuple[int, ...]
    hidden_size: int


@dataclass(frozen=True)
class Dump:
    """A judged dump. Its tensors are views of the mapped file."""

    tensors: Mapping[str, TensorBytes]
    dtype: str
    meta: Mapping[str, str]


def read_server(dump_dir: str) -> Server | None:
    """The server's own word about itself, or None where it has not written one that can be read."""
    try:
        with open(os.path.join(dump_dir, SERVER_FILE), encoding="utf-8") as handle:
            fields = json.load(handle)
        layers = tuple(int(layer) for layer in fields["layers"])
        return Server(str(fields["instance"]), layers, int(fields["hidden_size"]), fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def judged(path: str, want: Expected) -> Iterator[Dump]:
    """The dump at `path`, judged; valid within the block. Raises BadDump, OSError."""
    try:
        with safetensors_file.mapped(path) as (header, tensors):
            _judge_metadata(header.metadata, want)
            dtype = _judge_shapes(tensors, want)
            if token_digest_of_bytes(memoryview(tensors[IDS].buffer)) != want.digest:
                raise BadDump("its input_ids are not those of the record")
            for name in (FINAL, AUX):
                if not finite(tensors[name].buffer, dtype):
                    raise BadDump(f"its {name} is not finite (NaN or infinity)")
            yield Dump(tensors, dtype, header.metadata)
    except safetensors_file.Broken as error:
        raise BadDump(f"it {error}") from None


def finite(states: Buffer, dtype: str) -> bool:
    """Is every number of the raw little-endian states finite?"""
    bits, exponent = _EXPONENTS[dtype]
    raw = np.frombuffer(states, dtype=bits)
    return not any(((raw[begin : begin + _CHUNK] & exponent) == exponent).any() for begin in range(0, len(raw), _CHUNK))


def to_float32(states: Buffer, dtype: str) -> np.ndarray[Any, Any]:
    """The raw states as a flat float32 array."""
    if dtype == "bfloat16":
        return (np.frombuffer(states, dtype="<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(states, dtype="<f4" if dtype == "float32" else "<f2").astype("<f4", copy=False)


def _judge_metadata(meta: Mapping[str, str], want: Expected) -> None:
    if meta.get("format") != FORMAT:
        raise BadDump(f"its format is {meta.get('format')!r}, not {FORMAT}")
    if meta.get("rid") != want.rid:
        raise BadDump(f"it belongs to request {meta.get('rid')!r}")
    if meta.get("instance") != want.instance:
        raise OtherInstance(f"it comes from the server instance {meta.get('instance')}, not from {want.instance}")
    if meta.get("token_digest") != want.digest or meta.get("tokens") != str(want.tokens):
        raise BadDump(f"it is of other tokens ({meta.get('tokens')} of them) than the record's {want.tokens}")
    if meta.get("norm") != NORM:
        raise BadDump(f"its final state is {meta.get('norm')!r}-norm, not {NORM}-norm")
    try:
        layers = tuple(json.loads(meta.get("layers", "")))
    except (ValueError, TypeError):
        layers = ()
    if layers != want.layers:
        raise BadDump(f"it holds the layers {meta.get('layers')}, not {list(want.layers)}")


def _judge_shapes(tensors: Mapping[str, TensorBytes], want: Expected) -> str:
    """The dtype of the states, once all shapes are right. Raises BadDump."""
    shapes = {
        IDS: (want.tokens,),
        FINAL: (1, want.tokens, want.hidden_size),
        AUX: (1, want.tokens, len(want.layers) * want.hidden_size),
    }
    for name, shape in shapes.items():
        if name not in tensors:
            raise BadDump(f"it holds no {name}")
        if tensors[name].shape != shape:
            raise BadDump(f"its {name} has the shape {list(tensors[name].shape)}, not {list(shape)}")
    dtype = tensors[FINAL].dtype
    if dtype not in _EXPONENTS or tensors[AUX].dtype != dtype or tensors[IDS].dtype != "int64":
        raise BadDump(f"its types are {tensors[IDS].dtype}, {dtype} and {tensors[AUX].dtype}")
    return dtype
