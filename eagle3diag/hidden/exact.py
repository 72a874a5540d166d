"""Sums that do not depend on the order of their terms, so that a profile is the same whoever adds it up, and in what pieces.

A float64 is a whole number of units of 2**-1074; Python's integers add those without rounding. Vectors (one number a channel) use two
int64 limbs instead: terms are rounded once to 2**-36, and integers add exactly. Merging is integer addition either way: associative,
commutative, bit-identical for every partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3diag.display import Piece

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ExactSum", "ExactVector"]

_UNIT = 1074  #: the smallest positive float64 is 2**-1074
_LOW_BITS = 52  #: bits of the low limb
_STEP = 36  #: the low limb counts units of 2**-36, so the high one counts units of 2**16


@dataclass(frozen=True, slots=True, repr=False)
class ExactSum(Piece):
    """A sum of finite float64 terms, held without rounding."""

    units: int = 0

    @staticmethod
    def of(terms: Iterable[float]) -> ExactSum:
        """The sum of ``terms``, rounded once to float64 (correctly, whatever their order)."""
        top, bottom = math.fsum(terms).as_integer_ratio()
        return ExactSum(top << (_UNIT - (bottom.bit_length() - 1)))

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units)

    def over(self, n: int) -> float:
        """The sum divided by ``n``; nan for no terms."""
        return self.units / (n << _UNIT) if n else math.nan


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExactVector(Piece):
    """Sums per channel, terms below 2**68 in size rounded to 2**-36 once each.

    Attributes:
        high: [channels] int64, in units of 2**16.
        low: [channels] int64 in [0, 2**52), in units of 2**-36.
    """

    high: NDArray[np.int64]
    low: NDArray[np.int64]

    @staticmethod
    def of(term: NDArray[np.float64]) -> ExactVector:
        """One term: [channels] float64, finite; larger ones are cut to 2**68."""
        import numpy as np

        bounded = np.clip(term, -(2.0**68), 2.0**68)
        high = np.floor(bounded * 2.0**-16)
        low = np.rint((bounded - high * 2.0**16) * 2.0**_STEP)
        return ExactVector(high.astype(np.int64), low.astype(np.int64))._carried()

    def _carried(self) -> ExactVector:
        carry = self.low >> _LOW_BITS
        return ExactVector(self.high + carry, self.low - (carry << _LOW_BITS))

    def __add__(self, other: ExactVector) -> ExactVector:
        return ExactVector(self.high + other.high, self.low + other.low)._carried()

    def values(self) -> NDArray[np.float64]:
        """The sums as float64 [channels]."""
        import numpy as np

        return self.high.astype(np.float64) * 2.0**16 + self.low.astype(np.float64) * 2.0**-_STEP
