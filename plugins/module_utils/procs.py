# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Processes as /proc shows them, who holds a port or a device, and how to end one for sure and no other.

A process is named by its pid and its start time, so that a reused pid is never taken for it. Reading the command line of
a process in D state can hang: it is not read, and callers run what reads all of /proc in `bounded.call`.
"""

from __future__ import annotations

import errno
import os
import pwd
import select
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ansible_collections.relight.recovery.plugins.module_utils import redact

PAGE = os.sysconf("SC_PAGE_SIZE")
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's fixed number of the first one
LISTEN = "0A"
KERNEL_THREADS = 2  # kthreadd; its children hold neither files nor memory


@dataclass(frozen=True)
class Process:
    """`start_time` is in clock ticks since boot; `state` is the kernel's letter; `command` is redacted and cut."""

    pid: int
    start_time: int
    ppid: int
    group: int
    session: int
    user: str
    name: str
    command: str
    state: str
    rss_bytes: int
    cgroup: str

    @property
    def zombie(self) -> bool:
        return self.state in "ZX"

    @property
    def stuck(self) -> bool:
        """In uninterruptible sleep: SIGKILL is only queued for it."""
        return self.state == "D"


def read(pid: int) -> Process | None:
    """The process, or None where it is gone."""
    folder = f"/proc/{pid}"
    try:
        with open(f"{folder}/stat", encoding="utf-8", errors="replace") as handle:
            head, _bracket, tail = handle.read().rpartition(")")
        fields = tail.split()
        name = head.partition("(")[2]
        uid = os.stat(folder).st_uid
        argv = [] if fields[0] in "DZX" else _command(folder)
        cgroup = _first_line(f"{folder}/cgroup").rpartition(":")[2]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None
    return Process(
        pid=pid,
        start_time=int(fields[19]),
        ppid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        user=user_name(uid),
        name=name,
        command=redact.command(argv) if argv else f"[{name}]",
        state=fields[0],
        rss_bytes=int(fields[21]) * PAGE,
        cgroup=cgroup,
    )


def _command(folder: str) -> list[str]:
    try:
        with open(f"{folder}/cmdline", "rb") as handle:
            return handle.read(1 << 16).decode(errors="replace").rstrip("\0").split("\0")
    except PermissionError:
        return []


def _first_line(path: str) -> str:
    """The first line of the unified hierarchy's file, or of systemd's own; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            lines = handle.read().splitlines()
    except PermissionError:
        return ""
    chosen = [line for line in lines if line.startswith("0::") or ":name=systemd:" in line]
    return chosen[-1] if chosen else (lines[0] if lines else "")


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def every() -> dict[int, Process]:
    """All processes of this pid namespace."""
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process}


def tree(root: int, processes: Mapping[int, Process]) -> set[int]:
    """The pid with all its descendants that still have a living chain of parents to it."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    todo = [root] if root in processes else []
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def environment(pid: int, prefixes: tuple[str, ...] = redact.ENVIRONMENT) -> dict[str, str] | None:
    """The allow-listed variables that the process was started with; None where they cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as handle:
            words = handle.read(1 << 20).decode(errors="replace").split("\0")
    except OSError:
        return None
    return redact.environment(dict(word.split("=", 1) for word in words if "=" in word), prefixes)


def sees_all_pids() -> bool:
    """Whether a pid that a driver names means the same process here: only in the first pid namespace."""
    try:
        return os.readlink("/proc/self/ns/pid") == INITIAL_PID_NAMESPACE
    except OSError:
        return False


@dataclass(frozen=True)
class Files:
    """Who holds which open files: pid to link targets. `unreadable` are the processes whose files cannot be listed."""

    held: dict[int, tuple[str, ...]]
    unreadable: tuple[int, ...]


def open_files(prefixes: tuple[str, ...]) -> Files:
    """Every process's open files whose names start with one of `prefixes` (/dev/nvidia, socket:)."""
    held: dict[int, tuple[str, ...]] = {}
    unreadable = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        folder = f"/proc/{name}/fd"
        try:
            numbers = os.listdir(folder)
        except PermissionError:
            unreadable.append(int(name))
            continue
        except OSError:
            continue  # gone meanwhile
        found = {target for target in (_target(f"{folder}/{number}") for number in numbers) if target.startswith(prefixes)}
        if found:
            held[int(name)] = tuple(sorted(found))
    return Files(held, tuple(unreadable))


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


@dataclass(frozen=True)
class Listener:
    """A listening socket on a port and a process that holds it. `pid` is None where no visible process does."""

    port: int
    pid: int | None


def listeners(ports: Iterable[int], files: Files | None = None) -> list[Listener]:
    """Who listens on the TCP ports of this network namespace. Raises OSError where the tables cannot be read."""
    sockets = _listening(set(ports))
    if not sockets:
        return []
    files = files or open_files(("socket:",))
    found: list[Listener] = []
    for inode, port in sorted(sockets.items()):
        pids = [pid for pid, names in files.held.items() if f"socket:[{inode}]" in names]
        found += [Listener(port, pid) for pid in pids] or [Listener(port, None)]
    return sorted(set(found), key=lambda item: (item.port, item.pid or 0))


def _listening(ports: set[int]) -> dict[str, int]:
    """Socket inode to port, for those of `ports` that are listened on."""
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as handle:
                lines = handle.read().splitlines()[1:]
        except FileNotFoundError:
            if name == "tcp":
                raise
            continue
        for line in lines:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == LISTEN and port in ports:
                found[fields[9]] = port
    return found


def port_answers(port: int, host: str = "127.0.0.1", seconds: float = 1.0) -> bool:
    """Whether something accepts connections there: tells of a listener in a namespace that our tables do not show."""
    try:
        with socket.create_connection((host, port), seconds):
            return True
    except OSError:
        return False


def is_same(process: Process) -> bool:
    """Whether the pid still names this very process, and it has not ended."""
    now = read(process.pid)
    return now is not None and now.start_time == process.start_time and not now.zombie


def _open(process: Process) -> int | None:
    """A pidfd that surely names this process; None where it is gone. Raises OSError where the kernel has no pidfds."""
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, "no pidfd_open")
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if is_same(process):  # checked after the descriptor was taken: from here on it cannot mean another process
        return fd
    os.close(fd)
    return None


def send(process: Process, number: int) -> bool:
    """Signal this very process; False where it is gone. Raises PermissionError."""
    try:
        fd = _open(process)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EPERM):
            raise
        return _send_checked(process, number)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def _send_checked(process: Process, number: int) -> bool:
    """For kernels and Pythons without pidfds: look, then signal."""
    if not is_same(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_gone(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Wait until all have ended (a zombie has), for `seconds` in all; return those that have not."""
    deadline = time.monotonic() + seconds
    left = list(processes)
    while left:
        process = left[0]
        remaining = deadline - time.monotonic()
        if not is_same(process) or _ended(process, remaining):
            left.pop(0)
        elif remaining <= 0:
            return [process for process in left if is_same(process)]
    return []


def _ended(process: Process, seconds: float) -> bool:
    """Wait for one process for `seconds` at the most."""
    if seconds <= 0:
        return False
    try:
        fd = _open(process)
    except OSError:
        time.sleep(min(0.02, seconds))  # no pidfd to wait on: look again
        return False
    if fd is None:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(fd)


def terminate(processes: Iterable[Process], term_seconds: float, kill_seconds: float = 10.0) -> list[Process]:
    """SIGTERM, wait, SIGKILL, wait. Returns those that live on, as they are now. Raises PermissionError."""
    asked = [process for process in processes if send(process, signal.SIGTERM)]
    forced = [process for process in wait_gone(asked, term_seconds) if send(process, signal.SIGKILL)]
    left = wait_gone(forced, kill_seconds)
    return [now for now in (read(process.pid) for process in left) if now is not None]
