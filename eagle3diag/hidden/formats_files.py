"""What a dump file holds, before anybody says which format it is.

``Contents`` lists the arrays of a file from its header (safetensors), its pickle (listed, never unpickled) or its JSON, and reads
one when asked. Formats (``formats_known``) look at names, shapes and element types only, so opening a folder of any size reads no
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3diag.checkpoint.dtypes import torch_dtype
from eagle3diag.checkpoint.header import read_header
from eagle3diag.checkpoint.rawfile import Identity, fill, shown
from eagle3diag.errors import CheckpointError, escaped

if TYPE_CHECKING:
    import torch

__all__ = ["Array", "Contents", "open_safetensors"]


class Array(NamedTuple):
    """An array as described: safetensors dtype and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def floating(self) -> bool:
        """Whether it can hold states."""
        return self.dtype in ("F16", "BF16", "F32", "F64")

    @property
    def whole(self) -> bool:
        """Whether it can hold ids or a mask."""
        return self.dtype[0] in "IU" or self.dtype == "BOOL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The arrays of one sample.

    Attributes:
        path: the file.
        name: how messages name it: its path inside the dump.
        kind: ``safetensors``, ``torch`` or ``json``.
        arrays: by key; the entries of a list stand under ``key.0``, ``key.1`` …
        metadata: strings (and numbers as strings) the file carries beside its arrays.
        reader: reads one array by key.
    """

    path: Path
    name: str
    kind: str
    arrays: Mapping[str, Array]
    reader: Callable[[str], torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def read(self, key: str) -> torch.Tensor:
        """One array, in its stored dtype.

        Raises:
            CheckpointError: the file changed or is cut.
        """
        return self.reader(key)


def open_safetensors(path: Path, name: str) -> Contents:
    """The arrays of a safetensors file.

    Raises:
        CheckpointError: no readable safetensors file, or its data is cut.
    """
    header = read_header(path, name)
    cut = next((i for i in header.issues if i.kind in ("data-truncated", "offsets-overlap")), None)
    if cut is not None:
        raise CheckpointError(f"{shown(path)}: {cut.message.partition(': ')[2]}")
    tensors, identity = header.tensors, header.identity

    def read(key: str) -> torch.Tensor:
        info = tensors[key]
        return placed(path, key, info.dtype, info.shape, info.offset or 0, info.nbytes, identity)

    arrays = {key: Array(info.dtype, info.shape) for key, info in tensors.items()}
    return Contents(path=path, name=name, kind="safetensors", arrays=arrays, reader=read, metadata=header.metadata)


def placed(path: Path, key: str, dtype: str, shape: tuple[int, ...], start: int, nbytes: int, identity: Identity | None) -> torch.Tensor:
    """An array that lies in order in a file.

    Raises:
        CheckpointError: a dtype without values, or a file that changed.
    """
    import torch

    kind = torch_dtype(dtype)
    if kind is None:
        raise CheckpointError(f"{shown(path)}: '{escaped(key)}' is {escaped(dtype)}, whose values cannot be read")
    raw = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        fill(path, start, memoryview(raw.numpy()), identity)
    return (raw != 0).reshape(shape) if kind == torch.bool else raw.view(kind).reshape(shape)
