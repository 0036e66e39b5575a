# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The modules shard_inventory and dataset_check as processes, each on its seeded fault."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import surveying
from ansible_collections.relight.recovery.plugins.module_utils.inventory import Request

from tests.harness import MODULES, ROOT, run_module
from tests.samples import Filled, fill, put, sample

LENGTHS = [12, 7, 600, 5]


def inventory(filled: Filled, tmp_path: Path, **options: Any) -> dict[str, Any]:
    given = {"store": filled.store.path, "dataset": str(filled.dataset), "state_dir": str(tmp_path / "state"), **options}
    return run_module("shard_inventory", **given)


def damaged(tmp_path: Path) -> Filled:
    """Four samples: one intact, one torn, one with flipped bytes, one whose manifest line was lost."""
    filled = fill(tmp_path, LENGTHS, but=(3,))
    os.truncate(filled.file(1), 1000)
    with open(filled.file(2), "r+b") as handle:
        handle.seek(20_000)
        handle.write(b"\xff" * 8)
    manifest = filled.file(0).parent / "MANIFEST.jsonl"
    kept = manifest.read_bytes()
    put(filled.store, sample(3, 5))
    manifest.write_bytes(kept)
    return filled


def digest_of(folder: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        state.update(str(path.relative_to(folder)).encode() + (path.read_bytes() if path.is_file() else b""))
    return state.hexdigest()


def codes(result: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in result["gate"]["problems"]]


def test_looking_tells_and_changes_nothing(tmp_path):
    filled = damaged(tmp_path)
    before = digest_of(Path(filled.store.path))
    missing = tmp_path / "missing.json"
    result = inventory(filled, tmp_path, depth="content", host_python=sys.executable, missing_file=str(missing))
    assert result["changed"] is False
    assert (result["gate"]["name"], result["gate"]["verdict"]) == ("shard_inventory", "fail")
    assert codes(result) == ["sample-torn", "sample-corrupt"]
    assert {problem["where"] for problem in result["gate"]["problems"]} == {"rows_0-2000/data_1.ckpt", "rows_0-2000/data_2.ckpt"}
    assert {problem["remedy"] for problem in result["gate"]["problems"]} == {"recover.yml quarantines and redoes it"}
    evidence = result["gate"]["evidence"]
    wanted = {"total": 4, "intact": 2, "torn": 1, "corrupt": 1, "foreign": 0, "missing": 0, "tokens_intact": 17, "not_in_manifest": 1}
    assert {name: evidence[name] for name in wanted} == wanted
    assert json.loads(missing.read_text()) == []
    assert digest_of(Path(filled.store.path)) == before


def test_quarantine_moves_what_is_not_intact_once(tmp_path):
    filled = damaged(tmp_path)
    missing = tmp_path / "missing.json"
    options = {"depth": "content", "host_python": sys.executable, "missing_file": str(missing), "state": "quarantined"}
    before = digest_of(Path(filled.store.path))
    planned = inventory(filled, tmp_path, check=True, **options)
    assert digest_of(Path(filled.store.path)) == before
    assert not missing.exists()
    done = inventory(filled, tmp_path, **options)
    assert (done["changed"], done["gate"]["verdict"]) == (True, "pass")
    assert (planned["changed"], planned["actions"]) == (True, done["actions"])
    assert [action.split(":")[0] for action in done["actions"]] == [
        "move rows_0-2000/data_1.ckpt to quarantine",
        "move rows_0-2000/data_2.ckpt to quarantine",
        "enter rows_0-2000/data_3.ckpt in its manifest, which lacks it",
    ]
    evidence = done["gate"]["evidence"]
    assert (evidence["quarantined"], evidence["tokens_quarantined"], evidence["torn"], evidence["missing"]) == (2, 607, 1, 2)
    assert json.loads(missing.read_text()) == [1, 2]
    assert len(filled.store.quarantined()) == 2
    assert sorted(filled.store.entries()) == [0, 3]
    again = inventory(filled, tmp_path, **options)
    assert (again["changed"], again["actions"], again["gate"]["verdict"]) == (False, [], "pass")


@pytest.mark.parametrize("seed", range(4))
def test_killed_while_it_moves_and_run_again(tmp_path, seed):
    """A kill after `seed` files moved; the next run ends where one run would have."""
    filled = fill(tmp_path, [4] * 12)
    for index in range(1, 11):
        os.truncate(filled.file(index), 700)
    options = {"store": filled.store.path, "dataset": str(filled.dataset), "state_dir": str(tmp_path / "state"), "state": "quarantined"}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}"}
    module = subprocess.Popen(
        [sys.executable, str(MODULES / "shard_inventory.py")], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
    )
    assert module.stdin is not None
    module.stdin.write(json.dumps({"ANSIBLE_MODULE_ARGS": options}).encode())
    module.stdin.close()
    deadline = time.monotonic() + 60
    while len(filled.store.quarantined()) <= seed and module.poll() is None and time.monotonic() < deadline:
        pass
    module.send_signal(signal.SIGKILL)
    module.wait()
    again = run_module("shard_inventory", **options)
    assert again["gate"]["verdict"] == "pass"
    assert (again["gate"]["evidence"]["intact"], again["gate"]["evidence"]["missing"]) == (2, 10)
    assert len(filled.store.quarantined()) == 10
    folders = (Path(filled.store.path) / "quarantine").iterdir()
    assert {line["from"] for folder in folders for line in map(json.loads, (folder / "reason.jsonl").read_text().splitlines())} == {
        f"rows_0-2000/data_{index}.ckpt" for index in range(1, 11)
    }


def test_while_a_client_writes_nothing_is_moved(tmp_path):
    filled = damaged(tmp_path)
    with filled.store.exclusive("relight-extract"):
        before = digest_of(Path(filled.store.path))
        for check in (True, False):
            result = inventory(filled, tmp_path, state="quarantined", check=check)
            assert (result["changed"], result["actions"]) == (False, [])
            assert "store-busy" in codes(result)
        assert digest_of(Path(filled.store.path)) == before


def test_a_store_that_does_not_exist_yet_passes(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    for state in ("reported", "quarantined"):
        result = inventory(filled, tmp_path, store=str(tmp_path / "none"), state=state)
        assert (result["changed"], result["gate"]["verdict"]) == (False, "pass")
        assert (result["gate"]["evidence"]["total"], result["gate"]["evidence"]["missing"]) == (4, 4)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("options", "verdict", "code", "words"),
    [
        ({"layout": "parquet"}, "fail", "store-layout-unknown", "store layout 'parquet' is not one of: modelopt, specforge, speculators"),
        ({"layout": "parquet", "state": "quarantined"}, "fail", "store-layout-unknown", "parquet"),
        ({"depth": "content"}, "unknown", "no-host-environment", "host_python is not set"),
        ({"depth": "content", "host_python": "/bin/false"}, "unknown", "no-host-environment", "/bin/false cannot look into samples"),
        ({"depth": "content", "host_python": "/nonexistent"}, "unknown", "no-host-environment", "No such file"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(tmp_path, options, verdict, code, words):
    result = inventory(damaged(tmp_path), tmp_path, **options)
    assert (result["changed"], result["gate"]["verdict"], codes(result)) == (False, verdict, [code])
    assert words in result["gate"]["problems"][0]["what"]


def test_without_a_host_environment_headers_are_still_read(tmp_path):
    result = inventory(damaged(tmp_path), tmp_path, host_python="/nonexistent")
    assert codes(result) == ["sample-torn"]


def test_broken_runs_are_unknown_and_move_nothing(tmp_path):
    filled = damaged(tmp_path)
    Path(filled.store.path, "runs.json").write_text("{")
    result = inventory(filled, tmp_path, state="quarantined")
    assert (result["changed"], result["gate"]["verdict"], codes(result)) == (False, "unknown", ["runs-broken"])


HANGING = """#!{python}
import json, sys, time
request = json.load(sys.stdin)
if request["folder"] and "data_1.ckpt" not in request["skip"]:
    print(json.dumps({{"now": "data_1.ckpt"}}), flush=True)
    time.sleep(600)
sys.stdin = __import__("io").StringIO(json.dumps(request))
from relight.hostlook import main
sys.exit(main())
"""


def test_a_file_that_hangs_is_unknown_and_the_rest_is_judged(tmp_path, monkeypatch):
    filled = fill(tmp_path, LENGTHS)
    python = tmp_path / "python"
    python.write_text(HANGING.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'collections'}:{ROOT}")
    plan = surveying.Plan(Request(filled.store.path, "specforge", str(filled.dataset)), str(python), stall_seconds=3.0)
    tally = surveying.look(plan)
    assert (tally.intact, tally.counts["unjudged"]) == (3, 1)
    assert [(item.path, item.why) for item in tally.found] == [("rows_0-2000/data_1.ckpt", "did not answer within 3 s")]
    gate = surveying.judge(tally)
    assert gate.verdict.word == "unknown"
    assert surveying.moves(tally) == []


def test_dataset_check_as_a_module(tmp_path):
    path = tmp_path / "data.jsonl"
    records = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4], "loss_mask": [1]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    good = run_module("dataset_check", path=str(path), records=2, tokens=4)
    assert (good["changed"], good["gate"]["name"], good["gate"]["verdict"]) == (False, "dataset_check", "pass")
    assert (good["gate"]["evidence"]["records"], good["gate"]["evidence"]["tokens"]) == (2, 4)
    os.truncate(path, path.stat().st_size - 5)
    torn = run_module("dataset_check", path=str(path), records=2, tokens=4)
    assert (torn["gate"]["verdict"], codes(torn)) == ("fail", ["dataset-broken"])
    assert torn["gate"]["problems"][0]["what"] == "record 1: the file ends within it; it is truncated"
    gone = run_module("dataset_check", path=str(tmp_path / "none"))
    assert (gone["gate"]["verdict"], codes(gone)) == ("fail", ["dataset-missing"])


def test_dataset_check_compares_the_records_that_the_baseline_covers(tmp_path):
    path = tmp_path / "data.jsonl"

    def write(*records):
        path.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in records))

    write([1, 2, 3], [4, 5])
    digest = run_module("dataset_check", path=str(path))["gate"]["evidence"]["digest"]
    known = {"path": str(path), "digest": digest, "digest_records": 2}
    assert codes(run_module("dataset_check", **known)) == []
    write([1, 2, 3], [4, 5], [6])
    assert codes(run_module("dataset_check", **known)) == [], "records may follow"
    write([1, 2, 3], [4, 6])
    other = run_module("dataset_check", **known)
    assert (other["gate"]["verdict"], codes(other)) == ("fail", ["dataset-other"])
    write([1, 2, 3])
    assert codes(run_module("dataset_check", **known)) == ["dataset-count"]
    assert codes(run_module("dataset_check", records=2, **known)) == ["dataset-count"]


def test_dataset_check_finds_the_fixed_records_in_the_state_directory(tmp_path):
    filled = fill(tmp_path, [3, 2])
    state = tmp_path / "state"
    state.mkdir()
    filled.dataset.rename(state / "dataset")
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"input_ids": [0, 1, 2], "loss_mask": [0, 1, 1]}, {"input_ids": [7, 8], "loss_mask": [0, 1]}]))
    result = run_module("dataset_check", path=str(path), state_dir=str(state))
    assert codes(result) == ["dataset-changed"]
    assert "record 1" in result["gate"]["problems"][0]["what"]
    unread = run_module("dataset_check", path=str(tmp_path))
    assert (unread["gate"]["verdict"], codes(unread)) == ("unknown", ["dataset-unreadable"])


def test_many_bad_samples_are_named_in_part_and_counted_in_full(tmp_path):
    filled = fill(tmp_path, [4] * 14)
    for index in range(12):
        os.truncate(filled.file(index), 700)
    result = inventory(filled, tmp_path)
    assert codes(result) == ["sample-torn"] * 11
    assert result["gate"]["problems"][-1]["what"] == "2 more files are torn"
    assert result["gate"]["evidence"]["torn"] == 12


def test_a_store_without_a_manifest_is_adopted_and_a_kill_costs_nothing(tmp_path):
    """Every sample is read once: what a killed look has entered is not entered again."""
    filled = fill(tmp_path, [400] * 40)
    shutil.rmtree(filled.file(0).parent)
    for index in range(40):
        filled.file(index).parent.mkdir(exist_ok=True)
        with open(filled.file(index), "wb") as handle:
            filled.store.layout.write(handle, sample(index, 400, run="", extra={}))
    os.unlink(Path(filled.store.path) / "runs.json")
    options = {"store": filled.store.path, "dataset": str(filled.dataset), "state_dir": str(tmp_path / "state"), "state": "quarantined"}
    options["host_python"] = sys.executable
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}"}
    module = subprocess.Popen(
        [sys.executable, str(MODULES / "shard_inventory.py")], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
    )
    assert module.stdin is not None
    module.stdin.write(json.dumps({"ANSIBLE_MODULE_ARGS": options}).encode())
    module.stdin.close()
    deadline = time.monotonic() + 60
    while len(filled.store.entries()) < 3 and module.poll() is None and time.monotonic() < deadline:
        pass
    module.send_signal(signal.SIGKILL)
    module.wait()
    before = len(filled.store.entries())
    assert before >= 3
    done = run_module("shard_inventory", **options)
    assert (done["changed"], done["gate"]["verdict"], len(done["actions"])) == (before < 40, "warn", 40 - before)
    assert codes(done) == ["samples-adopted"]
    assert done["gate"]["evidence"]["trusted_by"]["checksums"] == 40
    manifest = (filled.file(0).parent / "MANIFEST.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["index"] for line in manifest) == list(range(40))
    assert (filled.store.entries()[7].run, filled.store.entries()[7].evidence) == ("adopted", "checksums")
    again = run_module("shard_inventory", **options)
    assert (again["changed"], again["actions"]) == (False, [])
