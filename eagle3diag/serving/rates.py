"""SGLang's ``accept rate`` has had three denominators: which one is in force, from the version or from the pairs length / rate.

0.5.4 to 0.5.5: (accepted + bonus) / (steps x (num_steps + 1)). 0.5.6 to 0.5.10: (accepted + bonus) / (steps x num_draft_tokens), the same
for a chain. From 0.5.11: accepted / (steps x (num_draft_tokens - 1)). Both printed numbers are rounded to 0.01, so a pair allows a
range of denominators. Source: engines.md 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eagle3diag.errors import Eagle3DiagError

__all__ = ["BONUS", "DRAFTS", "USUAL", "RateReading", "by_version", "reading"]

BONUS, DRAFTS = "with bonus", "drafts only"
USUAL = 17  # draft tokens, the bonus token's place counted, up to which a chain is usual
_MOST = 65  # draft tokens tried, the root counted
_FEW = 0.02  # share of windows that may disagree (a window in which the chain length changed)


@dataclass(frozen=True, slots=True)
class RateReading:
    """What the pairs allow.

    ``definition`` is ``with bonus``, ``drafts only``, ``unknown`` (both fit) or ``none`` (neither does); ``tokens`` are the values of
    num_draft_tokens (the bonus token's place counted) that fit.
    """

    definition: str
    tokens: tuple[int, ...]
    both: Mapping[str, tuple[int, ...]]
    source: str


def by_version(version: str | None) -> str | None:
    """The definition of a release, None where it prints no rate or is not known."""
    if version is None:
        return None
    from eagle3diag.engines.contract import load_contract

    try:
        value = load_contract("sglang", version).facts["accept_rate"].value
    except Eagle3DiagError:
        return None
    return {"with-bonus": BONUS, "with-bonus-steps": BONUS, "drafts": DRAFTS}.get(value)


def reading(pairs: Mapping[tuple[float, float], int], version: str | None = None) -> RateReading:
    """The definition in force and the draft tokens that fit.

    Args:
        pairs: (length, rate) as printed -> windows.
        version: of the engine, where known; it decides.
    """
    both = {BONUS: tuple(_fits(pairs, BONUS)), DRAFTS: tuple(_fits(pairs, DRAFTS))}
    told = by_version(version)
    if told is not None:
        return RateReading(told if both[told] else "none", both[told], both, f"SGLang {version}")
    fit = [d for d, tokens in both.items() if tokens]
    if len(fit) == 1:
        return RateReading(fit[0], both[fit[0]], both, "the pairs length / rate")
    if not fit:
        return RateReading("none", (), both, "no definition fits the pairs length / rate")
    usual = [d for d in fit if min(both[d]) <= USUAL]
    if len(usual) == 1:
        other = min(min(both[d]) for d in fit if d not in usual) - 1
        tokens = tuple(n for n in both[usual[0]] if n <= USUAL)
        return RateReading(usual[0], tokens, both, f"the pairs length / rate (the other definition would need chains of {other} or more)")
    return RateReading("unknown", tuple(sorted({*both[BONUS], *both[DRAFTS]})), both, "both definitions fit the pairs length / rate")


def _fits(pairs: Mapping[tuple[float, float], int], definition: str) -> Iterable[int]:
    """Draft tokens under which the printed rate follows from the printed length, in all but a few windows."""
    most = _FEW * sum(pairs.values())
    by = 0 if definition == BONUS else 1
    common = sorted(pairs.items(), key=lambda p: -p[1])
    for tokens in range(2, _MOST):
        wrong = 0
        for (length, rate), n in common:
            low, high = (length - by - 0.005) / (tokens - by) - 0.00501, (length - by + 0.005) / (tokens - by) + 0.00501
            wrong += n if not low <= rate <= high or length > tokens + 0.005 else 0
            if wrong > most:
                break
        else:
            yield tokens
