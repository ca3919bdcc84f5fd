"""scripts/bench data_parallel [resnet50] [gpt] [--ways WAY ...] [--replicas N] [--repeats N] [--json FILE]

A data-parallel training step in every way there is, on the same model, batch and optimizer, in one invocation and in
turn: the engine with each `allreduce`, a plain loop with engine.DistributedOptimizer, the same loop with torch's
DistributedDataParallel, and the loop without any exchange, which the others are compared with. One thread per replica.
Torch's messages travel by gloo on loopback; ours as the engine chooses by itself, and in the rows so named by gloo too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import GPT, RESNET50, Case
from benchmarks.figures import step_time
from benchmarks.link import aligned
from benchmarks.options import parser
from benchmarks.sides import LOOPBACK, ours_command, run_together

STEPS, WARMUP = 14, 4
MODELS = {"resnet50": RESNET50.choices, "gpt": GPT.choices}
LOOPS = ("none", "ddp", "distributed_optimizer")  # see data_parallel_worker
ALGORITHMS = ("ring", "halving_doubling", "tree", "native", "parameter_server", "sharded_parameter_server")
BY_GLOO = " by gloo"
ENGINE = (*ALGORITHMS, "ring" + BY_GLOO)
WAYS = (*LOOPS, *ENGINE)


def case_of(model: str, replicas: int, way: str = "ring") -> Case:
    """One stage, no micro-batches: data parallelism alone."""
    transport = "gloo" if way.endswith(BY_GLOO) else "auto"
    ours = (f"data_parallel.replicas={replicas}", f"allreduce={way.removesuffix(BY_GLOO)}", f"transport={transport}")
    choices = (*MODELS[model], *ours)
    return Case(model, "gpipe", ranks=1, microbatches=1, steps=STEPS, choices=choices, warmup=WARMUP)


def seconds(model: str, way: str, replicas: int) -> float:
    """One run: the median step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if way in ENGINE:
            run_together(
                [[*ours_command(case_of(model, replicas, way)), f"hydra.run.dir={name}/run"]], folder, LOOPBACK
            )
            return float(json.loads((folder / "run" / "summary.json").read_text())["step_time"]["median"])
        run_together([loop_command(model, way, replicas, folder)], folder, LOOPBACK)
        return step_time(json.loads((folder / "ends.json").read_text()), WARMUP)


def loop_command(model: str, way: str, replicas: int, folder: Path) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={replicas}"]
    return [sys.executable, *launcher, "-m", "benchmarks.data_parallel_worker", model, way, str(folder)]


def table(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Milliseconds per step, and as multiples of the loop without exchange and of DistributedDataParallel."""
    lines = [["model", "way", "ms", "x none", "x ddp"]]
    for model, ways in rows.items():
        medians = {way: median(times) for way, times in ways.items()}
        for way, value in medians.items():
            ratios = [f"{value / medians[other]:.3f}" if other in medians else "-" for other in ("none", "ddp")]
            lines.append([model, way, f"{value * 1e3:.1f}", *ratios])
    return aligned(lines)


def main(arguments: Sequence[str]) -> None:
    options = parser("data_parallel", __doc__)
    options.add_argument("models", nargs="*", metavar="model", help=f"{', '.join(MODELS)} (default: all)")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options.add_argument("--replicas", type=int, default=2)
    given = options.parse_args(arguments)
    if unknown := [model for model in given.models if model not in MODELS]:
        options.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    rows: dict[str, dict[str, list[float]]] = {m: {w: [] for w in given.ways} for m in given.models or MODELS}
    for repeat in range(given.repeats):
        for model, ways in rows.items():
            for way, times in ways.items():
                print(f"{model} {way}: run {repeat + 1} of {given.repeats}", file=sys.stderr, flush=True)
                times.append(seconds(model, way, given.replicas))
    print(table(rows))
    if given.json:
        result: dict[str, Any] = {"replicas": given.replicas, "step_s": rows}
        given.json.write_text(json.dumps(result, indent=1))
