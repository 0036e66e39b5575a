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
from typing import Any, TypeVar

from ansible_collections.relight.recovery.plugins.module_utils.dataset import BadDataset, FixedRecords
from ansible_collections.relight.recovery.plugins.module_utils.journal import Journal
from ansible_collections.relight.recovery.plugins.module_utils.store import Locked, NewerStore, Store

from relight.extract import links
from relight.extract.client import Extraction, exit_sentence, unfinished
from relight.extract.config import BAD_INPUT, DONE, FOLDER, GAVE_UP, SOME_GIVEN_UP, STOPPED, BadInput, Config, GiveUp, load
from relight.extract.missing import Standing, stand
from relight.extract.prepare import fixed_records
from relight.extract.progress import Display, Progress, publish

T = TypeVar("T")
BEAT_SECONDS = 1.0
PHASES = {DONE: "done", STOPPED: "stopped", SOME_GIVEN_UP: "failed", GAVE_UP: "failed", BAD_INPUT: "failed"}


def main(argv: Sequence[str] | None = None) -> int:
    """Extract what is missing; the exit code."""
    parser = argparse.ArgumentParser(prog="relight extract", description="Extract the hidden states that the store lacks.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration: extract.json in the state directory")
    options = parser.parse_args(argv)
    try:
        config = load(options.config)
        store = links.open_store(config)
    except BadInput as error:
        print(f"relight extract: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    return asyncio.run(_extract(config, store))


def continuity(argv: Sequence[str] | None = None) -> int:
    """The command `relight continuity`; the exit code."""
    from relight.extract.continuity import main as check

    return check(argv)


async def _extract(config: Config, store: Store) -> int:
    """From a judged configuration to an exit code and its sentence."""
    progress, display = Progress(), Display()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with suppress(OSError):
        os.makedirs(config.state_dir, exist_ok=True)
    work = _Work(config, store, progress, display, stop)
    try:
        code = await work.run()
        sentence = exit_sentence(code, progress)
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
    progress.phase = PHASES[code]
    if work.locked_out:  # progress.json is the other client's
        print(f"relight extract: {sentence}", file=sys.stderr, flush=True)
        return code
    publish(config.state_dir, progress)
    work.journal_end(code, sentence)
    print(f"relight extract: {sentence}", file=sys.stderr, flush=True)
    return code


class _Work:
    """Lock, prepare, extract; with a beat of progress from the first second to the last."""

    def __init__(self, config: Config, store: Store, progress: Progress, display: Display, stop: asyncio.Event) -> None:
        self.config, self.store, self.progress, self.display, self.stop = config, store, progress, display, stop
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
            await asyncio.sleep(BEAT_SECONDS)

    async def _locked(self) -> int:
        records, standing = await asyncio.to_thread(self._prepare)
        self._journal_begin(standing)
        with records:
            extraction = Extraction(self.config, self.store, records, self.progress, self.display)
            stopping = asyncio.create_task(self._forward_stop(extraction))
            try:
                return await extraction.run(standing.missing)
            finally:
                stopping.cancel()

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
