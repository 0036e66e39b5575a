#!/usr/bin/python
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Glue only: options in, one bounded look, one judgement, result out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dataset_check
short_description: Is the training data whole, and is it what the samples were made of?
version_added: 0.1.0
description:
  - Reads a JSON array or a JSONL file record by record, with bounded memory. A record holds C(input_ids) and C(loss_mask), or
    C(messages) (also C(conversations)).
  - Finds a file that is truncated or not JSON, records without ids or text, masks of another length than their ids, ids that come
    twice, and another number of records or tokens than the inventory says.
  - Once a run has fixed the records, each is compared with its fixed one by a digest, so that a record that changed under an
    unchanged count is found and named, text without a tokenizer too. Records that were appended are no problem.
attributes:
  check_mode:
    support: full
    description: Looks only, in every mode.
options:
  path:
    description: The training data.
    type: path
    required: true
  records:
    description: How many records it holds.
    type: int
  tokens:
    description: How many tokens its first O(records) records hold together.
    type: int
  digest:
    description: The digest that this gate gave of the data's first O(digest_records) records on a healthy host.
    type: str
  digest_records:
    description: How many records O(digest) covers.
    type: int
  baseline:
    description: The directory of the records that the first run fixed. By default the C(dataset) folder of O(state_dir).
    type: path
  timeout_seconds:
    description: How long the look may take before the file system counts as hanging.
    type: float
    default: 600.0
extends_documentation_fragment:
  - relight.recovery.common
"""

EXAMPLES = r"""
- name: See whether the training data is whole and unchanged
  relight.recovery.dataset_check:
    path: /data/train.jsonl
    records: 37312
    tokens: 87700000
    state_dir: /var/lib/relight
"""

RETURN = r"""
gate:
  description:
    - The verdict with its evidence and problems.
    - Evidence is C(bytes), C(records), C(tokens) (null where text was never tokenized), C(digest) of the whole, C(fixed_records),
      and how many records are C(changed), C(appended) or have C(duplicate_ids).
  returned: always
  type: dict
actions:
  description: Always empty, a look does nothing.
  returned: always
  type: list
  elements: str
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.relight.recovery.plugins.module_utils import bounded, glue
from ansible_collections.relight.recovery.plugins.module_utils.dataset_gate import Expected, judge, look
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict


def check(module: AnsibleModule) -> glue.Outcome:
    params = module.params
    path, baseline = params["path"], params["baseline"]
    if not baseline and params["state_dir"]:
        baseline = os.path.join(params["state_dir"], "dataset")
    expected = Expected(params["records"], params["tokens"], params["digest"], params["digest_records"])
    try:
        seen = bounded.call(look, (path, baseline, expected), params["timeout_seconds"])
    except bounded.TimedOut as error:
        problem = Problem("mount-hung", path, str(error), "free the mount that holds it, or raise timeout_seconds", Verdict.UNKNOWN)
    except bounded.ChildFailed as error:
        if error.kind == "FileNotFoundError":
            problem = Problem("dataset-missing", path, "does not exist", "mount its file system, or put the data back")
        else:
            problem = Problem("dataset-unreadable", path, str(error), "make it readable for this user, or run with become", Verdict.UNKNOWN)
    else:
        return glue.Outcome(judge(path, seen, expected))
    return glue.Outcome(Gate("dataset_check", problems=[problem]))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "records": {"type": "int"},
            "tokens": {"type": "int", "no_log": False},
            "digest": {"type": "str"},
            "digest_records": {"type": "int"},
            "baseline": {"type": "path"},
            "timeout_seconds": {"type": "float", "default": 600.0},
            **glue.COMMON,
        },
        required_by={"digest": ("digest_records",)},
        supports_check_mode=True,
    )
    glue.main(module, "dataset_check", lambda: check(module))


if __name__ == "__main__":
    main()
