# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What a trainer is handed beside the samples: the vocabulary mapping, and lists of what is whole while the extraction runs."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import ckpt
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import TensorBytes
from ansible_collections.relight.recovery.plugins.module_utils.dataset import FixedRecords, FixedWriter
from ansible_collections.relight.recovery.plugins.module_utils.records import Raw, record_digest

from relight.cli import main
from relight.extract import vocabulary
from tests.integration.test_samples_elsewhere import PYTHON, child
from tests.samples import fill

RECORDS = [([5, 5, 7, 1, 9], [0, 1, 1, 1, 1]), ([7, 2, 9, 9], [1, 1, 1, 0]), ([30, 2], [1, 1]), ([4, 4, 4], [0, 0, 0])]


@pytest.fixture
def dataset(tmp_path):
    with FixedWriter(str(tmp_path / "dataset"), {}) as writer:
        for index, (ids, mask) in enumerate(RECORDS):
            writer.append(Raw(index, None, record_digest(ids, mask)), ids, mask)
    return tmp_path / "dataset"


def counted(max_length=None):
    counts = Counter()
    for ids, mask in RECORDS:
        counts.update(token for token, flag in list(zip(ids, mask, strict=True))[:max_length] if flag)
    return counts


def mapping(*words):
    return main(["vocab-mapping", *map(str, words)])


SPECFORGE = """
import json, sys, torch
from collections import Counter
from specforge.core.compact_teacher import validate_vocab_mapping_consistency
from specforge.data.preprocessing import process_token_dict_to_mappings
out = []
for path, counted, draft in json.loads(sys.argv[1]):
    value = torch.load(path)
    validate_vocab_mapping_consistency(value["t2d"], value["d2t"])
    counts = Counter({int(token): count for token, count in sorted(counted.items(), key=lambda item: int(item[0]))})
    d2t, t2d = process_token_dict_to_mappings(counts, draft, 40)
    out.append([torch.equal(d2t, value["d2t"]), torch.equal(t2d, value["t2d"]), str(value["d2t"].dtype), str(value["t2d"].dtype)])
print(json.dumps(out))
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment: make test")
def test_the_mapping_is_the_one_that_specforge_makes_of_the_same_counts(tmp_path, dataset):
    asked = []
    for draft, length in ((4, None), (12, None), (3, 2)):
        path = tmp_path / "out" / f"{draft}.pt"
        words = ("--dataset", dataset, "--to", path, "--draft-vocab-size", draft, "--target-vocab-size", 40)
        assert mapping(*words, *(("--max-length", length) if length else ())) == 0
        asked.append([str(path), counted(length), draft])
    assert json.loads(child(SPECFORGE, json.dumps(asked))) == [[True, True, "torch.int64", "torch.bool"]] * 3


def test_the_same_dataset_makes_the_same_file_and_says_so(tmp_path, dataset, capsys):
    for name in "ab":
        assert mapping("--dataset", dataset, "--to", tmp_path / name, "--draft-vocab-size", 4, "--target-vocab-size", 40) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    told = ckpt.read_header(str(tmp_path / "a")).extra
    with FixedRecords(str(dataset)) as records:
        assert told["dataset"] == records.digest
    counts = counted()
    assert (told["records"], told["tokens"]) == ("4", str(sum(counts.values())))
    assert told["tokens_known"] == str(sum(counts[token] for token in (2, 5, 7, 9)))
    assert "4 of 40 tokens" in capsys.readouterr().out


def test_a_check_finds_what_is_wrong(tmp_path, dataset, capsys):
    path = tmp_path / "map.pt"
    words = ("--dataset", dataset, "--to", path, "--draft-vocab-size", 4, "--target-vocab-size", 40)
    assert mapping(*words) == mapping(*words, "--check") == 0
    assert mapping(*words, "--check", "--max-length", "2") == 1
    assert "made of another dataset or with another length" in capsys.readouterr().out
    marks = bytearray(40)
    for token in (1, 2, 3, 7):
        marks[token] = 1
    for d2t, why in (([1, 1, 1, 4], "knows other tokens than the whole dataset asks for"), ([0, 0, 0, 0], "contradicts itself")):
        tensors = {"d2t": TensorBytes("int64", (4,), array("q", d2t).tobytes()), "t2d": TensorBytes("bool", (40,), bytes(marks))}
        with open(path, "wb") as handle:
            ckpt.write(handle, tensors, {})
        assert mapping(*words, "--check") == 1
        assert why in capsys.readouterr().out
    path.write_bytes(path.read_bytes()[:-30])
    assert mapping(*words, "--check") == 2
    assert "is not a mapping of SpecForge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--target-vocab-size", 40), "give --draft-vocab-size or --draft-config"),
        (("--draft-vocab-size", 4), "give --target-vocab-size or --model"),
        (("--draft-vocab-size", 41, "--target-vocab-size", 40), "does not fit into the target's 40"),
        (("--draft-vocab-size", 4, "--target-vocab-size", 30), "record 2 holds the token 30, the model's vocabulary has 30"),
        (("--draft-vocab-size", 4, "--model", "/nowhere"), "cannot read /nowhere/config.json"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, dataset, capsys, words, why):
    assert mapping("--dataset", dataset, "--to", tmp_path / "map.pt", *words) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "map.pt").exists()


def test_a_head_that_specforge_would_not_find_is_noted(tmp_path, dataset, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 40, "hidden_size": 8}}))
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"language_model.lm_head.weight": "a", "language_model.model.norm.weight": "a"}}))
    assert mapping("--dataset", dataset, "--to", tmp_path / "map.pt", "--draft-vocab-size", 4, "--model", model) == 0
    out = capsys.readouterr().out
    assert "its head is called language_model.lm_head.weight, not lm_head.weight: set lm_head_key" in out
    assert "hidden_size inside text_config" in out
    (model / "config.json").write_text(json.dumps({"vocab_size": 40, "hidden_size": 8}))
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "a"}}))
    assert vocabulary.trainer_notes(str(model)) == []
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "a"}}))
    assert "where the head is the embedding" in vocabulary.trainer_notes(str(model))[0]
    index.unlink()
    assert "wants one *.index.json" in vocabulary.trainer_notes(str(model))[0]


# --- snapshots ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "norm"), [("specforge", "post"), ("speculators", "pre"), ("modelopt", "post")])
def test_a_snapshot_lists_what_is_whole_now(tmp_path, kind, norm):
    made = fill(tmp_path, [5, 9, 7, 6], (), kind, norm)
    os.truncate(made.file(1), 100)
    made.file(2).with_name(f".relight-tmp-{made.file(2).name}.7").write_bytes(b"half")
    words = ["snapshot", "--store", made.store.path, "--layout", kind, "--to", str(tmp_path / "list"), "--links", str(tmp_path / "links")]
    assert main(words) == 0
    head, *lines = (tmp_path / "list").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [item["index"] for item in samples] == [0, 2, 3]
    assert [Path(made.store.path) / item["file"] for item in samples] == [made.file(index) for index in (0, 2, 3)]
    assert [item["digest"] for item in samples] == [made.store.entries()[index].digest for index in (0, 2, 3)]
    told = json.loads(head)
    assert (told["samples"], told["tokens"], told["layout"]) == (3, 18, kind)
    assert told["digest"] == blake2b("".join(f"{line}\n" for line in lines).encode(), digest_size=16).hexdigest()
    links = [path for path in (tmp_path / "links").rglob("*") if path.is_symlink()]
    assert {path.resolve() for path in links} == {made.file(index) for index in (0, 2, 3)}
    assert {str(path.relative_to(tmp_path / "links")) for path in links} == {item["file"] for item in samples}
    made.store.quarantine(samples[0]["file"], "torn", "20260101T000000Z")
    assert main(words) == 0
    assert len([path for path in (tmp_path / "links").rglob("*") if path.is_symlink()]) == 2


def test_links_inside_the_store_are_refused(tmp_path, capsys):
    made = fill(tmp_path, [5])
    words = ["snapshot", "--store", made.store.path, "--to", str(tmp_path / "list"), "--links", f"{made.store.path}/links"]
    assert main(words) == 2
    assert "outside the store" in capsys.readouterr().err
    assert main(["snapshot", "--store", str(tmp_path / "none"), "--to", str(tmp_path / "list")]) == 4
    assert not (tmp_path / "list").exists()


LIST = """
import json, sys
from specforge.runtime.data_plane.offline_reader import list_feature_files
print(json.dumps(sorted(list_feature_files(sys.argv[1]))))
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment: make test")
def test_specforges_reader_walks_the_links(tmp_path):
    made = fill(tmp_path, [5, 9])
    assert main(["snapshot", "--store", made.store.path, "--to", str(tmp_path / "list"), "--links", str(tmp_path / "links")]) == 0
    found = json.loads(child(LIST, tmp_path / "links"))
    assert [Path(path).resolve() for path in found] == [made.file(0), made.file(1)]
