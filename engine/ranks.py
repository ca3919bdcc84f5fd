"""One worker of a run: its world rank, the replica that it belongs to, and its rank in that replica's pipeline."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")  # an int, or an array of ints, elementwise


class Rank(NamedTuple, Generic[T]):
    """Where a rank is. With P ranks in a pipeline, world = replica * P + pipeline."""

    world: T
    replica: T
    pipeline: T

    @classmethod
    def of(cls, world: T, ranks: int) -> Rank[T]:
        """Return the rank with this world rank, where pipelines have `ranks` ranks."""
        number: Any = world
        return cls(world, number // ranks, number % ranks)

    @classmethod
    def at(cls, replica: T, pipeline: T, ranks: int) -> Rank[T]:
        """Return the rank `pipeline` of a replica's pipeline, where pipelines have `ranks` ranks."""
        number: Any = replica
        return cls(number * ranks + pipeline, replica, pipeline)


def replica_ranks(replica: int, ranks: int) -> range:
    """Return the world ranks of one replica's pipeline."""
    return range(replica * ranks, (replica + 1) * ranks)
