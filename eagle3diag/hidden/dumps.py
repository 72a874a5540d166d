"""Open a dump: a file or a folder of samples, in whatever format its writer chose.

Headers alone are read here; a sample is read when asked for. One broken file among many is an issue of the dump (rule DMP601),
not the end of it; a dump without one readable sample is an error.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3diag.checkpoint.rawfile import shown
from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.hidden.formats_files import Contents, open_safetensors
from eagle3diag.hidden.formats_known import recognise
from eagle3diag.hidden.formats_layout import Layout, read_sample
from eagle3diag.hidden.model import DumpIssue, HiddenDump, Sample, SampleRef

__all__ = ["open_dump"]

_ISSUES_SHOWN = 20


def open_dump(path: str | os.PathLike[str], *, hidden: int | None = None) -> HiddenDump:
    """Open a dump without reading a state.

    Args:
        path: a file, or a folder of them (looked through with its subfolders).
        hidden: width of the target's states; decides what the shapes leave open.

    Raises:
        CheckpointError: one line: nothing there, nothing readable, or no known format.
    """
    given = Path(path)
    folder, files, notes = _files(given)
    issues: list[DumpIssue] = []
    layouts: list[tuple[str, Layout]] = []
    failed: list[str] = []
    for name in files:
        try:
            layouts.append((name, recognise(_contents(folder / name, name), hidden)))
        except CheckpointError as error:
            failed.append(str(error))
            issues.append(DumpIssue("unreadable", name, _named(name, str(error))))
    if not layouts:
        if len(failed) == 1:
            raise CheckpointError(failed[0])
        raise CheckpointError(f"{shown(given)}: none of {len(files)} files is a dump; the first: {failed[0]}")
    counts = Counter(layout.signature for _, layout in layouts)
    wanted = counts.most_common(1)[0][0]
    kept = [(name, layout) for name, layout in layouts if layout.signature == wanted]
    main = kept[0][1]
    for name, layout in layouts:
        if layout.signature == wanted:
            issues += [replace(i, file=name, message=_named(name, i.message)) for i in layout.issues]
        else:
            kind = "other" if layout.format != main.format else "shape"
            message = f"{_words(layout)} where {counts[wanted]} of {len(layouts)} files hold {_words(main)}; left out"
            issues.append(DumpIssue(kind, name, _named(name, message)))
    samples = tuple(
        SampleRef(name=re.sub(r"(\.safetensors|\.pt|\.ckpt|\.gz|\.json)+$", "", name), file=name, tokens=layout.tokens, rows=layout.rows)
        for name, layout in kept
    )
    return HiddenDump(
        path=shown(given),
        format=main.format,
        evidence=(*main.evidence, *notes),
        hidden=main.hidden,
        slots=main.slots,
        final_norm=main.final_norm,
        samples=samples,
        issues=tuple(issues),
        metadata=main.metadata,
        axis=main.axis,
        loader=_Loader(folder, hidden, wanted),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads one sample; picklable, so that a worker process can."""

    folder: Path
    hidden: int | None
    signature: tuple[object, ...]

    def __call__(self, ref: SampleRef) -> Sample:
        contents = _contents(self.folder / ref.file, ref.file)
        layout = recognise(contents, self.hidden)
        if layout.signature != self.signature or (ref.rows is not None and (layout.tokens, layout.rows) != (ref.tokens, ref.rows)):
            raise CheckpointError(
                f"{shown(self.folder / ref.file)}: changed since the dump was opened; run again when nothing writes to it"
            )
        return read_sample(contents, layout, ref.name)


def _contents(path: Path, name: str) -> Contents:
    return open_safetensors(path, name)


def _named(name: str, message: str) -> str:
    return message if escaped(name, 300) in message else f"{escaped(name, 300)}: {message}"


def _words(layout: Layout) -> str:
    return f"{layout.format} with {len(layout.slots)} states of width {layout.hidden}"


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _files(given: Path) -> tuple[Path, list[str], tuple[str, ...]]:
    """The folder, the names in it that can be samples in natural order, and a note of what was passed over."""
    if given.is_file():
        return given.parent, [given.name], ()
    if not given.is_dir():
        raise CheckpointError(f"{shown(given)}: no such file or folder; give a dump file or a folder of them")
    found: list[str] = []
    other: Counter[str] = Counter()
    for name in _walk(given):
        if name.endswith(".safetensors"):
            found.append(name)
        else:
            other[Path(name).suffix or Path(name).name] += 1
    if not found:
        kinds = ", ".join(f"{n} {escaped(k, 20)}" for k, n in other.most_common(5)) or "it is empty"
        raise CheckpointError(f"{shown(given)}: no dump file in this folder ({kinds})")
    note = ("passed over: " + ", ".join(f"{n} {escaped(k, 20)}" for k, n in other.most_common(5)),) if other else ()
    return given, sorted(found, key=_natural), note


def _walk(folder: Path) -> Iterable[str]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in files:
            yield (Path(root) / name).relative_to(folder).as_posix()
