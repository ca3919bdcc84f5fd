"""The cases: what is trained and how it is cut, as the arguments of one `python -m engine`.

The sides that are not the engine get their layers, split, samples and optimizer from the engine's own reading of these
arguments (`Case.job`), so a case is described once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from engine.job import Job

CONF = Path(__file__).parents[2] / "conf"


@dataclass(frozen=True)
class Case:
    """One row of the comparison. `plain`: also run as one plain process."""

    name: str
    schedule: str
    ranks: int
    microbatches: int
    steps: int
    choices: tuple[str, ...]
    plain: bool = False
    warmup: int = 4

    @property
    def overrides(self) -> list[str]:
        """The engine's arguments."""
        return [
            f"schedule={self.schedule}",
            f"pipeline.ranks={self.ranks}",
            f"pipeline.microbatches={self.microbatches}",
            f"train.steps={self.steps}",
            *self.choices,
            *("optimizer=sgd", "device=cpu", "threads_per_worker=1", "eval.every=0"),
        ]

    @cached_property
    def job(self) -> Job:
        """The engine's reading of the arguments: layers, split, data, optimizer. Starts nothing."""
        from hydra import compose, initialize_config_dir

        from engine.config import load
        from engine.runtime.prepare import prepare

        with initialize_config_dir(str(CONF), version_base="1.3"):
            settings = load(compose("config", overrides=self.overrides))
        return prepare(settings, start_dir=".", run_dir=".")


def sleep(schedule: str) -> Case:
    """15 ms per stage and micro-batch that use no CPU: what is left is the schedule and the way messages travel."""
    costs = [f"model.{part}_ms=5" for part in ("forward", "input_backward", "weight_backward")]
    choices = ("model=sleep", "data=synthetic", "data.shape=[16]", "train.global_batch_size=8", *costs)
    return Case(f"sleep {schedule}", schedule, ranks=4, microbatches=8, steps=20, choices=choices)


TINY = Case(  # next to no work per action: what is left is what an action costs to carry out
    "tiny",
    "1f1b",
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
    ranks=2,
    microbatches=4,
    steps=10,
    choices=("model=resnet50", "data=digits", "train.global_batch_size=32"),
    plain=True,
)
GPT = Case(
    "gpt",
    "1f1b",
    ranks=2,
    microbatches=4,
    steps=14,
    choices=("model=gpt", "data=text", "train.global_batch_size=16"),
    plain=True,
)


def over_gloo(case: Case) -> Case:
    """The same with our messages sent as the peer's are, not through shared memory."""
    return replace(case, name=f"{case.name}, gloo", choices=(*case.choices, "transport=gloo"), plain=False)


SLEEP = [sleep("gpipe"), sleep("1f1b")]
GROUPS = {
    "sleep": [*SLEEP, *map(over_gloo, SLEEP)],
    "tiny": [TINY, over_gloo(TINY)],
    "resnet50": [RESNET50],
    "gpt": [GPT],
}
CASES = {case.name: case for group in GROUPS.values() for case in group}
