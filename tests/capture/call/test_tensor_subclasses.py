"""Programs over tensor subclasses are captured whole, or break where OPEN says so; either way they equal eager in
results, classes, attributes, effects and gradients, call after call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._pytree import tree_leaves, tree_map_only

import fusewright
from fusewright.base import events
from tests.capture.call.comparing import same

CALLS = 3
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {}

# What is not captured whole: on both backends, and on torch level alone.
OPEN = frozenset(
    """
    int8_leaves_with_history nested_detached_in_place nested_hook nested_hook_behind_a_use nested_hook_of_a_leaf
    nested_hook_on_accumulation nested_kept_gradient nested_leaf pair_hook pair_kept_gradient quantised_input sparse_input
    tagged_backward_inside tagged_view_with_history wrapper_of_wrappers_gradient
    """.split()
)


# Classes of plain tensors with Python code of their own.


class Named(torch.Tensor):
    """PyTorch's own `__torch_function__`, and attributes."""

    label = "none"


class Logged(torch.Tensor):
    """Calls that of its base, and counts."""

    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs)


class Boxes(torch.Tensor):
    """As torchvision's: operators unwrap, some keep the class and its `size`."""

    size_of: tuple[int, int]

    @staticmethod
    def __new__(cls: Any, data: Any, *, size_of: Any) -> Any:
        made = torch.as_tensor(data).as_subclass(cls)
        made.size_of = size_of
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.clone, torch.Tensor.to) and isinstance(args[0], cls):
            kept = output.as_subclass(cls)
            kept.size_of = args[0].size_of
            return kept
        return output.as_subclass(torch.Tensor) if isinstance(output, cls) else output

    @property
    def area(self) -> Any:
        return (self[:, 2] - self[:, 0]) * (self[:, 3] - self[:, 1])


class Scaled(torch.Tensor):
    """Computes something else for one function, by a table."""

    handled: dict[Any, Any] = {}
    factor = 2.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.handled:
            return cls.handled[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    def scaled(self) -> Any:
        return self * self.factor


def scaled_relu(x: Any, inplace: bool = False) -> Any:
    return F.relu(x.as_subclass(torch.Tensor)) * 3


Scaled.handled[F.relu] = scaled_relu


class Silent(torch.Tensor):
    """Overrides nothing: its results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Operators(Named):
    """Special methods of its own, and attributes that are computed."""

    def __add__(self, other: Any) -> Any:
        return torch.sub(self, other)

    def __radd__(self, other: Any) -> Any:
        return torch.mul(self, other)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) + 0.5

    def __getattr__(self, name: str) -> Any:
        if name == "doubled":
            return self * 2
        raise AttributeError(name)


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


# Classes of tensors that hold others.


class Pair(torch.Tensor):
    """Two tensors that go through all operators side by side, with gradients."""

    a: torch.Tensor
    b: torch.Tensor
    note: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, a: Any, b: Any, note: str = "", stride: Any = None) -> Any:
        stride = a.stride() if stride is None else stride
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=stride, dtype=a.dtype, device=a.device, requires_grad=a.requires_grad
        )

    def __init__(self, a: Any, b: Any, note: str = "", stride: Any = None) -> None:
        self.a, self.b, self.note = a, b, note

    def __repr__(self) -> str:  # type: ignore[override]
        return "Pair"

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], self.note

    @staticmethod
    def __tensor_unflatten__(parts: Any, note: Any, size: Any, stride: Any) -> Any:
        return Pair(parts["a"], parts["b"], note, stride)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        note = next((one.note for one in args if isinstance(one, Pair)), "")
        sides = [
            func(*tree_map_only(Pair, one, args), **tree_map_only(Pair, one, kwargs))
            for one in (lambda pair: pair.a, lambda pair: pair.b)
        ]
        if func.__name__.split(".")[0].endswith("_") and isinstance(args[0], Pair):
            return args[0]
        if isinstance(sides[0], torch.Tensor):
            return Pair(*sides, note)
        return type(sides[0])(Pair(*pair, note) for pair in zip(*sides)) if isinstance(sides[0], tuple) else sides[0]


class Int8(torch.Tensor):
    """A weight in eight bits, as torchao's."""

    rows: torch.Tensor
    scale: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, rows: Any, scale: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, rows.shape, dtype=scale.dtype, device=rows.device)

    def __init__(self, rows: Any, scale: Any) -> None:
        self.rows, self.scale = rows, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return "Int8"

    @classmethod
    def of(cls, weight: Any) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> Any:
        return ["rows", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(parts["rows"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.clone.default):
            return cls(func(args[0].rows), func(args[0].scale))
        plain = [one.rows.to(one.dtype) * one.scale if isinstance(one, Int8) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Tagged(torch.Tensor):
    """Floats, integers that come along, and a context that products change; its sum is a plain tensor."""

    data_: torch.Tensor
    ids: torch.Tensor
    tag: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, data: Any, ids: Any, tag: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, strides=data.stride())

    def __init__(self, data: Any, ids: Any, tag: int) -> None:
        self.data_, self.ids, self.tag = data, ids, tag

    def __repr__(self) -> str:  # type: ignore[override]
        return "Tagged"

    def __tensor_flatten__(self) -> Any:
        return ["data_", "ids"], (self.tag,)

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return Tagged(parts["data_"], parts["ids"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(one for one in tree_leaves(args) if isinstance(one, Tagged))
        made = func(*tree_map_only(Tagged, lambda one: one.data_, args), **(kwargs or {}))
        if func.__name__.split(".")[0].endswith("_"):
            return args[0]
        if func is torch.ops.aten.sum.default:
            return made
        tag = first.tag + (func is torch.ops.aten.mul.Tensor)
        return tree_map_only(torch.Tensor, lambda one: Tagged(one, first.ids, tag), made)


def numbers(kind: Any, grad: bool = False, **attributes: Any) -> Any:
    made = torch.arange(-2.0, 4.0).reshape(2, 3).as_subclass(kind)
    made.__dict__.update(attributes)
    return made.requires_grad_() if grad else made


def boxes() -> Any:
    return Boxes(torch.tensor([[0.0, 0, 2, 3], [1, 1, 4, 5]]), size_of=(5, 6))


def pair(grad: bool = False, note: str = "n") -> Any:
    made = Pair(torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) - 3, note)
    return made.requires_grad_() if grad else made


def tagged(grad: bool = False, tag: int = 0) -> Any:
    made = Tagged(torch.arange(6.0).reshape(2, 3), torch.arange(3), tag)
    return made.requires_grad_() if grad else made


def pair_of_tagged(grad: bool = False) -> Any:
    made = Pair(tagged(), tagged(tag=3), "outer")
    return made.requires_grad_() if grad else made


class PairLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(pair())

    def forward(self, x: Any) -> Any:
        return (self.weight * x).sin()


def nested(grad: bool = False) -> Any:
    made = torch.nested.nested_tensor([torch.arange(6.0).reshape(2, 3), torch.ones(3, 3)], layout=torch.jagged)
    return made.requires_grad_() if grad else made


def layer() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Linear(3, 4)
    made.weight = nn.Parameter(Int8.of(made.weight.detach()), requires_grad=False)
    return made


def program(*makers: Any) -> Any:
    def add(function: Any) -> Any:
        PROGRAMS[function.__name__] = (function, lambda: tuple(make() for make in makers))
        return function

    return add


def plain() -> Any:
    return torch.ones(2, 3)


@program(lambda: numbers(Named, label="x"))
def attribute_read(x):
    return x * 2, x.label


@program(lambda: numbers(Named))
def class_attribute(x):
    return x + (1 if x.label == "none" else 2), type(x).__name__, isinstance(x, Named)


@program(lambda: numbers(Named), plain)
def mixed_with_plain(x, y):
    return y + x, x @ y.t(), torch.stack([y, x])


@program(lambda: numbers(Named))
def containers_of_results(x):
    return x.max(0), x.unbind(0), x.split(1), torch.topk(x, 2)


@program(lambda: numbers(Named, grad=True))
def gradient_to_leaf(x):
    return ((x * x).sigmoid() + x.t().reshape(2, 3)).sum()


@program(lambda: numbers(Named))
def in_place(x):
    x.add_(1)
    x[0] = 5.0
    x *= 2
    return x


@program(lambda: numbers(Named))
def attribute_store(x):
    x.label = "changed"
    y = x + 1
    y.label = "made"
    return y


@program(lambda: numbers(Named))
def views(x):
    return x[0], x.t(), x.view(3, 2)[1:], x.T


@program(lambda: numbers(Named))
def facts(x):
    return x.shape, x.dtype, x.ndim, len(x), x.size(0), x.requires_grad, x.device.type, x.numel(), x.is_leaf


@program(plain)
def made_inside(x):
    return x.as_subclass(Named) + 1, Named(x * 2), torch.Tensor._make_subclass(Named, x)


@program(lambda: torch.ones(2, 3, requires_grad=True))
def made_inside_with_gradient(x):
    return (x.as_subclass(Named) * 3).exp().sum()


@program(lambda: numbers(Named))
def unwrapped(x):
    y = x.as_subclass(torch.Tensor)
    return y + 1, y.sum(), x.detach()


@program(lambda: numbers(Named))
def no_override_context(x):
    with torch._C.DisableTorchFunctionSubclass():
        y = x + 1
    return y, x + 1


@program(lambda: numbers(Named))
def iterated(x):
    return [row * 2 for row in x], sum(x)


@program(lambda: numbers(Named))
def through_functional(x):
    return F.softmax(x, -1), F.layer_norm(x, (3,)), F.gelu(x), F.pad(x, (1, 1)), F.dropout(x, 0.5, training=False)


@program(made := lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4)), lambda: numbers(Named))
def through_modules(m, x):
    with torch.no_grad():
        for one in m.parameters():
            one.fill_(0.5)
    return m(x)


@program(lambda: numbers(Logged))
def counted(x):
    Logged.calls.clear()
    y = (x + 1).relu().reshape(-1)[1:]
    z = y.shape[0] * y.dtype.is_floating_point
    return y, z, list(Logged.calls)


@program(lambda: numbers(Logged), plain)
def counted_operators(x, y):
    Logged.calls.clear()
    made = [x - 1, 1 - x, 2 / (x + 3), x**2, -x, x == 1, x > y, y @ x.t(), x // 2, x % 2, abs(x), ~(x > 0), 2**x]
    return made, list(Logged.calls)


@program(boxes)
def boxes_unwrap(b):
    return b + 1, b.clone(), b.clone().size_of, b.to(torch.float64)


@program(boxes)
def boxes_property(b):
    return b.area, b.size_of


@program(lambda: torch.rand(2, 4).round())
def boxes_made(x):
    b = Boxes(x, size_of=(3, 4))
    return b, b.clone(), b * 2


@program(boxes)
def boxes_in_place(b):
    b += 1
    return b.add_(1), b


@program(lambda: numbers(Scaled))
def table_of_handlers(x):
    return F.relu(x), torch.relu(x), x.scaled()


@program(lambda: numbers(Scaled, grad=True))
def table_of_handlers_gradient(x):
    return (F.relu(x) + x.scaled()).sum()


@program(lambda: numbers(Silent, label="s"))
def silent_class(x):
    return x + 1, x.label, x.t(), x


@program(lambda: numbers(Operators))
def special_methods(x):
    return x + 1, 2 + x, x[0], x.doubled


@program(lambda: numbers(Operators), plain)
def special_methods_with_plain(x, y):
    return x + y, y + x, x - y


@program(lambda: numbers(Refusing))
def refused(x):
    try:
        return x + 1
    except TypeError as error:
        return str(error)


@program(lambda: numbers(Named), lambda: numbers(Scaled))
def two_classes(x, y):
    try:
        return torch.add(x, y)
    except TypeError:
        return x.sum()


@program(lambda: numbers(Named))
def passed_through(x):
    return x, {"again": x}, x.sum()


# Tensors that hold others.


@program(pair)
def pair_result(p):
    return (p * 2 + 1).sin()


@program(pair)
def pair_parts(p):
    return p.a + p.b, p.note, (p + 1).a


@program(pair, plain)
def pair_made(p, x):
    return Pair(x + 1, x - 1, "made") * 2, p.t()


@program(plain)
def pair_made_of_plain(x):
    return Pair(x * 2, x * 3, "inside")


@program(lambda: pair(True))
def pair_leaf_gradient(p):
    return (p * p).sum().a


@program(lambda: pair(True))
def pair_gradient_of_another_layout(p):
    return (p.t().contiguous() * p.shape[0]).exp().sum()


@program(lambda: pair(True), lambda: torch.full((2, 3), 2.0, requires_grad=True))
def pair_gradients(p, x):
    out = p * 3 + (x * x).sum()
    return out.exp().sum().b


@program(lambda: pair(True))
def pair_returned_with_gradient(p):
    return (p * p).sum()


@program(pair)
def pair_in_place(p):
    p.add_(1)
    p.mul_(2)
    return p.sum()


@program(pair)
def pair_in_place_of_part(p):
    p.a.add_(1)
    return p + 0


@program(pair)
def pair_through_functional(p):
    return F.softmax(p, -1), F.relu(p - 1), torch.cat([p, p])


@program(pair)
def pair_containers(p):
    return p.unbind(0), [p, p + 1], {"k": p.sum(0)}


@program(lambda: torch.ones(4, 3))
def pair_linear(x):
    return F.linear(Pair(x, x + 1, "l"), torch.full((2, 3), 0.5))


@program(layer, lambda: torch.arange(6.0).reshape(2, 3))
def int8_layer(m, x):
    return F.gelu(m(x))


@program(layer, lambda: torch.arange(6.0).reshape(2, 3).requires_grad_())
def int8_layer_gradient(m, x):
    return m(x).square().sum()


@program(lambda: torch.arange(6.0).reshape(2, 3) + 1)
def int8_made(x):
    made = Int8.of(x)
    return made, F.linear(x, made)


@program(lambda: Int8.of(plain()).requires_grad_(), lambda: torch.ones(2, 3, requires_grad=True))
def int8_plain_gradient_of_a_wrapper(w, x):
    return F.linear(x, w).sum()


@program(lambda: Int8.of(plain()).requires_grad_())
def int8_leaves_with_history(w):
    return w.clone()


@program(PairLayer, plain)
def wrapper_parameter(m, x):
    return m(x).sum()


@program(PairLayer, plain)
def wrapper_parameter_updated(m, x):
    with torch.no_grad():
        m.weight.sub_(0.5)
    return m(x).sum(), m.weight.is_leaf, m.weight.requires_grad, m.weight.grad


@program(tagged)
def tagged_results(t):
    return t + 1, t * 2 * 3, t.t(), t.view(3, 2)


@program(lambda: tagged(True))
def tagged_gradient(t):
    return (t * t).sum()


@program(lambda: tagged(True) * 2)
def tagged_with_history(t):
    return t.exp().sum()


@program(lambda: tagged(True))
def tagged_gradients_of_two_kinds(t):
    return (t * t).sum() + t.sum()


@program(tagged)
def tagged_made_and_parts(t):
    return Tagged(t.data_ * 2, t.ids + 1, 7), t.data_, t


@program(tagged)
def tagged_in_place(t):
    t.add_(1)
    return t.mul_(2)


@program(lambda: tagged(True))
def tagged_in_place_with_history(t):
    y = t * 2
    y.add_(1)
    return y.sum()


@program(lambda: tagged(True))
def tagged_view_with_history(t):
    return t.t()


@program(tagged)
def tagged_attribute_of_made(t):
    made = t * 2
    made.tag = 9
    return made


@program(lambda: tagged(True))
def tagged_backward_inside(t):
    (t * t).sum().backward()
    return t.grad


@program(pair_of_tagged)
def wrapper_of_wrappers(p):
    return p * 2, p.a * 3


@program(lambda: pair_of_tagged(True))
def wrapper_of_wrappers_gradient(p):
    return p * p


@program(nested)
def nested_pointwise(n):
    return (n * 2).sin() + 1


@program(lambda: nested(True))
def nested_gradient(n):
    return ((n * n).sin()).values().sum()


@program(nested, lambda: torch.full((4, 3), 0.25))
def nested_linear(n, w):
    return F.relu(F.linear(n, w))


@program(lambda: torch.ones(5, 3), lambda: torch.tensor([0, 2, 5]))
def nested_made(values, offsets):
    return torch.nested.nested_tensor_from_jagged(values * 2, offsets) + 1


@program(lambda: nested(True))
def nested_hook(n):
    y = n * 2
    y.register_hook(lambda gradient: gradient * 3)
    return y.values().sum()


@program(lambda: nested(True))
def nested_hook_behind_a_use(n):
    y = n * 2
    z = y * 3
    y.register_hook(lambda gradient: gradient * 3)
    return z.values().sum()


@program(lambda: nested(True))
def nested_hook_of_a_leaf(n):
    n.register_hook(lambda gradient: gradient * 3)
    return (n * n).values().sum()


@program(lambda: nested(True))
def nested_hook_on_accumulation(n):
    n.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", leaf.grad * 3))
    return (n * n).values().sum()


@program(lambda: nested(True))
def nested_kept_gradient(n):
    y = n * 2
    y.retain_grad()
    y.values().sum().backward()
    return y.grad.values()


@program(nested)
def nested_detached_in_place(n):
    with torch.inference_mode():
        try:
            return n.detach_() * 2
        except NotImplementedError:
            return n * 3


@program(nested)
def nested_made_in_inference_mode(n):
    with torch.inference_mode():
        return n * 2


@program(lambda: nested(True))
def nested_leaf(n):
    return (n * 2).detach().requires_grad_()


@program(lambda: pair(True))
def pair_hook(p):
    y = p * 2
    y.register_hook(lambda gradient: gradient * 3)
    return y.sum()


@program(lambda: pair(True))
def pair_kept_gradient(p):
    y = p * 2
    y.retain_grad()
    return y.sum(), y.retains_grad


@program(pair)
def pair_made_in_inference_mode(p):
    with torch.inference_mode():
        return p * 2


# Tensors that are not traced.


@program(lambda: torch.eye(3).to_sparse(), lambda: torch.ones(3, 3))
def sparse_input(s, x):
    return torch.sparse.mm(s, x * 2) + 1


@program(lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8))
def quantised_input(q):
    return q.dequantize() + 1


def described(value: Any) -> Any:
    """What can be seen of a value, as plain data and plain tensors."""
    if isinstance(value, torch.Tensor):
        kind = type(value)
        if isinstance(value, (Pair, Int8, Tagged, NestedTensor)):
            names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = [described(getattr(value, name)) for name in names if "seqlen" not in name]
            context = None if isinstance(value, NestedTensor) else (context, tuple(value.shape), value.stride())
            return (
                kind,
                value.requires_grad,
                value.is_inference(),
                value.is_leaf,
                context,
                parts,
                described(value.grad) if value.is_leaf else 0,
            )
        with torch._C.DisableTorchFunctionSubclass():
            grad = described(value.grad) if value.is_leaf and value.grad is not None else None
            attributes = (
                {name: described(one) for name, one in value.__dict__.items()} if kind is not torch.Tensor else 0
            )
            if value.layout is not torch.strided or value.is_quantized:
                return kind, value.layout
            data = value.detach().as_subclass(torch.Tensor).clone()
            return kind, attributes, value.requires_grad, value.is_leaf, grad, value.stride(), data
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(described, value))
    if isinstance(value, dict):
        return {key: described(one) for key, one in value.items()}
    if isinstance(value, nn.Module):
        return [described(one) for one in value.parameters()]
    return (type(value), value)


def seen(function: Callable[..., Any], make: Callable[[], Any]) -> list[Any]:
    torch.manual_seed(5)
    found: list[Any] = []
    for _ in range(CALLS):
        args = make()
        result = function(*args)
        before = described(result)
        if isinstance(result, torch.Tensor) and result.requires_grad and result.dim() == 0 and not result.is_leaf:
            result.backward()
        found.append((before, described(args)))
    return found


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, backend: str) -> None:
    fusewright.reset()
    function, make = PROGRAMS[name]
    expected = seen(function, make)
    whole = name not in OPEN
    if not whole:
        with pytest.raises(fusewright.GraphBreakError):
            seen(fusewright.compile(function, backend=backend, fullgraph=True), make)
        fusewright.reset()
    same(seen(fusewright.compile(function, backend=backend, fullgraph=whole), make), expected)


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_plain_tensors_have_the_gradients_of_eager(backend: str) -> None:
    """Such a gradient is a wrapper: no graph gives one."""

    def function(t: Any, x: Any) -> Any:
        return (t * x).sum()

    def make() -> Any:
        return tagged(), torch.ones(2, 3, requires_grad=True)

    same(seen(fusewright.compile(function, backend=backend), make), seen(function, make))


@pytest.mark.parametrize("make", [nested, pair, tagged, partial(numbers, Named), partial(numbers, Logged)])
def test_a_history_within_a_call_without_gradients(make: Callable[[bool], Any]) -> None:
    def function(x: Any) -> Any:
        with torch.enable_grad():
            return x * 2

    with torch.no_grad():
        ours, theirs = fusewright.compile(function)(make(True)), function(make(True))
    assert theirs.grad_fn is not None
    same(described(ours), described(theirs))


def test_a_wrapper_written_to_in_place_has_another_version() -> None:
    t = tagged()
    saved = (torch.ones(2, 3, requires_grad=True) * t).sum()
    fusewright.compile(lambda t: t.add_(1), fullgraph=True)(t)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_wrappers_of_equal_context_share_a_graph() -> None:
    compiled = fusewright.compile(lambda t: t * 2, fullgraph=True)
    with events.STREAM.listening((heard := []).append):
        for tag in (0, 0, 1, 1, 0):
            assert compiled(tagged(tag=tag)).tag == tag + 1
    assert sum(isinstance(event, events.Captured) for event in heard) == 2


def test_the_gradient_of_a_result_of_another_context_is_an_error() -> None:
    """The backward was recorded for one kind of gradient."""
    p = pair(True)
    result = fusewright.compile(lambda p: p * 2, fullgraph=True)(p)
    with pytest.raises(RuntimeError, match="the gradient of a Pair"):
        result.backward(pair(note="another"))


def test_a_second_derivative_through_a_wrapper_is_refused() -> None:
    p = pair(True)
    result = fusewright.compile(lambda p: (p * p * p).sum(), fullgraph=True)(p)
    with pytest.raises(RuntimeError):
        (gradient,) = torch.autograd.grad(result, p, create_graph=True)
        gradient.sum().backward()


def _jagged(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))


OF_JAGGED: dict[str, Callable[[torch.Tensor], Any]] = {
    "values": lambda one: one.values(), "product": lambda one: (one * 2).values(), "both": lambda one: (one.values() * 3, (one + 1).values()),
    "written": lambda one: (one.values() * 1).mul_(2), "sum": lambda one: one.sum(), "itself": lambda one: (one, one.values())[1],
}  # fmt: skip
WHOSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a leaf's": _jagged, "computed": lambda x: _jagged(x * 3), "a view's": lambda x: _jagged(x[:]),
    "of a list": lambda x: torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    "a computed one's": lambda x: _jagged(x) * 2, "detached": lambda x: _jagged(x.detach()),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("name", OF_JAGGED)
def test_a_jagged_tensor_that_has_a_history(name: str, whose: str, backend: str) -> None:
    compiled = fusewright.compile(OF_JAGGED[name], backend=backend)
    for _ in range(2):
        found = []
        for function in (OF_JAGGED[name], compiled):
            x = torch.arange(6.0).reshape(3, 2).requires_grad_()
            results = tree_leaves(function(WHOSE[whose](x)))
            if results[0].requires_grad:
                torch.autograd.backward([one.sum() for one in results])
            found.append((*results, x.grad))
        for ours, eager in zip(*found, strict=True):
            assert (ours is None and eager is None) or torch.equal(ours, eager)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_another_class_where_gradients_are_not_followed(mode: Any) -> None:
    """Eager makes a leaf of it there, inside of a function or around it."""

    class Marked(torch.Tensor):
        pass

    def around(x: torch.Tensor) -> Any:
        return x.as_subclass(Marked)

    def inside(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return x.as_subclass(Marked), x * 3

    def seen(function: Any, x: torch.Tensor) -> list[tuple[Any, ...]]:
        with mode():
            made = function(x)
        return [(type(one), one.requires_grad, one.is_leaf, one.is_inference(), one._version if not one.is_inference() else 0)
                for one in (made if isinstance(made, tuple) else (made,))]  # fmt: skip

    leaf = torch.ones(3, requires_grad=True)
    for program in (around, inside):
        compiled = fusewright.compile(program)
        for x in (leaf, leaf * 2, (leaf * 2)[:2], torch.ones(3)):
            assert seen(compiled, x) == seen(program, x)
