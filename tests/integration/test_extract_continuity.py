# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Continuity against a server that restarted: the same, or another layer, norm, precision, model, tokens; and its module."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extraction import Work, records
from tests.harness import run_module


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    """A finished store, and a server that has restarted since."""
    place = Work(tmp_path, records(30), dump_seconds=0.2)
    place.start_server()
    assert place.run()[0] == 0
    place.control(restart=True)
    yield place
    place.close()


def links(work: Work) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((work.store / "runs.json").read_text())["links"]
    return found


def sent(work: Work) -> list[int]:
    instance = work.seen()["instance"]
    return [int(request["rid"].split("-")[2]) for request in work.seen()["requests"] if request["rid"].split("-")[1] == instance[:8]]


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_the_same_server_passes_and_is_linked(work: Work, noise: float) -> None:
    work.control(noise=noise)
    gate = work.continuity("--samples", "4")
    assert (gate["verdict"], gate["problems"]) == ("pass", [])
    evidence = gate["evidence"]
    assert sent(work) == evidence["indices"]
    assert len(set(evidence["indices"])) == 4
    assert evidence["probe_tokens"] == evidence["tokens"] == sum(len(work.data[index]["input_ids"]) for index in evidence["indices"])
    assert list(evidence["quantiles"]) == ["1", "3", "5", "final"]
    for block in evidence["quantiles"].values():
        assert noise / 10 <= block["p50"] <= block["p90"] <= block["p99"] <= block["max"] <= 1e-5
    lengths = sorted(len(record["input_ids"]) for record in work.data)
    probed = [len(work.data[index]["input_ids"]) for index in evidence["indices"]]
    assert lengths[-1] in probed
    assert lengths[0] in probed
    link = links(work)[-1]
    assert (link["instance"], link["verdict"], link["samples"]) == (work.seen()["instance"], "pass", 4)
    assert link["quantiles"] == evidence["quantiles"]
    before = len(work.seen()["requests"])
    again = work.continuity()
    assert (again["verdict"], again["evidence"]["probe_tokens"]) == ("pass", 0)
    assert len(work.seen()["requests"]) == before
    assert len(links(work)) == 2
    assert work.left_in_dump() == []


@pytest.mark.parametrize(
    ("told", "code", "what"),
    [
        ({"computed": [3, 1, 5]}, "continuity-other-layer", "the stored layer 1 is the server's layer 3; the stored layer 3 is"),
        ({"computed": [2, 3, 5]}, "continuity-other-layer", "some blocks agree and these do not"),
        ({"final_scale": 1.5}, "continuity-other-norm", "looks like another norm"),
        ({"noise": 1e-3}, "continuity-other-weights", "all blocks differ a little"),
        ({"seed": 1}, "continuity-unrelated", "nothing agrees"),
        ({"faults": {"*": {"kind": "nan"}}}, "continuity-nonfinite", "not finite"),
        ({"faults": {"*": {"kind": "tokens"}}}, "continuity-other-tokens", "other tokens"),
        ({"faults": {"*": {"kind": "short"}}}, "continuity-other-tokens", "other tokens"),
        ({"faults": {"*": {"kind": "no-dump"}}}, "continuity-no-dump", "no dump came"),
        ({"faults": {"*": {"kind": "error"}}}, "continuity-no-dump", "the forward refused"),
    ],
)
def test_a_server_that_is_not_the_same_fails_and_nothing_is_added(work: Work, told: dict[str, Any], code: str, what: str) -> None:
    work.control(**told)
    Path(work.place().path_of(7)).unlink()
    gate = work.continuity("--samples", "3")
    assert gate["verdict"] == "fail"
    assert gate["problems"][0]["code"] == code
    assert what in gate["problems"][0]["what"]
    assert links(work)[-1]["verdict"] == "fail"
    exit_code, said = work.run()
    assert exit_code == 4
    assert "no passed continuity check links" in said
    assert work.indices() == set(range(30)) - {7}


def test_one_sample_that_disagrees_is_named(work: Work) -> None:
    """The stored sample is whole and right by its digest, and holds another server's states: the store is mixed."""
    gate = work.continuity("--samples", "6")
    first, *_rest = gate["evidence"]["indices"]
    work.control(restart=True, seed=1)
    Path(work.place().path_of(first)).unlink()
    runs = json.loads((work.store / "runs.json").read_text())
    runs["links"].append({"instance": work.seen()["instance"], "verdict": "pass"})
    (work.store / "runs.json").write_text(json.dumps(runs))
    assert work.run()[0] == 0
    work.control(restart=True, seed=0)
    gate = work.continuity("--samples", "6")
    assert gate["verdict"] == "fail"
    assert gate["evidence"]["indices"][0] == first  # it is the newest now


def test_a_corrupt_sample_does_not_speak_against_the_server(work: Work) -> None:
    for index in (3, 4, 5):
        path = Path(work.place().path_of(index))
        data = bytearray(path.read_bytes())
        data[-3000] ^= 0xFF
        path.write_bytes(data)
    gate = work.continuity("--samples", "12")
    assert gate["verdict"] == "pass"
    assert not {3, 4, 5} & set(gate["evidence"]["indices"])


def test_a_store_of_corrupt_samples_alone_proves_nothing(work: Work) -> None:
    for index in range(30):
        Path(work.place().path_of(index)).write_bytes(b"x")
    gate = work.continuity()
    assert (gate["verdict"], gate["problems"][0]["code"]) == ("unknown", "continuity-empty")
    assert sent(work) == []
    assert len(links(work)) == 1


def test_samples_that_no_manifest_lists_are_not_nothing(work: Work) -> None:
    (work.store / "rows_0-2000" / "MANIFEST.jsonl").unlink()
    gate = work.continuity()
    assert (gate["verdict"], gate["problems"][0]["code"]) == ("unknown", "continuity-empty")
    assert sent(work) == []


def test_an_empty_store_has_nothing_to_compare(tmp_path: Path) -> None:
    work = Work(tmp_path, records(5))
    work.start_server()
    try:
        gate = work.continuity()
        assert (gate["verdict"], gate["evidence"]["note"]) == ("pass", "nothing to compare")
        assert [(link["verdict"], link["samples"]) for link in links(work)] == [("pass", 0)]
        assert work.seen()["requests"] == []
    finally:
        work.close()


def test_tokens_sent_in_vain_are_counted(work: Work) -> None:
    work.control(faults={"*": {"kind": "drop"}})
    gate = work.continuity()
    assert (gate["verdict"], gate["problems"][0]["code"]) == ("unknown", "continuity-no-server")
    assert gate["evidence"]["probe_tokens"] == sum(len(work.data[index]["input_ids"]) for index in sent(work)) > 0


def test_a_server_that_is_away_is_unknown(work: Work) -> None:
    work.kill_server()
    gate = work.continuity()
    assert (gate["verdict"], gate["problems"][0]["code"]) == ("unknown", "continuity-no-server")
    (work.dump / "server.json").unlink()
    gate = work.continuity()
    assert (gate["verdict"], gate["problems"][0]["code"]) == ("unknown", "continuity-no-server")


def test_another_hidden_size_is_told_without_a_request(work: Work) -> None:
    gate = work.continuity(hidden_size=32)
    assert (gate["verdict"], gate["problems"][0]["code"]) == ("fail", "continuity-wrong-server")
    gate = work.continuity(identity={"dtype": "float32", "weights": "w2"})
    assert (gate["verdict"], gate["problems"][0]["what"].endswith("or start a new store")) == ("fail", True)
    assert sent(work) == []


def test_the_module_passes_the_verdict_on(work: Work) -> None:
    config = str(work.write_config())
    options: dict[str, Any] = {
        "config": config,
        "samples": 2,
        "seconds": 30,
        "state_dir": str(work.state),
        "run": "r1",
        "stage": "continuity",
    }
    result = run_module("continuity_check", check=True, host_python=sys.executable, **options)
    assert (result["gate"]["verdict"], result["gate"]["problems"][0]["code"]) == ("unknown", "depends-on-planned-act")
    assert sent(work) == []
    result = run_module("continuity_check", host_python="/nowhere/bin/python", **options)
    assert (result["gate"]["verdict"], result["gate"]["problems"][0]["code"]) == ("unknown", "no-host-environment")
    result = run_module("continuity_check", host_python=sys.executable, **options)
    assert (result["changed"], result["gate"]["verdict"], len(result["gate"]["evidence"]["indices"])) == (False, "pass", 2)
    events = [json.loads(line) for line in (work.state / "journal.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["run"] == "r1"] == ["continuity_check"] * 4


def test_the_module_bounds_the_check(work: Work) -> None:
    work.control(faults={"*": {"kind": "never"}})
    options: dict[str, Any] = {"config": str(work.write_config()), "host_python": sys.executable}
    result = run_module("continuity_check", seconds=1.5, **options)
    assert (result["gate"]["verdict"], result["gate"]["problems"][0]["code"]) == ("unknown", "continuity-slow")
