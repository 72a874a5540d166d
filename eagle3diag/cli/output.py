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
    from eagle3diag.report import files

    files.place(output)
    outside(a, output)


#: arguments and parameters that name what is only read
READ = ("draft", "target", "other", "dump", "a", "b", "log", "control", "metrics", "launch_file")


def outside(a: argparse.Namespace, output: str) -> None:
    """Refuse an output, be it a file or a folder that may be there already, on an input or inside a checkpoint: both are only read."""
    import os
    from pathlib import Path

    goal = Path(os.path.realpath(output))
    for role in READ:
        given = getattr(a, role, None) or ()
        for one in [given] if isinstance(given, str) else given:
            place = Path(os.path.realpath(one))
            if goal == place and not place.is_dir():
                raise UsageError(f"{escaped(output, 200)} is an input, which is only read: choose another place with -o")
            if not place.is_dir() and (place.parent / "config.json").is_file():  # a file of a checkpoint stands for its folder
                one, place = str(Path(one).parent), place.parent
            if place in (goal.parent, goal):
                raise UsageError(
                    f"{escaped(output, 200)} would lie in the checkpoint folder {escaped(one, 200)}: choose another place with -o"
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
