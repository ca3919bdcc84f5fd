"""Choosing a schedule from the command line: `plan.compare`, its limit, and a sweep of plans."""

from __future__ import annotations

import json

import command
import pytest
from command import Engine, Said

from engine.cli import run

engine = command.engine  # a fixture
SIZES = ("mode=plan", "pipeline.ranks=4", "pipeline.microbatches=8")


def first_words(text: str, head: str = "schedule") -> list[str]:
    """The first word of every line of the table that begins with `head`."""
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(head) and "transfers" in line)
    rows = lines[begin + 1 :]
    return [line.split()[0] for line in rows[: rows.index("") if "" in rows else None]]


def content(said: Said, name: str) -> dict:
    return json.loads((said.runs[0] / name).read_text())


def test_one_table_with_the_cheapest_first(engine: Engine) -> None:
    said = engine(*SIZES, "plan.compare=[gpipe,1f1b,zb_v,zb_h1,interleaved_1f1b]")
    assert said.code == 0 and said.err == ""
    names = ["zb_v", "zb_h1", "interleaved_1f1b", "1f1b", "gpipe"]
    assert first_words(said.out) == names
    assert [row["name"] for row in content(said, "comparison.json")] == names
    assert [row["cost"] for row in content(said, "comparison.json")] == [24, 27, 28.5, 33, 33]
    assert (said.runs[0] / "comparison.txt").read_text().rstrip() in said.out
    assert content(said, "plan.json")["schedule"] == content(said, "summary.json")["schedule"] == "zb_v"
    assert (said.runs[0] / "program.csv").read_text().startswith("0F0,0F1,")


def test_what_keeps_too_much_is_last_with_its_reason(engine: Engine) -> None:
    said = engine(*SIZES, "plan.compare=all", "plan.memory_limit=3")
    assert first_words(said.out)[:2] == ["v_half", "v_min"]
    assert "gpipe             -  keeps 8 activations, more than 3" in said.out
    assert content(said, "plan.json")["schedule"] == "v_half"


def test_the_chosen_schedule_brings_its_options(engine: Engine) -> None:
    said = engine(*SIZES, "schedule=interleaved_1f1b", "schedule.chunks=4", "plan.compare=[interleaved_1f1b,1f1b]")
    assert content(said, "comparison.json")[0]["cost"] == 24 + 9 / 4
    assert content(said, "plan.json")["stages"] == 16


def test_costs_are_per_slice_of_the_model_whatever_the_schedule(engine: Engine) -> None:
    said = engine(*SIZES, "plan.compare=[1f1b,zb_v]", "plan.costs.forward=[1,1,4,1]")
    assert said.code == 0
    assert all(row["cost"] >= 8 * (4 + 2) / 2 for row in content(said, "comparison.json"))


def test_where_none_is_possible_the_table_still_says_why(engine: Engine) -> None:
    said = engine("mode=plan", "pipeline.ranks=3", "plan.compare=[chimera,dualpipe,1f1b]", "plan.memory_limit=2")
    assert said.code == run.REFUSED
    assert said.err.startswith("error: none of plan.compare is possible for pipeline.ranks=3 ")
    assert said.out.count("pipeline.ranks must be even: 2, 4, 6") == 2
    assert "keeps 3 activations, more than 2" in said.out
    assert not (said.runs[0] / "plan.json").exists()


def test_a_single_plan_keeps_to_the_limit_too(engine: Engine) -> None:
    said = engine(*SIZES, "schedule=gpipe", "plan.memory_limit=4")
    assert said.code == run.REFUSED
    assert said.err == "error: gpipe keeps 8 activations, more than plan.memory_limit=4\n"
    assert engine(*SIZES, "schedule=1f1b", "plan.memory_limit=4").code == 0


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("plan.compare=[gpipe,1f2b]", ["plan.compare=1f2b", "did you mean 1f1b", "all"]),
        ("plan.compare=zb", ["plan.compare=zb", "did you mean zb_"]),
        ("plan.compare=3", ["plan.compare=3", "list of words"]),
        ("plan.compare=[gpipe,3]", ["plan.compare=['gpipe', 3]", "list of words"]),
        ("plan.compare={a:b}", ["plan.compare={a:b}"]),
        ("plan.compare=gpipe,1f1b", ["plan.compare=gpipe,1f1b", "-m"]),
        ("plan.memory_limit=0", ["plan.memory_limit=0", "above 0"]),
        ("plan.memory_limit=much", ["plan.memory_limit=much", "a number"]),
        ("plan.limit=3", ["plan.limit", "plan.memory_limit"]),
    ],
)
@pytest.mark.slow(keep=2)
def test_mistakes_are_refused_by_name(override: str, parts: list[str], engine: Engine) -> None:
    said = engine(*SIZES, override)
    assert said.code == run.REFUSED and "Traceback" not in said.err
    for part in parts:
        assert part in said.err, said.err


def test_a_comparison_trains_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "train", lambda *_: pytest.fail("it trains"))
    said = engine("plan.compare=all")
    assert said.code == run.REFUSED and "add mode=plan" in said.err


@pytest.mark.slow
def test_a_sweep_of_plans_ends_with_the_same_comparison(engine: Engine) -> None:
    """For each size the cheapest first, and what was refused last, with its reason."""
    said = engine(
        "-m", *SIZES[:2], "schedule=gpipe,dualpipe_v,zb_v", "pipeline.microbatches=4,8", "plan.memory_limit=7"
    )
    assert said.code == 1  # one of six
    table = said.out[said.out.rindex("\nschedule ") + 1 :].partition("\n\n")[0]
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["4", "zb_v"], ["0", "gpipe"], ["5", "zb_v"], ["3", "dualpipe_v"], ["1", "gpipe"], ["2", "schedule=dualpipe_v"],
    ]  # fmt: skip
    assert "pipeline.microbatches must be at least 2 x ranks = 8" in table
    assert "keeps 8 activations, more than plan.memory_limit=7" in table


@pytest.mark.slow
def test_a_sweep_shows_asynchronous_plans_in_their_steady_state(engine: Engine) -> None:
    """As `plan.compare` does: no bubble, and as many versions of the weights as there are ranks."""
    said = engine("-m", *SIZES, "schedule=pipedream,1f1b")
    lines = [line.split() for line in said.out[said.out.rindex("\nschedule ") + 1 :].splitlines()]
    assert lines[1] == ["0", "pipedream", "24", "0.0000", "0.0000", "4", "48", "1", "4"]
    assert lines[2][:3] == ["1", "1f1b", "33"]
