"""DistributedOptimizer and its kin in plain loops: equal to one process, over threads and under torchrun."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loops import DATA, STEPS, built, on_ranks, sgd
from torch import Tensor, nn

import engine
from engine.distributed import Compression, DistributedOptimizer, World, broadcast_optimizer_state
from engine.distributed.broadcast import broadcast_parameters
from engine.distributed.nested import pack, unpack
from engine.gradients.compression import Feedback, scale_for

ROOT = Path(__file__).parents[2]


def trained(net: nn.Module, optimizer: Any, take: Callable[[Tensor], Tensor], passes: int = 1) -> dict[str, Tensor]:
    """The plain loop: the mean of squares over the rows that `take` leaves of each step's batch, in `passes` parts."""
    for batch in DATA:
        optimizer.zero_grad()
        for part in take(batch).chunk(passes):
            (net(part).square().mean() / passes).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("make", [sgd, lambda net: torch.optim.Adam(net.parameters(), lr=0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize(("size", "passes", "bucket_bytes"), [(1, 1, 1), (2, 1, 10**6), (3, 2, 1), (4, 1, 100)])
def test_a_loop_trains_as_one_process(size: int, passes: int, bucket_bytes: int, make: Any) -> None:
    def main(world: World) -> dict[str, Tensor]:
        net = built(world.rank)
        optimizer = DistributedOptimizer(
            make(net),
            net.named_parameters(),
            bucket_bytes=bucket_bytes,
            backward_passes_per_step=passes,
            world=world,
        )
        broadcast_parameters(net.state_dict(), world=world)
        return trained(net, optimizer, lambda batch: batch[world.rank :: size], passes)

    net = built()
    expected = trained(net, make(net), lambda batch: batch)
    states = on_ranks(size, main)
    for state in states:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
            assert torch.equal(state[name], states[0][name])


def test_buckets_start_in_the_last_backward_and_a_backward_too_many_is_an_error() -> None:
    net = built()
    (world,) = on_ranks(1, lambda world: world)
    optimizer = DistributedOptimizer(sgd(net), world=world, bucket_bytes=1, backward_passes_per_step=2)
    reducer = optimizer._sync.reducer
    net(DATA[0]).mean().backward()
    assert reducer._running is None
    net(DATA[0]).mean().backward()
    assert reducer._running is not None and len(reducer._running) == 6  # step() has nothing left to start
    with pytest.raises(
        RuntimeError, match=r"group0\.\d: a gradient came after .* backward_passes_per_step=2: raise it"
    ):
        net(DATA[0]).mean().backward()


def test_gradients_can_be_clipped_between_synchronize_and_step() -> None:
    def main(world: World) -> tuple[float, float]:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), world=world)
        net(DATA[0][world.rank :: 2]).square().mean().backward()
        sent = optimizer._sync.reducer
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        rounds = sent.bytes_sent
        optimizer.step()
        assert sent.bytes_sent == rounds
        return float(norm), float(net[0].weight.detach().sum())

    net = built()
    optimizer = sgd(net)
    net(DATA[0]).square().mean().backward()
    norm = float(nn.utils.clip_grad_norm_(net.parameters(), 0.01))
    optimizer.step()
    for mine in on_ranks(2, main):
        assert mine == pytest.approx((norm, float(net[0].weight.detach().sum())), rel=1e-9)


def test_what_is_on_its_way_is_dropped_by_zero_grad() -> None:
    """As in adversarial training: one model's loss leaves gradients in the other model."""

    def main(world: World) -> bool:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), world=world)
        net(DATA[0]).sum().backward()
        optimizer.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        before = [p.clone() for p in net.parameters()]
        net(DATA[0]).mul(0).sum().backward()
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.step()
        return all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))

    assert on_ranks(2, main) == [True, True]


@pytest.mark.parametrize("counts", [(5, 3), (2, 5, 4), (0, 2), (3, 3)])
def test_ranks_with_fewer_batches_join_and_end_with_the_same_weights(counts: tuple[int, ...]) -> None:
    """C084. The mean is one over those that still have samples: here of equal gradients, so equal to one process."""

    def main(world: World) -> tuple[int, dict[str, Tensor], Any]:
        net = built()
        optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters(), world=world)
        for batch in DATA[: counts[world.rank]]:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        return optimizer.join(), net.state_dict(), optimizer.state_dict()["state"][0]["step"]

    net = built()
    optimizer = torch.optim.Adam(net.parameters())
    for batch in DATA[: max(counts)]:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    for last, state, step in on_ranks(len(counts), main):
        assert last == counts.index(max(counts)) and step == max(counts)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_schedulers_and_saved_states_work_as_with_the_optimizer_itself() -> None:
    (world,) = on_ranks(1, lambda world: world)
    net, other = built(), built()
    ours, plain = DistributedOptimizer(sgd(net), world=world), sgd(other)
    assert isinstance(ours, torch.optim.SGD) and "DistributedSGD" in repr(ours)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (ours, plain)]
    for batch in DATA:
        for each, optimizer, scheduler in zip((net, other), (ours, plain), schedulers, strict=True):
            each(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    ours.load_state_dict(ours.state_dict())
    assert ours.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


# -- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e6, 1e30])
@pytest.mark.slow(keep=5)
def test_half_precision_neither_overflows_nor_vanishes_and_what_it_loses_comes_later(
    compression: Compression, scale: float
) -> None:
    """fp16 holds 6e-8 to 65504. What a rank rounds away before it sends comes with the next step, so that one rounding
    is all that is lost in all steps together; what two hops round comes on top in each of them."""
    steps, eps = 20, torch.finfo(compression.value).eps

    def main(world: World) -> Tensor:
        p = nn.Parameter(torch.zeros(50))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), [("p", p)], compression=compression, world=world, op="sum"
        )
        for _ in range(steps):
            p.grad = torch.linspace(-1, 1, 50) * scale * (world.rank + 1)
            optimizer.step()
        return p.detach()

    for size, bound in ((1, eps / steps), (3, eps)):
        expected = -steps * size * (size + 1) / 2 * torch.linspace(-1, 1, 50).double() * scale
        results = on_ranks(size, main)
        for result in results:
            assert torch.equal(result, results[0])
            assert (result.double() - expected).abs().max() <= 1.1 * bound * expected.abs().max()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_infinite_gradient_is_seen_by_all_and_spoils_nothing_after_it(bad: float) -> None:
    def main(world: World) -> list[Tensor]:
        p = nn.Parameter(torch.zeros(3))
        optimizer = DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression=Compression.fp16, world=world)
        seen = []
        for value in (0.1, bad, 0.1):
            p.grad = torch.tensor([value if world.rank else 0.1, 0.1, 0.1])
            optimizer.synchronize()
            seen.append(p.grad.clone())
            optimizer.zero_grad()
        return seen

    for first, spoilt, after in on_ranks(2, main):
        assert not torch.isfinite(spoilt[0]) and torch.isfinite(spoilt[1:]).all()
        torch.testing.assert_close(first, torch.full((3,), 0.1), rtol=1e-3, atol=0)
        torch.testing.assert_close(after, torch.full((3,), 0.1), rtol=1e-3, atol=0)


@given(
    largest=st.floats(1e-38, 3e38), members=st.integers(1, 64), wire=st.sampled_from([torch.float16, torch.bfloat16])
)
def test_the_scaled_sum_stays_in_range_and_rounding_is_all_that_is_lost(
    largest: float, members: int, wire: torch.dtype
) -> None:
    scale = scale_for(largest, members)
    assert scale is not None
    data = torch.tensor([largest, largest / 3, 0.0])
    feedback = Feedback(data, wire)
    sent = feedback.rounded(data, scale)
    assert float(sent[0]) * members <= 2**15 * 1.01
    assert torch.isfinite(feedback._residual).all()
    lost = torch.zeros(3)
    feedback.add_to(lost)
    torch.testing.assert_close(sent.float() / scale + lost, data, rtol=1e-6, atol=0)


# -- copies ----------------------------------------------------------------------------------------------------------

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=40)
@given(plain_values)
def test_nested_data_arrives_as_it_was(value: Any) -> None:
    assert unpack(pack(value)) == value


def test_tensors_of_every_kind_arrive_bit_for_bit() -> None:
    given_tensors = [
        torch.tensor([-0.0, float("nan"), 1.5]),
        torch.tensor(3, dtype=torch.int64),
        torch.ones(0, 4, dtype=torch.bfloat16),
        torch.randn(3, 4).t(),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ]
    for before, after in zip(given_tensors, unpack(pack({"x": given_tensors}))["x"], strict=True):
        assert (before.shape, before.dtype, before.stride()) == (after.shape, after.dtype, after.stride())
        first, second = (each.contiguous().view(-1).view(torch.uint8).tolist() for each in (before, after))
        assert first == second
    with pytest.raises(ValueError, match="a function cannot be sent"):
        pack({"hook": lambda: None})


def test_all_ranks_get_the_whole_state_of_the_optimizer_that_was_restored() -> None:
    """C092: learning rate, momenta and step counts, into optimizers that have no state yet."""

    def main(world: World) -> Any:
        net = built()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.5 if world.rank else 0.003, betas=(0.8, 0.9))
        if world.rank == 1:
            trained(net, optimizer, lambda batch: batch)
            optimizer.param_groups[0]["lr"] = 0.25
        broadcast_optimizer_state(optimizer, root_rank=1, world=world)
        return optimizer.state_dict()

    first, second, third = on_ranks(3, main)
    assert first["param_groups"] == second["param_groups"] == third["param_groups"]
    assert first["param_groups"][0]["lr"] == 0.25 and first["param_groups"][0]["betas"] == (0.8, 0.9)
    for number, state in second["state"].items():
        for key, value in state.items():
            assert torch.equal(first["state"][number][key], value) and torch.equal(third["state"][number][key], value)
            assert key != "step" or float(value) == STEPS


# -- refusals and silence --------------------------------------------------------------------------------------------


def test_a_rank_that_stays_away_is_named_with_the_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """C108: one line; who is there, who is not, since when, for which tensors."""

    def main(world: World) -> None:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), bucket_bytes=200, world=world)
        for step in range(2):
            net(DATA[step]).mean().backward()
            if step == 1 and world.rank == 1:
                raise_when_late.wait(20)
            optimizer.step()

    raise_when_late = threading.Event()

    class Waker(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise_when_late.set()

    waker = Waker()
    logging.getLogger("engine.distributed").addHandler(waker)
    original = engine.distributed.optimizer.Synchronizer.added
    try:
        # rank 1 hears of no gradient in its second step, so that none of its buckets starts before step()
        engine.distributed.optimizer.Synchronizer.added = lambda self, number: (
            None if self.world.rank == 1 and self._step == 1 else original(self, number)
        )
        on_ranks(2, main, patience_s=0.05)
    finally:
        engine.distributed.optimizer.Synchronizer.added = original
        logging.getLogger("engine.distributed").removeHandler(waker)
    line = caplog.records[0].getMessage()
    assert line.startswith("step 1: rank 0 has waited 0 s for ")
    assert "4.weight" in line and "bucket 1 of" in line
    assert "there: rank(s) 0; missing: rank 1, last seen in step 0 at bucket" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "max"}, "op=max: there is mean, sum"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0 must be a whole number"),
        ({"named_parameters": []}, "leaves out 6 of the optimizer's 6 parameters, first group0.0"),
        ({"named_parameters": [("w", nn.Parameter(torch.zeros(1)))] * 2}, "names w twice"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedOptimizer(sgd(built()), **change)


def test_a_scheduler_comes_after_and_parameters_before() -> None:
    (world,) = on_ranks(1, lambda world: world)
    optimizer = sgd(built())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="wrap the optimizer first"):
        DistributedOptimizer(optimizer, world=world)
    ours = DistributedOptimizer(sgd(built()), world=world)
    with pytest.raises(ValueError, match="add parameters before"):
        ours.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_ranks_that_hold_different_models_are_told_which_tensor_differs() -> None:
    def main(world: World) -> None:
        net = nn.Linear(3, 2 + world.rank)
        with pytest.raises(ValueError, match=r"all ranks must pass the same, but their tensors differ.*number 1"):
            broadcast_parameters(net.state_dict(), world=world)
        with pytest.raises(ValueError, match="their parameters differ, first at number 0"):
            DistributedOptimizer(sgd(net), net.named_parameters(), world=world)

    on_ranks(2, main)


# -- under torchrun --------------------------------------------------------------------------------------------------

PLAIN = """
import sys, torch
from torch import nn

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
samples = torch.randn(64, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for batch in samples.split(16):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
torch.save(net.state_dict(), sys.argv[1])
"""
PORTED = {  # four lines: two are new, two are changed
    "import sys, torch": "import sys, torch, engine",
    "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)": (
        "optimizer = engine.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), "
        "net.named_parameters())\nengine.broadcast_parameters(net.state_dict())"
    ),
    "net(batch).square()": "net(batch[engine.rank() :: engine.size()]).square()",
}


@pytest.mark.process
@pytest.mark.slow
def test_a_plain_loop_is_ported_by_changing_four_lines(tmp_path: Path) -> None:
    ported = PLAIN
    for before, after in PORTED.items():
        assert ported.count(before) == 1
        ported = ported.replace(before, after)
    changed = set(ported.splitlines()) - set(PLAIN.splitlines())
    assert len(changed) == 4
    ported = ported.replace("sys.argv[1]", "sys.argv[1] + str(engine.rank())")
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "ported.py").write_text(ported)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for command, out in (([sys.executable], "plain"), (torchrun, "ours"), ([sys.executable], "alone")):
        script = tmp_path / ("plain.py" if out == "plain" else "ported.py")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(script), str(tmp_path / out)],
            env=environment, capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    expected = torch.load(tmp_path / "plain", weights_only=True)
    for out in ("ours0", "ours1", "alone0"):
        for name, value in torch.load(tmp_path / out, weights_only=True).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
