"""The map of a weight diff, layer by layer: one bar a tensor in the order data flows through the draft, as long as the change is large."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from eagle3diag.errors import UsageError, escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eagle3diag.weights.diff import WeightDiff

__all__ = ["diff_alt", "diff_caption", "diff_plot"]

ROWS = 40
LOW, HIGH = -6.0, 0.5  #: log10 of the relative change at the ends of the scale


class Row:
    """One tensor: its name, its relative change (None where there is no number) and what is said beside the bar."""

    __slots__ = ("kind", "name", "note", "relative")

    def __init__(self, name: str, kind: str, relative: float | None, note: str) -> None:
        self.name, self.kind, self.relative, self.note = name, kind, relative, note


def _order(name: str) -> tuple[int, int, str]:
    """Embedding, fc, layers by number, norm, head, the rest."""
    for rank, stem in ((0, "embed"), (1, "fc"), (3, "norm."), (4, "lm_head")):
        if name.startswith(stem):
            return rank, 0, name
    parts = name.split(".")
    numbers = [int(p) for p in parts if p.isdigit()]
    return (2, numbers[0], name) if numbers else (2, 0, name) if "midlayer" in name else (5, 0, name)


def group_of(name: str) -> str:
    """The part of the draft a tensor belongs to, in a word or two."""
    rank, number, _ = _order(name)
    return ("embedding", "fc", f"layer {number}", "norm", "head", "other")[rank]


def _short(name: str) -> str:
    """The name without what its group says already."""
    parts = name.split(".")
    cut = next((k for k, p in enumerate(parts) if p.isdigit() or p == "midlayer"), None)
    return name if cut is None or group_of(name).split()[0] != "layer" else ".".join(parts[cut + 1 :]) or name


def rows(diff: WeightDiff) -> list[Row]:
    """Every tensor of both sides, in the order of the draft."""
    found = [Row(n, "lost", None, "removed") for n in diff.removed] + [Row(n, "lost", None, "added") for n in diff.added]
    found += [Row(c.name, "lost", None, f"shape {list(c.a)} against {list(c.b)}") for c in diff.shape]
    for v in diff.values:
        note = "equal" if v.equal else f"relative {v.relative:.2g}" if v.relative is not None and math.isfinite(v.relative) else "differs"
        if not v.equal and (v.nan[0] or v.nan[1]):
            note += f", NaN {v.nan[0]:,} / {v.nan[1]:,}"
        found.append(Row(v.name, "same" if v.equal else "changed", 0.0 if v.equal else v.relative, note))
    return sorted(found, key=lambda r: _order(r.name))


def _length(row: Row) -> float:
    """Bar length between 0 and 1 on the logarithmic scale; full where there is no number to show."""
    if row.kind == "lost" or row.relative is None or not math.isfinite(row.relative):
        return 1.0
    return 0.0 if row.relative <= 0 else min(1.0, max(0.02, (math.log10(row.relative) - LOW) / (HIGH - LOW)))


def diff_plot(result: object) -> Figure:
    """The picture of a ``WeightDiff``.

    Raises:
        UsageError: values were not compared and no tensor is missing, so there is nothing to draw.
    """
    import matplotlib

    from eagle3diag.report.figures import RC, picture

    diff: WeightDiff = result  # type: ignore[assignment]
    every = rows(diff)
    if not every:
        raise UsageError("nothing to draw: names and shapes agree and values were not compared, ask for values")
    worst = sorted(every, key=lambda r: (r.kind == "same", -_length(r)))[:ROWS]
    shown = sorted(worst, key=lambda r: _order(r.name))
    tall = len(shown) + 2.6
    figure: Figure
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure, ax = picture(11.4, 0.27 * tall + 0.3)
        ax.set_xlim(0, 11.4)
        ax.set_ylim(tall, 0)
        ax.text(0.2, 0.7, "What changed, layer by layer", fontsize=11.5, fontweight="bold", va="center")
        styles = {"lost": ("#f2a97a", "////"), "changed": ("#4aa3d8", ""), "same": ("#ffffff", "")}
        left, wide = 4.3, 4.6
        for k, row in enumerate(shown):
            y = 1.5 + k
            fill, hatch = styles[row.kind]
            ax.text(left - 0.1, y + 0.4, escaped(_short(row.name), 40), ha="right", va="center", fontsize=8, parse_math=False)
            if k == 0 or group_of(row.name) != group_of(shown[k - 1].name):
                ax.text(0.2, y + 0.4, group_of(row.name), ha="left", va="center", fontsize=8.5, fontweight="bold", parse_math=False)
                if k:
                    ax.plot([0.2, left + wide], [y - 0.1, y - 0.1], color="#bbbbbb", linewidth=0.7)
            if row.kind != "same":
                ax.barh(y + 0.4, wide * _length(row), 0.66, left, color=fill, hatch=hatch, edgecolor="black", linewidth=0.8)
            at = left + (wide * _length(row) if row.kind != "same" else 0.0) + 0.08
            ax.text(at, y + 0.4, escaped(row.note, 48), va="center", fontsize=8, parse_math=False)
        ax.plot([left, left], [1.4, 1.5 + len(shown)], color="black", linewidth=1.0)
        scale = "bar: |b - a| / |a|, logarithmic from 1e-6 to 3; hatched: only on one side, or another shape"
        if len(every) > ROWS:
            scale += f"; the {ROWS} largest changes of {len(every)} tensors"
        ax.text(0.2, tall - 0.5, scale, fontsize=8.5, va="center")
    return figure


def diff_caption(result: object) -> str:
    """What the map shows, and the largest change in words."""
    diff: WeightDiff = result  # type: ignore[assignment]
    every = rows(diff)
    changed = [r for r in every if r.kind == "changed"]
    lost = [r for r in every if r.kind == "lost"]
    told = [f"{sum(r.kind == 'same' for r in every)} of {len(every)} tensors are equal"]
    if changed:
        most = max(changed, key=_length)
        where = list(dict.fromkeys(group_of(r.name) for r in changed))
        parts = f" in {', '.join(where[:6])}{' and more' if len(where) > 6 else ''}" if len(changed) > 1 else ""
        told.append(f"{len(changed)} changed{parts}, most {escaped(most.name)} ({most.note})")
    if lost:
        told.append(f"{len(lost)} on one side only or of another shape: {', '.join(escaped(r.name) for r in lost[:5])}")
    cut = f" The {ROWS} largest changes of {len(every)} tensors are drawn." if len(every) > ROWS else ""
    return f"Tensors in the order data flows through the draft. {'; '.join(told)}.{cut}"


def diff_alt(result: object) -> str:
    """The map in words: every tensor that is not equal."""
    diff: WeightDiff = result  # type: ignore[assignment]
    odd = [f"{escaped(r.name)}: {r.note}" for r in rows(diff) if r.kind != "same"]
    more = f"; {len(odd) - 20} more" if len(odd) > 20 else ""
    return "Bar chart of the change of each tensor. " + ("; ".join(odd[:20]) + more if odd else "All are equal.")
