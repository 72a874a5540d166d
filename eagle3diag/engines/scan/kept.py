"""Where a target's forward keeps auxiliary states: the place in its loop, and what follows from it.

A state kept before the layer with number i runs is HF i, one kept after it HF i + 1; a sum of stream and residual without a guard cannot be
formed before the first layer; a branch kept without the residual is no hidden state at all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from eagle3diag.engines.scan.classes import Classes, ClassRef, calls, dotted
from eagle3diag.engines.scan.hook import SetLayers

__all__ = ["Kept", "constant", "kept_by"]

_FLAG = "_is_layer_to_capture"
_MIXIN = "_maybe_add_hidden_state"


@dataclass(slots=True)
class Kept:
    """How the inner model's forward keeps states.

    ``offset`` is added to a number in the stored list to give the HF index it captures.
    """

    listed: bool = False
    flags: bool = False
    offset: int = 0
    zero: str = "embedding"
    last: bool = False
    branch: bool = False
    short: str = "silent"
    where: tuple[str, ...] = ()


def kept_by(classes: Classes, probe: SetLayers) -> Kept:
    out = Kept()
    holder = probe.holder.ref if probe.holder is not None else None
    if holder is None:
        out.listed = True  # an inner model this scan cannot name: taken to work, and said to be inferred
        return out
    method = classes.method(holder, "forward")
    if method is None:
        return out
    owner, forward = method
    bodies = [(owner, forward)]
    for one, body in bodies:  # grows: methods called on self, and the one above by super()
        for call in calls(body):
            name = dotted(call.func)
            inner = None
            if name.startswith("self.") and name.count(".") == 1:
                inner = classes.method(holder, name[5:])
            elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call) and dotted(call.func.value.func) == "super":
                inner = classes.method(holder, call.func.attr, one)
            if inner is not None and inner[1].name != _MIXIN and inner not in bodies and len(bodies) < 20:
                bodies.append(inner)
    for one, body in bodies:
        _read_loop(classes, holder, one, body, probe.attribute, out)
    out.short = _short(classes, owner, forward)
    return out


def _tests(body: ast.AST, attribute: str) -> Iterator[tuple[ast.AST, ast.expr | None, str]]:
    """``(node, expression compared, how)`` wherever a layer is tested for being one to keep."""
    for node in ast.walk(body):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and dotted(node.comparators[0]).endswith(f".{attribute}"):
            yield node, node.left, "list"
        elif _flag(node):
            yield node, None, "flag"
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(f".{_MIXIN}") and len(node.args) >= 2:
            yield node, node.args[1], "mixin"


def _flag(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return dotted(node.func) == "getattr" and constant(node.args[1:2]) == _FLAG
    return isinstance(node, ast.Attribute) and node.attr == _FLAG and isinstance(node.ctx, ast.Load)


def constant(nodes: list[ast.expr]) -> object:
    return nodes[0].value if nodes and isinstance(nodes[0], ast.Constant) else None


def _read_loop(classes: Classes, holder: ClassRef, owner: ClassRef, body: ast.AST, attribute: str, out: Kept) -> None:
    parents = {child: node for node in ast.walk(body) for child in ast.iter_child_nodes(node)}
    loops = [n for n in ast.walk(body) if isinstance(n, ast.For)]
    last_line = max((n.end_lineno or n.lineno for n in loops), default=0)
    for node, index, how in _tests(body, attribute):
        loop = next((a for a in _above(node, parents) if isinstance(a, ast.For)), None)
        line = getattr(node, "lineno", 0)
        if loop is None:
            if loops and line > last_line:
                out.last = True
            continue
        if not out.where:
            out.where = (f"{owner.path}:{line}",)
        out.flags = out.flags or how == "flag"
        out.listed = out.listed or how != "flag"
        layers = _layer_calls(loop)
        after = bool(layers) and all(line > (c.end_lineno or c.lineno) for c in layers)
        plus = _plus(index)
        out.offset = int(after) - plus
        if how == "mixin":
            guard = classes.method(holder, _MIXIN)
            forks = [n for n in ast.walk(guard[1]) if isinstance(n, ast.IfExp | ast.If)] if guard is not None else []
            plain = any("residual" in ast.unparse(n) for n in forks)
            out.zero = "embedding" if plain else "TypeError"
        else:
            _appended(node, parents, loop, out)
        if after and plus:
            out.last = True


def _above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _layer_calls(loop: ast.For) -> list[ast.Call]:
    names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)} | {"layer", "decoder_layer"}
    return [
        c
        for c in calls(loop)
        if (isinstance(c.func, ast.Name) and c.func.id in names)
        or (isinstance(c.func, ast.Subscript) and dotted(c.func.value).endswith("layers"))
    ]


def _plus(index: ast.expr | None) -> int:
    if isinstance(index, ast.BinOp) and isinstance(index.right, ast.Constant) and isinstance(index.right.value, int):
        return index.right.value if isinstance(index.op, ast.Add) else -index.right.value if isinstance(index.op, ast.Sub) else 0
    return 0


def _appended(node: ast.AST, parents: dict[ast.AST, ast.AST], loop: ast.For, out: Kept) -> None:
    """What is kept where the test is met: the sum of stream and residual, guarded or not, or something handed to the layer."""
    block = next((a for a in _above(node, parents) if isinstance(a, ast.If) and _inside(node, a.test)), None)
    if block is None:  # an argument of the layer call: the layer keeps the stream it has already added up
        return
    for call in calls(block, "append"):
        value = call.args[0] if call.args else None
        if isinstance(value, ast.Name):
            held = [n.value for n in ast.walk(block) if isinstance(n, ast.Assign) and dotted(n.targets[0]) == value.id]
            sums = [v for v in held if _sum(v) is not None]
            value = sums[0] if sums else value
        if value is None:
            continue
        total = _sum(value)
        if total is None:
            target = next((parents.get(c) for c in _layer_calls(loop)), None)
            given = target.targets[0] if isinstance(target, ast.Assign) else None
            names = [dotted(e) for e in given.elts] if isinstance(given, ast.Tuple) else []
            # the layer hands back its branch and the residual apart, and the branch alone is kept
            out.branch = out.branch or ("residual" in names and dotted(value) == names[0])
        elif not _guarded(total, block, parents, value):
            out.zero = "TypeError"


def _sum(value: ast.AST) -> ast.BinOp | None:
    """``hidden_states + residual`` inside an expression."""
    for n in ast.walk(value):
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add) and isinstance(n.left, ast.Name) and isinstance(n.right, ast.Name):
            return n
    return None


def _guarded(total: ast.BinOp, block: ast.If, parents: dict[ast.AST, ast.AST], value: ast.AST) -> bool:
    for above in [value, *_above(total, parents)]:
        if isinstance(above, ast.IfExp) and "residual" in ast.unparse(above.test):
            return True
        if isinstance(above, ast.If) and above is not block and "residual" in ast.unparse(above.test):
            return True
        if above is block:
            return "residual" in ast.unparse(block.test)
    return False


def _inside(node: ast.AST, root: ast.AST) -> bool:
    return any(n is node for n in ast.walk(root))


def _short(classes: Classes, owner: ClassRef, forward: ast.AST) -> str:
    """What happens where fewer states were kept than listed: the collector's own check, if it has one."""
    for node in ast.walk(forward):
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "aux_hidden_states" and isinstance(node.value, ast.Call):
            collector = classes.named(owner.path, dotted(node.value.func).split(".")[0])
            finish = classes.method(collector, "finalize") if collector is not None else None
            for inner in ast.walk(finish[1]) if finish is not None else ():
                if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
                    return dotted(inner.exc.func)
                if isinstance(inner, ast.Assert):
                    return "AssertionError"
    return "silent"
