# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The resume client: from records through the server's dump directory to samples that count."""
