# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What the parts of a storage migration share: its record on the host, its manifest, and where both lie.

A migration is one folder below the state directory: `migration.json` (the plan and how far it is), `job.json` (what the copy
service is told), `progress.json` (replaced by it each second), `manifest.jsonl` (what was copied and read back, with digests).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import durable

SCHEMA = 1
UNIT = "relight-migrate"
MARKER = ".relight-migration"  # in the root of an unfinished target: nothing else is ever written there by a service of ours
PHASES = ("planned", "preparing", "prepared", "copied", "verified", "cutting_over", "cut_over", "rolled_back", "reclaimed")


class NotOurs(Exception):
    """The record was written by a newer Relight, or is no record; the message is one sentence."""


@dataclass(frozen=True)
class Record:
    """A migration as the host remembers it. Paths are absolute; `target` is the disk's stable name, `target_uuid` our file system's.

    `still_at` is when the source was seen to stand still, in seconds of the boot `still_boot`.
    """

    id: str
    phase: str
    data: str
    source: str
    source_uuid: str
    source_device: str
    source_fstype: str
    target: str
    target_uuid: str
    fstype: str
    stage: str
    aside: str
    fstab: str
    options: str
    partitioned: bool
    size_bytes: int = 0
    fstab_before: list[str] = field(default_factory=list)
    fstab_line: str = ""
    guarded: str = ""
    still_boot: str = ""
    still_at: float = 0.0
    times: dict[str, float] = field(default_factory=dict)

    def at(self, phase: str, now: float) -> Record:
        """The record in another phase."""
        return replace(self, phase=phase, times={**self.times, phase: round(now, 3)})

    def reached(self, phase: str) -> bool:
        return self.phase != "rolled_back" and PHASES.index(self.phase) >= PHASES.index(phase)


def folder(state_dir: str) -> str:
    return os.path.join(state_dir, "migration")


def read(state_dir: str) -> Record | None:
    """The host's migration, or None. Raises OSError, NotOurs."""
    path = os.path.join(folder(state_dir), "migration.json")
    try:
        with open(path, encoding="utf-8") as handle:
            value = json.load(handle)
    except FileNotFoundError:
        return None
    except ValueError:
        raise NotOurs(f"{path} is not JSON") from None
    if not isinstance(value, dict) or value.pop("schema", None) != SCHEMA:
        raise NotOurs(f"{path} was not written by this version of Relight")
    known = {item.name for item in fields(Record)}
    return Record(**{name: item for name, item in value.items() if name in known})


def write(state_dir: str, record: Record) -> None:
    """Remember, durably. Raises OSError."""
    os.makedirs(folder(state_dir), mode=0o700, exist_ok=True)
    durable.write_json(os.path.join(folder(state_dir), "migration.json"), {"schema": SCHEMA, **asdict(record)}, 0o600)


def archive(state_dir: str, record: Record) -> None:
    """Put a finished migration's folder aside, so that another may begin. Its manifest is kept. Raises OSError."""
    os.rename(folder(state_dir), f"{folder(state_dir)}-{record.id}-{record.phase}")
    durable.fsync_directory(state_dir)


@dataclass(frozen=True)
class Entry:
    """One file of the manifest: what the source was when it was read, its digest, and whether the medium gave that digest back."""

    path: str
    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    digest: str
    verified: bool = False


def read_manifest(path: str) -> dict[str, Entry]:
    """The files by their path within the source; the last word about each counts. Raises OSError."""
    found: dict[str, Entry] = {}
    for line in durable.read_lines(path):
        name = line.get("path")
        if not isinstance(name, str):
            continue
        event = line.get("event")
        if event == "copied":
            try:
                found[name] = Entry(name, line["bytes"], line["mtime_ns"], line["ctime_ns"], line["inode"], line["digest"])
            except KeyError:
                continue
        elif event == "verified" and name in found and found[name].digest == line.get("digest"):
            found[name] = replace(found[name], verified=True)
        elif event == "dropped":
            found.pop(name, None)
    return found


class Manifest:
    """The manifest being written by the one copy service. Lines of many threads; each call is one durable write."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        end = os.fstat(self._fd).st_size
        if end and os.pread(self._fd, 1, end - 1) != b"\n":  # torn by a former life
            os.write(self._fd, b"\n")

    def add(self, lines: Iterable[dict[str, Any]]) -> None:
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if not data:
            return
        with self._lock:
            if os.write(self._fd, data) != len(data):
                raise OSError(28, "short append to the manifest")
        os.fsync(self._fd)

    def copied(self, entries: Iterable[Entry]) -> None:
        self.add({"event": "copied", **{k: v for k, v in asdict(entry).items() if k != "verified"}} for entry in entries)

    def verified(self, entries: Iterable[Entry]) -> None:
        self.add({"event": "verified", "path": entry.path, "digest": entry.digest} for entry in entries)

    def dropped(self, paths: Iterable[str], why: str) -> None:
        self.add({"event": "dropped", "path": path, "why": why} for path in paths)

    def close(self) -> None:
        os.close(self._fd)
