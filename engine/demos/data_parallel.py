"""Data parallelism in one process: one model, copied to several devices for each step, a thread per device.

    scatter     the batch, from the first device to the others
    replicate   the weights, from the first device to the others
    apply       forward of each part, in a thread of its own
    gather      the outputs to the first device; the loss is computed there, its gradient scattered
    backward    of each part, in a thread of its own
    reduce      the gradients to the first device, which alone updates

This is what torch.nn.DataParallel does, on any devices (the same CPU several times included), with every phase timed
and counted. It is here to be measured: what it copies, waits for and leaves idle is what the other ways of data
parallelism do without.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class StepCounters:
    """Cost of the steps so far: seconds and copied bytes by phase, threads started, seconds busy by device."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    copied_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    threads: int = 0
    busy: list[float] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str, device: int | None = None) -> Iterator[None]:
        """Count the time inside for a phase, and as work of a device where one is given."""
        start = time.perf_counter()
        yield
        passed = time.perf_counter() - start
        self.seconds[name] += passed
        if device is not None:
            self.busy[device] += passed


class DataParallel:
    """A module on the first of `devices`, copied to the others for each step.

    Buffers of the copies are thrown away after each step.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        if not devices:
            raise ValueError("DataParallel needs at least one device")
        self.module, self.devices = module.to(devices[0]), list(devices)
        self.counters = StepCounters(busy=[0.0] * len(devices))
        self._copies = [copy.deepcopy(self.module).to(device) for device in self.devices[1:]]

    def step(self, inputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        """Run forward and backward of one batch; return the loss.

        The mean's gradients are added to the module's own. `loss(output, target)` is a mean over samples. A batch of
        fewer samples than devices leaves some of them out. ValueError for one of none.
        """
        if not len(inputs):
            raise ValueError("DataParallel was given a batch without samples: leave that step out")
        counters = self.counters
        with counters.phase("scatter"):
            parts = scatter(inputs, self.devices, counters)
        with counters.phase("replicate"):
            replicas = self._replicate(len(parts))
        outputs = self._apply([partial(m, x) for m, x in zip(replicas, parts, strict=True)], "forward")
        with counters.phase("gather"):
            whole = gather(outputs, self.devices[0], counters).requires_grad_()
        with counters.phase("loss", 0):
            value = loss(whole, target.to(self.devices[0]))
            value.backward()
        assert whole.grad is not None
        with counters.phase("scatter"):
            grads = scatter(whole.grad, self.devices, counters)
        self._apply([partial(o.backward, g) for o, g in zip(outputs, grads, strict=True)], "backward")
        with counters.phase("reduce", 0):
            self._reduce(replicas[1:])
        counters.steps += 1
        return value.detach()

    def _replicate(self, count: int) -> list[nn.Module]:
        """The module and `count` - 1 copies with its weights, buffers and mode."""
        copies = self._copies[: count - 1]
        with torch.no_grad():
            for replica in copies:
                replica.train(self.module.training)
                for ours, theirs in zip(_state(self.module), _state(replica), strict=True):
                    theirs.copy_(ours)
                    theirs.grad = None
                    self.counters.copied_bytes["replicate"] += ours.nbytes
        return [self.module, *copies]

    def _apply(self, calls: Sequence[Callable[[], Any]], phase: str) -> list[Any]:
        """Each call in a new thread; the first exception is raised when all have ended."""
        results: list[Any] = [None] * len(calls)
        errors: list[BaseException] = []

        def work(number: int) -> None:
            start = time.perf_counter()
            try:
                results[number] = calls[number]()
            except BaseException as error:  # noqa: BLE001  # raised again below
                errors.append(error)
            self.counters.busy[number] += time.perf_counter() - start

        with self.counters.phase(phase):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.counters.threads += len(threads)
        if errors:
            raise errors[0]
        return results

    def _reduce(self, copies: Sequence[nn.Module]) -> None:
        """Add the copies' gradients to the module's, in the order of devices."""
        for replica in copies:
            for ours, theirs in zip(self.module.parameters(), replica.parameters(), strict=True):
                if theirs.grad is None:
                    continue
                self.counters.copied_bytes["reduce"] += theirs.grad.nbytes
                grad = theirs.grad.to(ours.device)
                ours.grad = grad.clone() if ours.grad is None else ours.grad.add_(grad)


def scatter(batch: Tensor, devices: Sequence[torch.device], counters: StepCounters) -> list[Tensor]:
    """Cut a batch along its first dimension, one part per device; sizes differ by at most one, none is empty."""
    parts = [part for part in batch.tensor_split(len(devices)) if len(part)]
    counters.copied_bytes["scatter"] += sum(part.nbytes for part in parts[1:])
    # To another device a part is copied anyway; on one device it must not be a view that the others could change.
    return [parts[0], *(part.to(device, copy=True) for part, device in zip(parts[1:], devices[1:], strict=False))]


def gather(outputs: Sequence[Tensor], device: torch.device, counters: StepCounters) -> Tensor:
    """Concatenate the outputs, without their graphs, on `device`."""
    counters.copied_bytes["gather"] += sum(output.nbytes for output in outputs[1:])
    return torch.cat([output.detach().to(device) for output in outputs])


def _state(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
