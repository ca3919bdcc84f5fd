"""A model that is cut by following its forward, beside the same one in a plain process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import engine
from engine.pipeline.cutting.values import call_of, signature_of

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
Batch = tuple[Any, Any]


class Compared:
    """What a pipeline of so many ranks found, and what one process did: losses, an evaluation, the state."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        loss: Callable[[Any, Any], Any],
        data: Sequence[Batch],
        ranks: int = 2,
        replicas: int = 1,
        **keywords: Any,
    ) -> None:
        clip = keywords.get("clip_norm")

        def loop() -> tuple[list[Tensor], Tensor, dict[str, Tensor], list[list[str]], dict[str, Tensor]]:
            example = data[0][0]
            with engine.Pipeline(
                make(), loss, optimizer=SGD, replicas=replicas, example=example, **{"microbatches": 2} | keywords
            ) as net:
                share = partial(shared, replica=engine.rank() // ranks, replicas=replicas)
                losses = [net.step(share(batch)) for batch in data]
                names = [[layer.name for layer in stage.layers] for _, stage in sorted(net.stages.items())]
                own = {name: value.detach().clone() for name, value in net.named_parameters()}
                return losses, net.evaluate(share(data[0])), net.state_dict(), names, own

        self.of_ranks = engine.run_threads(ranks * replicas, loop)
        self.losses, self.evaluation, self.state, *_ = self.of_ranks[0]
        self.layers = [names for *_, stages, _ in self.of_ranks[:ranks] for names in stages]
        whole = make()
        whole.train()
        optimizer = SGD(whole.parameters())
        self.plain_losses = []
        for batch in data:
            value = mean(loss, run(whole, batch[0]), batch[1])
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(whole.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            self.plain_losses.append(value.detach())
        whole.eval()
        with torch.no_grad():
            self.plain_evaluation = mean(loss, run(whole, data[0][0]), data[0][1])
        self.plain_state: Mapping[str, Any] = whole.state_dict()

    def check(self, within: float = 1e-9) -> Compared:
        """Both are the same, within a relative error."""
        assert set(self.state) == set(self.plain_state)
        close = partial(torch.testing.assert_close, rtol=within, atol=within / 100, check_dtype=False)
        for losses, evaluation, *_ in self.of_ranks:
            close(torch.stack(losses), torch.stack(self.plain_losses))
            close(evaluation, self.plain_evaluation)
        for name, value in self.plain_state.items():
            close(self.state[name], value, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]
        for name, value in self.own().items():
            assert torch.equal(value, self.state[name]), f"copies of {name} differ"
        return self

    def own(self) -> dict[str, Tensor]:
        """The parameters of all ranks; each rank's are compared bit for bit with those of the others."""
        found: dict[str, Tensor] = {}
        for *_, parameters in self.of_ranks:
            for name, value in parameters.items():
                assert torch.equal(found.setdefault(name, value), value), f"copies of {name} differ"
        return found


def run(model: nn.Module, given: Any) -> Any:
    """The model's output, called as the engine calls it."""
    args, kwargs = call_of(signature_of(model.forward), given)
    return model(*args, **kwargs)


def mean(loss: Callable[[Any, Any], Any], output: Any, target: Any) -> Tensor:
    """The loss of a whole batch."""
    found = loss(output, target)
    return found[0] / found[1] if isinstance(found, tuple) else found


def shared(batch: Batch, replica: int, replicas: int) -> Batch:
    """A replica's part of a batch."""

    def part(leaf: Any) -> Any:
        return leaf.chunk(replicas)[replica] if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(part, batch[0]), pytree.tree_map(part, batch[1])


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Callable[[], nn.Module]:
    """Makes the module with the same weights each time. Ranks that are threads draw one after another."""

    def made() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return make().to(dtype)

    return made
