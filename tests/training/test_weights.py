"""Weights out and in: what a run leaves is the unsplit model's state, and a run begins with what it is given."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, Engine, engine  # noqa: F401
from harness import close, equal, run_threads, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine import export
from engine.errors import ExhaustedError
from engine.files import UnwritableError
from engine.prepare.prepare import prepare
from engine.settings import AllReduceSettings, DataParallelSettings, Eval, Init, Settings
from engine.training.build import model_layers
from engine.weights import source
from engine.weights.model_file import write_tensors
from engine.weights.names import MODEL, match, parse_prefixes, renamed, suggestion
from engine.weights.source import open_weights
from models import resnet

STILL = {"_target_": "torch.optim.SGD", "lr": 0.0}
NORMED = {"_target_": "toys.normed", "loss": {"_target_": "toys.TokenLoss"}}
MANY = {"_target_": "toys.mlp", "layers": 8, "loss": {"_target_": "toys.TokenLoss"}}
ASYNC = DataParallelSettings(2, mode="async")
LAYOUTS: dict[str, Settings] = {
    "one process": settings("gpipe", 1, 4, model=MANY),
    "gpipe": settings("gpipe", 2, 4, model=NORMED),
    "replicas": settings("1f1b", 2, 4, 2, model=NORMED),
    "sharded": settings("1f1b", 2, 2, 2, model=MANY, shard_optimizer=True),
    "chunks": replace(settings("gpipe", 2, 4, model=MANY), schedule={"name": "interleaved_1f1b", "chunks": 2}),
    "copies": settings("dualpipe", 4, 8, model=MANY),
    "versions": settings("pipedream", 2, 4, model=MANY, global_batch_size=4),
    "server": settings("1f1b", 2, 2, 2, model=MANY, allreduce=AllReduceSettings("parameter_server")),
    "async": replace(
        settings("1f1b", 2, 2, 2, model=MANY, allreduce=AllReduceSettings("sharded_parameter_server")),
        data_parallel=ASYNC,
    ),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the harness leave what they leave in the current folder."""
    monkeypatch.chdir(tmp_path)


def plain_module(wanted: Settings) -> nn.Module:
    return nn.Sequential(OrderedDict((name, make().double()) for name, make in model_layers(wanted.model)))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_run_leaves_is_the_state_of_the_plain_module(layout: str) -> None:
    wanted = replace(LAYOUTS[layout], save="final")
    ran = run_threads(wanted)
    left = load_file(MODEL)
    assert equal(left, {name: left[name] for name in ran.state()}) and equal(left, ran.state())
    begun = plain_module(wanted).state_dict()
    assert not any(torch.equal(left[name], begun[name]) for name in left if name.endswith("weight"))
    plain_module(wanted).load_state_dict(left, strict=True)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_begins_with_the_weights_it_is_given(layout: str) -> None:
    """A rate of 0 leaves them as they are, to the last bit, whatever the layout."""
    given = {
        name: torch.full_like(value, 0.125) if value.dtype.is_floating_point else value
        for name, value in plain_module(LAYOUTS[layout]).state_dict().items()
    }
    save_file(given, "start.safetensors")
    wanted = replace(LAYOUTS[layout], init=Init("start.safetensors"), save="final", optimizer=STILL)
    run_threads(wanted)
    left = load_file(MODEL)
    trained = {name: value for name, value in left.items() if "running" not in name and "tracked" not in name}
    assert equal(trained, {name: given[name] for name in trained})


def test_training_goes_on_from_what_another_layout_left() -> None:
    """Without momentum two runs of 2 and 1 steps are one of 3, over the same samples."""
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1}
    same = {"_target_": "toys.Same"}
    wanted = settings("gpipe", 2, 4, steps=3, optimizer=sgd, data=same)
    whole = run_threads(wanted).state()
    run_threads(replace(wanted, train=replace(wanted.train, steps=2), save="final"))
    other = settings("1f1b", 4, 4, steps=1, optimizer=sgd, data=same, init=Init("."))
    close(run_threads(other).state(), whole)


# -- what may be read ----------------------------------------------------------------------------------------------


def toy_state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: value.detach() for name, value in plain_module(settings()).state_dict().items()}


def written(form: str, folder: Path) -> Path:
    """The toy's state in a file or folder of some form."""
    state, names = toy_state(), list(toy_state())
    folder.mkdir()
    if form == "safetensors":
        save_file(state, folder / "any.safetensors")
        return folder / "any.safetensors"
    if form in ("hugging face", "torch's shards"):
        kind = "safetensors" if form == "hugging face" else "bin"
        placed = {name: f"part-{number % 2}.{kind}" for number, name in enumerate(names)}
        for file in set(placed.values()):
            part = {name: state[name].clone() for name in names if placed[name] == file}
            save_file(part, folder / file) if kind == "safetensors" else torch.save(part, folder / file)
        (folder / f"model.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
        return folder
    if form == "a folder":
        save_file(state, folder / "only.safetensors")
        return folder
    content: Any = {"epoch": 3, "state_dict": state, "optimizer": {"lr": 0.1}} if form == "a checkpoint" else state
    torch.save(content, folder / "model.pth", _use_new_zipfile_serialization=form != "torch of old")
    return folder / "model.pth"


@pytest.mark.parametrize(
    "form", ["safetensors", "hugging face", "torch's shards", "a folder", "torch", "torch of old", "a checkpoint"]
)
def test_forms_of_weights(form: str, tmp_path: Path) -> None:
    opened = open_weights(written(form, tmp_path / "given"))
    state = toy_state()
    assert opened.shapes == {name: tuple(value.shape) for name, value in state.items()}
    assert equal(dict(opened.read(list(state))), state)


class Runs:
    """What a pickle calls when it is read."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


def damaged(how: str) -> Path:
    save_file(toy_state(), "good.safetensors")
    good = Path("good.safetensors").read_bytes()
    bad = Path("bad.safetensors")
    if how == "torn":
        bad.write_bytes(good[:-100])
    elif how == "header":
        bad.write_bytes(good[:4] + b"\xff" * 4 + good[8:])
    elif how == "pickle":
        torch.save({"a": Runs()}, bad)
    elif how == "text":
        bad.write_text("hello")
    elif how == "empty":
        bad.write_bytes(b"")
    elif how == "nothing in it":
        torch.save({"epoch": 3}, bad)
    elif how == "index":
        Path("x.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../good.safetensors"}}))
        return Path("x.safetensors.index.json")
    elif how == "several":
        for name in ("a.pt", "b.pt"):
            Path(name).touch()
        return Path()
    return bad


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("torn", "not a whole safetensors file"), ("header", "not a whole safetensors file"),
        ("text", "not a whole safetensors file"), ("empty", "not a whole safetensors file"),
        ("pickle", "cannot be read as tensors alone"), ("nothing in it", "holds no tensors by name"),
        ("index", "names files outside its folder"), ("several", "an index.json"),
        ("gone", "there is no such file or folder"),
    ],
)  # fmt: skip
def test_what_is_no_whole_file_of_weights_is_refused_in_a_line(how: str, said: str) -> None:
    path = damaged(how)
    with pytest.raises(ValueError, match=said) as error:
        prepare(settings(init=Init(str(path))), ".", ".")
    assert "\n" not in str(error.value)


def test_each_rank_reads_its_own_stages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(toy_state(), "start.safetensors")
    asked: list[tuple[str, ...]] = []
    read = source.WeightFile.read

    def noting(self: source.WeightFile, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        asked.append(tuple(names))
        return read(self, names)

    monkeypatch.setattr(source.WeightFile, "read", noting)
    run_threads(settings("gpipe", 2, 4, init=Init("start.safetensors"), steps=1))
    assert sorted(asked) == [
        ("block0.linear.weight", "block0.linear.bias", "block1.linear.weight", "block1.linear.bias"),
        ("block2.linear.weight", "block2.linear.bias", "head.weight", "head.bias"),
    ]


# -- names ---------------------------------------------------------------------------------------------------------


def test_prefixes_take_off_put_before_and_replace() -> None:
    names = ["module.encoder.weight", "module.head.weight", "other"]
    assert renamed(names, parse_prefixes(["module.encoder.:body.", "module.:"])) == {
        "body.weight": "module.encoder.weight", "head.weight": "module.head.weight", "other": "other",
    }  # fmt: skip
    assert list(renamed(["a"], parse_prefixes([":model."]))) == ["model.a"]


def test_prefixes_that_make_one_name_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one name, a, of two in the file: x\.a and a"):
        renamed(["x.a", "a"], parse_prefixes(["x.:"]))
    for wrong in ("module", ":"):
        with pytest.raises(ValueError, match="is not OLD:NEW"):
            parse_prefixes([wrong])


def test_a_rule_is_suggested_where_one_would_match_more() -> None:
    own = ["conv1.weight", "fc.weight", "fc.bias"]
    assert suggestion(own, [f"module.{name}" for name in own]) == "module.:"
    assert suggestion([f"net.{name}" for name in own], own) == ":net."
    assert suggestion(own, own) is None and suggestion(own, ["a", "b"]) is None


def test_what_does_not_match_is_listed() -> None:
    model = {"a.weight": (2, 3), "a.num_batches_tracked": (), "b.weight": (4,)}
    found = match(model, {"a.weight": (2, 2), "c.weight": (1,)})
    assert found.missing == ("b.weight",) and found.unknown == ("c.weight",)
    assert str(found) == (
        "it does not have b.weight; it has more than the model with c.weight; "
        "a.weight is (2, 2) in it and (2, 3) in the model"
    )


def test_names_that_do_not_match_are_refused_or_left_as_drawn(caplog: pytest.LogCaptureFixture) -> None:
    state = toy_state()
    given = {f"module.{name}": value + 1 for name, value in state.items() if name != "block1.linear.bias"}
    given["module.head.bias"] = torch.zeros(3)
    save_file(given, "start.safetensors")
    with pytest.raises(ValueError, match=r"init\.prefix=\[module\.:\] would match more; give the weights"):
        prepare(settings(init=Init("start.safetensors", strict=False)), ".", ".")
    with pytest.raises(ValueError, match=r"does not have block1\.linear\.bias; head\.bias is \(3,\) in it and \(5,\)"):
        prepare(settings(init=Init("start.safetensors", prefix=["module.:"])), ".", ".")
    loose = Init("start.safetensors", prefix=["module.:"], strict=False)
    drawn = run_threads(settings(steps=1, optimizer=STILL)).state()
    left = run_threads(settings(steps=1, optimizer=STILL, init=loose)).state()
    assert "6 tensors are taken" in caplog.text
    for name in drawn:
        taken = name not in ("block1.linear.bias", "head.bias")
        assert torch.equal(left[name], given[f"module.{name}"] if taken else drawn[name]), name


def test_resnet50_has_torchvisions_names_and_shapes() -> None:
    lines = (ROOT / "tests" / "data" / "torchvision-resnet50.txt").read_text().splitlines()
    parts = [line.partition(" ") for line in lines]
    theirs = [(name, tuple(map(int, shape.split("x"))) if shape else ()) for name, _, shape in parts]
    with torch.device("meta"):
        ours = [
            (f"{layer}.{key}", tuple(value.shape))
            for layer, make in resnet.resnet50(classes=1000)
            for key, value in make().state_dict().items()
        ]
    assert len(theirs) == 320 and sorted(ours) == sorted(theirs)


# -- which weights -------------------------------------------------------------------------------------------------


def test_the_best_are_those_of_the_evaluation_with_the_lowest_loss() -> None:
    data = {"_target_": "toys.Tokens", "evaluation": {"samples": 20}}
    wanted = settings("gpipe", 2, 4, 2, steps=6, data=data, eval=Eval(every=1), save="best",
                      optimizer={"_target_": "torch.optim.SGD", "lr": 3.0})  # fmt: skip
    ran = run_threads(wanted)
    losses: dict[int, list[float]] = {}
    for record in ran.of("evaluation"):
        sums = losses.setdefault(record.meta["step"], [0.0, 0.0])
        sums[0] += record.meta["loss_sum"]
        sums[1] += record.meta["loss_count"]
    best = min(losses, key=lambda step: losses[step][0] / losses[step][1])
    assert best != 6, "the last would do as well"
    with safe_open(MODEL, framework="pt") as file:
        assert file.metadata()["step"] == str(best)
    run_threads(replace(wanted, train=replace(wanted.train, steps=best), save="final", eval=Eval(every=0)))
    expected = load_file(MODEL)
    run_threads(wanted)
    assert equal(load_file(MODEL), expected)


def test_the_best_needs_an_evaluation() -> None:
    with pytest.raises(ValueError, match=r"save=best keeps the weights of the best evaluation, and there is none"):
        prepare(settings(save="best"), ".", ".")


def test_what_safetensors_cannot_hold_is_refused_with_the_remedy() -> None:
    model = {"_target_": "peculiar.rotary", "loss": {"_target_": "toys.TokenLoss"}}
    with pytest.raises(ValueError, match=r"cannot hold .* \(complex128\): set save=never"):
        prepare(settings(model=model, save="final"), ".", ".")


def test_a_file_that_cannot_be_written_leaves_nothing_half(tmp_path: Path) -> None:
    with pytest.raises(UnwritableError):
        write_tensors(tmp_path / "gone" / MODEL, toy_state(), {})
    assert not list(tmp_path.iterdir())


def test_a_run_whose_weights_cannot_be_written_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MODEL).mkdir()  # a folder is in the way
    with pytest.raises(ExhaustedError, match=r"model\.safetensors cannot be written"):
        run_threads(settings(save="final", steps=1))
    assert [path.name for path in tmp_path.iterdir()] == [MODEL]


# -- the command line ----------------------------------------------------------------------------------------------

TINY = [
    "model=mlp", "model.features=768", "model.hidden=8", "data.size=16", "launch=threads", "train.steps=3",
    "pipeline.microbatches=2", "train.global_batch_size=8",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_stored_weights_evaluate_as_the_run_did(engine: Engine, tmp_path: Path) -> None:  # noqa: F811
    assert engine(*TINY, "hydra.run.dir=run").code == 0
    assert export.main(["run", "out.safetensors"]) == 0
    assert equal(load_file("out.safetensors"), load_file(f"run/{MODEL}"))
    evaluated = engine(
        *TINY, "mode=evaluate", "init.weights=out.safetensors", "pipeline.ranks=4", "hydra.run.dir=again"
    )
    assert evaluated.code == 0, evaluated.err
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "again"))
    assert two["evaluation"] == one["evaluation"] | {"step": 0} and two["steps"] == 0
    assert not (tmp_path / "again" / MODEL).exists()
    assert export.main(["run", "out.safetensors"]) == 1  # it is there


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mode=evaluate"], "mode=evaluate evaluates stored weights: give init.weights=FILE"),
        (["mode=evaluate", "init.weights=x", "data.evaluation=null"], "mode=evaluate needs held-out samples"),
        (["init.prefix=[module]"], "is not OLD:NEW"),
        (["save=sometimes"], "save=sometimes: no such choice. There is: best, final, never"),
    ],
)
def test_refusals(engine: Engine, arguments: list[str], said: str) -> None:  # noqa: F811
    save_file({"a": torch.zeros(1)}, "x")
    told = engine(*TINY, "init.strict=false", *arguments)
    assert told.code == 2 and said in told.err, told.err
