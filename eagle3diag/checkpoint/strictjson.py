"""JSON from a stranger: what Python's parser lets through, or dies of, ends here in one line.

Python accepts NaN and Infinity, keeps the last of two equal keys in silence, raises a bare ``ValueError`` for an integer
of 5,000 digits and ``RecursionError`` for 200,000 nested lists. The safetensors loader refuses all of these but the second.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from eagle3diag.errors import CheckpointError, escaped

__all__ = ["Duplicates", "decode", "depth", "kind", "parse"]

_MAX_DIGITS = 40  # more than any 64-bit number; longer ones would only cost time
_MAX_DEPTH = 127  # serde_json, which the loader uses, stops at 128


class Duplicates(dict[str, Any]):
    """An object in which keys stood more than once; ``repeated`` names them. The last value of each is kept."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for key, _ in pairs:
        if key in seen:
            twice[key] = None
        seen.add(key)
    result = Duplicates(found)
    result.repeated = tuple(twice)
    return result


class _Refused(Exception):
    pass


def _int(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise _Refused(f"contains a {len(text.lstrip('-'))}-digit integer")
    return -0.0 if text == "-0" else int(text)  # the loader reads -0 as a float, so it is no size


def _float(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise _Refused(f"contains the number {escaped(text, 20)}, which is out of range")
    return value


def _constant(text: str) -> NoReturn:
    raise _Refused(f"is not JSON: contains {text}")


def decode(raw: bytes | bytearray, where: str, what: str) -> str:
    """``raw`` as UTF-8.

    Raises:
        CheckpointError: with the first bad byte's position.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: {what} is not UTF-8 at byte {error.start:,}; fetch the file again") from None


def parse(text: str, where: str, what: str) -> Any:
    """One JSON value; objects with repeated keys come back as ``Duplicates``.

    Args:
        text: the JSON text.
        where: the path, as shown, that starts every message.
        what: ``header``, ``index`` … the subject of the message.

    Raises:
        CheckpointError: not JSON by the standard, nested too deeply, or with a number no reader can hold.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_constant)
        if "\\u" in text:  # a lone half of a surrogate pair is no text, and no other reader takes it
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except _Refused as error:
        raise CheckpointError(f"{where}: {what} {error}") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{where}: {what} is not JSON: {error.msg.removesuffix(' at')} at byte {len(text[: error.pos].encode('utf-8')):,}"
        ) from None
    except UnicodeEncodeError:
        raise CheckpointError(f"{where}: {what} contains half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None
    except RecursionError:
        raise CheckpointError(f"{where}: {what} JSON is nested too deeply (more than {_MAX_DEPTH} levels)") from None
    return value


def depth(value: Any, limit: int = _MAX_DEPTH) -> int:
    """Levels of nesting of a parsed value, counted up to ``limit + 1``."""
    level, layer = 0, [value]
    while layer and level <= limit:
        layer = (
            [x for v in layer if isinstance(v, (dict, list)) for x in (v.values() if isinstance(v, dict) else v)]
            if any(isinstance(v, (dict, list)) for v in layer)
            else []
        )
        level += bool(layer)
    return level


def kind(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "object"
    return {list: "list", str: "string", int: "number", float: "number"}.get(type(value), "value")
