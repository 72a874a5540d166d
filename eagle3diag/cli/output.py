"""Where an answer goes, and in which format: only the form asked for is computed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError, escaped

if TYPE_CHECKING:
    from eagle3diag.report.layout import View

__all__ = ["emit", "outside", "place", "show", "write"]


def write(path: str, text: str) -> None:
    """``text`` into ``path``, whole or not at all."""
    from eagle3diag.report.files import write_text

    write_text(path, text)


def place(a: argparse.Namespace, output: str) -> None:
    """Refuse, before any work is done, a file that has no place, or one inside a checkpoint that was only to be read."""
    from pathlib import Path

    goal = Path(output)
    if goal.is_dir() or not goal.parent.is_dir():
        what = "a folder" if goal.is_dir() else "in a folder that does not exist"
        raise UsageError(f"no place for the output: {escaped(output, 200)} is {what}")
    outside(a, output)


def outside(a: argparse.Namespace, output: str) -> None:
    """Refuse an output, be it a file or a folder that may be there already, inside a checkpoint that was only to be read."""
    from pathlib import Path

    folder = Path(output).parent.resolve()
    for role in ("draft", "target", "other", "dump", "a", "b"):
        given = getattr(a, role, None)
        if given and folder == Path(given).resolve():
            raise UsageError(
                f"{escaped(output, 200)} would lie in the checkpoint folder {escaped(given, 200)}: choose another place with -o"
            )


def emit(a: argparse.Namespace, text: str) -> None:
    """Into the file asked for, or onto stdout."""
    if a.output:
        write(a.output, text + "\n")
    else:
        print(text)


def show(a: argparse.Namespace, data: Callable[[], Any], views: Callable[[], Sequence[View]], title: str = "") -> None:
    """One result in the format asked for; only that form is computed."""
    form = a.format or "text"
    if form == "json":
        from eagle3diag.report.jsonout import dumps

        emit(a, dumps(data()))
    elif form == "html":
        from eagle3diag.report.html import page

        emit(a, page(title, views()))
    elif form == "markdown":
        from eagle3diag.report.markdown import of

        emit(a, "\n".join(of(v) for v in views()))
    else:
        from eagle3diag.report.text import colour_wanted
        from eagle3diag.report.text import of as text_of

        colour = not a.output and colour_wanted(sys.stdout)
        emit(a, "\n\n".join(text_of(v, colour=colour) for v in views()))
