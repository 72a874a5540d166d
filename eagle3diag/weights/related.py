"""Are two tables about the same rows? Cosines row by row, and, where the bases differ, whether the rows are arranged alike.

A table trained from a copy keeps its rows' directions, however far it drifted. One trained from scratch lives in another basis: no row
resembles its counterpart, yet rows that are close in one are close in the other. That is measured as the correlation of the two
tables' row-by-row cosines (representational similarity, Kriegeskorte 2008), against the same number for shuffled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["Relation", "relation"]

_SAME = 0.9999  # a cosine that rounding to another dtype explains
_ROWS = 512  # rows compared pair by pair
_SHUFFLES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """How two tables of the same shape relate, row i to row i.

    Attributes:
        kind: ``equal`` (up to rounding), ``drifted`` (same directions), ``rearranged`` (another basis, same neighbourhoods), ``unrelated``,
            or ``unknown`` where fewer than 16 rows can be compared.
        rows: rows compared (finite and not zero in both).
        median, low: median and 5 % quantile of the row cosines.
        chance: median cosine of rows with other rows: what an anisotropic table gives for nothing.
        arranged: correlation of the two sets of pair cosines; ``arranged_z`` the same against shuffled rows.
        scale: median ratio of row lengths, first over second.
    """

    kind: Literal["equal", "drifted", "rearranged", "unrelated", "unknown"]
    rows: int
    median: float = 0.0
    low: float = 0.0
    chance: float = 0.0
    arranged: float = 0.0
    arranged_z: float = 0.0
    scale: float = 1.0


def relation(a: torch.Tensor, b: torch.Tensor) -> Relation:
    """Compare two tables row by row.

    Args:
        a, b: float32 [n, columns], row i of one beside row i of the other.
    """
    import torch

    good = torch.isfinite(a).all(1) & torch.isfinite(b).all(1) & (a != 0).any(1) & (b != 0).any(1)
    a, b = a[good], b[good]
    n = len(a)
    if n < 16:
        return Relation(kind="unknown", rows=n)
    u, v = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1)
    cosine = (u * v).sum(1)
    others = (u * v.roll(n // 3 + 1, 0)).sum(1)
    median, low, chance = float(cosine.median()), float(cosine.quantile(0.05)), float(others.median())
    scale = float((a.norm(dim=1) / b.norm(dim=1)).median())
    if low >= _SAME and 0.99 <= scale <= 1.01:
        return Relation(kind="equal", rows=n, median=median, low=low, chance=chance, scale=scale)
    # the spread of the median of n cosines with other rows
    noise = 1.2533 * float(others.std()) / n**0.5
    if median - chance >= max(0.1, 6 * noise):
        return Relation(kind="drifted", rows=n, median=median, low=low, chance=chance, scale=scale)
    arranged, z = _arranged(u[:: -(-n // _ROWS)], v[:: -(-n // _ROWS)])
    kind: Literal["rearranged", "unrelated"] = "rearranged" if arranged >= 0.05 and z >= 6 else "unrelated"
    return Relation(kind=kind, rows=n, median=median, low=low, chance=chance, arranged=arranged, arranged_z=z, scale=scale)


def _arranged(u: torch.Tensor, v: torch.Tensor) -> tuple[float, float]:
    import torch

    n = len(u)
    u, v = u - u.mean(0), v - v.mean(0)
    u, v = torch.nn.functional.normalize(u, dim=1), torch.nn.functional.normalize(v, dim=1)
    x, y = u @ u.T, v @ v.T
    above = torch.ones(n, n, dtype=torch.bool).triu(1)
    flat = x[above] - x[above].mean()
    length = flat.norm()

    def correlation(order: torch.Tensor) -> float:
        other = y[order][:, order][above]
        other = other - other.mean()
        return float(flat @ other / (length * other.norm()).clamp_min(1e-30))

    generator = torch.Generator().manual_seed(0)
    found = correlation(torch.arange(n))
    shuffled = torch.tensor([correlation(torch.randperm(n, generator=generator)) for _ in range(_SHUFFLES)])
    return found, (found - float(shuffled.mean())) / max(float(shuffled.std()), 1e-9)
