"""Capture a target's states over texts, as a portable dump a review can use without the target.

Per text: the target's own greedy answer (or the one given), then one prefill over the whole of it, whose states are stored, and the
same tokens fed one by one behind the prompt through the cache, as serving does. Both must agree to rounding; how far they do is
recorded per layer, because a cache or an attention kernel that is wrong shows there and nowhere else. A capture that was stopped goes
on where it stopped; a sample's file is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3diag.checkpoint.rawfile import shown
from eagle3diag.display import Piece, Shown, data
from eagle3diag.errors import UsageError
from eagle3diag.hidden.capture_run import Pass, Run, run_text
from eagle3diag.hidden.capture_target import FINAL, Target, identity, load_target
from eagle3diag.hidden.capture_texts import Text, read_texts, text_of
from eagle3diag.hidden.portable import read_metadata, write_rows, write_sample

if TYPE_CHECKING:
    import torch

__all__ = ["Capture", "CapturedSample", "LayerDifference", "capture", "default_layers", "read_texts"]

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LayerDifference(Piece):
    """How far decoding with the cache is from one prefill, over the rows behind the prompt.

    Attributes:
        hf: HF index; None for the last state before the final norm.
        rows: how many were compared.
        mean, worst: relative error |decode - prefill| / |prefill| (L2 over a row), its mean and maximum.
        cosine: the smallest cosine of a row.
    """

    hf: int | None
    rows: int
    mean: float
    worst: float
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CapturedSample(Piece):
    """One sample: its file, tokens, prompt tokens, and whether an earlier run had written it."""

    file: str
    tokens: int
    prompt_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Capture(Shown):
    """What was captured.

    Attributes:
        path: the dump, a folder.
        target: the target's name.
        layers: HF indices stored.
        samples: in order.
        decode: per layer, over all samples; empty where decoding was not run.
        argmax_differs: positions at which decoding chose another token than prefill.
        rows: the folder with the target's rows, open it as the target; None where not asked for.
        final: the last state, ``pre`` or ``post`` the final norm, or ``none`` where a server did not hand it out.
    """

    path: str
    target: str
    layers: tuple[int, ...]
    samples: tuple[CapturedSample, ...]
    decode: tuple[LayerDifference, ...] = ()
    argmax_differs: int = 0
    rows: str | None = None
    final: Literal["pre", "post", "none"] = "pre"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return data(asdict(self))


def default_layers(count: int) -> tuple[int, ...]:
    """The HF indices every trainer takes by default, 2, n // 2 and n - 3, with their neighbours and the embedding."""
    near = {0, *(k + d for k in (2, count // 2, count - 3) for d in (-1, 0, 1))}
    return tuple(sorted(k for k in near if 0 <= k < count))


def capture(
    target_path: str | os.PathLike[str],
    texts: str | os.PathLike[str] | Iterable[object],
    out: str | os.PathLike[str],
    *,
    layers: Sequence[int] | Literal["all"] | None = None,
    new_tokens: int = 128,
    max_tokens: int = 2048,
    topk: int = 20,
    decode: bool = True,
    decode_out: str | os.PathLike[str] | None = None,
    chat: bool = True,
    store: Literal["auto", "float16", "bfloat16", "float32"] = "auto",
    device: str = "cpu",
    dtype: str | None = None,
    rows: bool = True,
    extra_ids: Sequence[int] = (),
    progress: Progress | None = None,
) -> Capture:
    """Run a target over texts and write its states as a portable dump.

    Args:
        target_path: a local folder of a causal LM, or a ``.gguf`` file.
        texts: a file (see ``read_texts``), or prompts, token id lists, or objects as a JSON line holds them.
        out: the dump, a folder: ``sample_0.safetensors`` … and ``target/``.
        layers: HF indices; ``all`` for every one; by default 2, n // 2, n - 3, their neighbours and 0. The last state before the final
            norm is always there.
        new_tokens: longest greedy answer to a prompt without one.
        max_tokens: longest sample; what is over is cut at the end.
        topk: how many of the target's probabilities are kept per position; 0 for none.
        decode: also feed the tokens behind the prompt one by one and record the difference.
        decode_out: where to write the decoded states as a second dump.
        chat: put prompts through the tokenizer's chat template.
        store: dtype of stored states; ``auto`` is float16, or bfloat16 where a state passes float16's range.
        device, dtype: where and in what the target runs; float32 on the CPU by default.
        rows: write ``target/`` with the embedding and head rows of all tokens seen, so that a review needs no target.
        extra_ids: more token ids for ``rows``: a draft's vocabulary.
        progress: called with (samples done, samples, file) before the first and after each.

    Raises:
        UsageError: transformers is missing, or arguments make no sense.
        CheckpointError: target or texts cannot be read, or the dump cannot be written.
    """
    given = read_texts(Path(texts)) if isinstance(texts, (str, os.PathLike)) else [text_of(t, f"text {i}") for i, t in enumerate(texts)]
    if not given:
        raise UsageError("no text to capture")
    for name, value, least in (("new_tokens", new_tokens, 1), ("max_tokens", max_tokens, 2), ("topk", topk, 0)):
        if value < least:
            raise UsageError(f"{name} is {value}; give {least} or more")
    if store not in ("auto", "float16", "bfloat16", "float32"):
        raise UsageError(f"store is '{store}'; give auto, float16, bfloat16 or float32")
    folder, second = Path(out), None if decode_out is None else Path(decode_out)
    job = _Job(
        load=lambda: load_target(target_path, device=device, dtype=dtype),
        told=identity(target_path),
        layers=layers,
        topk=topk,
        run={"new_tokens": new_tokens, "max_tokens": max_tokens, "topk": topk, "decode": decode or second is not None, "chat": chat},
        store=store,
        written={
            "layers": "default" if layers is None else layers if layers == "all" else sorted(set(layers)),
            "device": device,
            "dtype": dtype,
        },
    )
    tell = progress or (lambda done, total, file: None)
    samples: list[CapturedSample] = []
    tell(0, len(given), "")
    for i, text in enumerate(given):
        samples.append(job.sample(text, f"sample_{i}.safetensors", folder, second))
        tell(i + 1, len(given), samples[-1].file)
    said = [read_metadata(folder / s.file) for s in samples]
    if rows:
        job.rows([folder / s.file for s in samples], folder / "target", extra_ids)
    return Capture(
        path=shown(folder),
        target=said[0].get("target", ""),
        layers=tuple(json.loads(said[0]["layers"])),
        samples=tuple(samples),
        decode=_pooled([json.loads(m.get("decode_difference", "{}")) for m in said]),
        argmax_differs=sum(int(m.get("decode_argmax_differs", "0")) for m in said),
        rows=shown(folder / "target") if rows else None,
    )


@dataclass(slots=True, kw_only=True)
class _Job:
    """One capture; the target is loaded when the first sample that is not there yet needs it."""

    load: Callable[[], Target]
    told: str
    layers: Sequence[int] | Literal["all"] | None
    topk: int
    run: dict[str, Any]
    store: str
    written: dict[str, Any]
    _target: Target | None = None

    def target(self) -> Target:
        """The loaded target."""
        if self._target is None:
            self._target = self.load()
        return self._target

    def sample(self, text: Text, file: str, folder: Path, second: Path | None) -> CapturedSample:
        """Capture one text, or find it there."""
        whole = {"target": self.told, "text": text.key(), "store": self.store, **self.run, **self.written}
        key = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]
        there = [read_metadata(at / file) for at in (folder, second) if at is not None]
        resumed = all(m.get("capture_key") == key for m in there)
        if not resumed:
            target = self.target()
            chosen = _chosen(self.layers, len(target.layers))
            run = run_text(target, text, chosen, **self.run)
            if second is not None and run.decode is not None:
                self._write(second / file, target, run, run.decode, chosen, "decode", key)
            self._write(folder / file, target, run, run.prefill, chosen, "prefill", key)
            return CapturedSample(file=file, tokens=len(run.ids), prompt_tokens=run.prompt, resumed=False)
        return CapturedSample(file=file, tokens=int(there[0]["tokens"]), prompt_tokens=int(there[0]["prompt_tokens"]), resumed=True)

    def _write(self, path: Path, target: Target, run: Run, made: Pass, layers: tuple[int, ...], mode: str, key: str) -> None:
        import torch

        dtype = _stored(made, self.store)
        states = {k: v.to(dtype) for k, v in made.states.items()}
        metadata = {
            "mode": mode,
            "text": "greedy continuation by the target" if run.written else "given",
            "tokens": len(run.ids),
            "prompt_tokens": run.prompt,
            "layers": json.dumps(layers),
            "target_layers": len(target.layers),
            "computed_in": str(next(target.model.parameters()).dtype).removeprefix("torch."),
            "device": self.written["device"],
            "capture_key": key,
        }
        if run.decode is not None:
            told = {k: [d.rows, d.total, d.worst, d.cosine] for k, d in run.differences.items()}
            metadata |= {"decode_difference": json.dumps(told), "decode_argmax_differs": run.argmax_differs}
        write_sample(
            path,
            token_ids=run.ids,
            states={k: v for k, v in states.items() if k != FINAL},
            final=states[FINAL],
            final_norm="pre",
            loss_mask=torch.arange(len(run.ids)) >= run.prompt,
            argmax=made.argmax,
            topk_ids=made.topk_ids,
            topk_logprobs=made.topk_logprobs,
            logsumexp=made.logsumexp,
            target=target.name,
            metadata={k: str(v) for k, v in metadata.items()},
        )

    def rows(self, files: list[Path], folder: Path, extra: Sequence[int]) -> None:
        """Write the embedding and head rows of every token the samples name, unless they are there."""
        import torch
        from safetensors import safe_open

        seen = {int(x) for x in extra}
        for file in files:
            with safe_open(file, "pt") as held:
                for key in ("input_ids", "target_argmax", "target_topk_ids"):
                    if key in held.keys():  # noqa: SIM118 (a file, not a dict)
                        seen |= set(held.get_tensor(key).flatten().tolist())
        key = hashlib.sha256(f"{self.told} {sorted(seen)}".encode()).hexdigest()[:32]
        if read_metadata(folder / "rows.safetensors").get("rows_key") == key:
            return
        target = self.target()
        table = target.model.get_input_embeddings().weight.detach()
        output = target.model.get_output_embeddings()
        head = None if output is None or output.weight.data_ptr() == table.data_ptr() else output.weight.detach()
        chosen = torch.tensor(sorted(i for i in seen if 0 <= i < len(table)), dtype=torch.int64)
        write_rows(
            folder,
            token_ids=chosen,
            embedding=_exactly(table[chosen.to(table.device)]),
            head=None if head is None else _exactly(head[chosen.to(head.device)]),
            final_norm=_exactly(target.norm.weight.detach()),
            config=target.config(),
            metadata={"target": target.name, "rows_key": key},
        )


def _chosen(layers: Sequence[int] | Literal["all"] | None, count: int) -> tuple[int, ...]:
    if layers is None:
        return default_layers(count)
    if layers == "all":
        return tuple(range(count))
    wrong = [k for k in layers if not 0 <= k <= count]
    if wrong:
        raise UsageError(f"HF index {wrong[0]} where the target has {count} layers; give 0 to {count}")
    return tuple(sorted({int(k) for k in layers if k < count}))  # index ``count`` is the last state, stored before its norm anyway


def _stored(made: Pass, store: str) -> torch.dtype:
    import torch

    if store != "auto":
        found = getattr(torch, store)
        assert isinstance(found, torch.dtype)
        return found
    largest = max(float(v.abs().max()) for v in made.states.values())
    return torch.float16 if largest < 60_000 else torch.bfloat16


def _exactly(weight: torch.Tensor) -> torch.Tensor:
    """The same numbers in bfloat16 where that loses nothing, as a target stored so and run in float32 has them."""
    import torch

    small = weight.to(torch.bfloat16)
    return small if torch.equal(small.to(weight.dtype), weight) else weight


def _pooled(samples: list[dict[str, list[float]]]) -> tuple[LayerDifference, ...]:
    keys = dict.fromkeys(k for s in samples for k in s)
    out: list[LayerDifference] = []
    for k in sorted(keys, key=lambda k: (int(k) == FINAL, int(k))):
        parts = [s[k] for s in samples if k in s]
        rows = int(sum(p[0] for p in parts))
        mean = sum(p[1] for p in parts) / max(rows, 1)
        hf = None if int(k) == FINAL else int(k)
        out.append(LayerDifference(hf=hf, rows=rows, mean=mean, worst=max(p[2] for p in parts), cosine=min(p[3] for p in parts)))
    return tuple(out)
