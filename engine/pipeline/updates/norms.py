"""The end of a step on one rank: wait for the replicas' reductions, clip by the global norm, update, zero.

The norm of the whole model is that of one process, to the last digit: each rank fills in the norms of its own
parameters, the vectors are summed over the pipeline's ranks (x + 0 is exact, in any order), and every rank combines
the same numbers in model order with torch's own function. Replicas, and second copies of a stage, hold equal gradients
and are not counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_ABSENT = -1.0


class Norms:
    """Gradient p-norms of the whole model. `parameters`: those that this rank counts; `places`: where they stand in it.

    `power` is p, infinity for the largest element. `exchange` sums a float64 vector [`total`] over the ranks of the
    pipeline, in place.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        places: Sequence[int],
        total: int,
        exchange: Callable[[Tensor], None],
        dtype: torch.dtype,
        device: torch.device,
        power: float = 2.0,
    ) -> None:
        self._parameters = list(parameters)
        self._places = list(places)
        self._total = total
        self._exchange = exchange
        self._dtype = dtype
        self._device = device
        self._power = power

    def total(self) -> Tensor:
        """The norm over all gradients of the model: a 0-dim tensor of `dtype`, the parameters'."""
        norms = torch.zeros(self._total, dtype=torch.float64, device=self._device)
        for place, parameter in zip(self._places, self._parameters, strict=True):
            grad = parameter.grad
            norms[place] = _ABSENT if grad is None else torch.linalg.vector_norm(grad, self._power)
        self._exchange(norms)
        present = norms[norms != _ABSENT].to(self._dtype)
        return torch.linalg.vector_norm(present, self._power) if len(present) else present.new_zeros(())

    def local(self) -> Callable[[], float]:
        """A function that gives the 2-norm of what this rank counts, for the log.

        It may be called when there is time for it, even if the gradients have gone by then.
        """
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norms = list(torch._foreach_norm(grads)) if grads else []
        return lambda: float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


class PieceNorms(Norms):
    """Gradient p-norms of the whole model where each rank has pieces of the gradients.

    `parameters` are pieces, and a place may occur several times. Rank `member` of `members` fills in a line of its own,
    and the norm of norms is that of the whole; the last digits may differ. `exchange` sums over all ranks.
    """

    def __init__(self, *arguments: Any, member: int, members: int, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._member, self._members = member, members

    def total(self) -> Tensor:
        """The norm over all gradients of the model: a 0-dim tensor of `dtype`, the parameters'."""
        norms = torch.zeros(self._members, self._total, dtype=torch.float64, device=self._device)
        mine = norms[self._member]
        for place, piece in zip(self._places, self._parameters, strict=True):
            if piece.grad is not None:
                one = torch.linalg.vector_norm(piece.grad, self._power).double()
                mine[place] = torch.linalg.vector_norm(torch.stack([mine[place], one]), self._power)
        self._exchange(norms)
        of_parameters = torch.linalg.vector_norm(norms, self._power, dim=0).to(self._dtype)
        return torch.linalg.vector_norm(of_parameters, self._power)


class Update:
    """Optimizer, scheduler and clipping of one rank. A rank without parameters has no optimizer."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        clip_norm: float | None,
    ) -> None:
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.clip_norm = clip_norm

    @property
    def lr(self) -> float | None:
        """The learning rate that the next step will use (of the first parameter group)."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer else None

    def clip(self, norm: Tensor | None) -> None:
        """Scale the gradients down to `clip_norm`, where a `norm` above it is given."""
        if norm is not None and self.parameters:
            assert self.clip_norm is not None
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)

    def apply(self) -> None:
        """Step, advance the schedule by one optimizer step, zero."""
        if self.optimizer is None:
            return
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
