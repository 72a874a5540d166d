"""Rows of a dump as a draft sees them: which token stands beside which state, at which position, and what is right.

Every trainer feeds (token t+1, states of token t) and predicts the token after it; they differ in bookkeeping only (facts of the dialects,
4.3). Here row ``t`` holds the states of token ``t``; at step ``s`` it is fed token ``t + 1 + s`` at position id ``t + 1 + s`` and is right
where it names the target's choice after that token. ``Wiring.token_shift`` and ``state_shift`` move what is fed, never what is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.hidden.model import NormStatus, Sample, Slot

__all__ = ["Rows", "labelled", "make_rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """One sample cut into rows ``t = 0 .. T-2``.

    Attributes:
        name: of the sample.
        states: [rows, slots, target hidden] in the stored dtype, in the wiring's order.
        token_ids: [T] int64 of the sample.
        positions: [rows] int64: position ids of step 0, ``t + 1``.
        targets: [T] int64: the target's greedy choice after each token, None where the dump does not say.
        loss_mask: [T] bool; all true where the dump has none.
        token_shift: of the wiring.
        final_norm: the states still have to go through the target's final norm (wiring ``aux_norm`` or a final state stored before it).
    """

    name: str
    states: Tensor
    token_ids: Tensor
    positions: Tensor
    targets: Tensor | None
    loss_mask: Tensor
    token_shift: int = 0
    final_norm: bool = False

    def __len__(self) -> int:
        return self.states.shape[0]

    def tokens(self, step: int) -> Tensor:
        """[rows] int64: the tokens a teacher-forced draft is fed at ``step``; past the end of the text the last token stands in."""
        at = torch.arange(len(self), device=self.token_ids.device) + 1 + self.token_shift + step
        return self.token_ids[at.clamp(0, len(self.token_ids) - 1)]

    def expected(self, step: int) -> Tensor:
        """[rows] int64: the target's choice at ``step``, -1 past the end of the text.

        Raises:
            CheckpointError: the dump does not store the target's choices.
        """
        if self.targets is None:
            raise CheckpointError(f"{self.name}: the dump does not store the target's choices; give the target's head and final norm")
        at = torch.arange(len(self), device=self.targets.device) + 1 + step
        inside = at < len(self.targets)
        return torch.where(inside, self.targets[at.clamp(max=len(self.targets) - 1)], torch.full_like(at, -1))

    def counted(self, steps: int) -> Tensor:
        """[rows] bool: rows that every one of ``steps`` steps can be judged on: ``t < T - steps`` and token ``t + 1`` in the loss mask."""
        t = torch.arange(len(self), device=self.loss_mask.device)
        return (t < len(self.token_ids) - steps) & self.loss_mask[1:]

    def to(self, device: torch.device | str) -> Rows:
        """The same rows on another device."""
        return replace(
            self,
            states=self.states.to(device),
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            targets=None if self.targets is None else self.targets.to(device),
            loss_mask=self.loss_mask.to(device),
        )


def labelled(slots: Sequence[Slot], aux_layers: Sequence[int] | None, *, path: str = "dump") -> tuple[Slot, ...]:
    """Slots with HF indices; where the file records none, its aux slots are taken to be ``aux_layers`` in stored order.

    Raises:
        CheckpointError: unlabelled slots and no, or not as many, layers to call them by.
    """
    aux = [s for s in slots if s.role == "aux"]
    if all(s.hf is not None for s in aux):
        return tuple(slots)
    if aux_layers is None or len(aux_layers) != len(aux):
        have = "none are known" if aux_layers is None else f"{len(aux_layers)} are known"
        raise CheckpointError(f"{escaped(path, 200)}: {len(aux)} states without layer ids, and {have}; name the layers of the dump")
    names = {s.position: k for s, k in zip(aux, aux_layers, strict=True)}
    return tuple(replace(s, hf=names[s.position]) if s.position in names else s for s in slots)


def make_rows(
    sample: Sample,
    slots: Sequence[Slot],
    wiring: Wiring,
    *,
    final_norm: NormStatus = "unknown",
    target_layers: int | None = None,
    targets: Tensor | None = None,
) -> Rows:
    """Cut a sample into rows for one wiring.

    Args:
        sample: in memory.
        slots: of the dump, with HF indices (see `labelled`).
        wiring: decides which states stand there in which order, and the shifts.
        final_norm: whether the dump's final state is before (``pre``) or after (``post``) the target's final norm.
        target_layers: N, so that HF index N finds a final state stored before the norm.
        targets: [T] the target's greedy choices, in place of those of the sample.

    Raises:
        CheckpointError: a wanted layer is not in the dump, or lengths differ.
    """
    chosen = _chosen(sample, slots, wiring, final_norm, target_layers)
    tokens = sample.token_ids.to(torch.int64).flatten()
    n = len(tokens)
    if n < 2:
        raise CheckpointError(f"{escaped(sample.name)}: {n} tokens; a draft needs two")
    parts = []
    for slot in chosen:
        state = sample.states[slot.position]
        if state.ndim != 2 or len(state) != n:
            raise CheckpointError(f"{escaped(sample.name)}: {escaped(slot.name)} has shape {list(state.shape)} beside {n} tokens")
        parts.append(state)
    at = (torch.arange(n - 1, device=tokens.device) + wiring.state_shift).clamp(0, n - 1)
    final_pre = wiring.state == "final" and final_norm == "pre"
    mask = torch.ones(n, dtype=torch.bool) if sample.loss_mask is None else sample.loss_mask.to(torch.bool).flatten()
    return Rows(
        name=sample.name,
        states=torch.stack([p[at] for p in parts], dim=1),
        token_ids=tokens,
        positions=torch.arange(1, n, device=tokens.device),
        targets=targets if targets is not None else sample.target_argmax,
        loss_mask=mask,
        token_shift=wiring.token_shift,
        final_norm=final_pre or wiring.aux_norm == "final",
    )


def _chosen(sample: Sample, slots: Sequence[Slot], wiring: Wiring, final_norm: NormStatus, target_layers: int | None) -> tuple[Slot, ...]:
    final = next((s for s in slots if s.role == "final"), None)
    if wiring.state == "final":
        if final is None:
            raise CheckpointError(f"{escaped(sample.name)}: this wiring is fed the target's last state, and the dump has none")
        return (final,)
    if wiring.aux_layers is None:
        raise CheckpointError(f"{escaped(sample.name)}: which target layers the draft is fed is not known; name them")
    by_layer = {s.hf: s for s in reversed(slots) if s.hf is not None and (s.role == "aux" or final_norm == "pre")}
    if final is not None and final_norm == "pre" and target_layers is not None:
        by_layer.setdefault(target_layers, final)
    missing = [k for k in wiring.aux_layers if k not in by_layer]
    if missing:
        have = ", ".join(str(k) for k in sorted(by_layer)) or "none"
        raise CheckpointError(f"{escaped(sample.name)}: the state of layer {missing[0]} (HF index) is not in the dump; it has {have}")
    return tuple(by_layer[k] for k in wiring.aux_layers)
