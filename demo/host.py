# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The embedded host: a machine in a folder, with its own mounts and its own service manager.

    build/demo/host/
      data/           the data volume: a small tmpfs that a drill can fill
      etc/            supervisord's configuration and the mark of a drill target
      var/, opt/      state that a reboot keeps, and installed software
      run/, log/, scripts/, bin/

Namespaces of its own hold its mounts and its processes. Its first process (`anchor`, this file's `_anchor`) plays firmware
and init: it mounts, starts supervisord, reaps what is left over, and starts supervisord again when the power button (SIGUSR1)
is pressed after a crash. `bin/python` enters the namespaces; an inventory names it as ansible_python_interpreter.

    python -m demo.host start|stop|status [ROOT]
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
ROOT = CHECKOUT / "build" / "demo" / "host"
MARKER = "etc/relight-drill-target"
DATA_MIB = 128
SHM_MIB = 1024
# A unix socket's path has 108 bytes, and supervisord binds a temporary name that is longer by a dot and its pid.
SOCKET_PATH_BYTES = 98

# How the host is made a machine of its own, best first. `plain` is none: its data volume is then an ordinary folder.
UNSHARE = {
    "user-mount-pid": [
        "--user",
        "--map-root-user",
        "--mount",
        "--propagation",
        "private",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ],
    "mount-pid": ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "user-mount": ["--user", "--map-root-user", "--mount", "--propagation", "private"],
    "mount": ["--mount", "--propagation", "private"],
    "plain": [],
}
ENTER = {
    "user-mount-pid": ["nsenter", "--preserve-credentials", "--user", "--mount", "--pid", "--target"],
    "mount-pid": ["nsenter", "--mount", "--pid", "--target"],
    "user-mount": ["nsenter", "--preserve-credentials", "--user", "--mount", "--target"],
    "mount": ["nsenter", "--mount", "--target"],
    "plain": [],
}

SUPERVISORD = """\
[unix_http_server]
file={root}/run/supervisor.sock
chmod=0700
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[supervisord]
nodaemon=true
pidfile={root}/run/supervisord.pid
logfile={root}/log/supervisord.log
logfile_maxbytes=0
childlogdir={root}/log
directory={root}
[supervisorctl]
serverurl=unix://{root}/run/supervisor.sock
[include]
files={root}/etc/supervisor/conf.d/*.conf
"""

PYTHON = """\
#!/bin/sh
# Runs the host's own Python inside the host's mounts. Ansible's modules start here.
anchor=$(cat {root}/run/anchor.pid) || exit 69
exec {enter} sh -c 'cd "$0" 2>/dev/null; exec "$@"' "$PWD" {python} "$@"
"""


class HostError(Exception):
    """The embedded host cannot be made or reached; the message is one sentence for the reader."""


@dataclass(frozen=True)
class Status:
    """What `status` prints, with pids as they are outside. `mode` is a key of UNSHARE; `processes` include the anchor.

    `waiter` is what started the anchor and ends with it, where that is not the anchor itself.
    """

    running: bool
    mode: str = ""
    anchor: int = 0
    waiter: int = 0
    supervisord: int = 0
    processes: tuple[int, ...] = ()

    @property
    def sees_only_itself(self) -> bool:
        """Whether its processes see no others: else gates there must call unknown what they cannot look into."""
        return self.mode.endswith("pid")


def start(root: Path = ROOT, data_mib: int = DATA_MIB, shm_mib: int = SHM_MIB) -> Status:
    """Bring the host up and wait until its service manager answers. A host that is up is left alone. Raises HostError."""
    seen = status(root)
    if seen.running:
        return seen
    if len(str(root / "run/supervisor.sock")) > SOCKET_PATH_BYTES:
        raise HostError(f"{root} is too long a path for a unix socket: use a checkout with a shorter path")
    supervisord = Path(sys.executable).parent / "supervisord"
    if not supervisord.exists():
        raise HostError(f"there is no {supervisord}: run `make demo`, which installs it")
    mode = _best_mode()
    _lay_out(root, mode)
    command = [sys.executable, "-m", "demo.host", "anchor", str(root), mode, str(data_mib), str(shm_mib)]
    if UNSHARE[mode]:
        command = ["unshare", *UNSHARE[mode], "--", *command]
    with open(root / "log/anchor.log", "ab") as log:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=CHECKOUT, env=_environment(), start_new_session=True
        )
    deadline = time.monotonic() + 60
    while not (root / "run/supervisor.sock").exists():
        if started.poll() is not None or time.monotonic() > deadline:
            started.kill()
            tail = (root / "log/anchor.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise HostError(f"the embedded host did not come up: {' '.join(tail) or 'no word from it'}")
        time.sleep(0.05)
    # With its own pids, the anchor is the child that unshare waits for; else unshare has become the anchor.
    anchor = _children(started.pid)[0] if mode.endswith("pid") else started.pid
    (root / "run/anchor.json").write_text(
        json.dumps({"pid": anchor, "start_ticks": _start_ticks(anchor), "mode": mode, "waiter": started.pid})
    )
    (root / "run/anchor.pid").write_text(f"{anchor}\n")
    while not (seen := status(root)).supervisord and time.monotonic() < deadline:
        time.sleep(0.05)  # it writes its pid file a moment after it listens
    return seen


def stop(root: Path = ROOT) -> None:
    """End every process of the host, the anchor last: the mounts go with it. A host that is down is left alone."""
    seen = status(root)
    if not seen.running:
        return
    _kill([pid for pid in (seen.supervisord,) if pid], signal.SIGTERM, 30)  # supervisord stops its programs in order
    for _ in range(20):  # what is left, until nothing new appears
        others = [pid for pid in _inside(seen.anchor, seen.mode) if pid != seen.anchor]
        if not others:
            break
        _kill(others, signal.SIGKILL, 10)
    _kill([seen.anchor], signal.SIGTERM, 10)
    _kill([seen.anchor], signal.SIGKILL, 10)
    with suppress(ChildProcessError):
        os.waitpid(seen.waiter, 0)  # where this very process started it
    for name in ("run/anchor.pid", "run/init.pid", "run/anchor.json", "run/supervisord.pid", "run/supervisor.sock"):
        (root / name).unlink(missing_ok=True)


def status(root: Path = ROOT) -> Status:
    """Look; change nothing."""
    try:
        told = json.loads((root / "run/anchor.json").read_text())
        if _start_ticks(told["pid"]) != told["start_ticks"]:
            return Status(False)
    except (OSError, ValueError, KeyError):
        return Status(False)
    mode, anchor = told["mode"], told["pid"]
    inside = _inside(anchor, mode)
    return Status(True, mode, anchor, told["waiter"], _named_by(root / "run/supervisord.pid", inside), tuple(inside))


def enter(root: Path, command: list[str]) -> list[str]:
    """The command line that runs `command` inside the host. Raises HostError when the host is down."""
    seen = status(root)
    if not seen.running:
        raise HostError(f"the embedded host of {root} is not running")
    prefix = [*ENTER[seen.mode], str(seen.anchor), "--"] if ENTER[seen.mode] else []
    return [*prefix, *command]


def base_python() -> str:
    """The interpreter that our virtual environment was made with: the host's own, without our packages."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _best_mode() -> str:
    """The best way that works here, found by trying it."""
    for mode, options in UNSHARE.items():
        if not options:
            return mode
        trial = ["unshare", *options, "--", "mount", "-t", "tmpfs", "-o", "size=64k", "trial", "/dev/shm"]
        if shutil.which("unshare") and subprocess.run(trial, capture_output=True, check=False).returncode == 0:
            return mode
    raise AssertionError("unreachable: plain needs nothing")


def _lay_out(root: Path, mode: str) -> None:
    """Make the host's folders and the files that come with the machine. Never touches data that is there."""
    folders = ("data", "etc/supervisor/conf.d", "var/relight", "opt/relight", "run", "log", "scripts", "bin", "tmp")
    for name in folders:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("run/supervisor.sock", "run/supervisord.pid"):
        (root / name).unlink(missing_ok=True)
    (root / MARKER).write_text("This host may be broken on purpose: it is the embedded host of Relight's demo.\n")
    (root / "etc/supervisor/supervisord.conf").write_text(SUPERVISORD.format(root=root))
    prefix = shlex.join(ENTER[mode]) + ' "$anchor" --' if ENTER[mode] else ""
    wrapper = root / "bin/python"
    wrapper.write_text(PYTHON.format(root=shlex.quote(str(root)), enter=prefix, python=shlex.quote(base_python())))
    wrapper.chmod(0o755)


def _environment() -> dict[str, str]:
    """What the machine's processes start with: nothing of the caller's but where programs are, and who and in what tongue."""
    kept = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "PIP_FIND_LINKS")
    return {name: os.environ[name] for name in kept if name in os.environ}


def _anchor(root: Path, mode: str, data_mib: int, shm_mib: int) -> int:
    """The namespace's first process, until SIGTERM. SIGUSR1 boots the service manager when it is not running."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD, signal.SIGINT})
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of the host stay in it
    if mode != "plain":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={data_mib}m,mode=0755", "relight-demo-data", root / "data"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={shm_mib}m,mode=1777", "relight-demo-shm", "/dev/shm"], check=True)
    (root / "run/init.pid").write_text(f"{os.getpid()}\n")  # as the host's own processes see it
    manager = _boot(root)
    while True:
        received = signal.sigwait({signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD, signal.SIGINT})
        if received == signal.SIGCHLD:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
        elif received == signal.SIGUSR1 and not _alive(manager):
            manager = _boot(root)
        elif received == signal.SIGTERM:
            return 0


def _boot(root: Path) -> int:
    """Start supervisord and return its pid."""
    (root / "run/supervisor.sock").unlink(missing_ok=True)
    command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(root / "etc/supervisor/supervisord.conf")]
    with open(root / "log/boot.log", "ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
        )
    return child.pid


def _alive(pid: int) -> bool:
    """Is it a process that still runs? A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _start_ticks(pid: int) -> int:
    """When a process started, which with its pid names it for ever. Raises OSError when there is none."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _children(pid: int) -> list[int]:
    """The children of a process. Raises OSError."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _named_by(path: Path, inside: list[int]) -> int:
    """The process of the host, by its pid outside, that one of the host's own pid files names; or 0."""
    try:
        wanted = path.read_text().strip()
    except OSError:
        return 0
    for pid in inside:
        with suppress(OSError):
            if re.findall(r"^NSpid:.*\t(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) == [wanted]:
                return pid
    return 0


def _inside(anchor: int, mode: str) -> list[int]:
    """The pids of the host, as they are outside: by its namespace, or without one by descent from the anchor."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if mode != "plain":
        kind = "pid" if mode.endswith("pid") else "mnt"
        try:
            wanted = os.readlink(f"/proc/{anchor}/ns/{kind}")
        except OSError:
            return []
        found = []
        for pid in pids:
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/{kind}") == wanted and _alive(pid):
                    found.append(pid)
        return sorted(found)
    parents = {}
    for pid in pids:
        with suppress(OSError):
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    inside = {anchor}
    while True:
        more = {pid for pid, parent in parents.items() if parent in inside} - inside
        if not more:
            return sorted(pid for pid in inside if _alive(pid))
        inside |= more


def _kill(pids: list[int], number: signal.Signals, wait_seconds: float) -> None:
    """Signal the processes and wait until they are gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + wait_seconds
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)


def main(arguments: list[str]) -> int:
    """The command line above."""
    verb, *rest = arguments or ["status"]
    if verb == "anchor":
        root, mode, data_mib, shm_mib = rest
        return _anchor(Path(root), mode, int(data_mib), int(shm_mib))
    root_path = Path(rest[0]).resolve() if rest else ROOT
    if verb not in ("start", "stop", "status"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if verb == "start":
            start(root_path)
        elif verb == "stop":
            stop(root_path)
        print(json.dumps(asdict(status(root_path))))
    except HostError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
