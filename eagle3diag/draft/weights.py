"""A draft's tensors under their canonical names, fused ones split, in the dtype to compute in.

Nothing here knows an engine; what a server leaves unfilled or replaces is `Wiring`'s, applied by the model, and what it drops is left out
by `DraftWeights.without`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec
from eagle3diag.draft.sizes import Sizes, sizes_of
from eagle3diag.errors import CheckpointError, escaped

__all__ = ["DraftWeights"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftWeights:
    """Tensors by canonical name (``layers.0.self_attn.q_proj.weight``, ``fc.weight``, ``d2t``), and sizes.

    Attributes:
        path: of the checkpoint, for messages.
        tensors: floating-point ones in ``dtype``, ``d2t`` int64, ``t2d`` bool.
        sizes: of the forward pass.
    """

    path: str
    tensors: Mapping[str, Tensor]
    sizes: Sizes
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, spec: DraftSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> DraftWeights:
        """Read every tensor of the draft that the forward pass can use.

        Args:
            dtype: to compute in; stored values are converted once.

        Raises:
            CheckpointError: no EAGLE-3 draft, quantised weights, or shapes that contradict each other.
        """
        tensors: dict[str, Tensor] = {}
        for name, stored in spec.canonical.items():
            value = checkpoint.read(stored)
            if name == "t2d":
                tensors[name] = value.to(device=device, dtype=torch.bool).flatten()
                continue
            if name == "d2t":
                tensors[name] = value.to(device=device, dtype=torch.int64).flatten()
                continue
            if not value.is_floating_point() or value.element_size() == 1:
                kind = checkpoint.tensors[stored].dtype
                raise CheckpointError(f"{checkpoint.path}: {escaped(stored)} is {kind}; a quantised draft cannot be run, give the original")
            tensors[name] = value.to(device=device, dtype=dtype)
        return cls.of(tensors, spec, checkpoint.config, path=checkpoint.path, dtype=dtype, device=str(device))

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        spec: DraftSpec,
        config: Mapping[str, Any],
        *,
        path: str = "draft",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> DraftWeights:
        """The same from tensors in memory, under canonical names; fused ones are split."""
        parts = _split(tensors, spec, path)
        return cls(path=path, tensors=parts, sizes=sizes_of(parts, spec, config, path), dtype=dtype, device=device)

    def get(self, name: str) -> Tensor | None:
        """A tensor, or None where the draft has none of that name."""
        return self.tensors.get(name)

    def need(self, name: str) -> Tensor:
        """A tensor that has to be there.

        Raises:
            CheckpointError: the draft has none of that name.
        """
        value = self.tensors.get(name)
        if value is None:
            raise CheckpointError(f"{self.path}: this wiring needs {name}, and the draft has none")
        return value

    def without(self, names: Iterable[str]) -> DraftWeights:
        """The same without some tensors: what a server drops (biases, q and k norms)."""
        gone = set(names)
        return replace(self, tensors={k: v for k, v in self.tensors.items() if k not in gone})


def _split(tensors: Mapping[str, Tensor], spec: DraftSpec, path: str) -> dict[str, Tensor]:
    """Fused projections become their parts."""
    out = dict(tensors)
    for name, value in tensors.items():
        ranks = 1 if name.endswith((".bias", "norm.weight")) else 2 if name.endswith(("proj.weight", "fc.weight", "head.weight")) else None
        if value.ndim == 0 or (ranks is not None and value.ndim != ranks):
            raise CheckpointError(f"{path}: {escaped(name)} has shape {list(value.shape)}; it needs {ranks or 'at least 1'} dimensions")
        parts = _parts(name, value, tensors, spec, path)
        if not parts:
            continue
        del out[name]
        start, fused = 0, name.split(".")[-2]
        for part, rows in parts.items():
            out[name.replace(fused, part)] = value[start : start + rows]
            start += rows
    return out


def _parts(name: str, value: Tensor, tensors: Mapping[str, Tensor], spec: DraftSpec, path: str) -> dict[str, int]:
    """Rows of each part of a fused projection, in order; empty where it is none."""
    if ".qkv_proj." in name:
        return dict(zip(("q_proj", "k_proj", "v_proj"), _qkv_rows(spec, value, path), strict=True))
    if ".gate_up_proj." in name:
        if len(value) % 2:
            raise CheckpointError(f"{path}: {escaped(name)} has {len(value)} rows; two equal halves need an even number")
        return {"gate_proj": len(value) // 2, "up_proj": len(value) // 2}
    if ".fused_qkv_a_proj_with_mqa." in name:
        q_b = tensors.get(name.replace("fused_qkv_a_proj_with_mqa", "q_b_proj"))
        if q_b is None or q_b.shape[-1] >= len(value):
            raise CheckpointError(f"{path}: {escaped(name)} has {len(value)} rows and no q_b_proj to split it by")
        return {"q_a_proj": q_b.shape[-1], "kv_a_proj_with_mqa": len(value) - q_b.shape[-1]}
    return {}


def _qkv_rows(spec: DraftSpec, value: Tensor, path: str) -> tuple[int, int, int]:
    heads, kv, head = spec.num_heads.value, spec.num_kv_heads.value, spec.head_dim.value
    if not heads or not kv or not head or (heads + 2 * kv) * head != len(value):
        need = _product(heads, kv, head)
        raise CheckpointError(f"{path}: qkv_proj has {len(value)} rows, {heads} and twice {kv} heads of {head} need {need}")
    return heads * head, kv * head, kv * head


def _product(heads: int | None, kv: int | None, head: int | None) -> str:
    return "unknown" if not heads or not kv or not head else str((heads + 2 * kv) * head)
