"""The picture of a log: acceptance length over its course, and over the context of its requests where the log tells that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError
from eagle3diag.report.layout import count
from eagle3diag.report.views.serving import length_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eagle3diag.serving.model import Point, ServingLog

__all__ = ["log_alt", "log_caption", "log_plot"]

BLUE, ORANGE = "#0072b2", "#d55e00"


def _times(log: ServingLog) -> tuple[list[float], str]:
    """Where each stretch lies: minutes since the first, where the lines carry a time that only goes forward, else lines."""
    times = [p.time for p in log.series]
    known = [t for t in times if t is not None]
    if len(known) == len(times) and all(b >= a for a, b in pairwise(known)) and known[-1] > known[0]:
        return [(t - known[0]) / 60 for t in known], "minutes since the first line"
    at, out = 0, []
    for p in log.series:
        out.append(float(at))
        at += p.windows
    return out, "lines of the log"


def log_plot(result: object) -> Figure:
    """Length over time, and over context beside it.

    Raises:
        UsageError: the log has no course to draw (a single document, or nothing).
    """
    import matplotlib

    from eagle3diag.report.figures import RC, chart

    log: ServingLog = result  # type: ignore[assignment]
    if len(log.series) < 2 or log.acceptance_length is None:
        raise UsageError("nothing to draw: the log is one document or one line, without a course")
    by_context = len(log.contexts) > 1
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        figure, ax = chart(10.4 if by_context else 7.4, 3.9, "Acceptance length in service", right=4.35 if by_context else 0.8)
        x, label = _times(log)
        ax.plot(x, [p.length for p in log.series], color=BLUE, linewidth=1.0, marker="o" if len(x) <= 60 else "", markersize=3.5)
        _level(ax, log)
        ax.set_xlabel(label)
        ax.set_ylabel("tokens per verification")
        if by_context:
            second = figure.add_axes((1 - 3.6 / 10.4, 0.6 / 3.9, 3.2 / 10.4, 1 - (0.6 + 0.45) / 3.9), sharey=ax)
            for side in ("top", "right"):
                second.spines[side].set_visible(False)
            centres = [c.context for c in log.contexts]
            second.errorbar(
                centres,
                [c.length for c in log.contexts],
                yerr=[1.96 * c.error for c in log.contexts],
                color=ORANGE,
                marker="s",
                markersize=4,
                linewidth=1.0,
                capsize=2,
            )
            second.set_xscale("log", base=2)
            low, high = math.floor(math.log2(min(centres))), math.ceil(math.log2(max(centres)))
            step = max(1, (high - low) // 5)
            ticks = [2.0**n for n in range(low, high + 1, step)]
            second.set_xticks(ticks, [f"{t:,.0f}" if t < 1024 else f"{t / 1024:g}k" for t in ticks])
            second.minorticks_off()
            second.axhline(log.acceptance_length, color="#777777", linewidth=0.8, linestyle="--")
            second.set_xlabel("tokens of context of a request (1k: 1,024)")
            second.grid(axis="y", color="#dddddd", linewidth=0.7)
        lengths = [p.length for p in log.series] + [c.length for c in log.contexts]
        ax.set_ylim(min(0.95, min(lengths) - 0.05), max(1.3, max(lengths) * 1.08))
    return figure


def _level(ax: Any, log: ServingLog) -> None:
    assert log.acceptance_length is not None
    ax.axhline(log.acceptance_length, color="#777777", linewidth=0.8, linestyle="--")
    ax.annotate(
        f"pooled\n{log.acceptance_length:.2f}",
        (1.01, log.acceptance_length),
        xycoords=("axes fraction", "data"),
        ha="left",
        va="center",
        fontsize=8,
    )
    ax.axhline(1.0, color="black", linewidth=0.8)
    ax.grid(axis="y", color="#dddddd", linewidth=0.7)


def log_caption(result: object) -> str:
    """The length, and how it goes."""
    log: ServingLog = result  # type: ignore[assignment]
    text = f"Acceptance length {length_words(log)} over {count(log.windows, 'line')}; 1.00 would mean that nothing is accepted."
    if len(log.series) >= 8:
        quarter = len(log.series) // 4
        ends = [_pooled(some) for some in (log.series[:quarter], log.series[-quarter:])]
        text += f" Over time: {ends[0]:.2f} in the first quarter, {ends[1]:.2f} in the last."
    if len(log.contexts) > 1:
        first, last = log.contexts[0], log.contexts[-1]
        text += f" By context: {first.length:.2f} at {first.context:,.0f} tokens, {last.length:.2f} at {last.context:,.0f}."
    return text


def _pooled(points: Sequence[Point]) -> float:
    """Mean length of stretches, by how many lines each holds."""
    return sum(p.length * p.windows for p in points) / max(1, sum(p.windows for p in points))


def log_alt(result: object) -> str:
    """The course in words."""
    log: ServingLog = result  # type: ignore[assignment]
    lengths = [p.length for p in log.series]
    words = f"Line chart of acceptance length over {len(lengths)} stretches of the log, from {min(lengths):.2f} to {max(lengths):.2f}"
    by = "; ".join(f"{c.context:,.0f} tokens of context: {c.length:.2f}" for c in log.contexts[:40]) if len(log.contexts) > 1 else ""
    return f"{words}. {by}" if by else f"{words}."
