# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The command `relight`. Each subcommand imports what it needs, so that a host's environment needs no Ansible and a controller no numpy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import relight

# Subcommand: the function that serves it, called with the command's words, and what `relight --help` says of it.
COMMANDS = {
    "assess": ("relight.cli.plays:main", "look at the hosts of an inventory and change nothing"),
    "recover": ("relight.cli.plays:main", "bring them back and resume the extraction"),
    "status": ("relight.cli.plays:main", "tell how far the extraction is"),
    "adopt": ("relight.cli.plays:main", "record the known-good state of healthy hosts"),
    "rollback": ("relight.cli.plays:main", "undo the last storage switch"),
    "remove": ("relight.cli.plays:main", "take Relight off the hosts; data stays"),
    "report": ("relight.cli.report:main", "print the last report's verdict and its reasons"),
    "wheelhouse": ("relight.cli.wheelhouse:main", "collect the wheels that hosts install from, without a network there"),
    "extract": ("relight.extract.cli:main", "on a host: extract what the store is missing"),
    "export": ("relight.extract.export:main", "on a host: copy samples into another layout or to another place"),
    "snapshot": ("relight.extract.snapshot:main", "on a host: list the samples that are whole now, for a trainer that reads meanwhile"),
    "vocab-mapping": ("relight.extract.vocabulary:main", "on a host: make or check SpecForge's vocab_mapping.pt"),
    "continuity": ("relight.extract.cli:continuity", "on a host: compare old samples with what the server gives now"),
}


def usage() -> str:
    lines = [f"  {name:<13} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: relight COMMAND ...",
            "",
            "Bring a GPU host back after an infrastructure catastrophe and resume hidden-state extraction, proven.",
            "",
            *lines,
            "",
            "`relight COMMAND --help` tells more. Exit code 0 only for the verdicts clear, clear-with-warnings and resumed.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"relight {relight.__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"relight: there is no command {words[0]!r}; `relight --help` lists them", file=sys.stderr)
        return 2
    module, function = COMMANDS[words[0]][0].split(":")
    try:
        serve = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        extra = "host" if module.startswith("relight.extract") else "controller"
        print(
            f"relight {words[0]}: the Python package {error.name!r} is not in this environment; install relight[{extra}]", file=sys.stderr
        )
        return 2
    # What is served by our own front is told its name; the client's functions take options alone.
    result: int = serve(words if module.startswith("relight.cli") else words[1:])
    return result
