"""Programs of autograd. backward() and torch.autograd.grad inside and outside, gradients of gradients, checkpoints. See `programs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fusewright
from tests.autograd.programs import PROGRAMS, Compiled, program, random


@program
def autograd_grad_outside(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    y = compiled(lambda a: a.sin().exp())(a)
    return list(torch.autograd.grad(y, a, torch.ones_like(y) * 2))


@program
def autograd_grad_inside(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        y = a.sin().exp().sum()
        (g,) = torch.autograd.grad(y, a)
        return y.detach(), g * 2

    return list(compiled(fn)(a))


@program
def autograd_grad_inside_create(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        y = a.sin().exp().sum()
        (g,) = torch.autograd.grad(y, a, create_graph=True)
        return y + (g**2).sum()

    l = compiled(fn)(a)
    l.backward()
    return [l, a.grad]


@program
def backward_inside(compiled: Compiled) -> list[Any]:
    m = nn.Linear(3, 2)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)

    def fn(i):
        l = m(i).pow(2).sum()
        l.backward()
        return l.detach()

    f = compiled(fn)
    r = [f(random(4, 3, g=False)) for _ in range(2)]
    return r + [m.weight.grad, m.bias.grad]


@program
def backward_inside_retain(compiled: Compiled) -> list[Any]:
    a = random(3, 3)

    def fn(a):
        l = a.sin().sum()
        l.backward(retain_graph=True)
        l.backward()
        return l

    l = compiled(fn)(a)
    return [l, a.grad]


@program
def train_step_inside(compiled: Compiled) -> list[Any]:
    m = nn.Linear(3, 2)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)

    def fn(i):
        for p in m.parameters():
            p.grad = None
        l = m(i).pow(2).sum()
        l.backward()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(p.grad, alpha=0.1)
        return l.detach()

    f = compiled(fn)
    r = [f(random(4, 3, g=False)) for _ in range(3)]
    return r + [m.weight, m.bias]


@program
def double_backward(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    w = random(3, 3, seed=5)
    y = compiled(lambda a, w: torch.tanh(a @ w).sum())(a, w)
    (g,) = torch.autograd.grad(y, a, create_graph=True)
    p = (g.norm() - 1) ** 2
    p.backward()
    return [y, g, p, w.grad, a.grad]


@program
def ckpt_nonreentrant(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    w = random(3, 3, seed=5)

    def fn(a, w):
        return checkpoint(lambda a, w: torch.tanh(a @ w).sin(), a, w, use_reentrant=False).exp()

    y = compiled(fn)(a, w)
    y.sum().backward()
    return [y, a.grad, w.grad]


@program
def ckpt_reentrant(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    w = random(3, 3, seed=5)

    def fn(a, w):
        return checkpoint(lambda a, w: torch.tanh(a @ w).sin(), a, w, use_reentrant=True).exp()

    y = compiled(fn)(a, w)
    y.sum().backward()
    return [y, a.grad, w.grad]


@program
def ckpt_dropout(compiled: Compiled) -> list[Any]:
    a = random(40, 30)

    def fn(a):
        return checkpoint(lambda a: functional.dropout(a.sin(), 0.5), a, use_reentrant=False).exp()

    torch.manual_seed(5)
    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def ckpt_around(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    f = compiled(lambda a: a.sin().exp())
    y = checkpoint(f, a, use_reentrant=False)
    y.sum().backward()
    return [y, a.grad]


@program
def requires_grad_inside(compiled: Compiled) -> list[Any]:
    a = random(3, g=False)

    def fn(a):
        b = a.clone().requires_grad_()
        y = (b**2).sum()
        (g,) = torch.autograd.grad(y, b)
        return g

    return [compiled(fn)(a)]


@program
def grad_fn_check(compiled: Compiled) -> list[Any]:
    a = random(3)

    def fn(a):
        b = a * 2
        return b + 1 if b.requires_grad and not b.is_leaf else b

    y = compiled(fn)(a)
    return [y]


@program
def requires_grad_changes(compiled: Compiled) -> list[Any]:
    f = compiled(lambda a, b: (a * b).sum())
    r = []
    for ga, gb in ((1, 0), (0, 1), (1, 1), (0, 0)):
        a = random(3, g=bool(ga))
        b = random(3, g=bool(gb), seed=4)
        y = f(a, b)
        if ga or gb:
            y.backward()
        r += [y, a.grad, b.grad]
    return r


@program
def grad_break_middle(compiled: Compiled) -> list[Any]:
    a = random(3)

    def fn(a):
        b = a.sin()
        print(end="")
        torch._C._log_api_usage_once
        fusewright.graph_break()
        return b.cos() * a

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def replay_no_grad(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        with torch.no_grad():
            s = a.abs().max()
        return (a.sin() * a / s).sum()

    y = compiled(fn)(a)
    (g,) = torch.autograd.grad(y, a, create_graph=True)
    g.pow(2).sum().backward()
    return [y, g, a.grad]


@program
def replay_bn(compiled: Compiled) -> list[Any]:
    m = nn.BatchNorm1d(3)
    a = random(4, 3)
    y = compiled(lambda a: m(a).pow(3).sum())(a)
    (g,) = torch.autograd.grad(y, a, create_graph=True)
    g.pow(2).sum().backward()
    return [y, g, a.grad, m.running_mean, m.running_var]


@program
def replay_dropout(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    torch.manual_seed(3)
    y = compiled(lambda a: functional.dropout(a * a * a, 0.5).sum())(a)
    (g,) = torch.autograd.grad(y, a, create_graph=True)
    g.pow(2).sum().backward()
    return [y, g, a.grad]


@program
def backward_returned_loss_twice(compiled: Compiled) -> list[Any]:
    m = nn.Linear(3, 2)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)

    def fn(i):
        l = m(i).pow(2).sum()
        l.backward()
        return l

    l = compiled(fn)(random(4, 3, g=False))
    r = [l, m.weight.grad]
    try:
        l.backward()
        r.append("no")
    except RuntimeError as e:
        r.append("second time" in str(e))
    return r


@program
def backward_accum_existing(compiled: Compiled) -> list[Any]:
    m = nn.Linear(3, 2)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)
    m.weight.grad = torch.ones(2, 3)
    gw = m.weight.grad

    def fn(i):
        m(i).pow(2).sum().backward()

    f = compiled(fn)
    f(random(4, 3, g=False))
    f(random(4, 3, g=False))
    assert m.weight.grad is gw
    return [m.weight.grad, m.bias.grad]


@program
def zero_grad_backward_step(compiled: Compiled) -> list[Any]:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

    def fn(i):
        opt.zero_grad()
        l = m(i).pow(2).mean()
        l.backward()
        opt.step()
        return l.detach()

    f = compiled(fn)
    r = [f(random(4, 3, g=False, seed=s)) for s in range(4)]
    return r + list(m.parameters())


@program
def backward_hooked_param(compiled: Compiled) -> list[Any]:
    m = nn.Linear(3, 2)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)
    m.weight.register_hook(lambda g: g * 2)

    def fn(i):
        m(i).pow(2).sum().backward()

    compiled(fn)(random(4, 3, g=False))
    return [m.weight.grad]


@program
def backward_hook_added_later(compiled: Compiled) -> list[Any]:
    m = nn.Linear(3, 2)
    nn.init.constant_(m.weight, 0.3)
    nn.init.constant_(m.bias, 0.1)

    def fn(i):
        m.weight.grad = None
        m(i).pow(2).sum().backward()

    f = compiled(fn)
    f(random(4, 3, g=False))
    a = m.weight.grad
    m.weight.register_hook(lambda g: g * 2)
    f(random(4, 3, g=False))
    return [a, m.weight.grad]


@program
def backward_outer_graph(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    b = a * 2

    def fn(b):
        l = b.sin().sum()
        l.backward()
        return l.detach()

    l = compiled(fn)(b)
    return [l, a.grad]


@program
def grad_nonleaf_input(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    b = a * 2

    def fn(b):
        (g,) = torch.autograd.grad(b.sin().sum(), b)
        return g * 2

    return [compiled(fn)(b)]


@program
def grad_past_an_outer_graph(compiled: Compiled) -> list[Any]:
    """A part of each gradient, or all of it, comes through what was made outside."""

    def ask(a, b, c):
        return torch.autograd.grad((a * b).sin().sum() + c.sum(), (a, b), allow_unused=True)

    asked, held = compiled(ask), []
    for of in (lambda a: a * 2, lambda a: a[:2].repeat(2, 1)):
        a, c = random(4, 3), random(4, 3)
        held += [*asked(a, of(a), of(a)), *asked(c * 1, of(a), c), *asked(a, c, of(a)), *asked(d := of(a), d, c)]
    return held


@program
def grad_penalty_inside(compiled: Compiled) -> list[Any]:
    d = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    for p in d.parameters():
        nn.init.constant_(p, 0.2)

    def fn(i):
        i = i.detach().requires_grad_()
        o = d(i)
        (g,) = torch.autograd.grad(o.sum(), i, create_graph=True)
        return o.mean() + ((g.norm(dim=1) - 1) ** 2).mean()

    l = compiled(fn)(random(4, 3, g=False))
    l.backward()
    return [l] + [p.grad for p in d.parameters()]


@program
def ckpt_seq(compiled: Compiled) -> list[Any]:
    from torch.utils.checkpoint import checkpoint_sequential

    torch.manual_seed(0)
    m = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)])
    a = random(2, 3)
    y = compiled(lambda a: checkpoint_sequential(m, 2, a, use_reentrant=False))(a)
    y.sum().backward()
    return [y, a.grad] + [p.grad for p in m.parameters()]


@program
def ckpt_break_inside(compiled: Compiled) -> list[Any]:
    a = random(40, 30)

    def g(a):
        b = functional.dropout(a.sin(), 0.5)
        fusewright.graph_break()
        return b.exp()

    def fn(a):
        return checkpoint(g, a.cos(), use_reentrant=False).exp()

    torch.manual_seed(3)
    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def ckpt_eager_frames(compiled: Compiled) -> list[Any]:
    a = random(40, 30)

    class W(nn.Module):
        def forward(s, a):
            return functional.dropout(a.sin(), 0.5).exp()

    w = W()

    def fn(a):
        fusewright.graph_break()
        for i in range(2):
            fusewright.graph_break()
            a = checkpoint(w, a, use_reentrant=False)
        return a

    torch.manual_seed(3)
    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def ckpt_kwargs_nograd(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        return checkpoint(lambda a, *, k: a.sin() * k, a, k=3, use_reentrant=False).sum()

    f = compiled(fn)
    y = f(a)
    y.backward()
    with torch.no_grad():
        z = f(a)
    return [y, a.grad, z]


@program
def requires_grad_true_input(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        a.requires_grad_()
        return a.sin()

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def hook_on_a_view_that_was_written_to(compiled: Compiled) -> list[Any]:
    """Nothing that is left of the program asks for the view's gradient function before."""
    a = random(4, 2)

    def fn(v):
        v.detach().add_(1)
        v.sin()  # nobody uses it, so it is not run
        v.register_hook(lambda g: g * 2)
        return v.shape[0]

    v = a[::2]
    rows = compiled(fn)(v)
    (v * 3).sum().backward()
    return [rows, v, a.grad]


def _jacobian(create: bool, made: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Compiled], list[Any]]:
    def run(compiled: Compiled) -> list[Any]:
        def fn(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.enable_grad():
                x = made(a)
                y = torch.tanh(x @ w)
            rows = torch.eye(3).expand(4, 3, 3).movedim(-1, 0)
            (found,) = torch.autograd.grad(y, x, rows, create_graph=create, is_grads_batched=True)
            return y.detach(), found.diagonal(dim1=0, dim2=-1).sum(-1)

        results: list[Any] = []
        f = compiled(fn)
        for grad in (True, False):
            a, w = random(4, 3), random(3, 3, seed=1)
            with torch.set_grad_enabled(grad):
                y, trace = f(a, w)
            if trace.requires_grad:
                trace.sum().backward()
            results += [y, trace, a.grad is None, w.grad]
        return results

    return run


for _create in (False, True):
    PROGRAMS[f"jacobian_{_create}_towards_what_is_computed"] = _jacobian(_create, lambda a: a * 2)
    PROGRAMS[f"jacobian_{_create}_towards_what_requires_already"] = _jacobian(
        _create, lambda a: a.clone().requires_grad_()
    )
    PROGRAMS[f"jacobian_{_create}_towards_a_leaf"] = _jacobian(_create, lambda a: a.detach().requires_grad_())
PROGRAMS["jacobian_True_towards_an_argument"] = _jacobian(True, lambda a: a)  # (without a graph: test_native_node.py)


def _asked_late(ask: Callable[..., Any]) -> Callable[[Compiled], list[Any]]:
    """Something asks for the gradient of a tensor from which another one has been computed."""

    def run(compiled: Compiled) -> list[Any]:
        seen: list[Any] = []

        def fn(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            x = a * 2
            y = torch.tanh(x)
            found = ask(x, y, seen)
            return y * 3, x, found if isinstance(found, torch.Tensor) else None

        results: list[Any] = []
        f = compiled(fn)
        for _ in range(2):
            a = random(4, 3)
            y, x, found = f(a)
            y.sum().backward()
            results += [y, a.grad, x.grad, found]
        return [*results, *seen]

    return run


def _backward_towards(x: torch.Tensor, y: torch.Tensor, seen: list[Any]) -> None:
    y.sum().backward(inputs=[x], retain_graph=True)


def _graph_edge(x: torch.Tensor, y: torch.Tensor, seen: list[Any]) -> torch.Tensor:
    edge = torch.autograd.graph.get_gradient_edge(x)
    return torch.autograd.grad(y.sum(), edge, retain_graph=True)[0]


def _note_all(x: torch.Tensor, y: torch.Tensor, seen: list[Any]) -> None:
    torch.autograd.graph.register_multi_grad_hook((x, y), lambda gradients: seen.extend(gradients))


ASKED_LATE: dict[str, Callable[..., Any]] = {
    "asked_late_by_a_hook": lambda x, y, seen: x.register_hook(lambda g: (seen.append(g.sum()), g * 5)[1]),
    "asked_late_to_be_retained": lambda x, y, seen: (x.register_hook(lambda g: seen.append(1)), x.retain_grad()),
    "asked_late_by_backward": _backward_towards,
    "asked_late_by_an_edge": _graph_edge,
    "asked_late_by_a_hook_of_several": _note_all,
}
PROGRAMS.update({name: _asked_late(ask) for name, ask in ASKED_LATE.items()})


@program
def asked_behind_a_break_by_a_hook(compiled: Compiled) -> list[Any]:
    def fn(a: torch.Tensor) -> torch.Tensor:
        x = a * 2
        y = torch.tanh(x)
        fusewright.graph_break()
        x.register_hook(lambda g: g * 3)
        return y + 1

    f, found = compiled(fn), []
    for _ in range(3):
        a = random(4, 3)
        f(a).sum().backward()
        found.append(a.grad)
    return found


@program
def asked_behind_a_break_of_what_lists_hold(compiled: Compiled) -> list[Any]:
    def fn(a: torch.Tensor) -> Any:
        kept = [a * 2]
        kept.append(torch.tanh(kept[0]))
        fusewright.graph_break()
        return torch.autograd.grad(kept[1].sum(), kept[0], retain_graph=True)[0] + torch.autograd.grad(kept[1].sum(), a)[0]

    f = compiled(fn)
    return [f(random(4, 3)) for _ in range(3)]


@program
def asked_behind_a_break_to_be_retained(compiled: Compiled) -> list[Any]:
    def fn(a: torch.Tensor) -> torch.Tensor:
        x = a * 2
        y = torch.tanh(x)
        fusewright.graph_break()
        x.retain_grad()
        y.sum().backward()
        return x.grad * 1

    f = compiled(fn)
    return [f(random(4, 3)) for _ in range(3)]


@program
def asked_behind_a_break_by_backward(compiled: Compiled) -> list[Any]:
    def fn(a: torch.Tensor) -> torch.Tensor:
        x = a * 2
        y = torch.tanh(x)
        fusewright.graph_break()
        y.sum().backward(inputs=[x])
        return x

    f, found = compiled(fn), []
    for _ in range(3):
        a = random(4, 3)
        x = f(a)
        found += [x, x.grad, a.grad]
    return found


@program
def asked_past_an_outer_graph_by_backward(compiled: Compiled) -> list[Any]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        (y * y).sum().backward(inputs=[x, y])
        return y

    f, found = compiled(fn), []
    for _ in range(3):
        x = random(4, 3) * 1
        y = f(x)
        found += [x, y, x.grad, y.grad]
    return found


def _backward_towards_both(p: torch.Tensor, y: torch.Tensor) -> None:
    (y * y).sum().backward(inputs=[p, y])


def _gradients_of_both(p: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.autograd.grad((y * y).sum(), (p, y))


@program
def asked_by_a_function_beside_a_hook(compiled: Compiled) -> list[Any]:
    """What breaks the graph there is not that the gradient of a result is asked for."""
    found: list[Any] = []
    for ask in (_backward_towards_both, _gradients_of_both):

        def fn(p: torch.Tensor, ask: Any = ask) -> Any:
            y = torch.tanh(p)
            return y, ask(p, y)

        f = compiled(fn)
        for size in (3, 5, 4):
            p = random(size, 3)
            p.register_hook(lambda g: g * 3)
            y, gradients = f(p)
            found += [y, p.grad, *(gradients or ())]
    return found


@program
def asked_again_of_what_was_freed(compiled: Compiled) -> list[Any]:
    """Also where only the way to one input is gone."""

    def fn(a: torch.Tensor) -> Any:
        t = a.sin()
        (first,) = torch.autograd.grad(t.exp().sum(), t, create_graph=True)
        return first, torch.autograd.grad(first.mean(), t)[0]

    f, found = compiled(fn), []
    for size in (3, 5):
        a = random(size, 3)
        first = f(a)[0].sum()
        asks: list[Callable[[], Any]] = [lambda: torch.autograd.grad(first, a, allow_unused=True)[0], first.backward]
        for ask in asks:
            try:
                found.append(ask())
            except RuntimeError as error:
                found.append(str(error)[:50])
    return found


@program
def a_loss_whose_graph_was_freed_inside(compiled: Compiled) -> list[Any]:
    """It requires a gradient where the call begins without gradients, too."""

    def fn(a: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            loss = a.sin().sum()
            loss.backward()
        return loss

    f, found = compiled(fn), []
    for size, enabled in ((3, False), (5, False), (5, True)):
        a = random(size, 3)
        with torch.set_grad_enabled(enabled):
            loss = f(a)
        found += [loss, loss.requires_grad, loss.is_leaf, a.grad]
        try:
            loss.backward()
        except RuntimeError as error:
            found.append(str(error)[:50])
    return found


@program
def gradients_of_another_dtype_inside(compiled: Compiled) -> list[Any]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).float().square().sum()
        y.backward(retain_graph=True)
        return torch.autograd.grad(y, [w])[0]

    f, found = compiled(fn), []
    for dtype in (torch.bfloat16, torch.float32, None, torch.float64, torch.bfloat16):
        w = random(3, 2).detach().bfloat16().requires_grad_()
        w.grad_dtype = dtype  # a plain attribute, of no account, in older releases of PyTorch
        found += [f(random(4, 3).detach().bfloat16(), w), w.grad]
    return found
