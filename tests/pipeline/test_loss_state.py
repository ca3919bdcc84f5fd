"""What a loss keeps from call to call is moved by training alone; what it draws follows from the seed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Ran, close, equal, run_threads, settings
from peculiar import Centred

from engine.pipeline.losses import make_loss
from engine.pipeline.messages.boundary import describe
from engine.prepare.prepare import prepare
from engine.settings import Eval


def wanted(
    loss: str, schedule: str = "gpipe", ranks: int = 2, microbatches: int = 4, replicas: int = 1, **changes: Any
) -> Any:
    keywords = changes.pop("keywords", {})
    model = {"_target_": "toys.mlp4", "loss": {"_target_": f"peculiar.{loss}", **keywords}}
    data = {"_target_": "toys.Tokens", "evaluation": {"samples": 16}}
    return settings(schedule, ranks, microbatches, replicas, model=model, data=data, **changes)


def by_hand(ran: Ran) -> list[float]:
    """One plain process through the same micro-batches, whose loss is called once for each of them."""
    import toys
    from harness import Batches, build_optimizer, building, sizes

    run = ran.job.settings
    layers = []
    for index, (_, make) in enumerate(toys.mlp4()):
        with building(run.seed, index):
            layers.append(make().double())
    optimizer, _ = build_optimizer(ran.job, [p for layer in layers for p in layer.parameters()])
    loss, data, logged = Centred(), toys.Tokens(), []
    for indices in Batches(64, 16, 1, run.seed, True).shares(0, 3):
        x, y = (torch.stack([data[i][k] for i in indices]) for k in (0, 1))
        total, counted = 0.0, int((y != -100).sum())
        at = 0
        for rows in sizes(16, run.pipeline.microbatches):
            value = x[at : at + rows]
            for layer in layers:
                value = layer(value)
            part, _ = loss(value, y[at : at + rows])
            (part / counted).backward()
            total, at = total + float(part.detach()), at + rows
        optimizer.step()
        optimizer.zero_grad()
        logged.append(total / counted)
    return logged


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("own_count", [False, True])
@pytest.mark.parametrize(("schedule", "microbatches"), [("naive", 4), ("naive", 1), ("gpipe", 4), ("zb_v", 4)])
def test_a_state_is_moved_once_per_micro_batch_and_by_training_alone(
    every: int, own_count: bool, schedule: str, microbatches: int
) -> None:
    """Neither an evaluation nor the call that learns the count moves it."""
    ran = run_threads(
        wanted("Centred", schedule, 2, microbatches, eval=Eval(every=every), keywords={"own_count": own_count})
    )
    assert ran.losses() == pytest.approx(by_hand(ran), rel=1e-12)
    assert len(ran.of("evaluation")) == 3 * every


def test_evaluation_sees_the_state_that_training_left() -> None:
    """In evaluation mode, on a copy of it."""
    ran = run_threads(wanted("Centred", eval=Eval(every=1)))
    loss = ran.workers[1].pipeline.loss
    assert loss._function.calls == 12  # type: ignore[attr-defined]
    scoring = ran.workers[1].evaluation._scoring
    assert scoring is not loss and not scoring._function.training and loss._function.training  # type: ignore[attr-defined]
    assert torch.equal(scoring._function.centre, loss._function.centre)  # type: ignore[attr-defined]
    first, *_, last = (r.meta["loss_sum"] for r in ran.of("evaluation"))
    assert first != last


@pytest.mark.parametrize("wrap", ["module", "method", "partial"])
def test_a_copy_changes_nothing_of_the_loss(wrap: str) -> None:
    from functools import partial

    module = Centred()
    made = make_loss({"module": module, "method": module.forward, "partial": partial(module)}[wrap])
    output, target = torch.randn(4, 3, 5, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.long)
    before = made.apart()(output, target)
    scoring = made.apart(training=False)
    assert scoring(output, target) == scoring(output, target)
    assert made.count(target, describe(output)) == 12
    assert module.calls == 0 and module.training and not module.centre.any()
    assert made(output, target) == before and module.calls == 1


def test_a_loss_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.loss: peculiar.Keeping cannot be copied, .* tensors without a graph"):
        prepare(wanted("keeping"), ".", ".")


def draws(*args: Any, **changes: Any) -> Ran:
    return run_threads(wanted("sampled", *args, eval=Eval(every=1), **changes))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_v"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow(keep=2)
def test_what_a_loss_draws_follows_from_the_seed_alone(schedule: str, ranks: int) -> None:
    """Whatever P and the schedule, beside layers that draw too; evaluations and counts likewise."""
    if schedule == "zb_v" and ranks == 1:
        ranks = 2
    first, other = draws("gpipe", 1), draws(schedule, ranks)
    assert first.job.random_loss
    assert first.losses() == other.losses() and equal(first.state(), other.state())
    evaluations = [[(r.meta["loss_sum"], r.meta["loss_count"]) for r in ran.of("evaluation")] for ran in (first, other)]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 3


def test_draws_differ_from_step_to_step_and_replica_to_replica() -> None:
    ran, again = draws("1f1b", 2, replicas=2), draws("1f1b", 2, replicas=2)
    assert ran.losses() == again.losses() and equal(ran.state(0), again.state(0))
    close(ran.state(0), ran.state(1))
    counts = [r.meta["loss_count"] for r in ran.of("step") if r.meta["loss_count"]]
    assert len(set(counts)) > 1


def test_a_loss_that_draws_nothing_is_not_seeded() -> None:
    assert not prepare(wanted("Centred"), ".", ".").random_loss
    assert not prepare(settings(), ".", ".").random_loss
