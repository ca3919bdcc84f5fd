"""A real run leaves its traced steps in the event file, with all that the tab needs to follow a message."""

from __future__ import annotations

import json
import warnings
from typing import Any

import command
import pytest
from command import Engine

from engine.report.tensorboard.series import PLUGIN, unpacked

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

engine = command.engine  # a fixture
SMALL = ["launch=threads", "model=mlp", "data=synthetic", "train.steps=3", "train.global_batch_size=8", "eval.every=0"]
SMALL += ["model.features=16", "model.hidden=8", "data.shape=[16]", "data.samples=32"]
NEEDS = {"F": ("WAIT_F", "SEND_F", -1), "B": ("WAIT_B", "SEND_B", 1), "I": ("WAIT_B", "SEND_B", 1)}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.slow(keep=1)
def test_every_message_of_a_real_run_can_be_followed(schedule: str, engine: Engine) -> None:
    said = engine(*SMALL, f"schedule={schedule}")
    assert said.code == 0, said.err
    found = EventAccumulator(str(said.runs[0]))
    found.Reload()
    tags = [tag for tag in found.Tags()["tensors"] if tag.startswith(PLUGIN)]
    assert tags[0] == f"{PLUGIN}/step0" and tags[-1] == f"{PLUGIN}/step2"
    for tag in tags:
        (point,) = found.Tensors(tag)
        told = json.loads(unpacked(point.tensor_proto.string_val[0]))
        assert sum(told["waterfall"]["bars"].values()) == told["time"]
        assert followed(told) == 8  # an activation and a gradient for each of four micro-batches


def followed(told: dict[str, Any]) -> int:
    """Messages whose user, wait and send belong together."""
    kinds, spans = told["names"]["kind"], told["spans"]
    rows = list(zip(*(spans[name] for name in ("rank", "kind", "stage", "microbatch", "sender")), strict=True))
    waits = {(kinds[str(kind)], rank, stage, microbatch): sender for rank, kind, stage, microbatch, sender in rows}
    count = 0
    for rank, kind, stage, microbatch, _ in rows:
        wait, send, step = NEEDS.get(kinds[str(kind)], ("", "", 0))
        sender = waits.get((wait, rank, stage, microbatch), -1)
        if sender >= 0:
            made = rows[sender]
            assert (kinds[str(made[1])], made[2], made[3]) == (send, stage + step, microbatch)
            count += 1
    return count
