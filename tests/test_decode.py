"""The real greedy loop with a toy target: text of plain decoding, counts by hand, faults that only cost length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.decode import FINAL, greedy_loop, needed_layers, plain_greedy
from eagle3diag.draft.model import PlainDraft
from eagle3diag.draft.rows import Rows
from eagle3diag.draft.tables import TargetTables
from eagle3diag.draft.weights import DraftWeights
from eagle3diag.errors import CheckpointError, UsageError
from tests.factory import HIDDEN, VOCAB, tiny_config, tiny_tensors, write_draft


@dataclass
class Cache:
    """The toy's memory: its hidden states so far."""

    past: torch.Tensor

    def crop(self, n: int) -> None:
        assert n < 0, "a number of tokens to forget"
        self.past = self.past[:n]


@dataclass
class Toy:
    """A recurrent target: the next token depends on the whole past through a decaying state."""

    seed: int = 0
    calls: list[int] = field(default_factory=list)
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=g)
        self.mix = torch.randn(HIDDEN, HIDDEN, generator=g) * 0.9 / HIDDEN**0.5
        self.head = torch.randn(VOCAB, HIDDEN, generator=g)

    def forward(self, ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
        self.calls.append(len(ids))
        past = torch.zeros(1, HIDDEN) if cache is None else cache.past
        for token in ids.tolist():
            past = torch.cat((past, torch.tanh(past[-1:] @ self.mix + self.embed[token])))
        h = past[-len(ids) :]
        self.states = {k: h * (k + 1) for k in (2, 6, 9)} | {FINAL: h}
        return h @ self.head.T, Cache(past)


@pytest.fixture
def draft(tmp_path: Path) -> PlainDraft:
    return make(tmp_path)


def make(folder: Path, **change: Any) -> PlainDraft:
    checkpoint = open_checkpoint(write_draft(folder / "draft", tiny_tensors(embed=True), tiny_config()))
    spec = draft_spec(checkpoint)
    weights = DraftWeights.load(checkpoint, spec)
    wiring: Wiring = replace(spec.wiring, aux_layers=(2, 6, 9), embedding="draft", **change)
    return PlainDraft(weights, spec, wiring, TargetTables(path="toy", vocab=VOCAB))


PROMPTS = [torch.tensor([5, 9, 200, 31]), torch.tensor([77]), torch.arange(20, 43)]


def test_text_is_that_of_plain_greedy_decoding(draft: PlainDraft) -> None:
    loop = greedy_loop(draft, Toy(), PROMPTS, k=3, new_tokens=25)
    assert loop.identical
    assert [len(t) for t in loop.texts] == [25, 25, 25]
    assert sum(loop.counts) == loop.rounds > 0
    assert loop.mean_accept_length == pytest.approx(1 + sum(loop.accepted_at_position))


def test_a_draft_that_knows_the_text_is_accepted_whole(draft: PlainDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3diag.draft import decode

    toy, prompt = Toy(), PROMPTS[0]
    plain, gaps = plain_greedy(toy, prompt, 40)
    assert min(gaps) > 0
    whole = [*prompt.tolist(), *plain]

    def knows(right: int) -> Any:
        def chain(self: Any, text: list[int], held: int, k: int) -> list[int]:
            told = whole[len(text) : len(text) + k]
            return [t if i < right else (t + 1) % VOCAB for i, t in enumerate(told)]

        return chain

    for right in (3, 1, 0):
        monkeypatch.setattr(decode._Request, "_chain", knows(right))
        toy.calls.clear()
        loop = greedy_loop(draft, toy, [prompt], k=3, new_tokens=20, check=False)
        assert loop.counts[right] == loop.rounds
        assert loop.mean_accept_length == right + 1
        assert list(loop.texts[0]) == plain[:20]
        # one prefill, then one forward of k + 1 tokens per round
        assert toy.calls == [4] + [4] * loop.rounds
        assert loop.rounds == -(-19 // (right + 1))


def test_chains_are_those_of_the_training_forward(draft: PlainDraft) -> None:
    """The first token of every chain is what step 0 of `run` proposes for that row, and later ones follow on-policy."""
    from eagle3diag.draft.decode import _Request

    toy, text = Toy(), [3, 50, 120, 7, 66, 190, 2]
    toy.forward(torch.tensor(text[:-1]))
    states = torch.stack([toy.states[k] for k in (2, 6, 9)], 1)
    one = _Request(draft, toy, None, None)
    one.states.append(states)
    chain = one._chain(text, len(text) - 1, 3)
    ids = torch.tensor(text)
    n = len(text) - 1
    rows = Rows(
        name="t",
        states=states,
        token_ids=ids,
        positions=torch.arange(1, n + 1),
        targets=None,
        loss_mask=torch.ones(n + 1, dtype=torch.bool),
    )
    out = draft.run(rows, 3, tokens="on-policy")
    assert chain[0] == int(draft.to_target(out[0].logits[-1].argmax()))
    assert chain[1] == int(draft.to_target(out[1].logits[-1].argmax()))
    assert chain[2] == int(draft.to_target(out[2].logits[-1].argmax()))
    assert len(one.cache) == n


@pytest.mark.parametrize(
    "change", [{"token_shift": -1}, {"state_shift": -1}, {"norm_output": True}, {"position_gap": 1}, {"mapping": "missing"}]
)
def test_faults_cost_length_never_text(tmp_path: Path, change: dict[str, Any]) -> None:
    loop = greedy_loop(make(tmp_path, **change), Toy(), PROMPTS[:2], k=2, new_tokens=12)
    assert loop.identical


def test_the_round_in_which_the_text_ends_is_left_out(draft: PlainDraft) -> None:
    plain, _ = plain_greedy(Toy(), PROMPTS[0], 12)
    stop = frozenset([plain[5]])
    loop = greedy_loop(draft, Toy(), [PROMPTS[0]], k=2, new_tokens=12, stop=stop)
    assert loop.identical
    assert list(loop.texts[0]) == plain[: plain.index(plain[5]) + 1]
    assert loop.rounds < len(loop.texts[0])


def test_verify_layers_take_over_after_the_prompt(tmp_path: Path) -> None:
    draft = make(tmp_path, aux_layers_verify=(6, 9, 2))
    from eagle3diag.draft.decode import _Request

    toy = Toy()
    toy.forward(torch.tensor([1, 2, 3]))
    one = _Request(draft, toy, None, None)
    assert torch.equal(one._taken(prefill=True)[:, 0], toy.states[2])
    assert torch.equal(one._taken(prefill=False)[:, 0], toy.states[6])


def test_layers_asked_for(draft: PlainDraft) -> None:
    assert needed_layers(replace(draft.wiring, aux_layers=(2, 6, 12)), 12) == {2, 6}
    assert needed_layers(replace(draft.wiring, state="final"), 12) == set()
    with pytest.raises(CheckpointError, match="layer 7"):
        greedy_loop(PlainDraftLike(draft, (2, 6, 7)), Toy(), PROMPTS[:1], k=1, new_tokens=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 1"):
        greedy_loop(draft, Toy(), PROMPTS, k=0)
    with pytest.raises(UsageError, match="shape"):
        greedy_loop(draft, Toy(), [torch.zeros(2, 2, dtype=torch.int64)])


class PlainDraftLike:
    """The same draft under other layers."""

    def __init__(self, draft: PlainDraft, layers: tuple[int, ...]) -> None:
        self._draft, self.wiring, self.path = draft, replace(draft.wiring, aux_layers=layers), draft.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)


def test_a_cache_that_cannot_forget_is_an_error(draft: PlainDraft) -> None:
    class Stubborn(Toy):
        def forward(self, ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
            logits, cache = super().forward(ids, cache)
            return logits, type("Fixed", (), {"past": cache.past})()

    with pytest.raises(UsageError, match="crop"):
        greedy_loop(draft, Stubborn(), PROMPTS[:1], k=2, new_tokens=8)


def test_a_transformers_target(tmp_path: Path) -> None:
    """A tiny random Llama through the capture room's tap."""
    transformers = pytest.importorskip("transformers")
    from eagle3diag.hidden.capture_target import Tap, load_target

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    target, draft = load_target(tmp_path / "target"), make(tmp_path)
    with Tap(target, needed_layers(draft.wiring, 12)) as tap:
        loop = greedy_loop(draft, tap, PROMPTS[:2], k=3, new_tokens=15, target_layers=12)
    assert loop.identical or (loop.differs is not None and loop.differs[2] < 1e-3)
