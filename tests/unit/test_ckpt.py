# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The checkpoint format: what is written is read, in Python's zipfile too; what is cut, flipped or foreign is told."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from array import array
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import ckpt
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import TensorBytes
from hypothesis import given, settings
from hypothesis import strategies as st

TENSORS = {
    "input_ids": TensorBytes("int64", (3,), array("q", [5, 6, 7]).tobytes()),
    "hidden_state": TensorBytes("bfloat16", (1, 3, 2), bytes(range(12))),
    "scalar": TensorBytes("float32", (), struct.pack("<f", 1.5)),
    "empty": TensorBytes("uint8", (0, 4), b""),
}


def written(tensors: dict[str, TensorBytes] = TENSORS, extra: dict[str, str] | None = None) -> bytes:
    sink = io.BytesIO()
    ckpt.write(sink, tensors, {"run": "r", "ü": "1"} if extra is None else extra)
    return sink.getvalue()


def kept(folder: Path, data: bytes) -> str:
    path = folder / "sample.ckpt"
    path.write_bytes(data)
    return str(path)


def test_what_is_written_is_read(tmp_path):
    path = kept(tmp_path, written())
    header = ckpt.read_header(path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()
    }
    assert {name: ckpt.read_tensor(path, tensor) for name, tensor in header.tensors.items()} == {
        name: bytes(tensor.buffer) for name, tensor in TENSORS.items()
    }
    assert header.extra == {"run": "r", "ü": "1"}
    assert ckpt.broken_entries(path, header) == []


def test_storages_are_aligned_for_mapping(tmp_path):
    header = ckpt.read_header(kept(tmp_path, written()))
    assert {entry.offset % 64 for entry in header.entries} == {0}


def test_zipfile_agrees(tmp_path):
    with zipfile.ZipFile(kept(tmp_path, written())) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[:5] == [
            "archive/data.pkl",
            "archive/.format_version",
            "archive/.storage_alignment",
            "archive/byteorder",
            "archive/data/0",
        ]
        assert archive.read("archive/data/0") == TENSORS["input_ids"].buffer


class Sparse:
    """A sink that counts, and keeps what is not a run of zeros: a file of 5 GiB without its bytes."""

    def __init__(self) -> None:
        self.at = 0
        self.kept: list[tuple[int, bytes]] = []

    def write(self, data: ckpt.Buffer, /) -> None:
        size = memoryview(data).nbytes
        if size < 1 << 20:
            self.kept.append((self.at, bytes(data)))
        self.at += size

    def save(self, path: Path) -> None:
        with open(path, "wb") as handle:
            for at, data in self.kept:
                handle.seek(at)
                handle.write(data)


class FastCounting(ckpt._Counting):
    """Passes large data on whole, without a checksum, since 5 GiB of zeros take long to add up."""

    def put(self, data: ckpt.Buffer) -> None:
        size = memoryview(data).nbytes
        if size < 1 << 20:
            super().put(data)
        else:
            self.sink.write(data)
            self.at += size


def test_tensors_beyond_4_gib(tmp_path, monkeypatch):
    import mmap

    size = (4 << 30) + 64
    memory = mmap.mmap(-1, size)  # never touched, so never backed by memory
    monkeypatch.setattr(ckpt, "_Counting", FastCounting)
    sink = Sparse()
    ckpt.write(
        sink,
        {"a": TENSORS["input_ids"], "big": TensorBytes("uint8", (size,), memoryview(memory)), "b": TENSORS["input_ids"]},
        {},
    )
    path = tmp_path / "big.ckpt"
    sink.save(path)
    header = ckpt.read_header(str(path))
    assert header.tensors["big"].nbytes == size
    assert header.tensors["b"].offset > 4 << 30
    assert ckpt.read_tensor(str(path), header.tensors["b"]) == TENSORS["input_ids"].buffer
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/2") == TENSORS["input_ids"].buffer
        assert archive.getinfo("archive/data/1").file_size == size


WHOLE = written()


@given(st.integers(0, len(WHOLE) - 1))
@settings(deadline=None)
def test_a_file_that_is_cut_anywhere_is_torn(tmp_path_factory, length):
    with pytest.raises(ckpt.Torn):
        ckpt.read_header(kept(tmp_path_factory.mktemp("cut"), WHOLE[:length]))


def test_bytes_behind_the_end_are_seen(tmp_path):
    with pytest.raises(ckpt.Torn):
        ckpt.read_header(kept(tmp_path, WHOLE + b"\0"))


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
@settings(deadline=None)
def test_a_flipped_byte_is_seen_or_harmless(tmp_path_factory, at, by):
    data = bytearray(WHOLE)
    data[at] ^= by
    path = kept(tmp_path_factory.mktemp("flip"), bytes(data))
    try:
        header = ckpt.read_header(path)
        if ckpt.broken_entries(path, header):
            return
        tensors = {name: ckpt.read_tensor(path, tensor) for name, tensor in header.tensors.items()}
    except (ckpt.Torn, ckpt.Strange):
        return
    assert tensors == {name: tensor.buffer for name, tensor in TENSORS.items()}
    assert header.extra == {"run": "r", "ü": "1"}


def rewritten(name: str, data: bytes) -> bytes:
    """The whole file with one entry replaced, by zipfile."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.namelist():
            new.writestr(item, data if item == name else old.read(item))
    return out.getvalue()


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (pickle.dumps(Evil(), 2), ckpt.Strange, "would call __builtin__.print"),
        (pickle.dumps([1], 2), ckpt.Strange, "EMPTY_LIST"),
        (pickle.dumps({"a": 1}, 2), ckpt.Strange, '"a", which is not a tensor'),
        (pickle.dumps(3, 2), ckpt.Strange, "does not hold a dict"),
        (b"\x80\x02}", ckpt.Torn, "broken data.pkl"),
        (b"\x80\x02h\x07.", ckpt.Torn, "broken data.pkl"),
        (b"", ckpt.Torn, "broken data.pkl"),
    ],
)
def test_a_strange_pickle_is_told_and_never_run(tmp_path, capsys, data, error, words):
    with pytest.raises(error) as caught:
        ckpt.read_header(kept(tmp_path, rewritten("archive/data.pkl", data)))
    assert words in str(caught.value)
    assert "executed" not in capsys.readouterr().out


def test_a_short_storage_is_torn(tmp_path):
    with pytest.raises(ckpt.Torn, match="16 bytes for 'input_ids' where its header says 24"):
        ckpt.read_header(kept(tmp_path, rewritten("archive/data/0", bytes(16))))


def test_a_missing_storage_is_torn(tmp_path):
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.namelist():
            if item != "archive/data/0":
                new.writestr(item, old.read(item))
    with pytest.raises(ckpt.Torn, match="lacks the storage of 'input_ids'"):
        ckpt.read_header(kept(tmp_path, out.getvalue()))


def directory_of(data: bytes) -> tuple[int, int]:
    """Where the zip64 end record is, and where the directory's last entry begins."""
    return data.index(b"PK\x06\x06"), data.rindex(b"PK\x01\x02")


def test_a_directory_that_leaves_out_its_last_entry_is_torn(tmp_path):
    end, last = directory_of(WHOLE)
    data = bytearray(WHOLE)
    count, _count, length = struct.unpack_from("<QQQ", data, end + 24)
    struct.pack_into("<QQQ", data, end + 24, count - 1, count - 1, length - (end - last))
    with pytest.raises(ckpt.Torn, match="does not end where the file does"):
        ckpt.read_header(kept(tmp_path, bytes(data)))


def test_an_entry_that_runs_into_the_directory_is_torn(tmp_path):
    _end, last = directory_of(WHOLE)
    data = bytearray(WHOLE)
    struct.pack_into("<II", data, last + 20, 5000, 5000)
    with pytest.raises(ckpt.Torn, match="'archive/version' that overlaps"):
        ckpt.read_header(kept(tmp_path, bytes(data)))


def test_a_renamed_tensor_does_not_pass_the_checksum_of_the_pickle(tmp_path):
    with pytest.raises(ckpt.Torn, match="does not match its checksum"):
        ckpt.read_header(kept(tmp_path, WHOLE.replace(b"input_ids", b"input_idz")))


def test_a_big_endian_file_is_refused(tmp_path):
    with pytest.raises(ckpt.Strange, match="little-endian"):
        ckpt.read_header(kept(tmp_path, rewritten("archive/byteorder", b"big")))


def test_another_archive_is_no_sample(tmp_path):
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b.txt", "text")
    with pytest.raises(ckpt.Strange, match=r"no data\.pkl"):
        ckpt.read_header(str(path))


@pytest.mark.parametrize(("dtype", "shape", "data"), [("int64", (2,), b"1234567"), ("float8", (1,), b"1"), ("bool", (2, 2), b"\0")])
def test_a_tensor_that_is_not_what_it_says_is_refused(dtype, shape, data):
    with pytest.raises(ValueError):
        TensorBytes(dtype, shape, data)


def in_rows(stride: int, numbers: int) -> bytes:
    """A file whose one tensor is a view of 3 rows of 2 float32, `stride` numbers apart, in a storage of so many numbers."""
    sink = io.BytesIO()
    ckpt.write(sink, {"a": TensorBytes("float32", (3, 2), bytes(24))}, {})
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(sink.getvalue())) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.namelist():
            data = old.read(item)
            if item.endswith("data.pkl"):
                assert b"(K\x02K\x01t" in data
                assert b"K\x06tQ" in data
                data = data.replace(b"(K\x02K\x01t", b"(K" + bytes([stride]) + b"K\x01t").replace(
                    b"K\x06tQ", b"K" + bytes([numbers]) + b"tQ"
                )
            new.writestr(item, bytes(range(4 * numbers)) if item.endswith("data/0") else data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("stride", "numbers", "error"), [(4, 10, None), (4, 12, None), (4, 9, ckpt.Torn), (1, 10, ckpt.Strange), (2, 6, None)]
)
def test_a_matrix_whose_rows_lie_apart_is_a_matrix_only_where_that_is_asked_for(tmp_path, stride, numbers, error):
    with open(kept(tmp_path, in_rows(stride, numbers)), "rb") as handle:
        if error is not None:
            with pytest.raises(error):
                ckpt.read_header_of(handle, rows=True)
            return
        tensor = ckpt.read_header_of(handle, rows=True).tensors["a"]
        assert (tensor.shape, tensor.stride) == ((3, 2), 0 if stride == 2 else 4 * stride)
        if stride == 2:
            assert ckpt.read_header_of(handle).tensors["a"] == tensor
        else:
            with pytest.raises(ckpt.Strange, match="memory order"):
                ckpt.read_header_of(handle)


def test_plain_values_are_kept_apart_and_only_those_that_are_asked_for(tmp_path):
    sink = io.BytesIO()
    ckpt.write(sink, {"a": TENSORS["input_ids"]}, {"run": "r"}, {"flag": True, "off": False, "id": "ü"})
    path = kept(tmp_path, sink.getvalue())
    with open(path, "rb") as handle:
        header = ckpt.read_header_of(handle, ("flag", "off", "id", "absent"))
        assert (header.values, header.extra, list(header.tensors)) == ({"flag": True, "off": False, "id": "ü"}, {"run": "r"}, ["a"])
        with pytest.raises(ckpt.Strange, match='"id", which is not a tensor'):
            ckpt.read_header_of(handle, ("flag", "off"))
