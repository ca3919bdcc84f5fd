"""plan.json and the plan on the terminal."""

import json

import pytest

from engine.plan.actions import Placement
from engine.plan.lowering import lower
from engine.plan.schedules import build
from engine.plan.simulate import Costs, figures, simulate
from engine.plan.views.summary import MOST_LISTED, plan_summary, plan_text
from engine.plan.views.text import from_csv, to_csv


def summary(program, layers=None, **costs):
    costs = Costs.from_settings(costs, program.placement, program.microbatches)
    timeline = simulate(program, costs)
    result = figures(program, timeline)
    lowered = lower(program, reduce=True, step=True)
    content = plan_summary(program, lowered, costs, timeline, result, layers)
    return content, plan_text(program, lowered, timeline, result)


def test_plan_json_of_the_worked_example():
    content, _ = summary(build("1f1b", 4, 8), [["a"], ["b", "c"], ["d"], ["e"]])
    assert json.loads(json.dumps(content)) == content
    sizes = {key: content[key] for key in ("schedule", "ranks", "stages", "microbatches", "placement")}
    assert sizes == {"schedule": "1f1b", "ranks": 4, "stages": 4, "microbatches": 8, "placement": [0, 1, 2, 3]}
    assert content["partition"] == [["a"], ["b", "c"], ["d"], ["e"]]
    assert content["bubble_fraction"] == content["bubble_rate"] == pytest.approx(9 / 33)
    assert content["makespan"] == 33
    assert (content["activations"], content["transfers"], content["copies"]) == (4, 48, 1)
    assert content["per_rank"][1] == {"rank": 1, "busy": 24, "idle": 9, "cost": 30, "peak_in_flight": 3}
    assert " ".join(content["program"][1]).startswith("1F0 1F1 1F2 1B0 1F3 1B1")
    assert content["lowered"][3][:3] == ["3RECV_F0", "3F0", "3RECV_F1"]
    assert content["costs"] == {
        "forward": [1] * 4, "backward": [2] * 4, "input_backward": [1] * 4, "weight_backward": [1] * 4,
        "transfer": [0] * 4,
    }  # fmt: skip
    assert "direction" not in content


def test_the_program_in_plan_json_is_the_program():
    program = build("gpipe", 3, 5)
    content, _ = summary(program)
    text = "".join(",".join(row) + "\n" for row in content["program"])
    assert from_csv(text, name="gpipe") == program
    assert "".join(",".join(row) + "\n" for row in content["lowered"]) == to_csv(lower(program, reduce=True, step=True))
    assert content["partition"] is None


def test_stages_with_copies_have_a_rank_per_direction():
    program = from_csv("0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1\n", Placement(2, ((0, 1), (1, 0)), (0, 1)))
    content, _ = summary(program)
    assert content["placement"] == [[0, 1], [1, 0]]
    assert content["direction"] == [0, 1]


def test_a_long_program_is_left_to_the_csv():
    program = build("gpipe", 2, MOST_LISTED // 4 + 1)
    content, text = summary(program)
    assert not {"program", "lowered"} & set(content)
    assert content["program_csv"] == "program.csv"
    assert max(map(len, text.splitlines())) <= 120


def test_the_terminal_shows_timeline_ranks_and_figures():
    _, text = summary(build("gpipe", 2, 3), transfer=0.5)
    head, _, table = text.partition("\nrank        busy")
    assert head == (
        "gpipe: 2 ranks, 2 stages, 3 micro-batches, 12 computations\n"
        "\n"
        "rank 0 | F0 F1 F2 .  .  .  .  B0 -  B1 -  B2 -\n"
        "rank 1 | .  F0 F1 F2 B0 -  B1 -  B2 -  .  .  .\n"
    )
    lines = [line.split() for line in table.splitlines()]
    assert ["0", "9", "4", "3"] in lines
    assert ["1", "9", "4", "3"] in lines
    assert ["makespan", "13"] in lines
    (fraction,) = [line for line in lines if line[:2] == ["bubble", "fraction"]]
    assert fraction[2] == "0.3077"  # 1 - 18 / 26
    assert [line[1] for line in lines if line[:1] in (["activations"], ["transfers"])] == ["3", "6"]
