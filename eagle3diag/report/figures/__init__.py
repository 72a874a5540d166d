"""Pictures of results: ``matplotlib`` figures without pyplot, so that nothing leaks, displays twice or changes global settings.

A picture states one thing and says it in words too: every one carries ``alt`` and ``caption``. Okabe-Ito colours, and never colour
alone: what is lost is hatched and named, what is replaced is dotted, so a grey print reads the same. The ground is opaque white, legible
on a dark page. PNG output is deterministic (fixed fonts, no date).
"""

from __future__ import annotations

import io
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from eagle3diag.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["KINDS", "alt", "caption", "chart", "picture", "plot", "png"]

#: class name -> module and stem: ``<stem>_plot(result)``, ``<stem>_caption(result)``, ``<stem>_alt(result)``
KINDS = {
    "ServedDraft": ("served", "served"),
    "Report": ("served", "served"),
    "ServingLog": ("serving", "log"),
    "WeightDiff": ("weights", "diff"),
    "NormProfile": ("hidden", "profile"),
    "TokenNorms": ("hidden", "tokens"),
    "DumpComparison": ("compare", "comparison"),
    "Compatibility": ("observed", "compatibility"),
    "Agreement": ("draft", "agreement"),
    "WiringRanking": ("draft", "ranking"),
    "ServedAcceptance": ("draft", "acceptance"),
    "EngineAcceptance": ("draft", "engine"),
    "Explanations": ("observed", "explanations"),
}

DPI = 100
RC = {"font.family": "DejaVu Sans", "font.size": 9.0, "hatch.linewidth": 0.6, "svg.hashsalt": "eagle3diag", "text.usetex": False}


def plot(result: object) -> Figure:
    """The picture of a result.

    Raises:
        UsageError: this kind of result has no picture, or this one lacks what it would show.
    """
    return cast("Figure", _drawn(result, "plot"))


def _drawn(result: object, what: str) -> Any:
    """The picture, its caption or its words, by the module that draws this kind."""
    name = type(result).__name__
    if name not in KINDS:
        raise UsageError(f"a {name} has no picture; there is one of {', '.join(KINDS)}")
    module, stem = KINDS[name]
    return getattr(import_module(f"eagle3diag.report.figures.{module}"), f"{stem}_{what}")(result)


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes, the same for the same result."""
    import matplotlib

    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def caption(result: object) -> str:
    """The sentence under the picture: what it shows, and the finding."""
    return str(_drawn(result, "caption"))


def alt(result: object) -> str:
    """The picture in words, for those who cannot see it."""
    return str(_drawn(result, "alt"))


def picture(wide: float, tall: float) -> tuple[Any, Any]:
    """An empty figure with one frameless axes over all of it.

    Args:
        wide, tall: size in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide, tall), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_axis_off()
    return figure, ax


def chart(wide: float, tall: float, title: str, *, left: float = 0.75, right: float = 0.25, bottom: float = 0.6) -> tuple[Any, Any]:
    """A figure with one framed axes and a title over it; call it, and draw, under ``matplotlib.rc_context(RC)``.

    Args:
        wide, tall: size in inches.
        title: what is shown, in a few words.
        left, right, bottom: room for labels, in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide, tall), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    top = 0.45
    ax = figure.add_axes((left / wide, bottom / tall, 1 - (left + right) / wide, 1 - (bottom + top) / tall))
    figure.text(0.15 / wide, 1 - 0.25 / tall, title, fontsize=11.5, fontweight="bold", va="center", parse_math=False)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return figure, ax
