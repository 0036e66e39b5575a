# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Which mount really holds a path, as the kernel tells it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. `read_only` holds for the mount or its whole file system."""

    point: str
    fstype: str
    source: str
    device: tuple[int, int]
    read_only: bool
    root: str = "/"


def parse(text: str) -> list[Mount]:
    """The mounts of /proc/self/mountinfo, in order: a later one on the same point covers an earlier."""
    return [_mount(line) for line in text.splitlines() if " - " in line]


def _mount(line: str) -> Mount:
    before, _dash, after = line.partition(" - ")
    fields, tail = before.split(" "), after.split(" ")
    major, _colon, minor = fields[2].partition(":")
    options = set(fields[5].split(",")) | set(tail[2].split(",") if len(tail) > 2 else ())
    return Mount(_plain(fields[4]), tail[0], _plain(tail[1]), (int(major), int(minor)), "ro" in options, _plain(fields[3]))


def _plain(text: str) -> str:
    """Undo the kernel's octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


def holding(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that holds `path`, which must be absolute and without links."""
    best = None
    for mount in mounts:
        inside = mount.point == "/" or path == mount.point or path.startswith(f"{mount.point}/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def read() -> list[Mount]:
    """The mounts that this process sees. Raises OSError."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as handle:
        return parse(handle.read())


def of(path: str) -> Mount | None:
    """The mount that holds an existing path, links followed. Raises OSError."""
    return holding(os.path.realpath(path), read())
