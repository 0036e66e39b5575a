# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The dump plugin's host memory: regions never overlap, nothing is lost, and what was given back can be taken whole again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relight.dump.arena import ALIGNMENT, Arena, aligned

PAGES = 64


@given(st.lists(st.tuples(st.integers(1, 12 * ALIGNMENT), st.integers(0, 10)), max_size=80))
def test_regions_never_overlap_and_all_comes_back(steps):
    """Each step takes a region; a number that names one that is held gives that back first."""
    arena = Arena(PAGES * ALIGNMENT)
    held: list[tuple[int, int]] = []
    for size, which in steps:
        if which < len(held):
            arena.give(*held.pop(which))
        offset = arena.take(size)
        if offset is None:
            assert aligned(size) > arena.size - arena.used or len(held) > 1, "there was room in one piece"
            continue
        assert offset % ALIGNMENT == 0
        assert offset + aligned(size) <= arena.size
        assert all(offset + aligned(size) <= o or o + aligned(s) <= offset for o, s in held)
        held.append((offset, size))
        assert arena.used == sum(aligned(s) for _o, s in held) <= arena.peak
    for region in held:
        arena.give(*region)
    assert arena.used == 0
    assert arena.take(arena.size) == 0


def test_what_does_not_fit_is_refused_at_once():
    arena = Arena(4 * ALIGNMENT)
    assert arena.take(5 * ALIGNMENT) is None
    assert arena.take(3 * ALIGNMENT) == 0
    assert arena.take(2 * ALIGNMENT) is None
    assert arena.take(1) == 3 * ALIGNMENT
