"""What the files of a finished run hold, as schemas: a damaged file is refused where it is read, in one line.

Each `TypedDict` lists what the report takes from a file, not all that is in it. `Damaged` names the first thing that
does not fit. Numbers have bounds far outside of what is ever measured, so that whatever is made of them stays finite.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from engine.files import read_json
from engine.plan.schedules import SCHEDULES, build
from engine.plan.timeline import Kind

_STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
_MOST = 10**12
SPREAD_SHARES = 17
KINDS = 4
MOST_PAIRS = 2**24  # of a rank and a micro-batch

Count = Annotated[int, Field(ge=0, le=_MOST)]
Some = Annotated[int, Field(ge=1, le=_MOST)]
Size = Annotated[int, Field(ge=0, le=2**63)]  # bytes
Number = Annotated[float, Field(ge=-_MOST, le=_MOST)]
Seconds = Annotated[float, Field(ge=0, le=_MOST)]
Above0 = Annotated[float, Field(gt=1e-12, le=_MOST)]
Word = Annotated[str, Field(max_length=100_000)]


class Damaged(ValueError):  # noqa: N818  # a state of a file
    """A file that does not hold what a run of the engine leaves in it."""


# ---- summary.json --------------------------------------------------------------------------------------------------


@with_config(_STRICT)
class LossSummary(TypedDict, total=False):
    """`loss` of summary.json."""

    first: Number | None
    last: Number | None


@with_config(_STRICT)
class StepTime(TypedDict, total=False):
    """`step_time` of summary.json, in seconds."""

    median: Above0 | None
    min: Seconds | None
    max: Seconds | None


@with_config(_STRICT)
class RankTime(TypedDict):
    """An entry of `bubble.per_rank`, as far as it is read: seconds of a step."""

    compute: Seconds


@with_config(_STRICT)
class Bubble(TypedDict, total=False):
    """`bubble` of summary.json: shares of the step."""

    ideal: Number | None
    predicted: Number | None
    measured: Number | None
    per_rank: list[RankTime]


@with_config(_STRICT)
class Memory(TypedDict):
    """`memory` of summary.json: bytes by pipeline rank, the largest over replicas."""

    parameters: list[Size]
    gradients: list[Size]
    buckets: list[Size]
    optimizer_state: list[Size]
    activations: list[Size]
    total: Annotated[list[Size], Field(min_length=1)]


@with_config(_STRICT)
class AllReduceEntry(TypedDict, total=False):
    """`allreduce` of summary.json, as far as it is read."""

    bytes_sent_per_rank: Size | None


@with_config(_STRICT)
class DataParallelEntry(TypedDict, total=False):
    """`data_parallel` of summary.json, as far as it is read."""

    mode: Word | None


@with_config(_STRICT)
class Summary(TypedDict, total=False):
    """The content of summary.json that a sweep's rows are made of; what is not known is null or absent."""

    status: str
    error: Word | None
    mode: Word
    schedule: Word | None
    ranks: Some
    microbatches: Some
    replicas: Some
    global_batch_size: Some
    loss: LossSummary | None
    step_time: StepTime | None
    samples_per_second: Above0 | None
    bubble: Bubble | None
    memory: Memory | None
    peak_in_flight: list[Count] | None
    bytes_sent_per_device: list[Size] | None
    allreduce: AllReduceEntry | None
    data_parallel: DataParallelEntry | None
    asynchronous: dict[str, Any] | None


@with_config(_STRICT)
class RunSummary(TypedDict):
    """What the summary of a run that was not refused, and is no plan, has in any case."""

    step_time: StepTime
    data_parallel: DataParallelEntry | None
    asynchronous: dict[str, Any] | None


# ---- plan.json -----------------------------------------------------------------------------------------------------


@with_config(_STRICT)
class PlannedRank(TypedDict):
    """An entry of `per_rank` in plan.json, as far as it is read."""

    peak_in_flight: Count


@with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class ChoiceEntry(TypedDict):
    """The fields of `plan.choose.Choice`."""

    name: Word
    cost: Number
    makespan: Number
    bubble_fraction: Number
    bubble_rate: Number
    peak: Number
    transfers: Count
    copies: Count
    versions: Count
    refused: Word | None


@with_config(_STRICT)
class Plan(TypedDict):
    """The content of plan.json, as far as it is read."""

    per_rank: list[PlannedRank]
    bubble_fraction: Number
    choice: ChoiceEntry


# ---- config.json, costs.json ---------------------------------------------------------------------------------------


@with_config(_STRICT)
class Config(TypedDict):
    """The content of config.json, as far as it is read."""

    model: dict[str, Any]
    data: dict[str, Any]
    delay: dict[str, Any]
    precision: Word
    device: Word


@with_config(_STRICT)
class LayerEntry(TypedDict):
    """A layer in costs.json: seconds of its forward, bytes of what it keeps, holds, and sends both ways."""

    name: Word
    forward: Seconds
    activation_bytes: Size
    parameter_bytes: Size
    sends: Annotated[list[Size], Field(min_length=2, max_length=2)] | None


@with_config(_STRICT)
class Short(TypedDict):
    """Computations in costs.json of a smaller micro-batch: seconds by kind and stage."""

    rows: Above0
    duration: list[list[Seconds]]


@with_config(_STRICT)
class CostsFile(TypedDict):
    """The content of costs.json; `predict/costs.py` says what it means."""

    threads: Count | None
    schedule: Word
    options: dict[str, Any]
    ranks: Some
    replicas: Some
    passes: Some
    microbatches: Some
    samples: Some
    rows: Above0
    split: Annotated[list[Count], Field(min_length=1)]
    duration: list[list[list[Seconds]]]
    spread: Annotated[list[list[list[Seconds]]], Field(min_length=1)]
    short: list[Short]
    overhead: Number
    delay: list[list[Number]]
    loaded: list[list[Number]]
    reduce: list[Number]
    gather: list[Number]
    count: Number
    norm: list[Number]
    step: list[Number]
    reduced: bool
    normed: bool
    gathered: bool
    layers: Annotated[list[LayerEntry], Field(min_length=1)]


# ---- a series in an event file --------------------------------------------------------------------------------------


@with_config(_STRICT)
class About(TypedDict):
    """The metadata of a step's series: what lists of steps show of it."""

    seconds: Seconds
    shares: dict[str, Number]


Index = Annotated[int, Field(ge=0, lt=2**31)]
OrNone = Annotated[int, Field(ge=-1, lt=2**31)]
Moment = Annotated[int, Field(gt=-(2**61), lt=2**61)]  # ns; the sum of two is an int64
Pair = Annotated[list[Moment], Field(min_length=2, max_length=2)]


@with_config(_STRICT)
class Spans(TypedDict):
    """The columns of a document's spans, in nanoseconds; `stage` and `microbatch` are -1 where there is none."""

    rank: list[Index]
    kind: list[Annotated[int, Field(ge=0, le=max(Kind))]]
    stage: list[OrNone]
    microbatch: list[OrNone]
    start: list[Moment]
    length: list[Annotated[int, Field(ge=0, lt=2**61)]]


@with_config(_STRICT)
class Document(TypedDict):
    """What `account/steps.py` leaves of a step, as far as a timeline is made of it."""

    ranks: Annotated[int, Field(ge=1, lt=2**31)]
    windows: list[Pair]
    uncertainty: list[Moment]
    pairs: list[Pair]
    spans: Spans


# ---- reading -------------------------------------------------------------------------------------------------------


def read(path: Path, schema: Any) -> dict[str, Any] | None:
    """The content of a file; None where there is no JSON object in it.

    Raises Damaged where the schema does not hold.
    """
    content = read_json(path)
    if content is None:
        return None
    check(content, schema, path.name)
    return content


def check(content: Any, schema: Any, name: str) -> None:
    """Raise Damaged, in one line, where plain data is not as the schema says."""
    try:
        _adapter(schema).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise Damaged(_line(f"{name} is damaged: {at}: {first['msg']}")) from None
    except RecursionError:
        raise Damaged(f"{name} is damaged: nested too deep") from None


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _line(text: str) -> str:
    return " ".join(text.encode(errors="backslashreplace").decode().split())[:300]


def check_costs(raw: dict[str, Any], name: str) -> None:
    """Check that the parts of costs.json belong together. Raises Damaged where they do not."""
    ranks, replicas, stages, layers = raw["ranks"], raw["replicas"], len(raw["split"]), len(raw["layers"])
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "duration": (raw["duration"], (replicas, KINDS, stages)),
        "spread": (raw["spread"], (len(raw["spread"]), KINDS, SPREAD_SHARES)),
        "delay": (raw["delay"], (2, stages)),
        "loaded": (raw["loaded"], (ranks * replicas, 2)),
        "reduce": (raw["reduce"], (stages,)),
        "gather": (raw["gather"], (stages,)),
        "norm": (raw["norm"], (replicas,)),
        "step": (raw["step"], (ranks * replicas,)),
    }
    shapes |= {f"short.{at}": (short["duration"], (KINDS, stages)) for at, short in enumerate(raw["short"])}
    for key, (value, shape) in shapes.items():
        if not _has_shape(value, shape):
            raise Damaged(f"{name} is damaged: {key} is not {' x '.join(map(str, shape))}")
    split = raw["split"]
    if split[0] != 0 or any(a >= b for a, b in zip(split, [*split[1:], layers], strict=True)):
        raise Damaged(f"{name} is damaged: split does not cut {layers} layers into stages")
    share = replicas * raw["passes"]
    if abs(raw["rows"] * raw["microbatches"] * share - raw["samples"]) > 1e-6 * raw["samples"]:
        raise Damaged(f"{name} is damaged: its samples and micro-batches do not belong together")
    if raw["microbatches"] * share > raw["samples"]:
        raise Damaged(f"{name} is damaged: it has more micro-batches than samples")
    kind = SCHEDULES.get(raw["schedule"])
    if kind is None or kind.stream is not None:
        raise Damaged(_line(f"{name} is damaged: no synchronous schedule is called {raw['schedule']!r:.40}"))
    numbers = [value for value in raw["options"].values() if isinstance(value, int)]
    if ranks * raw["microbatches"] > MOST_PAIRS or max(numbers, default=0) > stages:  # never built: it would take long
        raise Damaged(f"{name} is damaged: it tells of a larger program than any run has")
    try:
        found = build(raw["schedule"], ranks, raw["microbatches"], dict(raw["options"]))
    except (ValueError, TypeError) as error:
        raise Damaged(_line(f"{name} is damaged: {error}")) from None
    if found.stages != stages:
        raise Damaged(f"{name} is damaged: its schedule has {found.stages} stages, and its split {stages}")


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    if not shape:
        return not isinstance(value, list)
    return isinstance(value, list) and len(value) == shape[0] and all(_has_shape(item, shape[1:]) for item in value)
