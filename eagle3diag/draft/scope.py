"""What a dump, the draft's tensors and the target's tables can show, and what trainers have by default."""

from __future__ import annotations

from typing import Any

import torch

from eagle3diag.checkpoint.model import TargetSpec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.measure import Bench
from eagle3diag.draft.wirings import Scope
from eagle3diag.errors import CheckpointError

__all__ = ["scope_of", "unusual"]


def scope_of(bench: Bench, target: TargetSpec | None = None) -> Scope:
    """What the dump, the draft's tensors and the target's tables can show."""
    w, t, s = bench.weights, bench.tables, bench.weights.sizes
    normed = t.final_norm is not None
    final = any(x.role == "final" for x in bench.slots)
    thetas: dict[float, str] = {}
    scalings: dict[str, Any] = {}
    for whose, spec in (("target", target), ("draft", bench.spec)):
        if spec is not None and spec.rope_theta.value is not None:
            thetas.setdefault(float(spec.rope_theta.value), whose)
        if spec is not None and spec.rope_scaling.value is not None:
            scalings[whose] = spec.rope_scaling.value
    names = set(w.tensors) - {"t2d"}
    if bench.t2d is not None and len(bench.t2d) == s.draft_vocab and not _same_map(bench):
        names.add("t2d")
    embeddings = ["target"] if t.embedding is not None and t.source != "draft" else []
    embeddings += ["draft"] if "embed_tokens.weight" in w.tensors else []
    width = next((x.shape[-1] for x in bench.samples[0][0].states.values()), None) if bench.samples else None
    return Scope(
        layers=bench.layers,
        final=final and (bench.status == "post" or (bench.status == "pre" and normed)),
        final_norm=normed and width == (None if t.final_norm is None else len(t.final_norm)),
        target_layers=bench.target_layers,
        tensors=frozenset(names),
        thetas=thetas,
        scalings=scalings,
        reduced=0 < s.draft_vocab < bench.vocab,
        embeddings=tuple(embeddings),
        target_head=_other_head(bench),
        first_rows=t.head is not None and t.head.shape[-1] == s.hidden and bool(t.known(torch.arange(s.draft_vocab)).all()),
        longest=bench.longest if bench.samples else 0,
        width_fits=width == s.hidden,
        depth=s.layers,
    )


def _same_map(bench: Bench) -> bool:
    """Whether t2d marks the ids that the wiring at hand maps to."""
    try:
        ids = bench.ids(bench.base).cpu()
    except CheckpointError:
        return False
    return bench.t2d is not None and torch.equal(ids.sort().values, bench.t2d.cpu())


def _other_head(bench: Bench) -> bool:
    """Whether the target's head rows of the draft vocabulary are there and differ from the draft's own."""
    own, t = bench.weights.get("lm_head.weight"), bench.tables
    try:
        ids = bench.ids(bench.base).cpu()
    except CheckpointError:
        return False
    if t.head is None or t.head.shape[-1] != bench.weights.sizes.hidden or not bool(t.known(ids).all()):
        return False
    rows = t.head_rows(ids).float()
    return own is None or rows.shape != own.shape or not torch.allclose(rows, own.float().cpu(), rtol=1e-2, atol=1e-3)


def unusual(w: Wiring, scope: Scope) -> int:
    """In how many respects a wiring is not what trainers do by default, or the target's own."""
    n, theta = scope.target_layers, next((t for t, whose in scope.thetas.items() if whose == "target"), None)
    odd = 0 if n is None or w.aux_layers in (None, (2, n // 2, n - 3)) else 1
    odd += theta is not None and w.rope_theta != theta
    plain = Wiring()
    usual = ("state", "fc", "norm_before_residual", "norm_output", "final_norm", "double_norm", "position_gap", "head", "unfilled")
    return odd + sum(bool(getattr(w, f) != getattr(plain, f)) for f in (*usual, "token_shift", "state_shift", "concat", "aux_norm"))
