# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Reading records as a stream, fixing them, and judging the data against both the inventory and the fixed records."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import dataset, dataset_gate
from ansible_collections.relight.recovery.plugins.module_utils.dataset import BadDataset, FixedRecords, FixedWriter, entries, raw_records
from ansible_collections.relight.recovery.plugins.module_utils.dataset_gate import Expected
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict
from ansible_collections.relight.recovery.plugins.module_utils.records import BadRecord, normalise, record_digest, token_digest
from hypothesis import given, settings
from hypothesis import strategies as st

CHAT = {"id": "a", "messages": [{"role": "user", "content": 'hé ]}\\" \u2028'}, {"role": "assistant", "content": "x"}]}
TOKENS = {"id": "b", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


def test_digests_are_what_the_format_says():
    from hashlib import blake2b

    assert token_digest([1, 2]) == blake2b(b"\1" + bytes(7) + b"\2" + bytes(7), digest_size=16).hexdigest()
    assert record_digest([1], [1]) != record_digest([1], [0])


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_sharegpt_and_chat_are_one(key):
    raw = normalise({key: [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, 0)
    assert raw.messages == ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


def test_tensors_of_one_row_are_unwrapped():
    assert normalise({"input_ids": [[1, 2]], "loss_mask": [[True, False]]}, 0).loss_mask == (1, 0)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([], "is not an object"),
        ({}, "has neither input_ids nor messages"),
        ({"input_ids": [], "loss_mask": []}, "input_ids is not a list of token ids"),
        ({"input_ids": ["1"], "loss_mask": [1]}, "input_ids is not a list of token ids"),
        ({"input_ids": [-1], "loss_mask": [1]}, "no token id"),
        ({"input_ids": [1]}, "without a loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries for 2 token ids"),
        ({"input_ids": [1], "loss_mask": [2]}, "zeros and ones"),
        ({"input_ids": [1], "loss_mask": 1}, "zeros and ones"),
        ({"messages": []}, "not a list of turns"),
        ({"messages": ["hi"]}, "turn 0 lacks a role or a text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": "user", "content": " "}]}, "all its turns are empty"),
    ],
)
def test_bad_records_are_told_in_one_sentence(raw, words):
    with pytest.raises(BadRecord) as caught:
        normalise(raw, 4)
    assert str(caught.value).startswith("record 4: ")
    assert words in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=4), min_size=1, max_size=6), st.integers(1, 40), st.booleans())
@settings(deadline=None)
def test_any_window_gives_the_same_records(tmp_path_factory, values, window, ascii_only):
    folder = tmp_path_factory.mktemp("d")
    array, lines = folder / "a.json", folder / "l.jsonl"
    array.write_text(json.dumps(values, ensure_ascii=ascii_only, indent=1), encoding="utf-8")
    lines.write_text("".join(json.dumps(value, ensure_ascii=ascii_only) + "\n" for value in values), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "READ_BYTES", window)
        assert list(entries(str(array))) == values
        assert list(entries(str(lines))) == values


WHOLE = json.dumps([CHAT, TOKENS] * 3, ensure_ascii=False).encode()


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 40))
@settings(deadline=None)
def test_a_cut_array_is_never_whole(tmp_path_factory, length, window):
    path = tmp_path_factory.mktemp("cut") / "a.json"
    path.write_bytes(WHOLE[:length])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "READ_BYTES", window)
        with pytest.raises(BadDataset):
            list(entries(str(path)))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"hello", "neither a JSON array nor lines"),
        (b'[{"a": 1}, {"a" 2}, {"a": "' + b"x" * 100 + b'"}]', "record 1: is not valid JSON"),
        (b'[{"a": 1} {"a": 2}]', "'{' follows record 0"),
        (b'[{"a": 1}] x', "text follows the end of its array"),
        (b'[{"a": 1}, {"a": "x', "record 1: the file ends within it; it is truncated"),
        (b'[{"a": 1},', "ends after 1 records without closing its array; it is truncated"),
        (b'{"a": 1}\n{"a": \n{"a": 1}\n', "record 1: is not valid JSON"),
        (b'{"a": 1}\n{"a": ', "record 1: the file ends within it; it is truncated"),
        (b'[{"a": "\xff"}]', "is not UTF-8"),
        (b'{"a": "\xff"}\n', "is not UTF-8 near byte 7"),
        (b'{"a": 1}\n{"a": "\xff"}\n' + b" " * (1 << 20), "is not UTF-8"),
        (b'[{"a": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_data_is_told_in_one_sentence(tmp_path, data, words):
    path = tmp_path / "data"
    path.write_bytes(data)
    with pytest.raises(BadDataset) as caught:
        list(entries(str(path)))
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("shape", ["array", "lines"])
def test_memory_stays_bounded(tmp_path, shape):
    path = tmp_path / "data"
    record = json.dumps({"messages": [{"role": "user", "content": "x" * 20_000}]})
    with open(path, "w", encoding="utf-8") as handle:
        handle.write("[" if shape == "array" else "")
        handle.write(("," if shape == "array" else "\n").join([record] * 1500))  # 30 MB
        handle.write("]" if shape == "array" else "\n")
    tracemalloc.start()
    assert sum(1 for _raw in raw_records(str(path))) == 1500
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


def made(folder, count: int) -> list[tuple[list[int], list[int]]]:
    pairs = [([index, index + 1, index + 2], [0, 1, index % 2]) for index in range(count)]
    with FixedWriter(str(folder), {"tokenizer_digest": "t"}) as writer:
        for index, (ids, mask) in enumerate(pairs):
            writer.append(normalise({"id": index, "input_ids": ids, "loss_mask": mask}, index), ids, mask)
    return pairs


def test_fixed_records_come_back(tmp_path):
    pairs = made(tmp_path, 5)
    with FixedRecords(str(tmp_path)) as fixed:
        assert (len(fixed), fixed.tokens, fixed.header["tokenizer_digest"]) == (5, 15, "t")
        assert [(list(fixed.read(index).ids), list(fixed.read(index).mask)) for index in range(5)] == pairs
        assert fixed.items[3].token_digest == token_digest(pairs[3][0])
        assert [item.id for item in fixed.items] == ["0", "1", "2", "3", "4"]


@given(st.integers(0, 400), st.integers(0, 75))
@settings(deadline=None)
def test_a_kill_while_fixing_leaves_whole_records_that_grow_on(tmp_path_factory, index_bytes, body_bytes):
    """Whatever of either file reached the disk: a prefix counts, and the writer goes on from there."""
    folder = tmp_path_factory.mktemp("fixed")
    pairs = made(folder, 5)
    for name, left in ((dataset.INDEX, index_bytes), (dataset.BODY, body_bytes)):
        os.truncate(folder / name, min(left, (folder / name).stat().st_size))
    with FixedRecords(str(folder)) as fixed:
        known = len(fixed)
        assert [list(fixed.read(index).ids) for index in range(known)] == [ids for ids, _mask in pairs[:known]]
    with FixedWriter(str(folder)) as writer:
        assert writer.count == known
        for index in range(known, 5):
            writer.append(normalise({"input_ids": pairs[index][0], "loss_mask": pairs[index][1]}, index), *pairs[index])
    with FixedRecords(str(folder)) as fixed:
        assert [list(fixed.read(index).mask) for index in range(5)] == [mask for _ids, mask in pairs]


def test_fixed_tokens_that_rot_are_seen(tmp_path):
    made(tmp_path, 5)
    with open(tmp_path / dataset.BODY, "r+b") as handle:
        handle.seek(16)
        handle.write(b"\x63")
    with FixedRecords(str(tmp_path)) as fixed:
        fixed.read(0)
        with pytest.raises(BadDataset, match="fixed record 1"):
            fixed.read(1)


RECORDS = [{"id": index, "input_ids": [index, 1, 2], "loss_mask": [0, 1, 1]} for index in range(4)]


def judged(folder, records: object, expected: Expected, fixed: list[dict] | None = RECORDS) -> tuple[Verdict, list[str], str, dict]:
    path = folder / "data.json"
    path.write_text(records if isinstance(records, str) else json.dumps(records), encoding="utf-8")
    if fixed is not None:
        with FixedWriter(str(folder / "fixed")) as writer:
            for index, record in enumerate(fixed):
                raw = normalise(record, index)
                writer.append(raw, raw.input_ids or [9, 9], raw.loss_mask or [1, 1])
    gate = dataset_gate.judge(str(path), dataset_gate.look(str(path), str(folder / "fixed"), expected), expected)
    return gate.verdict, [problem.code for problem in gate.problems], " ".join(problem.what for problem in gate.problems), gate.evidence


MORE = {"id": "new", "input_ids": [1], "loss_mask": [1]}
CHANGED = [*RECORDS[:2], {**RECORDS[2], "input_ids": [3, 1, 2]}, RECORDS[3]]
CHATS = [CHAT, {**CHAT, "id": "b"}]


@pytest.mark.parametrize(
    ("records", "expected", "fixed", "verdict", "codes", "words"),
    [
        (RECORDS, Expected(4, 12), RECORDS, Verdict.PASS, [], ""),
        (RECORDS, Expected(), RECORDS, Verdict.PASS, [], ""),
        (RECORDS, Expected(4, 12), None, Verdict.PASS, [], ""),
        (RECORDS, Expected(), None, Verdict.WARN, ["no-baseline"], ""),
        ([*RECORDS, MORE], Expected(), RECORDS, Verdict.PASS, [], ""),
        ([*RECORDS, MORE], Expected(4, 12), RECORDS, Verdict.WARN, ["dataset-appended"], "1 more than"),
        (RECORDS, Expected(5, 12), RECORDS, Verdict.FAIL, ["dataset-count"], "4 records, the inventory expects 5"),
        (RECORDS, Expected(4, 13), RECORDS, Verdict.FAIL, ["dataset-tokens"], "12 tokens, the inventory expects 13"),
        (RECORDS[:3], Expected(), RECORDS, Verdict.FAIL, ["dataset-shortened"], "3 records, 4 were fixed"),
        (CHANGED, Expected(4, 12), RECORDS, Verdict.FAIL, ["dataset-changed"], "since they were fixed at the first run: record 2"),
        ([*RECORDS, RECORDS[1]], Expected(), RECORDS, Verdict.FAIL, ["dataset-duplicate-id"], "'1' of record 4"),
        (json.dumps(RECORDS)[:-9], Expected(4, 12), RECORDS, Verdict.FAIL, ["dataset-broken"], "truncated"),
        ([*RECORDS, {"id": 9}], Expected(), RECORDS, Verdict.FAIL, ["dataset-broken"], "record 4: has neither input_ids nor messages"),
        (CHATS, Expected(2, 4), CHATS, Verdict.PASS, [], ""),
        (CHATS, Expected(2, 5), CHATS, Verdict.FAIL, ["dataset-tokens"], "4 tokens"),
        (CHATS, Expected(2, 4), None, Verdict.WARN, ["dataset-untokenized"], ""),
    ],
)  # fmt: skip
def test_the_gate(tmp_path, records, expected, fixed, verdict, codes, words):
    found, told, what, _evidence = judged(tmp_path, records, expected, fixed)
    assert (found, told) == (verdict, codes)
    assert words in what


def test_the_evidence(tmp_path):
    evidence = judged(tmp_path, [*CHANGED, MORE], Expected(4, 12))[3]
    assert {name: evidence[name] for name in ("records", "tokens", "fixed_records", "changed", "appended", "duplicate_ids")} == {
        "records": 5, "tokens": 12, "fixed_records": 4, "changed": 1, "appended": 1, "duplicate_ids": 0,
    }  # fmt: skip
    assert evidence["digest"] != judged(tmp_path, [*RECORDS, MORE], Expected(), None)[3]["digest"]


def test_fixed_records_that_rot_fail_the_gate(tmp_path):
    judged(tmp_path, RECORDS, Expected())
    with open(tmp_path / "fixed" / dataset.BODY, "r+b") as handle:
        handle.write(b"\x63")
    assert judged(tmp_path, RECORDS, Expected(), None)[1] == ["fixed-records-broken"]
