"""The one upward edge: results show themselves by asking ``report`` at call time.

Results below ``report`` stay free of HTML, matplotlib and printing. These mixins look the renderer up lazily, so importing a room never
imports ``report``; if rendering fails, a plain one-line form is shown instead of an error in a notebook cell. `Shown` is for what a public
function returns, `Piece` for what such a result is made of: in a list or a tuple a piece takes one line.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Piece", "Shown"]

_VIEWS = "eagle3diag.report.views"


class Shown:
    """Gives a result ``__repr__``, ``_repr_html_``, ``to_frame`` and ``plot`` through ``eagle3diag.report.views``."""

    __slots__ = ()

    def __repr__(self) -> str:
        try:
            return str(import_module(_VIEWS).plain(self))
        except Exception:  # a repr must never raise
            return f"<{type(self).__name__}>"

    def _repr_html_(self) -> str | None:
        try:
            return str(import_module(_VIEWS).html(self))
        except Exception:  # the notebook falls back to the plain repr
            return None

    def plot(self) -> Any:
        """The picture of this result, a ``matplotlib.figure.Figure``.

        Raises:
            UsageError: this result has no picture.
        """
        return import_module("eagle3diag.report.figures").plot(self)

    def to_frame(self) -> Any:
        """The result's table as a ``pandas.DataFrame``.

        Raises:
            UsageError: pandas is not installed, or this result has no table.
        """
        return import_module(_VIEWS).frame(self)


class Piece:
    """Gives a part of a result a ``__repr__`` of one line, a small table in a notebook, and ``to_dict``."""

    __slots__ = ()

    def __repr__(self) -> str:
        try:
            return str(import_module(_VIEWS).line(self))
        except Exception:  # a repr must never raise
            return f"<{type(self).__name__}>"

    def _repr_html_(self) -> str | None:
        try:
            return str(import_module(_VIEWS).html(self))
        except Exception:  # the notebook falls back to the plain repr
            return None

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data for JSON."""
        done: dict[str, Any] = import_module("eagle3diag.report.jsonout").fields_of(self)
        return done
