"""Which token a row of states belongs to, told from the states alone.

Three kinds of evidence, each a score per shift ``s`` (the rows fit the tokens ``s`` places on; 0 is right, -1 means one row late):

* ``identity``: rows of equal tokens resemble each other more than rows of different ones, in every layer of every transformer, whatever
  basis the states are in. Needs no target.
* ``embedding``: the rows of HF index 0 *are* embedding rows.
* ``prediction``: the final state, through norm and head, prefers the next token.

A score is in units of its own noise: a mean over n pairs times sqrt(n), over the spread of all pairs, doubly centred. On 192 rows of a
30-layer model the true shift scores 40 to 75 and its neighbours a third to two thirds of that; 8 is
demanded of any other shift, and that the right one scores below 0.85 of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SAME", "Scores", "Tables", "centred", "embedding_scores", "identity_scores", "lookup_scores", "normed", "prediction_scores"]

LEAST_PAIRS = 10
SAME = 0.95  #: cosine with the embedding row: 1 for HF index 0, 0.0 to 0.6 for HF index 1 on
SHIFTS = 8


class Tables(Protocol):
    """What of the target's tables is used here; ``draft.tables.TargetTables`` is one."""

    @property
    def embedding(self) -> Tensor | None: ...  #: [rows, hidden], any float dtype
    @property
    def head(self) -> Tensor | None: ...  #: the same
    @property
    def final_norm(self) -> Tensor | None: ...  #: [hidden]
    @property
    def eps(self) -> float: ...  #: of the final norm
    def known(self, ids: Tensor) -> Tensor: ...  #: bool, which ids have rows here
    def embed(self, ids: Tensor) -> Tensor: ...  #: [..., hidden]; CheckpointError for an id without a row
    def head_rows(self, ids: Tensor) -> Tensor: ...  #: the same of the head


@dataclass(frozen=True, slots=True)
class Scores:
    """Score by shift; empty where there is too little to tell."""

    by_shift: Mapping[int, float] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The shift that fits best; 0 where there is nothing to tell, and in a tie."""
        return max(self.by_shift, key=lambda s: (self.by_shift[s], -abs(s)), default=0)

    @property
    def top(self) -> float:
        """Its score."""
        return max(self.by_shift.values(), default=0.0)

    @property
    def now(self) -> float:
        """The score of shift 0."""
        return self.by_shift.get(0, 0.0)

    def __add__(self, other: Scores) -> Scores:
        """Evidence of two samples together."""
        keys = self.by_shift.keys() | other.by_shift.keys()
        return Scores({s: self.by_shift.get(s, 0.0) + other.by_shift.get(s, 0.0) for s in sorted(keys)})


def centred(states: Tensor, good: Tensor) -> Tensor:
    """Rows as directions without their common part: [rows, hidden] float32, rows that are not good are zero."""
    import torch

    x = torch.nan_to_num(states.float())
    x = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    x = (x - x[good].mean(0)) * good[:, None]
    out: Tensor = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return out


def identity_scores(states: Tensor, tokens: Tensor, good: Tensor, shifts: int = SHIFTS) -> Scores:
    """Do rows of equal tokens resemble each other?

    Args:
        states: [rows, hidden].
        tokens: [rows] int64.
        good: [rows] bool, rows to use.
        shifts: how far to look to either side.
    """
    import torch

    n, used = len(tokens), int(good.sum())
    if used < 4:
        return Scores({})
    x = centred(states, good)  # rows that are not good are zero, and so are their products
    likeness = x @ x.T
    pairs = used * (used - 1)
    own = likeness.diagonal()
    mean = (float(likeness.sum()) - float(own.sum())) / pairs
    spread = max(0.0, (float(likeness.square().sum()) - float(own.square().sum())) / pairs - mean * mean) ** 0.5
    if not spread > 0:
        return Scores({})
    first, second = torch.triu(tokens[:, None] == tokens[None, :], 1).nonzero().unbind(1)
    out: dict[int, float] = {}
    for s in range(-min(shifts, n - 2), min(shifts, n - 2) + 1):
        i, j = first - s, second - s  # row i stands beside token i + s
        inside = (i >= 0) & (j < n)
        i, j = i[inside], j[inside]
        both = good[i] & good[j]
        count = int(both.sum())
        if count >= LEAST_PAIRS:
            out[s] = (float(likeness[i[both], j[both]].mean()) - mean) / spread * count**0.5
    return Scores(out if 0 in out else {})


def _diagonals(left: Tensor, right: Tensor, left_good: Tensor, right_good: Tensor, offset: int, shifts: int) -> Scores:
    """Doubly centred products of row t with column t + offset + s, summed per shift."""
    a = (left - left[left_good].mean(0)) * left_good[:, None]
    b = (right - right[right_good].mean(0)) * right_good[:, None]
    n = len(a)
    products = a @ b.T
    spread = float(products[left_good][:, right_good].std())
    out: dict[int, float] = {}
    for s in range(-shifts, shifts + 1):
        d = offset + s
        low, high = max(0, -d), n - max(0, d)
        if high - low < LEAST_PAIRS or not spread > 0:
            continue
        both = left_good[low:high] & right_good[low + d : high + d]
        count = int(both.sum())
        if count >= LEAST_PAIRS:
            out[s] = float(products.diagonal(d)[both].mean()) / spread * count**0.5
    return Scores(out if 0 in out else {})


def normed(states: Tensor, tables: Tables) -> Tensor:
    """The final norm (RMSNorm) over states: [rows, hidden] float32."""
    import torch

    x = torch.nan_to_num(states.float())
    weight = tables.final_norm.float() if tables.final_norm is not None else 1.0
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + tables.eps) * weight


def _rows(tables: Tables, tokens: Tensor, head: bool) -> tuple[Tensor, Tensor]:
    """(rows [n, hidden] float32, which of them are known)."""
    import torch

    known = tables.known(tokens)
    table = tables.head if head else tables.embedding
    assert table is not None
    out = torch.zeros(len(tokens), table.shape[-1])
    if bool(known.any()):
        out[known] = (tables.head_rows if head else tables.embed)(tokens[known]).float()
    return out, known


def prediction_scores(states: Tensor, tokens: Tensor, good: Tensor, tables: Tables, *, norm: bool, shifts: int = SHIFTS) -> Scores:
    """Does the state prefer the token after its own?

    Args:
        states: [rows, hidden], the final ones.
        norm: they still have to go through the final norm.
        tables: with a head.
    """
    rows, known = _rows(tables, tokens, head=True)
    if int(known.sum()) < LEAST_PAIRS or int(good.sum()) < LEAST_PAIRS or states.shape[1] != rows.shape[1]:
        return Scores({})
    x = normed(states, tables) if norm else states.float().nan_to_num()
    return _diagonals(x, rows, good, known, 1, shifts)


def embedding_scores(states: Tensor, tokens: Tensor, good: Tensor, tables: Tables, shifts: int = SHIFTS) -> Scores:
    """Does the state hold the embedding of its token, in part?

    Args:
        tables: with an embedding.
    """
    rows, known = _rows(tables, tokens, head=False)
    if int(known.sum()) < LEAST_PAIRS or int(good.sum()) < LEAST_PAIRS or states.shape[1] != rows.shape[1]:
        return Scores({})
    return _diagonals(centred(states, good), rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-30), good, known, 0, shifts)


def lookup_scores(states: Tensor, tokens: Tensor, good: Tensor, tables: Tables, shifts: int = SHIFTS) -> Scores:
    """Is the state the embedding row of its token, as HF index 0 must be? Nothing where it is at no shift (DMP606 asks what it is then).

    Args:
        tables: with an embedding.
    """
    import torch

    rows, known = _rows(tables, tokens, head=False)
    if states.shape[1] != rows.shape[1]:
        return Scores({})
    x, n = torch.nan_to_num(states.float()), len(tokens)
    out: dict[int, float] = {}
    for s in range(-shifts, shifts + 1):
        low, high = max(0, -s), n - max(0, s)
        both = good[low:high] & known[low + s : high + s] if high > low else good[:0]
        if int(both.sum()) >= LEAST_PAIRS:
            likeness = torch.cosine_similarity(x[low:high][both], rows[low + s : high + s][both])
            out[s] = float(likeness.median()) * int(both.sum()) ** 0.5
            if float(likeness.median()) < SAME:
                out[s] = min(out[s], 1.0)
    return Scores(out if 0 in out and max(out.values()) > 1.0 else {})
