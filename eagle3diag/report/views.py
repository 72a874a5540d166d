"""Every public result as a ``View``, and from that as text for a terminal, HTML for a notebook, or a table for pandas.

``display.Shown`` asks here when a result is printed, so results themselves know nothing of rendering. The functions per noun stand in
``views_serving``, ``views_checkpoint``, ``views_engines``, ``views_weights``, ``views_hidden``, ``views_draft`` and ``views_report``; the
noun is told by its class name, which spares importing the rooms a result does not come from.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from eagle3diag.errors import UsageError
from eagle3diag.report.layout import View

__all__ = ["KINDS", "frame", "html", "plain", "view"]

#: class name -> module and stem: ``<stem>_view(result)`` is its view, ``<stem>_records(result)`` the rows of its main table.
KINDS = {
    "Checkpoint": ("views_checkpoint", "checkpoint"),
    "DraftSpec": ("views_checkpoint", "spec"),
    "TargetSpec": ("views_checkpoint", "target"),
    "Contract": ("views_engines", "contract"),
    "ServedDraft": ("views_engines", "served"),
    "EngineScan": ("views_scan", "scan"),
    "WeightDiff": ("views_weights", "diff"),
    "ValueChange": ("views_weights", "change"),
    "TensorStats": ("views_weights", "stats"),
    "Conversion": ("views_weights", "conversion"),
    "HiddenDump": ("views_hidden", "dump"),
    "NormProfile": ("views_hidden", "profile"),
    "TokenNorms": ("views_hidden", "tokens"),
    "DumpComparison": ("views_hidden", "comparison"),
    "Capture": ("views_hidden", "capture"),
    "Agreement": ("views_draft", "agreement"),
    "WiringRanking": ("views_draft", "ranking"),
    "Explanations": ("views_draft", "explanations"),
    "ServedAcceptance": ("views_draft", "acceptance"),
    "EngineAcceptance": ("views_draft", "engine"),
    "GreedyLoop": ("views_draft", "loop"),
    "ServingLog": ("views_serving", "log"),
    "Payoff": ("views_serving", "payoff"),
    "Explanation": ("views_serving", "explanation"),
    "Compatibility": ("views_serving", "compatibility"),
    "Report": ("views_report", "report"),
    "Study": ("views_report", "study"),
}

MAX_LINES = 20  #: of a repr


def _maker(result: object, what: str) -> Any:
    name = type(result).__name__
    if name not in KINDS:
        raise UsageError(f"a {name} has no {'table' if what == 'records' else 'view'}; known are {', '.join(KINDS)}")
    module, stem = KINDS[name]
    return getattr(import_module(f"eagle3diag.report.{module}"), f"{stem}_{what}")


def view(result: object) -> View:
    """The view of a result.

    Raises:
        UsageError: not one of the results of this library.
    """
    return cast(View, _maker(result, "view")(result))


def plain(result: object) -> str:
    """The ``repr`` of a result: at most 20 lines, the summary first, the worst next."""
    from eagle3diag.report.text import of

    lines = of(view(result)).splitlines()
    if len(lines) > MAX_LINES:
        rest = len(lines) - MAX_LINES + 1
        lines = [*lines[: MAX_LINES - 1], f"… {rest} more lines: print(eagle3diag.report.text.render(result))"]
    return "\n".join(lines)


def html(result: object) -> str:
    """The HTML fragment a notebook shows: a static table with words in it, legible without style or scripts."""
    from eagle3diag.report.html import fragment

    return fragment(view(result), level=3)


def frame(result: object) -> Any:
    """The main table of a result as a ``pandas.DataFrame``, nothing cut, values as the result holds them.

    Raises:
        UsageError: pandas is not installed, or the result has no table.
    """
    records = _maker(result, "records")(result)
    try:
        import pandas
    except ImportError:
        raise UsageError("a data frame needs pandas: python -m pip install 'eagle3diag[notebook]'") from None
    return pandas.DataFrame(records)
