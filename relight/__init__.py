# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Relight: bring a GPU host back after an infrastructure catastrophe and resume hidden-state extraction, proven."""

from __future__ import annotations

__version__ = "0.1.0"
