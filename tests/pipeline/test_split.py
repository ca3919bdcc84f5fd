"""Backward in two halves equals the whole, bit for bit, whatever a stage holds; and what each half keeps."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import Swallow

from engine.pipeline.stage.split import Later, Routing
from engine.pipeline.stage.stage import Draw, Stage, StageLayer
from models.sleep import Sleeper

WIDTH = 6


def trained(model: nn.Module, xs: list[Tensor], halves: bool) -> dict[str, Any]:
    """All forwards of some micro-batches, then their backwards, whole or I after I and then W after W."""
    model.zero_grad()
    outputs, inputs, laters = [], [], []
    for x in xs:
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_(x.is_floating_point())
        later = Later()
        if halves:
            with Routing(later):
                outputs.append(model(leaf))
        else:
            outputs.append(model(leaf))
        inputs.append(leaf)
        laters.append(later)
    after_input = []
    for y, later in zip(outputs, laters, strict=True):
        loss = (y * y.detach().cos()).sum()
        if halves:
            later.backward([loss], [None])
        else:
            loss.backward()
    if halves:
        after_input = [name for name, p in model.named_parameters() if p.grad is not None]
        for later in laters:
            later.run()
    grads = {f"grad of {name}": p.grad for name, p in model.named_parameters()}
    return {"y": outputs, "x": [leaf.grad for leaf in inputs], **grads, "at once": after_input}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b is None or (torch.equal(a, b) and a.stride() == b.stride())


def check(model: nn.Module, *shape: int, at_once: str = "", layout: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """Two micro-batches: equal to the bit, layouts included. `at_once`: parameters that I alone takes care of."""
    xs = [layout(torch.randn(shape)) for _ in range(2)]
    whole, halves = trained(model, xs, False), trained(model, xs, True)
    for what, value in whole.items():
        if what != "at once":
            assert same(value, halves[what]), what
    assert halves["at once"] == at_once.split()


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def precision(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


class Free(nn.Module):
    """Two linear maps, and a function of them and the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


# ---- what is put off ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(WIDTH,), (5, WIDTH), (1, WIDTH), (4, 5, WIDTH), (2, 3, 5, WIDTH), (0, WIDTH)])
def test_linear(precision: None, shape: tuple[int, ...], bias: bool) -> None:
    for outputs in (1, 5):
        check(nn.Linear(WIDTH, outputs, bias=bias), *shape)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(WIDTH, 5), (WIDTH, 5, 4)])
def test_linear_of_an_input_that_is_not_contiguous(precision: None, shape: tuple[int, ...], bias: bool) -> None:
    """Column-major matrices, whose products torch takes transposed; and more dimensions, where the bias is added."""
    at_once = "m.bias" if bias and len(shape) == 3 else ""

    class Transposed(nn.Module):
        def __init__(self, m: nn.Module) -> None:
            super().__init__()
            self.m = m

        def forward(self, x: Tensor) -> Tensor:
            return self.m(x.transpose(0, -1))

    check(Transposed(nn.Linear(WIDTH, 5, bias=bias)), *shape, at_once=at_once)


def test_linear_of_a_weight_that_lies_column_after_column(precision: None) -> None:
    for inputs, outputs, rows in ((WIDTH, 5, 4), (67, 129, 257)):
        model = nn.Linear(inputs, outputs)
        model.weight = nn.Parameter(torch.randn(inputs, outputs).t())
        check(model, rows, inputs)
        check(nn.Linear(inputs, outputs), inputs, rows, layout=lambda x: x.t())


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.slow(keep=43)
def test_convolutions(precision: None, dims: int, groups: int, mode: Any) -> None:
    if dims == 3 and mode == "reflect":
        mode = "zeros"
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    for options in ({}, {"stride": 2, "bias": False}, {"dilation": 2}, {"padding": "valid"}):
        convolution = kind(4, 8, 3, **({"padding": 1, "padding_mode": mode, "groups": groups} | options))
        check(convolution, 2, 4, *[7, 6, 5][:dims])
    check(kind(4, 8, 3, groups=groups), 4, *[7, 6, 5][:dims])  # a single sample


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_same_padding_of_odd_and_even_kernels(precision: None) -> None:
    check(nn.Conv2d(2, 3, (3, 5), padding="same"), 2, 2, 7, 8)
    check(nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(3, 2)), 2, 2, 7, 8)
    check(nn.Conv1d(2, 3, 4, padding="same"), 2, 2, 9)


def test_channels_last_stays_so(precision: None) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check(model, 2, 3, 6, 6, layout=lambda x: x.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention(precision: None, batch_first: bool) -> None:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.MultiheadAttention(8, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            return self.m(x, x, x)[0]

    check(Self(), 4, 3, 8, at_once="m.in_proj_bias" if batch_first else "")
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
    norms = "norm1.weight norm1.bias norm2.weight norm2.bias"
    check(layer, 4, 3, 8, at_once=f"self_attn.in_proj_bias {norms}" if batch_first else norms)


def test_attention_to_something_else_uses_parts_of_its_weight(precision: None) -> None:
    """Queries, keys and values of three inputs: the packed weight is cut, and its parts are no parameters."""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.m(x, x.sin(), x.cos(), need_weights=False)[0]

    check(Cross(), 4, 3, 8, at_once="m.in_proj_weight m.in_proj_bias")


def test_attention_built_of_linear_maps(precision: None) -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.a(x).chunk(3, -1)
        return m.b(F.scaled_dot_product_attention(q, k, v, is_causal=True).repeat(1, 1, 3))

    check(Free(attend), 4, 5, WIDTH)


def test_in_several_uses_of_a_module_contributions_are_summed_as_autograd_sums_them(precision: None) -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    check(nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared, nn.Sigmoid(), shared), 5, WIDTH)
    check(Free(lambda m, x: m.a(x) * m.b(x) + m.a(m.b(x)) - m.a(x.sin()) * m.b(m.a(x))), 5, WIDTH)
    conv = nn.Conv1d(4, 4, 3, padding=1)
    check(nn.Sequential(conv, nn.Tanh(), conv, nn.Tanh(), conv), 2, 4, 6)


def test_autocast(precision: None) -> None:
    """Contributions are summed in bfloat16 before they become float32, as behind autocast's cached weights."""

    class Autocast(nn.Module):
        def __init__(self, m: nn.Module) -> None:
            super().__init__()
            self.m = m

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.m(x).float()

    torch.set_default_dtype(torch.float32)
    shared = nn.Linear(WIDTH, WIDTH)
    norm = nn.LayerNorm(WIDTH)
    check(Autocast(nn.Sequential(shared, nn.Tanh(), shared, norm, shared)), 5, 4, WIDTH, at_once="m.3.weight m.3.bias")
    check(Autocast(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2))), 2, 3, 9, 9)


# ---- several outputs (a partial walk through the graph mixes their gradients) ------------------------------------


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return 2 * a + 3 * b


@pytest.mark.parametrize(
    "parts",
    [
        lambda h: h.chunk(2, -1),
        lambda h: h.split([2, 4], -1),
        lambda h: h.unbind(0),
        Pair.apply,
        lambda h: torch.var_mean(h, -1),
        lambda h: h.sort(-1)[:1] * 2,
    ],
    ids=["chunk", "split", "unbind", "custom", "var_mean", "sort"],
)
def test_several_outputs(precision: None, parts: Callable[[Tensor], Any]) -> None:
    def mixed(m: Any, x: Tensor) -> Tensor:
        a, b = parts(m.a(x))[:2]
        return m.b((a.mean() * 2 + b.mean() ** 2) * x)

    check(Free(mixed), 5, WIDTH)


def test_stage_with_several_outputs(precision: None) -> None:
    """I starts from several gradients at once; one of them is absent."""
    found = []
    for halves in (False, True):
        torch.manual_seed(1)
        model = Free(lambda m, x: (m.a(x), m.b(x).chunk(2, -1)))  # type: ignore[arg-type,return-value]
        stage = Stage(0, [StageLayer(0, "m", model)], torch.device("cpu"), 0)
        x = torch.randn(4, WIDTH)
        (a, (_, c)), _ = stage.forward(0, None, x, None, Draw(0, 0, 0), None, 4, halves)
        gradients = [torch.ones_like(a), None, torch.ones_like(c)]
        if halves:
            stage.backward_input(0, gradients, None)
            assert all(p.grad is None for p in model.parameters())
            stage.backward_weight(0)
        else:
            stage.backward(0, gradients, None)
        found.append([p.grad for p in model.parameters()])
    assert same(*found)


def test_stage_that_hands_on_a_parameter(precision: None) -> None:
    """The gradient that comes back for it is one of its uses: all of them are summed before they are added."""
    found = []
    for halves in (False, True):
        torch.manual_seed(1)
        model = Free(lambda m, x: (m.b(m.a(x)), m.a.weight))  # type: ignore[arg-type,return-value]
        stage = Stage(0, [StageLayer(0, "m", model)], torch.device("cpu"), 0)
        for microbatch in range(3):
            x = torch.randn(4, WIDTH)
            (y, _), _ = stage.forward(microbatch, None, x, None, Draw(0, microbatch, 0), None, 4, halves)
            gradients = [torch.randn_like(y), torch.randn_like(model.a.weight)]
            if halves:
                stage.backward_input(microbatch, gradients, None)
                assert stage.waiting(microbatch) == {model.b.weight, model.b.bias, model.a.bias}
                stage.backward_weight(microbatch)
            else:
                stage.backward(microbatch, gradients, None)
        found.append([p.grad for p in model.parameters()])
    assert same(*found)


# ---- what is not put off -----------------------------------------------------------------------------------------


def test_everything_else_is_done_at_once(precision: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Unflatten(-1, (4, 2)), nn.BatchNorm1d(4), nn.PReLU())
    check(model, 5, 8, at_once="1.weight 1.bias 3.weight 3.bias 4.weight")
    check(nn.ConvTranspose1d(2, 3, 3), 4, 2, 5, at_once="weight bias")

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.r = nn.Embedding(9, WIDTH), nn.GRU(WIDTH, 3)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.r(self.e((x.abs() * 9).long().clamp(max=8)))[0])

    recurrent = "r.weight_ih_l0 r.weight_hh_l0 r.bias_ih_l0 r.bias_hh_l0"
    check(Words(), 4, 3, at_once=f"e.weight {recurrent}")


@pytest.mark.parametrize(
    ("function", "at_once"),
    [
        (lambda m, x: m.a(x) * m.a.weight.sum() + m.a(x.sin()), "a.weight"),
        (lambda m, x: m.a(x) + F.embedding(torch.arange(5), m.a.weight), "a.weight"),
        (lambda m, x: F.linear(m.a.weight, m.a.weight)[:5] * m.b(x), "a.weight"),
        (lambda m, x: F.linear(x, m.b.weight.t()) + m.b(x) * m.b.bias, "b.weight b.bias"),
        (lambda m, x: F.linear(x, m.a.weight * 2) + Pair.apply(m.b.bias)[0], "a.weight b.bias"),
        (lambda m, x: F.linear(x, m.a.weight, m.b.bias * 2), "a.weight b.bias"),
    ],
    ids=["scalar", "tied", "itself", "transposed", "computed", "computed bias"],
)
def test_a_parameter_with_another_use_goes_wholly_into_the_first_half(
    precision: None, function: Any, at_once: str
) -> None:
    check(Free(function), 5, WIDTH, at_once=at_once)


def test_parametrized_weights_are_done_at_once(precision: None) -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    check(model, 5, WIDTH, at_once="bias parametrizations.weight.original0 parametrizations.weight.original1")


def test_frozen_parameters(precision: None) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[3].requires_grad_(False)
    check(model, 5, WIDTH, at_once="0.bias")


# ---- what layers may do ------------------------------------------------------------------------------------------


def test_in_place_operations(precision: None) -> None:
    check(Free(lambda m, x: m.b(m.a(x).mul_(2).relu_())), 5, WIDTH)

    def into_a_view(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h[:, 0].mul_(3)
        h.add_(1)
        return m.b(h)

    check(Free(into_a_view), 5, WIDTH)


def test_a_saved_input_that_is_changed_in_place_is_refused_as_ever() -> None:
    def spoil(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        y = m.b(h)
        h.add_(1)
        return y

    for halves in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trained(Free(spoil), [torch.randn(5, WIDTH)], halves)


def _with_gradient(m: Any, x: Tensor, create_graph: bool) -> Tensor:
    """A layer that differentiates in its forward, as models of forces do."""
    with torch.enable_grad():
        energy = m.a(x).tanh().pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=create_graph)
    return m.b(x) + force


def test_gradients_taken_in_a_forward(precision: None) -> None:
    check(Free(lambda m, x: _with_gradient(m, x, False)), 5, WIDTH)
    check(Free(lambda m, x: _with_gradient(m, x, True)), 5, WIDTH, at_once="a.weight")


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_recomputed_in_their_backward(precision: None, reentrant: bool, create_graph: bool) -> None:
    """Square weights: a second forward that saved other tensors than the first would go unnoticed."""

    def recomputed(m: Any, x: Tensor) -> Tensor:
        return m.b(checkpoint(lambda y: m.a(y).tanh().sin(), x, use_reentrant=reentrant))

    def differentiated(m: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: _with_gradient(m, y, create_graph), x, use_reentrant=reentrant)

    check(Free(recomputed), 5, WIDTH, at_once="a.weight a.bias" if reentrant else "")
    if not (reentrant and create_graph):
        names = "b.weight b.bias" if reentrant else "a.weight" if create_graph else ""
        check(Free(differentiated), 5, WIDTH, at_once=names)


def test_vmap_and_no_grad_in_a_forward(precision: None) -> None:
    check(Free(lambda m, x: torch.func.vmap(m.a)(x) + m.b(x)), 5, WIDTH, at_once="a.weight a.bias")
    check(Free(lambda m, x: torch.no_grad()(m.a)(x) + m.b(x)), 5, WIDTH)


def test_tensors_with_overrides_of_their_own_keep_them() -> None:
    seen = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    with Routing(Later()):
        nn.Linear(2, 2)(torch.randn(1, 2).as_subclass(Watched))
    assert F.linear in seen


def test_an_absent_gradient_stays_absent() -> None:
    check(Free(lambda m, x: Swallow.apply(m.a(x)) + m.b(x)), 5, WIDTH)
    model = Free(lambda m, x: Swallow.apply(m.a(x)) + m.b(x))
    trained(model, [torch.randn(5, WIDTH)], True)
    assert model.a.weight.grad is None and model.a.bias.grad is None


def test_hooks_of_a_parameter_run_once_for_each_micro_batch() -> None:
    model = nn.Sequential(shared := nn.Linear(WIDTH, WIDTH), nn.Tanh(), shared)
    calls: list[str] = []
    shared.weight.register_hook(lambda grad: calls.append("gradient"))
    shared.weight.register_post_accumulate_grad_hook(lambda _: calls.append("added"))
    assert trained(model, [torch.randn(5, WIDTH)] * 3, True)["at once"] == ["0.weight"]
    assert calls == ["gradient", "added"] * 3


# ---- what is kept ------------------------------------------------------------------------------------------------


def test_what_only_the_first_half_needed_is_released_after_it() -> None:
    """tanh needs its output in I alone; the second linear map needs its input and its output's gradient until W."""
    seen: dict[str, weakref.ref[Any]] = {}

    class Keep(torch.autograd.Function):
        """The identity; its output is a tensor of its own, and so is its gradient."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            y = x.clone()
            seen[name] = weakref.ref(y.untyped_storage())
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            grad = grad.clone()
            seen[f"gradient of {ctx.name}"] = weakref.ref(grad.untyped_storage())
            return grad, None

    def forward(m: Any, x: Tensor) -> Tensor:
        inner = Keep.apply(m.a(x).exp(), "only I")
        return Keep.apply(m.b(Keep.apply(inner.sigmoid() * inner, "W")), "out").sum()

    def alive() -> set[str]:
        return {name for name, storage in seen.items() if storage() is not None}

    model, later = Free(forward), Later()
    with Routing(later):
        loss = model(torch.randn(4, WIDTH))
    assert alive() >= {"only I", "W"}
    later.backward([loss], [None])
    del loss
    assert alive() == {"W", "gradient of out"}
    held = 4 * WIDTH * 4
    assert later.nbytes == 4 * held  # of each of the two maps: the input and the output's gradient
    later.run()
    assert alive() == set()
    assert later.nbytes == 0


def test_a_stage_counts_what_is_kept_for_the_second_half() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, 2))
    stage = Stage(0, [StageLayer(0, "m", model)], torch.device("cpu"), 0)
    for m in range(2):
        stage.forward(m, None, torch.randn(3, WIDTH), None, Draw(0, m, 0), torch.sum, 3, halves=True)
    before = stage.live_bytes
    stage.backward_input(0, None, 1.0)
    assert stage.in_flight == 1
    kept = 4 * 3 * (WIDTH + 50) + 4 * 3 * 50 + 4  # inputs of the two maps, gradients of their outputs (one expanded)
    assert stage.live_bytes == before // 2 + kept
    stage.backward_weight(0)
    assert stage.live_bytes == before // 2


# ---- threads, and functions with a backward of their own ---------------------------------------------------------


def test_a_mode_belongs_to_its_thread() -> None:
    """A stage that is routed leaves one in another thread plain."""
    names: list[str] = []

    def elsewhere() -> None:
        names.append(type(nn.Linear(2, 2)(torch.randn(1, 2)).grad_fn).__name__)

    with Routing(Later()):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        elsewhere()
    assert names[0] == "AddmmBackward0"
    assert "Routed" in names[1]


def test_a_whole_backward_is_plain_torch() -> None:
    """Nothing is routed for a micro-batch whose backward comes whole."""
    stage = Stage(0, [StageLayer(0, "m", nn.Linear(2, 2))], torch.device("cpu"), 0)
    output, _ = stage.forward(0, None, torch.randn(1, 2), None, Draw(0, 0, 0), None, 1)
    assert type(output.grad_fn).__name__ == "AddmmBackward0"


def test_sleep_is_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    layer, later = Sleeper(4, 1.0, 2.0, 4.0), Later()
    with Routing(later):
        y = layer(torch.randn(3, 4))
    later.backward([y.sum()], [None])
    assert slept == [0.001, 0.002]
    later.run()
    assert slept == [0.001, 0.002, 0.004]
    layer(torch.randn(3, 4)).sum().backward()
    assert slept[3:] == pytest.approx([0.001, 0.006])
