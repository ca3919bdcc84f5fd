"""Gradient buckets: the layout, what is absent, the background, and what is refused."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from workers import RUNS, Run, over_threads

from engine.collectives import COLLECTIVES, Collective
from engine.gradients.background import ReduceThread
from engine.gradients.buckets import Reduced, Reducer
from engine.gradients.layout import ALIGN_BYTES, Named, cut, fingerprints
from engine.transport import Edge, PeerLost, Transport

ROOT = Path(__file__).parents[2]
Params = list[Named]


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Params:
    return [(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for i, shape in enumerate(shapes)]


def collective_of(transport: Transport, name: str = "ring", label: str = "reduce0") -> Collective:
    members = list(range(transport.world))
    transport.open(COLLECTIVES[name].edges(members, label))
    if name == "native":
        transport.open_group(members, label, backend=True)
    return COLLECTIVES[name](transport, members, label)


def reduced(world: int, make: Callable[[int], Params], bucket_bytes: int = 100, name: str = "ring") -> list[Any]:
    """(parameters, reducer) of each rank after one reduction of the gradients that `make(rank)` has set."""

    def main(transport: Transport) -> tuple[Params, Reducer]:
        params = make(transport.rank)
        reducer = Reducer(params, collective_of(transport, name), bucket_bytes)
        reducer.launch()
        reducer.wait()
        return params, reducer

    return over_threads(world, main)


def set_grads(params: Params, rank: int) -> Params:
    for number, (_, p) in enumerate(params):
        p.grad = torch.full_like(p, 10.0**rank * (number + 1))
    return params


shapes = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=8)


# -- layout --------------------------------------------------------------------------------------------------------


@given(
    tensors=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([torch.float16, torch.float32, torch.float64, torch.complex128])),
        max_size=15,
    ),
    bucket_bytes=st.integers(1, 600),
)
def test_buckets_hold_every_gradient_once_in_order_aligned_and_apart(tensors: Any, bucket_bytes: int) -> None:
    named = [(f"p{i}", nn.Parameter(torch.zeros(n, dtype=dtype))) for i, (n, dtype) in enumerate(tensors)]
    buckets = cut(named, bucket_bytes)
    assert sorted(name for b in buckets for name, _ in b.named) == sorted(name for name, _ in named)
    for dtype in {dtype for _, dtype in tensors}:
        own = [name for b in buckets for name, p in b.named if p.dtype == dtype]
        assert own == [name for name, p in named if p.dtype == dtype]
    for bucket in buckets:
        assert len({p.dtype for _, p in bucket.named}) == 1
        assert len(bucket.named) == 1 or sum(p.nbytes for _, p in bucket.named) <= bucket_bytes
        end = len(bucket.named)  # the flags
        for (_, p), offset in zip(bucket.named, bucket.offsets, strict=True):
            assert offset >= end and offset * p.element_size() % ALIGN_BYTES == 0
            end = offset + p.numel()
        assert end <= bucket.elements
        flat = torch.zeros(bucket.elements, dtype=bucket.first.dtype)
        assert all(view.data_ptr() % ALIGN_BYTES == 0 for view in bucket.views(flat) if view.numel())


def test_buckets_are_filled_up_to_their_size() -> None:
    named = parameters((10,), (10,), (10,), (100,), (1,), (1,))
    assert [[name for name, _ in bucket.named] for bucket in cut(named, 80)] == [
        ["p0", "p1"],
        ["p2"],
        ["p3"],
        ["p4", "p5"],
    ]


@pytest.mark.slow
def test_the_layout_is_the_same_in_every_process() -> None:
    code = (
        "import torch\nfrom torch import nn\nfrom engine.gradients.layout import cut, fingerprints\n"
        "named = [(f'p{i}', nn.Parameter(torch.zeros(n))) for i, n in enumerate([3, 3, 50, 3, 7])]\n"
        "print(fingerprints(named, 64), [(b.offsets, b.elements) for b in cut(named, 64)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    named = parameters((3,), (3,), (50,), (3,), (7,))
    here = f"{fingerprints(named, 64)} {[(b.offsets, b.elements) for b in cut(named, 64)]}"
    assert done.stdout.strip() == here


# -- sums ----------------------------------------------------------------------------------------------------------


@given(world=st.integers(1, 4), sizes=shapes, bucket_bytes=st.sampled_from([1, 100, 10**6]))
def test_gradients_are_summed_over_the_replicas(world: int, sizes: Any, bucket_bytes: int) -> None:
    for params, reducer in reduced(world, lambda rank: set_grads(parameters(*sizes), rank), bucket_bytes):
        for number, (_, p) in enumerate(params):
            expected = torch.full_like(p, (number + 1) * float("1" * world))
            assert p.grad is not None and torch.equal(p.grad, expected) and p.grad.stride() == p.stride()
        assert reducer.wire_bytes % ALIGN_BYTES == 0


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
def test_a_gradient_that_nobody_has_stays_none(dtype: torch.dtype, name: str) -> None:
    """p0: only rank 0 has it. p1: nobody. p2: everybody. p3: only rank 2."""

    def make(rank: int) -> Params:
        params = set_grads(parameters((3,), (5,), (2, 2), (40,), dtype=dtype), 0)
        for p, has in zip((p for _, p in params), (rank == 0, False, True, rank == 2), strict=True):
            p.grad = p.grad if has else None
        return params

    for params, _ in reduced(3, make, name=name):
        grads = [p.grad for _, p in params]
        assert grads[1] is None
        assert [g.flatten().tolist() for g in grads if g is not None] == [[1] * 3, [9] * 4, [4] * 40]


def test_what_was_there_in_the_step_before_does_not_count() -> None:
    def main(transport: Transport) -> list[float]:
        params = set_grads(parameters((2,)), 0)
        reducer = Reducer(params, collective_of(transport), 100)
        seen = []
        for absent_on in (None, 1, 0):
            params[0][1].grad = None if transport.rank == absent_on else torch.full((2,), transport.rank + 1.0)
            reducer.launch()
            reducer.wait()
            seen.append(float(params[0][1].grad[0]))
        return seen

    assert over_threads(2, main) == [[3.0, 1.0, 2.0]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_presence_flag_never_sums_to_nothing(dtype: torch.dtype) -> None:
    flag = torch.zeros(1, dtype=dtype)
    for _ in range(5000):
        flag += 1
        assert flag > 0


def test_gradients_keep_the_strides_of_their_parameters() -> None:
    def make(rank: int) -> Params:
        p = nn.Parameter(torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
        p.grad = torch.arange(120.0).view(2, 3, 4, 5) * (rank + 1)  # row major
        q = nn.Parameter(torch.zeros(4, 3).t())
        q.grad = torch.arange(12.0).view(3, 4)
        return [("p", p), ("q", q)]

    for ((_, p), (_, q)), _ in reduced(2, make):
        assert p.grad is not None and q.grad is not None
        assert p.grad.is_contiguous(memory_format=torch.channels_last) and q.grad.stride() == (1, 3)
        assert torch.equal(p.grad, 3 * torch.arange(120.0).view(2, 3, 4, 5))
        assert torch.equal(q.grad, 2 * torch.arange(12.0).view(3, 4))


def test_step_after_step_with_and_without_zeroing() -> None:
    def main(transport: Transport) -> list[float | None]:
        params = parameters((4,))
        p = params[0][1]
        reducer = Reducer(params, collective_of(transport), 100)
        seen: list[float | None] = []
        for step, value in enumerate([1.0, 2.0, None, 4.0]):
            if step != 1:
                p.grad = None
            if value is not None:
                (p * value).sum().backward()
            reducer.launch()
            reducer.wait()
            seen.append(None if p.grad is None else float(p.grad[0]))
        return seen

    # Step 1 accumulates onto the sum of step 0, on both replicas: (2 + 2) + (2 + 2).
    assert over_threads(2, main) == [[2.0, 8.0, None, 8.0]] * 2


@pytest.mark.parametrize("bucket_bytes", [1, 64, 10**6])
def test_bytes_are_exact_and_the_same_for_every_step(bucket_bytes: int) -> None:
    """Three replicas: 2(N-1)/N of flags, gradients and padding; whether gradients are there does not matter."""
    world, sizes = 3, ((48,), (17,), (3, 3))

    def main(transport: Transport) -> tuple[list[int], Reducer]:
        params = parameters(*sizes)
        reducer = Reducer(params, collective_of(transport), bucket_bytes)
        counts = [reducer.bytes_sent]
        for step in range(3):
            set_grads(params, step) if step != 1 else [setattr(p, "grad", None) for _, p in params]
            reducer.launch()
            reducer.wait()
            counts.append(reducer.bytes_sent)
        return counts, reducer

    results = over_threads(world, main)
    wire = results[0][1].wire_bytes
    line = ALIGN_BYTES
    gradients = 3 * line + 2 * line + 1 * line  # 48, 17 and 9 floats, each rounded up
    assert wire == gradients + line * {1: 3, 64: 3, 10**6: 1}[bucket_bytes]
    for counts, _ in results:
        assert counts[0] == 0 and counts[2] == 2 * counts[1] and counts[3] == 3 * counts[1]
    assert sum(counts[1] for counts, _ in results) == 2 * (world - 1) * wire


# -- background ----------------------------------------------------------------------------------------------------


def test_launch_does_not_wait_and_wait_does() -> None:
    launched = threading.Event()

    def main(transport: Transport) -> list[Reduced]:
        params = set_grads(parameters((3,)), transport.rank)
        reducer = Reducer(params, collective_of(transport), 100)
        if transport.rank == 1:
            assert launched.wait(60)
        reducer.launch()
        launched.set()  # rank 0 gets here although rank 1 has not launched
        reducer.wait()
        assert params[0][1].grad is not None and params[0][1].grad.tolist() == [11.0] * 3
        return reducer.spans

    for ((ready, start, end),) in over_threads(2, main):
        assert 0 < ready <= start < end


def test_reducers_of_a_rank_share_a_thread_and_go_in_launch_order() -> None:
    def main(transport: Transport) -> list[Reduced]:
        members = [0, 1]
        labels = [f"reduce{s}" for s in range(3)]
        transport.open([e for label in labels for e in COLLECTIVES["ring"].edges(members, label)])
        thread = ReduceThread()
        reducers = [
            Reducer(set_grads(parameters((50,)), 0), COLLECTIVES["ring"](transport, members, label), 100, thread)
            for label in labels
        ]
        for reducer in (reducers[2], reducers[0], reducers[1]):
            reducer.launch()
        for reducer in reducers:
            reducer.wait()
        return [span for reducer in (reducers[2], reducers[0], reducers[1]) for span in reducer.spans]

    for spans in over_threads(2, main):
        assert all(before.end <= after.start for before, after in pairwise(spans))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.slow(keep=2)
def test_reductions_and_messages_do_not_disturb_each_other(run: Run) -> None:
    """Two replicas of two stages; each step messages go both ways while the stage before is being reduced."""
    edges = [Edge(a, b, kind) for base in (0, 2) for a, b, kind in ((base, base + 1, "F"), (base + 1, base, "B"))]
    rings = {f"reduce{s}": [s, s + 2] for s in (0, 1)}

    def main(transport: Transport) -> list[float]:
        me, peer = transport.rank, transport.rank ^ 1
        jitter = random.Random(me)
        transport.open(
            edges + [e for label, members in rings.items() for e in COLLECTIVES["ring"].edges(members, label)]
        )
        label = f"reduce{me % 2}"
        params = parameters((300,), (7,))
        reducer = Reducer(params, COLLECTIVES["ring"](transport, rings[label], label), 100)
        (out,) = (transport.channel(e) for e in edges if e.src == me)
        (inn,) = (transport.channel(e) for e in edges if e.dst == me)
        seen = []
        for step in range(30):
            set_grads(params, step % 3)
            reducer.launch()
            arrived = torch.zeros(100)
            receive = inn.irecv(arrived)
            time.sleep(jitter.random() * 0.004)
            send = out.isend(torch.full((100,), float(step + me)))
            receive.wait()
            reducer.wait()
            send.wait()
            assert float(arrived[99]) == step + peer
            seen.append(float(params[1][1].grad[6]))
        return seen

    assert run(4, main) == [[4.0, 40.0, 400.0] * 10] * 4


@pytest.mark.parametrize("closed", [False, True])
def test_the_thread_ends_with_its_owner(closed: bool) -> None:
    before = set(threading.enumerate())
    owner = ReduceThread()
    (thread,) = set(threading.enumerate()) - before
    done = owner.start(lambda: None)
    if closed:
        owner.close()
        owner.close()
    else:
        del owner
    thread.join(60)
    assert not thread.is_alive() and done.done()


def test_an_error_of_the_thread_is_raised_by_wait() -> None:
    def main(transport: Transport) -> None:
        reducer = Reducer(set_grads(parameters((3,)), 0), collective_of(transport), 100)
        if transport.rank == 0:
            reducer.launch()
            threading.Timer(0.1, transport.abort).start()
            with pytest.raises(PeerLost, match="channel reduce0 from rank 1"):
                reducer.wait()

    over_threads(2, main)


@pytest.mark.gpu
def test_on_a_gpu_the_sum_is_behind_the_backward() -> None:
    """Each rank reduces in a stream of its own, which must wait for the gradients and be waited for."""

    def main(transport: Transport) -> list[float]:
        p = nn.Parameter(torch.zeros(1000, 1000, device="cuda"))
        reducer = Reducer([("p", p)], collective_of(transport), 10**7)
        seen = []
        for step in range(10):
            heavy = torch.ones(1000, 1000, device="cuda")
            for _ in range(20):
                heavy = heavy @ torch.full_like(heavy, 1e-3)
            p.grad = heavy * (step + 1)
            reducer.launch()
            reducer.wait()
            seen.append(round(float(p.grad.mean()), 3))
            p.grad = None
        return seen

    assert over_threads(2, main) == [[2.0 * (step + 1) for step in range(10)]] * 2


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (parameters((3,), (4,)), r"number 1: here \(rank 0\) p1 \(5,\) torch.float32.*rank 1 has something else"),
        (parameters((3,)), r"number 1: here \(rank 0\) p1 \(5,\)"),
        (parameters((3,), (5,), (1,)), r"number 2: here \(rank 0\) no more parameters"),
        (parameters((3,), (5,), dtype=torch.float64), r"number 0: here \(rank 0\) p0 \(3,\) torch.float32"),
        ([("p0", nn.Parameter(torch.zeros(3))), ("q", nn.Parameter(torch.zeros(5)))], r"number 1.*p1"),
        ([], r"number 0"),
    ],
)
def test_replicas_that_differ_are_refused_at_the_start(other: Params, message: str) -> None:
    errors: list[str] = []

    def main(transport: Transport) -> None:
        params = other if transport.rank else parameters((3,), (5,))
        with pytest.raises(ValueError, match="reduce0: replicas must hold equal stages") as caught:
            Reducer(params, collective_of(transport), 100)
        if transport.rank == 0:
            errors.append(str(caught.value))

    over_threads(2, main)  # every rank raises
    with pytest.raises(ValueError, match=message):
        raise ValueError(errors[0])


def test_another_bucket_size_is_a_difference() -> None:
    with pytest.raises(ValueError, match=r"number 0: here .*in buckets of \d+ bytes"):
        over_threads(
            2, lambda transport: Reducer(parameters((9,), (9,)), collective_of(transport), 40 + 40 * transport.rank)
        )


def test_sparse_gradients_are_refused_by_name() -> None:
    def make(rank: int) -> Params:
        table = nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([1])).sum().backward()
        return [("table.weight", table.weight)]

    with pytest.raises(ValueError, match=r"table\.weight: a torch.sparse_coo gradient"):
        reduced(1, make)


def test_frozen_parameters_cost_nothing_and_stay_so() -> None:
    def make(rank: int) -> Params:
        params = set_grads(parameters((3,), (4,)), rank)
        params[1][1].grad = None
        params[1][1].requires_grad_(False)
        return params

    for params, reducer in reduced(2, make):
        assert params[0][1].grad.tolist() == [11] * 3 and params[1][1].grad is None
        assert reducer.wire_bytes == 2 * ALIGN_BYTES
        params[1][1].requires_grad_(True)
        params[1][1].grad = torch.zeros(4)
        with pytest.raises(ValueError, match="p1 was frozen"):
            reducer.launch()


def test_a_stage_without_parameters_has_nothing_to_do() -> None:
    for _, reducer in reduced(2, lambda rank: []):
        assert reducer.wire_bytes == reducer.bytes_sent == 0 and reducer.spans == []
