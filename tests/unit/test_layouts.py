# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Every layout: where samples live, that a file tells what was written, and that no damage or stranger is intact."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from ansible_collections.relight.recovery.plugins.module_utils import ckpt, inventory, layouts, surveying
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import TensorBytes
from ansible_collections.relight.recovery.plugins.module_utils.dataset import FixedWriter
from ansible_collections.relight.recovery.plugins.module_utils.records import Raw, id_bytes, record_digest, token_digest
from ansible_collections.relight.recovery.plugins.module_utils.store import Entry, Manifest, Store

from relight.extract.states import file_of, states_of
from relight.hostlook import look_at_content
from tests.samples import HIDDEN, fill, fix, ids_of, mask_of, put, sample

LENGTHS = [12, 7, 300, 5]
NORMS = {"specforge": "post", "speculators": "pre", "modelopt": "post"}
NAMES = {"specforge": "rows_0-2000/data_2.ckpt", "speculators": "hs_2.safetensors", "modelopt": "conv 2.pt"}
KINDS = sorted(NORMS)


def filled(tmp_path, kind, but=()):
    return fill(tmp_path, LENGTHS, but, kind, NORMS[kind])


def look(made, kind, depth="headers", dataset=True):
    content = look_at_content if depth == "content" else inventory.checksums
    return inventory.take(made.store.path, kind, str(made.dataset) if dataset else None, depth=depth, content=content)


def verdicts(tally):
    return {name: count for name, count in tally.counts.items() if count}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", inventory.DEPTHS)
def test_a_good_store_at_every_depth(tmp_path, kind, depth):
    made = filled(tmp_path, kind, but=(1,))
    assert os.path.relpath(made.file(2), made.store.path) == NAMES[kind]
    tally = look(made, kind, depth)
    assert (verdicts(tally), [item.why for item in tally.found]) == ({"intact": 3}, [])
    assert (list(tally.missing()), tally.tokens_intact, tally.temporaries) == ([1], 317, 0)
    assert tally.bytes == sum(made.file(index).stat().st_size for index in (0, 2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_told(tmp_path, kind):
    made = filled(tmp_path, kind)
    seen = made.store.layout.look(str(made.file(2)))
    assert (seen.tokens, seen.hidden_size, seen.dtype, seen.extra["run"]) == (300, HIDDEN, "float32", "run-1")
    assert (seen.ids, seen.token_digest) == (id_bytes(ids_of(2, 300)), token_digest(ids_of(2, 300)))
    assert seen.mask == (None if kind == "speculators" else bytes(mask_of(300)))
    assert seen.norm == ("post" if kind == "modelopt" else None)
    want = sample(2, 300).tensors
    with file_of(str(made.file(2))) as file:
        final, aux = states_of(file, seen)
    assert (final.tobytes(), aux.tobytes()) == (want["hidden_state"].buffer, want["aux_hidden_state"].buffer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 513])
def test_every_length_is_written_whole(tmp_path, kind, tokens):
    store = Store(str(tmp_path / "store"), layouts.layout(kind, str(fix(tmp_path / "dataset", [tokens], ["a"]))))
    put(store, sample(0, tokens))
    seen = store.layout.look(store.path_of(0))
    with file_of(store.path_of(0)) as file:
        final, aux = states_of(file, seen)
    want = sample(0, tokens).tensors
    assert (final.tobytes(), aux.tobytes()) == (want["hidden_state"].buffer, want["aux_hidden_state"].buffer)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_no_states_are_doubtful_whatever_the_digest_says(tmp_path, kind):
    made = filled(tmp_path, kind)
    nan = np.full(7 * HIDDEN, np.nan, "<f4").tobytes()
    put(made.store, sample(1, 7, states=nan, extra={"norm": NORMS[kind]}))
    assert verdicts(look(made, kind)) == {"intact": 4}
    assert verdicts(look(made, kind, "content")) == {"intact": 3, "doubtful": 1}


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def longer(path):
    with open(path, "ab") as handle:
        handle.write(b"\0" * 9)


def zeroed(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("damage", "verdict"), [(cut, "torn"), (longer, "torn"), (zeroed, "corrupt")])
def test_damage_that_headers_show(tmp_path, kind, damage, verdict):
    made = filled(tmp_path, kind)
    damage(made.file(2))
    assert verdicts(look(made, kind)) == {"intact": 3, verdict: 1}
    os.unlink(Manifest(str(made.file(2).parent)).path)
    assert verdicts(look(made, kind)) == {"intact": 3, "torn": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hole_is_seen_by_content(tmp_path, kind):
    made = filled(tmp_path, kind)
    with open(made.file(2), "r+b") as handle:
        handle.seek(20480)
        handle.write(bytes(4096))
    assert verdicts(look(made, kind)) == {"intact": 4}
    assert verdicts(look(made, kind, "content")) == {"intact": 3, "corrupt": 1}
    os.unlink(Manifest(str(made.file(2).parent)).path)
    assert verdicts(look(made, kind, "content")) == {"intact": 3, "doubtful" if kind == "speculators" else "corrupt": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_another_records_tokens_are_foreign(tmp_path, kind):
    made = filled(tmp_path, kind)
    put(made.store, sample(1, 7, ids=ids_of(9, 7)))
    tally = look(made, kind)
    assert verdicts(tally) == {"intact": 3, "foreign": 1}
    assert "not those of its record" in tally.found[0].why


@pytest.mark.parametrize("kind", KINDS)
def test_quarantine_takes_the_file_out_of_the_manifest_and_of_the_readers_sight(tmp_path, kind):
    made = filled(tmp_path, kind)
    moved = made.store.quarantine(NAMES[kind], "torn", "20260101T000000Z")
    assert not moved.endswith(made.store.layout.suffixes)
    assert sorted(made.store.entries()) == [0, 1, 3]
    assert verdicts(look(made, kind)) == {"intact": 3}
    (Path(made.store.path) / ".relight-tmp-x.1").write_bytes(b"half")
    (made.file(0).parent / ".relight-tmp-y.1").write_bytes(b"half")
    assert (look(made, kind).temporaries, made.store.sweep(), look(made, kind).temporaries) == (2, 2, 0)


def test_names_in_a_flat_store():
    kind = layouts.Speculators()
    assert [kind.index_of(name) for name in ("hs_0.safetensors", "hs_17.safetensors")] == [0, 17]
    for stray in ("hs_01.safetensors", "hs_1.safetensors.lock", "x/hs_1.safetensors", "hs_-1.safetensors", "hs_.safetensors"):
        assert kind.index_of(stray) is None


# --- stores that Relight has not made ----------------------------------------------------------------------------------


def test_a_store_of_speculators_own_is_judged(tmp_path):
    """Its files have no metadata and no checksums: ids, structure and values are what there is."""
    dataset = fix(tmp_path / "dataset", LENGTHS)
    folder = tmp_path / "hidden_states"
    folder.mkdir()
    rng = np.random.default_rng(3)
    for index, tokens in enumerate(LENGTHS):
        states = rng.standard_normal((tokens, 4, HIDDEN)).astype("<f4")
        states[0, 0, 0] = np.inf if index == 3 else 1.0
        ids = np.array(ids_of(0 if index == 1 else index, tokens), "<i8")
        safetensors.numpy.save_file({"hidden_states": states, "token_ids": ids}, folder / f"hs_{index}.safetensors")
    (folder / "hs_0.safetensors.lock").write_bytes(b"")
    tally = inventory.take(str(folder), "speculators", str(dataset), {"hidden_size": HIDDEN}, "content", look_at_content)
    assert verdicts(tally) == {"intact": 2, "foreign": 1, "doubtful": 1}
    assert (tally.adopted, [item.enter["run"] for item in tally.enter]) == (2, ["adopted", "adopted"])
    assert "not finite" in next(item.why for item in tally.found if item.verdict == "doubtful")


@pytest.mark.parametrize(
    ("tensors", "verdict", "why"),
    [
        ({"hidden_states": np.zeros((5, 4, 8), "<f4")}, "foreign", "lacks token_ids"),
        ({"hidden_states": np.zeros((5, 4, 8), "<f4"), "token_ids": np.zeros(4, "<i8")}, "foreign", "in the shape [5, 4, 8]"),
        ({"hidden_states": np.zeros((5, 1, 8), "<f4"), "token_ids": np.zeros(5, "<i8")}, "foreign", "in the shape [5, 1, 8]"),
        ({"hidden_states": np.zeros((5, 4, 8), "<f8"), "token_ids": np.zeros(5, "<i8")}, "foreign", "of the types float64"),
        (
            {
                "hidden_states": np.zeros((5, 4, 8), "u1"),
                "token_ids": np.zeros(5, "<i8"),
                "hidden_states_scales": np.ones((5, 1, 1), "<f4"),
            },
            "unjudged",
            "8 bits",
        ),
    ],
)
def test_what_is_no_sample_of_speculators(tmp_path, tensors, verdict, why):
    dataset = fix(tmp_path / "dataset", [5])
    safetensors.numpy.save_file(tensors, tmp_path / "hs_0.safetensors")
    tally = inventory.take(str(tmp_path), "speculators", str(dataset))
    assert verdicts(tally) == {verdict: 1}
    assert why in tally.found[0].why


def test_metadata_of_others_are_not_believed(tmp_path):
    dataset = fix(tmp_path / "dataset", [5])
    tensors = {"hidden_states": np.ones((5, 4, HIDDEN), "<f4"), "token_ids": np.array(ids_of(0, 5), "<i8")}
    safetensors.numpy.save_file(tensors, tmp_path / "hs_0.safetensors", metadata={"run": "x", "dtype": "float16", "token_digest": "y"})
    tally = inventory.take(str(tmp_path), "speculators", str(dataset), {"dtype": "float32"})
    assert (verdicts(tally), tally.adopted) == ({"intact": 1}, 1)


def test_a_flag_that_contradicts_the_strings_rules(tmp_path):
    dataset = fix(tmp_path / "dataset", [7], ["a"])
    store = Store(str(tmp_path / "store"), layouts.layout("modelopt", str(dataset)))
    put(store, sample(0, 7, run="adopted", extra={"norm": "pre-surrogate"}))
    for norm, verdict in (("pre-surrogate", "intact"), ("pre", "foreign"), ("post", "foreign")):
        assert verdicts(inventory.take(store.path, "modelopt", str(dataset), {"norm": norm})) == {verdict: 1}
    item = sample(0, 7)
    with open(store.path_of(0), "wb") as handle:
        tensors = {
            "input_ids": item.tensors["input_ids"],
            "hidden_states": TensorBytes("float32", (7, HIDDEN), item.tensors["hidden_state"].buffer),
            "aux_hidden_states": TensorBytes("float32", (7, 3 * HIDDEN), item.tensors["aux_hidden_state"].buffer),
        }
        ckpt.write(handle, tensors, {"norm": "post"}, {"hidden_states_prenorm": True})
    os.unlink(Manifest(store.path).path)
    tally = inventory.take(store.path, "modelopt", str(dataset), {"norm": "post"})
    assert (verdicts(tally), tally.found[0].why) == ({"foreign": 1}, "is of another run: its norm is pre, not post")


def modelopt_file(path, ids, extra=None, values=None, states="float32"):
    tokens = len(ids)
    tensors = {
        "input_ids": TensorBytes("int64", (tokens,), id_bytes(ids)),
        "hidden_states": TensorBytes(states, (tokens, 2), bytes(range(1, 1 + 8 * tokens))),
        "aux_hidden_states": TensorBytes(states, (tokens, 6), bytes(range(24)) * tokens),
        **(extra or {}),
    }
    with open(path, "wb") as handle:
        ckpt.write(handle, {name: tensor for name, tensor in tensors.items() if tensor is not None}, {}, values or {"conversation_id": "a"})


def test_the_flag_of_modelopt_says_which_norm(tmp_path):
    for name, values, norm in (("a", {"hidden_states_prenorm": True}, "pre"), ("b", {"hidden_states_prenorm": False}, "post")):
        modelopt_file(tmp_path / f"{name}.pt", [1, 2], values=values)
        seen = layouts.ModelOpt().look(str(tmp_path / f"{name}.pt"))
        assert (seen.norm, seen.mask, seen.record_digest) == (norm, None, None)
    dataset = tmp_path / "dataset"
    with FixedWriter(str(dataset), {}) as writer:
        for index, name in enumerate("ab"):
            writer.append(Raw(index, name, record_digest([1, 2], [0, 1])), [1, 2], [0, 1])
    tally = inventory.take(str(tmp_path), "modelopt", str(dataset), {"norm": "post"})
    assert verdicts(tally) == {"intact": 1, "foreign": 1}
    assert tally.found[0].why == "is of another run: its norm is pre, not post"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"input_ids": None}, "lacks input_ids"),
        ({"hidden_states": TensorBytes("float32", (3, 2), bytes(24))}, "has hidden_states in the shape [3, 2]"),
        ({"aux_hidden_states": TensorBytes("float32", (2, 3), bytes(24))}, "auxiliary states of 3 numbers"),
        ({"loss_mask": TensorBytes("int64", (3,), bytes(24))}, "has loss_mask in the shape [3]"),
        ({"loss_mask": TensorBytes("float32", (2,), bytes(8))}, "a mask of the type float32"),
    ],
)
def test_what_is_no_sample_of_modelopt(tmp_path, changed, why):
    modelopt_file(tmp_path / "a.pt", [1, 2], changed)
    with pytest.raises(ckpt.Strange) as caught:
        layouts.ModelOpt().look(str(tmp_path / "a.pt"))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("mask", "flags"), [(("bool", b"\0\1"), b"\0\1"), (("int32", b"\1\0\0\0\0\0\0\0"), b"\1\0"), (("int8", b"\2\0"), b"")]
)
def test_masks_of_any_integers_are_read(tmp_path, mask, flags):
    modelopt_file(tmp_path / "a.pt", [1, 2], {"loss_mask": TensorBytes(mask[0], (2,), mask[1])})
    assert layouts.ModelOpt().look(str(tmp_path / "a.pt")).mask == flags


def test_names_come_from_the_records_and_never_change(tmp_path):
    identities = ["a", None, "a", "../b", ".hidden", "x" * 201, "record-1", "ü 1", "a.2"]
    dataset = fix(tmp_path / "dataset", [3] * 9, identities)
    kind = layouts.ModelOpt(str(dataset))
    names = [kind.path_of(index) for index in range(9)]
    assert names == [f"{name}.pt" for name in ("a", "record-1", "a.2", "record-3", "record-4", "record-5", "record-1.6", "ü 1", "a.2.8")]
    assert [kind.index_of(name) for name in names] == list(range(9))
    assert kind.index_of("b.pt") is None
    with FixedWriter(str(dataset)) as writer:
        writer.append(Raw(9, "late", record_digest([1], [1])), [1], [1])
    assert (kind.path_of(9), kind.index_of("late.pt")) == ("late.pt", 9)
    with pytest.raises(layouts.UnknownLayout, match="record 10 has no file name"):
        kind.path_of(10)


def test_without_records_the_manifest_tells_and_else_nobody(tmp_path):
    made = filled(tmp_path, "modelopt")
    assert verdicts(look(made, "modelopt", dataset=False)) == {"intact": 4}
    place = Store(made.store.path, layouts.layout("modelopt"))
    place.quarantine("conv 2.pt", "torn", "20260101T000000Z")
    assert sorted(place.entries()) == [0, 1, 3]
    os.unlink(Manifest(made.store.path).path)
    tally = look(made, "modelopt", dataset=False)
    assert verdicts(tally) == {"unjudged": 3}
    assert "named by its record" in tally.found[0].why


def test_a_stray_below_a_store_that_is_walked_is_foreign(tmp_path):
    for kind, count in (("modelopt", 1), ("speculators", 0)):
        made = filled(tmp_path / kind, kind)
        (Path(made.store.path) / "old").mkdir()
        (Path(made.store.path) / "old" / f"x{made.store.layout.suffixes[0]}").write_bytes(b"")
        assert verdicts(look(made, kind)).get("foreign", 0) == count


# --- adoption ----------------------------------------------------------------------------------------------------------


def bare(tmp_path, kind):
    """A store of this form that nobody has written a manifest for, its files of different ages."""
    made = filled(tmp_path, kind)
    for index in range(len(LENGTHS)):
        old = sample(index, LENGTHS[index], run="", extra={"norm": NORMS[kind]} if kind == "modelopt" else {})
        with open(made.file(index), "wb") as handle:
            made.store.layout.write(handle, old)
        os.utime(made.file(index), (1000, 1000 + [30, 40, 10, 20][index]))
    os.unlink(Manifest(str(made.file(0).parent)).path)
    os.unlink(Path(made.store.path) / "runs.json")
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_vouches_for_is_read_newest_first_and_entered_at_once(tmp_path, kind):
    made = bare(tmp_path, kind)
    order = []

    def enter(found):
        order.append(found.index)
        made.store.enter(str(Path(found.path).parent), Entry(**found.enter))
        if len(order) == 2:
            raise KeyboardInterrupt  # a kill, as far as the store can tell

    with pytest.raises(KeyboardInterrupt):
        inventory.take(made.store.path, kind, str(made.dataset), None, "headers", look_at_content, enter)
    assert (order, sorted(made.store.entries())) == ([1, 0], [0, 1])
    read = []

    def watching(path, seen):
        read.append(os.path.basename(path))
        return look_at_content(path, seen)

    tally = inventory.take(made.store.path, kind, str(made.dataset), None, "headers", watching)
    assert read == [made.file(3).name, made.file(2).name]  # what was entered is not read again
    evidence = tally.evidence()
    trust = "values" if kind == "speculators" else "checksums"
    assert evidence["trusted_by"] == {**dict.fromkeys(inventory.TRUST, 0), trust: 4}
    assert (evidence["adopted"], evidence["intact"]) == (4, 4)
    assert {entry.evidence for entry in made.store.entries().values()} == {trust}


@pytest.mark.parametrize(("kind", "trust"), [("specforge", "checksums"), ("speculators", "structure"), ("modelopt", "checksums")])
def test_without_a_host_environment_less_is_trusted_and_nothing_entered(tmp_path, kind, trust):
    made = bare(tmp_path, kind)
    tally = look(made, kind)
    assert (tally.evidence()["trusted_by"][trust], tally.enter) == (4, [])
    gate = surveying.judge(tally)
    assert [problem.code for problem in gate.problems] == ["samples-adopted"]
    assert f"trusted 4 by {trust}" in gate.problems[0].what


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_our_own_are_trusted_as_written(tmp_path, kind):
    made = filled(tmp_path, kind)
    made.store.add_link({"instance": "i", "verdict": "pass", "samples": 3})
    made.store.add_link({"instance": "j", "verdict": "fail", "samples": 4})
    evidence = look(made, kind).evidence()
    assert (evidence["trusted_by"]["written"], evidence["compared_by_continuity"]) == (4, 3)


def test_directories_without_a_manifest_come_first(tmp_path):
    made = fill(tmp_path, [3] * 6)
    place = Path(made.store.path)
    for index, folder in enumerate(("rows_2000-4000", "rows_4000-6000", "rows_6000-8000")):
        (place / folder).mkdir()
        os.utime(place / folder, (1000, 1000 + index))
    assert inventory.take(made.store.path, "specforge").shards == ["rows_6000-8000", "rows_4000-6000", "rows_2000-4000", "rows_0-2000"]
