# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of relight.recovery.consents: before the first act, one stop names all that needs consent."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.relight.recovery.plugins.module_utils import report
from ansible_collections.relight.recovery.plugins.plugin_utils.run_folder import RunFolder, folder_of


class ActionModule(ActionBase):
    """Stops the host where an earlier look found something that recovery may not touch without consent."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        report_dir = self._templar.template(task_vars["relight_report_dir"])
        folder = RunFolder(folder_of({"relight_report_dir": report_dir}, self._task.check_mode))
        run = folder.run()
        host = task_vars["inventory_hostname"]
        problems = {
            p["consent"]: p
            for record in folder.records(host)
            if record.get("kind") == "gate"
            for p in record["gate"]["problems"]
            if p.get("consent") and p["consent"] not in run.consent
        }
        result.update(changed=False, needed=sorted(problems))
        if not problems:
            return result
        sentences = "; ".join(report.sentence(problems[name]) for name in sorted(problems))
        paste = report.paste_line(run, sorted(problems))
        message = f"recovery needs your consent before it changes anything. {sentences} To consent, paste: {paste}"
        gate = {
            "name": "consents",
            "verdict": "fail",
            "summary": message,
            "evidence": {"needed": sorted(problems)},
            "problems": [],
            "seconds": 0.0,
        }
        folder.add(host, {"kind": "gate", "stage": "assess", "gate": gate, "stopped": True, "message": message})
        raise AnsibleActionFail(message)
