"""``eagle3diag demo``: the sample draft, sound, and then with faults planted in memory, each of a kind met in the wild.

It doubles as a check of the installation: a fault that is not found, or a false alarm, gives exit status 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Piece
from eagle3diag.report.layout import View, table
from eagle3diag.report.sample import planted, sample

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import Checkpoint
    from eagle3diag.rules.model import Report

__all__ = ["Story", "data", "run", "views"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Story(Piece):
    """One planted fault and what came of it; ``expected`` is the code that must be among the findings, empty for a sound draft."""

    title: str
    engine: str
    expected: str
    report: Report

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes found as error or warning."""
        return tuple(sorted({f.code for f in self.report.findings if f.severity.value != "info"}))

    @property
    def found(self) -> bool:
        """Whether the story came out as it should."""
        return self.expected in self.codes if self.expected else not self.codes


def _same(draft: Checkpoint) -> Checkpoint:
    return draft


def _nan(draft: Checkpoint) -> Checkpoint:
    name = "layers.0.mlp.up_proj.weight"
    tensor = draft.read(name).clone()
    tensor[3, 5] = float("nan")
    return planted(draft, f"{draft.path} (one NaN planted)", tensors={name: tensor})


def _absolute(draft: Checkpoint) -> Checkpoint:
    import torch

    offsets = draft.read("d2t")
    return planted(draft, f"{draft.path} (d2t made absolute)", tensors={"d2t": offsets + torch.arange(len(offsets))})


def _fresh(draft: Checkpoint) -> Checkpoint:
    import torch

    old = draft.read("fc.weight")
    new = torch.randn(old.shape, generator=torch.Generator().manual_seed(0)) * 0.02
    return planted(draft, f"{draft.path} (fc made new)", tensors={"fc.weight": new.to(old.dtype)})


STORIES: tuple[tuple[str, str, str, Callable[[Checkpoint], Checkpoint]], ...] = (
    ("the sample as it is", "vllm==0.33.0", "", _same),
    ("the same files on an SGLang that maps only midlayer.*", "sglang==0.5.9", "KEY203", _same),
    ("one NaN in a projection", "vllm==0.33.0", "VAL301", _nan),
    ("d2t holds token ids instead of offsets", "vllm==0.33.0", "VAL305", _absolute),
    ("fc was never loaded by a converter", "vllm==0.33.0", "VAL303", _fresh),
)


def run() -> list[Story]:
    """All stories.

    Raises:
        UsageError: the sample is not here.
    """
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.target import open_target
    from eagle3diag.rules.case import check

    paths = sample()
    draft, target = open_checkpoint(paths.draft), open_target(paths.target)
    return [
        Story(title=title, engine=engine, expected=code, report=check(plant(draft), target=target, engine=engine))
        for title, engine, code, plant in STORIES
    ]


def data(stories: Sequence[Story]) -> dict[str, Any]:
    """The JSON shape of ``demo``."""
    rows = [
        {"title": s.title, "engine": s.engine, "verdict": s.report.verdict, "codes": s.codes, "expected": s.expected, "found": s.found}
        for s in stories
    ]
    return {"schema": 1, "stories": rows}


def views(stories: Sequence[Story]) -> list[View]:
    """The stories as a table, and the one with the dropped layer in full."""
    from eagle3diag.report.views import view

    good = sum(s.found for s in stories)
    overview = View(
        title="eagle3diag demo",
        summary=f"{good} of {len(stories)} stories come out as they should",
        status="ok" if good == len(stories) else "error",
        tables=(
            table(
                "The sample draft and four planted faults",
                ("story", "engine", "verdict", "found"),
                ((s.title, s.engine, s.report.verdict, " ".join(s.codes) or "nothing") for s in stories),
                status=("none" if s.found else "error" for s in stories),
            ),
        ),
        notes=("Below: the second story as 'eagle3diag check' tells it.",),
    )
    return [overview, view(stories[1].report)]
