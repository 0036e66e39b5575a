# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Three ways in: a wheel in a clean environment, a checkout from any directory, the command `relight`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import relight
from tests.harness import ROOT

PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml") if path.stem != "open")
MODULES = sorted(path.stem for path in (ROOT / "plugins" / "modules").glob("*.py"))
COLLECTION = "ansible_collections/relight/recovery"
BIN = ROOT / ".venv" / "bin"


def run(*command, cwd, env=None, seconds=100):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ANSIBLE_", "PYTHON"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**environment, "LC_ALL": "C.UTF-8", **(env or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that was built from it and not from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """A clean environment with the wheel and what its controller extra asks for."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    run(
        sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check", "install", "--quiet",
        f"{built[1]}[controller]", cwd=folder.parent,
    )  # fmt: skip
    return folder


@pytest.fixture
def inventory(tmp_path):
    path = tmp_path / "hosts.yml"
    path.write_text("relight: {hosts: {box: {ansible_connection: local, relight_gpu_count: 0}}}\n")
    return path


def test_the_source_distribution_holds_no_link_and_nothing_of_the_drill(built):
    with tarfile.open(built[0]) as archive:
        members = archive.getmembers()
    assert [m.name for m in members if m.issym() or m.islnk()] == []
    tops = {m.name.split("/")[1] for m in members if "/" in m.name}
    assert not tops & {"library", "drill.yml", "demo", "tests", "inventory", "collections", "build", ".venv"}
    assert {"relight", "plugins", "roles", "playbooks", "meta", "galaxy.yml", "LICENSE", "README.md"} <= tops


def test_the_wheel_holds_the_package_and_the_whole_collection_and_no_more(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert [i.filename for i in archive.infolist() if (i.external_attr >> 16) & 0o170000 == 0o120000] == []
        points = archive.read(f"relight-{relight.__version__}.dist-info/entry_points.txt").decode()
    for folder in ("plugins", "roles", "playbooks", "meta"):
        here = {f"{COLLECTION}/{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
        assert {name for name in names if name.startswith(f"{COLLECTION}/{folder}/")} == here
    others = {name for name in names if not name.startswith((f"{COLLECTION}/", "relight/"))}
    assert others == set()
    inner = {name.split("/")[3] for name in names if name.startswith(COLLECTION)}
    assert inner == {"plugins", "roles", "playbooks", "meta", "galaxy.yml", "README.md", "CHANGELOG.md"}
    assert "relight = relight.cli:main" in points
    assert re.search(r"\[sglang\.srt\.plugins\]\s*relight = relight\.dump\.plugin:activate", points)


def test_the_version_is_the_same_everywhere():
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text())
    assert galaxy["version"] == relight.__version__
    assert f"## {relight.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_everything_in_the_wheel_imports_without_ansible_or_anything_else(built, tmp_path):
    """The logic and the client's module utilities, in an environment that holds the wheel alone."""
    bare = tmp_path / "bare"
    run(sys.executable, "-m", "venv", "--without-pip", bare, cwd=tmp_path)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        bare / "bin" / "python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        built[1],
        cwd=tmp_path,
    )
    code = (
        "import importlib, pkgutil\n"
        f"import {COLLECTION.replace('/', '.')}.plugins.module_utils as utils\n"
        "names = [m.name for m in pkgutil.iter_modules(utils.__path__)]\n"
        "for name in names: importlib.import_module(f'{utils.__name__}.{name}')\n"
        "import relight.cli, relight.dump.plugin\n"
        "print(*names)\n"
    )
    names = run(bare / "bin" / "python", "-I", "-c", code, cwd=tmp_path).split()
    assert names == sorted(path.stem for path in (ROOT / "plugins" / "module_utils").glob("*.py"))
    assert "recover" in run(bare / "bin" / "relight", "--help", cwd=tmp_path)


def tasks(text: str) -> list[str]:
    return re.findall(r"^ {6}(\S.*?)\tTAGS: \[(.*)\]$", text, re.MULTILINE)


def test_a_wheel_and_a_checkout_offer_the_same_plays(clean, inventory, tmp_path):
    """By name from the wheel; from a checkout by path, from another directory, with no configuration and nothing installed."""
    wheel = run(clean / "bin" / "ansible-playbook", "-i", inventory, "--list-tasks", "relight.recovery.recover", cwd=tmp_path)
    checkout = run(
        BIN / "ansible-playbook",
        "-i",
        inventory,
        "--list-tasks",
        ROOT / "recover.yml",
        cwd=tmp_path,
        env={"ANSIBLE_COLLECTIONS_SCAN_SYS_PATH": "false"},
    )
    assert len(tasks(wheel)) > 20
    assert tasks(wheel) == tasks(checkout)


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_each_playbook_is_sound(clean, inventory, tmp_path, name):
    run(clean / "bin" / "ansible-playbook", "-i", inventory, "--syntax-check", f"relight.recovery.{name}", cwd=tmp_path)


def test_every_module_and_role_is_documented(clean, tmp_path):
    docs = json.loads(
        run(clean / "bin" / "ansible-doc", "-t", "module", "-j", *(f"relight.recovery.{name}" for name in MODULES), cwd=tmp_path)
    )
    assert sorted(docs) == [f"relight.recovery.{name}" for name in MODULES]
    for name, value in docs.items():
        assert value["doc"]["attributes"]["check_mode"]["description"], name
        assert value["examples"], name
        assert value["return"], name
    roles = json.loads(run(clean / "bin" / "ansible-doc", "-t", "role", "-j", "--list", "relight.recovery", cwd=tmp_path))
    assert sorted(roles) == sorted(f"relight.recovery.{path.name}" for path in (ROOT / "roles").iterdir())


def test_the_wheel_that_an_installation_makes_of_itself_is_the_same(built, clean, tmp_path):
    code = "import sys; from pathlib import Path; from relight.cli.wheelhouse import own_wheel; print(own_wheel(Path(sys.argv[1])))"
    again = run(clean / "bin" / "python", "-I", "-c", code, tmp_path, cwd=tmp_path).strip()

    def content(path):
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}

    assert content(again) == content(built[1])
    assert Path(again).name == built[1].name
