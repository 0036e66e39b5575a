# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The journal and the recovery lock, through a real module: torn lines, a lock that dies with its owner, a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from ansible_collections.relight.recovery.plugins.module_utils.journal import Busy, Journal, recovery_lock

from tests.harness import ModuleFailed, run_module

HOLD = """
import sys, time
from ansible_collections.relight.recovery.plugins.module_utils.journal import recovery_lock
with recovery_lock(sys.argv[1], "unit of run r7", 0):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the recovery lock of tmp_path until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def sweep(tmp_path, **options):
    return run_module("tmpfs_check", path="/dev/shm", need_bytes=0, reserve_bytes=0, state_dir=str(tmp_path), **options)


def test_a_gate_journals_its_begin_and_end(tmp_path):
    sweep(tmp_path, run="r1", stage="verify")
    lines = list(Journal(str(tmp_path)).lines())
    assert [(line["event"], line["step"], line["stage"], line["run"]) for line in lines] == [
        ("begin", "tmpfs_check", "verify", "r1"),
        ("end", "tmpfs_check", "verify", "r1"),
    ]
    assert lines[1]["verdict"] in ("pass", "warn")


def test_check_mode_leaves_nothing(tmp_path):
    sweep(tmp_path, check=True, state="swept")
    assert list(tmp_path.iterdir()) == []


def test_a_torn_line_is_passed_over_and_closed(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"event": "begin"}\n{"event": "en')
    sweep(tmp_path)
    assert [line["event"] for line in Journal(str(tmp_path)).lines()] == ["begin", "begin", "end"]
    assert all(json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines() if not line.endswith('"en'))


def test_an_act_refuses_while_another_acts_and_says_who(tmp_path, holder):
    with pytest.raises(ModuleFailed) as failed:
        sweep(tmp_path, state="swept", lock_wait_seconds=0)
    assert f"held by unit of run r7, pid {holder.pid}" in failed.value.result["msg"]
    assert sweep(tmp_path)["gate"]["name"] == "tmpfs_check"  # a look needs no lock


def test_the_lock_dies_with_its_owner(tmp_path, holder):
    with pytest.raises(Busy), recovery_lock(str(tmp_path), "test", 0):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with recovery_lock(str(tmp_path), "test", 0):
        pass


def test_a_disk_without_room_for_the_journal_does_not_keep_an_act_from_acting(tmp_path):
    """/dev/full takes no byte, as a full disk does."""
    (tmp_path / "journal.jsonl").symlink_to("/dev/full")
    result = sweep(tmp_path, state="swept")
    assert result["gate"]["verdict"] in ("pass", "warn")
    assert "No space left on device" in result["journal_error"]
