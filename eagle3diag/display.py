"""The one upward edge: results show themselves by asking ``report`` at call time.

Results below ``report`` stay free of HTML, matplotlib and printing. These mixins look the renderer up lazily, so importing a room never
imports ``report``; if rendering fails, a plain one-line form is shown instead of an error in a notebook cell. `Shown` is for what a public
function returns, `Piece` for what such a result is made of: in a list or a tuple a piece takes one line.
`plain` is what both hand out as data, because JSON has no NaN, no enums and no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from importlib import import_module
from typing import Any, ClassVar

__all__ = ["Piece", "Shown", "data", "plain"]

_VIEWS = "eagle3diag.report.views"


class _Rendered:
    """``__repr__`` by the function of ``eagle3diag.report.views`` that ``_as_text`` names, and ``_repr_html_``."""

    __slots__ = ()
    _as_text: ClassVar[str]

    def __repr__(self) -> str:
        try:
            return str(getattr(import_module(_VIEWS), self._as_text)(self))
        except Exception:  # a repr must never raise
            return f"<{type(self).__name__}>"

    def _repr_html_(self) -> str | None:
        try:
            return str(import_module(_VIEWS).html(self))
        except Exception:  # the notebook falls back to the plain repr
            return None


class Shown(_Rendered):
    """Gives a result ``__repr__``, ``_repr_html_``, ``to_frame`` and ``plot`` through ``eagle3diag.report.views``."""

    __slots__ = ()
    _as_text = "plain"

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


class Piece(_Rendered):
    """Gives a part of a result a ``__repr__`` of one line, a small table in a notebook, and ``to_dict``."""

    __slots__ = ()
    _as_text = "line"

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data for JSON."""
        return {f.name: plain(value) for f in fields(self) if f.repr and not callable(value := getattr(self, f.name))}  # type: ignore[arg-type]


def data(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a ``to_dict``, each as `plain` data."""
    return {str(k): plain(v) for k, v in facts.items()}


def plain(value: Any) -> Any:
    """``value`` as JSON-able data: mappings, sequences, enums and odd numbers unfolded, arrays by dtype and shape, all else by its ``str``.

    NaN and infinities become strings, because JSON has no such numbers.
    """
    if value is None or (isinstance(value, (bool, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value + 0.0 if math.isfinite(value) else str(value)  # minus zero is zero
    if isinstance(value, Mapping):
        return data(value)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return [plain(v) for v in sorted(value, key=str)]
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if getattr(value, "shape", None):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if hasattr(value, "item"):  # a NumPy or torch scalar
        return plain(value.item())
    return str(value)
