"""The draft in plain PyTorch: one ``Wiring`` of one set of weights, run on rows of a dump or step by step.

The forward pass is that of the dialects' facts, section 3, "reference forward with switches"; each switch is one line here. ``run`` does the
trainers' test-time training: all rows at once, step after step, with the training mask. `begin`, `extend` and `decode_step` do what a server
does: a KV cache, one chain at a time; their first steps are the same numbers.

What a server leaves at its start value (``Wiring.unfilled``) is drawn here: ``ones`` and ``zeros`` are what they say; ``random`` and
``uninitialised`` become N(0, 0.02), one generator per parameter, seeded by ``seed`` and the name. Memory nobody wrote holds anything; the draw
stands for "nothing of what was trained".
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from eagle3diag.checkpoint.model import DraftSpec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.layers import KeysValues, LayerWeights, activation, attend, mlp, project, rms_norm
from eagle3diag.draft.parameters import parameter_shapes
from eagle3diag.draft.rope import Rope, softmax_gain
from eagle3diag.draft.rows import Rows
from eagle3diag.draft.tables import TargetTables
from eagle3diag.draft.weights import DraftWeights, softmax_scale
from eagle3diag.errors import CheckpointError

__all__ = ["DraftCache", "PlainDraft", "StepOutput"]

Tokens = Literal["forced", "on-policy"]


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """One step.

    Attributes:
        logits: [rows, draft vocabulary] in the computing dtype; column ``i`` is draft id ``i``.
        hidden: [rows, hidden]: what the next step is fed.
        tokens: [rows] int64: target ids that were fed.
        unknown: [rows] bool: the fed token has no embedding row here (on-policy only; zeros stood in), None where all have.
    """

    logits: Tensor
    hidden: Tensor
    tokens: Tensor
    unknown: Tensor | None = None


@dataclass(slots=True, eq=False)
class DraftCache:
    """The KV cache of real drafting: per layer, keys and values of every position so far, and the positions themselves."""

    layers: list[KeysValues] = field(default_factory=list)
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.positions)

    def crop(self, length: int) -> None:
        """Forget everything after the first ``length`` entries (a rejected chain)."""
        self.positions = self.positions[:length]
        for kv in self.layers:
            kv.keys, kv.values = kv.keys[:length], kv.values[:length]


class PlainDraft:
    """A draft that can be run.

    Args:
        weights: canonical tensors.
        spec: of the draft.
        wiring: what to run: the spec's own, a served draft's, or a fault.
        tables: of the target.
        seed: of start values.

    Raises:
        CheckpointError: the wiring needs a tensor or table that is not there, or widths that do not fit.
    """

    def __init__(self, weights: DraftWeights, spec: DraftSpec, wiring: Wiring, tables: TargetTables, *, seed: int = 0) -> None:
        self.spec, self.wiring, self.seed = spec, wiring, seed
        self.sizes, self.dtype, self.device, self.path = weights.sizes, weights.dtype, weights.device, weights.path
        self.tables = tables.to(weights.device)
        self._weights = self._filled(weights)
        s, theta = self.sizes, wiring.rope_theta
        if theta is None:
            raise CheckpointError(f"{self.path}: the rope base of this wiring is not known; state rope_theta")
        self.rope = Rope(dim=s.rotary, theta=theta, scaling=wiring.rope_scaling, max_position=s.max_position, interleaved=s.interleaved)
        self._scale = softmax_scale(s, softmax_gain(wiring.rope_scaling) if s.mla else 1.0)
        self._act = activation(s.act)
        self._layers = [self._layer(i) for i in range(s.layers)]
        self._fc = self._fusion()
        self.head_rows_missing = 0  #: head rows the tables do not have; zeros stand in
        self._head = self._head_weight()
        self._embedding = self._embedding_weight()
        self._map = self._target_ids()

    # ---- what is run -------------------------------------------------------------------------------------------------------------

    def _filled(self, weights: DraftWeights) -> DraftWeights:
        """The weights with start values where the wiring says that nothing reached the parameter."""
        out = dict(weights.tensors)
        shapes = parameter_shapes(weights, self.spec)
        for name, value in self.wiring.unfilled.items():
            if name in ("lm_head.weight", "embed_tokens.weight"):
                continue  # the wiring's head and embedding say what stands there
            shape = tuple(out[name].shape) if name in out else shapes.get(name)
            if shape is not None:
                out[name] = self._start(name, shape, value)
        return replace(weights, tensors=out)

    def _start(self, name: str, shape: tuple[int, ...], value: str) -> Tensor:
        if value in ("ones", "zeros"):
            return (torch.ones if value == "ones" else torch.zeros)(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))
        return (0.02 * torch.randn(shape, generator=generator)).to(dtype=self.dtype, device=self.device)

    def _need(self, name: str) -> Tensor:
        value = self._weights.get(name)
        if value is None:
            raise CheckpointError(f"{self.path}: this wiring needs {name}, and the draft has none")
        return value

    def _layer(self, index: int) -> LayerWeights:
        at = f"layers.{index}."
        w = LayerWeights(tensors={k[len(at) :]: v for k, v in self._weights.tensors.items() if k.startswith(at)})
        names = ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"]
        names += ["input_layernorm", "hidden_norm"] if index == 0 else [self.wiring.deep_layer_norm]
        names += ["self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"] if self.sizes.mla else [f"self_attn.{p}_proj" for p in "qkv"]
        for name in names:
            self._need(f"{at}{name}.weight")
        return w

    def _fusion(self) -> Tensor | None:
        w = self.wiring
        if w.fc != "applied":
            return None
        return self._need("fc.weight")

    def _head_weight(self) -> Tensor:
        """[draft vocabulary, hidden] rows of the head."""
        w, s = self.wiring, self.sizes
        if w.head == "draft":
            return self._need("lm_head.weight")
        if w.head == "uninitialised":
            return self._start("lm_head.weight", (s.draft_vocab, s.hidden), "random")
        if w.head == "embedding":
            own = self._weights.get("embed_tokens.weight") if w.embedding == "draft" else self.tables.embedding
            if own is None or (w.embedding != "draft" and not self.tables.whole):
                raise CheckpointError(f"{self.path}: the head is tied to the embedding, and the whole embedding is not at hand")
            head = own
        elif w.head == "target-first-rows":
            first = torch.arange(s.draft_vocab, device=self.device)
            known = self.tables.known(first)
            head = torch.zeros((s.draft_vocab, s.hidden), dtype=self.dtype, device=self.device)
            head[known] = self.tables.head_rows(first[known]).to(self.dtype)
            self.head_rows_missing = int((~known).sum())
        else:
            if not self.tables.whole or self.tables.head is None:
                raise CheckpointError(f"{self.path}: the head is the target's own, and the whole target head is not at hand")
            head = self.tables.head
        if head.shape[-1] != s.hidden:
            raise CheckpointError(f"{self.path}: the head has width {head.shape[-1]}, the draft {s.hidden}")
        return head.to(device=self.device, dtype=self.dtype)

    def _embedding_weight(self) -> Tensor | None:
        """A table by target id, or None where the target's rows are asked for one by one."""
        w, s = self.wiring, self.sizes
        if w.embedding == "draft":
            return self._need("embed_tokens.weight")
        if w.embedding == "uninitialised":
            rows = s.vocab or self.tables.vocab or s.draft_vocab
            return self._start("embed_tokens.weight", (rows, s.hidden), "random")
        if self.tables.embedding is not None and self.tables.embedding.shape[-1] != s.hidden:
            raise CheckpointError(
                f"{self.path}: the target's embedding has width {self.tables.embedding.shape[-1]}, the draft {s.hidden}; it needs its own"
            )
        return None

    def _target_ids(self) -> Tensor:
        """[draft vocabulary] int64: the target id each column of the logits stands for."""
        own = torch.arange(len(self._head), device=self.device)
        if self.wiring.mapping in ("none", "missing"):
            return own
        d2t = self._weights.get("d2t")
        if d2t is None or len(d2t) != len(own):
            have = "none" if d2t is None else str(len(d2t))
            raise CheckpointError(f"{self.path}: d2t maps {len(own)} draft ids, and it has {have} entries")
        return own + d2t if self.wiring.mapping == "offset" else d2t

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids (int64, any shape), by the wiring's mapping."""
        return self._map[draft_ids]

    @property
    def target_ids(self) -> Tensor:
        """[draft vocabulary] int64: the target id of every column of the logits."""
        return self._map

    def embed(self, ids: Tensor) -> Tensor:
        """[rows, hidden] embeddings of target ids.

        Raises:
            CheckpointError: an id without a row.
        """
        if self._embedding is None:
            return self.tables.embed(ids).to(self.dtype)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._embedding):
            raise CheckpointError(f"{self.path}: token ids {int(ids.min())} to {int(ids.max())}; the embedding has {len(self._embedding)} rows")
        return self._embedding[ids]

    def _embed_known(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Embeddings with zeros for ids that have no row, and which those are."""
        known = self.tables.known(ids) if self._embedding is None else (ids >= 0) & (ids < len(self._embedding))
        if bool(known.all()):
            return self.embed(ids), None
        out = torch.zeros((len(ids), self.sizes.hidden), dtype=self.dtype, device=self.device)
        out[known] = self.embed(ids[known])
        return out, ~known

    # ---- the forward pass --------------------------------------------------------------------------------------------------------

    def fuse(self, states: Tensor, *, final_norm: bool = False) -> Tensor:
        """Target states [rows, slots, target hidden] to the draft's first hidden state [rows, hidden].

        Args:
            final_norm: each state goes through the target's final norm first.

        Raises:
            CheckpointError: widths that do not fit, or no final norm at hand.
        """
        w, s = self.wiring, self.sizes
        x = states.to(device=self.device, dtype=self.dtype)
        if final_norm:
            if self.tables.final_norm is None:
                raise CheckpointError(f"{self.path}: this wiring needs the target's final norm, and it is not at hand")
            x = rms_norm(x, self.tables.final_norm.to(self.dtype), self.tables.eps)
        if self._fc is None:
            x = x[:, -1]
            if x.shape[-1] != s.hidden:
                raise CheckpointError(f"{self.path}: without fc a state of width {x.shape[-1]} reaches a draft of width {s.hidden}")
            return x
        if x.shape[1] * x.shape[2] != self._fc.shape[1]:
            raise CheckpointError(f"{self.path}: fc takes width {self._fc.shape[1]}, the states are {x.shape[1]} times {x.shape[2]} wide")
        if w.norm_before_fc:
            weight = self._need("input_norm.weight")
            x = rearrange(rms_norm(rearrange(x, "r a h -> r (a h)"), weight, s.eps), "r (a h) -> r a h", a=x.shape[1])
        if w.fc_norm:
            chunks = [rms_norm(x[:, i], self._need(f"fc_norm.{i}.weight"), s.eps) for i in range(x.shape[1])]
            x = torch.stack(chunks, dim=1)
        return F.linear(rearrange(x, "r a h -> r (a h)"), self._fc, self._weights.get("fc.bias"))

    def _layer_input(self, index: int, z: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input, residual) of one layer from the hidden state and the token embeddings."""
        w, layer, eps = self.wiring, self._layers[index], self.sizes.eps
        if index > 0:
            return layer.norm(z, w.deep_layer_norm, eps), z
        u = layer.norm(layer.norm(z, "input_layernorm", eps) if w.double_norm else z, "hidden_norm", eps)
        residual = u if w.norm_before_residual else z
        e = layer.norm(e, "input_layernorm", eps)
        return torch.cat((e, u) if w.concat == "embedding-first" else (u, e), dim=-1), residual

    def _output(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, what is fed back)."""
        w = self.wiring
        normed = rms_norm(z, self._need("norm.weight"), self.sizes.eps) if w.final_norm or w.norm_output else z
        return F.linear(normed if w.final_norm else z, self._head, self._weights.get("lm_head.bias")), normed if w.norm_output else z

    @torch.no_grad()
    def run(self, rows: Rows, steps: int, *, tokens: Tokens = "forced") -> list[StepOutput]:
        """Test-time training's forward: all rows, ``steps`` steps.

        Args:
            rows: of one sample, made for this wiring.
            tokens: ``forced`` feeds the text; ``on-policy`` feeds, from the second step on, what the draft chose.

        Raises:
            CheckpointError: a token without an embedding row, or states that do not fit.
        """
        h = self.fuse(rows.states, final_norm=rows.final_norm)
        at = torch.arange(len(rows), device=self.device)
        memory: list[KeysValues] = []
        out: list[StepOutput] = []
        for step in range(steps):
            unknown = None
            if step and tokens == "on-policy":
                fed = self.to_target(out[-1].logits.argmax(-1))
                e, unknown = self._embed_known(fed)
            else:
                fed = rows.tokens(step).to(self.device)
                e = self.embed(fed)
            positions = rows.positions.to(self.device) + step + (self.wiring.position_gap if step else 0)
            cos, sin = self.rope.cos_sin(positions, self.dtype)
            z = h
            for i, layer in enumerate(self._layers):
                x, residual = self._layer_input(i, z, e)
                q, k, v = project(x, layer, self.sizes, cos, sin)
                if step == 0:
                    memory.append(KeysValues(k, v))
                else:
                    memory[i].later.append((k, v))
                seen = attend(q, memory[i], at, at, scale=self._scale, window=self.wiring.sliding_window)
                z = residual + layer.linear(seen, "self_attn.o_proj")
                z = z + mlp(layer.norm(z, "post_attention_layernorm", self.sizes.eps), layer, self._act)
            logits, h = self._output(z)
            out.append(StepOutput(logits, h, fed, unknown))
        return out

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
            tokens: [1] int64 target id.
            hidden: [1, hidden] of the step before.
            positions: [1] int64: one after the last; from the second step of a chain on plus ``Wiring.position_gap``.
        """
        return self._cached(hidden, tokens, positions, cache)

    def _cached(self, h: Tensor, tokens: Tensor, positions: Tensor, cache: DraftCache) -> StepOutput:
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        e, unknown = self._embed_known(tokens)
        cos, sin = self.rope.cos_sin(positions, self.dtype)
        cache.positions = torch.cat((cache.positions.to(self.device), positions))
        z = h
        for i, layer in enumerate(self._layers):
            x, residual = self._layer_input(i, z, e)
            q, k, v = project(x, layer, self.sizes, cos, sin)
            if i == len(cache.layers):
                cache.layers.append(KeysValues(k, v))
            else:
                kv = cache.layers[i]
                kv.keys, kv.values = torch.cat((kv.keys, k)), torch.cat((kv.values, v))
            seen = attend(q, cache.layers[i], positions, cache.positions, scale=self._scale, window=self.wiring.sliding_window)
            z = residual + layer.linear(seen, "self_attn.o_proj")
            z = z + mlp(layer.norm(z, "post_attention_layernorm", self.sizes.eps), layer, self._act)
        logits, fed_back = self._output(z)
        return StepOutput(logits, fed_back, tokens, unknown)
