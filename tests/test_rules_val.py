"""VAL301 to VAL310: what fires, at which severity, and what must not; one fault gives one code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3diag.rules.case import make_case
from eagle3diag.rules.model import Finding, Report
from eagle3diag.rules.registry import run
from tests.factory import Tensors, tiny_config, tiny_target, tiny_tensors, write_draft
from tests.fixtures_val import (
    INITIALISERS,
    absolute,
    case_of,
    drawn,
    element,
    generator,
    honest_training,
    put,
    report_of,
    serious,
    unsorted,
)

SAMPLE = Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3"
Change = Callable[[Tensors], object]


def judge(folder: Path, change: Change, **keywords: Any) -> Report:
    report = run(case_of(folder, change, **keywords), ["VAL"])
    assert [o for o in report.outcomes if o.status == "crashed"] == []
    return report


def only(report: Report, code: str) -> Finding:
    """The one finding; nothing else was said, not even as information."""
    assert [f.code for f in report.findings] == [code], [f.title for f in report.findings]
    return report.findings[0]


def sample() -> tuple[Tensors, dict[str, Any]]:
    config = json.loads((SAMPLE / "draft" / "config.json").read_text(encoding="utf-8"))
    return load_file(SAMPLE / "draft" / "model.safetensors"), config


def layer_as(law: str, *, ones: bool = True) -> Change:
    """The decoder layer as an initialiser leaves it."""

    def change(t: Tensors) -> None:
        g = generator(21)
        for name, v in t.items():
            if name.startswith(("layers.0.", "midlayer.")):
                if v.ndim == 2:
                    t[name] = INITIALISERS[law][0]((v.shape[0], v.shape[1]), g).to(v.dtype)
                elif ones:
                    t[name] = torch.ones_like(v)

    return change


# VAL301


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "lm_head.weight", "layers.0.self_attn.q_proj.weight"])
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("-inf"), "infinite")])
def test_one_element_that_is_not_finite(tmp_path: Path, name: str, value: float, word: str) -> None:
    found = only(judge(tmp_path, element(name, 9, value)), "VAL301")
    assert found.severity == "error"
    assert name in found.title
    assert word in found.title
    assert found.evidence["nan"] + found.evidence["inf"] == 1
    assert found.evidence["first"] == ([9] if "norm" in name else [0, 9])


def test_an_embedding_nobody_filled(tmp_path: Path) -> None:
    found = only(judge(tmp_path, put("embed_tokens.weight", lambda v: v * float("nan")), embed=True), "VAL301")
    assert "never filled" in found.title


def test_many_tensors_are_summed_up(tmp_path: Path) -> None:
    def spoil(t: Tensors) -> None:
        for name, v in t.items():
            if v.is_floating_point():
                t[name] = v * float("nan")

    report = judge(tmp_path, spoil, layers=3, config=tiny_config(num_hidden_layers=3))
    found = [f for f in report.findings if f.code == "VAL301"]
    assert len(found) == 13
    assert sum("more tensors" in f.title for f in found) == 1


def test_nan_in_what_the_engine_replaces_is_a_warning(tmp_path: Path) -> None:
    t = tiny_tensors(embed=True)
    t["embed_tokens.weight"][3, 3] = float("nan")
    path = write_draft(tmp_path / "draft", t, tiny_config(aux="nested"))
    report = run(make_case(path, engine="sglang==0.5.23", target=tiny_target(tmp_path / "target")), ["VAL301"])
    assert [f.severity.value for f in report.findings] == ["warning"]


# VAL302


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        (put("fc.weight", torch.zeros_like), "error"),
        (put("fc.weight", torch.ones_like), "error"),
        (put("fc.weight", lambda v: torch.full_like(v, 0.02)), "error"),
        (put("norm.weight", torch.zeros_like), "error"),
        (put("layers.0.hidden_norm.weight", lambda v: torch.full_like(v, 0.5)), "warning"),
    ],
)
def test_constant_weights(tmp_path: Path, change: Change, severity: str) -> None:
    assert only(judge(tmp_path, change), "VAL302").severity == severity


def test_a_part_that_was_never_written(tmp_path: Path) -> None:
    def third(v: torch.Tensor) -> torch.Tensor:
        v[:, 64:128] = 0
        return v

    found = only(judge(tmp_path, put("fc.weight", third)), "VAL302")
    assert found.severity == "warning"
    assert "33% of the columns of fc.weight" in found.title


def test_zero_biases_are_sound(tmp_path: Path) -> None:
    def clear(t: Tensors) -> None:
        for name in t:
            if name.endswith(".bias"):
                t[name].zero_()

    assert judge(tmp_path, clear, bias=True).findings == ()


# VAL303


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("law", INITIALISERS)
def test_a_layer_nobody_loaded(tmp_path: Path, law: str, dtype: torch.dtype) -> None:
    for i, hidden in enumerate((64, 192)):
        size = {"hidden": hidden, "inter": 2 * hidden, "head_dim": hidden // 4}
        config = tiny_config(hidden_size=hidden, intermediate_size=2 * hidden, head_dim=hidden // 4)
        found = only(judge(tmp_path / str(i), layer_as(law), dtype=dtype, config=config, **size), "VAL303")
        assert found.severity == "error"
        assert "all 7 matrices" in found.title
        assert "3 norms are exactly 1" in found.title
        assert len(found.evidence["tensors"]) == 7
        kept = judge(tmp_path / f"{i}k", layer_as(law, ones=False), dtype=dtype, config=config, **size)
        assert serious(kept) == {"VAL303"}  # the norms came along, the matrices did not


@pytest.mark.parametrize("law", INITIALISERS)
@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "layers.0.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight"])
def test_one_matrix_alone(tmp_path: Path, name: str, law: str) -> None:
    found = only(judge(tmp_path, drawn(name, law)), "VAL303")
    assert found.severity == "error"
    assert name in found.title


@pytest.mark.parametrize("law", ["N(0, 0.02)", "nn.Linear", "xavier normal", "N(0, 0.0137)"])
def test_one_matrix_of_the_real_draft(tmp_path: Path, law: str) -> None:
    tensors, config = sample()
    for i, name in enumerate(n for n, v in tensors.items() if v.ndim == 2):
        v = tensors[name]
        fresh = INITIALISERS[law][0]((v.shape[0], v.shape[1]), generator(i)).to(v.dtype)
        found = only(report_of(tmp_path / str(i), tensors | {name: fresh}, config), "VAL303")
        assert found.severity == "error"
        assert name in found.title


@pytest.mark.parametrize("gain", [1.0, 0.3])
def test_an_orthogonal_matrix_of_the_real_draft(tmp_path: Path, gain: float) -> None:
    tensors, config = sample()
    for i, name in enumerate(n for n, v in tensors.items() if v.ndim == 2 and v.shape[0] <= v.shape[1]):
        v = tensors[name]
        fresh = torch.nn.init.orthogonal_(torch.empty(v.shape), gain, generator=generator(i)).to(v.dtype)
        found = only(report_of(tmp_path / str(i), tensors | {name: fresh}, config), "VAL303")
        assert found.severity == "error"
        assert name in found.title
        assert "nn.init.orthogonal_" in found.title


def test_every_matrix_of_the_real_draft_at_once(tmp_path: Path) -> None:
    tensors, config = sample()
    fresh = {n: INITIALISERS["nn.Linear"][0]((v.shape[0], v.shape[1]), generator(5)).to(v.dtype) for n, v in tensors.items() if v.ndim == 2}
    fresh.pop("lm_head.weight")
    report = report_of(tmp_path, tensors | fresh, config)
    assert {(f.code, f.severity.value) for f in report.findings} == {("VAL303", "error")}


def test_a_fused_projection_is_judged_by_its_parts(tmp_path: Path) -> None:
    def fuse(t: Tensors) -> None:
        q, k, v = (t.pop(f"layers.0.self_attn.{p}_proj.weight") for p in "qkv")
        k = (torch.randn(k.shape, generator=generator(2)) * 0.02).to(k.dtype)
        t["layers.0.self_attn.qkv_proj.weight"] = torch.cat([q, k, v])

    found = only(judge(tmp_path, fuse, kv_heads=4, config=tiny_config(num_key_value_heads=4)), "VAL303")
    assert "(k rows)" in found.title


def test_uninitialised_memory(tmp_path: Path) -> None:
    def recycled(v: torch.Tensor) -> torch.Tensor:
        raw = torch.randint(-(2**15), 2**15, v.shape, generator=generator(3), dtype=torch.int16).view(v.dtype)
        return torch.where(torch.isfinite(raw), raw, torch.zeros_like(raw))

    found = only(judge(tmp_path, put("fc.weight", recycled)), "VAL303")
    assert found.severity == "error"
    assert "uninitialised memory" in found.title


def test_a_healthy_draft_says_nothing(tmp_path: Path) -> None:
    for i, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        assert judge(tmp_path / str(i), lambda t: None, dtype=dtype, embed=True).findings == ()
    tensors, config = sample()
    assert report_of(tmp_path / "sample", tensors, config).findings == ()


@pytest.mark.parametrize("kind", ["fp16", "fp32", "scaled", "rotated", "noisy", "cropped", "tiled"])
def test_a_trained_draft_is_trained_at_any_width(tmp_path: Path, kind: str) -> None:
    tensors, config = sample()
    g = generator(8)

    def change(v: torch.Tensor) -> torch.Tensor:
        w = v.float()
        if kind == "rotated":
            return (w @ torch.linalg.qr(torch.randn(w.shape[1], w.shape[1], generator=g))[0]).to(v.dtype)
        if kind == "noisy":
            return (w + w.std() * torch.randn(w.shape, generator=g)).to(v.dtype)
        if kind == "cropped":
            return v[: max(96, v.shape[0] // 6), : v.shape[1] // 6]
        if kind == "tiled":
            return v.repeat(2, 2)
        return {"fp16": v.half(), "fp32": w, "scaled": v * 1e-3}[kind]

    t = {n: change(v) if v.ndim == 2 else v for n, v in tensors.items()}
    assert [f for f in report_of(tmp_path, t, config).findings if f.code == "VAL303"] == []


def test_norms_of_ones_among_trained_tensors_are_a_warning(tmp_path: Path) -> None:
    def ones(t: Tensors) -> None:
        for name, v in t.items():
            if v.ndim == 1 and "norm" in name:
                t[name] = torch.ones_like(v)

    assert only(judge(tmp_path / "all", ones), "VAL303").severity == "warning"
    found = only(judge(tmp_path / "one", put("layers.0.hidden_norm.weight", torch.ones_like)), "VAL303")
    assert found.severity == "warning"
    assert "layers.0.hidden_norm.weight: exactly 1 everywhere, while" in found.title


@pytest.mark.parametrize("law", ["nn.Linear", "N(0, 0.02)", "xavier normal"])
@pytest.mark.parametrize(("width", "steps", "rate"), [(64, 300, 1e-3), (64, 100, 3e-4), (128, 300, 1e-3), (128, 300, 3e-4)])
def test_a_short_training_is_never_an_alarm(tmp_path: Path, law: str, width: int, steps: int, rate: float) -> None:
    t = honest_training(width, steps, lr=rate, law=law)
    config = tiny_config(hidden_size=width, intermediate_size=2 * width, draft_vocab_size=256)
    assert "VAL303" not in serious(report_of(tmp_path, t, config))


def test_the_same_net_before_its_training_is(tmp_path: Path) -> None:
    t = honest_training(128, 0)
    report = report_of(tmp_path, t, tiny_config(hidden_size=128, intermediate_size=256, draft_vocab_size=256))
    assert serious(report) == {"VAL303"}


def test_a_random_embedding_is_a_warning_and_left_to_the_comparison_where_there_is_one(tmp_path: Path) -> None:
    change = drawn("embed_tokens.weight", "N(0, 1)")
    assert only(judge(tmp_path / "alone", change, embed=True), "VAL303").severity == "warning"
    found = only(judge(tmp_path / "with", change, embed=True, target=True), "VAL308")
    assert "random" in found.title


# VAL304 to VAL307


def every(step: int, *, mask: bool) -> Change:
    def change(t: Tensors) -> None:
        ids = torch.arange(64) * step
        t["d2t"] = ids - torch.arange(64)
        t["t2d"].zero_()
        t["t2d"][ids] = True
        if not mask:
            del t["t2d"]

    return change


def both(*changes: Change) -> Change:
    def change(t: Tensors) -> None:
        for one in changes:
            one(t)

    return change


def without(*names: str) -> Change:
    def change(t: Tensors) -> None:
        for name in names:
            del t[name]

    return change


def shuffled_ids(t: Tensors) -> None:
    ids = absolute(t)["d2t"]
    t["d2t"] = ids[torch.randperm(64, generator=generator(6))]


def prefix(t: Tensors) -> None:
    t["t2d"].zero_()
    t["t2d"][:64] = True


no_mask, zeroed = without("t2d"), put("d2t", torch.zeros_like)

MAPS: dict[str, tuple[Change, set[str]]] = {
    "offset beyond the vocabulary": (put("d2t", lambda v: v + 10000), {"VAL304"}),
    "negative ids": (put("d2t", lambda v: v - 1000), {"VAL304"}),
    "one entry beyond": (element("d2t", 63, 300), {"VAL304"}),
    "one entry below": (element("d2t", 0, -1), {"VAL304"}),
    "absolute": (lambda t: t.update(absolute(t)), {"VAL305"}),
    "absolute without mask": (both(lambda t: t.update(absolute(t)), no_mask), {"VAL305"}),
    "absolute, unsorted": (shuffled_ids, {"VAL305"}),
    "absolute, unsorted, without mask": (both(shuffled_ids, no_mask), {"VAL305"}),
    "arange": (put("d2t", lambda v: torch.arange(64)), {"VAL305"}),
    "arange without mask": (both(put("d2t", lambda v: torch.arange(64)), no_mask), {"VAL305"}),
    "duplicate": (lambda t: t["d2t"].__setitem__(5, t["d2t"][4] - 1), {"VAL305"}),
    "fractions": (put("d2t", lambda v: v.float() + 0.5), {"VAL305"}),
    "bit patterns": (put("d2t", lambda v: torch.randint(-(2**62), 2**62, (64,), generator=generator(1))), {"VAL304"}),
    "smallest integer": (put("d2t", lambda v: torch.full_like(v, -(2**63))), {"VAL304"}),
    "mask shifted": (put("t2d", lambda v: torch.roll(v, 1)), {"VAL306"}),
    "mask of ones": (put("t2d", torch.ones_like), {"VAL306"}),
    "mask of zeros": (put("t2d", torch.zeros_like), {"VAL306"}),
    "mask with one more": (element("t2d", 255, 1), {"VAL306"}),
    "mask cut": (put("t2d", lambda v: v[:200]), {"VAL306"}),
    "mask padded": (put("t2d", lambda v: torch.cat([v, torch.zeros(44, dtype=torch.bool)])), {"VAL306"}),
    "mask a list of ids": (lambda t: t.update(t2d=absolute(t)["d2t"]), {"VAL306"}),
    "never filled": (zeroed, {"VAL307"}),
    "never filled without mask": (both(zeroed, no_mask), {"VAL307"}),
    "start values of both": (both(zeroed, put("t2d", torch.ones_like)), {"VAL307"}),
    "the first ids": (both(zeroed, prefix), {"VAL307"}),
    "empty": (put("d2t", lambda v: v[:0]), {"VAL307"}),
    "no d2t": (without("d2t"), {"VAL307"}),
    "no mapping": (without("d2t", "t2d"), {"VAL307"}),
    "sound, unsorted": (unsorted, set()),
    "sound, unsorted, without mask": (both(unsorted, no_mask), set()),
    "sound, every second token": (every(2, mask=True), set()),
    "sound, every third token, without mask": (every(3, mask=False), set()),
    "sound, mask of bytes": (put("t2d", lambda v: v.to(torch.uint8)), set()),
    "sound, mask of integers": (put("t2d", lambda v: v.to(torch.int64)), set()),
    "sound, mask empty": (put("t2d", lambda v: v[:0]), set()),
    "sound, whole floats": (put("d2t", lambda v: v.float()), set()),
    "sound, 32 bit": (put("d2t", lambda v: v.to(torch.int32)), set()),
    "sound, unsigned": (put("d2t", lambda v: v.to(torch.uint64)), set()),
    "sound, a column": (put("d2t", lambda v: v.view(64, 1)), set()),
}


@pytest.mark.parametrize("name", MAPS)
def test_one_fault_of_the_map_has_one_code(tmp_path: Path, name: str) -> None:
    change, codes = MAPS[name]
    report = judge(tmp_path, change)
    assert {f.code for f in report.findings} == codes
    assert len(report.findings) == len(codes)
    if name != "mask padded":  # it marks the right tokens
        assert all(f.severity == "error" for f in report.findings)


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (lambda t: None, set()),
        (lambda t: t.update(d2t=torch.zeros(256, dtype=torch.int64)), set()),
        (lambda t: t.update(d2t=torch.zeros(256, dtype=torch.int64), t2d=torch.ones(256, dtype=torch.bool)), set()),
        (lambda t: t.update(d2t=torch.zeros(256, dtype=torch.int64), t2d=torch.zeros(256, dtype=torch.bool)), set()),
        (lambda t: t.update(d2t=torch.arange(256)), {"VAL305"}),
    ],
)
def test_whole_vocabularies(tmp_path: Path, change: Change, codes: set[str]) -> None:
    report = judge(tmp_path, change, draft_vocab=256, config=tiny_config(draft_vocab_size=256))
    assert {f.code for f in report.findings} == codes


def test_a_shift_is_named(tmp_path: Path) -> None:
    assert "d2t's + 1" in only(judge(tmp_path, put("t2d", lambda v: torch.roll(v, 1))), "VAL306").title


def test_odd_maps_never_crash(tmp_path: Path) -> None:
    odd = [
        torch.tensor(3),
        torch.zeros(2, 2, 2),
        torch.tensor([True] * 64),
        torch.full((64,), float("nan")),
        torch.zeros(64, dtype=torch.int8),
    ]
    for i, v in enumerate(odd):
        for name in ("d2t", "t2d"):
            judge(tmp_path / f"{i}{name}", lambda t, v=v, name=name: t.update({name: v}))


# VAL308 to VAL310


def test_an_embedding_trained_on_purpose(tmp_path: Path) -> None:
    change = put("embed_tokens.weight", lambda v: v + 0.4 * v.std() * torch.randn(v.shape, generator=generator(1)).to(v.dtype))
    found = only(judge(tmp_path / "a", change, embed=True, target=True), "VAL308")
    assert found.severity == "warning"
    assert "trained from the target's" in found.title
    meant = tiny_config(embed_requires_grad=True)
    assert only(judge(tmp_path / "b", change, embed=True, target=True, config=meant), "VAL308").severity == "info"
    scratch = put(
        "embed_tokens.weight", lambda v: (v.float() @ torch.linalg.qr(torch.randn(64, 64, generator=generator(2)))[0]).to(v.dtype)
    )
    assert "trained from scratch" in only(judge(tmp_path / "c", scratch, embed=True, target=True), "VAL308").title


def test_heads_that_fit_the_target(tmp_path: Path) -> None:
    assert judge(tmp_path / "copied", lambda t: None, target=True).findings == ()
    assert judge(tmp_path / "order", unsorted, target=True).findings == ()
    noise = put("lm_head.weight", lambda v: v + v.std() * torch.randn(v.shape, generator=generator(3)).to(v.dtype))
    assert judge(tmp_path / "drifted", noise, target=True).findings == ()
    turned = put("lm_head.weight", lambda v: (v.float() @ torch.linalg.qr(torch.randn(64, 64, generator=generator(4)))[0]).to(v.dtype))
    assert judge(tmp_path / "scratch", turned, target=True).findings == ()


def test_a_head_of_other_tokens(tmp_path: Path) -> None:
    found = only(judge(tmp_path, put("lm_head.weight", lambda v: v.roll(1, 0)), target=True), "VAL309")
    assert found.severity == "error"
    assert "holds the target's rows of other tokens: row" in found.title


def test_the_real_head_under_another_map(tmp_path: Path) -> None:
    tensors, config = sample()
    tensors["d2t"] += 1  # every draft id one token too high
    tensors.pop("t2d")
    report = report_of(tmp_path, tensors, config, select=["VAL309"], target=SAMPLE / "target")
    found = only(report, "VAL309")
    assert found.severity == "error"


def test_an_unrelated_head_is_one_finding(tmp_path: Path) -> None:
    assert only(judge(tmp_path / "random", drawn("lm_head.weight"), target=True), "VAL303").severity == "error"
    structured = put("lm_head.weight", lambda v: tiny_tensors(seed=9, hidden=64, inter=64)["layers.0.mlp.up_proj.weight"])
    assert only(judge(tmp_path / "other", structured, target=True), "VAL309").severity == "warning"


def test_without_the_targets_weights_the_comparison_is_skipped_with_a_reason(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", tiny_tensors(embed=True), tiny_config())
    report = run(make_case(path, target=tiny_target(tmp_path / "target")), ["VAL308", "VAL309"])
    assert [o.status for o in report.outcomes] == ["skipped", "skipped"]
    assert all("not there" in o.why for o in report.outcomes)


def test_a_lost_tensor_against_its_source(tmp_path: Path) -> None:
    found = only(run(case_of(tmp_path, drawn("layers.0.mlp.up_proj.weight"), other=lambda t: None), ["VAL310"]), "VAL310")
    assert found.severity == "warning"
    assert list(found.evidence["unrelated"]) == ["layers.0.mlp.up_proj.weight"]


def test_two_drafts_of_one_target_are_no_fault(tmp_path: Path) -> None:
    second = tiny_tensors(seed=3)
    found = only(run(case_of(tmp_path, lambda t: None, other=lambda t: t.update(second)), ["VAL310"]), "VAL310")
    assert found.severity == "info"


# all of them


def test_headers_only_reads_nothing(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    report = run(make_case(path, headers_only=True), ["VAL"])
    assert {o.status for o in report.outcomes} == {"skipped"}
    assert all("--headers-only" in o.why for o in report.outcomes)


def test_a_truncated_file_skips_what_it_cannot_read(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2000])
    report = run(make_case(path), ["VAL301", "VAL302", "VAL303", "VAL306"])
    assert {o.status for o in report.outcomes} == {"skipped"}
    assert all("could not read" in o.why for o in report.outcomes)
    assert report.findings == ()
