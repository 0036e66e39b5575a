# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Where the inventory has a Ceph admin host, the cluster is asked there; elsewhere nothing is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness import ROOT
from tests.unit.test_ceph import ANSWERS, command


@pytest.mark.parametrize("admin", [True, False])
def test_the_cluster_is_asked_on_its_admin_host(tmp_path, admin):
    gates = {"relight.recovery.assess": {"assess_gates": ["ceph_check"], "assess_stops": True}}
    roles = [{"role": name, "vars": vars_} for name, vars_ in gates.items()]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"name": "P", "hosts": "h1", "gather_facts": False, "roles": roles}]))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    ceph = command(tmp_path, ANSWERS) if admin else ["/nowhere/ceph"]
    variables = {
        "relight_report_dir": str(tmp_path / "report"),
        "relight_state_dir": str(tmp_path / "state"),
        "relight_become": False,
        "relight_ceph_command": ceph,
    }
    children = {"relight": {"hosts": {"h1": local}}, **({"relight_ceph_admin": {"hosts": {"c1": local}}} if admin else {})}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"vars": variables, "children": children}}))
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "hosts.yml", "play.yml"],
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    output = " ".join(done.stdout.split())
    if admin:
        assert done.returncode != 0
        assert "ok: [h1 -> c1]" in output
        gates = json.loads((tmp_path / "report/report.json").read_text())["hosts"]["h1"]["gates"]
        assert [(gate["name"], gate["after"]["verdict"]) for gate in gates] == [("ceph_check", "fail")]
    else:
        assert done.returncode == 0, done.stdout
