"""Views of the draft room: agreement with the target step by step, the ranking of wirings, and the acceptance an engine would get."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import View, count, figure_text, percent, table

if TYPE_CHECKING:
    from eagle3diag.draft.agreement import Agreement, StepAgreement
    from eagle3diag.draft.decode import GreedyLoop
    from eagle3diag.draft.observed import Explanations
    from eagle3diag.draft.ranking import Ranked, WiringRanking
    from eagle3diag.draft.served import Acceptance, ServedAcceptance
    from eagle3diag.report.acceptance import EngineAcceptance

__all__ = [
    "acceptance_records",
    "acceptance_view",
    "agreement_records",
    "agreement_view",
    "engine_records",
    "engine_view",
    "explanations_records",
    "explanations_view",
    "length_text",
    "loop_records",
    "loop_view",
    "ranking_records",
    "ranking_view",
]

STEPS = ("step", "joint", "conditional", "marginal", "sum min(p, q)", "KL, nats", "rows")
SAME = 0.1  #: tokens of acceptance length from which a loss is an error; less is a warning
SCALES = {
    "exact": "known exactly",
    "upper bound": "an upper bound: the target's head is known in part",
    "top k": "known for its top tokens only",
    "none": "not known: sum min(p, q) and KL cannot be told",
}


def length_text(agreement: Agreement | Acceptance) -> str:
    """``1.50 tokens (1.46 to 1.55)`` of the longest chain."""
    k = max(agreement.expected_length, default=0)
    if not k:
        return "no length"
    low, high = agreement.interval.get(k, (float("nan"), float("nan")))
    return f"{agreement.expected_length[k]:.2f} tokens" + (f" ({low:.2f} to {high:.2f})" if low == low else "")


def agreement_records(agreement: Agreement) -> list[dict[str, Any]]:
    """One row a step and way of feeding, as in the JSON output."""
    both = (("forced", agreement.steps), ("on-policy", agreement.on_policy))
    return [{"tokens": tokens, **s.to_dict()} for tokens, steps in both for s in steps]


def _steps(steps: Sequence[StepAgreement]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for s in steps:
        overlap = percent(s.expected_acceptance)
        if s.expected_acceptance is None and s.bounds is not None:
            overlap = f"{percent(s.bounds[0])} to {percent(s.bounds[1])}"
        shares = (percent(s.joint), percent(s.conditional), percent(s.marginal))
        rows.append((str(s.step), *shares, overlap, figure_text(s.kl, 3), f"{s.n:,}"))
    return rows


def _odd(agreement: Agreement) -> str:
    if agreement.nonfinite:
        return f"{count(agreement.nonfinite, 'row')} of logits with NaN or Inf; "
    return "the logits are the same in every row; " if agreement.constant else ""


def agreement_view(agreement: Agreement) -> View:
    """The first step and the expected length first, then every step, the vocabulary, and where agreement is won and lost."""
    k, steps = max(agreement.expected_length, default=0), agreement.steps
    first = percent(steps[0].marginal if steps else None)
    lengths = (
        (n, f"{v:.3f}", " to ".join(f"{x:.3f}" for x in agreement.interval[n]) if n in agreement.interval else "–")
        for n, v in agreement.expected_length.items()
    )
    inside = [f"coverage {percent(agreement.coverage)} of rows"]
    if agreement.coverage_mass is not None:
        inside.append(f"{percent(agreement.coverage_mass)} of the target's probability")
    if agreement.misses_outside is not None:
        inside.append(f"{percent(agreement.misses_outside)} of the first step's misses are tokens it cannot name")
    if steps and steps[0].marginal_restricted is not None:
        inside.append(f"inside it the first step agrees in {percent(steps[0].marginal_restricted)}")
    walked = "" if agreement.walk_length is None else f" Walked as a server does: {agreement.walk_length:.2f}."
    parts = [
        table(
            f"The first step by {name}",
            ("rows where", "n", "agrees", "error", f"length, k = {k}"),
            ((p.name, f"{p.n:,}", percent(p.marginal), percent(p.error), f"{p.expected_length:.2f}") for p in some),
        )
        for name, some in agreement.parts.items()
    ]
    return View(
        title="Agreement with the target",
        summary=f"{_odd(agreement)}the first step proposes the target's token in {first} of {count(agreement.rows, 'row')}; "
        f"expected acceptance length {length_text(agreement)} with chains of {k}",
        status="error" if _odd(agreement) else "none",
        tables=(
            table("Step by step, later steps fed the text", STEPS, _steps(steps)),
            table("Step by step, later steps fed the draft's own tokens", STEPS, _steps(agreement.on_policy)),
            table("Expected acceptance length, bonus token counted", ("chain of k", "tokens", "95 %"), lengths),
            *parts,
        ),
        notes=(
            f"Draft vocabulary: {'; '.join(inside)}.",
            f"The commonest target token would be right in {percent(agreement.commonest)} of the rows. The text is the target's own greedy "
            f"choice in {percent(agreement.follows)} of them.{walked}",
            f"The target's choices: {agreement.choices}. Its distribution: {SCALES.get(agreement.distribution, agreement.distribution)}.",
            *(f"{n[0].upper()}{n[1:]}." for n in agreement.notes),
            *(f"{name}: {agreement.definition[name]}." for name in ("joint", "conditional", "marginal") if name in agreement.definition),
        ),
    )


def ranking_records(ranking: WiringRanking) -> list[dict[str, Any]]:
    """One row a wiring, the best first, as in the JSON output."""
    return [r.to_dict() for r in ranking.ranking]


def _last(lengths: dict[int, float], steps: int) -> str:
    """The length of the longest chain, with its k where that is not the ranking's."""
    if not lengths:
        return "–"
    k = max(lengths)
    return f"{lengths[k]:.2f}" + ("" if k == steps else f" (k = {k})")


def _wiring(r: Ranked, steps: int) -> tuple[str, ...]:
    p = f"{r.p:.1g}" if r.p < 0.1 else f"{r.p:.2f}"
    numbers = (f"{r.effect.mean:+.4f}", f"{r.effect.z:.1f}", p, percent(r.agreement), _last(r.expected_length, steps))
    return (r.name, *numbers, f"{r.effect.rows:,}", str(r.group))


def ranking_view(ranking: WiringRanking) -> View:
    """What the dump speaks for, in one sentence; then every wiring tried, in nats against the one at hand."""
    from eagle3diag.draft.lengths import expected_lengths

    here_length = _last(expected_lengths(ranking.base_rates.joint), ranking.steps)
    found, rows_read = ranking.found, count(ranking.rows, "row")
    if found is None and math.isfinite(ranking.smallest):
        small = figure_text(ranking.smallest, 2)
        shown = f"{rows_read} would have shown one better by {small} nats a token, nothing smaller (tried: {ranking.tried:,})"
        summary = f"no other wiring fits this dump better; {shown}"
    elif found is None:
        summary = f"nothing can be said: {rows_read} are too few to tell wirings apart"
    else:
        shown = f"{rows_read} could have shown one better by {figure_text(ranking.smallest, 2)} nats a token (tried: {ranking.tried:,})"
        gain = f"{figure_text(-found.effect.mean, 3)} nats likelier (z {abs(found.effect.z):.1f})"
        lengths = f"{_last(found.expected_length, ranking.steps)} in place of {here_length}"
        summary = f"another wiring fits this dump better: {found.name}. It makes the target's tokens {gain}; expected length {lengths}"
    rows = [_wiring(r, ranking.steps) for r in ranking.ranking]
    at = next((i for i, r in enumerate(ranking.ranking) if r is not found and r.effect.mean >= 0), len(rows))
    here = (
        "the wiring at hand",
        "0",
        "–",
        "–",
        percent(next(iter(ranking.base_rates.marginal), None)),
        here_length,
        f"{ranking.rows:,}",
        str(ranking.base_group),
    )
    status = ["warning" if r.better else "none" for r in ranking.ranking]
    rows.insert(at, here)
    status.insert(at, "ok" if found is None else "none")
    alike = (f"Cannot be told from it: {'; '.join(ranking.alike)}.",) if ranking.alike else ()
    return View(
        title="Wirings this dump can tell apart",
        summary=summary,
        status="warning" if found is not None else "ok" if math.isfinite(ranking.smallest) else "skipped",
        tables=(
            table(
                "Best first; nats a token against the wiring at hand, less is better",
                ("wiring", "nats", "z", "p", "first step", f"length, k = {ranking.steps}", "rows", "group"),
                rows,
                status=status,
                limit=30,
            ),
        ),
        notes=(
            *alike,
            *((f"How fine this dump measures: {shown}.",) if found and math.isfinite(ranking.smallest) else ()),
            *(("Next: give the engine or the export this wiring, or mend what departs from it, and measure again.",) if found else ()),
            "Wirings of one group cannot be told apart by this dump. p is corrected for the number of wirings tried. One that fell clearly "
            "behind was not run on further samples.",
            *(f"{n[0].upper()}{n[1:]}." for n in ranking.notes),
        ),
    )


def acceptance_records(result: ServedAcceptance) -> list[dict[str, Any]]:
    """One row a step: joint agreement trained and served."""
    joint = zip(result.trained.rates.joint, result.served.rates.joint, strict=False)
    return [{"step": i, "trained": a, "served": b} for i, (a, b) in enumerate(joint)]


def _aim(trained: Acceptance) -> str:
    return f"trained for {length_text(trained)} in chains of {max(trained.expected_length, default=0)}"


def acceptance_view(result: ServedAcceptance) -> View:
    """Both lengths in one sentence, then step by step, and what differs in the wiring."""
    aim = _aim(result.trained)
    if not result.change:
        summary, status = f"{aim}, and runs as it was trained", "ok"
    elif result.significant:
        least = f"{result.loss:.2f} tokens" if result.loss >= 0.005 else f"{figure_text(result.nats.mean, 2)} nats a token"
        summary = f"{aim}; as the engine runs it, {length_text(result.served)}: it loses {least}"
        status = "error" if result.loss >= SAME else "warning"
    else:
        summary, status = f"{aim}; as the engine runs it, {length_text(result.served)}: no loss that these rows can show", "ok"
    rows = ((str(r["step"]), percent(r["trained"]), percent(r["served"])) for r in acceptance_records(result))
    notes = [f"What differs: {result.change}."] if result.change else []
    if status in ("error", "warning"):
        notes.append("Next: eagle3diag check with this engine names each cause and how to mend it.")
    if result.change:
        t, n = result.tokens, result.nats
        told = f"{t.mean:+.3f} tokens per verification (z {t.z:.1f}), {n.mean:+.3f} nats a token (z {n.z:.1f})"
        notes.append(f"Served minus trained, row by row: {told}.")
    return View(
        title="Acceptance as served",
        summary=summary,
        status=status,
        tables=(table("Steps 0 to s all right (joint)", ("step s", "as trained", "as served"), rows),),
        notes=(
            *notes,
            f"On {count(result.trained.rates.rows, 'row')}; intervals hold 95 %.",
            *(f"{x[0].upper()}{x[1:]}." for x in result.notes),
        ),
    )


def engine_records(acceptance: EngineAcceptance) -> list[dict[str, Any]]:
    """One row a step: joint agreement trained and served."""
    if acceptance.result is not None:
        return acceptance_records(acceptance.result)
    return [{"step": i, "trained": joint, "served": None} for i, joint in enumerate(acceptance.trained.rates.joint)]


def engine_view(acceptance: EngineAcceptance) -> View:
    """The same with the engine's name, or why it has no number."""
    title = f"Acceptance with {acceptance.engine}"
    if acceptance.result is not None:
        return replace(acceptance_view(acceptance.result), title=title)
    aim = _aim(acceptance.trained)
    rows = ((str(r["step"]), percent(r["trained"])) for r in engine_records(acceptance))
    return View(
        title=title,
        summary=f"{aim}; served: no number, {acceptance.why}",
        status="error" if "refuses" in acceptance.why else "skipped",
        tables=(table("Steps 0 to s all right (joint)", ("step s", "as trained"), rows),),
        notes=(f"On {count(acceptance.trained.rates.rows, 'row')} of {acceptance.dump}.",),
    )


def loop_records(loop: GreedyLoop) -> list[dict[str, Any]]:
    """One row a position of the chain: share of rounds that kept the draft token there."""
    return [{"position": i, "accepted": share} for i, share in enumerate(loop.accepted_at_position)]


def loop_view(loop: GreedyLoop) -> View:
    """The length measured, and whether the text is that of plain greedy decoding."""
    same = {
        True: "the text is that of plain greedy decoding",
        False: "the text is not that of plain greedy decoding",
        None: "text not compared",
    }
    notes = [f"{loop.definition[0].upper()}{loop.definition[1:]}."]
    if loop.differs is not None:
        prompt, at, gap = loop.differs
        tie = ", a tie within rounding" if gap < 1e-3 else ""
        notes.insert(0, f"First difference: prompt {prompt}, token {at}; the two choices are {figure_text(gap, 2)} apart in logits{tie}.")
    told = f"{loop.mean_accept_length:.2f} tokens per verification in {count(loop.rounds, 'round')}, chains of {loop.k}"
    return View(
        title="Greedy decoding with the draft",
        summary=f"{told}; {same[loop.identical]}",
        status="warning"
        if loop.identical is False and (loop.differs is None or loop.differs[2] >= 1e-3)
        else "ok"
        if loop.identical
        else "none",
        tables=(
            table(
                "Draft tokens kept, by position",
                ("position", "share of rounds"),
                ((r["position"], percent(r["accepted"])) for r in loop_records(loop)),
            ),
            table("Rounds by draft tokens kept", ("kept", "rounds"), ((i, f"{n:,}") for i, n in enumerate(loop.counts))),
        ),
        notes=tuple(notes),
    )


def explanations_records(found: Explanations) -> list[dict[str, Any]]:
    """One row a wiring, the one at hand first, as in the JSON output."""
    return [e.to_dict() for e in (found.here, *found.others)]


def explanations_view(found: Explanations) -> View:
    """Whether the wiring at hand explains the number; else which others would."""
    seen, here = f"{found.observed:.2f} tokens seen", found.here
    expected = f"{here.length:.2f} expected as wired"
    able = found.explaining
    if here.explains:
        summary, status = f"{seen}, {expected}: the number needs no fault in the wiring", "ok"
    elif here.off < 0:
        summary, status = (
            f"{seen}, more than the {expected}: the text served is easier than that of the dump, or the wiring is another",
            "info",
        )
    elif able:
        summary, status = f"{seen}, {expected}: {count(len(able), 'other wiring')} would give that, the simplest: {able[0].name}", "warning"
    else:
        summary, status = f"{seen}, {expected}: no wiring that can be tried on this dump gives that; look elsewhere", "warning"
    rows = [
        (e.name, f"{e.length:.2f}", f"{e.error:.2f}", percent(e.agreement), f"{e.off:+.1f}", "yes" if e.explains else "no")
        for e in (here, *found.others)
    ]
    return View(
        title=f"An acceptance length of {found.observed:.2f} in chains of {found.steps}",
        summary=summary,
        status=status,
        tables=(table("Simple explanations first", ("wiring", "length", "error", "first step", "off by", "explains it"), rows, limit=25),),
        notes=(
            f"Off by: expected minus seen, in errors of {count(found.rows, 'row')} that allow for another text. Text in service is not "
            "that of the dump, so several wirings may fit; a ranking goes by the dump alone.",
            *(f"{n[0].upper()}{n[1:]}." for n in found.notes),
        ),
    )
