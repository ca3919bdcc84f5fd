"""Which traced steps leave a document, and that a document comes back as it went in."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from engine.report import series
from engine.report.series import Thinning

LONG = 1e3  # seconds of a step beside which making its document is nothing


@pytest.mark.parametrize("steps", [1, 32, 100, 10_000])
def test_long_runs_keep_the_first_steps_and_sixteen_per_doubling(steps: int) -> None:
    thinning = Thinning()
    kept = [step for step in range(steps) if thinning.keeps(100, LONG)]
    assert kept[: series.ALL_OF_THE_FIRST] == list(range(min(steps, series.ALL_OF_THE_FIRST)))
    assert len(kept) <= series.ALL_OF_THE_FIRST + 16 * max(0, math.ceil(math.log2(steps / series.ALL_OF_THE_FIRST)))
    assert all(later <= 1.07 * earlier + 1 for earlier, later in pairwise(kept))  # no gap on a logarithmic axis


def test_large_programs_keep_fewer_and_too_large_ones_none() -> None:
    thinning = Thinning()
    kept = sum(thinning.keeps(series.MOST_SPANS, LONG) for _ in range(30))
    assert kept == series.SPANS_OF_A_RUN // series.MOST_SPANS
    assert not thinning.takes(1)
    assert not Thinning().keeps(series.MOST_SPANS + 1, LONG)


@pytest.mark.parametrize("spans", [100, 1000, 10_000])
def test_making_documents_takes_a_small_share_of_a_run(spans: int) -> None:
    thinning, steps, seconds = Thinning(), 400, 0.1
    kept = sum(thinning.keeps(spans, seconds) for _ in range(steps))
    assert kept >= 1 and (kept - 1) * series._cost(spans) <= series.SHARE * steps * seconds


def test_the_last_step_may_be_taken_whatever_its_number() -> None:
    thinning = Thinning()
    kept = [thinning.keeps(1, LONG) for _ in range(36)]
    assert not kept[-1] and thinning.takes(1)


def test_documents_come_back_and_repeat_byte_for_byte() -> None:
    document = json.dumps({"step": 3, "name": "Δt"})
    assert series.unpacked(series.packed(document)) == document
    assert series.packed(document) == series.packed(document)


@pytest.mark.parametrize("content", [b"no", series.packed("{}")[:14], series.packed("{}")[:-9] + bytes(9), b"\x1f\x8b"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a packed document"):
        series.unpacked(content)
