# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Conversations to token ids and loss masks, with the model's own chat template. The mask marks what the assistant says."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

_GENERATION = re.compile(r"\{%-?\+?\s*generation\b")


class Untokenizable(Exception):
    """A conversation cannot become ids with a mask; the message is for the operator, without the record's number."""


def load_tokenizer(model_dir: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory, without a look at the network. Raises Untokenizable."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch is meant
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises whatever the broken part raised
        raise Untokenizable(f"no tokenizer in {model_dir}: {_first_line(error)}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise Untokenizable(f"the tokenizer in {model_dir} has no chat template; give records with input_ids and loss_mask")
    return tokenizer


def tokenize(messages: Sequence[dict[str, Any]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids of the whole conversation, and 1 for each token that the assistant generates. Raises Untokenizable."""
    if not any(message["role"] == "assistant" for message in messages):
        raise Untokenizable("nobody answers in it: no message of the assistant")
    try:
        if _GENERATION.search(template_text(tokenizer)):
            ids, mask = _by_markers(messages, tokenizer)
        else:
            ids, mask = _by_prefix(messages, tokenizer)
    except Untokenizable:
        raise
    except Exception as error:  # a template raises jinja2 errors or its own
        raise Untokenizable(f"the chat template refuses it: {_first_line(error)}") from error
    if not any(mask):
        raise Untokenizable("no token of it is the assistant's")
    return ids, mask


def _by_markers(messages: Sequence[dict[str, Any]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Masks from the template's own generation blocks."""
    out = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return [int(i) for i in out["input_ids"]], [int(m) for m in out["assistant_masks"]]


def _by_prefix(messages: Sequence[dict[str, Any]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Masks by rendering: what each assistant turn adds after the prompt that calls for it, its end mark included."""
    whole = _render(messages, tokenizer)
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(messages[:number], tokenizer, add_generation_prompt=True)
        turn = whole if number == len(messages) - 1 else _render(messages[: number + 1], tokenizer)
        if not whole.startswith(turn) or not turn.startswith(prompt):
            raise Untokenizable(f"the chat template rewrites message {number} when more follows, so its tokens cannot be marked")
        spans.append((len(prompt), len(turn)))
    if getattr(tokenizer, "is_fast", False):
        return _mask_by_offsets(whole, spans, tokenizer)
    return _mask_by_lengths(whole, spans, tokenizer)


def _mask_by_offsets(text: str, spans: Sequence[tuple[int, int]], tokenizer: Any) -> tuple[list[int], list[int]]:
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(begin < end_span and end > begin_span for begin_span, end_span in spans)) for begin, end in out["offset_mapping"]]
    return [int(i) for i in out["input_ids"]], mask


def _mask_by_lengths(text: str, spans: Sequence[tuple[int, int]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """For tokenizers without offsets: the number of tokens before a boundary, where the ids agree up to there."""
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    mask = [0] * len(ids)
    for span in spans:
        bounds = []
        for cut in span:
            head = [int(i) for i in tokenizer(text[:cut], add_special_tokens=False)["input_ids"]]
            if head != ids[: len(head)]:
                raise Untokenizable("a token lies across the border of the assistant's turn")
            bounds.append(len(head))
        mask[bounds[0] : bounds[1]] = [1] * (bounds[1] - bounds[0])
    return ids, mask


def _render(messages: Sequence[dict[str, Any]], tokenizer: Any, add_generation_prompt: bool = False) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt))


def template_text(tokenizer: Any) -> str:
    """The chat template that counts where a tokenizer has several."""
    template = tokenizer.chat_template
    return str(template.get("default", "")) if isinstance(template, dict) else str(template)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
