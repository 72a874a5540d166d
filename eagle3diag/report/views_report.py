"""The view of a report: verdict, findings worst first, what was skipped and why, what passed on one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import Block, Table, View, count, table, value_text

if TYPE_CHECKING:
    from eagle3diag.report.study import Study
    from eagle3diag.rules.model import Finding, Report

__all__ = ["report_records", "report_view", "study_records", "study_view"]

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
    if not case.has("draft"):
        log = case.log
        return f"a log of {log.engine or 'an unknown engine'}, no draft given" if log is not None else "no draft given"
    parts = [f"{case.spec.algorithm} draft, {case.spec.dialect.name} dialect"]
    if case.served is None:
        parts.append("no engine given")
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
    served = report.case.served
    notes = [f"Assumed: {note}." for note in report.case.notes]
    notes.append(f"Passed ({len(passed)}): {' '.join(passed) or 'none'}")
    return View(
        title=f"Verdict on {report.case.draft.path}" + (f" with {served.contract.label}" if served is not None else ""),
        summary=summary,
        status="error" if crashed else STATUS[report.verdict],
        blocks=tuple(_block(f) for f in report.findings),
        tables=(_skipped(report),),
        notes=tuple(notes),
    )


def study_records(study: Study) -> list[dict[str, Any]]:
    """One row an engine: engine, verdict, codes of errors and of warnings."""
    rows = []
    for r in study.reports:
        codes = {s: sorted({f.code for f in r.findings if f.severity.value == s}) for s in ("error", "warning")}
        engine = "no engine" if r.case.served is None else r.case.served.contract.label
        rows.append({"engine": engine, "verdict": r.verdict, "errors": codes["error"], "warnings": codes["warning"]})
    return rows


def study_view(study: Study) -> View:
    """The verdict per engine, in one sentence and a table."""
    rows = study_records(study)
    worst = min(rows, key=lambda r: list(STATUS).index(r["verdict"]))
    verdicts = "; ".join(f"{r['verdict']} with {r['engine']}" for r in rows)
    crashed = sum(o.status == "crashed" for r in study.reports for o in r.outcomes)
    if crashed:
        verdicts += f"; incomplete, {count(crashed, 'rule')} crashed"
    return View(
        title=f"Verdict on {study.checkpoint.path}",
        summary=verdicts,
        status="error" if crashed else STATUS[worst["verdict"]],
        tables=(
            table(
                "Verdict by engine",
                ("engine", "verdict", "errors", "warnings"),
                ((r["engine"], r["verdict"], " ".join(r["errors"]) or "none", " ".join(r["warnings"]) or "none") for r in rows),
                status=(STATUS[r["verdict"]] for r in rows),
            ),
        ),
    )
