"""`lr_scheduler=cosine` falls once over the whole run, however its length is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.prepare.pieces import whole_run
from engine.settings import Settings, Train

COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": None, "eta_min": 0.0}


@pytest.mark.parametrize(("train", "steps"), [
    (Train(steps=40, global_batch_size=64), 40),
    (Train(steps=None, epochs=3, global_batch_size=64), 3 * 23),  # 1437 samples: the last batch of an epoch is short
])  # fmt: skip
def test_its_length_is_the_runs(train: Train, steps: int) -> None:
    found = whole_run(replace(Settings(), train=train, lr_scheduler=COSINE), 1437)
    assert found == COSINE | {"T_max": steps}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=found["T_max"])
    rates = [0.5]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0.0)


@pytest.mark.parametrize("given", [None, {"_target_": None}, COSINE | {"T_max": 7}])
def test_what_is_given_stays(given: dict[str, object] | None) -> None:
    assert whole_run(replace(Settings(), lr_scheduler=given), 1437) == given
