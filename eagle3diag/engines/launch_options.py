"""Words of a server command -> options by name, without either engine's option table.

A word that follows an option and is no option itself is its value; switches are told by their name. Underscores count as dashes, as
vLLM's parser has it; a unique prefix of an option that matters here is completed, as ``argparse`` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Options", "integer", "not_told", "split_options", "unread_file"]

_SWITCHES = ("enable-", "disable-", "no-", "trust-", "enforce-", "skip-", "async-", "language-only", "is-embedding", "headless")

Options = dict[str, Any]


def split_options(words: Sequence[str], known: Iterable[str]) -> tuple[Options, list[str], list[str]]:
    """Options by long name without dashes, and the words that belong to none.

    Args:
        words: the words after the program.
        known: names whose unique prefixes are completed (``speculative-algo`` -> ``speculative-algorithm``).

    Returns:
        ``(options, positional, given)``: values are text, a list of text where several words follow, or True for a switch; the last
        of repeated options wins. ``given`` lists the names as completed, repeated ones too.
    """
    names = tuple(known)
    options: Options = {}
    positional: list[str] = []
    given: list[str] = []
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not _is_option(word):
            positional.append(word)
            continue
        name, equals, inline = word.partition("=")
        name = _completed(name.lstrip("-") if name.startswith("--") else name, names)
        given.append(name)
        if equals:
            options[name] = inline
            continue
        values: list[str] = []
        while i < len(words) and not _is_option(words[i]) and not (name.startswith(_SWITCHES) and not _is_truth(words[i])):
            values.append(words[i])
            i += 1
        options[name] = True if not values else values[0] if len(values) == 1 else values
    return options, positional, given


def _is_option(word: str) -> bool:
    return re.match(r"--[A-Za-z]|-[A-Za-z]", word) is not None


def _is_truth(word: str) -> bool:
    return word.lower() in ("true", "false", "0", "1", "yes", "no")


def _completed(name: str, known: tuple[str, ...]) -> str:
    """Dashes for underscores (not in the key of a dotted option), and a unique prefix completed."""
    head, dot, key = name.partition(".")
    head = head.replace("_", "-")
    if not dot and head not in known and head.startswith("spec"):
        longer = [k for k in known if k.startswith(head)]
        head = longer[0] if len(longer) == 1 else head
    return head + dot + key


def not_told(value: Any) -> bool:
    """Whether a value is a shell variable nobody assigned, a template's, or a placeholder: ``$STEPS``, ``{{ .steps }}``, ``<steps>``."""
    return isinstance(value, str) and re.search(r"\$|\{\{|^<.*>$", value) is not None


def unread_file(options: Mapping[str, Any]) -> str | None:
    """The file of further options (``--config file.yaml``), which is not read here; None without."""
    value = options.get("config")
    return value if isinstance(value, str) else None


def integer(value: Any) -> tuple[int | None, bool]:
    """An option as a whole number.

    Returns:
        ``(number, readable)``; a shell variable that nobody assigned gives ``(None, True)``: not told, no fault.
    """
    if value is None or not_told(value):
        return None, True
    if isinstance(value, (bool, list)):
        return None, False
    try:
        number = int(str(value).strip().strip(","))
    except ValueError:
        return None, False
    return (number, True) if abs(number) < 1 << 40 else (None, False)
