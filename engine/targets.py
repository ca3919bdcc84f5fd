"""`_target_`: a dotted path to anything importable, called with the other keys of its section as keywords.

    model: {_target_: models.mlp.mlp, hidden: 64}     ->  models.mlp.mlp(hidden=64)

Hydra's own `instantiate` is not used: it hides why an import failed, takes any keyword, and knows Hydra's types. Here
keywords are checked against the signature first, and the cause comes first in every message. Nested sections that
have a `_target_` are built before the section that holds them; `_args_` gives positional arguments, and
`_partial_: true` gives the callable with its keywords bound instead of calling it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.annotations import misfit, plain
from engine.errors import a_type, cause, refusing, said

OURS = Path(__file__).resolve().parent.parent / "models"
_PATH = threading.Lock()
_MARKS = ("_target_", "_partial_", "_args_")


def named(value: Any, at: str = "") -> dict[str, Any]:
    """Return every `_target_` in plain data, by its dotted path."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = ((f"{at}.{key}" if at else str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        items = ((f"{at}[{index}]", item) for index, item in enumerate(value))
    found: dict[str, Any] = {}
    for path, item in items:
        found |= {path: item} if path.rpartition(".")[2] == "_target_" else named(item, path)
    return found


def prepare_import_path(start_dir: str) -> None:
    """Put the folder that the program was started from on the import path, for `_target_`s. Idempotent.

    `models` stays the package beside `engine`, whatever the folder holds; the modules of a `models` folder there are
    added to it, behind ours. From any thread: ranks may be threads, and what is changed here belongs to the process.
    """
    start = Path(start_dir).resolve()
    with _PATH:
        if not any(Path(entry or ".").resolve() == start for entry in sys.path):
            sys.path.insert(0, str(start))
        importlib.invalidate_caches()  # a KeyError where two threads do it at once
        package = _our_models()
        theirs = start / "models"
        if theirs.is_dir() and theirs != OURS and str(theirs) not in package.__path__:
            package.__path__.append(str(theirs))


def _our_models() -> ModuleType:
    """Import the package `models` beside `engine` under that name."""
    present = sys.modules.get("models")
    if present is not None and Path(present.__file__ or ".").resolve().parent == OURS:
        return present
    spec = importlib.util.spec_from_file_location(
        "models", OURS / "__init__.py", submodule_search_locations=[str(OURS)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["models"] = package
    spec.loader.exec_module(package)
    return package


# ---- finding -----------------------------------------------------------------------------------------------------


def locate(path: str, where: str = "") -> Any:
    """Import and return the object at a dotted path. `where`: the section that names it, for messages.

    Raises ValueError that begins with the cause: no such module, what a module raised while it was imported, or no
    such name in it.
    """
    label = f"{where}._target_={path}" if where else path
    names = path.split(".") if isinstance(path, str) else []
    if len(names) < 2 or not all(name.isidentifier() for name in names):
        raise ValueError(f"{label} does not name anything to import, like package.module.name")
    found: Any = _import(names[0], label)
    for at, name in enumerate(names[1:], start=1):
        if not hasattr(found, name):
            if not (inspect.ismodule(found) and hasattr(found, "__path__")):
                raise ValueError(_no_name(found, names[:at], name, label))
            found = _import(".".join(names[: at + 1]), label)
        else:
            found = getattr(found, name)
    return found


def _import(module: str, label: str) -> ModuleType:
    with refusing(lambda error: _raised(error, module, label)):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            missing = error
    raise ValueError(_no_module(module, label)) from missing


def _raised(error: BaseException, module: str, label: str) -> str:
    return f"{said(error)} (while importing {module} for {label})"


def _no_module(module: str, label: str) -> str:
    package, _, name = module.rpartition(".")
    parent = sys.modules[package] if package else None
    names = {entry.name for entry in pkgutil.iter_modules(parent.__path__ if parent else None)}
    if parent:
        names.update(attribute for attribute in dir(parent) if not attribute.startswith("_"))
    looked = f"in {package}" if package else "in the folder the program was started from, nor installed"
    return f"{label}: there is no {name} {looked}{_near(name, names)}{_remark(module)}"


def _no_name(found: Any, before: list[str], name: str, label: str) -> str:
    names = [attribute for attribute in dir(found) if not attribute.startswith("_")]
    return f"{label}: there is no {name} in {'.'.join(before)}{_near(name, names)}{_remark(before[0])}"


def _near(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, sorted(names), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _remark(module: str) -> str:
    if module.partition(".")[0] == "transformers":
        return " (it is an extra: pip install -e '.[transformers]')"
    if module.partition(".")[0] != "models":
        return ""
    return " (`models` is the package beside `engine`, and the modules of your own `models` folder; a models.py is not)"


# ---- checking ----------------------------------------------------------------------------------------------------


def check_keywords(
    target: Callable[..., Any], keywords: Iterable[str], where: str, positional: int = 0, complete: bool = True
) -> None:
    """Raise ValueError for a keyword that `target` does not take, or for a required one that is missing.

    `positional` arguments are given besides. Where not `complete`, required ones may still be missing. What has no
    signature (some builtins) is not checked.
    """
    parameters = _parameters(target)
    if parameters is None:
        return
    _check_known(target, parameters[positional:], keywords, where)
    given, needed = set(keywords), required(target, positional)
    missing = [name for name in needed if name not in given]
    if missing and complete:
        raise ValueError(f"{where}.{missing[0]} is missing: {name_of(target)} needs {', '.join(needed)}")


def required(target: Callable[..., Any], positional: int = 0) -> list[str]:
    """Return the names of required parameters behind `positional` arguments; none where there is no signature."""
    return [p.name for p in (_parameters(target) or [])[positional:] if _is_required(p)]


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def _is_required(parameter: inspect.Parameter) -> bool:
    starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not starred and parameter.default is parameter.empty


def _check_known(
    target: Callable[..., Any], parameters: list[inspect.Parameter], keywords: Iterable[str], where: str
) -> None:
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for keyword in keywords:
        if keyword not in names:
            takes = f"It takes {', '.join(names)}" if names else "It takes no keywords"
            raise ValueError(
                f"{where}.{keyword}: {name_of(target)} takes no such keyword{_near(keyword, names) or '.'} {takes}"
            )


def name_of(target: Callable[..., Any]) -> str:
    """Return the dotted path of a callable, for messages."""
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", repr(target))
    return f"{module}.{name}" if module else name


# ---- building ----------------------------------------------------------------------------------------------------


def build(config: Mapping[str, Any], *args: Any, where: str, **extra: Any) -> Any:
    """Build what the section `where` describes: call its `_target_` with its keywords.

    `args` come before its own `_args_`; `extra` replaces its own keywords.

    Raises ValueError for a path, a keyword or a value that does not fit; the cause is first in its message.
    """
    if not config.get("_target_"):
        raise ValueError(f"{where} has no _target_: give the dotted path of what is to be called")
    path = config["_target_"]
    target = locate(path, where)
    if not callable(target):
        raise ValueError(f"{where}._target_={path} is {a_type(target)}, which cannot be called")
    keywords = {str(key): value for key, value in config.items() if key not in _MARKS} | extra
    own = config.get("_args_") or []
    bound = bool(config.get("_partial_"))
    check_keywords(target, keywords, where, len(args) + len(own), complete=not bound)
    keywords = {key: _nested(value, f"{where}.{key}") for key, value in keywords.items()}
    values = [*args, *(_nested(value, f"{where}._args_[{i}]") for i, value in enumerate(own))]
    if bound:
        return partial(target, *values, **keywords)
    given = ", ".join(f"{key}={value!r}" for key, value in keywords.items() if key in config)
    with blaming(config, where), refusing(lambda error: f"{cause(error)} (while calling {path}({given}) for {where})"):
        return target(*values, **keywords)


@contextmanager
def blaming(config: Mapping[str, Any], where: str) -> Iterator[None]:
    """Let a ValueError in the context begin with the value of the section `where` that is of a wrong type, if any.

    That is the first which is not of the type that the signature of its `_target_` says. A model's layers and an
    optimizer's steps come later than the call that was given it.
    """
    try:
        yield
    except ValueError as error:
        target = locate(config["_target_"], where) if config.get("_target_") else None
        found = misfit(target, config) if callable(target) else None
        if not callable(target) or found is None or f"{where}.{found[0]}" in str(error):
            raise
        key, wanted = found
        value = plain(config[key])
        raise ValueError(f"{where}.{key}={value} must be {wanted} for {name_of(target)}: {error}") from error


def build_function(config: Mapping[str, Any], arguments: int, where: str) -> Any:
    """Build a function of so many `arguments` from its section.

    A `_target_` that is a function still in need of so many is that function, with the section's keywords bound;
    anything else is called to get it.
    """
    if config.get("_target_"):
        target = locate(config["_target_"], where)
        still = [name for name in required(target) if name not in config]
        if inspect.isroutine(target) and len(still) >= arguments:
            return build({**config, "_partial_": True}, where=where)
    return build(config, where=where)


def check_arguments(function: Any, names: Sequence[str], where: str) -> None:
    """Raise ValueError unless `function` takes the positional arguments `names`."""
    wanted = f"a function of ({', '.join(names)})"
    if not callable(function):
        raise ValueError(f"{where} gives {a_type(function)}, which cannot be called; give {wanted}")
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise ValueError(f"{where}: {name_of(function)} is not {wanted}: {error}") from error
    except ValueError:
        return  # it has no signature


def _nested(value: Any, where: str) -> Any:
    """Return `value` with every section inside it that has a `_target_` built."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return build(value, where=where)
        return {key: _nested(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_nested(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    return value
