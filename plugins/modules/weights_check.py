#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one bounded look, one judgement, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: weights_check
short_description: Are all weight shards whole and of this model?
version_added: 0.1.0
description:
  - Reads the header of every safetensors file in a model directory, its C(model.safetensors.index.json) and its
    C(config.json), and finds shards that are missing, truncated, extended, swapped or left over, an index that names
    tensors which no shard has, and weights that are not those of the configuration or of the baseline.
  - Headers carry no checksum. Bytes that were changed under an unchanged length are found only where O(digests) are given.
  - What this user may not read is V(unknown), never V(pass).
attributes:
  check_mode:
    support: full
    description: Looks only, in every mode.
options:
  path:
    description: The model directory.
    type: path
    required: true
  shards:
    description: How many weight files the model has. Without it the index alone is believed.
    type: int
  fingerprint:
    description:
      - The fingerprint that this gate gave on a healthy host, C(headers:) and a digest over names, lengths and headers.
    type: str
  digests:
    description:
      - The sha256 of files in O(path), by name. Each of them is read whole, once - the digest of a file that did not change
        since is known from O(state_dir).
    type: dict
    default: {}
  complete:
    description: Whether O(digests) names every weight file, so that another one is a fault.
    type: bool
    default: false
  reread:
    description: Whether to read files although their digests are known.
    type: bool
    default: false
  timeout_seconds:
    description: How long the look may take, digests included, before the directory counts as hanging.
    type: float
    default: 600.0
extends_documentation_fragment:
  - relight.recovery.common
"""

EXAMPLES = r"""
- name: See whether the weights are whole
  relight.recovery.weights_check:
    path: /data/models/Kimi-K2.5
    shards: 64

- name: See whether they are those that the samples were made with
  relight.recovery.weights_check:
    path: /data/models/Kimi-K2.5
    fingerprint: headers:0f343b0931126a20f133d67c2b018a3b
    digests: "{{ relight_baseline.weights.digests }}"
    complete: true
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems.
    - Evidence is C(shards), C(tensors), C(bytes), C(dtype_bytes), C(layers), C(lm_head) (the name of the
      output head, which a trainer must be told where it is nested), C(fingerprint), what it was C(compared_with)
      and how many bytes were read for that (C(digested_bytes)).
  returned: always
  type: dict
actions:
  description: Always empty, a look does nothing.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import bounded, glue
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.weights import Expected, Reading, judge, look


def check(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    path = params["path"]
    expected = Expected(params["shards"], params["fingerprint"], params["digests"], params["complete"])
    seconds = params["timeout_seconds"]
    reading = Reading(
        files=tuple(sorted(expected.digests)),
        cache_dir=params["state_dir"],
        write=not module.check_mode,
        reread=params["reread"],
        seconds=max(seconds / 2, seconds - 15),  # what is read by then is remembered; only a disk that hangs takes longer
    )
    try:
        seen = bounded.call(look, (path, reading), seconds)
    except bounded.TimedOut as error:
        hung = Problem("mount-hung", path, str(error), "free the mount that holds it, or raise timeout_seconds", Verdict.UNKNOWN)
        return glue.Outcome(Gate("weights_check", problems=[hung]))
    except bounded.ChildFailed as error:
        unread = Problem("weights-unreadable", path, str(error), "make it readable for this user, or run with become", Verdict.UNKNOWN)
        return glue.Outcome(Gate("weights_check", problems=[unread]))
    return glue.Outcome(judge(seen, expected))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **glue.COMMON,
            "path": {"type": "path", "required": True},
            "shards": {"type": "int"},
            "fingerprint": {"type": "str"},
            "digests": {"type": "dict", "default": {}},
            "complete": {"type": "bool", "default": False},
            "reread": {"type": "bool", "default": False},
            "timeout_seconds": {"type": "float", "default": 600.0},
        },
        supports_check_mode=True,
    )
    glue.main(module, "weights_check", lambda: check(module))


if __name__ == "__main__":
    main()
