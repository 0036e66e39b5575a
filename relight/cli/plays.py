# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`relight recover` and its siblings: a playbook of the collection under ansible-runner, then the verdict of its report.

Ansible's own exit code says whether tasks failed; a play that reached nobody exits 0. So this front exits 0 only when the
report says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ansible_runner
from ansible_collections.relight.recovery.plugins.module_utils.report import GOOD

from relight.cli import report

ASKS = ("-k", "-K", "-J", "--ask-pass", "--ask-become-pass", "--ask-vault-password", "--ask-vault-pass", "--step")
NO_VERDICT = 3  # the run ended before any host was closed: nothing is known to be well


def main(argv: Sequence[str]) -> int:
    name = argv[0]
    options, further = _parser(name).parse_known_args(argv[1:])
    asks = next((word for word in further if word in ASKS), None)
    if asks:
        print(f"relight {name}: {asks} needs a terminal of Ansible's own; use ansible-playbook relight.recovery.{name}", file=sys.stderr)
        return 2
    if not (collection() / "playbooks" / f"{name}.yml").is_file():
        print(f"relight {name}: Relight {_version()} has no playbook {name} yet", file=sys.stderr)
        return 2
    rc, report_file = play(name, [*_arguments(options), *further])
    return conclude(name, rc, report_file, options.check)


def conclude(name: str, rc: int, report_file: str | None, check: bool) -> int:
    """Print the verdict and give the exit code."""
    if report_file is None:
        if name == "remove" and rc == 0:
            return 0
        print(f"relight {name}: NOT-CLEAR: the run ended before a report was written; the lines above say why", file=sys.stderr)
        return rc or NO_VERDICT
    value = report.read(Path(report_file))
    print("\n" + report.text(value))
    if check:
        return rc  # a check run proves nothing: its verdict is never clear, and Ansible's word is what there is
    if value["verdict"] in GOOD:
        return rc
    return rc or 1


def play(name: str, arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run one playbook with its output shown. Returns Ansible's exit code, and where the run reported, if it did."""
    private = tempfile.mkdtemp(prefix="relight-runner-")
    reported: list[str] = []

    def on_event(event: dict[str, Any]) -> bool:
        result = event.get("event_data", {}).get("res") or {}
        if event.get("event") == "runner_on_ok" and isinstance(result.get("report"), str):
            reported.append(result["report"])
        return False  # keep no event file

    def on_status(status: dict[str, Any], runner_config: Any) -> None:
        if status["status"] != "starting":  # the runner has written these by then, with the whole environment in them
            for path in (Path(runner_config.artifact_dir) / "command", Path(private) / "env" / "cmdline"):
                with suppress(FileNotFoundError):
                    path.unlink()

    try:
        runner = ansible_runner.run(
            private_data_dir=private,
            project_dir=os.getcwd(),  # as ansible-playbook has it: relative paths and ansible.cfg count from here
            playbook=f"relight.recovery.{name}",
            inventory=[],
            cmdline=shlex.join(arguments),
            envvars={
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
                **({} if sys.stdout.isatty() else {"ANSIBLE_NOCOLOR": "1"}),  # Ansible itself always sees a terminal here
            },
            settings={"suppress_output_file": True},
            suppress_env_files=True,
            event_handler=on_event,
            status_handler=on_status,
        )
        return int(runner.rc if runner.rc is not None else 254), reported[-1] if reported else None
    finally:
        shutil.rmtree(private, ignore_errors=True)


def collection() -> Path:
    """Where the collection lies: in site-packages, or in the checkout. Raises ModuleNotFoundError."""
    spec = find_spec("ansible_collections.relight.recovery")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the collection relight.recovery", name="ansible_collections.relight.recovery")
    return Path(next(iter(spec.submodule_search_locations)))


def _arguments(options: argparse.Namespace) -> list[str]:
    """Our options as ansible-playbook's."""
    words = [word for source in options.inventory for word in ("-i", source)]
    words += [word for value in options.extra_vars for word in ("-e", value)]
    if options.consent:
        words += ["-e", json.dumps({"relight_consent": options.consent})]
    if getattr(options, "after_the_fact", False):
        words += ["-e", json.dumps({"relight_adopt_after_the_fact": True})]
    for name in ("tags", "skip_tags", "limit"):
        words += [word for value in getattr(options, name) for word in (f"--{name.replace('_', '-')}", value)]
    words += ["--check"] if options.check else []
    words += ["--diff"] if options.diff else []
    return words + (["-" + "v" * options.verbose] if options.verbose else [])


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"relight {name}",
        description=f"Run the playbook relight.recovery.{name}. Other options go to ansible-playbook as they are.",
        epilog="Exit code 0 only for the verdicts clear, clear-with-warnings and resumed.",
    )
    parser.add_argument("-i", "--inventory", action="append", default=[], metavar="INVENTORY", help="file or folder; may be repeated")
    parser.add_argument("-e", "--extra-vars", action="append", default=[], metavar="VARS", help="variables, as for ansible-playbook")
    parser.add_argument(
        "--consent",
        action="append",
        default=[],
        metavar="NAME",
        help="consent to one thing by its exact name, as the run printed it; may be repeated",
    )
    if name == "adopt":
        text = "the host is broken: gather what is left of it, refuse nothing, and never replace the baseline of the healthy host"
        parser.add_argument("--after-the-fact", action="store_true", help=text)
    parser.add_argument("-t", "--tags", action="append", default=[], help="only these stages")
    parser.add_argument("--skip-tags", action="append", default=[], help="all but these stages")
    parser.add_argument("-l", "--limit", action="append", default=[], help="only these hosts")
    parser.add_argument("-C", "--check", action="store_true", help="tell what would be done, and do nothing")
    parser.add_argument("-D", "--diff", action="store_true", help="show before and after")
    parser.add_argument("-v", "--verbose", action="count", default=0)
    return parser


def _version() -> str:
    import relight

    return relight.__version__
