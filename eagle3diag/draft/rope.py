"""Rotary position embeddings in every type a draft's config can name.

Frequencies follow the reference functions of the transformers library (``modeling_rope_utils``), which trainers build on: ``default``,
``linear``, ``dynamic`` (NTK), ``llama3``, ``yarn``, ``longrope``. A multimodal ``mrope`` with text alone has three equal position ids and
is the ordinary rotation whatever its sections are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from eagle3diag.errors import CheckpointError, escaped

__all__ = ["Rope", "inverse_frequencies", "rotate", "softmax_gain"]

_KNOWN = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "mrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding: base, scaling, rotated width.

    Attributes:
        dim: rotated dimensions of a head, even; the rest of a partial head passes through.
        theta: base.
        scaling: scaling dict (``rope_type`` or ``type`` names the kind), None for none.
        max_position: positions the config allows; the reference length of ``dynamic``, and of others that state no original length.
        interleaved: neighbouring pairs rotate together (DeepSeek's MLA) instead of the two halves of a head.
    """

    dim: int
    theta: float
    scaling: Mapping[str, Any] | None = None
    max_position: int | None = None
    interleaved: bool = False

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosines and sines at ``positions`` ([rows] int64): two [rows, dim / 2] of ``dtype``, computed in float32.

        Raises:
            CheckpointError: a scaling type or a key of it that is not known here.
        """
        length = int(positions.max()) + 1 if positions.numel() else 1
        freq, gain = inverse_frequencies(self.dim, self.theta, self.scaling, max_position=self.max_position, length=length)
        angles = positions.to(torch.float32)[:, None] * freq.to(positions.device)[None, :]
        return (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` dimensions of every head.

    Args:
        x: [rows, heads, head_dim].
        cos, sin: [rows, dim / 2].
    """
    dim = 2 * cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    pattern = "r h (d two) -> two r h d" if interleaved else "r h (two d) -> two r h d"
    a, b = rearrange(turned, pattern, two=2)
    c, s = rearrange(cos, "r d -> r 1 d"), rearrange(sin, "r d -> r 1 d")
    out = torch.cat((a * c - b * s, b * c + a * s), dim=-1)  # halves: scores do not depend on the order within a head
    return out if rest.shape[-1] == 0 else torch.cat((out, rest), dim=-1)


def softmax_gain(scaling: Mapping[str, Any] | None) -> float:
    """Factor on the attention scale of MLA under yarn: ``mscale(factor, mscale_all_dim)`` squared (DeepSeek's attention), else 1."""
    if scaling is None or _kind(scaling) != "yarn" or not scaling.get("mscale_all_dim"):
        return 1.0
    return _mscale(_number(scaling, "factor", 1.0), _number(scaling, "mscale_all_dim", 0.0)) ** 2


def inverse_frequencies(
    dim: int, theta: float, scaling: Mapping[str, Any] | None = None, *, max_position: int | None = None, length: int | None = None
) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] float32 and the factor on cosines and sines.

    Args:
        dim: rotated dimensions, even.
        theta: base.
        scaling: see `Rope`.
        max_position: of the config.
        length: positions in use, for ``dynamic`` and ``longrope``.

    Raises:
        CheckpointError: an unknown type, or a key it needs is absent.
    """
    kind = _kind(scaling)
    s: Mapping[str, Any] = scaling or {}
    if not (math.isfinite(theta) and theta > 0 and dim >= 2):
        raise CheckpointError(f"rope: base {theta:g} over {dim} rotated dimensions; the base must be above zero, the dimensions at least 2")
    if kind == "dynamic":
        limit = max_position or int(_number(s, "original_max_position_embeddings"))
        factor, used = _number(s, "factor"), max(length or 0, limit)
        if dim == 2:
            raise CheckpointError("rope scaling of type dynamic: a head of 2 rotated dimensions cannot be scaled; it needs 4")
        theta = theta * ((factor * used / limit) - (factor - 1)) ** (dim / (dim - 2))
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if kind == "linear":
        return plain / _number(s, "factor"), 1.0
    if kind == "llama3":
        return _llama3(plain, s, max_position), 1.0
    if kind == "yarn":
        return _yarn(plain, dim, theta, s, max_position)
    if kind == "longrope":
        return _longrope(plain, s, max_position, length)
    return plain, 1.0


def _kind(scaling: Mapping[str, Any] | None) -> str:
    if scaling is None:
        return "default"
    kind = str(scaling.get("rope_type", scaling.get("type", "default")) or "default")
    kind = {"su": "longrope", "ntk": "dynamic"}.get(kind, kind)
    if kind not in _KNOWN:
        raise CheckpointError(f"rope type {escaped(kind)} is not known here; known are {', '.join(_KNOWN)}")
    return kind


def _number(s: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A value of the scaling dict, not negative, and positive unless its default is zero (which means "not used")."""
    value = s.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and (value > 0 or value == default == 0):
        return float(value)
    if value is None and default is not None:
        return default
    raise CheckpointError(f"rope scaling of type {escaped(_kind(s))}: {key} is {escaped(value)}; it must be a number above zero")


def _original(s: Mapping[str, Any], max_position: int | None) -> float:
    return _number(s, "original_max_position_embeddings", None if max_position is None else float(max_position))


def _llama3(plain: Tensor, s: Mapping[str, Any], max_position: int | None) -> Tensor:
    factor, low, high = _number(s, "factor"), _number(s, "low_freq_factor"), _number(s, "high_freq_factor")
    original = _original(s, max_position)
    wave = 2 * math.pi / plain
    out = torch.where(wave > original / low, plain / factor, plain)
    if high <= low:
        raise CheckpointError(f"rope scaling of type llama3: high_freq_factor {high:g} is not above low_freq_factor {low:g}")
    smooth = (original / wave - low) / (high - low)
    blended = (1 - smooth) * out / factor + smooth * out
    between = (wave >= original / high) & (wave <= original / low)
    return torch.where(between, blended, out)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(plain: Tensor, dim: int, theta: float, s: Mapping[str, Any], max_position: int | None) -> tuple[Tensor, float]:
    original = _original(s, max_position)
    factor = _number(s, "factor", (max_position or original) / original)
    mscale, all_dim = _number(s, "mscale", 0.0), _number(s, "mscale_all_dim", 0.0)
    stated = s.get("attention_factor")
    if stated is not None:
        gain = _number(s, "attention_factor")
    elif mscale and all_dim:
        gain = _mscale(factor, mscale) / _mscale(factor, all_dim)
    else:
        gain = _mscale(factor)

    if theta == 1.0:
        raise CheckpointError("rope scaling of type yarn: a base of 1 cannot be scaled")

    def correction(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = correction(_number(s, "beta_fast", 32.0) or 32.0), correction(_number(s, "beta_slow", 1.0) or 1.0)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - kept) + plain * kept, gain


def _longrope(plain: Tensor, s: Mapping[str, Any], max_position: int | None, length: int | None) -> tuple[Tensor, float]:
    original = _original(s, max_position)
    factor = _number(s, "factor", (max_position or original) / original)
    gain = _number(s, "attention_factor", 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original)))
    key = "long_factor" if length is not None and length > original else "short_factor"
    values = s.get(key)
    numbers = isinstance(values, list | tuple) and all(isinstance(v, int | float) and v > 0 for v in values)
    if not isinstance(values, list | tuple) or not numbers or len(values) != len(plain):
        have = len(values) if isinstance(values, list | tuple) and numbers else "none, or others"
        raise CheckpointError(f"rope scaling of type longrope: {key} needs {len(plain)} numbers, it has {have}")
    return plain / torch.tensor(values, dtype=torch.float32), gain
