"""A source scan reads what a copy of an engine does: toy sources patched as forks are, hostile ones, and released wheels by the index."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.target import open_target
from eagle3diag.cli import main
from eagle3diag.engines.contract import behaviours, engine_source, load_contract, parse_engine
from eagle3diag.engines.scan import scan
from eagle3diag.engines.scan.classes import Classes
from eagle3diag.engines.scan.source import open_source, pinned
from eagle3diag.engines.scan.target import scan_target
from eagle3diag.engines.serve import serve
from eagle3diag.engines.targets import _row
from eagle3diag.errors import UsageError
from eagle3diag.rules.case import check
from tests.engine_sources import TARGET, write_sglang
from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft

DEFAULT = ("2", "N//2", "N-3")
SIX = (
    "KimiK25ForConditionalGeneration",
    "DeepseekV3ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
)


def toy(folder: Path, **changes):
    return scan(write_sglang(folder, **changes), "ToyForCausalLM")


# ---------------------------------------------------------------- targets


def test_the_plain_target_class(tmp_path):
    got = toy(tmp_path)
    assert (got.engine, got.version, got.nearest, got.nearest_by) == ("sglang", "0.5.9", "0.5.9", "version")
    target = got.target
    assert (target.found, target.hook, target.default, target.shift, target.status) == (True, True, DEFAULT, "+1", "read")
    rules = target.behaviour
    assert (rules.ids, rules.default, rules.store, rules.zero, rules.last, rules.captures) == (
        "plus-one", "hf", "list", "TypeError", False, "stream",
    )  # fmt: skip


def test_a_class_without_the_hook_and_one_that_is_not_there(tmp_path):
    source = write_sglang(tmp_path)
    wrapper = scan(source, "ToyVLForConditionalGeneration").target
    assert (wrapper.found, wrapper.hook, wrapper.behaviour) == (True, False, None)
    gone = scan(source, "NoSuchForCausalLM").target
    assert (gone.found, gone.hook) == (False, None)
    assert not scan(source, "Toy For\nCausalLM").target.found


def test_delegation_to_the_language_model_is_followed(tmp_path):
    hook = """        self.language_model = ToyForCausalLM(config.text_config)

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if self.language_model is None or not hasattr(self.language_model, "set_eagle3_layers_to_capture"):
            raise AttributeError("no")
        self.language_model.set_eagle3_layers_to_capture(layer_ids)
"""
    source = write_sglang(tmp_path, toy=("        self.language_model = ToyForCausalLM(config.text_config)\n", hook))
    got = scan(source, "ToyVLForConditionalGeneration").target
    assert (got.hook, got.shift, got.default) == (True, "+1", DEFAULT)


def test_delegation_to_an_inner_class_that_has_no_hook_raises(tmp_path):
    hook = """        self.language_model = ToyModel(config.text_config)

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if not hasattr(self.language_model, "set_eagle3_layers_to_capture"):
            raise AttributeError("language_model does not support EAGLE3")
"""
    source = write_sglang(tmp_path, toy=("        self.language_model = ToyForCausalLM(config.text_config)\n", hook))
    rules = scan(source, "ToyVLForConditionalGeneration").target.behaviour
    assert (rules.captures, rules.error) == ("error", "AttributeError: language_model does not support EAGLE3")


STORE = "self.model.layers_to_capture = "
IDS = "self.model.layers_to_capture = [val + 1 for val in layer_ids]"


@pytest.mark.parametrize(
    ("rule", "name", "shift"),
    [
        ("self.model.layers_to_capture = list(layer_ids)", "verbatim", "0"),
        (f"{STORE}[v + 1 for v in layer_ids] if layer_ids[0] == 1 else list(layer_ids)", "deepseek", "+1 if ids[0] == 1 else 0"),
        (f"n = len(self.model.layers)\n            {STORE}layer_ids if max(layer_ids) == n else [v + 1 for v in layer_ids]", "gpt-oss",
         "0 if max(ids) == N else +1"),
        ("self.model.layers_to_capture = [val + 2 for val in layer_ids]", "own", "+2"),
        ("self.model.layers_to_capture = [val - 1 for val in layer_ids]", "own", "-1"),
        ("self.model.layers_to_capture = [v + 1 if v > 4 else v for v in layer_ids]", "own", "depends on the ids: 0 or +1"),
    ],
)  # fmt: skip
def test_the_rule_from_ids_to_layers_is_walked_not_guessed(tmp_path, rule, name, shift):
    got = toy(tmp_path, toy=(IDS, rule)).target
    assert (got.behaviour.ids, got.shift) == (name, shift)


@pytest.mark.parametrize(
    ("rule", "ids", "hf"),
    [
        ("self.model.layers_to_capture = [val + 2 for val in layer_ids]", [1, 2, 3], (3, 4, 5)),
        ("self.model.layers_to_capture = [v + 1 if v > 4 else v for v in layer_ids]", [2, 4, 6], (2, 4, 7)),
        (IDS, [2, 4, 6], (3, 5, 7)),
    ],
)
def test_a_forks_own_rule_reaches_the_served_draft(tmp_path, rule, ids, hf):
    source = write_sglang(tmp_path / "engine", toy=(IDS, rule))
    config = tiny_config() | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    draft = open_checkpoint(write_draft(tmp_path / "draft", tiny_tensors(), config))
    target = open_target(tiny_target(tmp_path / "target", architectures=["ToyForCausalLM"], num_hidden_layers=12))
    served = serve(draft, f"sglang@{source}", target=target)
    assert served.aux.prefill_hf == hf
    assert served.contract.origin == str(source)


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (
            ("hidden_states + residual)", "hidden_states + residual if residual is not None else hidden_states)"),
            {"zero": "embedding", "captures": "stream"},
        ),
        (("aux_hidden_states.append(hidden_states + residual)", "aux_hidden_states.append(hidden_states)"), {"captures": "mlp-branch"}),
        (("if i in self.layers_to_capture", "if i in self.something_else"), {"captures": "nothing"}),
        (
            (
                "        return hidden_states, aux",
                "        if self.end_layer in self.layers_to_capture:\n            aux_hidden_states.append(hidden_states)\n"
                "        return hidden_states, aux",
            ),
            {"last": True},
        ),
    ],
)
def test_where_and_what_the_loop_keeps(tmp_path, inner, expected):
    rules = toy(tmp_path, inner=inner).target.behaviour
    assert {k: getattr(rules, k) for k in expected} == expected


def test_a_state_kept_after_its_layer_is_one_later(tmp_path):
    loop = """            layer = self.layers[i]
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
            if i in self.layers_to_capture:
                aux_hidden_states.append(hidden_states + residual)
"""
    old = """            if i in self.layers_to_capture:
                aux_hidden_states.append(hidden_states + residual)
            layer = self.layers[i]
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
"""
    got = toy(tmp_path, inner=(old, loop)).target
    assert (got.shift, got.default) == ("+2", ("3", "N//2+1", "N-2"))


def test_layers_marked_one_by_one(tmp_path):
    hook = """layers = [val + 1 for val in layer_ids]
            for layer_id in layers:
                setattr(self.model.layers[layer_id], "_is_layer_to_capture", True)
            self.model.layers_to_capture = layers"""
    flag = ("if i in self.layers_to_capture:", 'if getattr(self.layers[i], "_is_layer_to_capture", False):')
    assert toy(tmp_path / "a", toy=(IDS, hook), inner=flag).target.behaviour.store == "flags"
    assert toy(tmp_path / "b", toy=(IDS, hook)).target.behaviour.store == "checked"
    assert toy(tmp_path / "c", inner=flag).target.behaviour.captures == "nothing"  # the list is set, the flags are never


# ---------------------------------------------------------------- the draft class


def test_the_draft_class_as_it_stands(tmp_path):
    got = toy(tmp_path)
    recorded = load_contract("sglang", "0.5.9")
    read = {n: f.value for n, f in got.fields.items() if f.status != "recorded"}
    assert len(read) > 35
    for name in ("layer_names", "rename", "name_prefix", "unknown", "fc_condition", "n_aux", "aux_ids_from", "embedding_exempt", "tie"):
        assert read[name] == recorded[name], name
    assert set(got.fields) == set(behaviours("sglang"))


DRAFT = "llama_eagle3"
D2T = '            if "d2t" in name:'
BOTH = ["midlayer.", "layers.0."]
LEGACY = 'getattr(config, "rope_theta", 10000)'
MAP = 'name = name.replace("layers.0", "midlayer")'
NORM = "        self.hidden_norm = RMSNorm(config.hidden_size)"
GUARD = "if param_name in params_dict:\n"
TAKE = "                    param = params_dict[param_name]"
ONE = 'if self.config.num_hidden_layers != 1:\n            raise ValueError("EAGLE3 currently only supports 1 layer")'
ADD = "forward_batch.positions.add_(1)\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "name", "value"),
    [
        (DRAFT, D2T, f"            {MAP}\n{D2T}", "layer_names", BOTH),
        (DRAFT, "if hidden_states.shape[-1] != embeds.shape[-1]:", "if True:", "fc_condition", "always"),
        (DRAFT, "self.hidden_size_in * 3", "self.hidden_size_in * 4", "n_aux", ["4"]),
        (DRAFT, 'bias=getattr(config, "bias", False)', "bias=False", "fc_bias", "never"),
        (DRAFT, "torch.nn.Linear", "ReplicatedLinear", "fc_start", "uninitialised"),
        (DRAFT, "residual = hidden_states\n", "residual = hidden_states + 0\n", "norm_before_residual", "ignored"),
        (DRAFT, NORM, f'{NORM}\n        self.nbr = getattr(config, "norm_before_residual", False)', "norm_before_residual", "config"),
        (DRAFT, "        self.hot_token_id = None\n", "", "d2t_missing", "refuse"),
        (DRAFT, f"                {GUARD}{TAKE}\n\n", "                param = params_dict[param_name]\n\n", "unknown", "KeyError"),
        (DRAFT, ONE, "pass", "draft_layers", "recorded"),
        ("llama", LEGACY, 'config.rope_parameters["rope_theta"]', "rope_keys", "parameters-first"),
        ("model_runner", "eagle_config[", "draft_model_config.hf_config.__dict__[", "aux_ids_from", ["top"]),
        ("eagle_worker", "            logits_output", f"            {ADD}            logits_output", "position_gap", 1),
    ],
)  # fmt: skip
def test_a_patched_draft_class_is_read_as_patched(tmp_path, file, old, new, name, value):
    field = toy(tmp_path, **{file: (old, new)}).fields[name]
    assert value == (field.status if value == "recorded" else field.value)


def test_graphs_that_reset_the_layers(tmp_path):
    source = write_sglang(tmp_path)
    assert scan(source, "ToyForCausalLM").fields["cuda_graph_uses_ids"].value is True
    runner = tmp_path / "python" / "sglang" / "srt" / "model_executor" / "cuda_graph_runner.py"
    runner.write_text("class CudaGraphRunner:\n    def __init__(self):\n        self.model_runner.model.set_eagle3_layers_to_capture()\n")
    assert scan(source, "ToyForCausalLM").fields["cuda_graph_uses_ids"].value is False


def test_without_a_version_the_release_that_agrees_most_stands_in(tmp_path):
    got = toy(tmp_path, version=None)
    assert (got.version, got.nearest_by) == (None, "agreement")
    assert load_contract("sglang", got.nearest)["layer_names"] == ["midlayer."]
    assert any("states no version" in n for n in got.notes)
    assert toy(tmp_path / "b", version="0.0.0.dev1+gabc").version is None


def test_a_source_without_a_draft_class_says_so(tmp_path):
    got = toy(tmp_path, llama_eagle3=None)
    assert got.draft["class"] is None
    assert got.fields["architectures"].value == {}
    assert got.fields["fc_condition"].status == "recorded"
    assert any("no EAGLE-3 draft class" in n for n in got.notes)


# ---------------------------------------------------------------- used as a contract


def test_check_with_a_scanned_engine_says_where_the_facts_come_from(tmp_path):
    source = write_sglang(tmp_path / "engine")
    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    target = tiny_target(tmp_path / "target", architectures=["ToyForCausalLM"])
    report = check(draft, target=target, engine=f"sglang@{source}")
    found = next(f for f in report.findings if f.code == "ENG508")
    assert "scan of" in found.title
    assert found.evidence["origin"] == str(source)
    wrapped = tiny_target(tmp_path / "vl", architectures=["ToyVLForConditionalGeneration"])
    served = serve(open_checkpoint(draft), f"sglang@{source}", target=open_target(wrapped))
    assert served.refused is not None
    assert served.aux.hook is False


def test_engine_texts(tmp_path):
    source = write_sglang(tmp_path)
    assert engine_source(f"sglang@{source}") == ("sglang", str(source))
    assert engine_source("sglang==0.5.9") is None
    assert parse_engine(f"SGLang@{source}") == ("sglang", "0.5.9")
    for text in ("sglang@", f"tgi@{source}", f"vllm@{source}", f"sglang@{source}/nothing", f"sglang==0.5.9@{source}"):
        with pytest.raises(UsageError):
            parse_engine(text)


def test_the_command_and_its_json(tmp_path, capsys):
    source = write_sglang(tmp_path / "engine")
    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    assert main(["scan", str(source), "--target-arch", "ToyForCausalLM", "--draft", str(draft), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == 1
    assert data["target"]["captures"] is True
    assert data["target"]["default_hf"] == [2, "N//2", "N-3"]
    assert data["target"]["shift"] == 1
    assert set(data["fields"]) == set(behaviours("sglang"))
    assert {f["status"] for f in data["fields"].values()} <= {"read", "inferred", "recorded"}
    assert data["draft"]["served"]["refused"] is None
    for form in ("text", "markdown", "html"):
        assert main(["scan", str(source), "--target-arch", "ToyForCausalLM", "--format", form]) == 0
        assert "ToyForCausalLM" in capsys.readouterr().out
    assert main(["scan", str(tmp_path / "none"), "--target-arch", "A"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------- where a source may lie


def test_folders_archives_and_environments(tmp_path):
    source = write_sglang(tmp_path / "tree")
    package = source / "python" / "sglang"
    wheel = tmp_path / "sglang-0.5.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in package.rglob("*.py"):
            archive.write(file, f"sglang/{file.relative_to(package)}")
        archive.writestr("sglang-0.5.9.dist-info/METADATA", "Name: sglang\nVersion: 0.5.9\nRequires-Dist: transformers==4.57.1\n")
    packed = shutil.make_archive(str(tmp_path / "sglang-main"), "gztar", source)
    site = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    shutil.copytree(package, site / "sglang")
    for place in (source, package, package.parent, wheel, packed, tmp_path / "env", site):
        opened = open_source(place)
        assert (opened.engine, opened.version) == ("sglang", "0.5.9"), place
        assert scan_target(Classes(opened), "ToyForCausalLM").shift == "+1"
    assert open_source(wheel).requires == "transformers==4.57.1"


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("transformers==4.57.1", ((4, 57, 1), None)),
        ("transformers<5.21.0,>=5.16.1", ((5, 16, 1), (5, 21, 0))),
        ("transformers<5,>=4.56.0", ((4, 56, 0), (5,))),
        ("", ((), None)),
    ],
)
def test_pins(text, bounds):
    assert pinned(text) == bounds


@pytest.mark.parametrize("name", ["x.whl", "x.tar.gz", "x.zip", "x.py"])
def test_files_that_are_no_source(tmp_path, name):
    (tmp_path / name).write_bytes(b"nothing" * 100)
    with pytest.raises(UsageError):
        open_source(tmp_path / name)


def test_hostile_sources_end_in_an_answer_or_one_line(tmp_path):
    outside = tmp_path / "secret.py"
    outside.write_text("class ToyForCausalLM: pass\nEntryClass = ToyForCausalLM\n")
    source = write_sglang(tmp_path / "engine")
    models = source / "python" / "sglang" / "srt" / "models"
    (models / "toy.py").unlink()
    (models / "toy.py").symlink_to(outside)
    (models / "bad.py").write_bytes(b"class ToyForCausalLM(\x00")
    (models / "deep.py").write_text("class ToyForCausalLM:\n    x = " + "(" * 5000)
    (models / "big.py").write_text("class ToyForCausalLM: pass\n" + "#" * (3 << 20))
    (models / "loop.py").write_text("class ToyForCausalLM(Other): pass\nclass Other(ToyForCausalLM): pass\n")
    got = scan(source, "ToyForCausalLM")
    assert got.target.hook is False  # of all these only the last is a class, and it has no hook
    assert sum("toy.py" in n or "big.py" in n for n in got.notes) == 2


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "self.model.layers_to_capture = list(range(10 ** 12))",
        "self.model.layers_to_capture = [a + b for a in range(99999) for b in range(99999)]",
        "self.set_eagle3_layers_to_capture(layer_ids)",
        "__import__('os').system('true')",
        "self.model.layers_to_capture = layer_ids[10]",
        "exec('raise SystemExit')",
    ],
)
def test_hostile_hooks_are_walked_within_bounds(tmp_path, body):
    text = TARGET.split("        if not self.pp_group")[0] + f"        {body}\n\n\nEntryClass = [ToyForCausalLM]\n"
    begun = time.monotonic()
    got = toy(tmp_path, toy=text).target
    assert time.monotonic() - begun < 10
    assert got.behaviour.captures in ("nothing", "error")


# ---------------------------------------------------------------- released engines, from the package index


def _pip(folder: Path, *arguments: str) -> str:
    """Run pip; skips the test where the package index is out of reach."""
    quiet = ("--no-deps", "--disable-pip-version-check", "--no-input")
    command = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index does not answer in time")
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1][:200]
        pytest.skip(f"the package index is out of reach: {last}")
    return done.stdout


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """``version -> folder`` of SGLang releases installed without dependencies, each once."""
    base = tmp_path_factory.mktemp("sglang")
    anywhere = ("--quiet", "--no-compile", "--only-binary=:all:", "--python-version", "3.11")
    platforms = ("--platform", "manylinux_2_34_x86_64", "--platform", "manylinux_2_28_x86_64", "--platform", "any")

    def install(version: str) -> Path:
        folder = base / version
        if not folder.exists():
            _pip(folder, *anywhere, *platforms, f"sglang=={version}")
        return folder

    return install


#: facts/engines.md 3.4 (first versions) and 3.1 (what an id means)
FACTS = {
    "0.5.9": dict(zip(SIX, (None, "+1", "+1", None, "+1", "+1"), strict=True)),
    "0.5.10": dict(zip(SIX, ("+1", "+1", "+1", None, "+1", "+1"), strict=True)),
    "0.5.12": dict(zip(SIX, ("+1",) * 6, strict=True)),
    "0.5.23": dict(
        zip(SIX, (*("+1 if ids[0] == 1 else 0",) * 2, "+1", "+1", "0 if max(ids) == N else +1", "+1"), strict=True)
    ),
}  # fmt: skip


def same_rules(engine: str, arch: str, version: str, target) -> None:
    hook, row = _row(engine, arch, version)
    assert bool(target.hook) is bool(hook), (arch, version)
    if row is not None:
        for name in ("ids", "default", "store", "zero", "last", "short", "captures"):
            assert getattr(target.behaviour, name) == getattr(row, name), (arch, version, name)


@pytest.mark.slow
@pytest.mark.parametrize("version", FACTS)
def test_sglang_wheels(sglang, version):
    folder = sglang(version)
    for arch, shift in FACTS[version].items():
        begun = time.process_time()  # what neighbours on the machine take is not counted
        got = scan(folder, arch)
        assert time.process_time() - begun < 10, arch
        assert (got.engine, got.version, got.nearest) == ("sglang", version, version)
        assert got.target.found
        assert bool(got.target.hook) is (shift is not None), arch
        if shift is not None:
            assert (got.target.shift, got.target.default) == (shift, DEFAULT), arch
        same_rules("sglang", arch, version, got.target)
    for kind in ("llama", "mla"):
        fields = scan(folder, "LlamaForCausalLM", draft_class=kind).fields
        for name, fact in load_contract("sglang", version, draft_class=kind).facts.items():
            assert fields[name].value == fact.value, (version, kind, name, fields[name])
        if kind == "llama":
            assert sum(f.status != "recorded" for f in fields.values()) >= 70


@pytest.mark.slow
def test_a_vllm_wheel_read_by_parts(tmp_path):
    """The wheel has hundreds of megabytes; its table of contents and a few members are read where it lies."""
    version = "0.33.0"
    told = _pip(tmp_path / "none", "--dry-run", "--quiet", "--ignore-installed", "--report", "-", f"vllm=={version}", "--only-binary=:all:",
                "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64")  # fmt: skip
    url = json.loads(told[told.index("{") :])["install"][0]["download_info"]["url"]
    source = open_source(url) if url.startswith("http") else open_source(url.removeprefix("file://"))
    classes = Classes(source)
    for arch in SIX:
        target = scan_target(classes, arch)
        assert (target.hook, target.shift, target.default) == (True, "0", DEFAULT), arch
        same_rules("vllm", arch, version, target)
    for runner in ("v1", "v2"):
        for kind in ("llama", "qwen3", "mla"):
            begun = time.monotonic()
            got = scan(url.removeprefix("file://"), "LlamaForCausalLM", runner=runner, draft_class=kind)
            assert time.monotonic() - begun < 30  # over the network; from a disk it is under two seconds
            for name, fact in load_contract("vllm", version, runner=runner, draft_class=kind).facts.items():
                assert got.fields[name].value == fact.value, (runner, kind, name)
