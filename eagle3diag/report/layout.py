"""What is shown, before it is decided how: a ``View`` is a heading, a status, blocks and tables of plain text.

``views`` turns results into views; ``text``, ``markdown`` and ``html`` turn views into characters. Values in a view are raw strings as
the result holds them: each renderer escapes everything it prints in the way its medium needs, so nothing from a file can be markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["MARKS", "WORDS", "Block", "Status", "Table", "View", "count", "figure_text", "mark", "percent", "size", "table", "value_text"]

Status = str  #: a key of MARKS

#: status -> a sign that says the same without colour
MARKS = {"error": "✖", "warning": "▲", "info": "ℹ", "ok": "✔", "skipped": "–", "none": ""}
#: status -> the word that always stands beside the sign
WORDS = {"error": "ERROR", "warning": "WARNING", "info": "INFO", "ok": "OK", "skipped": "SKIPPED", "none": ""}

MAX_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a caption; the first column names the row.

    ``more`` says what was cut, empty where nothing was. ``status`` gives one status a row, or is empty.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: str = ""
    status: tuple[Status, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One finding or fact: what, the evidence by name, what to do."""

    status: Status
    code: str
    title: str
    evidence: tuple[tuple[str, str], ...] = ()
    remedy: str = ""
    engines: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A result ready to be written out: the verdict first, the worst next, the quiet rest last."""

    title: str
    summary: str
    status: Status = "none"
    blocks: tuple[Block, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


def mark(status: Status) -> str:
    """``✖ ERROR``: sign and word, empty for ``none``."""
    return f"{MARKS[status]} {WORDS[status]}".strip()


def count(n: int, one: str, many: str = "") -> str:
    """``1 tensor``, ``1,024 tensors``."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def size(nbytes: int) -> str:
    """Bytes in the unit a reader expects: ``12.6 MB`` (decimal)."""
    if nbytes < 1000:
        return f"{nbytes} B"
    n = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB"):
        n /= 1000
        if n < 1000:
            return f"{n:.1f} {unit}"
    return f"{n:,.1f} PB"


def percent(share: float | None) -> str:
    """``35.1 %``; a dash where there is no number."""
    return "–" if share is None or share != share else f"{100 * share:.1f} %"


def figure_text(x: float | None, digits: int = 4) -> str:
    """A measured number in a few significant digits; a dash where there is none."""
    return "–" if x is None or x != x else f"{x:.{digits}g}"


def value_text(value: Any, limit: int = 400) -> str:
    """A value of evidence or config as one short string: numbers unrounded where exact, lists in brackets, cut with an ellipsis."""
    if value is None:
        text = "not stated"
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{k}: {value_text(v, limit)}" for k, v in value.items()) or "none"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(value_text(v, limit) for v in value) + "]"
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    status: Iterable[Status] = (),
    rest: str = "more",
    limit: int = MAX_ROWS,
) -> Table:
    """A table of at most ``limit`` rows; what is cut is counted: ``312 more, all unchanged`` with ``rest="more, all unchanged"``."""
    every = [tuple(value_text(c) for c in row) for row in rows]
    cut = max(0, len(every) - limit)
    return Table(
        caption=caption,
        head=tuple(head),
        rows=tuple(every[:limit]),
        more=f"{cut:,} {rest}" if cut else "",
        status=tuple(status)[:limit],
    )
