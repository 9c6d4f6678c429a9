"""Programs of autograd. Outputs that alias, views, writes in place, gradients that are partly undefined. See `programs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.autograd.programs import PROGRAMS, Compiled, program, random


@program
def detach_(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        return b.detach() * b, b.detach()

    y, d = compiled(fn)(a)
    y.sum().backward()
    assert not d.requires_grad
    return [y, d, a.grad]


@program
def no_grad_island(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        with torch.no_grad():
            s = a.abs().max()
        return a.sin() / s, s

    y, s = compiled(fn)(a)
    y.sum().backward()
    assert not s.requires_grad
    return [y, s, a.grad]


@program
def enable_grad_island(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        with torch.no_grad():
            with torch.enable_grad():
                b = a.sin()
            c = b * 2
        return b, c

    b, c = compiled(fn)(a)
    assert b.requires_grad and not c.requires_grad
    b.sum().backward()
    return [b, c, a.grad]


@program
def integer_outputs(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    y, i, m = compiled(lambda a: (a.sin(), a.argmax(1), a > 0))(a)
    y.sum().backward()
    return [y, i, m, a.grad]


@program
def output_is_input(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    y, b = compiled(lambda a: (a.sin(), a))(a)
    assert b is a
    y.sum().backward()
    return [y, a.grad]


@program
def output_is_nonleaf_input(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    n = a * 2
    y, b = compiled(lambda a: (a.sin(), a))(n)
    assert b is n
    (y.sum() + b.sum()).backward()
    return [y, a.grad]


@program
def output_view_of_input(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    y, b = compiled(lambda a: (a.sin(), a.t()))(a)
    assert b._is_view() and b._base is a, "view"
    (y.sum() + (b**2).sum()).backward()
    return [y, b, a.grad]


@program
def output_view_only(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    b = compiled(lambda a: a.view(12)[2:5])(a)
    assert b._is_view()
    b.pow(2).sum().backward()
    return [b, a.grad]


@program
def output_detach_of_input(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    y, d = compiled(lambda a: (a * 2, a.detach()))(a)
    assert d.data_ptr() == a.data_ptr(), "alias"
    y.sum().backward()
    return [y, d, a.grad]


@program
def output_twice(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        return b, b

    y, z = compiled(fn)(a)
    assert y is z
    (y.sum() + z.pow(2).sum()).backward()
    return [y, a.grad]


@program
def outputs_alias(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        return b, b.view(-1), b.t()

    y, z, w = compiled(fn)(a)
    assert z.data_ptr() == y.data_ptr(), "alias"
    (y.sum() + z.pow(2).sum() + w.exp().sum()).backward()
    return [y, z, w, a.grad]


@program
def outputs_alias_mutated_after(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        return b, b[0]

    y, z = compiled(fn)(a)
    with torch.no_grad():
        z.zero_()
    return [y, z]


@program
def view_of_intermediate_mutate_with_grad(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        return b, b[0]

    y, z = compiled(fn)(a)
    z.mul_(3)
    y.sum().backward()
    return [y, z, a.grad]


@program
def inplace_nonleaf_input(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    n = a * 2

    def fn(n):
        n.mul_(3)
        return n.sin()

    y = compiled(fn)(n)
    (y.sum() + n.sum()).backward()
    return [y, n, a.grad]


@program
def inplace_nonleaf_input_noret(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    n = a * 2

    def fn(n):
        n.mul_(3)

    compiled(fn)(n)
    n.sin().sum().backward()
    return [n, a.grad]


@program
def inplace_view_input(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    n = a * 2

    def fn(n):
        n[0].mul_(3)
        return n.sum()

    y = compiled(fn)(n)
    y.backward()
    return [n, y, a.grad]


@program
def inplace_nograd_input(compiled: Compiled) -> list[Any]:
    b = random(4, 3, g=False)
    a = random(4, 3, seed=2)

    def fn(b, a):
        b.add_(1)
        return b * a

    y = compiled(fn)(b, a)
    y.sum().backward()
    return [y, b, a.grad]


@program
def inplace_nograd_input_gets_grad(compiled: Compiled) -> list[Any]:
    b = random(4, 3, g=False)
    a = random(4, 3, seed=2)

    def fn(b, a):
        b.mul_(a)
        return b.sin()

    y = compiled(fn)(b, a)
    assert b.requires_grad
    (y.sum() + b.sum()).backward()
    return [y, b, a.grad]


@program
def inplace_leaf_nograd_block(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        y = (a * 2).sum()
        with torch.no_grad():
            a.sub_(0.1)
        return y

    y = compiled(fn)(a)
    y.backward()
    return [y, a, a.grad]


@program
def inplace_leaf_error(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        a.mul_(2)
        return a

    try:
        compiled(fn)(a)
    except RuntimeError as e:
        return [str(e)[:40]]
    return ["none"]


@program
def inplace_intermediate(compiled: Compiled) -> list[Any]:
    a = random(4, 3)

    def fn(a):
        b = a.sin()
        b.mul_(2)
        b[1] = 0
        return b.exp()

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def unused_input(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    b = random(2, 2)
    y = compiled(lambda a, b: a.sin())(a, b)
    y.sum().backward()
    return [y, a.grad, b.grad]


@program
def partial_output_grads(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    b = random(4, 3, seed=3)
    y, z = compiled(lambda a, b: (a.sin(), b.cos()))(a, b)
    y.sum().backward()
    return [y, z, a.grad, b.grad]


@program
def partial_output_grads2(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    b = random(4, 3, seed=3)
    y, z = compiled(lambda a, b: (a.sin(), b.cos() * a))(a, b)
    g = torch.autograd.grad(y.sum(), [a, b], allow_unused=True)
    return [y, z, *g]


@program
def same_tensor_twice(compiled: Compiled) -> list[Any]:
    a = random(3)
    y = compiled(lambda a, b: a * b)(a, a)
    y.sum().backward()
    return [y, a.grad]


@program
def noncontig_tangent(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    y = compiled(lambda a: a * 2)(a)
    y.t().exp().sum().backward()
    return [y, a.grad]


@program
def expanded_tangent(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    y = compiled(lambda a: a.sin())(a)
    y.sum().backward()
    return [a.grad]


@program
def param_version_error(compiled: Compiled) -> list[Any]:
    w = random(3)
    f = compiled(lambda w: (w * w).sin())
    y = f(w)
    with torch.no_grad():
        w.add_(1)
    try:
        y.sum().backward()
    except RuntimeError as e:
        return ["modified" if "modified by an inplace" in str(e) else str(e)]
    return ["none"]


@program
def output_requires_grad_inplace_after(compiled: Compiled) -> list[Any]:
    a = random(3)
    y = compiled(lambda a: a.sin())(a)
    y.mul_(2)
    y.sum().backward()
    return [y, a.grad]


@program
def no_grad_view_of_param(compiled: Compiled) -> list[Any]:
    w = random(4, 3)
    f = compiled(lambda a: a.view(12)[2:5])
    with torch.no_grad():
        v = f(w)
    return [v]


@program
def written_input_saved(compiled: Compiled) -> list[Any]:
    b = random(4, 3, g=False)
    a = random(4, 3, seed=2)

    def fn(b, a):
        y = b * a
        b.add_(1)
        return y

    try:
        y = compiled(fn)(b, a)
        y.sum().backward()
        return [y, b, "grad ok" if torch.equal(a.grad, b - 1) or torch.allclose(a.grad, b - 1) else "WRONG"]
    except RuntimeError:
        return ["eager raises"]


@program
def view_chain_symbolic(compiled: Compiled) -> list[Any]:
    f = compiled(lambda a: (a.sin(), a.view(-1)[1 : a.shape[0]]))
    r = []
    for n in (4, 6, 8):
        a = random(n, 3)
        y, v = f(a)
        (y.sum() + v.pow(2).sum()).backward()
        r += [y, v, a.grad]
    return r


@program
def unbind_outputs(compiled: Compiled) -> list[Any]:
    a = random(3, 4)
    p, q, s = compiled(lambda a: a.sin().unbind(0))(a)
    (p * q + s).sum().backward()
    return [p, q, s, a.grad]


@program
def data_swap(compiled: Compiled) -> list[Any]:
    w = random(3)
    f = compiled(lambda a: a.sin())
    f(w)
    w.data = torch.ones(3)
    y2 = f(w)
    y2.sum().backward()
    return [y2, w.grad]


@program
def split_views_inplace(compiled: Compiled) -> list[Any]:
    a = random(4, 4)

    def fn(a):
        b = a * 1
        p, q = b[:2], b[2:]
        p.mul_(2)
        q.sin_()
        return b

    y = compiled(fn)(a)
    y.sum().backward()
    return [y, a.grad]


@program
def mutate_and_return_views(compiled: Compiled) -> list[Any]:
    a = random(4, 3)
    n = a * 2

    def fn(n):
        n.mul_(3)
        return n[0], n.t(), n.detach()

    p, q, d = compiled(fn)(n)
    (p.sum() + q.exp().sum()).backward()
    return [p, q, d, n, a.grad]


@program
def copy_into_buffer(compiled: Compiled) -> list[Any]:
    buf = torch.zeros(4, 3)
    a = random(4, 3)

    def fn(a, buf):
        buf.copy_(a * 2)
        return buf.sum()

    y = compiled(fn)(a, buf)
    y.backward()
    return [y, buf, a.grad]


@program
def setitem_param(compiled: Compiled) -> list[Any]:
    buf = torch.zeros(4, 3)
    a = random(3)

    def fn(a, buf):
        buf[1] = a * 2
        return buf * 2

    y = compiled(fn)(a, buf)
    y.sum().backward()
    return [y, buf, a.grad]


@program
def sparse_gradients_outlive_later_calls(compiled: Compiled) -> list[Any]:
    """A sparse gradient holds the indices' memory."""
    x = torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(0))
    r = []
    for fn, w in (
        (lambda w: nn.functional.embedding(x, w, sparse=True).sin(), random(9, 3)),
        (lambda w: torch.gather(w, 1, x, sparse_grad=True).sin(), random(4, 9)),
        (lambda w: nn.functional.embedding_bag(x, w, sparse=True).sin(), random(9, 3)),
    ):
        f = compiled(fn)
        found = [torch.autograd.grad(f(w).square().sum(), w)[0] for _ in range(3)]
        with torch.no_grad():
            r.append(f(w))
        r += [part for g in found for part in (g.is_sparse, g.to_dense())]
    return r


@program
def view_of_an_input_that_is_made_a_leaf(compiled: Compiled) -> list[Any]:
    """Returned with what was computed from it, and with an older view of it: gradients come to that leaf."""
    results: list[Any] = []

    def computed(a, z):
        v = a.diagonal()
        v.requires_grad_()
        return v, torch.maximum(v, a.view(-1)[:3]) * z

    def older(a, z):
        with torch.no_grad():
            v = a[None]
        w = v.view(len(v), -1)
        return v.requires_grad_(), w, z * 2

    def older_of_a_result(a, z):
        v = a.sigmoid()
        w = v[...]
        return v.requires_grad_(), w, v * z

    def alone(a, z):
        v = a.sigmoid().requires_grad_()
        with torch.no_grad():
            return (v.view(-1),)

    for fn, needs in ((computed, False), (older, True), (older_of_a_result, False), (alone, False)):
        a, z = random(3, 3).detach().requires_grad_(needs), random(3)
        made = compiled(fn)(a, z)
        sum((one * (number + 1)).sum() for number, one in enumerate(made) if one.requires_grad).backward()
        results += [*made, made[0].grad, a.grad, z.grad]
    return results


@program
def leaf_that_shows_memory_of_another_dtype(compiled: Compiled) -> list[Any]:
    """A tensor that is made to require a gradient inside, alone and beside others."""
    results: list[Any] = []
    shown = (
        lambda a: torch.complex(a, a).real,
        lambda a: torch.view_as_real(torch.complex(a, a)),
        lambda a: torch.view_as_complex(torch.stack([a, a], -1)),
        lambda a: a.double().view(torch.int64).view(torch.float64)[1:],
    )
    for show in shown:
        for fn in (lambda a: [show(a).requires_grad_()], lambda a: (show(a).requires_grad_(), a + 1)):
            made = compiled(fn)(random(3, g=False))
            results += [*made, [one.requires_grad for one in made], [one.is_leaf for one in made]]
    return results


@program
def view_in_place_of_an_input_that_is_written_to(compiled: Compiled) -> list[Any]:
    """It is returned: a later write to it must reach the input."""
    results: list[Any] = []
    for reshape in (lambda v: v.squeeze_(1), lambda v: v.t_(), lambda v: v.unsqueeze_(0)):

        def fn(a, reshape=reshape):
            v = a[None].squeeze(0)
            reshape(v)
            v.mul_(2)
            return v

        leaf = random(2, 3)
        a = leaf * 1
        v = compiled(fn)(a)
        with torch.no_grad():
            v.add_(1)
        a.sum().backward()
        results += [a, v, leaf.grad]
    return results


@program
def view_in_place_beside_what_it_shows(compiled: Compiled) -> list[Any]:
    """They share memory, and autograd knows it: a later write to either counts for both."""
    results: list[Any] = []
    for reshape in (lambda v: v.transpose_(0, 0), lambda v: v.t_(), lambda v: v.unsqueeze_(0)):

        def fn(a, reshape=reshape):
            y = a * 2
            v = y[...]
            reshape(v)
            return y, v

        a = random(2, 3)
        y, v = compiled(fn)(a)
        y.mul_(3)
        (v * torch.arange(6.0).view(v.shape)).sum().backward()
        results += [y, v, a.grad]
    return results


@program
def view_in_place_in_no_grad(compiled: Compiled) -> list[Any]:
    """The history stays that of what it was."""
    results: list[Any] = []

    def fn(a):
        y = a.sin()
        with torch.no_grad():
            y.t_()
        return y

    for shape in ((2, 2), (2, 3)):
        a = random(*shape)
        y = compiled(fn)(a)
        try:
            (first,) = torch.autograd.grad((y * torch.arange(4.0).view(2, 2)).sum(), a, create_graph=True)
            first.square().sum().backward()
            results += [y, first, a.grad]
        except RuntimeError as error:
            results.append(type(error).__name__)
    return results


@program
def hook_on_one_of_several_results(compiled: Compiled) -> list[Any]:
    """The backward of the backward leads to the other results."""

    def fn(a):
        y = torch.nn.functional.group_norm(a, 1)
        y.register_hook(lambda gradient: gradient * 2)
        return y * 1

    a = random(3, 4)
    total = (compiled(fn)(a) * torch.arange(12.0).view(3, 4)).sum()
    (first,) = torch.autograd.grad(total, a, create_graph=True)
    (total + first.square().sum()).backward()
    return [first, a.grad]


@program
def gradient_of_a_hooked_result(compiled: Compiled) -> list[Any]:
    """It is what the hook makes of it, also where the function that asks is compiled apart from the one that has registered it."""

    def fn(a):
        y = a.sin()
        y.register_hook(lambda gradient: gradient * 3)
        return y

    def asks(a):
        y = fn(a)
        return torch.autograd.grad(y.square().sum(), y, create_graph=True)[0]

    a = random(3)
    y = compiled(fn)(a)
    (of_result,) = torch.autograd.grad((y * 2).sum(), y, retain_graph=True)
    return [of_result, *torch.autograd.grad((y * 2).sum(), [y, a]), compiled(asks)(a)]


@program
def write_to_a_returned_view(compiled: Compiled) -> list[Any]:
    """The views are made without anything that needs a gradient; what is written then does."""
    kinds = [
        lambda a: a.view(-1),
        lambda a: a[1:],
        lambda a: a.t(),
        lambda a: a.unfold(-1, 2, 1),
        lambda a: a.diagonal(),
        lambda a: a.as_strided((2, 2), (1, 1)),
    ]
    found = []
    for fn in kinds:
        a, w = random(4, 3).detach(), random(1)
        v = compiled(fn)(a)
        v.mul_(w)
        a.sum().backward()
        found += [v, a, w.grad]
    return found


def _written_behind_a_detach(name: str, share: Callable[[Any, Any], Any]) -> None:
    """The write gives a detached tensor a history of its own, which what it was detached from has no part in."""

    def detached(compiled: Compiled) -> list[Any]:
        a = random(4)
        results = compiled(lambda a: share(a * 2, a))(a)
        sum(one.sin().sum() for one in results if one.requires_grad).backward()
        return [*results, a.grad]

    PROGRAMS[f"write_behind_a_detach_{name}"] = detached


_written_behind_a_detach("is_returned_with_its_view", lambda b, a: (d := b.detach(), d.view(2, 2).mul_(a[0])))
_written_behind_a_detach("is_returned_in_parts", lambda b, a: (b.detach()[:3].mul_(a[0])[1:], b.data[:2].mul_(a[:2])))
_written_behind_a_detach("is_returned_as_parts", lambda b, a: ((d := b.detach())[:3].mul_(a[0]), d[2:]))
_written_behind_a_detach("is_returned_with_the_other", lambda b, a: (b, b.detach().add_(a)))
_written_behind_a_detach("twice", lambda b, a: (d := b.detach(), d.detach().add_(a)))
_written_behind_a_detach("of_a_constant", lambda b, a: (z := torch.zeros(4), z.detach().add_(a)))
_written_behind_a_detach("of_a_scalar", lambda b, a: (d := b[0].detach(), d.t().add_(a[0])))


@program
def no_grad_views_of_a_result(compiled: Compiled) -> list[Any]:
    """They require a gradient, as what they show does, and never get one."""
    views = (
        lambda b: b.squeeze(0),
        lambda b: b[0][1:],
        lambda b: b.as_strided((2, 2), (1, 1)),
        lambda b: b.chunk(2, 1)[1],
    )
    results: list[Any] = []
    for view in views:
        for beside in (False, True):
            a = random(1, 4)

            def fn(a):
                b = a * 2
                with torch.no_grad():
                    v = view(b)
                return (v, b.sum()) if beside else (v,)

            made = compiled(fn)(a)
            (made[0] * 3).sum().backward()
            assert made[0].requires_grad and made[0].is_leaf and made[0]._is_view()
            results += [*made, made[0].grad is None, a.grad is None]
    return results


@program
def no_grad_view_that_is_told_to_require_a_gradient(compiled: Compiled) -> list[Any]:
    a = random(3)

    def fn(a):
        with torch.no_grad():
            v = a[1:]
        return v.requires_grad_()

    v = compiled(fn)(a)
    (v * 3).sum().backward()
    return [v, v.grad, a.grad is None]


@program
def infinite_factors_of_what_nothing_depends_on(compiled: Compiled) -> list[Any]:
    """Where the forward cannot run again: an input has its new value already, or was written to since."""
    results = []
    for written_inside in (False, True):
        a, state = torch.tensor([0.0, 1.0, 2.0], requires_grad=True), random(4, g=False)

        def fn(a, state):
            b, c = a.sin(), state * 2
            unused = b.log() + c[:3]
            if written_inside:
                state.copy_(unused.sum())
            return b, c if written_inside else unused

        b, other = compiled(fn)(a, state)
        if not written_inside:
            state.add_(1)
        b.sum().backward()
        results += [b, a.grad, other.requires_grad]
    return results


@program
def infinite_factors_in_views_of_any_size(compiled: Compiled) -> list[Any]:
    results = []

    def fn(a, state):
        b = a.exp() - 1
        unused = b.T.reshape(b.shape).log()
        state.copy_(b.sum())
        return b.T.sin(), unused

    run = compiled(fn)
    for rows, columns in ((3, 4), (5, 6), (2, 5)):
        a, state = torch.zeros(rows, columns, requires_grad=True), torch.zeros(())
        b, _ = run(a, state)
        b.sum().backward()
        results += [b, a.grad, state]
    return results


@program
def views_in_place_of_what_was_written_in_place(compiled: Compiled) -> list[Any]:
    """`quantile` ends that way, too."""
    x, level = random(3, 4), torch.tensor([0.2, 0.7])

    def fn(x, level):
        y, z = x * 2, x.sort(-1).values
        y.mul_(x).unsqueeze_(0).transpose_(0, -1)
        z.lerp_(x, 0.3)
        z.t_()
        return y.sin(), z * 3, x.quantile(0.3, -1), x.quantile(level, 0), x.nanquantile(level, -1, keepdim=True)

    results = compiled(fn)(x, level)
    sum((result * 2).pow(2).sum() for result in results).backward()  # type: ignore[union-attr]
    return [*results, x.grad]


@program
def made_by_a_legacy_class(compiled: Compiled) -> list[Any]:
    a = random(3)
    made = compiled(lambda a: (torch.Tensor(a) * 2, torch.Tensor(a), torch.FloatTensor(a * 3)))(a)
    sum(one.square().sum() for one in made).backward()
    return [*made, a.grad]


@program
def what_is_written_to_is_overlapping_hooked(compiled: Compiled) -> list[Any]:
    def fn(a):
        v = (a * 2).unfold(0, 2, 1)
        v.register_hook(lambda gradient: gradient * 3)
        return v

    a = random(3)
    v = compiled(fn)(a)
    v[0] = 5
    (v * torch.arange(4.0).view(2, 2)).sum().backward()
    return [v, a.grad]


@program
def overlapping_result_is_written_to(compiled: Compiled) -> list[Any]:
    """Behind the call, and in it, where the write breaks the graph."""
    results: list[Any] = []

    def inside(a, b):
        v = torch.cat([a]).as_strided((2, 2), (1, 1))
        v[1] = b.max()
        return v

    for fn in (inside, lambda a, b: torch.cat([a]).as_strided((2, 2), (1, 1)), lambda a, b: (a * b).unfold(0, 2, 1)):
        a, b = random(3), random(3, seed=1)
        v = compiled(fn)(a, b)
        v[0] = b.min() * 2
        (v * torch.arange(4.0).view(2, 2)).sum().backward()
        results += [v, a.grad, b.grad]
    return results


@program
def no_grad_view_of_a_view(compiled: Compiled) -> list[Any]:
    """A view made in no_grad asks for a gradient where its base does: of a leaf that is a view of what needs none, it
    does not. Each way asks: an operator, a list of tensors, the program."""
    results: list[Any] = []

    def viewed(a):
        with torch.no_grad():
            return a.select(0, 1)

    for use in (lambda v: v.exp(), lambda v: torch.cat([v, v]), lambda v: v.sin().detach() if v.requires_grad else v):
        fn = compiled(lambda a, use=use: use(viewed(a)))
        for a in (random(4, 3), random(5, 3, g=False)[:4].requires_grad_(), random(5, 3)[:4], random(4, 3)):
            y = fn(a)
            results += [y, y.requires_grad]
    return results
