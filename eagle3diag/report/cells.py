"""What notebook cells call to display: results as HTML and pictures with their words. The only module here that asks for IPython.

Where no kernel runs, in a plain Python session or a terminal, the same is printed as text, and a picture as its caption.
"""

from __future__ import annotations

import sys
from base64 import b64encode

from eagle3diag.errors import Eagle3DiagError, escaped

__all__ = ["picture", "show"]


def _kernel() -> bool:
    """Whether a kernel takes what is displayed; one runs only where IPython is loaded."""
    loaded = sys.modules.get("IPython")
    return loaded is not None and getattr(loaded.get_ipython(), "kernel", None) is not None


def show(*results: object, otherwise: str = "") -> None:
    """Display results one under the other.

    Args:
        otherwise: the sentence shown where there are none.
    """
    from eagle3diag.report.layout import View
    from eagle3diag.report.views import view

    views = [view(r) for r in results] or ([View(title="", summary=otherwise)] if otherwise else [])
    if not _kernel():
        from eagle3diag.report.text import of

        print("\n\n".join(of(v) for v in views))
        return
    from IPython.display import HTML, display

    from eagle3diag.report.html import cell

    for one in views:
        display(HTML(cell(one)))


def picture(*results: object) -> None:
    """Display the picture of each result as a PNG with alternative text, and under it the caption that states the finding.

    Notebook viewers show no caption of a picture, so it stands as an output of its own; a rendered page has it in the ``figure`` and leaves
    that output out.
    """
    from eagle3diag.report import figures

    if not _kernel():
        for result in results:
            print(figures.caption(result))
        return
    from html import escape

    from IPython.display import display

    for result in results:
        try:
            words = {"alt": figures.alt(result), "caption": figures.caption(result)}
            image = b64encode(figures.png(figures.plot(result))).decode("ascii")
        except Eagle3DiagError as why:  # nothing there to draw: a finding, which the words beside tell
            show(otherwise=f"No picture: {why}.")
            continue
        display({"image/png": image, "text/plain": words["caption"]}, raw=True, metadata={"image/png": words})
        said = {"text/html": f"<p><em>{escape(escaped(words['caption'], 4000))}</em></p>", "text/plain": words["caption"]}
        display(said, raw=True, metadata={"text/html": {"caption": True}})
