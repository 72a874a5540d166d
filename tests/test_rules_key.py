"""The tensor-name and shape rules beyond one firing and one quiet case: per engine, and one finding per fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3diag.rules.case import make_case
from tests.factory import DRAFT_VOCAB, dialect_draft, speculators_config, tiny_config, tiny_tensors
from tests.fixtures_cfg_key import NEW, OLD, VLLM, case, sglang, with_tensor
from tests.test_rules_cfg import found, one, serious

LAYER = "layers.0."


# ------------------------------------------------------------------ KEY203: the layer's name
@pytest.mark.parametrize(
    ("layer", "engine", "fate"),
    [
        ("layers.0", "sglang==0.4.6", "refused"),
        ("layers.0", "sglang==0.4.9", "dropped"),
        ("layers.0", OLD, "dropped"),
        ("layers.0", "sglang==0.5.11", "dropped"),
        ("layers.0", "sglang==0.5.12", ""),
        ("layers.0", "vllm==0.11.2", ""),
        ("midlayer", "sglang==0.4.6", ""),
        ("midlayer", OLD, ""),
        ("midlayer", NEW, ""),
        ("midlayer", VLLM, ""),
        ("midlayer.0", OLD, "dropped"),
        ("midlayer.0", VLLM, "refused"),
        ("model.layers.0", OLD, "dropped"),
        ("model.midlayer", OLD, ""),
        ("model.layers.0", NEW, ""),
        ("model.layers.0", VLLM, "refused"),
    ],
)
def test_layer_spelling(layer: str, engine: str, fate: str, tmp_path: Path) -> None:
    t = {k.replace(LAYER, layer + "."): v for k, v in tiny_tensors().items()}
    of = case(tmp_path, t, sglang(), engine=engine)
    got = [f for f in found(of) if f.code == "KEY203"]
    if not fate:
        assert got == []
        return
    (only,) = got
    assert fate in only.title
    assert only.evidence["tensors"] == 10
    assert only.evidence["bytes"] == sum(v.nbytes for k, v in t.items() if k.startswith(layer))
    # the layer is one fault: its tensors are not also missing, or read by nobody
    about_layer = [f.title for f in found(of) if f.code in ("KEY201", "KEY202") and "proj" in f.title]
    assert about_layer == []


def test_dropped_layer_names_both_spellings_and_the_way_out(tmp_path: Path) -> None:
    got = one(case(tmp_path, config=sglang(), engine=OLD), "KEY203")
    assert "layers.0" in got.title
    assert "midlayer" in got.title
    assert got.evidence["sglang versions that map it"] == "0.5.12 and newer"
    assert "eagle3diag convert" in got.remedy
    assert "--to sglang" in got.remedy
    assert got.engines == ("sglang 0.5.9",)


# ------------------------------------------------------------------ KEY201: missing
PARTS = (
    "fc.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.hidden_norm.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.down_proj.weight",
)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("engine", [NEW, VLLM, None])
def test_a_missing_tensor(name: str, engine: str | None, tmp_path: Path) -> None:
    of = case(tmp_path, tiny_tensors(drop=[name]), sglang(), engine=engine)
    assert serious(of) == {"KEY201"}
    got = one(of, "KEY201")
    assert (got.severity.value, name in got.title) == ("error", True)


@pytest.mark.parametrize(("start", "name"), [("random", "fc.weight"), ("ones", "norm.weight"), ("memory", "layers.0.mlp.down_proj.weight")])
def test_the_start_value_is_named(start: str, name: str, tmp_path: Path) -> None:
    assert start in one(case(tmp_path, tiny_tensors(drop=[name]), sglang(), engine=NEW), "KEY201").title


@pytest.mark.parametrize("engine", [OLD, NEW, "vllm==0.16.0", VLLM, None])
def test_what_the_target_gives_is_not_missing(engine: str | None, tmp_path: Path) -> None:
    t = tiny_tensors(layer="midlayer", embed=False, t2d=False)
    assert serious(case(tmp_path, t, sglang(), engine=engine)) == set()


def test_an_embedding_the_target_cannot_give_is_missing(tmp_path: Path) -> None:
    t, c = tiny_tensors(target_hidden=96), sglang(target_hidden_size=96)
    assert "embed_tokens" in one(case(tmp_path / "a", t, c, engine=NEW), "KEY201").title
    own = tiny_tensors(target_hidden=96, embed=True)
    assert serious(case(tmp_path / "b", own, c, engine=NEW)) == set()


@pytest.mark.parametrize("engine", [NEW, VLLM, None])
def test_a_missing_mapping_is_seen_from_headers(engine: str | None, tmp_path: Path) -> None:
    of = case(tmp_path, tiny_tensors(mapping=False), sglang(), engine=engine)
    assert serious(of) == set()  # VAL307 speaks
    got = one(replace(of, headers_only=True), "KEY201")
    assert (got.severity.value, "d2t" in got.title) == ("error", True)
    whole = case(tmp_path / "whole", tiny_tensors(draft_vocab=256), tiny_config(draft_vocab_size=256), engine=engine)
    assert found(replace(whole, headers_only=True), ["KEY201"]) == []


@pytest.mark.parametrize("prefix", ["module.", "eagle_module.", "draft_model."])
@pytest.mark.parametrize("engine", [NEW, None])
def test_a_wrapper_is_one_finding(prefix: str, engine: str | None, tmp_path: Path) -> None:
    of = case(tmp_path, {prefix + k: v for k, v in tiny_tensors().items()}, sglang(), engine=engine)
    assert serious(of) == {"KEY201"}
    got = one(of, "KEY201")
    assert prefix in got.title
    assert "Strip" in got.remedy


def test_a_wrapper_and_a_layer_name_are_two(tmp_path: Path) -> None:
    of = case(tmp_path, {"module." + k: v for k, v in tiny_tensors().items()}, sglang(), engine=OLD)
    assert serious(of) == {"KEY201", "KEY203"}


def test_bias_of_fc_in_early_sglang_is_a_warning(tmp_path: Path) -> None:
    got = one(case(tmp_path, tiny_tensors(layer="midlayer"), sglang(), engine="sglang==0.4.8"), "KEY201")
    assert (got.severity.value, got.where) == ("warning", "fc.bias")


def test_deeper_layers_need_the_norm_their_engine_reads(tmp_path: Path) -> None:
    t, c = tiny_tensors(layers=2), sglang(num_hidden_layers=2)
    assert serious(case(tmp_path / "v", t, c, engine=VLLM)) == set()
    assert "layers.1.hidden_norm.weight" in one(case(tmp_path / "s", t, c, engine=NEW), "KEY201").title


# ------------------------------------------------------------------ KEY202: read by nobody
@pytest.mark.parametrize(
    ("name", "shape", "engine", "fires"),
    [
        (LAYER + "self_attn.q_proj.bias", 64, NEW, True),
        (LAYER + "self_attn.q_proj.bias", 64, VLLM, True),
        (LAYER + "self_attn.q_norm.weight", 16, NEW, True),
        (LAYER + "self_attn.q_norm.weight", 16, VLLM, False),  # refused, ENG504
        ("verifier_norm.weight", 64, NEW, True),
        ("fc.bias", 64, NEW, True),
        ("some.t2d", 64, NEW, False),  # skipped on purpose
    ],
)
def test_unread(name: str, shape: int, engine: str, fires: bool, tmp_path: Path) -> None:
    of = case(tmp_path, with_tensor(name, torch.rand(shape).bfloat16()), sglang(), engine=engine)
    assert ("KEY202" in serious(of)) == fires
    if fires:
        got = one(of, "KEY202")
        assert (got.severity.value, name in got.title, got.evidence["bytes"]) == ("warning", True, 2 * shape)


def test_a_mapping_under_another_name_is_lost(tmp_path: Path) -> None:
    t = tiny_tensors()
    t["draft_id_to_target_id"] = t.pop("d2t")
    got = one(case(tmp_path, t, sglang(), engine=NEW), "KEY202")
    assert got.severity.value == "error"


def test_one_layer_under_two_names(tmp_path: Path) -> None:
    t = tiny_tensors()
    t |= {k.replace(LAYER, "midlayer."): v.clone() for k, v in t.items() if k.startswith(LAYER)}
    assert serious(case(tmp_path, t, sglang(), engine=NEW)) == {"KEY202"}


# ------------------------------------------------------------------ KEY206: the head
def test_missing_head(tmp_path: Path) -> None:
    t = tiny_tensors(layer="midlayer", lm_head=False)
    for i, engine in enumerate((OLD, NEW, "vllm==0.16.0", VLLM)):
        of = case(tmp_path / str(i), t, sglang(), engine=engine)
        assert serious(of) == {"KEY206"}
        assert "lm_head" in one(of, "KEY206").title
    assert serious(case(tmp_path / "none", t, sglang())) == {"KEY201"}  # no engine: nobody could borrow it


def test_head_borrowed_over_the_whole_vocabulary(tmp_path: Path) -> None:
    t = tiny_tensors(draft_vocab=256, lm_head=False)
    assert serious(case(tmp_path / "v", t, tiny_config(draft_vocab_size=256), engine=VLLM)) == set()
    assert serious(case(tmp_path / "s", t, sglang(draft_vocab_size=256), engine=NEW)) == {"KEY206"}
    assert serious(case(tmp_path / "n", t, sglang(draft_vocab_size=None), engine=NEW), ["KEY", "CFG105"]) == set()


# ------------------------------------------------------------------ KEY204, KEY205, KEY207
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"intermediate_size": 96}, ("gate_proj",)),
        ({"intermediate_size": 256}, ("gate_proj",)),
        ({"hidden_size": 48, "head_dim": 16}, ("fc.weight",)),
    ],
)
@pytest.mark.parametrize("engine", [NEW, VLLM, None])
def test_shapes_against_the_config(change: dict[str, Any], names: tuple[str, ...], engine: str | None, tmp_path: Path) -> None:
    got = one(case(tmp_path, config=sglang(**change), engine=engine), "KEY204")
    assert got.severity.value == "error"
    assert all(any(n in key for key in got.evidence) for n in names)


def test_deeper_layer_of_the_first_layers_width(tmp_path: Path) -> None:
    t = tiny_tensors(layers=2)
    t["layers.1.self_attn.q_proj.weight"] = t["layers.0.self_attn.q_proj.weight"].clone()
    assert "layers.1.self_attn.q_proj" in one(case(tmp_path, t, tiny_config(num_hidden_layers=2)), "KEY204").title


def test_t2d_is_read_by_nobody(tmp_path: Path) -> None:
    got = one(case(tmp_path, with_tensor("t2d", torch.ones(300, dtype=torch.bool))), "KEY204")
    assert (got.severity.value, got.where) == ("warning", "t2d")


def test_mapping_of_another_length_than_the_head(tmp_path: Path) -> None:
    got = one(case(tmp_path, with_tensor("d2t", torch.arange(DRAFT_VOCAB + 3))), "KEY204")
    assert got.where == "d2t"
    # a config that disagrees with head and mapping alike is CFG105's
    assert serious(case(tmp_path / "c", config=tiny_config(draft_vocab_size=32))) == {"CFG105"}


@pytest.mark.parametrize(
    ("n_aux", "config", "fires"),
    [
        (3, tiny_config(ids=[2, 6, 9, 11]), True),
        (4, tiny_config(ids=[2, 4, 6, 9]), False),
        (4, tiny_config(), True),
        (2, sglang(ids=[1, 5]), False),
        (3, tiny_config(aux=None), False),
        (2, tiny_config(aux=None), True),
        (2, tiny_config(aux=None, num_aux_hidden_states=2), False),
        (3, tiny_config(ids=[2, 2, 6, 9]), False),  # duplicates collapse in every engine; AUX403 names them
        (3, speculators_config(ids=[2, 6, 9, 12]), True),
    ],
)
def test_fc_width(n_aux: int, config: dict[str, Any], fires: bool, tmp_path: Path) -> None:
    of = case(tmp_path, tiny_tensors(n_aux=n_aux), config)
    assert ("KEY205" in serious(of)) == fires


def test_fc_width_of_a_wider_target(tmp_path: Path) -> None:
    t = tiny_tensors(target_hidden=96)
    assert found(case(tmp_path / "a", t, tiny_config(target_hidden_size=96)), ["KEY205"]) == []
    got = one(case(tmp_path / "b", t, tiny_config(), target={"hidden_size": 96, "num_attention_heads": 6}), "KEY205")
    assert "target_hidden_size: 96" in got.remedy


@pytest.mark.parametrize(("held", "declared", "fires"), [(1, 2, True), (2, 1, True), (2, 2, False), (1, 1, False)])
@pytest.mark.parametrize("engine", [VLLM, None])
def test_layer_count(held: int, declared: int, fires: bool, engine: str | None, tmp_path: Path) -> None:
    of = case(tmp_path, tiny_tensors(layers=held), tiny_config(num_hidden_layers=declared), engine=engine)
    assert serious(of) == ({"KEY207"} if fires else set())


# ------------------------------------------------------------------ KEY208, KEY209, KEY210
def test_absent_shard_is_one_finding(tmp_path: Path) -> None:
    from tests.fixtures_cfg_key import FIRING

    of = FIRING["KEY208"](tmp_path)
    assert serious(of) == {"KEY208"}
    assert "model-00002" in one(of, "KEY208").title


@pytest.mark.parametrize(("dtype", "engine", "severity"), [
    (torch.float32, NEW, "error"), (torch.float16, OLD, "error"), (torch.float32, VLLM, "warning"), (torch.bfloat16, None, "warning"),
])  # fmt: skip
def test_float_mapping(dtype: torch.dtype, engine: str | None, severity: str, tmp_path: Path) -> None:
    t = tiny_tensors(layer="midlayer")
    t["d2t"] = t["d2t"].to(dtype)
    got = one(case(tmp_path, t, sglang(), engine=engine), "KEY209")
    assert (got.severity.value, got.where) == (severity, "d2t")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_whole_number_mapping(dtype: torch.dtype, tmp_path: Path) -> None:
    t = tiny_tensors()
    t["d2t"], t["t2d"] = t["d2t"].to(dtype), t["t2d"].to(torch.uint8)
    assert found(case(tmp_path, t), ["KEY209"]) == []


def test_mixed_precision(tmp_path: Path) -> None:
    t = tiny_tensors()
    t["fc.weight"] = t["fc.weight"].float()
    assert "fc.weight in F32" in one(case(tmp_path, t), "KEY209").title


def test_quantised_without_saying_so(tmp_path: Path) -> None:
    t = with_tensor("layers.0.mlp.up_proj.weight_scale", torch.ones(1))
    t["layers.0.mlp.up_proj.weight"] = t["layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    assert "quantised" in one(case(tmp_path / "a", t), "KEY209").title
    said = tiny_config(quantization_config={"quant_method": "fp8"})
    assert found(case(tmp_path / "b", t, said), ["KEY209"]) == []


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_truncated_file(share: float, tmp_path: Path) -> None:
    folder = dialect_draft(tmp_path / "draft", "vllm")
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * share)])
    assert serious(make_case(folder)) == {"KEY210"}


def test_trailing_bytes(tmp_path: Path) -> None:
    folder = dialect_draft(tmp_path / "draft", "vllm")
    with (folder / "model.safetensors").open("ab") as f:
        f.write(b"more")
    assert serious(make_case(folder)) == {"KEY210"}
