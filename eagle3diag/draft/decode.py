"""Real greedy speculative decoding: the draft proposes a chain, the target verifies it, and the acceptance length is counted.

The loop is what a server does for one request: the prompt's states fill the draft's cache, a chain of k tokens is drafted one by one, the
target runs the last token and the chain at once, keeps the longest right beginning and adds its own next token; the new states replace
what the chain left in the draft's cache. The text is then that of plain greedy decoding, which is checked, not assumed. The target is
anything that runs tokens behind a cache and shows its states (`Verifier`; `hidden.capture_target.Tap` is one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.display import Shown
from eagle3diag.draft.model import DraftCache, PlainDraft
from eagle3diag.errors import CheckpointError, UsageError

__all__ = ["FINAL", "GreedyLoop", "Verifier", "greedy_loop", "needed_layers", "plain_greedy"]

#: key of the target's last state, before its final norm
FINAL = -1


class Verifier(Protocol):
    """A target that can be run.

    ``forward(ids, cache)`` runs ``ids`` [n] after what ``cache`` holds (None: nothing) and returns logits [n, vocabulary] and the cache;
    ``states`` then holds [n, hidden] of every wanted HF index and of ``FINAL``. The cache forgets its last
    n tokens by ``crop(-n)``.
    """

    @property
    def states(self) -> Mapping[int, Tensor]:
        """Of the last forward."""

    def forward(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Run tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GreedyLoop(Shown):
    """What a loop measured.

    Attributes:
        k: draft tokens per chain.
        counts: [k + 1] rounds by the number of accepted draft tokens; rounds in which the text ended are left out.
        texts: the tokens written for each prompt.
        identical: whether every text is that of plain greedy decoding; None where that was not run.
        differs: for the first text that is not: (prompt, position, gap in logits between the two choices); a tie has a tiny gap.
    """

    k: int
    counts: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
    identical: bool | None = None
    differs: tuple[int, int, float] | None = None
    definition: str = "tokens per verification, the target's own token included; rounds ended by an end-of-text token left out"

    @property
    def rounds(self) -> int:
        """Verifications that count."""
        return sum(self.counts)

    @property
    def mean_accept_length(self) -> float:
        """Tokens per verification, bonus included."""
        return 1.0 + sum(i * c for i, c in enumerate(self.counts)) / self.rounds if self.rounds else 1.0

    @property
    def accepted_at_position(self) -> tuple[float, ...]:
        """Share of rounds that kept the draft token at each position: joint rates."""
        return tuple(sum(self.counts[i + 1 :]) / self.rounds if self.rounds else 0.0 for i in range(self.k))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "k": self.k,
            "rounds": self.rounds,
            "mean_accept_length": round(self.mean_accept_length, 6),
            "accepted_at_position": [round(p, 6) for p in self.accepted_at_position],
            "counts": list(self.counts),
            "identical": self.identical,
            "definition": self.definition,
        }


def needed_layers(wiring: Wiring, target_layers: int) -> frozenset[int]:
    """HF indices a verifier has to show for this wiring; N is the last state, which it always shows."""
    wanted = {*(wiring.aux_layers or ()), *(wiring.aux_layers_verify or ())} if wiring.state == "aux" else set()
    return frozenset(k for k in wanted if k != target_layers)


def plain_greedy(target: Verifier, prompt: Tensor, new_tokens: int, stop: frozenset[int] = frozenset()) -> tuple[list[int], list[float]]:
    """The target's own greedy text, one token at a time: (tokens, gap in logits to the second choice)."""
    logits, cache = target.forward(prompt, None)
    out: list[int] = []
    gaps: list[float] = []
    while True:
        best = logits[-1].float().topk(2)
        out.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        if len(out) >= new_tokens or out[-1] in stop:
            return out, gaps
        logits, cache = target.forward(torch.tensor([out[-1]]), cache)


def greedy_loop(
    draft: PlainDraft,
    target: Verifier,
    prompts: Iterable[Tensor],
    *,
    k: int = 4,
    new_tokens: int = 40,
    stop: frozenset[int] = frozenset(),
    target_layers: int | None = None,
    check: bool = True,
    ids: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> GreedyLoop:
    """Decode prompts with a draft and count what the target keeps.

    Args:
        draft: with its wiring.
        target: shows the layers of `needed_layers`.
        prompts: token ids [n], n >= 1 each.
        k: draft tokens per chain.
        new_tokens: tokens to write for each prompt; the last round may pass it and still counts whole.
        stop: ids that end a text.
        target_layers: N; a wiring that names it is fed the last state before the norm.
        check: also decode plainly and compare.
        ids: [draft vocabulary] target ids of the draft's columns, where they are not the draft's own mapping.
        progress: told (prompts done, rounds) after each prompt.

    Raises:
        UsageError: k or a prompt makes no sense, or the target's cache cannot be cropped.
        CheckpointError: the wiring wants states the target does not show.
    """
    if k < 1 or new_tokens < 1:
        raise UsageError(f"chains of {k} tokens and texts of {new_tokens}: both need at least 1")
    counts = [0] * (k + 1)
    texts: list[tuple[int, ...]] = []
    differs: tuple[int, int, float] | None = None
    for n, prompt in enumerate(prompts):
        if prompt.ndim != 1 or len(prompt) == 0:
            raise UsageError(f"prompt {n} has shape {list(prompt.shape)}; give token ids [n]")
        one = _Request(draft, target, target_layers, ids)
        text, kept = one.decode(prompt.to(torch.int64), k, new_tokens, stop)
        for accepted in kept:
            counts[accepted] += 1
        texts.append(tuple(text[:new_tokens]))
        if check and differs is None:
            plain, gaps = plain_greedy(target, prompt.to(torch.int64), new_tokens, stop)
            at = next((i for i, (a, b) in enumerate(zip(plain, texts[-1], strict=False)) if a != b), None)
            if at is None and len(plain) != len(texts[-1]):
                at = min(len(plain), len(texts[-1])) - 1
            differs = None if at is None else (n, at, gaps[at])
        if progress is not None:
            progress(n + 1, sum(counts))
    return GreedyLoop(k=k, counts=tuple(counts), texts=tuple(texts), identical=(differs is None) if check else None, differs=differs)


@dataclass(slots=True, eq=False)
class _Request:
    """One request: the target's states so far, the draft's cache, the text."""

    draft: PlainDraft
    target: Verifier
    target_layers: int | None
    ids: Tensor | None
    cache: DraftCache = field(default_factory=DraftCache)
    states: list[Tensor] = field(default_factory=list)  #: [rows, slots, hidden] per forward of the target

    def decode(self, prompt: Tensor, k: int, new_tokens: int, stop: frozenset[int]) -> tuple[list[int], list[int]]:
        """(text written, accepted draft tokens per counted round)."""
        logits, cache = self.target.forward(prompt, None)
        text = [*prompt.tolist(), int(logits[-1].argmax())]
        start = len(prompt)
        kept: list[int] = []
        self.states.append(self._taken(prefill=True))
        while len(text) - start < new_tokens and text[-1] not in stop:
            held = len(text) - 1  # tokens whose states are known
            chain = self._chain(text, held, k)
            logits, cache = self.target.forward(torch.tensor([text[-1], *chain]), cache)
            says = logits.argmax(-1).tolist()
            accepted = next((i for i, token in enumerate(chain) if token != says[i]), k)
            new = says[: accepted + 1]  # accepted tokens are the target's own, then its next
            self.states.append(self._taken(prefill=False)[: accepted + 1])
            if not hasattr(cache, "crop"):
                raise UsageError(f"the target's cache ({type(cache).__name__}) cannot be cropped; a rejected chain would stay in it")
            if accepted < k:
                cache.crop(accepted - k)  # a negative number of tokens to forget: what every version of transformers understands
            ended = next((i for i, token in enumerate(new) if token in stop), None)
            if ended is not None:
                return [*text[start:], *new[: ended + 1]], kept
            text += new
            kept.append(accepted)
        return text[start:], kept

    def _chain(self, text: list[int], held: int, k: int) -> list[int]:
        """Draft k tokens behind ``text``; ``held`` rows of states are known."""
        w, done = self.draft.wiring, len(self.cache)
        states = torch.cat(self.states)
        self.states = [states]
        at = torch.arange(done, held)
        tokens = torch.tensor(text)[(at + 1 + w.token_shift).clamp(0, len(text) - 1)]
        rows = states[(at + w.state_shift).clamp(0, held - 1)]
        out = self.draft.extend(rows, tokens, at + 1, self.cache, final_norm=w.aux_norm == "final" or w.state == "final")
        keep, chain, hidden = len(self.cache), [], out.hidden[-1:]
        logits = out.logits[-1]
        ids = self.draft.target_ids if self.ids is None else self.ids
        for step in range(k):
            chain.append(int(ids[logits.argmax()]))
            if step == k - 1:
                break
            # a token fed late (a negative shift) makes every later step late as well
            fed = ([*text, *chain])[len(text) + step + w.token_shift]
            position = torch.tensor([held + 1 + step + w.position_gap])
            out = self.draft.decode_step(torch.tensor([fed]), hidden, position, self.cache)
            logits, hidden = out.logits[-1], out.hidden[-1:]
        self.cache.crop(keep)
        return chain

    def _taken(self, *, prefill: bool) -> Tensor:
        """[rows, slots, hidden]: the states of the target's last forward that this wiring is fed."""
        w, there = self.draft.wiring, self.target.states
        if w.state == "final":
            return there[FINAL].unsqueeze(1)
        layers = w.aux_layers if prefill or w.aux_layers_verify is None else w.aux_layers_verify
        if layers is None:
            raise CheckpointError(f"{self.draft.path}: which target layers the draft is fed is not known; name them")
        names = [FINAL if k == self.target_layers else k for k in layers]
        missing = [k for k in names if k not in there]
        if missing:
            have = ", ".join(str(h) for h in sorted(there))
            raise CheckpointError(f"{self.draft.path}: the target does not show the state of layer {missing[0]}; it shows {have}")
        return torch.stack([there[k] for k in names], dim=1)
