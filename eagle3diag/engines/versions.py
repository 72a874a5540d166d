"""Comparing engine releases, in the few spellings engines use: ``0.4.5``, ``0.5.0rc2``, ``0.5.4.post3``, ``0.10.1.1``.

A parsed version is a tuple that orders as PEP 440 does: development < alpha < beta < candidate < final < post. A leading ``v`` and a local
part (``+cu128``) are accepted and do not count. No packaging library, no pattern compiled at import: every ``check`` passes here.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3diag.errors import UsageError, escaped

__all__ = ["Version", "at_least", "nearest", "parse", "within"]

Version = tuple[tuple[int, ...], int, int, int, int]

_LONGEST = 48  # characters; also keeps int() away from absurd digit runs
_PHASES = {"dev": 0, "a": 1, "alpha": 1, "b": 2, "beta": 2, "c": 3, "rc": 3, "pre": 3}
_FINAL = 4


def parse(version: str) -> Version:
    """A release as an ordered tuple ``(numbers, phase, phase number, post, dev)``; trailing zeros of the numbers do not count.

    Raises:
        UsageError: not a version.
    """
    text = version.strip().lower()
    body = text[1:] if text.startswith("v") else text
    tokens = _tokens(body.partition("+")[0]) if len(body) <= _LONGEST else []
    numbers: list[int] = []
    while tokens and tokens[0].isdigit():
        numbers.append(int(tokens.pop(0)))
    phase, nth, post, dev = _FINAL, 0, -1, 1 << 60
    ok = bool(numbers)
    while tokens and ok:
        word = tokens.pop(0)
        number = int(tokens.pop(0)) if tokens and tokens[0].isdigit() else 0
        if word == "post":
            post = number
        elif word == "dev" and (phase < _FINAL or post >= 0):
            dev = number
        elif word in _PHASES and phase == _FINAL and post < 0:
            phase, nth = _PHASES[word], number
        else:
            ok = False
    if not ok:
        raise UsageError(f"{escaped(version)!r} is no version; write it like 0.5.9, 0.5.0rc2 or 0.5.4.post3")
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), phase, nth, post, dev


def _tokens(text: str) -> list[str]:
    """Runs of ASCII digits and of letters; ``.``, ``-`` and ``_`` separate; empty where anything else, or an empty part, occurs."""
    found: list[str] = []
    for part in text.replace("-", ".").replace("_", ".").split("."):
        if not part or not part.isascii() or not part.isalnum():
            return []
        run = part[0]
        for c in part[1:]:
            if c.isdigit() != run[-1].isdigit():
                found.append(run)
                run = c
            else:
                run += c
        found.append(run)
    return found


def at_least(version: str, since: str) -> bool:
    """Whether ``version`` is ``since`` or newer."""
    return parse(version) >= parse(since)


def within(version: str, since: str | None, until: str | None) -> bool:
    """Whether ``since <= version <= until``; None leaves that side open."""
    v = parse(version)
    return (since is None or v >= parse(since)) and (until is None or v <= parse(until))


def nearest(version: str, releases: Sequence[str]) -> str:
    """The newest of ``releases`` that is not newer than ``version``, else the oldest of them.

    Raises:
        UsageError: ``version`` is no version; the message gives the recorded range.
    """
    ordered = sorted(releases, key=parse)
    try:
        asked = parse(version)
    except UsageError:
        raise UsageError(
            f"{escaped(version)!r} is no version; recorded are {ordered[0]} to {ordered[-1]}, for example {ordered[-1]}"
        ) from None
    older = [r for r in ordered if parse(r) <= asked]
    return older[-1] if older else ordered[0]
