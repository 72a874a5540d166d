"""The virtual engine against recorded runs of the engines' own loaders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.engines.serve import serve

ORACLE = Path(__file__).resolve().parents[2] / "shared" / "cases" / "oracle.json"
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
    "F64": torch.float64,
}


def write(folder: Path, variant) -> Path:
    folder.mkdir(parents=True)
    out = {
        t["name"]: (torch.tensor(t["values"]).reshape(t["shape"]) if "values" in t else torch.zeros(t["shape"])).to(DTYPES[t["dtype"]])
        for t in variant["tensors"]
    }
    save_file(out, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(variant["config"]))
    return folder


def story(record) -> dict:
    """What the record says, in the words of a ServedDraft."""
    if "refused" in record:
        return {"refused": record["refused"]["stage"]}
    quiet = {n for n in record["dropped"] if "t2d" in n or n == "d2t" or n.endswith(".d2t")}
    own = min(int(k.split("=")[1]) for k in record["fc"])
    return {
        "dropped": sorted(set(record["dropped"]) - quiet),
        "truncated": sorted(record["truncated"]),
        # embedding and mapping are judged apart: the target's takes the embedding's place, a missing mapping starts as zeros
        "never": {
            k: v
            for k, v in sorted(record["never_filled"].items())
            if not k.endswith("embed_tokens.weight") and k != "d2t" and v != "target"
        },
        "bypassed": record["fc"][f"hidden_width={own}"] == "bypassed",
    }


def told(served) -> dict:
    if served.refused is not None:
        return {"refused": served.refused.stage}
    gone = [
        n
        for n, f in served.tensors.items()
        if f.fate in ("dropped", "skipped") and "t2d" not in n and n != "d2t" and not n.endswith(".d2t")
    ]
    return {
        "dropped": sorted(gone),
        "truncated": sorted(n for n, f in served.tensors.items() if f.fate == "truncated"),
        "never": {
            k: v for k, v in sorted(served.never_filled.items()) if not k.endswith("embed_tokens.weight") and k != "d2t" and v != "target"
        },
        "bypassed": served.fc.bypassed_at_width is not None,
    }


@pytest.mark.skipif(not ORACLE.exists(), reason="needs ../shared/cases/oracle.json, recorded runs of the engines' loaders")
def test_every_recorded_loader_run_is_predicted(tmp_path):
    data = json.loads(ORACLE.read_text())
    wrong = []
    count = 0
    for name, records in data["records"].items():
        draft = open_checkpoint(write(tmp_path / name, data["variants"][name]))
        spec = draft_spec(draft)
        for version, record in records.items():
            count += 1
            said = told(serve(draft, version.replace("-", "==", 1), spec=spec))
            if said != story(record):
                wrong.append((name, version, said, story(record)))
    assert not wrong, wrong[:3]
    assert count > 700
