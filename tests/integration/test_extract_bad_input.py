# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Bad input to the extraction client: one sentence, exit 2, nothing changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from tests.extraction import Work, records


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    place = Work(tmp_path, records(6))
    place.start_server()
    yield place
    place.close()


IGNORED = ("progress.json", "port", ".relight-lock")


def listing(path: Path) -> dict[str, Any]:
    """Every file with its bytes, without what a client may always write: its progress, its name in the lock."""
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file() and file.name not in IGNORED}


def refused(work: Work, sentence: str, **changes: Any) -> None:
    work.write_config(**changes)
    before = listing(work.path)
    code, said = work.run(**changes)
    lines = [line for line in said.splitlines() if not line.startswith("starting: ")]
    assert (code, len(lines)) == (2, 1)
    assert sentence in lines[0]
    assert listing(work.path) == before
    assert not work.store.exists()
    assert work.seen()["requests"] == []


def data(work: Work, text: str) -> None:
    (work.path / "data.json").write_text(text)


ONE = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("[]", "holds no records"),
        (json.dumps([ONE])[:-5], "truncated"),
        (json.dumps([ONE, {"id": "x"}]), "record 1: has neither input_ids nor messages"),
        (json.dumps([{"input_ids": [], "loss_mask": []}]), "record 0: input_ids is not a list of token ids"),
        (json.dumps([{"input_ids": ["a"], "loss_mask": [1]}]), "record 0: input_ids is not a list of token ids"),
        (json.dumps([{"input_ids": [1, 2], "loss_mask": [1]}]), "record 0: loss_mask has 1 entries for 2 token ids"),
        (json.dumps([{"input_ids": [1, 2]}]), "record 0: input_ids without a loss_mask"),
        (json.dumps([ONE, 7]), "record 1: is not an object"),
        (json.dumps([{"messages": [{"role": "user", "content": "hi"}]}]), "names no model_dir"),
    ],
)
def test_records_that_cannot_be_used(work: Work, text: str, sentence: str) -> None:
    data(work, text)
    refused(work, sentence)


def test_a_model_directory_without_a_tokenizer(work: Work) -> None:
    data(work, json.dumps([{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]))
    refused(work, f"no tokenizer in {work.dump}", model_dir=str(work.dump))


def test_a_records_file_that_is_not_there(work: Work) -> None:
    refused(work, "cannot read the records /nowhere/data.json: No such file", dataset="/nowhere/data.json")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layout": "tarballs"}, "store layout 'tarballs' is not one of: modelopt, specforge, speculators"),
        ({"dump_dir": "/nowhere/dump"}, "the dump directory /nowhere/dump is missing"),
        ({"store": "/nowhere/store"}, "the directory of the store /nowhere/store is missing"),
        ({"layers": [1, 2]}, "must be three layer numbers"),
        ({"layers": "1,2,3"}, "layers in"),
        ({"hidden_size": "16"}, "hidden_size in"),
        ({"concurrency": 0}, "concurrency in"),
        ({"server": "localhost:3"}, "must be an http:// address"),
        ({"max_new_tokens": 5}, "max_new_tokens in"),
    ],
)
def test_configurations_that_cannot_be_used(work: Work, changes: dict[str, Any], sentence: str) -> None:
    refused(work, sentence, **changes)


def test_a_configuration_that_is_not_there_or_not_whole(work: Work) -> None:
    path = work.write_config()
    del work.config["store"]
    refused(work, f"the configuration {path} lacks store")


def change_one(entries: list[dict[str, Any]]) -> None:
    entries[2]["input_ids"][0] += 1


def change_mask(entries: list[dict[str, Any]]) -> None:
    entries[2]["loss_mask"][0] = 1


def drop_last(entries: list[dict[str, Any]]) -> None:
    entries.pop()


def swap(entries: list[dict[str, Any]]) -> None:
    entries[1], entries[2] = entries[2], entries[1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (change_one, "1 of 6 records of {} changed since they were fixed: record 2;"),
        (change_mask, "1 of 6 records of {} changed since they were fixed: record 2;"),
        (swap, "2 of 6 records of {} changed since they were fixed: record 1, 2;"),
        (drop_last, "{} ends after 5 records, 6 were fixed"),
    ],
)
def test_records_that_changed_since_they_were_fixed(work: Work, change: Callable[[list[dict[str, Any]]], None], sentence: str) -> None:
    assert work.run()[0] == 0
    sent = len(work.seen()["requests"])
    os.unlink(work.place().path_of(3))
    change(work.data)
    data(work, json.dumps(work.data))
    before = listing(work.path)
    code, said = work.run()
    assert code == 2
    assert sentence.format(work.config["dataset"]) in said
    assert listing(work.path) == before
    assert len(work.seen()["requests"]) == sent


def test_records_that_were_appended_extend_the_run(work: Work) -> None:
    assert work.run()[0] == 0
    tokens = work.seen()["tokens"]
    work.data = records(9)
    data(work, "\n".join(json.dumps(record) for record in work.data) + "\n")
    assert work.run()[0] == 0
    assert (work.wrong(), len(work.indices())) == ([], 9)
    assert work.seen()["tokens"] - tokens == sum(len(record["input_ids"]) for record in work.data[6:])


@pytest.mark.parametrize(
    ("identity", "sentence"),
    [({"dtype": "float32", "weights": "w2"}, 'weights was "w1", is "w2"'), ({"dtype": "bfloat16", "weights": "w1"}, "dtype was")],
)
def test_a_store_of_another_identity(work: Work, identity: dict[str, Any], sentence: str) -> None:
    assert work.run()[0] == 0
    os.unlink(work.place().path_of(3))
    before = listing(work.store)
    code, said = work.run(identity=identity)
    assert (code, listing(work.store)) == (2, before)
    assert sentence in said


def test_a_store_of_other_records(work: Work, tmp_path: Path) -> None:
    assert work.run()[0] == 0
    data(work, json.dumps(records(6, seed=2)))
    other = tmp_path / "other-state"
    other.mkdir()
    before = listing(work.store)
    code, said = work.run(state_dir=str(other))
    assert (code, listing(work.store)) == (2, before)
    assert "6 samples" in said
    assert "are in doubt" in said
