# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Kills recoveries of the embedded host: aimed by a stage's first line in the journal, plus a seeded delay.

Three things are killed in turn: ansible-playbook alone (its module works on), its whole process group, and the module that
acts (ansible-playbook lives and sees it fail).
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils.durable import read_lines
from ansible_collections.relight.recovery.plugins.module_utils.report import STAGES

from demo import __main__ as demo
from demo import host

VICTIMS = ("ansible-playbook alone", "its process group", "the acting module")
# A stage whose tasks are not ours writes no journal: what ansible-playbook says of it is waited for instead.
TASKS = {"restore": "TASK [relight.recovery.sglang_launch : Put the files back]"}


@dataclass(frozen=True)
class Aim:
    """Where and whom a kill is to hit."""

    stage: str
    victim: str
    delay_seconds: float

    def __str__(self) -> str:
        return f"{self.victim}, {self.delay_seconds:.2f} s after the begin of {self.stage}"


@dataclass(frozen=True)
class Outcome:
    """What a killed run came to. `hit` is False where the run ended before the kill."""

    aim: Aim
    hit: bool
    reached: bool
    exit_code: int
    seconds: float


def aims(seed: int, stages: tuple[str, ...] = STAGES) -> list[Aim]:
    """One kill in each stage, in the order of the runbook, with victims in turn and delays by the seed.

    Most modules are done in a tenth of a second, so the kills of those come soon.
    """
    rnd = random.Random(seed)
    victims = [VICTIMS[(number + seed) % len(VICTIMS)] for number in range(len(stages))]
    return [Aim(stage, victim, rnd.uniform(0, 0.1 if victim == VICTIMS[2] else 1.5)) for stage, victim in zip(stages, victims)]


def journal() -> list[dict[str, Any]]:
    return list(read_lines(str(demo.STATE / "journal.jsonl")))


def working(stage: str, since: float) -> list[int]:
    """The pids of steps of a stage that have begun since and not ended."""
    open_steps: dict[tuple[Any, ...], int] = {}
    for line in journal():
        if line.get("time", 0) >= since and line.get("stage") == stage and line.get("step") not in ("extract",):
            key = (line["pid"], line.get("step"))
            if line["event"] == "begin":
                open_steps[key] = int(line["pid"])
            elif line["event"] == "end":
                open_steps.pop(key, None)
    return list(open_steps.values())


def begun(stage: str, since: float, log: Path) -> bool:
    """Has this run come to the stage?"""
    if stage in TASKS:
        return TASKS[stage] in log.read_text(errors="replace")
    return any(line.get("stage") == stage and line.get("time", 0) >= since and line.get("step") != "extract" for line in journal())


def kill(process: subprocess.Popen[bytes], aim: Aim, since: float) -> bool:
    """Kill the victim now. Says whether there was one."""
    if aim.victim == VICTIMS[0]:
        process.kill()
        return True
    if aim.victim == VICTIMS[1]:
        os.killpg(process.pid, signal.SIGKILL)
        return True
    deadline = time.monotonic() + 5
    while process.poll() is None and time.monotonic() < deadline:
        for pid in working(aim.stage, since):
            if subprocess.run(host.enter(demo.HOST, ["sh", "-c", f"kill -9 {pid}"]), capture_output=True, check=False).returncode == 0:
                return True
        time.sleep(0.01)
    process.kill()  # between two modules there is only ansible-playbook
    return process.poll() is None


def killed_run(command: list[str], aim: Aim, log: Path, limit_seconds: float = 300.0) -> Outcome:
    """Run a recovery and kill it where aimed. Returns when ansible-playbook has ended; a module may work on."""
    begin = time.monotonic()
    since = time.time()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=demo.environment_of_tools(),
            cwd=demo.CHECKOUT,
            start_new_session=True,
        )
    reached = hit = False
    while process.poll() is None:
        if time.monotonic() - begin > limit_seconds:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"the run did not come to {aim.stage} within {limit_seconds:g} s: {log}")
        if begun(aim.stage, since, log):
            reached = True
            time.sleep(aim.delay_seconds)  # the seeded delay: the point of the exercise
            hit = kill(process, aim, since)
            break
        time.sleep(0.02)
    process.wait(timeout=limit_seconds)
    return Outcome(aim, hit, reached, process.returncode, time.monotonic() - begin)


def chain(command: str, seed: int, logs: Path, say: Callable[[str], None], stages: tuple[str, ...] = STAGES) -> list[Outcome]:
    """Kill one run in each stage, one after another: each stage is hit when it acts for the first time."""
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for aim in aims(seed, stages):
        log = logs / f"seed{seed}-{aim.stage}.log"
        outcome = killed_run(shlex.split(command), aim, log)
        what = "killed" if outcome.hit else "ended before it was killed" if outcome.reached else "never came there"
        say(f"seed {seed}: {aim}: {what}, exit code {outcome.exit_code}, {outcome.seconds:.0f} s")
        outcomes.append(outcome)
    return outcomes
