# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Recovery given wrong inputs: one sentence that says what, where and what to do; non-zero; nothing changed."""

from __future__ import annotations

import hashlib
import json
import os
import socket

import pytest

from tests.plays import recover
from tests.unit.test_weights import build

RECORDS = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [4, 5], "loss_mask": [1, 1]}]


@pytest.fixture
def inputs(tmp_path):
    """Variables of a host whose model and records are right."""
    build(tmp_path / "model")
    (tmp_path / "records.json").write_text(json.dumps(RECORDS))
    (tmp_path / "data").mkdir()
    return {
        "relight_model_dir": str(tmp_path / "model"),
        "relight_dataset_path": str(tmp_path / "records.json"),
        "relight_store_dir": str(tmp_path / "data/store"),
        "relight_data_dir": str(tmp_path / "data"),
        "relight_server_port": free_port(),
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def digest(tmp_path):
    """Every file and its content but what a run may write: its report, its state, Ansible's own."""
    seen = {}
    for folder, folders, names in os.walk(tmp_path):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in {str(tmp_path / n) for n in ("report", "state", "tmp")}]
        for name in names:
            path = os.path.join(folder, name)
            seen[path] = hashlib.sha256(open(path, "rb").read()).hexdigest()
    seen.pop(str(tmp_path / "hosts.yml"), None)
    return seen


def torn(tmp_path, inputs):
    (tmp_path / "records.json").write_text(json.dumps(RECORDS)[:-9])
    return "dataset"


def without_tokens(tmp_path, inputs):
    (tmp_path / "records.json").write_text(json.dumps([*RECORDS, {"id": "x"}]))
    return "record 2"


def absent(tmp_path, inputs):
    inputs["relight_dataset_path"] = str(tmp_path / "other.json")
    return "other.json"


def too_few(tmp_path, inputs):
    inputs["relight_dataset_records"] = 3
    return "3"


def wrong_model(tmp_path, inputs):
    inputs["relight_model_dir"] = str(tmp_path / "data")
    return "weights-not-a-model"


def no_room(tmp_path, inputs):
    inputs["relight_data_reserve_bytes"] = 1 << 60
    return "storage-full"


def unknown_layout(tmp_path, inputs):
    inputs["relight_store_layout"] = "parquet"
    return "value of relight_store_layout must be one of"


@pytest.mark.parametrize("fault", [torn, without_tokens, absent, too_few, wrong_model, no_room, unknown_layout], ids=lambda f: f.__name__)
def test_wrong_input_is_refused_before_the_first_change(tmp_path, inputs, fault):
    told = fault(tmp_path, inputs)
    before = digest(tmp_path)
    code, output, report = recover(tmp_path, **inputs)
    assert code != 0
    assert told in output
    assert report["verdict"] == "not-clear"
    assert "changed=0" in output
    assert "changed=1" not in output
    assert digest(tmp_path) == before


def test_a_port_that_something_else_holds_is_named_with_the_consent_it_takes(tmp_path, inputs):
    with socket.create_server(("127.0.0.1", inputs["relight_server_port"])):
        code, output, report = recover(tmp_path, **inputs)
    assert code != 0
    assert report["consents_needed"] == [f"kill:pid:{os.getpid()}"]
    assert f'"relight_consent": ["kill:pid:{os.getpid()}"]' in output
