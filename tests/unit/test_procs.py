# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Processes as they are: parsing, trees, ports, and signals that reach this very process or none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import procs

from tests.supervisor import wait_for


@pytest.fixture
def start():
    children = []

    def run(code, *args, **options):
        child = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, **options)
        children.append(child)
        assert child.stdout.readline() == b"ready\n"
        return child

    yield run
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


WAIT = "import signal; print('ready', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True)\nwhile True: signal.pause()"


def test_a_process_is_read_as_it_is(start):
    child = start(WAIT, "--api-key", "Zq7canary9Xw", start_new_session=True)
    wait_for(lambda: procs.read(child.pid).state == "S")
    seen = procs.read(child.pid)
    assert (seen.pid, seen.ppid, seen.group, seen.session) == (child.pid, os.getpid(), child.pid, child.pid)
    assert seen.user == procs.user_name(os.getuid())
    assert 1 << 20 < seen.rss_bytes < 1 << 30
    assert seen.command.endswith("--api-key [redacted]")
    boot = time.time() - float(open("/proc/uptime").read().split()[0])
    assert abs(boot + seen.start_time / os.sysconf("SC_CLK_TCK") - time.time()) < 30


def test_a_name_with_brackets_and_blanks_is_no_trap(tmp_path, start):
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to(sys.executable)
    child = start(WAIT, executable=str(odd))
    wait_for(lambda: procs.read(child.pid).state == "S")
    assert procs.read(child.pid).ppid == os.getpid()


def test_a_process_that_is_gone_is_none(start):
    child = start(WAIT)
    seen = procs.read(child.pid)
    child.kill()
    wait_for(lambda: procs.read(child.pid).zombie)
    assert not procs.is_same(seen)
    assert procs.wait_gone([seen], 0) == []
    child.wait()
    assert procs.read(child.pid) is None
    assert procs.send(seen, signal.SIGTERM) is False


def test_a_reused_pid_is_another_process(start):
    child = start(WAIT)
    earlier = replace(procs.read(child.pid), start_time=1)
    assert procs.send(earlier, signal.SIGKILL) is False
    assert procs._send_checked(earlier, signal.SIGKILL) is False
    assert procs.terminate([earlier], 0.1) == []
    assert child.poll() is None


def test_terminate_asks_then_forces(start):
    kind, stubborn = start(WAIT), start(STUBBORN)
    begun = time.monotonic()
    assert procs.terminate([procs.read(kind.pid), procs.read(stubborn.pid)], 0.3) == []
    assert time.monotonic() - begun < 5
    assert (kind.wait(5), stubborn.wait(5)) == (-signal.SIGTERM, -signal.SIGKILL)


def test_terminate_needs_no_pidfd(start, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    kind, stubborn = start(WAIT), start(STUBBORN)
    assert procs.terminate([procs.read(kind.pid), procs.read(stubborn.pid)], 0.2) == []
    assert (kind.wait(5), stubborn.wait(5)) == (-signal.SIGTERM, -signal.SIGKILL)


def test_what_does_not_end_in_time_is_returned(start):
    child = start(WAIT)
    seen = procs.read(child.pid)
    assert procs.wait_gone([seen], 0.1) == [seen]


def test_a_tree_holds_children_and_theirs(start):
    inner = "import signal, subprocess; subprocess.Popen(['sleep', '1000']); print('ready', flush=True); signal.pause()"
    child = start(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])", start_new_session=True)
    everyone = procs.every()
    tree = procs.tree(child.pid, everyone)
    assert child.pid in tree
    assert len(tree) == 3
    assert {everyone[pid].session for pid in tree} == {child.pid}
    assert procs.tree(4194200, everyone) == set()
    os.killpg(child.pid, signal.SIGKILL)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_listener_is_mapped_to_its_process(family, address):
    try:
        listening = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"no {address} here")
    with listening:
        port = listening.getsockname()[1]
        assert procs.listeners([port]) == [procs.Listener(port, os.getpid())]
        assert procs.listeners([port], procs.Files({}, ())) == [procs.Listener(port, None)]
        assert procs.port_answers(port, address)
    assert procs.listeners([port]) == []
    assert not procs.port_answers(port, address)


def test_an_environment_is_read_by_allow_list(start):
    child = start(WAIT, env={"RELIGHT_UNIT": "a", "HOME": "/x", "SGLANG_API_KEY": "Zq7canary9Xw", "NCCL_DEBUG": "INFO=1"})
    assert procs.environment(child.pid) == {"RELIGHT_UNIT": "a", "SGLANG_API_KEY": "[redacted]", "NCCL_DEBUG": "INFO=1"}
    assert procs.environment(4194200) is None
