"""What `engine.Pipeline` is given: each argument that cannot be is refused in one line, in the words of the class."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.pipeline.arguments import in_arguments
from engine.pipeline.pipeline import Pipeline
from engine.pipeline.seeds import building

SGD = partial(torch.optim.SGD, lr=0.1)
BAD: dict[str, list[Any]] = {
    "schedule": [None, 3, ["gpipe"]],
    "microbatches": [None, 0, -1, True, 2.0, "4"],
    "ranks": [0, -1, True, 1.0, "1"],
    "replicas": [None, 0, True, "1"],
    "options": [[1], {1: 2}, "chunks"],
    "split": ["1", 1, [1], b"1"],
    "optimizer": ["SGD", 1, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)],
    "lr_scheduler": ["StepLR", 1],
    "clip_norm": [-1, 0, "1", True, float("nan")],
    "clip_norm_type": [-1, 0, "2", True, float("nan")],
    "bucket_bytes": [None, 0, -1, 1e6, True],
    "shard_optimizer": [None, 1, "yes"],
    "device": ["gpu", 0, "cuda:x", "meta", ["cpu"]],
    "dtype": ["float32", torch.int64, float],
    "autocast": ["bf16", torch.int8, 16],
    "seed": [None, "x", -1, 1.5, True],
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """No world is left to other tests, where one was alone in this process."""
    yield
    engine.shutdown()


def layers() -> nn.Sequential:
    with building(0, 0):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, 4, dtype=torch.float64), torch.zeros(rows, dtype=torch.long)


def test_every_argument_is_tried() -> None:
    elsewhere = {"self", "layers", "loss", "allreduce", "overlap", "prepared"}  # test_pipeline.py
    elsewhere |= {"example"}  # test_cut.py
    assert set(inspect.signature(Pipeline.__init__).parameters) == set(BAD) | elsewhere


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_what_may_be_given(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}(=| is ).* must be ") as refused:
        engine.Pipeline(layers(), nn.functional.cross_entropy, **{name: value})
    assert "\n" not in str(refused.value) and "pipeline." not in str(refused.value)


def test_what_may_be_given_is_taken() -> None:
    given: dict[str, Any] = {
        "options": {}, "split": [], "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        "optimizer": SGD, "clip_norm": 1, "clip_norm_type": None, "device": torch.device("cpu"),
        "dtype": torch.float64, "autocast": torch.no_grad, "ranks": 1,
    }  # fmt: skip
    for norm_type in (1, 2.0, float("inf")):
        with engine.Pipeline(layers(), nn.functional.cross_entropy, **given | {"clip_norm_type": norm_type}) as piped:
            assert piped.optimizer is not None


def test_clipping_by_hand_is_checked_too() -> None:
    with engine.Pipeline(layers(), nn.functional.cross_entropy) as piped:
        piped.step(batch())
        for bad in ("x", -1.0, 0, float("nan"), None, True):
            with pytest.raises(ValueError, match=r"^max_norm=.* must be a number above 0"):
                piped.clip_grad_norm_(bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^norm_type=0 must be"):
            piped.clip_grad_norm_(1.0, norm_type=0)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"schedule": "dualpipe"}, r"not defined for ranks=2 microbatches=2: microbatches must be even and at least"),
        ({"schedule": "chimera", "microbatches": 3}, "microbatches must be a multiple of ranks"),
        ({"split": ["1", "2"]}, "split names 2 layers, which makes 3 stages"),
        ({"split": ["0"]}, "split: '0' is the first layer"),
        ({"schedule": "csv", "options": {"path": "none.csv"}}, r"options\['path'\]=none.csv cannot be read"),
        ({"schedule": "interleaved_1f1b", "options": {"chunks": 4}}, r"lower ranks \(or options\['chunks'\]\)"),
    ],
)
def test_a_refusal_names_arguments_and_no_keys(keywords: dict[str, Any], words: str) -> None:
    def loop() -> str:
        with pytest.raises(ValueError, match=words) as refused:
            engine.Pipeline(layers(), nn.functional.cross_entropy, **{"microbatches": 2} | keywords)
        return str(refused.value)

    for said in engine.run_threads(2, loop):
        assert in_arguments(said) == said


def test_so_does_one_of_a_step() -> None:
    def wrong(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such target")

    with engine.Pipeline(layers(), wrong) as piped:
        for use in (piped.step, piped.evaluate):
            with pytest.raises(ValueError, match=r"^loss fails on .*no such target"):
                use(batch())


def test_no_sample_anywhere_has_no_mean() -> None:
    def loop(replicas: int) -> None:
        piped = engine.Pipeline(layers(), nn.functional.cross_entropy, microbatches=2, replicas=replicas)
        with pytest.raises(ValueError, match="no rank was given a sample"):
            piped.evaluate(batch(0))
        if replicas > 1:
            with pytest.raises(ValueError, match="no rank was given a sample"):
                piped.step(batch(0))

    engine.run_threads(2, loop, 1)
    engine.run_threads(4, loop, 2)


def test_a_closed_pipeline_is_not_entered() -> None:
    piped = engine.Pipeline(layers(), nn.functional.cross_entropy)
    piped.close()
    with pytest.raises(ValueError, match="this pipeline is closed"), piped:
        pass
    assert len(list(piped.parameters())) == 6  # they are the user's to keep


@pytest.mark.parametrize("changed", ["weight", "bias", "a buffer"])
def test_ranks_that_were_given_different_weights_say_so(changed: str) -> None:
    """As where two threads seed the one generator of torch and build a model at the same time."""

    def loop() -> None:
        given = layers()
        given[1].register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        if engine.rank() == 1:
            with torch.no_grad():
                if changed == "weight":
                    given[1].weight[2, 3] += 1e-15
                elif changed == "bias":
                    given[1].bias.neg_()
                else:
                    given[1].mask[2] = True
        with pytest.raises(ValueError, match=r"layer '1' was given to the ranks with different weights.*deepcopy"):
            engine.Pipeline(given, nn.functional.cross_entropy)

    engine.run_threads(2, loop)


def test_layers_on_the_meta_device_and_functions_are_not_compared() -> None:
    def loop() -> float:
        given = layers()
        kept = [0, 1] if engine.rank() == 0 else [2]
        parts: list[Any] = [
            (str(number), layer if number in kept else layer.to("meta")) for number, layer in enumerate(given)
        ]
        piped = engine.Pipeline(parts, nn.functional.cross_entropy, microbatches=2, split=["2"])
        return float(piped.step(batch()))

    with engine.Pipeline(layers(), nn.functional.cross_entropy, microbatches=2) as alone:
        expected = float(alone.step(batch()))
    assert engine.run_threads(2, loop) == [pytest.approx(expected, rel=1e-12)] * 2
