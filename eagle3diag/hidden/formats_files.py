"""What a dump file holds, before anybody says which format it is.

``Contents`` lists the arrays of one sample from a header (safetensors), a pickle (listed, never unpickled; gunzipped within a bound if
need be) or JSON, and reads one when asked. Formats look at names, shapes and element types only, so opening a folder of any size
reads no state.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3diag.checkpoint.dtypes import torch_dtype
from eagle3diag.checkpoint.header import read_header
from eagle3diag.checkpoint.rawfile import Identity, fill, opened, read_into, shown
from eagle3diag.checkpoint.sniff import is_pickle, is_zip
from eagle3diag.checkpoint.torchfile import Place, TorchListing, list_values
from eagle3diag.errors import CheckpointError, escaped

if TYPE_CHECKING:
    import torch

__all__ = ["GZ_LIMIT", "IDS", "Array", "Contents", "is_gzip", "parts_of", "squeezed"]

#: bytes a ``.gz`` may unpack to: 8,192 tokens of five states of 8,192 in bfloat16 are 0.7 GB
GZ_LIMIT = 4 << 30
#: keys of the token ids
IDS = ("input_ids", "token_ids", "tokens")


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


def squeezed(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """The shape without leading axes of one, as far as ``ndim`` axes are left."""
    while len(shape) > ndim and shape[0] == 1:
        shape = shape[1:]
    return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The arrays of one sample.

    Attributes:
        path: the file.
        name: how messages name it: its path inside the dump.
        kind: ``safetensors``, ``torch`` or ``json``.
        arrays: by key; the entries of a list stand under ``key.0``, ``key.1`` …
        reader: reads one array by key.
        metadata: strings the file carries beside its arrays.
        values: numbers, texts and flags a pickle or JSON carries beside its arrays.
        part: place in a file of several samples; None where it is the only one.
    """

    path: Path
    name: str
    kind: str
    arrays: Mapping[str, Array]
    reader: Callable[[str], torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    part: int | None = None

    def read(self, key: str) -> torch.Tensor:
        """One array, in its stored dtype.

        Raises:
            CheckpointError: the file changed or is cut.
        """
        return self.reader(key)


def is_gzip(path: Path) -> bool:
    """Whether a regular file starts as a gzip archive does."""
    return _first(path)[:2] == b"\x1f\x8b"


def parts_of(path: Path, name: str, part: int | None = None) -> Iterator[Contents]:
    """The samples of one file, listed and not read.

    Args:
        path: the file.
        name: how messages name it.
        part: the one wanted; all of them by default.

    Raises:
        CheckpointError: unreadable, of no kind that holds samples, or no such part.
    """
    first = _first(path)
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first[:2] == b"\x1f\x8b":
        yield from _batch(_from_gzip(path, name), part)
    elif is_zip(first) or (is_pickle(first) and first[2:8] != b"\0" * 6):
        yield from _batch(_from_torch(path, name), part)
    elif text in (b"{", b"[") and first[4:8] != b"\0" * 4:  # a safetensors header is shorter than 4 GiB
        from eagle3diag.hidden.formats_json import json_parts

        yield from json_parts(path, name, part)
    else:
        yield from _batch(_from_safetensors(path, name), part)


def _first(path: Path) -> bytes:
    with opened(path) as (fd, identity):
        raw = bytearray(min(512, identity.size))
        del raw[read_into(fd, 0, memoryview(raw)) :]
    return bytes(raw)


def _batch(contents: Contents, part: int | None) -> Iterator[Contents]:
    """A file whose arrays start with a batch axis, [batch, tokens …], is so many samples."""
    ids = next((contents.arrays[k] for k in IDS if k in contents.arrays), None)
    size = ids.shape[0] if ids is not None and len(ids.shape) == 2 else 1
    if size <= 1:
        if part:
            raise CheckpointError(f"{shown(contents.path)}: changed since the dump was opened; run again when nothing writes to it")
        yield contents
        return

    def at(index: int) -> Contents:
        def read(key: str) -> torch.Tensor:
            whole = contents.read(key)
            return whole[index] if whole.shape[:1] == (size,) else whole

        arrays = {k: Array(a.dtype, a.shape[1:] if a.shape[:1] == (size,) else a.shape) for k, a in contents.arrays.items()}
        return replace(contents, arrays=arrays, reader=read, part=index)

    for index in range(size) if part is None else (part,):
        yield at(index)


def _from_safetensors(path: Path, name: str) -> Contents:
    header = read_header(path, name)
    cut = next((i for i in header.issues if i.kind in ("data-truncated", "offsets-overlap")), None)
    if cut is not None:
        raise CheckpointError(f"{shown(path)}: {cut.message.partition(': ')[2]}")
    tensors, identity = header.tensors, header.identity

    def read(key: str) -> torch.Tensor:
        info = tensors[key]
        place = Place(info.offset or 0, info.nbytes, None)
        return _placed(lambda start, view: fill(path, start, view, identity), f"{shown(path)}: '{key}'", info.dtype, info.shape, place)

    arrays = {key: Array(info.dtype, info.shape) for key, info in tensors.items()}
    return Contents(path=path, name=name, kind="safetensors", arrays=arrays, reader=read, metadata=header.metadata)


def _from_torch(path: Path, name: str) -> Contents:
    with opened(path) as (fd, identity), os.fdopen(fd, "rb", closefd=False) as raw:
        listing, values = list_values(raw, shown(path), name, identity)
    return _listed(path, name, listing, values, lambda start, view: fill(path, start, view, identity))


def _from_gzip(path: Path, name: str) -> Contents:
    whole, identity = _gunzipped(path)
    inner = Identity(len(whole.getbuffer()), identity.mtime_ns, identity.inode, identity.device)
    listing, values = list_values(whole, f"{shown(path)} (unpacked)", name, inner)

    def get(start: int, view: memoryview) -> None:
        view[:] = whole.getbuffer()[start : start + len(view)]

    return _listed(path, name, listing, values, get)


def _gunzipped(path: Path) -> tuple[io.BytesIO, Identity]:
    import gzip
    import zlib

    out = io.BytesIO()
    with opened(path) as (fd, identity), os.fdopen(fd, "rb", closefd=False) as raw:
        try:
            with gzip.GzipFile(fileobj=raw) as packed:
                while block := packed.read(1 << 20):
                    if out.tell() + len(block) > GZ_LIMIT:
                        raise CheckpointError(
                            f"{shown(path)}: {identity.size:,} bytes unpack to more than {GZ_LIMIT:,}; refused, gunzip it if that is meant"
                        )
                    out.write(block)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            got = f"{identity.size:,} bytes, {out.tell():,} unpacked"
            raise CheckpointError(f"{shown(path)}: the gzip data is cut or damaged ({got}); fetch the file again") from None
    out.seek(0)
    return out, identity


_Get = Callable[[int, memoryview], None]


def _listed(path: Path, name: str, listing: TorchListing, values: dict[str, Any], get: _Get) -> Contents:
    if listing.issues:
        raise CheckpointError(f"{shown(path)}: {listing.issues[0].message.partition(': ')[2]}")
    places = listing.places or {}

    def read(key: str) -> torch.Tensor:
        info = listing.tensors[key]
        return _placed(get, f"{shown(path)}: '{key}'", info.dtype, info.shape, places[key])

    arrays = {key: Array(info.dtype, info.shape) for key, info in listing.tensors.items()}
    return Contents(path=path, name=name, kind="torch", arrays=arrays, reader=read, values=values)


def _placed(get: _Get, label: str, dtype: str, shape: tuple[int, ...], place: Place) -> torch.Tensor:
    """An array from its place in a file.

    Raises:
        CheckpointError: a dtype without values, or a file that changed.
    """
    import torch

    kind = torch_dtype(dtype)
    if kind is None:
        raise CheckpointError(f"{escaped(label, 300)} is {escaped(dtype)}, whose values cannot be read")
    raw = torch.empty(place.span, dtype=torch.uint8)
    if place.span:
        get(place.start, raw.numpy().data)
    flat = raw != 0 if kind == torch.bool else raw.view(kind)
    return flat.reshape(shape) if place.stride is None else flat.as_strided(shape, place.stride)
