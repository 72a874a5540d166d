"""Calibration of the freshness test: what an initialiser leaves passes, what a training touched does not; and the pass over a tensor.

The larger run behind the numbers in the module's docstring is `test_every_initialiser_is_fresh` over 11,772 matrices from 16 x 512 to
8192 x 2048 in three dtypes: none was rejected, two showed a statistic beyond ``NEAR``, the largest |z| was 5.0.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.errors import CheckpointError
from eagle3diag.weights.fresh import COLUMNS, ROWS, Freshness, freshness, origin, spread
from eagle3diag.weights.related import relation
from eagle3diag.weights.scan import nearest_rows, sampled_rows, scan
from tests.factory import tiny_tensors, trained
from tests.fixtures_val import INITIALISERS, generator, honest_training

SAMPLE = Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def judged(w: torch.Tensor) -> Freshness:
    """As a scan does it: rows and columns spread over the matrix, the extreme of the whole."""
    part = w[spread(w.shape[0], ROWS)][:, spread(w.shape[1], COLUMNS)]
    whole = w[spread(w.shape[0], ROWS)] if w.shape[0] <= w.shape[1] else None
    return freshness(part, abs_max=float(w.abs().max()), count=w.numel(), whole=whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INITIALISERS)
def test_every_initialiser_is_fresh(name: str, dtype: torch.dtype) -> None:
    draw, law = INITIALISERS[name]
    g = generator(11)
    for shape in [(32, 128), (64, 64), (64, 192), (128, 64), (192, 1152), (576, 1728), (1536, 96)]:
        found = judged(draw(shape, g).to(dtype))
        assert found.verdict == "fresh", (shape, found.why)
        assert found.near, (shape, found.z)
        if shape[0] * shape[1] > 50_000:
            assert found.law == law
        assert found.strength < 0.2


def test_z_values_are_what_they_claim() -> None:
    g = generator(2)
    seen: dict[str, list[float]] = {}
    for _ in range(150):
        for name, value in judged((torch.rand(64, 96, generator=g) - 0.5) * 0.1).z.items():
            seen.setdefault(name, []).append(value)
    assert set(seen) == {"mean", "skew", "tail", "rows", "columns", "row means", "column means", "pairs", "top", "law"}
    for name, values in seen.items():
        v = torch.tensor(values)
        if name not in ("tail", "top"):  # one-sided, and Tracy-Widom with mean -1.2
            assert abs(float(v.mean())) < 0.35, name
            assert 0.8 < float(v.std()) < 1.25, name
    top = torch.tensor(seen["top"])
    assert -1.8 < float(top.mean()) < -0.8
    assert 0.9 < float(top.std()) < 1.6


@pytest.mark.parametrize("shape", [(1, 4096), (8, 1024), (63, 64)])
def test_too_little_evidence_is_not_judged(shape: tuple[int, int]) -> None:
    assert judged(torch.randn(shape, generator=generator())).verdict == "unjudged"


def test_a_wide_matrix_is_judged_from_a_sample() -> None:
    g = generator(3)
    w = torch.randn(2500, 5000, generator=g) * 0.02
    found = judged(w.to(torch.bfloat16))
    assert (found.verdict, found.rows, found.columns) == ("fresh", ROWS, COLUMNS)
    assert origin(found, (2500, 5000)) in ("N(0, 0.02)", "Kaiming normal for 5000")  # sqrt(2 / 5000) is 0.02
    u, v = torch.randn(2500, 1, generator=g), torch.randn(1, 5000, generator=g)
    assert judged((w + 4e-4 * u @ v).to(torch.bfloat16)).verdict == "fresh"  # hidden in the noise
    assert judged((w + 2e-3 * u @ v).to(torch.bfloat16)).verdict == "trained"


@pytest.mark.parametrize("name", ["rows", "columns", "mean", "tail", "low rank", "row means"])
def test_each_kind_of_structure_is_seen(name: str) -> None:
    g = generator(4)
    w = torch.randn(256, 384, generator=g)
    change = {
        "rows": lambda: w * (1 + 0.15 * torch.randn(256, 1, generator=g)),
        "columns": lambda: w * (1 + 0.15 * torch.randn(1, 384, generator=g)),
        "mean": lambda: w + 0.05,
        "tail": lambda: w / torch.rand(256, 384, generator=g).add(0.3).sqrt(),
        "low rank": lambda: w + torch.randn(256, 3, generator=g) @ torch.randn(3, 384, generator=g) * 0.2,
        "row means": lambda: w + 0.3 * torch.randn(256, 1, generator=g),
    }[name]
    assert judged(w).verdict == "fresh"
    assert judged(change()).verdict == "trained"


def test_the_really_trained_draft_is_far_from_noise() -> None:
    draft = open_checkpoint(SAMPLE / "draft")
    found = {n: scan(draft, n) for n, t in draft.tensors.items() if len(t.shape) == 2}
    strengths = {n: s.fresh[""].strength for n, s in found.items() if s}
    tops = {n: s.fresh[""].top for n, s in found.items() if s}
    assert len(strengths) == 9
    assert all(s and s.fresh[""].verdict == "trained" for s in found.values())
    assert min(tops.values()) > 1000
    assert min(strengths.values()) > 2.0


@pytest.mark.parametrize("width", [64, 128, 288])
def test_so_is_every_piece_of_it(width: int) -> None:
    draft = open_checkpoint(SAMPLE / "draft")
    for name, info in draft.tensors.items():
        if len(info.shape) == 2 and info.dtype == "BF16":
            w = draft.read(name)
            piece = w[: max(width, 64), -width:]
            assert judged(piece).verdict == "trained", name


def test_a_short_training_shows() -> None:
    start = honest_training(96, 0, law="N(0, 0.02)")
    assert {judged(w).verdict for w in start.values() if w.ndim == 2} == {"fresh"}
    after = honest_training(96, 250, law="N(0, 0.02)", lr=2e-3)
    matrices = {n: judged(w) for n, w in after.items() if w.ndim == 2}
    assert all(f.verdict == "trained" or not f.near for f in matrices.values()), {n: f.z for n, f in matrices.items()}


def test_the_factory_looks_trained() -> None:
    for hidden in (64, 160):
        t = tiny_tensors(hidden=hidden, inter=2 * hidden, head_dim=hidden // 4, embed=True)
        for name, w in t.items():
            if w.ndim == 2 and w.is_floating_point() and w.numel() >= 4096:
                assert judged(w).verdict == "trained", name


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_patterns_are_garbage(dtype: torch.dtype) -> None:
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limit = torch.iinfo(width)
    raw = torch.randint(limit.min, limit.max, (64, 128), generator=generator(6), dtype=width).view(dtype)
    assert freshness(raw).verdict == "garbage"
    assert freshness(torch.where(torch.isfinite(raw), raw, torch.zeros_like(raw))).verdict == "garbage"
    assert freshness((torch.rand(64, 128, generator=generator(7)) * 1e-30).to(torch.float32)).verdict == "garbage"


def test_a_padding_row_does_not_hide_a_fresh_embedding() -> None:
    w = torch.randn(300, 64, generator=generator(8))
    w[0] = 0
    assert judged(w).verdict == "fresh"


def test_origins() -> None:
    g = generator(9)

    def named(law: str, shape: tuple[int, int], configured: float | None = None) -> str:
        return origin(judged(INITIALISERS[law][0](shape, g)), shape, configured)

    assert named("nn.Linear", (576, 1728)) == "nn.Linear's default, uniform within 1/sqrt(1728)"
    assert named("xavier uniform", (300, 500)) == "Xavier uniform for 500 and 300"
    assert named("xavier normal", (300, 500)) in ("Xavier normal for 500 and 300", "N(0, 0.05)")  # sqrt(2 / 800) is 0.05
    assert named("kaiming normal", (300, 600)) == "Kaiming normal for 600"
    assert named("N(0, 0.02)", (576, 1728)) == "N(0, 0.02)"
    assert named("N(0, 0.02)", (576, 1728), 0.02) in ("the config's initializer_range 0.02", "N(0, 0.02)")
    assert named("truncated", (576, 1728)) == "N(0, 0.02)"
    assert named("N(0, 0.0137)", (1536, 576)) == ""


def test_spread_takes_each_index_once_and_reaches_both_ends() -> None:
    for n, k in [(5, 9), (100, 64), (1000, 64), (576, 512), (1025, 1024), (30000, 1024)]:
        chosen = spread(n, k)
        assert len(chosen) == min(n, k) == len(set(chosen))
        assert chosen == sorted(chosen)
        assert 0 <= chosen[0] <= n // min(n, k)
        assert n - 1 - n // min(n, k) <= chosen[-1] < n
    assert len({i % 64 for i in spread(32768, 512)}) > 48  # no fixed stride: every place of a head of 64 is looked at, nearly


# the pass over a tensor


def checkpoint(folder: Path, **tensors: torch.Tensor):  # type: ignore[no-untyped-def]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}), encoding="utf-8")
    return open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_a_scan_counts_and_places_what_is_not_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    w = trained("w", 700, 900).float()
    w[3, 5] = float("nan")
    w[699, 899] = float("nan")
    if dtype != torch.float8_e4m3fn:  # has no infinity
        w[1, 2] = float("-inf")
    s = scan(checkpoint(tmp_path, w=w.to(dtype)), "w")
    assert s is not None
    assert s.nan == 2
    assert (s.inf, s.place) == ((0, [3, 5]) if dtype == torch.float8_e4m3fn else (1, [1, 2]))
    finite = w.to(dtype).float()
    finite = finite[torch.isfinite(finite)]
    assert (s.low, s.high) == (float(finite.min()), float(finite.max()))
    assert not s.constant


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint64])
def test_a_scan_takes_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    c = checkpoint(
        tmp_path, zero=torch.zeros(40, 3, dtype=dtype), some=(torch.arange(40) % 2).to(dtype), none=torch.zeros(0, 3, dtype=dtype)
    )
    zero, some = scan(c, "zero"), scan(c, "some")
    assert zero is not None
    assert some is not None
    assert (zero.constant, zero.low, zero.fresh) == (True, 0.0, {})
    assert (some.constant, some.low, some.high) == (False, 0.0, 1.0)
    assert scan(c, "none") is None


def test_sampled_rows_are_the_rows(tmp_path: Path) -> None:
    w = torch.arange(3000 * 700, dtype=torch.float32).view(3000, 700)  # several blocks, rows across their edges
    c = checkpoint(tmp_path, w=w)
    chosen = [0, 1, 748, 749, 750, 1499, 2998, 2999]
    assert torch.equal(sampled_rows(c, "w", chosen), w[chosen])
    best, at = nearest_rows(c, "w", torch.stack([w[0], torch.ones(700)]))
    assert at[0] == 0
    assert float(best[0]) == pytest.approx(1.0)


def test_parts_of_a_fused_matrix_are_judged_one_by_one(tmp_path: Path) -> None:
    w = torch.cat([trained("a", 128, 96), torch.randn(64, 96, generator=generator(1)) * 0.02, trained("b", 64, 96)])
    s = scan(checkpoint(tmp_path, w=w.to(torch.bfloat16)), "w", parts={"q": (0, 128), "k": (128, 192), "v": (192, 256)})
    assert s is not None
    assert {k: f.verdict for k, f in s.fresh.items()} == {"q": "trained", "k": "fresh", "v": "trained"}


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    c = checkpoint(tmp_path, w=torch.randn(64, 64))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        scan(c, "w")


# tables side by side


def test_relations() -> None:
    g = generator(10)
    table = trained("table", 400, 96)
    rotation = torch.linalg.qr(torch.randn(96, 96, generator=g))[0]
    assert relation(table, table).kind == "equal"
    assert relation(table.to(torch.bfloat16).float(), table).kind == "equal"
    assert relation(table + 0.5 * table.std() * torch.randn(400, 96, generator=g), table).kind == "drifted"
    assert relation(table @ rotation, table).kind == "rearranged"
    assert relation(table[torch.randperm(400, generator=g)], table).kind == "unrelated"
    assert relation(torch.randn(400, 96, generator=g), table).kind == "unrelated"
    assert relation(torch.zeros(400, 96), table).kind == "unknown"


# ------------------------------------------------------------------ orthogonal_, the one initialiser without independent elements


def orthogonal(*shape: int, gain: float = 1.0, seed: int = 5) -> torch.Tensor:
    return torch.nn.init.orthogonal_(torch.empty(shape), gain, generator=generator(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (64, 192), (576, 576), (576, 1728), (256, 5000)])
def test_an_orthogonal_start_is_fresh(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for gain in (1.0, 0.5):
        found = judged(orthogonal(*shape, gain=gain).to(dtype))
        assert (found.verdict, found.law) == ("fresh", "orthogonal"), found.why
        assert found.near, found.z
        assert found.strength < 0.2
        assert origin(found, shape) == "nn.init.orthogonal_" + ("" if gain == 1.0 else " with gain 0.5")


def test_a_tall_orthogonal_start_cannot_be_told() -> None:
    assert judged(orthogonal(1728, 576)).law == ""


@pytest.mark.parametrize("step", [1e-3, 3e-4])
def test_one_step_of_training_ends_it(step: float) -> None:
    g = generator(4)
    for shape in ((64, 192), (576, 1728)):
        start = orthogonal(*shape)
        moved = start + step * torch.randn(shape, generator=g).sign()  # the first step of Adam
        assert judged(moved.to(torch.bfloat16)).law == ""
        assert (
            judged(start + 0.1 * torch.outer(torch.randn(shape[0], generator=g), torch.randn(shape[1], generator=g))).verdict == "trained"
        )


def test_what_is_perpendicular_by_other_means_is_not_a_start() -> None:
    g = generator(6)
    x = torch.randn(256, 768, generator=g)
    for _ in range(5):  # what Muon leaves after its first step: singular values between 0.7 and 1.2
        x = x / x.norm() if _ == 0 else x
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    assert judged(x * 0.02).law == ""
    assert judged(torch.eye(64).repeat(1, 3)).law == ""  # a fusion layer that adds its states
    tilted = orthogonal(256, 768) * (1 + 0.05 * torch.rand(256, 1, generator=g))  # rows of several lengths
    assert judged(tilted).law == ""


def test_nothing_trained_has_perpendicular_rows() -> None:
    sample = open_checkpoint(str(SAMPLE / "draft"))
    for name in sample.tensors:
        found = scan(sample, name)
        assert found is None or all(f.law != "orthogonal" for f in found.fresh.values())
    for seed in range(3):
        for w in honest_training(48, 40, seed=seed).values():
            assert w.ndim < 2 or judged(w).law != "orthogonal"
