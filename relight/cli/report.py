# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`relight report [PATH]`: the verdict of the last run and its reasons, from report.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils.report import GOOD


class NoReport(Exception):
    """The message is one sentence for the operator."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="relight report", description=__doc__)
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path("relight-report"), help="report.json or its folder (relight_report_dir); %(default)s"
    )
    options = parser.parse_args(argv[1:])
    try:
        value = read(options.path)
    except NoReport as error:
        print(f"relight report: {error}", file=sys.stderr)
        return 2
    print(text(value))
    return 0 if value["verdict"] in GOOD else 1


def read(path: Path) -> dict[str, Any]:
    """Raises NoReport."""
    file = path / "report.json" if path.is_dir() else path
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(value["verdict"], str) and isinstance(value["hosts"], dict):
            return dict(value)
    except OSError as error:
        raise NoReport(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise NoReport(f"{file} is not a report of Relight")


def text(value: dict[str, Any]) -> str:
    """A line for each host, the line to paste where consent is needed, and the verdict last."""
    lines = [f"{host}: {part['verdict'].upper()}: {part['reason']}" for host, part in sorted(value["hosts"].items())]
    if value.get("paste"):
        lines.append(f"To consent, paste: {value['paste']}")
    return "\n".join([*lines, f"relight: {value['verdict']}"])
