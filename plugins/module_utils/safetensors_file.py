# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The safetensors format, read and written with its rules enforced. Standard library only, Python 3.9 and newer."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import ckpt

MAX_HEADER_BYTES = 100_000_000
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "C64": 64,
}  # fmt: skip
# The types that samples are made of, in the words of ckpt.
NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
CODES = {name: code for code, name in NAMES.items()}


class Broken(Exception):
    """The file is not a whole safetensors file; the message is a clause about it."""


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies; `offset` counts from the start of the file. `dtype` is safetensors' own word."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    bytes: int
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise Broken("names a tensor twice")
    return value


def _tensor(name: str, item: Any, start: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        bits = BITS[dtype]
        for length in shape:
            bits *= length
    except (KeyError, TypeError, ValueError):
        raise Broken(f"describes {name[:80]!r} in a way that is not understood") from None
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end)):
        raise Broken(f"gives {name[:80]!r} a size that is no number")
    if bits % 8 or end - begin != bits // 8:
        raise Broken(f"gives {name[:80]!r} {end - begin} bytes where its shape takes {bits // 8}")
    return Tensor(dtype, shape, start + begin, end - begin)


def read_header(path: str) -> Header:
    """Read and check the header: the ranges must fill the file without gap or overlap. Raises Broken, OSError."""
    with open(path, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        prefix = handle.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise Broken("ends within its header")
        data = handle.read(length)
    if len(data) != length or data[:1] != b"{":
        raise Broken("has no header")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise Broken("has a header that is not JSON") from None
    metadata = value.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(item, str) for item in metadata.values()):
        raise Broken("has metadata that are not strings")
    start = 8 + length
    tensors = {name: _tensor(name, item, start) for name, item in value.items()}
    reached = start
    for name, tensor in sorted(tensors.items(), key=lambda pair: (pair[1].offset, pair[1].nbytes)):
        if tensor.offset != reached:
            raise Broken(f"has a gap or an overlap before {name[:80]!r}")
        reached += tensor.nbytes
    if reached != size:
        raise Broken(f"has {size} bytes where its header tells of {reached}")
    return Header(size, tensors, metadata)


@contextmanager
def mapped(path: str) -> Iterator[tuple[Header, dict[str, ckpt.TensorBytes]]]:
    """The header and the tensors as views of the mapped file, valid within the block. Raises Broken, OSError."""
    header = read_header(path)
    foreign = sorted({tensor.dtype for tensor in header.tensors.values()} - set(NAMES))
    if foreign:
        raise Broken(f"holds tensors of type {foreign[0]}")
    with open(path, "rb") as handle:
        memory = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        if len(memory) != header.bytes:
            raise Broken("changed its size while it was read")
        whole = memoryview(memory)
        views = {name: whole[tensor.offset : tensor.offset + tensor.nbytes] for name, tensor in header.tensors.items()}
        yield header, {name: ckpt.TensorBytes(NAMES[tensor.dtype], tensor.shape, views[name]) for name, tensor in header.tensors.items()}
    finally:
        try:
            memory.close()
        except BufferError:  # a view outlives the block, in a frame of a traceback for one; the map goes with the last of them
            pass


def write(handle: ckpt.Sink, tensors: Mapping[str, ckpt.TensorBytes], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; its data start on an 8-byte boundary. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        nbytes = memoryview(tensor.buffer).nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    handle.write(len(data).to_bytes(8, "little") + data)
    for tensor in tensors.values():
        handle.write(tensor.buffer)
