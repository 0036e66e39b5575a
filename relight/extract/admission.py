# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Which record is sent next, and whether it may be: long and short mixed, requests and bytes bounded. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Item:
    """A record that is to become a sample. A `suspect` was in flight when the server died and is sent alone."""

    index: int
    tokens: int
    bytes: int
    failures: int = 0
    suspect: bool = False
    last_error: str = ""


def interleave(items: Iterable[Item]) -> list[Item]:
    """Longest, shortest, next longest, and so on: at any moment long and short records are in flight together."""
    ordered = sorted(items, key=lambda item: (item.tokens, item.index))
    mixed: list[Item] = []
    low, high = 0, len(ordered) - 1
    while low <= high:
        mixed.append(ordered[high])
        if low < high:
            mixed.append(ordered[low])
        low, high = low + 1, high - 1
    return mixed


@dataclass
class Admission:
    """The queue and the budget. Strictly in order: a long record that does not fit yet is waited for, never starved."""

    concurrency: int
    max_bytes: int
    queue: deque[Item] = field(default_factory=deque)
    flying: dict[int, Item] = field(default_factory=dict)

    @property
    def bytes_in_flight(self) -> int:
        return sum(item.bytes for item in self.flying.values())

    @property
    def empty(self) -> bool:
        return not self.queue and not self.flying

    def next(self, alone: bool) -> Item | None:
        """Take the next record into flight if it may go now. `alone`: only one at a time, while the server is doubted."""
        if not self.queue:
            return None
        item = self.queue[0]
        solo = alone or item.suspect or any(other.suspect for other in self.flying.values())
        if self.flying and (solo or len(self.flying) >= self.concurrency or self.bytes_in_flight + item.bytes > self.max_bytes):
            return None
        self.queue.popleft()
        self.flying[item.index] = item
        return item

    def land(self, item: Item) -> None:
        """It is a sample, or given up."""
        del self.flying[item.index]

    def again(self, item: Item) -> None:
        """Its own failure: behind all others, which may show that the server is well."""
        self.land(item)
        self.queue.append(item)

    def put_back(self, item: Item) -> None:
        """Not its failure: first in the queue."""
        self.land(item)
        self.queue.appendleft(item)
