"""Functions and methods of PyTorch's that a program has kept, or wrapped, and then replaced under their names."""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusewright


def forward_of(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    return gm.forward


def made_again(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    gm.recompile()
    return gm.forward


def interpreted(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    return torch.fx.Interpreter(gm).run


BACKENDS = ("native", "eager", "aot_eager", forward_of, made_again, interpreted)

# name: (where it lies, its name there, a call)
KEPT: dict[str, tuple[Any, str, Callable[[Any, torch.Tensor], Any]]] = {
    "torch.sin": (torch, "sin", lambda kept, x: kept(x) + torch.sin(x)),
    "torch.stack": (torch, "stack", lambda kept, x: kept([x, x])),
    "torch.einsum": (torch, "einsum", lambda kept, x: kept("i,i->i", x, x)),
    "F.relu": (F, "relu", lambda kept, x: kept(x - 0.5)),
    "F.linear": (F, "linear", lambda kept, x: kept(x, torch.ones(3, 3))),
    "torch.linalg.norm": (torch.linalg, "norm", lambda kept, x: kept(x)),
    "torch.special.erf": (torch.special, "erf", lambda kept, x: kept(x)),
    "Tensor.sin": (torch.Tensor, "sin", lambda kept, x: kept(x) + x.sin()),
    "Tensor.sum": (torch.Tensor, "sum", lambda kept, x: kept(x, 0, keepdim=True) + x.sum()),
    "Tensor.norm": (torch.Tensor, "norm", lambda kept, x: kept(x) + x.norm()),
    "Tensor.__mul__": (torch.Tensor, "__mul__", lambda kept, x: kept(x, 3) + x * 2),
    "operator.add": (operator, "add", lambda kept, x: kept(x, x)),
    "operator.matmul": (operator, "matmul", lambda kept, x: kept(x, x)),
    "math.sqrt": (math, "sqrt", lambda kept, x: x * kept(x.shape[0])),
    "torch.ops.aten.sin": (torch.ops.aten, "sin", lambda kept, x: kept(x)),
}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("before", [False, True], ids=["replaced after the compile", "replaced before it"])
def test_a_function_that_was_kept_is_called_whatever_its_name_leads_to(
    name: str, backend: Any, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, call = KEPT[name]
    kept, x = getattr(owner, attribute), torch.rand(3) + 0.1

    def program(x: torch.Tensor) -> Any:
        return call(kept, x) + 1

    def another(*args: Any, **kwargs: Any) -> Any:
        return kept(*args, **kwargs).neg()

    compiled = fusewright.compile(program, backend=backend)
    if not before:
        torch.testing.assert_close(compiled(x), program(x))
    with monkeypatch.context() as replaced:
        replaced.setattr(owner, attribute, another)
        torch.testing.assert_close(compiled(x), program(x))
    torch.testing.assert_close(compiled(x), program(x))


def through(x: torch.Tensor) -> torch.Tensor:
    """Reads of names: the wrapper stands under them, and calls what stood there."""
    y = torch.sin(x) + x.sin() + F.relu(x) + x.reshape(-1).to(torch.float64).sum(0)
    return torch.stack([y, y]).reshape(2, -1) + F.linear(x, torch.ones(3, 3)) + F.normalize(x, dim=0)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch, "sin"), (torch, "stack"), (F, "relu"), (F, "linear")]
    + [(torch.Tensor, name) for name in ("sin", "reshape", "to", "sum", "norm", "expand_as")],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_wrapper_under_a_name_runs_once(
    owner: Any, name: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`expand_as` and `norm` are called by a function of PyTorch's, which is interpreted then."""
    kept, calls, x = getattr(owner, name), [0], torch.rand(3)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return kept(*args, **kwargs).neg()

    monkeypatch.setattr(owner, name, wrapper)
    compiled = fusewright.compile(through, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), through(x))
        assert calls[0] % 2 == 0  # eager's as often as ours
    monkeypatch.undo()
    torch.testing.assert_close(compiled(x), through(x))


def test_the_text_and_what_is_saved_of_a_module_are_pytorchs() -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return torch.jit.script(gm)

    x = torch.rand(3)
    torch.testing.assert_close(fusewright.compile(lambda x: F.relu(torch.sin(x)), backend=backend)(x), x.sin().relu())
    (gm,) = graphs
    assert "torch.sin(" in gm.code and "torch.nn.functional.relu(" in gm.code
    torch.testing.assert_close(pickle.loads(pickle.dumps(gm))(x)[0], x.sin().relu())


def test_the_engine_is_pytorchs_where_a_wrapper_of_it_stands_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's `Tensor.backward` calls the wrapper; the gradients of what is compiled are asked of the engine."""
    kept, kept_backward, calls, x = torch.autograd.grad, torch.autograd.backward, [0], torch.arange(3.0)
    fusewright.compile(torch.sin)(x)

    def backward(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        kept_backward(*args, **kwargs)

    def program(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        (x * p).sum().backward()
        return torch.autograd.grad((p * p * x).sum(), p)[0]

    monkeypatch.setattr(torch.autograd, "grad", lambda *given: tuple(2 * one for one in kept(*given)))
    monkeypatch.setattr(torch.autograd, "backward", backward)
    compiled, ours, eagers = fusewright.compile(program), torch.ones(3), torch.ones(3)
    for count in range(1, 4):
        torch.testing.assert_close(compiled(x, ours.requires_grad_()), program(x, eagers.requires_grad_()))
        torch.testing.assert_close(ours.grad, eagers.grad)
        assert calls == [2 * count]
