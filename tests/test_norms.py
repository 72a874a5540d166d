"""Norm profiles: right numbers, first token apart, broken rows counted, and the same bits for every partition and executor."""

from __future__ import annotations

import math
import random
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3diag.errors import UsageError
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.hidden.exact import ExactSum, ExactVector
from eagle3diag.hidden.norms import profile, profile_samples
from eagle3diag.hidden.rowstats import row_kurtosis, row_stats
from eagle3diag.report.views import view

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e300, max_value=1e300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven files of unequal length, [rows, 3, 96] float16, the first row large, one channel an outlier."""
    out = tmp_path_factory.mktemp("dump")
    g = torch.Generator().manual_seed(1)
    for i, rows in enumerate((5, 40, 17, 33, 64, 2, 29)):
        x = torch.randn(rows, 3, 96, generator=g) * torch.tensor([1.0, 3.0, 9.0])[:, None]
        x[:, :, 7] *= 20
        x[0] *= 50
        save_file({"hidden_states": x.half(), "token_ids": torch.arange(rows)}, out / f"hs_{i}.safetensors")
    return out


# ------------------------------------------------------------------ exact sums


@given(st.lists(FINITE, max_size=40), st.integers(0, 40))
def test_sums_do_not_depend_on_the_partition(terms: list[float], cut: int) -> None:
    true = float(sum(map(Fraction, terms), Fraction(0)))
    assert ExactSum.of(terms[:cut]) + ExactSum.of(terms[cut:]) == ExactSum.of(terms[cut:]) + ExactSum.of(terms[:cut])
    one_by_one = sum((ExactSum.of([t]) for t in terms), ExactSum())
    assert one_by_one.over(1) == true
    assert sum((ExactSum.of([t]) for t in reversed(terms)), ExactSum()) == one_by_one


def test_the_mean_of_nothing_is_nan() -> None:
    assert math.isnan(ExactSum().over(0))


@settings(max_examples=60)
@given(st.lists(st.lists(st.floats(-1e18, 1e18), min_size=3, max_size=3), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_vectors_do_not_depend_on_the_order(rows: list[list[float]], shuffled: random.Random) -> None:
    def total(order: list[list[float]]) -> ExactVector:
        out = ExactVector.of(np.zeros(3))
        for r in order:
            out = out + ExactVector.of(np.array(r))
        return out

    other = rows[:]
    shuffled.shuffle(other)
    a, b = total(rows), total(other)
    assert np.array_equal(a.high, b.high)
    assert np.array_equal(a.low, b.low)
    for c in range(3):
        true = sum((Fraction(r[c]) for r in rows), Fraction(0))
        assert abs(Fraction(float(a.values()[c])) - true) <= len(rows) * Fraction(1, 2**36) + abs(true) / 2**51


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_row_numbers_are_those_of_float64(dtype: torch.dtype) -> None:
    x = (torch.randn(300, 3, 1000, generator=torch.Generator().manual_seed(3)) * 7 + 1).to(dtype)[:, 1]
    wide, got = x.double(), row_stats(x)
    assert torch.allclose(got.l2, wide.norm(dim=-1), rtol=1e-6)
    assert torch.allclose(got.mean, wide.mean(-1), rtol=1e-5, atol=1e-6)
    assert torch.allclose(got.max_abs, wide.abs().amax(-1), rtol=1e-7)
    assert bool(got.finite.all())
    d = wide - wide.mean(-1, keepdim=True)
    assert torch.allclose(row_kurtosis(x), (d**4).mean(-1) / (d**2).mean(-1) ** 2, rtol=1e-5)


def test_rows_beyond_float32_are_finite_all_the_same() -> None:
    x = torch.full((2, 4), 3e38)
    x[1, 2] = math.inf
    got = row_stats(x)
    assert got.finite.tolist() == [True, False]
    assert float(got.l2[0]) == pytest.approx(6e38)
    assert float(got.mean[0]) == pytest.approx(3e38)


def test_profile_of_a_dump(folder: Path) -> None:
    p = profile(open_dump(folder), full=True)
    assert (p.samples, p.tokens, p.problems) == (7, 190, ())
    x = torch.cat([s.states[1][1:].double() for s in open_dump(folder)])
    firsts = torch.stack([s.states[1][0].double() for s in open_dump(folder)])
    layer = p.layers[1]
    assert layer.rows == 183
    assert layer.first_rows == 7
    assert layer.l2_mean == pytest.approx(float(x.norm(dim=-1).mean()), rel=1e-6)
    assert layer.rms_mean == pytest.approx(layer.l2_mean / 96**0.5)
    assert layer.l2_median == pytest.approx(float(x.norm(dim=-1).median()), rel=0.03)
    assert layer.value_mean == pytest.approx(float(x.mean()), rel=1e-5)
    assert layer.max_abs == float(x.abs().max())
    name, row = layer.max_at
    assert float(next(s for s in open_dump(folder) if s.name == name).states[1][row].double().abs().max()) == layer.max_abs
    assert layer.first_l2_mean == pytest.approx(float(firsts.norm(dim=-1).mean()), rel=1e-6)
    assert layer.first_l2_mean > 20 * layer.l2_mean
    assert layer.l2_mean_with_first == pytest.approx(float(torch.cat([x, firsts]).norm(dim=-1).mean()), rel=1e-6)
    assert layer.outliers is not None
    assert [c for c, _ in layer.outliers] == [7]
    assert layer.channel_rms is not None
    assert layer.channel_rms[7] == pytest.approx(float(x[:, 7].square().mean().sqrt()), rel=1e-6)
    assert layer.kurtosis_mean is not None
    assert layer.kurtosis_mean > 20
    data = p.to_dict()
    assert data["tokens"] == 190
    assert [d["slot"] for d in data["layers"]] == [0, 1, 2]
    assert {"hf", "l2_mean", "rms_mean", "max_abs", "mean", "kurtosis_mean", "outlier_channels"} <= set(data["layers"][0])
    assert "kurtosis_mean" not in profile(open_dump(folder)).to_dict()["layers"][0]


def test_broken_rows_and_files_are_counted_and_left_out(tmp_path: Path) -> None:
    x = torch.ones(6, 2, 8)
    x[2, 0, 3], x[3, 0, 1], x[4, 1] = math.nan, math.inf, 0
    save_file({"hidden_states": x, "token_ids": torch.arange(6)}, tmp_path / "a.safetensors")
    save_file({"hidden_states": torch.ones(3, 2, 8), "token_ids": torch.arange(3)}, tmp_path / "b.safetensors")
    dump = open_dump(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    p = profile(dump)
    assert (p.samples, p.tokens) == (1, 6)
    assert [name for name, _ in p.problems] == ["b"]
    assert (p.layers[0].nonfinite, p.layers[0].rows) == (2, 3)
    assert (p.layers[1].zero, p.layers[1].rows) == (1, 5)
    assert p.layers[0].l2_mean == pytest.approx(8**0.5)


def test_a_profile_without_rows_is_plain_json(tmp_path: Path) -> None:
    save_file({"hidden_states": torch.full((1, 2, 4), math.nan), "token_ids": torch.arange(1)}, tmp_path / "a.safetensors")
    layer = profile(open_dump(tmp_path), full=True).to_dict()["layers"][0]
    assert layer["l2_mean"] is None
    assert layer["kurtosis_mean"] is None
    assert layer["max_abs"] is None


# ------------------------------------------------------------------ merging


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(7)), cuts=st.sets(st.integers(1, 6), max_size=4), full=st.booleans())
def test_every_partition_gives_the_same_bits(folder: Path, order: list[int], cuts: set[int], full: bool) -> None:
    dump = open_dump(folder)
    edges = [0, *sorted(cuts), 7]
    parts = [profile_samples(dump, [dump.samples[i] for i in order[a:b]], full) for a, b in pairwise(edges)]
    assert parts[0].merge(*parts[1:]).to_dict() == profile(dump, full=full).to_dict()


def test_profiles_of_other_dumps_do_not_merge(folder: Path, tmp_path: Path) -> None:
    save_file({"hidden_states": torch.ones(3, 2, 96), "token_ids": torch.arange(3)}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="cannot be merged"):
        profile(open_dump(folder)).merge(profile(open_dump(tmp_path)))
    save_file({"hidden_states": torch.ones(3, 3, 8), "token_ids": torch.arange(3)}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="cannot be merged"):
        profile(open_dump(folder)).merge(profile(open_dump(tmp_path)))


def _processes() -> Executor:
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"))


@pytest.mark.parametrize("pool", [lambda: ThreadPoolExecutor(3), _processes], ids=["threads", "processes"])
def test_executors_give_the_same_bits(folder: Path, pool: type[Executor]) -> None:
    dump = open_dump(folder)
    with pool() as executor:
        assert profile(dump, executor=executor, full=True).to_dict() == profile(dump, full=True).to_dict()


def test_the_number_of_threads_is_what_it_was(folder: Path) -> None:
    before = torch.get_num_threads()
    dump = open_dump(folder)
    with ThreadPoolExecutor(4) as executor:
        profile(dump, executor=executor)
    assert torch.get_num_threads() == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_gives_the_same_bits(folder: Path) -> None:
    distributed = pytest.importorskip("distributed")
    dump = open_dump(folder)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert profile(dump, executor=client.get_executor(), full=True).to_dict() == profile(dump, full=True).to_dict()


def test_a_final_state_says_on_which_side_of_the_norm_it_is() -> None:
    """Its norm tells nothing without that: 728 before and 46 after, for the same state."""
    dump = open_dump(str(Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3" / "dumps"))
    norms = profile(dump)
    assert norms.to_dict()["final_norm"] == norms.final_norm == dump.final_norm == "pre"
    assert "The final state is before the target's final norm." in str(view(norms).notes)
