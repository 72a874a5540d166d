"""Full-size drafts whose headers are real and whose data is a hole in the file: names and shapes need no weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

KIMI_TARGET = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "n_routed_experts": 384,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
    },
}

KIMI_DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
}


def shapes_of(c: dict[str, Any], layer: str = "layers.0", n_aux: int = 3) -> dict[str, tuple[str, list[int]]]:
    """Names, dtypes and shapes of an EAGLE-3 draft of this config."""
    h, inter, q, kv = (
        c["hidden_size"],
        c["intermediate_size"],
        c["num_attention_heads"] * c["head_dim"],
        c["num_key_value_heads"] * c["head_dim"],
    )
    bf16 = {
        f"{layer}.hidden_norm.weight": [h],
        f"{layer}.input_layernorm.weight": [h],
        f"{layer}.post_attention_layernorm.weight": [h],
        f"{layer}.mlp.gate_proj.weight": [inter, h],
        f"{layer}.mlp.up_proj.weight": [inter, h],
        f"{layer}.mlp.down_proj.weight": [h, inter],
        f"{layer}.self_attn.q_proj.weight": [q, 2 * h],
        f"{layer}.self_attn.k_proj.weight": [kv, 2 * h],
        f"{layer}.self_attn.v_proj.weight": [kv, 2 * h],
        f"{layer}.self_attn.o_proj.weight": [h, q],
        "fc.weight": [h, n_aux * h],
        "norm.weight": [h],
        "lm_head.weight": [c["draft_vocab_size"], h],
        "embed_tokens.weight": [c["vocab_size"], h],
    }
    out = {name: ("BF16", shape) for name, shape in bf16.items()}
    return out | {"d2t": ("I64", [c["draft_vocab_size"]]), "t2d": ("BOOL", [c["vocab_size"]])}


def sparse_draft(folder: Path, config: dict[str, Any], layer: str = "layers.0", **other_configs: Any) -> Path:
    """Write ``folder/draft`` with a real header and a hole for data; more configs by file stem."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in shapes_of(config, layer).items():
        size = {"BF16": 2, "I64": 8, "BOOL": 1}[dtype]
        for d in shape:
            size *= d
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    where = folder / "draft"
    where.mkdir(parents=True)
    with (where / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    for stem, content in {"config": config, **other_configs}.items():
        (where / f"{stem}.json").write_text(json.dumps(content))
    return where


def target(folder: Path, config: dict[str, Any]) -> Path:
    """Write ``folder/target/config.json``."""
    where = folder / "target"
    where.mkdir(parents=True)
    (where / "config.json").write_text(json.dumps(config))
    return where
