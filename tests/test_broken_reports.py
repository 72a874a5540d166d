"""Six broken variants of the sample, rendered: each says so in its first screen, reads without style, and is one accessible file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.report import notebooks
from tests.broken_reports import VARIANTS
from tests.chromium import CHROMIUM, running

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore::UserWarning:papermill")]
browsing = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
_PAGES: dict[str, Path] = {}


@pytest.fixture
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rendered report of a variant, made once a process."""
    name = request.param
    if name not in _PAGES:
        folder = tmp_path_factory.mktemp("variant")
        _PAGES[name] = Path(notebooks.run("report", VARIANTS[name][1](folder), folder / "report.html").html)
    return _PAGES[name]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running() as one:
        yield one


every = pytest.mark.parametrize("page", list(VARIANTS), indirect=True, ids=[n.replace(" ", "-") for n in VARIANTS])


class Stripped(HTMLParser):
    """What is left of a page where scripts, styles, attributes and all tags are taken away, a line a block."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self.silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.silent += tag in ("style", "script", "head")
        if tag not in ("code", "strong", "em", "a", "span"):
            self.lines.append("")

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in ("style", "script", "head")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.lines[-1] += data


def code_of(page: Path) -> str:
    """The code that names what is wrong with the variant on this page."""
    return next(VARIANTS[name][0] for name, made in _PAGES.items() if made == page)


def stripped(page: Path) -> list[str]:
    seen = Stripped()
    seen.feed(page.read_text(encoding="utf-8"))
    return [line for raw in seen.lines if (line := " ".join(raw.split()))]


@every
def test_a_stripped_report_states_verdict_codes_evidence_and_remedies_in_order(page: Path) -> None:
    code = code_of(page)
    lines = stripped(page)

    def first(what: str, after: int = -1) -> int:
        return next(k for k, line in enumerate(lines) if k > after and re.search(what, line))

    verdict = first(r"^(✖ ERROR broken|▲ WARNING suspect) with .*" + code)
    listed = first(rf"^(✖ ERROR|▲ WARNING) {code}$", verdict)
    told = first(rf"^(✖ ERROR|▲ WARNING) {code} \S", listed)
    remedy = first(r"^Fix: \S", told)
    assert verdict < 8
    assert verdict < listed < told < remedy
    heads = [k for k, line in enumerate(lines) if k >= told and re.match(r"(✖ ERROR|▲ WARNING|ℹ INFO) [A-Z]{3}\d{3} ", line)]
    end = lines.index("Skipped: these rules judged nothing")
    for start, until in zip(heads, [*heads[1:], end], strict=True):
        section = lines[start + 1 : until]
        assert section[-1].startswith("Fix: "), lines[start]
        assert len(section) >= 3, lines[start]  # a name and a value of evidence, and the remedy
    signs = ["✖▲ℹ".index(lines[k][0]) for k in heads]
    assert signs == sorted(signs)


@every
def test_a_report_is_one_small_file_that_asks_for_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 3_000_000
    assert "<script" not in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)
    assert "url(" not in text
    assert text.count('<nav class="contents"') == 1
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    targets = re.findall(r'href="#([^"]+)"', text)
    assert len(targets) >= 7
    assert set(targets) <= set(ids)


@every
def test_no_share_is_above_all(page: Path) -> None:
    shares = [float(n.replace(",", "")) for line in stripped(page) for n in re.findall(r"([\d,]+\.\d) %", line)]
    assert all(0 <= share <= 100 for share in shares), max(shares)


# ------------------------------------------------------------------ in a browser

IN_SIGHT = """code => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const at = node.data.indexOf(code);
    if (at < 0) continue;
    const range = document.createRange();
    range.setStart(node, at); range.setEnd(node, at + code.length);
    const box = range.getBoundingClientRect();
    if (box.width > 0 && box.top >= 0 && box.bottom <= innerHeight && box.left >= 0 && box.right <= innerWidth) return true;
  }
  return false;
}"""
SERIOUS = ("serious", "critical")


@browsing
@every
def test_a_browser_shows_the_code_in_the_first_screen(page: Path, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True)
    tab = context.new_page()
    asked: list[str] = []
    tab.on("request", lambda r: asked.append(r.url))
    tab.goto(page.as_uri(), wait_until="networkidle")
    assert tab.evaluate(IN_SIGHT, code_of(page))
    assert not tab.evaluate(IN_SIGHT, "XYZ999")
    assert [u for u in asked if not u.startswith("data:")] == [page.as_uri()]
    context.close()


@browsing
@pytest.mark.parametrize(
    ("page", "scheme", "size"),
    [
        *((name, "light", (1280, 800)) for name in VARIANTS),
        *((name, "dark", (1280, 800)) for name in VARIANTS),
        ("ids one late", "light", (390, 844)),
        ("layer dropped", "dark", (390, 844)),
    ],
    indirect=["page"],
)
def test_a_browser_finds_no_serious_barrier(page: Path, browser: Any, scheme: str, size: tuple[int, int]) -> None:
    pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    context = browser.new_context(color_scheme=scheme, viewport={"width": size[0], "height": size[1]}, offline=True)
    tab = context.new_page()
    tab.goto(page.as_uri())
    tab.evaluate(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = tab.evaluate("axe.run(document)")
    assert len(found["passes"]) > 15
    barriers = {v["id"]: [n["html"][:120] for n in v["nodes"][:3]] for v in found["violations"] if v["impact"] in SERIOUS}
    assert barriers == {}
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()


@browsing
def test_a_browser_without_words_for_a_picture_is_a_barrier(browser: Any) -> None:
    """The instrument works: axe speaks where there is something to say."""
    pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    tab = browser.new_page()
    tab.set_content('<html lang="en"><title>t</title><main><h1>t</h1><img src="data:,"></main></html>')
    tab.evaluate(files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    assert "image-alt" in [v["id"] for v in tab.evaluate("axe.run(document)")["violations"] if v["impact"] in SERIOUS]
    tab.close()
