"""The rows of a dump, read once and run under one wiring after another.

A ``Bench`` holds what does not depend on the wiring: the draft's tensors, the target's tables, the samples with the target's greedy
choices, the rows that count. ``Bench.run`` gives, per counted row and step, whether the target's token was proposed and what it cost in
nats. A token that the wiring's vocabulary cannot name at all would cost infinitely much; probabilities are therefore mixed with a
thousandth of a uniform guess, which bounds the cost and changes little else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
from eagle3diag.checkpoint.target import open_target
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.answers import answers
from eagle3diag.draft.model import PlainDraft, StepOutput, Tokens
from eagle3diag.draft.rows import Rows, labelled, make_rows
from eagle3diag.draft.tables import TargetTables, load_tables
from eagle3diag.draft.weights import DraftWeights
from eagle3diag.errors import CheckpointError, UsageError, escaped
from eagle3diag.hidden.model import HiddenDump, NormStatus, Sample, Slot

__all__ = ["Bench", "Measured", "base_wiring", "joined"]

GUESS = 1e-3
MAX_STEPS = 32  #: no chain is longer
_LIMIT = 1 << 31  # bytes of samples kept in memory


def _finite(state: Tensor) -> bool:
    wide = state if state.element_size() > 1 else state.float()  # one-byte floats have no isfinite
    return bool(wide.isfinite().all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """One wiring on the counted rows of one or more samples.

    Attributes:
        sample: [n] int64 number of the sample in the bench.
        row: [n] int64 row in the sample.
        right: [n, steps] bool: the target's greedy token was proposed.
        nll: [n, steps] float32 nats: cost of the target's greedy token, bounded (see `GUESS`).
        nameable: [n, steps] bool: the vocabulary holds that token.
        proposed, expected: [n, steps] int64 target ids.
    """

    sample: Tensor
    row: Tensor
    right: Tensor
    nll: Tensor
    nameable: Tensor
    proposed: Tensor
    expected: Tensor

    def __len__(self) -> int:
        return len(self.row)


def joined(parts: Sequence[Measured]) -> Measured:
    """Several samples as one; at least one is needed."""
    names = Measured.__slots__
    return Measured(**{n: torch.cat([getattr(p, n) for p in parts]) for n in names})


def base_wiring(spec: DraftSpec, target: TargetSpec | None, dump: HiddenDump) -> tuple[Wiring, tuple[str, ...]]:
    """The wiring the draft was trained with, completed where no file says it, and what was assumed.

    Raises:
        CheckpointError: the layers are not known and the dump does not tell either.
    """
    w, notes = spec.wiring, []
    if w.rope_theta is None:
        theta = target.rope_theta.value if target is not None and target.rope_theta.value else 10000.0
        notes.append(f"no rope_theta recorded: {theta:g} taken")
        w = replace(w, rope_theta=theta)
    if w.aux_layers is None and w.state == "aux":
        stored = [s.hf for s in dump.aux]
        wanted = spec.n_aux.value
        if wanted is not None and len(stored) == wanted:
            layers = tuple(i + 1 if k is None else k for i, k in enumerate(stored))
            w = replace(w, aux_layers=layers)
            notes.append(f"no layer ids recorded: the dump's {len(stored)} states in stored order are taken")
        else:
            raise CheckpointError(f"{dump.path}: the draft records no layer ids, and the dump has {len(stored)} states; give --target")
    return w, tuple(notes)


@dataclass(kw_only=True, eq=False)
class Bench:
    """What one draft is measured on.

    Attributes:
        weights, spec, tables: of the draft and its target.
        slots: of the dump, with HF indices.
        status: whether its final state is before or after the target's final norm.
        target_layers: N, or None.
        base: the wiring at hand.
        samples: in memory, with the target's choices [T] beside each.
        steps: draft steps.
        source: where the target's choices come from.
        notes: what was assumed or left out.
    """

    weights: DraftWeights
    spec: DraftSpec
    tables: TargetTables
    slots: tuple[Slot, ...]
    status: NormStatus
    target_layers: int | None
    base: Wiring
    samples: tuple[tuple[Sample, Tensor], ...]
    steps: int = 4
    source: str = "stored"
    t2d: Tensor | None = None
    notes: tuple[str, ...] = ()
    path: str = ""
    _models: dict[str, PlainDraft] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        draft: Checkpoint,
        spec: DraftSpec,
        dump: HiddenDump,
        target: TargetSpec | None = None,
        *,
        base: Wiring | None = None,
        steps: int = 4,
        max_rows: int | None = None,
        max_answer: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        weights: DraftWeights | None = None,
        tables: TargetTables | None = None,
    ) -> Bench:
        """Read the draft and as much of the dump as is asked for.

        Args:
            target: its config, with its weights or rows; where they are missing, those a capture left beside the dump.
            base: the wiring at hand, the draft's own where None.
            steps: draft steps per row.
            max_rows: stop at about as many counted rows; samples are then taken evenly over the dump.
            max_answer: cut each sample as many tokens after the first that counts.
            dtype, device: to compute on.
            weights, tables: where the caller has them already.

        Raises:
            CheckpointError: draft and dump do not fit, no row counts, or nothing says what the target chose.
            UsageError: no step, no row, or more steps than any chain has.
        """
        if not 1 <= steps <= MAX_STEPS:
            raise UsageError(f"steps is {steps}: a chain has 1 to {MAX_STEPS} draft steps")
        if max_rows is not None and max_rows < 1:
            raise UsageError(f"rows is {max_rows}: at least 1 row must be read, leave it out for all")
        if target is None or target.embed is None:
            target = _beside(dump) or target
        own, notes = base_wiring(spec, target, dump)
        base = own if base is None else base
        if base.rope_theta is None:
            base = replace(base, rope_theta=own.rope_theta)
        slots = labelled(dump.slots, own.aux_layers, path=dump.path)
        if any(s.hf is None for s in dump.aux):
            notes = (
                *notes,
                f"the dump has no layer ids: its states are taken to be layers {', '.join(str(s.hf) for s in slots if s.role == 'aux')}",
            )
        n = None if target is None else target.num_layers.value
        tables = load_tables(target, draft, spec) if tables is None else tables
        bench = cls(
            weights=DraftWeights.load(draft, spec, dtype=dtype, device=device) if weights is None else weights,
            spec=spec,
            tables=tables,
            slots=slots,
            status=dump.final_norm,
            target_layers=n,
            base=base,
            samples=(),
            steps=steps,
            t2d=_marked(draft, spec),
            notes=notes,
            path=dump.path,
        )
        bench._read(dump, max_rows, max_answer)
        return bench

    def _read(self, dump: HiddenDump, max_rows: int | None, max_answer: int | None) -> None:
        refs = dump.samples
        taken: list[tuple[Sample, Tensor]] = []
        rows = held = short = unfinite = 0
        left = ""
        for ref in (refs[i] for i in _spread(len(refs))):
            sample = _shortened(dump.read(ref), max_answer)
            t = len(sample.token_ids)
            if t <= self.steps + 1:
                short += 1
                continue
            if not all(_finite(s) for s in sample.states.values()):  # the first token would win on both sides: all right
                unfinite += 1
                continue
            found = answers(sample, self.slots, self.status, self.tables, target_layers=self.target_layers)
            self.source = found.source
            taken.append((sample, found.greedy))
            rows += self._counts(sample)
            held += sum(s.numel() * s.element_size() for s in sample.states.values())
            if held > _LIMIT or (max_rows is not None and rows >= max_rows):
                left = f"{len(taken)} of {len(refs)} samples taken, evenly over the dump"
                break
        if left and len(taken) < len(refs):
            self.notes = (*self.notes, left)
        if short:
            self.notes = (*self.notes, f"{short} samples of at most {self.steps + 1} tokens left out")
        if unfinite:
            self.notes = (*self.notes, f"{unfinite} samples with NaN or Inf in a state left out")
        if rows == 0:
            bad = f", {unfinite} with NaN or Inf in a state" if unfinite else ""
            raise CheckpointError(
                f"{escaped(dump.path, 200)}: no row counts: {len(refs)} samples, {short} too short{bad}, the rest masked out"
            )
        self.samples = tuple(sorted(taken, key=lambda s: [r.name for r in refs].index(s[0].name)))

    def _counts(self, sample: Sample) -> int:
        t = len(sample.token_ids) - self.steps
        mask = sample.loss_mask
        return max(0, t) if mask is None else int(mask.flatten()[1 : t + 1].to(torch.bool).sum())

    @property
    def layers(self) -> tuple[int, ...]:
        """HF indices whose states can be fed, ascending; N where the final state before the norm is there."""
        found = {s.hf for s in self.slots if s.hf is not None and s.role == "aux"}
        if self.status == "pre" and self.target_layers is not None and any(s.role == "final" for s in self.slots):
            found.add(self.target_layers)
        return tuple(sorted(k for k in found if k is not None))

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(len(s.token_ids) for s, _ in self.samples)

    def rows(self, index: int, wiring: Wiring) -> Rows:
        """The rows of one sample under a wiring.

        Raises:
            CheckpointError: the wiring wants a state that the dump does not hold.
        """
        rows = self._cut(index, wiring)
        if wiring.aux_layers_verify not in (None, wiring.aux_layers):
            # states of generated tokens come from verify steps, those of the prompt from prefill
            other = self._cut(index, replace(wiring, aux_layers=wiring.aux_layers_verify))
            generated = self.samples[index][0].loss_mask
            taken = torch.ones(len(rows), dtype=torch.bool) if generated is None else generated.flatten()[: len(rows)].to(torch.bool)
            rows = replace(rows, states=torch.where(rearrange(taken, "r -> r 1 1"), other.states, rows.states))
        return rows.to(self.weights.device)

    def _cut(self, index: int, wiring: Wiring) -> Rows:
        sample, greedy = self.samples[index]
        return make_rows(sample, self.slots, wiring, final_norm=self.status, target_layers=self.target_layers, targets=greedy)

    def model(self, wiring: Wiring) -> PlainDraft:
        """The draft under a wiring; the last few are kept.

        Raises:
            CheckpointError: the wiring needs a tensor or table that is not there.
        """
        key = repr(sorted(wiring.to_dict().items()))
        if key not in self._models:
            while len(self._models) >= 3:
                del self._models[next(iter(self._models))]
            weights, run = self.weights, wiring
            if wiring.head == "target-rows":
                rows = self.tables.head_rows(self.ids(wiring).to("cpu")).to(device=weights.device, dtype=weights.dtype)
                weights = replace(weights, tensors={**weights.tensors, "lm_head.weight": rows})
                run = replace(run, head="draft")
            if wiring.mapping == "t2d":
                run = replace(run, mapping="missing")
            self._models[key] = PlainDraft(weights, self.spec, run, self.tables)
        return self._models[key]

    def ids(self, wiring: Wiring) -> Tensor:
        """[draft vocabulary] int64: the target id of each column of the logits."""
        if wiring.mapping == "t2d":
            if self.t2d is None or len(self.t2d) != self.weights.sizes.draft_vocab:
                raise CheckpointError(f"{self.weights.path}: t2d does not mark as many tokens as the draft has")
            return self.t2d.to(self.weights.device)
        if wiring.head == "target-rows":
            return self.ids(replace(wiring, head="draft"))
        return self.model(wiring).target_ids

    def outputs(self, index: int, wiring: Wiring, *, steps: int | None = None, tokens: Tokens = "forced") -> tuple[Rows, list[StepOutput]]:
        """Rows and outputs of one sample."""
        rows = self.rows(index, wiring)
        return rows, self.model(wiring).run(rows, self.steps if steps is None else steps, tokens=tokens)

    def run(self, index: int, wiring: Wiring, *, steps: int | None = None, tokens: Tokens = "forced") -> Measured:
        """One wiring on one sample; the rows that count are always those that all of the bench's steps can be judged on.

        Args:
            index: of the sample.
            wiring: to run.
            steps: fewer steps than the bench has.
            tokens: what later steps are fed.

        Raises:
            CheckpointError: the wiring cannot be run on this dump.
        """
        rows, out = self.outputs(index, wiring, steps=steps, tokens=tokens)
        return self.measured(index, wiring, rows, out)

    def measured(self, index: int, wiring: Wiring, rows: Rows, out: Sequence[StepOutput]) -> Measured:
        """Outputs of one sample, counted."""
        ids, keep = self.ids(wiring), rows.counted(self.steps)
        place = self._columns(ids)
        right, nll, nameable, proposed, expected = [], [], [], [], []
        for step, one in enumerate(out):
            logits, wanted = one.logits[keep].float(), rows.expected(step)[keep]
            column = place[wanted.clamp(0, len(place) - 1)]
            column = torch.where((wanted >= 0) & (wanted < len(place)), column, torch.full_like(column, -1))
            named = column >= 0
            chosen = ids[logits.argmax(-1)]
            logp = logits.gather(-1, column.clamp(min=0).unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)
            p = torch.where(named, logp.exp(), torch.zeros_like(logp)).nan_to_num(0.0)
            proposed.append(chosen)
            expected.append(wanted)
            right.append(chosen == wanted)
            nll.append(-torch.log((1 - GUESS) * p + GUESS / max(len(place), 2)))
            nameable.append(named)
        where = torch.nonzero(keep).flatten()
        columns = [torch.stack(v, 1).cpu() for v in (right, nll, nameable, proposed, expected)]
        return Measured(
            sample=torch.full_like(where, index).cpu(),
            row=where.cpu(),
            right=columns[0],
            nll=columns[1],
            nameable=columns[2],
            proposed=columns[3],
            expected=columns[4],
        )

    def _columns(self, ids: Tensor) -> Tensor:
        """[vocabulary] int64: the column that names each target id, -1 where none does."""
        size = max(self.vocab, int(ids.max()) + 1 if len(ids) else 0)
        place = torch.full((size,), -1, dtype=torch.int64, device=ids.device)
        inside = ids >= 0
        place[ids[inside]] = torch.arange(len(ids), device=ids.device)[inside]
        return place

    @property
    def vocab(self) -> int:
        """Tokens of the target's vocabulary, as far as known."""
        return self.tables.vocab or self.weights.sizes.vocab or self.weights.sizes.draft_vocab

    def all(self, wiring: Wiring, *, steps: int | None = None, tokens: Tokens = "forced") -> Measured:
        """One wiring on every sample."""
        return joined([self.run(i, wiring, steps=steps, tokens=tokens) for i in range(len(self.samples))])

    def glance(self, wiring: Wiring, *, steps: int, rows: int = 64) -> Measured:
        """One wiring on the first ``rows`` counted rows of the first sample: the beginning of what `run` gives for it."""
        sample, greedy = self.samples[0]
        short = _shortened(sample, rows + self.steps)
        return replace(self, samples=((short, greedy[: len(short.token_ids)]),)).run(0, wiring, steps=steps)

    def within(self, rows: int) -> Bench:
        """The same on about ``rows`` counted rows: beginnings of samples spread evenly; itself where it has no more."""
        if sum(self._counts(sample) for sample, _ in self.samples) <= rows:
            return self
        number = min(len(self.samples), max(1, rows // 32))
        taken = sorted(at for at, _ in zip(_spread(len(self.samples)), range(number), strict=False))
        each = math.ceil(rows / number)
        cut = [(_shortened(self.samples[at][0], each + self.steps), self.samples[at][1]) for at in taken]
        return replace(self, samples=tuple((sample, greedy[: len(sample.token_ids)]) for sample, greedy in cut))


def _beside(dump: HiddenDump) -> TargetSpec | None:
    """The target's config and rows that a capture left with its dump, or None."""
    at = Path(dump.path)
    folder = at if at.is_dir() else at.parent
    for place in (folder, folder / "target"):
        if (place / "rows.safetensors").is_file() and (place / "config.json").is_file():
            try:
                return open_target(place)
            except CheckpointError:
                return None
    return None


def _marked(draft: Checkpoint, spec: DraftSpec) -> Tensor | None:
    """The ids the mask t2d marks, ascending; None without one."""
    name = spec.canonical.get("t2d")
    if name is None or name not in draft.tensors:
        return None
    return torch.nonzero(draft.read(name).flatten() != 0).flatten()


def _shortened(sample: Sample, answer: int | None) -> Sample:
    """The sample up to ``answer`` tokens after the first that counts."""
    if answer is None:
        return sample
    mask = sample.loss_mask
    counted = torch.nonzero(mask.flatten() != 0).flatten() if mask is not None else torch.zeros(1, dtype=torch.int64)
    stop = (int(counted[0]) if len(counted) else 0) + answer
    if stop >= len(sample.token_ids):
        return sample
    names = ("token_ids", "loss_mask", "target_argmax", "topk_ids", "topk_logprobs", "logsumexp")
    parts: dict[str, Any] = {n: None if (v := getattr(sample, n)) is None else v[:stop] for n in names}
    return replace(sample, states={k: v[:stop] for k, v in sample.states.items()}, **parts)


def _spread(n: int) -> Iterator[int]:
    """0 .. n-1 so that any beginning of it lies evenly over the whole: the bits of a counter, reversed."""
    bits = max(1, math.ceil(math.log2(n))) if n > 1 else 1
    for i in range(1 << bits):
        at = int(format(i, f"0{bits}b")[::-1], 2)
        if at < n:
            yield at
