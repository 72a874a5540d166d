"""Pictures of results: ``matplotlib`` figures without pyplot, so that nothing leaks, displays twice or changes global settings.

A picture states one thing and says it in words too: every one carries ``alt`` and ``caption``. Okabe-Ito colours, and never colour
alone: what is lost is hatched and named, what is replaced is dotted, so a grey print reads the same. The ground is opaque white, legible
on a dark page. PNG output is deterministic (fixed fonts, no date).
"""

from __future__ import annotations

import io
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from eagle3diag.errors import UsageError, escaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from eagle3diag.engines.model import ServedDraft

__all__ = ["KINDS", "alt", "caption", "chart", "picture", "plot", "png"]

#: class name -> module and stem: ``<stem>_plot(result)``, ``<stem>_caption(result)``, ``<stem>_alt(result)``
KINDS = {
    "ServingLog": ("figures_serving", "log"),
    "WeightDiff": ("figures_weights", "diff"),
    "NormProfile": ("figures_hidden", "profile"),
    "TokenNorms": ("figures_hidden", "tokens"),
    "DumpComparison": ("figures_compare", "comparison"),
    "Agreement": ("figures_draft", "agreement"),
    "WiringRanking": ("figures_draft", "ranking"),
    "ServedAcceptance": ("figures_draft", "acceptance"),
    "EngineAcceptance": ("figures_draft", "engine"),
}

#: state -> fill, hatch, line style; the edge is black throughout
STYLES = {
    "ok": ("#ffffff", "", "solid"),
    "target": ("#bfe3f7", "..", "dashed"),
    "lost": ("#f2a97a", "////", "solid"),
    "skipped": ("#dddddd", "xx", "dotted"),
}
MEANING = {
    "ok": "the draft's own",
    "target": "the target's takes its place",
    "lost": "lost: not what was trained",
    "skipped": "does not run",
}
DPI = 100
RC = {"font.family": "DejaVu Sans", "font.size": 9.0, "hatch.linewidth": 0.6, "svg.hashsalt": "eagle3diag", "text.usetex": False}


def plot(result: object) -> Figure:
    """The picture of a result.

    Raises:
        UsageError: this kind of result has no picture, or this one lacks what it would show.
    """
    name = type(result).__name__
    if name in ("Report", "ServedDraft"):
        return _served(_served_of(result))
    return cast("Figure", _drawn(result, "plot"))


def _drawn(result: object, what: str) -> Any:
    """The picture, its caption or its words, by the module that draws this kind."""
    name = type(result).__name__
    if name not in KINDS:
        raise UsageError(f"a {name} has no picture; there is one of {', '.join(['ServedDraft', 'Report', *KINDS])}")
    module, stem = KINDS[name]
    return getattr(import_module(f"eagle3diag.report.{module}"), f"{stem}_{what}")(result)


def _served_of(result: Any) -> ServedDraft:
    """The served draft of a report, or the result itself."""
    served: ServedDraft | None = result.case.served if type(result).__name__ == "Report" else result
    if served is None:
        raise UsageError("the picture of a report shows the served draft: check again with an engine")
    return served


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes, the same for the same result."""
    import matplotlib

    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def caption(result: object) -> str:
    """The sentence under the picture: what it shows, and the finding."""
    if type(result).__name__ in KINDS:
        return str(_drawn(result, "caption"))
    served = _served_of(result)
    parts = components(served)
    bad = [f"{p.name} ({p.note})" for p in parts if p.state in ("lost", "skipped")]
    told = "Every tensor of the draft is in its place." if not bad else f"Not what was trained: {', '.join(bad)}."
    if served.refused is not None:
        told = f"This version refuses the draft ({served.refused.stage}), so nothing of this would run."
    return f"{served.contract.label} with this draft, from the target's layers to the proposed token. {told}"


def alt(result: object) -> str:
    """The picture in words, for those who cannot see it."""
    if type(result).__name__ in KINDS:
        return str(_drawn(result, "alt"))
    served = _served_of(result)
    taps = served.aux.prefill_hf
    where = f"target states HF {', '.join(map(str, taps))}" if taps else "target states unknown"
    return f"Diagram: {where}; " + "; ".join(f"{p.name}: {p.note or MEANING[p.state]}" for p in components(served))


class Part:
    """One box of the diagram: name, state (a key of ``STYLES``) and a note of a few words."""

    __slots__ = ("name", "note", "state")

    def __init__(self, name: str, state: str, note: str = "") -> None:
        self.name, self.state, self.note = name, state, note


_HEADS = {
    "draft": ("ok", ""),
    "target": ("target", "the target's"),
    "target-first-rows": ("lost", "the target's first rows"),
    "target-rows": ("target", "the target's rows"),
    "embedding": ("target", "tied to the embedding"),
    "uninitialised": ("lost", "uninitialised"),
}
_MAPS = {
    "offset": ("ok", "draft id + d2t"),
    "absolute": ("lost", "absolute ids read as offsets"),
    "missing": ("lost", "missing: ids go out unmapped"),
    "none": ("ok", "full vocabulary"),
    "t2d": ("ok", "the ids t2d marks"),
}


def components(served: ServedDraft) -> list[Part]:
    """The parts of the served draft in the order data flows through them: embedding, fc, layers, norm, head, mapping."""
    wiring = served.wiring
    embedding = {"target": ("target", "the target's"), "draft": ("ok", "own"), "uninitialised": ("lost", "uninitialised")}[wiring.embedding]
    fc = {"applied": ("ok", ""), "bypassed": ("skipped", "bypassed"), "absent": ("skipped", "absent")}[wiring.fc]
    if wiring.fc == "applied":
        fc = _filled(served, "fc.") or fc
    parts = [Part("embed_tokens", *embedding), Part("fc", *fc)]
    named = " ".join([*served.never_filled, *(f.as_ for f in served.tensors.values())])
    for k in sorted({int(i) for i in re.findall(r"\blayers\.(\d{1,3})\.", named)}) or [0]:
        for stem, label in (("", "norms"), ("self_attn.", "attention"), ("mlp.", "mlp")):
            parts.append(Part(f"layer {k} {label}", *(_filled(served, f"layers.{k}.{stem}", norms=not stem) or ("ok", ""))))
    parts.append(Part("norm", *(_filled(served, "norm.") or ("ok", ""))))
    parts += [Part("lm_head", *_HEADS[wiring.head]), Part("d2t", *_MAPS[wiring.mapping])]
    return parts


def _filled(served: ServedDraft, prefix: str, *, norms: bool = False) -> tuple[str, str] | None:
    """State and note of the parameters under ``prefix`` where one of them is not what the file holds."""
    starts = {s for n, s in served.never_filled.items() if n.startswith(prefix) and (not norms or "norm" in n) and s != "target"}
    if starts:
        return "lost", ", ".join("starts as ones" if s == "ones" else s for s in sorted(starts))
    cut = [n for n, f in served.tensors.items() if f.fate == "truncated" and f.as_.removeprefix("model.").startswith(prefix)]
    return ("lost", "truncated") if cut else None


def _box(ax: Axes, at: tuple[float, float], part: Part, wide: float = 1.9, tall: float = 0.62) -> None:
    from matplotlib.patches import FancyBboxPatch

    fill, hatch, line = STYLES[part.state]
    x, y = at
    ax.add_patch(
        FancyBboxPatch(
            (x, y), wide, tall, boxstyle="round,pad=0.03", facecolor=fill, edgecolor="black", hatch=hatch, linestyle=line, linewidth=1.1
        )
    )
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.92} if hatch else None
    text = escaped(part.name, 24) + (f"\n{escaped(part.note, 30)}" if part.note else "")
    ax.text(x + wide / 2, y + tall / 2, text, ha="center", va="center", fontsize=8.5, bbox=ground, parse_math=False)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], style: str = "solid") -> None:
    ax.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "linestyle": style, "linewidth": 1.0, "color": "black"})


def _target(ax: Axes, served: ServedDraft, top: float) -> dict[int, float]:
    """The target as a ladder of states; the heights of the tapped ones."""
    from matplotlib.patches import Rectangle

    prefill = served.aux.prefill_hf or ()
    verify = served.aux.verify_hf if served.aux.verify_hf not in (None, served.aux.prefill_hf) else ()
    taps = sorted({*prefill, *(verify or ())})
    last = max([*taps, 1])
    ax.add_patch(Rectangle((0.2, 0.4), 1.3, top - 0.4, facecolor="#f4f4f4", edgecolor="black", linewidth=1.1))
    ax.text(0.85, top + 0.12, "target", ha="center", va="bottom", fontsize=9, fontweight="bold")
    heights: dict[int, float] = {}
    low, step = 0.4, 0.34
    for k in taps:  # to scale, but never so close that the labels touch
        low = heights[k] = max(low + step if heights else 0.6, 0.6 + (top - 1.1) * k / last)
    over = low - (top - 0.25)
    for k in reversed(taps):
        if over > 0:
            heights[k] -= over
    for k, y in heights.items():
        both = k in prefill and (not verify or k in verify)
        ax.plot([0.2, 1.5], [y, y], color="black", linewidth=2.2 if both else 1.4, linestyle="solid" if k in prefill else "dashed")
        note = "" if both else " prefill" if k in prefill else " verify"
        ax.text(0.85, y + 0.05, f"HF {k}{note}", ha="center", va="bottom", fontsize=8)
    if not taps:
        unknown = {False: "cannot hand\nout states", None: "layers unknown\n(no target)", True: "no layers"}[served.aux.hook]
        ax.text(0.85, top / 2, unknown, ha="center", va="center", fontsize=8.5, fontweight="bold" if served.aux.hook is False else "normal")
    return heights


def _served(served: ServedDraft) -> Figure:
    """One page from the target's layers to the proposed token."""
    parts = components(served)
    layers = [p for p in parts if p.name.startswith("layer ")]
    import matplotlib
    from matplotlib.patches import Rectangle

    rows = max(3, len(layers))
    top = max(4.0, 0.9 * rows + 0.9)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        figure, ax = picture(11.4, top + 1.6)
        ax.set_xlim(0, 11.4)
        ax.set_ylim(-0.75, top + 0.95)
        heights = _target(ax, served, top)
        middle = top / 2
        embedding, fc = parts[0], parts[1]
        _box(ax, (2.6, middle - 0.31), fc)
        _box(ax, (2.6, 0.35), embedding)
        for y in heights.values():
            _arrow(ax, (1.5, y), (2.57, middle), "dotted" if fc.state == "skipped" else "solid")
        base = middle - 0.45 * len(layers)
        for k, part in enumerate(layers):
            _box(ax, (5.0, base + 0.9 * k + 0.14), part)
        ax.add_patch(Rectangle((4.85, base), 2.2, 0.9 * len(layers), facecolor="none", edgecolor="black", linewidth=0.8))
        label = "draft layers" if len(layers) > 3 else "draft layer"
        ax.text(5.95, base + 0.9 * len(layers) + 0.12, label, ha="center", va="bottom", fontweight="bold")
        _arrow(ax, (4.53, middle), (4.85, middle))
        _arrow(ax, (4.53, 0.66), (4.85, max(base + 0.3, 0.66)))
        tail = parts[2 + len(layers) :]
        for k, part in enumerate(tail):
            y = middle - 0.31 + (1 - k) * 1.15
            _box(ax, (7.4, y), part, wide=2.2)
            if k:
                _arrow(ax, (8.5, y + 1.12), (8.5, y + 0.68))
        _arrow(ax, (7.05, middle + 0.6), (7.37, middle + 1.15))
        _arrow(ax, (9.63, middle - 1.15), (10.1, middle - 1.15))
        ax.text(10.15, middle - 1.15, "proposed\ntoken", va="center", fontsize=9)
        title = f"What {escaped(served.contract.label, 60)} runs"
        if served.refused is not None:
            title += f": nothing, it refuses ({escaped(served.refused.stage, 30)})"
        ax.text(0.2, top + 0.6, title, fontsize=11.5, fontweight="bold", parse_math=False)
        _legend(ax, {p.state for p in parts})
    return figure


def _legend(ax: Axes, states: set[str]) -> None:
    from matplotlib.patches import Rectangle

    x = 0.2
    for state in STYLES:
        if state in states:
            fill, hatch, line = STYLES[state]
            ax.add_patch(Rectangle((x, -0.6), 0.45, 0.3, facecolor=fill, hatch=hatch, edgecolor="black", linestyle=line))
            ax.text(x + 0.55, -0.45, MEANING[state], va="center", fontsize=8.5)
            x += 0.95 + 0.075 * len(MEANING[state])


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
