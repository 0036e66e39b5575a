# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""bounded.call: answers, failures, limits, and a child that holds nothing of its caller's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import bounded

from tests.harness import ROOT


def open_files() -> dict[int, str]:
    found = {}
    for number in range(64):
        with suppress(OSError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def test_a_value_comes_back_whole():
    assert bounded.call(lambda n: {"bytes": b"x" * n}, (5_000_000,), 10) == {"bytes": b"x" * 5_000_000}


def test_what_the_function_raises_is_told():
    def broken():
        raise FileNotFoundError(2, "No such file or directory", "/nowhere")

    with pytest.raises(bounded.ChildFailed, match="/nowhere") as caught:
        bounded.call(broken)
    assert (caught.value.kind, caught.value.errno) == ("FileNotFoundError", 2)


def test_a_child_that_dies_is_a_failure_at_once():
    start = time.monotonic()
    with pytest.raises(bounded.ChildFailed, match="died without a result"):
        bounded.call(lambda: os.kill(os.getpid(), signal.SIGKILL), (), 20)
    assert time.monotonic() - start < 5


def test_a_hanging_child_is_killed_at_the_limit(tmp_path):
    marker = tmp_path / "pid"

    def hang():
        marker.write_text(str(os.getpid()))
        os.read(os.pipe()[0], 1)

    start = time.monotonic()
    with pytest.raises(bounded.TimedOut, match=r"hang did not answer within 0\.5 s"):
        bounded.call(hang, (), 0.5)
    assert 0.5 <= time.monotonic() - start < 3
    pid = int(marker.read_text())
    while os.path.exists(f"/proc/{pid}"):  # the reaper is PID 1's; pytest-timeout bounds this
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                break
        time.sleep(0.01)


def test_the_child_holds_no_descriptor_of_its_caller():
    keep, other = os.pipe()
    try:
        seen = bounded.call(open_files)
    finally:
        os.close(keep)
        os.close(other)
    assert sorted(seen) == [0, 1, 2, 3]
    assert {seen[0], seen[1], seen[2]} == {"/dev/null"}
    assert seen[3].startswith("pipe:")


def test_the_child_has_its_own_session_and_leaves_us_none():
    assert bounded.call(lambda: os.getsid(0)) != os.getsid(0)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_process_that_leaves_a_stuck_child_still_ends_its_stdout():
    """What Ansible waits for is the end of the module's stdout, not its exit."""
    code = (
        "from ansible_collections.relight.recovery.plugins.module_utils import bounded\n"
        "import os, signal\n"
        "def stuck():\n"
        "    os.setsid() if os.fork() == 0 else os._exit(0)\n"  # out of the group that is killed
        "    signal.setitimer(signal.ITIMER_REAL, 8)\n"
        "    signal.pause()\n"
        "try:\n"
        "    bounded.call(stuck, (), 0.3)\n"
        "except bounded.TimedOut:\n"
        "    print('told')\n"
    )
    start = time.monotonic()
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "collections")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout == "told\n"
    assert time.monotonic() - start < 5
