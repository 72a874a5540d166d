"""Sphinx's settings. ``python -m sphinx -W docs build/docs`` builds the pages; ``-D eagle3diag_run=0`` leaves the notebooks unexecuted.

What the library can say of itself is never written by hand: ``docs/generate.py`` writes the command line, the public names and the
notebooks from the library before Sphinx looks for pages, into folders that git ignores. The rule pages are generated too, but lie in git,
so that they can be read there.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

(HERE / "_static").mkdir(exist_ok=True)  # holds generated files alone, so git does not carry it

import generate  # noqa: E402

from eagle3diag import __version__  # noqa: E402

project = "eagle3diag"
copyright = "the eagle3diag authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_static", "images"]
language = "en_GB"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"eagle3diag {release}"
html_static_path = ["_static"]
html_css_files = ["eagle3diag.css"]
html_copy_source = False
html_show_sphinx = False

#: pages of which each has subpages in its folder; the files themselves stay readable where toctrees mean nothing
PARENTS = ("rules/index", "facts/README", "notebooks/index")


def _trees(app: Sphinx, name: str, source: list[str]) -> None:
    """Gives such a page its tree: rules in the order of their index, by code alone."""
    if name not in PARENTS:
        return
    folder = (Path(app.srcdir) / name).parent
    pages = sorted(p.stem for p in folder.glob("*.md") if p.stem != Path(name).name)
    if folder.name == "rules":
        pages = re.findall(r"\[(\w+)\]\(\1\.md\)", source[0])
    entries = pages if folder.name == "facts" else [f"{page} <{page}>" for page in pages]
    source[0] += "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(entries) + "\n```\n"


def _pages(app: Sphinx) -> None:
    generate.write(Path(app.srcdir), run=bool(int(app.config.eagle3diag_run)))


def setup(app: Sphinx) -> None:
    """Has the generated pages written before pages are looked for."""
    app.add_config_value("eagle3diag_run", 1, "env")
    app.connect("builder-inited", _pages)
    app.connect("source-read", _trees)
