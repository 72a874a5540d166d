"""What the tensors' shapes say by themselves, so that a rule can hold it against what the config says.

Only headers are looked at. Facts that need a config value to divide by (heads, ``n_aux``) take it from the config and say so; a division
that leaves a remainder yields no fact, and the rule that owns the shape reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3diag.checkpoint.configs import layer_part
from eagle3diag.checkpoint.fields import as_int
from eagle3diag.checkpoint.model import Checkpoint, TensorInfo
from eagle3diag.checkpoint.names import layer_numbers
from eagle3diag.provenance import Valued

__all__ = ["shape_facts"]

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def shape_facts(checkpoint: Checkpoint, canonical: Mapping[str, str]) -> dict[str, Valued[Any]]:
    """Facts by the names of `DraftSpec`'s fields, plus ``fc_in`` and ``fc_out``; only what the shapes really tell.

    Packed quantised weights (integer storage) are passed over: their widths are not the matrix's.
    """
    tensors = {c: checkpoint.tensors[f] for c, f in canonical.items()}
    facts: dict[str, Valued[Any]] = {}

    def shape(name: str, rank: int) -> tuple[int, ...] | None:
        info = tensors.get(name)
        return info.shape if info is not None and len(info.shape) == rank and info.dtype in _DTYPES else None

    def put(fact: str, value: int | None, name: str) -> None:
        if value is not None and value > 0 and fact not in facts:
            facts[fact] = Valued(value, "shape", f"shape of {canonical[name]}")

    at = "layers.0."
    for name in ("norm.weight", f"{at}post_attention_layernorm.weight", f"{at}hidden_norm.weight", f"{at}input_layernorm.weight"):
        if (s := shape(name, 1)) is not None:
            put("hidden_size", s[0], name)
    for name, axis in (("fc.weight", 0), ("lm_head.weight", 1), ("embed_tokens.weight", 1)):
        if (s := shape(name, 2)) is not None:
            put("hidden_size", s[axis], name)
    if (s := shape("embed_tokens.weight", 2)) is not None:
        put("vocab_size", s[0], "embed_tokens.weight")
    if "t2d" in tensors and len(tensors["t2d"].shape) == 1:
        put("vocab_size", tensors["t2d"].shape[0], "t2d")
    if (s := shape("lm_head.weight", 2)) is not None:
        put("draft_vocab_size", s[0], "lm_head.weight")
    if "d2t" in tensors and len(tensors["d2t"].shape) == 1:
        put("draft_vocab_size", tensors["d2t"].shape[0], "d2t")
    for name, axis, part in (("gate_proj", 0, 1), ("up_proj", 0, 1), ("down_proj", 1, 1), ("gate_up_proj", 0, 2)):
        full = f"layers.0.mlp.{name}.weight"
        if (s := shape(full, 2)) is not None and s[axis] % part == 0:
            put("intermediate_size", s[axis] // part, full)
    layers = layer_numbers(canonical)
    if layers:
        facts["num_layers"] = Valued(len(layers), "shape", f"layers {', '.join(map(str, layers[:8]))} in the file")
    _heads(checkpoint, facts, shape, put)
    _fusion(checkpoint, tensors, canonical, facts, shape)
    by_dtype: dict[str, int] = {}
    for info in tensors.values():
        if info.dtype in _DTYPES:
            by_dtype[info.dtype] = by_dtype.get(info.dtype, 0) + info.nbytes
    if by_dtype:
        most = max(by_dtype, key=lambda d: by_dtype[d])
        facts["dtype"] = Valued(_DTYPES[most], "shape", f"dtype of {by_dtype[most]:,} bytes of tensors")
    return facts


def _stated(checkpoint: Checkpoint, key: str) -> int | None:
    """A positive count from the first config that states it, layer part or top level."""
    for config in checkpoint.configs:
        for part in (layer_part(config)[1], config.data):
            value = as_int(part.get(key))
            if value is not None and 0 < value < 1 << 26:
                return value
    return None


def _heads(checkpoint: Checkpoint, facts: dict[str, Valued[Any]], shape: Any, put: Any) -> None:
    at = "layers.0.self_attn."
    for norm in ("q_norm.weight", "k_norm.weight"):
        if (s := shape(at + norm, 1)) is not None:
            put("head_dim", s[0], at + norm)
    q, k, qkv = shape(at + "q_proj.weight", 2), shape(at + "k_proj.weight", 2), shape(at + "qkv_proj.weight", 2)
    heads, kv, dim = _stated(checkpoint, "num_attention_heads"), _stated(checkpoint, "num_key_value_heads"), _stated(checkpoint, "head_dim")
    if "head_dim" not in facts and heads is not None and q is not None and q[0] % heads == 0:
        put("head_dim", q[0] // heads, at + "q_proj.weight")
    known = facts["head_dim"].value if "head_dim" in facts and dim is None else dim
    if known is None:
        return
    if q is not None and q[0] % known == 0:
        put("num_heads", q[0] // known, at + "q_proj.weight")
    if k is not None and k[0] % known == 0:
        put("num_kv_heads", k[0] // known, at + "k_proj.weight")
    if qkv is not None and qkv[0] % known == 0:
        rows = qkv[0] // known
        if heads is not None and rows > heads and (rows - heads) % 2 == 0:
            put("num_kv_heads", (rows - heads) // 2, at + "qkv_proj.weight")
        if kv is not None and rows > 2 * kv:
            put("num_heads", rows - 2 * kv, at + "qkv_proj.weight")


def _fusion(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], canonical: Mapping[str, str], facts: dict[str, Valued[Any]], shape: Any
) -> None:
    """Width of the fusion layer and how many states it takes; EAGLE-1's fc over [embedding, state] is no fusion of states."""
    fc = shape("fc.weight", 2)
    chunks = [n for n in tensors if n.startswith("fc_norm.") and n.endswith(".weight") and n.count(".") == 2]
    if chunks and (s := shape(chunks[0], 1)) is not None:
        facts["target_hidden_size"] = Valued(s[0], "shape", f"shape of {canonical[chunks[0]]}")
        facts["n_aux"] = Valued(len(chunks), "shape", f"{len(chunks)} tensors fc_norm.*")
    if fc is None:
        return
    facts["fc_in"] = Valued(fc[1], "shape", f"shape of {canonical['fc.weight']}")
    facts["fc_out"] = Valued(fc[0], "shape", f"shape of {canonical['fc.weight']}")
    own = facts.get("hidden_size")
    wide = _stated(checkpoint, "target_hidden_size") or _stated(checkpoint, "hidden_size") or (own.value if own else None)
    if "n_aux" not in facts and wide and fc[1] % wide == 0 and fc[1] > 0:
        facts["n_aux"] = Valued(fc[1] // wide, "shape", f"{canonical['fc.weight']} reads {fc[1]} = {fc[1] // wide} x {wide}")
