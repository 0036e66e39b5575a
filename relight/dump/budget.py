# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The dump directory's byte budget, kept in the launcher: a request is refused before any rank sees it. No torch here.

The client keeps within the budget by itself. This is the backstop for the rest: two clients, a client that went astray, dumps that
nobody fetches. In a rank it could not be: ranks that decide differently hang.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

SERVER_FILE = "server.json"
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
STATES = 4  # a token's final state and three layers
HEADROOM = 16  # a sixteenth beyond the budget: headers and token ids, which the client does not count
LATE_SECONDS = 60.0  # a request that is over and got no file for so long was broken off: it counts no more
_MOVED_TO, _OVERFLOW, _NONBLOCK_CLOEXEC = 0x80, 0x4000, os.O_NONBLOCK | os.O_CLOEXEC
_EVENT = struct.Struct("iIII")  # struct inotify_event: watch, mask, cookie, bytes of the name that follows


@dataclass
class _Flight:
    """A request that was let in: its dump is yet to come."""

    bytes: int
    over_since: float | None = None


class Budget:
    """Bytes of the files that lie there, and of the dumps that are to come, against the budget."""

    def __init__(self, folder: str, budget_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.flights: dict[str, _Flight] = {}
        self._arrivals = _Arrivals(folder)
        self._token_bytes: int | None = None

    def refuse(self, rid: str, tokens: int, is_running: Callable[[str], bool]) -> str | None:
        """Why this request must wait, or None: then it counts as let in. Raises OSError where the directory cannot be read."""
        self._settle(is_running)
        lying = self._lying()
        need = tokens * self._bytes_of_a_token()
        coming = sum(flight.bytes for flight in self.flights.values())
        used = coming + sum(lying.values())
        if used and used + need > self.budget_bytes + self.budget_bytes // HEADROOM:
            return (
                f"the dump directory's budget of {self.budget_bytes} bytes is used up ({len(lying)} files of {sum(lying.values())} bytes, "
                f"{len(self.flights)} dumps of {coming} bytes to come): fetch and remove dumps, then send it again."
            )
        self.flights[rid] = _Flight(need)
        return None

    def _lying(self) -> dict[str, int]:
        """Name -> bytes of what lies in the directory."""
        sizes = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    if entry.name != SERVER_FILE and entry.is_file(follow_symlinks=False):
                        sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
        return sizes

    def _settle(self, is_running: Callable[[str], bool]) -> None:
        """Forget the requests whose dump came, fetched since or not, or never will."""
        for name in self._arrivals.names():
            self.flights.pop(name[: -len(".error")] if name.endswith(".error") else name, None)
        now = time.monotonic()
        for rid, flight in list(self.flights.items()):
            if is_running(rid):
                flight.over_since = None
            elif flight.over_since is None:
                flight.over_since = now
            elif now - flight.over_since > LATE_SECONDS:
                del self.flights[rid]

    def _bytes_of_a_token(self) -> int:
        """From the word of the rank that dumps; 0 before it has said it, when nothing is served either."""
        if self._token_bytes is None:
            try:
                with open(os.path.join(self.folder, SERVER_FILE), encoding="utf-8") as handle:
                    about = json.load(handle)
                self._token_bytes = int(about["hidden_size"]) * ITEM_BYTES[about["dtype"]] * STATES
            except (OSError, ValueError, KeyError, TypeError):
                return 0
        return self._token_bytes


class _Arrivals:
    """The names that were renamed into a directory since the last look, by the kernel's own record (inotify)."""

    def __init__(self, folder: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(_NONBLOCK_CLOEXEC)
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(folder), _MOVED_TO) < 0:
            raise OSError(ctypes.get_errno(), f"{folder} cannot be watched")

    def names(self) -> list[str]:
        """Raises OSError where the kernel lost some: so many came that they cannot be told apart any more."""
        found: list[str] = []
        while True:
            try:
                events = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return found
            at = 0
            while at < len(events):
                _watch, mask, _cookie, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size
                if mask & _OVERFLOW:
                    raise OSError("the kernel's queue of arrivals ran over")
                found.append(os.fsdecode(events[at : at + length].rstrip(b"\0")))
                at += length
