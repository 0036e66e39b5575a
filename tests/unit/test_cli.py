# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The command `relight`: what it hands to Ansible, and how it judges the end of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import relight
from relight.cli import main, plays, report
from tests.harness import ROOT
from tests.plays import COMPLETE


def written(tmp_path, verdict, **more):
    path = tmp_path / "report.json"
    hosts = {"box": {"verdict": verdict, "reason": "the reason"}}
    path.write_text(json.dumps({"verdict": verdict, "hosts": hosts, "paste": None, **more}))
    return path


@pytest.mark.parametrize(
    ("verdict", "rc", "check", "code"),
    [
        ("clear", 0, False, 0),
        ("clear-with-warnings", 0, False, 0),
        ("resumed", 0, False, 0),
        ("not-clear", 0, False, 1),
        ("not-clear", 2, False, 2),
        ("clear", 4, False, 4),  # another host was not reached
        ("something newer", 0, False, 1),
        ("not-clear", 0, True, 0),
        ("not-clear", 2, True, 2),
    ],
)
def test_only_a_good_verdict_ends_with_0(tmp_path, capsys, verdict, rc, check, code):
    assert plays.conclude("recover", rc, str(written(tmp_path, verdict)), check) == code
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"relight: {verdict}"
    assert f"box: {verdict.upper()}: the reason" in out


@pytest.mark.parametrize(
    ("name", "rc", "code"), [("recover", 0, 3), ("recover", 2, 2), ("assess", 0, 3), ("remove", 0, 0), ("remove", 4, 4)]
)
def test_a_run_without_a_report_is_not_clear(capsys, name, rc, code):
    assert plays.conclude(name, rc, None, False) == code
    assert ("NOT-CLEAR" in capsys.readouterr().err) == (code != 0)


def test_options_reach_ansible_as_they_were_said():
    options, further = plays._parser("recover").parse_known_args(
        [
            "-i",
            "a",
            "-i",
            "b c",
            "-e",
            "x=1",
            "--consent",
            "disable:unit:vllm.service",
            "--consent",
            "wipe:/dev/x",
            "-t",
            "free",
            "-C",
            "-vv",
            "--forks",
            "3",
        ]
    )
    assert plays._arguments(options) == [
        "-i", "a", "-i", "b c", "-e", "x=1", "-e", '{"relight_consent": ["disable:unit:vllm.service", "wipe:/dev/x"]}',
        "--tags", "free", "--check", "-vv",
    ]  # fmt: skip
    assert further == ["--forks", "3"]


def test_adopt_alone_takes_a_broken_host():
    options, further = plays._parser("adopt").parse_known_args(["--after-the-fact"])
    assert (plays._arguments(options), further) == (["-e", '{"relight_adopt_after_the_fact": true}'], [])
    assert plays._arguments(plays._parser("adopt").parse_known_args([])[0]) == []
    assert plays._parser("recover").parse_known_args(["--after-the-fact"])[1] == ["--after-the-fact"]


def test_the_line_to_paste_is_shown(tmp_path):
    value = report.read(written(tmp_path, "not-clear", paste="relight recover --consent x"))
    assert report.text(value).splitlines()[-2:] == ["To consent, paste: relight recover --consent x", "relight: not-clear"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read"), ("{", "is not a report"), ('{"verdict": "clear"}', "is not a report"), ("[]", "is not a report")],
)
def test_what_is_not_a_report_is_refused(tmp_path, capsys, content, says):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_report_ends_as_the_run_it_tells_of(tmp_path, capsys):
    written(tmp_path, "resumed")
    assert main(["report", str(tmp_path)]) == 0
    written(tmp_path, "not-clear")
    assert main(["report", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "usage: relight COMMAND"),
        (["--help"], 0, "usage: relight COMMAND"),
        (["--version"], 0, relight.__version__),
        (["recovr"], 2, "no command 'recovr'"),
        (["recover", "--ask-pass"], 2, "needs a terminal"),
    ],
)
def test_the_front_door(capsys, words, code, says):
    assert main(words) == code
    told = capsys.readouterr()
    assert says in told.out + told.err
    assert len(told.err.splitlines()) <= 1


def test_a_command_whose_playbook_is_not_there_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("relight.cli.plays.collection", lambda: tmp_path)
    assert main(["rollback", "-i", "x"]) == 2
    assert "no playbook rollback yet" in capsys.readouterr().err


def test_the_client_needs_no_ansible_and_says_what_it_needs(tmp_path):
    """With only the standard library, the command line stands and names the missing package."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from relight.cli import main\n"
        "assert main(['--help']) == 0\n"
        "assert not [m for m in sys.modules if m == 'ansible' or m.startswith('ansible.')]\n"
        "sys.exit(main(['recover']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT / "collections"), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr == "relight recover: the Python package 'ansible_runner' is not in this environment; install relight[controller]\n"


# An inventory of one host. Says in the file `seen` whether the runner's folder comes to hold no file with the secret.
SEEKS_THE_CANARY = """
import json, os, pathlib, time
found, deadline = ["not looked yet"], time.monotonic() + 10
while found and time.monotonic() < deadline:
    try:
        files = [p for p in pathlib.Path(os.environ["TMPDIR"]).glob("relight-runner-*/**/*") if p.is_file()]
        found = [p.name for p in files if b"canary-" in p.read_bytes()]
    except FileNotFoundError:
        continue  # it went while we looked
pathlib.Path("seen").write_text(", ".join(found) or "nothing")
print(json.dumps({"relight": {"hosts": ["box"]}, "_meta": {"hostvars": {"box": {"ansible_connection": "local", "relight_gpu_count": 0}}}}))
"""


def test_a_mistyped_group_is_not_clear_and_nothing_of_the_environment_is_left(tmp_path):
    """The real thing, ansible-runner and all: non-zero, one reason, and no file with the secret anywhere."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    inventory = tmp_path / "hosts.py"  # runs while Ansible does, and sees what lies there then
    inventory.write_text(f"#!{sys.executable}\n{SEEKS_THE_CANARY}")
    inventory.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "relight", "status", "-i", str(inventory), "-e", "relight_target=religth"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}",
            "TMPDIR": str(scratch),
            "CANARY": "canary-5f1e",
            "PWD": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert "no host is in the group 'religth'" in done.stdout
    assert "NOT-CLEAR" in done.stdout + done.stderr
    assert "\x1b[" not in done.stdout
    assert (tmp_path / "seen").read_text() == "nothing"
    assert list(scratch.iterdir()) == []
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"canary-5f1e" not in path.read_bytes(), path


def test_a_host_that_is_not_reached_is_named(tmp_path):
    inventory = tmp_path / "hosts.json"
    far = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 9, **COMPLETE}
    inventory.write_text(json.dumps({"all": {"children": {"relight": {"hosts": {"box": far}}}}}))
    done = subprocess.run(
        [sys.executable, "-m", "relight", "status", "-i", str(inventory)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}", "PWD": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert "box: NOT-CLEAR: the host was not reached" in done.stdout
