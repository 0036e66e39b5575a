# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Every way in which a sample can be wrong has its verdict, and no damage is ever intact."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from array import array
from pathlib import Path

import pytest
import xxhash
from ansible_collections.relight.recovery.plugins.module_utils import durable, inventory
from ansible_collections.relight.recovery.plugins.module_utils.inventory import Tally
from ansible_collections.relight.recovery.plugins.module_utils.layouts import layout
from ansible_collections.relight.recovery.plugins.module_utils.store import Manifest, Store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relight.hostlook import look_at_content
from tests.samples import HIDDEN, IDENTITY, RUN, Filled, fill, fix, floats, ids_of, mask_of, put, sample

LENGTHS = [12, 7, 600, 5]


def look(filled: Filled, depth: str = "headers", **more) -> Tally:
    content = look_at_content if depth == "content" else inventory.checksums
    return inventory.take(filled.store.path, "specforge", str(filled.dataset), depth=depth, content=content, **more)


def verdicts(tally: Tally) -> dict[str, int]:
    return {name: count for name, count in tally.counts.items() if count}


def only(tally: Tally) -> tuple[str, str]:
    assert len(tally.found) == 1
    return tally.found[0].verdict, tally.found[0].why


@pytest.mark.parametrize("depth", inventory.DEPTHS)
def test_a_good_store(tmp_path, depth):
    tally = look(fill(tmp_path, LENGTHS, but=(1,)), depth)
    assert verdicts(tally) == {"intact": 3}
    assert list(tally.missing()) == list(tally.to_do()) == [1]
    evidence = tally.evidence()
    assert (evidence["total"], evidence["tokens_total"], evidence["tokens_intact"], evidence["missing"]) == (4, 624, 617, 1)
    assert evidence["bytes"] == sum(path.stat().st_size for path in Path(tmp_path).rglob("*.ckpt"))


def test_the_lines_of_an_older_host_environment_are_understood():
    """A check run after an upgrade looks at the store with the environment that the host still has."""
    tally = Tally()
    tally.add({"top": {"shards": ["rows_0-2000"], "total": 2, "tokens": 9, "fixed": True}})
    tally.add({"found": {"path": "rows_0-2000/data_0.ckpt", "index": 0, "verdict": "intact", "bytes": 5, "tokens": 4}})
    assert (tally.intact, list(tally.missing()), sum(tally.trusted.values())) == (1, [1], 0)
    assert tally.evidence()["tokens_intact"] == 4


def test_an_absent_store_is_empty(tmp_path):
    tally = inventory.take(str(tmp_path / "none"), "specforge", str(fix(tmp_path / "dataset", LENGTHS)))
    assert verdicts(tally) == {}
    assert list(tally.missing()) == [0, 1, 2, 3]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def extended(path: Path) -> None:
    with open(path, "ab") as handle:
        handle.write(b"\0" * 100)


def zeroed_half(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def other_bytes(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "verdict"),
    [(cut, "torn"), (emptied, "torn"), (extended, "torn"), (zeroed_half, "corrupt"), (other_bytes, "corrupt")],
)
def test_damage_that_headers_show(tmp_path, damage, verdict):
    filled = fill(tmp_path, LENGTHS)
    damage(filled.file(2))
    tally = look(filled)
    assert only(tally)[0] == verdict
    assert verdicts(tally) == {"intact": 3, verdict: 1}
    assert list(tally.to_do()) == [2]
    assert list(tally.missing()) == []


def hole(path: Path) -> None:
    """4 KiB of zeros within the states, as a crash leaves them: size, header and directory are as before."""
    with open(path, "r+b") as handle:
        handle.seek(12288)
        handle.write(bytes(4096))


def test_a_hole_is_seen_by_content_only(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    hole(filled.file(2))
    assert verdicts(look(filled)) == {"intact": 4}
    assert only(look(filled, "content"))[0] == "corrupt"


@pytest.mark.parametrize("depth", ["headers", "content"])
def test_a_file_that_no_manifest_knows_is_read_whole(tmp_path, depth):
    filled = fill(tmp_path, LENGTHS)
    os.unlink(filled.file(2).parent / "MANIFEST.jsonl")
    tally = look(filled, depth)
    assert verdicts(tally) == {"intact": 4}
    assert (tally.unentered, tally.adopted) == ((4, 0) if depth == "content" else (0, 0))
    hole(filled.file(2))
    assert only(look(filled, depth)) == ("corrupt", "does not match its checksum in archive/data/2")


def test_samples_from_before_relight_are_adopted(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    shutil.rmtree(filled.store.path)
    store = Store(filled.store.path, layout("specforge"))
    for index, tokens in enumerate(LENGTHS):
        old = sample(index, tokens)
        path = Path(store.path_of(index))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as handle:
            inventory.ckpt.write(handle, old.tensors, {})
    tally = look(filled, "content")
    assert verdicts(tally) == {"intact": 4}
    assert tally.adopted == 4
    entries = {item.index: item.enter for item in tally.enter}
    assert [entry["run"] for entry in entries.values()] == ["adopted"] * 4
    assert tally.evidence()["trusted_by"] == {"written": 0, "checksums": 4, "values": 0, "structure": 0}
    assert entries[2]["digest"] == f"xxh3_128:{xxhash.xxh3_128(Path(store.path_of(2)).read_bytes()).hexdigest()}"


@pytest.mark.parametrize(
    ("wrong", "verdict", "words"),
    [
        ({"ids": ids_of(9, 7)}, "foreign", "not those of its record"),
        ({"mask": [1] * 7}, "foreign", "another loss mask"),
        ({"run": "run-2"}, "foreign", "'run-2', which runs.json does not know"),
        ({"extra": {"layers": "[2, 15, 27]", "norm": "post", "dtype": "float32"}}, "foreign", "its layers is [2, 15, 27]"),
        ({"extra": {"layers": "[1, 14, 26]", "norm": "pre", "dtype": "float32"}}, "foreign", "its norm is pre, not post"),
        ({"extra": {"dtype": "bfloat16"}}, "foreign", "its dtype is bfloat16, not float32"),
        ({"hidden": 4}, "foreign", "its hidden_size is 4, not 8"),
    ],
)
def test_a_sample_of_another_record_or_run(tmp_path, wrong, verdict, words):
    filled = fill(tmp_path, LENGTHS)
    put(filled.store, sample(1, 7, **wrong))
    found, why = only(look(filled))
    assert found == verdict
    assert words in why


def test_a_sample_of_another_length(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    put(filled.store, sample(1, 6))
    assert only(look(filled)) == ("foreign", "holds 6 tokens that are not those of its record (7 tokens)")


def test_a_sample_beyond_the_dataset(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    put(filled.store, sample(4, 9))
    assert only(look(filled)) == ("foreign", "is of record 4, and there are 4")


def test_samples_of_a_former_identity(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    filled.store.add_run("run-2", {**IDENTITY, "weights": "w2"}, {}, 2.0, "instance-2")
    put(filled.store, sample(1, 7, run="run-2"))
    tally = look(filled)
    assert verdicts(tally) == {"intact": 1, "foreign": 3}
    assert tally.found[0].why == "is of another run: its weights is w1, not w2"
    assert verdicts(look(filled, identity=IDENTITY)) == {"intact": 3, "foreign": 1}


def test_lost_runs_condemn_nothing(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    os.unlink(os.path.join(filled.store.path, "runs.json"))
    tally = look(filled)
    assert verdicts(tally) == {"unjudged": 4}
    assert not [item for item in tally.found if item.verdict in inventory.MOVED]


def test_tokens_that_were_changed_in_the_file(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    path = filled.file(1)
    offset = inventory.ckpt.read_header(str(path)).tensors["input_ids"].offset
    with open(path, "r+b") as handle:
        handle.seek(offset)
        handle.write(b"\x2a")
    assert only(look(filled)) == ("corrupt", "holds other tokens than those it was written with")


@pytest.mark.parametrize(
    ("lie", "depth", "words"),
    [
        ({"bytes": 1}, "headers", "the manifest says 1"),
        ({"token_digest": "0" * 32}, "headers", "other tokens than the manifest says"),
        ({"digest": "xxh3_128:" + "0" * 32}, "content", "does not match the digest in the manifest"),
    ],
)
def test_a_manifest_that_lies(tmp_path, lie, depth, words):
    filled = fill(tmp_path, LENGTHS)
    manifest = Manifest(str(filled.file(1).parent))
    honest = manifest.read()[1]
    manifest.append(type(honest)(**{**honest.__dict__, **lie}))
    verdict, why = only(look(filled, depth))
    assert verdict == "corrupt"
    assert words in why


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "1 states that are not finite"),
        (float("-inf"), "1 states that are not finite"),
        (0.0, "zero bytes in a row"),
    ],
)
def test_values_that_cannot_be_states(tmp_path, value, words):
    filled = fill(tmp_path, LENGTHS)
    states = array("f", floats(600 * HIDDEN, 2))
    for at in range(1000, 1000 + (2048 if value == 0 else 1)):
        states[at] = value
    put(filled.store, sample(2, 600, states=states.tobytes()))
    assert verdicts(look(filled)) == {"intact": 4}
    verdict, why = only(look(filled, "content"))
    assert verdict == "doubtful"
    assert words in why


def test_what_a_reader_would_list_in_a_wrong_place(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    root = Path(filled.store.path)
    shutil.copy(filled.file(1), root / "rows_0-2000" / "data_2001.ckpt")
    shutil.copy(filled.file(1), root / "stray.ckpt")
    (root / "old").mkdir()
    shutil.copy(filled.file(1), root / "old" / "data_1.ckpt")
    (root / "rows_0-2000" / "notes.txt").write_text("no sample")
    tally = look(filled)
    assert sorted((item.path, item.verdict, item.index) for item in tally.found) == [
        ("old/data_1.ckpt", "foreign", None),
        ("rows_0-2000/data_2001.ckpt", "foreign", None),
        ("stray.ckpt", "foreign", None),
    ]
    assert tally.intact == 4


def test_temporary_names_are_counted_only(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    for name in (".relight-tmp-data_1.ckpt.1", ".relight-tmp-x.ckpt"):
        (filled.file(1).parent / name).write_bytes(b"half")
    tally = look(filled)
    assert verdicts(tally) == {"intact": 4}
    assert tally.temporaries == 2


def test_what_cannot_be_judged_stays(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    (filled.file(1).parent / "data_1.ckpt.gz").write_bytes(b"gz")
    os.unlink(filled.file(3))
    os.symlink(filled.file(3), filled.file(3))  # a loop: the operating system will not read it
    tally = look(filled)
    assert verdicts(tally) == {"intact": 3, "unjudged": 2}
    assert not [item for item in tally.found if item.verdict in inventory.MOVED]


def test_an_archive_of_something_else(tmp_path):
    filled = fill(tmp_path, LENGTHS, but=(1,))
    with zipfile.ZipFile(filled.file(1), "w") as archive:
        archive.writestr("a.txt", "text")
    assert only(look(filled)) == ("foreign", "has no data.pkl")


def test_the_names_depth_reads_no_file(tmp_path):
    filled = fill(tmp_path, LENGTHS)
    zeroed_half(filled.file(2))
    assert verdicts(look(filled, "names")) == {"intact": 4}
    cut(filled.file(2))
    assert only(look(filled, "names"))[0] == "torn"
    os.unlink(filled.file(2).parent / "MANIFEST.jsonl")
    assert verdicts(look(filled, "names")) == {"unread": 4}


class One:
    """A store of one sample, and the bytes that it had when it was good."""

    def __init__(self, folder: Path) -> None:
        self.filled = fill(folder, [3])
        self.good = self.filled.file(0).read_bytes()


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> One:
    return One(tmp_path_factory.mktemp("one"))


@given(at=st.integers(min_value=0), by=st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
def test_no_flipped_byte_is_intact_at_content_depth(one, at, by):
    filled, good = one.filled, one.good
    data = bytearray(good)
    data[at % len(good)] ^= by
    filled.file(0).write_bytes(data)
    assert look(filled, "content").intact == 0
    filled.file(0).write_bytes(good)
    assert look(filled, "content").intact == 1


@given(length=st.integers(min_value=0), manifest=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
def test_no_cut_file_is_intact_at_headers_depth(one, length, manifest):
    filled, good = one.filled, one.good
    path = filled.file(0).parent / "MANIFEST.jsonl"
    told = path.read_bytes()
    filled.file(0).write_bytes(good[: length % len(good)])
    if not manifest:
        path.unlink()
    try:
        assert look(filled).counts["torn"] == 1
    finally:
        filled.file(0).write_bytes(good)
        path.write_bytes(told)


class Killed(BaseException):
    """Stands for a kill: nothing below a `with` block or an `except Exception` sees it as an error to clean up after."""


class Guillotine:
    """Counts system calls of the durable write, and from the one that is `at` on lets none through, as a kill would."""

    CALLS = ("open", "write", "fsync", "rename", "unlink", "makedirs", "ftruncate")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at
        self.dead = False
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._guarded(getattr(os, name), name))
        monkeypatch.setattr(os, "fdopen", self._fdopen(os.fdopen))

    def _step(self) -> None:
        if self.left <= 0:
            self.dead = True
        if self.dead:
            raise Killed
        self.left -= 1

    def _guarded(self, call, name):
        def guarded(*args, **kwargs):
            self._step()
            if name == "write" and not self.left:  # the last write that a dying process makes is a torn one
                call(args[0], bytes(args[1])[: len(args[1]) // 2])
                self._step()
            return call(*args, **kwargs)

        return guarded

    def _fdopen(self, real):
        def fdopen(fd, mode, *args, **kwargs):
            handle = real(fd, mode, 0)  # unbuffered: each write is a system call
            return Half(handle, self)

        return fdopen


class Half:
    """A file whose writes are counted; the last one before the kill lands by half."""

    def __init__(self, handle, guillotine: Guillotine) -> None:
        self.handle, self.guillotine = handle, guillotine

    def write(self, data):
        self.guillotine._step()
        view = memoryview(data)
        if self.guillotine.left:
            return self.handle.write(view)
        self.handle.write(view[: view.nbytes // 2])
        return self.guillotine._step()

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.handle.close()

    def __getattr__(self, name):
        return getattr(self.handle, name)


def test_a_kill_at_any_system_call_leaves_the_truth(tmp_path):
    """Add, replace and quarantine, killed at each system call in turn; the inventory is right each time, and a rerun completes."""
    lengths = [6, 5, 4]
    kills = 0
    for at in range(200):
        folder = tmp_path / str(at)
        filled = fill(folder, lengths, but=(2,))
        cut(filled.file(1))
        torn = filled.file(1).read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            guillotine = Guillotine(patch, at)
            try:
                filled.store.quarantine("rows_0-2000/data_1.ckpt", "torn", "20260101T000000Z", "cut")
                put(filled.store, sample(2, 4))
                put(filled.store, sample(1, 5))
                finished = not guillotine.dead
            except Killed:
                finished = False
        tally = look(filled, "content")
        one_there, two_there = filled.file(1).exists(), filled.file(2).exists()
        one_is_torn = one_there and filled.file(1).read_bytes() == torn
        assert tally.intact == 1 + two_there + (one_there and not one_is_torn)
        assert verdicts(tally).get("torn", 0) == one_is_torn
        assert list(tally.missing()) == [index for index in (1, 2) if not filled.file(index).exists()]
        assert one_is_torn or [Path(path).read_bytes() for path in filled.store.quarantined()] == [torn]
        for index in tally.to_do():
            put(filled.store, sample(index, lengths[index]))
        filled.store.sweep()
        after = look(filled, "content")
        assert (verdicts(after), list(after.to_do()), after.temporaries) == ({"intact": 3}, [], 0)
        shutil.rmtree(folder)
        if finished:
            break
        kills += 1
    assert finished
    assert kills > 30


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "cut", "kill", "flip", "quarantine", "tear", "drop"]), st.integers(0, 3)), min_size=1, max_size=12
    )
)
@settings(max_examples=60, deadline=None)
def test_any_history_leaves_a_store_that_tells_the_truth(tmp_path_factory, steps):
    """`model` is what is in each place: the inventory must say the same after every step."""
    filled = fill(tmp_path_factory.mktemp("history"), [6, 5, 4, 3], but=(0, 1, 2, 3))
    model = ["missing"] * 4
    shard = Path(filled.store.path) / "rows_0-2000"
    for number, (step, index) in enumerate(steps):
        path = filled.file(index)
        if step == "add":
            put(filled.store, sample(index, [6, 5, 4, 3][index]))
            model[index] = "intact"
        elif step == "kill":  # between the temporary name and the rename
            shard.mkdir(exist_ok=True)
            (shard / f"{durable.TEMPORARY}data_{index}.ckpt.{number}").write_bytes(b"half a sample")
        elif step == "tear":  # a manifest line by half
            shard.mkdir(exist_ok=True)
            with open(shard / "MANIFEST.jsonl", "ab") as handle:
                handle.write(json.dumps({"index": index, "file": "x"}).encode()[:9])
        elif model[index] == "missing":
            continue
        elif step == "cut":
            os.truncate(path, path.stat().st_size - 1)
            model[index] = "bad"
        elif step == "flip":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1 + number
            path.write_bytes(data)
            model[index] = "bad"
        elif step == "drop":
            path.unlink()
            model[index] = "missing"
        elif step == "quarantine" and model[index] == "bad":
            filled.store.quarantine(filled.store.layout.path_of(index), "torn", "20260101T000000Z")
            model[index] = "missing"
        tally = look(filled, "content")
        bad = {item.index for item in tally.found}
        assert bad == {index for index, state in enumerate(model) if state == "bad"}
        assert list(tally.missing()) == [index for index, state in enumerate(model) if state == "missing"]
        assert tally.intact == model.count("intact")


def test_masks_and_runs_of_the_helpers_are_what_the_tests_think():
    assert mask_of(5) == [0, 0, 1, 1, 1]
    assert RUN == "run-1"
