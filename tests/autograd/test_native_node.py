"""One node of autograd's graph, whose forward and backward are native (csrc/differentiable.cpp), and each way by which
a call leaves it for Python: results, gradients and errors are eager's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright import _native
from fusewright.base.events import STREAM, FellBack

Function = Callable[..., Any]


def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, w.shape, w, b).tanh()


def arguments(rows: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(size, generator=generator).requires_grad_() for size in ((rows, 16), (16,), (16,)))


def is_native(f: Any) -> bool:
    return all(isinstance(entry.graph, _native.Differentiable) for entry in f.entries)


def plain(f: Function) -> list[Any]:
    given = arguments()
    result = f(*given)
    result.backward(torch.linspace(-1, 1, 64).view(4, 16))
    return [result.detach(), *(one.grad for one in given)]


def expanded(f: Function) -> list[Any]:
    return list(torch.autograd.grad(f(*(given := arguments())).sum(), given))


def transposed(f: Function) -> list[Any]:
    return list(torch.autograd.grad(f(*(given := arguments())), given, torch.linspace(-1, 1, 64).view(16, 4).t()))


def of_gradients(f: Function) -> list[Any]:
    given = arguments()
    (first,) = torch.autograd.grad(f(*given).square().sum(), given[:1], create_graph=True)
    return [first.detach(), *torch.autograd.grad(first.square().sum(), given)]


def twice(f: Function) -> list[Any]:
    given = arguments()
    loss = f(*given).sum()
    once = torch.autograd.grad(loss, given, retain_graph=True)
    return [*once, *torch.autograd.grad(loss * 2, given)]


def freed(f: Function) -> list[Any]:
    loss = f(*(given := arguments())).sum()
    torch.autograd.grad(loss, given)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, given)
    return []


def freed_of_gradients(f: Function) -> list[Any]:
    loss = f(*(given := arguments())).sum()
    torch.autograd.grad(loss, given)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, given, create_graph=True)
    return []


def hooks_on_saved(f: Function) -> list[Any]:
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.double(), lambda t: t.float()):
        loss = f(*(given := arguments())).sum()
    assert packed
    return list(torch.autograd.grad(loss, given))


def written_in_between(f: Function) -> list[Any]:
    loss = f(*(given := arguments())).sum()
    with torch.no_grad():
        given[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return []


def without_gradients(f: Function) -> list[Any]:
    with torch.no_grad():
        result = f(*arguments())
    return [result, torch.tensor(result.requires_grad)]


def some_need_none(f: Function) -> list[Any]:
    x, w, b = arguments()
    f(x, w.detach(), b).sum().backward()
    return [x.grad, b.grad]


def hooks_on_tensors(f: Function) -> list[Any]:
    given = arguments()
    given[0].register_hook(lambda gradient: gradient * 3)
    result = f(*given)
    result.register_hook(lambda gradient: gradient + 1)
    return list(torch.autograd.grad(result.sum(), given))


def mapped(f: Function) -> list[Any]:
    x, w, b = arguments()
    return [torch.func.vmap(f, (0, None, None))(x, w, b).detach(), torch.func.grad(lambda x: f(x, w, b).sum())(x)]


def batched(f: Function) -> list[Any]:
    found: list[Any] = []
    for rows in (torch.eye(64).view(64, 4, 16), torch.eye(64).view(64, 16, 4).mT, torch.ones(3, 1, 16).expand(3, 4, 16)):
        result = f(*(given := arguments()))
        found += torch.autograd.grad(result, given, rows, is_grads_batched=True)
    return found


def subclassed(f: Function) -> list[Any]:
    result = f(*(given := arguments()))
    return list(torch.autograd.grad(result, given, torch.nn.Parameter(torch.ones(4, 16))))


WAYS: list[Callable[[Function], list[Any]]] = [
    plain, expanded, transposed, of_gradients, twice, freed, freed_of_gradients, hooks_on_saved, written_in_between,
    without_gradients, some_need_none, hooks_on_tensors, mapped, batched, subclassed,
]  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways(way: Callable[[Function], list[Any]], dynamic: bool) -> None:
    compiled = fusewright.compile(norm, dynamic=dynamic)
    for _ in range(2):
        torch.testing.assert_close(way(compiled), way(norm))
    assert is_native(compiled) is (way is not without_gradients)


def test_several_outputs_of_one_operator() -> None:
    """Of which one gets no gradient."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spread, middle = torch.var_mean(x * 2, dim=0)
        return spread, middle

    compiled = fusewright.compile(f)
    x = arguments()[0]
    for place in range(2):
        torch.testing.assert_close(torch.autograd.grad(compiled(x)[place].sum(), x), torch.autograd.grad(f(x)[place].sum(), x))
    spread, middle = compiled(x)
    torch.testing.assert_close(torch.autograd.grad((spread * middle).sum(), x), torch.autograd.grad(f(x)[0] @ f(x)[1], x))
    assert is_native(compiled)


def test_random_numbers_are_drawn_again_for_gradients_of_gradients() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) * x * x

    compiled = fusewright.compile(f)
    x = arguments()[0].detach().abs().requires_grad_()
    result = compiled(x)
    kept = (result != 0).to(x.dtype) * 2
    (first,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * kept * x * x)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * kept * x)
    assert is_native(compiled)


def test_a_backward_that_cannot_finish_is_repeated() -> None:
    """Hooks give other tensors than were saved: the plan refuses them, and the recorded operators compute."""
    compiled = fusewright.compile(norm)
    given = arguments()
    expected = torch.autograd.grad(norm(*given).sum(), given)
    compiled(*given)
    loss = compiled(*given).sum()
    (node,) = (one for one, _ in loss.grad_fn.next_functions)
    for saved in node._raw_saved_tensors:
        saved.register_hooks(lambda tensor: tensor, lambda tensor: tensor.double())
    told: list[str] = []
    with STREAM.listening(lambda event: told.append(event.reason) if isinstance(event, FellBack) else None):
        torch.testing.assert_close(torch.autograd.grad(loss, given), expected)
    assert told == ["a saved tensor is not what was saved"]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, given)


@pytest.mark.parametrize("run", [norm, fusewright.compile(norm)], ids=["eager", "compiled"])
def test_what_is_saved_is_freed_without_the_garbage_collector(run: Function) -> None:
    leaf, w, b = arguments()
    run(leaf * 1, w, b)
    x = leaf * 1
    held = weakref.ref(x)
    result = run(x, w, b)
    del x
    assert held() is not None
    result.sum().backward()
    assert held() is None
    result = run(leaf * 1, w, b)  # without a backward
    held = weakref.ref(result)
    del result
    assert held() is None


def test_a_second_backward_of_what_saves_nothing_is_refused() -> None:
    """Which eager allows: docs/guarantees.md."""

    def twice(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = torch.ones(3, requires_grad=True)
        loss = function(x)
        loss.backward()
        loss.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2, 2]

    twice(torch.sum)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        twice(fusewright.compile(lambda x: x.sum()))
