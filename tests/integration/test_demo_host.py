# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The embedded host is a machine of its own, and the fault injectors break it and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo import host

LIBRARY = Path(__file__).resolve().parents[2] / "library"
pytestmark = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait until `condition` holds and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Machine:
    """An embedded host of the test's own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, *command: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(host.enter(self.root, list(command)), input=given, capture_output=True, text=True, timeout=60, check=False)

    def inject(self, injector: str, /, *, check: bool = False, drill_target: bool = True, **options: Any) -> dict[str, Any]:
        """Run library/<injector>.py inside, as Ansible would."""
        arguments = {"drill_target": drill_target, "marker": str(self.root / host.MARKER), "_ansible_check_mode": check, **options}
        done = self.run(sys.executable, str(LIBRARY / f"{injector}.py"), given=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}))
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return result

    def proc(self, pid: int) -> Path:
        """A process by the pid that it has inside."""
        return Path(f"/proc/{host.status(self.root).anchor}/root/proc/{pid}")

    def inside(self, path: str) -> Path:
        """A path of the host, seen from outside through the anchor."""
        return Path(f"/proc/{host.status(self.root).anchor}/root{self.root}/{path}")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    root = tmp_path / "host"
    host.start(root, data_mib=8, shm_mib=16)
    try:
        if host.status(root).mode == "plain":
            pytest.skip("this machine allows no private mounts")
        yield Machine(root)
    finally:
        host.stop(root)


def test_its_mounts_are_its_own_and_go_with_it(machine: Machine) -> None:
    machine.run("sh", "-c", f"echo kept > {machine.root}/data/file; echo seen > /dev/shm/relight-demo-test")
    assert machine.inside("data/file").read_text() == "kept\n"
    assert not (machine.root / "data/file").exists()
    assert not Path("/dev/shm/relight-demo-test").exists()
    size = os.statvfs(machine.inside("data"))
    assert size.f_blocks * size.f_frsize == 8 << 20
    seen = host.status(machine.root)
    host.stop(machine.root)
    assert not any(Path(f"/proc/{pid}").exists() for pid in seen.processes)
    assert not host.status(machine.root).running
    assert str(machine.root) not in Path("/proc/mounts").read_text()


def test_starting_it_again_changes_nothing(machine: Machine) -> None:
    before = host.status(machine.root)
    assert host.start(machine.root) == before


def test_its_python_runs_inside_without_our_packages(machine: Machine) -> None:
    code = f"import os, sys; print(os.path.ismount('{machine.root}/data'), 'ansible' in sys.modules, os.getcwd())"
    done = subprocess.run([str(machine.root / "bin/python"), "-c", code], capture_output=True, text=True, cwd="/usr", check=True)
    assert done.stdout.split() == ["True", "False", "/usr"]
    absent = subprocess.run([str(machine.root / "bin/python"), "-c", "import supervisor"], capture_output=True, check=False)
    assert absent.returncode == 1


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user")
def test_an_ordinary_user_can_have_one() -> None:
    root = Path(f"/tmp/relight-test-{os.getpid()}/host")
    root.parent.mkdir(mode=0o777)
    root.parent.chmod(0o777)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", f"HOME={root.parent}", sys.executable, "-m", "demo.host"]
    try:
        started = subprocess.run([*user, "start", str(root)], capture_output=True, text=True, cwd=host.CHECKOUT, check=False)
        if started.returncode or json.loads(started.stdout)["mode"] not in ("user-mount-pid", "user-mount"):
            pytest.skip(f"no user namespaces for ordinary users here: {started.stderr}")
        assert os.stat(f"/proc/{json.loads(started.stdout)['anchor']}").st_uid == 65534
        stopped = subprocess.run([*user, "stop", str(root)], capture_output=True, text=True, cwd=host.CHECKOUT, check=True)
        assert json.loads(stopped.stdout)["running"] is False
    finally:
        host.stop(root)
        shutil.rmtree(root.parent)


INJECTORS: dict[str, dict[str, Any]] = {
    "fill_volume": {"file": "data/fill"},
    "crash_host": {"state": "down", "manager_pid_file": "run/supervisord.pid"},
    "damage_sample": {"store": "data", "damage": "torn"},
    "wipe_directory": {"path": "scripts"},
    "stale_segments": {"dump_dir": "data/dump"},
    "rogue_service": {"name": "vllm", "conf_dir": "etc/supervisor/conf.d", "directory": "opt/vllm", "port": 1},
}


def test_every_injector_is_in_the_table_of_refusals() -> None:
    assert sorted(INJECTORS) == sorted(path.stem for path in LIBRARY.glob("*.py"))


@pytest.mark.parametrize("name", INJECTORS)
def test_it_refuses_what_is_no_drill_target(machine: Machine, name: str) -> None:
    paths = ("file", "manager_pid_file", "store", "path", "dump_dir", "conf_dir", "directory")
    options: dict[str, Any] = {key: str(machine.root / value) if key in paths else value for key, value in INJECTORS[name].items()}
    (machine.root / "scripts/helper").write_text("x")
    before = host.status(machine.root)
    assert "relight_drill_target" in machine.inject(name, drill_target=False, **options)["msg"]
    (machine.root / host.MARKER).unlink()
    assert "drill mark" in machine.inject(name, **options)["msg"]
    assert host.status(machine.root) == before
    assert (machine.root / "scripts/helper").exists()
    assert os.listdir(machine.inside("data")) == []


def test_fill_volume_leaves_no_room_and_waits_for_the_client(machine: Machine) -> None:
    progress = machine.root / "var/relight/progress.json"
    progress.write_text(json.dumps({"phase": "extracting", "in_flight": [1]}))
    options: dict[str, Any] = {"file": str(machine.root / "data/fill"), "progress": str(progress), "stable_seconds": 0.2}
    assert "not in phase waiting-for-room" in machine.inject("fill_volume", **options, limit_seconds=0.5)["msg"]
    progress.write_text(json.dumps({"phase": "waiting-for-room", "in_flight": [1, 2]}))
    done = machine.inject("fill_volume", **options, record=str(machine.root / "drill.json"))
    assert done["progress"]["in_flight"] == [1, 2]
    assert done["bytes"] > 7 << 20
    assert (
        "No space left"
        in machine.run("python3", "-c", f"import os; os.write(os.open('{machine.root}/data/more', os.O_CREAT | os.O_WRONLY), b'x')").stderr
    )
    assert json.loads((machine.root / "drill.json").read_text())["fill"]["bytes"] == done["bytes"]


def test_a_crash_ends_everything_but_keeps_the_data_and_boots_again(machine: Machine) -> None:
    conf = machine.root / "etc/supervisor/conf.d/worker.conf"
    conf.write_text("[program:worker]\ncommand=sh -c 'sleep 1000 & sleep 1000'\n")
    boots: dict[str, Any] = {
        "manager_pid_file": str(machine.root / "run/supervisord.pid"),
        "power_button": str(machine.root / "run/init.pid"),
    }
    up: dict[str, Any] = {"state": "up", "socket": str(machine.root / "run/supervisor.sock"), **boots}
    machine.inject("crash_host", state="down", **boots)
    assert machine.inject("crash_host", **up)["changed"]
    first = until(lambda: len(s.processes) == 5 and s if (s := host.status(machine.root)) else None)  # anchor, supervisord, sh, 2 sleeps
    machine.run("sh", "-c", f"echo kept > {machine.root}/data/file")
    killed = machine.inject("crash_host", state="down", **boots)["killed"]
    assert len(killed) == 4
    assert host.status(machine.root).processes == (first.anchor,)
    conf.unlink()
    machine.inject("crash_host", **up)
    second = until(lambda: s if (s := host.status(machine.root)).supervisord else None)
    assert second.supervisord not in first.processes
    assert machine.inside("data/file").read_text() == "kept\n"


def test_damaged_samples_were_whole_and_large(machine: Machine) -> None:
    store = machine.inside("data")
    (store / "rows_0-2000").mkdir()
    for index in range(12):
        with zipfile.ZipFile(store / f"rows_0-2000/data_{index}.ckpt", "w") as archive:
            archive.writestr("data.pkl", os.urandom(1000 * (index + 1)))
    sizes = {p.name: p.stat().st_size for p in store.glob("rows_*/*")}
    middle = statistics.median(sizes.values())
    options: dict[str, Any] = {"store": str(machine.root / "data"), "record": str(machine.root / "drill.json")}
    assert machine.inject("damage_sample", damage="torn", check=True, **options)["victims"]
    assert {p.name: p.stat().st_size for p in store.glob("rows_*/*")} == sizes
    times = {p.name: p.stat().st_mtime_ns for p in store.glob("rows_*/*")}
    flipped = machine.inject("damage_sample", damage="flipped", **options)["victims"]
    torn = machine.inject("damage_sample", damage="torn", count=2, **options)["victims"]
    record = json.loads((machine.root / "drill.json").read_text())
    assert (record["torn"], record["flipped"]) == (torn, flipped)
    assert len({*torn, *flipped}) == 3
    for name in [*torn, *flipped]:
        assert sizes[Path(name).name] >= middle
    for name in torn:
        assert (store / name).stat().st_size < sizes[Path(name).name]
    victim = store / flipped[0]
    assert (victim.stat().st_size, victim.stat().st_mtime_ns) == (sizes[victim.name], times[victim.name])
    with zipfile.ZipFile(victim) as archive:
        assert archive.testzip() == "data.pkl"
    assert "only" in machine.inject("damage_sample", damage="torn", count=4, **options)["msg"]


def test_wipe_empties_a_directory_and_follows_no_link(machine: Machine) -> None:
    scripts = machine.root / "scripts"
    (scripts / "folder").mkdir()
    (scripts / "folder/file").write_text("x")
    (scripts / "link").symlink_to(machine.root / "etc")
    assert machine.inject("wipe_directory", path=str(scripts))["removed"] == ["folder", "link"]
    assert os.listdir(scripts) == []
    assert (machine.root / host.MARKER).exists()
    assert "too near the root" in machine.inject("wipe_directory", path="/usr/..")["msg"]


def test_stale_segments_belong_to_the_dead(machine: Machine) -> None:
    segments = machine.inject("stale_segments", dump_dir="/dev/shm/relight", mib=1)["segments"]
    assert [Path(path).parent.name for path in segments] == ["relight", "shm"]
    for path in segments:
        (pid,) = (int(part) for part in path.split(".") if part.isdigit())
        assert not machine.proc(pid).exists()
        assert machine.run("stat", "-c", "%s", path).stdout.strip() == str(1 << 20)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_rogues_hold_port_and_memory_and_come_back(machine: Machine) -> None:
    port = free_port()
    common: dict[str, Any] = {"conf_dir": str(machine.root / "etc/supervisor/conf.d"), "port": port, "mib": 64}
    machine.inject("rogue_service", name="vllm", directory=str(machine.root / "opt/vllm"), **common)
    machine.inject(
        "rogue_service", name="embedder", directory=str(machine.root / "opt/embedder"), delay_seconds=1, secret="sk-canary-1", **common
    )
    control = [str(Path(sys.executable).parent / "supervisorctl"), "-c", str(machine.root / "etc/supervisor/supervisord.conf")]
    machine.run(*control, "update")
    until(lambda: answers(port))

    def pid_of(name: str) -> int:
        word = machine.run(*control, "pid", name).stdout.strip()
        return int(word) if word.isdigit() else 0

    vllm, embedder = pid_of("vllm"), pid_of("embedder")
    assert b"sk-canary-1" in (machine.proc(embedder) / "cmdline").read_bytes()
    assert b"RELIGHT_CANARY=sk-canary-1" in (machine.proc(embedder) / "environ").read_bytes()
    resident_kib = int((machine.proc(vllm) / "status").read_text().split("VmRSS:")[1].split()[0])
    assert resident_kib >= 64 << 10
    machine.run("sh", "-c", f"kill -9 {vllm}")
    until(lambda: pid_of("vllm") not in (0, vllm))
    machine.run(*control, "stop", "vllm")
    assert pid_of("vllm") == 0
    until(lambda: answers(port))  # the forgotten one has taken the port
    assert pid_of("embedder") == embedder
