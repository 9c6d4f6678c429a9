"""What the forward saves for the backward: minimum cuts, budgets, checkpoints, masks, and when saved tensors are freed."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fusewright
from fusewright.autograd.joint import JointGraph, Split
from fusewright.autograd.partition import choose_saved, saved_bytes, split
from fusewright.base.errors import OptionError
from fusewright.base.events import STREAM, InternalError


def saved_by(function: Callable[..., Any], *inputs: Any, budget: float = 1.0) -> tuple[int, Split]:
    """The bytes that a compiled `function` saves beyond its inputs, and its halves; checks its gradients against eager's."""
    seen: list[tuple[int, Split]] = []

    def partition(joint: JointGraph) -> Split:
        saved = choose_saved(joint, budget=budget)
        halves = split(joint, budget=budget)
        seen.append((sum(saved_bytes(node) for node in saved if node.op != "placeholder"), halves))
        return halves

    backend = fusewright.aot(lambda gm, example_inputs: gm.forward, partition=partition)
    leaves = [value for value in inputs if value.requires_grad]
    results = []
    for run in (fusewright.compile(function, backend=backend, fullgraph=True), function):
        torch.manual_seed(0)
        results.append(torch.autograd.grad(run(*inputs).sum(), leaves))
    torch.testing.assert_close(*results)
    (found,) = seen
    return found


def test_a_pointwise_chain_saves_nothing_but_its_input() -> None:
    x = torch.randn(64, requires_grad=True)
    assert saved_by(lambda x: x.sin().exp().tanh() * 2, x)[0] == 0


def test_a_reduction_is_saved_rather_than_computed_again() -> None:
    x = torch.randn(64, 32, requires_grad=True)
    saved, halves = saved_by(lambda x: (x / x.norm(dim=1, keepdim=True)).exp(), x)
    assert 0 < saved <= 64 * 4
    assert not any(
        "norm" in str(node.target)
        for node in halves.backward.nodes
        if node.op == "call_function" and "div" not in str(node.target)
    )


COMPARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "minimum": lambda y: y.amin(1).cumsum(0),
    "largest norm": lambda y: y.norm(float("inf"), dim=1).cumsum(0),
    "largest of a row": lambda y: torch.where(y == y.amax(1, keepdim=True), y * y, 0.0).cumsum(0),
    "difference": lambda y: torch.where(y - y.amax(1, keepdim=True) < 0, 0.0, y * y).cumsum(0),
    "largest two": lambda y: y.masked_fill(y < y.topk(2)[0][:, 1:], 0).square().cumsum(0),
}


@pytest.mark.parametrize("make", [torch.erf, torch.tanh, torch.sin])
@pytest.mark.parametrize("name", COMPARED)
def test_what_is_compared_with_its_own_extreme_is_not_computed_again(name: str, make: Callable[..., Any]) -> None:
    """What another kernel rounds otherwise would be equal to nothing, and the gradient zero."""
    x = torch.randn(100, 37, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def f(x: torch.Tensor) -> torch.Tensor:
        return COMPARED[name](make(x))

    _, halves = saved_by(f, x)
    assert not any("aten.eq" in str(node.target) or "aten.lt" in str(node.target) for node in halves.backward.nodes)
    found = [torch.autograd.grad(run(x).sum(), x)[0] for run in (f, fusewright.compile(f, fullgraph=True))]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)


def test_an_input_that_is_compared_with_its_extreme_is_compared_again() -> None:
    assert saved_by(lambda x: x.amax(1).exp(), torch.randn(64, 32, requires_grad=True))[0] <= 64 * (4 + 4 + 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("make", [functional.silu, functional.mish, lambda x: torch.logaddexp(x.sin(), x)])
@pytest.mark.parametrize("reduce", [lambda y: y.var(0), lambda y: y.std((0, 2)), lambda y: (y - y.mean(0)) / 0, lambda y: y[0, 0, :1].var()])
def test_one_element_less_its_mean_is_zero(
    reduce: Callable[[torch.Tensor], torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """The mean is computed again with what it is subtracted from, else infinity times a rounding would be no NaN."""
    x = torch.randn(1, 32, 1, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()

    def f(x: torch.Tensor) -> torch.Tensor:
        return reduce(make(x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no degrees of freedom
        eager, found = (torch.autograd.grad(run(x).sum(), x)[0] for run in (f, fusewright.compile(f, fullgraph=True)))
    torch.testing.assert_close(found, eager, equal_nan=True)


def test_of_equal_cuts_the_one_that_computes_least_again() -> None:
    """Saving the product or what a chain of pointwise operators makes of it costs the same: the end of the chain is saved."""
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    saved, halves = saved_by(lambda x, w: (x @ w).detach().sin() * w, x, w)
    assert saved == 64 * 64 * 4
    assert not any("sin" in str(node.target) for node in halves.backward.nodes if node.op == "call_function")


def test_a_view_is_saved_as_what_it_views() -> None:
    """A result of the forward that the backward reads transposed is saved as it is: a write to it before the backward is an error."""
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(64, 8, requires_grad=True)

    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x @ w).exp()
        return y, y.t() @ x

    compiled = fusewright.compile(step, fullgraph=True)
    for run in (step, compiled):
        y, z = run(x, w)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.relu(x @ w) @ v).softmax(-1) @ w


def test_a_checkpoint_is_computed_again() -> None:
    x, w, v = (torch.randn(*shape, requires_grad=True) for shape in ((100, 64), (64, 64), (64, 64)))
    plain, _ = saved_by(lambda x, w, v: block(x, w, v).sin(), x, w, v)
    wrapped, halves = saved_by(lambda x, w, v: checkpoint(block, x, w, v, use_reentrant=False).sin(), x, w, v)
    assert plain >= 3 * 100 * 64 * 4 and wrapped <= 100 * 64 * 4
    # Two of the three products again, beside the gradients' six (the third is the one whose result leaves the checkpoint).
    assert sum(node.target is torch.ops.aten.mm.default for node in halves.backward.nodes) >= 8


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.calls += 1
        return x.sin() * self.runs


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_wraps_writes_once(backend: str, reentrant: bool) -> None:
    model = Counting()
    compiled = fusewright.compile(lambda x: checkpoint(model, x, use_reentrant=reentrant), backend=backend)
    for run in (1, 2):
        x = torch.ones(3, requires_grad=True)
        compiled(x).sum().backward()
        assert (model.runs.item(), model.calls) == (run, run)
        torch.testing.assert_close(x.grad, x.detach().cos() * run)


def test_what_a_checkpoint_wraps_may_change_before_the_backward() -> None:
    layer = torch.nn.Linear(2, 2)
    compiled = fusewright.compile(lambda x: checkpoint(layer, x, use_reentrant=False))
    x = torch.ones(1, 2)
    with layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,)):
        result = compiled(x)
    result.sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 2), 2.0))


def test_a_budget_bounds_what_is_saved() -> None:
    # In float64: the softmax of such numbers turns a product's last bit in float32 into 1e-5.
    inputs = tuple(
        torch.randn(*shape, requires_grad=True, dtype=torch.float64) for shape in ((100, 64), (64, 64), (64, 64))
    )
    full = saved_by(block, *inputs)[0]
    assert saved_by(block, *inputs, budget=0.5)[0] <= full / 2
    assert saved_by(block, *inputs, budget=0.0)[0] == 0
    compiled = fusewright.compile(block, options={"activation_memory_budget": 0.0}, fullgraph=True)
    got = torch.autograd.grad(compiled(*inputs).sin().sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad(block(*inputs).sin().sum(), inputs))
    with pytest.raises(OptionError, match="between"):
        fusewright.compile(block, options={"activation_memory_budget": 1.5})


@pytest.mark.parametrize(
    "pick, shape, dtype",
    [
        (lambda x: functional.max_pool2d(x.sin(), 2), (2, 3, 8, 8), torch.int8),
        (lambda x: functional.max_pool2d(x.sin(), 3, 2, 1), (2, 3, 20, 20), torch.int16),
        (lambda x: functional.max_pool2d(x.sin(), 2), (1, 1, 200, 200), torch.int32),
        (lambda x: x.sin().max(1).values, (4, 130, 3), torch.int16),
        (lambda x: x.sin().topk(3, dim=1).values, (4, 100, 3), torch.int8),
    ],
)
def test_positions_are_saved_as_small_integers(
    pick: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    _, halves = saved_by(pick, torch.randn(shape, requires_grad=True))
    saved = {node.meta["type"].dtype for node in halves.backward.nodes if node.op == "placeholder"}
    assert dtype in saved and torch.int64 not in saved


def test_a_mask_is_saved_as_bool() -> None:
    x = torch.randn(64, 32, requires_grad=True)
    saved, halves = saved_by(lambda x: functional.dropout(x, 0.3), x)
    assert saved == 64 * 32
    assert torch.bool in {node.meta["type"].dtype for node in halves.backward.nodes if node.op == "placeholder"}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("layout", ["dense", "turned", "gaps", "turned gaps"])
def test_an_input_that_changes_is_saved_as_it_was(layout: str, dynamic: bool | None) -> None:
    total = torch.randn(3, 16 if "gaps" in layout else 8)[:, :: 2 if "gaps" in layout else 1]
    total = total.t() if "turned" in layout else total
    x = torch.randn(total.shape, requires_grad=True)

    def step(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x * (total * 2)
        total.add_(1)
        return y

    before = total.clone()
    fusewright.compile(step, fullgraph=True, dynamic=dynamic)(total, x).sum().backward()
    torch.testing.assert_close(x.grad, before * 2)
    torch.testing.assert_close(total, before + 1)


BY_STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex": lambda x: torch.view_as_complex(x[..., :2]).imag,
    "complex columns": lambda x: torch.view_as_complex(x.transpose(0, 1)[..., :2]).abs(),
    "larger elements": lambda x: x[..., :2].view(torch.float64).nan_to_num(0, 0, 0),
    "smaller elements": lambda x: x.view(torch.int16).sin(),
    "windows": lambda x: x.as_strided((4, 16), (0, 1)),
    "windows of a part": lambda x: x[1:].as_strided((5, 4, 4), (2, 0, 1)),
    "alias": lambda x: torch.ops.aten._reshape_alias(x, x.shape, x.stride()).sin(),
}


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("base", [torch.Size([4, 5, 8]), torch.Size([4, 5, 4])])
@pytest.mark.parametrize("name", BY_STRIDES)
def test_views_that_ask_for_strides_suit_the_copy_of_what_is_written(
    name: str, base: torch.Size, dynamic: bool | None, budget: float
) -> None:
    """The new value of an input with gaps has none, and neither has the copy of the old one that is saved."""
    view = BY_STRIDES[name]
    start, w = torch.randn(base), torch.tensor(1.5, requires_grad=True)

    def before(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return w * (view(x) * 2)

    def after(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = w * (view(x) * 2)
        x.add_(1)
        return y

    options = {"activation_memory_budget": budget}
    for step in (before, after):
        found = []
        for run in (step, fusewright.compile(step, dynamic=dynamic, options=options)):
            x, w.grad = start.clone()[:, :, : 3 if base[2] == 8 else 4], None
            y = run(x, w)
            y.sum().backward()
            found.append((y.detach(), w.grad, x))
        torch.testing.assert_close(found[1], found[0])


def test_an_input_that_is_updated_is_no_part_of_a_cycle() -> None:
    compiled = fusewright.compile(lambda n: n.mul_(3), fullgraph=True)
    a = torch.randn(8, requires_grad=True)
    n = a * 2
    compiled(n)
    gc.collect()
    gc.disable()
    try:
        reference = weakref.ref(n)
        del n
        assert reference() is None
    finally:
        gc.enable()


def test_a_saved_tensor_is_freed_in_the_backward() -> None:
    """A plan that consumes its inputs holds none of them at the end; a kept graph keeps them."""
    w = torch.randn(64, 64, requires_grad=True)
    compiled = fusewright.compile(lambda x, w: torch.relu(x @ w) @ w, fullgraph=True)
    x = torch.randn(64, 64)
    y = compiled(x, w)
    expected = torch.autograd.grad((torch.relu(x @ w) @ w).sum(), w)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), w, retain_graph=True), expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), w), expected)
    reference = weakref.ref(x)
    del x
    assert reference() is None
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


with torch.inference_mode():
    INFERENCE, OTHER = torch.arange(16.0).reshape(4, 4) / 8 - 1, torch.arange(1.0, 5.0)


def inside(w: torch.Tensor, returned: bool) -> Any:
    with torch.inference_mode():
        made = torch.tensor([3.0, 4.0, 5.0, 6.0])
    return (made, made.clone() * w) if returned else made.clone() * w


# What a backward needs of an inference tensor: a copy, something computed, a part, a condition, or the tensor itself, which is an error.
OF_INFERENCE: dict[str, Callable[..., Any]] = {
    "a copy": lambda x, v, w: x.clone() * w,
    "a sum": lambda x, v, w: (x + 1) * w,
    "a factor of a product": lambda x, v, w: x.exp() @ w,
    "a copy of a transpose": lambda x, v, w: (x.t().contiguous() @ w).relu(),
    "a copy of a part": lambda x, v, w: (x[1:3].clone() * w[1:3]).sum(),
    "copies of parts": lambda x, v, w: sum(part.clone() * w[0, :2] for part in x.split(2, 1)),
    "a copy of some elements": lambda x, v, w: x.as_strided((2, 2), (4, 1)).clone() * w[:2, :2],
    "parameters of a norm": lambda x, v, w: functional.layer_norm(w, (4,), v.clone(), v.clone()),
    "statistics of a norm": lambda x, v, w: functional.batch_norm(w, v.clone(), v * 2, training=False),
    "a condition": lambda x, v, w: torch.where(x > 0, w, w * 2),
    "an index": lambda x, v, w: w[(v * 0).long()],
    "another dtype": lambda x, v, w: (x.double() * w.double()).sum(),
    "an exponent": lambda x, v, w: w.exp() ** x.clone(),
    "a copy, and the tensor is a result": lambda x, v, w: (x, x.clone() * w),
    "a copy, and a view is a result": lambda x, v, w: (x.t(), x.clone() * w),
    "inside of a checkpoint": lambda x, v, w: checkpoint(lambda b: (x.clone() * b).sin(), w, use_reentrant=False),
    "a constant": lambda x, v, w: INFERENCE.clone() * w,
    "made inside": lambda x, v, w: inside(w[0], False),
    "made inside and returned": lambda x, v, w: inside(w[0], True),
    "itself": lambda x, v, w: x * w,
    "a view of it": lambda x, v, w: x.t() @ w,
    "no copy": lambda x, v, w: x.contiguous().float() * w,
    "itself, one of several": lambda x, v, w: functional.layer_norm(w, (4,), v, v.clone()),
    "an argument of a checkpoint": lambda x, v, w: checkpoint(lambda a, b: a.clone() * b, x, w, use_reentrant=False),
    "one of a reentrant one": lambda x, v, w: checkpoint(lambda a, b: a.clone() * b, x, w, use_reentrant=True),
    "where nothing leads": lambda x, v, w: checkpoint(lambda a, b: a.clone() + b, x, w.detach(), use_reentrant=True) + w,
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("name", OF_INFERENCE)
def test_what_a_backward_needs_of_an_inference_tensor(name: str, backend: str, dynamic: bool | None) -> None:
    """Autograd saves no inference tensor: eager's error where eager saves it, and a copy where eager saves what it has made."""

    def found(function: Callable[..., Any]) -> Any:
        w = torch.arange(16.0).reshape(4, 4).cos().requires_grad_()
        try:
            results = function(INFERENCE, OTHER, w)
            results = results if isinstance(results, tuple) else (results,)
            gradient = torch.autograd.grad(results[-1].sin().sum(), w)[0]
        except RuntimeError as error:
            return str(error)
        return gradient, [(result.detach(), result.is_inference()) for result in results]

    program = OF_INFERENCE[name]
    compiled = fusewright.compile(program, backend=backend, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        expected = found(program)
        for _ in range(2):
            if isinstance(expected, str):
                assert "Inference tensors cannot be saved for backward" in expected and found(compiled) == expected
            else:
                torch.testing.assert_close(found(compiled), expected)


def test_a_view_of_what_is_saved_otherwise_laid_out_is_one_of_a_copy() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = (x @ weight).transpose(0, 1) + x.transpose(0, 1)  # sizes do not show that it lies densely
        return y.transpose(0, 1).flatten(0, 1) @ weight

    compiled = fusewright.compile(function, dynamic=True)
    with STREAM.listening((heard := []).append):
        for rows in (5, 6):
            x, weight = torch.randn(rows, 3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
            grads = [torch.autograd.grad(run(x, weight).sum(), (x, weight)) for run in (compiled, function)]
            torch.testing.assert_close(*grads)
    assert not [event for event in heard if isinstance(event, InternalError)]
