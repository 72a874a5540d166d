"""Layer ids in an engine's source, for both engines: where they are read from, what they mean to a usual target, and its default."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from eagle3diag.engines.scan.classes import dotted
from eagle3diag.engines.scan.draft import Draft, Found

__all__ = ["IDS", "default_aux", "id_meaning", "id_places"]

IDS = "eagle_aux_hidden_state_layer_ids"  #: the key ids stand under


def id_places(node: ast.AST | None) -> list[str]:
    """Places layer ids are read from in a function or file, in order of the text: ``top``, ``nested``, ``nested-layer-ids``."""
    return list(dict.fromkeys(place for _, place in _id_reads(node)))


def _id_reads(node: ast.AST | None) -> Iterator[tuple[int, str]]:
    hits: list[tuple[int, str]] = []
    for n in ast.walk(node) if node is not None else ():
        owner: ast.AST | None = None
        key: ast.AST | None = None
        if isinstance(n, ast.Call) and dotted(n.func) == "getattr" and len(n.args) >= 2:
            owner, key = n.args[0], n.args[1]
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "get" and n.args:
            owner, key = n.func.value, n.args[0]
        elif isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load):
            owner, key = n.value, n.slice
        elif isinstance(n, ast.Attribute) and n.attr == IDS and isinstance(n.ctx, ast.Load) and dotted(n.value).endswith("hf_config"):
            owner, key = n.value, ast.Constant(n.attr)
        if isinstance(key, ast.Constant) and key.value in (IDS, "layer_ids") and owner is not None:
            name = dotted(owner).rpartition(".")[2]
            inner = "eagle" in name or name in ("drafter_config",)
            if key.value == IDS:
                hits.append((getattr(n, "lineno", 0), "nested" if inner else "top"))
            elif inner:
                hits.append((getattr(n, "lineno", 0), "nested-layer-ids"))
    yield from sorted(hits)


def id_meaning(d: Draft) -> Found | None:
    """What an id means to a usual target: the output of that layer, or its input."""
    generic = d.generic
    meaning = {"+1": "output", "0": "input"}.get(generic.shift)
    return (meaning, generic.status, generic.where[0]) if meaning is not None and generic.hook else None


def default_aux(d: Draft) -> Found | None:
    """The layers a usual target hands out where no ids are given."""
    generic = d.generic
    return (f"[{', '.join(generic.default)}]", "read", generic.where[0]) if generic.default else None
