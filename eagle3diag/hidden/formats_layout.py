"""How a format lays out one sample: which array holds the tokens and where each state lies.

A ``Layout`` is data. One reader (``read_sample``) serves every format, so a new format is a function from names and shapes to a
``Layout`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from eagle3diag.errors import CheckpointError
from eagle3diag.hidden.model import DumpIssue, NormStatus, Sample, Slot

if TYPE_CHECKING:
    import torch

    from eagle3diag.hidden.formats_files import Contents

__all__ = ["Layout", "Piece", "axis_words", "read_sample"]


class Piece(NamedTuple):
    """Where one state lies in its array, once a batch axis of one is taken off.

    ``plane`` of axis ``axis`` of a stack, or the columns ``first`` to ``last`` of a row, or all of it.
    """

    key: str
    plane: int | None = None
    axis: int = 1
    first: int = 0
    last: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One sample's layout.

    Attributes:
        hidden: width of one state.
        slots, pieces: what each state is, and where it lies; aux slots first, in stored order.
        ids: key of the token ids.
        mask: key of the loss mask, if the sample has one.
        extras: key by field of ``Sample``.
        tokens, rows: lengths by the header.
        issues: what is odd about it, without the file's name.
    """

    format: str
    evidence: tuple[str, ...]
    hidden: int
    slots: tuple[Slot, ...]
    pieces: tuple[Piece, ...]
    ids: str
    tokens: int
    rows: int
    final_norm: NormStatus = "unknown"
    axis: str = ""
    mask: str | None = None
    extras: Mapping[str, str] = field(default_factory=dict)
    issues: tuple[DumpIssue, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def signature(self) -> tuple[object, ...]:
        """What the samples of one dump have in common."""
        return self.format, self.hidden, tuple((s.role, s.hf, s.name) for s in self.slots), self.final_norm


def axis_words(stacked: bool, tokens_first: bool = True) -> str:
    """The axis order in words."""
    if not stacked:
        return "tokens, hidden"
    return "tokens, slots, hidden" if tokens_first else "slots, tokens, hidden"


def without_batch(array: torch.Tensor, ndim: int) -> torch.Tensor:
    """Take leading axes of one off until ``ndim`` are left."""
    while array.ndim > ndim and array.shape[0] == 1:
        array = array[0]
    return array


def read_sample(contents: Contents, layout: Layout, name: str) -> Sample:
    """One sample, in memory; states are views of the arrays read.

    Raises:
        CheckpointError: the file is cut, changed or cannot be read.
    """
    import torch

    arrays: dict[str, torch.Tensor] = {}
    states: dict[int, torch.Tensor] = {}
    for slot, piece in zip(layout.slots, layout.pieces, strict=True):
        if piece.key not in arrays:
            arrays[piece.key] = contents.read(piece.key)
        array = without_batch(arrays[piece.key], 2 if piece.plane is None else 3)
        if array.ndim != (2 if piece.plane is None else 3):
            raise CheckpointError(f"{contents.name}: '{piece.key}' has shape {list(array.shape)} where states were expected")
        states[slot.position] = array[:, piece.first : piece.last] if piece.plane is None else array.select(piece.axis, piece.plane)
    ids = contents.read(layout.ids).reshape(-1).to(torch.int64)
    mask = contents.read(layout.mask).reshape(-1) != 0 if layout.mask else None
    extras = {key: without_batch(contents.read(of), 2 if key.startswith("topk") else 1) for key, of in layout.extras.items()}
    for key in ("target_argmax", "topk_ids"):
        if key in extras:
            extras[key] = extras[key].to(torch.int64)
    return Sample(
        name=name,
        token_ids=ids,
        states=states,
        loss_mask=mask,
        target_argmax=extras.get("target_argmax"),
        topk_ids=extras.get("topk_ids"),
        topk_logprobs=extras.get("topk_logprobs"),
        logsumexp=extras.get("logsumexp"),
    )
