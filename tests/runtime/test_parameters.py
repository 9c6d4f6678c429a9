"""What depends on parameters alone is computed once, and again after every kind of change to a parameter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusewright
from fusewright import _native
from fusewright.base.events import STREAM, Event, FellBack, Recompiling
from fusewright.graph.freezing import Prepacking, Ref, Step
from fusewright.sizes.tensor_type import TensorType


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, groups=4)
        self.linear = nn.Linear(256, 32)
        self.register_buffer("table", torch.randn(32))
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.second(self.norm(self.conv(x)).relu()))
        return self.linear(x.flatten(1)) * self.table.exp()


def all_plans() -> list[object]:
    gc.collect()
    return [item for item in gc.get_objects() if type(item) is _native.PreparedPlan]


older: list[object] = []


@pytest.fixture(autouse=True)
def remember_older_plans() -> None:
    older[:] = all_plans()  # what other tests keep alive


def plans(compiled: object) -> list[object]:
    """The prepared plans that this test has made."""
    return [plan for plan in all_plans() if not any(plan is known for known in older)]


def optimizer_step(net: Net) -> None:
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.enable_grad():
        net(torch.randn(8, 3, 8, 8)).sum().backward()
    optimizer.step()
    net.eval()


def swap_twice(net: Net) -> None:
    """Two swaps, so that the second new memory could lie where the first lay."""
    net.linear.weight.data = torch.randn(32, 256)
    net.linear.weight.data = torch.randn(32, 256)


CHANGES: dict[str, Callable[[Net], object]] = {
    "in place": lambda net: net.linear.weight.mul_(2),
    "through data": lambda net: net.linear.weight.data.mul_(2),
    "convolution through data": lambda net: net.conv.weight.data.add_(1),
    "data swapped": lambda net: setattr(net.linear.weight, "data", torch.randn(32, 256)),
    "data swapped twice": swap_twice,
    "new parameter": lambda net: setattr(net.linear, "weight", nn.Parameter(torch.randn(32, 256))),
    "state loaded": lambda net: net.load_state_dict(Net().state_dict()),
    "statistics": lambda net: net.norm.running_var.mul_(3),
    "statistics through data": lambda net: net.norm.running_mean.data.add_(3),
    "scale": lambda net: net.norm.weight.fill_(0.3),
    "buffer": lambda net: net.table.zero_(),
    "buffer replaced": lambda net: setattr(net, "table", torch.ones(32)),
    "optimizer": optimizer_step,
    "one row": lambda net: net.linear.weight[3].zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_is_seen(change: Callable[[Net], object]) -> None:
    net = Net().eval()
    compiled = fusewright.compile(net)
    x = torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
        (plan,) = plans(compiled)
        assert plan.prepared == 1 and len(plan.values) >= 4  # type: ignore[attr-defined]
        change(net)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
        assert len(plans(compiled)) == 1


def test_only_a_change_prepares_again() -> None:
    net = Net().eval()
    compiled = fusewright.compile(net)
    x = torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        for round in range(1, 4):
            for _ in range(5):
                compiled(x)
            (plan,) = plans(compiled)
            assert plan.prepared == round  # type: ignore[attr-defined]
            net.conv.weight.mul_(1.01)


def test_not_a_numbers_stay() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 1),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.Conv2d(16, 16, 1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 1),
        nn.Hardswish(),
    )
    net.eval()
    x = torch.randn(2, 3, 6, 6)
    x[0, 0, 0, 0], x[1, 1, 2, 2], x[1, 2, 3, 3] = float("nan"), float("inf"), -float("inf")
    with torch.no_grad():
        torch.testing.assert_close(fusewright.compile(net)(x), net(x), equal_nan=True, rtol=1e-4, atol=1e-5)


def test_gradients_are_compiled_without_preparation() -> None:
    net = Net().eval()
    compiled = fusewright.compile(net)
    x = torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        compiled(x)
    loss = compiled(x).sum()
    loss.backward()
    got = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    net(x).sum().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 64])
def test_linear_layers(dtype: torch.dtype, rows: int) -> None:
    net = nn.Sequential(nn.Linear(48, 64), nn.SiLU(), nn.Linear(64, 24, bias=False)).to(dtype).eval()
    x = torch.randn(rows, 48, dtype=dtype)
    with torch.no_grad():
        got, expected = fusewright.compile(net)(x), net(x)
    assert got.dtype == expected.dtype and got.stride() == expected.stride()
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, 1e-2)


def test_weights_of_any_layout() -> None:
    """GPT-2's Conv1D keeps its weight transposed; a tied weight is packed once for each use."""
    table = nn.Embedding(40, 16)
    weight = nn.Parameter(torch.randn(16, 16))

    def f(ids: torch.Tensor) -> torch.Tensor:
        x = table(ids)
        return torch.addmm(weight[0], x @ weight, weight.t()) @ table.weight.t()

    ids = torch.randint(0, 40, (24,))
    with torch.no_grad():
        torch.testing.assert_close(fusewright.compile(f)(ids), f(ids), rtol=1e-4, atol=1e-4)


def test_rows_may_vary() -> None:
    net = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 24)).eval()
    compiled = fusewright.compile(net, dynamic=True)
    recompiles: list[Event] = []
    with (
        torch.no_grad(),
        STREAM.listening(lambda event: recompiles.append(event) if isinstance(event, Recompiling) else None),
    ):
        for rows in (9, 64, 2, 300, 7):
            x = torch.randn(rows, 48)
            torch.testing.assert_close(compiled(x), net(x))
    assert not recompiles


def test_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        net = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 24)).eval()
        compiled = fusewright.compile(net)
        x = torch.randn(16, 48)
        torch.testing.assert_close(compiled(x), net(x))
        net[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), net(x))


def test_an_inference_tensor_takes_a_parameters_place() -> None:
    net = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 24)).eval()
    compiled = fusewright.compile(net)
    x = torch.randn(16, 48)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), net(x))
        for _ in range(3):
            net[0].weight = nn.Parameter(torch.randn(64, 48), requires_grad=True)
            torch.testing.assert_close(compiled(x), net(x))
            net[0].weight.mul_(2)
            torch.testing.assert_close(compiled(x), net(x))


def test_autocast_casts_weights_once() -> None:
    net = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 24)).eval()
    compiled = fusewright.compile(net)
    x = torch.randn(16, 48)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), net(x), rtol=2e-2, atol=2e-2)
        (plan,) = plans(compiled)
        assert plan.prepared == 1  # type: ignore[attr-defined]
        net[0].weight.mul_(2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # a new block: within one, eager keeps its own casts
        torch.testing.assert_close(compiled(x), net(x), rtol=2e-2, atol=2e-2)


def test_the_option_turns_it_off() -> None:
    net = Net().eval()
    compiled = fusewright.compile(net, options={"pack_weights": False})
    x = torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
    assert not plans(compiled)


def test_a_mutated_buffer_is_no_constant() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x * (self.count * 2)

    eager, module = Counter(), Counter()
    compiled = fusewright.compile(module)
    x = torch.randn(4)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x), eager(x))
    torch.testing.assert_close(module.count, eager.count)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_results_that_depend_on_parameters_alone_are_new_ones(kind: str) -> None:
    """The caller may write to them: they are computed at each call, from what is prepared."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "buffer":
                self.register_buffer("weight", torch.arange(6.0).reshape(2, 3))
            else:
                self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            whole = self.weight @ self.weight.t() + 1
            first, second = (self.weight * 2).split(1)
            products = self.weight[None] @ self.weight.t()  # a view that its schema does not tell
            return whole, whole.view(4), first, second.t(), x * whole.exp(), self.weight[:1] - 1, products

    net, x = Table(), torch.ones(2, 2)
    compiled = fusewright.compile(net, fullgraph=True)
    expected, kept = net(x), []
    for _ in range(3):
        results = compiled(x)
        for got, value in zip(results, expected):
            torch.testing.assert_close(got, value)
        assert results[0].data_ptr() == results[1].data_ptr()
        assert results[2].untyped_storage().data_ptr() == results[3].untyped_storage().data_ptr()
        kept.append(results)  # so that no memory is used again
        for result in results:
            result.add_(100)


def test_prepared_values_go_with_the_compiled_code() -> None:
    net = Net().eval()
    compiled = fusewright.compile(net)
    with torch.no_grad():
        compiled(torch.randn(8, 3, 8, 8))
    (plan,) = plans(compiled)
    alive = [weakref.ref(value) for value in plan.values]  # type: ignore[attr-defined]
    del plan, compiled
    fusewright.reset()
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_two_modules_with_one_class() -> None:
    first, second = Net().eval(), Net().eval()
    f = fusewright.compile(lambda net, x: net(x))
    x = torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(f(first, x), first(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(f(second, x), second(x), rtol=1e-4, atol=1e-5)


def test_what_preparing_raises_reaches_the_caller() -> None:
    def fail(*parameters: torch.Tensor) -> object:
        raise RuntimeError("no prepacking")

    plan = _native.PreparedPlan(lambda *inputs: inputs, fail, 1, (0,))
    with pytest.raises(RuntimeError, match="no prepacking"):
        plan(torch.ones(3))


def test_what_also_depends_on_a_size_is_computed_at_every_call() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kernel", torch.tensor(3))
            self.conv = nn.ConvTranspose1d(2, 2, 4, stride=2)

        def forward(self, x: torch.Tensor, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
            y = nn.functional.conv_transpose1d(x, self.conv.weight, stride=stride)
            return x.shape[-1] - self.kernel, y[..., : y.shape[-1] - stride]

    net = Padded()
    seen: list[Event] = []
    with torch.no_grad(), STREAM.listening(seen.append):
        compiled = fusewright.compile(net, fullgraph=True, dynamic=True)
        for length, stride in ((5, 2), (7, 3), (9, 4)):
            x = torch.randn(1, 2, length)
            for got, expected in zip(compiled(x, stride), net(x, stride)):
                torch.testing.assert_close(got, expected)
    assert not [event for event in seen if isinstance(event, FellBack)]


def test_values_on_the_way_are_freed_when_they_are_read() -> None:
    """Four exponentials of one another: what is read again later stays, and so do results."""
    aten, alive = torch.ops.aten, []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is aten.exp.default:
                alive.append(sum(reference() is not None for reference in made))
                made.append(weakref.ref(result))
            return result

    made: list[weakref.ref[torch.Tensor]] = []
    steps = (
        Step(aten.cat.default, ((Ref(0), Ref(1)),), ()),
        *(Step(aten.exp.default, (Ref(number),), ()) for number in range(2, 6)),
        Step(aten.mul.Tensor, (Ref(3), 2), ()),
        Step(None, (Ref(6),), ()),
        Step(None, (Ref(7),), ()),
    )
    kind = TensorType((6,), (1,), torch.float32, torch.device("cpu"))
    prepacking = Prepacking((0, 1), steps, (Ref(8), Ref(9)), (kind, kind))
    inputs = [torch.randn(3), torch.randn(3)]
    with Counting():
        results = prepacking.run(inputs)
    assert alive == [0, 1, 2, 2]
    first = torch.cat(inputs).exp()
    torch.testing.assert_close(results[0], first.exp().exp().exp())
    torch.testing.assert_close(results[1], first * 2)
