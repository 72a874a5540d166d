"""Classes across the files of an engine's source: where a name comes from, which bases a class has, of which class an attribute is.

Names are resolved as Python binds them (the last binding before the use, imports followed through re-exports), attributes by what the
``__init__`` methods assign: a class called directly, a class handed in as an argument by a subclass, or the result of a method. All of it
is reading; what cannot be followed is None, never a guess.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from eagle3diag.engines.scan.source import Source

__all__ = ["ClassRef", "Classes", "calls", "dotted", "functions"]

_DEEP = 12  # re-exports, aliases and methods followed this far
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class ClassRef:
    """A class of the source: its file and its node (identity by place)."""

    path: str
    node: ast.ClassDef = field(compare=False)
    line: int = 0

    @property
    def name(self) -> str:
        """The class's name as defined."""
        return self.node.name

    @property
    def where(self) -> str:
        """``models/llama.py:412``, for sources of facts."""
        return f"{self.path}:{self.node.lineno}"


def dotted(node: ast.AST | None) -> str:
    """``a.b.c`` of a name or an attribute chain; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def calls(node: ast.AST, name: str = "") -> Iterator[ast.Call]:
    """Calls below a node, of a function with this last name where one is given, in the order of the text."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call) and (not name or _last(n.func) == name)]
    yield from sorted(found, key=lambda n: (n.lineno, n.col_offset))


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def functions(node: ast.ClassDef) -> dict[str, Function]:
    """A class's own methods by name, the last definition of each."""
    return {f.name: f for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}


def _holds(test: ast.expr) -> bool | None:
    """Whether a module-level condition holds at run time on an NVIDIA machine; None where it asks for something else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _holds(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = [_holds(v) for v in test.values]
        decisive = isinstance(test.op, ast.Or)
        return decisive if decisive in parts else None if None in parts else not decisive
    name = _last(test.func if isinstance(test, ast.Call) else test)
    if name == "is_cuda":
        return True
    return False if name == "TYPE_CHECKING" or name in ("is_rocm", "is_xpu", "is_cpu", "is_hip", "is_npu", "is_tpu", "is_hpu") else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Module-level statements, those in ``if`` and ``try`` included; what a type checker or another platform than CUDA sees left out."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            holds = _holds(node.test)
            if holds is not False:
                yield from _statements(node.body)
            if holds is not True:
                yield from _statements(node.orelse)
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *(s for h in node.handlers for s in h.body), *node.orelse, *node.finalbody])


class Classes:
    """Class look-up over one source.

    Args:
        source: the engine's package.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._bindings: dict[str, dict[str, list[tuple[int, ast.AST, str]]]] = {}
        self._registry: dict[str, tuple[str, str]] | None = None
        self.text_model = "LlamaForCausalLM"  #: class taken for an inner text model that only a target's config names
        self.assumed = False  #: whether that was needed

    # ------------------------------------------------------------ names

    def _module(self, path: str) -> dict[str, list[tuple[int, ast.AST, str]]]:
        """``{name: [(line, node, extra)]}`` of a file's bindings at module level."""
        if path not in self._bindings:
            table: dict[str, list[tuple[int, ast.AST, str]]] = {}
            tree = self.source.tree(path)
            for node in _statements(tree.body if tree is not None else []):
                if isinstance(node, ast.ClassDef):
                    table.setdefault(node.name, []).append((node.lineno, node, ""))
                elif isinstance(node, ast.ImportFrom | ast.Import):
                    for a in node.names:
                        table.setdefault(a.asname or a.name.split(".")[0], []).append((node.lineno, node, a.name))
                elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                    table.setdefault(node.targets[0].id, []).append((node.lineno, node, ""))
            self._bindings[path] = table
        return self._bindings[path]

    def _absolute(self, path: str, node: ast.ImportFrom) -> str:
        """The dotted module an import names, relative ones made absolute."""
        if not node.level:
            return node.module or ""
        package = [self.source.engine, *path.split("/")[:-1]]
        package = package[: len(package) - (node.level - 1)]
        return ".".join([*package, *(node.module or "").split(".")]).rstrip(".")

    def value(self, path: str, name: str, before: int | None = None, depth: int = 0) -> tuple[str, ast.AST] | None:
        """What a module-level name is bound to: ``(file, class or value node)``; imports and aliases followed."""
        if depth > _DEEP:
            return None
        options = [b for b in self._module(path).get(name, []) if before is None or b[0] < before] or self._module(path).get(name, [])
        for _, node, extra in reversed(options):
            if isinstance(node, ast.ClassDef):
                return path, node
            if isinstance(node, ast.ImportFrom):
                module = self.source.module(self._absolute(path, node))
                found = self.value(module, extra, None, depth + 1) if module else None
                if found is not None:
                    return found
            if isinstance(node, ast.Assign):
                if isinstance(node.value, ast.Name) and node.value.id != name:
                    return self.value(path, node.value.id, node.lineno, depth + 1)
                return path, node.value
        return None

    def named(self, path: str, name: str, before: int | None = None) -> ClassRef | None:
        """The class a name means in a file."""
        found = self.value(path, name, before)
        return ClassRef(found[0], found[1], found[1].lineno) if found and isinstance(found[1], ast.ClassDef) else None

    def defined(self, name: str, *folders: str) -> list[ClassRef]:
        """Every class of that name below some folders, by file; only files that mention it are parsed."""
        hits = []
        for path in self.source.mentions(f"class {name}", *folders):
            hits += [ClassRef(path, n, n.lineno) for _, n, _ in self._module(path).get(name, []) if isinstance(n, ast.ClassDef)]
        return hits

    # ------------------------------------------------------------ bases and methods

    def mro(self, ref: ClassRef, seen: tuple[ClassRef, ...] = ()) -> list[ClassRef]:
        """The class and its bases inside this source, most derived first; a base met twice stands where it is met last."""
        if ref in seen or len(seen) > _DEEP:
            return []
        order = [ref]
        for base in ref.node.bases:
            name = dotted(base.value if isinstance(base, ast.Subscript) else base)
            found = self._by_dots(ref, name)
            if found is not None:
                order += self.mro(found, (*seen, ref))
        return [c for i, c in enumerate(order) if c not in order[i + 1 :]]

    def _by_dots(self, ref: ClassRef, name: str) -> ClassRef | None:
        first, _, rest = name.partition(".")
        if not rest:
            return self.named(ref.path, first, ref.node.lineno)
        for _, node, extra in self._module(ref.path).get(first, []):
            if isinstance(node, ast.ImportFrom):
                module = self.source.module(f"{self._absolute(ref.path, node)}.{extra}")
                if module and "." not in rest:
                    return self.named(module, rest)
        return None

    def bases(self, ref: ClassRef) -> set[str]:
        """Names of all bases as written, those outside the source included."""
        written = set()
        for one in self.mro(ref):
            written.add(one.name)
            written |= {dotted(b.value if isinstance(b, ast.Subscript) else b).rpartition(".")[2] for b in one.node.bases}
        return written

    def method(self, ref: ClassRef, name: str, above: ClassRef | None = None) -> tuple[ClassRef, Function] | None:
        """A method and the class that defines it; with ``above``, the next one after that class (``super()``)."""
        order = self.mro(ref)
        if above is not None and above in order:
            order = order[order.index(above) + 1 :]
        for one in order:
            own = functions(one.node)
            if name in own:
                return one, own[name]
            if self._removed(one, name):
                return None
        return None

    def _removed(self, ref: ClassRef, name: str) -> bool:
        return any(
            isinstance(s, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in s.targets) and _is_none(s.value)
            for s in ref.node.body
        )

    def assigns(self, ref: ClassRef, attribute: str) -> Iterator[tuple[ClassRef, Function, ast.Assign | ast.AnnAssign]]:
        """Assignments to ``self.attribute`` in the methods of a class and its bases, most derived first."""
        for one in self.mro(ref):
            for function in functions(one.node).values():
                for node in ast.walk(function):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
                    for t in targets:
                        elements = t.elts if isinstance(t, ast.Tuple) else [t]
                        if any(dotted(e) == f"self.{attribute}" for e in elements) and isinstance(node, ast.Assign | ast.AnnAssign):
                            yield one, function, node

    def has(self, ref: ClassRef, attribute: str) -> bool:
        """Whether an instance would have that attribute or method, as far as this source shows."""
        return (
            self.method(ref, attribute) is not None
            or any(True for _ in self.assigns(ref, attribute))
            or any(
                isinstance(s, ast.Assign | ast.AnnAssign)
                and any(isinstance(t, ast.Name) and t.id == attribute for t in (s.targets if isinstance(s, ast.Assign) else [s.target]))
                for one in self.mro(ref)
                for s in one.node.body
            )
        )

    # ------------------------------------------------------------ of which class an attribute is

    def attribute(self, ref: ClassRef, name: str, depth: int = 0) -> ClassRef | None:
        """The class of ``self.name``: what is assigned to it, by whichever class of the line assigns it first."""
        if depth > _DEEP:
            return None
        for one, function, node in self.assigns(ref, name):
            if node.value is not None and not _is_none(node.value):
                found = self._of(ref, one, function, node.value, depth + 1)
                if found is not None:
                    return found
        return None

    def _of(self, ref: ClassRef, one: ClassRef, function: Function, value: ast.expr, depth: int) -> ClassRef | None:
        if depth > _DEEP:
            return None
        if isinstance(value, ast.IfExp):
            return self._of(ref, one, function, value.body, depth + 1) or self._of(ref, one, function, value.orelse, depth + 1)
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
            return self.attribute(ref, value.attr, depth + 1)
        if isinstance(value, ast.Attribute):  # self.language_model.model
            inner = self._of(ref, one, function, value.value, depth + 1)
            return self.attribute(inner, value.attr, depth + 1) if inner is not None else None
        if isinstance(value, ast.Name):
            return self._local(ref, one, function, value.id, depth + 1)
        if isinstance(value, ast.Call):
            return self._made(ref, one, function, value, depth + 1)
        return None

    def _local(self, ref: ClassRef, one: ClassRef, function: Function, name: str, depth: int) -> ClassRef | None:
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                found = self._of(ref, one, function, node.value, depth + 1) or self._class_value(ref, one, function, node.value, depth + 1)
                if found is not None:
                    return found
        return None

    def _made(self, ref: ClassRef, one: ClassRef, function: Function, call: ast.Call, depth: int) -> ClassRef | None:
        """The class an expression ``X(...)`` makes an instance of."""
        name = dotted(call.func)
        if name == "init_vllm_registered_model" or name.endswith(".init_vllm_registered_model"):
            return self._registered(call)
        found = self._class_value(ref, one, function, call.func, depth)
        if found is not None:
            return found
        for word in call.keywords:
            if word.arg == "model_class":
                return self._class_value(ref, one, function, word.value, depth)
        if name.startswith("self.") and name.count(".") == 1:
            method = self.method(ref, name[5:])
            if method is not None:
                for node in ast.walk(method[1]):
                    if isinstance(node, ast.Return) and node.value is not None:
                        made = self._of(ref, method[0], method[1], node.value, depth + 1)
                        if made is not None:
                            return made
        if isinstance(call.func, ast.Name) and call.args:  # a wrapper around the instance: torch.compile(X(...)), cast(...)
            for arg in call.args:
                made = self._of(ref, one, function, arg, depth + 1) if isinstance(arg, ast.Call) else None
                if made is not None:
                    return made
        return None

    def _class_value(self, ref: ClassRef, one: ClassRef, function: Function, value: ast.expr, depth: int) -> ClassRef | None:
        """The class a callee expression names: directly, by a parameter, or by a class attribute."""
        if depth > _DEEP:
            return None
        if isinstance(value, ast.IfExp | ast.BoolOp):
            options = [value.body, value.orelse] if isinstance(value, ast.IfExp) else value.values
            return next((c for o in options if (c := self._class_value(ref, one, function, o, depth + 1)) is not None), None)
        name = dotted(value)
        if name.startswith("self.") and name.count(".") == 1:
            for owner in self.mro(ref):
                for s in owner.node.body:
                    if isinstance(s, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name[5:] for t in s.targets):
                        return self._class_value(ref, owner, function, s.value, depth + 1)
            return None
        if not name:
            return None
        parameter = self._argument(ref, one, function, name, depth + 1)
        if parameter is not None:
            return parameter
        found = self._by_dots(one, name)
        if found is not None:
            return found
        local = self._module_import(function, one, name)
        return local or (self._local(ref, one, function, name, depth + 1) if "." not in name else None)

    def _module_import(self, function: Function, one: ClassRef, name: str) -> ClassRef | None:
        """A class imported inside the method."""
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom):
                for a in node.names:
                    if (a.asname or a.name) == name:
                        module = self.source.module(self._absolute(one.path, node))
                        return self.named(module, a.name) if module else None
        return None

    def _argument(self, ref: ClassRef, one: ClassRef, function: Function, name: str, depth: int) -> ClassRef | None:
        """The class passed for a parameter: by a subclass in its ``super().__init__`` call, else the parameter's default."""
        a = function.args
        positional = [*a.posonlyargs, *a.args]
        names = [p.arg for p in positional]
        if name not in [*names, *(p.arg for p in a.kwonlyargs)]:
            return None
        order = self.mro(ref)
        below = order[: order.index(one)] if one in order else []
        for sub in reversed(below):
            own = functions(sub.node).get(function.name)
            for call in calls(own, function.name) if own is not None else ():
                if not (isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call | ast.Name)):
                    continue
                given = next((k.value for k in call.keywords if k.arg == name), None)
                if given is None and name in names and len(call.args) > names.index(name) - 1 >= 0:
                    given = call.args[names.index(name) - 1]
                found = self._class_value(ref, sub, own, given, depth + 1) if given is not None and own is not None else None
                if found is not None:
                    return found
        for owner in order:  # a factory method of the same line: self._init_model(layer_type=...)
            for other in functions(owner.node).values():
                for call in calls(other, function.name):
                    given = next((k.value for k in call.keywords if k.arg == name), None)
                    found = self._class_value(ref, owner, other, given, depth + 1) if given is not None and other is not function else None
                    if found is not None:
                        return found
        defaults = dict(zip(reversed(names), reversed(a.defaults), strict=False))
        defaults |= {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
        given = defaults.get(name)
        return None if given is None or _is_none(given) else self._class_value(ref, one, function, given, depth + 1)

    def marked(self, ref: ClassRef) -> str:
        """vLLM: the attribute a multimodal class declares to be its language model (``with self._mark_language_model``)."""
        for one in self.mro(ref):
            for node in ast.walk(one.node):
                if isinstance(node, ast.With) and any("_mark_language_model" in ast.unparse(i.context_expr) for i in node.items):
                    for inner in ast.walk(node):
                        target = (
                            inner.targets[0]
                            if isinstance(inner, ast.Assign)
                            else inner.target
                            if isinstance(inner, ast.AnnAssign)
                            else None
                        )
                        if target is not None and dotted(target).startswith("self."):
                            return dotted(target)[5:]
        return "language_model"

    # ------------------------------------------------------------ vLLM's registry

    def registry(self) -> dict[str, tuple[str, str]]:
        """vLLM's table: architecture -> (module, class), as written."""
        if self._registry is not None:
            return self._registry
        table: dict[str, tuple[str, str]] = {}
        tree = self.source.tree("model_executor/models/registry.py")
        for node in ast.walk(tree) if tree is not None else ():
            for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                    parts = [e.value for e in value.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
                    if len(parts) == 2:
                        table.setdefault(key.value, (parts[0], parts[1]))
        self._registry = table
        return table

    def in_registry(self, arch: str) -> ClassRef | None:
        """The class vLLM builds for an architecture."""
        entry = self.registry().get(arch)
        if entry is None:
            return None
        module = entry[0] if entry[0].startswith("vllm.") else f"vllm.model_executor.models.{entry[0]}"
        path = self.source.module(module)
        return self.named(path, entry[1]) if path else None

    def _registered(self, call: ast.Call) -> ClassRef | None:
        for word in call.keywords:
            if word.arg == "architectures":
                names = [n.value for n in ast.walk(word.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                return next((c for n in names if (c := self.in_registry(n)) is not None), None)
        self.assumed = True
        return self.in_registry(self.text_model)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
