# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory of a fixed size, lent out in contiguous regions, so that dumps never take more of it than that. No torch here."""

from __future__ import annotations

import bisect
import threading

ALIGNMENT = 4096


def aligned(size: int) -> int:
    """The bytes that a region of `size` takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Which parts of `size` bytes are free: first fit, neighbours joined. For the forward's thread and the writers'."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, size)]  # (offset, bytes), by offset
        self._used = 0
        self.peak = 0

    @property
    def used(self) -> int:
        return self._used

    def take(self, size: int) -> int | None:
        """The offset of a region, or None where there is no room. It never waits."""
        size = aligned(size)
        with self._lock:
            for place, (offset, room) in enumerate(self._free):
                if room >= size:
                    self._free[place : place + 1] = [(offset + size, room - size)] if room > size else []
                    self._used += size
                    self.peak = max(self.peak, self._used)
                    return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Take a region back."""
        size = aligned(size)
        with self._lock:
            self._used -= size
            place = bisect.bisect(self._free, (offset, 0))
            if place < len(self._free) and self._free[place][0] == offset + size:
                size += self._free.pop(place)[1]
            if place and sum(self._free[place - 1]) == offset:
                before = self._free.pop(place - 1)
                offset, size, place = before[0], before[1] + size, place - 1
            self._free.insert(place, (offset, size))
