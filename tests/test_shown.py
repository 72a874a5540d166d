"""Every result a public function or a notebook cell can hand out shows itself: found by introspection, built for real, then made hostile.

A class that is reached from a public function and has no view, or whose view fails on empty, enormous, unfinished or malicious contents,
fails here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import math
import pkgutil
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import eagle3diag
from eagle3diag.display import Piece, Shown
from eagle3diag.errors import UsageError, escaped
from eagle3diag.report import figures, views
from eagle3diag.report.layout import Block, Table, View, cut_rows, table
from eagle3diag.report.views import pieces as views_pieces
from tests import test_report, test_report_measures

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
WARNING = "WARNING Parameter model.layers.0.mlp.up_proj.weight not found in params_dict"
EVIL = "<img src=x onerror=alert(1)>\x1b[31m\u202egnp.exe`|*[x](http://e.example)\nnext"

# ------------------------------------------------------------------ which classes there are


@cache
def modules() -> dict[str, Any]:
    """Every module of the package."""
    names = [m.name for m in pkgutil.walk_packages(eagle3diag.__path__, "eagle3diag.") if not m.name.endswith("__main__")]
    return {n: importlib.import_module(n) for n in ["eagle3diag", *names]}


@cache
def names_in(module: str) -> dict[str, type]:
    """Names a module's annotations can use -> the dataclass of this package each stands for."""
    tree = ast.parse(Path(modules()[module].__file__).read_text(encoding="utf-8"))
    found: dict[str, Any] = dict(vars(modules()[module]))
    for node in ast.walk(tree):  # imports under TYPE_CHECKING too
        if isinstance(node, ast.ImportFrom) and node.module in modules():
            found |= {a.asname or a.name: getattr(modules()[node.module], a.name, None) for a in node.names}
    ours = {n: v for n, v in found.items() if isinstance(v, type) and v.__module__.startswith("eagle3diag.")}
    return {n: v for n, v in ours.items() if dataclasses.is_dataclass(v) and not v.__name__.startswith("_")}


def in_annotation(annotation: Any, module: str) -> list[type]:
    """The dataclasses an annotation names."""
    words = re.findall(r"[A-Za-z_]\w*", str(annotation))
    return [names_in(module)[w] for w in words if w in names_in(module)]


def entry_points() -> Iterator[tuple[str, str]]:
    """The façade, what notebook cells import, and every public function that returns something that shows itself."""
    yield from ((f"eagle3diag.{m}", n) for n, m in eagle3diag._WHERE.items())
    for file in NOTEBOOKS.glob("*.ipynb"):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                for node in ast.walk(ast.parse("".join(cell["source"]))):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle3diag"):
                        yield from ((str(node.module), a.name) for a in node.names)
    for name, module in modules().items():
        for public in getattr(module, "__all__", ()):
            one = getattr(module, public, None)
            if callable(one) and not isinstance(one, type) and getattr(one, "__module__", "") == name:
                given = in_annotation(getattr(one, "__annotations__", {}).get("return", ""), name)
                yield from [(name, public)] if any(issubclass(c, (Shown, Piece)) for c in given) else []


@cache
def reached() -> dict[type, str]:
    """Every dataclass a user can hold -> how it is reached."""
    todo = [
        (c, f"{m}.{n}") for m, n in entry_points() for c in in_annotation(getattr(modules()[m], n).__annotations__.get("return", ""), m)
    ]
    seen: dict[type, str] = {}
    while todo:
        cls, why = todo.pop()
        if cls in seen or cls in (View, Table, Block):
            continue
        seen[cls] = why
        for f in dataclasses.fields(cls):
            todo += [(c, f"{cls.__name__}.{f.name}") for c in in_annotation(f.type, cls.__module__)]
        for name, member in vars(cls).items():
            made = member.fget if isinstance(member, property) else member if callable(member) and not name.startswith("_") else None
            if made is not None and hasattr(made, "__annotations__"):
                todo += [(c, f"{cls.__name__}.{name}") for c in in_annotation(made.__annotations__.get("return", ""), cls.__module__)]
    return seen


def family(base: type) -> set[type]:
    """All classes of the package that inherit ``base``."""
    assert modules()
    made = [c for c in base.__subclasses__() if c.__module__.startswith("eagle3diag.")]
    return {c for c in made if getattr(modules()[c.__module__], c.__name__) is c}  # slots=True makes a class twice


#: reached, and not a result: tools that compute, whose fields are tensors and whole states of the work
TOOLS = {"Bench", "PlainDraft", "DumpScan", "SampleScan", "SlotRows", "Probe", "Source"}


def test_whatever_a_user_can_hold_shows_itself() -> None:
    bare = {f"{c.__module__}.{c.__name__} ({why})" for c, why in reached().items() if not issubclass(c, (Shown, Piece))}
    assert {b for b in bare if b.split(" ")[0].rsplit(".", 1)[1] not in TOOLS} == set()


def test_every_class_has_a_view_or_a_sentence() -> None:
    assert {c.__name__ for c in family(Shown)} == set(views.KINDS)
    assert {f"{c.__module__.split('.')[1]}.{c.__name__}" for c in family(Piece)} == set(views_pieces.SENTENCES)
    for cls in family(Shown) | family(Piece):
        base = Shown if issubclass(cls, Shown) else Piece
        assert cls.__repr__ is base.__repr__, cls  # a dataclass makes its own unless told repr=False
        assert callable(getattr(cls, "to_dict", None)), cls


# ------------------------------------------------------------------ one of each, for real


def compatibility() -> Any:
    """Two wirings beside a log, the second excluded."""
    from eagle3diag.serving.compatible import OWN, Compared, Compatibility, Observed

    seen = Observed(length=1.49, k=3, joint=(0.35, 0.1, 0.04), drafts=900.0, error=0.02)
    own = Compared(name=OWN, kind="as trained", joint=(0.35, 0.1, 0.04), length=1.5, z=0.4, counts_z=0.9, group=1)
    late = Compared(name="token shift -1 in place of 0", kind="shift", joint=(0.04, 0.0, 0.0), length=1.04, z=math.inf, counts_z=40.0)
    return Compatibility(seen=seen, compared=(own, late), steps=3, rows=376, notes=("of 2 samples",))


def damaged(folder: Path) -> Path:
    """A dump with a sample that is too short for its tokens, and a config that is no JSON beside a draft."""
    import torch

    states = {f"hidden_states.{k}": torch.randn(8 if k != 2 else 5, 16) for k in (2, 6, 9)}
    folder.mkdir()
    save_file({"token_ids": torch.arange(8), **states}, folder / "sample_0.safetensors")
    return folder


def gathered(roots: list[Any]) -> dict[type, list[Any]]:
    """The results and pieces inside some results, up to three of a class."""
    found: dict[type, list[Any]] = {}
    seen: dict[int, Any]
    todo, seen = list(roots), {}
    while todo:
        one = todo.pop()
        if isinstance(one, Mapping):
            todo += list(one.values())[:12]
        elif isinstance(one, (list, tuple)):
            todo += list(one)[:12]
        elif dataclasses.is_dataclass(one) and not isinstance(one, type) and id(one) not in seen:
            seen[id(one)] = one  # held, so that no other takes its id
            if isinstance(one, (Shown, Piece)) and len(found.setdefault(type(one), [])) < 3:
                found[type(one)].append(one)
            todo += [getattr(one, f.name) for f in dataclasses.fields(one)]
            todo += [getattr(one, p) for p, v in vars(type(one)).items() if isinstance(v, property) and p not in ("config",)]
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[type, list[Any]]:
    """One to three of every class, from the sample, the factory, a small engine source, and made-up measurements."""
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.target import open_target
    from eagle3diag.engines.contract import load_contract
    from eagle3diag.engines.launch import parse_launch
    from eagle3diag.engines.scan import scan
    from eagle3diag.engines.targets import target_support
    from eagle3diag.hidden.dumps import open_dump
    from eagle3diag.hidden.norms import profile
    from eagle3diag.report import demo, diagnosis, logstudy, notebooks, opened, sample, study
    from eagle3diag.rules import registry
    from eagle3diag.rules.logcase import opened_log
    from eagle3diag.serving.model import Training
    from eagle3diag.weights.convert import convert
    from eagle3diag.weights.diff import diff
    from eagle3diag.weights.stats import tensor_stats
    from tests.engine_sources import write_sglang
    from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft
    from tests.fixtures_srv import sglang_line, vllm_line, written

    folder = tmp_path_factory.mktemp("shown")
    paths = sample.sample()
    draft = open_checkpoint(paths.draft)
    tiny = write_draft(folder / "draft", tiny_tensors(), tiny_config(architectures=7))
    target = tiny_target(folder / "target", weights=True)
    renamed = sample.variant(draft)
    launch = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 --speculative-draft-model-path {tiny} "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 9 --nonsense 1"
    )
    lines = [sglang_line(i, 1.04, 0.26, tokens=400 + 70 * i) for i in range(120)]
    log = written(folder, ["speculative_algorithm='EAGLE3'", *lines])
    this = opened.opened()
    registry.load_all()
    write_draft(folder / "odd", tiny_tensors(), tiny_config())
    (folder / "odd" / "speculators_config.json").write_text("{", encoding="utf-8")
    (folder / "odd" / "config.json").write_text("{", encoding="utf-8")
    ranks = [vllm_line(i, 380, 608, (0.8, 0.5, 0.3), engine=f"Engine 00{i % 2}: ") for i in range(6)]
    roots = [
        paths,
        this,
        compatibility(),
        open_checkpoint(str(folder / "odd")),
        open_dump(str(damaged(folder / "short"))),
        profile(this.dump, full=True),
        opened_log(written(folder, [*ranks, WARNING], "ranks.log")),
        Training(source="SpecForge: train.log", kind="joint", rates=(0.6, 0.4), length=2.0, caveats=("fed its own tokens",)),
        logstudy.log_study(log, str(tiny), str(target), engine="sglang==0.5.9", baseline=260.0, control=paths.log),
        study.study(
            paths.draft, paths.target, "sglang==0.5.9, vllm==0.33.0", other=paths.draft, dump=str(Path(paths.dumps, "sample_0.safetensors"))
        ),
        study.study(str(tiny), str(target), None, launch),
        this.dump.read(this.dump.samples[0]),
        diff(draft, renamed, values=True),
        tensor_stats(draft, "fc.weight"),
        convert(paths.draft, folder / "out", "vllm"),
        parse_launch(launch),
        scan(write_sglang(folder / "engine"), "ToyForCausalLM"),
        target_support(load_contract("sglang", "0.5.9"), open_target(str(target)), None),
        diagnosis.Served(draft="d", target=None, dump=None, logs=(), engine="sglang==0.5.9"),
        diagnosis.Mended(why="nothing to convert"),
        demo.Story(title="a story", engine="sglang==0.5.9", expected="", report=this.judged("DMP")),
        notebooks.Rendered(name="report", html="a.html", notebook="a.ipynb", bytes=9, parameters={"draft": "x"}),
        *list(registry.RULES.values())[:3],
        *(make() for make in test_report_measures.EVERY.values()),
        test_report_measures.engine(result=None, why="the dump holds no HF 3"),
        test_report.served(),
    ]
    return gathered(roots)


# ------------------------------------------------------------------ and what can become of it

#: fields whose words this package writes itself and looks up
OURS = {
    "definition",
    "form",
    "basis",
    "status",
    "severity",
    "schema",
    "kind",
    "fate",
    "role",
    "parts",
    "final_norm",
    "final",
    "confidence",
    "captures",
}


def changed(one: Any, leaf: Callable[[Any, str], Any], container: Callable[[Any], Any] | None = None, depth: int = 0) -> Any:
    """A copy with every leaf and then every container replaced; functions, tensors and our own words stay."""
    container = container or same_container
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        if depth > 4 or type(one).__name__ in ("Case", "ExactVector", "Sample"):
            return one
        new = {}
        for f in dataclasses.fields(one):
            value = getattr(one, f.name)
            fixed = str(f.type).startswith("tuple[") and "..." not in str(f.type)
            if (
                f.init
                and not fixed
                and not {f.name, f"{type(one).__name__}.{f.name}"} & OURS
                and "Literal" not in str(f.type)
                and not callable(value)
            ):
                new[f.name] = changed(value, leaf, container, depth + 1) if not isinstance(value, str) or "str" in str(f.type) else value
        return dataclasses.replace(one, **new)
    if isinstance(one, (Mapping, tuple)) and depth > 2:
        container = same_container  # a lot of a lot would be a lot
    if isinstance(one, Mapping):
        return container({leaf(k, "key"): changed(v, leaf, container, depth + 1) for k, v in list(one.items())[:600]})
    if isinstance(one, tuple):
        return container(tuple(changed(v, leaf, container, depth + 1) for v in one[:600]))
    return leaf(one, "value")


MEGABYTE = "W" * 1_000_000


def hostile(x: Any, where: str) -> Any:
    return EVIL if type(x) is str and (x or where == "value") else x


def huge(x: Any, where: str) -> Any:
    return MEGABYTE if type(x) is str and where == "value" and x else x


def unfinished(x: Any, where: str) -> Any:
    return math.nan if type(x) is float and where == "value" else x


def same(x: Any, where: str) -> Any:
    return x


def same_container(c: Any) -> Any:
    return c


def emptied(c: Any) -> Any:
    return type(c)()


def many(c: Any) -> Any:
    """500 of what there is one of, each under its own name."""
    if isinstance(c, dict) and c:
        return {**c, **{f"{k}{i}": v for i in range(500 // len(c)) for k, v in c.items()}} if all(isinstance(k, str) for k in c) else c
    if isinstance(c, tuple) and c and all(isinstance(v, (Piece, Shown, str)) for v in c):
        return c * (1 + 500 // len(c))
    return c


STATES: dict[str, Callable[[Any], Any]] = {
    "real": lambda one: one,
    "hostile": lambda one: changed(one, hostile),
    "huge": lambda one: changed(one, huge),
    "unfinished": lambda one: changed(one, unfinished),
    "empty": lambda one: changed(one, same, emptied),
    "many": lambda one: changed(one, same, many),
}
#: a result that is never without these, in one state
NEVER = {
    ("empty", "Study"),  # one report at least
    *(
        ("unfinished", n) for n in ("ContextBin", "EngineShare", "ServingLog", "Payoff")
    ),  # of decimals read in a log; its patterns match no NaN
}


class Seen(HTMLParser):
    """Tags, attributes and visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def safe(shown: str) -> bool:
    """Nothing that moves a cursor, changes a colour or turns the direction of writing."""
    return all(c.isprintable() or c == "\n" for c in shown)


def check(one: Any, written: bool = True) -> list[str]:
    """What is wrong with how one result shows itself."""
    wrong = []
    start = time.perf_counter()
    plain = repr(one)
    if not plain.strip() or plain == f"<{type(one).__name__}>":
        try:
            views.line(one) if isinstance(one, Piece) else views.plain(one)
            wrong.append("an empty repr")
        except Exception as error:
            wrong.append(f"its repr falls back: {type(error).__name__} {error}"[:300])
    lines = plain.splitlines()
    if len(lines) > (1 if isinstance(one, Piece) else views.MAX_LINES) or len(plain) > 20_000 or not safe(plain):
        wrong.append(f"repr of {len(lines)} lines, {len(plain)} characters, safe: {safe(plain)}")
    page = one._repr_html_()
    if page is None:
        try:
            views.html(one)
        except Exception as error:
            wrong.append(f"no HTML: {type(error).__name__} {error}"[:300])
        return wrong
    seen = Seen(page)
    if len(page.encode()) > 64_000 or not safe(page):
        wrong.append(f"HTML of {len(page.encode())} bytes, safe: {safe(page)}")
    if seen.tags - {
        "style",
        "section",
        "h3",
        "h4",
        "p",
        "strong",
        "code",
        "dl",
        "dt",
        "dd",
        "div",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }:
        wrong.append(f"tags {seen.tags}")
    if seen.attributes - {"class", "id", "scope", "role", "tabindex", "aria-label"}:
        wrong.append(f"attributes {seen.attributes}")
    stripped = " ".join("".join(seen.words).split())
    summary = escaped(views.view(one).summary, 60).rstrip("…")
    if not summary.strip() or " ".join(summary.split()) not in stripped:
        wrong.append(f"the summary {summary!r} is not in the page without tags")
    ranks = [("error", "warning", "info", "ok", "skipped", "none").index(b.status) for b in views.view(one).blocks]
    if ranks != sorted(ranks):
        wrong.append("blocks are not worst first")
    if time.perf_counter() - start > 3:
        wrong.append(f"took {time.perf_counter() - start:.1f} s")
    try:
        if written:
            json.dumps(one.to_dict(), allow_nan=False)
    except Exception as error:
        wrong.append(f"to_dict: {type(error).__name__} {error}"[:200])
    return wrong


def test_one_of_every_class_is_built(real: dict[type, list[Any]]) -> None:
    assert family(Shown) | family(Piece) == set(real)


@pytest.mark.parametrize("state", STATES)
def test_every_result_shows_itself(real: dict[type, list[Any]], state: str) -> None:
    wrong = {}
    for cls in sorted(family(Shown) | family(Piece), key=lambda c: (c.__module__, c.__name__)):
        for one in real.get(cls, []):
            if (state, cls.__name__) not in NEVER:
                for fault in check(STATES[state](one), written=state != "huge"):
                    wrong[f"{cls.__name__}: {fault}"] = 1
    assert not wrong, "\n".join(wrong)


def test_every_result_has_a_frame(real: dict[type, list[Any]]) -> None:
    for cls in family(Shown):
        for one in real[cls]:
            shown = one.to_frame()
            assert len(shown) == 0 or list(shown.columns), cls


@pytest.mark.parametrize("state", ["real", "unfinished"])
def test_a_picture_or_the_reason_why_there_is_none(real: dict[type, list[Any]], state: str) -> None:
    drawn = set()
    for cls in sorted(family(Shown), key=lambda c: c.__name__):
        if (state, cls.__name__) not in NEVER:
            one = STATES[state](real[cls][0])
            try:
                picture = figures.png(figures.plot(one))
            except UsageError:  # it says why
                continue
            drawn.add(cls.__name__)
            assert picture.startswith(b"\x89PNG")
            assert len(figures.alt(one)) > 20
            assert safe(figures.alt(one))
            assert figures.caption(one).endswith(".")
    assert state != "real" or drawn >= {"ServedDraft", "WeightDiff", "NormProfile", "Agreement", "WiringRanking", "DumpComparison"}


# ------------------------------------------------------------------ how much is shown


def test_a_repr_is_short_and_counts_the_rest(real: dict[type, list[Any]]) -> None:
    from eagle3diag.checkpoint.model import Checkpoint, TensorInfo

    tensors = {f"t{i:03}": TensorInfo(f"t{i:03}", "BF16", (64, 64), 8192 - i, "model.safetensors", 0) for i in range(500)}
    one = Checkpoint(path="big", files=("model.safetensors",), tensors=tensors, configs=())
    shown = repr(one).splitlines()
    assert shown[0].startswith("Checkpoint big: 500 tensors")
    assert "t000" in shown[4]
    assert any("more, all smaller" in line for line in shown)
    assert len(shown) == views.MAX_LINES
    page = one._repr_html_() or ""
    assert "460 more, all smaller" in page


def test_what_is_cut_is_counted_by_kind() -> None:
    fates = ["dropped"] * 50 + ["loaded"] * 310
    one = table("t", ("tensor", "fate"), ((f"n{i}", f) for i, f in enumerate(fates)), kinds=fates)
    assert one.more == "320 more: 10 dropped, 310 loaded"
    assert cut_rows(one, 10).more == "350 more: 40 dropped, 310 loaded"
    assert cut_rows(table("t", ("n",), [(1,), (2,), (3,)]), 1).more == "2 more"
    assert cut_rows(Table(caption="t", head=("n",), rows=(("1",), ("2",)), more="not stated: x"), 1).more == "1 more; not stated: x"
    assert cut_rows(one, 40) is one


def test_rows_that_are_not_shown_are_not_rendered() -> None:
    class Value:
        asked = 0

        def __str__(self) -> str:
            Value.asked += 1
            return "x"

    table("t", ("a",), [(Value(),) for _ in range(10_000)])
    assert Value.asked == 40


def test_pieces_stand_on_one_line_in_a_list(real: dict[type, list[Any]]) -> None:
    from eagle3diag.rules.model import Finding, Severity

    one = Finding(code="KEY203", severity=Severity.ERROR, title="10 tensors of layers.0.* are dropped in silence")
    assert repr((one,)) == "(Finding(✖ ERROR KEY203: 10 tensors of layers.0.* are dropped in silence),)"
    assert "KEY203" in (one._repr_html_() or "")


def test_a_huge_report_stays_small_and_says_what_is_missing(real: dict[type, list[Any]]) -> None:
    from eagle3diag.rules.model import Finding, Outcome, Report, Severity

    case = next(r for r in real[Report]).case
    found = tuple(
        Finding(code="KEY203", severity=Severity.WARNING if i else Severity.ERROR, title=f"{i} " + "x" * 900, evidence={"n": "y" * 3000})
        for i in range(400)
    )
    report = Report(case=case, outcomes=(Outcome(code="KEY203", status="ran", findings=found),))
    page = report._repr_html_() or ""
    assert len(page.encode()) <= views.MAX_BYTES
    assert "of the kind of KEY203" in page
    assert page.index("ERROR") < page.index("WARNING")
    assert "399 warnings" in page
    assert len(repr(report).splitlines()) <= views.MAX_LINES
    assert " more" in repr(report)
