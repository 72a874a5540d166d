"""What a capture runs over: prompts, with their answers where they have one.

A text file holds one prompt per line; a JSON-lines or JSON file holds objects with ``messages`` or ``conversations`` (the last
assistant turn is the answer), ``prompt`` and ``response``, ``text``, or ``input_ids`` and ``prompt_tokens``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3diag.checkpoint.rawfile import shown, whole_text
from eagle3diag.errors import CheckpointError

__all__ = ["Text", "read_texts", "text_of", "tokenised"]

_LIMIT = 1 << 30  # bytes of a text file
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text.

    Attributes:
        messages: (role, content) turns in front of the answer.
        answer: the answer, if the text has one; the target writes it otherwise.
        raw: plain text, taken as it is instead of turns.
        ids: token ids, taken as they are.
        prompt_tokens: with ``ids``, how many of them are the prompt.
    """

    messages: tuple[tuple[str, str], ...] = ()
    answer: str | None = None
    raw: str | None = None
    ids: tuple[int, ...] = ()
    prompt_tokens: int = 0

    def key(self) -> dict[str, Any]:
        """What identifies it."""
        return asdict(self)


def text_of(given: object, where: str = "text") -> Text:
    """A ``Text`` from a prompt, a list of ids, or an object as a JSON line holds one.

    Raises:
        CheckpointError: nothing in it is a text.
    """
    if isinstance(given, Text):
        return given
    if isinstance(given, str) and given.strip():
        return Text(messages=(("user", given),))
    if isinstance(given, Sequence) and given and all(type(x) is int and x >= 0 for x in given):
        return Text(ids=tuple(given), prompt_tokens=len(given))
    if isinstance(given, Mapping):
        turns = given.get("messages", given.get("conversations"))
        if isinstance(turns, list):
            return _of_turns(turns, where)
        prompt, answer = given.get("prompt"), given.get("response", given.get("answer", given.get("completion")))
        if isinstance(prompt, str) and prompt:
            return Text(messages=(("user", prompt),), answer=answer if isinstance(answer, str) and answer else None)
        ids, count = given.get("input_ids"), given.get("prompt_tokens")
        if isinstance(ids, list) and ids and all(type(x) is int and x >= 0 for x in ids):
            return Text(ids=tuple(ids), prompt_tokens=count if type(count) is int and 0 < count <= len(ids) else len(ids))
        if isinstance(given.get("text"), str) and given["text"]:
            return Text(raw=given["text"])
    raise CheckpointError(f"{where}: no text; give messages, prompt and response, text, or input_ids")


def _of_turns(turns: list[Any], where: str) -> Text:
    found: list[tuple[str, str]] = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise CheckpointError(f"{where}: a turn without role and text content; only texts are captured")
        found.append((_ROLES.get(role, role), content))
    answer = found.pop()[1] if found and found[-1][0] == "assistant" else None
    if not found:
        raise CheckpointError(f"{where}: no turn in front of the answer")
    return Text(messages=tuple(found), answer=answer)


def read_texts(path: Path) -> list[Text]:
    """The texts of a file.

    Raises:
        CheckpointError: unreadable, no text in it, or a line that is none.
    """
    where = shown(path)
    raw = whole_text(path, _LIMIT, "a file of texts")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start:,}") from None
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix in (".json", ".jsonl") or (lines and lines[0][1].lstrip().startswith(('{"', "[{"))):
        if text.lstrip().startswith("["):
            held = _parsed(text, where)
            return _some([text_of(x, f"{where}: entry {i}") for i, x in enumerate(held)], where)
        return _some([text_of(_parsed(line, f"{where}: line {i}"), f"{where}: line {i}") for i, line in lines], where)
    return _some([Text(messages=(("user", line.strip()),)) for _, line in lines], where)


def _some(texts: list[Text], where: str) -> list[Text]:
    if not texts:
        raise CheckpointError(f"{where}: no text in it; write one prompt per line")
    return texts


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{where}: not readable as JSON") from None


def tokenised(text: Text, tokenizer: Any, *, chat: bool) -> tuple[list[int], list[int] | None]:
    """(prompt ids, answer ids or None where the target is to write it).

    Args:
        text: what to tokenise.
        tokenizer: of the target (transformers); None where only ids are given.
        chat: put prompts through the chat template, if the tokenizer has one.

    Raises:
        CheckpointError: a text and no tokenizer.
    """
    if text.ids:
        prompt, answer = list(text.ids[: text.prompt_tokens]), list(text.ids[text.prompt_tokens :])
        return prompt, answer or None
    if tokenizer is None:
        raise CheckpointError("the target's folder has no tokenizer; give token ids, or put the tokenizer's files beside the weights")
    if text.raw is not None:
        ids = list(tokenizer(text.raw).input_ids)
        return ids[:1], ids[1:]
    if chat and getattr(tokenizer, "chat_template", None):
        turns = [{"role": role, "content": content} for role, content in text.messages]
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        prompt = list(tokenizer(rendered, add_special_tokens=False).input_ids)
    else:
        prompt = list(tokenizer("\n".join(content for _, content in text.messages)).input_ids)
    if text.answer is None:
        return prompt, None
    answer = list(tokenizer(text.answer, add_special_tokens=False).input_ids)
    end = getattr(tokenizer, "eos_token_id", None)
    return prompt, answer + ([end] if isinstance(end, int) else [])
