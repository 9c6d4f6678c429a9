"""Tensors that wrap others of varying size: jagged nested tensors of other lengths, wrappers of other sizes. Each call
equals eager in results and gradients, and few versions serve all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright.base import events
from tests.capture.call.comparing import same

LENGTHS = ([2, 3], [4, 1], [3, 3], [5, 2], [1, 6])


def jagged(call: int, grad: bool = False) -> Any:
    generator = torch.Generator().manual_seed(call)
    rows = [torch.randn(length, 4, generator=generator) for length in LENGTHS[call]]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=grad)


weight = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: (x * 2).sin() + 1,
    "binary": lambda x: x * x.relu() + x,
    "linear": lambda x: F.linear(x, weight).relu(),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "softmax": lambda x: x.softmax(-1),
    "sum_of_features": lambda x: x.sum(-1),
    "sum_of_ragged": lambda x: x.sum(1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "values": lambda x: x.values() * 2,
    "offsets": lambda x: x.offsets() + x.values().sum().long(),
    "padded": lambda x: torch.nested.to_padded_tensor(x, -1.0),
    "cat": lambda x: torch.cat([x, x * 2], -1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "dtype": lambda x: x.double() + 1,
    "detached": lambda x: x.clone().detach(),
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "made": lambda x: torch.nested.nested_tensor_from_jagged(x.values() * 2, x.offsets()) + 1,
    "in_place": lambda x: (x * 1).mul_(2),
    "dense_operand": lambda x: x + torch.linspace(0, 1, 4).expand(x.size(0), 1, 4),
}


# PyTorch has no gradient of the first two; that of the third reads sizes out of the data.
WITHOUT_GRADIENT = ("sum_of_features", "sum_of_ragged", "padded")


def dense(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return (type(value), value.requires_grad, value.offsets(), value.values().detach())
    return value


def outcome(function: Callable[[Any], Any], call: int, grad: bool) -> Any:
    x, weight.grad = jagged(call, grad), None
    result = function(x)
    if result.requires_grad:
        (result.values() if result.is_nested else result).square().sum().backward()
    return dense(result), dense(x.grad), weight.grad, dense(x.detach())


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize(
    ("name", "grad"), [(name, grad) for name in PROGRAMS for grad in (False, True) if name not in WITHOUT_GRADIENT * grad]
)
def test_jagged_tensors_equal_eager(name: str, grad: bool, backend: str) -> None:
    fusewright.reset()
    function = PROGRAMS[name]
    compiled = fusewright.compile(function, backend=backend, fullgraph=True)
    with events.STREAM.listening((heard := []).append):
        for call in range(len(LENGTHS)):
            same(outcome(compiled, call, grad), outcome(function, call, grad), rel=1e-5)
    assert sum(isinstance(event, events.Captured) for event in heard) <= 2


def test_tensors_of_other_offsets_do_not_fit_each_other() -> None:
    compiled = fusewright.compile(lambda x, y: x + y)
    x = jagged(0)
    same(dense(compiled(x, x * 2)), dense(x * 3))
    with pytest.raises(RuntimeError, match="cannot call binary pointwise"):
        compiled(x, jagged(1))


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("layer", [torch.nn.GRU(4, 4, batch_first=True), lambda x: (x * len(range(x.shape[1])),)])
def test_a_program_may_fix_the_length_that_a_jagged_tensor_keeps(layer: Any, backend: str) -> None:
    compiled = fusewright.compile(lambda x: layer(x.to_padded_tensor(0.0))[0], backend=backend)
    for call in range(len(LENGTHS)):
        x = jagged(call)
        same(compiled(x), layer(x.to_padded_tensor(0.0))[0], rel=1e-5)
        assert "max_seqlen" in x._metadata_cache  # a tensor of that size, which PyTorch marks as dynamic
        same(compiled(x), layer(x.to_padded_tensor(0.0))[0], rel=1e-5)


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_ragged_length_that_leaves_the_call(backend: str) -> None:
    kept: list[Any] = []

    def function(x: Any) -> Any:
        kept.append((x * 2).shape)
        return x.shape[1], x * 3

    compiled = fusewright.compile(function, backend=backend)
    with events.STREAM.listening((heard := []).append):
        for call in range(3):
            x = jagged(call)
            length, result = compiled(x)
            assert length == x.shape[1] and kept.pop() == x.shape
            same(dense(result), dense(x * 3))
    assert not [event for event in heard if isinstance(event, events.InternalError)]


class Both(torch.Tensor):
    """Two tensors of one shape."""

    @staticmethod
    def __new__(cls, a: Any, b: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype)  # type: ignore

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Both(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sides = [
            func(*torch.utils._pytree.tree_map(lambda one: getattr(one, side, one), args), **(kwargs or {}))
            for side in ("a", "b")
        ]
        return Both(*sides) if isinstance(sides[0], torch.Tensor) else sides[0]


def both(rows: int, grad: bool = False) -> Any:
    start = torch.arange(3.0 * rows).reshape(rows, 3)
    return Both(start, start + 1).requires_grad_(grad)


WRAPPED: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "pointwise": (lambda x: x * 2 + 1, both),
    "of_wrappers": (lambda x: x * 2, lambda rows: Both(both(rows), both(rows))),
    "transposed": (lambda x: x.t().sin(), lambda rows: both(rows).t()),
    "trained": (lambda x: (x * x).sin().sum(), lambda rows: both(rows, True)),
    "size": (lambda x: x * x.shape[0], both),
}


def plain(value: Any) -> Any:
    if isinstance(value, Both):
        return (tuple(value.shape), value.stride(), value.requires_grad, plain(value.a), plain(value.b))
    return value


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_of_other_sizes_equal_eager(name: str, backend: str, dynamic: bool | None) -> None:
    fusewright.reset()
    function, make = WRAPPED[name]
    compiled = fusewright.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    with events.STREAM.listening((heard := []).append):
        for rows in (3, 4, 5, 7):
            found = []
            for one in (compiled, function):
                x = make(rows)
                result = one(x)
                gradients = torch.autograd.grad(result, x) if result.requires_grad else ()
                found.append((plain(result), tuple(map(plain, gradients)), plain(x)))
            same(*found, rel=1e-5)
    assert sum(isinstance(event, events.Captured) for event in heard) <= 2
