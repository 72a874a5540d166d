"""Sums over a log of any length: what every reader adds to, and what bounded memory keeps of time and context.

Counts are added, lengths never averaged over engines. The course of the log is kept as at most ``_POINTS`` stretches, which double in width
when they run out; contexts are kept in quarter octaves.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagle3diag.serving.model import ContextBin, EngineShare, Point

if TYPE_CHECKING:
    from eagle3diag.serving.lines_sglang import Windows
    from eagle3diag.serving.lines_vllm import Counts

__all__ = ["Course", "Part", "Tally"]

FINE = 8_000  #: windows read with their time and rank
_POINTS = 512
_PAIRS = 20_000  # kinds of (length, rate) that are told apart
_LABELS = 256
_BINS = 128  # quarter octaves


@dataclass(slots=True)
class Course:
    """Lengths over time: stretches of ``step`` windows, [weight, weight x length, speed, windows with speed, windows, time]."""

    step: int = 1
    points: list[list[Any]] = field(default_factory=list)

    def add(self, weight: Any, length: Any, speed: Any, times: Any) -> None:
        """One block of windows; ``times`` has one entry each or those of the first and last."""
        import numpy as np

        n = len(weight)
        for at in range(0, n, self.step):
            to = min(n, at + self.step)
            some = speed[at:to]
            told = some[~np.isnan(some)]
            time = times[at] if len(times) == n else _between(times, at, n)
            w = float(weight[at:to].sum())
            self.points.append([w, float((weight[at:to] * length[at:to]).sum()), float(told.sum()), len(told), to - at, time])
        while len(self.points) > _POINTS:
            self.step *= 2
            pairs = [self.points[i : i + 2] for i in range(0, len(self.points), 2)]
            self.points = [[*(sum(p[j] for p in two) for j in range(5)), two[0][5]] for two in pairs]

    def told(self) -> tuple[Point, ...]:
        """The stretches as results."""
        return tuple(
            Point(time=time, length=wl / w, throughput=s / n if n else None, windows=count)
            for w, wl, s, n, count, time in self.points
            if w > 0
        )


def _between(times: Any, at: int, n: int) -> float | None:
    if not times or times[0] is None:
        return None
    last = times[-1] if times[-1] is not None else times[0]
    return float(times[0] + (last - times[0]) * at / max(1, n - 1))


@dataclass(slots=True)
class Part:
    """Sums of one label."""

    windows: int = 0
    weight: float = 0.0
    weighted: float = 0.0


class Tally:
    """Everything added so far."""

    def __init__(self) -> None:
        import numpy as np

        self.formats: Counter[str] = Counter()
        # SGLang: printed means
        self.windows = 0
        self.weight = self.weighted = self.squared = self.weights2 = self.plain = 0.0
        self.speed = self.running = 0.0
        self.speeds = 0
        self.pairs: Counter[tuple[bytes, bytes]] = Counter()
        self.parts: dict[str, Part] = {}
        self.bins = np.zeros((6, _BINS))
        # counts of any source
        self.accepted = self.drafted = self.drafts = 0.0
        self.has_drafted = True
        self.bare = [0.0, 0.0]  # accepted and drafted of lines that tell neither chain nor length
        self.k: Counter[int] = Counter()
        self.at_position: list[float] = []
        self.position_drafts = 0.0
        self.histogram: list[int] = []
        self.unbonused = self.lines = 0
        self.line_mean = 0.0
        self.wrong: list[str] = []
        self.request_lengths = [0.0, 0.0]  # sum, number
        self.course = Course()

    # ------------------------------------------------------------------ SGLang
    def add_windows(self, w: Windows) -> None:
        """A block of SGLang windows."""
        import numpy as np

        n = len(w.length)
        self.formats["SGLang decode line"] += n
        self.windows += n
        self.weight += float(w.running.sum())
        self.weights2 += float((w.running**2).sum())
        self.weighted += float((w.running * w.length).sum())
        self.squared += float((w.running * w.length**2).sum())
        self.plain += float(w.length.sum())
        told = ~np.isnan(w.speed)
        self.speed += float(w.speed[told].sum())
        self.running += float(w.running[told].sum())
        self.speeds += int(told.sum())
        if len(self.pairs) < _PAIRS:
            self.pairs.update(w.pairs)
        for label, at in w.ranks.items():
            self._part(label, len(at), float(w.running[at].sum()), float((w.running[at] * w.length[at]).sum()))
        self.course.add(w.running, w.length, w.speed, w.times)
        context = w.tokens / w.running
        at = context >= 1
        if at.any():
            place = np.clip((4 * np.log2(context[at])).astype(int), 0, _BINS - 1)
            speed = w.speed[at]
            rows = (w.running[at], w.running[at] * w.length[at], w.running[at] * w.length[at] ** 2, np.ones(int(at.sum())))
            for i, row in enumerate((*rows, np.nan_to_num(speed / w.running[at]), context[at])):
                self.bins[i] += np.bincount(place, weights=row, minlength=_BINS)

    def _part(self, label: str, windows: int, weight: float, weighted: float) -> None:
        if label not in self.parts and len(self.parts) >= _LABELS:
            label = "others"
        part = self.parts.setdefault(label, Part())
        part.windows += windows
        part.weight += weight
        part.weighted += weighted

    # ------------------------------------------------------------------ counts
    def add_counts(self, c: Counts, kind: str) -> None:
        """A block of vLLM lines."""
        import numpy as np

        fit = ~np.isnan(c.drafts) & (c.drafts > 0)
        self.formats[kind] += len(c.accepted)
        self.lines += len(c.accepted)
        self.unbonused += c.unbonused
        self.wrong += c.wrong[: max(0, 100 - len(self.wrong))]
        drafts, accepted = np.where(fit, c.drafts, 0.0), np.where(fit, c.accepted, 0.0)
        bare = np.isnan(c.drafts)
        self.bare[0] += float(c.accepted[bare].sum())
        self.bare[1] += float(c.drafted[bare].sum())
        self._sums(float(accepted.sum()), float(np.where(fit, c.drafted, 0.0).sum()), float(drafts.sum()), c.k, int(fit.sum()))
        if c.k:
            self.add_positions((c.positions * drafts[:, None]).sum(0).tolist(), float(drafts.sum()))
        length = 1.0 + accepted / np.where(fit, drafts, 1.0)
        self.line_mean += float(length[fit].sum())
        for label, at in c.labels.items():
            some = np.array(at)
            self._part(label, len(at), float(drafts[some].sum()), float((drafts[some] * length[some]).sum()))
        if fit.any():
            times = [t for t, ok in zip(c.times, fit, strict=True) if ok] if len(c.times) == len(fit) else c.times
            self.course.add(drafts[fit], length[fit], np.full(int(fit.sum()), math.nan), times)

    def _sums(self, accepted: float, drafted: float | None, drafts: float, k: int | None, lines: int = 1) -> None:
        self.accepted += accepted
        self.drafts += drafts
        if drafted is None:
            self.has_drafted = False
        else:
            self.drafted += drafted
        if k:
            self.k[k] += lines

    def add_one(
        self, kind: str, *, accepted: float, drafts: float, drafted: float | None = None, k: int | None = None, label: str = ""
    ) -> None:
        """One document's counts (a script's output, a request, a scrape)."""
        self.formats[kind] += 1
        if drafts <= 0:
            return
        self._sums(accepted, drafted, drafts, k)
        self._part(label, 1, drafts, drafts + accepted)

    def add_positions(self, accepted: list[float], drafts: float) -> None:
        """Accepted tokens by position."""
        self.at_position += [0.0] * (len(accepted) - len(self.at_position))
        for i, n in enumerate(accepted):
            self.at_position[i] += n
        self.position_drafts += drafts

    def add_histogram(self, histogram: list[int]) -> None:
        """Verifications by number of accepted tokens."""
        self.histogram += [0] * (len(histogram) - len(self.histogram))
        for i, n in enumerate(histogram):
            self.histogram[i] += n

    def add_request(self, length: float) -> None:
        """One request's own mean."""
        self.request_lengths[0] += length
        self.request_lengths[1] += 1

    # ------------------------------------------------------------------ results
    def contexts(self) -> tuple[ContextBin, ...]:
        """Quarter octaves that hold windows."""
        out = []
        for i in range(_BINS):
            w, wl, wl2, n, speed, context = (float(x) for x in self.bins[:, i])
            if n:
                mean = wl / w
                out.append(
                    ContextBin(
                        low=2 ** (i / 4),
                        high=2 ** ((i + 1) / 4),
                        context=context / n,
                        length=mean,
                        error=math.sqrt(max(0.0, wl2 / w - mean * mean) / max(1, n - 1)),
                        windows=int(n),
                        throughput=speed / n or None,
                    )
                )
        return tuple(out)

    def shares(self) -> tuple[EngineShare, ...]:
        """By label, where there are several."""
        counted = self.drafts > 0
        told = [
            EngineShare(label=label or "unnamed", windows=p.windows, length=p.weighted / p.weight, drafts=p.weight if counted else None)
            for label, p in sorted(self.parts.items())
            if p.weight > 0
        ]
        return tuple(told) if len(told) > 1 else ()
