"""weights_check on model directories broken one way each, through the real module."""

import errno
import hashlib
import json
import os
import time

import numpy
import pytest
from ansible_collections.relight.recovery.plugins.module_utils import digests, weights
from safetensors.numpy import load_file, save_file

from tests.harness import run_module

HIDDEN = 16
LAYERS = 4
NAMES = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]


def tensors(prefix=""):
    rng = numpy.random.default_rng(3)
    made = {f"{prefix}model.embed_tokens.weight": (32, HIDDEN), f"{prefix}model.norm.weight": (HIDDEN,)}
    made.update({f"{prefix}model.layers.{n}.mlp.up_proj.weight": (8, HIDDEN) for n in range(LAYERS)})
    return {name: rng.normal(size=shape).astype(numpy.float32) for name, shape in made.items()}


@pytest.fixture
def model(tmp_path):
    return build(tmp_path / "model")


def build(path, prefix="", config=None):
    path.mkdir()
    content = tensors(prefix)
    weight_map = {name: NAMES[at * 3 // len(content)] for at, name in enumerate(content)}
    for shard in NAMES:
        save_file({name: value for name, value in content.items() if weight_map[name] == shard}, path / shard)
    total = sum(value.nbytes for value in content.values())
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config or {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS}))
    return path


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def check(path, **options):
    return run_module("weights_check", path=str(path), **options)["gate"]


def codes(gate):
    return [problem["code"] for problem in gate["problems"]]


def test_a_whole_model_passes_and_tells_what_it_is(model):
    gate = check(model, shards=3)
    assert (gate["verdict"], gate["problems"]) == ("pass", [])
    evidence = gate["evidence"]
    assert (evidence["shards"], evidence["tensors"], evidence["layers"]) == (3, 6, 4)
    assert evidence["bytes"] == sum((model / name).stat().st_size for name in NAMES)
    assert evidence["dtype_bytes"] == {"F32": 4 * (32 * HIDDEN + HIDDEN + LAYERS * 8 * HIDDEN)}
    assert check(model, fingerprint=evidence["fingerprint"])["verdict"] == "pass"


def test_a_nested_text_model_is_understood(tmp_path):
    nested = {"text_config": {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS}, "hidden_size": 999}
    gate = check(build(tmp_path / "m", "language_model.", nested))
    assert (gate["verdict"], gate["evidence"]["layers"]) == ("pass", 4)
    edit(tmp_path / "m" / "config.json", lambda c: c["text_config"].update(hidden_size=32))
    assert codes(check(tmp_path / "m")) == ["weights-shape", "weights-shape"]


def test_one_file_needs_no_index(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "num_hidden_layers": LAYERS}))
    assert check(tmp_path)["verdict"] == "pass"


def drop(model):
    (model / NAMES[1]).unlink()


def dangling(model):
    (model / NAMES[1]).unlink()
    (model / NAMES[1]).symlink_to("blobs/gone")


def truncate(model):
    os.truncate(model / NAMES[1], (model / NAMES[1]).stat().st_size - 1)


def extend(model):
    os.truncate(model / NAMES[1], (model / NAMES[1]).stat().st_size + 4096)


def empty(model):
    os.truncate(model / NAMES[1], 0)


def header_zeroed(model):
    data = (model / NAMES[1]).read_bytes()
    (model / NAMES[1]).write_bytes(data[:8] + bytes(32) + data[40:])


def swap(model):
    (model / NAMES[0]).rename(model / "x")
    (model / NAMES[1]).rename(model / NAMES[0])
    (model / "x").rename(model / NAMES[1])


def extra(model):
    save_file(tensors(), model / "model-00001-of-00002.safetensors")


def adapter(model):
    save_file(tensors(), model / "adapter.safetensors")


def ghost(model):
    edit(model / weights.INDEX, lambda i: i["weight_map"].update({"model.layers.9.w": NAMES[0]}))


def forgotten(model):
    edit(model / weights.INDEX, lambda i: i["weight_map"].pop("model.norm.weight"))


def no_index(model):
    (model / weights.INDEX).unlink()


def torn_index(model):
    (model / weights.INDEX).write_text('{"weight_map": {"a"')


def escaping_index(model):
    edit(model / weights.INDEX, lambda i: i["weight_map"].update({"model.norm.weight": "../x.safetensors"}))


def no_config(model):
    (model / "config.json").unlink()


def torn_config(model):
    (model / "config.json").write_text('{"hidden_size": ')


def narrow(model):
    edit(model / "config.json", lambda c: c.update(hidden_size=HIDDEN * 2))


def deeper(model):
    edit(model / "config.json", lambda c: c.update(num_hidden_layers=LAYERS + 1))


def shallower(model):
    edit(model / "config.json", lambda c: c.update(num_hidden_layers=LAYERS - 1))


def total(model):
    edit(model / weights.INDEX, lambda i: i["metadata"].update(total_size=1))


@pytest.mark.parametrize(
    ("fault", "verdict", "found"),
    [
        (drop, "fail", ["weights-shard-missing"]),
        (dangling, "fail", ["weights-shard-missing"]),
        (truncate, "fail", ["weights-shard-torn"]),
        (extend, "fail", ["weights-shard-extended"]),
        (empty, "fail", ["weights-shard-torn"]),
        (header_zeroed, "fail", ["weights-shard-invalid"]),
        (swap, "fail", ["weights-tensor-misplaced"]),
        (extra, "fail", ["weights-shard-extra"]),
        (adapter, "warn", ["weights-shard-extra"]),
        (ghost, "fail", ["weights-tensor-absent"]),
        (forgotten, "fail", ["weights-tensor-unlisted"]),
        (no_index, "fail", ["weights-index-missing"]),
        (torn_index, "fail", ["weights-index-torn"]),
        (escaping_index, "fail", ["weights-index-torn"]),
        (no_config, "fail", ["weights-config-missing"]),
        (torn_config, "fail", ["weights-config-torn"]),
        (narrow, "fail", ["weights-shape", "weights-shape"]),
        (deeper, "fail", ["weights-layers"]),
        (shallower, "fail", ["weights-layers"]),
        (total, "warn", ["weights-total-size"]),
    ],
)
def test_each_fault_is_found(model, fault, verdict, found):
    fault(model)
    gate = check(model)
    assert (codes(gate), gate["verdict"]) == (found, verdict)


def test_a_tensor_that_its_shard_lost_is_named(model):
    content = load_file(model / NAMES[0])
    lost, _ = content.popitem()
    save_file(content, model / NAMES[0])
    gate = check(model)
    assert codes(gate) == ["weights-total-size", "weights-tensor-absent"]
    assert gate["problems"][-1]["what"] == f"the index names 1 tensors that {NAMES[0]} lacks: {lost}"


def test_a_later_prediction_layer_is_no_fault(model):
    edit(model / "config.json", lambda c: c.update(num_hidden_layers=LAYERS - 1, num_nextn_predict_layers=1))
    assert check(model)["verdict"] == "pass"


def test_another_number_of_shards_than_expected(model):
    assert codes(check(model, shards=4)) == ["weights-shard-count"]


def test_whole_weights_of_another_model(model):
    content = load_file(model / NAMES[0])
    save_file(content, model / NAMES[0], metadata={"run": "1"})
    size = (model / NAMES[0]).stat().st_size
    good = check(model)["evidence"]["fingerprint"]
    save_file(content, model / NAMES[0], metadata={"run": "2"})  # the same names and lengths, another header
    assert (model / NAMES[0]).stat().st_size == size
    gate = check(model, fingerprint=good)
    assert codes(gate) == ["weights-other"]
    assert good in gate["problems"][0]["what"]


def test_equal_length_and_other_bytes_are_found_by_digest_only(model):
    digest = hashlib.sha256((model / NAMES[0]).read_bytes()).hexdigest()
    assert check(model, digests={NAMES[0]: digest.upper()})["verdict"] == "pass"
    data = bytearray((model / NAMES[0]).read_bytes())
    data[-1] ^= 1
    (model / NAMES[0]).write_bytes(data)
    assert check(model)["verdict"] == "pass"
    assert codes(check(model, digests={NAMES[0]: digest})) == ["weights-digest"]
    assert codes(check(model, digests={"gone": digest})) == ["weights-shard-missing"]


def test_a_wrong_directory_is_one_sentence(tmp_path):
    gate = check(tmp_path / "nowhere")
    assert (codes(gate), gate["summary"]) == (["weights-no-directory"], f"{tmp_path}/nowhere: there is no such directory")
    (tmp_path / "notes.txt").write_text("x")
    assert codes(check(tmp_path)) == ["weights-not-a-model"]


def test_an_unreadable_shard_is_unknown():
    seen = weights.Seen("/m", config={}, indexed=True, shards=[weights.Shard("a", error="[Errno 13] Permission denied")])
    gate = weights.judge(seen, weights.Expected())
    assert (gate.verdict.word, gate.problems[0].code) == ("unknown", "weights-unreadable")


def test_a_thousand_shards_are_quick(tmp_path):
    weight_map = {}
    value = numpy.ones((4,), numpy.float32)
    for n in range(1000):
        shard = f"model-{n + 1:05d}-of-01000.safetensors"
        names = [f"model.layers.{n}.experts.{m}.weight" for m in range(50)]
        save_file(dict.fromkeys(names, value), tmp_path / shard)
        weight_map.update(dict.fromkeys(names, shard))
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1000}))
    start = time.monotonic()
    gate = weights.judge(weights.look(str(tmp_path)), weights.Expected(shards=1000))
    assert time.monotonic() - start < 10
    assert (gate.verdict.word, gate.evidence["tensors"]) == ("pass", 50_000)


def digests_of(model):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.iterdir()}


def test_each_file_that_is_not_the_baselines_is_named(model, tmp_path):
    known = digests_of(model)
    assert codes(check(model, digests=known, complete=True)) == []
    first, second = (model / name for name in NAMES[:2])
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two), second.write_bytes(one)
    gate = check(model, digests=known, complete=True)
    swapped = [(p["where"], p["what"]) for p in gate["problems"] if p["code"] == "weights-swapped"]
    assert [where for where, _what in swapped] == [str(first), str(second)]
    assert f"it holds what {NAMES[1]} should hold" in swapped[0][1]
    first.write_bytes(one), second.write_bytes(two)
    last = model / NAMES[2]
    last.write_bytes(last.read_bytes()[:-4] + b"\0\0\0\1")
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    gate = check(model, digests=known, complete=True)
    assert [(p["code"], p["where"]) for p in gate["problems"]] == [
        ("weights-digest", str(model / "config.json")),
        ("weights-digest", str(last)),
    ]


def test_a_weight_file_that_the_baseline_does_not_know_is_extra(tmp_path):
    (tmp_path / "m").mkdir()
    save_file(tensors(), tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "num_hidden_layers": LAYERS}))
    known = digests_of(tmp_path / "m")
    save_file({"other": numpy.zeros((2, HIDDEN), numpy.float32)}, tmp_path / "m" / "adapter.safetensors")
    assert "weights-shard-extra" in codes(check(tmp_path / "m", digests=known, complete=True))
    assert "weights-shard-extra" not in codes(check(tmp_path / "m", digests=known))


def test_an_unchanged_file_is_read_once_and_a_changed_one_again(model, tmp_path):
    known, state = digests_of(model), str(tmp_path / "state")
    whole = sum(path.stat().st_size for path in model.iterdir())

    def read_bytes(**options):
        gate = check(model, digests=known, state_dir=state, **options)
        return gate["evidence"]["digested_bytes"], codes(gate)

    assert read_bytes(check=True) == (whole, []), "check mode looks"
    assert not (tmp_path / "state").exists(), "and remembers nothing"
    assert read_bytes() == (whole, [])
    assert read_bytes() == (0, [])
    assert read_bytes(reread=True) == (whole, [])
    shard = model / NAMES[1]
    status = shard.stat()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))  # the same length, time and inode; the kernel's own time tells
    assert read_bytes() == (status.st_size, ["weights-digest"])
    assert read_bytes() == (0, ["weights-digest"]), "a wrong file stays wrong without being read"


def test_a_digest_is_remembered_only_of_what_is_on_the_disk(model, tmp_path, monkeypatch):
    def fails(_fd):
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(digests.os, "fsync", fails)
    cache = digests.Cache(None)
    found = digests.of(str(model), NAMES, cache, 60).found
    assert found == {name: hashlib.sha256((model / name).read_bytes()).hexdigest() for name in NAMES}
    assert [cache.get(str(model / name), (model / name).stat()) for name in NAMES] == [None] * 3
    monkeypatch.undo()
    digests.of(str(model), NAMES, cache, 60)
    assert [cache.get(str(model / name), (model / name).stat()) for name in NAMES] == [found[name] for name in NAMES]


def test_a_torn_or_foreign_cache_is_no_verdict(model, tmp_path):
    known = digests_of(model)
    (tmp_path / "digests.jsonl").write_text(
        '{"path": 3}\n[]\n{"path": "' + str(model / NAMES[0]) + '", "file": [1, 2], "sha256": "00"}\n{"pa'
    )
    assert codes(check(model, digests=known, state_dir=str(tmp_path))) == []


def test_what_could_not_be_read_in_time_is_unknown(model, tmp_path):
    known = digests_of(model)
    reading = weights.Reading(tuple(known), str(tmp_path), seconds=0.0)
    gate = weights.judge(weights.look(str(model), reading), weights.Expected(digests=known))
    assert (gate.verdict.word, [p.code for p in gate.problems]) == ("unknown", ["weights-undigested"])
    done = weights.look(str(model), weights.Reading(tuple(known), str(tmp_path)))
    assert weights.judge(done, weights.Expected(digests=known)).verdict.word == "pass"


@pytest.mark.parametrize(
    ("name", "head"), [("lm_head.weight", "lm_head.weight"), ("language_model.lm_head.weight",) * 2, ("other.weight", None)]
)
def test_the_heads_name_is_told(tmp_path, name, head):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "num_hidden_layers": 0}))
    save_file({name: numpy.zeros((4, HIDDEN), numpy.float32)}, tmp_path / "model.safetensors")
    assert weights.judge(weights.look(str(tmp_path)), weights.Expected()).evidence["lm_head"] == head
