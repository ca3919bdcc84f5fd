"""Plain data -> Settings: what is accepted arrives unchanged, and every mistake is refused by name."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from engine.cli.config import CONF, from_plain, get, load
from engine.plan.schedules import offered_schedules
from engine.settings import GROUP_KEYS, KEYS, Settings

TARGETS = {
    "schedule": {"name": "gpipe"},
    "model": {"_target_": "a.model"},
    "data": {"_target_": "some.data"},
    "optimizer": {"_target_": "an.optimizer"},
    "partition": {"name": "model"},
    "lr_scheduler": None,
}
CHOICES = sorted(path for path, key in KEYS.items() if key.choices and path not in GROUP_KEYS)


def plain(**changes: Any) -> dict[str, Any]:
    """A valid configuration; `changes` are dotted paths with `__` for the dot."""
    result: dict[str, Any] = {key: value.copy() if value else value for key, value in TARGETS.items()}
    for path, value in changes.items():
        put(result, path.replace("__", "."), value)
    return result


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, last = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value


def paths(schema: Any, at: str = "") -> list[str]:
    found = []
    for field in fields(schema):
        path = f"{at}{field.name}"
        inner = getattr(Settings(), field.name) if not at else None
        found += paths(type(inner), f"{path}.") if is_dataclass(inner) else [path]
    return found


WHOLE = sorted(path for path in paths(Settings) if isinstance(KEYS[path].at_least, int) and path != "delay.sample_ms")


def test_defaults_of_the_yaml_are_those_of_the_dataclasses() -> None:
    written = yaml.safe_load((CONF / "config.yaml").read_text())
    groups = {key for entry in written["defaults"] if isinstance(entry, dict) for key in entry}
    for path in paths(Settings):
        if path.split(".")[0] in groups or path in ("plan.costs", "train.steps"):
            continue
        value: Any = written
        for name in path.split("."):
            value = value[name]
        assert value == get(Settings(), path), path


def test_neither_steps_nor_epochs_means_twenty_steps() -> None:
    assert from_plain(plain()).train.steps == 20
    assert from_plain(plain(train__epochs=3)).train.steps is None
    assert from_plain(plain(train__steps=7)).train.epochs is None
    with pytest.raises(ValueError, match=r"train\.steps=2 and train\.epochs=3"):
        from_plain(plain(train__steps=2, train__epochs=3))


def test_null_seed_is_drawn_once() -> None:
    seeds = {from_plain(plain(seed=None)).seed for _ in range(5)}
    assert len(seeds) > 1 and all(0 <= seed < 2**31 for seed in seeds)
    assert from_plain(plain(seed=5)).seed == 5


@given(st.sampled_from(WHOLE), st.integers(1, 10**6))
def test_numbers_below_their_least_are_refused(path: str, below: int) -> None:
    tree = plain()
    if path == "train.epochs":
        put(tree, "train.steps", None)
    value = int(KEYS[path].at_least or 0) - below
    put(tree, path, value)
    with pytest.raises(ValueError, match=f"{path}={value} must be at least"):
        from_plain(tree)


@given(st.sampled_from(WHOLE), st.sampled_from(["two", "4", 2.5, True, [1], {"a": 1}]))
def test_what_is_no_whole_number_is_refused(path: str, value: Any) -> None:
    tree = plain()
    put(tree, path, value)
    with pytest.raises(ValueError, match=path):
        from_plain(tree)


@given(st.sampled_from([p for p in paths(Settings) if p not in TARGETS]), st.integers(0, 3))
def test_mistyped_keys_are_refused_with_the_right_one(path: str, drop: int) -> None:
    *sections, last = path.split(".")
    wrong = last[:drop] + last[drop + 1 :] + "x"
    tree = plain()
    put(tree, ".".join([*sections, wrong]), 1)
    with pytest.raises(ValueError, match=wrong) as caught:
        from_plain(tree)
    assert path in str(caught.value)


@pytest.mark.parametrize("unfit", ["launch=threads", "device=cuda"])
def test_only_processes_on_cpus_are_pinned(unfit: str) -> None:
    name, _, value = unfit.partition("=")
    with pytest.raises(ValueError, match=f"pin_workers=always is not possible with {unfit}"):
        from_plain(plain(pin_workers="always", **{name: value}))
    assert from_plain(plain(pin_workers="always")).pin_workers == "always"


@pytest.mark.parametrize("path", CHOICES)
def test_choices(path: str) -> None:
    for choice in KEYS[path].choices:
        needed = {"init.weights": "model.safetensors"} if choice == "evaluate" else {}
        assert get(from_plain(plain(**{path: choice}, **needed)), path) == choice
    empty = [] if get(Settings(), path) is None else [(None, "null")]  # null is one of the choices of some
    for wrong, shown in (("nothing", "nothing"), (3, "3"), *empty, (True, "True"), ([], r"\[\]")):
        with pytest.raises(ValueError, match=f"{path}={shown}: no such choice") as caught:
            from_plain(plain(**{path: wrong}))
        assert all(choice in str(caught.value) for choice in KEYS[path].choices)


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, key in KEYS.items() for value in key.later])
def test_what_comes_later_is_refused_as_such(path: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{value} is not part of the engine yet"):
        from_plain(plain(**{path.replace(".", "__"): value}))


def test_partition_is_checked() -> None:
    for name in KEYS["partition.name"].choices:
        assert from_plain(plain(partition__name=name)).partition["name"] == name
    with pytest.raises(ValueError, match=r"partition\.name=unifrm: no such choice; did you mean uniform"):
        from_plain(plain(partition__name="unifrm"))
    with pytest.raises(ValueError, match=r"partition\.splt: no such key; did you mean partition\.split"):
        from_plain(plain(partition__splt=["a"]))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40))
def test_every_replica_has_a_sample_for_every_microbatch(batch: int, replicas: int, passes: int, m: int) -> None:
    tree = plain(
        train__global_batch_size=batch,
        data_parallel__replicas=replicas,
        train__accumulate=passes,
        pipeline__microbatches=m,
    )
    if batch // replicas // passes >= m:
        assert from_plain(tree).pipeline.microbatches == m
    else:
        with pytest.raises(ValueError, match=r"a global batch of at least"):
            from_plain(tree)


def test_the_batch_does_not_limit_a_plan() -> None:
    assert from_plain(plain(mode="plan", pipeline__microbatches=1000)).pipeline.microbatches == 1000


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("path", ["train.clip_norm", "timeout_s"])
def test_positive_numbers(path: str, value: float) -> None:
    tree = plain()
    put(tree, path, value)
    with pytest.raises(ValueError, match=path):
        from_plain(tree)


def test_schedule_is_checked_before_anything_is_started() -> None:
    with pytest.raises(ValueError, match=r"schedule\.name=gpip: no such choice; did you mean gpipe"):
        from_plain(plain(schedule__name="gpip"))
    with pytest.raises(ValueError, match="chunkz"):
        from_plain(plain(schedule__chunkz=2))


@pytest.mark.parametrize("name", [name for name in offered_schedules() if name != "csv"])
def test_every_schedule_is_a_choice_to_plan_and_to_train(name: str) -> None:
    assert (CONF / "schedule" / f"{name}.yaml").exists()
    sizes = {"schedule__name": name, "pipeline__ranks": 2, "pipeline__microbatches": 4}
    for mode in ("plan", "train"):
        assert from_plain(plain(mode=mode, **sizes)).schedule["name"] == name


def test_a_schedule_says_where_it_is_defined() -> None:
    sizes = {"pipeline__ranks": 3, "pipeline__microbatches": 8}
    with pytest.raises(ValueError, match=r"dualpipe is not defined for pipeline.ranks=3 .*must be even: 2, 4, 6"):
        from_plain(plain(schedule__name="dualpipe", **sizes))
    with pytest.raises(ValueError, match=r"schedule.path=None must name a CSV file"):
        from_plain(plain(schedule__name="csv", **sizes))


@pytest.mark.parametrize("group", ["model", "data", "optimizer"])
@pytest.mark.parametrize("target", [None, 3, "adam"])
def test_targets_must_name_something(group: str, target: Any) -> None:
    with pytest.raises(ValueError, match=f"{group}._target_={'null' if target is None else target}"):
        from_plain(plain(**{f"{group}___target_": target}))


def test_interpolations_are_resolved_and_broken_ones_named() -> None:
    config = OmegaConf.create(plain(data__root="${model._target_}/x"))
    assert load(config).data["root"] == "a.model/x"
    with pytest.raises(ValueError, match="nowhere"):
        load(OmegaConf.create(plain(data__root="${nowhere}")))
    with pytest.raises(ValueError, match=r"data\.root"):
        load(OmegaConf.create(plain(data__root="???")))


def test_sections_and_values_are_not_exchanged() -> None:
    with pytest.raises(ValueError, match="pipeline=4 is a section"):
        from_plain(plain(pipeline=4))
    with pytest.raises(ValueError, match="model='gpt' is not a section"):
        from_plain(plain(model="gpt"))


def test_the_files_are_beside_the_package() -> None:
    assert Path(__file__).resolve().parents[2] / "conf" == CONF


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline__microbatches": 10**8, "mode": "plan"}, "200,000,000 forwards"),
        ({"data_parallel__replicas": 1000, "train__global_batch_size": 8000}, "2000 workers on this host"),
    ],
)
def test_what_would_fill_the_host_is_refused(changes: dict[str, Any], words: str, monkeypatch: Any) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=words):
        from_plain(plain(**changes))
