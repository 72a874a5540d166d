"""The samples are what their manifest and their README say."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent.parent / "data_samples"
DRAFT = SAMPLES / "smollm2-eagle3"
SGLANG = re.compile(
    r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP0\] Decode batch, #running-req: \d+, #token: (\d+), token usage: \d\.\d\d, "
    r"accept len: (\d\.\d\d), accept rate: (\d\.\d\d), cuda graph: True, gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0$"
)
VLLM = re.compile(
    r"^\(APIServer pid=\d+\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[metrics\.py:101\] SpecDecoding metrics: Mean acceptance length: (\d\.\d\d), "
    r"Accepted throughput: (\d+\.\d\d) tokens/s, Drafted throughput: (\d+\.\d\d) tokens/s, Accepted: (\d+) tokens, Drafted: (\d+) tokens, "
    r"Per-position acceptance rate: (\d\.\d{3}), (\d\.\d{3}), (\d\.\d{3}), Avg Draft acceptance rate: (\d+\.\d)%$"
)


def test_the_manifest_names_every_file_and_its_contents() -> None:
    manifest = json.loads((DRAFT / "MANIFEST.json").read_text(encoding="utf-8"))
    there = {p.relative_to(DRAFT).as_posix(): p for p in DRAFT.rglob("*") if p.is_file() and p.name != "MANIFEST.json"}
    assert set(manifest["sha256"]) == set(there)
    for name, path in there.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == manifest["sha256"][name], name


def test_the_manifest_describes_only_what_is_here() -> None:
    manifest = json.loads((DRAFT / "MANIFEST.json").read_text(encoding="utf-8"))
    for pattern in manifest["files"]:
        assert list(DRAFT.glob(pattern)), pattern
    assert len(list((DRAFT / "dumps").glob("*.safetensors"))) == 3


def test_the_draft_is_the_one_the_manifest_describes() -> None:
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.spec import draft_spec

    manifest = json.loads((DRAFT / "MANIFEST.json").read_text(encoding="utf-8"))
    checkpoint = open_checkpoint(str(DRAFT / "draft"))
    spec = draft_spec(checkpoint)
    assert spec.aux.hf == tuple(manifest["draft"]["aux_hidden_states"]["hf_indices"])
    assert spec.rope_theta.value == manifest["draft"]["rope_theta"]
    assert spec.hidden_size.value == manifest["target"]["hidden_size"]
    assert "embed_tokens.weight" not in checkpoint.tensors


def test_sglang_lines_agree_with_themselves() -> None:
    lines = (SAMPLES / "logs" / "sglang-0.5.23.log").read_text(encoding="utf-8").splitlines()
    found = [m for line in lines if (m := SGLANG.match(line))]
    assert len(found) == 40
    assert 30 <= len(lines) <= 60
    tokens = 52
    for m in found:
        length, rate = float(m[2]), float(m[3])
        assert length == pytest.approx(1 + 3 * rate, abs=0.005 + 3 * 0.005 + 1e-6)
        gained = int(m[1]) - tokens
        assert length == pytest.approx(gained / 40, abs=0.006)
        tokens += gained


def test_the_log_of_a_lost_layer_counts_what_a_real_loop_counted() -> None:
    """Its lines hold verifications of the loop that the manifest records, and follow from each other."""
    counts = json.loads((DRAFT / "MANIFEST.json").read_text(encoding="utf-8"))["real_greedy_loop"]["faults"]["layer_never_loaded"]["counts"]
    lines = (SAMPLES / "logs" / "sglang-0.5.9-layer-dropped.log").read_text(encoding="utf-8").splitlines()
    found = [m for line in lines if (m := SGLANG.match(line))]
    assert len(found) == 13
    tokens, accepted = 52, 0
    for m in found:
        gained = int(m[1]) - tokens
        tokens += gained
        accepted += gained - 40
        assert float(m[2]) == pytest.approx(gained / 40, abs=0.0051)
        assert float(m[3]) == pytest.approx(gained / 40 / 5, abs=0.0051)  # this release counts the bonus token, of k + 1 = 5
    total = sum(k * n for k, n in enumerate(counts))
    left_out = sum(counts) - 13 * 40
    assert left_out == 20
    assert 0 <= total - accepted <= left_out


def test_vllm_lines_agree_with_themselves() -> None:
    lines = (SAMPLES / "logs" / "vllm-0.33.0.log").read_text(encoding="utf-8").splitlines()
    found = [m for line in lines if (m := VLLM.match(line))]
    assert len(found) == 30
    for m in found:
        accepted, drafted = int(m[4]), int(m[5])
        drafts = drafted // 3
        assert drafts * 3 == drafted
        assert float(m[1]) == pytest.approx(1 + accepted / drafts, abs=0.0051)
        assert float(m[1]) == pytest.approx(1 + sum(float(m[k]) for k in (6, 7, 8)), abs=0.0070)
        assert float(m[9]) == pytest.approx(100 * accepted / drafted, abs=0.051)
        assert float(m[2]) == pytest.approx(accepted / 10, abs=0.0051)
        assert float(m[3]) == pytest.approx(drafted / 10, abs=0.0051)


def test_an_installed_package_finds_the_samples_from_a_checkout_and_from_its_notebooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3diag.errors import UsageError
    from eagle3diag.report import sample

    monkeypatch.setattr(sample, "checkout", lambda: None)
    monkeypatch.chdir(SAMPLES.parent)
    assert sample.sample().draft == str(Path("data_samples/smollm2-eagle3/draft"))
    monkeypatch.chdir(SAMPLES.parent / "notebooks")
    assert sample.sample().draft == str(Path("../data_samples/smollm2-eagle3/draft"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="part of the source checkout"):
        sample.sample()
