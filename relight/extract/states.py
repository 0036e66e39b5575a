# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers in raw little-endian states: are they finite, and what are they."""

from __future__ import annotations

from typing import Any

import numpy as np
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import Buffer

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


def to_float32(states: Buffer, dtype: str) -> np.ndarray[Any, Any]:
    """The raw states as a flat float32 array."""
    if dtype == "bfloat16":
        return (np.frombuffer(states, dtype="<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(states, dtype="<f4" if dtype == "float32" else "<f2").astype("<f4", copy=False)
