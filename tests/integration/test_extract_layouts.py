# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The client fills stores of every layout, resumes them, and never takes a final state of the wrong kind."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import inventory
from ansible_collections.relight.recovery.plugins.module_utils.layouts import layout
from ansible_collections.relight.recovery.plugins.module_utils.store import Store

from relight.extract.states import file_of, states_of
from relight.hostlook import look_at_content
from tests.extraction import Work, records
from tests.fake_server import sample


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    made = Work(tmp_path, records(24))
    made.start_server()
    yield made
    made.close()


def right(work: Work, kind: str) -> list[int]:
    """The samples that hold just what the server computes, by the layout's own look."""
    store = Store(str(work.store), layout(kind, str(work.state / "dataset")))
    found = []
    for index, record in enumerate(work.data):
        path = store.path_of(index)
        if os.path.exists(path):
            seen = store.layout.look(path)
            final, aux = sample(record["input_ids"])
            with file_of(path) as file:
                states = states_of(file, seen)
            if states[0].tobytes() == final.tobytes() and states[1].tobytes() == aux.tobytes():
                found.append(index)
    return found


@pytest.mark.parametrize(("kind", "norm"), [("modelopt", "post"), ("speculators", "pre")])
def test_a_store_of_another_layout_is_filled_and_resumed(work: Work, kind: str, norm: str) -> None:
    work.control(norm=norm)
    assert work.run(layout=kind)[0] == 0
    assert right(work, kind) == list(range(24))
    tally = inventory.take(str(work.store), kind, str(work.state / "dataset"), None, "content", look_at_content)
    assert (tally.intact, tally.found, list(tally.missing())) == (24, [], [])
    assert Store(str(work.store), layout(kind)).runs().identity["norm"] == norm  # type: ignore[index]
    store = Store(str(work.store), layout(kind, str(work.state / "dataset")))
    os.unlink(store.path_of(3))
    os.truncate(store.path_of(5), 100)
    code, said = work.run(layout=kind)
    assert (code, "24 of 24 samples are in the store, 2 of them new" in said, right(work, kind)) == (0, True, list(range(24)))
    assert len(store.quarantined()) == 1
    work.control(restart=True)
    assert work.continuity(layout=kind)["verdict"] == "pass"
    work.control(restart=True, seed=1)
    assert work.continuity(layout=kind)["verdict"] == "fail"


def test_records_give_modelopts_files_their_names(work: Work) -> None:
    assert work.run(layout="modelopt")[0] == 0
    assert {path.name for path in work.store.glob("*.pt")} == {f"record-{number}.pt" for number in range(24)}


@pytest.mark.parametrize(
    ("config", "server", "why"),
    [
        ({"layout": "speculators"}, "post", "dumps the final state post-norm, the layout speculators holds it pre-norm: extract to"),
        ({"layout": "specforge"}, "pre", "dumps the final state pre-norm, the layout specforge holds it post-norm"),
        ({"layout": "modelopt", "identity": {"dtype": "float32", "norm": "pre"}}, "post", "the layout modelopt holds it pre-norm"),
    ],
)
def test_a_final_state_of_the_other_kind_is_refused(work: Work, config: dict[str, object], server: str, why: str) -> None:
    work.control(norm=server)
    code, said = work.run(**config)
    assert (code, why in said) == (4, True)
    assert work.seen()["requests"] == []
    assert [path.name for path in work.store.rglob("*") if re.search(r"\.(ckpt|pt|safetensors)$", path.name)] == []


def test_a_layout_that_cannot_hold_what_the_identity_says_is_bad_input(work: Work) -> None:
    code, said = work.run(layout="specforge", identity={"norm": "pre"})
    assert (code, "the layout specforge holds the final state post-norm, and the identity says 'pre'" in said) == (2, True)
