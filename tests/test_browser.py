"""A rendered page opens in a real browser, alone: no request, no console message, words for every picture, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.report import notebooks
from tests.chromium import CHROMIUM, running

SAMPLE = Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    given = {
        "draft": str(SAMPLE / "draft"),
        "target": str(SAMPLE / "target"),
        "engines": "sglang==0.5.9, vllm==0.33.0",
        "other": str(SAMPLE / "draft"),
        "dump": str(SAMPLE / "dumps"),
    }
    notebooks.run("report", given, out)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running() as one:
        yield one


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_opens_alone(page: Path, browser: Any, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, offline=True)
    tab = context.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    tab.on("request", lambda r: requests.append(r.url))
    tab.on("console", lambda m: complaints.append(m.text))
    tab.on("pageerror", lambda e: complaints.append(str(e)))
    tab.goto(page.as_uri(), wait_until="networkidle")
    outside = [u for u in requests if not u.startswith(("file:", "data:"))]
    assert outside == []
    assert [u for u in requests if u.startswith("file:")] == [page.as_uri()]
    assert complaints == []
    assert tab.locator("h1").count() == 1
    assert "layers.0" in tab.inner_text("body")
    assert tab.evaluate("document.scripts.length") == 0
    pictures = tab.evaluate("[...document.images].map(i => [i.complete && i.naturalWidth > 0, i.alt.length])")
    assert len(pictures) == 5
    assert all(shown and words > 40 for shown, words in pictures)
    ground, ink = tab.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert contrast(ground, ink) > 7
    for sign in ("s-error", "s-ok"):
        colour = tab.evaluate(f"getComputedStyle(document.querySelector('.{sign}')).color")
        assert contrast(ground, colour) > 4.5, sign
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    context.close()


def contrast(one: str, other: str) -> float:
    """The WCAG contrast ratio of two ``rgb(r, g, b)`` colours."""

    def light(colour: str) -> float:
        parts = [int(c) / 255 for c in colour.removeprefix("rgb(").rstrip(")").split(",")]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
