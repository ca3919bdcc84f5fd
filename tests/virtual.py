"""The executor in virtual time: what each rank would record if actions, links, loads and reductions took just so long.

A rank is a generator that walks its lowered row and asks for facts (a message's arrival, the launch of another
replica's reduction); a fact is known once the rank that makes it has come so far. Nothing here knows of replays.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from engine.plan.actions import Op, Placement, Program
from engine.plan.lowering import lower
from engine.plan.timeline import Kind, Span, Timeline

MS = 1_000_000
START = 7 * 10**15  # the clock of a machine that has been up for a while

Facts = dict[Hashable, int]
Walk = Generator[Hashable, int, None]


@dataclass
class Virtual:
    """Nanoseconds. `action(world rank, op, stage, micro-batch, step)`, `link(source, destination)` in world ranks,
    `reduce(stage)` once all have begun, and `gather(stage)` where the optimizer is divided; `load` per batch
    on the first and the last stage's rank; `norm` None: no norms are exchanged; `between` after each action:
    the interpreter."""

    program: Program
    replicas: int = 1
    steps: int = 4
    action: Callable[[int, Op, int, int, int], int] = lambda rank, op, stage, microbatch, step: (2 + 2 * (op > 0)) * MS
    link: Callable[[int, int], int] = lambda source, destination: MS // 5
    reduce: Callable[[int], int] = lambda stage: MS
    gather: Callable[[int], int] | None = None
    load: int = MS // 2
    update: int = MS
    count: int = 0
    norm: int | None = None
    between: int = 0
    facts: Facts = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)
    windows: dict[int, list[list[int]]] = field(default_factory=dict)

    def timelines(self) -> list[Timeline]:
        """One per step."""
        self.spans = {step: [] for step in range(self.steps)}
        self.windows = {step: [] for step in range(self.steps)}
        self._settle([walk for rank in range(self._world) for walk in (self._rank(rank), self._behind(rank))])
        return [Timeline.of(self.spans[s], self._window(s), measured=True) for s in range(self.steps)]

    def _window(self, step: int) -> list[list[int]]:
        ends = [[self.facts["end", k, w] for w in range(self._world)] for k in (step - 1, step)]
        return [list(pair) for pair in zip(*ends, strict=True)]

    @property
    def _world(self) -> int:
        return self.program.ranks * self.replicas

    def _settle(self, walks: list[Walk]) -> None:
        """Advance whoever can, until all are through."""
        wanted: dict[int, Hashable] = {}
        for index, walk in enumerate(walks):
            self._advance(index, walk, None, wanted)
        while wanted:
            ready = [index for index, fact in wanted.items() if fact in self.facts]
            assert ready, f"all wait: {wanted}"
            for index in ready:
                self._advance(index, walks[index], self.facts[wanted.pop(index)], wanted)

    @staticmethod
    def _advance(index: int, walk: Walk, fact: int | None, wanted: dict[int, Hashable]) -> None:
        with suppress(StopIteration):
            wanted[index] = next(walk) if fact is None else walk.send(fact)

    def _rank(self, rank: int) -> Walk:
        clock = START
        self.facts["end", -1, rank] = clock
        for step in range(self.steps):
            clock = yield from self._step(rank, step, clock)
            self.facts["end", step, rank] = clock

    def _step(self, rank: int, step: int, clock: int) -> Generator[Hashable, int, int]:
        add = self.spans[step].append
        replica, own = divmod(rank, self.program.ranks)
        ends = [self.program.placement.rank(stage) == own for stage in (0, self.program.stages - 1)]
        self.facts["begin", step, rank] = clock
        loading, counting = any(ends), self.replicas > 1 and ends[1]
        unused = set(self.program.placement.stages_of(own)) if self.gather and step else set()
        row = lower(self.program, reduce=self.replicas > 1, step=True, gather=self.gather is not None).actions(own)
        for action in row:
            op, stage, microbatch = action.op, action.stage, action.microbatch
            if op in (Op.F, Op.B, Op.I, Op.W):
                source = self._source(op, stage, microbatch, own)
                if source is not None:
                    began = clock
                    if loading:
                        add(Span(rank, Kind.WAIT_DATA, -1, -1, clock, clock + self.load))
                        clock, loading = clock + self.load, False
                    clock = max(clock, (yield ("arrival", step, replica, *source)))
                    add(Span(rank, Kind.WAIT_F if op is Op.F else Kind.WAIT_B, stage, microbatch, began, clock))
                if counting and op in (Op.B, Op.I):
                    began, counting = clock, False
                    for other in range(self.replicas):
                        begun = yield ("begin", step, other * self.program.ranks + own)
                        clock = max(clock, begun + self.count)
                    add(Span(rank, Kind.WAIT_COUNT, -1, -1, began, clock))
                if stage in unused:
                    began = clock
                    unused.discard(stage)
                    clock = max(clock, (yield ("gathered", step - 1, rank, stage)))
                    add(Span(rank, Kind.WAIT_GATHER, stage, -1, began, clock))
                lasts = self.action(rank, op, stage, microbatch, step)
                add(Span(rank, Kind(int(op)), stage, microbatch, clock, clock + lasts))
                clock += lasts
            elif op in (Op.SEND_F, Op.SEND_B):
                forward = op is Op.SEND_F
                to = self.program.placement.rank(stage + (1 if forward else -1), microbatch)
                way = self.link(rank, replica * self.program.ranks + to)
                self.facts["arrival", step, replica, forward, stage, microbatch] = clock + way
                add(Span(rank, Kind(int(op)), stage, microbatch, clock, clock))
            elif op is Op.REDUCE:
                self.facts["launch", step, rank, stage] = clock
            elif op is Op.GATHER:
                self.facts["updated", step, rank, stage] = clock
            elif op is Op.STEP:
                clock = yield from self._end(rank, step, clock)
            clock += self.between
        return clock

    def _source(self, op: Op, stage: int, microbatch: int, own: int) -> tuple[bool, int, int] | None:
        """(forward?, stage, micro-batch) of the message that an action needs."""
        placement: Placement = self.program.placement
        forward = op is Op.F
        source = stage - 1 if forward else stage + 1
        if op is Op.W or not 0 <= source < self.program.stages or placement.rank(source, microbatch) == own:
            return None
        return forward, source, microbatch

    def _end(self, rank: int, step: int, clock: int) -> Generator[Hashable, int, int]:
        add = self.spans[step].append
        ranks = self.program.ranks
        if self.replicas > 1:
            for stage in self.program.placement.stages_of(rank % ranks):
                began, clock = clock, max(clock, (yield ("reduced", step, rank, stage)))
                add(Span(rank, Kind.WAIT_REDUCE, stage, -1, began, clock))
        if self.norm is not None:
            began = self.facts["norm", step, rank] = clock
            for other in range(rank // ranks * ranks, rank // ranks * ranks + ranks):
                clock = max(clock, (yield ("norm", step, other)) + self.norm)
            add(Span(rank, Kind.WAIT_NORM, -1, -1, began, clock))
        add(Span(rank, Kind.STEP, -1, -1, clock, clock + self.update))
        return clock + self.update

    def _behind(self, rank: int) -> Walk:
        """The thread that reduces."""
        clock, ranks = START, self.program.ranks
        for step in range(self.steps if self.replicas > 1 else 0):
            for stage in sorted(self.program.placement.stages_of(rank % ranks), reverse=True):
                launched = yield ("launch", step, rank, stage)
                began = clock = max(clock, launched)
                self.spans[step].append(Span(rank, Kind.QUEUED, stage, -1, launched, began))
                self.facts["begun", step, rank, stage] = began
                for replica in range(self.replicas):
                    clock = max(clock, (yield ("begun", step, replica * ranks + rank % ranks, stage)))
                clock += self.reduce(stage)
                self.facts["reduced", step, rank, stage] = clock
                self.spans[step].append(Span(rank, Kind.REDUCE, stage, -1, began, clock))
            for stage in self.program.placement.stages_of(rank % ranks) if self.gather else ():
                began = clock = max(clock, (yield ("updated", step, rank, stage)))
                self.facts["gathering", step, rank, stage] = began
                for replica in range(self.replicas):
                    clock = max(clock, (yield ("gathering", step, replica * ranks + rank % ranks, stage)))
                clock += self.gather(stage)
                self.facts["gathered", step, rank, stage] = clock
                if step + 1 < self.steps:
                    self.spans[step + 1].append(Span(rank, Kind.GATHER, stage, -1, began, clock))


def last_step(program: Program, replicas: int = 1, **parts: Any) -> Timeline:
    """The last step of several, when the ranks have fallen into their rhythm."""
    return Virtual(program, replicas, **parts).timelines()[-1]
