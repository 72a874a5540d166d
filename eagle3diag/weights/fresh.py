"""Does a matrix still look as an initialiser left it? A test of "all elements independent, one light-tailed symmetric law".

Every initialiser in use (normal, truncated normal, uniform; Xavier, Kaiming, a config's ``initializer_range``) draws the elements of
a matrix independently from one law, and rounding to BF16 or FP16 maps each element by itself, so they stay independent whatever the
dtype, scale or shape. Training is a sum of outer products (gradient = activations x errors): rows and columns that matter grow,
a few directions stick out of the noise, tails get heavy. So nothing is compared with "typical" numbers. Nine statistics are computed
whose distribution *under independence* is known, each as a z value, and a matrix counts as fresh only if every one of them stays within
``LIMIT``. One that leaves it proves a training (or any other origin than an initialiser).

The nine, for a sample X [k, c] of rows and columns spread over the matrix, with s^2 = mean of squares and kappa = fourth moment / s^4:

* ``mean``: average over s / sqrt(N); ``skew``: third moment over its standard error;
* ``tail``: kappa - 3 over sqrt(24 / N) and the largest element of the *whole* matrix against a normal's: none may be heavier than a
  normal; below 1.8 (uniform) no initialiser goes either;
* ``rows``, ``columns``: spread of the mean squares of rows (columns), which is (kappa - 1) / c by chance;
* ``row means``, ``column means``: sum of squared means, chi-square with k (c) degrees of freedom by chance;
* ``pairs``: sum over pairs of rows of c * cosine^2, whose mean is exactly 1 a pair (Schott 2005, Biometrika 92:951): any structure
  shared between rows raises it;
* ``top``: the largest eigenvalue of X X^T against the Marchenko-Pastur edge in Tracy-Widom units (Johnstone 2001, Ann. Stat. 29:295).

Then the law is named: fourth and sixth moment and the farthest element against normal, uniform, and normal cut at 2 or 3 sigma.

One initialiser draws no independent elements: ``orthogonal_`` (Saxe et al. 2014). The rows of a matrix no taller than wide are then
perpendicular and of one length, exactly but for rounding: c * cosine^2 is 1 a pair by chance, more in trained matrices, and up to 6e-6
here in BF16. No training leaves that: only whole rows can show it, so a taller matrix counts as trained.

Margins. Fresh taken for trained: in 11,772 initialised matrices (normal, cut normal, uniform, Xavier; BF16, FP16, FP32; 16 x 512 to
8192 x 2048) none left the limits; the largest |z| was 5.0 against 6, the eigenvalue within -5.1 and 4.5 against -8 and 9. So the rate is
below 2.5e-4 a matrix with 95 % confidence, and by the tails (normal, Tracy-Widom) far below. Trained taken for fresh: the least
conspicuous matrix of the really trained sample draft has its eigenvalue at 1,100. A rank-one change of norm t shows from about t = 2 s (k
c)^(1/4): at width 4096 and s = 0.02 that is 2.6, where one Adam step of learning rate 1e-4 in one direction is 0.4. Nets trained for some
dozens of steps on a task that needs no more *are* taken for fresh (`tests/fixtures_val.py: honest_training`): no test of the values can
tell them, which is why the rules weigh the scale, the norms and the neighbours too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["COLUMNS", "LIMIT", "MIN_ELEMENTS", "MIN_SIDE", "ROWS", "Freshness", "freshness", "origin", "spread"]

LIMIT = 6.0  #: largest |z| a fresh matrix may show
TOP = (-8.0, 9.0)  #: the same for ``top``: Tracy-Widom falls as exp(-2/3 x^1.5) above and exp(-|x|^3/24) below
MIN_ELEMENTS, MIN_SIDE = 4096, 16  #: smaller matrices hold too little evidence to be called fresh
ROWS, COLUMNS = 1024, 4096  #: at most so many rows and columns of a matrix are looked at
NEAR, NEAR_TOP = 4.5, (-6.5, 5.5)  #: z up to which a matrix shows no sign of training at all
_HUGE, _TINY = 64.0, 2.0**-50  #: no trained or initialised matrix has a share of elements beyond these
_HUGE_SHARE, _TINY_SHARE = 1e-3, 0.2
#: c * cosine^2 of a pair of rows up to which they are perpendicular (rounding to BF16: 3e-6 to 6e-6, chance: 1), the difference of their
#: lengths that is rounding (BF16: up to 2e-3), and how many are asked
_PERPENDICULAR, _ONE_LENGTH, _PERPENDICULAR_ROWS = 1.5e-5, 5e-3, 256
_SPREAD = 0.15  # coefficient of variation of row or column norms that counts as strength 1

#: standardised moments 4, 6, 8 and 12 of the laws initialisers draw from, and where each law ends, in standard deviations
_LAWS: dict[str, tuple[tuple[float, float, float, float], float]] = {
    "normal": ((3.0, 15.0, 105.0, 10395.0), math.inf),
    "uniform": ((1.8, 27 / 7, 9.0, 729 / 13), math.sqrt(3.0)),
    "normal cut at 2 sigma": ((2.365537, 7.471193, 27.189592, 447.0762), 2 / 0.879626),
    "normal cut at 3 sigma": ((2.828886, 12.189791, 66.00965, 2783.2567), 3 / 0.986578),
}

Verdict = Literal["fresh", "garbage", "trained", "unjudged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """What the values say about their origin.

    Attributes:
        verdict: ``fresh`` (as an initialiser left it), ``garbage`` (bit patterns of other data), ``trained``, or ``unjudged`` (too small,
            constant, or not finite).
        law: ``normal``, ``uniform``, ``normal cut at 2 sigma`` or ``… 3 sigma``: the one that fits best, where fresh; empty where none
            fits. ``orthogonal`` where the rows are perpendicular and of one length.
        std: root mean square of the sample.
        error: standard error of ``std``, relative.
        z: the statistics by name; the largest of them in absolute value decides. Empty where unjudged.
        strength: how far from independent draws in size, not in significance: the largest of spike - 1, excess kurtosis, and the spread
            of row and of column norms beyond chance over 0.15. About 0 where fresh, above 2 in well trained matrices.
        spike: largest singular value over the Marchenko-Pastur edge of noise of the same size: about 1 where fresh, 2 to 10 in trained
            matrices.
        top: the same as z (see above).
        why: the verdict in words.
        rows, columns: size of the sample that was looked at.
    """

    verdict: Verdict
    law: str = ""
    std: float = math.nan
    error: float = math.nan
    strength: float = math.nan
    spike: float = math.nan
    top: float = math.nan
    z: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    rows: int = 0
    columns: int = 0

    @property
    def near(self) -> bool:
        """Fresh, of a known law, and without the faintest sign of training."""
        return bool(self.law) and self.quiet

    @property
    def quiet(self) -> bool:
        """Fresh, and no statistic beyond what a single matrix shows by chance once in ten thousand."""
        return self.verdict == "fresh" and all(
            (NEAR_TOP[0] <= v <= NEAR_TOP[1]) if n == "top" else abs(v) <= NEAR for n, v in self.z.items()
        )

    @property
    def strangest(self) -> tuple[str, float]:
        """Name and value of the statistic farthest from what chance gives."""
        return max(self.z.items(), key=lambda item: abs(item[1]), default=("", math.nan))


def spread(n: int, k: int) -> list[int]:
    """At most ``k`` of the indices 0 .. n-1, ascending, evenly spread; no fixed stride, which might see one dimension of each head."""
    if n <= k:
        return list(range(n))
    chosen = []
    for i in range(k):  # one from each of k strata, at a place that never repeats (golden ratio)
        start, end = i * n // k, (i + 1) * n // k
        chosen.append(start + int((i * 0.6180339887498949) % 1.0 * (end - start)))
    return chosen


def freshness(
    sample: torch.Tensor, *, abs_max: float | None = None, count: int | None = None, whole: torch.Tensor | None = None
) -> Freshness:
    """Judge a matrix from a sample of it.

    Args:
        sample: any float dtype, [rows, columns], spread over the matrix (`spread`); rows of zeros (a padding row) are left out.
        abs_max: largest absolute value of the whole matrix, where known.
        count: elements of the whole matrix, where known.
        whole: [rows, all columns], some whole rows of a matrix no taller than wide; without them ``orthogonal`` cannot be seen.
    """
    import torch

    x = sample.to(torch.float32)
    if x.ndim != 2 or not x.numel():
        return Freshness(verdict="unjudged", why="not a matrix")
    low, high = (float(v) for v in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        good = x[torch.isfinite(x)]
        strange = _garbage(good) if good.numel() else ""
        verdict: Verdict = "garbage" if strange else "unjudged"
        return Freshness(verdict=verdict, why=strange or "holds NaN or Inf", rows=x.shape[0], columns=x.shape[1])
    strange = _garbage(x)
    if strange:
        return Freshness(verdict="garbage", std=_rms(x), why=strange, rows=x.shape[0], columns=x.shape[1])
    x = x[x.abs().amax(1) > 0]
    k, c = x.shape
    std = _rms(x)
    if k * c < MIN_ELEMENTS or min(k, c) < MIN_SIDE:
        return Freshness(verdict="unjudged", std=std, why=f"{k} x {c} values are too few to tell", rows=k, columns=c)
    if low == high:
        return Freshness(verdict="unjudged", std=std, why="constant", rows=k, columns=c)
    y = x / std
    largest = float(y.abs().max()) if abs_max is None else abs_max / std
    z, moments = _marginal(y, largest, count or y.numel())
    kappa = moments[0]
    error = math.sqrt(max(kappa - 1.0, 0.0) / (4 * y.numel()))
    margins, spreads = _margins(y, kappa)
    z |= margins
    law = ""
    if whole is not None and _loose(z) and _orthonormal(whole):
        z |= {"rows": 0.0, "columns": max(0.0, z["columns"]), "pairs": 0.0, "top": 0.0}
        law, spike, top = "orthogonal", 1.0, 0.0
    elif _within(z):  # the costlier look, only where the cheap ones see nothing
        pairs, top_value = _structure(y)
        spike, top = _spike(y, top_value)
        z |= {"pairs": pairs, "top": top}
        law, misfit = _law(moments, largest, y.numel(), error)
        z |= {"law": misfit} if law else {}
    else:  # trained, the usual case: an estimate of how far is enough
        spike, top = _spike(y, _power(y))
    trained = not _within(z)
    return Freshness(
        verdict="trained" if trained else "fresh",
        law="" if trained else law,
        std=std,
        error=error,
        strength=max(spike - 1.0, kappa - 3.0, *(v / _SPREAD for v in spreads), 0.0),
        spike=spike,
        top=top,
        z=z,
        why=_farthest(z) if trained else "every statistic is what independent draws give",
        rows=k,
        columns=c,
    )


def _farthest(z: Mapping[str, float]) -> str:
    name, value = max(z.items(), key=lambda item: abs(item[1]) / (TOP[1] if item[0] == "top" else LIMIT))
    return f"{name} is {value:.1f} sigma from independent draws"


def _rms(x: torch.Tensor) -> float:
    return math.sqrt(float((x * x).mean())) if x.numel() else math.nan


def _within(z: Mapping[str, float]) -> bool:
    return all((TOP[0] <= v <= TOP[1]) if name == "top" else abs(v) <= LIMIT for name, v in z.items())


def _loose(z: Mapping[str, float]) -> bool:
    """Whether nothing but row and column norms more even than chance speaks against independent draws."""
    return all((v if n in ("rows", "columns") else abs(v)) <= LIMIT for n, v in z.items())


def _orthonormal(whole: torch.Tensor) -> bool:
    """Whether rows [k, c] are perpendicular and of one length, up to rounding; a few are asked before many."""
    import torch

    for most in (MIN_SIDE, _PERPENDICULAR_ROWS):
        x = whole[spread(whole.shape[0], most)].to(torch.float32)
        if len(x) < MIN_SIDE or len(x) > x.shape[1]:
            return False
        norms = x.norm(dim=1)
        if not bool(torch.isfinite(norms).all()) or float(norms.max()) > (1 + _ONE_LENGTH) * float(norms.min()):
            return False
        cosines = (x @ x.T) / (norms[:, None] * norms)
        off = float((cosines * cosines).sum() - (cosines.diagonal() ** 2).sum()) / (len(x) * (len(x) - 1))
        if off * x.shape[1] > _PERPENDICULAR:
            return False
    return True


def _garbage(x: torch.Tensor) -> str:
    """Why finite values cannot be weights of any draft but bit patterns of something else; empty where they can."""
    size = x.abs()
    largest = float(size.max())
    huge = float((size > _HUGE).sum()) / size.numel() if largest > _HUGE else 0.0
    if huge >= _HUGE_SHARE:
        return f"{huge:.1%} of the values exceed {_HUGE:g}, the largest {largest:.3g}: bit patterns of other data, not weights"
    small = int((size < _TINY).sum())
    if small < _TINY_SHARE / 2 * size.numel() and small < size.numel() / 2:
        return ""
    zeros = int((size == 0).sum())
    tiny = (small - zeros) / max(size.numel() - zeros, 1)
    if tiny >= _TINY_SHARE:
        return f"{tiny:.1%} of the non-zero values are below {_TINY:.1g}: bit patterns of other data, not weights"
    return ""


def _marginal(y: torch.Tensor, largest: float, count: int) -> tuple[dict[str, float], tuple[float, float]]:
    """Mean, skew and tail of y [k, c] with mean square one; and its fourth and sixth moment."""
    n = y.numel()
    y2 = y * y
    y3 = y2 * y
    kappa, sixth = float((y2 * y2).mean()), float((y3 * y3).mean())
    z = {
        "mean": float(y.mean()) * math.sqrt(n),
        "skew": float(y3.mean()) * math.sqrt(n / sixth),
    }
    error = math.sqrt(24.0 / n)
    tail = max(0.0, (kappa - 3.0) / error) if kappa >= 1.8 else (kappa - 1.8) / error
    # probability that the largest of `count` normals lies so far out, as a one-sided z
    outside = count * math.erfc(largest / math.sqrt(2.0))
    if outside < 0.5:
        tail = max(tail, math.sqrt(-2.0 * math.log(max(outside, 1e-300))))
    z["tail"] = tail
    return z, (kappa, sixth)


def _law(moments: tuple[float, float], largest: float, n: int, error: float) -> tuple[str, float]:
    """The law whose fourth and sixth moment fit within ``NEAR`` standard errors and that reaches as far as the largest element; "" if none.

    The errors are those of moments over the sample's own mean square (delta method); rounding to BF16 moves the moments by 1e-5 and the
    end of a law by at most 2^-8.
    """
    best = ("", math.inf)
    for name, ((m4, m6, m8, m12), end) in _LAWS.items():
        error4 = math.sqrt((m8 - m4 * m4 - 4 * m4 * (m6 - m4) + 4 * m4 * m4 * (m4 - 1)) / n)
        error6 = math.sqrt((m12 - m6 * m6 - 6 * m6 * (m8 - m6) + 9 * m6 * m6 * (m4 - 1)) / n)
        z4, z6 = (moments[0] - m4) / error4, (moments[1] - m6) / error6
        beyond = largest > end * (1.004 + 6 * error)
        worst = max((z4, z6), key=abs)
        if not beyond and abs(worst) <= NEAR and abs(worst) < abs(best[1]):
            best = (name, worst)
    return best


def _chi(total: float, degrees: int, excess: float = 0.0) -> float:
    """A chi-square sum as z, by Wilson and Hilferty's cube root where the terms are nearly normal."""
    variance = 2.0 + excess
    ratio = max(total, 0.0) / degrees
    spread_ = variance / (9.0 * degrees)
    root: float = ratio ** (1 / 3)
    return (root - (1 - spread_)) / math.sqrt(spread_)


def _margins(y: torch.Tensor, kappa: float) -> tuple[dict[str, float], tuple[float, float]]:
    """Rows, columns and their means as z; and the coefficients of variation of row and column norms beyond what chance gives."""
    k, c = y.shape
    y2 = y * y
    noise = max(kappa - 1.0, 1e-6)
    z, spreads = {}, []
    for name, axis, n, width in (("rows", 1, k, c), ("columns", 0, c, k)):
        dispersion = float(((y2.mean(axis) - 1.0) ** 2).sum())
        z[name] = _chi(dispersion * width / noise, n - 1, 12.0 / width)
        spreads.append(math.sqrt(max(dispersion / n - noise / width, 0.0)) / 2)
    for name, axis, n, width in (("row means", 1, k, c), ("column means", 0, c, k)):
        z[name] = _chi(float((y.mean(axis) ** 2).sum()) * width, n)
    return z, (spreads[0], spreads[1])


def _structure(y: torch.Tensor) -> tuple[float, float]:
    """Correlation of pairs of rows as z, and the largest eigenvalue of y y^T, from one Gram matrix [k, k] of the smaller side."""
    import torch

    if y.shape[0] > y.shape[1]:
        y = y.T
    k, c = y.shape
    gram = y @ y.T
    length = gram.diagonal().clamp_min(1e-30)
    cosine2 = gram * gram / (length[:, None] * length[None, :])
    pairs = k * (k - 1) / 2
    total = (float(cosine2.sum(dtype=torch.float64)) - k) / 2 * c
    return (total - pairs) / math.sqrt(2 * pairs * (c - 1) / (c + 2)), float(torch.linalg.eigvalsh(gram)[-1])


def _power(y: torch.Tensor, steps: int = 12) -> float:
    """The largest eigenvalue of y y^T from below, by power iteration from a fixed start."""
    import torch

    v = torch.linspace(-1.0, 1.0, y.shape[1]) + torch.cos(torch.arange(y.shape[1]) * 2.3)
    for _ in range(steps):
        v = y.T @ (y @ (v / v.norm()))
    return float(torch.linalg.vector_norm(v))


def _spike(y: torch.Tensor, largest: float) -> tuple[float, float]:
    """An eigenvalue of y y^T (mean square of y is one) over the noise edge: as a ratio of singular values, and in Tracy-Widom units."""
    small, wide = sorted(y.shape)
    edge = math.sqrt(wide - 1) + math.sqrt(small)
    unit = edge * (1 / math.sqrt(wide - 1) + 1 / math.sqrt(small)) ** (1 / 3)
    return math.sqrt(largest) / edge, (largest - edge * edge) / unit


def origin(found: Freshness, shape: tuple[int, ...], configured: float | None = None) -> str:
    """The initialiser whose scale fits within four standard errors, in words; empty where none does.

    Args:
        found: a fresh verdict.
        shape: of the weight, [out, in].
        configured: the config's ``initializer_range``.
    """
    if len(shape) < 2 or not found.law:
        return ""
    fan_in, fan_out = shape[-1], shape[-2]
    if found.law == "orthogonal":
        gain = found.std * math.sqrt(fan_in)
        return "nn.init.orthogonal_" if abs(gain - 1) < 0.01 else f"nn.init.orthogonal_ with gain {gain:.3g}"
    xavier = math.sqrt(2 / (fan_in + fan_out))
    if found.law == "uniform":
        known = [
            (f"nn.Linear's default, uniform within 1/sqrt({fan_in})", 1 / math.sqrt(3 * fan_in)),
            (f"Xavier uniform for {fan_in} and {fan_out}", xavier),
            (f"Kaiming uniform for {fan_in}", math.sqrt(2 / fan_in)),
        ]
    else:
        cut = {"normal cut at 2 sigma": 0.879626, "normal cut at 3 sigma": 0.986578}.get(found.law, 1.0)  # its std over sigma
        known = [(f"the config's initializer_range {configured:g}", configured * cut)] if configured else []
        round_ = float(f"{found.std / cut:.1e}")
        known += [
            (f"Xavier normal for {fan_in} and {fan_out}", xavier),
            (f"Kaiming normal for {fan_in}", math.sqrt(2 / fan_in)),
            (f"N(0, 1/{fan_in})", 1 / math.sqrt(fan_in)),
            (f"N(0, {round_:g})", round_ * cut),
        ]
    fits = [(abs(found.std / scale - 1), text) for text, scale in known if abs(found.std / scale - 1) < 4 * found.error + 1e-4]
    return min(fits)[1] if fits else ""
