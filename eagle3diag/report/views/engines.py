"""Views of the engines room: a contract fact by fact, and a served draft with what is lost or replaced first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import Block, View, count, table, value_text

if TYPE_CHECKING:
    from eagle3diag.engines.model import Contract, Launch, ServedDraft

__all__ = ["contract_records", "contract_view", "launch_records", "launch_view", "served_records", "served_view"]

#: worst first
FATES = {"dropped": "error", "truncated": "error", "replaced": "info", "skipped": "none", "loaded": "ok"}


def contract_records(contract: Contract) -> list[dict[str, Any]]:
    """One row a behaviour: behaviour, value, status, source."""
    return [{"behaviour": n, "value": f.value, "status": f.status, "source": f.source} for n, f in contract.facts.items()]


def contract_view(contract: Contract) -> View:
    """What one engine version does, each with its source."""
    rows = [(r["behaviour"], r["value"], r["status"], r["source"]) for r in contract_records(contract)]
    about = "on record" if contract.on_record else f"not on record: {contract.version} stands in for {contract.asked}"
    if contract.origin != "recorded":
        about = f"read in the source at {contract.origin}, {contract.version} standing in for what could not be read"
    elif contract.version == "undated":
        about = "undated: read in its repository, of no release"
    return View(
        title=f"Contract of {contract.label}",
        summary=f"{count(len(rows), 'behaviour')} for the {contract.draft_class} draft class, {about}",
        status="none" if contract.on_record else "info",
        tables=(table("Behaviours", ("behaviour", "value", "known by", "source"), rows, limit=200),),
    )


def launch_records(launch: Launch) -> list[dict[str, Any]]:
    """One row an option as written, and the environment in front of the command: option, value."""
    told = [(f"{n}=", v) for n, v in launch.env.items()] + [(f"--{n}", v) for n, v in launch.options.items()]
    return [{"option": n, "value": v} for n, v in told]


_CHAIN = (
    ("algorithm", "method"),
    ("target", "target"),
    ("draft", "draft"),
    ("draft steps", "steps"),
    ("branches a step", "topk"),
    ("draft tokens", "draft_tokens"),
    ("layer ids", "aux_ids"),
    ("context, tokens", "context"),
    ("runner", "runner"),
)


def launch_view(launch: Launch) -> View:
    """What the line asks for, what is wrong with it first."""
    order = ("error", "warning", "info")
    problems = sorted(launch.problems, key=lambda p: order.index(p.severity))
    blocks = tuple(
        Block(
            status=p.severity,
            code=p.kind,
            title=p.message,
            evidence=tuple((str(k), value_text(v)) for k, v in p.evidence.items()),
            remedy=p.remedy,
        )
        for p in problems
    )
    asked = launch.method or "no speculation"
    steps = launch.steps if launch.steps is not None else launch.draft_tokens
    chain = f" in chains of {steps}" if steps is not None and launch.method else ""
    wrong = f"{count(len(blocks), 'problem')} with the line itself, the worst first" if blocks else "nothing wrong with the line by itself"
    known = [(what, getattr(launch, n)) for what, n in _CHAIN if getattr(launch, n) is not None]
    rows = ((r["option"], r["value"]) for r in launch_records(launch))
    return View(
        title=f"Launch line of {launch.engine}" + (f" {launch.version}" if launch.version else ""),
        summary=f"asks for {asked}{chain}; {wrong}",
        status=problems[0].severity if problems else "ok",
        blocks=blocks,
        tables=(table("As this engine understands it", ("what", "value"), known), table("As written", ("option", "value"), rows)),
    )


def served_records(served: ServedDraft) -> list[dict[str, Any]]:
    """One row a tensor of the file: tensor, fate, as, why."""
    return [{"tensor": n, "fate": f.fate, "as": f.as_, "why": f.why} for n, f in served.tensors.items()]


def _layers(served: ServedDraft) -> list[tuple[str, Any, str]]:
    aux = served.aux
    rows: list[tuple[str, Any, str]] = []
    if aux.ids is not None:
        rows.append(("ids this engine takes", list(aux.ids), aux.source))
    unknown = "unknown without a target" if aux.hook is None else "none"
    prefill = list(aux.prefill_hf) if aux.prefill_hf is not None else unknown
    rows.append(("HF layers in prefill", prefill, f"configured id + {aux.shift}" if aux.ids is not None and aux.shift else aux.source))
    if aux.verify_hf != aux.prefill_hf and aux.verify_hf is not None:
        rows.append(("HF layers in graph-replayed verify", list(aux.verify_hf), "differs from prefill"))
    rows += [("recorded but not read here", list(ids), where) for where, ids in aux.unread.items()]
    return rows


#: told even where it is the usual
ALWAYS = ("state", "fc", "norm_before_residual", "rope_theta", "mapping", "embedding", "head")


def _wiring(served: ServedDraft) -> list[tuple[str, str]]:
    """The effective wiring: the parts that decide most, and whatever is not the usual; layers and fills have tables of their own."""
    usual = type(served.wiring)().to_dict()
    elsewhere = ("unfilled", "aux_layers", "aux_layers_verify")
    told = {k: v for k, v in served.wiring.to_dict().items() if k not in elsewhere and (k in ALWAYS or v != usual[k])}
    return [(k, value_text(v)) for k, v in told.items()]


def _blocks(served: ServedDraft) -> list[Block]:
    blocks = []
    if served.refused is not None:
        r = served.refused
        why = r.why or "stops before the first request"
        blocks.append(Block(status="error", code=f"refused ({r.stage})", title=why, evidence=(("message", r.message),)))
    blocks += [Block(status="error", code="fails later", title=text) for text in served.fails_later]
    if served.aux.problem:
        blocks.append(Block(status="error", code="layers", title=served.aux.problem))
    if served.fc.bypassed_at_width is not None:
        width = served.fc.bypassed_at_width
        wide = f" (its input is {served.fc.width_in:,} wide)" if served.fc.width_in else ""
        if served.fc.runs:
            told = f"runs here{wide}; a hidden state of width {width:,} would skip it in silence"
        else:
            told = f"is skipped in silence: the hidden state is {width:,} wide{wide}"
        blocks.append(Block(status="info" if served.fc.runs else "error", code="fc", title=told))
    blocks += [Block(status="warning", code="ignored", title=f"{flag}: {why}") for flag, why in served.ignored.items()]
    contract = served.contract
    if contract.origin == "recorded" and not contract.on_record:
        told = f"{contract.engine} {contract.asked} is not on record: served as {contract.version}, the nearest recorded release"
        blocks.append(Block(status="info", code="version", title=told))
    blocks += [Block(status="info", code="default", title=f"{flag}: {why}") for flag, why in served.defaulted.items()]
    blocks += [Block(status="info", code="quirk", title=f"{name}: {text}") for name, text in served.quirks.items()]
    return sorted(blocks, key=lambda b: ("error", "warning", "info").index(b.status))


def served_view(served: ServedDraft) -> View:
    """What the engine runs: refusal, what is lost, layers, tensors (worst first), wiring."""
    fates: dict[str, int] = {}
    for f in served.tensors.values():
        fates[f.fate] = fates.get(f.fate, 0) + 1
    told = ", ".join(f"{fates[f]} {f}" for f in FATES if f in fates) or "no tensors"
    own = {n: s for n, s in served.never_filled.items() if s != "target"}
    if served.refused is not None:
        summary, status = f"refuses this draft before the first request ({served.refused.stage})", "error"
    else:
        summary = f"runs it as {served.algorithm}; of {count(len(served.tensors), 'tensor')}: {told}"
        if own:
            summary += f"; {count(len(own), 'parameter')} never filled"
        bad = bool(own) or bool(served.dropped()) or bool(served.fails_later) or not served.fc.runs
        status = "error" if bad else "ok"
    order = {f: k for k, f in enumerate(FATES)}
    rows = sorted(served_records(served), key=lambda r: (order[r["fate"]], r["tensor"]))
    filled = sorted(served.never_filled.items(), key=lambda item: (item[1] == "target", item[0]))
    return View(
        title=f"Served by {served.contract.label}",
        summary=summary,
        status=status,
        blocks=tuple(_blocks(served)),
        notes=("Next: eagle3diag check with this engine names each cause and how to mend it.",) if status == "error" else (),
        tables=(
            table(
                "Parameters no tensor of the file fills",
                ("parameter", "starts as"),
                ((n, "the target's tensor" if s == "target" else s) for n, s in filled),
                status=("none" if s == "target" else "error" for _, s in filled),
            ),
            table("Target layers that reach the draft", ("what", "layers", "from"), _layers(served)),
            table(
                "Tensors of the file, lost ones first",
                ("tensor", "fate", "as", "why"),
                ((r["tensor"], r["fate"], r["as"], r["why"]) for r in rows),
                status=(FATES[r["fate"]] for r in rows),
                kinds=(r["fate"] for r in rows),
            ),
            table("Effective wiring (what is not named is as usual)", ("what", "value"), _wiring(served)),
        ),
    )
