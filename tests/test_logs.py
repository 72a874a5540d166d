"""Serving logs: every line and document of the facts is read and its arithmetic checked; what stands around it does not matter."""

from __future__ import annotations

import gc
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.serving import reader
from eagle3diag.serving.logs import open_log, read_bytes
from eagle3diag.serving.model import ServingLog
from tests.fixtures_srv import request, sglang_line, vllm_line, written

ROOT = Path(__file__).resolve().parent.parent

# ------------------------------------------------------------------ lines of the facts, as printed
OLD_SGLANG = (
    "Decode batch. #running-req: 1, #token: 812, token usage: 0.01, accept len: 2.85, gen throughput (token/s): 215.33, #queue-req: 0"
)
GRAPH_SGLANG = OLD_SGLANG.replace("gen throughput", "cuda graph: True, gen throughput")
RATE_SGLANG = GRAPH_SGLANG.replace("Decode batch.", "Decode batch,").replace("2.85,", "2.85, accept rate: 0.71,")
COUNTED_SGLANG = RATE_SGLANG.replace("Decode batch,", "Decode batch [40],")
NEW_SGLANG = RATE_SGLANG.replace("0.71", "0.62")
SPEC = "SpecDecoding metrics: "
NEW_VLLM = (
    SPEC + "Mean acceptance length: 2.85, Accepted throughput: 61.20 tokens/s, Drafted throughput: 99.00 tokens/s, Accepted: 612 tokens, "
    "Drafted: 990 tokens, Per-position acceptance rate: 0.812, 0.610, 0.428, Avg Draft acceptance rate: 61.8%"
)
OLD_VLLM = (
    SPEC + "Draft acceptance rate: 61.8%, Mean acceptance length: 2.85, Accepted: 612 tokens, Drafted: 990 tokens, "
    "Per-position acceptance rate: 0.812, 0.610, 0.428"
)
FIRST_VLLM = OLD_VLLM.replace("2.85", "1.85")
BARE_VLLM = SPEC + "Draft acceptance rate: 61.8%, Accepted: 612 tokens, Drafted: 990 tokens"
REAL_VLLM = (
    "(APIServer pid=95669) INFO 07-20 18:11:49 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.87, Accepted throughput: "
    "9.40 "
    "tokens/s, Drafted throughput: 15.10 tokens/s, Accepted: 282 tokens, Drafted: 453 tokens, Per-position acceptance rate: 0.821, 0.609, "
    "0.437, Avg Draft acceptance rate: 62.3%"
)
LONG_VLLM = (
    SPEC
    + "Mean acceptance length: 2.37, Accepted throughput: 8.90 tokens/s, Drafted throughput: 97.50 tokens/s, Accepted: 89 tokens, Drafted: "
    "975 tokens, Per-position acceptance rate: 0.600, 0.385, 0.215, 0.108, 0.062" + ", 0.000" * 10 + ", Avg Draft acceptance rate: 9.1%"
)
OFFLINE = (
    "total_num_output_tokens: 16990\nnum_drafts: 4816\nnum_draft_tokens: 33712\nnum_accepted_tokens: 12208\nmean acceptance length: 3.53\n"
    "acceptance at token 0: 0.77\nacceptance at token 1: 0.58\nacceptance at token 2: 0.42\nacceptance at token 3: 0.30\n"
    "acceptance at token 4: 0.21\nacceptance at token 5: 0.15\nacceptance at token 6: 0.10\n"
)
SIX = (
    "total_num_output_tokens: 2400\nnum_drafts: 675\nnum_draft_tokens: 2025\nnum_accepted_tokens: 1722\nmean acceptance length: 3.55\n"
    + "\n".join(f"acceptance at token {i}: {v:.2f}" for i, v in enumerate((0.85, 0.85, 0.85, 0, 0, 0)))
)
AT_POS = "6,590 drafts\n" + "\n".join(
    f"accept@pos {i} : {n / 6590:.3f} ({n})" for i, n in enumerate((4098, 2344, 1339, 783, 394))
) + "\nAL: 2.359\n"  # fmt: skip
LLAMA = "n_draft = 8\nn_predict = 136\nn_drafted = 112\nn_accept = 36\naccept = 32.143%\n"
MODELOPT = "Average Acceptance Length {'accept': 2142, 'count': 1020, 'ratio': 2.10}\n"
VLLM_REQUEST = (
    '{"metrics":{"speculative_decoding":{"mean_acceptance_length":1.2325581395348837,"draft_acceptance_rate":0.07751937984496124,'
    '"acceptance_histogram":[39,1,0,3],"num_spec_steps":43,"num_accepted_draft_tokens":10,"num_draft_tokens":129,"num_spec_tokens":3}}}'
)
BENCH = (
    '{"metrics":[{"latency":33.997,"output_throughput":198.13,"accept_length":3.1803,"accuracy":0.33,'
    '"num_questions":100,"num_valid_predictions":86}]}'
)


def read(text: str) -> ServingLog:
    return read_bytes(text.encode())


@pytest.mark.parametrize(
    ("text", "length", "k", "drafts"),
    [
        (OLD_SGLANG, 2.85, None, None),
        (GRAPH_SGLANG, 2.85, None, None),
        (RATE_SGLANG, 2.85, 3, None),
        (COUNTED_SGLANG, 2.85, 3, None),
        (NEW_SGLANG, 2.85, 3, None),
        ("… accept len: 1.00, accept rate: 0.00 …", 1.0, None, None),
        (NEW_VLLM, 1 + 612 / 330, 3, 330),
        (OLD_VLLM, 1 + 612 / 330, 3, 330),
        (FIRST_VLLM, 1 + 612 / 330, 3, 330),
        (REAL_VLLM, 1 + 282 / 151, 3, 151),
        (LONG_VLLM, 1 + 89 / 65, 15, 65),
        (OFFLINE, 1 + 12208 / 4816, 7, 4816),
        (OFFLINE.replace("token 0: 0.77", "token 0:0.77"), 1 + 12208 / 4816, 7, 4816),
        (SIX, 1 + 1722 / 675, 3, 675),
        (AT_POS, 1 + 8958 / 6590, 5, 6590),
        (LLAMA, 1.36, 8, 100),
        (MODELOPT, 2.1, None, 1020),
        (VLLM_REQUEST, 1 + 10 / 43, 3, 43),
        (request([2, 3, 2, 2, 4, 0, 1, 19]), 6.0909, 7, 33),
        (BENCH, 3.1803, None, None),
    ],
)
def test_every_example_of_the_facts_round_trips(text: str, length: float, k: int | None, drafts: int | None) -> None:
    log = read(text)
    assert log.acceptance_length == pytest.approx(length, abs=5e-4)
    assert log.k == k
    assert log.drafts == drafts
    assert log.mismatches == ()
    json.dumps(log.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NEW_VLLM.replace("612 tokens", "812 tokens"), "accepted 812, drafted 990, mean length 2.85"),
        (OFFLINE.replace("3.53", "3.81"), "mean acceptance length: 3.81 is printed, 3.535 follows"),
        (AT_POS.replace("2.359", "2.5"), "AL: 2.5 is printed"),
        (VLLM_REQUEST.replace("[39,1,0,3]", "[39,1,0,4]"), "steps in acceptance_histogram: 44 is stated, 43 follows"),
        (VLLM_REQUEST.replace("1.2325581395348837", "1.5"), "mean_acceptance_length: 1.5 is stated"),
        (LLAMA.replace("32.143", "42.143"), "accept: 42.143 is printed"),
    ],
)
def test_numbers_that_do_not_follow_are_reported(text: str, says: str) -> None:
    log = read(text + "\n")
    assert any(says in m for m in log.mismatches), log.mismatches
    assert any(t.kind == "mismatch" for t in log.traps)


# ------------------------------------------------------------------ definitions
def test_sglangs_rate_by_version_and_by_its_numbers() -> None:
    by_number = read(RATE_SGLANG)
    assert by_number.rate_definition == "with bonus"
    assert [t.kind for t in by_number.traps] == ["bonus in rate"]
    assert read(NEW_SGLANG).rate_definition == "drafts only"
    both = "\n".join(sglang_line(i, 2.5, 0.5) for i in range(40))
    assert read(both).rate_definition == "unknown"
    assert read(both).k_possible == (3, 4)
    for version, definition, k in (("0.5.9", "with bonus", 4), ("0.5.11", "drafts only", 3), ("0.5.23", "drafts only", 3)):
        log = read(f"[2026-01-01 00:00:00] server_args=ServerArgs(model_path='t', version='{version}')\n{both}")
        assert (log.version, log.rate_definition, log.k) == (version, definition, k)


def test_vllm_0_8_5_leaves_the_bonus_token_out() -> None:
    assert [t.kind for t in read(FIRST_VLLM).traps] == ["bonus left out"]
    assert read(OLD_VLLM).traps == ()


def test_vllm_0_8_4_prints_no_length() -> None:
    bare = read(BARE_VLLM + "\n")
    assert (bare.acceptance_length, bare.accepted, bare.drafted) == (None, 612, 990)
    assert bare.acceptance_rate == pytest.approx(612 / 990)
    start = "non-default args: {'model': 't', 'speculative_config': {'method': 'eagle3', 'model': 'd', 'num_speculative_tokens': 3}}"
    assert read(f"{start}\n{BARE_VLLM}\n").acceptance_length == pytest.approx(1 + 612 / 330)


def test_positions_beyond_the_chain_are_no_misses() -> None:
    log = read(SIX)
    assert log.per_position == pytest.approx((0.85, 0.85, 0.85))
    assert any(t.kind == "beyond k" for t in log.traps)


def test_a_long_chain_makes_a_low_rate() -> None:
    log = read("\n".join([LONG_VLLM] * 5))
    assert log.acceptance_rate == pytest.approx(89 / 975)
    assert any(t.kind == "long chain" for t in log.traps)


def test_pooled_and_mean_of_requests_stand_side_by_side() -> None:
    log = read("\n".join([request([10, 0, 0, 90]), request([10, 0, 0, 0])]))
    assert log.acceptance_length == pytest.approx(1 + 270 / 110)
    assert log.mean_of_requests == pytest.approx((3.7 + 1.0) / 2)
    assert any(t.kind == "requests" for t in log.traps)


def test_simulated_acceptance_is_named() -> None:
    log = read("export SGLANG_SIMULATE_ACC_LEN=3\n" + sglang_line(0, 3.0, 0.67))
    assert any(t.kind == "simulated" for t in log.traps)


# ------------------------------------------------------------------ several engines
def test_counts_are_summed_over_engines_and_lengths_never_averaged() -> None:
    lines = []
    for i in range(5):
        lines += [
            vllm_line(i, 380, 608, (0.80, 0.50, 0.30), engine="Engine 000: "),
            vllm_line(i, 20, 12, (0.40, 0.15, 0.05), engine="Engine 001: "),
        ]
    log = read("\n".join(lines))
    assert log.acceptance_length == pytest.approx(1 + 3100 / 2000)
    assert {e.label: round(e.length, 2) for e in log.by_engine} == {"Engine 000": 2.6, "Engine 001": 1.6}


def test_ranks_of_sglang_are_told_apart() -> None:
    lines = [sglang_line(i, 2.0 + r, None, running=1 + 3 * r).replace(" TP0]", f" DP{r} TP0]") for i in range(10) for r in (0, 1)]
    log = read("\n".join(lines))
    assert {e.label: e.length for e in log.by_engine} == {"DP0 TP0": 2.0, "DP1 TP0": 3.0}
    assert log.acceptance_length == pytest.approx((1 * 2.0 + 4 * 3.0) / 5)
    assert log.mean_of_windows == pytest.approx(2.5)


def test_lines_of_both_engines_are_not_mixed() -> None:
    log = read("\n".join([sglang_line(i, 2.0, None) for i in range(20)] + [REAL_VLLM]))
    assert log.acceptance_length == pytest.approx(2.0)
    assert any(t.kind == "foreign" for t in log.traps)


# ------------------------------------------------------------------ what stands around a line
NOISE = (
    "{}",
    "Feb 11 10:00:00 host python[4117]: {}",
    "2026-02-11T10:00:00.123456789Z stdout F {}",
    "\x1b[32mINFO\x1b[0m \x1b[36m{}\x1b[0m",
    'worker-1  | {"log":"{}\\n","stream":"stderr","time":"2026-02-11T10:00:00Z"}',
    "{}\r",
)


@pytest.mark.parametrize("around", NOISE)
@pytest.mark.parametrize("line", [sglang_line(1, 2.85, 0.62), REAL_VLLM, FIRST_VLLM])
def test_prefixes_and_colours_do_not_matter(around: str, line: str) -> None:
    text = "\n".join(["accept: text/html, accept len", around.replace("{}", line), "GET /accept 200"] * 3)
    log = read(text)
    assert log.windows == 3
    assert log.acceptance_length == pytest.approx(read(line).acceptance_length or 0)


@pytest.mark.parametrize("line", [sglang_line(1, 2.85, 0.62), REAL_VLLM, OLD_VLLM, FIRST_VLLM])
def test_a_line_cut_anywhere_counts_for_nothing_or_for_the_whole(line: str) -> None:
    whole = read("\n".join([line] * 3)).acceptance_length
    for at in range(len(line)):
        log = read("\n".join([line] * 3 + [line[:at]]))
        assert log.acceptance_length == pytest.approx(whole), line[:at]
        assert log.windows in (3, 4)


def test_a_line_cut_by_the_next_is_not_bridged() -> None:
    line = sglang_line(1, 2.85, 0.62)
    cut = line[: line.index("accept len")]
    log = read("\n".join([cut + sglang_line(2, 1.5, 0.17)] * 3))
    assert log.acceptance_length == pytest.approx(1.5)


def test_files_packed_rotated_and_recoded(tmp_path: Path) -> None:
    lines = [sglang_line(i, 1.0 + i / 10, None) for i in range(12)]
    whole = open_log(written(tmp_path, lines, "whole.log"))
    packed = tmp_path / "packed.log.gz"
    packed.write_bytes(gzip.compress("\n".join(lines).encode()))
    wide = tmp_path / "wide.log"
    wide.write_bytes("\n".join(lines).encode("utf-16"))
    folder = tmp_path / "rotated"
    folder.mkdir()
    text = "\n".join(lines) + "\n"
    third = len(text) // 3  # rotation cuts lines in two
    (folder / "server.log.2.gz").write_bytes(gzip.compress(text[:third].encode()))
    (folder / "server.log.1").write_text(text[third : 2 * third])
    (folder / "server.log").write_text(text[2 * third :])
    for path in (packed, wide, folder):
        log = open_log(str(path))
        assert (log.windows, log.acceptance_length) == (12, pytest.approx(whole.acceptance_length)), path
    assert [p.length for p in open_log(str(folder)).series] == [p.length for p in whole.series]
    assert open_log([str(folder / n) for n in ("server.log.2.gz", "server.log.1", "server.log")]).windows == 12


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_packed_log_is_closed_again(tmp_path: Path) -> None:
    path = tmp_path / "two.log.gz"
    path.write_bytes(gzip.compress(b"nothing of a server\n") * 2)
    open_log([str(path), str(path)])
    gc.collect()


def test_a_gzip_that_breaks_off_gives_what_came_before(tmp_path: Path) -> None:
    lines = [sglang_line(i % 60, 1.0 + i % 7 / 10, None, tokens=500 + i * 37 % 9999) for i in range(3000)]
    packed = gzip.compress("\n".join(lines).encode())
    path = tmp_path / "cut.log.gz"
    path.write_bytes(packed[: len(packed) // 2])
    log = open_log(str(path))
    assert 0 < log.windows < 3000
    assert any("breaks off" in n for n in log.notes)


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such log file"):
        open_log(str(tmp_path / "absent.log"))
    empty = tmp_path / "folder"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="a folder without files"):
        open_log(str(empty))
    (tmp_path / "z.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(40))
    with pytest.raises(UsageError, match="zstd"):
        open_log(str(tmp_path / "z.zst"))
    for content in (b"", b"\n", b"\x00" * 5000, b"{", b"[[[[", bytes(range(256)) * 40, b"accept len: ", b"\x1f\x8b"):
        (tmp_path / "odd").write_bytes(content)
        assert open_log(str(tmp_path / "odd")).readable is False


# ------------------------------------------------------------------ the stream
def test_the_quick_search_finds_what_grep_finds(tmp_path: Path) -> None:
    odd = ["accept", "x accept", "the access is concept", "accept accept", "acceaccept", "xxaccep", "acacceptt", "except accepted", "ccept"]
    text = "".join(f"{'.' * (i % 7)}{odd[i % len(odd)]}{'-' * (i % 5)}\n{'filler ' * (i % 60)}\n" for i in range(9000)).encode()
    assert len(text) > 2 * reader.CHUNK // 2
    lines = [line for line in text.split(b"\n") if b"accept" in line]
    assert reader.matching(text).split(b"\n")[:-1] == lines
    for size in (100, 5000):
        assert reader.matching(text[:size] + b"\n").split(b"\n")[:-1] == [x for x in (text[:size] + b"\n").split(b"\n") if b"accept" in x]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_bulk_of_a_long_log_is_read_as_its_beginning_is(engine: str, dense: bool, tmp_path: Path, monkeypatch: Any) -> None:
    filler = "" if dense else "\n".join(["[2026-02-11 10:00:00] INFO: POST /v1/chat/completions 200"] * 30) + "\n"

    def line(i: int) -> str:
        if engine == "sglang":
            return sglang_line(i % 3000, 1.0 + (i * 7 % 30) / 10, None, tokens=300 + i * 13 % 9000, running=1 + i % 4)
        accepted = 200 + i % 150
        return vllm_line(i % 3000, 300, accepted, [round(accepted / 300 * s, 3) for s in (0.5, 0.3, 0.2)])

    path = written(tmp_path, "".join(f"{line(i)}\n{filler}" for i in range(3000)))
    fine = open_log(path)
    monkeypatch.setattr("eagle3diag.serving.tally.FINE", 100)
    monkeypatch.setattr(reader, "HEAD", 50_000)
    monkeypatch.setattr(reader, "CHUNK", 100_000)
    bulk = open_log(path)
    assert fine.windows == bulk.windows == 3000
    for name in ("acceptance_length", "error", "accepted", "drafted", "drafts", "k", "throughput", "running", "mean_of_windows"):
        assert getattr(fine, name) == pytest.approx(getattr(bulk, name)), name
    assert fine.per_position == pytest.approx(bulk.per_position)
    assert [(c.windows, round(c.length, 9)) for c in fine.contexts] == [(c.windows, round(c.length, 9)) for c in bulk.contexts]
    assert len(bulk.series) <= 512
    assert sum(p.windows for p in bulk.series) == 3000


def test_what_belongs_to_a_matching_line_is_kept_in_a_long_log() -> None:
    general = (
        b"INFO 07-20 18:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 54.5 tokens/s, "
        b"Running: 2 reqs, Waiting: 0 reqs\n"
    )
    rest = b"INFO nothing of interest here\n" * 5000
    kept = reader.matching(rest + general + REAL_VLLM.encode() + b"\n" + rest + SIX.encode() + b"\n")
    log = read_bytes(kept)
    assert (log.throughput, log.running) == (54.5, 2.0)
    assert log.drafts == 151 + 675


# ------------------------------------------------------------------ documents
def test_server_info_of_sglang() -> None:
    log = read(json.dumps({"version": "0.5.9", "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
                           "internal_states": [{"avg_spec_accept_length": 2.5}, {"avg_spec_accept_length": 2.7}]}))  # fmt: skip
    assert (log.engine, log.version, log.k, log.basis) == ("sglang", "0.5.9", 3, "lifetime")
    assert log.acceptance_length == pytest.approx(2.6)
    assert log.launched.method == "EAGLE3"


@pytest.mark.parametrize(
    ("meta", "length", "accepted"),
    [
        ({"completion_tokens": 57, "spec_verify_ct": 20}, 2.85, 37),
        ({"completion_tokens": 57, "spec_verify_ct": 20, "spec_accept_length": 2.85, "spec_accept_rate": 0.62}, 2.85, 37),
        ({"completion_tokens": 57, "spec_verify_ct": 20, "spec_accept_token_num": 36, "spec_draft_token_num": 60}, 2.8, 36),
        ({"completion_tokens": 57, "spec_verify_ct": 20, "spec_accept_histogram": [4, 4, 4, 8]}, 2.8, 36),
        ({"completion_tokens": 57, "spec_verify_ct": 20, "spec_accepted_drafts": 36, "spec_proposed_drafts": 60}, 2.8, 36),
        ({"completion_tokens": 57, "spec_verify_ct": 20, "spec_num_correct_drafts": 36, "spec_num_proposed_drafts": 60,
          "spec_correct_drafts_histogram": [4, 4, 4, 8]}, 2.8, 36),
    ],
)  # fmt: skip
def test_requests_of_sglang_by_version(meta: dict[str, Any], length: float, accepted: int) -> None:
    for text in (json.dumps({"text": "x", "meta_info": meta}), f"[2026] Finish: obj=X, out={ {'text': 'x', 'meta_info': meta}!r}"):
        log = read("\n".join([text] * 3))
        assert log.acceptance_length == pytest.approx(length), text
        assert (log.accepted, log.drafts, log.requests) == (3 * accepted, 60, 3)
        assert log.mismatches == ()


PROMETHEUS = "".join(
    f'vllm:spec_decode_num_{name}{{engine="{e}",model_name="m"{at}}} {v}\n'
    for e in (0, 1)
    for name, at, v in (
        ("drafts_total", "", "330.0"),
        ("drafts_created", "", "1.7e+09"),
        ("draft_tokens_total", "", "990.0"),
        ("accepted_tokens_total", "", "612.0"),
        *((("accepted_tokens_per_pos_total"), f',position="{i}"', f"{n}.0") for i, n in enumerate((270, 200, 142))),
    )
)


def test_metrics_of_vllm() -> None:
    log = read(
        "# HELP vllm:spec_decode_num_drafts_total Number of drafts.\n# TYPE vllm:spec_decode_num_drafts_total counter\n" + PROMETHEUS
    )
    assert (log.drafts, log.accepted, log.drafted, log.k) == (660, 1224, 1980, 3)
    assert log.per_position == pytest.approx((270 / 330, 200 / 330, 142 / 330))
    assert log.mismatches == ()
    assert len(log.by_engine) == 2
    cut = read("# TYPE x counter\n" + PROMETHEUS[:-30])
    assert cut.readable


def test_several_scrapes_and_a_restart() -> None:
    def scrape(drafts: int, accepted: int) -> str:
        return (
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {3 * drafts}\n'
        )

    log = read("# TYPE vllm:x counter\n" + scrape(100, 150) + scrape(200, 300) + scrape(50, 60))
    assert (log.drafts, log.accepted) == (250, 360)
    assert any("restarted" in n for n in log.notes)


def test_metrics_of_sglang() -> None:
    log = read('# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length{model_name="m",tp_rank="0"} 2.31\n'
               'sglang:spec_accept_rate{model_name="m",tp_rank="0"} 0.44\nsglang:gen_throughput{model_name="m"} 120.5\n')  # fmt: skip
    assert (log.engine, log.acceptance_length, log.basis, log.throughput) == ("sglang", 2.31, "stated", 120.5)


# ------------------------------------------------------------------ the launch
def test_what_the_samples_say_of_their_launch() -> None:
    one = open_log(str(ROOT / "data_samples" / "logs" / "sglang-0.5.23.log"))
    assert (one.engine, one.version, one.k, one.launched.method) == ("sglang", "0.5.23", 3, "EAGLE3")
    assert (one.rate_definition, one.acceptance_length) == ("drafts only", pytest.approx(1.512))
    two = open_log(str(ROOT / "data_samples" / "logs" / "vllm-0.33.0.log"))
    assert (two.engine, two.version, two.k, two.launched.target, two.launched.draft) == (
        "vllm",
        "0.33.0",
        3,
        "/models/target",
        "/models/draft",
    )
    assert two.per_position == pytest.approx((0.3496, 0.1211, 0.0237), abs=1e-4)
    assert one.mismatches == two.mismatches == ()


def test_lines_that_matter() -> None:
    text = "\n".join(
        [
            "INFO Using auxiliary layers from speculative config: (2, 16, 29)",
            "WARNING Parameter model.layers.0.self_attn.q_proj.weight not found in params_dict",
            "WARNING Parameter model.layers.0.mlp.up_proj.weight not found in params_dict",
            "DeepSeek MTP does not require setting speculative_draft_model_path.",
            "Max running requests is reset to 48 for speculative decoding.",
            "Detected errors during sampling! NaN in the logits.",
            sglang_line(0, 1.0, 0.0),
        ]
    )
    log = read(text)
    assert log.launched.aux_layers == (2, 16, 29)
    assert {w.key: w.count for w in log.warnings} == {
        "weight dropped": 2, "misleading: draft path": 1, "requests capped": 1, "not a number": 1,
    }  # fmt: skip


def test_a_running_server_is_asked_for_its_numbers() -> None:
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = ("# TYPE vllm:x counter\n" + PROMETHEUS).encode() if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        assert open_log(address).drafts == 660
        assert open_log(f"{address}/metrics").drafts == 660
        with pytest.raises(UsageError, match="answered 404"):
            open_log(f"{address}/nothing")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    with pytest.raises(UsageError, match="no answer"):
        open_log(address)


def test_what_is_no_metrics_server_is_told_in_one_line() -> None:
    import socket
    import threading

    def greet(listening: socket.socket) -> None:
        for _ in range(3):
            with listening.accept()[0] as client:
                client.recv(1000)
                client.sendall(b"SSH-2.0-OpenSSH_9\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=greet, args=(listening,), daemon=True)
        thread.start()
        with pytest.raises(UsageError, match=r"no answer \(SSH-2\.0"):
            open_log(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
    for wrong in ("http://[bad", "http://host:abc", "http://"):
        with pytest.raises(UsageError, match="no address of a server"):
            open_log(wrong)


@pytest.mark.parametrize(("place", "read"), [("{own}/metrics/", True), ("{other}/metrics/", False)])
def test_a_redirect_is_followed_within_the_server_only(place: str, read: bool) -> None:
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    asked: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.server.server_address[1])  # type: ignore[arg-type]
            body = ("# TYPE vllm:x counter\n" + PROMETHEUS).encode() if self.path == "/metrics/" else b""
            self.send_response(200 if body else 307)
            if not body:
                self.send_header("Location", place.format(own=ports[0], other=ports[1]))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    ports = [f"http://127.0.0.1:{s.server_port}" for s in servers]
    threads = [threading.Thread(target=s.serve_forever, daemon=True) for s in servers]
    for t in threads:
        t.start()
    try:
        if read:
            assert open_log(f"{ports[0]}/metrics").drafts == 660
        else:
            with pytest.raises(UsageError, match="answered 307"):
                open_log(f"{ports[0]}/metrics")
        assert set(asked) == {servers[0].server_port}
    finally:
        for s in servers:
            s.shutdown()
            s.server_close()
        for t in threads:
            t.join()


# ------------------------------------------------------------------ found by varying the cases
@pytest.mark.parametrize("indent", [None, 2])
def test_requests_in_a_list_are_counted_once(indent: int | None) -> None:
    some = [json.loads(request(h)) for h in ([65, 22, 9, 4], [10, 5, 3, 2])]
    for text in (json.dumps(some, indent=indent), "\n".join(json.dumps(s, indent=indent) for s in some)):
        log = read(text)
        assert (log.drafts, log.accepted, log.requests) == (120, 52 + 17, 2)
    broken = json.dumps(some, indent=indent)[:-30]
    assert read(broken).drafts == 100
    for code in ("utf-16", "utf-16-le"):
        assert read_text(json.dumps(some).encode(code)).drafts == 120
    assert read_bytes(json.dumps([*some, {"text": "ï"}], ensure_ascii=False).encode("latin-1")).drafts == 120


def read_text(data: bytes) -> ServingLog:
    """As ``open_log`` does it, from a file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.log"
        path.write_bytes(data)
        return open_log(str(path))


def test_wide_text_without_a_mark_and_packed_files(tmp_path: Path) -> None:
    text = "\n".join(sglang_line(i, 2.0, None) for i in range(5)) + "\n"
    for code in ("utf-16-le", "utf-16-be"):
        assert read_text(text.encode(code)).windows == 5
    scrape = 'vllm:spec_decode_num_drafts_total{engine="0"} 10.0\nvllm:spec_decode_num_accepted_tokens_total{engine="0"} 12.0\n'
    assert read_text(("# TYPE x counter\n" + scrape).encode("utf-16")).accepted == 12
    for start, name in ((b"BZh91AY", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"PK\x03\x04", "zip")):
        path = tmp_path / name
        path.write_bytes(start + bytes(50))
        with pytest.raises(UsageError, match=name):
            open_log(str(path))


@pytest.mark.parametrize("line", [sglang_line(1, 2.5, 0.5), REAL_VLLM, request([6, 3, 1])])
def test_files_without_a_last_line_break(line: str, tmp_path: Path) -> None:
    names = ("server.log.2", "server.log.1", "server.log")
    for name in names:
        (tmp_path / name).write_text("\n".join([line] * 3))
    log = open_log(str(tmp_path))
    assert log.windows == 9


def test_log_lines_inside_documents(tmp_path: Path) -> None:
    lines = [sglang_line(i, 2.5, None) for i in range(6)]
    assert read(json.dumps([{"message": line, "n": [1]} for line in lines])).windows == 6
    assert read(json.dumps({"log": lines[0] + "\n", "stream": "stderr"})).windows == 1
    docker = "\n".join(json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in lines)
    assert open_log(written(tmp_path, docker)).windows == 6
    assert read('{"text": "accept \\ud800"}').readable is False


def test_bench_results_line_by_line() -> None:
    one = json.dumps({"backend": "sglang", "completed": 200, "output_throughput": 499.2, "accept_length": 2.61})
    assert read("\n".join([one] * 3)).acceptance_length == pytest.approx(2.61)


def test_numbers_beyond_reason() -> None:
    assert read(REAL_VLLM.replace("282", "9" * 400) + "\n").readable is False
    huge = {"metrics": {"speculative_decoding": {"num_spec_steps": 10**400, "num_accepted_draft_tokens": 10**399}}}
    assert read(json.dumps(huge)).readable is False
    log = read("\n".join([REAL_VLLM] * 5 + [REAL_VLLM.replace("282", "9282")]) + "\n")
    assert (log.accepted, log.drafts) == (5 * 282, 5 * 151)
    assert len(log.mismatches) == 1
    assert read("\n".join([sglang_line(i, 2.0, None) for i in range(9)] + [sglang_line(9, 0.0, None)])).acceptance_length == 2.0


def test_a_whole_last_line_is_kept_although_its_numbers_do_not_follow() -> None:
    log = read("\n".join([REAL_VLLM.replace("2.87", "3.87")] * 3))
    assert (log.windows, log.accepted, len(log.mismatches)) == (3, 3 * 282, 3)


def test_versions_and_options_as_engines_print_them() -> None:
    line = sglang_line(1, 2.5, 0.5)
    for said, version in (
        ("sglang version 0.5.9", "0.5.9"), ("SGLang version: v0.5.6.post1", "0.5.6.post1"), ("sglang==0.5.23", "0.5.23"),
        ("sglang                    0.5.12", "0.5.12"), ("image lmsysorg/sglang:v0.5.10-cu129", "0.5.10"), 
            ("sglang: 127.0.0.1 connected", None),
    ):  # fmt: skip
        assert read(f"{said}\n{line}").version == version, said
    assert read(f"image vllm/vllm-openai:v0.28.0-cu129\n{REAL_VLLM}").version == "0.28.0"
    start = "server_args={'model_path': 't', 'speculative_algorithm': 'EAGLE3', 'speculative_num_steps': 3, 'speculative_eagle_topk': 1}"
    log = read(f"[2026-01-01 00:00:00] {start}\n{line}")
    assert (log.k, log.launched.method, log.launched.topk) == (3, "EAGLE3", 1)


@pytest.mark.parametrize("off", ["SGLANG_SIMULATE_ACC_LEN=-1", "'SGLANG_SIMULATE_ACC_LEN': '-1.0'", "SGLANG_SIMULATE_ACC_LEN=0"])
def test_simulation_that_is_off(off: str) -> None:
    assert not read(f"{off}\n{sglang_line(0, 3.0, 0.67)}").warnings


def test_a_rate_of_another_version_and_a_rate_of_a_tree() -> None:
    start = "server_args=ServerArgs(speculative_num_steps=3, version='0.5.23')"
    log = read("\n".join([start] + [sglang_line(i, 2.85, 0.71) for i in range(40)]))
    assert "as SGLang 0.5.4 to 0.5.10, which counts the bonus token" in log.mismatches[0]
    tree = read("\n".join(sglang_line(i, 3.2, 0.05) for i in range(40)))
    assert (tree.k, tree.k_possible, [t.kind for t in tree.traps]) == (None, (), ["tree"])
