"""The cases: what is trained and how it is cut, as the arguments of one `python -m engine`.

The sides that are not the engine get their layers, split, samples and optimizer from the engine's own reading of these
arguments (`Case.job`), so a case is described once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.job import Job
from engine.plan.choose import synchronous

CONF = Path(__file__).parents[2] / "conf"


SYNCHRONOUS = tuple(synchronous())
# Schedules that torch.distributed.pipelining has too, and its classes.
THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


@dataclass(frozen=True)
class Case:
    """One row of the comparison. `plain`: also run as one plain process.

    `theirs`: the peer's class, None where it has none. `borrowed`: it has no equal here, so our side runs the program
    that the peer wrote; `schedule` is then one of ours with the same placement.
    """

    name: str
    schedule: str
    ranks: int
    microbatches: int
    steps: int
    choices: tuple[str, ...]
    plain: bool = False
    warmup: int = 4
    theirs: str | None = None
    borrowed: bool = False

    def overrides(self, program: str | None = None) -> list[str]:
        """The engine's arguments. `program`: the file of a borrowed program."""
        return [
            *([f"schedule={self.schedule}"] if program is None else ["schedule=csv", f"schedule.path={program}"]),
            f"pipeline.ranks={self.ranks}",
            f"pipeline.microbatches={self.microbatches}",
            f"train.steps={self.steps}",
            *self.choices,
            *("optimizer=sgd", "lr_scheduler=none", "device=cpu", "threads_per_worker=1", "eval.every=0"),
        ]

    @cached_property
    def job(self) -> Job:
        """The engine's reading of the arguments: layers, split, data, optimizer. Starts nothing."""
        from hydra import compose, initialize_config_dir

        from engine.cli.config import load
        from engine.prepare.prepare import prepare

        with initialize_config_dir(str(CONF), version_base="1.3"):
            settings = load(compose("config", overrides=self.overrides()))
        return prepare(settings, start_dir=".", run_dir=".")


def sleep(schedule: str, microbatches: int = 8, steps: int = 20, **more: Any) -> Case:
    """15 ms per rank and micro-batch that use no CPU: what is left is the schedule and the way messages travel."""
    costs = [f"model.{part}_ms=5" for part in ("forward", "input_backward", "weight_backward")]
    choices = ("model=sleep", "data=synthetic", "data.shape=[16]", f"train.global_batch_size={microbatches}", *costs)
    known: dict[str, Any] = {"name": f"sleep {schedule}", "theirs": THEIRS.get(schedule)}
    return Case(schedule=schedule, ranks=4, microbatches=microbatches, steps=steps, choices=choices, **(known | more))


def schedules(microbatches: int) -> list[Case]:
    """Every synchronous schedule on stages that sleep, and the peer's interleaved zero bubble."""
    ours = [sleep(name, microbatches, 14, name=f"{name} m={microbatches}") for name in SYNCHRONOUS]
    name, theirs = f"interleaved_zb m={microbatches}", "ScheduleInterleavedZeroBubble"
    return [*ours, sleep("interleaved_1f1b", microbatches, 14, name=name, theirs=theirs, borrowed=True)]


TINY = Case(  # next to no work per action: what is left is what an action costs to carry out
    "tiny",
    "1f1b",
    theirs=THEIRS["1f1b"],
    ranks=4,
    microbatches=8,
    steps=60,
    warmup=10,
    choices=(
        *("model=sleep", "model.width=64", "data=synthetic", "data.shape=[64]", "train.global_batch_size=64"),
        *("model.forward_ms=0", "model.input_backward_ms=0", "model.weight_backward_ms=0"),
    ),
    plain=True,
)
RESNET50 = Case(
    "resnet50",
    "gpipe",
    theirs=THEIRS["gpipe"],
    ranks=2,
    microbatches=4,
    steps=10,
    choices=("model=resnet50", "model.split=[layer3]", "data=digits", "data.size=64", "train.global_batch_size=32"),
    plain=True,
)
GPT = Case(
    "gpt",
    "1f1b",
    theirs=THEIRS["1f1b"],
    ranks=2,
    microbatches=4,
    steps=14,
    choices=("model=gpt", "data=text", "train.global_batch_size=16"),
    plain=True,
)


def unpinned(case: Case) -> Case:
    """The same where our workers wait wherever the system puts them."""
    return replace(case, name=f"{case.name}, unpinned", choices=(*case.choices, "pin_workers=never"), plain=False)


def over_gloo(case: Case) -> Case:
    """The same with our messages sent as the peer's are, not through shared memory."""
    return replace(case, name=f"{case.name}, gloo", choices=(*case.choices, "transport=gloo"), plain=False)


SLEEP = [sleep("gpipe"), sleep("1f1b")]
GROUPS = {
    "sleep": [*SLEEP, *map(unpinned, SLEEP), *map(over_gloo, SLEEP)],
    "tiny": [TINY, over_gloo(TINY)],
    "resnet50": [RESNET50],
    "gpt": [GPT],
}
FIELD = {microbatches: schedules(microbatches) for microbatches in (8, 16)}
CASES = {case.name: case for group in (*GROUPS.values(), *FIELD.values()) for case in group}
