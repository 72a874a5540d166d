"""Logs made from the counts of every fault of the sample's manifest: with the dumps, which wirings do they allow?

The true cause is among the compatible ones; what counts cannot separate from it is in its group; nothing that they exclude stands above
it; and where a fault loses more than a tenth of a token, the healthy wiring is excluded. The counts belong to all eight dumps, which lie
beside the repository.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec, resolved
from eagle3diag.checkpoint.target import open_target
from eagle3diag.draft.measure import Bench
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.serving.compatible import EXCLUDED, Compared, Wirings, observed
from eagle3diag.serving.logs import read_bytes
from eagle3diag.serving.metrics import histogram_of
from tests.fixtures_srv import request, sglang_line

ROOT = Path(__file__).resolve().parent.parent
WHOLE = ROOT.parent / "shared" / "data" / "smollm2-eagle3"
MANIFEST = json.loads((ROOT / "data_samples" / "smollm2-eagle3" / "MANIFEST.json").read_text(encoding="utf-8"))
OFFLINE, LOOP = MANIFEST["offline"]["faults"], MANIFEST["real_greedy_loop"]["faults"]

#: fault -> how the wiring is called that would show it
NAMES = {
    "healthy": "as trained",
    "layers_plus_1": "layers 3, 16, 28 in place of",
    "layers_minus_1": "layers 1, 14, 26 in place of",
    "embedding_as_first": "layers 0, 2, 15 in place of",
    "order_27_15_2": "layers 27, 15, 2 in place of",
    "order_2_27_15": "layers 2, 27, 15 in place of",
    "last_state_is_final_prenorm": "layers 2, 15, 30 in place of",
    "fc_bypassed": "fc bypassed in place of applied",
    "aux_final_normed": "norm on the states final in place of none",
    "layer_never_loaded": "7 parameters left at their start values",
    "fc_never_loaded": "1 parameters left at their start values",
    "lm_head_random": "head uninitialised in place of draft",
    "embedding_random": "embedding uninitialised in place of",
    "head_is_first_target_rows": "head cut to the target's first rows",
    "d2t_missing": "mapping left out in place of",
    "d2t_absolute": "mapping by d2t as absolute ids",
    "token_one_early": "token shift -1 in place of 0",
    "state_one_early": "state shift -1 in place of 0",
    "rope_theta_1e4": "rope_theta 10000 in place of",
    "rope_theta_1e6": "rope_theta 1000000 in place of",
    "norm_before_residual_true": "norm_before_residual true in place of false",
    "final_norm_skipped": "final_norm false in place of true",
    "post_norm_fed_back": "norm_output true in place of false",
    "concat_hidden_first": "order in front of the layer hidden-first in place of",
}

pytestmark = pytest.mark.skipif(not WHOLE.is_dir(), reason="the eight dumps lie beside the repository (../shared)")


@pytest.fixture(scope="module")
def wirings() -> Wirings:
    checkpoint, target = open_checkpoint(str(WHOLE / "draft")), open_target(str(WHOLE / "target"))
    spec = resolved(draft_spec(checkpoint), target.num_layers.value)
    return Wirings(Bench.prepare(checkpoint, spec, open_dump(str(WHOLE / "dumps")), target, steps=4), target)


def test_every_fault_of_the_manifest_is_here() -> None:
    assert set(NAMES) == set(OFFLINE)


@pytest.mark.parametrize("name", list(OFFLINE))
@pytest.mark.parametrize("told", ["positions", "length"])
def test_the_counts_of_a_fault_allow_it(name: str, told: str, wirings: Wirings) -> None:
    fault = OFFLINE[name]
    joint, rows = fault["joint"], fault["positions"]
    if told == "positions":
        log = read_bytes(request([round(n) for n in histogram_of(joint, rows)]).encode())
        assert log.per_position == pytest.approx(joint, abs=1e-3)
    else:
        start = "server_args=ServerArgs(speculative_num_steps=4, speculative_eagle_topk=1, version='0.5.23')"
        length = 1 + sum(joint)
        lines = [sglang_line(i, length + (0.02 if i % 2 else -0.02) * (length > 1.02), None) for i in range(27)]
        log = read_bytes("\n".join([start, *lines]).encode())
    seen = observed(log)
    assert seen is not None
    found = wirings.compare(seen)
    names = [c.name for c in found.compared]
    at = next(i for i, n in enumerate(names) if n.startswith(NAMES[name]))
    true = found.compared[at]
    assert true.compatible, (true.z, true.joint)
    assert true.group > 0
    assert all(c.counts_z <= EXCLUDED for c in found.compared[:at])
    if 1 + sum(OFFLINE["healthy"]["joint"]) - (1 + sum(joint)) > 0.1:
        assert not found.own.compatible
        assert found.own.group == 0
    _grouped(found.compared, rows, told == "positions")


def _grouped(compared: Sequence[Compared], rows: int, positions: bool) -> None:
    """Every compatible wiring is in a group, equal ones in the same, and a group begins only where counts tell it from those before."""
    heads: dict[int, Compared] = {}
    for c in compared:
        assert (c.group > 0) is c.compatible
        if not c.compatible:
            continue
        for other in compared:
            same = c.joint == other.joint if positions else c.length == other.length
            if other.compatible and same:
                assert other.group == c.group
        if c.group not in heads:
            for head in heads.values():
                if positions:
                    gaps = [abs(p - q) / max((p * (1 - p) / rows) ** 0.5, 1 / rows) for p, q in zip(c.joint, head.joint, strict=True)]
                    assert max(gaps) > 3
                else:
                    assert abs(c.length - head.length) > 3 * 0.02 / 27**0.5  # the scatter of the log's 27 lines
            heads[c.group] = c


@pytest.mark.parametrize("name", list(LOOP))
def test_the_counts_of_a_real_loop_allow_their_fault(name: str, wirings: Wirings) -> None:
    log = read_bytes(request(LOOP[name]["counts"]).encode())
    assert log.acceptance_length == pytest.approx(LOOP[name]["mean_accept_length"], abs=1e-4)
    seen = observed(log)
    assert seen is not None
    found = wirings.compare(seen)
    true = next(c for c in found.compared if c.name.startswith(NAMES[name]))
    assert true.compatible, (true.z, true.joint)
    if OFFLINE["healthy"]["expected_length_k4"] - OFFLINE[name]["expected_length_k4"] > 0.1:
        assert not found.own.compatible
