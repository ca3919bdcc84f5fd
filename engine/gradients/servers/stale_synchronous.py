"""Who may go on, and how old the weights were behind what is pushed: a parameter server's book-keeping, and no more.

    version      how many pushes were applied so far
    clock[w]     how many of them were worker w's: the steps that it has done
    staleness    of a push: how many others were applied since the weights that it was computed from were read

    worker 0   | read 0 ......... push: staleness 2 | read 3 ...
    worker 1   | read 0 ... push: 0 | read 1 ... push: 0 | read 2, or held back: 2 steps ahead

Stale-synchronous parallel (Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
server", NIPS 2013): with the bound s a worker begins a step only while it is at most s steps ahead of the slowest,
clock[w] - min(clock) <= s. With s = 0 all begin a step together; without a bound nobody is ever held back (J. Dean et
al., "Large scale distributed deep networks", NIPS 2012: Downpour SGD).

With N workers a staleness is then at most (N - 1)(2s + 1): since a worker has read, another may have come from s steps
behind it to s steps ahead, and have pushed the step after that.
"""

from __future__ import annotations


class StaleSynchronous:
    """Clocks of `workers` and the bound on their distance; `bound` is s, None for no bound."""

    def __init__(self, workers: int, bound: int | None) -> None:
        self.clock = [0] * workers
        self.version = 0
        self._bound = bound
        self._to_read: set[int] = set()  # workers that have pushed, and not read since
        self._met = 0  # the clock at which all have met last

    def may_push(self, worker: int) -> bool:
        """Whether the worker's next push may be applied: with the bound s only when all others have read what they need
        to be at most s steps behind it. So with s = 0 everybody reads the same version.
        """
        clock = self.clock[worker]
        bound = 0 if clock == self._met else self._bound
        return bound is None or all(self.clock[other] > clock - bound for other in self._to_read)

    def push(self, worker: int, read: int) -> int:
        """Count a push that was computed from version `read`; return its staleness."""
        staleness = self.version - read
        assert staleness >= 0 and worker not in self._to_read, "computed from weights that were not read"
        self.clock[worker] += 1
        self.version += 1
        self._to_read.add(worker)
        return staleness

    def may_read(self, worker: int, meeting: bool = False) -> bool:
        """Say whether the worker may begin its next step; where all are `meeting`, only behind the last of them."""
        bound = 0 if meeting else self._bound
        return bound is None or self.clock[worker] - min(self.clock) <= bound

    def read(self, worker: int, meeting: bool = False) -> int:
        """Count a read of the weights, before the worker's next step; return their version."""
        self._to_read.discard(worker)
        if meeting:
            self._met = self.clock[worker]
        return self.version
