"""Programs of autograd. Custom autograd functions and hooks. See `programs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from tests.autograd.programs import PROGRAMS, Compiled, program, random


class Sq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, k):
        ctx.save_for_backward(a)
        ctx.k = k
        return a * a * k

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return g * 2 * a * ctx.k * 3, None  # deliberately wrong factor 3


@program
def custom_function(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    f = compiled(lambda a: Sq.apply(a.sin(), 2.0).cos())
    y = f(a)
    y.sum().backward()
    return [y, a.grad]


class Sq2(torch.autograd.Function):
    @staticmethod
    def forward(a, k):
        return a * a * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, k = inputs
        ctx.save_for_backward(a, output)
        ctx.k = k

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        a, o = ctx.saved_tensors
        return (g * 2 * a * ctx.k * 3 + o * 0 if ctx.needs_input_grad[0] else None), None


@program
def custom_setup_context(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    f = compiled(lambda a: Sq2.apply(a.sin(), 2.0).cos())
    y = f(a)
    y.sum().backward()
    return [y, a.grad]


@program
def custom_noinputgrad(compiled: Compiled) -> list[Any]:
    a = random(4, 3, g=False)
    b = random(4, 3, seed=1)
    f = compiled(lambda a, b: Sq2.apply(a, 2.0) * b)
    y = f(a, b)
    y.sum().backward()
    return [y, b.grad]


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        i = (a > 0).sum()
        ctx.mark_non_differentiable(i)
        ctx.save_for_backward(a, b)
        return a * b, a + b, i

    @staticmethod
    def backward(ctx, g1, g2, gi):
        a, b = ctx.saved_tensors
        assert gi is None
        if g2 is None:
            return g1 * b, g1 * a
        return g1 * b + g2, g1 * a + g2


@program
def custom_multi(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    b = random(4, 3, seed=1)

    def fn(a, b):
        p, _, i = Two.apply(a, b)
        return p.exp(), i

    f = compiled(fn)
    y, i = f(a, b)
    y.sum().backward()
    return [y, i, a.grad, b.grad]


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        a.mul_(2)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx, g):
        return g * 2


@program
def custom_dirty(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.clone()
        Dirty.apply(b)
        return b.sin()

    f = compiled(fn)
    y = f(a)
    y.sum().backward()
    return [y, a.grad]


@program
def hook_intermediate(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        b.register_hook(lambda g: g * 5)
        return b.cos()

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def hook_input_inside(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a * 1
        a.register_hook(lambda g: g * 5)
        return b.cos()

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def hook_input_outside(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    a.register_hook(lambda g: g * 5)
    y = compiled(lambda a: a.sin())(a)
    y.sum().backward()
    return [y, a.grad]


@program
def hook_param_outside(compiled: Compiled) -> list[Any]:
    m = nn.Linear(3, 2)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)
    seen = []
    m.weight.register_hook(lambda g: g * 2)
    m.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    y = compiled(m)(random(4, 3))
    y.sum().backward()
    return [y, m.weight.grad, torch.tensor(seen)]


@program
def hook_output(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    y = compiled(lambda a: a.sin() * 2)(a)
    s = []
    y.register_hook(lambda g: s.append(g.clone()))
    y.retain_grad()
    y.sum().backward()
    return [y, a.grad, s[0], y.grad]


@program
def retain_grad_inside(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        b.retain_grad()
        return b.cos(), b

    y, b = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad, b.grad]


@program
def custom_fwd_bwd_autocast(compiled: Compiled) -> list[Any]:
    class M(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            return g @ b.t(), a.t() @ g

    a = random(4, 4)
    b = random(4, 4, seed=2)

    def fn(a, b):
        with torch.autocast("cpu", torch.bfloat16):
            return M.apply(a, b)

    y = compiled(fn)(a, b)
    y.sum().backward()
    return [y, a.grad, b.grad]


@program
def tensor_subclass_param_hook_module(compiled: Compiled) -> list[Any]:
    m = nn.Linear(3, 3)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)
    s = []
    m.register_full_backward_hook(lambda mod, gi, go: s.append(go[0].sum().item()))
    f = compiled(nn.Sequential(m, nn.ReLU()))
    y = f(random(2, 3))
    y.sum().backward()
    return [y, torch.tensor(s), m.weight.grad]


@program
def module_bw_pre_hook(compiled: Compiled) -> list[Any]:
    m = nn.Linear(3, 3)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)
    m.register_full_backward_pre_hook(lambda mod, go: (go[0] * 2,))
    f = compiled(nn.Sequential(m, nn.ReLU()))
    y = f(random(2, 3))
    y.sum().backward()
    return [y, m.weight.grad]


@program
def ste_double(compiled: Compiled) -> list[Any]:
    class STE(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.round()

        @staticmethod
        def backward(ctx, g):
            return g

    a = random(4, 3)
    y = compiled(lambda a: STE.apply(a * 3) * a)(a)
    y.sum().backward()
    return [y, a.grad]


class Cnt(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, g):
        Cnt.calls += 1
        return g * 2


@program
def impure_backward(compiled: Compiled) -> list[Any]:
    Cnt.calls = 0
    a = random(4, 3)
    y = compiled(lambda a: Cnt.apply(a * 3) * a)(a)
    c0 = Cnt.calls
    y.sum().backward()
    return [y, a.grad, c0, Cnt.calls]


@program
def impure_hook(compiled: Compiled) -> list[Any]:
    seen = []
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        b.register_hook(lambda g: seen.append(g.sum().item()))
        return b.cos()

    y = compiled(fn)(a)
    n0 = len(seen)
    y.sum().backward()
    return [y, a.grad, n0, len(seen)]


@program
def impure_hook_inside_list(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        l = []
        b = a.sin()
        b.register_hook(lambda g: l.append(1))
        return b.cos(), l

    y, l = compiled(fn)(a)
    n0 = len(l)
    y.sum().backward()
    return [y, a.grad, n0, len(l)]


@program
def hook_prints(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        b.register_hook(lambda g: print("", end=""))
        return b.cos()

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def hook_replaced_remove(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        h = b.register_hook(lambda g: g * 3)
        h.remove()
        return b.cos()

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def custom_module_nn(compiled: Compiled) -> list[Any]:
    class L(torch.autograd.Function):
        @staticmethod
        def forward(ctx, i, w, b=None):
            ctx.save_for_backward(i, w, b)
            o = i.mm(w.t())
            return o if b is None else o + b

        @staticmethod
        def backward(ctx, g):
            i, w, b = ctx.saved_tensors
            gi = gw = gb = None
            if ctx.needs_input_grad[0]:
                gi = g.mm(w)
            if ctx.needs_input_grad[1]:
                gw = g.t().mm(i)
            if b is not None and ctx.needs_input_grad[2]:
                gb = g.sum(0)
            return gi, gw, gb

    i = random(4, 3, g=False)
    w = random(5, 3)
    b = random(5)
    y = compiled(lambda i, w, b: L.apply(i, w, b).relu())(i, w, b)
    y.sum().backward()
    return [y, w.grad, b.grad]


@program
def custom_returns_input(compiled: Compiled) -> list[Any]:
    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a

        @staticmethod
        def backward(ctx, g):
            return g * 7

    a = random(4, 3)
    y = compiled(lambda a: Passing.apply(a).sin())(a)
    y.sum().backward()
    return [y, a.grad]


@program
def custom_view(compiled: Compiled) -> list[Any]:
    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.view(-1)

        @staticmethod
        def backward(ctx, g):
            return (g * 7).view(4, 3)

    a = random(4, 3)
    y = compiled(lambda a: Passing.apply(a.exp()).sin())(a)
    y.sum().backward()
    return [y, a.grad]


@program
def custom_raises(compiled: Compiled) -> list[Any]:
    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            raise ValueError("no")

        @staticmethod
        def backward(ctx, g):
            return g

    a = random(4, 3)
    try:
        compiled(lambda a: Passing.apply(a).sin())(a)
    except ValueError as e:
        return [str(e)]


@program
def custom_backward_raises(compiled: Compiled) -> list[Any]:
    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 2

        @staticmethod
        def backward(ctx, g):
            raise ValueError("nob")

    a = random(4, 3)
    y = compiled(lambda a: Passing.apply(a).sin())(a)
    try:
        y.sum().backward()
    except ValueError as e:
        return [str(e)]
    return ["none"]


@program
def custom_no_materialize(compiled: Compiled) -> list[Any]:
    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.set_materialize_grads(False)
            return a * 2, a * 3

        @staticmethod
        def backward(ctx, g, h):
            if h is None:
                return g * 2
            return g * 2 + h * 3

    a = random(4, 3)
    y = compiled(lambda a: Passing.apply(a)[0])(a)
    y.sum().backward()
    return [y, a.grad]


@program
def custom_nonscalar_args(compiled: Compiled) -> list[Any]:
    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, dims, flag, d):
            ctx.d = d["s"]
            ctx.dims = dims
            return a.sum(dims) * d["s"] if flag else a

        @staticmethod
        def backward(ctx, g):
            return (g * ctx.d).unsqueeze(ctx.dims[0]).expand(4, 3), None, None, None

    a = random(4, 3)
    y = compiled(lambda a: Passing.apply(a, (0,), True, {"s": 3.0}).sin())(a)
    y.sum().backward()
    return [y, a.grad]


@program
def custom_in_loop_dynamic(compiled: Compiled) -> list[Any]:
    f = compiled(lambda a: Sq.apply(a, 2.0).sum())
    r = []
    for n in (3, 5, 7, 9):
        a = random(n, 2)
        y = f(a)
        y.backward()
        r += [y, a.grad]
    return r


@program
def custom_double(compiled: Compiled) -> list[Any]:
    return second_and_third_order(compiled(lambda a: (Sq.apply(a.exp(), 2.0) * a).sum()))


def second_and_third_order(function: Any) -> list[Any]:
    a = random(4, 3)
    y = function(a)
    (g,) = torch.autograd.grad(y, a, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), a, create_graph=True)
    return [y, g, h, *torch.autograd.grad(h.sum(), a)]


class SineGradient(torch.autograd.Function):
    """The gradient of a sine with a gradient of its own, which is not the formula's."""

    @staticmethod
    def forward(ctx: Any, g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(g, a)
        return g * a.cos()

    @staticmethod
    def backward(ctx: Any, gg: torch.Tensor) -> Any:  # type: ignore[override]
        g, a = ctx.saved_tensors
        return 7 * gg * a.cos(), -5 * gg * g * a.sin()


class Sine(torch.autograd.Function):
    """Scale and sizes are given in a tuple."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, facts: tuple[float, torch.Size]) -> torch.Tensor:
        ctx.save_for_backward(a)
        return a.sin() * facts[0] * facts[1].numel()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return SineGradient.apply(g, *ctx.saved_tensors), None


@program
def custom_double_whose_backward_is_custom(compiled: Compiled) -> list[Any]:
    return second_and_third_order(compiled(lambda a: (Sine.apply(Sq.apply(a * 2, 3.0), (0.5, a.shape)) * a).sum()))


@program
def hook_double(compiled: Compiled) -> list[Any]:
    def fn(a: torch.Tensor) -> torch.Tensor:
        b = Sine.apply(a * a, (1.0, a.shape))
        b.register_hook(lambda g: g * g)
        return (b.sin() * a).sum()

    return second_and_third_order(compiled(fn))


def _over_another(a: torch.Tensor) -> torch.Tensor:
    b, s = a.sin(), a * 2
    b.register_hook(lambda g: g * s)
    return (b * b).sum()


def _over_defaults(a: torch.Tensor) -> torch.Tensor:
    b, s = a.sin(), a * 2
    b.register_hook(lambda g, s=s, *, k=(a.cos(), a.shape[0]): g * s * k[0] * k[1])
    s = s.exp()
    return (b * b * s).sum()


def _over_what_is_written_to(a: torch.Tensor) -> torch.Tensor:
    b, s = a.sin(), a.detach() * 2
    b.register_hook(lambda g: g * s)
    c = (b * b).sum()
    s.mul_(3)
    return c


def _over_a_variable_that_changes(a: torch.Tensor) -> torch.Tensor:
    b, s = a.sin(), a * 2
    b.register_hook(lambda g: g * s)
    s = s.exp()
    return (b * b).sum()


def _over_a_list(a: torch.Tensor) -> torch.Tensor:
    b, s = a.sin(), [a * 2]
    b.register_hook(lambda g: g * s[0])
    s[0] = a * 3
    return (b * b).sum()


@program
def hook_double_over_tensors(compiled: Compiled) -> list[Any]:
    programs = (_over_another, _over_defaults, _over_what_is_written_to)
    return [one for fn in programs for one in second_and_third_order(compiled(fn))]


@program
def hook_double_over_what_changes(compiled: Compiled) -> list[Any]:
    found = []
    for fn in (_over_a_variable_that_changes, _over_a_list):
        try:
            found += second_and_third_order(compiled(fn))
        except RuntimeError as e:  # refused, and never wrong
            assert "cannot be run again" in str(e)
            found += second_and_third_order(fn)
    return found


@program
def custom_double_with_a_write_beside(compiled: Compiled) -> list[Any]:
    def fn(a: torch.Tensor) -> torch.Tensor:
        b = Sq.apply(a, 2.0)
        b.mul_(2)
        return (b * a).sum()

    try:
        return second_and_third_order(compiled(fn))
    except RuntimeError as e:  # refused, and never wrong
        assert "cannot be run again" in str(e)
        return second_and_third_order(fn)


class Given(torch.autograd.Function):
    """Gives views of what it takes, and itself."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> Any:
        return a, a.view(-1), *a.unbind(0)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor, *rows: torch.Tensor) -> Any:  # type: ignore[override]
        return 2 * g + 3 * h.view_as(g) + 5 * torch.stack(rows)


@program
def custom_gives_what_it_takes(compiled: Compiled) -> list[Any]:
    held = []
    for inner in (lambda a: a, lambda a: a[1:], lambda a: a * 2):
        for fn in (Given.apply, lambda b: (b, *Given.apply(b)), lambda b: (Given.apply(b)[0][0], b.sin())):
            results = compiled(lambda a: fn(inner(a)))(a := random(4, 3))
            held += [*torch.autograd.grad(sum(i * one.sum() for i, one in enumerate(results, 1)), a), *results]
    return held


KEYWORDS = TorchVersion(torch.__version__) >= "2.13"  # Function.apply takes them


class Bound(torch.autograd.Function):
    @staticmethod
    def forward(a: torch.Tensor, b: Any = 3.0, k: float = 2.0, *rest: float) -> torch.Tensor:  # type: ignore[override]
        return a * b * k

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.a, ctx.b, ctx.k, *ctx.rest = inputs

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        of_b = g * ctx.a * ctx.k if ctx.needs_input_grad[1] else None
        return g * ctx.b * ctx.k, of_b, *(None for _ in ctx.needs_input_grad[2:])


class Placed(Bound):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: Any = 3.0, k: float = 2.0) -> torch.Tensor:  # type: ignore[override]
        ctx.a, ctx.b, ctx.k = a, b, k
        return a * b * k

    setup_context = torch.autograd.Function.setup_context


@program
def custom_with_keywords_and_defaults(compiled: Compiled) -> list[Any]:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = Bound.apply(a) + Bound.apply(a, b) * Placed.apply(b, 2.0) + Bound.apply(a, b, 3.0, 4.0)
        if KEYWORDS:
            y = y + Bound.apply(b=b, a=a) * Bound.apply(a, k=5.0) * Placed.apply(a, b=b, k=5.0)
        return y.sum()

    held, f = [], compiled(fn)
    for default in (3.0, 4.0):
        Bound.forward.__defaults__ = (default, 2.0)
        held += second_and_third_order(lambda a: f(a, a.cos()))
    Bound.forward.__defaults__ = (3.0, 2.0)
    return held


class NeverZero(torch.autograd.Function):
    """Its gradient of nothing is something."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g.exp() + ctx.saved_tensors[0]


def _hooked(hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.5
        y.register_hook(hook)
        return y * 2

    return run


NOT_OF_ZERO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "function": NeverZero.apply, "number": _hooked(lambda g: g + 1), "difference": _hooked(lambda g: 2 - g),
    "bound": _hooked(lambda g: g.clamp(min=0.5)), "cosine": _hooked(torch.cos), "filled": _hooked(lambda g: g.masked_fill(g == 0, 3.0)),
    "tensor": _hooked(lambda g: g + torch.arange(3.0)), "padded": _hooked(lambda g: torch.cat([g[:1], torch.ones(len(g) - 1, 3)])),
    "of zero": _hooked(lambda g: g.clamp(-1, 1) * 2),
}  # fmt: skip


def _of_one_result(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Compiled], list[Any]]:
    def run(compiled: Compiled) -> list[Any]:
        def fn(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = a.exp()
            return x * 2, make(x), make(x) + x.sin()

        f, found = compiled(fn), []
        for rows in (3, 5, 4):
            for wanted in ((0,), (0, 1), (2,), (1, 2)):
                a = random(rows, 3)
                results = f(a)
                sum(results[place].sum() for place in wanted).backward()  # type: ignore[union-attr]
                found.append(a.grad)
        return found

    return run


PROGRAMS.update({f"a_backward_of_some_results_runs_no_{name}": _of_one_result(make) for name, make in NOT_OF_ZERO.items()})
"""What the program's own code would make of zeros is no part of a backward that does not come to it."""
