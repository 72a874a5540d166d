"""What the three pages "add …" promise: a rule, an engine version and a dialect written as they say are there, without more."""

from __future__ import annotations

import copy
import re
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.checkpoint import dialects, fields, names
from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.engines import contract as contracts
from eagle3diag.engines.serve import serve
from eagle3diag.rules import registry
from eagle3diag.rules.case import check
from eagle3diag.rules.pages import pages
from eagle3diag.weights import layouts
from eagle3diag.weights.convert import convert
from tests.dialects import SPECFORGE_IDS, speculators_09
from tests.engine_sources import write_sglang
from tests.factory import tiny_config, tiny_tensors, write_draft

ROOT = Path(__file__).parent.parent


def block(page: str, language: str) -> str:
    """The one code block of that language on a page of the documentation."""
    (found,) = re.findall(rf"^   ```{language}\n(.*?)^   ```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.S | re.M)
    return textwrap.dedent(found)


def test_the_rule_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.load_all()
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr("eagle3diag.rules.pages.RULES", registry.RULES)
    first, last = registry.CATALOGUE["CFG"]
    (code,) = set(re.findall(r'@rule\("(\w+)"', block("add-a-rule.md", "python")))
    assert code == f"CFG{last + 1}", "the page's example is a code that is taken: name the next one"
    monkeypatch.setitem(registry.CATALOGUE, "CFG", (first, last + 1))
    exec(block("add-a-rule.md", "python"), {"__name__": "added"})

    without = write_draft(tmp_path / "without", tiny_tensors(), tiny_config(drop=["rms_norm_eps"]))
    (one,) = [f for f in check(without, select=[code]).findings if f.code == code]
    assert (one.severity.value, one.where) == ("info", "config.json: rms_norm_eps")
    for quiet in (write_draft(tmp_path / "with", tiny_tensors(), tiny_config()), speculators_09(tmp_path / "nested")):
        assert not check(quiet, select=[code]).findings
    text = pages()[f"{code}.md"]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(registry.SECTIONS)


def test_the_engine_version_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = tomllib.loads(block("add-an-engine-version.md", "toml"))["behaviour"]["norm_before_residual"]
    version = added["is"][-1]["since"]
    assert version not in contracts.releases("sglang"), "the page's example is on record: name the next release"
    assert added["is"][0]["until"] == contracts.releases("sglang")[-1]
    data = copy.deepcopy(contracts._data("sglang"))
    data["releases"].append(version)
    data["behaviour"]["norm_before_residual"] = added
    recorded = contracts._data
    monkeypatch.setattr(contracts, "_data", lambda engine: data if engine == "sglang" else recorded(engine))

    draft = open_checkpoint(write_draft(tmp_path / "draft", tiny_tensors(), tiny_config(norm_before_residual=True)))
    old, new = (serve(draft, f"sglang=={v}") for v in (added["is"][0]["until"], version))
    assert new.contract.on_record
    assert (old.wiring.norm_before_residual, new.wiring.norm_before_residual) == (False, True)


def test_the_dialect_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper, a rename, a marker and a key of layer ids, each put where the page says, and nothing else touched."""
    monkeypatch.setattr(names, "_WRAPPERS", names._WRAPPERS | {"speculator"})
    monkeypatch.setattr(names, "_ROOTS", names._ROOTS | {"combiner"})
    monkeypatch.setitem(names._ALIASES, "combiner.", "fc.")
    monkeypatch.setitem(fields.ID_KEYS, "capture_layers", "layer-output")
    monkeypatch.setattr(layouts, "_OWN_KEYS", layouts._OWN_KEYS | {"toytrain_version", "capture_layers"})
    known = dialects._dialect

    def recognised(seen: Any, algorithm: Any) -> Any:
        return ("toytrain", "high", ["toytrain_version"]) if "toytrain_version" in seen.config else known(seen, algorithm)

    monkeypatch.setattr(dialects, "_dialect", recognised)
    tensors = {f"speculator.{k.replace('fc.', 'combiner.', 1)}": v for k, v in tiny_tensors(layer="midlayer").items()}
    folder = write_draft(tmp_path / "draft", tensors, tiny_config(aux=None, toytrain_version="1.0", capture_layers=SPECFORGE_IDS))

    spec = draft_spec(open_checkpoint(folder))
    assert (spec.dialect.name, spec.algorithm) == ("toytrain", "eagle3")
    assert (spec.aux.settled, spec.aux.hf) == (True, tuple(k + 1 for k in SPECFORGE_IDS))
    assert set(spec.canonical) == set(tiny_tensors())
    unread = [f for f in check(folder, engine="sglang==0.5.23", select=["AUX402"]).findings if f.code == "AUX402"]
    assert any("capture_layers" in f.title for f in unread)
    convert(folder, tmp_path / "out", "vllm")
    moved = draft_spec(open_checkpoint(tmp_path / "out"))
    assert moved.dialect.name == "flat-export"
    assert moved.aux.hf == spec.aux.hf


def test_engine_changes_lists_what_a_copy_does_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import engine_changes  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(ROOT / "docs"))
    patch = ('getattr(config, "bias", False))\n        self.midlayer', "True)\n        self.midlayer")
    said = []
    for name, changes in (("plain", {}), ("patched", {"llama_eagle3": patch})):
        source = write_sglang(tmp_path / name, **changes)
        assert engine_changes.main([str(source), "--against", "0.5.9"]) == 0
        said.append(capsys.readouterr().out)
    plain, patched = said
    assert "fc_bias: recorded 'config'" not in plain
    assert "fc_bias: recorded 'config'" in patched
    assert "ToyForCausalLM: default 2, N//2, N-3" in plain
    assert "Qwen3ForCausalLM: recorded with the hook, not found" in plain
    assert "Not read by a scan" in plain
