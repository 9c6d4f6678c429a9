# ruff: noqa  (odd code on purpose)
"""The transforms of torch.func inside compiled functions: captured whole, and equal to eager for other arguments than those captured with."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

import fusewright
from fusewright.base.events import STREAM, Broken, Captured, Skipped

weight = torch.linspace(-1, 1, 9).reshape(3, 3)
scale = 2.0


def loss(x: torch.Tensor) -> torch.Tensor:
    return ((x @ weight).sin() * scale).sum()


outside = torch.func.grad(loss)
rows = torch.vmap(torch.func.grad(lambda row: (row * weight[0]).pow(3).sum()))
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def of_parameters(x: torch.Tensor) -> Any:
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def error(parameters, row, target):
        return (torch.func.functional_call(net, parameters, (row[None],)) - target).pow(2).mean()

    return torch.vmap(torch.func.grad(error), in_dims=(None, 0, 0))(parameters, x, x[:, :2])


def chosen_by_python(x: torch.Tensor) -> Any:
    def f(row, power):
        if power > 2:
            row = row * 2
        out = {"sum": row.sum(), "rest": [row[k] ** power for k in range(3)]}
        return out

    return torch.vmap(f, in_dims=(0, None), out_dims=0)(x, 3)


def made_once_used_twice(x: torch.Tensor) -> Any:
    g = torch.func.grad_and_value(lambda a, b: (a * b).sum(), argnums=(0, 1))
    return g(x, x + 1), g(x * 2, x)[0][1]


def pulled_back(x: torch.Tensor) -> Any:
    out, pull = torch.func.vjp(lambda a: (a.sin(), a.cos().sum()), x)
    return out, pull((x, x.sum()))


PROGRAMS = {
    "vmap": lambda x: torch.vmap(lambda row: row.softmax(0) + row.sum())(x) * 2,
    "vmap over columns": lambda x: torch.vmap(lambda a, b: a.dot(b), in_dims=(1, 0), out_dims=0)(x, x),
    "nested vmap": lambda x: torch.vmap(torch.vmap(lambda a: a * scale + a.exp()))(x),
    "an operator": lambda x: torch.vmap(torch.dot)(x, x),
    "a factory inside": lambda x: torch.vmap(lambda row: row + torch.arange(3.0) + torch.zeros_like(row))(x),
    "grad": lambda x: torch.func.grad(loss)(x) + 1,
    "grad made outside": lambda x: outside(x) * 2,
    "a composition made outside": lambda x: rows(x),
    "grad of grad": lambda x: torch.func.grad(lambda a: torch.func.grad(lambda b: (b**3).sum())(a).pow(2).sum())(x),
    "auxiliary": lambda x: torch.func.grad(lambda a: ((a**2).sum(), a + 1), has_aux=True)(x),
    "jacrev": lambda x: torch.func.jacrev(lambda a: a @ weight)(x[0]),
    "jacfwd": lambda x: torch.func.jacfwd(lambda a: (a.sin() * a).cumsum(0))(x[0]),
    "hessian": lambda x: torch.func.hessian(lambda a: (a**3).sum() * a[0])(x[0]),
    "jvp": lambda x: torch.func.jvp(lambda a: a.sin() * weight, (x,), (x + 1,)),
    "vjp": pulled_back,
    "per-sample gradients": of_parameters,
    "Python inside": chosen_by_python,
    "used twice": made_once_used_twice,
}


def equal(one: Any, other: Any, **tolerance: float) -> None:
    mine, same = pytree.tree_flatten(one)
    theirs, structure = pytree.tree_flatten(other)
    assert same == structure
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, **tolerance)
        assert a.stride() == b.stride() and a.requires_grad == b.requires_grad


@pytest.mark.parametrize("name", PROGRAMS)
def test_captured_whole(name: str) -> None:
    program = PROGRAMS[name]
    compiled = fusewright.compile(lambda x: program(x), fullgraph=True)
    compiled(torch.randn(3, 3))
    for _ in range(2):
        x = torch.randn(3, 3)
        equal(compiled(x), program(x))


@pytest.mark.parametrize("name", ["vmap", "grad", "per-sample gradients", "a composition made outside"])
def test_symbolic_sizes_and_gradients(name: str) -> None:
    program = PROGRAMS[name]
    compiled = fusewright.compile(lambda x: program(x), dynamic=True)
    for rows in (4, 5, 7):
        x = torch.randn(rows, 3)
        equal(compiled(x), program(x))
    x, y = (torch.linspace(-1, 2, 9).reshape(3, 3).requires_grad_() for _ in range(2))
    for leaf, function in ((x, compiled), (y, program)):
        sum(part.sin().sum() for part in pytree.tree_leaves(function(leaf)) if part.requires_grad).backward()
    torch.testing.assert_close(x.grad, y.grad)


OF_ANY_SIZE = {
    **{
        f"interpolate {mode}": functools.partial(F.interpolate, scale_factor=2, mode=mode)
        for mode in ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")
    },
    "interpolate to a size": functools.partial(F.interpolate, size=7, mode="linear"),
    "corners": functools.partial(F.interpolate, scale_factor=2, mode="bilinear", align_corners=True),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True), "instance_norm": F.instance_norm, "hardshrink": F.hardshrink,
    "softshrink": F.softshrink, "linear": lambda x: F.linear(x, weight), "matmul": lambda x: x.matmul(weight),
    "dropout": lambda x: F.dropout(x, 0.5, training=False), "multi_margin_loss": lambda x: F.multi_margin_loss(x[..., 0, :], torch.tensor([1, 0])),
}  # fmt: skip
DERIVATIVES: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.detach().cos(),)), "jacfwd": lambda f, x: torch.func.jacfwd(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(f(x))), "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, x.cos()])),
    "grad of grad": lambda f, x: torch.func.grad(lambda y: torch.func.grad(lambda z: f(z).sin().sum())(y).sin().sum())(x),
}  # fmt: skip


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_of_operators_that_have_other_versions_for_sizes_that_vary(name: str, derivative: str) -> None:
    """PyTorch's Python versions of them give other flags, and other values where one is not smooth."""
    function, shape = OF_ANY_SIZE[name], (2, 3, *(4,) * {"bilinear": 1, "bicubic": 1, "corners": 1, "trilinear": 2}.get(name.split()[-1], 0))
    compiled = fusewright.compile(lambda x: DERIVATIVES[derivative](function, x), dynamic=name not in ("linear", "matmul"))
    for requires_grad, size in ((False, 3), (True, 3), (True, 5), (True, 4)):
        x = torch.randn(*shape, 3 if name in ("linear", "matmul") else size).requires_grad_(requires_grad)
        try:
            expected = DERIVATIVES[derivative](function, x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                compiled(x)
            continue
        equal(compiled(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_torch_level_backend_gets_them_whole(name: str) -> None:
    program = PROGRAMS[name]
    codes: list[str] = []
    with STREAM.listening(
        lambda event: codes.append(event.report.code) if isinstance(event, (Broken, Skipped)) else None
    ):
        compiled = fusewright.compile(lambda x: pytree.tree_map(torch.sin, program(x)), backend="eager")
        for _ in range(2):
            x = torch.randn(3, 3)
            equal(compiled(x), pytree.tree_map(torch.sin, program(x)))
    # Once PyTorch's own compiler has been used in the process, its wrappers stand around a transform.
    assert set(codes) <= {"transform-active", "untraceable-call"}


def test_no_import_of_dynamo() -> None:
    text = (
        "import sys, torch, fusewright\n"
        "f = lambda x: torch.vmap(lambda r: r.sin() * 2)(x)\n"
        "assert torch.allclose(fusewright.compile(f, fullgraph=True)(torch.ones(2, 3)), torch.full((2, 3), 1.68294197))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)


def test_what_the_function_reads_is_guarded() -> None:
    global scale, weight
    before = scale, weight
    log: list = []

    def f(x):
        def inner(row):
            log.append(scale)
            return (row * scale) @ weight

        return torch.vmap(inner)(x), outside(x)

    compiled = fusewright.compile(f, fullgraph=True)
    try:
        for scale in (2.0, 3.0, 4.0):
            weight = torch.randn(3, 3)
            x = torch.randn(3, 3)
            count = len(log)
            result = compiled(x)
            assert log[count:] == [scale]
            equal(result, f(x))
    finally:
        scale, weight = before


def test_errors_and_breaks_inside_are_eagers() -> None:
    def reads(x):
        return torch.func.grad(lambda a: a.sum() * (2 if a.sum() > 0 else 3))(x) + 1

    def raises(x):
        try:
            return torch.vmap(lambda a: a.sum().item())(x)
        except RuntimeError as error:
            return x + 1

    def printed(x):
        return torch.vmap(lambda a: (print("row", a.shape), a * 2)[1])(x) + 1

    for f in (reads, raises, printed):
        compiled = fusewright.compile(f)
        for x in (torch.ones(2, 3), -torch.ones(2, 3), torch.randn(2, 3)):
            equal(compiled(x), f(x))


def test_a_function_that_a_transform_made_leaves() -> None:
    def f(x):
        g = torch.func.grad(lambda a: (a * scale).pow(2).sum())
        y = g(x)
        fusewright.graph_break()
        return g(y), g

    compiled = fusewright.compile(f)
    for _ in range(2):
        x = torch.randn(3)
        (mine, g), (theirs, h) = compiled(x), f(x)
        equal(mine, theirs)
        equal(g(x), h(x))

    def pulls(x):
        out, pull = torch.func.vjp(torch.sin, x)
        return out * 2, pull

    compiled = fusewright.compile(pulls)
    for _ in range(2):
        x = torch.randn(3)
        (mine, pull), (theirs, other) = compiled(x), pulls(x)
        equal(mine, theirs)
        equal(pull(x), other(x))


def test_tensors_of_a_layer_do_not_leave() -> None:
    kept: list = []

    def f(x):
        def inner(row):
            kept.append(row)
            return row * 2

        return torch.vmap(inner)(x) + 1

    compiled = fusewright.compile(f)
    x = torch.randn(2, 3)
    equal(compiled(x), f(x))
    assert len(kept) == 2 and type(kept[0]) is type(kept[1])


KINDS_OF_RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda x: torch.func.grad(lambda row: (row * row).sum())(x),
    "value": lambda x: torch.func.grad_and_value(lambda row: (row * row).sum())(x),
    "view of a value": lambda x: torch.func.vjp(lambda row: row.view(-1), x)[0],
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    "hessian": lambda x: torch.func.hessian(lambda row: row.sin().sum())(x),
    "vmap": lambda x: torch.func.vmap(lambda row: row * 2)(x),
    "vmap of grad": lambda x: torch.func.vmap(torch.func.grad(lambda row: row * row))(x),
    "computed from a gradient": lambda x: torch.func.grad(lambda row: (row * row).sum())(x) * 2,
    "both kinds": lambda x: (torch.func.grad(lambda row: (row * row).sum())(x), x + 1),
    "beside a write": lambda x: (x.add_(1), torch.func.grad(lambda row: (row * row).sum())(x)),
}


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", KINDS_OF_RESULTS)
def test_what_a_transform_gives_under_inference_mode_is_of_eagers_kind(name: str, backend: str) -> None:
    """A transform that takes gradients leaves the mode."""
    function = KINDS_OF_RESULTS[name]
    compiled = fusewright.compile(function, backend=backend)
    if name == "hessian" and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("eager has no batching rule for dual numbers there")
    for begins_inside in (False, True, False):
        with torch.inference_mode(begins_inside):
            inputs = [torch.linspace(0, 1, 5) for _ in range(2)]
        with torch.inference_mode():
            found, wanted = (pytree.tree_leaves(one(x)) for one, x in zip((compiled, function), inputs))
        assert [one.is_inference() for one in found] == [one.is_inference() for one in wanted]
        torch.testing.assert_close(found, wanted)


def no_hooks(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        return x * 2


def own_hooks(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return (x * x).sum()


def hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def disabled() -> Any:
    return torch.autograd.graph.disable_saved_tensors_hooks("nor there")


REFUSED = [(made, hooks) for made in (outside, rows, torch.func.hessian(loss), pulled_back, no_hooks)] + [(own_hooks, disabled)]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("function, refuses", REFUSED)
def test_what_refuses_hooks_on_saved_tensors_refuses_them(
    function: Callable[..., Any], refuses: Callable[[], Any], backend: str, first: bool
) -> None:
    x = torch.linspace(-1, 1, 9).reshape(3, 3).requires_grad_()
    compiled = fusewright.compile(lambda x: function(x), backend=backend)
    for refused in (first, not first, first):
        if refused:
            with refuses(), pytest.raises(RuntimeError):
                function(x)
            with refuses(), pytest.raises(RuntimeError):
                compiled(x)
        else:
            torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("program", [
    lambda x, held: torch.func.grad(lambda r: (r * held).sum())(x), lambda x, held: torch.func.vmap(lambda r: r * held.sum())(x),
    lambda x, held: torch.func.jvp(lambda r: r * held, (x,), (x,))[1], lambda x, held: torch.func.grad(lambda r: held.sum())(x),
    lambda x, held: torch.func.hessian(lambda r: ((r * held) ** 3).sum())(x),
])  # fmt: skip
def test_an_input_with_a_history_that_is_met_inside(program: Any, backend: str) -> None:
    held = torch.tensor([2.0, 3.0], requires_grad=True) * 3

    def closed(x: torch.Tensor) -> Any:
        return program(x, held)

    x = torch.tensor([1.0, 2.0])
    compiled = fusewright.compile(closed, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), closed(x))
