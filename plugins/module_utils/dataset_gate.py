# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Is the training data whole, and is it what the fixed records were made of? Memory stays bounded whatever its size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from ansible_collections.relight.recovery.plugins.module_utils.dataset import HEADER, BadDataset, FixedRecords, raw_records
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.records import Raw, Whole

NAMED = 8


@dataclass(frozen=True)
class Expected:
    """What the inventory or the baseline says of the data; None where they say nothing. `digest` is of the first `digest_records`."""

    records: int | None = None
    tokens: int | None = None
    digest: str | None = None
    digest_records: int | None = None


@dataclass
class Some:
    """A count, and the first few that were counted."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(name)

    def __str__(self) -> str:
        return ", ".join(self.first) + (f" and {self.count - len(self.first)} more" if self.count > len(self.first) else "")


@dataclass
class Seen:
    """What was read. `tokens` are those of the first `expected` records, None where some are text that nobody has tokenized."""

    bytes: int = 0
    records: int = 0
    tokens: int | None = 0
    digest: str = ""
    first_digest: str | None = None  # of as many records as the baseline's digest covers
    broken: str = ""
    changed: Some = field(default_factory=Some)
    duplicates: Some = field(default_factory=Some)
    fixed: int | None = None
    fixed_broken: str = ""


class _Ids:
    """Which ids came before, at 8 bytes of digest each."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def again(self, name: str) -> bool:
        key = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        known = key in self._known
        self._known.add(key)
        return known


def _tokens_of(raw: Raw, fixed: FixedRecords | None, same: bool) -> int | None:
    if raw.input_ids is not None:
        return len(raw.input_ids)
    return fixed.items[raw.position].tokens if fixed is not None and same else None


def _read(path: str, expected: Expected, fixed: FixedRecords | None, seen: Seen) -> None:
    ids, whole = _Ids(), Whole()
    for raw in raw_records(path):
        known = fixed is not None and raw.position < len(fixed)
        same = known and fixed is not None and fixed.items[raw.position].source == raw.source
        if known and not same:
            seen.changed.add(str(raw.position))
        if raw.id is not None and ids.again(raw.id):
            seen.duplicates.add(f"{raw.id[:60]!r} of record {raw.position}")
        whole.add(raw.source)
        seen.records += 1
        if expected.digest and seen.records == expected.digest_records:
            seen.first_digest = whole.hexdigest()
        if expected.records is None or raw.position < expected.records:
            tokens = _tokens_of(raw, fixed, same)
            seen.tokens = None if tokens is None or seen.tokens is None else seen.tokens + tokens
    seen.digest = whole.hexdigest()


def look(path: str, baseline: str | None, expected: Expected) -> Seen:
    """Read the whole data as a stream, beside the fixed records where there are any. Raises OSError."""
    seen = Seen(bytes=os.path.getsize(path))
    fixed = FixedRecords(baseline) if baseline and os.path.exists(os.path.join(baseline, HEADER)) else None
    try:
        if fixed is not None:
            seen.fixed = len(fixed)
            _check_fixed(fixed, seen)
        _read(path, expected, fixed, seen)
    except BadDataset as error:
        seen.broken = str(error)
    finally:
        if fixed is not None:
            fixed.close()
    return seen


def _check_fixed(fixed: FixedRecords, seen: Seen) -> None:
    try:
        for index in range(len(fixed)):
            fixed.read(index)
    except BadDataset as error:
        seen.fixed_broken = str(error)


def judge(path: str, seen: Seen, expected: Expected) -> Gate:
    """Compare what was read with the inventory and with the fixed records."""
    evidence = {
        "bytes": seen.bytes,
        "records": seen.records,
        "tokens": seen.tokens,
        "digest": seen.digest,
        "fixed_records": seen.fixed,
        "changed": seen.changed.count,
        "duplicate_ids": seen.duplicates.count,
        "appended": max(0, seen.records - seen.fixed) if seen.fixed is not None else 0,
    }
    return Gate("dataset_check", evidence, list(_problems(path, seen, expected)))


def _problems(path: str, seen: Seen, expected: Expected) -> Iterator[Problem]:
    whole = "put the whole data back from its source"
    if seen.fixed_broken:
        yield Problem("fixed-records-broken", path, seen.fixed_broken, "put the state directory's dataset folder back from a copy")
    if seen.broken:
        yield Problem("dataset-broken", path, seen.broken[len(path) + 2 :] if seen.broken.startswith(f"{path}: ") else seen.broken, whole)
        return
    if seen.changed.count:
        what = f"{seen.changed.count} records changed since they were fixed at the first run: record {seen.changed}"
        yield Problem("dataset-changed", path, what, "put the old data back, or start a new store and state directory")
    if seen.fixed is not None and seen.records < seen.fixed:
        yield Problem("dataset-shortened", path, f"{seen.records} records, {seen.fixed} were fixed at the first run", whole)
    if seen.duplicates.count:
        what = f"{seen.duplicates.count} ids come twice: {seen.duplicates}"
        yield Problem("dataset-duplicate-id", path, what, "make ids unique, or leave them out")
    if expected.digest and not seen.changed.count:
        yield from _compare_digest(path, seen, expected, whole)
    yield from _compare(path, seen, expected, whole)


def _compare_digest(path: str, seen: Seen, expected: Expected, whole: str) -> Iterator[Problem]:
    """Against the baseline, whose digest covers the records that there were then: later ones may follow."""
    if seen.first_digest is None:
        if expected.records is None or seen.records >= expected.records:  # else the inventory's number tells it
            what = f"{seen.records} records, the baseline was made of {expected.digest_records}"
            yield Problem("dataset-count", path, what, whole)
    elif seen.first_digest != expected.digest:
        what = f"the digest of its first {expected.digest_records} records is {seen.first_digest}, the baseline says {expected.digest}"
        yield Problem("dataset-other", path, what, whole)


def _compare(path: str, seen: Seen, expected: Expected, whole: str) -> Iterator[Problem]:
    if expected.records is not None and seen.records < expected.records:
        yield Problem("dataset-count", path, f"{seen.records} records, the inventory expects {expected.records}", whole)
    elif expected.records is not None and seen.records > expected.records:
        what = f"{seen.records} records, {seen.records - expected.records} more than the inventory expects"
        yield Problem("dataset-appended", path, what, "set relight_dataset_records to the new number", Verdict.WARN)
    elif expected.records is None and expected.tokens is None and expected.digest is None and seen.fixed is None:
        what = "neither the inventory nor a first run says what it should hold"
        yield Problem("no-baseline", path, what, "set relight_dataset_records and relight_dataset_tokens", Verdict.WARN)
    if expected.tokens is None or (expected.records is not None and seen.records < expected.records):
        return
    if seen.tokens is None:
        if not seen.changed.count:
            what = "holds text that no run has tokenized yet, so its tokens cannot be counted"
            yield Problem("dataset-untokenized", path, what, "none needed: the first run fixes the tokens", Verdict.WARN)
    elif seen.tokens != expected.tokens:
        yield Problem("dataset-tokens", path, f"{seen.tokens} tokens, the inventory expects {expected.tokens}", whole)
