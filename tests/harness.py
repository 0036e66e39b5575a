# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the real modules as the processes that they are on a host: `run_module("gpu_free", gpu_count=0, ...) -> dict`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = ROOT / "plugins" / "modules"


class ModuleFailed(AssertionError):
    """The module ended by fail_json or broke; `result` is what it returned, if anything."""

    def __init__(self, message: str, result: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.result = result or {}


def run_module(
    module: str,
    /,
    *,
    check: bool = False,
    diff: bool = False,
    with_python: str = sys.executable,
    with_env: dict[str, str] | None = None,
    within_seconds: float = 60.0,
    **options: Any,
) -> dict[str, Any]:
    """Run plugins/modules/<module>.py in a child with `options` and return its result. Raises ModuleFailed.

    `check` and `diff` are Ansible's own switches; `with_env` is added to the environment of the child.
    """
    args = {"ANSIBLE_MODULE_ARGS": {**options, "_ansible_check_mode": check, "_ansible_diff": diff}}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}", "LC_ALL": "C.UTF-8", **(with_env or {})}
    done = subprocess.run(
        [with_python, str(MODULES / f"{module}.py")],
        input=json.dumps(args),
        capture_output=True,
        text=True,
        env=environment,
        timeout=within_seconds,
        check=False,
    )
    try:
        result = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ModuleFailed(f"{module} returned no JSON (exit {done.returncode}): {done.stdout}{done.stderr}") from None
    if result.get("failed"):
        raise ModuleFailed(result.get("msg", done.stderr), result)
    return result


def sees_every_process() -> bool:
    """Whether this user may look into all processes. Without root that holds only where no other user's process runs."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            return False
        except OSError:
            continue
    return True


def skip_without_sight() -> None:
    """Skip, aloud, a test of gates that must see every process, where this user may not."""
    if not sees_every_process():
        pytest.skip("NOT tested: other users' processes run here, only root may look into them, and the gate rightly says unknown")
