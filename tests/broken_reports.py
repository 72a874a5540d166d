"""Six ways in which the really trained sample goes wrong, each as the arguments of a report and the code that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.fixtures_srv import sglang_line, written

SAMPLE = Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3"
Given = dict[str, Any]


def _given(draft: Path = SAMPLE / "draft", engines: str = "sglang==0.5.23", **more: Any) -> Given:
    return {"draft": str(draft), "target": str(SAMPLE / "target"), "engines": engines, **more}


def layer_dropped(folder: Path) -> Given:
    """A release that maps only midlayer.* gets layers.0.*."""
    return _given(engines="sglang==0.5.9")


def fc_bypassed(folder: Path) -> Given:
    """Launched as EAGLE: the width of the target's last state is the draft's own, so fc is skipped without a word."""
    line = "python -m sglang.launch_server --model-path t --speculative-algorithm EAGLE --speculative-draft-model-path d"
    return _given(launch=f"{line} --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4")


def ids_one_late(folder: Path) -> Given:
    """HF indices where the engine reads outputs of layers."""
    draft = folder / "late"
    shutil.copytree(SAMPLE / "draft", draft)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": config.pop("eagle_aux_hidden_state_layer_ids")}
    (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return _given(draft, dump=str(SAMPLE / "dumps" / "sample_0.safetensors"))


def mapping_empty(folder: Path) -> Given:
    """Exported before the vocabulary mapping was built."""
    draft = folder / "empty"
    draft.mkdir()
    shutil.copy(SAMPLE / "draft" / "config.json", draft)
    tensors = load_file(SAMPLE / "draft" / "model.safetensors")
    save_file({**tensors, "d2t": torch.zeros_like(tensors["d2t"])}, draft / "model.safetensors")
    return _given(draft, engines="vllm==0.33.0")


def dump_shifted(folder: Path) -> Given:
    """Every state stands beside the token after its own."""
    dumps = folder / "dumps"
    dumps.mkdir()
    for file in sorted((SAMPLE / "dumps").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            about = opened.metadata()
        moved = {n: t.roll(1, 0).contiguous() if n.startswith(("hidden_states", "final")) else t for n, t in load_file(file).items()}
        save_file(moved, dumps / file.name, about)
    return _given(dump=str(dumps))


def log_collapsed(folder: Path) -> Given:
    """A sound draft on a sound engine, by their files, and nothing accepted."""
    lines = [sglang_line(i, 1.0 + 0.01 * (i % 2), 0.0) for i in range(40)]
    return _given(log=written(folder, lines))


VARIANTS: dict[str, tuple[str, Callable[[Path], Given]]] = {
    "layer dropped": ("KEY203", layer_dropped),
    "fc bypassed": ("AUX405", fc_bypassed),
    "ids one late": ("AUX401", ids_one_late),
    "mapping empty": ("VAL307", mapping_empty),
    "dump shifted": ("DMP605", dump_shifted),
    "log collapsed": ("SRV801", log_collapsed),
}
