"""The factory keeps its promises, since every other test builds on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3diag.checkpoint.open import open_checkpoint
from tests.dialects import HEALTHY, WRITERS
from tests.factory import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    dialect_draft,
    draft_ids,
    target_tables,
    tiny_config,
    tiny_target,
    tiny_tensors,
    write_draft,
)


def test_the_mapping_is_sound() -> None:
    t = tiny_tensors()
    ids = t["d2t"] + torch.arange(DRAFT_VOCAB)
    assert torch.equal(ids, t["t2d"].nonzero().flatten())
    assert torch.equal(ids, ids.sort().values)
    assert not torch.equal(ids, torch.arange(DRAFT_VOCAB))
    loose = tiny_tensors(sort=False)
    again = loose["d2t"] + torch.arange(DRAFT_VOCAB)
    assert torch.equal(again.sort().values, ids)
    assert not torch.equal(again, ids)


def test_head_and_embedding_are_the_targets_rows() -> None:
    t = tiny_tensors(embed=True, dtype=torch.float32)
    tables = target_tables()
    assert torch.equal(t["lm_head.weight"], tables["lm_head.weight"][draft_ids()])
    assert torch.equal(t["embed_tokens.weight"], tables["model.embed_tokens.weight"])


def test_values_look_trained() -> None:
    for name, value in tiny_tensors(dtype=torch.float32).items():
        if not value.is_floating_point():
            continue
        assert value.isfinite().all(), name
        assert value.std() > 0.02, name
        if value.ndim == 2:
            kurtosis = (((value - value.mean()) / value.std()) ** 4).mean()
            spread = value.square().mean(1).sqrt()
            assert kurtosis > 3.5, name  # a normal initialisation has 3, a uniform one 1.8
            assert spread.std() / spread.mean() > 0.15, name


def test_seeds_and_keywords() -> None:
    a, b, c = tiny_tensors(), tiny_tensors(), tiny_tensors(seed=1)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])
    assert set(tiny_tensors(layer="midlayer", drop=("fc.weight",), prefix="model.")) == {
        "model." + k.replace("layers.0.", "midlayer.") for k in a if k != "fc.weight"
    }
    assert torch.equal(tiny_tensors(layer="midlayer")["midlayer.mlp.up_proj.weight"], a["layers.0.mlp.up_proj.weight"])
    assert tiny_tensors(n_aux=4, target_hidden=96)["fc.weight"].shape == (HIDDEN, 4 * 96)
    assert "d2t" not in tiny_tensors(draft_vocab=VOCAB)
    assert "rope_theta" not in tiny_config(drop=("rope_theta",))


@pytest.mark.parametrize("name", WRITERS)
def test_every_dialect_opens(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(dialect_draft(tmp_path / "draft", name))
    assert checkpoint.tensors
    assert [i.kind for i in checkpoint.issues] == (["config-unreadable"] if name == "specforge-training" else [])


def test_healthy_dialects_exist() -> None:
    assert HEALTHY.keys() <= WRITERS.keys()


def test_files_are_written(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "d", tiny_tensors(), tiny_config(), config_speculators={"a": 1})
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "config_speculators.json", "model.safetensors"]
    assert open_checkpoint(tiny_target(tmp_path / "t", weights=True)).tensors["lm_head.weight"].shape == (VOCAB, HIDDEN)
