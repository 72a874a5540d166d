"""The Python source of an engine wherever it lies: an installed package, a source tree, a fork, a wheel, an archive, a wheel's URL.

Files are read as text and parsed; nothing is imported, built or run, and nothing is written. What comes from such a tree is somebody else's
file, so every size is bounded before it is read, links may not leave the tree, and a file that does not parse is noted and left out.
A remote wheel is read by range requests: its table of contents, and the few members a question needs.
"""

from __future__ import annotations

import ast
import io
import os
import stat
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from eagle3diag.errors import UsageError, escaped

__all__ = ["PACKAGES", "Source", "open_source", "pinned"]

#: engine -> folders that tell its package
PACKAGES = {"sglang": ("srt/models",), "vllm": ("model_executor/models",)}
_PLACES = ("", "{engine}", "python/{engine}", "src/{engine}")  # of the package below the folder that was given
_MOST_FILES = 100_000
_MOST_BYTES = 2 << 20  # of one source file; the largest of any release is a sixth of that
_MOST_PARSED = 600  # files parsed for one question
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar")


@dataclass(slots=True)
class Source:
    """An engine's package: paths are POSIX and relative to it (``srt/models/llama.py``).

    Attributes:
        engine: ``sglang`` or ``vllm``.
        origin: what the user gave, for messages.
        version: as the package states it; None where it does not (an untagged source tree says ``0.0.0``, which counts as none).
        requires: the line of its metadata that pins ``transformers``; empty where there is none.
        notes: files that could not be used, one line each.
    """

    engine: str
    origin: str
    paths: tuple[str, ...]
    reader: Callable[[str], bytes]
    beside: Callable[[str], bytes | None]  # text of a file by its name beside the package (its metadata)
    version: str | None = None
    requires: str = ""
    notes: list[str] = field(default_factory=list)
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)
    _known: frozenset[str] = frozenset()

    def __contains__(self, path: str) -> bool:
        if not self._known:
            self._known = frozenset(self.paths)
        return path in self._known

    def under(self, *folders: str) -> Iterator[str]:
        """Paths of the Python files below these folders (a file may be named itself)."""
        for path in self.paths:
            if not folders or any(path == f or path.startswith(f.rstrip("/") + "/") for f in folders):
                yield path

    def text(self, path: str) -> str:
        """The file's text; empty where it is not there, too large or no text."""
        if path not in self._texts:
            self._texts[path] = self._read(path) if path in self else ""
        return self._texts[path]

    def _read(self, path: str) -> str:
        try:
            raw = self.reader(path)
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
            self.notes.append(f"{escaped(path, 80)} cannot be read ({type(error).__name__})")
            return ""
        if len(raw) > _MOST_BYTES:
            self.notes.append(f"{escaped(path, 80)} is longer than {_MOST_BYTES:,} bytes and was left out")
            return ""
        return raw.decode("utf-8-sig", "replace")

    def tree(self, path: str) -> ast.Module | None:
        """The file parsed; None where it is not there or does not parse on this Python (noted)."""
        if path not in self._trees:
            self._trees[path] = self._parse(path)
        return self._trees[path]

    def _parse(self, path: str) -> ast.Module | None:
        text = self.text(path)
        if not text:
            return None
        if len(self._trees) >= _MOST_PARSED:
            raise UsageError(
                f"{escaped(self.origin, 120)}: more than {_MOST_PARSED} files would have to be parsed; is this the engine's own source?"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            here = f"{sys.version_info[0]}.{sys.version_info[1]}"
            self.notes.append(f"{escaped(path, 80)} does not parse with Python {here} ({type(error).__name__}) and was left out")
            return None

    def mentions(self, word: str, *folders: str) -> list[str]:
        """Paths below the folders whose text holds a word, in order."""
        return [p for p in self.under(*folders) if word in self.text(p)]

    def module(self, dotted: str) -> str | None:
        """The path of ``sglang.srt.models.llama``; None where it is not part of this package."""
        parts = dotted.split(".")
        if parts[0] != self.engine:
            return None
        base = "/".join(parts[1:])
        return next((p for p in (f"{base}.py", f"{base}/__init__.py" if base else "__init__.py") if p in self), None)


def open_source(source: str | os.PathLike[str], engine: str | None = None) -> Source:
    """Find an engine's package in a folder, an archive, a URL of a wheel, or (by the engine's name) among the installed packages.

    Args:
        source: a folder (the package, its parent, a source tree, an environment), ``.whl``, ``.zip``, ``.tar.gz``, an ``https://`` URL of a
            wheel, or ``sglang``/``vllm`` for the one installed in this Python.
        engine: which engine is meant, where a folder may hold both.

    Raises:
        UsageError: nothing there, or no engine in it.
    """
    given = os.fspath(source)
    where = escaped(given, 160)
    if given.lower().startswith(("http://", "https://")):
        found = _remote(given, engine)
    elif Path(given).is_dir():
        found = _folder(Path(given), given, engine)
    elif Path(given).is_file():
        found = _archive(Path(given), given, engine)
    elif given in PACKAGES:
        found = _installed(given)
    else:
        raise UsageError(f"{where}: no such file or folder; give an engine's package, wheel or source tree")
    if found is None:
        wanted = engine or " or ".join(PACKAGES)
        marks = ", ".join(f"{e}/{m[0]}" for e, m in PACKAGES.items() if engine in (None, e))
        raise UsageError(f"{where}: no {wanted} package in it (looked for {marks}); give the folder that holds it, or the package itself")
    found.version = _version(found)
    found.requires = _requires(found)
    return found


def _package(paths: list[str], engine: str | None) -> tuple[str, str] | None:
    """``(engine, folder of the package)`` by where its known folders lie; the shortest place wins."""
    best: tuple[int, str, str] | None = None
    for name, marks in PACKAGES.items():
        if engine not in (None, name):
            continue
        roots = [{p[: p.index(m) - 1] if p.index(m) else "" for p in paths if f"/{m}/" in f"/{p}"} for m in marks]
        for root in set.intersection(*roots) if roots else ():
            key = (root.count("/"), name, root)
            if best is None or key < best:
                best = key
    return None if best is None else (best[1], best[2])


def _folder(folder: Path, given: str, engine: str | None) -> Source | None:
    candidates = [folder / p for p in ("", *(f"lib/python3.{n}/site-packages" for n in range(20, 7, -1)), "Lib/site-packages")]
    hits = []
    for base in candidates:
        for name, marks in PACKAGES.items():
            if engine not in (None, name):
                continue
            for place in _PLACES:
                at = base / place.format(engine=name)
                if all((at / m).is_dir() for m in marks):
                    hits.append((name, at))
                    break
        if hits:
            break
    if not hits:
        return None
    if len({h[0] for h in hits}) > 1:
        both = " and ".join(escaped(h[1], 100) for h in hits)
        raise UsageError(f"{escaped(given, 120)}: holds {both}; give one of them")
    name, at = hits[0]
    root = at.resolve()
    paths: list[str] = []
    for here, folders, files in os.walk(at):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in ("__pycache__", "node_modules"))
        inside = Path(here).relative_to(at).as_posix()
        paths += [f if inside == "." else f"{inside}/{f}" for f in sorted(files) if f.endswith(".py")]
        if len(paths) > _MOST_FILES:
            raise UsageError(f"{escaped(given, 120)}: more than {_MOST_FILES:,} Python files; give the engine's package itself")

    def read(path: str) -> bytes:
        real = (at / path).resolve()
        if not real.is_relative_to(root):
            raise ValueError("the link leaves the package")
        if not stat.S_ISREG(real.stat().st_mode):
            raise ValueError("no regular file")
        with real.open("rb") as file:
            return file.read(_MOST_BYTES + 1)

    def beside(word: str) -> bytes | None:
        for info in sorted(at.parent.glob(f"{name}-*.dist-info")):
            if (info / word).is_file():
                with (info / word).open("rb") as file:
                    return file.read(_MOST_BYTES)
        for near in (at.parent, at.parent.parent):
            if (near / "pyproject.toml").is_file() and word == "METADATA":
                with (near / "pyproject.toml").open("rb") as file:
                    return file.read(_MOST_BYTES)
        return None

    return Source(name, given, tuple(sorted(paths)), read, beside)


def _zip(archive: zipfile.ZipFile, given: str, engine: str | None) -> Source | None:
    infos = archive.infolist()
    if len(infos) > _MOST_FILES:
        raise UsageError(f"{escaped(given, 120)}: more than {_MOST_FILES:,} files in it")
    by_name = {i.filename: i for i in infos if i.filename.endswith((".py", "/METADATA", "pyproject.toml"))}
    found = _package([n for n in by_name if n.endswith(".py")], engine)
    if found is None:
        return None
    name, root = found
    prefix = f"{root}/" if root else ""

    def one(info: zipfile.ZipInfo) -> bytes:
        if info.file_size > _MOST_BYTES:
            return b" " * (_MOST_BYTES + 1)
        with archive.open(info) as file:  # a false size in the table is met by the bound on what is read
            return file.read(_MOST_BYTES + 1)

    def beside(word: str) -> bytes | None:
        names = sorted(by_name)
        hit = next((n for n in names if n.endswith(f".dist-info/{word}")), None) or next(
            (n for n in names if n.endswith("pyproject.toml")), None
        )
        return one(by_name[hit]) if hit else None

    paths = sorted(n[len(prefix) :] for n in by_name if n.startswith(prefix) and n.endswith(".py"))
    return Source(name, given, tuple(p for p in paths if ".." not in PurePosixPath(p).parts), lambda p: one(by_name[prefix + p]), beside)


def _archive(path: Path, given: str, engine: str | None) -> Source | None:
    if not given.lower().endswith(_ARCHIVES):
        raise UsageError(f"{escaped(given, 120)}: no folder and no {', '.join(_ARCHIVES)} file")
    if not zipfile.is_zipfile(path):
        return _tar(path, given, engine)
    try:
        return _zip(zipfile.ZipFile(path), given, engine)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise UsageError(f"{escaped(given, 120)}: a damaged archive ({escaped(error, 80)})") from None


def _tar(path: Path, given: str, engine: str | None) -> Source | None:
    import tarfile
    import zlib

    held: dict[str, bytes] = {}
    room = 256 << 20
    try:
        with tarfile.open(path) as archive:
            for count, member in enumerate(archive):
                if count > _MOST_FILES or room < 0:
                    raise UsageError(f"{escaped(given, 120)}: too much in it; unpack it and give the folder")
                if member.isfile() and member.name.endswith((".py", "PKG-INFO", "pyproject.toml")) and member.size <= _MOST_BYTES:
                    file = archive.extractfile(member)
                    held[member.name] = file.read(_MOST_BYTES + 1) if file is not None else b""
                    room -= member.size
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise UsageError(f"{escaped(given, 120)}: a damaged archive ({escaped(error, 80)})") from None
    found = _package([n for n in held if n.endswith(".py")], engine)
    if found is None:
        return None
    name, root = found
    prefix = f"{root}/" if root else ""

    def beside(word: str) -> bytes | None:
        return next((held[n] for n in sorted(held, key=len) if n.endswith(("PKG-INFO", "pyproject.toml"))), None)

    paths = tuple(sorted(n[len(prefix) :] for n in held if n.startswith(prefix) and n.endswith(".py")))
    return Source(name, given, paths, lambda p: held[prefix + p], beside)


class _Ranged(io.RawIOBase):
    """A remote file as a file object, read in blocks by range requests; the last block stays."""

    def __init__(self, get: Callable[[int, int], bytes], size: int) -> None:
        self._get, self._size, self._at = get, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        count = min(len(view), max(0, self._size - self._at))
        data = self._get(self._at, self._at + count) if count else b""
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _remote(url: str, engine: str | None) -> Source | None:
    from eagle3diag.checkpoint.remote import https_parts

    get, size, where = https_parts(url)
    if not where.endswith((".whl", ".zip")):
        raise UsageError(f"{where}: of remote sources only wheels are read, by parts; download it")
    try:
        archive = zipfile.ZipFile(io.BufferedReader(_Ranged(get, size), 1 << 20))
        return _zip(archive, where, engine)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise UsageError(f"{where}: no archive ({escaped(error, 80)})") from None


def _installed(engine: str) -> Source | None:
    """The package of that name on this Python's path; found by looking, never imported."""
    for entry in sys.path:
        at = Path(entry or ".") / engine
        if all((at / m).is_dir() for m in PACKAGES[engine]):
            return _folder(at, str(at), engine)
    raise UsageError(f"{engine} is not installed in this Python, and no such file or folder is here; give its place")


def _version(source: Source) -> str | None:
    """The release the package says it is; None for the stand-ins of an untagged tree."""
    import re

    stated = []
    for path in ("_version.py", "version.py"):
        match = re.search(r"""^(?:__version__|version)\b[^\n]*?=\s*["']([0-9][^"'\s]{0,40})["']""", source.text(path), re.M)
        stated.append(match.group(1) if match else None)
    meta = (source.beside("METADATA") or b"")[:4096].decode("utf-8", "replace")
    match = re.search(r"^(?:Version: |version = [\"'])([0-9][^\s\"']{0,40})", meta, re.M)
    stated.append(match.group(1) if match else None)
    return next((v for v in stated if v and not v.startswith(("0.0.0", "0.1.dev"))), None)


def _requires(source: Source) -> str:
    import re

    meta = (source.beside("METADATA") or b"").decode("utf-8", "replace")
    match = re.search(r"""^(?:Requires-Dist:\s*|\s*["'])(transformers\b[^;"'\n]{0,80})""", meta, re.M)
    return match.group(1).strip() if match else ""


def pinned(requires: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """``(lowest, upper bound or None)`` of a requirement: ``transformers<5,>=4.56`` -> ``((4, 56), (5,))``."""
    import re

    lowest: tuple[int, ...] = ()
    upper: tuple[int, ...] | None = None
    for op, text in re.findall(r"(==|>=|~=|<=|<|>)\s*([0-9][0-9.]*)", requires):
        numbers = tuple(int(p) for p in text.split(".") if p)
        if op in ("==", ">=", "~=", ">"):
            lowest = max(lowest, numbers)
        elif op in ("<", "<="):
            upper = numbers if upper is None else min(upper, numbers)
    return lowest, upper
