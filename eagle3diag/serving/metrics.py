"""Acceptance arithmetic: one definition each, named, and the ways between them.

With ``a`` the accepted tokens per verification and ``k`` the drafted ones: ``length`` = 1 + a (the bonus token counted), ``length without
bonus`` = a, ``drafted rate`` = a / k, ``rate with bonus`` = (1 + a) / (k + 1). Pooled numbers divide sums by sums; a mean of requests
weighs a short answer as much as a long one. Sources: engines.md 6, vllm_transitions.md 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from eagle3diag.errors import UsageError

__all__ = [
    "DEFINITIONS",
    "alpha_of",
    "conditional",
    "convert",
    "error_of",
    "extended",
    "geometric",
    "histogram_of",
    "joint_of",
    "joint_of_histogram",
    "spread",
]

DEFINITIONS = {
    "length": "tokens per verification, bonus token counted: 1 + accepted / drafts",
    "length without bonus": "accepted / drafts",
    "drafted rate": "accepted / drafted tokens, no bonus token on either side",
    "rate with bonus": "(accepted + drafts) / (drafts x (k + 1))",
    "per position, joint": "share of verifications in which this position and all before it were accepted",
    "per position, conditional": "the same, of those in which all before it were accepted",
}


def convert(value: float, source: str, to: str, k: int | None = None) -> float:
    """One of the four scalar definitions as another.

    Args:
        value: in the definition ``source``.
        source, to: names in ``DEFINITIONS`` (the per-position ones are no scalars).
        k: drafted tokens per verification; needed for the rates.

    Raises:
        UsageError: an unknown name, or a rate without k.
    """
    scalars = list(DEFINITIONS)[:4]
    for name in (source, to):
        if name not in scalars:
            raise UsageError(f"no acceptance number {name!r}: there are {', '.join(scalars)}")
        if "rate" in name and (k is None or k < 1):
            raise UsageError(f"{name} needs k, the drafted tokens per verification")
    n = k or 0
    a = {"length": value - 1, "length without bonus": value, "drafted rate": value * n, "rate with bonus": value * (n + 1) - 1}[source]
    return {"length": 1 + a, "length without bonus": a, "drafted rate": a / n if n else 0.0, "rate with bonus": (1 + a) / (n + 1)}[to]


def conditional(joint: Sequence[float]) -> tuple[float | None, ...]:
    """Each joint rate over the one before it; None where nothing was left."""
    out: list[float | None] = []
    before = 1.0
    for rate in joint:
        out.append(rate / before if before > 0 else None)
        before = rate
    return tuple(out)


def joint_of(rates: Sequence[float], kind: str) -> tuple[float, ...]:
    """Joint rates.

    Conditional ones multiply. Marginal ones are multiplied too, as if steps were independent: an estimate, and what the trainers' own
    simulated lengths do.
    """
    if kind == "joint":
        return tuple(rates)
    out, left = [], 1.0
    for rate in rates:
        left *= rate
        out.append(left)
    return tuple(out)


def joint_of_histogram(histogram: Sequence[int]) -> tuple[float, ...]:
    """Joint rates from verifications by number of accepted tokens (index 0: none)."""
    total = sum(histogram)
    return tuple(sum(histogram[i:]) / total for i in range(1, len(histogram))) if total else ()


def histogram_of(joint: Sequence[float], drafts: float) -> tuple[float, ...]:
    """The way back: expected verifications by number of accepted tokens."""
    edges = [1.0, *joint, 0.0]
    return tuple(max(0.0, drafts * (a - b)) for a, b in pairwise(edges))


def extended(joint: Sequence[float], k: int) -> tuple[float, ...]:
    """Joint rates of a chain of k from fewer: every further step keeps what the last one kept, a first step alone two thirds of it."""
    out = list(joint[:k])
    if not out:
        return ()
    keeps = out[-1] / out[-2] if len(out) > 1 and out[-2] > 0 else out[-1] * 2 / 3
    while len(out) < k:
        out.append(out[-1] * keeps)
    return tuple(out)


def spread(joint: Sequence[float]) -> float:
    """Variance of the accepted tokens of one verification, exact: E[X] = sum p_i, E[X^2] = sum (2 i - 1) p_i."""
    mean = sum(joint)
    return max(0.0, sum((2 * i - 1) * p for i, p in enumerate(joint, 1)) - mean * mean)


def error_of(joint: Sequence[float], drafts: float) -> float:
    """Standard error of the length from counts; where nothing or everything was accepted, the rule of three stands in."""
    if drafts <= 0:
        return math.inf
    return max(math.sqrt(spread(joint) / drafts), 1.0 / drafts)


def geometric(alpha: float, k: int) -> float:
    """Length of a chain of k in which every step is kept with probability ``alpha``."""
    return 1.0 + sum(alpha**i for i in range(1, k + 1))


def alpha_of(length: float, k: int) -> float:
    """The per-step probability that gives ``length`` in a chain of k, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if geometric(middle, k) < length else (low, middle)
    return (low + high) / 2
