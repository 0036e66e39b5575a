# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""hs_patch_check: the judgement as a table, and the whole gate on a small tree that stands for an SGLang of another version."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.relight.recovery.plugins.module_utils.gate import Verdict
from ansible_collections.relight.recovery.plugins.module_utils.hs_patch import Seen, Wanted, judge
from ansible_collections.relight.recovery.plugins.module_utils.layers import Shape

from relight.dump.plugin import TARGETS
from tests.harness import ROOT, run_module

SHAPE = Shape("LlamaForCausalLM", 30, 576, "float32")
ON = {"RELIGHT_DUMP_DIR": "/dev/shm/relight", "RELIGHT_DUMP_LAYERS": "1,14,26"}
WANTED = Wanted("/opt/sglang/bin/python", ON, (1, 14, 26), "/model", "plugin")
POINT = {"name": "relight", "value": "relight.dump.plugin:activate", "dist": "relight", "version": "0.1.0"}
ANSWER: dict[str, Any] = {
    "python_version": "3.11.2",
    "prefix": "/opt/sglang",
    "sglang_version": "0.5.23",
    "sglang_root": "/opt/sglang/lib/sglang",
    "entries": [POINT],
    "plugins_supported": True,
    "plugin": {"error": None, "file": "/f", "callable": True, "targets": {}, "ids": [1, 14, 26], "ids_error": None},
    "hooks": {target: {"state": "found", "what": ""} for target in TARGETS},
    "patch": {"files": [], "torn": [], "stale": []},
    "captured": [2, 15, 27],
    "captured_error": None,
}
HOOK = next(iter(TARGETS))
PATCHED = {"files": ["srt/x.py"], "torn": [], "stale": []}
PATCH_ON = {"SGLANG_HS_DUMP_DIR": "/dev/shm/hs"}
PASS, WARN, FAIL, UNKNOWN = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN


def with_plugin(**change: Any) -> dict[str, Any]:
    return {"plugin": {**ANSWER["plugin"], **change}}


@pytest.mark.parametrize(
    ("answer", "wanted", "verdict", "codes"),
    [
        ({}, {}, PASS, []),
        ({"entries": [{**POINT, "name": "other"}, POINT]}, {}, PASS, []),
        ({"sglang_root": None}, {}, FAIL, ["sglang-missing"]),
        ({"plugins_supported": False}, {}, FAIL, ["sglang-old"]),
        ({"entries": [{**POINT, "name": "other"}], "plugin": None}, {}, FAIL, ["plugin-missing"]),
        (with_plugin(error="ImportError: x"), {}, FAIL, ["plugin-broken"]),
        (with_plugin(callable=False), {}, FAIL, ["plugin-broken"]),
        ({"entries": [POINT, POINT]}, {}, WARN, ["plugin-twice"]),
        ({}, {"env": {**ON, "SGLANG_PLUGINS": "xpu, other"}}, FAIL, ["plugin-excluded"]),
        ({}, {"env": {**ON, "SGLANG_PLUGINS": "xpu, relight"}}, PASS, []),
        ({}, {"env": {**ON, "SGLANG_PLUGINS": ""}}, PASS, []),
        ({}, {"env": {"RELIGHT_DUMP_LAYERS": "1,14,26"}}, FAIL, ["dump-off"]),
        ({}, {"env": {**ON, "RELIGHT_DUMP_LAYERS": "2,14,26"}}, FAIL, ["layers-differ"]),
        ({}, {"env": {"RELIGHT_DUMP_DIR": "/d"}}, FAIL, ["layers-differ"]),
        ({}, {"env": {**ON, **PATCH_ON}}, FAIL, ["dump-both"]),
        ({"hooks": {HOOK: {"state": "missing", "what": "w"}}}, {}, FAIL, ["hook-moved"]),
        ({"hooks": {HOOK: {"state": "parameters", "what": "w"}}}, {}, FAIL, ["hook-moved"]),
        ({"hooks": {HOOK: {"state": "unproven", "what": "w"}}}, {}, UNKNOWN, ["hook-unproven"]),
        ({"captured": [1, 14, 26]}, {}, FAIL, ["layers-shifted"]),
        ({"captured": None}, {}, WARN, ["layers-unproven"]),
        (with_plugin(ids=None, ids_error="cannot capture layer 0"), {}, FAIL, ["layers-wrong"]),
        ({"patch": PATCHED}, {}, PASS, []),  # it lies there, switched off
        ({"patch": PATCHED}, {"mode": "patch", "env": PATCH_ON}, PASS, []),
        ({"patch": PATCHED, "entries": [], "plugin": None}, {"mode": "patch", "env": PATCH_ON}, PASS, []),
        ({}, {"mode": "patch", "env": PATCH_ON}, FAIL, ["patch-missing"]),
        ({"patch": PATCHED}, {"mode": "patch", "env": {}}, FAIL, ["dump-off"]),
        ({"patch": PATCHED}, {"mode": "patch", "env": {**PATCH_ON, **ON}}, FAIL, ["dump-both"]),
        ({"patch": {**PATCHED, "torn": ["x.py.rej"]}}, {"mode": "patch", "env": PATCH_ON}, FAIL, ["patch-torn"]),
        ({"patch": {**PATCHED, "stale": ["x.pyc"]}}, {"mode": "patch", "env": PATCH_ON}, FAIL, ["patch-bytecode"]),
    ],
)
def test_judge(answer, wanted, verdict, codes):
    gate = judge(Seen({**deepcopy(ANSWER), **answer}, SHAPE), Wanted(**{**vars(WANTED), **wanted}))
    assert [problem.code for problem in gate.problems] == codes
    assert gate.verdict is verdict


@pytest.mark.parametrize("layers", [(1, 14), (1, 14, 29), (1, 14, 30), (14, 1, 26)])
def test_layers_that_are_not_this_models(layers):
    env = {**ON, "RELIGHT_DUMP_LAYERS": ",".join(map(str, layers))}
    answer = {**ANSWER, "captured": [k + 1 for k in layers]}
    gate = judge(Seen(answer, SHAPE), Wanted("/p", env, layers, "/model", "plugin"))
    assert [problem.code for problem in gate.problems] == ["layers-wrong"]


def test_evidence_names_layers_as_outputs():
    evidence = judge(Seen(ANSWER, SHAPE), WANTED).evidence
    assert evidence["layers_wanted"] == evidence["layers_captured"] == [1, 14, 26]
    assert (evidence["hooks_found"], evidence["hooks_wanted"]) == (len(TARGETS), len(TARGETS))


def test_a_model_that_cannot_be_read_is_unknown():
    answer = {**ANSWER, **with_plugin(ids=None), "captured": None}
    gate = judge(Seen(answer, None, "No such file"), WANTED)
    assert [(problem.code, problem.verdict) for problem in gate.problems] == [("model-unreadable", UNKNOWN)]


# --- the whole gate, as the process that it is on a host, on a tree of a few files -----------------------------------------------

SETTER = """
class LlamaForCausalLM:
    def set_eagle3_layers_to_capture(self, layer_ids: Optional[List[int]] = None):
        if not self.pp_group.is_last_rank:
            return
        self.model.layers_to_capture = [val + 1 for val in layer_ids]

class MistralForCausalLM(LlamaForCausalLM):
    pass
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with an `sglang` that has what the plugin hooks, our plugin's entry point, and a model."""
    site = tmp_path / "site"
    files = {
        "sglang/__init__.py": "raise ImportError('the gate must not import SGLang')\n",
        "sglang/srt/plugins/hook_registry.py": "",
        "sglang/srt/models/llama.py": SETTER,
        "sglang-0.5.23.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n",
        "relight-0.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: relight\nVersion: 0.1.0\n",
        "relight-0.1.0.dist-info/entry_points.txt": "[sglang.srt.plugins]\nrelight = relight.dump.plugin:activate\n",
    }
    sources: dict[str, dict[str, list[str]]] = {}
    for target, names in TARGETS.items():
        module, class_name, method = target.rsplit(".", 2)
        line = f"    def {method}({', '.join(names)}): pass\n"
        sources.setdefault(module.replace(".", "/") + ".py", {}).setdefault(class_name, []).append(line)
    files.update({path: "".join(f"class {c}:\n{''.join(m)}" for c, m in classes.items()) for path, classes in sources.items()})
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (tmp_path / "config.json").write_text('{"architectures": ["MistralForCausalLM"], "num_hidden_layers": 30, "hidden_size": 8}')
    return tmp_path


def gate(tree: Path, python: str = sys.executable, seconds: float = 30, env: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    path = f"{tree / 'site'}:{ROOT}:{ROOT / 'collections'}"
    options = {"layers": [1, 14, 26], "model_dir": str(tree), "look_seconds": seconds, **more}
    result = run_module("hs_patch_check", python=python, env={**ON, "PYTHONPATH": path, **(env or {})}, **options)
    assert result["changed"] is False
    return result["gate"]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def codes(found: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in found["problems"]]


def test_a_whole_tree_passes_without_importing_sglang(tree):
    found = gate(tree)
    assert (found["verdict"], codes(found)) == ("pass", [])
    assert found["evidence"]["layers_captured"] == [1, 14, 26]  # the setter was found in a base class
    assert found["evidence"]["plugin_version"] == "0.1.0"


def test_a_moved_function_fails(tree):
    edit(tree / "site/sglang/srt/model_executor/model_runner.py", "def load_model", "def load_weights")
    found = gate(tree)
    assert (found["verdict"], codes(found)) == ("fail", ["hook-moved"])
    assert "has no load_model" in found["problems"][0]["what"]


def test_a_moved_file_fails(tree):
    (tree / "site/sglang/srt/layers/logits_processor.py").rename(tree / "site/sglang/srt/layers/logits.py")
    assert codes(gate(tree)) == ["hook-moved"]


def test_changed_parameters_fail(tree):
    edit(tree / "site/sglang/srt/layers/logits_processor.py", "hidden_states, lm_head", "lm_head, hidden_states")
    found = gate(tree)
    assert codes(found) == ["hook-moved"]
    assert "takes (self, input_ids, lm_head, hidden_states" in found["problems"][0]["what"]


def test_a_function_that_may_be_inherited_is_unknown(tree):
    path = tree / "site/sglang/srt/model_executor/model_runner.py"
    edit(path, "class ModelRunner:", "class ModelRunner(Mixin):")
    edit(path, "def forward", "def run")
    found = gate(tree)
    assert (found["verdict"], codes(found)) == ("unknown", ["hook-unproven"])


def test_a_version_that_shifts_the_layers_fails(tree):
    edit(tree / "site/sglang/srt/models/llama.py", "[val + 1 for val in layer_ids]", "list(layer_ids)")
    found = gate(tree)
    assert codes(found) == ["layers-shifted"]
    assert "would capture the layer outputs [0, 13, 25], not [1, 14, 26]" in found["problems"][0]["what"]


def test_a_setter_that_cannot_be_read_is_a_warning(tree):
    edit(tree / "site/sglang/srt/models/llama.py", "self.model.layers_to_capture = ", "len(self.layers), ")
    found = gate(tree)
    assert (found["verdict"], codes(found)) == ("warn", ["layers-unproven"])


def test_a_plugin_that_is_not_installed_fails(tree):
    (tree / "site/relight-0.1.0.dist-info/entry_points.txt").unlink()
    found = gate(tree)
    assert (found["verdict"], codes(found)) == ("fail", ["plugin-missing"])


def test_a_plugin_that_cannot_be_imported_fails(tree):
    edit(tree / "site/relight-0.1.0.dist-info/entry_points.txt", "relight.dump.plugin", "relight.dump.gone")
    found = gate(tree)
    assert codes(found) == ["plugin-broken"]
    assert "No module named 'relight.dump.gone'" in found["problems"][0]["what"]


def test_an_interpreter_without_sglang_fails(tree):
    assert codes(gate(tree, env={"PYTHONPATH": ""})) == ["sglang-missing"]


def test_no_interpreter_is_unknown(tree):
    found = gate(tree, python="/nonexistent/python")
    assert (found["verdict"], codes(found)) == ("unknown", ["python-missing"])


def test_something_else_than_an_interpreter_is_unknown(tree):
    assert codes(gate(tree, python="/bin/true")) == ["python-failed"]


def test_an_interpreter_that_hangs_is_unknown(tree):
    (tree / "site/sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    found = gate(tree, seconds=0.5)
    assert (found["verdict"], codes(found)) == ("unknown", ["timed-out"])
    assert found["seconds"] < 10


@pytest.fixture
def patched(tree: Path) -> Path:
    source = tree / "site/sglang/srt/models/llama.py"
    source.write_text(source.read_text() + "DUMP = 'SGLANG_HS_DUMP_DIR'\n")
    return tree


OFF = {"RELIGHT_DUMP_DIR": "", "RELIGHT_DUMP_LAYERS": "", **PATCH_ON}


def test_a_patched_tree_passes_in_its_mode(patched):
    found = gate(patched, mode="patch", env=OFF)
    assert (found["verdict"], found["evidence"]["patched_files"]) == ("pass", 1)


def test_a_half_applied_patch_fails(patched):
    (patched / "site/sglang/srt/models/llama.py.rej").write_text("@@")
    (patched / "site/sglang/srt/models/qwen.py").write_text("SGLANG_HS_DUMP_DIR = (\n")
    assert codes(gate(patched, mode="patch", env=OFF)) == ["patch-torn", "patch-torn"]


def test_bytecode_that_hides_the_patch_fails(patched):
    """The source is replaced by one of equal size and time, as a restore that keeps times does."""
    source = patched / "site/sglang/srt/models/llama.py"
    text, before = source.read_bytes(), source.stat()
    source.write_bytes(text.replace(b"SGLANG_HS_DUMP_DIR", b"SGLANG_XX_DUMP_DIR"))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    py_compile.compile(str(source))
    source.write_bytes(text)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = gate(patched, mode="patch", env=OFF)
    assert codes(found) == ["patch-bytecode"]
    assert found["problems"][0]["where"] == importlib.util.cache_from_source(str(source))
    py_compile.compile(str(source))
    assert codes(gate(patched, mode="patch", env=OFF)) == []


def test_an_unpatched_tree_fails_in_mode_patch(tree):
    assert codes(gate(tree, mode="patch", env=OFF)) == ["patch-missing"]
