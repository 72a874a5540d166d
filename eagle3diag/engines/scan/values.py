"""Values the hook walker computes with: numbers and lists as Python has them, parts of the model by name, and what is unknown."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle3diag.engines.scan.classes import ClassRef

__all__ = ["PLAIN", "UNKNOWN", "Bound", "Class", "Layer", "Layers", "Thing", "Unknown", "binary", "compare", "fixed_text"]


class Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()


@dataclass(frozen=True, slots=True)
class Thing:
    """Part of the model, by its path from the target class (``self.language_model.model``), with its class where known."""

    ref: ClassRef | None
    path: str


@dataclass(frozen=True, slots=True)
class Layers:
    """The list of decoder layers of a part."""

    owner: Thing


@dataclass(frozen=True, slots=True)
class Layer:
    owner: Thing
    index: int


@dataclass(frozen=True, slots=True)
class Bound:
    """A method of a part; ``above`` where it is reached by ``super()``."""

    thing: Thing
    name: str
    above: ClassRef | None = None


@dataclass(frozen=True, slots=True)
class Class:
    name: str


PLAIN: dict[str, Callable[..., Any]] = {
    "list": lambda *a: list(*a),
    "tuple": lambda *a: list(*a),
    "set": lambda *a: list(dict.fromkeys(*a)),
    "frozenset": lambda *a: list(dict.fromkeys(*a)),
    "sorted": lambda a, *_: sorted(a),
    "reversed": lambda a: list(reversed(a)),
    "max": max,
    "min": min,
    "int": int,
    "abs": abs,
    "sum": sum,
    "range": lambda *a: list(range(*a)),
    "enumerate": lambda *a: [list(p) for p in enumerate(*a)],
    "zip": lambda *a: [list(p) for p in zip(*a, strict=False)],
    "any": any,
    "all": all,
    "bool": bool,
}


def fixed_text(node: ast.expr | None) -> str:
    """The fixed text of a message."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{…}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        return fixed_text(node.left) + fixed_text(node.right)
    return ""


def binary(op: ast.operator, a: Any, b: Any) -> Any:
    if isinstance(a, list) and isinstance(b, list) and isinstance(op, ast.Add):
        return a + b
    if not isinstance(a, int) or not isinstance(b, int) or max(abs(a), abs(b)) > 1 << 40:
        return UNKNOWN
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.FloorDiv() if b:
            return a // b
        case ast.Mod() if b:
            return a % b
    return UNKNOWN


def compare(op: ast.cmpop, a: Any, b: Any) -> Any:
    if isinstance(op, ast.Is | ast.IsNot) and (a is None or b is None):
        if UNKNOWN in (a, b):
            return UNKNOWN
        return (a is b) == isinstance(op, ast.Is)
    if isinstance(a, Unknown | Thing | Class) or isinstance(b, Unknown | Thing | Class):
        return UNKNOWN
    try:
        match op:
            case ast.Eq():
                return bool(a == b)
            case ast.NotEq():
                return bool(a != b)
            case ast.Lt():
                return bool(a < b)
            case ast.LtE():
                return bool(a <= b)
            case ast.Gt():
                return bool(a > b)
            case ast.GtE():
                return bool(a >= b)
            case ast.In():
                return a in b
            case ast.NotIn():
                return a not in b
    except TypeError:
        return UNKNOWN
    return UNKNOWN
