# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The SGLang plugin: hidden states of marked requests, from inside the server to the dump directory."""
