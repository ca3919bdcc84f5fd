"""python -m engine.report RUN [RUN ...]: what the first run's step would take in other configurations.

Predicts step time and peak memory, best first, from what the run itself has measured (costs.json): every other
synchronous schedule, other numbers of micro-batches, other splits of the layers, recomputation, faster transfers. It
takes seconds and starts nothing.

Further runs of the same model add what the first does not know: how computations and messages change with the size of
micro-batches, and backwards in halves. The other jobs of a sweep are looked at unasked.

The folder of a sweep, given alone, is compared anew: comparison.txt, .json and .html are written into it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.console import forgiving
from engine.files import UnwritableError, write_json
from engine.folder.rows import is_sweep
from engine.predict.measured import Measured, differs, read, siblings
from engine.predict.scenarios import Answer, answer, asked, usual
from engine.predict.whatif import Prediction, Predictor
from engine.report.compare import PAGE, write_comparison
from engine.tables import counted, milliseconds, percent, size, table

REFUSED = 2  # exit code
MISSED = 0.15  # of the measured step; a prediction of the run itself that is further off is said to be


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what a run or a sweep would take in other configurations; returns the exit code."""
    with forgiving():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    given = _parser().parse_args(arguments)
    try:
        asking = given.schedule or given.microbatches or given.split or given.json
        if len(given.runs) == 1 and is_sweep(given.runs[0]) and not asking:
            print(f"{write_comparison(given.runs[0])}\n\n{given.runs[0] / PAGE}")
            return 0
        base, others = _runs(given.runs)
        predictor = Predictor(base, others)
        named = given.schedule or given.microbatches or given.split
        if named:
            splits = [[name.strip() for name in each.split(",")] for each in given.split]
            wanted = asked(predictor, given.schedule, given.microbatches, splits)
        else:
            wanted = usual(predictor)
        found = answer(predictor, wanted)
        print(text(predictor, found))
        if given.json:
            write_json(given.json, content(predictor, found))
    except (ValueError, OSError, UnwritableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    rest = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(
        prog="python -m engine.report", description=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run, or of a sweep")
    several = "may be repeated, and is combined with the others"
    parser.add_argument("--schedule", action="append", default=[], metavar="NAME", help=f"ask for this; {several}")
    parser.add_argument(
        "--microbatches", action="append", default=[], type=int, metavar="M", help=f"ask for so many; {several}"
    )
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="LAYER,...",
        help=f"the layers that begin stages 1, 2, ...; {several}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the answer, with its assumptions, there")
    return parser


def _runs(folders: Sequence[Path]) -> tuple[Measured, list[Measured]]:
    """The run that is asked about, and the ones that know more of its model."""
    once = {folder.resolve(): folder for folder in folders}
    base, *others = map(read, once.values())
    for other in others:
        if (difference := differs(base, other)) is not None:
            raise ValueError(f"{other.folder} says nothing of {base.folder}: {difference}")
    return base, others + [run for run in siblings(base) if run.folder.resolve() not in once]


def text(predictor: Predictor, found: Answer) -> str:
    """The answer for a terminal."""
    base, measured = predictor.base, predictor.base.step_time
    raw = base.raw
    sizes = f"{counted(raw['ranks'], 'rank')}, {counted(raw['microbatches'], 'micro-batch')}"
    error = found.baseline.step / measured - 1
    said = f"{milliseconds(measured)} per step measured, {milliseconds(found.baseline.step)} predicted"
    parts = [f"{base.folder}: {raw['schedule']}, {sizes}; {said} ({100 * error:+.1f} %)"]
    if abs(error) > MISSED:
        parts.append(
            "This run itself is not met by what is predicted of it, and other configurations will not be met better: "
            "its medians do not tell its steps. Run it longer, on a machine that does nothing else, or with more to "
            "compute in each micro-batch."
        )
    rows = ", ".join(f"{each:g}" for each in predictor.sizes)
    if predictor.others:
        listed = ", ".join(str(run.folder) for run in predictor.others)
        parts.append(f"With the costs of {listed}. Samples of a micro-batch that were measured: {rows}.")
    elif len(predictor.sizes) > 1:
        parts.append(f"Samples of a micro-batch that were measured: {rows}.")
    everything = sorted([found.baseline, *found.found], key=lambda each: (each.step, each is not found.baseline))
    notes: list[str] = []
    lines = [["", "what if", "step ms", "saves", "peak memory by rank", "how"]]
    lines += [_row(each, each is found.baseline, found.baseline.step, notes) for each in everything]
    for column in (1, 5):  # words begin where the column does
        width = max(len(line[column]) for line in lines)
        for line in lines:
            line[column] = line[column].ljust(width)
    parts.append(table(lines))
    parts += [f"{_mark(index)} {note}" for index, note in enumerate(notes)]
    parts += _left(found)
    return "\n\n".join(parts)


def _row(each: Prediction, own: bool, baseline: float, notes: list[str]) -> list[str]:
    for note in each.notes:
        if note not in notes:
            notes.append(note)
    marks = "".join(_mark(notes.index(note)) for note in each.notes)
    memory = " ".join(size(nbytes) for nbytes in each.memory) if len(each.memory) <= 4 else size(max(each.memory))
    saved = "-" if own else percent(1 - each.step / baseline)
    how = " ".join(each.scenario.overrides)
    return [">" if own else "", f"{each.scenario.words}{marks}", f"{1e3 * each.step:.1f}", saved, memory, how]


def _mark(index: int) -> str:
    return f"[{index + 1}]"


def _left(found: Answer) -> list[str]:
    if not found.left_out:
        return []
    return ["Not predicted:\n" + "\n".join(f"  {left.words}: {left.why}" for left in found.left_out)]


def content(predictor: Predictor, found: Answer) -> dict[str, Any]:
    """The same as data: seconds and bytes."""
    base = predictor.base
    return {
        "run": str(base.folder),
        "others": [str(run.folder) for run in predictor.others],
        "measured": {"step": base.step_time, "memory": base.memory},
        "baseline": _plain(found.baseline),
        "predictions": [_plain(each) for each in found.found],
        "left_out": [left._asdict() for left in found.left_out],
    }


def _plain(each: Prediction) -> dict[str, Any]:
    return asdict(each) | {"scenario": asdict(each.scenario) | {"options": dict(each.scenario.options)}}


def run() -> int:
    """Run `main`; a closed stdout (`| head`) is not an error."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(run())
