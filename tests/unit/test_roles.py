# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Every role's argument specification is its contract: complete, documented, and equal to its defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.harness import ROOT

ROLES = sorted(path for path in (ROOT / "roles").iterdir() if (path / "meta").is_dir())
SHARED = "relight"


def read(path: Path):
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None


def specification(role: Path) -> dict:
    return read(role / "meta" / "argument_specs.yml")["argument_specs"]


@pytest.fixture(params=ROLES, ids=lambda role: role.name)
def role(request):
    return request.param


def test_defaults_are_those_of_the_specification(role):
    defaults = read(role / "defaults" / "main.yml") or {}
    options = specification(role)["main"].get("options", {})
    assert set(defaults) == {name for name, option in options.items() if not option.get("required")}
    told = {name: options[name].get("default") for name in defaults}
    assert told == defaults


def test_types_are_those_of_the_defaults(role):
    kinds = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict, "float": (int, float), "path": str}
    for name, option in specification(role)["main"].get("options", {}).items():
        value = option.get("default")
        templated = isinstance(value, str) and "{{" in value
        if value is not None and not templated and option["type"] != "raw":
            assert isinstance(value, kinds[option["type"]]), name
            assert option["type"] == "bool" or not isinstance(value, bool), name
        if option["type"] == "list":
            assert "elements" in option, name


def test_every_option_and_entry_point_says_what_it_is_for(role):
    for entry in specification(role).values():
        assert entry["short_description"]
        assert entry["description"]
        for name, option in entry.get("options", {}).items():
            assert option["description"], name


def test_variables_carry_the_name_of_their_role(role):
    prefix = "relight_" if role.name == SHARED else f"{role.name}_"
    names = set(read(role / "defaults" / "main.yml") or {})
    assert [name for name in names if not name.startswith(prefix)] == []
    inner = set(read(role / "vars" / "main.yml") or {})
    assert [name for name in inner if not name.startswith(f"__{prefix}")] == []


def test_registered_names_are_inner_names_of_the_role(role):
    for path in (role / "tasks").glob("*.yml") if (role / "tasks").is_dir() else ():
        registered = re.findall(r"^\s*register: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert [name for name in registered if not name.startswith(f"__{role.name}_")] == [], path


def test_every_used_variable_of_the_collection_has_a_default(role):
    """A misspelt variable shows here and not on a host."""
    known = set()
    for other in (ROOT / "roles").iterdir():
        for kind in ("defaults", "vars"):
            known |= set(read(other / kind / "main.yml") or {})
    names = "|".join(path.name for path in (ROOT / "roles").iterdir())
    optional = re.compile(rf"\b((?:{names})_[a-z0-9_]+) *\| *default\(")
    for path in [*role.glob("tasks/*.yml"), *role.glob("vars/*.yml"), *role.glob("defaults/*.yml")]:
        text = re.sub(
            r"^\s*(?:- )?(?:relight\.recovery\.\S+|name:.*|role:.*|.*tasks_from:.*|#.*)$",
            "",
            path.read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
        templates = re.findall(r"\{\{.*?\}\}", text, re.DOTALL)
        expressions = " ".join(templates + re.findall(r"^\s*(?:when|that|until|loop):.*$", text, re.MULTILINE))
        used = set(re.findall(rf"(?<![\w.'\"/])((?:{names})_[a-z0-9_]+)\b", expressions)) - set(optional.findall(expressions))
        assert sorted(used - known) == [], path


def test_sanity_passes_over_the_licence_of_every_module_and_nothing_else():
    """ansible-test wants the GPL; Relight is Apache-2.0. No other rule is ignored anywhere."""
    judged = sorted(str(path.relative_to(ROOT)) for kind in ("lookup", "modules") for path in (ROOT / "plugins" / kind).glob("*.py"))
    wanted = [f"{path} validate-modules:missing-gplv3-license  # Relight is Apache-2.0" for path in judged]
    for version in ("2.19", "2.20", "2.21"):
        assert (ROOT / "tests" / "sanity" / f"ignore-{version}.txt").read_text().splitlines() == wanted
