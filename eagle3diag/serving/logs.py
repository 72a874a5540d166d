"""Opening a log: what kind it is, everything in it summed, and the sums as one ``ServingLog``.

A text is streamed block by block; a JSON document, a scrape of metrics or a file of training metrics is told by its beginning. All
readers add to one tally, so a file in which several kinds stand together is one result; where they are of different engines the larger
part stands and the rest is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError, escaped
from eagle3diag.serving.model import ServingLog
from eagle3diag.serving.reader import blocks, log_files, plain, wide_code

if TYPE_CHECKING:
    from eagle3diag.serving.gathered import Gathered
    from eagle3diag.serving.tally import Tally

__all__ = ["open_log", "read_bytes"]

_DOCUMENT = 256 << 20  # bytes of one JSON document or scrape
_PEEK = 1 << 16
_JSON_MARKS = (
    b'"speculative_decoding"',
    b'"spec_verify_ct"',
    b'"num_spec_steps"',
    b'"avg_spec_accept_length"',
    b'"accept_length"',
    b"'spec_verify_ct'",
)
_SCRIPT_MARKS = (
    b"num_accepted_tokens",
    b"accept@pos",
    b"n_accept",
    b"cceptance Length",
    b"ccept length",
    b"ccept_length",
    b"cceptance length:",
)


def open_log(path: str | Sequence[str], *, version: str | None = None) -> ServingLog:
    """Read a log.

    Args:
        path: a file (plain or gzip), a folder of rotated files, ``http://HOST:PORT`` of a running server, or several paths, oldest first.
        version: of SGLang, where it is known otherwise; the log's own word goes before.

    Raises:
        CheckpointError: nothing is there.
        UsageError: packed in a way that is not read, or a server that does not answer.
    """
    paths = [path] if isinstance(path, str) else list(path)
    if not paths:
        raise UsageError("no log given")
    if len(paths) == 1 and paths[0].startswith(("http://", "https://")):
        from eagle3diag.serving.endpoint import fetch

        return _documents(paths[0], fetch(paths[0]), version)
    files = tuple(f for p in paths for f in log_files(p))
    single = _whole(files) if len(files) == 1 else None
    if single is not None:
        return _documents(paths[0], [(files[0], single)], version)
    return _stream(paths[0], files, version)


def read_bytes(data: bytes, name: str = "log") -> ServingLog:
    """The same from memory."""
    from eagle3diag.serving.gathered import Gathered

    gathered = Gathered(name, (name,))
    _one(gathered, name, data)
    return gathered.result()


def _whole(files: tuple[str, ...]) -> bytes | None:
    """The content of a file that is one document (JSON or metrics), None for lines."""
    from eagle3diag.serving.prometheus import looks_like

    at = Path(files[0])
    with at.open("rb") as f:
        head = f.read(_PEEK)
    if head[:2] == b"\x1f\x8b":
        import gzip
        import zlib

        try:
            with gzip.open(at) as packed:
                head = packed.read(_PEEK)
                if not (_is_json(head) or looks_like(head)):
                    return None
                return head + packed.read(_DOCUMENT)
        except (EOFError, OSError, zlib.error):
            return None
    wide = wide_code(head)
    if wide:
        head = head.decode(wide, "replace").encode()
    if not (_is_json(head) or looks_like(head)) or at.stat().st_size > _DOCUMENT or _log_lines(head):
        return None
    data = at.read_bytes()
    return data.decode(wide, "replace").encode() if wide else data


def _is_json(head: bytes) -> bool:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] == b"{":
        return start[1:].lstrip()[:1] in (b'"', b"}")
    return start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b"]")


def _log_lines(head: bytes) -> bool:
    """Whether a text is JSON line by line, and holds log lines (Docker's, a structured logger's) and no metrics of requests."""
    first, _, rest = head.partition(b"\n")
    if not rest.strip() or any(mark in head for mark in _JSON_MARKS):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _documents(path: str, parts: Sequence[tuple[str, bytes]], version: str | None) -> ServingLog:
    from eagle3diag.serving.gathered import Gathered

    gathered = Gathered(path, tuple(name for name, _ in parts), version)
    for name, data in parts:
        _one(gathered, name, data)
    return gathered.result()


def _one(gathered: Gathered, name: str, data: bytes) -> None:
    """One document in memory, or lines."""
    from eagle3diag.serving.prometheus import looks_like

    gathered.bytes += len(data)
    if looks_like(data[:_PEEK]):
        gathered.scraped(data.decode("utf-8", "replace"))
        return
    if _is_json(data[:_PEEK]):
        text = data.decode("utf-8-sig", "replace")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if document is not None:
            if not gathered.document(document) and not _printed(gathered, document):
                from eagle3diag.serving.training import training_of

                gathered.training = gathered.training or training_of(document, escaped(Path(name).name))
            return
    lines(gathered, plain(data), head=True, last=not data.endswith(b"\n"))
    if not gathered.tally.formats and _is_json(data[:_PEEK]):  # documents one after another, or one that breaks off
        for one in _objects(text):
            gathered.document(one)
    _trained(gathered, data[-_PEEK:], name)


def _printed(gathered: Gathered, document: Any) -> bool:
    """Log lines held as strings in a document (a log service's export)."""
    held: list[Any] = [document]
    found: list[str] = []
    while held and len(found) < 1_000_000:
        one = held.pop()
        if isinstance(one, str) and "accept" in one:
            found.append(one)
        elif isinstance(one, (dict, list)):
            held += reversed(list(one.values()) if isinstance(one, dict) else one)
    if found:
        lines(gathered, plain("\n".join(found).encode("utf-8", "replace")), head=True, last=False)
    return bool(gathered.tally.formats)


def _objects(text: str) -> Iterator[Any]:
    """The JSON objects in a text, one after another; what lies between them, and one that breaks off, is passed over."""
    decode, at = json.JSONDecoder().raw_decode, text.find("{")
    misses = 0
    while at >= 0 and misses < 100:
        try:
            one, end = decode(text, at)
        except (ValueError, RecursionError):
            misses += 1
            end = at + 1
        else:
            yield one
        at = text.find("{", end)


def _stream(path: str, files: tuple[str, ...], version: str | None) -> ServingLog:
    from eagle3diag.serving.gathered import Gathered

    gathered = Gathered(path, files, version)
    gathered.bytes = sum(Path(f).stat().st_size for f in files)
    tail = b""
    for block in blocks(files, gathered.notes):
        lines(gathered, block.data, head=block.head, last=block.last)
        if block.head and not gathered.tally.formats:
            tail = (tail + block.data)[-_PEEK:]
    _trained(gathered, tail, path)
    return gathered.result()


def _trained(gathered: Gathered, data: bytes, name: str) -> None:
    """Training metrics printed in a log that holds nothing else."""
    if gathered.tally.formats or gathered.training is not None or b"acc" not in data:
        return
    from eagle3diag.serving.training import training_text

    gathered.training = training_text(data.decode("utf-8", "replace"), escaped(Path(name).name))


def lines(gathered: Gathered, data: bytes, *, head: bool, last: bool) -> None:
    """A block of lines into the sums."""
    from eagle3diag.serving.lines_vllm import throughputs, v0_lines
    from eagle3diag.serving.scripts import read_scripts
    from eagle3diag.serving.tally import FINE

    tally = gathered.tally
    fine = tally.windows + tally.lines < FINE
    if head:
        gathered.facts.scan(data)
    count = 0 if head else data.count(b"\n")
    readers = (_of_vllm, _of_sglang) if tally.lines > tally.windows else (_of_sglang, _of_vllm)  # what came so far goes first
    for read in readers:
        if read(tally, data, fine, last) == count > 0:
            return  # every line was one of these
    gathered.speeds(throughputs(data))
    gathered.v0 += v0_lines(data)[-1:]
    if any(mark in data for mark in _SCRIPT_MARKS):
        read_scripts(data, tally, gathered.stated)
    if any(mark in data for mark in _JSON_MARKS):
        _embedded(gathered, data)


def _of_sglang(tally: Tally, data: bytes, fine: bool, last: bool) -> int:
    """SGLang's decode lines into the sums, and how many there were."""
    from eagle3diag.serving.lines_sglang import sglang_windows

    windows = sglang_windows(data, fine=fine)
    if windows is None:
        return 0
    tally.add_windows(windows)
    return len(windows.length)


def _of_vllm(tally: Tally, data: bytes, fine: bool, last: bool) -> int:
    """vLLM's metrics lines into the sums, and how many there were."""
    from eagle3diag.serving.lines_vllm import vllm_counts

    before = tally.lines
    for counts in vllm_counts(data, fine=fine, last=last):
        tally.add_counts(counts, "vLLM SpecDecoding line")
    return tally.lines - before


def _embedded(gathered: Gathered, data: bytes) -> None:
    """JSON documents, one a line, or dicts that an engine's request log prints."""
    from eagle3diag.serving.responses import literal

    for line in data.split(b"\n"):
        if not any(mark in line for mark in _JSON_MARKS):
            continue
        start = line.find(b"{")
        text = line[start:].decode("utf-8", "replace") if start >= 0 else ""
        if gathered.document(list(_objects(text))):
            continue
        at = text.find("'meta_info'")
        inner = text[text.find("{", at) :] if at >= 0 else text
        inner = inner[: _closing(inner)]
        found = literal(inner) if len(inner) < 200_000 else None
        if found is not None:
            gathered.document(found)


def _closing(text: str) -> int:
    """Where the first bracket of ``text`` closes; 0 where it does not."""
    depth = 0
    for i, c in enumerate(text[:200_000]):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return i + 1 if c == "}" else 0
    return 0
