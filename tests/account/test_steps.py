"""The document of a step holds all that a viewer needs, and says the same as what it was made of."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import recorded
from virtual import MS, last_step

from engine.account.bubble import account
from engine.account.path import critical_path
from engine.account.replay.waterfall import BARS, Waterfall, Waterfalls
from engine.account.steps import document
from engine.categories import NAMES
from engine.plan.simulate import Costs, simulate
from engine.plan.timeline import Kind, Timeline


def written(replicas: int = 2) -> tuple[dict[str, Any], Timeline]:
    of = recorded.job("1f1b", 2, 4, replicas)
    timeline = last_step(of.compute, replicas)
    waterfall = Waterfalls(of.compute, replicas).of(timeline)
    predicted = simulate(of.compute, Costs(recorded.costs(of.compute) * 1e-9, np.zeros(2)))
    text = document(of, 7, timeline, waterfall, predicted, [0, 0, 25, 25][: 2 * replicas])
    return json.loads(text), timeline


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_says_what_was_measured(replicas: int) -> None:
    told, timeline = written(replicas)
    spans, origin = told["spans"], told["origin"]
    assert len(set(map(len, spans.values()))) == 1
    for index, span in enumerate(timeline):
        at = {key: column[index] for key, column in spans.items()}
        assert (at["rank"], at["kind"], at["stage"], at["microbatch"]) == (
            span.rank,
            span.kind,
            span.stage,
            span.microbatch,
        )
        assert (origin + at["start"], at["length"]) == (span.start, span.end - span.start)
        assert told["names"]["kind"][str(at["kind"])] == Kind(span.kind).name
        if span.kind == Kind.WAIT_B:
            assert spans["kind"][at["sender"]] == Kind.SEND_B
            assert (spans["stage"][at["sender"]], spans["microbatch"][at["sender"]]) == (
                span.stage + 1,
                span.microbatch,
            )
    assert (told["step"], told["ranks"], told["replicas"], told["schedule"]) == (7, 2, replicas, "1f1b")
    assert len(told["uncertainty"]) == len(told["windows"]) == 2 * replicas


def test_bars_path_and_account_add_up() -> None:
    told, timeline = written()
    assert list(told["waterfall"]["bars"]) == list(BARS) and len(told["waterfall"]["alone"]) == 2
    assert sum(told["waterfall"]["bars"].values()) == sum(told["path"]["length"]) == told["time"]
    assert told["account"] == account(timeline, 2, 2).table.tolist()
    sums = [[0] * len(NAMES) for _ in told["windows"]]
    for rank, name, length in zip(*(told["stretches"][key] for key in ("rank", "name", "length")), strict=True):
        sums[rank][name] += length
    assert sums == told["account"]
    path = critical_path(timeline, 2)
    assert [told["names"]["cause"][cause] for cause in told["path"]["cause"]] == [link.cause for link in path]


def test_the_prediction_is_in_nanoseconds_from_zero() -> None:
    told, _ = written()
    predicted = told["predicted"]
    assert min(predicted["start"]) == 0 and set(predicted["length"]) == {2 * MS, 4 * MS}
    assert set(predicted["rank"]) == {0, 1} and len(predicted["start"]) == 2 * 2 * 4


def test_it_is_compact() -> None:
    of = recorded.job("gpipe", 2, 4)
    text = document(of, 0, last_step(of.compute), None, None, [0, 0])
    told = json.loads(text)
    said = told["no_waterfall"]
    tables = json.dumps({key: told[key] for key in ("categories", "bars")}, separators=(",", ":"))[1:-1]
    assert (
        " " not in text.replace(said, "").replace(tables, "")
        and told["waterfall"] is None
        and told["predicted"] is None
    )
    assert said == "No waterfall: not every rank ran all of its program, as in a short last batch."
    assert (
        json.loads(document(of, 0, last_step(of.compute), Waterfall((1,) * 9, 0, (9,)), None, [0, 0]))["no_waterfall"]
        is None
    )
