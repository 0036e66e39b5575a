# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Secrets are taken out where text is read: command lines by pattern, environments by an allow-list."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

MASK = "[redacted]"
LONGEST = 4096
ENVIRONMENT = ("RELIGHT_", "NCCL_", "SGLANG_", "CUDA_")  # what may be read of a process's environment

_SECRET = (
    r"(?:api[-_]?key|access[-_]?key|private[-_]?key|secret|token|passw(?:or)?d|passwd|passphrase|pwd"
    r"|credentials?|auth(?:orization)?|bearer)"
)
# A name that speaks of a secret as one of its parts: --api-key, HF_TOKEN, admin-api-key; not --tokenizer-path or max_tokens.
# Camel case and run-together names (clientSecret, dbpassword) end in the word.
_NAME = re.compile(rf"(?i)(?:^|[-_.]|\b)(?:[a-z0-9]*){_SECRET}(?:$|[-_.])")
_ASSIGNED = re.compile(rf"(?i)([\w.-]*?{_SECRET}(?:[-_.]\w+)*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|(?:bearer |basic )?[^\s,;&\"'}}]+)")
_FLAGGED = re.compile(rf"(?i)((?:^|[\s'\"(\[,=])--?(?:[\w.]+-)*{_SECRET}(?:-\w+)*[\"']?,?\s+)(\"[^\"]*\"|'[^']*'|[^\s-]\S*)")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{6,}|sk-[A-Za-z0-9_-]{6,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}"
    r"|xox[abprs]-[\w-]{8,}|AKIA[0-9A-Z]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|nvapi-[\w-]{8,})"
)
_URL = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@:]*:[^\s/@]+@", re.IGNORECASE)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{6,}")


def text(value: str) -> str:
    """The text without what looks like a secret, cut at a length that keeps the patterns quick."""
    value = value[:LONGEST]
    value = _URL.sub(rf"\1{MASK}@", value)
    value = _BEARER.sub(rf"\1\2{MASK}", value)
    value = _SHAPES.sub(MASK, value)
    value = _FLAGGED.sub(rf"\1{MASK}", value)
    return _ASSIGNED.sub(rf"\1{MASK}", value)


def words(argv: Iterable[str]) -> list[str]:
    """A command's words, with the value of every flag and variable that names a secret masked."""
    out: list[str] = []
    secret_next = False
    for word in argv:
        if secret_next and not word.startswith("--"):
            out.append(MASK)
            secret_next = False
            continue
        name, equals, _value = word.partition("=")
        flag = word.startswith("-") and " " not in name
        names_secret = (flag or name.isidentifier()) and bool(_NAME.search(name.lstrip("-")))
        secret_next = flag and names_secret and not equals
        out.append(f"{name}={MASK}" if names_secret and equals else word if secret_next else text(word))
    return out


def command(argv: Iterable[str], limit: int = 240) -> str:
    """One line for people: words masked, quoted, and cut at `limit` characters."""
    line = " ".join(shlex.quote(word) if word != MASK else word for word in words(argv)).replace("\n", " ")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def environment(values: Mapping[str, str], prefixes: tuple[str, ...] = ENVIRONMENT) -> dict[str, str]:
    """The variables on the allow-list; of those, one whose name speaks of a secret is masked all the same."""
    kept = {name: value for name, value in values.items() if name.startswith(prefixes)}
    return {name: MASK if _NAME.search(name) else text(value) for name, value in kept.items()}
