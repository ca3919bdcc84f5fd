"""Which traced steps leave a document, and that a document comes back as it went in."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from engine.report.tensorboard import series
from engine.report.tensorboard.series import Room, Thinning


@pytest.mark.parametrize("first", [series.ALL_OF_THE_FIRST, series.CURVES])
@pytest.mark.parametrize("steps", [1, 32, 100, 100_000])
def test_long_runs_keep_the_first_steps_and_half_as_many_per_doubling(steps: int, first: int) -> None:
    thinning = Thinning(first)
    kept = [step for step in range(steps) if thinning.keeps()]
    assert kept[:first] == list(range(min(steps, first)))
    assert len(kept) <= first + first // 2 * max(0, math.ceil(math.log2(steps / first)))
    assert all(later <= (1 + 2.1 / first) * earlier + 1 for earlier, later in pairwise(kept))  # no gap, on a log axis


def test_there_is_room_for_few_large_programs_and_for_too_large_ones_none() -> None:
    room = Room()
    kept = sum(room.takes(series.MOST_SPANS) for _ in range(30))
    assert kept == series.SPANS_OF_A_RUN // series.MOST_SPANS
    assert not room.takes(1)
    assert not Room().takes(series.MOST_SPANS + 1)


def test_documents_come_back_and_repeat_byte_for_byte() -> None:
    document = json.dumps({"step": 3, "name": "Δt"})
    assert series.unpacked(series.packed(document)) == document
    assert series.packed(document) == series.packed(document)


@pytest.mark.parametrize("content", [b"no", series.packed("{}")[:14], series.packed("{}")[:-9] + bytes(9), b"\x1f\x8b"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a packed document"):
        series.unpacked(content)
