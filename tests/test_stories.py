"""The four stories this project began with, each to its right end."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

from eagle3diag.rules.case import check
from tests.sparse import KIMI_DRAFT, KIMI_TARGET, sparse_draft, target

LAUNCH = (
    "python -m sglang.launch_server --model-path /models/target --speculative-algorithm EAGLE --speculative-draft-model-path /models/draft "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --tp 8"
)


def found(report, *severities):
    return {f.code: f for f in report.findings if not severities or f.severity.value in severities}


def test_story_1_the_dropped_layer_the_missing_hook_and_the_convention(tmp_path):
    report = check(sparse_draft(tmp_path, KIMI_DRAFT), target=target(tmp_path, KIMI_TARGET), engine="sglang==0.5.9", headers_only=True)
    assert report.verdict == "broken"
    serious = found(report, "error")
    said = str(serious["KEY203"].to_dict())
    assert "layers.0" in said
    assert "midlayer" in said
    assert "KimiK25ForConditionalGeneration" in str(serious["AUX404"].to_dict())
    served = report.case.served
    layer = [n for n in served.tensors if n.startswith("layers.0.")]
    assert len(layer) == 10
    assert all(served.tensors[n].fate == "dropped" for n in layer)
    assert served.never_filled["layers.0.self_attn.q_proj.weight"] == "uninitialised"
    # the ids are the default formula read as HF indices; SGLang's generic rule would add one
    aux = report.case.spec.aux
    assert aux.hf == (2, 30, 58)
    assert {r.convention for r in aux.readings} == {"hf", "layer-output"}
    convention = str(found(report, "info")["AUX401"].to_dict())
    assert all(str(k) in convention for k in (2, 30, 58, 3, 31, 59))


def test_story_1_the_ids_reach_other_layers_where_the_hook_exists(tmp_path):
    where, to = sparse_draft(tmp_path, KIMI_DRAFT, layer="midlayer"), target(tmp_path, KIMI_TARGET)
    late = check(where, target=to, engine="sglang==0.5.12", headers_only=True)
    assert late.case.served.aux.prefill_hf == (3, 31, 59)
    text = str(found(late, "error", "warning")["AUX401"].to_dict())
    assert all(str(k) in text for k in (2, 30, 58, 3, 31, 59))
    right = check(where, target=to, engine="sglang==0.5.23", headers_only=True)
    assert right.case.served.aux.prefill_hf == (2, 30, 58)
    assert "AUX401" not in found(right)


def test_story_2_fc_is_bypassed_because_7168_meets_7168(tmp_path):
    report = check(
        sparse_draft(tmp_path, KIMI_DRAFT), target=target(tmp_path, KIMI_TARGET), engine="sglang==0.5.23", launch=LAUNCH, headers_only=True
    )
    serious = found(report, "error")
    assert {"ENG501", "AUX405"} <= set(serious)
    text = str(serious["AUX405"].to_dict()).replace(",", "")
    assert "7168" in text
    assert "21504" in text
    served = report.case.served
    assert (served.fc.runs, served.fc.width_in, served.fc.bypassed_at_width) == (False, 21504, 7168)
    assert (served.wiring.fc, served.wiring.state, served.wiring.mapping) == ("bypassed", "final", "missing")
    assert served.refused is None  # nothing is loud: that is the trouble


def speculators(ids):
    layer = {k: v for k, v in KIMI_DRAFT.items() if k not in ("architectures", "eagle_config", "draft_vocab_size", "dtype")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.6.0",
        "draft_vocab_size": 32000,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": ids,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"speculative_tokens": 3}],
            "verifier": {"name_or_path": "moonshotai/Kimi-K2.5"},
        },
    }


def test_story_3_two_configs_which_tool_reads_which_and_where_they_disagree(tmp_path):
    flat = copy.deepcopy(KIMI_DRAFT)
    nested = speculators([2, 30, 58])
    nested["transformer_layer_config"]["rope_theta"] = 10000.0
    report = check(sparse_draft(tmp_path, flat, config_speculators=nested), headers_only=True)
    assert [(c.file, c.schema) for c in report.case.draft.configs] == [("config.json", "flat"), ("config_speculators.json", "speculators")]
    text = str(found(report, "warning", "error")["CFG103"].to_dict())
    assert "config_speculators.json" in text
    assert "50000" in text.replace(",", "")
    assert "10000" in text.replace(",", "")
    assert "vLLM" in text or "vllm" in text
    assert "SGLang" in text or "sglang" in text


def test_story_3_two_configs_that_agree_raise_nothing(tmp_path):
    flat = copy.deepcopy(KIMI_DRAFT)
    flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 29, 57]  # layer outputs: the same states
    report = check(sparse_draft(tmp_path, flat, config_speculators=speculators([2, 30, 58])), headers_only=True)
    assert "CFG103" not in found(report, "error", "warning")


def test_story_4_vllm_016_refuses_the_target_and_says_why(tmp_path):
    report = check(sparse_draft(tmp_path, KIMI_DRAFT), target=target(tmp_path, KIMI_TARGET), engine="vllm==0.16.0", headers_only=True)
    served = report.case.served
    assert served.refused is not None
    assert served.refused.stage == "start"
    assert found(report, "error").keys() & {"AUX404", "ENG504"}
    assert "Eagle3 is only supported for" in served.refused.message
    assert "0.18.0" in served.refused.why  # the first version that takes it


def test_the_stories_need_no_torch(tmp_path):
    where, to = sparse_draft(tmp_path, KIMI_DRAFT), target(tmp_path, KIMI_TARGET)
    code = (
        "import sys; from eagle3diag.cli import main; "
        f"rc = main(['check', {str(where)!r}, '--target', {str(to)!r}, '--engine', 'sglang==0.5.9', '--headers-only', '--format', 'json']);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(rc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"] == "broken"
