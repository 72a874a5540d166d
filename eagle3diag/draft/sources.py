"""Where a wiring's head, embedding, mapping and unfilled parameters come from.

What a server leaves at its start value (``Wiring.unfilled``) is drawn here: ``ones`` and ``zeros`` are what they say; ``random`` and
``uninitialised`` become N(0, 0.02), one generator a parameter, seeded by the model's ``seed`` and the canonical name, so that a parameter
is the same whatever else is unfilled. Memory nobody wrote holds anything; the draw stands for "nothing of what was trained".
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from eagle3diag.checkpoint.model import DraftSpec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.parameters import parameter_shapes
from eagle3diag.draft.tables import TargetTables
from eagle3diag.draft.weights import DraftWeights
from eagle3diag.errors import CheckpointError

__all__ = ["SPREAD", "embedding_weight", "filled", "head_weight", "start_value", "target_ids"]

#: standard deviation of start values, what transformers calls initializer_range
SPREAD = 0.02


def start_value(weights: DraftWeights, name: str, shape: tuple[int, ...], value: str, seed: int) -> Tensor:
    """A parameter nothing reached: ``ones``, ``zeros``, or a draw from N(0, 0.02) for anything else."""
    if value in ("ones", "zeros"):
        return (torch.ones if value == "ones" else torch.zeros)(shape, dtype=weights.dtype, device=weights.device)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return (SPREAD * torch.randn(shape, generator=generator)).to(dtype=weights.dtype, device=weights.device)


def filled(weights: DraftWeights, spec: DraftSpec, wiring: Wiring, seed: int) -> DraftWeights:
    """The weights with start values where the wiring says that nothing reached the parameter.

    Head, embedding and mapping have fields of their own in a `Wiring`, which decide.
    """
    out = dict(weights.tensors)
    shapes = parameter_shapes(weights, spec)
    for name, value in wiring.unfilled.items():
        shape = tuple(out[name].shape) if name in out else shapes.get(name)
        if shape is not None and name not in ("lm_head.weight", "embed_tokens.weight", "d2t"):
            out[name] = start_value(weights, name, shape, value, seed)
    return replace(weights, tensors=out)


def head_weight(weights: DraftWeights, wiring: Wiring, tables: TargetTables, seed: int) -> tuple[Tensor, int]:
    """[draft vocabulary, hidden] rows of the head, and how many of them the tables do not have (zeros stand in).

    Raises:
        CheckpointError: the rows are not at hand, or of another width.
    """
    s, path = weights.sizes, weights.path
    missing = 0
    if wiring.head == "draft":
        head = weights.need("lm_head.weight")
    elif wiring.head == "uninitialised":
        head = start_value(weights, "lm_head.weight", (s.draft_vocab, s.hidden), "random", seed)
    elif wiring.head == "embedding":
        own = weights.get("embed_tokens.weight")
        head = own if own is not None and wiring.embedding == "draft" else _whole(tables, tables.embedding, "embedding", path)
    elif wiring.head in ("target-first-rows", "target-rows"):
        size = s.draft_vocab or len(weights.tensors.get("d2t", ()))
        ids = torch.arange(size, device=weights.device) if wiring.head == "target-first-rows" else target_ids(weights, wiring, size)
        known = tables.known(ids)
        width = s.hidden if tables.head is None else tables.head.shape[-1]
        head = torch.zeros((size, width), dtype=weights.dtype, device=weights.device)
        head[known] = tables.head_rows(ids[known]).to(weights.dtype)
        missing = int((~known).sum())
    else:
        head = _whole(tables, tables.head, "head", path)
    if head.ndim != 2 or head.shape[-1] != s.hidden:
        raise CheckpointError(f"{path}: the head has shape {list(head.shape)}, the draft width {s.hidden}")
    return head.to(device=weights.device, dtype=weights.dtype), missing


def _whole(tables: TargetTables, table: Tensor | None, what: str, path: str) -> Tensor:
    if table is None or not tables.whole:
        have = "none" if table is None else f"{len(table)} rows"
        raise CheckpointError(f"{path}: the head is the target's whole {what}, and {have} of it is at hand; give the target's folder")
    return table


def embedding_weight(weights: DraftWeights, wiring: Wiring, tables: TargetTables, seed: int) -> Tensor | None:
    """A table by target id; None where the target's rows are asked for one by one.

    Raises:
        CheckpointError: the table is not at hand, or of another width.
    """
    s, path = weights.sizes, weights.path
    if wiring.embedding == "draft":
        table = weights.need("embed_tokens.weight")
    elif wiring.embedding == "uninitialised":
        return start_value(weights, "embed_tokens.weight", (s.vocab or tables.vocab or s.draft_vocab, s.hidden), "random", seed)
    else:
        table = torch.zeros(0, s.hidden) if tables.embedding is None else tables.embedding
    if table.ndim != 2 or table.shape[-1] != s.hidden:
        whose = "draft's" if wiring.embedding == "draft" else "target's"
        raise CheckpointError(f"{path}: the {whose} embedding has shape {list(table.shape)}, the draft width {s.hidden}; it cannot be fed")
    return table if wiring.embedding == "draft" else None


def target_ids(weights: DraftWeights, wiring: Wiring, size: int) -> Tensor:
    """[draft vocabulary] int64: the target id each of ``size`` columns of the logits stands for.

    Raises:
        CheckpointError: no mapping, or one of another length.
    """
    own = torch.arange(size, device=weights.device)
    if wiring.mapping in ("none", "missing"):
        return own
    if wiring.mapping == "t2d":
        mask = weights.get("t2d")
        ids = None if mask is None else torch.nonzero(mask).flatten()
    else:
        d2t = weights.get("d2t")
        ids = d2t if d2t is None or wiring.mapping == "absolute" or len(d2t) != size else own + d2t
    if ids is None or len(ids) != size:
        name = "t2d" if wiring.mapping == "t2d" else "d2t"
        raise CheckpointError(f"{weights.path}: {name} names {'no' if ids is None else len(ids)} target ids, the head has {size} rows")
    return ids
