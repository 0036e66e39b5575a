# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Judging continuity: quantiles against tolerances, and what a mismatch looks like."""

from __future__ import annotations

import json
import math

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import continuity, continuity_run
from ansible_collections.relight.recovery.plugins.module_utils.continuity import TOLERANCES, Block, Quantiles, Sample, Seen
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict

SAMPLES = (Sample(3, 40, 1e-7), Sample(9, 60, 1e-7))


def quantiles(p50: float, p90: float | None = None, p99: float | None = None) -> Quantiles:
    return Quantiles(p50, p90 or p50, p99 or p90 or p50, 9.0)


def block(name: str, p50: float = 1e-7, p90: float | None = None, p99: float | None = None, like: str = "", like_p50: float = 1.0) -> Block:
    return Block(name, quantiles(p50, p90, p99), like or name, like_p50 if like else p50)


def seen(*blocks: Block, dtype: str = "float32", samples: tuple[Sample, ...] = SAMPLES) -> Seen:
    return Seen("abc", dtype, samples, blocks, 100)


FINE = (block("1"), block("3"), block("5"))


@pytest.mark.parametrize(
    ("blocks", "dtype", "code"),
    [
        ((*FINE, block("final")), "float32", None),
        ((*FINE, block("final", 5e-5, 1e-4, 1e-3)), "float32", None),
        ((*FINE, block("final", 5.1e-5, 1e-4, 1e-3)), "float32", "continuity-other-norm"),
        ((*FINE, block("final", 5e-5, 1.1e-4, 1e-3)), "float32", "continuity-other-norm"),
        ((*FINE, block("final", 5e-5, 1e-4, 1.1e-3)), "float32", "continuity-other-norm"),
        ((block("1"), block("3", 0.8), block("5"), block("final")), "float32", "continuity-other-layer"),
        (
            (block("1", 0.8, like="3", like_p50=1e-6), block("3", 0.8), block("5", 0.8), block("final", 0.8)),
            "float32",
            "continuity-other-layer",
        ),
        ((block("1", 0.8), block("3", 0.9), block("5", 1.3), block("final", 1.0)), "float32", "continuity-unrelated"),
        ((block("1", 0.01), block("3", 0.02), block("5", 0.02), block("final", 0.02)), "float32", "continuity-other-weights"),
        ((block("1", 0.01), block("3", 0.02), block("5", 0.02), block("final", 0.02)), "bfloat16", None),
        ((block("1", 0.03, 0.1, 0.5), block("3"), block("5"), block("final")), "bfloat16", None),
        ((block("1", 0.04), block("3", 0.04), block("5", 0.04), block("final", 0.04)), "bfloat16", "continuity-other-weights"),
        ((block("1", math.nan), block("3"), block("5"), block("final")), "float32", "continuity-other-layer"),
        ((Block("1", quantiles(1e-7), "1", 1e-7, 2), block("3"), block("5"), block("final")), "float32", "continuity-nonfinite"),
    ],
)
def test_blocks(blocks: tuple[Block, ...], dtype: str, code: str | None) -> None:
    gate = continuity.judge(seen(*blocks, dtype=dtype))
    assert [problem.code for problem in gate.problems] == ([code] if code else [])
    assert gate.verdict is (Verdict.FAIL if code else Verdict.PASS)
    assert gate.evidence["quantiles"]["1"]["max"] == 9.0


def test_a_swap_of_layers_is_spelled_out() -> None:
    blocks = (block("1", 0.8, like="3", like_p50=1e-6), block("3", 0.9, like="1", like_p50=1e-6), block("5"), block("final"))
    (problem,) = continuity.judge(seen(*blocks)).problems
    assert problem.what == "looks like other layers: the stored layer 1 is the server's layer 3; the stored layer 3 is the server's layer 1"
    assert problem.where == "layer 1, layer 3"


def test_the_tail_alone_is_told_by_the_tail() -> None:
    blocks = tuple(block(name, 1e-6, 2e-3) for name in ("1", "3", "5", "final"))
    (problem,) = continuity.judge(seen(*blocks)).problems
    assert "a tenth of the tokens differ by 0.002 or more" in problem.what


def test_one_sample_of_its_own_kind_is_named() -> None:
    gate = continuity.judge(seen(*FINE, block("final"), samples=(SAMPLES[0], Sample(9, 60, 0.7))))
    assert [(problem.code, problem.where) for problem in gate.problems] == [("continuity-sample", "sample 9")]


def test_a_sample_that_gave_nothing_is_a_failure() -> None:
    gate = continuity.judge(seen(*FINE, block("final"), samples=(Sample(9, 60, 0.0, "its dump is short", "continuity-other-tokens"),)))
    assert [(problem.code, problem.what) for problem in gate.problems] == [("continuity-other-tokens", "its dump is short")]


def test_nothing_compared_is_unknown() -> None:
    assert continuity.judge(seen(samples=())).verdict is Verdict.UNKNOWN


def test_tolerances_grow_from_the_middle_to_the_tail_and_with_coarser_types() -> None:
    for tolerance in TOLERANCES.values():
        assert 0 < tolerance.p50 <= tolerance.p90 <= tolerance.p99 < 1
        assert tolerance.reason
    assert TOLERANCES["float32"].p50 < TOLERANCES["float16"].p50 < TOLERANCES["bfloat16"].p50 < continuity.UNRELATED


def test_a_printed_gate_is_read_back() -> None:
    gate = continuity.judge(seen(*FINE, block("final", 0.3)))
    assert continuity_run.read("noise\n" + json.dumps(gate.result(1.0)) + "\n", "x") == gate


@pytest.mark.parametrize("out", ["", "no json", "[1]", '{"name": "continuity"}'])
def test_what_is_no_gate_is_unknown(out: str) -> None:
    gate = continuity_run.read(out, "exit status 1: it broke")
    assert (gate.verdict, gate.problems[0].code) == (Verdict.UNKNOWN, "no-host-environment")
    assert "exit status 1: it broke" in gate.problems[0].what


def test_a_verdict_that_its_problems_do_not_bear_out_is_unknown() -> None:
    told = continuity.judge(seen(*FINE, block("final", 0.3))).result(1.0)
    assert continuity_run.read(json.dumps({**told, "verdict": "pass"}), "").verdict is Verdict.UNKNOWN
