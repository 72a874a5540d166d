"""The numbers of the sample's manifest, by its conventions: agreement of each step, for the healthy wiring and every fault.

All eight dumps lie beside the repository, not in it; the three it carries are held to numbers taken from the same code, which reproduces
the manifest. The manifest's random faults drew from one generator (seed 3), in file order: the layer's matrices, fc, the head, the whole
embedding; they are set by hand here, and what our own draws give is held to what must not depend on a draw.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3diag.checkpoint.model import DraftSpec
from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.checkpoint.target import open_target
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.model import PlainDraft
from eagle3diag.draft.rows import make_rows
from eagle3diag.draft.tables import TargetTables, load_tables
from eagle3diag.draft.weights import DraftWeights
from eagle3diag.hidden.model import Sample, Slot

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / "data_samples" / "smollm2-eagle3"
WHOLE = ROOT.parent / "shared" / "data" / "smollm2-eagle3"
MANIFEST = json.loads((CARRIED / "MANIFEST.json").read_text(encoding="utf-8"))
LAYERS = (0, 1, 2, 3, 14, 15, 16, 26, 27, 28)
SLOTS = (
    *(Slot(i, k, "aux", f"hidden_states.{k}") for i, k in enumerate(LAYERS)),
    Slot(len(LAYERS), None, "final", "final_prenorm"),
)
POINTS = 0.003  # 0.3 points, what the manifest is reproduced within

FAULTS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "layers_plus_1": {"aux_layers": (3, 16, 28)},
    "layers_minus_1": {"aux_layers": (1, 14, 26)},
    "embedding_as_first": {"aux_layers": (0, 2, 15)},
    "order_27_15_2": {"aux_layers": (27, 15, 2)},
    "order_2_27_15": {"aux_layers": (2, 27, 15)},
    "last_state_is_final_prenorm": {"aux_layers": (2, 15, 30)},
    "fc_bypassed": {"fc": "bypassed"},
    "aux_final_normed": {"aux_norm": "final"},
    "head_is_first_target_rows": {"head": "target-first-rows"},
    "d2t_missing": {"mapping": "missing"},
    "d2t_absolute": {"mapping": "absolute"},
    "token_one_early": {"token_shift": -1},
    "state_one_early": {"state_shift": -1},
    "rope_theta_1e4": {"rope_theta": 1e4},
    "rope_theta_1e6": {"rope_theta": 1e6},
    "norm_before_residual_true": {"norm_before_residual": True},
    "final_norm_skipped": {"final_norm": False},
    "post_norm_fed_back": {"norm_output": True},
    "concat_hidden_first": {"concat": "hidden-first"},
}
RANDOM = ("layer_never_loaded", "fc_never_loaded", "lm_head_random", "embedding_random")

#: joint agreement over the three carried dumps (355 rows), by the same conventions
CARRIED_JOINT: dict[str, tuple[float, ...]] = {
    "healthy": (0.2761, 0.0901, 0.0197, 0.0085),
    "layers_plus_1": (0.2479, 0.0676, 0.0254, 0.0085),
    "layers_minus_1": (0.2479, 0.0901, 0.0282, 0.0085),
    "embedding_as_first": (0.0254, 0.0000, 0.0000, 0.0000),
    "order_2_27_15": (0.0930, 0.0113, 0.0028, 0.0000),
    "last_state_is_final_prenorm": (0.1324, 0.0197, 0.0028, 0.0000),
    "fc_bypassed": (0.1042, 0.0113, 0.0028, 0.0000),
    "head_is_first_target_rows": (0.0000, 0.0000, 0.0000, 0.0000),
    "token_one_early": (0.0986, 0.0000, 0.0000, 0.0000),
    "state_one_early": (0.1972, 0.0620, 0.0085, 0.0028),
    "rope_theta_1e4": (0.2732, 0.0845, 0.0197, 0.0085),
    "final_norm_skipped": (0.1915, 0.0197, 0.0028, 0.0000),
    "post_norm_fed_back": (0.2761, 0.0000, 0.0000, 0.0000),
}


@lru_cache(maxsize=1)
def parts(folder: Path = CARRIED) -> tuple[DraftSpec, DraftWeights, TargetTables]:
    checkpoint = open_checkpoint(folder / "draft")
    spec = draft_spec(checkpoint)
    return spec, DraftWeights.load(checkpoint, spec), load_tables(open_target(folder / "target"), checkpoint, spec)


@lru_cache(maxsize=2)
def samples(folder: Path) -> tuple[Sample, ...]:
    out = []
    for path in sorted((folder / "dumps").glob("sample_*.safetensors")):
        t = load_file(path)
        states = {s.position: t[s.name] for s in SLOTS}
        out.append(
            Sample(name=path.stem, token_ids=t["input_ids"], states=states, loss_mask=t["loss_mask"], target_argmax=t["target_argmax"])
        )
    return tuple(out)


def measure(
    folder: Path, wiring: Wiring, weights: DraftWeights | None = None, tables: TargetTables | None = None, *, seed: int = 0
) -> tuple[int, list[float], list[float]]:
    """(rows counted, marginal, joint) of four steps."""
    spec, own, rows_of_target = parts()
    draft = PlainDraft(weights or own, spec, wiring, tables or rows_of_target, seed=seed)
    right = []
    for sample in samples(folder):
        rows = make_rows(sample, SLOTS, wiring, final_norm="pre", target_layers=30)
        keep = rows.counted(4)
        out = draft.run(rows, 4, where=keep)
        right.append(torch.stack([draft.to_target(o.logits.argmax(-1)) == rows.expected(s)[keep] for s, o in enumerate(out)], 1))
    all_right = torch.cat(right).double()
    return len(all_right), all_right.mean(0).tolist(), all_right.cumprod(1).mean(0).tolist()


def expect(name: str, found: tuple[int, list[float], list[float]]) -> None:
    want: Mapping[str, Any] = MANIFEST["offline"]["faults"][name]
    assert found[0] == want["positions"]
    assert found[1] == pytest.approx(want["marginal"], abs=POINTS)
    assert found[2] == pytest.approx(want["joint"], abs=POINTS)
    assert 1 + sum(found[2]) == pytest.approx(want["expected_length_k4"], abs=0.01)


needs_all = pytest.mark.skipif(not WHOLE.is_dir(), reason="the sample's eight dumps lie beside the repository, not in it")


def test_every_fault_of_the_manifest_is_tried() -> None:
    assert {*FAULTS, *RANDOM} == set(MANIFEST["offline"]["faults"])


@needs_all
@pytest.mark.parametrize("name", FAULTS)
def test_manifest_numbers(name: str) -> None:
    expect(name, measure(WHOLE, replace(parts()[0].wiring, **FAULTS[name])))


@needs_all
def test_random_faults_of_the_manifest() -> None:
    spec, own, tables = parts()
    g = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, generator=g)

    layer = {n: torch.ones_like(t) if t.ndim == 1 else draw(*t.shape) for n, t in own.tensors.items() if n.startswith("layers.0.")}
    fc, head = draw(*own.tensors["fc.weight"].shape), draw(*own.tensors["lm_head.weight"].shape)
    assert tables.token_ids is not None
    embedding = draw(spec.vocab_size.value or 0, own.sizes.hidden)[tables.token_ids]

    def changed(**tensors: torch.Tensor) -> DraftWeights:
        return replace(own, tensors={**own.tensors, **tensors})

    expect("layer_never_loaded", measure(WHOLE, spec.wiring, changed(**layer)))
    expect("fc_never_loaded", measure(WHOLE, spec.wiring, changed(**{"fc.weight": fc})))
    expect("lm_head_random", measure(WHOLE, spec.wiring, changed(**{"lm_head.weight": head})))
    expect("embedding_random", measure(WHOLE, spec.wiring, tables=replace(tables, embedding=embedding)))


@pytest.mark.parametrize("seed", [0, 1])
def test_random_faults_whatever_is_drawn(seed: int) -> None:
    spec, own, _ = parts()
    layer = {n: "ones" if own.tensors[n].ndim == 1 else "uninitialised" for n in spec.canonical if n.startswith("layers.0.")}
    faults = MANIFEST["offline"]["faults"]
    for name, wiring in {
        "layer_never_loaded": replace(spec.wiring, unfilled=layer),
        "fc_never_loaded": replace(spec.wiring, unfilled={"fc.weight": "random"}),
        "lm_head_random": replace(spec.wiring, head="uninitialised"),
        "embedding_random": replace(spec.wiring, embedding="uninitialised"),
    }.items():
        _, _, joint = measure(CARRIED, wiring, seed=seed)
        assert 1 + sum(joint) == pytest.approx(faults[name]["expected_length_k4"], abs=0.08), name
        assert joint[1] < 0.02, name


@pytest.mark.parametrize("name", CARRIED_JOINT)
def test_carried_dumps(name: str) -> None:
    n, _, joint = measure(CARRIED, replace(parts()[0].wiring, **FAULTS[name]))
    assert n == 355
    assert joint == pytest.approx(CARRIED_JOINT[name], abs=POINTS)
