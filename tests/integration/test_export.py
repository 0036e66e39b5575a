# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`relight export` as a process: what arrives in another layout or place is what was there, to the bit, whatever happens under way."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from ansible_collections.relight.recovery.plugins.module_utils import inventory
from ansible_collections.relight.recovery.plugins.module_utils.layouts import layout
from ansible_collections.relight.recovery.plugins.module_utils.store import Store

from relight.extract.config import GiveUp
from relight.extract.export import Export, Means
from relight.extract.norms import load
from relight.extract.states import file_of, raw_rows
from relight.hostlook import look_at_content
from tests.extraction import ENV, kill, wait_until
from tests.harness import ROOT
from tests.integration.test_samples_elsewhere import PYTHON, child
from tests.samples import HIDDEN, Filled, fill, fix, put, sample

LENGTHS = [12, 7, 300, 5]


def export(*words: object, env: dict[str, str] | None = None) -> tuple[int, str]:
    argv = [sys.executable, "-m", "relight", "export", *map(str, words)]
    done = subprocess.run(argv, cwd=ROOT, env={**ENV, **(env or {})}, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def to(made: Filled, kind: str, place: Path, *more: object, source: str = "specforge") -> tuple[int, str]:
    return export("--from", made.store.path, "--layout", source, "--to", place, "--layout", kind, "--dataset", made.dataset, *more)


def numbers(store: Store, index: int) -> tuple[np.ndarray, np.ndarray]:
    seen = store.layout.look(store.path_of(index))
    with file_of(store.path_of(index)) as file:
        return raw_rows(file, seen.final, seen.dtype).copy().view("<f4"), raw_rows(file, seen.aux, seen.dtype).copy().view("<f4")


def intact(place: Path, kind: str, dataset: Path) -> list[int]:
    tally = inventory.take(str(place), kind, str(dataset), None, "content", look_at_content)
    assert tally.found == []
    return sorted(tally.intact_indices())


def model(folder: Path, weight: np.ndarray | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5}))
    weight = np.linspace(0.5, 2.5, HIDDEN, dtype="<f4") if weight is None else weight
    safetensors.numpy.save_file({"model.norm.weight": weight}, folder / "model.safetensors")
    return folder


def test_specforge_to_modelopt_keeps_every_number_and_goes_on_where_it_was(tmp_path):
    made = fill(tmp_path, LENGTHS)
    code, said = to(made, "modelopt", tmp_path / "new", "--only", "0-1")
    assert (code, said.split(" (")[0]) == (0, "relight export: 2 of 2 samples are exported, 2 of them now")
    code, said = to(made, "modelopt", tmp_path / "new")
    assert (code, said.split(" (")[0]) == (0, "relight export: 4 of 4 samples are exported, 2 of them now")
    assert intact(tmp_path / "new", "modelopt", made.dataset) == [0, 1, 2, 3]
    new = Store(str(tmp_path / "new"), layout("modelopt", str(made.dataset)))
    for index in range(4):
        assert [states.tobytes() for states in numbers(new, index)] == [states.tobytes() for states in numbers(made.store, index)]
    run = new.runs().runs[0]
    assert (run["identity"], run["provenance"]["sglang"]) == (made.store.runs().runs[0]["identity"], "0.5.23")
    assert run["provenance"]["exported_from"]["layout"] == "specforge"
    assert new.runs().links == []  # continuity has not vouched for this store


def test_there_and_back_is_the_same_file(tmp_path):
    made = fill(tmp_path, LENGTHS)
    assert to(made, "modelopt", tmp_path / "new")[0] == 0
    back = ("--from", tmp_path / "new", "--layout", "modelopt", "--to", tmp_path / "back", "--layout", "specforge")
    assert export(*back, "--dataset", made.dataset)[0] == 0
    again = Store(str(tmp_path / "back"), layout("specforge"))
    assert {index: entry.digest for index, entry in again.entries().items()} == {
        index: entry.digest for index, entry in made.store.entries().items()
    }


def normed(tmp_path: Path, folder: Path) -> Filled:
    """A store whose final states come out of the model's norm."""
    made = fill(tmp_path, LENGTHS)
    norm = load(str(folder), HIDDEN)
    for index, tokens in enumerate(LENGTHS):
        pre = np.random.default_rng(index).standard_normal((tokens, HIDDEN)).astype("<f4") * 40
        put(made.store, sample(index, tokens, states=norm.apply(pre).astype("<f4").tobytes()))
    return made


def test_the_state_before_the_norm_is_never_made_in_silence(tmp_path):
    folder = model(tmp_path / "model")
    made = normed(tmp_path, folder)
    code, said = to(made, "speculators", tmp_path / "new")
    assert code == 5
    assert "give the model with --model" in said
    code, said = to(made, "speculators", tmp_path / "new", "--model", folder)
    assert code == 5
    assert "allow it with --surrogate" in said
    code, said = to(made, "speculators", tmp_path / "new", "--model", folder, "--surrogate")
    assert code == 0
    assert said.endswith("4 with a surrogate of the state before the norm")
    new = Store(str(tmp_path / "new"), layout("speculators"))
    assert new.runs().identity["norm"] == "pre-surrogate"
    assert safetensors.safe_open(new.path_of(2), "np").metadata()["norm"] == "pre-surrogate"
    (post, aux), (surrogate, new_aux) = numbers(made.store, 2), numbers(new, 2)
    assert aux.tobytes() == new_aux.tobytes()
    assert np.abs(surrogate * np.linspace(0.5, 2.5, HIDDEN, dtype="<f4") - post).max() < 1e-6
    words = ("--from", new.path, "--layout", "speculators", "--dataset", made.dataset, "--model", folder)
    code, said = export(*words, "--to", tmp_path / "again", "--layout", "specforge")
    assert code == 5
    assert "holds a surrogate of the state before the norm: export from the store that it was made of" in said
    assert export(*words, "--to", tmp_path / "flagged", "--layout", "modelopt")[0] == 0
    seen = layout("modelopt").look(str(tmp_path / "flagged" / "record-2.pt"))
    assert (seen.norm, seen.extra["norm"]) == ("pre", "pre-surrogate")
    code, said = to(made, "speculators", tmp_path / "wrong", "--model", model(tmp_path / "one", np.ones(HIDDEN, "<f4")), "--surrogate")
    assert code == 5
    assert "the norm of its surrogate is off by" in said  # it is another model's norm
    weight = np.ones(HIDDEN, "<f4")
    weight[5] = 0
    code, said = to(made, "speculators", tmp_path / "other", "--model", model(tmp_path / "flat", weight), "--surrogate")
    assert code == 2
    assert "near 0 (at 5)" in said
    assert list((tmp_path / "other").glob("*.safetensors")) == []


NORM = """
import sys, torch
from safetensors.torch import load_file
weight = load_file(sys.argv[1])["model.norm.weight"]
pre = load_file(sys.argv[2])["hidden_states"][:, -1]
post = torch.load(sys.argv[3], weights_only=True)["hidden_state"][0]
from transformers.models.llama.modeling_llama import LlamaRMSNorm
norm = LlamaRMSNorm(len(weight), 1e-5)
norm.weight.data.copy_(weight)
print(float((norm(pre) - post).abs().max() / post.abs().max()))
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment: make test")
def test_the_state_after_the_norm_is_the_models_own(tmp_path):
    made = fill(tmp_path, LENGTHS, (), "speculators", "pre")
    folder = model(tmp_path / "model")
    code, _said = to(made, "specforge", tmp_path / "new", "--model", folder, source="speculators")
    assert code == 0
    assert intact(tmp_path / "new", "specforge", made.dataset) == [0, 1, 2, 3]
    new = Store(str(tmp_path / "new"), layout("specforge"))
    assert new.runs().identity["norm"] == "post"
    assert float(child(NORM, folder / "model.safetensors", made.file(2), new.path_of(2))) < 1e-6


def test_what_does_not_match_its_manifest_is_left_and_named(tmp_path):
    made = fill(tmp_path, LENGTHS)
    with open(made.file(2), "r+b") as handle:
        handle.seek(20480)
        handle.write(b"\xff")
    made.file(1).unlink()
    code, said = to(made, "modelopt", tmp_path / "new")
    assert code == 5
    assert said.endswith("not exported: 2, sample 1, 2 (is in the manifest only)")
    assert intact(tmp_path / "new", "modelopt", made.dataset) == [0, 3]


def test_a_torn_export_is_made_again(tmp_path):
    made = fill(tmp_path, LENGTHS)
    assert to(made, "modelopt", tmp_path / "new")[0] == 0
    os.truncate(tmp_path / "new" / "record-2.pt", 500)
    (tmp_path / "new" / ".relight-tmp-record-3.pt.1").write_bytes(b"half")
    assert "4 of 4 samples are exported, 1 of them now" in to(made, "modelopt", tmp_path / "new")[1]
    assert intact(tmp_path / "new", "modelopt", made.dataset) == [0, 1, 2, 3]
    assert list((tmp_path / "new").glob(".relight-tmp-*")) == []


def test_killed_and_run_again(tmp_path):
    lengths = [40] * 60
    made = fill(tmp_path, lengths)
    argv = [sys.executable, "-m", "relight", "export", "--from", made.store.path, "--layout", "specforge", "--to", str(tmp_path / "new")]
    argv += ["--layout", "modelopt", "--dataset", str(made.dataset)]
    process = subprocess.Popen(argv, cwd=ROOT, env=ENV, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list((tmp_path / "new").glob("*.pt"))) > 5, what="the first samples")
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        kill(process)
    there = len(list((tmp_path / "new").glob("*.pt")))
    code, said = to(made, "modelopt", tmp_path / "new")
    assert code == 0
    assert f"60 of 60 samples are exported, {60 - there} of them now" in said
    assert intact(tmp_path / "new", "modelopt", made.dataset) == list(range(60))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--to", "{store}", "--layout", "modelopt"), "another directory"),
        (("--to", "{new}", "--layout", "parquet"), "'parquet' is not one of"),
        (("--to", "host:/x", "--layout", "modelopt"), "another layout is made here"),
        (("--to", "{new}", "--layout", "modelopt", "--only", "x"), "neither an index nor a range"),
        (("--to", "{new}", "--layout", "modelopt", "--model", "/nowhere"), "cannot read the model"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, words, why):
    made = fill(tmp_path, LENGTHS)
    given = [word.format(store=made.store.path, new=tmp_path / "new") for word in words]
    code, said = export("--from", made.store.path, "--layout", "specforge", *given)
    assert code == 2
    assert why in said


def test_masks_come_from_the_records_where_the_layout_keeps_none(tmp_path):
    made = fill(tmp_path, LENGTHS, (), "speculators", "pre")
    words = ("--from", made.store.path, "--layout", "speculators", "--to", tmp_path / "new", "--layout", "specforge")
    folder = model(tmp_path / "model")
    code, said = export(*words, "--model", folder)
    assert code == 5
    assert "keeps no loss mask: give the fixed records" in said
    other = fix(tmp_path / "other", [12, 7, 301, 5])
    code, said = export(*words, "--model", folder, "--dataset", other)
    assert code == 5
    assert said.endswith("not exported: 1, sample 2 (is not of the fixed record of its index)")


# --- to another place --------------------------------------------------------------------------------------------------


def hostless(tmp_path: Path) -> dict[str, str]:
    """A remote shell that runs its command here, so that rsync speaks to another rsync as over ssh."""
    script = tmp_path / "rsh"
    script.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"RSYNC_RSH": str(script)}


def without_rsync(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir(exist_ok=True)
    return {"PATH": str(tmp_path / "bin")}


@pytest.mark.parametrize("way", ["local", "remote", "without rsync"])
def test_a_store_in_another_place_is_equal_and_judged_there(tmp_path, way):
    made = fill(tmp_path, LENGTHS)
    env = hostless(tmp_path) if way == "remote" else without_rsync(tmp_path) if way == "without rsync" else {}
    place = f"host:{tmp_path / 'new'}" if way == "remote" else str(tmp_path / "new")
    words = ("--from", made.store.path, "--layout", "specforge", "--to", place)
    assert export(*words, env=env) == (0, f"relight export: 4 samples are at {place}, each read there and found equal")
    assert intact(tmp_path / "new", "specforge", made.dataset) == [0, 1, 2, 3]
    there = tmp_path / "new" / "rows_0-2000" / "data_2.ckpt"
    told = there.stat()
    with open(there, "r+b") as handle:  # another byte under the right size and time
        handle.seek(20480)
        handle.write(b"\xff")
    os.utime(there, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert export(*words, env=env)[0] == 0
    assert intact(tmp_path / "new", "specforge", made.dataset) == [0, 1, 2, 3]


def test_only_what_matches_its_manifest_is_carried(tmp_path):
    made = fill(tmp_path, LENGTHS)
    with open(made.file(2), "r+b") as handle:
        handle.seek(20480)
        handle.write(b"\xff")
    code, said = export("--from", made.store.path, "--to", tmp_path / "new", "--only", "1-2")
    assert code == 5
    assert said.endswith("not carried, since they do not match their manifest: 1 (rows_0-2000/data_2.ckpt)")
    assert [path.name for path in (tmp_path / "new").rglob("*.ckpt")] == ["data_1.ckpt"]


def test_a_place_that_cannot_be_reached_is_a_sentence(tmp_path):
    made = fill(tmp_path, LENGTHS)
    code, said = export("--from", made.store.path, "--to", "host:/x", env={"RSYNC_RSH": "/bin/false"})
    assert code == 4
    assert "rsync to host:/x failed" in said
    code, said = export("--from", made.store.path, "--to", "host:/x", env=without_rsync(tmp_path))
    assert (code, "no rsync here" in said) == (2, True)


def test_what_reads_back_otherwise_ends_the_export(tmp_path):
    """A disk that keeps other bytes than it was given: here a file that changed between the write and the look at it."""
    made = fill(tmp_path, [12, 7])
    target = Store(str(tmp_path / "new"), layout("modelopt", str(made.dataset)))
    work = Export(made.store, target, Means())
    work.run([0, 1], frozenset())
    assert (work.tally.made, work.tally.left) == (2, {})
    entry = target.entries()[1]
    path = Path(target.path_of(1))
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(GiveUp, match="reads back other bytes than were written"):
        work._judge_written(entry)
