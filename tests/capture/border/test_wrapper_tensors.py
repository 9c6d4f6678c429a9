"""Tensor subclasses that wrap other tensors, such as quantised weights: captured whole, by their own code, with eager's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base import events

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """An int8 matrix with a factor for each row, whose product is scaled by `gains` (a list)."""

    rows: torch.Tensor
    scale: torch.Tensor
    gains: list[float]

    @staticmethod
    def __new__(cls: Any, rows: torch.Tensor, scale: torch.Tensor, gains: list[float], dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, rows.shape, dtype=dtype, device=rows.device)

    def __init__(self, rows: torch.Tensor, scale: torch.Tensor, gains: list[float], dtype: torch.dtype) -> None:
        self.rows, self.scale, self.gains = rows, scale, gains

    @classmethod
    def of(cls, weight: torch.Tensor) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, [1.0], weight.dtype)

    def __tensor_flatten__(self) -> Any:
        return ["rows", "scale"], (self.gains, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(parts["rows"], parts["scale"], *context)

    def dequantise(self) -> torch.Tensor:
        return self.rows.to(self.dtype) * self.scale * self.gains[0]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.gains})"


class ByDispatch(Wrapper):
    """Overrides operators."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            (one,) = args
            return cls(one.rows, one.scale, one.gains, one.dtype)
        if func is aten.t.default:
            (one,) = args
            return cls(one.rows.t(), one.scale.t(), one.gains, one.dtype)
        plain = [one.dequantise() if isinstance(one, Wrapper) else one for one in args]
        return func(*plain, **(kwargs or {}))


class ByFunction(Wrapper):
    """Overrides functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = (*args, None)[:3]
            quantised = cls.of(x.reshape(-1, x.shape[-1]) + torch.zeros(1))  # one more is made on the way
            y = (quantised.dequantise() @ weight.rows.to(x.dtype).t()) * (weight.scale.t() * weight.gains[0])
            y = y.reshape(*x.shape[:-1], -1)
            return y if bias is None else y + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            (one,) = args
            return cls(one.rows, one.scale, one.gains, one.dtype)
        raise NotImplementedError(str(func))


KINDS = [ByDispatch, ByFunction]


class Heard(list[events.Event]):
    def of(self, *kinds: Any) -> list[events.Event]:
        return [event for event in self if isinstance(event, kinds)]


@pytest.fixture
def heard() -> Iterator[Heard]:
    found = Heard()
    with events.STREAM.listening(found.append):
        yield found


def net(kind: Any, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.GELU(), nn.Linear(40, 16, bias=bias), nn.LayerNorm(16)).eval()
    for layer in made:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(kind.of(layer.weight.detach()), requires_grad=False)
    return made


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def check(compiled: Callable[..., Any], eager: Callable[..., Any], *args: Any) -> None:
    with torch.no_grad():
        close(compiled(*args), eager(*args))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_one_graph(kind: Any, heard: Heard) -> None:
    model = net(kind)
    compiled = fusewright.compile(model, fullgraph=True)
    x = torch.randn(5, 3, 24)
    check(compiled, model, x)
    check(compiled, model, x * 2)
    model[0].weight.scale.mul_(3)  # seen: it is an input of the graph
    check(compiled, model, x)
    assert len(heard.of(events.Captured)) == 1 and not heard.of(
        events.Broken, events.Skipped, events.FellBack, events.InternalError
    )


@pytest.mark.parametrize("kind", KINDS)
def test_any_batch(kind: Any, heard: Heard) -> None:
    model = net(kind)
    compiled = fusewright.compile(model, fullgraph=True)
    for batch in (4, 7, 1, 12, 0) if kind is ByDispatch else (4, 7, 1, 12):
        check(compiled, model, torch.randn(batch, 24))
    assert len(heard.of(events.Captured)) <= 3 and not heard.of(events.FellBack, events.InternalError)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["weight", "scale", "list", "list in place"])
def test_what_changes_is_seen(kind: Any, change: str, heard: Heard) -> None:
    model = net(kind)
    compiled = fusewright.compile(model, fullgraph=True)
    x = torch.randn(5, 24)
    check(compiled, model, x)
    before = compiled(x)
    weight: Any = model[2].weight
    if change == "weight":
        model[2].weight = nn.Parameter(kind.of(torch.randn(16, 40)), requires_grad=False)
    elif change == "scale":
        weight.scale = torch.rand(16, 1) + 0.5
    elif change == "list":
        weight.gains = [-1.5]
    else:
        weight.gains[0] = -1.5
    check(compiled, model, x)
    assert not torch.equal(compiled(x), before) and not heard.of(events.FellBack, events.InternalError)


def test_a_replaced_weight_is_not_kept_alive() -> None:
    import gc
    import weakref

    model = net(ByDispatch)
    compiled = fusewright.compile(model, fullgraph=True)
    x = torch.randn(5, 24)
    check(compiled, model, x)
    old = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(ByDispatch.of(torch.randn(40, 24)), requires_grad=False)
    gc.collect()
    assert old() is None
    check(compiled, model, x)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_what_is_beside(kind: Any) -> None:
    model = net(kind)
    other = net(kind)
    x = torch.randn(5, 24)
    y = x.clone()
    fusewright.compile(model, fullgraph=True)(x.requires_grad_(kind is ByDispatch)).square().sum().backward()
    other(y.requires_grad_(kind is ByDispatch)).square().sum().backward()
    for mine, theirs in zip(model.parameters(), other.parameters()):
        if theirs.grad is not None:
            close(mine.grad, theirs.grad)
    if kind is ByDispatch:
        close(x.grad, y.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_methods_and_attributes(kind: Any, heard: Heard) -> None:
    def function(x: torch.Tensor, weight: Any) -> Any:
        assert isinstance(weight, Wrapper) and type(weight) is kind
        scaled = weight.dequantise() * weight.scale.mean()
        return (
            x @ scaled.t() if weight.dtype is torch.float32 and weight.ndim == 2 else x,
            weight.shape,
            weight.gains[0],
        )

    weight = kind.of(torch.randn(8, 24))
    compiled = fusewright.compile(function, fullgraph=True)
    check(compiled, function, torch.randn(3, 24), weight)
    assert not heard.of(events.FellBack, events.InternalError)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_goes_through_and_one_that_leaves(kind: Any, heard: Heard) -> None:
    weight = kind.of(torch.randn(8, 24))
    x = torch.randn(3, 24)

    def through(x: torch.Tensor, weight: Any) -> Any:
        return F.linear(x, weight), weight

    def leaves(x: torch.Tensor, weight: Any) -> Any:
        made = kind.of(weight.dequantise() + 1)
        return F.linear(x, made), made

    with torch.no_grad():
        result, same = fusewright.compile(through, fullgraph=True)(x, weight)
        close(result, through(x, weight)[0])
        assert same is weight
        result, made = fusewright.compile(leaves)(x, weight)
        expected, right = leaves(x, weight)
    close(result, expected)
    assert type(made) is kind
    close(made.dequantise(), right.dequantise())
    assert not heard.of(events.InternalError)


def test_its_own_code_writes_to_it(heard: Heard) -> None:
    class Counting(ByDispatch):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.mm.default or func is aten.addmm.default:
                for one in args:
                    if isinstance(one, Wrapper):
                        one.count = getattr(one, "count", 0) + 1  # type: ignore[attr-defined]
            return super().__torch_dispatch__(func, types, args, kwargs)

    def function(x: torch.Tensor, weight: Any) -> torch.Tensor:
        return torch.mm(x, weight).sin()

    weight, x = Counting.of(torch.randn(24, 24)), torch.randn(3, 24)
    compiled = fusewright.compile(function)
    for _ in range(3):
        close(compiled(x, weight), torch.mm(x, weight.dequantise()).sin())
    assert weight.count == 3 and heard.of(events.Broken, events.Skipped)


def test_one_that_requires_a_gradient_runs_eagerly(heard: Heard) -> None:
    class Plain(Wrapper):
        @staticmethod
        def __new__(cls: Any, rows: torch.Tensor, scale: torch.Tensor, gains: list[float], dtype: torch.dtype) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, rows.shape, dtype=dtype, device=rows.device, requires_grad=True
            )

        __torch_dispatch__ = ByDispatch.__dict__["__torch_dispatch__"]
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    weight, x = Plain.of(torch.randn(24, 24)), torch.randn(3, 24)
    result = fusewright.compile(lambda x, weight: (x @ weight).sin())(x, weight)
    close(result, (x @ weight).sin())
    assert result.requires_grad and heard.of(events.Broken, events.Skipped)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao(name: str, heard: Heard) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval()
    quantization.quantize_(model, getattr(quantization, name)())
    compiled = fusewright.compile(model, fullgraph=True)
    for rows in (16, 5, 9):
        check(compiled, model, torch.randn(rows, 64))
    assert not heard.of(events.Broken, events.Skipped, events.FellBack, events.InternalError)
