"""Checkpoints of several files: the index that lists them, and what happens when it lies.

The index maps tensor names to files. A name that leaves the folder is refused before it is opened; files that are not there, tensors
in two files and tensors that are not where they are said to be become ``Issue``s, since the rest can still be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from eagle3diag.checkpoint.model import Issue, TensorInfo
from eagle3diag.checkpoint.rawfile import shown, whole_text
from eagle3diag.checkpoint.strictjson import Duplicates, decode, kind, parse
from eagle3diag.errors import CheckpointError, escaped

__all__ = ["Index", "inside", "merge", "parse_index", "read_index"]

_INDEX_LIMIT = 64 << 20  # bytes; the largest published index has about 9 MB
_SHOWN = 5


class Index(NamedTuple):
    """A shard index as read.

    Attributes:
        file: its name.
        weight_map: tensor name to shard name.
        shards: shard names, sorted, each checked to stay in the folder.
        issues: keys that stand twice.
    """

    file: str
    weight_map: dict[str, str]
    shards: tuple[str, ...]
    issues: tuple[Issue, ...]


def read_index(path: Path) -> Index:
    """A ``*.index.json`` file.

    Raises:
        CheckpointError: unreadable, of another form, or with a shard that leaves the folder.
    """
    index = parse_index(whole_text(path, _INDEX_LIMIT, "a shard index"), shown(path), path.name)
    for shard in index.shards:
        inside(path.parent, shard, shown(path))
    return index


def parse_index(raw: bytes, where: str, file: str) -> Index:
    """The same from bytes; shard names are judged by their spelling alone.

    Raises:
        CheckpointError: see ``read_index``.
    """
    text = decode(raw, where, "index")
    data = parse(text, where, "index")
    found = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        what = (
            f"a JSON {kind(data)}"
            if not isinstance(data, dict)
            else "no 'weight_map'"
            if found is None
            else f"a weight_map that is a {kind(found)}"
        )
        raise CheckpointError(f"{where}: index holds {what}, expected an object with a 'weight_map' of tensor to file")
    for name, shard in found.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{where}: index gives '{escaped(name)}' a JSON {kind(shard)}, expected a file name")
    shards = tuple(sorted(set(found.values())))
    for shard in shards:
        if not _plain(shard):
            raise CheckpointError(f"{where}: shard path '{escaped(shard)}' leaves the folder or is no file name: refused")
    repeated = found.repeated if isinstance(found, Duplicates) else ()
    issues = tuple(
        Issue(
            "duplicate-name",
            file,
            f"{escaped(file, 100)}: '{escaped(n)}' stands twice in weight_map: loaders keep the last",
            {"name": escaped(n)},
        )
        for n in repeated[:_SHOWN]
    )
    return Index(file, dict(found), shards, issues)


def _plain(shard: str) -> bool:
    parts = shard.split("/")
    return (
        shard.isprintable()
        and 0 < len(shard) <= 255
        and not {"", ".", ".."} & set(parts)
        and not set("\\:") & set(shard)
        and "://" not in shard
    )


def inside(folder: Path, shard: str, where: str) -> Path:
    """The path of a shard, links resolved, which has to lie in the folder.

    The Hugging Face cache is laid out in links (``snapshots/REV/file`` to ``blobs/HASH``); its own ``blobs`` folder counts as inside.

    Raises:
        CheckpointError: it leaves the folder.
    """
    try:
        home, real = folder.resolve(), (folder / shard).resolve()
    except (OSError, RuntimeError, ValueError):
        raise CheckpointError(f"{where}: shard path '{escaped(shard)}' cannot be resolved (a loop of links?)") from None
    allowed = [home, *(p.parent / "blobs" for p in (home, *home.parents) if p.name == "snapshots")]
    if not any(real.is_relative_to(a) for a in allowed):
        raise CheckpointError(f"{where}: shard path '{escaped(shard)}' leaves the folder by a link: refused; copy the file there")
    return folder / shard


def merge(
    files: Mapping[str, Mapping[str, TensorInfo]], index: Index | None, missing: tuple[str, ...] = ()
) -> tuple[dict[str, TensorInfo], tuple[Issue, ...]]:
    """The tensors of several files as one checkpoint.

    Args:
        files: per file, in reading order, its tensors.
        index: what the index promised; None where the folder has none.
        missing: shards of the index that are not there.

    Returns:
        Tensors by name, each from the file a loader would take it from, and the deviations.
    """
    issues: list[Issue] = list(index.issues) if index else []
    listed = index.weight_map if index else {}
    where = index.file if index else "folder"
    tensors: dict[str, TensorInfo] = {}
    homes: dict[str, list[str]] = {}
    for file, found in files.items():
        for name, info in found.items():
            homes.setdefault(name, []).append(file)
            if name not in tensors or listed.get(name) == file:
                tensors[name] = info
    for shard in missing:
        names = [n for n, s in listed.items() if s == shard]
        of = f"{len(missing)} of {len(missing) + len(files)} files missing"
        told = (
            f"{escaped(shard, 100)}: not there, {escaped(where, 100)} lists it for {len(names):,} tensors ('{escaped(names[0])}' …); {of}"
        )
        issues.append(
            Issue("shard-missing", shard, told, {"shard": escaped(shard, 100), "tensors": len(names), "first": escaped(names[0])})
        )

    def note(issue_kind: str, names: list[str], say: Callable[[str], str]) -> None:
        for name in names[:_SHOWN]:
            more = f" (one of {len(names):,} such tensors)" if len(names) > 1 else ""
            evidence = {"name": escaped(name), "count": len(names)}
            issues.append(Issue(issue_kind, where, f"{escaped(where, 100)}: '{escaped(name)}' {say(name)}{more}", evidence))  # type: ignore[arg-type]

    note(
        "shard-twice",
        [n for n, h in homes.items() if len(h) > 1],
        lambda n: f"is in {len(homes[n])} files, {' and '.join(escaped(f, 60) for f in homes[n][:3])}; loaders differ in which they take",
    )
    if index:
        note(
            "shard-unlisted",
            [n for n, s in listed.items() if s not in missing and s not in homes.get(n, ())],
            lambda n: (
                f"is listed in {escaped(listed[n])} but not in that file" + (f" (it is in {escaped(homes[n][0])})" if n in homes else "")
            ),
        )
        note("shard-unlisted", [n for n in homes if n not in listed], lambda n: f"is in {escaped(homes[n][0])} but not listed")
    return tensors, tuple(issues)
