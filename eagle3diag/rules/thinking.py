"""Ids of the tokens that open and close a target's thinking, where a file or a known vocabulary tells them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3diag.errors import CheckpointError
from eagle3diag.rules.model import Case

__all__ = ["Tags", "thinking_tags"]

_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<seed:think>", "</seed:think>"),
)
_FILES = ("added_tokens.json", "tokenizer_config.json", "tokenizer.json")
_MOST_BYTES = 64 << 20
#: (family of model_type, vocabulary) -> ids, after the tokenizers' own added tokens
_KNOWN = {("qwen3", 151936): (151667, 151668), ("deepseek_v3", 129280): (128798, 128799)}


@dataclass(frozen=True, slots=True)
class Tags:
    """Ids of the opening and closing token, and where they were found."""

    ids: tuple[int, int]
    source: str


def thinking_tags(case: Case) -> Tags | None:
    """From the dump's metadata, a tokenizer beside the target or the draft, or a known vocabulary; None where nobody says."""
    if case.dump is not None and "think_token_ids" in case.dump.metadata:
        try:
            ids = json.loads(case.dump.metadata["think_token_ids"])
        except ValueError:
            ids = None
        if isinstance(ids, list) and len(ids) == 2 and all(type(i) is int for i in ids):
            return Tags((ids[0], ids[1]), "metadata think_token_ids")
    for folder in _folders(case):
        for file in _FILES:
            tokens = dict(_tokens(folder / file))
            for opens, closes in _PAIRS:
                if opens in tokens and closes in tokens:
                    return Tags((tokens[opens], tokens[closes]), f"{file}: {opens} {closes}")
    target = case.target
    if target is not None:
        kind, vocab = target.model_type.value or "", target.vocab_size.value
        for (family, size), pair in _KNOWN.items():
            if kind.startswith(family) and vocab == size:
                return Tags(pair, f"vocabulary of {family}")
    return None


def _folders(case: Case) -> Iterator[Path]:
    paths = [case.target.path] if case.target is not None else []
    if not case.draft.remote:
        paths.append(case.draft.path)
    for path in paths:
        at = Path(path)
        yield at if at.is_dir() else at.parent


def _tokens(path: Path) -> Iterator[tuple[str, int]]:
    """Added tokens of one tokenizer file, whatever its layout; nothing where there is none or it cannot be read."""
    from eagle3diag.checkpoint.strictjson import parse

    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return
        data = parse(path.read_text("utf-8", "replace"), path.name, "tokenizer file")
    except (OSError, CheckpointError):
        return
    if not isinstance(data, dict):
        return
    for token, id_ in data.items():
        if isinstance(id_, int) and not isinstance(id_, bool):
            yield token, id_
    decoder = data.get("added_tokens_decoder")
    for id_, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and str(id_).isdecimal():
            yield entry["content"], int(id_)
    added = data.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and isinstance(entry.get("id"), int):
            yield entry["content"], entry["id"]
