"""One look at every value of a tensor, and a closer one at a sample of it, in a single pass over its bytes.

``tensor_stats`` computes everything in float64 and takes its time; a check has to look at gigabytes in seconds. So only minimum and maximum
are taken of all elements (they show NaN, infinities and constants, at memory speed), and rows spread over the matrix are kept for
`freshness`. Memory: one block and the sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eagle3diag.checkpoint.model import Checkpoint, TensorInfo
from eagle3diag.weights.fresh import COLUMNS, ROWS, Freshness, freshness, spread
from eagle3diag.weights.values import blocks_of, has_numbers, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["Scan", "nearest_rows", "sampled_rows", "scan"]

_BLOCK = 1 << 21
_SAMPLED = ("F64", "F32", "F16", "BF16")  # the dtypes weights are trained in; a quantised matrix has a law of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What one pass over a tensor saw.

    Attributes:
        nan, inf: how many elements are NaN, and infinite.
        first: flat (row-major) index of the first of them, None where there is none.
        low, high: over the finite elements; nan where there is none.
        off_one: root mean square of (value - 1) for a vector, else nan.
        zero_rows, zero_columns: share of the sampled rows (columns) that hold nothing but zeros.
        fresh: the verdict on the whole matrix under ``""``, or on each part by its label; empty for what is no float matrix.
    """

    info: TensorInfo
    nan: int = 0
    inf: int = 0
    first: int | None = None
    low: float = math.nan
    high: float = math.nan
    off_one: float = math.nan
    zero_rows: float = 0.0
    zero_columns: float = 0.0
    fresh: Mapping[str, Freshness] = field(default_factory=dict)

    @property
    def constant(self) -> bool:
        """More than one element, all finite and equal."""
        return self.info.numel > 1 and not (self.nan or self.inf) and self.low == self.high

    @property
    def place(self) -> list[int] | None:
        """``first`` as one index per axis."""
        if self.first is None:
            return None
        at, out = self.first, []
        for size in reversed(self.info.shape):
            at, here = divmod(at, size)
            out.append(here)
        return out[::-1]


class _Rows:
    """Collects chosen rows of a matrix that arrives as consecutive pieces of its row-major elements."""

    def __init__(self, chosen: list[int], width: int, dtype: torch.dtype) -> None:
        import torch

        self.chosen, self.width = chosen, width
        self.kept = torch.zeros(len(chosen), width, dtype=dtype)
        self.next = 0
        self.at = 0

    def add(self, piece: torch.Tensor) -> None:
        """The next elements [n]."""
        start, stop = self.at, self.at + piece.numel()
        self.at = stop
        while self.next < len(self.chosen):
            first = self.chosen[self.next] * self.width
            if first >= stop:
                return
            a, b = max(first, start), min(first + self.width, stop)
            self.kept[self.next, a - first : b - first] = piece[a - start : b - start]
            if first + self.width > stop:
                return
            self.next += 1


def _pieces(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[torch.Tensor]:
    """The elements in order, as vectors over a reused buffer; fp8 as float32, bool as bytes."""
    import torch

    dtype = torch.uint8 if info.dtype == "BOOL" else torch_dtype(info.dtype)
    narrow = dtype.is_floating_point and dtype.itemsize == 1
    for view in blocks_of(checkpoint, info.name, _BLOCK):
        if len(view):
            piece = torch.frombuffer(view, dtype=dtype)
            yield piece.to(torch.float32) if narrow else piece


def sampled_rows(checkpoint: Checkpoint, name: str, chosen: list[int]) -> torch.Tensor:
    """Some rows of a matrix as float32 [len(chosen), columns], read in one pass.

    Args:
        chosen: ascending row numbers (all axes but the last count as rows).

    Raises:
        CheckpointError: the tensor cannot be read.
    """
    import torch

    info = checkpoint.tensors[name]
    width = info.shape[-1] if info.shape else 1
    rows = _Rows(chosen, width, torch.float32)
    for piece in _pieces(checkpoint, info):
        rows.add(piece)
    return rows.kept


def _parts(rows: int, parts: Mapping[str, tuple[int, int]] | None) -> dict[str, list[int]]:
    """Row numbers to look at, by part."""
    found = {label: [a + i for i in spread(b - a, ROWS)] for label, (a, b) in (parts or {}).items() if 0 <= a < b <= rows}
    return found or {"": spread(rows, ROWS)}


def scan(checkpoint: Checkpoint, name: str, *, parts: Mapping[str, tuple[int, int]] | None = None) -> Scan | None:
    """Looks at every value of one tensor once.

    Args:
        checkpoint: where it lies.
        name: as spelled in the file.
        parts: label -> (first row, one past the last): pieces of a fused matrix to be judged one by one.

    Returns:
        None where values of this dtype cannot be looked at (sub-byte, complex), or there are none.

    Raises:
        CheckpointError: the file changed or ended while being read.
    """
    import torch

    info = checkpoint.tensors[name]
    if not has_numbers(info) or not info.numel:
        return None
    matrix = len(info.shape) >= 2 and info.dtype in _SAMPLED
    vector = len(info.shape) == 1 and info.dtype in _SAMPLED
    rows = info.numel // info.shape[-1] if matrix else 0
    wanted = _parts(rows, parts) if matrix else {}
    order = sorted(i for chosen in wanted.values() for i in chosen)
    sample = _Rows(order, info.shape[-1], torch_dtype(info.dtype)) if matrix else None
    nan = inf = seen = 0
    first: int | None = None
    low, high, off_one = math.inf, -math.inf, 0.0
    for piece in _pieces(checkpoint, info):
        if sample is not None:
            sample.add(piece)
        if vector:
            off_one += float(((piece.to(torch.float64) - 1.0) ** 2).sum())
        if info.dtype[0] == "U" and info.dtype != "U8":
            piece = piece.to(torch.float64)
        a, b = (float(v) for v in torch.aminmax(piece))
        if not (math.isfinite(a) and math.isfinite(b)):
            good = torch.isfinite(piece)
            bad = int((~good).sum())
            here = int(torch.isnan(piece).sum())
            nan, inf = nan + here, inf + bad - here
            if first is None:
                first = seen + int((~good).to(torch.uint8).argmax())
            rest = piece[good]
            a, b = (float(v) for v in torch.aminmax(rest)) if rest.numel() else (math.inf, -math.inf)
        low, high = min(low, a), max(high, b)
        seen += piece.numel()
    fresh: dict[str, Freshness] = {}
    zero_rows = zero_columns = 0.0
    if sample is not None:
        kept = sample.kept
        zero = kept == 0
        zero_rows, zero_columns = float(zero.all(1).float().mean()), float(zero.all(0).float().mean())
        columns = spread(kept.shape[1], COLUMNS)
        largest = max(abs(low), abs(high)) if low <= high else None
        for label, chosen in wanted.items():
            at = 0 if len(wanted) == 1 else order.index(chosen[0])
            picked = kept[at : at + len(chosen)]
            whole = picked if max(chosen) - min(chosen) < kept.shape[1] else None
            picked = picked if len(columns) == kept.shape[1] else picked[:, columns]
            alone = len(wanted) == 1
            most, number = (largest, info.numel) if alone else (None, None)
            fresh[label] = freshness(picked, abs_max=most, count=number, whole=whole)
    return Scan(
        info=info,
        nan=nan,
        inf=inf,
        first=first,
        low=low if low <= high else math.nan,
        high=high if low <= high else math.nan,
        off_one=math.sqrt(off_one / info.numel) if vector else math.nan,
        zero_rows=zero_rows,
        zero_columns=zero_columns,
        fresh=fresh,
    )


def nearest_rows(checkpoint: Checkpoint, name: str, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query the row of a matrix most like it, over the whole matrix in one pass.

    Args:
        queries: float32 [n, columns].

    Returns:
        Largest cosine [n] and the row it was found in [n] (int64).

    Raises:
        CheckpointError: the tensor cannot be read.
    """
    import torch

    info = checkpoint.tensors[name]
    width = info.shape[-1]
    wanted = torch.nn.functional.normalize(queries, dim=1)
    best = torch.full((len(queries),), -2.0)
    where = torch.zeros(len(queries), dtype=torch.int64)
    rest: torch.Tensor | None = None
    row = 0
    for piece in _pieces(checkpoint, info):
        values = piece.to(torch.float32) if rest is None else torch.cat([rest, piece.to(torch.float32)])
        whole = values.numel() // width
        rest = values[whole * width :].clone()
        if not whole:
            continue
        block = torch.nn.functional.normalize(values[: whole * width].view(whole, width), dim=1)
        cosine, at = (wanted @ block.T).max(1)
        better = cosine > best
        best, where = torch.where(better, cosine, best), torch.where(better, at + row, where)
        row += whole
    return best, where
