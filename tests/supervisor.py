# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A real supervisord in a directory of its own, for tests: programs are added as files and asked about by XML-RPC."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import procs, services, supervisord

SUPERVISORD = Path(sys.executable).with_name("supervisord")
MAIN = """[unix_http_server]
file={root}/s.sock
[supervisord]
logfile={root}/supervisord.log
pidfile={root}/supervisord.pid
childlogdir={root}
nodaemon=true
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
[include]
files = conf.d/*.conf
"""


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Ask until the answer is true, and return it. Fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = what()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.02)


class Host:
    """A supervisord with its directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = root / "s.sock"
        self.conf_dir = root / "conf.d"
        self.main = root / "supervisord.conf"
        self.state_dir = root / "state"
        self.manager = supervisord.Supervisord(str(self.socket), str(self.conf_dir))

    @property
    def options(self) -> dict[str, str]:
        """The options by which a module finds this manager."""
        return {
            "manager": "supervisord",
            "supervisor_socket": str(self.socket),
            "supervisor_conf_dir": str(self.conf_dir),
            "state_dir": str(self.state_dir),
        }

    def add(self, name: str, command: str, more: str = "", file: Path | None = None) -> services.Unit:
        """Add a program that is kept running, as someone else would have, and wait until it runs."""
        path = file or self.conf_dir / f"{name}.conf"
        text = path.read_text() if path.exists() else ""
        path.write_text(f"{text}[program:{name}]\ncommand={command}\nautostart=true\nautorestart=true\nstartsecs=0\n{more}\n")
        self.manager._ask("reloadConfig")
        self.manager._ask("addProcessGroup", name)
        return wait_for(lambda: self.running(name))

    def running(self, name: str) -> services.Unit | None:
        unit = self.manager.units().get(name)
        return unit if unit and unit.state == "running" and unit.pid else None


@contextmanager
def host(enter: Sequence[str] = ()) -> Iterator[Host]:
    """Start supervisord, and end it with all that it started. `enter` are words before its command, as nsenter's."""
    root = Path(tempfile.mkdtemp(prefix="relight-test-", dir="/tmp"))
    found = Host(root)
    found.conf_dir.mkdir()
    found.state_dir.mkdir()
    found.main.write_text(MAIN.format(root=root))
    daemon = subprocess.Popen([*enter, str(SUPERVISORD), "-c", str(found.main)], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        wait_for(found.socket.exists)
        yield found
    finally:
        everyone = procs.every()
        children = [everyone[pid] for pid in procs.tree(daemon.pid, everyone) if pid != daemon.pid]
        daemon.terminate()
        daemon.wait(30)
        procs.terminate(children, 0.5)
        shutil.rmtree(root)
