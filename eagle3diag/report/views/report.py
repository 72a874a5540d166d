"""The view of a report: verdict, findings worst first, what was skipped and why, what passed on one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.report.findings import engine_of, joined
from eagle3diag.report.layout import Block, Table, View, count, size, table, value_text

if TYPE_CHECKING:
    from eagle3diag.report.logstudy import LogStudy
    from eagle3diag.report.opened import Opened
    from eagle3diag.report.study import Study
    from eagle3diag.rules.model import Finding, Report

__all__ = ["block_of", "report_records", "report_view", "skipped_table", "study_records", "study_view"]

FIRST = 6  #: findings in the verdict of a study: its first screen
STATUS = {"broken": "error", "suspect": "warning", "healthy": "ok"}


def report_records(report: Report) -> list[dict[str, Any]]:
    """One row a finding, as in the JSON output."""
    return [f.to_dict() for f in report.findings]


def block_of(finding: Finding) -> Block:
    """A finding with its evidence and remedy."""
    return Block(
        status=finding.severity.value,
        code=finding.code,
        title=finding.title,
        evidence=tuple((str(k), value_text(v)) for k, v in finding.evidence.items()),
        remedy=finding.remedy,
        engines=", ".join(finding.engines),
    )


def skipped_table(report: Report) -> Table:
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
        blocks=tuple(block_of(f) for f in report.findings),
        tables=(skipped_table(report),),
        notes=tuple(notes),
    )


def study_records(study: Study) -> list[dict[str, Any]]:
    """One row an engine: engine, verdict, codes of errors and of warnings, causes before consequences."""
    rows = []
    for r in study.reports:
        found = [j.finding for j in joined([r])]
        codes = {s: list(dict.fromkeys(f.code for f in found if f.severity.value == s)) for s in ("error", "warning")}
        rows.append({"engine": engine_of(r), "verdict": r.verdict, "errors": codes["error"], "warnings": codes["warning"]})
    return rows


def study_view(study: Study) -> View:
    """The verdict per engine with its codes in one sentence; what is wrong and its fix; the same by engine. The worst stands first."""
    rows = study_records(study)
    ordered = sorted(rows, key=lambda r: list(STATUS).index(r["verdict"]))
    verdicts = "; ".join(f"{r['verdict']} with {r['engine']}{_codes(r)}" for r in ordered)
    crashed = sum(o.status == "crashed" for r in study.reports for o in r.outcomes)
    if crashed:
        verdicts += f"; incomplete, {count(crashed, 'rule')} crashed"
    wrong = [j for j in joined(study.reports) if j.finding.severity.value != "info"]
    return View(
        title=f"Verdict on {study.checkpoint.path}",
        summary=verdicts,
        status="error" if crashed else STATUS[ordered[0]["verdict"]],
        tables=(
            table(
                "What is wrong, worst first",
                ("code", "what", "engine", "fix"),
                ((j.finding.code, j.finding.title, j.where or "any", j.finding.remedy or "see the finding") for j in wrong),
                status=(j.finding.severity.value for j in wrong),
                limit=FIRST,
            ),
            table(
                "Verdict by engine",
                ("engine", "verdict", "errors", "warnings"),
                ((r["engine"], r["verdict"], " ".join(r["errors"]) or "none", " ".join(r["warnings"]) or "none") for r in rows),
                status=(STATUS[r["verdict"]] for r in rows),
            ),
        ),
    )


def _codes(row: dict[str, Any]) -> str:
    named = [*row["errors"], *row["warnings"]]
    shown = named[:FIRST]
    rest = len(named) - len(shown)
    return f" ({', '.join(shown)}{f' and {rest} more' if rest else ''})" if named else ""


def opened_records(this: Opened) -> list[dict[str, Any]]:
    """One row an input: input, path, what it is."""
    draft, dump, target = this.checkpoint, this.dump, this.target
    made_of = f"{this.spec.algorithm}, {this.spec.dialect.name} dialect, {count(len(draft.tensors), 'tensor')}, {size(draft.bytes_total)}"
    states = f"{count(len(dump.samples), 'sample')}, {count(len(dump.slots), 'state')} of width {dump.hidden:,} a token"
    rows = [{"input": "draft", "path": draft.path, "what": made_of}, {"input": "dump", "path": dump.path, "what": states}]
    if target is not None:
        layers = value_text(target.num_layers.value)
        what = f"{target.architecture.value or 'architecture not stated'}, {layers} layers"
        rows.append({"input": "target", "path": target.path, "what": what})
    return rows


def opened_view(this: Opened) -> View:
    """What was opened; nothing of it is judged."""
    rows = opened_records(this)
    return View(
        title="Opened for measuring",
        summary=f"a draft and {count(len(this.dump.samples), 'sample')} of hidden states"
        + ("" if this.target is None else ", with the target")
        + "; nothing is computed yet",
        tables=(table("Inputs", ("input", "path", "what it is"), ((r["input"], r["path"], r["what"]) for r in rows)),),
        notes=("Next: judged() for the verdict of the rules, served(engines) for what an engine makes of the draft.",),
    )


def logstudy_records(this: LogStudy) -> list[dict[str, Any]]:
    """One row a question: question, answer."""
    from eagle3diag.report.views import view

    rows = [{"question": "what the log shows", "answer": view(this.log).summary}]
    asked = (
        ("what explains it", this.causes, "nothing to explain, or no draft given"),
        ("which wirings would give it", this.wirings, "no dump given"),
        ("does speculation pay", this.pays, "no baseline given, or no throughput in the log"),
    )
    return [*rows, *({"question": q, "answer": view(found[0]).summary if found else why} for q, found, why in asked)]


def logstudy_view(this: LogStudy) -> View:
    """The verdict, then one answer a question."""
    verdict = report_view(this.report)
    rows = ((r["question"], r["answer"]) for r in logstudy_records(this))
    return View(
        title=f"Study of the log {this.log.path}",
        summary=verdict.summary,
        status=verdict.status,
        tables=(table("In short", ("question", "answer"), rows),),
        notes=("In full: report, log, explanation and payoff, each its own result.",),
    )
