"""scripts/bench [sleep] [tiny] [resnet50] [gpt] [--repeats N] [--json FILE]
scripts/bench schedules | scale | allreduce | data_parallel | drawbacks | waterfall | tracing | pipedream | overlap |
whatif | startup

Runs the engine, torch.distributed.pipelining and one plain process in turn, N times over, so that a change of the
machine's mood meets all of them. A step's time is, on every side, the median period between consecutive step ends of
the first rank (the whole process) after a warm-up, without barriers. One thread per worker, SGD. The peer's messages
travel by gloo on loopback; ours as the engine chooses by itself, and in the rows so named by gloo too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from benchmarks.cases import GROUPS
from benchmarks.figures import table
from benchmarks.measure import measure, written
from benchmarks.options import parser

# Benchmarks of their own, each with a `main(arguments)`.
COMMANDS = {
    name: f"benchmarks.{name}"
    for name in (
        *("schedules", "scale", "allreduce", "data_parallel", "drawbacks"),
        *("waterfall", "tracing", "pipedream", "overlap", "whatif", "startup"),
    )
}


def main(arguments: Sequence[str]) -> None:
    options = parser("", __doc__)
    options.add_argument("groups", nargs="*", metavar="row", help=f"{', '.join(GROUPS)} (default: all)")
    given = options.parse_args(arguments)
    if unknown := [group for group in given.groups if group not in GROUPS]:
        options.error(f"no row {', '.join(unknown)}; there are {', '.join(GROUPS)}")

    wanted = [case for group in given.groups or GROUPS for case in GROUPS[group]]
    results = {case.name: measure(case, given.repeats) for case in wanted}
    print(table(results))
    for name, result in results.items():
        for side, command in result["commands"].items():
            print(f"{name}, {side}: {command}")
    if given.json:
        given.json.write_text(written(given.repeats, results))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:])
    else:
        main(sys.argv[1:])
