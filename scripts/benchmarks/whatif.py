"""scripts/bench whatif [CASE ...] [--repeats N] [--json FILE]

Asks `python -m engine.report` what a run's step would take in another configuration, then runs that configuration and
compares: schedules, micro-batches and splits, on stages that sleep (2 to 4 ranks) and on `model=gpt` (2 ranks). What is
run is what the answer says to change. Prints a row per pair, and the median and the worst error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import parser
from benchmarks.sides import LOOPBACK, run_together
from engine.predict.measured import read
from engine.predict.scenarios import LeftOut, asked
from engine.predict.whatif import Predictor
from engine.tables import markdown, percent, size, table

WANTED = {"sleep": 0.05, "gpt": 0.15}  # the most that a predicted step time may be off

_SLEEP = ("model=sleep", "data=synthetic", "data.shape=[16]", "train.global_batch_size=32")
_EQUAL = (*_SLEEP, "model.forward_ms=10", "model.input_backward_ms=10", "model.weight_backward_ms=10")
_GPT = ("model=gpt", "data=text", "train.global_batch_size=16", "pipeline.ranks=2")
_LAYERS = (2, 2, 3, 3, 4, 4, 6, 8)  # ms of each part of a layer


def _unequal(ranks: int, split: str) -> tuple[str, ...]:
    """Layers of unequal length, cut anyhow."""
    listed = ",".join(map(str, _LAYERS))
    costs = (f"model.{part}_ms=[{listed}]" for part in ("forward", "input_backward", "weight_backward"))
    return (*_SLEEP, *costs, f"pipeline.ranks={ranks}", "partition=manual", f"partition.split=[{split}]")


@dataclass(frozen=True)
class Case:
    """A run by its arguments, `beside` it runs that differ in some, and what is asked of them."""

    keys: tuple[str, ...]
    schedules: tuple[str, ...] = ()
    microbatches: tuple[int, ...] = ()
    splits: tuple[str, ...] = ()
    beside: tuple[tuple[str, ...], ...] = ()

    @property
    def model(self) -> str:
        return "gpt" if "model=gpt" in self.keys else "sleep"


CASES = {
    "schedules": Case(
        (*_EQUAL, "schedule=1f1b", "pipeline.ranks=4", "pipeline.microbatches=8"),
        schedules=("gpipe", "zb_h1", "zb_v", "interleaved_1f1b", "dualpipe_v", "hanayo", "chimera"),
    ),
    "halves": Case(
        (*_EQUAL, "schedule=zb_h1", "pipeline.ranks=2", "pipeline.microbatches=6"),
        schedules=("1f1b", "naive", "v_min"),
    ),
    "microbatches": Case(
        (*_EQUAL, "schedule=gpipe", "pipeline.ranks=3", "pipeline.microbatches=4"),
        schedules=("gpipe", "1f1b"),
        microbatches=(6, 8),
        beside=(("pipeline.microbatches=2",),),
    ),
    "splits": Case(
        (*_unequal(2, "stage4"), "schedule=1f1b", "pipeline.microbatches=6"), splits=("stage5", "stage6", "stage3")
    ),
    "splits of 4": Case(
        (*_unequal(4, "stage2,stage4,stage6"), "schedule=1f1b", "pipeline.microbatches=8"),
        schedules=("1f1b", "gpipe"),
        splits=("stage4,stage6,stage7", "stage3,stage5,stage7"),
    ),
    "chunks": Case(
        (*_unequal(4, "stage4,stage6,stage7"), "schedule=1f1b", "pipeline.microbatches=8"),
        schedules=("interleaved_1f1b", "zb_v"),
    ),
    "gpt schedules": Case(
        (*_GPT, "schedule=1f1b", "pipeline.microbatches=4"), schedules=("gpipe", "interleaved_1f1b")
    ),
    "gpt halves": Case(
        (*_GPT, "schedule=1f1b", "pipeline.microbatches=4"), schedules=("zb_h2", "zb_v"), beside=(("schedule=zb_h1",),)
    ),
    "gpt micro-batches": Case(
        (*_GPT, "schedule=1f1b", "pipeline.microbatches=4"), microbatches=(8,), beside=(("pipeline.microbatches=2",),)
    ),
    "gpt fewer": Case(
        (*_GPT, "schedule=gpipe", "pipeline.microbatches=8"), microbatches=(4,), beside=(("pipeline.microbatches=2",),)
    ),
    "gpt splits": Case((*_GPT, "schedule=1f1b", "pipeline.microbatches=4"), splits=("blocks.1", "blocks.3")),
}  # fmt: skip


def changed(keys: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """The arguments with some of them replaced, and new ones added."""
    return tuple({word.partition("=")[0]: word for word in (*keys, *overrides)}.values())


class Runs:
    """Runs by their arguments, each made `repeats` times and once only for all cases."""

    def __init__(self, folder: Path, repeats: int) -> None:
        self._folder, self._repeats = folder, repeats
        self._made: dict[tuple[str, ...], list[Path]] = {}

    def of(self, keys: Sequence[str]) -> list[Path]:
        """The folders of the runs of these arguments."""
        wanted = tuple(sorted(keys))
        if wanted not in self._made:
            self._made[wanted] = [self._run(keys, repeat) for repeat in range(self._repeats)]
        return self._made[wanted]

    def _run(self, keys: Sequence[str], repeat: int) -> Path:
        folder = self._folder / f"{len(self._made)}-{repeat}"
        print(f"run {folder.name}: {' '.join(keys)}", file=sys.stderr, flush=True)
        rate = ("optimizer=sgd", "lr_scheduler=none")
        usual = ("train.steps=9", *rate, "device=cpu", "threads_per_worker=1", "eval.every=0")
        command = [sys.executable, "-m", "engine", *keys, *usual, f"hydra.run.dir={folder}"]
        run_together([command], self._folder, LOOPBACK)
        return folder


def pairs(case: Case, runs: Runs) -> list[dict[str, Any]]:
    """Each answer, and what then came of it: seconds and bytes, medians over the repeats."""
    beside = [runs.of(changed(case.keys, words)) for words in case.beside]
    answers: dict[str, list[Any]] = {}
    base, own = [], []
    for repeat, folder in enumerate(runs.of(case.keys)):
        predictor = Predictor(read(folder), [read(folders[repeat]) for folders in beside])
        base.append(predictor.base.step_time)
        own.append(predictor.predict(predictor.own).step)
        splits = [split.split(",") for split in case.splits]
        for scenario in asked(predictor, case.schedules, case.microbatches, splits):
            assert not isinstance(scenario, LeftOut), scenario
            answers.setdefault(scenario.words, []).append(predictor.predict(scenario))
    found = []
    for words, predictions in answers.items():
        measured = [read(folder) for folder in runs.of(changed(case.keys, predictions[0].scenario.overrides))]
        step, held = median(run.step_time for run in measured), max(measured[0].memory or [0.0])
        predicted, kept = median(each.step for each in predictions), max(predictions[0].memory)
        found.append(
            {
                "model": case.model,
                "what": words,
                "how": list(predictions[0].scenario.overrides),
                "base": median(base),
                "own": median(own),
                "predicted": predicted,
                "measured": step,
                "error": predicted / step - 1,
                "memory": {"predicted": kept, "measured": held},
            }
        )
    return found


def judged(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The median and the worst error of each model, and whether that is what is wanted."""
    said = []
    for model, wanted in WANTED.items():
        errors = [abs(pair["error"]) for pair in found if pair["model"] == model]
        if errors:
            verdict = "as wanted" if max(errors) <= wanted else "too much"
            said.append(
                f"{model}: {len(errors)} pairs, error {percent(median(errors))} in the median, {percent(max(errors))} "
                f"at worst ({verdict}: at most {percent(wanted)})"
            )
    return said


def main(arguments: Sequence[str]) -> None:
    options = parser("whatif", __doc__)
    options.set_defaults(repeats=1)
    options.add_argument("cases", nargs="*", metavar="case", help=f"{', '.join(CASES)} (default: all)")
    options.add_argument("--markdown", action="store_true", help="print the table for a document")
    given = options.parse_args(arguments)
    if unknown := [name for name in given.cases if name not in CASES]:
        options.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), given.repeats)
        for name in given.cases or CASES:
            results[name] = pairs(CASES[name], runs)
    head = [
        "run",
        "what if",
        "run ms",
        "predicted",
        "what if: predicted",
        "measured",
        "error",
        "memory predicted",
        "measured",
    ]
    rows = [[name, *_cells(pair)] for name, found in results.items() for pair in found]
    print((markdown if given.markdown else table)([head, *rows]))
    print("\n".join(judged([pair for found in results.values() for pair in found])))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


def _cells(pair: Mapping[str, Any]) -> list[str]:
    times = [f"{1e3 * pair[key]:.1f}" for key in ("base", "own", "predicted", "measured")]
    memory = [size(pair["memory"][key]) for key in ("predicted", "measured")]
    return [pair["what"], *times, f"{100 * pair['error']:+.1f} %", *memory]
