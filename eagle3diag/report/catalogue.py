"""The rule catalogue for a reader: the list, or one rule with the whole of its docstring."""

from __future__ import annotations

from inspect import cleandoc
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError, escaped
from eagle3diag.report.layout import View, count, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eagle3diag.rules.registry import Rule

__all__ = ["data", "rules", "view"]


def rules(code: str | None = None) -> list[Rule]:
    """All rules in the order of their codes, or those whose code is or begins with ``code``.

    Raises:
        UsageError: no rule of that name.
    """
    from eagle3diag.rules.registry import load_all

    every = list(load_all().values())
    if code is None:
        return every
    found = [r for r in every if r.code.startswith(code.upper())]
    if not found or not code:
        families = ", ".join(sorted({r.code[:3] for r in every}))
        raise UsageError(f"no rule {escaped(code)}: 'eagle3diag rules' lists all {len(every)}, families are {families}")
    return found


def data(chosen: Sequence[Rule]) -> dict[str, Any]:
    """The JSON shape of ``rules``; the page is there where a single rule was asked for."""
    rows = [{"code": r.code, "severity": r.severity.value, "summary": r.summary, "needs": list(r.needs)} for r in chosen]
    if len(chosen) == 1:
        rows[0]["page"] = _page(chosen[0])
    return {"schema": 1, "rules": rows}


def _page(rule: Rule) -> str:
    return cleandoc(rule.look.__doc__ or rule.summary)


def _paragraph(section: str) -> str:
    """A section of a page on one line, for a view to wrap: its heading, a colon, its text."""
    head, _, text = section.strip().partition("\n")
    said = f"{head.removeprefix('## ')}: {text}" if head.startswith("## ") and text else section
    return " ".join(said.split())


def view(chosen: Sequence[Rule]) -> View:
    """One rule as its page, several as a table."""
    if len(chosen) == 1:
        one = chosen[0]
        paragraphs = [_paragraph(p) for p in _page(one).split("\n\n")[1:] if p.strip()]
        summary = f"{one.summary} ({one.severity.value} by default; needs {', '.join(one.needs)})"
        return View(title=one.code, summary=summary, notes=tuple(paragraphs))
    rows = [(r.code, r.severity.value, r.summary, ", ".join(r.needs)) for r in chosen]
    return View(
        title="Rules",
        summary=f"{count(len(chosen), 'rule')}; 'eagle3diag rules CODE' explains one",
        tables=(table("Rules by code", ("code", "severity by default", "what it says", "needs"), rows, limit=200),),
    )
