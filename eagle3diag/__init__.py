"""eagle3diag: why an EAGLE-3 draft is not accepted, from its files alone.

Eleven names are all a notebook needs; each is looked up when first used, so ``import eagle3diag`` costs nothing and loads
neither torch nor matplotlib.

>>> import eagle3diag as e3
>>> sample = "data_samples/smollm2-eagle3"  # of a checkout, here and in the examples of each name
>>> e3.check(f"{sample}/draft", target=f"{sample}/target", engine="sglang==0.5.23").verdict
'healthy'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3diag.checkpoint.open import open_checkpoint as open_checkpoint
    from eagle3diag.checkpoint.spec import draft_spec as draft_spec
    from eagle3diag.checkpoint.target import open_target as open_target
    from eagle3diag.draft.agreement import agreement as agreement
    from eagle3diag.draft.ranking import rank as rank
    from eagle3diag.engines.serve import serve as serve
    from eagle3diag.hidden.dumps import open_dump as open_dump
    from eagle3diag.report.explore import explore as explore
    from eagle3diag.rules.case import check as check
    from eagle3diag.weights.convert import convert as convert
    from eagle3diag.weights.diff import diff as diff

__version__ = "0.1.0"

_WHERE = {
    "open_checkpoint": "checkpoint.open",
    "draft_spec": "checkpoint.spec",
    "open_target": "checkpoint.target",
    "open_dump": "hidden.dumps",
    "serve": "engines.serve",
    "check": "rules.case",
    "diff": "weights.diff",
    "convert": "weights.convert",
    "agreement": "draft.agreement",
    "rank": "draft.ranking",
    "explore": "report.explore",
}

__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"eagle3diag.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'eagle3diag' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
