# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The resume client's run: admit, fetch, judge, store, until nothing is missing; wait for the server and for room."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Callable, TypeVar

import xxhash
from ansible_collections.relight.recovery.plugins.module_utils import dumpfile
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import TensorBytes
from ansible_collections.relight.recovery.plugins.module_utils.dataset import BadDataset, FixedRecords
from ansible_collections.relight.recovery.plugins.module_utils.layouts import Sample
from ansible_collections.relight.recovery.plugins.module_utils.records import id_bytes
from ansible_collections.relight.recovery.plugins.module_utils.store import NewerStore, Store

from relight.extract import links, states
from relight.extract.admission import Admission, Item, interleave
from relight.extract.config import DONE, GAVE_UP, SOME_GIVEN_UP, STOPPED, BadInput, Config, GiveUp
from relight.extract.fetch import Away, DumpWatch, Fetcher, Names, Refused, session, sweep
from relight.extract.progress import Display, Progress, publish

T = TypeVar("T")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
BACK_OFF = 30  # times retry_seconds, the longest pause
ROOM_SECONDS = 1.0  # between two looks at the free space


@dataclass
class Trouble:
    """Something that is waited for: since when, and how long the next pause is."""

    limit_seconds: float
    first_pause: float
    since: float | None = None
    pause: float = 0.0
    next_try: float = 0.0
    what: str = ""

    def arise(self, what: str, now: float) -> None:
        """It is there, or it is there still: the pause doubles."""
        if self.since is None:
            self.since, self.pause = now, self.first_pause
        elif now >= self.next_try:
            self.pause = min(self.pause * 2, self.first_pause * BACK_OFF)
        self.what = what
        self.next_try = now + self.pause

    def end(self) -> None:
        self.since = None

    def over(self, now: float) -> bool:
        """Has it lasted longer than is waited for?"""
        return self.since is not None and now - self.since > self.limit_seconds


@dataclass
class Extraction:
    """One run over the records that are missing. The caller holds the store's lock."""

    config: Config
    store: Store
    records: FixedRecords
    progress: Progress
    display: Display
    server: Trouble = field(init=False)
    room: Trouble = field(init=False)
    fatal: GiveUp | None = None
    redo: frozenset[int] = frozenset()  # samples that are there and are made again; the old ones go to quarantine
    stopping_since: float | None = None
    draining: bool = False
    instance: str = ""
    run_name: str = ""
    streak: int = 0  # failures since the last sample
    put_aside: dict[int, int] = field(default_factory=dict)  # bytes of the samples that went to quarantine to be made again

    def __post_init__(self) -> None:
        config = self.config
        self.server = Trouble(config.server_seconds, config.retry_seconds)
        self.room = Trouble(config.room_seconds, config.retry_seconds)
        self.names = Names()
        self.admission = Admission(config.concurrency, config.max_bytes_in_flight)
        self.wake = asyncio.Event()
        self.watch = DumpWatch(config.dump_dir)
        self.writers = ThreadPoolExecutor(config.writers, thread_name_prefix="store")
        self.tasks: set[asyncio.Task[None]] = set()
        self._server_stamp: tuple[int, int] | None = None

    # the run

    async def run(self, missing: Sequence[int]) -> int:
        """Extract `missing`; the exit code. Raises GiveUp, BadInput."""
        self.admission.queue.extend(interleave(self._item(index) for index in missing))
        sweep(self.config.dump_dir)
        watching = asyncio.create_task(self.watch.run())
        try:
            async with session() as http:
                config = self.config
                self.fetcher = Fetcher(http, config.server, self.watch, config.request_seconds, config.dump_seconds, config.max_new_tokens)
                try:
                    return await self._until_done(watching)
                finally:
                    await self._abandon()
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await watching
            self.writers.shutdown(wait=True)

    def drain(self) -> None:
        """Nothing new is sent; what is in flight lands, however long that takes within its own limits."""
        self.draining = True
        self.wake.set()

    def stop(self) -> None:
        """SIGTERM: nothing new is sent; what is in flight may land."""
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()
        self.wake.set()

    def _item(self, index: int) -> Item:
        tokens = self.records.items[index].tokens
        size, most = tokens * self.config.token_bytes, self.config.max_bytes_in_flight
        if size > most:
            raise BadInput(f"record {index} takes {size} bytes of states, more than max_bytes_in_flight ({most}): raise it")
        return Item(index, tokens, size)

    async def _until_done(self, watching: asyncio.Task[None]) -> int:
        while True:
            now = time.monotonic()
            if self.fatal:
                raise self.fatal
            if watching.done():
                raise GiveUp(
                    f"the dump directory {self.config.dump_dir} cannot be read any more: {watching.exception()}; mount it and start again"
                )
            if self.admission.empty:
                return SOME_GIVEN_UP if self.progress.given_up else DONE
            if self.stopping_since is not None or self.draining:
                late = self.stopping_since is not None and now - self.stopping_since > self.config.drain_seconds
                if not self.admission.flying or late:
                    return STOPPED
                if self.stopping_since is None:
                    self._judge_troubles(now)  # SIGTERM has its own limit
            else:
                self._judge_troubles(now)
                while self._may_send(now) and self._send_next():
                    pass
            self._show_phase()
            self.wake.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.wake.wait(), timeout=self._pause(time.monotonic()))

    def _pause(self, now: float) -> float:
        """Until something must be looked at again though nothing happens."""
        due = [trouble.next_try - now for trouble in (self.server, self.room) if trouble.since is not None and trouble.next_try > now]
        return min([1.0, *due])

    def _show_phase(self) -> None:
        if self.draining:
            self.progress.phase = "draining"
        elif self.room.since is not None:
            self.progress.phase = "waiting-for-room"
        elif self.server.since is not None:
            self.progress.phase = "waiting-for-server"
        else:
            self.progress.phase = "extracting"

    def _judge_troubles(self, now: float) -> None:
        """Raises GiveUp when the server or room has been missing for too long."""
        if self.server.over(now) and not self.admission.flying:
            waited = f"{self.server.what}, for {self.config.server_seconds:g} s now"
            raise GiveUp(f"{waited}; start the server (`relight recover` does), then start the extraction again")
        if self.room.over(now):
            waited = f"{self.room.what}, for {self.config.room_seconds:g} s now"
            raise GiveUp(f"{waited}; make room there, then start the extraction again")

    # admission

    def _may_send(self, now: float) -> bool:
        if not self.admission.queue or (self.server.since is not None and now < self.server.next_try):
            return False
        if self.room.since is not None and now < self.room.next_try:
            return False
        return self._has_room(now) and self._knows_server(now)

    def _has_room(self, now: float) -> bool:
        """Is there space for the next record and all in flight, in the store and in the dump directory?"""
        if self.room.since is not None and self.admission.flying:
            return False  # a sample that waits for room goes first
        need = self.admission.bytes_in_flight + self.admission.queue[0].bytes
        places = ((self.config.store, self.config.reserve_bytes, need), (self.config.dump_dir, 0, self.admission.queue[0].bytes))
        for place, reserve, bytes_needed in places:
            try:
                status = os.statvfs(place)
            except OSError as error:
                raise GiveUp(f"cannot look at {place}: {error.strerror or error}; mount it, then start the extraction again") from error
            free = status.f_bavail * status.f_frsize
            if free < bytes_needed + reserve:
                self.room.arise(f"{place} has {free} bytes free and needs {bytes_needed + reserve}", now)
                self.room.next_try = now + ROOM_SECONDS
                return False
        self.room.end()
        return True

    def _knows_server(self, now: float) -> bool:
        """Is there a server that may add to this store? Looks again when its file changed. Raises GiveUp when it may not."""
        try:
            status = os.stat(os.path.join(self.config.dump_dir, dumpfile.SERVER_FILE))
            stamp = (status.st_mtime_ns, status.st_ino)
        except OSError:
            stamp = (0, 0)
        if stamp == self._server_stamp and self.instance:
            return True
        seen = dumpfile.read_server(self.config.dump_dir)
        if seen is None:
            self.server.arise(f"no server with the dump plugin has written {dumpfile.SERVER_FILE} in {self.config.dump_dir}", now)
            return False
        if seen.instance != self.instance and self.admission.flying:
            return False  # what was sent to the former server is settled first
        self._server_stamp = stamp
        if seen.instance != self.instance:
            try:
                self.run_name = links.admit(self.store, self.config, seen, empty=self.progress.done == 0)
            except (OSError, ValueError, NewerStore) as error:
                if isinstance(error, OSError) and error.errno in NO_ROOM:
                    self._server_stamp = None
                    self.room.arise(f"{self.config.store} has no room for its runs.json ({error.strerror})", now)
                    return False
                raise GiveUp(f"{self.config.store}: its runs cannot be kept: {error}") from error
            self.instance = seen.instance
        return True

    def _send_next(self) -> bool:
        item = self.admission.next(alone=self.server.since is not None)
        if item is None:
            return False
        self.progress.in_flight.add(item.index)
        publish(self.config.state_dir, self.progress)  # before the request leaves
        task = asyncio.create_task(self._one(item))
        self.tasks.add(task)
        task.add_done_callback(self._finished)
        return True

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            self.fatal = self.fatal or (error if isinstance(error, GiveUp) else GiveUp(f"unexpected: {type(error).__name__}: {error}"))
        self.wake.set()

    # one record

    async def _one(self, item: Item) -> None:
        """From request to sample. Raises GiveUp."""
        rid = self.names.rid(self.instance, item.index)
        want, run = self._expected(rid, item), self.run_name
        try:
            tokens = self.records.read(item.index)
            self.progress.tokens_sent += item.tokens
            path = await self.fetcher.fetch(rid, tokens.ids)
            await self._store_when_room(item, path, want, tokens.mask, run)
        except Away as error:
            self._server_away(item, error)
        except dumpfile.OtherInstance as error:
            self._other_instance(item, error)
        except (Refused, dumpfile.BadDump) as error:
            self._failed(item, str(error))
            if isinstance(error, Refused):
                await self.fetcher.abort(rid)
        except BadDataset as error:
            raise GiveUp(f"{error}; restore {self.config.state_dir}, or start a new store and state directory") from error
        else:
            self._landed(item)
        finally:
            self.watch.forget(rid)
            self.progress.in_flight.discard(item.index)

    def _expected(self, rid: str, item: Item) -> dumpfile.Expected:
        digest = self.records.items[item.index].token_digest
        layers, norm = tuple(self.config.layers), links.norm_wanted(self.config)
        return dumpfile.Expected(rid, digest, item.tokens, layers, self.config.hidden_size, self.instance, norm)

    async def _store_when_room(self, item: Item, path: str, want: dumpfile.Expected, mask: bytes, run: str) -> None:
        """Write the sample; without room keep the dump and try again. Raises GiveUp, BadDump, Refused."""
        while True:
            try:
                size, replaced = await self._in_thread(self._store, item.index, path, want, mask, run)
            except FileNotFoundError as error:
                if error.filename == path:
                    raise Refused(f"its dump vanished from {self.config.dump_dir}") from error
                raise self._broken_store(item, error) from error
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise self._broken_store(item, error) from error
                self.room.arise(f"{self.config.store} has no room for sample {item.index} ({error.strerror})", time.monotonic())
                self.wake.set()
                await asyncio.sleep(self.room.pause)
            else:
                self.room.end()
                self.progress.stored(item.tokens, size, replaced)
                return

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """The function's value. One that was begun is never broken off: a sample that is being written becomes whole."""
        future = asyncio.get_running_loop().run_in_executor(self.writers, function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            future.exception()
            raise

    def _broken_store(self, item: Item, error: OSError) -> GiveUp:
        where = f"cannot write sample {item.index} to {self.config.store}: {error.strerror or error}"
        return GiveUp(f"{where}; mend the storage (`relight assess` looks at it), then start the extraction again")

    def _store(self, index: int, path: str, want: dumpfile.Expected, mask: bytes, run: str) -> tuple[int, int | None]:
        """In a thread: judge the dump, write the sample durably. Returns its bytes, and those of the one it replaced.

        The old sample goes to quarantine when the new one is there to be written. Raises BadDump, OSError.
        """
        with dumpfile.judged(path, want, states.value_fault) as dump:
            tensors: Mapping[str, TensorBytes] = {
                "input_ids": dump.tensors[dumpfile.IDS],
                "loss_mask": TensorBytes("int64", (want.tokens,), id_bytes(list(mask))),
                "hidden_state": dump.tensors[dumpfile.FINAL],
                "aux_hidden_state": dump.tensors[dumpfile.AUX],
            }
            extra = {"layers": json.dumps(self.config.layers), "norm": want.norm, "dtype": dump.dtype}
            sample = Sample(index, want.tokens, want.digest, run, tensors, extra)
            if index in self.redo and index not in self.put_aside:  # a disk without room brings us here twice
                self._put_aside(index)
            return self.store.add(sample, xxhash.xxh3_128(), time.time()).bytes, self.put_aside.get(index)

    def _put_aside(self, index: int) -> None:
        """Move a sample that is made again to quarantine. Raises OSError."""
        path = self.store.layout.path_of(index)
        size = os.path.getsize(os.path.join(self.store.path, path))
        self.store.quarantine(path, "redone", time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), "asked for with --redo")
        self.put_aside[index] = size

    # what became of it

    def _landed(self, item: Item) -> None:
        self.admission.land(item)
        self.streak = 0
        self.server.end()

    def _failed(self, item: Item, why: str) -> None:
        """The record's own failure, as far as one can tell. Too many in a row, and the server is doubted too."""
        item.failures += 1
        item.last_error = why
        self.streak += 1
        if item.failures >= self.config.tries:
            self.admission.land(item)
            self.progress.given_up[item.index] = why
            self.display.say(f"record {item.index} is given up after {item.failures} tries: {why}")
        else:
            self.admission.again(item)
        if self.streak > max(2 * self.config.concurrency, self.config.tries):
            self.server.arise(f"{self.config.server} answers, and nothing of it can be used ({why})", time.monotonic())

    def _server_away(self, item: Item, error: Away) -> None:
        """The server's failure, unless this record was alone with it and it had taken it."""
        if error.accepted and item.suspect:
            self._failed(item, str(error))
        else:
            item.suspect = item.suspect or error.accepted
            self.admission.put_back(item)
        self.server.arise(str(error), time.monotonic())

    def _other_instance(self, item: Item, error: Exception) -> None:
        """The server was replaced under the request. Its file says by whom; the next look judges that."""
        self.admission.put_back(item)
        self._server_stamp = None
        seen = dumpfile.read_server(self.config.dump_dir)
        if seen is None or seen.instance == self.instance:
            self.fatal = GiveUp(
                f"the dump of record {item.index} cannot be trusted: {error}; see which server fills {self.config.dump_dir}"
            )

    async def _abandon(self) -> None:
        """End what is still in flight. A sample that is being written is written to its end."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def exit_sentence(code: int, progress: Progress) -> str:
    """The last line for people."""
    counted = f"{progress.done} of {progress.total} samples are in the store, {progress.this_run} of them new"
    if code == SOME_GIVEN_UP:
        names = ", ".join(str(index) for index in sorted(progress.given_up)[:8])
        first = progress.given_up[min(progress.given_up)]
        return f"{counted}; given up: record {names} ({first})"
    return {DONE: counted, STOPPED: f"stopped: {counted}", GAVE_UP: f"gave up: {counted}"}.get(code, counted)


def unfinished(progress: Progress) -> dict[str, Any]:
    """What the journal keeps of a run's end."""
    return {"done": progress.done, "total": progress.total, "this_run": progress.this_run, "tokens_this_run": progress.tokens_this_run}
