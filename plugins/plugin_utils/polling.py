# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Waiting for a gate: one short task a poll, so that a dropped connection costs one poll, and a line when something moves."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class PollingAction(ActionBase):
    """Runs the module of the task's own name until it says `settled`, or until `wait_seconds` have passed.

    Action-only options, taken off before the module sees them: wait_seconds (0: look once), poll_seconds.
    A poll that loses its connection is tried again until `lost_seconds` in a row have been lost.
    """

    TRANSFERS_FILES = False
    lost_seconds = 300.0

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        options = dict(self._task.args)
        wait = float(options.pop("wait_seconds", 0))
        every = float(options.pop("poll_seconds", 2))
        host = task_vars["inventory_hostname"]
        start = last_answer = time.monotonic()
        shown = None
        while True:
            try:
                looked = self._execute_module(module_args=options, task_vars=task_vars)
                last_answer = time.monotonic()
            except AnsibleConnectionFailure as error:
                if time.monotonic() - last_answer > self.lost_seconds:
                    raise
                display.warning(f"{host}: lost the connection while waiting ({error}); trying again")
                self._connection.reset()
                looked = None
            waited = time.monotonic() - start
            if looked is not None:
                if looked.get("failed") or "gate" not in looked:
                    return {**result, **looked}
                progress = looked.get("progress")
                if progress and progress != shown:
                    display.display(f"  {host}: {progress} ({waited:.0f} s)")
                    shown = progress
                if looked.get("settled") or self._task.check_mode:
                    return {**result, **looked, "waited_seconds": round(waited, 1)}
                if waited >= wait:
                    return {**result, **self._gave_up(looked, wait), "waited_seconds": round(waited, 1)}
            time.sleep(every)  # the condition lies on another machine: it can only be polled

    def _gave_up(self, looked: dict[str, Any], wait: float) -> dict[str, Any]:
        """A look at a single moment is as it is; a wait that ran out is unknown, never pass."""
        if wait <= 0:
            return looked
        gate = looked["gate"]
        problem = {
            "code": "wait-ran-out",
            "where": gate["name"],
            "what": f"not settled after {wait:.0f} s: {looked.get('progress') or gate['summary']}",
            "remedy": "run the play again, it attaches where it left off; raise the wait if this is the usual pace",
            "verdict": "unknown",
            "consent": None,
        }
        summary = f"{problem['where']}: {problem['what']}"
        return {**looked, "gate": {**gate, "verdict": "unknown", "summary": summary, "problems": [*gate["problems"], problem]}}
