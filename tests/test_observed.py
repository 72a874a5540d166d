"""A length seen in service is explained by the wirings that would give it, the wiring at hand first."""

from __future__ import annotations

import pytest

from eagle3diag.draft import observed
from eagle3diag.draft.agreement import agree_bench
from eagle3diag.draft.measure import Bench
from eagle3diag.draft.observed import explain
from eagle3diag.errors import UsageError
from eagle3diag.report.opened import Opened, opened
from eagle3diag.report.sample import sample


@pytest.fixture(scope="module")
def one() -> Opened:
    paths = sample()
    return opened(paths.draft, f"{paths.dumps}/sample_0.safetensors", paths.target)


@pytest.fixture(scope="module")
def bench(one: Opened) -> Bench:
    return Bench.prepare(one.checkpoint, one.spec, one.dump, one.target, steps=2)


def test_its_own_length_needs_no_fault(one: Opened, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    every = observed.alternatives
    monkeypatch.setattr(observed, "alternatives", lambda *given, **more: every(*given, **more)[::8])  # a few will do
    own = agree_bench(bench, on_policy=False)
    told: list[str] = []
    found = explain(bench, own.expected_length[2], one.target, pairs=False, progress=told.append)
    assert found.here.length == pytest.approx(own.expected_length[2])
    assert found.here.explains
    assert found.here.off == pytest.approx(0.0, abs=1e-9)
    assert found.rows == own.rows
    assert len(told) >= len(found.others) > 4
    order = [(not e.explains, e.faults if e.explains else 0, abs(e.off)) for e in found.others]
    assert order == sorted(order)


def test_a_collapse_is_explained_by_what_collapses(one: Opened, bench: Bench) -> None:
    found = explain(bench, 1.0, one.target, pairs=False)
    assert not found.here.explains
    assert found.here.off > 2
    kinds = {e.kind for e in found.explaining}
    assert {"mapping", "never loaded"} <= kinds
    assert not kinds & {"theta", "one layer"}  # these cost far less
    assert all(e.length < 1.1 for e in found.explaining)


@pytest.mark.parametrize("length", [0.5, 3.5])
def test_a_length_no_chain_can_give_is_refused(bench: Bench, length: float) -> None:
    with pytest.raises(UsageError, match="chains of 2 give 1 to 3"):
        explain(bench, length)
