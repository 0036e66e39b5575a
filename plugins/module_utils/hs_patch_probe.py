# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What an interpreter finds of SGLang and of our plugin. Run as the text of `python -c` by the interpreter that serves.

A question as JSON in the first argument, an answer as JSON in the last line of standard output. Standard library only, Python 3.9
and newer; SGLang's modules are read as source, never imported (that takes a minute and wakes GPUs). Of the plugin, which is
light, the very code that the server will run is asked for the ids that it will pass.
"""

from __future__ import annotations

import ast
import glob
import importlib
import json
import os
import sys
from typing import Any

GROUP = "sglang.srt.plugins"
NAME = "relight"
SETTER = "set_eagle3_layers_to_capture"
PATCH = "SGLANG_HS_DUMP_DIR"
# Language models inside a model whose config.json does not name them.
INNER = {"KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM"}


def entries() -> list[dict[str, str]]:
    """Our entry points as SGLang will find them, and the other plugins beside them."""
    from importlib import metadata

    found: Any = metadata.entry_points()
    chosen = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, [])
    listed = []
    for point in chosen:
        dist = getattr(point, "dist", None)
        told = {"dist": dist.name if dist else "", "version": dist.version if dist else ""}
        listed.append({"name": point.name, "value": point.value, **told})
    return listed


def version_of(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def root_of(package: str) -> str | None:
    """The folder of a package that is not imported for it."""
    from importlib import util

    spec = util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else None


def parse(path: str) -> ast.Module:
    with open(path, "rb") as handle:
        return ast.parse(handle.read(), path)


def class_in(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def method_in(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def hook(root: str, target: str, wanted: list[str]) -> dict[str, str]:
    """Is the target of a hook where the plugin expects it, with the parameters that it relies on?

    found | missing | parameters | unproven (the class inherits, and what from is not read here)
    """
    module, class_name, method = target.rsplit(".", 2)
    path = os.path.join(root, *module.split(".")[1:]) + ".py"
    if not os.path.isfile(path):
        return {"state": "missing", "what": f"there is no {path}"}
    node = class_in(parse(path), class_name)
    if node is None:
        return {"state": "missing", "what": f"{path} has no class {class_name}"}
    function = method_in(node, method)
    if function is None:
        inherits = [ast.dump(base) for base in node.bases if not (isinstance(base, ast.Attribute) and base.attr == "Module")]
        return {"state": "unproven" if inherits else "missing", "what": f"class {class_name} in {path} has no {method}"}
    names = [item.arg for item in (*function.args.posonlyargs, *function.args.args)]
    if names[: len(wanted)] != wanted:
        return {"state": "parameters", "what": f"{method} takes ({', '.join(names)}), not ({', '.join(wanted)})"}
    return {"state": "found", "what": ""}


class Anything:
    """Stands for whatever a setter touches: true, and remembers what is set on it and which ids reach an inner setter."""

    def __init__(self, ids: list[list[int]]) -> None:
        self.__dict__["reached"] = ids

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Anything([])
        self.__dict__[name] = value
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["reached"].extend(list(arg) for arg in args if isinstance(arg, (list, tuple)))
        return Anything([])


def setter(models: str, class_name: str) -> ast.FunctionDef | None:
    """The setter of a model class, its own or of the nearest base that can be read."""
    waiting = [class_name]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop(0)
        if name in seen or len(seen) > 20:
            continue
        seen.add(name)
        for path in sorted(glob.glob(os.path.join(models, "**", "*.py"), recursive=True)):
            with open(path, "rb") as handle:
                text = handle.read()
            if b"class " + name.encode() + b"(" not in text and b"class " + name.encode() + b":" not in text:
                continue
            node = class_in(ast.parse(text, path), name)
            if node is None:
                continue
            function = method_in(node, SETTER)
            if function is not None:
                return function
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
            break
    return None


def captured(models: str, architecture: str, inner: str, ids: list[int], layers: int) -> list[int] | None:
    """SGLang's own numbers of what is captured once this architecture's setter was given `ids`; None where it cannot be told.

    The setter's source is run on a stand-in of the model.
    """
    function = setter(models, architecture)
    if function is None:
        return None
    for item in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        item.annotation = None
    function.returns, function.decorator_list = None, []
    scope: dict[str, Any] = {"get_parallel": Anything([])}
    model = Anything([])
    model.config.num_hidden_layers = layers
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), architecture, "exec"), scope)  # noqa: S102  the very source that will run is the only true answer
    scope[SETTER](model, list(ids))
    places = (model, model.model, model.language_model, model.language_model.model)
    for place in places:
        if isinstance(place.__dict__.get("layers_to_capture"), list):
            return sorted(place.layers_to_capture)
    reached = model.model.__dict__.get(SETTER, Anything([])).reached
    if reached:
        return sorted(reached[0])
    passed = model.language_model.__dict__.get(SETTER, Anything([])).reached
    if passed and inner and inner != architecture:
        return captured(models, inner, "", passed[0], layers)
    return None


def patch(root: str) -> dict[str, Any]:
    """The user's own source patch: which files carry it, and what of it is torn or stale."""
    carriers, torn, stale = [], [], []
    for path in sorted(glob.glob(os.path.join(root, "srt", "**", "*.py"), recursive=True)):
        with open(path, "rb") as handle:
            text = handle.read()
        if PATCH.encode() not in text:
            continue
        carriers.append(os.path.relpath(path, root))
        try:
            ast.parse(text, path)
        except SyntaxError as error:
            torn.append(f"{path}: {error.msg} in line {error.lineno}")
        torn += [f"{path}{end} lies beside it" for end in (".rej",) if os.path.exists(path + end)]
        compiled = importlib.util.cache_from_source(path)
        if is_stale(path, compiled):
            stale.append(compiled)
    return {"files": carriers, "torn": torn, "stale": stale}


def is_stale(path: str, compiled: str) -> bool:
    """Would Python take this bytecode for the source, although it was compiled without the patch?"""
    try:
        with open(compiled, "rb") as handle:
            data = handle.read()
        told = os.stat(path)
    except OSError:
        return False
    flags = int.from_bytes(data[4:8], "little")
    current = int.from_bytes(data[8:12], "little") == int(told.st_mtime) & 0xFFFFFFFF and data[12:16] == (
        told.st_size & 0xFFFFFFFF
    ).to_bytes(4, "little")
    taken = flags == 1 or (flags == 0 and current)  # 1: by hash, never checked against the source
    return taken and PATCH.encode() not in data


def plugin(entry: str, question: dict[str, Any], version: str) -> dict[str, Any]:
    """What our plugin in this interpreter says of itself, and the ids that it will pass."""
    module_name, _colon, attribute = entry.partition(":")
    told: dict[str, Any] = {"error": None, "file": None, "targets": {}, "ids": None, "ids_error": None}
    try:
        module: Any = importlib.import_module(module_name)
        told["file"] = module.__file__
        told["callable"] = callable(getattr(module, attribute))
        told["targets"] = {target: list(names) for target, names in module.TARGETS.items()}
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
        return told
    if question["shape"]:
        try:
            told["ids"] = module.layers.ids_to_pass(question["layers"], module.layers.Shape(**question["shape"]), version)
        except Exception as error:
            told["ids_error"] = f"{error}"
    return told


def answer(question: dict[str, Any]) -> dict[str, Any]:
    root = root_of("sglang")
    version = version_of("sglang")
    found = entries()
    ours = next((point for point in found if point["name"] == NAME), None)
    told: dict[str, Any] = {
        "python_version": ".".join(str(n) for n in sys.version_info[:3]),
        "prefix": sys.prefix,
        "sglang_version": version,
        "sglang_root": root,
        "entries": found,
        "plugins_supported": bool(root) and os.path.isfile(os.path.join(str(root), "srt", "plugins", "hook_registry.py")),
        "plugin": plugin(ours["value"], question, version or "") if ours else None,
        "hooks": {},
        "patch": patch(root) if root else {"files": [], "torn": [], "stale": []},
        "captured": None,
        "captured_error": None,
    }
    if root and told["plugin"]:
        told["hooks"] = {target: hook(root, target, names) for target, names in told["plugin"]["targets"].items()}
        shape = question["shape"]
        if shape and told["plugin"]["ids"] is not None:
            inner = shape["text"] or INNER.get(shape["architecture"], "")
            try:
                models = os.path.join(root, "srt", "models")
                told["captured"] = captured(models, shape["architecture"], inner, told["plugin"]["ids"], shape["layers"])
            except Exception as error:
                told["captured_error"] = f"{type(error).__name__}: {error}"
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(json.loads(sys.argv[1]))) + "\n")
