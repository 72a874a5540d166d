"""A report as SARIF 2.1.0, for tools that collect the findings of many checkers.

A rule becomes a ``reportingDescriptor``, a finding a ``result``; what it is about (a tensor, a config key, a flag) is a logical location,
because a weight file has no lines. Skipped and crashed rules are notifications: they are no results, and must not read as passes.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from eagle3diag.report.jsonout import dumps
from eagle3diag.report.private import shared, without_home

if TYPE_CHECKING:
    from eagle3diag.rules.model import Finding, Report

__all__ = ["render", "sarif"]

LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_BASES = {"SRCROOT": "the folder eagle3diag was run in", "HOME": "the home folder of whoever ran eagle3diag"}
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def _result(finding: Finding, index: dict[str, int], place: dict[str, Any], seen: Counter[str]) -> dict[str, Any]:
    where: dict[str, Any] = {"physicalLocation": place}
    if finding.where:
        where["logicalLocations"] = [{"fullyQualifiedName": finding.where}]
    text = f"{finding.title}. Fix: {finding.remedy}" if finding.remedy else finding.title
    about = "\0".join((finding.code, finding.where, *sorted(finding.engines)))
    same = hashlib.sha256(about.encode("utf-8", "backslashreplace")).hexdigest()
    seen[same] += 1
    return {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": LEVELS[finding.severity.value],
        "message": {"text": without_home(text)},
        "locations": [where],
        "partialFingerprints": {"eagle3diag/v1": f"{same[:32]}:{seen[same]}"},
        "properties": {"evidence": shared(dict(finding.evidence)), "engines": list(finding.engines)},
    }


def _place(report: Report) -> dict[str, Any]:
    """The file a reviewer looks at: the draft's config, the log where it is alone, or what was given. A tool wants a line: the first."""
    case = report.case
    path = case.draft.path if case.has("draft") or case.log is None else case.log.path
    if "://" not in path and case.draft.configs and Path(path).is_dir():
        path = str(Path(path, case.draft.configs[0].file))
    return {"artifactLocation": _location(path), "region": {"startLine": 1}}


def _location(path: str) -> dict[str, Any]:
    """A URI relative to the working folder, or to the home folder without naming it, or whole."""
    if "://" in path:
        return {"uri": quote(path, safe=":/?#[]@!$&'()*+,;=%-._~", errors="replace")}
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - a link is named as it was given
    for name, base in (("SRCROOT", Path.cwd()), ("HOME", Path(os.path.expanduser("~")))):  # noqa: PTH111
        if whole.is_relative_to(base) and len(base.parts) > 1:
            return {"uri": quote(whole.relative_to(base).as_posix(), errors="replace"), "uriBaseId": name}
    return {"uri": "file://" + quote(whole.as_posix() if whole.as_posix().startswith("/") else f"/{whole.as_posix()}", errors="replace")}


def sarif(*reports: Report) -> dict[str, Any]:
    """The document as plain data, a run a report: reports on one draft differ by the engine."""
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(r, k, len(reports)) for k, r in enumerate(reports)]}


def _run(report: Report, number: int, of: int) -> dict[str, Any]:
    from eagle3diag import __version__
    from eagle3diag.rules.registry import load_all

    rules = list(load_all().values())
    descriptors = [
        {"id": r.code, "shortDescription": {"text": r.summary}, "defaultConfiguration": {"level": LEVELS[r.severity.value]}} for r in rules
    ]
    notes = [
        {
            "level": "error" if o.status == "crashed" else "note",
            "descriptor": {"id": o.code},
            "message": {"text": without_home(f"{o.status}: {o.why}")},
        }
        for o in report.skipped
    ]
    index, place = {r.code: k for k, r in enumerate(rules)}, _place(report)
    served, seen = report.case.served, Counter[str]()
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "eagle3diag", "version": __version__, "rules": descriptors}},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {name: {"description": {"text": text}} for name, text in _BASES.items()},
        "invocations": [
            {"executionSuccessful": all(o.status != "crashed" for o in report.outcomes), "toolExecutionNotifications": notes},
        ],
        "results": [_result(f, index, place, seen) for f in report.findings],
    }
    if of > 1:  # runs of one file are told apart by a category
        label = f"run {number + 1}" if served is None else served.contract.label
        run["automationDetails"] = {"id": f"eagle3diag/{quote(label, safe='')}"}
    return run


def render(*reports: Report) -> str:
    """The document as JSON text."""
    return dumps(sarif(*reports))
