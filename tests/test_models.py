"""Models: published sizes, names, work and behaviour; every one is a plain sequence of layers that trains."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from models import gpt as gpt_module
from models import mlp as mlp_module
from models import resnet
from models import sleep as sleep_module
from models.gpt import NextTokenLoss, gpt
from models.mlp import mlp
from models.resnet import resnet18, resnet34, resnet50, resnet101
from models.sleep import sleep

Layers = list[tuple[str, Callable[[], nn.Module]]]


def built(layers: Layers) -> dict[str, nn.Module]:
    return {name: factory() for name, factory in layers}


def state_of(layers: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.state_dict().items()}


def parameters_of(layers: dict[str, nn.Module]) -> dict[str, int]:
    return {f"{name}.{key}": p.numel() for name, layer in layers.items() for key, p in layer.named_parameters()}


def faked(layers: Layers) -> dict[str, nn.Module]:
    with FakeTensorMode():
        return built(layers)


# ---- ResNet ------------------------------------------------------------------------------------------------------

PARTS = {  # REFERENCE 3: parameters, G multiply-adds at 224 x 224, output there and at 128 x 128
    "stem": (9_536, 0.1180, (64, 56), (64, 32)),
    "layer1": (215_808, 0.6679, (256, 56), (256, 32)),
    "layer2": (1_219_584, 1.0276, (512, 28), (512, 16)),
    "layer3": (7_098_368, 1.4643, (1024, 14), (1024, 8)),
    "layer4": (14_964_736, 0.8092, (2048, 7), (2048, 4)),
    "fc": (2_049_000, 0.0020, (1000, 0), (1000, 0)),
}


def part(name: str) -> str:
    head = name.partition(".")[0]
    return "stem" if head in ("conv1", "bn1", "relu", "maxpool") else "fc" if head in ("avgpool", "flatten") else head


def test_resnet50_has_the_published_size() -> None:
    sizes = parameters_of(faked(resnet50()))
    assert (sum(sizes.values()), len(sizes)) == (25_557_032, 161)
    by_part = {name: sum(n for key, n in sizes.items() if part(key) == name) for name in PARTS}
    assert by_part == {name: figures[0] for name, figures in PARTS.items()}
    assert sum(by_part[name] for name in ("stem", "layer1", "layer2")) == 1_444_928


@pytest.mark.parametrize(
    ("model", "parameters"), [(resnet18, 11_689_512), (resnet34, 21_797_672), (resnet101, 44_549_160)]
)
def test_the_other_depths_have_their_published_sizes(model: Callable[[], Layers], parameters: int) -> None:
    assert sum(parameters_of(faked(model())).values()) == parameters


def test_resnet50_has_torchvisions_keys() -> None:
    """Derived from the architecture by hand: what stands in every published checkpoint of it."""
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    keys = ["conv1.weight", *(f"bn1.{key}" for key in norm)]
    for group, depth in enumerate((3, 4, 6, 3), start=1):
        for index in range(depth):
            block = f"layer{group}.{index}"
            for number in (1, 2, 3):
                keys += [f"{block}.conv{number}.weight", *(f"{block}.bn{number}.{key}" for key in norm)]
            if index == 0:
                keys += [f"{block}.downsample.0.weight", *(f"{block}.downsample.1.{key}" for key in norm)]
    keys += ["fc.weight", "fc.bias"]
    state = state_of(faked(resnet50()))
    assert sorted(state) == sorted(keys)
    assert len(keys) == 320
    assert state["layer2.0.conv2.weight"].shape == (128, 128, 3, 3)
    assert state["layer4.0.downsample.0.weight"].shape == (2048, 1024, 1, 1)
    names = [name for name, _ in resnet50()]
    assert names[:4] == ["conv1", "bn1", "relu", "maxpool"]
    assert names[4] == "layer1.0"
    assert names[-4:] == ["layer4.2", "avgpool", "flatten", "fc"]


@pytest.mark.parametrize("size", [224, 128])
@pytest.mark.slow(keep=1)
def test_resnet50_does_the_published_work(size: int) -> None:
    work = dict.fromkeys(PARTS, 0.0)
    with FakeTensorMode():
        layers = built(resnet50())
        x = torch.empty(1, 3, size, size)
        for name, layer in layers.items():
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                x = layer.eval()(x)
            work[part(name)] += counter.get_total_flops() / 2e9
            if name in ("maxpool", "layer1.2", "layer2.3", "layer3.5", "layer4.2"):
                channels, side = PARTS[part(name)][2 if size == 224 else 3]
                assert tuple(x.shape) == (1, channels, side, side)
    assert tuple(x.shape) == (1, 1000)
    if size == 224:
        assert work == pytest.approx({name: figures[1] for name, figures in PARTS.items()}, abs=6e-5)
    assert sum(work.values()) == pytest.approx({224: 4.0892, 128: 1.3366}[size], abs=6e-5)


def test_resnet_starts_from_he_initialisation() -> None:
    """Variance 2 / (outputs x kernel area); norms at 1 and 0."""
    layers = built(resnet50(width=16, classes=10))
    conv = layers["conv1"].weight
    assert float(conv.detach().std()) == pytest.approx((2 / (16 * 49)) ** 0.5, rel=0.05)
    inner = layers["layer3.1"].conv2.weight
    assert float(inner.detach().std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)
    assert bool((layers["layer3.1"].bn3.weight == 1).all())
    assert bool((layers["layer3.1"].bn3.bias == 0).all())


def test_a_block_with_zero_residual_starts_as_the_identity() -> None:
    x = torch.randn(2, 16, 5, 5)
    for quiet, plain in (
        (resnet.Bottleneck(16, 4, 1, zero_residual=True), resnet.Bottleneck(16, 4, 1)),
        (resnet.Basic(16, 16, 1, zero_residual=True), resnet.Basic(16, 16, 1)),
    ):
        assert torch.equal(quiet(x), x.relu())
        assert not torch.equal(plain(x), x.relu())


# ---- GPT ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "width", "tied"),
    [(12, 768, 124_439_808), (24, 1024, 354_823_168), (36, 1280, 774_030_080), (48, 1600, 1_557_611_200)],
)
@pytest.mark.slow(keep=3)
def test_gpt2_sizes(layers: int, width: int, tied: int) -> None:
    """Published with one matrix as embedding and head; ours has a head of its own."""
    model = faked(gpt(50257, 1024, layers, width, heads=width // 64))
    assert sum(parameters_of(model).values()) == tied + 50257 * width


def test_gpt_looks_back_only() -> None:
    model = nn.Sequential(*built(gpt(vocabulary=11, context=8, layers=2, width=16, heads=2)).values()).double()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 11)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(dim=-1).any()


def test_gpt_tells_positions_apart() -> None:
    model = nn.Sequential(*built(gpt(vocabulary=11, context=8, layers=1, width=16, heads=2)).values())
    output = model(torch.full((1, 4), 3))
    assert not torch.allclose(output[0, 1], output[0, 2])


def test_gpt_attends_as_the_formula_says() -> None:
    attention = gpt_module.Attention(width=8, heads=2, dropout=0.0, spread=0.5).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = attention.qkv(x)[0].split(8, dim=-1)
    mixed = []
    for head in (slice(0, 4), slice(4, 8)):
        scores = (q[:, head] @ k[:, head].T / 2.0).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        mixed.append(scores.softmax(-1) @ v[:, head])
    torch.testing.assert_close(attention(x)[0], attention.out(torch.cat(mixed, -1)), rtol=1e-12, atol=1e-12)


def test_gpt_without_dropout_has_no_dropout_modules_and_with_it_draws_in_training_only() -> None:
    plain = built(gpt(layers=1, width=16))
    assert not any(isinstance(m, nn.Dropout) for layer in plain.values() for m in layer.modules())
    model = nn.Sequential(*built(gpt(layers=1, width=16, dropout=0.5)).values())
    tokens = torch.randint(256, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_starts_near_a_uniform_guess() -> None:
    model = nn.Sequential(*built(gpt()).values())
    tokens = torch.randint(256, (4, 129))
    total, count = NextTokenLoss()(model(tokens[:, :-1]), tokens[:, 1:])
    assert count == 4 * 128
    assert float(total.detach()) / count == pytest.approx(5.545, abs=0.1)  # log 256


def test_gpt_refuses() -> None:
    with pytest.raises(ValueError, match=r"width=30 is not a multiple of model.heads=4"):
        gpt(width=30)
    with pytest.raises(ValueError, match=r"dropout=1.5 is not in \[0, 1\)"):
        gpt(dropout=1.5)
    with pytest.raises(ValueError, match="no tokens, which are integers: use data=text"):
        built(gpt(width=16))["embedding"](torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"9 tokens is longer than the model's context of 8: .*data\.context"):
        built(gpt(context=8, width=16))["embedding"](torch.zeros(1, 9, dtype=torch.long))


# ---- MLP ---------------------------------------------------------------------------------------------------------


def test_mlp_takes_pictures() -> None:
    layers = mlp(features=3 * 4 * 4, hidden=16, depth=2, classes=5)
    assert [name for name, _ in layers] == ["input", "hidden.0", "hidden.1", "head"]
    model = nn.Sequential(*built(layers).values())
    assert model(torch.randn(6, 3, 4, 4)).shape == (6, 5)
    assert sum(p.numel() for p in model.parameters()) == 49 * 16 + 17 * 16 + 17 * 5
    with pytest.raises(ValueError, match=r"shape \[3, 5, 5\] have 75 values.*set model.features=75"):
        model(torch.randn(6, 3, 5, 5))


def test_mlp_without_hidden_layers_is_linear() -> None:
    model = nn.Sequential(*built(mlp(features=8, depth=0, classes=3)).values())
    a, b = torch.randn(2, 1, 8)
    torch.testing.assert_close(model(a + b) + model(0 * a), model(a) + model(b))


@pytest.mark.parametrize("activation", mlp_module.ACTIVATIONS)
def test_mlp_activations_differ(activation: str) -> None:
    x = torch.linspace(-2, 2, 9)[None]
    hidden = mlp_module.Hidden(9, 9, activation, dropout=0.0)
    nn.init.eye_(hidden.linear.weight)
    nn.init.zeros_(hidden.linear.bias)
    expected = {"relu": torch.relu, "gelu": nn.functional.gelu, "tanh": torch.tanh, "silu": nn.functional.silu}
    torch.testing.assert_close(hidden(x), expected[activation](x))


def test_mlp_refuses() -> None:
    with pytest.raises(ValueError, match="activation=swish is not one of relu, gelu, tanh, silu"):
        mlp(activation="swish")
    with pytest.raises(ValueError, match="depth=-1 is negative"):
        mlp(depth=-1)
    with pytest.raises(ValueError, match=r"dropout=1 is not in \[0, 1\)"):
        mlp(dropout=1)


# ---- sleep -------------------------------------------------------------------------------------------------------


def costs(layers: Layers) -> list[tuple[float, float]]:
    """(forward, whole backward) of each layer in milliseconds."""
    modules = built(layers).values()
    sleepers = [m for m in modules if isinstance(m, sleep_module.Sleeper)]
    return [(1e3 * m.forward_s, 1e3 * (m.input_s + m.weight_s)) for m in sleepers]


def test_sleep_has_a_layer_per_stage_and_a_number_is_the_cost_of_a_ranks_slice() -> None:
    assert costs(sleep(stages=4, chunks=1)) == [pytest.approx((5, 10))] * 4
    assert costs(sleep(stages=8, chunks=2, forward_ms=6)) == [pytest.approx((3, 5))] * 8


def test_sleep_takes_costs_as_lists() -> None:
    got = costs(sleep(stages=2, forward_ms=[1, 2, 3, 4], input_backward_ms=[0, 0, 0, 8], weight_backward_ms=6))
    assert got == [pytest.approx(c) for c in [(1, 3), (2, 3), (3, 3), (4, 11)]]


def test_sleep_refuses() -> None:
    with pytest.raises(ValueError, match=r"forward_ms has 2, model.weight_backward_ms has 3"):
        sleep(stages=2, forward_ms=[1, 2], weight_backward_ms=[1, 2, 3])
    with pytest.raises(ValueError, match=r"model.forward_ms=-1 must be"):
        sleep(stages=2, forward_ms=-1)
    with pytest.raises(ValueError, match=r"model.forward_ms=.* must be"):
        sleep(stages=2, forward_ms=[1, "fast"])
    with pytest.raises(ValueError, match=r"model.forward_ms=fast must be"):
        sleep(stages=2, forward_ms="fast")


def test_sleep_sleeps_where_it_runs_and_not_where_shapes_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with FakeTensorMode():
        model = nn.Sequential(*built(sleep(stages=2)).values())
        model(torch.randn(3, 40)).sum().backward()
    assert slept == []
    model = nn.Sequential(*built(sleep(stages=2, input_backward_ms=7)).values())
    output = model(torch.randn(3, 2, 20))  # no input gradient is wanted of the first stage: it costs the same
    assert slept == pytest.approx([0.005, 0.005])
    output.sum().backward()
    assert slept[2:] == pytest.approx([0.012, 0.012])
    with torch.no_grad():
        model(torch.randn(3, 2))
    assert slept[4:] == pytest.approx([0.005, 0.005])


def test_sleep_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(*built(sleep(stages=3)).values())
    x, y = torch.randn(32, 3, 8), torch.arange(32) % 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
