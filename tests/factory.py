"""Tiny Llama-shaped EAGLE-3 drafts and targets that look trained, for every test of the project.

Hidden 64, 4 heads, 2 kv heads of 16, MLP 128, vocabulary 256, draft vocabulary 64, target of 12 layers trained on at HF indices 2, 6, 9
(the default formula). Values are no fresh initialisation: matrices are low rank plus heavy-tailed noise with per-row and per-column scales,
norms vary, ``lm_head`` and ``embed_tokens`` are the target's own rows. Every keyword changes one thing; `dialect_draft` (the writers of
``tests/dialects.py``) writes a healthy draft the way each training framework does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, VOCAB, DRAFT_VOCAB, TARGET_LAYERS = 64, 4, 2, 16, 128, 256, 64, 12
AUX_HF = (2, 6, 9)  # HF indices: [2, N//2, N-3]
AUX_LAYER_OUTPUT = (1, 5, 8)  # the same states in the layer-output convention
THETA = 100000.0


def _generator(seed: int, name: str) -> torch.Generator:
    mixed = seed
    for c in name:
        mixed = (mixed * 131 + ord(c)) % (1 << 31)
    return torch.Generator().manual_seed(mixed)


def trained(name: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """A float32 tensor that looks trained: norms around one with outliers, matrices low rank plus heavy-tailed, unevenly scaled noise."""
    g = _generator(seed, name)
    if len(shape) == 1:
        out = 1.0 + 0.12 * torch.randn(shape, generator=g)
        out[:: max(1, shape[0] // 5)] *= 1.6
        return out
    rows, cols = shape[-2], shape[-1]
    noise = torch.randn(shape, generator=g) / torch.randn(shape, generator=g).square().add(0.35).sqrt()
    scales = (0.35 * torch.randn((rows, 1), generator=g)).exp() * (0.35 * torch.randn((1, cols), generator=g)).exp()
    rank = max(2, min(rows, cols) // 12)
    low = torch.randn((*shape[:-1], rank), generator=g) @ torch.randn((*shape[:-2], rank, cols), generator=g) / rank**0.5
    return (0.6 * noise * scales + 0.8 * low) * 0.6 * cols**-0.5


def target_tables(vocab: int = VOCAB, hidden: int = HIDDEN) -> Tensors:
    """The tiny target's own embedding, head and final norm, float32: the same on every call."""
    return {
        "model.embed_tokens.weight": 4 * trained("target.embed", vocab, hidden),
        "lm_head.weight": 3 * trained("target.head", vocab, hidden),
        "model.norm.weight": 2 * trained("target.norm", hidden),
    }


def draft_ids(vocab: int = VOCAB, draft_vocab: int = DRAFT_VOCAB) -> torch.Tensor:
    """The target ids of the draft vocabulary, ascending, frequent (low) ones more likely."""
    if draft_vocab == vocab:
        return torch.arange(vocab)
    weights = 1.0 / (8.0 + torch.arange(vocab).float())
    return torch.multinomial(weights, draft_vocab, generator=torch.Generator().manual_seed(3)).sort().values


def tiny_tensors(
    *,
    layer: str = "layers.0",
    layers: int = 1,
    hidden: int = HIDDEN,
    target_hidden: int | None = None,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    inter: int = INTER,
    vocab: int = VOCAB,
    draft_vocab: int = DRAFT_VOCAB,
    n_aux: int = 3,
    embed: bool = False,
    lm_head: bool = True,
    mapping: bool = True,
    t2d: bool = True,
    sort: bool = True,
    input_norm: bool = False,
    fc_norm: bool = False,
    qk_norm: bool = False,
    bias: bool = False,
    mla: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    drop: Iterable[str] = (),
    prefix: str = "",
) -> Tensors:
    """The tensors of a healthy draft.

    Args:
        layer: name of the first decoder layer in the file (``layers.0``, ``midlayer``, ``midlayer.0``); deeper layers are ``layers.i``,
            or ``midlayer.i`` where the first is ``midlayer.0``.
        layers: decoder layers.
        target_hidden: width of the target's states where it differs from ``hidden``.
        n_aux: aux states in front of ``fc``.
        mapping, t2d, sort: write d2t, write t2d, ids ascending (False: frequency order, as ModelOpt).
        input_norm, fc_norm, qk_norm, bias, mla: the optional tensors (bias: q, k, v and o).
        dtype: of every floating-point tensor.
        seed: another seed is another draft of the same target.
        drop: names (before the prefix) to leave out.
        prefix: put in front of every name.
    """
    wide = target_hidden or hidden
    tables = target_tables(vocab, wide)
    ids = draft_ids(vocab, draft_vocab)
    if not sort:
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))]
    t: Tensors = {}

    def put(name: str, *shape: int) -> None:
        t[name] = trained(name.replace(layer, "layers.0"), *shape, seed=seed)

    for i in range(layers):
        at = layer if i == 0 else (f"midlayer.{i}" if layer == "midlayer.0" else f"layers.{i}")
        width = 2 * hidden if i == 0 else hidden
        put(f"{at}.input_layernorm.weight", hidden)
        put(f"{at}.post_attention_layernorm.weight", hidden)
        if i == 0:
            put(f"{at}.hidden_norm.weight", hidden)
        if mla:
            _mla(put, at, width, hidden, heads)
        else:
            for p, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                put(f"{at}.self_attn.{p}_proj.weight", n * head_dim, width)
                if bias:
                    put(f"{at}.self_attn.{p}_proj.bias", n * head_dim)
            put(f"{at}.self_attn.o_proj.weight", hidden, heads * head_dim)
            if bias:
                put(f"{at}.self_attn.o_proj.bias", hidden)
        if qk_norm:
            put(f"{at}.self_attn.q_norm.weight", head_dim)
            put(f"{at}.self_attn.k_norm.weight", head_dim)
        put(f"{at}.mlp.gate_proj.weight", inter, hidden)
        put(f"{at}.mlp.up_proj.weight", inter, hidden)
        put(f"{at}.mlp.down_proj.weight", hidden, inter)
    put("fc.weight", hidden, n_aux * wide)
    put("norm.weight", hidden)
    if input_norm:
        put("input_norm.weight", n_aux * wide)
    if fc_norm:
        for k in range(n_aux):
            put(f"fc_norm.{k}.weight", wide)
    same = wide == hidden
    if lm_head:
        t["lm_head.weight"] = tables["lm_head.weight"][ids] if same else 3 * trained("draft.head", len(ids), hidden, seed=seed)
    if embed:
        t["embed_tokens.weight"] = tables["model.embed_tokens.weight"] if same else 4 * trained("draft.embed", vocab, hidden, seed=seed)
    out = {k: v.to(dtype) for k, v in t.items()}
    if mapping and draft_vocab != vocab:
        out["d2t"] = ids - torch.arange(len(ids))
        if t2d:
            mask = torch.zeros(vocab, dtype=torch.bool)
            mask[ids] = True
            out["t2d"] = mask
    return {prefix + k: v for k, v in out.items() if k not in set(drop)}


def _mla(put: Any, at: str, width: int, hidden: int, heads: int) -> None:
    a, q_lora, kv_lora, nope, rope, v = f"{at}.self_attn", 32, 16, 16, 8, 16
    put(f"{a}.q_a_proj.weight", q_lora, width)
    put(f"{a}.q_a_layernorm.weight", q_lora)
    put(f"{a}.q_b_proj.weight", heads * (nope + rope), q_lora)
    put(f"{a}.kv_a_proj_with_mqa.weight", kv_lora + rope, width)
    put(f"{a}.kv_a_layernorm.weight", kv_lora)
    put(f"{a}.kv_b_proj.weight", heads * (nope + v), kv_lora)
    put(f"{a}.o_proj.weight", hidden, heads * v)


def _layer_facts() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "max_position_embeddings": 4096,
        "vocab_size": VOCAB,
        "attention_bias": False,
        "mlp_bias": False,
    }


def tiny_config(*, aux: str | None = "top", ids: Iterable[int] | None = None, drop: Iterable[str] = (), **change: Any) -> dict[str, Any]:
    """A flat draft config.

    Args:
        aux: where the ids stand: ``top`` (HF indices), ``nested`` (layer-output ids under ``eagle_config``) or None.
        ids: other ids than the default layers, as written.
        drop: keys to leave out.
        change: keys to set.
    """
    c: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_facts(),
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "initializer_range": 0.02,
    }
    if aux == "top":
        c["eagle_aux_hidden_state_layer_ids"] = list(AUX_HF if ids is None else ids)
    elif aux == "nested":
        nested = list(AUX_LAYER_OUTPUT if ids is None else ids)
        c["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": nested, "use_aux_hidden_state": True}
    c.update(change)
    return {k: v for k, v in c.items() if k not in set(drop)}


def speculators_config(
    flat: Mapping[str, Any] | None = None, *, ids: Iterable[int] | None = AUX_HF, model_type: str = "llama", **top: Any
) -> dict[str, Any]:
    """A nested speculators config (0.6 habits) of the same draft; ``ids=None`` writes null as 0.3 and 0.4 did."""
    c = dict(flat or tiny_config(aux=None))
    keys = (*_layer_facts(), "num_hidden_layers", "rope_scaling", "rope_parameters")
    layer = {k: c[k] for k in keys if k in c} | {"model_type": model_type}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    out: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "speculators_model_type": "eagle3",
        "speculators_version": "0.6.0", "draft_vocab_size": c["draft_vocab_size"], "dtype": "bfloat16", "norm_before_residual": False,
        "norm_before_fc": False, "target_hidden_size": None, "tie_word_embeddings": False, "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": None if ids is None else list(ids),
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method],
                               "verifier": {"name_or_path": "tiny/target", "architectures": ["LlamaForCausalLM"]}},
        "transformer_layer_config": layer,
    }  # fmt: skip
    out.update(top)
    return out


def target_config(**change: Any) -> dict[str, Any]:
    """The config of the tiny target: a 12-layer Llama."""
    c: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        **_layer_facts(),
        "intermediate_size": 2 * INTER,
        "num_hidden_layers": TARGET_LAYERS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    c.update(change)
    return c


def write_draft(folder: Path, tensors: Tensors | None, config: Mapping[str, Any] | None, **extra_json: Any) -> Path:
    """Write ``model.safetensors`` and ``config.json`` (each may be None) into ``folder``; ``extra_json`` names more JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is not None:
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for stem, data in extra_json.items():
        (folder / f"{stem}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    return folder


def tiny_target(folder: Path, *, weights: bool = False, **change: Any) -> Path:
    """Write the tiny target's config (keys changed by ``change``), with its embedding, head and final norm in bfloat16 if asked for."""
    config = target_config(**change)
    tensors = None
    if weights:
        tensors = {k: v.to(torch.bfloat16) for k, v in target_tables(config["vocab_size"], config["hidden_size"]).items()}
        if config["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
    return write_draft(folder, tensors, config)


def dialect_draft(folder: Path, dialect: str) -> Path:
    """A healthy tiny draft as the framework ``dialect`` (a key of ``tests.dialects.WRITERS``) writes it."""
    from tests.dialects import WRITERS

    return WRITERS[dialect](folder)
