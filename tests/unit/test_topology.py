# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""topology_check on seeded faults: judgements as a table, NVML through the C double, and real ranks that reduce and hang."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import subprocess
import threading
import time
from dataclasses import replace

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import collective, gpu_stack, procs, topology
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict
from ansible_collections.relight.recovery.plugins.module_utils.gpu_stack import Device, Node, Stack
from ansible_collections.relight.recovery.plugins.module_utils.topology import Host, Query, Seen

from tests.harness import ROOT, run_module

DRIVER = "570.124.06"
SERVING = ROOT / ".venv" / "sglang" / "bin" / "python"
GLOO = {"GLOO_SOCKET_IFNAME": "lo"}


def gpu(index, **more):
    other = f"0000:{11 - index}:00.0"
    given = {"uuid": f"GPU-{index}", "pci": f"0000:{10 + index}:00.0", "minor": index, "pcie_generation": 5, "pcie_width": 16}
    return Device(index, **{**given, "numa_node": 0, "persistence": True, "ecc": True, "links": {other: "PIX"}, **more})


def node(name, **more):
    return Node(f"/dev/{name}", **{"major": 195, "major_wanted": 195, **more})


NODES = (node("nvidiactl"), node("nvidia-uvm", major=511, major_wanted=511), node("nvidia0"), node("nvidia1"))
STACK = Stack(DRIVER, DRIVER, "12.8", {"libnvidia-ml": DRIVER, "libcuda": DRIVER}, (gpu(0), gpu(1)), NODES)
VERSIONS = {"torch": "2.11.0", "torch_cuda": "13.0", "nccl": "2.27.5"}
GOOD = Seen(STACK, Host(cmdline="ro quiet", iommu=False, redirecting=()), VERSIONS)
PLAN = collective.Plan("python", {}, 2, bytes=1 << 28)
DONE = tuple(collective.Rank(number, "done", 7, 0.1, "", 0, True, (0.01, 0.01)) for number in range(2))


def stack(**more):
    return replace(GOOD, stack=replace(STACK, **more))


def one_gpu(**more):
    return stack(devices=(gpu(0, **more), gpu(1)))


def one_node(at, **more):
    return stack(nodes=tuple(replace(n, **more) if i == at else n for i, n in enumerate(NODES)))


def host(**more):
    return replace(GOOD, host=replace(GOOD.host, **more))


def reduced(*ranks, **more):
    return replace(GOOD, reduced=collective.Reduced(PLAN, ranks, 5.0, "2.11.0", "2.27.5", **more))


def waiting(number, **more):
    return collective.Rank(number, **{"phase": "reducing", "entered": 3, "silent_seconds": 0.2, "state": "S", **more})


BASELINE = topology.evidence(replace(GOOD, reduced=collective.Reduced(PLAN, DONE)), Query(2))
FAULTS = {
    "nothing": (GOOD, []),
    "nvidia-uvm is missing": (one_node(1, exists=False), ["device-missing"]),
    "a GPU's device file is missing": (one_node(3, exists=False), ["device-missing"]),
    "nvidiactl is missing": (one_node(0, exists=False), ["device-missing"]),
    "a bind mount made a plain file": (one_node(2, is_device=False), ["device-fake"]),
    "nvidia-uvm got another major at boot": (one_node(1, major_wanted=508), ["device-major"]),
    "the container denies a device (v2)": (one_node(1, open_errno=errno.EPERM), ["device-denied"]),
    "the allow-list lacks nvidia-uvm (v1)": (host(cgroup="v1", allowed=("c 195:* rwm",)), ["device-denied"]),
    "the allow-list is read-only (v1)": (host(cgroup="v1", allowed=("c 195:* r", "c 511:* rw")), ["device-denied"] * 3),
    "the allow-list has it all (v1)": (host(cgroup="v1", allowed=("c 195:* rwm", "c 511:0 rwm")), []),
    "all devices are allowed (v1)": (host(cgroup="v1", allowed=("a *:* rwm",)), []),
    "no root to open it": (one_node(2, open_errno=errno.EACCES), ["device-permission"]),
    "the device is dead": (one_node(2, open_errno=errno.EIO), ["device-dead"]),
    "the device is in exclusive use": (one_node(2, open_errno=errno.EBUSY), []),
    "NVML says two versions": (stack(error="nvmlInit_v2: mismatch (18)", mismatch=True, devices=(), driver=None), ["driver-mismatch"]),
    "an older libcuda in the container": (stack(libraries={"libcuda": "565.57.01"}), ["driver-mismatch"]),
    "a library whose name tells no version": (stack(libraries={"libcuda": None}), []),
    "no driver at all": (Seen(Stack(error="NVML cannot be loaded")), ["nvml-unreadable"]),
    "a GPU is off the bus": (stack(devices=(gpu(0),)), ["gpu-count", "gpu-missing"]),
    "a GPU answers nothing": (stack(devices=(gpu(0), Device(1, error="GPU is lost (15)"))), ["gpu-unreadable", "gpu-missing"]),
    "a card was replaced": (stack(devices=(gpu(0), gpu(1, uuid="GPU-new"))), ["gpu-replaced"]),
    "a card sits in another slot": (one_gpu(pci="0000:99:00.0"), ["gpu-moved"]),
    "lanes were lost": (one_gpu(pcie_width=8), ["pcie-degraded"]),
    "an older PCIe generation": (one_gpu(pcie_generation=4), ["pcie-degraded"]),
    "the path between cards is longer": (one_gpu(links={"0000:11:00.0": "SYS"}), ["topology-changed"]),
    "another NUMA node": (one_gpu(numa_node=1), ["gpu-setting-differs"]),
    "persistence mode is off": (one_gpu(persistence=False), ["gpu-setting-differs"]),
    "ECC is off": (one_gpu(ecc=False), ["gpu-setting-differs"]),
    "another driver": (stack(driver="580.1", module="580.1", libraries={}), ["version-differs"]),
    "another CUDA": (stack(cuda="13.0"), ["version-differs"]),
    "another NCCL": (replace(GOOD, versions={**VERSIONS, "nccl": "2.21.5"}), ["version-differs"]),
    "less memory than before": (host(memory_limit_bytes=1 << 36), ["memory-limit-differs"]),
    "the interpreter does not answer": (replace(GOOD, versions=None, versions_error="no module named torch"), ["torch-unreadable"]),
    "torch without NCCL": (replace(GOOD, versions={"torch": "2.11.0"}), ["nccl-missing"]),
    "the IOMMU translates": (host(iommu=True), ["iommu-translates"]),
    "the IOMMU passes through": (host(iommu=True, cmdline="intel_iommu=on iommu=pt"), []),
    "bridges redirect": (host(redirecting=("0000:00:01.0",)), ["acs-redirects"]),
    "ACS cannot be read": (host(redirecting=None), []),
    "the all-reduce is right": (reduced(*DONE), []),
    "half the bandwidth": (reduced(*(replace(rank, seconds=(0.021,)) for rank in DONE)), ["collective-slow"]),
    "a wrong sum": (reduced(DONE[0], replace(DONE[1], right=False)), ["collective-wrong"]),
    "a rank ends with an error": (reduced(DONE[0], waiting(1, exit=1, said="NCCL error")), ["collective-failed"]),
    "a rank is killed": (reduced(waiting(0), waiting(1, exit=-9)), ["collective-failed"]),
    "no interpreter": (reduced(error="there is none"), ["collective-failed"]),
    "all wait": (reduced(waiting(0), waiting(1), timed_out=True), ["collective-hang"]),
    "one never comes": (reduced(waiting(0), waiting(1, phase="importing", entered=0), timed_out=True), ["collective-hang"]),
}
FAILS = ("device-missing", "device-fake", "device-major", "device-denied", "device-dead", "driver-mismatch", "gpu-count", "gpu-missing")
UNKNOWN = ("device-permission", "nvml-unreadable", "gpu-unreadable", "torch-unreadable")


def verdict_of(code):
    if code in UNKNOWN:
        return Verdict.UNKNOWN
    fails = code in FAILS or code in ("nccl-missing", "collective-failed", "collective-hang", "collective-wrong", "link-lost")
    return Verdict.FAIL if fails else Verdict.WARN


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gets_its_code_and_verdict(fault):
    seen, codes = FAULTS[fault]
    gate = topology.judge(seen, Query(2, baseline=BASELINE))
    assert [problem.code for problem in gate.problems] == codes
    assert [problem.verdict for problem in gate.problems] == [verdict_of(code) for code in codes]


def test_a_lost_nvlink_fails_against_the_baseline_and_silences_the_pcie_warnings():
    linked = replace(GOOD, stack=replace(STACK, devices=tuple(gpu(i, nvlinks=18) for i in range(2))), host=replace(GOOD.host, iommu=True))
    baseline = topology.evidence(linked, Query(2))
    assert topology.judge(linked, Query(2, baseline=baseline)).problems == []
    lost = replace(linked, stack=replace(STACK, devices=(gpu(0, nvlinks=17), gpu(1, nvlinks=18))))
    gate = topology.judge(lost, Query(2, baseline=baseline))
    assert [(p.code, p.where, p.verdict) for p in gate.problems] == [("link-lost", "GPU 0", Verdict.FAIL)]


def test_the_launch_is_compared_with_the_settings_of_the_server_that_ran():
    known = {**BASELINE, "nccl_environment": {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}}
    same = Query(2, baseline=known, env={"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "OTHER": "x"})
    assert topology.judge(GOOD, same).problems == []
    other = Query(2, baseline=known, env={"NCCL_PROTO": "Simple", "NCCL_DEBUG": "INFO"})
    (problem,) = topology.judge(GOOD, other).problems
    assert (problem.code, problem.verdict) == ("nccl-settings-differ", Verdict.WARN)
    assert problem.what == "NCCL_ALGO unset, before Ring; NCCL_DEBUG INFO, before unset; NCCL_PROTO Simple, before LL"


def test_without_a_baseline_nothing_is_compared():
    other = stack(driver="1.2", module="1.2", libraries={}, devices=(gpu(0, pci="0000:77:00.0", ecc=False), gpu(1)))
    assert topology.judge(other, Query(2)).problems == []


HANGS = [
    ((waiting(0), waiting(1, state="T", silent_seconds=9.0)), "rank 1 (stopped, reducing, 3 rounds entered)"),
    ((waiting(0), waiting(1, state="D", silent_seconds=9.0)), "rank 1 (in D state"),
    ((waiting(0, entered=4), waiting(1)), "rank 1 (behind, reducing, 3 rounds entered)"),
    ((waiting(0, phase="joining", entered=0), waiting(1, phase="importing", entered=0)), "rank 1 (behind, importing"),
    ((waiting(0, silent_seconds=30.0), waiting(1)), "rank 0 (silent for 30 s"),
    ((waiting(0), waiting(1)), "all 2 ranks live and wait for each other while reducing"),
]


@pytest.mark.parametrize(("ranks", "says"), HANGS)
def test_a_hang_names_who_keeps_the_others_waiting(ranks, says):
    (problem,) = collective.judge(collective.Reduced(PLAN, ranks, timed_out=True))
    assert says in problem.what


def test_bus_bandwidth_is_counted_as_nccl_tests_do():
    ranks = tuple(replace(rank, seconds=(0.02, 0.01, 0.01)) for rank in DONE)
    eight = collective.Reduced(replace(PLAN, size=8, bytes=10**9), ranks)
    assert eight.bus_gb_s == pytest.approx(2 * 7 / 8 / 0.01)
    assert collective.Reduced(PLAN, (DONE[0], waiting(1))).bus_gb_s is None
    slow = replace(DONE[1], seconds=(0.04, 0.02, 0.02))
    assert collective.Reduced(PLAN, (DONE[0], slow)).bus_gb_s == pytest.approx((1 << 28) / 0.02 / 1e9), "the slowest rank counts"


# --- NVML, /dev and /proc ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("nvml") / f"libnvidia-ml.so.{DRIVER}"
    source = ROOT / "tests" / "nvml_double" / "nvml.c"
    subprocess.run(["gcc", "-Wall", "-Werror", "-fPIC", "-shared", "-o", path, source], check=True)
    return path


@pytest.fixture
def box(tmp_path, library, monkeypatch):
    """A root with /dev, /proc and /sys of a GPU host, and the double's state beside it."""
    root = tmp_path / "root"
    for folder in (
        "dev",
        "proc/driver/nvidia",
        "proc/self",
        "proc/1",
        "sys/class/iommu",
        "sys/bus/pci/devices/0000:10:00.0",
        "run/systemd",
    ):
        (root / folder).mkdir(parents=True)
    line = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build  (root@host)\n"
    (root / "proc/driver/nvidia/version").write_text(line)
    (root / "proc/devices").write_text("Character devices:\n  1 mem\n195 nvidia\n511 nvidia-uvm\n")
    (root / "sys/bus/pci/devices/0000:10:00.0/numa_node").write_text("1\n")
    state = tmp_path / "gpus"
    state.write_text(
        "gpu 143771 615\npcie 5 8\nnvlink 00000000:11:00.0\nnvlink 00000000:11:00.0\ngpu 143771 615\nminor 7\necc 0\nnear 0 1 10\n"
    )
    monkeypatch.setenv("NVML_DOUBLE", str(state))
    return root, state, str(library)


def read(box):
    return gpu_stack.read(box[2], str(box[0]))


def test_what_nvml_says_of_every_gpu(box):
    seen = read(box)
    assert (seen.driver, seen.module, seen.cuda, seen.libraries["libnvidia-ml"], seen.error) == (DRIVER, DRIVER, "12.8", DRIVER, None)
    first, second = seen.devices
    assert (first.pci, first.pcie_width, first.nvlinks, first.links, first.numa_node) == ("0000:10:00.0", 8, 2, {"0000:11:00.0": "NV2"}, 1)
    assert (second.minor, second.ecc, second.links, second.numa_node) == (7, False, {"0000:10:00.0": "PIX"}, None)


def test_links_to_a_switch_count_and_are_no_links_to_a_gpu(box):
    box[1].write_text("gpu 1 0\nnvlink 00000000:11:00.0\nnvlink 00000000:55:00.0\nnvlink 00000000:55:00.0\ngpu 1 0\n")
    first = read(box).devices[0]
    assert (first.nvlinks, first.links) == (3, {"0000:11:00.0": "NV1"})


def test_nothing_reduces_where_a_process_computes(box, tmp_path):
    plan = collective.Plan(str(tmp_path / "none"), {}, 2, limit_seconds=5)
    query = Query(2, nvml_library=box[2], collective=plan)
    box[1].write_text(f"gpu 1 0\nhold compute {os.getpid()} 1\ngpu 1 0\n")
    seen = topology.look(query)
    assert (seen.reduced, seen.not_reduced) == (None, "1 GPUs are in use")
    box[1].write_text("gpu 1 0\n")
    assert topology.look(query).not_reduced == "the GPUs are not all there"
    box[1].write_text("gpu 1 0\ngpu 1 0\n")
    assert topology.look(query).reduced is not None


def test_device_files_are_those_of_the_minor_numbers(box):
    root = box[0]
    (root / "dev/nvidiactl").symlink_to("/dev/null")
    (root / "dev/nvidia7").write_text("")
    found = {os.path.basename(found.path): found for found in read(box).nodes}
    assert list(found) == ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia7"]
    assert (found["nvidiactl"].major, found["nvidiactl"].major_wanted, found["nvidiactl"].open_errno) == (1, 195, None)
    assert (found["nvidia-uvm"].exists, found["nvidia-uvm"].major_wanted) == (False, 511)
    assert found["nvidia7"].is_device is False


def test_an_upgrade_without_a_reboot(box):
    box[1].write_text("fail-init 18\n")
    seen = read(box)
    assert seen.mismatch
    gate = topology.judge(Seen(seen), Query(2))
    assert gate.problems[0].code == "driver-mismatch"
    assert f"the kernel module is {DRIVER}" in gate.problems[0].what


def test_a_lost_gpu_leaves_the_others_readable(box):
    box[1].write_text("gpu 143771 615\nlost\ngpu 143771 615\n")
    seen = read(box)
    assert [device.error is None for device in seen.devices] == [False, True]


def test_no_library_is_no_pass(box):
    gate = topology.judge(Seen(gpu_stack.read("/no/such/library.so", str(box[0]))), Query(2))
    assert gate.problems[0].code == "nvml-unreadable"
    assert gate.verdict is Verdict.UNKNOWN


def test_a_container_and_its_allow_list(box):
    root = box[0]
    assert topology._host(str(root)).container is None
    (root / "proc/1/environ").write_bytes(b"PATH=/bin\0container=lxc\0")
    (root / "proc/self/cgroup").write_text("5:devices:/lxc/7\n0::/\n")
    (root / "sys/fs/cgroup/devices/lxc/7").mkdir(parents=True)
    (root / "sys/fs/cgroup/devices/lxc/7/devices.list").write_text("c 195:* rwm\n")
    seen = topology._host(str(root))
    assert (seen.container, seen.cgroup, seen.allowed) == ("lxc", "v1", ("c 195:* rwm",))
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("memory\n")
    seen = topology._host(str(root))
    assert (seen.cgroup, seen.allowed) == ("v2", None)


def config(control):
    """A bridge's configuration space: an extended capability of no interest, then ACS."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 0x148 << 20)
    struct.pack_into("<IHH", space, 0x148, topology.ACS, 0x7F, control)
    return bytes(space)


@pytest.mark.parametrize(("control", "redirects"), [(0x0, False), (0x1, False), (0x1D, True), (0x4, True), (0x8, True)])
def test_acs_as_the_bridge_has_it(box, control, redirects):
    bridge = box[0] / "sys/bus/pci/devices/0000:00:01.0"
    bridge.mkdir()
    (bridge / "class").write_text("0x060400\n")
    (bridge / "config").write_bytes(config(control))
    assert topology._redirecting(str(box[0])) == (("0000:00:01.0",) if redirects else ())
    (bridge / "config").write_bytes(config(control)[:64])
    assert topology._redirecting(str(box[0])) is None, "what cannot be read is not called fine"


def test_garbage_in_configuration_space_ends():
    assert topology.acs_redirects(b"\xff" * 4096) is False
    assert topology.acs_redirects(struct.pack("<I", 0x0001 | 0x100 << 20).rjust(0x104, b"\0") + bytes(100)) is False


# --- the module -------------------------------------------------------------------------------------------------------


def codes(result):
    return [problem["code"] for problem in result["gate"]["problems"]]


def test_no_gpus_is_a_pass_that_says_so():
    result = run_module("topology_check", gpu_count=0)
    assert (result["gate"]["verdict"], result["gate"]["evidence"]["gpus"]) == ("pass", "no GPUs")


def test_a_host_that_lost_its_device_files_fails(box):
    result = run_module("topology_check", gpu_count=2, nvml_library=box[2], with_env={"NVML_DOUBLE": str(box[1])})
    assert set(codes(result)) >= {"device-missing"}
    assert result["gate"]["verdict"] == "fail"
    assert [gpu["uuid"] for gpu in result["gate"]["evidence"]["gpus"]] == ["GPU-double-0", "GPU-double-1"]


def test_a_driver_that_hangs_is_unknown(box, monkeypatch):
    box[1].write_text("hang 30\n")
    monkeypatch.setattr(topology, "LOOK_SECONDS", 0.5)
    gate = topology.judge(topology.look(Query(2, nvml_library=box[2])), Query(2))
    assert (gate.verdict, gate.problems[0].code) == (Verdict.UNKNOWN, "nvml-unreadable")
    assert "did not answer within 0.5 s" in gate.problems[0].what


def test_an_interpreter_without_torch_is_unknown(box, tmp_path):
    shutil.copy("/bin/false", tmp_path / "python")
    options = {"gpu_count": 2, "nvml_library": box[2], "python": str(tmp_path / "python")}
    result = run_module("topology_check", with_env={"NVML_DOUBLE": str(box[1])}, **options)
    assert "torch-unreadable" in codes(result)


# --- real ranks -------------------------------------------------------------------------------------------------------

sglang = pytest.mark.sglang


@sglang
def test_two_real_ranks_reduce_and_are_measured(box):
    options = {"gpu_count": 2, "nvml_library": box[2], "python": str(SERVING), "env": GLOO, "collective": "run", "backend": "gloo"}
    options |= {"collective_bytes": 1 << 20, "collective_rounds": 2, "with_env": {"NVML_DOUBLE": str(box[1])}}
    result = run_module("topology_check", **options)
    evidence = result["gate"]["evidence"]
    assert (evidence["collective"], evidence["bus_gb_s"] > 0) == ("run", True)
    assert [code for code in codes(result) if code.startswith("collective")] == []
    assert "nccl-missing" in codes(result), "this torch is built for CPUs"
    checked = run_module("topology_check", check=True, **options)
    assert checked["gate"]["evidence"]["collective"] == "not asked for"


def rank_process(number, within=30.0):
    """The pid of our own rank, once it runs."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        for child in (process for process in procs.every().values() if process.ppid == os.getpid()):
            try:
                words = open(f"/proc/{child.pid}/cmdline", "rb").read()
            except OSError:
                continue
            if f'{{"rank": {number}, '.encode() in words:
                return child.pid
        time.sleep(0.01)  # a process can only be looked for
    raise AssertionError(f"rank {number} never ran")


@sglang
def test_a_stopped_rank_is_named_within_the_limit():
    plan = collective.Plan(str(SERVING), GLOO, 2, "gloo", 1 << 20, 10**6, 6.0)  # more rounds than it can come to before it is stopped
    ended = []
    thread = threading.Thread(target=lambda: ended.append(collective.run(plan)))
    start = time.monotonic()
    thread.start()
    pid = rank_process(1)
    os.kill(pid, signal.SIGSTOP)
    thread.join(30)
    assert time.monotonic() - start < 6 + 5
    (problem,) = collective.judge(ended[0])
    assert (problem.code, problem.where) == ("collective-hang", "GPU 1")
    assert "no end within 6 s: the others wait for rank 1 (stopped, " in problem.what
    assert not os.path.exists(f"/proc/{pid}"), "it was ended and buried"


def test_an_interpreter_that_is_not_there(tmp_path):
    done = collective.run(collective.Plan(str(tmp_path / "none"), {}, 2, "gloo", limit_seconds=5))
    assert [problem.code for problem in collective.judge(done)] == ["collective-failed"]


def test_a_rank_that_ends_is_quoted_without_its_secrets(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'cannot start: --api-key Zq7canary9Xw' >&2\nexit 3\n")
    python.chmod(0o755)
    (problem,) = collective.judge(collective.run(collective.Plan(str(python), {}, 2, "gloo", limit_seconds=20)))
    assert (problem.code, "ended with 3" in problem.what, "cannot start" in problem.what) == ("collective-failed", True, True)
    assert "Zq7canary9Xw" not in problem.what
