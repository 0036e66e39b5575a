# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What a baseline is made of, when it may be recorded, and what of a host's own words never becomes a template or a secret."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml
from ansible_collections.relight.recovery.plugins.module_utils import adoption, baseline, services
from ansible_collections.relight.recovery.plugins.module_utils.adoption import Server
from ansible_collections.relight.recovery.plugins.module_utils.baseline import Gathered
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict
from ansible_collections.relight.recovery.plugins.plugin_utils import baseline_file
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import ROOT, run_module

CANARY = "Zq7canary9Xw"
FAIL, WARN, UNKNOWN, PASS = Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN, Verdict.PASS
SERVER = Server("process", "sglang", ("python", "-m", "sglang.launch_server"), {"NCCL_PROTO": "LL"}, healthy=True)
GATES = {
    "weights_check": {"fingerprint": "headers:1", "shards": 1, "tensors": 6, "bytes": 99, "layers": 4},
    "dataset_check": {"records": 3, "tokens": 9, "bytes": 70, "digest": "d"},
    "hs_patch_check": {"sglang_version": "0.5.23", "layers_captured": [1, 14, 26], "layers_passed": None},
    "topology_check": {"driver": "570", "gpus": [{"uuid": "GPU-0"}], "bus_gb_s": 40.0, "memory_limit_bytes": None, "collective": "run"},
}
WELL = Gathered(
    "h1", services=[], server=SERVER, model_dir="/m", dataset="/d", dump_dir="/dev/shm/relight", digests={"a": "1"}, gates=GATES
)


def changed(**more):
    return Gathered(**{**{name: getattr(WELL, name) for name in WELL.__dataclass_fields__}, **more})


def server(**more):
    return changed(server=Server(**{**{name: getattr(SERVER, name) for name in SERVER.__dataclass_fields__}, **more}))


OWN = {"memory_limit_bytes": None, "nccl_environment": {"NCCL_PROTO": "LL"}}  # what the server itself was started with


def test_what_gates_saw_is_recorded_and_what_only_describes_a_look_is_not():
    made = baseline.make(WELL, None, 0)
    assert made["time"] == "1970-01-01T00:00:00Z"
    assert made["weights"] == {"path": "/m", "fingerprint": "headers:1", "shards": 1, "tensors": 6, "bytes": 99, "digests": {"a": "1"}}
    assert made["dataset"] == {"path": "/d", "records": 3, "tokens": 9, "bytes": 70, "digest": "d"}
    assert made["hidden_states"] == {"layers_captured": [1, 14, 26]}
    assert made["topology"] == {"driver": "570", "gpus": [{"uuid": "GPU-0"}], "bus_gb_s": 40.0, **OWN}
    assert baseline.make(changed(gates={}), None)["topology"] == {}, "a host without GPUs has no topology"


def test_an_equal_baseline_keeps_its_time_and_a_busy_host_its_measured_bandwidth():
    first = baseline.make(WELL, None, 0)
    assert baseline.make(WELL, first, 10**9) == first
    busy = changed(gates={**GATES, "topology_check": {**GATES["topology_check"], "bus_gb_s": None}})
    assert baseline.make(busy, first, 10**9) == first
    other = baseline.make(changed(digests={"a": "2"}), first, 10**9)
    assert (other["time"], baseline.equal(other, first)) == ("2001-09-09T01:46:40Z", False)


KNOWN = baseline.make(WELL, None, 0)
BROKEN = {**KNOWN, "after_the_fact": True}
FAULTS = {
    "well": (WELL, None, None, PASS, []),
    "no server": (changed(server=None), None, None, FAIL, ["server-not-found"]),
    "a server that answers nothing": (server(healthy=False), None, None, FAIL, ["server-unhealthy"]),
    "no permission": (server(readable=False), None, None, UNKNOWN, ["server-unreadable"]),
    "a script in /tmp": (server(command=("python", "/tmp/run.py")), None, None, WARN, ["needs-what-a-reboot-wipes"]),
    "a cache in /dev/shm": (server(environment={"NCCL_TOPO_FILE": "/dev/shm/x"}), None, None, WARN, ["needs-what-a-reboot-wipes"]),
    "the dump directory": (server(environment={"RELIGHT_DUMP_DIR": "/dev/shm/relight"}), None, None, PASS, []),
    "no service manager": (changed(services=None), None, None, UNKNOWN, ["manager-unreachable"]),
    "a look that failed": (changed(errors=("hung",)), None, None, UNKNOWN, ["baseline-incomplete"]),
    "weights half read": (changed(undigested=3), None, None, UNKNOWN, ["weights-undigested"]),
    "no weights": (changed(digests={}), None, None, UNKNOWN, ["weights-undigested"]),
    "the copy agrees": (WELL, {**KNOWN, "time": "other"}, KNOWN, PASS, []),
    "the copy differs": (WELL, {**KNOWN, "mounts": [1]}, KNOWN, WARN, ["baseline-differs"]),
    "another controller adopted": (WELL, KNOWN, None, WARN, ["baseline-differs"]),
    "after the fact, all is warning": (changed(server=None, services=None, after_the_fact=True), None, None, WARN, None),
    "after the fact, once more": (changed(after_the_fact=True), BROKEN, BROKEN, PASS, []),
    "after the fact, beside the known-good": (changed(after_the_fact=True), KNOWN, KNOWN, WARN, ["baseline-kept"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_may_be_recorded(fault):
    found, copy, known, verdict, codes = FAULTS[fault]
    gate = baseline.judge(found, copy, None, known)
    assert gate.verdict is verdict
    if codes is not None:
        assert [problem.code for problem in gate.problems] == codes


CHECKS = {
    "agree": (KNOWN, KNOWN, None, False, PASS, []),
    "no baseline, none asked for": ({}, None, None, False, PASS, []),
    "no baseline": ({}, None, None, True, WARN, ["no-baseline"]),
    "the controller lost it": ({}, KNOWN, None, True, WARN, ["baseline-differs"]),
    "the host lost its copy": (KNOWN, None, None, False, WARN, ["baseline-differs"]),
    "the copy is torn": (KNOWN, None, "no JSON", False, WARN, ["baseline-differs"]),
    "they differ": (KNOWN, {**KNOWN, "server": None}, None, False, WARN, ["baseline-differs"]),
    "another host's": ({**KNOWN, "host": "h2"}, {**KNOWN, "host": "h2"}, None, False, FAIL, ["baseline-other-host"]),
    "a newer Relight's": ({**KNOWN, "schema": 99}, {**KNOWN, "schema": 99}, None, False, UNKNOWN, ["baseline-newer"]),
    "no schema": ({"host": "h1"}, {"host": "h1"}, None, False, UNKNOWN, ["baseline-newer"]),
}


@pytest.mark.parametrize("case", CHECKS)
def test_an_ordinary_run_compares_the_copies(case):
    known, copy, error, required, verdict, codes = CHECKS[case]
    gate = baseline.check(known, copy, error, "h1", required)
    assert (gate.verdict, [problem.code for problem in gate.problems]) == (verdict, codes)


SERVING = {"sglang_version": "0.5.23", "layers_captured": [1, 14, 26]}
SERVES = {
    "the same": (SERVING, []),
    "nothing looked": ({}, []),
    "the plugin is not there yet": ({"sglang_version": "0.5.23", "layers_captured": None}, []),
    "another SGLang": ({**SERVING, "sglang_version": "0.6.0"}, [("version-differs", WARN)]),
    "a version that shifts the layers": ({**SERVING, "layers_captured": [2, 15, 27]}, [("baseline-layers", FAIL)]),
}


@pytest.mark.parametrize("case", SERVES)
def test_what_will_serve_is_compared(case):
    serving, wanted = SERVES[case]
    gate = baseline.check(KNOWN, KNOWN, None, "h1", False, serving)
    assert [(problem.code, problem.verdict) for problem in gate.problems] == wanted


def test_the_hosts_copy_is_read_back_and_a_torn_one_is_told(tmp_path):
    state = str(tmp_path / "state")
    assert baseline.read_copy(state) == (None, None)
    assert (baseline.write_copy(state, KNOWN), baseline.write_copy(state, KNOWN)) == (True, False)
    assert baseline.read_copy(state) == (KNOWN, None)
    assert run_module("baseline_check", host="h1", baseline=KNOWN, state_dir=state)["gate"]["verdict"] == "pass"
    for broken in ("{", "[]", '{"schema": "one"}'):
        (tmp_path / "state" / "baseline.json").write_text(broken)
        found, error = baseline.read_copy(state)
        assert (found, bool(error)) == (None, True)


# --- the controller's file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["{{ lookup('pipe', 'id') }}", "{% if 1 %}", "{# x #}", "plain", "a: b", "- c", "yes", "☃"])
def test_what_a_host_says_comes_back_and_is_never_evaluated(tmp_path, said):
    value = {**KNOWN, "server": {"command": [said], "environment": {"SGLANG_X": said}}}
    baseline_file.write(str(tmp_path / "host_vars" / "h1"), baseline_file.text(value))
    assert baseline_file.read(str(tmp_path / "host_vars" / "h1")) == value
    text = (tmp_path / "host_vars" / "h1" / "relight_baseline.yml").read_text()
    assert text.count("!unsafe") == (2 if said.startswith("{") else 0)


def test_a_file_that_is_no_baseline_is_refused_with_its_name(tmp_path):
    assert baseline_file.read(str(tmp_path)) is None
    (tmp_path / "relight_baseline.yml").write_text("relight_other: {}\n")
    with pytest.raises(Exception, match=r"relight_baseline.yml holds no relight_baseline"):
        baseline_file.read(str(tmp_path))


# --- looking ----------------------------------------------------------------------------------------------------------

LOGS = sorted((ROOT / "tests" / "cases" / "sglang").glob("*.log"))


@pytest.mark.parametrize("path", [path for path in LOGS if "server_args=" in path.read_text(errors="replace")], ids=lambda path: path.name)
def test_settings_are_read_from_real_logs_of_both_styles(path):
    found = adoption._of_log(str(path))
    assert (found.arguments["model_path"].count("/") > 0, found.arguments["tp_size"] in (1, 2)) == (True, True)
    assert "api_key" not in found.arguments


def test_a_log_without_a_start_or_that_is_not_there_tells_nothing(tmp_path):
    (tmp_path / "log").write_text("nothing\nserver_args=\nserver_args=__import__('os').system('id')\n")
    assert (adoption._of_log(str(tmp_path / "log")), adoption._of_log(str(tmp_path / "none"))) == (None, None)


@given(st.text(max_size=200))
def test_garbage_after_server_args_is_no_settings(text):
    assert isinstance(adoption.server_arguments(f"server_args={text}"), dict)


def test_after_the_fact_the_inventory_is_the_last_to_be_asked(tmp_path):
    where = adoption.Where(
        port=1,
        logs=(str(tmp_path / "none"),),
        inventory_command=("python", "-m", "sglang.launch_server", "--api-key", CANARY),
        inventory_environment={"NCCL_PROTO": "LL", "HOME": "/root", "SGLANG_API_KEY": CANARY},
        after_the_fact=True,
    )
    found = adoption.look_at_server(where, services.manager("none"))
    assert (found.source, found.command[:3]) == ("inventory", ("python", "-m", "sglang.launch_server"))
    assert dict(found.environment) == {"NCCL_PROTO": "LL", "SGLANG_API_KEY": "[redacted]"}
    assert CANARY not in str(found)
    assert adoption.look_at_server(adoption.Where(port=1, after_the_fact=True), services.manager("none")) is None


UNITS = {
    "supervisord": (
        "[program:other]\ncommand=/bin/other\n[program:sglang]\ncommand=python -m sglang.launch_server --tp-size 8 --api-key "
        f'{CANARY}\nenvironment=NCCL_PROTO="LL",HF_TOKEN="{CANARY}",NCCL_ALGO=Ring\n[program:last]\nenvironment=NCCL_PROTO="Simple"\n'
    ),
    "systemd": (
        '[Service]\nEnvironment=NCCL_PROTO=LL\nEnvironment="NCCL_ALGO=Ring" \'HF_TOKEN=' + CANARY + "'\n"
        f"ExecStart=python -m sglang.launch_server \\\n  --tp-size 8 --api-key {CANARY}\n"
    ),
}


@pytest.mark.parametrize("kind", UNITS)
def test_settings_are_read_from_unit_files(tmp_path, kind):
    (tmp_path / "unit").write_text(UNITS[kind])
    found = adoption._of_unit(services.Unit("sglang", "failed", file=str(tmp_path / "unit")))
    assert found.command[:5] == ("python", "-m", "sglang.launch_server", "--tp-size", "8")
    assert dict(found.environment) == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}
    assert CANARY not in str(found)
    assert adoption._of_unit(services.Unit("other", "failed", file=str(tmp_path / "none"))) is None


def test_a_mount_is_named_by_what_survives_a_reboot(tmp_path, monkeypatch):
    (mount, gone) = (adoption.look_at_mounts(["/"]), adoption.look_at_mounts([str(tmp_path / "gone")]))
    assert (mount[0]["path"], mount[0]["mount_point"], gone) == ("/", "/", [])
    device = adoption._number("/dev/null")
    for folder, name in (("by-uuid", "u-1"), ("by-id", "wwn-0x5"), ("by-id", "nvme-Disk_S1")):
        (tmp_path / "disk" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "disk" / folder / name).symlink_to("/dev/null")
    monkeypatch.setattr(adoption, "_number", lambda path: device)
    (found,) = adoption.look_at_mounts(["/"], str(tmp_path))
    assert (found["uuid"], found["by_id"], found["source"]) == ("u-1", "nvme-Disk_S1", None)


def test_what_marks_a_unit_of_ours_is_no_setting():
    environment = {"RELIGHT_UNIT": "relight-sglang", "RELIGHT_UNIT_HASH": "1", "RELIGHT_DUMP_DIR": "/d", "NCCL_PROTO": "LL", "HOME": "/"}
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"\n"
    found = adoption._of_process(child.pid, "relight-sglang", adoption.Where(port=1))
    child.communicate(b"\n")
    assert dict(found.environment) == {"NCCL_PROTO": "LL", "RELIGHT_DUMP_DIR": "/d"}
    assert (found.healthy, found.readable, found.command[1]) == (False, True, "-c")


def test_the_server_is_the_one_on_the_port_and_no_other():
    assert adoption._server_pid(adoption.Where(port=1), {}) is None
    assert adoption._is_for(30000, ["python", "-m", "sglang.launch_server", "--port", "30000"])
    assert adoption._is_for(30000, ["python", "--port=30000"])
    assert not adoption._is_for(30000, ["python", "--port", "30001", "30000"])


def test_the_file_is_yaml_that_a_person_can_read():
    text = baseline_file.text(KNOWN)
    assert text.startswith("---\n# The known-good state of h1")
    assert yaml.safe_load(text)["relight_baseline"] == json.loads(json.dumps(KNOWN))
    assert max(map(len, text.splitlines())) < 150
