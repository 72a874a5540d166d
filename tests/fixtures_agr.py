"""Cases for the AGR rules: the sample's real draft with one thing wrong, and a tiny draft that says every answer twice.

Three samples of 192 tokens, with states of ten layers, lie in ``data_samples``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec, resolved
from eagle3diag.checkpoint.target import open_target
from eagle3diag.draft.measure import Bench
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.rules.case import make_case
from eagle3diag.rules.model import Case
from tests.factory import Tensors, tiny_config, tiny_target, tiny_tensors, write_draft

SAMPLE = Path(__file__).resolve().parent.parent / "data_samples" / "smollm2-eagle3"
LAYERS = (2, 15, 27)  #: HF indices the sample draft was trained on
MATRICES = tuple(f"{p}_proj.weight" for p in ("q", "k", "v", "o", "gate", "up", "down"))


@cache
def tensors() -> Tensors:
    """Of the sample draft."""
    return load_file(SAMPLE / "draft" / "model.safetensors")


def config(**change: Any) -> dict[str, Any]:
    """Of the sample draft, keys set by ``change``."""
    return {**json.loads((SAMPLE / "draft" / "config.json").read_text(encoding="utf-8")), **change}


def case_of(folder: Path, changed: Tensors | None = None, *, dump: Path = SAMPLE / "dumps", engine: str | None = None, **keys: Any) -> Case:
    """The sample draft with other tensors or config keys, its dump and its target's rows."""
    draft = write_draft(folder / "draft", {**tensors(), **(changed or {})}, config(**keys))
    return make_case(draft, dump=dump, target=SAMPLE / "target", engine=engine)


@cache
def bench(n: int = 3, steps: int = 4) -> Bench:
    """The sample draft on ``n`` samples, read once for all tests."""
    draft, target = open_checkpoint(SAMPLE / "draft"), open_target(SAMPLE / "target")
    spec = resolved(draft_spec(draft), target.num_layers.value)
    return Bench.prepare(draft, spec, open_dump(SAMPLE / "dumps"), target, steps=steps, max_rows={1: 1, 2: 160}.get(n))


def fresh_layer(seed: int = 9) -> Tensors:
    """The decoder layer's matrices as nobody trained them."""
    g = torch.Generator().manual_seed(seed)
    layer = {k: v for k, v in tensors().items() if k.startswith("layers.0.") and v.ndim == 2}
    return {k: (torch.randn(v.shape, generator=g) * 0.02).to(v.dtype) for k, v in layer.items()}


def few_tokens(n: int = 40) -> tuple[Tensors, dict[str, Any]]:
    """The head cut to the ``n`` tokens that the dump's answers use most, and the keys that say so."""
    seen = torch.cat([load_file(p)["target_argmax"].long() for p in sorted((SAMPLE / "dumps").glob("*.safetensors"))])
    old = tensors()["d2t"] + torch.arange(len(tensors()["d2t"]))
    counts = (seen[None] == old[:, None]).sum(1)
    keep = counts.argsort(descending=True, stable=True)[:n].sort().values
    mask = torch.zeros_like(tensors()["t2d"])
    mask[old[keep]] = True
    cut = {"lm_head.weight": tensors()["lm_head.weight"][keep].contiguous(), "d2t": old[keep] - torch.arange(n), "t2d": mask}
    return cut, {"draft_vocab_size": n}


def parrot(folder: Path, *, length: int = 160, n: int = 3) -> Case:
    """A draft whose first step is right and whose later steps repeat it: it adds nothing to the state it is fed."""
    t = tiny_tensors(embed=True)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        t[f"layers.0.{name}.weight"] = t[f"layers.0.{name}.weight"] * 0.02
    hidden, half = t["fc.weight"].shape[0], t["fc.weight"].shape[0] // 2
    fc = 0.005 * t["fc.weight"].float()
    fc[half:, -half:] += torch.eye(half)  # the last state's upper half, where the answer stands; the lower half says which token it is
    t["fc.weight"] = fc.to(torch.bfloat16)
    t["norm.weight"] = torch.ones_like(t["norm.weight"]) + 0.1 * t["norm.weight"]
    ids, g = t["d2t"] + torch.arange(len(t["d2t"])), torch.Generator().manual_seed(1)
    heads = torch.zeros(int(ids.max()) + 1, hidden)
    heads[ids, half:] = torch.nn.functional.normalize(torch.randn(len(ids), half, generator=g), dim=-1)
    t["lm_head.weight"] = heads[ids].to(torch.bfloat16)
    names = torch.zeros(len(heads), hidden)
    names[:, :half] = torch.randn(len(heads), half, generator=g)
    out = folder / "dump"
    out.mkdir(parents=True)
    for i in range(n):
        text = ids[torch.randint(len(ids), (length + 2,), generator=g)]
        tokens = text[:length]
        own, noise = 4 * names[tokens], 0.3 * torch.randn(3, length, hidden, generator=g)
        dump = {
            "hidden_states.2": own + noise[0],
            "hidden_states.6": own + noise[1],
            "hidden_states.9": own + 4 * heads[text[2:]],  # what the target says after the next token
            "final_prenorm": own + 4 * heads[text[1:-1]] + noise[2],
        }
        data = {k: v.half().contiguous() for k, v in dump.items()} | {"input_ids": tokens.clone(), "target_argmax": text[1:-1].clone()}
        save_file(data, out / f"sample_{i}.safetensors", metadata={"index_convention": "HF output_hidden_states index"})
    draft = write_draft(folder / "draft", t, tiny_config())
    return make_case(draft, dump=out, target=tiny_target(folder / "target"))


def no_numbers(folder: Path) -> Case:
    """NaN in the final norm."""
    bad = tensors()["norm.weight"].clone()
    bad[5] = float("nan")
    return case_of(folder, {"norm.weight": bad})


def small_vocabulary(folder: Path) -> Case:
    """A draft vocabulary that holds few of the target's tokens."""
    cut, keys = few_tokens()
    return case_of(folder, cut, **keys)


def dropped_layer(folder: Path) -> Case:
    """Layer names that this version of the engine does not map."""
    eagle = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in LAYERS], "use_aux_hidden_state": True}
    return case_of(folder, engine="sglang==0.5.9", eagle_config=eagle, eagle_aux_hidden_state_layer_ids=None)


def good_engine(folder: Path, dump: Path = SAMPLE / "dumps") -> Case:
    """The same draft where it is run as trained."""
    return case_of(folder, engine="vllm==0.16.0", dump=dump)


ONE = SAMPLE / "dumps" / "sample_0.safetensors"  #: enough where numbers do not matter

Fixture = Callable[[Path], Case]


def sound(folder: Path) -> Case:
    """Nothing wrong, one sample."""
    return case_of(folder, dump=ONE)


def normed(folder: Path) -> Case:
    """A norm flag the draft was trained without, one sample."""
    return case_of(folder, norm_before_residual=True, dump=ONE)


#: a case that makes each rule speak
FIRING: dict[str, Fixture] = {
    "AGR701": normed,
    "AGR702": parrot,
    "AGR703": lambda p: case_of(p, norm_output=True),
    "AGR704": small_vocabulary,
    "AGR705": no_numbers,
    "AGR706": dropped_layer,
    "AGR707": sound,
}

#: a case in which each rule runs and has nothing to say
QUIET: dict[str, Fixture] = {
    "AGR701": sound,
    "AGR702": sound,
    "AGR703": sound,
    "AGR704": sound,
    "AGR705": sound,
    "AGR706": lambda p: good_engine(p, ONE),
    "AGR707": normed,
}
