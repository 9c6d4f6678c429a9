"""What results are besides their values: objects of their own, views of what eager's are views of, with eager's history."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import fusewright

NO_CHANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda v: v.view(v.shape), "reshape": lambda v: v.reshape(v.shape), "expand": lambda v: v.expand_as(v),
    "slice": lambda v: v[:], "ellipsis": lambda v: v[...], "detach": lambda v: v.detach(), "narrow": lambda v: v.narrow(0, 0, v.shape[0]),
    "permute": lambda v: v.permute(tuple(range(v.dim()))), "alias": torch.ops.aten.alias, "contiguous": lambda v: v.contiguous(),
    "to": lambda v: v.to(torch.float32), "flatten": lambda v: v.flatten(), "squeeze": lambda v: v.squeeze(), "movedim": lambda v: v.movedim(0, 0),
}  # fmt: skip


def shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
@pytest.mark.parametrize("name", NO_CHANGE)
def test_a_view_of_a_result_is_another_object(name: str, shape: tuple[int, ...], requires_grad: bool) -> None:
    view = NO_CHANGE[name]
    if not shape and name in ("slice", "narrow", "movedim"):
        pytest.skip("a tensor without dimensions has none to take a part of")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = x * 2
        return view(made), made, torch.hypot(x, x), made

    x = torch.rand(shape).requires_grad_(requires_grad)
    eager = function(x)
    for results in (eager, fusewright.compile(function)(x)):
        assert results[1] is results[3]
        assert (results[0] is results[1]) == (eager[0] is eager[1])
        assert shared(results[0], results[1])
        assert not shared(results[1], results[2])


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_has_the_common_shape_is_given_back(backend: str, dynamic: bool) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.broadcast_tensors(x, y)

    compiled = fusewright.compile(function, backend=backend, dynamic=dynamic, recompile_limit=99)
    for shapes in (((2, 5), (2, 5)), ((3, 5), (1, 5)), ((5,), (4, 5)), ((1, 1), (1, 1)), ((2, 1, 5), (1, 5))):
        x, y = map(torch.rand, shapes)
        found, eager = compiled(x, y), function(x, y)
        assert [one is own for one, own in zip(found, (x, y))] == [one is own for one, own in zip(eager, (x, y))]
        assert type(found) is type(eager) and all(map(torch.equal, found, eager))


WITHOUT_ELEMENTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda v: v[:0], lambda v: v[:0].T, lambda v: v[9:], lambda v: v[1:1], lambda v: v.narrow(1, 1, 0), lambda v: v[:0].unsqueeze(0),
    lambda v: v.split([0, 3])[0], lambda v: v[:0].transpose_(0, 0), lambda v: v.T[2:2],
]  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("made", [lambda x: x * 2, lambda x: x @ x.mT, lambda x: x.sort()[0], lambda x: x])
@pytest.mark.parametrize("view", WITHOUT_ELEMENTS)
def test_a_view_without_elements_has_the_memory_of_what_it_views(
    view: Callable[[torch.Tensor], torch.Tensor], made: Callable[[torch.Tensor], torch.Tensor], backend: str
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return view(made(x)[:]).as_strided((1, 2), (1, 1), 0)

    def returned(x: torch.Tensor) -> torch.Tensor:
        return view(made(x)[:])

    x = torch.rand(3, 3)
    for run in (returned, fusewright.compile(returned, backend=backend)):
        found = run(x)
        if run is returned:
            eager = found.untyped_storage().nbytes(), found.storage_offset(), tuple(found.shape)
        assert (found.untyped_storage().nbytes(), found.storage_offset(), tuple(found.shape)) == eager
    assert torch.equal(fusewright.compile(function, backend=backend)(x), function(x))


VIEWS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.detach(), lambda x: x.view(-1), lambda x: x * 2, lambda x: x.mT, lambda x: x.expand(2, *x.shape),
    lambda x: (x.t(), x + 1), lambda x: (x * 2).view(-1), lambda x: x[0], lambda x: x.flatten(), lambda x: x.contiguous(),
    lambda x: torch.meshgrid(x[0], x[0], indexing="ij")[0], lambda x: x.unbind(0), lambda x: x.chunk(2), lambda x: x.reshape(-1, 1),
    lambda x: x.real, lambda x: x.float(), lambda x: x.diagonal(), lambda x: x.squeeze(0), lambda x: x.T, lambda x: x.unflatten(-1, (-1, 1)),
    lambda x: x.narrow(0, 0, 1),
]  # fmt: skip


def facts(result: Any) -> list[Any]:
    found = result if isinstance(result, tuple | list) else [result]
    return [(t.is_inference(), t.requires_grad, t.is_leaf, tuple(t.shape)) for t in found]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (1, 1)])
def test_views_in_modes_without_gradients(mode: Any, dynamic: bool | None, shape: tuple[int, ...]) -> None:
    """Views of what was made outside of inference mode are no inference tensors, without elements too, and require
    gradients as what they view does."""
    for number, function in enumerate(VIEWS):
        for leaf in (True, False):
            x = torch.ones(shape, requires_grad=True)
            x = x if leaf else x * 1
            with mode():
                try:
                    expected = facts(function(x))
                except (IndexError, RuntimeError):
                    continue
                assert facts(fusewright.compile(function, dynamic=dynamic, fullgraph=True)(x)) == expected, (number, leaf)


BASES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(4), "leaf": lambda: torch.ones(4, requires_grad=True), "view": lambda: torch.ones(5)[1:],
    "leaf that is a view": lambda: torch.ones(5)[1:].requires_grad_(), "history": lambda: torch.ones(4, requires_grad=True) * 2,
    "view of a leaf": lambda: torch.ones(5, requires_grad=True)[1:], "detached": lambda: torch.ones(4, requires_grad=True).detach(),
}  # fmt: skip
SHOWN: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x[::2], lambda x: x.view(2, 2), lambda x: x.detach(), lambda x: x.detach()[::2], lambda x: x[::2].detach(),
    lambda x: x.view_as(x), lambda x: x[::2][1:], lambda x: (x[::2].detach()[1:], x[1:]), lambda x: x[1:].detach()[1:].detach(),
    lambda x: x.view(2, 2).requires_grad_(), lambda x: x[1:].requires_grad_()[1:], lambda x: (x.requires_grad_(), x[1:]),
    lambda x: x.detach().requires_grad_()[1:], lambda x: x.requires_grad_()[::2][0], lambda x: x.requires_grad_().detach()[0],
    lambda x: (x[1:].unbind(), x.detach().chunk(2)), lambda x: (y := x * 2, y.detach(), y.detach()[1:], y[1:]),
]  # fmt: skip


def base_of(t: torch.Tensor, x: torch.Tensor) -> str:
    if t._base is None:
        return "none"
    return "argument" if t._base is x else "the argument's" if t._base is x._base else "another"


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_what_a_result_is_a_view_of(number: int, mode: Any) -> None:
    """So a write to a detached result gives its argument no history."""
    compiled = fusewright.compile(SHOWN[number])
    for name, make in BASES.items():
        expected, *found = (shown(function, make(), mode) for function in (SHOWN[number], compiled, compiled))
        assert found == [expected, expected], name


def shown(function: Callable[[torch.Tensor], Any], x: torch.Tensor, mode: Any) -> list[Any]:
    with mode():
        try:
            results = [t for t in pytree.tree_leaves(function(x)) if t is not x]
        except RuntimeError as error:
            return [type(error)]
    found = [(t.requires_grad, t.is_leaf, t.grad_fn is None, base_of(t, x)) for t in results]
    return [*found, x.requires_grad, x._version]


WEIGHT = torch.ones(4, 5)
ANEW: list[Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = [
    lambda x: ((y := x @ WEIGHT)[:, 0], y), lambda x: ((y := x.mT.flatten()), y[:2], y.view(-1, 2)), lambda x: ((y := x + 1)[1:], y),
    lambda x: ((y := x.mT.flatten()), y.view(x.mT.shape)), lambda x: ((y := x.mT.flatten())[:2], y.detach(), y[1:]),
    lambda x: ((y := x.sum(0).unsqueeze_(0)), y[0]), lambda x: ((y := x.expand(2, *x.shape).reshape(-1)), y.permute(0), y[3:]),
    lambda x: ((y := (x @ WEIGHT).relu().flatten())[1:], y), lambda x: ((y := x @ WEIGHT), y[0], (z := x @ -WEIGHT), z[0]),
    lambda x: ((y := x.mT.flatten())[:2], y[1:]), lambda x: (x.mT.flatten()[:2].sin(), x.mT.flatten()),
]  # fmt: skip


def viewed(results: tuple[torch.Tensor, ...]) -> list[Any]:
    """Whether each is a view, and of which of them."""
    return [(t._is_view(), [place for place, one in enumerate(results) if one is t._base]) for t in results]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("number", range(len(ANEW)))
def test_what_is_made_anew_is_no_view(number: int, requires_grad: bool, dynamic: bool | None) -> None:
    """Also where it is made in memory of another shape, and views of it leave too: it may leave its history in place."""
    make = ANEW[number]

    def broken(x: torch.Tensor) -> Any:
        results = make(x)
        fusewright.graph_break()
        views = [one._is_view() for one in results]
        return views, [one.requires_grad_().requires_grad for one in results if one.is_leaf and not one._is_view()], results

    x = torch.rand(2, 3, 4).requires_grad_(requires_grad)
    eager, found = make(x), fusewright.compile(make, dynamic=dynamic)(x)
    assert viewed(found) == viewed(eager)
    assert list(map(torch.equal, found, eager)) == [True] * len(eager)
    *eager, results = broken(x)
    *found, mine = fusewright.compile(broken, dynamic=dynamic)(x)
    assert [*found, viewed(mine)] == [*eager, viewed(results)]
    assert [one.requires_grad for one in mine] == [one.requires_grad for one in results]
    for one in mine:
        if not one._is_view():
            one.detach_()


OF_RESULTS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: ((y := x * 2)[:], y.view(3, 3), y), lambda x: ((y := x.sum(0)).view(-1), y), lambda x: ((y := x @ x).view(-1), y[:], y),
    lambda x: ((y := x.mT.flatten()), y.view(3, 3)), lambda x: ((y := (x + 1).mT.reshape(-1))[1:], y, y.view(3, 3), y[:]),
    lambda x: ((y := x.mT.flatten()).view(-1), y.requires_grad_()), lambda x: ((y := x.mT.contiguous()).view(-1), y.mT, y),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OF_RESULTS)))
def test_which_result_another_is_a_view_of(number: int) -> None:
    """In any order; a copy that is reshaped is no view of the copy."""

    def bases(results: tuple[torch.Tensor, ...]) -> list[Any]:
        places = [[place for place, one in enumerate(results) if t._base is one] for t in results]
        return [(place, t._base is None, t.requires_grad) for place, t in zip(places, results)]

    compiled, x = fusewright.compile(OF_RESULTS[number]), torch.arange(9.0).reshape(3, 3)
    assert bases(compiled(x)) == bases(OF_RESULTS[number](x))


def told_inside(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    view = x[1:].mul_(2)
    x.requires_grad_()
    return view, view * 3


def hidden(view: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return view(x)


OLDER: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x[1:].mul_(2), lambda x: (x.mul_(2)[1:], x + 1), lambda x: (x[1:], x.mul_(2))[0], lambda x: x.t()[:2].copy_(x[1:3] + 1),
    lambda x: (x[:2], x[2:].mul_(2)), lambda x: x[1:], lambda x: x[1:].detach().mul_(2), lambda x: (x.mul_(2), x.t()), told_inside,
    lambda x: (lambda v: (v, v[:2], v[1:]))(x.view(-1).fill_(1)), lambda x: (x[:2], x.mul_(2)[1:], x[1:3])[::-1],
    lambda x: x[1:].unsqueeze_(0), lambda x: (x[1:], x[:2].unsqueeze_(-1), x[3:]), lambda x: [x.view(2, 2).t_(), x[2:].mul_(3), x.view(-1)],
    lambda x: (lambda y: (y[1:], y.mul_(2), y[:2]))(x * 2), lambda x: (lambda y: (y, y[1:].mul_(2), y.view(2, 2).t_(), y[2:]))(x.clone()),
    lambda x: hidden(lambda y: y[1:], x), lambda x: hidden(lambda y: y[1:].mul_(2), x), lambda x: (hidden(lambda y: y[1:], x), x.mul_(2)),
    lambda x: (x[1:], hidden(lambda y: y[:2], x), x.mul_(2)), lambda x: hidden(lambda y: y[1:], x)[1:].mul_(2), lambda x: hidden(torch.relu, x)[1:],
    lambda x: hidden(lambda y: y.mul_(2)[:2], x[1:]), lambda x: (lambda y: (y, hidden(lambda y: y[1:], y), y.mul_(2)))(x * 2),
]  # fmt: skip


ASKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "requires_grad_": lambda v: v.requires_grad_(), "is_leaf": lambda v: v.is_leaf, "grad_fn": lambda v: v.grad_fn is None,
    "requires_grad": lambda v: v.requires_grad, "operator": lambda v: v * 2, "in place": lambda v: v.add_(1), "view": lambda v: v.view(-1),
    "hook": lambda v: v.register_hook(lambda gradient: gradient), "retain_grad": lambda v: v.retain_grad(), "detach": lambda v: v.detach(),
    "detach_": lambda v: v.detach_(), "grad": lambda v: v.grad, "data": lambda v: v.data, "text": repr, "itself": lambda v: v,
    "backward": lambda v: v.sum().backward(), "gradient": lambda v: torch.autograd.grad(v.sum(), v),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("name", ASKED)
def test_a_view_of_a_no_grad_block_whose_base_was_written_to(name: str, backend: str) -> None:
    """What eager refuses to say is an error in the program, and no internal one."""

    def function(x: torch.Tensor) -> Any:
        y = x * 2
        return y * 3, ASKED[name](hidden(lambda v: v[1:].zero_(), y))

    def told(one: Any) -> Any:
        try:
            return one if not isinstance(one, torch.Tensor) else (one.tolist(), one.requires_grad, one.is_leaf)
        except RuntimeError as error:
            return str(error)

    def run(function: Callable[[torch.Tensor], Any]) -> Any:
        try:
            return [told(one) for one in function(torch.ones(3, requires_grad=True))]
        except RuntimeError as error:
            return str(error)

    compiled = fusewright.compile(function, backend=backend)
    assert str([run(compiled) for _ in range(2)]).split("0x")[0] == str([run(function)] * 2).split("0x")[0]


def written_part(of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, z: torch.Tensor) -> Any:
    part = of(whole := z.detach())
    part.add_(x)
    return whole, part, whole * 2, z * 2


WRITTEN: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, z: written_part(lambda v: v[...], x, z), lambda x, z: written_part(lambda v: v.view(4), x, z),
    lambda x, z: written_part(lambda v: v.view(2, 2).t()[0][...].unsqueeze(0), x[:2], z), lambda x, z: written_part(lambda v: v, x, z),
    lambda x, z: written_part(lambda v: v[1:].detach(), x[1:], z), lambda x, z: written_part(lambda v: v.detach()[1:], x[1:], z),
    lambda x, z: written_part(lambda v: v[1:], x[1:], z[:]), lambda x, z: written_part(lambda v: v[1:3].view(2), x[1:3], z * 2),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("number", range(len(WRITTEN)))
def test_a_write_to_a_part_of_what_is_detached_gives_the_whole_a_history(number: int, backend: str) -> None:
    def run(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        x, z = torch.arange(4.0).requires_grad_(), torch.ones(4)
        results = function(x, z)
        needed = [one.requires_grad for one in (*results, z)]
        (results[0] * torch.arange(4.0) + results[2]).sum().backward() if results[2].requires_grad else None
        return needed, [one.tolist() for one in (*results, z)], None if x.grad is None else x.grad.tolist()

    compiled = fusewright.compile(WRITTEN[number], backend=backend)
    assert [run(compiled) for _ in range(2)] == [run(WRITTEN[number])] * 2


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("number", range(len(OLDER)))
def test_a_view_from_before_a_write_has_a_history_when_its_base_gets_one(number: int, mode: Any) -> None:
    """One that was made without gradients raises instead."""

    def history(function: Callable[[torch.Tensor], Any]) -> list[Any]:
        x = torch.arange(4.0)
        with mode():
            results = [t for t in pytree.tree_leaves(function(x)) if t is not x]
        bases = [t for t in results if not t.is_inference() and any(other._base is t for other in results)]
        told = (bases or [x])[0]
        told.requires_grad_()
        try:
            found = [(t.grad_fn is None, t.is_leaf, t.requires_grad) for t in results]
        except RuntimeError as error:
            return [str(error)]
        results = [t for t in results if not t.is_inference()]
        sum(t.sum() for t in (*results, told)).backward()
        assert told.grad is not None
        return [*found, told.grad.tolist()]

    compiled = fusewright.compile(OLDER[number])
    assert [history(compiled) for _ in range(2)] == [history(OLDER[number])] * 2


DETACHED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.detach_(), lambda x: torch.detach_(x) * 2, lambda x: x[1:].detach_(), lambda x: (x * 2).detach_(), lambda x: (x * 2)[1:].detach_(),
    lambda x: x.detach().detach_(), lambda x: x[1:].detach().detach_() + 1,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_detach_in_place(mode: Any, backend: str) -> None:
    """It changes the argument itself, and is an error of a view."""
    for number, function in enumerate(DETACHED):
        for name, make in BASES.items():
            expected = shown(function, make(), mode)
            assert shown(fusewright.compile(function, backend=backend), make(), mode) == expected, (number, name)


def made_without_gradients(x: torch.Tensor) -> torch.Tensor:
    made = x * 2
    with torch.no_grad():
        view = made[1:]
    return view.mul_(x[1:])


def caught(x: torch.Tensor) -> torch.Tensor:
    part = (x * 2).chunk(2)[0]
    try:
        return part.add_(1)
    except RuntimeError:
        return x - 1


REFUSED: list[Callable[[torch.Tensor], Any]] = [
    lambda x: (x * 2).chunk(2)[0].add_(1), lambda x: (x * 2).unbind(0)[0].add_(1) + 1, made_without_gradients, caught,
    lambda x: ((x * 2).split(1)[1].squeeze(0).add_(1), [].pop()),
    lambda x: (made := torch.zeros(3, requires_grad=True), made[1:].add_(x[1:]))[1],
]  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad])
def test_a_write_that_autograd_refuses_for_a_view(mode: Any, backend: str) -> None:
    """Also if nothing else knows what the view is of."""
    for number, function in enumerate(REFUSED):

        def said(function: Callable[[torch.Tensor], Any], grad: bool) -> Any:
            try:
                with mode():
                    return function(torch.ones(3, requires_grad=grad)).tolist()
            except (RuntimeError, IndexError) as error:
                return type(error)

        for grad in (True, False):
            assert said(fusewright.compile(function, backend=backend), grad) == said(function, grad), (number, grad)


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "interpolate": lambda v: F.interpolate(v, scale_factor=2), "repeat": lambda v: v.repeat(1, 1, 2), "tile": lambda v: v.tile(2),
    "same interpolate": lambda v: F.interpolate(v, scale_factor=1), "cat": lambda v: torch.cat([v]), "flip": lambda v: v.flip(0),
    "repeat_interleave": lambda v: v.repeat_interleave(2, 2), "replicate": lambda v: F.pad(v, (1, 1), mode="replicate"),
    "index_select": lambda v: v.index_select(2, torch.tensor([0, 0])), "clone": lambda v: v.clone(), "take": lambda v: v[:, :, [0, 0]],
    "max_pool": lambda v: F.max_pool1d(v, 1), "roll": lambda v: v.roll(0, 0), "nothing padded": lambda v: F.pad(v, (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_no_result_lies_in_what_it_was_computed_of(name: str) -> None:
    """The operand has memory of its own because it is written, or dear."""
    read = READERS[name]

    def function(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = y.floor_().acos() / y
        return read(made), made

    def only(y: torch.Tensor) -> torch.Tensor:
        return function(y)[0]

    for shape in ((3, 3, 1), (1, 3, 1), (2, 3, 3)):
        result, operand = fusewright.compile(function, dynamic=False)(torch.ones(shape))
        assert not shared(result, operand)
        alone = fusewright.compile(only, dynamic=False)(torch.ones(shape))
        assert result.stride() == alone.stride() == only(torch.ones(shape)).stride()
        torch.testing.assert_close(alone, only(torch.ones(shape)))


def test_the_gradient_of_an_expanded_result_over_sizes_that_are_not_known() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.gelu(y).expand(2, *y.shape)

    compiled = fusewright.compile(function)
    for shape in ((3, 2, 3), (3, 3, 2), (4, 1, 2)):
        y = torch.rand(shape, requires_grad=True)
        compiled(torch.rand(3, *shape), y).sum().backward()
        other = y.detach().requires_grad_()
        function(torch.rand(3, *shape), other).sum().backward()
        torch.testing.assert_close(y.grad, other.grad, check_stride=True)


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x


HALVES: list[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = [
    (lambda x: x[None], lambda v: v[..., 0]), (lambda x: x.t(), lambda v: v.squeeze()), (lambda x: x[..., 1:], lambda v: v.mT),
    (lambda x: x.unbind(0)[1], lambda v: v[:1]), (lambda x: x.detach(), lambda v: v.t()), (nothing, lambda v: v[0]),
    (lambda x: x.t(), nothing), (lambda x: x.chunk(2)[0], lambda v: v.detach()), (lambda x: x[0], lambda v: v * 2),
]  # fmt: skip


@pytest.mark.parametrize("form", ["leaf", "view", "result", "made inside"])
@pytest.mark.parametrize("number", range(len(HALVES)))
def test_views_made_under_no_grad(number: int, form: str) -> None:
    """A view that leaves is rebuilt step by step, each in the mode that it was made in: through a view made under
    no_grad no gradient flows, though it requires one."""
    inner, outer = HALVES[number]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base = x * 3 if form == "made inside" else x
        with torch.no_grad():
            v = inner(base)
        w = outer(v)
        with torch.no_grad():
            u = outer(inner(base))
        return v, w, u, outer(inner(base)), base

    def run(function: Any) -> list[Any]:
        leaf = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        results = function({"view": lambda: leaf[1:3], "result": lambda: leaf * 2}.get(form, lambda: leaf)())
        told = [(r.requires_grad, r.is_leaf, tuple(r.shape), shared(r, results[0])) for r in results]
        torch.autograd.backward([(r * (k + 1)).sum() for k, r in enumerate(results) if r.requires_grad])
        return [told, leaf.grad]

    (told, grad), (expected, other) = run(fusewright.compile(function)), run(function)
    assert told == expected
    torch.testing.assert_close(grad, other)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(20.0).reshape(4, 5), "turned": lambda: torch.arange(20.0).reshape(5, 4).t(),
    "gaps": lambda: torch.arange(40.0).reshape(4, 10)[:, ::2], "expanded": lambda: torch.arange(4.0).reshape(4, 1).expand(4, 5),
    "offset": lambda: torch.arange(30.0)[4:24].reshape(4, 5),
}  # fmt: skip
WINDOWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.contiguous().as_strided((2, 2), (1, 1)), lambda x: (x * 2)[1:].as_strided((2,), (1,), 0), lambda x: x.clone().as_strided((4,), (1,)),
    lambda x: x.contiguous()[1:].as_strided((2, 2), (1, 1)), lambda x: x.contiguous()[1:].as_strided((2, 2), (1, 1), 0),
    lambda x: x.t().contiguous().as_strided((3,), (2,), 1), lambda x: (x + 1).t().as_strided((4,), (1,)), lambda x: x.flip(0).as_strided((4,), (1,)),
    lambda x: x.repeat(2, 1).as_strided((20,), (1,)), lambda x: x.double().float().as_strided((4,), (1,)), lambda x: F.pad(x, (0, 0)).as_strided((4,), (1,)),
    lambda x: x.expand(2, *x.shape).contiguous().as_strided((20,), (1,)), lambda x: x[1:].as_strided((2,), (1,)), lambda x: x.roll(0, 0).as_strided((4,), (1,)),
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_on_what_need_not_have_been_copied(layout: str, dynamic: bool) -> None:
    """as_strided sees the memory that eager has: a copy that was to be none is made for it."""
    for number, function in enumerate(WINDOWS):
        expected, found = function(LAYOUTS[layout]()), fusewright.compile(function, dynamic=dynamic)(LAYOUTS[layout]())
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected), number


MADE: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda x: x, lambda x: x * 2, lambda x: x.clone(), lambda x: x[1:]]
SHOWING: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda y: y, lambda y: y[1:], lambda y: y[..., 0], lambda y: y.t()[1:, ::2]]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("written", ["nothing", "the whole", "the part", "the window"])
def test_a_window_sees_what_the_view_below_it_does_not_show(written: str, dynamic: bool) -> None:
    """as_strided addresses memory: also the elements between those of a view, and the gaps of an input."""
    for make, show, layout in itertools.product(MADE, SHOWING, ("gaps", "offset")):

        def function(x: torch.Tensor, make: Any = make, show: Any = show) -> tuple[torch.Tensor, ...]:
            whole = make(x)
            part = show(whole)
            window = part.as_strided((2, 2), (3, 1))
            if written != "nothing":
                {"the whole": whole, "the part": part, "the window": window}[written].mul_(3)
            return window * 1, whole.as_strided((2, 3), (4, 1)) + 0, part + 0

        eager, ours = LAYOUTS[layout](), LAYOUTS[layout]()
        expected, found = function(eager), fusewright.compile(function, dynamic=dynamic)(ours)
        memory = [torch.tensor(x.untyped_storage().tolist()) for x in (eager, ours)]
        assert all(map(torch.equal, (*found, memory[1]), (*expected, memory[0]))), (make, show, layout)


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_a_size_that_is_known_to_be_one_broadcasts(dynamic: bool | None) -> None:
    """The diagonal of (n, 1) has min(n, 1) elements."""
    functions: list[Callable[..., torch.Tensor]] = [
        lambda x, y: x.diagonal() + y, lambda x, y: torch.where(y > 0, x.diagonal(), y), lambda x, y: x.diagonal().expand_as(y),
        lambda x, y: x[:1].diagonal().expand_as(y) * 2, lambda x, y: x.narrow(0, 0, 1).flatten() * y,
    ]  # fmt: skip
    for function in functions:
        compiled = fusewright.compile(function, dynamic=dynamic)
        for rows in (3, 4):
            x, y = torch.arange(1.0, rows + 1).reshape(rows, 1) * 100, torch.ones(rows, 1, 3)
            torch.testing.assert_close(compiled(x, y), function(x, y), check_stride=True)


PLACED: dict[str, Callable[[torch.Tensor], object]] = {
    "index_put": lambda x: x.index_put_((torch.tensor([0, 1, 2]),), x), "indices": lambda x: x.index_put_((x,), torch.tensor(7)),
    "part": lambda x: x.index_put_((torch.tensor([0]),), x[2:]), "scatter": lambda x: x.scatter_(0, x, x.clone()),
    "source": lambda x: x.scatter_(0, x.clone(), x), "scatter_add": lambda x: x.scatter_add_(0, x.clone(), x.view(3)),
    "index_copy": lambda x: x.index_copy_(0, x.clone(), x), "index_add": lambda x: x.index_add_(0, x.clone(), x.flip(0)),
    "index_fill": lambda x: x.index_fill_(0, x, 5), "put": lambda x: x.put_(x.clone(), x), "accepted": lambda x: x.masked_fill_(x > 0, x[0]),
    "same": lambda x: x.copy_(x), "subscript": lambda x: operator.setitem(x, torch.tensor([1, 0]), x[:2]),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PLACED)
def test_what_an_index_places_is_not_what_it_is_placed_in(name: str, dynamic: bool | None) -> None:
    """Eager refuses operands of index operators that share the memory that is written, whole or in part."""

    def run(f: Callable[[torch.Tensor], object]) -> tuple[torch.Tensor, str]:
        x = torch.tensor([2, 0, 1])
        try:
            f(x)
        except RuntimeError as error:
            return x, str(error).partition(".")[0]
        return x, ""

    eager, compiled = run(PLACED[name]), run(fusewright.compile(PLACED[name], dynamic=dynamic))
    assert compiled[1] == eager[1]
    assert torch.equal(compiled[0], eager[0])


def narrowed(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((2, 2), (1, 1)).narrow(0, 0, 1).zero_()
    return x + 1


def every_other(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.unfold(0, 2, 1)[::2] = -1.0
    return y


def column(x: torch.Tensor) -> torch.Tensor:
    x.unfold(0, 3, 1)[:, 1].mul_(2)
    return x


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [narrowed, every_other, column])
def test_writes_through_a_part_of_a_view_whose_elements_share_memory(
    function: Callable[[torch.Tensor], torch.Tensor], dynamic: bool | None
) -> None:
    compiled = fusewright.compile(function, dynamic=dynamic)
    for size in (6, 7):
        one, other = torch.arange(1.0, size), torch.arange(1.0, size)
        assert torch.equal(compiled(one), function(other))
        assert torch.equal(one, other)


def repeated(x: torch.Tensor) -> torch.Tensor:
    torch.tril_indices(x.numel(), x.numel())  # the number of elements becomes a guard
    return x.repeat(2, 1, 1).frac()


def divided(x: torch.Tensor) -> torch.Tensor:
    torch.tril_indices(x.numel(), x.numel())
    return torch.addcdiv(x, x, x).transpose(0, 1)


@pytest.mark.parametrize("function", [repeated, divided])
def test_a_product_of_sizes_that_is_a_number_keeps_the_layout(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiled = fusewright.compile(function)
    for shape in ((3, 2), (3, 3), (4, 5)):
        x = torch.rand(shape)
        torch.testing.assert_close(compiled(x), function(x), check_stride=True)
