"""How well a draft agrees with its target on a dump, step by step, and the acceptance length that follows.

Top-1 rates have three definitions (joint, conditional, marginal), the expected acceptance of sampling is the mean of sum(min(p, q)), the
divergence KL(p || q) is taken over the draft's vocabulary because outside it is infinite. Everything is counted on the full vocabulary (a
target token that the draft cannot name is a miss) and, where the target's distribution is known there, restricted to the draft's. Later
steps are fed the text (``forced``) or the draft's own tokens (``on-policy``); the two agree on joint rates wherever the text is the
target's own greedy text. Conventions are those of the sample's manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.display import Piece, Shown, data
from eagle3diag.draft import lengths
from eagle3diag.draft.answers import Answers, answers
from eagle3diag.draft.bootstrap import blocks
from eagle3diag.draft.breakdown import Part, by_class, by_position
from eagle3diag.draft.lengths import Rates, accepted, expected_lengths, interval, rates, walk
from eagle3diag.draft.measure import Bench, Measured, joined
from eagle3diag.draft.model import StepOutput, Tokens
from eagle3diag.draft.rows import Rows
from eagle3diag.hidden.model import HiddenDump

__all__ = ["Agreement", "StepAgreement", "agree_bench", "agreement"]

DEFINITION: dict[str, str] = {
    **lengths.DEFINITIONS,
    "rows": "row t pairs token t+1 with the states of token t and predicts the target's greedy token after it; step s is fed token t+1+s; "
    "counted are rows 0 <= t < T - steps whose token t+1 is in the loss mask",
    "vocabulary": "full: a target token outside the draft's vocabulary counts as wrong; restricted: against the target's best inside it",
    "expected_acceptance": "mean over rows of sum(min(p, q)), p of the target over its vocabulary, q of the draft: acceptance of sampling",
    "kl": "mean over rows of KL(p || q) in nats, p renormalised over the draft's vocabulary",
    "coverage": "share of rows whose target token the draft's vocabulary holds",
    "coverage_mass": "mean share of the target's probability on the draft's vocabulary",
    "interval": "95 %, by resampling blocks of consecutive rows",
    "on_policy": "later steps are fed the draft's own tokens; judged against the same text",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepAgreement(Piece):
    """One draft step. None where nothing at hand tells it.

    Attributes:
        step: from 0.
        joint, conditional, marginal: top-1 on the full vocabulary.
        joint_restricted, marginal_restricted: against the target's best token inside the draft's vocabulary.
        expected_acceptance: sum(min(p, q)); ``bounds`` hold it where it is known between two only.
        expected_acceptance_restricted: the same with p renormalised over the draft's vocabulary.
        kl: nats.
        n: rows.
    """

    step: int
    joint: float
    conditional: float | None
    marginal: float
    joint_restricted: float | None = None
    marginal_restricted: float | None = None
    expected_acceptance: float | None = None
    bounds: tuple[float, float] | None = None
    expected_acceptance_restricted: float | None = None
    kl: float | None = None
    n: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one step."""
        return data(
            {
                "step": self.step,
                "joint": _round(self.joint),
                "conditional": _round(self.conditional),
                "marginal": _round(self.marginal),
                "joint_restricted": _round(self.joint_restricted),
                "marginal_restricted": _round(self.marginal_restricted),
                "expected_acceptance": _round(self.expected_acceptance),
                "expected_acceptance_bounds": None if self.bounds is None else [_round(b) for b in self.bounds],
                "expected_acceptance_restricted": _round(self.expected_acceptance_restricted),
                "kl": _round(self.kl),
                "n": self.n,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Agreement(Shown):
    """Agreement of one wiring with the target on one dump.

    Attributes:
        steps: teacher-forced; ``on_policy`` the same fed with the draft's own tokens, empty where not asked for.
        expected_length: ``{k: tokens per verification}`` with ``interval`` ``{k: (low, high)}``, and ``walk_length`` of the longest chain.
        coverage: share of rows whose target token the draft can name; ``coverage_mass`` in probability.
        misses_outside: share of the first step's misses that are such tokens.
        follows: share of counted tokens that are the target's own greedy choice; below 1 later steps judge a text it would not write.
        commonest: share of the commonest target token: what a constant guess would get.
        distribution: what the target's probabilities are worth (`answers.Scale`), ``choices`` where its greedy tokens come from.
        parts: the first step and the length by position and by token class.
    """

    wiring: Wiring
    steps: tuple[StepAgreement, ...]
    on_policy: tuple[StepAgreement, ...]
    expected_length: dict[int, float]
    interval: dict[int, tuple[float, float]]
    walk_length: float | None
    coverage: float
    coverage_mass: float | None
    misses_outside: float | None
    follows: float
    commonest: float
    rows: int
    samples: int
    distribution: str
    choices: str
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    nonfinite: int = 0
    constant: bool = False
    notes: tuple[str, ...] = ()
    definition: Mapping[str, str] = field(default_factory=lambda: dict(DEFINITION))

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``agree``."""
        return data(
            {
                "schema": 1,
                "definition": dict(self.definition),
                "steps": [s.to_dict() for s in self.steps],
                "on_policy": [s.to_dict() for s in self.on_policy],
                "expected_length": {str(k): _round(v) for k, v in self.expected_length.items()},
                "interval": {str(k): [_round(a), _round(b)] for k, (a, b) in self.interval.items()},
                "walk_length": _round(self.walk_length),
                "coverage": _round(self.coverage),
                "coverage_mass": _round(self.coverage_mass),
                "misses_outside": _round(self.misses_outside),
                "follows": _round(self.follows),
                "commonest": _round(self.commonest),
                "rows": self.rows,
                "samples": self.samples,
                "distribution": self.distribution,
                "choices": self.choices,
                "wiring": {k: list(v) if isinstance(v, tuple) else v for k, v in self.wiring.to_dict().items()},
                "by": {name: [p.to_dict() for p in parts] for name, parts in self.parts.items()},
                "notes": list(self.notes),
            }
        )


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 6)


def agreement(
    draft: Checkpoint,
    spec: DraftSpec,
    dump: HiddenDump,
    target: TargetSpec | None = None,
    *,
    wiring: Wiring | None = None,
    steps: int = 4,
    on_policy: bool = True,
    max_rows: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Agreement:
    """Run a draft on a dump and count.

    Args:
        draft, spec, dump, target: opened; the target may be its config and rows only, or None for a portable dump with its choices stored.
        wiring: to run, the draft's own where None.
        steps: draft steps; the longest chain.
        on_policy: also feed the draft its own tokens.
        max_rows: read about as many rows.
        device, dtype: to compute on.

    Raises:
        CheckpointError: draft and dump do not fit, or nothing says what the target chose.

    Example:
        >>> from eagle3diag import draft_spec, open_checkpoint, open_dump, open_target
        >>> draft = open_checkpoint("data_samples/smollm2-eagle3/draft")
        >>> dump, target = open_dump("data_samples/smollm2-eagle3/dumps"), open_target("data_samples/smollm2-eagle3/target")
        >>> found = agreement(draft, draft_spec(draft), dump, target, steps=3)
        >>> f"{found.expected_length[3]:.1f} tokens per verification in chains of 3"
        '1.4 tokens per verification in chains of 3'
    """
    bench = Bench.prepare(draft, spec, dump, target, base=wiring, steps=steps, max_rows=max_rows, device=device, dtype=dtype)
    return agree_bench(bench, on_policy=on_policy)


def agree_bench(bench: Bench, wiring: Wiring | None = None, *, on_policy: bool = True, distribution: bool = True) -> Agreement:
    """`agreement` on rows that are already read.

    Args:
        wiring: the bench's own where None.
        on_policy: also feed the draft its own tokens.
        distribution: also compare distributions where the target's is known.
    """
    wiring = bench.base if wiring is None else wiring
    forced = _pass(bench, wiring, "forced", distribution)
    policy = _pass(bench, wiring, "on-policy", distribution) if on_policy else None
    m, r = forced.measured, rates(forced.measured.right)
    block = blocks(m.sample, m.row)
    missed = ~m.right[:, 0]
    counts = torch.unique(m.expected[:, 0], return_counts=True)[1]
    return Agreement(
        wiring=wiring,
        steps=forced.steps(r),
        on_policy=() if policy is None else policy.steps(rates(policy.measured.right)),
        expected_length=expected_lengths(r.joint),
        interval=interval(m.right, block),
        walk_length=walk(accepted(m.right), m.sample, m.row, bench.steps),
        coverage=float(m.nameable[:, 0].double().mean()),
        coverage_mass=forced.mean("mass"),
        misses_outside=float((~m.nameable[missed, 0]).double().mean()) if bool(missed.any()) else None,
        follows=_follows(bench),
        commonest=float(counts.max()) / len(m),
        rows=len(m),
        samples=len(bench.samples),
        distribution=forced.scale,
        choices=bench.source,
        parts={"position": by_position(m), "class": by_class(m, bench)},
        nonfinite=forced.nonfinite,
        constant=forced.constant,
        notes=bench.notes,
    )


def _follows(bench: Bench) -> float:
    """Share of counted tokens that are the target's own greedy choice."""
    right = total = 0
    for sample, greedy in bench.samples:
        ids = sample.token_ids.to(torch.int64).flatten()
        mask = torch.ones(len(ids), dtype=torch.bool) if sample.loss_mask is None else sample.loss_mask.flatten().to(torch.bool)
        right += int((greedy[:-1] == ids[1:])[mask[1:]].sum())
        total += int(mask[1:].sum())
    return right / total if total else 0.0


@dataclass(slots=True, eq=False)
class _Pass:
    """Sums over one pass."""

    parts: list[Measured] = field(default_factory=list)
    restricted: list[Tensor] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    scale: str = "none"
    nonfinite: int = 0
    constant: bool = True
    last: Tensor | None = None

    @property
    def measured(self) -> Measured:
        return joined(self.parts)

    def add(self, name: str, step: int, steps: int, values: Tensor) -> None:
        total = self.sums.setdefault(name, torch.zeros(steps, dtype=torch.float64))
        total[step] += values.to(torch.float64).sum().cpu()

    def mean(self, name: str, step: int = 0) -> float | None:
        return float(self.sums[name][step]) / sum(len(p) for p in self.parts) if name in self.sums else None

    def steps(self, r: Rates) -> tuple[StepAgreement, ...]:
        inside = rates(torch.cat(self.restricted)) if self.restricted else None
        out = []
        for s in range(len(r.joint)):
            low, high = self.mean("low", s), self.mean("high", s)
            out.append(
                StepAgreement(
                    step=s,
                    joint=r.joint[s],
                    conditional=r.conditional[s],
                    marginal=r.marginal[s],
                    joint_restricted=None if inside is None else inside.joint[s],
                    marginal_restricted=None if inside is None else inside.marginal[s],
                    expected_acceptance=self.mean("overlap", s),
                    bounds=None if low is None or high is None else (low, high),
                    expected_acceptance_restricted=self.mean("inside", s),
                    kl=self.mean("kl", s),
                    n=r.rows,
                )
            )
        return tuple(out)


def _pass(bench: Bench, wiring: Wiring, tokens: Tokens, distribution: bool) -> _Pass:
    """Every sample once."""
    total, ids = _Pass(), bench.ids(wiring)
    for i, (sample, _) in enumerate(bench.samples):
        rows, out = bench.outputs(i, wiring, tokens=tokens)
        total.parts.append(bench.measured(i, wiring, rows, out))
        keep = rows.counted(bench.steps)
        total.nonfinite += sum(int((~torch.isfinite(o.logits[keep])).any(-1).sum()) for o in out)
        _constancy(total, out[0].logits[keep])
        if distribution:
            found = answers(sample, bench.slots, bench.status, bench.tables, ids.cpu(), target_layers=bench.target_layers)
            total.scale = found.scale
            _distribution(total, rows, out, keep, found, ids)
    return total


def _constancy(total: _Pass, logits: Tensor) -> None:
    """Whether the first step's logits are the same in every row."""
    for row in (logits[:1], logits[-1:]):
        if total.last is None:
            total.last = row
        total.constant &= bool(torch.equal(row, total.last))
    if total.constant and len(logits):
        total.constant = bool((logits == logits[0]).all())


def _distribution(total: _Pass, rows: Rows, out: list[StepOutput], keep: Tensor, found: Answers, ids: Tensor) -> None:
    """Adds what compares distributions: overlap, restricted top-1, divergence."""
    at, steps = torch.nonzero(keep).flatten(), len(out)
    if found.logprobs is not None:
        table = found.logprobs.to(ids.device)
        best, mass = table.argmax(-1), torch.logsumexp(table, -1)
        hits = []
        for s, one in enumerate(out):
            there = at + 1 + s
            logq = torch.log_softmax(one.logits[keep].float(), -1)
            logp = table[there]
            inside = logp - mass[there].unsqueeze(-1)
            total.add("overlap" if found.scale == "exact" else "high", s, steps, torch.minimum(logp, logq).exp().sum(-1))
            if found.scale != "exact":  # p is at most this; a share of it is missing, how much is not known
                total.add("low", s, steps, torch.zeros(len(at)))
            total.add("inside", s, steps, torch.minimum(inside, logq).exp().sum(-1))
            total.add("kl", s, steps, (inside.exp() * (inside - logq)).sum(-1))
            if found.scale == "exact":
                total.add("mass", s, steps, mass[there].exp())
            hits.append(one.logits[keep].argmax(-1) == best[there])
        total.restricted.append(torch.stack(hits, 1).cpu())
        return
    if found.topk_ids is None or found.topk_logprobs is None or found.scale != "top k":
        return
    column = torch.full((max(int(found.topk_ids.max()), int(ids.max())) + 1,), -1, dtype=torch.int64)
    column[ids.cpu()] = torch.arange(len(ids))
    for s, one in enumerate(out):
        there = (at + 1 + s).cpu()
        q = torch.softmax(one.logits[keep].float(), -1).cpu()
        p, place = found.topk_logprobs[there].exp(), column[found.topk_ids[there]]
        shared = torch.where(place >= 0, q.gather(-1, place.clamp(min=0)), torch.zeros_like(p))
        low = torch.minimum(p, shared).sum(-1)
        total.add("low", s, steps, low)
        total.add("high", s, steps, (low + torch.minimum(1 - p.sum(-1), 1 - shared.sum(-1)).clamp(min=0)).clamp(max=1))
