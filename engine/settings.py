"""Every configuration key in one table: default, meaning, choices and range, as frozen dataclasses.

`engine.cli.config` fills `Settings` from what Hydra composed; everything behind it sees only these classes. The checks
there, `--help` and docs/configuration.md are made from the same fields: a new key is one field here and one line in
conf/config.yaml. Groups whose keys belong to a `_target_` (model, data, optimizer, lr_scheduler) or to a registry entry
(schedule, partition) stay dictionaries; the engine's own keys in them are in `GROUP_KEYS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from engine.allreduces import ALLREDUCES
from engine.objectives import OBJECTIVES
from engine.transports import TRANSPORT_CHOICES

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """What is known of one configuration key, for the checks, for `--help` and for docs/configuration.md.

    `kind` is the type of a value inside a group; of a field of `Settings` the annotation says it. `later` are choices
    that the documents name and the engine does not have yet: they are refused with that reason, not as a mistake.
    """

    meaning: str
    choices: Collection[str] = ()
    later: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    kind: type | None = None


def about(meaning: str, **limits: Any) -> dict[str, Any]:
    """The metadata of a field that is a key."""
    return {"key": Key(meaning, **limits)}


def key(default: T, meaning: str, **limits: Any) -> T:
    """A dataclass field with a default that cannot change, and the rest of its `Key`."""
    made: T = field(default=default, metadata=about(meaning, **limits))
    return made


@dataclass(frozen=True)
class PipelineSettings:
    """Section `pipeline`: the size of one pipeline."""

    ranks: int = key(2, "P: the ranks of a pipeline, each with one slice of the model", at_least=1)
    microbatches: int = key(4, "M: the micro-batches that a replica's share of the batch is cut into", at_least=1)


@dataclass(frozen=True)
class DataParallelSettings:
    """Section `data_parallel`: copies of the whole pipeline."""

    replicas: int = key(1, "R: copies of the whole pipeline; P x R workers are started", at_least=1)
    mode: str = key(
        "sync",
        "sync: replicas sum their gradients in every step. async: each pushes its own to a server and waits for nobody "
        "(with allreduce=parameter_server or sharded_parameter_server)",
        choices=("sync", "async"),
    )
    max_staleness: int | None = key(
        None,
        "of async: the most steps that a replica may be ahead of the slowest; null: any number; 0: in step",
        at_least=0,
    )

    @property
    def asynchronous(self) -> bool:
        """Whether replicas update through a server without waiting for each other."""
        return self.mode == "async"


@dataclass(frozen=True)
class AllReduceSettings:
    """Section `allreduce`: how replicas sum their gradients."""

    name: str = key("ring", "the algorithm, set by the choice of the group", choices=ALLREDUCES)
    bucket_bytes: int = key(25 * 2**20, "gradients are reduced in buckets of about this many bytes", at_least=1)
    group_size: int | None = key(
        None, "of hierarchical: replicas per host; null: as many as the launcher's hosts hold", at_least=1
    )
    shared_buckets: str = key(
        "auto",
        "auto: with transport=shared_memory replicas read gradients where the others have them; never: from copies",
        choices=("auto", "never"),
    )


@dataclass(frozen=True)
class Train:
    """Section `train`: how long and on what batches."""

    steps: int | None = key(40, "optimizer steps; 40 where neither steps nor epochs is given", at_least=1)
    epochs: int | None = key(None, "passes over the data, instead of steps", at_least=1)
    global_batch_size: int = key(64, "samples per optimizer step, over all replicas", at_least=1)
    clip_norm: float | None = key(None, "clip the gradient of the whole model to this norm; null: do not", above=0)
    clip_norm_type: float | None = key(2.0, "p of that p-norm; inf or null: the largest element", above=0)
    accumulate: int = key(1, "passes through the pipeline per optimizer step", at_least=1)
    stop_on_nan: bool = key(
        False, "true: the first loss that is NaN or infinite ends the run as failed; false: it is warned of"
    )


@dataclass(frozen=True)
class Eval:
    """Section `eval`: when and in what batches held-out samples are evaluated."""

    every: int | None = key(None, "optimizer steps between evaluations; null: once, at the end; 0: never", at_least=0)
    batch_size: int | None = key(
        None, "samples of one evaluation batch over all replicas; null: as in training", at_least=1
    )
    at_start: bool = key(False, "true: evaluate before the first step too, also where eval.every=0")


@dataclass(frozen=True)
class Init:
    """Section `init`: weights to start from."""

    weights: str | None = key(
        None,
        "a file or folder of weights to start from: safetensors, a torch.save of tensors, Hugging Face's shards, or a "
        "run's folder; null: they are drawn from the seed",
    )
    prefix: list[str] = field(
        default_factory=list,
        metadata=about(
            "prefixes of names in that file, and what the model's names begin with instead: [OLD:NEW]; [module.:] "
            "takes one off, [:encoder.] puts one before all"
        ),
    )
    strict: bool = key(
        True, "false: names and shapes that do not match are listed, and left as they are drawn; true: refused"
    )


@dataclass(frozen=True)
class CheckpointSettings:
    """Section `checkpoint`: when the whole training state is stored, to go on from."""

    every_steps: int | None = key(None, "optimizer steps between checkpoints; null: none for that reason", at_least=1)
    every_minutes: float | None = key(None, "minutes between checkpoints; null: none for that reason", above=0)
    every_epochs: int | None = key(None, "epochs between checkpoints; null: none for that reason", at_least=1)
    keep: int = key(2, "the newest checkpoints that are kept", at_least=1)
    best: bool = key(
        False, "true: also make one after each evaluation with the lowest loss so far, and keep the last of these"
    )
    on_failure: str = key(
        "warn",
        "what a checkpoint that cannot be made means. warn: it is reported, and training goes on; stop: the run fails",
        choices=("warn", "stop"),
    )

    @property
    def wanted(self) -> bool:
        """Whether the run makes any."""
        return self.best or any(each is not None for each in (self.every_steps, self.every_minutes, self.every_epochs))


@dataclass(frozen=True)
class Trace:
    """Section `trace`: which steps are recorded in full."""

    every: int = key(1, "optimizer steps from one traced step to the next; 0: never", at_least=0)
    consecutive: int = key(1, "steps traced one after the other each time; trace.every or more: all", at_least=1)


@dataclass(frozen=True)
class Delay:
    """Section `delay`: what is made slow on purpose, to try the reports; times in milliseconds."""

    ranks: list[list[float]] = field(
        default_factory=list, metadata=about("slow forwards: [[world rank, ms]] or [[world rank, ms, micro-batch]]")
    )
    links: list[list[float]] = field(
        default_factory=list, metadata=about("slow messages: [[from world rank, to world rank, ms]]")
    )
    sample_ms: float = key(0.0, "milliseconds that loading a sample takes longer", at_least=0)


@dataclass(frozen=True)
class PlanSettings:
    """Section `plan`: what `mode=plan` assumes and compares."""

    costs: dict[str, Any] = field(
        default_factory=dict, metadata=about("costs of computations and messages, in any unit")
    )
    compare: list[str] = field(
        default_factory=list, metadata=about("schedules to compare instead of planning one, or all: the cheapest first")
    )
    memory_limit: float | None = key(
        None, "activations that a rank may keep; what keeps more comes last in the comparison", above=0
    )


@dataclass(frozen=True)
class Settings:
    """The whole configuration of one run after it has been checked."""

    mode: str = key(
        "train",
        "plan: build, verify, simulate and print a schedule, start nothing. evaluate: evaluate the weights that "
        "init.weights names, and train nothing",
        choices=("train", "plan", "evaluate"),
    )
    objective: str | None = key(
        None,
        "the figure that a job returns, which a sweeper such as Optuna optimizes; of a failed job the worst there is. "
        "null: the loss of the last evaluation, else of the last step; of mode=plan the bubble",
        choices=OBJECTIVES,
    )
    stop_sweep_on_failure: bool = key(False, "true: the first job of a sweep that fails is its last")
    launch: str = key(
        "processes",
        "what a rank is: a process, or a thread of this process (for debuggers, notebooks, several stages on one GPU)",
        choices=("processes", "threads"),
    )
    seed: int = key(0, "what weights, masks and the order of samples are derived from; null draws one", at_least=0)
    device: str = key(
        "auto",
        "auto takes GPUs where every rank of a host finds one, and says so where GPUs are left alone",
        choices=("auto", "cpu", "cuda"),
    )
    precision: str = key(
        "fp32", "dtype of the computation (bf16 by autocast)", choices=("fp32", "bf16", "fp64"), later=("fp16",)
    )
    threads_per_worker: int | None = key(
        None, "threads of torch in each worker; null: OMP_NUM_THREADS, else cores / workers", at_least=1, at_most=1024
    )
    pin_workers: str = key(
        "waiting",
        "when a worker process keeps to its share of the cores, neighbours to different ones. waiting: while it waits "
        "for a message between CPUs, as long as these cores are mostly idle. always: no core can help another then. "
        "never: to choose cores from outside while it runs (taskset)",
        choices=("never", "waiting", "always"),
    )
    timeout_s: float = key(
        600.0, "the longest wait for another rank, in seconds", above=0, at_most=2e6
    )  # 23 days; the system's calls take milliseconds in 32 bits
    transport: str = key(
        "auto",
        "what carries messages; auto takes what fits: between CPU processes shared_memory on one Linux host, else "
        "gloo, to whose ports every user of the host can connect; between GPUs nccl; with launch=threads, threads",
        choices=TRANSPORT_CHOICES,
    )
    recompute: str = key(
        "none",
        "which activations are computed again in the backward; only none so far",
        choices=("none",),
        later=("all", "full", "selective"),
    )
    resume: str | None = key(
        None,
        "go on from the newest whole checkpoint of a run: its folder, in which the run goes on; auto: of the folder "
        "that hydra.run.dir names, where it has one, else begin",
    )
    save: str = key(
        "final",
        "which weights the run leaves as model.safetensors. final: the last ones; best: those of the evaluation with "
        "the lowest loss; never: none",
        choices=("final", "best", "never"),
    )
    shard_optimizer: bool = key(
        False,
        "true: each replica updates 1/R of the parameters and keeps the optimizer's state of these (ZeRO stage 1)",
    )
    schedule: dict[str, Any] = field(
        default_factory=dict,
        metadata=about("the order of each rank's forwards and backwards; drawn in docs/schedules.md"),
    )
    model: dict[str, Any] = field(default_factory=dict, metadata=about("a model of the engine, or yours"))
    partition: dict[str, Any] = field(default_factory=dict, metadata=about("where the model is cut into stages"))
    data: dict[str, Any] = field(default_factory=dict, metadata=about("a data set of the engine, or yours"))
    optimizer: dict[str, Any] = field(default_factory=dict, metadata=about("a class of torch's, or yours"))
    lr_scheduler: dict[str, Any] | None = field(
        default=None, metadata=about("a class of torch's, or yours; it counts optimizer steps")
    )
    allreduce: AllReduceSettings = field(default_factory=AllReduceSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    data_parallel: DataParallelSettings = field(default_factory=DataParallelSettings)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    init: Init = field(default_factory=Init)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    trace: Trace = field(default_factory=Trace)
    delay: Delay = field(default_factory=Delay)
    plan: PlanSettings = field(default_factory=PlanSettings)

    @property
    def schedule_options(self) -> dict[str, Any]:
        """The schedule's own options; those left at null are taken out."""
        return {key: value for key, value in self.schedule.items() if key != "name" and value is not None}

    @property
    def divided(self) -> bool:
        """Whether the optimizer is divided over replicas that update together, so that parameters are gathered."""
        divides = ALLREDUCES[self.allreduce.name].division is not None
        return not self.data_parallel.asynchronous and (self.shard_optimizer or divides)

    @property
    def starts_ranks(self) -> bool:
        """Whether workers are started: to train, or to evaluate."""
        return self.mode != "plan"

    @property
    def world(self) -> int:
        """The number of ranks over all replicas, P x R."""
        return self.pipeline.ranks * self.data_parallel.replicas


COST = "of one {} in mode=plan: a number, a list of one per rank's slice of the model, or of one per stage"

# The engine's own keys inside groups; every other key there goes to the `_target_`, or to the schedule.
GROUP_KEYS: dict[str, Key] = {
    "schedule.chunks": Key("stages per rank, of interleaved_1f1b and looped_bfs"),
    "schedule.waves": Key("two stages per rank and wave, of hanayo"),
    "schedule.vertical_sync": Key("of pipedream: every stage reads the version that was newest at the first stage"),
    "schedule.path": Key("of csv: a program in the dialect of torch.distributed.pipelining"),
    "model.loss": Key("section: `_target_` and keywords of the loss"),
    "model.loss_additive": Key("false: train, on parts of the batch, a loss that is no sum over samples", kind=bool),
    "model.split": Key("names of the layers that begin stages 1, 2, ... where partition=model"),
    "model.overlap": Key("section: a function that does a forward and another micro-batch's backward together"),
    "partition.name": Key(
        "set by the choice of the group: model takes the model's own split where it has one for so many stages, else "
        "parameters; manual takes partition.split; uniform counts layers, parameters counts parameters",
        choices=("model", "manual", "uniform", "parameters"),
        later=("time",),
    ),
    "partition.split": Key("names of the layers that begin stages 1, 2, ..., of partition=manual"),
    "data.workers": Key(
        "processes that load samples, for each rank that needs them", kind=int, at_least=0, at_most=256
    ),
    "data.pin_memory": Key("load into page-locked memory; auto: where the device is a GPU"),
    "data.shuffle": Key("draw a new order of the samples for each epoch", kind=bool),
    "data.drop_last": Key("true: leave out the last batch of an epoch where it is short", kind=bool),
    "data.evaluation": Key("the keys of data that are different for held-out samples; null: no evaluation"),
    "plan.costs.forward": Key(COST.format("forward")),
    "plan.costs.input_backward": Key(COST.format("input gradient (I, the first half of a backward)")),
    "plan.costs.weight_backward": Key(COST.format("weight gradient (W, the second half)")),
    "plan.costs.transfer": Key("of one message in mode=plan: a number, or a list of one per edge between stages"),
}


def _walk(schema: Any, above: str = "") -> Iterator[tuple[str, Key]]:
    for each in fields(schema):
        path = f"{above}{each.name}"
        if is_dataclass(each.default_factory):
            yield from _walk(each.default_factory, f"{path}.")
        else:
            yield path, each.metadata["key"]


KEYS: dict[str, Key] = {**dict(_walk(Settings)), **GROUP_KEYS}  # dotted path -> what is known of it
