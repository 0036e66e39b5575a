# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The role and its playbooks as an operator runs them, on real disks; the playbook is killed too."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import disks, plays
from tests.disks import MIB
from tests.harness import ROOT
from tests.supervisor import wait_for

pytestmark = [disks.needed, disks.long, pytest.mark.timeout(600)]
ANSIBLE = str(Path(sys.executable).with_name("ansible-playbook"))


class Operator:
    """Someone with an inventory for this host."""

    def __init__(self, host: disks.Disks, target: str) -> None:
        self.host = host
        told = host.options
        variables = {
            **plays.COMPLETE,
            "relight_report_dir": str(host.root / "report"),
            "relight_state_dir": told["state_dir"],
            "relight_log_dir": str(host.root / "log"),
            "relight_venv": "/nowhere",
            "relight_poll_seconds": 1,
            "relight_data_dir": told["path"],
            "relight_data_mounted": True,
            "relight_store_dir": f"{told['path']}/store",
            "relight_service_manager": "supervisord",
            "relight_supervisor_socket": told["supervisor_socket"],
            "relight_supervisor_conf_dir": told["supervisor_conf_dir"],
            "storage_migration_strategy": "migrate",
            "storage_migration_target": target,
            "storage_migration_fstab": told["fstab"],
            "storage_migration_staging_dir": told["staging"],
            "storage_migration_aside_dir": told["aside"],
        }
        hosts = {"h1": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}}
        host.write(host.root / "hosts.yml", yaml.safe_dump({"all": {"vars": variables, "children": {"relight": {"hosts": hosts}}}}))
        self.environment = {
            **os.environ,
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCAL_TEMP": str(host.root / "tmp"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_COLLECTIONS_SCAN_SYS_PATH": "false",
        }

    def words(self, name: str, consent: tuple[str, ...], *more: str) -> list[str]:
        extra = json.dumps({"relight_consent": list(consent)})
        return [ANSIBLE, "-i", str(self.host.root / "hosts.yml"), str(ROOT / name), "-e", extra, *more]

    def play(self, name: str, *more: str, consent: tuple[str, ...] = ()) -> tuple[int, int, str]:
        """Exit code, how many tasks changed something, and the output on one line."""
        done = self.host.run(*self.words(name, consent, *more), check=False, env=self.environment)
        found = re.search(r"h1 +: ok=\d+ +changed=(\d+)", done.stdout)
        return done.returncode, int(found.group(1)) if found else -1, " ".join((done.stdout + done.stderr).split())

    def storage(self, *more: str, consent: tuple[str, ...] = ()) -> tuple[int, int, str]:
        return self.play("recover.yml", "--tags", "storage", *more, consent=consent)


@pytest.fixture
def host():
    with disks.host() as found:
        yield found


def test_from_the_plan_to_the_reclaimed_disk(host):
    old = host.old_volume(size=400 * MIB)
    host.python("import sys; from pathlib import Path; from tests import trees; trees.make(Path(sys.argv[1]), large=20)", host.data)
    target = host.disk("new", 500 * MIB)
    operator = Operator(host, target)
    wipe, reclaim = f"wipe:{target}", f"reclaim:{old}"

    code, changed, output = operator.play("recover.yml", "--tags", "assess")
    assert (code != 0, changed) == (True, 0)
    assert f'"relight_consent": ["{wipe}"]' in output  # the line to paste, before any change
    code, changed, output = operator.storage("--check", consent=(wipe,))
    assert (code, changed) == (0, 1)
    assert host.uuid(host.device("new")) == ""

    # The playbook is killed while the copy runs: the service goes on, and the next run attaches.
    first = host.start(*operator.words("recover.yml", (wipe,), "--tags", "storage"), env=operator.environment, stdout=subprocess.DEVNULL)
    progress = Path(f"/proc/{host.holder.pid}/root{host.state}/migration/progress.json")
    wait_for(progress.exists, 60)
    first.send_signal(signal.SIGKILL)
    first.wait()
    code, changed, output = operator.storage(consent=(wipe,))
    assert code == 0, output
    assert changed >= 1
    assert host.mounted(host.data) != old
    differences = host.python(
        "import sys; from tests import trees; print(trees.differences(*sys.argv[1:]))", host.root / "aside", host.data
    )
    assert differences.strip() in ("", ".d..t...... ./")  # storage_check has since tried a write at the root

    code, changed, output = operator.storage(consent=(wipe,))
    assert (code, changed) == (0, 0), output
    code, changed, output = operator.play("playbooks/rollback.yml")
    assert (code, changed) == (0, 1), output
    assert host.mounted(host.data) == old
    assert operator.play("playbooks/rollback.yml")[:2] == (0, 0)

    code, changed, output = operator.storage()  # no format, so no consent
    assert code == 0, output
    code, _, output = operator.play("playbooks/reclaim.yml")
    assert code != 0
    assert reclaim in output
    code, changed, output = operator.play("playbooks/reclaim.yml", consent=(reclaim,))
    assert (code, changed) == (0, 1), output
    assert host.uuid(host.device("old")) == ""
    assert operator.storage()[:2] == (0, 0)
