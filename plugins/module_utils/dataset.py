# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The training data: read as a stream with bounded memory, and fixed as token ids and masks at the first run.

The fixed records live in one directory, by default `<state_dir>/dataset`: `fixed.json` (which tokenizer and template made them),
`fixed.bin` (per record its ids as little-endian int32, then its mask as bytes) and `fixed.jsonl` (one line a record: where it lies
and its digests). Both grow by appending only; a record counts once its line is whole.
"""

from __future__ import annotations

import codecs
import json
import mmap
import os
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, overload

from ansible_collections.relight.recovery.plugins.module_utils.durable import fsync_directory, write_json
from ansible_collections.relight.recovery.plugins.module_utils.records import (
    BadRecord,
    Raw,
    Whole,
    normalise,
    record_digest,
    token_digest,
)

SCHEMA = 1
READ_BYTES = 1 << 20
MAX_RECORD_BYTES = 256 << 20
HEADER, BODY, INDEX = "fixed.json", "fixed.bin", "fixed.jsonl"
_SPACE = " \t\r\n"


class BadDataset(Exception):
    """The data cannot be read as records; the message is one sentence."""


# --- reading -----------------------------------------------------------------------------------------------------------


class _Text:
    """A sliding window of decoded text over a file."""

    def __init__(self, handle: IO[bytes], path: str) -> None:
        self._handle = handle
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text = ""
        self.at = 0
        self.ended = False

    def more(self, nbytes: int = READ_BYTES) -> None:
        """Drop what was read, and read on. Raises BadDataset, OSError."""
        data = self._handle.read(nbytes)
        self.ended = not data
        try:
            self.text = self.text[self.at :] + self._decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            raise BadDataset(f"{self._path}: is not UTF-8 near byte {self._handle.tell() - len(data) + error.start}") from None
        self.at = 0

    def skip_space(self) -> str:
        """Go to the next character that is no white space and return it, or '' at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more()


def _cut_short(error: json.JSONDecodeError, text: str) -> bool:
    """Whether a value may only be unfinished: the error is at the end of what was read, or in a string that runs to it."""
    return error.pos >= len(text) - 12 or error.msg.startswith("Unterminated string")


def _value(window: _Text, decoder: json.JSONDecoder, where: str) -> Any:
    """The next JSON value, reading on as long as it is unfinished. The amount doubles, so the work stays linear."""
    while True:
        try:
            value, end = decoder.raw_decode(window.text, window.at)
        except json.JSONDecodeError as error:
            if not _cut_short(error, window.text):
                raise BadDataset(f"{where}: is not valid JSON ({error.msg.lower()})") from None
            if window.ended:
                raise BadDataset(f"{where}: the file ends within it; it is truncated") from None
            if len(window.text) - window.at > MAX_RECORD_BYTES:
                raise BadDataset(f"{where}: is longer than {MAX_RECORD_BYTES} characters or not valid JSON") from None
            window.more(max(READ_BYTES, len(window.text) - window.at))
            continue
        except RecursionError:
            raise BadDataset(f"{where}: is nested too deeply") from None
        window.at = end
        return value


def _array(window: _Text, path: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    window.at += 1
    position = 0
    if window.skip_space() == "]":
        window.at += 1
    else:
        while True:
            if not window.skip_space():
                raise BadDataset(f"{path}: ends after {position} records without closing its array; it is truncated")
            yield _value(window, decoder, f"{path}: record {position}")
            position += 1
            mark = window.skip_space()
            window.at += 1
            if mark == "]":
                break
            if mark != ",":
                told = "it is truncated" if not mark else f"{mark!r} follows record {position - 1}"
                raise BadDataset(f"{path}: ends after {position} records without closing its array; {told}")
    if window.skip_space():
        raise BadDataset(f"{path}: text follows the end of its array")


def _lines(handle: IO[bytes], path: str) -> Iterator[Any]:
    position = 0
    while True:
        line = handle.readline(MAX_RECORD_BYTES)
        if not line:
            return
        where = f"{path}: record {position}"
        if not line.endswith(b"\n") and len(line) == MAX_RECORD_BYTES:
            raise BadDataset(f"{where}: is longer than {MAX_RECORD_BYTES} bytes")
        if not line.strip(b" \t\r\n\xef\xbb\xbf"):
            continue
        try:
            yield json.loads(line.decode("utf-8-sig" if position == 0 else "utf-8"))
        except UnicodeDecodeError:
            raise BadDataset(f"{where}: is not UTF-8") from None
        except ValueError:
            told = "is not valid JSON" if line.endswith(b"\n") else "the file ends within it; it is truncated"
            raise BadDataset(f"{where}: {told}") from None
        except RecursionError:
            raise BadDataset(f"{where}: is nested too deeply") from None
        position += 1


def entries(path: str) -> Iterator[Any]:
    """The entries of a JSON array or a JSONL file, one at a time. Raises BadDataset, OSError."""
    with open(path, "rb") as handle:
        window = _Text(handle, path)
        first = window.skip_space()
        if not first:
            raise BadDataset(f"{path}: is empty")
        if first == "[":
            yield from _array(window, path)
            return
        if first != "{":
            raise BadDataset(f"{path}: is neither a JSON array nor lines of JSON objects")
        handle.seek(0)
        yield from _lines(handle, path)


def raw_records(path: str) -> Iterator[Raw]:
    """The records of a dataset in normal form, in order. Raises BadDataset for any that cannot be used, OSError."""
    for position, entry in enumerate(entries(path)):
        try:
            yield normalise(entry, position)
        except BadRecord as error:
            raise BadDataset(f"{path}: {error}") from None


# --- the fixed records -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """One fixed record. `source` is the digest of the dataset's entry that it was made of."""

    index: int
    id: str | None
    source: str
    tokens: int
    token_digest: str
    digest: str
    offset: int


@dataclass(frozen=True)
class Tokens:
    """The ids and the mask of one record."""

    ids: array[int]
    mask: bytes


def _index_lines(path: str) -> Iterator[tuple[int, Fixed]]:
    """Each whole line with the offset behind it, as far as the lines count on from 0 without a gap."""
    try:
        handle = open(path, "rb")
    except FileNotFoundError:
        return
    with handle:
        end, body = 0, 0
        for number, line in enumerate(handle):
            try:
                item = Fixed(**json.loads(line))
            except (ValueError, TypeError):
                return
            if not line.endswith(b"\n") or item.index != number or item.offset != body:
                return
            end += len(line)
            body += 5 * item.tokens
            yield end, item


class Items(Sequence[Fixed]):
    """The lines about the fixed records. Only where each ends is held in memory, 8 bytes a record."""

    def __init__(self, path: str, ends: array[int]) -> None:
        self._ends = ends
        with open(path, "rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if len(ends) > 1 else None

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Fixed: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Fixed]: ...

    def __getitem__(self, index: int | slice) -> Fixed | Sequence[Fixed]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self) or self._map is None:
            raise IndexError(f"no fixed record {index}")
        return Fixed(**json.loads(self._map[self._ends[index] : self._ends[index + 1]]))


class FixedRecords:
    """The fixed records for reading. Only the places of their lines are held in memory; the rest is read from mapped files."""

    def __init__(self, folder: str) -> None:
        """Open the fixed records of `folder`. Raises FileNotFoundError where none were made, BadDataset, OSError."""
        with open(os.path.join(folder, HEADER), "rb") as handle:
            self.header: dict[str, Any] = json.load(handle)
        if self.header.get("schema", 0) > SCHEMA:
            raise BadDataset(f"{folder}: was written by a newer Relight")
        self._handle = open(os.path.join(folder, BODY), "rb")
        size = os.fstat(self._handle.fileno()).st_size
        ends = array("Q", [0])
        for end, item in _index_lines(os.path.join(folder, INDEX)):
            if item.offset + 5 * item.tokens > size:
                break
            ends.append(end)
        self.items = Items(os.path.join(folder, INDEX), ends)
        self._map = mmap.mmap(self._handle.fileno(), 0, access=mmap.ACCESS_READ) if size else None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def tokens(self) -> int:
        return sum(item.tokens for item in self.items)

    @property
    def digest(self) -> str:
        """The digest of the whole: of the records' digests in order."""
        whole = Whole()
        for item in self.items:
            whole.add(item.digest)
        return whole.hexdigest()

    def read(self, index: int) -> Tokens:
        """Ids and mask of one record, checked against its digest. Raises BadDataset, IndexError."""
        item = self.items[index]
        if self._map is None:
            raise IndexError(f"no fixed record {index}")
        data = self._map[item.offset : item.offset + 5 * item.tokens]
        ids = array("i", data[: 4 * item.tokens])
        if sys.byteorder == "big":
            ids.byteswap()
        mask = data[4 * item.tokens :]
        if record_digest(ids, mask) != item.digest:
            raise BadDataset(f"fixed record {index}: its stored tokens do not match their digest")
        return Tokens(ids, mask)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        self._handle.close()

    def __enter__(self) -> FixedRecords:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class FixedWriter:
    """Appends fixed records, durable at each `flush` and at the end. What a kill left unfinished is cut off at the start."""

    def __init__(self, folder: str, header: dict[str, Any] | None = None) -> None:
        """Open `folder` for appending. The first writer's `header` is kept: tokenizer and template digests, dataset. Raises OSError."""
        os.makedirs(folder, exist_ok=True)
        if not os.path.exists(os.path.join(folder, HEADER)):
            write_json(os.path.join(folder, HEADER), {**(header or {}), "schema": SCHEMA})
        self._body = open(os.path.join(folder, BODY), "ab")
        self._index = open(os.path.join(folder, INDEX), "ab")
        size, end, self.count, self._offset = os.fstat(self._body.fileno()).st_size, 0, 0, 0
        for line_end, item in _index_lines(self._index.name):
            if item.offset + 5 * item.tokens > size:
                break
            end, self.count, self._offset = line_end, item.index + 1, item.offset + 5 * item.tokens
        self._index.truncate(end)
        self._body.truncate(self._offset)
        self._lines: list[bytes] = []
        self._pending = 0
        fsync_directory(folder)

    def append(self, raw: Raw, ids: Iterable[int], mask: Iterable[int]) -> Fixed:
        """Fix the next record. Raises OSError, BadDataset."""
        words, flags = array("i", ids), bytes(mask)
        if not words or len(words) != len(flags):
            raise BadDataset(f"record {raw.position}: {len(flags)} mask entries for {len(words)} token ids")
        item = Fixed(self.count, raw.id, raw.source, len(words), token_digest(words), record_digest(words, flags), self._offset)
        if sys.byteorder == "big":
            words.byteswap()
        self._body.write(words.tobytes() + flags)
        self._lines.append(json.dumps(item.__dict__, sort_keys=True).encode() + b"\n")
        self.count += 1
        self._offset += 5 * item.tokens
        self._pending += 1
        if self._pending >= 1000:
            self.flush()
        return item

    def flush(self) -> None:
        """Make what was appended durable: first the tokens, then the lines that vouch for them. Raises OSError."""
        self._body.flush()
        os.fsync(self._body.fileno())
        self._index.write(b"".join(self._lines))
        self._index.flush()
        os.fsync(self._index.fileno())
        self._lines.clear()
        self._pending = 0

    def close(self) -> None:
        self.flush()
        self._body.close()
        self._index.close()

    def __enter__(self) -> FixedWriter:
        return self

    def __exit__(self, kind: object, *_exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._body.close()
            self._index.close()
