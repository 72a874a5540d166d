"""From a path to a ``Checkpoint``: which files count, and what their headers say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3diag.checkpoint.dtypes import torch_dtype
from eagle3diag.checkpoint.header import read_header
from eagle3diag.checkpoint.model import Checkpoint, ConfigFile, Issue, TensorInfo
from eagle3diag.checkpoint.rawfile import shown, stream
from eagle3diag.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["open_checkpoint"]


def _configs(folder: Path) -> tuple[tuple[ConfigFile, ...], tuple[Issue, ...]]:
    try:
        from eagle3diag.checkpoint.configs import read_configs
    except ModuleNotFoundError:
        return (), ()
    return read_configs(folder)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder or a file from its headers alone."""
    given = Path(path)
    if given.is_dir():
        folder = given
        weights = [given / "model.safetensors"] if (given / "model.safetensors").exists() else sorted(given.glob("*.safetensors"))
    elif given.exists():
        folder, weights = given.parent, [given]
    else:
        raise CheckpointError(f"{shown(path)}: no such file or folder")
    configs, issues = _configs(folder)
    headers = {w.name: read_header(w) for w in weights}
    if not headers and not configs:
        raise CheckpointError(f"{shown(path)}: no weights and no config in this folder")
    tensors = {n: t for h in headers.values() for n, t in h.tensors.items()}

    def blocks(info: TensorInfo, block: int) -> Iterator[memoryview]:
        assert info.offset is not None
        return stream(folder / info.file, info.offset, info.nbytes, block, headers[info.file].identity)

    def read(info: TensorInfo) -> torch.Tensor:
        import torch

        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        view, at = memoryview(raw.numpy()), 0
        for part in blocks(info, 1 << 20):
            view[at : at + len(part)] = part
            at += len(part)
        dtype = torch_dtype(info.dtype)
        return raw if dtype is None else raw.view(dtype).reshape(info.shape)

    return Checkpoint(
        path=str(path),
        files=tuple(headers),
        tensors=dict(sorted(tensors.items())),
        configs=configs,
        issues=(*issues, *(i for h in headers.values() for i in h.issues)),
        form="none" if not headers else "safetensors" if len(headers) == 1 else "sharded",
        sizes={n: h.size for n, h in headers.items()},
        reader=read,
        blocker=blocks,
    )
