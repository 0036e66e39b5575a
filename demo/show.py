# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Shows at all times where the demo is: numbered steps, time gone by, and one live line of what it waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

PLAIN_LINE_SECONDS = 10.0
SERVER_STAGES = ("Load weight", "shards:", "KV Cache", "Memory pool", "max_total_num_tokens", "Uvicorn running", "ready to roll")


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Steps:
    """Numbered steps on a stream. On a terminal the live line is rewritten in place; elsewhere it comes now and then."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total = total
        self.number = 0
        self.stream = stream or sys.stdout
        self.begun = time.monotonic()
        self.step_begun = self.begun
        self.live = self.stream.isatty()
        self.last_line_at = 0.0
        self.last_line = ""

    def step(self, title: str) -> None:
        """Begin the next step."""
        self.number += 1
        self.step_begun = self.last_line_at = time.monotonic()
        self._print(f"[{self.number:2}/{self.total}] {clock(self.step_begun - self.begun):>5}  {title}")

    def say(self, text: str) -> None:
        """A line of result below the step."""
        for line in text.splitlines():
            self._print(f"               {line}")

    def wait(self, text: str) -> None:
        """What is waited for right now."""
        now = time.monotonic()
        if self.live:
            width = os.get_terminal_size(self.stream.fileno()).columns - 1
            line = f"        {clock(now - self.begun):>5}  {text} ({clock(now - self.step_begun)})"
            self.stream.write(f"\r\x1b[K{line[:width]}")
            self.stream.flush()
            self.last_line = line
        elif now - self.last_line_at >= PLAIN_LINE_SECONDS:
            self.last_line_at = now
            self._print(f"        {clock(now - self.begun):>5}  ... {text}")

    def _print(self, line: str) -> None:
        if self.live and self.last_line:
            self.stream.write("\r\x1b[K")
            self.last_line = ""
        self.stream.write(line + "\n")
        self.stream.flush()


class Run:
    """A command whose output goes to a log file while `status` makes the live line out of it."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str], directory: Path) -> None:
        self.log = log
        self.last = ""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with open(self.log, "w", encoding="utf-8") as out:
            for line in self.process.stdout:
                out.write(line)
                out.flush()
                if line.startswith(("TASK [", "PLAY [")):
                    self.last = line.partition("[")[2].rpartition("]")[0].rpartition(" : ")[2]
                elif line.strip() and not self.last:
                    self.last = line.strip()

    def finish(self, steps: Steps, status: Callable[[str], str]) -> int:
        """Wait for the end, showing the live line; the exit code."""
        while self.process.poll() is None:
            steps.wait(status(self.last))
            time.sleep(0.5)  # a child's end and a file's growth have no common event to wait for
        self.reader.join(timeout=10)
        return self.process.returncode

    def tail(self, lines: int = 25) -> str:
        """The end of its output."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def progress_line(path: Path, newer_than: float = 0.0) -> str:
    """The extraction's progress in a few words, or nothing where there is none from after `newer_than`."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return ""
    if told.get("time", 0) < max(newer_than, time.time() - 15) or not told.get("total"):
        return ""
    bar = "#" * (20 * told["done"] // told["total"])
    words = f"[{bar:<20}] {told['done']}/{told['total']} samples, {told['tokens_per_s']:.0f} tokens/s, {told['bytes'] / 1e6:.0f} MB"
    left = told.get("eta_seconds")
    if told["phase"] != "extracting":
        return f"{words}, {told['phase']}"
    return words + (f", {clock(left)} left" if left else "")


def journal_line(path: Path, newer_than: float) -> str:
    """What the host itself says that it does: the last step that its journal has begun."""
    try:
        with open(path, "rb") as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - 20000))
            lines = handle.read().splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if told["time"] >= newer_than and told["step"] != "extract":
            return f"{told['stage']}: {told['step']}"
    return ""


def server_line(log: Path) -> str:
    """The last telling line of the server's log while it starts."""
    try:
        with open(log, "rb") as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - 20000))
            lines = handle.read().decode(errors="replace").replace("\r", "\n").splitlines()
    except OSError:
        return ""
    stages = (
        "Load weight",
        "shards:",
        "KV Cache",
        "Memory pool",
        "max_total_num_tokens",
        "Uvicorn running",
        "ready to roll",
        "Relight dump plugin",
    )
    for line in reversed(lines):
        if any(stage in line for stage in stages):
            return line.rpartition("] ")[2].strip()[:80] or line[:80]
    return "the server imports its libraries" if lines else ""
