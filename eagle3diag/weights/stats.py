"""Statistics of one tensor in one pass over its bytes, memory flat.

Blocks are turned into float64 and folded in by the pairwise update of central moments (Chan, Golub and LeVeque 1979; Pebay 2008,
"Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical moments"), so a
large mean does not eat the variance. NaN and Inf are counted and located, and left out of every other number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from eagle3diag.checkpoint.model import Checkpoint
from eagle3diag.display import Shown
from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.weights.values import BLOCK, ITEM_BYTES, blocks_of, to_float64

if TYPE_CHECKING:
    import torch

__all__ = ["TensorStats", "tensor_stats"]

_CHUNK = 1 << 16  #: elements per step: two float64 vectors of this length stay in a core's L2 cache


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TensorStats(Shown):
    """What the values of one tensor look like. Moments are over the finite elements; nan where there is none.

    Attributes:
        name, dtype, shape: as in the header.
        count: elements in all.
        nan, inf: how many are NaN, and how many infinite (either sign).
        first_nan, first_inf: flat (row-major) index of the first one, None where there is none.
        zeros: elements equal to zero, of either sign.
        min, max, abs_max: over the finite elements.
        mean, std: float64; ``std`` divides by n (population).
        l2: Euclidean norm of the finite elements.
        kurtosis: excess kurtosis m4/m2**2 - 3 (0 for a normal, -1.2 for a uniform distribution); nan where std is 0.
        skewness: m3/m2**1.5; nan where std is 0.
        constant: all elements finite and equal (true for one element, false for none).
        row_norm_mean, row_norm_cv: mean of the L2 norms of the rows (first axis), and their standard deviation over that mean;
            None for fewer than two axes or rows. Independent noise of kurtosis k over n columns gives a cv of sqrt((k + 2) / n) / 2.
        column_norm_mean, column_norm_cv: the same over columns (all other axes flattened).
        zero_rows: rows whose finite elements are all zero; None where there are no rows.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nan: int
    inf: int
    first_nan: int | None
    first_inf: int | None
    zeros: int
    min: float
    max: float
    abs_max: float
    mean: float
    std: float
    l2: float
    skewness: float
    kurtosis: float
    constant: bool
    row_norm_mean: float | None
    row_norm_cv: float | None
    column_norm_mean: float | None
    column_norm_cv: float | None
    zero_rows: int | None

    @property
    def finite(self) -> int:
        """Elements that are neither NaN nor infinite."""
        return self.count - self.nan - self.inf

    @property
    def all_zero(self) -> bool:
        """Every element is zero (false for an empty tensor)."""
        return self.count > 0 and self.zeros == self.count

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON: undefined moments become ``None``."""
        plain: dict[str, object] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                value = None
            plain[f.name] = list(value) if isinstance(value, tuple) else value
        return plain


class _Moments:
    """Running count, mean and central moment sums 2 to 4, mergeable chunk by chunk."""

    __slots__ = ("m2", "m3", "m4", "mean", "n")

    def __init__(self) -> None:
        self.n = 0
        self.mean = self.m2 = self.m3 = self.m4 = 0.0

    def add(self, x: torch.Tensor, squares: torch.Tensor) -> None:
        """Fold in finite float64 values [n], given with their squares."""
        import torch

        n = x.numel()
        if not n:
            return
        mean, s2 = float(x.sum()) / n, float(squares.sum())
        if 16 * mean * mean * n < s2:  # weights: centred by nature, so the sums about zero lose no digits
            s3, s4 = float(torch.dot(squares, x)), float(torch.dot(squares, squares))
            q = mean * mean
            self._merge(n, mean, s2 - n * q, s3 - 3 * mean * s2 + 2 * n * q * mean, s4 - 4 * mean * s3 + 6 * q * s2 - 3 * n * q * q)
        else:
            d = x - mean
            d2 = d * d
            self._merge(n, mean, float(d2.sum()), float(torch.dot(d2, d)), float(torch.dot(d2, d2)))

    def _merge(self, n: int, mean: float, m2: float, m3: float, m4: float) -> None:
        total, delta = self.n + n, mean - self.mean
        a, b, r = float(self.n), float(n), delta / total
        self.m4 += m4 + delta * r * r * r * a * b * (a * a - a * b + b * b)
        self.m4 += 6 * r * r * (a * a * m2 + b * b * self.m2) + 4 * r * (a * m3 - b * self.m3)
        self.m3 += m3 + delta * r * r * a * b * (a - b) + 3 * r * (a * m2 - b * self.m2)
        self.m2 += m2 + delta * r * a * b
        self.mean += r * b
        self.n = total


class _Grid:
    """Sums of squares per row and column of a matrix that arrives as consecutive pieces of its row-major elements."""

    __slots__ = ("at", "column", "columns", "row")

    def __init__(self, rows: int, columns: int) -> None:
        import torch

        self.columns = columns
        self.row = torch.zeros(rows, dtype=torch.float64)
        self.column = torch.zeros(columns, dtype=torch.float64)
        self.at = 0

    def step(self, chunk: int) -> int:
        """How many elements to take next so that pieces are whole rows where rows are short."""
        start = self.at % self.columns
        return min(chunk, self.columns - start) if start or self.columns > chunk else chunk // self.columns * self.columns

    def add(self, squares: torch.Tensor) -> None:
        """The next elements, squared, float64 [n]."""
        w = self.columns
        while squares.numel():
            row, start = divmod(self.at, w)
            if start or squares.numel() < w:  # a piece of one row
                piece = squares[: w - start]
                self.row[row] += piece.sum()
                self.column[start : start + piece.numel()] += piece
            else:
                whole = squares.numel() // w
                piece = squares[: whole * w]
                block = piece.view(whole, w)
                self.row[row : row + whole] = block.sum(1)
                self.column += block.sum(0)
            self.at += piece.numel()
            squares = squares[piece.numel() :]


def _variation(sums: torch.Tensor) -> tuple[float, float]:
    norms = sums.sqrt()
    mean = float(norms.mean())
    return mean, float(norms.std(unbiased=False)) / mean if mean else 0.0


def tensor_stats(checkpoint: Checkpoint, name: str, *, block: int = BLOCK) -> TensorStats:
    """All statistics of one tensor, streamed in blocks of ``block`` bytes, float64 throughout.

    Args:
        checkpoint: where the tensor lies.
        name: as spelled in the file.
        block: bytes read at a time (rounded up to whole elements).

    Raises:
        CheckpointError: unknown name, a dtype without numbers (sub-byte, complex), or the file changed or ended while being read.
    """
    import torch

    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{checkpoint.path}: no tensor {escaped(name)}; the file has {len(checkpoint.tensors)} tensors")
    size = ITEM_BYTES.get(info.dtype)
    if size is None:
        raise CheckpointError(f"{checkpoint.path}: {escaped(name)} is {escaped(info.dtype)}, whose values cannot be read here")
    rows = info.shape[0] if len(info.shape) > 1 else 0
    columns = info.numel // rows if rows else 0
    grid = _Grid(rows, columns) if rows > 1 and columns else None
    moments = _Moments()
    nan = inf = zeros = seen = 0
    first_nan = first_inf = None
    low, high = math.inf, -math.inf
    squares_sum = 0.0
    buffers = [torch.empty(min(_CHUNK, info.numel), dtype=torch.float64) for _ in range(2)]
    for view in blocks_of(checkpoint, name, max(block - block % size, size)):
        at = 0
        while at < len(view):
            raw = view[at : at + size * (grid.step(_CHUNK) if grid is not None else _CHUNK)]
            n = len(raw) // size
            x = to_float64(raw, info.dtype, buffers[0][:n])
            finite = x
            if not math.isfinite(float(x.sum())):  # rare: only then look for what is not finite
                is_nan, is_inf = torch.isnan(x), torch.isinf(x)
                if first_nan is None and bool(is_nan.any()):
                    first_nan = seen + int(is_nan.nonzero()[0])
                if first_inf is None and bool(is_inf.any()):
                    first_inf = seen + int(is_inf.nonzero()[0])
                nan += int(is_nan.sum())
                inf += int(is_inf.sum())
                bad = is_nan | is_inf
                finite = x[~bad]
                x[bad] = 1.0  # for the count of zeros
                zeros += n - int(torch.count_nonzero(x))
                x[bad] = 0.0  # for the norms of rows and columns
            squares = torch.mul(x, x, out=buffers[1][:n])
            if finite is x and float(squares.amin()) == 0.0:  # a zero, or a float64 whose square underflows
                zeros += n - int(torch.count_nonzero(x))
            if finite.numel():
                a, b = torch.aminmax(finite)
                low, high = min(low, float(a)), max(high, float(b))
            moments.add(finite, squares if finite is x else finite * finite)
            if grid is not None:
                grid.add(squares)
            else:
                squares_sum += float(squares.sum())
            seen += n
            at += n * size
    if seen != info.numel:
        raise CheckpointError(f"{checkpoint.path}: {escaped(name)} gave {seen} of {info.numel} elements: its header contradicts itself")
    n = moments.n
    if grid is not None:
        squares_sum = float(grid.row.sum())
    m2 = moments.m2 / n if n else math.nan
    flat = n == 0 or low == high
    shaped = not flat and 1e-150 < m2 < 1e150  # beyond, float64 holds no fourth power
    row = _variation(grid.row) if grid is not None else (None, None)
    column = _variation(grid.column) if grid is not None else (None, None)
    return TensorStats(
        name=name,
        dtype=info.dtype,
        shape=info.shape,
        count=info.numel,
        nan=nan,
        inf=inf,
        first_nan=first_nan,
        first_inf=first_inf,
        zeros=zeros,
        min=low if n else math.nan,
        max=high if n else math.nan,
        abs_max=max(abs(low), abs(high)) if n else math.nan,
        mean=low if n and flat else moments.mean if n else math.nan,
        std=0.0 if n and flat else math.sqrt(max(m2, 0.0)) if n else math.nan,
        l2=math.sqrt(squares_sum) if n else math.nan,
        skewness=moments.m3 / n / m2**1.5 if shaped else math.nan,
        kurtosis=moments.m4 / n / (m2 * m2) - 3.0 if shaped else math.nan,
        constant=n > 0 and flat and n == info.numel,
        row_norm_mean=row[0],
        row_norm_cv=row[1],
        column_norm_mean=column[0],
        column_norm_cv=column[1],
        zero_rows=int((grid.row == 0).sum()) if grid is not None else None,
    )
