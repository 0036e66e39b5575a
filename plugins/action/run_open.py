# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of relight.recovery.run_open: nothing runs on a host before this has said what is expected."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.relight.recovery.plugins.module_utils import consent, report
from ansible_collections.relight.recovery.plugins.plugin_utils.run_folder import RunFolder, folder_of

ALWAYS_KNOWN = {"all", "always", "never", "tagged", "untagged"}


class ActionModule(ActionBase):
    """Refuses an empty group, unknown tags and unusable variables; starts every expected host as not-clear."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        group, kind = self._task.args["group"], self._task.args["kind"]
        groups = task_vars["groups"]
        hosts = tuple(groups.get(group, ()))
        if not hosts:
            known = ", ".join(sorted(g for g in groups if g not in ("all", "ungrouped"))) or "none"
            raise AnsibleActionFail(f"no host is in the group {group!r}; the inventory's groups are: {known}. Set relight_target to one of them")
        known_tags = ALWAYS_KNOWN | set(self._task.args.get("tags_known") or report.STAGES)
        asked = set(task_vars.get("ansible_run_tags", ())) | set(task_vars.get("ansible_skip_tags", ()))
        unknown = sorted(asked - known_tags)
        if unknown:
            raise AnsibleActionFail(f"unknown tag {', '.join(unknown)}; the stages are: {', '.join(report.STAGES)}")
        for host in hosts:
            self._check_host(host, task_vars["hostvars"][host])
        first = task_vars["hostvars"][hosts[0]]
        report_dir = first.get("relight_report_dir") or task_vars["relight_report_dir"]
        tags = () if set(task_vars.get("ansible_run_tags", ("all",))) == {"all"} and not task_vars.get("ansible_skip_tags") else tuple(sorted(asked))
        run = report.Run(
            name=f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}",
            kind=kind,
            hosts=hosts,
            check=self._task.check_mode,
            tags=tags,
            started=round(time.time(), 3),
            consent=tuple(sorted(self._consent(first))),
            command=self._command(task_vars, kind),
        )
        RunFolder(folder_of({"relight_report_dir": report_dir}, run.check)).open(run)
        result.update(changed=False, run=run.name, ansible_facts={"relight_run": run.name})
        return result

    @staticmethod
    def _consent(host: Any) -> frozenset[str]:
        try:
            return consent.read(host.get("relight_consent"))
        except consent.BadConsent as error:
            raise AnsibleActionFail(str(error)) from None

    def _check_host(self, host: str, variables: Any) -> None:
        missing = [name for name in self._task.args.get("required") or [] if variables.get(name) in (None, "")]
        if missing:
            raise AnsibleActionFail(f"host {host}: set {', '.join(missing)} in the inventory; inventory/example shows each with its meaning")
        self._consent(variables)

    @staticmethod
    def _command(task_vars: dict[str, Any], kind: str) -> str:
        """The command as the operator typed it, as far as Ansible tells: playbook and inventories."""
        sources = [os.path.relpath(source) for source in task_vars.get("ansible_inventory_sources") or ()]
        inventory = "".join(f" -i {source}" for source in sources if "," not in source)
        local = os.path.exists(f"{kind}.yml")
        return f"ansible-playbook{inventory} {kind + '.yml' if local else 'relight.recovery.' + kind}"
