"""Which wirings would give an acceptance length that was seen in service.

Every wiring that can be tried on the dump is run on the same rows, damage included (parts that never were loaded), and its expected
length is held against the number seen. Text in service is not the text of the dump, so a length is only a weak witness: what agrees within
the dump's own error, widened by a twentieth of what is above one, explains the number, and the simplest explanation stands first. The
wiring as trained is always among them: if it explains the number, nothing is wrong with the wiring.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eagle3diag.checkpoint.model import TargetSpec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.display import Piece, Shown, data
from eagle3diag.draft.bootstrap import blocks, paired
from eagle3diag.draft.measure import Bench
from eagle3diag.draft.scope import scope_of
from eagle3diag.draft.wirings import alternatives
from eagle3diag.errors import CheckpointError, UsageError

__all__ = ["Explanation", "Explanations", "explain"]

_TEXT = 0.05  #: of the tokens above one: how far the same wiring lies apart on another text
_WITHIN = 2.0  #: errors


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Piece):
    """One wiring and the length it would give.

    Attributes:
        name, kind, faults: as in the ranking; faults is 0 for the wiring at hand.
        length, error: tokens per verification and the standard error of the dump's rows.
        agreement: top-1 of the first step.
        off: ``length`` minus the number seen, in errors that allow for another text.
    """

    name: str
    kind: str
    faults: int
    wiring: Wiring
    length: float
    error: float
    agreement: float
    off: float

    @property
    def explains(self) -> bool:
        """Whether the number seen could come from it."""
        return abs(self.off) < _WITHIN

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one."""
        return data(
            {
                "name": self.name,
                "kind": self.kind,
                "faults": self.faults,
                "expected_length": round(self.length, 6),
                "se": round(self.error, 6),
                "agreement": round(self.agreement, 6),
                "off": round(self.off, 6) if math.isfinite(self.off) else None,
                "explains": self.explains,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanations(Shown):
    """Wirings by how well they explain a length.

    Attributes:
        observed: the length seen, bonus token counted.
        steps: draft steps of the chains.
        here: the wiring at hand.
        others: those that explain the number first, simple ones before others, then the nearest.
    """

    observed: float
    steps: int
    rows: int
    here: Explanation
    others: tuple[Explanation, ...]
    notes: tuple[str, ...] = ()

    @property
    def explaining(self) -> tuple[Explanation, ...]:
        """Those of ``others`` that the number could come from."""
        return tuple(e for e in self.others if e.explains)

    def to_dict(self) -> dict[str, Any]:
        """``observed`` in the JSON of ``wirings``."""
        return data(
            {
                "length": self.observed,
                "steps": self.steps,
                "rows": self.rows,
                "here": self.here.to_dict(),
                "explanations": [e.to_dict() for e in self.others],
                "definition": "off: expected length minus the one seen, over the dump's error widened by a twentieth of what is above 1",
                "notes": list(self.notes),
            }
        )


def explain(
    bench: Bench, observed: float, target: TargetSpec | None = None, *, pairs: bool = True, progress: Callable[[str], None] | None = None
) -> Explanations:
    """Explain a length.

    Args:
        bench: read; its steps are the chain's.
        observed: tokens per verification, bonus token counted.
        target: opened, for what else could be tried.
        pairs: also the pairs of faults that occur together.
        progress: told in words what is being run.

    Raises:
        UsageError: the length is below 1 or above what a chain of that many steps can give.
    """
    if not 1.0 <= observed <= bench.steps + 1:
        chain = f"chains of {bench.steps} give 1 to {bench.steps + 1}"
        raise UsageError(f"an acceptance length of {observed:g} cannot be: {chain}; give the steps of the server's chain")
    pool = alternatives(bench.base, scope_of(bench, target), pairs=pairs, damage=True)
    here = _explained(bench, observed, "the wiring at hand", "as trained", 0, bench.base)
    found, skipped = [], 0
    for i, c in enumerate(pool):
        if progress is not None:
            progress(f"wiring {i + 1} of {len(pool)}: {c.name}")
        try:
            found.append(_explained(bench, observed, c.name, c.kind, c.faults, c.wiring))
        except CheckpointError:
            skipped += 1
    found.sort(key=lambda e: (not e.explains, e.faults if e.explains else 0, abs(e.off)))
    notes = (*bench.notes, f"{skipped} wirings could not be run on this dump") if skipped else bench.notes
    rows = sum(int(bench.rows(i, bench.base).counted(bench.steps).sum()) for i in range(len(bench.samples)))
    return Explanations(observed=observed, steps=bench.steps, rows=rows, here=here, others=tuple(found), notes=notes)


def _explained(bench: Bench, observed: float, name: str, kind: str, faults: int, wiring: Wiring) -> Explanation:
    m = bench.all(wiring)
    lengths = 1.0 + m.right.to(torch.float64).cumprod(1).sum(1)
    effect = paired(lengths, blocks(m.sample, m.row))
    error = effect.se if math.isfinite(effect.se) else 0.0
    width = math.hypot(error, _TEXT * (effect.mean - 1.0))
    gap = effect.mean - observed
    off = gap / width if width > 0 else 0.0 if abs(gap) < 0.005 else math.copysign(math.inf, gap)
    return Explanation(
        name=name,
        kind=kind,
        faults=faults,
        wiring=wiring,
        length=effect.mean,
        error=error,
        agreement=float(m.right[:, 0].double().mean()),
        off=off,
    )
