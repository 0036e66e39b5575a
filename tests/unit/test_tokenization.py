# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Conversations to ids and masks, with real tokenizers of the transformers library and chat templates of several kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relight.extract import tokenization
from relight.extract.config import BadInput, Config
from relight.extract.prepare import fixed_records

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] + '<e>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<e>\\n' }}{% else %}{{ m['content'] + '<e>\\n' }}{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' }}"
    "{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}{{ '<e>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi you"},
    {"role": "assistant", "content": "oh hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory with a byte-level tokenizer, which every text survives, and the ChatML-like template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": ["<s>", "<e>"]})
    fast.chat_template = CHATML
    folder = tmp_path / "model"
    fast.save_pretrained(folder)
    return folder


def marked(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    """The text with what the assistant generates in capitals."""
    return "".join(tokenizer.decode([token]).upper() if flag else tokenizer.decode([token]) for token, flag in zip(ids, mask))


def test_prefix_rendering_marks_answers_with_their_end(model_dir: Path) -> None:
    tokenizer = tokenization.load_tokenizer(str(model_dir))
    ids, mask = tokenization.tokenize(TALK, tokenizer)
    assert len(ids) == len(mask)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    told = "<s>user\nhi you<e>\n<s>assistant\nOH HELLO<E>\n<s>user\nbye<e>\n<s>assistant\nSO LONG<E>\n"
    assert marked(tokenizer, ids, mask) == told


def test_the_template_s_own_markers_rule(model_dir: Path) -> None:
    tokenizer = tokenization.load_tokenizer(str(model_dir))
    tokenizer.chat_template = MARKED
    ids, mask = tokenization.tokenize(TALK, tokenizer)
    told = "<s>user\nhi you<e>\n<s>assistant\nOH HELLO<e>\n<s>user\nbye<e>\n<s>assistant\nSO LONG<e>\n"
    assert marked(tokenizer, ids, mask) == told


def test_without_offsets_the_mask_is_the_same(model_dir: Path) -> None:
    """Tokenizers written in Python have no offsets; they are counted to the borders."""
    tokenizer = tokenization.load_tokenizer(str(model_dir))
    fast = tokenization.tokenize(TALK, tokenizer)

    class Slow:
        is_fast = False
        chat_template = tokenizer.chat_template
        apply_chat_template = staticmethod(tokenizer.apply_chat_template)

        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            return {"input_ids": tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]}

    assert tokenization.tokenize(TALK, Slow()) == fast


@pytest.mark.parametrize(
    ("template", "talk", "sentence"),
    [
        (FORGETFUL, TALK, "rewrites message 1 when more follows"),
        (CHATML, TALK[:1], "nobody answers in it"),
        ("{{ raise_exception('roles must alternate') }}", TALK, "the chat template refuses it: roles must alternate"),
        (MARKED.replace("assistant", "nobody"), TALK, "no token of it is the assistant's"),
    ],
)
def test_what_cannot_be_marked_is_told(model_dir: Path, template: str, talk: list[dict[str, Any]], sentence: str) -> None:
    tokenizer = tokenization.load_tokenizer(str(model_dir))
    tokenizer.chat_template = template
    with pytest.raises(tokenization.Untokenizable, match=sentence):
        tokenization.tokenize(talk, tokenizer)


def test_a_model_without_a_template_is_refused(model_dir: Path) -> None:
    for path in model_dir.glob("chat_template*"):
        path.unlink()
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(tokenization.Untokenizable, match="has no chat template"):
        tokenization.load_tokenizer(str(model_dir))


def config_of(tmp_path: Path, model_dir: Path, data: list[Any]) -> Config:
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / "state").mkdir(exist_ok=True)
    state = str(tmp_path / "state")
    return Config(str(tmp_path / "data.json"), "store", "specforge", "http://x", "dump", [1, 2, 3], 8, state, model_dir=str(model_dir))


SHAREGPT = [{"from": "human", "value": "hi you"}, {"from": "gpt", "value": "oh hello"}]


def test_records_are_fixed_once_and_later_runs_use_those(tmp_path: Path, model_dir: Path) -> None:
    config = config_of(tmp_path, model_dir, [{"id": "a", "messages": TALK}, {"id": "b", "conversations": SHAREGPT}])
    tokenizer = tokenization.load_tokenizer(str(model_dir))
    with fixed_records(config) as fixed:
        first = [(list(fixed.read(index).ids), list(fixed.read(index).mask)) for index in range(len(fixed))]
        assert {"tokenizer_digest", "template_digest"} <= set(fixed.header)
    assert first == [tokenization.tokenize(TALK, tokenizer), tokenization.tokenize(TALK[:2], tokenizer)]
    for path in model_dir.iterdir():
        path.unlink()  # the tokenizer is not asked again
    with fixed_records(config) as fixed:
        assert [(list(fixed.read(index).ids), list(fixed.read(index).mask)) for index in range(len(fixed))] == first
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["dataset"]


def test_a_record_that_cannot_be_tokenized_fixes_none(tmp_path: Path, model_dir: Path) -> None:
    config = config_of(tmp_path, model_dir, [{"messages": TALK}, {"messages": TALK[:1]}])
    with pytest.raises(BadInput, match="record 1: nobody answers in it"):
        fixed_records(config)
    assert list((tmp_path / "state").iterdir()) == []


def test_a_record_whose_text_changed_is_named(tmp_path: Path, model_dir: Path) -> None:
    fixed_records(config_of(tmp_path, model_dir, [{"messages": TALK}, {"messages": TALK[:2]}])).close()
    config = config_of(tmp_path, model_dir, [{"messages": TALK}, {"messages": [TALK[0], {"role": "assistant", "content": "oh hallo"}]}])
    with pytest.raises(BadInput, match=r"1 of 2 records of .* changed since they were fixed: record 1;"):
        fixed_records(config)


def test_another_template_does_not_go_on_with_the_first_ones_records(tmp_path: Path, model_dir: Path) -> None:
    fixed_records(config_of(tmp_path, model_dir, [{"messages": TALK}])).close()
    tokenizer = tokenization.load_tokenizer(str(model_dir))
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(model_dir)
    config = config_of(tmp_path, model_dir, [{"messages": TALK}, {"messages": TALK[:2]}])
    with pytest.raises(BadInput, match=r"is not the one that made the first 1 records"):
        fixed_records(config)
