# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The role host_setup on this machine as the host: wheels copied, environments made, nothing on a second run, all gone again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import report, wheelhouse
from ansible_collections.relight.recovery.plugins.plugin_utils.run_folder import RunFolder

from relight.cli.wheelhouse import own_wheel, rewheel
from tests.harness import ROOT, skip_without_sight

PLAY = """
- name: Set up
  hosts: box
  gather_facts: false
  tasks:
    - name: Set up
      ansible.builtin.import_role:
        name: relight.recovery.host_setup
      when: not leaving
    - name: Leave
      ansible.builtin.import_role:
        name: relight.recovery.host_setup
        tasks_from: remove
      when: leaving
"""


class Host:
    """A controller's folder and a host's folder on one machine, joined by a local connection."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder / "controller" / "wheels"
        self.wheels.mkdir(parents=True)
        own_wheel(self.wheels)
        rewheel(self.wheels, "pip")
        wheelhouse.write_index(str(self.wheels), {})
        self.venv = folder / "host" / "opt" / "venv"
        self.sglang = folder / "host" / "sglang"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.sglang], check=True)
        self.copies = folder / "host" / "wheels"
        variables = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "relight_become": False,
            "relight_state_dir": str(folder / "host" / "state"),
            "relight_report_dir": str(folder / "controller" / "report"),
            "relight_venv": str(self.venv),
            "relight_wheelhouse": str(self.wheels),
            "relight_sglang_python": str(self.sglang / "bin" / "python"),
            "host_setup_wheelhouse_on_host": str(self.copies),
            "host_setup_extras": [],
        }
        (folder / "hosts.json").write_text(json.dumps({"relight": {"hosts": {"box": variables}}}))
        (folder / "play.yml").write_text(PLAY)

    def play(self, *arguments: str, leaving: bool = False, check: bool = False) -> tuple[int, str, int]:
        """Exit code, output, and how many tasks changed something."""
        name = time.strftime("%H%M%S")
        run = report.Run(name=name, kind="recover", hosts=("box",), check=check, tags=(), started=time.time())
        RunFolder(str(self.folder / "controller" / "report" / ("check" if check else ""))).open(run)
        done = subprocess.run(
            [
                str(ROOT / ".venv" / "bin" / "ansible-playbook"), "-i", "hosts.json", "play.yml", "-e", json.dumps({"leaving": leaving}),
                *(["--check"] if check else []), *arguments,
            ],
            cwd=self.folder,
            env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_LOCALHOST_WARNING": "false"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )  # fmt: skip
        changed = re.search(r"^box .*changed=(\d+)", done.stdout, re.MULTILINE)
        return done.returncode, done.stdout + done.stderr, int(changed.group(1)) if changed else -1

    def actions(self, check: bool = False) -> list[str]:
        records = RunFolder(str(self.folder / "controller" / "report" / ("check" if check else ""))).records("box")
        return [action for record in records for action in record["actions"]]


@pytest.fixture
def host(tmp_path):
    skip_without_sight()
    return Host(tmp_path)


def test_setting_up_again_and_leaving(host):
    before = {p.name for p in (host.folder / "host").iterdir()}
    code, output, _ = host.play(check=True)
    assert code == 0, output
    planned = host.actions(check=True)
    assert {p.name for p in (host.folder / "host").iterdir()} == before

    code, output, changed = host.play()
    assert code == 0, output
    assert host.actions() == planned
    assert len(planned) == 3
    assert changed > 0
    subprocess.run([host.venv / "bin" / "python", "-I", "-c", "import relight"], check=True)
    subprocess.run([host.sglang / "bin" / "python", "-I", "-c", "import relight.dump"], check=True)

    code, output, changed = host.play()
    assert (code, changed) == (0, 0), output

    code, output, _ = host.play(leaving=True)
    assert code == 0, output
    assert sorted(p.name for p in (host.folder / "host").iterdir()) == ["opt", "sglang", "state"]
    assert list((host.folder / "host" / "opt").iterdir()) == []
    assert not list(host.sglang.glob("lib/python3*/site-packages/relight*"))


def test_a_copy_that_was_cut_short_is_finished_and_a_torn_one_stops_the_host(host):
    digest = json.loads((host.wheels / wheelhouse.INDEX).read_text())["digest"][:16]
    cut = host.copies / digest
    cut.mkdir(parents=True)
    shutil.copy(next(host.wheels.glob("pip-*.whl")), cut)  # the index goes last, so it is not there
    code, output, _ = host.play()
    assert code == 0, output
    os.truncate(next(cut.glob("relight-*.whl")), 10)
    code, output, changed = host.play()
    assert (code, changed) == (2, 0)
    assert "host-env-wheelhouse" in output
    assert "its content differs" in output


def test_a_controller_without_wheels_says_how_to_make_them(host):
    (host.wheels / wheelhouse.INDEX).unlink()
    code, output, changed = host.play()
    assert (code, changed) == (2, 0)
    assert "relight wheelhouse" in output
    assert not host.venv.exists()
