"""The race: candidates run sample by sample, and those that cannot win any more are not run on.

Nothing is named by what happens here; an error of the race costs a run, or leaves a wiring with numbers from fewer rows. ``quick`` screens
by the first step alone, which shows every fault but those of what is fed back (two steps there), and then runs all steps of those that
look better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.bootstrap import Effect, blocks, paired
from eagle3diag.draft.measure import Bench, Measured, joined
from eagle3diag.draft.wirings import Candidate
from eagle3diag.errors import CheckpointError

__all__ = ["Run", "better_than", "difference", "first", "race"]

_BEHIND = 0.05  #: nats a wiring has to be behind the leader to leave the race
_HOPE = 0.003  #: nats a screened wiring has to be ahead to be run on
_MOST = 8  #: screened wirings that are run on


def difference(a: Measured, b: Measured) -> Tensor:
    """[n] float64: nats that ``a`` costs more than ``b``, averaged over the steps both have and either can name; NaN where none."""
    steps = min(a.nll.shape[1], b.nll.shape[1])
    named = a.nameable[:, :steps] | b.nameable[:, :steps]
    gap = (a.nll[:, :steps] - b.nll[:, :steps]).to(torch.float64)
    return torch.where(named, gap, torch.full_like(gap, math.nan)).nanmean(1)


def better_than(a: Measured, b: Measured) -> tuple[Effect, Effect]:
    """(nats, top-1) of ``a`` minus ``b`` on the same rows; the rows of ``b`` beyond those of ``a`` are left out."""
    short = first(b, len(a))
    block = blocks(a.sample, a.row)
    steps = min(a.right.shape[1], short.right.shape[1])
    hits = (a.right[:, :steps].to(torch.float64) - short.right[:, :steps].to(torch.float64)).mean(1)
    return paired(difference(a, short), block), paired(hits, block)


def first(m: Measured, n: int) -> Measured:
    """The first ``n`` rows."""
    return m if len(m) == n else Measured(**{k: getattr(m, k)[:n] for k in Measured.__slots__})


@dataclass(slots=True, eq=False)
class Run:
    """One wiring in the race: its results so far, sample by sample; ``out`` where it left."""

    candidate: Candidate | None
    wiring: Wiring
    steps: int
    parts: list[Measured] = field(default_factory=list)
    out: bool = False
    whole: Measured | None = None

    def result(self) -> Measured:
        """All samples so far as one."""
        if self.whole is None or len(self.whole) != sum(len(p) for p in self.parts):
            self.whole = joined(self.parts)
        return self.whole

    def restart(self, steps: int) -> None:
        """Forget the results, to be run with other steps."""
        self.steps, self.parts, self.whole = steps, [], None


def race(
    bench: Bench,
    base: Run,
    pool: Sequence[Candidate],
    quick: bool,
    notes: list[str],
    progress: Callable[[str], None] | None,
) -> list[Run]:
    """Run candidates sample by sample while they can still win."""
    ahead = base
    runs = [Run(c, c.wiring, _screen_steps(c) if quick else bench.steps) for c in pool]
    if quick:
        _glance(bench, runs, base)
    for i in range(len(bench.samples)):
        alive = [r for r in runs if not r.out]
        if progress is not None:
            progress(f"sample {i + 1} of {len(bench.samples)}: {len(alive)} wirings")
        for run in alive:
            try:
                run.parts.append(bench.run(i, run.wiring, steps=run.steps))
            except CheckpointError as error:
                run.out, run.parts = True, []
                assert run.candidate is not None
                notes.append(f"not tried: {run.candidate.name}: {error}")
        alive = [r for r in runs if not r.out]
        if alive:
            ahead = min([base, *alive], key=lambda r: _mean_gap(r, base))
        for run in alive:
            run.out = _is_out(run, base, ahead, quick)
    if quick:
        _finish(bench, [r for r in runs if not r.out], base)
    return [r for r in runs if r.parts]


def _glance(bench: Bench, runs: Sequence[Run], base: Run) -> None:
    """A look at a few rows: most wirings are hopeless at once."""
    for run in runs:
        try:
            run.parts.append(bench.glance(run.wiring, steps=run.steps))
        except CheckpointError:
            continue  # said when the first whole sample is run
        seen = len(run.result())
        run.out = seen > 0 and _hopeless(difference(run.result(), first(base.result(), seen)), len(base.result()) / seen)
        if not run.out:
            run.restart(run.steps)


def _screen_steps(c: Candidate) -> int:
    """Steps that show the difference at all: what is fed back is first seen by the second."""
    return 2 if set(c.change) <= {"norm_output", "position_gap", "aux_layers_verify"} else 1


def _mean_gap(run: Run, base: Run) -> float:
    if run is base:
        return 0.0
    gap = float(difference(run.result(), first(base.result(), len(run.result()))).nanmean())
    return gap if math.isfinite(gap) else math.inf


def _rows_t(gap: Tensor) -> tuple[float, float]:
    """(mean, t over rows): for the race alone, where an error costs a run and nothing is named by it."""
    known = gap[~torch.isnan(gap)]
    if len(known) < 2:
        return 0.0, 0.0
    mean, se = float(known.mean()), float(known.std()) / math.sqrt(len(known))
    return mean, mean / se if se > 0 else 0.0 if mean == 0 else math.copysign(math.inf, mean)


def _is_out(run: Run, base: Run, ahead: Run, quick: bool) -> bool:
    """Whether a wiring cannot win any more."""
    mine = run.result()
    if quick and _hopeless(difference(mine, first(base.result(), len(mine))), len(base.result()) / len(mine)):
        return True
    if ahead is run:
        return False
    n = min(len(mine), len(ahead.result()))
    mean, t = _rows_t(difference(first(mine, n), first(ahead.result(), n)))
    return mean > _BEHIND and t > (4 if quick else 6)


def _hopeless(gap: Tensor, more: float) -> bool:
    """Whether the rest of the rows, ``more`` times as many in all, would not make it significantly better.

    The effect is taken to be better than what was seen by one and a half errors; rows depend on each other, a third more error covers that.
    """
    mean, t = _rows_t(gap)
    if mean == 0 and t == 0:  # the same numbers
        return True
    se = 1.3 * mean / t if t not in (0, math.inf, -math.inf) else 0.0
    return (mean - 1.5 * se) * math.sqrt(more) > -3 * se


def _finish(bench: Bench, alive: list[Run], base: Run) -> None:
    """After screening: all steps for those that look better than ``base``, the most promising first."""
    ahead_of = [(_mean_gap(r, base), r) for r in alive]
    hopeful = sorted((g for g in ahead_of if g[0] < -_HOPE), key=lambda g: g[0])
    for _, run in hopeful[:_MOST]:
        if run.steps == bench.steps:
            continue
        run.restart(bench.steps)
        for i in range(len(bench.samples)):
            run.parts.append(bench.run(i, run.wiring))
