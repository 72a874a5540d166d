"""The portable sample format: everything a review of a draft needs of its target, in safetensors files.

One file per sample. Arrays: ``input_ids`` [T] int64; ``hidden_states.K`` [T, H] for HF index K (``output_hidden_states[K]``: 0 the
embedding output, K the input of decoder layer K); ``final_prenorm`` or ``final_postnorm`` [T, H], the last state before or after
the target's final norm; and where known ``loss_mask`` [T] bool, ``target_argmax`` [T] int64 (greedy choice after position t),
``target_topk_ids`` int32 and ``target_topk_logprobs`` float32 [T, k] (natural logarithm over the whole vocabulary),
``target_logsumexp`` [T] float32. Metadata, all strings: ``format`` and ``schema_version``, ``index_convention``, ``final_norm`` (``pre``
or ``post``), ``target`` (its name), and whatever the writer adds. Files without ``schema_version`` (version 0) hold the same arrays.

``rows.safetensors`` beside a ``config.json`` stands in for the target: ``token_ids`` [N] int32 ascending, ``embed_tokens`` [N, H],
``lm_head`` [N, H] where the head is not tied, ``final_norm`` [H] as stored. Writing is whole or not at all: a file appears under its
name complete, or no file does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3diag.checkpoint.rawfile import shown
from eagle3diag.errors import CheckpointError, UsageError, escaped

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMAT", "INDEX_CONVENTION", "SCHEMA_VERSION", "read_metadata", "write_rows", "write_sample", "write_whole"]

FORMAT = "eagle3diag portable dump"
SCHEMA_VERSION = "1"
INDEX_CONVENTION = "HF output_hidden_states index: 0 is the embedding output, k the input of decoder layer k"


def write_sample(
    path: str | os.PathLike[str],
    *,
    token_ids: Tensor,
    states: Mapping[int, Tensor],
    final: Tensor | None = None,
    final_norm: str = "pre",
    loss_mask: Tensor | None = None,
    argmax: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_logprobs: Tensor | None = None,
    logsumexp: Tensor | None = None,
    target: str = "",
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write one sample, whole or not at all.

    Args:
        path: the file; an old one is replaced once the new one is complete.
        token_ids: [T] integers.
        states: by HF index, [T, H] each, float16, bfloat16 or float32, all of one width.
        final: [T, H], the last state, before or after the final norm as ``final_norm`` (``pre`` or ``post``) says.
        loss_mask: [T] bool.
        argmax: [T] integers, the target's greedy choice after each position.
        topk_ids: [T, k] integers, by falling probability.
        topk_logprobs: [T, k] natural logarithms of the target's probabilities.
        logsumexp: [T], of the target's logits.
        target: its name.
        metadata: more strings; the keys of the format itself cannot be set.

    Raises:
        UsageError: shapes or dtypes that do not fit each other.
        CheckpointError: the file cannot be written.
    """
    import torch

    if final_norm not in ("pre", "post"):
        raise UsageError(f"final_norm is '{escaped(final_norm, 20)}'; give 'pre' or 'post'")
    if token_ids.ndim != 1 or token_ids.is_floating_point() or not len(token_ids):
        raise UsageError(f"token_ids has shape {list(token_ids.shape)} of {token_ids.dtype}, expected integers [tokens]")
    rows = len(token_ids)
    arrays: dict[str, Tensor] = {"input_ids": token_ids.to(torch.int64)}
    wide = {f"hidden_states.{k}": v for k, v in sorted(states.items())} | ({} if final is None else {f"final_{final_norm}norm": final})
    if not wide:
        raise UsageError("a sample needs at least one state")
    hidden = next(iter(wide.values())).shape[-1]
    for name, value in wide.items():
        if name.startswith("hidden_states.-") or tuple(value.shape) != (rows, hidden):
            raise UsageError(f"{name} has shape {list(value.shape)}, expected [{rows}, {hidden}]")
        if value.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise UsageError(f"{name} is {value.dtype}; a sample stores float16, bfloat16 or float32")
        arrays[name] = value
    more = (
        ("loss_mask", loss_mask, torch.bool, 1),
        ("target_argmax", argmax, torch.int64, 1),
        ("target_topk_ids", topk_ids, torch.int32, 2),
        ("target_topk_logprobs", topk_logprobs, torch.float32, 2),
        ("target_logsumexp", logsumexp, torch.float32, 1),
    )
    for name, given, dtype, ndim in more:
        if given is not None:
            if given.ndim != ndim or len(given) != rows:
                raise UsageError(f"{name} has shape {list(given.shape)}, expected {[rows, 'k'][:ndim]}")
            arrays[name] = given.to(dtype)
    if topk_ids is not None and topk_logprobs is not None and topk_ids.shape != topk_logprobs.shape:
        raise UsageError(f"topk_ids has shape {list(topk_ids.shape)}, topk_logprobs {list(topk_logprobs.shape)}; they belong together")
    own = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "index_convention": INDEX_CONVENTION, "target": target}
    if final is not None:
        own["final_norm"] = final_norm
    return write_whole(Path(path), arrays, {**(metadata or {}), **own})


def write_rows(
    folder: str | os.PathLike[str],
    *,
    token_ids: Tensor,
    embedding: Tensor,
    head: Tensor | None = None,
    final_norm: Tensor | None = None,
    config: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write the rows a draft can need of its target, and the target's config, so that no target is needed.

    Args:
        folder: gets ``rows.safetensors`` and ``config.json``; open it as a target.
        token_ids: [N] integers, each once.
        embedding: [N, H], row i of token ``token_ids[i]``.
        head: [N, H], where the head is not tied to the embedding.
        final_norm: [H], the weight as stored.
        config: the target's config.
        metadata: strings for the file.

    Returns:
        The rows file.

    Raises:
        UsageError: shapes that do not fit each other, or an id twice.
        CheckpointError: the files cannot be written.
    """
    import torch

    order = token_ids.to(torch.int64).argsort()
    ids = token_ids[order]
    if ids.ndim != 1 or embedding.ndim != 2 or len(embedding) != len(ids) or (head is not None and head.shape != embedding.shape):
        raise UsageError(f"token_ids {list(token_ids.shape)} and embedding {list(embedding.shape)} do not belong together")
    if bool((ids[1:] == ids[:-1]).any()) or (len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < 1 << 31):
        raise UsageError("token_ids names a token twice, or one outside 0 to 2^31-1")
    arrays = {"token_ids": ids.to(torch.int32), "embed_tokens": embedding[order]}
    if head is not None:
        arrays["lm_head"] = head[order]
    if final_norm is not None:
        arrays["final_norm"] = final_norm
    at = Path(folder)
    text = json.dumps(dict(config), indent=1, ensure_ascii=False, default=str).encode()
    _replace(at / "config.json", lambda part: part.write_bytes(text))
    own = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "what": "rows of the target's embedding and head by token id"}
    return write_whole(at / "rows.safetensors", arrays, {**(metadata or {}), **own})


def write_whole(path: Path, arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """A safetensors file that appears complete under its name, or not at all.

    Raises:
        CheckpointError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, value in arrays.items():
        value = value.detach().cpu().contiguous()
        # the format shares no bytes: slices of a stack and tensors given twice become arrays of their own
        if value.untyped_storage().nbytes() != value.nbytes or value.untyped_storage().data_ptr() in seen:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        held[key] = value

    def write(part: Path) -> None:
        try:
            save_file(held, part, metadata={k: str(v) for k, v in metadata.items()})
        except SafetensorError as error:
            raise CheckpointError(f"{shown(path)}: cannot be written: {escaped(error, 120)}") from None

    _replace(path, write)
    return path


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(part)
            fd = os.open(part, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            part.replace(path)
        except BaseException:  # also an interrupt: nothing half-written stays
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{shown(path)}: cannot be written: {(error.strerror or type(error).__name__).lower()}") from None


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a sample; empty where there is no readable one."""
    from eagle3diag.checkpoint.header import read_header

    try:
        header = read_header(path)
    except CheckpointError:
        return {}
    return {} if any(i.kind == "data-truncated" for i in header.issues) else header.metadata
