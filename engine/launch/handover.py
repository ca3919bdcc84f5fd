"""The job as bytes and back: JSON and int64 arrays (`records.py`), read strictly into the frozen dataclasses.

Every rank gets its job in this form, whoever started it. Nothing in it is unpickled: reading makes numbers, words,
lists and the dataclasses of `job.py`, and refuses whatever else is there.

    dataclass        {"field": ..., ...}, every field and no other
    tuple, list      [...]
    dict             [[key, value], ...], since JSON has no keys but words
    array            its number among the record's arrays
    value of a user's section ("Any")    as it is, but {"dict": [[key, value], ...]}, {"tuple": [...]}
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from engine.job import Job
from engine.settings import Settings
from engine.telemetry.records import decode, encode

_KIND = "job"
_PLAIN = (bool, int, float, str, type(None))
_Arrays = dict[str, np.ndarray[Any, np.dtype[np.int64]]]


def written(job: Job) -> bytes:
    """Serialize the job; ValueError where a user's section holds what is no plain data."""
    arrays: _Arrays = {}
    return encode(_KIND, _write(Job, job, "job", arrays), arrays)


def check(settings: Settings) -> None:
    """Raise ValueError where a user's section holds what is no plain data: what `written` would raise of the job."""
    _write(Settings, settings, "job.settings", {})


def read(content: bytes) -> Job:
    """Read a job from bytes; ValueError, in one line, where they hold none."""
    record = decode(content)
    if record.kind != _KIND:
        raise ValueError(f"not a job, but a record of kind {record.kind!r:.80}")
    try:
        job: Job = _read(Job, record.meta, "job", record.arrays)
    except RecursionError:
        raise ValueError("not a job: nested too deep") from None
    return job


# ---- writing -----------------------------------------------------------------------------------------------------


def _write(kind: Any, value: Any, at: str, arrays: _Arrays) -> Any:
    origin = get_origin(kind)
    if is_dataclass(kind):
        of: Any = type(value)
        hints = _hints(of)
        return {name: _write(each, getattr(value, name), f"{at}.{name}", arrays) for name, each in hints.items()}
    if origin in (Union, types.UnionType):
        return value if type(value) in _PLAIN else _write(_composed(kind), value, at, arrays)
    if origin is np.ndarray:
        arrays[str(len(arrays))] = value
        return len(arrays) - 1
    if origin is tuple or origin is list:
        kinds = _kinds(kind, len(value))
        return [_write(each, item, at, arrays) for each, item in zip(kinds, value, strict=True)]
    if origin is dict and get_args(kind)[1] is not Any:
        keys, values = get_args(kind)
        return [[_write(keys, k, at, arrays), _write(values, v, f"{at}[{k}]", arrays)] for k, v in value.items()]
    return value if kind in _PLAIN else _write_any(value, at)


def _write_any(value: Any, at: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {"dict": [[_write_any(k, at), _write_any(v, f"{at}.{k}")] for k, v in value.items()]}
    if isinstance(value, list):
        return [_write_any(item, f"{at}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_write_any(item, at) for item in value]}
    raise ValueError(
        f"{at.removeprefix('job.settings.')} is a {type(value).__name__}: a worker can be given numbers, words, "
        "lists and sections; let a _target_ make the rest"
    )


# ---- reading -----------------------------------------------------------------------------------------------------


def _read(kind: Any, value: Any, at: str, arrays: _Arrays) -> Any:
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, at, arrays)
    if origin in (Union, types.UnionType):
        return _read_union(kind, value, at, arrays)
    if origin is np.ndarray:
        if type(value) is not int or str(value) not in arrays:
            raise _wrong(at, value, "the number of an array")
        return arrays[str(value)]
    if origin is tuple or origin is list:
        items = _list(value, at)
        kinds = _kinds(kind, len(items))
        if len(kinds) != len(items):
            raise _wrong(at, value, f"a list of {len(kinds)}")
        found = [
            _read(each, item, f"{at}[{i}]", arrays) for i, (each, item) in enumerate(zip(kinds, items, strict=True))
        ]
        return tuple(found) if origin is tuple else found
    if kind is Any or (origin is dict and get_args(kind)[1] is Any):
        found = _read_any(value, at)
        if origin is dict and not isinstance(found, dict):
            raise _wrong(at, value, "a section")
        return found
    if origin is dict:
        keys, values = get_args(kind)
        pairs = [_pair(item, at) for item in _list(value, at)]
        return {_read(keys, k, at, arrays): _read(values, v, f"{at}[{k}]", arrays) for k, v in pairs}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _wrong(at, value, kind.__name__)
    return value


def _read_dataclass(kind: Any, value: Any, at: str, arrays: _Arrays) -> Any:
    if not isinstance(value, dict):
        raise _wrong(at, value, f"a {kind.__name__}")
    hints = _hints(kind)
    for name in value.keys() - hints.keys():
        raise ValueError(f"not a job: {at}.{name!s:.80} is unknown")
    for name in hints.keys() - value.keys():
        raise ValueError(f"not a job: {at}.{name} is missing")
    return kind(**{name: _read(each, value[name], f"{at}.{name}", arrays) for name, each in hints.items()})


def _read_union(kind: Any, value: Any, at: str, arrays: _Arrays) -> Any:
    kinds = get_args(kind)
    if type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    if type(value) in _PLAIN and _composed(kind) is None:
        raise _wrong(at, value, " or ".join("null" if each is type(None) else each.__name__ for each in kinds))
    return _read(_composed(kind), value, at, arrays)


def _read_any(value: Any, at: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [_read_any(item, f"{at}[{index}]") for index, item in enumerate(value)]
    match value:
        case {"dict": list(items), **rest} if not rest:
            pairs = [_pair(item, at) for item in items]
            found = {}
            for key, item in pairs:
                name = _read_any(key, at)
                if isinstance(name, list | dict):
                    raise _wrong(at, key, "a key")
                found[name] = _read_any(item, f"{at}.{name}")
            return found
        case {"tuple": list(items), **rest} if not rest:
            return tuple(_read_any(item, at) for item in items)
    raise _wrong(at, value, "plain data")


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(at, value, "a list")
    return value


def _pair(item: Any, at: str) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise _wrong(at, item, "a key and its value")
    return item[0], item[1]


def _wrong(at: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"not a job: {at:.200} is {value!r:.80}, which is not {wanted}")


# ---- what the dataclasses say --------------------------------------------------------------------------------------


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _kinds(kind: Any, count: int) -> list[Any]:
    """Of each item of a tuple or list."""
    kinds = list(get_args(kind))
    return kinds if get_origin(kind) is tuple and Ellipsis not in kinds else kinds[:1] * count


def _composed(kind: Any) -> Any:
    """The one member of a union that is no plain type; None where all are."""
    found = [each for each in get_args(kind) if each not in _PLAIN]
    assert len(found) < 2, kind
    return found[0] if found else None
