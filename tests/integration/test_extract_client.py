# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The extraction client as a real process against a server with faults: whatever happens, samples are right or not there."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import inventory

from tests.extraction import Work, kill, records, wait_until

Make = Callable[..., Work]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    works: list[Work] = []

    def build(count: int = 40, delay: float = 0.0, serve: bool = True, **config: Any) -> Work:
        work = Work(tmp_path, records(count), **config)
        works.append(work)
        if serve:
            work.start_server(delay)
        return work

    yield build
    for work in works:
        work.close()


def tally(work: Work) -> inventory.Tally:
    return inventory.take(work.config["store"], "specforge", str(work.state / "dataset"))


def test_every_record_becomes_its_sample_and_a_second_run_sends_nothing(make: Make) -> None:
    work = make(60)
    code, said = work.run()
    assert (code, work.wrong(), len(work.indices())) == (0, [], 60)
    assert re.search(r"60 of 60 samples are in the store, 60 of them new", said)
    found = tally(work)
    assert (found.intact, found.found, found.unentered, len(found.to_do())) == (60, [], 0, 0)
    progress = work.progress()
    tokens = sum(len(record["input_ids"]) for record in work.data)
    assert {name: progress[name] for name in ("phase", "total", "done", "this_run", "tokens_done", "in_flight", "error")} == {
        "phase": "done", "total": 60, "done": 60, "this_run": 60, "tokens_done": tokens, "in_flight": [], "error": None,
    }  # fmt: skip
    assert work.left_in_dump() == []
    seen = work.seen()
    assert seen["tokens"] == tokens
    assert seen["most_at_once"] <= 8
    runs = json.loads((work.store / "runs.json").read_text())
    assert [run["identity"] for run in runs["runs"]] == [{"dtype": "float32", "weights": "w1", "layers": [1, 3, 5], "norm": "post"}]
    assert [(link["instance"], link["verdict"]) for link in runs["links"]] == [(seen["instance"], "pass")]
    events = [json.loads(line) for line in (work.state / "journal.jsonl").read_text().splitlines()]
    assert [(event["stage"], event["step"], event["event"]) for event in events] == [
        ("resume", "extract", "begin"),
        ("resume", "extract", "end"),
    ]
    before = {path: path.stat().st_mtime_ns for path in work.store.rglob("*") if path.is_file() and path.name != ".relight-lock"}
    code, said = work.run()
    assert (code, work.seen()["tokens"]) == (0, tokens)
    assert before == {path: path.stat().st_mtime_ns for path in work.store.rglob("*") if path.is_file() and path.name != ".relight-lock"}


def test_bytes_in_flight_stay_within_the_budget(make: Make) -> None:
    longest = 59 * 4 * 16 * 4
    work = make(40, delay=0.02, max_bytes_in_flight=2 * longest, concurrency=30)
    code, _said = work.run()
    assert (code, work.wrong(), len(work.indices())) == (0, [], 40)
    seen = work.seen()
    assert 0 < seen["most_bytes"] <= 2 * longest + 30 * 2048  # headers come on top
    assert 2 <= seen["most_at_once"] < 30


def test_a_record_beyond_the_budget_is_refused_before_any_request(make: Make) -> None:
    work = make(10, max_bytes_in_flight=4000)
    code, said = work.run()
    assert code == 2
    assert "more than max_bytes_in_flight (4000)" in said
    assert work.seen()["requests"] == []


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_tears_and_repeats_nothing(make: Make) -> None:
    """At least 25 kills at seeded moments. A token is sent again only if its record was in flight at a kill."""
    seed = 20260131
    print(f"seed {seed}")
    rng = random.Random(seed)
    work = make(300, delay=0.03, concurrency=6)
    lengths = [len(record["input_ids"]) for record in work.data]
    kills, redoable, code = 0, 0, None
    while code is None:
        assert kills < 120
        client = work.start()
        if kills < 28:
            before = len(work.indices())
            wait_until(lambda: client.poll() is not None or len(work.indices()) > before, what="a new sample")  # noqa: B023 - used at once
            time.sleep(rng.uniform(0, 0.12))
            if client.poll() is None:
                client.kill()
                client.wait()
                kills += 1
                flying = set(work.progress()["in_flight"])
                redoable += sum(lengths[index] for index in flying - work.indices())
                assert work.wrong() == []
            else:
                code = client.returncode
        else:
            client.communicate(timeout=60)
            code = client.returncode
        kill(client)
    assert kills >= 25
    assert code == 0
    assert (work.wrong(), len(work.indices())) == ([], 300)
    found = tally(work)
    assert (found.intact, found.unentered, found.temporaries, found.quarantined) == (300, 0, 0, 0)
    redone = work.seen()["tokens"] - sum(lengths)
    print(f"{kills} kills, {redone} tokens sent again of {redoable} in flight, {sum(lengths)} in all")
    assert 0 <= redone <= redoable
    assert work.left_in_dump() == []


def test_sigterm_lets_what_is_in_flight_land(make: Make) -> None:
    work = make(80, delay=0.1, concurrency=4)
    client = work.start()
    wait_until(lambda: len(work.indices()) >= 5, what="some samples")
    client.send_signal(signal.SIGTERM)
    _out, said = client.communicate(timeout=20)
    assert client.returncode == 3
    assert "stopped" in said
    sent = {int(request["rid"].split("-")[2]) for request in work.seen()["requests"]}
    assert sent == work.indices()
    assert 5 <= len(sent) < 80
    assert work.progress()["phase"] == "stopped"
    code, _said = work.run()
    assert (code, work.wrong(), len(work.indices())) == (0, [], 80)
    assert work.seen()["tokens"] == sum(len(record["input_ids"]) for record in work.data)


def test_sigterm_does_not_wait_for_ever(make: Make) -> None:
    work = make(5, drain_seconds=0.3)
    work.control(faults={"*": {"kind": "never"}})
    client = work.start()
    wait_until(lambda: work.seen()["requests"], what="a request")
    client.send_signal(signal.SIGTERM)
    client.communicate(timeout=10)
    assert (client.returncode, work.indices()) == (3, set())


def test_a_second_client_is_refused_and_a_dead_ones_lock_is_not_in_the_way(make: Make) -> None:
    work = make(60, delay=0.2, concurrency=2)
    client = work.start()
    wait_until(lambda: len(work.indices()) >= 1, what="a sample")
    code, said = work.run()
    assert code == 2
    assert f"is being written by relight extract, pid {client.pid}" in said
    assert client.poll() is None
    wait_until(lambda: work.progress()["phase"] == "extracting", what="the first client's progress")
    client.kill()
    client.wait()
    kill(client)
    work.control(delay=0.0)
    code, _said = work.run()
    assert (code, work.wrong(), len(work.indices())) == (0, [], 60)


@pytest.mark.parametrize("kind", ["error", "500", "400", "short", "tokens", "lie", "nan", "torn", "no-dump"])
def test_a_fault_that_passes_is_tried_again(make: Make, kind: str) -> None:
    work = make(12, dump_seconds=0.2)
    work.control(faults={"3": {"kind": kind, "times": 2}})
    code, _said = work.run()
    assert (code, work.wrong(), len(work.indices())) == (0, [], 12)
    assert sum(request["rid"].split("-")[2] == "3" for request in work.seen()["requests"]) == 3
    assert work.left_in_dump() == []


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("error", "the forward refused this request"),
        ("500", "HTTP 500: planned 500"),
        ("short", "tokens is '[0-9]+', not"),
        ("lie", "input_ids are not those of the request"),
        ("nan", "holds 1 values that are not finite"),
        ("torn", "it is 8 bytes short"),
        ("no-dump", "no dump came within 0.2 s"),
        ("never", "no answer and no dump within"),
        ("drop", "broke off"),
    ],
)
def test_a_poisoned_record_is_given_up_and_named(make: Make, kind: str, sentence: str) -> None:
    work = make(12, dump_seconds=0.2, request_seconds=0.3)
    work.control(faults={"7": {"kind": kind}})
    code, said = work.run()
    assert code == 5
    assert re.search(rf"given up: record 7 \(.*{sentence}", said)
    assert (work.wrong(), work.indices()) == ([], set(range(12)) - {7})
    progress = work.progress()
    assert progress["phase"] == "failed"
    assert list(progress["given_up"]) == ["7"]
    work.control(faults={})
    code, _said = work.run()
    assert (code, work.wrong(), len(work.indices())) == (0, [], 12)


def test_a_server_that_is_away_is_waited_for(make: Make) -> None:
    work = make(60, delay=0.03)
    client = work.start()
    wait_until(lambda: len(work.indices()) >= 5, what="some samples")
    work.kill_server()
    wait_until(lambda: work.progress()["phase"] == "waiting-for-server", what="the phase")
    server_file = (work.dump / "server.json").read_text()
    work.start_server()
    instance = json.loads((work.dump / "server.json").read_text())["instance"]
    assert instance != json.loads(server_file)["instance"]
    _out, said = client.communicate(timeout=20)
    assert client.returncode == 4
    assert f"no passed continuity check links the server instance {instance[:8]}" in said
    assert "relight continuity" in said
    done = work.indices()
    assert (work.wrong(), work.seen()["requests"]) == ([], [])
    gate = work.continuity("--samples", "2")
    assert gate["verdict"] == "pass"
    code, _said = work.run()
    assert (code, work.wrong(), len(work.indices())) == (0, [], 60)
    lengths = {index: len(record["input_ids"]) for index, record in enumerate(work.data)}
    assert work.seen()["tokens"] - gate["evidence"]["probe_tokens"] == sum(lengths[index] for index in lengths if index not in done)


def test_a_server_that_reloads_the_same_instance_is_gone_on_with(make: Make) -> None:
    work = make(40)
    work.control(faults={"*": {"kind": "503", "times": 3}})
    code, _said = work.run()
    assert (code, work.wrong(), len(work.indices())) == (0, [], 40)


def test_an_instance_that_changes_under_the_client_stops_it(make: Make) -> None:
    work = make(60, delay=0.05)
    client = work.start()
    wait_until(lambda: len(work.indices()) >= 5, what="some samples")
    work.control(restart=True)
    _out, said = client.communicate(timeout=20)
    assert client.returncode == 4
    assert "no passed continuity check links" in said
    assert work.wrong() == []


def test_without_a_server_it_gives_up_in_one_sentence(make: Make) -> None:
    work = make(5, serve=False, server_seconds=0.3)
    code, said = work.run()
    assert code == 4
    assert "no server with the dump plugin has written server.json" in said
    assert len(said.strip().splitlines()[-1].split(": ", 1)[1]) < 400
    assert work.progress()["error"].endswith("then start the extraction again")


def test_a_server_that_stays_away_is_given_up(make: Make) -> None:
    work = make(5, server_seconds=0.5)
    work.kill_server()
    code, said = work.run()
    assert code == 4
    assert f"nobody answers at http://127.0.0.1:{work.port}" in said


def test_a_server_with_other_layers_gets_no_request(make: Make) -> None:
    work = make(5)
    work.control(layers=[1, 3, 4])
    code, said = work.run()
    assert code == 4
    assert "dumps the layers [1, 3, 4], the configuration wants [1, 3, 5]" in said
    assert work.seen()["requests"] == []


def test_dumps_of_a_dead_client_are_swept_and_others_left(make: Make) -> None:
    work = make(10)
    dead = subprocess.Popen(["true"])
    dead.wait()
    old = [f"relight-0123abcd-3-{dead.pid}.12345.1", f"relight-0123abcd-4-{dead.pid}.12345.2.error"]
    keep = ["relight-probe-1", f"relight-0123abcd-3-{os.getpid()}.{_start_time()}.1", "notes.txt"]
    for name in old + keep:
        (work.dump / name).write_text("x")
    code, _said = work.run()
    assert code == 0
    assert work.left_in_dump() == sorted(keep)


def _start_time() -> int:
    return int(Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19])


def test_torn_and_swapped_samples_are_redone_and_only_they(make: Make) -> None:
    work = make(30)
    assert work.run()[0] == 0
    place = work.place()
    torn = Path(place.path_of(4))
    torn.write_bytes(torn.read_bytes()[:-100])
    tokens = work.seen()["tokens"]
    code, _said = work.run()
    assert (code, work.wrong(), len(work.indices())) == (0, [], 30)
    assert work.seen()["tokens"] - tokens == len(work.data[4]["input_ids"])
    assert [os.path.basename(path) for path in place.quarantined()] == ["data_4.ckpt.quarantined"]
    Path(place.path_of(6)).write_bytes(Path(place.path_of(5)).read_bytes())
    assert work.run()[0] == 0
    assert (work.wrong(), work.seen()["tokens"] - tokens) == ([], len(work.data[4]["input_ids"]) + len(work.data[6]["input_ids"]))
    assert sorted(os.path.basename(path) for path in place.quarantined()) == ["data_4.ckpt.quarantined", "data_6.ckpt.quarantined"]


def test_a_sample_without_its_manifest_line_is_entered_not_redone(make: Make) -> None:
    """A kill between rename and manifest."""
    work = make(20)
    assert work.run()[0] == 0
    manifest = work.store / "rows_0-2000" / "MANIFEST.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(lines[:-1]) + lines[-1][:20])
    tokens = work.seen()["tokens"]
    assert work.run()[0] == 0
    assert work.seen()["tokens"] == tokens
    again = json.loads(manifest.read_text().splitlines()[-1])
    assert again.pop("evidence") == "checksums"  # its digest was not made while it was written
    assert again | {"time": 0} == json.loads(lines[-1]) | {"time": 0}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    """A tmpfs of 1 MiB in a user and mount namespace of its own."""
    disk = SmallDisk(tmp_path / "small")
    yield disk
    kill(disk.holder)


class SmallDisk:
    """A real file system that is soon full. `inside` runs a command where it is mounted; `outside` is its path for us."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        mount = 'mount -t tmpfs -o size=1m none "$1" && echo up && exec sleep 1000'
        self.holder = subprocess.Popen(["unshare", "-Urm", "sh", "-c", mount, "sh", str(path)], stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != "up\n":
            kill(self.holder)
            pytest.skip("NOT TESTED HERE: this machine lets nobody mount a tmpfs in a user namespace, so no disk can be filled")
        self.inside = ("nsenter", "-t", str(self.holder.pid), "-U", "-m", "--preserve-credentials")
        self.path = path
        self.outside = Path(f"/proc/{self.holder.pid}/root{path}")

    def fill(self, leave_bytes: int) -> None:
        """Take all of its space but `leave_bytes`."""
        script = f"head -c 2000000 /dev/zero > {self.path}/filler; truncate -s -{leave_bytes} {self.path}/filler"
        subprocess.run([*self.inside, "sh", "-c", script], check=True, capture_output=True)

    def empty(self) -> None:
        (self.outside / "filler").unlink()


def test_a_disk_that_fills_up_under_a_write_is_waited_for_and_nothing_is_torn(tmp_path: Path, small: SmallDisk) -> None:
    work = Work(tmp_path, records(60), concurrency=4)
    try:
        work.start_server(delay=0.15)
        client = work.start(prefix=small.inside, store=str(small.path / "store"))
        work.config["store"] = str(small.outside / "store")
        wait_until(lambda: len(work.indices()) >= 4, what="some samples")
        small.fill(leave_bytes=0)
        wait_until(lambda: work.progress()["phase"] == "waiting-for-room", what="the phase")
        halfway = work.indices()
        assert work.wrong() == []
        assert len(work.progress()["in_flight"]) >= 1
        sent = len(work.seen()["requests"])
        small.empty()
        _out, _said = client.communicate(timeout=30)
        assert (client.returncode, work.wrong(), len(work.indices())) == (0, [], 60)
        assert 4 <= len(halfway) < 60
        assert sent < 60
        assert work.seen()["tokens"] == sum(len(record["input_ids"]) for record in work.data)  # kept dumps were stored, not made again
        assert tally(work).temporaries == 0
    finally:
        work.close()


def test_a_disk_that_stays_full_is_given_up(tmp_path: Path, small: SmallDisk) -> None:
    work = Work(tmp_path, records(60))
    try:
        work.start_server()
        small.fill(leave_bytes=200_000)
        client = work.start(prefix=small.inside, store=str(small.path / "store"), room_seconds=0.5)
        _out, said = client.communicate(timeout=30)
        work.config["store"] = str(small.outside / "store")
        assert client.returncode == 4
        assert re.search(r"small/store has (no room for sample|\d+ bytes free and needs)", said)
        assert "make room there" in said
        assert (work.wrong(), tally(work).temporaries) == ([], 0)
        assert 0 < len(work.indices()) < 60
        assert work.left_in_dump() == []
    finally:
        work.close()


def test_a_disk_without_any_room_gets_not_one_byte(tmp_path: Path, small: SmallDisk) -> None:
    work = Work(tmp_path, records(10))
    try:
        work.start_server()
        small.fill(leave_bytes=0)
        client = work.start(prefix=small.inside, store=str(small.path / "store"), room_seconds=0.3)
        _out, said = client.communicate(timeout=30)
        assert client.returncode == 4
        assert work.seen()["requests"] == []
        assert "No space left" in said or "bytes free and needs" in said
    finally:
        work.close()
