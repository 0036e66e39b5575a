# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The file format of torch.save, written and read without torch. Standard library only, Python 3.9 and newer.

Such a file is a zip archive of stored entries: `data.pkl` (a pickle of the structure, in which each tensor names its storage),
`byteorder`, `version`, and `data/N` with the bytes of storage N, aligned to 64 bytes so that torch can map them. Writing streams:
no tensor is copied. Reading is strict and runs nothing: the pickle is interpreted opcode by opcode from a short list.
"""

from __future__ import annotations

import json
import os
import pickletools
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Protocol, Union

ARCHIVE = "archive"
EXTRA = "relight"  # the key of our own strings beside the tensors
ALIGNMENT = 64
CHUNK_BYTES = 4 << 20
MAX_DIRECTORY_BYTES = 1 << 20
MAX_PICKLE_BYTES = 1 << 20
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}
_DTYPES = {storage: dtype for dtype, storage in _STORAGES.items()}
_BIG = 0xFFFFFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_FLAGS = 0x0808  # sizes and CRC follow the data; names are UTF-8
_DATE_1980 = 0x0021

Buffer = Union[bytes, bytearray, memoryview]


class Sink(Protocol):
    """What `write` needs of a file: nothing but write."""

    def write(self, data: Buffer, /) -> object: ...


class Torn(Exception):
    """The file does not have the structure of a whole archive; the message says where it ends."""


class Strange(Exception):
    """A whole archive, but not of the kind that a sample is; the message says what it holds."""


@dataclass(frozen=True)
class TensorBytes:
    """A contiguous, little-endian tensor. `buffer` may be a view of a mapped file."""

    dtype: str
    shape: tuple[int, ...]
    buffer: Buffer

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"no tensor of type {self.dtype} can be written")
        have = memoryview(self.buffer).nbytes
        if have != nbytes_of(self.dtype, self.shape):
            raise ValueError(f"{have} bytes are not a {self.dtype} tensor of shape {list(self.shape)}")


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies in a file. `crc` is that of its whole entry, or None where the writer left it out."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    entry: str
    crc: int | None
    stride: int = 0  # bytes from one row to the next, where other things lie between the rows


@dataclass(frozen=True)
class Entry:
    """One stored entry of the archive."""

    name: str
    offset: int
    nbytes: int
    crc: int | None


@dataclass(frozen=True)
class Header:
    """All that a file says of itself without its tensors' bytes."""

    bytes: int
    tensors: dict[str, Tensor]
    extra: dict[str, str]
    entries: tuple[Entry, ...] = field(default=())
    values: dict[str, Any] = field(default_factory=dict)


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    size = ITEM_BYTES[dtype]
    for length in shape:
        size *= length
    return size


# --- writing ---------------------------------------------------------------------------------------------------------


class _Counting:
    """A sink that knows how far it is and the CRC since the last reset."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.at = 0
        self.crc = 0

    def put(self, data: Buffer) -> None:
        view = memoryview(data)
        if view.nbytes > 0:
            view = view.cast("B")
        for start in range(0, view.nbytes, CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self.crc = zlib.crc32(piece, self.crc)
            self.sink.write(piece)
            self.at += piece.nbytes


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + struct.pack("<B", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + struct.pack("<B", len(data)) + data


def _integers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(_integer(value) for value in values) + b"t"


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)
    return tuple(strides)


def _pickle_tensor(tensor: TensorBytes, key: int) -> bytes:
    numel = nbytes_of(tensor.dtype, tensor.shape) // ITEM_BYTES[tensor.dtype]
    storage = b"(" + _text("storage") + f"ctorch\n{_STORAGES[tensor.dtype]}\n".encode() + _text(str(key)) + _text("cpu") + _integer(numel)
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"tQK\x00"
        + _integers(tensor.shape)
        + _integers(_strides(tensor.shape))
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def _pickle(tensors: Mapping[str, TensorBytes], extra: Mapping[str, str], values: Mapping[str, str | bool]) -> bytes:
    parts = [b"\x80\x02}("]
    for key, (name, tensor) in enumerate(tensors.items()):
        parts += [_text(name), _pickle_tensor(tensor, key)]
    for name, item in values.items():
        parts += [_text(name), (b"\x88" if item else b"\x89") if isinstance(item, bool) else _text(item)]
    if extra:
        parts += [_text(EXTRA), b"}("]
        for name, value in extra.items():
            parts += [_text(name), _text(value)]
        parts.append(b"u")
    parts.append(b"u.")
    return b"".join(parts)


def _put_entry(out: _Counting, name: str, data: Buffer) -> Entry:
    """Write one entry with its data on a 64-byte boundary, as torch does, padded by an extra field of the local header."""
    encoded = f"{ARCHIVE}/{name}".encode()
    size, start = memoryview(data).nbytes, out.at
    big = size >= _BIG
    zip64 = struct.pack("<HHQQ", 1, 16, size, size) if big else b""
    fixed = _LOCAL.size + len(encoded) + len(zip64) + 4
    padding = -(start + fixed) % ALIGNMENT
    told = _BIG if big else 0
    out.put(_LOCAL.pack(0x04034B50, 45 if big else 20, _FLAGS, 0, 0, _DATE_1980, 0, told, told, len(encoded), len(zip64) + 4 + padding))
    out.put(encoded + zip64 + struct.pack("<HH", 0x4246, padding) + b"Z" * padding)
    out.crc = 0
    out.put(data)
    crc = out.crc
    out.put(struct.pack("<IIQQ" if big else "<IIII", 0x08074B50, crc, size, size))
    return Entry(encoded.decode(), start, size, crc)


def _put_directory(out: _Counting, entries: list[Entry]) -> None:
    start = out.at
    for entry in entries:
        name = entry.name.encode()
        large = [entry.nbytes, entry.nbytes] if entry.nbytes >= _BIG else []
        if entry.offset >= _BIG:
            large.append(entry.offset)
        zip64 = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        size = min(entry.nbytes, _BIG)
        version = 45 if large else 20
        sizes = (entry.crc or 0, size, size, len(name), len(zip64), 0, 0, 0, 0, min(entry.offset, _BIG))
        out.put(_CENTRAL.pack(0x02014B50, version, version, _FLAGS, 0, 0, _DATE_1980, *sizes))
        out.put(name + zip64)
    end = out.at
    out.put(_END64.pack(0x06064B50, _END64.size - 12, 45, 45, 0, 0, len(entries), len(entries), end - start, start))
    out.put(_LOCATOR.pack(0x07064B50, 0, end, 1))
    out.put(_END.pack(0x06054B50, 0, 0, len(entries), len(entries), end - start, min(start, _BIG), 0))


def write(
    handle: Sink, tensors: Mapping[str, TensorBytes], extra: Mapping[str, str], values: Mapping[str, str | bool] | None = None
) -> None:
    """Write a dict of tensors and `values`, and `extra` as a dict of strings under the key `relight`, as torch.save would.

    `handle` needs no seek, so it may digest what passes. Raises OSError.
    """
    out = _Counting(handle)
    entries = [
        _put_entry(out, "data.pkl", _pickle(tensors, extra, values or {})),
        _put_entry(out, ".format_version", b"1"),
        _put_entry(out, ".storage_alignment", str(ALIGNMENT).encode()),
        _put_entry(out, "byteorder", b"little"),
    ]
    entries += [_put_entry(out, f"data/{key}", tensor.buffer) for key, tensor in enumerate(tensors.values())]
    entries.append(_put_entry(out, "version", b"3\n"))
    _put_directory(out, entries)


# --- reading ---------------------------------------------------------------------------------------------------------


def _exactly(handle: IO[bytes], offset: int, size: int, what: str) -> bytes:
    handle.seek(offset)
    data = handle.read(size)
    if len(data) != size:
        raise Torn(f"ends within {what}")
    return data


def _directory_place(handle: IO[bytes], size: int) -> tuple[int, int, int]:
    """Offset, length and number of entries of the central directory, which ends the file with nothing behind it."""
    if size < _END.size:
        raise Torn("is too short for an archive")
    magic, disk, first, _here, count, length, offset, comment = _END.unpack(_exactly(handle, size - _END.size, _END.size, "its end"))
    if magic != 0x06054B50 or comment:
        raise Torn("has no central directory at its end")
    end = size - _END.size
    if size >= _END.size + _LOCATOR.size + _END64.size:
        locator = _LOCATOR.unpack(_exactly(handle, end - _LOCATOR.size, _LOCATOR.size, "its end"))
        if locator[0] == 0x07064B50:
            end = locator[2]
            if end + _END64.size + _LOCATOR.size + _END.size != size:
                raise Torn("has a central directory that points elsewhere")
            values = _END64.unpack(_exactly(handle, end, _END64.size, "its end"))
            if values[0] != 0x06064B50:
                raise Torn("has a broken central directory")
            count, length, offset = values[7:]
    if disk or first or offset + length != end:
        raise Torn("has a central directory that does not end where the file does")
    return offset, length, count


def _large(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The true sizes and offset, from the zip64 extra field where they do not fit in 32 bits."""
    values = [size, packed, offset]
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4)) if at + 4 + length <= len(extra) else iter(())
            values = [next(wide, -1) if value == _BIG else value for value in values]
        at += 4 + length
    return values[0], values[1], values[2]


def _central_entries(data: bytes, count: int) -> Iterator[tuple[str, int, int, int | None]]:
    at = 0
    for _number in range(count):
        if at + _CENTRAL.size > len(data):
            raise Torn("has a central directory that is cut short")
        fields = _CENTRAL.unpack_from(data, at)
        crc, packed, size, name_bytes, extra_bytes, comment_bytes, offset = *fields[7:13], fields[16]
        if fields[0] != 0x02014B50:
            raise Torn("has a broken central directory")
        at += _CENTRAL.size
        name = data[at : at + name_bytes].decode("utf-8", "replace")
        size, packed, offset = _large(data[at + name_bytes : at + name_bytes + extra_bytes], size, packed, offset)
        at += name_bytes + extra_bytes + comment_bytes
        if fields[4] != 0 or packed != size:
            raise Strange(f"has the compressed entry {name[:80]!r}")
        yield name, offset, size, crc if crc or not size else None
    if at != len(data):
        raise Torn("has bytes behind its central directory")


def _entries(handle: IO[bytes], size: int) -> tuple[Entry, ...]:
    start, length, count = _directory_place(handle, size)
    if length > MAX_DIRECTORY_BYTES:
        raise Strange("has far too many entries for a sample")
    found: list[Entry] = []
    reached = 0
    for name, offset, nbytes, crc in _central_entries(_exactly(handle, start, length, "its central directory"), count):
        local = _LOCAL.unpack(_exactly(handle, offset, _LOCAL.size, f"the header of {name[:80]!r}"))
        told = _exactly(handle, offset + _LOCAL.size, local[9], f"the name of {name[:80]!r}")
        data = offset + _LOCAL.size + local[9] + local[10]
        if local[0] != 0x04034B50 or told.decode("utf-8", "replace") != name or local[3] != 0:
            raise Torn(f"has no entry {name[:80]!r} where its directory says")
        if offset < reached or nbytes < 0 or data + nbytes > start:
            raise Torn(f"has an entry {name[:80]!r} that overlaps another")
        reached = data + nbytes
        found.append(Entry(name, data, nbytes, crc))
    return tuple(found)


@dataclass(frozen=True)
class _Global:
    module: str
    name: str


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    numel: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_REBUILD = _Global("torch._utils", "_rebuild_tensor_v2")
_ORDERED = _Global("collections", "OrderedDict")
_PARAMETERLESS: dict[str, Any] = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": ()}
_PLAIN = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT"}
_PUTS = {"BINPUT", "LONG_BINPUT"}
_GETS = {"BINGET", "LONG_BINGET"}


class _Reader:
    """Interprets the few opcodes that a dict of tensors and strings takes. Nothing is imported and nothing is called."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def _since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def _tuple(self, items: list[Any]) -> None:
        self.stack.append(tuple(items))

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2 or not all(isinstance(key, str) for key in items[::2]):
            raise Strange("holds something other than a dict with names")
        target.update(zip(items[::2], items[1::2]))

    def _persistent(self) -> None:
        value = self.stack.pop()
        if not isinstance(value, tuple) or len(value) != 5 or value[0] != "storage":
            raise Strange("refers to something other than a storage")
        kind, key, numel = value[1], value[2], value[4]
        dtype = _DTYPES.get(kind.name) if isinstance(kind, _Global) and kind.module == "torch" else None
        if dtype is None or not isinstance(key, str) or not isinstance(numel, int) or isinstance(numel, bool) or numel < 0:
            raise Strange("holds a storage of an unknown type")
        self.stack.append(_Storage(dtype, key, numel))

    def _reduce(self) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        if what == _ORDERED and arguments == ():
            self.stack.append({})
            return
        if what != _REBUILD or not isinstance(arguments, tuple) or len(arguments) < 6:
            raise Strange(f"would call {what.module}.{what.name}" if isinstance(what, _Global) else "would call something unknown")
        storage, offset, shape, strides = arguments[:4]
        numbers = [offset, *shape, *strides] if isinstance(shape, tuple) and isinstance(strides, tuple) else [None]
        if not isinstance(storage, _Storage) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            raise Strange("holds a tensor that cannot be understood")
        self.stack.append(_Tensor(storage, offset, shape, strides))

    def step(self, name: str, argument: Any) -> None:
        if name in _PLAIN:
            self.stack.append(argument)
        elif name in _PARAMETERLESS:
            self.stack.append(_PARAMETERLESS[name])
        elif name in _PUTS:
            self.memo[argument] = self.stack[-1]
        elif name in _GETS:
            self.stack.append(self.memo[argument])
        elif name == "EMPTY_DICT":
            self.stack.append({})
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name == "GLOBAL":
            module, _space, attribute = argument.partition(" ")
            self.stack.append(_Global(module, attribute))
        elif name == "TUPLE":
            self._tuple(self._since_mark())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            items = self.stack[-count:]
            del self.stack[-count:]
            self._tuple(items)
        elif name == "SETITEMS":
            self._set(self._since_mark())
        elif name == "SETITEM":
            items = self.stack[-2:]
            del self.stack[-2:]
            self._set(items)
        elif name == "BINPERSID":
            self._persistent()
        elif name == "REDUCE":
            self._reduce()
        elif name != "PROTO":
            raise Strange(f"uses the pickle opcode {name}")

    def read(self, data: bytes) -> dict[str, Any]:
        try:
            for opcode, argument, _position in pickletools.genops(data):
                if opcode.name == "STOP":
                    break
                self.step(opcode.name, argument)
            value = self.stack.pop()
        except (IndexError, KeyError, ValueError, TypeError) as error:
            raise Torn(f"has a broken data.pkl ({type(error).__name__})") from None
        if not isinstance(value, dict):
            raise Strange("does not hold a dict")
        return value


def _row_stride(tensor: _Tensor) -> int:
    """From row to row of a matrix whose rows lie apart, in numbers; 0 for every other order."""
    if len(tensor.shape) != 2 or len(tensor.strides) != 2 or not all(tensor.shape):
        return 0
    return tensor.strides[0] if tensor.strides[1] == 1 and tensor.strides[0] > tensor.shape[1] else 0


def _place(name: str, tensor: _Tensor, entries: dict[str, Entry], prefix: str, rows: bool) -> Tensor:
    entry = entries.get(f"{prefix}/data/{tensor.storage.key}")
    if entry is None:
        raise Torn(f"lacks the storage of {name!r}")
    size = ITEM_BYTES[tensor.storage.dtype]
    if tensor.storage.numel * size != entry.nbytes:
        raise Torn(f"has {entry.nbytes} bytes for {name!r} where its header says {tensor.storage.numel * size}")
    usual = _strides(tensor.shape)
    stride = _row_stride(tensor) if rows else 0
    turned = any(have != want for have, want, length in zip(tensor.strides, usual, tensor.shape) if length > 1)
    if not stride and (turned or len(tensor.strides) != len(usual)):
        raise Strange(f"holds {name!r} in an unusual memory order")
    nbytes = nbytes_of(tensor.storage.dtype, tensor.shape)
    spanned = ((tensor.shape[0] - 1) * stride + tensor.shape[1]) * size if stride else nbytes
    if tensor.offset * size + spanned > entry.nbytes:
        raise Torn(f"has {entry.nbytes} bytes for {name!r}, too few for its shape")
    return Tensor(tensor.storage.dtype, tensor.shape, entry.offset + tensor.offset * size, nbytes, entry.name, entry.crc, stride * size)


def read_header_of(handle: IO[bytes], values: tuple[str, ...] = (), rows: bool = False) -> Header:
    """Read names, types, shapes, places and our own strings from an open file. Raises Torn, Strange, OSError.

    `values` may be plain values beside the tensors; with `rows` a matrix may be a view whose rows lie apart.
    """
    size = os.fstat(handle.fileno()).st_size
    found = _entries(handle, size)
    entries = {entry.name: entry for entry in found}
    if len(entries) != len(found):
        raise Strange("has two entries of one name")
    table = next((name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")), None)
    if table is None:
        raise Strange("has no data.pkl")
    prefix = table.partition("/")[0]
    if entries[table].nbytes > MAX_PICKLE_BYTES:
        raise Strange("has a data.pkl that is far too large for a sample")
    data = _exactly(handle, entries[table].offset, entries[table].nbytes, "data.pkl")
    if entries[table].crc is not None and zlib.crc32(data) != entries[table].crc:
        raise Torn("has a data.pkl that does not match its checksum")
    order = entries.get(f"{prefix}/byteorder")
    if order is not None and _exactly(handle, order.offset, min(order.nbytes, 16), "byteorder") != b"little":
        raise Strange("is not little-endian")
    value = _Reader().read(data)
    extra = value.pop(EXTRA, {})
    if not isinstance(extra, dict) or not all(isinstance(item, str) for item in extra.values()):
        raise Strange(f"has a {EXTRA!r} entry that is not a dict of strings")
    plain = {name: value.pop(name) for name in values if name in value and isinstance(value[name], (str, int, bool, type(None)))}
    others = sorted(name for name, item in value.items() if not isinstance(item, _Tensor))
    if others:
        raise Strange(f"holds {json.dumps(others[0][:80])}, which is not a tensor")
    return Header(size, {name: _place(name, item, entries, prefix, rows) for name, item in value.items()}, extra, found, plain)


def read_header(path: str) -> Header:
    """Read the header of a file. Raises Torn, Strange, OSError."""
    with open(path, "rb") as handle:
        return read_header_of(handle)


def read_tensor(path: str, tensor: Tensor) -> bytes:
    """The bytes of one small tensor, such as the token ids. Raises Torn, OSError."""
    with open(path, "rb") as handle:
        return _exactly(handle, tensor.offset, tensor.nbytes, "a tensor")


def chunks(handle: IO[bytes], offset: int, nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The bytes of a range in pieces. Raises Torn, OSError."""
    handle.seek(offset)
    while nbytes > 0:
        piece = handle.read(min(chunk_bytes, nbytes))
        if not piece:
            raise Torn("ends within a tensor")
        nbytes -= len(piece)
        yield piece


def broken_entries(path: str, header: Header) -> list[str]:
    """The entries whose bytes do not match their checksum. Reads the whole file. Raises Torn, OSError."""
    broken = []
    with open(path, "rb") as handle:
        for entry in header.entries:
            crc = 0
            for piece in chunks(handle, entry.offset, entry.nbytes):
                crc = zlib.crc32(piece, crc)
            if entry.crc is not None and crc != entry.crc:
                broken.append(entry.name)
    return broken
