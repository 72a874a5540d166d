"""Damaged logs: whatever stands in a file, reading, judging, explaining and showing it never raises, and no rule crashes."""

from __future__ import annotations

import random

import pytest

from eagle3diag.report.jsonout import checked, dumps
from eagle3diag.report.views import view
from eagle3diag.rules.explain import explain
from eagle3diag.rules.logcase import check_log
from eagle3diag.serving.logs import read_bytes
from tests import test_logs as facts
from tests.fixtures_srv import sglang_line, vllm_line

SEEDS = (
    facts.NEW_VLLM,
    facts.OLD_VLLM,
    facts.OFFLINE,
    facts.AT_POS,
    facts.LLAMA,
    facts.MODELOPT,
    facts.VLLM_REQUEST,
    facts.BENCH,
    "# TYPE x counter\n" + facts.PROMETHEUS,
    "\n".join(sglang_line(i, 2.5, 0.5) for i in range(30)),
    "\n".join(vllm_line(i, 1000, 740, (0.7, 0.035, 0.005)) for i in range(6)),
    "server_args=ServerArgs(model_path='t', speculative_algorithm='EAGLE3')\n" + sglang_line(0, 2.0, 0.33),
    '{"full_acc_0":0.5,"full_acc_1":0.2}',
    '{"meta_info":{"completion_tokens":57,"spec_verify_ct":20}}',
    '{"internal_states":[{"avg_spec_accept_length":2.5}]}',
    "x out={'text': 'y', 'meta_info': {'completion_tokens': 57, 'spec_verify_ct': 20}}",
)
PIECES = (b"nan", b"-1", b"1e999", b"99999999999999999999", b"\n", b"null", b"true", b"0", b"\x1b[31m", b"inf")


def damaged(r: random.Random) -> bytes:
    """One of the seeds with a few bytes changed, cut, put in or doubled."""
    s = bytearray(r.choice(SEEDS).encode())
    for _ in range(r.randint(1, 8)):
        at = r.randrange(len(s)) if s else 0
        change = r.randint(0, 3)
        if change == 0 and s:
            s[at] = r.choice(b"0123456789.,:{}[]\"'- \n\x00\xff")
        elif change == 1:
            del s[at : at + r.randint(1, 20)]
        elif change == 2:
            s[at:at] = r.choice(PIECES)
        else:
            s += s[at : at + 60]
    return bytes(s)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_logs_are_read_or_left(seed: int) -> None:
    r = random.Random(seed)
    for _ in range(120):
        data = damaged(r)
        log = read_bytes(data)
        report = check_log(log, baseline=50.0)
        assert [o.why for o in report.outcomes if o.status == "crashed"] == [], data
        if log.acceptance_length is not None:
            assert log.acceptance_length >= 1.0, data
            assert all(0 <= p <= 1 for p in log.per_position), data
        dumps(checked(report, explain(report)))
        view(log)
