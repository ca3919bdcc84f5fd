"""Where stages live: the four ways in which the schedules lay S stages over P ranks.

    round_robin(3, 2)   rank 0 | 0 3     vee(3)   rank 0 | 0 5     zigzag(2, 2)   rank 0 | 0 3 4 7
                        rank 1 | 1 4              rank 1 | 1 4                    rank 1 | 1 2 5 6
                        rank 2 | 2 5              rank 2 | 2 3

A linear placement (`Placement.linear`) is a round robin of one chunk, a V a zig-zag of one wave. At the turns of a V
two neighbouring stages share a rank, and nothing is sent between them. `both_ways` keeps two copies of each stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.actions import Placement


def round_robin(ranks: int, chunks: int) -> Placement:
    """Place stage s on rank s mod P: chunk c of rank r is stage c*P + r (Megatron-LM's interleaving)."""
    return Placement(ranks, (tuple(range(ranks)) * chunks,))


def zigzag(ranks: int, waves: int) -> Placement:
    """Place stages down the ranks and up again, `waves` times: 2 stages per rank and wave."""
    return Placement(ranks, ((*range(ranks), *reversed(range(ranks))) * waves,))


def vee(ranks: int) -> Placement:
    """Place stages r and 2P-1-r on rank r; the first and the last stage share rank 0."""
    return zigzag(ranks, 1)


def both_ways(ranks: int, direction: Sequence[int]) -> Placement:
    """Place stage s on rank s for micro-batches of direction 0 (down), on rank P-1-s for direction 1 (up)."""
    down = tuple(range(ranks))
    return Placement(ranks, (down, down[::-1]), tuple(direction))
