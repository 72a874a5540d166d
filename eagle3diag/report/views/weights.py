"""Views of the weights room: what differs between two drafts, what one tensor's values look like, what a conversion did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import Table, View, count, table, value_text

if TYPE_CHECKING:
    from eagle3diag.weights.compare import ValueChange
    from eagle3diag.weights.convert import Conversion
    from eagle3diag.weights.diff import WeightDiff
    from eagle3diag.weights.stats import TensorStats

__all__ = [
    "change_records",
    "change_view",
    "conversion_records",
    "conversion_view",
    "diff_records",
    "diff_view",
    "stats_records",
    "stats_view",
]


def diff_records(diff: WeightDiff) -> list[dict[str, Any]]:
    """One row a tensor or config fact that is not the same: kind, name, a, b, and the numbers of value changes."""
    rows: list[dict[str, Any]] = [{"kind": "removed", "name": n} for n in diff.removed]
    rows += [{"kind": "added", "name": n} for n in diff.added]
    for kind, changes in (("shape", diff.shape), ("dtype", diff.dtype), ("config", diff.config)):
        rows += [{"kind": kind, "name": c.name, "a": c.a, "b": c.b} for c in changes]
    rows += [{"kind": "values", **v.to_dict()} for v in diff.changed]
    rows += [{"kind": "renamed", "name": r.before, "a": r.before, "b": r.after, "by": r.by} for r in diff.renamed]
    return rows


def _number(x: float | None) -> str:
    return "none" if x is None else f"{x:.3g}"


def _share(x: float | None) -> str:
    return "none" if x is None else f"{100 * x:.3g} %"


def _values(diff: WeightDiff) -> Table:
    same = sum(v.equal for v in diff.values)
    rows = [
        (v.name, _number(v.relative), _number(v.max_abs), _number(v.cosine), _share(v.differ), f"{v.nan[0]:,} / {v.nan[1]:,}", v.note)
        for v in diff.changed
    ]
    head = ("tensor", "relative L2", "max abs", "cosine", "elements that differ", "NaN a / b", "note")
    one = table(f"Values that differ ({same:,} of {count(len(diff.values), 'compared tensor')} equal)", head, rows)
    if any(v.note for v in diff.changed):
        return one
    return Table(caption=one.caption, head=head[:-1], rows=tuple(r[:-1] for r in one.rows), more=one.more)


def diff_view(diff: WeightDiff) -> View:
    """The summary, then removed and added, shapes, values (largest change first), config facts, renames."""
    parts = [
        (len(diff.removed), "removed"),
        (len(diff.added), "added"),
        (len(diff.shape), "of another shape"),
        (len(diff.dtype), "of another dtype"),
        (len(diff.changed), "with other values"),
        (len(diff.renamed), "renamed"),
    ]
    told = ", ".join(f"{n:,} {what}" for n, what in parts if n)
    facts = f"{count(len(diff.config), 'config fact')} differ" if diff.config else "config facts agree"
    looked = "" if diff.with_values else "; values not compared"
    lost = bool(diff.removed or diff.added or diff.shape)
    other = bool(diff.changed or diff.dtype or diff.config)
    gone = [(n, "removed", "only in a") for n in diff.removed] + [(n, "added", "only in b") for n in diff.added]
    gone += [(" or ".join(x), "unsettled", f"fits equally well: {', '.join(y)}") for x, y in diff.unsettled]
    return View(
        title=f"a = {diff.a}, b = {diff.b}",
        summary=f"{count(diff.matched, 'tensor')} matched: {told or 'nothing differs'}; {facts}{looked}",
        status="warning" if lost else "info" if other else "ok" if diff.with_values else "none",
        tables=(
            table("Tensors on one side only", ("tensor", "which", "where"), gone, status=("warning" for _ in gone)),
            table("Shapes that differ", ("tensor", "a", "b"), ((c.name, list(c.a), list(c.b)) for c in diff.shape)),
            table("Dtypes that differ", ("tensor", "a", "b"), ((c.name, c.a, c.b) for c in diff.dtype)),
            _values(diff),
            table("Config facts that differ", ("fact", "a", "b"), ((c.name, c.a, c.b) for c in diff.config)),
            table("The same tensor under another name", ("a", "b", "matched by"), ((r.before, r.after, r.by) for r in diff.renamed)),
        ),
    )


def change_records(change: ValueChange) -> list[dict[str, Any]]:
    """One row: the tensor and its numbers."""
    return [change.to_dict()]


def change_view(change: ValueChange) -> View:
    """One compared tensor."""
    told = "equal" if change.equal else f"differs: relative L2 {_number(change.relative)}, in {_share(change.differ)} of the elements"
    return View(
        title=change.name,
        summary=told,
        status="ok" if change.equal else "warning",
        tables=(table("Numbers", ("what", "value"), ((k, v) for k, v in change.to_dict().items() if k != "name")),),
    )


def stats_records(stats: TensorStats) -> list[dict[str, Any]]:
    """One row: every statistic by name."""
    return [{n: getattr(stats, n) for n in stats.__slots__}]


def stats_view(stats: TensorStats) -> View:
    """What the values of one tensor look like."""
    odd = ", ".join(f"{n:,} {what}" for n, what in ((stats.nan, "NaN"), (stats.inf, "infinite")) if n)
    shape = value_text(list(stats.shape))
    rows = [(k, "none" if v is None else v) for k, v in stats_records(stats)[0].items() if k not in ("name", "dtype", "shape")]
    return View(
        title=stats.name,
        summary=f"{stats.dtype} {shape}: mean {_number(stats.mean)}, std {_number(stats.std)}, {odd or 'all finite'}",
        status="error" if odd else "none",
        tables=(table("Statistics", ("what", "value"), rows),),
    )


def conversion_records(conversion: Conversion) -> list[dict[str, Any]]:
    """One row a renamed tensor: before, after."""
    return [{"from": a, "to": b} for a, b in conversion.renamed.items()]


def conversion_view(conversion: Conversion) -> View:
    """Where it was written, what was renamed and translated, and what was allowed to be lost."""
    lost = conversion.lost
    return View(
        title="Conversion",
        summary=f"wrote {conversion.written} for {conversion.to}; {f'lost, as allowed: {value_text(lost)}' if lost else 'nothing lost'}",
        status="warning" if lost else "ok",
        tables=(
            table("Tensors renamed", ("from", "to"), conversion.renamed.items()),
            table("Config facts translated", ("fact", "how"), conversion.translated.items()),
        ),
    )
