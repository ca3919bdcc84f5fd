"""A model over several ranks, for a training loop of one's own: `engine.Pipeline`.

    pipeline = engine.Pipeline(layers, loss, schedule="1f1b", microbatches=8, ranks=4)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for batch in batches:
        loss = pipeline.step(batch)     forward and backward; `.grad` is what one process would have
        optimizer.step()
        optimizer.zero_grad()

All ranks run the same loop. It knows nothing of settings, data sets or launchers; the engine's own runs (`training/`)
drive the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from engine.collectives import Collective
from engine.distributed.world import current
from engine.errors import a_type
from engine.gradients.division import Shards
from engine.pipeline.arguments import check_values, refusing_arguments
from engine.pipeline.batches.batch import ReplicaBatch
from engine.pipeline.batches.microbatch import samples_of, sizes
from engine.pipeline.batches.window import Window
from engine.pipeline.dtypes import to_device
from engine.pipeline.fingerprints import check_equal, fingerprints
from engine.pipeline.layers import Given, layers_of
from engine.pipeline.losses import Loss, make_loss
from engine.pipeline.prepared import Prepared, device_in, prepare_alone
from engine.pipeline.runner import Context, Runner, forward_context
from engine.pipeline.seeds import undisturbed
from engine.pipeline.stage.overlap import ARGUMENTS, Overlap
from engine.pipeline.states import WholeState
from engine.pipeline.updates.updater import BUCKET_BYTES, UpdateRules
from engine.plan.schedules import SCHEDULES
from engine.targets import check_arguments
from engine.telemetry.position import place_of


class Pipeline(Runner):
    """A model cut into stages over `ranks` ranks, and `replicas` copies of that; this rank holds its own stages.

    Args:
        layers: an nn.Sequential, a list of modules, (name, module) or (name, function that builds the module), or any
            other module (see `example`). Of functions each rank calls those of its own stages, seeded from (`seed`,
            position); modules that are given must have equal weights on all ranks (those of other ranks' stages may be
            on the meta device), and those of other stages are let go.
        loss: a function or module of (output, target) that returns one mean, or (sum, count).
        schedule: name of the schedule, see `python -m engine --help`; `options` are its own, such as {"chunks": 2}.
        microbatches: how many a replica's share of a batch is cut into.
        ranks: of one pipeline; by default all there are, divided by `replicas`.
        split: names of the layers that begin stages 1, 2, ...; by default stages are even by parameters.
        optimizer: makes an optimizer from a list of parameters: `step` then updates, clips to `clip_norm` where that is
            given, zeroes, and advances what `lr_scheduler` makes from the optimizer. Without it `step` leaves gradients
            to the caller.
        allreduce: how replicas sum gradients; `bucket_bytes` at once. `shard_optimizer` divides the optimizer's work
            and state over replicas (each element must be updated by itself, as Adam and SGD do).
        device: where this rank computes; by default where `engine.init` has put it. `dtype` converts the layers and the
            inputs; `autocast` is a dtype for the forwards, such as
            torch.bfloat16, or makes the context of each.
        seed: of layers that are built by functions, and of what layers draw (dropout masks).
        overlap: function for schedules that run a forward and a backward together, see `engine.pipeline.stage.overlap`.
        example: an input like that of a batch, where `layers` is a module that is no nn.Sequential: that is cut by
            following its forward, into stages of which each runs its own stretch of it. Only shapes count.
        prepared: of the engine's own runs, what was proven before; schedule to split and optimizer to shard_optimizer
            are then not looked at.

    All ranks construct it, and call its methods, in the same order. ValueError for whatever cannot be.
    """

    def __init__(
        self,
        layers: Given,
        loss: Loss | Callable[..., Any],
        *,
        schedule: str = "gpipe",
        microbatches: int = 4,
        ranks: int | None = None,
        replicas: int = 1,
        options: Mapping[str, Any] | None = None,
        split: Sequence[str] | None = None,
        optimizer: Callable[[list[nn.Parameter]], Any] | None = None,
        lr_scheduler: Callable[[Any], Any] | None = None,
        clip_norm: float | None = None,
        clip_norm_type: float | None = 2.0,
        allreduce: str | type[Collective] = "ring",
        bucket_bytes: int = BUCKET_BYTES,
        shard_optimizer: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | Context | None = None,
        seed: int = 0,
        overlap: Overlap | None = None,
        prepared: Prepared | None = None,
        example: Any = None,
    ) -> None:
        alone = prepared is None
        scoring = make_loss(loss, "loss")
        if overlap is not None:
            check_arguments(overlap, ARGUMENTS, "overlap")
        if alone:
            check_values(
                schedule=schedule, microbatches=microbatches, ranks=ranks, replicas=replicas, options=options,
                split=split, optimizer=optimizer, lr_scheduler=lr_scheduler, clip_norm=clip_norm,
                clip_norm_type=clip_norm_type, bucket_bytes=bucket_bytes, shard_optimizer=shard_optimizer,
                device=device, dtype=dtype, autocast=autocast, seed=seed,
            )  # fmt: skip
            world = current()
            device = device_in(world, device)
        on = torch.device(device or "cpu")
        given = layers_of(layers, example, split or (), on, dtype)
        within = forward_context(autocast, on)
        self._said = refusing_arguments if alone else nullcontext
        with self._said(), undisturbed(on) if alone else nullcontext():
            if prepared is None:
                division = Shards if shard_optimizer else None
                rules = UpdateRules(optimizer, lr_scheduler, clip_norm, clip_norm_type, division, bucket_bytes)
                prepared = prepare_alone(
                    given, scoring, world, schedule=schedule, microbatches=microbatches, ranks=ranks, replicas=replicas,
                    options=options or {}, split=split, allreduce=allreduce, rules=rules, device=on, dtype=dtype,
                    autocast=within,
                )  # fmt: skip
            prints = fingerprints(given) if alone else None
            super().__init__(given, scoring, prepared, schedule, on, dtype, within, seed, overlap)
        if prints is not None:
            check_equal(given, prints, self._sum)
        self._microbatches = SCHEDULES[schedule].per_update(microbatches)
        self._state = WholeState(self.stages, self.tables.placement, prepared.transport, prepared.connections.label)
        self._done = 0  # steps
        self._closed = False

    # -- training --------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Tensor:
        """Forward and backward of one global batch; its mean loss over all replicas, the same on every rank (0-dim).

        `batch` is (input, target): this replica's share, the same on all ranks of the replica. Of its values the first
        stage's rank reads the input and the last one's the target; elsewhere tensors of the meta device will do. The
        gradients are added to `.grad`: those of the mean over the whole batch, in every replica. ValueError for a share
        with fewer samples than micro-batches; an empty one is possible where there are replicas.
        """
        return self.steps([batch])[0]

    def steps(self, batches: Sequence[Any]) -> list[Tensor]:
        """`step` for each batch; an asynchronous schedule does not drain the pipeline between them.

        There each batch is one update, of one micro-batch or, where the schedule says so, of `microbatches`; all must
        have one shape.
        """
        self._check_open()
        shares = [self._share(batch, self._microbatches) for batch in batches]
        if self._asynchronous and shares:
            return self._stream(shares)
        losses = []
        for share in shares:
            with self._guarded():
                ran = self.run(share, self._done)
            self._done += 1
            losses += self._means([(sum(ran.losses), ran.counted, share.rows)])
        return losses

    def _stream(self, shares: Sequence[ReplicaBatch]) -> list[Tensor]:
        first = self._done
        found: list[tuple[float, float, int]] = []
        with self._said():
            tables = {id(self._messages(True, share)) for share in shares}
        if len(tables) > 1:
            raise ValueError("the batches of one call of steps() differ in shape or dtype: call it once for each shape")

        def after(window: Window) -> None:
            _, losses, counted = window.updated()
            found.append((sum(losses), counted, shares[len(found)].rows))

        pieces = [[rows for piece in share.pieces for rows in piece] for share in shares]
        with self._guarded():
            self.run_window(self.window(first, pieces, lambda step: shares[step - first], shares[0], after))
        self._done += len(shares)
        return self._means(found)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Any, output: Callable[[Any, Any], None] | None = None) -> Tensor:
        """The mean loss of a batch (as in `step`, of any size), in evaluation mode and without gradients.

        `output(output, target)` is called for each micro-batch in order, on the rank of the last stage. Replicas
        evaluate their own shares, with the buffers (BatchNorm's statistics) of the first. ValueError where no rank has
        a sample.
        """
        self._check_open()
        share = self._share(batch, None)
        with self._said():
            loss, messages, found = self.loss.apart(training=False), self._messages(False, share), [0.0, 0.0]

        def evaluated(made: Any, target: Any, microbatch: int) -> None:
            found[0] += float(loss(made, target))
            found[1] += loss.count(target, messages[share.pieces[0][microbatch]][-1].spec)
            if output is not None:
                output(made, target)

        with self._guarded(), self.evaluating():
            if share.pieces:
                self.run_evaluation(share, loss, evaluated)
        return self._means([(found[0], found[1], share.rows)])[0]

    # -- as an nn.Module -------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The optimizer over this rank's parameters that `optimizer=` has made; None where there is none."""
        return self.updater.update.optimizer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the unsplit model, parameter) of the stages on this rank, frozen ones too."""
        self.updater.all_ready()
        seen: set[nn.Parameter] = set()  # stages may share parameters
        for index in sorted(self.stages):
            for name, parameter in self.stages[index].all_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the stages on this rank, frozen ones too: for an optimizer of this rank's own."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this rank's parameters, or set them to zeros."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm, over the whole model, is at most `max_norm`; the norm before that.

        As torch.nn.utils.clip_grad_norm_ on the unsplit model; all ranks call it. RuntimeError for a norm that is not
        finite where `error_if_nonfinite`. ValueError where the pipeline updates itself: give clip_norm= instead.
        """
        self._check_open()
        check_values(max_norm=max_norm, norm_type=norm_type)
        if self._prepared.rules.optimizer is not None:
            raise ValueError("with optimizer= gradients are gone after step(): give clip_norm= to the pipeline instead")
        norm = self.updater.norms(norm_type).total()
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of order {norm_type} of all gradients is not finite: {float(norm)}")
        torch.nn.utils.clip_grads_with_norm_(self.updater.parameters, max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of the whole model on every rank, under the unsplit model's names: copies, on the CPU.

        All ranks call it. Replicas hold equal parameters; buffers are those of the first.
        """
        self._check_open()
        self.updater.all_ready()
        return self._state.gather()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> _IncompatibleKeys:
        """Copy a state of the whole model, as `state_dict` gives it, into the stages of this rank; all ranks call it.

        ValueError for names that are missing or unknown where `strict`, and for tensors of another shape.
        """
        self._check_open()
        self.updater.all_ready()
        return self._state.load(state_dict, strict)

    def train(self, mode: bool = True) -> Self:
        """Put the modules of this rank into training mode, or with False into evaluation mode."""
        for stage in self.stages.values():
            for layer in stage.layers:
                layer.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the modules of this rank into evaluation mode; `evaluate` does so by itself, for its own time."""
        return self.train(False)

    def close(self) -> None:
        """Wait until what was sent has arrived, and let go of threads and hooks; parameters stay as they are."""
        if not self._closed:
            self._closed = True
            self.links.limit(0)
            self.updater.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # else the others may not be there any more
            self.close()

    # -- the rest --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this pipeline is closed: make a new one, and load its state_dict() from the old one's")

    def _share(self, batch: Any, microbatches: int | None) -> ReplicaBatch:
        """A user's batch in this many micro-batches; None: at most so many as are configured."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(f"a batch is a pair (input, target), not {a_type(batch)}")
        rows = samples_of(batch[0])
        if microbatches is None:
            microbatches = min(rows, self._microbatches)
        elif rows < microbatches and (rows or self._asynchronous or not self._replicated):
            raise ValueError(
                f"a batch of {rows} samples cannot be cut into microbatches={microbatches}: give larger batches "
                "(DataLoader(drop_last=True) leaves out a short last one), or lower microbatches"
            )
        given, target = (
            to_device(value, self.device, self._dtype) if stage in self.stages else value
            for value, stage in zip(batch, (0, self._last), strict=True)
        )
        return ReplicaBatch(given, target, [sizes(rows, microbatches)] if rows else [])

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around computations: generators are left alone; what is raised says in a note where in the program it was."""
        try:
            with self._said(), undisturbed(self.device):
                yield
        except BaseException as error:
            if (place := place_of(error)).action is not None:
                where = f"stage {place.stage}, micro-batch {place.microbatch}"
                error.add_note(f"in {place.action} of the pipeline ({where})")
            raise

    def _means(self, found: Sequence[tuple[float, float, int]]) -> list[Tensor]:
        """Of (loss sum, count, samples) of this rank: the mean losses over all ranks; NaN where nothing was scored."""
        table = torch.tensor(found, dtype=torch.float64)
        self._sum(table)
        if not table[:, 2].all():
            raise ValueError("no rank was given a sample: a batch has at least one")
        return list((table[:, 0] / table[:, 1]).unbind())

    def _sum(self, table: Tensor) -> None:
        """Sum numbers in float64 on the CPU over all ranks, in place."""
        there = table.to(self._prepared.transport.device)
        self.communicators.sum_losses(there)
        table.copy_(there)
