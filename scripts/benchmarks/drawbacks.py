"""scripts/bench drawbacks [mlp] [resnet50] [--replicas N] [--json FILE]

The six drawbacks of data parallelism in one process, measured on `engine.demos.data_parallel` beside the engine's
own replicas (processes, allreduce=ring) on the same model and batch: what is copied besides gradients, threads, the
reduction that nothing hides, and how unevenly the replicas are busy. One thread per replica.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import RESNET50, Case
from benchmarks.figures import step_time
from benchmarks.layers import batch_of, mean_loss, optimizer_of, whole
from benchmarks.link import aligned
from benchmarks.sides import LOOPBACK, ours_command, run_together
from engine.demos.data_parallel import DataParallel, StepCounters

STEPS, WARMUP = 12, 4
MODELS = {
    "mlp": ("model=mlp", "data=synthetic", "data.shape=[512]", "model.features=512", "model.hidden=512",
            "data.samples=512", "train.global_batch_size=256"),
    "resnet50": RESNET50.choices,
}  # fmt: skip


def case_of(model: str, replicas: int) -> Case:
    """One stage, no micro-batches: data parallelism alone."""
    choices = (*MODELS[model], f"data_parallel.replicas={replicas}")
    return Case(model, "gpipe", ranks=1, microbatches=1, steps=STEPS, choices=choices, warmup=WARMUP)


def in_one_process(case: Case, replicas: int) -> dict[str, Any]:
    """DataParallel on the CPU, as many times as there are replicas."""
    parallel = DataParallel(whole(case.job), [torch.device("cpu")] * replicas)
    optimizer, criterion = optimizer_of(case.job, parallel.module), mean_loss(case.job)
    inputs, targets = batch_of(case.job)
    ends = []
    for step in range(case.steps):
        if step == case.warmup:
            parallel.counters = StepCounters(busy=[0.0] * replicas)
        optimizer.zero_grad()
        parallel.step(inputs, targets, criterion)
        with parallel.counters.phase("optimizer", 0):
            optimizer.step()
        ends.append(time.perf_counter())
    counters, seconds = parallel.counters, step_time(ends, case.warmup)
    copied = {phase: nbytes // counters.steps for phase, nbytes in counters.copied_bytes.items()}
    return {
        "step_s": seconds,
        "batch_copied_bytes": copied["scatter"],
        "weights_copied_bytes": copied["replicate"],
        "threads_started": counters.threads // counters.steps,
        "reduction_exposed_s": counters.seconds["reduce"] / counters.steps,
        "outputs_copied_bytes": copied["gather"],
        "busy_least_over_most": min(counters.busy) / max(counters.busy),
    }


def as_replicas(case: Case) -> dict[str, Any]:
    """The engine: each replica loads its own samples and updates its own weights."""
    with tempfile.TemporaryDirectory() as name:
        run_together([[*ours_command(case), f"hydra.run.dir={name}/run"]], Path(name), LOOPBACK)
        summary = json.loads(Path(name, "run", "summary.json").read_text())
    ranks = summary["bubble"]["per_rank"]
    busy = [rank["compute"] + rank["optimizer"] for rank in ranks]
    return {
        "step_s": summary["step_time"]["median"],
        "batch_copied_bytes": 0,
        "weights_copied_bytes": 0,
        "threads_started": 0,
        "reduction_exposed_s": max(rank["reduce"] for rank in ranks),
        "outputs_copied_bytes": 0,
        "busy_least_over_most": min(busy) / max(busy),
    }


def table(model: str, one: dict[str, Any], many: dict[str, Any]) -> str:
    """A line per drawback, per step."""
    lines = [[model, "one process", "replicas"]]
    for what in one:
        unit = 1e3 if what.endswith("_s") else 1e-6 if what.endswith("_bytes") else 1
        name = what.removesuffix("_s") + " ms" if unit == 1e3 else what.removesuffix("_bytes") + " MB"
        lines.append([name if unit != 1 else what, *(f"{side[what] * unit:.4g}" for side in (one, many))])
    return aligned([[cell.replace("_", " ") for cell in line] for line in lines])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench drawbacks", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("models", nargs="*", metavar="model", help=f"{', '.join(MODELS)} (default: all)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    given = parser.parse_args(arguments)
    if unknown := [model for model in given.models if model not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if given.replicas < 2:
        parser.error(f"--replicas {given.replicas}: at least 2")
    torch.set_num_threads(1)
    results = {}
    for model in given.models or MODELS:
        case = case_of(model, given.replicas)
        results[model] = {"one_process": in_one_process(case, given.replicas), "replicas": as_replicas(case)}
        print(table(model, *results[model].values()), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"replicas": given.replicas, "models": results}, indent=1))
