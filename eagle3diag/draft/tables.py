"""What a draft borrows from its target: embedding rows, head rows and the final norm, by token id.

A review often has no target: the portable sample carries the rows its tokens and the draft vocabulary can need, and a draft may store the
embedding itself. ``TargetTables`` answers for whichever is there, and says by number which row it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
from eagle3diag.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TargetTables", "load_tables"]

#: families whose RMSNorm multiplies by one plus the stored weight
_OFFSET_NORMS = ("gemma", "gemma2", "gemma3", "qwen3_next", "qwen3_5")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetTables:
    """Rows of the target's embedding and head by token id, and its final norm.

    Attributes:
        path: where they were read, for messages.
        vocab: tokens of the target's vocabulary, None where unknown.
        token_ids: [rows] int64, ascending: which ids the rows stand for; None for whole tables.
        embedding: [rows, hidden] in the stored dtype, or None.
        head: [rows, hidden]; the embedding itself where the target ties them; None where neither is there.
        final_norm: [hidden] as it multiplies (families that store weight - 1 have one added), or None.
        eps: of the final norm.
        source: ``target``, ``sample rows`` or ``draft`` (the draft's own stored embedding stands in).
    """

    path: str
    vocab: int | None = None
    token_ids: Tensor | None = None
    embedding: Tensor | None = None
    head: Tensor | None = None
    final_norm: Tensor | None = None
    eps: float = 1e-6
    source: str = "target"

    @property
    def whole(self) -> bool:
        """True where row ``i`` is token ``i`` of the whole vocabulary."""
        return self.token_ids is None

    def known(self, ids: Tensor) -> Tensor:
        """Which of ``ids`` (int64, any shape) have a row: bool of the same shape."""
        return self._find(ids)[1]

    def embed(self, ids: Tensor) -> Tensor:
        """Embedding rows of ``ids`` (int64, any shape): [..., hidden] in the stored dtype.

        Raises:
            CheckpointError: no embedding here, or an id without a row; names the first.
        """
        return self._rows(self.embedding, "embedding", ids)

    def head_rows(self, ids: Tensor) -> Tensor:
        """Head rows of ``ids`` (int64, any shape): [..., hidden] in the stored dtype.

        Raises:
            CheckpointError: no head here, or an id without a row; names the first.
        """
        return self._rows(self.head, "head", ids)

    def to(self, device: torch.device | str) -> TargetTables:
        """The same tables on another device."""
        moved = {n: None if (t := getattr(self, n)) is None else t.to(device) for n in ("token_ids", "embedding", "head", "final_norm")}
        return TargetTables(path=self.path, vocab=self.vocab, eps=self.eps, source=self.source, **moved)

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(row numbers, whether there is such a row)."""
        table = self.embedding if self.embedding is not None else self.head
        if self.token_ids is None:
            rows = 0 if table is None else table.shape[0]
            return ids.clamp(0, max(rows - 1, 0)), (ids >= 0) & (ids < rows)
        at = torch.searchsorted(self.token_ids, ids.to(self.token_ids.dtype).contiguous()).clamp(max=len(self.token_ids) - 1)
        return at, self.token_ids[at] == ids

    def _rows(self, table: Tensor | None, what: str, ids: Tensor) -> Tensor:
        if table is None:
            raise CheckpointError(
                f"{self.path}: no {what} of the target there; give the target's folder or rows.safetensors, with --target"
            )
        at, known = self._find(ids)
        if not bool(known.all()):
            missing = int(ids[~known].flatten()[0])
            have = f"{len(table)} selected rows" if self.token_ids is not None else f"rows 0 to {len(table) - 1}"
            raise CheckpointError(f"{self.path}: no {what} row for token id {missing}; it has {have}; give the whole target")
        return table[at]


def load_tables(target: TargetSpec | None, draft: Checkpoint, spec: DraftSpec) -> TargetTables:
    """The target's tables as far as they are at hand.

    Args:
        target: its config alone, its weights, or the portable sample's rows; None for a draft by itself.
        draft: where no target tensor is there, the draft's own stored embedding stands in (trainers store the target's).
        spec: of the draft.

    Raises:
        CheckpointError: rows whose ids and tensors do not fit each other.
    """
    vocab = spec.vocab_size.value
    if target is not None and target.checkpoint is not None and target.embed is not None:
        return _of_target(target, target.checkpoint, vocab)
    own = spec.canonical.get("embed_tokens.weight")
    if own is not None:
        embedding = draft.read(own)
        return TargetTables(path=draft.path, vocab=vocab or len(embedding), embedding=embedding, source="draft")
    return TargetTables(path=target.path if target is not None else draft.path, vocab=vocab)


def _of_target(target: TargetSpec, checkpoint: Checkpoint, vocab: int | None) -> TargetTables:
    assert target.embed is not None
    embedding = checkpoint.read(target.embed)
    head = embedding if target.head == target.embed else None if target.head is None else checkpoint.read(target.head)
    norm = None if target.final_norm is None else checkpoint.read(target.final_norm)
    if norm is not None and _offset(target):
        norm = norm.float() + 1.0
    ids = None
    if target.rows:
        ids = checkpoint.read("token_ids").to(torch.int64)
        if ids.ndim != 1 or embedding.ndim != 2 or len(ids) != len(embedding) or (head is not None and len(head) != len(ids)):
            raise CheckpointError(f"{target.path}: token_ids has {len(ids)} ids, embed_tokens {len(embedding)} rows; they must be equal")
        order = ids.argsort()
        ids, embedding = ids[order], embedding[order]
        head = None if head is None else embedding if target.head == target.embed else head[order]
    return TargetTables(
        path=target.path,
        vocab=target.vocab_size.value or vocab,
        token_ids=ids,
        embedding=embedding,
        head=head,
        final_norm=norm,
        eps=_eps(target),
        source="sample rows" if target.rows else "target",
    )


def _text_config(target: TargetSpec) -> list[dict[str, object]]:
    """The target's config and the configs nested in it, the innermost first."""
    out: list[dict[str, object]] = []
    pending: list[object] = [target.checkpoint.config if target.checkpoint is not None else {}]
    while pending and len(out) < 32:
        at = pending.pop()
        if isinstance(at, dict):
            out.insert(0, at)
            pending += list(at.values())
    return out


def _eps(target: TargetSpec) -> float:
    for part in _text_config(target):
        for key in ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"):
            value = part.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
    return 1e-6


def _offset(target: TargetSpec) -> bool:
    kinds = {str(part.get("model_type", "")) for part in _text_config(target)}
    return any(k == f or k.startswith((f + "_text", f + "_moe")) for k in kinds for f in _OFFSET_NORMS)
