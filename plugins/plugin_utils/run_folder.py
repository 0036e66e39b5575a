# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The run's folder on the controller: records as they come, report.json kept true at every moment, report.html."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import jinja2
from ansible_collections.relight.recovery.plugins.module_utils import durable, report

TEMPLATE = os.path.join(os.path.dirname(__file__), "..", "..", "roles", "report", "templates", "report.html.j2")


KEPT = 50  # runs whose records stay


class RunFolder:
    """`<folder>/runs/<run>/{run.json,<host>.jsonl,report.json,report.html}`, and the latest run's in `<folder>`. Raises OSError.

    Each run has records of its own, so that two at once never speak for each other. Without `name` it is the latest run.
    """

    def __init__(self, folder: str, name: str = "") -> None:
        self.folder = folder
        self.report_file = os.path.join(folder, "report.json")
        self._latest_file = os.path.join(folder, "run.json")
        self.name = name or self._latest()

    @property
    def opened(self) -> bool:
        return bool(self.name) and os.path.exists(os.path.join(self._own, "run.json"))

    @property
    def _own(self) -> str:
        return os.path.join(self.folder, "runs", self.name)

    def _latest(self) -> str:
        try:
            with open(self._latest_file, encoding="utf-8") as handle:
                return str(json.load(handle)["name"])
        except FileNotFoundError:
            return ""

    def open(self, run: report.Run) -> None:
        """Begin a run, from now on the latest: every expected host starts as not-clear."""
        self.name = run.name
        os.makedirs(self._own, exist_ok=True)
        with self._lock():
            durable.write_json(os.path.join(self._own, "run.json"), asdict(run))
            durable.write_json(self._latest_file, asdict(run))
            for former in sorted(os.listdir(os.path.join(self.folder, "runs")))[:-KEPT]:
                shutil.rmtree(os.path.join(self.folder, "runs", former), ignore_errors=True)
        self.write_html()  # at once: the page of a run that reaches nobody must not be that of the run before

    def run(self) -> report.Run:
        """The run that was opened here. Raises FileNotFoundError where none was."""
        with open(os.path.join(self._own, "run.json"), encoding="utf-8") as handle:
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
            for folder in self._places():
                with durable.replacing(os.path.join(folder, "report.html")) as out:
                    out.write(page.encode())
        return value

    def _write(self) -> dict[str, Any]:
        run = self.run()
        value = report.report(run, {host: self.records(host) for host in run.hosts}, time.time())
        for folder in self._places():
            durable.write_json(os.path.join(folder, "report.json"), value)
        return value

    def _places(self) -> list[str]:
        """The run's own folder, and the shared one while no later run has been opened."""
        return [self._own, self.folder] if self._latest() == self.name else [self._own]

    def _host_file(self, host: str) -> str:
        return os.path.join(self._own, f"{host.replace('/', '_')}.jsonl")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with open(os.path.join(self.folder, ".lock"), "w", encoding="ascii") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def folder_of(report_dir: Any, check: bool) -> str:
    """Where this run reports: a check run has a folder of its own, so that it never overwrites a real report."""
    base = os.path.abspath(os.path.expanduser(str(report_dir)))
    return os.path.join(base, "check") if check else base


def of_task(action: Any, task_vars: dict[str, Any]) -> RunFolder:
    """The folder of the run that an action plugin's task belongs to."""
    report_dir = action._templar.template(task_vars["relight_report_dir"])
    name = action._templar.template(task_vars.get("relight_run") or "")
    return RunFolder(folder_of(report_dir, action._task.check_mode), name)
