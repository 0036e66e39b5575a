# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Where the extraction stands: progress.json for machines, a bar or plain lines for people."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from ansible_collections.relight.recovery.plugins.module_utils.journal import boot_id

SCHEMA = 1
FILE = "progress.json"
WINDOW_SECONDS = 60.0  # the rate is that of the last minute, so that an outage does not spoil it for hours
LINE_SECONDS = 5.0


@dataclass
class Progress:
    """The counts of one run of the client. `in_flight` holds an index from before its request leaves until it is durable."""

    total: int = 0
    done: int = 0
    this_run: int = 0
    tokens_total: int = 0
    tokens_done: int = 0
    tokens_this_run: int = 0
    tokens_sent: int = 0  # in requests of this run, answered or not
    tokens_wanted: int | None = None  # of this run, where it is not to make all that is missing
    bytes: int = 0
    phase: str = "starting"
    error: str | None = None
    in_flight: set[int] = field(default_factory=set)
    given_up: dict[int, str] = field(default_factory=dict)
    _marks: deque[tuple[float, int]] = field(default_factory=deque)
    _boot: str = field(default_factory=boot_id)

    def stored(self, tokens: int, size: int, replaced: int | None = None) -> None:
        """Count a sample that is durable; `replaced` are the bytes of the one whose place it took."""
        if replaced is None:
            self.done += 1
            self.tokens_done += tokens
        self.this_run += 1
        self.tokens_this_run += tokens
        self.bytes += size - (replaced or 0)

    def mark(self, now: float) -> None:
        """Note the tokens of this moment, for the rate."""
        self._marks.append((now, self.tokens_this_run))
        while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW_SECONDS:
            self._marks.popleft()

    @property
    def tokens_per_s(self) -> float:
        if len(self._marks) < 2:
            return 0.0
        (begin, tokens), (end, more) = self._marks[0], self._marks[-1]
        return (more - tokens) / (end - begin) if end > begin else 0.0

    @property
    def eta_seconds(self) -> float | None:
        rate = self.tokens_per_s
        left = self.tokens_total - self.tokens_done if self.tokens_wanted is None else self.tokens_wanted - self.tokens_this_run
        return round(left / rate, 1) if rate > 0 else (0.0 if left == 0 else None)

    def document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "time": round(time.time(), 3),
            "boot_id": self._boot,
            "pid": os.getpid(),
            "phase": self.phase,
            "total": self.total,
            "done": self.done,
            "this_run": self.this_run,
            "in_flight": sorted(self.in_flight),
            "tokens_total": self.tokens_total,
            "tokens_done": self.tokens_done,
            "tokens_this_run": self.tokens_this_run,
            "tokens_sent": self.tokens_sent,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "bytes": self.bytes,
            "eta_seconds": self.eta_seconds,
            "given_up": {str(index): why for index, why in sorted(self.given_up.items())},
            "error": self.error,
        }


def publish(state_dir: str, progress: Progress) -> None:
    """Replace progress.json in one step. It is an observation: never fsynced, and a full disk only makes it late."""
    path = os.path.join(state_dir, FILE)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump(progress.document(), handle)
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)


def read(state_dir: str) -> dict[str, Any] | None:
    """What a client last published, or None."""
    try:
        with open(os.path.join(state_dir, FILE), encoding="utf-8") as handle:
            document = json.load(handle)
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def human_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Display:
    """A bar on a terminal; elsewhere a plain line every few seconds, and one whenever the phase changes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.bar: Any = None
        self._last_line = 0.0
        self._last_phase = ""

    def show(self, progress: Progress, now: float) -> None:
        if self.stream.isatty():
            self._show_bar(progress)
        elif progress.phase != self._last_phase or now - self._last_line >= LINE_SECONDS:
            self._last_line, self._last_phase = now, progress.phase
            self.say(line(progress))

    def say(self, text: str) -> None:
        """One line of text, above the bar where there is one."""
        if self.bar is not None:
            self.bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _show_bar(self, progress: Progress) -> None:
        if self.bar is None:
            from tqdm import tqdm

            self.bar = tqdm(
                total=progress.total,
                initial=progress.done,
                file=self.stream,
                unit="sample",
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}",
            )
        self.bar.n = progress.done
        self.bar.set_description_str(progress.phase, refresh=False)
        self.bar.set_postfix_str(_figures(progress), refresh=False)
        self.bar.refresh()


def line(progress: Progress) -> str:
    return f"{progress.phase}: {progress.done}/{progress.total} samples, {_figures(progress)}"


def _figures(progress: Progress) -> str:
    return (
        f"{progress.tokens_per_s:.0f} tokens/s, {human_bytes(progress.bytes)}, "
        f"{len(progress.in_flight)} in flight, {human_seconds(progress.eta_seconds)} left"
    )
