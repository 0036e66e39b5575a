# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of relight.recovery.run_close: a host that came to its end is closed, and the report is written."""

from __future__ import annotations

import os
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.relight.recovery.plugins.plugin_utils.run_folder import of_task

display = Display()


class ActionModule(ActionBase):
    """`ended` marks the host as having come to the end of its stages; without it only the report is written."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        folder = of_task(self, task_vars)
        host = task_vars["inventory_hostname"]
        # Every play closes a second time, for a host that was stopped: one that came to its end has been told of.
        told = not self._task.args.get("ended") and any(record.get("kind") == "closed" for record in folder.records(host))
        if self._task.args.get("ended"):
            folder.add(host, {"kind": "closed", "journal": self._task.args.get("journal") or []})
        value = folder.write_html()
        part = value["hosts"][host]
        if not told:
            display.display(f"\n{host}: {part['verdict'].upper()}: {part['reason']}")
            if value["paste"]:
                display.display(f"To consent, paste:\n{value['paste']}")
            display.display(f"The report: {os.path.join(folder.folder, 'report.html')}")
        result.update(changed=False, verdict=part["verdict"], report=folder.report_file)
        return result
