"""What a notebook's parameters cell promises, and values held to it: nothing unknown, nothing of another type, each refused by name.

The cell is the only declaration: ``name: type = default  # help``, one a line. `notebooks.run` holds what it is given to it before a kernel
starts; a notebook started by papermill or by hand does the same in its first cell, through `accept`.
"""

from __future__ import annotations

import ast
import io
import math
import os
import tokenize
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3diag.errors import UsageError, escaped

__all__ = ["TYPES", "Parameter", "accept", "declared", "fitted"]

TYPES = {"str": str, "int": int, "float": float, "bool": bool}
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
#: how papermill begins the cell it puts behind the parameters cell
_INJECTED = "# Parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One line of a parameters cell: ``name: Optional[str] = None  # help``."""

    name: str
    type: str  #: ``str``, ``int``, ``float`` or ``bool``
    optional: bool
    default: Any
    help: str


def declared(source: str) -> tuple[Parameter, ...]:
    """The parameters a cell declares, in its order; none for a cell that declares none."""
    comments = {
        t.start[0]: t.string.lstrip("# ") for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT
    }
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            kind = ast.unparse(node.annotation)
            optional = kind.startswith("Optional[")
            found.append(
                Parameter(
                    name=node.target.id,
                    type=kind[len("Optional[") : -1] if optional else kind,
                    optional=optional,
                    default=ast.literal_eval(node.value),
                    help=comments.get(node.lineno, ""),
                )
            )
    return tuple(found)


def fitted(known: Sequence[Parameter], given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``given`` with every value in the type its parameter has.

    Args:
        name: of the notebook, for the message.

    Raises:
        UsageError: an unknown name, or a value that does not fit, by name.
    """
    by_name = {p.name: p for p in known}
    unknown = [k for k in given if k not in by_name]
    if unknown:
        raise UsageError(f"{name} has no parameter {', '.join(map(escaped, unknown))}: it takes {', '.join(by_name)}")
    return {k: _fitted(by_name[k], v) for k, v in given.items()}


def _fitted(parameter: Parameter, value: Any) -> Any:
    kind: Any = TYPES[parameter.type]
    if value is None or (parameter.optional and value == "None"):
        if parameter.optional:
            return None
    elif kind is bool and isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    elif type(value) is kind or (kind is float and type(value) is int):
        _encodable(parameter.name, value)
        if kind is not float or math.isfinite(value):
            return kind(value)
    elif isinstance(value, str) and kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    wanted = f"{parameter.type}{' or None' if parameter.optional else ''}"
    hint = "; papermill reads numbers and true or false out of -p, its -r keeps text as it is" if kind is str and value is not None else ""
    raise UsageError(f"parameter {parameter.name} is {escaped(repr(value))} ({type(value).__name__}), expected {wanted}{hint}")


def _encodable(name: str, value: Any) -> None:
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise UsageError(f"parameter {name} is {escaped(value)}: a notebook cannot hold a name that is not valid UTF-8") from None


def accept(space: MutableMapping[str, Any]) -> dict[str, Any]:
    """What the first cell of a notebook calls with ``globals()``: its parameters in their types, or a refusal by name.

    The declaration is the last cell run that declares any; papermill only warns of a name it does not know and puts any value in, so what
    it injected is looked through here. A path that begins with ``~/`` becomes one below the home folder, as a kept notebook spells it.

    Returns:
        The parameters by name, as they were given.

    Raises:
        UsageError: an unknown name, or a value that does not fit.
    """
    cells = [str(c) for c in space.get("In", ())]
    at = max((k for k, cell in enumerate(cells) if _declares(cell)), default=None)
    if at is None:
        return {}
    known = declared(cells[at])
    injected = [name for cell in cells[at + 1 :] if cell.startswith(_INJECTED) for name in _assigned(cell)]
    names = dict.fromkeys([*(p.name for p in known), *injected])
    given = fitted(known, {n: space[n] for n in names if n in space}, "this notebook")
    space.update({n: os.path.expanduser(v) if isinstance(v, str) and v.startswith("~/") else v for n, v in given.items()})  # noqa: PTH111
    return given


def _declares(cell: str) -> bool:
    try:
        return bool(declared(cell))
    except (SyntaxError, ValueError, tokenize.TokenError):  # a cell with a magic, or an annotation of another kind
        return False


def _assigned(cell: str) -> list[str]:
    return [t.id for node in ast.parse(cell).body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)]
