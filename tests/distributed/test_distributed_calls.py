"""Several DistributedOptimizers, calls that come twice, arguments that are wrong, ranks that leave and meet again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loops import DATA, built, on_ranks, sgd
from torch import Tensor, nn

import engine
from engine.distributed import (
    Compression,
    DistributedOptimizer,
    World,
    broadcast_optimizer_state,
    broadcast_parameters,
)

# -- several optimizers, several calls -------------------------------------------------------------------------------


def test_the_latest_of_several_over_the_same_parameters_reduces_and_the_earlier_ones_do_not() -> None:
    """As in phases of a training. Two that listen would each reduce what the other has reduced, or has not yet."""

    def main(world: World) -> tuple[Tensor, str]:
        net = built()
        first = DistributedOptimizer(sgd(net), net.named_parameters(), bucket_bytes=1, world=world)
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), bucket_bytes=1, world=world)
        for batch in DATA:
            optimizer.zero_grad()
            net(batch[world.rank :: 2]).square().mean().backward()
            optimizer.step()
        assert not first._sync.reducer.spans  # it has never reduced anything
        with pytest.raises(RuntimeError) as refused:
            first.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()]), str(refused.value)

    net = built()
    optimizer = sgd(net)
    for batch in DATA:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    for found, said in on_ranks(2, main):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert said == "a later DistributedOptimizer was made for these parameters: step with that one"


def test_gradients_on_their_way_are_not_left_behind_by_a_later_optimizer() -> None:
    def main(world: World) -> None:
        net = built()
        first = DistributedOptimizer(sgd(net), world=world)
        net(DATA[0]).square().mean().backward()
        with pytest.raises(
            ValueError, match=r"earlier DistributedOptimizer .* call its step\(\) or zero_grad\(\) first"
        ):
            DistributedOptimizer(sgd(net), world=world)
        first.zero_grad()
        DistributedOptimizer(sgd(net), world=world)

    on_ranks(2, main)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_synchronizing_twice_is_synchronizing_once(op: str) -> None:
    def main(world: World) -> list[float]:
        p = nn.Parameter(torch.zeros(1))
        optimizer = DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=op, world=world)
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            (p * (world.rank + 1)).sum().backward()
            optimizer.synchronize()
            optimizer.synchronize()
            optimizer.step()
            seen.append(p.item())
        return seen

    step = -3.0 if op == "sum" else -1.5
    assert on_ranks(2, main) == [[step, 2 * step]] * 2


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_a_rank_that_drops_what_others_step_with_is_noticed_on_all(
    dtype: torch.dtype, compression: Compression
) -> None:
    """One that catches an error in its backward and goes on, say: its weights are its own from then on."""

    def main(world: World) -> str:
        p = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = DistributedOptimizer(torch.optim.SGD([p], lr=0.1), compression=compression, world=world)

        def backward() -> None:
            (p * 2).sum().abs().backward()

        for _ in range(10):  # together it is allowed, however often
            backward()
            optimizer.zero_grad()
        for step in range(3):
            backward()
            if step == 1 and world.rank == 1:
                optimizer.zero_grad()
                backward()
            if (step == 1 and world.rank == 1) or step == 2:
                with pytest.raises(RuntimeError) as noticed:
                    optimizer.step()
                return str(noticed.value)
            optimizer.step()
            optimizer.zero_grad()
        raise AssertionError

    first, second, third = on_ranks(3, main)
    assert first.startswith("step 12: rank(s) 1 called zero_grad() between backward and step where rank 0 stepped")
    assert second.startswith("step 12: rank(s) 0, 2 called") and "rank(s) 1 called" in third


def test_drops_while_a_rank_has_joined_do_not_count() -> None:
    def main(world: World) -> float:
        p = nn.Parameter(torch.zeros(1))
        optimizer = DistributedOptimizer(torch.optim.SGD([p], lr=1.0), world=world)
        for step in range(0 if world.rank else 3):
            p.sum().backward()
            if step != 1:
                optimizer.step()
            optimizer.zero_grad()
        optimizer.join()
        for _ in range(2):
            p.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return p.item()

    assert on_ranks(2, main) == [-4.0, -4.0]


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compression": "fp16"}, "compression='fp16': there is Compression.none, Compression.fp16, Compression.bf16"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 must be a whole number, at least 1"),
        ({"bucket_bytes": 2.5e7}, "bucket_bytes=25000000.0 must be a whole number, at least 1"),
        ({"backward_passes_per_step": None}, "backward_passes_per_step=None must be a whole number, at least 1"),
        ({"named_parameters": [torch.zeros(2)]}, "named_parameters holds a Tensor where a pair of name and tensor is"),
        ({"named_parameters": nn.Linear(1, 1)}, "named_parameters holds a Linear where .* model.named_parameters()"),
        ({"named_parameters": [("extra", 3)]}, "named_parameters: extra is an int, not a tensor; leave it out"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_pass(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedOptimizer(sgd(built()), **change)


def test_what_is_wrapped_already_is_not_wrapped_again() -> None:
    (world,) = on_ranks(1, lambda world: world)
    optimizer = DistributedOptimizer(sgd(built()), world=world)
    with pytest.raises(ValueError, match="this optimizer is a DistributedSGD already: wrap torch's own"):
        DistributedOptimizer(optimizer, world=world)


@pytest.mark.parametrize("given", [lambda net: net, lambda net: net.parameters()], ids=["module", "no names"])
def test_what_is_copied_needs_names(given: Callable[[nn.Module], Any]) -> None:
    (world,) = on_ranks(1, lambda world: world)
    with pytest.raises(ValueError, match=r"params holds a \w+ where a pair of name and tensor is needed: pass model\."):
        broadcast_parameters(given(built()), world=world)


@pytest.mark.parametrize("change", [{"op": "sum"}, {"compression": Compression.bf16}])
def test_ranks_that_would_reduce_differently_are_told_so(change: dict[str, Any]) -> None:
    """One that takes the sum where another takes the mean would train a model of its own, without a word."""

    def main(world: World) -> str:
        with pytest.raises(ValueError, match="all ranks must reduce alike, but their settings differ") as refused:
            DistributedOptimizer(sgd(built()), world=world, **(change if world.rank == 1 else {}))
        return str(refused.value)

    first, second, third = on_ranks(3, main)
    assert "here (rank 0) op=mean, compression=none; rank 1 has something else" in first
    assert f"here (rank 1) op={change.get('op', 'mean')}, compression=" in second and "(rank 2)" in third


def test_a_state_that_cannot_be_sent_is_an_error_on_all_ranks() -> None:
    """The others would wait for it as long as the time limit lasts."""

    def main(world: World) -> str:
        optimizer = sgd(built())
        if world.rank == 0:
            optimizer.param_groups[0]["hook"] = {1, 2}
        with pytest.raises(ValueError) as refused:
            broadcast_optimizer_state(optimizer, world=world)
        return str(refused.value)

    said = "state: rank(s) 0: a set cannot be sent: only tensors, numbers, texts, lists, tuples and dictionaries can"
    assert on_ranks(2, main, timeout_s=60.0) == [said] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"patience_s": 0}, "patience_s=0 must be a positive, finite number of seconds"),
        ({"timeout_s": -1.0}, "timeout_s=-1.0 must be a positive"),
        ({"timeout_s": float("inf")}, "timeout_s=inf must be a positive"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be a positive"),
        ({"timeout_s": "60"}, "timeout_s='60' must be a positive"),
        ({"device": "cuda"}, "device=cuda, but torch finds no GPU here"),
        ({"device": "gpu"}, "device=gpu: there is auto, cpu, cuda"),
    ],
)
def test_a_world_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        engine.init(**given)


AGAIN = """
import sys, torch, engine

for training in range(3):
    engine.init(timeout_s=60)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = engine.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    (p * (engine.rank() + training)).sum().backward()
    optimizer.step()
    engine.shutdown()
    open(f"{sys.argv[1]}/{engine.rank()}-{training}", "w").write(str(p.item()))
    engine.shutdown()
"""


@pytest.mark.process
@pytest.mark.slow
def test_ranks_may_leave_and_meet_again(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(tmp_path / "again.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        for training in range(3):
            assert float((tmp_path / f"{rank}-{training}").read_text()) == -(training + 0.5)
