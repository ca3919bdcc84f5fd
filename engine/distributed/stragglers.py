"""Who is late, and with what: every rank writes down which bucket it has come to, and whoever waits long reads it.

    step 7: rank 0 has waited 10 s for fc.weight and 3 more (bucket 2 of 4); there: ranks 0, 1; missing: rank 2, last
    seen in step 6 at bucket 4

The notes lie in the launcher's store. Writing one takes a message that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.distributed.world import World

SHOWN = 3


class Stragglers:
    """Which ranks have not reached which bucket.

    `label` tells optimizers apart; `names[b]`: the tensors of bucket b.
    """

    def __init__(self, world: World, label: str, names: Sequence[Sequence[str]]) -> None:
        self._world, self._label, self._names = world, label, names
        self._store = world.store.clone()  # used from the thread that reduces, beside the program's own
        self.step, self.bucket = 0, -1
        self.arrive(0, -1)

    def arrive(self, step: int, bucket: int) -> None:
        """Note that this rank has come to `bucket` of `step` (-1: to none of it)."""
        self.step, self.bucket = step, bucket
        self._store.set(self._key(self._world.rank), f"{step} {bucket}")

    def missing(self, seconds: float) -> str:
        """Return one line: what this rank waits for, who is there and who is not."""
        here = self.step, self.bucket
        seen = {rank: self._seen(rank) for rank in range(self._world.size)}
        there = [str(rank) for rank, at in seen.items() if at >= here]
        late = [
            f"rank {rank}, "
            + (f"last seen in step {at[0]} at bucket {at[1] + 1}" if at[1] >= 0 else f"not in step {at[0]}")
            for rank, at in seen.items()
            if at < here
        ]
        number = max(self.bucket, 0)
        names = list(self._names[number])
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        what = f"{', '.join(names[:SHOWN])}{more} (bucket {number + 1} of {len(self._names)})"
        return (
            f"step {self.step}: rank {self._world.rank} has waited {seconds:.0f} s for {what}; "
            f"there: rank(s) {', '.join(there)}; missing: {'; '.join(late) or 'nobody, the exchange itself is slow'}"
        )

    def _seen(self, rank: int) -> tuple[int, int]:
        if not self._store.check([self._key(rank)]):
            return 0, -1
        step, bucket = self._store.get(self._key(rank)).split()
        return int(step), int(bucket)

    def _key(self, rank: int) -> str:
        return f"{self._label}/{rank}"
