"""Logs as blocks of whole lines: plain or gzip, rotated or not, of any size, in bounded memory.

Most lines of a server log say nothing about speculation. The first megabytes of each file are looked at whole, because that is where an
engine says how it was started; after that only lines with ``accept`` in them are kept, with the lines just before that belong to them. A
large block is searched two letters at a time with NumPy, which is faster than ``bytes.find``; a block in which nearly every line matches
is handed on as it is.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from eagle3diag.errors import CheckpointError, UsageError, escaped

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HEAD", "Block", "Finder", "blocks", "log_files", "matching", "plain", "wide_code"]

CHUNK = 1 << 19
HEAD = 2 << 20  #: bytes of each file that are looked at whole
_LONGEST = 1 << 20  # bytes of a line; a longer one is no log line
_FILES = 10_000
_BATCH = 1 << 18  # bytes of matching lines handed on together
_SMALL = 1 << 16  # bytes up to which bytes.find is as fast
_DENSE = 200  # bytes per hit from which a block is handed on whole
_PROBE = 1 << 12  # bytes in the middle of a block; where hits are dense there, the block is taken to be
_BACK = 700  # bytes looked at before a script's line for the lines that belong to it
_SHORT = 120  # bytes; a script's line is no longer
_ENOUGH = 4 << 20  # bytes of matching lines before which their throughput is looked for too

_PACKED = (
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -d"),
    (b"\xfd7zX", "xz", "xz -d"),
    (b"BZh", "bzip2", "bzip2 -d"),
    (b"PK\x03\x04", "zip", "unzip"),
)

_ANSI = re.compile(rb"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
_DIGIT = re.compile(rb"\d")
_BEGINNING = 8  # bytes by which the beginnings of two lines are compared
_NUMBERED = re.compile(r"\.(\d{1,6})(?:\.gz)?$")


class Block(NamedTuple):
    """Whole lines. ``head``: nothing was left out. ``last``: the file's last line, which may be cut, ends it."""

    data: bytes
    head: bool
    last: bool
    file: int


def log_files(path: str) -> tuple[str, ...]:
    """The files of a log, oldest first: the file itself, or those of a folder, in the order of rotation.

    Raises:
        CheckpointError: nothing is there, or the folder holds no files.
    """
    if not path:
        raise CheckpointError("the path of the log is empty; give a file, a folder of rotated files, or http://HOST:PORT")
    at = Path(path)
    if not at.exists():
        raise CheckpointError(f"{escaped(path, 200)}: no such log file; give a file, a folder of rotated files, or http://HOST:PORT")
    if not at.is_dir():
        return (str(at),)
    found = [p for p in at.iterdir() if p.is_file() and not p.name.startswith(".")][:_FILES]
    if not found:
        raise CheckpointError(f"{escaped(path, 200)}: a folder without files; give the log file, or the folder of the rotated ones")
    return tuple(str(p) for p in sorted(found, key=_age))


def _age(path: Path) -> tuple[str, int, str]:
    """Sorts ``a.log.2.gz``, ``a.log.1``, ``a.log``: the higher the number the older; dated names sort by themselves."""
    number = _NUMBERED.search(path.name)
    stem = path.name[: number.start()] if number else path.name.removesuffix(".gz")
    return (stem, -int(number[1]) if number else 0, path.name)


def _open(path: str) -> IO[bytes]:
    """The bytes of a file, unpacked; UTF-16 (a redirect in PowerShell) becomes UTF-8."""
    raw = cast("IO[bytes]", Path(path).open("rb", buffering=0))  # noqa: SIM115 (closed by the caller)
    start = raw.read(4)
    raw.seek(0)
    if start[:2] == b"\x1f\x8b":
        import gzip

        raw.close()  # a GzipFile around an open file would leave that one open
        return cast("IO[bytes]", gzip.open(path))
    wide = wide_code(start)
    if wide:
        import codecs

        return cast("IO[bytes]", codecs.EncodedFile(cast(Any, raw), "utf-8", wide, "replace"))
    packed = next((p for p in _PACKED if start.startswith(p[0])), None)
    if packed is not None:
        raise UsageError(f"{escaped(path, 200)}: packed with {packed[1]}; unpack it first ({packed[2]}), or pack it with gzip")
    return raw


def wide_code(start: bytes) -> str | None:
    """Which UTF-16 a text begins in (a redirect in PowerShell), None for anything else."""
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if len(start) >= 4 and start[0] and start[2] and not start[1] and not start[3]:
        return "utf-16-le"
    if len(start) >= 4 and not start[0] and not start[2] and start[1] and start[3]:
        return "utf-16-be"
    return None


def blocks(files: Sequence[str], notes: list[str] | None = None) -> Iterator[Block]:
    """All lines of the files as one stream, matching ones only after the head of each file.

    A line that ends one file and begins the next (rotation by size) is put together. A gzip file that breaks off gives what came before,
    and a note says so.

    Raises:
        UsageError: a file is packed in a way that is not read.
    """
    notes = notes if notes is not None else []
    buffer = bytearray(_LONGEST + CHUNK + 1)
    view, kept, first, finder = memoryview(buffer), 0, b"", Finder()
    held: list[bytes] = []
    holds = given = 0
    for number, file in enumerate(files):
        with _open(file) as stream:
            seen = 0
            while True:
                try:
                    n = _into(stream, view[kept : kept + CHUNK])
                except (EOFError, zlib.error, OSError) as error:
                    if not isinstance(error, (EOFError, zlib.error)) and "gzip" not in type(error).__name__.lower():
                        raise
                    notes.append(f"{escaped(Path(file).name)} breaks off after {seen:,} unpacked bytes; what came before is used")
                    n = 0
                if not n:
                    break
                if not seen:
                    if kept and first and _shape(view[kept : kept + min(n, len(first))]) == first:
                        # the file before ends without a line break, and yet this one begins with a line
                        buffer[kept + 1 : kept + 1 + n] = buffer[kept : kept + n]
                        buffer[kept] = 10
                        kept += 1
                    first = first or _shape(view[kept : kept + min(n, _BEGINNING)])
                head, seen, total = seen < HEAD, seen + n, kept + n
                end = buffer.rfind(b"\n", 0, total) + 1
                if not end:
                    kept = total if total <= _LONGEST else 0
                    continue
                out = plain(bytes(view[:end])) if head else matching(buffer, end, speeds=given < _ENOUGH, finder=finder)
                kept = total - end
                buffer[:kept] = buffer[end:total]
                held.append(out)
                holds, given = holds + len(out), given + len(out)
                if head or holds >= _BATCH:
                    yield Block(b"".join(held), head, False, number)
                    held, holds = [], 0
        if holds:
            yield Block(b"".join(held), False, False, number)
            held, holds = [], 0
    if kept:
        yield Block(plain(bytes(view[:kept])), True, True, len(files) - 1)


def _shape(data: memoryview) -> bytes:
    """How a line begins, digits alike."""
    return _DIGIT.sub(b"0", bytes(data))


def _into(stream: Any, view: memoryview) -> int:
    """Reads some bytes; 0 at the end. A packed file is read piece by piece, so that one that breaks off loses nothing before the break."""
    import codecs

    if isinstance(stream, codecs.StreamRecoder):
        data = stream.read(len(view) // 4)  # recoding may lengthen it
    elif hasattr(stream, "read1"):
        data = stream.read1(len(view))
    else:
        return int(stream.readinto(view) or 0)
    view[: len(data)] = data
    return len(data)


def plain(data: bytes) -> bytes:
    """Without colours, carriage returns and null bytes."""
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return data


def matching(data: bytes | bytearray, size: int | None = None, *, speeds: bool = True, finder: Finder | None = None) -> bytes:
    """The lines of the first ``size`` bytes with ``accept`` in them, and those before them that belong to them.

    vLLM prints its throughput (``speeds``) in the line before, its offline script the number of drafts. ``finder`` is used again from block
    to block.
    """
    size = len(data) if size is None else size
    hits = _hits(data, size, finder or Finder())
    if hits is None:
        return plain(bytes(memoryview(data)[:size]))
    out: list[bytes | bytearray] = []
    done = 0
    find, rfind = data.find, data.rfind
    for at in hits:
        if at < done:
            continue
        start = rfind(b"\n", done, at) + 1 or done
        end = find(b"\n", at, size) + 1 or size
        done = end
        if speeds and find(b"SpecDecoding", start, end) >= 0:
            line = rfind(b"\n", 0, start - 1) + 1 if start else 0
            if find(b"Avg generation throughput", line, start) >= 0:
                out.append(data[line:start])
        elif end - start < _SHORT and find(b"num_accepted_tokens", start, end) >= 0:
            out.append(data[rfind(b"\n", 0, max(0, start - _BACK)) + 1 : start])
        out.append(data[start:end])
    return plain(b"".join(out))


def _hits(data: bytes | bytearray, size: int, finder: Finder) -> list[int] | None:
    """A place in each occurrence of ``accept``, ascending; None where there are so many that the whole is to be read."""
    if size < _SMALL:
        out, at = [], data.find(b"accept", 0, size)
        while at >= 0:
            out.append(at + 1)
            at = data.find(b"accept", at + 6, size)
        return out
    middle = size // 2
    if 2 * data.count(b"accept", middle, middle + _PROBE) * _DENSE > 3 * _PROBE:
        return None
    return finder.places(data, size)


class Finder:
    """The same by pairs of letters: at an even place ``accept`` is ac, ce, pt, at an odd one cc, ep lie inside. Its array is used again."""

    def __init__(self) -> None:
        import numpy as np

        self.found = np.zeros(0, bool)
        self.ac, self.ce, self.pt, self.cc, self.ep = (np.frombuffer(w, np.uint16)[0] for w in (b"ac", b"ce", b"pt", b"cc", b"ep"))

    def _where(self, pairs: NDArray[np.uint16], pair: Any) -> NDArray[np.intp]:
        """Where one of the pairs stands; whole eights without it are passed over, which ``nonzero`` alone is slower at."""
        import numpy as np

        n = len(pairs)
        up = -(-n // 8) * 8
        np.equal(pairs, pair, out=self.found[:n])
        self.found[n:up] = False
        some = np.flatnonzero(self.found[:up].view(np.uint64) != 0)
        row, column = np.nonzero(self.found[:up].reshape(-1, 8)[some])
        at: NDArray[np.intp] = some[row] * 8 + column
        return at

    def places(self, data: bytes | bytearray, size: int) -> list[int] | None:
        """A place in each occurrence, ascending; None for too many."""
        import numpy as np

        if len(self.found) < size // 2 + 8:
            self.found = np.zeros(size // 2 + 8, bool)
        pairs: NDArray[np.uint16] = np.frombuffer(data, np.uint16, size // 2)
        odd = self._where(pairs[:-1], self.cc)
        odd = odd[pairs[odd + 1] == self.ep] * 2
        letters: NDArray[np.uint8] = np.frombuffer(data, np.uint8, size)
        odd = odd[(odd > 0) & (odd + 4 < size)]
        odd = odd[(letters[odd - 1] == 97) & (letters[odd + 4] == 116)]  # an a before, a t after
        even = self._where(pairs[2:], self.pt)  # of the pair two before
        even = even[pairs[even + 1] == self.ce]
        even = even[pairs[even] == self.ac] * 2 + 1
        if (len(odd) + len(even)) * _DENSE > size:
            return None
        out: list[int] = odd.tolist() + even.tolist()
        out.sort()
        tail = data.find(b"accept", max(0, size - 9), size)
        if tail >= 0 and (not out or out[-1] < tail):
            out.append(tail + 1)
        return out
