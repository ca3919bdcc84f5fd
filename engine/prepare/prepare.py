"""From settings to a job: everything is decided, checked and proven here, before any worker starts.

    model under FakeTensorMode ─> split ─┐
    data set: length, one item ──────────┼─> micro-batch sizes that can occur ─> programs (verified) and message tables
    schedule ─> placement ───────────────┘

Every mistake a user can make in model, data, split or sizes is a ValueError that names the value and the remedy.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.checkpoint.resume import check
from engine.checkpoint.store import Checkpoint
from engine.job import Job, MessageSpec
from engine.pipeline.batches.microbatch import sizes
from engine.pipeline.cutting.recording import key_of
from engine.pipeline.inspection.changes import check_changes, check_synchronised
from engine.pipeline.inspection.fake_model import FakeModel, fake_batch
from engine.pipeline.lazy_dynamo import put_off
from engine.pipeline.losses import Loss, make_loss, with_tensors
from engine.pipeline.stage.overlap import make_overlap
from engine.pipeline.ties import check_ties, stage_sets
from engine.plan.actions import Placement
from engine.plan.partition import manual, partition
from engine.plan.programs import StepPrograms
from engine.prepare.additivity import TRIED_ROWS, adds_up
from engine.prepare.devices import choose
from engine.prepare.dry_run import Sample, length_of, sample_of, try_loss, try_update
from engine.prepare.pieces import batches_of, evaluation_pieces, per_update, steps_of, training_pieces, whole_run
from engine.settings import Settings
from engine.targets import blaming, locate, prepare_import_path
from engine.training.async_window import drains_of, stream_programs, window_lengths
from engine.training.build import DTYPES, autocast_of, model_layers
from engine.training.connect import transport_of
from engine.training.connections import check_open_files, connections
from engine.training.delay import check_delay
from engine.training.replicas.asynchronous_sgd import check_asynchronous_sgd
from engine.training.replicas.reduction import grouped
from engine.training.replicas.sharding import check_sharding
from engine.training.samples.source import dataset
from engine.weights.initial import check_weights
from engine.weights.model_file import unstorable

log = logging.getLogger(__name__)


def prepare(settings: Settings, start_dir: str, run_dir: str, resumed: Checkpoint | None = None) -> Job:
    """The job that `settings` describe, from the start or from a checkpoint on.

    Raises ValueError for every mistake found; starts nothing.
    """
    put_off()
    prepare_import_path(start_dir)
    settings = grouped(replace(settings, device=choose(settings, os.environ, torch.cuda.device_count())))
    transport_of(settings)
    programs = _programs(settings)
    compute = programs.configured
    settings = replace(settings, model=sized_model(settings.model, compute.placement))
    _check_batch(settings)
    check_asynchronous_sgd(settings, compute)
    check_sharding(settings, compute)
    make_overlap(settings.model.get("overlap"))
    loss = make_loss(settings.model.get("loss") or {})
    with blaming(settings.data, "data"):
        lengths, items, data = _measure_data(settings)
    device, dtype = torch.device(settings.device), DTYPES[settings.precision]
    with blaming(settings.model, "model"):
        example = _example(settings, items["train"], device, dtype)
        named = settings.partition.get("split") or ()
        model = FakeModel(
            lambda: model_layers(settings.model, example, named, device, dtype), device, dtype,
            autocast_of(settings.precision, device),
        )  # fmt: skip
    _check_weights(settings, model, lengths, start_dir)
    settings = replace(settings, lr_scheduler=whole_run(settings, lengths["train"]))
    start = _check_resumed(resumed, settings, model, lengths["train"])
    split = choose_split(settings, model, compute.placement.stages)
    apart, name = settings.data_parallel.asynchronous, compute.name
    check_ties(
        stage_sets(model.ties, split),
        compute.asynchronous or apart,
        "data_parallel.mode=async" if apart else f"schedule={name}",
    )
    pieces = {
        "train": training_pieces(settings, programs, lengths["train"]),
        "eval": evaluation_pieces(settings, lengths["eval"]),
    }
    with blaming(settings.model, "model"), blaming(with_tensors(settings.model["loss"]), "model.loss"):
        boundaries = {
            (mode, rows): model.boundaries(item, rows, split, mode == "train", loss)
            for mode, item in items.items()
            for rows in sorted({rows for piece in pieces[mode] for rows in piece})
        }
        check_synchronised(model.modules, model.names, compute, settings.data_parallel.replicas)
        check_changes(model.changes, model.names, split, compute, settings.data_parallel.replicas)
        random_loss = _try_parts(settings, model, loss, lengths, items, boundaries)
        _check_additive(settings, model, loss, items["train"], data)
    if compute.asynchronous:
        training = _without_drains(settings, programs, lengths["train"], lengths["eval"] > 0, start)
    else:
        training = _step_by_step(settings, programs, {len(piece) for piece in pieces["train"]})
    forward = programs.evaluations()
    job = Job(
        settings=settings,
        placement=compute.placement,
        layers=model.layers(),
        split=split,
        train_samples=lengths["train"],
        eval_samples=lengths["eval"],
        evaluations={count: forward[count] for count in {len(piece) for piece in pieces["eval"]}},
        boundaries=boundaries,
        random_loss=random_loss,
        example=example,
        ties=model.ties,
        start=start,
        resumed=None if resumed is None else str(resumed.folder.absolute()),
        start_dir=start_dir,
        run_dir=run_dir,
        **training,
    )
    found = connections(job)
    check_delay(job, found.edges)
    check_open_files(job, found)
    return job


def _example(settings: Settings, sample: Sample, device: torch.device, dtype: torch.dtype) -> str:
    """The input of a micro-batch of the configured size, in words."""
    smallest = sizes(settings.train.global_batch_size, settings.data_parallel.replicas)[-1]
    rows = smallest // (settings.train.accumulate * per_update(settings))
    with FakeTensorMode():
        return key_of(fake_batch(sample[0], max(rows, 1), device, dtype), training=True)


def _check_weights(settings: Settings, model: FakeModel, lengths: Mapping[str, int], start_dir: str) -> None:
    """The weights that a run begins with and leaves must fit the model, and there must be what chooses among them."""
    evaluates = lengths["eval"] > 0 and (settings.eval.every != 0 or settings.mode == "evaluate")
    if settings.mode == "evaluate" and not evaluates:
        raise ValueError("mode=evaluate needs held-out samples: give data.evaluation, as conf/data/digits.yaml does")
    state = model.state
    check_weights(settings.init, start_dir, state)
    if settings.checkpoint.best and not evaluates:
        raise ValueError("checkpoint.best=true needs evaluations: give data.evaluation, and eval.every above 0 or null")
    if settings.mode != "train" or settings.save == "never":
        return
    if settings.save == "best" and not evaluates:
        raise ValueError(
            f"save=best keeps the weights of the best evaluation, and there is none (data.evaluation has "
            f"{lengths['eval']} samples, eval.every={settings.eval.every}): have some, or use save=final"
        )
    if wrong := unstorable(state):
        raise ValueError(f"model.safetensors cannot hold {wrong}: set save=never, or give the model other buffers")


def _programs(settings: Settings) -> StepPrograms:
    """The programs that the configured schedule may run."""
    return StepPrograms(
        settings.schedule["name"],
        settings.pipeline.ranks,
        settings.pipeline.microbatches,
        settings.schedule_options,
        settings.data_parallel.replicas,
        settings.divided,
    )


def _step_by_step(settings: Settings, programs: StepPrograms, microbatches: Iterable[int]) -> dict[str, Any]:
    """What a job holds of a synchronous schedule: a program for each number of micro-batches that can occur."""
    steps, passes = programs.steps(), programs.passes()
    whole = {count: steps[count] for count in microbatches}
    return {
        "compute": programs.configured,
        "steps": {0: programs.idle(whole.values())} | whole,
        "passes": {count: passes[count] for count in whole} if settings.train.accumulate > 1 else {},
    }


def _without_drains(
    settings: Settings, programs: StepPrograms, samples: int, evaluates: bool, start: int
) -> dict[str, Any]:
    """What a job holds of an asynchronous schedule: a program for each window between two drains."""
    batches = batches_of(settings, samples)
    steps, drains = steps_of(settings, batches), drains_of(settings, batches, evaluates)
    windows = window_lengths(steps, drains, start)
    # Where all steps are done there is nothing to run, and the last one's program stands for those that ran.
    streams = stream_programs(settings, programs, batches, windows or (1,), min(start, steps - 1))
    first = programs.stream(next(iter(streams)))
    return {"compute": first, "steps": {}, "passes": {}, "windows": windows, "streams": streams}


def _check_resumed(resumed: Checkpoint | None, settings: Settings, model: FakeModel, samples: int) -> int:
    """Steps done before; ValueError where the run cannot go on from there."""
    if resumed is None:
        return 0
    parameters = {
        f"{name}.{key}": tuple(parameter.shape)
        for name, module in zip(model.names, model.modules, strict=True)
        for key, parameter in module.named_parameters()
    }
    check(resumed.manifest, settings, steps_of(settings, batches_of(settings, samples)), samples, parameters)
    return resumed.manifest.step


def sized_model(config: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    """The model's keywords, with `stages` and `chunks` filled in where its function takes them and they are unset."""
    filled = dict(config)
    target = locate(str(config.get("_target_")), "model")
    try:
        accepted = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return filled
    given = {"stages": placement.stages, "chunks": placement.stages // placement.ranks}
    for key, value in given.items():
        if key in accepted and filled.get(key) is None:
            filled[key] = value
    return filled


def choose_split(settings: Settings, model: FakeModel, stages: int) -> tuple[int, ...]:
    """Index of the first layer of each stage."""
    name, own = settings.partition.get("name", "model"), settings.model.get("split")
    if stages > len(model.names):
        raise ValueError(
            f"{stages} stages, but the model has {len(model.names)} layers ({', '.join(model.names[:8])}, ...): "
            f"lower pipeline.ranks to at most {len(model.names)}, or give the model more layers"
        )
    if name == "manual":
        wanted = settings.partition.get("split")
        if wanted is None:
            raise ValueError(
                "partition=manual needs partition.split=[LAYER,...]: the layers that begin stages 1, 2, ..."
            )
        split = manual(model.names, wanted)
        if len(split) != stages:
            raise ValueError(
                f"partition.split={list(wanted)} makes {len(split)} stages, but the run has {stages}; "
                f"name {stages - 1} layers, or change pipeline.ranks"
            )
        return split
    if name == "model" and own is not None and len(own) + 1 == stages:
        try:
            return manual(model.names, own)
        except ValueError as error:
            raise ValueError(
                f"model.split={list(own)} does not fit this model: {error}. Where it came with another model's "
                "configuration, set model.split=null, or choose partition=parameters"
            ) from error
    costs = [1.0] * len(model.names) if name == "uniform" else [float(n) for n in model.parameters]
    return partition(costs, stages)


def _check_batch(settings: Settings) -> None:
    """M must fit a replica's share of the configured batch, in every pass."""
    train, replicas, wanted = settings.train, settings.data_parallel.replicas, per_update(settings)
    share = sizes(train.global_batch_size, replicas)[-1]
    smallest = share // train.accumulate
    if smallest < wanted:
        raise ValueError(
            f"pipeline.microbatches={wanted} is more than the {smallest} samples that a replica has in one pass "
            f"(train.global_batch_size={train.global_batch_size} over {replicas} replicas, "
            f"train.accumulate={train.accumulate}); use at most {max(smallest, 1)}, or a larger batch"
        )


def _measure_data(settings: Settings) -> tuple[dict[str, int], dict[str, Sample], Any]:
    """Lengths and first items of the data sets, and the training data itself.

    "train" and "eval" stand for training and held-out data; without the latter its length is 0, and it has no item.
    """
    lengths, items, sources = {"train": 0, "eval": 0}, {}, {}
    for mode, where in (("train", "data"), ("eval", "data.evaluation")):
        source = dataset(settings.data, evaluation=mode == "eval")
        if source is not None:
            sources[mode] = source
            lengths[mode] = length_of(source, where)
            items[mode] = sample_of(source, where)
    samples, replicas = lengths["train"], settings.data_parallel.replicas
    size = settings.train.global_batch_size
    if settings.data.get("drop_last") and samples < size:
        raise ValueError(
            f"data.drop_last=true leaves no batch of the {samples} samples that data has: "
            f"train.global_batch_size={size} is more; use at most {samples}, or data.drop_last=false"
        )
    if samples < replicas:
        raise ValueError(
            f"data has {samples} samples for data_parallel.replicas={replicas}; use at most {samples} replicas"
        )
    return lengths, items, sources["train"]


def _try_parts(
    settings: Settings,
    model: FakeModel,
    loss: Loss,
    lengths: Mapping[str, int],
    items: Mapping[str, Sample],
    boundaries: Mapping[tuple[str, int], tuple[MessageSpec, ...]],
) -> bool:
    """Try loss, optimizer and scheduler on real numbers; whether the loss draws random ones.

    Fake tensors do not show losses that look at values, nor optimizers that need more than gradients.
    """
    drawn = []
    if settings.device == "cpu":
        autocast = autocast_of(settings.precision, torch.device("cpu"))
        for mode, (_, target) in items.items():
            smallest = min(rows for each, rows in boundaries if each == mode)
            output = boundaries[mode, smallest][-1]
            drawn.append(try_loss(loss, output, target, smallest, DTYPES[settings.precision], autocast))
    try_update(settings, model.trainable, steps_of(settings, batches_of(settings, lengths["train"])))
    return any(drawn) if drawn else model.random_loss


def _check_additive(settings: Settings, model: FakeModel, loss: Loss, sample: Sample, data: Any) -> None:
    """A loss of a whole batch that is not made of its samples' is another one for each way to divide the batch."""
    replicas = 1 if settings.data_parallel.asynchronous else settings.data_parallel.replicas
    divided = {
        "pipeline.microbatches": per_update(settings),
        "data_parallel.replicas": replicas,
        "train.accumulate": settings.train.accumulate,
    }
    rows = min(TRIED_ROWS, len(data) // 2)
    if loss.additive or rows == 0 or max(divided.values()) == 1:
        return
    try:
        one, whole = model.output(sample, rows), model.output(sample, 2 * rows)
    except ValueError:  # sizes of batches that the model does not take, and that do not occur
        return
    found = adds_up(loss, one, whole, data, rows, DTYPES[settings.precision])
    if found.untold is not None:
        log.warning("not tried whether model.loss adds up over samples, as a divided batch needs: %s", found.untold)
    if not found.differs:
        return
    said = (
        f"model.loss does not add up over samples ({2 * rows} at once give {found.at_once:.6g}, in parts "
        f"{found.in_parts:.6g})"
    )
    if settings.model.get("loss_additive", True):
        parts = ", ".join(f"{key}={value}" for key, value in divided.items() if value > 1)
        raise ValueError(
            f"{said}, so {parts} would make another loss of it. Return (sum, count), where both add up, or give it "
            "count(target); let it move what it keeps from call to call only `if self.training`; where it compares "
            "samples of a batch set these to 1; model.loss_additive=false trains on the parts all the same"
        )
    log.warning("%s; trained is the loss of the parts, which depends on how the batch is divided", said)
