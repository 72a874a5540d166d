"""Two checkpoints against each other: what published tools get wrong, every dtype, renames, damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.errors import CheckpointError
from eagle3diag.weights.compare import ValueChange
from eagle3diag.weights.diff import WeightDiff, diff
from tests.factory import Tensors, dialect_draft, tiny_config, tiny_tensors, write_draft

NAN = float("nan")
NORM = "layers.0.hidden_norm.weight"


def two(folder: Path, a: Tensors, b: Tensors, values: bool = True) -> WeightDiff:
    for name, tensors in (("a", a), ("b", b)):
        (folder / name).mkdir(exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / name / "model.safetensors")
    return diff(folder / "a", folder / "b", values=values)


def one(folder: Path, a: torch.Tensor, b: torch.Tensor) -> ValueChange:
    found = two(folder, {"w": a}, {"w": b})
    assert len(found.values) == 1
    return found.values[0]


def test_json_shape(tmp_path: Path) -> None:
    t = tiny_tensors()
    plain = two(tmp_path, t, t).to_dict()
    assert plain["schema"] == 1
    assert {"added", "removed", "renamed", "shape", "dtype", "values", "config"} <= set(plain)
    first = plain["values"][0]  # type: ignore[index]
    assert {"name", "equal", "max_abs", "relative", "cosine", "differ", "nan", "inf"} <= set(first)
    json.dumps(plain, allow_nan=False)


def test_a_changed_bf16_value_is_seen(tmp_path: Path) -> None:
    a = tiny_tensors()
    b = {k: v.clone() for k, v in a.items()}
    b["fc.weight"][3, 5] += 1.0
    found = two(tmp_path, a, b)
    assert [v.name for v in found.changed] == ["fc.weight"]
    change = found.changed[0]
    d = b["fc.weight"].double() - a["fc.weight"].double()
    assert change.max_abs == pytest.approx(float(d.abs().max()))
    assert change.relative == pytest.approx(float(d.norm() / a["fc.weight"].double().norm()), rel=1e-6)
    assert change.differ == pytest.approx(1 / a["fc.weight"].numel())
    assert len(found.values) == len(a)


def test_removed_and_added_keys_are_reported(tmp_path: Path) -> None:
    a, b = tiny_tensors(), tiny_tensors(drop=("t2d", NORM))
    for values in (False, True):
        found = two(tmp_path, a, b, values)
        assert (found.removed, found.added, found.renamed) == ((NORM, "t2d"), (), ())
        other = diff(tmp_path / "b", tmp_path / "a", values=values)
        assert (other.removed, other.added) == ((), (NORM, "t2d"))


def test_nan_is_counted_on_both_sides(tmp_path: Path) -> None:
    a = torch.randn(64, 64).to(torch.bfloat16)
    b = a.clone()
    b[0, :3] = NAN
    b[1, 1] = float("inf")
    change = one(tmp_path, a, b)
    assert (change.equal, change.nan, change.inf, change.differ) == (False, (0, 3), (0, 1), 4 / 4096)
    assert change.max_abs == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_tensor_with_nan_equals_itself(tmp_path: Path, dtype: torch.dtype) -> None:
    t = torch.randn(100, 31)
    t[2, 3:5] = NAN
    change = one(tmp_path, t.to(dtype), t.to(dtype))
    assert (change.equal, change.identical, change.nan, change.differ, change.cosine) == (True, True, (2, 2), 0.0, 1.0)


def test_infinities_of_an_equal_tensor(tmp_path: Path) -> None:
    t = torch.randn(1000)
    t[3], t[4], t[5] = float("inf"), float("-inf"), NAN
    change = one(tmp_path, t, t)
    assert (change.equal, change.nan, change.inf) == (True, (1, 1), (2, 2))
    huge = one(tmp_path, torch.full((1000,), 3e38), torch.full((1000,), 3e38))  # their sum overflows; none of them is infinite
    assert (huge.nan, huge.inf) == ((0, 0), (0, 0))


def test_row_permutation_is_a_change(tmp_path: Path) -> None:
    a = torch.randn(128, 64).to(torch.bfloat16)
    change = one(tmp_path, a, a[torch.arange(128).roll(1)])
    assert not change.equal
    assert change.differ is not None
    assert change.differ > 0.9
    assert change.cosine is not None
    assert abs(change.cosine) < 0.1


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"layer": "layers.0"}, {"layer": "midlayer"}),
        ({}, {"prefix": "model."}),
        ({"layer": "midlayer"}, {"prefix": "draft_model."}),
        ({"fc_norm": True}, {"fc_norm": True, "layer": "midlayer"}),
    ],
)
def test_dialect_names_are_one_draft(tmp_path: Path, a: dict[str, object], b: dict[str, object]) -> None:
    found = two(tmp_path, tiny_tensors(**a), tiny_tensors(**b))  # type: ignore[arg-type]
    assert found.same_tensors
    assert found.renamed
    assert {r.by for r in found.renamed} == {"dialect"}


def test_megatrons_deep_names(tmp_path: Path) -> None:
    a = tiny_tensors(layers=2)
    b = {k.replace("layers.", "midlayer."): v for k, v in a.items()}
    b["midlayer.1.hidden_norm.weight"] = b.pop("midlayer.1.input_layernorm.weight")
    found = two(tmp_path, a, b)
    assert found.same_tensors
    assert len(found.renamed) == sum(k.startswith("layers.") for k in a)


def test_unknown_rename_is_matched_by_content(tmp_path: Path) -> None:
    a = tiny_tensors()
    b = dict(a)
    b["norm2.weight"] = b.pop("norm.weight")
    b["somewhere.else.entirely"] = b.pop("fc.weight")
    found = two(tmp_path, a, b)
    assert {(r.before, r.after, r.by) for r in found.renamed} == {
        ("norm.weight", "norm2.weight", "content"),
        ("fc.weight", "somewhere.else.entirely", "content"),
    }
    assert found.same_tensors


def test_rename_with_changed_values_is_matched_by_shape_and_place(tmp_path: Path) -> None:
    a = tiny_tensors()
    b = dict(a)
    b["norm2.weight"] = b.pop("norm.weight") * 2
    found = two(tmp_path, a, b)
    assert [(r.before, r.after, r.by) for r in found.renamed] == [("norm.weight", "norm2.weight", "shape and position")]
    assert [v.name for v in found.changed] == ["norm.weight"]
    assert diff(tmp_path / "a", tmp_path / "b").renamed == found.renamed


def test_nothing_is_guessed_among_equals(tmp_path: Path) -> None:
    ones = torch.ones(64, dtype=torch.bfloat16)
    a = {"norm.weight": ones, "odd_norm.weight": ones.clone()}
    b = {"x_norm.weight": ones.clone(), "y_norm.weight": ones.clone()}
    found = two(tmp_path, a, b)
    assert found.renamed == ()
    assert found.unsettled == ((("norm.weight", "odd_norm.weight"), ("x_norm.weight", "y_norm.weight")),)
    assert (len(found.removed), len(found.added)) == (2, 2)


def test_two_roles_of_the_format_are_never_one_tensor(tmp_path: Path) -> None:
    a = tiny_tensors(drop=("layers.0.input_layernorm.weight",))
    b = tiny_tensors(drop=(NORM,))
    found = two(tmp_path, a, b)
    assert (found.removed, found.added, found.renamed) == ((NORM,), ("layers.0.input_layernorm.weight",), ())


def test_deeper_norm_under_the_other_engines_name(tmp_path: Path) -> None:
    a = tiny_tensors(layers=2)
    b = dict(a)
    b["layers.1.hidden_norm.weight"] = b.pop("layers.1.input_layernorm.weight")
    found = two(tmp_path, a, b)
    assert [(r.before, r.after, r.by) for r in found.renamed] == [
        ("layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight", "dialect")
    ]


@pytest.mark.parametrize("swap", [False, True])
def test_fused_against_split(tmp_path: Path, swap: bool) -> None:
    split = tiny_tensors()
    fused = dict(split)
    at = "layers.0.self_attn."
    fused[f"{at}qkv_proj.weight"] = torch.cat([fused.pop(f"{at}{p}_proj.weight") for p in "qkv"])
    fused["layers.0.mlp.gate_up_proj.weight"] = torch.cat([fused.pop(f"layers.0.mlp.{p}_proj.weight") for p in ("gate", "up")])
    fused[f"{at}qkv_proj.weight"][70, 3] += 1  # a row of k
    found = two(tmp_path, fused, split) if swap else two(tmp_path, split, fused)
    assert (found.removed, found.added, found.shape) == ((), (), ())
    assert [v.name for v in found.changed] == [f"{at}k_proj.weight"]
    rows = {(0, 64), (64, 96), (96, 128), (0, 128), (128, 256)}  # q, k, v; gate, up
    assert {(r.rows, r.by) for r in found.renamed} == {(r, "dialect") for r in rows}


def test_shapes_and_dtypes(tmp_path: Path) -> None:
    a = {"w": torch.zeros(4, 6), "v": torch.arange(8.0)}
    b = {"w": torch.zeros(6, 4), "v": torch.arange(8.0).to(torch.bfloat16)}
    found = two(tmp_path, a, b)
    assert [c.to_dict() for c in found.shape] == [{"name": "w", "a": [4, 6], "b": [6, 4]}]
    assert [c.to_dict() for c in found.dtype] == [{"name": "v", "a": "F32", "b": "BF16"}]
    assert [v.name for v in found.values] == ["v"]
    assert found.values[0].equal
    assert not found.values[0].identical


def test_same_tensor_in_a_narrower_dtype(tmp_path: Path) -> None:
    wide = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    rounded = one(tmp_path, wide, wide.to(torch.bfloat16))
    assert (rounded.equal, rounded.ulps) == (False, 0)
    assert rounded.to_dict()["equal_after_rounding"] is True
    assert "equal once rounded to BF16" in rounded.note
    bits = wide.to(torch.bfloat16).view(torch.int16)
    near = one(tmp_path, (bits + 1).view(torch.bfloat16), wide)
    assert near.ulps == 1
    far = one(tmp_path, (bits + 9).view(torch.bfloat16), wide)
    assert (far.ulps, far.to_dict()["equal_after_rounding"]) == (9, False)


def test_sign_of_zero_is_told(tmp_path: Path) -> None:
    change = one(tmp_path, torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (change.equal, change.identical, change.differ, change.max_abs) == (True, False, 0.0, 0.0)
    assert "sign of zero" in change.note


def test_integers_beyond_float64_and_bools(tmp_path: Path) -> None:
    a = torch.tensor([2**60, 5, -3])
    change = one(tmp_path, a, a + torch.tensor([1, 0, 0]))
    assert (change.equal, change.max_abs, change.differ) == (False, 1.0, 1 / 3)
    mask = torch.tensor([True, False, True, True])
    flipped = one(tmp_path, mask, ~mask)
    assert (flipped.differ, flipped.max_abs) == (1.0, 1.0)
    offsets = one(tmp_path, torch.arange(4), torch.arange(4, dtype=torch.int32))
    assert offsets.equal
    assert not offsets.identical
    unsigned = one(tmp_path, torch.tensor([2**63 + 5], dtype=torch.uint64), torch.tensor([2**63 + 7], dtype=torch.uint64))
    assert unsigned.max_abs == 2.0


def test_all_zero_sides(tmp_path: Path) -> None:
    zero, some = torch.zeros(100), torch.arange(100.0)
    assert (one(tmp_path, zero, some).relative, one(tmp_path, zero, some).cosine) == (None, None)
    assert one(tmp_path, some, zero).relative == pytest.approx(1.0)


def test_config_facts_stand_beside_the_tensors(tmp_path: Path) -> None:
    a = write_draft(tmp_path / "a", tiny_tensors(), tiny_config())
    b = write_draft(
        tmp_path / "b", tiny_tensors(layer="midlayer"), tiny_config(rope_theta=500000.0, norm_before_residual=True, bos_token_id=7)
    )
    facts = {c.name: (c.a, c.b) for c in diff(a, b).config}
    assert facts["rope_theta"] == (100000.0, 500000.0)
    assert facts["norm_before_residual"] == (False, True)
    assert facts["config.json: bos_token_id"] == (1, 7)
    assert "hidden_size" not in facts
    assert diff(a, a).config == ()


def test_one_draft_in_two_schemas_has_the_same_facts(tmp_path: Path) -> None:
    a, b = dialect_draft(tmp_path / "a", "speculators-0.6"), dialect_draft(tmp_path / "b", "flat-export")
    found = diff(a, b, values=True)
    assert found.same_tensors
    facts = {c.name for c in found.config}
    assert {"norm_before_residual", "dialect"} <= facts
    assert not facts & {"hidden_size", "rope_theta", "aux layers (HF)", "draft_vocab_size", "num_heads"}


def test_truncated_while_reading(tmp_path: Path) -> None:
    for name in "ab":
        write_draft(tmp_path / name, tiny_tensors(), tiny_config())
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    path = tmp_path / "b" / "model.safetensors"
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size - 5000)
    with pytest.raises(CheckpointError) as error:
        diff(a, b, values=True)
    assert "\n" not in str(error.value)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
VALUES = st.lists(
    st.one_of(st.sampled_from([0.0, -0.0, 1.0, NAN, float("inf"), float("-inf"), 1e-40, 6e-8, 400.0, 3e38, -5e-324]), st.floats(-200, 200)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(a=VALUES, changes=st.dictionaries(st.integers(0, 39), st.sampled_from([0.5, NAN, float("inf"), 7.0, -0.0]), max_size=6),
       one_=st.sampled_from(FLOATS), two_=st.sampled_from(FLOATS))  # fmt: skip
def test_any_pair_against_whole_tensor_arithmetic(
    tmp_path: Path, a: list[float], changes: dict[int, float], one_: torch.dtype, two_: torch.dtype
) -> None:
    def cast(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        t = torch.tensor(values, dtype=torch.float64)
        return t.to(torch.float32).to(dtype) if dtype.itemsize == 1 else t.to(dtype)

    def double(t: torch.Tensor) -> torch.Tensor:
        return (t.to(torch.float32) if t.dtype.itemsize == 1 else t).double()

    left = cast(a, one_)
    right = cast([changes.get(i, v) for i, v in enumerate(a)], two_)
    change = one(tmp_path, left, right)
    p, q = double(left), double(right)
    same = (p == q) | (torch.isnan(p) & torch.isnan(q))
    finite = torch.isfinite(p) & torch.isfinite(q)
    d = (p - q)[finite]
    assert change.equal == bool(same.all())
    assert change.differ == pytest.approx(float((~same).double().mean()))
    assert change.nan == (int(torch.isnan(p).sum()), int(torch.isnan(q).sum()))
    assert change.inf == (int(torch.isinf(p).sum()), int(torch.isinf(q).sum()))
    assert change.max_abs == pytest.approx(float(d.abs().max()) if d.numel() else 0.0, rel=1e-6)
    if change.relative is not None and float(d.norm()) < 1e150:
        assert change.relative == pytest.approx(float(d.norm() / p[finite].norm()) if not change.equal else 0.0, rel=1e-5, abs=1e-12)
