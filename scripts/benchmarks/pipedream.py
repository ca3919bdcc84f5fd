"""scripts/bench pipedream [--repeats N] [--json FILE]

The asynchronous schedules on 4 ranks whose stages sleep 20 ms for each of F, I and W: the bubble of their steady state
(the first and last 4 updates left out) beyond what messages and the sleeps themselves account for. That is the bubble
simulated at the durations (a sleep takes longer than it was told, and now and then much longer) and message times that
the same run measured.
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

WANTED = 0.02  # the most that a steady state may lose otherwise
RANKS = 4
SHARED = (
    *("model=sleep", "model.forward_ms=20", "model.input_backward_ms=20", "model.weight_backward_ms=20"),
    *("data=synthetic", "data.shape=[16]", "train.global_batch_size=8", "optimizer=sgd", "eval.every=0"),
    *(f"pipeline.ranks={RANKS}", "pipeline.microbatches=4", "device=cpu", "threads_per_worker=1"),
)
ROWS = {
    "pipedream": ("schedule=pipedream", "train.steps=60"),
    "vertical sync": ("schedule=pipedream", "schedule.vertical_sync=true", "train.steps=60"),
    "pipedream_2bw": ("schedule=pipedream_2bw", "train.steps=20"),
}


def run(choices: Sequence[str]) -> dict[str, Any]:
    """The summary of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "engine", *SHARED, *choices, f"hydra.run.dir={folder / 'run'}"]
        run_together([command], folder, LOOPBACK)
        found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
        return found


def figures(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the runs of one row; `beyond`: what neither imbalance, nor sleeps, nor messages explain."""
    explained = [each["asynchronous"]["predicted_with_variation"] for each in summaries]
    measured = [each["bubble"]["measured"] for each in summaries]
    return {
        "predicted": median(each["bubble"]["predicted"] for each in summaries),
        "with_transfer": median(each["asynchronous"]["predicted_with_transfer"] for each in summaries),
        "with_variation": median(explained),
        "measured": median(measured),
        "beyond": median(a - b for a, b in zip(measured, explained, strict=True)),
        "beyond_ms": median(
            (a - b) * each["step_time"]["median"] * 1e3
            for a, b, each in zip(measured, explained, summaries, strict=True)
        ),
        "weight_versions": summaries[-1]["weight_versions"],
        "staleness": summaries[-1]["staleness"],
    }


def verdict(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Which steady states lose too much, if any."""
    over = [f"{name} {row['beyond']:.3f}" for name, row in rows.items() if row["beyond"] >= WANTED]
    return f"{WANTED} or more beyond transfer and sleep: {', '.join(over) if over else 'none'}"


def main(arguments: Sequence[str]) -> None:
    options = parser("pipedream", __doc__)
    given = options.parse_args(arguments)
    rows = {}
    for name, choices in ROWS.items():
        print(f"{name}: {given.repeats} runs", file=sys.stderr, flush=True)
        rows[name] = figures([run(choices) for _ in range(given.repeats)])
    shown = ("predicted", "with_transfer", "with_variation", "measured", "beyond")
    head = ["", *(name.replace("_", " ") for name in shown), "ms per update", "versions kept", "updates behind"]
    lines = [
        [
            name,
            *(percent(row[key]) for key in shown),
            f"{row['beyond_ms']:.2f}",
            *(" ".join(map(str, row[key])) for key in ("weight_versions", "staleness")),
        ]
        for name, row in rows.items()
    ]
    print("\n".join([table([head, *lines]), "", verdict(rows)]))
    if given.json:
        given.json.write_text(json.dumps({"repeats": given.repeats, "rows": rows}, indent=1))
