# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Put this folder on PYTHONPATH and the interpreter gets the demo's import stand-ins (see stand_ins.py)."""

import stand_ins

stand_ins.install()
