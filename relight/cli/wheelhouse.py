# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`relight wheelhouse DIR`: this Relight's wheel, everything that relight[host] needs, and a pip, with a digest of each.

Hosts install from it without a network. In a checkout the wheel is built; elsewhere it is put together again from the
installed files, which is what a wheel is.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import wheelhouse

import relight

CHECKOUT = Path(relight.__file__).resolve().parents[1]
GLIBC = ("2_28", "2_17", "2_12", "2_5")  # the manylinux levels that a host with glibc 2.28 takes
EPOCH = (2020, 2, 2, 0, 0, 0)  # the same files always make the same wheel


class Refused(Exception):
    """The message is one sentence for the operator."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="relight wheelhouse", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to make, or to bring up to date")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="VERSION",
        help="Python version of the hosts, such as 3.10; may be repeated. By default the version that runs this command",
    )
    parser.add_argument("--machine", default=platform.machine(), help="the hosts' processors, as uname -m names them (%(default)s)")
    parser.add_argument("--extra", action="append", default=[], help="which extras the hosts install (host)")
    options = parser.parse_args(argv[1:])
    pythons = tuple(options.python) or (_own(),)
    try:
        house = make(options.folder, pythons, options.machine, tuple(options.extra) or ("host",))
    except (Refused, OSError) as error:
        print(f"relight wheelhouse: {error}", file=sys.stderr)
        return 2
    print(f"{options.folder}: {len(house.files)} wheels for Python {', '.join(pythons)} on {options.machine}, digest {house.digest[:16]}")
    return 0


def make(folder: Path, pythons: tuple[str, ...], machine: str, extras: tuple[str, ...]) -> wheelhouse.Wheelhouse:
    """Fill `folder`; downloads only what an earlier run has not brought. Raises Refused or OSError."""
    folder = folder.resolve()
    if folder.exists() and not (folder / wheelhouse.INDEX).is_file() and any(folder.iterdir()):
        raise Refused(f"{folder} holds other things; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        work = Path(scratch) / "wheels"
        work.mkdir()
        wheel = own_wheel(work)
        want: dict[str, Any] = {"relight": relight.__version__, "python": list(pythons), "machine": machine, "extras": list(extras)}
        want["requires"] = sorted(_requirements(wheel))
        if not _reuse(folder, work, want):
            for version in pythons:
                print(f"relight wheelhouse: collecting for Python {version} on {machine}", flush=True)
                _download(wheel, work, version, machine, extras)
        house = wheelhouse.write_index(str(work), want)
        _exchange(work, folder, Path(scratch) / "former")
    return house


def own_wheel(into: Path) -> Path:
    """This Relight as a wheel in `into`. Raises Refused or OSError."""
    if (CHECKOUT / "pyproject.toml").is_file():
        isolation = ["--no-build-isolation"] if find_spec("hatchling") else []
        _pip("wheel", "--no-deps", *isolation, "--wheel-dir", str(into), str(CHECKOUT))
        return next(into.glob("relight-*.whl"))
    return rewheel(into)


def rewheel(into: Path, name: str = "relight") -> Path:
    """The wheel that an installed pure Python package came from, from its files. Raises Refused or OSError."""
    try:
        installed = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise Refused(f"this {name} is neither a checkout nor an installed package") from None
    info = f"{name}-{installed.version}.dist-info"
    path = into / f"{name}-{installed.version}-py3-none-any.whl"
    rows: list[tuple[str, str, str]] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(installed.files or [], key=str):
            entry = str(file)
            if entry.startswith("..") or entry.endswith(".pyc"):
                continue  # scripts, which pip makes anew, and caches
            if entry.startswith(info) and Path(entry).name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                continue  # what pip wrote when it installed
            content = Path(str(file.locate())).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append((entry, f"sha256={digest}", str(len(content))))
            _add(archive, entry, content)
        record = io.StringIO()
        csv.writer(record, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
        _add(archive, f"{info}/RECORD", record.getvalue().encode())
    if not any(entry.endswith("/WHEEL") for entry, _, _ in rows):
        raise Refused(f"the installed {name} does not list its own files; install it from a wheel")
    return path


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content)


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return [line for line in archive.read(name).decode().splitlines() if line.startswith("Requires-Dist:")]


def _reuse(folder: Path, work: Path, want: dict[str, Any]) -> bool:
    """Take over an earlier run's wheels, if they are whole and were collected for the same."""
    try:
        index = json.loads((folder / wheelhouse.INDEX).read_text(encoding="utf-8"))
        former = wheelhouse.read(str(folder))
    except (OSError, ValueError, wheelhouse.BadWheelhouse):
        return False
    if former is None or any(index.get(key) != value for key, value in want.items() if key != "relight"):
        return False
    for name in former.files:
        if name != former.relight:
            os.link(folder / name, work / name)
    return True


def _download(wheel: Path, work: Path, version: str, machine: str, extras: tuple[str, ...]) -> None:
    """What a host of that Python and machine needs. Raises Refused or OSError."""
    target: list[str] = []
    if (version, machine) != (_own(), platform.machine()):
        levels = [f"manylinux_{level}_{machine}" for level in GLIBC] + [f"manylinux2014_{machine}"]
        target = ["--python-version", version, "--implementation", "cp"]
        target += [word for level in levels for word in ("--platform", level)]
    with tempfile.TemporaryDirectory(dir=work.parent) as scratch:
        here = Path(scratch)
        wanted = [f"{wheel}[{','.join(extras)}]", "pip"]
        while wanted:
            _pip("download", "--only-binary", ":all:", "--dest", str(here), *target, *wanted)
            wanted = unmet(here, version, machine, extras) if target else []
        for path in here.iterdir():
            path.replace(work / path.name)


def unmet(folder: Path, version: str, machine: str, extras: tuple[str, ...]) -> list[str]:
    """Requirements of the wheels in `folder` that hold on such a host and that no wheel there meets.

    pip judges conditions such as python_version < "3.11" by the Python that it runs on, whatever the target. Raises Refused.
    """
    try:
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name, parse_wheel_filename
    except ModuleNotFoundError:
        raise Refused("wheels for another Python or machine need the package `packaging`; install relight[controller]") from None
    host = {"python_version": version, "python_full_version": f"{version}.0", "platform_machine": machine, "implementation_name": "cpython"}
    wheels = sorted(folder.glob("*.whl"))
    there = {parse_wheel_filename(path.name)[0] for path in wheels}
    missing: dict[str, str] = {}
    for path in wheels:
        asked = extras if path.name.startswith("relight-") else ("",)
        for line in _requirements(path):
            need = Requirement(line.partition(":")[2].strip())
            name = canonicalize_name(need.name)
            if name not in there and (need.marker is None or any(need.marker.evaluate({**host, "extra": extra}) for extra in asked)):
                missing[name] = f"{need.name}{need.specifier}"
    return sorted(missing.values())


def _exchange(work: Path, folder: Path, former: Path) -> None:
    """Put the new wheels in place. The index goes last, so that a kill in between leaves a folder that is seen not to be whole."""
    folder.mkdir(exist_ok=True)
    index = folder / wheelhouse.INDEX
    if index.exists():
        index.rename(former)
    names = {path.name for path in work.iterdir()}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    for path in sorted(work.iterdir()):
        if path.name != wheelhouse.INDEX:
            path.replace(folder / path.name)
    (work / wheelhouse.INDEX).replace(index)


def _own() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _pip(*arguments: str) -> None:
    """Raises Refused with pip's last words."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        raise Refused(f"pip {arguments[0]} failed: {' / '.join(said[-3:]) or 'no word'}")
