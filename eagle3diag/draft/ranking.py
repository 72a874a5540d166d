"""Which wiring a dump speaks for: alternatives compared on the same rows, in nats, with a correction for how many were tried.

Top-1 agreement cannot tell a shifted layer or another rope base from the right one; the paired difference in the negative log-likelihood
of the target's greedy token can. Every wiring runs on the same rows and steps, the difference is averaged over the steps of a row, its
error comes from resampling blocks of consecutive rows, its p-value is corrected by Holm over all wirings tried. A wiring counts as better
only if it is significant, gains at least a hundredth of a nat, and does not agree less. What these rows could not have shown is said.

A wiring that is clearly behind is not run on further samples (`race`), so its numbers rest on fewer rows. A second fault is looked for on
top of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.display import Piece, Shown
from eagle3diag.draft.bootstrap import Effect, below, blocks, holm, paired, smallest_effect
from eagle3diag.draft.lengths import Rates, expected_lengths, rates
from eagle3diag.draft.measure import Bench
from eagle3diag.draft.race import Run, better_than, difference, first, race
from eagle3diag.draft.scope import scope_of, unusual
from eagle3diag.draft.wirings import Candidate, Scope, alternatives, described
from eagle3diag.hidden.model import HiddenDump

__all__ = ["ALPHA", "FLOOR", "Ranked", "WiringRanking", "rank", "rank_bench"]

ALPHA = 0.02  #: chance of naming anything where there is nothing
FLOOR = 0.01  #: nats; smaller gains are named by nobody
_APART = 1.96  #: z from which two wirings are told apart
_ROUNDS = 2  #: single faults found on top of each other


DEFINITION: dict[str, str] = {
    "nll": "negative log-likelihood in nats of the target's greedy token under the draft's distribution, averaged over the steps of a row; "
    "tokens that the draft's vocabulary cannot name are left out",
    "delta_nll": "mean over rows of the difference to the wiring at hand; negative is better",
    "z": "delta_nll over its block-bootstrap error, as a normal z; p is one-sided for better, by Holm over all wirings tried",
    "agreement": "share of rows whose first step proposes the target's greedy token",
    "expected_length": "1 + sum of the first k joint rates",
    "group": "wirings of one group cannot be told apart by this dump",
    "smallest_effect": "nats that would have been found with probability 0.8",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Ranked(Piece):
    """One wiring in the ranking.

    Attributes:
        name, kind, change, wiring: of the candidate; ``change`` is ``{field: (at hand, tried)}``.
        effect: paired difference in nats per token against the wiring at hand; negative is better.
        p: chance of looking this much better by accident, corrected for the number of wirings tried.
        agreement: top-1 of the first step on the rows it ran on.
        rates: per step on those rows.
        expected_length: ``{k: tokens per verification}``, as far as it ran.
        group: wirings of one group cannot be told apart; 1 is the best.
        better: significantly, by at least the floor, without agreeing less.
        usual: it is what trainers or the target's config would have by default.
    """

    name: str
    kind: str
    change: dict[str, tuple[Any, Any]]
    wiring: Wiring
    effect: Effect
    p: float
    rates: Rates
    group: int
    better: bool
    usual: bool = False
    faults: int = 1

    @property
    def agreement(self) -> float:
        """Top-1 of the first step."""
        return self.rates.marginal[0] if self.rates.marginal else math.nan

    @property
    def expected_length(self) -> dict[int, float]:
        """Tokens per verification in chains of k."""
        return expected_lengths(self.rates.joint)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one entry."""
        return {
            "name": self.name,
            "kind": self.kind,
            "change": {k: [_plain(a), _plain(b)] for k, (a, b) in self.change.items()},
            "delta_nll": _number(self.effect.mean),
            "se": _number(self.effect.se),
            "z": _number(self.effect.z),
            "p": _number(self.p),
            "rows": self.effect.rows,
            "agreement": _number(self.agreement),
            "expected_length": {str(k): _number(v) for k, v in self.expected_length.items()},
            "group": self.group,
            "better": self.better,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WiringRanking(Shown):
    """Wirings by what they make of one dump, the best first.

    Attributes:
        base: the wiring at hand, with its rates, nats per token, and the group it falls into.
        ranking: the others.
        found: what to change: the wiring that is better than the one at hand, or None.
        alike: names of those that cannot be told from ``found``.
        smallest: the smallest effect in nats that these rows could have shown in four of five cases.
        tried: number of comparisons corrected for.
    """

    base: Wiring
    base_rates: Rates
    base_nll: float
    base_group: int
    rows: int
    samples: int
    steps: int
    ranking: tuple[Ranked, ...]
    found: Ranked | None
    alike: tuple[str, ...] = ()
    smallest: float = math.inf
    tried: int = 0
    blocks: int = 0
    source: str = ""
    notes: tuple[str, ...] = ()
    definition: dict[str, str] = field(default_factory=lambda: dict(DEFINITION))

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``wirings``."""
        lengths = expected_lengths(self.base_rates.joint)
        return {
            "schema": 1,
            "definition": self.definition,
            "baseline": {
                "wiring": {k: _plain(v) for k, v in self.base.to_dict().items()},
                "nll": _number(self.base_nll),
                "agreement": _number(next(iter(self.base_rates.marginal), math.nan)),
                "joint": [_number(j) for j in self.base_rates.joint],
                "expected_length": {str(k): _number(v) for k, v in lengths.items()},
                "group": self.base_group,
                "rows": self.rows,
                "samples": self.samples,
                "steps": self.steps,
            },
            "found": None if self.found is None else self.found.to_dict(),
            "alike": list(self.alike),
            "smallest_effect": _number(self.smallest),
            "floor": FLOOR,
            "tried": self.tried,
            "ranking": [r.to_dict() for r in self.ranking],
            "notes": list(self.notes),
        }


def rank(
    draft: Checkpoint,
    spec: DraftSpec,
    dump: HiddenDump,
    target: TargetSpec | None = None,
    *,
    base: Wiring | None = None,
    steps: int = 4,
    max_rows: int | None = 4000,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
    device: str = "cpu",
) -> WiringRanking:
    """Rank the wirings that a dump can tell apart.

    Args:
        draft, spec, dump, target: opened.
        base: the wiring at hand, the draft's own where None.
        steps: draft steps per row.
        max_rows: read about as many rows.
        quick: screen by the first step.
        progress: told in words what is being run.
        device: to compute on.

    Raises:
        CheckpointError: draft and dump do not fit, or nothing says what the target chose.

    Example:
        >>> from eagle3diag import draft_spec, open_checkpoint, open_dump, open_target
        >>> draft = open_checkpoint("data_samples/smollm2-eagle3/draft")
        >>> dump, target = open_dump("data_samples/smollm2-eagle3/dumps"), open_target("data_samples/smollm2-eagle3/target")
        >>> ranking = rank(draft, draft_spec(draft), dump, target, steps=2, max_rows=300, quick=True)
        >>> ranking.found is None  # no other wiring does better: the draft is wired as it was trained
        True
    """
    bench = Bench.prepare(draft, spec, dump, target, base=base, steps=steps, max_rows=max_rows, device=device)
    return rank_bench(bench, target, quick=quick, progress=progress)


def rank_bench(
    bench: Bench,
    target: TargetSpec | None = None,
    *,
    quick: bool = False,
    candidates: Iterable[Candidate] | None = None,
    progress: Callable[[str], None] | None = None,
) -> WiringRanking:
    """`rank` on rows that are already read.

    Args:
        candidates: to try; `alternatives` of the bench's wiring where None.
    """
    scope = scope_of(bench, target)
    pool = tuple(alternatives(bench.base, scope, pairs=not quick) if candidates is None else candidates)
    base = Run(None, bench.base, bench.steps)
    for i in range(len(bench.samples)):
        base.parts.append(bench.run(i, bench.base))
    notes = list(bench.notes)
    runs = race(bench, base, pool, quick, notes, progress)
    whole = len(base.result())
    found, chosen = _winner(base, runs, whole, scope), list(runs)
    hopeful = {r.candidate.kind for r in runs if r.candidate is not None and _gap(r, base) < 0} if found is not None else set()
    for _ in range(_ROUNDS - 1):
        if found is None or candidates is not None:
            break
        # a second fault showed on its own, if faintly; those that only show together were tried together
        more = [_onto(bench.base, c) for c in alternatives(found.wiring, scope, pairs=False) if c.kind in hopeful]
        more = [c for c in more if c.change and all(c.wiring != r.wiring for r in chosen)]
        further = race(bench, found, more, True, notes, progress)
        chosen += further
        better = _winner(found, further, whole, scope)
        if better is None:
            break
        found = better
    return _result(bench, base, chosen, found, scope, notes)


def _onto(base: Wiring, c: Candidate) -> Candidate:
    change = base.differences(c.wiring)
    return replace(c, name=described(base, c.wiring), change=change, faults=len(change))


def _winner(base: Run, runs: Sequence[Run], rows: int, scope: Scope) -> Run | None:
    """The wiring to name in place of ``base``: better than it, and of those that cannot be told from the best the most usual."""
    effects = [better_than(r.result(), base.result()) for r in runs]
    corrected = holm([below(e.z) for e, _ in effects], _shares(base.wiring, runs, scope))
    whole = [x for x in zip(runs, effects, corrected, strict=True) if len(x[0].result()) == rows and x[0].steps == base.steps]
    better = [r for r, (e, hits), p in whole if _is_better(e, hits, p)]
    if not better:
        return None
    gain = {id(r): e.mean for r, (e, _), _ in whole}
    best = min(better, key=lambda r: gain[id(r)])
    # of a group that is better as a whole, a member may be named that alone would not pass the correction
    level = [r for r, (e, _), _ in whole if r is best or (e.mean <= -FLOOR and e.z < -_APART and _alike(r, best))]
    return min(level, key=lambda r: (unusual(r.wiring, scope), _faults(r), gain[id(r)]))


def _shares(base: Wiring, runs: Sequence[Run], scope: Scope) -> list[float]:
    """How much of the error each try may spend: half goes to those that lead back to what trainers and the target have by default.

    Most faults depart from a default, and there are few ways back; where there are none, all share alike.
    """
    back = [unusual(r.wiring, scope) < unusual(base, scope) for r in runs]
    n = sum(back)
    if n in (0, len(runs)):
        return [1.0] * len(runs)
    return [0.5 / n if b else 0.5 / (len(runs) - n) for b in back]


def _gap(run: Run, base: Run) -> float:
    return float(difference(run.result(), first(base.result(), len(run.result()))).nanmean())


def _is_better(nats: Effect, hits: Effect, p: float) -> bool:
    return p < ALPHA and nats.mean <= -FLOOR and not (hits.z < -2 and hits.mean < 0)


def _faults(run: Run) -> int:
    return run.candidate.faults if run.candidate is not None else 0


def _alike(a: Run, b: Run) -> bool:
    """Whether two wirings cannot be told apart on the rows both ran on, or differ by less than anybody should name."""
    n = min(len(a.result()), len(b.result()))
    x, y = first(a.result(), n), first(b.result(), n)
    e = paired(difference(x, y), blocks(x.sample, x.row))
    return abs(e.z) < _APART or abs(e.mean) < FLOOR


def _result(bench: Bench, base: Run, runs: list[Run], found: Run | None, scope: Scope, notes: list[str]) -> WiringRanking:
    effects = [better_than(r.result(), base.result()) for r in runs]
    corrected = holm([below(e.z) for e, _ in effects], _shares(base.wiring, runs, scope))
    place = _places(base, runs, found)
    group = _groups(sorted([base, *runs], key=lambda r: place[id(r)]))
    whole = len(base.result())
    ranked = [
        Ranked(
            name=c.name,
            kind=c.kind,
            change=dict(c.change),
            wiring=r.wiring,
            effect=e,
            p=p,
            rates=rates(r.result().right),
            group=group[id(r)],
            better=r is found or (len(r.result()) == whole and r.steps == base.steps and _is_better(e, hits, p)),
            usual=unusual(r.wiring, scope) == 0,
            faults=c.faults,
        )
        for r, (e, hits), p in zip(runs, effects, corrected, strict=True)
        if (c := r.candidate) is not None
    ]
    at = {id(e): place[id(r)] for e, r in zip(ranked, [r for r in runs if r.candidate is not None], strict=True)}
    ranked.sort(key=lambda e: (at[id(e)], e.faults))
    named = next((r for r in ranked if found is not None and r.wiring == found.wiring), None)
    mine = base.result()
    block = blocks(mine.sample, mine.row)
    most = int(mine.nameable.any(1).sum())
    # the error of a comparison grows with its effect: what could have been shown is told by those close to the wiring at hand, and the
    # error of one that left early is what it would have been on all rows
    close = [e for e in (r.effect for r in ranked) if 0 < e.se < math.inf and abs(e.mean) < max(0.2, 4 * e.se)]
    errors = sorted(e.se * math.sqrt(e.rows / max(1, most)) for e in close)
    near = errors[len(errors) // 2] if errors else math.inf
    count = int(block.max()) + 1
    costs = torch.where(mine.nameable, mine.nll.to(torch.float64), torch.full_like(mine.nll, math.nan, dtype=torch.float64))
    return WiringRanking(
        base=bench.base,
        base_rates=rates(mine.right),
        base_nll=float(costs.nanmean()),
        base_group=group[id(base)],
        rows=whole,
        samples=len(bench.samples),
        steps=bench.steps,
        ranking=tuple(ranked),
        found=named,
        alike=() if found is None else tuple(r.name for r in ranked if r is not named and r.better and _level(r, found, runs)),
        smallest=smallest_effect(near, len(runs), blocks=count, alpha=2 * ALPHA),
        tried=len(runs),
        blocks=count,
        source=bench.source,
        notes=tuple(notes),
    )


def _level(ranked: Ranked, found: Run, runs: Sequence[Run]) -> bool:
    return any(r.wiring == ranked.wiring and _alike(r, found) for r in runs)


def _places(base: Run, runs: Sequence[Run], found: Run | None) -> dict[int, float]:
    """Nats by which each run lies behind one anchor, on the rows both ran on: results from fewer rows or steps are comparable only so."""
    whole = [r for r in runs if len(r.result()) == len(base.result()) and r.steps == base.steps]
    anchor = found or min([base, *whole], key=lambda r: 0.0 if r is base else _gap(r, base))
    out = {id(anchor): 0.0}
    for run in (base, *runs):
        if run is anchor:
            continue
        n = min(len(run.result()), len(anchor.result()))
        gap = float(difference(first(run.result(), n), first(anchor.result(), n)).nanmean())
        if not math.isfinite(gap):
            gap = math.inf
        elif found is not None and run is not base and gap < 0 and _alike(run, found):
            gap = 1e-9  # a named wiring leads those that cannot be told from it
        out[id(run)] = gap
    return out


def _groups(ordered: Sequence[Run]) -> dict[int, int]:
    """Group numbers by identity: the first that has none opens a group, and takes in all that cannot be told from it."""
    out: dict[int, int] = {}
    number = 0
    for head in ordered:
        if id(head) in out:
            continue
        number += 1
        for r in ordered:
            if id(r) not in out and (r is head or _alike(r, head)):
                out[id(r)] = number
    return out


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 6)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, dict) else value
