"""The one upward edge: results show themselves by asking ``report`` at call time.

Results below ``report`` stay free of HTML, matplotlib and printing. This mixin looks the renderer up lazily, so importing a
room never imports ``report``; if rendering fails, a plain one-line form is shown instead of an error in a notebook cell.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Shown"]


class Shown:
    """Gives a result ``__repr__``, ``_repr_html_``, ``to_frame`` and ``plot`` through ``eagle3diag.report.views``."""

    __slots__ = ()

    def __repr__(self) -> str:
        try:
            return str(import_module("eagle3diag.report.views").plain(self))
        except Exception:  # a repr must never raise
            return f"<{type(self).__name__}>"

    def _repr_html_(self) -> str | None:
        try:
            return str(import_module("eagle3diag.report.views").html(self))
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
        return import_module("eagle3diag.report.views").frame(self)
