"""Two dumps side by side: the layer late, the token late, the slots that changed places, read off the comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3diag.errors import CheckpointError
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.hidden.identity import DumpComparison, compare
from tests import fixtures_dmp as f

EVERY = (0, 1, 2, 3, 14, 15, 16, 26, 27, 28)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server gives: all recorded layers, with their indices."""
    return f.write(tmp_path_factory.mktemp("served"), "portable", layers=EVERY)


def against(served: Path, folder: Path, form: str = "speculators", change: f.Change | None = None, **kw: object) -> DumpComparison:
    return compare(open_dump(f.write(folder, form, change, **kw)), open_dump(served))  # type: ignore[arg-type]


def test_the_same_states(served: Path, tmp_path: Path) -> None:
    c = against(served, tmp_path, "portable")
    assert c.verdict == "the same states"
    assert (c.samples, c.rows, c.token_shift, c.layer_shift) == (3, 576, 0, 0)
    for m in c.layers:
        assert m.best == m.expected
        assert m.same
        assert m.error == 0
        assert m.cosine == pytest.approx(1, abs=1e-5)
        assert m.by_shift[4] == 0


@pytest.mark.parametrize(("d", "word"), [(1, "late"), (-1, "early")])
def test_one_layer_off(served: Path, tmp_path: Path, d: int, word: str) -> None:
    moved = tuple(k + d for k in f.LAYERS)
    c = against(served, tmp_path, "portable", lambda s, i: replace(s, hf=f.LAYERS), layers=moved)
    assert c.layer_shift == d
    assert c.verdict == f"the first holds layers 1 {word} by the second's count"
    aux = [m for m in c.layers if m.hf is not None]
    assert [m.best_hf for m in aux] == list(moved)
    assert all(m.error is not None and m.error > 0.1 > m.best_error for m in aux)


def test_layers_of_a_dump_that_records_none(served: Path, tmp_path: Path) -> None:
    c = against(served, tmp_path, "speculators", layers=(3, 16, 28))
    assert [m.best_hf for m in c.layers] == [3, 16, 28, None]
    assert "HF 3, 16, 28" in c.verdict
    assert c.layers[0].expected is None


@pytest.mark.parametrize("shift", [1, -2])
def test_tokens_off(tmp_path: Path, shift: int) -> None:
    right, late = (
        open_dump(f.write(tmp_path / str(n), "portable", lambda s, i, n=n: f.both(s, lambda x: torch.roll(x, n, 0)))) for n in (0, shift)
    )
    c = compare(right, late)
    n, word = abs(shift), "late" if shift > 0 else "early"
    assert c.token_shift == shift
    assert c.verdict == f"the second is {n} token{'s' * (n > 1)} {word}"
    assert compare(late, right).token_shift == -shift


def test_slots_that_changed_places(tmp_path: Path) -> None:
    a, b = open_dump(f.write(tmp_path / "a", change=f.reordered)), open_dump(f.write(tmp_path / "b"))
    c = compare(a, b)
    assert "slots changed places: hidden_states[:, 0] is hidden_states[:, 2]" in c.verdict
    assert c.errors[0][2] == 0
    assert c.columns == tuple(s.name for s in b.slots)


def test_rounding_is_the_same_and_rotation_is_not(served: Path, tmp_path: Path) -> None:
    c = against(served, tmp_path / "a", change=lambda s, i: f.both(s, lambda x: x.bfloat16()))
    assert all(m.same and 0 < m.best_error < 0.01 for m in c.layers)
    c = against(served, tmp_path / "b", change=f.rotated)
    assert "no slot of the first dump is in the second" in c.verdict


def test_final_states_on_two_sides_of_the_norm_are_not_expected_equal(served: Path, tmp_path: Path) -> None:
    c = against(served, tmp_path, "specforge")
    assert c.layers[-1].expected is None
    assert "1 of 4 slots are not in the second" in c.verdict


def test_samples_are_paired_by_tokens_whatever_their_order_and_a_missing_first_token(served: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    for i in range(3):
        s = f.sample(2 - i)
        f.stacked(dump, f.both(replace(s, ids=s.ids[1:100]), lambda x: x[1:100]), i)
    c = compare(open_dump(dump), open_dump(served))
    assert (c.samples, c.rows, c.token_shift) == (3, 297, 0)
    assert all(m.same for m in c.layers)


def test_broken_rows_do_not_count(served: Path, tmp_path: Path) -> None:
    c = against(served, tmp_path, change=f.hole)
    assert all(m.same for m in c.layers)


def test_what_cannot_be_compared(served: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="width 512"):
        against(served, tmp_path / "a", change=lambda s, i: f.both(s, lambda x: x[..., :512].contiguous()))
    with pytest.raises(CheckpointError, match="share 8 tokens"):
        against(served, tmp_path / "b", change=lambda s, i: replace(s, ids=torch.arange(192) + 1000 * i))


def test_as_data(served: Path, tmp_path: Path) -> None:
    data = against(served, tmp_path).to_dict()
    assert data["schema"] == 1
    assert {"verdict", "layers", "errors", "columns", "token_shift", "layer_shift"} <= set(data)
    assert {"slot", "expected", "best", "best_shift", "best_error", "same"} <= set(data["layers"][0])
