# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What every module of this collection does around its one call: options, journal, lock, time, exit.

Of AnsibleModule it touches params, check_mode, exit_json and fail_json only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

from ansible_collections.relight.recovery.plugins.module_utils import consent
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.journal import Busy, Journal, recovery_lock

if TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

# The options of doc fragment relight.recovery.common.
COMMON: dict[str, dict[str, Any]] = {
    "state_dir": {"type": "path"},
    "run": {"type": "str", "default": ""},
    "stage": {"type": "str", "default": ""},
}
# The further options of doc fragment relight.recovery.act.
ACT: dict[str, dict[str, Any]] = {
    "consent": {"type": "raw"},
    "lock_wait_seconds": {"type": "float", "default": 60.0},
}
# The further options of doc fragment relight.recovery.poll: for the action plugin, which polls the module.
POLL: dict[str, dict[str, Any]] = {
    "wait_seconds": {"type": "float", "default": 0.0},
    "poll_seconds": {"type": "float", "default": 2.0},
}


@dataclass
class Outcome:
    """What a module's call came to. `actions` are sentences: done, or in check mode what would be done."""

    gate: Gate
    changed: bool = False
    actions: list[str] = field(default_factory=list)
    diff: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)


def main(module: AnsibleModule, step: str, call: Callable[[], Outcome], acts: bool = False) -> None:
    """Run one look or act between its journal lines and end the module.

    The gate bears the step's name. A look that breaks is a gate with verdict unknown, not a module failure. An act holds
    the recovery lock. Check mode neither journals nor locks. Nothing is journaled for a look without `state_dir`. A journal
    that cannot be written, as on a full disk, does not keep a gate from looking nor an act from making room: the result
    says `journal_error`.
    """
    params = module.params
    start = time.monotonic()
    state_dir = params["state_dir"]
    journal = Journal(None if module.check_mode else state_dir, params["run"], params["stage"], step)
    journal_error = _written(journal, "begin")
    try:
        if acts and not module.check_mode:
            with recovery_lock(state_dir, f"{step} of run {params['run'] or 'by hand'}", params["lock_wait_seconds"]):
                outcome = call()
        else:
            outcome = call()
    except (Busy, consent.BadConsent) as error:
        module.fail_json(msg=str(error))
    except Exception as error:  # a gate that cannot look says so: whatever went wrong, the verdict is unknown
        problem = Problem(
            "look-failed",
            step,
            f"{type(error).__name__}: {error}",
            "run the play again with -vvv; the cause is in the message",
            Verdict.UNKNOWN,
        )
        outcome = Outcome(Gate(step, problems=[problem]))
    seconds = time.monotonic() - start
    outcome.gate.name = step
    gate = outcome.gate.result(seconds)
    ended = {key: gate[key] for key in ("verdict", "summary", "seconds")}
    journal_error = _written(journal, "end", **ended, changed=outcome.changed, actions=outcome.actions) or journal_error
    result: dict[str, Any] = {
        "changed": outcome.changed,
        "gate": gate,
        "actions": outcome.actions,
        "stage": params["stage"],
        **outcome.more,
    }
    if outcome.diff is not None:
        result["diff"] = outcome.diff
    if journal_error:
        result["journal_error"] = journal_error
    module.exit_json(**result)


def _written(journal: Journal, event: str, **more: Any) -> str | None:
    """Journal a line; what kept it from being written, or None."""
    try:
        journal.write(event, **more)
    except OSError as error:
        return f"{journal.path}: {error.strerror}"
    return None
