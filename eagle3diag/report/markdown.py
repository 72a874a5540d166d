"""Views as Markdown: for a pull request, an issue or a note. Text from files is escaped so that it cannot be markup or a link."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import escaped
from eagle3diag.report.layout import Block, Table, View, mark

if TYPE_CHECKING:
    from eagle3diag.report.study import Study
    from eagle3diag.rules.model import Report

__all__ = ["of", "quoted", "render"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~@])")


def _safe(text: str, limit: int = 2000) -> str:
    shown = escaped(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", shown).replace("://", ":&#47;&#47;").replace("www.", "www&#46;")


def _block(block: Block) -> str:
    lines = [f"### {mark(block.status)} {_safe(block.code)}: {_safe(block.title)}", ""]
    lines += [f"- {_safe(key)}: {_safe(value)}" for key, value in block.evidence]
    if block.engines:
        lines.append(f"- where: {_safe(block.engines)}")
    if block.remedy:
        lines += ["", f"**Fix:** {_safe(block.remedy)}"]
    return "\n".join(lines)


def _table(one: Table) -> str:
    rows = [f"| {' | '.join(_safe(c, 300) or ' ' for c in row)} |" for row in one.rows]
    lines = [f"**{_safe(one.caption)}**", "", f"| {' | '.join(_safe(h) for h in one.head)} |", "|" + " --- |" * len(one.head), *rows]
    if one.more:
        lines += ["", f"… {_safe(one.more)}"]
    return "\n".join(lines)


def of(view: View) -> str:
    """One view as Markdown, without a line break at the end."""
    parts = [*([f"## {_safe(view.title)}"] if view.title else []), f"**{_safe(view.summary)}**"]
    parts += [_block(b) for b in view.blocks]
    parts += [_table(t) for t in view.tables if t.rows]
    parts += [_safe(n, 4000) for n in view.notes]
    return "\n\n".join(parts) + "\n"


def quoted(study: Study, parameters: Mapping[str, Any]) -> str:
    """What of a report belongs in an issue: the verdict, the findings, what it was made from; no home folder in it.

    Args:
        parameters: what was asked, by name.
    """
    from eagle3diag.report.origin import origin_view
    from eagle3diag.report.private import without_home
    from eagle3diag.report.views import view
    from eagle3diag.report.views.findings import findings_view

    views = (view(study), findings_view(study.reports, "Findings"), origin_view(study, parameters, "Made from"))
    return without_home("\n".join(of(v) for v in views)).rstrip("\n")


def render(report: Report | Any) -> str:
    """A report (or any result that has a view) as Markdown."""
    from eagle3diag.report.views import view

    return of(view(report))
