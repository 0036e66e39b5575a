# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What a run will take, told before it starts: bytes, hours, and when the disk is full. Pure but for `last_rate`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from ansible_collections.relight.recovery.plugins.module_utils.durable import read_lines

from relight.extract.progress import human_bytes, human_seconds, read

TOKEN_BYTES = 16  # of a token's id and mask
SAMPLE_BYTES = 4096  # of a file's structure, its place in the directory and its line in the manifest


@dataclass(frozen=True)
class Rate:
    """Tokens a second, and where the number comes from."""

    tokens_per_s: float
    source: str


@dataclass(frozen=True)
class Forecast:
    """What is to do, and what there is to do it with. `free_bytes` are those that samples may take."""

    samples: int
    tokens: int
    token_bytes: int
    free_bytes: int
    rate: Rate | None

    @property
    def bytes(self) -> int:
        return self.tokens * (self.token_bytes + TOKEN_BYTES) + self.samples * SAMPLE_BYTES

    @property
    def seconds(self) -> float | None:
        return self.tokens / self.rate.tokens_per_s if self.rate else None

    def lines(self, now: float) -> list[str]:
        """Sentences for people; `now` is the time from which the clock times count."""
        told = [f"{self.samples} samples of {self.tokens} tokens are to do, about {human_bytes(self.bytes)}"]
        if self.rate is None or self.seconds is None:
            told.append("how long is not known before a first run: state a rate with --rate TOKENS_PER_SECOND")
        else:
            when = _clock(now + self.seconds)
            told.append(f"at {self.rate.tokens_per_s:.0f} tokens/s ({self.rate.source}) about {human_seconds(self.seconds)}, until {when}")
        if self.bytes <= self.free_bytes:
            left = human_bytes(self.free_bytes - self.bytes)
            told.append(f"the store's disk has room for {human_bytes(self.free_bytes)} and keeps {left}")
        else:
            share = max(0, self.free_bytes) / self.bytes
            full = f", at {_clock(now + self.seconds * share)}" if self.seconds is not None else ""
            told.append(
                f"the store's disk has room for {human_bytes(max(0, self.free_bytes))}: it is full after {100 * share:.0f}% of them{full}; "
                f"make room for {human_bytes(self.bytes - self.free_bytes)} more"
            )
        return [f"forecast: {line}" for line in told]


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))


def last_rate(state_dir: str) -> Rate | None:
    """How fast the last run was, by its progress or its journal; None before the first."""
    progress = read(state_dir) or {}
    rate = progress.get("tokens_per_s")
    if isinstance(rate, (int, float)) and rate > 0:
        return Rate(float(rate), "as at the end of the last run")
    found = None
    try:
        for line in read_lines(os.path.join(state_dir, "journal.jsonl")):
            tokens, seconds = line.get("tokens_this_run"), line.get("seconds")
            if isinstance(tokens, int) and isinstance(seconds, (int, float)) and tokens > 0 and seconds > 0:
                found = Rate(tokens / seconds, "as in an earlier run")
    except OSError:
        return None
    return found
