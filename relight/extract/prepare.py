# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Records to fixed ids and masks: made once, durably, before the first sample; compared with the dataset ever after."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils.dataset import BadDataset, Fixed, FixedRecords, FixedWriter, raw_records
from ansible_collections.relight.recovery.plugins.module_utils.durable import fsync_directory
from ansible_collections.relight.recovery.plugins.module_utils.records import Raw

from relight.extract.config import FOLDER, BadInput, Config
from relight.extract.tokenization import Untokenizable, load_tokenizer, template_text, tokenize

NAMED = 8  # changed records that a sentence names
_TOKENIZER_FILES = re.compile(
    r"(tokenizer|tokenization|vocab|merges|special_tokens|added_tokens|chat_template).*|.*\.(tiktoken|model|jinja)"
)


class Tokenizing:
    """The model's tokenizer, loaded when the first record with messages asks for it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.loaded: Any = None

    @property
    def tokenizer(self) -> Any:
        if self.loaded is None:
            if not self.config.model_dir:
                raise BadInput(f"{self.config.dataset} holds messages, and the configuration names no model_dir with their tokenizer")
            self.loaded = load_tokenizer(self.config.model_dir, self.config.trust_remote_code)
        return self.loaded

    def tokens_of(self, raw: Raw) -> tuple[list[int], list[int]]:
        """Raises BadInput that names the record."""
        if raw.input_ids is not None and raw.loss_mask is not None:
            return list(raw.input_ids), list(raw.loss_mask)
        try:
            return tokenize(raw.messages or (), self.tokenizer)
        except Untokenizable as error:
            raise BadInput(f"{self.config.dataset}: record {raw.position}: {error}") from error

    def header(self) -> dict[str, Any]:
        """What the ids depend on beside the records."""
        if self.loaded is None:
            return {"dataset": self.config.dataset}
        return {"dataset": self.config.dataset, **digests(self.config.model_dir, self.loaded)}


def digests(model_dir: str, tokenizer: Any) -> dict[str, str]:
    """Digests of the tokenizer's files and of its chat template."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(name for name in os.listdir(model_dir) if _TOKENIZER_FILES.fullmatch(name)):
        with open(os.path.join(model_dir, name), "rb") as handle:
            state.update(name.encode() + b"\0" + hashlib.blake2b(handle.read()).digest())
    template = hashlib.blake2b(template_text(tokenizer).encode(), digest_size=16)
    return {"tokenizer_digest": state.hexdigest(), "template_digest": template.hexdigest()}


def fixed_records(config: Config) -> FixedRecords:
    """The fixed records of this configuration, made where they were not. Raises BadInput; then nothing was changed."""
    folder = os.path.join(config.state_dir, FOLDER)
    try:
        if not os.path.exists(folder):
            _fix_all(config, folder)
            return FixedRecords(folder)
        fixed = FixedRecords(folder)
        more = _compare(config, fixed)
        if more:
            fixed.close()
            _fix_more(config, folder, len(fixed), fixed.header)
            fixed = FixedRecords(folder)
        return fixed
    except BadDataset as error:
        raise BadInput(str(error)) from error
    except Untokenizable as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        raise BadInput(f"cannot fix the records of {config.dataset} in {folder}: {error}") from error


def _raw(config: Config) -> Iterator[Raw]:
    """Raises BadInput where the dataset cannot be opened or read."""
    try:
        yield from raw_records(config.dataset)
    except OSError as error:
        raise BadInput(f"cannot read the records {config.dataset}: {error.strerror or error}") from error


def _fix_all(config: Config, folder: str) -> None:
    """Under a name that does not count until all is durable. Raises BadInput, BadDataset, OSError."""
    if sum(1 for _ in _raw(config)) == 0:  # judges every record before the first byte is written
        raise BadInput(f"{config.dataset} holds no records")
    partial = f"{folder}.partial-{os.getpid()}"
    for old in glob.glob(f"{glob.escape(folder)}.partial-*"):
        if not os.path.exists(f"/proc/{old.rpartition('-')[2]}"):
            shutil.rmtree(old, ignore_errors=True)
    tokenizing = Tokenizing(config)
    try:
        first = next(raw for raw in _raw(config))
        tokenizing.tokens_of(first)  # loads the tokenizer, so that the header can name it
        with FixedWriter(partial, tokenizing.header()) as writer:
            for raw in _raw(config):
                writer.append(raw, *tokenizing.tokens_of(raw))
        if not os.path.exists(folder):  # another client may have been faster; the store's lock decides between us
            os.rename(partial, folder)
            fsync_directory(config.state_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _compare(config: Config, fixed: FixedRecords) -> int:
    """How many records follow the fixed ones. Raises BadInput that names those that changed or are gone."""
    changed: list[int] = []
    count = 0
    for raw in _raw(config):
        if count < len(fixed) and not _same(raw, fixed.items[count]):
            changed.append(count)
        count += 1
    if changed:
        names = ", ".join(str(index) for index in changed[:NAMED]) + (" and others" if len(changed) > NAMED else "")
        raise BadInput(
            f"{len(changed)} of {len(fixed)} records of {config.dataset} changed since they were fixed: record {names}; "
            "put the old dataset back, or start a new store and state directory"
        )
    if count < len(fixed):
        raise BadInput(f"{config.dataset} ends after {count} records, {len(fixed)} were fixed; put the whole dataset back")
    return count - len(fixed)


def _same(raw: Raw, fixed: Fixed) -> bool:
    return raw.source == fixed.source and raw.id == fixed.id


def _fix_more(config: Config, folder: str, known: int, header: dict[str, Any]) -> None:
    """Append what the dataset gained. Raises BadInput, BadDataset, OSError."""
    tokenizing = Tokenizing(config)
    with FixedWriter(folder) as writer:
        for raw in _raw(config):
            if raw.position < known:
                continue
            ids, mask = tokenizing.tokens_of(raw)
            told = tokenizing.header()
            for name in ("tokenizer_digest", "template_digest"):
                if name in told and header.get(name, told[name]) != told[name]:
                    raise BadInput(f"the {name.split('_')[0]} in {config.model_dir} is not the one that made the first {known} records")
            writer.append(raw, ids, mask)
