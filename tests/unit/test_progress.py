"""How far is the extraction: what settles a wait, and what is never taken for progress."""

from __future__ import annotations

import json
import os

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import progress
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict


def seen(alive=True, age=1.0, **values):
    body = {"phase": "extracting", "total": 160, "done": 90, "this_run": 10, "tokens_per_s": 95.0, "eta_seconds": 60, "pid": 1, **values}
    return progress.Seen(body, alive, age)


@pytest.mark.parametrize(
    ("what", "missing", "goal", "verdict", "settled", "finished"),
    [
        (seen(), None, "finished", Verdict.PASS, False, False),
        (seen(), 70, "first_samples", Verdict.PASS, True, False),
        (seen(this_run=0), 70, "first_samples", Verdict.PASS, False, False),
        (seen(), 70, "none", Verdict.PASS, True, False),
        (seen(phase="done", done=160, alive=False), None, "finished", Verdict.PASS, True, True),
        (seen(phase="done", done=160, alive=False), 2, "finished", Verdict.FAIL, True, False),
        (seen(phase="done", done=150, alive=False), 70, "finished", Verdict.FAIL, True, False),
        (seen(alive=False), 70, "finished", Verdict.FAIL, True, False),
        (seen(phase="failed", error="the server is away", alive=False), 70, "none", Verdict.FAIL, True, False),
        (seen(age=31.0), 70, "first_samples", Verdict.UNKNOWN, False, False),
        (progress.Seen(None, True, 0.0), None, "finished", Verdict.FAIL, False, False),
        (progress.Seen(None, False, 0.0), None, "finished", Verdict.FAIL, True, False),
        (progress.Seen(None, False, 0.0), 0, "finished", Verdict.PASS, True, True),
    ],
)
def test_judge(what, missing, goal, verdict, settled, finished):
    gate, over, line = progress.judge(what, missing, goal)
    assert (gate.verdict, over, gate.evidence["finished"]) == (verdict, settled, finished)
    assert line


def test_a_client_that_was_killed_is_not_said_to_have_told_why():
    (killed,) = progress.judge(seen(alive=False), 70, "none")[0].problems
    assert killed.what == "the client ended in phase extracting at 90 of 160 without a last word, as one that is killed"
    assert killed.remedy.startswith("run recover.yml again: it resumes")
    (told,) = progress.judge(seen(alive=False, phase="failed", error="the server is away"), 70, "none")[0].problems
    assert (told.what, told.remedy) == ("the server is away", "mend that and run recover.yml again: it resumes")


def test_a_client_of_another_boot_is_not_alive_even_if_its_pid_is(tmp_path):
    (tmp_path / "progress.json").write_text(json.dumps({"pid": os.getpid(), "boot_id": "other", "time": 0.0, "phase": "extracting"}))
    assert progress.look(str(tmp_path), 10.0, "this").alive is False
    assert progress.look(str(tmp_path), 10.0, "other").alive is True


def test_what_a_former_client_wrote_is_no_progress_of_this_one(tmp_path):
    (tmp_path / "progress.json").write_text(json.dumps({"pid": 1, "boot_id": "this", "time": 9.0, "phase": "done", "total": 1, "done": 1}))
    looked = progress.look(str(tmp_path), 10.0, "this", pid=os.getpid())
    assert (looked.progress, looked.alive) == (None, True)


def test_a_file_that_is_no_progress_is_refused(tmp_path):
    (tmp_path / "progress.json").write_text("[]")
    with pytest.raises(ValueError, match="not the extraction's progress"):
        progress.look(str(tmp_path), 10.0, "this")
