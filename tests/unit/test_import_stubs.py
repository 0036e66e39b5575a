# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's import stand-ins: importable, never callable, and absent to whoever asks what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STUBS = Path(__file__).resolve().parents[2] / "demo" / "import_stubs"


def python(code: str, names: str = "absent_kernels,json") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(STUBS), "RELIGHT_IMPORT_STAND_INS": names}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    "code",
    [
        "import absent_kernels",
        "from absent_kernels.deep.er import function, Class",
        "import absent_kernels as a; a.ops.function; a.Mode.FAST",
        "from absent_kernels import Class\nclass Mine(Class): pass\nassert not isinstance(3, Class)",
    ],
)
def test_names_can_be_imported(code):
    assert python(code).returncode == 0, python(code).stderr


@pytest.mark.parametrize("call", ["a.function()", "a.ops.function(1)", "a.Class()", "a.Mode.FAST()", "type('M', (a.Class,), {})()", "a()"])
def test_nothing_can_be_called(call):
    done = python(f"import absent_kernels as a; {call}")
    assert done.stderr.splitlines()[-1].startswith("NotImplementedError: ")
    assert "is an import stand-in" in done.stderr


def test_it_is_absent_to_a_probe_before_and_after_the_import():
    code = """
import importlib.util
before = importlib.util.find_spec("absent_kernels"), importlib.util.find_spec("absent_kernels.deep")
import absent_kernels.deep
after = importlib.util.find_spec("absent_kernels"), importlib.util.find_spec("absent_kernels.deep")
print(before, after, hasattr(absent_kernels, "__version__"))
"""
    assert python(code).stdout.strip() == "(None, None) (None, None) False"


def test_a_real_package_wins_and_others_stay_absent():
    assert python("import json; json.dumps([])").returncode == 0
    assert "ModuleNotFoundError" in python("import another_absent").stderr
    assert "ModuleNotFoundError" in python("import absent_kernels", names="").stderr
