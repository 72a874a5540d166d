"""Open a dump: a file or a folder of samples, in whatever format its writer chose.

Headers alone are read here; a sample is read when asked for. One broken file among many is an issue of the dump (rule DMP601),
not the end of it; a dump without one readable sample is an error. Files that are no samples (a vocabulary map, an arrow data set,
configs, locks) are passed over with a note.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3diag.checkpoint.rawfile import shown
from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.hidden.formats_beside import Hints, look_beside
from eagle3diag.hidden.formats_files import Contents, is_gzip, parts_of
from eagle3diag.hidden.formats_known import Foreign, recognise
from eagle3diag.hidden.formats_layout import Layout, read_sample
from eagle3diag.hidden.model import DumpIssue, HiddenDump, Sample, SampleRef

__all__ = ["open_dump"]

_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".gz", ".json", ".jsonl")
_UNPACKED_AT_ONCE = 64 << 20  # bytes of .gz files listed when a dump is opened; later ones are unpacked when read


def open_dump(path: str | os.PathLike[str], *, hidden: int | None = None) -> HiddenDump:
    """Open a dump without reading a state.

    Args:
        path: a file, or a folder of them (looked through with its subfolders).
        hidden: width of the target's states; decides what the shapes leave open.

    Raises:
        CheckpointError: one line: nothing there, nothing readable, or no known format.

    Example:
        >>> dump = open_dump("data_samples/smollm2-eagle3/dumps")
        >>> len(dump.samples), [slot.hf for slot in dump.aux][:5]
        (3, [0, 1, 2, 3, 14])
    """
    if not os.fspath(path):
        raise CheckpointError("the path of the dump is empty; give a dump file or a folder of them")
    given = Path(path)
    folder, files, passed = _files(given)
    hints = look_beside(_around(folder, files, given), hidden)
    found = _Found(folder, hints, given.is_dir(), passed)
    for name in files:
        found.look(name)
    if not found.samples:
        _nothing(given, found)
    counts = Counter(signature for *_, signature in found.samples)
    wanted = counts.most_common(1)[0][0]
    main = found.layouts[wanted]
    issues, samples = list(found.issues), []
    several = Counter(name for name, *_ in found.samples)
    for name, part, tokens, rows, signature in found.samples:
        if signature == wanted:
            label = f"{_stem(name)}#{part}" if several[name] > 1 else _stem(name)
            samples.append(SampleRef(name=label, file=name, tokens=tokens, rows=rows, part=part))
        else:
            other = found.layouts[signature]
            kind = "other" if other.format != main.format else "shape"
            message = f"{_words(other)} where {counts[wanted]} of {len(found.samples)} samples hold {_words(main)}; left out"
            issues.append(DumpIssue(kind, name, _named(name, message)))
    samples += [SampleRef(name=_stem(name), file=name, tokens=None, rows=None) for name in found.packed]
    samples.sort(key=lambda ref: (_natural(ref.file), ref.part))
    return HiddenDump(
        path=shown(given),
        format=main.format,
        evidence=(*main.evidence, *found.notes()),
        hidden=main.hidden,
        slots=main.slots,
        final_norm=main.final_norm,
        samples=tuple(samples),
        issues=tuple(issues),
        metadata=main.metadata,
        axis=main.axis,
        loader=_Loader(folder, hints, wanted),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads one sample; picklable, so that a worker process can."""

    folder: Path
    hints: Hints
    signature: tuple[object, ...]

    def __call__(self, ref: SampleRef) -> Sample:
        path = self.folder / ref.file
        contents = next(parts_of(path, ref.file, ref.part))
        layout = recognise(contents, self.hints)
        if layout.signature != self.signature:
            raise CheckpointError(f"{shown(path)}: {_words(layout)}, not what the dump's other samples hold")
        if ref.rows is not None and (layout.tokens, layout.rows) != (ref.tokens, ref.rows):
            raise CheckpointError(f"{shown(path)}: changed since the dump was opened; run again when nothing writes to it")
        return read_sample(contents, layout, ref.name)


class _Found:
    """What the files of a dump turned out to be."""

    def __init__(self, folder: Path, hints: Hints, many: bool, passed: Counter[str]) -> None:
        self.folder, self.hints, self.many, self.passed = folder, hints, many, passed
        self.layouts: dict[tuple[object, ...], Layout] = {}  # the first of each kind: a folder may hold 100,000 samples of one
        self.samples: list[tuple[str, int, int, int, tuple[object, ...]]] = []  # name, part, tokens, rows, key of layouts
        self.issues: list[DumpIssue] = []
        self.packed: list[str] = []
        self.foreign: list[str] = []
        self._unpacked = 0
        self._keys: dict[tuple[object, ...], tuple[object, ...]] = {}

    def look(self, name: str) -> None:
        path = self.folder / name
        try:
            if name.endswith((".json", ".jsonl")) and self.many and not self._answers(path):
                self.passed[Path(name).suffix] += 1
                return
            if self.many and is_gzip(path):
                if self._unpacked > _UNPACKED_AT_ONCE:
                    self.packed.append(name)
                    return
                self._unpacked += path.stat().st_size
            for contents in parts_of(path, name):
                self._recognise(contents)
        except CheckpointError as error:
            self._failed(name, error)
        except OSError as error:
            self._failed(name, CheckpointError(f"{shown(path)}: {(error.strerror or type(error).__name__).lower()}"))

    @staticmethod
    def _answers(path: Path) -> bool:
        from eagle3diag.hidden.formats_json import may_hold_states

        return may_hold_states(path)

    def _recognise(self, contents: Contents) -> None:
        try:
            layout = recognise(contents, self.hints)
        except CheckpointError as error:
            self._failed(contents.name, error)
            return
        name, key = contents.name, self._keys.setdefault(layout.signature, layout.signature)
        self.layouts.setdefault(key, layout)
        self.samples.append((name, contents.part or 0, layout.tokens, layout.rows, key))
        self.issues += [replace(i, file=name, message=_named(name, i.message)) for i in layout.issues]

    def _failed(self, name: str, error: CheckpointError) -> None:
        if isinstance(error, Foreign) and self.many:
            self.passed[f"{Path(name).name} (no states)"] += 1
            self.foreign.append(_named(name, str(error)))
        else:
            self.issues.append(DumpIssue("unreadable", name, _named(name, str(error))))

    def notes(self) -> tuple[str, ...]:
        """What was passed over, in one line."""
        if not self.passed:
            return ()
        return ("passed over: " + _counted(self.passed),)


def _nothing(given: Path, found: _Found) -> None:
    """Say why no sample was found.

    Raises:
        CheckpointError: always.
    """
    if not found.many and found.issues:
        raise CheckpointError(found.issues[0].message)
    said = [i.message for i in found.issues] or found.foreign
    if not said:
        raise CheckpointError(f"{shown(given)}: no dump file in this folder ({_counted(found.passed) or 'it is empty'})")
    raise CheckpointError(f"{shown(given)}: no readable sample among {len(said)} files; the first: {said[0]}")


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{n} {escaped(k, 40)}" for k, n in names.most_common(5))


def _named(name: str, message: str) -> str:
    return message if escaped(name, 300) in message else f"{escaped(name, 300)}: {message}"


def _stem(name: str) -> str:
    return re.sub(r"(\.safetensors|\.pth?|\.ckpt|\.gz|\.jsonl?)+$", "", name) or name


def _words(layout: Layout) -> str:
    return f"{layout.format} with {len(layout.slots)} states of width {layout.hidden}"


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", name) if part]


def _around(folder: Path, files: list[str], given: Path) -> list[Path]:
    """Folders in which a dump's configs may lie: that of its files, the one given, and the one above."""
    first = (folder / files[0]).parent if files else folder
    around = [first, folder] if given.is_dir() else [first]
    if first.parent not in around:
        around.append(first.parent)
    return list(dict.fromkeys(around))


def _files(given: Path) -> tuple[Path, list[str], Counter[str]]:
    """The folder, the names in it that can be samples in natural order, and what was passed over."""
    passed: Counter[str] = Counter()
    try:
        if given.is_dir():
            names = list(_walk(given, passed))
            return given, sorted((n for n in names if n.endswith(_SUFFIXES)), key=_natural), passed
        if not given.exists():
            if re.match(r"[A-Za-z][\w+.-]+:/", str(given)):
                raise CheckpointError(f"{shown(given)}: dumps are read from disks only, not over the network; fetch it first")
            raise CheckpointError(f"{shown(given)}: no such file or folder; give a dump file or a folder of them")
    except (OSError, ValueError) as error:
        why = (error.strerror or "not a valid path").lower() if isinstance(error, OSError) else "not a valid path"
        raise CheckpointError(f"{shown(given)}: {why}; give a dump file or a folder of them") from None
    return given.parent, [given.name], passed


def _walk(folder: Path, passed: Counter[str]) -> Iterator[str]:
    def refused(error: OSError) -> None:
        passed[f"folder {Path(str(error.filename)).name} ({(error.strerror or 'unreadable').lower()})"] += 1

    for root, folders, files in os.walk(folder, onerror=refused):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in files:
            if name.startswith(".") or not name.endswith(_SUFFIXES):
                passed[Path(name).suffix or name] += 1
            else:
                yield (Path(root) / name).relative_to(folder).as_posix()
