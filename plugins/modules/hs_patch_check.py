#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one bounded look, one judgement, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_patch_check
short_description: Will the server that starts dump hidden states, and the right ones?
version_added: 0.1.0
description:
  - Asks the very interpreter that will serve, with the server's environment, what it finds of SGLang and of Relight's
    plugin. SGLang is read as source and not imported, so that the look takes a second and touches no GPU.
  - Compares the functions that the plugin hooks with what it expects, since SGLang only logs a hook that fails; and runs
    SGLang's own layer arithmetic for the served model, since that has shifted between versions.
  - In mode V(patch), looks for the user's own source patch, whether it is whole, and for bytecode that hides it.
  - That the running server really dumps is proven by M(relight.recovery.sglang_ready).
attributes:
  check_mode:
    support: full
    description: Looks only.
options:
  python:
    description: The interpreter that will serve.
    type: path
    required: true
  env:
    description: The environment that the server will be started with.
    type: dict
    default: {}
  layers:
    description: The three layers to capture, as layer outputs counted from 0.
    type: list
    elements: int
    required: true
  model_dir:
    description: The directory of the served model, with its C(config.json).
    type: path
    required: true
  mode:
    description: Who dumps, Relight's plugin or the user's own source patch.
    type: str
    choices: [plugin, patch]
    default: plugin
  look_seconds:
    description: How long the look may take.
    type: float
    default: 60.0
extends_documentation_fragment:
  - relight.recovery.common
"""

EXAMPLES = r"""
- name: Look whether the server that starts will dump hidden states
  relight.recovery.hs_patch_check:
    python: /opt/sglang/bin/python
    env:
      RELIGHT_DUMP_DIR: /dev/shm/relight
      RELIGHT_DUMP_LAYERS: "1,29,57"
    layers: [1, 29, 57]
    model_dir: /models/kimi-k2.5
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems.
    - Evidence is among others C(sglang_version), C(plugin_version), C(plugin_file), C(hooks_found), C(layers_passed) (what
      SGLang will be given) and C(layers_captured) (the layer outputs that it will then capture).
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import bounded, glue, hs_patch


def look(wanted: hs_patch.Wanted) -> hs_patch.Seen | tuple[str, str]:
    """What was seen, or the code and sentence of what kept us from seeing. In the bounded child."""
    try:
        return hs_patch.look(wanted)
    except hs_patch.CannotLook as error:
        return error.code, str(error)


def run(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    env = {str(key): str(value) for key, value in params["env"].items()}
    wanted = hs_patch.Wanted(params["python"], env, tuple(params["layers"]), params["model_dir"], params["mode"])
    try:
        seen = bounded.call(look, (wanted,), params["look_seconds"])
    except bounded.TimedOut:
        what = f"it gave no answer within {params['look_seconds']:g} s"
        return glue.Outcome(hs_patch.unknown("timed-out", wanted.python, what))
    if isinstance(seen, tuple):
        return glue.Outcome(hs_patch.unknown(seen[0], wanted.python, seen[1]))
    return glue.Outcome(hs_patch.judge(seen, wanted))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            "python": {"type": "path", "required": True},
            "env": {"type": "dict", "default": {}},
            "layers": {"type": "list", "elements": "int", "required": True},
            "model_dir": {"type": "path", "required": True},
            "mode": {"type": "str", "choices": ["plugin", "patch"], "default": "plugin"},
            "look_seconds": {"type": "float", "default": 60.0},
        },
        supports_check_mode=True,
    )
    glue.main(module, "hs_patch_check", lambda: run(module))


if __name__ == "__main__":
    main()
