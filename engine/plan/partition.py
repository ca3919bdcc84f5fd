"""From layers to stages: contiguous, none empty, as even as can be.

Minimising the largest part of a linear partition is a classic dynamic programme (Skiena, The Algorithm Design Manual,
"The Partition Problem"). The largest stage alone leaves ties (10 equal layers in 4: 3 3 3 1 is no worse than 3 3 2 2),
so among the partitions with the smallest largest stage the one with the least sum of squares is taken.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_ROUNDING = 1e-9  # sums of the same layers in another order are taken as equal


def partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the index of the first layer of each stage, for layers of these costs (any unit, 0 or more).

    Raises ValueError for a stage count that no partition has, and for costs that are negative or not finite.
    """
    layers = len(costs)
    if stages < 1:
        raise ValueError(f"{stages} stages asked for; a pipeline has 1 or more")
    if stages > layers:
        raise ValueError(
            f"{stages} stages need {stages} layers or more and the model has {layers}: lower pipeline.ranks "
            f"(or schedule.chunks) so that there are at most {layers} stages, or give the model more layers"
        )
    if bad := [cost for cost in costs if not math.isfinite(cost) or cost < 0]:
        raise ValueError(f"a layer cannot cost {bad[0]!r}: costs are finite numbers of 0 or more")
    if not any(costs):
        costs = [1.0] * layers
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    part = ends[None, :] - ends[:, None]  # part[i, j]: cost of layers i..j-1
    part[np.tril_indices(layers + 1)] = np.inf  # no empty stage
    largest = _best(part, stages, np.maximum)[0]
    part[part > largest * (1 + _ROUNDING)] = np.inf
    return _best(part**2, stages, np.add)[1]


def _best(part: Floats, stages: int, join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The cheapest way to cut all layers into `stages` parts, where `join` adds a part's price to the rest's."""
    best, cuts = part[0], []
    for _ in range(stages - 1):
        total = join(best[:, None], part)
        cuts.append(np.argmin(total, axis=0))
        best = total.min(axis=0)
    begins = [part.shape[0] - 1]
    for cut in reversed(cuts):
        begins.append(int(cut[begins[-1]]))
    return float(best[-1]), (0, *reversed(begins[1:]))


def manual(names: Sequence[str], split: Sequence[str], stages: int | None = None) -> tuple[int, ...]:
    """Return the index of the first layer of each stage, where `split` names the layers that begin stages 1..S-1.

    A name matches the first layer equal to it or beginning with `name.`. Raises ValueError for names that match
    nothing, that stand twice or out of order, that name the first layer, and where `split` does not give `stages`.
    """
    if stages is not None and len(split) != stages - 1:
        raise ValueError(
            f"partition.split names {len(split)} layers, which makes {len(split) + 1} stages, and the pipeline has "
            f"{stages}: name {stages - 1} layers, or take partition=parameters, which serves any number"
        )
    starts = [0]
    for position, name in enumerate(split):
        at = _find(names, name)
        if at == 0:
            raise ValueError(f"partition.split: {name!r} is the first layer, where stage 0 begins; leave it out")
        if at == starts[-1]:
            raise ValueError(
                f"partition.split: {name!r} and {split[position - 1]!r} begin at the same layer, {names[at]!r}"
            )
        if at < starts[-1]:
            raise ValueError(
                f"partition.split: {name!r} comes before {split[position - 1]!r} in the model; list names in its order"
            )
        starts.append(at)
    return tuple(starts)


def _find(names: Sequence[str], name: str) -> int:
    for index, layer in enumerate(names):
        if layer == name or layer.startswith(f"{name}."):
            return index
    parents = {layer[:dot] for layer in names for dot, letter in enumerate(layer) if letter == "."}
    valid = list(dict.fromkeys([*names, *sorted(parents)]))
    close = difflib.get_close_matches(str(name), valid, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    listed = ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")
    raise ValueError(f"partition.split: no layer {name!r}; {hint}the layers are: {listed}")
