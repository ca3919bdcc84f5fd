"""What a run is asked to do, as plain frozen dataclasses: the whole configuration after it has been checked.

`engine.cli.config` fills these from Hydra; everything behind it sees only these. Groups whose keys belong to a
`_target_` (model, data, optimizer, lr_scheduler) or to a registry entry (schedule, partition) stay dictionaries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.allreduces import ALLREDUCES


@dataclass(frozen=True)
class Pipeline:
    ranks: int = 2
    microbatches: int = 4


@dataclass(frozen=True)
class DataParallel:
    replicas: int = 1
    mode: str = "sync"
    max_staleness: int | None = None  # of async: steps that a replica may be ahead of the slowest; null: no bound

    @property
    def asynchronous(self) -> bool:
        return self.mode == "async"


@dataclass(frozen=True)
class AllReduce:
    name: str = "ring"
    bucket_bytes: int = 25 * 2**20
    group_size: int | None = None  # of hierarchical: replicas per host; null: as the launcher's hosts hold them


@dataclass(frozen=True)
class Train:
    steps: int | None = 20  # optimizer steps; null where epochs are given
    epochs: int | None = None
    global_batch_size: int = 32
    clip_norm: float | None = None
    clip_norm_type: float | None = 2.0  # p of the p-norm; null: infinity, the largest element
    accumulate: int = 1
    stop_on_nan: bool = False  # end the run, as failed, at the first loss that is not finite


@dataclass(frozen=True)
class Eval:
    every: int | None = None  # optimizer steps between evaluations; null: once, at the end; 0: never
    batch_size: int | None = None  # samples per evaluation batch over all replicas; null: the training's


@dataclass(frozen=True)
class Trace:
    every: int = 1
    consecutive: int = 1  # steps traced one after the other, from each such step on


@dataclass(frozen=True)
class Delay:
    """What is made slow on purpose (`training/delay.py`); times in milliseconds."""

    ranks: list[list[float]] = field(default_factory=list)  # [world rank, ms] or [world rank, ms, micro-batch]
    links: list[list[float]] = field(default_factory=list)  # [from world rank, to world rank, ms]
    sample_ms: float = 0.0


@dataclass(frozen=True)
class PlanSettings:
    costs: dict[str, Any] = field(default_factory=dict)  # forward, input_backward, weight_backward, transfer
    compare: list[str] = field(default_factory=list)  # schedules to compare instead of planning one; `all` names all
    memory_limit: float | None = None  # activations per rank: what keeps more is not chosen


@dataclass(frozen=True)
class Settings:
    mode: str = "train"
    launch: str = "processes"
    seed: int = 0
    device: str = "auto"
    precision: str = "fp32"
    threads_per_worker: int | None = None  # null: OMP_NUM_THREADS, else cores / workers, at least 1
    pin_workers: str = "waiting"  # when a worker process keeps to its share of the cores: never | waiting | always
    timeout_s: float = 600.0
    transport: str = "auto"  # between CPU processes; auto: shared memory on one Linux host, else gloo
    recompute: str = "none"
    shard_optimizer: bool = False  # each replica updates a part of the parameters and keeps the state of that part only
    schedule: dict[str, Any] = field(default_factory=dict)  # name, chunks, options of the schedule
    model: dict[str, Any] = field(default_factory=dict)  # _target_ and keywords, loss: {_target_}, loss_additive, split
    partition: dict[str, Any] = field(default_factory=dict)  # name: model | manual | uniform | parameters | time; split
    data: dict[str, Any] = field(default_factory=dict)  # _target_, keywords, the loader's keys, evaluation
    optimizer: dict[str, Any] = field(default_factory=dict)
    lr_scheduler: dict[str, Any] | None = None
    allreduce: AllReduce = field(default_factory=AllReduce)
    pipeline: Pipeline = field(default_factory=Pipeline)
    data_parallel: DataParallel = field(default_factory=DataParallel)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    trace: Trace = field(default_factory=Trace)
    delay: Delay = field(default_factory=Delay)
    plan: PlanSettings = field(default_factory=PlanSettings)

    @property
    def schedule_options(self) -> dict[str, Any]:
        """The schedule's own options, those left at null taken out."""
        return {key: value for key, value in self.schedule.items() if key != "name" and value is not None}

    @property
    def divided(self) -> bool:
        """Whether the optimizer is divided over replicas that update together: parameters are then gathered."""
        divides = ALLREDUCES[self.allreduce.name].division is not None
        return not self.data_parallel.asynchronous and (self.shard_optimizer or divides)

    @property
    def world(self) -> int:
        return self.pipeline.ranks * self.data_parallel.replicas
