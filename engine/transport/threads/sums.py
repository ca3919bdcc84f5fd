"""Sums over threads: the last member to come adds all parts in rank order, once, for everybody."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.transport import Work
from engine.transport.threads.queues import after, mark
from engine.transport.threads.timeouts import Timeouts


class SumGroup:
    """Sums over some ranks that are threads; the k-th call of each member belongs to round k."""

    def __init__(self, members: tuple[int, ...], label: str, timeouts: Timeouts) -> None:
        self.members = members
        self.name = f"all-reduce {label} over ranks {list(members)}"
        self.timeouts = timeouts
        self.condition = timeouts.condition()
        self._calls = dict.fromkeys(members, 0)
        self._rounds: dict[int, _Round] = {}

    def join(self, rank: int, tensor: Tensor) -> Work:
        """Contribute a copy of `tensor`; the returned work brings the sum back into it."""
        with self.condition:
            number = self._calls[rank]
            self._calls[rank] += 1
            current = self._rounds.setdefault(number, _Round())
            current.parts[rank] = tensor.detach().clone()
            current.marks[rank] = mark(tensor)
            if len(current.parts) == len(self.members):
                del self._rounds[number]
                current.finish(self.members, self.name)
                self.condition.notify_all()
        return _ThreadSum(self, current, tensor)


class _Round:
    def __init__(self) -> None:
        self.parts: dict[int, Tensor] = {}  # kept until every member has its sum: other streams read them
        self.marks: dict[int, torch.cuda.Event | None] = {}
        self.mark: torch.cuda.Event | None = None
        self.total: Tensor | None = None
        self.error: str | None = None

    def finish(self, members: Sequence[int], name: str) -> None:
        """Add once, in rank order, for everybody."""
        shapes = {rank: (tuple(self.parts[rank].shape), self.parts[rank].dtype) for rank in members}
        if len(set(shapes.values())) > 1:
            self.error = f"{name}: the members pass different tensors: {shapes}"
            return
        after(*self.marks.values())
        total = self.parts[members[0]]
        for rank in members[1:]:
            total.add_(self.parts[rank])
        self.mark = mark(total)
        self.total = total


class _ThreadSum:
    """A Work."""

    def __init__(self, group: SumGroup, current: _Round, tensor: Tensor) -> None:
        self._group, self._round, self._tensor = group, current, tensor
        self._copied = False

    def done(self) -> bool:
        return self._copied

    def wait(self) -> None:
        group, current = self._group, self._round
        with group.condition:
            group.timeouts.wait(
                group.condition, lambda: bool(current.error) or current.total is not None, group.name, None
            )
        if current.error:
            raise RuntimeError(current.error)
        if not self._copied:
            assert current.total is not None
            after(current.mark)
            self._tensor.detach().copy_(current.total)
            self._copied = True
