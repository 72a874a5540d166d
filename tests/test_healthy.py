"""Silence is the right answer: a healthy draft in each dialect, served by an engine that suits it, has no error and no warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3diag.rules.case import check
from tests.dialects import HEALTHY
from tests.factory import dialect_draft, tiny_target

SAMPLE = Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3"


def loud(draft: Path, target: Path, engine: str | None) -> list[str]:
    """Errors and warnings, by code; the verdict if it is not healthy without any."""
    report = check(draft, target=target, engine=engine)
    found = [f"{f.code}: {f.title}" for f in report.findings if f.severity != "info"]
    return found or ([] if report.verdict == "healthy" else [report.verdict])


@pytest.mark.parametrize(("name", "engine"), [(n, e) for n, engines in HEALTHY.items() for e in engines])
def test_a_healthy_draft_is_healthy(tmp_path: Path, name: str, engine: str) -> None:
    target = tiny_target(tmp_path / "target", weights=True)
    assert loud(dialect_draft(tmp_path / "draft", name), target, engine) == []


@pytest.mark.parametrize("name", HEALTHY)
def test_so_it_is_with_nothing_else_given(tmp_path: Path, name: str) -> None:
    report = check(dialect_draft(tmp_path / "draft", name))
    assert report.verdict == "healthy"


@pytest.mark.parametrize("engine", ["vllm==0.16.0", "vllm==0.33.0", "sglang==0.5.23"])
def test_the_sample_is_healthy_in_both_engines(engine: str) -> None:
    assert loud(SAMPLE / "draft", SAMPLE / "target", engine) == []
