"""What notebook cells call to display: results as HTML and pictures with their words. The only module here that asks for IPython."""

from __future__ import annotations

from base64 import b64encode

from eagle3diag.errors import escaped

__all__ = ["picture", "show"]


def show(*results: object, otherwise: str = "") -> None:
    """Display results one under the other.

    Args:
        otherwise: the sentence shown where there are none.
    """
    from IPython.display import HTML, display

    from eagle3diag.report.html import cell
    from eagle3diag.report.layout import View
    from eagle3diag.report.views import view

    if not results and otherwise:
        display(HTML(cell(View(title="", summary=otherwise))))
    for result in results:
        display(HTML(cell(view(result))))


def picture(*results: object) -> None:
    """Display the picture of each result as a PNG with alternative text, and under it the caption that states the finding.

    Notebook viewers show no caption of a picture, so it stands as an output of its own; a rendered page has it in the ``figure`` and leaves
    that output out.
    """
    from html import escape

    from IPython.display import display

    from eagle3diag.report import figures

    for result in results:
        words = {"alt": figures.alt(result), "caption": figures.caption(result)}
        image = b64encode(figures.png(figures.plot(result))).decode("ascii")
        display({"image/png": image, "text/plain": words["caption"]}, raw=True, metadata={"image/png": words})
        said = {"text/html": f"<p><em>{escape(escaped(words['caption'], 4000))}</em></p>", "text/plain": words["caption"]}
        display(said, raw=True, metadata={"text/html": {"caption": True}})
