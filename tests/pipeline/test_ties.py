"""Weights that layers share, wherever these are: as in one plain process, and their copies equal to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuts import Batch, Compared, seeded
from harness import ADAM, SGD, Ran, run_threads, settings
from torch import Tensor, nn

import engine
from engine.prepare.prepare import prepare
from models.gpt import NextTokenLoss, gpt


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tied(nn.Module):
    """One matrix on the first, a middle and the last layer; a frozen scale on two others."""

    def __init__(self, width: int = 6, words: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.scale = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[4].bias = self.layers[1].bias

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * (self.scale if number % 3 == 0 else 1.0)
            if number == 2:
                x = x + nn.functional.linear(x, self.embedding.weight).softmax(-1) @ self.embedding.weight
        return self.head(x)


def tokens(*rows: int) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randint(11, (n, 5), generator=g), torch.randint(11, (n, 5), generator=g)) for n in rows]


@pytest.mark.parametrize(
    ("schedule", "ranks", "replicas", "more"),
    [
        ("gpipe", 3, 1, {}),
        ("1f1b", 2, 2, {"shard_optimizer": True, "clip_norm": 0.05}),
        ("1f1b", 4, 1, {"clip_norm": 0.05}),
        ("interleaved_1f1b", 2, 2, {"allreduce": "tree"}),
        ("zb_h1", 3, 1, {"clip_norm": 0.05}),
        ("zb_v", 2, 1, {}),  # both ends on one rank
        ("zb_v", 2, 2, {"shard_optimizer": True}),
        ("dualpipe", 2, 1, {"clip_norm": 0.05}),
        ("dualpipe", 2, 2, {}),
        ("dualpipe_v", 2, 2, {"clip_norm": 0.05}),
        ("chimera", 2, 1, {}),
    ],
)
@pytest.mark.slow(keep=4)
def test_tied_weights_train_as_in_one_process(schedule: str, ranks: int, replicas: int, more: dict[str, Any]) -> None:
    Compared(
        seeded(Tied), NextTokenLoss(), tokens(16, 16), ranks, replicas, schedule=schedule, microbatches=4,
        bucket_bytes=64, **more,
    ).check()  # fmt: skip


@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_the_norm_counts_a_tied_weight_once(norm: float) -> None:
    batch = tokens(8)[0]

    def loop() -> tuple[float, dict[str, Tensor]]:
        with engine.Pipeline(seeded(Tied)(), NextTokenLoss(), example=batch[0], schedule="dualpipe") as net:
            net.step(batch)
            gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
            return float(net.clip_grad_norm_(1.0, norm)), gradients

    whole = seeded(Tied)()
    total, count = NextTokenLoss()(whole(batch[0]), batch[1])
    (total / count).backward()
    gradients = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
    expected = float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0, norm))
    for found, own in engine.run_threads(2, loop):
        assert found == pytest.approx(expected, rel=1e-12)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-14)


def model(**more: Any) -> dict[str, Any]:
    sizes = {"vocabulary": 16, "context": 8, "layers": 2, "width": 8, "heads": 2, "tied": True}
    return {"_target_": "models.gpt.gpt", "loss": {"_target_": "models.gpt.NextTokenLoss"}} | sizes | more


def by_hand(wanted: Any) -> tuple[Any, Ran]:
    """The tied GPT as one module, with the weights that the run began with, and the run."""
    began: dict[str, Tensor] = {}

    def look(worker: Any) -> None:
        for stage in worker.stages.values():
            began.update({name: value.detach().clone() for name, value in stage.state_dict().items()})

    ran = run_threads(wanted, inspect=look)
    assert torch.equal(began["head.weight"], began["embedding.token.weight"])
    whole = nn.Sequential()
    for name, build in gpt(16, 8, 2, 8, 2):
        whole.add_module(name.replace(".", "_"), build())
    whole.double().load_state_dict({k.replace("blocks.", "blocks_"): v for k, v in began.items()})
    whole.head.weight = whole.embedding.token.weight  # type: ignore[union-attr]
    return whole, ran


class Same(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Eight samples, each batch is all of them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(index)
        return torch.randint(16, (6,), generator=g), torch.randint(16, (6,), generator=g)


@pytest.mark.parametrize(
    ("schedule", "ranks", "replicas", "optimizer"), [("1f1b", 2, 2, SGD), ("dualpipe", 2, 1, ADAM), ("zb_v", 2, 1, SGD)]
)
@pytest.mark.slow(keep=2)
def test_the_gpts_one_matrix(schedule: str, ranks: int, replicas: int, optimizer: dict[str, Any]) -> None:
    wanted = settings(
        schedule, ranks, 4, replicas, model=model(), data={"_target_": "test_ties.Same"}, optimizer=optimizer,
        clip_norm=0.5, global_batch_size=8,
    )  # fmt: skip
    whole, ran = by_hand(wanted)
    kind = torch.optim.SGD if optimizer is SGD else torch.optim.Adam
    by = kind(whole.parameters(), **{k: v for k, v in optimizer.items() if k != "_target_"})
    x, y = (torch.stack(each) for each in zip(*(Same()[i] for i in range(8)), strict=True))
    for step in range(3):
        total, count = NextTokenLoss()(whole(x), y)
        (total / count).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        by.step()
        by.zero_grad()
        assert ran.losses()[step] == pytest.approx(float(total.detach()) / count, rel=1e-9)
    within = 1e-9 if optimizer is SGD else 1e-6
    for replica in range(replicas):
        state = ran.state(replica)
        for name, value in whole.state_dict().items():
            found = state[name.replace("blocks_", "blocks.")]
            torch.testing.assert_close(found, value, rtol=within, atol=within / 1000)
        assert torch.equal(state["head.weight"], state["embedding.token.weight"])
        assert all(torch.equal(value, ran.state()[name]) for name, value in state.items())


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_stages_that_update_at_different_times_are_refused(schedule: str) -> None:
    wanted = settings(schedule, model=model(), data={"_target_": "test_ties.Same"}, global_batch_size=4)
    said = f"embedding.token.weight is tied over stages 0, 1, whose updates schedule={schedule} makes at different"
    with pytest.raises(ValueError, match=said):
        prepare(wanted, ".", ".")


class Badly(nn.Linear):
    """Ties its weight to what is not there, or has another shape."""

    def __init__(self, to: str) -> None:
        super().__init__(4, 4)
        self.tied = {"weight": to}


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("1.weight", "layer '1' ties weight to '1.weight', and no layer before it holds that"),
        ("nowhere.weight", "no layer before it holds that"),
        ("0.weight", r"layer '1' ties weight to '0.weight', whose shape is \[4, 3\] and not \[4, 4\]"),
    ],
)
def test_what_cannot_be_tied_is_refused(to: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine.Pipeline([nn.Linear(3, 4), Badly(to)], nn.functional.mse_loss)
    engine.shutdown()
