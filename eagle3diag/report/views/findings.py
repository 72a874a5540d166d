"""The findings section of a report on one draft and several engines: each finding said once, then what was not judged, then what passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from eagle3diag.report.findings import Joined, engine_of, joined
from eagle3diag.report.layout import Block, Table, View, count
from eagle3diag.report.views.report import block_of, skipped_table

if TYPE_CHECKING:
    from eagle3diag.rules.model import Report

__all__ = ["findings_view"]


def findings_view(reports: Sequence[Report], title: str = "") -> View:
    """The findings section of a report: every finding with its evidence and remedy, then what was not judged, then what passed.

    Args:
        reports: of one draft, one per engine.
        title: of the section; none where a heading stands above it already.
    """
    found = joined(reports)
    tally = {s: sum(j.finding.severity.value == s for j in found) for s in ("error", "warning", "info")}
    told = [count(n, {"error": "error", "warning": "warning", "info": "note"}[s]) for s, n in tally.items() if n]
    crashed = sum(o.status == "crashed" for r in reports for o in r.outcomes)
    status = "error" if tally["error"] or crashed else "warning" if tally["warning"] else "ok"
    summary = ", ".join(told) or "Nothing found"
    return View(
        title=title,
        summary=summary + (f"; incomplete, {count(crashed, 'rule')} crashed" if crashed else ""),
        status=status,
        blocks=tuple(_block(j) for j in found),
        tables=_skipped(reports),
        notes=_notes(reports),
    )


def _block(one: Joined) -> Block:
    return replace(block_of(one.finding), engines=one.where)


def _skipped(reports: Sequence[Report]) -> tuple[Table, ...]:
    """One table where all reports skipped the same rules, else one each."""
    tables = [skipped_table(r) for r in reports]
    if all(t == tables[0] for t in tables):
        return tuple(tables[:1])
    return tuple(replace(t, caption=f"{t.caption}, with {engine_of(r)}") for t, r in zip(tables, reports, strict=True))


def _notes(reports: Sequence[Report]) -> tuple[str, ...]:
    assumed = dict.fromkeys(f"Assumed: {note}." for r in reports for note in r.case.notes)
    passed = [[o.code for o in r.outcomes if o.status == "ran" and not o.findings] for r in reports]
    if all(p == passed[0] for p in passed):
        return (*assumed, f"Passed ({len(passed[0])}): {' '.join(passed[0]) or 'none'}")
    told = (f"Passed with {engine_of(r)} ({len(p)}): {' '.join(p) or 'none'}" for r, p in zip(reports, passed, strict=True))
    return (*assumed, *told)
