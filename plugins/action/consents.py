# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of relight.recovery.consents: before the first act, one stop names all that is in the way."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.relight.recovery.plugins.module_utils import report
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate
from ansible_collections.relight.recovery.plugins.plugin_utils.run_folder import of_task


class ActionModule(ActionBase):
    """Stops the host where a look found what recovery may not touch without consent, or cannot mend at all."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        folder = of_task(self, task_vars)
        run = folder.run()
        host = task_vars["inventory_hostname"]
        gates = [record["gate"] for record in folder.records(host) if record.get("kind") == "gate"]
        over = self._task.args.get("passed_over") or []
        open_ = [p for gate in gates if gate["name"] not in over for p in gate["problems"] if p.get("consent")]
        asked = {p["consent"]: p for p in open_ if p["consent"] not in run.consent}
        beyond = self._task.args.get("beyond") or []
        given_up = [p for gate in gates if gate["name"] in beyond for p in gate["problems"] if p["verdict"] in ("fail", "unknown")]
        result.update(changed=False, needed=sorted(asked))
        parts = []
        if given_up:
            parts.append(f"what recovery is given is not right. {'; '.join(map(report.sentence, given_up))}")
        if asked:
            sentences = "; ".join(report.sentence(asked[name]) for name in sorted(asked))
            parts.append(f"recovery needs your consent. {sentences} To consent, paste: {report.paste_line(run, sorted(asked))}")
        if not parts:
            return result
        message = f"stopped before the first change: {' Also, '.join(parts)}"
        gate = Gate("consents", {"needed": sorted(asked)}).result(0.0)
        gate.update(verdict="fail", summary=message)
        folder.add(host, {"kind": "gate", "stage": "assess", "gate": gate, "stopped": True, "message": message})
        raise AnsibleActionFail(message)
