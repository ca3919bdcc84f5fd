"""Samples for the ends of a pipeline: the first stage's rank needs inputs, the last one's needs targets.

Both read the same samples in the same order, because the order follows from the seed alone; ranks in the middle open
nothing. Sharding is over replicas, never over ranks.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import count as natural
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from engine.errors import ExhaustedError
from engine.runtime.microbatch import Batches
from engine.runtime.seeds import loading, seed_for
from engine.targets import build

LOADER_KEYS = ("workers", "pin_memory", "shuffle", "drop_last", "evaluation")


def dataset(config: Mapping[str, Any], evaluation: bool) -> Dataset[Any] | None:
    """The data set that `data` names; with the overrides in `data.evaluation` for the held-out one, if there is one."""
    keywords = {key: value for key, value in config.items() if key not in LOADER_KEYS}
    if not evaluation:
        return build(keywords, where="data")
    if config.get("evaluation") is None:
        return None
    return build(keywords | config["evaluation"], where="data.evaluation")


def loader(
    config: Mapping[str, Any], data: Dataset[Any], batches: Batches, replica: int, count: int, device: torch.device
) -> Iterator[Any]:
    """This replica's share of batches 0..count-1, collated, one after another.

    What the data set draws follows from seed, batch and replica (with `workers`: from seed, worker and replica).
    """
    workers = int(config.get("workers") or 0)
    pin = config.get("pin_memory")
    found = iter(
        DataLoader(
            data,
            batch_sampler=ShareSampler(batches, replica, count),
            num_workers=workers,
            multiprocessing_context=_start_method() if workers else None,
            pin_memory=device.type == "cuda" if pin in (None, "auto") else bool(pin),
            generator=torch.Generator().manual_seed(seed_for(batches.seed, "loader", replica)),
        )
    )
    return _explained(found) if workers else _seeded(found, batches.seed, replica)


def _explained(found: Iterator[Any]) -> Iterator[Any]:
    """The batches that a loader's processes make. ExhaustedError where they cannot hand one over."""
    while True:
        try:
            batch = next(found)
        except StopIteration:
            return
        except (RuntimeError, OSError) as error:
            raise without_room(error) or error from error
        yield batch


def without_room(error: Exception) -> ExhaustedError | None:
    """What a loader's error means where there was no room for a batch, or no file to hand it over; None elsewhere.

    Batches come from a loader's processes through /dev/shm, each tensor as an open file.
    """
    text = str(error)
    if "Too many open files" in text or "ancillary data" in text:
        return ExhaustedError(errno.EMFILE, "too many open files for the batches of data.workers (0 needs none)")
    if any(sign in text for sign in ("shared memory", "Bus error", "/torch_")):
        shown = ""
        with contextlib.suppress(OSError):
            room = os.statvfs("/dev/shm")
            whole, free = (blocks * room.f_frsize / 1e6 for blocks in (room.f_blocks, room.f_bavail))
            shown = f" ({whole:.0f} MB, {free:.0f} MB of them free)"
        return ExhaustedError(
            errno.ENOSPC,
            f"no room in /dev/shm{shown} for the batches of data.workers: make it larger (docker run --shm-size=1g, or "
            "mount -o remount,size=1g /dev/shm), or use data.workers=0, or smaller batches",
        )
    return None


def _seeded(found: Iterator[Any], seed: int, replica: int) -> Iterator[Any]:
    """The same, each batch loaded from a seed of its own. (The processes of a loader are seeded by it.)"""
    for number in natural():
        with loading(seed, number, replica):
            batch = next(found, None)
        if batch is None:
            return
        yield batch


def _start_method() -> str | None:
    """How a loader's processes start; None: as the system does.

    A forked one has what this process has: torch, the data set, and the import path that let its `_target_` be found.
    Left alone it would start as this process was, by a fork server, and import everything again, from another path.
    """
    return "fork" if "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin" else None


class ShareSampler:
    """Index lists, one per batch; iterated once, lazily."""

    def __init__(self, batches: Batches, replica: int, count: int) -> None:
        self._arguments = (batches, replica, count)

    def __iter__(self) -> Iterator[list[int]]:
        batches, replica, count = self._arguments
        return batches.shares(replica, count)


def to_device(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Tensors of a nesting on `device`, floating ones as `dtype`; the rest as it is."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None, non_blocking=True)

    return pytree.tree_map(move, value)


def pair(item: Any) -> tuple[Any, Any]:
    """A sample or batch as (input, target); ValueError where it is not one."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise ValueError(f"a data set's item must be a pair (input, target), not {type(item).__name__}: {str(item)[:80]}")
