# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Looks that need the host environment (a fast digest, array arithmetic), run by gates as `python -m relight.hostlook`.

A request comes as JSON on standard input; lines of JSON go to standard output, the last one `{"end": true}` or `{"error": ...}`.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash
from ansible_collections.relight.recovery.plugins.module_utils import ckpt, inventory
from ansible_collections.relight.recovery.plugins.module_utils.layouts import Part, Seen
from ansible_collections.relight.recovery.plugins.module_utils.store import DIGEST

BEAT_SECONDS = 1.0
_BLOCK_BYTES = 512
# For each type of state, the integer type to look through and the bits that are all set in NaN and infinity.
_EXPONENTS = {"float32": (np.uint32, 0x7F800000), "float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}


class Values:
    """Looks at the bytes of one tensor as they pass: numbers that are not finite, and the longest run of zero blocks."""

    def __init__(self, dtype: str) -> None:
        self._kind, self._exponent = _EXPONENTS[dtype]
        self.non_finite = 0
        self.zero_bytes = 0
        self._run = 0

    def add(self, piece: memoryview) -> None:
        """Take in a piece; all but the last are multiples of the block size."""
        numbers = np.frombuffer(piece, dtype=self._kind)
        mask = self._kind(self._exponent)
        self.non_finite += int(np.count_nonzero((numbers & mask) == mask))
        whole = len(piece) // _BLOCK_BYTES * _BLOCK_BYTES
        blocks = np.frombuffer(piece[:whole], dtype=np.uint64).reshape(-1, _BLOCK_BYTES // 8)
        self._add_blocks(np.asarray(blocks.any(axis=1)))

    def _add_blocks(self, used: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        marks = np.flatnonzero(used)
        if not len(marks):
            self._run += len(used)
            longest = self._run
        else:
            first, last = int(marks[0]), int(marks[-1])
            inner = int(np.diff(marks).max()) - 1 if len(marks) > 1 else 0
            longest = max(self._run + first, inner)
            self._run = len(used) - 1 - last
            longest = max(longest, self._run)
        self.zero_bytes = max(self.zero_bytes, longest * _BLOCK_BYTES)


def _stretches(seen: Seen) -> Iterator[tuple[int, Part | None, Values | None]]:
    """The file in consecutive stretches: length, the part that it is the data of, and how to look at its values."""
    at = 0
    for part in seen.parts:
        yield part.offset - at, None, None
        yield part.nbytes, part, Values(part.states) if part.states else None
        at = part.offset + part.nbytes
    yield seen.bytes - at, None, None


def look_at_content(path: str, seen: Seen, beat: Callable[[], None] = lambda: None) -> inventory.Content:
    """Digest, checksums and values of one file in a single pass with bounded memory. Raises OSError, ckpt.Torn."""
    state = xxhash.xxh3_128()
    broken: list[str] = []
    looks: list[Values] = []
    with open(path, "rb") as handle:
        at = 0
        for nbytes, part, values in _stretches(seen):
            crc = 0
            for piece in ckpt.chunks(handle, at, nbytes):
                beat()
                state.update(piece)
                if part is not None and part.crc is not None:
                    crc = zlib.crc32(piece, crc)
                if values is not None:
                    values.add(memoryview(piece))
            if part is not None and part.crc not in (None, crc):
                broken.append(part.name)
            if values is not None:
                looks.append(values)
            at += nbytes
    return inventory.Content(
        f"{DIGEST}:{state.hexdigest()}",
        tuple(broken),
        sum(values.non_finite for values in looks),
        max((values.zero_bytes for values in looks), default=0),
    )


def _tell(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Answer one request for a survey of a directory of the store."""
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last >= BEAT_SECONDS:
            last = time.monotonic()
            _tell({"beat": True})

    def content(path: str, seen: Seen) -> inventory.Content:
        return look_at_content(path, seen, beat)

    given = json.load(sys.stdin)
    try:
        for line in inventory.survey(inventory.Request(**{**given, "skip": tuple(given["skip"])}), content):
            _tell(line)
    except Exception as error:  # told to the gate that asked, which judges it
        _tell({"error": str(error) or type(error).__name__, "kind": type(error).__name__})
        return 1
    _tell({"end": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
