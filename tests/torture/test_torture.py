# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Two kills in each stage of a recovery, by seed: it always ends clear, with the same store, and destroys nothing twice.

Run by `make torture` (RELIGHT_TORTURE_SEEDS="1 2" is the default; other seeds aim elsewhere). Each seed stages one disaster and
kills one run in each stage, in the order of the runbook, so that every stage is hit when it acts for the first time.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import __main__ as demo
from demo import host, proof
from tests.integration.test_demo_recovery import play, samples
from tests.torture import kills

SEEDS = [int(word) for word in os.environ.get("RELIGHT_TORTURE_SEEDS", "1 2").split()]
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif("RELIGHT_TORTURE" not in os.environ, reason="long: make torture; a part is in test_demo_recovery.py"),
]


@pytest.fixture(scope="module")
def recovered() -> Iterator[Path]:
    """A recovered host. Yields the store of the run without a disaster."""
    try:
        done = subprocess.run([sys.executable, "-m", "demo", "--keep"], cwd=demo.CHECKOUT, env=demo.environment_of_tools(), check=False)
        assert done.returncode == 0, "the demo failed: see above and build/demo/log"
        yield demo.BUILD / "reference" / demo.reference_key() / "hidden_states"
    finally:
        host.stop(demo.HOST)


def stage_a_disaster() -> str:
    """Let half of the extraction be undone, run it, and break it. Returns the recovery's command with its consents."""
    present = sorted(samples().glob("rows_*/data_*.ckpt"))
    for path in present[len(present) // 2 :]:
        path.unlink()
    (samples().parent / "drill.fill").unlink(missing_ok=True)
    demo.DRILL.unlink(missing_ok=True)
    running = play("recover.yml", "-e", "relight_wait=first_samples")
    assert running.returncode == 0, running.stdout
    drilled = play("drill.yml", RELIGHT_DRILL_SECRET="sk-canary-torture")
    assert drilled.returncode == 0, drilled.stdout
    stopped = play("recover.yml")
    assert stopped.returncode != 0
    return str(demo.report()["paste"])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_in_every_stage(recovered: Path, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        command = stage_a_disaster()
        drill = json.loads(demo.DRILL.read_text())
        quarantined_before = proof.quarantined(samples())
        since = time.time()
        outcomes = kills.chain(command, seed, tmp_path, print)
        done = subprocess.run(
            shlex.split(command), env=demo.environment_of_tools(), cwd=demo.CHECKOUT, capture_output=True, text=True, check=False
        )
        print(f"seed {seed}: then, unkilled: exit code {done.returncode}, verdict {demo.report()['verdict']}")
    assert (done.returncode, demo.report()["verdict"]) == (0, "clear"), done.stdout
    missed = [str(outcome.aim) for outcome in outcomes if not outcome.reached]
    assert missed == []
    assert proof.compare(samples(), recovered, len(list(recovered.glob("rows_*/data_*.ckpt")))).faults == []
    damaged = proof.indexes([*drill["torn"], *drill["flipped"]])
    assert proof.quarantined(samples()) - quarantined_before <= damaged
    removals = Counter(
        action for line in kills.journal() if line.get("time", 0) >= since for action in line.get("actions", []) if "drill.fill" in action
    )
    assert all(count == 1 for count in removals.values()), removals
    assert demo.recap(play("recover.yml").stdout)["changed"] == 0
