# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The launcher's backstop on a real directory: what lies there and what is to come never exceed the budget by more than its headroom."""

from __future__ import annotations

import json
import os

import pytest

from relight.dump import budget
from relight.dump.budget import Budget

TOKEN = 4 * 4 * 2  # four states of four bfloat16 numbers
BUDGET = 100 * TOKEN


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "server.json").write_text(json.dumps({"hidden_size": 4, "dtype": "bfloat16"}))
    return tmp_path


def come(folder, rid, size=TOKEN):
    """As the writer puts a dump in its place."""
    (folder / f".{rid}.1.tmp").write_bytes(bytes(size))
    os.rename(folder / f".{rid}.1.tmp", folder / rid)


def running(*rids):
    return set(rids).__contains__


def test_requests_in_flight_use_the_budget_up(folder):
    use = Budget(str(folder), BUDGET)
    assert use.refuse("relight-a", 60, running()) is None
    why = use.refuse("relight-b", 60, running("relight-a"))
    assert f"budget of {BUDGET} bytes is used up (0 files of 0 bytes, 1 dumps of {60 * TOKEN} bytes to come)" in why
    assert use.refuse("relight-c", 40, running("relight-a")) is None


def test_a_dump_that_came_counts_as_the_file_that_it_is_and_no_more_once_it_is_fetched(folder):
    use = Budget(str(folder), BUDGET)
    assert use.refuse("relight-a", 60, running()) is None
    come(folder, "relight-a", 60 * TOKEN)
    assert "1 files" in use.refuse("relight-b", 60, running())
    os.unlink(folder / "relight-a")
    assert use.refuse("relight-b", 60, running()) is None
    come(folder, "relight-b", 60 * TOKEN)
    os.unlink(folder / "relight-b")  # fetched between two looks
    assert use.refuse("relight-c", 60, running()) is None


def test_an_error_file_ends_a_flight_too(folder):
    use = Budget(str(folder), BUDGET)
    assert use.refuse("relight-a", 100, running()) is None
    come(folder, "relight-a.error")
    assert use.refuse("relight-b", 60, running()) is None


def test_a_request_that_was_broken_off_counts_no_more_after_a_while(folder, monkeypatch):
    use = Budget(str(folder), BUDGET)
    assert use.refuse("relight-a", 100, running()) is None
    assert use.refuse("relight-b", 60, running("relight-a")) is not None
    assert use.refuse("relight-b", 60, running()) is not None  # over, and its dump may still come
    monkeypatch.setattr(budget, "LATE_SECONDS", -1.0)
    assert use.refuse("relight-b", 60, running()) is None


def test_files_of_others_count(folder):
    (folder / "left-behind").write_bytes(bytes(BUDGET))
    assert Budget(str(folder), BUDGET).refuse("relight-a", 60, running()) is not None


def test_one_request_larger_than_the_budget_is_let_in_alone(folder):
    use = Budget(str(folder), BUDGET)
    assert use.refuse("relight-a", 500, running()) is None
    assert use.refuse("relight-b", 1, running("relight-a")) is not None


def test_a_directory_that_is_gone_is_an_error_of_the_system(folder):
    use = Budget(str(folder), BUDGET)
    os.unlink(folder / "server.json")
    os.rmdir(folder)
    with pytest.raises(FileNotFoundError):
        use.refuse("relight-a", 1, running())
