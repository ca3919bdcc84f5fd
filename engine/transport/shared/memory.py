"""Memory of this rank that other processes read where it lies, so that a message from it is no copy.

    Regions.allot(n)  ──► a tensor over an anonymous file, mapped here
    isend of a part of it ── the file's descriptor, once per channel; then (segment, offset, bytes)
                          ──► the receiver reads it in place: it maps the same file

A region is given out again once nothing refers to the tensor over it any more, since its receivers have it mapped: what
is allotted one after the other takes no more memory than the most that is in use at once.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from engine.transport.shared.segments import anonymous


class Region(NamedTuple):
    """An anonymous file and where it is mapped."""

    begin: int  # address
    nbytes: int
    fd: int
    mapped: mmap.mmap


class Regions:
    """What a rank has allotted; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection may give back while this thread holds it
        self._all: list[Region] = []  # by address; replaced, never changed
        self._free: list[Region] = []

    def allot(self, nbytes: int) -> Tensor:
        """Return memory, uint8 [nbytes], all zeros. ExhaustedError where the system has none."""
        with self._lock:
            fitting = [region for region in self._free if nbytes <= region.nbytes <= 2 * nbytes]
            if fitting:
                region = min(fitting, key=lambda region: region.nbytes)
                self._free.remove(region)
            else:
                region = self._made(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        memory = memoryview(region.mapped)
        weakref.finalize(memory, self._give_back, region).atexit = False
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        return whole[:nbytes].zero_() if fitting else whole[:nbytes]

    def _made(self, nbytes: int) -> Region:
        fd = anonymous("engine-memory", nbytes)
        mapped = mmap.mmap(fd, nbytes)
        region = Region(torch.frombuffer(mapped, dtype=torch.uint8).data_ptr(), nbytes, fd, mapped)
        self._all = sorted([*self._all, region])
        return region

    def _give_back(self, region: Region) -> None:
        with self._lock:
            self._free.append(region)

    def find(self, address: int, nbytes: int) -> Region | None:
        """Return the region in which these bytes lie; None where they lie elsewhere."""
        regions = self._all
        at = bisect.bisect_right(regions, address, key=lambda region: region.begin) - 1
        if at < 0 or address + nbytes > regions[at].begin + regions[at].nbytes:
            return None
        return regions[at]

    def close(self) -> None:
        """Close the files; memory that is still in use stays mapped."""
        with self._lock:
            for region in self._all:
                os.close(region.fd)
            self._all, self._free = [], []
