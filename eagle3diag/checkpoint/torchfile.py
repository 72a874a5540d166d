"""Checkpoints written by ``torch.save``: the zip archives of today and the bare pickles of before 1.6.

Listing runs no pickle (see ``pickled``) and reads no data; a tensor is then read from its place in the file, so a file of any
size is streamed in bounded memory. Refused before anything is allocated: names outside tensors and containers, TorchScript,
compressed records (``torch.save`` never compresses, a bomb does), and views that claim more bytes than their storage holds. Only
where the weights hold a rarer kind of tensor is torch asked, with ``weights_only`` and first on the meta device; its own error
text, which advises to switch that off, is never shown.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import error as StructError
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from eagle3diag.checkpoint.dtypes import BITS, FROM_TORCH, byte_count
from eagle3diag.checkpoint.model import Issue, TensorInfo
from eagle3diag.checkpoint.pickled import Damaged, Foreign, Opaque, Storage, Strided, interpret
from eagle3diag.checkpoint.rawfile import Identity, opened, read_into, shown
from eagle3diag.checkpoint.sniff import is_pickle, is_zip, sniff
from eagle3diag.errors import CheckpointError, escaped

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "TorchListing", "is_torch", "list_torch", "list_values", "load_by_torch"]

_PICKLE_LIMIT = 64 << 20  # bytes of the description; 100,000 tensors take about 20 MB
_MANY_VALUES = 1_000_000
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # torch/serialization.py
_WRAPPERS = ("draft_state_dict", "draft_model_state_dict", "model_state_dict", "state_dict", "draft_model", "model", "module")
_SAVE_AGAIN = "save its weights as safetensors where it was made"


class Place(NamedTuple):
    """Where a tensor lies: ``start`` of its first element in bytes, shape and stride in elements, ``span`` bytes to its last one."""

    start: int
    span: int
    stride: tuple[int, ...] | None  #: None where the elements lie in order without gaps


class TorchListing(NamedTuple):
    """What a torch file holds.

    Attributes:
        tensors: by name, in the order saved.
        places: where each lies; None where only torch can read the file.
        key: the top-level key the weights stand under, or an empty string.
    """

    tensors: dict[str, TensorInfo]
    places: dict[str, Place] | None
    key: str
    issues: tuple[Issue, ...]
    size: int
    identity: Identity


class _Bounded:
    """A file that refuses single reads no honest archive asks for (a central directory of gigabytes)."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.seek, self.tell, self.seekable = raw.seek, raw.tell, raw.seekable

    def read(self, n: int = -1) -> bytes:
        if n > _PICKLE_LIMIT:
            raise Damaged(f"a record of {n:,} bytes where at most {_PICKLE_LIMIT:,} belong")
        return self._raw.read(n if n >= 0 else _PICKLE_LIMIT)


def is_torch(path: Path) -> bool:
    """Whether a regular file starts like something ``torch.save`` wrote (and not like a safetensors header of 640 bytes)."""
    with opened(path) as (fd, identity):
        first = bytearray(min(16, identity.size))
        del first[read_into(fd, 0, memoryview(first)) :]
    head = bytes(first)
    return is_zip(head) or (is_pickle(head) and head[2:8] != b"\0" * 6)


def list_torch(path: Path, file: str | None = None) -> TorchListing:
    """The tensors of a torch file, without reading or unpickling them.

    Args:
        path: the file; it may hold a state dict, one wrapped in ``state_dict``, ``model`` …, or a SpecForge training state.
        file: how the tensors name it; its base name by default.

    Raises:
        CheckpointError: one line, where the file cannot be read or must not be.
    """
    where, name = shown(path), file or path.name
    with opened(path) as (fd, identity), os.fdopen(fd, "rb", closefd=False) as raw, _told(where, identity.size):
        value, locate = _described(raw, where, identity.size)
        key, weights = _weights(value, where)
        rare = next((v.needs for v in weights.values() if isinstance(v, Opaque)), "")
        if rare == "torch._utils._rebuild_meta_tensor_no_storage":
            raise CheckpointError(f"{where}: saved from the meta device, so without data; save it again after loading the weights")
        if rare.startswith("torch.nn.modules."):  # a whole module, not its weights: torch need not be asked to refuse it
            raise CheckpointError(f"{where}: needs `{escaped(rare)}`; refused, {_SAVE_AGAIN}")
        if rare:
            return _listed_by_torch(path, where, name, identity, rare)
        return _judge({k: v for k, v in weights.items() if isinstance(v, Strided)}, locate, key, where, name, identity)


def list_values(raw: IO[bytes], where: str, file: str, identity: Identity) -> tuple[TorchListing, dict[str, Any]]:
    """Everything in a torch file, tensor or not, without unpickling it: what a training sample holds.

    Args:
        raw: the open file, or its bytes unpacked from a ``.gz``.
        where: its path, as shown.
        file: how the tensors name it.
        identity: of the file; its ``size`` is the size of ``raw``.

    Returns:
        The tensors, those of lists and inner dicts under ``key.0`` and ``key.inner``, and the numbers, texts and flags likewise.

    Raises:
        CheckpointError: as ``list_torch``, and for tensors of a rarer kind (sparse, quantised), which no sample holds.
    """
    with _told(where, identity.size):
        value, locate = _described(raw, where, identity.size)
        tensors: dict[str, Strided] = {}
        values: dict[str, Any] = {}
        todo: list[tuple[str, Any, int]] = [("", value, 0)]
        seen = 0
        while todo:
            key, v, level = todo.pop()
            if isinstance(v, Strided):
                tensors[key] = v
            elif isinstance(v, Opaque) and v.needs:
                raise CheckpointError(f"{where}: '{escaped(key)}' is a `{escaped(v.needs)}`; {_SAVE_AGAIN}")
            elif isinstance(v, (dict, list, tuple)) and level < 3:
                seen += len(v)
                if seen > _MANY_VALUES:  # shared lists multiply: a small pickle can describe billions of entries
                    raise Damaged(f"more than {_MANY_VALUES:,} entries, which no sample has")
                pairs = v.items() if isinstance(v, dict) else enumerate(v)
                todo.extend((f"{key}.{k}" if key else str(k), inner, level + 1) for k, inner in reversed(list(pairs)))
            elif isinstance(v, (str, int, float)):
                values[key] = v
        return _judge(tensors, locate, "", where, file, identity), values


@contextmanager
def _told(where: str, size: int) -> Iterator[None]:
    """Whatever goes wrong inside becomes one line."""
    try:
        yield
    except Foreign as error:
        names = error.args[0]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        listed = ", ".join(f"`{escaped(n)}`" for n in names[:3])
        raise CheckpointError(f"{where}: needs {listed}{more}, which is code; refused, {_SAVE_AGAIN}") from None
    except Damaged as error:
        raise CheckpointError(f"{where}: not readable as a torch file: {error}; fetch it again, or {_SAVE_AGAIN}") from None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, ValueError, KeyError, IndexError, EOFError, StructError):
        raise CheckpointError(f"{where}: the zip archive is cut or damaged ({size:,} bytes); fetch the file again") from None


def _described(raw: IO[bytes], where: str, size: int) -> tuple[Any, _Locate]:
    """What the file's pickle describes, and a function giving a storage's byte position and size."""
    first = raw.read(512)
    raw.seek(0)
    if is_zip(first):
        return _archive(raw, where, size)
    if is_pickle(first):
        return _legacy(raw)
    other = sniff(first) or (
        "empty (failed download?)" if not first else "neither a zip archive nor a pickle, so not written by torch.save"
    )
    raise CheckpointError(f"{where}: {other}")


_Locate = Callable[[Storage], tuple[int, int]]


def _archive(raw: IO[bytes], where: str, size: int) -> tuple[Any, _Locate]:
    """The value in ``*/data.pkl`` and a function giving a storage's byte position and size."""
    import io

    archive = zipfile.ZipFile(_Bounded(raw))
    records = {r.filename: r for r in archive.infolist()}
    squeezed = [r for r in records.values() if r.compress_type != zipfile.ZIP_STORED or r.flag_bits & 1]
    if squeezed:
        packed = max(squeezed, key=lambda r: r.file_size)
        raise CheckpointError(
            f"{where}: record '{escaped(packed.filename)}' is compressed, {packed.compress_size:,} bytes claim {packed.file_size:,}; "
            f"torch.save never compresses: refused"
        )
    total = sum(r.file_size for r in archive.infolist())
    if total > size or len(records) < len(archive.infolist()):
        raise CheckpointError(f"{where}: records of {total:,} bytes share {size:,} bytes or names; torch.save never writes that: refused")
    main = [n for n in records if n == "data.pkl" or n.endswith("/data.pkl")]
    root = min(main, key=len, default="").removesuffix("data.pkl")
    if not main:
        raise CheckpointError(f"{where}: a zip archive without data.pkl, so not written by torch.save; unpack it and give the folder")
    if f"{root}constants.pkl" in records or any(n.startswith(f"{root}code/") for n in records):
        raise CheckpointError(f"{where}: a TorchScript program, not weights; refused, {_SAVE_AGAIN}")
    if records[main[0]].file_size > _PICKLE_LIMIT:
        raise Damaged(f"data.pkl is {records[main[0]].file_size:,} bytes, at most {_PICKLE_LIMIT:,} are read")
    if f"{root}byteorder" in records and archive.read(f"{root}byteorder").strip() != b"little":
        raise CheckpointError(f"{where}: written on a big-endian machine; {_SAVE_AGAIN}")

    def locate(storage: Storage) -> tuple[int, int]:
        record = records.get(f"{root}data/{storage.key}")
        if record is None:
            return 0, 0
        raw.seek(record.header_offset)
        local = raw.read(30)
        if len(local) < 30 or local[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile
        start = record.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        return start, max(0, min(record.file_size, size - start))

    return interpret(io.BytesIO(archive.read(f"{root}data.pkl"))), locate


def _legacy(raw: IO[bytes]) -> tuple[Any, _Locate]:
    """The same for the five pickles and the raw storages of the old format."""
    if interpret(raw) != _MAGIC or interpret(raw) != _PROTOCOL:
        raise Damaged("a pickle, but not one that torch.save wrote")
    about = interpret(raw)
    if not isinstance(about, dict) or about.get("little_endian") is not True:
        raise Damaged("written on a big-endian machine")
    value = interpret(raw)
    keys = interpret(raw)
    if not isinstance(keys, list):
        raise Damaged("no list of storages")
    storages: dict[str, Storage] = {}
    _collect(value, storages)
    at, size = raw.tell(), raw.seek(0, os.SEEK_END)
    places: dict[str, tuple[int, int]] = {}
    for key in map(str, keys):
        raw.seek(at)
        count = int.from_bytes(raw.read(8), "little")
        width = _width(storages[key].dtype) if key in storages else None
        if width is None:  # where the next one starts is unknown; what lies before it is
            break
        places[key] = (at + 8, max(0, min(count * width, size - at - 8)))
        at += 8 + count * width
    return value, lambda storage: places.get(storage.key, (0, 0))


def _collect(value: Any, into: dict[str, Storage]) -> None:
    todo, seen = [value], set()
    while todo:
        v = todo.pop()
        if isinstance(v, Strided):
            into[v.storage.key] = v.storage
        elif isinstance(v, Storage):
            into[v.key] = v
        elif isinstance(v, (dict, list, tuple)) and id(v) not in seen:
            seen.add(id(v))
            todo.extend(v.values() if isinstance(v, dict) else v)


def _width(torch_name: str) -> int | None:
    spelling = FROM_TORCH.get(torch_name)
    return None if spelling is None else BITS[spelling] // 8


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Strided) or (isinstance(value, Opaque) and bool(value.needs))


def _weights(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    """The key path and the name-to-tensor part of what was saved."""
    path: list[str] = []
    for _ in range(3):
        if not isinstance(value, dict):
            break
        inner = next((k for k in _WRAPPERS if isinstance(value.get(k), dict) and value[k]), None)
        if inner is None:
            break
        path.append(inner)
        value = value[inner]
    found = {k: v for k, v in value.items() if isinstance(k, str) and _is_tensor(v)} if isinstance(value, dict) else {}
    if found:
        return ".".join(path), found
    if isinstance(value, dict) and {"state", "param_groups"} <= value.keys():
        raise CheckpointError(f"{where}: the state of an optimizer, not weights; give model.safetensors or training_state.pt beside it")
    if isinstance(value, Opaque) and value.needs:
        raise CheckpointError(f"{where}: holds one `{escaped(value.needs)}`, expected a dict of tensors; {_SAVE_AGAIN}")
    keys = ", ".join(escaped(k, 30) for k in list(value)[:6]) if isinstance(value, dict) else ""
    what = f"keys {keys}" if keys else f"a {_KINDS.get(type(value), 'value')}"
    raise CheckpointError(f"{where}: holds {what}, expected tensors by name, or a dict of them under {', '.join(_WRAPPERS[:4])} or model")


_KINDS = {Strided: "tensor", list: "list", tuple: "tuple", dict: "dict without keys", str: "text", int: "number", float: "number"}


def _judge(weights: dict[str, Strided], locate: _Locate, key: str, where: str, file: str, identity: Identity) -> TorchListing:
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, Place] = {}
    issues: list[Issue] = []
    located: dict[str, tuple[int, int]] = {}
    cut: list[str] = []
    for name, t in weights.items():
        label = f"{where}: '{escaped(name)}'"
        stored = _width(t.storage.dtype)
        if t.dtype not in BITS or stored is None:
            raise CheckpointError(f"{label}: dtype {escaped(t.dtype, 30)}, which safetensors does not know; {_SAVE_AGAIN}")
        width, nbytes, reserved = BITS[t.dtype] // 8, byte_count(t.shape, t.dtype), t.storage.numel * stored
        if nbytes is None or nbytes > reserved:
            size = "more than 2^64" if nbytes is None else f"{nbytes:,}"
            raise CheckpointError(f"{label}: an expanded view, {size} bytes over a storage of {reserved:,} bytes; refused, {_SAVE_AGAIN}")
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True)) if nbytes else -1
        end = (t.offset + last + 1) * width
        if nbytes and end > reserved:
            raise CheckpointError(f"{label}: reaches to byte {end:,} of a storage of {reserved:,} bytes; refused")
        if t.storage.key not in located:
            located[t.storage.key] = locate(t.storage)
        start, have = located[t.storage.key]
        if nbytes and end > have:
            cut.append(f"'{escaped(name)}' needs {end:,} bytes of storage {escaped(t.storage.key, 20)}, {have:,} are there")
        places[name] = Place(start + t.offset * width, (last + 1) * width, None if _in_order(t) else t.stride)
        tensors[name] = TensorInfo(name, t.dtype, t.shape, nbytes, file, None)
    if cut:
        message = f"{escaped(file, 100)}: data is cut: {cut[0]} ({len(cut)} of {len(weights)} tensors); fetch the file again"
        issues.append(Issue("data-truncated", file, message, {"tensors": len(cut)}))
    return TorchListing(tensors, places, key, tuple(issues), identity.size, identity)


def _in_order(t: Strided) -> bool:
    expected = 1
    for n, s in zip(reversed(t.shape), reversed(t.stride), strict=True):
        if n != 1 and s != expected:
            return 0 in t.shape
        expected *= n
    return True


def _by_torch(path: Path, where: str, device: str) -> Any:
    import warnings

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises anything here, and its text advises to load code
        failed = type(error).__name__
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # not a zip archive: torch cannot tell
        names = []
    if names:
        raise CheckpointError(f"{where}: needs {', '.join(f'`{escaped(n)}`' for n in names[:3])}; refused, {_SAVE_AGAIN}")
    raise CheckpointError(f"{where}: torch cannot read it as weights only ({failed}); {_SAVE_AGAIN}")


def _torch_weights(value: Any, path: str) -> dict[str, torch.Tensor]:
    import torch

    for key in _WRAPPERS:
        if isinstance(value, dict) and isinstance(value.get(key), dict) and value[key]:
            return _torch_weights(value[key], path)
    return {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, torch.Tensor)} if isinstance(value, dict) else {}


def _listed_by_torch(path: Path, where: str, file: str, identity: Identity, rare: str) -> TorchListing:
    import torch

    tensors: dict[str, TensorInfo] = {}
    for name, t in _torch_weights(_by_torch(path, where, "meta"), where).items():
        dtype = FROM_TORCH.get(str(t.dtype).removeprefix("torch."))
        if dtype is None or t.layout != torch.strided or type(t) not in (torch.Tensor, torch.nn.Parameter):
            layout = str(t.layout).removeprefix("torch.")
            raise CheckpointError(f"{where}: '{escaped(name)}' is a {layout} {t.dtype} tensor (`{escaped(rare)}`); {_SAVE_AGAIN}")
        nbytes, reserved = t.numel() * t.element_size(), t.untyped_storage().nbytes()
        if nbytes > reserved:
            raise CheckpointError(
                f"{where}: '{escaped(name)}': an expanded view, {nbytes:,} bytes over a storage of {reserved:,} bytes; refused"
            )
        tensors[name] = TensorInfo(name, dtype, tuple(t.shape), nbytes, file, None)
    return TorchListing(tensors, None, "", (), identity.size, identity)


def load_by_torch(path: Path, identity: Identity) -> dict[str, torch.Tensor]:
    """All tensors of a file whose places torch alone knows (``places`` is None), on the CPU.

    Raises:
        CheckpointError: the file changed since it was listed, or torch refuses it.
    """
    with opened(path, identity):
        return _torch_weights(_by_torch(path, shown(path), "cpu"), shown(path))
