"""The arithmetic under agreement: rates, lengths, walks, block bootstrap, corrections. No draft, no files."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3diag.draft.bootstrap import block_size, blocks, holm, normal_equivalent, paired, resampled, smallest_effect, tail
from eagle3diag.draft.lengths import accepted, expected_lengths, interval, rates, walk


def right(text: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in line] for line in text.split()])


def test_rates_by_hand() -> None:
    r = rates(right("110 101 011 111"))
    assert r.rows == 4
    assert r.marginal == (0.75, 0.75, 0.75)
    assert r.joint == (0.75, 0.5, 0.25)
    assert r.conditional == (0.75, pytest.approx(2 / 3), 0.5)


def test_conditional_is_none_where_no_chain_got_there() -> None:
    r = rates(right("01 00"))
    assert r.conditional == (0.0, None)
    assert r.marginal == (0.0, 0.5)
    assert rates(torch.zeros(0, 3, dtype=torch.bool)).joint == (0.0, 0.0, 0.0)


def test_expected_lengths_count_the_bonus() -> None:
    assert expected_lengths([0.5, 0.25]) == {1: 1.5, 2: 1.75}
    assert expected_lengths([0.0]) == {1: 1.0}


def test_accepted_stops_at_the_first_miss() -> None:
    assert accepted(right("111 110 101 011")).tolist() == [3, 2, 1, 0]


def test_walk_starts_where_the_last_chain_ended() -> None:
    # rows 0..3 keep 1, 0, 0, 2: from 0 -> 2 tokens, row 2 -> 1, row 3 -> 3 (k = 2); from 1: rows 1, 2, 3; from 2: rows 2, 3
    kept, row = torch.tensor([1, 0, 0, 2]), torch.arange(4)
    sample = torch.zeros(4, dtype=torch.int64)
    assert walk(kept, sample, row, 2) == pytest.approx((2 + 1 + 3 + 1 + 1 + 3 + 1 + 3) / 8)
    assert walk(kept[:0], sample[:0], row[:0], 2) is None


def test_walk_steps_over_gaps() -> None:
    kept, row, sample = torch.tensor([1, 0]), torch.tensor([0, 5]), torch.zeros(2, dtype=torch.int64)
    assert walk(kept, sample, row, 1) == pytest.approx((2 + 1 + 1) / 3)


def test_blocks_never_cross_samples() -> None:
    sample = torch.tensor([0] * 40 + [1] * 70)
    row = torch.cat([torch.arange(40), torch.arange(3, 73)])
    b = blocks(sample, row, 16)
    for one in b.unique():
        assert len(sample[b == one].unique()) == 1
    sizes = torch.bincount(b)
    assert int(sizes.min()) >= 8
    assert int(sizes.max()) <= 16 + 8
    assert b.tolist() == sorted(b.tolist())


def test_short_last_block_joins_the_one_before() -> None:
    b = blocks(torch.zeros(35, dtype=torch.int64), torch.arange(35), 16)
    assert torch.bincount(b).tolist() == [16, 19]
    assert len(blocks(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))) == 0


def test_block_size_stays_between_16_and_32() -> None:
    assert [block_size(n) for n in (10, 4000, 100000)] == [16, 24, 32]


def test_resampling_is_repeatable_and_centred() -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(480, 2, generator=g) + torch.tensor([1.0, -2.0])
    b = blocks(torch.zeros(480, dtype=torch.int64), torch.arange(480), 16)
    a, again = resampled(x, b), resampled(x, b)
    assert torch.equal(a, again)
    assert torch.allclose(a.mean(0), x.double().mean(0), atol=0.02)
    assert torch.allclose(a.std(0), torch.full((2,), 1 / math.sqrt(480), dtype=torch.float64), rtol=0.35)


def test_paired_effect_knows_dependent_rows() -> None:
    """Rows that repeat within a block carry no more than their block: the error must not shrink with their number."""
    g = torch.Generator().manual_seed(2)
    means = torch.randn(40, generator=g)
    x = means.repeat_interleave(16)
    e = paired(x, torch.arange(40).repeat_interleave(16))
    assert e.se == pytest.approx(float(means.std()) / math.sqrt(40), rel=0.12)
    assert e.blocks == 40
    assert e.rows == 640


def test_paired_leaves_out_nan_and_admits_what_it_cannot_know() -> None:
    x = torch.tensor([1.0, math.nan, 1.0, 1.0])
    e = paired(x, torch.tensor([0, 0, 1, 1]))
    assert (e.rows, e.mean) == (3, 1.0)
    assert e.z == math.inf
    one = paired(torch.ones(5), torch.zeros(5, dtype=torch.int64))
    assert one.z == 0
    assert one.se == math.inf
    assert paired(torch.full((3,), math.nan), torch.zeros(3, dtype=torch.int64)).rows == 0
    assert paired(torch.zeros(4), torch.tensor([0, 0, 1, 1])).z == 0


@pytest.mark.parametrize(("t", "dof", "p"), [(2.776, 4, 0.05), (4.604, 4, 0.01), (2.228, 10, 0.05), (2.009, 50, 0.05), (3.496, 50, 0.001)])
def test_normal_equivalent_against_tables_of_t(t: float, dof: int, p: float) -> None:
    assert tail(normal_equivalent(t, dof)) == pytest.approx(p, rel=0.06)
    assert normal_equivalent(-t, dof) == -normal_equivalent(t, dof)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_false_alarms_stay_rare() -> None:
    """Thirty tries on nothing, fifty times over: the family-wise error stays near its 5 %."""
    g = torch.Generator().manual_seed(3)
    b = blocks(torch.zeros(960, dtype=torch.int64), torch.arange(960), 24)
    alarms = 0
    for _ in range(50):
        p = [tail(paired(torch.randn(960, generator=g), b, draws=300).z) for _ in range(30)]
        alarms += min(holm(p)) < 0.05
    assert alarms <= 8


def test_smallest_effect_is_found_about_as_often_as_promised() -> None:
    g = torch.Generator().manual_seed(4)
    b = blocks(torch.zeros(960, dtype=torch.int64), torch.arange(960), 24)
    size = smallest_effect(1 / math.sqrt(960), 10, blocks=40)
    found = 0
    for _ in range(60):
        found += tail(paired(torch.randn(960, generator=g) + size, b, draws=300).z) * 10 < 0.05
    assert 36 <= found <= 59
    assert smallest_effect(math.inf, 3) == math.inf
    assert smallest_effect(1.0, 100) > smallest_effect(1.0, 1)


def test_interval_covers_the_length() -> None:
    g = torch.Generator().manual_seed(5)
    x = torch.rand(600, 3, generator=g) < torch.tensor([0.6, 0.5, 0.4])
    b = blocks(torch.zeros(600, dtype=torch.int64), torch.arange(600))
    ends = interval(x, b)
    for k, length in expected_lengths(rates(x).joint).items():
        low, high = ends[k]
        assert low < length < high
        assert high - low < 0.35
    assert interval(x[:0], b[:0]) == {}
