# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The host's journal (every step's begin and end) and the one recovery lock, held by the process that acts."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils.durable import append_line, read_lines

SCHEMA = 1


class Busy(Exception):
    """Another process holds the recovery lock; the message says which."""


def boot_id() -> str:
    """The kernel's name of this boot; a changed one means that the machine went down in between."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as handle:
        return handle.read().strip()


class Journal:
    """journal.jsonl in the state directory. Without a state directory nothing is written."""

    def __init__(self, state_dir: str | None, run: str = "", stage: str = "", step: str = "") -> None:
        self.path = os.path.join(state_dir, "journal.jsonl") if state_dir else None
        self.common = {"run": run, "stage": stage, "step": step}

    def write(self, event: str, **more: Any) -> None:
        """Append one line, durably. Raises OSError."""
        if self.path is None:
            return
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        line = {
            "schema": SCHEMA,
            "time": round(time.time(), 3),
            "boot_id": boot_id(),
            "pid": os.getpid(),
            **self.common,
            "event": event,
            **more,
        }
        append_line(self.path, json.dumps(line, sort_keys=True))

    def lines(self) -> Iterator[dict[str, Any]]:
        return read_lines(self.path) if self.path else iter(())


@contextmanager
def recovery_lock(state_dir: str, who: str, wait_seconds: float) -> Iterator[None]:
    """Hold the host's recovery lock for the block.

    The kernel drops the lock with the process that holds it, so a kill needs no clean-up. Raises Busy after `wait_seconds`.
    """
    os.makedirs(state_dir, mode=0o755, exist_ok=True)
    fd = os.open(os.path.join(state_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + wait_seconds
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(fd, 500, 0).decode(errors="replace").strip() or "an unnamed process"
                    raise Busy(f"the recovery lock of {state_dir} is held by {holder}") from None
                time.sleep(0.2)  # flock has no timed wait; a blocking one could not tell who holds it
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{who}, pid {os.getpid()}, since {time.strftime('%H:%M:%S')}\n".encode(), 0)
        except OSError:
            pass  # the name is for whoever waits; on a full disk the lock holds without it
        yield
    finally:
        os.close(fd)
