# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m relight extract --config FILE` and `python -m relight continuity --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ansible_collections.relight.recovery.plugins.module_utils.dataset import BadDataset, FixedRecords
from ansible_collections.relight.recovery.plugins.module_utils.journal import Journal
from ansible_collections.relight.recovery.plugins.module_utils.store import Locked, NewerStore, Store

from relight.extract import links, selection
from relight.extract.client import Extraction, exit_sentence, unfinished
from relight.extract.config import BAD_INPUT, DONE, FOLDER, GAVE_UP, SOME_GIVEN_UP, STOPPED, BadInput, Config, GiveUp, load
from relight.extract.forecast import Forecast, Rate, last_rate
from relight.extract.missing import Standing, stand
from relight.extract.prepare import fixed_records
from relight.extract.progress import Display, Progress, publish

T = TypeVar("T")
BEAT_SECONDS = 1.0
DRAIN = "drain"  # a file of this name in the state directory asks the client to drain
PHASES = {DONE: "done", STOPPED: "stopped", SOME_GIVEN_UP: "failed", GAVE_UP: "failed", BAD_INPUT: "failed"}


def main(argv: Sequence[str] | None = None) -> int:
    """Extract what is missing; the exit code."""
    parser = argparse.ArgumentParser(prog="relight extract", description="Extract the hidden states that the store lacks.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration: extract.json in the state directory")
    parser.add_argument("--only", metavar="A-B,C", help="these records alone, both ends included")
    parser.add_argument("--indices", metavar="FILE", help="the records that a file names alone: a JSON list, or words as above")
    parser.add_argument("--redo", action="store_true", help="make their samples again; the old ones go to quarantine")
    parser.add_argument("--rate", type=float, metavar="TOKENS_PER_SECOND", help="what to forecast with, instead of the last run's rate")
    options = parser.parse_args(argv)
    try:
        config = load(options.config)
        wish = Wish(selection.chosen(options.only, options.indices), options.redo, _rate(options.rate, config))
        if wish.redo and wish.chosen is None:
            raise BadInput("--redo needs --only or --indices: say which samples")
        store = links.open_store(config)
    except BadInput as error:
        print(f"relight extract: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    return asyncio.run(_extract(config, store, wish))


def _rate(stated: float | None, config: Config) -> Rate | None:
    """Raises BadInput."""
    if stated is None:
        return last_rate(config.state_dir)
    if not stated > 0:
        raise BadInput("--rate must be more than 0")
    return Rate(stated, "stated")


def continuity(argv: Sequence[str] | None = None) -> int:
    """The command `relight continuity`; the exit code."""
    from relight.extract.continuity import main as check

    return check(argv)


@dataclass(frozen=True)
class Wish:
    """What the command line asks for: which records, whether to make their samples again, and the rate to forecast with."""

    chosen: frozenset[int] | None = None
    redo: bool = False
    rate: Rate | None = None


async def _extract(config: Config, store: Store, wish: Wish) -> int:
    """From a judged configuration to an exit code and its sentence."""
    progress, display = Progress(), Display()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with suppress(OSError):
        os.makedirs(config.state_dir, exist_ok=True)
    work = _Work(config, store, progress, display, stop, wish)
    loop.add_signal_handler(signal.SIGUSR1, work.drain.set)
    try:
        code = await work.run()
        sentence = exit_sentence(code, progress)
        if work.drained(code):
            sentence = sentence.replace("stopped:", "drained:", 1)
        progress.error = sentence if code == SOME_GIVEN_UP else None
    except BadInput as error:
        code, sentence = BAD_INPUT, str(error)
        progress.error = sentence
    except GiveUp as error:
        code, sentence = GAVE_UP, str(error)
        progress.error = sentence
    except Exception as error:  # one sentence for people, the rest for the log
        traceback.print_exc()
        code, sentence = GAVE_UP, f"unexpected: {type(error).__name__}: {error}; the log has the trace"
        progress.error = sentence
    finally:
        display.close()
    progress.phase = "drained" if work.drained(code) else PHASES[code]
    if work.locked_out:  # progress.json is the other client's
        print(f"relight extract: {sentence}", file=sys.stderr, flush=True)
        return code
    publish(config.state_dir, progress)
    work.forget_drain()
    work.journal_end(code, sentence)
    print(f"relight extract: {sentence}", file=sys.stderr, flush=True)
    return code


class _Work:
    """Lock, prepare, extract; with a beat of progress from the first second to the last."""

    def __init__(
        self, config: Config, store: Store, progress: Progress, display: Display, stop: asyncio.Event, wish: Wish | None = None
    ) -> None:
        self.config, self.store, self.progress, self.display, self.stop = config, store, progress, display, stop
        self.wish = wish or Wish()
        self.drain = asyncio.Event()
        self.holds = False  # the store's lock
        self.locked_out = False
        self.journal: Journal | None = None
        self.begun = time.monotonic()

    async def run(self) -> int:
        """Raises BadInput, GiveUp."""
        new = not os.path.isdir(self.config.store)
        if new:
            await self._with_beat(asyncio.to_thread(self._fix))  # bad records leave no store behind
        with ExitStack() as held:
            try:
                held.enter_context(self.store.exclusive("relight extract"))
            except Locked as error:
                self.locked_out = True
                raise BadInput(str(error)) from error
            except OSError as error:
                raise GiveUp(
                    f"cannot write in the store {self.config.store}: {error.strerror or error}; mend that, then start again"
                ) from error
            self.forget_drain()
            self.holds = True
            return await self._with_beat(self._locked())

    def _fix(self) -> None:
        fixed_records(self.config).close()

    async def _with_beat(self, call: Coroutine[Any, Any, T]) -> T:
        beat = asyncio.create_task(self._beat())
        try:
            return await call
        finally:
            beat.cancel()
            with suppress(asyncio.CancelledError):
                await beat

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            self.progress.mark(now)
            publish(self.config.state_dir, self.progress)
            self.display.show(self.progress, now)
            if self.holds and os.path.exists(self._drain_file):
                self.drain.set()
            await asyncio.sleep(BEAT_SECONDS)

    @property
    def _drain_file(self) -> str:
        return os.path.join(self.config.state_dir, DRAIN)

    def drained(self, code: int) -> bool:
        """Whether it ended since it was asked to drain, and not by SIGTERM."""
        return code == STOPPED and self.drain.is_set() and not self.stop.is_set()

    def forget_drain(self) -> None:
        """A request to drain is for the client that runs, not for the next one."""
        with suppress(OSError):
            os.unlink(self._drain_file)

    async def _locked(self) -> int:
        records, standing = await asyncio.to_thread(self._prepare)
        with records:
            to_do, again = self._chosen(standing, len(records))
            self._forecast(records, to_do)
            self._journal_begin(standing)
            extraction = Extraction(self.config, self.store, records, self.progress, self.display, redo=again)
            forwarding = [asyncio.create_task(forward) for forward in (self._forward_stop(extraction), self._forward_drain(extraction))]
            try:
                return await extraction.run(to_do)
            finally:
                for task in forwarding:
                    task.cancel()

    def _chosen(self, standing: Standing, records: int) -> tuple[list[int], frozenset[int]]:
        """The records of this run, and those among them whose samples are made again. Raises BadInput."""
        if self.wish.chosen is None:
            return list(standing.missing), frozenset()
        if self.wish.chosen and max(self.wish.chosen) >= records:
            raise BadInput(f"record {max(self.wish.chosen)} is asked for, and there are {records}, counted from 0")
        again = self.wish.chosen & standing.intact if self.wish.redo else frozenset()
        return sorted(again.union(self.wish.chosen.intersection(standing.missing))), again

    def _forecast(self, records: FixedRecords, to_do: list[int]) -> None:
        """Tell what the run will take."""
        tokens = sum(records.items[index].tokens for index in to_do)
        if self.wish.chosen is not None:
            self.progress.tokens_wanted = tokens
        if not to_do:
            return
        try:
            status = os.statvfs(self.config.store)
        except OSError:
            return  # the client's own look at it tells
        free = status.f_bavail * status.f_frsize - self.config.reserve_bytes
        for line in Forecast(len(to_do), tokens, self.config.token_bytes, free, self.wish.rate).lines(time.time()):
            self.display.say(line)

    async def _forward_drain(self, extraction: Extraction) -> None:
        await self.drain.wait()
        self.display.say("draining: nothing new is sent, what is in flight lands")
        extraction.drain()

    async def _forward_stop(self, extraction: Extraction) -> None:
        await self.stop.wait()
        self.display.say("stopping: what is in flight may still land")
        extraction.stop()

    def _prepare(self) -> tuple[FixedRecords, Standing]:
        """In a thread: fix the records, look what is there. Raises BadInput, GiveUp."""
        records = fixed_records(self.config)
        try:
            links.judge_identity(self.config, self.store.runs())
            self.store.sweep()
            standing = stand(self.store, os.path.join(self.config.state_dir, FOLDER), self.config)
        except (OSError, ValueError, NewerStore, BadDataset) as error:
            raise GiveUp(f"the store {self.config.store} cannot be read: {error}; run `relight recover`, which judges it") from error
        self.progress.total = len(records)
        self.progress.done = standing.done
        self.progress.tokens_total = records.tokens
        self.progress.tokens_done = standing.tokens
        self.progress.bytes = standing.bytes
        return records, standing

    def _journal_begin(self, standing: Standing) -> None:
        self.journal = Journal(self.config.state_dir, f"extract-{os.getpid()}", "resume", "extract")
        with suppress(OSError):
            counts = {"done": standing.done, "missing": len(standing.missing), "quarantined": standing.quarantined}
            self.journal.write("begin", total=self.progress.total, **counts)

    def journal_end(self, code: int, sentence: str) -> None:
        if self.journal is not None:
            verdict = "pass" if code in (DONE, STOPPED) else "fail"
            seconds = round(time.monotonic() - self.begun, 3)
            with suppress(OSError):
                self.journal.write("end", verdict=verdict, summary=sentence, seconds=seconds, exit_code=code, **unfinished(self.progress))


if __name__ == "__main__":
    sys.exit(main())
