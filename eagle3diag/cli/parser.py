"""What can be asked, and with which options. Parsers are built without touching the rooms: a command names its handler by words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from eagle3diag.errors import UsageError, escaped

__all__ = ["build_parser"]

FORMATS = ("text", "json", "html", "markdown")
#: every command, in the order of the help
NAMES = (
    "check", "inspect", "serve", "diff", "convert", "rules", "demo", "report", "norms", "agree", "wirings", "capture", "scan", "log",
    "notebook",
)  # fmt: skip
RENDERED = "exit status: 0 rendered, whatever was found; 2 unusable input, with one line on stderr; what was rendered until then is kept"
EPILOG = "exit status: 0 answered, nothing at the fail level; 1 findings; 2 no answer, with one line on stderr"


class _Parser(argparse.ArgumentParser):
    """One line instead of usage and error, no abbreviations, an option given twice is an error and not a silent override."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(allow_abbrev=False, **kw)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{escaped(message, 300)}; '{self.prog} --help' lists what there is")


class _Once(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice")
        setattr(namespace, self.dest, values)


def _number(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return value

    return read


def _length(text: str) -> float:
    """Reads an acceptance length: tokens per verification, the bonus token counted."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 <= value <= 64.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no acceptance length (tokens per verification with the bonus token: 1.00 or more)")
    return value


def _rate(text: str) -> float:
    """Reads a throughput in tokens per second."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no throughput (tokens per second, above 0)")
    return value


class _Unasked:
    """Stands in for the parser of a command that was not asked for: options cost more than all the rest of a start."""

    def add_argument(self, *names: str, **options: Any) -> None:
        """Nothing."""

    def add_mutually_exclusive_group(self) -> _Unasked:
        """Nothing, too."""
        return self


def build_parser(asked: str | None = None) -> argparse.ArgumentParser:
    """Commands with their options; ``handler`` names the module and function that answer one.

    Args:
        asked: the command on the line; the options of the others are left out. None for all.
    """
    top = _Parser(prog="eagle3diag", description="Diagnose EAGLE-3 speculative-decoding drafts, without a GPU or an engine.", epilog=EPILOG)
    top.add_argument("--version", action="store_true", help="print the version and stop")
    sub = top.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def command(name: str, module: str, about: str, formats: tuple[str, ...] = FORMATS, output: bool = True) -> Any:
        if asked in NAMES and name != asked:
            return _Unasked()
        p = sub.add_parser(
            name, help=about, description=about[0].upper() + about[1:] + ".", epilog=RENDERED if name in ("report", "notebook") else EPILOG
        )
        p.set_defaults(handler=(module, name), output=None)
        p.add_argument("--format", choices=formats, action=_Once, help="how to print the result (default: text)")
        if output:
            text = "write the result there instead of stdout, whole or not at all"
            p.add_argument("-o", "--output", metavar="FILE", action=_Once, help=text)
        return p

    def engine(p: Any, many: bool) -> None:
        how = {"action": "append", "default": []} if many else {"action": _Once}
        text = "e.g. sglang==0.5.9; without a version, the newest on record; sglang@PATH reads a copy of the engine"
        p.add_argument("--engine", metavar="E[==V]|E@PATH", help=text, **how)

    def about_case(p: Any, many: bool) -> None:
        p.add_argument("draft", metavar="DRAFT", help="folder or file of the draft checkpoint")
        p.add_argument("--target", metavar="TARGET", action=_Once, help="folder or config.json of the target model")
        engine(p, many)
        launch = p.add_mutually_exclusive_group()
        launch.add_argument("--launch", metavar="LINE", action=_Once, help="the launch line, quoted")
        launch.add_argument("--launch-file", metavar="FILE", action=_Once, help="a file that holds the launch line")

    def dump(p: Any, about: str) -> None:
        p.add_argument("--dump", metavar="DUMP", action=_Once, help=about)

    def log(p: Any) -> None:
        text = "the same server's log with another draft: tells whether the engine is at fault"
        p.add_argument("--control-log", dest="control", metavar="LOG2", action=_Once, help=text)
        text = "tokens per second without speculation, under the same load: does it pay?"
        p.add_argument("--baseline", metavar="TOK_PER_S", type=_rate, action=_Once, help=text)
        text = "metrics of the training run (speculators, SpecForge, EAGLE, ModelOpt, Automodel)"
        p.add_argument("--metrics", metavar="FILE", action=_Once, help=text)

    def fails(p: Any) -> None:
        p.add_argument("--fail-on", choices=("error", "warning"), action=_Once, help="least severity for exit status 1 (default: error)")

    def measured(p: Any) -> None:
        p.add_argument("draft", metavar="DRAFT")
        p.add_argument("dump", metavar="DUMP", help="file or folder of the target's hidden states")
        p.add_argument("--target", metavar="TARGET", action=_Once, help="folder of the target, or of its config and rows.safetensors")
        p.add_argument("--steps", metavar="N", type=_number(1, 32), action=_Once, help="draft steps, the longest chain (default: 4)")
        p.add_argument("--rows", metavar="N", type=_number(1, 10**9), action=_Once, help="read about N rows, evenly over the dump")

    p = command("check", "commands", "judge a draft: what is wrong, the evidence, the fix", (*FORMATS, "sarif"))
    about_case(p, many=False)
    p.add_argument("--other", metavar="DRAFT2", action=_Once, help="a second draft to compare the tensors with")
    dump(p, "file or folder of the target's hidden states, to judge and to run the draft on")
    p.add_argument(
        "--log", metavar="LOG", action=_Once, help="log of a server that ran this draft: file, folder of rotated files, http://HOST:PORT"
    )
    log(p)
    p.add_argument("--headers-only", action="store_true", help="read no tensor value; rules on values are listed as skipped")
    fails(p)

    p = command("inspect", "commands", "say what a draft is: dialect, facts with their source, tensors")
    p.add_argument("draft", metavar="DRAFT")

    p = command("serve", "commands", "say what engine versions would really run, tensor by tensor and layer by layer")
    about_case(p, many=True)
    dump(p, "file or folder of the target's hidden states: gives the acceptance trained for and the one served")

    p = command("diff", "commands", "compare two checkpoints: names (renames understood), shapes, dtypes, values, config")
    p.add_argument("a", metavar="A")
    p.add_argument("b", metavar="B")
    p.add_argument("--values", action="store_true", help="compare tensor values too, not only headers")

    p = command("convert", "commands", "rewrite a draft for another reader, lossless", ("text", "json"))
    p.add_argument("draft", metavar="DRAFT")
    p.add_argument("out", metavar="OUT", help="folder to write; must not be there yet")
    p.add_argument("--to", metavar="LAYOUT", required=True, action=_Once, help="sglang, vllm or speculators")
    p.add_argument("--allow", metavar="FACT", action="append", default=[], help="a fact that may be lost, by the name the refusal gives it")

    p = command("rules", "commands", "list the rules, or explain one", ("text", "json", "markdown"))
    p.add_argument("code", metavar="CODE", nargs="?")

    command("demo", "commands", "check the packaged sample draft, sound and with faults planted", ("text", "json"))

    p = command("report", "commands", "render the full report of a draft to one HTML file, or quote its findings", (*FORMATS, "sarif"))
    about_case(p, many=True)
    p.add_argument("--other", metavar="DRAFT2", action=_Once, help="a second draft to compare with")
    dump(p, "file or folder of the target's hidden states")
    p.add_argument("--log", metavar="LOG", action=_Once, help="log of a server that ran this draft")

    p = command("norms", "measures", "profile the states of a dump layer by layer, or compare it with another dump")
    p.add_argument("dump", metavar="DUMP", help="file or folder of hidden states")
    p.add_argument("other", metavar="OTHER", nargs="?", help="one to hold it against, of the same texts: same layers, same tokens?")
    p.add_argument("--full", action="store_true", help="kurtosis and outlier channels too, at a few times the cost")
    p.add_argument("--workers", metavar="N", type=_number(1, 512), action=_Once, help="processes to read with (default: this one)")

    p = command("agree", "measures", "run the draft on a dump: how often does it propose the target's token, step by step?")
    measured(p)
    text = "what later steps are fed: the text, or the draft's own tokens (default: forced)"
    p.add_argument("--tokens", choices=("forced", "on-policy"), action=_Once, help=text)

    p = command("wirings", "measures", "rank what could be wired differently, by what a dump says of it")
    measured(p)
    text = "an acceptance length seen in service (bonus token counted): which wirings would give it?"
    p.add_argument("--observed", metavar="LENGTH", type=_length, action=_Once, help=text)
    p.add_argument("--quick", action="store_true", help="single faults only, screened by the first step")

    text = "run a target over texts and write its hidden states as a portable dump"
    p = command("capture", "measures", text, ("text", "json"), output=False)
    text = "local folder of a causal LM, a .gguf file, or http://HOST:PORT of an SGLang or vLLM server"
    p.add_argument("target", metavar="TARGET", help=text)
    p.add_argument("--text", metavar="FILE", required=True, action=_Once, help="prompts: .txt one a line, or .jsonl")
    text = "folder to write; a capture that was stopped goes on there"
    p.add_argument("-o", "--output", dest="out", metavar="DUMP", required=True, action=_Once, help=text)
    p.add_argument("--layers", metavar="K,K,...", action=_Once, help="HF indices, or 'all' (default: 2, N/2, N-3, their neighbours and 0)")
    text = "also write the target's rows that this draft's vocabulary needs"
    p.add_argument("--for", dest="draft", metavar="DRAFT", action=_Once, help=text)
    p.add_argument("--new-tokens", metavar="N", type=_number(1, 10**6), action=_Once, help="longest answer to a prompt (default: 128)")
    p.add_argument("--max-tokens", metavar="N", type=_number(2, 10**7), action=_Once, help="longest sample (default: 2048)")
    p.add_argument("--decode-output", dest="decode_out", metavar="DUMP2", action=_Once, help="write the states of cached decoding as well")
    p.add_argument("--no-decode", action="store_true", help="leave out the comparison of prefill with cached decoding")
    p.add_argument("--no-chat", action="store_true", help="take prompts as they are, without the chat template")
    text = "of a server: the target's config or folder, for its layers, width and chat template"
    p.add_argument("--target-config", metavar="T", action=_Once, help=text)
    text = "of a vLLM server: where the folder it writes states to is mounted here"
    p.add_argument("--storage", metavar="DIR", action=_Once, help=text)
    p.add_argument("--device", metavar="D", action=_Once, help="where the target runs (default: cpu)")
    p.add_argument("--dtype", metavar="T", action=_Once, help="what it runs in (default: float32 on the CPU)")

    p = command("scan", "sources", "read a copy of SGLang or vLLM: what it hands out for a target, how it loads a draft")
    p.add_argument("source", metavar="SOURCE", help="folder, wheel, archive or URL of a wheel; or sglang / vllm for the one installed")
    p.add_argument("--target-arch", metavar="A", required=True, action=_Once, help="architecture in the target's config.json")
    p.add_argument("--draft", metavar="DRAFT", action=_Once, help="also say what becomes of this draft there")
    p.add_argument("--of", choices=("sglang", "vllm"), action=_Once, help="which engine, where the folder holds both")
    p.add_argument("--runner", choices=("v1", "v2"), action=_Once, help="vLLM's model runner (default: the one this target gets)")

    p = command(
        "log", "serving", "read a serving log or metrics: acceptance by one definition, what it shows, does it pay", (*FORMATS, "sarif")
    )
    text = "log, JSON or metrics of SGLang or vLLM, plain or gzip; a folder of rotated files; http://HOST:PORT; several, oldest first"
    p.add_argument("log", metavar="LOG", nargs="+", help=text)
    log(p)
    fails(p)

    p = command("notebook", "commands", "run a packaged notebook on your files and render it to one HTML file", ("text", "json"))
    p.add_argument("name", metavar="NAME", nargs="?", help="without a name: list them, with their parameters")
    p.add_argument("-p", dest="parameters", metavar=("KEY", "VALUE"), nargs=2, action="append", default=[], help="a parameter; repeatable")
    return top
