"""The verdict that fronts and CI go by: when is a run clear, and when is it not?"""

from __future__ import annotations

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import report


def run(**changes):
    values = {"name": "r1", "kind": "recover", "hosts": ("a",), "check": False, "tags": (), "started": 100.0}
    return report.Run(**{**values, **changes})


def gate(name, verdict="pass", stage="report", time=110.0, stopped=False, problems=(), **evidence):
    body = {
        "name": name,
        "verdict": verdict,
        "summary": f"{name} is {verdict}",
        "evidence": evidence,
        "problems": list(problems),
        "seconds": 1.0,
    }
    return {"kind": "gate", "stage": stage, "time": time, "gate": body, "stopped": stopped, "message": None, "actions": []}


CLOSED = {"kind": "closed", "time": 120.0, "journal": []}
DONE = gate("extraction_progress", finished=True, advancing=False)
MOVING = gate("extraction_progress", finished=False, advancing=True)
STILL = gate("extraction_progress", finished=False, advancing=False)


@pytest.mark.parametrize(
    ("lines", "changes", "verdict"),
    [
        ([gate("gpu_free"), DONE, CLOSED], {}, "clear"),
        ([gate("gpu_free", "warn"), DONE, CLOSED], {}, "clear-with-warnings"),
        ([gate("gpu_free", "fail"), DONE, CLOSED], {}, "not-clear"),
        ([gate("gpu_free", "unknown"), DONE, CLOSED], {}, "not-clear"),
        ([gate("gpu_free", "fail", stage="assess"), gate("gpu_free"), DONE, CLOSED], {}, "clear"),
        ([gate("gpu_free", "fail", stage="free"), gate("gpu_free"), DONE, CLOSED], {}, "clear"),
        ([gate("gpu_free"), gate("gpu_free", "fail"), DONE, CLOSED], {}, "not-clear"),
        ([gate("gpu_free"), DONE], {}, "not-clear"),
        ([gate("gpu_free"), CLOSED], {}, "not-clear"),
        ([], {}, "not-clear"),
        ([CLOSED], {}, "not-clear"),
        ([gate("continuity_check"), MOVING, CLOSED], {}, "resumed"),
        ([MOVING, CLOSED], {}, "not-clear"),
        ([gate("continuity_check"), STILL, CLOSED], {}, "not-clear"),
        ([gate("gpu_free"), DONE, CLOSED], {"tags": ("free",)}, "not-clear"),
        ([gate("gpu_free"), DONE, CLOSED], {"check": True}, "not-clear"),
        ([gate("gpu_free", stopped=True), DONE, CLOSED], {}, "not-clear"),
        ([gate("gpu_free", "fail", stage="assess"), DONE, CLOSED], {"kind": "assess"}, "not-clear"),
    ],
)
def test_verdict_of_one_host(lines, changes, verdict):
    assert report.report(run(**changes), {"a": lines}, now=130.0)["verdict"] == verdict


def test_the_worst_host_gives_the_word_and_a_silent_host_is_not_clear():
    both = run(hosts=("a", "b"))
    good = [gate("gpu_free"), DONE, CLOSED]
    assert report.report(both, {"a": good, "b": good}, now=130.0)["verdict"] == "clear"
    assert report.report(both, {"a": good}, now=130.0)["verdict"] == "not-clear"
    assert report.report(run(hosts=()), {}, now=130.0)["verdict"] == "not-clear"


def test_the_line_to_paste_holds_what_was_granted_and_what_is_needed():
    problem = {"code": "c", "where": "w", "what": "x", "remedy": "y", "verdict": "fail", "consent": "disable:unit:embedder"}
    asked = run(consent=("remove:/data/drill",))
    value = report.report(asked, {"a": [gate("gpu_free", "fail", stopped=True, problems=[problem])]}, now=130.0)
    assert value["consents_needed"] == ["disable:unit:embedder"]
    assert value["paste"] == ('ansible-playbook recover.yml -e \'{"relight_consent": ["disable:unit:embedder", "remove:/data/drill"]}\'')


def test_consent_that_was_granted_is_not_asked_for_again():
    problem = {"code": "c", "where": "w", "what": "x", "remedy": "y", "verdict": "fail", "consent": "remove:/data/drill"}
    asked = run(consent=("remove:/data/drill",))
    value = report.report(asked, {"a": [gate("storage", "fail", stopped=True, problems=[problem])]}, now=130.0)
    assert value["consents_needed"] == []
    assert value["paste"] is None


def test_samples_are_counted_from_before_to_after():
    inventory = [
        gate("shard_inventory", "fail", stage="assess", total=160, intact=78, torn=1, corrupt=1, missing=80, tokens_intact=5000),
        gate("shard_inventory", stage="verify", total=160, intact=78, torn=1, corrupt=1, missing=82, quarantined=2, tokens_quarantined=190),
        gate("shard_inventory", total=160, intact=160, torn=0, corrupt=0, missing=0, tokens_intact=11000),
        gate("continuity_check", probe_tokens=300),
        gate("sglang_ready", probe_tokens=12),
    ]
    samples, tokens = report.samples_and_tokens(inventory)
    assert samples == {
        "total": 160, "intact_before": 78, "torn": 1, "corrupt": 1, "quarantined": 2, "redone": 2, "new": 80, "intact": 160, "missing": 0,
    }  # fmt: skip
    assert tokens == {"intact": 11000, "redone": 190, "probes": 312}


def test_a_quarantined_file_that_was_no_sample_is_not_redone():
    inventory = [
        gate("shard_inventory", "fail", stage="assess", total=160, intact=156, torn=1, foreign=1, missing=3),
        gate("shard_inventory", stage="verify", total=160, intact=156, torn=1, foreign=1, missing=4, quarantined=2, tokens_quarantined=90),
        gate("shard_inventory", total=160, intact=160, missing=0),
    ]
    samples, tokens = report.samples_and_tokens(inventory)
    assert (samples["quarantined"], samples["redone"], samples["new"]) == (2, 1, 3)
    assert tokens["redone"] == 90


def reason(lines, **changes):
    return report.report(run(**changes), {"a": lines}, now=130.0)["hosts"]["a"]["reason"]


def test_a_check_run_says_what_it_plans_and_where_it_stopped():
    act = {**gate("unit:x"), "actions": ["start x"]}
    many = {**gate("unit:x"), "actions": [f"start x{i}" for i in range(5)]}
    assert reason([gate("gpu_free"), DONE, CLOSED], check=True) == "a check run proves nothing; it plans no act"
    assert reason([act, DONE, CLOSED], check=True) == "a check run proves nothing; it plans: start x"
    assert reason([many, CLOSED], check=True).endswith("it plans: start x0, start x1, start x2, and 2 more in the report")
    assert reason([{**gate("gpu_free", stopped=True), "message": "needs consent"}, CLOSED], check=True) == "needs consent"


def test_a_look_before_an_act_does_not_colour_the_acting_stage():
    look = {**gate("shard_inventory", "fail", stage="storage", time=104.0), "assessed": True}
    (stage,) = report._stages([look, gate("storage_check", stage="storage", time=105.0)])
    assert (stage["name"], stage["verdict"]) == ("storage", "pass")
    (stage,) = report._stages([{**look, "stage": "assess"}])
    assert stage["verdict"] == "fail"


def test_stages_span_their_gates_and_take_the_worst_verdict():
    stages = report._stages(
        [gate("a", "warn", stage="free", time=105.0), gate("b", stage="free", time=109.5), gate("c", "unknown", stage="ready")]
    )
    assert [(s["name"], s["verdict"], s["seconds"]) for s in stages] == [("free", "warn", 5.5), ("ready", "unknown", 1.0)]
