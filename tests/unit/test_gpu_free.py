# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""gpu_free on seeded faults: an NVML double built from C, a real supervisord, real holders, ports and orphans."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import gpu, nvml, procs, services

from tests import supervisor
from tests.harness import ROOT, ModuleFailed, run_module, skip_without_sight

CANARY = "Zq7canary9Xw"
TOTAL, RESERVED = 143771, 615
# A process that opens a file, listens on a port and keeps memory, as asked; may ignore SIGTERM.
HOLDER = """
import signal, socket, sys
device, port, mib, stubborn = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == 'stubborn'
kept = bytearray(b'x') * (mib << 20)
opened = open(device) if device != '-' else None
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if port:
    listening = socket.create_server(('127.0.0.1', port))
print('ready', flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    source = ROOT / "tests" / "nvml_double" / "nvml.c"
    for name, define in (("new", []), ("old", ["-DNVML_OLD"])):
        subprocess.run(["gcc", "-Wall", "-Werror", "-fPIC", "-shared", *define, "-o", folder / f"{name}.so", source], check=True)
    return folder


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    holder = tmp_path_factory.mktemp("holder") / "holder.py"
    holder.write_text(HOLDER)
    with supervisor.host() as found:
        found.holder = str(holder)
        yield found


class Box:
    """A GPU host for one test: the double's state, a device file, and holders that end with the test."""

    def __init__(self, host, library, folder):
        self.host, self.folder = host, folder
        self.library = library / "new.so"
        self.state = folder / "gpus"
        self.device = folder / "dev-nvidia0"
        self.device.touch()
        self.children = []

    def gpus(self, *lines, count=2):
        per_gpu = [f"gpu {TOTAL} {RESERVED}"] * count
        self.state.write_text("\n".join([*per_gpu, *lines]) + "\n")

    def holder(self, device=True, port=0, mib=1, how="kind", more=(), name=None):
        argv = [str(self.device) if device else "-", str(port), str(mib), how, *more]
        child = subprocess.Popen(
            [name or sys.executable, self.host.holder, *argv],
            stdout=subprocess.PIPE,
            executable=sys.executable,
            env={"PATH": os.environ["PATH"]},
        )
        self.children.append(child)
        assert child.stdout.readline() == b"ready\n"
        return child

    def command(self, device=True, port=0, mib=1, how="kind"):
        return shlex.join([sys.executable, self.host.holder, str(self.device) if device else "-", str(port), str(mib), how])

    def run(self, state="reported", check=False, gpu_count=2, **options):
        fixed = {
            "nvml_library": str(self.library),
            "device_prefix": str(self.folder / "dev-nvidia"),
            "stable_seconds": 0.2,
            "term_seconds": 2,
        }
        options = {**self.host.options, **fixed, "our_units": ["relight-t"], **options}
        return run_module("gpu_free", check=check, with_env={"NVML_DOUBLE": str(self.state)}, state=state, gpu_count=gpu_count, **options)


@pytest.fixture
def box(host, library, tmp_path):
    skip_without_sight()
    found = Box(host, library, tmp_path)
    found.gpus()
    yield found
    for child in found.children:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def codes(result):
    return [problem["code"] for problem in result["gate"]["problems"]]


def verdict(result):
    return result["gate"]["verdict"]


def test_idle_gpus_are_free_although_the_driver_keeps_its_reserve(box):
    result = box.run()
    assert (verdict(result), codes(result), result["changed"]) == ("pass", [], False)
    assert result["gate"]["evidence"]["gpus"][0] == {
        "index": 0,
        "uuid": "GPU-double-0",
        "total_mib": TOTAL,
        "used_mib": 0,
        "reserved_mib": RESERVED,
        "error": None,
    }
    assert box.run(state="free")["changed"] is False


@pytest.mark.parametrize("kind", ["compute", "graphics", "mps"])
def test_each_of_the_three_lists_is_read(box, kind):
    pid = box.holder().pid
    box.gpus(f"hold {kind} {pid} 40000")
    result = box.run()
    assert codes(result) == ["gpu-holder-unlisted"]
    problem = result["gate"]["problems"][0]
    assert problem["consent"] == f"kill:pid:{pid}"
    assert "40000 MiB on GPU 1" in problem["what"]


def test_a_holder_that_nvml_does_not_list_is_found_by_its_open_device(box):
    pid = box.holder().pid
    result = box.run()
    assert [p["consent"] for p in result["gate"]["problems"]] == [f"kill:pid:{pid}"]
    assert str(box.device) in result["gate"]["summary"]


def test_without_consent_nothing_at_all_is_touched(box):
    allowed, other = box.holder(), box.holder()
    box.gpus(f"hold compute {allowed.pid} 1000", f"hold compute {other.pid} 1000")
    result = box.run(state="free", consent=[f"kill:pid:{allowed.pid}"])
    assert (verdict(result), result["changed"], result["actions"]) == ("fail", False, [])
    assert allowed.poll() is None
    assert other.poll() is None


def test_consented_holders_end_even_those_that_ignore_sigterm(box):
    kind, stubborn = box.holder(more=["--api-key", CANARY]), box.holder(how="stubborn")
    box.gpus(f"hold compute {kind.pid} 70000", f"hold compute {stubborn.pid} -1")
    consent = [f"kill:pid:{child.pid}" for child in (kind, stubborn)]
    planned = box.run(state="free", check=True, consent=consent)
    assert (verdict(planned), codes(planned)) == ("unknown", ["depends-on-planned-act"])
    assert kind.poll() is None
    assert stubborn.poll() is None
    done = box.run(state="free", consent=consent)
    assert done["actions"] == planned["actions"]
    assert len(done["actions"]) == 2
    assert verdict(done) == "pass"
    assert (kind.wait(5), stubborn.wait(5)) == (-signal.SIGTERM, -signal.SIGKILL)
    assert CANARY not in json.dumps([planned, done])
    assert box.run(state="free", consent=consent)["changed"] is False


def test_a_pid_of_another_namespace_is_never_taken_for_one_here(box):
    box.gpus("ghost compute 4194200 1000")
    result = box.run(state="free", consent=["kill:pid:4194200"])
    assert (codes(result), result["changed"]) == (["gpu-holder-invisible"], False)


@pytest.mark.parametrize(("device", "code"), [(True, "gpu-holder-unlisted"), (False, "gpu-holder-invisible")])
def test_in_a_container_a_pid_counts_only_with_a_device_open(box, monkeypatch, device, code):
    pid = box.holder(device=device).pid
    box.gpus(f"hold compute {pid} 1000")
    monkeypatch.setenv("NVML_DOUBLE", str(box.state))
    monkeypatch.setattr(procs, "INITIAL_PID_NAMESPACE", "pid:[1]")
    query = gpu.Query(gpu_count=2, nvml_library=str(box.library), device_prefix=str(box.device))
    gate = gpu.judge(gpu.look(query, services.manager("none")), query)
    assert [problem.code for problem in gate.problems] == [code]


def test_memory_that_the_driver_does_not_say_is_not_a_number(box):
    pid = box.holder().pid
    box.gpus(f"hold mps {pid} -1", "leak 5000")
    result = box.run()
    assert result["gate"]["evidence"]["holders"][0]["gpu_mib"] == {"1": None}
    assert codes(result) == ["gpu-holder-unlisted"], "who does not say how much it holds is taken to hold it all"


def test_memory_that_nobody_holds_is_a_failure(box):
    box.gpus("leak 65")
    assert codes(box.run()) == ["gpu-memory-unaccounted"]
    box.gpus("leak 64")
    assert codes(box.run()) == []


@pytest.mark.parametrize(
    ("lines", "code", "says"),
    [
        (("lost",), "gpu-unreadable", "GPU is lost"),
        (("fail-init 9",), "nvml-unreadable", "Driver Not Loaded"),
    ],
)
def test_what_cannot_be_read_is_unknown_and_nothing_is_touched(box, lines, code, says):
    pid = box.holder().pid
    box.gpus(*lines)
    result = box.run(state="free", consent=[f"kill:pid:{pid}"])
    assert verdict(result) == "unknown"
    assert code in codes(result)
    assert says in json.dumps(result)
    assert result["changed"] is False
    assert box.children[0].poll() is None


def test_no_nvml_is_unknown(box):
    box.library = box.folder / "nowhere.so"
    result = box.run()
    assert (verdict(result), codes(result)) == ("unknown", ["nvml-unreadable"])


def test_too_few_gpus_are_a_failure(box):
    assert codes(box.run(gpu_count=3)) == ["gpu-count"]


def test_an_old_driver_does_not_pass_its_reserve_off_as_free_nor_as_held(box, library):
    box.library = library / "old.so"
    result = box.run()
    assert (verdict(result), set(codes(result))) == ("unknown", {"gpu-memory-unclear"})


def test_an_nvml_that_hangs_is_unknown_within_its_limit(box, monkeypatch):
    box.gpus("hang 60")
    monkeypatch.setenv("NVML_DOUBLE", str(box.state))
    monkeypatch.setattr(gpu, "LOOK_SECONDS", 1.0)
    query = gpu.Query(gpu_count=2, nvml_library=str(box.library), device_prefix=str(box.device))
    seen = gpu.look(query, services.manager("none"))
    gate = gpu.judge(seen, query)
    assert gate.verdict.word == "unknown"
    assert "did not answer within 1 s" in gate.worst.what


def test_protected_programs_are_named_and_never_touched(box):
    guard = box.folder / "nv-hostengine"
    guard.symlink_to(sys.executable)
    child = subprocess.Popen([str(guard), box.host.holder, str(box.device), "0", "1", "kind"], stdout=subprocess.PIPE)
    box.children.append(child)
    assert child.stdout.readline() == b"ready\n"
    assert (verdict(box.run()), codes(box.run())) == ("pass", [])
    box.gpus(f"hold compute {child.pid} 500")
    result = box.run(state="free", consent=[f"kill:pid:{child.pid}"])
    assert (verdict(result), codes(result)) == ("warn", ["gpu-holder-protected"])
    assert child.poll() is None


def test_units_that_respawn_listed_and_forgotten(box):
    listed = box.host.add("gpu-a", box.command())
    forgotten = box.host.add("gpu-b", box.command(how="stubborn"))
    supervisor.wait_for(lambda: len(procs.open_files((str(box.device),)).held) == 2)
    box.gpus(f"hold compute {listed.pid} 900", f"hold compute {forgotten.pid} 900")
    first = box.run(state="free", units=["gpu-a"])
    assert (verdict(first), first["changed"]) == ("fail", False)
    assert {p["where"]: (p["code"], p["consent"]) for p in first["gate"]["problems"]} == {
        "gpu-a": ("gpu-holder-listed", None),
        "gpu-b": ("gpu-holder-unlisted", "disable:unit:gpu-b"),
    }
    assert box.host.running("gpu-a").pid == listed.pid
    options = {"units": ["gpu-a"], "consent": ["disable:unit:gpu-b"]}
    planned = box.run(state="free", check=True, **options)
    done = box.run(state="free", **options)
    assert planned["actions"] == done["actions"]
    assert [action.split(":")[0] for action in done["actions"]] == ["disable unit gpu-a", "disable unit gpu-b"]
    assert verdict(done) == "pass"
    assert {name: unit.state for name, unit in box.host.manager.units().items() if name.startswith("gpu-")} == {
        "gpu-a": "disabled",
        "gpu-b": "disabled",
    }
    assert set(json.loads((box.host.state_dir / "disabled.json").read_text())["units"]) >= {"gpu-a", "gpu-b"}
    assert box.run(state="free", **options)["changed"] is False


def test_an_orphan_of_a_unit_is_known_by_what_its_manager_gave_it(box):
    script = box.folder / "orphan.sh"
    script.write_text(f"#!/bin/sh\nsetsid {box.command()} &\nexec sleep 1000\n")
    script.chmod(0o755)
    unit = box.host.add("gpu-o", str(script), "stopasgroup=false")
    held = supervisor.wait_for(lambda: procs.open_files((str(box.device),)).held)
    orphan = procs.read(next(iter(held)))
    os.kill(unit.pid, signal.SIGKILL)
    supervisor.wait_for(lambda: procs.read(orphan.pid).ppid != unit.pid)
    result = box.run()
    assert {p["consent"] for p in result["gate"]["problems"]} == {"disable:unit:gpu-o"}
    done = box.run(state="free", units=["gpu-o"])
    assert verdict(done) == "pass"
    assert not procs.is_same(orphan)


def test_ours_is_evidence_while_it_runs_and_a_leftover_when_it_does_not(box, port):
    options = {**box.host.options, "name": "relight-t", "command": shlex.split(box.command(port=port)), "start_seconds": 0}
    started = run_module("unit", **options)["unit"]
    supervisor.wait_for(lambda: procs.listeners([port]))
    box.gpus(f"hold compute {started['pid']} 90000")
    result = box.run(state="free", ports=[port])
    assert (verdict(result), result["changed"], result["gate"]["evidence"]["ours"]) == ("pass", False, 1)
    assert procs.read(started["pid"])

    other = box.run(ports=[port], our_units=[])
    assert [p["consent"] for p in other["gate"]["problems"]] == ["disable:unit:relight-t"]

    script = box.folder / "left.sh"
    script.write_text(f"#!/bin/sh\nsetsid {box.command()} &\nexec sleep 1000\n")
    script.chmod(0o755)
    again = run_module("unit", **{**options, "command": [str(script)]})["unit"]
    held = supervisor.wait_for(lambda: procs.open_files((str(box.device),)).held)
    left = procs.read(next(iter(held)))
    assert verdict(box.run()) == "pass"
    os.kill(again["pid"], signal.SIGKILL)
    supervisor.wait_for(lambda: not box.host.running("relight-t"))
    planned = box.run(state="free", check=True)
    done = box.run(state="free")
    assert done["actions"] == planned["actions"] == ["end what a former start of relight-t left behind"]
    assert verdict(done) == "pass"
    assert not procs.is_same(left)
    run_module("unit", **{**options, "state": "absent"})


def test_a_unit_of_ours_with_another_configuration_than_its_file_is_stopped(box):
    options = {**box.host.options, "name": "relight-t", "command": shlex.split(box.command()), "start_seconds": 0}
    unit = run_module("unit", **options)["unit"]
    supervisor.wait_for(lambda: procs.open_files((str(box.device),)).held)
    assert verdict(box.run()) == "pass"
    file = box.host.conf_dir / "relight-t.conf"
    file.write_text(file.read_text().replace(f"Configuration {unit['hash']}", "Configuration 0123456789abcdef"))
    assert codes(box.run()) == ["gpu-holder-left"]
    assert verdict(box.run(state="free")) == "pass"
    assert box.host.manager.units()["relight-t"].state == "stopped"
    run_module("unit", **{**options, "state": "absent"})


def test_a_host_without_gpus_is_judged_by_port_and_memory(box, port):
    listener = box.holder(device=False, port=port)
    heavy = box.host.add("mem-a", box.command(device=False, mib=96))
    light = box.host.add("mem-b", box.command(device=False, mib=1))
    supervisor.wait_for(lambda: procs.read(heavy.pid).rss_bytes > 96 << 20)
    result = box.run(gpu_count=0, ports=[port])
    assert {p["consent"] for p in result["gate"]["problems"]} == {f"kill:pid:{listener.pid}", "disable:unit:mem-a"}
    assert f"listens on port {port}" in json.dumps(result)
    assert {p["consent"] for p in box.run(gpu_count=0, ports=[port], host_memory=False)["gate"]["problems"]} == {f"kill:pid:{listener.pid}"}
    done = box.run(state="free", gpu_count=0, ports=[port], consent=[f"kill:pid:{listener.pid}", "disable:unit:mem-a"])
    assert verdict(done) == "pass"
    assert listener.wait(5) == -signal.SIGTERM
    assert box.host.running("mem-b").pid == light.pid
    assert procs.listeners([port]) == []


def test_units_that_an_earlier_step_would_have_disabled_are_planned_once(box):
    unit = box.host.add("gpu-p", box.command())
    supervisor.wait_for(lambda: procs.open_files((str(box.device),)).held)
    planned = box.run(state="free", check=True, units=["gpu-p"], planned=["gpu-p"])
    assert (planned["actions"], planned["changed"], codes(planned)) == ([], False, ["depends-on-planned-act"])
    assert box.run(state="free", units=["gpu-p"], planned=["gpu-p"])["changed"] is True
    assert procs.read(unit.pid) is None


def test_a_service_manager_that_does_not_answer_is_unknown(box):
    box.holder()
    result = box.run(supervisor_socket=str(box.folder / "none.sock"))
    assert (verdict(result), "manager-unreachable" in codes(result)) == ("unknown", True)


def test_a_bare_string_is_no_consent(box):
    with pytest.raises(ModuleFailed, match="must be a list of names"):
        box.run(state="free", consent="kill:pid:1")


def seen_process(state="S", name="python", pid=4000):
    return procs.Process(pid, 1, 1, pid, pid, "bob", name, "python serve.py", state, 1 << 30, "/")


@pytest.mark.parametrize(
    ("holder", "code", "consent"),
    [
        (gpu.Holder(4000, seen_process("D"), gpu_mib=((0, 9000),)), "gpu-holder-stuck", None),
        (gpu.Holder(4000, seen_process("Z"), gpu_mib=((0, 9000),)), "gpu-holder-zombie", None),
        (gpu.Holder(4000, None, gpu_mib=((0, 9000),)), "gpu-holder-invisible", None),
        (gpu.Holder(4000, seen_process(), gpu_mib=((0, 9000),), surely=False), "gpu-holder-invisible", None),
        (gpu.Holder(None, None, ports=(30000,)), "port-holder-invisible", None),
        (gpu.Holder(4000, seen_process(), "x.service", gpu_mib=((0, 9000),)), "gpu-holder-unlisted", "disable:unit:x.service"),
        (gpu.Holder(4000, seen_process("D"), "x.service", gpu_mib=((0, 9000),)), "gpu-holder-unlisted", "disable:unit:x.service"),
        (gpu.Holder(4000, seen_process(), "v.service", gpu_mib=((0, 9000),)), "gpu-holder-listed", None),
        (gpu.Holder(4000, seen_process(), gpu_mib=((0, None),)), "gpu-holder-unlisted", "kill:pid:4000"),
        (gpu.Holder(4000, seen_process(name="nv-hostengine"), gpu_mib=((0, 9000),)), "gpu-holder-protected", None),
        (gpu.Holder(4000, seen_process(), "nvidia-dcgm.service", gpu_mib=((0, 9000),)), "gpu-holder-protected", None),
        (gpu.Holder(4000, seen_process(), "relight-sglang.service", "left", ((0, 9000),)), "gpu-holder-left", None),
    ],
)
def test_each_kind_of_holder_has_its_verdict(holder, code, consent):
    seen = gpu.Seen((nvml.Gpu(0, "GPU-0", TOTAL, holder.mib, RESERVED),), (holder,))
    gate = gpu.judge(seen, gpu.Query(gpu_count=1), listed={"v.service"}, consent={"kill:pid:1"})
    assert [(problem.code, problem.consent) for problem in gate.problems] == [(code, consent)]


def test_files_that_cannot_be_read_are_no_free_gpu():
    assert gpu.judge(gpu.Seen(unreadable=3), gpu.Query(gpu_count=0)).worst.code == "holders-unreadable"
