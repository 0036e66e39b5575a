# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Our Python environment on a host, and our wheel in the user's SGLang environment.

Ours is built beside its name (`<venv>.<key>`), marked when whole, and put in place by renaming a link, so that a kill at
any moment leaves the former one in place and a half-built one that the next run knows as such.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import durable
from ansible_collections.relight.recovery.plugins.module_utils.wheelhouse import Wheelhouse

WHOLE = ".relight-environment.json"  # written last: the environment that holds it is whole
BUILDING = ".relight-building"  # written first: what holds it and is not whole is ours to remove
RECORD = "dump_plugin.json"  # in the state directory: into which environments we put our wheel
PIP_SECONDS = 900.0
ASK_SECONDS = 60.0

_ASK = """
import json, sys, sysconfig
print(json.dumps({"version": "%d.%d" % sys.version_info[:2], "prefix": sys.prefix, "purelib": sysconfig.get_path("purelib"),
                  "scripts": sysconfig.get_path("scripts"), "python": sys.executable}))
"""


class StepFailed(Exception):
    """A step did not do what it must; the message is one sentence for the operator."""


@dataclass(frozen=True)
class Interpreter:
    """What a Python says of itself."""

    python: str
    version: str
    prefix: str
    purelib: str
    scripts: str


def run(command: Sequence[str], seconds: float) -> str:
    """The standard output of a command that must end well, free of the caller's Python and pip settings. Raises StepFailed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except OSError as error:
        raise StepFailed(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise StepFailed(f"{command[0]} did not end within {seconds:g} s") from None
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip() and "notice" not in line]
        raise StepFailed(f"{os.path.basename(command[0])} ended with {done.returncode}: {' / '.join(said[-3:]) or 'no word'}")
    return done.stdout


def ask(python: str) -> Interpreter:
    """Raises StepFailed where it does not run."""
    answer = run([python, "-I", "-c", _ASK], ASK_SECONDS)
    try:
        return Interpreter(**json.loads(answer))
    except (ValueError, TypeError):
        raise StepFailed(f"{python} does not answer like a Python") from None


def pip(python: str, folder: str, house: Wheelhouse, *arguments: str) -> None:
    """Run the wheelhouse's pip, or else the interpreter's own, under `python`. Raises StepFailed."""
    how = [os.path.join(folder, house.pip, "pip")] if house.pip else ["-m", "pip"]
    run([python, *how, "--isolated", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "--quiet", *arguments], PIP_SECONDS)


# --- ours -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """Our environment as it should be: where it is built, from what, and the link that users know."""

    venv: str
    key: str

    @property
    def folder(self) -> str:
        return f"{self.venv}.{self.key}"


@dataclass(frozen=True)
class Place:
    """What was found at the name. `kind`: absent, link, foreign. `target` is where a link points."""

    kind: str
    target: str = ""


def environment(venv: str, house: Wheelhouse, base: Interpreter, extras: Sequence[str]) -> Environment:
    """The environment's key changes with everything that its content depends on."""
    text = json.dumps([house.digest, base.python, base.version, sorted(extras)])
    return Environment(venv, hashlib.sha256(text.encode()).hexdigest()[:16])


def look_at(venv: str) -> Place:
    if os.path.islink(venv):
        return Place("link", os.path.join(os.path.dirname(venv), os.readlink(venv)))
    return Place("foreign" if os.path.lexists(venv) else "absent")


def is_whole(folder: str) -> bool:
    """Marked as whole, and its Python still starts and finds Relight: a base that was removed shows here."""
    if not os.path.isfile(os.path.join(folder, WHOLE)):
        return False
    try:
        run([os.path.join(folder, "bin", "python"), "-I", "-c", "import relight"], ASK_SECONDS)
    except StepFailed:
        return False
    return True


def ours(venv: str) -> list[str]:
    """Every environment folder that we made for this name, whole or not."""
    parent, name = os.path.split(venv)
    pattern = re.compile(re.escape(name) + r"\.[0-9a-f]{16}")
    found = [os.path.join(parent, n) for n in sorted(os.listdir(parent)) if pattern.fullmatch(n)] if os.path.isdir(parent) else []
    return [f for f in found if not os.path.islink(f) and any(os.path.exists(os.path.join(f, mark)) for mark in (WHOLE, BUILDING))]


def build(env: Environment, base: Interpreter, folder: str, house: Wheelhouse, extras: Sequence[str]) -> None:
    """Build the environment anew and mark it whole. Raises StepFailed or OSError."""
    if os.path.lexists(env.folder):
        if env.folder not in ours(env.venv):
            raise StepFailed(f"{env.folder} is there and is not ours")
        shutil.rmtree(env.folder)
    os.umask(0o022)  # whoever runs the client must be able to read it, however closed root's umask is
    os.makedirs(env.folder)
    with open(os.path.join(env.folder, BUILDING), "w", encoding="ascii"):
        pass
    without_pip = ["--without-pip"] if house.pip else []
    run([base.python, "-I", "-m", "venv", *without_pip, env.folder], PIP_SECONDS)
    python = os.path.join(env.folder, "bin", "python")
    wheel = os.path.join(folder, house.relight) + (f"[{','.join(extras)}]" if extras else "")
    pip(python, folder, house, "install", "--no-index", "--find-links", folder, wheel)
    run(["sync", "--file-system", env.folder], PIP_SECONDS)  # the mark must not be on disk before what it vouches for
    durable.write_json(os.path.join(env.folder, WHOLE), {"key": env.key, "wheelhouse": house.digest, "python": base.python})
    os.unlink(os.path.join(env.folder, BUILDING))


def switch(env: Environment) -> None:
    """Make the name point to the environment, in one step. Raises OSError."""
    parent, name = os.path.split(env.venv)
    temporary = os.path.join(parent, f"{durable.TEMPORARY}{name}.{os.getpid()}")
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(os.path.basename(env.folder), temporary)
    os.replace(temporary, env.venv)
    durable.fsync_directory(parent)


def remove(venv: str) -> None:
    """Take away the link and every environment of ours behind it. Raises OSError."""
    mine = ours(venv)
    place = look_at(venv)
    if place.kind == "link" and os.path.abspath(place.target) in mine:
        os.unlink(venv)
    for folder in mine:
        mark = os.path.join(folder, WHOLE)
        if os.path.exists(mark):  # in this order a kill leaves a folder that is still known as ours, and not as whole
            os.replace(mark, os.path.join(folder, BUILDING))
        shutil.rmtree(folder)


# --- the user's -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Installed:
    """Our wheel in an environment. `state`: absent, same (as the wheel, by content), other, editable, torn."""

    state: str
    version: str = ""


def installed(purelib: str, wheel: str) -> Installed:
    """Compare what lies in `purelib` with a wheel file, by content. Raises OSError or zipfile.BadZipFile."""
    infos = dist_infos(purelib)
    if not infos:
        return Installed("absent")
    version = infos[0][len("relight-") : -len(".dist-info")]
    if len(infos) > 1 or not os.path.isfile(os.path.join(purelib, infos[0], "RECORD")):
        return Installed("torn", version)
    if _is_editable(os.path.join(purelib, infos[0])):
        return Installed("editable", version)
    same = all(_digest(os.path.join(purelib, path)) == digest for path, digest in _record_of(wheel))
    return Installed("same" if same else "other", version)


def dist_infos(purelib: str) -> list[str]:
    """The metadata folders of every Relight in a site-packages folder."""
    return sorted(n for n in os.listdir(purelib) if n.startswith("relight-") and n.endswith(".dist-info")) if os.path.isdir(purelib) else []


def _is_editable(info: str) -> bool:
    try:
        with open(os.path.join(info, "direct_url.json"), encoding="utf-8") as handle:
            return bool(json.load(handle).get("dir_info", {}).get("editable"))
    except (FileNotFoundError, ValueError, AttributeError):
        return False


def _record_of(wheel: str) -> Iterator[tuple[str, str]]:
    """Path and digest of every file that a wheel says it holds."""
    with zipfile.ZipFile(wheel) as archive:
        records = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        for path, digest, _size in csv.reader(archive.read(records[0]).decode().splitlines()):
            if digest:
                yield path, digest


def _digest(path: str) -> str:
    """A file's digest as RECORD writes it; empty where it is missing."""
    try:
        with open(path, "rb") as handle:
            return "sha256=" + urlsafe_b64encode(hashlib.sha256(handle.read()).digest()).rstrip(b"=").decode()
    except FileNotFoundError:
        return ""


def install_wheel(target: Interpreter, folder: str, house: Wheelhouse) -> None:
    """Put our wheel, and nothing else, into an environment, whatever a killed run left there. Raises StepFailed or OSError."""
    infos = dist_infos(target.purelib)
    for info in infos:
        if len(infos) > 1 or not os.path.isfile(os.path.join(target.purelib, info, "RECORD")):
            shutil.rmtree(os.path.join(target.purelib, info))  # pip refuses to replace what has no RECORD
    pip(
        target.python,
        folder,
        house,
        "install",
        "--no-index",
        "--no-deps",
        "--force-reinstall",
        "--no-warn-script-location",
        os.path.join(folder, house.relight),
    )


def uninstall_wheel(target: Interpreter) -> None:
    """Take out all that our wheel consists of, without a pip, which the environment need not have. Raises OSError.

    The metadata goes last: what a kill leaves is still known as ours.
    """
    collections = os.path.join(target.purelib, "ansible_collections")
    for folder in (os.path.join(target.purelib, "relight"), os.path.join(collections, "relight", "recovery")):
        if os.path.isdir(folder):
            shutil.rmtree(folder)
    for folder in (os.path.join(collections, "relight"), collections):
        if os.path.isdir(folder) and not os.listdir(folder):
            os.rmdir(folder)
    script = os.path.join(target.scripts, "relight")
    if os.path.isfile(script):
        os.unlink(script)
    for info in dist_infos(target.purelib):
        shutil.rmtree(os.path.join(target.purelib, info))


@dataclass(frozen=True)
class Users:
    """Processes that run SGLang from an environment, and those of which that cannot be told."""

    pids: tuple[int, ...]
    unseen: tuple[int, ...]


def users_of(prefix: str, proc: str = "/proc") -> Users:
    """Who runs SGLang from the environment at `prefix`.

    SGLang's workers replace their command line, so a process that only says sglang is asked for the files it has mapped.
    """
    inside = tuple({os.path.abspath(prefix) + "/", os.path.realpath(prefix) + "/"})
    pids: list[int] = []
    unseen: list[int] = []
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        words = _read(os.path.join(proc, name, "cmdline")) or b""
        if b"sglang" not in words:
            continue
        maps = _read(os.path.join(proc, name, "maps"))
        if words.split(b"\0")[0].decode(errors="replace").startswith(inside):
            pids.append(int(name))
        elif maps is None and os.path.exists(os.path.join(proc, name)):
            unseen.append(int(name))
        elif maps and any(place.encode() in maps for place in inside):
            pids.append(int(name))
    return Users(tuple(sorted(pids)), tuple(sorted(unseen)))


def _read(path: str) -> bytes | None:
    """A file of /proc; None where it cannot be read."""
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except OSError:
        return None


def read_installs(state_dir: str) -> dict[str, dict[str, Any]]:
    """What we installed where, by the environment's prefix. Raises OSError or ValueError."""
    try:
        with open(os.path.join(state_dir, RECORD), encoding="utf-8") as handle:
            return dict(json.load(handle)["installs"])
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError):
        raise ValueError(f"{state_dir}/{RECORD} is not the record of dump_plugin") from None


def write_installs(state_dir: str, installs: dict[str, dict[str, Any]]) -> None:
    """Raises OSError."""
    durable.write_json(os.path.join(state_dir, RECORD), {"schema": 1, "installs": installs})
