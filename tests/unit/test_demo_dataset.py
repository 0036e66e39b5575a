# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's training data: prose only, within the limits, the same every time, no sentence twice."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from demo import dataset

ROOT = Path(__file__).resolve().parents[2]
TOPIC = """\
The "pass" statement
********************

   pass_stmt ::= "pass"

A "pass" is a null operation and when it is executed, nothing happens. It is useful as a placeholder when a
statement is required syntactically.

* a list of things that are not prose although they end with a full stop, as sentences would do here.

Too short.
"""


def words(chat: dataset.Chat) -> int:
    """A tokenizer that is quick: four tokens a word."""
    return 4 * sum(len(message["content"].split()) for message in chat)


def test_only_prose_is_taken() -> None:
    assert dataset.sentences(TOPIC) == [
        'A "pass" is a null operation and when it is executed, nothing happens.',
        "It is useful as a placeholder when a statement is required syntactically.",
    ]


def test_real_topics_give_enough_records_within_the_limits() -> None:
    from pydoc_data.topics import topics

    records = dataset.chats(topics, words)
    assert len(records) == dataset.RECORDS >= 160
    assert records == dataset.chats(topics, words)
    lengths = [words(record["messages"]) for record in records]
    assert min(lengths) >= dataset.SHORTEST_TOKENS
    assert max(lengths) <= dataset.LONGEST_TOKENS
    assert len({record["id"] for record in records}) == len(records)
    assert all([message["role"] for message in record["messages"]] == ["system", "user", "assistant"] for record in records)
    for record in records:
        topic = record["id"].rpartition("-")[0]
        assert record["messages"][2]["content"] in " ".join(dataset.sentences(topics[topic]))


def test_too_little_text_is_said() -> None:
    with pytest.raises(SystemExit, match="gives only"):
        dataset.chats({"pass": TOPIC}, words, 10)


def test_the_inventory_names_the_right_restore_file() -> None:
    values = yaml.safe_load((ROOT / "inventory/demo/group_vars/relight/main.yml").read_text())
    (entry,) = values["relight_restore_files"]
    content = (ROOT / "demo/files/extract_by_hand.sh").read_bytes()
    assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    assert entry["src"].endswith("/demo/files/extract_by_hand.sh")
