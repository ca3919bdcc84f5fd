"""scripts/bench overlap [SCHEDULE ...] [--repeats N] [--json FILE]

Two replicas of a pipeline whose stages sleep, with the links between the replicas made slow: how much of the reduction
of gradients that could hide behind computation does. A rank has four layers, each a bucket of its own; a bucket sends
two messages, one after the other, of 5 ms each. What could hide is a bound for every order of the buckets
(`engine/account/overlap.py`); it takes the reductions to last as long as they did, so their length is shown beside what
the slow links alone make of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import parser
from benchmarks.sides import LOOPBACK, run_together
from engine.tables import percent, table

WANTED = 0.9  # of what could be hidden, at least
RANKS, LAYERS, LINK_MS, MESSAGES = 4, 4, 5, 2  # per rank, in ms, per bucket: a ring of two sends twice
ALONE = LAYERS * MESSAGES * LINK_MS * 1e-3  # seconds of a rank's reduction if nothing but the links took time
SCHEDULES: dict[str, tuple[str, ...]] = {
    "gpipe": (),
    "1f1b": (),
    "interleaved_1f1b": ("schedule.chunks=2",),
    "zb_h1": (),
    "zb_v": (),
}


def choices(schedule: str, steps: int) -> list[str]:
    """The engine's arguments."""
    each = [2] * (RANKS * LAYERS)
    links = [list(link) for r in range(RANKS) for link in ((r, RANKS + r, LINK_MS), (RANKS + r, r, LINK_MS))]
    parts = ("forward", "input_backward", "weight_backward")
    return [
        *(f"schedule={schedule}", *SCHEDULES[schedule], f"pipeline.ranks={RANKS}", "pipeline.microbatches=8"),
        *("model=sleep", *(f"model.{part}_ms={each}".replace(" ", "") for part in parts)),
        *("data=synthetic", "data.shape=[16]", "train.global_batch_size=16", f"train.steps={steps}", "eval.every=0"),
        *("data_parallel.replicas=2", "allreduce.bucket_bytes=1100", f"delay.links={links}".replace(" ", "")),
        *("optimizer=sgd", "device=cpu", "threads_per_worker=1"),
    ]


def run(schedule: str, steps: int = 8) -> dict[str, Any]:
    """What a run's summary says of the overlap, and how many reductions its trace shows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "engine", *choices(schedule, steps), f"hydra.run.dir={folder / 'run'}"]
        run_together([command], folder, LOOPBACK)
        found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())["allreduce"]["overlap"]
        trace = json.loads((folder / "run" / "trace.json").read_text())["traceEvents"]
        return found | {"slices": sum(event["ph"] == "X" and event["cat"] == "reduce" for event in trace)}


def figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over runs, in seconds and as shares; `least`: the smallest share of any rank."""
    parts = {
        part: median(sum(rank[part] for rank in each["per_rank"]) / len(each["per_rank"]) for each in runs)
        for part in ("total", "hideable", "hidden")
    }
    least = median(min(r["share"] for r in each["per_rank"] if r["share"] is not None) for each in runs)
    share = median(each["share"] for each in runs)
    return parts | {"share": share, "least": least, "slices": runs[-1]["slices"], "runs": list(runs)}


def verdict(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Which schedules hide too little, if any."""
    under = [f"{name} {percent(row['share'])}" for name, row in rows.items() if row["share"] < WANTED]
    return f"less than {percent(WANTED)} of what could be hidden: {', '.join(under) if under else 'none'}"


def main(arguments: Sequence[str]) -> None:
    options = parser("overlap", __doc__)
    options.add_argument("schedules", nargs="*", metavar="schedule", help=f"{', '.join(SCHEDULES)} (default: all)")
    options.add_argument("--steps", type=int, default=8, help="of each run (default 8; the first is left out)")
    given = options.parse_args(arguments)
    if unknown := [name for name in given.schedules if name not in SCHEDULES]:
        options.error(f"no schedule {', '.join(unknown)} here; there are {', '.join(SCHEDULES)}")
    rows = {}
    for name in given.schedules or SCHEDULES:
        print(f"{name}: {given.repeats} runs", file=sys.stderr, flush=True)
        rows[name] = figures([run(name, given.steps) for _ in range(given.repeats)])
    head = ["ms per rank and step", "reduction", "links alone", "could hide", "hidden", "share", "least of a rank",
            "slices in the trace"]  # fmt: skip
    lines = [
        [name, _ms(row["total"]), _ms(ALONE), _ms(row["hideable"]), _ms(row["hidden"]), percent(row["share"]),
         percent(row["least"]), str(row["slices"])]
        for name, row in rows.items()
    ]  # fmt: skip
    print("\n".join([table([head, *lines]), "", verdict(rows)]))
    if given.json:
        given.json.write_text(json.dumps({"repeats": given.repeats, "rows": rows}, indent=1))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
