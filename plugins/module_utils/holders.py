# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Who keeps a file system from being unmounted: open files, working directories, programs, mappings, loop devices, swap.

Names alone are read, so that a file system that hangs does not hang the look. Runs in a bounded child.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ansible_collections.relight.recovery.plugins.module_utils import procs


@dataclass(frozen=True)
class Holder:
    """One holder. `process` is None for what is no process; `what` names one thing that it holds."""

    what: str
    process: procs.Process | None = None

    @property
    def told(self) -> str:
        process = self.process
        if process is None:
            return self.what
        stuck = ", stuck in the kernel" if process.stuck else ""
        return f"pid {process.pid} ({process.name}, {process.user}{stuck}) has {self.what}"


def inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}/")


def look(path: str, own: int) -> list[Holder]:
    """Everything that holds something below `path`, a mount point as the kernel names it. Raises OSError."""
    found = [
        Holder(what, process)
        for process in procs.every().values()
        if process.pid != own and process.ppid != procs.KERNEL_THREADS and process.pid != os.getpid()
        for what in [next(_held(process, path), "")]
        if what
    ]
    return found + list(_devices(path)) + list(_swaps(path))


def _held(process: procs.Process, path: str) -> Iterator[str]:
    folder = f"/proc/{process.pid}"
    for name, told in (("cwd", "its working directory"), ("root", "its root"), ("exe", "its program")):
        target = _link(f"{folder}/{name}")
        if inside(target, path):
            yield f"{told} {target}"
    try:
        numbers = os.listdir(f"{folder}/fd")
    except OSError:
        numbers = []
    for number in numbers:
        target = _link(f"{folder}/fd/{number}")
        if inside(target, path):
            yield f"{target} open"
    if not process.stuck:  # the mappings of a process in D state may not be readable for as long
        try:
            with open(f"{folder}/maps", encoding="utf-8", errors="surrogateescape") as handle:
                for line in handle:
                    _before, slash, name = line.rstrip("\n").partition(" /")
                    if slash and inside(f"/{name}", path):
                        yield f"/{name} mapped"
        except OSError:
            pass


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _devices(path: str) -> Iterator[Holder]:
    for name in sorted(os.listdir("/sys/block")):
        try:
            with open(f"/sys/block/{name}/loop/backing_file", encoding="utf-8", errors="replace") as handle:
                backing = handle.read().strip()
        except OSError:
            continue
        if inside(backing, path):
            yield Holder(f"/dev/{name} is a loop device over {backing}")


def _swaps(path: str) -> Iterator[Holder]:
    try:
        with open("/proc/swaps", encoding="utf-8", errors="replace") as handle:
            lines = handle.read().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        if inside(line.split()[0], path):
            yield Holder(f"{line.split()[0]} is in use as swap")
