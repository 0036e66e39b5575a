# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""fstab read and edited without loss: every line that is not the mount point's own stays as it is, to the byte."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ansible_collections.relight.recovery.plugins.module_utils import durable

ESCAPED = {" ": "\\040", "\t": "\\011", "\n": "\\012", "\\": "\\134", "#": "\\043"}
# What an old line says of the mount and not of its file system: taken over by the new one.
CARRIED = re.compile(
    r"(no)?(atime|diratime|relatime|dev|suid|exec|iversion)|strictatime|lazytime|(no)?auto|user|users|owner|group|sync|dirsync"
    r"|comment=.*|_netdev|x-.*"
)
OWN = re.compile(r"nofail|x-systemd\.device-timeout=.*|defaults")
VERIFY_SECONDS = 20.0


class NotVerified(Exception):
    """findmnt finds an error in the new table that the old one had not; the message quotes it."""


@dataclass(frozen=True)
class Line:
    """One line with its end. `fields` is empty for comments, blank lines and what has fewer than two fields."""

    raw: str
    fields: tuple[str, ...] = ()

    @property
    def spec(self) -> str:
        return plain(self.fields[0])

    @property
    def point(self) -> str:
        return plain(self.fields[1])

    @property
    def options(self) -> list[str]:
        return self.fields[3].split(",") if len(self.fields) > 3 else []

    @property
    def uuid(self) -> str | None:
        tag, equals, value = self.spec.partition("=")
        return value.strip('"').lower() if equals and tag == "UUID" else None


def plain(text: str) -> str:
    """Undo the octal escapes of a field."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


def escaped(text: str) -> str:
    return "".join(ESCAPED.get(letter, letter) for letter in text)


def parse(text: str) -> list[Line]:
    """Every line, in order; joined, their raw texts are the file again. Nothing but a newline ends a line."""
    parts = text.split("\n")
    return [_line(f"{part}\n") for part in parts[:-1]] + ([_line(parts[-1])] if parts[-1] else [])


def _line(raw: str) -> Line:
    stripped = raw.strip(" \t\r\n")
    if not stripped or stripped.startswith("#"):
        return Line(raw)
    fields = tuple(re.split(r"[ \t]+", stripped))
    return Line(raw, fields) if len(fields) >= 2 else Line(raw)


def of_point(lines: Iterable[Line], point: str) -> list[Line]:
    """The lines that mount something there. A trailing slash means nothing."""
    wanted = point.rstrip("/") or "/"
    return [line for line in lines if line.fields and (line.point.rstrip("/") or "/") == wanted]


def entry(uuid: str, point: str, fstype: str, old: Line | None, timeout_seconds: int, extra: str = "") -> str:
    """The line that mounts our file system, with what the old line said of the mount itself."""
    carried = [option for option in (old.options if old else []) if CARRIED.fullmatch(option) and not OWN.fullmatch(option)]
    added = [option for option in extra.split(",") if option and option not in carried]
    options = ",".join(["defaults", *carried, *added, "nofail", f"x-systemd.device-timeout={timeout_seconds}s"])
    return f"UUID={uuid} {escaped(point)} {fstype} {options} 0 {0 if fstype == 'xfs' else 2}\n"


def replaced(text: str, point: str, new: Iterable[str]) -> str:
    """The table with the mount point's lines replaced, in the place of the first of them, or at the end."""
    lines = parse(text)
    mine = of_point(lines, point)
    fresh = [line if line.endswith("\n") else f"{line}\n" for line in new]
    if not mine:
        start = text if not text or text.endswith("\n") else f"{text}\n"
        return start + "".join(fresh)
    out: list[str] = []
    placed = False
    for line in lines:
        if not any(line is one for one in mine):
            out.append(line.raw)
        elif not placed:
            out += fresh
            placed = True
    return "".join(out)


def read(path: str) -> str:
    """The table's text; empty where there is none. Raises OSError."""
    try:
        with open(path, "rb") as handle:
            return handle.read().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return ""


def errors(path: str) -> set[str] | None:
    """What findmnt calls an error in a table, or None where it cannot be asked."""
    try:
        done = subprocess.run(
            ["findmnt", "--verify", "--tab-file", path],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERIFY_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found: set[str] = set()
    point = ""
    for line in done.stdout.splitlines():
        if line and not line.startswith(" "):
            point = line.strip()
        elif "[E]" in line:
            found.add(f"{point}: {line.partition('[E]')[2].strip()}")
    if done.returncode and not found:  # a table that cannot be parsed at all is told on the other channel
        found = {line.strip() for line in done.stderr.splitlines() if "parse" in line}
    return found


def write(path: str, text: str) -> str | None:
    """Replace the table durably, with owner, mode, ACL and label kept. The backup's path, or None without one.

    findmnt judges the new table before it is the table. Raises NotVerified, OSError.
    """
    before = read(path)
    if text == before:
        return None
    known = errors(path) if os.path.exists(path) else set()
    candidate = f"{path}.relight-new"
    try:
        status = os.stat(path)
        about = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    except FileNotFoundError:
        status, about = None, {}
    backup = None
    if status is not None:
        backup = f"{path}.relight-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        with durable.replacing(backup, status.st_mode & 0o777) as handle:
            handle.write(before.encode("utf-8", "surrogateescape"))
    try:
        with open(candidate, "wb") as handle:
            handle.write(text.encode("utf-8", "surrogateescape"))
            handle.flush()
            if status is not None:
                os.fchown(handle.fileno(), status.st_uid, status.st_gid)
                os.fchmod(handle.fileno(), status.st_mode & 0o7777)
                for name, value in about.items():
                    os.setxattr(handle.fileno(), name, value)
            os.fsync(handle.fileno())
        found = errors(candidate)
        if found is not None and known is not None and found - known:
            raise NotVerified("; ".join(sorted(found - known)))
        os.rename(candidate, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(candidate)
        raise
    durable.fsync_directory(os.path.dirname(os.path.abspath(path)))
    return backup
