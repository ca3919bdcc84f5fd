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

    def _more(self, size: int) -> list[Slot]:
        made = self._made.get(size, 0)
        count = max(1, min(made, MOST_BYTES // size))
        with refused(count * size):
            fd = os.memfd_create("engine-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with refused(count * size):
                os.ftruncate(fd, count * size)
                for seal in _SEALS:
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, getattr(fcntl, seal))
                whole = torch.frombuffer(mmap.mmap(fd, count * size), dtype=torch.uint8)
            self._announce(fd, count * size)
        finally:
            os.close(fd)
        segment, self._count = self._count, self._count + 1
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
        memory, tensor = self._segments[segment]
        end = offset + len(bytes_of_target)
        if not 0 <= offset <= end <= len(memory):
            raise ValueError(f"{end - offset} bytes at {offset} of a segment of {len(memory)}")
        if end - offset <= SHORT_BYTES:
            bytes_of_target[:] = memory[offset:end]
        else:
            target.copy_(tensor[offset:end])


@contextlib.contextmanager
def refused(nbytes: int) -> Iterator[None]:
    """Context that turns a system's refusal of shared memory into ExhaustedError with the bytes that were asked for."""
    try:
        yield
    except OSError as error:
        what = f"no {nbytes} bytes of shared memory for messages between ranks"
        raise ExhaustedError(error.errno, f"{what}: {os.strerror(error.errno or 0)}") from error


def size_of(nbytes: int) -> int:
    """Bytes of the slot that holds `nbytes`: the next power of two, at least a page."""
    return max(LEAST_BYTES, 1 << (max(nbytes, 1) - 1).bit_length())
