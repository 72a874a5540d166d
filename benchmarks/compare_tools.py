"""Three broken drafts, shown to what people use today and to ``eagle3diag``: what each says, and how long it takes.

The drafts are the packaged sample with one fault each. *Names*: the decoder layer is called ``layers.0`` and goes to an engine that only
knows ``midlayer``, as a sound draft for another engine would. *Map*: ``d2t`` is all zero. *NaN*: one element of ``fc.weight``, in BF16. The
tools that compare two files are also given the sound draft; ``eagle3diag check`` is not. Every tool runs as a process of its own, in a
throw-away virtual environment made here (needs a package index; ``--venv`` keeps or reuses one). Seconds are the processor's (user
and system, start of the process included; median of the runs), which other load on the machine disturbs least. What a tool says is taken
from its output; an exit status other than 0 stands next to it.

Run: ``python benchmarks/compare_tools.py [--venv DIR] [--rounds 5]``, with eagle3diag installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data_samples" / "smollm2-eagle3"
#: what is installed, without dependencies where the tool does not need them to do this
PACKAGES = (("sft-cli==0.2.2", "safetensors==0.8.0", "numpy"), ("--no-deps", "tensortracker==0.1.0", "diffai-python==0.5.2"))

SAFE_OPEN = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[2], framework="np") as f:
    print(len([(name, f.get_slice(name).get_shape(), f.get_slice(name).get_dtype()) for name in f.keys()]))
"""
DIFFAI = "import json, sys, diffai; print(json.dumps([(c['type'], c['path']) for c in diffai.diff_paths(*sys.argv[1:3])]))"
TENSORTRACKER = "import json, sys, tensortracker as t; print(json.dumps(sorted(t.resolve_diff(*sys.argv[1:3]).changes)))"


@dataclass(frozen=True)
class Tool:
    """How a tool is called on a sound and a broken draft, and how its output reads in a few words."""

    name: str
    words: Callable[[Path, Path, Path, str], list[str]]  #: (bin, sound, broken, engine) -> command
    reads: Callable[[str], str]


def weights(folder: Path) -> str:
    """The file in a draft folder."""
    return str(folder / "model.safetensors")


def _healthy(out: str) -> str:
    last = out.strip().splitlines()[-1]
    return last.lstrip("✓✗ ")


def _sft_diff(out: str) -> str:
    said = json.loads(out)
    if said.get("added") or said.get("removed"):
        return f"{len(said['removed'])} removed, {len(said['added'])} added"
    return ", ".join(f"{n} differs" for n, d in said["value_diffs"].items() if d["status"] != "equal") or "no difference"


def _diffai(out: str) -> str:
    changes = json.loads(out)
    kinds = {k: sum(1 for kind, _ in changes if kind == k) for k in ("Removed", "Added")}
    if any(kinds.values()):
        return f"{kinds['Removed']} removed, {kinds['Added']} added"
    return (
        ", ".join(sorted({path.removeprefix("tensors.").split(".data_summary")[0] + " differs" for _, path in changes})) or "no difference"
    )


def _tensortracker(out: str) -> str:
    names = json.loads(out)
    return (f"{len(names)} new, none removed" if len(names) > 1 else ", ".join(f"{n} differs" for n in names)) or "no difference"


def _check(out: str) -> str:
    report = json.loads(out)
    worst = [f["code"] for f in report["findings"] if f["severity"] == "error"]
    values = sum(s["code"].startswith("VAL") and "header" in s["why"] for s in report["skipped"])
    return f"{report['verdict']}: {', '.join(worst)}" if worst else report["verdict"] + (f", {values} rules not judged" if values else "")


def _diff(out: str) -> str:
    said = json.loads(out)
    moved = [f"{v['name']} differs" + (f" ({v['nan'][1]} NaN)" if v["nan"][1] else "") for v in said["values"] if not v["equal"]]
    renamed = [f"{len(said['renamed'])} renamed"] if said["renamed"] else []
    return ", ".join([*renamed, *(moved or ["values equal"])])


def _listing(out: str) -> str:
    return f"{out.strip()} tensors"


def _check_words(bin: Path, sound: Path, broken: Path, engine: str) -> list[str]:
    given = ["--target", str(SAMPLE / "target"), "--engine", engine, "--format", "json"]
    return [sys.executable, "-m", "eagle3diag", "check", str(broken), *given]


def _headers_words(bin: Path, sound: Path, broken: Path, engine: str) -> list[str]:
    return [*_check_words(bin, sound, broken, engine), "--headers-only"]


def _diff_words(bin: Path, sound: Path, broken: Path, engine: str) -> list[str]:
    return [sys.executable, "-m", "eagle3diag", "diff", str(sound), str(broken), "--values", "--format", "json"]


TOOLS = (
    Tool("safetensors `safe_open`", lambda b, s, x, e: [str(b / "python"), "-c", SAFE_OPEN, weights(s), weights(x)], _listing),
    Tool("`sft check`", lambda b, s, x, e: [str(b / "sft"), "check", weights(x)], _healthy),
    Tool("`sft diff --delta`", lambda b, s, x, e: [str(b / "sft"), "diff", weights(s), weights(x), "--delta", "--json"], _sft_diff),
    Tool("tensortracker", lambda b, s, x, e: [str(b / "python"), "-c", TENSORTRACKER, weights(s), weights(x)], _tensortracker),
    Tool("diffai", lambda b, s, x, e: [str(b / "python"), "-c", DIFFAI, weights(s), weights(x)], _diffai),
    Tool("`eagle3diag diff --values`", _diff_words, _diff),
    Tool("`eagle3diag check --headers-only`", _headers_words, _check),
    Tool("`eagle3diag check`", _check_words, _check),
)


def drafts(top: Path) -> dict[str, tuple[Path, Path, str]]:
    """Fault -> (sound draft, broken draft, engine it is meant for)."""
    import shutil

    from safetensors.torch import load_file, save_file

    tensors = load_file(weights(SAMPLE / "draft"))

    def write(name: str, changed: dict[str, object]) -> Path:
        shutil.copytree(SAMPLE / "draft", top / name)
        (top / name / "model.safetensors").unlink()
        save_file(changed, weights(top / name), metadata={"format": "pt"})  # type: ignore[arg-type]
        return top / name

    damaged = {n: t.clone() for n, t in tensors.items()}
    damaged["fc.weight"][3, 5] = float("nan")
    sound = write("sound", dict(tensors))
    return {
        "names": (write("midlayer", {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}), sound, "sglang==0.5.9"),
        "map": (sound, write("map", {**tensors, "d2t": tensors["d2t"] * 0}), "sglang==0.5.23"),
        "NaN": (sound, write("nan", dict(damaged)), "sglang==0.5.23"),
    }


def installed(folder: Path) -> Path:
    """The programs of a virtual environment that holds the tools, made where it is not there."""
    programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
    if not programs.is_dir():
        venv.create(folder, with_pip=True)
        for words in PACKAGES:
            subprocess.run([str(programs / "python"), "-m", "pip", "install", "-q", *words], check=True)
    return programs


def once(command: list[str]) -> tuple[float, int, str]:
    """Processor seconds, exit status and output of one run."""
    start = os.times()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    end = os.times()
    return (
        end.children_user - start.children_user + end.children_system - start.children_system,
        done.returncode,
        done.stdout or done.stderr,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, help="virtual environment of the tools; made where it is not there")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        programs = installed(args.venv or Path(place) / "venv")
        every = drafts(Path(place))
        print("| tool | " + " | ".join(every) + " | CPU seconds |\n|---|" + "---|" * (len(every) + 1))
        for tool in TOOLS:
            cells, times = [], []
            for sound, broken, engine in every.values():
                command = tool.words(programs, sound, broken, engine)
                runs = [once(command) for _ in range(args.rounds)]
                times += [seconds for seconds, _, _ in runs]
                _, status, out = runs[-1]
                cells.append(tool.reads(out) + (f" (exit {status})" if status else ""))
            print(f"| {tool.name} | " + " | ".join(cells) + f" | {statistics.median(times):.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
