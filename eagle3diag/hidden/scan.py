"""One reading of a dump for every check: counts and norms of all rows, and a small part of the states to compare.

Checks are many and a dump is large, so it is read once: per sample the numbers of every row are kept, per chosen sample its first rows
as they are (``Probe``, bounded in all by 256 MB). A dump beyond 2 GiB is judged by evenly spaced samples; ``chosen`` says which, and
the norm profile (``hidden.norms``) reads all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eagle3diag.errors import CheckpointError
from eagle3diag.hidden.model import HiddenDump, Sample, SampleRef, Slot
from eagle3diag.hidden.rowstats import one_thread, row_kurtosis, row_stats

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DumpScan", "Probe", "SlotRows", "Spans", "chosen", "scan", "spans"]

_READ_AT_MOST = 2 << 30  #: bytes of states
_ASSUMED_ROWS = 2048  #: of a sample whose header does not tell
_PROBES, _PROBE_ROWS, _PROBE_BYTES = 32, 512, 256 << 20
_WILD_SPREAD = 5.0  #: bits, standard deviation of log2|x| in a row: states 1.6 to 2.6 (1.6 if normal), random bits 9 (float16) to 73
_FAR_NORM = 30.0  #: rows this many times above or below the median norm are looked at
_FLAT = 3.9  #: kurtosis over channels: 3 for noise, 20 to 150 for the states of trained models
_LEAST_TAIL = 8  #: rows

Spans = tuple[tuple[int, int], ...]  #: ``(first, last)`` rows, both included


def spans(rows: Tensor) -> Spans:
    """Runs of true in a bool vector."""
    out: list[tuple[int, int]] = []
    for row in rows.nonzero().flatten().tolist():
        if out and out[-1][1] == row - 1:
            out[-1] = (out[-1][0], row)
        else:
            out.append((row, row))
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRows:
    """What is known of every row of one slot of one sample.

    Attributes:
        l2: [rows] float64.
        nan, zero, garbage: [rows] bool, exclusive: NaN or Inf in a row that is otherwise a state; nothing but zeros (or one constant);
            random bits, noise, or a norm no state has.
        holes: how many values of the ``nan`` rows are NaN or Inf.
        infinite: True where those are all Inf.
    """

    l2: Tensor
    nan: Tensor
    zero: Tensor
    garbage: Tensor
    holes: int = 0
    infinite: bool = False

    @property
    def good(self) -> Tensor:
        """[rows] bool: rows that can be judged."""
        return ~(self.nan | self.zero | self.garbage)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """The first rows of a sample.

    Attributes:
        token_ids: [n] int64.
        states: by slot position [n, hidden], as stored.
        good: [n] bool, rows sound in every slot.
        kurtosis: by slot position [n] float64.
    """

    name: str
    token_ids: Tensor
    states: Mapping[int, Tensor]
    good: Tensor
    kurtosis: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleScan:
    """One sample: lengths, rows by slot position, its tokens and mask."""

    name: str
    tokens: int
    rows: Mapping[int, SlotRows]
    token_ids: Tensor
    loss_mask: Tensor | None

    @property
    def whole(self) -> bool:
        """As many rows as tokens in every slot."""
        return all(len(r.l2) == self.tokens for r in self.rows.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DumpScan:
    """Everything the checks look at.

    Attributes:
        of: samples in the dump; ``samples`` are those read.
        unread: (name, one line) of samples that cannot be read.
        probes: of whole samples only.
    """

    dump: HiddenDump
    of: int
    samples: tuple[SampleScan, ...]
    unread: tuple[tuple[str, str], ...] = ()
    probes: tuple[Probe, ...] = field(default=())


def chosen(dump: HiddenDump) -> tuple[SampleRef, ...]:
    """The samples a check reads: all of a dump up to 2 GiB of states, else evenly spaced ones."""
    row = max(1, len(dump.slots) * dump.hidden * 2)
    sizes = [(ref.rows if ref.rows is not None else _ASSUMED_ROWS) * row for ref in dump.samples]
    total = sum(sizes)
    if total <= _READ_AT_MOST or len(sizes) < 2:
        return dump.samples
    step = -(-total // _READ_AT_MOST)
    return dump.samples[::step]


def scan(dump: HiddenDump) -> DumpScan:
    """Reads the chosen samples, one in memory at a time."""
    refs = chosen(dump)
    probed = {refs[i * len(refs) // _PROBES].name for i in range(_PROBES)} if len(refs) > _PROBES else {r.name for r in refs}
    rows = _PROBE_BYTES // max(1, min(len(refs), _PROBES) * len(dump.slots) * dump.hidden * 4)
    samples, unread, probes = [], [], []
    with one_thread():
        for ref in refs:
            try:
                sample = dump.read(ref)
            except CheckpointError as error:
                unread.append((ref.name, str(error)))
                continue
            seen = _look(dump.slots, sample)
            samples.append(seen)
            if ref.name in probed and seen.whole:
                probes.append(_probe(dump.slots, sample, seen, max(32, min(rows, _PROBE_ROWS))))
    return DumpScan(dump=dump, of=len(dump.samples), samples=tuple(samples), unread=tuple(unread), probes=tuple(probes))


def _look(slots: Sequence[Slot], sample: Sample) -> SampleScan:
    rows = {s.position: _slot(s, sample.states[s.position]) for s in slots}
    return SampleScan(
        name=sample.name, tokens=len(sample.token_ids), rows=rows, token_ids=sample.token_ids.clone(), loss_mask=sample.loss_mask
    )


def _slot(slot: Slot, states: Tensor) -> SlotRows:
    import torch

    stats = row_stats(states)
    zero = stats.finite & ((stats.max_abs == 0) | ((stats.mean.abs() - stats.max_abs).abs() <= 1e-6 * stats.max_abs))
    if slot.hf == 0 or states.shape[1] < 2:  # the embedding of a padding token may be all zeros
        zero &= False
    odd = ~stats.finite
    sound = stats.l2[stats.finite & ~zero]
    middle = float(sound.median()) if len(sound) else 0.0
    far = stats.finite & ~zero & ((stats.l2 > _FAR_NORM * middle) | (stats.l2 * _FAR_NORM < middle))
    wild = _wild(states, odd | far)
    tiny = far & (stats.l2 < middle) if slot.hf != 0 else far & False
    garbage = wild | tiny | _noise(slot, states, stats.finite & ~zero & ~wild)
    nan = odd & ~garbage
    holes = states[nan]
    count = int((~torch.isfinite(holes)).sum()) if len(holes) else 0
    return SlotRows(
        l2=stats.l2,
        nan=nan,
        zero=zero,
        garbage=garbage,
        holes=count,
        infinite=count > 0 and not bool(torch.isnan(holes).any()),
    )


def _wild(states: Tensor, rows: Tensor) -> Tensor:
    """Rows whose sizes are spread over far more powers of two than any state's: the bits of something else."""
    import torch

    out = torch.zeros_like(rows)
    for row in rows.nonzero().flatten().tolist():
        sizes = states[row].double().abs()
        sizes = sizes[torch.isfinite(sizes) & (sizes > 0)].log2()
        out[row] = len(sizes) >= 16 and float(sizes.std()) > _WILD_SPREAD
    return out


def _noise(slot: Slot, states: Tensor, fine: Tensor) -> Tensor:
    """A tail of rows without any of the structure that the rows before it have."""
    import torch

    out = torch.zeros_like(fine)
    rows = len(states)
    if slot.hf == 0 or states.shape[1] < 256 or rows < 4 * _LEAST_TAIL:
        return out
    tail = states[rows // 2 :]
    flat = (row_kurtosis(tail) < _FLAT) | ~fine[rows // 2 :]
    length = int(torch.cumprod(flat.flip(0).to(torch.int64), 0).sum())
    before = row_kurtosis(states[: rows // 2])[fine[: rows // 2]]
    if _LEAST_TAIL <= length < len(tail) and len(before) and float(before.quantile(0.05)) > 2 * _FLAT:
        out[rows - length :] = fine[rows - length :]
    return out


def _probe(slots: Sequence[Slot], sample: Sample, seen: SampleScan, rows: int) -> Probe:
    import torch

    states = {s.position: sample.states[s.position][:rows].clone() for s in slots}
    good = torch.stack([r.good[:rows] for r in seen.rows.values()]).all(0) if slots else torch.zeros(0, dtype=torch.bool)
    kurtosis = {p: row_kurtosis(x) for p, x in states.items()}
    return Probe(name=sample.name, token_ids=seen.token_ids[:rows], states=states, good=good, kurtosis=kurtosis)
