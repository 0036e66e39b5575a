# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The embedded recovery, whole: a real server, a real disaster, a proven recovery; then what must hold on the recovered host."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from demo import __main__ as demo
from demo import host, proof
from tests.torture import kills

RECORDS = 72  # fewer than the demo's, so that the suite gets through
pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1200)]


def play(playbook: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook on the embedded host, to its end."""
    return subprocess.run(
        ["ansible-playbook", "-i", "inventory/demo", playbook, *arguments],
        env={**demo.environment_of_tools(), **environment},
        cwd=demo.CHECKOUT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def recovered() -> Iterator[dict[str, Any]]:
    """The demo's host after its recovery, still running. Its report."""
    if not demo.SGLANG_PYTHON.exists():
        pytest.skip("there is no .venv/sglang: make sglang")
    os.environ["RELIGHT_DEMO_RECORDS"] = str(RECORDS)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "demo", "--keep", "--thorough"], cwd=demo.CHECKOUT, env=demo.environment_of_tools(), check=False
        )
        assert done.returncode == 0, "the demo failed: see above and build/demo/log"
        yield demo.report()
    finally:
        host.stop(demo.HOST)
        del os.environ["RELIGHT_DEMO_RECORDS"]


def reference() -> Path:
    return demo.BUILD / "reference" / demo.reference_key() / "hidden_states"


def samples() -> Path:
    """The recovered store, seen from outside."""
    return Path(f"/proc/{host.status(demo.HOST).anchor}/root{demo.HOST}/data/hidden_states")


def unit_pids() -> dict[str, int]:
    """The pid of each program that runs."""
    control = [str(Path(sys.executable).parent / "supervisorctl"), "-c", str(demo.HOST / "etc/supervisor/supervisord.conf"), "status"]
    out = subprocess.run(host.enter(demo.HOST, control), capture_output=True, text=True, check=False).stdout
    return {name: int(pid) for name, pid in re.findall(r"^(\S+) +RUNNING +pid (\d+)", out, re.MULTILINE)}


def test_the_report_is_clear_and_tells_what_was_redone(recovered: dict[str, Any]) -> None:
    assert recovered["verdict"] == "clear"
    told = recovered["hosts"]["embedded"]
    assert told["samples"]["total"] == told["samples"]["intact"] == RECORDS
    assert (told["samples"]["torn"], told["samples"]["corrupt"], told["samples"]["quarantined"], told["samples"]["redone"]) == (1, 1, 2, 2)
    assert told["samples"]["intact_before"] + 2 + told["samples"]["new"] == RECORDS
    proven = json.loads((demo.BUILD / "proof.json").read_text())
    assert proven["torn"] + proven["corrupt"] == told["tokens"]["redone"]
    assert proven["largest_relative_error"] <= 1e-4
    assert {gate["name"] for gate in told["gates"]} >= {"shard_inventory", "storage_check", "gpu_free", "sglang_ready", "continuity_check"}
    assert all(gate["after"]["verdict"] == "pass" for gate in told["gates"])
    page = (demo.REPORT / "report.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page), "report.html loads something from elsewhere"


def test_a_file_that_the_reboot_wiped_is_back_and_rogues_stay_away(recovered: dict[str, Any]) -> None:
    restored = demo.HOST / "scripts/extract_by_hand.sh"
    assert restored.read_bytes() == (demo.CHECKOUT / "demo/files/extract_by_hand.sh").read_bytes()
    assert (demo.HOST / "tmp/extract_by_hand.sh").resolve() == restored
    assert set(unit_pids()) == {"relight-sglang"}


def test_two_recoveries_at_once_of_a_dead_server_act_once(recovered: dict[str, Any]) -> None:
    """Each waits for the other's act; the later one finds a server that is still loading and leaves it alone."""
    (demo.HOST / "scripts/extract_by_hand.sh").unlink()
    victim = next(samples().glob("rows_*/data_*.ckpt"))
    os.truncate(victim, victim.stat().st_size // 2)
    mark = demo.log_bytes()
    before = host.status(demo.HOST)
    servers = set(before.processes) - {before.anchor, before.supervisord}
    for pid in servers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command = ["ansible-playbook", "-i", "inventory/demo", "recover.yml", "-e"]
    both = [
        subprocess.Popen(
            [*command, f"relight_report_dir={demo.BUILD / name}"],
            env=demo.environment_of_tools(),
            cwd=demo.CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("one", "two")
    ]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    told = [json.loads((demo.BUILD / name / "report.json").read_text()) for name in ("one", "two")]
    assert "clear" in [part["verdict"] for part in told], "\n".join(outputs)
    for process, part in zip(both, told):
        # The later one may come while the other compares samples, which only one may do: then it refuses, and says so.
        refused = part["verdict"] == "not-clear" and "is being written by relight" in part["hosts"]["embedded"]["reason"]
        assert (process.returncode == 0 and part["verdict"] == "clear") or (process.returncode == 2 and refused), "\n".join(outputs)
    assert sum(part["hosts"]["embedded"]["samples"].get("quarantined", 0) for part in told) == 1
    log = demo.SERVER_LOG.read_bytes()[mark:].decode(errors="replace")
    assert log.count("Load weight begin") == 1, "the server was started more than once"
    assert proof.compare(samples(), reference(), RECORDS).faults == []


def test_kills_of_each_kind_end_clear_with_the_same_store(recovered: dict[str, Any], tmp_path: Path) -> None:
    """A quick part of tests/torture: the server is left running."""
    pids = unit_pids()
    (demo.HOST / "scripts/extract_by_hand.sh").unlink()
    for victim in sorted(samples().glob("rows_*/data_*.ckpt"))[:3]:
        os.truncate(victim, victim.stat().st_size // 2)
    seed = int(os.environ.get("RELIGHT_TORTURE_SEED", "1"))
    outcomes = kills.chain("ansible-playbook -i inventory/demo recover.yml", seed, tmp_path, print, ("verify", "continuity", "report"))
    assert all(outcome.reached for outcome in outcomes)
    assert {outcome.aim.victim for outcome in outcomes} == set(kills.VICTIMS)
    done = play("recover.yml")
    assert (done.returncode, demo.report()["verdict"]) == (0, "clear"), done.stdout
    assert unit_pids() == pids
    assert proof.compare(samples(), reference(), RECORDS).faults == []


def test_a_recovery_of_a_live_extraction_restarts_nothing(recovered: dict[str, Any]) -> None:
    for victim in sorted(samples().glob("rows_*/data_*.ckpt"))[: RECORDS * 2 // 3]:
        victim.unlink()
    first = play("recover.yml", "-e", "relight_wait=first_samples")
    assert (first.returncode, demo.report()["verdict"]) == (0, "resumed"), first.stdout
    pids = unit_pids()
    assert set(pids) == {"relight-sglang", "relight-extract"}
    second = play("recover.yml", "-e", "relight_wait=first_samples")
    assert (second.returncode, demo.report()["verdict"]) in ((0, "resumed"), (0, "clear")), second.stdout
    assert demo.recap(second.stdout)["changed"] == 0, second.stdout
    now = unit_pids()
    assert now["relight-sglang"] == pids["relight-sglang"]
    assert now.get("relight-extract", pids["relight-extract"]) == pids["relight-extract"]
    third = play("recover.yml")
    assert (third.returncode, demo.report()["verdict"]) == (0, "clear"), third.stdout
    assert proof.compare(samples(), reference(), RECORDS).faults == []


def test_a_recovery_while_the_server_loads_restarts_nothing(recovered: dict[str, Any]) -> None:
    mark = demo.log_bytes()
    state = host.status(demo.HOST)
    for pid in set(state.processes) - {state.anchor, state.supervisord}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    first = subprocess.Popen(
        ["ansible-playbook", "-i", "inventory/demo", "recover.yml"],
        env=demo.environment_of_tools(),
        cwd=demo.CHECKOUT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

    def said() -> str:
        return demo.SERVER_LOG.read_bytes()[mark:].decode(errors="replace")

    while "server_args=" not in said():
        assert first.poll() is None, "the recovery ended before its server had started"
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    pid = unit_pids()["relight-sglang"]
    assert "fired up" not in said(), "the server was ready too soon to be met while it loads"
    second = play("recover.yml")
    assert (second.returncode, demo.report()["verdict"]) == (0, "clear"), second.stdout
    assert demo.recap(second.stdout)["changed"] == 0, second.stdout
    assert unit_pids()["relight-sglang"] == pid
    assert said().count("Load weight begin") == 1


def test_status_and_assess_change_nothing(recovered: dict[str, Any]) -> None:
    pids = unit_pids()
    for playbook in ("playbooks/status.yml", "playbooks/assess.yml"):
        done = play(playbook)
        assert done.returncode == 0, done.stdout
        assert demo.recap(done.stdout)["changed"] == 0
    assert unit_pids() == pids


def test_the_line_to_paste_stands_alone_as_a_shell_takes_it(recovered: dict[str, Any]) -> None:
    lines = next(demo.LOGS.glob("*-recover-stops.log")).read_text().splitlines()
    words = shlex.split(lines[lines.index("To consent, paste:") + 1])
    assert words[:4] == ["ansible-playbook", "-i", "inventory/demo", "recover.yml"]
    assert json.loads(words[words.index("-e") + 1])["relight_consent"][0] == f"disable:unit:{demo.FORGOTTEN}"
