"""Checkpoints on the disk: one appears whole or not at all, whatever is not whole is recognised, old ones go."""

from __future__ import annotations

import errno
import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import close, equal, run_threads, settings
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_resume import at, keep, wanted

from engine import export
from engine.checkpoint import plain, store
from engine.checkpoint.keeper import Keeper
from engine.checkpoint.manifest import NAME, VERSION, DamagedError, _digest, read_manifest
from engine.checkpoint.names import FOLDER
from engine.checkpoint.resume import differences
from engine.checkpoint.store import folder_of
from engine.errors import CheckpointError
from engine.files import UnwritableError
from engine.settings import CheckpointSettings, Eval, Settings
from engine.training import checkpoints

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def small(**changes: Any) -> Settings:
    """Two steps on two ranks, and a checkpoint after each."""
    return settings(**({"steps": 2, "checkpoint": CheckpointSettings(every_steps=1)} | changes))


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest with another body, and a checksum that fits."""
    body = json.loads(path.read_text())["body"]
    change(body)
    path.write_text(json.dumps({"sha256": _digest(body), "body": body}))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a torn shard": (lambda f: (f / "rank-1.safetensors").write_bytes(b"x" * 100), "has 100 bytes of"),
    "a flipped bit": (lambda f: flip(f / "rank-0.safetensors", -5), "its checksum differs"),
    "a lost shard": (lambda f: (f / "rank-0.safetensors").unlink(), "cannot be read: No such file"),
    "an empty manifest": (lambda f: (f / NAME).write_bytes(b""), "is torn, or not a checkpoint's"),
    "a torn manifest": (lambda f: (f / NAME).write_bytes((f / NAME).read_bytes()[:-9]), "is torn"),
    "a flipped bit in the manifest": (
        lambda f: flip(f / NAME, (f / NAME).read_bytes().index(b'"samples": ') + 11), "checksum differs"),
    "no manifest": (lambda f: (f / NAME).unlink(), "was not finished"),
    "another program's": (lambda f: rewritten(f / NAME, lambda b: b.update(format="other")), "of another program"),
    "a newer version": (lambda f: rewritten(f / NAME, lambda b: b.update(version=VERSION + 1)), "reads version"),
    "a path in a name": (
        lambda f: rewritten(f / NAME, lambda b: b["shards"][0].update(file="../rank-0.safetensors")), "shards.0.file"),
    "a missing field": (lambda f: rewritten(f / NAME, lambda b: b.pop("loader")), "loader: Field required"),
    "nesting": (lambda f: (f / NAME).write_text('{"sha256": "", "body": {"a": ' + "[" * 90 + "]" * 90 + "}}"), "torn"),
    "another step": (lambda f: rewritten(f / NAME, lambda b: b.update(step=7)), "not what its name says"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_whole_is_named_and_the_newest_whole_one_used(damage: str) -> None:
    keep(run_threads(small()))
    harm, said = DAMAGE[damage]
    harm(folder_of(Path(FOLDER), 2))
    passed_over: list[str] = []
    found = store.newest(Path(FOLDER), passed_over.append)
    assert found is not None and found.manifest.step == 1
    assert len(passed_over) == 1 and said in passed_over[0] and "\n" not in passed_over[0]


@given(st.binary(max_size=200))
def test_any_bytes_as_a_manifest_are_refused_in_a_line(content: bytes) -> None:
    folder = Path("any")
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_bytes(content)
    with pytest.raises(DamagedError, match=r"^[^\n]*$"):
        read_manifest(folder)


def test_a_checkpoint_appears_when_all_ranks_are_down() -> None:
    ran = run_threads(small(steps=1))
    told = [record for record in ran.records if record.kind == "checkpoint"]
    keeper = Keeper(ran.job, Path(), {}, dict, lambda level, text: None)
    keeper(told[0])
    assert store.steps_of(Path(FOLDER)) == [] and [p.name for p in Path(FOLDER).iterdir()] == [".step-000000001.part"]
    keeper(told[1])
    assert [p.name for p in Path(FOLDER).iterdir()] == ["step-000000001"]


def test_what_a_killed_run_left_half_written_goes() -> None:
    keep(run_threads(small()))
    for name in (".step-000000003.part", ".step-000000001.gone"):
        (Path(FOLDER) / name).mkdir()
    Keeper(ran_job(), Path(), {}, dict, lambda level, text: None).begin()
    assert sorted(p.name for p in Path(FOLDER).iterdir()) == ["step-000000001", "step-000000002"]


def ran_job() -> Any:
    from engine.prepare.prepare import prepare

    return prepare(small(), ".", ".")


def full(monkeypatch: pytest.MonkeyPatch, step: int, rank: int) -> None:
    """The disk of a rank is full when it stores its part of one checkpoint."""
    write = checkpoints.write_tensors

    def writing(path: Path, *rest: Any) -> None:
        if path.name == f"rank-{rank}.safetensors" and f"{step:09d}" in path.parent.name:
            raise UnwritableError(path, OSError(errno.ENOSPC, "No space left on device"))
        write(path, *rest)

    monkeypatch.setattr(checkpoints, "write_tensors", writing)


def test_a_full_disk_is_reported_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_threads(settings(steps=3)).state()
    full(monkeypatch, 2, 1)
    ran = run_threads(small(steps=3, checkpoint=CheckpointSettings(every_steps=1, keep=9)))
    lines = keep(ran)
    assert equal(ran.state(), expected)
    assert store.steps_of(Path(FOLDER)) == [3, 1] and len(list(Path(FOLDER).iterdir())) == 2
    (line,) = [line for line in lines if "could not be made" in line]
    assert "after 2 steps" in line and "rank 1" in line and "No space left on device; training goes on" in line
    for step in (1, 3):
        at(step)  # whole


def test_it_may_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, 1, 0)
    with pytest.raises(CheckpointError, match="after 1 steps could not be made: rank 0"):
        keep(run_threads(small(checkpoint=CheckpointSettings(every_steps=1, on_failure="stop"))))


def test_a_folder_in_which_nothing_can_be_made_is_reported() -> None:
    Path(FOLDER).write_text("a file is in the way")
    ran = run_threads(small())
    assert all("could not be made" in line for line in keep(ran)) and len(ran.of("step")) == 4


class Heavy(torch.optim.SGD):
    """Keeps of each parameter what no checkpoint can hold."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["how"] = len
        return super().step(closure)


def test_a_state_that_cannot_be_stored_is_named_and_training_goes_on() -> None:
    lines = keep(run_threads(small(steps=1, optimizer={"_target_": "test_store.Heavy", "lr": 0.1})))
    assert len(lines) == 1 and "the optimizer's how of block0.linear.weight is a builtin" in lines[0], lines


# -- when, and which stay ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        ({"every_steps": 2, "keep": 9}, [5, 4, 2]), ({"every_steps": 1}, [5, 4]), ({"every_steps": 1, "keep": 1}, [5]),
        ({"every_epochs": 1, "keep": 9}, [5, 3]), ({"every_epochs": 2}, [5]),
        ({"every_minutes": 1e-9, "keep": 3}, [5, 4, 3]),
        ({"every_minutes": 1e6}, [5]), ({}, []),
    ],
)  # fmt: skip
def test_checkpoints_are_made_when_they_are_due_and_the_newest_kept(when: dict[str, Any], steps: list[int]) -> None:
    """Epochs of 40 samples in batches of 16 have three steps; the last step makes one in any case."""
    keep(run_threads(wanted(steps=5, eval=Eval(every=0), checkpoint=CheckpointSettings(**when))))
    assert store.steps_of(Path(FOLDER)) == steps


def test_the_best_is_kept_beside_the_newest() -> None:
    sgd = {"_target_": "torch.optim.SGD", "lr": 30.0}
    ran = run_threads(
        wanted(steps=7, optimizer=sgd, lr_scheduler=None, eval=Eval(every=1),
               checkpoint=CheckpointSettings(best=True, every_steps=1, keep=1))
    )  # fmt: skip
    keep(ran)
    losses = {r.meta["step"]: r.meta["loss_sum"] / r.meta["loss_count"] for r in ran.of("evaluation")}
    best = min(losses, key=lambda step: losses[step])
    assert best < 7 and store.steps_of(Path(FOLDER)) == [7, best]
    assert at(7).manifest.best_loss == losses[best]
    again = Keeper(ran.job, Path(), {}, dict, lambda level, text: None)
    assert again._best == (losses[best], best)  # a resumed run knows it


# -- what is in them -----------------------------------------------------------------------------------------------


def test_position_and_configuration_are_in_the_manifest() -> None:
    keep(run_threads(wanted(steps=5)))
    manifest = at(5).manifest
    assert (manifest.step, manifest.epoch, manifest.samples) == (5, 1, 72)  # 40, then 16 and 16
    assert manifest.loader.samples == 40 and manifest.config["train"]["steps"] == 5
    names = {entry.name for entry in manifest.tensors if entry.kind == "parameter"}
    assert names == {f"block{i}.linear.{k}" for i in range(3) for k in ("weight", "bias")} | {
        "head.weight",
        "head.bias",
    }
    kinds = Counter((entry.kind, entry.key) for entry in manifest.tensors)
    assert kinds["optimizer", "exp_avg"] == kinds["optimizer", "exp_avg_sq"] == 8


def test_what_is_different_is_told() -> None:
    keep(run_threads(wanted(steps=1)))
    now = wanted(steps=2, microbatches=2, optimizer={"_target_": "torch.optim.Adam", "lr": 0.5})
    assert differences(at(1).manifest, now) == [
        "optimizer.lr: 0.01 -> 0.5", "pipeline.microbatches: 4 -> 2", "train.steps: 1 -> 2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 5}, "seed was 0 and is 5 now"), ({"global_batch_size": 8}, "train.global_batch_size was 16 and is 8"),
        ({"data": {"_target_": "toys.Tokens", "samples": 48}}, "the samples of data was 40 and is 48"),
        ({"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}}, "optimizer._target_ was torch.optim.Adam"),
        ({"lr_scheduler": None}, "lr_scheduler._target_ was"), ({"steps": 1}, "2 steps are done, and the run has 1"),
        ({"model": {"_target_": "toys.mlp4", "width": 8, "classes": 6, "loss": {"_target_": "toys.TokenLoss"}}},
         "of another model: head.weight, head.bias are not in it, or of another shape"),
    ],
)  # fmt: skip
def test_another_training_is_refused_with_what_differs(change: dict[str, Any], said: str) -> None:
    from engine.prepare.prepare import prepare

    keep(run_threads(wanted(steps=2, eval=Eval(every=0))))
    with pytest.raises(ValueError, match=r"^resume: ") as error:
        prepare(wanted(**({"steps": 4} | change)), ".", ".", at(2))
    assert said in str(error.value)


def test_weights_are_exported_from_the_newest_whole_checkpoint() -> None:
    normed = {"_target_": "toys.normed", "loss": {"_target_": "toys.TokenLoss"}}
    for parts in (False, True):
        out = f"out{parts}.safetensors"
        ran = run_threads(wanted("1f1b", 2, 2, 2, steps=2, shard_optimizer=parts, model=normed))
        keep(ran)
        flip(folder_of(Path(FOLDER), 1) / "rank-0.safetensors", -1)
        assert export.main([".", out]) == 0
        assert equal(load_file(out), {name: ran.state()[name] for name in load_file(out)})
        assert load_file(out).keys() == ran.state().keys()
    flip(folder_of(Path(FOLDER), 2) / "rank-0.safetensors", -1)
    assert export.main([".", "none.safetensors"]) == 1


def old_run() -> Settings:
    """What made tests/data/checkpoint-1, at version 1 of the format."""
    return wanted("1f1b", 2, 2, 2, steps=4, shard_optimizer=True, checkpoint=CheckpointSettings(),
                  model={"_target_": "toys.normed", "loss": {"_target_": "toys.TokenLoss"}})  # fmt: skip


def test_a_checkpoint_of_version_1_is_still_read() -> None:
    expected = run_threads(old_run())
    found = run_threads(old_run(), resumed=store.whole(DATA / "checkpoint-1"))
    close(found.state(), expected.state())
    assert found.losses() == pytest.approx(expected.losses()[2:], rel=1e-9)


# -- plain data ----------------------------------------------------------------------------------------------------

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8))
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=5), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3),
    ),
    max_leaves=12,
)  # fmt: skip


@given(nested)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    found = plain.decode(json.loads(json.dumps(plain.encode(value, "x"))))
    assert found == value and repr(found) == repr(value)


def test_tensors_counters_and_words_that_look_like_marks_come_back() -> None:
    value = {"a": torch.tensor([1.5, -0.0], dtype=torch.bfloat16), "b": Counter({3: 2}), "c": OrderedDict(x=1),
             "$tuple": [1], "d": torch.tensor(7), "e": torch.zeros(0, 2)}  # fmt: skip
    found = plain.decode(json.loads(json.dumps(plain.encode(value, "x"))))
    assert torch.equal(found["a"], value["a"]) and found["a"].dtype == torch.bfloat16 and found["e"].shape == (0, 2)
    assert found["b"] == Counter({3: 2}) and isinstance(found["b"], Counter) and found["c"] == {"x": 1}
    assert found["$tuple"] == [1] and torch.equal(found["d"], value["d"])
    for wrong in (len, {1, 2}, torch.zeros(2000), object()):
        with pytest.raises(ValueError, match=r"^x is a"):
            plain.encode(wrong, "x")
