# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Will the server that starts dump hidden states, and the right ones? `look` asks the interpreter that serves; `judge` is pure."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import hs_patch_probe, layers
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict

NAME = "hs_patch_check"
ENTRY = "relight"
# Of the module's own environment, what a child gets beside the server's: nothing that changes what Python imports.
KEPT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "USER")


class CannotLook(Exception):
    """The interpreter gives no answer: (code, sentence)."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True)
class Wanted:
    """How the inventory will start the server."""

    python: str
    env: Mapping[str, str]
    layers: tuple[int, ...]
    model_dir: str
    mode: str  # plugin | patch


@dataclass(frozen=True)
class Seen:
    """What was found: the probe's answer, and the model's config.json."""

    answer: Mapping[str, Any]
    shape: layers.Shape | None
    shape_error: str = ""


def read_shape(model_dir: str) -> tuple[layers.Shape | None, str]:
    """The model's shape, or None and why."""
    try:
        with open(os.path.join(model_dir, "config.json"), encoding="utf-8") as handle:
            return layers.shape(json.load(handle)), ""
    except (OSError, ValueError, layers.BadLayers) as error:
        return None, str(error)


def probe_source() -> str:
    """The probe's text, from wherever this module was imported, a zip of Ansible's included."""
    source: str | None = hs_patch_probe.__loader__.get_source(hs_patch_probe.__name__)  # type: ignore[union-attr]
    if not source:
        raise CannotLook("python-failed", "the probe's own text cannot be read")
    return source


def look(wanted: Wanted) -> Seen:
    """Ask the interpreter. To be called in a bounded child: it may hang. Raises CannotLook."""
    shape, shape_error = read_shape(wanted.model_dir)
    question = {"layers": list(wanted.layers), "shape": None if shape is None else vars(shape)}
    kept = {key: value for key, value in os.environ.items() if key in KEPT}
    try:
        done = subprocess.run(
            [wanted.python, "-B", "-c", probe_source(), json.dumps(question)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**kept, **wanted.env},
            cwd="/",  # an interpreter imports from where it stands
            check=False,
        )
    except FileNotFoundError:
        raise CannotLook("python-missing", f"there is no {wanted.python}") from None
    except OSError as error:
        raise CannotLook("python-missing", f"{wanted.python} cannot be run: {error.strerror}") from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CannotLook("python-failed", f"{wanted.python} ended with {done.returncode}: {last}") from None
    return Seen(answer, shape, shape_error)


def unknown(code: str, where: str, what: str) -> Gate:
    """The gate of a look that gave nothing."""
    remedy = {
        "python-missing": "set relight_sglang_python to the interpreter that serves",
        "python-failed": "run that interpreter by hand: it does not even run a script of the standard library",
        "timed-out": "see whether the disk of that environment answers, then run again",
    }[code]
    return Gate(NAME, problems=[Problem(code, where, what, remedy, Verdict.UNKNOWN)])


def judge(seen: Seen, wanted: Wanted) -> Gate:
    """Compare what that interpreter will do with what the inventory wants of it."""
    answer = seen.answer
    plugin = answer["plugin"] or {}
    ours = [point for point in answer["entries"] if point["name"] == ENTRY]
    numbers = answer["captured"]
    gate = Gate(
        NAME,
        {
            "mode": wanted.mode,
            "python": wanted.python,
            "python_version": answer["python_version"],
            "sglang_version": answer["sglang_version"],
            "plugin_version": ours[0]["version"] if ours else None,
            "plugin_file": plugin.get("file"),
            "hooks_found": sum(hook["state"] == "found" for hook in answer["hooks"].values()),
            "hooks_wanted": len(answer["hooks"]),
            "architecture": seen.shape.architecture if seen.shape else None,
            "model_layers": seen.shape.layers if seen.shape else None,
            "layers_wanted": list(wanted.layers),
            "layers_passed": plugin.get("ids"),
            "layers_captured": None if numbers is None else [number - 1 for number in numbers],
            "patched_files": len(answer["patch"]["files"]),
        },
    )
    if not answer["sglang_root"]:
        remedy = "set relight_sglang_python to the interpreter that serves"
        gate.problems.append(Problem("sglang-missing", wanted.python, "this interpreter has no SGLang", remedy))
        return gate
    gate.problems += judge_layers(seen, wanted)
    gate.problems += judge_patch(answer, wanted) if wanted.mode == "patch" else judge_plugin(answer, wanted)
    if wanted.env.get("RELIGHT_DUMP_DIR") and wanted.env.get("SGLANG_HS_DUMP_DIR"):
        what = "RELIGHT_DUMP_DIR and SGLANG_HS_DUMP_DIR are both set: two dumps of one server exclude each other"
        gate.problems.append(Problem("dump-both", "environment", what, "keep the one of relight_sglang_dump"))
    return gate


def judge_layers(seen: Seen, wanted: Wanted) -> list[Problem]:
    """Are these layers of this model?"""
    if seen.shape is None:
        where = os.path.join(wanted.model_dir, "config.json")
        return [Problem("model-unreadable", where, seen.shape_error, "set relight_model_dir to the model that is served", Verdict.UNKNOWN)]
    try:
        layers.check(wanted.layers, seen.shape.layers)
    except layers.BadLayers as error:
        return [Problem("layers-wrong", "relight_dump_layers", str(error), "give three rising layer outputs before the last layer")]
    return []


def judge_plugin(answer: Mapping[str, Any], wanted: Wanted) -> list[Problem]:
    """Is our plugin there, on, and at home in this SGLang?"""
    ours = [point for point in answer["entries"] if point["name"] == ENTRY]
    install = f"recover.yml installs it, or by hand: {wanted.python} -m pip install --no-deps relight"
    if not answer["plugins_supported"]:
        what = f"SGLang {answer['sglang_version']} has no plugins (they came with 0.5.11)"
        return [Problem("sglang-old", wanted.python, what, "update SGLang, or keep a source patch with relight_sglang_dump: patch")]
    if not ours:
        what = "Relight's plugin is not installed for this interpreter"
        return [Problem("plugin-missing", wanted.python, what, install)]
    plugin = answer["plugin"]
    if plugin["error"] or not plugin.get("callable"):
        what = f"the plugin is installed and cannot be loaded: {plugin['error'] or ours[0]['value'] + ' is nothing to call'}"
        return [Problem("plugin-broken", wanted.python, what, install)]
    return [
        *judge_switches(ours, wanted),
        *judge_hooks(answer),
        *judge_capture(answer, wanted),
    ]


def judge_switches(ours: Sequence[Mapping[str, str]], wanted: Wanted) -> list[Problem]:
    """Does the environment switch the plugin on, for these layers?"""
    found = []
    if len(ours) > 1:
        dists = ", ".join(f"{point['dist']} {point['version']}" for point in ours)
        found.append(Problem("plugin-twice", wanted.python, f"{dists}: the last one wins", "uninstall all and install one", Verdict.WARN))
    allowed = [name.strip() for name in wanted.env.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and ENTRY not in allowed:
        what = f"it allows {', '.join(allowed)} and so keeps {ENTRY} out"
        found.append(Problem("plugin-excluded", "SGLANG_PLUGINS", what, f"add {ENTRY} to it in relight_sglang_env"))
    if not wanted.env.get("RELIGHT_DUMP_DIR"):
        remedy = "start the server with the environment of role sglang_launch"
        found.append(Problem("dump-off", "RELIGHT_DUMP_DIR", "it is not set, and without it the plugin does nothing", remedy))
    text = wanted.env.get("RELIGHT_DUMP_LAYERS", "")
    try:
        same = layers.parse(text) == wanted.layers
    except layers.BadLayers:
        same = False
    if not same:
        what = f"it says {text!r}, the inventory {','.join(str(k) for k in wanted.layers)}"
        found.append(Problem("layers-differ", "RELIGHT_DUMP_LAYERS", what, "let relight_dump_layers alone set it"))
    return found


def judge_hooks(answer: Mapping[str, Any]) -> list[Problem]:
    """Are the functions there that the plugin hooks? SGLang only logs a hook that fails."""
    found = []
    for target, hook in answer["hooks"].items():
        what = f"{hook['what']} (SGLang {answer['sglang_version']})"
        if hook["state"] == "unproven":
            remedy = "start the server and let sglang_ready probe a dump"
            found.append(Problem("hook-unproven", target, what, remedy, Verdict.UNKNOWN))
        elif hook["state"] != "found":
            remedy = "install a Relight that knows this SGLang, or the SGLang that dumped before"
            found.append(Problem("hook-moved", target, what, remedy))
    return found


def judge_capture(answer: Mapping[str, Any], wanted: Wanted) -> list[Problem]:
    """Will SGLang capture the outputs that are wanted, once it has shifted the ids?"""
    plugin, numbers = answer["plugin"], answer["captured"]
    listed = ", ".join(str(k) for k in wanted.layers)
    if plugin["ids_error"]:
        return [Problem("layers-wrong", "relight_dump_layers", plugin["ids_error"], "give three layer outputs that it can capture")]
    if plugin["ids"] is None:
        return []  # the model is not known, and that is told already
    if numbers is None:
        why = answer["captured_error"] or "its model's source tells no layers"
        what = f"that the layers [{listed}] are captured cannot be read in SGLang's source ({why})"
        remedy = "nothing now: the server compares them once the model is loaded, and continuity proves them"
        return [Problem("layers-unproven", "relight_dump_layers", what, remedy, Verdict.WARN)]
    if numbers != layers.inside(wanted.layers):
        shifted = ", ".join(str(number - 1) for number in numbers)
        what = f"SGLang {answer['sglang_version']} would capture the layer outputs [{shifted}], not [{listed}]"
        return [Problem("layers-shifted", "relight_dump_layers", what, "install a Relight that knows this SGLang")]
    return []


def judge_patch(answer: Mapping[str, Any], wanted: Wanted) -> list[Problem]:
    """Is the user's own source patch there, whole, and on?"""
    patch = answer["patch"]
    found = []
    if not patch["files"]:
        what = f"no source of SGLang {answer['sglang_version']} carries the patch ({hs_patch_probe.PATCH})"
        found.append(Problem("patch-missing", answer["sglang_root"], what, "apply the patch again, as after an update of SGLang"))
    for torn in patch["torn"]:
        found.append(Problem("patch-torn", answer["sglang_root"], torn, "restore that file from the wheel and apply the patch again"))
    for stale in patch["stale"]:
        what = "bytecode without the patch, which Python takes for the patched source"
        found.append(Problem("patch-bytecode", stale, what, "remove that file"))
    if not wanted.env.get(hs_patch_probe.PATCH):
        remedy = "start the server with the environment of role sglang_launch"
        found.append(Problem("dump-off", hs_patch_probe.PATCH, "it is not set, and without it the patch does nothing", remedy))
    return found
