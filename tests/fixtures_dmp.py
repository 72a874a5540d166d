"""The sample's real states in every dump format, with one thing wrong; and a firing and a quiet case for every DMP code.

Three samples of 192 tokens lie in ``data_samples``; one layer in four of them is enough here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3diag.rules.case import make_case
from eagle3diag.rules.model import Case

SAMPLE = Path(__file__).resolve().parent.parent / "data_samples" / "smollm2-eagle3"
LAYERS = (2, 15, 27)  #: HF indices the sample draft was trained on


@dataclass(frozen=True)
class States:
    """One sample: ids [T], aux [T, A, H], final [T, H] (before the norm), mask [T] bool, and the HF indices of aux."""

    ids: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor
    mask: torch.Tensor
    hf: tuple[int, ...] = LAYERS


Change = Callable[[States, int], States]


@cache
def _tensors(i: int) -> dict[str, torch.Tensor]:
    return load_file(SAMPLE / "dumps" / f"sample_{i}.safetensors")


def sample(i: int, layers: tuple[int, ...] = LAYERS) -> States:
    """One of the three samples, float16."""
    t = _tensors(i)
    aux = torch.stack([t[f"hidden_states.{k}"] for k in layers], 1)
    return States(ids=t["input_ids"].long(), aux=aux, final=t["final_prenorm"], mask=t["loss_mask"].bool(), hf=layers)


def final_norm(h: torch.Tensor) -> torch.Tensor:
    """The target's final norm over states, float32 inside, float16 out."""
    w = load_file(SAMPLE / "target" / "rows.safetensors")["final_norm"].float()
    x = h.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w).half()


# ------------------------------------------------------------------ the formats


def portable(folder: Path, s: States, i: int) -> None:
    """``hidden_states.K`` per HF index."""
    t = {f"hidden_states.{k}": s.aux[:, n].contiguous() for n, k in enumerate(s.hf)}
    t |= {"input_ids": s.ids, "final_prenorm": s.final, "loss_mask": s.mask}
    save_file(t, folder / f"sample_{i}.safetensors", metadata={"index_convention": "HF output_hidden_states index"})


def stacked(folder: Path, s: States, i: int) -> None:
    """speculators from 0.5 on, and vLLM's connector."""
    save_file({"hidden_states": torch.cat([s.aux, s.final[:, None]], 1), "token_ids": s.ids}, folder / f"hs_{i}.safetensors")


def legacy(folder: Path, s: States, i: int) -> None:
    """speculators 0.3 and 0.4."""
    torch.save({"input_ids": s.ids, "hidden_states": [*s.aux.unbind(1), s.final], "loss_mask": s.mask.long()}, folder / f"data_{i}.pt")


def v0(folder: Path, s: States, i: int) -> None:
    """speculators before 0.3."""
    data = {"input_ids": s.ids, "hidden_state": s.aux.flatten(1), "target": s.final, "loss_mask": s.mask.long()}
    torch.save(data, folder / f"data_{i}.pt")


def specforge(folder: Path, s: States, i: int) -> None:
    """SpecForge."""
    data = {"input_ids": s.ids, "loss_mask": s.mask.long(), "hidden_state": s.final[None], "aux_hidden_state": s.aux.flatten(1)[None]}
    torch.save(data, folder / f"data_{i}.ckpt")


def modelopt(folder: Path, s: States, i: int) -> None:
    """ModelOpt."""
    data = {"input_ids": s.ids, "hidden_states": s.final, "aux_hidden_states": s.aux.flatten(1), "loss_mask": s.mask.long()}
    torch.save(data, folder / f"c{i}.pt")


def angelslim(folder: Path, s: States, i: int) -> None:
    """AngelSlim."""
    data = {
        "input_ids": s.ids[None],
        "target_hiddens": s.final[None],
        "hidden_states": s.aux.flatten(1)[None],
        "loss_mask": s.mask.long()[None],
    }
    torch.save(data, folder / f"d{i}.ckpt")


#: format -> (writer, whether its final state is after the norm, whether it has a mask)
FORMATS: Mapping[str, tuple[Callable[[Path, States, int], None], bool, bool]] = {
    "portable": (portable, False, True),
    "speculators": (stacked, False, False),
    "speculators-legacy": (legacy, False, True),
    "speculators-v0": (v0, True, True),
    "specforge": (specforge, True, True),
    "modelopt": (modelopt, True, True),
    "angelslim": (angelslim, True, True),
}


def write(folder: Path, form: str = "speculators", change: Change | None = None, n: int = 3, layers: tuple[int, ...] = LAYERS) -> Path:
    """The samples in one format, each passed through ``change(states, index)``; the final state is normed first where the format is so."""
    out = folder / "dump"
    out.mkdir(parents=True)
    writer, normed, _ = FORMATS[form]
    for i in range(n):
        s = sample(i, layers)
        s = replace(s, final=final_norm(s.final)) if normed else s
        writer(out, change(s, i) if change else s, i)
    return out


def case_of(folder: Path, form: str = "speculators", change: Change | None = None, target: bool = True, **kw: Any) -> Case:
    """The sample draft with a dump in one format."""
    dump = write(folder, form, change, **kw)
    return make_case(SAMPLE / "draft", dump=dump, target=SAMPLE / "target" if target else None)


# ------------------------------------------------------------------ the faults


def both(s: States, f: Callable[[torch.Tensor], torch.Tensor]) -> States:
    """``f`` over aux and final states."""
    return replace(s, aux=f(s.aux), final=f(s.final))


def short(s: States, i: int) -> States:
    """31 rows missing at the end of one sample."""
    return both(s, lambda x: x[:-31]) if i == 1 else s


def late(s: States, i: int) -> States:
    """Every row one late."""
    return both(s, lambda x: torch.roll(x, 1, 0))


def early(s: States, i: int) -> States:
    """Every row three early."""
    return both(s, lambda x: torch.roll(x, -3, 0))


def swapped(s: States, i: int) -> States:
    """Two samples' states, final ones as they stand in the format, changed places."""
    other = sample((1, 0, 2)[i], s.hf)
    normed = not torch.equal(s.final, sample(i, s.hf).final)
    return replace(s, aux=other.aux, final=final_norm(other.final) if normed else other.final)


def hole(s: States, i: int) -> States:
    """NaN in one slot of one sample."""
    aux = s.aux.clone()
    if i == 1:
        aux[17, 1, 3] = float("nan")
    return replace(s, aux=aux)


def _tail(x: torch.Tensor, fill: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    out = x.clone()
    out[-40:] = fill(out[-40:])
    return out


def zeros(s: States, i: int) -> States:
    """The last 40 rows were never written."""
    return both(s, lambda x: _tail(x, torch.zeros_like))


def bits(s: States, i: int) -> States:
    """The last 40 rows of one sample are random bits."""
    g = torch.Generator().manual_seed(5)

    def fill(x: torch.Tensor) -> torch.Tensor:
        return torch.randint(-32768, 32767, x.shape, generator=g, dtype=torch.int16).view(torch.float16)

    return both(s, lambda x: _tail(x, fill)) if i == 0 else s


def noise(s: States, i: int) -> States:
    """The last 40 rows of one sample are normal noise of the right size."""
    g = torch.Generator().manual_seed(7)
    return both(s, lambda x: _tail(x, lambda t: (torch.randn(t.shape, generator=g) * t.float().std()).half())) if i == 0 else s


def reordered(s: States, i: int) -> States:
    """Aux states in another order than their places say."""
    return replace(s, aux=s.aux[:, [2, 0, 1]])


def fewer(s: States, i: int) -> States:
    """One aux state too few."""
    return replace(s, aux=s.aux[:, [0, 2]], hf=(s.hf[0], s.hf[2]))


def rotated(s: States, i: int) -> States:
    """A rotated residual stream."""
    q = torch.linalg.qr(torch.randn(576, 576, generator=torch.Generator().manual_seed(6)))[0]
    return both(s, lambda x: (x.float() @ q).half())


def exploded(s: States, i: int) -> States:
    """The middle slot 200 times too large (float32, float16 would overflow)."""
    return both(s, lambda x: x.float()) if s.aux.shape[1] < 2 else replace(s, aux=s.aux * torch.tensor([1.0, 200.0, 1.0])[:, None])


def other_side(s: States, i: int) -> States:
    """The final state on the other side of the norm."""
    before = sample(i, s.hf).final
    return replace(s, final=final_norm(before) if torch.equal(s.final, before) else before)


def mask_zero(s: States, i: int) -> States:
    """Nothing is trained on."""
    return replace(s, mask=torch.zeros_like(s.mask))


def mask_one(s: States, i: int) -> States:
    """Everything is trained on."""
    return replace(s, mask=torch.ones_like(s.mask))


def leaked(s: States, i: int) -> States:
    """The shared beginning of one sample was computed with something else in front."""
    if i != 1:
        return s
    g = torch.Generator().manual_seed(8)

    def blur(x: torch.Tensor) -> torch.Tensor:
        out = x.float()
        out[1:24] += 0.6 * out[1:24].norm(dim=-1, keepdim=True) * torch.randn(out[1:24].shape, generator=g) / out.shape[-1] ** 0.5
        return out.half()

    return both(s, blur)


def thinking_target(folder: Path) -> Path:
    """The sample's target with a tokenizer file that names thinking tags: tokens 2 and 3 of the vocabulary."""
    out = folder / "target"
    out.mkdir(parents=True)
    for file in (SAMPLE / "target").iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    (out / "added_tokens.json").write_text(json.dumps({"<think>": 3, "</think>": 4}))
    return out


def thought(masked: bool) -> Change:
    """The first 40 answer tokens are thinking, in the mask or left out of it."""

    def change(s: States, i: int) -> States:
        first = int(s.mask.nonzero()[0])
        ids, mask = s.ids.clone(), s.mask.clone()
        ids[first], ids[first + 40] = 3, 4
        if not masked:
            mask[first : first + 41] = False
        return replace(s, ids=ids, mask=mask)

    return change


def half_file(folder: Path) -> Case:
    """One of three files is cut."""
    dump = write(folder)
    at = dump / "hs_1.safetensors"
    at.write_bytes(at.read_bytes()[:1000])
    return make_case(SAMPLE / "draft", dump=dump)


Fixture = Callable[[Path], Case]

FIRING: dict[str, Fixture] = {
    "DMP601": half_file,
    "DMP602": lambda d: case_of(d, "speculators", short),
    "DMP603": lambda d: case_of(d, "specforge", hole),
    "DMP604": lambda d: case_of(d, "modelopt", bits),
    "DMP605": lambda d: case_of(d, "angelslim", late),
    "DMP606": lambda d: case_of(d, "speculators", reordered),
    "DMP607": lambda d: case_of(d, "specforge", other_side),
    "DMP608": lambda d: case_of(d, "portable", mask_zero),
    "DMP609": lambda d: case_of(d, "speculators", rotated),
    "DMP610": lambda d: case_of(d, "speculators", leaked),
}

QUIET: dict[str, Fixture] = {code: (lambda d: case_of(d, "portable")) for code in FIRING}
