# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Which records are meant: `18000-20000,5,7` on the command line, or a file of such words. Both ends of a range belong to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from relight.extract.config import BadInput

_WORD = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?\Z", re.ASCII)
MOST = 100_000_000  # records that a selection may name


def parse(text: str, where: str = "--only") -> frozenset[int]:
    """The indices that words between commas and white space name. Raises BadInput."""
    chosen: set[int] = set()
    for word in re.split(r"[\s,]+", text.strip()):
        match = _WORD.match(word)
        first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (0, -1)
        if last < first:
            raise BadInput(f"{where}: {word[:40]!r} is neither an index nor a range such as 18000-20000")
        if len(chosen) + last - first >= MOST:
            raise BadInput(f"{where}: {word[:40]!r} names too many records")
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def read(path: str) -> frozenset[int]:
    """The indices in a file: a JSON list, or words as above. Raises BadInput."""
    try:
        with open(path, encoding="utf-8") as handle:
            text = handle.read()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the indices in {path}: {getattr(error, 'strerror', None) or error}") from error
    if text.lstrip().startswith("["):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise BadInput(f"the indices in {path} are not JSON: {error}") from error
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
            raise BadInput(f"the JSON list in {path} holds something other than indices")
        return frozenset(value)
    return parse(text, path)


def chosen(only: str | None, indices: str | None) -> frozenset[int] | None:
    """What `--only` and `--indices` name together; None where neither is given. Raises BadInput."""
    if only is None and indices is None:
        return None
    given: Iterable[frozenset[int]] = [parse(only)] if only is not None else []
    return frozenset().union(*given, *([read(indices)] if indices is not None else []))
