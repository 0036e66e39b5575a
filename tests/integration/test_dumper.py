# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The plugin's capture, on batches that a plain server never makes: what is not the whole prompt gets an error, never a dump."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils.records import token_digest

from tests.integration.sglang_server import PYTHON, ROOT

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment in .venv/sglang")]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("dumper_cases.py")), str(folder), "cpu"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'collections'}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("how", "code"), [("signal", "-15"), ("exit", "0")])
def test_a_rank_that_ends_has_written_what_it_captured(tmp_path, how, code):
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("dumper_ends.py")), str(tmp_path), how],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'collections'}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    captured, ended = (line.split() for line in done.stdout.splitlines())
    assert ended == ["ended", code], done.stderr[-3000:]
    assert int(captured[1]) < 24, "nothing was waiting any more"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"relight-{n}" for n in range(24))


def expected(tokens: range, layers: tuple[int, ...]) -> list[list[float]]:
    return [[100.0 * layer + t for layer in layers for _ in range(8)] for t in tokens]


def test_each_request_of_a_padded_batch_gets_its_own_rows(told):
    for dump, rid, tokens in zip(told["listed"], ("relight-b", "relight-c"), (range(2, 5), range(5, 6))):
        ids = [1000 + t for t in tokens]
        assert dump["input_ids"] == {"dtype": "I64", "shape": [len(ids)], "rows": ids}
        assert dump["hidden_state"] == {"dtype": "F32", "shape": [1, len(ids), 8], "rows": expected(tokens, (9,))}
        assert dump["aux_hidden_state"] == {"dtype": "F32", "shape": [1, len(ids), 24], "rows": expected(tokens, (1, 2, 3))}
        about = dump["metadata"]
        assert (about["rid"], about["tokens"], about["token_digest"]) == (rid, str(len(ids)), token_digest(ids))
        assert dump["aligned"]


def test_packed_auxiliary_states_are_the_same(told):
    assert told["packed"]["aux_hidden_state"]["rows"] == expected(range(2), (1, 2, 3))


def test_many_requests_of_one_batch_each_get_their_own_rows(told):
    first = 0
    for number, dump in enumerate(told["many"]):
        tokens = range(first, first + 1 + 7 * number % 50)
        first = tokens.stop
        assert dump["input_ids"]["rows"] == [1000 + t for t in tokens]
        assert dump["hidden_state"]["rows"] == expected(tokens, (9,))
        assert dump["aux_hidden_state"]["rows"] == expected(tokens, (1, 2, 3))


def test_another_dtype_is_asked_for(told):
    assert told["half"]["hidden_state"]["dtype"] == told["half"]["aux_hidden_state"]["dtype"] == "BF16"
    assert told["half"]["hidden_state"]["rows"] == [[900.0] * 8, [900.0] * 8]  # 901 has no bfloat16 of its own


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("prefix", "5 tokens of its prompt came from a cache"),
        ("longer", "2 rows for a prompt of 7 tokens"),
        ("chunk", "2 rows for a prompt of 9 tokens"),
        ("short", "3 rows and 4 token ids for a batch of 4 tokens"),
        ("two", "the auxiliary states have the shapes [[2, 8], [2, 8]]"),
        ("none", "no auxiliary states"),
        ("untold", "does not tell its requests apart"),
        ("skipped", "did not come through the logits processor"),
        ("late", "too far behind"),
    ],
)
def test_what_is_not_the_whole_prompt_gets_an_error(told, case, says):
    assert list(told[case]) == ["error"]
    assert says in told[case]["error"]


def test_only_marked_prefills_leave_files(told):
    dumps = ["b", "c", "half", "last", "packed"]
    errors = ["chunk", "late", "longer", "none", "prefix", "short", "skipped", "two", "untold"]
    assert told["files"] == sorted([f"relight-{name}" for name in dumps] + [f"relight-{name}.error" for name in errors])
