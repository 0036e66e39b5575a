# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""docs/faults.md says what the gates really answer, and no seeded fault passes."""

from __future__ import annotations

from tests import faults


def rows():
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in faults.table().splitlines() if line.startswith("| ")][2:]


def test_the_table_is_what_the_gates_answer():
    assert faults.FILE.read_text() == faults.table(), "run python -m tests.faults"


def test_no_fault_passes_and_none_is_told_without_a_code():
    found = rows()
    assert len(found) >= 60
    assert [row for row in found if len(row) != 4 or row[2] not in ("warn", "fail", "unknown") or not row[3]] == []
    assert len({(row[0], row[1]) for row in found}) == len(found)


def test_every_fault_of_the_weights_fails():
    assert {row[2] for row in faults.of_weights()} == {"fail"}
