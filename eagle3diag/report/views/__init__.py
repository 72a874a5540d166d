"""Every public result as a ``View``, and from that as text for a terminal, HTML for a notebook, or a table for pandas.

``display.Shown`` asks here when a result is printed, so results themselves know nothing of rendering. The functions per noun stand in
``serving``, ``checkpoint``, ``engines``, ``weights``, ``hidden``, ``draft`` and ``report``; the
noun is told by its class name, which spares importing the rooms a result does not come from. What results are made of (`Piece`) has a
sentence each in ``pieces``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from eagle3diag.display import Piece
from eagle3diag.errors import UsageError
from eagle3diag.report.layout import View, cut_view

__all__ = ["KINDS", "frame", "html", "line", "plain", "view"]

#: class name -> module and stem: ``<stem>_view(result)`` is its view, ``<stem>_records(result)`` the rows of its main table.
KINDS = {
    "Checkpoint": ("checkpoint", "checkpoint"),
    "DraftSpec": ("checkpoint", "spec"),
    "TargetSpec": ("checkpoint", "target"),
    "Launch": ("engines", "launch"),
    "Contract": ("engines", "contract"),
    "ServedDraft": ("engines", "served"),
    "EngineScan": ("scan", "scan"),
    "WeightDiff": ("weights", "diff"),
    "ValueChange": ("weights", "change"),
    "TensorStats": ("weights", "stats"),
    "Conversion": ("weights", "conversion"),
    "HiddenDump": ("hidden", "dump"),
    "NormProfile": ("hidden", "profile"),
    "TokenNorms": ("hidden", "tokens"),
    "DumpComparison": ("hidden", "comparison"),
    "Capture": ("hidden", "capture"),
    "Agreement": ("draft", "agreement"),
    "WiringRanking": ("draft", "ranking"),
    "Explanations": ("draft", "explanations"),
    "ServedAcceptance": ("draft", "acceptance"),
    "EngineAcceptance": ("draft", "engine"),
    "GreedyLoop": ("draft", "loop"),
    "ServingLog": ("serving", "log"),
    "Payoff": ("serving", "payoff"),
    "Explanation": ("serving", "explanation"),
    "Compatibility": ("serving", "compatibility"),
    "Report": ("report", "report"),
    "Study": ("report", "study"),
    "Opened": ("report", "opened"),
    "LogStudy": ("report", "logstudy"),
}

MAX_LINES = 20  #: of a repr
MAX_BYTES = 64_000  #: of what a notebook cell is given; a larger one is cut, and says so
#: rows a table, characters a text, blocks: tried in turn until it is small enough
SIZES = ((200, 4000, 200), (40, 1000, 100), (40, 300, 40), (20, 200, 20), (10, 100, 10), (3, 40, 3))


def _maker(result: object, what: str) -> Any:
    name = type(result).__name__
    if name not in KINDS:
        raise UsageError(f"a {name} has no {'table' if what == 'records' else 'view'}; known are {', '.join(KINDS)}")
    module, stem = KINDS[name]
    return getattr(import_module(f"eagle3diag.report.views.{module}"), f"{stem}_{what}")


def view(result: object) -> View:
    """The view of a result.

    Raises:
        UsageError: not one of the results of this library.
    """
    if isinstance(result, View):
        return result
    if isinstance(result, Piece):
        from eagle3diag.report.views.pieces import piece_view

        return piece_view(result)
    return cast(View, _maker(result, "view")(result))


def line(piece: Piece) -> str:
    """The ``repr`` of a piece: one line, its class and a sentence."""
    from eagle3diag.report.views.pieces import line

    return line(piece)


def plain(result: object) -> str:
    """The ``repr`` of a result: at most 20 lines, the summary first, the worst next."""
    from eagle3diag.report.text import brief

    return brief(view(result), MAX_LINES)


def html(result: object) -> str:
    """The HTML fragment a notebook shows: a static table with words in it, legible without style or scripts, of at most 64 KB."""
    from eagle3diag.report.html import cell

    whole = view(result)
    shown = ""
    for rows, texts, blocks in SIZES:
        shown = cell(cut_view(whole, rows=rows, texts=texts, blocks=blocks))
        if len(shown.encode("utf-8", "replace")) <= MAX_BYTES:
            break
    return shown


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
