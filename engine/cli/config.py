"""Configuration -> Settings: resolve, read strictly, check what belongs together.

Hydra composes; what it composed is turned into plain data here, once, in the parent, so that no interpolation is left
to resolve in a worker. Reading is strict: a key that is no field of the `Settings` dataclasses is refused (a `+key`
gets past Hydra), and so is a value of another type. Nothing here imports torch: a mistake costs no start-up time.
"""

from __future__ import annotations

import math
import secrets
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.cli.limits import check_limits
from engine.objectives import EVALUATED, OBJECTIVES
from engine.plan.choose import ALL
from engine.plan.schedules import SCHEDULES, offered_schedules
from engine.plan.schedules import build as build_schedule
from engine.settings import GROUP_KEYS, KEYS, Key, Settings
from engine.weights.names import parse_prefixes

T = TypeVar("T")

CONF = Path(__file__).resolve().parents[2] / "conf"  # beside the package: a `conf/` of the user does not shadow it
DEFAULT_STEPS = 20


def load(config: DictConfig, overrides: Sequence[str] = ()) -> Settings:
    """Resolve and check a composed configuration (without Hydra's own node); ValueError for every mistake in it.

    `overrides`: the words of the command line, for what depends on what the user chose and what is a default.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key or 'the configuration'} cannot be resolved: {first_line(error)}") from error
    assert isinstance(plain, dict)
    return from_plain(_without_foreign_split({str(key): value for key, value in plain.items()}, overrides))


def _without_foreign_split(plain: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A model that is named on the command line takes no split from the model whose place it takes."""
    named = {override.lstrip("+~").partition("=")[0] for override in overrides}
    model = plain.get("model")
    if "model._target_" in named and "model.split" not in named and isinstance(model, dict):
        return {**plain, "model": {**model, "split": None}}
    return plain


def from_plain(plain: Mapping[str, Any]) -> Settings:
    """Return checked Settings from plain nested data. Draws a null seed; sets `train.steps` where nothing is given."""
    values = dict(plain)
    if values.get("seed", 0) is None:
        values["seed"] = secrets.randbelow(2**31)
    if isinstance(values.get("train"), Mapping):
        values["train"] = _norm_type(_duration(values["train"]))
    settings = read(Settings, values)
    check(settings)
    return settings


def _norm_type(train: Mapping[str, Any]) -> dict[str, Any]:
    """Replace an infinite norm type by null, since JSON has no infinity."""
    infinite = train.get("clip_norm_type") in (math.inf, "inf")
    return {**train, **({"clip_norm_type": None} if infinite else {})}


def _duration(train: Mapping[str, Any]) -> dict[str, Any]:
    steps, epochs = train.get("steps"), train.get("epochs")
    if steps is not None and epochs is not None:
        raise ValueError(f"train.steps={steps} and train.epochs={epochs}: give one of them, the other null")
    return {**train, "steps": DEFAULT_STEPS if steps is None and epochs is None else steps, "epochs": epochs}


# ---- reading -----------------------------------------------------------------------------------------------------


def read(schema: type[T], values: Mapping[str, Any], at: str = "") -> T:
    """Build a dataclass from plain data; `at` is the path of the section, for messages. Raises ValueError."""
    hints = get_type_hints(schema)
    names = [field.name for field in fields(schema)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ValueError(unknown("key", _join(at, str(key)), [_join(at, name) for name in names]))
    return schema(**{key: _value(hints[key], value, _join(at, key)) for key, value in values.items()})


def _value(kind: Any, value: Any, path: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            keys = ", ".join(f.name for f in fields(kind))
            raise ValueError(f"{path}={_shown(value)} is a section, with the keys {keys}")
        return read(kind, value, path)  # type: ignore[arg-type]
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [k for k in get_args(kind) if k is not type(None)]
        return None if value is None else _value(kinds[0], value, path)
    if get_origin(kind) is dict:
        return _section(value, path)
    if get_origin(kind) is list:
        return _words(value, path) if get_args(kind)[0] is str else _rows(value, path)
    return _scalar(kind, value, path)


def _section(value: Any, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}={value!r} is not a section; choose one with {path}=<name of a file in conf/{path}>")
    return dict(value)


def _words(value: Any, path: str) -> list[str]:
    """Return a list of words; one word alone, or null, is a list too."""
    words = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{path}={_shown(value)} is not a list of words, like [one,two]")
    return list(words)


def _rows(value: Any, path: str) -> list[list[float]]:
    """Return a list of lists of numbers; null is an empty one."""
    rows = [] if value is None else value
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{path}={_shown(value)} is not a list of lists of numbers, like [[0,1,10]]")
    return [[_scalar(float, number, path) for number in row] for row in rows]


def _scalar(kind: type, value: Any, path: str) -> Any:
    words = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        one_of(path, value, KEYS[path].choices or (value,) if path in KEYS else (value,))
        raise ValueError(f"{path}={_shown(value)} is not {words[kind]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}={value} is not a finite number")
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


# ---- checks ------------------------------------------------------------------------------------------------------


def check(settings: Settings) -> None:
    """Check ranges, choices and combinations, all that needs neither torch nor the model. Raises ValueError."""
    for path, key in KEYS.items():
        above, _, name = path.rpartition(".")
        if path not in GROUP_KEYS or key.choices or name in get(settings, above):
            _check_key(path, key, get(settings, path))
    for name in set(settings.partition) - {"name", "split"}:
        raise ValueError(unknown("key", f"partition.{name}", ("partition.name", "partition.split")))
    check_limits(settings)
    if settings.plan.compare:
        _check_comparison(settings)
    else:
        _check_schedule(settings)
        _check_asynchronous(settings)
    for group in ("partition", "model"):
        _check_split(f"{group}.split", get(settings, group).get("split"))
    _check_loader(settings.data)
    _check_objective(settings)
    _check_delay(settings)
    _check_init(settings)
    _check_checkpoints(settings)
    if settings.starts_ranks:
        _check_batch(settings)
        _check_targets(settings)


def _check_key(path: str, key: Key, value: Any) -> None:
    """Raise ValueError for a value that the key's own row in engine/settings.py does not allow."""
    if key.choices and (value is not None or path in GROUP_KEYS):  # of a field, its annotation says whether null is one
        one_of(path, value, key.choices)
    if key.kind is not None:
        _scalar(key.kind, value, path)
    if value is None:
        return
    if key.at_least is not None and value < key.at_least:
        raise ValueError(f"{path}={value} must be at least {key.at_least}")
    if key.above is not None and value <= key.above:
        raise ValueError(f"{path}={value} must be above {key.above}")
    if key.at_most is not None and value > key.at_most:
        raise ValueError(f"{path}={value} must be at most {key.at_most:.0f}")


def _check_schedule(settings: Settings) -> None:
    one_of("schedule.name", settings.schedule.get("name"), offered_schedules())
    name, pipeline = settings.schedule["name"], settings.pipeline
    build_schedule(name, pipeline.ranks, pipeline.microbatches, settings.schedule_options)


def _check_comparison(settings: Settings) -> None:
    """Check the names of schedules to compare; one that is not defined for the sizes becomes a row that says so."""
    for name in settings.plan.compare:
        one_of("plan.compare", name, (*offered_schedules(), ALL))
    if settings.mode != "plan":
        raise ValueError(f"plan.compare={settings.plan.compare} compares plans and trains nothing: add mode=plan")


def _check_asynchronous(settings: Settings) -> None:
    """Refuse what needs all stages at one moment, where an asynchronous schedule updates each in its own time."""
    name, train = settings.schedule["name"], settings.train
    if SCHEDULES[name].stream is None:
        return
    if train.clip_norm is not None:
        raise ValueError(
            f"train.clip_norm={train.clip_norm} is not possible with schedule {name}: its stages update at different "
            "times, so there is no norm of the whole gradient; set it to null, or use a synchronous schedule"
        )
    if train.accumulate != 1:
        raise ValueError(
            f"train.accumulate={train.accumulate} is not possible with schedule {name}, which never drains between "
            "passes; set it to 1 (schedule=pipedream_2bw adds up pipeline.microbatches before each update)"
        )


def _check_init(settings: Settings) -> None:
    parse_prefixes(settings.init.prefix)
    if settings.mode == "evaluate" and settings.init.weights is None:
        raise ValueError("mode=evaluate evaluates stored weights: give init.weights=FILE, or the folder of a run")


def _check_checkpoints(settings: Settings) -> None:
    """Refuse checkpoints where there is no moment at which all ranks have the same state."""
    wanted, name = settings.checkpoint, settings.schedule["name"]
    if settings.data_parallel.asynchronous and (wanted.wanted or settings.resume is not None):
        raise ValueError(
            "checkpoints of data_parallel.mode=async are not possible: what its servers and pushes hold is not stored; "
            "leave checkpoint and resume out (save=final keeps the weights), or use data_parallel.mode=sync"
        )
    if wanted.every_minutes is not None and SCHEDULES[name].stream is not None:
        raise ValueError(
            f"checkpoint.every_minutes={wanted.every_minutes:g} is not possible with schedule {name}, which drains for "
            "a checkpoint, at steps that must be known before: use checkpoint.every_steps or every_epochs"
        )
    if settings.resume is not None and settings.mode != "train":
        raise ValueError(f"resume={settings.resume} goes on training: leave it out with mode={settings.mode}")
    if settings.resume is not None and settings.init.weights is not None:
        raise ValueError("resume takes its weights from the checkpoint: leave init.weights out, or resume")


def _check_split(path: str, split: Any) -> None:
    """Check that a split is a list of names; one word would be taken apart into its letters."""
    if split is not None and not (isinstance(split, list) and all(isinstance(name, str) for name in split)):
        raise ValueError(f"{path}={_shown(split)} is not a list of names of layers, like [layer2,layer3]")


def _check_loader(data: Mapping[str, Any]) -> None:
    """Check the loader's keys in `data` that are more than one value of one type."""
    pin = data.get("pin_memory")
    if pin not in (None, "auto") and not isinstance(pin, bool):
        raise ValueError(f"data.pin_memory={pin} is none of auto, true, false")
    if data.get("evaluation") is not None and not isinstance(data["evaluation"], Mapping):
        raise ValueError(
            f"data.evaluation={data['evaluation']} is not a section: give the keys of data that the held-out samples "
            "change, like {split: test}, or null for no evaluation"
        )


def _check_objective(settings: Settings) -> None:
    """Refuse a figure that this job cannot have."""
    name, plan = settings.objective, settings.mode == "plan"
    if name is None:
        return
    if plan and OBJECTIVES[name].planned is None:
        planned = ", ".join(each for each, objective in OBJECTIVES.items() if objective.planned)
        raise ValueError(f"objective={name} is not known of mode=plan, which trains nothing; possible: {planned}")
    if not plan and name in EVALUATED and settings.eval.every == 0:
        raise ValueError(f"objective={name} needs an evaluation: set eval.every to null (at the end), or to some steps")
    if not plan and name == "bubble" and settings.trace.every == 0:
        raise ValueError("objective=bubble needs traced steps: set trace.every to 1 or more")


def _check_delay(settings: Settings) -> None:
    delay, world = settings.delay, settings.world
    for path, rows, ranks, sizes in (
        ("delay.ranks", delay.ranks, 1, (2, 3)),
        ("delay.links", delay.links, 2, (3,)),
    ):
        for row in rows:
            if len(row) not in sizes or any(rank not in range(world) for rank in row[:ranks]) or min(row) < 0:
                shape = "[rank,ms] or [rank,ms,micro-batch]" if ranks == 1 else "[from rank,to rank,ms]"
                raise ValueError(f"{path}: {row} is not {shape}, with ranks 0..{world - 1} and nothing negative")


def _check_batch(settings: Settings) -> None:
    batch, replicas = settings.train.global_batch_size, settings.data_parallel.replicas
    schedule = SCHEDULES[settings.schedule["name"]]
    passes, microbatches = settings.train.accumulate, schedule.per_update(settings.pipeline.microbatches)
    share = batch // (replicas * passes)
    if microbatches > share:
        parts = f"train.global_batch_size={batch} over {replicas} replica(s) and {passes} pass(es)"
        need = microbatches * replicas * passes
        raise ValueError(
            f"pipeline.microbatches={microbatches} is more than the {share} sample(s) of a replica's share ({parts}): "
            f"take at most {share} micro-batches, or a global batch of at least {need}"
            if share
            else f"{parts} leaves a replica without samples; take a global batch of at least {need}"
        )


def _check_targets(settings: Settings) -> None:
    for group in ("model", "data", "optimizer"):
        _check_target(group, get(settings, group))
    scheduler = settings.lr_scheduler or {}
    if any(value is not None for value in scheduler.values()):  # none of them: a constant rate
        _check_target("lr_scheduler", scheduler)


def _check_target(group: str, section: Mapping[str, Any]) -> None:
    target = section.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ValueError(
            f"{group}._target_={_shown(target)} does not name anything to import, like package.module.name"
        )


def get(settings: Settings, path: str) -> Any:
    """Return the value at a dotted path of fields and of keys of groups; None where a group has no such key."""
    value: Any = settings
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


# ---- messages ----------------------------------------------------------------------------------------------------


def one_of(path: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless `value` is among `choices`."""
    valid = tuple(choices)
    if value in valid:
        return
    raise ValueError(no_such_choice(path, value, valid))


def no_such_choice(path: str, value: Any, choices: Iterable[str]) -> str:
    """Return the message about a value that is none of `choices`; `path` is a key or a group."""
    known = KEYS.get(f"{path}.name") or KEYS.get(path)
    if known is not None and value in known.later:
        return f"{path}={value} is not part of the engine yet; possible: {', '.join(choices)}"
    return unknown("choice", str(value), choices, shown=f"{path}={_shown(value)}")


def unknown(what: str, given: str, valid: Iterable[str], shown: str | None = None) -> str:
    """Return a message like `foo=br: no such choice; did you mean bar? There is: bar, baz`."""
    names = sorted(valid)
    near = get_close_matches(given, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{shown or given}: no such {what}{hint} There is{': ' + ', '.join(names) if names else ' none'}"


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an exception's message, or the name of its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
