# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's model: when it counts as whole, and how its tensors are spread over five shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.model import DONE, SHARDS, make, shards, whole


class Weight:
    """As much of a tensor as the spreading looks at."""

    def __init__(self, count: int) -> None:
        self.count = count

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 4


def spread(sizes: list[int]) -> list[int]:
    state = {f"w{n}": Weight(size) for n, size in enumerate(sizes)}
    parts = shards(state, SHARDS)
    assert [name for part in parts for name in part] == list(state)  # each once, in the model's order
    return [sum(state[name].count for name in part) for part in parts]


def test_shards_are_five_and_about_equal():
    assert spread([10] * 50) == [100] * 5
    assert spread([113, *[12] * 35]) == [113, 108, 108, 108, 96]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00005.safetensors").write_bytes(bytes(100))
    (tmp_path / DONE).write_text(json.dumps({"bytes": {"config.json": 2, "model-00001-of-00005.safetensors": 100}}))
    return tmp_path


def test_a_whole_model_is_not_made_again(made):
    assert whole(made)
    assert make(made) is False


@pytest.mark.parametrize("harm", ["short", "missing", "unsealed", "torn seal"])
def test_a_torn_model_is_not_whole(made, harm):
    shard = made / "model-00001-of-00005.safetensors"
    {
        "short": lambda: shard.write_bytes(bytes(99)),
        "missing": shard.unlink,
        "unsealed": (made / DONE).unlink,
        "torn seal": lambda: (made / DONE).write_text('{"bytes"'),
    }[harm]()
    assert not whole(made)
