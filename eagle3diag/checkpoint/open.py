"""From a path to a ``Checkpoint``: which files count, what their headers say, and how a tensor is read when asked for.

A folder is taken as loaders take it: the shard index first, then ``model.safetensors``, then whatever ``*.safetensors`` lie there, then
torch files. Subfolders are not searched (``state_3/``, ``epoch_9/``): which of them is meant is the user's choice, so the error names them.
Opening reads headers and configs and not one byte of a tensor.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3diag.checkpoint.configs import read_configs
from eagle3diag.checkpoint.header import read_header
from eagle3diag.checkpoint.model import Checkpoint, TensorInfo
from eagle3diag.checkpoint.rawfile import Identity, fill, opened, refuse, shown, stream
from eagle3diag.checkpoint.shards import Index, inside, merge, read_index
from eagle3diag.errors import CheckpointError, UsageError, escaped

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from eagle3diag.checkpoint.torchfile import Place

__all__ = ["open_checkpoint"]

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TORCH_FIRST = ("pytorch_model.bin", "training_state.pt", "model.pt", "model.bin")
_TORCH_ENDS = (".bin", ".pt", ".pth", ".ckpt")
_NOT_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state", "adapter_", "consolidated", "lr_scheduler", "random_states")
_EXTRAS = (
    *("hf_quant_config.json", "quantize_config.json", "val_metrics.json", "train_command.txt", "run.yaml", "speculators.patch"),
    *("adapter_config.json", "adapter_model.safetensors", "training_state.pt", "optimizer_state_dict.pt", "scheduler_state_dict.pt"),
)


class _Part:
    """One weight file: its tensors and how to reach their bytes."""

    __slots__ = ("identity", "issues", "loaded", "path", "places", "size", "tensors", "torch", "training")

    def __init__(self, path: Path, file: str, torch_file: bool) -> None:
        self.path, self.torch, self.training = path, torch_file, False
        self.places: dict[str, Place] | None = None
        self.loaded: dict[str, torch.Tensor] | None = None
        self.identity: Identity | None
        if torch_file:
            from eagle3diag.checkpoint.torchfile import list_torch

            listing = list_torch(path, file)
            self.tensors, self.issues, self.size, self.identity = listing.tensors, listing.issues, listing.size, listing.identity
            self.places, self.training = listing.places, listing.key.startswith("draft_") or path.name == "training_state.pt"
        else:
            header = read_header(path, file)
            self.tensors, self.issues, self.size, self.identity = header.tensors, header.issues, header.size, header.identity

    def blocks(self, info: TensorInfo, block: int) -> Iterator[memoryview]:
        """The bytes of a tensor, elements in order."""
        if info.offset is not None:
            return stream(self.path, info.offset, info.nbytes, block, self.identity)
        place = self.places[info.name] if self.places is not None else None
        if place is not None and place.stride is None:
            return stream(self.path, place.start, place.span, block, self.identity)
        return self._from_tensor(info, block)

    def _from_tensor(self, info: TensorInfo, block: int) -> Iterator[memoryview]:
        import torch

        if info.nbytes:
            flat = self.read(info).contiguous().view(-1).view(torch.uint8)
            whole = flat.numpy().data
            block = max(64, block - block % 64)
            for at in range(0, info.nbytes, block):
                yield whole[at : at + block]

    def read(self, info: TensorInfo) -> torch.Tensor:
        """A whole tensor in its stored dtype; F4, F6 and E8M0 as raw bytes."""
        import torch

        from eagle3diag.checkpoint.dtypes import BITS, torch_dtype

        if self.torch and self.places is None:
            if self.loaded is None:
                from eagle3diag.checkpoint.torchfile import load_by_torch

                assert self.identity is not None
                self.loaded = load_by_torch(self.path, self.identity)
            return self.loaded[info.name]
        place = self.places[info.name] if self.places is not None else None
        start, span = (place.start, place.span) if place is not None else (info.offset or 0, info.nbytes)
        if start + span > self.size:  # before anything is allocated
            raise CheckpointError(
                f"{shown(self.path)}: '{escaped(info.name)}' lies up to byte {start + span:,}, the file has {self.size:,}; fetch it again"
            )
        raw = torch.empty(span, dtype=torch.uint8)
        fill(self.path, start, raw.numpy().data, self.identity)
        dtype = torch_dtype(info.dtype)
        if dtype is None:
            return raw.reshape(info.shape) if BITS[info.dtype] == 8 else raw
        # a byte other than 0 and 1 is no bool in memory
        typed = raw != 0 if dtype is torch.bool else raw.view(dtype) if span else torch.empty(0, dtype=dtype)
        return typed.reshape(info.shape) if place is None or place.stride is None else typed.as_strided(info.shape, place.stride)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint from its headers alone.

    Args:
        path: a folder; a ``.safetensors``, ``.bin``, ``.pt`` file, a shard index or a ``config.json``; or a URL (``hf://org/repo``,
            ``https://…``, ``s3://…``), of which only headers are read, by range requests.

    Returns:
        The checkpoint; ``form`` is ``none`` where a folder holds configs and no weights. Deviations that did not stop the reading are
        in ``issues``.

    Raises:
        CheckpointError: one line: nothing there, not readable, or not a checkpoint.
        UsageError: a URL that needs a package which is not installed.

    Example:
        >>> draft = open_checkpoint("data_samples/smollm2-eagle3/draft")
        >>> len(draft.tensors), draft.tensors["fc.weight"].shape
        (15, (576, 1728))
    """
    text = os.fspath(path)
    if isinstance(text, str) and "://" in text:
        from eagle3diag.checkpoint.remote import open_remote

        return open_remote(text)
    given = Path(path)
    if not text:
        raise UsageError("the path of the checkpoint is empty; give a folder or a file")
    folder, index, weights = _choose(given)
    configs, issues = read_configs(folder)
    parts: dict[str, _Part] = {}
    missing: list[str] = []
    for file in weights:
        real = inside(folder, file, shown(given)) if index else folder / file
        if index and _absent(real):
            missing.append(file)
        else:
            parts[file] = _Part(real, file, not file.endswith(".safetensors") and _looks_torch(real))
    if index or len(parts) > 1:
        tensors, more = merge({f: p.tensors for f, p in parts.items()}, index, tuple(missing))
    else:
        tensors, more = ({}, ()) if not parts else (next(iter(parts.values())).tensors, ())
    if not weights and not configs and all(i.evidence.get("absent") for i in issues):
        raise CheckpointError(f"{shown(path)}: {_nothing(folder)}")
    return Checkpoint(
        path=str(text),
        files=tuple(parts),
        tensors={n: tensors[n] for n in sorted(tensors)},
        configs=configs,
        issues=(*issues, *(i for p in parts.values() for i in p.issues), *more),
        form=_form(index, parts),
        extras=tuple(e for e in _EXTRAS if e not in parts and _there(folder / e)),
        sizes={f: p.size for f, p in parts.items()},
        reader=lambda info: parts[info.file].read(info),
        blocker=lambda info, block: parts[info.file].blocks(info, block),
    )


def _there(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def _absent(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # there, but out of reach: the reader says why
        return False
    return False


def _form(index: Index | None, parts: dict[str, _Part]) -> str:
    if not parts and index is None:
        return "none"
    if any(p.training for p in parts.values()):
        return "training_state"
    if len(parts) == 1 and index is None:
        return "torch" if next(iter(parts.values())).torch else "safetensors"
    return "torch" if parts and all(p.torch for p in parts.values()) else "sharded"


def _looks_torch(path: Path) -> bool:
    from eagle3diag.checkpoint.torchfile import is_torch

    return is_torch(path) or path.name.endswith(_TORCH_ENDS)


def _choose(given: Path) -> tuple[Path, Index | None, tuple[str, ...]]:
    """The folder, its shard index if that is what loaders take, and the weight files."""
    try:
        names = sorted(e.name for e in os.scandir(given))
    except NotADirectoryError:
        if given.name.endswith(".index.json"):
            index = read_index(given)
            return given.parent, index, index.shards
        if given.name.startswith("config") and given.name.endswith(".json"):
            with opened(given):
                return given.parent, None, ()
        return given.parent, None, (given.name,)
    except (OSError, ValueError) as error:
        refuse(given, error)
    there = frozenset(names)
    for name in _INDEXES:
        if name in there and (name == _INDEXES[0] or "model.safetensors" not in there):
            index = read_index(given / name)
            return given, index, index.shards
    if "model.safetensors" in there:
        return given, None, ("model.safetensors",)
    plain = tuple(n for n in names if n.endswith(".safetensors") and not n.startswith(("._", *_NOT_WEIGHTS)))
    if plain:
        return given, None, plain
    pickles = [n for n in names if n.endswith(_TORCH_ENDS) and not n.startswith(("._", *_NOT_WEIGHTS))]
    first = next((n for n in _TORCH_FIRST if n in there), None)
    if first is None and len(pickles) > 1:
        shards = tuple(n for n in pickles if n.startswith("pytorch_model"))
        if not shards:
            raise CheckpointError(
                f"{shown(given)}: {len(pickles)} torch files ({', '.join(escaped(n, 40) for n in pickles[:4])}); give the one that is meant"
            )
        return given, None, shards
    return given, None, (first,) if first else tuple(pickles)


def _nothing(folder: Path) -> str:
    """Why a folder is no checkpoint, with the subfolders that look like one."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda e: e.name)[:1000]
        below = [e.name for e in entries if e.is_dir() and _holds_weights(Path(e.path))]
    except OSError:
        below, entries = [], []
    if below:
        more = f" and {len(below) - 3} more" if len(below) > 3 else ""
        some = ", ".join(f"{escaped(n, 40)}/" for n in below[:3])
        return f"no weights and no config in this folder; subfolders hold some: {some}{more}; give one of them"
    gguf = next((e.name for e in entries if e.name.endswith(".gguf")), None)
    if gguf:
        return f"no weights that are read here, only '{escaped(gguf, 60)}'; GGUF drafts are not read, give the safetensors it was made from"
    return f"no weights and no config in this folder ({len(entries)} entries); give the folder that holds model.safetensors and config.json"


def _holds_weights(folder: Path) -> bool:
    try:
        return any(p.name.endswith((".safetensors", *_TORCH_ENDS)) and not p.name.startswith(_NOT_WEIGHTS) for p in folder.iterdir())
    except OSError:
        return False
