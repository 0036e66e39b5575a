# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""hs_patch_check on the real SGLang: the gate as a process, and our layer table against the source of every family in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import hs_patch_probe, layers

from tests.harness import run_module
from tests.integration.sglang_server import PYTHON, entry_point, environment

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang environment in .venv/sglang")]
VERSION = "0.5.23"
DUMP = {"RELIGHT_DUMP_DIR": "/dev/shm/relight", "RELIGHT_DUMP_LAYERS": "1,14,26"}


def options(tmp_path: Path, plugins: Path) -> dict:
    config = '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "hidden_size": 576}'
    (tmp_path / "config.json").write_text(config)
    return {"env": environment(plugins, **DUMP), "layers": [1, 14, 26], "model_dir": str(tmp_path)}


def test_the_real_environment_passes(tmp_path):
    gate = run_module("hs_patch_check", python=str(PYTHON), **options(tmp_path, entry_point(tmp_path / "plugins")))["gate"]
    assert [p for p in gate["problems"] if p["code"] != "plugin-twice"] == []  # the wheel may be installed there as well
    evidence = gate["evidence"]
    assert evidence["sglang_version"] == VERSION
    assert evidence["hooks_found"] == evidence["hooks_wanted"] == 5
    assert evidence["layers_captured"] == [1, 14, 26]


def test_another_interpreter_fails(tmp_path):
    gate = run_module("hs_patch_check", python=sys.executable, **options(tmp_path, entry_point(tmp_path / "plugins")))["gate"]
    assert [p["code"] for p in gate["problems"]] == ["sglang-missing"]


@pytest.mark.parametrize("architecture", sorted(layers.ALWAYS_ONE | layers.BY_FIRST_ID))
def test_our_table_agrees_with_sglang(architecture):
    root = next(PYTHON.parents[1].glob("lib/python*/site-packages/sglang"))
    inner = hs_patch_probe.INNER.get(architecture, "")
    shape = layers.Shape(architecture, 61, 7168, "bfloat16", inner)
    for outputs in ((1, 29, 57), (2, 30, 58)):
        ids = layers.ids_to_pass(outputs, shape, VERSION)
        assert hs_patch_probe.captured(str(root / "srt" / "models"), architecture, inner, ids, 61) == layers.inside(outputs)
