"""One decoder layer, in functions of plain tensors: RMSNorm, attention (Llama, Qwen3, MLA), MLP.

Attention is written for the mask all trainers share: a query row sees the keys of step 0 up to its own row and, of later steps, only its
own row's key. Step-0 scores are one triangular matrix, later ones a single number a row and step, so a step costs what causal attention
costs. Serving is the special case of queries at the end of a cache. RMSNorm computes in float32 and rounds before the weight, as
transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from eagle3diag.draft.rope import rotate
from eagle3diag.draft.sizes import Sizes
from eagle3diag.errors import CheckpointError, escaped

__all__ = ["KeysValues", "LayerWeights", "activation", "attend", "causal_mask", "mlp", "project", "rms_norm"]

#: bytes of scores held at once; longer texts are attended in blocks of query rows
_SCORES = 64 << 20


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis: computed in float32, rounded to ``x``'s dtype, then times ``weight``."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The MLP's activation by its config name.

    Raises:
        CheckpointError: a name that is not known here.
    """
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "swish": F.silu,
        "gelu": F.gelu,
        "relu": F.relu,
        "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu2": lambda x: F.relu(x).square(),
    }
    if name not in known:
        raise CheckpointError(f"activation {escaped(name)} is not known here; known are {', '.join(known)}")
    return known[name]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """The parameters of one layer by short name (``q_proj.weight``, ``mlp.down_proj.bias``); optional ones are absent."""

    tensors: dict[str, Tensor]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """``x @ weight.T + bias`` of a projection."""
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMSNorm by a weight of this layer."""
        return rms_norm(x, self.tensors[f"{name}.weight"], eps)

    def has(self, name: str) -> bool:
        """Whether there is a weight of this name."""
        return f"{name}.weight" in self.tensors


@dataclass(slots=True, eq=False)
class KeysValues:
    """What one layer remembers.

    Attributes:
        keys, values: [kept rows, kv heads, width] of step 0, or of the cache when decoding.
        later: keys and values of later steps, one pair a step, one row per query row: row i is seen by query i alone.
    """

    keys: Tensor
    values: Tensor
    later: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def project(x: Tensor, w: LayerWeights, s: Sizes, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [rows, heads, d], keys [rows, kv heads, d] and values [rows, kv heads, dv], rotated, of ``x`` [rows, width]."""
    if s.mla:
        return _project_mla(x, w, s, cos, sin)
    q = rearrange(w.linear(x, "self_attn.q_proj"), "r (h d) -> r h d", d=s.head_dim)
    k = rearrange(w.linear(x, "self_attn.k_proj"), "r (g d) -> r g d", d=s.head_dim)
    v = rearrange(w.linear(x, "self_attn.v_proj"), "r (g d) -> r g d", d=s.head_dim)
    if w.has("self_attn.q_norm"):
        q = w.norm(q, "self_attn.q_norm", s.eps)
    if w.has("self_attn.k_norm"):
        k = w.norm(k, "self_attn.k_norm", s.eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def _project_mla(x: Tensor, w: LayerWeights, s: Sizes, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek's latent attention: queries and keys carry an unrotated and a rotated part, the rotated key is shared by all heads."""
    if w.has("self_attn.q_b_proj"):
        q = w.linear(w.norm(w.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", s.eps), "self_attn.q_b_proj")
    else:
        q = w.linear(x, "self_attn.q_proj")
    q = rearrange(q, "r (h d) -> r h d", h=s.heads)
    packed = w.linear(x, "self_attn.kv_a_proj_with_mqa")
    latent, shared = packed[:, : s.kv_lora], packed[:, s.kv_lora :]
    kv = w.linear(w.norm(latent, "self_attn.kv_a_layernorm", s.eps), "self_attn.kv_b_proj")
    kv = rearrange(kv, "r (h d) -> r h d", h=s.heads)
    k, v = kv[..., : s.nope], kv[..., s.nope :]
    turned_q = rotate(q[..., s.nope :], cos, sin, interleaved=s.interleaved)
    turned_k = rotate(rearrange(shared, "r d -> r 1 d"), cos, sin, interleaved=s.interleaved)
    q = torch.cat((q[..., : s.nope], turned_q), dim=-1)
    return q, torch.cat((k, repeat(turned_k, "r 1 d -> r h d", h=s.heads)), dim=-1), v


def causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[queries, keys] bool: key at or before the query, and less than ``window`` before it. Both are row or position numbers."""
    back = rearrange(queries, "q -> q 1") - rearrange(keys, "k -> 1 k")
    seen = back >= 0
    return seen if window is None else seen & (back < window)


def attend(q: Tensor, kv: KeysValues, rows: Tensor, key_rows: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """Attention of every query row: [rows, heads * dv].

    Args:
        q: [rows, heads, d].
        kv: step-0 keys and values, and those of later steps (each [rows, ...], the query row's own).
        rows: [rows] row (or position) of each query, ascending.
        key_rows: [kept rows] row (or position) of each step-0 key, ascending.
        scale: of the scores.
        window: sliding window over step-0 keys, in rows.
    """
    groups = kv.keys.shape[1]
    q = rearrange(q, "r (g h) d -> g h r d", g=groups) * scale
    k, v = rearrange(kv.keys, "k g d -> g d k"), rearrange(kv.values, "k g d -> g k d")
    per_row = max(1, q.shape[0] * q.shape[1] * k.shape[-1] * q.element_size())
    block = max(16, _SCORES // per_row)
    out = []
    for a in range(0, q.shape[2], block):
        at = slice(a, a + block)
        out.append(_attend_block(q[:, :, at], k, v, [(key[at], value[at]) for key, value in kv.later], rows[at], key_rows, window))
    return rearrange(out[0] if len(out) == 1 else torch.cat(out, dim=2), "g h r d -> r (g h d)")


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, later: Sequence[tuple[Tensor, Tensor]], rows: Tensor, key_rows: Tensor, window: int | None
) -> Tensor:
    """One block of query rows: q [groups, heads, rows, d], k [groups, d, keys], v [groups, keys, dv]."""
    stop = int(torch.searchsorted(key_rows, rows[-1], right=True))  # keys after the block's last query are seen by none
    heads = q.shape[1]
    scores = rearrange(rearrange(q, "g h r d -> g (h r) d") @ k[..., :stop], "g (h r) k -> g h r k", h=heads)
    scores.masked_fill_(~causal_mask(rows, key_rows[:stop], window), float("-inf"))
    own = [(q * rearrange(key, "r g d -> g 1 r d")).sum(-1, keepdim=True) for key, _ in later]
    weights = torch.softmax(torch.cat((scores, *own), dim=-1), dim=-1, dtype=torch.float32).to(q.dtype)
    out = rearrange(rearrange(weights[..., :stop], "g h r k -> g (h r) k") @ v[:, :stop], "g (h r) d -> g h r d", h=heads)
    for n, (_, value) in enumerate(later):
        out = out + weights[..., stop + n, None] * rearrange(value, "r g d -> g 1 r d")
    return out


def mlp(x: Tensor, w: LayerWeights, act: Callable[[Tensor], Tensor]) -> Tensor:
    """The gated MLP."""
    return w.linear(act(w.linear(x, "mlp.gate_proj")) * w.linear(x, "mlp.up_proj"), "mlp.down_proj")
