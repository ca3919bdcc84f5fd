"""α, β and γ out of measured times: the formula of each algorithm, fitted to its times over all sizes. Pure.

A fit minimises the squared *relative* error, so that microseconds and seconds weigh alike. γ is measured by itself (the
addition of two tensors): β and γ both multiply the size, so one algorithm's times cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from engine.collectives.allreduce.costs import ALGORITHMS, LinkCosts, Terms


def bus_bandwidth(nbytes: int, ranks: int, seconds: float) -> float:
    """Bytes per second that a link carries in each direction where the fewest bytes are sent: 2(N-1)/N n / t."""
    return 2 * (ranks - 1) / ranks * nbytes / seconds


def fit(terms: Terms, times: Mapping[int, float], gamma: float) -> LinkCosts:
    """α and β, not below 0, for times by size in bytes; at least two sizes."""
    sizes, seconds = np.array(list(times), float), np.array(list(times.values()))
    columns = np.stack([np.full_like(sizes, terms.messages), terms.traffic * sizes], axis=1) / seconds[:, None]
    target = 1 - terms.work * gamma * sizes / seconds
    alpha, beta = np.linalg.lstsq(columns, target, rcond=None)[0]
    if alpha < 0:
        alpha, beta = 0.0, _alone(columns[:, 1], target)
    elif beta < 0:
        alpha, beta = _alone(columns[:, 0], target), 0.0
    return LinkCosts(float(alpha), float(beta), gamma)


def _alone(column: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> float:
    return max(0.0, float(column @ target / (column @ column)))


def fitted(times: Mapping[str, Mapping[int, float]], ranks: int, gamma: float) -> dict[str, Any]:
    """Per algorithm with a formula: its own α and β, and how far its formula is off with everybody's median α and β."""
    own = {name: fit(ALGORITHMS[name](ranks), t, gamma) for name, t in times.items() if name in ALGORITHMS}
    common = LinkCosts(median(link.alpha for link in own.values()), median(link.beta for link in own.values()), gamma)
    return {
        "common": common._asdict(),
        "algorithms": {
            name: {
                "alpha": link.alpha,
                "beta": link.beta,
                "off_own": _off(ALGORITHMS[name](ranks), times[name], link),
                "off_common": _off(ALGORITHMS[name](ranks), times[name], common),
            }
            for name, link in own.items()
        },
    }


def _off(terms: Terms, times: Mapping[int, float], link: LinkCosts) -> float:
    """Median of |formula / measured - 1|."""
    return median(abs(terms.seconds(nbytes, link) / seconds - 1) for nbytes, seconds in times.items())


def table(world: Mapping[str, Any]) -> str:
    """One world's results, a column per algorithm, a line per size: microseconds per call, bus bandwidth in GB/s, and
    how many times the peer's that is. Before them what memory allows: a copy, and the reads and writes of a reduction
    in place, as bus bandwidth, where ranks can read each other's memory."""
    seconds, peer, bare = world["seconds"], world["ratio_to_peer"], world["in_place"]
    lines = [[f"N={world['ranks']} {world['transport']}", "memcpy GB/s", *(["bare GB/s"] if bare else []), *seconds]]
    for nbytes in sorted(world["memcpy"]):
        cells = [
            f"{times[nbytes] * 1e6:.0f}us {world['bus_bandwidth'][name][nbytes] * 1e-9:.2f}"
            + (f" x{peer[name][nbytes]:.2f}" if peer else "")
            for name, times in seconds.items()
        ]
        limit = [f"{bus_bandwidth(nbytes, world['ranks'], bare[nbytes]) * 1e-9:.2f}" if nbytes in bare else "-"]
        memory = [f"{nbytes / world['memcpy'][nbytes] * 1e-9:.2f}", *(limit if bare else [])]
        lines.append([_size(nbytes), *memory, *cells])
    fits = world["fit"]["algorithms"]
    for what, show in ROWS.items():
        lines.append(
            [what, "", *([""] if bare else []), *(show(fits[name]) if name in fits else "" for name in seconds)]
        )
    return aligned(lines)


ROWS: dict[str, Callable[[Mapping[str, float]], str]] = {
    "fitted alpha us": lambda fit: f"{fit['alpha'] * 1e6:.1f}",
    "1/beta GB/s": lambda fit: f"{1e-9 / fit['beta']:.2f}" if fit["beta"] else "-",
    "formula off by": lambda fit: f"{fit['off_own']:.0%}",
    "with common link": lambda fit: f"{fit['off_common']:.0%}",
}


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of text, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _size(nbytes: int) -> str:
    for unit, name in ((10**6, "MB"), (10**3, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
