"""The view of a report: verdict, findings worst first, what was skipped and why, what passed on one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import Block, Table, View, count, value_text

if TYPE_CHECKING:
    from eagle3diag.rules.model import Finding, Report

__all__ = ["report_records", "report_view"]

STATUS = {"broken": "error", "suspect": "warning", "healthy": "ok"}


def report_records(report: Report) -> list[dict[str, Any]]:
    """One row a finding, as in the JSON output."""
    return [f.to_dict() for f in report.findings]


def _block(finding: Finding) -> Block:
    return Block(
        status=finding.severity.value,
        code=finding.code,
        title=finding.title,
        evidence=tuple((str(k), value_text(v)) for k, v in finding.evidence.items()),
        remedy=finding.remedy,
        engines=", ".join(finding.engines),
    )


def _skipped(report: Report) -> Table:
    """Reasons and the rules each kept from judging; crashed ones first."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for o in sorted(report.skipped, key=lambda o: o.status != "crashed"):
        reasons.setdefault((o.status, o.why), []).append(o.code)
    return Table(
        caption="Skipped: these rules judged nothing",
        head=("why", "rules"),
        rows=tuple((why, " ".join(codes)) for (_, why), codes in reasons.items()),
        status=tuple("error" if status == "crashed" else "skipped" for status, _ in reasons),
    )


def _given(report: Report) -> str:
    case = report.case
    parts = [f"{case.spec.algorithm} draft, {case.spec.dialect.name} dialect"]
    parts.append(f"served by {case.served.contract.label}" if case.served is not None else "no engine given")
    if case.target is not None:
        parts.append(f"target {case.target.architecture.value or case.target.path}")
    else:
        parts.append("no target given")
    if case.headers_only:
        parts.append("headers only")
    return ", ".join(parts)


def report_view(report: Report) -> View:
    """The whole report; never says healthy where a rule crashed without saying so."""
    tally = {s: sum(f.severity.value == s for f in report.findings) for s in ("error", "warning", "info")}
    told = [count(n, {"error": "error", "warning": "warning", "info": "note"}[s]) for s, n in tally.items() if n]
    crashed = [o for o in report.outcomes if o.status == "crashed"]
    passed = [o.code for o in report.outcomes if o.status == "ran" and not o.findings]
    summary = f"{report.verdict.upper()}: {', '.join(told) or 'nothing found'} ({_given(report)})"
    if crashed:
        summary += f"; incomplete, {count(len(crashed), 'rule')} crashed"
    notes = [f"Assumed: {note}." for note in report.case.notes]
    notes.append(f"Passed ({len(passed)}): {' '.join(passed) or 'none'}")
    return View(
        title=f"Verdict on {report.case.draft.path}",
        summary=summary,
        status="error" if crashed else STATUS[report.verdict],
        blocks=tuple(_block(f) for f in report.findings),
        tables=(_skipped(report),),
        notes=tuple(notes),
    )
