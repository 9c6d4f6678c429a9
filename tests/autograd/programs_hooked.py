"""Programs that give hooks to tensors which they return. What asks for gradients sees them as in eager: their order, how often they are
called and with what, and the gradient of the result itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fusewright
from tests.autograd.programs import PROGRAMS, Compiled, program, random

Log = list[Any]


def watch(log: Log, name: str, factor: float | None = None) -> Callable[[Any], Any]:
    """A hook with an effect: it notes its gradient, and may give another."""

    def hook(gradient: Any) -> Any:
        log.append(name)
        log.append(gradient if gradient is None else gradient.clone())
        return None if factor is None or gradient is None else gradient * factor

    return hook


def several(y: Any, log: Log) -> Any:
    y.register_hook(watch(log, "first", 2))
    y.register_hook(watch(log, "second"))
    y.register_hook(lambda gradient: gradient + 1)
    return y


def removed(y: Any, log: Log) -> Any:
    handle = y.register_hook(watch(log, "removed", 2))
    y.register_hook(watch(log, "kept", 3))
    handle.remove()
    with y.register_hook(watch(log, "removed too", 5)):
        return y


def handles(y: Any, log: Log) -> Any:
    first, second = y.register_hook(watch(log, "first", 2)), y.register_hook(watch(log, "second", 3))
    return y, {"second": second, "first": first}, second


def removes_itself(y: Any, log: Log) -> Any:
    def hook(gradient: Any) -> Any:
        log.append("once")
        handle.remove()
        return gradient * 2

    handle = y.register_hook(hook)
    return y


def of_nodes(y: Any, log: Log) -> Any:
    y.grad_fn.register_prehook(lambda given: (given[0] + 1,))
    y.register_hook(watch(log, "of the tensor", 2))
    return y


def holds_tensors(y: Any, log: Log) -> Any:
    weight = torch.arange(3.0).exp()
    y.register_hook(lambda gradient: gradient * weight)
    return y


def holds_itself(y: Any, log: Log) -> Any:
    y.register_hook(lambda gradient: gradient * y)
    return y


def retains(y: Any, log: Log) -> Any:
    y.retain_grad()
    log.append(y.retains_grad)
    y.register_hook(watch(log, "hook", 2))
    return y


def in_no_grad(y: Any, log: Log) -> Any:
    with torch.no_grad():
        y.register_hook(watch(log, "hook", 2))
        y.mul_(3)
    return y


def written_then(y: Any, log: Log) -> Any:
    y.mul_(3)
    y.register_hook(watch(log, "hook", 2))
    return y


def written_behind(y: Any, log: Log) -> Any:
    y.register_hook(lambda gradient: gradient * 2)
    y.mul_(3)
    return y


def beside_detached(y: Any, log: Log) -> Any:
    y.register_hook(watch(log, "hook", 2))
    return y, y.detach().exp()


def beside_one_inside(y: Any, log: Log) -> Any:
    y.register_hook(watch(log, "hook", 2))
    z = y.detach().requires_grad_().exp()
    z.register_hook(lambda gradient: gradient * 7)
    return y, torch.autograd.grad(z.sum(), z, retain_graph=True)[0].detach()


def behind_a_break(y: Any, log: Log) -> Any:
    handle = y.register_hook(watch(log, "hook", 2))
    other = y.register_hook(watch(log, "other", 2))
    fusewright.graph_break()
    handle.remove()
    return y, y * y, other


def and_one_of_it(y: Any, log: Log) -> Any:
    y.register_hook(lambda gradient: gradient * 2)
    return y, y * y


def order_and_one_of_it(y: Any, log: Log) -> Any:
    older = y.sin()
    first = y.register_hook(watch(log, "first", 2))
    y.register_hook(lambda gradient: gradient + 1)
    z = y * older
    y.register_hook(watch(log, "last"))
    y.register_hook(watch(log, "removed", 7)).remove()
    return y, z, first


def itself_and_one_of_it(y: Any, log: Log) -> Any:
    y.register_hook(lambda gradient: gradient * y)
    return y, y.exp()


def retains_and_one_of_it(y: Any, log: Log) -> Any:
    y.retain_grad()
    y.register_hook(watch(log, "hook", 2))
    return y, {"of it": y.exp()}, y.exp() * 3


def two_behind_each_other(y: Any, log: Log) -> Any:
    z = y.sin()
    z.register_hook(watch(log, "z", 3))
    y.register_hook(watch(log, "y", 2))
    u = z * y * 2
    u.register_hook(watch(log, "u"))
    return y, u.exp(), z, y.cos(), u


def one_beside_it(y: Any, log: Log) -> Any:
    """What both are computed from is one operator: a node would stand before and behind the hook."""
    z = y.sin()
    z.register_hook(watch(log, "hook", 2))
    return z, z * y


def in_containers(y: Any, log: Log) -> Any:
    y.register_hook(watch(log, "hook", 2))
    return y, {"again": [y, y]}


def ask(log: Log, a: Any, given: Any) -> None:
    """Asks in every way, each of which may call the hooks."""
    y, *rest = given if isinstance(given, tuple) else (given,)
    others = [one for one in rest if isinstance(one, torch.Tensor) and one.requires_grad]
    total = (y * y).sum() + sum(one.exp().sum() for one in others)
    log += torch.autograd.grad(total, [y, a], retain_graph=True)
    log += torch.autograd.grad(total, [a], retain_graph=True)
    log += torch.autograd.grad(total, y, retain_graph=True)
    total.backward(inputs=[a], retain_graph=True)
    log.append(a.grad.clone())
    total.backward(retain_graph=True)
    log.append(a.grad.clone())
    log.append(y.grad if y.retains_grad else None)
    for handle in [one for one in rest if isinstance(one, torch.utils.hooks.RemovableHandle)]:
        handle.remove()
        log += torch.autograd.grad(total, [y, a], retain_graph=True)
    if "of the tensor" in log:  # hooks of nodes have no gradients of gradients
        return
    (first,) = torch.autograd.grad(total, a, create_graph=True)
    log += [first, *torch.autograd.grad(first.square().sum(), a, retain_graph=True)]
    with torch.no_grad():
        y.mul_(2)
    log += torch.autograd.grad((y + 1).sum(), a, retain_graph=True)


RESULTS: dict[str, Callable[[Any], Any]] = {
    "": lambda a: a * 2,
    "_of_a_view": lambda a: (a * 2)[1:],
    "_of_a_view_of_an_argument": lambda a: a.view(3, 4).t(),
}
OF_NO_VIEW = {in_no_grad, written_then, written_behind, of_nodes, and_one_of_it, order_and_one_of_it, itself_and_one_of_it,
              retains_and_one_of_it, two_behind_each_other, one_beside_it}
"""Eager loses the hooks of a view that is written to, and raises where it is one of a leaf. Hooks of its node, and one behind a break, see
no view."""


def _hooked() -> None:
    ways = (several, removed, handles, removes_itself, of_nodes, holds_tensors, holds_itself, retains, in_no_grad, written_then)
    ways += (written_behind, beside_detached, behind_a_break, and_one_of_it, in_containers, order_and_one_of_it)
    ways += (itself_and_one_of_it, retains_and_one_of_it, two_behind_each_other, one_beside_it)
    for way in ways:
        for of, result in RESULTS.items():

            def hooked(compiled: Compiled, way: Any = way, result: Any = result) -> list[Any]:
                log: Log = []
                a = random(4, 3)
                try:
                    ask(log, a, compiled(lambda a: way(result(a), log))(a))
                except RuntimeError as error:
                    log.append(str(error).splitlines()[0])
                return log

            if not (of and way in OF_NO_VIEW):
                PROGRAMS[f"hooked_{way.__name__}{of}"] = hooked


_hooked()


@program
def one_of_two_results_is_hooked(compiled: Compiled) -> list[Any]:
    """A backward of the other one calls its hook only where one operator made both."""
    log: Log = []
    functions: list[Callable[[Any], Any]] = [
        lambda a: (a * 2, a.sin()),
        lambda a: a.unbind(),
        lambda a: [a.tanh() * number for number in range(1, 12)],
        lambda a: torch.split(a * 2, 1),
    ]
    for function in functions:

        def fn(a, function=function):
            first, *rest = function(a)
            first.register_hook(watch(log, "first"))
            return first, *rest

        a = random(3)
        _, second, *_ = compiled(fn)(a)
        second.sum().backward()
        log.append(a.grad)
    return log


@program
def node_of_a_view_is_hooked(compiled: Compiled) -> list[Any]:
    """It is made outside of the graph where its base is a result too, or where it has a hook of its own."""
    results: list[Any] = []

    def beside(a):
        b = a * 2
        v = b[1:]
        v.grad_fn.register_prehook(lambda given: (given[0] * 5,))
        return v, b

    def alone(a):
        v = (a * 2)[1:]
        v.grad_fn.register_prehook(lambda given: (given[0] * 5,))
        v.register_hook(lambda gradient: gradient * 3)
        return v, a

    for fn in (beside, alone):
        a = random(3)
        v, other = compiled(fn)(a)
        ((v * v).sum() + other.sum()).backward()
        results.append(a.grad)
    return results


@program
def leaves_made_inside_are_hooked(compiled: Compiled) -> list[Any]:
    def fn(a, write):
        made, parameter = a.detach().clone().requires_grad_(), torch.nn.Parameter(torch.ones(3))
        for one in (made, parameter):
            one.register_hook(lambda gradient: gradient * 2)
        if write:
            with torch.no_grad():
                made.add_(1)
        return made, parameter

    log: Log = []
    for write in (False, True):
        made, parameter = compiled(fn)(random(3), write)
        (made * parameter).sum().backward()
        log += [made.grad, parameter.grad]
    return log


@program
def hooks_of_an_argument_stand_in_order(compiled: Compiled) -> list[Any]:
    """Whatever holds their handles."""
    log: Log = []

    def fn(a):
        a.register_hook(watch(log, "first", 2))
        handle = a.register_hook(watch(log, "second", 3))
        a.register_hook(watch(log, "third"))
        return a * a, handle

    a = random(3)
    y, handle = compiled(fn)(a)
    y.sum().backward(retain_graph=True)
    handle.remove()
    y.sum().backward()
    return [*log, a.grad]


@program
def whether_an_argument_retains_its_gradient(compiled: Compiled) -> list[Any]:
    def fn(a):
        before = a.retains_grad
        a.retain_grad()
        return a * 2, before, a.retains_grad

    a = random(3) * 2
    y, *said = compiled(fn)(a)
    y.sum().backward()
    return [*said, a.grad]


def kept_of_a_tensor(y: Any, log: Log) -> Any:
    return y.register_hook(lambda gradient: gradient * 2)


def kept_of_an_effect(y: Any, log: Log) -> Any:
    return y.register_hook(watch(log, "called", 2))


def kept_of_a_node(y: Any, log: Log) -> Any:
    return y.grad_fn.register_hook(lambda given, arrived: (given[0] * 2, *given[1:]))


def kept_removed(y: Any, log: Log) -> Any:
    handle = y.register_hook(lambda gradient: gradient * 2)
    handle.remove()
    return handle


def handle_leaves(hook: Callable[[Any, Log], Any], stored: bool) -> Callable[[Compiled], list[Any]]:
    """Who has the handle of a hook on what the function does not return may remove it; and each call's is another."""

    def run(compiled: Compiled) -> list[Any]:
        log: Log = []
        holder = torch.nn.Module()

        def fn(x: Any) -> Any:
            y = x * 3
            handle = hook(y, log)
            if stored:
                holder.handle = handle
                return y.sin()
            return y.sin(), handle, handle.id

        called, numbers = compiled(fn), []
        for removes in (False, True, False):
            x = random(3)
            result, handle, *number = (called(x), holder.handle) if stored else called(x)
            if removes:
                handle.remove()
            result.sum().backward()
            log += [x.grad, *(one == handle.id for one in number)]
            numbers.append(handle.id)
        return [*log, len({*numbers})]

    return run


for made in (kept_of_a_tensor, kept_of_an_effect, kept_of_a_node, kept_removed):
    for stored in (False, True):
        PROGRAMS[f"{made.__name__}_{'stored' if stored else 'returned'}"] = handle_leaves(made, stored)


@program
def kept_by_itself(compiled: Compiled) -> list[Any]:
    """A second backward no longer calls the hook."""

    def fn(x):
        def hook(gradient):
            handle.remove()
            return gradient * 2

        y = x * 3
        handle = y.register_hook(hook)
        return y.sin()

    x = random(3)
    y = compiled(fn)(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    return [x.grad]
