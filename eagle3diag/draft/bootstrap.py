"""What a difference on a dump is worth: block bootstrap, paired effects, correction for the number of tries.

Neighbouring rows of one text are not independent, so rows are resampled in blocks of consecutive ones (16 to 32), never across samples.
Few blocks make a heavy-tailed statistic: a z is the normal equivalent of a t with (blocks - 1) degrees of freedom. Nothing is called
significant without saying the smallest effect these rows could have shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch

from eagle3diag.display import Piece

__all__ = ["Effect", "below", "block_size", "blocks", "holm", "normal_equivalent", "paired", "resampled", "smallest_effect", "tail"]

DRAWS = 2000
SEED = 20240229
_FEW, _MANY = 2000, 8000


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Effect(Piece):
    """A mean over rows with its block-bootstrap error.

    Attributes:
        mean: of the rows.
        se: standard error, by resampling blocks.
        z: normal equivalent of mean / se; 0 where nothing varies and the mean is 0, signed infinity where it is not.
        rows, blocks: what it rests on.
    """

    mean: float
    se: float
    z: float
    rows: int
    blocks: int


def block_size(rows: int) -> int:
    """Consecutive rows per block: 16 for few rows, 32 for many, else 24."""
    return 16 if rows < _FEW else 32 if rows >= _MANY else 24


def blocks(sample: torch.Tensor, row: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """The block each row belongs to.

    Args:
        sample: [n] int64, the sample of each row; equal samples stand together.
        row: [n] int64, its place in the sample, ascending.
        size: places a block spans, `block_size` where None.

    Returns:
        [n] int64, blocks numbered from 0 without gaps. A last piece shorter than half a block joins the one before.
    """
    n = len(sample)
    if n == 0:
        return torch.zeros(0, dtype=torch.int64)
    size = size or block_size(n)
    out = torch.empty(n, dtype=torch.int64)
    number = 0
    for one in torch.unique_consecutive(sample).tolist():
        mine = torch.nonzero(sample == one).flatten()
        place = torch.unique_consecutive((row[mine] - row[mine[0]]) // size, return_inverse=True)[1]
        last = int(place[-1])
        if last and int((place == last).sum()) * 2 < size:
            place = place.clamp(max=last - 1)
        out[mine] = place + number
        number += int(place[-1]) + 1
    return out


def resampled(values: torch.Tensor, block: torch.Tensor, *, draws: int = DRAWS, seed: int = SEED) -> torch.Tensor:
    """Means of the columns under resampled blocks.

    Args:
        values: [n, m] or [n]; NaN marks a row that does not count in that column.
        block: [n] from `blocks`.
        draws: number of resamplings.
        seed: of the private generator; equal input gives equal output.

    Returns:
        [draws, m] (or [draws]) float64 means; NaN where a drawing holds no counting row.
    """
    flat = values.ndim == 1
    wide = values.to(torch.float64).reshape(len(values), -1)
    known = ~torch.isnan(wide)
    count = int(block.max()) + 1 if len(block) else 0
    sums = torch.zeros(count, wide.shape[1], dtype=torch.float64).index_add_(0, block, wide.nan_to_num(0.0))
    rows = torch.zeros(count, wide.shape[1], dtype=torch.float64).index_add_(0, block, known.to(torch.float64))
    weight = _weights(count, draws, seed)
    means = (weight @ sums) / (weight @ rows)
    return means[:, 0] if flat else means


@lru_cache(maxsize=16)
def _weights(count: int, draws: int, seed: int) -> torch.Tensor:
    """[draws, count] float64: how often each block is drawn."""
    if count == 0:
        return torch.zeros(draws, 0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (draws, count), generator=generator)
    return torch.zeros(draws, count, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(draws, count, dtype=torch.float64))


def paired(difference: torch.Tensor, block: torch.Tensor, *, draws: int = DRAWS, seed: int = SEED) -> Effect:
    """The mean of paired differences with its block-bootstrap error.

    Args:
        difference: [n] float; NaN rows are left out.
        block: [n] from `blocks`.
        draws: resamplings.
        seed: as in `resampled`.
    """
    known = ~torch.isnan(difference)
    value, part = difference[known].to(torch.float64), block[known]
    if not len(value):
        return Effect(mean=math.nan, se=math.nan, z=0.0, rows=0, blocks=0)
    part = torch.unique(part, return_inverse=True)[1]
    count, mean = int(part.max()) + 1, float(value.mean())
    if count < 2:
        return Effect(mean=mean, se=math.inf, z=0.0, rows=len(value), blocks=count)
    # resampling B blocks shows (B - 1) / B of their variance
    se = float(resampled(value, part, draws=draws, seed=seed).std()) * math.sqrt(count / (count - 1))
    if se <= 1e-12 * max(1.0, abs(mean)):
        z = 0.0 if mean == 0 else math.copysign(math.inf, mean)
    else:
        z = normal_equivalent(mean / se, count - 1)
    return Effect(mean=mean, se=se, z=z, rows=len(value), blocks=count)


def normal_equivalent(t: float, dof: int) -> float:
    """The z whose normal tail equals the tail of ``t`` with ``dof`` degrees of freedom (Wallace 1959, within 0.1 % from 3 on)."""
    if not math.isfinite(t) or t == 0:
        return t
    return math.copysign((8 * dof + 1) / (8 * dof + 3) * math.sqrt(dof * math.log1p(t * t / dof)), t)


def tail(z: float) -> float:
    """Two-sided p of a normal z."""
    return math.erfc(abs(z) / math.sqrt(2)) if not math.isnan(z) else 1.0


def below(z: float) -> float:
    """One-sided p of a normal z for an effect below zero."""
    return 0.5 * math.erfc(-z / math.sqrt(2)) if not math.isnan(z) else 1.0


def holm(p: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Holm's adjusted p-values, in the order given: the chance that any of the tries looks this good by accident.

    Args:
        p: one per try.
        weights: shares of the error that each try may spend, of any sum; equal where None.
    """
    share = [1.0] * len(p) if weights is None else list(weights)
    order = sorted(range(len(p)), key=lambda i: p[i] / share[i])
    left, worst, out = sum(share), 0.0, [1.0] * len(p)
    for i in order:
        worst = max(worst, min(1.0, p[i] / share[i] * left))
        out[i] = worst
        left -= share[i]
    return out


def smallest_effect(se: float, tries: int, *, blocks: int = 0, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest true effect that would be found with probability ``power`` among ``tries`` corrected comparisons.

    Args:
        se: standard error of one comparison.
        tries: number of comparisons.
        blocks: blocks behind ``se``; the t quantile is used where given.
        alpha: family-wise error, two-sided.
        power: chance to find it.
    """
    if not math.isfinite(se):
        return math.inf
    z = NormalDist().inv_cdf(1 - alpha / (2 * max(1, tries)))
    if blocks > 1:  # invert normal_equivalent
        dof = blocks - 1
        scaled = z * (8 * dof + 3) / (8 * dof + 1)
        exponent = scaled * scaled / dof
        z = math.sqrt(dof * math.expm1(exponent)) if exponent < 500 else math.inf
    return (z + NormalDist().inv_cdf(power)) * se
