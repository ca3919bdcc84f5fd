"""The sentence on what to try next: the best that is predicted, in words for a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

import recorded
from finished import MS, finished, job_of

from engine.predict.measured import read
from engine.predict.scenarios import answer, nearest
from engine.predict.whatif import Predictor
from engine.report.next_step import WORTH, next_step


def run(folder: Path, layers: int, slow: int | None = None) -> Path:
    """A finished run of two stages with so many equal layers each; stage `slow` takes three times as long."""
    of = job_of("gpipe", 2, 4, layers=layers)
    costs = recorded.costs(of.compute, 20 * MS, 40 * MS, slow)
    return finished(folder, of, costs)


def test_a_better_split_is_named_in_words_for_a_shell(tmp_path: Path) -> None:
    """Stage 1 takes three times as long as stage 0: one of its three layers belongs to stage 0."""
    said = next_step(run(tmp_path / "run", 3, slow=1))
    assert said is not None and said.startswith("Next, add ") and said.endswith(" less.")
    words = said.removeprefix("Next, add ").partition(" to the command")[0]
    assert "'partition.split=[block4]'" in words  # quoted: a shell would take the brackets for a pattern
    assert shlex.split(words) == ["partition=manual", "partition.split=[block4]"]


def test_the_saving_is_the_predictions(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 3, slow=1)
    predictor = Predictor(read(folder))
    found = answer(predictor, nearest(predictor))
    best = next(each for each in found.found if each.scenario.overrides[:1] == ("partition=manual",))
    assert f"{100 * (1 - best.step / found.baseline.step):.1f} % less" in (next_step(folder) or "")
    assert best.step < (1 - WORTH) * found.baseline.step


def test_sizes_of_micro_batches_that_were_not_measured_are_not_named(tmp_path: Path) -> None:
    """Equal stages: of what is left only more micro-batches could help, and the run has had one size of them."""
    said = next_step(run(tmp_path / "run", 1))
    assert said is not None and "pipeline.microbatches" not in said and said.startswith("Next, see all predictions")


def test_where_nothing_can_be_predicted_nothing_is_said(tmp_path: Path) -> None:
    assert next_step(tmp_path) is None
