"""The README and the documentation tell the truth: commands run, files are there, examples run, numbers are those of the code."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3diag import __version__
from eagle3diag.cli import main
from eagle3diag.cli.parser import NAMES, build_parser
from eagle3diag.engines.contract import releases
from eagle3diag.rules.registry import load_all
from tests.engine_sources import write_sglang

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "data_samples" / "smollm2-eagle3"
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PAGES = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
#: rendered or captured for real in tests of their own (test_notebooks, test_broken_reports, test_target_capture); here they are only parsed
ELSEWHERE = ("notebook", "report", "capture")


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of a language, indented ones of list items left out."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.S | re.M)


def commands(text: str = README) -> list[str]:
    """Every whole ``eagle3diag`` line of a page, in running text and in code blocks."""
    text = re.sub(r"^\| `eagle3diag .*\n", "", text, flags=re.M)  # rows of the comparison name a tool, not a command
    inline = re.findall(r"`(eagle3diag [a-z]+ [^`]*|eagle3diag demo)`", text)
    lines = [line.split("&& ")[-1] for block in blocks(text, "bash") for line in block.splitlines()]
    return [*inline, *(line for line in lines if line.startswith("eagle3diag "))]


def elsewhere(path: str) -> Any:
    """A script of ``docs/`` or ``benchmarks/`` as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


EVERY = [(page, command) for page, text in PAGES.items() for command in dict.fromkeys(commands(text))]


@pytest.mark.parametrize(("page", "command"), EVERY)
def test_every_command_parses(page: str, command: str) -> None:
    arguments = shlex.split(command)[1:]
    assert build_parser().parse_args(arguments).command == arguments[0]


def test_every_command_there_is_is_shown() -> None:
    assert {shlex.split(c)[1] for c in commands()} == set(NAMES)


def filled(command: str, folder: Path) -> list[str]:
    """The words of a command with files of the sample in the place of its placeholders, and little to read where much could be."""
    (folder / "engine").mkdir()
    given = {
        "DRAFT": SAMPLE / "draft", "TARGET": SAMPLE / "target", "DUMP": SAMPLE / "dumps", "OTHER": SAMPLE / "dumps", "A": SAMPLE / "draft",
        "B": SAMPLE / "draft", "OUT": folder / "out", "server.log": ROOT / "data_samples" / "logs" / "sglang-0.5.23.log",
        "PATH_OR_WHEEL": write_sglang(folder / "engine"), "CODE": "KEY203", "E==V": "vllm==0.33.0",
    }  # fmt: skip
    words = [str(given.get(word, word)) for word in shlex.split(command)[1:]]
    words = [word.replace("PATH_OR_WHEEL", str(given["PATH_OR_WHEEL"])) for word in words]
    words = [word.replace("…", "--model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path d") for word in words]
    few = {"wirings": ["--rows", "100", "--steps", "2", "--quick"], "agree": ["--rows", "500"]}
    return [*words, *few.get(words[0], [])]


@pytest.mark.parametrize(("page", "command"), [(p, c) for p, c in EVERY if shlex.split(c)[1] not in ELSEWHERE])
def test_every_command_runs(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    status = main(filled(command, tmp_path))
    out, err = capsys.readouterr()
    assert status in (0, 1), err
    assert out.strip()


def test_every_path_is_there() -> None:
    for name in re.findall(r"(?<!build/)(?:data_samples|docs|benchmarks|notebooks|tools)/[\w./-]*", README):
        assert (ROOT / name.rstrip(".")).exists(), name
    for name in ("LICENSE", "CHANGELOG.md", ".ci/run"):
        assert (ROOT / name).is_file()


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith(("add", "arch"))])
def test_every_file_a_page_names_is_there(page: str) -> None:
    """Files in backticks stand in the repository, by their whole path or by their name."""
    known = {p.relative_to(ROOT).as_posix() for top in ("eagle3diag", "tests", "benchmarks", "docs") for p in (ROOT / top).rglob("*.*")}
    for name in re.findall(r"`([\w./]+\.(?:py|toml))`", PAGES[page]):
        assert any(path == name or path.endswith(f"/{name}") for path in known), name


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (example,) = blocks(README, "python")
    scope: dict[str, object] = {}
    exec(example, scope)
    report = scope["report"]
    assert report.verdict == "broken"  # type: ignore[attr-defined]
    assert "'broken': this version drops layers.0.*" in example


def test_no_other_example_goes_unrun() -> None:
    """The README's runs above, that of ``add-a-rule.md`` in test_added: a new one needs a test."""
    assert {p for p, text in PAGES.items() if re.search(r"^ *```python", text, flags=re.M)} == {"README.md", "add-a-rule.md"}


def test_the_picture_is_what_its_script_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere("docs/pictures.py").main(tmp_path)
    alt = capsys.readouterr().out.strip()
    assert f"![{alt}](docs/images/served.png)" in README, "run python docs/pictures.py and take its words"
    drawn, committed = (tmp_path / "served.png").read_bytes(), (ROOT / "docs" / "images" / "served.png").read_bytes()
    assert drawn[:8] == committed[:8] == b"\x89PNG\r\n\x1a\n"
    assert drawn[16:24] == committed[16:24], "another size: run python docs/pictures.py"
    assert len(committed) < 150_000


def test_the_comparison_is_what_its_script_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows are the script's, and ours are what the library says today; the others need a package index."""
    script = elsewhere("benchmarks/compare_tools.py")
    rows = {
        cells[0]: cells[1:] for line in README.splitlines() if line.startswith("| ") and len(cells := line.strip("| ").split(" | ")) == 5
    }
    assert list(rows)[1:] == [tool.name for tool in script.TOOLS]
    drafts = script.drafts(tmp_path)
    assert rows["tool"] == [*drafts, "CPU seconds"]
    for tool in script.TOOLS:
        if "eagle3diag" in tool.name:
            for (sound, broken, engine), cell in zip(drafts.values(), rows[tool.name], strict=False):
                status = main(tool.words(tmp_path, sound, broken, engine)[3:])
                assert tool.reads(capsys.readouterr().out) + (f" (exit {status})" if status else "") == cell
    for words in script.PACKAGES:
        for package in words:
            if "==" in package:
                assert package.replace("==", " ") in README.replace("\n", " ")


def test_the_versions_are_those_on_record() -> None:
    for engine, name in (("sglang", "SGLang"), ("vllm", "vLLM")):
        known = releases(engine)
        assert f"{name} {known[0]} to {known[-1]}" in README
        assert f"{name} {known[0]} to {known[-1]}" in CHANGELOG


def test_the_changelog_lists_every_rule() -> None:
    rules = list(load_all())
    for family in dict.fromkeys(code[:3] for code in rules):
        codes = [c for c in rules if c.startswith(family)]
        assert f"{codes[0]} to {codes[-1]}" in CHANGELOG
    assert f"## {__version__}\n" in CHANGELOG


def test_nothing_names_a_machine() -> None:
    for file in ("README.md", "CHANGELOG.md", "pyproject.toml", ".ci/run", "data_samples/README.md", "docs/conf.py", "docs/generate.py"):
        said = (ROOT / file).read_text(encoding="utf-8")
        for placeholder in ("hf://org/repo", "https://…", "s3://…"):
            said = said.replace(f"`{placeholder}`", "")
        assert "/home/" not in said
        assert "://" not in said


def test_ci_runs_the_readmes_test_command() -> None:
    command = re.findall(r"^python -m pip install '\.\[test,parity\]' && .* && (python -m pytest .*)$", README, flags=re.M)
    assert len(command) == 1
    assert command[0] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_documentations_command_is_the_one_that_is_tested() -> None:
    command = re.findall(r"`python -m pip install '\.\[docs\]' && (python -m sphinx -W docs build/docs)`", README)
    assert len(command) == 1
    assert f"``{command[0]}`` builds the pages" in (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
