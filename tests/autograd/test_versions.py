"""What is written to between a forward and its backward: eager's gradient, eager's error, or a difference that is meant."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusewright

KEPT = "the argument is kept where eager keeps what it has computed of it: an error, never a wrong gradient"
AGAIN = "what eager keeps is computed again, or kept apart: the gradient of the result that was computed"

CHANGED = "no version counts the write: what is computed again is computed from the changed values"


def within(write: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> None:
        with torch.no_grad():
            write(*args)

    return run


def then(value: Any, write: Any) -> Any:
    return value


# name: (program of x and y, leaves, and b; what is written to, given (x, y, b, the results); why it may differ)
ROWS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "a factor": (lambda x, y, b: x * y, within(lambda x, y, b, r: x.add_(1)), ""),
    "a buffer": (lambda x, y, b: x * b, lambda x, y, b, r: b.add_(1), ""),
    "a buffer that is not needed": (lambda x, y, b: x + b, lambda x, y, b, r: b.add_(1), ""),
    "a buffer's data": (lambda x, y, b: x * b, lambda x, y, b, r: b.data.add_(1), ""),
    "another part of a buffer": (lambda x, y, b: x[:2] * b[:2], lambda x, y, b, r: b[2:].add_(1), ""),
    "a power": (lambda x, y, b: x**3, within(lambda x, y, b, r: x.add_(1)), ""),
    "a product": (lambda x, y, b: x @ y, within(lambda x, y, b, r: y.add_(1)), ""),
    "a quotient": (lambda x, y, b: x / b, lambda x, y, b, r: b.add_(1), ""),
    "a result that is not needed": (lambda x, y, b: x.sin(), lambda x, y, b, r: r.add_(1), ""),
    "another result": (lambda x, y, b: (x.exp(), x.sin()), lambda x, y, b, r: r[1].mul_(2), ""),
    "a view of another result": (lambda x, y, b: (x.sin() + 1, x.sin()[:2]), lambda x, y, b, r: r[1].mul_(2), ""),
    "a part of what is needed": (lambda x, y, b: x * b[0], lambda x, y, b, r: b[0].add_(1), ""),
    "inside, what is needed": (lambda x, y, b: (lambda t: then(t * x, t.add_(1)))(b * 1), lambda *a: None, ""),
    "inside, a result": (lambda x, y, b: (lambda t: then(t.sin(), t.add_(1)))(x * 2), lambda *a: None, ""),
    "inside, an argument": (lambda x, y, b: then(x * b, b.add_(1)), lambda *a: None, ""),
    "a needed result": (lambda x, y, b: x.exp(), lambda x, y, b, r: r.add_(1), AGAIN),
    "a needed result's data": (lambda x, y, b: x.exp(), lambda x, y, b, r: r.data.add_(1), AGAIN),
    "a needed second result": (lambda x, y, b: (x.exp() * 2, x.relu()), lambda x, y, b, r: r[1].mul_(2), AGAIN),
    "relu": (lambda x, y, b: (x * 2).relu_(), lambda x, y, b, r: r.detach().mul_(2), AGAIN),
    "data of what is computed again": (lambda x, y, b: x * b.sin(), lambda x, y, b, r: b.data.add_(1), CHANGED),
    "a leaf's data": (lambda x, y, b: x.exp(), lambda x, y, b, r: x.data.add_(1), CHANGED),
    "data of a condition": (lambda x, y, b: torch.where(b > 2, x, 3 * y), lambda x, y, b, r: b.data.add_(1), CHANGED),
    "a condition's argument": (lambda x, y, b: torch.where(b > 1, x, y), lambda x, y, b, r: b.add_(1), KEPT),
    "an argument that was copied": (lambda x, y, b: x * b.clone(), lambda x, y, b, r: b.add_(1), KEPT),
}


def gradients(function: Callable[..., Any], write: Callable[..., Any]) -> list[torch.Tensor | None] | type[Exception]:
    x, y = (torch.arange(1.0 + n, 4.0 + n, requires_grad=True) for n in (0, 1))
    b = torch.full((3,), 2.0)
    try:
        results = function(x, y, b)
        write(x, y, b, results)
        (results[0] if isinstance(results, tuple) else results).sum().backward()
    except RuntimeError as error:
        return type(error)
    return [x.grad, y.grad]


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("name", ROWS)
def test_as_eager_or_as_meant(name: str, backend: str) -> None:
    function, write, meant = ROWS[name]
    allowed = [gradients(function, write)]
    if meant == KEPT:
        allowed.append(RuntimeError)
    if meant == AGAIN:
        allowed.append(gradients(function, lambda *args: None))
    if meant == CHANGED:
        allowed.append(gradients(lambda *args: (write(*args, None), function(*args))[1], lambda *args: None))
    found = gradients(fusewright.compile(function, backend=backend), write)
    assert any(same(found, one) for one in allowed), f"{found}, allowed {allowed}"


def same(one: object, other: object) -> bool:
    if not isinstance(one, list) or not isinstance(other, list):
        return one is other
    pairs = zip(one, other, strict=True)
    return all(a is b is None or (a is not None and b is not None and torch.allclose(a, b)) for a, b in pairs)


@pytest.mark.parametrize(
    "backend",
    [
        "native", "aot_eager", "eager", "cudagraphs", fusewright.aot(lambda gm, inputs: gm),
        pytest.param("xla", marks=pytest.mark.skipif(not find_spec("jax"), reason="no jax")),
    ],
)  # fmt: skip
def test_a_write_changes_the_version(backend: Any) -> None:
    """As often as eager's, which counts each write but those through `data`; also where autograd takes note of them."""
    for function in (
        lambda b, x: b.add_(1),
        lambda b, x: b.add_(1).mul_(2),
        lambda b, x: (b[:1].add_(1), b * x)[1],
        lambda b, x: (b[0].zero_(), b[1:].mul_(2), b * x)[2],
        lambda b, x: b.detach().add_(1),
        lambda b, x: torch.add(b, 1, out=b),
        lambda b, x: (torch._foreach_mul_([b, b], 2.0), b * x)[1],
        lambda b, x: (b.__setitem__(0, 2.0), b.index_fill_(0, torch.tensor([1]), 3.0), b * x)[2],
        lambda b, x: (torch.nn.functional.dropout(b, 0.5, inplace=True), x * 2)[1],
        lambda b, x: (b.data.add_(1), b * x)[1],
        lambda b, x: (b.data[0].detach().add_(1), b.detach().data.mul_(2), b[1].add_(1), b * x)[3],
        lambda b, x: (b.add_(x), b.mul_(2))[1],
    ):
        compiled = fusewright.compile(function, backend=backend)
        for grown in (False, True, True):
            x, grew = torch.ones(3, requires_grad=grown), []
            for one in (function, compiled):
                b = torch.ones(3)
                one(b, x)
                grew.append(b._version)
            assert grew[0] == grew[1]


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_a_write_to_data_between_a_forward_and_its_backward(backend: str) -> None:
    """By a compiled function: no version counts it, and the backward reads what was written."""
    w, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    result = w * x
    fusewright.compile(lambda w: w.data.mul_(0.5).sum(), backend=backend)(w)
    result.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 0.5))


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_what_is_not_written_to_keeps_its_version(backend: str) -> None:
    for function in (
        lambda b: b + 1,
        lambda b: b.clone().add_(1),
        lambda b: b.detach().clone().mul_(2),
        lambda b: torch.add(b, 1, out=torch.empty(3)),
    ):
        b = torch.ones(3).add_(1)
        fusewright.compile(function, backend=backend)(b)
        assert b._version == 1
    for function in (lambda b: b[1:], lambda b: b.view(3, 1), lambda b: b.detach(), lambda b: b.unbind()[0]):
        b = torch.ones(3).add_(1)
        view = fusewright.compile(function, backend=backend)(b)
        for write in (lambda: None, lambda: b.mul_(2), lambda: view.mul_(2)):
            write()
            assert view._version == b._version
        assert b._version == 3


def changed(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    part = x[..., 1]
    part.mul_(0.25)
    return part * b[..., 1]


def changed_later(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    part = b[..., 1]
    result = x[..., 1] * (part * 2).sin()
    part.add_(1)
    return result


def changed_parts(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = x[1:, None, ::2].transpose(0, -1) * (b[1:, None, ::2].transpose(0, -1) * 2).cos()
    b.mul_(3)
    return result


OF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t * 1, "turned": lambda t: (t * 1).transpose(0, -1), "every second": lambda t: (t * 1)[..., ::2],
    "detached": lambda t: t.detach().clone(),
}  # fmt: skip


@pytest.mark.parametrize("name", OF)
@pytest.mark.parametrize("program", [changed, changed_later, changed_parts])
def test_parts_of_an_argument_that_the_call_changes(program: Callable[..., Any], name: str) -> None:
    """What the backward computes again from a part of an argument is computed from what the part was."""
    found = []
    for function in (program, fusewright.compile(program)):
        x, b = (torch.rand(4, 5, 4, generator=torch.manual_seed(n)).requires_grad_() for n in (0, 1))
        first = OF[name](x) * x.sum() if name == "detached" else OF[name](x)
        result = function(first, OF[name](b))
        result.sum().backward()
        found.append((result, x.grad, b.grad if b.grad is not None else 0))
    torch.testing.assert_close(*found)


def made_without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x[1:]


REFUSED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda leaf: leaf, lambda leaf: leaf.view(3), lambda leaf: (leaf * 2).unbind()[0], lambda leaf: made_without_gradients(leaf * 2),
    lambda leaf: leaf * 2, lambda leaf: (leaf * 2)[1:],
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_write_behind_no_grad_is_refused_as_in_eager(number: int) -> None:
    """What runs behind the break begins without gradients, and leaves the mode as the program does."""

    def function(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            other.unsqueeze_(0)
        return x.mul_(other[0, 0]) + 1

    def run(called: Callable[..., torch.Tensor]) -> list[Any]:
        leaf = torch.arange(3.0, requires_grad=True)
        x, error = REFUSED[number](leaf), None
        try:
            called(x, torch.full((2,), 3.0)).sum().backward()
        except RuntimeError as raised:
            error = type(raised)
        enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        return [error, enabled, x.tolist(), None if leaf.grad is None else leaf.grad.tolist()]

    compiled = fusewright.compile(function)
    assert [run(compiled) for _ in range(2)] == [run(function)] * 2


@pytest.mark.parametrize("part", [slice(1, None), slice(None)])
@pytest.mark.parametrize("shown", [True, False])
def test_a_view_loses_its_hook_by_a_write(part: slice, shown: bool) -> None:
    """Another tensor does not."""

    def results(compiled: Callable[[Any], Any]) -> list[torch.Tensor]:
        leaf = torch.arange(1.0, 5, requires_grad=True)
        base = leaf * 1
        argument, seen = base[part] if shown else base, []
        argument.register_hook(lambda gradient: (seen.append(gradient.clone()), gradient * 2)[1])
        y = compiled(lambda a: a.mul_(3).sin())(argument)
        (y.sum() + base.sum()).backward()
        assert leaf.grad is not None
        return [*seen, y, leaf.grad]

    got, expected = results(fusewright.compile), results(lambda function: function)
    assert len(got) == len(expected) == (2 if shown else 3)
    torch.testing.assert_close(got, expected)


SHOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "diagonal": lambda x: x.diagonal(), "unfold": lambda x: x.unfold(0, 2, 1), "split": lambda x: x.split(1)[1], "unbind": lambda x: x.unbind(1)[1],
    "slice": lambda x: x[1:], "movedim": lambda x: x.movedim(0, 1), "expand": lambda x: x[:1].expand(4, 3), "real": lambda x: x.real,
    "as_strided": lambda x: x.as_strided((2, 2), (3, 1)), "itself": lambda x: x,
    "part of a diagonal": lambda x: x.t().diagonal(1)[1:], "unflatten": lambda x: x.unflatten(0, (3, 1)), "chunk": lambda x: x.chunk(2)[0],
}  # fmt: skip
MADE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda v: F.pad(v, (1, 1)), lambda v: v.double(), lambda v: v.clone(), lambda v: torch.where(v > 0, v, v * 0), lambda v: -v,
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", [lambda x: x[:3, :3], lambda x: x[::2, 1::2], lambda x: x[:3, :3].contiguous()])
@pytest.mark.parametrize("name", SHOWN)
def test_what_the_backward_computes_again_of_a_part_of_what_was_written_to(
    name: str, layout: Callable[[torch.Tensor], torch.Tensor], dynamic: bool
) -> None:
    """It is computed of a copy: the gradient is that of what the forward has read."""

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        leaf = torch.arange(1.0, 37).reshape(6, 6).requires_grad_()
        result = function(layout(leaf * 1))
        (result * torch.arange(1.0, result.numel() + 1).reshape(result.shape)).sum().backward()
        return leaf.grad

    for make in MADE:

        def function(x: torch.Tensor) -> torch.Tensor:
            value = make(SHOWN[name](x))
            result = value * value
            with torch.no_grad():
                x.add_(1)
            return result

        compiled = fusewright.compile(function, dynamic=dynamic)
        torch.testing.assert_close([run(compiled), run(compiled)], [run(function)] * 2)


WINDOWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x[1].as_strided((2, 2), (1, 1)), lambda x: x[1:].as_strided((2, 2), (1, 1)), lambda x: x[2:4].as_strided((3,), (1,), 1),
    lambda x: x[1:3].as_strided((3,), (2,)), lambda x: x.as_strided((2, 2), (1, 1), 1), lambda x: x.view(2, 4)[0].as_strided((2,), (3,)),
    lambda x: x[1].as_strided((1,), (1,)), lambda x: x.unfold(0, 3, 1), lambda x: x[4:].as_strided((3,), (1,), 2),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_beside_the_elements_of_a_view(
    window: Callable[[torch.Tensor], torch.Tensor], inside: bool, written: bool, backend: str
) -> None:
    """Autograd knows of the elements that lie beside it once what both are views of was written to."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 1 if inside else x
        result = window(x)
        if written:
            with torch.no_grad():
                x[2] += 1
        return result

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        x = torch.arange(8.0, requires_grad=True)
        result = function(x)
        (result * torch.arange(1.0, result.numel() + 1).reshape(result.shape)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist(), result.tolist()

    compiled = fusewright.compile(function, backend=backend)
    assert [run(compiled) for _ in range(2)] == [run(function)] * 2


@pytest.mark.parametrize("hook", [lambda x: x.register_hook(lambda gradient: gradient * 2), lambda x: x.retain_grad()])
@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x[1:].add_(1)])
@pytest.mark.parametrize("hidden", [True, False])
def test_a_hook_on_a_view_of_a_leaf_before_a_write_without_gradients(
    hook: Callable[[Any], Any], write: Callable[[Any], Any], hidden: bool
) -> None:
    """A view that was made in a no_grad block is an error to ask of once it was written to."""

    def function(x: torch.Tensor) -> torch.Tensor:
        hook(x)
        write(x)
        return x.detach() * 2

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        leaf = torch.arange(4.0, requires_grad=True)
        with torch.set_grad_enabled(not hidden):
            x = leaf[1:]
        try:
            with torch.no_grad():
                result = function(x).tolist()
            return result, len(x._backward_hooks or ()), leaf.tolist()
        except RuntimeError as error:
            return str(error)

    compiled = fusewright.compile(function)
    assert [run(compiled) for _ in range(2)] == [run(function)] * 2


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_a_write_to_what_the_backward_needs_a_view_of_is_named(backend: str) -> None:
    """Not as a write to the base of a view that a no_grad block has made: the program has no such block."""

    def another_part_of_it(x: torch.Tensor) -> torch.Tensor:
        largest, result = x.logsumexp(0), x.repeat_interleave(2)
        largest.expand(2)[1].add_(1)
        return result

    def its_shape(x: torch.Tensor) -> torch.Tensor:
        filled = x.index_fill(0, torch.tensor([1]), -1.5)
        product = torch.kron(x, filled.flatten()[:2])
        filled.unsqueeze_(-1)
        return product

    for function in (another_part_of_it, its_shape):
        x, y = (torch.arange(3.0, requires_grad=True) for _ in range(2))
        function(x).sum().backward()
        try:
            fusewright.compile(function, backend=backend)(y).sum().backward()
        except RuntimeError as error:
            assert "needed for gradient computation has been modified" in str(error)
        else:
            assert same([x.grad], [y.grad])


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_a_write_behind_a_break_to_what_was_written_to_through_a_view(backend: str, used: bool) -> None:
    """What the backward needs is that result itself: it may be written to, and the backward then refuses."""

    def function(x: torch.Tensor, change: str) -> torch.Tensor:
        made = F.group_norm(x, 1)
        made.unflatten(1, (1, 2)).floor_()
        result = F.silu(made)
        fusewright.graph_break()
        made.mul_(2) if change == "mul_" else made.swapaxes_(0, 1)
        return result + made.sum() if used else result

    compiled = fusewright.compile(function, backend=backend)
    for change in ("mul_", "swapaxes_"):
        x = torch.arange(6.0).reshape(3, 2).requires_grad_()
        expected, found = function(x, change), compiled(x, change)
        torch.testing.assert_close(found, expected)
        for result in (expected, found):
            with pytest.raises(RuntimeError, match="needed for gradient computation has been modified"):
                result.sum().backward()


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_gradients_of_gradients_beside_an_argument_without_a_version(backend: str) -> None:
    """Once an inference tensor, now a plain one: PyTorch gives it no version counter."""
    with torch.inference_mode():
        b = torch.ones(3)
    b.data = torch.full((3,), 2.0)
    assert not b.is_inference()
    x = torch.arange(1.0, 4.0, requires_grad=True)

    def program(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x * x * x).sin() + b

    found = []
    for function in (program, fusewright.compile(program, backend=backend)):
        (once,) = torch.autograd.grad(function(x, b).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(once.sum(), x)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "backend",
    [
        "native", "aot_eager", "eager", "cudagraphs", fusewright.aot(lambda gm, inputs: gm),
        pytest.param("xla", marks=pytest.mark.skipif(not find_spec("jax"), reason="no jax")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("norm", ["BatchNorm1d", "InstanceNorm1d"])
def test_running_statistics_have_the_version_that_eager_leaves(norm: str, backend: Any, inside: bool) -> None:
    """Batch normalisation counts no write to them, so an eager forward may wait for its backward behind another one."""
    found = []
    for compiled in (False, True):
        module = getattr(torch.nn, norm)(4, affine=True, track_running_stats=True)

        def function(x: torch.Tensor, module: Any = module) -> torch.Tensor:
            result = module(x)
            return torch.autograd.grad(result.sin().sum(), x, create_graph=True)[0] if inside else result  # type: ignore[no-any-return]

        second = fusewright.compile(function, backend=backend) if compiled else function
        x = torch.arange(60.0).reshape(5, 4, 3).sin().requires_grad_()
        first = module(x)
        for _ in range(2):
            second(x * 2 + 1)
        (first * first * x).sum().backward()
        found.append((x.grad, *(one.clone() for one in module.buffers()), *(one._version for one in module.buffers())))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_gradients_of_gradients_behind_another_call(backend: str) -> None:
    """What the other call writes to is nothing that the first one's results depend on: statistics, a count of calls."""

    class Scored(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x).tanh()
            self.total += y.detach().sum()
            return y

    found = []
    for compiled in (False, True):
        module = Scored()
        call = fusewright.compile(module, backend=backend) if compiled else module
        x = torch.arange(20.0).reshape(5, 4).sin().requires_grad_()
        first, _ = call(x), call(x.detach() * 2 + 1)
        (once,) = torch.autograd.grad(first.pow(3).sum(), x, create_graph=True)
        once.square().sum().backward()
        found.append((x.grad, module.norm.weight.grad, *(one.clone() for one in module.buffers())))
    torch.testing.assert_close(*found)


def _lists(count: int) -> dict[str, Callable[[list[torch.Tensor], list[torch.Tensor]], None]]:
    """Each operator that writes to a list of tensors, with arguments that it takes."""
    found: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor]], None]] = {}
    names = {schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    for name in sorted(name for name in names if name.startswith("_foreach_") and name.endswith("_")):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            kinds = [str(one.type) for one in operator._schema.arguments[1:] if not one.has_default_value()]
            makers = {"List[Tensor]": lambda y: y, "number": lambda y: 1.5, "Tensor": lambda y: torch.tensor(1.5), "List[number]": lambda y: [1.5] * count}

            def call(x: Any, y: Any, operator: Any = operator, kinds: Any = kinds, makers: Any = makers) -> None:
                operator(x, *[makers[kind](y) for kind in kinds])

            if "out" not in overload and makers.keys() >= set(kinds):
                found[f"{name}.{overload}"] = call
    return found  # fmt: skip


LISTS = _lists(3)


@pytest.mark.parametrize("name", LISTS)
def test_a_write_to_a_list_is_one_to_each_of_its_tensors(name: str) -> None:
    """Also to what the program has made, and where the write is seen by who saved the value before."""
    assert len(LISTS) > 60

    def arguments(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        LISTS[name]([x, x, y[1:]], [y * 2, x * 3, y[1:] * 2])
        return x + y

    def made(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        saved = (x + y).exp()
        result = saved * 2
        LISTS[name]([saved, x, y], [y * 2, x * 3, y * 2])
        return result

    def run(function: Any, history: bool) -> Any:
        leaf = torch.arange(1.0, 5).div(7).requires_grad_(history)
        x, y = leaf * 1, leaf.detach() * 2
        try:
            result = function(x, y)
            if history:
                result.sum().backward()
        except RuntimeError as error:
            return str(error)[:60]
        return leaf.grad, result.detach(), x._version, y._version

    for function in (arguments, made):
        compiled = fusewright.compile(function)
        for history in (True, False):
            expected, got = run(function, history), run(compiled, history)
            if isinstance(expected, str):
                assert got == expected
            else:
                torch.testing.assert_close(got, expected, equal_nan=True)


def test_what_fused_kernels_write_counts_as_no_write() -> None:
    def adam(lists: list[list[torch.Tensor]], one: torch.Tensor) -> torch.Tensor:
        torch._fused_adam_(  # type: ignore[call-overload]
            *lists, [], [one], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False
        )
        return lists[0][0] * 1

    def unscale(lists: list[list[torch.Tensor]], one: torch.Tensor) -> torch.Tensor:
        torch._amp_foreach_non_finite_check_and_unscale_(lists[0], one, one + 1)
        return lists[0][0] * 1

    for function in (adam, unscale):
        found = []
        for called in (function, fusewright.compile(function)):
            lists, one = [[torch.arange(1.0, 4) + place] for place in range(4)], torch.ones(())
            result = called(lists, one)
            found.append((result, lists, [tensor._version for (tensor,) in lists], one._version))
        torch.testing.assert_close(*found)


AGES: list[Callable[[torch.Tensor], Any]] = [
    lambda x: (x.add_(1), x[1:])[1], lambda x: (x.add_(1), x.mul_(2), x[1:], x.view(2, 2))[2:], lambda x: (x[1:], x.add_(1))[0],
    lambda x: (x[1:], x.add_(1), x.mul_(2))[0], lambda x: (x[1:], x.add_(1), x[2:]), lambda x: (x[1:], x.add_(1), x[2:], x.mul_(2), x[:2])[::2],
    lambda x: x[1:].add_(1), lambda x: (x[1:].add_(1), x.view(2, 2)), lambda x: x.view(2, 2)[1],
    lambda x: (F.batch_norm(x.view(2, 2) * 1, x[:2], x[2:], training=True), x[1:]),
]  # fmt: skip


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager", fusewright.aot(lambda gm, inputs: gm)])
@pytest.mark.parametrize("number", range(len(AGES)))
def test_the_age_of_views_and_the_version_of_what_they_show(number: int, backend: Any, enabled: bool) -> None:
    """A view from before a write has a history once what it shows is told to require a gradient."""
    found = []
    for function in (AGES[number], fusewright.compile(AGES[number], backend=backend)):
        for _ in range(2):
            x = torch.arange(1.0, 5)
            with torch.set_grad_enabled(enabled):
                results = function(x)
            results = results if isinstance(results, tuple) else (results,)
            views = [one for one in results if one._is_view()]
            versions, said = [one._version for one in (x, *views)], []
            x.requires_grad_()
            for one in views:
                try:
                    said.append((one.requires_grad, type(one.grad_fn).__name__))
                except RuntimeError as error:
                    said.append(str(error)[:40])
            found.append((versions, said))
    assert found[:2] == found[2:]
