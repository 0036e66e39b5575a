# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What we write is read by torch and by the trainer's own reader, and what torch writes is read by us. Runs in SGLang's environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import ckpt, inventory
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import TensorBytes

from tests.harness import ROOT
from tests.samples import HIDDEN, fill, ids_of, mask_of

PYTHON = ROOT / ".venv" / "sglang" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment: make test")


def child(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [PYTHON, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd="/",
        env={"PATH": "/usr/bin"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


LOAD = """
import json, sys, torch
told = []
for mapped in (True, False):
    value = torch.load(sys.argv[1], weights_only=True, mmap=mapped)
    told.append({name: [str(item.dtype), list(item.shape), item.contiguous().view(torch.uint8).flatten().tolist() if item.dim() else []]
                 for name, item in value.items() if name != "relight"} | {"relight": value["relight"]})
assert told[0] == told[1]
print(json.dumps(told[0]))
"""


def test_torch_loads_what_we_write(tmp_path):
    widths = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
    tensors = {dtype: TensorBytes(dtype, (1, 2, 3), bytes(range(6 * width))) for dtype, width in widths.items()}
    tensors["long"] = TensorBytes("int16", (70_000,), bytes(140_000))
    path = tmp_path / "ours.ckpt"
    with open(path, "wb") as handle:
        ckpt.write(handle, tensors, {"run": "r", "ü": "x"})
    told = json.loads(child(LOAD, path))
    assert told.pop("relight") == {"run": "r", "ü": "x"}
    assert told == {name: [f"torch.{tensor.dtype}", list(tensor.shape), list(bytes(tensor.buffer))] for name, tensor in tensors.items()}


SAVE = """
import sys, torch
base = torch.arange(24, dtype=torch.float32)
torch.save({
    "input_ids": torch.arange(4), "loss_mask": torch.ones(4, dtype=torch.int64),
    "hidden_state": torch.arange(8).reshape(1, 4, 2).bfloat16(), "aux_hidden_state": torch.zeros(1, 4, 6).bfloat16(),
    "view": base[8:16].reshape(2, 4), "relight": {"run": "r"},
}, sys.argv[1])
torch.save({"turned": torch.zeros(2, 3).t()}, sys.argv[2])
torch.save({"list": [1]}, sys.argv[3])
print("saved")
"""


def test_we_read_what_torch_writes(tmp_path):
    paths = [str(tmp_path / name) for name in ("a.ckpt", "turned.ckpt", "list.ckpt")]
    child(SAVE, *paths)
    header = ckpt.read_header(paths[0])
    assert header.extra == {"run": "r"}
    assert ckpt.broken_entries(paths[0], header) == []
    assert (header.tensors["hidden_state"].dtype, header.tensors["hidden_state"].shape) == ("bfloat16", (1, 4, 2))
    ids = ckpt.read_tensor(paths[0], header.tensors["input_ids"])
    assert list(memoryview(ids).cast("q")) == [0, 1, 2, 3]
    view = ckpt.read_tensor(paths[0], header.tensors["view"])
    assert list(memoryview(view).cast("f")) == [float(number) for number in range(8, 16)]
    with pytest.raises(ckpt.Strange, match="memory order"):
        ckpt.read_header(paths[1])
    with pytest.raises(ckpt.Strange, match="EMPTY_LIST"):
        ckpt.read_header(paths[2])


TRAIN = """
import json, os, sys
os.environ["SPECFORGE_VALIDATE_OFFLINE_FEATURES"] = "1"
from specforge.algorithms.eagle3.data import build_offline_normalizer, build_offline_reader, build_server_collator
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
refs = build_offline_reader(sys.argv[1], run_id="offline", ttt_length=7, max_len=2048).read()
loader = FeatureDataLoader(LocalFeatureStore(), refs=refs, per_sample_transform=build_offline_normalizer(2048),
                           collate_fn=build_server_collator(), drop_last=False)
told = []
for ref, batch in zip(refs, loader, strict=True):
    tensors = batch.tensors
    told.append([ref.feature_store_uri, ref.num_tokens, {name: list(item.shape) for name, item in tensors.items()},
                 tensors["input_ids"][0].tolist(), tensors["loss_mask"][0].tolist()])
print(json.dumps(told))
"""


def test_specforges_own_reader_and_loader_take_the_store(tmp_path):
    """Every sample, and nothing else: neither what is quarantined nor what is unfinished."""
    lengths = [5, 9, 7, 6]
    filled = fill(tmp_path, lengths)
    filled.store.quarantine("rows_0-2000/data_2.ckpt", "torn", "20260101T000000Z")
    filled.file(1).with_name(".relight-tmp-data_2.ckpt.77").write_bytes(b"half")
    assert inventory.take(filled.store.path, "specforge", str(filled.dataset)).intact == 3
    told = {Path(uri).name: rest for uri, *rest in json.loads(child(TRAIN, filled.store.path))}
    assert sorted(told) == ["data_0.ckpt", "data_1.ckpt", "data_3.ckpt"]
    for index in (0, 1, 3):
        tokens, shapes, ids, mask = told[f"data_{index}.ckpt"]
        length = lengths[index]
        assert tokens == length
        assert shapes == {
            "input_ids": [1, length],
            "loss_mask": [1, length],
            "attention_mask": [1, length],
            "hidden_state": [1, length, 3 * HIDDEN],
            "target": [1, length, HIDDEN],
        }
        assert ids == ids_of(index, length)
        assert mask == [*mask_of(length)[:-1], 0]
