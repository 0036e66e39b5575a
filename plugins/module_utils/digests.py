# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of large files at the disk's speed, and never twice: an unchanged file's digest is known from the state directory.

A digest is remembered only once the file's content is durable (it was synced), so that it stays true after a crash. Size,
times and inode tell whether the file is unchanged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ansible_collections.relight.recovery.plugins.module_utils import durable

CACHE = "digests.jsonl"
BLOCK_BYTES = 1 << 22
READERS = 8  # an NVMe disk needs several, and one core digests 1 to 2 GB/s


@dataclass(frozen=True)
class Digests:
    """By name: the digest, or None where there is no such file. `unread` are those that the time did not suffice for."""

    found: dict[str, str | None]
    unread: tuple[str, ...] = ()
    read_bytes: int = 0


class Cache:
    """digests.jsonl in a state directory; the last line about a path counts. Without a directory nothing is remembered."""

    def __init__(self, state_dir: str | None, write: bool = True) -> None:
        self.path = os.path.join(state_dir, CACHE) if state_dir else None
        self._write = write
        self._lock = threading.Lock()
        self._known: dict[str, tuple[list[int], str]] = {}
        for line in durable.read_lines(self.path) if self.path else ():
            if isinstance(line.get("path"), str) and isinstance(line.get("file"), list) and isinstance(line.get("sha256"), str):
                self._known[line["path"]] = line["file"], line["sha256"]

    def get(self, path: str, status: os.stat_result) -> str | None:
        known = self._known.get(path)
        return known[1] if known and known[0] == _identity(status) else None

    def put(self, path: str, status: os.stat_result, digest: str) -> None:
        """Remember. A state directory that cannot be written keeps nobody from looking."""
        with self._lock:
            self._known[path] = _identity(status), digest
            if self.path and self._write:
                line = json.dumps({"path": path, "file": _identity(status), "sha256": digest})
                try:
                    os.makedirs(os.path.dirname(self.path), exist_ok=True)
                    durable.append_line(self.path, line)
                except OSError:
                    pass


def _identity(status: os.stat_result) -> list[int]:
    """What changes with a file's content, whoever changes it. The device's number is left out: a reboot may change it."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def of(folder: str, names: Iterable[str], cache: Cache, seconds: float, reread: bool = False) -> Digests:
    """The digests of files in a folder, links followed. Raises OSError where a file that is there cannot be read."""
    deadline = time.monotonic() + seconds
    found: dict[str, str | None] = {}
    todo: list[tuple[int, str]] = []
    for name in sorted(set(names)):
        path = os.path.join(folder, name)
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            found[name] = None
            continue
        known = None if reread else cache.get(path, status)
        if known:
            found[name] = known
        else:
            todo.append((status.st_size, name))
    total = 0
    with ThreadPoolExecutor(min(READERS, max(1, len(todo)))) as pool:
        names_todo = [name for _size, name in sorted(todo, reverse=True)]
        for name, answer in zip(names_todo, pool.map(lambda name: _digest(os.path.join(folder, name), cache, deadline), names_todo)):
            total += answer[1]
            if answer[0] is not None:
                found[name] = answer[0]
    return Digests(found, tuple(sorted(name for name in names_todo if name not in found)), total)


def _digest(path: str, cache: Cache, deadline: float) -> tuple[str | None, int]:
    """The digest and the bytes read; None where the deadline came first."""
    digest, count = hashlib.sha256(), 0
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as handle:
        before = os.fstat(handle.fileno())
        while True:
            if time.monotonic() >= deadline:
                return None, count
            size = handle.readinto(buffer)
            if not size:
                break
            digest.update(buffer[:size])
            count += size
        durable_now = _sync(handle.fileno())
        after = os.fstat(handle.fileno())
    if durable_now and _identity(before) == _identity(after):
        cache.put(path, after, digest.hexdigest())
    return digest.hexdigest(), count


def _sync(fd: int) -> bool:
    """Whether the file's content is on its medium. What cannot be synced because it cannot be written is there already."""
    try:
        os.fsync(fd)
    except OSError as error:
        return error.errno in (errno.EROFS, errno.EINVAL)
    return True
