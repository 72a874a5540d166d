"""A report as SARIF 2.1.0, for tools that collect the findings of many checkers.

A rule becomes a ``reportingDescriptor``, a finding a ``result``; what it is about (a tensor, a config key, a flag) is a logical location,
because a weight file has no lines. Skipped and crashed rules are notifications: they are no results, and must not read as passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.report.jsonout import dumps

if TYPE_CHECKING:
    from eagle3diag.rules.model import Finding, Report

__all__ = ["render", "sarif"]

LEVELS = {"error": "error", "warning": "warning", "info": "note"}
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def _result(finding: Finding, index: dict[str, int], path: str) -> dict[str, Any]:
    place: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}}}
    if finding.where:
        place["logicalLocations"] = [{"fullyQualifiedName": finding.where}]
    text = f"{finding.title}. Fix: {finding.remedy}" if finding.remedy else finding.title
    return {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": LEVELS[finding.severity.value],
        "message": {"text": text},
        "locations": [place],
        "properties": {"evidence": dict(finding.evidence), "engines": list(finding.engines)},
    }


def _uri(path: str) -> str:
    from urllib.parse import quote

    return path if "://" in path else quote(path, errors="replace")


def sarif(report: Report) -> dict[str, Any]:
    """The document as plain data."""
    from eagle3diag import __version__
    from eagle3diag.rules.registry import load_all

    rules = list(load_all().values())
    descriptors = [
        {"id": r.code, "shortDescription": {"text": r.summary}, "defaultConfiguration": {"level": LEVELS[r.severity.value]}} for r in rules
    ]
    notes = [
        {"level": "error" if o.status == "crashed" else "note", "descriptor": {"id": o.code}, "message": {"text": f"{o.status}: {o.why}"}}
        for o in report.skipped
    ]
    index = {r.code: k for k, r in enumerate(rules)}
    run = {
        "tool": {"driver": {"name": "eagle3diag", "version": __version__, "rules": descriptors}},
        "invocations": [
            {"executionSuccessful": all(o.status != "crashed" for o in report.outcomes), "toolExecutionNotifications": notes},
        ],
        "results": [_result(f, index, report.case.draft.path) for f in report.findings],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def render(report: Report) -> str:
    """The document as JSON text."""
    return dumps(sarif(report))
