# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The copy service of a migration: walks the source, copies what the target lacks, reads it back, and says how far it is.

Runs as a unit of its own (`python -m ...migration_service JOB`), so that neither a dropped connection nor a killed playbook
ends it. Killed itself, it starts where it was: what the manifest holds and the target has is not copied again, what was read
back is not read again. A read that hangs is left to a thread that nobody waits for, and its file is listed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import queue
import resource
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Callable

from ansible_collections.relight.recovery.plugins.module_utils import copier, durable, migration
from ansible_collections.relight.recovery.plugins.module_utils.copier import Changed, Copier, SourceError
from ansible_collections.relight.recovery.plugins.module_utils.journal import boot_id
from ansible_collections.relight.recovery.plugins.module_utils.migration import Entry, Manifest

BATCH_FILES = 512
BATCH_BYTES = 64 << 20
STUCK_MOST = 8  # threads left behind at hanging reads before the pass gives up
LISTED = 1000  # unreadable or changing files that progress.json names; the rest is counted
TRIES = 3  # of a file that changes while it is read
RATE_SECONDS = 10.0
PR_SET_PDEATHSIG = 1
EXIT_DONE, EXIT_GAVE_UP, EXIT_STOPPED = 0, 4, 3


class GaveUp(Exception):
    """The pass cannot go on; `code` is that of the gate's problem."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


class Abandoned(Exception):
    """This thread hung, was given up and came back."""


@dataclass(frozen=True)
class Job:
    """What the service is told. `final` makes the target equal to a source that nobody writes any more."""

    id: str
    source: str
    target: str
    folder: str
    final: bool
    digest: str
    workers: int = 4
    stall_seconds: float = 120.0

    @classmethod
    def load(cls, path: str) -> Job:
        with open(path, encoding="utf-8") as handle:
            value = json.load(handle)
        return cls(**{item.name: value[item.name] for item in fields(cls) if item.name in value})

    @property
    def name(self) -> str:
        return "final" if self.final else "live"


@dataclass
class Item:
    """A file system entry of the source. `links` are further names of the same file."""

    path: str
    status: os.stat_result
    links: list[str] = field(default_factory=list)


@dataclass
class Numbers:
    """How far the pass is; what progress.json shows."""

    files_total: int = 0
    files_done: int = 0
    bytes_total: int = 0
    bytes_done: int = 0
    copied_files: int = 0
    copied_bytes: int = 0
    read_back_files: int = 0
    read_back_bytes: int = 0
    removed: int = 0


class Worker(threading.Thread):
    """One thread with its own copier. `since` and `at` tell the watcher where it is."""

    def __init__(self, service: Service, number: int) -> None:
        super().__init__(daemon=True)
        self.service = service
        self.abandoned = False
        self.since = 0.0
        self.at = ""
        self.now = ""
        self.rest: list[Item] = []  # what others take over should this thread hang, by `takes_over`
        self.takes_over: Callable[[list[Item], Worker], None] | None = None
        job = service.job
        self.copier = Copier(job.source, job.target, job.digest, f"{os.getpid()}-{number}", self.beat)

    def beat(self, count: int, at: str) -> None:
        if self.abandoned:
            raise Abandoned
        self.since = time.monotonic()
        self.at = at
        if count:
            self.service.moved(count)

    def holds(self, items: list[Item], takes_over: Callable[[list[Item], Worker], None]) -> None:
        self.rest, self.takes_over = items, takes_over

    def begin(self, path: str, at: str) -> None:
        self.now = path
        self.beat(0, at)

    def run(self) -> None:
        service = self.service
        try:
            while True:
                task = service.tasks.get()
                if task is None:
                    return
                try:
                    task(self)
                finally:
                    self.since = 0.0
                    with service.lock:  # either this thread ends its task or the watch does
                        if not self.abandoned:
                            self.now, self.rest, self.takes_over = "", [], None
                            service.tasks.task_done()
        except Abandoned:
            return
        except BaseException as error:  # told by the main thread, which ends the pass
            if not self.abandoned:
                service.fail(error)


class Service:
    """One pass over the tree."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.numbers = Numbers()
        self.tasks: queue.Queue[Callable[[Worker], None] | None] = queue.Queue()
        self.workers: list[Worker] = []
        self.stuck: list[Worker] = []
        self.unreadable: dict[str, str] = {}
        self.changing: dict[str, str] = {}
        self.differing: dict[str, str] = {}
        self.phase = "starting"
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.seen: deque[tuple[float, int]] = deque()
        self.started = time.time()
        self.began_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.dirs: list[Item] = []
        self.files: list[Item] = []
        self.others: list[Item] = []
        self.pending: dict[str, Entry] = {}
        self.entries: dict[str, Entry] = {}
        self.manifest: Manifest
        self.device = 0

    # progress

    def moved(self, count: int) -> None:
        with self.lock:
            self.numbers.bytes_done += count

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error

    def write_progress(self, phase: str | None = None) -> None:
        self.phase = phase or self.phase
        now = time.monotonic()
        numbers = self.numbers
        self.seen.append((now, numbers.bytes_done))
        while len(self.seen) > 2 and now - self.seen[0][0] > RATE_SECONDS:
            self.seen.popleft()
        then, before = self.seen[0]
        bytes_now = numbers.bytes_done
        rate = (bytes_now - before) / (now - then) if now > then else 0.0
        left = max(0, numbers.bytes_total - numbers.bytes_done)
        durable.write_json(
            os.path.join(self.job.folder, "progress.json"),
            {
                "schema": migration.SCHEMA,
                "id": self.job.id,
                "pass": self.job.name,
                "time": round(time.time(), 3),
                "started": round(self.started, 3),
                "began_at": self.began_at,
                "boot_id": boot_id(),
                "pid": os.getpid(),
                "phase": self.phase,
                **asdict(numbers),
                "bytes_per_s": round(rate),
                "eta_seconds": round(left / rate, 1) if rate else None,
                "bytes_done": min(numbers.bytes_done, numbers.bytes_total),
                "current": next((worker.now for worker in self.workers if worker.now), ""),
                "digest": self.job.digest,
                "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "unreadable": dict(list(self.unreadable.items())[:LISTED]),
                "unreadable_files": len(self.unreadable),
                "changing": dict(list(self.changing.items())[:LISTED]),
                "changing_files": len(self.changing),
                "differing": dict(list(self.differing.items())[:LISTED]),
                "differing_files": len(self.differing),
                "error": self._told(),
            },
            0o644,
        )

    def _told(self) -> dict[str, str] | None:
        error = self.error
        if error is None:
            return None
        if isinstance(error, GaveUp):
            return {"code": error.code, "what": str(error)}
        if isinstance(error, OSError):
            code = "target-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "target-io-error"
            where = f" ({error.filename})" if error.filename else ""
            return {"code": code, "what": f"{error.strerror or error}{where}"}
        return {"code": "copy-broke", "what": f"{type(error).__name__}: {error}"}

    # the pass

    def run(self) -> int:
        os.makedirs(self.job.folder, exist_ok=True)
        try:
            self._check_target()
            self.entries = migration.read_manifest(self._path("manifest.jsonl"))
            self.manifest = Manifest(self._path("manifest.jsonl"))
            self.write_progress("scanning")
            for _worker in range(self.job.workers):
                self._start_worker()
            self._do(self._scan)
            self._copy()
            if self.job.final:
                self.write_progress("settling")
                self._do(self._settle_tree)
            self._verify()
            copier.sync_file_system(self.job.target)
            if self.job.final and not self.changing and not self.differing:
                self._write_tree()
        except BaseException as error:
            self.fail(error)
        if self.error is None and self.differing:
            self.fail(GaveUp("copy-differs", f"{len(self.differing)} files were read back from the target with other bytes"))
        if self.error is None and self.changing and self.job.final:
            self.fail(GaveUp("source-changing", f"{len(self.changing)} files were written to while they were copied"))
        self.write_progress("failed" if self.error else "done")
        if isinstance(self.error, (KeyboardInterrupt, SystemExit)):
            return EXIT_STOPPED
        return EXIT_GAVE_UP if self.error else EXIT_DONE

    def _path(self, name: str) -> str:
        return os.path.join(self.job.folder, name)

    def _check_target(self) -> None:
        """The target is the mounted file system that was prepared for this migration, and no bare directory. Raises GaveUp."""
        try:
            with open(os.path.join(self.job.target, migration.MARKER), encoding="ascii") as handle:
                found = handle.read().strip()
        except OSError as error:
            raise GaveUp("target-not-staged", f"{self.job.target} does not carry this migration's mark: {error.strerror}") from None
        if found != self.job.id:
            raise GaveUp("target-not-staged", f"{self.job.target} carries the mark of migration {found}")

    def _start_worker(self) -> None:
        worker = Worker(self, len(self.workers) + len(self.stuck))
        self.workers.append(worker)
        worker.start()

    def _do(self, *tasks: Callable[[Worker], None]) -> None:
        """Have the workers do this, and wait for it."""
        for task in tasks:
            self.tasks.put(task)
        self._wait()

    def _wait(self) -> None:
        """Until every task is done: watch for threads that hang, and write the progress. Raises what a worker raised."""
        written = time.monotonic()
        while True:
            with self.tasks.all_tasks_done:
                if self.error is None and self.tasks.unfinished_tasks:
                    self.tasks.all_tasks_done.wait(0.2)
                over = not self.tasks.unfinished_tasks
            if self.error is not None:
                raise self.error
            if over:
                return
            now = time.monotonic()
            for worker in list(self.workers):
                if worker.since and now - worker.since > self.job.stall_seconds:
                    self._abandon(worker)
            if now - written >= 1.0:
                self.write_progress()
                written = now

    def _abandon(self, worker: Worker) -> None:
        """Go on without a thread that hangs. Raises GaveUp."""
        with self.lock:
            if not worker.since:
                return  # it came back at the last moment
            worker.abandoned = True
        if worker.at != "source":
            raise GaveUp("target-hung", f"the target did not answer for {self.job.stall_seconds:g} s, at {worker.now!r}")
        self.unreadable[worker.now] = f"did not answer for {self.job.stall_seconds:g} s"
        self.workers.remove(worker)
        self.stuck.append(worker)
        if len(self.stuck) > STUCK_MOST or worker.takes_over is None:
            raise GaveUp("source-hung", f"the source does not answer, last at {worker.now!r}")
        rest = [item for item in worker.rest if item.path != worker.now]
        if rest:
            self.tasks.put(partial(worker.takes_over, rest))
        self.tasks.task_done()
        self._start_worker()

    # scanning

    def _scan(self, worker: Worker) -> None:
        """List the source. Folders come before what they hold."""
        job = self.job
        worker.begin(".", "source")
        with copier.of_source():
            root = os.lstat(job.source)
        self.device = root.st_dev
        self.dirs.append(Item("", root))
        by_inode: dict[int, Item] = {}
        todo = [""]
        while todo:
            folder = todo.pop()
            worker.begin(folder or ".", "source")
            try:
                with copier.of_source(), os.scandir(os.path.join(job.source, folder)) as found:
                    items = [(os.path.join(folder, item.name), item) for item in found]
            except SourceError as error:
                self.unreadable[f"{folder}/"] = str(error)
                continue
            for path, item in sorted(items, key=lambda pair: pair[0]):
                if path == migration.MARKER:
                    continue
                worker.beat(0, "source")
                try:
                    with copier.of_source():
                        status = item.stat(follow_symlinks=False)
                except SourceError as error:
                    self.unreadable[path] = str(error)
                    continue
                if status.st_dev != self.device:
                    self.unreadable[f"{path}/"] = "is another file system"
                elif stat.S_ISDIR(status.st_mode):
                    self.dirs.append(Item(path, status))
                    todo.append(path)
                elif status.st_nlink > 1 and status.st_ino in by_inode:
                    by_inode[status.st_ino].links.append(path)
                else:
                    entry = Item(path, status)
                    if status.st_nlink > 1:
                        by_inode[status.st_ino] = entry
                    (self.files if stat.S_ISREG(status.st_mode) else self.others).append(entry)
        if self.unreadable.get("/"):
            raise GaveUp("source-unreadable", f"{job.source}: {self.unreadable['/']}")
        self.numbers.files_total = len(self.files)

    # copying

    def _needed(self, item: Item) -> bool:
        """Whether the target lacks this file as it is now. Its content is known by the manifest, not by its size and time."""
        entry = self.entries.get(item.path)
        status = item.status
        if entry is None or (entry.bytes, entry.mtime_ns, entry.ctime_ns, entry.inode) != (
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
        ):
            return True
        try:
            have = os.lstat(os.path.join(self.job.target, item.path))
        except FileNotFoundError:
            return True
        return have.st_size != status.st_size or not copier.same_metadata(have, status)

    def _copy(self) -> None:
        self._make_folders()
        needed = [item for item in self.files if self._needed(item)]
        kept = [item for item in self.files if item.path in self.entries]
        wanted = {item.path for item in needed}
        unread = [self.entries[item.path] for item in kept if item.path not in wanted and not self.entries[item.path].verified]
        copy_bytes = sum(item.status.st_size for item in needed)
        self.numbers.bytes_total = 2 * copy_bytes + sum(entry.bytes for entry in unread)
        self.numbers.files_done = len(self.files) - len(needed)
        self.pending = {entry.path: entry for entry in unread}
        for item in needed:
            self._clear(item.path)
        self.write_progress("copying")
        self._do(*self._tasks(needed))
        self._do(partial(self._others, self.others))
        for item in self.files:
            self._link(item)

    def _tasks(self, items: list[Item]) -> Iterable[Callable[[Worker], None]]:
        """Large files alone, small ones together, in the order of the tree."""
        batch: list[Item] = []
        size = 0
        for item in items:
            if item.status.st_size > copier.SMALL_BYTES:
                yield partial(self._large, [item])
                continue
            batch.append(item)
            size += item.status.st_size
            if len(batch) >= BATCH_FILES or size >= BATCH_BYTES:
                yield partial(self._small, batch)
                batch, size = [], 0
        if batch:
            yield partial(self._small, batch)

    def _attempt(self, worker: Worker, item: Item, copy: Callable[[str], Entry]) -> Entry | None:
        """Copy one file, again where it changes meanwhile. None where it cannot be read or keeps changing."""
        for _attempt in range(TRIES):
            worker.begin(item.path, "source")
            try:
                return copy(item.path)
            except Changed:
                continue
            except SourceError as error:
                if error.errno == errno.ENOENT and not self.job.final:
                    return None  # removed meanwhile by a writer that still runs
                self.unreadable[item.path] = str(error)
                return None
        self.changing[item.path] = "was written to while it was read"
        return None

    def _large(self, items: list[Item], worker: Worker) -> None:
        worker.holds(items, self._large)
        for item in items:
            entry = self._attempt(worker, item, worker.copier.large)
            if entry:
                self._copied([entry])

    def _small(self, items: list[Item], worker: Worker) -> None:
        """Many small files, one sync: then they get their names, then the manifest's lines."""
        worker.holds(items, self._small)
        written = [entry for entry in (self._attempt(worker, item, worker.copier.small) for item in items) if entry]
        worker.begin(items[-1].path, "target")
        copier.sync_file_system(self.job.target)
        worker.beat(0, "target")
        for entry in written:
            worker.copier.name(entry.path)
        self._copied(written)

    def _copied(self, entries: list[Entry]) -> None:
        self.manifest.copied(entries)
        with self.lock:
            for entry in entries:
                self.entries[entry.path] = entry
                self.pending[entry.path] = entry
            self.numbers.copied_files += len(entries)
            self.numbers.copied_bytes += sum(entry.bytes for entry in entries)
            self.numbers.files_done += len(entries)

    def _link(self, item: Item) -> None:
        """The further names of a file that has several."""
        if item.path not in self.entries or item.path in self.changing:
            return
        entry = self.entries[item.path]
        lines = []
        for path in item.links:
            known = self.entries.get(path)
            if known is None or known.digest != entry.digest or known.mtime_ns != entry.mtime_ns or known.ctime_ns != entry.ctime_ns:
                lines.append(Entry(path, entry.bytes, entry.mtime_ns, entry.ctime_ns, entry.inode, entry.digest))
            if not _same_inode(os.path.join(self.job.target, path), os.path.join(self.job.target, item.path)):
                self._clear(path)
                self.workers[0].copier.link(path, item.path)
        self.manifest.copied(lines)
        if entry.verified:
            self.manifest.verified(lines)
        for line in lines:
            self.entries[line.path] = replace(line, verified=entry.verified)

    def _make_folders(self) -> None:
        for item in self.dirs:
            path = os.path.join(self.job.target, item.path)
            try:
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    os.unlink(path)
                    os.mkdir(path, 0o700)
            except FileNotFoundError:
                os.mkdir(path, 0o700)

    def _others(self, items: list[Item], worker: Worker) -> None:
        """Symbolic links, devices, fifos and sockets."""
        worker.holds(items, self._others)
        for item in items:
            worker.begin(item.path, "source")
            try:
                if not worker.copier.same_special(item.path, item.status):
                    self._clear(item.path)
                    worker.copier.special(item.path, item.status)
            except SourceError as error:
                self.unreadable[item.path] = str(error)
                continue
            for path in item.links:
                if not _same_inode(os.path.join(self.job.target, path), os.path.join(self.job.target, item.path)):
                    self._clear(path)
                    worker.copier.link(path, item.path)

    def _clear(self, path: str) -> None:
        """Take away a folder that stands where the source now has something else."""
        target = os.path.join(self.job.target, path)
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(target).st_mode):
                _remove_tree(target)

    # the final pass

    def _settle_tree(self, worker: Worker) -> None:
        """Remove what the source no longer has, and give the folders their metadata, the innermost first."""
        wanted = {item.path for item in (*self.dirs, *self.files, *self.others)}
        for item in (*self.files, *self.others):
            wanted.update(item.links)
        hidden = tuple(path for path in self.unreadable if path.endswith("/"))
        for item in self.dirs:
            if item.path + "/" in hidden:
                continue
            worker.begin(item.path, "target")
            with os.scandir(os.path.join(self.job.target, item.path)) as found:
                for entry in found:
                    path = os.path.join(item.path, entry.name)
                    if path in wanted and path not in self.unreadable and path not in self.changing:
                        continue
                    if path == migration.MARKER:
                        continue
                    if path in self.unreadable and path in self.entries:
                        continue  # an earlier pass could read it
                    if entry.is_dir(follow_symlinks=False):
                        _remove_tree(entry.path)
                    else:
                        os.unlink(entry.path)
                    self.numbers.removed += 1
        gone = [path for path in self.entries if path not in wanted and not path.startswith(hidden)]
        self.manifest.dropped(gone, "the source no longer has it")
        for path in gone:
            del self.entries[path]
            self.pending.pop(path, None)
        for item in reversed(self.dirs):
            worker.begin(item.path, "source")
            self._settle_folder(item)

    def _settle_folder(self, item: Item) -> None:
        target = os.path.join(self.job.target, item.path)
        try:
            with copier.of_source():
                about = copier.metadata(os.path.join(self.job.source, item.path), item.status)
        except SourceError as error:
            self.unreadable[f"{item.path}/"] = str(error)
            return
        have = os.lstat(target)
        if not copier.same_metadata(have, item.status) or set(about.xattrs) != set(copier.metadata(target, have).xattrs):
            about.apply(target)

    def _write_tree(self) -> None:
        """What the source held beside files with content: folders, links, devices. With the manifest it is the whole tree."""
        with durable.replacing(self._path("tree.jsonl"), 0o600) as handle:
            for item in (*self.dirs, *self.others):
                line = {"path": item.path, "mode": item.status.st_mode, "mtime_ns": item.status.st_mtime_ns, "links": item.links}
                if stat.S_ISLNK(item.status.st_mode):
                    line["to"] = os.readlink(os.path.join(self.job.target, item.path))
                handle.write(json.dumps(line).encode() + b"\n")

    # reading back

    def _verify(self) -> None:
        self.write_progress("verifying")
        primaries = {item.path: item for item in self.files}
        todo = [entry for path, entry in self.pending.items() if path in primaries and path not in self.unreadable]
        batch: list[Entry] = []
        size = 0
        tasks: list[Callable[[Worker], None]] = []
        for entry in sorted(todo, key=lambda entry: entry.path):
            batch.append(entry)
            size += entry.bytes
            if size >= BATCH_BYTES or len(batch) >= BATCH_FILES:
                tasks.append(partial(self._read_back, batch, primaries))
                batch, size = [], 0
        if batch:
            tasks.append(partial(self._read_back, batch, primaries))
        self._do(*tasks)

    def _read_back(self, batch: list[Entry], primaries: dict[str, Item], worker: Worker) -> None:
        good: list[Entry] = []
        for entry in batch:
            worker.begin(entry.path, "target")
            try:
                wrong = worker.copier.read_back(entry)
            except OSError as error:
                if error.errno not in (errno.EIO, errno.ENODATA, errno.EUCLEAN):
                    raise
                wrong = f"cannot be read back: {error.strerror}"
            paths = [entry.path, *primaries[entry.path].links]
            if wrong is None:
                good += [self.entries[path] for path in paths if path in self.entries]
            else:
                self.differing[entry.path] = wrong
                self.manifest.dropped(paths, wrong)
        self.manifest.verified(good)
        with self.lock:
            self.entries.update({entry.path: replace(entry, verified=True) for entry in good})
            self.numbers.read_back_files += len(good)
            self.numbers.read_back_bytes += sum(entry.bytes for entry in batch)


def _same_inode(a: str, b: str) -> bool:
    try:
        one, two = os.lstat(a), os.lstat(b)
    except FileNotFoundError:
        return False
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


def _remove_tree(path: str) -> None:
    """Remove a folder of the target, which lies on one file system. Raises OSError."""
    with os.scandir(path) as found:
        items = list(found)
    for item in items:
        if item.is_dir(follow_symlinks=False):
            _remove_tree(item.path)
        else:
            os.unlink(item.path)
    os.rmdir(path)


def main(argv: list[str]) -> int:
    """Run the job that the file tells, in a child.

    A thread that hangs in the kernel keeps its process from ending. So that the unit ends nevertheless, its first process only waits
    for the child's word; killed itself, it takes the child with it.
    """
    job = Job.load(argv[0])
    parent = os.getpid()
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(EXIT_GAVE_UP)
        code = Service(job).run()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, bytes([code]))
        os._exit(code)
    os.close(writer)
    word = os.read(reader, 1)
    return word[0] if word else EXIT_GAVE_UP


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
