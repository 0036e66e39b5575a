# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The configuration of an extraction: one JSON file, judged whole before anything is touched."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

# Exit codes of the client.
DONE, BAD_INPUT, STOPPED, GAVE_UP, SOME_GIVEN_UP = 0, 2, 3, 4, 5
FOLDER = "dataset"  # where the fixed records lie in the state directory


class BadInput(Exception):
    """The operator's input cannot be used; the message is one sentence for them."""


class GiveUp(Exception):
    """The run cannot go on; the message says what, where and what to do."""


@dataclass(frozen=True)
class Config:
    """See `<state_dir>/extract.json`. Seconds are limits; the client ends with a sentence beyond them."""

    dataset: str
    store: str
    layout: str
    server: str
    dump_dir: str
    layers: list[int]
    hidden_size: int
    state_dir: str
    model_dir: str = ""
    concurrency: int = 8
    max_bytes_in_flight: int = 4 << 30
    identity: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False  # a tokenizer that is code in the model directory, such as Kimi's
    max_new_tokens: int = 0
    tries: int = 3
    request_seconds: float = 600.0  # without any sample arriving, and a quarter of what one request may take
    dump_seconds: float = 60.0  # between the server's answer and its dump
    server_seconds: float = 1800.0  # how long a server may be away
    room_seconds: float = 1800.0  # how long the store or the dump directory may be without room
    reserve_bytes: int = 256 << 20  # free space in the store that the client leaves alone
    drain_seconds: float = 30.0  # for what is in flight when SIGTERM comes
    retry_seconds: float = 1.0  # the first back-off; it doubles up to 30 times this
    writers: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states in the identity's dtype; four bytes a number, the most there is, where it names none."""
        return (len(self.layers) + 1) * self.hidden_size * (2 if self.identity.get("dtype") in ("bfloat16", "float16") else 4)


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list[int]": (list,),
    "dict[str, Any]": (dict,),
}


def load(path: str) -> Config:
    """Read and judge a configuration. Raises BadInput."""
    try:
        with open(path, encoding="utf-8") as handle:
            given = json.load(handle)
    except OSError as error:
        raise BadInput(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInput(f"the configuration {path} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise BadInput(f"the configuration {path} is not a JSON object")
    known = {entry.name: entry for entry in fields(Config)}
    values: dict[str, Any] = {}
    for name, entry in known.items():
        if name in given:
            values[name] = _typed(path, name, given[name], str(entry.type))
    needed = ("dataset", "store", "layout", "server", "dump_dir", "layers", "hidden_size", "state_dir")
    missing = [name for name in needed if name not in values]
    if missing:
        raise BadInput(f"the configuration {path} lacks {', '.join(missing)}")
    config = Config(**values)
    _judge(path, config)
    return config


def _typed(path: str, name: str, value: Any, kind: str) -> Any:
    wanted = _KINDS[kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise BadInput(f"{name} in {path} must be {kind.split('[')[0]}, not {value!r}")
    return value


def _judge(path: str, config: Config) -> None:
    if not all(type(layer) is int and layer >= 0 for layer in config.layers) or len(set(config.layers)) != 3:
        raise BadInput(f"layers in {path} must be three layer numbers, not {config.layers!r}")
    for name in ("hidden_size", "concurrency", "max_bytes_in_flight", "tries", "writers"):
        if getattr(config, name) < 1:
            raise BadInput(f"{name} in {path} must be at least 1")
    for name in ("request_seconds", "dump_seconds", "server_seconds", "room_seconds", "drain_seconds", "retry_seconds", "reserve_bytes"):
        if getattr(config, name) < 0:
            raise BadInput(f"{name} in {path} must not be negative")
    if config.max_new_tokens not in (0, 1):
        raise BadInput(f"max_new_tokens in {path} must be 0 or 1")
    parts = urlsplit(config.server)
    if parts.scheme != "http" or not parts.hostname:
        raise BadInput(f"server in {path} must be an http:// address, not {config.server!r}")
    if not os.path.isdir(config.dump_dir):
        raise BadInput(f"the dump directory {config.dump_dir} is missing: is the host prepared and its tmpfs mounted?")
    if not os.access(config.dump_dir, os.R_OK | os.W_OK | os.X_OK):
        raise BadInput(f"the dump directory {config.dump_dir} is not ours to read and empty")
