"""`_target_`: what can be named is found, what cannot is refused with the cause first; keywords fit or are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from engine import targets
from engine.targets import build, check_keywords, locate, prepare_import_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Path]:
    """A folder that a program was started from; what is imported from it is forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    prepare_import_path(str(tmp_path))
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def message(call: Any, *args: Any, **keywords: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args, **keywords)
    return str(caught.value)


# ---- locate ------------------------------------------------------------------------------------------------------


def test_locate_finds_modules_functions_classes_and_what_is_in_them() -> None:
    assert locate("torch.nn.Linear") is torch.nn.Linear
    assert locate("models.resnet.resnet50").__name__ == "resnet50"
    assert locate("torch.nn.Linear.forward") is torch.nn.Linear.forward
    assert locate("engine.targets") is targets


def test_locate_says_what_is_missing_and_what_is_near() -> None:
    assert message(locate, "torhc.nn.Linear", "model").startswith(
        "model._target_=torhc.nn.Linear: there is no torhc in the folder the program was started from, nor installed; "
        "did you mean torch"
    )
    assert "no resnt in models; did you mean resnet?" in message(locate, "models.resnt.resnet50", "model")
    assert "no resnet5 in models.resnet; did you mean resnet50" in message(locate, "models.resnet.resnet5")
    assert "there is no Lineal in torch.nn; did you mean Linear" in message(locate, "torch.nn.Lineal")
    assert "there is no x in torch.nn.Linear" in message(locate, "torch.nn.Linear.x")


@pytest.mark.parametrize("path", ["", "torch", "torch..nn", "a b.c", ".models.mlp", None, 3])
def test_locate_refuses_what_is_no_dotted_path(path: Any) -> None:
    assert "does not name anything to import, like package.module.name" in message(locate, path, "model")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("from torch import nothing_like_it", "ImportError: cannot import name 'nothing_like_it'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_what_a_module_raises_comes_first(start: Path, text: str, cause: str) -> None:
    write(start, "broken_module.py", text)
    got = message(locate, "broken_module.Net", "model")
    assert got.startswith(cause)
    assert got.endswith("(while importing broken_module for model._target_=broken_module.Net)")


def test_a_failing_submodule_is_not_taken_for_a_missing_one(start: Path) -> None:
    write(start, "package_of_mine/__init__.py", "")
    write(start, "package_of_mine/inner.py", "import absent_dependency")
    assert message(locate, "package_of_mine.inner.Net").startswith("ModuleNotFoundError: No module named 'absent_dep")
    assert "there is no iner in package_of_mine; did you mean inner?" in message(locate, "package_of_mine.iner.Net")


# ---- keywords ----------------------------------------------------------------------------------------------------


def function(a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int]:
    return a, b, c


def test_keywords_that_fit() -> None:
    check_keywords(function, ["a", "b", "c"], "model")
    check_keywords(function, ["c"], "model", positional=1)
    check_keywords(function, [], "model", complete=False)
    check_keywords(lambda **anything: anything, ["x"], "model")
    check_keywords(torch.optim.SGD, ["lr", "momentum"], "optimizer", positional=1)
    check_keywords(torch.tensor, ["whatever"], "model")  # a builtin: it has no signature


def test_keywords_that_do_not_fit() -> None:
    got = message(check_keywords, torch.optim.SGD, ["lr", "momentun"], "optimizer", positional=1)
    assert got.startswith("optimizer.momentun: torch.optim.sgd.SGD takes no such keyword; did you mean momentum?")
    assert "lr, momentum, dampening" in got
    assert "params" not in got
    assert "takes no such keyword. It takes a, b, c" in message(check_keywords, function, ["a", "zzz"], "m")
    assert "m.a is missing" in message(check_keywords, function, ["b"], "m")
    assert "takes no such keyword" in message(check_keywords, function, ["a"], "m", positional=1)
    assert "It takes no keywords" in message(check_keywords, lambda: None, ["a"], "m")
    assert "takes no such keyword" in message(check_keywords, function, ["zzz"], "m", complete=False)


# ---- build -------------------------------------------------------------------------------------------------------

HERE = __name__


def keep(*args: Any, **keywords: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args, keywords=keywords)


def fails(value: int = 0) -> None:
    raise ValueError(f"value={value} is too small") if value else TypeError("no value")


def test_build_calls_with_keywords_and_arguments() -> None:
    assert build({"_target_": f"{HERE}.function", "a": 1, "c": 5}, where="x") == (1, 2, 5)
    assert build({"_target_": f"{HERE}.function", "b": 7}, 1, where="x") == (1, 7, 3)
    assert build({"_target_": f"{HERE}.function", "_args_": [4]}, 1, where="x") == (1, 4, 3)
    assert build({"_target_": f"{HERE}.function", "b": 7}, where="x", a=0) == (0, 7, 3)


def test_build_builds_inner_sections_first() -> None:
    inner = {"_target_": f"{HERE}.function", "a": 1}
    made = build(
        {"_target_": f"{HERE}.keep", "_args_": [inner], "deep": [{"x": inner}, 5], "plain": {"y": 1}}, where="x"
    )
    assert made.args == ((1, 2, 3),)
    assert made.keywords == {"deep": [{"x": (1, 2, 3)}, 5], "plain": {"y": 1}}


def test_build_binds_a_partial() -> None:
    made = build({"_target_": f"{HERE}.function", "_partial_": True, "b": 9}, where="x")
    assert isinstance(made, partial)
    assert made(1) == (1, 9, 3)
    assert "takes no such keyword" in message(
        build, {"_target_": f"{HERE}.function", "_partial_": True, "d": 9}, where="x"
    )


def test_build_says_what_was_wrong_first() -> None:
    assert message(build, {"_target_": f"{HERE}.fails", "value": 3}, where="data") == (
        f"value=3 is too small (while calling {HERE}.fails(value=3) for data)"
    )
    assert message(build, {"_target_": f"{HERE}.fails"}, where="data").startswith("TypeError: no value (while calling")
    assert message(build, {"lr": 1}, where="optimizer").startswith("optimizer has no _target_")
    assert "model._target_=torch.pi is a float, which cannot be called" in message(
        build, {"_target_": "torch.pi"}, where="model"
    )
    nested = {"_target_": f"{HERE}.keep", "inner": [{"_target_": f"{HERE}.function", "e": 1}]}
    assert message(build, nested, where="model").startswith(f"model.inner[0].e: {HERE}.function takes no such keyword")


def test_an_optimizer_inside_a_model_is_refused_before_it_is_built() -> None:
    config = {"_target_": "models.mlp.mlp", "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}}
    assert message(build, config, where="model").startswith("model.optimizer: models.mlp.mlp takes no such keyword")


def test_build_makes_torchs_own() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = build({"_target_": "torch.optim.SGD", "lr": 0.5}, [weight], where="optimizer")
    scheduler = build({"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 3}, optimizer, where="lr_scheduler")
    assert optimizer.param_groups[0]["params"][0] is weight
    assert scheduler.optimizer is optimizer


# ---- the folder a program is started from ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_users_models_folder_joins_ours_and_shadows_nothing(tmp_path: Path) -> None:
    """In a fresh interpreter whose first import path is the user's folder, as with `python -m engine` there."""
    write(tmp_path, "models/__init__.py", "raise RuntimeError('the package of the user is not run')")
    write(tmp_path, "models/mine.py", "def net(): return 'my net'")
    write(tmp_path, "models/resnet.py", "def resnet50(): return 'not ours'")
    write(tmp_path, "elsewhere.py", "def net(): return 'elsewhere'")
    script = (
        "import sys\n"
        f"sys.path[:] = [''] + [p for p in sys.path if p] + [{str(ROOT)!r}]\n"
        "from engine.targets import locate, prepare_import_path\n"
        "for _ in range(2): prepare_import_path('.')\n"
        "print(locate('models.mine.net')(), locate('elsewhere.net')(), len(locate('models.resnet.resnet50')()))\n"
        "import models\n"
        "print(len(models.__path__), models.resnet.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "my net elsewhere 23"
    assert second == f"2 {ROOT / 'models' / 'resnet.py'}"


def test_preparing_puts_the_folder_on_the_path_once(start: Path) -> None:
    write(start, "module_of_mine.py", "value = 5")
    assert locate("module_of_mine.value") == 5
    before = list(sys.path)
    prepare_import_path(str(start))
    assert sys.path == before


def test_a_models_file_of_the_user_is_explained() -> None:
    assert "a models.py is not" in message(locate, "models.MyNet", "model")


def test_importing_targets_does_not_import_torch() -> None:
    script = "import sys, engine.targets; print('torch' in sys.modules or 'hydra' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


# ---- the configuration's own targets -----------------------------------------------------------------------------

OF_THE_ENGINE = {"_target_", "loss", "split", "workers", "pin_memory", "shuffle", "drop_last", "evaluation"}
POSITIONAL = {"model": 0, "data": 0, "optimizer": 1, "lr_scheduler": 1}


@pytest.mark.parametrize(
    "path",
    sorted(p for g in POSITIONAL for p in (ROOT / "conf" / g).glob("*.yaml")),
    ids=lambda p: f"{p.parent.name}-{p.stem}",
)
def test_every_group_names_a_target_that_takes_its_keys(path: Path) -> None:
    needed = "transformers" if "transformers" in path.read_text() else "torch"
    if find_spec(needed) is None:
        pytest.skip("needs the extra transformers")
    section, group = yaml.safe_load(path.read_text()), path.parent.name
    sections = [section, {**section, **section.get("evaluation", {})}]
    if group == "model":
        sections.append(section["loss"])
    for each in sections:
        if each["_target_"] is not None:
            keys = [key for key in each if key not in OF_THE_ENGINE or (group == "data" and key == "split")]
            check_keywords(locate(each["_target_"]), keys, group, POSITIONAL[group])
