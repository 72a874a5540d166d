"""SRV801 to SRV805 and SRV808: what the acceptance in a serving log looks like, and against what was to be expected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import CheckpointError
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.registry import NotJudged, finding, rule
from eagle3diag.rules.srv_look import Expected, from_dump, from_training, judged, own_chain

if TYPE_CHECKING:  # a check without a log pays nothing for this room
    from eagle3diag.serving.model import ServingLog

__all__: list[str] = []

LOST = 0.1  #: tokens from which a loss is an error
_FAR = 0.85  # share of the expected accepted tokens below which service is far below
_TRAINING = 0.7  # the same against training metrics, which flatter


def _numbers(log: ServingLog) -> dict[str, Any]:
    """The log in the numbers every finding shows."""
    assert log.acceptance_length is not None
    out: dict[str, Any] = {"acceptance_length": round(log.acceptance_length, 4)}
    if log.interval is not None:
        out["interval"] = [round(x, 4) for x in log.interval]
    if log.k is not None:
        out["k"] = log.k
    if log.drafts:
        out |= {"drafts": log.drafts, "accepted": log.accepted}
    elif log.windows:
        out["windows"] = log.windows
    if log.per_position:
        out["per_position"] = [round(p, 4) for p in log.per_position[:16]]
    return out


@rule("SRV801", severity=Severity.ERROR, needs=("log",))
def collapse(case: Case) -> Iterator[Finding]:
    """Acceptance collapsed: the length is about 1.00.

    ## What is wrong
    The target accepts next to none of the drafted tokens. Each verification yields its own token and nothing more.

    ## Why it costs acceptance
    Everything is lost: drafting and verifying cost time and give nothing, so the server is slower than without a draft.

    ## How it is detected
    The pooled acceptance length with the bonus token, in whatever form the log prints it, is at most 1.06, beyond its error; a warning up
    to 1.15. At least 50 verifications are needed. A pooled length can hide a collapse, so each engine of several is judged by itself, and
    so is the end of the log: 20 lines or more (10 of vLLM's) that are at 1.00 until it stops, after better ones.

    ## How to fix it
    A sound draft never comes near this. Check the draft against the engine (`eagle3diag check DRAFT --engine … --target … --launch …`):
    tensors dropped or never filled, a missing mapping, the wrong algorithm, layers the engine does not capture. If a reference draft
    collapses on the same server too (`--control-log`), the engine is at fault.

    ## Engine versions
    Every version; which fault collapses which version is what KEY, AUX and ENG findings say.

    ## Source
    Field reports A2, A4, C6, D4, E6: length 1.00, rate 0.00.
    """
    from eagle3diag.serving.patterns import collapsed, partly_collapsed

    log = judged(case)
    seen = collapsed(log) or partly_collapsed(log)
    if seen is None:
        return
    severity = Severity.WARNING if seen.kind == "little" else Severity.ERROR
    yield finding(
        "SRV801",
        seen.text,
        severity=severity,
        evidence=_numbers(log)
        | dict(seen.evidence)
        | ({"warnings in the log": [w.text for w in log.warnings[:5]]} if log.warnings else {}),
        remedy="Check draft, target and launch line together: eagle3diag check DRAFT --target T --engine E==V --log FILE. A reference "
        "draft's log from the same server (--control-log) tells whether the engine is at fault.",
        where="acceptance length",
    )


@rule("SRV802", severity=Severity.ERROR, needs=("log",))
def pattern(case: Case) -> Iterator[Finding]:
    """The per-position pattern matches a known fault.

    ## What is wrong
    Either the first position is sound and a later one breaks off, or only a few per cent pass the first and next to nothing the second.

    ## Why it costs acceptance
    A break after a sound position means that what a draft step hands to the next is wrong (state before instead of after the norm,
    positions, cache): all further drafting is wasted. A few per cent at the first position means that states, head or mapping are not
    those of training.

    ## How it is detected
    From the joint per-position rates and their counts: a position that passes less than 12 % of those before it and less than 0.35 of the
    rate before, or a first position below 12 % with a second near nothing, each beyond three standard errors. Weak drafts fall fast too;
    the limits leave them out.

    ## How to fix it
    A break: compare `norm_output`, `norm_before_residual`, the engine's feedback quirks (ENG507) and the number of draft layers; run
    `eagle3diag wirings`. A few per cent: compare the layers captured (AUX), the mapping (VAL305 to VAL307), what was loaded (KEY).

    ## Engine versions
    Every version.

    ## Source
    Field reports C9, J6, J11, J12 (recurrence); A6, D1, C14, D4 (states, mapping).
    """
    from eagle3diag.serving.patterns import recurrence, wrong_features

    log = judged(case)
    for seen, why in (
        (recurrence(log), "what one draft step feeds to the next is not what the draft was trained with"),
        (wrong_features(log), "states, head or mapping that reach the draft are not those of training"),
    ):
        if seen is None:
            continue
        remedy = (
            "Check the norm flags and the engine's feedback (ENG502, ENG507), and run eagle3diag wirings DRAFT DUMP."
            if seen.kind == "recurrence"
            else "Check which layers the engine captures and what it loads: eagle3diag check DRAFT --target T --engine E==V."
        )
        yield finding("SRV802", f"{seen.text}: {why}", evidence=_numbers(log) | dict(seen.evidence), remedy=remedy, where=seen.kind)


@rule("SRV803", severity=Severity.ERROR, needs=("log", "draft", "dump|metrics"))
def below_expected(case: Case) -> Iterator[Finding]:
    """Observed acceptance is far below the offline prediction, from a dump or from the training run's own metrics.

    ## What is wrong
    The draft can do more than the server gets out of it: the checkpoint is innocent, or loses something on its way into the engine.

    ## Why it costs acceptance
    The difference in tokens per verification is what is lost.

    ## How it is detected
    The draft's own wiring is run on the dump, for chains as long as the log's, and the lengths are compared with both errors: an error
    where 0.1 tokens or more are missing beyond three standard errors and more than 15 % of the accepted ones, a warning where less.
    Training metrics are teacher-forced and often judged inside the draft's vocabulary, so against them less than 70 % is needed.

    ## How to fix it
    Compare what the engine runs with what was trained: `eagle3diag serve DRAFT --engine E==V --target T --dump D`, `eagle3diag wirings
    DRAFT DUMP --observed LENGTH`. If texts in service differ much from the dump's, dump some of them.

    ## Engine versions
    Every version.

    ## Source
    Field reports G1 (90 % in training, 1.2 served), D3; metrics: dialects 6.
    """
    log = judged(case)
    k = own_chain(log)
    reasons, seen = [], False
    for have, predict in (("dump", from_dump), ("metrics", from_training)):
        if not case.has(have):
            continue
        try:
            expected = predict(case, k)
        except (NotJudged, CheckpointError) as why:
            reasons.append(str(why))
            continue
        seen = True
        found = _below(case, log, expected, training=have == "metrics")
        if found is not None:
            yield found
            return
    if not seen:
        raise NotJudged("; ".join(reasons))


def _below(case: Case, log: ServingLog, expected: Expected, *, training: bool) -> Finding | None:
    from eagle3diag.serving.compatible import observed

    seen = observed(log)
    assert seen is not None
    assert log.acceptance_length is not None
    lost = expected.length - log.acceptance_length
    error = (expected.error**2 + seen.error**2) ** 0.5
    share = (log.acceptance_length - 1) / (expected.length - 1) if expected.length > 1 else 1.0
    if lost <= 3 * error or lost <= 0.01 or (training and share >= _FAR):
        return None
    far = share < (_TRAINING if training else _FAR)
    severity = Severity.ERROR if lost >= LOST and far else Severity.WARNING
    chain = f"chains of {expected.k}" if log.k is not None else f"chains of {expected.k} (the log does not tell its own; at least)"
    evidence: dict[str, Any] = _numbers(log) | {
        "expected_length": round(expected.length, 4),
        "expected_by": expected.source,
        "lost_tokens": round(lost, 4),
        "standard_errors": round(lost / error, 1),
        "kept": round(share, 4),
    }
    if expected.joint:
        evidence["expected_per_position"] = [round(j, 4) for j in expected.joint]
    if expected.assumes:
        evidence["assumes"] = expected.assumes
    if expected.caveats:
        evidence["caveats"] = list(expected.caveats)
    by = "the dump" if not training else f"training ({expected.source})"
    text = f"{log.acceptance_length:.2f} tokens per verification in service, {expected.length:.2f} by {by} for {chain}"
    tail = "the draft is innocent, or loses it on the way into the engine" if not training else "what was trained does not reach the engine"
    return finding(
        "SRV803",
        f"{text}: {tail}",
        severity=severity,
        evidence=evidence,
        remedy="Compare what the engine runs with what was trained (eagle3diag serve DRAFT --engine E==V --target T --dump D), and "
        "which wiring would give this number (eagle3diag wirings DRAFT DUMP --observed LENGTH).",
        where="acceptance length",
        engines=(case.served.contract.label,) if case.served is not None else (),
    )


@rule("SRV804", severity=Severity.INFO, needs=("log",))
def trap(case: Case) -> Iterator[Finding]:
    """A metric trap: a number in the log is not what it looks like.

    ## What is wrong
    Nothing, with the draft. A number is defined otherwise than its reader thinks: a rate that counts the bonus token, a length without
    it, a mean of requests beside a pooled one, positions printed beyond the chain, a tree's nodes in a denominator, simulated acceptance.

    ## Why it costs acceptance
    It does not; it makes a sound draft look bad, or a dead one (rate 0.20 with five draft tokens) look alive.

    ## How it is detected
    From the engine's version, or from the numbers themselves: length and rate allow only one definition, positions sum to the length minus
    one, counts give the mean beside them. What does not follow is reported. Simulated acceptance is a warning.

    ## How to fix it
    Compare acceptance lengths with the bonus token, pooled, at the same k, and nothing else.

    ## Engine versions
    SGLang 0.5.4 to 0.5.10 (rate with the bonus token); vLLM 0.8.5 (length without it), V0 (matches after a miss); vLLM's offline script
    (six positions whatever k is).

    ## Source
    engines.md 6, vllm_transitions.md 4, field reports J13, K1 to K12.
    """
    log = case.log
    assert log is not None
    if not log.readable:
        raise NotJudged("the log says nothing on acceptance (SRV809)")
    for t in log.traps:
        if t.kind == "foreign":
            continue
        yield finding(
            "SRV804",
            t.text,
            severity=Severity.WARNING if t.kind == "simulated" else Severity.INFO,
            evidence={"acceptance_length": round(log.acceptance_length or 1.0, 4), **t.evidence},
            remedy="Compare pooled acceptance lengths with the bonus token, at the same chain length.",
            where=t.kind,
        )


@rule("SRV805", severity=Severity.WARNING, needs=("log",))
def repetition(case: Case) -> Iterator[Finding]:
    """Repetitive output inflates acceptance.

    ## What is wrong
    Later positions are accepted as often as the first, or nearly everything is. Text that repeats itself is easy to draft.

    ## Why it costs acceptance
    It does not; it hides what acceptance will be on other text, and a broken target (endless repetition) may be behind it.

    ## How it is detected
    The last position keeps at least 97 % of the first, with three or more positions; or half of the verifications accept all and hardly any
    something in between. Where none or all are accepted exactly, SRV808 speaks; where all are, both do.

    ## How to fix it
    Look at the answers. Measure on varied prompts with the sampling of service.

    ## Engine versions
    All: it does not depend on the engine.

    ## Source
    Field reports J13 (0.85, 0.85, 0.85), G11.
    """
    from eagle3diag.serving.patterns import flat

    log = judged(case)
    seen = flat(log)
    if seen is not None:
        yield finding(
            "SRV805",
            f"{seen.text}: the output repeats itself, or the target's logits are not numbers",
            evidence=_numbers(log) | dict(seen.evidence),
            remedy="Look at the answers themselves, and measure on varied prompts.",
            where="per position",
        )


@rule("SRV808", severity=Severity.ERROR, needs=("log",))
def not_a_number(case: Case) -> Iterator[Finding]:
    """NaN signature: a verification accepts nothing or everything.

    ## What is wrong
    Lengths are 1 or exactly k + 1, and nothing in between. A comparison with NaN always gives the same answer, so a verification whose
    logits are NaN accepts none or all.

    ## Why it costs acceptance
    The output of such steps is garbage (often one token again and again), whatever the length says.

    ## How it is detected
    The histogram of accepted tokens is empty between its ends, or holds 2 % there; or all positions are accepted equally often and by no
    means always; or every verification accepts all; or every window of the log is at 1.00 or at k + 1.

    ## How to fix it
    Look at the answers; check the target's and the draft's logits (AGR705, VAL301), the attention backend, and quantised scales.

    ## Engine versions
    TensorRT-LLM one-engine on Hopper before mid-2025; vLLM with an fp8 target and an EAGLE-1 draft in 2024; any with NaN in the draft.

    ## Source
    Field reports J5, I2.
    """
    from eagle3diag.serving.patterns import nan_signature

    log = judged(case)
    seen = nan_signature(log)
    if seen is not None:
        yield finding(
            "SRV808",
            f"{seen.text}: logits are probably not numbers",
            evidence=_numbers(log) | dict(seen.evidence) | ({"warnings": [w.text for w in log.warnings if w.key == "not a number"]}),
            remedy="Look at the answers of such requests, and search draft and target for NaN (eagle3diag check DRAFT --dump D).",
            where="accepted per verification",
        )
