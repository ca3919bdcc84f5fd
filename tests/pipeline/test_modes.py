"""Each module keeps the mode that its maker has put it in: training starts with it, evaluation gives it back."""

from __future__ import annotations

import pytest
import torch
from harness import Ran, equal, plain, run_threads, settings
from peculiar import Frozen
from torch import nn

from engine.pipeline.modes import begin_training, evaluating
from engine.settings import Eval, Settings


def wanted(how: str, every: int = 0, schedule: str = "1f1b") -> Settings:
    model = {"_target_": "peculiar.frozen", "how": how, "loss": {"_target_": "toys.TokenLoss"}}
    data = {"_target_": "toys.Tokens", "evaluation": {"samples": 16}}
    return settings(schedule, 2, 4, model=model, data=data, eval=Eval(every=every))


def assert_frozen(ran: Ran, layers: str) -> None:
    """The statistics that were to stay did, and others moved."""
    for name in layers:
        assert torch.equal(ran.state()[f"{name}.frozen.running_mean"], torch.full((8,), 0.5, dtype=torch.float64))
        assert int(ran.state()[f"{name}.frozen.num_batches_tracked"]) == 0
    assert int(ran.state()["a.norm.num_batches_tracked"]) == 12


@pytest.mark.parametrize(("how", "layers"), [("flag", "a"), ("whole", "b")])
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.slow(keep=3)
def test_what_its_maker_left_in_evaluation_stays_there(how: str, layers: str, every: int, schedule: str) -> None:
    """From the first step on, and after evaluations: what one process trains that never calls `train()`."""
    ran = run_threads(wanted(how, every, schedule))
    state, losses = plain(ran.job.settings, microbatched=True)
    assert ran.losses() == losses and equal(ran.state(), state)
    assert_frozen(ran, layers)
    assert len(ran.of("evaluation")) == 3 * every


@pytest.mark.parametrize("every", [0, 1])
def test_what_its_own_train_keeps_in_evaluation_stays_there(every: int) -> None:
    """The usual way to freeze BatchNorm for one's own loop: as if its maker had left it so."""
    ran, same = run_threads(wanted("override", every)), run_threads(wanted("flag"))
    assert ran.losses() == same.losses() and equal(ran.state(), same.state())
    assert_frozen(ran, "a")


class Merging(nn.Linear):
    """Does more on a change of mode than to set a flag."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def test_modes_are_changed_by_calls_and_restored_module_by_module() -> None:
    module = nn.Sequential(Merging(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).eval(), Frozen(2, "override"))
    begin_training(module)
    flags = {name: part.training for name, part in module.named_modules()}
    assert [name for name, training in flags.items() if not training] == ["1", "1.0", "1.1", "2.frozen"]
    with pytest.raises(ArithmeticError), evaluating([module]):
        assert not any(part.training for part in module.modules())
        assert module[0].merged
        raise ArithmeticError
    assert {name: part.training for name, part in module.named_modules()} == flags
    assert not module[0].merged
