"""One rank of `scripts/bench allreduce`: `python -m benchmarks.allreduce_worker SPEC RANK PORT FOLDER`.

Every algorithm has its turn in every round, so that a change of the machine's mood meets all of them. A time is that
of one call in a row of calls without barriers, on the slowest rank. FOLDER/rankR.json: name -> bytes -> seconds of
each round.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from engine.collectives import COLLECTIVES, peers
from engine.transport import Edge, Endpoint, Transport
from engine.transport.shared.ends import IN_PLACE_BYTES
from engine.transport.threads import ThreadHub
from engine.transports import TRANSPORTS

TIMEOUT_S = 120.0
CALLS_BYTES = 2**25  # so many bytes are reduced between two looks at the clock, if that is within:
LEAST_CALLS, MOST_CALLS = 2, 50
GLOO = "gloo"  # torch.distributed's own all-reduce in its default group
MEMCPY, ADD, LIMIT = "memcpy", "add", "in place, bare"

Times = dict[str, dict[int, list[float]]]


@dataclass(frozen=True)
class Spec:
    """What is measured: bytes of fp32 tensors, names of algorithms. Messages are cut into pieces of `piece_bytes`."""

    ranks: int
    sizes: Sequence[int]
    names: Sequence[str]
    rounds: int
    piece_bytes: int = peers.PIECE_BYTES
    transport: str = "threads"  # a name in engine.transports.TRANSPORTS

    def text(self) -> str:
        return json.dumps(asdict(self))


def measure(spec: Spec, transport: Transport) -> Times:
    """On every rank at once; the first round warms up and is left out."""
    peers.PIECE_BYTES = spec.piece_bytes
    calls = _calls(spec, transport)
    times: Times = defaultdict(lambda: defaultdict(list))
    for nbytes in spec.sizes:
        shared = transport.memory(nbytes, torch.device("cpu")).view(torch.float32)  # as buckets of gradients are
        plain, other = torch.ones(nbytes // 4), torch.empty(nbytes // 4)
        repeats = min(MOST_CALLS, max(LEAST_CALLS, CALLS_BYTES // nbytes))
        local: dict[str, Callable[[torch.Tensor], Any]] = {MEMCPY: other.copy_, ADD: other.add_}
        incoming = next(edge for edge in _edges(spec) if edge.dst == transport.rank)
        if transport.channel(incoming).readable and nbytes >= IN_PLACE_BYTES:
            local[LIMIT] = _limit(spec, transport, shared)
        for round_ in range(spec.rounds + 1):
            for name, call in {**calls, **local}.items():
                tensor = plain if name in (GLOO, MEMCPY, ADD) else shared
                tensor.fill_(1.0)
                call(tensor)
                expected = 1.0 if name in local else float(spec.ranks)
                assert name == LIMIT or tensor[0] == tensor[-1] == expected, f"{name} is wrong"
                tensor.zero_()
                start = time.perf_counter()
                for _ in range(repeats):
                    call(tensor)
                if round_:
                    times[name][nbytes].append((time.perf_counter() - start) / repeats)
    return {name: dict(by_size) for name, by_size in times.items()}


def _edges(spec: Spec) -> list[Edge]:
    return [Edge(a, b, LIMIT) for a in range(spec.ranks) for b in range(spec.ranks) if a != b]


def _limit(spec: Spec, transport: Transport, own: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """What an all-reduce in place cannot be faster than: its reads and writes, without waiting for anybody.

    Each rank adds its chunk from everybody's memory to its own, and copies everybody's chunk. The sums are wrong.
    """
    me, sizes = transport.rank, [len(chunk) for chunk in own.tensor_split(spec.ranks)]
    others = [k % spec.ranks for k in range(me + 1, me + spec.ranks)]
    arriving = {k: transport.channel(Edge(k, me, LIMIT)).iview(own) for k in others}
    sent = [transport.channel(Edge(me, k, LIMIT)).isend(own) for k in others]
    theirs = {k: arrival.wait().split(sizes) for k, arrival in arriving.items()}
    for arrival in arriving.values():
        arrival.free()  # what was seen stays mapped
    for work in sent:
        work.wait()
    chunks = own.split(sizes)

    def call(tensor: torch.Tensor) -> None:
        for k in others:
            for mine, other in zip(peers.message_pieces(chunks[me]), peers.message_pieces(theirs[k][me]), strict=True):
                mine.add_(other)
        for k in others:
            chunks[k].copy_(theirs[k][k])

    return call


def _calls(spec: Spec, transport: Transport) -> dict[str, Callable[[torch.Tensor], Any]]:
    """All algorithms, connected."""
    members = list(range(spec.ranks))
    names = [name for name in spec.names if name != GLOO]
    limit = _edges(spec)
    transport.open([*limit, *(edge for name in names for edge in COLLECTIVES[name].edges(members, name))])
    calls: dict[str, Callable[[torch.Tensor], Any]] = {}
    for name in spec.names:
        if name == GLOO:
            calls[name] = dist.all_reduce
            continue
        if COLLECTIVES[name].backend_group:
            transport.open_group(members, name)
        calls[name] = COLLECTIVES[name](transport, members, name).all_reduce
    return calls


def in_threads(spec: Spec) -> list[Times]:
    """All ranks as threads of this process."""
    hub = ThreadHub(spec.ranks, TIMEOUT_S)
    results: list[Any] = [None] * spec.ranks

    def rank_main(rank: int) -> None:
        try:
            results[rank] = measure(spec, hub.transport(rank))
        except BaseException as error:  # noqa: BLE001  # raised again below
            results[rank] = error
            hub.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(spec.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors := [result for result in results if isinstance(result, BaseException)]:
        raise errors[0]
    return results


def main(spec: Spec, rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    if GLOO in spec.names:
        own = PrefixStore(GLOO, store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=spec.ranks)
    endpoint = Endpoint(rank, spec.ranks, store, TIMEOUT_S, torch.device("cpu"))
    times = measure(spec, TRANSPORTS[spec.transport].open(endpoint))
    (folder / f"rank{rank}.json").write_text(json.dumps(times))
    if GLOO in spec.names:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Spec(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
