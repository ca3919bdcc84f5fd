"""Overlapped pairs: one visible action everywhere, done back to back or by the model's own function."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawings import image_of
from harness import ADAM, Ran, close, equal, plain, run_threads, settings
from hypothesis import assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from program_strategies import executed
from test_split_runs import run_program

from engine.account.records.gather import Steps
from engine.account.replay.observed import durations
from engine.pipeline.stage.overlap import LayerCall, make_overlap
from engine.plan.actions import COMPUTE, Op, Program
from engine.plan.schedules import build
from engine.plan.simulate import Costs, simulate
from engine.plan.timeline import COMPUTE_KINDS, Kind, Span, Timeline
from engine.plan.verify import InvalidProgram, peak_in_flight, verify
from engine.plan.views.grid import grid
from engine.report.perfetto import trace_events
from engine.report.pictures.timeline import Panel
from engine.settings import Settings
from engine.telemetry.position import Place, place_of

LOSS = {"_target_": "toys.TokenLoss"}
PAIRED = [("dualpipe_v", 1, 3), ("dualpipe_v", 2, 4), ("dualpipe_v", 3, 7), ("dualpipe", 2, 6), ("dualpipe", 4, 8)]
HOW = ["test_pairs.before", "test_pairs.between", "models.overlap.in_thread"]
Backward = Callable[[], None]
calls: list[int] = []


def before(layers: Sequence[LayerCall], value: Any, backward: Backward) -> Any:
    """The backward first."""
    backward()
    for layer in layers:
        value = layer(value)
    return value


def between(layers: Sequence[LayerCall], value: Any, backward: Backward, after: int = 1) -> Any:
    """The backward behind the first `after` layers."""
    calls.append(len(layers))
    for index, layer in enumerate(layers):
        if index == after:
            backward()
        value = layer(value)
    if len(layers) <= after:
        backward()
    return value


def never(layers: Sequence[LayerCall], value: Any, backward: Backward) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def twice(layers: Sequence[LayerCall], value: Any, backward: Backward) -> Any:
    backward()
    return before(layers, value, backward)


def fails(layers: Sequence[LayerCall], value: Any, backward: Backward) -> Any:
    raise ArithmeticError("the overlap fails as asked")


def of_two(layers: Any, value: Any) -> Any:
    return value


def wanted(schedule: str, ranks: int, microbatches: int, how: str | None = None, **model: Any) -> Settings:
    overlap = {} if how is None else {"overlap": {"_target_": how}}
    given = {"_target_": "toys.mlp", "layers": 12, "loss": LOSS} | overlap | model
    return settings(schedule, ranks, microbatches, model=given, clip_norm=0.05, optimizer=ADAM)


# ---- the model's own function --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), PAIRED)
@pytest.mark.slow
def test_trains_as_without(schedule: str, ranks: int, microbatches: int, how: str) -> None:
    """Bitwise, whatever is done first: a backward adds to gradients, a forward only reads weights."""
    given = wanted(schedule, ranks, microbatches, how)
    expected = run_threads(wanted(schedule, ranks, microbatches))
    ran = run_threads(given)
    assert equal(ran.state(), expected.state())
    assert ran.losses() == expected.losses()
    one, losses = plain(replace(given, schedule={"name": "gpipe"}), microbatched=True)
    close(ran.state(), one)
    assert ran.losses() == pytest.approx(losses, rel=1e-9)
    peaks = [ran.workers[rank].executor.peak_in_flight for rank in range(ranks)]
    assert peaks == peak_in_flight(build(schedule, ranks, microbatches))
    assert [w.executor.peak_bytes for w in ran.workers.values()] == [
        expected.workers[rank].executor.peak_bytes for rank in ran.workers
    ]


def with_pairs(program: Program, rng: random.Random) -> Program:
    """Neighbouring computations overlapped, two by two, at random."""
    rows = [list(program.actions(rank)) for rank in range(program.ranks)]
    for row in rows:
        at = 0
        while at + 1 < len(row):
            fused = rng.random() < 0.6
            row[at] = row[at]._replace(fused=fused)
            at += 1 + fused
    return Program.of("paired", program.placement, program.microbatches, rows)


@examples(max_examples=15)
@given(executed(), st.integers(0, 2**32), st.sampled_from(HOW))
@pytest.mark.slow
def test_any_pairs_of_any_program_train_as_without(program: Program, seed: int, how: str) -> None:
    """Whatever is paired, and in two directions too; only a forward with a backward is done together."""
    program = with_pairs(program, random.Random(seed))
    try:
        verify(program)
    except InvalidProgram:  # what a pair's first has made leaves late: somebody may wait for it in vain
        assume(False)
    assume(all(program.placement.stages_of(rank) for rank in range(program.ranks)))
    model = {"_target_": "toys.mlp", "loss": LOSS}
    changes: dict[str, Any] = {"global_batch_size": 7, "clip_norm": 0.05, "optimizer": ADAM, "steps": 2}
    expected, _ = run_program(program, model=model, **changes)
    ran, _ = run_program(program, model=model | {"overlap": {"_target_": how}}, **changes)
    assert equal(ran.state(), expected.state()) and ran.losses() == expected.losses()
    peaks = [[w.executor.peak_in_flight for _, w in sorted(x.workers.items())] for x in (ran, expected)]
    assert peaks[0] == peaks[1] == peak_in_flight(program)
    for rank in range(program.ranks):
        assert paired_in(ran, rank) == [action.fused for action in program.actions(rank)]


def paired_in(ran: Ran, rank: int) -> list[bool]:
    """Which of a rank's computations in the last step were the first of a pair, in the program's order."""
    record = [record for record in ran.of("step") if record.meta["rank"] == rank][-1]
    first = set(record.arrays["pairs"][:, 0].tolist())
    spans = record.arrays["spans"].tolist()
    at = {(kind, stage, m): number for number, (kind, stage, m, *_) in enumerate(spans) if kind in COMPUTE}
    return [at[a.op, a.stage, a.microbatch] in first for a in ran.job.compute.actions(rank)]


def test_is_called_for_every_pair_and_for_nothing_else() -> None:
    calls.clear()
    program = build("dualpipe_v", 2, 5)
    pairs = sum(action.fused for rank in range(2) for action in program.actions(rank))
    ran = run_threads(wanted("dualpipe_v", 2, 5, "test_pairs.between", layers=8))
    assert calls == [2] * (3 * pairs) and pairs > 0
    assert len(ran.of("step")) == 6


def test_keywords_are_bound() -> None:
    calls.clear()
    overlap = {"_target_": "test_pairs.between", "after": 0}
    run_threads(wanted("dualpipe_v", 1, 3, overlap=overlap))
    assert calls


def test_masks_and_weight_gradients_that_wait() -> None:
    """A layer that draws is seeded as ever; a forward whose backward comes in halves is routed as ever."""
    model = {"_target_": "toys.mlp4", "p": 0.4, "layers": 4}
    given = replace(wanted("dualpipe", 2, 6), model={"_target_": "toys.mlp4", "p": 0.4, "loss": LOSS})
    hooked = replace(given, model=given.model | {"overlap": {"_target_": "test_pairs.between"}})
    expected, ran = run_threads(given), run_threads(hooked)
    assert model and equal(ran.state(), expected.state())
    held = [max(r.meta["peak_activation_bytes"] for r in x.of("step")) for x in (ran, expected)]
    assert held[0] == held[1]


def test_a_backward_that_needs_the_pairs_own_forward_comes_after_it(tmp_path: Path) -> None:
    path = tmp_path / "program.csv"
    path.write_text("0F0,0F1,0B0,0B1\n(1F0;1B0)OVERLAP_F_B,(1F1;1B1)OVERLAP_F_B\n")
    given = replace(wanted("gpipe", 2, 2, "test_pairs.never"), schedule={"name": "csv", "path": str(path)})
    expected, _ = plain(replace(given, schedule={"name": "gpipe"}), microbatched=True)
    assert equal(run_threads(given).state(), expected)


@pytest.mark.parametrize(("how", "times"), [("test_pairs.never", 0), ("test_pairs.twice", 2)])
def test_a_backward_is_called_once(how: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"model.overlap called backward {times} times for one pair") as caught:
        run_threads(wanted("dualpipe_v", 2, 4, how))
    assert "OVERLAP_F_B" in str(place_of(caught.value).action)


def test_an_error_names_the_pair() -> None:
    with pytest.raises(ArithmeticError) as caught:
        run_threads(wanted("dualpipe_v", 1, 3, "test_pairs.fails"))
    assert place_of(caught.value) == Place(1, 1, "(1F1;0B0)OVERLAP_F_B")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("test_pairs.before", "is not a section"),
        ({"_target_": "test_pairs.befor"}, "did you mean before"),
        ({"_target_": "test_pairs.of_two"}, "layers"),
        ({"_target_": "test_pairs.before", "aftre": 1}, "takes no such keyword"),
        ({"_target_": "test_pairs.wanted", "schedule": "x", "ranks": 1, "microbatches": 1}, "cannot be called"),
        ({}, "has no _target_"),
    ],
)
def test_what_cannot_overlap_is_refused_before_anything_starts(section: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_overlap(section)
    with pytest.raises(ValueError, match=words):
        run_threads(wanted("dualpipe_v", 1, 3, overlap=section))


# ---- one visible action --------------------------------------------------------------------------------------------


def traced(ran: Ran) -> Timeline:
    steps = Steps(ran.job)
    *_, last = [step for record in ran.of("step") if (step := steps.add(record))]
    assert last.recorded is not None
    return last.recorded.timeline


@pytest.mark.parametrize("how", [None, "test_pairs.between"])
@pytest.mark.slow(keep=1)
def test_pairs_of_a_run_are_those_of_the_program(how: str | None) -> None:
    program = build("dualpipe", 4, 8)
    timeline = traced(run_threads(wanted("dualpipe", 4, 8, how)))
    spans = list(timeline)
    expected = [
        (rank, a.op, a.stage, a.microbatch, b.op, b.stage, b.microbatch)
        for rank in range(4)
        for a, b in itertools.pairwise(program.actions(rank))
        if a.fused
    ]
    found = [(a.rank, *a[1:4], *b[1:4]) for a, b in ((spans[i], spans[j]) for i, j in timeline.pairs.tolist())]
    assert found == expected
    inside = [spans[i].start <= spans[j].start and spans[j].end <= spans[i].end for i, j in timeline.pairs.tolist()]
    assert set(inside) == {how is not None}


def test_simulated_pairs_are_those_of_the_program() -> None:
    program = build("dualpipe_v", 3, 6)
    timeline = simulate(program, Costs.from_settings({}, program.placement, 6))
    spans = list(timeline)
    for first, second in timeline.pairs.tolist():
        a, b = spans[first], spans[second]
        assert (a.rank, a.kind, b.kind) == (b.rank, Op.F, Op.B) and a.end <= b.start
    assert len(timeline.pairs) == sum(a.fused for r in range(3) for a in program.actions(r))


PAIR = [Span(0, Kind.F, 0, 7, 0, 10), Span(0, Kind.B, 7, 3, 10, 30), Span(0, Kind.F, 0, 8, 30, 40)]
TOGETHER = [PAIR[0]._replace(end=24), PAIR[1]._replace(start=6, end=22), PAIR[2]._replace(start=24, end=30)]


def paired(spans: Sequence[Span]) -> Timeline:
    timeline = Timeline.of(spans, [[0, 40]], measured=True)
    return replace(timeline, pairs=np.array([[0, 1]]))


@pytest.mark.parametrize("spans", [PAIR, TOGETHER], ids=["in turn", "together"])
def test_trace_has_one_slice_around_both(spans: Sequence[Span]) -> None:
    slices = [e for e in trace_events(paired(spans), 1) if e["ph"] == "X" and e["cat"] != "critical path"]
    assert [e["name"] for e in slices] == ["(0F7;7B3)OVERLAP_F_B", "0F7", "7B3", "0F8"]
    whole, *parts = slices[:3]
    assert whole["ts"] == 0 and whole["dur"] == max(s.end for s in spans[:2]) / 1000
    assert all(e["tid"] == whole["tid"] for e in slices)
    for part in parts:
        assert whole["ts"] <= part["ts"] and part["ts"] + part["dur"] <= whole["ts"] + whole["dur"]


def test_picture_frames_a_pair() -> None:
    ink, sky, orange = (30, 30, 30), (86, 180, 233), (230, 159, 0)

    def column(spans: Sequence[Span], at: float) -> list[tuple[int, ...]]:
        pixels = np.asarray(image_of([Panel("", paired(spans), 1e-9, 1)]))[50:80]
        return [tuple(p) for p in pixels[:, 136 + round(1248 * at)].tolist()]

    turn, together = column(PAIR, 19.2 / 40), column(TOGETHER, 7.2 / 40)
    assert turn[0] == turn[-1] == together[0] == together[-1] == ink
    assert orange in turn and sky not in turn
    assert sky in together[:15] and orange in together[15:] and orange not in together[:14]
    assert column(PAIR, 37.2 / 40)[0] != ink


def test_grid_joins_a_pair() -> None:
    program = build("dualpipe_v", 1, 3)
    assert "1F1& 0B0" in grid(program)
    timeline = simulate(program, Costs.from_settings({}, program.placement, 3))
    assert "1F1&0B0 -" in grid(timeline)


def test_what_is_done_together_is_not_counted_twice() -> None:
    assert durations(paired(PAIR)).tolist() == [10, 20, 10]
    assert durations(paired(TOGETHER)).tolist() == [8, 16, 6]
    timeline = traced(run_threads(wanted("dualpipe_v", 2, 4, "test_pairs.between")))
    compute = np.isin(timeline.kind, COMPUTE_KINDS)
    assert (durations(timeline)[compute] >= 0).all()


def test_the_function_sees_layers_by_name() -> None:
    call = LayerCall("block", torch.nn.Tanh(), lambda value: value + 1)
    assert (call(1), call.name) == (2, "block")
