# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Controller side of relight.recovery.migration_progress: polls the module of the same name until it settles."""

from __future__ import annotations

from ansible_collections.relight.recovery.plugins.plugin_utils.polling import PollingAction


class ActionModule(PollingAction):
    """See PollingAction."""
