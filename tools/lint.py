#!/usr/bin/env python3
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Run every linter, show what each says, and end with one line that counts what passed, failed and was skipped.

Run by `make lint` with .venv's Python. Names as arguments run those alone: tools/lint.py ruff sanity
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
SANITY_HOME = ROOT / ".venv" / "sanity-home"
COLLECTION = ROOT / "collections" / "ansible_collections" / "relight" / "recovery"
SHIPPED = ("plugins", "roles", "playbooks", "meta", "galaxy.yml", "README.md", "CHANGELOG.md", "LICENSE", "tests/sanity")
EVERYTHING = (*SHIPPED, ".config", ".yamllint", "ansible.cfg", "recover.yml", "drill.yml", "library", "inventory", "molecule")
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

# ansible-test fetches pip's bootstrap script from its makers' server, unless a file of that name lies in its cache. This
# stand-in does the same with what Python itself ships and the package registry, so that a closed network is enough.
GET_PIP = '''\
"""Stand-in for get-pip.py: ensurepip, then the version of pip that ansible-test asks for."""

import subprocess
import sys

arguments = [a for a in sys.argv[1:] if a not in ("--no-setuptools", "--no-wheel")]
subprocess.run([sys.executable, "-m", "ensurepip", "--default-pip"], check=True, stdout=subprocess.DEVNULL)
subprocess.run([sys.executable, "-m", "pip", "install", *arguments, "pip=={version}"], check=True)
subprocess.run([sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", "setuptools"], check=False, stderr=subprocess.DEVNULL)
'''


class CannotRun(Exception):
    """A linter could not be run at all; the message says why."""


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> bool:
    """Run one command with its output shown, and say whether it ended well."""
    return subprocess.run([str(c) for c in command], cwd=cwd, env={**os.environ, **(env or {})}, check=False).returncode == 0


def ruff() -> bool:
    checked = run(BIN / "ruff", "check", ".")
    return run(BIN / "ruff", "format", "--check", ".") and checked


def mypy() -> bool:
    targets = [COLLECTION / "plugins", ROOT / "relight", *sorted(p for p in (ROOT / "demo", ROOT / "library") if any(p.glob("**/*.py")))]
    return run(BIN / "mypy", *targets)


def yamllint() -> bool:
    return run(BIN / "yamllint", "--strict", ".")


def ansible_lint() -> bool:
    """Everything of Ansible's in a staged checkout: in the real one ansible-lint would follow collections/ round and round."""
    with staged(EVERYTHING) as tree:
        env = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "ANSIBLE_COLLECTIONS_PATH": str(tree.parents[2]),
            "ANSIBLE_COLLECTIONS_SCAN_SYS_PATH": "false",  # the staged copy and not the checkout
        }
        return run(BIN / "ansible-lint", "--config-file", ".config/ansible-lint.yml", "--nocolor", cwd=tree, env=env)


def sanity() -> bool:
    """ansible-test sanity on what the collection ships, in a home directory of ours."""
    with staged(SHIPPED) as tree:
        env = {"HOME": str(sanity_home()), "PATH": f"{BIN}:{os.environ['PATH']}"}
        command = (BIN / "ansible-test", "sanity", "--python", PYTHON_VERSION, "--color", "no")
        primed = subprocess.run(
            [*command, "--prime-venvs"], cwd=tree, env={**os.environ, **env}, text=True, capture_output=True, check=False
        )
        if primed.returncode:
            said = (primed.stdout + primed.stderr).strip().splitlines() or ["(nothing was said)"]
            raise CannotRun("its environments cannot be built: " + " / ".join(said[-4:]))
        return run(*command, cwd=tree, env=env)


@contextmanager
def staged(names: tuple[str, ...]) -> Iterator[Path]:
    """A copy as a real ansible_collections/relight/recovery, outside the checkout, where tools would ask git what is ignored."""
    with tempfile.TemporaryDirectory(prefix="relight-lint-") as stage:
        tree = Path(stage) / "ansible_collections" / "relight" / "recovery"
        tree.mkdir(parents=True)
        for name in names:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            elif source.exists():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, tree / name)
        yield tree


def sanity_home() -> Path:
    """A home for ansible-test: its environments and the bootstrap stand-in live there, and the user's home is left alone."""
    cache = SANITY_HOME / ".ansible" / "test" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    version = wanted_pip()
    (cache / f"get_pip_{version.replace('.', '_')}.py").write_text(GET_PIP.replace("{version}", version), encoding="ascii")
    for name in (".config/pip", ".pip"):  # a registry configured for pip is needed in there too
        theirs, ours = Path.home() / name, SANITY_HOME / name
        if theirs.is_dir() and not ours.is_symlink():
            ours.parent.mkdir(parents=True, exist_ok=True)
            ours.symlink_to(theirs)
    return SANITY_HOME


def wanted_pip() -> str:
    """The version of pip that this ansible-test bootstraps its environments with."""
    for source in ROOT.glob(".venv/lib/python3*/site-packages/ansible_test/_internal/python_requirements.py"):
        found = re.search(r"""\bpip=['"]([0-9.]+)['"]""", source.read_text(encoding="utf-8"))
        if found:
            return found.group(1)
    raise CannotRun("ansible-test no longer says which pip it bootstraps with")


LINTERS: dict[str, Callable[[], bool]] = {
    "ruff": ruff,
    "mypy": mypy,
    "yamllint": yamllint,
    "ansible-lint": ansible_lint,
    "sanity": sanity,
}


def main(names: list[str]) -> int:
    passed, failed, skipped = [], [], []
    for name in names or LINTERS:
        print(f"relight: lint: {name}", flush=True)
        start = time.monotonic()
        try:
            (passed if LINTERS[name]() else failed).append(name)
        except CannotRun as error:
            print(f"relight: lint: {name} SKIPPED: {error}", flush=True)
            skipped.append(name)
        print(f"relight: lint: {name} took {time.monotonic() - start:.0f} s", flush=True)
    for word, those in (("failed", failed), ("skipped", skipped)):
        if those:
            print(f"relight: lint {word}: {', '.join(those)}")
    print(f"relight: lint: {len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
