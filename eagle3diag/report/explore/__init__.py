"""``explore(result)``: the static view of a result, and under it controls to look around in it.

The static view stands without a kernel. Controls are added only where somebody can move them: a run without a hand (papermill, nbconvert)
gets one sentence in their place, because saved widgets make a page load scripts from the network and show nothing where it cannot.
Whether somebody is there is told by the front end itself: a client that runs notebooks unattended asks for no keyboard input.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, cast

from eagle3diag.errors import UsageError
from eagle3diag.report.explore.explorer import Explorer
from eagle3diag.report.layout import View

__all__ = ["KINDS", "explore", "explorer", "live"]

#: class name -> module and function: an ``Explorer`` of the result
KINDS = {
    "WeightDiff": ("weights", "diff_explorer"),
    "HiddenDump": ("hidden", "dump_explorer"),
    "TokenNorms": ("hidden", "tokens_explorer"),
    "Opened": ("draft", "opened_explorer"),
    "Bench": ("draft", "bench_explorer"),
    "Report": ("report", "report_explorer"),
    "Study": ("report", "study_explorer"),
}
_OPEN = "it keeps numbers and no rows to run again: explore what eagle3diag.report.opened.opened(draft, dump, target) opens"
#: results that do not keep what they were made of -> what to explore in their place
INSTEAD = {
    "Agreement": _OPEN,
    "ServedAcceptance": _OPEN,
    "EngineAcceptance": _OPEN,
    "WiringRanking": _OPEN,
    "NormProfile": "it keeps no tokens: explore the dump itself",
}


def explorer(result: object) -> Explorer:
    """What can be explored in a result, as data.

    Raises:
        UsageError: this kind of result has no explorer, or this one nothing to explore.
    """
    name = type(result).__name__
    a = "an" if name[0].upper() in "AEIOU" else "a"
    if name in INSTEAD:
        raise UsageError(f"{a} {name} cannot be explored, {INSTEAD[name]}")
    if name not in KINDS:
        raise UsageError(f"{a} {name} cannot be explored; there are explorers of {', '.join(KINDS)}")
    module, function = KINDS[name]
    return cast(Explorer, getattr(import_module(f"eagle3diag.report.explore.{module}"), function)(result))


def explore(result: object, *, static: bool = True) -> None:
    """Show a result in a notebook, with controls to look around in it; elsewhere its static view is printed.

    Args:
        result: a ``WeightDiff`` (pick tensors), a ``HiddenDump`` or ``TokenNorms`` (scrub token and layer), an ``Opened`` draft with its
            dump or a ``Bench`` (toggle the switches of its wiring), a ``Report`` or ``Study`` (filter findings).
        static: show the static view first; False where it stands above already.

    Raises:
        UsageError: this kind of result has no explorer, or a live notebook lacks ipywidgets.

    Example:
        >>> from eagle3diag import check
        >>> report = check("data_samples/smollm2-eagle3/draft", engine="sglang==0.5.9", headers_only=True)
        >>> explore(report, static=False)  # outside a live notebook: a line that says what stands there
        In a live notebook controls stand here: filter the findings by severity, code, engine or any words
          in them.
    """
    from eagle3diag.report.cells import picture, show

    made = explorer(result)
    if static:
        picture(*made.pictures)
        show(*made.static)
    if not live():
        show(otherwise=f"In a live notebook controls stand here: {made.how}.")
        return
    from eagle3diag.report.explore.widgets import display_board

    show(View(title="", summary=f"{made.how[0].upper()}{made.how[1:]}."))
    display_board(made)


def live() -> bool:
    """Whether somebody sits at this notebook. ``EAGLE3DIAG_WIDGETS`` set to 0 or 1 decides."""
    told = os.environ.get("EAGLE3DIAG_WIDGETS", "")
    if told in ("0", "1"):
        return told == "1"
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    kernel: Any = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return False
    try:
        return bool(kernel.get_parent("shell")["content"]["allow_stdin"])
    except (AttributeError, KeyError, TypeError):
        return bool(getattr(kernel, "_allow_stdin", False))
