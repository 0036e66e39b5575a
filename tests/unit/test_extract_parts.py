# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The client's parts: admission, troubles, names, progress, numbers in raw bytes, probes' choice, links."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ansible_collections.relight.recovery.plugins.module_utils import dumpfile
from ansible_collections.relight.recovery.plugins.module_utils.store import Entry, Runs
from hypothesis import given
from hypothesis import strategies as st

from relight.extract import continuity, fetch, links, states
from relight.extract.admission import Admission, Item, interleave
from relight.extract.client import Trouble
from relight.extract.progress import Display, Progress, human_bytes, human_seconds, line, publish, read

lengths = st.lists(st.integers(1, 5000), max_size=60)


def items(tokens: list[int]) -> list[Item]:
    return [Item(index, count, count * 10) for index, count in enumerate(tokens)]


@given(lengths)
def test_interleaving_keeps_every_item_and_mixes_long_and_short(tokens: list[int]) -> None:
    mixed = interleave(items(tokens))
    assert sorted(item.index for item in mixed) == list(range(len(tokens)))
    for long, short in zip(mixed[::2], mixed[1::2]):
        assert long.tokens >= short.tokens
    assert [item.tokens for item in mixed[::2]] == sorted((item.tokens for item in mixed[::2]), reverse=True)


@given(lengths, st.integers(1, 8), st.integers(1, 20000), st.randoms(use_true_random=False))
def test_admission_keeps_its_bounds_and_starves_nobody(tokens: list[int], concurrency: int, most: int, random: Any) -> None:
    admission = Admission(concurrency, most)
    admission.queue.extend(interleave(items(tokens)))
    landed = []
    while not admission.empty:
        while (item := admission.next(alone=False)) is not None:
            pass
        assert len(admission.flying) <= concurrency
        assert len(admission.flying) == 1 or admission.bytes_in_flight <= most
        item = random.choice(list(admission.flying.values()))
        admission.land(item)
        landed.append(item.index)
    assert sorted(landed) == list(range(len(tokens)))


def test_a_suspect_flies_alone() -> None:
    admission = Admission(8, 10**9)
    admission.queue.extend(items([5, 5, 5]))
    first = admission.next(alone=False)
    assert first is not None
    first.suspect = True
    admission.put_back(first)
    assert admission.next(alone=False) is first
    assert admission.next(alone=False) is None
    admission.land(first)
    assert admission.next(alone=False) is not None
    assert admission.next(alone=True) is None
    admission.queue[0].suspect = True
    assert admission.next(alone=False) is None


def test_trouble_doubles_its_pause_and_ends() -> None:
    trouble = Trouble(limit_seconds=10, first_pause=1)
    trouble.arise("away", 100.0)
    assert (trouble.next_try, trouble.over(109)) == (101.0, False)
    trouble.arise("away", 100.5)  # another of the same outage
    assert trouble.pause == 1
    trouble.arise("away", 102.0)
    assert (trouble.pause, trouble.next_try) == (2, 104.0)
    for now in range(110, 4000, 100):
        trouble.arise("away", float(now))
    assert trouble.pause == 30
    assert trouble.over(111)
    trouble.end()
    assert not trouble.over(9999)


def test_a_request_id_tells_who_made_it() -> None:
    names = fetch.Names()
    first, second = names.rid("0123456789abcdef", 7), names.rid("0123456789abcdef", 7)
    assert first != second
    assert first.startswith(f"relight-01234567-7-{os.getpid()}.")
    assert not fetch.is_dead(first)
    assert not fetch.is_dead(f"{first}.error")
    child = subprocess.Popen(["true"])
    child.wait()
    assert fetch.is_dead(f"relight-01234567-7-{child.pid}.1.1")
    assert fetch.is_dead(f"relight-01234567-7-{os.getpid()}.1.1.error")  # this pid, used again
    for other in ("relight-probe-1", "relight-01234567-7-x", "server.json"):
        assert not fetch.is_dead(other)


def test_progress_counts_and_says_when_it_ends(tmp_path: Path) -> None:
    progress = Progress(total=10, done=4, tokens_total=1000, tokens_done=400, phase="extracting")
    progress.mark(100.0)
    progress.stored(50, 5000)
    progress.stored(50, 5000)
    progress.mark(102.0)
    assert (progress.tokens_per_s, progress.eta_seconds) == (50.0, 10.0)
    progress.in_flight |= {9, 3}
    publish(str(tmp_path), progress)
    document = read(str(tmp_path))
    assert document is not None
    shown = ("done", "this_run", "tokens_done", "bytes", "in_flight", "pid")
    assert [document[name] for name in shown] == [6, 2, 500, 10000, [3, 9], os.getpid()]
    assert line(progress) == "extracting: 6/10 samples, 50 tokens/s, 10.0 kB, 2 in flight, 0:10 left"
    assert os.listdir(tmp_path) == ["progress.json"]


def test_the_rate_is_that_of_the_last_minute() -> None:
    progress = Progress(tokens_total=10**6)
    for second in range(300):
        progress.tokens_this_run += 0 if second < 200 else 70
        progress.mark(float(second))
    assert progress.tokens_per_s == pytest.approx(70)


def test_progress_without_a_place_is_no_error(tmp_path: Path) -> None:
    publish(str(tmp_path / "nowhere"), Progress())
    assert read(str(tmp_path)) is None


def test_plain_lines_come_every_few_seconds_and_at_each_phase() -> None:
    out = io.StringIO()
    display, progress = Display(out), Progress(total=5, phase="starting")
    for now, phase in ((0.0, "starting"), (1.0, "starting"), (2.0, "extracting"), (3.0, "extracting"), (7.1, "extracting")):
        progress.phase = phase
        display.show(progress, now)
    assert [text.split(":")[0] for text in out.getvalue().splitlines()] == ["starting", "extracting", "extracting"]


def test_on_a_terminal_there_is_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    display, progress = Display(out), Progress(total=4, done=1, phase="extracting", tokens_total=10)
    display.show(progress, 0.0)
    progress.stored(5, 2_500_000)
    display.show(progress, 1.0)
    display.say("a word")
    display.close()
    shown = out.getvalue()
    assert "2/4, 0 tokens/s, 2.5 MB, 0 in flight, ? left" in shown
    assert "50%" in shown
    assert "a word\n" in shown


def test_numbers_for_people() -> None:
    assert [human_bytes(count) for count in (999, 1500, 134_800_000, 5_030_000_000_000)] == ["999 B", "1.5 kB", "134.8 MB", "5.03 TB"]
    assert [human_seconds(count) for count in (None, 61, 3700)] == ["?", "1:01", "1:01:40"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_not_finite_is_found_wherever_it_lies(dtype: str, bad: float) -> None:
    largest = 6e4 if dtype == "float16" else 3e38
    values = np.linspace(-largest, largest, 101).astype("<f4")
    assert states.value_fault(raw(values, dtype), dtype) is None
    for place in (0, 50, 100):
        broken = values.copy()
        broken[place] = bad
        assert states.value_fault(raw(broken, dtype), dtype) == dumpfile.value_fault(raw(broken, dtype), dtype)
        assert states.value_fault(raw(broken, dtype), dtype) == "holds 1 values that are not finite"
    assert states.value_fault(bytes(8), dtype) == dumpfile.value_fault(bytes(8), dtype) == "is all zeros"


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0.0), ("float16", 1e-3), ("bfloat16", 8e-3)])
def test_raw_states_become_float32(dtype: str, error: float) -> None:
    values = np.linspace(-3, 3, 64).astype("<f4")
    assert np.abs(states.to_float32(raw(values, dtype), dtype) - values).max() <= error * 3


def raw(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (values.view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype("<f4" if dtype == "float32" else "<f2").tobytes()


def entry(index: int, tokens: int, time: float) -> Entry:
    return Entry(index, f"data_{index}.ckpt", 1, tokens, "", "", "", time)


def test_probes_begin_with_the_newest_and_span_the_lengths() -> None:
    entries = [entry(index, 10 + index % 50, float(index)) for index in range(200)]
    chosen = continuity.choose(entries, 4)
    assert [item.index for item in chosen[:2]] == [199, 198]
    assert {item.tokens for item in chosen[2:4]} == {59, 10}
    assert len({item.index for item in chosen}) == len(chosen) >= 16
    assert continuity.choose([], 4) == []
    assert [item.index for item in continuity.choose(entries[:1], 4)] == [0]


def test_relative_errors_are_per_token() -> None:
    stored = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    new = np.array([[3.0, 4.5], [0.0, 2.0], [1.0, 0.0]])
    assert continuity.relative_errors(stored, new).tolist() == [0.1, 2.0, 0.0]


def test_the_last_word_about_an_instance_counts() -> None:
    runs = Runs(links=[{"instance": "a", "verdict": "pass"}, {"instance": "b", "verdict": "fail"}, {"instance": "a", "verdict": "fail"}])
    assert links.passed(runs, "a") is None
    assert links.passed(runs, "b") is None
    runs.links.append({"instance": "b", "verdict": "pass", "samples": 4})
    assert links.passed(runs, "b") == {"instance": "b", "verdict": "pass", "samples": 4}
    assert links.passed(runs, "c") is None


def test_a_run_keeps_its_name_for_an_instance_and_an_identity() -> None:
    assert links.run_name("0123456789", {"a": 1, "b": 2}) == links.run_name("0123456789", {"b": 2, "a": 1})
    assert links.run_name("0123456789", {"a": 1}) != links.run_name("0123456789", {"a": 2})


def test_server_json_that_cannot_be_read_is_no_server(tmp_path: Path) -> None:
    assert dumpfile.read_server(str(tmp_path)) is None
    for text in ("", "[]", '{"instance": "a"}', '{"instance": "a", "layers": "x", "hidden_size": 2}'):
        (tmp_path / "server.json").write_text(text)
        assert dumpfile.read_server(str(tmp_path)) is None
    (tmp_path / "server.json").write_text(json.dumps({"instance": "a", "layers": [1, 2, 3], "hidden_size": 2, "dtype": "torch.bfloat16"}))
    server = dumpfile.read_server(str(tmp_path))
    assert server is not None
    assert (server.layers, links.dtype_of(server)) == ((1, 2, 3), "bfloat16")
