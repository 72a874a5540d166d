"""The plain draft's logits beside those of the speculators library's own model, on the sample's hidden states.

Both read the same folder: speculators by its ``from_pretrained`` with eager attention, ours by ``open_checkpoint``. Its forward hands out
argmaxes alone, so the logits are taken by a hook on its head; its embedding is set by hand, since loading leaves a missing one at zero.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.checkpoint.target import open_target
from eagle3diag.draft.model import PlainDraft
from eagle3diag.draft.rows import Rows, make_rows
from eagle3diag.draft.tables import TargetTables, load_tables
from eagle3diag.draft.weights import DraftWeights
from eagle3diag.hidden.model import Sample, Slot
from tests.factory import speculators_config, trained, write_draft

os.environ.setdefault("HF_HUB_OFFLINE", "1")
SAMPLE = Path(__file__).resolve().parent.parent / "data_samples" / "smollm2-eagle3"
WHY = "speculators is not installed (pip install -e '.[parity]', then pip install --no-deps speculators==0.9.0)"
STEPS = 4
TOLERANCE = 1e-4

#: change of the speculators config, layers, Qwen3 layers
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "qwen3": {"model_type": "qwen3"},
    "two_layers": {"layers": 2},
    "all_flags_two_qwen3_layers": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "model_type": "qwen3", "layers": 2},
    "yarn": {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "sliding_window": {"window": 32},
}


def _tensors(layers: int, qwen3: bool, change: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The trained draft, with what a variant needs beside it."""
    t = load_file(SAMPLE / "draft" / "model.safetensors")
    for i in range(1, layers):
        for name in [n for n in t if n.startswith("layers.0.") and "hidden_norm" not in n]:
            rows, *rest = t[name].shape
            wide = [576] if "q_proj" in name or "k_proj" in name or "v_proj" in name else rest
            t[name.replace("layers.0", f"layers.{i}")] = trained(name.replace("layers.0", f"layers.{i}"), rows, *wide).bfloat16()
    if qwen3:
        for i in range(layers):
            for p in "qk":
                t[f"layers.{i}.self_attn.{p}_norm.weight"] = trained(f"{p}_norm.{i}", 64).bfloat16()
    if change.get("norm_before_fc"):
        t["input_norm.weight"] = trained("input_norm", 3 * 576).bfloat16()
    if change.get("fc_norm"):
        for i in range(3):
            t[f"fc_norm.{i}.weight"] = trained(f"fc_norm.{i}", 576).bfloat16()
    return t


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny local target: the sample's config, its embedding rows where the sample has them, zeros elsewhere."""
    pytest.importorskip("speculators", reason=WHY)
    rows = load_file(SAMPLE / "target" / "rows.safetensors")
    embedding = torch.zeros(49152, 576, dtype=torch.bfloat16)
    embedding[rows["token_ids"].long()] = rows["embed_tokens"]
    config = json.loads((SAMPLE / "target" / "config.json").read_text(encoding="utf-8"))
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": rows["final_norm"]}
    return write_draft(tmp_path_factory.mktemp("verifier"), tensors, config)


def _write(folder: Path, variant: Mapping[str, Any], verifier: Path) -> Path:
    change = dict(variant)
    layers, kind = change.pop("layers", 1), change.pop("model_type", "llama")
    rope, window = change.pop("rope", None), change.pop("window", None)
    flat = json.loads((SAMPLE / "draft" / "config.json").read_text(encoding="utf-8"))
    flat = {k: v for k, v in flat.items() if k not in ("architectures", "eagle_aux_hidden_state_layer_ids")} | {"num_hidden_layers": layers}
    config = speculators_config(flat, ids=(2, 15, 27), model_type=kind, **change)
    layer = config["transformer_layer_config"]
    layer["pad_token_id"] = None
    if rope is not None:
        layer["rope_parameters"] = {"rope_theta": layer.pop("rope_theta"), **rope}
    if window is not None:
        kind = "qwen3"
        layer |= {"model_type": kind, "use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * layers}
    config["speculators_config"]["verifier"]["name_or_path"] = str(verifier)
    return write_draft(folder, _tensors(layers, kind == "qwen3", change), config)


def _sample() -> tuple[Sample, tuple[Slot, ...]]:
    t = load_file(SAMPLE / "dumps" / "sample_0.safetensors")
    slots = tuple(Slot(i, k, "aux", f"hidden_states.{k}") for i, k in enumerate((2, 15, 27)))
    states = {s.position: t[s.name] for s in slots}
    return Sample(name="sample_0", token_ids=t["input_ids"], states=states, loss_mask=t["loss_mask"]), slots


def _theirs(folder: Path, rows: Rows, tables: TargetTables) -> list[torch.Tensor]:
    """Logits [rows, draft vocabulary] of each step by the speculators library."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32).float().eval()
    assert tables.token_ids is not None
    assert tables.embedding is not None
    with torch.no_grad():
        model.embed_tokens.weight[tables.token_ids] = tables.embedding.float()
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0].clone()))
    with torch.no_grad():
        model(
            hidden_states=rows.states.float().flatten(1)[None],
            input_ids=rows.tokens(0)[None],
            document_ids=torch.zeros(1, len(rows), dtype=torch.long),
            position_ids=rows.positions[None],
            ttt_steps=STEPS,
        )
    return logits


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("ignore")
def test_logits_equal_those_of_speculators(name: str, tmp_path: Path, verifier: Path) -> None:
    folder = _write(tmp_path, VARIANTS[name], verifier)
    draft = open_checkpoint(folder)
    spec = draft_spec(draft)
    tables = load_tables(open_target(SAMPLE / "target"), draft, spec)
    sample, slots = _sample()
    rows = make_rows(sample, slots, spec.wiring)
    ours = PlainDraft(DraftWeights.load(draft, spec), spec, spec.wiring, tables).run(rows, STEPS)
    theirs = _theirs(folder, rows, tables)
    assert len(theirs) == STEPS
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        valid = len(rows) - step  # later rows are fed padding
        error = (a.logits[:valid] - b[:valid]).abs().max() / b[:valid].abs().max()
        assert error < TOLERANCE, f"step {step}: relative error {error:.2e}"
        assert b[:valid].std() > 0.1


@pytest.mark.parametrize("name", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "sliding_window"])
@pytest.mark.filterwarnings("ignore")
def test_a_wiring_that_is_not_theirs_is_told_apart(name: str, tmp_path: Path, verifier: Path) -> None:
    draft = open_checkpoint(_write(tmp_path, VARIANTS[name], verifier))
    spec = draft_spec(draft)
    tables = load_tables(open_target(SAMPLE / "target"), draft, spec)
    sample, slots = _sample()
    off = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False, "sliding_window": None}
    wiring = replace(spec.wiring, **{name: off[name]})
    assert wiring != spec.wiring
    rows = make_rows(sample, slots, wiring)
    ours = PlainDraft(DraftWeights.load(draft, spec), spec, wiring, tables).run(rows, STEPS)
    theirs = _theirs(tmp_path, rows, tables)
    last = STEPS - 1
    assert (ours[last].logits[:-last] - theirs[last][:-last]).abs().max() / theirs[last].abs().max() > 100 * TOLERANCE
