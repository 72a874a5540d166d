"""Where the packaged sample lies: ``data_samples/`` of a source checkout. A wheel leaves its 20 MB out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Piece
from eagle3diag.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3diag.checkpoint.model import Checkpoint, TensorInfo
    from eagle3diag.hidden.model import HiddenDump, SampleRef
    from eagle3diag.hidden.model import Sample as States

__all__ = ["Sample", "checkout", "late", "planted", "sample", "variant"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sample(Piece):
    """Paths of the sample draft, of its target, of the target's states, of a serving log, and of one in which the draft's layer is lost."""

    draft: str
    target: str
    dumps: str
    log: str
    lost: str


def checkout() -> Path | None:
    """The folder of the source checkout this package runs from or was installed from in place, else None."""
    top = Path(__file__).resolve().parents[2]
    return top if (top / "pyproject.toml").is_file() and (top / "notebooks").is_dir() else None


def sample() -> Sample:
    """The sample of the working directory, of this checkout, or of the folder above: that of a notebook opened where it lies.

    Raises:
        UsageError: none holds it.
    """
    tops = [Path(), *([top] if (top := checkout()) else []), Path("..")]
    for top in tops:
        folder = top / "data_samples" / "smollm2-eagle3"
        logs = top / "data_samples" / "logs"
        if (folder / "draft" / "config.json").is_file():
            return Sample(
                draft=str(folder / "draft"),
                target=str(folder / "target"),
                dumps=str(folder / "dumps"),
                log=str(logs / "sglang-0.5.23.log"),
                lost=str(logs / "sglang-0.5.9-layer-dropped.log"),
            )
    raise UsageError("the sample draft is part of the source checkout (data_samples/), not of the wheel: run this there, or name a draft")


def planted(
    checkpoint: Checkpoint,
    what: str,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    rename: Callable[[str], str] = str,
    config: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """A copy in memory with something changed, for demonstrations and tests; nothing is written.

    Args:
        what: stands in for the path.
        tensors: new contents by the name in ``checkpoint``, of the shape and dtype they replace.
        rename: applied to every name.
        config: changes of the first config; a value of None removes the key.
    """
    changed = {rename(n): t for n, t in (tensors or {}).items()}
    origin = {rename(n): i for n, i in checkpoint.tensors.items()}
    infos = {n: replace(i, name=n) for n, i in origin.items()}
    configs = checkpoint.configs
    if config and configs:
        merged = {k: v for k, v in {**configs[0].data, **config}.items() if v is not None}
        configs = (replace(configs[0], data=merged), *configs[1:])

    def read(info: TensorInfo) -> Tensor:
        assert checkpoint.reader is not None  # an opened checkpoint has one
        return changed[info.name] if info.name in changed else checkpoint.reader(origin[info.name])

    def blocks(info: TensorInfo, block: int) -> Iterator[memoryview]:
        import torch

        assert checkpoint.blocker is not None
        if info.name not in changed:
            yield from checkpoint.blocker(origin[info.name], block)
            return
        raw = changed[info.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield from (memoryview(bytearray(raw[at : at + block])) for at in range(0, len(raw), block))

    return replace(checkpoint, path=what, tensors=dict(sorted(infos.items())), configs=configs, reader=read, blocker=blocks)


def variant(checkpoint: Checkpoint) -> Checkpoint:
    """The second draft that the weight-diff notebook shows by default: older names, one projection changed, another rope theta."""
    name = next(n for n in checkpoint.tensors if n.endswith("mlp.up_proj.weight"))
    moved = checkpoint.read(name).clone()
    moved[: moved.shape[0] // 8] *= 1.125
    return planted(
        checkpoint,
        "the same draft with older names and one projection changed",
        tensors={name: moved},
        rename=lambda n: n.replace("layers.0.", "midlayer.", 1),
        config={"rope_theta": 10000.0},
    )


def late(dump: HiddenDump) -> HiddenDump:
    """The second dump that the hidden-states notebook shows by default: the same texts, every layer taken one late under its old name.

    Only layers whose neighbour the dump holds can be shown so; the others are left out. A dump without neighbours comes back as it is.
    """
    at = {s.hf: s.position for s in dump.aux if s.hf is not None}
    source = {s.position: at[s.hf + 1] for s in dump.aux if s.hf is not None and s.hf + 1 in at}
    if not source:
        return dump
    kept = tuple(s for s in dump.slots if s.position in source or s.role == "final")

    def read(ref: SampleRef) -> States:
        whole = dump.read(ref)
        return replace(whole, states={s.position: whole.states[source.get(s.position, s.position)] for s in kept})

    return replace(dump, path="the same texts with every layer taken one late", slots=kept, loader=read)
