"""SGLang's answers with ``return_hidden_states``: one response, a list of them, or one per line.

``meta_info.hidden_states`` holds the prompt's states as one list of rows and then one row per generated token that was fed back, so one
row less than tokens in all. The server names the ids of the answer (``output_ids``); those of the prompt stand in a saved request
(``input_ids``) or its log-probabilities, and where nothing names them the prompt's rows are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3diag.checkpoint.rawfile import opened, read_into, shown
from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.hidden.formats_files import Array, Contents

if TYPE_CHECKING:
    import torch

__all__ = ["json_parts", "may_hold_states", "response_parts"]

_LIMIT = 2 << 30  # bytes of one document: 8,192 rows of 8,192 numbers in words
_BLOCK = 1 << 20


def may_hold_states(path: Path) -> bool:
    """Whether a JSON file names ``meta_info`` anywhere, so that configs and indices are passed over unparsed."""
    with opened(path) as (fd, identity):
        at, tail, buffer = 0, b"", memoryview(bytearray(_BLOCK))
        while at < identity.size:
            got = read_into(fd, at, buffer)
            if got == 0:
                break
            block = tail + bytes(buffer[:got])
            if b'"meta_info"' in block:
                return True
            tail, at = block[-16:], at + got
    return False


def json_parts(path: Path, name: str, part: int | None = None) -> Iterator[Contents]:
    """The responses in a JSON or JSON-lines file.

    Args:
        path: the file.
        name: how messages name it.
        part: the one wanted: its index in a list, or the byte its line starts at.

    Raises:
        CheckpointError: not JSON, or no SGLang response with hidden states.
    """
    where = shown(path)
    with opened(path) as (fd, identity), os.fdopen(fd, "rb", closefd=False) as raw:
        head = raw.read(4096)
        first = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if first == b"[":
            raw.seek(0)
            answers = _load(_limited(raw.read(_LIMIT + 1), where), where)
            for index in range(len(answers)) if part is None else (part,):
                if index >= len(answers):
                    raise CheckpointError(f"{where}: changed since the dump was opened; run again when nothing writes to it")
                yield _response(path, name, f"{where}: entry {index}", answers[index], index)
            return
        at = part or 0
        whole = not head[:at].strip()  # the first thing in it may be one document over many lines
        while at < identity.size:
            raw.seek(at)
            line = _limited(raw.readline(_LIMIT + 1), where)
            if line.strip():
                if whole and not _complete(line):
                    line += _limited(raw.read(_LIMIT + 1 - len(line)), where)
                whole = False
                label = where if at == 0 and len(line) == identity.size else f"{where}: line at byte {at:,}"
                yield _response(path, name, label, _load(line, label), at)
                if part is not None:
                    return
            at += len(line)


def _limited(text: bytes, where: str) -> bytes:
    if len(text) > _LIMIT:
        raise CheckpointError(f"{where}: one JSON document of more than {_LIMIT:,} bytes; write one response per line")
    return text


def _complete(line: bytes) -> bool:
    """Whether a first line closes as many braces as it opens; texts in it may miscount, so parsing has the last word."""
    if line.count(b"{") > line.count(b"}") and not line.rstrip().endswith(b"}"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _load(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise CheckpointError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:  # also bytes that are no UTF-8, and integers of thousands of digits
        raise CheckpointError(f"{where}: not readable as JSON ({escaped(error, 80)}); fetch the file again") from None


def response_parts(answer: Any, where: str) -> Contents:
    """One response that is in memory, as a server gives it.

    Raises:
        CheckpointError: no hidden states or no token ids in it.
    """
    return _response(Path(where), where, where, answer, 0)


def _response(path: Path, name: str, where: str, answer: Any, part: int) -> Contents:
    import torch

    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    stored = meta.get("hidden_states") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or not isinstance(stored, list) or not stored:
        raise CheckpointError(f'{where}: no meta_info.hidden_states; ask the server with "return_hidden_states": true')
    prompt, answered = _prompt_ids(answer, meta), _answer_ids(answer, meta)
    rows: list[list[float]] = []
    prompt_rows = 0
    for entry in stored:
        nested = isinstance(entry, list) and bool(entry) and isinstance(entry[0], list)
        if nested and not rows:
            prompt_rows = len(entry)
        rows += entry if nested else [entry]
    states = _states(rows, where)
    tokens, note = [*prompt, *answered], ""
    if not tokens:
        raise CheckpointError(f"{where}: {len(rows)} rows of states and no token ids; save input_ids and output_ids with the answer")
    if not prompt and prompt_rows and answered:
        states, tokens = states[prompt_rows:], list(answered)
        note = f"the ids of the prompt are not in the answer: its {prompt_rows} rows are left out"
    if answered and len(tokens) == len(states) + 1:
        tokens.pop()  # the last token was never fed back
    if not len(states):
        raise CheckpointError(
            f"{where}: states of {prompt_rows} prompt rows and none of the answer, and no prompt ids; save input_ids with it"
        )
    arrays = {"input_ids": torch.tensor(tokens, dtype=torch.int64), "hidden_states": states}
    return Contents(
        path=path,
        name=name,
        kind="json",
        arrays={k: Array("I64" if k == "input_ids" else "F32", tuple(a.shape)) for k, a in arrays.items()},
        reader=arrays.__getitem__,
        metadata={"note": note} if note else {},
        values={k: v for k, v in meta.items() if isinstance(v, (int, float, str))},
        part=part,
    )


def _states(rows: list[list[float]], where: str) -> torch.Tensor:
    import torch

    widths = {len(r) if isinstance(r, list) else -1 for r in rows}
    if len(widths) != 1 or widths == {-1} or widths == {0}:
        raise CheckpointError(f"{where}: rows of {len(widths)} different widths in meta_info.hidden_states, expected one")
    try:
        return torch.tensor(rows, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        pass
    try:  # NaN leaves the server as null
        return torch.tensor([[float("nan") if x is None else x for x in row] for row in rows], dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise CheckpointError(f"{where}: meta_info.hidden_states holds other things than numbers") from None


def _ids(value: Any) -> list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return value if isinstance(value, list) and all(type(x) is int and abs(x) < 1 << 62 for x in value) else []


def _from_logprobs(value: Any) -> list[int]:
    """Ids of ``[[logprob, id, text], …]``."""
    return _ids([x[1] if isinstance(x, list) and len(x) > 1 else None for x in value]) if isinstance(value, list) else []


def _prompt_ids(answer: dict[str, Any], meta: dict[str, Any]) -> list[int]:
    for key in ("input_ids", "prompt_token_ids", "prompt_ids"):
        for holder in (answer, meta):
            if found := _ids(holder.get(key)):
                return found
    found = _from_logprobs(meta.get("input_token_logprobs"))
    return found if len(found) == meta.get("prompt_tokens", len(found)) else []


def _answer_ids(answer: dict[str, Any], meta: dict[str, Any]) -> list[int]:
    for key in ("output_ids", "token_ids"):
        for holder in (answer, meta):
            if found := _ids(holder.get(key)):
                return found
    return _from_logprobs(meta.get("output_token_logprobs"))
