"""The findings of several reports on one draft as one list: what holds for every engine is said once, with the engines beside it.

Worst first, and among equals the cause before its consequence: what lies in the files and what the engine does with them, then what that
does to the states, the acceptance and the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eagle3diag.report.layout import Block, Table, View, count
from eagle3diag.report.views.report import block_of, skipped_table

if TYPE_CHECKING:
    from eagle3diag.rules.model import Finding, Report

__all__ = ["Joined", "findings_view", "joined"]

#: causes first
FAMILIES = ("CFG", "KEY", "VAL", "ENG", "AUX", "DMP", "AGR", "SRV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One finding and the reports it stands in, by the label of their engine; no label where it stands in all."""

    finding: Finding
    engines: tuple[str, ...]

    @property
    def where(self) -> str:
        """The engines concerned, in words."""
        return ", ".join(self.engines or self.finding.engines)


def engine_of(report: Report) -> str:
    """The engine a report is about, in words."""
    return "no engine" if report.case.served is None else report.case.served.contract.label


def joined(reports: Sequence[Report]) -> tuple[Joined, ...]:
    """Every finding once, worst first, causes before consequences."""
    found: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for report in reports:
        for f in report.findings:
            key = (f.code, f.severity.value, f.title, f.remedy, repr(sorted(f.evidence.items(), key=str)))
            found.setdefault(key, (f, []))[1].append(engine_of(report))
    rows = [Joined(finding=f, engines=() if len(labels) == len(reports) else tuple(labels)) for f, labels in found.values()]
    return tuple(sorted(rows, key=lambda j: (j.finding.severity.rank, _family(j.finding.code), j.finding.code)))


def _family(code: str) -> int:
    return FAMILIES.index(code[:3]) if code[:3] in FAMILIES else len(FAMILIES)


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
