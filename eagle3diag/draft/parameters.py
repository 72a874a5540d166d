"""The shape of every parameter of a draft, so that a start value can be drawn for one that no tensor reached."""

from __future__ import annotations

from eagle3diag.checkpoint.model import DraftSpec
from eagle3diag.draft.weights import DraftWeights

__all__ = ["parameter_shapes"]


def parameter_shapes(weights: DraftWeights, spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """``{canonical name: shape}`` of the parameters an engine or trainer builds for these sizes."""
    s = weights.sizes
    slots, wide = spec.n_aux.value or 3, spec.target_hidden_size.value or s.hidden
    inter = spec.intermediate_size.value or 0
    out: dict[str, tuple[int, ...]] = {
        "fc.weight": (s.hidden, slots * wide),
        "fc.bias": (s.hidden,),
        "norm.weight": (s.hidden,),
        "input_norm.weight": (slots * wide,),
        **{f"fc_norm.{i}.weight": (wide,) for i in range(slots)},
    }
    for i in range(s.layers):
        at, width = f"layers.{i}.", 2 * s.hidden if i == 0 else s.hidden
        out |= {f"{at}{n}.weight": (s.hidden,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        out |= {f"{at}self_attn.{n}.weight": (s.head_dim,) for n in ("q_norm", "k_norm")}
        if inter:
            out |= {f"{at}mlp.{n}.weight": (inter, s.hidden) for n in ("gate_proj", "up_proj")}
            out |= {f"{at}mlp.{n}.bias": (inter,) for n in ("gate_proj", "up_proj")}
            out |= {f"{at}mlp.down_proj.weight": (s.hidden, inter), f"{at}mlp.down_proj.bias": (s.hidden,)}
        rows = {"q_proj": s.heads * s.head_dim, "k_proj": s.kv_heads * s.head_dim, "v_proj": s.kv_heads * s.head_dim}
        out |= {f"{at}self_attn.{n}.weight": (r, width) for n, r in rows.items()}
        out |= {f"{at}self_attn.{n}.bias": (r,) for n, r in rows.items()}
        value = s.value if s.mla else s.head_dim
        out |= {f"{at}self_attn.o_proj.weight": (s.hidden, s.heads * value), f"{at}self_attn.o_proj.bias": (s.hidden,)}
        if s.mla:
            out[f"{at}self_attn.kv_a_proj_with_mqa.weight"] = (s.kv_lora + s.rope, width)
            out[f"{at}self_attn.kv_a_layernorm.weight"] = (s.kv_lora,)
            out[f"{at}self_attn.kv_b_proj.weight"] = (s.heads * (s.nope + s.value), s.kv_lora)
    return out
