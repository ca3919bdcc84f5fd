"""Any module: cut by following its forward, it trains as it does in one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuts import Batch, Compared, seeded
from torch import Tensor, nn

from models.gpt import NextTokenLoss
from models.lstm import LSTM
from models.translator import Translator
from models.unet import UNet


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pixels(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def images(*rows: int, size: int = 8) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 1, size, size, generator=g, dtype=torch.float64),
            torch.randint(2, (n, size, size), generator=g),
        )
        for n in rows
    ]


def tokens(*rows: int, length: int = 6, words: int = 11) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randint(words, (n, length), generator=g), torch.randint(words, (n, length), generator=g)) for n in rows
    ]


def pairs(*rows: int) -> list[Batch]:
    return [({"source": x, "target": y}, y.roll(-1, 1)) for x, y in tokens(*rows)]


@pytest.mark.parametrize(("schedule", "ranks", "replicas"), [("gpipe", 2, 1), ("1f1b", 3, 2), ("zb_h1", 4, 1)])
@pytest.mark.slow(keep=1)
def test_unet_hands_its_skips_on_over_stages_in_between(schedule: str, ranks: int, replicas: int) -> None:
    made = Compared(
        seeded(lambda: UNet(width=4)), pixels, images(8, 8), ranks, replicas, schedule=schedule, microbatches=4
    ).check()
    assert made.layers[0][0] == "down.0"
    assert made.layers[-1][-1] == "head"


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zb_v", 2)])
@pytest.mark.slow(keep=1)
def test_encoder_decoder_takes_its_inputs_by_keyword(schedule: str, ranks: int) -> None:
    Compared(
        seeded(lambda: Translator(11, 8, width=8)), NextTokenLoss(), pairs(4, 4, 4), ranks, schedule=schedule,
        microbatches=4,
    ).check()  # fmt: skip


@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 3), ("dualpipe", 2)])
@pytest.mark.slow(keep=1)
def test_lstms_hand_on_their_state(schedule: str, ranks: int) -> None:
    Compared(
        seeded(lambda: LSTM(11, width=6)), NextTokenLoss(), tokens(8, 8), ranks, schedule=schedule, microbatches=4
    ).check()
