"""Predicted against observed: what wirings would give on a dump, beside what a log or a single number in service shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError, escaped
from eagle3diag.report.layout import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eagle3diag.draft.observed import Explanations
    from eagle3diag.serving.compatible import Compared, Compatibility

__all__ = [
    "compatibility_alt",
    "compatibility_caption",
    "compatibility_plot",
    "explanations_alt",
    "explanations_caption",
    "explanations_plot",
]

ROWS = 16  #: wirings of a chart of lengths
BLUE, ORANGE = "#0072b2", "#d55e00"
NAME = 110  #: characters of a wiring's name


def _predicted(found: Compatibility) -> list[Compared]:
    """The wiring as trained, and the nearest other where the log excludes it."""
    own = found.own
    if own.compatible:
        return [own]
    near = [c for c in found.compatible if c.name != own.name and c.joint]
    return [own, *near[:1]]


def compatibility_plot(result: object) -> Figure:
    """Joint and conditional rates by position, as seen and as predicted; lengths alone where the log tells no positions."""
    import matplotlib

    from eagle3diag.report.figures import RC, chart
    from eagle3diag.serving.metrics import conditional

    found: Compatibility = result  # type: ignore[assignment]
    seen = found.seen
    if not seen.joint:
        every = [found.own, *(c for c in found.compared if c.name != found.own.name)]
        fits = "Filled: not excluded by it, other texts allowed for. Open: excluded."
        bars = [Bar(name=c.name, length=c.length, error=0.0, fits=c.compatible) for c in every]
        return _lengths(seen.length, seen.error, bars, f"The length seen, and what wirings would give in chains of {seen.k}", fits)
    series: list[tuple[str, Sequence[float], str, str, str]] = [(f"seen: length {seen.length:.2f}", seen.joint, "black", "o", "-")]
    for one, (colour, marker, line) in zip(_predicted(found), ((BLUE, "s", "--"), (ORANGE, "^", ":")), strict=False):
        series.append((f"{escaped(one.name, NAME)}: {one.length:.2f}", one.joint, colour, marker, line))
    wide, tall = 10.4, 4.3
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        figure, left = chart(wide, tall, "Accepted by position: predicted from the dump, and seen in service", right=5.35, bottom=1.35)
        box = left.get_position()
        right = figure.add_axes((1 - 4.65 / wide, box.y0, box.width, box.height), sharey=left)
        for side in ("top", "right"):
            right.spines[side].set_visible(False)
        for label, joint, colour, marker, line in series:
            drawn = [100 * j for j in joint]
            then = [math.nan if c is None else 100 * c for c in conditional(tuple(joint))]
            for ax, values in ((left, drawn), (right, then)):
                style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line, "markersize": 6.5, "linewidth": 1.4}
                ax.plot(range(1, len(values) + 1), values, label=label, **style)
        positions = range(1, max(len(s[1]) for s in series) + 1)
        for ax, what in ((left, "joint: this position and all before"), (right, "conditional: if all before were accepted")):
            ax.set_xticks(list(positions))
            ax.set_xlabel(f"position in the draft\n{what}")
            ax.grid(axis="y", color="#dddddd", linewidth=0.7)
        left.set_ylim(0, min(100.0, max(5.0, left.get_ylim()[1])))
        left.set_ylabel("% accepted")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.0, 0.005), frameon=False, ncols=1, fontsize=8.5)
        for text in figure.legends[0].get_texts():
            text.set_parse_math(False)
    return figure


def compatibility_caption(result: object) -> str:
    """Whether the log is what the dump predicts."""
    found: Compatibility = result  # type: ignore[assignment]
    own, seen = found.own, found.seen
    told = f"Seen {seen.length:.2f} tokens per verification in chains of {seen.k}; the draft as trained would give {own.length:.2f}"
    if own.compatible:
        return f"{told}: the log does not contradict it ({own.z:.1f} standard errors)."
    near = _predicted(found)[1:]
    best = f" Nearest is: {near[0].name} ({near[0].length:.2f})." if near else " No wiring that was tried would give this log."
    return f"{told}: the log excludes it ({own.z:.1f} standard errors).{best}"


def compatibility_alt(result: object) -> str:
    """Every point in words."""
    found: Compatibility = result  # type: ignore[assignment]
    points = [("seen", found.seen.joint)] if found.seen.joint else []
    points += [(c.name, c.joint) for c in _predicted(found)]
    said = [f"{name}: {' '.join(percent(j).removesuffix(' %') for j in joint)} %" for name, joint in points if joint]
    kind = "Line charts of acceptance by position" if found.seen.joint else "Dot chart of acceptance lengths of wirings"
    return f"{kind}, joint by position. {'; '.join(said)}. {compatibility_caption(result)}"


@dataclass(frozen=True, slots=True)
class Bar:
    """One wiring in a chart of lengths: 1.96 ``error`` to both sides."""

    name: str
    length: float
    error: float
    fits: bool


def _lengths(observed: float, error: float, rows: Sequence[Bar], title: str, fits: str) -> Figure:
    """Lengths of wirings as dots, the number seen as a line; ``fits`` says what a filled dot means."""
    import matplotlib

    from eagle3diag.report.figures import RC, chart

    shown = list(rows[:ROWS])
    tall = 1.75 + 0.25 * len(shown)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        figure, ax = chart(11.4, tall, title, left=4.9, right=0.4, bottom=0.95)
        if error > 0:
            edges = (observed - 1.96 * error, observed + 1.96 * error)
            ax.axvspan(*edges, facecolor="#e6e6e6", edgecolor="#999999", hatch="....", linewidth=0, zorder=0)
        ax.axvline(observed, color="black", linewidth=1.4)
        for k, one in enumerate(shown):
            colour = ORANGE if one.fits else BLUE
            ax.plot([one.length - 1.96 * one.error, one.length + 1.96 * one.error], [k, k], color=colour, linewidth=1.5)
            face = colour if one.fits else "white"
            ax.plot([one.length], [k], marker="D" if one.fits else "o", color=colour, markerfacecolor=face, markersize=6.5)
        ax.set_yticks(range(len(shown)), [escaped(r.name, 66) for r in shown], fontsize=8, parse_math=False)
        ax.get_yticklabels()[0].set_fontweight("bold")
        ax.set_ylim(len(shown) - 0.4, -0.6)
        ends = [observed, 1.0, *(r.length - 1.96 * r.error for r in shown), *(r.length + 1.96 * r.error for r in shown)]
        room = 0.06 * (max(ends) - min(ends) or 1.0)
        ax.set_xlim(min(ends) - room, max(ends) + room)
        ax.set_xlabel("tokens per verification, bonus token counted")
        ax.grid(axis="x", color="#dddddd", linewidth=0.7)
        words = f"Line: seen, {observed:.2f}{', with its 95 % interval' if error > 0 else ''}. {fits} First: the wiring at hand."
        if len(rows) > len(shown):
            words += f" {len(shown)} of {len(rows)} are drawn."
        figure.text(0.15 / 11.4, 0.2 / tall, words, fontsize=8.5, va="center")
    return figure


def explanations_plot(result: object) -> Figure:
    """The length of every wiring beside the one seen."""
    found: Explanations = result  # type: ignore[assignment]
    rows = [Bar(name=e.name, length=e.length, error=e.error, fits=e.explains) for e in (found.here, *found.others)]
    rows = [r for r in rows if math.isfinite(r.length) and math.isfinite(r.error)]
    if not rows:
        raise UsageError("nothing to draw: no wiring could be run")
    return _lengths(
        found.observed, 0.0, rows, "The length seen, and what wirings would give", "Filled: would give that number. Open: would not."
    )


def explanations_caption(result: object) -> str:
    """Whether the wiring at hand explains the number."""
    found: Explanations = result  # type: ignore[assignment]
    told = f"Seen {found.observed:.2f} tokens per verification; the wiring at hand would give {found.here.length:.2f}"
    fitting = [e for e in found.others if e.explains]
    if found.here.explains:
        return f"{told} and explains it, so no fault of the wiring is needed."
    if not fitting:
        return f"{told} and does not explain it, nor does any other that was tried."
    more = f" and {len(fitting) - 1} more" if len(fitting) > 1 else ""
    return f"{told} and does not explain it; these would: {fitting[0].name} ({fitting[0].length:.2f}){more}."


def explanations_alt(result: object) -> str:
    """The first lengths in words."""
    found: Explanations = result  # type: ignore[assignment]
    points = [f"{e.name}: {e.length:.2f}{' (would give it)' if e.explains else ''}" for e in (found.here, *found.others[: ROWS - 1])]
    return f"Dot chart of acceptance lengths of wirings, seen is {found.observed:.2f}. {'; '.join(points)}."
