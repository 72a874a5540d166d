"""Norm profile of a dump: per slot the L2 and RMS norm, mean and largest value over tokens, the first token told apart.

A dump of hundreds of GB is profiled where it lies: one sample in memory at a time, partial results a few kB, and a merge that is exact
(``hidden.exact``), so one process, a pool or a Dask cluster give the same bits. The first token of a sequence is an attention sink in
most models (its norm is tens of times the others'; Xiao et al. 2023, Sun et al. 2024 "Massive Activations"), hence kept out of the
means and shown beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Piece, Shown, data
from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.hidden.exact import ExactSum, ExactVector
from eagle3diag.hidden.model import HiddenDump, NormStatus, SampleRef, Slot
from eagle3diag.hidden.rowstats import RowStats, one_thread, pieces, row_kurtosis, row_stats

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NormProfile", "SlotProfile", "profile", "profile_samples"]

_BINS_PER_OCTAVE = 32  #: a median is read off this histogram: within 1.1 % of the true one
_BATCH = 16  #: samples per task of an executor, at most
_CHANNELS_SHOWN = 8
_OUTLIER = 6.0  #: a channel whose RMS is this many times the median channel's (Dettmers et al. 2022 call 6 an outlier)

Histogram = tuple[tuple[int, int], ...]
_ZERO = ExactSum()


def _histogram(values: Tensor) -> Histogram:
    """Counts by the log2 of positive values, 32 bins an octave."""
    import torch

    positive = values[values > 0]
    bins, counts = torch.unique((positive.log2() * _BINS_PER_OCTAVE).floor().to(torch.int64), return_counts=True)
    return tuple(zip(bins.tolist(), counts.tolist(), strict=True))


def _merged(a: Histogram, b: Histogram) -> Histogram:
    out = dict(a)
    for k, n in b:
        out[k] = out.get(k, 0) + n
    return tuple(sorted(out.items()))


def _quantile(h: Histogram, q: float) -> float:
    total, seen = sum(n for _, n in h), 0
    for k, n in h:
        seen += n
        if seen > q * total or seen == total:
            return float(2.0 ** ((k + 0.5) / _BINS_PER_OCTAVE))
    return math.nan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Channels:
    """What ``full=True`` adds: sums per channel without the first token, and the kurtosis of rows."""

    total: ExactVector
    squares: ExactVector
    kurtosis: ExactSum
    kurtosis_rows: int
    kurtosis_bins: Histogram

    def __add__(self, other: _Channels) -> _Channels:
        return _Channels(
            total=self.total + other.total,
            squares=self.squares + other.squares,
            kurtosis=self.kurtosis + other.kurtosis,
            kurtosis_rows=self.kurtosis_rows + other.kurtosis_rows,
            kurtosis_bins=_merged(self.kurtosis_bins, other.kurtosis_bins),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SlotProfile(Piece):
    """One slot over all tokens of all samples; sums are exact, every figure derived from them is a property.

    Attributes:
        slot: which one.
        hidden: width of a state.
        rows: finite rows that are not the first of their sample.
        nonfinite, zero: rows with NaN or Inf, rows of zeros (counted among ``rows``).
        max_abs, max_at: the largest absolute value of those rows, and (sample, row) of its first occurrence.
        first_rows, first_max_abs: finite first tokens, and the largest absolute value among them.
    """

    slot: Slot
    hidden: int
    rows: int = 0
    nonfinite: int = 0
    zero: int = 0
    l2: ExactSum = _ZERO
    mean: ExactSum = _ZERO
    bins: Histogram = ()
    max_abs: float = 0.0
    max_at: tuple[str, int] = ("", -1)
    first_rows: int = 0
    first_l2: ExactSum = _ZERO
    first_max_abs: float = 0.0
    channels: _Channels | None = None

    @property
    def l2_mean(self) -> float:
        """Mean L2 norm of a row, the first token left out; nan without rows."""
        return self.l2.over(self.rows)

    @property
    def l2_median(self) -> float:
        """Median L2 norm, from a histogram: within 1.1 %."""
        return _quantile(self.bins, 0.5)

    @property
    def rms_mean(self) -> float:
        """Mean of L2 / sqrt(hidden)."""
        return self.l2_mean / math.sqrt(self.hidden) if self.hidden else math.nan

    @property
    def value_mean(self) -> float:
        """Mean of all values."""
        return self.mean.over(self.rows)

    @property
    def first_l2_mean(self) -> float:
        """Mean L2 norm of the first tokens."""
        return self.first_l2.over(self.first_rows)

    @property
    def l2_mean_with_first(self) -> float:
        """Mean L2 norm over all finite rows, first tokens included."""
        return (self.l2 + self.first_l2).over(self.rows + self.first_rows)

    @property
    def kurtosis_mean(self) -> float | None:
        """Mean over rows of the kurtosis across channels (3 for normal values); None unless asked for."""
        return None if self.channels is None else self.channels.kurtosis.over(self.channels.kurtosis_rows)

    @property
    def kurtosis_median(self) -> float | None:
        """Median of the same, within 1.1 %; None unless asked for."""
        return None if self.channels is None else _quantile(self.channels.kurtosis_bins, 0.5)

    @property
    def channel_rms(self) -> list[float] | None:
        """RMS of each channel over the rows, without first tokens; None unless asked for."""
        if self.channels is None or not self.rows:
            return None
        return [math.sqrt(max(v, 0.0) / self.rows) for v in self.channels.squares.values().tolist()]

    @property
    def outliers(self) -> list[tuple[int, float]] | None:
        """(channel, RMS over the median channel's RMS) from 6 on, largest first; None unless asked for."""
        rms = self.channel_rms
        if rms is None:
            return None
        middle = sorted(rms)[len(rms) // 2]
        found = [(c, v / middle) for c, v in enumerate(rms) if middle > 0 and v >= _OUTLIER * middle]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def __add__(self, other: SlotProfile) -> SlotProfile:
        if (self.slot, self.hidden) != (other.slot, other.hidden):
            raise UsageError(f"profiles of {self.slot.name} and {other.slot.name} cannot be merged: other slots or widths")
        tops = sorted([(-self.max_abs, self.max_at), (-other.max_abs, other.max_at)])
        top = next((t for t in tops if t[1][1] >= 0), tops[0])
        both = None if self.channels is None or other.channels is None else self.channels + other.channels
        return SlotProfile(
            slot=self.slot,
            hidden=self.hidden,
            rows=self.rows + other.rows,
            nonfinite=self.nonfinite + other.nonfinite,
            zero=self.zero + other.zero,
            l2=self.l2 + other.l2,
            mean=self.mean + other.mean,
            bins=_merged(self.bins, other.bins),
            max_abs=-top[0],
            max_at=top[1],
            first_rows=self.first_rows + other.first_rows,
            first_l2=self.first_l2 + other.first_l2,
            first_max_abs=max(self.first_max_abs, other.first_max_abs),
            channels=both,
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one layer; what does not exist (no rows, not asked for) is None."""

        def plain(x: float | None) -> float | None:
            return None if x is None or not math.isfinite(x) else x

        out: dict[str, Any] = {
            "hf": self.slot.hf,
            "slot": self.slot.position,
            "role": self.slot.role,
            "name": self.slot.name,
            "rows": self.rows,
            "l2_mean": plain(self.l2_mean),
            "l2_median": plain(self.l2_median),
            "rms_mean": plain(self.rms_mean),
            "mean": plain(self.value_mean),
            "max_abs": plain(self.max_abs) if self.rows else None,
            "max_at": list(self.max_at) if self.max_at[1] >= 0 else None,
            "first_l2_mean": plain(self.first_l2_mean),
            "l2_mean_with_first": plain(self.l2_mean_with_first),
            "first_max_abs": plain(self.first_max_abs) if self.first_rows else None,
            "nonfinite_rows": self.nonfinite,
            "zero_rows": self.zero,
        }
        if self.channels is not None:
            found = self.outliers or []
            out["kurtosis_mean"], out["kurtosis_median"] = plain(self.kurtosis_mean), plain(self.kurtosis_median)
            out["outliers"] = len(found)
            out["outlier_channels"] = [{"channel": c, "times_median": r} for c, r in found[:_CHANNELS_SHOWN]]
        return out


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class NormProfile(Shown):
    """A norm profile, of a whole dump or of some of its samples.

    Attributes:
        path: of the dump.
        layers: one per slot, by position.
        samples: how many were read.
        tokens: states' rows in all, first tokens and broken ones included.
        problems: samples that could not be read: (name, one line).
        final_norm: whether the final state, where there is one, is before or after the target's final norm.
    """

    path: str
    layers: tuple[SlotProfile, ...]
    samples: int = 0
    tokens: int = 0
    problems: tuple[tuple[str, str], ...] = ()
    final_norm: NormStatus = "unknown"

    def merge(self, *others: NormProfile) -> NormProfile:
        """This profile and others of the same dump as one; exact, so order and grouping do not matter.

        Raises:
            UsageError: they are of dumps with other slots or widths.
        """
        out = self
        for other in others:
            if len(out.layers) != len(other.layers):
                raise UsageError(f"profiles of {len(out.layers)} and {len(other.layers)} slots cannot be merged")
            out = NormProfile(
                path=out.path,
                layers=tuple(a + b for a, b in zip(out.layers, other.layers, strict=True)),
                samples=out.samples + other.samples,
                tokens=out.tokens + other.tokens,
                problems=tuple(sorted(out.problems + other.problems)),
                final_norm=out.final_norm,
            )
        return out

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``norms``."""
        return data(
            {
                "schema": 1,
                "path": self.path,
                "samples": self.samples,
                "tokens": self.tokens,
                "final_norm": self.final_norm,
                "layers": [layer.to_dict() for layer in self.layers],
                "problems": [{"sample": name, "why": why} for name, why in self.problems],
            }
        )


def _of_slot(slot: Slot, hidden: int, name: str, states: Tensor, full: bool) -> SlotProfile:
    """The profile of one slot of one sample."""
    stats: RowStats = row_stats(states)
    good = stats.finite.clone()
    first = good[:1].clone()
    good[:1] = False
    l2 = stats.l2[good]
    top, at = 0.0, -1
    if len(l2):
        rows = good.nonzero().flatten()
        best = int(stats.max_abs[rows].argmax())
        top, at = float(stats.max_abs[rows[best]]), int(rows[best])
    return SlotProfile(
        slot=slot,
        hidden=hidden,
        rows=len(l2),
        nonfinite=int((~stats.finite).sum()),
        zero=int((l2 == 0).sum()),
        l2=ExactSum.of(l2.tolist()),
        mean=ExactSum.of(stats.mean[good].tolist()),
        bins=_histogram(l2),
        max_abs=top,
        max_at=(name, at),
        first_rows=int(first.sum()),
        first_l2=ExactSum.of(stats.l2[:1][first].tolist()),
        first_max_abs=float(stats.max_abs[0]) if bool(first.any()) else 0.0,
        channels=_channels(states, good) if full else None,
    )


def _channels(states: Tensor, good: Tensor) -> _Channels:
    """Channel sums of the chosen rows, added row by row in NumPy: one order, one thread, the same bits everywhere."""
    import numpy as np
    import torch

    hidden = states.shape[1]
    total, squares = np.zeros(hidden), np.zeros(hidden)
    for start, x in pieces(states):
        wide = x[good[start : start + len(x)]].double().numpy()
        total += np.add.reduce(wide, axis=0)
        squares += np.add.reduce(wide * wide, axis=0)
    kurtosis = row_kurtosis(states)[good]
    kurtosis = kurtosis[torch.isfinite(kurtosis)]
    return _Channels(
        total=ExactVector.of(total),
        squares=ExactVector.of(squares),
        kurtosis=ExactSum.of(kurtosis.tolist()),
        kurtosis_rows=len(kurtosis),
        kurtosis_bins=_histogram(kurtosis),
    )


def _empty(dump: HiddenDump, full: bool) -> NormProfile:
    """The profile of no sample: nothing changes when it is merged."""
    import numpy as np

    zero = np.zeros(dump.hidden)
    none = ExactVector.of(zero)
    channels = _Channels(total=none, squares=none, kurtosis=ExactSum(), kurtosis_rows=0, kurtosis_bins=()) if full else None
    layers = tuple(SlotProfile(slot=s, hidden=dump.hidden, channels=channels) for s in dump.slots)
    return NormProfile(path=dump.path, layers=layers, final_norm=dump.final_norm)


def profile_samples(dump: HiddenDump, refs: Sequence[SampleRef], full: bool = False) -> NormProfile:
    """The profile of some samples of a dump: what one task of an executor runs. One sample is in memory at a time.

    A sample that cannot be read is listed under ``problems`` and counted nowhere else.
    """
    out = _empty(dump, full)
    with one_thread():
        for ref in refs:
            try:
                sample = dump.read(ref)
            except CheckpointError as error:
                out = replace(out, problems=(*out.problems, (ref.name, str(error))))
                continue
            layers = tuple(_of_slot(s, dump.hidden, ref.name, sample.states[s.position], full) for s in dump.slots)
            rows = max((len(x) for x in sample.states.values()), default=0)
            out = out.merge(NormProfile(path=dump.path, layers=layers, samples=1, tokens=rows))
            del sample
    return out


def _batches(dump: HiddenDump) -> Iterable[tuple[SampleRef, ...]]:
    step = min(_BATCH, max(1, len(dump.samples) // 32))
    return (dump.samples[i : i + step] for i in range(0, len(dump.samples), step))


def profile(dump: HiddenDump, *, executor: Executor | None = None, full: bool = False) -> NormProfile:
    """The norm profile of a dump.

    Args:
        dump: its files must be readable where the executor's workers run.
        executor: any ``concurrent.futures.Executor`` (processes, or a Dask cluster's ``client.get_executor()``); None runs here.
        full: channel statistics and kurtosis as well, at a few times the cost.

    Returns:
        The same bits for every executor and partition.
    """
    if executor is None:
        return profile_samples(dump, dump.samples, full)
    tasks = [executor.submit(profile_samples, replace(dump, samples=(), issues=()), refs, full) for refs in _batches(dump)]
    return _empty(dump, full).merge(*(task.result() for task in tasks))
