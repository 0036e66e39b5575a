# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The run's folder on the controller: records as they come, report.json kept true at every moment, report.html."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import jinja2
from ansible_collections.relight.recovery.plugins.module_utils import durable, report

TEMPLATE = os.path.join(os.path.dirname(__file__), "..", "..", "roles", "report", "templates", "report.html.j2")


class RunFolder:
    """`<folder>/run.json`, `<folder>/hosts/<host>.jsonl`, `<folder>/report.{json,html}`. Raises OSError."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.run_file = os.path.join(folder, "run.json")
        self.report_file = os.path.join(folder, "report.json")

    def open(self, run: report.Run) -> None:
        """Begin a run: the former report.json goes to history/, every expected host starts as not-clear."""
        os.makedirs(os.path.join(self.folder, "hosts"), exist_ok=True)
        with self._lock():
            self._keep_former()
            for name in os.listdir(os.path.join(self.folder, "hosts")):
                os.unlink(os.path.join(self.folder, "hosts", name))
            durable.write_json(self.run_file, asdict(run))
        self.write_html()  # at once: the page of a run that reaches nobody must not be that of the run before

    def _keep_former(self) -> None:
        try:
            with open(self.report_file, encoding="utf-8") as handle:
                former = json.load(handle)["run"]
        except (OSError, ValueError, KeyError):
            return
        history = os.path.join(self.folder, "history")
        os.makedirs(history, exist_ok=True)
        os.replace(self.report_file, os.path.join(history, f"{former}.json"))

    def run(self) -> report.Run:
        """The run that was opened here. Raises FileNotFoundError where none was."""
        with open(self.run_file, encoding="utf-8") as handle:
            values: dict[str, Any] = json.load(handle)
        values.update({name: tuple(value) for name, value in values.items() if isinstance(value, list)})
        return report.Run(**values)

    def records(self, host: str) -> list[dict[str, Any]]:
        return list(durable.read_lines(self._host_file(host)))

    def add(self, host: str, record: dict[str, Any]) -> None:
        """Record what a host's gate said, and rewrite report.json."""
        with self._lock():
            durable.append_line(self._host_file(host), json.dumps({"time": round(time.time(), 3), **record}, sort_keys=True))
            self._write()

    def write_html(self) -> dict[str, Any]:
        """Write report.html from the records; returns the report."""
        with self._lock():
            value = self._write()
            with open(TEMPLATE, encoding="utf-8") as handle:
                environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
                page = environment.from_string(handle.read()).render(
                    report=value,
                    order=report.STAGES,
                    clock=lambda t: time.strftime("%H:%M:%S", time.localtime(t)),
                    day=lambda t: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)),
                )
            with durable.replacing(os.path.join(self.folder, "report.html")) as out:
                out.write(page.encode())
        return value

    def _write(self) -> dict[str, Any]:
        run = self.run()
        value = report.report(run, {host: self.records(host) for host in run.hosts}, time.time())
        durable.write_json(self.report_file, value)
        return value

    def _host_file(self, host: str) -> str:
        return os.path.join(self.folder, "hosts", f"{host.replace('/', '_')}.jsonl")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with open(os.path.join(self.folder, ".lock"), "w", encoding="ascii") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def folder_of(task_vars: dict[str, Any], check: bool) -> str:
    """Where this run reports: a check run has a folder of its own, so that it never overwrites a real report."""
    base = os.path.abspath(os.path.expanduser(str(task_vars["relight_report_dir"])))
    return os.path.join(base, "check") if check else base
