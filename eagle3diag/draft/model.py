"""The draft in plain PyTorch: one ``Wiring`` of one set of weights, run on rows of a dump or step by step.

The forward pass is that of the dialects' facts, section 3, "reference forward with switches"; each switch is one line here. ``run`` is the
trainers' test-time training: all rows at once, step after step, with the training mask. ``extend`` and ``decode_step`` are what a server
does: a KV cache and one chain at a time; their first steps are the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from eagle3diag.checkpoint.model import DraftSpec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.layers import KeysValues, LayerWeights, activation, attend, mlp, project, rms_norm
from eagle3diag.draft.memory import DraftCache, StepOutput, first_step, later_step
from eagle3diag.draft.parameters import check_shapes
from eagle3diag.draft.rope import Rope, softmax_gain
from eagle3diag.draft.rows import Rows
from eagle3diag.draft.sizes import softmax_scale
from eagle3diag.draft.sources import embedding_weight, filled, head_weight, target_ids
from eagle3diag.draft.tables import TargetTables
from eagle3diag.draft.weights import DraftWeights
from eagle3diag.errors import CheckpointError

__all__ = ["DraftCache", "PlainDraft", "StepOutput", "Tokens"]

#: what later steps are fed: the text, or what the draft chose
Tokens = Literal["forced", "on-policy"]


class PlainDraft:
    """A draft that can be run.

    Attributes:
        path, spec, wiring, sizes, dtype, device: what was given.
        target_ids: [draft vocabulary] int64: the target id of every column of the logits.
        head_rows_missing: rows of a borrowed head that the tables do not have; zeros stand in.
    """

    def __init__(self, weights: DraftWeights, spec: DraftSpec, wiring: Wiring, tables: TargetTables, *, seed: int = 0) -> None:
        """Put a draft together.

        Args:
            weights: canonical tensors.
            spec: of the draft.
            wiring: what to run: the spec's own, a served draft's, or a fault.
            tables: of the target.
            seed: of start values (see `sources`).

        Raises:
            CheckpointError: the wiring needs a tensor or table that is not there, or widths that do not fit.
        """
        self.path, self.spec, self.wiring = weights.path, spec, wiring
        self.sizes, self.dtype, self.device = weights.sizes, weights.dtype, weights.device
        self.tables = tables.to(weights.device)
        if spec.algorithm not in ("eagle3", "unknown"):
            raise CheckpointError(f"{self.path}: a draft of the kind {spec.algorithm} cannot be run here; EAGLE-3 drafts can")
        check_shapes(weights, spec)
        self._weights = w = filled(weights, spec, wiring, seed)
        s = self.sizes
        if wiring.rope_theta is None:
            raise CheckpointError(f"{self.path}: the rope base of this wiring is not known; state rope_theta")
        self.rope = Rope(
            dim=s.rotary, theta=wiring.rope_theta, scaling=wiring.rope_scaling, max_position=s.max_position, interleaved=s.interleaved
        )
        self._scale = softmax_scale(s, softmax_gain(wiring.rope_scaling) if s.mla else 1.0)
        self._act = activation(s.act)
        self._layers = [self._layer(i) for i in range(s.layers)]
        self._fc = w.need("fc.weight") if wiring.fc == "applied" else None
        self._norm = w.need("norm.weight") if wiring.final_norm or wiring.norm_output else None
        self._embedding = embedding_weight(w, wiring, self.tables, seed)
        self._head, self.head_rows_missing = head_weight(w, wiring, self.tables, seed)
        self.target_ids = target_ids(w, wiring, len(self._head))

    def _layer(self, index: int) -> LayerWeights:
        """One layer's parameters, the needed ones present."""
        at, t = f"layers.{index}.", self._weights
        w = LayerWeights(tensors={k[len(at) :]: v for k, v in t.tensors.items() if k.startswith(at)})
        names = ["input_layernorm", "hidden_norm"] if index == 0 else [self.wiring.deep_layer_norm]
        names += ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"]
        if self.sizes.mla:
            names += [f"self_attn.{n}" for n in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")]
            names += [f"self_attn.{n}" for n in (("q_a_proj", "q_a_layernorm") if w.has("self_attn.q_b_proj") else ("q_proj",))]
        else:
            names += [f"self_attn.{p}_proj" for p in "qkv"]
        for name in names:
            t.need(f"{at}{name}.weight")
        return w

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids (int64, any shape), by the wiring's mapping."""
        return self.target_ids[draft_ids]

    def embed(self, ids: Tensor) -> Tensor:
        """[rows, hidden] embeddings of target ids ([rows] int64).

        Raises:
            CheckpointError: an id without a row.
        """
        out, unknown = self._embed_known(ids)
        if unknown is None:
            return out
        if self._embedding is None:
            return self.tables.embed(ids)  # raises, naming the first
        raise CheckpointError(f"{self.path}: no embedding row for token id {int(ids[unknown][0])}; it has {len(self._embedding)} rows")

    def _embed_known(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Embeddings with zeros for ids that have no row, and which those are."""
        table = self._embedding
        known = self.tables.known(ids) if table is None else (ids >= 0) & (ids < len(table))
        if bool(known.all()):
            return (self.tables.embed(ids) if table is None else table[ids]).to(self.dtype), None
        out = torch.zeros((len(ids), self.sizes.hidden), dtype=self.dtype, device=self.device)
        out[known] = self._embed_known(ids[known])[0]
        return out, ~known

    # ---- the forward pass --------------------------------------------------------------------------------------------------------

    def fuse(self, states: Tensor, *, final_norm: bool = False) -> Tensor:
        """Target states [rows, slots, target hidden] to the draft's first hidden state [rows, hidden].

        Where ``fc`` does not run, the concatenation goes in if it is as wide as the draft, else the last state.

        Args:
            final_norm: each state goes through the target's final norm first.

        Raises:
            CheckpointError: widths that do not fit, or no final norm at hand.
        """
        w, s = self.wiring, self.sizes
        x = states.to(device=self.device, dtype=self.dtype)
        slots, wide = x.shape[1:]
        if final_norm:
            norm = self.tables.final_norm
            if norm is None or len(norm) != wide:
                have = "none" if norm is None else f"one of width {len(norm)}"
                raise CheckpointError(f"{self.path}: the states of width {wide} need the target's final norm, and {have} is at hand")
            x = rms_norm(x, norm.to(self.dtype), self.tables.eps)
        if self._fc is None:
            whole = rearrange(x, "r a h -> r (a h)")
            x = whole if whole.shape[-1] == s.hidden else x[:, -1]
            if x.shape[-1] != s.hidden:
                raise CheckpointError(f"{self.path}: without fc a state of width {wide} reaches a draft of width {s.hidden}")
            return x
        if slots * wide != self._fc.shape[-1]:
            raise CheckpointError(f"{self.path}: fc takes width {self._fc.shape[-1]}, the states are {slots} times {wide} wide")
        if w.norm_before_fc:
            normed = rms_norm(rearrange(x, "r a h -> r (a h)"), self._weights.need("input_norm.weight"), s.eps)
            x = rearrange(normed, "r (a h) -> r a h", a=slots)
        if w.fc_norm:
            x = torch.stack([rms_norm(x[:, i], self._weights.need(f"fc_norm.{i}.weight"), s.eps) for i in range(slots)], dim=1)
        return F.linear(rearrange(x, "r a h -> r (a h)"), self._fc, self._weights.get("fc.bias"))

    def _layer_input(self, index: int, z: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input, residual) of one layer from the hidden state and the token embeddings."""
        w, layer, eps = self.wiring, self._layers[index], self.sizes.eps
        if index > 0:
            return layer.norm(z, w.deep_layer_norm, eps), z
        u = layer.norm(layer.norm(z, "input_layernorm", eps) if w.double_norm else z, "hidden_norm", eps)
        e = layer.norm(e, "input_layernorm", eps)
        return torch.cat((e, u) if w.concat == "embedding-first" else (u, e), dim=-1), u if w.norm_before_residual else z

    def _pass(
        self,
        h: Tensor,
        e: Tensor,
        positions: Tensor,
        remember: Callable[[int, Tensor, Tensor], KeysValues],
        rows: Tensor,
        key_rows: Tensor,
        keep: Tensor | None = None,
    ) -> Tensor:
        """All layers: [rows, hidden], or the ``keep`` (row numbers) of them; keys and values are remembered for every row."""
        cos, sin = self.rope.cos_sin(positions, self.dtype)
        z = h
        for i, layer in enumerate(self._layers):
            x, residual = self._layer_input(i, z, e)
            q, k, v = project(x, layer, self.sizes, cos, sin)
            memory = remember(i, k, v)
            if keep is not None and i == len(self._layers) - 1:
                q, residual, rows = q[keep], residual[keep], rows[keep]
            seen = attend(q, memory, rows, key_rows, scale=self._scale, window=self.wiring.sliding_window)
            z = residual + layer.linear(seen, "self_attn.o_proj")
            z = z + mlp(layer.norm(z, "post_attention_layernorm", self.sizes.eps), layer, self._act)
        return z

    def _output(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, what is fed back)."""
        w = self.wiring
        normed = z if self._norm is None else rms_norm(z, self._norm, self.sizes.eps)
        logits = F.linear(normed if w.final_norm else z, self._head, self._weights.get("lm_head.bias"))
        return logits, normed if w.norm_output else z

    def run(self, rows: Rows, steps: int, *, tokens: Tokens = "forced", where: Tensor | None = None) -> list[StepOutput]:
        """Test-time training's forward: all rows, ``steps`` steps. See `steps`; this keeps them all."""
        return list(self.steps(rows, steps, tokens=tokens, where=where))

    @torch.no_grad()
    def steps(self, rows: Rows, steps: int, *, tokens: Tokens = "forced", where: Tensor | None = None) -> Iterator[StepOutput]:
        """Test-time training's forward, one step after the other.

        The mask is the trainers': a row sees the keys of step 0 up to its own (within the sliding window, counted in rows), and of later
        steps its own alone. So rows nobody asks for cost nothing but their keys.

        Args:
            rows: of one sample, made for this wiring.
            tokens: ``forced`` feeds the text; ``on-policy`` feeds, from the second step on, what the draft chose.
            where: [rows] bool: the rows to answer for, all of them where None. Outputs have as many rows as it marks.

        Raises:
            CheckpointError: a token of the text without an embedding row, or states that do not fit.
        """
        h = self.fuse(rows.states, final_norm=rows.final_norm)
        every = torch.arange(len(rows), device=self.device)
        at = every if where is None else torch.nonzero(where.to(self.device)).flatten()
        memory: list[KeysValues] = []
        chosen = at
        for step in range(steps):
            unknown = None
            if step and tokens == "on-policy":
                fed = self.to_target(chosen)
                e, unknown = self._embed_known(fed)
            else:
                fed = rows.tokens(step).to(self.device)
                fed = fed[at] if step and where is not None else fed
                e = self.embed(fed)
            positions = rows.positions.to(self.device)
            if step == 0:
                z = self._pass(h, e, positions, first_step(memory), every, every, None if where is None else at)
                fed = fed if where is None else fed[at]
            else:
                positions = positions[at] + step + self.wiring.position_gap
                z = self._pass(h, e, positions, later_step(memory), at, every)
            logits, h = self._output(z)
            chosen = logits.argmax(-1)
            yield StepOutput(logits, h, fed, unknown)

    # ---- real drafting -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def extend(self, states: Tensor, tokens: Tensor, positions: Tensor, cache: DraftCache, *, final_norm: bool = False) -> StepOutput:
        """Take in target states: the prompt, or what a verification accepted. Appends to ``cache``.

        Args:
            states: [rows, slots, target hidden].
            tokens: [rows] int64 target ids fed beside them (the token after each state, shifts already applied).
            positions: [rows] int64, ascending, after those in the cache.
            final_norm: see `fuse`.
        """
        return self._cached(self.fuse(states, final_norm=final_norm), tokens, positions, cache)

    @torch.no_grad()
    def decode_step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: DraftCache) -> StepOutput:
        """One later step of a chain: the drafted token beside the hidden state fed back. Appends to ``cache``.

        Args:
            tokens: [1] int64 target id; one without an embedding row is fed as zeros (``StepOutput.unknown``).
            hidden: [1, hidden] of the step before.
            positions: [1] int64: one after the last row's plus the step, plus `Wiring.position_gap`.
        """
        return self._cached(hidden, tokens, positions, cache)

    def _cached(self, h: Tensor, tokens: Tensor, positions: Tensor, cache: DraftCache) -> StepOutput:
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        e, unknown = self._embed_known(tokens)
        cache.positions = torch.cat((cache.positions.to(self.device), positions))
        z = self._pass(h.to(device=self.device, dtype=self.dtype), e, positions, cache.append, positions, cache.positions)
        logits, fed_back = self._output(z)
        return StepOutput(logits, fed_back, tokens, unknown)
