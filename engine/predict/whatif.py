"""What a run's step would have taken in another configuration, by its own measured costs.

    costs of layers ─> of the scenario's stages ─> each computation of its program ─┐
    messages by their bytes, updates and reductions by parameters, loading, ────────┴─> replay.py ─> step
    the interpreter's time for each action                                                 memory: the most kept at once

Computations of a kind do not all take the same, and who waits for a late one depends on the schedule. So the step is
replayed several times, each time as one of the run's steps was: every computation draws how far it is from what is
usual, out of what that step's computations of its kind were (one seed for all scenarios). The median is the prediction,
as the measured step is a median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from engine.account.measure import repeated
from engine.account.replay.replay import Replay
from engine.plan.actions import COMPUTE, Op, Program
from engine.plan.dependencies import Flat
from engine.plan.features import SPLIT, features
from engine.plan.schedules import build
from engine.predict.cuts import Cut, cut_of, held, memory
from engine.predict.fits import FIXED, PROPORTIONAL, TELLING, Line, fit, telling
from engine.predict.measured import Floats, Measured

MEASURED, DOUBLED, FREE = "as measured", "twice the bandwidth", "free"  # what transfers cost
_WORK = 60_000  # computations that the draws of one prediction may replay
_DRAWS = (3, 32)  # at least, at most
_BACKWARD = (Op.B, Op.I)


@dataclass(frozen=True)
class Scenario:
    """A configuration to be predicted.

    `split` None: as the run's, or as even as the measured layers allow where there are more stages or fewer. `words`
    name it; `overrides` are what to change for it, empty where it cannot be run.
    """

    words: str
    schedule: str
    options: Mapping[str, Any]
    microbatches: int
    split: tuple[int, ...] | None = None
    recompute: bool = False
    transfer: str = MEASURED
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """A predicted step: seconds, and peak bytes by rank (`memory` [P], of which forwards leave `activations` [P]).

    `split`: first layer of each stage, None where each layer is cut in parts. `notes`: what was assumed.
    """

    scenario: Scenario
    step: float
    memory: tuple[float, ...]
    activations: tuple[float, ...]
    split: tuple[int, ...] | None
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class Predictor:
    """Predicts other configurations of one run; `others` are runs of the same model that know other sizes and kinds."""

    base: Measured
    others: Sequence[Measured] = ()
    _replays: dict[Any, Replay] = field(default_factory=dict)

    # -- what is known ---------------------------------------------------------------------------------------------

    @property
    def runs(self) -> tuple[Measured, ...]:
        """The run that is asked about, and the others that were given with it."""
        return (self.base, *self.others)

    @cached_property
    def sizes(self) -> list[float]:
        """Samples of a micro-batch for which computations were measured."""
        short = (rows for run in self.runs for rows, _ in run.short)
        return sorted({*(run.rows for run in self.runs), *short})

    @cached_property
    def lines(self) -> list[list[Line]] | None:
        """Lines of each layer's cost over samples: [forward, backward][L]; None where too few sizes were measured."""
        if not telling(self.sizes):
            return None
        points = [(run.rows, run.layers.mean(axis=0)) for run in self.runs]
        points += [each for run in self.runs for each in run.short]
        found = []
        for op in (Op.F, Op.B):
            fits = [fit([(rows, layers[op, at]) for rows, layers in points]) for at in range(len(self.base.names))]
            found.append([line for line in fits if line is not None])
        return found

    @cached_property
    def hop(self) -> Line | None:
        """The time of a message as a line over its bytes; None where the messages seen differ too little in size."""
        points = [point for run in self.runs for point in _messages(run)]
        return fit(points) if points else None

    def layers(self, halved: bool) -> Floats:
        """The costs of the layers with backwards in halves, or whole: [R, 4, L].

        Cutting costs something (the forward's operations are routed), so where the base does it the other way, a run
        that did it like this says what of it belongs to each kind: as it was, for micro-batches of the same size, else
        in proportion.
        """
        found = self.base.layers.copy()
        known = [run for run in self.others if bool(run.measured[Op.I]) == halved]
        if bool(self.base.measured[Op.I]) == halved or not known:
            return found
        alike = [run.layers.mean(axis=0) for run in known if run.rows == self.base.rows]
        if alike:
            found[:] = np.mean(alike, axis=0)
        elif halved:
            each = np.array([run.layers.mean(axis=(0, 2)) for run in known])
            part = float(np.mean(each[:, Op.I] / (each[:, Op.I] + each[:, Op.W])))
            found[:, Op.I], found[:, Op.W] = part * found[:, Op.B], (1 - part) * found[:, Op.B]
        return found

    @cached_property
    def halves_known(self) -> bool:
        """Whether some run measured backwards in halves (I and W), so that such schedules can be predicted."""
        return any(run.measured[Op.I] for run in self.runs)

    @property
    def own(self) -> Scenario:
        """The scenario of the run as it was."""
        raw = self.base.raw
        return Scenario("this run", raw["schedule"], raw["options"], raw["microbatches"], self.base.split)

    def program(self, scenario: Scenario) -> Program:
        """The compute-only program of a scenario. Raises ValueError where the schedule is not defined there."""
        raw = self.base.raw
        program = build(scenario.schedule, raw["ranks"], scenario.microbatches, dict(scenario.options))
        return repeated(program, raw["passes"])

    # -- predicting ------------------------------------------------------------------------------------------------

    def predict(self, scenario: Scenario) -> Prediction:
        """Predict a scenario. Raises ValueError, for the user, where it is not possible or too little was measured."""
        if scenario.microbatches != self.base.raw["microbatches"] and self.lines is None:
            raise ValueError(self._one_size(scenario))
        return self._predict(scenario, self.lines)

    def _one_size(self, scenario: Scenario) -> str:
        ends = [[[line] * len(self.base.names)] * 2 for line in (PROPORTIONAL, FIXED)]
        least, most = sorted(self._predict(scenario, lines).step for lines in ends)
        return (
            f"between {1e3 * least:.1f} ms, if computations take time for each sample only, and {1e3 * most:.1f} ms, "
            "if they take the same whatever their size"
        )

    def _predict(self, scenario: Scenario, lines: list[list[Line]] | None) -> Prediction:
        base, program = self.base, self.program(scenario)
        cut = cut_of(base, program.stages, scenario.split)
        table = self._computations(program, cut, lines)
        if scenario.recompute:
            table[:, _BACKWARD] += table[:, None, Op.F]
        flat = Flat(program)
        usual = table[:, flat.op, flat.stage, flat.microbatch]
        parts = self._around(program, cut) | {"delay": self._delays(program, cut, scenario, flat)}
        replay = self._replay(scenario, program)
        random = np.random.default_rng(0)
        spread, periods = np.array(base.raw["spread"]), []
        for draw in range(int(np.clip(_WORK // max(1, usual.size), *_DRAWS))):
            drawn, step = random.integers(spread.shape[-1], size=usual.shape), draw % len(spread)
            factor = np.empty_like(usual)
            for op in COMPUTE:
                here = flat.op == op
                factor[:, here] = spread[step, self._kind_drawn(op)][drawn[:, here]]
            periods.append(replay.period(duration=usual * factor + base.raw["overhead"], **parts))
        lasting, activations = memory(base, program, cut, self._rows(program), scenario.recompute)
        return Prediction(
            scenario=scenario,
            step=float(np.median(periods)),
            memory=tuple((lasting + activations).tolist()),
            activations=tuple(activations.tolist()),
            split=cut.split,
            notes=self._notes(scenario, program, cut),
        )

    def _kind_drawn(self, op: Op) -> Op:
        """The kind whose variation a computation has: its own, or that of another backward."""
        known = self.base.measured
        if known[op]:
            return op
        return next((other for other in (Op.B, Op.I, Op.W, Op.F) if known[other]), Op.F)

    def _replay(self, scenario: Scenario, program: Program) -> Replay:
        raw = self.base.raw
        reduced = self.base.reduces(program)
        key = scenario.schedule, tuple(scenario.options.items()), scenario.microbatches
        if key not in self._replays:
            gathered = reduced and raw["gathered"]
            self._replays[key] = Replay(program, raw["replicas"], reduced, raw["normed"], gathered)
        return self._replays[key]

    def _rows(self, program: Program) -> list[int]:
        """Samples of each micro-batch: they differ by one at most, larger ones first, anew in each pass."""
        count = program.microbatches // self.base.raw["passes"]
        small, extra = divmod(self.base.share, count)
        return ([small + 1] * extra + [small] * (count - extra)) * int(self.base.raw["passes"])

    def _computations(self, program: Program, cut: Cut, lines: list[list[Line]] | None) -> Floats:
        """[R, 4, S, M] in seconds, as is usual."""
        base, rows = self.base, self._rows(program)
        table = np.zeros((base.raw["replicas"], len(COMPUTE), program.stages, program.microbatches))
        measured = self.layers(SPLIT in features(program))
        for size in sorted(set(rows)):
            layers = measured.copy()
            if lines is not None:
                for op in COMPUTE:
                    line = lines[0 if op is Op.F else 1]
                    layers[:, op] *= [each.ratio(size, base.rows) for each in line]
            table[..., [m for m, own in enumerate(rows) if own == size]] = (layers @ cut.parts.T)[..., None]
        return table

    def _delays(self, program: Program, cut: Cut, scenario: Scenario, flat: Flat) -> Floats:
        """[R, n]: of the message that each computation needs."""
        found = np.zeros(len(flat))
        if scenario.transfer != FREE:
            rows = self._rows(program)
            edges = np.array(
                [[self._hop(way, edge, cut, scenario) for edge in range(program.stages)] for way in (0, 1)]
            )
            larger = {
                size: np.array(
                    [[self._grown(way, edge, cut, size) for edge in range(program.stages)] for way in (0, 1)]
                )
                for size in set(rows)
            }
            way = np.isin(flat.op, _BACKWARD).astype(np.int64)
            edge = np.where(way == 0, flat.stage - 1, flat.stage)
            moved = np.isin(flat.op, (Op.F, *_BACKWARD)) & (edge >= 0) & (edge < program.stages - 1)
            for at in np.flatnonzero(moved).tolist():
                place = way[at], edge[at]
                found[at] = edges[place] * larger[rows[int(flat.microbatch[at])]][place]
        return np.tile(found, (self.base.raw["replicas"], 1))

    def _bytes(self, way: int, edge: int, cut: Cut) -> float:
        sends = self.base.sends[cut.after[edge]]
        return 0.0 if sends is None else float(sends[way])

    def _known_hop(self, way: int, edge: int, cut: Cut) -> tuple[float, float]:
        """(bytes, seconds) of the measured message that is nearest to it: on the same edge, or else what is usual."""
        seconds = self.base.raw["delay"]
        if cut.split == self.base.split and seconds[way][edge] > 0:
            return self._bytes(way, edge, cut), seconds[way][edge]
        seen = _messages(self.base)
        return tuple(np.median(np.array(seen), axis=0).tolist()) if seen else (1.0, 0.0)

    def _larger(self, cut: Cut) -> float:
        """How many times the size of a message that was measured, at most, where that alone says how long it takes."""
        if self.hop is not None:
            return 1.0
        known = {(way, edge): self._known_hop(way, edge, cut) for way in (0, 1) for edge in range(len(cut.after) - 1)}
        found = [self._bytes(way, edge, cut) / size for (way, edge), (size, s) in known.items() if s > 0 and size > 0]
        return max(found, default=1.0)

    def _hop(self, way: int, edge: int, cut: Cut, scenario: Scenario) -> float:
        """Seconds of a message on an edge, as large as the run's micro-batches make it."""
        if edge + 1 >= len(cut.after):
            return 0.0
        (known, seconds), size = self._known_hop(way, edge, cut), self._bytes(way, edge, cut)
        seconds *= self.hop.ratio(size, known) if self.hop else max(1.0, size / known)
        if scenario.transfer == DOUBLED:
            seconds *= self.hop.ratio(size / 2, size) if self.hop else 0.5
        return float(seconds)

    def _grown(self, way: int, edge: int, cut: Cut, rows: int) -> float:
        """How many times as long a message takes for micro-batches of so many samples. Never less, where no two sizes
        of messages were seen.
        """
        size, times = self._bytes(way, edge, cut), rows / self.base.largest
        return self.hop.ratio(size * times, size) if self.hop else max(1.0, times)

    def _around(self, program: Program, cut: Cut) -> dict[str, Any]:
        """What there is besides computations and their messages: fields of `Observed`."""
        base, raw = self.base, self.base.raw
        world = raw["ranks"] * raw["replicas"]
        own = self.program(self.own).placement
        loaded = np.array(raw["loaded"]).reshape(raw["replicas"], raw["ranks"], 2).mean(axis=0)
        ends = [(0, own.rank(0)), (-1, own.rank(own.stages - 1))]
        load = np.zeros((raw["ranks"], 2))
        for stage, home in ends:
            for rank in program.placement.ranks_of(stage % program.stages):
                load[rank] = np.maximum(load[rank], loaded[home])
        update = float(np.sum(raw["step"]))
        had = held(own, cut_of(base, own.stages, base.split).parts @ base.parameters)
        wanted = held(program.placement, cut.parts @ base.parameters)
        step = update * wanted / (had.sum() * raw["replicas"]) if had.sum() else np.full(raw["ranks"], update / world)
        reduce, gather = (self._by_parameters(np.array(raw[name])) for name in ("reduce", "gather"))
        return {
            "loaded": np.tile(load, (raw["replicas"], 1)),
            "reduce": cut.parts @ reduce,
            "gather": cut.parts @ gather,
            "count": raw["count"],
            "norm": np.array(raw["norm"]),
            "step": np.tile(step, raw["replicas"]),
        }

    def _by_parameters(self, stages: Floats) -> Floats:
        """What a stage has, shared out among its layers by their parameters: [L]."""
        base, found = self.base, np.zeros(len(self.base.names))
        for stage, (first, end) in enumerate(zip(base.split, [*base.split[1:], len(found)], strict=True)):
            own = base.parameters[first:end]
            found[first:end] = stages[stage] * (own / own.sum() if own.sum() else np.full(len(own), 1 / len(own)))
        return found

    def _notes(self, scenario: Scenario, program: Program, cut: Cut) -> tuple[str, ...]:
        """What the prediction had to assume."""
        base, notes = self.base, []
        halved = SPLIT in features(program)
        if halved and not self.halves_known:
            notes.append("a backward is cut in equal halves, at no cost: no run given has one in halves")
        if cut.split is None:
            notes.append("each layer is cut in equal parts")
        copies, measured = program.placement.copies, self.program(self.own).placement.copies
        if base.reduces(program) and not base.raw["reduced"]:
            notes.append("without the reduction between its two copies, which this run does not have")
        elif base.reduces(program) and copies != measured:
            holders = base.raw["replicas"] * copies, base.raw["replicas"] * measured
            notes.append("reductions among {} ranks as long as they were among {}".format(*holders))
        rows = self._rows(program)
        if scenario.microbatches != base.raw["microbatches"] and not (
            self.sizes[0] <= min(rows) and max(rows) <= self.sizes[-1]
        ):
            notes.append(f"extrapolated: measured were {_listed(self.sizes)} samples in a micro-batch")
        if scenario.transfer == DOUBLED and self.hop is None:
            notes.append("at best: messages of one size do not tell bandwidth from latency")
        if scenario.transfer == MEASURED and (larger := self._larger(cut)) >= TELLING:
            notes.append(
                "at worst: messages of one size do not tell bandwidth from latency, and of those that are up to "
                f"{larger:.0f} times as large it is said that they take as many times as long"
            )
        if scenario.recompute:
            notes.append("as if it were: this engine cannot recompute yet")
        return tuple(notes)


def _messages(run: Measured) -> list[tuple[float, float]]:
    """(bytes, seconds) for each edge and way on which messages were seen."""
    found = []
    for edge, first in enumerate(run.split[1:]):
        sends = run.sends[first - 1]
        for way in (0, 1):
            if sends is not None and run.raw["delay"][way][edge] > 0:
                found.append((float(sends[way]), float(run.raw["delay"][way][edge])))
    return found


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
