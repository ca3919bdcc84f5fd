"""Where every random number of a run comes from.

    seed_for(seed, "weights", layer)                              a layer's initial weights ("model": all at once)
    seed_for(seed, "draw", layer, step, microbatch, replica)      what a layer draws in one forward (dropout masks)
    seed_for(seed, "draw", "loss", step, microbatch, replica)     what a loss draws, and the call that learns its count
    seed_for(seed, "scoring", batch, microbatch, replica)         what a loss draws in an evaluation
    seed_for(seed, "epoch", epoch)                                the order of the samples in an epoch
    seed_for(seed, "samples", step, replica)                      what a data set draws (augmentation), loaded here
    seed_for(seed, "loader", replica)                             the same in the loader's own processes

The value is the first eight bytes of BLAKE2b over the parts joined by "/", as a number below 2**63. No part is a rank,
a stage or a schedule, so neither weights nor masks depend on how the model is cut. `microbatch` counts through all
passes of a step.

torch has one default generator per device, shared by all threads: a layer that draws is seeded and run under one
lock, so that ranks that are threads of one process cannot take numbers from each other's stream. So is a data set whose
samples are loaded in the rank's own process. The first and the last stage's rank of a replica load the same samples,
and both must see them alike; other replicas must not.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

_DRAWING = threading.Lock()


def seed_for(seed: int, *parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on all parts."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Leave the default generators of torch, numpy and random as they were, whatever is seeded within.

    Ranks that are threads share the generators: there they are only left as one of these found them.
    """
    gpu = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
    own = [torch.default_generator, *([gpu] if gpu is not None else [])]
    with _DRAWING:
        before = [generator.get_state() for generator in own], np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        with _DRAWING:  # never while another rank draws
            for generator, state in zip(own, before[0], strict=True):
                generator.set_state(state)
            np.random.set_state(before[1])
            random.setstate(before[2])


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Run a block that draws from torch's default generators, seeded, and alone in this process."""
    with _DRAWING:
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        yield


@contextmanager
def drawing_again(draws: bool) -> Iterator[None]:
    """Around a backward that runs layers again: if one `draws`, alone in this process, as when it drew before.

    Whoever runs it again (torch.utils.checkpoint) sets the default generators to what they were, and back.
    """
    with _DRAWING if draws else nullcontext():
        yield


def seeded(draws: bool, device: torch.device, seed: int, *parts: int | str) -> AbstractContextManager[None]:
    """`drawing` from the seed of `parts`, around what draws; nothing around anything else."""
    return drawing(seed_for(seed, *parts), device) if draws else nullcontext()


@contextmanager
def building(seed: int, layer: int | str) -> Iterator[None]:
    """Build a layer: torch, numpy and random are seeded for it, one layer at a time in this process.

    "model" stands for the call of the model's function itself, which builds an `nn.Sequential` as a whole.
    """
    with _seeded(seed_for(seed, "weights", layer)):
        yield


@contextmanager
def loading(seed: int, step: int, replica: int) -> Iterator[None]:
    """Load a replica's samples of a step: torch, numpy and random are seeded for it, as in `building`."""
    with _seeded(seed_for(seed, "samples", step, replica)):
        yield


def seed_loading(seed: int, step: int, replica: int) -> None:
    """What `loading` seeds, in a process that does nothing else: without the lock, which a fork may find taken."""
    _seed(seed_for(seed, "samples", step, replica))


@contextmanager
def _seeded(value: int) -> Iterator[None]:
    with _DRAWING:
        _seed(value)
        yield


def _seed(value: int) -> None:
    torch.default_generator.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)
