# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The baseline on the controller: a readable file of variables, `relight_baseline.yml`, by default among the inventory's host_vars."""

from __future__ import annotations

import json
import os
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail
from ansible.parsing.dataloader import DataLoader
from ansible_collections.relight.recovery.plugins.module_utils import durable

NAME = "relight_baseline.yml"
VARIABLE = "relight_baseline"
HEAD = """\
---
# The known-good state of {host}, written by `relight adopt`. Recovery compares the host with it, and this file rules.
# Adopt again after a change that was meant; it shows what differs. Lines may be edited or removed: what is not here is not compared.
"""
TEMPLATE_MARKS = ("{{", "{%", "{#")


class _Unsafe(str):
    """Text that looks like a template: Ansible must never evaluate what a host's process said of itself."""


class _Dumper(yaml.SafeDumper):
    """Indents lists as the rest of the repository has them, and marks unsafe text."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_Dumper.add_representer(_Unsafe, lambda dumper, value: dumper.represent_scalar("!unsafe", str(value)))


def text(value: dict[str, Any]) -> str:
    """The baseline as YAML for people and for Ansible."""
    safe = _marked(json.loads(json.dumps(value)))
    body = yaml.dump({VARIABLE: safe}, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True, default_flow_style=False)
    return HEAD.format(host=value.get("host", "this host")) + body


def _marked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    return _Unsafe(value) if isinstance(value, str) and any(mark in value for mark in TEMPLATE_MARKS) else value


def read(folder: str) -> dict[str, Any] | None:
    """The baseline in a folder, or None where there is no file. Raises AnsibleActionFail for a file that is none."""
    path = os.path.join(folder, NAME)
    if not os.path.exists(path):
        return None
    found = DataLoader().load_from_file(path)
    value = found.get(VARIABLE) if isinstance(found, dict) else None
    if not isinstance(value, dict):
        raise AnsibleActionFail(f"{path} holds no {VARIABLE}; remove or correct it")
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return plain


def write(folder: str, content: str) -> str:
    """Replace the file durably. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, NAME)
    with durable.replacing(path) as handle:
        handle.write(content.encode())
    return path
