# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Layouts of a sample store: where sample i lives, in which form it is written, and what a file says of itself.

Each is the form that a trainer reads, to the byte, also where its own tools wrote it. Standard library only, Python 3.9 and newer.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Callable, Protocol

from ansible_collections.relight.recovery.plugins.module_utils import ckpt, records, safetensors
from ansible_collections.relight.recovery.plugins.module_utils.dataset import HEADER, FixedRecords

STATES = ("float32", "float16", "bfloat16")
PRE, POST = "pre", "post"  # the final state before or after the model's last norm
SURROGATE = "pre-surrogate"  # made of a post-norm state: right up to one factor a token, which no norm keeps
ROWS = 256  # tokens that are put in order at once


class UnknownLayout(Exception):
    """No layout of this name; the message is one sentence."""


class Unsupported(Exception):
    """A whole file of a kind that is known and cannot be judged yet; the message is a clause about it."""


@dataclass(frozen=True)
class Sample:
    """What is to be stored, in the store's own words: input_ids [L], loss_mask [L], hidden_state [1,L,H], aux_hidden_state [1,L,nH].

    `extra` are the strings kept beside the tensors (layers, norm, dtype).
    """

    index: int
    tokens: int
    token_digest: str
    run: str
    tensors: Mapping[str, ckpt.TensorBytes]
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, str]:
        """All strings that a file keeps of its origin."""
        return {**self.extra, "token_digest": self.token_digest, "run": self.run}


@dataclass(frozen=True)
class Rows:
    """Where a state lies: a row of `row_bytes` for each token, `stride` bytes from one to the next."""

    offset: int
    count: int
    row_bytes: int
    stride: int


@dataclass(frozen=True)
class Part:
    """A stretch of a file: with the checksum that the format keeps of it, and with the dtype where it is nothing but states."""

    name: str
    offset: int
    nbytes: int
    crc: int | None = None
    states: str | None = None


@dataclass(frozen=True)
class Seen:
    """What a file says of itself by its structure, ids and mask, without its states.

    `mask` is a byte a token, and None where the format keeps none; `norm` is the file's own word, None where its format has none.
    """

    bytes: int
    mtime: float
    tokens: int
    token_digest: str
    record_digest: str | None
    hidden_size: int
    dtype: str
    extra: Mapping[str, str]
    parts: tuple[Part, ...]
    ids: ckpt.Buffer
    mask: ckpt.Buffer | None
    final: Rows
    aux: Rows
    norm: str | None = None

    @property
    def checked(self) -> bool:
        """Whether the format itself keeps checksums of the states."""
        return all(part.crc is not None for part in self.parts if part.states)


class Layout(Protocol):
    """Where samples live and in which form. Paths are relative to the store and written with forward slashes.

    `norms` are the final states that it can hold, the usual one first; `blocks` how many auxiliary layers, None for any number;
    `walked` whether its trainer's reader lists the whole tree; `by_record` whether names come from the records' ids.
    """

    name: str
    suffixes: tuple[str, ...]
    norms: tuple[str, ...]
    blocks: int | None
    flat: bool
    walked: bool
    by_record: bool

    def path_of(self, index: int) -> str: ...

    def index_of(self, path: str) -> int | None: ...

    def is_shard(self, name: str) -> bool: ...

    def write(self, sink: ckpt.Sink, sample: Sample) -> None: ...

    def look(self, path: str) -> Seen: ...


# --- what formats have in common ---------------------------------------------------------------------------------------


def _words(data: bytes, dtype: str) -> array[int]:
    """Integers of any width. Raises ckpt.Strange for what are none."""
    code = {"int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B", "bool": "B"}.get(dtype)
    if code is None:
        raise ckpt.Strange(f"has token ids or a mask of the type {dtype}")
    words: array[int] = array(code, data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _bytes_of(handle: IO[bytes], offset: int, nbytes: int) -> bytes:
    return b"".join(ckpt.chunks(handle, offset, nbytes))


def _flags(words: array[int]) -> bytes:
    """A byte a token; empty, and so like no record's mask, where there is another number than 0 and 1."""
    return bytes(words.tolist()) if all(word in (0, 1) for word in words) else b""


@dataclass(frozen=True)
class _Found:
    """What a layout's look finds in its own way."""

    size: int
    mtime: float
    ids: array[int]
    mask: array[int] | None
    dtype: str
    final: Rows
    aux: Rows
    parts: tuple[Part, ...]
    extra: Mapping[str, str]
    norm: str | None = None


def _seen(found: _Found) -> Seen:
    ids = records.id_bytes(found.ids)
    mask = None if found.mask is None else _flags(found.mask)
    return Seen(
        bytes=found.size,
        mtime=found.mtime,
        tokens=len(found.ids),
        token_digest=records.token_digest_of_bytes(ids),
        record_digest=None if mask is None else records.record_digest(found.ids, mask),
        hidden_size=found.final.row_bytes // ckpt.ITEM_BYTES[found.dtype],
        dtype=found.dtype,
        extra=found.extra,
        parts=found.parts,
        ids=ids,
        mask=mask,
        final=found.final,
        aux=found.aux,
        norm=found.norm,
    )


def _judge_states(kinds: tuple[str, str]) -> None:
    """Raises ckpt.Strange where the final and the auxiliary states are not of one type that states have."""
    if kinds[0] != kinds[1] or kinds[0] not in STATES:
        raise ckpt.Strange(f"has states of the types {kinds[0]} and {kinds[1]}")


def _archive_parts(header: ckpt.Header, states: tuple[ckpt.Tensor, ...]) -> tuple[Part, ...]:
    """The entries of an archive. One counts as states where a state fills it, or where it is laid out in rows within it."""
    kinds = {
        tensor.entry: tensor.dtype
        for tensor in states
        for entry in header.entries
        if entry.name == tensor.entry and (tensor.stride or (tensor.offset, tensor.nbytes) == (entry.offset, entry.nbytes))
    }
    return tuple(Part(entry.name, entry.offset, entry.nbytes, entry.crc, kinds.get(entry.name)) for entry in header.entries)


def _rows(tensor: ckpt.Tensor) -> Rows:
    """A tensor of [.., L, W] by its rows."""
    count, width = tensor.shape[-2], tensor.shape[-1] * ckpt.ITEM_BYTES[tensor.dtype]
    return Rows(tensor.offset, count, width, tensor.stride or width)


def broken_parts(path: str, seen: Seen) -> tuple[str, ...]:
    """The parts whose bytes do not match the format's checksum. Raises ckpt.Torn, OSError."""
    broken = []
    with open(path, "rb") as handle:
        for part in seen.parts:
            if part.crc is not None:
                crc = 0
                for piece in ckpt.chunks(handle, part.offset, part.nbytes):
                    crc = zlib.crc32(piece, crc)
                if crc != part.crc:
                    broken.append(part.name)
    return tuple(broken)


# --- specforge ---------------------------------------------------------------------------------------------------------


class SpecForge:
    """rows_{g}-{g+2000}/data_{i}.ckpt, a torch.save file each, as SpecForge's prepare_hidden_states.py lays them out."""

    name = "specforge"
    suffixes: tuple[str, ...] = (".ckpt", ".ckpt.gz")
    norms: tuple[str, ...] = (POST,)  # its trainer applies the head alone
    blocks: int | None = 3
    flat = False
    walked = True
    by_record = False
    group = 2000
    STATES = ("hidden_state", "aux_hidden_state")
    _PATH = re.compile(r"rows_(\d{1,12})-(\d{1,12})/data_(\d{1,12})\.ckpt\Z", re.ASCII)
    _SHARD = re.compile(r"rows_\d{1,12}-\d{1,12}\Z", re.ASCII)

    def path_of(self, index: int) -> str:
        first = index // self.group * self.group
        return f"rows_{first}-{first + self.group}/data_{index}.ckpt"

    def index_of(self, path: str) -> int | None:
        """The index of a sample in its right place; None for any other name, also a right name in a wrong directory."""
        match = self._PATH.match(path)
        if match is None:
            return None
        index = int(match.group(3))
        return index if self.path_of(index) == path else None

    def is_shard(self, name: str) -> bool:
        return self._SHARD.match(name) is not None

    def write(self, sink: ckpt.Sink, sample: Sample) -> None:
        ckpt.write(sink, sample.tensors, sample.told)

    def look(self, path: str) -> Seen:
        """Read a sample's structure, ids and mask. Raises ckpt.Torn, ckpt.Strange, OSError."""
        with open(path, "rb") as handle:
            header = ckpt.read_header_of(handle)
            status = os.fstat(handle.fileno())
            lacking = [name for name in ("input_ids", "loss_mask", *self.STATES) if name not in header.tensors]
            if lacking:
                raise ckpt.Strange(f"lacks {lacking[0]}")
            ids, mask, final, aux = (header.tensors[name] for name in ("input_ids", "loss_mask", *self.STATES))
            self._judge_shapes(ids, mask, final, aux)
            id_words = _words(_bytes_of(handle, ids.offset, ids.nbytes), ids.dtype)
            mask_words = _words(_bytes_of(handle, mask.offset, mask.nbytes), mask.dtype)
        parts = _archive_parts(header, (final, aux))
        size, mtime = header.bytes, status.st_mtime
        return _seen(_Found(size, mtime, id_words, mask_words, final.dtype, _rows(final), _rows(aux), parts, header.extra))

    def _judge_shapes(self, ids: ckpt.Tensor, mask: ckpt.Tensor, final: ckpt.Tensor, aux: ckpt.Tensor) -> None:
        """[L], [L], [1,L,H], [1,L,3H]; the leading 1 may be left out, as the trainer accepts it. Raises ckpt.Strange."""
        tokens, hidden = ids.shape[0] if ids.shape else 0, final.shape[-1] if final.shape else 0
        wanted = {
            "loss_mask": (mask, (tokens,)),
            "hidden_state": (final, (tokens, hidden)),
            "aux_hidden_state": (aux, (tokens, 3 * hidden)),
        }
        for name, (tensor, shape) in wanted.items():
            have = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
            if not tokens or not hidden or have != shape:
                raise ckpt.Strange(f"has {name} in the shape {list(tensor.shape)} for {tokens} tokens")
        if len(ids.shape) != 1 or ids.dtype != "int64" or mask.dtype != "int64":
            raise ckpt.Strange("has input_ids or loss_mask that are not one row of int64")
        _judge_states((final.dtype, aux.dtype))


# --- speculators -------------------------------------------------------------------------------------------------------


class Speculators:
    """hs_{i}.safetensors: hidden_states [L, n+1, H], the auxiliary layers and then the final state before the norm; token_ids [L].

    As speculators' generate_offline_data writes them; its trainer takes masks from the dataset of the same order.
    """

    name = "speculators"
    suffixes: tuple[str, ...] = (".safetensors",)
    norms: tuple[str, ...] = (PRE,)  # its trainer applies the model's norm before the head
    blocks: int | None = None
    flat = True
    walked = False
    by_record = False
    MARK = "relight"  # metadata that bear this key are ours
    SCALES = "hidden_states_scales"
    _PATH = re.compile(r"hs_(0|[1-9]\d{0,11})\.safetensors\Z", re.ASCII)

    def path_of(self, index: int) -> str:
        return f"hs_{index}.safetensors"

    def index_of(self, path: str) -> int | None:
        match = self._PATH.match(path)
        return int(match.group(1)) if match else None

    def is_shard(self, name: str) -> bool:
        return False

    def write(self, sink: ckpt.Sink, sample: Sample) -> None:
        final, aux = sample.tensors["hidden_state"], sample.tensors["aux_hidden_state"]
        hidden = final.shape[-1]
        shape = (sample.tokens, 1 + aux.shape[-1] // hidden, hidden)
        parts = {
            "hidden_states": safetensors.Part(final.dtype, shape, _interleaved(aux, final, sample.tokens)),
            "token_ids": safetensors.Part("int64", (sample.tokens,), (sample.tensors["input_ids"].buffer,)),
        }
        safetensors.write_parts(sink, parts, {self.MARK: "1", **sample.told})

    def look(self, path: str) -> Seen:
        """Read a sample's structure and ids. Raises ckpt.Torn, ckpt.Strange, Unsupported, OSError."""
        try:
            header = safetensors.read_header(path)
        except safetensors.BadFile as error:
            raise ckpt.Torn(str(error)) from None
        lacking = [name for name in ("hidden_states", "token_ids") if name not in header.tensors]
        if lacking:
            raise ckpt.Strange(f"lacks {lacking[0]}")
        if self.SCALES in header.tensors:
            raise Unsupported("holds states in 8 bits with scales, which cannot be judged yet")
        states, ids = header.tensors["hidden_states"], header.tensors["token_ids"]
        dtype = safetensors.NAMES.get(states.dtype, states.dtype)
        _judge_states((dtype, dtype))
        if len(states.shape) != 3 or states.shape[1] < 2 or not states.elements or len(ids.shape) != 1 or ids.shape[0] != states.shape[0]:
            raise ckpt.Strange(f"has hidden_states in the shape {list(states.shape)} for token_ids in the shape {list(ids.shape)}")
        tokens, blocks, hidden = states.shape
        with open(path, "rb") as handle:
            mtime = os.fstat(handle.fileno()).st_mtime
            words = _words(
                _bytes_of(handle, header.offset_of("token_ids"), ids.end - ids.begin), safetensors.NAMES.get(ids.dtype, ids.dtype)
            )
        width, start = hidden * ckpt.ITEM_BYTES[dtype], header.offset_of("hidden_states")
        parts = tuple(
            Part(name, header.offset_of(name), item.end - item.begin, None, dtype if name == "hidden_states" else None)
            for name, item in sorted(header.tensors.items(), key=lambda pair: (pair[1].begin, pair[1].end))
        )
        aux = Rows(start, tokens, (blocks - 1) * width, blocks * width)
        final = Rows(start + (blocks - 1) * width, tokens, width, blocks * width)
        extra = {name: text for name, text in header.metadata.items() if name != self.MARK} if self.MARK in header.metadata else {}
        return _seen(_Found(header.file_bytes, mtime, words, None, dtype, final, aux, parts, extra))


def _interleaved(aux: ckpt.TensorBytes, final: ckpt.TensorBytes, tokens: int) -> Iterator[bytes]:
    """The rows of both, token by token: first the auxiliary layers, then the final state."""
    left, right = memoryview(aux.buffer).cast("B"), memoryview(final.buffer).cast("B")
    wide, narrow = left.nbytes // tokens, right.nbytes // tokens
    for begin in range(0, tokens, ROWS):
        pieces: list[memoryview] = []
        for row in range(begin, min(begin + ROWS, tokens)):
            pieces += (left[row * wide : (row + 1) * wide], right[row * narrow : (row + 1) * narrow])
        yield b"".join(pieces)


# --- modelopt ----------------------------------------------------------------------------------------------------------


class Names:
    """File names of records: their ids where those can be names, each once. A name never changes when records are appended."""

    PLAIN = re.compile(r"[^\x00-\x1f\x7f/]+\Z")
    MAX_BYTES = 200

    def __init__(self, dataset: str | None) -> None:
        self.dataset = dataset
        self.names: list[str] = []
        self.ids: list[str] = []
        self.indices: dict[str, int] = {}

    def known(self) -> bool:
        """Whether there are fixed records to take ids from. Raises dataset.BadDataset, OSError."""
        if not self.names:
            self._read()
        return bool(self.names)

    def name_of(self, index: int) -> str:
        """Raises UnknownLayout for a record that is not fixed; dataset.BadDataset, OSError."""
        if index >= len(self.names):
            self._read()
        if index >= len(self.names):
            raise UnknownLayout(f"record {index} has no file name: names are the records' ids, and it is not among the fixed records")
        return self.names[index]

    def id_of(self, index: int) -> str:
        self.name_of(index)
        return self.ids[index]

    def index_of(self, name: str) -> int | None:
        return self.indices.get(name) if self.known() else None

    def _read(self) -> None:
        if not self.dataset or not os.path.exists(os.path.join(self.dataset, HEADER)):
            return
        with FixedRecords(self.dataset) as fixed:
            for index in range(len(self.names), len(fixed)):
                self._take(index, fixed.items[index].id)

    def _take(self, index: int, identity: str | None) -> None:
        good = identity is not None and self.PLAIN.match(identity) and not identity.startswith(".")
        name = identity if good and identity and len(identity.encode()) <= self.MAX_BYTES else f"record-{index}"
        while name in self.indices:
            name = f"{name}.{index}"
        self.names.append(name)
        self.ids.append(identity or name)
        self.indices[name] = index


class ModelOpt:
    """{conversation_id}.pt, a torch.save file each, as ModelOpt's compute_hidden_states scripts write them."""

    name = "modelopt"
    suffixes: tuple[str, ...] = (".pt",)
    norms: tuple[str, ...] = (POST, PRE)  # each file says which by its flag
    blocks: int | None = None
    flat = True
    walked = True
    by_record = True
    FLAG, ID = "hidden_states_prenorm", "conversation_id"

    def __init__(self, dataset: str | None = None) -> None:
        self.names = Names(dataset)

    def path_of(self, index: int) -> str:
        return f"{self.names.name_of(index)}.pt"

    def index_of(self, path: str) -> int | None:
        return self.names.index_of(path[: -len(".pt")]) if path.endswith(".pt") else None

    def is_shard(self, name: str) -> bool:
        return False

    def write(self, sink: ckpt.Sink, sample: Sample) -> None:
        final, aux = sample.tensors["hidden_state"], sample.tensors["aux_hidden_state"]
        tensors = {
            "input_ids": sample.tensors["input_ids"],
            "hidden_states": ckpt.TensorBytes(final.dtype, final.shape[-2:], final.buffer),
            "aux_hidden_states": ckpt.TensorBytes(aux.dtype, aux.shape[-2:], aux.buffer),
            "loss_mask": sample.tensors["loss_mask"],
        }
        values: dict[str, str | bool] = {self.ID: self.names.id_of(sample.index)}
        if sample.extra.get("norm", POST) != POST:
            values[self.FLAG] = True
        ckpt.write(sink, tensors, sample.told, values)

    def look(self, path: str) -> Seen:
        """Read a sample's structure, ids and mask. Raises ckpt.Torn, ckpt.Strange, OSError."""
        with open(path, "rb") as handle:
            header = ckpt.read_header_of(handle, (self.FLAG, self.ID), rows=True)
            mtime = os.fstat(handle.fileno()).st_mtime
            lacking = [name for name in ("input_ids", "hidden_states", "aux_hidden_states") if name not in header.tensors]
            if lacking:
                raise ckpt.Strange(f"lacks {lacking[0]}")
            ids, final, aux = (header.tensors[name] for name in ("input_ids", "hidden_states", "aux_hidden_states"))
            mask = header.tensors.get("loss_mask")
            self._judge_shapes(ids, mask, final, aux)
            id_words = _words(_bytes_of(handle, ids.offset, ids.nbytes), ids.dtype)
            mask_words = None if mask is None else _words(_bytes_of(handle, mask.offset, mask.nbytes), mask.dtype)
        norm = PRE if header.values.get(self.FLAG) is True else POST
        parts = _archive_parts(header, (final, aux))
        rows = _rows(final), _rows(aux)
        return _seen(_Found(header.bytes, mtime, id_words, mask_words, final.dtype, *rows, parts, header.extra, norm))

    def _judge_shapes(self, ids: ckpt.Tensor, mask: ckpt.Tensor | None, final: ckpt.Tensor, aux: ckpt.Tensor) -> None:
        """[L], [L], [L,H], [L,nH]. Raises ckpt.Strange."""
        tokens = ids.shape[0] if len(ids.shape) == 1 else 0
        for name, tensor in (("hidden_states", final), ("aux_hidden_states", aux)):
            if not tokens or len(tensor.shape) != 2 or tensor.shape[0] != tokens or not tensor.shape[1]:
                raise ckpt.Strange(f"has {name} in the shape {list(tensor.shape)} for input_ids in the shape {list(ids.shape)}")
        if aux.shape[1] % final.shape[1]:
            raise ckpt.Strange(f"has auxiliary states of {aux.shape[1]} numbers for final ones of {final.shape[1]}")
        if mask is not None and (mask.shape != (tokens,)):
            raise ckpt.Strange(f"has loss_mask in the shape {list(mask.shape)} for {tokens} tokens")
        _judge_states((final.dtype, aux.dtype))


# --- the registry ------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[str | None], Layout]] = {
    "specforge": lambda _dataset: SpecForge(),
    "speculators": lambda _dataset: Speculators(),
    "modelopt": ModelOpt,
}


def layout(name: str, dataset: str | None = None) -> Layout:
    """The layout of this name. `dataset` is the directory of the fixed records, from which names may come. Raises UnknownLayout."""
    if name not in LAYOUTS:
        raise UnknownLayout(f"store layout {name!r} is not one of: {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[name](dataset)
