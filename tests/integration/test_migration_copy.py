# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The copy service on real trees: nothing is lost, nothing is copied twice, a kill costs little, wrong bytes are caught."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import copier, durable, migration

from tests import trees
from tests.harness import ROOT

MODULE = "ansible_collections.relight.recovery.plugins.module_utils.migration_service"
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: owners, devices and ACLs are part of what a copy keeps"),
    pytest.mark.skipif(not trees.have_rsync(), reason="needs rsync, which judges the copies"),
]


class Move:
    """A source, a target and the state of one migration between them."""

    def __init__(self, root: Path, **job: object) -> None:
        self.source, self.target, self.state = root / "source", root / "target", root / "state"
        for path in (self.source, self.target, self.state):
            path.mkdir(exist_ok=True)
        (self.target / migration.MARKER).write_text("m1")
        self.job = {
            "id": "m1",
            "source": str(self.source),
            "target": str(self.target),
            "folder": str(self.state),
            "final": True,
            "digest": copier.best_digest(),
            "workers": 3,
            "stall_seconds": 30,
            **job,
        }

    def start(self, **changed: object) -> subprocess.Popen:
        path = self.state / "job.json"
        path.write_text(json.dumps({**self.job, **changed}))
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}"}
        return subprocess.Popen([sys.executable, "-m", MODULE, str(path)], env=environment)

    def run(self, **changed: object) -> int:
        return self.start(**changed).wait(100)

    @property
    def progress(self) -> dict:
        return json.loads((self.state / "progress.json").read_text())

    @property
    def lines(self) -> list[dict]:
        return list(durable.read_lines(str(self.state / "manifest.jsonl")))

    def events(self, kind: str) -> list[str]:
        return [line["path"] for line in self.lines if line["event"] == kind]

    def differences(self) -> str:
        (self.target / migration.MARKER).rename(self.state / "marker")
        about = os.stat(self.source)
        os.utime(self.target, ns=(about.st_atime_ns, about.st_mtime_ns))
        return trees.differences(self.source, self.target)

    def files(self) -> dict[str, os.stat_result]:
        found = {str(path.relative_to(self.source)): os.lstat(path) for path in self.source.rglob("*")}
        return {
            path: status for path, status in found.items() if os.path.isfile(self.source / path) and not os.path.islink(self.source / path)
        }


@pytest.fixture
def move(tmp_path):
    found = Move(tmp_path)
    trees.make(found.source)
    return found


def test_a_whole_tree_is_the_same_in_every_respect(move):
    assert move.run() == 0
    assert move.differences() == ""
    for name in ("sparse", "only a hole", "small hole"):
        assert trees.blocks(move.target / name) <= trees.blocks(move.source / name) + 16, name
    assert os.stat(move.target / "links/first").st_nlink == 3
    assert os.listdir(move.target / "odd names") != []
    assert not list(move.target.rglob(f"{durable.TEMPORARY}*"))
    done = move.progress
    assert (done["phase"], done["error"], done["unreadable_files"]) == ("done", None, 0)
    assert done["read_back_bytes"] == done["copied_bytes"] > 6 * trees.MIB
    assert sorted(set(move.events("verified"))) == sorted(move.files())


def test_the_digests_are_those_of_the_plain_bytes(move):
    assert move.run() == 0
    for name in ("sparse", "small hole", "store/rows_0-2000/data_1.ckpt", "empty file"):
        digest = copier.hasher(move.job["digest"])
        digest.update((move.source / name).read_bytes())
        entry = migration.read_manifest(str(move.state / "manifest.jsonl"))[name]
        assert entry.digest == f"{move.job['digest']}:{digest.hexdigest()}"
        assert entry.verified


def test_a_bare_host_copies_with_the_digest_of_the_standard_library(move):
    assert move.run(digest=copier.BLAKE2B) == 0
    assert move.differences() == ""
    assert all(entry.digest.startswith("blake2b_128:") for entry in migration.read_manifest(str(move.state / "manifest.jsonl")).values())


def test_a_second_run_copies_and_reads_nothing(move):
    assert move.run() == 0
    before = (move.state / "manifest.jsonl").read_bytes()
    assert move.run() == 0
    assert (move.state / "manifest.jsonl").read_bytes() == before
    assert (move.progress["copied_bytes"], move.progress["read_back_bytes"], move.progress["removed"]) == (0, 0, 0)


def test_what_writers_did_after_the_first_pass_is_made_up_for_in_the_second(move):
    assert move.run(final=False) == 0
    store = move.source / "store/rows_0-2000"
    (store / "data_0.ckpt").unlink()
    (store / "data_9.ckpt").write_bytes(bytes(trees.MIB * 2))
    times = os.stat(move.source / "many small/3.json")
    with open(move.source / "many small/3.json", "r+b") as handle:  # same length, same time, other bytes
        data = handle.read()
        handle.seek(0)
        handle.write(bytes(len(data)))
    os.utime(move.source / "many small/3.json", ns=(times.st_atime_ns, times.st_mtime_ns))
    (move.source / "empty file").unlink()
    (move.source / "empty file").mkdir()
    (move.source / "empty").rmdir()
    (move.source / "empty").write_bytes(b"now a file")
    os.link(move.source / "sparse", move.source / "sparse too")
    assert move.run() == 0
    assert move.differences() == ""
    copied = move.events("copied")
    assert {name for name in copied if copied.count(name) > 1} == {"many small/3.json", "sparse"}  # a new link changes its ctime


def test_a_flipped_bit_on_the_target_is_caught_and_that_file_alone_is_copied_again(move):
    victim = "store/rows_0-2000/data_1.ckpt"
    assert move.run(final=False, stall_seconds=31) == 0
    # The copy is there and not yet read back: forget the read-back, then flip.
    kept = [line for line in move.lines if line["event"] != "verified"]
    (move.state / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    target = move.target / victim
    about = os.stat(target)
    with open(target, "r+b") as handle:
        handle.seek(1_234_567)
        byte = handle.read(1)[0]
        handle.seek(1_234_567)
        handle.write(bytes([byte ^ 0x10]))
        os.fsync(handle.fileno())
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert move.run() == 4
    done = move.progress
    assert done["error"]["code"] == "copy-differs"
    assert list(done["differing"]) == [victim]
    assert done["copied_bytes"] == 0
    assert move.run() == 0
    assert move.progress["copied_bytes"] == os.stat(move.source / victim).st_size
    assert move.differences() == ""


def test_a_file_that_never_stands_still_fails_the_final_pass_only(tmp_path):
    move = Move(tmp_path)
    restless = move.source / "log"
    restless.write_bytes(bytes(24 * trees.MIB))
    (move.source / "still").write_bytes(b"still")
    over = threading.Event()

    def write():
        with open(restless, "r+b", buffering=0) as handle:
            while not over.is_set():
                handle.seek(random.randrange(20 * trees.MIB))
                handle.write(b"scribble")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert move.run(final=False) == 0
        assert list(move.progress["changing"]) == ["log"]
        assert move.run() == 4
        assert move.progress["error"]["code"] == "source-changing"
    finally:
        over.set()
        writer.join()
    assert move.run() == 0
    assert move.differences() == ""


def test_kills_at_any_moment_lose_little_and_copy_no_verified_file_twice(tmp_path):
    move = Move(tmp_path, workers=2)
    trees.make(move.source, seed=7, large=40, small=1500)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    kills = 0
    for _ in range(12):
        process = move.start(final=bool(rng.randrange(2)))
        lines = len(move.lines)
        wanted = lines + rng.choice((0, 1, 5, 40, 600))
        deadline = time.monotonic() + 60
        while process.poll() is None and len(move.lines) < wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    assert move.run() == 0
    assert kills >= 3
    assert move.differences() == ""
    verified: set[str] = set()
    for line in move.lines:
        if line["event"] == "verified":
            assert line["path"] not in verified, "read back twice"
            verified.add(line["path"])
        elif line["event"] == "copied":
            assert line["path"] not in verified, "copied after it was verified"
    assert verified == set(move.files())


def test_a_target_that_is_not_the_prepared_one_is_not_written_to(move):
    (move.target / migration.MARKER).unlink()
    assert move.run() == 4
    assert move.progress["error"]["code"] == "target-not-staged"
    (move.target / migration.MARKER).write_text("another")
    assert move.run() == 4
    assert os.listdir(move.target) == [migration.MARKER]
