"""Programs of autograd, in families: what a backward visits, which hooks it calls with what and in which order, what it frees, and what it
writes. Each program makes five calls with other inputs. See `programs`."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.autograd.programs import PROGRAMS, Compiled, program, random

CALLS = 5
Backward = Callable[[list[Any], tuple[Any, ...], tuple[Any, ...]], None]


def watched(index: int, tensor: torch.Tensor, log: list[Any]) -> torch.Tensor:
    """`tensor` with a hook that logs what it is called with."""
    if tensor.requires_grad:
        tensor.register_hook(
            lambda gradient: log.extend((index, None if gradient is None else gradient.detach().clone()))
        )
    return tensor


def family(
    name: str, function: Callable[..., Any], inputs: Callable[[int], tuple[Any, ...]], backward: Backward
) -> None:
    """Adds the program that calls `function` on `inputs(call)`, hooks on all of them, and then `backward(log, inputs, outputs)`."""

    def run(compiled: Compiled) -> list[Any]:
        f = compiled(function)
        log: list[Any] = []
        for call in range(CALLS):
            torch.manual_seed(call)
            leaves = inputs(call)
            given = tuple(watched(index, leaf, log) for index, leaf in enumerate(leaves))
            found = f(*given)
            outputs = found if isinstance(found, tuple) else (found,)
            try:
                backward(log, given, outputs)
            except RuntimeError as error:
                log.append(str(error)[:60])
            log += [output.grad_fn is not None for output in outputs] + [leaf._version for leaf in leaves]
            log += [output.detach().clone() for output in outputs] + [leaf.grad for leaf in leaves if leaf.is_leaf]
            log.append(torch.rand(()))  # whether as many numbers were drawn
        return log

    PROGRAMS[name] = run


def leaves(*shapes: tuple[int, ...]) -> Callable[[int], tuple[Any, ...]]:
    return lambda call: tuple(random(*shape, seed=10 * call + index) for index, shape in enumerate(shapes))


def everything(log: list[Any], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    """A backward of all outputs, each element with a weight of its own."""
    roots = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(roots, [torch.arange(1.0, 1 + root.numel()).reshape(root.shape) for root in roots])


# --- outputs whose elements share memory, with each other, an input, or another output

VIEWS: dict[str, Callable[[Any], Any]] = {
    "unfold": lambda t: t.unfold(0, 2, 1),
    "unfold_step": lambda t: t.unfold(0, 3, 2),
    "overlapping": lambda t: t.as_strided((3, 2), (1, 1)),
    "overlapping_columns": lambda t: t.as_strided((2, 3), (1, 2)),
    "expanded": lambda t: t.expand(3, t.shape[0])[1:],
    "gaps": lambda t: t[::2],
    "sliced": lambda t: t[1:],
    "transposed": lambda t: t.view(2, -1).t(),
}


def hooked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.register_hook(lambda gradient: gradient * 10)
    return tensor


def _views() -> None:
    for name, view in VIEWS.items():
        for of, base in {"result": lambda a: a * 2, "leaf": lambda a: a, "written": lambda a: (a * 2).mul_(3)}.items():
            family(f"{name}_of_{of}", lambda a, view=view, base=base: view(base(a)), leaves((6,)), everything)
        family(
            f"{name}_beside_its_base", lambda a, view=view: (lambda b: (b, view(b)))(a * 2), leaves((6,)), everything
        )
        family(f"{name}_hooked", lambda a, view=view: hooked(view(a * 2)), leaves((6,)), everything)
        family(
            f"{name}_hooked_beside_its_base",
            lambda a, view=view: (lambda b: (b, hooked(view(b))))(a * 2),
            leaves((6,)),
            everything,
        )
        family(f"{name}_hooked_of_leaf", lambda a, view=view: hooked(view(a)), leaves((6,)), everything)
        family(
            f"{name}_of_hooked_view",
            lambda a, view=view: (lambda b: (b, view(hooked(b.view(-1)))))(a * 2),
            leaves((6,)),
            everything,
        )


_views()


# --- several outputs: a backward of some of them, one after the other

SEVERAL: dict[str, Callable[..., Any]] = {
    "apart": lambda a, b, c: (a.sin(), b.cos(), c.exp()),
    "chain": lambda a, b, c: (a.sin(), (a.sin() * b).cos(), (a.sin() * b).cos() * c.exp()),
    "shared": lambda a, b, c: ((a * b).sin() * b, (a * b).cos() * c, c.exp()),
    "sharing_what_saves_nothing": lambda a, b, c: (lambda h: (h.sin(), h.cos(), h * c))(a + b),
    "sharing_a_leaf": lambda a, b, c: (a.sin() * b, a.cos() * c, a.exp()),
    "one_operator": lambda a, b, c: (torch.stack([a, b, c]).sin() * c).unbind(0),
    "one_detached": lambda a, b, c: (a * b, (a * b).detach(), (b * c).sum()),
    "cache": lambda a, b, c: (lambda t: tuple(t := (t * one).tanh() for one in (a, b, c, b, a, c, b, a, c, b)))(a),
    "twelve": lambda *abc: tuple(
        function(t) for t in abc for function in (torch.sin, torch.cos, torch.exp, torch.tanh)
    ),
}


IMPOSSIBLE = {
    "one_detached": {"1", "012"},  # eager raises
    "cache": {
        "02",
        "012",
        "hooked",
    },  # eager fails half way; hooks of an output that another is made of (docs/architecture.md)
}


def one_by_one(*order: int, keep: bool = False) -> Backward:
    def backward(log: list[Any], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        for place in order:
            outputs[place].sum().backward(retain_graph=keep)

    return backward


def of_hooked_outputs(log: list[Any], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    own: list[Any] = []  # a compiled function calls all hooks of outputs before those of its inputs
    (watched(7, outputs[0], own).sum() + watched(9, outputs[2], own).sum() * 2).backward()
    log += own


def of_some_inputs(log: list[Any], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    log += torch.autograd.grad(outputs[0].sum() + outputs[2].sum(), inputs[:2], allow_unused=True)


def of_gradients(log: list[Any], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    first = torch.autograd.grad(outputs[0].sum() + outputs[2].sum(), inputs, create_graph=True, allow_unused=True)
    before = len(log)
    sum(gradient.square().sum() for gradient in first if gradient is not None).backward()
    called = sorted(
        zip(log[before::2], log[before + 1 :: 2]), key=lambda one: one[0]
    )  # the operators run again, in an order of theirs
    log[before:] = [part for one in called for part in one]


def _several() -> None:
    orders: dict[str, Backward] = {
        "".join(map(str, order)): one_by_one(*order) for order in ((0,), (1,), (2,), (0, 2), (2, 0), (0, 1, 2), (0, 0))
    }
    orders |= {
        "kept": one_by_one(2, 0, 2, keep=True),
        "hooked": of_hooked_outputs,
        "inputs": of_some_inputs,
        "twice": of_gradients,
    }
    of_results: Callable[[int], tuple[Any, ...]] = lambda call: tuple(
        leaf * 1.5 for leaf in leaves((3,), (3,), (3,))(call)
    )
    for name, function in SEVERAL.items():
        for order, backward in orders.items():
            if order not in IMPOSSIBLE.get(name, ()):
                family(f"{name}_{order}", function, leaves((3,), (3,), (3,)), backward)
        if "hooked" not in IMPOSSIBLE.get(name, ()):
            family(f"{name}_of_results", function, of_results, of_hooked_outputs)


_several()


@program
def the_order_of_many_leaves(compiled: Compiled) -> list[Any]:
    """Leaves whose gradients are ready at different times, some by one operator."""
    log: list[Any] = []
    f = compiled(lambda *t: sum((t[i] * t[-1 - i]).sin() @ t[i] for i in (3, 0, 6, 1)).exp() + torch.cat(t).sum())
    for call in range(CALLS):
        f(*(watched(i, random(3, seed=10 * call + i), log) for i in range(11))).backward()
    return log


# --- results stored into what outlives the call, whose old contents no result needs

KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "list_item": (lambda: [0, 0, 0], lambda kept, t: kept.__setitem__(0, t)),
    "list_item_of_the_last": (lambda: [torch.zeros(4)], lambda kept, t: kept.__setitem__(0, kept[0] * 0.5 + t)),
    "list_insert_pop": (lambda: [0, 0, 0], lambda kept, t: (kept.insert(0, t), kept.pop())),
    "list_append": (list, lambda kept, t: kept.append(t)),
    "list_append_view": (list, lambda kept, t: kept.append(t[1:])),
    "list_extend": (list, lambda kept, t: kept.extend([t, t.sin()])),
    "deque": (lambda: collections.deque(maxlen=2), lambda kept, t: kept.append(t)),
    "dict": (dict, lambda kept, t: kept.update(k=t)),
    "dict_of_lists": (lambda: collections.defaultdict(list), lambda kept, t: kept["k"].append(t)),
    "attribute": (types.SimpleNamespace, lambda kept, t: setattr(kept, "k", t)),
    "attribute_of_the_last": (
        lambda: types.SimpleNamespace(k=torch.zeros(4)),
        lambda kept, t: setattr(kept, "k", kept.k * 0.5 + t),
    ),
}


def _contents(kept: Any) -> list[Any]:
    values = (
        list(vars(kept).values())
        if isinstance(kept, types.SimpleNamespace)
        else list(kept.values() if isinstance(kept, dict) else kept)
    )
    return [item for value in values for item in (value if isinstance(value, list) else [value])]


def _stores() -> None:
    for name, (make, store) in KEPT.items():

        def run(compiled: Compiled, make: Any = make, store: Any = store) -> list[Any]:
            kept, log = make(), []

            def step(a: Any) -> Any:
                store(kept, a * 2)
                return a.sin()

            f = compiled(step)
            for call in range(CALLS):
                a = watched(0, random(4, seed=call), log)
                y = f(a)
                y.sum().backward()
                log += [y, a.grad, *_contents(kept)]
            total = sum(item.sum() for item in _contents(kept) if isinstance(item, torch.Tensor))
            total.backward()
            return [*log, a.grad]

        PROGRAMS[f"stored_in_{name}"] = run


_stores()


# --- operators that only write, in the forward and in the backward


@torch.library.custom_op("fusewright_tests::triple_into", mutates_args={"out"})
def triple_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 3)


@torch.library.custom_op("fusewright_tests::add_into", mutates_args={"out"})
def add_into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.add_(x * 3)
    return x + 1


@add_into.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _into_zeros(g: Any) -> Any:
    out = torch.zeros_like(g)
    triple_into(g, out)
    return out


def _into_twice(g: Any) -> Any:
    out = torch.zeros_like(g)
    added = add_into(g, out)
    add_into(added, out)
    return out * added


def _through_view(g: Any) -> Any:
    out = torch.zeros(4, 4)
    out.diagonal().copy_(g)
    triple_into(g, out[0])
    return out.sum(0)


def _asserted(g: Any) -> Any:
    torch._assert_async((g.abs() < 1e9).all())
    return g * 2


def _in_place(g: Any) -> Any:
    g.mul_(2)


def _numbers(g: Any) -> Any:
    torch.rand(3)
    return g * 2


WRITES: dict[str, Callable[[Any], Any]] = {
    "into_zeros": _into_zeros,
    "into_twice": _into_twice,
    "through_view": _through_view,
    "out": lambda g: torch.mul(g, 3, out=torch.empty_like(g)),
    "asserted": _asserted,
    "in_place": _in_place,
    "numbers_unused": _numbers,
    "numbers": lambda g: g * torch.rand_like(g),
    "dropout": lambda g: functional.dropout(g, 0.5),
}


def _function_of(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            ctx.save_for_backward(a)
            return forward(a.clone())

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return backward(g * ctx.saved_tensors[0])

    return Function


def _with_hook(a: Any, hook: Any) -> Any:
    b = a * 2
    b.register_hook(hook)
    return b.sin()


def _writes() -> None:
    for name, write in WRITES.items():
        family(f"hook_writes_{name}", lambda a, write=write: _with_hook(a, write), leaves((4,)), everything)
        if name == "in_place":
            continue
        applied = _function_of(lambda a: a * 2, write)
        family(f"function_writes_{name}", lambda a, applied=applied: applied.apply(a).sin(), leaves((4,)), everything)
        applied = _function_of(write, lambda g: g)
        family(
            f"function_forward_writes_{name}",
            lambda a, applied=applied: applied.apply(a).sin(),
            leaves((4,)),
            everything,
        )
        family(f"forward_writes_{name}", lambda a, write=write: a.sin() * write(a.detach()), leaves((4,)), everything)
        again = lambda a, write=write: checkpoint(lambda a: a.sin() * write(a.detach()), a, use_reentrant=False)
        family(f"checkpoint_writes_{name}", again, leaves((4,)), everything)


_writes()


def _write_outside() -> None:
    """A backward that writes to what was there before it."""

    def argument(a: Any, c: Any) -> Any:
        return _with_hook(a, lambda g: triple_into(g, c))

    def result(a: Any) -> Any:
        kept = a.detach().clone()
        return _with_hook(a, lambda g: kept.add_(g) * 1), kept

    def tangent(a: Any) -> Any:
        b = a * 2
        b.register_hook(_in_place)
        return b

    def given(log: list[Any], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        weight = torch.ones(4)
        outputs[0].backward(weight)
        log.append(weight)

    family(
        "hook_writes_argument", argument, lambda call: (random(4, seed=call), random(4, g=False, seed=call)), everything
    )
    family("hook_writes_result", result, leaves((4,)), everything)
    family("hook_writes_tangent", tangent, leaves((4,)), given)
    partly = lambda a, b: (lambda h: ((h * 2).sin(), _with_hook(h, _numbers)))(a * b)
    for order in ((0,), (1,), (0, 1)):
        family(f"hook_draws_{order}", partly, leaves((4,), (4,)), one_by_one(*order, keep=True))


_write_outside()


# --- writes through `data`, which no version counter shows

DATA: dict[str, Callable[[Any], Any]] = {
    "chunk": lambda t: t.chunk(2)[-1],
    "split": lambda t: t.split(2)[1],
    "unbind": lambda t: t.view(2, -1).unbind(0)[0],
    "slice": lambda t: t[1:],
    "itself": lambda t: t.view(-1),
}


def _written_by_data(part: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def function(a: Any) -> Any:
        v = part(a * 2)
        v.real.data.mul_(2)
        return v

    return function


for _name, _part in DATA.items():
    family(f"data_of_{_name}", _written_by_data(_part), leaves((4,)), everything)


class InPlace(torch.autograd.Function):
    """Its backward computes in the memory of what its forward has saved; `saves` says what that is."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, saves: str) -> Any:
        made = a.exp()
        total = made.sum(-1)
        saved = {"input": a, "view": made[1:], "result": total}.get(saves, made)
        ctx.save_for_backward(saved)
        return (total, made) if saves == "second result" else total

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, *others: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        gradient = saved.reshape(-1)
        gradient += 1
        gradient[:2] = gradient[1:3] * g.sum()
        return gradient.sum() * g[:, None].expand(4, 3), None


def _written_in_place(saves: str) -> Callable[[Compiled], list[Any]]:
    def fn(a: torch.Tensor) -> Any:
        b = a if saves == "argument" else a * 0.5
        made = InPlace.apply(b, "input" if saves == "argument" else saves)
        return made if type(made) is tuple else InPlace.apply(made[:, None] * a, saves)

    def run(compiled: Compiled) -> list[Any]:
        a, f, results = random(4, 3), compiled(fn), []
        for _ in range(2):
            y = f(a)
            (y[0] * y[1][:, 0] if type(y) is tuple else y).sum().backward()
            results += [*(y if type(y) is tuple else [y]), a.grad.clone(), a.detach().clone()]
        return results

    run.__name__ = f"custom_in_place_of_{saves.replace(' ', '_')}"
    return run


for _saves in ("temporary", "view", "input", "argument", "result", "second result"):
    program(_written_in_place(_saves))


@program
def custom_in_place_of_what_autograd_has_saved(compiled: Compiled) -> list[Any]:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            ctx.a = a.data
            return a.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
            return ctx.a.mul_(g * 3)

    a = random(4, 3)
    y = compiled(lambda a: Writes.apply(a.exp()))(a)
    y.sum().backward()
    return [y, a.grad]


@program
def custom_in_place_beside_another_group(compiled: Compiled) -> list[Any]:
    a, b = random(4, 3), random(4, 3, seed=1)
    y, z = compiled(lambda a, b: (InPlace.apply(a, "temporary"), b.sin()))(a, b)
    y.sum().backward()
    z.sum().backward()
    return [y, z, a.grad, b.grad]
