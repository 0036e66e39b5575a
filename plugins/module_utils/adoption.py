# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What only a look can tell for a baseline: the server's own environment and command line, services, mounts by UUID.

On a broken host the same is gathered from unit files and old logs. Everything is redacted where it is read. To be called in
`bounded.call`.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import mounts, procs, redact, services

SERVER = "sglang"
OWN_MARKS = (services.UNIT, services.UNIT_HASH)
BY_UUID, BY_ID = "disk/by-uuid", "disk/by-id"
LOG_BYTES = 1 << 28
UNIT_FILE_BYTES = 1 << 20
LONGEST_ANSWER = 64
HEALTH_SECONDS = 10.0
WORLD = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # what a reboot wipes
# Of SGLang's hundreds of settings, those that a server must have again.
ARGUMENTS = [
    "model_path",
    "tokenizer_path",
    "served_model_name",
    "trust_remote_code",
    "context_length",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "mem_fraction_static",
    "max_running_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "schedule_policy",
    "tp_size",
    "dp_size",
    "pp_size",
    "ep_size",
    "device",
    "attention_backend",
    "sampling_backend",
    "disable_radix_cache",
    "disable_cuda_graph",
    "skip_tokenizer_init",
    "json_model_override_args",
    "enable_p2p_check",
    "watchdog_timeout",
    "host",
    "port",
]
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"]*\"|'[^']*'|[^\s,\"']+)")


@dataclass(frozen=True)
class Server:
    """The server's settings and where they were found: process, unit file, log or inventory. `readable` is False without permission."""

    source: str
    unit: str | None = None
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    healthy: bool | None = None
    readable: bool = True


@dataclass(frozen=True)
class Where:
    """Where to look."""

    port: int
    host: str = "127.0.0.1"
    our_units: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    inventory_command: tuple[str, ...] = ()
    inventory_environment: Mapping[str, str] = field(default_factory=dict)
    after_the_fact: bool = False


def look_at_services(where: Where, manager: services.Manager) -> list[dict[str, Any]]:
    """Our units and those that the inventory lists, as the manager has them. Raises ManagerError."""
    known = manager.units()
    names = dict.fromkeys(manager.canonical(name) for name in (*where.our_units, *where.units))
    return [{"name": name, "state": known[name].state, "kept": known[name].kept} for name in names if name in known]


# The server


def look_at_server(where: Where, manager: services.Manager) -> Server | None:
    """The running server's settings; on a broken host those of a unit file, an old log or the inventory."""
    processes = procs.every()
    pid = _server_pid(where, processes)
    try:
        unit = manager.owners([pid], processes).get(pid) if pid else None
        known = manager.units()
    except services.ManagerError:
        unit, known = None, {}
    if pid is not None:
        return _of_process(pid, unit, where)
    if not where.after_the_fact:
        return None
    of_log = next(filter(None, map(_of_log, where.logs)), None)
    named = [known[name] for name in map(manager.canonical, (*where.our_units, *where.units)) if name in known]
    others = [server for server in map(_of_unit, known.values()) if server and _is_for(where.port, list(server.command))]
    of_file = next(filter(None, map(_of_unit, named)), next(iter(others), None))
    if of_file and of_log:
        return Server("unit file and log", of_file.unit, of_file.command, of_file.environment, of_log.arguments)
    return of_file or of_log or _of_inventory(where)


def _of_inventory(where: Where) -> Server | None:
    """What the inventory would start: the last that is known of the server where nothing of it is left."""
    if not where.inventory_command:
        return None
    kept = dict(sorted(redact.environment(where.inventory_environment).items()))
    return Server("inventory", None, tuple(redact.words(where.inventory_command)), kept)


def _server_pid(where: Where, processes: Mapping[int, procs.Process]) -> int | None:
    """Who listens on the server's port, if it or one of its children is SGLang; else its launcher, which may not listen yet."""
    for listener in procs.listeners((where.port,)):
        family = procs.tree(listener.pid, processes) if listener.pid is not None else ()
        if any(SERVER in processes[pid].command for pid in family):
            return listener.pid
    for process in processes.values():
        if re.search(r"sglang[./]launch_server|\bsglang serve\b", process.command) and _is_for(where.port, _argv(process.pid)):
            return process.pid
    return None


def _is_for(port: int, argv: list[str]) -> bool:
    """Whether a command names the port: another SGLang server of the host is none of ours."""
    return f"--port={port}" in argv or any(pair == ("--port", str(port)) for pair in zip(argv, argv[1:]))


def _of_process(pid: int, unit: str | None, where: Where) -> Server:
    argv = _argv(pid)
    environment = procs.environment(pid)
    kept = {name: value for name, value in sorted((environment or {}).items()) if name not in OWN_MARKS}
    readable = environment is not None and bool(argv)
    return Server("process", unit, tuple(argv), kept, healthy=_healthy(where), readable=readable)


def _argv(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as handle:
            words = handle.read(1 << 20).decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
    return redact.words(words)


def _healthy(where: Where) -> bool:
    """Whether the server answers at all; whether it can work is sglang_ready's question."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{where.host}:{where.port}/health", timeout=HEALTH_SECONDS) as answer:
            answer.read(LONGEST_ANSWER)
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _of_unit(unit: services.Unit) -> Server | None:
    """What a unit's file says, if it starts SGLang."""
    if not unit.file:
        return None
    try:
        with open(unit.file, encoding="utf-8", errors="replace") as handle:
            text = handle.read(UNIT_FILE_BYTES)
    except OSError:
        return None
    section = text.partition(f"[program:{unit.name.partition(':')[0]}]")[2] or text  # supervisord's files may hold several
    section = re.split(r"^\[(?:program|group|fcgi-program|eventlistener)[:\]]", section, maxsplit=1, flags=re.MULTILINE)[0]
    values: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n|\n[ \t]+", " ", section).splitlines():
        key, equals, value = line.partition("=")
        if equals:
            values.setdefault(key.strip().lower(), []).append(value.strip())
    command = next(iter(values.get("command") or values.get("execstart") or []), "").lstrip("-:@+!")
    if SERVER not in command:
        return None
    found = {name: value.strip("\"'") for text in values.get("environment", []) for name, value in _VARIABLE.findall(_unquoted(text))}
    kept = {name: value for name, value in sorted(redact.environment(found).items()) if name not in OWN_MARKS}
    return Server("unit file", unit.name, tuple(redact.words(_words(command))), kept)


def _unquoted(text: str) -> str:
    """systemd writes "NAME=value" with the quotes around both, supervisord NAME="value"."""
    return re.sub(r"\"([A-Za-z_]\w*)=([^\"]*)\"", r'\1="\2"', text)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command.replace("%%", "%"))
    except ValueError:
        return command.split()


def _of_log(path: str) -> Server | None:
    """The settings of the last start that a log of SGLang's tells."""
    last = None
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            size = os.fstat(handle.fileno()).st_size
            handle.seek(max(0, size - LOG_BYTES))
            for line in handle:
                if "server_args=" in line:
                    last = line
    except (OSError, ValueError):
        return None
    arguments = server_arguments(last) if last else {}
    return Server("log", arguments=arguments) if arguments else None


def server_arguments(line: str) -> dict[str, Any]:
    """SGLang's line `server_args=...`, a dictionary or a call: the settings that matter, redacted. Empty for anything else."""
    text = line.partition("server_args=")[2].strip()
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    if isinstance(node, ast.Call):
        pairs: Iterable[tuple[Any, Any]] = [(keyword.arg, keyword.value) for keyword in node.keywords]
    elif isinstance(node, ast.Dict):
        pairs = [(key.value if isinstance(key, ast.Constant) else None, value) for key, value in zip(node.keys, node.values)]
    else:
        return {}
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name not in ARGUMENTS or not isinstance(value, ast.Constant) or value.value is None:
            continue
        found[name] = redact.text(value.value) if isinstance(value.value, str) else value.value
    return found


# Mounts


def look_at_mounts(paths: Iterable[str], dev: str = "/dev") -> list[dict[str, Any]]:
    """For each path that is there the mount that holds it, by what survives a reboot."""
    every = mounts.read()
    uuids, ids = _links(os.path.join(dev, BY_UUID)), _links(os.path.join(dev, BY_ID))
    found = []
    for path in dict.fromkeys(paths):
        if not os.path.exists(path):
            continue
        mount = mounts.holding(os.path.realpath(path), every)
        if mount is None:
            continue
        number = _number(mount.source) or mount.device
        names = sorted(ids.get(number, ()), key=lambda name: (name.startswith("wwn-"), "eui" in name, len(name), name))
        uuid = next(iter(uuids.get(number, ())), None)
        found.append(
            {
                "path": path,
                "mount_point": mount.point,
                "fstype": mount.fstype,
                "uuid": uuid,
                "by_id": names[0] if names else None,
                "source": None if uuid else mount.source,
            }
        )
    return found


def _number(source: str) -> tuple[int, int] | None:
    """The device of a mount's source: a file system of several devices shows a number of its own in mountinfo."""
    try:
        number = os.stat(source).st_rdev
    except OSError:
        return None
    return (os.major(number), os.minor(number)) if number else None


def _links(folder: str) -> dict[tuple[int, int], list[str]]:
    """Device number to the names that a folder of links has for it."""
    found: dict[tuple[int, int], list[str]] = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    for name in names:
        number = _number(os.path.join(folder, name))
        if number:
            found.setdefault(number, []).append(name)
    return found


def wiped_by_a_reboot(words: Iterable[str], dump_dir: str) -> list[str]:
    """Paths in a command or an environment that lie where a reboot wipes them, but for the dump directory."""
    found = []
    for word in words:
        for path in re.findall(r"(?:^|[=:,\s'\"])(/[^\s'\":,=]+)", word):
            real = os.path.normpath(path)
            kept = real == dump_dir or real.startswith(f"{dump_dir.rstrip('/')}/")
            if not kept and any(real == folder or real.startswith(f"{folder}/") for folder in WORLD):
                found.append(real)
    return sorted(set(found))
