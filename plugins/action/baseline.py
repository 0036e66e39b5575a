# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of relight.recovery.baseline: the host is looked at by the module, the file is written here."""

from __future__ import annotations

import difflib
import os
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.relight.recovery.plugins.module_utils import baseline
from ansible_collections.relight.recovery.plugins.plugin_utils import baseline_file

display = Display()


class ActionModule(ActionBase):
    """Reads the known baseline, lets the module look and judge, prints what differs and writes what may be recorded."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        folder = os.path.abspath(os.path.expanduser(str(self._task.args["folder"])))
        known = baseline_file.read(folder)
        looked = self._execute_module(module_args={**self._task.args, "known": known}, task_vars=task_vars or {})
        result.update(looked)
        if looked.get("failed") or "baseline" not in looked:
            return result
        path = os.path.join(folder, baseline_file.NAME)
        if known and baseline.equal(looked["baseline"], known):
            return result
        before, after = baseline_file.text(known) if known else "", baseline_file.text(looked["baseline"])
        result["diff"] = {"before": before, "after": after, "before_header": path, "after_header": path}
        if known:
            changes = difflib.unified_diff(before.splitlines(), after.splitlines(), path, "this host now", lineterm="", n=1)
            display.display("\n" + "\n".join(changes))
        if looked["recorded"]:
            result.update(changed=True, actions=[*looked["actions"], f"write the baseline on the controller, {path}"])
            if not self._task.check_mode:
                baseline_file.write(folder, after)
        return result
