"""What each rank has called last, so that ranks that wait in different calls are told apart from slow ones.

    rank 1 waits in join() of optimizer 1; rank 0 called broadcast_parameters() meanwhile: ...

All ranks make the same calls in the same order, so the n-th of one is the n-th of all. Before a rank may wait, it notes
number and kind of its call in the launcher's store; two that differ in the same number can never end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from engine.collectives import Group
from engine.transport import PeerError, Transport

LOOK_S = 1.0  # how often whoever waits looks at what the others have called


class Calls:
    """The last calls of all ranks of one world; `store` is shared by them."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank = store.clone(), rank  # beside those that use it in other threads
        self._keys = [f"calls/{each}" for each in range(size)]
        self._number, self._kind, self._words = 0, "", ""
        self._inside = False
        self._note()

    @contextmanager
    def during(self, kind: str, words: str) -> Iterator[None]:
        """Context of a call that begins here, see `enter`; calls inside it are parts of it."""
        if self._inside:
            yield
            return
        self.enter(kind, words)
        self._inside = True
        try:
            yield
        except PeerError:
            self.check()  # the other side may have left because of what this one called
            raise
        finally:
            self._inside = False

    def enter(self, kind: str, words: str) -> None:
        """Note that this rank is about to wait in `words`, which ends only where all ranks call the same `kind`.

        RuntimeError where another one has not, see `check`.
        """
        self._number, self._kind, self._words = self._number + 1, kind, words
        self._note()
        self.check()

    def check(self) -> None:
        """Raise RuntimeError with what all ranks have called, where this rank's wait can never end."""
        others: dict[str, list[str]] = {}
        for rank, note in enumerate(self._store.multi_get(self._keys)):
            number, kind, words = note.decode().split("\n")
            if int(number) == self._number and kind != self._kind:
                others.setdefault(words, []).append(str(rank))
        if others:
            called = ", ".join(f"rank(s) {', '.join(ranks)} called {words}" for words, ranks in others.items())
            joined = any("join()" in words for words in (self._words, *others))
            raise RuntimeError(
                f"rank {self._rank} waits in {self._words}, but {called}: "
                + (
                    "a rank in join() takes part in steps of that optimizer only; call anything else before, or after "
                    "all ranks have joined"
                    if joined
                    else "all ranks must make the same calls in the same order"
                )
            )

    def _note(self) -> None:
        self._store.set(self._keys[self._rank], f"{self._number}\n{self._kind}\n{self._words}")


class NotedGroup(Group):
    """A group whose calls are noted; what its members call differently among themselves is for `agree` to say."""

    def __init__(self, transport: Transport, label: str, calls: Calls) -> None:
        super().__init__(transport, range(transport.world), label)
        self.calls = calls

    def during(self, words: str) -> AbstractContextManager[None]:
        """Context of a call that begins with something else than a comparison."""
        return self.calls.during(f"group {self.label}", words)

    def meet(self, words: str, complaint: str | None = None) -> None:
        """Compare this call with the other members', and note it."""
        with self.during(words):
            super().meet(words, complaint)
