"""Pictures of the draft room: agreement step by step, wirings against the one at hand, and acceptance as trained beside as served."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError, escaped
from eagle3diag.report.layout import count, figure_text, percent
from eagle3diag.report.views.draft import acceptance_records, acceptance_view, engine_records, engine_view, length_text, ranking_view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eagle3diag.draft.agreement import Agreement
    from eagle3diag.draft.ranking import Ranked, WiringRanking
    from eagle3diag.draft.served import Acceptance, ServedAcceptance
    from eagle3diag.report.acceptance import EngineAcceptance

__all__ = [
    "acceptance_alt",
    "acceptance_caption",
    "acceptance_plot",
    "agreement_alt",
    "agreement_caption",
    "agreement_plot",
    "bars",
    "engine_alt",
    "engine_caption",
    "engine_plot",
    "ranking_alt",
    "ranking_caption",
    "ranking_plot",
]

WIRINGS = 22  #: drawn
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"


def agreement_plot(result: object) -> Figure:
    """Joint, conditional and marginal agreement of each step, fed the text."""
    import matplotlib

    from eagle3diag.report.figures import RC, chart

    one: Agreement = result  # type: ignore[assignment]
    steps = [s.step for s in one.steps]
    if not steps:
        raise UsageError("nothing to draw: no step was measured")
    series: list[tuple[str, list[Any], str, str, str]] = [
        ("joint: this and every step before", [s.joint for s in one.steps], BLUE, "o", "-"),
        ("conditional: right, if all before were", [s.conditional for s in one.steps], ORANGE, "s", "--"),
        ("marginal: whatever came before", [s.marginal for s in one.steps], GREEN, "^", ":"),
    ]
    if one.on_policy:
        series.append(("marginal, fed its own tokens", [s.marginal for s in one.on_policy], "#000000", "x", "-."))
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        figure, ax = chart(8.6, 4.2, "Agreement with the target, step by step", right=0.3)
        for label, values, colour, marker, line in series:
            drawn = [math.nan if v is None else 100 * v for v in values]
            ax.plot(steps, drawn, color=colour, marker=marker, linestyle=line, label=label, markersize=6.5, linewidth=1.4)
        most = max((100 * v for _, values, *_ in series for v in values if v is not None), default=1.0)
        ax.set_ylim(0, max(5.0, min(135.0, most * 1.55)))
        ax.axhline(100 * one.commonest, color="#777777", linewidth=0.9)
        ax.text(steps[-1], 100 * one.commonest, "the commonest token, always", ha="right", va="bottom", fontsize=8, color="#444444")
        ax.set_yticks([t for t in ax.get_yticks() if t <= 100])
        ax.set_xticks(steps)
        ax.set_xlabel("draft step (0 is the first token proposed)")
        ax.set_ylabel("% of rows")
        ax.grid(axis="y", color="#dddddd", linewidth=0.7)
        ax.legend(loc="upper right", frameon=False, ncols=2)
    return figure


def agreement_caption(result: object) -> str:
    """The first step, how it falls, and the length."""
    one: Agreement = result  # type: ignore[assignment]
    joint = " ".join(percent(s.joint).removesuffix(" %") for s in one.steps)
    k = max(one.expected_length)
    return (
        f"The first step is right in {percent(one.steps[0].marginal)} of {count(one.rows, 'row')}; joint by step: {joint} %. "
        f"Expected acceptance length with chains of {k}: {length_text(one)}."
    )


def agreement_alt(result: object) -> str:
    """Every point in words."""
    one: Agreement = result  # type: ignore[assignment]
    points = [
        f"step {s.step}: joint {percent(s.joint)}, conditional {percent(s.conditional)}, marginal {percent(s.marginal)}" for s in one.steps
    ]
    return f"Line chart of agreement by draft step. {'; '.join(points)}."


def _drawn(ranking: WiringRanking) -> list[Ranked]:
    return [r for r in ranking.ranking if math.isfinite(r.effect.mean) and math.isfinite(r.effect.se)][:WIRINGS]


def ranking_plot(result: object) -> Figure:
    """Each wiring's difference to the one at hand with its 95 % interval; left is better.

    Raises:
        UsageError: nothing was tried.
    """
    import matplotlib

    from eagle3diag.report.figures import RC, chart

    ranking: WiringRanking = result  # type: ignore[assignment]
    shown = _drawn(ranking)
    if not shown:
        raise UsageError("nothing to draw: no wiring was tried")
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        tall = 1.75 + 0.25 * len(shown)
        figure, ax = chart(11.4, tall, "Other wirings against the one at hand", left=4.9, right=0.75, bottom=0.95)
        ax.set_xscale("symlog", linthresh=0.1, linscale=1.5)
        for k, r in enumerate(shown):
            _whisker(ax, k, r, len(r.rates.joint) == ranking.steps and r.rates.rows == ranking.rows)
        ax.axvline(0, color="black", linewidth=1.2)
        if math.isfinite(ranking.smallest):
            ax.axvspan(-ranking.smallest, 0, facecolor="#e6e6e6", edgecolor="#999999", hatch="....", linewidth=0, zorder=0)
        ax.set_yticks(range(len(shown)), [escaped(r.name, 66) for r in shown], fontsize=8, parse_math=False)
        for label, r in zip(ax.get_yticklabels(), shown, strict=True):
            label.set_fontweight("bold" if r is ranking.found else "normal")
        ax.set_ylim(len(shown) - 0.4, -0.6)
        high = max(*(r.effect.mean + 2 * r.effect.se for r in shown), 0.05)
        low = min(*(r.effect.mean - 2 * r.effect.se for r in shown), -1.2 * min(ranking.smallest, 10.0), -0.05)
        ax.set_xlim(low * 1.1, high * 1.1)
        ticks = [t for t in (-10, -3, -1, -0.3, -0.1, -0.03, 0, 0.03, 0.1, 0.3, 1, 3, 10) if low * 1.1 <= t <= high * 1.1]
        crowded = high - low > 1.0
        ax.set_xticks(
            [t for t in ticks if not (crowded and abs(t) == 0.03)],
            [f"{t:+g}" if t else "0" for t in ticks if not (crowded and abs(t) == 0.03)],
        )
        ax.minorticks_off()
        ax.set_xlabel("nats a token against the wiring at hand, with 95 % interval (symmetric log scale)")
        ax.grid(axis="x", color="#dddddd", linewidth=0.7)
        ax.text(1.01, 1.0, "group", transform=ax.transAxes, fontsize=8, va="bottom")
        for k, r in enumerate(shown):
            ax.text(1.025, k, str(r.group), transform=ax.get_yaxis_transform(), fontsize=8, va="center")
        words = "Left of 0: better. Filled: significantly better. Cross: fell behind, run on fewer rows or steps. "
        words += "Dotted: a gain too small to show here."
        figure.text(0.15 / 11.4, 0.2 / tall, words, fontsize=8.5, va="center")
    return figure


def _whisker(ax: Any, k: int, r: Ranked, whole: bool) -> None:
    colour = ORANGE if r.better else BLUE if whole else "#595959"
    ax.plot([r.effect.mean - 1.96 * r.effect.se, r.effect.mean + 1.96 * r.effect.se], [k, k], color=colour, linewidth=1.5)
    marker = "D" if r.better else "o" if whole else "x"
    ax.plot([r.effect.mean], [k], marker=marker, color=colour, markersize=6.5, markerfacecolor=colour if r.better else "white")


def ranking_caption(result: object) -> str:
    """The finding, and how much is drawn."""
    ranking: WiringRanking = result  # type: ignore[assignment]
    told = ranking_view(ranking).summary
    more = len(ranking.ranking) - len(_drawn(ranking))
    return f"{told[0].upper()}{told[1:]}.{f' The {WIRINGS} best are drawn, {more} more were tried.' if more > 0 else ''}"


def ranking_alt(result: object) -> str:
    """The first wirings in words."""
    ranking: WiringRanking = result  # type: ignore[assignment]
    points = [
        f"{r.name}: {r.effect.mean:+.3f} nats, plus or minus {figure_text(1.96 * r.effect.se, 2)}, group {r.group}"
        for r in _drawn(ranking)[:10]
    ]
    return f"Dot chart of wirings against the one at hand, negative is better. {'; '.join(points)}."


def bars(trained: Acceptance, served: Acceptance | None, title: str, other: str = "as this engine runs it") -> Figure:
    """Joint agreement of each step, as trained and otherwise, side by side.

    Args:
        served: None where there is one side only.
        other: what the second side is.
    """
    import matplotlib

    from eagle3diag.report.figures import RC, chart

    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        figure, ax = chart(8.6, 3.9, title, right=0.3)
        sides = [("as trained", trained, "#ffffff", "")]
        sides += [(other, served, "#f2a97a", "////")] if served is not None else []
        for i, (label, one, fill, hatch) in enumerate(sides):
            at = [s + (0.4 * i - 0.2 if len(sides) > 1 else 0.0) for s in range(len(one.rates.joint))]
            height = [100 * j for j in one.rates.joint]
            k = max(one.expected_length)
            name = f"{label}: {one.expected_length[k]:.2f} tokens with chains of {k}"
            ax.bar(at, height, 0.38, color=fill, edgecolor="black", hatch=hatch, label=name)
            for x, y in zip(at, height, strict=True):
                ax.text(x, y, f"{y:.1f}", ha="center", va="bottom", fontsize=8.5)
        most = max([100 * j for _, one, *_ in sides for j in one.rates.joint] or [1.0])
        ax.set_ylim(0, max(2.0, most * 1.4))
        ax.set_yticks([t for t in ax.get_yticks() if t <= 100])
        ax.set_xticks(range(len(trained.rates.joint)))
        ax.set_xlabel("draft step s: steps 0 to s all right")
        ax.set_ylabel("% of rows")
        ax.legend(loc="upper right", frameon=False)
    return figure


def _in_words(rows: list[dict[str, Any]]) -> str:
    bars = [f"step {r['step']}: {percent(r['trained'])} as trained, {percent(r['served'])} as served" for r in rows]
    return f"Bar chart of joint agreement by draft step. {'; '.join(bars)}."


def acceptance_plot(result: object) -> Figure:
    """Joint agreement of each step, as trained and as served, side by side."""
    one: ServedAcceptance = result  # type: ignore[assignment]
    return bars(one.trained, one.served, "Acceptance as served")


def acceptance_caption(result: object) -> str:
    """Both lengths."""
    told = acceptance_view(result).summary  # type: ignore[arg-type]
    return f"{told[0].upper()}{told[1:]}."


def acceptance_alt(result: object) -> str:
    """Every bar in words."""
    return _in_words(acceptance_records(result))  # type: ignore[arg-type]


def engine_plot(result: object) -> Figure:
    """The same for one engine; as trained alone where it has no number."""
    one: EngineAcceptance = result  # type: ignore[assignment]
    return bars(one.trained, None if one.result is None else one.result.served, f"Acceptance with {escaped(one.engine, 60)}")


def engine_caption(result: object) -> str:
    """Both lengths, with the engine's name."""
    one: EngineAcceptance = result  # type: ignore[assignment]
    return f"{escaped(one.engine)}: {engine_view(one).summary}."


def engine_alt(result: object) -> str:
    """Every bar in words."""
    return _in_words(engine_records(result))  # type: ignore[arg-type]
