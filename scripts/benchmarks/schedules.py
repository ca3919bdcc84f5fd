"""scripts/bench schedules [--only NAME ...] [--microbatches 8 16] [--repeats N] [--json FILE]

Every synchronous schedule on stages that sleep (4 ranks, 5 ms for each of F, I and W of a rank's slice), against the
makespan simulated at the durations that the same run measured, and against torch.distributed.pipelining where it has
the schedule. Says at the end how much faster the best zero-bubble schedule is than 1F1B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import FIELD, SYNCHRONOUS
from benchmarks.figures import table
from benchmarks.measure import measure, written
from benchmarks.options import parser

BORROWED = "interleaved_zb"
ZERO_BUBBLE = ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe", "dualpipe_v", BORROWED)
WANTED = 0.7  # the most of the peer's excess that ours may have


def main(arguments: Sequence[str]) -> None:
    options = parser("schedules", __doc__)
    names = (*SYNCHRONOUS, BORROWED)
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    options.add_argument("--microbatches", nargs="+", type=int, choices=sorted(FIELD), default=sorted(FIELD))
    given = options.parse_args(arguments)
    cases = [case for m in given.microbatches for case in FIELD[m] if case.name.split()[0] in given.only]
    rows = {case.name: measure(case, given.repeats) for case in cases}
    said = conclusions(rows)
    print("\n".join([table(rows), "", *said]))
    if given.json:
        given.json.write_text(written(given.repeats, rows, conclusions=said))


def conclusions(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """For each number of micro-batches what zero bubbles gain over 1F1B, and where ours exceeds too much."""
    said = []
    for m in dict.fromkeys(name.split()[1] for name in rows):
        quick = [name for name in (f"{schedule} {m}" for schedule in ZERO_BUBBLE) if name in rows]
        if f"1f1b {m}" in rows and quick:
            best = min(quick, key=lambda name: rows[name]["ours"]["median_s"])
            said.append(gain(best, rows[best]["ours"], f"1f1b {m}", rows[f"1f1b {m}"]["ours"]))
    shares = {name: row["share"] for name, row in rows.items() if row["share"] is not None}
    if over := [f"{name} {share:.2f}" for name, share in shares.items() if share > WANTED]:
        said.append(f"more than {WANTED} of the peer's excess: {', '.join(over)}")
    elif shares:
        said.append(f"at most {WANTED} of the peer's excess everywhere (largest: {max(shares.values()):.2f})")
    return said


def gain(name: str, quick: Mapping[str, float], than: str, slow: Mapping[str, float]) -> str:
    """How much faster one schedule ran than another, and by simulation."""
    measured, simulated = (slow[key] / quick[key] for key in ("median_s", "critical_path_s"))
    return (
        f"{name} takes {quick['median_s'] * 1e3:.1f} ms, {than} {slow['median_s'] * 1e3:.1f} ms: "
        f"{measured:.3f} times as fast (simulated at the measured durations {simulated:.3f})"
    )
