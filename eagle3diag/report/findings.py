"""The findings of several reports on one draft as one list: what holds for every engine is said once, with the engines beside it.

The order is that of ``Report.findings``: worst first, and among equals the cause before its consequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3diag.rules.model import family_rank

if TYPE_CHECKING:
    from eagle3diag.rules.model import Finding, Report

__all__ = ["Joined", "engine_of", "joined"]


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
    return tuple(sorted(rows, key=lambda j: (j.finding.severity.rank, family_rank(j.finding.code), j.finding.code)))
