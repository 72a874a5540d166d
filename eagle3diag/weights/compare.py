"""The values of two tensors against each other, block by block.

Equality comes first, on raw bytes and not on numbers: it is several times faster and a NaN equals itself. Numbers are
made only of tensors that differ. Floats of one or two bytes are compared in float32, which holds them exactly, with the
sums of each block gathered in float64; all others, and every block with a NaN, an infinity or an extreme value, in float64.
Integers are compared as integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3diag.checkpoint.model import Checkpoint
from eagle3diag.display import Shown, data
from eagle3diag.errors import CheckpointError
from eagle3diag.weights.pieces import Piece, piece_blocks
from eagle3diag.weights.renames import Match
from eagle3diag.weights.values import (
    BLOCK,
    FLOATS,
    ITEM_BYTES,
    not_finite,
    ordered,
    surely_finite,
    to_float32,
    to_float64,
    torch_dtype,
)

if TYPE_CHECKING:
    import torch

__all__ = ["ValueChange", "compare"]

_CHUNK = 1 << 17  #: elements per numeric step: four float32 vectors of this length stay in a core's L2 cache


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ValueChange(Shown):
    """One tensor of both checkpoints, compared by value.

    Attributes:
        name: spelling in the first checkpoint (of the part, where the other holds it fused).
        elements: number of elements.
        equal: every element is numerically the same, a NaN at the same place counting as the same.
        identical: the same dtype and the same bytes.
        max_abs: largest absolute difference over elements finite in both; None where values cannot be looked at.
        relative: L2 norm of the difference over the L2 norm of the first, over the same elements; None where the latter is 0.
        cosine: cosine of the two as vectors, over the same elements; None where one of them is all zero.
        differ: share of the elements that are not the same (0 to 1).
        nan, inf: how many there are, (first, second).
        dtypes: the two dtypes, safetensors spelling.
        ulps: across two float dtypes: the largest distance, in steps of the narrower one, after the wider is rounded to it;
            None otherwise, or where NaN or infinities do not agree.
        note: what the numbers alone do not say.
    """

    name: str
    elements: int
    equal: bool
    identical: bool
    max_abs: float | None
    relative: float | None
    cosine: float | None
    differ: float | None
    nan: tuple[int, int]
    inf: tuple[int, int]
    dtypes: tuple[str, str]
    ulps: int | None = None
    note: str = ""

    def to_dict(self) -> dict[str, object]:
        """JSON shape of ``diff``: ``values[]``."""
        out: dict[str, object] = {
            "name": self.name,
            "equal": self.equal,
            "max_abs": self.max_abs,
            "relative": self.relative,
            "cosine": self.cosine,
        }
        out |= {"differ": self.differ, "nan": list(self.nan), "inf": list(self.inf), "identical": self.identical, "elements": self.elements}
        if self.dtypes[0] != self.dtypes[1]:
            out |= {"dtypes": list(self.dtypes), "ulps": self.ulps, "equal_after_rounding": None if self.ulps is None else self.ulps <= 1}
        return data(out | ({"note": self.note} if self.note else {}))


def compare(a: Checkpoint, b: Checkpoint, match: Match) -> ValueChange:
    """Compare one matched pair of equal shape.

    Raises:
        CheckpointError: a file changed or ended while being read.
    """
    kinds = (match.a.info.dtype, match.b.info.dtype)
    n = match.a.elements[1]
    if kinds[0] == kinds[1]:
        same, nan, inf = _identical(a, match.a, b, match.b)
        if same:
            return ValueChange(
                name=match.name,
                elements=n,
                equal=True,
                identical=True,
                max_abs=0.0,
                relative=0.0,
                cosine=1.0,
                differ=0.0,
                nan=(nan, nan),
                inf=(inf, inf),
                dtypes=kinds,
            )
    if any(k not in ITEM_BYTES for k in kinds):
        return ValueChange(
            name=match.name,
            elements=n,
            equal=False,
            identical=False,
            max_abs=None,
            relative=None,
            cosine=None,
            differ=None,
            nan=(0, 0),
            inf=(0, 0),
            dtypes=kinds,
            note=f"numbers of {' and '.join(dict.fromkeys(kinds))} are not looked at"
            + ("; the bytes differ" if kinds[0] == kinds[1] else ""),
        )
    sums = _Sums(kinds)
    for x, y in _pairs(a, match.a, b, match.b, _CHUNK * 4):
        sums.add(x, y)
    return sums.result(match.name, n)


def _pairs(a: Checkpoint, left: Piece, b: Checkpoint, right: Piece, elements: int) -> Iterator[tuple[memoryview, memoryview]]:
    """The same elements of both, in step, whatever the two widths and wherever the blocks end."""
    sizes = [ITEM_BYTES.get(p.info.dtype, 1) for p in (left, right)]
    streams = (piece_blocks(a, left, elements * sizes[0]), piece_blocks(b, right, elements * sizes[1]))
    x, y = memoryview(b""), memoryview(b"")
    try:
        while True:
            x = x if len(x) else next(streams[0], x)
            y = y if len(y) else next(streams[1], y)
            n = min(len(x) // sizes[0], len(y) // sizes[1])
            if not n:
                break
            yield x[: n * sizes[0]], y[: n * sizes[1]]
            x, y = x[n * sizes[0] :], y[n * sizes[1] :]
    finally:
        for s in streams:
            s.close()  # type: ignore[attr-defined]
    if len(x) or len(y):
        raise CheckpointError(f"{left.info.name}: {a.path} and {b.path} hold different numbers of elements; open both again")


def _same_bytes(x: memoryview, y: memoryview) -> bool:
    import numpy as np

    if len(x) % 8:
        return bytes(x) == bytes(y)
    return np.array_equal(np.frombuffer(x, np.int64), np.frombuffer(y, np.int64))


def _identical(a: Checkpoint, left: Piece, b: Checkpoint, right: Piece) -> tuple[bool, int, int]:
    """Whether the bytes agree; if so, the NaN and the infinities among them."""
    kind = left.info.dtype
    nan = inf = 0
    for x, y in _pairs(a, left, b, right, BLOCK // ITEM_BYTES.get(kind, 1)):
        if not _same_bytes(x, y):
            return False, 0, 0
        if not surely_finite(x, kind):
            found = not_finite(x, kind)
            nan, inf = nan + found[0], inf + found[1]
    return True, nan, inf


class _Sums:
    """What the chunks of one pair add up to."""

    __slots__ = ("aa", "bb", "bits", "dd", "differ", "fast", "inf", "kinds", "max_abs", "nan", "narrow", "ulps", "work")

    def __init__(self, kinds: tuple[str, str]) -> None:
        self.kinds = kinds
        self.aa = self.bb = self.dd = self.max_abs = 0.0
        self.differ = self.bits = 0
        self.nan: list[int] = [0, 0]
        self.inf: list[int] = [0, 0]
        self.fast = all(k in FLOATS and ITEM_BYTES[k] <= 2 for k in kinds)
        floats = [k for k in kinds if k in FLOATS]
        self.narrow = min(floats, key=lambda k: FLOATS[k]) if len(floats) == 2 and kinds[0] != kinds[1] else ""
        self.ulps: int | None = 0 if self.narrow else None
        self.work: list[torch.Tensor] = []

    def add(self, x: memoryview, y: memoryview) -> None:
        """The next elements of both."""
        sizes = [ITEM_BYTES[k] for k in self.kinds]
        for i in range(0, len(x) // sizes[0], _CHUNK):
            u = x[i * sizes[0] : (i + _CHUNK) * sizes[0]]
            v = y[i * sizes[1] : (i + _CHUNK) * sizes[1]]
            if not (self.fast and self._add_float32(u, v)):
                self._add_float64(u, v)

    def _add_float32(self, x: memoryview, y: memoryview) -> bool:
        """False, with nothing added, where float32 does not hold the chunk's sums."""
        import torch

        n = len(x) // ITEM_BYTES[self.kinds[0]]
        if not self.work:
            self.work = [torch.empty(_CHUNK) for _ in range(3)]
        p, q = (to_float32(v, k, w[:n]) for v, k, w in zip((x, y), self.kinds, self.work[:2], strict=True))
        same = self.kinds[0] == self.kinds[1] and _same_bytes(x, y)
        square = self.work[2][:n]  # torch's sum is pairwise; a BLAS dot of this length would lose two digits
        aa = float(torch.mul(p, p, out=square).sum())
        bb = aa if same else float(torch.mul(q, q, out=square).sum())
        if not (math.isfinite(aa) and math.isfinite(bb)) or min(aa, bb) < 1e-20:
            return False
        if not same:
            if self.narrow:
                self._ulps(x, y, p, q)
            torch.sub(p, q, out=p)
            dd = float(torch.mul(p, p, out=square).sum())
            differ = int(torch.count_nonzero(p))
            if differ:
                low, high = torch.aminmax(p)
                largest = max(-float(low), float(high))
                if not math.isfinite(dd) or largest < 1e-15:
                    return False
                self.max_abs = max(self.max_abs, largest)
            self.dd += dd
            self.differ += differ
        self.aa += aa
        self.bb += bb
        return True

    def _add_float64(self, x: memoryview, y: memoryview) -> None:
        import torch

        p, q = to_float64(x, self.kinds[0]), to_float64(y, self.kinds[1])
        if self.narrow:
            self._ulps(x, y, p, q)
        different = (p != q) & ~(torch.isnan(p) & torch.isnan(q))
        bad = ~(torch.isfinite(p) & torch.isfinite(q))
        if bool(bad.any()):
            for i, t in enumerate((p, q)):
                self.nan[i] += int(torch.isnan(t).sum())
                self.inf[i] += int(torch.isinf(t).sum())
            p[bad] = 0.0
            q[bad] = 0.0
        d = p - q
        if all(k not in FLOATS and k != "BOOL" and not k.startswith("F8") for k in self.kinds):
            different = self._integers(x, y, d, different)
        self.differ += int(different.sum())
        if d.numel():
            self.max_abs = max(self.max_abs, float(d.abs().max()))
        self.aa += float(p @ p)
        self.bb += float(q @ q)
        self.dd += float(d @ d)

    def _integers(self, x: memoryview, y: memoryview, d: torch.Tensor, different: torch.Tensor) -> torch.Tensor:
        """Integers beyond 2**53 that float64 cannot tell apart: compared, and their (small) difference taken, as integers."""
        import torch

        if "U64" in self.kinds and self.kinds[0] != self.kinds[1]:
            return different
        i, j = (
            torch.frombuffer(v, dtype=torch.int64 if k == "U64" else torch_dtype(k)).to(torch.int64)
            for v, k in zip((x, y), self.kinds, strict=True)
        )
        apart = i != j
        hidden = apart & (d == 0)
        if bool(hidden.any()):
            d[hidden] = (i - j)[hidden].to(torch.float64)
        return apart

    def _ulps(self, x: memoryview, y: memoryview, p: torch.Tensor, q: torch.Tensor) -> None:
        import torch

        if self.ulps is None:
            return
        to = torch_dtype(self.narrow)
        i, j = (ordered(t.to(torch.float32).to(to) if ITEM_BYTES[self.narrow] == 1 else t.to(to), self.narrow) for t in (p, q))
        nan = torch.isnan(p), torch.isnan(q)
        inf = torch.isinf(p), torch.isinf(q)
        if not torch.equal(*nan) or not torch.equal(p[inf[0]], q[inf[0]]) or not torch.equal(*inf):
            self.ulps = None
            return
        steps = (i - j).abs()
        steps[nan[0]] = 0
        if steps.numel():
            self.ulps = max(self.ulps, int(steps.max()))

    def result(self, name: str, n: int) -> ValueChange:
        """The finished comparison of ``n`` elements."""
        equal = self.differ == 0
        across = self.kinds[0] != self.kinds[1]
        note = ""
        if across:
            note = f"compared across {self.kinds[0]} and {self.kinds[1]}"
            if self.narrow:
                if self.ulps == 0:
                    said = f"equal once rounded to {self.narrow}"
                elif self.ulps is None:
                    said = "NaN or infinities at different places"
                else:
                    said = f"{'equal within' if self.ulps == 1 else 'up to'} {self.ulps} ulp of {self.narrow}"
                note += f": {'equal after upcast' if equal else said}"
        elif equal:
            note = "numerically equal, but not bit for bit: the sign of zeros or the payload of NaN differs"
        same = equal and self.dd == 0.0
        return ValueChange(
            name=name,
            elements=n,
            equal=equal,
            identical=False,
            max_abs=self.max_abs,
            relative=math.sqrt(self.dd / self.aa) if self.aa > 0 else 0.0 if same else None,
            cosine=1.0 if same else self._cosine(),
            differ=self.differ / n if n else 0.0,
            nan=(self.nan[0], self.nan[1]),
            inf=(self.inf[0], self.inf[1]),
            dtypes=self.kinds,
            ulps=self.ulps,
            note=note,
        )

    def _cosine(self) -> float | None:
        """From the norms and the norm of the difference: near 1 that keeps the digits a dot product would lose."""
        if self.aa <= 0 or self.bb <= 0:
            return None
        scale = math.sqrt(self.aa) * math.sqrt(self.bb)
        if not math.isfinite(scale) or not math.isfinite(self.dd) or scale == 0:
            return None
        return max(-1.0, min(1.0, ((self.aa - self.dd) + self.bb) / (2 * scale)))
