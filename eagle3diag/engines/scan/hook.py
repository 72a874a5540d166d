"""Run the method that sets the layers to capture, on numbers, without running any of the engine's code.

The rule from configured ids to captured layers is whatever that method says, conditions included, and forks change it. So it is not
matched against known shapes but walked: a small interpreter of its own over the syntax tree knows integers, lists, a dozen builtins and
"an attribute of the model"; everything else is unknown, and an unknown condition counts as not met and is reported. It cannot import,
call or write anything, and stops after a bounded number of steps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from eagle3diag.engines.scan.classes import Classes, ClassRef, Function, dotted
from eagle3diag.engines.scan.values import PLAIN, UNKNOWN, Bound, Class, Layer, Layers, Thing, Unknown, binary, compare, fixed_text

__all__ = ["SetLayers", "set_layers"]

_STEPS = 20_000
_LONG = 100_000  # longest list
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "end_layer")


@dataclass(slots=True)
class SetLayers:
    """What the method did.

    Attributes:
        layers: the list that was stored, in the numbers the model's loop is compared with; None where none was.
        attribute: name of the attribute it was stored in.
        holder: the part it was stored on.
        flagged: layers marked one by one, empty where that is not how it is done.
        indexed: whether single layers were looked up (an id beyond the last raises).
        raised: the error it ends with, ``AssertionError: text``; empty where none.
        unsure: whether something unknown decided a condition.
        returned: what it returned.
    """

    layers: tuple[int, ...] | None = None
    attribute: str = ""
    holder: Thing | None = None
    flagged: tuple[int, ...] = ()
    indexed: bool = False
    raised: str = ""
    unsure: bool = False
    returned: Any = None


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Raised(Exception):
    pass


class _Stop(Exception):
    """More steps than any such method takes."""


def set_layers(classes: Classes, ref: ClassRef, method: str, layers: int, *arguments: Any) -> SetLayers | None:
    """Walk a method of a class.

    Args:
        classes: the source.
        ref: the target class.
        method: ``set_eagle3_layers_to_capture`` …
        layers: decoder layers of the imagined target.
        arguments: integers, lists or None.

    Returns:
        What it did; None where the class has no such method.
    """
    if classes.method(ref, method) is None:
        return None
    walk = _Walk(classes, layers)
    try:
        walk.out.returned = walk.invoke(Bound(Thing(ref, "self"), method), list(arguments), {})
    except _Raised as stop:
        walk.out.raised = str(stop)
    except _Stop:
        walk.out.unsure = True
    if walk.out.layers is None:
        walk.out.unsure = walk.out.unsure or walk.unsure
    walk.out.flagged = tuple(walk.flags)
    return walk.out


@dataclass(slots=True)
class _Walk:
    classes: Classes
    count: int
    out: SetLayers = field(default_factory=SetLayers)
    stores: dict[tuple[str, str], Any] = field(default_factory=dict)
    flags: list[int] = field(default_factory=list)
    steps: int = 0
    depth: int = 0
    unsure: bool = False

    # ------------------------------------------------------------ calls

    def invoke(self, bound: Bound, arguments: list[Any], words: dict[str, Any]) -> Any:
        found = self.classes.method(bound.thing.ref, bound.name, bound.above) if bound.thing.ref is not None else None
        if found is None or self.depth > 12:
            return UNKNOWN
        owner, function = found
        if bound.name == "get_language_model" and "interfaces" in owner.path:  # the interface's own: looks at the modules built
            return self.part(bound.thing, self.classes.marked(bound.thing.ref or owner))
        env: dict[str, Any] = {"self": bound.thing, " owner": owner}
        a = function.args
        names = [p.arg for p in [*a.posonlyargs, *a.args]][1:]
        defaults = dict(zip(reversed(names), reversed(a.defaults), strict=False))
        defaults |= {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
        env |= {n: self.value(d, env) for n, d in defaults.items()}
        env |= dict(zip(names, arguments, strict=False)) | words
        self.depth += 1
        try:
            self.run(function, env)
        except _Return as answer:
            return answer.value
        finally:
            self.depth -= 1
        return None

    def run(self, function: Function, env: dict[str, Any]) -> None:
        self.block(function.body, env)

    def block(self, body: list[ast.stmt], env: dict[str, Any]) -> None:
        for node in body:
            self.statement(node, env)

    # ------------------------------------------------------------ statements

    def statement(self, node: ast.stmt, env: dict[str, Any]) -> None:
        self.tick()
        match node:
            case ast.Return(value=value):
                raise _Return(None if value is None else self.value(value, env))
            case ast.If(test=test, body=body, orelse=orelse):
                self.block(body if self.truth(self.value(test, env)) else orelse, env)
            case ast.Assign(targets=targets, value=value):
                got = self.value(value, env)
                for target in targets:
                    self.store(target, got, env)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self.store(target, self.value(value, env), env)
            case ast.AugAssign(target=target, op=op, value=value):
                load = ast.parse(ast.unparse(target), mode="eval").body
                self.store(target, binary(op, self.value(load, env), self.value(value, env)), env)
            case ast.Expr(value=value):
                self.value(value, env)
            case ast.For(target=target, iter=iterable, body=body):
                for item in self.items(self.value(iterable, env)):
                    self.store(target, item, env)
                    self.block(body, env)
            case ast.With(body=body):
                self.block(body, env)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                try:
                    self.block([*body, *orelse], env)
                except _Raised:
                    if not handlers:
                        raise
                    self.block(handlers[0].body, env)
                self.block(final, env)
            case ast.Raise(exc=exc):
                raise _Raised(self.message(exc, env))
            case ast.Assert(test=test, msg=msg):
                got = self.value(test, env)
                if got is not UNKNOWN and not self.truth(got):
                    raise _Raised("AssertionError" + (f": {fixed_text(msg)}" if msg is not None else ""))
            case ast.ImportFrom(names=names):
                env.update({a.asname or a.name: Class(a.name) for a in names})
            case _:
                pass

    def message(self, exc: ast.expr | None, env: dict[str, Any]) -> str:
        if isinstance(exc, ast.Call):
            text = fixed_text(exc.args[0]) if exc.args else ""
            return f"{dotted(exc.func)}: {text}" if text else dotted(exc.func)
        return dotted(exc) or "Exception"

    def store(self, target: ast.expr, value: Any, env: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, ast.Attribute):
            self.set(self.value(target.value, env), target.attr, value)
        elif isinstance(target, ast.Tuple) and isinstance(value, list | tuple):
            for t, v in zip(target.elts, value, strict=False):
                self.store(t, v, env)

    def set(self, owner: Any, name: str, value: Any) -> None:
        if isinstance(owner, Layer):
            if value is True:
                self.flags.append(owner.index)
        elif isinstance(owner, Thing):
            self.stores[owner.path, name] = value
            if isinstance(value, list | tuple | set) and all(isinstance(v, int) for v in value):
                self.out.layers, self.out.attribute, self.out.holder = tuple(value), name, owner
                self.out.unsure = self.unsure

    # ------------------------------------------------------------ values

    def tick(self) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise _Stop

    def truth(self, value: Any) -> bool:
        if value is UNKNOWN:
            self.unsure = True
            return False
        return True if isinstance(value, Thing | Layers | Layer | Bound | Class) else bool(value)

    def items(self, value: Any) -> list[Any]:
        if isinstance(value, Layers):
            return [Layer(value.owner, i) for i in range(min(self.count, _LONG))]
        return list(value)[:_LONG] if isinstance(value, list | tuple | set | range) else []

    def part(self, thing: Thing, name: str) -> Any:
        """``thing.name``."""
        if (thing.path, name) in self.stores:
            return self.stores[thing.path, name]
        if name in _COUNTS:
            return self.count
        if name in ("is_last_rank", "is_first_rank"):
            return True
        if name == "start_layer":
            return 0
        if name == "layers":
            inner = self.classes.attribute(thing.ref, name) if thing.ref is not None else None
            if inner is None or self.classes.method(inner, "_set_aux_hidden_state_layers") is None:
                return Layers(thing)
        if thing.ref is not None and self.classes.method(thing.ref, name) is not None:
            return Bound(thing, name)
        inner = self.classes.attribute(thing.ref, name) if thing.ref is not None else None
        return Thing(inner, f"{thing.path}.{name}")

    def has(self, value: Any, name: str) -> Any:
        if isinstance(value, Class) or value is UNKNOWN:
            return UNKNOWN
        if isinstance(value, Thing):
            if (value.path, name) in self.stores or name in _COUNTS or name == "layers":
                return True
            return self.classes.has(value.ref, name) if value.ref is not None else UNKNOWN
        return False

    def value(self, node: ast.expr, env: dict[str, Any]) -> Any:
        self.tick()
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return env.get(name, Class(name))
            case ast.Attribute(value=inner, attr=name):
                return self.attribute(self.value(inner, env), name)
            case ast.BinOp(left=left, op=op, right=right):
                return binary(op, self.value(left, env), self.value(right, env))
            case ast.UnaryOp(op=op, operand=operand):
                got = self.value(operand, env)
                if isinstance(op, ast.Not):
                    return UNKNOWN if got is UNKNOWN else not self.truth(got)
                return -got if isinstance(op, ast.USub) and isinstance(got, int) else UNKNOWN
            case ast.BoolOp(op=op, values=values):
                return self.both(isinstance(op, ast.And), values, env)
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self.compare(self.value(left, env), ops, [self.value(o, env) for o in others])
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self.truth(self.value(test, env)) else orelse, env)
            case ast.List(elts=elts) | ast.Tuple(elts=elts) | ast.Set(elts=elts):
                return self.spread(elts, env)
            case (
                ast.ListComp(elt=elt, generators=generators)
                | ast.GeneratorExp(elt=elt, generators=generators)
                | ast.SetComp(elt=elt, generators=generators)
            ):
                return list(self.comprehension(elt, generators, env))
            case ast.Subscript(value=inner, slice=index):
                return self.subscript(self.value(inner, env), index, env)
            case ast.Call():
                return self.call(node, env)
            case ast.NamedExpr(target=target, value=value):
                got = self.value(value, env)
                self.store(target, got, env)
                return got
            case _:
                return UNKNOWN

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, Thing):
            return self.part(value, name)
        if name in ("is_last_rank", "is_first_rank"):
            return True
        return Class(name) if isinstance(value, Class) else UNKNOWN

    def both(self, conjunction: bool, values: list[ast.expr], env: dict[str, Any]) -> Any:
        got: Any = conjunction
        unknown = False
        for v in values:
            got = self.value(v, env)
            if got is UNKNOWN:
                unknown = True
            elif self.truth(got) is not conjunction:
                return got
        return UNKNOWN if unknown else got

    def compare(self, left: Any, ops: list[ast.cmpop], others: list[Any]) -> Any:
        for op, right in zip(ops, others, strict=True):
            answer = compare(op, left, right)
            if answer is not True:
                return answer
            left = right
        return True

    def spread(self, elts: list[ast.expr], env: dict[str, Any]) -> list[Any]:
        out: list[Any] = []
        for e in elts:
            out += self.items(self.value(e.value, env)) if isinstance(e, ast.Starred) else [self.value(e, env)]
        return out

    def comprehension(self, elt: ast.expr, generators: list[ast.comprehension], env: dict[str, Any]) -> Iterator[Any]:
        if not generators:
            yield self.value(elt, env)
            return
        first, rest = generators[0], generators[1:]
        for item in self.items(self.value(first.iter, env)):
            inner = dict(env)
            self.store(first.target, item, inner)
            if all(self.truth(self.value(c, inner)) for c in first.ifs):
                yield from self.comprehension(elt, rest, inner)

    def subscript(self, value: Any, index: ast.expr, env: dict[str, Any]) -> Any:
        at = self.value(index, env) if not isinstance(index, ast.Slice) else None
        if isinstance(value, Layers) and isinstance(at, int):
            self.out.indexed = True
            if not -self.count <= at < self.count:
                raise _Raised("IndexError: index out of range")
            return Layer(value.owner, at % self.count)
        if isinstance(value, list | tuple) and isinstance(at, int):
            if not -len(value) <= at < len(value):
                raise _Raised("IndexError: list index out of range")
            return value[at]
        if isinstance(value, list | tuple) and isinstance(index, ast.Slice):
            bounds = [None if b is None else self.value(b, env) for b in (index.lower, index.upper, index.step)]
            return list(value)[slice(*bounds)] if all(b is None or isinstance(b, int) for b in bounds) and bounds[2] != 0 else UNKNOWN
        return UNKNOWN

    def call(self, node: ast.Call, env: dict[str, Any]) -> Any:
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call) and dotted(node.func.value.func) == "super":
            target: Any = Bound(env["self"], node.func.attr, env.get(" owner"))
        else:
            target = self.value(node.func, env)
        arguments = self.spread(node.args, env)
        words = {w.arg: self.value(w.value, env) for w in node.keywords if w.arg is not None}
        if isinstance(target, Bound):
            return self.invoke(target, arguments, words)
        if isinstance(target, Class) and isinstance(node.func, ast.Name):
            return self.builtin(target.name, arguments)
        return UNKNOWN

    def builtin(self, name: str, args: list[Any]) -> Any:
        if name == "getattr" and len(args) >= 2:
            there = self.has(args[0], args[1])
            if there is False and len(args) == 3:
                return args[2]
            return self.attribute(args[0], args[1]) if isinstance(args[1], str) else UNKNOWN
        if name == "setattr" and len(args) == 3 and isinstance(args[1], str):
            self.set(args[0], args[1], args[2])
            return None
        if name == "hasattr" and len(args) == 2 and isinstance(args[1], str):
            return self.has(args[0], args[1])
        if name == "isinstance" and len(args) == 2:
            return self.isinstance(args[0], args[1])
        if name == "len" and args:
            return (
                self.count if isinstance(args[0], Layers | Thing) else len(args[0]) if isinstance(args[0], list | tuple | set) else UNKNOWN
            )
        if name in PLAIN and args and not any(isinstance(a, Thing | Class | Bound | Unknown) for a in args):
            values = [self.items(a) if isinstance(a, Layers) else a for a in args]
            if any(isinstance(a, int) and abs(a) > _LONG for a in values):
                return UNKNOWN
            try:
                return PLAIN[name](*values)
            except (TypeError, ValueError):
                return UNKNOWN
        if name == "cast" and len(args) == 2:
            return args[1]
        return UNKNOWN

    def isinstance(self, value: Any, kind: Any) -> Any:
        kinds = kind if isinstance(kind, list) else [kind]
        names = [k.name for k in kinds if isinstance(k, Class)]
        if isinstance(value, Thing):
            if value.ref is None:
                return UNKNOWN
            return bool(set(names) & self.classes.bases(value.ref)) or (UNKNOWN if set(names) & {"Module"} else False)
        plain: dict[str, tuple[type, ...]] = {
            "int": (int,), "list": (list,), "tuple": (tuple, list), "set": (set, list), "str": (str,), "dict": (dict,)
        }  # fmt: skip
        known = [plain[n] for n in names if n in plain]
        return any(isinstance(value, k) for k in known) if known else UNKNOWN
