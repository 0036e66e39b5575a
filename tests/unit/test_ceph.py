# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""ceph_check on what a real cluster (16.2, one OSD of 3 GiB) said when it was healthy, filling, full and paused."""

from __future__ import annotations

import copy
import json
import sys

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import ceph
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import ROOT, run_module

CASES = ROOT / "tests" / "cases" / "ceph"
FAIL, WARN, UNKNOWN, PASS = Verdict.FAIL, Verdict.WARN, Verdict.UNKNOWN, Verdict.PASS


def recorded(name):
    return json.loads((CASES / f"16.2-{name}.json").read_text())


def texts(value):
    return {name: json.dumps(part) for name, part in value.items()}


def judged(value, **need):
    return ceph.judge(ceph.parse(texts(value)), ceph.Need(**need))


@pytest.mark.parametrize(
    ("name", "verdict", "codes"),
    [
        ("healthy", PASS, set()),
        ("nearfull", WARN, {"ceph-nearfull"}),
        ("backfillfull", WARN, {"ceph-backfillfull"}),
        ("full", FAIL, {"ceph-full"}),
        ("paused", FAIL, {"ceph-full", "ceph-paused"}),
    ],
)
def test_what_a_real_cluster_said(name, verdict, codes):
    gate = judged(recorded(name))
    assert (gate.verdict, {problem.code for problem in gate.problems}) == (verdict, codes)


def test_a_full_cluster_looks_empty_and_the_fullest_osd_tells():
    gate = judged(recorded("full"), bytes=1, pools=("vm-disks",))
    assert gate.evidence["free_bytes"] > 0.9 * gate.evidence["total_bytes"]
    assert (gate.evidence["fullest_osd"], gate.evidence["pools_max_avail_bytes"]["vm-disks"]) == ("osd.0", 0)
    assert "ceph-room" in [problem.code for problem in gate.problems]
    assert "set-full-ratio" in gate.problems[0].remedy


def changed(change):
    value = recorded("healthy")
    change(value)
    return value


def osd(value, used, name="osd.7", **more):
    value["osd_df"]["nodes"].append({**value["osd_df"]["nodes"][0], "id": 7, "name": name, "utilization": used, **more})


def check(value, code, severity="HEALTH_WARN"):
    value["health"]["status"] = severity
    value["health"]["checks"][code] = {"severity": severity, "summary": {"message": "so", "count": 1}, "detail": [], "muted": False}


FAULTS = {
    "one OSD of many is full before health says so": (lambda v: osd(v, 95.2), FAIL, "ceph-full"),
    "one OSD is too full to take copies": (lambda v: osd(v, 91.0), WARN, "ceph-backfillfull"),
    "one OSD is nearly full": (lambda v: osd(v, 85.1), WARN, "ceph-nearfull"),
    "the full flag is set": (lambda v: v["osd_dump"].update(flags_set=["full"]), FAIL, "ceph-full"),
    "older clusters write flags as one string": (
        lambda v: (v["osd_dump"].pop("flags_set"), v["osd_dump"].update(flags="sortbitwise,pausewr")),
        FAIL,
        "ceph-paused",
    ),
    "recovery has no room": (lambda v: check(v, "PG_RECOVERY_FULL", "HEALTH_ERR"), FAIL, "ceph-backfillfull"),
    "a pool's quota is used up": (lambda v: check(v, "POOL_QUOTA_FULL"), FAIL, "ceph-full"),
    "placement groups do not answer": (lambda v: check(v, "PG_AVAILABILITY"), FAIL, "ceph-unavailable"),
    "requests are slow": (lambda v: check(v, "SLOW_OPS"), WARN, "ceph-slow"),
    "an error that is not known here": (lambda v: check(v, "MDS_DAMAGE", "HEALTH_ERR"), FAIL, "ceph-error"),
    "a status that is none": (lambda v: v["health"].update(status="HEALTH_GREAT"), UNKNOWN, "ceph-unreadable"),
    "no OSD at all": (lambda v: v["osd_df"].update(nodes=[]), UNKNOWN, "ceph-unreadable"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gets_its_code_and_verdict(fault):
    change, verdict, code = FAULTS[fault]
    gate = judged(changed(change))
    assert (gate.verdict, [problem.code for problem in gate.problems]) == (verdict, [code])


def test_hosts_and_roots_in_the_list_are_no_osds():
    def add(value):
        value["osd_df"]["nodes"].append({"id": -1, "name": "default", "type": "root", "kb": 100, "utilization": 99.0})

    gate = judged(changed(add))
    assert (gate.verdict, gate.evidence["osds"], gate.evidence["fullest_osd"]) == (PASS, 1, "osd.0")


def test_room_is_that_of_the_pool():
    room = recorded("healthy")["df"]["pools"][1]["stats"]["max_avail"]
    name = recorded("healthy")["df"]["pools"][1]["name"]
    assert judged(recorded("healthy"), bytes=room, pools=(name,)).verdict is PASS
    assert [p.code for p in judged(recorded("healthy"), bytes=room + 1, pools=(name,)).problems] == ["ceph-room"]
    gate = judged(recorded("healthy"), pools=("gone",))
    assert (gate.verdict, gate.problems[0].code) == (UNKNOWN, "ceph-pool-missing")
    assert judged(recorded("healthy"), bytes=1 << 60).verdict is PASS, "without a pool's name nothing is guessed"


PARTS = ["health", "df", "osd_df", "osd_dump"]
GARBAGE = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(PARTS[:3]), GARBAGE)
def test_garbage_is_never_a_pass(part, garbage):
    value = {**recorded("healthy"), part: garbage}
    try:
        gate = judged(value)
    except ceph.Unreadable:
        return
    assert gate.verdict is UNKNOWN


@given(st.sampled_from(PARTS[:3]), st.text(max_size=40))
def test_text_that_is_no_json_is_unreadable(part, text):
    broken = {**texts(recorded("healthy")), part: text}
    try:
        verdict = ceph.judge(ceph.parse(broken), ceph.Need()).verdict
    except ceph.Unreadable:
        return
    assert verdict is UNKNOWN


@pytest.mark.parametrize("used", [float("nan"), float("inf"), -1.0, 1e9, None, "full"])
def test_a_share_that_is_no_share_is_unreadable(used):
    value = copy.deepcopy(recorded("healthy"))
    value["osd_df"]["nodes"][0]["utilization"] = used
    with pytest.raises(ceph.Unreadable):
        judged(value)


# --- the module, with a ceph command that answers from the recordings ------------------------------------------------


def command(tmp_path, body):
    script = tmp_path / "ceph"
    script.write_text(f"#!{sys.executable}\nimport json, sys, time\n{body}\n")
    script.chmod(0o755)
    return [str(script), "--id", "admin"]


ANSWERS = f"""
words = sys.argv[5:-2]
name = {{"health detail": "health", "df": "df", "osd df": "osd_df", "osd dump": "osd_dump"}}[" ".join(words)]
print(json.dumps(json.load(open({str(CASES / "16.2-full.json")!r}))[name]))
"""


@pytest.mark.parametrize(
    ("body", "verdict", "code", "says"),
    [
        (ANSWERS, "fail", "ceph-full", "osd.0 is full"),
        ("sys.exit('error connecting to the cluster')", "unknown", "ceph-unreadable", "error connecting to the cluster"),
        ("time.sleep(30)", "unknown", "ceph-unreadable", "did not answer within"),
        ("print('HEALTH_OK')", "unknown", "ceph-unreadable", "not what Ceph gives"),
    ],
)
def test_the_module_asks_and_is_bounded(tmp_path, body, verdict, code, says):
    result = run_module("ceph_check", command=command(tmp_path, body), timeout_seconds=1 if "sleep" in body else 15)
    assert (result["gate"]["verdict"], result["gate"]["problems"][0]["code"]) == (verdict, code)
    assert says in result["gate"]["summary"]


def test_no_ceph_there_is_unknown():
    gate = run_module("ceph_check", command=["/nowhere/ceph"])["gate"]
    assert (gate["verdict"], gate["problems"][0]["code"]) == ("unknown", "ceph-unreadable")
