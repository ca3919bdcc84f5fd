"""Law 1 for `engine.Pipeline`: a loop of one's own over several ranks equals the same loop in one plain process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import toys
from program_strategies import EVERY
from torch import Tensor, nn
from torch.distributed import HashStore
from workers import RUNS

import engine
from engine.distributed.world import World, bind
from engine.pipeline.seeds import building
from engine.plan.features import COPIES, SPLIT, features
from engine.plan.schedules import SCHEDULES, build
from engine.transport import Transport

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
SYNCHRONOUS = [name for name in EVERY if set(features(build(name, 4, 8))) <= {SPLIT, COPIES}]
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """And no world is left to other tests, where one was alone in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    engine.shutdown()


def model(layers: int = 8, width: int = 6, frozen: bool = False) -> nn.Sequential:
    """Blocks with a name each, and a head of three classes."""
    with building(0, 0):  # ranks that are threads share torch's generator
        parts = [(f"block{i}", toys.Block(width, width, 0.0)) for i in range(layers - 1)]
        made = nn.Sequential()
        for name, part in [*parts, ("head", nn.Linear(width, 3))]:
            made.add_module(name, part)
    made[0].requires_grad_(not frozen)
    return made.double()


def batches(rows: Sequence[int], width: int = 6, tokens: int | None = None) -> list[Batch]:
    """Batches of so many samples; with `tokens` each sample is that many positions."""
    g = torch.Generator().manual_seed(1)
    made = []
    for n in rows:
        shape = (n,) if tokens is None else (n, tokens)
        x = torch.randn(*shape, width, generator=g, dtype=torch.float64)
        made.append((x, torch.randint(3, shape, generator=g)))
    return made


def share(batch: Batch, replica: int, replicas: int) -> Batch:
    """A replica's part of a batch, uneven where it does not divide; the first ones take more."""
    start, end = (-(-replica * len(batch[0]) // replicas), -(-(replica + 1) * len(batch[0]) // replicas))
    return batch[0][start:end], batch[1][start:end]


Step = Callable[[Batch], Tensor]


def train(net: Any, step: Step, clip: Callable[[float], Tensor], data: Sequence[Batch]) -> list[tuple[float, float]]:
    """User code around steps: clipping, an optimizer and a scheduler of one's own. (loss, norm) of each step."""
    optimizer = SGD(list(net.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    found = []
    for batch in data:
        loss = step(batch)
        norm = clip(0.2)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


def plain_step(net: nn.Module, loss: Any = nn.functional.cross_entropy) -> Step:
    def step(batch: Batch) -> Tensor:
        value: Tensor = loss(net(batch[0]), batch[1])
        value.backward()
        return value

    return step


def plainly(net: nn.Module, data: Sequence[Batch]) -> list[tuple[float, float]]:
    return train(net, plain_step(net), lambda most: nn.utils.clip_grad_norm_(net.parameters(), most), data)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def piped(
    data: Sequence[Batch], replicas: int = 1, **keywords: Any
) -> tuple[list[tuple[float, float]], dict[str, Tensor], float]:
    """One rank's loop: what `train` finds, the state behind it, and an evaluation of the first batch."""
    net = engine.Pipeline(model(), nn.functional.cross_entropy, replicas=replicas, **keywords)
    with net:
        data = [share(batch, net.replica, replicas) for batch in data]
        found = train(net, net.step, net.clip_grad_norm_, data)
        return found, net.state_dict(), float(net.evaluate(data[0]))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.slow(keep=12, most=24)
def test_equals_one_process(schedule: str, replicas: int) -> None:
    """Losses, norms, parameters and an evaluation; rows that divide by nothing, and every rank says the same."""
    data = batches([19, 19, 23])
    ranks = 2 if replicas == 2 or SCHEDULES[schedule].complaint(4, 4, {}) else 4
    net = model()
    expected = plainly(net, data)
    evaluated = float(nn.functional.cross_entropy(net(data[0][0]), data[0][1]).detach())
    loop = partial(piped, data, replicas, schedule=schedule, microbatches=4)
    for found, state, score in engine.run_threads(ranks * replicas, loop):
        assert found == [pytest.approx(each, rel=1e-9) for each in expected]
        close(state, net.state_dict())
        assert score == pytest.approx(evaluated, rel=1e-9)


def test_gradients_stay_where_no_optimizer_takes_them() -> None:
    """Two steps before zero_grad add up, also over replicas, whose reductions use their buffers again."""
    data = batches([8, 8, 8])
    net = model()
    for batch in data:
        plain_step(net)(batch)

    def loop(replicas: int) -> dict[str, Tensor]:
        piped = engine.Pipeline(model(), nn.functional.cross_entropy, microbatches=2, replicas=replicas)
        for batch in data:
            piped.step(share(batch, piped.replica, replicas))
        found = {name: parameter.grad.clone() for name, parameter in piped.named_parameters()}
        piped.zero_grad()
        assert all(parameter.grad is None for parameter in piped.parameters())
        return found

    expected = {name: parameter.grad for name, parameter in net.named_parameters()}
    for replicas in (1, 2):
        found = engine.run_threads(2 * replicas, loop, replicas)
        for replica in range(replicas):
            close(found[2 * replica] | found[2 * replica + 1], expected)


def test_batches_of_several_shapes() -> None:
    """More and fewer samples, and other lengths: messages are measured when a shape first comes."""
    data = [*batches([8, 5], tokens=3), *batches([8, 11], tokens=7), *batches([6])]
    loss = toys.TokenLoss()

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

    def total(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return loss(output.unsqueeze(1) if output.ndim == 2 else output, target.view(len(target), -1))

    total.count = loss.count  # type: ignore[attr-defined]
    net = model()
    expected = train(net, plain_step(net, mean), lambda most: nn.utils.clip_grad_norm_(net.parameters(), most), data)

    def loop() -> list[tuple[float, float]]:
        piped = engine.Pipeline(model(), total, schedule="1f1b", microbatches=4)
        return train(piped, piped.step, piped.clip_grad_norm_, data)

    for found in engine.run_threads(2, loop):
        assert found == [pytest.approx(each, rel=1e-9) for each in expected]


def test_frozen_parameters_stay_and_are_not_counted() -> None:
    data = batches([8, 8])
    net = model(frozen=True)
    expected = plainly(net, data)

    def loop() -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
        piped = engine.Pipeline(model(frozen=True), nn.functional.cross_entropy, microbatches=4, replicas=2)
        found = train(piped, piped.step, piped.clip_grad_norm_, [share(each, piped.replica, 2) for each in data])
        return found, piped.state_dict()

    for found, state in engine.run_threads(4, loop):
        assert found == [pytest.approx(each, rel=1e-9) for each in expected]
        close(state, net.state_dict())


@pytest.mark.parametrize("shard", [False, True])
def test_the_pipelines_own_optimizer_clips_and_follows_its_schedule(shard: bool) -> None:
    data = batches([16, 16, 16])
    net = model()
    expected = plainly(net, data)
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)

    def loop() -> tuple[list[float], dict[str, Tensor], bool]:
        piped = engine.Pipeline(
            model(), nn.functional.cross_entropy, microbatches=4, replicas=2, optimizer=SGD, lr_scheduler=halved,
            clip_norm=0.2, shard_optimizer=shard,
        )  # fmt: skip
        losses = [float(piped.step(share(batch, piped.replica, 2))) for batch in data]
        return losses, piped.state_dict(), all(p.grad is None for p in piped.parameters())

    for losses, state, zeroed in engine.run_threads(4, loop):
        assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-9)
        close(state, net.state_dict())
        assert zeroed


def test_two_pipelines_take_turns_in_one_process() -> None:
    data = batches([8, 8])
    first, second = model(), model(6)
    expected = [plainly(first, data), plainly(second, data)]

    def loop() -> list[list[tuple[float, float]]]:
        made = [
            engine.Pipeline(model(layers), nn.functional.cross_entropy, schedule=schedule, microbatches=2)
            for layers, schedule in ((8, "1f1b"), (6, "zb_h1"))
        ]
        found: list[list[tuple[float, float]]] = [[], []]
        optimizers = [SGD(list(net.parameters())) for net in made]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
        for batch in data:
            for net, optimizer, scheduler, each in zip(made, optimizers, schedulers, found, strict=True):
                loss, norm = net.step(batch), net.clip_grad_norm_(0.2)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                each.append((float(loss), float(norm)))
        return found

    for found in engine.run_threads(2, loop):
        assert found == [[pytest.approx(each, rel=1e-9) for each in one] for one in expected]


def test_a_state_goes_round_and_names_are_strict() -> None:
    """Buffers too. What is loaded is what is saved; a wrong name or shape is refused on every rank."""

    def normed() -> list[tuple[str, nn.Module]]:
        with building(3, 0):
            return [("a", toys.Normed(6).double()), ("b", toys.Normed(6).double()), ("head", nn.Linear(6, 3).double())]

    def loop() -> tuple[dict[str, Tensor], dict[str, Tensor], list[str], list[str]]:
        data = batches([8], tokens=2)
        loss = toys.TokenLoss()
        trained = engine.Pipeline(normed(), loss, microbatches=2, optimizer=SGD)
        trained.step(data[0])
        saved = trained.state_dict()
        fresh = engine.Pipeline(normed(), loss, microbatches=2)
        assert not any(fresh.load_state_dict(saved))
        said = []
        for wrong in (saved | {"c.weight": torch.zeros(1)}, {k: v for k, v in saved.items() if k != "head.bias"}):
            with pytest.raises(ValueError, match="strict=False") as refused:
                fresh.load_state_dict(wrong)
            said.append(str(refused.value))
        loose = fresh.load_state_dict({"head.bias": saved["head.bias"], "other": torch.zeros(1)}, strict=False)
        with pytest.raises(ValueError, match=r"head.bias is \(4,\) and has to be \(3,\)"):
            fresh.load_state_dict(saved | {"head.bias": torch.zeros(4)})
        assert float(fresh.evaluate(data[0])) == float(trained.evaluate(data[0]))
        return saved, fresh.state_dict(), said, loose.unexpected_keys

    for saved, loaded, said, unexpected in engine.run_threads(2, loop):
        close(loaded, saved)
        assert any("running_mean" in name for name in saved) and "num_batches_tracked" in " ".join(saved)
        assert "unknown c.weight" in said[0] and "lacks head.bias" in said[1]
        assert unexpected == ["other"]
        assert list(saved) == list(nn.ModuleDict(normed()).state_dict())


def test_a_failed_evaluation_leaves_each_replica_its_own_buffers() -> None:
    def loop() -> tuple[bool, torch.Tensor]:
        torch.manual_seed(3)
        piped = engine.Pipeline([toys.Normed(6).double(), nn.Linear(6, 3).double()], toys.TokenLoss(), replicas=2)
        piped.step(batches([8, 8], tokens=2)[engine.rank()])
        before = [b.clone() for stage in piped.stages.values() for _, b in stage.named_buffers()]

        def fail(*_: object) -> None:
            raise ArithmeticError("the caller's own mistake")

        with pytest.raises(ArithmeticError, match="own mistake"):
            piped.evaluate(batches([8], tokens=2)[0], fail)
        after = [b for stage in piped.stages.values() for _, b in stage.named_buffers()]
        kept = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return kept, torch.cat([b.flatten() for b in before])

    (first, its), (second, other) = engine.run_threads(2, loop)
    assert first and second and not torch.equal(its, other)


def test_evaluation_changes_nothing_and_tells_outputs() -> None:
    """In evaluation mode, whatever the size; statistics and gradients stay. Replicas use the first one's statistics."""
    data = batches([8, 3], tokens=2)

    def loop() -> tuple[list[float], int]:
        torch.manual_seed(3)
        made = [toys.Normed(6).double(), nn.Dropout(0.5), nn.Linear(6, 3).double()]
        piped = engine.Pipeline(made, toys.TokenLoss(), microbatches=2, replicas=2)
        piped.step(data[0])
        before = [b.clone() for stage in piped.stages.values() for _, b in stage.named_buffers()]
        gradients = [p.grad.clone() for p in piped.parameters() if p.grad is not None]
        rows: list[int] = []
        losses = [float(piped.evaluate(batch, lambda output, _: rows.append(len(output)))) for batch in data * 2]
        after = [b for stage in piped.stages.values() for _, b in stage.named_buffers()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(torch.equal(a, p.grad) for a, p in zip(gradients, piped.parameters(), strict=True))
        net = nn.Sequential(*made).eval()  # on each rank its own stages only are as they are trained
        net.load_state_dict(piped.state_dict())
        with torch.no_grad():
            expected = [toys.TokenLoss()(net(x), y) for x, y in data]
        assert losses[:2] == pytest.approx([float(total) / count for total, count in expected], rel=1e-9)
        assert piped.eval().stages and not any(m.training for s in piped.stages.values() for m in [s.layers[0].module])
        assert all(s.layers[0].module.training for s in piped.train().stages.values())
        return losses, sum(rows)

    results = engine.run_threads(4, loop)
    assert all(losses == results[0][0] for losses, _ in results)
    assert [losses[:2] == losses[2:] for losses, _ in results] == [True] * 4
    assert [rows for _, rows in results] == [0, 22, 0, 22]


def test_masks_do_not_depend_on_the_ranks() -> None:
    """Layers that draw are seeded by step and micro-batch; those that are built by functions by their position."""
    data = batches([12, 12])

    def loop() -> tuple[list[float], dict[str, Tensor]]:
        layers = [(name, lambda make=make: make().double()) for name, make in toys.mlp4(6, 3, p=0.5)]
        piped = engine.Pipeline(layers, nn.functional.cross_entropy, microbatches=3, optimizer=SGD, seed=5)
        return [float(piped.step(batch)) for batch in data], piped.state_dict()

    (alone,) = engine.run_threads(1, loop)
    for losses, state in engine.run_threads(4, loop):
        assert losses == alone[0]
        assert all(torch.equal(value, alone[1][name]) for name, value in state.items())


def test_each_rank_builds_its_own_stages_only() -> None:
    built: list[tuple[int, int]] = []

    def make(number: int) -> nn.Module:
        layer = nn.Linear(4, 4)
        if type(layer.weight.data).__name__ == "Tensor":
            built.append((engine.rank(), number))
        return layer

    def loop() -> None:
        engine.Pipeline([(str(n), partial(make, n)) for n in range(4)], nn.functional.mse_loss, split=["1"])

    engine.run_threads(2, loop)
    assert sorted(built) == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_ranks_in_the_middle_need_shapes_only() -> None:
    data = batches([8])

    def loop(frugal: bool) -> float:
        piped = engine.Pipeline(model(), nn.functional.cross_entropy, microbatches=2)
        given, target = data[0]
        if frugal:
            given = given if piped.rank == 0 else given.to("meta")
            target = target if piped.rank == 3 else target.to("meta")
        return float(piped.step((given, target)))

    assert engine.run_threads(4, loop, True) == engine.run_threads(4, loop, False)


def test_an_empty_share_takes_part() -> None:
    """A replica without samples adds nothing; its gradients and its loss are those of the others."""
    batch = batches([6])[0]
    net = model()
    expected = float(plain_step(net)(batch).detach())

    def loop() -> tuple[float, dict[str, Tensor]]:
        piped = engine.Pipeline(model(), nn.functional.cross_entropy, microbatches=2, replicas=2)
        loss = piped.step(batch if piped.replica == 0 else (batch[0][:0], batch[1][:0]))
        return float(loss), {name: p.grad.clone() for name, p in piped.named_parameters()}

    found = engine.run_threads(4, loop)
    gradients = {name: p.grad for name, p in net.named_parameters()}
    for replica in (0, 1):
        assert found[2 * replica][0] == pytest.approx(expected, rel=1e-9)
        close(found[2 * replica][1] | found[2 * replica + 1][1], gradients)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"schedule": "gpip"}, "unknown schedule 'gpip'; choose one of: .*gpipe"),
        ({"loss": None}, "loss is None, which cannot be called"),
        ({"layers": [nn.Linear(2, 2)], "ranks": 2}, "2 stages need 2 layers or more and the model has 1"),
        ({"layers": nn.Linear(2, 2)}, "layers is a Linear, which is cut by following its forward: give example="),
        ({"layers": [nn.Linear(2, 2), 3]}, r"layers\[1\] is an int; a layer is a module"),
        ({"ranks": 3}, "ranks=3 and replicas=1 need 3 ranks, and there are 2"),
        ({"replicas": 0}, "replicas=0 must be a whole number"),
        ({"microbatches": 0}, "microbatches=0 must be a whole number"),
        ({"schedule": "pipedream"}, "schedule='pipedream' updates the weights while .* needs optimizer="),
        ({"schedule": "pipedream", "optimizer": SGD, "clip_norm": 1.0}, "clip_norm=1.0 needs a moment"),
        ({"clip_norm": 1.0}, "clip_norm= is for updates by the pipeline"),
        ({"shard_optimizer": True, "optimizer": SGD}, "give optimizer=, a synchronous schedule, and replicas=2"),
        ({"allreduce": "rings"}, "allreduce='rings': there is ring, "),
        ({"split": ["nowhere"]}, "nowhere"),
        ({"options": {"chunks": 2}}, "schedule gpipe has no option 'chunks'"),
        ({"overlap": lambda a: a}, "overlap: .* is not a function of"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(keywords: dict[str, Any], message: str) -> None:
    given = {"layers": model(), "loss": nn.functional.cross_entropy} | keywords
    layers = given.pop("layers")

    def loop() -> None:
        with pytest.raises(ValueError, match=message) as refused:
            engine.Pipeline(layers, **given)
        assert "\n" not in str(refused.value)

    engine.run_threads(2, loop)


def test_refusals_later() -> None:
    def loop() -> None:
        piped = engine.Pipeline(model(), nn.functional.cross_entropy, microbatches=4)
        with pytest.raises(ValueError, match="a batch of 3 samples cannot be cut into microbatches=4"):
            piped.step(batches([3])[0])
        with pytest.raises(ValueError, match="a batch of 0 samples cannot be cut"):
            piped.step(batches([0])[0])  # without replicas nobody else has any
        with pytest.raises(ValueError, match=r"a batch is a pair \(input, target\), not a Tensor"):
            piped.step(torch.zeros(3))
        owner = engine.Pipeline(model(), nn.functional.cross_entropy, microbatches=4, optimizer=SGD)
        with pytest.raises(ValueError, match="give clip_norm= to the pipeline instead"):
            owner.clip_grad_norm_(1.0)
        owner.close()
        owner.close()
        for use in (owner.step, owner.evaluate):
            with pytest.raises(ValueError, match="this pipeline is closed"):
                use(batches([8])[0])
        for use in (owner.state_dict, lambda: owner.load_state_dict({}), lambda: owner.clip_grad_norm_(1.0)):
            with pytest.raises(ValueError, match="this pipeline is closed"):
                use()
        piped.step(batches([8])[0])  # the other one goes on

    engine.run_threads(2, loop)


def test_alone_more_ranks_are_refused_with_both_remedies() -> None:
    with pytest.raises(ValueError, match=r"torchrun --nproc-per-node=2, or .* engine.run_threads\(2, loop\)"):
        engine.Pipeline(model(), nn.functional.cross_entropy, ranks=2)
    data, net = batches([8]), model()
    with engine.Pipeline(model(), nn.functional.cross_entropy) as piped:
        assert float(piped.step(data[0])) == pytest.approx(float(plain_step(net)(data[0]).detach()), rel=1e-9)


class Breaks(nn.Module):
    """Fails on real tensors."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x).__name__ != "FakeTensor":
            raise ArithmeticError("the toy fails as asked")
        return x


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_other_transports_carry_the_same(transport: str) -> None:
    """As under torchrun, where a GPU is refused to ranks that are connected between CPUs."""
    data, store = batches([8, 5], tokens=3), HashStore()
    loss = toys.TokenLoss()
    net = model()

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

    expected = train(net, plain_step(net, mean), lambda most: nn.utils.clip_grad_norm_(net.parameters(), most), data)
    made = [model() for _ in range(4)]

    def main(end: Transport) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
        world = World(end, store)
        bind(lambda: world)
        try:
            with pytest.raises(ValueError, match="device=cuda, but the ranks are connected for cpu"):
                engine.Pipeline(made[end.rank], loss, device="cuda")
            piped = engine.Pipeline(made[end.rank], loss, schedule="1f1b", microbatches=2, replicas=2)
            shares = [share(batch, piped.replica, 2) for batch in data]
            found = train(piped, piped.step, piped.clip_grad_norm_, shares)
            state = piped.state_dict()
            piped.close()
            return found, state
        finally:
            bind(None)

    for found, state in RUNS[transport](4, main):
        assert found == [pytest.approx(each, rel=1e-9) for each in expected]
        close(state, net.state_dict())


def test_the_first_true_error_says_where_it_was() -> None:
    def loop() -> None:
        layers = [("0", lambda: nn.Linear(6, 6)), ("1", Breaks), ("2", lambda: nn.Linear(6, 3))]
        engine.Pipeline(layers, nn.functional.cross_entropy, microbatches=2, split=["1"], dtype=torch.float64).step(
            batches([4])[0]
        )

    with pytest.raises(ArithmeticError, match="fails as asked") as raised:
        engine.run_threads(2, loop)
    assert raised.value.__notes__ == ["in 1F0 of the pipeline (stage 1, micro-batch 0)"]


def test_a_rank_that_fails_before_it_meets_the_others_ends_the_run() -> None:
    def loop(ranks: list[int]) -> None:
        ranks.append(len(ranks))
        if len(ranks) == 2:
            raise OSError("no such model")
        engine.Pipeline(model(), nn.functional.cross_entropy)

    with pytest.raises(OSError, match="no such model"):
        engine.run_threads(3, loop, [])
    with pytest.raises(ValueError, match="ranks=0 must be a whole number"):
        engine.run_threads(0, loop, [])


def test_what_the_user_draws_is_left_alone() -> None:
    """Layers are built, and masks drawn, from seeds of their own; a loop's generators go on as in a plain one."""

    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    def seed() -> None:
        torch.manual_seed(4)
        np.random.seed(4)
        random.seed(4)

    seed()
    expected = [drawn() for _ in range(3)]
    seed()
    layers = [(name, lambda make=make: make().double()) for name, make in toys.mlp4(6, 3, p=0.5)]
    piped = engine.Pipeline(layers, nn.functional.cross_entropy, microbatches=2)
    found = [drawn()]
    piped.step(batches([4])[0])
    found.append(drawn())
    piped.evaluate(batches([4])[0])
    assert [*found, drawn()] == expected
    assert {0, 1, 2} <= piped.tables.draws
