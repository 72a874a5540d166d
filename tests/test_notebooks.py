"""The notebooks run as they lie, on a user's paths by parameters alone, and say what is broken; the runner is strict and deterministic."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from eagle3diag.errors import UsageError
from eagle3diag.report import notebooks
from eagle3diag.report.execution import execute
from eagle3diag.report.notebooks import checked, parameters
from eagle3diag.report.parameters import TYPES, accept
from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = (
    "00_start_here",
    "01_checkpoint",
    "02_weight_diff",
    "03_hidden_states",
    "04_logit_agreement",
    "05_engine_wiring",
    "06_serving_log",
    "report",
)
SAYS = {
    "00_start_here": "broken with sglang 0.5.9 (KEY203); healthy with the same engine once converted",
    "02_weight_diff": "with other values",
    "03_hidden_states": "the first holds layers 1 late",
    "04_logit_agreement": "HEALTHY",
    "05_engine_wiring": "no other wiring fits this dump better",
    "06_serving_log": "likeliest: wiring sound, draft weak",
}

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore::UserWarning:papermill")]


def words(page: str) -> str:
    """The page without its tags."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.S))


# ------------------------------------------------------------------ the files


def test_these_are_all() -> None:
    assert notebooks.available() == NAMES
    assert notebooks.folder() == FOLDER


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_without_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(c.outputs == [] and c.execution_count is None for c in code)
    assert len(code) <= 8
    assert len(notebook.cells) >= len(code) + 2  # words between the cells
    assert notebook.metadata.kernelspec.name == "python3"
    assert sum(c.source.startswith("# ") for c in notebook.cells if c.cell_type == "markdown") == 1
    assert "How to read it" in notebook.cells[0].source
    assert "What it answers" in notebook.cells[0].source
    assert code[0].metadata.tags == ["parameters"]
    assert notebook.cells[1] is code[0]
    for cell in code[1:]:
        assert len(cell.source.splitlines()) <= 12
    assert "accept(globals())" in code[1].source
    assert not re.search(r"np\.|torch\.|def |for .*:$", "\n".join(c.source for c in code))  # every number comes from the library


@pytest.mark.parametrize("name", NAMES)
def test_papermill_sees_every_parameter(name: str) -> None:
    import papermill

    seen = papermill.inspect_notebook(str(FOLDER / f"{name}.ipynb"))
    ours = parameters(name)
    assert list(seen) == [p.name for p in ours]
    for p in ours:
        assert p.help == seen[p.name]["help"]
        assert len(p.help) > 15
        assert seen[p.name]["inferred_type_name"] == (f"Optional[{p.type}]" if p.optional else p.type)
        assert p.type in TYPES


# ------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    ("given", "fitted"),
    [
        ({"headers_only": "yes"}, {"headers_only": True}),
        ({"headers_only": "0"}, {"headers_only": False}),
        ({"headers_only": True}, {"headers_only": True}),
        ({"draft": "007"}, {"draft": "007"}),
        ({"draft": "a{b}c"}, {"draft": "a{b}c"}),
        ({"target": None}, {"target": None}),
        ({"target": "None"}, {"target": None}),
    ],
)
def test_values_are_read_as_the_parameters_type(given: dict[str, Any], fitted: dict[str, Any]) -> None:
    assert checked("01_checkpoint", given) == fitted


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"drat": "x"}, "01_checkpoint has no parameter drat: it takes draft, target, engines, launch, headers_only"),
        ({"headers_only": "perhaps"}, "parameter headers_only is 'perhaps' (str), expected bool"),
        ({"headers_only": None}, "parameter headers_only is None (NoneType), expected bool"),
        ({"draft": 7}, "parameter draft is 7 (int), expected str or None"),
        ({"headers_only": "maybe"}, "parameter headers_only is 'maybe' (str), expected bool"),
        ({"headers_only": 1}, "parameter headers_only is 1 (int), expected bool"),
        ({"draft": "\udcff"}, "not valid UTF-8"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        notebooks.run("01_checkpoint", given, tmp_path / "page.html")
    assert says in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rows": "abc"}, "parameter rows is 'abc' (str), expected int or None"),
        ({"rows": "1.5"}, "parameter rows is '1.5' (str), expected int or None"),
        ({"rows": 1.5}, "parameter rows is 1.5 (float), expected int or None"),
        ({"rows": True}, "parameter rows is True (bool), expected int or None"),
        ({"steps": "None"}, "parameter steps is 'None' (str), expected int"),
        ({"steps": "inf"}, "parameter steps is 'inf' (str), expected int"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        checked("04_logit_agreement", given)


def test_a_length_is_a_finite_number() -> None:
    assert checked("05_engine_wiring", {"observed": "2.1", "rows": "500"}) == {"observed": 2.1, "rows": 500}
    for bad in ("nan", float("inf"), "two"):
        with pytest.raises(UsageError, match="parameter observed is"):
            checked("05_engine_wiring", {"observed": bad})


CELL = "from typing import Optional\n\ndraft: Optional[str] = None  # a path\nrows: Optional[int] = None  # a count"


@pytest.mark.parametrize(
    ("injected", "says"),
    [
        ("rows = 1.5", "parameter rows is 1.5 (float), expected int or None"),
        ("rows = 'abc'", "parameter rows is 'abc' (str), expected int or None"),
        ("draft = 7", "parameter draft is 7 (int), expected str or None; papermill reads numbers"),
        ("drat = 'x'", "this notebook has no parameter drat: it takes draft, rows"),
    ],
)
def test_the_first_cell_refuses_what_papermill_lets_pass(injected: str, says: str) -> None:
    space: dict[str, Any] = {"In": ["", CELL, f"# Parameters\n{injected}"]}
    exec(CELL + "\n" + injected, space)
    with pytest.raises(UsageError, match=re.escape(says)):
        accept(space)


def test_the_first_cell_takes_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    space: dict[str, Any] = {
        "In": ["", "%matplotlib inline", CELL, "# Parameters\ndraft = '~/007'\nrows = '12'"],
        "draft": "~/007",
        "rows": "12",
    }
    assert accept(space) == {"draft": "~/007", "rows": 12}
    assert (Path(space["draft"]).name, space["rows"]) == ("007", 12)
    assert "~" not in space["draft"]
    assert accept({}) == {}


def test_papermill_by_itself_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook run by papermill alone, with a name it does not take."""
    import os

    import papermill
    from papermill.exceptions import PapermillExecutionError

    from eagle3diag.report.execution import KERNEL, kernel

    before = dict(os.environ)
    with kernel(tmp_path / "jupyter"), pytest.raises(PapermillExecutionError) as caught:
        papermill.execute_notebook(
            FOLDER / "01_checkpoint.ipynb", tmp_path / "out.ipynb", {"drat": "x"}, kernel_name=KERNEL, progress_bar=False, cwd=tmp_path
        )
    assert dict(os.environ) == before
    assert (caught.value.ename, caught.value.evalue) == (
        "UsageError",
        "this notebook has no parameter drat: it takes draft, target, engines, launch, headers_only",
    )


def test_places_that_cannot_hold_a_report_are_refused_before_anything_runs(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "no" / "page.html"):
        with pytest.raises(UsageError, match="no place for the report"):
            notebooks.run("01_checkpoint", {}, place)
    (tmp_path / "page.executed.ipynb").mkdir()
    with pytest.raises(UsageError, match="no place for the executed notebook"):
        notebooks.run("01_checkpoint", {}, tmp_path / "page.html")
    with pytest.raises(UsageError, match="no notebook"):
        notebooks.run("../report", {}, tmp_path / "page.html")


# ------------------------------------------------------------------ runs


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own: nothing may depend on where a notebook is run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def noted(place: Path, *cells: str) -> Path:
    """A notebook of these code cells."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    made.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(made, place)
    return place


def test_nothing_is_imported_from_the_working_directory(elsewhere: Path) -> None:
    for name in ("numpy", "ipykernel_launcher", "random", "IPython"):
        (elsewhere / f"{name}.py").write_text("raise RuntimeError('a module of the working directory')")
    done, failure = execute(noted(elsewhere / "x.ipynb", "import numpy, random\nprint(numpy.__name__)"), {})
    assert failure == ""
    assert done.cells[0].outputs[0].text == "numpy\n"


@pytest.mark.parametrize("cell", ["import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "1 / 0", "import os\nos.write(2, b'noise')"])
def test_what_a_kernel_says_of_itself_is_not_on_stderr(cell: str, elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, failure = execute(noted(elsewhere / "x.ipynb", cell), {})
    assert ("stopped" in failure) == ("noise" not in cell)
    assert capfd.readouterr().err == ""


def test_no_room_for_temporary_files_is_told_with_the_place(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("papermill.execute_notebook", full)
    with pytest.raises(UsageError, match=r"no notebook can run there \(No space left on device\): free room, or set TMPDIR"):
        execute(noted(elsewhere / "x.ipynb", "1"), {})


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_as_it_lies(name: str, elsewhere: Path) -> None:
    done = notebooks.run(name, {}, "page.html")
    page = Path(done.html).read_text(encoding="utf-8")
    assert sorted(p.name for p in elsewhere.iterdir()) == ["page.executed.ipynb", "page.html"]
    assert "<script" not in page
    assert "http" not in page
    assert "open_checkpoint(" not in page
    assert "open_dump(" not in page
    assert "Optional[str]" not in page
    assert page.count("<h1") == 1
    assert page.count("<img") == page.count('<img alt="') >= 1
    assert 'alt=""' not in page
    assert len(page) < 1_000_000
    executed = json.loads(Path(done.notebook).read_text(encoding="utf-8"))
    assert executed["metadata"]["eagle3diag"]["notebook"] == name
    assert all(c["execution_count"] for c in executed["cells"] if c["cell_type"] == "code")
    assert not any(o["output_type"] in ("stream", "error") for c in executed["cells"] for o in c.get("outputs", []))
    assert SAYS.get(name, "healthy with vllm") in words(page)


def test_a_broken_draft_makes_the_report_say_so(elsewhere: Path) -> None:
    write_draft(elsewhere / "a {draft} of mine", tiny_tensors(drop=["fc.weight"]), tiny_config())
    tiny_target(elsewhere / "target")
    given = {"draft": "a {draft} of mine", "target": "target", "engines": "sglang==0.5.9"}
    done = notebooks.run("report", given, "odd {name}.html")
    said = words(Path(done.html).read_text(encoding="utf-8"))
    assert done.html == "odd {name}.html"
    assert "broken with sglang 0.5.9" in said
    assert "KEY203" in said
    assert "fc.weight" in said
    assert "a {draft} of mine" in said
    assert "No second draft given" in said


SAMPLE = FOLDER.parent / "data_samples" / "smollm2-eagle3"


def test_the_report_measures_on_a_dump(elsewhere: Path) -> None:
    given = {"draft": str(SAMPLE / "draft"), "target": str(SAMPLE / "target"), "engines": "sglang==0.5.9"}
    done = notebooks.run("report", {**given, "dump": str(SAMPLE / "dumps" / "sample_0.safetensors")}, "page.html")
    page = Path(done.html).read_text(encoding="utf-8")
    said = words(page)
    assert "expected acceptance length" in said
    assert "it loses" in said
    assert "AGR706" in said
    assert page.count('<img alt="') == 4
    without = words(Path(notebooks.run("report", given, "other.html").html).read_text(encoding="utf-8"))
    assert "No dump of hidden states given" in without


def test_a_dump_of_ones_own_is_shown_and_not_judged(elsewhere: Path) -> None:
    dump = str(SAMPLE / "dumps" / "sample_1.safetensors")
    done = notebooks.run("03_hidden_states", {"dump": dump, "other": dump, "full": "yes"}, "page.html")
    said = words(Path(done.html).read_text(encoding="utf-8"))
    assert "No draft given" in said
    assert "outlier channels" in said
    assert "the same states in both" in said


def test_a_dump_without_a_finite_row_is_judged_and_not_drawn(elsewhere: Path) -> None:
    from safetensors.torch import save_file
    from torch import full

    save_file({"input_ids": full((9,), 1), "hidden_states": full((9, 64), float("nan"))}, elsewhere / "dump.safetensors")
    draft = write_draft(elsewhere / "draft", tiny_tensors(), tiny_config())
    with pytest.raises(UsageError, match="no finite row"):  # a token by token view of nothing is no answer
        notebooks.run("03_hidden_states", {"dump": "dump.safetensors", "draft": str(draft)}, "page.html")
    page = words(Path("page.html").read_text(encoding="utf-8"))
    assert "DMP603" in page
    assert "No picture: dump.safetensors: nothing to draw, no finite row was read." in page


def test_a_draft_without_its_dump_is_told_what_is_missing(elsewhere: Path) -> None:
    with pytest.raises(UsageError, match="no dump given"):
        notebooks.run("04_logit_agreement", {"draft": str(SAMPLE / "draft")}, "page.html")


def test_a_diff_of_two_drafts_names_what_changed(elsewhere: Path) -> None:
    write_draft(elsewhere / "a", tiny_tensors(), tiny_config())
    tensors = tiny_tensors(drop=["norm.weight"])
    tensors["fc.weight"][:] = -tensors["fc.weight"]
    write_draft(elsewhere / "b", tensors, tiny_config())
    said = words(Path(notebooks.run("02_weight_diff", {"a": "a", "b": "b"}, "page.html").html).read_text(encoding="utf-8"))
    assert "1 removed" in said
    assert "norm.weight" in said
    assert "fc.weight" in said
    assert "(relative 2)" in said


@pytest.mark.parametrize("name", ["01_checkpoint", "report"])
def test_two_runs_give_the_same_bytes(name: str, elsewhere: Path) -> None:
    write_draft(elsewhere / "draft", tiny_tensors(), tiny_config())
    given = {"draft": "draft", "engines": "vllm==0.33.0"}
    if name == "report":
        dump, log = str(SAMPLE / "dumps" / "sample_1.safetensors"), str(SAMPLE.parent / "logs" / "vllm-0.33.0.log")
        given |= {"draft": str(SAMPLE / "draft"), "target": str(SAMPLE / "target"), "dump": dump, "log": log, "other": "draft"}
    first, second = (notebooks.run(name, given, f"{n}.html") for n in ("one", "two"))
    for kind in ("html", "notebook"):
        assert Path(getattr(first, kind)).read_bytes() == Path(getattr(second, kind)).read_bytes()


def test_a_report_says_what_it_was_made_from_and_not_where(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    from eagle3diag import __version__

    home = elsewhere / "home" / "alice"
    write_draft(home / "drafts" / "mine", tiny_tensors(), tiny_config())
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("IPYTHONDIR", str(elsewhere))
    given = {"draft": str(home / "drafts" / "mine"), "engines": "vllm==0.33.0"}
    done = notebooks.run("report", given, "page.html")
    page, kept = (Path(p).read_text(encoding="utf-8") for p in (done.html, done.notebook))
    for text in (page, kept):
        assert str(home) not in text
        assert "alice" not in text
        assert "ipykernel_" not in text
        assert "~/drafts/mine" in text
    said = words(page)
    assert f"eagle3diag {__version__}, with python 3." in said
    for package in ("torch", "safetensors", "papermill", "nbconvert"):
        assert re.search(rf"\b{package} \d", said), package
    for file in ("config.json", "model.safetensors"):
        raw = (home / "drafts" / "mine" / file).read_bytes()
        assert f"~/drafts/mine/{file}" in said
        assert f"{len(raw):,} bytes" in said
        assert hashlib.sha256(raw).hexdigest() in said
    assert re.search(r"engines\s+vllm==0\.33\.0", said)
    assert re.search(r"launch\s+not given", said)


def test_an_unusable_input_keeps_the_partial_report(elsewhere: Path) -> None:
    (elsewhere / "draft").mkdir()
    (elsewhere / "draft" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UsageError) as caught:
        notebooks.run("report", {"draft": "draft"}, "page.html")
    said = str(caught.value)
    assert "LFS" in said
    assert said.endswith("the partial report is kept in page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert "the report ends here" in page
    assert "The draft as it lies" not in page  # no words on what is not there
    assert "Traceback" not in page
    assert "LFS" in Path("page.executed.ipynb").read_text(encoding="utf-8")


def test_the_command_renders_and_says_where(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eagle3diag.cli import main

    write_draft(elsewhere / "draft", tiny_tensors(), tiny_config())
    assert main(["report", "draft", "--engine", "vllm==0.33.0", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    body = json.loads(out)
    assert (body["schema"], body["html"], body["notebook"]) == (1, "report.html", "report.executed.ipynb")
    assert body["parameters"]["target"] is None
    assert Path("report.html").stat().st_size == body["bytes"]


def test_the_list_of_notebooks(capsys: pytest.CaptureFixture[str]) -> None:
    from eagle3diag.cli import main

    assert main(["notebook", "--format", "json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [n["name"] for n in body["notebooks"]] == list(NAMES)
    assert body["notebooks"][0]["parameters"][0]["name"] == "draft"
    assert main(["notebook"]) == 0
    assert "headers_only" in capsys.readouterr().out
