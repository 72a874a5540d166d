"""From right and wrong per row and step to rates and acceptance lengths: three definitions of a rate, two of a length, each named.

A chain survives step s only if steps 0..s are all right: *joint* (what engines count per position). *Conditional* is joint over the
joint before; *marginal* ignores the steps before. The expected length of chains of k is 1 + the sum of the first k joint rates: every
row of the dump starts a chain. The *walk* starts a chain only where the one before ended, as a server does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from eagle3diag.display import Piece
from eagle3diag.draft.bootstrap import resampled

__all__ = ["DEFINITIONS", "Rates", "accepted", "expected_lengths", "interval", "rates", "walk"]

#: what each number means, as printed beside it.
DEFINITIONS: Mapping[str, str] = {
    "marginal": "share of rows whose step s proposes the target's greedy token, whatever the steps before did",
    "joint": "share of rows whose steps 0..s all propose the target's greedy token: what engines count per position",
    "conditional": "joint of step s over joint of step s-1: right, given that all steps before were right; null where no chain got there",
    "expected_length": "1 + sum of the first k joint rates: tokens per chain of k, bonus token included, every row a start",
    "walk_length": "the same where a chain starts only after the one before ended, walked over the dump from every offset",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rates(Piece):
    """Rates per step; ``conditional`` is None where no chain reached the step."""

    marginal: tuple[float, ...]
    joint: tuple[float, ...]
    conditional: tuple[float | None, ...]
    rows: int


def rates(right: torch.Tensor) -> Rates:
    """The three rates of each step.

    Args:
        right: [n, steps] bool.
    """
    n, steps = right.shape
    if n == 0:
        return Rates(marginal=(0.0,) * steps, joint=(0.0,) * steps, conditional=(None,) * steps, rows=0)
    alive = right.to(torch.int64).cumprod(1).sum(0).tolist()
    before = [n, *alive[:-1]]
    return Rates(
        marginal=tuple(c / n for c in right.sum(0).tolist()),
        joint=tuple(c / n for c in alive),
        conditional=tuple(a / b if b else None for a, b in zip(alive, before, strict=True)),
        rows=n,
    )


def accepted(right: torch.Tensor) -> torch.Tensor:
    """[n] int64: leading right steps of each row, the draft tokens a verification would keep."""
    return right.to(torch.int64).cumprod(1).sum(1)


def expected_lengths(joint: tuple[float, ...] | list[float]) -> dict[int, float]:
    """``{k: 1 + sum of the first k joint rates}``."""
    out, total = {}, 1.0
    for k, rate in enumerate(joint, 1):
        total += rate
        out[k] = total
    return out


def interval(right: torch.Tensor, block: torch.Tensor, level: float = 0.95) -> dict[int, tuple[float, float]]:
    """Block-bootstrap interval of the expected length of chains of each k.

    Args:
        right: [n, steps] bool.
        block: [n] from `bootstrap.blocks`.
        level: coverage.
    """
    if len(right) == 0:
        return {}
    lengths = 1.0 + right.to(torch.float64).cumprod(1).cumsum(1)
    means = resampled(lengths, block)
    ends = torch.quantile(means, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64), dim=0)
    return {k + 1: (float(ends[0, k]), float(ends[1, k])) for k in range(right.shape[1])}


def walk(kept: torch.Tensor, sample: torch.Tensor, row: torch.Tensor, k: int) -> float | None:
    """Mean tokens per verification when chains of k follow each other over the rows.

    A verification at row t keeps ``kept[t]`` draft tokens and adds one; the next starts that many rows on. Each sample is walked from each
    of its first k + 1 rows, so that no start is preferred.

    Args:
        kept: [n] int64 from `accepted`.
        sample, row: [n] int64; rows of one sample ascending.
        k: chain length.

    Returns:
        The mean, or None without rows.
    """
    tokens = rounds = 0
    for one in torch.unique_consecutive(sample).tolist():
        mine = sample == one
        step = dict(zip(row[mine].tolist(), (kept[mine].clamp(max=k) + 1).tolist(), strict=True))
        last, starts = max(step), sorted(step)[: k + 1]
        for at in starts:
            while at <= last:
                length = step.get(at)
                if length is None:  # a gap in the mask: go on at the next row that counts
                    at += 1
                    continue
                tokens, rounds, at = tokens + length, rounds + 1, at + length
    return tokens / rounds if rounds else None
