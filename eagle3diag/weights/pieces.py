"""Rows of a tensor as a unit of work, and the vocabulary of tensor names the other modules share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eagle3diag.checkpoint.model import Checkpoint, TensorInfo
from eagle3diag.weights.values import BLOCK, blocks_of

__all__ = ["FUSED", "ROLES", "Piece", "fused_parts", "piece_blocks", "role"]

#: fused tensor -> the tensors it holds, in row order (facts of the dialects, table (b))
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}

#: what the format calls its tensors
ROLES = (
    *("fc", "norm", "lm_head", "embed_tokens", "d2t", "t2d", "input_norm", "mask_hidden"),
    *("input_layernorm", "hidden_norm", "post_attention_layernorm", "q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start`` to ``stop`` (first axis) of a tensor; both None for the whole."""

    info: TensorInfo
    start: int | None = None
    stop: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        if self.start is None or self.stop is None:
            return self.info.shape
        return (self.stop - self.start, *self.info.shape[1:])

    @property
    def elements(self) -> tuple[int, int]:
        """First element and number of elements, row-major."""
        n = 1
        for d in self.shape:
            n *= d
        row = n // self.shape[0] if self.start is not None and self.shape[0] else 0
        return (self.start or 0) * row, n


def role(canonical: str) -> str:
    """The tensor's own name: ``q_proj`` of ``layers.0.self_attn.q_proj.weight``, ``d2t`` of ``d2t``."""
    parts = canonical.split(".")
    if parts[-1] in ("weight", "bias") and len(parts) > 1:
        parts.pop()
    return parts[-1]


def fused_parts(canonical: str) -> tuple[str, ...]:
    """Canonical names of what a fused tensor holds, in row order; empty where it is none."""
    own = role(canonical)
    return tuple(f".{part}".join(canonical.rsplit(f".{own}", 1)) for part in FUSED.get(own, ()))


def piece_blocks(checkpoint: Checkpoint, piece: Piece, block: int = BLOCK) -> Iterator[memoryview]:
    """The raw bytes of a piece, in order; the whole tensor is streamed, since its length proves the file unchanged.

    Raises:
        CheckpointError: the file changed or ended while being read.
    """
    info = piece.info
    first, count = piece.elements
    size = info.nbytes // info.numel if info.numel else 0
    start, stop = (0, info.nbytes) if piece.start is None else (first * size, (first + count) * size)
    at = 0
    for view in blocks_of(checkpoint, info.name, block):
        lo, hi = max(start - at, 0), min(stop - at, len(view))
        at += len(view)
        if lo < hi:
            yield view[lo:hi]
