# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers in raw little-endian states: are they finite, what are they, and back to bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import Buffer
from ansible_collections.relight.recovery.plugins.module_utils.layouts import Rows, Seen

Array = np.ndarray[Any, Any]

# Per dtype: its bits as an integer type, and the exponent that NaN and infinity have.
_EXPONENTS = {"float32": ("<u4", 0x7F800000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80)}
_CHUNK = 1 << 22  # elements looked at in one go, so that a sample of gigabytes costs megabytes


def value_fault(states: Buffer, dtype: str) -> str | None:
    """What no hidden state looks like, as the end of a sentence: numbers that are not finite, or nothing but zeros."""
    broken, used = 0, False
    bits, exponent = _EXPONENTS[dtype]
    raw = np.frombuffer(states, dtype=bits)
    for begin in range(0, len(raw), _CHUNK):
        piece = raw[begin : begin + _CHUNK]
        broken += int(np.count_nonzero((piece & exponent) == exponent))
        used = used or bool(piece.any())
    if broken:
        return f"holds {broken} values that are not finite"
    return None if used else "is all zeros"


def to_float32(states: Buffer, dtype: str) -> Array:
    """The raw states as a flat float32 array."""
    if dtype == "bfloat16":
        return (np.frombuffer(states, dtype="<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(states, dtype="<f4" if dtype == "float32" else "<f2").astype("<f4", copy=False)


def to_raw(values: Array, dtype: str) -> bytes:
    """Float32 numbers in a dtype's raw form, rounded to the nearest, halves to even."""
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.astype("<f4", copy=False).view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2").tobytes()


@contextmanager
def file_of(path: str) -> Iterator[memoryview]:
    """A file as a view of memory, valid within the block. Raises OSError, ValueError where it is empty."""
    with open(path, "rb") as handle:
        memory = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        yield memoryview(memory)
    finally:
        with suppress(BufferError):  # a view outlives the block; the map goes with the last of them
            memory.close()


def raw_rows(file: memoryview, rows: Rows, dtype: str) -> Array:
    """The raw numbers of a state in a mapped file, a row a token; a view where they lie apart, nothing is copied."""
    kind = np.dtype(_EXPONENTS[dtype][0])
    shape = (rows.count, rows.row_bytes // kind.itemsize)
    return np.ndarray(shape, kind, file, rows.offset, (rows.stride, kind.itemsize))


def states_of(file: memoryview, seen: Seen) -> tuple[Array, Array]:
    """The final and the auxiliary states of a sample as float32, rows are tokens."""
    final, aux = raw_rows(file, seen.final, seen.dtype), raw_rows(file, seen.aux, seen.dtype)
    return (
        to_float32(final.tobytes(), seen.dtype).reshape(final.shape),
        to_float32(aux.tobytes(), seen.dtype).reshape(aux.shape),
    )
