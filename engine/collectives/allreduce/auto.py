"""The cheapest algorithm for each size: α, β and γ are measured once, before the first reduction, and `costs` says what
each candidate would take.

    small ── recursive_doubling ── halving_doubling ── ring ── large          few messages ... few bytes

What is measured is agreed on by all members, so all of them choose alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.allreduces import ALLREDUCES
from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.costs import LinkCosts, cheapest
from engine.collectives.allreduce.probe import measure
from engine.collectives.allreduce.ring import Ring
from engine.collectives.ops import ReduceOp
from engine.registry import Loaded
from engine.transport import Edge, Transport

CANDIDATES: Mapping[str, type[Collective]] = Loaded(ALLREDUCES, lambda row: row.kind if row.auto else None)


class Auto(Collective):
    """The candidate that costs least for a tensor's size, by measured costs of the links.

    `link`: what was measured, once it was. The candidates share channels: only one of them is under way.
    """

    def __init__(self, transport: Transport, members: Sequence[int], label: str) -> None:
        super().__init__(transport, members, label)
        self.link: LinkCosts | None = None
        self._candidates = {name: kind(transport, members, label) for name, kind in CANDIDATES.items()}
        self._ring = Ring(transport, members, label)  # whose links are measured
        for candidate in [self._ring, *self._candidates.values()]:
            candidate.peers.sent = self.peers.sent
        self._chosen: dict[int, str] = {}

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return the channels of all candidates, each once."""
        kinds: list[type[Collective]] = [Ring, *CANDIDATES.values()]
        return list(dict.fromkeys(edge for kind in kinds for edge in kind.edges(members, label)))

    def choice(self, nbytes: int) -> str:
        """Return the name of the algorithm for a tensor of `nbytes`; the first call measures the links."""
        if self.link is None:
            self.link = measure(self._ring)
            self._say(f"alpha {self.link.alpha * 1e6:.1f} us, {_rate(self.link.beta)} sent, "
                      f"{_rate(self.link.gamma)} added")  # fmt: skip
        if nbytes not in self._chosen:
            self._chosen[nbytes] = cheapest(CANDIDATES, self.peers.size, nbytes, self.link)
            self._say(f"{self._chosen[nbytes]} for {nbytes} bytes")
        return self._chosen[nbytes]

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        self._candidates[self.choice(tensor.nbytes)]._reduce(tensor, op)

    def _say(self, what: str) -> None:
        if self.position == 0:
            logging.getLogger(__name__).info("all-reduce %s over %d ranks: %s", self.label, self.peers.size, what)


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else "no limit"
