"""Losses: (sum, count) of any of them, in pieces, is torch's own mean over the whole; what is ignored adds nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.pipeline.losses import make_loss, scored
from engine.pipeline.messages.boundary import describe
from models.gpt import NextTokenLoss

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def pieces(rows: int, cuts: list[int]) -> list[slice]:
    """Uneven micro-batches: the rows, cut at `cuts` modulo their number."""
    edges = sorted({0, rows, *(cut % rows for cut in cuts)})
    return [slice(a, b) for a, b in pairwise(edges)]


def in_pieces(loss: Any, output: Tensor, target: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """(loss, gradient) as the engine gets them: all forwards first, counts before any of them, then backwards."""
    made = make_loss(loss)
    leaf = output.detach().clone().requires_grad_()
    parts = pieces(len(output), cuts)
    count = sum(made.count(target[part], describe(output[part])) for part in parts)
    sums = [made(leaf[part], target[part]) for part in parts]
    for each in sums:
        if each.requires_grad and count:
            (each / count).backward()
    assert leaf.grad is not None
    return torch.stack(sums).sum().detach() / count, leaf.grad


def whole(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = output.detach().clone().requires_grad_()
    value = loss(leaf, target)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(*shape: int, classes: int = 5, seed: int = 1, ignored: int | None = None, blank: int = 0) -> Tensor:
    """Class numbers; about a third is `ignored`, and of the first `blank` samples all."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(classes, shape, generator=generator)
    if ignored is not None:
        drawn[torch.rand(shape, generator=generator) < 0.3] = ignored
        drawn[:blank] = ignored
        drawn[-1] = 0
    return drawn


cut_lists = st.lists(st.integers(1, 10), max_size=4)
WEIGHT = torch.tensor([0.3, 2.0, 0.0, 1.0, 5.0])

CLASSIFICATIONS = {
    "plain": ({}, None),
    "ignored": ({}, -100),
    "own ignore_index": ({"ignore_index": 2}, 2),
    "weight": ({"weight": WEIGHT.double()}, None),
    "weight, ignored": ({"weight": WEIGHT.double(), "ignore_index": 1}, 1),
    "smoothing": ({"label_smoothing": 0.2}, -100),
    "smoothing, weight": ({"label_smoothing": 0.2, "weight": WEIGHT.double()}, -100),
}


@pytest.mark.parametrize("name", CLASSIFICATIONS)
@given(cuts=cut_lists, places=st.sampled_from([(), (3,), (2, 2)]), seed=st.integers(0, 99))
@pytest.mark.slow(keep=6)
def test_cross_entropy_in_pieces_is_torchs_mean(name: str, cuts: list[int], places: tuple[int, ...], seed: int) -> None:
    keywords, ignored = CLASSIFICATIONS[name]
    loss = nn.CrossEntropyLoss(**keywords)
    output = numbers(11, 5, *places, seed=seed)
    target = labels(11, *places, seed=seed, ignored=ignored, blank=4)
    for got, expected in zip(in_pieces(loss, output, target, cuts), whole(loss, output, target), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("name", [name for name in CLASSIFICATIONS if "smoothing" not in name])
@given(cuts=cut_lists)
def test_nll_in_pieces_is_torchs_mean(name: str, cuts: list[int]) -> None:
    keywords, ignored = CLASSIFICATIONS[name]
    loss = nn.NLLLoss(**keywords)
    output, target = numbers(11, 5, 2).log_softmax(1), labels(11, 2, ignored=ignored, blank=4)
    for got, expected in zip(in_pieces(loss, output, target, cuts), whole(loss, output, target), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


OTHERS: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
    "MSELoss": (nn.MSELoss(), lambda t: t),
    "L1Loss": (nn.L1Loss(), lambda t: t),
    "SmoothL1Loss": (nn.SmoothL1Loss(beta=0.3), lambda t: t),
    "HuberLoss": (nn.HuberLoss(delta=0.5), lambda t: t),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), lambda t: t.sigmoid()),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT.double()), lambda t: t.sigmoid()),
    "KLDivLoss": (nn.KLDivLoss(), lambda t: t.softmax(1)),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), lambda t: t.softmax(1)),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), lambda t: t.exp().floor()),
    "SoftMarginLoss": (nn.SoftMarginLoss(), lambda t: t.sign()),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), lambda t: t.sign()),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), lambda t: (t > 0).double()),
    "MultiMarginLoss": (nn.MultiMarginLoss(weight=WEIGHT.double()), lambda t: t.argmax(1)),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), lambda t: t.argsort(1)),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHT.double(), label_smoothing=0.1), lambda t: t.softmax(1)),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both the batch size:UserWarning")
@pytest.mark.parametrize("name", OTHERS)
@given(cuts=cut_lists)
@pytest.mark.slow(keep=8)
def test_the_others_in_pieces_are_torchs_mean(name: str, cuts: list[int]) -> None:
    loss, as_target = OTHERS[name]
    output, target = numbers(11, 5), as_target(numbers(11, 5, seed=2))
    for got, expected in zip(in_pieces(loss, output, target, cuts), whole(loss, output, target), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@given(cuts=cut_lists)
def test_bce_in_pieces_is_torchs_mean(cuts: list[int]) -> None:
    loss, output, target = nn.BCELoss(), numbers(11, 5).sigmoid(), numbers(11, 5, seed=2).sigmoid()
    for got, expected in zip(in_pieces(loss, output, target, cuts), whole(loss, output, target), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@given(cuts=cut_lists, ignore_index=st.sampled_from([-100, 3]))
def test_next_token_loss_weighs_tokens_not_samples(cuts: list[int], ignore_index: int) -> None:
    """Samples of very different lengths, padded with ignored targets (C027)."""
    output, target = numbers(8, 12, 5), labels(8, 12, ignored=ignore_index)
    for row, length in enumerate((3, 12, 2, 8, 0, 0, 1, 5)):
        target[row, length:] = ignore_index
    reference = partial(F.cross_entropy, ignore_index=ignore_index)
    expected = whole(lambda o, t: reference(o.flatten(0, 1), t.flatten()), output, target)
    for got, want in zip(in_pieces(NextTokenLoss(ignore_index), output, target, cuts), expected, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


# ---- functions of the user's -------------------------------------------------------------------------------------


def pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count), the count a tensor, and no `count` to ask."""
    kept = target >= 0
    return ((output - target).pow(2) * kept).sum(), kept.sum()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def scaled_mean(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    return scale * mean(output, target)


def ignoring(output: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, int]:
    loss = NextTokenLoss(ignore_index)
    return loss(output, target)


class Masked:
    """One mean over what it counts; NaN where that is nothing."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2)[target >= 0].mean()

    def count(self, target: Tensor) -> int:
        return int((target >= 0).sum())


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * mean(output, target)


@given(cuts=cut_lists)
def test_a_pair_is_taken_as_it_is(cuts: list[int]) -> None:
    output, target = numbers(11, 3), numbers(11, 3, seed=2)
    total, count = pair(output, target)
    got, gradient = in_pieces(pair, output, target, cuts)
    torch.testing.assert_close(got, total / count, **CLOSE)
    torch.testing.assert_close(gradient, 2 * (output - target) * (target >= 0) / count, **CLOSE)


@pytest.mark.parametrize(
    "loss", [mean, partial(scaled_mean, scale=3.0), Module()], ids=["function", "partial", "module"]
)
@given(cuts=cut_lists)
def test_one_mean_counts_as_its_samples(loss: Callable[..., Tensor], cuts: list[int]) -> None:
    output, target = numbers(11, 3), numbers(11, 3, seed=2)
    assert make_loss(loss).count(target, describe(output)) == 11
    for got, expected in zip(in_pieces(loss, output, target, cuts), whole(loss, output, target), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@given(cuts=cut_lists)
def test_one_mean_over_what_it_counts(cuts: list[int]) -> None:
    output, target = numbers(11, 3), numbers(11, 3, seed=2)
    target[:5] = -1
    for got, expected in zip(in_pieces(Masked(), output, target, cuts), whole(Masked(), output, target), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


def test_a_mean_of_an_output_that_is_a_nesting() -> None:
    def loss(output: dict[str, Any], target: tuple[Tensor, str]) -> Tensor:
        return (output["a"] - target[0]).pow(2).mean() * output["n"]

    output, target = {"a": numbers(4, 2), "n": 3}, (numbers(4, 2, seed=2), "x")
    made = make_loss(loss)
    assert made.count(target, describe(output)) == 4
    torch.testing.assert_close(made(output, target), 12 * (output["a"] - target[0]).pow(2).mean())
    assert made.scored(output, target) is None


def test_the_count_is_found_without_the_output() -> None:
    """A pair without `count` is asked with a stand-in, in no_grad; one with it is not called at all."""
    calls: list[tuple[bool, bool]] = []

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        calls.append((bool((output == 1 / 2).all()), torch.is_grad_enabled()))
        return (output - target).sum(), 7

    target = numbers(4, 2)
    assert make_loss(loss).count(target, describe(numbers(4, 2))) == 7
    assert calls == [(True, False)]
    with pytest.raises(ValueError, match=r"has no count\(target\)"):
        make_loss(loss).count(target, None)
    assert NextTokenLoss().count(torch.tensor([[1, -100]])) == make_loss(NextTokenLoss()).count(
        torch.tensor([[1]]), None
    )


# ---- nothing scored, many in flight ------------------------------------------------------------------------------

IGNORING: list[Any] = [
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
    nn.NLLLoss(),
]


@pytest.mark.parametrize("loss", IGNORING, ids=repr)
def test_a_micro_batch_without_scored_targets_adds_exactly_nothing(loss: nn.Module) -> None:
    made, target = make_loss(loss), torch.full((3,), -100)
    output = (100 * torch.randn(3, 5)).log_softmax(1).requires_grad_()
    total = made(output, target)
    total.backward()
    assert (float(total.detach()), made.count(target, None)) == (0.0, 0)
    assert output.grad is not None
    assert torch.equal(output.grad, torch.zeros(3, 5))
    assert made.scored(output, target) == (0, 0)


def test_a_mean_over_nothing_adds_nothing() -> None:
    made, target = make_loss(Masked()), torch.full((3,), -1.0)
    total = made(torch.randn(3, requires_grad=True), target)
    assert (float(total), total.requires_grad, made.count(target, None)) == (0.0, False, 0)


def test_micro_batches_in_flight_keep_losses_of_their_own() -> None:
    """All forwards first: each sum is its own, and its graph too (C028)."""
    made = make_loss(nn.MSELoss())
    outputs = [torch.zeros(2, 3, requires_grad=True) for _ in range(4)]
    sums = [made(output, torch.full((2, 3), float(k))) for k, output in enumerate(outputs)]
    assert [float(total.detach()) for total in sums] == [0.0, 6.0, 24.0, 54.0]
    for total in sums:
        total.backward()
    assert [float(output.grad[0, 0]) for output in outputs if output.grad is not None] == [0.0, -2.0, -4.0, -6.0]


# ---- sections, reductions, precision -----------------------------------------------------------------------------


def test_reduction_sum_trains_as_mean_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    output, target = numbers(6, 5), labels(6)
    mean_of, grad_of = in_pieces(nn.CrossEntropyLoss(), output, target, [2])
    assert not caplog.records
    got, gradient = in_pieces(nn.CrossEntropyLoss(reduction="sum"), output, target, [1, 4])
    torch.testing.assert_close((got, gradient), (mean_of, grad_of), **CLOSE)
    assert "reduction=sum" in caplog.text


def test_the_module_given_is_left_as_it_was() -> None:
    module = nn.MSELoss()
    make_loss(module)
    assert module.reduction == "mean"


@pytest.mark.parametrize(
    "section",
    [
        {"_target_": "torch.nn.CrossEntropyLoss", "weight": WEIGHT.tolist(), "ignore_index": 1},
        {"_target_": "torch.nn.functional.cross_entropy", "weight": WEIGHT.tolist(), "ignore_index": 1},
        {
            "_target_": "torch.nn.CrossEntropyLoss",
            "weight": {"_target_": "torch.tensor", "_args_": [WEIGHT.tolist()]},
            "ignore_index": 1,
        },
    ],
    ids=["class", "function", "nested"],
)
def test_sections_of_torchs_losses(section: dict[str, Any]) -> None:
    output, target = numbers(9, 5).float(), labels(9, ignored=1)
    made = make_loss(section)
    mean_of = made(output, target) / made.count(target, None)
    torch.testing.assert_close(mean_of, nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1)(output, target))


def factory(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(scaled_mean, scale=scale)


@pytest.mark.parametrize("name", ["scaled_mean", "factory"])
def test_sections_of_a_function_and_of_a_factory(name: str) -> None:
    made = make_loss({"_target_": f"{__name__}.{name}", "scale": 3.0})
    output, target = numbers(4, 2), numbers(4, 2, seed=2)
    torch.testing.assert_close(made(output, target), 12 * mean(output, target))


@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_weights_are_used_in_the_outputs_precision(own: torch.dtype) -> None:
    output, target, weight = numbers(6, 5), labels(6), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=own)
    made = make_loss(nn.CrossEntropyLoss(weight=weight))
    got = made(output, target) / made.count(target, None)
    torch.testing.assert_close(got, nn.CrossEntropyLoss(weight=weight.double())(output, target), **CLOSE)
    got = made(output.float(), target) / made.count(target, None)
    torch.testing.assert_close(got, nn.CrossEntropyLoss(weight=weight.float())(output.float(), target))
    with torch.autocast("cpu", torch.bfloat16):
        assert made(output.bfloat16(), target).dtype == torch.float32


class Halved(nn.MSELoss):
    """A torch class with a forward of its own: what that returns is a mean, as for any module."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input, target) / 2


def test_a_subclass_with_its_own_forward_is_the_users() -> None:
    output, target = numbers(4, 2), numbers(4, 2, seed=2)
    made = make_loss(Halved())
    assert made.count(target, describe(output)) == 4
    torch.testing.assert_close(made(output, target), 4 * F.mse_loss(output, target) / 2)


# ---- accuracy ----------------------------------------------------------------------------------------------------


def test_scored_counts_hits_among_targets_that_are_not_ignored() -> None:
    output = torch.eye(4)[torch.tensor([0, 1, 2, 3, 0])]
    target = torch.tensor([0, 1, 3, -100, 0])
    assert scored(output, target, -100) == (3, 4)
    assert scored(output, target, 1) == (2, 4)


def test_scored_finds_the_classes() -> None:
    target = labels(3, 4, classes=5)
    output = F.one_hot(target, 5).float()
    assert scored(output, target, -100) == (12, 12)
    assert scored(output.transpose(1, 2), target, -100) == (12, 12)
    square = F.one_hot(labels(2, 5), 5).float()  # [2, 5, 5]: torch's losses have the classes in dimension 1
    assert make_loss(nn.CrossEntropyLoss()).scored(square.transpose(1, 2), labels(2, 5)) == (10, 10)
    assert make_loss(NextTokenLoss()).scored(square, labels(2, 5)) == (10, 10)
    asked = make_loss(partial(ignoring, ignore_index=0))
    assert asked.scored(output, target) == (int((target != 0).sum()),) * 2
    assert make_loss(NextTokenLoss(ignore_index=0)).scored(output, target) == ((n := int((target != 0).sum())), n)


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.randn(4, 3), torch.randn(4, 3)),
        (torch.randn(4, 1), torch.zeros(4, dtype=torch.long)),
        (torch.randn(4, 3), torch.zeros(4, 3, dtype=torch.long)),
        (torch.randn(4, 3), torch.zeros(4, dtype=torch.bool)),
        (torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long)),
        ({"a": torch.randn(4, 3)}, torch.zeros(4, dtype=torch.long)),
        (torch.randn(4), torch.zeros(4, dtype=torch.long)),
    ],
)
def test_scored_is_none_where_accuracy_means_nothing(output: Any, target: Tensor) -> None:
    assert scored(output, target, -100) is None


def test_a_regression_has_no_accuracy() -> None:
    assert make_loss(nn.MultiMarginLoss()).scored(torch.randn(4, 3), torch.zeros(4, dtype=torch.long)) is None


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.TripletMarginLoss(), "torch.nn.TripletMarginLoss does not compare .*CrossEntropyLoss.*returns \\(sum"),
        (nn.CrossEntropyLoss(reduction="none"), "reduction=none gives no scalar"),
        (nn.Linear(2, 2), "Linear has parameters; make them a layer of the model"),
        (3, "model.loss is an int, which cannot be called"),
        (
            {"_target_": "torch.nn.CrossEntropyLos"},
            "there is no CrossEntropyLos in torch.nn; did you mean CrossEntropyL",
        ),
        ({"_target_": "torch.nn.MSELoss", "reductoin": "sum"}, "model.loss.reductoin: .*did you mean reduction"),
        ({}, "model.loss has no _target_"),
    ],
)
def test_what_cannot_serve_as_a_loss_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loss(loss)


def test_numbers_are_compared_in_one_shape() -> None:
    """Broadcasting [N, 1] against [N] would compare every sample with every other, silently."""
    with pytest.raises(ValueError, match=r"gives \[4, 1\] for targets of \[4\]: give them one shape"):
        make_loss(nn.MSELoss())(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(3), r"returned a tensor of shape \[3\]; it must return \(sum, count\), or one mean"),
        (None, "returned NoneType; it must return"),
        ((torch.zeros(()), "many"), "counts 'many'; a count is a number"),
        ((torch.zeros(()), -1), "counts -1; a count is a number"),
        ((torch.zeros(()), torch.tensor(torch.nan)), "counts nan; a count is a number"),
    ],
)
def test_what_a_loss_may_not_return(result: Any, message: str) -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        return result

    with pytest.raises(ValueError, match=message):
        make_loss(loss).count(torch.zeros(3), describe(torch.zeros(3)))
