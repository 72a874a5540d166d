"""Inputs for the tests of the value rules: every initialiser, honest small trainings, and a quick way from tensors to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from eagle3diag.rules.case import make_case
from eagle3diag.rules.model import Case, Report
from eagle3diag.rules.registry import run
from tests.factory import Tensors, tiny_config, tiny_target, tiny_tensors, trained, write_draft

Draw = Callable[[tuple[int, int], torch.Generator], torch.Tensor]


def _uniform(bound: float, shape: tuple[int, int], g: torch.Generator) -> torch.Tensor:
    return (torch.rand(shape, generator=g) * 2 - 1) * bound


#: name -> (draw, law as `freshness` names it)
INITIALISERS: dict[str, tuple[Draw, str]] = {
    "N(0, 0.02)": (lambda s, g: torch.randn(s, generator=g) * 0.02, "normal"),
    "N(0, 0.0137)": (lambda s, g: torch.randn(s, generator=g) * 0.0137, "normal"),
    "N(0, 1)": (lambda s, g: torch.randn(s, generator=g), "normal"),
    "xavier normal": (lambda s, g: torch.randn(s, generator=g) * (2 / sum(s)) ** 0.5, "normal"),
    "xavier uniform": (lambda s, g: _uniform((6 / sum(s)) ** 0.5, s, g), "uniform"),
    "nn.Linear": (lambda s, g: _uniform(s[1] ** -0.5, s, g), "uniform"),
    "kaiming normal": (lambda s, g: torch.randn(s, generator=g) * (2 / s[1]) ** 0.5, "normal"),
    "truncated": (
        lambda s, g: torch.nn.init.trunc_normal_(torch.empty(s), std=0.02, a=-0.04, b=0.04, generator=g),
        "normal cut at 2 sigma",
    ),
}


def generator(seed: int = 0) -> torch.Generator:
    """A seeded generator."""
    return torch.Generator().manual_seed(seed)


def honest_training(width: int, steps: int, *, lr: float = 1e-3, law: str = "nn.Linear", seed: int = 0) -> Tensors:
    """A small fusion layer and gated MLP trained with AdamW to predict a noisy cyclic language from three noisy states, bfloat16.

    Names as in a draft: ``fc``, ``layers.0.mlp.{gate,up,down}_proj``.
    """
    torch.manual_seed(seed)
    g = generator(seed)
    vocab, inter = 96, 2 * width
    shapes = {"fc": (width, 3 * width), "gate": (inter, width), "up": (inter, width), "down": (width, inter)}
    weights = {n: INITIALISERS[law][0](s, g).requires_grad_() for n, s in shapes.items()}
    table = torch.randn(vocab, 3 * width, generator=g) * torch.linspace(2.0, 0.2, 3 * width)
    head = torch.randn(vocab, width, generator=g) * 0.3
    gains = {n: torch.ones(width, requires_grad=True) for n in ("layers.0.post_attention_layernorm.weight", "norm.weight")}
    inner, final = gains.values()
    optimiser = torch.optim.AdamW([*weights.values(), *gains.values()], lr=lr, weight_decay=0.0)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    for _ in range(steps):
        token = torch.randint(0, vocab, (64,), generator=g)
        x = table[token] + 0.3 * torch.randn(64, 3 * width, generator=g)
        h = x @ weights["fc"].T
        u = norm(h) * inner
        h = h + (torch.nn.functional.silu(u @ weights["gate"].T) * (u @ weights["up"].T)) @ weights["down"].T
        loss = torch.nn.functional.cross_entropy((norm(h) * final) @ head.T, (token * 7 + 3) % vocab)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    names = {"fc": "fc.weight"} | {p: f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    trained = {names[n]: w for n, w in weights.items()} | gains
    return {n: w.detach().to(torch.bfloat16) for n, w in trained.items()}


def report_of(
    folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, *, select: Iterable[str] = ("VAL",), **more: Any
) -> Report:
    """Write a draft and run rules over it; ``more`` goes to `make_case`."""
    path = write_draft(folder / "draft", tensors, config or tiny_config())
    return run(make_case(path, **more), select)


def serious(report: Report) -> set[str]:
    """Codes found as error or warning."""
    return {f.code for f in report.findings if f.severity.rank < 2}


def case_of(
    folder: Path,
    change: Callable[[Tensors], object] = lambda t: None,
    *,
    target: bool = False,
    other: Callable[[Tensors], object] | None = None,
    config: dict[str, Any] | None = None,
    **keywords: Any,
) -> Case:
    """A tiny draft after ``change``, with the target's weights or a second draft where asked for; ``keywords`` go to the factory."""
    tensors = tiny_tensors(**keywords)
    change(tensors)
    path = write_draft(folder / "draft", tensors, config or tiny_config())
    second = None
    if other is not None:
        copy = tiny_tensors(**keywords)
        other(copy)
        second = write_draft(folder / "other", copy, config or tiny_config())
    return make_case(path, target=tiny_target(folder / "target", weights=True) if target else None, other=second)


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """A change of one tensor."""

    def change(t: Tensors) -> None:
        t[name] = value(t[name].clone())

    return change


def drawn(name: str, law: str = "N(0, 0.02)", seed: int = 1) -> Callable[[Tensors], None]:
    """One tensor as an initialiser leaves it."""
    return put(name, lambda v: INITIALISERS[law][0]((v.shape[0], v.shape[1]), generator(seed)).to(v.dtype))


def element(name: str, index: int, value: float) -> Callable[[Tensors], None]:
    """One element of one tensor."""

    def one(v: torch.Tensor) -> torch.Tensor:
        v.view(-1)[index] = value
        return v

    return put(name, one)


def absolute(t: Tensors) -> Tensors:
    """Token ids in place of offsets."""
    return {"d2t": t["d2t"] + torch.arange(len(t["d2t"]))}


def unsorted(t: Tensors) -> None:
    """The same draft in another order of its vocabulary, as ModelOpt writes it."""
    ids = absolute(t)["d2t"]
    order = torch.randperm(len(ids), generator=generator(4))
    t["d2t"] = ids[order] - torch.arange(len(ids))
    t["lm_head.weight"] = t["lm_head.weight"][order]


Fixture = Callable[[Path], Case]

FIRING: dict[str, Fixture] = {
    "VAL301": lambda p: case_of(p, element("layers.0.mlp.up_proj.weight", 7, float("nan"))),
    "VAL302": lambda p: case_of(p, put("layers.0.self_attn.o_proj.weight", torch.zeros_like)),
    "VAL303": lambda p: case_of(p, drawn("fc.weight", "nn.Linear")),
    "VAL304": lambda p: case_of(p, element("d2t", 63, 300)),
    "VAL305": lambda p: case_of(p, lambda t: t.update(absolute(t))),
    "VAL306": lambda p: case_of(p, put("t2d", lambda v: torch.roll(v, 1))),
    "VAL307": lambda p: case_of(p, put("d2t", torch.zeros_like)),
    "VAL308": lambda p: case_of(p, drawn("embed_tokens.weight"), target=True, embed=True),
    "VAL309": lambda p: case_of(p, put("lm_head.weight", lambda v: v.roll(1, 0)), target=True),
    "VAL310": lambda p: case_of(p, drawn("layers.0.mlp.up_proj.weight"), other=lambda t: None),
}

QUIET: dict[str, Fixture] = {
    "VAL301": lambda p: case_of(p, element("layers.0.mlp.up_proj.weight", 7, 3e4)),
    "VAL302": lambda p: case_of(p, put("layers.0.self_attn.q_proj.bias", torch.zeros_like), bias=True),
    "VAL303": lambda p: case_of(p, put("layers.0.hidden_norm.weight", lambda v: torch.cat([v[:1], torch.ones_like(v[1:])]))),
    "VAL304": lambda p: case_of(p, unsorted),
    "VAL305": lambda p: case_of(p, unsorted),
    "VAL306": lambda p: case_of(p, put("t2d", lambda v: v.to(torch.int64))),
    "VAL307": lambda p: case_of(
        p, lambda t: t.update(d2t=torch.zeros(256, dtype=torch.int64)), draft_vocab=256, config=tiny_config(draft_vocab_size=256)
    ),
    "VAL308": lambda p: case_of(p, target=True, embed=True),
    "VAL309": lambda p: case_of(p, put("lm_head.weight", lambda v: v + 0.5 * v.std() * trained("drift", 64, 64).to(v.dtype)), target=True),
    "VAL310": lambda p: case_of(p, other=put("layers.0.mlp.up_proj.weight", lambda v: v + 0.3 * v.std() * torch.randn_like(v))),
}
