"""One sentence on a run: the largest cause of its bubble, and what to try.

Causes are compared in seconds of a step, by the bars of its waterfall (`waterfall.py`): removing one saves about what
it is said to cost. Where none has a waterfall, by the account, the mean over ranks; of an asynchronous schedule the
causes that can be simulated by the bubbles of its steady state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from engine.account.measure import Bubbles, Floats, repeated
from engine.account.replay.waterfall import BARS
from engine.categories import BY_NAME, CATEGORIES, NAMES, WATERFALL
from engine.job import Job
from engine.plan.actions import COMPUTE
from engine.plan.schedules import build
from engine.plan.simulate import Costs, figures, simulate
from engine.tables import milliseconds, percent

NEGLIGIBLE = 0.02  # of the step
SLOW = 1.25  # times the mean of the other stages
_BY_MESSAGES = ("fill", "stall", "transfer", "drain")  # categories whose causes a simulation tells apart
_BAR_OF = {bar.category: bar.name for bar in WATERFALL if bar.category}
_CATEGORY_OF = {bar: category for category, bar in _BAR_OF.items()}
WORTH_TRYING = 0.9  # a schedule's ideal bubble relative to the present one, at most


def diagnose(job: Job, bubbles: Bubbles | None) -> str:
    """One sentence on the largest cause of a run's bubble, and what to try.

    It names a slow stage, and a slow replica, even where something else weighs more.
    """
    if bubbles is None:
        return "No step was traced: set trace.every=1 to see where the time goes."
    losses = causes(bubbles)
    step = float(bubbles.seconds.sum(axis=1).mean())
    name = max(losses, key=lambda cause: losses[cause])
    slow = _slow_stage(bubbles)
    if not step or losses[name] < NEGLIGIBLE * step:
        said = f"Nothing stands out: the ranks computed {percent(1 - bubbles.measured)} of the time"
    else:
        share = f"{percent(losses[name] / step)} of the step"
        said = sentence(name, job, bubbles, share)
    if slow is not None and name != "imbalance":
        said += f"; besides, {slow}"
    behind = _slow_replica(bubbles)
    if behind is not None and name != "reduce":
        said += f"; besides, {behind}"
    return said + "."


def causes(bubbles: Bubbles) -> dict[str, float]:
    """Seconds of a step by cause; of equal ones the first is named."""
    if bubbles.waterfall is not None:
        bars = bubbles.waterfall.bars
        first = ("imbalance", "schedule")
        return {name: bars[name] for name in (*first, *(bar for bar in BARS if bar not in (*first, "work")))}
    mean = dict(zip(NAMES, bubbles.seconds.mean(axis=0).tolist(), strict=True))
    own = [c.name for c in CATEGORIES if c.bubble and c.name not in _BY_MESSAGES]
    losses = {_BAR_OF.get(name, name): mean[name] for name in own}
    if bubbles.with_transfer is None:
        return losses | {"transfer": mean["transfer"], "variation": mean["fill"] + mean["stall"] + mean["drain"]}
    assert bubbles.ideal is not None and bubbles.predicted is not None
    step = sum(mean.values())
    simulated = {
        "imbalance": (bubbles.predicted - bubbles.ideal) * step,
        "schedule": bubbles.ideal * step,
        "transfer": (bubbles.with_transfer - bubbles.predicted) * step,
    }
    variation = (bubbles.measured - bubbles.with_transfer) * step - sum(losses.values())
    return simulated | losses | {"variation": max(0.0, variation)}


def _slow_stage(bubbles: Bubbles) -> str | None:
    """The slowest stage in words, where it stands out."""
    costs = bubbles.stage_costs
    if costs is None or len(costs) < 2:
        return None
    slowest = int(costs.argmax())
    others = float(np.delete(costs, slowest).mean())
    if costs[slowest] < SLOW * others:
        return None
    return (
        f"stage {slowest} takes {costs[slowest] / others if others else np.inf:.1f} times as long as the mean of the "
        f"other stages ({milliseconds(costs[slowest])} against {milliseconds(others)} per micro-batch)"
    )


def _slow_replica(bubbles: Bubbles) -> str | None:
    """The slowest replica in words, where waiting for it is most of what reducing costs, and not next to nothing."""
    found = bubbles.waterfall
    if found is None or found.waiting <= max(found.bars["reduce"] / 2, NEGLIGIBLE * found.total):
        return None
    slowest, fastest = max(found.alone), min(found.alone)
    return (
        f"replica {found.alone.index(slowest)} is slower than the others (by itself its pipeline takes "
        f"{milliseconds(slowest)} a step, the fastest {milliseconds(fastest)})"
    )


def _imbalance(job: Job, bubbles: Bubbles, share: str) -> str:
    assert bubbles.stage_costs is not None
    slowest = int(bubbles.stage_costs.argmax())
    slow = _slow_stage(bubbles) or f"stage {slowest} is the slowest, at {milliseconds(bubbles.stage_costs[slowest])}"
    return (
        f"The stages are unequal, which costs {share}: {slow}; move layers away from it "
        f"(partition=manual partition.split=[...]); with equal stages the bubble falls from "
        f"{percent(bubbles.predicted)} to {percent(bubbles.ideal)}"
    )


def _schedule(job: Job, bubbles: Bubbles, share: str) -> str:
    assert bubbles.ideal is not None and bubbles.costs is not None
    said = f"The schedule's own bubble costs {share}"
    pipeline, now = job.settings.pipeline, bubbles.ideal
    own = job.settings.schedule["name"]
    more = 2 * pipeline.microbatches
    tries = ((own, more), ("1f1b", pipeline.microbatches), ("1f1b", more))
    for name, microbatches in tries:
        then = _ideal(job, bubbles.costs, name, microbatches)
        if then is not None and then <= WORTH_TRYING * now:
            with_what = f"{microbatches} micro-batches" if microbatches != pipeline.microbatches else ""
            if name != own:
                with_what = f"schedule={name}" + (f" and {with_what}" if with_what else "")
            falls = f"the ideal bubble falls from {percent(now)} to {percent(then)}"
            return f"{said}: with {with_what} {falls}{_room(job, microbatches)}"
    return f"{said}, and more micro-batches or another schedule of this engine hardly change that"


def _ideal(job: Job, costs: Floats, name: str, microbatches: int) -> float | None:
    """The ideal bubble under another schedule or number of micro-batches; None where it is not defined."""
    options = job.settings.schedule_options if name == job.settings.schedule["name"] else {}
    try:
        program = build(name, job.ranks, microbatches, options)
    except ValueError:
        return None
    if program.stages != job.placement.stages:
        return None
    program = repeated(program, job.settings.train.accumulate)
    mean = costs.mean(axis=(1, 2))
    shape = (len(mean), program.stages, program.microbatches)
    timeline = simulate(program, Costs(np.broadcast_to(mean[:, None, None], shape), np.zeros(program.stages)))
    return figures(program, timeline).bubble_fraction


def _room(job: Job, microbatches: int) -> str:
    """What else it takes, where the batch is too small for so many micro-batches."""
    needed = microbatches * job.replicas * job.settings.train.accumulate
    return (
        f" (it needs train.global_batch_size={needed} or more)" if needed > job.settings.train.global_batch_size else ""
    )


def _transfer(job: Job, bubbles: Bubbles, share: str) -> str:
    edge = int(bubbles.latency.argmax())
    return (
        f"Messages under way cost {share}, the slowest those between stages {edge} and {edge + 1} "
        f"({milliseconds(bubbles.latency[edge])} each); {_remedy(job, 'transfer')}"
    )


def _reduce(job: Job, bubbles: Bubbles, share: str) -> str:
    if job.settings.data_parallel.asynchronous:
        bound = job.settings.data_parallel.max_staleness
        return (
            f"Pushing gradients and waiting for the server's weights costs {share}; push less often with "
            f"train.accumulate={2 * job.settings.train.accumulate}"
            + ("" if bound is None else f", or raise data_parallel.max_staleness={bound}")
        )
    slow = _slow_replica(bubbles)
    if slow is not None:
        return f"Replicas wait for each other, which costs {share}: {slow}; see what else runs where it does"
    whom = "other replicas" if job.placement.copies == 1 else "other copies of a stage"
    return f"Waiting for {whom} (allreduce={job.settings.allreduce.name}) costs {share}; {_remedy(job, 'reduce')}"


def sentence(name: str, job: Job, bubbles: Bubbles, share: str) -> str:
    """What is said of a cause: of a category, or of a bar of one, what it is, where it is most, and its remedy."""
    if name in _SENTENCES:
        return _SENTENCES[name](job, bubbles, share)
    category = BY_NAME[_CATEGORY_OF.get(name, name)]
    column = bubbles.seconds[:, NAMES.index(category.name)]
    most = f"most on rank {int(column.argmax())} ({milliseconds(float(column.max()))})"
    return f"{category.what[0].upper()}{category.what[1:]} costs {share}, {most}; {_remedy(job, category.name)}"


def _remedy(job: Job, name: str) -> str:
    """A category's remedy, with a value to try for each configuration key in it."""
    values = {
        "data.workers": (job.settings.data.get("workers", 0) or 0) + 2,
        "train.accumulate": 2 * job.settings.train.accumulate,
    }
    said = BY_NAME[name].remedy
    for key, value in values.items():
        said = said.replace(key, f"{key}={value}")
    return said


def _variation(job: Job, bubbles: Bubbles, share: str) -> str:
    said = f"Computations of one stage do not all take the same, which costs {share}"
    if bubbles.costs is not None and bubbles.costs.shape[2] > 1:  # of asynchronous schedules stages have one cost each
        beyond = bubbles.costs - np.median(bubbles.costs, axis=2, keepdims=True)
        kind, stage, microbatch = (int(at) for at in np.unravel_index(beyond.argmax(), beyond.shape))
        said += (
            f"; the latest beyond what is usual there is {stage}{COMPUTE[kind].name}{microbatch}, by "
            f"{milliseconds(float(beyond.max()))} on average"
        )
    return f"{said}; samples may differ, or ranks compete for cores: try fewer ranks or replicas on this machine"


_SENTENCES: Mapping[str, Callable[[Job, Bubbles, str], str]] = {
    "imbalance": _imbalance,
    "schedule": _schedule,
    "transfer": _transfer,
    "reduce": _reduce,
    "variation": _variation,
}
