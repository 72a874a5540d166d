"""Agreement by where a row stands and by what the target says there.

Without a tokenizer, token classes are those that ids and the text itself tell: whether the draft can name the token, whether it is one of
the commonest of the dump, whether the text had it before, and how sure the target was where its probabilities are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3diag.display import Piece, data
from eagle3diag.draft.lengths import expected_lengths, rates
from eagle3diag.draft.measure import Bench, Measured

__all__ = ["Part", "by_class", "by_position"]

_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
_COMMON = 10
_BACK = 128  #: tokens looked back for a repetition


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Part(Piece):
    """A part of the rows: its first step's top-1 with a standard error, and the length of the longest chain."""

    name: str
    n: int
    marginal: float
    error: float
    expected_length: float

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one part."""
        return data(
            {
                "name": self.name,
                "n": self.n,
                "marginal": round(self.marginal, 6),
                "error": round(self.error, 6),
                "expected_length": round(self.expected_length, 6),
            }
        )


def _part(name: str, m: Measured, chosen: Tensor) -> Part | None:
    n = int(chosen.sum())
    if n == 0:
        return None
    r = rates(m.right[chosen])
    p = r.marginal[0]
    return Part(name=name, n=n, marginal=p, error=math.sqrt(p * (1 - p) / n), expected_length=list(expected_lengths(r.joint).values())[-1])


def by_position(m: Measured) -> tuple[Part, ...]:
    """Rows by the position of the state that the draft starts from; ranges without rows are left out."""
    parts = []
    for low, high in zip(_EDGES, (*_EDGES[1:], None), strict=True):
        chosen = (m.row >= low) if high is None else (m.row >= low) & (m.row < high)
        parts.append(_part(f"{low} to {high - 1}" if high is not None else f"from {low}", m, chosen))
    return tuple(p for p in parts if p is not None)


def by_class(m: Measured, bench: Bench) -> tuple[Part, ...]:
    """Rows by the target's token of the first step."""
    wanted, named = m.expected[:, 0], m.nameable[:, 0]
    ids, counts = torch.unique(wanted, return_counts=True)
    common = torch.isin(wanted, ids[counts.argsort(descending=True)[:_COMMON]])
    seen = torch.zeros(len(m), dtype=torch.bool)
    sure = torch.full((len(m),), math.nan)
    for i, (sample, _) in enumerate(bench.samples):
        mine = torch.nonzero(m.sample == i).flatten()
        text, at = sample.token_ids.flatten().to(torch.int64), m.row[mine]
        for place, row in zip(mine.tolist(), at.tolist(), strict=True):
            seen[place] = bool((text[max(0, row + 2 - _BACK) : row + 2] == wanted[place]).any())
        if sample.topk_logprobs is not None:
            sure[mine] = sample.topk_logprobs.float().max(-1).values.exp()[at + 1]
    parts = [
        _part("outside the draft's vocabulary", m, ~named),
        _part(f"{_COMMON} commonest tokens", m, common),
        _part("other tokens the draft can name", m, named & ~common),
        _part(f"in the {_BACK} tokens before", m, seen),
        _part("new to the text", m, ~seen),
        _part("target sure (p of at least 0.9)", m, sure >= 0.9),
        _part("target in doubt (p below 0.5)", m, sure < 0.5),
    ]
    return tuple(p for p in parts if p is not None)
