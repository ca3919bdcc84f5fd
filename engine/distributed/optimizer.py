"""An optimizer whose step sees the mean gradient over all ranks, whatever loop it is used in.

    backward()   each bucket of gradients starts to travel when its last gradient is there
    step()       what has not started does; all are awaited; the optimizer's own step
    step(f)      each time the optimizer evaluates f, its gradients are reduced before the optimizer sees them

The result is an object of the wrapped optimizer's own class, so schedulers and gradient scalers take it as they took
that one. All ranks step equally often; one that runs out of samples before the others calls `join`.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from engine.distributed.broadcast import broadcast_optimizer_state, broadcast_parameters, named_pairs
from engine.distributed.calls import LOOK_S
from engine.distributed.stragglers import Stragglers
from engine.distributed.world import World, current
from engine.errors import a_type
from engine.gradients.buckets import Reducer
from engine.gradients.combine import Mean
from engine.gradients.compression import Compression
from engine.gradients.grad_hooks import GradHooks
from engine.gradients.layout_check import require_alike
from engine.transport import PeerError

BUCKET_BYTES = 25 * 2**20
OPS = ("mean", "sum")
_log = logging.getLogger("engine.distributed")
_latest: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> its Synchronizer, by a weak reference


def DistributedOptimizer(  # noqa: N802  # the name it has in Horovod
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    *,
    compression: Compression = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = "mean",
    bucket_bytes: int = BUCKET_BYTES,
    world: World | None = None,
) -> Any:
    """Return an optimizer of the same class whose step sees the gradients of all ranks.

    `optimizer` itself must not be used any more. `backward_passes_per_step`: how many backwards add to the gradients
    before they are reduced. `op`: mean or sum over the ranks. ValueError where the names do not cover the optimizer's
    parameters, for LBFGS, and on all ranks where the parameters, `op` or `compression` differ. Parameters belong to the
    latest that was made for any of them: an earlier one's step is an error from then on.
    """
    for name, number in (("backward_passes_per_step", backward_passes_per_step), ("bucket_bytes", bucket_bytes)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r} must be a whole number, at least 1")
    if op not in OPS:
        raise ValueError(f"op={op}: there is {', '.join(OPS)}")
    if not isinstance(compression, Compression):
        kinds = ", ".join(f"Compression.{kind.name}" for kind in Compression)
        raise ValueError(f"compression={compression!r}: there is {kinds}")
    if isinstance(optimizer, _Steps):
        raise ValueError(f"this optimizer is {a_type(optimizer)} already: wrap torch's own optimizer, and once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS decides by its loss how often it evaluates the closure, and every rank has a loss of its own: "
            "use an optimizer that goes by gradients alone"
        )
    if "step" in vars(optimizer):
        raise ValueError("a scheduler holds this optimizer already: wrap the optimizer first, then build the scheduler")
    named = _named(optimizer, named_parameters)
    kind: Any = type(f"Distributed{type(optimizer).__name__}", (_Steps, type(optimizer)), {})
    made: Any = kind.__new__(kind)
    made.__dict__.update(vars(optimizer))
    world = world or current()
    with world.making():
        made._sync = Synchronizer(named, world, compression, backward_passes_per_step, op, bucket_bytes)
    return made


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's own parameters under their names, in the order in which they were named."""
    groups = enumerate(optimizer.param_groups)
    own = [(f"group{g}.{i}", p) for g, group in groups for i, p in enumerate(group["params"])]
    named = own if named_parameters is None else named_pairs("named_parameters", named_parameters)
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"named_parameters names {twice} twice; pass model.named_parameters() of one model")
    wanted, given = {id(p) for _, p in own}, {id(p) for _, p in named}
    if missing := [where for where, p in own if id(p) not in given]:
        raise ValueError(
            f"named_parameters leaves out {len(missing)} of the optimizer's {len(own)} parameters, first {missing[0]}; "
            "pass the names of all of them, or none"
        )
    found = [(name, p) for name, p in named if id(p) in wanted]  # frozen ones too: they must stay so
    if not any(p.requires_grad for _, p in found):
        raise ValueError("the optimizer has no parameter that requires a gradient: there is nothing to train")
    return found


class Synchronizer:
    """The reductions behind one optimizer; a round is one step's worth of gradients of all parameters."""

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        world: World,
        compression: Compression,
        passes: int,
        op: str,
        bucket_bytes: int,
    ) -> None:
        self.world, self.named = world, named
        self.done = False  # whether the gradients are those of all ranks
        self.succeeded = False  # whether a later one listens to some of the parameters
        self._known = {id(p) for _, p in named}
        self._passes = passes
        ring = world.ring(parameter.device for _, parameter in named)
        self._label = ring.label
        how = f"op={op}, compression={compression.name}"
        require_alike(ring, [how], "all ranks must reduce alike", "settings")
        self._take_over()
        self.combine = Mean(ring, compression, average=op == "mean")
        self.reducer = Reducer(named, ring, bucket_bytes, combine=self.combine)
        names = [[name for name, _ in bucket.named] for bucket in self.reducer.buckets]
        self._calls = Stragglers(world, ring.label, names)
        self._step = 0
        self.combine.begin = lambda bucket: self._calls.arrive(self._step, bucket)
        self._watch = GradHooks([p for _, p in self.reducer.named], self.added)
        for _, p in named:
            _latest[p] = weakref.ref(self)
        self._begin()

    def _take_over(self) -> None:
        """Two that listen to one gradient would both reduce it: earlier ones over these parameters end here."""
        found = [_latest[p]() for _, p in self.named if p in _latest]
        for earlier in {id(each): each for each in found if each is not None}.values():
            if earlier.begun:
                raise ValueError(
                    "gradients of an earlier DistributedOptimizer over the same parameters are on their way: "
                    "call its step() or zero_grad() first"
                )
            earlier.succeeded = True
            earlier._watch.close()

    def added(self, number: int) -> None:
        """Note that a backward has added to the gradient of a parameter."""
        self.done = False
        self._left[number] -= 1
        if self._left[number] < 0:
            raise RuntimeError(
                f"{self.reducer.named[number][0]}: a gradient came after its reduction had begun. This step has more "
                f"backwards than backward_passes_per_step={self._passes}: raise it, or call step() or synchronize() "
                "before the next backward"
            )
        if not self._left[number]:
            self.reducer.seen(number)

    def run(self) -> None:
        """Run one round: start what has not started, wait for all; warn of who is missing where it takes long.

        RuntimeError with the same line where the wait has to be given up, or where another rank has called something
        else.
        """
        if self.succeeded:
            raise RuntimeError("a later DistributedOptimizer was made for these parameters: step with that one")
        self.reducer.launch()
        calls, patience = self.world.calls, self.world.patience_s
        how = "step()" if self.combine.takes_part else "join()"
        calls.enter(self._label, f"{how} of optimizer {self._label.removeprefix('gradients')}")
        start = warned = time.monotonic()
        while True:
            try:
                self.reducer.wait(min(LOOK_S, patience))
                break
            except TimeoutError:
                calls.check()
                if time.monotonic() - warned >= patience:
                    warned = time.monotonic()
                    _log.warning("%s", self._calls.missing(warned - start))
            except PeerError as error:
                calls.check()
                said = self._calls.missing(time.monotonic() - start)
                raise RuntimeError(f"{said}. Out of samples before the others? Then join() first. ({error})") from error
        self.done = True
        self._step += 1
        self._begin()
        if self.combine.takes_part and self.combine.odd:
            raise RuntimeError(
                f"step {self._step - 1}: rank(s) {', '.join(map(str, self.combine.odd))} called zero_grad() between "
                f"backward and step where rank {self.world.rank} stepped, or the other way round: their weights differ "
                "since then. All ranks must drop a step or none; broadcast_parameters makes weights alike"
            )

    def require_known(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError for a parameter that has come to the groups without the ranks having agreed on it."""
        for g, group in enumerate(groups):
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in self._known:
                    shape = tuple(parameter.shape)
                    raise ValueError(
                        f"param_groups[{g}]['params'][{i}], of shape {shape}, was not there when DistributedOptimizer "
                        "was made: each rank would train it alone; add parameters before"
                    )

    def _begin(self) -> None:
        self._left = [self._passes] * len(self.reducer.named)
        self.reducer.expect()

    @property
    def begun(self) -> bool:
        """Whether a backward has added to any gradient in this round."""
        return any(left < self._passes for left in self._left)


class _Steps:
    """What a distributed optimizer does differently from its own class."""

    _sync: Synchronizer

    def synchronize(self) -> None:
        """Make the gradients those of all ranks now, to clip or unscale them.

        Neither `step` nor another call does it again before the next backward.
        """
        if not self._sync.done:
            self._sync.run()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless `synchronize` has, then step.

        With a closure: what it returns, this rank's own loss, once the optimizer has evaluated it. All ranks must
        evaluate it equally often. ValueError for parameters that have come to the optimizer since.
        """
        following: Any = super()
        self._sync.require_known(self.param_groups)  # type: ignore[attr-defined]
        try:
            if closure is not None:
                return following.step(lambda: self._reduced(closure))
            self._reduced(lambda: None)
            return following.step()
        finally:
            self._sync.done = False

    def _reduced(self, evaluate: Callable[[], Any]) -> Any:
        """What `evaluate` returns; the gradients are then those of all ranks."""
        value = evaluate()
        if not self._sync.done:
            self._sync.run()
        return value

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps an optimizer's step once; the class behind this one's is

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; those that are on their way already arrive first, on all ranks, and are dropped.

        Where some ranks drop what others step with, the next reduction is a RuntimeError on all of them.
        """
        if self._sync.begun:
            self._sync.run()
            self._sync.combine.dropped += 1
        self._sync.done = False
        following: Any = super()
        following.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("add parameters before DistributedOptimizer is made: all ranks have agreed on those there are")

    def join(self) -> int:
        """Take part in the other ranks' steps with no gradients of one's own, until all have come here.

        Afterwards all ranks hold the parameters and the optimizer state of the rank whose samples lasted longest,
        which is returned (of several the first). The mean of a step is one over the ranks that still had samples. May
        be called behind every epoch. RuntimeError where another rank calls anything but steps meanwhile.
        """
        sync = self._sync
        present = sync.combine.present
        sync.combine.takes_part = False
        while any(present):  # of the last step: everybody's, where all have joined before it
            last = present.index(True)
            for _, parameter in sync.named:
                parameter.grad = None
            sync.run()
            present = sync.combine.present
        sync.combine.takes_part = True
        sync.combine.present = [True] * sync.world.size  # for the next join, after steps or without any
        sync.combine.dropped = 0  # ranks that had joined took part in drops of others without knowing
        self.zero_grad()
        broadcast_parameters(sync.named, last, sync.world)
        broadcast_optimizer_state(self, last, sync.world)  # type: ignore[arg-type]
        return last
