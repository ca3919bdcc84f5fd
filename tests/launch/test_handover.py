"""The job as plain data: what was written is read, and whatever else is there is refused in one line."""

from __future__ import annotations

import json
import pickle
import struct
from collections import OrderedDict, defaultdict, deque
from dataclasses import replace
from typing import Any, NamedTuple

import harness
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from engine.job import Job
from engine.launch import handover
from engine.pipeline.messages.boundary import describe
from engine.pipeline.messages.nesting import nested, template
from engine.plan.schedules import offered_schedules
from engine.prepare.prepare import prepare
from engine.telemetry.records import decode, encode

SECTION = {"_target_": "toys.mlp4", "loss": {"_target_": "toys.TokenLoss"}}
ODD = {"none": None, "list": [1, 2.5, [True]], "tuple": (1, ("a",)), 3: {"dict": [[1, 2]]}, "tuples": {"tuple": []}}


@pytest.fixture(scope="module")
def job() -> Job:
    return prepare(harness.settings("dualpipe", 4, 8), ".", ".")


@pytest.mark.parametrize("schedule", sorted({*offered_schedules()} - {"csv"}))
@pytest.mark.slow(keep=9)
def test_every_schedule_s_job_arrives_as_it_was(schedule: str) -> None:
    batch = {"global_batch_size": 2} if schedule == "pipedream" else {}
    try:
        job = prepare(harness.settings(schedule, 2, 4, **batch), ".", ".")
    except ValueError as error:
        pytest.skip(str(error))
    _same_job(job)


def _same_job(job: Job) -> None:
    found = handover.read(handover.written(job))
    assert found == job
    for name in ("compute", "steps", "passes", "evaluations", "boundaries", "streams"):
        assert repr(getattr(found, name)) == repr(getattr(job, name))  # types too: tuples are not lists


def test_what_a_user_wrote_into_a_section_keeps_its_types(job: Job) -> None:
    changed = replace(job, settings=replace(job.settings, data={**job.settings.data, "odd": ODD}))
    found = handover.read(handover.written(changed)).settings.data["odd"]
    assert found == ODD and repr(found) == repr(ODD)


def test_what_is_no_plain_data_is_refused_by_its_key(job: Job) -> None:
    changed = replace(job, settings=replace(job.settings, model={**SECTION, "deep": {"in": {1, 2}}}))
    with pytest.raises(ValueError, match=r"^model\.deep\.in is a set: a worker can be given"):
        handover.written(changed)
    with pytest.raises(ValueError, match=r"^model\.deep\.in is a set: a worker can be given"):
        handover.check(changed.settings)


def header(content: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<I", content)
    return dict(json.loads(content[4 : 4 + length]))


DAMAGES = {
    "a field more": (lambda meta: meta.update(code="x"), "job.code is unknown"),
    "a field less": (lambda meta: meta.pop("split"), "job.split is missing"),
    "deep": (lambda meta: meta["settings"]["pipeline"].pop("ranks"), "job.settings.pipeline.ranks is missing"),
    "a word for a number": (lambda meta: meta.update(train_samples="9"), "job.train_samples is '9', which is not int"),
    "true for a number": (lambda meta: meta["settings"].update(seed=True), "job.settings.seed is True, which is not"),
    "null for a number": (lambda meta: meta["settings"].update(timeout_s=None), "settings.timeout_s is None"),
    "a list for a section": (lambda meta: meta["settings"].update(model=[1]), "job.settings.model is [1], which"),
    "an array that is not there": (lambda meta: meta["compute"]["rows"].insert(0, 99), "job.compute.rows[0] is 99"),
    "a pair of three": (lambda meta: meta["steps"].append([1, 2, 3]), "job.steps is [1, 2, 3], which is not a key and"),
    "an object": (lambda meta: meta["settings"].update(data={"py": "x"}), "is {'py': 'x'}, which is not plain data"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_job_is_refused_in_one_line(damage: str, job: Job) -> None:
    record = decode(handover.written(job))
    hurt, said = DAMAGES[damage]
    hurt(record.meta)
    with pytest.raises(ValueError, match="not a job") as refused:
        handover.read(encode("job", record.meta, record.arrays))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_pickle_is_not_a_job(job: Job) -> None:
    with pytest.raises(ValueError, match="not a"):
        handover.read(pickle.dumps(job))


def test_nesting_without_end_is_refused() -> None:
    deep = b'{"kind": "job", "arrays": [], "meta": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ValueError, match="nested too deep"):
        handover.read(struct.pack("<I", len(deep)) + deep)


@given(st.data())
def test_whatever_was_changed_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        handover.read(bytes(content[: data.draw(st.integers(0, len(content)))]))
    except ValueError as error:
        assert "\n" not in str(error)


SMALL = handover.written(prepare(harness.settings("gpipe", 2, 2), ".", "."))


# ---- structures ----------------------------------------------------------------------------------------------------


class Output(NamedTuple):
    logits: Any
    rest: Any


class Registered:
    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name = value, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and vars(self) == vars(other)

    def __repr__(self) -> str:  # the name of a test case: the same in every process that collects it
        return f"Registered({self.value!r}, {self.name!r})"

    __hash__ = None  # type: ignore[assignment]


pytree.register_pytree_node(Registered, lambda r: ([r.value], r.name), lambda c, name: Registered(*c, name))

NESTINGS = [
    7, None, [], (), {}, [1, (2, [3])], {"a": 1, 2: {"b": (None, True)}}, {(1, "x"): 1.5}, Output(1, [2]),
    Registered([1], "n"), OrderedDict([("z", 1), ("a", 2)]), defaultdict(list, {"k": 1}), defaultdict(None, {"k": 1}),
    deque([1, 2], maxlen=3),
]  # fmt: skip


@pytest.mark.parametrize("value", NESTINGS, ids=repr)
def test_structures_are_named_and_found_again(value: Any) -> None:
    spec = describe(value)
    found = nested(json.loads(json.dumps(spec.form)), spec.leaves)
    assert found == value and type(found) is type(value)
    assert repr(found) == repr(value) or isinstance(value, Registered)
    assert pytree.tree_structure(template(spec)) == pytree.tree_structure(value)


def test_what_torch_returns_is_found_again() -> None:
    value = torch.ones(2, 2).max(0)
    found = template(describe(value))
    assert type(found) is type(value) and found.indices.dtype == "int64"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (["os:system", None, ["*"]], "os.*not loaded|not loaded"),
        (["antigravity:Thing", None, ["*"]], "has not loaded it: import it in the module"),
        (["subprocess:Popen", None, ["*"]], "no structure that torch's pytree knows"),
        (["list", None, ["*", "*"]], "more leaves"),
        (["list", None, []], "fewer leaves"),
        ("list", "no structure"),
    ],
)
def test_a_structure_names_nothing_but_classes_that_are_there(form: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        nested(form, [1])


def test_a_class_that_others_cannot_find_is_refused() -> None:
    class Local(NamedTuple):
        x: Any

    with pytest.raises(ValueError, match="define it in its module"):
        describe(Local(1))


def test_arrays_arrive_whole() -> None:
    job = prepare(harness.settings("1f1b", 2, 4), ".", ".")
    found = handover.read(handover.written(job))
    assert all(np.array_equal(a, b) for a, b in zip(found.compute.rows, job.compute.rows, strict=True))
    assert header(handover.written(job))["kind"] == "job"
