"""The executor and what stands around it, with ranks as threads."""

from __future__ import annotations

import errno
import gc
import itertools
import random
import resource
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import ADAM, Ran, close, equal, plain, run_threads, settings

from engine.settings import AllReduceSettings, Eval
from engine.telemetry.position import Place, locate, place_of
from engine.telemetry.records import decode
from engine.training.samples.source import ItemError
from engine.training.worker import Worker

SCHEDULES = ("naive", "gpipe", "1f1b")


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (3, 2), (4, 8), (4, 2)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow(keep=6)
def test_in_flight_is_exactly_the_schedules(schedule: str, ranks: int, microbatches: int) -> None:
    """Live graphs, counted by weak references to the real outputs' graphs, not by the engine."""
    alive: list[dict[int, int]] = [{"now": 0, "peak": 0} for _ in range(ranks)]  # type: ignore[misc]

    def probe(worker: Worker) -> None:
        count: Any = alive[worker.rank]

        def gone() -> None:
            count["now"] -= 1

        def hook(_: Any, __: Any, output: Any) -> None:
            mask = torch.ones_like(output)
            weakref.finalize(mask, gone)
            count["now"] += 1
            count["peak"] = max(count["peak"], count["now"])
            return output * mask  # the graph keeps the mask alive until the backward has used it

        (stage,) = worker.stages.values()
        stage.layers[0].module.register_forward_hook(hook)

    ran = run_threads(settings(schedule, ranks, microbatches), probe)
    want = {
        "naive": [1] * ranks,
        "gpipe": [microbatches] * ranks,
        "1f1b": [min(microbatches, ranks - r) for r in range(ranks)],
    }[schedule]
    assert [count["peak"] for count in alive] == want  # type: ignore[index]
    assert [count["now"] for count in alive] == [0] * ranks  # type: ignore[index]
    for record in ran.of("step"):
        assert record.meta["peak_in_flight"] == want[record.meta["rank"]]


def test_memory_of_1f1b_is_flat_in_microbatches() -> None:
    """Peak bytes depend on what is in flight, messages held by the links included."""
    peaks = []
    for microbatches in (4, 8, 16):
        held = []

        def watch(worker: Worker, held: list[int] = held) -> None:
            send = worker.links.send

            def counted(*arguments: Any) -> None:
                send(*arguments)
                held.append(worker.links.outstanding)

            worker.links.send = counted  # type: ignore[method-assign]

        ran = run_threads(settings("1f1b", 3, microbatches, global_batch_size=2 * microbatches), watch)
        peaks.append(
            [max(r.meta["peak_activation_bytes"] for r in ran.of("step") if r.meta["rank"] == k) for k in range(3)]
        )
        assert max(held) <= 2 * 3
    assert peaks[0] == peaks[1] == peaks[2]
    assert peaks[0][0] > peaks[0][2] > 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.slow
def test_memory_does_not_grow_with_steps(schedule: str) -> None:
    """C071: when all ranks have done their steps, as many tensors are alive whether those were few or many, but for
    messages that are kept to be used again: as many as once were under way together."""
    alive = []
    for steps in (5, 50):
        gc.collect()
        before = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
        ran = run_threads(settings(schedule, 3, 4, steps=steps, optimizer=ADAM))
        gc.collect()
        alive.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()) - before)
        assert all(not worker.links.outstanding for worker in ran.workers.values())
        del ran
    assert alive[0] > 0 and abs(alive[1] - alive[0]) < 45 / 3  # a tensor a step on one rank of three would be 45


@pytest.mark.parametrize("how", ["transposed", "sliced", "expanded", "dict", "hollow"])
@pytest.mark.slow(keep=2)
def test_unusual_boundaries(how: str) -> None:
    model = {"_target_": "toys.odd_boundary", "how": how, "loss": {"_target_": "toys.TokenLoss"}}
    base = settings("1f1b", 2, 3, model=model, partition={"name": "manual", "split": ["begins"]}, global_batch_size=7)
    expected, _ = plain(base, microbatched=True)
    for schedule in SCHEDULES:
        ran = run_threads(replace(base, schedule={"name": schedule}))
        if how == "transposed":
            assert equal(ran.state(), expected)
        close(ran.state(), expected)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zb_v", 2)])
@pytest.mark.slow(keep=3)
def test_gradients_that_an_operator_swallows(schedule: str, ranks: int, always: bool, replicas: int) -> None:
    """Where a stage ends does not decide whether the layers before have a gradient (weight decay is on)."""
    model = {"_target_": "toys.closed", "always": always, "loss": {"_target_": "toys.TokenLoss"}}
    base = settings(schedule, ranks, 4, replicas, model=model)
    expected, _ = plain(base, microbatched=True)
    ran = run_threads(base)
    if replicas == 1:
        assert equal(ran.state(), expected)
    close(ran.state(), expected)
    assert equal(ran.state(0), ran.state(replicas - 1))


def test_a_branch_used_by_one_microbatch_of_one_replica() -> None:
    """What was not used anywhere keeps its value (weight decay is on); what was used somewhere is reduced."""
    model = {"_target_": "toys.sometimes", "loss": {"_target_": "toys.TokenLoss"}}
    base = settings("1f1b", 2, 4, 2, model=model, global_batch_size=8)
    expected, _ = plain(base, microbatched=True)
    ran = run_threads(base)
    close(ran.state(), expected)
    assert equal(ran.state(0), ran.state(1))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.slow
def test_dropout_depends_on_neither_ranks_nor_schedule(replicas: int) -> None:
    model = {"_target_": "toys.mlp4", "p": 0.4, "loss": {"_target_": "toys.TokenLoss"}}
    base = settings("gpipe", 1, 4, replicas, model=model)
    expected, _ = plain(base, microbatched=True)
    without, _ = plain(replace(base, model={**model, "p": 0.0}), microbatched=True)
    with pytest.raises(AssertionError):
        close(without, expected)
    for ranks in (1, 2, 4):
        for schedule in SCHEDULES:
            ran = run_threads(settings(schedule, ranks, 4, replicas, model=model))
            if replicas == 1:
                assert equal(ran.state(), expected)
            close(ran.state(), expected)


def test_initial_weights_depend_on_the_seed_and_the_layer_only() -> None:
    def initial(**changes: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}

        def keep(worker: Worker) -> None:
            if worker.replica == worker.job.replicas - 1:
                found.update({k: v.clone() for s in worker.stages.values() for k, v in s.state_dict().items()})

        run_threads(settings(steps=1, **changes), keep)
        return found

    one = initial(ranks=1)
    assert equal(one, initial(ranks=4, schedule="1f1b"))
    assert equal(one, initial(ranks=2, replicas=2))
    assert not equal(one, initial(ranks=1, seed=1))


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow(keep=3)
def test_accumulation_equals_one_pass(schedule: str, accumulate: int) -> None:
    base = settings(schedule, 2, 2, accumulate=accumulate, global_batch_size=13, clip_norm=0.05)
    expected, losses = plain(base, microbatched=True)
    ran = run_threads(base)
    assert equal(ran.state(), expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("replicas", [1, 3])
def test_short_last_batches_train(replicas: int) -> None:
    """10 samples in batches of 9: the last batch of an epoch has one sample, less than M and less than R."""
    data = {"_target_": "toys.Tokens", "samples": 10, "targets": 7}
    base = settings("1f1b", 2, 3, replicas, global_batch_size=9, steps=None, epochs=2, data=data)
    expected, losses = plain(base, microbatched=True)
    ran = run_threads(base)
    close(ran.state(), expected)
    assert len(ran.losses()) == 4
    assert ran.losses() == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7])
@pytest.mark.slow(keep=1)
def test_small_batches_train(batch: int) -> None:
    """Every number of micro-batches that fits, replicas with unequal shares, a shorter last batch of an epoch."""
    for replicas in range(1, min(batch, 3) + 1):
        data = {"_target_": "toys.Tokens", "samples": 2 * batch + replicas // 2 + 1, "targets": 7}
        for microbatches in range(1, batch // replicas + 1):
            base = settings("1f1b", 2, microbatches, replicas, global_batch_size=batch, data=data, steps=4)
            expected, _ = plain(base, microbatched=True)
            ran = run_threads(base)
            close(ran.state(), expected)
            assert all(equal(ran.state(0), ran.state(other)) for other in range(1, replicas))


@pytest.mark.parametrize(("samples", "microbatches"), [(1, 4), (2, 4), (5, 4), (5, 1)])
def test_fewer_samples_than_a_batch_train(samples: int, microbatches: int) -> None:
    data = {"_target_": "toys.Tokens", "samples": samples, "targets": 7}
    base = settings("1f1b", 2, microbatches, data=data)
    expected, losses = plain(base, microbatched=True)
    ran = run_threads(base)
    assert equal(ran.state(), expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow
def test_what_is_logged_depends_on_no_layout(schedule: str) -> None:
    """Loss and gradient norm of every step are those of one process on the whole batch, ignored targets and all."""
    layouts = [(1, 1, 1), (1, 8, 1), (4, 4, 1), (1, 1, 4), (2, 2, 2), (2, 3, 1)]  # ranks, micro-batches, replicas
    logged = []
    for ranks, microbatches, replicas in layouts:
        ran = run_threads(settings(schedule, ranks, microbatches, replicas, clip_norm=0.5))
        norms = {r.meta["step"]: r.meta["grad_norm"] for r in ran.of("step")}
        logged.append((ran.losses(), [norms[step] for step in sorted(norms)]))
    losses = plain(settings(clip_norm=0.5), microbatched=False)[1]
    for found, norms in logged:
        assert found == pytest.approx(losses, rel=1e-12) and norms == pytest.approx(logged[0][1], rel=1e-12)


def test_reduced_bytes_do_not_depend_on_microbatches() -> None:
    """Gradients are reduced once a step, however many micro-batches they were added up over."""
    found = {}
    for microbatches in (1, 4, 8):
        ran = run_threads(settings("1f1b", 2, microbatches, 2))
        found[microbatches] = {(r.meta["rank"], r.meta["reduce_bytes_sent"]) for r in ran.of("step")}
        assert len(found[microbatches]) == 4  # one number per rank, the same in every step
    assert found[1] == found[4] == found[8]
    assert all(sent > 0 for _, sent in found[1])


@pytest.mark.parametrize("allreduce", ["ring", "native"])
@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
@pytest.mark.slow
def test_timing_moves_no_bit(schedule: str, allreduce: str) -> None:
    """P = 2, R = 2, dropout and clipping: the same run again, with ranks held up at random."""

    def hold_up(worker: Worker) -> None:
        delays = random.Random(worker.rank)
        for stage in worker.stages.values():
            for layer in stage.layers:
                layer.module.register_forward_hook(lambda *_: time.sleep(delays.random() * 4e-3))

    model = {"_target_": "toys.mlp4", "p": 0.3, "loss": {"_target_": "toys.TokenLoss"}}
    wanted = settings(schedule, 2, 4, 2, model=model, clip_norm=0.05, steps=6, allreduce=AllReduceSettings(allreduce))
    one, other = run_threads(wanted), run_threads(wanted, hold_up)
    assert one.losses() == other.losses()
    for replica in (0, 1):
        assert equal(one.state(replica), other.state(replica))
    norms = [
        sorted((r.meta["step"], r.meta["rank"], r.meta["grad_norm"]) for r in ran.of("step")) for ran in (one, other)
    ]
    assert norms[0] == norms[1]
    assert norms[0][0][2] > 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_in_which_nothing_counts_changes_nothing(replicas: int) -> None:
    """No target of the whole batch is scored: no gradient, no NaN, and weight decay has nothing to act on."""
    data = {"_target_": "toys.Tokens", "blank": 1}
    before: dict[str, torch.Tensor] = {}

    def keep(worker: Worker) -> None:
        before.update({k: v.clone() for s in worker.stages.values() for k, v in s.state_dict().items()})

    ran = run_threads(settings("1f1b", 2, 3, replicas, data=data, clip_norm=1.0), keep)
    assert equal(ran.state(), before)
    assert [r.meta["loss_sum"] for r in ran.of("step") if r.meta["loss_sum"] is not None] == [0.0] * 3 * replicas


@pytest.mark.slow
def test_evaluation_counts_exactly_and_leaves_training_alone() -> None:
    data = {"_target_": "toys.Tokens", "evaluation": {"samples": 13}}
    model = {"_target_": "toys.normed", "loss": {"_target_": "toys.TokenLoss"}}
    alone = run_threads(settings("1f1b", 3, 4, data=data, model=model))
    for every, batch_size, want in ((1, 5, 3), (2, None, 2), (None, 64, 1)):
        ran = run_threads(settings("1f1b", 3, 4, data=data, model=model, eval=Eval(every, batch_size)))
        assert equal(ran.state(), alone.state())
        assert ran.losses() == alone.losses()
        found = [r.meta for r in ran.of("evaluation")]
        assert len(found) == want
        assert {m["samples"] for m in found} == {13}
    results = {tuple(_totals(run_threads(settings(s, p, m, data=data, eval=Eval(None, size)))))
               for s, p, m, size in (("gpipe", 1, 1, 13), ("naive", 4, 2, 5))}  # fmt: skip
    (loss_a, *counts_a), (loss_b, *counts_b) = results if len(results) == 2 else [*results, *results]
    assert counts_a == counts_b
    assert loss_a == pytest.approx(loss_b, rel=1e-12)


def test_evaluation_over_replicas_borrows_the_first_ones_statistics() -> None:
    data = {"_target_": "toys.Tokens", "evaluation": {"samples": 13}}
    model = {"_target_": "toys.normed", "loss": {"_target_": "toys.TokenLoss"}}
    alone = run_threads(settings("1f1b", 2, 2, 2, data=data, model=model))
    ran = run_threads(settings("1f1b", 2, 2, 2, data=data, model=model, eval=Eval(1, 4)))
    for replica in (0, 1):
        assert equal(ran.state(replica), alone.state(replica))
    assert not equal(ran.state(0), ran.state(1))
    last = [r.meta for r in ran.of("evaluation") if r.meta["step"] == 3]
    assert sum(m["samples"] for m in last) == 13
    one = run_threads(settings("1f1b", 1, 2, data=data, model=model, steps=1))
    assert one.job.eval_samples == 13


def _totals(ran: Ran) -> list[float]:
    (meta,) = [r.meta for r in ran.of("evaluation")]
    return [meta["loss_sum"], meta["loss_count"], meta["samples"]]


def test_an_error_says_where_it_happened() -> None:
    model = {"_target_": "toys.failing", "at": 6, "loss": {"_target_": "toys.TokenLoss"}}
    wanted = settings("1f1b", 3, 4, model=model)
    with pytest.raises(ArithmeticError) as caught:
        run_threads(wanted)
    assert place_of(caught.value) == Place(1, 2, "1F2")


def test_an_error_of_the_data_is_not_blamed_on_an_action() -> None:
    """Samples are loaded while another step's message is awaited."""
    data = {"_target_": "toys.Broken", "at": 20, "shuffle": False}
    with pytest.raises(ItemError, match=r"data: item 20 cannot be loaded: OSError: .*item 20") as caught:
        run_threads(settings("1f1b", 2, 4, data=data))
    assert place_of(caught.value) == Place(None, None, "loading the samples of step 1")


def test_spans_and_windows_follow_one_another() -> None:
    """Windows of a rank are adjacent, spans lie inside them, and every action has one."""
    ran = run_threads(settings("1f1b", 2, 4, clip_norm=1.0))
    for rank in (0, 1):
        steps = [r for r in ran.of("step") if r.meta["rank"] == rank]
        for before, after in itertools.pairwise(steps):
            assert before.meta["window"][1] == after.meta["window"][0]
        for record in steps:
            start, end = record.meta["window"]
            spans = record.arrays["spans"]
            assert (spans[:, 3] >= start).all()
            assert (spans[:, 4] <= end).all()
            assert (spans[:, 3] <= spans[:, 4]).all()
            forward = [tuple(row[1:3]) for row in spans.tolist() if row[0] == 0]
            assert forward == [(rank, m) for m in range(4)]


@pytest.mark.parametrize(
    ("every", "consecutive", "traced"),
    [(1, 1, [1, 1, 1]), (2, 1, [1, 0, 1]), (9, 1, [1, 0, 0]), (3, 2, [1, 1, 0]), (2, 2, [1, 1, 1]), (2, 5, [1, 1, 1])],
)
def test_untraced_steps_carry_no_spans(every: int, consecutive: int, traced: list[int]) -> None:
    from engine.settings import Trace

    ran = run_threads(settings("gpipe", 2, 2, trace=Trace(every, consecutive)))
    assert [len(r.arrays["spans"]) > 0 for r in ran.of("step") if r.meta["rank"] == 0] == [bool(t) for t in traced]


def test_attention_without_dropout_is_not_seeded() -> None:
    """torch tags attention as drawing random numbers whatever its dropout is."""
    from engine.prepare.prepare import prepare

    model = {"_target_": "models.gpt.gpt", "context": 8, "layers": 2, "width": 8, "heads": 2, "dropout": 0.0}
    loss = {"loss": {"_target_": "models.gpt.NextTokenLoss"}}
    data = {"_target_": "models.data.Text", "context": 8, "max_bytes": 4000}
    for dropout, draws in ((0.0, False), (0.1, True)):
        job = prepare(settings(model={**model, "dropout": dropout, **loss}, data=data, precision="fp32"), ".", ".")
        assert [layer.random for layer in job.layers if "block" in layer.name] == [draws] * 2


def test_a_sequential_is_the_same_model_whatever_the_cut() -> None:
    """Its weights depend on the seed alone, and a module used twice stands twice."""
    model = {"_target_": "toys.sequential", "loss": {"_target_": "toys.TokenLoss"}}
    runs = [run_threads(settings("1f1b", ranks, 4, model=model)) for ranks in (1, 2, 5)]
    assert [layer.name for layer in runs[0].job.layers] == ["0", "1", "2", "3", "4"]
    assert equal(runs[0].state(), runs[1].state())
    assert equal(runs[0].state(), runs[2].state())
    assert runs[0].losses() == runs[2].losses()


def test_any_text_of_an_error_can_be_reported() -> None:
    from engine.launch.rank import error_record

    meta = decode(error_record(0, ValueError("bad \ud800" + "x" * 10**6))).meta
    assert meta["message"].startswith("bad \\ud800x")
    assert len(meta["message"]) < 21_000
    meta["message"].encode()


def test_a_rank_that_may_open_no_more_files_says_what_to_do() -> None:
    from engine.launch.rank import error_record

    meta = decode(error_record(0, OSError(errno.EMFILE, "Too many open files"))).meta
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"Too many open files: a process may open {limit} files here: raise the limit (ulimit -n " in meta["message"]
    assert decode(error_record(0, OSError(errno.EIO, "a disk"))).meta["message"] == f"[Errno {errno.EIO}] a disk"


class Mute(Exception):
    def __str__(self) -> str:
        raise ArithmeticError("no words")


class Quits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Shut(Exception):
    """Takes no attribute, and has some that are called as ours were."""

    stage = action = object()

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("read only")


@pytest.mark.parametrize("kind", [Mute, Quits, Shut, KeyboardInterrupt, SystemExit])
def test_an_exception_of_any_class_keeps_its_type_and_place(kind: type[BaseException]) -> None:
    from engine.launch.rank import error_record

    error = kind()
    locate(error, Place(1, 2, "1F2"))
    locate(error, Place(0, 0, "an outer place"))
    meta = decode(error_record(3, error)).meta
    assert (meta["type"], meta["stage"], meta["microbatch"], meta["action"]) == (kind.__name__, 1, 2, "1F2")
    assert meta["message"]
