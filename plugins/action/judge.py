# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of relight.recovery.judge: record what a gate said, and stop the host where it must not go on."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.relight.recovery.plugins.module_utils import report
from ansible_collections.relight.recovery.plugins.plugin_utils.run_folder import RunFolder, of_task


class ActionModule(ActionBase):
    """One place decides: fail and unknown stop the host, warn goes on, a check run goes past what an act would mend."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        looked = self._task.args["result"]
        if looked.get("skipped"):
            return {**result, "changed": False, "skipped": True, "skip_reason": "the gate was skipped"}
        if "gate" not in looked:
            raise AnsibleActionFail(f"no gate in the result: {looked.get('msg', 'the module did not answer')}")
        gate = looked["gate"]
        check = self._task.check_mode
        folder = of_task(self, task_vars)
        host = task_vars["inventory_hostname"]
        if not folder.opened:  # a play of the user's own that uses our roles without the opening play
            folder.open(report.Run("by-hand", "roles", tuple(task_vars["ansible_play_hosts_all"]), check, (), round(time.time(), 3)))
        bad = [p for p in gate["problems"] if p["verdict"] in ("fail", "unknown")]
        if check and bad and self._mended_by_an_act(folder, host, looked, bad):
            bad = []
            gate = {**gate, "verdict": "unknown", "summary": f"{report.PLANNED}: {gate['summary']}"}
        stops = bool(bad) and self._task.args.get("stops", True)
        message = "; ".join(report.sentence(p) for p in bad)
        folder.add(
            host,
            {
                "kind": "gate",
                "stage": looked.get("stage", ""),
                "gate": gate,
                "changed": bool(looked.get("changed")),
                "actions": looked.get("actions", []),
                "waited_seconds": looked.get("waited_seconds", 0.0),
                "assessed": not self._task.args.get("stops", True),
                "stopped": stops,
                "message": message if stops else None,
            },
        )
        result.update(changed=False, verdict=gate["verdict"], summary=gate["summary"])
        if not stops:
            return result
        needed = sorted({p["consent"] for p in bad if p.get("consent")})
        paste = f" To consent, paste: {report.paste_line(folder.run(), needed)}" if needed else ""
        raise AnsibleActionFail(f"{gate['name']} says {gate['verdict']}: {message}{paste}")

    def _mended_by_an_act(self, folder: RunFolder, host: str, looked: dict[str, Any], bad: list[dict[str, Any]]) -> bool:
        """In a check run: would the real run have mended this by now?

        So it would where the gate itself planned the act and has the consent for it, where the gate says that it waits
        for an act, and where the play says so (`after_acts`) and an earlier gate of this run planned something.
        """
        if any(p["code"] == report.PLANNED for p in bad):
            return True
        if any(p.get("consent") and p["consent"] not in folder.run().consent for p in bad):
            return False
        if looked.get("actions"):
            return True
        return self._task.args.get("after_acts", False) and any(record.get("actions") for record in folder.records(host))
