#!/usr/bin/env python3
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Make the demo's training data: chats about Python, answered in the words of CPython's own documentation.

The text is real English prose, read at run time from pydoc_data.topics, which every CPython carries. Each chat is 40 to 200
tokens long by the model's own tokenizer and chat template, so the interpreter that runs this needs transformers:
`python demo/dataset.py MODEL OUT`. The same CPython and the same model give the same bytes. OUT appears by a rename.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORDS = 168
SHORTEST_TOKENS, LONGEST_TOKENS = 40, 200
# How long the chats are to be, in turn: mostly short, so that two CPUs get through, and some as long as the limit allows.
TARGETS_TOKENS = (48, 64, 56, 88, 50, 72, 60, 120, 52, 66, 58, 190)
SYSTEM = "You explain Python."
QUESTIONS = (
    "What is there to know about {topic}?",
    "Tell me more about {topic}.",
    "And what else about {topic}?",
    "Go on about {topic}.",
    "Is there more on {topic}?",
)

Chat = list[dict[str, str]]


def paragraphs(text: str) -> Iterator[str]:
    """The prose of a topic, one paragraph at a time: no headings, grammar, code or lists."""
    for block in text.split("\n\n"):
        lines = block.splitlines()
        prose = all(line[:1].strip() for line in lines) and not re.search(r"^[*=~-]{3,}$", block, re.MULTILINE)
        joined = " ".join(lines)
        if prose and joined[:1].isupper() and joined.endswith(".") and len(joined.split()) >= 12:
            yield joined


def sentences(text: str) -> list[str]:
    """All prose sentences of a topic, in order."""
    return [s for paragraph in paragraphs(text) for s in re.split(r"(?<=[.!?]) +(?=[A-Z\"])", paragraph)]


def chat(topic: str, turn: int, answer: str) -> Chat:
    """One record's messages."""
    question = QUESTIONS[turn].format(topic=topic.replace("-", " "))
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def chats(topics: dict[str, str], tokens_in: Callable[[Chat], int], wanted: int = RECORDS) -> list[dict[str, Any]]:
    """The records: round after round, each topic gives one chat out of its next sentences, until there are enough."""
    left = {topic: sentences(text) for topic, text in sorted(topics.items())}
    records: list[dict[str, Any]] = []
    for turn in range(len(QUESTIONS)):
        for topic, prose in left.items():
            target = TARGETS_TOKENS[len(records) % len(TARGETS_TOKENS)]
            answer = ""
            while prose:
                longer = f"{answer} {prose[0]}".strip()
                if answer and tokens_in(chat(topic, turn, longer)) > target:
                    break
                answer = longer
                prose.pop(0)
            if answer and SHORTEST_TOKENS <= tokens_in(chat(topic, turn, answer)) <= LONGEST_TOKENS:
                records.append({"id": f"{topic}-{turn}", "messages": chat(topic, turn, answer)})
            if len(records) == wanted:
                return records
    raise SystemExit(f"demo dataset: this CPython's documentation gives only {len(records)} of {wanted} chats")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo's training data out of CPython's own documentation.")
    parser.add_argument("model", type=Path, help="the directory of the model, for its tokenizer and chat template")
    parser.add_argument("out", type=Path, help="the JSON file to make")
    parser.add_argument("--records", type=int, default=RECORDS, help="how many chats (%(default)s)")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(arguments.model), local_files_only=True)

    def tokens_in(messages: Chat) -> int:
        return len(tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"])

    records = chats(topics, tokens_in, arguments.records)
    lengths = sorted(tokens_in(record["messages"]) for record in records)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = arguments.out.with_name(f".{arguments.out.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(records, handle, indent=1, ensure_ascii=False)
        handle.flush()
        os.fsync(handle.fileno())
    os.rename(temporary, arguments.out)
    summary = {"records": len(records), "tokens": sum(lengths), "shortest": lengths[0], "longest": lengths[-1]}
    print(json.dumps({**summary, "median": lengths[len(lengths) // 2]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
