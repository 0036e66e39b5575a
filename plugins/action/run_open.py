# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of relight.recovery.run_open: nothing runs on a host before this has said what is expected."""

from __future__ import annotations

import os
import re
import secrets
import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.relight.recovery.plugins.module_utils import consent, report
from ansible_collections.relight.recovery.plugins.plugin_utils.run_folder import RunFolder, folder_of

ALWAYS_KNOWN = {"all", "always", "never", "tagged", "untagged"}


class Refused(Exception):
    """The run cannot be opened; the message is for the operator."""


class ActionModule(ActionBase):
    """Refuses an empty group, unknown tags and unusable variables; starts every expected host as not-clear."""

    _requires_connection = False
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        kind = self._task.args["kind"]
        asked = set(task_vars.get("ansible_run_tags", ())) | set(task_vars.get("ansible_skip_tags", ()))
        hosts: tuple[str, ...] = ()
        granted: frozenset[str] = frozenset()
        refused = ""
        try:
            hosts = self._expected_hosts(task_vars)
            self._check_tags(asked)
            for host in hosts:
                granted = self._check_host(host, task_vars["hostvars"][host])
        except Refused as error:
            refused = str(error)
        run = report.Run(
            name=f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}",
            kind=kind,
            hosts=hosts,
            check=self._task.check_mode,
            tags=() if asked <= {"all"} else tuple(sorted(asked)),
            started=round(time.time(), 3),
            consent=tuple(sorted(granted)),
            command=self._command(task_vars, kind),
            refused=refused,
        )
        folder = RunFolder(folder_of(self._report_dir(task_vars, hosts), run.check), run.name)
        folder.open(run)
        if refused:
            raise AnsibleActionFail(refused)
        result.update(changed=False, run=run.name, report=folder.report_file, ansible_facts={"relight_run": run.name})
        return result

    def _expected_hosts(self, task_vars: dict[str, Any]) -> tuple[str, ...]:
        """The group's hosts, less those that a --limit of plain names leaves out."""
        group, groups = self._task.args["group"], task_vars["groups"]
        parts = [groups.get(part, [part] if part in groups["all"] else []) for part in re.split("[,:]", group)]
        hosts = tuple(dict.fromkeys(host for part in parts for host in part)) if all(parts) else ()
        if not hosts:
            known = ", ".join(sorted(g for g in groups if g not in ("all", "ungrouped")))
            if not known:
                raise Refused(f"the inventory has no group {group!r} and no other; name yours with -i, as in -i inventory/mine")
            raise Refused(f"no host is in the group {group!r}; set relight_target to one of the inventory's groups or hosts: {known}")
        limit = task_vars.get("ansible_limit")
        if not limit:
            return hosts
        named = {host for part in re.split("[,:]", limit) for host in groups.get(part, [part])}
        limited = tuple(host for host in hosts if host in named)
        return limited or hosts  # a pattern: those that it leaves out stay not-clear, which is true

    def _check_tags(self, asked: set[str]) -> None:
        unknown = sorted(asked - ALWAYS_KNOWN - set(report.STAGES))
        if unknown:
            raise Refused(f"unknown tag {', '.join(unknown)}; the stages are: {', '.join(report.STAGES)}")

    def _check_host(self, host: str, variables: Any) -> frozenset[str]:
        """The consent that the host's variables grant. Raises Refused where they are unusable."""
        missing = [name for name in self._task.args.get("required") or [] if variables.get(name) in (None, "", [])]
        if missing:
            raise Refused(
                f"host {host}: set {', '.join(missing)} in the inventory; ansible-doc -t role relight.recovery.relight tells each"
            )
        try:
            return consent.read(variables.get("relight_consent"))
        except consent.BadConsent as error:
            raise Refused(f"host {host}: {error}") from None

    def _report_dir(self, task_vars: dict[str, Any], hosts: tuple[str, ...]) -> str:
        """The hosts' own, where the inventory sets it; else the play's.

        A run that expects no host, say for a mistyped group, reports where the inventory's other hosts would.
        """
        for host in (*hosts, *task_vars["groups"]["all"]):
            own = task_vars["hostvars"][host].get("relight_report_dir")
            if own:
                return str(own)
        return str(self._task.args["report_dir"])

    @staticmethod
    def _command(task_vars: dict[str, Any], kind: str) -> str:
        """The command as the operator typed it, as far as Ansible tells: playbook and inventories."""
        sources = [os.path.relpath(source) for source in task_vars.get("ansible_inventory_sources") or () if "," not in source]
        inventory = "".join(f" -i {source}" for source in sources)
        return f"ansible-playbook{inventory} {kind + '.yml' if os.path.exists(f'{kind}.yml') else 'relight.recovery.' + kind}"
