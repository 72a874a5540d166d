"""The class that reads an EAGLE-3 draft, in an engine's source: which classes there are, and what loading does with names.

Every reader looks for one thing the code does (a rename, a guarded look-up, a skipped name) in the method that does it, through base
classes, and answers with a value of the contract's vocabulary, or with nothing where the code has a shape it does not know. Functions are
compared as Python writes them back from the syntax tree, so that layout and quotes do not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from eagle3diag.engines.scan.classes import Classes, ClassRef, calls, dotted, functions
from eagle3diag.engines.scan.target import ScannedTarget, scan_target

__all__ = ["Code", "Draft", "Found", "Reader", "draft_architectures", "open_draft", "reader"]

Found = tuple[Any, str, str]  # value, "read" or "inferred", where
Reader = Callable[["Draft"], "Found | None"]
_MODELS = {"sglang": "srt/models", "vllm": "model_executor/models"}


def reader(table: dict[str, Reader], name: str) -> Callable[[Reader], Reader]:
    """Register a reader of one behaviour."""

    def put(function: Reader) -> Reader:
        table[name] = function
        return function

    return put


@dataclass(slots=True)
class Code:
    """A function as text, and where it stands; empty where there is none."""

    text: str = ""
    where: str = ""
    node: ast.AST | None = None
    owner: ClassRef | None = None

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass
class Draft:
    """The classes of one kind of draft.

    Attributes:
        classes: the engine's source.
        kind: ``llama``, ``qwen3`` or ``mla``.
        lm: the class with the head; model: the one with ``fc``; layer: the decoder layer (None where not found).
        known: architecture -> kind, of every draft class in the source.
        runner: ``v1`` or ``v2`` for vLLM.
    """

    classes: Classes
    kind: str
    lm: ClassRef
    model: ClassRef | None
    layer: ClassRef | None
    known: dict[str, str]
    runner: str | None = None
    _cache: dict[tuple[str, str], Code] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """``sglang`` or ``vllm``."""
        return self.classes.source.engine

    def code(self, ref: ClassRef | None, name: str, above: ClassRef | None = None) -> Code:
        """A method, through base classes."""
        key = (f"{ref}:{above}", name)
        if key not in self._cache:
            found = self.classes.method(ref, name, above) if ref is not None else None
            self._cache[key] = (
                Code() if found is None else Code(ast.unparse(found[1]), f"{found[0].path}:{found[1].lineno}", found[1], found[0])
            )
        return self._cache[key]

    def file(self, path: str) -> Code:
        """A whole file as Python writes it back."""
        key = (path, "")
        if key not in self._cache:
            tree = self.classes.source.tree(path)
            self._cache[key] = Code() if tree is None else Code(ast.unparse(tree), path, tree)
        return self._cache[key]

    def function(self, path: str, name: str) -> Code:
        """A function or method of a file by its name, wherever in it."""
        key = (path, name)
        if key not in self._cache:
            tree = self.classes.source.tree(path)
            nodes = ast.walk(tree) if tree is not None else iter(())
            hit = next((n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name), None)
            self._cache[key] = Code() if hit is None else Code(ast.unparse(hit), f"{path}:{hit.lineno}", hit)
        return self._cache[key]

    @cached_property
    def init(self) -> Code:
        """``__init__`` of the class that builds ``fc``."""
        return self.code(self.model, "__init__")

    @cached_property
    def lm_init(self) -> Code:
        """``__init__`` of the class with the head."""
        return self.code(self.lm, "__init__")

    @cached_property
    def layer_init(self) -> Code:
        """``__init__`` of the decoder layer, the draft's own."""
        return self.code(self.layer, "__init__")

    @cached_property
    def load(self) -> Code:
        """``load_weights`` of the class with the head."""
        return self.code(self.lm, "load_weights")

    @cached_property
    def inner_load(self) -> Code:
        """The loop that fills parameters: the same method, or that of the inner model or of the base class it hands on to."""
        if "params_dict" in self.load.text or "named_parameters" in self.load.text:
            return self.load
        if "super().load_weights" in self.load.text:
            return self.code(self.lm, "load_weights", self.load.owner)
        return self.code(self.model, "load_weights")

    @cached_property
    def generic(self) -> ScannedTarget:
        """What the plainest target class does, which stands for targets without a rule of their own."""
        return scan_target(self.classes, "LlamaForCausalLM")

    def files(self) -> Iterator[str]:
        """Files of the draft's own classes: those a flag would have to be read in."""
        seen = {self.lm.path, *(r.path for r in (self.model, self.layer) if r is not None)}
        yield from sorted(seen)

    def mentions(self, word: str) -> str:
        """Where the draft's own files hold a word; empty where nowhere."""
        return next((p for p in self.files() if word in self.classes.source.text(p)), "")


def draft_architectures(classes: Classes) -> dict[str, tuple[str, ClassRef]]:
    """Architecture -> (kind, class) of every EAGLE-3 draft class: one that maps a reduced vocabulary and fuses several states."""
    source = classes.source
    found: dict[str, tuple[str, ClassRef]] = {}
    if source.engine == "sglang":
        for path in source.mentions("d2t", _MODELS["sglang"]):
            for name in _entry_classes(classes, path):
                ref = classes.named(path, name)
                if ref is not None and _is_eagle3(classes, ref):
                    found[name] = (_kind(classes, ref), ref)
        return found
    for arch in classes.registry():
        if "agle" in arch:
            ref = classes.in_registry(arch)
            if ref is not None and _is_eagle3(classes, ref):
                found[arch] = (_kind(classes, ref), ref)
    return found


def _entry_classes(classes: Classes, path: str) -> list[str]:
    tree = classes.source.tree(path)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "EntryClass":
            return [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
    return []


def _is_eagle3(classes: Classes, ref: ClassRef) -> bool:
    own = functions(ref.node).get("load_weights")
    if own is None or "d2t" not in ast.unparse(own):
        return False
    model = classes.attribute(ref, "model")
    return model is not None and any(True for _ in classes.assigns(model, "fc"))


def _kind(classes: Classes, ref: ClassRef) -> str:
    text = classes.source.text(ref.path)
    if "kv_a_proj_with_mqa" in text or "kv_lora_rank" in text:
        return "mla"
    layer = _layer(classes, classes.attribute(ref, "model"))
    attention = classes.attribute(layer, "self_attn") if layer is not None else None
    normed = attention is not None and any(True for _ in classes.assigns(attention, "q_norm"))
    return "qwen3" if normed or "q_norm" in text else "llama"


def _layer(classes: Classes, model: ClassRef | None) -> ClassRef | None:
    """The decoder layer a model builds: what ``midlayer`` or the elements of ``layers`` are."""
    if model is None:
        return None
    single = classes.attribute(model, "midlayer")
    if single is not None:
        return single
    for one, _, node in classes.assigns(model, "layers"):
        for call in calls(node.value) if node.value is not None else ():
            ref = classes.named(one.path, dotted(call.func)) if isinstance(call.func, ast.Name) else None
            if ref is not None and "forward" in functions(ref.node):
                return ref
    return None


def open_draft(classes: Classes, kind: str | None = None, runner: str | None = None) -> Draft | None:
    """The draft classes of one kind; without one, of the kind most drafts are (``llama``). None where the source has none of it."""
    known = draft_architectures(classes)
    kinds = {arch: k for arch, (k, _) in known.items()}
    for wanted in (kind,) if kind is not None else ("llama", *dict.fromkeys(kinds.values())):
        hit = next((ref for k, ref in known.values() if k == wanted), None)
        if hit is not None:
            model = classes.attribute(hit, "model")
            return Draft(classes, str(wanted), hit, model, _layer(classes, model), kinds, runner)
    return None
