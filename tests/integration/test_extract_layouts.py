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
from ansible_collections.relight.recovery.plugins.module_utils.ckpt import TensorBytes
from ansible_collections.relight.recovery.plugins.module_utils.layouts import Sample, layout
from ansible_collections.relight.recovery.plugins.module_utils.records import id_bytes, token_digest
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


@pytest.mark.parametrize(
    ("kind", "norm", "trust"), [("specforge", "post", "checksums"), ("speculators", "pre", "values"), ("modelopt", "post", "checksums")]
)
def test_a_store_that_others_began_is_adopted_vouched_for_and_finished(work: Work, kind: str, norm: str, trust: str) -> None:
    """Its samples have no manifest and no runs: they are read, entered, compared with the server, and then added to."""
    work.control(norm=norm)
    (work.path / "elsewhere").mkdir()
    assert work.run(layout=kind, store=str(work.path / "elsewhere" / "store"))[0] == 0  # fixes the records
    work.control(restart=True)
    old = Store(str(work.store), layout(kind, str(work.state / "dataset")))
    for index in range(10):
        ids, mask = work.data[index]["input_ids"], work.data[index]["loss_mask"]
        final, aux = sample(ids)
        tensors = {
            "input_ids": TensorBytes("int64", (len(ids),), id_bytes(ids)),
            "loss_mask": TensorBytes("int64", (len(ids),), id_bytes(mask)),
            "hidden_state": TensorBytes("float32", final.shape, final.tobytes()),
            "aux_hidden_state": TensorBytes("float32", aux.shape, aux.tobytes()),
        }
        os.makedirs(os.path.dirname(old.path_of(index)), exist_ok=True)
        with open(old.path_of(index), "wb") as handle:
            old.layout.write(handle, Sample(index, len(ids), token_digest(ids), "", tensors))
    code, said = work.run(layout=kind)
    assert (code, "no passed continuity check links" in said) == (4, True)
    assert {entry.run for entry in old.entries().values()} == {"adopted"}
    assert work.continuity(layout=kind)["verdict"] == "pass"
    assert work.run(layout=kind)[0] == 0
    assert right(work, kind) == list(range(24))
    evidence = inventory.take(str(work.store), kind, str(work.state / "dataset")).evidence()
    assert {name: count for name, count in evidence["trusted_by"].items() if count} == {"written": 14, trust: 10}
    assert (evidence["adopted"], evidence["compared_by_continuity"]) == (10, 4)
