# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Is one dump of the plugin what its request asked for? Reads the file with the standard library only."""

from __future__ import annotations

import array
import json
import math
import sys
from dataclasses import dataclass

from ansible_collections.relight.recovery.plugins.module_utils import safetensors
from ansible_collections.relight.recovery.plugins.module_utils.records import token_digest

FORMAT = "relight-dump-1"


@dataclass(frozen=True)
class Expected:
    """What the request asked for. None: not known here, and so not compared."""

    rid: str
    ids: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    hidden_size: int | None = None
    instance: str | None = None


def faults(path: str, expected: Expected) -> list[str]:
    """What is wrong with the dump at `path`, as sentences; none when it is right. Raises OSError where it cannot be read."""
    try:
        header = safetensors.read_header(path)
    except safetensors.BadFile as error:
        return [f"the dump is {error.kind}: {error}"]
    return [*_metadata_faults(header.metadata, expected), *_tensor_faults(path, header, expected)]


def _metadata_faults(metadata: dict[str, str], expected: Expected) -> list[str]:
    wanted = {
        "format": FORMAT,
        "rid": expected.rid,
        "tokens": str(len(expected.ids)),
        "token_digest": token_digest(expected.ids),
        "norm": "post",
    }
    if expected.instance is not None:
        wanted["instance"] = expected.instance
    found = [f"{key} is {metadata.get(key)!r}, not {value!r}" for key, value in wanted.items() if metadata.get(key) != value]
    if expected.layers is not None and _layers(metadata.get("layers", "")) != expected.layers:
        found.append(f"layers are {metadata.get('layers')!r}, not {list(expected.layers)}")
    return found


def _layers(text: str) -> tuple[int, ...] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return tuple(value) if isinstance(value, list) and all(isinstance(item, int) for item in value) else None


def _tensor_faults(path: str, header: safetensors.Header, expected: Expected) -> list[str]:
    tensors = header.tensors
    absent = [name for name in ("input_ids", "hidden_state", "aux_hidden_state") if name not in tensors]
    if absent:
        return [f"it holds no {name}" for name in absent]
    ids, final, aux = tensors["input_ids"], tensors["hidden_state"], tensors["aux_hidden_state"]
    count = len(expected.ids)
    width = expected.hidden_size or (final.shape[-1] if final.shape else 0)
    found = []
    for name, tensor, shape in (
        ("input_ids", ids, (count,)),
        ("hidden_state", final, (1, count, width)),
        ("aux_hidden_state", aux, (1, count, 3 * width)),
    ):
        if tensor.shape != shape:
            found.append(f"{name} has the shape {list(tensor.shape)}, not {list(shape)}")
    if ids.dtype != "I64":
        found.append(f"input_ids are {ids.dtype}, not I64")
    if found:
        return found
    if _integers(_read(path, header, ids)) != expected.ids:
        found.append("input_ids are not those of the request")
    for name, tensor in (("hidden_state", final), ("aux_hidden_state", aux)):
        said = value_fault(_read(path, header, tensor), tensor.dtype)
        if said:
            found.append(f"{name} {said}")
    return found


def _read(path: str, header: safetensors.Header, tensor: safetensors.Tensor) -> bytes:
    with open(path, "rb") as handle:
        handle.seek(header.data_offset + tensor.begin)
        return handle.read(tensor.end - tensor.begin)


def _native(data: bytes, code: str) -> array.array[int]:
    values: array.array[int] = array.array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _integers(data: bytes) -> tuple[int, ...]:
    return tuple(_native(data, "q"))


def value_fault(data: bytes, dtype: str) -> str | None:
    """What no hidden state looks like: a number that is not finite, or nothing but zeros. Unknown dtypes are not judged."""
    if data.count(0) == len(data):
        return "is all zeros"
    exponent = {"BF16": ("H", 0x7F80), "F16": ("H", 0x7C00), "F32": ("I", 0x7F800000)}.get(dtype)
    if exponent:
        code, mask = exponent
        broken = sum(1 for bits in _native(data, code) if bits & mask == mask)
    elif dtype == "F64":
        broken = sum(1 for value in _native(data, "d") if not math.isfinite(value))
    else:
        broken = 0
    return f"holds {broken} values that are not finite" if broken else None
