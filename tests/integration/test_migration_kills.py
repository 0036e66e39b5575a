# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""kill -9 of the acting module and of the copy service, twice and more in each phase: a re-run converges and repeats nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import disks, trees
from tests.disks import MIB
from tests.supervisor import wait_for

pytestmark = [disks.needed, disks.long, pytest.mark.timeout(600)]
KILLS = 2


def inside(host, path):
    """A path of the host's namespace, read from outside, which is quick enough to aim by."""
    return Path(f"/proc/{host.holder.pid}/root{path}")


def journal_lines(host):
    try:
        return inside(host, host.state / "journal.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []


def killed_module(host, state, target, rng, **options):
    """Start one step and kill it a random while after the journal says that it began. Whether it was at work then."""
    before = len(journal_lines(host))
    process = host.start_module("storage_migrate", state=state, target=target, **{**host.options, **options})
    deadline = time.monotonic() + 20
    while process.poll() is None and len(journal_lines(host)) == before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(rng.choice((0.0, rng.uniform(0.0, 0.15), rng.uniform(0.0, 0.5))))
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return alive


def service_pid(host):
    """The copy service's pid while its pass is at work, else None."""
    try:
        value = json.loads(inside(host, host.state / "migration" / "progress.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return value["pid"] if value["phase"] not in ("done", "failed") and not dead(value["pid"]) else None


def events(host):
    lines = host.run("cat", host.state / "migration" / "manifest.jsonl", check=False).stdout.splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def journal(host, event):
    lines = host.run("cat", host.state / "journal.jsonl").stdout.splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def source_is_whole(host, old, digest):
    """Whatever was killed, the old file system still has all that it had."""
    where = next(path for path in (host.data, host.root / "aside") if host.mounted(path) == old)
    assert tree_digest(host, where) == digest


def tree_digest(host, path):
    return host.run("sh", "-c", f"cd {path} && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum").stdout


@pytest.mark.parametrize("seed", [random.randrange(1 << 32) for _ in range(2)], ids=["a", "b"])
@pytest.mark.parametrize(("fstype", "partitioned"), [("xfs", True), ("ext4", False)])
def test_kills_in_each_phase(seed, fstype, partitioned):
    print(f"seed {seed}")
    rng = random.Random(seed)
    with disks.host() as host:
        old = host.old_volume(size=400 * MIB)
        host.python(
            f"from pathlib import Path; from tests import trees; trees.make(Path('{host.data}'), {seed % 99}, large=60, small=2500)"
        )
        target = host.disk("new", 500 * MIB)
        options = {"fstype": fstype, "partitioned": partitioned, "consent": [f"wipe:{target}"]}
        kills, digest = {}, ""
        for state in ("prepared", "copied", "quiesced", "verified", "cut_over"):
            if state == "quiesced":  # a writer was at work during the first pass
                host.python(
                    f"from pathlib import Path; from tests import trees; trees.make(Path('{host.data}/later'), 5, large=40, small=900)"
                )
            digest = tree_digest(host, host.data) if state != "cut_over" else digest
            if state in ("copied", "verified"):
                assert host.migrate(state, target, **options)["gate"]["verdict"] == "pass"
                kills[f"{state} service"] = kill_service(host, state, target, rng, options)
            kills[state] = sum(killed_module(host, state, target, rng, **options) for _ in range(KILLS))
            result = host.migrate(state, target, **options)
            assert result["gate"]["verdict"] in ("pass", "warn"), result["gate"]
            if state in ("copied", "verified"):
                assert host.wait("live" if state == "copied" else "final")["gate"]["verdict"] == "pass"
            if state != "cut_over":
                source_is_whole(host, old, digest)
        print(kills)
        assert sum(kills.values()) >= 6
        assert all(result["changed"] is False for result in host.whole(target, **options))
        source_is_whole(host, old, digest)
        assert (
            host.python("import sys; from tests import trees; print(trees.differences(*sys.argv[1:]))", host.root / "aside", host.data)
            == "\n"
        )
        assert len(journal(host, "formatted")) == 1
        assert len({line["consent"] for line in journal(host, "spent")}) == 1
        verified = set()
        for line in events(host):
            if line["event"] == "verified":
                assert line["path"] not in verified, "read back twice"
                verified.add(line["path"])
            elif line["event"] == "copied":
                assert line["path"] not in verified, "copied after it was verified"
        assert len(journal(host, "spent")) == 1
        # The way back is killed too.
        for _ in range(KILLS):
            killed_module(host, "rolled_back", target, rng)
        assert host.migrate("rolled_back", target)["gate"]["verdict"] in ("pass", "warn")
        assert host.mounted(host.data) == old
        assert tree_digest(host, host.data) == digest


def kill_service(host, state, target, rng, options):
    """Kill the service at random moments of its pass, starting it again each time, until its pass is through."""
    wanted = "live" if state == "copied" else "final"
    count = 0
    for _ in range(2 * KILLS):
        pid = service_pid(host)
        while pid is None:
            deadline = time.monotonic() + 0.7
            while pid is None and time.monotonic() < deadline:
                time.sleep(0.001)
                pid = service_pid(host)
            if pid is None and host.progress(wanted)["settled"]:
                break
        if pid is None:
            break
        time.sleep(rng.uniform(0.0, 0.25))
        if not dead(pid):
            os.kill(pid, signal.SIGKILL)
            count += 1
        wait_for(lambda pid=pid: dead(pid))
        assert host.migrate(state, target, **options)["gate"]["verdict"] == "pass"
    return count


def dead(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_killed_test_leaves_neither_mounts_nor_loop_devices(tmp_path):
    """The harness itself: its namespace and its loop devices go with it."""
    code = (
        "from tests import disks; import time\n"
        "with disks.host(managed=False) as host:\n"
        "    host.old_volume(); print(host.device('old'), host.root, flush=True); time.sleep(100)\n"
    )
    environment = {**os.environ, **disks.UNIT_ENVIRONMENT}
    process = subprocess.Popen([disks.sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, cwd=disks.ROOT)
    device, root = process.stdout.readline().split()
    process.kill()
    process.wait()
    backing = f"/sys/block/{os.path.basename(device)}/loop/backing_file"
    wait_for(lambda: not os.path.exists(backing) or root not in open(backing).read())
    os.rmdir(root)
    assert trees.have_rsync()
