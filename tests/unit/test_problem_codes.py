# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Every problem code that the code can report is explained in docs/problems, and none is explained that is never reported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
SOURCES = [*ROOT.glob("plugins/*/*.py"), *ROOT.glob("relight/**/*.py")]


def strings(node):
    """The strings that an expression may come to."""
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def reported():
    """The kebab-case strings that stand where a Problem's code stands."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Problem" and node.args:
                yield from ((code, path.name) for code in strings(node.args[0]) if KEBAB.fullmatch(code))


def documented():
    for path in (ROOT / "docs" / "problems").glob("*.md"):
        for line in path.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if len(cells) == 4 and KEBAB.fullmatch(cells[0].strip("`")):
                yield cells[0].strip("`"), cells


def test_every_reported_code_is_documented():
    known = {code for code, _ in documented()}
    assert sorted({(code, file) for code, file in reported() if code not in known}) == []


def test_every_documented_code_stands_in_the_code():
    everything = "".join(path.read_text() for path in SOURCES)
    built = re.compile(r'f"([a-z-]+-)\{')  # a code may be put together of a subject and its fault
    faults = {f"{subject}{fault}" for subject in built.findall(everything) for fault in re.findall(r'"([a-z-]+)"', everything)}
    assert sorted(code for code, _ in documented() if f'"{code}"' not in everything and code not in faults) == []


def test_every_row_has_a_verdict_and_a_remedy():
    for code, (_, verdict, meaning, remedy) in documented():
        assert re.match(r"(warn|fail|unknown)", verdict), code
        assert len(meaning) > 10, code
        assert len(remedy) >= 4, code
