"""Run a notebook without a hand on it, and render it to one HTML file that opens anywhere.

papermill runs it, nbconvert renders it, and this module is strict where they are loose: unknown or ill-typed parameters are refused by
name before a kernel starts, braces in paths stay what they are, the kernel is this very interpreter whether or not a kernelspec is
installed, code is really absent from the HTML, nothing is loaded from a network, and two runs on the same input give the same bytes. A
finding never fails a run. An unusable input does, and then the partial report is kept and says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3diag.display import Piece
from eagle3diag.errors import UsageError, escaped
from eagle3diag.report.layout import View, table
from eagle3diag.report.parameters import Parameter, declared, fitted

__all__ = ["Parameter", "Rendered", "available", "folder", "listing", "listing_view", "parameters", "run", "stem"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rendered(Piece):
    """What a run left: the page, and the executed notebook beside it."""

    name: str
    html: str
    notebook: str
    bytes: int
    parameters: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``notebook`` and ``report``."""
        return {
            "schema": 1,
            "name": self.name,
            "html": self.html,
            "notebook": self.notebook,
            "bytes": self.bytes,
            "parameters": dict(self.parameters),
        }


def folder() -> Path:
    """Where the notebooks lie: the checkout's, else those installed with the package.

    Raises:
        UsageError: neither is there (a broken installation).
    """
    from eagle3diag.report.sample import checkout

    top = checkout()
    found = top / "notebooks" if top else Path(__file__).resolve().parents[1] / "_notebooks"
    if not found.is_dir():
        raise UsageError("the notebooks are missing from this installation: install eagle3diag again")
    return found


def available() -> tuple[str, ...]:
    """Names of the packaged notebooks, without suffix."""
    return tuple(sorted(p.stem for p in folder().glob("*.ipynb") if not p.name.startswith(".")))


def stem(name: str) -> str:
    """The bare name of a notebook."""
    return name.removesuffix(".ipynb")


def _cell(name: str) -> str:
    """The code of the parameters cell, read without the Jupyter packages: what there is can be listed before they are installed."""
    if stem(name) not in available():
        raise UsageError(f"no notebook {escaped(name)}: there are {', '.join(available())}")
    for cell in json.loads((folder() / f"{stem(name)}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            return "".join(cell["source"])
    return ""


def parameters(name: str) -> tuple[Parameter, ...]:
    """The parameters of a notebook, in the order of its cell.

    Raises:
        UsageError: no such notebook.
    """
    return declared(_cell(name))


def listing(names: tuple[str, ...]) -> dict[str, Any]:
    """The notebooks with their parameters, for JSON."""
    return {"schema": 1, "notebooks": [{"name": n, "parameters": [asdict(p) for p in parameters(n)]} for n in names]}


def listing_view(names: tuple[str, ...]) -> View:
    """The notebooks with their parameters, as tables."""
    head = ("parameter", "type", "default", "what it is")
    tables = tuple(table(n, head, ((p.name, p.type, p.default, p.help) for p in parameters(n))) for n in names)
    return View(title="Notebooks", summary="eagle3diag notebook NAME -p KEY VALUE … -o FILE.html", tables=tables)


def checked(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with every value in the type its parameter has.

    Raises:
        UsageError: an unknown name, or a value that does not fit, by name.
    """
    return fitted(parameters(name), given, stem(name))


def run(name: str, params: Mapping[str, Any], out: str | Path) -> Rendered:
    """Execute a packaged notebook and render it.

    Args:
        name: one of ``available()``.
        params: values by parameter name; strings are read as the parameter's type. Paths are relative to the working directory.
        out: the HTML file to write; the executed notebook appears beside it as ``<stem>.executed.ipynb``.

    Raises:
        UsageError: unknown notebook or parameter, a missing dependency, no place for the output; or the notebook stopped at an
            unusable input, and then both files hold what came before it.
    """
    try:
        import nbconvert  # noqa: F401
        import papermill  # noqa: F401
    except ImportError as error:
        raise UsageError(f"running notebooks needs {error.name}: python -m pip install 'eagle3diag[notebook]'") from None
    from eagle3diag.report.execution import execute
    from eagle3diag.report.files import place, write_text
    from eagle3diag.report.render import rendered

    values = checked(name, params)
    goal = Path(out)
    beside = goal.with_name(f"{goal.name.removesuffix('.html')}.executed.ipynb")
    place(goal, "report")
    place(beside, "executed notebook")
    notebook, failure = execute(folder() / f"{stem(name)}.ipynb", values)
    import nbformat

    write_text(beside, nbformat.writes(notebook) + "\n")
    text = rendered(notebook, stem(name))
    write_text(goal, text)
    if failure:
        raise UsageError(f"{failure}; the partial report is kept in {escaped(goal, 200)}")
    return Rendered(name=stem(name), html=str(goal), notebook=str(beside), bytes=goal.stat().st_size, parameters=values)
