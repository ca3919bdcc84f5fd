"""Samples for the ends of a pipeline: the first stage's rank needs inputs, the last one's needs targets.

Both read the same samples in the same order, because the order follows from the seed alone; ranks in the middle open
nothing. Sharding is over replicas, never over ranks.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count as natural
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from engine.errors import ExhaustedError, Interrupted, said
from engine.pipeline.seeds import loading, seed_for, seed_loading
from engine.targets import build
from engine.training.samples.batches import Batches

LOADER_KEYS = ("workers", "pin_memory", "shuffle", "drop_last", "evaluation")


def dataset(config: Mapping[str, Any], evaluation: bool) -> Dataset[Any] | None:
    """The data set that `data` names; with the overrides in `data.evaluation` for the held-out one, if there is one."""
    keywords = {key: value for key, value in config.items() if key not in LOADER_KEYS}
    if not evaluation:
        return build(keywords, where="data")
    if config.get("evaluation") is None:
        return None
    return build(keywords | config["evaluation"], where="data.evaluation")


class ItemError(RuntimeError):
    """An item of a data set could not be loaded, or put into a batch; the message names it."""


class Share(NamedTuple):
    """The samples of a replica's batch; `number` counts its batches."""

    number: int
    indices: list[int]


class _NamedItems(Dataset[Any]):
    """A data set whose batches are handed on with their indices, so that whatever an item raises can name it.

    In a loader's process each batch is seeded as it is in the rank's own, so what is drawn does not depend on where.
    """

    def __init__(self, data: Any, seed: int, replica: int) -> None:
        self._data, self._seed, self._replica = data, seed, replica

    def __getitems__(self, share: Share) -> tuple[list[int], list[Any]]:
        indices = share.indices
        if get_worker_info() is not None:
            seed_loading(self._seed, share.number, self._replica)
        if hasattr(self._data, "__getitems__"):  # a data set that loads a batch at once
            with _naming(lambda error: f"items {_listed(indices)} cannot be loaded: {said(error)}"):
                return indices, self._data.__getitems__(indices)
        return indices, [self[index] for index in indices]

    def __getitem__(self, index: int) -> Any:
        with _naming(lambda error: f"item {index} cannot be loaded: {said(error)}"):
            return self._data[index]


def _collate(batch: Any) -> Any:
    indices, items = batch
    with _naming(lambda error: _no_batch(indices, items, error)):
        return default_collate(items)


def _no_batch(indices: list[int], items: list[Any], error: BaseException) -> str:
    """Names two items that do not go together, if two alone do not."""
    for index, item in zip(indices, items, strict=True):
        try:
            default_collate([items[0], item])
        except Exception as inner:  # noqa: BLE001  # whatever it was, it is about these two
            pair = f"item {index}" if index == indices[0] else f"items {indices[0]} and {index}"
            return f"{pair} cannot be put into one batch: {said(inner)}"
    return f"items {_listed(indices)} cannot be put into one batch: {said(error)}"


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")


@contextmanager
def _naming(say: Callable[[BaseException], str]) -> Iterator[None]:
    """Around a user's data set: whatever it raises becomes an ItemError, but for the interruption of the run."""
    try:
        yield
    except (Interrupted, ItemError):
        raise
    except BaseException as error:  # a SystemExit would end a loader's process without a word
        if isinstance(error, Exception) and without_room(error):
            raise  # nothing is wrong with the item; the other side says what is
        raise ItemError(f"data: {say(error)}") from error


def loader(
    config: Mapping[str, Any],
    data: Dataset[Any],
    batches: Batches,
    replica: int,
    count: int,
    device: torch.device,
    start: int = 0,
) -> Iterator[Any]:
    """This replica's share of batches start..count-1, collated, one after another.

    What the data set draws follows from seed, batch and replica, whoever loads it.
    """
    workers = int(config.get("workers") or 0)
    pin = config.get("pin_memory")
    made = DataLoader(
        _NamedItems(data, batches.seed, replica),
        batch_sampler=ShareSampler(batches, replica, count, start),  # type: ignore[arg-type]  # a list with its number
        collate_fn=_collate,
        num_workers=workers,
        multiprocessing_context=_start_method() if workers else None,
        pin_memory=device.type == "cuda" if pin in (None, "auto") else bool(pin),
        generator=torch.Generator().manual_seed(seed_for(batches.seed, "loader", replica)),
    )
    if not workers:
        return _seeded(iter(made), batches.seed, replica, batches.shares_before(replica, start))
    try:
        # What the processes queue through; torch leaves a half-made iterator behind, which complains, where it fails.
        queues = [multiprocessing.get_context(_start_method()).Queue() for _ in range(workers + 2)]
        del queues
        return _explained(iter(made))
    except OSError as error:
        raise without_room(error) or error from error


def _explained(found: Iterator[Any]) -> Iterator[Any]:
    """The batches that a loader's processes make.

    ExhaustedError where they cannot hand one over. What an item of the data set raised is said in a line, without that
    process's traceback.
    """
    while True:
        try:
            batch = next(found)
        except StopIteration:
            return
        except ItemError as error:
            raise ItemError(str(error).rpartition(f"{ItemError.__name__}: ")[2].rstrip()) from error
        except (RuntimeError, OSError) as error:
            raise without_room(error) or error from error
        yield batch


def without_room(error: Exception) -> ExhaustedError | None:
    """What a loader's error means where there was no room for a batch, or no file to hand it over; None elsewhere.

    Batches come from a loader's processes through /dev/shm, each tensor as an open file.
    """
    text = str(error)
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return ExhaustedError(errno.EROFS, "/dev/shm cannot be written, which data.workers need: use data.workers=0")
    if "Too many open files" in text or "ancillary data" in text:
        return ExhaustedError(errno.EMFILE, "too many open files for the batches of data.workers (0 needs none)")
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if full or any(sign in text for sign in ("shared memory", "Bus error", "/torch_")):
        shown = ""
        with suppress(OSError):
            room = os.statvfs("/dev/shm")
            whole, free = (blocks * room.f_frsize / 1e6 for blocks in (room.f_blocks, room.f_bavail))
            shown = f" ({whole:.0f} MB, {free:.0f} MB of them free)"
        return ExhaustedError(
            errno.ENOSPC,
            f"no room in /dev/shm{shown} for the batches of data.workers: make it larger (docker run --shm-size=1g, or "
            "mount -o remount,size=1g /dev/shm), or use data.workers=0, or smaller batches",
        )
    return None


def _seeded(found: Iterator[Any], seed: int, replica: int, first: int) -> Iterator[Any]:
    """The batches of `found`, each loaded from a seed of its own; `first`: the number of the first of them."""
    for number in natural(first):
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
    """The samples of each batch, from batch `start` on; iterated once, lazily."""

    def __init__(self, batches: Batches, replica: int, count: int, start: int = 0) -> None:
        self._batches, self._replica, self._count, self._start = batches, replica, count, start

    def __iter__(self) -> Iterator[Share]:
        shares = self._batches.shares(self._replica, self._count, self._start)
        yield from map(Share, natural(self._batches.shares_before(self._replica, self._start)), shares)


def pair(item: Any) -> tuple[Any, Any]:
    """A sample or batch as (input, target); ValueError where it is not one."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise ValueError(f"a data set's item must be a pair (input, target), not {type(item).__name__}: {str(item)[:80]}")
