"""The strict reader of safetensors headers.

No tensor byte is read. What stops the loader from making sense of the file (no header, no JSON, a tensor whose shape and bytes
disagree) is a ``CheckpointError``; what leaves the header readable (data cut short, bytes nobody claims, overlaps, a name
twice) becomes an ``Issue`` with both numbers, because the other tensors can still be judged. Whatever ``safe_open`` refuses is
refused or flagged here, and some things it lets through are flagged too. The format: 8 bytes little-endian header length,
that many bytes of JSON, then the data; checks follow ``safetensors/src/tensor.rs`` 0.8.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from eagle3diag.checkpoint.dtypes import BITS, byte_count
from eagle3diag.checkpoint.model import Issue, IssueKind, TensorInfo
from eagle3diag.checkpoint.rawfile import Identity, opened, read_into, shown
from eagle3diag.checkpoint.sniff import sniff
from eagle3diag.checkpoint.strictjson import Duplicates, decode, depth, kind, parse
from eagle3diag.errors import CheckpointError, escaped

__all__ = ["HEADER_LIMIT", "Header", "judge_length", "parse_header", "read_header"]

HEADER_LIMIT = 100_000_000  #: bytes; the loader's own limit (``tensor.rs:10``)
_ISSUES_SHOWN = 8  # of one kind in one file: enough to see a pattern
_NAME_LIMIT = 256
_ODD = frozenset("<>&\"'`\\ ")


class Header(NamedTuple):
    """What a safetensors header says.

    Attributes:
        tensors: by name, in the order of the data.
        metadata: the ``__metadata__`` strings.
        issues: deviations that did not stop the reading.
        size: bytes of the whole file.
        identity: the state of the file that was read; None for a remote one.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    issues: tuple[Issue, ...]
    size: int
    identity: Identity | None


def read_header(path: Path, file: str | None = None) -> Header:
    """The header of a safetensors file.

    Args:
        path: the file.
        file: how the tensors name it; its base name by default.

    Raises:
        CheckpointError: one line, where the file is no readable safetensors file.
    """
    where = shown(path)
    with opened(path) as (fd, identity):
        first = bytearray(min(512, identity.size))
        del first[read_into(fd, 0, memoryview(first)) :]
        length = judge_length(bytes(first), identity.size, where)
        raw = bytearray(length)
        if read_into(fd, 8, memoryview(raw)) != length:
            raise CheckpointError(f"{where}: changed while being read (ended inside the header); run again when nothing writes to it")
    return parse_header(bytes(raw), bytes(first), identity.size, where, file or path.name, identity)


def judge_length(first: bytes, size: int, where: str) -> int:
    """The header length, checked before anything is allocated.

    Args:
        first: the first bytes of the file, 8 at least if it has them.
        size: bytes of the whole file.
        where: the path, as shown.

    Raises:
        CheckpointError: no header of that length can be there, with what the file looks like instead.
    """
    if len(first) < 8:
        other = sniff(first)
        raise CheckpointError(f"{where}: {other or f'{size} bytes; a safetensors file needs at least 8 (empty or failed download?)'}")
    length = int.from_bytes(first[:8], "little")
    fits = length <= HEADER_LIMIT and 8 + length <= size
    other = None if fits and first[8:9] in (b"{", b" ") else sniff(first)
    if other:
        raise CheckpointError(f"{where}: {other}")
    if length > HEADER_LIMIT:
        swapped = int.from_bytes(first[:8], "big")
        big = f"; read big-endian it would be {swapped:,}: written by a faulty tool"
        hint = big if 8 + swapped <= size else "; not a safetensors file, or damaged"
        raise CheckpointError(f"{where}: header length {length:,} exceeds {HEADER_LIMIT:,}{hint}")
    if 8 + length > size:
        raise CheckpointError(f"{where}: header claims {length:,} bytes, {size - 8:,} follow (truncated?); fetch the file again")
    return length


def parse_header(raw: bytes, first: bytes, size: int, where: str, file: str, identity: Identity | None = None) -> Header:
    """Judge the JSON of a header.

    Args:
        raw: the header's bytes, without the length.
        first: the first bytes of the file, for naming what it is when it is no safetensors file.
        size: bytes of the whole file.
        where: the path, as shown.
        file: how the tensors name the file.
        identity: kept in the result.

    Raises:
        CheckpointError: see ``read_header``.
    """
    notes = _Notes(file)
    body = raw.rstrip(b"\0")
    if len(body) < len(raw):
        nul = f"header is padded with {len(raw) - len(body):,} NUL bytes; the format allows only spaces and the loader refuses the file"
        notes.add("header-padding", nul, refused=True)
    if body[:1] != b"{" and body.lstrip(b" \t\r\n")[:1] == b"{":
        notes.add(
            "header-padding",
            f"header starts with {len(body) - len(body.lstrip()):,} blank bytes, not with '{{'; it loads against the format",
        )
    if not body.strip():
        raise CheckpointError(f"{where}: header is empty ({len(raw):,} bytes without JSON)")
    header = parse(decode(body, where, "header"), where, "header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{where}: header is a JSON {kind(header)}, expected an object")
    if isinstance(header, Duplicates):
        for name in header.repeated:
            if name == "__metadata__":
                notes.add("metadata", "key '__metadata__' stands twice in the header: the loader refuses the file")
            else:
                notes.add(
                    "duplicate-name", f"key '{escaped(name)}' stands twice in the header: the loader keeps the last", name=escaped(name)
                )
    metadata = _metadata(header.pop("__metadata__", None), notes)
    start = 8 + len(raw)
    entries = sorted((_entry(name, value, where) for name, value in header.items()), key=lambda e: (e[3], e[4]))
    tensors: dict[str, TensorInfo] = {}
    for name, dtype, shape, begin, end in entries:
        tensors[name] = TensorInfo(name, dtype, shape, end - begin, file, start + begin)
        if len(name) > _NAME_LIMIT or not name.isprintable() or not name or not _ODD.isdisjoint(name):
            notes.add(
                "odd-name",
                f"tensor name '{escaped(name)}' ({len(name):,} characters) is none that any framework writes",
                name=escaped(name),
            )
    _coverage(entries, size - start, notes)
    return Header(tensors, metadata, notes.issues(), size, identity)


_Entry = tuple[str, str, tuple[int, ...], int, int]


def _entry(name: str, value: object, where: str) -> _Entry:
    label = f"{where}: '{escaped(name)}'"
    if not isinstance(value, dict):
        raise CheckpointError(f"{label}: malformed entry, a JSON {kind(value)} where an object with dtype, shape and data_offsets belongs")
    if isinstance(value, Duplicates):
        raise CheckpointError(f"{label}: malformed entry, '{escaped(value.repeated[0])}' stands twice")
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in value]
    if missing:
        raise CheckpointError(f"{label}: malformed entry, {' and '.join(missing)} missing")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        said = f"'{escaped(dtype, 20)}'" if isinstance(dtype, str) else f"a JSON {kind(dtype)}"
        raise CheckpointError(f"{label}: unknown dtype {said}; known are {', '.join(BITS)}")
    if not _sizes(shape):
        raise CheckpointError(f"{label}: bad shape {_brief(shape)}, expected a list of integers from 0 to 2^64-1")
    if not _sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{label}: bad data_offsets {_brief(offsets)}, expected two integers from 0 to 2^64-1")
    if len(value) > 3 and depth(value) > 125:  # fields nobody knows are ignored, but the loader stops at 128 levels in all
        raise CheckpointError(f"{label}: header JSON is nested too deeply (more than 127 levels)")
    begin, end = offsets
    sizes = tuple(shape)
    if end < begin:
        raise CheckpointError(f"{label}: data_offsets end before they begin, [{begin}, {end}]")
    needed = byte_count(sizes, dtype)
    if needed is None:
        raise CheckpointError(
            f"{label}: shape {_brief(shape)} × {dtype} ends inside a byte or passes 2^64 bytes, offsets reserve {end - begin:,} bytes"
        )
    if needed != end - begin:
        raise CheckpointError(f"{label}: shape {_brief(shape)} × {dtype} needs {needed:,} bytes, offsets reserve {end - begin:,}")
    return name, dtype, sizes, begin, end


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 64 for x in value)


def _brief(value: object) -> str:
    return escaped(value, 60)


def _metadata(value: object, notes: _Notes) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        notes.add("metadata", f"__metadata__ is a JSON {kind(value)}, expected an object of strings; the loader refuses the file")
        return {}
    if isinstance(value, Duplicates):
        notes.add("metadata", f"__metadata__ key '{escaped(value.repeated[0])}' stands twice: the loader keeps the last")
    for key, text in value.items():
        if not isinstance(text, str):
            notes.add(
                "metadata", f"__metadata__ value of '{escaped(key)}' is a JSON {kind(text)}, expected a string; the loader refuses the file"
            )
    return {key: text for key, text in value.items() if isinstance(text, str)}


def _coverage(entries: list[_Entry], data: int, notes: _Notes) -> None:
    """Overlaps, holes, trailing and missing bytes; the format wants every data byte claimed exactly once."""
    at, last = 0, ""
    for name, _, _, begin, end in entries:
        if begin < at:
            overlap = min(at, end) - begin
            notes.add(
                "offsets-overlap", f"'{escaped(name)}' overlaps '{escaped(last)}' by {overlap:,} bytes", name=escaped(name), bytes=overlap
            )
        elif begin > at:
            notes.add("offsets-hole", f"{begin - at:,} unclaimed bytes before '{escaped(name)}'", name=escaped(name), bytes=begin - at)
        if end >= at:
            at, last = end, name
    if data < at:
        cut = sum(end > data for _, _, _, _, end in entries)
        notes.add(
            "data-truncated",
            f"data section is {data:,} bytes, header describes {at:,}: {cut} of {len(entries)} tensors are cut; fetch the file again",
            have=data,
            described=at,
            tensors=cut,
        )
    elif data > at:
        notes.add(
            "data-trailing",
            f"{data - at:,} unclaimed bytes after the last tensor (data section {data:,}, described {at:,})",
            have=data,
            described=at,
        )


class _Notes:
    """Issues of one file; many of a kind become a few and a count."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.kept: list[Issue] = []
        self.count: dict[IssueKind, int] = {}

    def add(self, kind: IssueKind, message: str, **evidence: Any) -> None:
        self.count[kind] = self.count.get(kind, 0) + 1
        if self.count[kind] <= _ISSUES_SHOWN:
            self.kept.append(Issue(kind, self.file, f"{escaped(self.file, 100)}: {message}", evidence))

    def issues(self) -> tuple[Issue, ...]:
        more = [
            Issue(
                kind, self.file, f"{escaped(self.file, 100)}: {n - _ISSUES_SHOWN:,} more of this kind ({kind}), {n:,} in all", {"count": n}
            )
            for kind, n in self.count.items()
            if n > _ISSUES_SHOWN
        ]
        return (*self.kept, *more)
