"""scripts/bench allreduce [--ranks N ...] [--threads N ...] [--bytes N ...] [--algorithms NAME ...] [--json FILE]

Every all-reduce of the engine, over each transport, beside torch.distributed's own over gloo (`gloo`) and a copy in
memory, on one host: time per call, bus bandwidth, ratios, and α, β, γ fitted to the formulas. One thread per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.allreduce_worker import ADD, GLOO, LIMIT, MEMCPY, Spec, Times, in_threads
from benchmarks.link import bus_bandwidth, fitted, table
from benchmarks.sides import LOOPBACK, run_together
from engine.collectives import COLLECTIVES
from engine.collectives.peers import PIECE_BYTES
from engine.transports import TRANSPORTS

BETWEEN_CPUS = [name for name, info in TRANSPORTS.items() if info.launch == "processes" and "cpu" in info.devices]
SIZES = [1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000, 100_000_000]


def in_processes(spec: Spec) -> list[Times]:
    """A process per rank."""
    with tempfile.TemporaryDirectory() as name:
        worker = [sys.executable, "-m", "benchmarks.allreduce_worker", spec.text()]
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        commands = [[*worker, str(rank), str(store.port), name] for rank in range(spec.ranks)]
        run_together(commands, Path(name), LOOPBACK)
        files = [Path(name, f"rank{rank}.json").read_text() for rank in range(spec.ranks)]
        return [{key: {int(n): t for n, t in by.items()} for key, by in json.loads(text).items()} for text in files]


def summed_up(spec: Spec, ranks: Sequence[Times]) -> dict[str, Any]:
    """One world: per algorithm and size the median over rounds of the slowest rank's time, and what follows from it."""
    seconds = {
        name: {
            nbytes: median(max(round_) for round_ in zip(*(times[name][nbytes] for times in ranks), strict=True))
            for nbytes in spec.sizes
            if nbytes in ranks[0][name]
        }
        for name in ranks[0]
    }
    memcpy, add = seconds.pop(MEMCPY), seconds.pop(ADD)
    limit = seconds.pop(LIMIT, {})
    peer = GLOO if GLOO in seconds else "native"
    gamma = add[max(spec.sizes)] / max(spec.sizes)

    def each(figure: Callable[[int, float], float]) -> dict[str, dict[int, float]]:
        return {name: {n: figure(n, t) for n, t in by_size.items()} for name, by_size in seconds.items()}

    return {
        "ranks": spec.ranks,
        "transport": spec.transport,
        "rounds": spec.rounds,
        "piece_bytes": spec.piece_bytes,
        "seconds": seconds,
        "memcpy": memcpy,
        "in_place": limit,
        "bus_bandwidth": each(lambda n, t: bus_bandwidth(n, spec.ranks, t)),
        "peer": peer,
        "ratio_to_peer": each(lambda n, t: seconds[peer][n] / t) if peer in seconds else {},
        "ratio_to_memcpy": each(lambda n, t: bus_bandwidth(n, spec.ranks, t) * memcpy[n] / n),
        "gamma": gamma,
        "fit": fitted(seconds, spec.ranks, gamma),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench allreduce", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="worlds of processes")
    parser.add_argument("--transports", nargs="+", default=BETWEEN_CPUS, choices=BETWEEN_CPUS, help="between them")
    parser.add_argument("--threads", type=int, nargs="*", default=[8], help="worlds of threads in one process")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, help="sizes of the fp32 tensor")
    parser.add_argument("--algorithms", nargs="+", default=[*COLLECTIVES, GLOO], choices=[*COLLECTIVES, GLOO])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each size (default 5)")
    parser.add_argument(
        "--piece-bytes", type=int, default=PIECE_BYTES, help="messages are cut into pieces of this size"
    )
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    given = parser.parse_args(arguments)
    if (
        min([*given.ranks, *given.threads, 2]) < 2
        or min(given.bytes) < 4
        or min(given.rounds, given.piece_bytes) < 1
        or len(given.bytes) < 2
    ):
        parser.error("at least 2 ranks, 2 sizes of 4 bytes or more, 1 round and 1 byte per piece")

    worlds = []
    wanted = [(transport, ranks) for transport in given.transports for ranks in given.ranks]
    for transport, ranks in [*wanted, *(("threads", ranks) for ranks in given.threads)]:
        print(f"{ranks} ranks over {transport}", file=sys.stderr, flush=True)
        names = [name for name in given.algorithms if transport != "threads" or name != GLOO]
        spec = Spec(ranks, given.bytes, names, given.rounds, given.piece_bytes, transport)
        worlds.append(summed_up(spec, in_threads(spec) if transport == "threads" else in_processes(spec)))
        print(table(worlds[-1]), flush=True)
    if given.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        given.json.write_text(json.dumps({"machine": machine, "worlds": worlds}, indent=1))
