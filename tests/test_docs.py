"""The documentation builds without a warning, every link inside it leads somewhere, and nothing the library has is left out of it."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag

import pytest

import eagle3diag
from eagle3diag.cli.parser import NAMES, build_parser
from eagle3diag.report import notebooks
from eagle3diag.rules.registry import load_all

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GENERATED = ("api", "commands", "notebooks")


class Page(HTMLParser):
    """Ids, links, and what a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.pictures: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {v for k in ("id", "name") if (v := found.get(k))}
        if tag == "a" and (link := found.get("href")):
            self.links.append(link)
        if tag in ("script", "img", "iframe") and (link := found.get("src")):
            self.loads.append(link)
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload") and (link := found.get("href")):
            self.loads.append(link)
        if tag == "img":
            self.pictures.append(found.get("alt"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of a copy of the sources, warnings as errors; notebooks are not executed."""
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason="the documentation needs eagle3diag[docs]")
    top = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS, top / "docs", ignore=shutil.ignore_patterns(*GENERATED, "__pycache__", "eagle3diag.css"))
    shutil.copy(ROOT / "README.md", top)
    out = top / "out"
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-D", "eagle3diag_run=0", str(top / "docs"), str(out)]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return out


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[Path, Page]:
    """Every page by its path."""
    return {p: Page(p.read_text(encoding="utf-8")) for p in built.rglob("*.html")}


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            address, fragment = urldefrag(link)
            if re.match(r"[a-z]+:", address):
                continue
            goal = (path.parent / unquote(address.partition("?")[0])).resolve() if address else path
            known = pages[goal].ids if goal in pages else set()
            if not goal.is_file() or (fragment and goal in pages and unquote(fragment) not in known):
                broken.append(f"{path.name}: {link}")
    assert not broken


def test_pages_load_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    assert not [(p.name, link) for p, page in pages.items() for link in page.loads if re.match(r"(https?:)?//", link)]


def test_every_picture_has_words(pages: dict[Path, Page]) -> None:
    assert all(alt for page in pages.values() for alt in page.pictures)


def test_every_rule_and_notebook_has_its_page(built: Path) -> None:
    for code in load_all():
        assert f"{code}:" in (built / "rules" / f"{code}.html").read_text(encoding="utf-8")
    index = (built / "notebooks" / "index.html").read_text(encoding="utf-8")
    for name in notebooks.available():
        text = (built / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
        assert all(f">{p.name}<" in text for p in notebooks.parameters(name))
        assert f'href="{name}.html"' in index


def test_every_command_and_option_is_there(built: Path) -> None:
    text = (built / "commands" / "index.html").read_text(encoding="utf-8")
    for name in NAMES:
        assert f'id="{name}"' in text
    options = {word for a in _actions() for word in a}
    assert len(options) > 30
    assert not [word for word in options if word not in text]


def _actions() -> Iterator[list[str]]:
    import argparse

    (sub,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    for parser in sub.choices.values():
        yield from (list(a.option_strings) for a in parser._actions if a.dest != "help")


def test_every_public_name_is_there(pages: dict[Path, Page], built: Path) -> None:
    ids = pages[built / "api" / "index.html"].ids
    assert {f"eagle3diag.{name}" for name in eagle3diag.__all__} <= ids
    assert {"eagle3diag.rules.model.Report", "eagle3diag.engines.model.ServedDraft", "eagle3diag.errors.UsageError"} <= ids


def test_every_page_is_in_the_tree(pages: dict[Path, Page], built: Path) -> None:
    """Each source has a page, and the sidebar of the landing page reaches it or its parent."""
    known = {p.relative_to(built) for p in pages}
    for source in DOCS.rglob("*.md"):
        if source.relative_to(DOCS).parts[0] not in GENERATED:
            assert source.relative_to(DOCS).with_suffix(".html") in known


def test_an_executed_notebook_becomes_a_page(tmp_path: Path, generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("papermill", reason="running notebooks needs eagle3diag[notebook]")
    import nbformat

    monkeypatch.chdir(ROOT)
    done = notebooks.run("02_weight_diff", {}, tmp_path / "page.html")
    text = generate.notebook("02_weight_diff", tmp_path, nbformat.read(done.notebook, as_version=4))
    (picture,) = re.findall(r":::\{figure\} (\S+)\n:alt: \S.+\n\n\S", text)
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "mlp.up_proj.weight" in text
    assert text.count("<details") == text.count("</details>") == text.count("```python") > 1
    assert "a: Optional" not in text


def test_a_failed_notebook_fails_the_build(tmp_path: Path, generate: ModuleType) -> None:
    import nbformat.v4 as v4

    output = v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
    with pytest.raises(RuntimeError, match="ValueError: no"):
        generate.notebook("01_checkpoint", tmp_path, v4.new_notebook(cells=[v4.new_code_cell("x", outputs=[output])]))


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``docs/generate.py`` as a module."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("generate")


def test_git_ignores_what_is_generated() -> None:
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {f"/docs/{name}/" for name in GENERATED} | {"build/", "/docs/_static/eagle3diag.css"} <= set(ignored)
