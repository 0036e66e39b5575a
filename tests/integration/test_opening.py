# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A run that cannot begin, or that reaches nobody, is not clear and exits non-zero, whatever the run before it said."""

from __future__ import annotations

import functools
import html
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.plays import ROOT, recover


@pytest.fixture
def play(tmp_path):
    """Run recover.yml; the report of an earlier run says clear."""
    (tmp_path / "report").mkdir()
    (tmp_path / "report/report.json").write_text(json.dumps({"verdict": "clear", "run": "earlier"}))
    (tmp_path / "report/report.html").write_text("clear")
    return functools.partial(recover, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (
            ["-e", "relight_target=relihgt"],
            {},
            "no host is in the group 'relihgt'; set relight_target to one of the inventory's groups or hosts: relight",
        ),
        (["--tags", "fre"], {}, "unknown tag fre; the stages are: assess, storage"),
        (["--skip-tags", "verfy"], {}, "unknown tag verfy"),
        ([], {"relight_gpu_count": None, "relight_store_dir": None}, "host h1: set relight_gpu_count, relight_store_dir in the inventory"),
        ([], {"relight_consent": "disable:unit:x"}, "relight_consent: must be a list of names, not 'disable:unit:x'"),
    ],
)
def test_a_run_that_cannot_begin(play, tmp_path, arguments, variables, sentence):
    code, output, report = play(*arguments, **variables)
    assert code != 0
    assert sentence in output
    assert report["verdict"] == "not-clear"
    assert sentence.replace("host h1: ", "") in report["refused"]
    page = html.unescape((tmp_path / "report/report.html").read_text())
    assert report["run"] in page
    assert report["refused"] in page


def test_an_unreachable_host_is_not_clear(play, tmp_path):
    unreachable = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 9, "ansible_ssh_timeout": 3}
    code, _, report = play(host=unreachable)
    assert code != 0
    assert report["verdict"] == "not-clear"
    assert report["hosts"]["h1"]["reason"] == "the host was not reached"
    assert "h1: not-clear" in (tmp_path / "report/report.html").read_text()


@pytest.mark.parametrize("target", ["h1", "relight", "h1,relight"])
def test_a_target_may_be_a_host(play, target):
    _, _, report = play(
        "-e", f"relight_target={target}", host={"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 9}
    )
    assert report["refused"] == ""
    assert list(report["hosts"]) == ["h1"]


@pytest.mark.parametrize("target", ["h2", "h1,h2"])
def test_a_target_that_is_not_there_is_refused(play, target):
    _, output, report = play("-e", f"relight_target={target}")
    assert f"no host is in the group '{target}'" in output
    assert report["hosts"] == {}


def test_a_limit_that_leaves_out_the_opening_play_is_refused_with_the_way_round(play):
    code, output, _ = play("--limit", "h1")
    assert code != 0
    assert "use -e relight_target=HOST" in output


def test_every_playbook_refuses_to_run_without_the_opening_play():
    """Else what it finds would go into the report of an earlier run."""
    plays = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "playbooks").glob("*.yml") if path.name != "open.yml"}
    wanted = plays["recover.yml"][1]["pre_tasks"]
    for name, (opening, *acting) in plays.items():
        assert opening["ansible.builtin.import_playbook"] == "open.yml", name
        assert [play["pre_tasks"] for play in acting] == [wanted] * len(acting), name


def test_a_run_without_an_inventory_says_how_to_name_one(tmp_path):
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), ROOT / "recover.yml"],
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(tmp_path / "tmp"), "PWD": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode != 0
    assert "name yours with -i, as in -i inventory/mine" in done.stdout + done.stderr


def test_each_run_keeps_its_own_report(play, tmp_path):
    _, _, first = play("--tags", "fre")
    _, _, second = play("--tags", "verfy")
    kept = tmp_path / "report/runs"
    assert {path.name for path in kept.iterdir()} == {first["run"], second["run"]}
    assert json.loads((kept / first["run"] / "report.json").read_text())["refused"].startswith("unknown tag fre")
    assert (kept / first["run"] / "report.html").exists()
