# ruff: noqa
"""Tensors as Python objects: attributes, in-place operators, subclasses, __torch_function__, indexing, identity."""

from __future__ import annotations

import copy
import warnings

import torch

from tests.capture.interpret.language.support import program, x


class Tagged(torch.Tensor):
    """A subclass that keeps its class through operators."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})

    def tag(self):
        return "tagged"


class Wrapped:
    """A duck-typed tensor."""

    calls: list = []

    def __init__(self, value):
        self.value = value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        args = [a.value if isinstance(a, cls) else a for a in args]
        return cls(func(*args, **(kwargs or {})))


class Plain(Wrapped):
    """Its override is a plain method, which PyTorch still takes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*(a.value * 2 if a is self else a for a in args), **(kwargs or {}))


class AddingOne(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 1 if func is torch.add else result


@program("open-context", "transform-active")
def function_mode_entered_inside():
    def f(t):
        with AddingOne():
            y = torch.add(t, t)
        return torch.add(y, y)

    return f, [(x(),), (x(),)]


@program("unsupported-tensor")
def override_that_is_a_plain_method():
    with warnings.catch_warnings(action="ignore"):
        torch.add(Plain(x()), x())  # PyTorch warns once

    def f(t):
        return torch.add(Plain(t), t), torch.add(t, Plain(t), alpha=3)

    return f, [(x(),), (x(),)]


@program("unsupported-tensor")
def tensor_subclass_argument():
    def f(t):
        y = t + 1
        return y, y.tag(), type(y).__name__

    return f, [(x().as_subclass(Tagged),), (x().as_subclass(Tagged),)]


@program("unsupported-tensor")
def integers_with_a_gradient():
    """Eager lets a tensor with a gradient be written to them, and says that they require one."""
    made = torch.tensor([1, 2])
    made[1] = torch.tensor(2.5, requires_grad=True)

    def f(t):
        return t.detach() + 1, t.requires_grad

    return f, [(made,), (made,)]


@program(
    "unsupported-tensor",
    "untraceable-call",
    "opaque-object",
    "tensor-construction",
    "tensor-attribute",
    "operator-failed",
)
def tensor_subclass_made_inside():
    def f(x):
        t = x.as_subclass(Tagged)
        return t + 1, (t * 2).tag()

    return f, [(x(),), (x(),)]


@program
def torch_function_on_an_object():
    Wrapped.calls.clear()

    def f(x):
        w = torch.add(Wrapped(x), 1)
        return torch.mul(w, w).value, type(w).__name__

    return f, [(x(),), (x(),)], lambda: Wrapped.calls


@program
def torch_function_object_as_argument():
    Wrapped.calls.clear()

    def f(x, w):
        y = x + 1
        return torch.add(y, w).value

    return f, [(x(), Wrapped(x())), (x(), Wrapped(x()))], lambda: Wrapped.calls


@program
def inplace_operators():
    def f(x):
        y = x
        y += 1
        y *= 2
        z = y
        z -= x
        y[0] = 7
        return y is x, z is y, x

    return f, [(x(),), (x(),)]


@program
def inplace_on_a_fresh_tensor():
    def f(x):
        y = x + 1
        z = y
        y += 1
        w = y.view(-1)
        w.mul_(2)
        return y, z is y, w

    return f, [(x(),), (x(),)]


@program
def indexing():
    def f(x):
        return (
            x[0],
            x[:, 1],
            x[..., -1],
            x[None].shape,
            x[[1, 0]],
            x[x.new_ones(2, dtype=torch.long)],
            x[1, 2],
            x[::2],
            x[:, :, None].shape,
            x[(0,)],
            x[-1:],
        )

    return f, [(x(),), (x(),)]


@program
def index_assignment():
    def f(x):
        y = x.clone()
        y[0] = 1
        y[:, 1] = x[:, 0]
        y[1, 2] += 5
        y[[0, 1], [0, 1]] = -1
        y[...] = y * 2
        return y

    return f, [(x(),), (x(),)]


@program("data-dependent-shape")
def boolean_mask():
    def f(x):
        y = x[x > 0]
        return y * 2

    return f, [(x(),), (x() + 5,), (x(),)]


@program
def unpack_and_iterate():
    def f(x):
        a, b = x
        c = [row.sum() for row in x]
        d, e, *g = x.unbind(1)
        return (
            a + b,
            c,
            d,
            len(x),
            [i for i, _ in enumerate(x)],
            list(zip(x, x))[0][1],
            torch.stack(list(reversed(list(x)))),
        )

    return f, [(x(),), (x(),)]


@program
def attributes_of_tensors():
    def f(x, w):
        w.note = "kept"
        y = x + 1
        y.mark = 3
        return y, y.mark, w.note, w, x.requires_grad, w.is_leaf, x.T.shape, x.shape[-1], x.data, hasattr(x, "nothing")

    return f, [(x(), torch.ones(3)), (x(), torch.ones(3, requires_grad=True))]


@program
def constructors():
    def f(x):
        return (
            torch.zeros(2),
            torch.ones_like(x),
            torch.arange(3),
            torch.tensor([1.0, 2.0]),
            torch.full((2,), 3),
            torch.eye(2),
            x.new_tensor([1]),
            torch.empty(0).numel(),
            torch.linspace(0, 1, 3),
            torch.tensor(2),
        )

    return f, [(x(),), (x(),)]


@program
def dtypes_and_devices():
    def f(x):
        return (
            x.to(torch.float64),
            x.int(),
            x.type_as(torch.ones(1, dtype=torch.float16)),
            x.dtype is torch.float32,
            x.double().dtype,
            x.to("cpu").device,
            x.type(),
            x.cpu() is x,
            torch.finfo(x.dtype).max,
            torch.get_default_dtype(),
            x.bool(),
        )

    return f, [(x(),), (x(),)]


@program
def copy_of_tensors():
    def f(x):
        y = copy.copy(x) if False else x.clone()
        z = x.detach()
        return y, z, y is x, x.contiguous() is x, x.expand(2, 3), x.reshape(2, 3)

    return f, [(x(),), (x(),)]


@program
def numbers_of_classes_of_their_own_are_operands():
    class Whole(int):
        def __repr__(self):
            return "<whole>"

        def __pos__(self):
            return 100

    class Part(float):
        __repr__ = __str__ = lambda self: "<part>"

    def f(x):
        return x * Whole(3), Part(2.5) + x, x.sum(Whole(1)), torch.full((Whole(2),), Part(-0.0)), x.clamp(max=Part(1.5))

    return f, [(x(),), (x(),)]


@program
def scalar_promotion():
    def f(x, i):
        return (
            x + 1,
            x * True,
            i + 1,
            i + 1.5,
            i / 2,
            i // 2,
            2**i,
            1 - x,
            3 / (x + 10),
            i % 2,
            -i,
            +x,
            abs(x),
            i << 1,
            ~i,
            x**2,
        )

    return f, [(x(), torch.arange(3)), (x(), torch.arange(3, 6))]


@program
def comparisons_of_tensors():
    def f(x):
        return (
            x > 0,
            x == x,
            (x != 1).sum(),
            x.eq(2),
            (x > 0) & (x < 3),
            (x > 0).any(),
            torch.where(x > 0, x, -x),
            x is None,
            x is not x,
            [x is y for y in (x, None)],
        )

    return f, [(x(),), (x(),)]


@program
def in_place_on_arguments_and_views_returned():
    def f(x, y):
        x.add_(y)
        v = x[0]
        y.zero_()
        return v, x.add_(1) is x

    return f, [(x(), x()), (x(), x() * 2)]


@program
def out_argument():
    def f(x, out):
        torch.add(x, 1, out=out)
        return out * 2, out

    return f, [(x(), torch.empty(2, 3)), (x(), torch.empty(2, 3))]


@program
def same_tensor_twice():
    def f(a, b):
        a.add_(1)
        return a + b, a is b

    def both():
        t = x()
        return (t, t)

    return f, [both(), (x(), x()), both()]


@program
def return_structures():
    def f(x):
        y = x + 1
        return {"a": y, "b": [y, (y, None)], "c": (), "d": {"e": y * 2}}

    return f, [(x(),), (x(),)]


@program
def none_and_constants_are_returned():
    def f(x, n):
        x + 1
        return None if n == 0 else n if n == 1 else (x, None, 3.5, "s")

    return f, [(x(), 0), (x(), 1), (x(), 2)]


@program
def requires_grad_flows():
    def f(x, w):
        y = (x * w).sum()
        z = (x * w.detach()).sum()
        return y, z, y.requires_grad, z.requires_grad

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3))]


@program("autograd-call")
def backward_inside():
    def f(x, w):
        loss = (x * w).sum()
        loss.backward()
        return loss.detach(), w.grad

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3, requires_grad=True))]


@program("autograd-call")
def gradient_inside():
    def f(x, w):
        loss = (x * w).sum()
        (g,) = torch.autograd.grad(loss, w)
        return g * 2

    return f, [(x(), torch.ones(3, requires_grad=True)), (x(), torch.ones(3, requires_grad=True))]


@program
def random_tensors():
    def f(x):
        return torch.rand(3).shape, torch.randn_like(x).shape, torch.nn.functional.dropout(x, 0.5, False)

    return f, [(x(),), (x(),)]


# loop-goes-on: from Python 3.12 on the comprehension's loop is the function's own
@program("data-dependent-scalar", "data-dependent-branch", "outside-iterator", "loop-goes-on")
def values_are_read():
    def f(x):
        n = int(x.sum())
        y = x * n
        if y.max() > 3:
            y = y - 1
        return y, x.tolist(), float(x[0, 0]), bool(x[0, 1] > 100), [v.item() for v in x[0]]

    return f, [(x(),), (x() + 1,), (x(),)]


@program("tensor-address", "untraceable-call", "opaque-object", "numpy-call")
def numpy_inside():
    def f(x):
        y = x + 1
        a = y.numpy()
        return a.sum().item(), a.shape

    return f, [(x(),), (x(),)]


@program
def size_object():
    def f(x):
        s = x.size()
        return (
            s,
            s[0] + s[1],
            s.numel(),
            tuple(s),
            s == (2, 3),
            len(s),
            [*s],
            s[1:],
            x.reshape(s),
            torch.Size([1, 2]),
            isinstance(s, tuple),
        )

    return f, [(x(),), (x(),)]


@program
def tensor_methods_as_functions():
    def f(x):
        name = "relu"
        return (
            getattr(x, name)(),
            torch.Tensor.add(x, 1),
            getattr(torch, "sin")(x),
            x.__add__(1),
            torch.ops.aten.neg(x),
            torch.nn.functional.gelu(x),
            type(x).mul(x, 2),
        )

    return f, [(x(),), (x(),)]


@program
def einsum_and_friends():
    def f(x):
        return (
            torch.einsum("ij,kj->ik", x, x),
            torch.cat([x, x]),
            torch.split(x, 1),
            torch.chunk(x, 2, 1),
            torch.meshgrid(x[0], x[1], indexing="ij"),
            x.max(1),
            torch.topk(x, 2),
            x.sort(0).values,
            torch.broadcast_tensors(x, x[0]),
        )

    return f, [(x(),), (x(),)]
