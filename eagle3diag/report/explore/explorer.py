"""What can be explored, before it is decided with which widgets: controls, and a function from their setting to what is shown.

An ``Explorer`` is plain data and one pure function, so every panel can be computed and tested without a browser; ``widgets`` alone knows
ipywidgets. The modules ``explore_*`` make explorers of results, ``explore`` is the door.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eagle3diag.report.layout import View

__all__ = ["Control", "Explorer", "Panel", "Setting"]

Setting = Mapping[str, Any]  #: value by the key of its control
Kind = Literal["toggle", "choice", "several", "slider", "stops", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One thing to set.

    Attributes:
        key: of its value in the setting.
        label: beside it.
        kind: ``toggle`` (bool), ``choice`` (one option), ``several`` (a tuple of options), ``slider`` (an int from 0 to ``high``),
            ``stops`` (one option, by a slider), ``text``.
        value: at first.
        options: (words, value) pairs of the choices.
        high: last value of a slider.
        live: follow a slider while it is dragged; for panels that cost nothing.
    """

    key: str
    label: str
    kind: Kind
    value: Any
    options: tuple[tuple[str, Any], ...] = ()
    high: int = 0
    live: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What is shown for one setting: a view, and a PNG with its words where there is a picture."""

    view: View
    png: bytes = b""
    alt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explorer:
    """A result that can be explored.

    Attributes:
        static: results or views that stand without a kernel, shown first; each with its picture where it is among ``pictures``.
        how: what the controls do, in one sentence without its full stop.
        controls: in the order they stand.
        shown: the panel of a setting; raises one of the library's errors where there is none.
        highs: new ends of sliders for a setting, where one control bounds another.
    """

    static: tuple[object, ...]
    pictures: tuple[object, ...] = ()
    how: str
    controls: tuple[Control, ...]
    shown: Callable[[Setting], Panel]
    highs: Callable[[Setting], Mapping[str, int]] | None = None

    @property
    def start(self) -> dict[str, Any]:
        """The setting at first."""
        return {c.key: c.value for c in self.controls}

    def panel(self, **changed: Any) -> Panel:
        """The panel of the first setting with some controls changed."""
        return self.shown({**self.start, **changed})
