# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A host with real disks for tests: loop devices over files on a tmpfs, in a mount namespace of its own.

One process holds the namespace and the loop devices. When it ends, also because the test was killed, the mounts go with the namespace
and the kernel detaches each loop device with its last user.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import supervisor
from tests.harness import MODULES, ROOT, ModuleFailed

MIB = 1 << 20
TOOLS = ("losetup", "mkfs.ext4", "mkfs.xfs", "blkid", "wipefs", "findmnt", "rsync", "nsenter", "unshare", "partx", "sfdisk", "setpriv")
UNIT_ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}", "LC_ALL": "C.UTF-8"}


def lacking() -> str:
    """What this machine lacks for such a host; empty where it lacks nothing."""
    if os.geteuid() != 0:
        return "needs root for loop devices"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    if missing:
        return f"needs {', '.join(missing)}"
    return "" if os.path.exists("/dev/loop-control") else "needs loop devices"


long = pytest.mark.skipif("storage" not in os.environ.get("RELIGHT_LONG_TESTS", ""), reason="long: `make test-storage` runs it")
needed = pytest.mark.skipif(bool(lacking()), reason=lacking() or "-")


class Disks:
    """The host: its root folder (the same path inside and outside), its namespace and its service manager."""

    def __init__(self, root: Path, holder: subprocess.Popen, manager: supervisor.Host | None) -> None:
        self.root = root
        self.holder = holder
        self.manager = manager
        self.state = root / "var"
        self.data = root / "data"
        self.fstab = root / "etc" / "fstab"

    def ask(self, device: str) -> None:
        """Have the holder keep a device open until it ends; without one, wait until it is ready."""
        assert self.holder.stdin is not None
        assert self.holder.stdout is not None
        if device:
            self.holder.stdin.write(f"{device}\n")
            self.holder.stdin.flush()
        assert self.holder.stdout.readline() == "ready\n"

    def run(self, *words: str | Path, check: bool = True, **more: Any) -> subprocess.CompletedProcess:
        """A command in the namespace."""
        enter = ["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", f"--wdns={self.root}", "--"]
        done = subprocess.run([*enter, *map(str, words)], capture_output=True, text=True, check=False, **more)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def start(self, *words: str | Path, **more: Any) -> subprocess.Popen:
        enter = ["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", f"--wdns={self.root}", "--"]
        return subprocess.Popen([*enter, *map(str, words)], **more)

    def write(self, path: Path, text: str) -> None:
        self.run("tee", path, input=text)

    def python(self, code: str, *args: object) -> str:
        """Run Python in the namespace, and return what it prints."""
        environment = {**os.environ, **UNIT_ENVIRONMENT}
        return self.run(sys.executable, "-c", code, *map(str, args), env=environment).stdout

    def disk(self, name: str, size: int = 256 * MIB) -> str:
        """A new empty disk; returns its stable name."""
        image = self.root / "disks" / name
        self.run("truncate", "-s", str(size), image)
        return self.attach(name)

    def attach(self, name: str, *options: str) -> str:
        image = self.root / "disks" / name
        device = self.run("losetup", "--find", "--show", "--partscan", *options, image).stdout.strip()
        self.ask(device)
        self.run("losetup", "--detach", device)  # busy: the kernel does it when its last user has gone
        return f"loop:{image}"

    def device(self, name: str) -> str:
        found = json.loads(self.run("losetup", "--list", "--json", "-O", "NAME,BACK-FILE").stdout)["loopdevices"]
        return next(item["name"] for item in found if item["back-file"] == str(self.root / "disks" / name))

    def old_volume(self, name: str = "old", size: int = 256 * MIB, fstype: str = "ext4") -> str:
        """A formatted disk mounted at the data path, with its line in fstab; returns its UUID."""
        self.disk(name, size)
        device = self.device(name)
        self.run(f"mkfs.{fstype}", "-q", device)
        uuid = self.uuid(device)
        self.run("mount", device, self.data)
        self.write(self.fstab, f"# host's own\nproc /proc proc defaults 0 0\n{device}\t{self.data} {fstype} rw,nosuid 0 2\n# end\n")
        return uuid

    def uuid(self, device: str) -> str:
        return self.run("blkid", "-p", "-s", "UUID", "-o", "value", device, check=False).stdout.strip()

    def mounted(self, path: Path | str) -> str:
        """The UUID of what is mounted at a path; empty where nothing is."""
        done = self.run("findmnt", "-n", "-M", path, "-o", "SOURCE", check=False)
        return self.uuid(done.stdout.strip()) if done.stdout.strip() else ""

    def read_only(self, path: Path | str) -> bool:
        return "ro" in self.run("findmnt", "-n", "-M", path, "-o", "OPTIONS").stdout.strip().split(",")

    @property
    def options(self) -> dict[str, Any]:
        """What storage_migrate is told on this host."""
        manager = self.manager.options if self.manager else {"manager": "none"}
        return {
            **manager,
            "path": str(self.data),
            "state_dir": str(self.state),
            "staging": str(self.root / "new"),
            "aside": str(self.root / "aside"),
            "fstab": str(self.fstab),
            "log": str(self.root / "log" / "migrate.log"),
            "host_python": sys.executable,
        }

    def module(self, name: str, /, *, check: bool = False, within_seconds: float = 100.0, **options: Any) -> dict[str, Any]:
        """Run a module in the namespace. Raises ModuleFailed."""
        process = self.start_module(name, check=check, **options)
        out, err = process.communicate(timeout=within_seconds)
        try:
            result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise ModuleFailed(f"{name} returned no JSON (exit {process.returncode}): {out}{err}") from None
        if result.get("failed"):
            raise ModuleFailed(result.get("msg", err), result)
        return result

    def start_module(self, name: str, /, *, check: bool = False, **options: Any) -> subprocess.Popen:
        args = json.dumps({"ANSIBLE_MODULE_ARGS": {**options, "_ansible_check_mode": check, "_ansible_diff": False}})
        process = self.start(
            sys.executable,
            MODULES / f"{name}.py",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **UNIT_ENVIRONMENT},
        )
        assert process.stdin is not None
        process.stdin.write(args)
        process.stdin.close()
        process.stdin = None
        return process

    def migrate(self, state: str, target: str, **more: Any) -> dict[str, Any]:
        return self.module("storage_migrate", state=state, target=target, **{**self.options, **more})

    def progress(self, wanted: str, **more: Any) -> dict[str, Any]:
        names = ("state_dir", "manager", "supervisor_socket", "supervisor_conf_dir", "path")
        return self.module("migration_progress", wanted=wanted, **{k: self.options[k] for k in names if k in self.options}, **more)

    def wait(self, wanted: str, seconds: float = 60.0) -> dict[str, Any]:
        """Poll as the action plugin does."""
        deadline = time.monotonic() + seconds
        while True:
            result = self.progress(wanted)
            if result["settled"]:
                return result
            assert time.monotonic() < deadline, result
            time.sleep(0.1)  # the condition lies in another process

    def whole(self, target: str, until: str = "cut_over", **more: Any) -> list[dict[str, Any]]:
        """The steps of the role, in its order, each judged as the play does; the last one is `until`."""
        results = []
        for state in ("prepared", "copied", "quiesced", "verified", "cut_over"):
            result = self.migrate(state, target, **more)
            results.append(result)
            if result["gate"]["verdict"] in ("fail", "unknown"):
                return results
            if state in ("copied", "verified"):
                results.append(self.wait("live" if state == "copied" else "final"))
                if results[-1]["gate"]["verdict"] in ("fail", "unknown"):
                    return results
            if state == until:
                return results
        return results


def _hold() -> None:
    """What the namespace's holder does: private mounts, then wait for the end of its standard input."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0
    assert libc.mount(None, b"/", None, ctypes.c_ulong(0x4000 | 1 << 18), None) == 0
    root = sys.argv[1].encode()
    assert libc.mount(b"tmpfs", root, b"tmpfs", 0, sys.argv[2].encode()) == 0
    for name in ("var", "data", "etc", "disks", "log"):
        os.mkdir(os.path.join(root, name.encode()))
    kept = []
    print("ready", flush=True)
    for line in sys.stdin:
        kept.append(os.open(line.strip(), os.O_RDONLY))
        print("ready", flush=True)


@contextmanager
def host(size_mib: int = 2048, managed: bool = True) -> Iterator[Disks]:
    """A host for one test. With `managed` it has a supervisord, inside the namespace."""
    root = Path(tempfile.mkdtemp(prefix="relight-disks-", dir="/tmp"))
    holder = subprocess.Popen(
        [sys.executable, "-c", "from tests import disks; disks._hold()", str(root), f"size={size_mib}m"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **UNIT_ENVIRONMENT},
        cwd=ROOT,
    )
    assert holder.stdin is not None
    try:
        found = Disks(root, holder, None)
        found.ask("")
        with ExitStack() as stack:
            if managed:
                enter = ["setpriv", "--pdeathsig", "TERM", "--", "nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"]
                found.manager = stack.enter_context(supervisor.host(enter))
            yield found
    finally:
        holder.stdin.close()
        holder.wait(30)
        root.rmdir()
