"""What a step hands out and what the layers remember: the rows' keys in training's forward, the cache in real drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3diag.draft.layers import KeysValues

__all__ = ["DraftCache", "StepOutput", "first_step", "later_step"]


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """One step.

    Attributes:
        logits: [rows, draft vocabulary] in the computing dtype; column ``i`` is draft id ``i``.
        hidden: [rows, hidden]: what the next step is fed.
        tokens: [rows] int64: target ids that were fed.
        unknown: [rows] bool: the fed token has no embedding row here (on-policy only; zeros stood in), None where all have.
    """

    logits: Tensor
    hidden: Tensor
    tokens: Tensor
    unknown: Tensor | None = None


@dataclass(slots=True, eq=False)
class DraftCache:
    """The KV cache of real drafting: per layer, keys and values of every position so far, and the positions themselves."""

    layers: list[KeysValues] = field(default_factory=list)
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.positions)

    def append(self, index: int, k: Tensor, v: Tensor) -> KeysValues:
        """Add the keys and values of new positions to layer ``index``."""
        if index == len(self.layers):
            self.layers.append(KeysValues(k, v))
        else:
            kv = self.layers[index]
            kv.keys, kv.values = torch.cat((kv.keys, k)), torch.cat((kv.values, v))
        return self.layers[index]

    def crop(self, length: int) -> None:
        """Forget everything after the first ``length`` entries (a rejected chain)."""
        self.positions = self.positions[:length]
        for kv in self.layers:
            kv.keys, kv.values = kv.keys[:length], kv.values[:length]


def first_step(memory: list[KeysValues]) -> Callable[[int, Tensor, Tensor], KeysValues]:
    """Remember step 0: one entry a layer, in order."""

    def remember(index: int, k: Tensor, v: Tensor) -> KeysValues:
        memory.append(KeysValues(k, v))
        return memory[index]

    return remember


def later_step(memory: list[KeysValues]) -> Callable[[int, Tensor, Tensor], KeysValues]:
    """Remember a later step beside step 0."""

    def remember(index: int, k: Tensor, v: Tensor) -> KeysValues:
        memory[index].later.append((k, v))
        return memory[index]

    return remember
