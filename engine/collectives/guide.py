"""The tables of docs/data_parallel.md, computed from the cost model.

python -m engine.collectives.guide          what stands between the page's marks
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.collectives.allreduce.costs import (
    ALGORITHMS,
    EXAMPLE_BYTES,
    EXAMPLE_LINK,
    EXAMPLE_RANKS,
    Terms,
    example_seconds,
    hierarchical,
    parameter_server,
    reduce_broadcast_at_once,
    sharded_parameter_server,
)

SIZES = (2, 4, 8)
OTHERS = {
    "`reduce_broadcast`, all links at once": reduce_broadcast_at_once,
    "a server of its own": parameter_server,
    "a shard on every worker": sharded_parameter_server,
}


def guide() -> str:
    """Return the page's tables as Markdown: the example, and what each algorithm pays for N = 2, 4, 8."""
    return "\n".join([_example(), "", _terms(), ""])


def _example() -> str:
    rows = [[way, f"{seconds * 1e3:.0f} ms"] for way, seconds in example_seconds().items()]
    rows += [
        [f"`{name}`", f"{terms(EXAMPLE_RANKS).seconds(EXAMPLE_BYTES, EXAMPLE_LINK) * 1e3:.1f} ms"]
        for name, terms in ALGORITHMS.items()
    ]
    return _table([f"{EXAMPLE_BYTES / 1e6:.0f} MB, {EXAMPLE_RANKS} GPUs, 16 GB/s", "time"], rows)


def _terms() -> str:
    rows = [[f"`{name}`", *(_shown(terms(size)) for size in SIZES)] for name, terms in ALGORITHMS.items()]
    inside, between = hierarchical(2, 4)
    rows.append(["`hierarchical`, 4 hosts of 2: inside", "", "", _shown(inside)])
    rows.append(["`hierarchical`, 4 hosts of 2: between", "", "", _shown(between)])
    rows += [[name, *(_shown(terms(size)) for size in SIZES)] for name, terms in OTHERS.items()]
    return _table(["α, nβ, nγ are paid", *(f"N = {size}" for size in SIZES)], rows)


def _shown(terms: Terms) -> str:
    return ", ".join(f"{term:.4g}" for term in terms)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(guide(), end="")
