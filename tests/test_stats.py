"""Streaming statistics against a float64 reference that loads the whole tensor."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.errors import CheckpointError
from eagle3diag.weights.stats import TensorStats, tensor_stats

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def stats_of(folder: Path, t: torch.Tensor, block: int = 1 << 20) -> TensorStats:
    path = folder / "t.safetensors"
    save_file({"w": t}, path)
    return tensor_stats(open_checkpoint(path), "w", block=block)


def check(s: TensorStats, t: torch.Tensor, rel: float = 1e-9) -> None:
    """Every number against the whole tensor in float64."""
    x = (t.to(torch.float32) if t.dtype.itemsize == 1 and t.dtype.is_floating_point else t).double().flatten()
    nan, inf = torch.isnan(x), torch.isinf(x)
    y = x[~(nan | inf)]
    assert (s.count, s.nan, s.inf, s.zeros) == (x.numel(), int(nan.sum()), int(inf.sum()), int((x == 0).sum()))
    assert s.first_nan == (int(nan.nonzero()[0]) if bool(nan.any()) else None)
    assert s.first_inf == (int(inf.nonzero()[0]) if bool(inf.any()) else None)
    assert s.constant == (x.numel() > 0 and y.numel() == x.numel() and bool((y == y[0]).all()))
    if not y.numel():
        assert math.isnan(s.mean)
        assert math.isnan(s.min)
        return
    assert (s.min, s.max, s.abs_max) == (float(y.min()), float(y.max()), float(y.abs().max()))
    largest = max(s.abs_max, 1e-300)
    assert s.mean == pytest.approx(float(y.mean()), rel=rel, abs=rel * largest)
    assert s.std == pytest.approx(float(y.std(unbiased=False)), rel=1e-6, abs=1e-7 * largest)
    assert s.l2 == pytest.approx(float(y.norm()), rel=rel)
    d = y - y.mean()
    m2 = float((d**2).mean())
    if 1e-150 < m2 < 1e150 and m2 > 1e-6 * largest * largest:
        assert s.kurtosis == pytest.approx(float((d**4).mean()) / m2**2 - 3, rel=1e-5, abs=1e-5)
        assert s.skewness == pytest.approx(float((d**3).mean()) / m2**1.5, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_dtype_over_many_blocks(tmp_path: Path, dtype: torch.dtype) -> None:
    t = (0.3 * torch.randn(517, 331, generator=torch.Generator().manual_seed(1)) + 0.05).to(dtype)
    s = stats_of(tmp_path, t, block=4096)
    check(s, t)
    rows = t.to(torch.float32).double()
    for got, axis in (((s.row_norm_mean, s.row_norm_cv), 1), ((s.column_norm_mean, s.column_norm_cv), 0)):
        norms = rows.norm(dim=axis)
        assert got[0] == pytest.approx(float(norms.mean()))
        assert got[1] == pytest.approx(float(norms.std(unbiased=False) / norms.mean()))
    assert s.zero_rows == 0


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    t = torch.randint(0, 2 if dtype == torch.bool else 100, (40, 7), generator=torch.Generator().manual_seed(2)).to(dtype)
    check(stats_of(tmp_path, t, block=64), t)


@pytest.mark.parametrize("shape", [(3, 200_000), (200_000, 3), (1, 70_000), (70_000, 1), (5, 7, 1000)])
def test_rows_longer_and_shorter_than_a_step(tmp_path: Path, shape: tuple[int, ...]) -> None:
    t = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
    s = stats_of(tmp_path, t)
    check(s, t)
    if shape[0] > 1:
        norms = t.double().flatten(1).norm(dim=1)
        assert s.row_norm_mean == pytest.approx(float(norms.mean()))
        assert s.row_norm_cv == pytest.approx(float(norms.std(unbiased=False) / norms.mean()))
    else:
        assert s.row_norm_mean is None


def test_a_large_mean_does_not_eat_the_variance(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(4)
    t = 1e6 + torch.randn(300_000, generator=g, dtype=torch.float64)
    t[:100_000] -= 2e6  # chunks whose means lie far apart
    check(stats_of(tmp_path, t), t)


def test_nan_and_inf_are_counted_located_and_left_out(tmp_path: Path) -> None:
    t = torch.randn(300, 1000, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    t[200, 17] = float("nan")
    t[250, 3:9] = float("nan")
    t[120, 999] = float("-inf")
    t[7] = 0
    s = stats_of(tmp_path, t, block=2048)
    check(s, t)
    assert (s.first_nan, s.first_inf, s.zero_rows) == (200_017, 120_999, 1)


@pytest.mark.parametrize(("value", "zero"), [(0.0, True), (1.0, False), (-0.0, True)])
def test_constant_tensors(tmp_path: Path, value: float, zero: bool) -> None:
    s = stats_of(tmp_path, torch.full((64, 3), value, dtype=torch.bfloat16))
    assert s.constant
    assert s.all_zero is zero
    assert (s.std, s.mean) == (0.0, value)
    assert s.to_dict()["kurtosis"] is None


@pytest.mark.parametrize("value", [1.2e-109, 1e-160, 1e130, 1e160])
def test_powers_beyond_float64_are_not_told(tmp_path: Path, value: float) -> None:
    told = stats_of(tmp_path, torch.tensor([0.0, value, value], dtype=torch.float64)).to_dict()
    assert (told["skewness"], told["kurtosis"], told["max"]) == (None, None, value)


def test_all_nan_and_empty(tmp_path: Path) -> None:
    s = stats_of(tmp_path, torch.full((5,), float("nan")))
    assert (s.nan, s.finite, s.constant, s.all_zero) == (5, 0, False, False)
    assert s.to_dict()["mean"] is None
    empty = stats_of(tmp_path, torch.empty(0, 4))
    assert (empty.count, empty.constant, empty.all_zero, empty.row_norm_mean) == (0, False, False, None)


def test_shape_of_the_distribution(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(6)
    assert stats_of(tmp_path, torch.randn(1000, 1000, generator=g)).kurtosis == pytest.approx(0.0, abs=0.02)
    assert stats_of(tmp_path, torch.rand(1000, 1000, generator=g)).kurtosis == pytest.approx(-1.2, abs=0.01)


def test_unknown_name_and_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"w": torch.ones(100_000)}, path)
    c = open_checkpoint(path)
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        tensor_stats(c, "nothing")
    with path.open("r+b") as f:
        f.truncate(200_000)
    with pytest.raises(CheckpointError) as error:
        tensor_stats(c, "w")
    assert "\n" not in str(error.value)


SPECIAL = [0.0, -0.0, 1.0, float("nan"), float("inf"), float("-inf"), 5e-324, 1e-40, 6e-8, 1e-39, 240.0, 57344.0, -448.0, 3e38, -1e-300]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(FLOATS),
    values=st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(-1e4, 1e4)), min_size=1, max_size=60),
    columns=st.integers(1, 5),
)
def test_any_values(tmp_path: Path, dtype: torch.dtype, values: list[float], columns: int) -> None:
    values = values[: max(1, len(values) // columns) * columns] if len(values) >= columns else values
    t = torch.tensor(values, dtype=torch.float64)
    t = (t.to(torch.float32).to(dtype) if dtype.itemsize == 1 else t.to(dtype)).view(-1, columns if len(values) % columns == 0 else 1)
    check(stats_of(tmp_path, t, block=64), t)
