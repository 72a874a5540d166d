"""TargetSpec: nested configs, families, tables found by name, the portable sample's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3diag.checkpoint.configs import schema_of
from eagle3diag.checkpoint.model import ConfigFile, TargetSpec
from eagle3diag.checkpoint.target import open_target, target_spec
from eagle3diag.errors import CheckpointError
from tests.factory import HIDDEN, VOCAB, speculators_config, target_config, target_tables, tiny_config, tiny_target, write_draft


def spec(**data: Any) -> TargetSpec:
    return target_spec(ConfigFile("config.json", schema_of(data), data), "target")


INNER = {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840, "num_attention_heads": 64, "rope_theta": 50000.0}
FAMILIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", target_config(), {"hidden_size": 64, "num_layers": 12, "rope_theta": 100000.0, "text_architecture": None}),
    (
        "kimi-k2.5",
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "text_config": INNER | {"architectures": ["DeepseekV3ForCausalLM"], "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        },
        {
            "architecture": "KimiK25ForConditionalGeneration",
            "text_architecture": "DeepseekV3ForCausalLM",
            "num_layers": 61,
            "head_dim": 192,
        },
    ),
    (
        "deepseek",
        {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}} | INNER,
        {"num_layers": 61, "quantization": "fp8", "tie_word_embeddings": False},
    ),
    (
        "deepseek-vl2",
        {"architectures": ["DeepseekVLV2ForCausalLM"], "language_config": {"hidden_size": 2560, "num_hidden_layers": 30}},
        {"hidden_size": 2560, "num_layers": 30},
    ),
    (
        "qwen3",
        {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 28, "tie_word_embeddings": True, "head_dim": 128},
        {"tie_word_embeddings": True, "head_dim": 128},
    ),
    (
        "qwen3.5",
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "text_config": {
                "hidden_size": 2048,
                "num_hidden_layers": 24,
                "rope_parameters": {"rope_theta": 1e7, "mrope_section": [11, 11, 10]},
            },
            "tie_word_embeddings": True,
        },
        {"num_layers": 24, "rope_theta": 1e7, "tie_word_embeddings": True},
    ),
    (
        "qwen3-omni",
        {
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "thinker_config": {"text_config": {"hidden_size": 2048, "num_hidden_layers": 48}},
        },
        {"hidden_size": 2048, "num_layers": 48},
    ),
    (
        "internvl",
        {
            "architectures": ["InternVLChatModel"],
            "llm_config": {"hidden_size": 4096, "num_hidden_layers": 32, "architectures": ["Qwen2ForCausalLM"]},
        },
        {"num_layers": 32, "text_architecture": "Qwen2ForCausalLM"},
    ),
    (
        "gpt-oss",
        {
            "architectures": ["GptOssForCausalLM"],
            "hidden_size": 2880,
            "num_hidden_layers": 36,
            "rope_theta": 150000,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
            "quantization_config": {"quant_method": "mxfp4"},
        },
        {"rope_theta": 150000.0, "rope_scaling": {"rope_type": "yarn", "factor": 32.0}, "quantization": "mxfp4"},
    ),
    (
        "gemma3",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        },
        {"vocab_size": 262208, "num_heads": 8, "head_dim": 256, "tie_word_embeddings": True, "rope_theta": 1e6},
    ),
    (
        "per-layer-rope",
        {
            "architectures": ["Gemma4ForCausalLM"],
            "hidden_size": 64,
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 1e4},
                "full_attention": {"rope_theta": 1e6, "rope_type": "proportional"},
            },
        },
        {"rope_theta": 1e6},
    ),
    (
        "chatglm",
        {"architectures": ["ChatGLMModel"], "hidden_size": 4096, "num_layers": 40, "padded_vocab_size": 151552, "kv_channels": 128},
        {"num_layers": 40, "vocab_size": 151552, "head_dim": 128},
    ),
    (
        "minimax",
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "hidden_size": 3072,
            "num_hidden_layers": 62,
            "head_dim": 128,
            "torch_dtype": "bfloat16",
        },
        {"num_layers": 62, "dtype": "bfloat16"},
    ),
    (
        "rotated",
        {
            "hidden_size": 64,
            "quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}},
        },
        {"quantization": "compressed-tensors with transforms"},
    ),
    (
        "nvfp4",
        {"hidden_size": 64, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        {"quantization": "modelopt NVFP4"},
    ),
]


@pytest.mark.parametrize(("name", "config", "wanted"), FAMILIES, ids=[f[0] for f in FAMILIES])
def test_families(name: str, config: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = {k: v.value for k, v in spec(**config).values().items()}
    assert {k: found[k] for k in wanted} == wanted


def test_provenance_names_the_nested_place() -> None:
    kimi = spec(**FAMILIES[1][1])
    assert kimi.hidden_size.where == "config.json: text_config.hidden_size"
    assert kimi.head_dim.where == "qk_nope_head_dim + qk_rope_head_dim"
    assert kimi.rope_theta.where == "config.json: text_config.rope_theta"


def test_folder_config_file_and_folder_with_weights(tmp_path: Path) -> None:
    bare = tiny_target(tmp_path / "bare")
    full = tiny_target(tmp_path / "full", weights=True)
    named = tmp_path / "some-target.json"
    named.write_text((bare / "config.json").read_text())
    opened = [open_target(bare), open_target(bare / "config.json"), open_target(named), open_target(full)]
    assert {t.hidden_size.value for t in opened} == {HIDDEN}
    assert [t.checkpoint is None for t in opened] == [True, True, True, False]
    assert (opened[3].embed, opened[3].head, opened[3].final_norm) == ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    assert not opened[3].rows


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tied = open_target(tiny_target(tmp_path / "t", weights=True, tie_word_embeddings=True))
    assert tied.head == tied.embed == "model.embed_tokens.weight"


def test_tables_are_found_in_any_shard_under_other_names(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "t")
    tables = target_tables()
    odd = {"model.layers.12.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "visual.merger.norm.weight": torch.zeros(HIDDEN)}
    first = {
        "language_model.model.embed_tokens.weight": tables["model.embed_tokens.weight"],
        "model.layers.3.norm.weight": torch.zeros(HIDDEN),
    }
    second = {"language_model.lm_head.weight": tables["lm_head.weight"], "wrapped.text.norm.weight": tables["model.norm.weight"]} | odd
    for name, part in (("a.safetensors", first), ("b.safetensors", second)):
        save_file(part, folder / name)
    index = {"weight_map": dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    target = open_target(folder)
    assert target.embed == "language_model.model.embed_tokens.weight"
    assert target.head == "language_model.lm_head.weight"
    assert target.final_norm == "wrapped.text.norm.weight"
    assert target.checkpoint is not None
    assert target.checkpoint.read(target.head).shape == (VOCAB, HIDDEN)


def test_weights_that_cannot_be_read_leave_the_config_usable(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "t")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 4\n")
    target = open_target(folder)
    assert target.hidden_size.value == HIDDEN
    assert target.checkpoint is None


def test_selected_rows_stand_in_for_tables(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "t", tie_word_embeddings=True)
    rows = {"token_ids": torch.arange(8, dtype=torch.int32), "embed_tokens": torch.ones(8, HIDDEN), "final_norm": torch.ones(HIDDEN)}
    save_file(rows, folder / "rows.safetensors")
    target = open_target(folder)
    assert (target.rows, target.embed, target.head, target.final_norm) == (True, "embed_tokens", "embed_tokens", "final_norm")


def test_no_readable_config_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"hidden_size": ')
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({"model.norm.weight": torch.ones(4)}, weights / "model.safetensors")
    listed = tmp_path / "list.json"
    listed.write_text("[]")
    for path, says in ((broken, "ends early"), (tmp_path / "none", "none"), (weights, "config.json"), (listed, "array"), (tmp_path, "")):
        with pytest.raises(CheckpointError) as caught:
            open_target(path)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [tiny_config(), speculators_config()])
def test_a_draft_is_no_target(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="draft's config"):
        open_target(write_draft(tmp_path / "d", None, config))


_KEYS = st.sampled_from([*target_config(), "text_config", "thinker_config", "quantization_config", "rope_parameters", "rope_scaling"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_KEYS, _VALUES, max_size=8))
def test_no_config_raises(config: dict[str, Any]) -> None:
    assert spec(**config).values()
