"""What the target says after each token of a sample: its greedy token, and its distribution over the draft's vocabulary.

The best source at hand is taken and named. The greedy token is stored, or the first of the stored top k, or computed from the final state
through the target's final norm and head. The distribution is exact where the final state and head rows give the logits and a stored
log-sum-exp (or top-k log-probability) their scale, or where the head is whole; over selected rows alone it is an upper bound; with a
stored top k and no head it is known between two bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagle3diag.draft.layers import rms_norm
from eagle3diag.draft.tables import TargetTables
from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.hidden.model import NormStatus, Sample, Slot

__all__ = ["Answers", "Scale", "answers", "final_states"]

Scale = Literal["exact", "upper bound", "top k", "none"]
_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answers:
    """The target's answers in one sample.

    Attributes:
        greedy: [T] int64: its first choice after each token.
        source: where that comes from, in words.
        logprobs: [T, draft vocabulary] float32: its log-probabilities of the draft's tokens, None where only a top k is known or nothing.
        scale: what ``logprobs`` are worth: ``exact``, ``upper bound`` (normalised over the known head rows), ``top k`` or ``none``.
        topk_ids, topk_logprobs: as stored.
    """

    greedy: Tensor
    source: str
    logprobs: Tensor | None = None
    scale: Scale = "none"
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None


def final_states(
    sample: Sample, slots: tuple[Slot, ...], status: NormStatus, tables: TargetTables, target_layers: int | None = None
) -> Tensor | None:
    """[T, hidden] float32: the target's last states after its final norm; None where the dump or the norm is missing.

    Raises:
        CheckpointError: they are not as wide as the target's norm and head.
    """
    final = next((s for s in slots if s.role == "final"), None)
    if final is None and target_layers is not None:
        final, status = next((s for s in slots if s.hf == target_layers), None), "pre"
    if final is None or status == "unknown":
        return None
    state = sample.states[final.position].float()
    for what, table in (("head", tables.head), ("final norm", tables.final_norm)):
        if table is not None and table.shape[-1] != state.shape[-1]:
            raise CheckpointError(
                f"{escaped(sample.name)}: the final state is {state.shape[-1]} wide, the {what} of the target takes {table.shape[-1]}: "
                "the dump is of another target"
            )
    if status == "post":
        return state
    return None if tables.final_norm is None else rms_norm(state, tables.final_norm.float(), tables.eps)


def answers(
    sample: Sample,
    slots: tuple[Slot, ...],
    status: NormStatus,
    tables: TargetTables,
    draft_ids: Tensor | None = None,
    *,
    target_layers: int | None = None,
) -> Answers:
    """The target's answers.

    Args:
        sample: in memory.
        slots: of the dump.
        status: whether its final state is before or after the final norm.
        tables: the target's.
        draft_ids: [draft vocabulary] int64: target ids the distribution is wanted for; None for the greedy tokens alone.
        target_layers: N, to find a final state among the captured ones.

    Raises:
        CheckpointError: neither choices nor a final state with norm and head are at hand, or they are of another width.
    """
    greedy, source = _stored(sample)
    state = None
    if tables.head is not None and (greedy is None or draft_ids is not None):
        state = final_states(sample, slots, status, tables, target_layers)
    if state is not None and state.shape[0] != len(sample.token_ids):
        state = None
    if greedy is None:
        if state is None or tables.head is None:
            raise CheckpointError(
                f"{escaped(sample.name)}: the dump stores neither the target's choices nor what gives them "
                "(final state, final norm, head); give --target with its weights or rows.safetensors"
            )
        head = tables.head.float()
        best = torch.cat([(part @ head.T).argmax(-1) for part in _pieces(state)])
        greedy = best if tables.token_ids is None else tables.token_ids[best]
        rows = "the whole head" if tables.whole else f"{len(head)} head rows at hand (another token may have won)"
        source = f"computed from the final state over {rows}"
    logprobs, scale = None, "none"
    if draft_ids is not None and state is not None and bool(tables.known(draft_ids).all()):
        logprobs, scale = _logprobs(sample, state, tables, draft_ids)
    elif draft_ids is not None and sample.topk_ids is not None and sample.topk_logprobs is not None:
        scale = "top k"
    return Answers(
        greedy=greedy,
        source=source,
        logprobs=logprobs,
        scale=scale,  # type: ignore[arg-type]
        topk_ids=None if sample.topk_ids is None else sample.topk_ids.to(torch.int64),
        topk_logprobs=None if sample.topk_logprobs is None else sample.topk_logprobs.float(),
    )


def _pieces(x: Tensor) -> Iterator[Tensor]:
    return (x[a : a + _ROWS] for a in range(0, len(x), _ROWS))


def _stored(sample: Sample) -> tuple[Tensor | None, str]:
    if sample.target_argmax is not None:
        return sample.target_argmax.to(torch.int64).flatten(), "stored"
    if sample.topk_ids is not None and sample.topk_logprobs is not None:
        best = sample.topk_logprobs.float().argmax(-1, keepdim=True)
        return sample.topk_ids.to(torch.int64).gather(-1, best).flatten(), "first of the stored top k"
    return None, ""


def _logprobs(sample: Sample, state: Tensor, tables: TargetTables, draft_ids: Tensor) -> tuple[Tensor, Scale]:
    """[T, draft vocabulary] log-probabilities and what they are worth.

    A stored scale belongs to the stored states only where these stand beside their own tokens: one that makes probabilities above 1 is
    not used.
    """
    rows = tables.head_rows(draft_ids).float()
    logits = torch.cat([part @ rows.T for part in _pieces(state)])
    if sample.logsumexp is not None:
        scaled = logits - sample.logsumexp.float().reshape(-1, 1)
        if _possible(scaled):
            return scaled, "exact"
    if sample.topk_ids is not None and sample.topk_logprobs is not None:
        first = sample.topk_ids[:, 0].to(torch.int64)
        if bool(tables.known(first).all()):  # log-sum-exp = logit - log-probability, of any token
            logit = (tables.head_rows(first).float() * state).sum(-1)
            scaled = logits - (logit - sample.topk_logprobs[:, 0].float()).unsqueeze(-1)
            if _possible(scaled):
                return scaled, "exact"
    assert tables.head is not None
    head = tables.head.float()
    total = torch.cat([torch.logsumexp(part @ head.T, -1) for part in _pieces(state)])
    return logits - total.unsqueeze(-1), "exact" if tables.whole else "upper bound"


def _possible(logprobs: Tensor) -> bool:
    """Whether next to no row's probabilities sum to clearly more than 1 (half-precision states leave an error in the logits)."""
    return bool((torch.logsumexp(logprobs, -1) > 0.2).float().mean() <= 0.01)
