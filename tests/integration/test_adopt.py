# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""adopt.yml on a host with a real supervisord and a server's process: it refuses, records, shows what differs, and gathers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import save_file

from tests import supervisor
from tests.harness import ROOT, run_module
from tests.plays import COMPLETE
from tests.unit.test_weights import HIDDEN, LAYERS, tensors

CANARY = "Zq7canary9Xw"
PRISTINE = "{{ 'templated' }}"


@pytest.fixture(scope="module")
def manager():
    with supervisor.host() as found:
        yield found


class Box:
    """A host with weights, records and, once started, a server; and the controller's folder beside it."""

    def __init__(self, folder, manager):
        self.folder, self.manager = folder, manager
        self.model = folder / "model"
        self.model.mkdir()
        save_file(tensors(), self.model / "model.safetensors")
        (self.model / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "num_hidden_layers": LAYERS}))
        records = [{"id": str(n), "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]} for n in range(3)]
        (folder / "records.json").write_text(json.dumps(records))
        (folder / "store").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.file = folder / "inventory" / "host_vars" / "h1" / "relight_baseline.yml"
        self.name = f"sglang-by-hand-{self.port}"

    def serve(self, *more, name=None):
        code = ["-m", "tests.adoption_server", "sglang.launch_server", "--port", str(self.port), "--api-key", CANARY, *more]
        environment = (
            f'NCCL_P2P_LEVEL="SYS",SGLANG_NOTE="{PRISTINE}",NCCL_AUTH_TOKEN="{CANARY}",OTHER="{CANARY}",PYTHONPATH="{ROOT}",'
            f'CUDA_CACHE_PATH="/tmp/cuda-cache"'
        )
        log = f"stdout_logfile={self.folder}/server.log\nredirect_stderr=true"
        command = " ".join([sys.executable, *code])
        unit = self.manager.add(name or self.name, command, f"environment={environment}\ndirectory={ROOT}\n{log}")
        supervisor.wait_for(self.answers)
        return unit

    def answers(self):
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self):
        self.manager.manager.stop(self.name, 5)

    def adopt(self, *arguments, playbook="adopt", **variables):
        given = {
            **COMPLETE,
            "relight_state_dir": str(self.folder / "state"),
            "relight_report_dir": str(self.folder / "report"),
            "relight_model_dir": str(self.model),
            "relight_dataset_path": str(self.folder / "records.json"),
            "relight_dataset_records": 3,
            "relight_store_dir": str(self.folder / "store"),
            "relight_data_dir": str(self.folder),
            "relight_server_port": self.port,
            "relight_service_manager": "supervisord",
            "relight_supervisor_socket": str(self.manager.socket),
            "relight_supervisor_conf_dir": str(self.manager.conf_dir),
            "relight_disable_units": [self.name],
            "relight_log_dir": str(self.folder),
            **variables,
        }
        inventory = self.folder / "inventory" / "hosts.yml"
        inventory.parent.mkdir(exist_ok=True)
        host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        inventory.write_text(yaml.safe_dump({"all": {"vars": given, "children": {"relight": {"hosts": {"h1": host}}}}}))
        done = subprocess.run(
            [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, ROOT / "playbooks" / f"{playbook}.yml", *arguments],
            cwd=self.folder,
            env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        self.report = json.loads((self.folder / "report" / ("check" if "--check" in arguments else ".") / "report.json").read_text())
        return done.returncode, done.stdout + done.stderr

    def baseline(self):
        class Loader(yaml.SafeLoader):
            pass

        Loader.add_constructor("!unsafe", lambda loader, node: loader.construct_scalar(node))
        return yaml.load(self.file.read_text(), Loader)["relight_baseline"]


@pytest.fixture
def box(tmp_path, manager):
    found = Box(tmp_path, manager)
    yield found
    if found.name in manager.manager.units():
        found.stop()


def codes(report):
    return {problem["code"] for gate in report["hosts"]["h1"]["gates"] for problem in gate["after"]["problems"]}


def changed(output):
    return int(re.search(r"^h1 .*changed=(\d+)", output, re.MULTILINE).group(1))


@pytest.mark.slow
def test_a_healthy_host_is_recorded_once_and_what_changed_is_shown(box):
    box.serve()
    code, output = box.adopt("--check")
    assert (code, box.file.exists(), (box.folder / "state").exists()) == (0, False, False), output

    code, output = box.adopt()
    assert code == 0, output
    found = box.baseline()
    assert (found["host"], found["after_the_fact"]) == ("h1", False)
    assert found["server"]["unit"] == box.name
    assert found["server"]["command"][1:5] == ["-m", "tests.adoption_server", "sglang.launch_server", "--port"]
    assert found["server"]["environment"] == {
        "CUDA_CACHE_PATH": "/tmp/cuda-cache",
        "NCCL_AUTH_TOKEN": "[redacted]",
        "NCCL_P2P_LEVEL": "SYS",
        "SGLANG_NOTE": PRISTINE,
    }
    assert found["services"] == [{"name": box.name, "state": "running", "kept": True}]
    assert found["weights"]["digests"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in box.model.iterdir()}
    assert found["weights"]["fingerprint"].startswith("headers:")
    assert (found["dataset"]["records"], found["dataset"]["tokens"]) == (3, 9)
    assert [mount["path"] for mount in found["mounts"]][:2] == ["/", str(box.folder)]
    assert codes(box.report) >= {"needs-what-a-reboot-wipes"}
    assert box.report["verdict"] == "clear-with-warnings"
    everything = [
        path for path in box.folder.rglob("*") if path.is_file() and path.name != "server.log" and "inventory/hosts" not in str(path)
    ]
    assert [str(path) for path in everything if CANARY in path.read_text(errors="replace")] == []
    assert CANARY not in output

    text = box.file.read_text()
    code, output = box.adopt()
    assert code == 0, output
    assert changed(output) == 0
    assert (box.file.read_text(), "host_vars/h1/relight_baseline.yml" in output) == (text, False), "nothing differs, nothing is shown"

    with (box.model / "config.json").open("a") as handle:
        handle.write(" ")
    code, output = box.adopt()
    assert code == 0, output
    assert "+      config.json: " in output
    assert changed(output) == 1

    (box.folder / "state" / "baseline.json").write_text("{}")
    (box.model / "config.json").write_text("{}")
    box.adopt(playbook="assess")
    assert {"baseline-differs", "weights-digest"} <= codes(box.report), "every run compares with what was adopted"


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("server", "baseline says fail: server: no running server was found"),
        ("health", "baseline says fail: server: it does not answer /health with 200"),
        ("weights", "weights_check says fail"),
    ],
)
def test_a_host_that_is_not_well_is_refused_and_the_gate_is_named(box, broken, sentence):
    if broken != "server":
        box.serve(*(["--status", "503"] if broken == "health" else []))
    if broken == "weights":
        (box.model / "config.json").unlink()
    code, output = box.adopt()
    assert code != 0
    assert sentence in " ".join(output.split())
    assert not box.file.exists()
    assert not (box.folder / "state" / "baseline.json").exists()
    assert box.report["verdict"] == "not-clear"


@pytest.mark.slow
def test_after_the_fact_gathers_what_is_left_and_never_replaces_the_known_good(box):
    box.serve()
    box.stop()
    (box.model / "config.json").unlink()
    options = {"relight_adopt_after_the_fact": True, "adopt_logs": [str(box.folder / "server.log")]}
    code, output = box.adopt(**options)
    assert code == 0, output
    found = box.baseline()
    assert found["after_the_fact"] is True
    assert found["server"]["found_in"] == "unit file and log"
    assert found["server"]["environment"]["NCCL_P2P_LEVEL"] == "SYS"
    assert found["server"]["arguments"] == {"model_path": "/models/m", "tp_size": 8, "context_length": 65536}
    assert list(found["weights"]["digests"]) == ["model.safetensors"]
    assert CANARY not in box.file.read_text() + output

    kept = box.file.read_text().replace("after_the_fact: true", "after_the_fact: false")
    box.file.write_text(kept)
    code, output = box.adopt(**options)
    assert (code, box.file.read_text()) == (0, kept), output
    assert "baseline-kept" in codes(box.report)


def test_a_host_that_was_never_adopted_is_warned_of_only_where_asked_for(tmp_path):
    options = {"host": "h1", "state_dir": str(tmp_path)}
    assert run_module("baseline_check", **options)["gate"]["verdict"] == "pass"
    gate = run_module("baseline_check", required=True, **options)["gate"]
    assert (gate["verdict"], [p["code"] for p in gate["problems"]]) == ("warn", ["no-baseline"])
