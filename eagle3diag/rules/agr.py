"""AGR701 to AGR707: does the draft agree with its target on the dump, and if not, which wiring would?

One fault, one code: where agreement is near chance AGR701 speaks and names the wiring that explains it; otherwise AGR703 names a better
one; AGR702 is left with a fall that no wiring explains. AGR706 compares an engine with the training, AGR707 says that nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eagle3diag.rules.agr_look import K, Look, look, near_chance, ranking, served
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import label
from eagle3diag.rules.registry import NotJudged, finding, rule

if TYPE_CHECKING:
    from eagle3diag.draft.ranking import Ranked, WiringRanking

__all__: list[str] = []

_NEEDS = ("draft", "values", "dump")
_LOST = 0.1  #: tokens per verification from which a loss is an error
_WEAK = 2.0  #: expected length below which a sound draft is called weak
_SHOWN = 6


@rule("AGR701", severity=Severity.ERROR, needs=_NEEDS)
def near_chance_agreement(case: Case) -> Iterator[Finding]:
    """Agreement is near chance; names the wiring fault that explains it best.

    ## What is wrong
    On the dump's own text the draft hardly ever proposes what the target chose. Either it is wired otherwise than it was trained, or a
    part of its weights is not what was trained.

    ## Why it costs acceptance
    Acceptance is what agreement is: nothing is accepted, every draft is wasted, and serving is slower than without a draft.

    ## How it is detected
    The draft runs on the dump as its config wires it. First-step top-1 below 0.2 and below three times the share of the commonest target
    token, or below 0.05. Every other wiring the dump can show is tried on the same rows and the one that explains it is named, if one does.

    ## How to fix it
    Correct the config as the finding says. Where no wiring explains it, look at the weights (VAL301 to VAL307, KEY201) and the training.

    ## Engine versions
    All: judged without an engine.

    ## Source
    Field reports G1 and the catalogue's thresholds; wirings of dialects 3 and (c).
    """
    at = _judgeable(case)
    a = at.agreement
    if not near_chance(a):
        return
    first, ranked = a.steps[0].marginal, ranking(case)
    title = (
        f"the draft agrees with its target on {first:.1%} of {a.rows} tokens, near chance (the commonest token alone is {a.commonest:.1%})"
    )
    evidence: dict[str, Any] = {
        "agreement": round(first, 4),
        "commonest_token": round(a.commonest, 4),
        **_numbers(at),
    }
    if ranked.found is not None:
        found = ranked.found
        title += f": {found.name} would give {found.agreement:.1%}"
        evidence |= _found(ranked)
        remedy = _remedy(found)
    else:
        evidence |= {"wirings_tried": ranked.tried, "smallest_effect_nats": _finite(ranked.smallest)}
        title += "; no other wiring explains it"
        remedy = "Look for tensors never loaded or never trained (VAL301 to VAL307, KEY201), then at the text and target of the dump."
    yield finding("AGR701", title, evidence=evidence, remedy=remedy, where=_where(ranked))


@rule("AGR702", severity=Severity.WARNING, needs=_NEEDS)
def falls_from_step_to_step(case: Case) -> Iterator[Finding]:
    """Agreement falls abnormally from the first step to the second.

    ## What is wrong
    The first step is sound, the second is not, although it is fed the right token: what is fed back is not what the draft was trained on.

    ## Why it costs acceptance
    Chains end after one token: the length stays below 1 plus the first rate.

    ## How it is detected
    Teacher-forced top-1 of the second step below half of the first (sound drafts keep 0.8 to 0.95), beyond what the rows leave open, and no
    wiring of AGR703 explains it. Lost tokens are counted against a draft that keeps 0.8 of its rate from step to step.

    ## How to fix it
    Check `norm_output` and position ids of later steps, or train with more test-time-training steps: a draft trained for one step only
    behaves like this by nature.

    ## Engine versions
    All: judged without an engine.

    ## Source
    Dialects 3.1 (two meanings of `norm_output`), 3.2 (training steps); engines 5 (position gap of SGLang up to 0.5.11).
    """
    import torch

    from eagle3diag.draft.bootstrap import blocks, paired

    at = _judgeable(case)
    a = at.agreement
    if near_chance(a):
        return
    m = at.bench.all(at.bench.base)
    fall = paired(m.right[:, 1].to(torch.float64) - 0.5 * m.right[:, 0].to(torch.float64), blocks(m.sample, m.row))
    if fall.z > -3 or ranking(case).found is not None:
        return
    first, second = a.steps[0].marginal, a.steps[1].marginal
    expected, rate = 1.0, 1.0
    for step in range(K):
        rate *= first * 0.8 ** min(step, 1)
        expected += rate
    lost = expected - a.expected_length[K]
    yield finding(
        "AGR702",
        f"agreement falls from {first:.1%} at the first step to {second:.1%} at the second, although that is fed the right token",
        severity=Severity.ERROR if lost >= _LOST else Severity.WARNING,
        evidence={
            "marginal": [round(s.marginal, 4) for s in a.steps],
            "lost_tokens": round(lost, 3),
            **_numbers(at),
        },
        remedy="Check what is fed back (norm_output) and the positions of later steps; a draft trained for one step needs more of them.",
        where="norm_output",
    )


@rule("AGR703", severity=Severity.WARNING, needs=_NEEDS)
def another_wiring_is_better(case: Case) -> Iterator[Finding]:
    """Another wiring agrees clearly better than the configured one; names it and the gain.

    ## What is wrong
    The config wires the draft otherwise than it was trained: other target layers, another rope base, a norm flag, an order, a shift.

    ## Why it costs acceptance
    The draft sees inputs it was not trained on. Small faults cost hundredths of a token at first and more on harder text.

    ## How it is detected
    Every wiring the dump can show runs on the same rows. Compared is the paired difference in the negative log-likelihood of the target's
    token, with a block bootstrap (blocks of 16 to 32 rows), corrected for all wirings tried, at least 0.01 nats, and no less agreement.
    The smallest effect these rows could have shown is given; nothing below it is named. Wirings that cannot be told apart are listed.
    Error where the gain is 0.1 tokens per verification or more.

    ## How to fix it
    Write the named value into the config, then check again: a second fault may stand behind the first.

    ## Engine versions
    All: judged without an engine. What an engine makes of a right config is AGR706.

    ## Source
    Dialects 3, 4.1, (c); thresholds of the catalogue; reference runs in the sample's manifest.
    """
    at = _judgeable(case)
    if near_chance(at.agreement):
        return
    ranked = ranking(case)
    found = ranked.found
    if found is None:
        return
    before, after = at.agreement.expected_length[K], found.expected_length[K]
    gain = after - before
    others = f"; as good: {'; '.join(ranked.alike[:2])}" if ranked.alike else ""
    yield finding(
        "AGR703",
        f"{found.name} fits the dump better by {-found.effect.mean:.3f} nats per token (z {-found.effect.z:.1f}): "
        f"expected length {after:.2f} against {before:.2f}{others}",
        severity=Severity.ERROR if gain >= _LOST else Severity.WARNING,
        evidence={"gain_tokens": round(gain, 3), **_found(ranked), **_numbers(at)},
        remedy=_remedy(found),
        where=_where(ranked),
    )


@rule("AGR704", severity=Severity.WARNING, needs=_NEEDS)
def coverage_caps_acceptance(case: Case) -> Iterator[Finding]:
    """The draft's vocabulary caps acceptance: most misses are tokens it cannot propose.

    ## What is wrong
    The draft vocabulary was chosen on other text than this: most of what the target says is not in it.

    ## Why it costs acceptance
    A token outside the draft's vocabulary ends every chain, however good the draft is.

    ## How it is detected
    More than half of the first step's misses have a target token outside the draft vocabulary.

    ## How to fix it
    Count tokens on answers of this target to prompts like those served, and rebuild the mapping and head, with more tokens if need be.

    ## Engine versions
    All.

    ## Source
    Dialects 5; field reports B and G3.
    """
    at = _judgeable(case)
    a = at.agreement
    if a.misses_outside is None or a.misses_outside <= 0.5 or near_chance(a):
        return
    size, whole = at.bench.weights.sizes.draft_vocab, at.bench.vocab
    yield finding(
        "AGR704",
        f"{a.misses_outside:.0%} of the misses are tokens outside the draft's vocabulary ({size:,} ids, {a.coverage:.1%} of the target's)",
        evidence={
            "coverage": round(a.coverage, 4),
            "misses_outside": round(a.misses_outside, 4),
            "draft_vocab": size,
            "vocab": whole,
            **_numbers(at),
        },
        remedy="Rebuild the draft vocabulary from answers of this target to prompts like those served, or enlarge it, and train again.",
        where="d2t",
    )


@rule("AGR705", severity=Severity.ERROR, needs=_NEEDS)
def no_logits(case: Case) -> Iterator[Finding]:
    """Logits are NaN, infinite, or the same for every token.

    ## What is wrong
    The forward pass gives no numbers, or always the same ones: a damaged or zeroed tensor, or an overflow.

    ## Why it costs acceptance
    NaN logits propose one fixed token; acceptance is 1.00, or jumps to k + 1 where the target is broken the same way.

    ## How it is detected
    The draft runs on the dump in float32; rows with a value that is not finite are counted, and rows are compared with each other.

    ## How to fix it
    Find the tensor (VAL301, VAL302) and export the checkpoint again.

    ## Engine versions
    All.

    ## Source
    Field reports A and K: NaN embedding or head after conversion.
    """
    a = look(case).agreement
    if not a.nonfinite and not a.constant:
        return
    what = f"{a.nonfinite} of {a.rows * K} rows of logits are not finite" if a.nonfinite else "the draft's logits are the same in every row"
    yield finding(
        "AGR705",
        what,
        evidence={"nonfinite_rows": a.nonfinite, "constant": a.constant, "rows": a.rows},
        remedy="Find the damaged tensor (VAL301, VAL302) and export the checkpoint again.",
    )


@rule("AGR706", severity=Severity.WARNING, needs=(*_NEEDS, "engine"))
def engine_loses_acceptance(case: Case) -> Iterator[Finding]:
    """The wiring this engine version would run loses acceptance against the trained one; gives both.

    ## What is wrong
    The draft is sound, and this engine version runs something else: a layer it does not map, other target layers, a flag it does not
    honour, a position gap.

    ## Why it costs acceptance
    It is the difference itself: both wirings run on the same rows.

    ## How it is detected
    The engine's contract gives the wiring it would run; that and the trained one run on the dump. Error where 0.1 tokens per verification
    or more are lost, warning where less is, nothing where the loss is not significant or below 0.01 nats.

    ## How to fix it
    What the engine needs stands in the KEY, AUX, CFG and ENG findings of the same report; `eagle3diag convert` renames layers.

    ## Engine versions
    The one given.

    ## Source
    The contracts of `engines`, dialects 3, engines 5.
    """
    at = _judgeable(case)
    compared = served(case)
    if not compared.change or not compared.significant:
        return
    was, gets = compared.trained.expected_length[K], compared.served.expected_length[K]
    loss, name = compared.loss, label(case)[0]
    severity = Severity.ERROR if loss >= _LOST and compared.tokens.z < -2 else Severity.WARNING
    yield finding(
        "AGR706",
        f"{name} would run it at {gets:.2f} tokens per verification where it was trained for {was:.2f}: {compared.change}",
        severity=severity,
        evidence={
            "trained": compared.trained.to_dict(),
            "served": compared.served.to_dict(),
            "lost_tokens": round(loss, 3),
            "lost_nats": _finite(compared.nats.mean),
            "z": _finite(compared.nats.z),
            "change": compared.change,
            "rows": at.agreement.rows,
        },
        remedy="Convert or configure the draft as the KEY, AUX, CFG and ENG findings say, or take a version that runs it as trained.",
        engines=label(case),
        where=compared.change.split(" ")[0],
    )


@rule("AGR707", severity=Severity.INFO, needs=_NEEDS)
def sound_but_weak(case: Case) -> Iterator[Finding]:
    """The wiring is sound and the draft weak: no wiring does better, the agreement is what training gave.

    ## What is wrong
    Nothing in the checkpoint: it is wired as it was trained.

    ## Why it costs acceptance
    A weak draft is accepted rarely; below about two tokens per verification speculation seldom pays.

    ## How it is detected
    No other wiring is significantly better, agreement is above chance, and the expected length in chains of 4 stays below 2. The finding
    says the smallest effect these rows could have shown.

    ## How to fix it
    Train on more answers of the target itself, to prompts like those served; judge by first-step agreement on held-out dumps and by the
    fall from step to step.

    ## Engine versions
    All.

    ## Source
    Field reports G4, G5, G15.
    """
    at = _judgeable(case)
    a = at.agreement
    if near_chance(a) or a.expected_length[K] >= _WEAK:
        return
    ranked = ranking(case)
    if ranked.found is not None:
        return
    low, high = a.interval[K]
    yield finding(
        "AGR707",
        f"wiring sound, draft weak: expected length {a.expected_length[K]:.2f} ({low:.2f} to {high:.2f}), and none of {ranked.tried} other "
        "wirings is better",
        evidence={
            "marginal": [round(s.marginal, 4) for s in a.steps],
            "coverage": round(a.coverage, 4),
            "wirings_tried": ranked.tried,
            "smallest_effect_nats": _finite(ranked.smallest),
            **_numbers(at),
        },
        remedy="Train on more answers of the target to prompts like those served; judge by first-step agreement on a held-out dump.",
    )


def _judgeable(case: Case) -> Look:
    """The draft on the dump, where its logits are numbers.

    Raises:
        NotJudged: they are not.
    """
    at = look(case)
    if at.agreement.nonfinite or at.agreement.constant:
        raise NotJudged("the draft's logits are no usable numbers (AGR705)")
    return at


def _finite(value: float) -> float | None:
    return round(value, 4) if abs(value) < float("inf") else None


def _numbers(at: Look) -> dict[str, Any]:
    """What every finding states: the expected lengths, the rows behind them, and what was assumed."""
    a = at.agreement
    return {"expected_length": {str(k): round(v, 4) for k, v in a.expected_length.items()}, "rows": a.rows, "notes": list(a.notes)}


def _found(ranked: WiringRanking) -> dict[str, Any]:
    """The named wiring with its numbers."""
    found = ranked.found
    assert found is not None
    named = found.to_dict()
    return {
        "wiring": found.name,
        "kind": found.kind,
        "change": named["change"],
        "delta_nll": named["delta_nll"],
        "z": named["z"],
        "p": named["p"],
        "agreement_with_it": named["agreement"],
        "expected_length_with_it": named["expected_length"],
        "as_good": list(ranked.alike[:_SHOWN]),
        "wirings_tried": ranked.tried,
        "smallest_effect_nats": _finite(ranked.smallest),
    }


def _where(ranked: WiringRanking) -> str:
    return next(iter(ranked.found.change), "") if ranked.found is not None else ""


_REMEDIES = {
    "aux_layers": "Record layers {new} (HF indices) as the aux layers in place of {old}",
    "state": "Feed the draft the {new} states",
    "fc": "Run the draft with fc {new}",
    "rope_theta": "Set rope_theta to {new}",
    "rope_scaling": "Set rope_scaling to {new}",
    "mapping": "Restore the vocabulary mapping d2t: draft ids have to be read as {new}",
    "head": "Serve with the head of the {new}: the one at hand is not what was trained",
    "embedding": "Use the embedding of the {new}",
    "unfilled": "Load the tensors that were never filled",
    "token_shift": "Feed the token right after each state: at hand it is shifted by {old}",
    "state_shift": "Feed the state right before each token: at hand it is shifted by {old}",
    "concat": "Concatenate {new} in front of the first layer",
    "position_gap": "Let positions of later steps go on without a gap",
    "aux_norm": "Take the states {new} norm: before the target's final norm or after it",
    "sliding_window": "Run without the sliding window",
}


def _remedy(found: Ranked) -> str:
    """What to change, field by field."""
    parts = []
    for name, (old, new) in found.change.items():
        if name == "aux_layers_verify":
            continue
        words = _REMEDIES.get(name, f"Set {name} to {{new}}")
        parts.append(words.format(old=_value(old), new=_value(new)))
    return "; ".join(parts) + ". Then check again: a second fault may stand behind the first."


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:.0f}" if isinstance(value, float) and value == int(value) else str(value)
