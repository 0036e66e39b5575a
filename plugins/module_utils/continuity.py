# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Does a restarted server compute what the old one did? Judges per-token quantiles of relative error; measures nothing.

One maximum would not do: in 16-bit formats another kernel or another batch moves every number a little, and expert
routing sends a few tokens elsewhere altogether. So the middle of the distribution decides, and its tail is given room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict

GATE = "continuity_check"
FINAL = "final"


@dataclass(frozen=True)
class Tolerance:
    """The largest relative errors per token (norm of the difference over norm of the stored state) that still are the same model."""

    p50: float
    p90: float
    p99: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    "float32": Tolerance(
        5e-5, 1e-4, 1e-3, "only the order of additions differs: 6e-6 was seen between two implementations; rounded weights give 1e-3"
    ),
    "float16": Tolerance(5e-3, 2e-2, 2e-1, "11 bits of precision: 5e-4 a rounding, some tens of roundings along the residual stream"),
    "bfloat16": Tolerance(
        3e-2, 1e-1, 5e-1, "8 bits of precision: 4e-3 a rounding, added up over the layers; a few tokens are routed to other experts"
    ),
}

# A wrong layer or other tokens give errors of about 1; weights or precision of another kind lie between the tolerance and this.
UNRELATED = 0.5


@dataclass(frozen=True)
class Quantiles:
    """Relative errors per token."""

    p50: float
    p90: float
    p99: float
    max: float

    def within(self, tolerance: Tolerance) -> bool:
        """False for NaN too."""
        return self.p50 <= tolerance.p50 and self.p90 <= tolerance.p90 and self.p99 <= tolerance.p99


@dataclass(frozen=True)
class Block:
    """One stored block (a layer's output by its id, or `final`) of all samples against the new ones.

    `like` and `like_p50` name the new block that lies nearest, which should be the same one.
    """

    name: str
    quantiles: Quantiles
    like: str
    like_p50: float
    nonfinite_tokens: int = 0


@dataclass(frozen=True)
class Sample:
    """One sample that was extracted again. `fault` says why there is nothing to compare, `code` which kind that is."""

    index: int
    tokens: int
    p50_worst: float = 0.0
    fault: str = ""
    code: str = ""


@dataclass(frozen=True)
class Seen:
    """All that a continuity check measured. Pure numbers."""

    instance: str
    dtype: str
    samples: tuple[Sample, ...]
    blocks: tuple[Block, ...]
    probe_tokens: int


def judge(seen: Seen) -> Gate:
    """The verdict: every block of the pooled tokens, and every sample by its median, within the dtype's tolerance."""
    tolerance = TOLERANCES[seen.dtype]
    gate = Gate(GATE, _evidence(seen, tolerance))
    for sample in seen.samples:
        if sample.fault:
            gate.problems.append(_problem(sample.code, f"sample {sample.index}", sample.fault))
    wrong = [block for block in seen.blocks if block.nonfinite_tokens or not block.quantiles.within(tolerance)]
    if wrong:
        gate.problems.append(_diagnose(seen, wrong, tolerance))
    for sample in seen.samples:
        if not wrong and not sample.fault and not sample.p50_worst <= tolerance.p50:
            what = f"half of its tokens differ by {sample.p50_worst:.2g} or more, {tolerance.p50:g} allowed, while the others agree"
            gate.problems.append(_problem("continuity-sample", f"sample {sample.index}", what))
    if not seen.blocks and not gate.problems:
        gate.problems.append(Problem("continuity-empty", "store", "no sample could be compared", _REMEDY, Verdict.UNKNOWN))
    return gate


def nothing_to_compare(instance: str) -> Gate:
    """The verdict on an empty store: whatever this server computes is the beginning."""
    return Gate(GATE, {"instance": instance, "samples": 0, "probe_tokens": 0, "note": "nothing to compare"})


def already_linked(instance: str, link: dict[str, Any]) -> Gate:
    """The verdict on a server that a passed link covers: no request is sent."""
    return Gate(GATE, {"instance": instance, "samples": 0, "probe_tokens": 0, "note": "this instance has passed", "link": link})


def unknown(code: str, what: str, remedy: str, probe_tokens: int = 0) -> Gate:
    """Nobody has looked to the end, and why."""
    return Gate(GATE, {"probe_tokens": probe_tokens}, [Problem(code, GATE, what, remedy, Verdict.UNKNOWN)])


_REMEDY = "do not resume with this server: start the one that made the store (model, layers, dtype, patch), then run continuity again"


def _problem(code: str, where: str, what: str) -> Problem:
    return Problem(code, where, what, _REMEDY)


def _evidence(seen: Seen, tolerance: Tolerance) -> dict[str, Any]:
    return {
        "instance": seen.instance,
        "dtype": seen.dtype,
        "samples": len(seen.samples),
        "indices": [sample.index for sample in seen.samples],
        "tokens": sum(sample.tokens for sample in seen.samples),
        "probe_tokens": seen.probe_tokens,
        "tolerance": asdict(tolerance),
        "quantiles": {block.name: asdict(block.quantiles) for block in seen.blocks},
    }


def _diagnose(seen: Seen, wrong: Sequence[Block], tolerance: Tolerance) -> Problem:
    """One problem that says what the mismatch looks like."""
    where = ", ".join(_title(block.name) for block in wrong)
    if any(block.nonfinite_tokens for block in wrong):
        tokens = sum(block.nonfinite_tokens for block in wrong)
        return _problem("continuity-nonfinite", where, f"{tokens} token states are NaN or infinite")
    moved = [block for block in wrong if block.like != block.name and block.like_p50 <= tolerance.p50]
    if moved:
        pairs = "; ".join(f"the stored {_title(block.name)} is the server's {_title(block.like)}" for block in moved)
        return _problem("continuity-other-layer", where, f"looks like other layers: {pairs}")
    worst = max(block.quantiles.p50 for block in wrong)
    numbers = f"half of the tokens differ by {worst:.2g} or more, {tolerance.p50:g} allowed"
    if len(wrong) == 1 and wrong[0].name == FINAL and len(seen.blocks) > 1:
        return _problem("continuity-other-norm", where, f"the layers agree, the final state does not ({numbers}): looks like another norm")
    if len(wrong) < len(seen.blocks):
        return _problem("continuity-other-layer", where, f"some blocks agree and these do not ({numbers}): looks like other layers")
    if min(block.quantiles.p50 for block in wrong) >= UNRELATED:
        return _problem("continuity-unrelated", where, f"nothing agrees ({numbers}): looks like other tokens or another model")
    if worst <= tolerance.p50:
        numbers = f"a tenth of the tokens differ by {max(block.quantiles.p90 for block in wrong):.2g} or more"
    return _problem("continuity-other-weights", where, f"all blocks differ a little ({numbers}): looks like other weights or precision")


def _title(name: str) -> str:
    return "final state" if name == FINAL else f"layer {name}"
