# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The safetensors format, read and written by its rules to the letter. Standard library only, Python 3.9 and newer."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import ckpt

HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
# The types that samples are made of, in the words of ckpt.
NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
CODES = {name: code for code, name in NAMES.items()}


class BadFile(Exception):
    """The file breaks a rule. `kind` is torn (too short), extended (too long) or invalid; the message goes on after a colon."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Tensor:
    """One entry of a header; `begin` and `end` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class Header:
    """A whole header. `raw` is its text as it lies in the file; tensor data starts at `data_offset`."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    raw: bytes
    file_bytes: int

    @property
    def data_offset(self) -> int:
        return 8 + len(self.raw)

    def offset_of(self, name: str) -> int:
        """Where a tensor's bytes begin, from the start of the file."""
        return self.data_offset + self.tensors[name].begin


def read_header(path: str) -> Header:
    """Read and check one file's header against its length. Raises BadFile, or OSError where it cannot be read."""
    with open(path, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        prefix = handle.read(8)
        if len(prefix) < 8:
            raise BadFile("torn", f"{size} bytes are too few for a header length")
        length = int.from_bytes(prefix, "little")
        if length > HEADER_LIMIT_BYTES:
            raise BadFile("invalid", f"its header claims {length} bytes, more than the format allows")
        raw = handle.read(length)
    if len(raw) < length:
        raise BadFile("torn", f"it ends {length - len(raw)} bytes before the end of its header")
    tensors, metadata = parse(raw)
    data_bytes = _check_ranges(tensors)
    missing = 8 + length + data_bytes - size
    if missing > 0:
        raise BadFile("torn", f"it is {missing} bytes short")
    if missing < 0:
        raise BadFile("extended", f"it has {-missing} bytes more than its tensors")
    return Header(tensors, metadata, raw, size)


def parse(raw: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a header's text. Raises BadFile."""
    if not raw.startswith(b"{"):
        raise BadFile("invalid", "its header is not JSON")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise BadFile("invalid", f"its header is not JSON: {error}") from None
    metadata = value.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise BadFile("invalid", "its metadata is not a map of strings")
    return {name: _tensor(name, entry) for name, entry in value.items()}, metadata


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name stands twice")
    return value


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(name: str, entry: Any) -> Tensor:
    """One entry, checked alone. Raises BadFile."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadFile("invalid", f"tensor {name} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise BadFile("invalid", f"tensor {name} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_count(extent) for extent in shape):
        raise BadFile("invalid", f"tensor {name} has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_count(offset) for offset in offsets):
        raise BadFile("invalid", f"tensor {name} has no valid offsets")
    tensor = Tensor(dtype, tuple(shape), offsets[0], offsets[1])
    bits = tensor.elements * BITS[dtype]
    if bits % 8 or tensor.end - tensor.begin != bits // 8:
        raise BadFile("invalid", f"tensor {name} spans {tensor.end - tensor.begin} bytes, its shape and dtype ask for {bits / 8:g}")
    return tensor


def _check_ranges(tensors: dict[str, Tensor]) -> int:
    """The bytes that all tensors span together, without hole or overlap. Raises BadFile."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            raise BadFile("invalid", f"tensor {name} begins at {tensor.begin} where {position} was due: a hole or an overlap")
        position = tensor.end
    return position


@contextmanager
def mapped(path: str) -> Iterator[tuple[Header, dict[str, ckpt.TensorBytes]]]:
    """The header and the tensors as views of the mapped file, valid within the block. Raises BadFile, OSError."""
    header = read_header(path)
    foreign = sorted({tensor.dtype for tensor in header.tensors.values()} - set(NAMES))
    if foreign:
        raise BadFile("invalid", f"it holds tensors of type {foreign[0]}")
    with open(path, "rb") as handle:
        memory = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        if len(memory) != header.file_bytes:
            raise BadFile("invalid", "it changed its size while it was read")
        whole = memoryview(memory)[header.data_offset :]
        yield (
            header,
            {
                name: ckpt.TensorBytes(NAMES[tensor.dtype], tensor.shape, whole[tensor.begin : tensor.end])
                for name, tensor in header.tensors.items()
            },
        )
    finally:
        try:
            memory.close()
        except BufferError:  # a view outlives the block, in a frame of a traceback for one; the map goes with the last of them
            pass


@dataclass(frozen=True)
class Part:
    """A tensor to be written, its bytes in pieces that together fill its shape."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[ckpt.Buffer]


def write(handle: ckpt.Sink, tensors: Mapping[str, ckpt.TensorBytes], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; its data start on an 8-byte boundary. Raises OSError."""
    write_parts(handle, {name: Part(tensor.dtype, tensor.shape, (tensor.buffer,)) for name, tensor in tensors.items()}, metadata)


def write_parts(handle: ckpt.Sink, parts: Mapping[str, Part], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file of tensors that come in pieces. Raises OSError, ValueError where the pieces do not fill a shape."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, part in parts.items():
        end = at + ckpt.nbytes_of(part.dtype, part.shape)
        header[name] = {"dtype": CODES[part.dtype], "shape": list(part.shape), "data_offsets": [at, end]}
        at = end
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    handle.write(len(data).to_bytes(8, "little") + data)
    for name, part in parts.items():
        left = ckpt.nbytes_of(part.dtype, part.shape)
        for piece in part.pieces:
            handle.write(piece)
            left -= memoryview(piece).nbytes
        if left:
            raise ValueError(f"the pieces of {name} do not fill its shape {list(part.shape)}")
