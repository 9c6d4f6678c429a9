"""Gradients: whose memory they lie in, and how they reach inputs that were written to, and overlapping results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fusewright
from fusewright.autograd import halves
from fusewright.base.events import STREAM, Captured, Event

SHARED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": lambda x, y: x + y, "sum of copies": lambda x, y: x * 1 + y * 1, "sums": lambda x, y: (x + y, x - y), "stack": lambda x, y: torch.stack([x, y]),
    "cat": lambda x, y: torch.cat([x[None], y[None]]), "scan of a number": lambda x, y: x.logcumsumexp(0) + y, "turned": lambda x, y: x.mT + y.mT, "totals": lambda x, y: x.sum() + y.sum(),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 1), (2, 3)])
@pytest.mark.parametrize("name", SHARED)
def test_gradients_share_memory_where_eagers_do(name: str, shape: tuple[int, ...]) -> None:
    """Otherwise clipping one in place would clip the other."""
    if name == "turned" and len(shape) < 2:
        pytest.skip("a matrix is turned")
    found = []
    for function in (SHARED[name], fusewright.compile(SHARED[name])):
        x, y = (torch.rand(shape, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (1, 2))
        results = function(x, y)
        results = results if isinstance(results, tuple) else (results,)
        tangents = [torch.ones_like(one) for one in results]
        torch.autograd.backward(results, tangents)
        places = [one.untyped_storage().data_ptr() for one in (x.grad, y.grad, *tangents)]
        found.append([places.index(place) for place in places])
    assert found[0] == found[1]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("layout", ["turned", "gaps", "turned gaps", "plain"])
def test_the_gradient_of_an_input_that_was_written_to(layout: str, dynamic: bool | None) -> None:
    """Its new value, which the graph gives densely, is used besides the result."""
    make = {
        "turned": lambda: torch.arange(16.0).reshape(4, 4).t(), "gaps": lambda: torch.arange(32.0).reshape(4, 8)[:, ::2],
        "turned gaps": lambda: torch.arange(32.0).reshape(4, 8)[:, ::2].t(), "plain": lambda: torch.arange(16.0).reshape(4, 4),
    }[layout]  # fmt: skip

    def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x += y
        return x.relu()

    def later(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = x.exp() * y
        x.mul_(2)
        return result

    weights = torch.arange(16.0).reshape(4, 4)
    for function in (added, later):
        gradients = []
        for run in (function, fusewright.compile(function, dynamic=dynamic)):
            x, y = make() / 16, torch.ones(4, 4, requires_grad=True)
            loss = (run(x, y) * weights).sum() + (x * weights.t()).sum()
            loss.backward()
            gradients.append(y.grad)
        torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_the_gradient_of_overlapping_windows(dynamic: bool | None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).unfold(0, 2, 1)

    compiled = fusewright.compile(function, dynamic=dynamic)
    for size in (5, 7, 2):
        gradients = []
        for run in (function, compiled):
            x = torch.rand(size, requires_grad=True)
            result = run(x)
            (result * torch.arange(float(result.numel())).reshape(result.shape)).sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[1], gradients[0])


TURNED = {
    "view": lambda v: v.view(3, 3, 3),
    "squeeze": lambda v: v.squeeze(0),
    "part": lambda v: v[1:],
    "transposed": lambda v: v.transpose(0, 1),
}


@pytest.mark.parametrize("of_view", [False, True])
@pytest.mark.parametrize("name", TURNED)
def test_views_of_a_tensor_that_is_turned_in_place(name: str, of_view: bool) -> None:
    """A view keeps the gradient that it had before the tensor was turned."""

    def function(x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        view = TURNED[name](made)
        (view if of_view else made).transpose_(0, 2)
        return view * torch.arange(float(view.numel())).view(view.shape) + made.sum()

    gradients = []
    for f in (function, fusewright.compile(function)):
        x = torch.arange(27.0).view(3, 3, 3).requires_grad_()
        f(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


NAN = float("nan")
SPECIAL_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x.max().sqrt(), "min": lambda x: (-x).min().abs().sqrt(), "amax": lambda x: x.amax(0).sqrt(),
    "median": lambda x: (x + 1).median().sqrt(), "nanmedian": lambda x: (x + 1).nanmedian().sqrt(),
    "median of a line": lambda x: (x + 1).median(0)[0].sqrt(), "kthvalue": lambda x: x.kthvalue(3)[0].sqrt(),
    "norm": lambda x: x.norm(p=float("inf")).sqrt(), "cummax": lambda x: x.cummax(0)[0].sqrt().sum(),
    "clamp": lambda x: x.clamp(0.0).sqrt().sum(), "relu": lambda x: x.relu().sqrt().sum(),
    "maximum": lambda x: torch.maximum(x, torch.zeros(3)).sqrt().sum(), "sgn": lambda x: (x * NAN).sgn().sum(),
    "sign over": lambda x: (x * NAN).sign().div(x).sum(), "floor": lambda x: (x * NAN).floor().sum(),
    "celu": lambda x: torch.celu(x * NAN).sum(), "hardtanh": lambda x: torch.nn.functional.hardtanh(x * NAN).sum(),
    "hardswish": lambda x: torch.nn.functional.hardswish(x * NAN).sum(), "abs": lambda x: (x * NAN).abs().sum(),
    "softshrink": lambda x: torch.nn.functional.softshrink(x * NAN).sum(), "gelu": lambda x: torch.nn.functional.gelu(x * NAN).sum(),
}  # fmt: skip


@pytest.mark.parametrize("values", [(0.0, 0.0, -1.0), (0.0, -2.0, -1.0)])
@pytest.mark.parametrize("name", SPECIAL_VALUES)
def test_infinite_gradients_and_those_at_nan(name: str, values: tuple[float, ...]) -> None:
    """What has no part in a result has a gradient of 0, whatever the result's is."""
    found = []
    for function in (SPECIAL_VALUES[name], fusewright.compile(SPECIAL_VALUES[name], fullgraph=True)):
        x = torch.tensor(values, requires_grad=True)
        function(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("result", range(3))
def test_a_result_that_is_not_used_has_no_part_in_the_gradient(result: int, dynamic: bool) -> None:
    """Its formula has no finite slope: zero times infinity would be no number."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 3 + y, x.log() * 2, (y / x).sqrt()

    found = []
    for run in (function, fusewright.compile(function, dynamic=dynamic, fullgraph=True)):
        x, y = (torch.tensor([0.0, 1.0, 4.0], requires_grad=True) for _ in range(2))
        run(x, y)[result].sum().backward()
        found.append((x.grad, y.grad))
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


class TwoHeads(nn.Module):
    """Two results of a body; the factors of the second head's gradient are infinite where its bias is large."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.first, self.second = body, nn.Linear(width, 4), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        y = y.mean((2, 3)) if y.dim() == 4 else y
        return self.first(y), self.second(y[:, 0] if y.dim() == 3 else y).exp()


BODIES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(5, 8)),
    "norm": lambda: (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()), torch.randn(2, 5, 8)),
    "attention": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(2, 5, 8)),
    "images": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.randn(2, 3, 6, 6)),
    "words": lambda: (nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8)), torch.randint(0, 7, (2, 5))),
}


@pytest.mark.parametrize("bias", [0.0, 1000.0], ids=["finite", "infinite"])
@pytest.mark.parametrize("name", BODIES)
def test_a_head_that_is_not_used_has_no_part_in_the_gradients(name: str, bias: float) -> None:
    torch.manual_seed(0)
    body, x = BODIES[name]()
    model = TwoHeads(body, 8)
    nn.init.constant_(model.second.bias, bias)
    found = []
    for run in (model, fusewright.compile(model, fullgraph=True)):
        for _ in range(2):
            model.zero_grad()
            run(x)[0].square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert [one is None for one in found[1]] == [one is None for one in found[0]]
    for ours, eager in zip(found[1], found[0]):
        if eager is not None:
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def test_few_gradients_show_that_zeros_were_multiplied_by_infinity() -> None:
    """Looking at all gradients would take a good part of a step."""
    looked_at = []

    def watched(gradients: list[Any]) -> bool:
        looked_at.append(sum(one.numel() for one in gradients))
        return True

    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)]
    model = TwoHeads(nn.Sequential(nn.Embedding(100, 8), *layers), 8)
    compiled = fusewright.compile(model, fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "_are_finite", watched)
        compiled(torch.randint(0, 100, (2, 5)))[0].sum().backward()
    (elements,) = looked_at
    assert 0 < elements < 100 < sum(one.numel() for one in model.parameters()) / 10


ALONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumprod": lambda x: x.cumprod(0), "its function": lambda x: torch.cumprod(x, -1), "double": lambda x: x.cumprod(0, dtype=torch.float64),
    "cumsum": lambda x: x.cumsum(0), "logcumsumexp": lambda x: x.logcumsumexp(0), "cummax": lambda x: x.cummax(0)[0], "prod": lambda x: x.prod(0),
    "std": lambda x: x.std(0), "sort": lambda x: x.sort(0)[0], "median": lambda x: x.median(0)[0], "softmax": lambda x: x.softmax(0),
    "flip": lambda x: x.flip(0), "diff": lambda x: x.diff(dim=0), "renorm": lambda x: x[None].renorm(2, 0, 1.0), "cdist": lambda x: torch.cdist(x[None], x[None]),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONG)
def test_a_gradient_takes_as_many_operators_for_any_size(name: str) -> None:
    """Some of PyTorch's formulas, which it has for compilers, take one for each element."""
    counts = []

    def count(event: Event) -> None:
        if isinstance(event, Captured) and event.graph is not None:
            counts.append(len(event.graph.nodes))

    for size in (5, 23):
        fusewright.reset()
        compiled = fusewright.compile(ALONG[name], dynamic=False)
        with STREAM.listening(count):
            compiled(torch.rand(size, size).requires_grad_()).sum().backward()
    assert len(counts) == 2 and counts[0] == counts[1]


@pytest.mark.parametrize("name", sorted(ALONG.keys() - {"cdist"}))  # PyTorch has none of cdist
def test_gradients_of_gradients_along_a_dimension(name: str) -> None:
    """A gradient of our own still leaves PyTorch's for the gradients of gradients."""
    function, found = ALONG[name], []
    torch.manual_seed(0)
    values = torch.rand(4, 4, dtype=torch.float64)
    if "cumprod" in name:
        values[1, 2] = values[3, 0] = 0
    for run in (function, fusewright.compile(function)):
        leaf = values.clone().requires_grad_()
        (first,) = torch.autograd.grad((run(leaf * 2) ** 2).sum(), leaf, create_graph=True)
        found.append((first.detach(), *torch.autograd.grad(first.sin().sum(), leaf)))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", sorted(ALONG.keys() - {"cdist"}))
def test_gradients_of_gradients_along_a_dimension_that_are_asked_inside(name: str) -> None:
    """There a gradient of our own has gradients itself."""

    def derivatives(x: torch.Tensor) -> list[torch.Tensor]:
        found = [ALONG[name](x * 2)]
        weights = torch.arange(found[0].numel(), dtype=found[0].dtype).view(found[0].shape).sin()
        while len(found) < 4:
            order = torch.autograd.grad((found[-1] * weights[: len(found[-1])]).sum(), x, create_graph=True, allow_unused=True)[0]
            if order is None or not order.requires_grad:
                break
            weights = torch.arange(order.numel(), dtype=order.dtype).view(order.shape).sin()
            found.append(order)
        return [one.detach() for one in found]

    compiled = fusewright.compile(derivatives)
    for rows, zeros in ((4, 0), (4, 1), (5, 2), (6, 4)):
        x = torch.rand(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        if "cumprod" in name:
            x.view(-1)[torch.arange(zeros) * 5 + 1] = 0
        found, expected = (run(x.clone().requires_grad_()) for run in (compiled, derivatives))
        torch.testing.assert_close(found, expected, check_stride=True, equal_nan=True)


SAVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "root": lambda x: x.square().add(1).sqrt(), "softmax": lambda x: x.softmax(0),
    "logsumexp": lambda x: x.logsumexp(0), "norm": lambda x: x.norm(dim=0), "in place": lambda x: (x * 0.5).exp_().sin(), "inverse": lambda x: torch.linalg.inv(x[:3] + 9),
    "beside a detached one": lambda x: x.exp().detach() * x.tanh() + x.exp(), "twice": lambda x: x.exp().tanh().exp(), "parts": lambda x: x.tanh()[1:] * x.exp()[:-1],
    "written detached": lambda x: x.exp().detach().mul_(x).sin() + x, "cumprod": lambda x: x.cumprod(0), "checkpoint": lambda x: checkpoint(torch.exp, x.tanh(), use_reentrant=False),
    "layer norm": lambda x: nn.functional.layer_norm(x.exp(), (3,)), "reciprocal": lambda x: (x.exp() + 1).reciprocal() * x.exp().rsqrt(),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("orders", [1, 2])
@pytest.mark.parametrize("name", SAVED)
def test_gradients_of_gradients_of_one_that_was_asked_inside(name: str, orders: int, backend: str) -> None:
    """Autograd saves a result apart from its history, which leads on when a formula reads it."""

    def inside(x: torch.Tensor) -> torch.Tensor:
        found = SAVED[name](x)
        for _ in range(orders):
            (found,) = torch.autograd.grad((found * found).sum(), x, create_graph=True)
        return found

    compiled = fusewright.compile(inside, backend=backend)
    for rows in (4, 5, 6):
        values, results = torch.rand(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)), []
        for run in (inside, compiled):
            x = values.clone().requires_grad_()
            first = run(x)
            (second,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
            results.append([first, second, *torch.autograd.grad(second.sin().sum(), x)])
        torch.testing.assert_close(results[1], results[0])


def _leaves_its_history(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.detach_()
    return y * x.sin()


def _leaves_its_history_and_is_written_to(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.detach_()
    y.mul_(x.detach())
    return z * x.sin() + y


@pytest.mark.parametrize("function", [_leaves_its_history, _leaves_its_history_and_is_written_to])
def test_gradients_of_gradients_behind_a_detach_in_place(function: Callable[..., torch.Tensor]) -> None:
    x, found = torch.rand(3, dtype=torch.float64, requires_grad=True), []
    for run in (function, fusewright.compile(function, fullgraph=True)):
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        found.append((first.detach(), *torch.autograd.grad(first.sum(), x)))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("dynamic", [False, True])
def test_running_products_of_zeros(dtype: torch.dtype, dynamic: bool) -> None:
    for shape, dim in (((7,), 0), ((3, 5), 1), ((3, 5), 0), ((2, 3, 4), -2), ((1,), 0), ((0, 3), 0), ((3, 0), 0)):
        compiled = fusewright.compile(lambda x, dim=dim: torch.cumprod(x, dim=dim), dynamic=dynamic)
        for zeros in range(4):
            x = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
            x.view(-1)[torch.randperm(x.numel())[:zeros]] = 0
            weights, found = (torch.arange(x.numel()).reshape(shape) % 5 + 1).to(dtype), []
            for function in (lambda x, dim=dim: x.cumprod(dim), compiled):
                leaf = x.clone().requires_grad_()
                result = function(leaf)
                result.backward(weights)
                found.append((result.detach(), leaf.grad))
            torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(1,), (0,), (3,), (3, 1), (1, 3), (0, 3), (3, 0), (1, 1), (2, 3)])
def test_whether_the_gradient_of_a_running_product_has_a_gradient(shape: tuple[int, ...], dynamic: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.cumprod(-1).sin().sum(), x, create_graph=True)[0]

    found = [run(torch.full(shape, 0.5).requires_grad_()) for run in (function, fusewright.compile(function, dynamic=dynamic))]
    torch.testing.assert_close(found[1], found[0])
    assert found[0].requires_grad == found[1].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 66).logsumexp(1),
        lambda x: (x * x).expand(2, *x.shape).flatten(0, 1).logsumexp(0),
        lambda x: nn.functional.batch_norm((x * x).expand(2, *x.shape).flatten(1), None, None, training=True),
        lambda x: nn.functional.layer_norm(x[:1] * 9 + 100, x.shape[1:]),
    ],
)
def test_what_is_computed_again_is_what_statistics_were_made_of(function: Any, dtype: torch.dtype) -> None:
    """The gradient takes the difference of a value and of a statistic that memory has rounded. Not rounded itself, it
    would be off by the exponential of what rounding takes away, or by many standard deviations."""
    made = (torch.arange(12.0).reshape(3, 4) % 7 * 0.75 + 0.5).to(dtype)
    gradients = []
    for run in (function, fusewright.compile(function, dynamic=False)):
        x = made.clone().requires_grad_()
        result = run(x)
        result.backward((torch.arange(result.numel()).reshape(result.shape) % 5 + 1).to(dtype))
        gradients.append(x.grad.double())
    largest = gradients[0].abs().max()
    assert (gradients[1] - gradients[0]).abs().max() <= 0.05 * largest + 0.05


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "row": lambda x: x[1].add_(1), "rows": lambda x: x[1:3].mul_(2), "all": lambda x: x.mul_(3), "row by number": lambda x: x.__setitem__(1, 5.0),
    "column": lambda x: x[:, 0].mul_(2), "where": lambda x: x.masked_fill_(x > 4, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_saved_of_an_argument_with_gaps_that_is_written_to(name: str, dynamic: bool) -> None:
    """Its new value, once, laid out as the backward reads it, and no repetition of the write."""
    layouts: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: torch.arange(24.0).reshape(8, 3)[::2], lambda: torch.arange(24.0).reshape(4, 6)[:, :3],
        lambda: torch.arange(12.0).reshape(3, 4).t(), lambda: torch.arange(12.0).reshape(4, 3),
    )  # fmt: skip

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        WRITES[name](x)
        return x * y * y

    for make in layouts:
        compiled, found = fusewright.compile(f, dynamic=dynamic), []
        for function in (f, compiled):
            x, y = make(), torch.tensor(2.0, requires_grad=True)
            result = function(x, y)
            result.backward(torch.ones_like(result))
            found.append((result.detach(), x, y.grad))
        torch.testing.assert_close(found[1], found[0])


def test_what_is_saved_of_rows_that_are_known_to_lie_apart_while_their_length_varies() -> None:
    """A guard says that they are no longer than the step, which is a number."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[0] = y
        return nn.functional.cosine_similarity(torch.tensor(2), x)

    compiled, found = fusewright.compile(f), []
    for function in (f, compiled):
        function(torch.arange(1.0, 10.0).reshape(3, 3), torch.tensor(1.0))
        for rows, columns in ((8, 5), (6, 4), (8, 6)):
            x, y = torch.arange(float(rows * columns)).reshape(rows, columns)[::2], torch.tensor(3.0, requires_grad=True)
            result = function(x, y * 1)
            result.backward(torch.arange(float(len(x))) + 1)
            found.append((result.detach(), x, y.grad))
    torch.testing.assert_close(found[3:], found[:3])


@pytest.mark.parametrize("name", WRITES)
def test_gradients_of_gradients_through_an_argument_that_was_written_to(name: str) -> None:
    """The recorded operators would run on what the call has left there: right, or an error."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        WRITES[name](x)
        return x * y * y

    def second(function: Any) -> torch.Tensor:
        x, y = torch.arange(12.0).reshape(4, 3), torch.tensor(2.0, requires_grad=True)
        (first,) = torch.autograd.grad(function(x, y).sum(), y, create_graph=True)
        return torch.autograd.grad(first, y)[0] + first.detach()

    try:
        found = second(fusewright.compile(f, dynamic=False))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(found, second(f))


def test_gradients_of_gradients_beside_running_statistics() -> None:
    def second(run: Any) -> torch.Tensor:
        x = torch.arange(12.0).reshape(4, 3).sin().requires_grad_()
        (first,) = torch.autograd.grad(run(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    net, copied = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    torch.testing.assert_close(second(fusewright.compile(net)), second(copied))
    torch.testing.assert_close(net.state_dict(), copied.state_dict())


VIEWS_THAT_ARE_WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as_strided": lambda y: y.as_strided((2, 2), (4, 1)), "further on": lambda y: y.as_strided((3, 2), (4, 2), 1), "rows": lambda y: y[1:3],
    "every second": lambda y: y[::2, 1], "diagonal": lambda y: y.diagonal(1), "turned": lambda y: y.mT[1:], "split": lambda y: y.view(2, 2, -1)[:, 1],
    "one": lambda y: y[2, 1], "new dimension": lambda y: y.unsqueeze(1)[:2],
    "apart": lambda y: y.unflatten(0, (2, 2))[0], "unfolded": lambda y: y.reshape(-1)[3:9],
}  # fmt: skip


@pytest.mark.parametrize("layout", ["row-major", "column-major"])
@pytest.mark.parametrize("name", VIEWS_THAT_ARE_WRITTEN)
def test_gradients_of_gradients_through_a_write_to_a_view(name: str, layout: str) -> None:
    """The first gradients, with a history, and those of them."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin() if layout == "row-major" else x.mT.sin().mT
        z, w = y * 2, y.clone()
        VIEWS_THAT_ARE_WRITTEN[name](z).mul_(x.cos().sum())
        VIEWS_THAT_ARE_WRITTEN[name](w).fill_(3)
        w.fill_diagonal_(5, wrap=True)
        return z, z * w

    found = []
    for function in (f, fusewright.compile(f, fullgraph=True)):
        x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5).requires_grad_()
        outputs = function(x)
        weights = [torch.linspace(0, number, 20, dtype=torch.float64).reshape(4, 5) for number in (1, 2)]
        (first,) = torch.autograd.grad(outputs, x, weights, create_graph=True)
        found.append([first.detach(), *torch.autograd.grad(first.pow(2).sum(), x)])
    torch.testing.assert_close(found[1], found[0])


def _in_no_grad(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def write(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen = view(y)
        with torch.no_grad():
            seen.mul_(w)
        return seen

    return write


UNSEEN_WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "detached": lambda y, w: y.detach().mul_(w), "data": lambda y, w: y.data[1:].mul_(2), "part": lambda y, w: y.detach()[1:].mul_(w.detach()),
    "of a part": lambda y, w: y[1:].detach().mul_(3), "turned": lambda y, w: y.detach().mT.add_(w), "twice": lambda y, w: y.detach().mul_(2) + y.data.add_(1),
    "strided": lambda y, w: y.detach().as_strided((2, 2), (4, 1)).fill_(2), "read": lambda y, w: y.mul_(w).detach().as_strided((2, 2), (4, 1)),
    "no_grad": _in_no_grad(lambda y: y), "part in no_grad": _in_no_grad(lambda y: y[1:]),
    "diagonal in no_grad": _in_no_grad(lambda y: y.diagonal()), "detached part in no_grad": _in_no_grad(lambda y: y.detach()[:, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN_WRITES)
def test_gradients_of_gradients_through_a_write_that_autograd_does_not_see(name: str) -> None:
    """The value is the new one, the gradient that of the value before."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        part = y[1:]
        written = UNSEEN_WRITES[name](y, w)
        return y * x, part * x[1:], written * 2

    found = []
    for function in (f, fusewright.compile(f)):
        x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5).requires_grad_()
        w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        total = sum(output.pow(2).sum() for output in function(x, w))
        first = torch.autograd.grad(total, (x, w), create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(first[0].pow(2).sum(), (x, w), materialize_grads=True)
        found.append([one.detach() for one in (*first, *second)])
    torch.testing.assert_close(found[1], found[0])


class _Doubled(torch.autograd.Function):
    """Computes in place, in memory of its own, and takes a size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: torch.Size) -> torch.Tensor:
        ctx.save_for_backward(x)
        y = x.clone()
        y[0].mul_(2)
        return y.reshape(-1)[: size.numel()].reshape(size)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 3 * ctx.saved_tensors[0], None


def _hooked(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
    """A hook belongs to the value that the tensor has when it is registered."""
    y = x.sin()
    y.register_hook(lambda g: g * factor)
    part = y.view(-1)[:2]
    part.register_hook(lambda g: g * 5)
    part.mul_(x.cos().sum())
    part.register_hook(lambda g: g * g)
    y.register_hook(lambda g: g.sin())
    y.add_(1)
    return (y * y).sum() + part.exp().sum()


def _hooked_before_it_is_left(x: torch.Tensor) -> torch.Tensor:
    y, z = x.sin(), x.cos()
    y.register_hook(lambda g: g * 2)
    F.rms_norm(z, z.shape).register_hook(lambda g: g)
    return (y.take(torch.tensor([1, 2])).cumprod(0) * z.fill_(2).sum()).clamp(-3, 3)


def _drawn(x: torch.Tensor) -> torch.Tensor:
    """Numbers of which some are not used, and values that are overwritten by them."""
    y, dropped = x.cos(), x.sin()
    dropped.kron(x).normal_()
    y[1].uniform_()
    return y * dropped.bernoulli_(0.5) * x * x.sin().normal_()


def _with_a_constant(x: torch.Tensor) -> torch.Tensor:
    steps = torch.tensor([1.0, 2.0], dtype=torch.float64)
    steps.add_(1)
    return (x**2) ** steps


REPEATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hooks": _hooked, "hooks of what is not returned": _hooked_before_it_is_left, "draws": _drawn, "constant": _with_a_constant,
    "custom function": lambda x: (_Doubled.apply(x.sin(), x.shape) * x).mul_(x),
    "custom function of what is written to": lambda x: _Doubled.apply(x.sin().mul_(x), x.shape).sin(),
    "infinite derivative": lambda x: (x - x).log().zero_() + x**3, "filled": lambda x: (x - x).log().fill_(2) * x.sin(),
    "copied over": lambda x: (x - x).log().copy_(x.exp()) * x, "logit": lambda x: (x * 9).logit(0.1).zero_().cos() * x.exp(),
    "complex part": lambda x: torch.view_as_real(torch.complex(x, x * 2).narrow(-1, 0, 1).zero_()) * x.sum() ** 2,
    "part of complex": lambda x: torch.view_as_real(_zeroed(torch.complex(x.sin(), x * x))),
}  # fmt: skip


def _zeroed(z: torch.Tensor) -> torch.Tensor:
    z.narrow(-1, 0, 1).zero_()
    z[0].mul_(2)
    z.diagonal().fill_(2)
    return z * z


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", REPEATED)
def test_gradients_of_gradients_run_the_forward_again_as_it_was(name: str, dynamic: bool) -> None:
    """Writes, draws and the program's own code: twice, since nothing that was there before may change."""
    compiled, found = fusewright.compile(REPEATED[name], dynamic=dynamic, options={"fallback_random": True}), []
    for function in (REPEATED[name], compiled):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1.5, 6, dtype=torch.float64).reshape(3, 2).requires_grad_()
        for _ in range(2):
            (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            second = torch.autograd.grad(first.square().sum(), x, materialize_grads=True, allow_unused=True)
            found.append([first.detach(), *second])
    torch.testing.assert_close(found[2:], found[:2], equal_nan=True)


def test_a_reentrant_checkpoint_has_gradients_that_eager_refuses() -> None:
    def program(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        return checkpoint(lambda a: a.sin() * a, x, use_reentrant=reentrant).sum()

    compiled = fusewright.compile(program, fullgraph=True)
    x = torch.linspace(-1, 1, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\)"):
        torch.autograd.grad(program(x, True), x)
    first = torch.autograd.grad(compiled(x, True), x, create_graph=True)[0]
    meant = torch.autograd.grad(program(x, False), x, create_graph=True)[0]
    torch.testing.assert_close(first, meant)
    torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), x)[0] for one in (first, meant)))


@pytest.mark.parametrize("rows", [0, 3])
def test_the_gradient_of_a_product_of_no_elements(rows: int) -> None:
    """PyTorch's formula for tensors like those of a capture does not read them."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.prod(1).sum(), x, create_graph=True)[0]

    found = []
    for run in (function, fusewright.compile(function, dynamic=False)):
        x = torch.rand(rows, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        first = run(x)
        second = torch.autograd.grad(first.sum(), x)[0] if first.requires_grad else torch.zeros_like(x)
        found.append((first.detach(), second))
        assert first.requires_grad or (rows == 0 and run is not function)
    torch.testing.assert_close(found[1], found[0])


OF_LISTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "product": lambda x, y, z: torch._foreach_mul([x, y], 2),
    "sums": lambda x, y, z: torch._foreach_add([x, y], [z, x]),
    "addcmul": lambda x, y, z: torch._foreach_addcmul([x, y], [z, z], [y, y]),
    "product with a tensor": lambda x, y, z: torch._foreach_mul([x, y], z.sum()),
    "chain": lambda x, y, z: torch._foreach_exp(torch._foreach_mul([x, y, z], [y, z, z])),
    "beside others": lambda x, y, z: (*torch._foreach_exp([x, y]), x * y),
    "goes on": lambda x, y, z: [one * 2 for one in torch._foreach_norm([x, y, z])],
}


@pytest.mark.parametrize("name", OF_LISTS)
def test_a_gradient_of_one_of_a_list_reaches_what_it_was_computed_from(name: str) -> None:
    """The operator is one node of eager's graph, but gives no gradient to the other elements."""
    function = OF_LISTS[name]
    count = len(function(*[torch.ones(3)] * 3))
    for leaves, chosen in itertools.product(itertools.product((False, True), repeat=3), range(1, 2**count)):
        found: list[Any] = []
        for run in (function, fusewright.compile(function)):
            given = [torch.full((3,), 1.0 + place).requires_grad_(leaf) for place, leaf in enumerate(leaves)]
            results = run(*given)
            wanted = [one.sum() for place, one in enumerate(results) if chosen >> place & 1 and one.requires_grad]
            error = ""
            try:
                torch.autograd.backward(wanted)
            except RuntimeError as raised:  # PyTorch's of lists of which some elements need none
                error = str(raised)
            found.append(([one.requires_grad for one in results], error, [one.grad for one in given]))
        assert found[1][:2] == found[0][:2]
        torch.testing.assert_close(found[1][2], found[0][2])


def _own_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.retain_grad()
    (x * 2).sum().backward(retain_graph=True)
    return x.grad * 1  # type: ignore[operator]


OF_LEAVES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "grad": lambda x, y: torch.autograd.grad((x * x * 3).sum(), [x, y], allow_unused=True),
    "grad of another": lambda x, y: torch.autograd.grad((x * x * 3).sum(), [y], allow_unused=True),
    "backward": lambda x, y: (x * x).sum().backward(),
    "backward to it": lambda x, y: (x * x).sum().backward(inputs=[x]),
    "its backward": lambda x, y: x.backward(torch.ones_like(x)),
    "retain_grad": _own_gradient,
    "facts": lambda x, y: (x.grad_fn is None, x.is_leaf),
    "write": lambda x, y: x.add_(1) * 1,
    "hook": lambda x, y: (x.register_post_accumulate_grad_hook(lambda leaf: None), x * 2)[1],
    "detach_": lambda x, y: x.detach_() * 2,
    "requires_grad_": lambda x, y: x.requires_grad_(False) * 2,
}
ARGUMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "leaf": lambda y: torch.arange(1.0, 4.0).requires_grad_(),
    "of the other": lambda y: y * 2,
    "of a third": lambda y: torch.arange(1.0, 4.0).requires_grad_() * 2,
    "view": lambda y: torch.ones(2, 3).requires_grad_()[1],
    "without": lambda y: torch.arange(1.0, 4.0),
    "the other": lambda y: y,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", OF_LEAVES)
def test_what_asks_the_engine_serves_no_leaf_and_no_other_alike(name: str) -> None:
    """Behind a tensor that is no leaf the engine goes on, to where the capture has not seen."""
    for order in itertools.permutations(ARGUMENTS, 2):
        compiled = fusewright.compile(OF_LEAVES[name])
        for kind in order:
            found: list[Any] = []
            for run in (OF_LEAVES[name], compiled):
                y = torch.arange(1.0, 4.0).requires_grad_()
                x, error, result = ARGUMENTS[kind](y), None, None
                try:
                    result = run(x, y)
                except RuntimeError as raised:
                    error = type(raised)
                result = pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, result)
                found.append((error, result, str(x.grad), str(y.grad), x.tolist(), x.requires_grad))
            assert found[1] == found[0], order


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:], lambda x: x.view(2, 2)], ids=["whole", "part", "view"])
def test_what_an_operator_writes_to_leaves_beside_gradients(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The running statistics that the program has set anew."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, variance = torch.zeros(4), torch.full((4,), 2.0)
        result = torch.nn.functional.batch_norm(x, mean, variance, weight, training=True)
        return result, view(variance)

    x, weight = torch.randn(3, 4), torch.ones(4, requires_grad=True)
    compiled = fusewright.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), step(x, weight))


BEHIND_A_BREAK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: (x * 2)[1:],
    "view_as_real": lambda x: torch.view_as_real(x * 2 + 0j),
    "part of view_as_real": lambda x: torch.view_as_real(x * 2 + 0j)[:, 0],
    "real": lambda x: torch.fft.fft(x * 2).real,
    "imag": lambda x: torch.fft.fft(x * 2).imag[1:],
    "view_as_complex": lambda x: torch.view_as_complex((x * 2).reshape(2, 2)),
    "real of view_as_complex": lambda x: torch.view_as_complex((x * 2).reshape(2, 2)).real,
}


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("name", BEHIND_A_BREAK)
def test_views_that_leave_may_be_written_to(name: str, backend: str) -> None:
    """Autograd refuses that of views that a function of its own has made."""

    def write(x: torch.Tensor) -> torch.Tensor:
        view = BEHIND_A_BREAK[name](x)
        fusewright.graph_break()
        view.mul_(3)
        return view.unsqueeze_(0).abs().sum()

    found = []
    for run in (write, fusewright.compile(write, backend=backend)):
        x = torch.arange(1.0, 5.0).requires_grad_()
        run(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


_through_rows = lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, x.shape[2:])


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("norm", ["group", "batch", "instance", "batch in evaluation"])
@pytest.mark.parametrize("place", ["in front", "between", "behind"])
@pytest.mark.parametrize("shape", [(1, 4, 6, 6), (4, 4, 2, 18), (2, 4, 1, 36), (1, 1, 12, 12)])
def test_of_norms_in_any_memory_format(
    backend: str, dynamic: bool, norm: str, place: str, shape: tuple[int, ...]
) -> None:
    """PyTorch's kernels choose a format by the steps of single elements, too, and take it for that of both arguments.
    Compared with the formulas."""
    torch.manual_seed(3)
    channels = shape[1]
    groups = 2 if norm == "group" and channels > 1 else channels
    image, kernel, head = torch.randn(shape), torch.randn(channels, channels, 3, 3), torch.randn(36, 5)
    mean, variance = torch.randn(channels), torch.rand(channels) + 0.5

    def normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if norm == "group":
            return F.group_norm(x, groups, weight, bias)
        if norm == "instance":
            return F.instance_norm(x, None, None, weight, bias)
        return F.batch_norm(x, mean, variance, weight, bias, training=norm == "batch", momentum=0.0)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(shape[0], groups, -1, *shape[2:])

    def formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if norm == "batch in evaluation":
            square, middle = variance[:, None, None, None], mean[:, None, None, None]
        else:
            over = (0, 2, 3, 4) if norm == "batch" else (2, 3, 4)
            square, middle = torch.var_mean(grouped(x), over, correction=0, keepdim=True)
        scaled = (grouped(x) - middle) * (square + 1e-5).rsqrt()
        return scaled.reshape(shape) * weight[:, None, None] + bias[:, None, None]

    def network(x: torch.Tensor, kernel: torch.Tensor, *rest: torch.Tensor, norm: Callable[..., Any]) -> torch.Tensor:
        x = _through_rows(x) if place == "in front" else x
        x = F.conv_transpose2d(x, kernel, padding=1)
        x = norm(_through_rows(x) if place == "between" else x, *rest)
        return (_through_rows(x) if place == "behind" else x).reshape(shape[0], -1, 36) @ head

    leaves = [image, kernel, torch.randn(channels), torch.randn(channels)]
    for format_ in (torch.channels_last, torch.contiguous_format):
        found = []
        for run in (
            fusewright.compile(partial(network, norm=normalised), backend=backend, dynamic=dynamic),
            partial(network, norm=formula),
        ):
            given = [one.clone().contiguous(memory_format=format_) if one.ndim == 4 else one.clone() for one in leaves]
            given = [one.requires_grad_() for one in given]
            out = run(*given)
            found.append(torch.autograd.grad((out * torch.arange(float(out.numel())).cos().view_as(out)).sum(), given))
        torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("step", [1, 6])
def test_gradients_of_gradients_in_the_format_of_the_forward(dynamic: bool, step: int) -> None:
    """The step of a single channel says in which format a convolution computes, and so what can be viewed of it."""
    kernel = torch.randn(8, 1, 2, 2).requires_grad_()

    def function(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        out = F.conv2d(x, kernel)
        return out.flatten(2).mT.contiguous().view(out.shape) ** 2

    x = torch.randn(3, 3, 2, 1).requires_grad_().permute(0, 3, 1, 2).as_strided((3, 1, 3, 2), (6, step, 2, 1))
    found = []
    for run in (function, fusewright.compile(function, dynamic=dynamic)):
        (first,) = torch.autograd.grad(run(x, kernel).sum(), kernel, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), [kernel, x])])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 3, 4), (2, 4, 1, 1), (1, 4, 2, 3, 4)])
def test_of_a_group_norms_parameters_alone(backend: str, dynamic: bool, shape: tuple[int, ...]) -> None:
    """Over what is channels-last the kernel writes a gradient of the input that nobody asked for, and eager's process
    dies."""
    norm, x = nn.GroupNorm(2, 4), torch.randn(shape)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    found = []
    for run, given in ((norm, x), (fusewright.compile(norm, backend=backend, dynamic=dynamic), x.contiguous(memory_format=last))):
        norm.zero_grad()
        (run(given) * torch.arange(float(x.numel())).view(shape)).sum().backward()
        found.append([one.grad for one in norm.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 4, 36, 1), (2, 4, 1, 36), (3, 4, 6, 6)])
def test_of_a_batch_norm_whose_gradient_is_turned(shape: tuple[int, ...]) -> None:
    """Compared with the formula: eager's own are of other elements, where images are one row or one column."""
    head = torch.randn(144, 3)

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, weight, bias, training=True)

    def formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        return (x - mean) * (variance + 1e-5).rsqrt() * weight[:, None, None] + bias[:, None, None]

    given = [torch.randn(shape), torch.randn(4), torch.randn(4)]
    weights = torch.randn(shape[0], 3)
    found = []
    for one_of in (norm, formula):
        run = lambda *a, one_of=one_of: one_of(*a).transpose(1, 3).flatten(1) @ head
        run = fusewright.compile(run) if one_of is norm else run
        leaves = [one.clone().requires_grad_() for one in given]
        found.append(torch.autograd.grad((run(*leaves) * weights).sum(), leaves))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


_INDEX = torch.tensor([2, 0, 1, 1])
UNDEFINED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, w: x + w, "mul": lambda x, w: x * w, "div": lambda x, w: x / w, "square": lambda x, w: x**2, "neg": lambda x, w: -x, "sin": lambda x, w: x.sin(),
    "relu": lambda x, w: x.relu(), "gelu": lambda x, w: F.gelu(x), "leaky_relu": lambda x, w: F.leaky_relu(x), "prelu": lambda x, w: F.prelu(x, w[0, 0, 0, :1]),
    "hardtanh": lambda x, w: F.hardtanh(x), "elu": lambda x, w: F.elu(x), "abs": lambda x, w: x.abs(), "floor": lambda x, w: x.floor() + w, "clamp": lambda x, w: x.clamp(min=w),
    "where": lambda x, w: torch.where(x > 0, x, w), "maximum": lambda x, w: torch.maximum(x, w), "max": lambda x, w: x.max(2)[0], "amin": lambda x, w: x.amin(2) * w.sum(),
    "sort": lambda x, w: x.sort()[0], "topk": lambda x, w: x.topk(2)[0], "cummax": lambda x, w: x.cummax(2)[0], "cumsum": lambda x, w: x.cumsum(2), "prod": lambda x, w: x.prod(2),
    "var": lambda x, w: x.var(2), "softmax": lambda x, w: x.softmax(2), "matmul": lambda x, w: x @ w, "linear": lambda x, w: F.linear(x, w[0, 0], w[0, 0, 0]),
    "linear, relu": lambda x, w: F.linear(x, w[0, 0]).relu(), "conv2d": lambda x, w: F.conv2d(x, w[:, :, :3, :3], w[0, 0, 0, :2]), "conv2d, tanh": lambda x, w: F.conv2d(x, w[:, :, :3, :3]).tanh(),
    "conv2d, adaptive_max_pool2d": lambda x, w: F.adaptive_max_pool2d(F.conv2d(x, w[:, :, :3, :3]), 2), "conv2d, avg_pool2d": lambda x, w: F.avg_pool2d(F.conv2d(x, w[:, :, :3, :3]), 2),
    "conv1d": lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0, :3]), "conv3d": lambda x, w: F.conv3d(x[None], w[:, :, None, :3, :3]), "depthwise": lambda x, w: F.conv2d(x, w[:, :1, :3, :3], groups=2),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x, w[:, :, :3, :3]), "max_pool2d": lambda x, w: F.max_pool2d(x, 2), "batch_norm": lambda x, w: F.batch_norm(x, None, None, w[0, 0, 0, :2], None, True),
    "batch_norm in evaluation": lambda x, w: F.batch_norm(x, torch.zeros(2).double(), torch.ones(2).double(), w[0, 0, 0, :2]), "layer_norm": lambda x, w: F.layer_norm(x, (4,), w[0, 0, 0]),
    "index": lambda x, w: x[:, :, _INDEX], "gather": lambda x, w: x.gather(3, _INDEX.expand_as(x)), "scatter": lambda x, w: x.scatter(3, _INDEX.expand_as(x), w), "embedding": lambda x, w: F.embedding(_INDEX, x[0, 0]),
    "cat": lambda x, w: torch.cat([x, w]), "stack": lambda x, w: torch.stack([x, w, x]), "pad": lambda x, w: F.pad(x, (1, 1, 1, 1), "reflect"), "grid_sample": lambda x, w: F.grid_sample(x, w.reshape(2, 4, 4, 2)),
    "huber_loss": lambda x, w: F.huber_loss(x, w), "detach": lambda x, w: x.detach() * w,
}  # fmt: skip


@pytest.mark.parametrize("name", UNDEFINED)
def test_where_a_gradient_of_a_gradient_is_none(name: str) -> None:
    """Not zeros: what does not depend on an argument gives it none, be the argument a leaf or not."""
    function = UNDEFINED[name]

    def once(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.autograd.functional.vjp(lambda y: function(y, w).sum(), x, create_graph=True)[1]

    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        inner = torch.func.grad(lambda y: function(y, w).sum())
        return torch.func.grad(lambda y: inner(y).square().sum())(x)

    for program, leaf in itertools.product((once, twice), (False, True)):
        found: list[Any] = []
        for backend in (None, "native") if leaf else (None, "native", "aot_eager", "eager"):
            run = program if backend is None else fusewright.compile(program, backend=backend, dynamic=False)
            generator = torch.Generator().manual_seed(0)
            leaves = [torch.randn(2, 2, 4, 4, generator=generator).double().requires_grad_() for _ in range(2)]
            result = run(*leaves) if leaf else run(leaves[0].mT, leaves[1] * 1)
            try:
                if result.requires_grad:
                    result.square().sum().backward()
            except RuntimeError as error:  # before PyTorch 2.13
                if backend is None and name == "grid_sample" and "is not implemented" in str(error):
                    pytest.skip("this PyTorch has no such derivative")
                raise
            found.append([one.grad for one in leaves])
        for one in found[1:]:
            torch.testing.assert_close(one, found[0])


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


IN_FRONT: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x.mT, "sin": lambda x: x.sin(), "cumprod": lambda x: x.cumprod(2), "write": lambda x: x.clone().mul_(2), "list": lambda x: torch._foreach_sin([x, x])[0],
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x), "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False), "custom function": _Twice.apply,
}  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("name", IN_FRONT)
def test_no_gradient_arrives_at_what_stands_in_front(name: str, backend: str) -> None:
    """A custom function has zeros in its place, so it gives some."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = IN_FRONT[name](x)
        return torch.autograd.grad(F.conv2d(y, w).sum(), y, create_graph=True)[0].square().sum()

    found: list[Any] = []
    for run in (function, fusewright.compile(function, backend=backend, dynamic=False)):
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(2, 2, n, n, generator=generator).requires_grad_() for n in (4, 3))
        run(x, w).backward()
        found.append((x.grad, w.grad))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert (x.grad is None) == (name != "custom function")


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d", "batch_norm in evaluation", "mul", "sin", "relu", "abs", "where", "cumsum", "linear", "detach"])
def test_which_gradients_one_of_several_results_gives(name: str, backend: str, create_graph: bool) -> None:
    """None where eager's formulas give none, though another result gives one, and zeros where they give zeros."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, v = x * 1, w * 1
        first = torch.autograd.grad(UNDEFINED[name](y, v).sum(), y, create_graph=True, allow_unused=True)[0]
        return () if first is None else first.square().sum(), (y * v).sum()

    found: list[Any] = []
    for run in (function, fusewright.compile(function, backend=backend, dynamic=False)):
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(2, 2, 4, 4, generator=generator).double().requires_grad_() for _ in range(2)]
        for one in run(*leaves):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                found.append(torch.autograd.grad(one, leaves, allow_unused=True, retain_graph=True, create_graph=create_graph))
    torch.testing.assert_close(found[len(found) // 2 :], found[: len(found) // 2])


APART: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {name: UNDEFINED[name] for name in (
    "grid_sample", "batch_norm in evaluation", "prelu", "conv2d", "conv_transpose2d", "linear", "layer_norm", "mul", "gather", "scatter", "index", "cat", "max", "topk",
)} | {
    "a part of split": lambda x, w: x.split(1, 1)[0] * w[:, 1:], "zeros written to": lambda x, w: torch.zeros_like(w).index_put_((_INDEX[1:2],), x[0]) * w, "bicubic": lambda x, w: F.interpolate(x * w, scale_factor=2, mode="bicubic"),
}  # fmt: skip


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("name", APART)
def test_which_gradients_each_of_two_gradients_gives(name: str, backend: str, create_graph: bool) -> None:
    """Formulas of gradients of gradients fill zeros with the part of one of the gradients: they are no part of the other."""

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = APART[name](x, w)
        return (*torch.autograd.grad((result * v[: len(result)].sum()).sum(), (x, w), create_graph=True, allow_unused=True), result)

    found: list[list[Any]] = []
    for run in (function, fusewright.compile(function, backend=backend, dynamic=False)):
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(2, 2, 4, 4, generator=generator).double().requires_grad_() for _ in range(3)]
        found.append([])
        for one in run(*leaves):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                try:
                    found[-1] += torch.autograd.grad(one.sum(), leaves, allow_unused=True, retain_graph=True, create_graph=create_graph)
                except RuntimeError as error:  # before PyTorch 2.13
                    if run is function and "is not implemented" in str(error):
                        pytest.skip("this PyTorch has no such derivative")
                    raise
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_an_input_that_requires_a_gradient_since_the_call(before: bool, create_graph: bool) -> None:
    """What eager has saved requires one then too: the gradient of the gradient reaches the input, past what the call
    has computed of it. We refuse that; first gradients are eager's."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).exp()

    found = []
    for run in (program, fusewright.compile(program)):
        x, y = torch.tensor(0.5, requires_grad=before), torch.tensor(0.25, requires_grad=True)
        result = run(x, y)
        found += torch.autograd.grad(result, y, create_graph=True)
        x.requires_grad_(not before)
        refused = create_graph and run is not program
        with pytest.raises(RuntimeError, match="Set requires_grad before") if refused else contextlib.nullcontext():
            found += torch.autograd.grad(result, y, create_graph=create_graph)
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1:2], found[3:] or found[1:2])


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_gradients_of_gradients_that_one_output_hides_are_refused(backend: str) -> None:
    """A jagged tensor's values are computed below autograd, so what runs again leads nowhere; another output's gradient alone
    would be a wrong one."""

    def program(x: torch.Tensor) -> Any:
        y = x @ x
        return torch.nested.as_nested_tensor([y, y], layout=torch.jagged).values(), y

    x = torch.ones(2, 2, requires_grad=True)
    values, y = fusewright.compile(program, backend=backend)(x)
    torch.testing.assert_close(torch.autograd.grad([values.sum(), y.sum()], x, retain_graph=True)[0], torch.full((2, 2), 12.0))
    torch.autograd.grad(y.sum(), x, create_graph=True)
    for outputs in ([values.sum()], [values.sum(), y.sum()]):
        with pytest.raises(RuntimeError, match="hides its gradient"):
            torch.autograd.grad(outputs, x, create_graph=True)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("way", ["once", "kept", "graph"])
def test_a_hook_with_an_effect_inside_of_a_residual_connection(way: str, scales: bool) -> None:
    """The argument's gradient comes past the hooked tensor and through it; what is behind it runs in two groups."""
    layer, log = nn.Linear(3, 3), []

    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        log.append(gradient.clone())
        return gradient * 2 if scales else None

    def linear(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y.register_hook(hook)
        return x + y

    def square(x: torch.Tensor) -> Any:
        y = x * x
        y.register_hook(hook)
        return y * x, (y * 2).sum()

    def seen(function: Callable[..., Any]) -> list[Any]:
        log.clear()
        layer.zero_grad()
        x = (torch.arange(6.0).reshape(2, 3) / 3).requires_grad_()
        total = sum(one.square().sum() for one in pytree.tree_leaves(function(x)))
        if way == "graph":
            torch.autograd.grad(total, x, create_graph=True)[0].square().sum().backward()
        else:
            total.backward(retain_graph=way == "kept")
        if way == "kept":
            total.backward()
        return [*log, x.grad, layer.weight.grad]

    for program in (linear, square):
        compiled = fusewright.compile(program, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(seen(compiled), seen(program))
