# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The store's layout, manifest, runs, lock and quarantine; and the safetensors file that samples come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.numpy
import xxhash
from ansible_collections.relight.recovery.plugins.module_utils import safetensors as format_
from ansible_collections.relight.recovery.plugins.module_utils.layouts import SpecForge, UnknownLayout, layout
from ansible_collections.relight.recovery.plugins.module_utils.store import (
    Locked,
    Manifest,
    NewerStore,
    Store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samples import fill, put, sample


@given(st.integers(0, 10**9))
@settings(deadline=None)
def test_index_and_path_are_each_others_inverse(index):
    assert SpecForge().index_of(SpecForge().path_of(index)) == index


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("rows_0-2000/data_1999.ckpt", 1999),
        ("rows_2000-4000/data_2000.ckpt", 2000),
        ("rows_0-2000/data_2000.ckpt", None),
        ("rows_0-2000/data_01.ckpt", None),
        ("rows_0-2000/data_1.ckpt.gz", None),
        ("rows_0-2000/.relight-tmp-data_1.ckpt.7", None),
        ("rows_0-2000/data_1.ckpt\n", None),
        ("quarantine/x/rows_0-2000/data_1.ckpt", None),
    ],
)
def test_only_the_right_place_has_an_index(path, index):
    assert SpecForge().index_of(path) == index


def test_an_unknown_layout_is_one_sentence():
    with pytest.raises(UnknownLayout, match=r"^store layout 'parquet' is not one of: modelopt, specforge, speculators$"):
        layout("parquet")


def test_adding_tells_what_was_written(tmp_path):
    store = Store(str(tmp_path), layout("specforge"))
    entry = put(store, sample(2003, 5))
    data = (tmp_path / "rows_2000-4000" / "data_2003.ckpt").read_bytes()
    assert (entry.index, entry.file, entry.bytes, entry.tokens) == (2003, "data_2003.ckpt", len(data), 5)
    assert entry.digest == f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"
    assert store.entries() == {2003: entry}
    assert store.temporaries() == []


def test_the_manifest_bears_torn_lines_and_the_last_word_counts(tmp_path):
    store = fill(tmp_path, [4, 4, 4]).store
    shard = Path(store.path) / "rows_0-2000"
    with open(shard / "MANIFEST.jsonl", "ab") as handle:
        handle.write(b'{"index": 7, "file": "da')
    again = put(store, sample(1, 6))
    assert store.entries()[1] == again
    Manifest(str(shard)).forget(0)
    assert sorted(store.entries()) == [1, 2]
    with open(shard / "MANIFEST.jsonl", "ab") as handle:
        handle.write(b'{"index": "8"}\n\xff\xfe\n[]\n')
    assert sorted(store.entries()) == [1, 2]


def test_a_newer_store_is_refused(tmp_path):
    store = fill(tmp_path, [4]).store
    Path(store.path, "runs.json").write_text(json.dumps({"schema": 2, "runs": []}))
    with pytest.raises(NewerStore, match="newer Relight"):
        store.runs()
    with open(Path(store.path) / "rows_0-2000" / "MANIFEST.jsonl", "a", encoding="utf-8") as handle:
        handle.write('{"schema": 2}\n')
    with pytest.raises(NewerStore, match="newer Relight"):
        store.entries()


def test_runs_and_links(tmp_path):
    store = Store(str(tmp_path / "s"), layout("specforge"))
    assert store.runs().identity is None
    store.add_run("a", {"norm": "post"}, {}, 1.0, "i")
    store.add_run("b", {"norm": "pre"}, {}, 2.0, "j")
    store.add_run("a", {"norm": "post2"}, {}, 3.0, "k")
    store.add_link({"instance": "k", "verdict": "pass"})
    runs = store.runs()
    assert [item["run"] for item in runs.runs] == ["b", "a"]
    assert runs.identity == {"norm": "post2"}
    assert (runs.identity_of("b"), runs.identity_of("c")) == ({"norm": "pre"}, None)
    assert runs.links == [{"instance": "k", "verdict": "pass"}]


HOLDER = """
import sys
from ansible_collections.relight.recovery.plugins.module_utils.layouts import layout
from ansible_collections.relight.recovery.plugins.module_utils.store import Store
with Store(sys.argv[1], layout("specforge")).exclusive("relight-extract"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_client_writes_and_its_death_frees_the_store(tmp_path):
    store = fill(tmp_path, [4]).store
    assert store.writer() is None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, store.path], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        told = f"relight-extract, pid {holder.pid}"
        assert store.writer() == told
        with pytest.raises(Locked, match=told), store.exclusive("another"):
            pass
        holder.kill()
        holder.wait()
    with store.exclusive("another"):
        assert store.writer() == f"another, pid {os.getpid()}"


def test_sweeping_takes_unfinished_writes_only(tmp_path):
    store = fill(tmp_path, [4]).store
    Path(store.path_of(0)).with_name(".relight-tmp-data_1.ckpt.99").write_bytes(b"half")
    Path(store.path, ".relight-tmp-runs.json.99").write_bytes(b"half")
    assert store.sweep() == 2
    assert store.temporaries() == []
    assert os.path.exists(store.path_of(0))


def test_quarantine_keeps_bytes_path_and_reason_and_no_reader_sees_it(tmp_path):
    store = fill(tmp_path, [4, 5]).store
    data = Path(store.path_of(1)).read_bytes()
    for _time in range(2):  # the second time beside the first, not over it
        moved = Path(store.quarantine("rows_0-2000/data_1.ckpt", "torn", "20260101T000000Z", "is short"))
        assert moved.read_bytes() == data
        Path(store.path_of(1)).write_bytes(data)
    folder = Path(store.path) / "quarantine" / "20260101T000000Z-torn"
    assert [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("data_*"))] == [
        "rows_0-2000/data_1.ckpt.quarantined",
        "rows_0-2000/data_1.ckpt.quarantined.quarantined",
    ]
    assert not list(folder.rglob("*.ckpt"))
    lines = [json.loads(line) for line in (folder / "reason.jsonl").read_text().splitlines()]
    assert [(line["from"], line["reason"], line["what"]) for line in lines] == [("rows_0-2000/data_1.ckpt", "torn", "is short")] * 2
    assert sorted(store.entries()) == [0]


def test_a_reason_that_was_lost_is_told_again(tmp_path):
    store = fill(tmp_path, [4, 5]).store
    store.quarantine("rows_0-2000/data_1.ckpt", "torn", "20260101T000000Z", "is short")
    reasons = Path(store.path) / "quarantine" / "20260101T000000Z-torn" / "reason.jsonl"
    os.truncate(reasons, reasons.stat().st_size - 9)
    assert store.retell() == 1
    assert store.retell() == 0
    last = json.loads(reasons.read_text().splitlines()[-1])
    assert (last["file"], last["from"], last["reason"]) == ("rows_0-2000/data_1.ckpt.quarantined", "rows_0-2000/data_1.ckpt", "torn")


def test_safetensors_agree_with_the_formats_own_library(tmp_path):
    tensors = sample(3, 5).tensors
    path = tmp_path / "dump"
    with open(path, "wb") as handle:
        format_.write(handle, tensors, {"rid": "relight-1"})
    loaded = safetensors.numpy.load_file(path)
    assert {name: value.tobytes() for name, value in loaded.items()} == {name: bytes(tensor.buffer) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(loaded, tmp_path / "theirs", metadata={"rid": "relight-1"})
    with format_.mapped(str(tmp_path / "theirs")) as (header, views):
        assert header.metadata == {"rid": "relight-1"}
        assert {name: (view.dtype, view.shape, bytes(view.buffer)) for name, view in views.items()} == {
            name: (tensor.dtype, tensor.shape, bytes(tensor.buffer)) for name, tensor in tensors.items()
        }


@given(st.data())
@settings(deadline=None)
def test_a_cut_or_longer_safetensors_file_is_broken(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("st") / "dump"
    with open(path, "wb") as handle:
        format_.write(handle, sample(3, 2).tensors, {})
    size = path.stat().st_size
    os.truncate(path, data.draw(st.integers(0, size - 1) | st.integers(size + 1, size + 99)))
    with pytest.raises(format_.BadFile):
        format_.read_header(str(path))
