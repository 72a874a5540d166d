"""The nouns of hidden states: a dump, its slots, and one sample at a time.

A dump is what a trainer or a server wrote: token ids and, per token, some of the target's hidden states. ``HiddenDump`` knows the
format, the slots and what each is worth from headers and small keys alone; a ``Sample`` is read when asked for, one in memory at a time.
Layers are HF indices: ``k`` is ``output_hidden_states[k]``, 0 the embedding output, ``N`` (the layer count) the last layer's output
before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eagle3diag.display import Piece, Shown

if TYPE_CHECKING:
    import torch

__all__ = ["DumpIssue", "HiddenDump", "NormStatus", "Sample", "SampleRef", "Slot"]

NormStatus = Literal["pre", "post", "unknown"]


@dataclass(frozen=True, slots=True, repr=False)
class Slot(Piece):
    """One state per token in a dump.

    Attributes:
        position: 0-based place among the slots.
        hf: HF index where the file or its folder records it, else None.
        role: ``aux`` (a state in front of fc) or ``final`` (the last state).
        name: how it is found in the file: a key, or a key and a slice in words.
    """

    position: int
    hf: int | None
    role: Literal["aux", "final"]
    name: str


@dataclass(frozen=True, slots=True, repr=False)
class DumpIssue(Piece):
    """A deviation seen while opening: ``kind`` is ``unreadable``, ``length``, ``shape``, ``dtype``, ``mask``, ``ids`` or ``other``; one
    printable line."""

    kind: str
    file: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SampleRef(Piece):
    """One sample of a dump, not read yet.

    ``tokens`` and ``rows`` are the lengths as the headers state them (None where only reading tells); they should be equal. ``part``
    is the sample's place in a file of several: an index, or the byte its line starts at.
    """

    name: str
    file: str
    tokens: int | None
    rows: int | None
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sample(Piece):
    """One sample in memory.

    Attributes:
        token_ids: [tokens] int64.
        states: by slot position, [rows, hidden] in the stored dtype; rows may differ from tokens in a broken dump.
        loss_mask: [tokens] bool, or None where the format has none.
        target_argmax: [tokens] int64, the target's greedy choice after each position, where stored.
        topk_ids, topk_logprobs: [tokens, k] of the target's distribution after each position, where stored.
        logsumexp: [tokens] float, log-sum-exp of the target's logits, where stored.
    """

    name: str
    token_ids: torch.Tensor
    states: Mapping[int, torch.Tensor]
    loss_mask: torch.Tensor | None = None
    target_argmax: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_logprobs: torch.Tensor | None = None
    logsumexp: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HiddenDump(Shown):
    """A dump: a file or a folder of samples in one format.

    Attributes:
        format: ``portable``, ``speculators``, ``speculators-legacy``, ``speculators-v0``, ``specforge``, ``modelopt``, ``angelslim``,
            ``eagle1``, ``vllm-connector``, ``sglang-json``, ``baldeagle``, ``torchspec``.
        evidence: what the format was recognised by.
        hidden: width of one state.
        slots: in order of position; the aux slots in the order they are stored.
        final_norm: whether the final state is before or after the target's final norm, as the format writes it.
        samples: in file-name order.
        loader: reads one sample.
        axis: axis order of stacked states in words, e.g. ``tokens, slots, hidden``.
    """

    path: str
    format: str
    evidence: tuple[str, ...]
    hidden: int
    slots: tuple[Slot, ...]
    final_norm: NormStatus
    samples: tuple[SampleRef, ...]
    issues: tuple[DumpIssue, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    axis: str = ""
    loader: Callable[[SampleRef], Sample] | None = None

    @property
    def aux(self) -> tuple[Slot, ...]:
        """The slots in front of fc, in stored order."""
        return tuple(s for s in self.slots if s.role == "aux")

    @property
    def final(self) -> Slot | None:
        """The slot of the last state, if there is one."""
        return next((s for s in self.slots if s.role == "final"), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what the dump is, by its headers."""
        return {
            "path": self.path,
            "format": self.format,
            "evidence": list(self.evidence),
            "hidden": self.hidden,
            "axis": self.axis,
            "final_norm": self.final_norm,
            "slots": [{"slot": s.position, "hf": s.hf, "role": s.role, "name": s.name} for s in self.slots],
            "samples": len(self.samples),
            "issues": [{"kind": i.kind, "file": i.file, "message": i.message} for i in self.issues],
        }

    def read(self, ref: SampleRef) -> Sample:
        """One sample, in memory.

        Raises:
            CheckpointError: the file cannot be read, changed, or holds something else than its header said.
        """
        from eagle3diag.errors import CheckpointError

        if self.loader is None:
            raise CheckpointError(f"{self.path}: this dump has no reader")
        return self.loader(ref)

    def __iter__(self) -> Iterator[Sample]:
        """Samples one at a time."""
        return (self.read(ref) for ref in self.samples)

    def __len__(self) -> int:
        return len(self.samples)
