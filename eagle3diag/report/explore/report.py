"""Explore findings: filter them by severity, code, engine and words."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from eagle3diag.report.explore.explorer import Control, Explorer, Panel, Setting
from eagle3diag.report.layout import Block, View, count
from eagle3diag.report.views.report import block_of, report_view

if TYPE_CHECKING:
    from eagle3diag.report.study import Study
    from eagle3diag.rules.model import Report

__all__ = ["filtered", "report_explorer", "study_explorer"]

ALL = ""
SEVERITIES = (("all", ALL), ("errors", "error"), ("errors and warnings", "warning"))
_ORDER = ("error", "warning", "info")


def filtered(blocks: tuple[Block, ...], *, severity: str = ALL, code: str = ALL, engine: str = ALL, text: str = "") -> View:
    """The findings that remain.

    Args:
        blocks: of the findings.
        severity: the mildest that is kept; empty for all.
        code: a code, or the beginning of one; empty for all.
        engine: a label; findings that name no engine concern every one.
        text: words that all have to occur somewhere in the finding, in any case.
    """
    words = text.lower().split()
    kept = tuple(
        b
        for b in blocks
        if (not severity or _ORDER.index(b.status) <= _ORDER.index(severity))
        and b.code.startswith(code)
        and (not engine or not b.engines or engine in b.engines.split(", "))
        and all(w in _text(b) for w in words)
    )
    worst = min((_ORDER.index(b.status) for b in kept), default=None)
    return View(
        title="",
        summary=f"{len(kept)} of {count(len(blocks), 'finding')} shown",
        status="none" if worst is None else _ORDER[worst],
        blocks=kept,
    )


def _text(block: Block) -> str:
    parts = [block.code, block.title, block.remedy, block.engines, block.status, *(x for pair in block.evidence for x in pair)]
    return " ".join(parts).lower()


def _explorer(static: tuple[object, ...], blocks: tuple[Block, ...], engines: tuple[str, ...]) -> Explorer:
    codes = sorted({b.code for b in blocks})
    families = sorted({c.rstrip("0123456789") for c in codes})
    options = (("all", ALL), *((f"{f}: the family", f) for f in families), *((c, c) for c in codes))
    controls = [
        Control(key="severity", label="severity", kind="choice", value=ALL, options=SEVERITIES),
        Control(key="code", label="code", kind="choice", value=ALL, options=options),
    ]
    if len(engines) > 1:
        controls.append(Control(key="engine", label="engine", kind="choice", value=ALL, options=(("all", ALL), *((e, e) for e in engines))))
    controls.append(Control(key="text", label="words", kind="text", value=""))

    def shown(setting: Setting) -> Panel:
        return Panel(view=filtered(blocks, **setting))

    return Explorer(
        static=static, how="filter the findings by severity, code, engine or any words in them", controls=tuple(controls), shown=shown
    )


def report_explorer(report: Report) -> Explorer:
    """Filter the findings of one report."""
    return _explorer((report,), report_view(report).blocks, ())


def study_explorer(study: Study) -> Explorer:
    """Filter the findings of every engine; one that several engines have stands once, with their names."""
    from eagle3diag.report.findings import engine_of, joined

    labels = tuple(dict.fromkeys(engine_of(r) for r in study.reports))
    blocks = tuple(replace(block_of(j.finding), engines=", ".join(dict.fromkeys(j.engines or labels))) for j in joined(study.reports))
    return _explorer(tuple(study.reports), blocks, labels)
