# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The embedded host and its disaster: `make demo`. Never part of the wheel or the collection."""
