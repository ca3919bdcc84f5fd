"""scripts/bench whatif: what it compares, and how it judges. Nothing is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from benchmarks.whatif import CASES, WANTED, changed, judged, main


def test_the_grid_has_pairs_enough_and_changes_all_that_can_be_changed() -> None:
    pairs = [
        (case.model, name, count, split)
        for case in CASES.values()
        for name in case.schedules or [None]
        for count in case.microbatches or [None]
        for split in case.splits or [None]
    ]
    assert len(pairs) >= 20
    for model in WANTED:
        for changes in zip(*(pair[1:] for pair in pairs if pair[0] == model), strict=True):
            assert len(set(changes) - {None}) >= 1


def test_what_an_answer_says_to_change_replaces_what_was_given() -> None:
    keys = ("model=sleep", "schedule=1f1b", "pipeline.microbatches=4")
    assert changed(keys, ("schedule=zb_v", "partition=manual", "partition.split=[a,b]")) == (
        "model=sleep", "schedule=zb_v", "pipeline.microbatches=4", "partition=manual", "partition.split=[a,b]",
    )  # fmt: skip
    assert changed(keys, ()) == keys


def test_the_worst_pair_decides() -> None:
    found = [{"model": "sleep", "error": 0.01}, {"model": "sleep", "error": -0.04}, {"model": "gpt", "error": 0.2}]
    sleep, gpt = judged(found)
    assert sleep == "sleep: 2 pairs, error 2.5 % in the median, 4.0 % at worst (as wanted: at most 5.0 %)"
    assert gpt.endswith("20.0 % at worst (too much: at most 15.0 %)")
    assert judged(found[:2]) == [sleep]


def test_a_case_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "no case nothing; there are schedules, " in capsys.readouterr().err
