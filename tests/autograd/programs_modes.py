"""Programs of autograd. Autocast, saved-tensor hooks, anomaly detection, functorch, grad and inference mode, modules with state. See `programs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.autograd.programs import Compiled, program, random


@program
def autocast_in(compiled: Compiled) -> list[Any]:
    m = nn.Linear(8, 8)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)
    i = random(4, 8)

    def fn(i):
        with torch.autocast("cpu", torch.bfloat16):
            return m(i)

    y = compiled(fn)(i)
    y.float().sum().backward()
    return [y, m.weight.grad, i.grad]


@program
def autocast_fp16_out(compiled: Compiled) -> list[Any]:
    m = nn.Linear(8, 8)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)
    i = random(4, 8)
    f = compiled(lambda i: m(i).relu())
    r = []
    for en in (True, False, True):
        with torch.autocast("cpu", torch.float16, enabled=en):
            y = f(i)
        y.float().sum().backward()
        r += [y]
    return r + [m.weight.grad, i.grad]


@program
def autocast_decorator(compiled: Compiled) -> list[Any]:
    m = nn.Linear(8, 8)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)
    i = random(4, 8)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def fn(i):
        return m(i)

    y = compiled(fn)(i)
    y.float().sum().backward()
    return [y, m.weight.grad, i.grad]


@program
def recurrent_under_autocast(compiled: Compiled) -> list[Any]:
    first, second = nn.RNN(4, 4), nn.LSTM(4, 4)
    for one in (parameter for net in (first, second) for parameter in net.parameters()):
        nn.init.constant_(one, 0.25)
    i = random(1, 3, 4)

    def fn(i):
        with torch.autocast("cpu", torch.bfloat16):
            return second(first(i)[0])[0]

    compiled(fn)(i).float().sum().backward()
    return [i.grad, *(one.grad for net in (first, second) for one in net.parameters())]


@program
def saved_hooks_outside(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    n = []
    f = compiled(lambda a: a.sin().exp())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (n.append(1), t)[1], lambda t: t):
        y = f(a)
    y.sum().backward()
    return [y, a.grad]


@program
def saved_hooks_inside(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            return a.sin().exp()

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def save_on_cpu_(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        with torch.autograd.graph.save_on_cpu():
            return a.sin().exp()

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


def _second_order(function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> list[Any]:
    a = values.clone().requires_grad_()
    y = function(a)
    (first,) = torch.autograd.grad(y.pow(2).sum(), a, create_graph=True)
    (first.sin().sum() + y.sum()).backward()
    return [y, first, a.grad]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0] ** 2


def _doubled(t: torch.Tensor) -> torch.Tensor:
    return t * 2


@program
def gradients_of_gradients_of_what_hooks_saved(compiled: Compiled) -> list[Any]:
    """What they give back is not what they were given: only what eager saves there may pass through them."""
    hooks, found = torch.autograd.graph.saved_tensors_hooks, []

    def nested(a: torch.Tensor) -> torch.Tensor:
        scale = a.detach().sum()
        with hooks(lambda t: t * scale, lambda t: t / scale + 1):
            b = a.sin() * a
            with hooks(_doubled, lambda t: t.float()):
                b = Cubed.apply(b.exp())
            b = b.tanh()
        return b * a

    def on_cpu(a: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return a.sin().exp() * a

    for function in (nested, on_cpu):
        f = compiled(function)
        for size in (3, 5, 4):
            found += _second_order(f, random(size, 3, g=False))
    return found


@program
def saved_elements_that_share_memory(compiled: Compiled) -> list[Any]:
    """What hooks give back is laid out again as it was saved."""
    found: list[Any] = []
    f = compiled(lambda x, w: (x.sin() * w).exp() * x)
    given = [random(3, 1).expand(3, 4), random(6).unfold(0, 3, 1), random(4).expand(3, 4)[:, ::2], random(1).bfloat16().expand(3, 4)]
    for x in given:
        w = random(*x.shape)
        for packed in (lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t.double().contiguous()):
            with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
                found += torch.autograd.grad(f(x, w).sum(), (x, w), retain_graph=True)
    return found


@program
def anomaly(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    with torch.autograd.detect_anomaly(check_nan=True):
        y = compiled(lambda a: a.sin())(a)
        y.sum().backward()
    return [y, a.grad]


@program
def anomaly_nan(compiled: Compiled) -> list[Any]:
    a = torch.zeros(3, requires_grad=True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            y = compiled(lambda a: (a * 0).sqrt() * 0)(a)
            y.sum().backward()
    except RuntimeError:
        return ["raised"]
    return ["no"]


@program
def func_grad(compiled: Compiled) -> list[Any]:
    a = random(3, g=False)
    return [compiled(lambda a: torch.func.grad(lambda t: t.sin().sum())(a))(a)]


@program
def func_vmap(compiled: Compiled) -> list[Any]:
    a = random(5, 3, g=False)
    return [compiled(lambda a: torch.vmap(lambda t: t.sin().sum())(a))(a)]


@program
def func_grad_of_compiled(compiled: Compiled) -> list[Any]:
    a = random(3, g=False)
    f = compiled(lambda t: t.sin().sum())
    return [torch.func.grad(f)(a)]


@program
def vmap_of_compiled(compiled: Compiled) -> list[Any]:
    a = random(5, 3, g=False)
    f = compiled(lambda t: t.sin().sum())
    return [torch.vmap(f)(a)]


@program
def jvp_of_compiled(compiled: Compiled) -> list[Any]:
    a = random(3, g=False)
    f = compiled(lambda t: t.sin())
    return list(torch.func.jvp(f, (a,), (torch.ones(3),)))


@program
def forward_ad_dual(compiled: Compiled) -> list[Any]:
    a = random(3, g=False)
    f = compiled(lambda t: t.sin())
    with torch.autograd.forward_ad.dual_level():
        d = torch.autograd.forward_ad.make_dual(a, torch.ones(3))
        y = f(d)
        p, t = torch.autograd.forward_ad.unpack_dual(y)
    return [p, t]


@program
def bn_train(compiled: Compiled) -> list[Any]:
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    for p in m.parameters():
        nn.init.constant_(p, 0.1)
    f = compiled(m)
    i = random(2, 3, 5, 5)
    for _ in range(3):
        y = f(i)
        y.pow(2).sum().backward()
    return [y, i.grad, m[1].running_mean, m[1].running_var, m[1].num_batches_tracked, m[0].weight.grad]


@program
def set_grad_enabled_toggle(compiled: Compiled) -> list[Any]:
    a = random(3)
    f = compiled(lambda a: a * 2)
    with torch.no_grad():
        u = f(a)
    v = f(a)
    assert not u.requires_grad and v.requires_grad
    return [u, v]


@program
def inference_mode_outer(compiled: Compiled) -> list[Any]:
    a = random(3)
    f = compiled(lambda a: a * 2)
    with torch.inference_mode():
        u = f(a)
    v = f(a)
    assert u.is_inference() and v.requires_grad
    return [v]


@program
def complex_grad(compiled: Compiled) -> list[Any]:
    a = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = compiled(lambda a: (a * a.conj()).real.sum())(a)
    y.backward()
    return [y, a.grad]


@program
def scalar_tensor_item_in_loss(compiled: Compiled) -> list[Any]:
    a = random(3)

    def fn(a):
        l = a.sin().sum()
        v = l.item()
        return l * v

    y = compiled(fn)(a)
    y.backward()
    return [y, a.grad]


@program
def dict_outputs(compiled: Compiled) -> list[Any]:
    a = random(3)
    o = compiled(lambda a: {"l": a.sin().sum(), "n": [a * 2, 3]})(a)
    (o["l"] + o["n"][0].sum()).backward()
    return [o["l"], a.grad]


@program
def closure_grad_tensor(compiled: Compiled) -> list[Any]:
    w = random(3, seed=9)
    a = random(3)
    y = compiled(lambda a: a * w)(a)
    y.sum().backward()
    return [y, w.grad]


@program
def weight_norm_(compiled: Compiled) -> list[Any]:
    torch.manual_seed(0)
    m = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    f = compiled(m)
    y = f(random(2, 3))
    y.sum().backward()
    return [y] + [p.grad for p in m.parameters()]


@program
def spectral_norm_(compiled: Compiled) -> list[Any]:
    torch.manual_seed(0)
    m = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    f = compiled(m)
    y = f(random(2, 3))
    y.sum().backward()
    return [y] + [p.grad for p in m.parameters()] + list(m.buffers())


@program
def running_state_module(compiled: Compiled) -> list[Any]:
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("ema", torch.zeros(3))
            s.w = nn.Parameter(torch.ones(3))

        def forward(s, i):
            with torch.no_grad():
                s.ema.mul_(0.9).add_(i.mean(0), alpha=0.1)
            return i * s.w - s.ema

    m = M()
    f = compiled(m)
    for k in range(3):
        y = f(random(4, 3, g=False, seed=k))
        y.pow(2).sum().backward()
    return [y, m.ema, m.w.grad]


@program
def recurrent_layers(compiled: Compiled) -> list[Any]:
    torch.manual_seed(0)
    first, second = nn.GRU(4, 5, batch_first=True), nn.LSTM(5, 3, bidirectional=True, batch_first=True)
    a = random(2, 6, 4)
    y = compiled(lambda a: second(first(a)[0])[0])(a)
    y.pow(2).sum().backward()
    return [y, a.grad, *(p.grad for module in (first, second) for p in module.parameters())]


@program
def written_behind_a_break_in_no_grad(compiled: Compiled) -> list[Any]:
    """The call of the rest begins without gradients, and writes where there are some."""

    def fn(a, b, other):
        with torch.no_grad():
            other.unsqueeze_(0)
        a.mul_(b)
        return b + 1

    leaf = random(3)
    a, b = leaf * 2, random(3) + 1
    (compiled(fn)(a, b, random(3)).sum() + a.sum()).backward()
    return [a.detach(), a.requires_grad, b.detach(), leaf.grad]


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


def _raises_behind_a_view(compiled: Compiled, raises: Callable[[torch.Tensor], Any]) -> list[Any]:
    """A view that is made in no_grad leads to nothing, yet the backward of what is computed from it runs."""

    def alone(x: torch.Tensor) -> Any:
        with torch.no_grad():
            seen = x[None]
        return raises(seen)

    def beside(x: torch.Tensor) -> Any:
        with torch.no_grad():
            seen = x[None]
        return x.sin(), raises(seen)

    found: list[Any] = []
    for function in (alone, beside):
        results = compiled(function)(random(3))
        try:
            sum(one.sum() for one in pytree.tree_leaves(results)).backward()
            found.append("nothing raised")
        except (RuntimeError, ValueError) as error:
            found.append(type(error).__name__)
    return found


@program
def behind_a_view_in_no_grad_a_function_raises(compiled: Compiled) -> list[Any]:
    return _raises_behind_a_view(compiled, _Refusing.apply)


@program
def behind_a_view_in_no_grad_a_hook_raises(compiled: Compiled) -> list[Any]:
    def hooked(seen: torch.Tensor) -> torch.Tensor:
        made = seen.sin()
        made.register_hook(lambda gradient: torch.stack([gradient, gradient]))
        return made * 2

    return _raises_behind_a_view(compiled, hooked)


@program
def behind_a_view_in_no_grad_an_operator_has_no_gradient(compiled: Compiled) -> list[Any]:
    return _raises_behind_a_view(compiled, lambda seen: torch.linalg.ldl_factor(seen.mT @ seen)[0])


@program
def behind_a_view_in_no_grad_what_was_saved_is_written_to(compiled: Compiled) -> list[Any]:
    def written(seen: torch.Tensor) -> torch.Tensor:
        saved = seen * 2
        made = saved.sin()
        saved.add_(1)
        return made

    def factor(seen: torch.Tensor) -> torch.Tensor:
        leaf, saved = seen.detach().requires_grad_(), seen.detach() * 2
        made = leaf * saved
        saved.add_(1)
        return made

    def base_written(seen: torch.Tensor) -> torch.Tensor:
        base = seen * 2
        with torch.no_grad():
            view = base[0]
        made = view.sin()
        base.zero_()
        return made

    return [_raises_behind_a_view(compiled, one) for one in (written, factor, base_written)]


def _hooked_and_written(compiled: Compiled, give: Callable[[torch.Tensor], Any]) -> list[Any]:
    """What is written with its history has two gradients; a view that is written to without loses its hooks."""

    def in_no_grad(a: torch.Tensor) -> None:
        with torch.no_grad():
            a.mul_(1.5)

    found: list[Any] = []
    writes: list[Callable[[torch.Tensor], Any]] = [in_no_grad, lambda a: a.detach().mul_(3), lambda a: a.mul_(3)]
    for write in writes:
        with_history = write is writes[-1]
        views = (lambda leaf: leaf * 1, lambda leaf: leaf.t(), lambda leaf: (leaf * 1)[1:])
        for view in views[:1] if with_history else views:
            for first in (True, False) if with_history else (True,):  # in eager a hook on a view written before crashes

                def fn(a: torch.Tensor, write: Any = write, first: bool = first) -> torch.Tensor:
                    if first:
                        give(a)
                    write(a)
                    if not first:
                        give(a)
                    return a * 2

                leaf = random(3, 4)
                a = view(leaf)
                (compiled(fn)(a).sum() + a.sum()).backward()
                found += [leaf.grad, a.grad if a.retains_grad else None]
    return found


@program
def given_a_hook_and_written_to(compiled: Compiled) -> list[Any]:
    return _hooked_and_written(compiled, lambda a: a.register_hook(lambda gradient: gradient * 2))


@program
def retains_its_gradient_and_is_written_to(compiled: Compiled) -> list[Any]:
    return _hooked_and_written(compiled, lambda a: a.retain_grad())
