# ruff: noqa: E501  launch lines are kept as they are pasted
"""Launch lines: every spelling of both engines, what is wrong with them, and which algorithm they start."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3diag.engines.launch import effective_method, parse_launch
from eagle3diag.engines.launch_sglang import tree_capacity
from eagle3diag.engines.model import Contract, Fact, Launch
from eagle3diag.errors import UsageError

SG = "python -m sglang.launch_server --model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path d"
NEW_RULE = [["eagle-", "eagle"], ["eagle3", "eagle3"]]
OLD_RULE = [["eagle-", "eagle"], ["eagle3-", "eagle"]]


def contract(engine: str, rule: list[list[str]]) -> Contract:
    facts = {"method_rule": Fact(rule, "test", "read")}
    return Contract(engine=engine, version="1", asked="1", runner=None, draft_class="llama", facts=facts)


def messages(launch: Launch, kind: str | None = None) -> list[str]:
    return [p.message for p in launch.problems if kind in (None, p.kind)]


def chain(steps: object, topk: object, tokens: object) -> Launch:
    text = SG
    for name, value in (("num-steps", steps), ("eagle-topk", topk), ("num-draft-tokens", tokens)):
        text += f" --speculative-{name} {value}" if value is not None else ""
    return parse_launch(text)


@pytest.mark.parametrize(
    "text",
    [
        f"{SG} --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        "sglang serve --model-path=t --speculative-algo EAGLE3 --speculative-draft-model-path=d --speculative-num-steps=3 "
        "--speculative-eagle-topk=1 --speculative-num-draft-tokens=4",
        "CUDA_VISIBLE_DEVICES=0 docker run --gpus all -p 30000:30000 lmsysorg/sglang:latest \\\n python3 -m sglang.launch_server \\\n --model-path t \\\n"
        " --speculative_algorithm EAGLE3 \\\n # don't touch\n --speculative-draft-model d \\\n --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4 > log 2>&1 &",
        '["python3","-m","sglang.launch_server","--model-path","t","--speculative-algorithm","EAGLE3","--speculative-draft-model-path","d",'
        '"--speculative-num-steps","3","--speculative-eagle-topk","1","--speculative-num-draft-tokens","4"]',
        "containers:\n- name: s\n  command: [python3, -m, sglang.launch_server]\n  args:\n  - --model-path\n  - t\n  - --speculative-algorithm=EAGLE3\n"
        '  - "--speculative-draft-model-path"\n  - d  # the draft\n  - --speculative-num-steps 3\n  - --speculative-eagle-topk=1\n'
        "  - --speculative-num-draft-tokens=4\n  ports:\n  - containerPort: 30000\n",
        "services:\n  s:\n    command: >\n      python3 -m sglang.launch_server --model-path t\n      --speculative-algorithm EAGLE3 --speculative-draft-model-path d\n"
        "      --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4\n    restart: always\n",
        '#!/bin/bash\nM=t\nSTEPS=3\npip list | grep torch\nbash -c "python3 -m sglang.launch_server --model-path ${M} --speculative-algorithm EAGLE3 '
        '--speculative-draft-model-path d --speculative-num-steps $STEPS --speculative-eagle-topk ${K:-1} --speculative-num-draft-tokens 4"\n',
        'FROM lmsysorg/sglang\nENTRYPOINT ["python3", "-m", "sglang.launch_server"]\nCMD ["--model-path", "t", "--speculative-algorithm", '
        '"EAGLE3", "--speculative-draft-model-path", "d", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", '
        '"--speculative-num-draft-tokens", "4"]\n',
        "kubectl exec pod -- python3 -m sglang.launch_server --model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path d "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 && echo done",
    ],
)
def test_sglang_spellings(text: str) -> None:
    launch = parse_launch(text)
    assert (launch.engine, launch.method, launch.target, launch.draft) == ("sglang", "EAGLE3", "t", "d")
    assert (launch.steps, launch.topk, launch.draft_tokens) == (3, 1, 4)
    assert launch.problems == ()


CONFIG = {"method": "eagle3", "model": "d", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve t --speculative-config '{json.dumps(CONFIG)}'",
        f"vllm serve t --speculative_config='{json.dumps(CONFIG)}'",
        f"vllm serve t -sc '{json.dumps(CONFIG)}' --max-model-len 8k",
        "python -m vllm.entrypoints.openai.api_server --model t --speculative-config " + json.dumps(json.dumps(CONFIG)),
        "vllm serve t --speculative-config.method eagle3 --speculative-config.model d --speculative-config.num_speculative_tokens 3",
        "vllm serve t -sc.method=eagle3 -sc.model=d -sc.num-speculative-tokens=3",
        "vllm serve t --spec-method eagle3 --spec-model d --spec-tokens 3",
        'vllm serve --enable-prefix-caching t --speculative-config \'{\n  "method": "eagle3",\n  "model": "d",\n  "num_speculative_tokens": 3\n}\'',
        f"docker run --gpus all -v a:b vllm/vllm-openai:latest --model t --speculative-config '{json.dumps(CONFIG)}'",
        f"image: vllm/vllm-openai:latest\nargs:\n- --model\n- t\n- --speculative-config\n- '{json.dumps(CONFIG)}'\n",
        f"services:\n  v:\n    image: vllm/vllm-openai:latest\n    command: --model t --speculative-config '{json.dumps(CONFIG)}'\n",
        f"command: [/bin/sh, -c]\nargs: [{json.dumps('vllm serve t -sc ' + shlex.quote(json.dumps(CONFIG)))}]\n",
        'command: vllm\nargs:\n- serve\n- t\n- --speculative-config\n- >-\n  {"method": "eagle3",\n  "model": "d", "num_speculative_tokens": 3}\n',
        f"args:\n- vllm\n- serve\n- t\n- --speculative-config={json.dumps(CONFIG)}\n",
        "args:\n  - |\n    vllm serve t \\\n      --speculative-config '" + json.dumps(CONFIG) + "'\n",
        f"# two servers\nvllm serve other --port 1\nvllm serve t --port 2 --speculative-config '{json.dumps(CONFIG)}'\n",
        f"SPEC='{json.dumps(CONFIG)}'\nvllm serve t --speculative-config \"$SPEC\"\n",
        "vllm serve t --speculative-config “" + json.dumps(CONFIG).replace('"', '\\"') + "”",
    ],
)
def test_vllm_spellings(text: str) -> None:
    launch = parse_launch(text)
    assert (launch.engine, launch.method, launch.target, launch.draft, launch.draft_tokens) == ("vllm", "eagle3", "t", "d", 3)
    assert launch.problems == ()


def test_old_vllm_options() -> None:
    launch = parse_launch("python -m vllm.entrypoints.openai.api_server --model t --speculative-model d --num-speculative-tokens 5")
    assert (launch.draft, launch.draft_tokens, launch.problems) == ("d", 5, ())


def test_context_version_runner_graphs_and_environment() -> None:
    launch = parse_launch(
        "VLLM_USE_V2_MODEL_RUNNER=0 docker run vllm/vllm-openai:v0.16.0 --model t --max-model-len 16K --enforce-eager -q fp8"
    )
    assert (launch.context, launch.version, launch.runner, launch.cuda_graph, launch.quantization) == (16384, "0.16.0", "v1", False, "fp8")
    launch = parse_launch(
        f"docker run lmsysorg/sglang:v0.5.4.post3-cu126 {SG} --context-length 4096 --disable-cuda-graph --quantization fp8"
    )
    assert (launch.context, launch.version, launch.cuda_graph, launch.quantization) == (4096, "0.5.4.post3", False, "fp8")
    assert parse_launch("pip install vllm==0.11.2\nvllm serve t").version == "0.11.2"
    kube = 'env:\n- name: VLLM_USE_V2_MODEL_RUNNER\n  value: "1"\ncommand: [vllm, serve, t]\n'
    assert parse_launch(kube).runner == "v2"


@pytest.mark.parametrize(
    "junk", ["", "   \n", "ls -la", "python train.py --model x", "{}", "[]", "[1, 2", "'", "args:\n", "vllm", "sglang", "a" * (1 << 21)]
)
def test_nothing_to_parse_is_one_line(junk: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_launch(junk)
    assert "\n" not in str(e.value)
    assert "launch line" in str(e.value)


# ---- chain flags ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ok", [(3, 1, 4), (5, 4, 8), (1, 1, 2), (3, 1, None), (None, None, None), ("$S", 1, 4), (2, 2, 7)])
def test_sound_chains(ok: tuple[Any, Any, Any]) -> None:
    assert chain(*ok).problems == ()


@pytest.mark.parametrize(
    ("steps", "topk", "tokens", "severity", "says"),
    [
        (4, 1, 24, "warning", "5 tokens, 24 asked"),
        (2, 1, 2, "warning", "3 tokens, 2 asked"),
        (2, 2, 8, "error", "at most 7"),
        (5, 4, 4, "warning", "the last 2 steps"),
        (0, 1, 1, "error", "steps is 0"),
        (3, -1, 4, "error", "topk is -1"),
        (None, 1, 4, "error", "--speculative-num-steps not given"),
        (3, None, None, "error", "not given"),
        ("three", 1, 4, "error", "no whole number: three"),
        ("", 1, 4, "error", "nothing"),
    ],
)
def test_unsound_chains(steps: object, topk: object, tokens: object, severity: str, says: str) -> None:
    (problem,) = chain(steps, topk, tokens).problems
    assert problem.kind == "chain"
    assert problem.severity == severity
    assert says in problem.message


def test_tree_capacity_counts_what_a_tree_holds() -> None:
    for steps in range(1, 5):
        for topk in range(1, 5):
            nodes = 1 + sum(topk if step == 0 else topk * topk for step in range(steps))
            assert tree_capacity(steps, topk) == nodes
    assert tree_capacity(7, 1) == 8  # a chain: steps + 1


# ---- other problems ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "severity", "says"),
    [
        ("sglang serve --model-path t --speculative-algorithm EAGEL3 --speculative-draft-model-path d", "algorithm", "error", "EAGEL3"),
        ("sglang serve --model-path t --speculative-draft-model-path d", "algorithm", "error", "served alone"),
        ("sglang serve --model-path t --speculative-algorithm EAGLE3", "other", "error", "takes the target for the draft"),
        (f"SGLANG_SIMULATE_ACC_LEN=3 {SG}", "other", "warning", "made up"),
        (f"export SGLANG_SIMULATE_ACC_LEN=3\n{SG}", "other", "warning", "made up"),
        (f"FROM lmsysorg/sglang\nENV SGLANG_SIMULATE_ACC_LEN 3\nCMD {SG}", "other", "warning", "made up"),
        (f"{SG} --speculative-token-map m.pt", "other", "info", "ignored for EAGLE3"),
        (f"{SG} --speculative-num-stepss 3", "unknown-flag", "error", "speculative-num-stepss"),
        (
            'vllm serve t --speculative-config \'{"method": "EAGLE3", "model": "d", "num_speculative_tokens": 3}\'',
            "algorithm",
            "error",
            "EAGLE3",
        ),
        ('vllm serve t --speculative-config \'{"method": "eagle3", "model": "d"}\'', "chain", "error", "missing"),
        ("vllm serve t --spec-method eagle3 --spec-model d --spec-tokens 0", "chain", "error", "is 0"),
        ('vllm serve t --speculative-config \'{"method": "eagle3", "num_speculative_tokens": 3}\'', "other", "error", "no draft model"),
        (
            "vllm serve t --speculative-config \"{'method': 'eagle3', 'model': 'd', 'num_speculative_tokens': 3}\"",
            "other",
            "error",
            "Python dict",
        ),
        (
            'vllm serve t --speculative-config {"method":"eagle3","model":"d","num_speculative_tokens":3}',
            "other",
            "error",
            "without its quotes",
        ),
        (
            'vllm serve t --speculative-config \'{"method": "eagle3", "model": "d", "num_speculative_tokens": 3,}\'',
            "other",
            "error",
            "no valid JSON",
        ),
        ("vllm serve t --speculative-config", "other", "error", "no value"),
        ("vllm serve t --speculative-algorithm EAGLE3 --speculative-draft-model-path d", "unknown-flag", "error", "SGLang"),
        (f"vllm serve t --spec-model x --speculative-config '{json.dumps(CONFIG)}'", "other", "error", "exclude each other"),
        (
            f"vllm serve t --speculative-config '{json.dumps(CONFIG | {'tensor_parallel_size': 1})}'",
            "other",
            "error",
            "tensor_parallel_size",
        ),
        (f"vllm serve t --speculative-config '{json.dumps(CONFIG | {'synthetic_acceptance_length': 3})}'", "other", "warning", "made up"),
    ],
)
def test_problems(text: str, kind: str, severity: str, says: str) -> None:
    (problem,) = parse_launch(text).problems
    assert (problem.kind, problem.severity) == (kind, severity)
    assert says in problem.message
    assert problem.remedy


def test_a_broken_config_is_still_understood() -> None:
    for value in (
        "\"{'method': 'eagle3', 'model': 'd', 'num_speculative_tokens': 3}\"",
        '{"method":"eagle3","model":"d","num_speculative_tokens":3}',
    ):
        launch = parse_launch(f"vllm serve t --speculative-config {value}")
        assert (launch.method, launch.draft, launch.draft_tokens) == ("eagle3", "d", 3)


# ---- which algorithm runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "runs"), [("EAGLE3", "eagle3"), ("EAGLE", "eagle"), ("NEXTN", "eagle"), ("STANDALONE", "draft_model"), ("NGRAM", "ngram")]
)
def test_sglang_method(name: str, runs: str) -> None:
    launch = parse_launch(f"sglang serve --model-path t --speculative-algorithm {name} --speculative-draft-model-path d")
    assert effective_method(launch, contract("sglang", []), {})[0] == runs


@pytest.mark.parametrize(
    ("path", "new", "old"),
    [
        ("/data/eagle-runs/draft", "eagle", "eagle"),
        ("/data/eagle-runs/llama_eagle3", "eagle", "eagle"),
        ("org/EAGLE3-Llama", "eagle3", "eagle"),
        ("org/llama_eagle3", "eagle3", "draft_model"),
        ("/models/draft", "draft_model", "draft_model"),
    ],
)
def test_vllm_method_from_the_path(path: str, new: str, old: str) -> None:
    launch = parse_launch(f"vllm serve t --speculative-config '{json.dumps({'model': path, 'num_speculative_tokens': 3})}'")
    assert effective_method(launch, contract("vllm", NEW_RULE), {})[0] == new
    assert effective_method(launch, contract("vllm", OLD_RULE), {})[0] == old
    assert path in effective_method(launch, contract("vllm", NEW_RULE), {})[1]


def test_vllm_method_otherwise() -> None:
    c = contract("vllm", NEW_RULE)
    speculators = {"speculators_config": {"algorithm": "eagle3"}, "speculators_model_type": "eagle3"}
    explicit = parse_launch("vllm serve t --spec-method eagle --spec-model eagle3 --spec-tokens 3")
    assert effective_method(explicit, c, speculators)[0] == "eagle"
    assert effective_method(parse_launch("vllm serve ./checkpoint_best"), c, speculators)[0] == "eagle3"
    assert effective_method(parse_launch("vllm serve t"), c, {})[0] is None
    assert effective_method(None, c, {})[0] == "eagle3"
    assert effective_method(parse_launch('vllm serve t --speculative-config "$SPEC"'), c, {})[0] == "eagle3"
    assert parse_launch('vllm serve t --speculative-config "$SPEC"').problems == ()


def test_what_stands_elsewhere_is_no_fault() -> None:
    c = contract("vllm", NEW_RULE)
    for line in (
        "vllm serve t --config serve.yaml",
        "sglang serve --config serve.yaml",
        "sglang serve --config s.yaml --speculative-num-steps 3",
    ):
        launch = parse_launch(line)
        assert effective_method(launch, c, {})[0] == "eagle3"
        assert [p.severity for p in launch.problems] == ["info"]
    template = (
        "args:\n- --model-path={{ .Values.model }}\n- --speculative-algorithm={{ .Values.algorithm }}\n- --speculative-num-steps=$(STEPS)\n"
    )
    template += "- --speculative-draft-model-path=<draft>\n- --speculative-eagle-topk=1\n- --speculative-num-draft-tokens=4\n"
    launch = parse_launch(template)
    assert (launch.steps, launch.topk, launch.draft_tokens, launch.problems) == (None, 1, 4, ())
    assert effective_method(launch, contract("sglang", []), {})[0] == "eagle3"


# ---- anything at all --------------------------------------------------------------------------------------------------------------

words = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="$`“”‘’\u00a0"), min_size=1, max_size=20)


@given(words.filter(lambda w: not w.startswith("-") and w.strip()), words.filter(lambda w: not w.startswith("-") and w.strip()))
@settings(max_examples=150, deadline=None)
def test_quoting_round_trip(target: str, draft: str) -> None:
    config = shlex.quote(json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": 3}))
    launch = parse_launch(f"vllm serve x --model={shlex.quote(target)} --speculative-config {config}")
    assert (launch.target, launch.draft, launch.draft_tokens) == (target, draft, 3)
    assert launch.problems == ()
    line = f"python -m sglang.launch_server --model-path={shlex.quote(target)} --speculative-algorithm EAGLE3"
    launch = parse_launch(f"{line} --speculative-draft-model-path={shlex.quote(draft)}")
    assert (launch.target, launch.draft) == (target, draft)


pieces = st.sampled_from(
    ["vllm", "serve", "sglang", "sglang.launch_server", "-m", "python", "--speculative-config", "{", "}", "'", '"', "\\", "\n", "args:", "- ", "-sc", ":",
     "--speculative-num-steps", "--speculative-eagle-topk", "=", "[", "]", ",", "1", "-1", "99999999999999999999", "$X", "|", "&&", "#", "FROM x", "CMD", "image:",
     "command: |", "\t", "{'a': 1}", '{"method": []}', '{"model": {}}', "--speculative-algorithm", "null", "--max-model-len", "-e", "A=B", "A="]
)  # fmt: skip


@given(st.one_of(st.text(max_size=200), st.lists(st.one_of(pieces, st.text(max_size=8)), max_size=30).map(" ".join)))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_garbage_raises_nothing_but_usage_error(text: str) -> None:
    for line in (text, f"vllm serve {text}", f"sglang serve {text}", f"vllm serve t --speculative-config {text}"):
        try:
            launch = parse_launch(line)
        except UsageError:
            continue
        effective_method(launch, contract(launch.engine, NEW_RULE), {})
        json.dumps([p.evidence for p in launch.problems])
