# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Build hook: an editable install links the collection (dev-mode-dirs) and must not copy it, since that copy would grow stale."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EditableWithoutCopies(BuildHookInterface[Any]):
    """Takes the place of the wheel's forced files in an editable install; an empty mapping would not count."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["force_include_editable"] = {"relight/py.typed": "relight/py.typed"}
