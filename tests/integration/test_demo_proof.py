# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's proof fails when it must: each claim is broken here once."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ansible_collections.relight.recovery.plugins.module_utils import ckpt, layouts

from demo import proof, show

WIDTH = 4
LENGTHS = {0: 5, 1: 9, 2: 9, 3: 3}


def tensors(index: int, factor: float = 1.0, shift: int = 0) -> dict[str, ckpt.TensorBytes]:
    """The tensors of a made-up sample, its states times `factor`."""
    length = LENGTHS[index]
    rnd = np.random.default_rng(index)

    def of(array: Any, dtype: str) -> ckpt.TensorBytes:
        return ckpt.TensorBytes(dtype, array.shape, array.tobytes())

    return {
        "input_ids": of(np.arange(length, dtype=np.int64) + shift, "int64"),
        "loss_mask": of(np.ones(length, dtype=np.int64), "int64"),
        "hidden_state": of((rnd.standard_normal((1, length, WIDTH)) * factor).astype(np.float32), "float32"),
        "aux_hidden_state": of((rnd.standard_normal((1, length, 3 * WIDTH)) * factor).astype(np.float32), "float32"),
    }


def put(folder: Path, index: int, **changes: Any) -> Path:
    path = folder / layouts.layout("specforge").path_of(index)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as handle:
        ckpt.write(handle, tensors(index, **changes), {})
    return path


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for index in LENGTHS:
        put(ours, index)
        put(theirs, index)
    return ours, theirs


def test_equal_stores_are_equal(stores: tuple[Path, Path]) -> None:
    found = proof.compare(*stores, len(LENGTHS))
    assert (found.faults, found.worst, found.tokens) == ([], 0.0, LENGTHS)


@pytest.mark.parametrize(("factor", "faults"), [(1 + 1e-6, 0), (1 + 9e-5, 0), (1 + 1.2e-4, 1), (float("nan"), 1)])
def test_a_number_that_is_off_is_a_fault(stores: tuple[Path, Path], factor: float, faults: int) -> None:
    put(stores[0], 1, factor=factor)
    assert len(proof.compare(*stores, len(LENGTHS)).faults) == faults


def test_other_tokens_missing_torn_flipped_and_surplus_samples_are_faults(stores: tuple[Path, Path]) -> None:
    ours, theirs = stores
    put(ours, 0, shift=1)
    (ours / "rows_0-2000/data_1.ckpt").unlink()
    torn = ours / "rows_0-2000/data_2.ckpt"
    torn.write_bytes(torn.read_bytes()[:-30])
    flipped = ours / "rows_0-2000/data_3.ckpt"
    data = bytearray(flipped.read_bytes())
    place = ckpt.read_header(str(flipped)).tensors["hidden_state"].offset
    data[place + 2] ^= 1
    flipped.write_bytes(data)
    (ours / "rows_0-2000/data_4.ckpt").write_bytes(torn.read_bytes())
    faults = " ".join(proof.compare(ours, theirs, len(LENGTHS)).faults)
    assert "data_0.ckpt: other tokens" in faults
    assert "data_1.ckpt: [Errno 2]" in faults
    assert "data_2.ckpt: " in faults
    assert "data_3.ckpt: has wrong bytes" in faults
    assert "data_4.ckpt: a sample of no record" in faults


CLIENTS = {100, 200}
DRILL = {"torn": ["rows_0-2000/data_1.ckpt"], "flipped": ["rows_0-2000/data_2.ckpt"], "fill": {"progress": {"in_flight": [3]}}}
# Once each, then what the disaster cost, a continuity sample by another process, a probe.
REQUESTS = [
    *[(f"relight-aaaaaaaa-{index}-100.7.{index}", LENGTHS[index]) for index in LENGTHS],
    *[(f"relight-bbbbbbbb-{index}-200.9.{index}", LENGTHS[index]) for index in (1, 2, 3)],
    ("relight-bbbbbbbb-0-300.9.1", LENGTHS[0]),
    ("7f3c", 6),
]


def log_of(path: Path, requests: list[tuple[str, int]], counted: int | None = None, cached: int = 0, dropped: tuple[str, ...] = ()) -> Path:
    total = sum(tokens for _, tokens in requests) if counted is None else counted
    lines = [f"[2026-01-01 00:00:00] Prefill batch, #new-seq: 1, #new-token: {total}, #cached-token: {cached}, token usage: 0.00, "]
    for rid, tokens in requests:
        event = {"timestamp": "t", "event": "request.finished", "rid": rid, "obj": {}, "out": {"meta_info": {"prompt_tokens": tokens}}}
        if rid not in dropped:
            lines.append(f"[2026-01-01 00:00:00] {json.dumps(event)}")
    told = "[http_server] Error: Request is disconnected from the client side (type 1). Abort request obj.rid="
    lines += [f"[2026-01-01 00:00:00] {told}{rid!r}" for rid in dropped]
    path.write_text("\n".join(lines) + "\n")
    return path


def accounted(tmp_path: Path, requests: list[tuple[str, int]], moved: set[int] | None = None, **log: Any) -> proof.Account:
    seen = proof.requests(log_of(tmp_path / "log", requests, **log))
    return proof.account(seen, CLIENTS, LENGTHS, DRILL, {1, 2} if moved is None else moved)


def test_every_token_is_explained(tmp_path: Path) -> None:
    found = accounted(tmp_path, REQUESTS)
    assert found.faults == []
    assert (found.counted, found.one_pass, found.torn, found.corrupt) == (26 + 21 + 5 + 6, 26, 9, 9)
    assert (found.in_flight, found.continuity, found.probes) == (3, 5, 6)
    assert "      32  together" in proof.table(found)


def test_a_request_whose_answer_came_too_late_for_its_client_is_a_pass_over_its_record(tmp_path: Path) -> None:
    """SGLang logs no end of it, only that the client is gone; the dump was there."""
    late = ("relight-aaaaaaaa-0-100.7.0", "relight-bbbbbbbb-0-300.9.1")
    found = accounted(tmp_path, REQUESTS, dropped=late)
    assert found == accounted(tmp_path, REQUESTS)
    assert found.faults == []


@pytest.mark.parametrize(
    ("requests", "options", "fault"),
    [
        ([*REQUESTS, ("relight-bbbbbbbb-0-200.9.9", 5)], {}, "record 0 was extracted 2 times, not 1"),
        ([r for r in REQUESTS if r[0] != "relight-bbbbbbbb-1-200.9.1"], {}, "record 1 was extracted 1 times, not 2"),
        (REQUESTS, {"counted": 59}, "the server counted 59"),
        (REQUESTS, {"counted": 53, "dropped": ("relight-aaaaaaaa-0-100.7.0",)}, "the server counted 53"),
        (REQUESTS, {"cached": 1}, "1 tokens came from a cache"),
        (REQUESTS, {"moved": {1}}, "quarantined were [1]"),
        (REQUESTS, {"moved": {0, 1, 2}}, "quarantined were [0, 1, 2]"),
    ],
)
def test_a_token_too_many_or_too_few_is_a_fault(
    tmp_path: Path, requests: list[tuple[str, int]], options: dict[str, Any], fault: str
) -> None:
    assert any(fault in found for found in accounted(tmp_path, requests, **options).faults)


def test_short_victims_prove_little(tmp_path: Path) -> None:
    drill = {**DRILL, "torn": ["rows_0-2000/data_3.ckpt"]}
    seen = proof.requests(log_of(tmp_path / "log", REQUESTS))
    assert any("shorter than the median" in fault for fault in proof.account(seen, CLIENTS, LENGTHS, drill, {2, 3}).faults)


def test_a_stretch_of_the_log_is_read_alone(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log", REQUESTS[:2])
    mark = log.stat().st_size
    log.write_bytes(log.read_bytes() + log_of(tmp_path / "more", REQUESTS[2:3]).read_bytes())
    assert proof.requests(log, mark).finished == REQUESTS[2:3]
    assert proof.requests(log, 0, mark).counted_tokens == 14


def test_only_clients_of_the_journal_count_as_extraction(tmp_path: Path) -> None:
    lines = [
        {"step": "extract", "event": "begin", "pid": 100},
        {"step": "continuity", "event": "begin", "pid": 300},
        {"step": "extract", "event": "end", "pid": 400},
    ]
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert proof.client_pids(tmp_path / "journal.jsonl") == {100}


def test_the_secret_is_found_where_it_must_not_be(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/report.json").write_text("key sk-canary-1 leaked")
    (tmp_path / "conf").write_text("sk-canary-1")
    assert proof.files_with("sk-canary-1", [tmp_path], [tmp_path / "conf"]) == [tmp_path / "a/report.json"]
    assert proof.files_with("sk-canary-2", [tmp_path], []) == []


def test_steps_show_where_they_are() -> None:
    out = io.StringIO()
    steps = show.Steps(2, out)
    steps.step("first")
    steps.say("a result")
    steps.last_line_at -= show.PLAIN_LINE_SECONDS
    steps.wait("something")
    steps.wait("too soon again")
    assert out.getvalue().splitlines() == ["[ 1/2]  0:00  first", "               a result", "         0:00  ... something"]


def test_the_progress_line_tells_the_state(tmp_path: Path) -> None:
    import time

    told = {"time": time.time(), "total": 10, "done": 5, "tokens_per_s": 80.4, "bytes": 3e6, "phase": "extracting", "eta_seconds": 61.0}
    path = tmp_path / "progress.json"
    path.write_text(json.dumps(told))
    assert show.progress_line(path) == "[##########          ] 5/10 samples, 80 tokens/s, 3 MB, 1:01 left"
    path.write_text(json.dumps({**told, "time": time.time() - 60}))
    assert show.progress_line(path) == ""
