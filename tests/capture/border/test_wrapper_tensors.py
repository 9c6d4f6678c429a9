"""Tensor subclasses that wrap other tensors, such as quantised weights: captured whole, by their own code, with eager's results."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

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


def test_one_that_requires_a_gradient(heard: Heard) -> None:
    class Plain(Wrapper):
        @staticmethod
        def __new__(cls: Any, rows: torch.Tensor, scale: torch.Tensor, gains: list[float], dtype: torch.dtype) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, rows.shape, dtype=dtype, device=rows.device, requires_grad=True
            )

        __torch_dispatch__ = ByDispatch.__dict__["__torch_dispatch__"]
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    weight, x = Plain.of(torch.randn(24, 24)), torch.randn(3, 24)
    result = fusewright.compile(lambda x, weight: (x @ weight).sin(), fullgraph=True)(x, weight)
    expected = (x @ weight).sin()
    close(result, expected)
    (mine,), (right,) = torch.autograd.grad(result.sum(), weight), torch.autograd.grad(expected.sum(), weight)
    assert type(mine) is type(right) is torch.Tensor  # the products' own gradient: no wrapper
    close(mine, right)


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


# Subclasses without the contract: nothing of the compiler's is left in what they hold, and nobody meets an error of ours.


class Opaque(torch.Tensor):
    """Holds a tensor, and does with it whatever is done to itself."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(lambda one: one.inner if isinstance(one, cls) else one, (args, kwargs or {}))
        return tree_map(lambda one: cls(one) if isinstance(one, torch.Tensor) else one, func(*given[0], **given[1]))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.inner!r})"


class OpaqueByFunction(Opaque):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class OpaqueByDefault(Opaque):
    __torch_function__ = torch.Tensor.__torch_function__


class WithContract(OpaqueByFunction):
    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(parts["inner"])


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


OUTSIDE = torch.ones(2, 3)
MADE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a tensor": lambda kind, x: kind(x),
    "a list": lambda kind, x: [kind(x), x],
    "a dict": lambda kind, x: {"k": (kind(x), 1)},
    "an object": lambda kind, x: Holder(kind(x)),
    "an object of a plain one": lambda kind, x: Holder(x * 3),
    "a closure": lambda kind, x: lambda: x + 1,
    "a method": lambda kind, x: x.add,
    "an iterator": lambda kind, x: iter([x, x + 1]),
    "a set": lambda kind, x: {1: {x * 2}},
    "a real tensor": lambda kind, x: [OUTSIDE, x + 1],
    "a parameter": lambda kind, x: nn.Parameter(x * 2),
    "a size": lambda kind, x: (x.shape[0], x.shape, None, x.dtype),
}
USED: dict[str, Callable[[Any, torch.Tensor, list[Any]], Any]] = {
    "returned": lambda made, x, store: made,
    "among results": lambda made, x, store: (x + 1, [made]),
    "kept": lambda made, x, store: store.append(made),
    "computed with": lambda made, x, store: made + 1 if isinstance(made, torch.Tensor) else x * 2,
    "named": lambda made, x, store: (x + 1, type(made).__name__),
}


def described(value: Any) -> Any:
    """All that can be reached of a value. Fails where it is the compiler's own."""
    assert not type(value).__module__.startswith(("fusewright.capture", "fusewright.graph")), type(value)
    if isinstance(value, torch.Tensor):
        inner = value.inner if isinstance(value, Opaque) else value.detach().as_subclass(torch.Tensor).tolist()
        return type(value).__name__, described(inner), value.requires_grad
    if isinstance(value, (list, tuple, set)):
        return type(value).__name__, [described(part) for part in value]
    if isinstance(value, dict):
        return [(key, described(part)) for key, part in value.items()]
    if isinstance(value, Holder):
        return described(value.held)
    if isinstance(value, types.FunctionType):
        return [described(cell.cell_contents) for cell in value.__closure__ or ()]
    return (type(value).__name__, described(value.__self__)) if hasattr(value, "__self__") else type(value).__name__


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("kind", [Opaque, OpaqueByFunction, OpaqueByDefault, WithContract])
def test_nothing_of_the_compilers_is_left(kind: Any, made: str, backend: str, heard: Heard) -> None:
    maker = fusewright.allow_in_graph(lambda x: MADE[made](kind, x))
    for use in USED.values():
        for make in (lambda: torch.arange(6.0).reshape(2, 3), lambda: kind(torch.arange(6.0).reshape(2, 3))):

            def function(x: torch.Tensor, store: list[Any], use: Any = use) -> Any:
                return use(maker(x * 2), x, store)

            fusewright.reset()
            compiled = fusewright.compile(function, backend=backend)
            for _ in range(2):
                stores: tuple[list[Any], list[Any]] = [], []
                expected, found = function(make(), stores[0]), compiled(make(), stores[1])
                assert described((found, stores[1])) == described((expected, stores[0]))
    assert not heard.of(events.InternalError)


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("kind", [Opaque, OpaqueByFunction, OpaqueByDefault, WithContract])
def test_as_arguments_and_parameters(kind: Any, backend: str, heard: Heard) -> None:
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(kind(layer.weight.detach()), requires_grad=False)
    x = torch.arange(6.0).reshape(2, 3)
    for function, args in (
        (layer, (x,)),
        (lambda a, b: (a * 2 + b, b + 1), (kind(x), x)),
        (lambda a: [kind(a + 1), a * 2], (x,)),
    ):
        compiled = fusewright.compile(function, backend=backend)
        for _ in range(2):
            assert described(compiled(*args)) == described(function(*args))
    assert not heard.of(events.InternalError)
