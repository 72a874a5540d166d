"""The numbers of a draft's forward pass, from its shapes first and its config second.

Shapes decide over the config wherever both speak: what is run is what is stored. MLA's head split (DeepSeek) is the one thing shapes alone
cannot tell, so it is taken from the config, filled in from the shapes, and checked against them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eagle3diag.checkpoint.model import DraftSpec
from eagle3diag.errors import CheckpointError

__all__ = ["Sizes", "sizes_of", "softmax_scale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of the forward pass.

    Attributes:
        hidden: width of the draft.
        layers: decoder layers.
        heads, kv_heads, head_dim: of a Llama or Qwen3 layer; ``head_dim`` is that of queries and keys in MLA.
        rotary: rotated dimensions of a head.
        eps: of every RMSNorm.
        act: name of the MLP's activation.
        nope, rope, value: MLA's head split (unrotated, rotated, value), zeros elsewhere.
        kv_lora: MLA's compressed width, zero elsewhere.
        interleaved: MLA's rotary pairs are neighbours.
        draft_vocab: rows of the draft's head.
        vocab: target ids.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    eps: float
    act: str = "silu"
    nope: int = 0
    rope: int = 0
    value: int = 0
    kv_lora: int = 0
    interleaved: bool = False
    draft_vocab: int = 0
    vocab: int = 0
    max_position: int | None = None

    @property
    def mla(self) -> bool:
        """True for multi-head latent attention."""
        return self.kv_lora > 0


def _stated(config: Mapping[str, Any], key: str) -> Any:
    """A config value at the top level or in a nested layer config."""
    for part in (config, config.get("transformer_layer_config"), config.get("text_config"), config.get("rope_parameters")):
        if isinstance(part, Mapping) and part.get(key) is not None:
            return part[key]
    return None


def _whole(config: Mapping[str, Any], key: str) -> int | None:
    value = _stated(config, key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def sizes_of(t: Mapping[str, Tensor], spec: DraftSpec, config: Mapping[str, Any], path: str) -> Sizes:
    """The sizes of a draft.

    Args:
        t: tensors by canonical name, fused ones split.
        config: as read, flat or nested.

    Raises:
        CheckpointError: shapes that contradict each other, or a size nobody states.
    """
    hidden = next(
        (t[n].shape[0] for n in ("norm.weight", "layers.0.input_layernorm.weight", "fc.weight") if n in t), spec.hidden_size.value
    )
    if hidden is None:
        raise CheckpointError(f"{path}: no width of the draft can be read from it")
    head = t.get("lm_head.weight")
    vocab = spec.vocab_size.value or 0
    draft_vocab = len(head) if head is not None else spec.draft_vocab_size.value or len(t.get("d2t", ())) or vocab
    act = _stated(config, "hidden_act")
    common: dict[str, Any] = {
        "hidden": hidden,
        "layers": spec.layers_in_file or spec.num_layers.value or 1,
        "eps": spec.rms_norm_eps.value or 1e-6,
        "act": act if isinstance(act, str) else "silu",
        "draft_vocab": draft_vocab,
        "vocab": vocab,
        "max_position": spec.max_position.value,
    }
    if "layers.0.self_attn.kv_a_proj_with_mqa.weight" in t or spec.draft_class == "mla":
        return _mla_sizes(t, spec, config, path, common)
    q, k = t.get("layers.0.self_attn.q_proj.weight"), t.get("layers.0.self_attn.k_proj.weight")
    heads, kv, head_dim = spec.num_heads.value, spec.num_kv_heads.value, spec.head_dim.value
    normed = t.get("layers.0.self_attn.q_norm.weight")
    if normed is not None and normed.ndim == 1 and q is not None and len(normed) < len(q):
        head_dim = len(normed)
    if head_dim is None and heads:
        head_dim = len(q) // heads if q is not None else hidden // heads
    if not head_dim:
        raise CheckpointError(f"{path}: neither a head size nor a number of heads can be read from it")
    heads = len(q) // head_dim if q is not None else heads or hidden // head_dim
    kv = len(k) // head_dim if k is not None else kv or heads
    for name, rows, n in (("q_proj", q, heads), ("k_proj", k, kv)):
        if rows is not None and len(rows) != n * head_dim:
            raise CheckpointError(f"{path}: layers.0 {name} has {len(rows)} rows, no multiple of the head size {head_dim}")
    if kv == 0 or heads % kv:
        raise CheckpointError(f"{path}: {heads} heads cannot share {kv} key-value heads")
    factor = _stated(config, "partial_rotary_factor")
    share = float(factor) if isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor <= 1 else 1.0
    rotary = _whole(config, "rotary_dim") or int(head_dim * share)
    return Sizes(heads=heads, kv_heads=kv, head_dim=head_dim, rotary=min(rotary, head_dim) // 2 * 2, **common)


def _mla_sizes(t: Mapping[str, Tensor], spec: DraftSpec, config: Mapping[str, Any], path: str, common: dict[str, Any]) -> Sizes:
    """DeepSeek's split, from the config and checked against the shapes."""
    at = "layers.0.self_attn."
    kv_a, kv_b, o = t.get(f"{at}kv_a_proj_with_mqa.weight"), t.get(f"{at}kv_b_proj.weight"), t.get(f"{at}o_proj.weight")
    q = t.get(f"{at}q_b_proj.weight", t.get(f"{at}q_proj.weight"))
    norm, heads = t.get(f"{at}kv_a_layernorm.weight"), spec.num_heads.value
    nope, rope, value = (_whole(config, k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    lora = len(norm) if norm is not None else kv_b.shape[-1] if kv_b is not None else _whole(config, "kv_lora_rank")
    if kv_a is not None and lora is not None:
        rope = len(kv_a) - lora
    if heads and o is not None:
        value = o.shape[-1] // heads
    if heads and q is not None and rope is not None:
        nope = len(q) // heads - rope
    if not heads or not lora or not nope or not rope or not value:
        raise CheckpointError(
            f"{path}: the head split of this MLA draft (heads {heads}, nope {nope}, rope {rope}, value {value}) is not known"
        )
    for name, tensor, rows in (("q", q, heads * (nope + rope)), ("kv_a", kv_a, lora + rope), ("kv_b", kv_b, heads * (nope + value))):
        if tensor is not None and len(tensor) != rows:
            raise CheckpointError(f"{path}: the {name} projection of layers.0 has {len(tensor)} rows, its head split needs {rows}")
    pairs = _stated(config, "rope_interleave")
    return Sizes(
        heads=heads,
        kv_heads=heads,
        head_dim=nope + rope,
        rotary=rope,
        nope=nope,
        rope=rope,
        value=value,
        kv_lora=lora,
        interleaved=pairs is not False,
        **common,
    )


def softmax_scale(sizes: Sizes, gain: float = 1.0) -> float:
    """What attention scores are multiplied by: ``head_dim ** -0.5``, times MLA's yarn gain."""
    return gain / math.sqrt(sizes.head_dim)
