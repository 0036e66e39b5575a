# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The result of a gate: what every check in this collection returns. Standard library only, Python 3.9 and newer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any


class Verdict(IntEnum):
    """Ordered by how much it worries an operator. UNKNOWN worries more than FAIL: nobody has looked."""

    PASS = 0
    WARN = 1
    FAIL = 2
    UNKNOWN = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Problem:
    """One finding.

    `code` is stable, kebab-case and documented in docs/problems.md; `remedy` is the next thing to type or do.
    `consent` is the exact name that relight_consent must hold for recovery to act on this finding, or None.
    """

    code: str
    where: str
    what: str
    remedy: str
    verdict: Verdict = Verdict.FAIL
    consent: str | None = None


@dataclass
class Gate:
    """A check's name, its evidence (numbers with units in their names) and what it found wrong."""

    name: str
    evidence: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def worst(self) -> Problem | None:
        return max(self.problems, key=lambda p: p.verdict, default=None)

    @property
    def verdict(self) -> Verdict:
        return self.worst.verdict if self.worst else Verdict.PASS

    def result(self, seconds: float) -> dict[str, Any]:
        """The gate as a module returns it under the key `gate`."""
        return {
            "name": self.name,
            "verdict": self.verdict.word,
            "summary": f"{self.worst.where}: {self.worst.what}" if self.worst else "as it should be",
            "evidence": self.evidence,
            "problems": [{**asdict(p), "verdict": p.verdict.word} for p in self.problems],
            "seconds": round(seconds, 3),
        }
