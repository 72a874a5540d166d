"""Text somebody pasted -> the words of the server command in it.

A launch line comes as a shell line, a script, a Dockerfile, a compose or Kubernetes file, or a JSON list. All of them are cut into
*statements* (lists of words) first; then the one that starts a server is looked for. Nothing is executed, substitutions stay as
written, and only variables assigned in the same text are filled in. YAML is not parsed as such: only the keys that can hold a command
(``command``, ``args``, ``entrypoint``, ``image``) are read, which needs no dependency and copes with templates that are not valid YAML.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from eagle3diag.errors import UsageError

__all__ = ["Command", "find_command"]

_MAX_TEXT = 1 << 20  # characters; a launch script is a few kilobytes
_ASSIGNMENT = r"(?:--env=|-e)?([A-Za-z_]\w*)=(.*)"
_FOLDED = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " "})  # what chat programs make of quotes


@dataclass(frozen=True, slots=True)
class Command:
    """A server command: ``engine``, the words after the program, environment, and the version a container tag or pin names."""

    engine: str
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None


def find_command(text: str) -> Command:
    """The server command in a text; where several start a server, the first that speculates.

    Raises:
        UsageError: no SGLang or vLLM server command and no speculative option anywhere.
    """
    if len(text) > _MAX_TEXT:
        raise UsageError(f"launch line: {len(text):,} characters, more than the {_MAX_TEXT:,} that are read; give the command alone")
    if not text.strip():
        raise UsageError("launch line: empty; expected e.g. 'python -m sglang.launch_server …' or 'vllm serve …'")
    variables = _yaml_environment(text)
    found: list[Command] = []
    loose: list[str] = []
    everything: list[str] = []
    for words in _statements(text.translate(_FOLDED)):
        words = [_expanded(w, variables) for w in words]
        everything += words
        assigned = [re.fullmatch(_ASSIGNMENT, w, re.S) for w in words]
        if all(assigned[i] or words[i] in ("export", "env", "ENV", "set") for i in range(len(words))):
            variables.update({m[1]: m[2] for m in assigned if m})
            continue
        found += _servers(words, variables)
        loose += words
    if not found and (engine := _engine_of_options(loose)):
        found = [Command(engine, tuple(loose), {k: v for k, v in variables.items() if _concerns(k)})]
    if not found:
        raise UsageError(
            "launch line: no server command in it; expected 'python -m sglang.launch_server …', 'sglang serve …', 'vllm serve MODEL …' "
            "or 'python -m vllm.entrypoints.openai.api_server …'"
        )
    best = next((c for c in found if any(re.match(r"--?(spec|sc\b)", w) for w in c.words)), found[0])
    return Command(best.engine, best.words, best.env, _version(best.engine, everything))


# ---- a statement -> server commands -----------------------------------------------------------------------------------------------


def _servers(words: list[str], variables: Mapping[str, str], depth: int = 0) -> Iterator[Command]:
    """Server commands in one statement, those inside a quoted ``bash -c`` word included."""
    env = {k: v for k, v in variables.items() if _concerns(k)}
    image = None
    for i, word in enumerate(words):
        if m := re.fullmatch(_ASSIGNMENT, word, re.S):
            env[m[1]] = m[2]
            continue
        if depth < 3 and re.search(r"\s", word) and re.search(r"\b(sglang|vllm)\b", word) and not word.lstrip().startswith("{"):
            inner = [c for s in _shell(word) for c in _servers([_expanded(w, variables) for w in s], env, depth + 1)]
            if inner:
                yield from inner
                return
        name = re.split(r"[\\/]", word)[-1]
        following = words[i + 1 : i + 3]
        if re.fullmatch(r"sglang(_router)?\.(launch_server|bench_one_batch\w*|bench_offline_throughput)", word) or (
            name == "launch_server.py" and "vllm" not in word
        ):
            yield Command("sglang", tuple(words[i + 1 :]), env)
            return
        if name in ("sglang", "vllm") and following[:1] == ["serve"]:
            yield Command(name, tuple(words[i + 2 :]), env)
            return
        if name == "vllm" and following[:1] == ["bench"] and following[1:] in (["latency"], ["throughput"]):
            yield Command("vllm", tuple(words[i + 3 :]), env)
            return
        if re.search(r"(^|[\\/])vllm[.\\/]entrypoints[.\\/](openai[.\\/])?api_server(\.py)?$", word):
            yield Command("vllm", tuple(words[i + 1 :]), env)
            return
        if image is None and re.search(r"(^|/)vllm-openai([:@]|$)", word):
            image = i
    if image is not None:  # the image's entrypoint is the server
        yield Command("vllm", tuple(words[image + 1 :]), env)


def _concerns(name: str) -> bool:
    return name.startswith(("SGLANG_", "SGL_", "VLLM_"))


def _engine_of_options(words: list[str]) -> str | None:
    """Options alone, without a program in front: the engine they belong to."""
    names = [w.split("=")[0].replace("_", "-") for w in words if w.startswith("-")]
    if any(re.match(r"--speculative-(algo|draft-model|num-steps|eagle|num-draft)", n) for n in names):
        return "sglang"
    if any(re.match(r"(--speculative-config|-sc|--spec-(method|model|tokens)|--speculative-model)\b", n) for n in names):
        return "vllm"
    return None


def _version(engine: str, words: list[str]) -> str | None:
    """A container tag (``lmsysorg/sglang:v0.5.9-cu126``) or a pin (``vllm==0.16.0``)."""
    for word in words:
        m = re.search(rf"\b{engine}(?:-openai)?(?:\[[\w,-]*\])?(?:==|:v?)(\d+\.\d+\.\d+(?:\.?(?:post|rc)\d+)*)", word)
        if m:
            return m[1]
    return None


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """``$NAME``, ``${NAME}`` and ``${NAME:-default}`` from assignments in the same text; anything else stays as written."""
    if "$" not in word:
        return word

    def value(m: re.Match[str]) -> str:
        name, default = m[1] or m[3], m[2]
        return variables.get(name, m[0] if default is None else default)

    return re.sub(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))", value, word)


# ---- text -> statements -----------------------------------------------------------------------------------------------------------


def _statements(text: str) -> list[list[str]]:
    stripped = text.strip()
    if stripped.startswith("["):
        items = _flow_list(stripped)
        if items:
            return [items]
    if re.search(r"(?m)^\s*(?:-\s+)?[\"']?(?:command|args|entrypoint|image)[\"']?\s*:(\s|$)", text):
        found = list(_yaml(text.splitlines()))
        if found:
            return found
    if re.search(r"(?m)^\s*(?:FROM|CMD|ENTRYPOINT)\s", text):
        return _dockerfile(text)
    return _shell(re.sub(r"(?m)^\s*Exec\w+=[-@:+!]*", "", text))


def _shell(text: str) -> list[list[str]]:
    """Words of each simple command of a shell text; a text whose quotes do not close is read line by line."""
    text = re.sub(r"(?m)^[ \t]*#.*\n?", "", text)  # also between continued lines, as it was meant
    text = re.sub(r"[\\`^][ \t]*\r?\n", " ", text)
    try:
        return _lexed(text)
    except ValueError:  # often an apostrophe in a comment
        pass
    text = re.sub(r"(?m)[ \t]#.*$", "", text)
    try:
        return _lexed(text)
    except ValueError:
        pass
    out: list[list[str]] = []
    for line in text.splitlines():
        try:
            out += _lexed(line)
        except ValueError:
            out.append(line.split())
    return out


def _lexed(text: str) -> list[list[str]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r\f\v", True, ""
    out: list[list[str]] = [[]]
    comment = skip = False
    for word in lexer:
        if word and not word.strip(";&|\n"):
            comment = comment and "\n" not in word
            skip = False
            if not comment:
                out.append([])
            continue
        comment = comment or word.startswith("#")
        if comment or skip:
            skip = False
            continue
        if re.fullmatch(r"\d?>{1,2}", word):  # a redirection: its file is the next word
            skip = True
            continue
        if not re.match(r"\d?>", word):
            out[-1].append(word)
    return [s for s in out if s]


def _dockerfile(text: str) -> list[list[str]]:
    """``ENTRYPOINT`` and ``CMD`` as one statement, the other instructions as they stand."""
    entry: dict[str, list[str]] = {"ENTRYPOINT": [], "CMD": []}
    rest: list[list[str]] = []
    for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines():
        m = re.match(r"\s*(FROM|RUN|ENV|CMD|ENTRYPOINT)\s+(.*)", line)
        if not m:
            continue
        if m[1] in entry:
            words = _flow_list(m[2]) if m[2].lstrip().startswith("[") else [w for s in _shell(m[2]) for w in s]
            entry[m[1]] = words
        elif m[1] == "ENV" and (old := re.fullmatch(r"(\w+)\s+([^=]*)", m[2])):
            rest.append([f"{old[1]}={old[2].strip()}"])
        else:
            rest += _shell(m[2])
    return [*rest, entry["ENTRYPOINT"] + entry["CMD"]]


# ---- the command keys of a compose or Kubernetes file -----------------------------------------------------------------------------


def _yaml(lines: list[str]) -> Iterator[list[str]]:
    """One statement a container: image, then entrypoint and command, then args; block scripts as shell statements of their own."""
    group: dict[str, list[str]] = {}
    i = 0
    while i < len(lines):
        m = re.match(r"(\s*(?:-\s+)?)[\"']?(command|args|entrypoint|image)[\"']?\s*:(?:\s+(.*?))?\s*$", lines[i])
        i += 1
        if not m:
            continue
        indent, key, value = len(m[1]), m[2], (m[3] or "").rstrip(",")
        if key in group:
            yield from _container(group)
            group = {}
        if not value:
            items, i = _block_list(lines, i, len(m[1]) - len(m[1].lstrip()))
            group[key] = items
        elif re.fullmatch(r"[|>][+-]?\d?", value):
            body, i = _block(lines, i, indent)
            group[key] = [(" " if value[0] == ">" else "\n").join(body)]
        elif value.startswith("["):
            while value.count("[") > value.count("]") and i < len(lines):
                value += " " + lines[i].strip()
                i += 1
            group[key] = _flow_list(value)
        else:
            group[key] = [_scalar(value)] if key == "image" else [w for s in _shell(_scalar(value)) for w in s]
    yield from _container(group)


def _container(group: Mapping[str, list[str]]) -> Iterator[list[str]]:
    words = [w for key in ("image", "entrypoint", "command", "args") for w in group.get(key, [])]
    if words:
        yield words


def _block_list(lines: list[str], i: int, indent: int) -> tuple[list[str], int]:
    """The ``- item`` lines below a key at ``indent``."""
    out: list[str] = []
    while i < len(lines):
        line = lines[i]
        if not line.strip() or line.lstrip().startswith("#"):
            i += 1
            continue
        m = re.match(r"(\s*)-\s+(.*?)\s*$", line)
        if not m or len(m[1]) < indent:
            break
        i += 1
        value = m[2]
        if re.fullmatch(r"[|>][+-]?\d?", value):
            body, i = _block(lines, i, len(m[1]))
            out.append((" " if value[0] == ">" else "\n").join(body))
        else:
            quoted = value[:1] in "\"'"
            while quoted and i < len(lines) and (value.count(value[0]) % 2 or len(value) == 1) and value[0] == "'":
                value += " " + lines[i].strip()  # a quoted item that runs over lines
                i += 1
            out += _item(_scalar(value), whole=quoted)
    return out, i


def _block(lines: list[str], i: int, indent: int) -> tuple[list[str], int]:
    """The lines of a block scalar, deeper than ``indent``."""
    body: list[str] = []
    while i < len(lines) and (not lines[i].strip() or len(lines[i]) - len(lines[i].lstrip()) > indent):
        body.append(lines[i].strip())
        i += 1
    return body, i


def _item(value: str, whole: bool) -> list[str]:
    """One argument of a list. ``--name value`` in one item is read as two, as it was meant."""
    if whole and not re.match(r"--?[\w.-]+\s", value):
        return [value]
    if re.match(r"--?[\w.-]+\s", value) and "{" in value:
        name, rest = value.split(None, 1)
        return [name, *(w for s in _shell(rest) for w in s)] if rest[:1] in "\"'" else [name, rest]
    if re.search(r"\s", value) and not value.startswith("{") and "={" not in value:
        return [w for s in _shell(value) for w in s]
    return [value]


def _scalar(value: str) -> str:
    if value[:1] == '"':
        m = re.match(r'"(?:\\.|[^"\\])*"', value)
        try:
            return str(json.loads(m[0])) if m else value.strip('"')
        except ValueError:
            return value.strip('"')
    if value[:1] == "'":
        m = re.match(r"'(?:''|[^'])*'", value)
        return m[0][1:-1].replace("''", "'") if m else value.strip("'")
    return re.split(r"\s#", value)[0].strip()


def _flow_list(text: str) -> list[str]:
    """``["a", 'b', c]`` as JSON, or as YAML spells it."""
    try:
        items = json.loads(text)
        return [str(x) for x in items] if isinstance(items, list) and not any(isinstance(x, (list, dict)) for x in items) else []
    except (ValueError, RecursionError):
        parts = re.findall(r'"(?:\\.|[^"\\])*"|\'(?:\'\'|[^\'])*\'|[^,\[\]\s][^,\[\]]*', text)
        return [_scalar(p.strip()) for p in parts]


def _yaml_environment(text: str) -> dict[str, str]:
    """Environment entries of a compose or Kubernetes file that concern an engine."""
    out: dict[str, str] = {}
    pairs = re.findall(r"(?m)^\s*-\s*name:\s*[\"']?((?:SGLANG|SGL|VLLM)_\w+)[\"']?\s*\n\s*value:[ \t]*(.*)$", text)
    pairs += re.findall(r"(?m)^\s*(?:-\s*[\"']?)?((?:SGLANG|SGL|VLLM)_\w+)(?:=|:[ \t]+)([^\s\"']*|[\"'].*)$", text)
    for name, value in pairs:
        out[name] = _scalar(value.strip()).strip("\"'")
    return out
