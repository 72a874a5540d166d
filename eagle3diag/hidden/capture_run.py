"""One text through a target: prefill and decoding, each with its states and the target's distribution, and how far they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import CheckpointError
from eagle3diag.hidden.capture_target import FINAL, Tap, Target
from eagle3diag.hidden.capture_texts import Text, tokenised

if TYPE_CHECKING:
    import torch

__all__ = ["Difference", "Pass", "Run", "run_text"]

_ROWS = 256  # rows of logits looked at together


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Relative errors |decode - prefill| / |prefill| of one layer's rows (L2 over a row), in sums that add up over samples."""

    rows: int
    total: float
    worst: float
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """States [tokens, hidden] by HF index (``FINAL``: before the final norm) and the target's distribution after each position.

    ``argmax`` [tokens] int64, ``topk_ids`` and ``topk_logprobs`` [tokens, k] (None for k = 0), ``logsumexp`` [tokens] float32.
    """

    states: Mapping[int, torch.Tensor]
    argmax: torch.Tensor
    topk_ids: torch.Tensor | None
    topk_logprobs: torch.Tensor | None
    logsumexp: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One text: ``ids`` [tokens], the first ``prompt`` of them the prompt; ``written`` where the target wrote the answer."""

    ids: torch.Tensor
    prompt: int
    written: bool
    prefill: Pass
    decode: Pass | None
    differences: Mapping[int, Difference]
    argmax_differs: int


def run_text(
    target: Target, text: Text, layers: Iterable[int], *, new_tokens: int, max_tokens: int, topk: int, decode: bool, chat: bool
) -> Run:
    """Run one text.

    Args:
        target: a loaded target.
        text: a prompt, with or without its answer.
        layers: HF indices to keep.
        new_tokens: longest answer the target writes.
        max_tokens: longest sample.
        topk: probabilities kept per position.
        decode: feed the answer token by token also where it is given.
        chat: put prompts through the chat template.

    Raises:
        CheckpointError: a text longer than ``max_tokens`` before its answer, or empty, or ids the target does not have.
    """
    import torch

    prompt, answer = tokenised(text, target.tokenizer, chat=chat)
    if not prompt:
        raise CheckpointError("a text without a token in front of its answer; give a prompt")
    if len(prompt) >= max_tokens:
        raise CheckpointError(f"a prompt has {len(prompt):,} tokens, at most {max_tokens - 1:,} leave room for an answer; raise max_tokens")
    vocabulary = int(target.model.get_input_embeddings().weight.shape[0])
    if max([*prompt, *(answer or ())]) >= vocabulary:
        raise CheckpointError(
            f"token id {max([*prompt, *(answer or ())])} where {target.name} has {vocabulary:,} tokens; another tokenizer's?"
        )
    ids, stepped = list(prompt), None
    room = max_tokens - len(prompt)
    with Tap(target, frozenset(layers)) as tap:
        if answer is None or decode:
            ids, stepped = _stepwise(target, tap, prompt, None if answer is None else answer[:room], min(new_tokens, room), topk)
        else:
            ids += answer[:room]
        whole = torch.tensor(ids, dtype=torch.int64)
        logits, _ = tap.forward(whole)
        prefill = _pass([dict(tap.states)], [_distribution(logits, topk)])
        del logits
    differences: dict[int, Difference] = {}
    differs = 0
    if stepped is not None:
        differences = {k: _difference(v[len(prompt) :], stepped.states[k][len(prompt) :]) for k, v in prefill.states.items()}
        differs = int((prefill.argmax != stepped.argmax).sum())
    return Run(
        ids=whole,
        prompt=len(prompt),
        written=answer is None,
        prefill=prefill,
        decode=stepped,
        differences=differences,
        argmax_differs=differs,
    )


def _stepwise(target: Target, tap: Tap, prompt: list[int], answer: list[int] | None, longest: int, topk: int) -> tuple[list[int], Pass]:
    """Prefill the prompt, then one token at a time through the cache: the answer, or the greedy one."""
    import torch

    ids = list(prompt)
    logits, cache = tap.forward(torch.tensor(prompt, dtype=torch.int64))
    states, seen = [dict(tap.states)], [_distribution(logits, topk)]
    for step in range(longest if answer is None else len(answer)):
        token = int(seen[-1][0][-1]) if answer is None else answer[step]
        ids.append(token)
        if cache is None:
            raise CheckpointError(f"{target.name}: keeps no cache between tokens; give the answers, and decode=False")
        logits, cache = tap.forward(torch.tensor([token], dtype=torch.int64), cache)
        states.append(dict(tap.states))
        seen.append(_distribution(logits, topk))
        if answer is None and token in target.stop:
            break
    return ids, _pass(states, seen)


_Seen = tuple[Any, Any, Any, Any]


def _distribution(logits: torch.Tensor, topk: int) -> _Seen:
    """(argmax, top ids, top log-probabilities, log-sum-exp) of logits [tokens, vocabulary], some rows at a time."""
    import torch

    parts: list[_Seen] = []
    for first in range(0, len(logits), _ROWS):
        block = logits[first : first + _ROWS].float()
        lse = block.logsumexp(-1)
        top = block.topk(min(max(topk, 1), block.shape[-1]), dim=-1)
        parts.append((block.argmax(-1).cpu(), top.indices.cpu(), (top.values - lse[:, None]).cpu(), lse.cpu()))
    argmax, ids, probabilities, lse = (torch.cat(column) for column in zip(*parts, strict=True))
    return argmax, ids if topk else None, probabilities if topk else None, lse


def _pass(states: list[dict[int, torch.Tensor]], seen: list[_Seen]) -> Pass:
    import torch

    argmax, ids, probabilities, lse = (None if column[0] is None else torch.cat(column) for column in zip(*seen, strict=True))
    assert argmax is not None
    assert lse is not None
    held = {k: torch.cat([part[k].cpu() for part in states]) for k in states[0]}
    return Pass(
        states=dict(sorted(held.items(), key=lambda s: (s[0] == FINAL, s[0]))),
        argmax=argmax,
        topk_ids=ids,
        topk_logprobs=probabilities,
        logsumexp=lse,
    )


def _difference(prefill: torch.Tensor, decode: torch.Tensor) -> Difference:
    import torch

    a, b = prefill.double(), decode.double()
    if not len(a):
        return Difference(rows=0, total=0.0, worst=0.0, cosine=1.0)
    size = a.norm(dim=-1).clamp_min(1e-30)
    error = (b - a).norm(dim=-1) / size
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    return Difference(rows=len(a), total=float(error.sum()), worst=float(error.max()), cosine=float(cosine.min()))
