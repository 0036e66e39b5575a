# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What stops a host and what does not: judge, consents and run_close in real plays, on recorded results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def problem(verdict="fail", code="some-code", consent=None):
    return {"code": code, "where": "here", "what": "it is wrong", "remedy": "mend it", "verdict": verdict, "consent": consent}


def result(*problems, actions=(), name="some_gate"):
    verdict = problems[-1]["verdict"] if problems else "pass"
    gate = {"name": name, "verdict": verdict, "summary": "so", "evidence": {}, "problems": list(problems), "seconds": 0.1}
    return {"changed": False, "gate": gate, "actions": list(actions), "stage": "verify"}


@pytest.fixture
def play(tmp_path):
    """Judge results in turn on one host, close it, and return exit code, output and report."""

    def run(*judged, check=False, consents=False, granted=()):
        tasks = [
            {"name": f"Judge {n}", "relight.recovery.judge": dict(zip(("result", "stops", "after_acts"), j))} for n, j in enumerate(judged)
        ]
        if consents:
            tasks.append({"name": "Ask", "relight.recovery.consents": {"beyond": ["weights_check"]}})
        closing = {"name": "Close", "relight.recovery.run_close": {"ended": True}}
        opening = {"name": "Open", "relight.recovery.run_open": {"group": "all", "kind": "roles", "report_dir": str(tmp_path / "report")}}
        vars_ = {"relight_report_dir": str(tmp_path / "report"), "relight_consent": list(granted)}
        plays = [
            {"name": "P", "hosts": "localhost", "gather_facts": False, "tasks": [opening]},
            {"name": "Q", "hosts": "h1", "gather_facts": False, "tasks": [{"name": "B", "block": tasks, "always": [closing]}]},
        ]
        (tmp_path / "play.yml").write_text(yaml.safe_dump(plays))
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"h1": {"ansible_connection": "local"}}, "vars": vars_}}))
        done = subprocess.run(
            [Path(sys.executable).with_name("ansible-playbook"), "-i", "hosts.yml", "play.yml", *(["--check"] if check else [])],
            cwd=tmp_path,
            env={
                **os.environ,
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=110,
        )
        folder = tmp_path / "report" / ("check" if check else ".")
        return done.returncode, " ".join((done.stdout + done.stderr).split()), json.loads((folder / "report.json").read_text())

    return run


def test_warn_goes_on_and_fail_and_unknown_stop_with_where_what_and_remedy(play):
    code, output, report = play((result(problem("warn")),), (result(problem("fail")),), (result(name="never_reached"),))
    assert code != 0
    assert "some_gate says fail: here: it is wrong. Mend it. [some-code]" in output
    assert [gate["name"] for gate in report["hosts"]["h1"]["gates"]] == ["some_gate"]
    assert report["verdict"] == "not-clear"
    assert play((result(problem("unknown")),))[0] != 0


def test_an_assessment_records_and_goes_on(play):
    code, _, report = play((result(problem("unknown")), False), (result(name="reached"),))
    assert code == 0
    assert [(gate["name"], gate["after"]["verdict"]) for gate in report["hosts"]["h1"]["gates"]] == [
        ("some_gate", "unknown"),
        ("reached", "pass"),
    ]
    assert report["verdict"] == "not-clear"


def test_a_failed_module_is_told_as_such(play):
    code, output, _ = play(({"failed": True, "msg": "the lock is held by pid 7"},))
    assert code != 0
    assert "the lock is held by pid 7" in output


def test_the_line_to_paste_names_what_is_needed(play):
    code, output, report = play((result(problem(consent="disable:unit:embedder")),))
    assert code != 0
    assert '-e \'{"relight_consent": ["disable:unit:embedder"]}\'' in output
    assert report["consents_needed"] == ["disable:unit:embedder"]


def test_consents_asks_once_for_all_before_the_first_act(play):
    looks = [(result(problem(consent=name)), False) for name in ("disable:unit:b", "remove:/data/a")]
    code, output, report = play(*looks, consents=True)
    assert code != 0
    assert '-e \'{"relight_consent": ["disable:unit:b", "remove:/data/a"]}\'' in output
    assert report["consents_needed"] == ["disable:unit:b", "remove:/data/a"]
    code, _, report = play(*looks, consents=True, granted=["disable:unit:b"])
    assert code != 0
    assert report["consents_needed"] == ["remove:/data/a"]
    assert play(*looks, consents=True, granted=["disable:unit:b", "remove:/data/a"])[0] == 0


def test_what_no_act_can_mend_stops_before_the_first_change(play):
    code, output, report = play((result(problem(), name="weights_check"), False), (result(problem(), name="other"), False), consents=True)
    assert code != 0
    assert "stopped before the first change: what recovery is given is not right. here: it is wrong. Mend it. [some-code]" in output
    assert report["verdict"] == "not-clear"
    assert play((result(problem("warn"), name="weights_check"), False), consents=True)[0] == 0
    assert play((result(problem(), name="other"), False), consents=True)[0] == 0


@pytest.mark.parametrize(
    ("judged", "granted", "goes_on"),
    [
        ([(result(problem()),)], (), False),
        ([(result(problem(), actions=["Stop it"]),)], (), True),
        ([(result(problem(consent="kill:pid:7"), actions=["Stop it"]),)], (), False),
        ([(result(problem(consent="kill:pid:7"), actions=["Stop it"]),)], ("kill:pid:7",), True),
        ([(result(problem("unknown", "depends-on-planned-act")),)], (), True),
        ([(result(problem()), True, True)], (), False),
        ([(result(actions=["Launch"]),), (result(problem()), True, True)], (), True),
        ([(result(actions=["Launch"]),), (result(problem()), True, False)], (), False),
    ],
)
def test_a_check_run_goes_past_what_the_real_run_would_have_mended_and_nothing_else(play, judged, granted, goes_on):
    code, _, report = play(*judged, check=True, granted=granted)
    assert (code == 0) is goes_on
    assert report["verdict"] == "not-clear"
