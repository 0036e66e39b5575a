# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Consent names the very object: whole strings in a list, matched against what is found on the host."""

from __future__ import annotations

from typing import Any


class BadConsent(Exception):
    """relight_consent is not a list of names; the message is for the operator."""


def read(value: Any) -> frozenset[str]:
    """The granted names. A bare string is refused: Ansible would split it at commas. Raises BadConsent."""
    if value is None:
        return frozenset()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise BadConsent(f'relight_consent: must be a list of names, not {value!r}; write -e \'{{"relight_consent": ["NAME"]}}\'')
    return frozenset(value)
