"""Which target states reach the draft: hand-written facts, each with its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3diag.checkpoint.model import TargetSpec
from eagle3diag.checkpoint.target import open_target
from eagle3diag.engines import targets, versions
from eagle3diag.engines.capture import capture, target_support
from eagle3diag.engines.contract import ENGINES, load_contract, releases
from eagle3diag.engines.model import AuxCapture, Launch
from tests.factory import tiny_target

KIMI = "KimiK25ForConditionalGeneration"
WIDTH = 64


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(arch: str, n: int = 61, **change: Any) -> TargetSpec:
        folder = tmp_path / f"{arch}-{n}-{len(change)}"
        return open_target(str(tiny_target(folder, architectures=[arch], num_hidden_layers=n, hidden_size=WIDTH, **change)))

    return make


def nested(ids: Any, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, **more}}


def top(ids: Any) -> dict[str, Any]:
    return {"eagle_aux_hidden_state_layer_ids": ids}


def on(
    version: str, config: dict[str, Any], target: TargetSpec | None, launch: Launch | None = None, runner: str | None = None
) -> AuxCapture:
    engine, _, number = version.partition("==")
    return capture(load_contract(engine, number, runner=runner), config, target, launch, hidden=WIDTH)


NO_GRAPH = Launch(engine="sglang", text="", cuda_graph=False)


class TestKimi:
    """Kimi-K2.5 (N=61): no hook, then one layer late for HF ids, then verbatim (engine report 3.1 and 3.4, executed)."""

    def test_no_hook_before_0_5_10(self, made: Any) -> None:
        support = target_support(load_contract("sglang", "0.5.9"), made(KIMI))
        assert (support.hook, support.since) == (False, "0.5.10")
        assert support.message == f"{KIMI} has no capture hook in sglang 0.5.9; first in 0.5.10"
        assert support.refusal is not None
        assert support.refusal.startswith("AttributeError")
        got = on("sglang==0.5.9", nested([2, 30, 58]), made(KIMI))
        assert (got.prefill_hf, got.hook, got.loud) == (None, False, True)

    @pytest.mark.parametrize("version", ["0.5.10", "0.5.11", "0.5.12"])
    def test_one_late(self, made: Any, version: str) -> None:
        got = on(f"sglang=={version}", nested([2, 30, 58]), made(KIMI), NO_GRAPH)
        assert (got.prefill_hf, got.verify_hf, got.shift, got.problem) == ((3, 31, 59), (3, 31, 59), 1, "")

    @pytest.mark.parametrize("version", ["0.5.13", "0.5.17", "0.5.23"])
    def test_verbatim_unless_first_is_one(self, made: Any, version: str) -> None:
        assert on(f"sglang=={version}", nested([2, 30, 58]), made(KIMI)).prefill_hf == (2, 30, 58)
        assert on(f"sglang=={version}", nested([1, 29, 57]), made(KIMI)).prefill_hf == (2, 30, 58)
        assert on(f"sglang=={version}", nested([57, 29, 1]), made(KIMI)).prefill_hf == (1, 29, 57)
        assert on(f"sglang=={version}", {}, made(KIMI)).prefill_hf == (2, 30, 58)

    def test_vllm_refuses_by_model_type(self, made: Any) -> None:
        support = target_support(load_contract("vllm", "0.16.0"), made(KIMI, model_type="kimi_k25"))
        assert support.since == "0.18.0"
        assert support.refusal is not None
        assert "Eagle3 is only supported for ['llama', 'qwen'" in support.refusal
        assert on("vllm==0.16.0", top([2, 30, 58]), made(KIMI)).loud
        assert on("vllm==0.18.0", top([2, 30, 58]), made(KIMI)).prefill_hf == (2, 30, 58)


class TestWhereIdsStand:
    def test_sglang_ignores_top_level(self, made: Any) -> None:
        got = on("sglang==0.5.23", top([1, 9, 20]), made("LlamaForCausalLM", 32))
        assert got.ids is None
        assert got.source == "default [2, N//2, N-3] at N=32"
        assert got.prefill_hf == (2, 16, 29)
        assert got.unread == {"eagle_aux_hidden_state_layer_ids": (1, 9, 20)}

    @pytest.mark.parametrize(("version", "runner", "read"), [("0.16.0", None, False), ("0.22.0", "v1", True), ("0.33.0", "v2", False)])
    def test_vllm_nested(self, made: Any, version: str, runner: str | None, read: bool) -> None:
        got = on(f"vllm=={version}", nested([4, 9, 20]), made("LlamaForCausalLM", 32), runner=runner)
        assert got.prefill_hf == ((4, 9, 20) if read else (2, 16, 29))
        assert bool(got.unread) is not read

    def test_vllm_top_level_wins_over_nested(self, made: Any) -> None:
        got = on("vllm==0.33.0", top([4, 9, 20]) | nested([1, 2, 3]), made("LlamaForCausalLM", 32), runner="v1")
        assert got.prefill_hf == (4, 9, 20)
        assert got.unread == {"eagle_config.eagle_aux_hidden_state_layer_ids": (1, 2, 3)}

    def test_same_ids_in_both_places_are_no_loss(self, made: Any) -> None:
        assert on("vllm==0.33.0", top([4, 9, 20]) | nested([4, 9, 20]), made("LlamaForCausalLM", 32), runner="v1").unread == {}

    def test_no_engine_read_ids_at_first(self, made: Any) -> None:
        assert on("sglang==0.4.8", nested([4, 9, 20]), made("LlamaForCausalLM", 32)).prefill_hf == (2, 16, 29)
        assert on("vllm==0.11.0", top([4, 9, 20]), made("LlamaForCausalLM", 32)).prefill_hf == (2, 16, 29)

    def test_speculators(self, made: Any) -> None:
        config = {"speculators_config": {}, "transformer_layer_config": {}, **top([4, 9, 20])}
        assert on("vllm==0.16.0", config, made("LlamaForCausalLM", 32)).prefill_hf == (4, 9, 20)
        lost = on("vllm==0.11.0", config, made("LlamaForCausalLM", 32))
        assert (lost.prefill_hf, list(lost.unread.values())) == ((2, 16, 29), [(4, 9, 20)])
        assert on("sglang==0.5.23", config, made("LlamaForCausalLM", 32)).ids is None

    def test_no_aux_states_wanted(self, made: Any) -> None:
        off = nested([4, 9, 20], use_aux_hidden_state=False)
        assert on("sglang==0.5.23", off, made("LlamaForCausalLM", 32)).prefill_hf == ()
        assert on("sglang==0.5.7", off, made("LlamaForCausalLM", 32), NO_GRAPH).prefill_hf == (5, 10, 21)

    @pytest.mark.parametrize("value", [None, "4,9,20", {}, 3])
    def test_odd_values(self, made: Any, value: Any) -> None:
        llama = made("LlamaForCausalLM", 32)
        assert on("vllm==0.33.0", top(value), llama).prefill_hf == (2, 16, 29)
        got = on("sglang==0.5.23", nested(value), llama)
        assert (got.prefill_hf, got.loud) == ((2, 16, 29), False) if value is None else (None, True)
        assert on("sglang==0.5.23", {"eagle_config": value}, llama).prefill_hf == (2, 16, 29)

    def test_empty_list(self, made: Any) -> None:
        llama = made("LlamaForCausalLM", 32)
        assert on("vllm==0.33.0", top([]), llama).prefill_hf == (2, 16, 29)
        assert on("sglang==0.5.23", nested([]), llama).loud


class TestEdges:
    def test_gpt_oss(self, made: Any) -> None:
        gpt = made("GptOssForCausalLM", 36)
        assert on("sglang==0.5.16", nested([24, 30, 36]), gpt).prefill_hf == (25, 31)
        assert on("sglang==0.5.17", nested([24, 30, 36]), gpt).prefill_hf == (24, 30, 36)
        assert on("sglang==0.5.17", nested([24, 30, 35]), gpt).prefill_hf == (25, 31, 36)
        assert on("sglang==0.5.17", nested([-1, 18, 33]), gpt).prefill_hf == (0, 19, 34)

    def test_out_of_range(self, made: Any) -> None:
        llama = on("sglang==0.5.23", nested([2, 18, 36]), made("LlamaForCausalLM", 36))
        assert (llama.prefill_hf, llama.loud) == ((3, 19), True)
        assert "HF [37] can never be captured" in llama.problem
        assert on("sglang==0.5.3", nested([2, 18, 36]), made("Qwen3MoeForCausalLM", 36)).prefill_hf == (3, 19)
        moe = on("sglang==0.5.4.post3", nested([2, 18, 36]), made("Qwen3MoeForCausalLM", 36))
        assert moe.prefill_hf is None
        assert "IndexError" in moe.problem
        assert on("sglang==0.5.17", nested([2, 18, 36]), made("Qwen3VLMoeForConditionalGeneration", 36)).prefill_hf == (3, 19)
        assert "IndexError" in on("sglang==0.5.23", nested([2, 18, 36]), made("Qwen3VLMoeForConditionalGeneration", 36)).problem
        assert on("sglang==0.5.12", nested([2, 18, 35]), made("Gemma4ForCausalLM", 36)).prefill_hf == (3, 19, 36)

    def test_one_state_left_bypasses_fc_silently(self, made: Any) -> None:
        got = on("sglang==0.5.23", nested([2, 40, 50]), made("LlamaForCausalLM", 36))
        assert (got.prefill_hf, got.loud) == ((3,), False)
        assert "without a word" in got.problem
        assert on("vllm==0.33.0", top([2, 40, 50]), made("LlamaForCausalLM", 36)).loud

    def test_deepseek_says_so_since_0_5_17(self, made: Any) -> None:
        deepseek = made("DeepseekV3ForCausalLM", 61)
        assert on("sglang==0.5.13", nested([2, 30, 61]), deepseek).prefill_hf == (2, 30)
        for version in ("0.5.17", "0.5.23"):
            got = on(f"sglang=={version}", nested([2, 30, 61]), deepseek)
            assert (got.prefill_hf, got.loud) == (None, True)
            assert "captured 2 of 3" in got.problem
            assert on(f"sglang=={version}", nested([1, 1, 29]), deepseek).loud
        assert on("sglang==0.5.23", nested([2, 30, 61]), made("Glm4MoeLiteForCausalLM", 61)).prefill_hf == (2, 30)

    def test_state_before_layer_zero(self, made: Any) -> None:
        assert "TypeError" in on("sglang==0.5.17", nested([-1, 18, 33]), made("LlamaForCausalLM", 36)).problem
        assert on("sglang==0.5.23", nested([-1, 18, 33]), made("LlamaForCausalLM", 36)).prefill_hf == (0, 19, 34)
        assert on("sglang==0.5.9", nested([-1, 17, 32]), made("Qwen3ForCausalLM", 36), NO_GRAPH).prefill_hf == (0, 18, 33)
        assert on("vllm==0.16.0", top([0, 18, 33]), made("LlamaForCausalLM", 36)).loud
        assert on("vllm==0.16.0", top([0, 18, 33]), made("GptOssForCausalLM", 36)).prefill_hf == (0, 18, 33)
        assert on("vllm==0.33.0", top([0, 18, 33]), made("LlamaForCausalLM", 36)).prefill_hf == (0, 18, 33)
        assert on("vllm==0.33.0", top([0, 18, 33]), made("DeepseekV3ForCausalLM", 36)).loud

    def test_last_layer_on_vllm(self, made: Any) -> None:
        assert on("vllm==0.17.0", top([2, 18, 36]), made("LlamaForCausalLM", 36)).prefill_hf == (2, 18)
        assert on("vllm==0.18.0", top([2, 18, 36]), made("LlamaForCausalLM", 36)).prefill_hf == (2, 18, 36)
        assert on("vllm==0.24.0", top([2, 18, 36]), made("DeepseekV3ForCausalLM", 36)).prefill_hf == (2, 18)
        assert on("vllm==0.25.0", top([2, 18, 36]), made("DeepseekV3ForCausalLM", 36)).prefill_hf == (2, 18, 36)

    def test_shallow_target(self, made: Any) -> None:
        got = on("sglang==0.5.23", {}, made("LlamaForCausalLM", 4))
        assert (got.prefill_hf, got.loud) == ((1, 2), True)
        assert "the default layers in a target of 4 layers give 2 of 3 states" in got.problem

    def test_default_one_later(self, made: Any) -> None:
        assert on("sglang==0.5.23", {}, made("MiniMaxM3SparseForConditionalGeneration", 60)).prefill_hf == (3, 31, 58)

    def test_order_is_ascending(self, made: Any) -> None:
        assert on("sglang==0.5.23", nested([20, 9, 4]), made("LlamaForCausalLM", 32)).prefill_hf == (5, 10, 21)


class TestGraphOverride:
    """SGLang 0.4.9-0.5.10: graph-replayed verify steps use the default list (engine report 3.3)."""

    def test_verify_uses_default(self, made: Any) -> None:
        got = on("sglang==0.5.9", nested([4, 9, 20]), made("LlamaForCausalLM", 61))
        assert (got.prefill_hf, got.verify_hf, got.loud) == ((5, 10, 21), (2, 30, 58), False)
        assert on("sglang==0.5.9", nested([4, 9, 20]), made("LlamaForCausalLM", 61), NO_GRAPH).verify_hf == (5, 10, 21)
        assert on("sglang==0.5.11", nested([4, 9, 20]), made("LlamaForCausalLM", 61)).verify_hf == (5, 10, 21)

    def test_flags_are_never_cleared(self, made: Any) -> None:
        got = on("sglang==0.5.9", nested([4, 9, 20]), made("Qwen3MoeForCausalLM", 61))
        assert (got.prefill_hf, got.loud) == ((5, 10, 21), True)
        assert "[2, 5, 10, 21, 30, 58]" in got.problem
        same = on("sglang==0.5.9", nested([1, 29, 57]), made("Qwen3MoeForCausalLM", 61))
        assert (same.prefill_hf, same.verify_hf, same.problem) == ((2, 30, 58), (2, 30, 58), "")


class TestSupport:
    @pytest.mark.parametrize(
        ("engine", "arch", "version", "since"),
        [
            ("sglang", "DeepseekV3ForCausalLM", "0.5.3", "0.5.4.post2"),
            ("sglang", "Qwen3VLForConditionalGeneration", "0.5.10", "0.5.11"),
            ("sglang", "GptOssForCausalLM", "0.4.10", "0.5.0rc2"),
            ("sglang", "Glm4MoeForCausalLM", "0.5.4", "0.5.5"),
            ("sglang", "Gemma3ForCausalLM", "0.5.11", "0.5.12"),
            ("vllm", "Qwen3MoeForCausalLM", "0.11.0", "0.11.1"),
            ("vllm", "Gemma4ForCausalLM", "0.19.0", "0.19.1"),
            ("vllm", "MiniMaxM2ForCausalLM", "0.19.1", "0.20.0"),
            ("vllm", "ApertusForCausalLM", "0.21.0", "0.22.0"),
        ],
    )
    def test_first_release(self, made: Any, engine: str, arch: str, version: str, since: str) -> None:
        kind = targets._data("vllm")["model_types"].get(arch, "")
        early = target_support(load_contract(engine, version), made(arch, model_type=kind))
        assert early.since == since
        assert early.refusal is not None
        later = target_support(load_contract(engine, since), made(arch, model_type=kind))
        assert (later.hook, later.message, later.refusal) == (True, "", None)

    @pytest.mark.parametrize(("engine", "arch"), [("sglang", "KimiVLForConditionalGeneration"), ("vllm", "Glm4MoeForCausalLM")])
    def test_never(self, made: Any, engine: str, arch: str) -> None:
        support = target_support(load_contract(engine), made(arch))
        assert (support.hook, support.since) == (False, None)
        assert "nor in any other release on record" in support.message

    def test_lost(self, made: Any) -> None:
        glm = made("Glm4vForConditionalGeneration", 40)
        assert on("sglang==0.5.3", {}, glm).prefill_hf == ()
        assert target_support(load_contract("sglang", "0.5.5"), glm).hook is False

    @pytest.mark.parametrize("version", ["0.5.11", "0.5.17", "0.5.21"])
    def test_hook_that_captures_nothing(self, made: Any, version: str) -> None:
        got = on(f"sglang=={version}", nested([4, 9, 20]), made("Qwen3_5ForConditionalGeneration", 48), NO_GRAPH)
        assert (got.prefill_hf, got.loud, got.hook) == ((), True, True)
        assert "first in 0.5.22" in got.problem

    def test_gemma3_branch(self, made: Any) -> None:
        gemma = made("Gemma3ForCausalLM", 26)
        assert on("sglang==0.5.16", {}, gemma).problem == ""
        got = on("sglang==0.5.17", {}, gemma)
        assert "without the residual stream" in got.problem
        assert not got.loud

    def test_unknown_class_is_no_error(self, made: Any) -> None:
        got = on("sglang==0.5.23", nested([4, 9, 20]), made("BrandNewForCausalLM", 48))
        assert (got.prefill_hf, got.hook, got.loud) == ((5, 10, 21), None, False)
        assert "not on record" in got.source

    def test_no_target(self) -> None:
        got = on("sglang==0.5.23", nested([4, 9, 20]), None)
        assert (got.prefill_hf, got.hook, got.loud, got.problem) == ((5, 10, 21), None, False, "")
        assert on("sglang==0.5.23", {}, None).prefill_hf is None
        assert on("vllm==0.33.0", top([4, 9, 20]), None).prefill_hf == (4, 9, 20)

    def test_transformers_backend(self, made: Any) -> None:
        line = Launch(engine="vllm", text="", options={"model-impl": "transformers"})
        glm = made("Glm4MoeForCausalLM", 46, model_type="glm4_moe")
        assert on("vllm==0.33.0", top([2, 23, 43]), glm, line).prefill_hf == (2, 23, 43)
        zero = on("vllm==0.33.0", top([0, 23, 43]), glm, line)
        assert zero.loud
        assert "KeyError" in zero.problem
        refused = target_support(load_contract("vllm", "0.21.0"), glm, line).refusal
        assert refused is not None
        assert "glm4_moe" in refused


@pytest.mark.parametrize("engine", ENGINES)
def test_every_class_in_every_release(engine: str, made: Any) -> None:
    """No listed class stops the tool in any release, and only listed words are used."""
    data = targets._data(engine)
    for family in data["family"].values():
        assert family["source"]
        assert family["status"] in ("run", "read", "inferred")
        since = [s["since"] for s in family.get("steps", ())]
        assert since == sorted(since, key=versions.parse)
        for arch, first in family["classes"].items():
            assert not since or versions.at_least(first, since[0]), f"{arch} begins before its family"
            assert arch not in data["absent"]["classes"]
    spec = made("LlamaForCausalLM", 40)
    arches = sorted({a for f in data["family"].values() for a in f["classes"]})
    for version in releases(engine):
        contract = load_contract(engine, version)
        for arch in arches:
            hook, row = targets._row(engine, arch, version)
            assert hook is not None
            assert row is None or (
                row.ids in ("plus-one", "verbatim", "deepseek", "gpt-oss") and row.store in ("list", "checked", "flags", "keyed")
            )
        assert capture(contract, {}, spec, hidden=WIDTH).prefill_hf in ((2, 20, 37), None)
