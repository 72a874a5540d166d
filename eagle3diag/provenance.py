"""A value that remembers where it came from.

Every normalised fact of a draft or target is a ``Valued``: the value, the kind of source, and the place,
so that a report can say "32000 (shape of lm_head.weight)" and a rule can weigh a recorded fact against a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from eagle3diag.display import Piece, data

__all__ = ["Source", "Valued", "absent"]

T = TypeVar("T")

Source = Literal["config", "shape", "values", "dialect", "engine", "absent"]


@dataclass(frozen=True, slots=True, repr=False)
class Valued(Piece, Generic[T]):
    """One normalised fact with its provenance.

    Attributes:
        value: the fact; ``None`` only where nothing is known.
        kind: ``config`` (a key was read), ``shape`` (a tensor's shape), ``values`` (tensor contents),
            ``dialect`` (the training framework's default), ``engine`` (an engine's default), ``absent``.
        where: the place in words: ``config.json: hidden_size``, ``shape of fc.weight``.
    """

    value: T
    kind: Source
    where: str

    def __str__(self) -> str:
        return f"{self.value} ({self.where})"

    @property
    def known(self) -> bool:
        """True where a file said so (a config key or a tensor), not a default."""
        return self.kind in ("config", "shape", "values")

    def to_dict(self) -> dict[str, object]:
        """``{"value": …, "source": "config: config.json: hidden_size"}`` for JSON output."""
        value: object = list(self.value) if isinstance(self.value, tuple) else self.value
        return data({"value": value, "source": f"{self.kind}: {self.where}"})


def absent(where: str = "not stated") -> Valued[None]:
    """A fact nobody stated."""
    return Valued(None, "absent", where)
