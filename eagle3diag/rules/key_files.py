"""KEY, third part: the files themselves. Shard index, dtypes and damage, all from headers."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import label, named, stated
from eagle3diag.rules.registry import finding, rule

_SHARDS = ("shard-missing", "shard-twice", "shard-unlisted")


@rule("KEY208", severity=Severity.ERROR)
def broken_index(case: Case) -> Iterator[Finding]:
    """The shard index is broken.

    ## What is wrong
    `model.safetensors.index.json` names a shard that is absent, lists a tensor that is not in its shard, or a tensor lies in two
    shards.

    ## Why it costs acceptance
    A missing tensor is never reported by an engine: the parameter keeps its start value. Of two copies the one read last wins.

    ## How it is detected
    The index against the headers of the shards.

    ## How to fix it
    Copy the missing shard, or save the checkpoint again so that index and shards agree.

    ## Engine versions
    All.

    ## Source
    The safetensors index format; both engines' loaders run with missing tensors; public report: NVIDIA/Model-Optimizer 1417.
    """
    for issue in case.draft.issues:
        if issue.kind in _SHARDS:
            yield finding(
                "KEY208",
                issue.message,
                evidence={"file": issue.file, **issue.evidence},
                remedy="Copy the shards again, or save the checkpoint anew so that index and shards agree.",
                where=issue.file,
            )


_WHOLE = ("I64", "I32", "I16", "U64", "U32", "U16", "U8", "I8")
_FLOATS = ("F64", "F32", "F16", "BF16")


@rule("KEY209", severity=Severity.WARNING)
def odd_dtype(case: Case) -> Iterator[Finding]:
    """A tensor has an unexpected dtype.

    ## What is wrong
    `d2t` is stored as float, matrices of one draft have different precisions, or quantised weights and scales lie in a draft whose
    config does not say it is quantised.

    ## Why it costs acceptance
    SGLang uses `d2t` as an index: a float stops the first request, and float16 cannot even hold large offsets exactly. vLLM casts it.
    Unannounced quantised weights are loaded as if they were plain numbers.

    ## How it is detected
    Dtypes in the headers, `quantization_config` and `hf_quant_config.json`. Norms in float32 beside half-precision matrices are normal.

    ## How to fix it
    Save `d2t` as int64; cast all matrices to one dtype; keep the quantisation config with quantised weights.

    ## Engine versions
    All; a float `d2t` is an error on SGLang.

    ## Source
    SGLang 0.5.9 `speculative/eagle_worker.py:171-174` (d2t as an index); both engines' loaders run with a float d2t; public reports:
    vllm 25883 and 28435.
    """
    back = {v: k for k, v in case.spec.canonical.items()}
    infos = case.draft.tensors
    for name, info in infos.items():
        canonical = back.get(name, name)
        if canonical in ("d2t", "t2d") and info.dtype not in (*_WHOLE, "BOOL"):
            stops = canonical == "d2t" and case.served is not None and case.served.contract.engine == "sglang"
            yield finding(
                "KEY209",
                f"{escaped(name)} is stored as {escaped(info.dtype)}, "
                + ("SGLang uses it as an index and fails at the first request" if stops else "readers want whole numbers"),
                severity=Severity.ERROR if stops else None,
                evidence={"tensor": name, "dtype": info.dtype, "expected": "I64" if canonical == "d2t" else "BOOL"},
                remedy=f"Save {escaped(name)} as {'int64' if canonical == 'd2t' else 'bool'}.",
                where=name,
                engines=label(case),
            )
    announced = stated(case, "quantization_config").value is not None or "hf_quant_config.json" in case.draft.extras
    weights = {n: i.dtype for n, i in infos.items() if len(i.shape) >= 2 and back.get(n, n) not in ("d2t", "t2d")}
    scales = [n for n in infos if n.endswith(("_scale", "_scale_inv", ".scales", ".qzeros", "_zero_point", "_scale_2"))]
    packed = [n for n, d in weights.items() if d not in _FLOATS]
    if (scales or packed) and not announced:
        yield finding(
            "KEY209",
            f"{named([*packed, *scales], 2)}: quantised tensors, but no quantisation config says so",
            evidence={"quantised": {n: weights[n] for n in packed}, "scales": scales},
            remedy="Put quantization_config into config.json (or hf_quant_config.json beside it), or export unquantised weights.",
            where=(packed or scales)[0],
            engines=label(case),
        )
    kinds: dict[str, list[str]] = {}
    for n, d in weights.items():
        if d in _FLOATS and not announced:
            kinds.setdefault(d, []).append(n)
    if len(kinds) > 1:
        counts = ", ".join(f"{len(v)} {d}" for d, v in sorted(kinds.items()))
        rare = min(kinds, key=lambda d: len(kinds[d]))
        yield finding(
            "KEY209",
            f"matrices of mixed precision: {counts}; {named(kinds[rare], 2)} in {rare}",
            evidence=dict(sorted(kinds.items())),
            remedy="Cast all matrices to the dtype the config states.",
            where=kinds[rare][0],
            engines=label(case),
        )


_DAMAGE = {
    "data-truncated": "",
    "data-trailing": "",
    "offsets-overlap": "",
    "offsets-hole": "",
    "metadata": "",
    "duplicate-name": "warning",
    "header-padding": "warning",
    "odd-name": "warning",
}


@rule("KEY210", severity=Severity.ERROR)
def damaged_file(case: Case) -> Iterator[Finding]:
    """A weight file is damaged.

    ## What is wrong
    The header can be read, but the file is shorter or longer than it describes, offsets overlap or leave holes, or the header breaks the
    format in another way.

    ## Why it costs acceptance
    Loaders refuse most of it. What they accept (a name twice, padding) hides that something wrote the file wrongly.

    ## How it is detected
    The header against the file size and against itself, without reading data. A header that cannot be read at all ends the check with
    one line instead.

    ## How to fix it
    Download or copy the file again and compare its size and hash with the source.

    ## Engine versions
    All.

    ## Source
    The safetensors format; its reader rejects truncated, overlapping and incomplete data.
    """
    for issue in case.draft.issues:
        if issue.kind in _DAMAGE:
            yield finding(
                "KEY210",
                issue.message,
                severity=Severity.WARNING if _DAMAGE[issue.kind] and not issue.evidence.get("refused") else None,
                evidence={"file": issue.file, "kind": issue.kind, **issue.evidence},
                remedy="Copy or download the file again and compare size and hash with the source.",
                where=issue.file,
            )
