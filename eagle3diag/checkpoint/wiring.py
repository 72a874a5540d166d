"""Everything the EAGLE-3 forward pass can vary, as one value.

``DraftSpec.wiring`` is what the draft was trained with, ``ServedDraft.wiring`` what an engine would run; the difference between the two
is the diagnosis. Formulas: facts of the engines and dialects, "draft forward, in order". The plain draft runs a ``Wiring``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from eagle3diag.display import Piece

__all__ = ["Wiring"]

Fc = Literal["applied", "bypassed", "absent"]
Mapping_ = Literal["offset", "absolute", "missing", "none", "t2d"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Wiring(Piece):
    """The effective wiring of a draft.

    Attributes:
        aux_layers: HF indices of the target states concatenated in front of ``fc``, in column order; None where unknown.
        aux_layers_verify: the same in graph-replayed verify steps where it differs, else None.
        state: ``aux`` (concatenated states) or ``final`` (the target's last hidden state after its final norm).
        fc: whether the fusion layer runs on the first step.
        norm_before_fc: one RMSNorm (``input_norm``) over the concatenation.
        fc_norm: one RMSNorm per concatenated chunk.
        norm_before_residual: the residual of layer 0 is ``hidden_norm(h)`` instead of ``h``.
        norm_output: the state fed back to the next step is after the final norm.
        final_norm: logits are taken after the final norm.
        deep_layer_norm: which tensor normalises the input of draft layers >= 1.
        double_norm: ModelOpt's HF training applied ``input_layernorm`` before ``hidden_norm``.
        rope_theta: base of the rotary embedding; None where unknown.
        rope_scaling: scaling dict as the reader understands it, None for none.
        sliding_window: attention window in tokens, None for full attention.
        position_gap: extra positions skipped before the second draft step (SGLang <= 0.5.11: 1).
        mapping: how draft ids become target ids: ``offset`` (i + d2t[i]), ``absolute``, ``missing`` (identity although reduced),
            ``none`` (full vocabulary), ``t2d`` (the ids the mask t2d marks, where d2t is beyond use).
        embedding: whose embedding rows are used: ``target``, ``draft``, ``uninitialised``.
        head: ``draft``, ``target``, ``target-first-rows`` (target's head cut to the first draft-vocabulary rows), ``target-rows`` (its
            rows of the draft vocabulary), ``embedding`` (tied),
            ``uninitialised``.
        unfilled: canonical names of parameters that keep their start value, with that value (``uninitialised``, ``ones``, ``random``,
            ``zeros``).
        token_shift: positions by which the fed token is late (0: token t+1 beside the state of token t; -1: token t).
        state_shift: positions by which the states are late (-1: the states of token t-1).
        concat: order in front of the first layer.
        aux_norm: ``final`` where each captured state went through the target's final norm.
    """

    aux_layers: tuple[int, ...] | None = None
    aux_layers_verify: tuple[int, ...] | None = None
    state: Literal["aux", "final"] = "aux"
    fc: Fc = "applied"
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    final_norm: bool = True
    deep_layer_norm: Literal["input_layernorm", "hidden_norm"] = "input_layernorm"
    double_norm: bool = False
    rope_theta: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    sliding_window: int | None = None
    position_gap: int = 0
    mapping: Mapping_ = "offset"
    embedding: Literal["target", "draft", "uninitialised"] = "target"
    head: Literal["draft", "target", "target-first-rows", "target-rows", "embedding", "uninitialised"] = "draft"
    unfilled: Mapping[str, str] = field(default_factory=dict)
    token_shift: int = 0
    state_shift: int = 0
    concat: Literal["embedding-first", "hidden-first"] = "embedding-first"
    aux_norm: Literal["none", "final"] = "none"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def differences(self, other: Wiring) -> dict[str, tuple[Any, Any]]:
        """Fields in which the two differ: ``{field: (self, other)}``."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {k: v for k, v in pairs.items() if v[0] != v[1]}
