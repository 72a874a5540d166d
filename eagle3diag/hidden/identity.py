"""Two dumps of the same tokens side by side: which layer and which token a slot really holds.

The use: a training dump against one taken from the server. Samples are paired by their tokens, every slot of one dump is held against
every slot of the other at every small shift, and the best match names the fault: you are one layer late, one token late. States of
equal layers differ by numerics alone (relative error of hundredths at most), neighbouring layers by a tenth or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Piece, Shown, data
from eagle3diag.errors import CheckpointError
from eagle3diag.hidden.model import HiddenDump, NormStatus, Sample, Slot
from eagle3diag.hidden.rowstats import one_thread, shared_beginning

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DumpComparison", "SlotMatch", "compare"]

_PAIRS, _LOOKED_AT, _ROWS, _BYTES = 16, 256, 256, 256 << 20
_LEAST_COMMON = 8  #: tokens two samples must share to be a pair
_SAME = 0.1  #: relative error below which two slots hold the same state


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SlotMatch(Piece):
    """One slot of the first dump against the second.

    Cosines and relative errors ``|a - b| / |a|`` are medians over rows (None without rows).

    Attributes:
        slot, hf: name and HF index (None where not recorded) in the first dump.
        expected, cosine, error: the slot of the second dump that should be the same, and how near it is at shift 0; None where nobody
            knows which (no index on one side and another number of slots, or final states on different sides of the norm).
        best, best_hf, best_shift, best_cosine, best_error: the nearest slot at any shift; a shift of 1 means that row t of the first is row
            t + 1 of the second: the second is one token late.
        by_shift: relative error of the best slot per shift, in order of ``DumpComparison.shifts``.
    """

    slot: str
    hf: int | None
    expected: str | None
    cosine: float | None
    error: float | None
    best: str
    best_hf: int | None
    best_shift: int
    best_cosine: float
    best_error: float
    by_shift: tuple[float | None, ...]

    @property
    def same(self) -> bool:
        """The best match is a match, not only the nearest there is."""
        return self.best_error < _SAME


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DumpComparison(Shown):
    """What two dumps have in common.

    Attributes:
        a, b: paths.
        samples, rows: how many pairs of samples, and rows, were compared.
        shifts: token shifts tried.
        layers: one per slot of the first dump.
        errors: relative error at shift 0, [slots of a][slots of b], for a picture; None where there are no rows.
        columns: names of the second dump's slots.
    """

    a: str
    b: str
    samples: int
    rows: int
    shifts: tuple[int, ...]
    layers: tuple[SlotMatch, ...]
    errors: tuple[tuple[float | None, ...], ...]
    columns: tuple[str, ...]

    @property
    def token_shift(self) -> int | None:
        """Tokens by which the second dump is late (negative: early), where the matching slots agree; None where they do not."""
        found = {m.best_shift for m in self.layers if m.same}
        return found.pop() if len(found) == 1 else None

    @property
    def layer_shift(self) -> int | None:
        """What to add to the first dump's HF indices to get the layers it holds by the second's, where the matching slots agree."""
        found = {m.best_hf - m.hf for m in self.layers if m.same and m.hf is not None and m.best_hf is not None}
        return found.pop() if len(found) == 1 else None

    @property
    def verdict(self) -> str:
        """The table in one line."""
        matched = [m for m in self.layers if m.same]
        if not matched:
            return "no slot of the first dump is in the second: other layers, another target, or another basis"
        said = []
        if self.token_shift is None:
            said.append("slots are shifted by different numbers of tokens")
        elif self.token_shift:
            said.append(f"the second is {abs(self.token_shift)} token{'s' * (abs(self.token_shift) > 1)} {_late(self.token_shift)}")
        if self.layer_shift:
            n = abs(self.layer_shift)
            said.append(f"the first holds layers {n} {_late(self.layer_shift)} by the second's count")
        elif self.layer_shift is None and any(m.hf is not None and m.best_hf is not None for m in matched):
            said.append("slots hold other layers than recorded, by different numbers")
        if any(m.hf is None and m.best_hf is not None for m in matched):
            said.append(f"the first holds HF {', '.join(str(m.best_hf) for m in matched if m.best_hf is not None)} by the second's count")
        wrong = [m for m in matched if m.expected is not None and m.best != m.expected]
        if wrong and not self.layer_shift:
            said.append("slots changed places: " + ", ".join(f"{m.slot} is {m.best}" for m in wrong))
        if len(matched) < len(self.layers):
            said.append(f"{len(self.layers) - len(matched)} of {len(self.layers)} slots are not in the second")
        return "; ".join(said) or "the same states"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = asdict(self)
        return data(
            {
                "schema": 1,
                **plain,
                "layers": [asdict(m) | {"same": m.same} for m in self.layers],
                "token_shift": self.token_shift,
                "layer_shift": self.layer_shift,
                "verdict": self.verdict,
            }
        )


def _late(n: int) -> str:
    return "late" if n > 0 else "early"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pair:
    """Rows of two samples that stand for the same tokens: [rows, hidden] float32 by slot position, and their norms."""

    a: dict[int, Tensor]
    b: dict[int, Tensor]
    sizes_a: dict[int, Tensor]
    sizes_b: dict[int, Tensor]


def compare(a: HiddenDump, b: HiddenDump, *, shifts: int = 4) -> DumpComparison:
    """Compares two dumps on the samples they share.

    Args:
        a: the dump in question, for example the one trained on.
        b: the one to trust, for example from the server; best with more layers than ``a`` and their HF indices.
        shifts: tokens to look to either side.

    Raises:
        CheckpointError: other widths, or no sample of one begins like a sample of the other.
    """
    if a.hidden != b.hidden:
        raise CheckpointError(f"{a.path} holds states of width {a.hidden}, {b.path} of width {b.hidden}: they are of different targets")
    if not a.slots or not b.slots:
        raise CheckpointError(f"{a.path if not a.slots else b.path}: no state to compare")
    with one_thread():
        pairs = list(_pairs(a, b))
        if not pairs:
            raise CheckpointError(
                f"{a.path} and {b.path}: no two samples share {_LEAST_COMMON} tokens at their beginning; dump the same prompts for both"
            )
        tried = tuple(range(-shifts, shifts + 1))
        table = {(x.position, y.position, s): _near(pairs, x, y, s) for x in a.slots for y in b.slots for s in tried}
    layers = tuple(_match(a, b, x, table, tried) for x in a.slots)
    return DumpComparison(
        a=a.path,
        b=b.path,
        samples=len(pairs),
        rows=sum(len(next(iter(p.a.values()))) for p in pairs),
        shifts=tried,
        layers=layers,
        errors=tuple(tuple(e[1] if (e := table[x.position, y.position, 0]) else None for y in b.slots) for x in a.slots),
        columns=tuple(y.name for y in b.slots),
    )


def _pairs(a: HiddenDump, b: HiddenDump) -> Iterator[_Pair]:
    """Samples of both dumps that begin with the same tokens; a first token only one side has is passed over."""
    step = -(-len(a.samples) // _PAIRS) or 1
    refs = a.samples[::step]
    rows = max(32, min(_ROWS, _BYTES // max(1, len(refs) * (len(a.slots) + len(b.slots)) * a.hidden * 4)))
    kept = [_cut(a.read(ref), rows) for ref in refs]
    used: set[int] = set()
    for ref in b.samples[:_LOOKED_AT]:
        if len(used) == len(kept):
            return
        other = _cut(b.read(ref), rows)
        best, found = _LEAST_COMMON - 1, None
        for i, sample in enumerate(kept):
            for skip_a, skip_b in ((0, 0), (1, 0), (0, 1)):
                n = shared_beginning(sample.token_ids[skip_a:], other.token_ids[skip_b:]) if i not in used else 0
                if n > best:
                    best, found = n, (i, skip_a, skip_b)
        if found is not None:
            i, skip_a, skip_b = found
            used.add(i)
            x = {k: v[skip_a : skip_a + best].float() for k, v in kept[i].states.items()}
            y = {k: v[skip_b : skip_b + best].float() for k, v in other.states.items()}
            yield _Pair(a=x, b=y, sizes_a={k: v.norm(dim=-1) for k, v in x.items()}, sizes_b={k: v.norm(dim=-1) for k, v in y.items()})


def _cut(sample: Sample, most: int) -> Sample:
    rows = min([most, len(sample.token_ids), *(len(v) for v in sample.states.values())])
    return Sample(name=sample.name, token_ids=sample.token_ids[:rows], states={k: v[:rows].clone() for k, v in sample.states.items()})


def _near(pairs: Sequence[_Pair], x: Slot, y: Slot, shift: int) -> tuple[float, float] | None:
    """(median cosine, median relative error) of row t of one slot and row t + shift of another; None without rows."""
    import torch

    cosines, errors = [], []
    for p in pairs:
        one, two = p.a[x.position], p.b[y.position]
        n = min(len(one), len(two))
        low, high = max(0, -shift), n - max(0, shift)
        if high - low < 2:
            continue
        u, v = one[low:high], two[low + shift : high + shift]
        size, other = p.sizes_a[x.position][low:high], p.sizes_b[y.position][low + shift : high + shift]
        fine = size.isfinite() & other.isfinite() & (size > 0)
        cosines.append((torch.einsum("ij,ij->i", u, v) / (size * other))[fine])
        errors.append((torch.linalg.vector_norm(u - v, dim=-1) / size)[fine])
    if not sum(map(len, errors)):
        return None
    return float(torch.cat(cosines).median()), float(torch.cat(errors).median())


def _match(
    a: HiddenDump, b: HiddenDump, x: Slot, table: dict[tuple[int, int, int], tuple[float, float] | None], tried: tuple[int, ...]
) -> SlotMatch:
    places = [(e[1], abs(s), y.position, s, e[0], y) for y in b.slots for s in tried if (e := table[x.position, y.position, s]) is not None]
    if not places:
        raise CheckpointError(f"{a.path}: no finite row of {x.name} to compare")
    error, _, position, shift, cosine, best = min(places, key=lambda place: place[:3])
    twin = _twin(a, b, x)
    here = table[x.position, twin.position, 0] if twin is not None else None
    return SlotMatch(
        slot=x.name,
        hf=x.hf,
        expected=twin.name if twin is not None else None,
        cosine=here[0] if here else None,
        error=here[1] if here else None,
        best=best.name,
        best_hf=best.hf,
        best_shift=shift,
        best_cosine=cosine,
        best_error=error,
        by_shift=tuple(e[1] if (e := table[x.position, position, s]) else None for s in tried),
    )


def _twin(a: HiddenDump, b: HiddenDump, x: Slot) -> Slot | None:
    """The slot of the second dump that is meant to be the same."""
    if x.role == "final":
        sides: set[NormStatus] = {a.final_norm, b.final_norm}
        return b.final if len(sides - {"unknown"}) < 2 else None
    if x.hf is not None and any(y.hf is not None for y in b.aux):
        return next((y for y in b.aux if y.hf == x.hf), None)
    return b.aux[a.aux.index(x)] if len(a.aux) == len(b.aux) else None
