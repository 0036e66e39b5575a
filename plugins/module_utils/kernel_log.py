# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What the kernel said of disks and file systems since it booted: I/O errors, aborted file systems, lost devices.

A file system that answers now may have lost writes before: after an error the pages count as clean, and a later sync
succeeds. `read` is to be called in `bounded.call`.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

KMSG = "/dev/kmsg"
RECORDS = 200_000  # more than any kernel's buffer holds
RECENT_SECONDS = 600.0
# What is told of a device, newest spellings first. The group is the device.
PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("I/O error", r"(?:I/O|critical (?:medium|target|nexus|space allocation)) error, dev ([\w!/-]+)"),
        ("I/O error", r"Buffer I/O error on dev(?:ice)? ([\w!/-]+)"),
        ("I/O error", r"I/O error while writing superblock.*\((\S+?)\)"),
        ("I/O error", r"JBD2: .*(?:[Ee]rror|aborted).*? (?:for|on) ([\w!]+)-\d+"),
        ("I/O error", r"device-mapper: multipath: .*no available path.* (\S+)$"),
        ("beyond its end", r"attempt to access beyond end of device\s+(\w+): "),
        ("read-only", r"EXT4-fs \((\S+?)\): Remounting filesystem read-only"),
        ("read-only", r"BTRFS: error \(device ([\w!/-]+).*forced readonly"),
        ("read-only", r"F2FS-fs \((\S+?)\): .*[Rr]emount.*read-only"),
        ("file system error", r"EXT4-fs (?:error|warning) \(device (\S+?)\)"),
        ("file system error", r"EXT4-fs \((\S+?)\): .*(?:abort|error)"),
        ("file system error", r"XFS \((\S+?)\): .*(?:I/O [Ee]rror|Corruption|[Ss]hut(?:ting)? ?down)"),
        ("file system error", r"BTRFS (?:error|critical) \(device ([\w!/-]+)"),
        ("device lost", r"(?:nvme )?(nvme\d+)(?:n\d+)?: (?:Disabling device after reset failure|controller is down|Device not ready)"),
        ("device lost", r"(?:nvme )?(nvme\d+)(?:n\d+)?: I/O .*timeout"),
        ("device lost", r"\[(sd\w+)\] .*(?:DID_NO_CONNECT|offlin)"),
    )
)
NAMED = 3


@dataclass(frozen=True)
class Event:
    """One line about a device, at so many seconds since boot."""

    kind: str
    device: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Log:
    """What was read. `error` says why nothing could be."""

    events: tuple[Event, ...] = ()
    now: float = 0.0
    error: str | None = None


def read(path: str = KMSG) -> Log:
    """The kernel's buffer, without waiting for more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Log(error=f"{path}: {error.strerror}")
    records: list[str] = []
    try:
        while len(records) < RECORDS:
            try:
                chunk = os.read(fd, 8192)
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten meanwhile: the next read goes on behind
                    continue
                if error.errno == errno.EAGAIN:
                    break
                return Log(error=f"{path}: {error.strerror}")
            if not chunk:
                break
            records += [chunk.decode(errors="replace")] if path == KMSG else chunk.decode(errors="replace").splitlines(keepends=True)
    finally:
        os.close(fd)
    return Log(tuple(parse(records)), time.monotonic())


def parse(records: Iterable[str]) -> Iterable[Event]:
    """The events among records of /dev/kmsg: `priority,sequence,microseconds,flags;text`, further lines indented."""
    for record in records:
        head, _semicolon, rest = record.partition(";")
        fields = head.split(",")
        if len(fields) < 3 or not fields[2].isdigit():
            continue
        text = rest.split("\n", 1)[0]
        for kind, pattern in PATTERNS:
            match = pattern.search(text)
            if match:
                yield Event(kind, match.group(1).replace("!", "/"), int(fields[2]) / 1e6, text)
                break


def family(source: str, sys: str = "/sys") -> frozenset[str]:
    """The kernel's names of a mount's device and all that it lies on: partition, disk, NVMe controller, members of a volume."""
    if not source.startswith("/dev/"):
        return frozenset()
    found: set[str] = set()
    todo = [os.path.basename(os.path.realpath(source)), os.path.basename(source)]
    while todo:
        name = todo.pop()
        if not name or name in found:
            continue
        found.add(name)
        folder = os.path.realpath(os.path.join(sys, "class/block", name))
        if os.path.exists(os.path.join(folder, "partition")):
            todo.append(os.path.basename(os.path.dirname(folder)))
        slaves = os.path.join(folder, "slaves")
        todo += os.listdir(slaves) if os.path.isdir(slaves) else []
        controller = re.match(r"(nvme\d+)n\d+", name)
        if controller:
            found.add(controller.group(1))
    return frozenset(found)


def of(log: Log, devices: frozenset[str]) -> tuple[Event, ...]:
    """The events about one of the devices."""
    return tuple(event for event in log.events if event.device in devices)


def sentence(events: tuple[Event, ...], now: float) -> str:
    """How many, of which kinds, how long ago, and what the last one said."""
    kinds = ", ".join(sorted({event.kind for event in events}))
    last = events[-1]
    return f"{len(events)} lines since boot ({kinds}), the last {now - last.seconds:.0f} s ago: {last.text[:160]}"
