# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a running client: some records alone, samples made again, a drain; and what it foretells."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.extract.forecast import Forecast, Rate, last_rate
from tests.extraction import Work, kill, records, wait_until


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    made = Work(tmp_path, records(30))
    made.start_server()
    yield made
    made.close()


def ended(work: Work, *options: str, **changes: object) -> tuple[int, str]:
    client = work.start(options=options, **changes)
    try:
        _out, said = client.communicate(timeout=60)
    finally:
        kill(client)
    return client.returncode, said


def asked(work: Work) -> list[int]:
    return sorted(int(request["rid"].split("-")[2]) for request in work.seen()["requests"])


def test_only_the_records_that_are_named(work: Work) -> None:
    (work.path / "indices").write_text("[20, 5]")
    code, said = ended(work, "--only", "3-5,9", "--indices", str(work.path / "indices"))
    assert (code, work.wrong(), work.indices(), asked(work)) == (0, [], {3, 4, 5, 9, 20}, [3, 4, 5, 9, 20])
    tokens = sum(len(work.data[index]["input_ids"]) for index in (3, 4, 5, 9, 20))
    assert f"forecast: 5 samples of {tokens} tokens are to do" in said
    progress = work.progress()
    assert (progress["phase"], progress["total"], progress["done"], progress["eta_seconds"]) == ("done", 30, 5, 0.0)
    assert ended(work, "--only", "4-6")[0] == 0
    assert asked(work) == [3, 4, 5, 6, 9, 20]  # what is there is not asked for again
    assert ended(work)[0] == 0
    assert (work.wrong(), len(work.indices()), len(asked(work))) == ([], 30, 30)


def test_redo_makes_samples_again_and_keeps_the_old_ones(work: Work) -> None:
    assert ended(work)[0] == 0
    old = {index: Path(work.place().path_of(index)).read_bytes() for index in (7, 8)}
    other = work.place().entries()[9]
    code, said = ended(work, "--only", "7-8", "--redo")
    assert (code, work.wrong(), len(work.indices())) == (0, [], 30)
    assert "30 of 30 samples are in the store, 2 of them new" in said
    assert [index for index in asked(work) if index in (7, 8)] == [7, 7, 8, 8]
    kept = [Path(path) for path in work.place().quarantined()]
    assert {path.name: path.read_bytes() for path in kept} == {f"data_{index}.ckpt.quarantined": old[index] for index in (7, 8)}
    reasons = [json.loads(line) for path in {path.parents[1] for path in kept} for line in (path / "reason.jsonl").read_text().splitlines()]
    assert {line["reason"] for line in reasons} == {"redone"}
    assert (sorted(work.place().entries()), work.place().entries()[9]) == (list(range(30)), other)


def test_a_sample_that_cannot_be_made_again_stays(work: Work) -> None:
    assert ended(work)[0] == 0
    work.control(faults={"7": {"kind": "error"}})
    code, said = ended(work, "--only", "7", "--redo")
    assert (code, "given up: record 7" in said) == (5, True)
    assert (work.wrong(), len(work.indices()), work.place().quarantined()) == ([], 30, [])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--redo",), "--redo needs --only or --indices"),
        (("--only", "x"), "neither an index nor a range"),
        (("--only", "3-30"), "record 30 is asked for, and there are 30, counted from 0"),
        (("--indices", "/nowhere"), "cannot read the indices"),
        (("--rate", "0"), "--rate must be more than 0"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(work: Work, options: tuple[str, ...], why: str) -> None:
    code, said = ended(work, *options)
    assert (code, why in said, asked(work)) == (2, True, [])


@pytest.mark.parametrize("way", ["signal", "file"])
def test_drained_on_request(work: Work, way: str) -> None:
    """Nothing new is sent, what is in flight lands, and the next start goes on."""
    (work.state / "drain").touch()  # of a former life: no business of this client
    work.control(delay=0.4)
    client = work.start(concurrency=3)
    try:
        wait_until(lambda: len(work.progress().get("in_flight", [])) == 3 and work.progress()["this_run"] >= 3, what="samples in flight")
        if way == "signal":
            client.send_signal(signal.SIGUSR1)
        else:
            (work.state / "drain").touch()
        _out, said = client.communicate(timeout=60)
    finally:
        kill(client)
    assert client.returncode == 3
    assert "draining: nothing new is sent" in said
    assert re.search(r"drained: \d+ of 30 samples are in the store", said)
    progress = work.progress()
    assert (progress["phase"], progress["in_flight"], (work.state / "drain").exists()) == ("drained", [], False)
    assert set(asked(work)) == work.indices()  # all that was asked for has landed
    assert (work.wrong(), 3 < len(work.indices()) < 30) == ([], True)
    work.control(delay=0)
    assert ended(work)[0] == 0
    assert (work.wrong(), len(work.indices()), len(asked(work))) == ([], 30, 30)


def test_sigterm_ends_a_drain_that_takes_too_long(work: Work) -> None:
    work.control(faults={"*": {"kind": "never"}})
    client = work.start(concurrency=2, drain_seconds=0.2)
    try:
        wait_until(lambda: work.progress().get("in_flight"), what="a request in flight")
        client.send_signal(signal.SIGUSR1)
        wait_until(lambda: work.progress().get("phase") == "draining", what="the drain")
        client.terminate()
        _out, said = client.communicate(timeout=30)
    finally:
        kill(client)
    assert (client.returncode, "stopped: 0 of 30" in said, work.progress()["phase"]) == (3, True, "stopped")


def test_a_forecast_in_numbers() -> None:
    begin = 1_800_000_000  # 2027-01-15 08:00 UTC
    fits = Forecast(1000, 2_350_000, 57_344, 200_000_000_000, Rate(7400, "stated"))
    assert fits.bytes == 2_350_000 * (57_344 + 16) + 1000 * 4096
    assert fits.lines(begin) == [
        "forecast: 1000 samples of 2350000 tokens are to do, about 134.8 GB",
        "forecast: at 7400 tokens/s (stated) about 5:17, until 2027-01-15 08:05 UTC",
        "forecast: the store's disk has room for 200.0 GB and keeps 65.2 GB",
    ]
    short = Forecast(1000, 2_350_000_000, 57_344, 33_700_000_000_000, Rate(7400, "stated"))
    assert short.lines(begin)[2] == (
        "forecast: the store's disk has room for 33.70 TB: it is full after 25% of them, at 2027-01-16 06:03 UTC; "
        "make room for 101.10 TB more"
    )
    unknown = Forecast(1, 10, 4, -5, None).lines(begin)
    assert unknown[1] == "forecast: how long is not known before a first run: state a rate with --rate TOKENS_PER_SECOND"
    assert "has room for 0 B: it is full after 0% of them; make room for" in unknown[2]


def test_the_rate_is_that_of_the_last_run(tmp_path: Path) -> None:
    assert last_rate(str(tmp_path)) is None
    lines = [{"tokens_this_run": 100, "seconds": 2.0}, {"event": "beat"}, {"tokens_this_run": 0, "seconds": 1.0}]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_rate(str(tmp_path)) == Rate(50.0, "as in an earlier run")
    (tmp_path / "progress.json").write_text(json.dumps({"tokens_per_s": 70.5}))
    assert last_rate(str(tmp_path)) == Rate(70.5, "as at the end of the last run")
