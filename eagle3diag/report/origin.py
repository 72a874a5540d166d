"""What a report was made from and by: the version of this tool and of the libraries that computed, every input with its size and digest,
every parameter. Two reports with the same section here were made from the same bytes.

Digests are SHA-256. A file above `HASHED` bytes, more than `FILES` files of one input, and what lies on the network are named as not
hashed: a digest must not cost more than the report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import Table, View, size, table, value_text

if TYPE_CHECKING:
    from eagle3diag.report.study import Study

__all__ = ["FILES", "HASHED", "libraries", "origin_view"]

HASHED = 2_000_000_000  #: bytes; larger files are not hashed
FILES = 24  #: of one input; more are summed up
_LIBRARIES = ("torch", "numpy", "safetensors", "matplotlib", "papermill", "nbconvert", "ipykernel")


def libraries() -> dict[str, str]:
    """Versions of Python and of the libraries that computed or rendered, by name."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def origin_view(study: Study, parameters: Mapping[str, Any], title: str = "") -> View:
    """The section on a report's origin.

    Args:
        parameters: what the report was asked with, by name.
    """
    from eagle3diag import __version__

    tools = ", ".join(f"{name} {number}" for name, number in libraries().items())
    asked = ((name, "not given" if value is None else value_text(value)) for name, value in parameters.items())
    return View(
        title=title,
        summary=f"eagle3diag {__version__}, with {tools}",
        tables=(_inputs(study), table("Parameters", ("parameter", "value"), asked)),
    )


def _inputs(study: Study) -> Table:
    rows: list[tuple[str, str, str, str]] = []
    for role, folder, names in _given(study):
        if "://" in folder:
            rows.append((role, folder, "", "not hashed: not on this machine"))
            continue
        files = [(name, Path(folder, name)) for name in names]
        present = [(name, path) for name, path in files if path.is_file()]
        if len(present) > FILES:
            total = sum(path.stat().st_size for _, path in present)
            rows.append((role, f"{folder}: {len(present):,} files", size(total), f"not hashed: more than {FILES} files"))
            continue
        rows += [(role, _joined(folder, name), f"{path.stat().st_size:,} bytes", _digest(path)) for name, path in present]
    return table("Inputs", ("input", "file", "size", "SHA-256"), rows, limit=200)


def _joined(folder: str, name: str) -> str:
    return Path(folder, name).as_posix() if folder else name


def _given(study: Study) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Role, folder and the files in it that were read."""
    case = study.reports[0].case
    yield "draft", *_files(study.checkpoint)
    if study.target is not None:
        held = study.target.checkpoint
        yield ("target", *_files(held)) if held is not None else ("target", *_alone(study.target.path))
    if study.other is not None:
        yield "second draft", *_files(study.other)
    if study.dump is not None:
        names = tuple(dict.fromkeys(ref.file for ref in study.dump.samples))
        yield "dump", _base(study.dump.path), names
    if case.log is not None:
        for file in case.log.files:
            yield "log", *_alone(file)


def _base(path: str) -> str:
    """The folder that file names are relative to."""
    return path if "://" in path or not Path(path).is_file() else str(Path(path).parent)


def _alone(path: str) -> tuple[str, tuple[str, ...]]:
    if "://" in path:
        return path, ()
    given = Path(path)
    if given.is_dir():
        return path, ("config.json",)
    return ("", (path,)) if given.is_file() else (path, ())


def _files(checkpoint: Any) -> tuple[str, tuple[str, ...]]:
    configs = (c.file for c in checkpoint.configs)
    return _base(checkpoint.path), tuple(dict.fromkeys([*configs, *checkpoint.files, *checkpoint.extras]))


def _digest(path: Path) -> str:
    if path.stat().st_size > HASHED:
        return f"not hashed: above {size(HASHED)}"
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
