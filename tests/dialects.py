"""A healthy tiny draft as each training framework writes it: file kind, names, config habits (sections 1 and 2 of the dialects)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.factory import (
    AUX_LAYER_OUTPUT,
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    Tensors,
    speculators_config,
    tiny_config,
    tiny_tensors,
    trained,
    write_draft,
)

THETA = 100000.0
SPECFORGE_IDS = [1, TARGET_LAYERS // 2 - 1, TARGET_LAYERS - 4]


def save_torch(folder: Path, name: str, payload: Any, config: dict[str, Any] | None) -> Path:
    """A torch file and, if given, its config."""
    write_draft(folder, None, config)
    torch.save(payload, folder / name)
    return folder


def _specforge_config(**change: Any) -> dict[str, Any]:
    rope = {"rope_theta": THETA, "rope_type": "default"}
    return tiny_config(aux="nested", ids=SPECFORGE_IDS, rope_parameters=rope, rope_scaling=None, target_model_type="llama", **change)


def specforge(folder: Path) -> Path:
    """``specforge export --to hf``: embeddings included, RoPE in both schemas."""
    return write_draft(folder, tiny_tensors(layer="midlayer", embed=True), _specforge_config())


def specforge_sglang(folder: Path) -> Path:
    """``specforge export --to sglang``: no embeddings."""
    return write_draft(folder, tiny_tensors(layer="midlayer"), _specforge_config())


def specforge_training(folder: Path) -> Path:
    """``training_state.pt`` of a run: the draft beside optimiser and strategy, no config."""
    state = {"draft_state_dict": tiny_tensors(layer="midlayer"), "strategy": "eagle3", "optimizer": {"step": 10}, "global_step": 10}
    return save_torch(folder, "training_state.pt", state, None)


def safeailab(folder: Path) -> Path:
    """DeepSpeed's 16-bit ``pytorch_model.bin``, config copied by hand, no RoPE base, no ids."""
    config = tiny_config(aux=None, architectures=["LlamaForCausalLM"], drop=("rope_theta", "dtype"), torch_dtype="float16")
    return save_torch(folder, "pytorch_model.bin", tiny_tensors(layer="midlayer", dtype=torch.float16), config)


def _modelopt_config(**change: Any) -> dict[str, Any]:
    eagle = {
        "eagle_aux_hidden_state_layer_ids": SPECFORGE_IDS, "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }  # fmt: skip
    return tiny_config(aux=None, rope_theta=10000.0, eagle_config=eagle, drop=("use_cache", "initializer_range"), **change)


def modelopt(folder: Path) -> Path:
    """ModelOpt's HF export: draft ids in frequency order, no t2d, no embeddings, YaRN put in at export; a first norm close to constant."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    t = tiny_tensors(sort=False, t2d=False)
    t["layers.0.input_layernorm.weight"] = (1.0 + 0.02 * (t["layers.0.input_layernorm.weight"].float() - 1.0)).to(torch.bfloat16)
    return write_draft(folder, t, _modelopt_config(rope_scaling=yarn))


def modelopt_megatron(folder: Path) -> Path:
    """ModelOpt's Megatron export: ``midlayer.*``, full vocabulary, since it never writes d2t."""
    return write_draft(folder, tiny_tensors(layer="midlayer", draft_vocab=VOCAB), _modelopt_config(draft_vocab_size=VOCAB))


def modelopt_megatron_deep(folder: Path) -> Path:
    """Two layers named ``midlayer.{i}``; deeper input norms are called hidden_norm. Neither engine loads it."""
    t = tiny_tensors(layer="midlayer.0", layers=2, draft_vocab=VOCAB)
    t["midlayer.1.hidden_norm.weight"] = t.pop("midlayer.1.input_layernorm.weight")
    config = _modelopt_config(architectures=["LlamaForCausalLMEagle3Deep"], num_hidden_layers=2, draft_vocab_size=VOCAB)
    return write_draft(folder, t, config)


def angelslim(folder: Path) -> Path:
    """An HF Trainer save: embeddings included, ids under a key no engine reads, trained at RoPE base 10000."""
    ids = list(AUX_LAYER_OUTPUT)
    config = tiny_config(aux=None, architectures=["Eagle3LlamaForCausalLM"], rope_theta=10000.0, aux_hidden_states_layer_ids=ids)
    return write_draft(folder, tiny_tensors(layer="midlayer", embed=True), config)


def speculators_04(folder: Path) -> Path:
    """speculators 0.4: ids null (captured one layer later than any default), residual normed, no RoPE facts, leaked class variables."""
    config = speculators_config(ids=None, speculators_version="0.4.0", norm_before_residual=True, has_no_defaults_at_init=False)
    del config["norm_before_fc"]
    for key in ("rope_theta", "rope_scaling"):
        config["transformer_layer_config"].pop(key, None)
    return write_draft(folder, tiny_tensors(embed=True), config)


def speculators_06(folder: Path) -> Path:
    """speculators 0.6: a Llama layer, ids as HF indices, RoPE copied from the verifier."""
    return write_draft(folder, tiny_tensors(embed=True), speculators_config(norm_before_residual=True))


def _speculators_09(model_type: str) -> dict[str, Any]:
    config = speculators_config(
        model_type=model_type,
        architectures=["Eagle3DraftModel"],
        speculators_version="0.9.0",
        norm_before_residual=True,
        norm_before_fc=True,
        fc_norm=False,
        norm_output=True,
    )
    layer = config["transformer_layer_config"]
    layer.pop("rope_theta")
    layer["rope_parameters"] = {"rope_theta": THETA, "rope_type": "default"}
    layer |= {"layer_types": ["sliding_attention"], "sliding_window": 2048}
    layer |= {"use_sliding_window": True} if model_type == "qwen3" else {}
    return config


def speculators_09(folder: Path) -> Path:
    """speculators 0.9 defaults: input_norm, post-norm feedback, sliding window, RoPE parameters."""
    return write_draft(folder, tiny_tensors(embed=True, input_norm=True), _speculators_09("llama"))


def speculators_09_qwen3(folder: Path) -> Path:
    """The same with a Qwen3 layer: q_norm and k_norm."""
    return write_draft(folder, tiny_tensors(embed=True, input_norm=True, qk_norm=True), _speculators_09("qwen3"))


def flat_export(folder: Path) -> Path:
    """A trainer's own flat export of a speculators draft for vLLM: ``layers.0.*``, ids at the top level."""
    return write_draft(folder, tiny_tensors(embed=True), tiny_config(norm_before_residual=False))


def flat_export_nested(folder: Path) -> Path:
    """The same for SGLang: ids inside ``eagle_config``, counted as layer outputs."""
    return write_draft(folder, tiny_tensors(embed=True), tiny_config(aux="nested"))


def vllm(folder: Path) -> Path:
    """A flat draft under vLLM's own class name."""
    return write_draft(folder, tiny_tensors(), tiny_config(architectures=["Eagle3LlamaForCausalLM"]))


def mla(folder: Path) -> Path:
    """ModelOpt's Kimi export: latent attention over 2H, dense MLP."""
    t = tiny_tensors(mla=True, sort=False, t2d=False)
    config = _modelopt_config(
        architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    return write_draft(folder, t, {k: v for k, v in config.items() if k != "head_dim"})


def peagle(folder: Path) -> Path:
    """speculators P-EAGLE: four layers, a mask state, embeddings trained."""
    t = tiny_tensors(layers=4, embed=True)
    t["mask_hidden"] = trained("mask_hidden", 1, 1, 3 * HIDDEN).to(torch.bfloat16)
    t["embed_tokens.weight"] = trained("peagle.embed", VOCAB, HIDDEN).to(torch.bfloat16)
    change = {"architectures": ["PEagleSpeculator"], "mask_token_id": 3, "embed_requires_grad": True}
    config = speculators_config(speculators_model_type="peagle", **change)
    config["transformer_layer_config"]["num_hidden_layers"] = 4
    config["speculators_config"]["algorithm"] = "peagle"
    return write_draft(folder, t, config)


def _eagle1_tensors() -> Tensors:
    gone = ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight", "lm_head.weight")
    t = tiny_tensors(embed=True, mapping=False, n_aux=2, drop=gone)
    for p in "qkv":
        name = f"layers.0.self_attn.{p}_proj.weight"
        t[name] = t[name][:, :HIDDEN].contiguous()
    t["fc.bias"] = trained("fc.bias", HIDDEN).to(torch.bfloat16)
    return t


def eagle1(folder: Path) -> Path:
    """An EAGLE-1 draft: fc over [embedding, state], a plain first layer, no head."""
    config = tiny_config(aux=None, architectures=["LlamaForCausalLM"], drop=("draft_vocab_size",), bias=True)
    return save_torch(folder, "pytorch_model.bin", _eagle1_tensors(), config)


def hass(folder: Path) -> Path:
    """A HASS draft: EAGLE-1 with norms around embedding, state and head."""
    t = _eagle1_tensors()
    for name in ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm"):
        t[f"{name}.weight"] = trained(name, HIDDEN).to(torch.bfloat16)
    return write_draft(folder, t, tiny_config(aux=None, architectures=["LlamaForCausalLM"], drop=("draft_vocab_size",)))


def dflash(folder: Path) -> Path:
    """A DFlash draft: hidden_norm at the top level, attention over H with q_norm and k_norm."""
    t = tiny_tensors(qk_norm=True, mapping=False, drop=("lm_head.weight",))
    t["hidden_norm.weight"] = t.pop("layers.0.hidden_norm.weight")
    for p in "qkv":
        name = f"layers.0.self_attn.{p}_proj.weight"
        t[name] = t[name][:, :HIDDEN].contiguous()
    dflash_config = {"mask_token_id": 3, "target_layer_ids": SPECFORGE_IDS}
    return write_draft(folder, t, tiny_config(aux=None, architectures=["DFlashDraftModel"], dflash_config=dflash_config, block_size=8))


def mtp(folder: Path) -> Path:
    """A speculators MTP draft (converted Qwen head)."""
    t = {f"mtp_layers.0.{k.removeprefix('layers.0.')}": v for k, v in tiny_tensors(mapping=False).items() if k.startswith("layers.0.")}
    for part in ("final_layernorm", "hidden_layernorm", "token_layernorm"):
        t[f"mtp_layers.0.{part}.weight"] = trained(part, HIDDEN).to(torch.bfloat16)
    t["mtp_layers.0.input_proj.weight"] = trained("input_proj", HIDDEN, 2 * HIDDEN).to(torch.bfloat16)
    config = speculators_config(speculators_model_type="mtp", architectures=["MTPSpeculator"])
    config["speculators_config"]["algorithm"] = "mtp"
    return write_draft(folder, t, config)


def engine_dump(folder: Path) -> Path:
    """The state dict of a running vLLM drafter: ``model.`` prefix, fused projections, the mapping under vLLM's name."""
    t = tiny_tensors(t2d=False)
    a, m = "layers.0.self_attn.", "layers.0.mlp."
    t[f"{a}qkv_proj.weight"] = torch.cat([t.pop(f"{a}{p}_proj.weight") for p in "qkv"])
    t[f"{m}gate_up_proj.weight"] = torch.cat([t.pop(f"{m}{p}_proj.weight") for p in ("gate", "up")])
    out = {"draft_id_to_target_id" if k == "d2t" else k if k == "lm_head.weight" else f"model.{k}": v for k, v in t.items()}
    return write_draft(folder, out, tiny_config(architectures=["Eagle3LlamaForCausalLM"]))


WRITERS: dict[str, Callable[[Path], Path]] = {
    "specforge": specforge,
    "specforge-sglang": specforge_sglang,
    "specforge-training": specforge_training,
    "safeailab": safeailab,
    "modelopt": modelopt,
    "modelopt-megatron": modelopt_megatron,
    "modelopt-megatron-deep": modelopt_megatron_deep,
    "angelslim": angelslim,
    "speculators-0.4": speculators_04,
    "speculators-0.6": speculators_06,
    "speculators-0.9": speculators_09,
    "speculators-0.9-qwen3": speculators_09_qwen3,
    "flat-export": flat_export,
    "flat-export-nested": flat_export_nested,
    "vllm": vllm,
    "mla": mla,
    "peagle": peagle,
    "eagle1": eagle1,
    "hass": hass,
    "dflash": dflash,
    "mtp": mtp,
    "engine-dump": engine_dump,
}

#: dialects with an engine that suits them: served there they are healthy
HEALTHY: dict[str, tuple[str, ...]] = {
    "specforge": ("sglang==0.5.9", "sglang==0.5.23"),
    "specforge-sglang": ("sglang==0.5.9", "sglang==0.5.23"),
    "modelopt": ("sglang==0.5.23",),
    "modelopt-megatron": ("sglang==0.5.9",),
    "angelslim": ("vllm==0.16.0", "vllm==0.33.0"),
    "safeailab": ("vllm==0.16.0", "vllm==0.33.0"),
    "speculators-0.6": ("vllm==0.16.0", "vllm==0.33.0"),
    "speculators-0.9": ("vllm==0.33.0",),
    "speculators-0.9-qwen3": ("vllm==0.33.0",),
    "flat-export": ("vllm==0.16.0", "vllm==0.33.0"),
    "flat-export-nested": ("sglang==0.5.23",),
    "vllm": ("vllm==0.16.0", "vllm==0.33.0"),
    "mla": ("sglang==0.5.23",),
}


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a written draft, to change it."""
    data: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return data
