# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""supervisord through its own XML-RPC on a unix socket, and through its configuration files."""

from __future__ import annotations

import glob
import http.client
import os
import re
import shlex
import shutil
import signal
import socket
import time
import xmlrpc.client
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import durable, procs
from ansible_collections.relight.recovery.plugins.module_utils.services import CLEAN_EXITS, ManagerError, Unit, UnitSpec, wait_state

DISABLED = ".relight-disabled"  # appended to a file's name: the include pattern *.conf no longer finds it
BACKUP = ".relight-backup"
RPC_SECONDS = 15.0
OFF = {"autostart": "false", "autorestart": "false"}
STATES = {
    "RUNNING": "running",
    "STARTING": "starting",
    "BACKOFF": "starting",
    "STOPPING": "stopping",
    "STOPPED": "stopped",
    "EXITED": "stopped",
    "FATAL": "failed",
    "UNKNOWN": "failed",
}
SECTION = re.compile(r"^\[(?P<kind>program|fcgi-program|eventlistener|group):(?P<name>[^\]]+)\]")
ANY_SECTION = re.compile(r"^\[[^\]]+\]")
DEFAULT_FILES = ("/etc/supervisord.conf", "/etc/supervisor/supervisord.conf", "/usr/local/etc/supervisord.conf")
BAD_NAME, ALREADY_STARTED, NOT_RUNNING, ALREADY_ADDED = 10, 60, 70, 90  # its fault codes


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket, reached through its directory so that a long path does not matter."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=RPC_SECONDS)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(RPC_SECONDS)
        folder = os.open(os.path.dirname(os.path.abspath(self.path)), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{os.path.basename(self.path)}")
        finally:
            os.close(folder)


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        return _Connection(self.path)


def program_of(name: str) -> str:
    """`group:process` names a process of a group; its section is that of the process."""
    return name.rpartition(":")[2]


def sections(text: str) -> list[tuple[str, str, int, int]]:
    """The sections of a configuration file: kind, name, first line and the line after the last. Pure."""
    found: list[tuple[str, str, int, int]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if ANY_SECTION.match(line):
            if found and found[-1][3] == len(lines):
                found[-1] = (*found[-1][:3], number)
            match = SECTION.match(line)
            kind, name = (match["kind"], match["name"].strip()) if match else (line.strip("[] "), "")
            found.append((kind, name, number, len(lines)))
    return found


def set_options(text: str, program: str, options: Mapping[str, str]) -> str:
    """The text with options of one program's section set and every other line as it was. Pure. Raises KeyError."""
    lines = text.splitlines(keepends=True)
    for kind, name, first, end in sections(text):
        if name != program or kind == "group":
            continue
        left = dict(options)
        for number in range(first + 1, end):
            option = re.match(r"^(\w+)(\s*[=:]\s*)", lines[number])
            if option and option[1].lower() in left:
                ending = "\n" if lines[number].endswith("\n") else ""
                lines[number] = f"{option[1]}{option[2].rstrip(chr(10))}{left.pop(option[1].lower())}{ending}"
        if left:
            head = lines[first] if lines[first].endswith("\n") else lines[first] + "\n"
            lines[first] = head + "".join(f"{key}={value}\n" for key, value in left.items())
        return "".join(lines)
    raise KeyError(program)


def quote_command(words: Iterable[str]) -> str:
    """A command line that supervisord splits into these very words: no expansion, no comment inside. Raises ManagerError."""
    line = " ".join(shlex.quote(word) for word in words)
    if "\n" in line or "\r" in line:
        raise ManagerError("a command word holds a line break, which a supervisord file cannot say")
    # Blank and ; or # would begin a comment, and %(here)s be replaced, even inside quotes: close them there and open them again.
    return re.sub(r"(\s)(?=[;#])|(%)(?=\()", r"\1\2''", line).replace("%", "%%")


def quote_environment(values: Mapping[str, str]) -> str:
    """KEY="value",... as supervisord reads it. Raises ManagerError for what its format cannot hold."""
    out = []
    for key, value in sorted(values.items()):
        quote = "'" if '"' in value else '"'
        if quote in value or value.strip("\"'") != value or re.search(r"[\n\r]|\s[;#]|%\(", value):
            raise ManagerError(
                f"environment variable {key}: supervisord's format cannot hold its value (quotes, comment sign or line break)"
            )
        out.append(f"{key}={quote}{value}{quote}")
    return ",".join(out).replace("%", "%%")


class Supervisord:
    """One supervisord, named by its socket."""

    kind = "supervisord"

    def __init__(self, path: str, conf_dir: str | None = None) -> None:
        self.socket = path
        self.conf_dir = conf_dir

    # Speaking to it

    def _call(self, method: str, *args: Any) -> Any:
        """One call. Raises xmlrpc.client.Fault for an answer that is a refusal, ManagerError for no answer."""
        proxy = xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=_Transport(self.socket))
        try:
            with proxy:
                return getattr(proxy, method)(*args)
        except xmlrpc.client.Fault:
            raise
        except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
            raise ManagerError(f"supervisord does not answer on {self.socket}: {error}") from error

    def _ask(self, method: str, *args: Any, fine: tuple[int, ...] = ()) -> Any:
        """One call whose refusals are errors, but for the fault codes in `fine`, which return None."""
        try:
            return self._call(f"supervisor.{method}", *args)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode in fine:
                return None
            raise ManagerError(f"supervisord refuses {method}{args}: {fault.faultString}") from fault

    def canonical(self, name: str) -> str:
        return name

    def units(self) -> dict[str, Unit]:
        files = self._programs()
        found = {}
        for info in self._ask("getAllProcessInfo"):
            unit = self._unit(info, files)
            found[unit.name] = unit
        for name, file in files.items():
            if file.endswith(DISABLED) and name not in found:
                found[name] = Unit(name, "disabled", None, file)
        return found

    def _unit(self, info: Mapping[str, Any], files: Mapping[str, str]) -> Unit:
        name = info["name"] if info["group"] == info["name"] else f"{info['group']}:{info['name']}"
        state = STATES.get(info["statename"], "failed")
        return Unit(
            name=name,
            state=state,
            pid=info["pid"] or None,
            file=files.get(program_of(name)) or files.get(info["group"]),
            kept=state in ("running", "starting") or info["statename"] == "FATAL",
            detail=info.get("spawnerr") or info["description"],
            exit_status=info["exitstatus"] if info["statename"] == "EXITED" else None,
        )

    def _info(self, name: str) -> Unit:
        return self._unit(self._ask("getProcessInfo", name), {})

    # Its files

    def _main_file(self) -> str | None:
        """The file that the running supervisord was started with."""
        try:
            pid = int(self._ask("getPID"))
            with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as handle:
                words = handle.read().split("\0")
            here = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            return None
        for number, word in enumerate(words):
            if word in ("-c", "--configuration") and number + 1 < len(words):
                return os.path.join(here, words[number + 1])
            if word.startswith("--configuration="):
                return os.path.join(here, word.partition("=")[2])
        candidates = (os.path.join(here, "supervisord.conf"), os.path.join(here, "etc/supervisord.conf"), *DEFAULT_FILES)
        return next((path for path in candidates if os.path.exists(path)), None)

    def _files(self) -> list[str]:
        """The main file, what it includes, and what we disabled beside those."""
        main = self._main_file()
        files = [main] if main else []
        patterns = []
        if main:
            try:
                with open(main, encoding="utf-8") as handle:
                    text = handle.read()
            except OSError:
                text = ""
            include = re.search(r"^\[include\][^\[]*?^files\s*=\s*(.+(?:\n[ \t]+.+)*)", text, re.MULTILINE)
            here = os.path.dirname(main)
            words = include[1].split() if include else []
            patterns = [os.path.join(here, word.replace("%(here)s", here)) for word in words]
        if self.conf_dir:
            patterns.append(os.path.join(self.conf_dir, "*.conf"))
        for pattern in patterns:
            files += sorted(glob.glob(pattern)) + sorted(glob.glob(pattern + DISABLED))
        return list(dict.fromkeys(os.path.normpath(path) for path in files))

    def _programs(self) -> dict[str, str]:
        """Program name to the file that defines it; an enabled file wins over a disabled one."""
        found: dict[str, str] = {}
        for path in self._files():
            try:
                with open(path, encoding="utf-8") as handle:
                    text = handle.read()
            except OSError:
                continue
            for kind, name, _begin, _end in sections(text):
                if name and kind != "group" and (name not in found or found[name].endswith(DISABLED)):
                    found[name] = path
        return found

    def _file_of(self, name: str) -> str | None:
        """The file that defines a unit; numprocs makes `name_00` of one section."""
        programs = self._programs()
        short = program_of(name)
        return programs.get(short) or programs.get(name.partition(":")[0]) or programs.get(re.sub(r"_\d+$", "", short))

    def _section(self, name: str, file: str) -> str:
        """The name of the section in `file` that makes the unit."""
        with open(file, encoding="utf-8") as handle:
            names = {section for kind, section, _begin, _end in sections(handle.read()) if kind != "group"}
        short = program_of(name)
        for candidate in (short, name.partition(":")[0], re.sub(r"_\d+$", "", short)):
            if candidate in names:
                return candidate
        raise ManagerError(f"{file} has no section for {name}")

    # Ours

    def unit_file(self, name: str) -> str:
        if not self.conf_dir:
            raise ManagerError("supervisor_conf_dir is not set: relight_supervisor_conf_dir says where supervisord includes *.conf from")
        return os.path.join(self.conf_dir, f"{name}.conf")

    def render(self, spec: UnitSpec) -> str:
        lines = [
            f"; Written by Relight. Changes are overwritten. Configuration {spec.hash}.",
            f"[program:{spec.name}]",
            f"command={quote_command(spec.command)}",
            f"directory={spec.directory.replace('%', '%%')}",
            f"environment={quote_environment(spec.variables)}",
            "autostart=false",
            f"autorestart={'unexpected' if spec.restart else 'false'}",
            f"exitcodes={','.join(map(str, CLEAN_EXITS))}",
            f"startsecs={spec.start_seconds}",
            "startretries=0",
            f"stopwaitsecs={spec.stop_seconds}",
            "stopasgroup=true",
            "killasgroup=true",
            "redirect_stderr=true",
            f"stdout_logfile={(spec.stdout or '/dev/null').replace('%', '%%')}",
            "stdout_logfile_maxbytes=0",
        ]
        if spec.user:
            lines.append(f"user={spec.user}")
        return "\n".join(lines) + "\n"

    def install(self, name: str, spec: UnitSpec) -> bool:
        path, text = self.unit_file(name), self.render(spec)
        if name in self._live():
            self.stop(name, spec.stop_seconds + 5)
        before = read_text(path)
        if before != text:
            with durable.replacing(path, 0o640) as handle:
                handle.write(text.encode())
        try:
            self._load(name)
        except ManagerError:
            if before is None:  # a file that it cannot read would keep it from reading any other
                os.unlink(path)
            raise
        return before != text

    def _load(self, name: str) -> None:
        """Make supervisord take up the file's present content for one program, stopped."""
        added, changed, removed = self._ask("reloadConfig")[0]
        if name in changed or name in removed:
            self.stop(name, RPC_SECONDS)
            self._ask("removeProcessGroup", name, fine=(BAD_NAME,))
        if name in added or name in changed:
            self._ask("addProcessGroup", name, fine=(ALREADY_ADDED,))
        elif name not in removed and name not in {unit.partition(":")[0] for unit in self._live()}:
            raise ManagerError(f"supervisord does not know {name} after rereading: does its [include] cover {self.conf_dir}/*.conf?")

    def _live(self) -> list[str]:
        return [self._unit(info, {}).name for info in self._ask("getAllProcessInfo")]

    def remove(self, name: str) -> bool:
        path = self.unit_file(name)
        known = name in self._live()
        if known:
            self.stop(name, RPC_SECONDS)
        there = os.path.exists(path)
        if there:
            os.unlink(path)
            durable.fsync_directory(os.path.dirname(path))
        if known:
            self._ask("reloadConfig")
            self._ask("removeProcessGroup", name, fine=(BAD_NAME,))
        return there or known

    def start(self, name: str, seconds: float) -> Unit:
        self._ask("startProcess", name, False, fine=(ALREADY_STARTED,))
        return wait_state(lambda: self._info(name), ("running", "failed", "stopped"), seconds)

    def stop(self, name: str, seconds: float) -> Unit:
        unit = self._info(name)
        if unit.state in ("stopped", "failed"):
            return unit
        members = self._members(unit)
        if unit.state != "stopping":
            self._ask("stopProcess", name, False, fine=(NOT_RUNNING,))
        over = time.monotonic() + seconds
        unit = wait_state(lambda: self._info(name), ("stopped", "failed"), seconds)
        if unit.state not in ("stopped", "failed"):
            for process in members:
                procs.send(process, signal.SIGKILL)
            unit = wait_state(lambda: self._info(name), ("stopped", "failed"), 10)
        procs.terminate(members, max(0.0, over - time.monotonic()))
        return unit

    def _members(self, unit: Unit) -> list[procs.Process]:
        """The unit's processes while its main one still holds them together."""
        if unit.pid is None:
            return []
        processes = procs.every()
        return [processes[pid] for pid in procs.tree(unit.pid, processes)]

    # Foreign ones

    def plan_disable(self, name: str, mask: bool = False) -> dict[str, Any]:
        file = self._file_of(name)
        plan = {"unit": name, "manager": self.kind, "file": file, "how": "stopped", "group": name.partition(":")[0]}
        if file is None or file.endswith(DISABLED):
            return {**plan, "how": "renamed" if file else "stopped", "file": file[: -len(DISABLED)] if file else None}
        with open(file, encoding="utf-8") as handle:
            text = handle.read()
        alone = len(sections(text)) == 1 and file != self._main_file()
        return {**plan, "how": "renamed"} if alone else {**plan, "how": "edited", "section": self._section(name, file)}

    def is_disabled(self, plan: Mapping[str, Any]) -> bool:
        name, file = plan["unit"], plan["file"]
        if name in self._live() and self._info(name).up:
            return False
        if plan["how"] == "edited":
            text = read_text(file) or ""
            return set_options(text, plan["section"], OFF) == text
        return file is None or not os.path.exists(file)

    def disable(self, plan: Mapping[str, Any], seconds: float) -> None:
        name, file = plan["unit"], plan["file"]
        live = name in self._live()
        if live:
            self.stop(name, seconds)
        if plan["how"] == "renamed" and os.path.exists(file):
            os.rename(file, file + DISABLED)
            durable.fsync_directory(os.path.dirname(file))
        elif plan["how"] == "edited":
            self._edit(file, plan["section"])
        if plan["how"] != "stopped":
            self._forget(plan["group"])

    def _edit(self, file: str, section: str) -> None:
        """Switch one program off in a file that it shares; the file as it was is kept beside it."""
        with open(file, encoding="utf-8", newline="") as handle:
            text = handle.read()
        edited = set_options(text, section, OFF)
        if edited == text:
            return
        if not os.path.exists(file + BACKUP):
            with durable.replacing(file + BACKUP) as copy:
                copy.write(text.encode())
            shutil.copystat(file, file + BACKUP)
        replace_text(file, edited)

    def _forget(self, group: str) -> None:
        """Let supervisord take up the change where the whole group stands still; a group with other members waits."""
        _added, changed, removed = self._ask("reloadConfig")[0]
        busy = any(unit.partition(":")[0] == group and self._info(unit).state not in ("stopped", "failed") for unit in self._live())
        if busy or group not in changed + removed:
            return
        self._ask("removeProcessGroup", group, fine=(BAD_NAME,))
        if group in changed:
            self._ask("addProcessGroup", group, fine=(ALREADY_ADDED,))

    def enable(self, plan: Mapping[str, Any]) -> bool:
        file, changed = plan["file"], False
        if plan["how"] == "renamed" and os.path.exists(file + DISABLED):
            if os.path.exists(file):
                raise ManagerError(f"{file} is there again beside {file}{DISABLED}: keep one of the two")
            os.rename(file + DISABLED, file)
            durable.fsync_directory(os.path.dirname(file))
            changed = True
        elif plan["how"] == "edited" and os.path.exists(file + BACKUP):
            changed = self._restore(file, plan["section"])
        return changed

    def _restore(self, file: str, section: str) -> bool:
        """Put back the section's two options as the kept copy has them, and nothing else of it."""
        with open(file + BACKUP, encoding="utf-8", newline="") as handle:
            before = handle.read()
        with open(file, encoding="utf-8", newline="") as handle:
            now = handle.read()
        restored = restore_section(now, before, section)
        if restored == now:
            return False
        replace_text(file, restored)
        return True

    # Whose process is it?

    def owners(self, pids: Iterable[int], processes: Mapping[int, procs.Process]) -> dict[int, str]:
        """By the tree of each running program; an orphan by its process group, session or supervisord's own variables."""
        units = [self._unit(info, {}) for info in self._ask("getAllProcessInfo")]
        by_pid: dict[int, str] = {}
        by_group: dict[int, str] = {}
        for unit in units:
            if unit.pid is not None:
                by_group[unit.pid] = unit.name
                by_pid.update(dict.fromkeys(procs.tree(unit.pid, processes), unit.name))
        found = {}
        for pid in pids:
            process = processes.get(pid)
            owner = by_pid.get(pid)
            if owner is None and process is not None:
                owner = by_group.get(process.group) or by_group.get(process.session) or self._marked(pid)
            if owner is not None:
                found[pid] = owner
        return found

    def _marked(self, pid: int) -> str | None:
        """The program that started this process or an ancestor, by what supervisord puts in its environment."""
        marks = procs.environment(pid, ("SUPERVISOR_",)) or {}
        server = marks.get("SUPERVISOR_SERVER_URL", "")
        if server.startswith("unix://") and os.path.realpath(server[7:]) != os.path.realpath(self.socket):
            return None
        name, group = marks.get("SUPERVISOR_PROCESS_NAME"), marks.get("SUPERVISOR_GROUP_NAME")
        if not name:
            return None
        return name if group in (None, name) else f"{group}:{name}"


def restore_section(now: str, before: str, section: str) -> str:
    """`now` with autostart and autorestart of one section as `before` has them. Pure."""
    lines = now.splitlines(keepends=True)
    old = {}
    for kind, name, first, end in sections(before):
        if name == section and kind != "group":
            for line in before.splitlines(keepends=True)[first + 1 : end]:
                option = re.match(r"^(autostart|autorestart)\s*[=:]", line, re.IGNORECASE)
                if option:
                    old[option[1].lower()] = line
    for kind, name, first, end in sections(now):
        if name == section and kind != "group":
            out = []
            for line in lines[first:end]:
                option = re.match(r"^(autostart|autorestart)\s*[=:]", line, re.IGNORECASE)
                out.append(old.get(option[1].lower(), "") if option else line)
            return "".join(lines[:first] + out + lines[end:])
    return now


def read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read()
    except FileNotFoundError:
        return None


def replace_text(path: str, text: str) -> None:
    """Replace a system file durably, its mode and owner kept."""
    before = os.stat(path)
    with durable.replacing(path, before.st_mode & 0o7777) as handle:
        handle.write(text.encode())
        os.fchmod(handle.fileno(), before.st_mode & 0o7777)
        if os.geteuid() == 0:
            os.fchown(handle.fileno(), before.st_uid, before.st_gid)
