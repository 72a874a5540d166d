"""What is shown, before it is decided how: a ``View`` is a heading, a status, blocks and tables of plain text.

``views`` turns results into views; ``text``, ``markdown`` and ``html`` turn views into characters. Values in a view are raw strings as
the result holds them: each renderer escapes everything it prints in the way its medium needs, so nothing from a file can be markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

__all__ = [
    "MARKS",
    "WORDS",
    "Block",
    "Status",
    "Table",
    "View",
    "count",
    "cut_rows",
    "cut_texts",
    "cut_view",
    "figure_text",
    "mark",
    "percent",
    "size",
    "table",
    "value_text",
]

Status = str  #: a key of MARKS

#: status -> a sign that says the same without colour
MARKS = {"error": "✖", "warning": "▲", "info": "ℹ", "ok": "✔", "skipped": "–", "none": ""}
#: status -> the word that always stands beside the sign
WORDS = {"error": "ERROR", "warning": "WARNING", "info": "INFO", "ok": "OK", "skipped": "SKIPPED", "none": ""}

MAX_ROWS = 40
_BITS = 1024  #: of an integer that is written out


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a caption; the first column names the row.

    ``more`` says what was cut, empty where nothing was. ``status`` gives one status a row, or is empty; so does ``kinds``, by whose words
    the cut rows are counted in ``cut``.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: str = ""
    status: tuple[Status, ...] = ()
    kinds: tuple[str, ...] = ()
    cut: tuple[tuple[str, int], ...] = ()


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
    """A value of evidence or config as one short string: numbers unrounded where exact, lists in brackets, cut with an ellipsis.

    Of a long list or mapping only as much is looked at as is shown.
    """
    if value is None:
        text = "not stated"
    elif isinstance(value, str):
        text = str(value)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, int) and value.bit_length() > _BITS:
        text = f"a number of {value.bit_length():,} bits"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, Mapping):
        text = _joined((f"{str(k)[:limit]}: {value_text(v, limit)}" for k, v in value.items()), limit) or "none"
    elif isinstance(value, (list, tuple)):
        text = "[" + _joined((value_text(v, limit) for v in value), limit) + "]"
    elif hasattr(value, "dtype") and getattr(value, "shape", None):
        text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _joined(parts: Iterable[str], limit: int) -> str:
    """The parts with commas, as many as reach the limit."""
    told, long = [], 0
    for part in parts:
        told.append(part)
        long += len(part) + 2
        if long > limit:
            break
    return ", ".join(told)


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    status: Iterable[Status] = (),
    kinds: Iterable[str] = (),
    limit: int = MAX_ROWS,
) -> Table:
    """A table of at most ``limit`` rows; what is cut is counted, and not turned into text.

    Args:
        status: of each row.
        kinds: one word a row by which the cut ones are counted: ``312 more, all loaded``, ``12 more: 2 dropped, 10 loaded``.
    """
    every, words = iter(rows), iter(kinds)
    shown = tuple(tuple(value_text(c) for c in row) for row in islice(every, limit))
    told = tuple(islice(words, limit))
    gone = max(0, len(rows) - limit) if isinstance(rows, Sized) else sum(1 for _ in every)
    counted = Counter(words) if told else Counter({"": gone})
    cut = tuple((kind, n) for kind, n in counted.items() if n)
    return Table(
        caption=caption,
        head=tuple(head),
        rows=shown,
        more=_more(cut),
        status=tuple(islice(status, limit)),
        kinds=told,
        cut=cut,
    )


def _more(cut: Sequence[tuple[str, int]]) -> str:
    """``312 more``, ``312 more, all loaded``, ``12 more: 2 dropped, 10 loaded``; empty for none."""
    total = sum(n for _, n in cut)
    if not total:
        return ""
    if len(cut) == 1:
        return f"{total:,} more" + (f", all {cut[0][0]}" if cut[0][0] else "")
    return f"{total:,} more: " + ", ".join(f"{n:,} {kind}" for kind, n in cut)


def cut_rows(one: Table, most: int) -> Table:
    """The table with its first rows only, and a count of all that is left out."""
    gone = len(one.rows) - most
    if gone <= 0:
        return one
    counted = Counter(one.kinds[most:] or [""] * gone)
    counted.update(dict(one.cut))
    cut = tuple((kind, n) for kind, n in counted.items() if n)
    more = _more(cut) + (f"; {one.more}" if one.more and not one.cut else "")
    return replace(one, rows=one.rows[:most], status=one.status[:most], kinds=one.kinds[:most], more=more, cut=cut)


def cut_texts(one: View, longest: int) -> View:
    """The view with every text cut to ``longest`` characters."""

    def short(text: str) -> str:
        return text if len(text) <= longest else text[: longest - 1] + "…"

    blocks = tuple(
        replace(
            b,
            code=short(b.code),
            title=short(b.title),
            evidence=tuple((short(k), short(v)) for k, v in b.evidence),
            remedy=short(b.remedy),
            engines=short(b.engines),
        )
        for b in one.blocks
    )
    tables = tuple(
        replace(t, caption=short(t.caption), more=short(t.more), rows=tuple(tuple(map(short, row)) for row in t.rows)) for t in one.tables
    )
    return replace(
        one, title=short(one.title), summary=short(one.summary), blocks=blocks, tables=tables, notes=tuple(map(short, one.notes))
    )


def cut_view(one: View, *, rows: int, texts: int, blocks: int) -> View:
    """The view with fewer rows, shorter texts and fewer blocks; what is left out is counted."""
    kept, gone = one.blocks[:blocks], len(one.blocks) - blocks
    notes = one.notes[:blocks]
    if gone > 0:
        notes = (f"{gone:,} more of the kind of {kept[-1].code}, the quieter ones, are left out here.", *notes)
    return cut_texts(replace(one, blocks=kept, tables=tuple(cut_rows(t, rows) for t in one.tables), notes=notes), texts)
