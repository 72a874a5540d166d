"""What a log says of the launch: engine, version, method, chain, the aux layers used, and the lines that matter.

Read from the head of each file, which is where an engine says it: ``server_args=ServerArgs(...)`` of SGLang, ``non-default args`` and the
engine's config line of vLLM, a launch line that a script echoed. Values are shown escaped and never evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3diag.errors import escaped
from eagle3diag.serving.model import Launched, Seen

__all__ = ["LaunchFacts", "from_options"]

#: ``ServerArgs(name=value, …)``, from 0.5.23 on a dict
_ARGS = re.compile(rb"server_args\s*=\s*(?:ServerArgs\(|(\{))([^\n]{1,40000})")
_PAIR = re.compile(rb"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[[^\]]*\]|\([^)]*\)|[^,()\s]+)")
_NONDEFAULT = re.compile(rb"non-default args: (\{[^\n]{1,40000})")
_QUOTED = re.compile(rb"['\"](\w+)['\"]\s*:\s*('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[[^\]]*\]|\([^)]*\)|[^,{}\s]+)")
_SPEC = re.compile(rb"SpeculativeConfig\(([^)\n]{1,4000})\)")
_VERSIONS = (
    ("vllm", re.compile(rb"vLLM API server version v?(\d[\w.+]*)")),
    ("vllm", re.compile(rb"(?:LLM engine|LLM Engine) \(v(\d[\w.+]*)\)")),
    ("vllm", re.compile(rb"\bvllm(?:-openai)?(?:[ _-]version)?['\"]?[=/: -]{1,40}['\"]?v?([01]\.\d+\.\d+(?!\.\d)[\w.+]*)", re.I)),
    ("sglang", re.compile(rb"\bsglang(?:\[\w+\])?(?:[ _-]version)?['\"]?[=/: -]{1,40}['\"]?v?([01]\.\d+\.\d+(?!\.\d)[\w.]*)", re.I)),
)
_COMMAND = re.compile(
    rb"(?:^|\n)[+$# ]*((?:[A-Z_0-9]+=\S+ )*(?:\S*python3? -m (?:sglang\.launch_server|vllm\.entrypoints\S*)|\S*vllm serve|sglang serve) "
    rb"[^\n]{5,8000})"
)
_AUX = re.compile(
    rb"((?:[Aa]uxiliary|[Aa]ux|EAGLE-?3|eagle3)[^\n:=]{0,60}layers?(?: ids?)?[^\n:=\[(]{0,60}[:=]?\s*[\[(]\s*(\d+(?:,\s*\d+)*),?\s*[\])])"
)

#: (key, pattern, what follows from it)
_LINES: tuple[tuple[str, re.Pattern[bytes], str], ...] = (
    (
        "weight dropped",
        re.compile(rb"Parameter \S+ not found[^\n]{0,80}"),
        "a tensor of the draft has no place in this engine and was dropped: what it should fill keeps its start value",
    ),
    (
        "weight dropped",
        re.compile(rb"Eagle3 MLA: skipping unexpected weight[^\n]{0,80}"),
        "a tensor of the draft has no place in this engine and was dropped: what it should fill keeps its start value",
    ),
    (
        "weights not initialised",
        re.compile(rb"(?:Some weights|weights) (?:of \S+ )?(?:were|are) not initiali[sz]ed[^\n]{0,120}"),
        "parameters kept their start values",
    ),
    (
        "not a number",
        re.compile(rb"[^\n]{0,60}\bNaN\b[^\n]{0,20}logits[^\n]{0,40}|[^\n]{0,40}errors during sampling[^\n]{0,60}"),
        "logits are not numbers: acceptance of such steps is none or all",
    ),
    (
        "simulated",
        re.compile(
            rb"SGLANG_SIMULATE_ACC_LEN(?!\s*['\"]?\s*[=:]\s*['\"]?(?:-|0*(?:\.0*)?(?![\d.])|None|null))\S{0,20}|synthetic_acceptance\w*['\"]?\s*[:=]\s*(?!None|null|False|'none')\S{1,20}|simulate_acc_len\s*=\s*(?!None|-1|0\b)[\d.]+"
        ),
        "acceptance is simulated: these numbers say nothing about the draft",
    ),
    (
        "chain changed",
        re.compile(rb"[^\n]{0,40}speculative_num_draft_tokens[^\n]{0,60}(?:adjusted|set to|changed|overridden|reset)[^\n]{0,80}"),
        "the engine changed the chain flags: k is not what the launch line says",
    ),
    (
        "requests capped",
        re.compile(rb"[^\n]{0,20}[Mm]ax.running.requests[^\n]{0,40}\b48\b[^\n]{0,80}"),
        "speculation caps the running requests at 48, which a comparison of throughput has to allow for",
    ),
    (
        "token map ignored",
        re.compile(rb"[^\n]{0,40}(?:speculative.token.map|token.map)[^\n]{0,40}ignored[^\n]{0,60}"),
        "the token map is not used with EAGLE-3; the draft brings its own vocabulary",
    ),
    (
        "misleading: draft path",
        re.compile(rb"DeepSeek MTP does not require setting speculative_draft_model_path[^\n]{0,60}"),
        "printed for every target of this class, an EAGLE-3 draft is used all the same",
    ),
    (
        "context cut",
        re.compile(rb"[^\n]{0,60}max_model_len[^\n]{0,60}(?:reduced|draft model)[^\n]{0,80}"),
        "the served context was cut to what the draft can do",
    ),
)
#: words that a line needs for one of the patterns, so that patterns only ever see single lines
_TRIGGERS = (
    b"not found", b"unexpected weight", b"not initiali", b"NaN", b"errors during sampling", b"SIMULATE_ACC", b"synthetic_acceptance",
    b"simulate_acc_len", b"num_draft_tokens", b"unning_req", b"unning req", b"ignored", b"DeepSeek MTP", b"max_model_len",
)  # fmt: skip
_VERSION_WORDS = (b"API server version", b"LLM engine (v", b"LLM Engine (v", b"sglang", b"SGLang", b"vllm", b"vLLM")
_AUX_WORDS = (b"uxiliary layer", b"aux layer", b"aux_layer", b"aux hidden", b"aux_hidden", b"agle3", b"AGLE3", b"AGLE-3")
_PER_WORD = 400  # lines looked at for each word in a block


def _lines(data: bytes, words: Sequence[bytes]) -> Iterator[bytes]:
    """Lines that hold one of the words, each once, a bounded number."""
    seen: set[int] = set()
    for word in words:
        at, left = data.find(word), _PER_WORD
        while at >= 0 and left:
            start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
            end = len(data) if end < 0 else end
            if start not in seen:
                seen.add(start)
                yield data[start : min(end, start + 50_000)]
            at, left = data.find(word, end), left - 1


def _text(raw: bytes) -> str:
    return raw.strip().strip(b"'\"").decode("utf-8", "replace")


def _int(value: Any) -> int | None:
    text = str(value).strip()
    return int(text) if text.isdigit() and len(text) < 10 else None


@dataclass(slots=True)
class LaunchFacts:
    """What was seen so far; later starts win, and how many there were is kept."""

    options: dict[str, str] = field(default_factory=dict)
    version: dict[str, str] = field(default_factory=dict)
    engine: str | None = None
    source: str = ""
    aux: tuple[tuple[int, ...], str] | None = None
    line: str | None = None
    starts: int = 0
    seen: dict[tuple[str, str], int] = field(default_factory=dict)
    means: dict[str, str] = field(default_factory=dict)

    def scan(self, data: bytes) -> None:
        """One block of the head of a file."""
        self._starts(data)
        if len(self.version) < 2:
            for line in _lines(data, _VERSION_WORDS):
                for engine, pattern in _VERSIONS:
                    found = pattern.search(line)
                    if found and engine not in self.version:
                        self.version[engine] = found[1].decode("ascii", "replace").rstrip(".")[:40]
        if self.aux is None:
            for line in _lines(data, _AUX_WORDS):
                aux = _AUX.search(line[:2000])
                if aux:
                    self.aux = tuple(int(i) for i in aux[2].split(b",") if len(i) < 10), escaped(_text(aux[1]), 160)
                    break
        for line in _lines(data, _TRIGGERS):
            for key, pattern, means in _LINES:
                m = pattern.search(line[:4000])
                if m is None:
                    continue
                text = escaped(_text(m[0]), 160)
                if len(self.seen) < 200 or (key, text) in self.seen:
                    self.seen[key, text] = self.seen.get((key, text), 0) + 1
                    self.means[key] = means

    def _starts(self, data: bytes) -> None:
        if b"server_args" in data:
            for m in _ARGS.finditer(data):
                self.starts += 1
                self.engine, self.source = "sglang", "server_args"
                self.options = {_text(k): _text(v) for k, v in (_QUOTED if m[1] else _PAIR).findall(m[2])}
        for pattern, source in ((_NONDEFAULT, "non-default args"), (_SPEC, "SpeculativeConfig")):
            if (b"non-default args" if pattern is _NONDEFAULT else b"SpeculativeConfig(") not in data:
                continue
            for m in pattern.finditer(data):
                pairs = _QUOTED.findall(m[1]) if pattern is _NONDEFAULT else _PAIR.findall(m[1])
                self.starts += pattern is _NONDEFAULT
                self.engine, self.source = "vllm", self.source or source
                inner = b""
                if pattern is _NONDEFAULT:
                    at = m[1].find(b"speculative_config")
                    if at >= 0:
                        inner = m[1][at : m[1].find(b"}", at) + 1 or None]
                        pairs = _QUOTED.findall(m[1].replace(inner, b""))
                held = {_text(k): _text(v) for k, v in pairs}
                if pattern is _SPEC and "model" in held:
                    held["draft"] = held.pop("model")
                held |= {("draft" if k == b"model" else _text(k)): _text(v) for k, v in _QUOTED.findall(inner)}
                self.options = {**self.options, **held}
        if self.line is None and (b"launch_server" in data or b"vllm" in data or b"sglang serve" in data):
            command = _COMMAND.search(data)
            if command:
                self.line = _text(command[1])

    def told(self) -> Launched:
        """The facts as a result."""
        return from_options(
            self.options, engine=self.engine, source=self.source, versions=self.version, aux=self.aux, line=self.line, starts=self.starts
        )

    def warnings(self) -> tuple[Seen, ...]:
        """The lines that matter, the most frequent first within each kind."""
        kinds: dict[str, Seen] = {}
        for (key, text), n in sorted(self.seen.items(), key=lambda s: -s[1]):
            first = kinds.get(key)
            kinds[key] = Seen(key, text if first is None else first.text, self.means[key], n + (first.count if first else 0))
        return tuple(kinds.values())


def from_options(
    options: Mapping[str, Any],
    *,
    engine: str | None,
    source: str,
    versions: Mapping[str, str] | None = None,
    aux: tuple[tuple[int, ...], str] | None = None,
    line: str | None = None,
    starts: int = 0,
) -> Launched:
    """Options by either engine's names as ``Launched``."""
    versions = versions or {}
    engine = engine or (next(iter(versions)) if len(versions) == 1 else None)

    def get(*names: str) -> Any:
        return next((options[n] for n in names if options.get(n) not in (None, "", "None", "null")), None)

    version = versions.get(engine or "") or (get("version") if engine == "sglang" else None)
    tokens = get("speculative_num_draft_tokens")
    steps = _int(get("speculative_num_steps"))
    if engine == "vllm":
        steps, tokens = _int(get("num_speculative_tokens", "num_spec_tokens")), None
    texts = {n: None if v is None else str(v) for n, v in (("target", get("model_path", "model", "model_tag")), ("version", version))}
    draft = get("speculative_draft_model_path", "draft")
    method = get("speculative_algorithm", "method")
    return Launched(
        engine=engine,
        version=texts["version"],
        method=None if method is None else str(method),
        target=texts["target"],
        draft=None if draft is None else str(draft),
        steps=steps,
        topk=_int(get("speculative_eagle_topk")),
        draft_tokens=_int(tokens),
        interval=_int(get("decode_log_interval")),
        aux_layers=aux[0] if aux else None,
        aux_text=aux[1] if aux else "",
        source=source,
        line=line,
        options={str(k)[:60]: v for k, v in list(options.items())[:400]},
        starts=starts,
    )
