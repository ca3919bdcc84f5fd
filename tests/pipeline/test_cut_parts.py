"""What a module may do when its forward is followed, and what is refused with a list of layers to start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import peculiar
import pytest
import torch
from cuts import Batch, Compared, seeded
from harness import run_threads, settings
from torch import Tensor, nn

import engine
from engine.pipeline.layers import layers_of
from engine.prepare.prepare import prepare
from models.lstm import LSTM


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    engine.shutdown()


def batches(*rows: int, width: int = 6) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, width, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)) for n in rows
    ]


def score(output: Any, target: Tensor) -> tuple[Tensor, int]:
    found = output if isinstance(output, Tensor) else output["score"] if isinstance(output, dict) else output.score
    return nn.functional.cross_entropy(found, target, reduction="sum"), len(target)


@dataclass
class Output:
    score: Tensor
    hidden: Tensor
    name: str = "made"


class Handed(NamedTuple):
    x: Tensor
    skip: Tensor


class Reversed(torch.autograd.Function):
    """Its gradient is reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Net(nn.Module):
    """Six layers and a head; `how` says what its forward does besides."""

    def __init__(self, how: str = "plain", width: int = 6) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(self.layer(width, n) for n in range(6))
        self.head = nn.Linear(width, 3)
        self.gain = nn.Parameter(torch.ones(width))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.ones(width), persistent=False)
        self.table = torch.linspace(0.5, 1.5, width, dtype=torch.float64)  # neither
        if how == "hooks":
            self.layers[2].register_forward_hook(lambda module, given, result: 2 * result)
            self.layers[3].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
            self.layers[4].register_full_backward_hook(lambda module, given, result: (0.5 * given[0],))

    def layer(self, width: int, number: int) -> nn.Module:
        if self.how == "lists":
            return nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True))
        if self.how == "nested":
            return peculiar.Doubled(nn.Linear(width, width))
        if self.how == "called":
            return peculiar.Called(nn.Linear(width, width))
        if self.how in ("tuple", "dict", "dataclass") and number % 2:
            return Structured(self.how, width)
        return nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        first, kept = x, []
        for number, layer in enumerate(self.layers):
            x = self.step(x, layer, number)
            kept.append(x)
        if self.how == "twice":
            x = self.layers[1](x.tanh())
        if self.how == "views":
            x = x + 0.0
            left = x[:, :3]
            y = self.layers[1](first)
            left.add_(y[:, 3:])
            x = x + self.layers[2](y)
        if self.how == "function":
            x = Reversed.apply(x)
        if self.how == "long":
            x = x + kept[0] + first.flip(0)
        score = self.head(x * self.scratch.abs())
        if self.how == "output":
            return Output(score, x)
        return {"score": score, "kept": kept, "none": None} if self.how == "dictionary" else score

    def step(self, x: Tensor, layer: nn.Module, number: int) -> Any:
        if self.how == "counted" and self.training and number == 3:
            self.count += 1
        if self.how == "frozen" and number == 1:
            with torch.no_grad():
                x = layer(x)
            return x * self.gain
        if self.how == "modes" and self.training and number == 2:
            return layer(x) * 3
        if self.how == "shapes" and number == 2:
            return (
                layer(x) * (x.shape[0] + 1) + x.new_ones(x.shape[0], 1) + torch.arange(len(x), dtype=x.dtype)[:, None]
            )
        if self.how == "tuple" and number % 2:
            return layer(x, skip=x).skip
        if self.how == "dict" and number % 2:
            return layer(x, skip=x)["x"]
        if self.how == "dataclass" and number % 2:
            return layer(x, skip=x).hidden
        return torch.tanh(layer(x)) * self.table * (self.gain if number in (0, 4) else 1)


class Structured(nn.Module):
    """Gives more than a tensor."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(width, width)

    def forward(self, x: Tensor, *, skip: Tensor) -> Any:
        y = self.linear(x)
        if self.how == "tuple":
            return Handed(x, y + skip)
        return {"n": 3, "x": y, "none": None} if self.how == "dict" else Output(x, y)


HOWS = [
    "plain", "hooks", "lists", "nested", "called", "tuple", "dict", "dataclass", "twice", "views", "long", "output",
    "dictionary", "counted", "frozen", "modes", "shapes", "function",
]  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.slow(keep=9)
def test_whatever_a_forward_does_is_done_again(how: str) -> None:
    """On replicas too what is counted once per micro-batch differs, so this is one pipeline with one micro-batch."""
    made = Compared(seeded(lambda: Net(how)), score, batches(4, 4), 3, schedule="1f1b", microbatches=1).check()
    assert "unused" in made.state
    assert "scratch" not in made.state
    assert "layers.0" in made.layers[0][0]


def test_a_schedule_that_splits_backwards_sees_the_functions_as_they_are_called() -> None:
    class Functional(Net):
        def step(self, x: Tensor, layer: nn.Module, number: int) -> Any:
            return layer(torch.tanh(nn.functional.linear(x, self.layers[0].weight)))

    def loop() -> int:
        with engine.Pipeline(
            seeded(Functional)(), score, schedule="zb_h1", microbatches=4, example=batches(8)[0][0]
        ) as net:
            put_off = []
            stage = next(iter(net.stages.values()))
            backward, stage.backward_weight = stage.backward_weight, lambda m: (  # type: ignore[method-assign]
                put_off.append(len(stage.waiting(m))), backward(m)
            )  # fmt: skip
            net.step(batches(8)[0])
            return min(put_off)

    assert min(engine.run_threads(2, loop)) > 0


def test_batches_of_other_shapes_are_followed_anew() -> None:
    """A short batch, and a longer sequence: sizes in the forward's own code are those of each."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows, length = x.shape[0], x.shape[1]
            for layer in self.layers:
                x = layer(x.reshape(rows * length, 6)).reshape(rows, length, 6).tanh()
            return self.head(x.sum(1) / length)

    g = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(rows, length, 6, generator=g, dtype=torch.float64), torch.randint(3, (rows,), generator=g))
        for rows, length in [(4, 3), (5, 3), (4, 7), (4, 3)]
    ]
    Compared(seeded(Mean), score, data, 2, schedule="1f1b", microbatches=2).check()


def test_a_split_names_submodules_also_inside_those_that_are_called_whole() -> None:
    net = Net("lists")
    named = [layer.name for layer in layers_of(net, batches(2)[0][0], ["layers.2.1"])]
    assert named == [
        "layers.0", "layers.1", "layers.2.0", "layers.2.1", "layers.3", "layers.4", "layers.5", "head"
    ]  # fmt: skip

    def loop() -> list[list[str]]:
        with engine.Pipeline(
            seeded(lambda: Net("lists"))(),
            score,
            ranks=2,
            split=["layers.2.1"],
            example=batches(2)[0][0],
            microbatches=1,
        ) as net:
            return [[layer.name for layer in stage.layers] for stage in net.stages.values()]

    assert engine.run_threads(2, loop)[1][0][0] == "layers.2.1"


def test_a_call_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each submodule is called as often as in the unsplit model; nothing runs on two stages (C065)."""
    calls: list[str] = []
    forward = nn.Linear.forward

    def counted(module: nn.Linear, x: Tensor) -> Tensor:
        calls.append(type(x).__name__)
        return forward(module, x)

    def loop() -> None:
        with engine.Pipeline(Net().double(), score, schedule="1f1b", microbatches=2, example=batches(4)[0][0]) as net:
            net.step(batches(4)[0])
            calls.clear()
            net.step(batches(4)[0])

    monkeypatch.setattr(nn.Linear, "forward", counted)
    engine.run_threads(1, loop)
    assert calls == ["Tensor"] * (7 * 2)


class Wrong(nn.Module):
    """A model whose forward cannot be followed, as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        if how == "hooked":
            self.register_forward_hook(lambda module, given, result: 2 * result)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "values" and x.sum() > 0:
            x = 2 * x
        if self.how == "assigned":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.how == "vmap":
            x = torch.vmap(lambda row: 2 * row)(x)
        return self.second(x, cache=object()) if self.how == "fails" else self.second(x)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("values", "select by torch.where"),
        ("assigned", "its forward assigns mean: change it in place, or let a submodule do so"),
        ("vmap", "vmap"),
        ("fails", "second is given an object, which cannot be handed from stage to stage"),
        ("hooked", "it has hooks on it, which is lost"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_layers_to_start_from(how: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        layers_of(Wrong(how), batches(2)[0][0])
    line, _, code = str(refused.value).partition("\n\n")
    assert line.startswith("Wrong cannot be cut by following its forward: ")
    assert "\n" not in line
    made: dict[str, Callable[[], list[Any]]] = {"Wrong": lambda: Wrong(how)}  # type: ignore[dict-item]
    exec(code.replace("(...)", "()"), made)
    assert [name for name, _ in made["layers"]()] == ["first", "second"]
    assert [type(build()).__name__ for _, build in made["layers"]()] == ["Linear", "Linear"]


def test_what_only_a_submodule_can_do_is_called_whole() -> None:
    """Its code cannot be followed, so it is not cut inside; the rest is."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(6, 6)])
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.5 * self.mean + x.detach().mean()
            return Reversed.apply(self.inner[0](x)) * self.mean

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = Block(), Block(), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.b(self.a(x)))

    made = Compared(seeded(Outer), score, batches(4, 4), 2, microbatches=1)
    state = dict(made.plain_state)
    for name in ("a.mean", "b.mean"):  # the plain process has moved them in its evaluation too
        state[name] = made.state[name]
    made.plain_state, made.evaluation = state, made.plain_evaluation
    assert [name for stage in made.layers for name in stage] == ["a", "b", "head"]


class Normed(nn.Module):
    """A normalisation that is used twice stays on one stage; a frozen one stays frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm, self.frozen = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.frozen.eval()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.blocks[0](x))
        x = self.norm(self.blocks[1](x))
        x = self.norm(self.blocks[2](x))
        return self.head(self.blocks[3](x).relu())


def test_statistics_that_are_used_twice_stay_together() -> None:
    found = layers_of(seeded(Normed)(), batches(4)[0][0])
    assert [layer.name for layer in found] == ["blocks.0", "frozen", "blocks.1", "norm", "blocks.3", "head"]
    frozen = found[1].made
    assert frozen is not None
    assert not frozen.frozen.training  # type: ignore[union-attr]

    def loop() -> dict[str, Tensor]:
        with engine.Pipeline(
            seeded(Normed)(), score, optimizer=lambda p: torch.optim.SGD(p, 0.1), microbatches=1,
            example=batches(8)[0][0],
        ) as net:  # fmt: skip
            for batch in batches(8, 8):
                net.step(batch)
            return net.state_dict()

    whole = seeded(Normed)()
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    for x, y in batches(8, 8):
        total, count = score(whole(x), y)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in engine.run_threads(2, loop)[0].items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_a_module_may_be_a_models_target() -> None:
    """In a run: the configuration names it, each rank cuts it for itself, short last batches are followed anew."""
    model = {"_target_": "models.lstm.LSTM", "vocabulary": 256, "layers": 2, "width": 8, "split": ["layers.1"]}
    wanted = settings(
        "1f1b", 2, 2, model=model | {"loss": {"_target_": "models.gpt.NextTokenLoss"}},
        data={"_target_": "models.data.Text", "context": 5, "max_bytes": 200, "held_out": 0.2}, steps=None, epochs=1,
        global_batch_size=6, partition={"name": "model"},
    )  # fmt: skip
    names = [layer.name for layer in prepare(wanted, ".", ".").layers]
    assert names == ["embedding", "layers.0", "dropout", "layers.1", "dropout again", "head"]
    ran = run_threads(wanted)
    assert len(ran.losses()) > 3
    assert set(ran.state()) == set(LSTM(256, 2, 8).state_dict())
