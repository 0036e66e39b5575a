# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""recover.yml on one local host without a server, for tests of how a run begins and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
COMPLETE = {
    "relight_gpu_count": 0,
    "relight_become": False,
    "relight_data_mounted": False,
    "relight_data_reserve_bytes": 0,
    "relight_dump_budget_bytes": 0,
    "relight_dump_reserve_bytes": 0,
    "relight_model_dir": "/nowhere/model",
    "relight_hidden_size": 8,
    "relight_sglang_python": "/nowhere/python",
    "relight_dump_layers": [0, 1, 2],
    "relight_dataset_path": "/nowhere/records.json",
    "relight_store_dir": "/nowhere/store",
}


def recover(folder: Path, *arguments: str, host: dict[str, Any] | None = None, **variables: Any) -> tuple[int, str, dict[str, Any]]:
    """Run recover.yml from `folder`, its report and state below it. A variable that is None is not set.

    Returns the exit code, all output on one line, and the report.
    """
    reports = folder / "report"
    everywhere = {"relight_report_dir": str(reports), "relight_state_dir": str(folder / "state"), **COMPLETE, **variables}
    given = {name: value for name, value in everywhere.items() if value is not None}
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = folder / "hosts.yml"
    hosts = {"h1": host or local}
    inventory.write_text(yaml.safe_dump({"all": {"children": {"relight": {"hosts": hosts, "vars": given}}}}))
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, ROOT / "recover.yml", *arguments],
        cwd=folder,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(folder / "tmp")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split()), json.loads((reports / "report.json").read_text())
