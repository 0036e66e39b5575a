# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""gpu_free, hs_patch_check and sglang_ready on a GPU with real servers. Usage: check_free.py WORK [ARGS...]

Needs a GPU, root, supervisor, ansible-core and an interpreter with SGLang; elsewhere it says so and ends. ARGS go to the servers.
One server is ended by hand and one, of a supervisord program that brings it back, by gpu_free; beside them live a CUDA process that
is protected by its name and one that a shell's loop brings back. The last line is one JSON object.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]

from ansible_collections.relight.recovery.plugins.module_utils import gpu, nvml, procs  # noqa: E402

from bench import dump as bench  # noqa: E402
from bench.dump import Server  # noqa: E402
from tests import supervisor  # noqa: E402
from tests.harness import run_module  # noqa: E402

THRESHOLD_MIB = 64
STABLE_SECONDS = 3.0
UNIT = "gpu-server"
HOLDER = """
import sys, time, torch
open("/proc/self/comm", "w").write(sys.argv[1])
kept = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
time.sleep(600)
"""


def used_mib() -> int:
    return nvml.read()[0].used_mib


def idle_memory() -> dict[str, int]:
    """What both versions of NVML's call say, in MiB."""
    library = nvml.Library(None)
    library.call("nvmlInit_v2")
    handle, old = ctypes.c_void_p(), nvml._MemoryV1()
    library.call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(handle))
    library.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(old))
    new = nvml.read()[0]
    library.raw("nvmlShutdown")
    return {
        "v1_used_mib": old.used >> 20,
        "v2_used_mib": new.used_mib,
        "v2_reserved_mib": new.reserved_mib or 0,
        "total_mib": new.total_mib,
    }


def holder(name: str, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A small CUDA process of that name, as `command`'s child where there is one."""
    argv = [*command, sys.executable, "-c", HOLDER, name]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


class Watch:
    """When SIGTERM reached a server, and when it was truly gone: all its processes, and their memory on the GPU."""

    def __init__(self, launcher: int, log: Path, base_mib: int) -> None:
        everyone = procs.every()
        self.pids = procs.tree(launcher, everyone)
        self.processes = [everyone[pid] for pid in self.pids]
        self.names = {pid: everyone[pid].command[:60] for pid in self.pids}
        self.log, self.limit = log, base_mib + THRESHOLD_MIB
        self.signalled = self.gone = self.free = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.free:
            if not self.signalled and "SIGTERM received" in self.log.read_text(errors="replace"):
                self.signalled = time.monotonic()
            if not self.gone and not any(procs.is_same(process) for process in self.processes):
                self.gone = time.monotonic()
            if self.gone and used_mib() <= self.limit:
                self.free = time.monotonic()
            time.sleep(0.02)

    def wait(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.free:
            assert time.monotonic() < deadline, "never free"
            time.sleep(0.01)


def by_hand(server: Server) -> dict[str, float]:
    """SIGTERM to the launcher, as gpu_free's service manager sends it."""
    assert server.process is not None
    others = used_mib() - server.gpu_mib()
    watch = Watch(server.process.pid, server.log, others)
    begin = time.monotonic()
    server.process.terminate()
    server.process.wait(60)
    watch.wait()
    return {"to_signal_seen": watch.signalled - begin, "to_processes_gone": watch.gone - begin, "to_memory_free": watch.free - begin}


def gate(name: str, **options: Any) -> dict[str, Any]:
    """The real module as the process that it is, with this interpreter's packages."""
    paths = [str(ROOT), str(ROOT / "collections"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return run_module(name, with_env={"PYTHONPATH": ":".join(paths)}, within_seconds=180, **options)


def brief(result: dict[str, Any]) -> dict[str, Any]:
    told = result["gate"]
    problems = [{key: problem[key] for key in ("code", "where", "what", "verdict")} for problem in told["problems"]]
    return {"verdict": told["verdict"], "problems": problems, "seconds": told["seconds"], "actions": result.get("actions")}


def supervised(host: supervisor.Host, server: Server) -> int:
    """Start the server as a supervisord program that comes back when it ends; its launcher's pid."""
    command, env = server.command(), server.environment()
    script = host.root / "serve.sh"
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in env.items() if os.environ.get(key) != value)
    script.write_text(f"{exports}exec {shlex.join(command)} >>{shlex.quote(str(server.log))} 2>&1\n")
    unit = host.add(UNIT, f"/bin/bash {script}", more="stopwaitsecs=30")
    return int(unit.pid or 0)


def check(host: supervisor.Host, told: dict[str, Any], more: tuple[str, ...]) -> None:
    dumps = bench.WORK / "dumps"
    env = {"RELIGHT_DUMP_DIR": str(dumps), "RELIGHT_DUMP_LAYERS": ",".join(map(str, bench.LAYERS))}
    hand, ruled = Server("by-hand", args=more), Server("supervised", "relight.dump.plugin:activate", env, more)
    begin = time.monotonic()
    hand.start()
    launcher = supervised(host, ruled)
    told["hs_patch_check"] = gate(
        "hs_patch_check", python=sys.executable, env=ruled.environment(), layers=list(bench.LAYERS), model_dir=str(bench.WORK / "model")
    )["gate"]
    hand.wait()
    bench.wait_ready(ruled, lambda: host.running(UNIT) is not None)
    told["ready_seconds"] = round(time.monotonic() - begin, 1)

    ready = gate(
        "sglang_ready",
        unit=UNIT,
        port=ruled.port,
        log=str(ruled.log),
        probe=True,
        dump_dir=str(dumps),
        layers=list(bench.LAYERS),
        **host.options,
    )
    told["sglang_ready"] = {**brief(ready), "evidence": ready["gate"]["evidence"], "settled": ready.get("settled")}
    told["by_hand"] = by_hand(hand)

    protected = holder("gpu-monitor")
    options = {**host.options, "gpu_count": 1, "ports": [ruled.port], "protected": ["gpu-monitor"], "stable_seconds": STABLE_SECONDS}
    found = gate("gpu_free", **options)
    told["reported"] = brief(found)
    told["holders"] = [
        {key: one[key] for key in ("kind", "unit", "command", "gpu_mib", "devices", "ports")}
        for one in found["gate"]["evidence"]["holders"]
    ]
    told["not_asked_to"] = brief(gate("gpu_free", state="free", **options))
    assert host.running(UNIT), "touched without consent"

    watch = Watch(launcher, ruled.log, used_mib() - ruled_mib(launcher))
    begin = time.monotonic()
    freed = gate("gpu_free", state="free", units=[UNIT], **options)
    end = time.monotonic()
    watch.wait()
    told["freed"] = brief(freed)
    told["freed_seconds"] = {
        "to_signal_seen": watch.signalled - begin,
        "to_processes_gone": watch.gone - begin,
        "to_memory_free": watch.free - begin,
        "to_proven": end - begin,
        "longer_than_by_hand": (watch.signalled - begin) + (end - watch.free) - STABLE_SECONDS,
    }
    told["protected_alive"] = protected.poll() is None
    told["unit_after"] = str(host.manager.units().get(UNIT))
    told["came_back"] = [p.command[:80] for p in procs.every().values() if "launch_server" in p.command]

    loop = holder("respawner", ("/bin/sh", "-c", 'while :; do "$@"; done', "loop"))
    child = next(pid for pid in procs.tree(loop.pid, procs.every()) if pid != loop.pid)
    gpu.SETTLE_SECONDS = 10.0  # else it waits a minute for the newcomer to go
    query = gpu.Query(1, protected=(*gpu.PROTECTED, "gpu-monitor"))
    task = gpu.Task(query, host.manager, [f"kill:pid:{child}"], str(host.state_dir), stable_seconds=8.0, term_seconds=2.0, check=False)
    caught = gpu.free(task)
    told["respawning"] = {"killed": child, **brief({"gate": caught.gate.result(0.0), "actions": caught.actions})}
    os.killpg(loop.pid, signal.SIGKILL)
    protected.kill()


def ruled_mib(launcher: int) -> int:
    members = procs.tree(launcher, procs.every())
    return sum(held.mib or 0 for gpu in nvml.read() for held in gpu.held if held.pid in members)


def main() -> int:
    lacking = [name for name in ("ansible", "supervisor", "sglang") if importlib.util.find_spec(name) is None]
    why = bench.no_gpu() or (f"no {', '.join(lacking)}" if lacking else "") or ("" if len(sys.argv) > 1 else "no WORK given")
    if why:
        print(f"check_free: SKIPPED, nothing was checked: {why}", file=sys.stderr)
        return 0
    bench.WORK = Path(sys.argv[1])
    (bench.WORK / "model").mkdir(parents=True)
    (bench.WORK / "model" / "config.json").write_text(json.dumps(bench.MODEL))
    told: dict[str, Any] = {"idle": idle_memory(), "sees_all_pids": procs.sees_all_pids()}
    supervisor.SUPERVISORD = bench.WORK / "supervisord"
    supervisor.SUPERVISORD.write_text(f'#!/bin/sh\nexec {sys.executable} -m supervisor.supervisord "$@"\n')
    supervisor.SUPERVISORD.chmod(0o755)
    try:
        with supervisor.host() as host:
            check(host, told, tuple(sys.argv[2:]))
    finally:
        for name in ("by-hand", "supervised"):  # what an error left behind
            for process in procs.every().values():
                if f"--served-model-name {name}" in process.command:
                    procs.send(process, signal.SIGKILL)
        print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
