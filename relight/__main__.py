# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m relight` is the command `relight`."""

from __future__ import annotations

import sys

from relight.cli import main

if __name__ == "__main__":
    sys.exit(main())
