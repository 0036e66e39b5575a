# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The known-good state that adopt recorded of a host, wherever the inventory keeps it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: baseline
short_description: The known-good state that adopt recorded of a host
version_added: 0.1.0
author: Relight authors (@relight)
description:
  - Reads C(relight_baseline.yml) in a folder on the controller. Nothing in it is ever evaluated as a template.
options:
  _terms:
    description: Folders on the controller.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: When was this host adopted?
  ansible.builtin.debug:
    msg: "{{ lookup('relight.recovery.baseline', relight_baseline_dir).time }}"
"""

RETURN = r"""
_raw:
  description: For each folder the baseline, empty where there is none.
  type: list
  elements: dict
"""

import os
from typing import Any

from ansible.plugins.lookup import LookupBase
from ansible_collections.relight.recovery.plugins.plugin_utils import baseline_file


class LookupModule(LookupBase):
    """See DOCUMENTATION."""

    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        self.set_options(var_options=variables, direct=kwargs)
        return [baseline_file.read(os.path.abspath(os.path.expanduser(str(folder)))) or {} for folder in terms]
