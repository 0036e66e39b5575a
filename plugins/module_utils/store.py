# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The sample store: how samples are written durably in their layout, what is known of them, and how doubt is put aside.

A file becomes a sample in this order: temporary name, fsync, rename, fsync of the directory, line in the manifest. A kill between
any two of these leaves either no sample or a whole one; the inventory judges by content, so a lost manifest line costs a look only.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ansible_collections.relight.recovery.plugins.module_utils import ckpt
from ansible_collections.relight.recovery.plugins.module_utils.durable import (
    TEMPORARY,
    append_line,
    fsync_directory,
    read_lines,
    replacing,
    write_json,
)
from ansible_collections.relight.recovery.plugins.module_utils.layouts import Layout, Sample

SCHEMA = 1
MANIFEST = "MANIFEST.jsonl"
RUNS = "runs.json"
QUARANTINE = "quarantine"
QUARANTINED = ".quarantined"  # ends every name in quarantine, so that a trainer that walks the whole store lists none
LOCK = ".relight-lock"
DIGEST = "xxh3_128"
HERE = "."  # the one shard directory of a flat layout: the store itself


class NewerStore(Exception):
    """The store was written by a newer Relight; the message is one sentence."""


class Locked(Exception):
    """Another client writes this store; the message says which."""


class Hasher(Protocol):
    """What the store needs of a digest: xxhash.xxh3_128() is one."""

    def update(self, data: Any, /) -> object: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Entry:
    """One line of a manifest. `file` is the name within the shard directory; `digest` is that of the whole file.

    `evidence` says what the line rests on, where it was not made while the file was written: see inventory.TRUST.
    """

    index: int
    file: str
    bytes: int
    tokens: int
    token_digest: str
    run: str
    digest: str
    time: float
    evidence: str = ""


_ENTRY_TYPES: dict[str, tuple[type, ...]] = {
    "index": (int,),
    "file": (str,),
    "bytes": (int,),
    "tokens": (int,),
    "token_digest": (str,),
    "run": (str,),
    "digest": (str,),
    "time": (int, float),
}


class Manifest:
    """MANIFEST.jsonl of one shard directory: append-only, tolerant of torn lines, the last line about an index counts."""

    def __init__(self, shard: str) -> None:
        self.path = os.path.join(shard, MANIFEST)

    def append(self, entry: Entry) -> None:
        """Raises OSError."""
        told = {"schema": SCHEMA, **asdict(entry)}
        if not entry.evidence:
            del told["evidence"]
        append_line(self.path, json.dumps(told, sort_keys=True))

    def forget(self, index: int) -> None:
        """Say that what is known of an index no longer holds, since its file was moved away. Raises OSError."""
        append_line(self.path, json.dumps({"schema": SCHEMA, "index": index, "gone": True}, sort_keys=True))

    def read(self) -> dict[int, Entry]:
        """Entries by index. Raises OSError, NewerStore."""
        found: dict[int, Entry] = {}
        for line in read_lines(self.path):
            if isinstance(line.get("schema"), int) and line["schema"] > SCHEMA:
                raise NewerStore(f"{self.path} has schema {line['schema']}, written by a newer Relight")
            if line.get("gone") is True and isinstance(line.get("index"), int):
                found.pop(line["index"], None)
            elif all(isinstance(line.get(name), kinds) for name, kinds in _ENTRY_TYPES.items()):
                evidence = line.get("evidence")
                entry = Entry(**{name: line[name] for name in _ENTRY_TYPES}, evidence=evidence if isinstance(evidence, str) else "")
                found[entry.index] = entry
        return found


@dataclass
class Runs:
    """runs.json: the runs that wrote samples here, and the continuity checks that link server instances."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)

    def identity_of(self, run: str) -> dict[str, Any] | None:
        """The identity under which a run wrote, or None for a run that is not known."""
        return next((item.get("identity", {}) for item in self.runs if item.get("run") == run), None)

    @property
    def identity(self) -> dict[str, Any] | None:
        """The identity of the latest run, against which samples are judged."""
        return self.runs[-1].get("identity") if self.runs else None


class Digesting:
    """A sink that digests and counts what passes to a file."""

    def __init__(self, sink: ckpt.Sink, hasher: Hasher) -> None:
        self.sink = sink
        self.hasher = hasher
        self.bytes = 0

    def write(self, data: ckpt.Buffer, /) -> None:
        self.hasher.update(data)
        self.sink.write(data)
        self.bytes += memoryview(data).nbytes


class Store:
    """A directory of samples in one layout."""

    def __init__(self, path: str, samples: Layout) -> None:
        self.path = path
        self.layout = samples

    def path_of(self, index: int) -> str:
        return os.path.join(self.path, self.layout.path_of(index))

    # runs

    def runs(self) -> Runs:
        """What runs.json says; empty where it is missing. Raises OSError, ValueError (not JSON), NewerStore."""
        path = os.path.join(self.path, RUNS)
        try:
            with open(path, "rb") as handle:
                value = json.load(handle)
        except FileNotFoundError:
            return Runs()
        if not isinstance(value, dict):
            raise ValueError(f"{path} does not hold an object")
        if value.get("schema", SCHEMA) > SCHEMA:
            raise NewerStore(f"{path} has schema {value['schema']}, written by a newer Relight")
        runs, links = value.get("runs", []), value.get("links", [])
        if not all(isinstance(items, list) and all(isinstance(item, dict) for item in items) for items in (runs, links)):
            raise ValueError(f"{path} does not hold lists of runs and links")
        return Runs(runs, links)

    def _write_runs(self, runs: Runs) -> None:
        os.makedirs(self.path, exist_ok=True)
        write_json(os.path.join(self.path, RUNS), {"schema": SCHEMA, "runs": runs.runs, "links": runs.links})

    def add_run(self, run: str, identity: Mapping[str, Any], provenance: Mapping[str, Any], started: float, instance: str) -> None:
        """Append a run, or replace the one of this name. Hold the store's lock. Raises OSError, ValueError, NewerStore."""
        runs = self.runs()
        new = {"run": run, "identity": dict(identity), "provenance": dict(provenance), "started": started, "instance": instance}
        runs.runs = [item for item in runs.runs if item.get("run") != run] + [new]
        self._write_runs(runs)

    def add_link(self, link: Mapping[str, Any]) -> None:
        """Append a continuity check's outcome. Raises OSError, ValueError, NewerStore."""
        runs = self.runs()
        runs.links.append(dict(link))
        self._write_runs(runs)

    # samples

    def add(self, sample: Sample, hasher: Hasher, time: float) -> Entry:
        """Write one sample durably, replacing what is in its place, and enter it in the manifest. Raises OSError.

        `hasher` is a fresh xxh3_128. Several threads may add different samples at once.
        """
        path = self.path_of(sample.index)
        shard, name = os.path.split(path)
        if not os.path.isdir(shard):
            os.makedirs(shard, exist_ok=True)
            fsync_directory(os.path.dirname(shard))
        with replacing(path) as handle:
            out = Digesting(handle, hasher)
            self.layout.write(out, sample)
        digest = f"{DIGEST}:{hasher.hexdigest()}"
        entry = Entry(sample.index, name, out.bytes, sample.tokens, sample.token_digest, sample.run, digest, round(time, 3))
        Manifest(shard).append(entry)
        return entry

    def shards(self) -> list[str]:
        """The names of the shard directories, in the order of their first index; a flat layout has one, HERE. Raises OSError."""
        if self.layout.flat:
            os.stat(self.path)
            return [HERE]
        with os.scandir(self.path) as items:
            names = [item.name for item in items if self.layout.is_shard(item.name) and item.is_dir()]
        return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])

    def entries_of(self, shard: str) -> dict[int, Entry]:
        """What the manifest of one shard directory says. Raises OSError, NewerStore."""
        return Manifest(os.path.join(self.path, shard)).read()

    def entries(self) -> dict[int, Entry]:
        """What all manifests say, whether the files are there or not. Raises OSError, NewerStore."""
        found: dict[int, Entry] = {}
        for shard in self.shards():
            found.update(self.entries_of(shard))
        return found

    # temporary files

    def temporaries(self) -> list[str]:
        """Paths of unfinished writes, of this process or of dead ones. Raises OSError."""
        found = []
        for folder in {"", *self.shards()} - {HERE}:
            with os.scandir(os.path.join(self.path, folder)) as items:
                found += [item.path for item in items if item.name.startswith(TEMPORARY)]
        return sorted(found)

    def sweep(self) -> int:
        """Remove unfinished writes of former lives; returns how many. Hold the store's lock. Raises OSError."""
        found = self.temporaries()
        for path in found:
            os.unlink(path)
        return len(found)

    @contextmanager
    def exclusive(self, who: str) -> Iterator[None]:
        """Be the one client that writes this store, for the block. The kernel drops the lock with the process. Raises Locked, OSError."""
        os.makedirs(self.path, exist_ok=True)
        fd = os.open(os.path.join(self.path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 500, 0).decode(errors="replace").strip() or "an unnamed process"
                raise Locked(f"the store {self.path} is being written by {holder}") from None
            self._own(os.path.join(self.path, LOCK))
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{who}, pid {os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    def writer(self) -> str | None:
        """Who holds the store's lock now, or None. Changes nothing. Raises OSError."""
        try:
            fd = os.open(os.path.join(self.path, LOCK), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(fd, 500, 0).decode(errors="replace").strip() or "an unnamed process"
        finally:
            os.close(fd)
        return None

    def _own(self, *paths: str) -> None:
        """Give what root made to the store's owner, who works here without root. Raises OSError."""
        if os.geteuid() == 0:
            status = os.stat(self.path)
            for path in paths:
                os.chown(path, status.st_uid, status.st_gid)

    def enter(self, shard: str, entry: Entry) -> None:
        """Append a line about a file that is there already. Raises OSError."""
        manifest = Manifest(os.path.join(self.path, shard))
        manifest.append(entry)
        self._own(manifest.path)

    # quarantine

    def quarantine(self, path: str, reason: str, utc: str, what: str = "") -> str:
        """Move a file out of the readers' sight, never deleting it; returns its new path. Raises OSError.

        `path` is relative to the store; `reason` one word; `utc` names the recovery, as 20260131T235959Z. The reason line is
        written first: a kill in between leaves a line about a file that is still in its place, and the next run moves it.
        """
        folder = os.path.join(self.path, QUARANTINE, f"{utc}-{reason}")
        source, target = os.path.join(self.path, path), os.path.join(folder, path + QUARANTINED)
        while os.path.lexists(target):
            target += QUARANTINED
        os.makedirs(os.path.dirname(target), exist_ok=True)
        line = {"schema": SCHEMA, "file": os.path.relpath(target, folder), "from": path, "reason": reason, "what": what}
        append_line(os.path.join(folder, "reason.jsonl"), json.dumps(line, sort_keys=True))
        made = (os.path.dirname(target), folder, os.path.dirname(folder))
        self._own(*made, os.path.join(folder, "reason.jsonl"))
        for directory in (*made, self.path):
            fsync_directory(directory)
        _move(source, target)
        manifest = Manifest(os.path.dirname(source))
        if os.path.exists(manifest.path):
            index = self._index_of(path, manifest)
            if index is not None:
                manifest.forget(index)
        return target

    def _index_of(self, path: str, manifest: Manifest) -> int | None:
        """A name that the layout cannot read without its records is looked up in the manifest."""
        index = self.layout.index_of(path)
        if index is None and self.layout.by_record:
            name = os.path.basename(path)
            index = next((entry.index for entry in manifest.read().values() if entry.file == name), None)
        return index

    def quarantined(self) -> list[str]:
        """Paths of the files in quarantine. A missing quarantine is empty. Raises OSError."""
        found = []
        for folder, _folders, names in os.walk(os.path.join(self.path, QUARANTINE)):
            found += [os.path.join(folder, name) for name in names if name.endswith(QUARANTINED)]
        return sorted(found)

    def retell(self) -> int:
        """Write the reason lines that files in quarantine lack; returns how many. Raises OSError."""
        written = 0
        for path in self.quarantined():
            top = os.path.relpath(path, os.path.join(self.path, QUARANTINE)).split(os.sep)[0]
            folder = os.path.join(self.path, QUARANTINE, top)
            name = os.path.relpath(path, folder)
            reasons = os.path.join(folder, "reason.jsonl")
            if not any(line.get("file") == name for line in read_lines(reasons)):
                origin = re.sub(rf"(?:{re.escape(QUARANTINED)})+\Z", "", name)
                line = {
                    "schema": SCHEMA,
                    "file": name,
                    "from": origin,
                    "reason": top.partition("-")[2],
                    "what": "told again from its place",
                }
                append_line(reasons, json.dumps(line, sort_keys=True))
                written += 1
        return written


def _move(source: str, target: str) -> None:
    """Rename durably; across file systems, copy to a temporary name on the target first."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != 18:  # EXDEV: the shard directory is a mount or a link to another disk
            raise
        with open(source, "rb") as old, replacing(target) as new:
            shutil.copyfileobj(old, new, 4 << 20)
        os.unlink(source)
    fsync_directory(os.path.dirname(target))
    fsync_directory(os.path.dirname(source))
