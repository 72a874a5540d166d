"""Explore a ``WeightDiff``: pick tensors, see their difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from eagle3diag.errors import UsageError
from eagle3diag.report.explore.explorer import Control, Explorer, Panel, Setting
from eagle3diag.report.layout import View, count, table

if TYPE_CHECKING:
    from eagle3diag.weights.diff import WeightDiff

__all__ = ["diff_explorer", "only"]

FIRST = 3  #: tensors picked at first, the largest change before others
LISTED = 400


def only(diff: WeightDiff, names: Sequence[str]) -> WeightDiff:
    """The same diff with these tensors alone.

    Args:
        names: as in ``diff.values``, ``removed``, ``added`` or ``shape``; others are passed over.
    """
    wanted = set(names)
    return replace(
        diff,
        removed=tuple(n for n in diff.removed if n in wanted),
        added=tuple(n for n in diff.added if n in wanted),
        shape=tuple(c for c in diff.shape if c.name in wanted),
        dtype=tuple(c for c in diff.dtype if c.name in wanted),
        values=tuple(v for v in diff.values if v.name in wanted),
        renamed=tuple(r for r in diff.renamed if r.before in wanted),
        unsettled=(),
        config=(),
    )


def _names(diff: WeightDiff) -> list[tuple[str, str]]:
    """(words, name) of every tensor, what is on one side first, then by the size of the change."""
    found = [(f"{n} (removed)", n) for n in diff.removed] + [(f"{n} (added)", n) for n in diff.added]
    found += [(f"{c.name} (another shape)", c.name) for c in diff.shape]
    found += [(f"{v.name} ({'not a number' if v.relative is None else f'{v.relative:.2g}'})", v.name) for v in diff.changed]
    found += [(f"{v.name} (equal)", v.name) for v in diff.values if v.equal]
    return list({name: (words, name) for words, name in found}.values())


def diff_explorer(diff: WeightDiff) -> Explorer:
    """Pick tensors.

    Raises:
        UsageError: nothing was compared by value, and no tensor is missing.
    """
    names = _names(diff)
    if not names:
        raise UsageError("nothing to explore: names and shapes agree and values were not compared, ask for values")
    first = tuple(name for _, name in names[:FIRST])
    options = tuple(names[:LISTED])
    return Explorer(
        static=(diff,),
        pictures=(diff,),
        how="pick tensors (several with Ctrl or Shift) and see how they differ",
        controls=(Control(key="tensors", label="tensors", kind="several", value=first, options=options),),
        shown=lambda setting: _panel(diff, setting),
    )


def _panel(diff: WeightDiff, setting: Setting) -> Panel:
    from eagle3diag.report import figures

    names = tuple(setting["tensors"])
    some = only(diff, names)
    if not names:
        return Panel(view=View(title="", summary="no tensor picked", status="none"))
    equal = sum(v.equal for v in some.values)
    odd = len(some.removed) + len(some.added) + len(some.shape)
    told = [f"{equal} equal", f"{len(some.values) - equal} with other values"] + ([f"{odd} without a counterpart"] if odd else [])
    head = ("tensor", "relative L2", "max abs", "cosine", "elements that differ", "NaN a / b", "dtype a / b")
    rows = (
        (
            v.name,
            _number(v.relative),
            _number(v.max_abs),
            _number(v.cosine),
            "none" if v.differ is None else f"{100 * v.differ:.3g} %",
            f"{v.nan[0]:,} / {v.nan[1]:,}",
            " / ".join(v.dtypes),
        )
        for v in (*some.changed, *(v for v in some.values if v.equal))
    )
    view = View(
        title="",
        summary=f"{count(len(names), 'tensor')}: {', '.join(told)}",
        status="warning" if odd else "info" if equal < len(some.values) else "ok",
        tables=(
            table("By value", head, rows),
            table("Shapes that differ", ("tensor", "a", "b"), ((c.name, list(c.a), list(c.b)) for c in some.shape)),
        ),
    )
    return Panel(view=view, png=figures.png(figures.plot(some)), alt=figures.alt(some))


def _number(x: float | None) -> str:
    return "none" if x is None else f"{x:.6g}"
