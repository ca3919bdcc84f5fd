"""A measured step run again on paper, with as many of the things that it waited for as one likes.

A step is a set of rows of nodes. A node begins when the node before it in its row has ended and its source, a node of
any row, has ended `after` ago; then it `takes` its time. That is the rule by which programs are verified and simulated
(`plan/dependencies.py`), so the same function walks it; waiting for several is a chain of nodes that take no time.

    rank      | begin | load | F | F | load | B | B | ... | reduced s | norms of all | STEP | next step: begin ...
    behind it |                            last B of stage s on every replica | reduction of s |    updated: gather |

Several steps follow one another, as they do in training, where ranks do not meet at a barrier: what counts is the time
from the end of a step to the end of the next, once the ranks have fallen into their rhythm.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.plan.actions import Op, Program
from engine.plan.dependencies import NONE, Flat, dependencies, progress
from engine.ranks import Rank, replica_ranks

STEPS = 3  # the first from a standstill, one to settle, one that counts

_ZERO = 0
_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class _Slots:
    """Where in one vector of values each field of an `Observed` lies; slot 0 is always 0."""

    def __init__(self, program: Program, replicas: int) -> None:
        size, world = len(program), program.ranks * replicas
        shapes = {
            "duration": (replicas, size), "delay": (replicas, size), "loaded": (world, 2), "reduce": (program.stages,),
            "gather": (program.stages,),
            "count": (), "norm": (replicas,), "step": (world,),
        }  # fmt: skip
        at = 1
        self.of: dict[str, _Ints] = {}
        for name, shape in shapes.items():
            count = int(np.prod(shape))
            self.of[name] = np.arange(at, at + count).reshape(shape)
            at += count
        self.size = at

    def fill(self, parts: Mapping[str, Any]) -> _Floats:
        values = np.zeros(self.size)
        for name, given in parts.items():
            values[self.of[name]] = given
        return values


class _Nodes:
    """Nodes under construction, row by row. A source goes by a name, so that it may be added after its users."""

    def __init__(self, rows: int) -> None:
        self._rows: list[list[tuple[Hashable, int, int]]] = [[] for _ in range(rows)]
        self._named: dict[Hashable, tuple[int, int]] = {}

    def add(
        self, row: int, name: Hashable = None, source: Hashable = None, takes: int = _ZERO, after: int = _ZERO
    ) -> None:
        if name is not None:
            self._named[name] = row, len(self._rows[row])
        self._rows[row].append((source, takes, after))

    def packed(self) -> tuple[_Ints, _Ints, _Ints, _Ints]:
        """(offsets of the rows; source, slot of `takes`, slot of `after` of each node)."""
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in self._rows])]).astype(np.int64)
        columns = [(self.find(source, offsets), takes, after) for row in self._rows for source, takes, after in row]
        source, takes, after = np.array(columns, dtype=np.int64).reshape(-1, 3).T
        return offsets, source, takes, after

    def find(self, name: Hashable, offsets: _Ints) -> int:
        if name is None:
            return NONE
        row, at = self._named[name]
        return int(offsets[row]) + at


class Replay:
    """`STEPS` steps of a compute-only program on `replicas` pipelines.

    `reduced`: replicas wait for each other, for counts before the first backward and for gradients at the end; else
    each goes its own way. `normed`: the ranks of a pipeline exchange the norms of their gradients before they update.
    `gathered`: a stage's next forward waits for the parameters that others have updated.
    """

    def __init__(
        self, program: Program, replicas: int, reduced: bool = False, normed: bool = False, gathered: bool = False
    ) -> None:
        self._program, self._replicas, self._reduced, self._normed = program, replicas, reduced, normed
        self._gathered = gathered
        self._flat = Flat(program)
        self._neighbour = dependencies(self._flat).neighbour
        self._slots = _Slots(program, replicas)
        self._world = program.ranks * replicas
        nodes = _Nodes(2 * self._world)  # the second half: what goes on behind each rank
        for step in range(STEPS):
            for rank in range(self._world):
                self._compute(nodes, step, rank)
                if reduced:
                    self._reduce(nodes, step, rank)
                self._end(nodes, step, rank)
                if gathered:
                    self._gather(nodes, step, rank)
        self._offsets, self._source, self._takes, self._after = nodes.packed()
        everyone = range(self._world)
        self._ends = np.array([[nodes.find(("end", k, w), self._offsets) for w in everyone] for k in range(STEPS)])

    def period(self, **parts: Any) -> float:
        """The time from the end of the last step but one to the end of the last, in the unit of `parts`.

        `parts`: fields of `Observed`, with the shapes that they have for `replicas`. What is not given takes no time.
        """
        values = self._slots.fill(parts)
        done = progress(self._offsets, self._source, values[self._takes], values[self._after])
        assert (done.heads == self._offsets[1:]).all(), "a verified program came to a stop"
        ends = done.end[self._ends].max(axis=1)
        return float(ends[-1] - ends[-2])

    def _compute(self, nodes: _Nodes, step: int, rank: int) -> None:
        flat, slots = self._flat, self._slots.of
        _, replica, own = Rank.of(rank, self._program.ranks)
        first, end = flat.offsets[own : own + 2].tolist()
        crossing = (self._neighbour >= 0) & (flat.rank[self._neighbour] != flat.rank)
        last_stage = flat.having(Op.B, Op.I) & (flat.stage == self._program.stages - 1)
        receiving, counting = (next(iter(np.flatnonzero(m[first:end]) + first), NONE) for m in (crossing, last_stage))
        nodes.add(rank, ("begin", step, rank), takes=slots["loaded"][rank, 0])
        used = dict.fromkeys(self._stages(rank)) if self._gathered and step else {}
        for at in range(first, end):
            if at == receiving:
                nodes.add(rank, takes=slots["loaded"][rank, 1])
            if at == counting and self._reduced:
                for other in range(self._replicas):
                    begin = ("begin", step, Rank.at(other, own, self._program.ranks).world)
                    nodes.add(rank, source=begin, after=slots["count"].item())
            if (stage := int(flat.stage[at])) in used:
                del used[stage]
                nodes.add(rank, source=("gathered", step - 1, rank, stage))
            source = ("action", step, replica, int(self._neighbour[at])) if crossing[at] else None
            takes, after = slots["duration"][replica, at], slots["delay"][replica, at]
            nodes.add(rank, ("action", step, replica, at), source, takes, after)

    def _reduce(self, nodes: _Nodes, step: int, rank: int) -> None:
        """Behind a rank its stages are reduced one by one, each once it is complete wherever it lives."""
        behind = self._world + rank
        for stage in self._stages(rank):
            for (_, other), at in self._complete.items():
                if other == stage:
                    for replica in range(self._replicas):
                        nodes.add(behind, source=("action", step, replica, at))
            nodes.add(behind, ("reduced", step, rank, stage), takes=self._slots.of["reduce"][stage])

    def _end(self, nodes: _Nodes, step: int, rank: int) -> None:
        replica = Rank.of(rank, self._program.ranks).replica
        if self._reduced:
            for stage in self._stages(rank):
                nodes.add(rank, source=("reduced", step, rank, stage))
        if self._normed:
            nodes.add(rank, ("norm", step, rank))
            for other in replica_ranks(replica, self._program.ranks):
                nodes.add(rank, source=("norm", step, other), after=self._slots.of["norm"][replica])
        nodes.add(rank, ("end", step, rank), takes=self._slots.of["step"][rank])

    def _gather(self, nodes: _Nodes, step: int, rank: int) -> None:
        """Behind a rank the parameters of its stages are gathered, once those that hold them have updated them."""
        behind, ranks = self._world + rank, self._program.ranks
        for stage in reversed(self._stages(rank)):
            for other in (r for r, s in self._complete if s == stage):
                for replica in range(self._replicas):
                    nodes.add(behind, source=("end", step, Rank.at(replica, other, ranks).world))
            nodes.add(behind, ("gathered", step, rank, stage), takes=self._slots.of["gather"][stage])

    def _stages(self, rank: int) -> list[int]:
        """A rank's stages in the order in which they are reduced (`plan/lowering.py`)."""
        own = rank % self._program.ranks
        return sorted((stage for r, stage in self._complete if r == own), reverse=True)

    @cached_property
    def _complete(self) -> dict[tuple[int, int], int]:
        """(pipeline rank, stage) -> the computation after which its gradient is complete, and those of later stages."""
        last = self._flat.last(Op.B, Op.W)
        return {(r, s): max(at for (q, t), at in last.items() if q == r and t >= s) for r, s in last}
