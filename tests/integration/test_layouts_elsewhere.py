# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""speculators' own dataset and ModelOpt's way to load take what we write, and we take what they write. Runs in SGLang's environment."""

from __future__ import annotations

import json

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import inventory
from ansible_collections.relight.recovery.plugins.module_utils.records import id_bytes

from relight.hostlook import look_at_content
from tests.integration.test_samples_elsewhere import PYTHON, child
from tests.samples import HIDDEN, fill, fix, ids_of, mask_of, sample

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment: make test")
SPECULATORS = any(PYTHON.parent.parent.glob("lib/python3*/site-packages/speculators/train/data.py"))
LENGTHS = [5, 9, 7, 6]

TRAIN = """
import json, sys
from pathlib import Path
from datasets import Dataset
from hs_connectors import FileTransfer
from speculators.data_generation.offline import check_hidden_states, find_corrupt_hidden_state_indices, get_existing_hidden_state_indices
from speculators.train.data import ArrowDataset
store, work, told = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
rows = Dataset.from_dict({"input_ids": [ids for ids, _ in told], "loss_mask": [mask for _, mask in told],
                          "seq_len": [len(ids) for ids, _ in told]}).with_format("torch")
rows.save_to_disk(work)
import torch
data = ArrowDataset(2048, work, FileTransfer(store), on_missing="raise", hidden_states_dtype=torch.float32)
data.data = data.data.with_format("torch")
existing = get_existing_hidden_state_indices(store)
assert existing == list(range(len(told))) and find_corrupt_hidden_state_indices(store, existing) == {}
out = []
for index, (ids, mask) in enumerate(told):
    check_hidden_states(data.transfer.get_cached(index), ids)
    item = data[index]
    out.append({name: [str(value.dtype), list(value.shape), value.float().flatten().tolist()] for name, value in item.items()})
print(json.dumps(out))
"""


def floats_of(buffer) -> list[float]:
    return list(memoryview(bytes(buffer)).cast("f"))


@pytest.mark.skipif(not SPECULATORS, reason="no speculators in the SGLang environment: make test")
def test_speculators_own_dataset_takes_every_sample(tmp_path):
    """The states, their order and the final one apart, just as its trainer is handed them; nothing is skipped or generated."""
    made = fill(tmp_path, LENGTHS, (), "speculators", "pre")
    told = [(ids_of(index, tokens), mask_of(tokens)) for index, tokens in enumerate(LENGTHS)]
    out = json.loads(child(TRAIN, made.store.path, tmp_path / "arrow", json.dumps(told)))
    for index, tokens in enumerate(LENGTHS):
        want = sample(index, tokens).tensors
        assert out[index]["hidden_states"][1:] == [[tokens, 3 * HIDDEN], floats_of(want["aux_hidden_state"].buffer)]
        assert out[index]["verifier_last_hidden_states"][1:] == [[tokens, HIDDEN], floats_of(want["hidden_state"].buffer)]
        assert out[index]["input_ids"] == ["torch.int64", [tokens], [float(number) for number in ids_of(index, tokens)]]


# The way of modelopt.torch.speculative.eagle.utils.OfflineSupervisedDataset, whose package is not needed for it.
OFFLINE = """
import json, sys, torch
from pathlib import Path
out = {}
for path in sorted(Path(sys.argv[1]).rglob("*.pt")):
    data = torch.load(str(path), weights_only=True)
    labels = torch.full_like(data["input_ids"], -100)
    labels[..., :-1] = data["input_ids"][..., 1:]
    mask = data["loss_mask"].to(data["input_ids"].dtype)
    out[path.name] = {"ids": data["input_ids"].tolist(), "mask": mask.tolist(), "labels": labels.tolist(), "id": data["conversation_id"],
                      "final": [list(data["hidden_states"].shape), data["hidden_states"].flatten().tolist()],
                      "aux": [list(data["aux_hidden_states"].shape), data["aux_hidden_states"].flatten().tolist()],
                      "prenorm": bool(data.get("hidden_states_prenorm", False))}
print(json.dumps(out))
"""


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_modelopts_way_to_load_takes_every_sample_and_nothing_else(tmp_path, norm):
    made = fill(tmp_path, LENGTHS, (), "modelopt", norm)
    made.store.quarantine("conv 2.pt", "torn", "20260101T000000Z")
    (made.file(1).parent / ".relight-tmp-conv 3.pt.7").write_bytes(b"half")
    out = json.loads(child(OFFLINE, made.store.path))
    assert sorted(out) == ["conv 0.pt", "conv 1.pt", "conv 3.pt"]
    for index in (0, 1, 3):
        tokens, want, told = LENGTHS[index], sample(index, LENGTHS[index]).tensors, out[f"conv {index}.pt"]
        assert (told["ids"], told["mask"], told["id"]) == (ids_of(index, tokens), mask_of(tokens), f"conv {index}")
        assert told["final"] == [[tokens, HIDDEN], floats_of(want["hidden_state"].buffer)]
        assert told["aux"] == [[tokens, 3 * HIDDEN], floats_of(want["aux_hidden_state"].buffer)]
        assert told["prenorm"] is (norm == "pre")


# As ModelOpt's compute_hidden_states_vllm.py saves: the final state is a view of all layers, whose whole storage is kept.
SAVE = """
import sys, torch
from safetensors.torch import save_file
from pathlib import Path
folder = Path(sys.argv[1])
for name in ("theirs", "hidden_states"):
    (folder / name).mkdir()
for index, tokens in enumerate([5, 9, 7]):
    ids = torch.arange(tokens) + 1000 * index
    states = (torch.randn(tokens, 4, 8, generator=torch.Generator().manual_seed(index)) + 0.5).bfloat16()
    if index == 2:
        states[3, 1, 4] = float("nan")
    save_file({"hidden_states": states, "token_ids": ids}, folder / "hidden_states" / f"hs_{index}.safetensors")
    final, aux = states[:, -1, :].cpu(), states[:, :-1, :].cpu()
    aux = aux.reshape(aux.shape[0], -1)
    mask = (torch.arange(tokens + 3) >= tokens // 2).long()
    with open(folder / "theirs" / f"conv {index}.pt", "wb") as handle:
        torch.save({"input_ids": ids, "hidden_states": final, "aux_hidden_states": aux, "loss_mask": mask[:tokens].cpu(),
                    "conversation_id": f"conv {index}"}, handle)
print(sorted(final.stride()))
"""


def test_stores_that_their_own_tools_made_are_judged(tmp_path):
    assert child(SAVE, tmp_path) == "[1, 32]"  # the case that is meant: rows that lie apart
    dataset = fix(tmp_path / "dataset", [5, 9, 7], ["conv 0", "conv 1", "conv 2"])
    identity = {"dtype": "bfloat16", "hidden_size": HIDDEN}
    for kind, folder in (("modelopt", "theirs"), ("speculators", "hidden_states")):
        place = str(tmp_path / folder)
        headers = inventory.take(place, kind, str(dataset), identity)
        assert (headers.intact, headers.adopted, headers.found) == (3, 3, [])
        content = inventory.take(place, kind, str(dataset), identity, "content", look_at_content)
        assert (content.intact, content.counts["doubtful"]) == (2, 1)
        assert "not finite" in content.found[0].why
    assert id_bytes(ids_of(1, 9)) == bytes(inventory.layouts.ModelOpt().look(str(tmp_path / "theirs" / "conv 1.pt")).ids)
