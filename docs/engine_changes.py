"""What a copy of SGLang or vLLM does otherwise than the record says: the list to work through when an engine version is added.

The source is scanned (nothing is imported or run) for every runner and draft class, and for every target class on record, and what could be
read is held against the newest release on record, or against ``--against``. A line is a place to look at, not yet a fact: the scan reads
less than a person does, and what it cannot read is listed at the end, to be looked up by hand.

The private look-ups of ``targets`` and ``scan_target`` are used on purpose: the record as data is what is compared.

Run: ``python docs/engine_changes.py SOURCE [--against VERSION]``; SOURCE is a folder, a wheel, or a wheel's URL. Always exits with 0.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eagle3diag.engines import targets
from eagle3diag.engines.contract import draft_classes, facts_of, releases, runners
from eagle3diag.engines.scan import scan
from eagle3diag.engines.scan.classes import Classes
from eagle3diag.engines.scan.source import open_source
from eagle3diag.engines.scan.target import _entries, scan_target

RULES = ("ids", "default", "store", "zero", "last", "short", "captures")


def behaviours(source: str, engine: str, against: str) -> tuple[list[str], list[str]]:
    """Behaviours read otherwise than recorded, one line each; and the names of those that were not read."""
    lines: dict[str, list[str]] = {}
    unread: set[str] = set()
    for runner, draft_class in product(runners(engine) or (None,), draft_classes(engine)):
        got = scan(source, engine=engine, runner=runner, draft_class=draft_class)
        if got.draft["class"] is None:
            lines.setdefault(f"no class reads a draft of this kind: it has {got.draft['architectures']}", []).append(draft_class)
            continue
        recorded = facts_of(engine, against, runner, draft_class)
        for name, one in got.fields.items():
            if one.status == "recorded":
                unread.add(name)
            elif one.value != recorded[name].value:
                line = f"{name}: recorded {recorded[name].value!r}, {one.status} {one.value!r} ({one.source})"
                lines.setdefault(line, []).append(" ".join(filter(None, (runner, draft_class))))
    return [f"[{', '.join(where)}] {line}" for line, where in lines.items()], sorted(unread)


def classes_on_record(engine: str) -> list[str]:
    """Every target class the record names."""
    data = targets._data(engine)
    return sorted({a for f in data["family"].values() for a in f["classes"]} | set(data["absent"]["classes"]))


def captures(classes: Classes, engine: str, against: str) -> Iterator[str]:
    """Target classes that capture otherwise than recorded, one line each."""
    for arch in classes_on_record(engine):
        hook, behaviour = targets._row(engine, arch, against)
        seen = scan_target(classes, arch)
        if not seen.found:
            if hook:
                yield f"{arch}: recorded with the hook, not found"
        elif bool(seen.hook) != bool(hook):
            yield f"{arch}: hook recorded {hook}, {seen.status} {seen.hook} ({', '.join(seen.where)})"
        elif seen.behaviour is not None and behaviour is not None:
            for rule in RULES:
                old, new = getattr(behaviour, rule), getattr(seen.behaviour, rule)
                if old != new:
                    yield f"{arch}: {rule} recorded {old!r}, {seen.status} {new!r} ({', '.join(seen.where)})"


def unrecorded(classes: Classes, engine: str) -> Iterator[str]:
    """Target classes of the source that have the hook and stand on no list."""
    if engine == "vllm":
        names = set(classes.registry())
    else:
        names = {name for path in classes.source.under("srt/models") for name in _entries(classes, path)}
    for arch in sorted(names - set(classes_on_record(engine))):
        seen = scan_target(classes, arch)
        if seen.hook and not re.search("Eagle|NextN|MTP|Assistant", arch):  # those are drafts: they inherit the hook and are no targets
            yield f"{arch}: default {', '.join(seen.default)}, id k is HF {seen.shift or 'k'} ({', '.join(seen.where)})"


def main(argv: list[str] | None = None) -> int:
    """Prints the list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("--against", help="release to compare with (default: the newest on record)")
    args = parser.parse_args(argv)
    opened = open_source(args.source)
    engine = opened.engine
    against = args.against or releases(engine)[-1]
    print(f"{engine} {opened.version or '(no version stated)'} against the record of {against}\n\nBehaviours read otherwise than recorded")
    lines, unread = behaviours(args.source, engine, against)
    print("\n".join(f"  {line}" for line in lines) or "  none")
    print("\nTarget classes that capture otherwise than recorded")
    classes = Classes(opened)
    print("\n".join(f"  {line}" for line in captures(classes, engine, against)) or "  none")
    print("\nTarget classes with the hook that are on no list")
    print("\n".join(f"  {line}" for line in unrecorded(classes, engine)) or "  none")
    print("\nNot read by a scan, to be looked up by hand:\n  " + ", ".join(unread))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
