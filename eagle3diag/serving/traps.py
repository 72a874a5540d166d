"""Numbers in a log that are not what they look like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3diag.serving.metrics import convert
from eagle3diag.serving.model import ServingLog, Trap
from eagle3diag.serving.rates import BONUS, DRAFTS, USUAL, RateReading

if TYPE_CHECKING:
    from eagle3diag.serving.gathered import Gathered

__all__ = ["traps_of"]

_POOLED = 0.02  # tokens by which pooled and mean have to differ to be worth a word


def traps_of(log: ServingLog, rate: RateReading | None, gathered: Gathered) -> tuple[Trap, ...]:
    """Every trap of a log, each with the numbers."""
    out: list[Trap] = []
    length = log.acceptance_length
    if length is None:
        return ()
    if rate is not None and log.printed_rate is not None:
        out += _rate(log, rate, length)
    tally = gathered.tally
    if tally.unbonused:
        out.append(
            Trap(
                "bonus left out",
                f"the printed mean acceptance length leaves the bonus token out (vLLM 0.8.5): {length - 1:.2f} there is {length:.2f} "
                "elsewhere",
                {"printed": round(length - 1, 4), "with bonus": round(length, 4), "lines": tally.unbonused},
            )
        )
    for printed, k in gathered.stated.beyond[:1]:
        out.append(
            Trap(
                "beyond k",
                f"{printed} positions are printed for a chain of {k}: those from {k} on are no misses, nothing was drafted there",
                {"positions printed": printed, "k": k},
            )
        )
    if log.mean_of_requests is not None and log.requests > 1 and abs(log.mean_of_requests - length) >= _POOLED:
        out.append(
            Trap(
                "requests",
                f"pooled over all verifications the length is {length:.3f}, the mean of {log.requests} requests "
                f"{log.mean_of_requests:.3f}: a short answer weighs as much as a long one there",
                {"pooled": round(length, 4), "mean of requests": round(log.mean_of_requests, 4)},
            )
        )
    simulated = next((w for w in log.warnings if w.key == "simulated"), None)
    if simulated is not None:
        out.append(Trap("simulated", f"acceptance is simulated ({simulated.text}): these numbers say nothing about the draft", {}))
    if log.per_position and log.k is not None and log.k >= 8 and log.acceptance_rate is not None:
        first = log.per_position[0]
        if log.acceptance_rate < 0.2 and first >= 0.4:
            out.append(
                Trap(
                    "long chain",
                    f"the drafted rate of {100 * log.acceptance_rate:.1f} % is low because chains of {log.k} are drafted: the first "
                    f"position is accepted in {100 * first:.0f} %",
                    {"k": log.k, "first position": round(first, 4), "drafted rate": round(log.acceptance_rate, 4)},
                )
            )
    if log.launched.topk is not None and log.launched.topk > 1:
        out.append(
            Trap(
                "tree",
                f"top-k {log.launched.topk} drafts a tree: rates count all its nodes, and do not give the length",
                {"topk": log.launched.topk, "draft tokens": log.launched.draft_tokens},
            )
        )
    if gathered.v0:
        out.append(
            Trap(
                "old engine",
                "vLLM's V0 engine counts matches after the first miss in its rate: it cannot be compared with later versions",
                {},
            )
        )
    if "ModelOpt acceptance line" in log.formats:
        out.append(Trap("name", "ModelOpt calls the acceptance length 'AR': it is tokens per step with the bonus token, no rate", {}))
    if log.mismatches:
        out.append(
            Trap(
                "mismatch",
                f"printed numbers do not follow from those beside them: {log.mismatches[0]}"
                + (f", and {len(log.mismatches) - 1} more" if len(log.mismatches) > 1 else ""),
                {"checked": log.checked, "examples": list(log.mismatches[:5])},
            )
        )
    return tuple(out)


def _rate(log: ServingLog, rate: RateReading, length: float) -> list[Trap]:
    printed = log.printed_rate or 0.0
    if printed > 1.0:
        return [
            Trap("above one", f"the accept rate of {printed:.2f} is above 1: this version divides by too few tokens", {"printed": printed})
        ]
    k = rate.tokens[0] - 1 if len(rate.tokens) == 1 else None
    if rate.definition == BONUS:
        own = f", {convert(length, 'length', 'drafted rate', k):.2f} of the drafted tokens" if k else ""
        floor = f"; nothing accepted would still print {1 / (k + 1):.2f}" if k else ""
        return [
            Trap(
                "bonus in rate",
                f"the accept rate of {printed:.2f} counts the bonus token (SGLang 0.5.4 to 0.5.10): {length - 1:.2f} draft tokens are "
                f"accepted a step{own}{floor}",
                {
                    "printed": round(printed, 4),
                    "definition": BONUS,
                    "by": rate.source,
                    "drafted rate": None if k is None else round(convert(length, "length", "drafted rate", k), 4),
                },
            )
        ]
    if rate.definition == "unknown" and length > 1.005 and min(rate.tokens) > USUAL:
        return [
            Trap(
                "tree",
                f"the accept rate of {printed:.2f} divides by {rate.tokens[0] - 1} tokens or more: a tree's nodes are counted "
                "(top-k above 1), and the rate does not give the length",
                {"printed": round(printed, 4), "draft tokens": [rate.tokens[0] - 1, rate.tokens[-1]]},
            )
        ]
    if rate.definition == "unknown" and length > 1.005:
        fits = {d: [n - 1 for n in tokens][:6] for d, tokens in rate.both.items()}
        return [
            Trap(
                "ambiguous rate",
                f"the accept rate of {printed:.2f} may count the bonus token (k = {', '.join(map(str, fits[BONUS]))}) or not "
                f"(k = {', '.join(map(str, fits[DRAFTS]))}): length and rate alone do not tell, the engine's version would",
                {"printed": round(printed, 4), "k with bonus": fits[BONUS], "k without": fits[DRAFTS]},
            )
        ]
    return []
