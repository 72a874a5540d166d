"""Opening and reading files that somebody else wrote.

Three rules. A path is looked at before it is opened, because opening a FIFO waits for ever and opening a device may act. Data
is read with ``pread`` and never mapped, because a mapped file that shrinks kills the process with SIGBUS. And a file's
identity (size, modification time, inode) is compared before and after, because a training run may be saving over it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from eagle3diag.errors import CheckpointError, escaped

__all__ = ["Identity", "fill", "opened", "read_into", "refuse", "shown", "stream", "whole_text"]

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class Identity(NamedTuple):
    """What tells one state of a file from another."""

    size: int
    mtime_ns: int
    inode: int
    device: int


def shown(path: str | os.PathLike[str]) -> str:
    """A path for a message: escaped, and long enough to be useful."""
    return escaped(os.fspath(path), 300)


def _identity(s: os.stat_result) -> Identity:
    return Identity(s.st_size, s.st_mtime_ns, s.st_ino, s.st_dev)


def refuse(path: Path, error: OSError | ValueError) -> NoReturn:
    """Say honestly why the system would not open a path.

    Raises:
        CheckpointError: always.
    """
    if isinstance(error, PermissionError):
        why = "permission denied; make it readable for this user"
    elif isinstance(error, FileNotFoundError):
        why = "a link to a file that is not there (incomplete download?)" if path.is_symlink() else "no such file or folder"
    elif isinstance(error, NotADirectoryError):
        why = "no such file: a part of the path is not a folder"
    elif isinstance(error, OSError):
        why = (error.strerror or type(error).__name__).lower()
    else:
        why = "not a valid path"
    raise CheckpointError(f"{shown(path)}: {why}") from None


def _regular(path: Path, s: os.stat_result) -> None:
    if not stat.S_ISREG(s.st_mode):
        kind = next((name for test, name in _KINDS if test(s.st_mode)), "a special file")
        raise CheckpointError(f"{shown(path)}: {kind}, not a regular file; give the weight file or the checkpoint folder")


@contextmanager
def opened(path: Path, expect: Identity | None = None) -> Iterator[tuple[int, Identity]]:
    """A descriptor of a regular file and its identity, checked again when the block ends.

    Args:
        path: the file; links are followed.
        expect: the identity an earlier look found.

    Raises:
        CheckpointError: not a regular file, no permission, or changed before or during the block.
    """
    try:
        _regular(path, path.stat())
        # O_NONBLOCK: should a FIFO have taken the file's place meanwhile, open returns and fstat sees it
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        refuse(path, error)
    try:
        status = os.fstat(fd)
        _regular(path, status)
        before = _identity(status)
        if expect is not None and before != expect:
            _changed(path, expect, before)
        try:
            yield fd, before
        except OSError as error:
            refuse(path, error)
        after = _identity(os.fstat(fd))
        if after != before:
            _changed(path, before, after)
        try:
            there = _identity(path.stat())
        except OSError:
            raise CheckpointError(f"{shown(path)}: removed while being read; run again when nothing writes to it") from None
        if there != before:
            _changed(path, before, there)
    finally:
        os.close(fd)


def _changed(path: Path, before: Identity, after: Identity) -> NoReturn:
    if before.size != after.size:
        what = f"{before.size:,} bytes before, {after.size:,} after"
    elif before.inode != after.inode or before.device != after.device:
        what = f"another file took its place, inode {before.inode} before, {after.inode} after"
    else:
        what = f"modification time {before.mtime_ns} before, {after.mtime_ns} after"
    raise CheckpointError(f"{shown(path)}: changed while being read ({what}); run again when nothing writes to it")


def read_into(fd: int, offset: int, view: memoryview) -> int:
    """Fill ``view`` from ``offset``; the bytes got, fewer only at the end of the file."""
    done = 0
    while done < len(view):
        if hasattr(os, "preadv"):
            got = os.preadv(fd, [view[done:]], offset + done)
        else:  # Windows has no positional read
            os.lseek(fd, offset + done, os.SEEK_SET)
            part = os.read(fd, len(view) - done)
            view[done : done + len(part)] = part
            got = len(part)
        if got <= 0:
            break
        done += got
    return done


def fill(path: Path, offset: int, view: memoryview, expect: Identity | None = None) -> None:
    """Fill ``view`` with the bytes from ``offset``.

    Raises:
        CheckpointError: the file ends early, changed, or cannot be opened.
    """
    with opened(path, expect) as (fd, identity):
        _long_enough(path, identity.size, offset + len(view))
        if read_into(fd, offset, view) != len(view):
            _ended(path, offset + len(view))


def stream(path: Path, offset: int, nbytes: int, block: int, expect: Identity | None = None) -> Iterator[memoryview]:
    """``nbytes`` bytes from ``offset``, in order, as views of one reused buffer, each valid until the next is asked for.

    ``block`` is rounded down to a multiple of 64 so that no element is split between two blocks.

    Raises:
        CheckpointError: the file ends early, changed, or cannot be opened.
    """
    block = max(64, block - block % 64)
    with opened(path, expect) as (fd, identity):
        _long_enough(path, identity.size, offset + nbytes)
        buffer = memoryview(bytearray(min(block, nbytes)))
        at = 0
        while at < nbytes:
            part = buffer[: min(block, nbytes - at)]
            if read_into(fd, offset + at, part) != len(part):
                _ended(path, offset + nbytes)
            yield part
            at += len(part)


def _long_enough(path: Path, size: int, needed: int) -> None:
    if needed > size:
        raise CheckpointError(f"{shown(path)}: ends at byte {size:,}, data is needed up to byte {needed:,}; fetch the file again")


def _ended(path: Path, needed: int) -> NoReturn:
    raise CheckpointError(f"{shown(path)}: changed while being read (ended before byte {needed:,}); run again when nothing writes to it")


def whole_text(path: Path, limit: int, what: str) -> bytes:
    """All bytes of a small file.

    Raises:
        CheckpointError: larger than ``limit`` bytes, or unreadable.
    """
    with opened(path) as (fd, identity):
        if identity.size > limit:
            raise CheckpointError(f"{shown(path)}: {identity.size:,} bytes, {what} has at most {limit:,}")
        raw = bytearray(identity.size)
        got = read_into(fd, 0, memoryview(raw))
    return bytes(raw[:got])
