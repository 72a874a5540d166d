"""The shape of every parameter of a draft: to draw a start value for one no tensor reached, and to refuse one that does not fit."""

from __future__ import annotations

from eagle3diag.checkpoint.model import DraftSpec
from eagle3diag.draft.weights import DraftWeights
from eagle3diag.errors import CheckpointError

__all__ = ["check_shapes", "parameter_shapes"]


def check_shapes(weights: DraftWeights, spec: DraftSpec) -> None:
    """Hold every tensor of the forward pass against the sizes.

    Raises:
        CheckpointError: the first that does not fit, with both shapes.
    """
    shapes = parameter_shapes(weights, spec)
    for name, tensor in weights.tensors.items():
        want = shapes.get(name)
        if want is not None and tuple(tensor.shape) != want:
            raise CheckpointError(f"{weights.path}: {name} has shape {list(tensor.shape)}, this draft needs {list(want)}")


def parameter_shapes(weights: DraftWeights, spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """``{canonical name: shape}`` of the parameters an engine or trainer builds for these sizes.

    Widths that tensors alone tell (the MLP's, what ``fc`` takes) are theirs, else the spec's.
    """
    s = weights.sizes
    slots, wide = spec.n_aux.value or 3, spec.target_hidden_size.value or s.hidden
    fc = weights.get("fc.weight")
    width = fc.shape[-1] if fc is not None and fc.ndim == 2 else slots * wide
    out: dict[str, tuple[int, ...]] = {
        "fc.weight": (s.hidden, width),
        "fc.bias": (s.hidden,),
        "norm.weight": (s.hidden,),
        "lm_head.bias": (s.draft_vocab,),
        "input_norm.weight": (width,),
        **({f"fc_norm.{i}.weight": (width // slots,) for i in range(slots)} if width % slots == 0 else {}),
    }
    for i in range(s.layers):
        at = f"layers.{i}."
        out |= {f"{at}{n}.weight": (s.hidden,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        gate = weights.get(f"{at}mlp.gate_proj.weight")
        out |= {f"{at}mlp.{k}": v for k, v in _mlp(s.hidden, len(gate) if gate is not None else spec.intermediate_size.value or 0).items()}
        attention = _mla(weights, at) if s.mla else _attention(weights)
        entry = 2 * s.hidden if i == 0 else s.hidden
        out |= {f"{at}self_attn.{k}": v if v[-1:] != (-1,) else (*v[:-1], entry) for k, v in attention.items()}
    return out


def _mlp(hidden: int, inter: int) -> dict[str, tuple[int, ...]]:
    if not inter:
        return {}
    out: dict[str, tuple[int, ...]] = {"down_proj.weight": (hidden, inter), "down_proj.bias": (hidden,)}
    for name in ("gate_proj", "up_proj"):
        out |= {f"{name}.weight": (inter, hidden), f"{name}.bias": (inter,)}
    return out


def _attention(weights: DraftWeights) -> dict[str, tuple[int, ...]]:
    """A Llama or Qwen3 layer's; -1 is the width that enters the layer."""
    s = weights.sizes
    out: dict[str, tuple[int, ...]] = {f"{n}.weight": (s.head_dim,) for n in ("q_norm", "k_norm")}
    for name, heads in (("q_proj", s.heads), ("k_proj", s.kv_heads), ("v_proj", s.kv_heads)):
        out |= {f"{name}.weight": (heads * s.head_dim, -1), f"{name}.bias": (heads * s.head_dim,)}
    return out | {"o_proj.weight": (s.hidden, s.heads * s.head_dim), "o_proj.bias": (s.hidden,)}


def _mla(weights: DraftWeights, at: str) -> dict[str, tuple[int, ...]]:
    """An MLA layer's; -1 is the width that enters the layer."""
    s = weights.sizes
    out: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (s.kv_lora + s.rope, -1),
        "kv_a_layernorm.weight": (s.kv_lora,),
        "kv_b_proj.weight": (s.heads * (s.nope + s.value), s.kv_lora),
        "o_proj.weight": (s.hidden, s.heads * s.value),
    }
    q_b = weights.get(f"{at}self_attn.q_b_proj.weight")
    if q_b is None:
        return out | {"q_proj.weight": (s.heads * s.head_dim, -1)}
    lora = q_b.shape[-1]
    return out | {"q_a_proj.weight": (lora, -1), "q_a_layernorm.weight": (lora,), "q_b_proj.weight": (s.heads * s.head_dim, lora)}
