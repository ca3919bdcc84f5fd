"""What of a step becomes a point of a curve, and how curves are put together on TensorBoard's page of custom scalars.

stack/rank{r}/{name}    the shares of the step of this name and of all before it, so that bands between them stack
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.account.bubble import Account
from engine.account.measure import fractions
from engine.account.overlap import Overlap
from engine.account.records.gather import Step
from engine.account.replay.waterfall import BARS, Waterfall
from engine.categories import BY_NAME, NAMES
from engine.job import Job
from engine.plan.timeline import COMPUTE_KINDS, Kind, Timeline

_GROUND = "ground"  # the lower edge of the lowest band: a curve that is 0


def of_step(step: Step) -> dict[str, float | None]:
    """Tags and values of every step, traced or not: training and throughput."""
    return {
        "train/loss": step.loss,
        "train/lr": step.lr,
        "train/grad_norm": step.grad_norm,
        "throughput/samples_per_second": step.samples_per_second,
    }


def of_ranks(step: Step) -> dict[str, float | None]:
    """Tags and values of what each rank kept, and of an asynchronous schedule of the versions of weights."""
    values: dict[str, float | None] = {}
    for rank, (peak, peak_bytes) in enumerate(zip(step.peak_in_flight, step.peak_activation_bytes, strict=True)):
        values[f"memory/rank{rank}/peak_in_flight"] = peak
        values[f"memory/rank{rank}/peak_activation_bytes"] = peak_bytes
    values |= {f"memory/rank{rank}/weight_versions": kept for rank, kept in enumerate(step.weight_versions or ())}
    values |= {f"staleness/stage{stage}": updates for stage, updates in enumerate(step.staleness or ())}
    for replica, own in enumerate(step.replicas):
        values[f"staleness/replica{replica}"] = max(own.staleness, default=None)
        values[f"throughput/replica{replica}/steps_per_second"] = 1 / own.seconds if own.seconds else None
    return values


def of_account(job: Job, account: Account) -> dict[str, float]:
    """Tags and values of the measured bubble, and of each category's share of a rank's window, alone and stacked.

    Shares are means over replicas.
    """
    shares = fractions(account.table)
    values = {"bubble/measured": 1 - float(shares[:, NAMES.index("compute")].mean())}
    for rank, row in enumerate(shares.reshape(job.replicas, job.ranks, len(NAMES)).mean(axis=0)):
        parts = dict(zip(NAMES, row.tolist(), strict=True))
        values |= {f"bubble/rank{rank}/{name}": share for name, share in parts.items() if BY_NAME[name].bubble}
        tops = dict(zip(NAMES, np.cumsum(row).tolist(), strict=True))
        values |= {_stack(rank, name): top for name, top in ({_GROUND: 0.0} | tops).items()}
    return values


def of_barrier(waiting: Sequence[float]) -> dict[str, float]:
    """Tags and values of barrier/replica{r}: seconds of the step that a replica waited for slower ones."""
    return {f"barrier/replica{replica}": seconds for replica, seconds in enumerate(waiting)}


def of_waterfall(waterfall: Waterfall | None) -> dict[str, float]:
    """Tags and values of waterfall/{bar}: seconds of the step."""
    if waterfall is None:
        return {}
    return {f"waterfall/{name}": bar * 1e-9 for name, bar in zip(BARS, waterfall.bars, strict=True)}


def of_overlap(overlap: Overlap | None) -> dict[str, float | None]:
    """Tags and values of what computation hid of reductions.

    reduction/hidden: what was hidden of what could be; reduction/rank{r}/exposed: seconds that nothing hid, by world
    rank.
    """
    if overlap is None:
        return {}
    exposed = ((overlap.total - overlap.hidden) * 1e-9).tolist()
    return {"reduction/hidden": overlap.share} | {f"reduction/rank{r}/exposed": s for r, s in enumerate(exposed)}


def action_times(timeline: Timeline) -> dict[str, npt.NDArray[np.float64]]:
    """Milliseconds that computations took, by stage and kind, for histograms."""
    found = {}
    for stage in np.unique(timeline.stage[timeline.stage >= 0]).tolist():
        for kind in COMPUTE_KINDS:
            here = (timeline.stage == stage) & (timeline.kind == kind)
            if here.any():
                found[f"actions/stage{stage}/{Kind(kind).name}"] = (timeline.end - timeline.start)[here] * 1e-6
    return found


def layout(job: Job) -> dict[str, dict[str, Any]]:
    """Category -> chart -> the regular expressions of its curves, or bands (curve, lower edge, upper edge).

    TensorBoard merges the layouts of all runs that it shows, so a chart of one name must be the same in all of them.
    """
    edges = (_GROUND, *NAMES)
    stacks = {  # TensorBoard shows charts with bands last to first
        f"rank {rank}: shares of the step, stacked": [
            (_stack(rank, top), _stack(rank, bottom), _stack(rank, top)) for bottom, top in pairwise(edges)
        ]
        for rank in reversed(range(job.ranks))
    }
    return {
        "Bubble": {
            "ideal, predicted, measured": [f"bubble/{name}$" for name in ("ideal", "predicted", "measured")],
            "bars of the waterfall, seconds": ["waterfall/"],
        },
        "Where a step goes": stacks,
        "Training": {"loss": ["train/loss$", "eval/loss$"], "samples per second": ["throughput/samples_per_second$"]},
        "Memory": {
            "micro-batches in flight": [r"memory/rank\d+/peak_in_flight$"],
            "bytes kept for backwards": [r"memory/rank\d+/peak_activation_bytes$"],
        },
    }


def _stack(rank: int, name: str) -> str:
    return f"stack/rank{rank}/{name}"
