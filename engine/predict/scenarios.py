"""Which other configurations a run is asked about: schedules, micro-batches, splits, recomputation, transfers.

One thing is changed at a time, unless the user names what to ask: then every combination of what is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from engine.plan.choose import synchronous
from engine.plan.partition import manual, partition
from engine.plan.schedules import SCHEDULES, offered_schedules
from engine.predict.cuts import cut_of, even
from engine.predict.whatif import DOUBLED, FREE, Prediction, Predictor, Scenario
from engine.tables import counted

_TIMES = 8  # as many, and as few, micro-batches as the run's are asked about


class LeftOut(NamedTuple):
    """A configuration that is not predicted, and why."""

    words: str
    why: str


@dataclass(frozen=True)
class Answer:
    """Predictions for a run and for what it could be.

    `baseline` is the run itself, `found` the others, the quickest first, then what keeps less.
    """

    baseline: Prediction
    found: tuple[Prediction, ...]
    left_out: tuple[LeftOut, ...]


def answer(predictor: Predictor, scenarios: Sequence[Scenario | LeftOut]) -> Answer:
    """Predict every scenario that can be predicted, and say why the others cannot."""
    found, left = [], []
    for scenario in scenarios:
        if isinstance(scenario, LeftOut):
            left.append(scenario)
            continue
        try:
            found.append(predictor.predict(scenario))
        except ValueError as error:
            left.append(LeftOut(scenario.words, str(error)))
    found.sort(key=lambda each: (each.step, max(each.memory), each.scenario.words))
    return Answer(predictor.predict(predictor.own), tuple(found), tuple(left))


def usual(predictor: Predictor) -> list[Scenario | LeftOut]:
    """The scenarios that are one change away from the run."""
    return [
        *_schedules(predictor),
        *_microbatches(predictor),
        *_splits(predictor),
        *_recompute(predictor),
        *_transfers(predictor),
    ]


def nearest(predictor: Predictor) -> list[Scenario | LeftOut]:
    """The scenarios that a run's own measurements tell most surely: other splits, 1F1B, other micro-batches."""
    schedules = [each for each in _schedules(predictor) if isinstance(each, Scenario) and each.schedule == "1f1b"]
    return [*_splits(predictor), *schedules, *_microbatches(predictor)]


def asked(
    predictor: Predictor, schedules: Sequence[str], microbatches: Sequence[int], splits: Sequence[Sequence[str]]
) -> list[Scenario | LeftOut]:
    """The scenarios of every combination of what is named; what is not is as in the run.

    Raises ValueError for names there are not.
    """
    base, own = predictor.base, predictor.own
    for name in schedules:
        if name not in SCHEDULES or SCHEDULES[name].stream is not None:
            raise ValueError(f"no synchronous schedule {name!r}; there are: {', '.join(synchronous())}")
    if bad := [count for count in microbatches if not 1 <= count <= base.share]:
        raise ValueError(
            f"{bad[0]} micro-batches: a replica has {base.share} samples in one pass, which allow 1 to {base.share}"
        )
    cuts: list[tuple[int, ...] | None] = [manual(base.names, names) for names in splits]
    found: list[Scenario | LeftOut] = []
    names, counts = schedules or [own.schedule], microbatches or [own.microbatches]
    for name, count, split in product(names, counts, cuts or [None]):
        options = own.options if name == own.schedule else {}
        words = [name] if schedules else []
        words += [counted(count, "micro-batch")] if microbatches else []
        words += [f"split {_named(predictor, split)}"] if split else []
        scenario = Scenario(", ".join(words), name, options, count, split)
        if complaint := SCHEDULES[name].complaint(base.raw["ranks"], count, options):
            found.append(LeftOut(scenario.words, complaint))
        elif split and predictor.program(scenario).stages != len(split):
            found.append(LeftOut(scenario.words, f"it has {counted(predictor.program(scenario).stages, 'stage')}"))
        else:
            found.append(_described(predictor, scenario))
    return found


def _described(predictor: Predictor, scenario: Scenario) -> Scenario | LeftOut:
    """With what to change on the command line."""
    base, own, words = predictor.base, predictor.own, []
    if scenario.schedule != own.schedule:
        words.append(f"schedule={scenario.schedule}")
    if scenario.microbatches != own.microbatches:
        words.append(f"pipeline.microbatches={scenario.microbatches}")
    try:
        split = cut_of(base, predictor.program(scenario).stages, scenario.split).split
    except ValueError as error:
        return LeftOut(scenario.words, str(error))
    if split is not None and split != base.split and not base.made_to_measure:
        words += ["partition=manual", f"partition.split=[{_named(predictor, split)}]"]
    return replace(scenario, overrides=tuple(words))


def _named(predictor: Predictor, split: Sequence[int]) -> str:
    return ",".join(predictor.base.names[first] for first in split[1:])


def _schedules(predictor: Predictor) -> Iterator[Scenario | LeftOut]:
    own, ranks = predictor.own, predictor.base.raw["ranks"]
    for name in synchronous():
        if name == own.schedule:
            continue
        if complaint := SCHEDULES[name].complaint(ranks, own.microbatches, {}):
            yield LeftOut(name, complaint)
        else:
            yield _described(predictor, Scenario(name, name, {}, own.microbatches))
    for name in offered_schedules():
        if SCHEDULES[name].stream is not None:
            yield LeftOut(name, "asynchronous: it trains by other updates, so its steps are not comparable")


def _microbatches(predictor: Predictor) -> Iterator[Scenario | LeftOut]:
    """Half as many and fewer, twice as many and more."""
    base, own = predictor.base, predictor.own
    count, tried = own.microbatches, set()
    for power in (1, 2, 3):
        tried |= {count * 2**power} | ({count // 2**power} if count % 2**power == 0 else set())
    for other in sorted(tried):
        if not count / _TIMES <= other <= min(count * _TIMES, base.share):
            continue
        words = counted(other, "micro-batch")
        if complaint := SCHEDULES[own.schedule].complaint(base.raw["ranks"], other, dict(own.options)):
            yield LeftOut(words, complaint)
        else:
            yield _described(predictor, replace(own, words=words, microbatches=other))


def _splits(predictor: Predictor) -> Iterator[Scenario | LeftOut]:
    base, stages = predictor.base, len(predictor.base.split)
    if stages == len(base.names):
        yield LeftOut("another split", f"the model has {counted(stages, 'layer')}, one for each stage")
        return
    wanted = {
        even(base, stages): "as even as the measured layers allow",
        partition(base.parameters.tolist(), stages): "by parameters",
        partition([1.0] * len(base.names), stages): "by the number of layers",
    }
    for split, how in wanted.items():
        if split != base.split:
            yield _described(predictor, replace(predictor.own, words=f"split {how}", split=split))
    if even(base, stages) == base.split:
        yield LeftOut("a more even split", "the measured layers allow none")


def _recompute(predictor: Predictor) -> Iterator[Scenario]:
    yield replace(predictor.own, words="recompute all", recompute=True)


def _transfers(predictor: Predictor) -> Iterator[Scenario]:
    yield replace(predictor.own, words="transfers at twice the bandwidth", transfer=DOUBLED)
    yield replace(predictor.own, words="free transfers", transfer=FREE)
