"""The layer-identity matrix: every state of one dump against every state of another, with where it is and where it should be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError, escaped
from eagle3diag.report.layout import figure_text
from eagle3diag.report.views.hidden import comparison_view, state_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eagle3diag.hidden.identity import DumpComparison, SlotMatch

__all__ = ["comparison_alt", "comparison_caption", "comparison_plot"]

_MOST = 48  #: states a side that are drawn
_SAID = 300  #: characters of the caption
_WRITTEN = 14  #: columns up to which numbers stand in the cells


def comparison_plot(result: object) -> Figure:
    """Relative error of each pair of states, dark where they are the same.

    Raises:
        UsageError: nothing was compared.
    """
    import matplotlib
    import numpy as np
    from matplotlib.colors import LogNorm

    from eagle3diag.report.figures import RC, chart

    one: DumpComparison = result  # type: ignore[assignment]
    layers, columns = one.layers[:_MOST], one.columns[:_MOST]
    if not layers or not columns:
        raise UsageError("nothing to draw: no state was compared")
    grid = np.array([[math.nan if e is None else max(e, 1e-4) for e in row[:_MOST]] for row in one.errors[:_MOST]])
    turned = len(columns) > 6
    foot = 0.75 + (0.085 * max(len(_short(c)) for c in columns) if turned else 0.25)
    cell = 0.62 if len(columns) <= _WRITTEN else 0.3
    wide, tall = max(7.2, 4.2 + cell * len(columns)), 0.7 + foot + max(1.2, 0.36 * len(layers))
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        figure, ax = chart(
            wide, tall, "Which state is which: relative error, dark where two are the same", left=1.75, right=1.9, bottom=foot
        )
        colours = matplotlib.colormaps["cividis"].with_extremes(bad="white")
        ax.imshow(np.ma.masked_invalid(grid), aspect="auto", cmap=colours, norm=LogNorm(0.003, 1.5), interpolation="nearest")
        ax.set_xticks(range(len(columns)), [_short(c) for c in columns], rotation=90 if turned else 0)
        ax.set_yticks(range(len(layers)), [_short(m.slot) for m in layers])
        ax.tick_params(length=0)
        ax.set_xlabel(f"second dump: {escaped(one.b, 60)}", parse_math=False)
        ax.set_ylabel("first dump")
        for k, match in enumerate(layers):
            _marks(ax, k, match, columns)
            ax.text(1.01, k, _beside(match), transform=ax.get_yaxis_transform(), va="center", fontsize=8.5)
        if len(columns) <= _WRITTEN:
            for (k, j), e in np.ndenumerate(grid):
                if math.isfinite(e):
                    ax.text(j, k, _number(e), ha="center", va="center", fontsize=7.5, color="white" if e < 0.12 else "black")
        words = "Solid frame: the best match. Dashed frame: where it should be."
        if len(one.layers) > _MOST or len(one.columns) > _MOST:
            words += f" Drawn are the first {_MOST} states of {len(one.layers)} and of {len(one.columns)}."
        figure.text(0.15 / wide, 0.2 / tall, words, fontsize=8.5, va="center")
    return figure


def _short(name: str) -> str:
    return escaped(state_name(name), 20)


def _number(e: float) -> str:
    return "0" if e <= 1e-4 else f"{e:.2f}".removeprefix("0") if e < 10 else f"{e:.0f}"


def _marks(ax: Any, k: int, match: SlotMatch, columns: tuple[str, ...]) -> None:
    from matplotlib.patches import Rectangle

    if match.expected is not None and match.expected in columns and match.expected != match.best:
        at = columns.index(match.expected)
        ax.add_patch(Rectangle((at - 0.44, k - 0.42), 0.88, 0.84, fill=False, edgecolor="black", linewidth=1.6, linestyle="dashed"))
    if match.same and match.best in columns:
        at = columns.index(match.best)
        for colour, line in (("white", 4.2), ("black", 2.2)):
            ax.add_patch(Rectangle((at - 0.46, k - 0.44), 0.92, 0.88, fill=False, edgecolor=colour, linewidth=line))


def _beside(match: SlotMatch) -> str:
    if not match.same:
        return "no match"
    late = "" if not match.best_shift else f", {abs(match.best_shift)} {'late' if match.best_shift > 0 else 'early'}"
    return f"is {_short(match.best)}{late}"


def comparison_caption(result: object) -> str:
    """The verdict."""
    one: DumpComparison = result  # type: ignore[assignment]
    said = comparison_view(one).summary
    said = said if len(said) <= _SAID else f"{said[: said.rfind(',', 0, _SAID)]} and more"
    return f"{said[0].upper()}{said[1:]}."


def comparison_alt(result: object) -> str:
    """The best match of each state in words."""
    one: DumpComparison = result  # type: ignore[assignment]
    said = [f"{_short(m.slot)} {_beside(m)} (error {figure_text(m.best_error, 2)})" for m in one.layers[:40]]
    return f"Matrix of {len(one.layers)} states of the first dump against {len(one.columns)} of the second. {'; '.join(said)}."
