"""A target class in an engine's source: does it hand out auxiliary states, which by default, and what a configured id captures.

Three readings: the class and its hook, through base classes and delegation to an inner language model (``classes``); the rule from ids
to layers, by walking the hook on numbers (``hook``); and the place in the inner model's loop where a state is kept, which says what
a layer number means, whether the embedding and the last layer can be had, and whether anything is kept at all. The result is a
``Behaviour`` as the recorded tables hold it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from eagle3diag.display import Piece
from eagle3diag.engines.scan.classes import Classes, ClassRef, calls
from eagle3diag.engines.scan.hook import SetLayers, set_layers
from eagle3diag.engines.scan.kept import Kept, constant, kept_by
from eagle3diag.engines.scan.source import pinned
from eagle3diag.engines.targets import Behaviour

__all__ = ["ScannedTarget", "scan_target"]

HOOKS = {"sglang": ("set_eagle3_layers_to_capture",), "vllm": ("set_aux_hidden_state_layers",)}
_DEFAULTS = ("get_eagle3_default_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers")
_FOLDERS = {"sglang": ("srt/models",), "vllm": ("model_executor/models", "models")}
_N = (32, 61, 36, 47, 48)  # layer counts the rule is tried at


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScannedTarget(Piece):
    """What the source says of one target class.

    Attributes:
        arch: the architecture asked for.
        found: whether the source has that class at all.
        hook: whether it hands out auxiliary states (None where it is not found).
        behaviour: by which rules, None without a hook.
        default: what is captured without ids, as HF indices in terms of the layer count: ``2``, ``N//2``, ``N-3``.
        shift: what is added to a configured id to give the HF index, in words where it depends on the ids.
        where: file and line of the class, of the hook, and of the loop that keeps states.
        status: ``read``, or ``inferred`` where something on the way could not be followed.
        allowed: model types the engine's allow-list names; empty where there is none.
    """

    arch: str
    found: bool
    hook: bool | None = None
    behaviour: Behaviour | None = None
    default: tuple[str, ...] = ()
    shift: str = ""
    where: tuple[str, ...] = ()
    status: str = "read"
    allowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def scan_target(classes: Classes, arch: str, text_arch: str | None = None) -> ScannedTarget:
    """Read one target class.

    Args:
        classes: the engine's source.
        arch: architecture as a target's config names it.
        text_arch: architecture of the text model inside it, where its config says (vLLM builds some inner models by that alone).
    """
    engine = classes.source.engine
    classes.assumed = False
    classes.text_model = text_arch or "LlamaForCausalLM"
    allowed = _allowed(classes)
    ref = _target_class(classes, arch)
    if ref is None:
        return ScannedTarget(arch=arch, found=False, allowed=allowed)
    hook = next((h for h in HOOKS[engine] if classes.method(ref, h) is not None), None)
    if hook is not None and engine == "vllm" and not _declared(classes, ref):
        hook = None
    if hook is None:
        return ScannedTarget(arch=arch, found=True, hook=False, where=(ref.where,), allowed=allowed)
    owner, function = classes.method(ref, hook) or (ref, None)
    places = [ref.where, f"{owner.path}:{function.lineno if function is not None else 0}"]
    probe = set_layers(classes, ref, hook, 32, [2, 16, 29])
    assert probe is not None
    kept = Kept() if probe.holder is None else kept_by(classes, probe)
    rule, shift, sure = _rule(classes, ref, hook, kept)
    default, plain = _default(classes, ref, hook, kept)
    notes: list[str] = []
    captures, error = "stream" if not kept.branch else "mlp-branch", ""
    if function is not None and "OutputRecorder" in ast.unparse(function):
        return _recorded_outputs(classes, arch, owner, function, tuple(places), allowed)
    if classes.assumed and not text_arch:
        notes.append(f"{arch}: its inner text model is named by the target's config; taken as {classes.text_model}")
        sure = False
    if probe.raised and not probe.layers:
        captures, error = "error", probe.raised
    elif probe.layers is None:
        captures = "nothing"
        if probe.holder is None:
            notes.append(f"{arch}: the hook was followed but sets no list of layers that this scan understands")
            sure = False
    elif not (kept.listed or (kept.flags and probe.flagged)):
        captures = "nothing"
    behaviour = Behaviour(
        ids=rule,
        default=plain,
        store=_store(classes, ref, hook, kept),
        zero=kept.zero,
        last=kept.last,
        short=kept.short,
        captures=captures,
        error=error,
        source=", ".join([*places, *kept.where]),
        status="read" if sure else "inferred",
        rule=_by_walking(classes, ref, hook, kept) if "own" in (rule, plain) else None,
    )
    return ScannedTarget(
        arch=arch,
        found=True,
        hook=True,
        behaviour=behaviour,
        default=default,
        shift=shift,
        where=(*places, *kept.where),
        status="read" if sure else "inferred",
        allowed=allowed,
        notes=tuple(notes),
    )


def _recorded_outputs(
    classes: Classes, arch: str, owner: ClassRef, function: ast.AST, places: tuple[str, ...], allowed: tuple[str, ...]
) -> ScannedTarget:
    """vLLM's Transformers backend: outputs of layers are recorded by name, id k under layer k - 1."""
    least = next((constant(c.args[:1]) for c in calls(owner.node, "check_version") if c.args), None)
    _, below = pinned(classes.source.requires)
    error = ""
    if isinstance(least, str) and least[:1].isdigit() and below is not None and below <= (int(least.split(".")[0]),):
        error = f"ImportError: the Transformers backend requires transformers>={least} for Eagle3 support"
    behaviour = Behaviour(
        ids="verbatim",
        store="keyed",
        zero="KeyError",
        last=True,
        captures="error" if error else "stream",
        error=error,
        source=", ".join(places),
        status="inferred",
    )
    return ScannedTarget(
        arch=arch, found=True, hook=True, behaviour=behaviour, default=("2", "N//2", "N-3"), shift="0", where=places, status="inferred",
        allowed=allowed,
    )  # fmt: skip


def _target_class(classes: Classes, arch: str) -> ClassRef | None:
    """The class an engine builds for an architecture; of several of one name, the one it registers."""
    if not arch.isidentifier():
        return None
    source = classes.source
    if source.engine == "vllm":
        return classes.in_registry(arch)
    found = classes.defined(arch, *_FOLDERS[source.engine])
    registered = [c for c in found if arch in _entries(classes, c.path)]
    if registered or found:
        return (registered or found)[0]
    return None


def _entries(classes: Classes, path: str) -> set[str]:
    """Names in SGLang's ``EntryClass`` of a file."""
    tree = classes.source.tree(path)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "EntryClass" for t in node.targets):
            return {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
    return set()


def _declared(classes: Classes, ref: ClassRef) -> bool:
    """vLLM asks whether the class is of the EAGLE-3 interface; releases before the interface ask for nothing."""
    interfaces = classes.source.text("model_executor/models/interfaces.py")
    return "class SupportsEagle3" not in interfaces or "SupportsEagle3" in classes.bases(ref)


def _allowed(classes: Classes) -> tuple[str, ...]:
    """Model types vLLM's allow-list lets take EAGLE-3 (a substring test); empty where it has none."""
    source = classes.source
    if source.engine != "vllm":
        return ()
    for path in ("config/speculative.py", "config/__init__.py", "config.py"):
        tree = source.tree(path) if "supported" in source.text(path) else None
        for node in ast.walk(tree) if tree is not None else ():
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id in ("eagle3_target_supported", "aux_hidden_states_supported")
                and isinstance(node.value, ast.List)
            ):
                return tuple(str(e.value) for e in node.value.elts if isinstance(e, ast.Constant))
        if tree is not None and "eagle3" in source.text(path).lower():
            only = _single_allowed(tree)
            if only:
                return only
    return ()


def _single_allowed(tree: ast.Module) -> tuple[str, ...]:
    """The older form: ``if method == "eagle3" and "llama" not in ….model_type: raise``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and any(isinstance(n, ast.Raise) for n in node.body):
            text = ast.unparse(node.test)
            if "eagle3" in text and "model_type" in text:
                hits = [
                    n.left.value
                    for n in ast.walk(node.test)
                    if isinstance(n, ast.Compare)
                    and isinstance(n.ops[0], ast.NotIn)
                    and isinstance(n.left, ast.Constant)
                    and isinstance(n.left.value, str)
                ]
                if hits:
                    return tuple(hits)
    return ()


# ---------------------------------------------------------------- from ids to layers


def _store(classes: Classes, ref: ClassRef, hook: str, kept: Kept) -> str:
    """``list``, or what an id far beyond the last layer shows: single layers are looked up, and marked for good or not."""
    beyond = set_layers(classes, ref, hook, 32, [3, 40])
    if beyond is None or not beyond.raised.startswith("IndexError"):
        return "list"
    return "flags" if kept.flags and beyond.flagged else "checked"


def _wanted(
    classes: Classes, ref: ClassRef, hook: str, kept: Kept, n: int, ids: list[int] | None
) -> tuple[SetLayers | None, tuple[int, ...] | None]:
    if ids is None and classes.source.engine == "vllm":
        for name in _DEFAULTS:
            got = set_layers(classes, ref, name, n)
            if got is not None and isinstance(got.returned, list | tuple):
                return got, tuple(v + kept.offset for v in got.returned if isinstance(v, int))
        return None, None
    got = set_layers(classes, ref, hook, n, ids)
    if got is None or got.layers is None:
        return got, None
    return got, tuple(v + kept.offset for v in got.layers)


def _probes(n: int) -> list[list[int]]:
    usual = [[1, n // 2 - 1, n - 4], [2, n // 2, n - 3]]
    return [*usual, [5, 9, 11], [0, 3, 7], [1, 2, 3], [4, n - 2, n - 1], [3, 8, n], [1, 8, n], [2], [6, 1, 9]]


def _takes_ids(classes: Classes, ref: ClassRef, hook: str) -> bool:
    found = classes.method(ref, hook)
    return found is None or len(found[1].args.args) > 1 or found[1].args.vararg is not None


def _named_rule(ids: list[int], n: int, name: str) -> int:
    return {
        "plus-one": 1,
        "verbatim": 0,
        "deepseek": int(ids[0] == 1),
        "gpt-oss": int(max(ids) != n),
    }[name]


def _rule(classes: Classes, ref: ClassRef, hook: str, kept: Kept) -> tuple[str, str, bool]:
    """``(rule's name, the shift in words, followed to the end)``; a rule that has no name is ``own``."""
    words = {"plus-one": "+1", "verbatim": "0", "deepseek": "+1 if ids[0] == 1 else 0", "gpt-oss": "0 if max(ids) == N else +1"}
    possible = dict.fromkeys(words)
    shifts: set[int] = set()
    sure = True
    seen = False
    for n in _N:
        fixed = _wanted(classes, ref, hook, kept, n, None)[1] if not _takes_ids(classes, ref, hook) else ()
        for ids in _probes(n):
            got, wanted = _wanted(classes, ref, hook, kept, n, ids)
            if got is None or wanted is None:
                continue
            sure = sure and not got.unsure
            if wanted == fixed:  # a hook that takes no ids sets its default
                continue
            if len(set(wanted)) != len(set(ids)):
                possible.clear()
                seen = True
                continue
            seen = True
            order = sorted(ids) if sorted(wanted) == list(wanted) and sorted(ids) != ids else ids
            deltas = {w - k for w, k in zip(wanted, order, strict=False)}
            shifts |= deltas
            for name in list(possible):
                if deltas != {_named_rule(ids, n, name)}:
                    possible.pop(name)
    if possible and seen:
        name = next(iter(possible))
        return name, words[name], sure
    if not _takes_ids(classes, ref, hook):
        return "plus-one", "none: it takes no ids", True
    if not seen:
        return ("verbatim", "0", False) if classes.source.engine == "vllm" else ("plus-one", "+1", False)
    if len(shifts) == 1:
        return "own", f"{min(shifts):+d}", sure
    return "own", "depends on the ids: " + " or ".join(f"{s:+d}" if s else "0" for s in sorted(shifts)), sure


def _by_walking(classes: Classes, ref: ClassRef, hook: str, kept: Kept) -> Callable[[tuple[int, ...] | None, int], tuple[int, ...] | None]:
    """The rule as a function, for ids and a layer count that come later."""

    def rule(ids: tuple[int, ...] | None, n: int) -> tuple[int, ...] | None:
        return _wanted(classes, ref, hook, kept, n, None if ids is None else list(ids))[1]

    return rule


def _default(classes: Classes, ref: ClassRef, hook: str, kept: Kept) -> tuple[tuple[str, ...], str]:
    """``(HF indices in terms of N, how the recorded tables call it)`` of the list captured without ids."""
    seen = {n: _wanted(classes, ref, hook, kept, n, None)[1] for n in _N}
    if any(v is None for v in seen.values()) or len({len(v or ()) for v in seen.values()}) != 1:
        return (), "hf"
    lists = {n: v for n, v in seen.items() if v is not None}
    length = len(next(iter(lists.values())))
    texts = tuple(_formula({n: v[i] for n, v in lists.items()}) for i in range(length))
    known: dict[tuple[str, ...], str] = {("2", "N//2", "N-3"): "hf", ("3", "N//2+1", "N-2"): "plus-one"}
    return texts, known.get(texts, "own")


def _formula(values: dict[int, int]) -> str:
    """One number at several layer counts as ``c``, ``N+c`` or ``N//k+c``; a list of them where it is none of these."""
    for divisor in (0, 1, 2, 3, 4):
        rest = {v - (n // divisor if divisor else 0) for n, v in values.items()}
        if len(rest) == 1:
            c, text = rest.pop(), ("", "N", "N//2", "N//3", "N//4")[divisor]
            return str(c) if not text else f"{text}{c:+d}" if c else text
    return "/".join(f"{v} at N={n}" for n, v in values.items())
