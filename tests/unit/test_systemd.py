# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""systemd: what systemctl shows, read right; unit files that say what was meant; and the real thing where it is PID 1."""

from __future__ import annotations

import os
import sys

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import services, systemd

from tests.harness import run_module

SHOWN = """Restart=always
RestartUSec=100ms
MainPID=812
Id=vllm.service
LoadState=loaded
ActiveState=active
SubState=running
FragmentPath=/etc/systemd/system/vllm.service
UnitFileState=enabled

Restart=no
RestartUSec=100ms
MainPID=0
Id=old.service
LoadState=loaded
ActiveState=inactive
SubState=dead
FragmentPath=/etc/systemd/system/old.service
UnitFileState=disabled

Restart=on-failure
MainPID=401
Id=dbus.service
LoadState=loaded
ActiveState=active
SubState=running
FragmentPath=/usr/lib/systemd/system/dbus.service
UnitFileState=static

Restart=on-failure
MainPID=0
Id=bad.service
LoadState=loaded
ActiveState=failed
SubState=failed
FragmentPath=/etc/systemd/system/bad.service
UnitFileState=enabled
"""


def test_what_systemctl_shows_is_read_block_by_block():
    units = {block["Id"]: systemd.unit(block) for block in systemd.parse(SHOWN)}
    assert {name: (unit.state, unit.pid, unit.kept, unit.vendor) for name, unit in units.items()} == {
        "vllm.service": ("running", 812, True, False),
        "old.service": ("disabled", None, False, False),
        "dbus.service": ("running", 401, True, True),
        "bad.service": ("failed", None, True, False),
    }
    assert units["vllm.service"].file == "/etc/systemd/system/vllm.service"


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/vllm.service", "vllm.service"),
        ("/system.slice/system-vllm.slice/vllm@1.service", "vllm@1.service"),
        ("/system.slice/docker.service/worker", "docker.service"),
        ("/system.slice/docker-0123.scope", None),
        ("/user.slice/user-1000.slice/session-3.scope", None),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/x.service", None),
        ("/init.scope", None),
        ("/", None),
        ("", None),
    ],
)
def test_a_control_group_tells_the_service(cgroup, unit):
    assert systemd.unit_of_cgroup(cgroup) == unit


def test_a_unit_file_takes_words_literally():
    spec = services.UnitSpec(
        name="relight-t",
        command=("/bin/echo", "100%", 'say "hi"', "$HOME", "back\\slash", ""),
        environment={"A": "x y", "B": "%h"},
        requires_mounts=("/data",),
        stdout="/var/log/relight/t.log",
        restart=True,
    )
    lines = systemd.Systemd().render(spec).splitlines()
    assert 'ExecStart=:"/bin/echo" "100%%" "say \\"hi\\"" "$HOME" "back\\\\slash" ""' in lines
    assert 'Environment="A=x y"' in lines
    assert 'Environment="B=%%h"' in lines
    assert f'Environment="RELIGHT_UNIT_HASH={spec.hash}"' in lines
    assert 'RequiresMountsFor="/data"' in lines
    assert "StandardOutput=append:/var/log/relight/t.log" in lines
    assert "RestartPreventExitStatus=2 3 4 5" in lines
    assert "[Install]" not in lines
    with pytest.raises(services.ManagerError, match="line break"):
        systemd.Systemd().render(services.UnitSpec("relight-t", ("/bin/echo", "a\nb")))


def test_the_hash_covers_all_that_calls_for_a_restart():
    base = services.UnitSpec("a", ("x",), {"A": "1"}, watched={"/f": "1"})
    others = [
        services.UnitSpec("a", ("y",), {"A": "1"}, watched={"/f": "1"}),
        services.UnitSpec("a", ("x",), {"A": "2"}, watched={"/f": "1"}),
        services.UnitSpec("a", ("x",), {"A": "1"}, watched={"/f": "2"}),
        services.UnitSpec("a", ("x",), {"A": "1"}, "/tmp", watched={"/f": "1"}),
        services.UnitSpec("a", ("x",), {"A": "1"}, user="u", watched={"/f": "1"}),
    ]
    assert len({spec.hash for spec in [base, *others]}) == 6
    assert base.hash == services.UnitSpec("a", ("x",), {"A": "1"}, watched={"/f": "1"}).hash


def test_names_are_those_of_systemd():
    names = {"vllm": "vllm.service", "vllm.service": "vllm.service", "nightly.timer": "nightly.timer", "python3.11": "python3.11.service"}
    assert {name: systemd.Systemd().canonical(name) for name in names} == names


real = pytest.mark.skipif(
    not os.path.isdir("/run/systemd/system") or os.geteuid() != 0,
    reason="PID 1 is not systemd here, or we are not root: systemd NOT tested",
)


@real
def test_a_unit_lives_under_a_real_systemd(tmp_path):
    options = {"name": "relight-selftest", "manager": "systemd", "state_dir": str(tmp_path / "state")}
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    try:
        first = run_module("unit", **options, command=command)
        assert first["unit"]["state"] == "running"
        assert services.owner_of(systemd.Systemd(), first["unit"]["pid"]) == "relight-selftest.service"
        assert run_module("unit", **options, command=command)["changed"] is False
        assert run_module("unit", **options, state="stopped")["unit"]["state"] in ("stopped", "disabled")
    finally:
        assert run_module("unit", **options, state="absent")["unit"]["state"] == "absent"
