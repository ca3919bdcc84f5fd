"""Memory that two processes of one host see: anonymous files, handed over as descriptors, never named anywhere.

    sender    Segments.slot(n) ──► a tensor over the memory, and where it lies: (segment, offset)
    receiver  Mapped.add(fd), Mapped.view(segment, offset, n) ──► the same bytes

A segment holds slots of one size, a power of two. The first of a size holds one slot, each later one twice as many as
the one before, up to `MOST_BYTES`: the number of segments grows with the logarithm of what is under way at once. The
memory is the kernel's until it is touched, and gone with the last process that has it mapped, however that one ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import ExhaustedError

LEAST_BYTES = 4096  # of a slot: a page, so that every slot is aligned for any use
MOST_BYTES = 2**26  # of a segment with more than one slot
SHORT_BYTES = 2**15  # copied without torch, which takes longer to begin but leaves other threads alone
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")  # nobody can pull the memory from under the other side


class Slot(NamedTuple):
    """A piece of a segment: its place, and a tensor over it (uint8, [size])."""

    segment: int
    offset: int
    memory: Tensor


class Segments:
    """The sender's side. `announce(fd, nbytes)` hands a new segment to the receiver; the descriptor stays ours."""

    def __init__(self, announce: Callable[[int, int], None]) -> None:
        self._announce = announce
        self._count = 0
        self._made: dict[int, int] = {}  # size of slots -> slots made
        self._free: dict[int, list[Slot]] = {}

    def slot(self, nbytes: int) -> Slot:
        """Return a free slot of at least `nbytes`: the one given back last, which is still in the caches."""
        size = size_of(nbytes)
        free = self._free.setdefault(size, [])
        if not free:
            free.extend(self._more(size))
        return free.pop()

    def give_back(self, slot: Slot) -> None:
        """Make a slot free again."""
        self._free[slot.memory.numel()].append(slot)

    def adopt(self, fd: int, nbytes: int) -> int:
        """Hand a file of the caller's to the receiver as a segment; its number."""
        self._announce(fd, nbytes)
        segment, self._count = self._count, self._count + 1
        return segment

    def _more(self, size: int) -> list[Slot]:
        made = self._made.get(size, 0)
        count = max(1, min(made, MOST_BYTES // size))
        fd = anonymous("engine-channel", count * size)
        try:
            with refused(count * size):
                whole = torch.frombuffer(mmap.mmap(fd, count * size), dtype=torch.uint8)
            segment = self.adopt(fd, count * size)
        finally:
            os.close(fd)
        self._made[size] = made + count
        return [Slot(segment, k * size, whole[k * size : (k + 1) * size]) for k in reversed(range(count))]


class Mapped:
    """The receiver's side: the segments it was handed, in the order in which they were made."""

    def __init__(self) -> None:
        self._segments: list[tuple[memoryview, Tensor]] = []

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, fd: int, nbytes: int) -> None:
        """Map a segment and close its descriptor. ValueError where it is not as large as announced."""
        try:
            if os.fstat(fd).st_size != nbytes:
                raise ValueError(f"a segment of {os.fstat(fd).st_size} bytes, announced as {nbytes}")
            with refused(nbytes):
                memory = mmap.mmap(fd, nbytes)
            self._segments.append((memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)))
        finally:
            os.close(fd)

    def copy(self, segment: int, offset: int, target: Tensor, bytes_of_target: memoryview) -> None:
        """Fill `target` (uint8 [n], also given as its bytes) from a place in a segment.

        ValueError where the peer points outside of what it shared.
        """
        nbytes = len(bytes_of_target)
        memory, tensor = self._within(segment, offset, nbytes)
        if nbytes <= SHORT_BYTES:
            bytes_of_target[:] = memory[offset : offset + nbytes]
        else:
            target.copy_(tensor[offset : offset + nbytes])

    def view(self, segment: int, offset: int, nbytes: int) -> Tensor:
        """Return the sender's own bytes, uint8 [nbytes]; ValueError as in `copy`."""
        return self._within(segment, offset, nbytes)[1][offset : offset + nbytes]

    def _within(self, segment: int, offset: int, nbytes: int) -> tuple[memoryview, Tensor]:
        memory, tensor = self._segments[segment]
        if not 0 <= offset <= offset + nbytes <= len(memory):
            raise ValueError(f"{nbytes} bytes at {offset} of a segment of {len(memory)}")
        return memory, tensor


@contextlib.contextmanager
def refused(nbytes: int) -> Iterator[None]:
    """Context that turns a system's refusal of shared memory into ExhaustedError with the bytes that were asked for."""
    try:
        yield
    except OSError as error:
        what = f"no {nbytes} bytes of shared memory for messages between ranks"
        raise ExhaustedError(error.errno, f"{what}: {os.strerror(error.errno or 0)}") from error


def anonymous(name: str, nbytes: int) -> int:
    """Return the descriptor of a file without a place, zeros, whose size nobody can change. ExhaustedError."""
    with refused(nbytes):
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            for seal in _SEALS:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, getattr(fcntl, seal))
        except OSError:
            os.close(fd)
            raise
    return fd


def size_of(nbytes: int) -> int:
    """Bytes of the slot that holds `nbytes`: the next power of two, at least a page."""
    return max(LEAST_BYTES, 1 << (max(nbytes, 1) - 1).bit_length())
