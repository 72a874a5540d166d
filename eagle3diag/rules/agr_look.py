"""What the AGR rules share: the draft run once on the dump, and why nothing can be said where it cannot.

A dump that is at fault itself is not used to judge a draft; a draft whose logits are not numbers is not ranked. The rows are few enough
for a check to take seconds on a laptop; the commands ``agree`` and ``wirings`` run on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eagle3diag.errors import CheckpointError
from eagle3diag.rules.model import Case, Severity
from eagle3diag.rules.reading import is_eagle3
from eagle3diag.rules.registry import RULES, NotJudged, outcome

if TYPE_CHECKING:
    from eagle3diag.draft.agreement import Agreement
    from eagle3diag.draft.measure import Bench
    from eagle3diag.draft.ranking import WiringRanking
    from eagle3diag.draft.served import ServedAcceptance

__all__ = ["K", "Look", "look", "near_chance", "ranking", "served"]

K = 4  #: draft steps
_FEW = 30  #: counted rows below which nothing is judged
_WORK = 3e12  #: multiply-adds a check may spend
_TRIES = 30  #: about how often the rows are run


@dataclass(slots=True, kw_only=True, eq=False)
class Look:
    """One draft on one dump: measured when first asked for."""

    bench: Bench
    agreement: Agreement
    ranked: WiringRanking | None = None


def look(case: Case) -> Look:
    """The draft's own wiring on the dump.

    Raises:
        NotJudged: the dump is at fault, another kind of draft, or too few rows.
        CheckpointError: draft and dump do not fit, or something needed is not there.
    """
    found = case.workings.once("draft on the dump", case.measured_on, lambda: _look_or_why(case))
    if isinstance(found, str):
        raise NotJudged(found)
    return found


def _look_or_why(case: Case) -> Look | str:
    try:
        return _look(case)
    except NotJudged as why:
        return str(why)
    except CheckpointError as error:
        return f"the draft cannot be run on this dump: {error}"


def _look(case: Case) -> Look:
    from eagle3diag.draft.agreement import agree_bench
    from eagle3diag.draft.measure import Bench
    from eagle3diag.draft.weights import DraftWeights
    from eagle3diag.rules.dmp_view import evidence

    if not is_eagle3(case):
        raise NotJudged("another kind of draft than EAGLE-3: it is not run")
    faulty = _dump_faults(case)
    if faulty:
        raise NotJudged(f"the dump itself is at fault ({', '.join(faulty)}): no draft is judged by it")
    assert case.dump is not None
    seen = evidence(case)
    status = seen.norm.status if seen.norm is not None and seen.norm.status != "unknown" else case.dump.final_norm
    weights = DraftWeights.load(case.draft, case.spec)
    rows = _affordable(weights)
    bench = Bench.prepare(
        case.draft,
        case.spec,
        replace(case.dump, final_norm=status),
        case.target,
        steps=K,
        max_rows=rows,
        max_answer=max(64, rows // 4),
        weights=weights,
        tables=seen.tables,
    )
    _settle(case, bench)
    agreement = agree_bench(bench, on_policy=False, distribution=False)
    if agreement.rows < _FEW:
        raise NotJudged(f"{agreement.rows} rows of the dump count; at least {_FEW} are needed")
    return Look(bench=bench, agreement=agreement)


def _dump_faults(case: Case) -> list[str]:
    """Codes of errors in the dump."""
    out = []
    for code, rule in RULES.items():
        if code.startswith("DMP") and any(f.severity is Severity.ERROR for f in outcome(case, rule).findings):
            out.append(code)
    return out


def _affordable(weights: object) -> int:
    """Rows that a check can run some thirty times: 256 to 6,000."""
    from eagle3diag.draft.weights import DraftWeights

    assert isinstance(weights, DraftWeights)
    size = sum(t.numel() for n, t in weights.tensors.items() if t.ndim == 2 and not n.startswith("embed"))
    return int(min(6000, max(256, _WORK / (_TRIES * K * max(1, size)))))


def _settle(case: Case, bench: Bench) -> None:
    """Where the recorded ids can be read in two ways, the dump decides: the other reading has to be the best of all layers it holds."""
    from eagle3diag.draft.race import better_than
    from eagle3diag.draft.ranking import rank_bench
    from eagle3diag.draft.scope import scope_of
    from eagle3diag.draft.wirings import alternatives

    aux = case.spec.aux
    others = [r.hf for r in aux.readings[1:] if r.hf != bench.base.aux_layers and set(r.hf) <= set(bench.layers)]
    if aux.settled or not others or bench.base.state != "aux":
        return
    mine = bench.all(bench.base, steps=1)  # where the first step does not prefer another reading, none is better
    tried = [bench.all(replace(bench.base, aux_layers=o), steps=1) for o in others]
    if not any(better_than(other, mine)[0].z < -2 for other in tried):
        return
    layers = [c for c in alternatives(bench.base, scope_of(bench, case.target), pairs=False) if set(c.change) == {"aux_layers"}]
    found = rank_bench(bench, case.target, quick=True, candidates=layers).found
    if found is not None and found.wiring.aux_layers in others:
        ids = ", ".join(map(str, found.wiring.aux_layers or ()))
        why = f"the dump fits that reading better by {-found.effect.mean:.2f} nats"
        bench.notes = (*bench.notes, f"the recorded ids mean layers {ids}: {why}")
        bench.base = found.wiring


def ranking(case: Case) -> WiringRanking:
    """The wirings that could be meant, on the same rows; raises as `look` does."""
    from eagle3diag.draft.ranking import rank_bench

    at = look(case)
    if at.ranked is None:
        at.ranked = rank_bench(at.bench, case.target, quick=True)
    return at.ranked


def served(case: Case) -> ServedAcceptance:
    """What the engine would get, beside the trained wiring; raises as `look` does.

    Raises:
        NotJudged: the engine would not serve this draft at all.
        CheckpointError: the dump does not hold the states that the engine would hand over.
    """
    from eagle3diag.draft.served import served_acceptance

    at = look(case)
    s = case.served
    assert s is not None
    if s.refused is not None:
        raise NotJudged(f"{s.contract.label} refuses this draft before the first request (ENG504)")
    if s.fails_later:
        raise NotJudged(f"{s.contract.label} fails at the first request: {s.fails_later[0]}")
    if s.algorithm == "draft_model":
        raise NotJudged(f"{s.contract.label} would run it as an ordinary draft model, not as EAGLE-3")
    by_file = {file: name for name, file in case.spec.canonical.items()}
    dropped = {by_file[n] for n, f in s.tensors.items() if f.fate in ("dropped", "skipped") and n in by_file}
    return case.workings.once("served", (at, s), lambda: served_acceptance(at.bench, s.wiring, dropped=dropped))


def near_chance(agreement: Agreement) -> bool:
    """First-step agreement that a constant guess could nearly reach: below 0.2 and 3 times the commonest token's share, or below 0.05."""
    first = agreement.steps[0].marginal
    return first < 0.05 or (first < 0.2 and first < 3 * agreement.commonest)
