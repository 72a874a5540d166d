"""Pictures of hidden states: norms by layer with the first token apart, and norms of every token of one sample with the sinks marked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError, escaped
from eagle3diag.report.layout import count, figure_text
from eagle3diag.report.views.hidden import sink_text, slot_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eagle3diag.hidden.norms import NormProfile
    from eagle3diag.hidden.tokens import TokenNorms

__all__ = ["profile_alt", "profile_caption", "profile_plot", "token_plot", "tokens_alt", "tokens_caption", "tokens_plot"]

TOKENS = 512  #: of a sample that are drawn
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#595959"


def profile_plot(result: object) -> Figure:
    """Mean norm, first token and largest value of every state, on a logarithmic scale.

    Raises:
        UsageError: no finite row was read.
    """
    import matplotlib

    from eagle3diag.report.figures import RC, chart

    profile: NormProfile = result  # type: ignore[assignment]
    layers = [x for x in profile.layers if x.rows or x.first_rows]
    if not layers:
        raise UsageError(f"{escaped(profile.path, 200)}: nothing to draw, no finite row was read")
    series = (
        ("L2 norm, mean of the tokens after the first", [x.l2_mean for x in layers], BLUE, "o", "-"),
        ("L2 norm of the first token", [x.first_l2_mean for x in layers], ORANGE, "D", "--"),
        ("largest value of a token after the first", [x.max_abs or math.nan for x in layers], GREY, "x", ":"),
    )
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        turned = len(layers) >= 14
        bottom = 0.8 if turned else 0.6
        figure, ax = chart(max(6.5, min(11.4, 2.5 + 0.62 * len(layers))), 3.7 + bottom, "Norm of the states, layer by layer", bottom=bottom)
        for label, values, colour, marker, line in series:
            drawn = [v if v > 0 else math.nan for v in values]
            ax.plot(range(len(layers)), drawn, color=colour, marker=marker, linestyle=line, label=label, markersize=6, linewidth=1.4)
        ax.set_yscale("log")
        ax.set_xticks(range(len(layers)), [slot_name(x.slot) for x in layers], rotation=90 if turned else 0)
        ax.set_xlabel("state, in stored order (HF k: input of decoder layer k)")
        ax.grid(axis="y", color="#dddddd", linewidth=0.7)
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * 12)  # room for the legend
        ax.legend(loc="upper left", frameon=False, ncols=1)
        _broken(ax, layers)
        _sink(ax, layers)
    return figure


def _sink(ax: Any, layers: list[Any]) -> None:
    """The state at which the first token stands out most, with how much, where it is a sink."""
    ratios = [(x.first_l2_mean / x.l2_mean, k) for k, x in enumerate(layers) if x.first_rows and x.rows and x.l2_mean > 0]
    most, at = max((r for r in ratios if math.isfinite(r[0])), default=(0.0, 0))
    if most < 3:
        return
    high, low = layers[at].first_l2_mean, layers[at].l2_mean
    ax.annotate("", (at, high / 1.25), (at, low * 1.25), arrowprops={"arrowstyle": "<->", "color": "black", "linewidth": 1.1})
    side = {"ha": "left", "xytext": (7, 0)} if at < 0.75 * len(layers) else {"ha": "right", "xytext": (-7, 0)}
    words = f"sink: {figure_text(most, 3)} times"
    middle = math.sqrt(high * low)
    ax.annotate(words, (at, middle), textcoords="offset points", va="center", fontsize=8.5, fontweight="bold", **side)


def _broken(ax: Any, layers: list[Any]) -> None:
    """A cross and a count over states with broken rows."""
    for k, x in enumerate(layers):
        bad = x.nonfinite + (x.zero if x.slot.hf != 0 else 0)
        if bad:
            style: dict[str, Any] = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 8.5, "fontweight": "bold"}
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            ax.axvline(k, color="black", linewidth=6, alpha=0.12)
            ax.annotate(f"{bad:,} broken", (k, 0.03), xycoords=("data", "axes fraction"), bbox=ground, **style)


def profile_caption(result: object) -> str:
    """What stands out."""
    profile: NormProfile = result  # type: ignore[assignment]
    broken = [f"{slot_name(x.slot)} ({x.nonfinite:,})" for x in profile.layers if x.nonfinite]
    told = f" Rows with NaN or Inf: {', '.join(broken)}." if broken else ""
    return f"{count(profile.tokens, 'token')} in {count(profile.samples, 'sample')}: {sink_text(profile)}.{told}"


def profile_alt(result: object) -> str:
    """Every point in words."""
    profile: NormProfile = result  # type: ignore[assignment]
    points = [
        f"{slot_name(x.slot)} {figure_text(x.l2_mean, 3)}, first token {figure_text(x.first_l2_mean if x.first_rows else None, 3)}"
        for x in profile.layers[:40]
    ]
    return f"Line chart of the L2 norm by state. Mean of the tokens after the first: {'; '.join(points)}."


def tokens_plot(result: object) -> Figure:
    """A map of states against tokens, the norm over the state's median as lightness, sinks and broken rows marked above it.

    Raises:
        UsageError: the sample has no row.
    """
    import matplotlib
    import numpy as np
    from matplotlib.colors import LogNorm

    from eagle3diag.report.figures import RC, chart

    norms: TokenNorms = result  # type: ignore[assignment]
    wide = min(TOKENS, max((len(row) for row in norms.l2), default=0))
    grid = np.full((len(norms.l2), max(wide, 1)), np.nan)
    for k, (row, median) in enumerate(zip(norms.l2, norms.medians, strict=True)):
        grid[k, : min(len(row), wide)] = np.asarray(row[:wide]) / median if median > 0 else np.nan
    grid[grid <= 0] = np.nan
    if not np.isfinite(grid).any():
        raise UsageError(f"{escaped(norms.sample)}: nothing to draw, no row is finite and not zero")
    slots = len(norms.slots)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        tall = 1.9 + max(1.6, 0.27 * slots)
        figure, ax = chart(
            10.4, tall, f"Norm of every token in {escaped(norms.sample, 34)}, over the median of its layer", right=1.35, bottom=0.85
        )
        colours = matplotlib.colormaps["cividis"].with_extremes(bad="white")
        image = ax.imshow(
            np.ma.masked_invalid(grid),
            aspect="auto",
            cmap=colours,
            norm=LogNorm(0.25, 32),
            interpolation="nearest",
            extent=(0, wide, slots, 0),
        )
        box = ax.get_position()
        bar = figure.add_axes((box.x1 + 0.15 / 10.4, box.y0, 0.18 / 10.4, box.height))
        scale = figure.colorbar(image, cax=bar, label="times the median", extend="both", extendfrac=0.12 / (box.height * tall))
        scale.set_ticks([0.25, 1, 4, 10, 32], labels=["1/4", "1", "4", "10", "32"])
        scale.minorticks_off()
        ax.set_yticks([k + 0.5 for k in range(slots)], [slot_name(s) for s in norms.slots])
        ax.set_xlabel(f"token, by its place in the sample{f' (the first {wide:,})' if len(norms.token_ids) > wide else ''}")
        ax.set_xlim(-0.012 * wide, wide)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_ylim(slots, -1.1)
        for token in norms.sinks:
            if token < wide:
                ax.plot([token + 0.5], [-0.45], marker="v", color="black", markersize=7, clip_on=False)
        for token in norms.broken:
            if token < wide:
                ax.plot([token + 0.5], [-0.45], marker="x", color="black", markersize=7, markeredgewidth=2, clip_on=False)
        words = ["triangle: a sink, ten times the median norm or more"] if norms.sinks else []
        words += ["cross: NaN or Inf, left white"] if norms.broken else []
        figure.text(0.75 / 10.4, 0.2 / tall, "; ".join(words) or "no token stands out", fontsize=8.5, va="center")
    return figure


def tokens_caption(result: object) -> str:
    """Which tokens stand out."""
    norms: TokenNorms = result  # type: ignore[assignment]
    sinks = ", ".join(f"token {t} ({figure_text(norms.times_median(t), 3)} times)" for t in norms.sinks[:6])
    told = f"Attention sinks, by their norm over the median: {sinks}" if sinks else "No token has ten times the median norm"
    if len(norms.sinks) > 6:
        told += f" and {len(norms.sinks) - 6} more"
    broken = f" Broken rows (NaN or Inf): {count(len(norms.broken), 'token')}, first {norms.broken[0]}." if norms.broken else ""
    return f"{told}.{broken}"


def tokens_alt(result: object) -> str:
    """The map in words: the median of each state and the tokens marked."""
    norms: TokenNorms = result  # type: ignore[assignment]
    medians = "; ".join(f"{slot_name(s)} {figure_text(m, 3)}" for s, m in zip(norms.slots[:40], norms.medians, strict=False))
    sizes = f"{count(len(norms.slots), 'state')} against {count(len(norms.token_ids), 'token')}"
    return f"Map of {sizes}. Median norms: {medians}. {tokens_caption(norms)}"


def token_plot(norms: TokenNorms, slot: int, token: int) -> Figure:
    """The norm of the tokens around one, at one state, with that token and the sinks marked."""
    import matplotlib

    from eagle3diag.report.figures import RC, chart

    row, median = norms.l2[slot], norms.medians[slot]
    start = max(0, min(token - TOKENS // 2, len(row) - TOKENS))
    at = range(start, min(len(row), start + TOKENS))
    values = [row[t] if row[t] > 0 else math.nan for t in at]
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        figure, ax = chart(8.6, 3.1, f"Norm of the tokens at {slot_name(norms.slots[slot])}", right=0.3)
        ax.plot(at, values, color=BLUE, linewidth=1.0, label="L2 norm")
        if any(math.isfinite(v) for v in values):
            ax.set_yscale("log")
        if median > 0:
            ax.axhline(median, color=GREY, linewidth=0.9, linestyle="--", label="median")
        sinks = [t for t in norms.sinks if t in at and t < len(row) and row[t] > 0]
        ax.plot(sinks, [row[t] for t in sinks], color="black", marker="v", markersize=6, linestyle="none", label="sink")
        if token in at:
            ax.axvline(token, color=ORANGE, linewidth=1.2, linestyle=":")
            if row[token] > 0:
                ax.plot([token], [row[token]], color=ORANGE, marker="D", markersize=8, markeredgecolor="black", label=f"token {token}")
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * 3)  # room for the legend
        ax.set_xlim(at.start - 1, max(at.stop, at.start + 2))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_xlabel("token, by its place in the sample")
        ax.set_ylabel("L2 norm")
        ax.grid(axis="y", color="#dddddd", linewidth=0.7)
        ax.legend(loc="upper right", frameon=False, ncols=4)
    return figure
