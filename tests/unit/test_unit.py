# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The module `unit` against a real supervisord: ours are kept as they should be, foreign ones only touched when listed."""

from __future__ import annotations

import json
import os
import sys

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import procs, supervisord

from tests import supervisor
from tests.harness import ModuleFailed, run_module

SLEEP = [sys.executable, "-u", "-c", "import signal; print('up', flush=True); signal.pause()"]
CANARY = "Zq7canary9Xw"


@pytest.fixture(scope="module")
def host():
    with supervisor.host() as found:
        yield found


def codes(result):
    return [problem["code"] for problem in result["gate"]["problems"]]


def unit(host, name, check=False, **options):
    return run_module("unit", check=check, diff=True, name=name, **{**host.options, **options})


def test_started_then_again_then_changed(host, tmp_path):
    watched = tmp_path / "launch.json"
    watched.write_text("1")
    log = host.root / "logs" / "a.log"
    options = {
        "command": SLEEP,
        "environment": {"A_LIST": "x, y=1", "API_KEY": CANARY},
        "stdout": str(log),
        "watch": [str(watched)],
        "start_seconds": 0,
    }
    planned = unit(host, "relight-a", check=True, **options)
    first = unit(host, "relight-a", **options)
    assert planned["actions"] == first["actions"] == [f"write {host.conf_dir}/relight-a.conf", "start relight-a"]
    assert planned["changed"] is first["changed"] is True
    assert first["gate"]["verdict"] == "pass"
    assert first["unit"]["state"] == "running"
    assert planned["unit"]["hash"] == first["unit"]["hash"]
    assert CANARY not in json.dumps(first)
    assert procs.environment(first["unit"]["pid"], ("A_LIST", "API_KEY", "RELIGHT_")) == {
        "A_LIST": "x, y=1",
        "API_KEY": "[redacted]",
        "RELIGHT_UNIT": "relight-a",
        "RELIGHT_UNIT_HASH": first["unit"]["hash"],
    }
    again = unit(host, "relight-a", **options)
    assert (again["changed"], again["actions"], again["unit"]) == (False, [], first["unit"])

    watched.write_text("2")
    supervisor.wait_for(lambda: log.read_text() == "up\n")
    changed = unit(host, "relight-a", **options)
    assert changed["actions"] == [f"write {host.conf_dir}/relight-a.conf", "stop relight-a: its configuration changed", "start relight-a"]
    assert changed["unit"]["pid"] != first["unit"]["pid"]
    assert supervisor.wait_for(lambda: log.read_text() == "up\nup\n"), "the log is appended to"

    stopped = unit(host, "relight-a", state="stopped")
    assert (stopped["actions"], stopped["unit"]["state"]) == (["stop relight-a"], "stopped")
    assert unit(host, "relight-a", state="stopped")["changed"] is False
    restarted = unit(host, "relight-a", **options)
    assert restarted["actions"] == ["start relight-a"]
    gone = unit(host, "relight-a", state="absent")
    assert gone["actions"] == ["remove relight-a"]
    assert not procs.read(restarted["unit"]["pid"])
    assert unit(host, "relight-a", state="absent")["changed"] is False


def test_what_does_not_stay_up_is_a_failure_that_quotes_its_log(host):
    command = [sys.executable, "-c", f"print('--api-key {CANARY}'); raise SystemExit('no such model')"]
    result = unit(host, "relight-b", command=command, stdout=str(host.root / "b.log"))
    assert codes(result) == ["unit-not-running"]
    assert "no such model" in result["gate"]["summary"]
    assert CANARY not in json.dumps(result)


def test_one_that_ends_well_at_once_is_fine(host):
    result = unit(host, "relight-c", command=["/bin/true"], start_seconds=0)
    assert result["gate"]["verdict"] == "pass"


@pytest.mark.parametrize("words", [["a b", "c;d", "e ;f", "g #h", "100%", "%(here)s", "it's", '"q"', "", "$HOME", "é"]])
def test_words_reach_the_command_as_they_are(host, words):
    code = "import json, sys, signal; json.dump(sys.argv[1:], open(sys.argv[1], 'w')); signal.pause()"
    out = str(host.root / "argv.json")
    unit(host, "relight-d", command=[sys.executable, "-c", code, out, *words], start_seconds=0)
    supervisor.wait_for(lambda: os.path.exists(out) and os.path.getsize(out) > 10)
    with open(out, encoding="utf-8") as handle:
        assert json.load(handle)[1:] == words
    unit(host, "relight-d", state="absent")


@pytest.mark.parametrize("value", ["a ;b", "a\nb", "'both\""])
def test_what_its_format_cannot_hold_is_refused_before_anything_is_written(host, value):
    result = unit(host, "relight-e", command=SLEEP, environment={"X": value})
    assert result["gate"]["verdict"] == "unknown"
    assert "supervisord's format cannot hold" in result["gate"]["summary"]
    assert not (host.conf_dir / "relight-e.conf").exists()


def test_a_foreign_unit_is_touched_only_when_listed_or_consented(host):
    pid = host.add("rogue-a", "sleep 1000").pid
    refused = unit(host, "rogue-a", state="disabled")
    assert codes(refused) == ["unit-not-listed"]
    assert refused["gate"]["problems"][0]["consent"] == "disable:unit:rogue-a"
    assert 'add "disable:unit:rogue-a" to relight_consent' in refused["gate"]["problems"][0]["remedy"]
    assert refused["changed"] is False
    assert codes(unit(host, "rogue-a", state="stopped")) == ["unit-foreign"]
    assert codes(unit(host, "rogue-a", state="absent", units=["rogue-a"])) == ["unit-foreign"]
    assert codes(unit(host, "rogue-a", command=SLEEP)) == ["unit-foreign"]
    assert host.running("rogue-a").pid == pid
    with pytest.raises(ModuleFailed, match="relight_consent: must be a list"):
        unit(host, "rogue-a", state="disabled", consent="disable:unit:rogue-a")

    planned = unit(host, "rogue-a", check=True, state="disabled", units=["rogue-a"])
    assert host.running("rogue-a").pid == pid
    done = unit(host, "rogue-a", state="disabled", units=["rogue-a"])
    assert planned["actions"] == done["actions"] != []
    assert done["gate"]["verdict"] == "pass"
    assert done["unit"]["state"] == "disabled"
    assert procs.read(pid) is None
    assert (host.conf_dir / "rogue-a.conf.relight-disabled").exists()
    assert unit(host, "rogue-a", state="disabled")["changed"] is False
    back = unit(host, "rogue-a", state="enabled")
    assert back["changed"] is True
    assert (host.conf_dir / "rogue-a.conf").exists()
    assert unit(host, "rogue-a", state="enabled")["changed"] is False


def test_a_consent_counts_as_a_listing(host):
    host.add("rogue-b", "sleep 1000")
    done = unit(host, "rogue-b", state="disabled", consent=["disable:unit:rogue-b"])
    assert done["unit"]["state"] == "disabled"


def test_programs_that_share_a_file_are_switched_off_one_by_one_and_losslessly(host):
    shared = host.conf_dir / "shared.conf"
    host.add("rogue-c", "sleep 1000", '; kept as it is\nenvironment=A="1"', shared)
    kept = host.add("rogue-d", "sleep 1000", "", shared).pid
    before = shared.read_text()
    done = unit(host, "rogue-c", state="disabled", units=["rogue-c"])
    assert done["gate"]["verdict"] == "pass"
    assert shared.read_text() == before.replace("autostart=true\nautorestart=true", "autostart=false\nautorestart=false", 1)
    assert host.running("rogue-d").pid == kept
    assert unit(host, "rogue-c", state="disabled")["changed"] is False
    unit(host, "rogue-c", state="enabled")
    assert shared.read_text() == before


def test_one_in_the_main_file_is_edited_there(host):
    host.add("rogue-e", "sleep 1000", "", host.main)
    unit(host, "rogue-e", state="disabled", units=["rogue-e"])
    assert "[program:rogue-e]\ncommand=sleep 1000\nautostart=false\nautorestart=false\n" in host.main.read_text()
    assert host.main.exists()


def test_a_manager_that_does_not_answer_is_unknown(host):
    result = unit(host, "x", state="disabled", supervisor_socket=str(host.root / "nowhere.sock"))
    assert result["gate"]["verdict"] == "unknown"
    assert "nowhere.sock" in result["gate"]["summary"]


def test_a_unit_that_is_not_there_needs_no_disabling(host):
    result = unit(host, "never-was", state="disabled")
    assert (result["changed"], result["gate"]["verdict"], result["unit"]["state"]) == (False, "pass", "absent")


def test_options_are_set_in_one_section_only():
    text = "[program:a]\ncommand=x\nAutoStart = true ; why\n\n[program:b]\nautostart=true"
    off = {"autostart": "false", "autorestart": "false"}
    assert supervisord.set_options(text, "a", off) == (
        "[program:a]\nautorestart=false\ncommand=x\nAutoStart = false\n\n[program:b]\nautostart=true"
    )
    assert supervisord.set_options(text, "b", off).endswith("[program:b]\nautorestart=false\nautostart=false")
    with pytest.raises(KeyError):
        supervisord.set_options(text, "c", off)
