"""Numbers per token: the L2 norm, mean and largest absolute value of each row of one slot, in small float32 pieces.

Pieces of 128 Ki elements stay in a core's L2 cache, so a dump is read from memory once. Each row is reduced by itself along its
channels: the result does not depend on how rows are grouped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["RowStats", "one_thread", "pieces", "row_kurtosis", "row_stats", "shared_beginning"]

_PIECE = 1 << 17  #: elements per step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowStats:
    """Per row of one slot.

    Attributes:
        l2: [rows] float64, inf or nan where the row holds Inf or NaN.
        mean: [rows] float64, mean over channels.
        max_abs: [rows] float64.
        finite: [rows] bool, no NaN and no Inf in the row.
    """

    l2: Tensor
    mean: Tensor
    max_abs: Tensor
    finite: Tensor


class _Threads:
    """How many are inside ``one_thread`` at this moment, and what torch's setting was before the first."""

    lock = Lock()
    inside = 0
    before = 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Small pieces are slower on several threads than on one; processes are the way to more cores (``executor=``).

    Torch's setting is the whole process's, so the last one out, of however many threads, puts it back.
    """
    import torch

    with _Threads.lock:
        if not _Threads.inside:
            _Threads.before = torch.get_num_threads()
            torch.set_num_threads(1)
        _Threads.inside += 1
    try:
        yield
    finally:
        with _Threads.lock:
            _Threads.inside -= 1
            if not _Threads.inside:
                torch.set_num_threads(_Threads.before)


def pieces(states: Tensor) -> Iterator[tuple[int, Tensor]]:
    """``(first row, rows [n, hidden] float32)`` in order; the buffer is used again for the next one."""
    import torch

    rows, hidden = states.shape
    step = max(1, _PIECE // max(hidden, 1))
    buffer = torch.empty((min(step, rows), hidden), dtype=torch.float32)
    for first in range(0, rows, step):
        piece = states[first : first + step]
        into = buffer[: len(piece)]
        into.copy_(piece)
        yield first, into


def row_stats(states: Tensor) -> RowStats:
    """The numbers of every row.

    Args:
        states: [rows, hidden], any floating dtype; a view into a larger array is fine.
    """
    import torch

    rows, hidden = states.shape
    l2, mean, top = (torch.zeros(rows, dtype=torch.float64) for _ in range(3))
    if hidden:
        for first, x in pieces(states):
            at = slice(first, first + len(x))
            l2[at] = torch.linalg.vector_norm(x, dim=-1).double()
            mean[at] = x.sum(-1).double() / hidden
            top[at] = torch.maximum(x.amax(-1), -x.amin(-1)).double()
    finite = torch.isfinite(l2)
    overflow = ~finite & torch.isfinite(top)  # squares beyond float32 although every value is finite
    for row in overflow.nonzero().flatten().tolist():
        wide = states[row].double()
        l2[row], mean[row], top[row] = torch.linalg.vector_norm(wide), wide.mean(), wide.abs().max()
        finite[row] = bool(torch.isfinite(wide).all())
    return RowStats(l2=l2, mean=mean, max_abs=top, finite=finite)


def row_kurtosis(states: Tensor) -> torch.Tensor:
    """Kurtosis over channels of every row, m4 / m2**2 (3 for normal values): [rows] float64, nan for a constant row."""
    import torch

    out = torch.full((len(states),), torch.nan, dtype=torch.float64)
    for first, x in pieces(states):
        d = x.double()
        d = d - d.mean(-1, keepdim=True)
        squares = d * d
        out[first : first + len(x)] = (squares * squares).mean(-1) / squares.mean(-1).square()
    return out


def shared_beginning(a: Tensor, b: Tensor) -> int:
    """How many leading tokens two samples share.

    Args:
        a, b: [tokens] int64.
    """
    n = min(len(a), len(b))
    differ = (a[:n] != b[:n]).nonzero()
    return int(differ[0]) if len(differ) else n
