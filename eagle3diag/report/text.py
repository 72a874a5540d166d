"""Views for a terminal: the verdict line, failures with evidence and remedy, skipped with the reason, passed on one line.

Everything printed goes through ``escaped``: a tensor name cannot move the cursor or change a colour. Colour only repeats what sign and word
already say, on a terminal and without ``NO_COLOR``.
"""

from __future__ import annotations

import os
import textwrap
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TextIO

from eagle3diag.errors import escaped
from eagle3diag.report.layout import Block, Status, Table, View, cut_rows, cut_view, mark

if TYPE_CHECKING:
    from eagle3diag.rules.model import Report

__all__ = ["brief", "colour_wanted", "of", "render"]

WIDTH = 100
_COLOURS = {"error": "1;31", "warning": "1;33", "info": "36", "ok": "32", "skipped": "2"}
_CELL = 60
_TEXT = 400  #: characters of one text in a repr
_HEAD = 5  #: lines of a summary there
_LEAST = 6  #: lines a table wants there: blank, caption, head, two rows, the count of the rest


def colour_wanted(stream: TextIO) -> bool:
    """True on a terminal that did not ask for none (``NO_COLOR``, ``TERM=dumb``)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _painted(text: str, status: Status, colour: bool) -> str:
    return f"\x1b[{_COLOURS[status]}m{text}\x1b[0m" if colour and status in _COLOURS else text


def _wrapped(text: str, indent: str, first: str | None = None) -> str:
    one_line = escaped(text, 4000)
    lead = indent if first is None else first
    return textwrap.fill(one_line, WIDTH, initial_indent=lead, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _block(block: Block, colour: bool) -> list[str]:
    label = f"{mark(block.status)} {escaped(block.code)}".strip()
    lines = [_wrapped(block.title, "    ", f"{label}  ")]
    if colour:
        lines[0] = lines[0].replace(label, _painted(label, block.status, True), 1)
    wide = min(24, max((len(k) for k, _ in block.evidence), default=0))
    lines += [_wrapped(value, " " * (wide + 8), f"      {escaped(key):<{wide}}  ") for key, value in block.evidence]
    if block.engines:
        lines.append(_wrapped(block.engines, "           ", "    where: "))
    if block.remedy:
        lines.append(_wrapped(block.remedy, "         ", "    fix: "))
    return lines


def _cell(text: str, last: bool, whole: bool) -> list[str]:
    """The lines of one cell: a sentence goes on below, a name that is too long is cut."""
    if last:
        return [escaped(text, 160)]
    if not whole:
        return [escaped(text, _CELL)]
    lines = textwrap.wrap(escaped(text, 6 * _CELL), _CELL, break_long_words=False, break_on_hyphens=False)
    return [escaped(line, _CELL) for line in lines] or [""]


def _table(one: Table, colour: bool, *, whole: bool = True) -> list[str]:
    if not one.rows:
        return []
    shown = [tuple(_cell(c, i == len(one.head) - 1, whole) for i, c in enumerate(row)) for row in [one.head, *one.rows]]
    widths = [max(len(line) for row in shown for line in row[i]) for i in range(len(one.head))]
    lines = [escaped(one.caption, 200)]
    for k, row in enumerate(shown):
        status = one.status[k - 1] if k and k <= len(one.status) else "none"
        for parts in zip_longest(*row, fillvalue=""):
            line = "  " + "  ".join(c.ljust(w) for c, w in zip(parts, widths, strict=True)).rstrip()
            lines.append(_painted(line, status, colour) if status in ("error", "warning") else line)
    if one.more:
        lines.append(f"  … {escaped(one.more, 200)}")
    return lines


def of(view: View, *, colour: bool = False) -> str:
    """One view as lines of text, without a line break at the end."""
    head = _wrapped(view.summary, "  ", f"{escaped(view.title, 200)}: " if view.title else "")
    parts = [[_painted(head, view.status, colour)]]
    parts += [_block(b, colour) for b in view.blocks]
    parts += [lines for t in view.tables if (lines := _table(t, colour))]
    notes = [_wrapped(n, "  ") for n in view.notes]
    if notes:
        parts.append(notes)
    return "\n\n".join("\n".join(p) for p in parts)


def brief(view: View, most: int = 20) -> str:
    """One view in at most ``most`` lines, for a ``repr``: whole where it fits, else the titles of findings and the first rows of tables."""
    small = cut_view(view, rows=most, texts=_TEXT, blocks=most)
    lines = of(small).splitlines()
    if len(lines) <= most:
        return "\n".join(lines)
    head = _wrapped(small.summary, "  ", f"{escaped(small.title, 200)}: " if small.title else "").splitlines()
    lines = [*head[:_HEAD], *(["  …"] if len(head) > _HEAD else [])]
    tables = [t for t in view.tables if t.rows]
    step = [_one_line(f"  {n}") for n in small.notes if n.startswith("Next")][:1]
    left = most - len(lines) - len(step) - 1  # the last line says how to see the rest
    if view.blocks:
        titles = [_one_line(f"{mark(b.status)} {b.code}  {b.title}".strip()) for b in small.blocks]
        room = max(2, left - (_LEAST + 1 if tables else 0))
        shown = titles if len(titles) <= room and len(view.blocks) <= most else titles[: room - 1]
        lines += shown
        if len(shown) < len(view.blocks):
            lines.append(f"… {len(view.blocks) - len(shown):,} more")
        left = most - len(lines) - len(step) - 1
    unseen = []
    for k, one in enumerate(tables):
        after = k + 1 < len(tables)
        share = left - _LEAST if after and left >= 2 * _LEAST + 1 else left
        rows = share - 3 - (len(one.rows) > share - 3 or bool(one.more))  # a blank line, the caption, the head; the count of the rest
        if rows < 1:
            unseen.append(f"{escaped(one.caption)} ({len(one.rows) + sum(n for _, n in one.cut):,} rows)")
            continue
        part = ["", *_table(cut_rows(one, rows), False, whole=False)]
        lines += part
        left -= len(part)
    also = f"also {'; '.join(unseen)}; " if unseen else ""
    return "\n".join([*lines, *step, _one_line(f"… {also}in full: eagle3diag.report.text.render(result)", 2 * WIDTH)])


def _one_line(text: str, limit: int = WIDTH) -> str:
    return escaped(text, limit - 1)


def render(report: Report | Any, *, colour: bool = False) -> str:
    """A report (or any result that has a view) for the terminal."""
    from eagle3diag.report.views import view

    return of(view(report), colour=colour)
