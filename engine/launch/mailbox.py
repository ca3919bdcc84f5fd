"""Records through a store, for ranks that somebody else started: no pipe leads from them to rank 0.

rank r   set mail/r/0, mail/r/1, ...      and count up mail/posted
rank 0   looks at the count; where it grew, takes each rank's next keys and deletes them
"""

from __future__ import annotations

import threading
from typing import Any

POSTED = "mail/posted"


class Mailbox:
    """One rank's mailbox in a store that all ranks reach.

    `store`: a torch.distributed.Store, not shared with calls that block: it serves one at a time.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank = store, rank
        self._next = [0] * world  # per rank: the number of the next record to post or to take
        self._taken = 0
        self._lock = threading.Lock()

    def post(self, record: bytes) -> None:
        """Put a record into the store for rank 0."""
        with self._lock:
            self._store.set(self._key(self._rank), record)
            self._next[self._rank] += 1
        self._store.add(POSTED, 1)

    def take(self) -> list[bytes]:
        """Return the records that have arrived since the last call, in order for each rank; only for rank 0."""
        records: list[bytes] = []
        if self._store.add(POSTED, 0) == self._taken:
            return records
        for rank in range(len(self._next)):
            while self._store.check([self._key(rank)]):
                records.append(self._store.get(self._key(rank)))
                self._store.delete_key(self._key(rank))
                self._next[rank] += 1
        self._taken += len(records)
        return records

    def _key(self, rank: int) -> str:
        return f"mail/{rank}/{self._next[rank]}"
