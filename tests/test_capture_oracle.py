"""Every record of what the engines' own target classes captured when run, predicted in-process.

Compares exactly as the acceptance runner does: the same draft and target configs, the same pass condition.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.checkpoint.target import open_target
from eagle3diag.engines.capture import capture, target_support
from eagle3diag.engines.contract import load_contract, releases

RECORDS = Path(__file__).parents[2] / "shared" / "cases" / "aux_oracle.json"
WIDTH = 64


def records() -> list[tuple[str, str]]:
    if not RECORDS.exists():
        return []
    data = json.loads(RECORDS.read_text())
    return [(engine, version) for engine in ("sglang", "vllm") for version in data[engine]]


def cases(engine: str, version: str) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    for name, record in json.loads(RECORDS.read_text())[engine][version].items():
        for case in record.get("cases") or [{"n_layers": 61, "ids": None}]:
            yield name, record["hook"], case


def target(folder: Path, arch: str, n: int) -> Any:
    body = {
        "hidden_size": WIDTH,
        "num_hidden_layers": n,
        "vocab_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    whole = {"architectures": [arch], **({"text_config": body} if arch.endswith("ForConditionalGeneration") else body)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole))
    return open_target(str(folder))


def wrong(engine: str, hook: bool, case: dict[str, Any], got: tuple[int, ...] | None, stops: bool, refused: bool) -> str:
    if not hook:
        return "" if stops or not got else f"class has no hook, said {got}"
    if engine == "vllm" and refused:
        return ""
    if case.get("error"):
        return "" if stops or not got else f"engine raises {case['error']}, said {got}"
    if not case["hf"]:
        return "" if not got else f"engine captures nothing, said {got}"
    return "" if got is not None and list(got) == case["hf"] else f"engine captures {case['hf']}, said {got}"


@pytest.mark.skipif(not RECORDS.exists(), reason="the recorded engine runs lie outside this checkout")
@pytest.mark.parametrize(("engine", "version"), records() or [("sglang", releases("sglang")[-1])])
def test_records(engine: str, version: str, tmp_path: Path) -> None:
    contract = load_contract(engine, version)
    bad = []
    for name, hook, case in cases(engine, version):
        spec = target(tmp_path / f"{name}-{case['n_layers']}", name, case["n_layers"])
        ids = case["ids"]
        config: dict[str, Any] = {"num_hidden_layers": 1}
        if ids is not None and engine == "sglang":
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        elif ids is not None:
            config["eagle_aux_hidden_state_layer_ids"] = ids
        said = capture(contract, config, spec, hidden=WIDTH)
        refused = target_support(contract, spec).refusal is not None
        why = wrong(engine, hook, case, said.prefill_hf, said.loud or refused, refused)
        if why:
            bad.append(f"{name} N={case['n_layers']} ids={ids}: {why}")
        if hook and not case.get("error") and len(case["hf"]) == len(ids or (1, 2, 3)) and case["hf"] == list(said.prefill_hf or ()):
            assert not said.loud or "never cleared" in said.problem, f"{name} {ids}: a sound capture is called {said.problem}"
    assert not bad, f"{len(bad)} wrong, first: {bad[:5]}"
