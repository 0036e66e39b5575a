# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A run that cannot begin, or that reaches nobody, is not clear and exits non-zero, whatever the run before it said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPLETE = {
    "relight_gpu_count": 0,
    "relight_become": False,
    "relight_model_dir": "/nowhere/model",
    "relight_hidden_size": 8,
    "relight_sglang_python": "/nowhere/python",
    "relight_dump_layers": [0, 1, 2],
    "relight_dataset_path": "/nowhere/records.json",
    "relight_store_dir": "/nowhere/store",
}


@pytest.fixture
def play(tmp_path):
    """Run recover.yml from another directory on one host with these variables; the report of an earlier run says clear."""
    reports = tmp_path / "report"
    reports.mkdir()
    (reports / "report.json").write_text(json.dumps({"verdict": "clear", "run": "earlier"}))

    def run(*arguments, host=None, **variables):
        everywhere = {"relight_report_dir": str(reports), "relight_state_dir": str(tmp_path / "state"), **COMPLETE, **variables}
        given = {k: v for k, v in everywhere.items() if v is not None}
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        hosts = {"h1": local if host is None else host}
        inventory = tmp_path / "hosts.yml"
        inventory.write_text(yaml.safe_dump({"all": {"vars": given, "children": {"relight": {"hosts": hosts}}}}))
        done = subprocess.run(
            [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, ROOT / "recover.yml", *arguments],
            cwd=tmp_path,
            env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(tmp_path / "tmp")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=110,
        )
        return done.returncode, done.stdout + done.stderr, json.loads((reports / "report.json").read_text())

    return run


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (
            ["-e", "relight_target=relihgt"],
            {},
            "no host is in the group 'relihgt'; set relight_target to one of the inventory's groups: relight",
        ),
        (["--tags", "fre"], {}, "unknown tag fre; the stages are: assess, storage"),
        (["--skip-tags", "verfy"], {}, "unknown tag verfy"),
        ([], {"relight_gpu_count": None, "relight_store_dir": None}, "host h1: set relight_gpu_count, relight_store_dir in the inventory"),
        ([], {"relight_consent": "disable:unit:x"}, "relight_consent: must be a list of names, not 'disable:unit:x'"),
    ],
)
def test_a_run_that_cannot_begin(play, arguments, variables, sentence):
    code, output, report = play(*arguments, **variables)
    assert code != 0
    assert sentence in output
    assert report["verdict"] == "not-clear"
    assert sentence.replace("host h1: ", "") in report["refused"]


def test_an_unreachable_host_is_not_clear(play):
    unreachable = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 9, "ansible_ssh_timeout": 3}
    code, _, report = play(host=unreachable)
    assert code != 0
    assert report["verdict"] == "not-clear"
    assert report["hosts"]["h1"]["reason"] == "the host was not reached"


def test_a_limit_that_leaves_out_the_opening_play_is_refused_with_the_way_round(play):
    code, output, _ = play("--limit", "h1")
    assert code != 0
    assert "use -e relight_target=HOST" in " ".join(output.split())


def test_the_former_report_is_kept(play, tmp_path):
    play("--tags", "fre")
    assert json.loads((tmp_path / "report/history/earlier.json").read_text())["verdict"] == "clear"
