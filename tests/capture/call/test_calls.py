"""What a call does: which callables are interpreted, recorded, answered natively, deferred, or break the graph."""

# ruff: noqa: C405, C417

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.signals import GraphBreak, SkipFrame
from tests.capture.border.border import capture, check, run, same
from tests.capture.border.border_programs import numbers

COLLECTED: list[Any] = []


@torch.compiler.disable
def disabled(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Function(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


BREAKS: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    ("data-dependent-scalar", lambda x: x.sum().item()),
    ("data-dependent-scalar", lambda x: float(x.sum())),
    ("data-dependent-scalar", lambda x: x.tolist()),
    ("data-dependent-branch", lambda x: 1 if x.sum() > 0 else 2),
    ("data-dependent-branch", lambda x: x.sum() in [3]),
    ("data-dependent-shape", lambda x: x.nonzero() + 1),
    ("data-dependent-shape", lambda x: x[x > 0] * 2),
    ("print-tensor", lambda x: print(x)),
    ("print-tensor", lambda x: len(f"{x}")),
    ("print-tensor", lambda x: str([x])),
    ("tensor-address", lambda x: x.data_ptr() % 16),
    ("tensor-address", lambda x: x.untyped_storage()[0]),
    ("autograd-call", lambda x: x.sum().backward()),
    ("autograd-function", lambda x: Function.apply(x.clone().requires_grad_())),
    ("disabled-function", lambda x: disabled(x)),
    ("clock", lambda x: time.time_ns()),
    ("host-random", lambda x: random.choices([1, 2])),
    ("untraceable-call", lambda x: open("/nowhere")),
    ("tensor-construction", lambda x: torch.nn.Parameter(x.int())),
    ("inference-mode", lambda x: torch.inference_mode().__enter__()),
    ("untraceable-call", lambda x: __import__("this")),
]


@pytest.mark.parametrize(("code", "function"), BREAKS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_traced_is_a_named_break(code: str, function: Any) -> None:
    with pytest.raises((GraphBreak, SkipFrame)) as caught:
        capture(function, (numbers(),))
    assert caught.value.code == code, caught.value.detail


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.softmax(x, -1) + torch.special.expit(x) + torch.linalg.norm(x),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: torch.cat([x, x]).split(2)[0].chunk(2, dim=-1),
        lambda x: torch.ops.aten.add(x, 1) + torch.ops.aten.mul.Tensor(x, 2),
        lambda x: torch.zeros(2, 2) + torch.arange(2) + torch.tensor([1.0, 2.0]),
        lambda x: (
            x.size(),
            x.dim(),
            x.numel(),
            x.is_contiguous(),
            x.element_size(),
            x.is_floating_point(),
            torch.is_tensor(x),
        ),
        lambda x: (torch.finfo(x.dtype).max, torch.iinfo(torch.int8).min, torch.promote_types(torch.int8, x.dtype)),
        lambda x: (max([1, 3], key=lambda v: -v), min(4, 2), max({"a": 1}), min([], default=x)),
        lambda x: sum([x, x], start=x),
        lambda x: sorted([(2, "b"), (1, "a")]) + sorted("cab", reverse=True),
        lambda x: functools.partial(torch.add, x, alpha=2)(x),
        lambda x: [getattr(x, "missing", 3), hasattr(x, "shape"), callable(len), isinstance(x, (int, torch.Tensor))],
        lambda x: (int("3"), float("1.5"), bool([]), list("ab"), dict([("a", 1)], b=2), set([1, 1]), tuple(range(3))),
        lambda x: (abs(-x), round(2.567, 1), divmod(7, 2), pow(2, 5), -x, +x, ~torch.tensor(True)),
        lambda x: (torch.is_grad_enabled(), torch.compiler.is_compiling() in (True, False), torch.jit.is_scripting()),
        lambda x: x.new_zeros(2).fill_(3).add_(1),
        lambda x: (1 in [1, 2], "a" in {"a": 1}, [1, 2].index(2), (1, 1).count(1)),
        lambda x: [y.shape for y in x],
        lambda x: x[..., None, 1:, torch.tensor([0, 1])],
        lambda x: torch.where(x > 2, x, 0.0).masked_fill(x > 5, -1),
    ],
)
@pytest.mark.parametrize("level", ["aten", "torch"])
def test_calls_that_stay_in_the_graph(function: Any, level: str) -> None:
    check(function, lambda: (numbers(),), level)


def test_is_compiling_answers_true() -> None:
    def f(x: torch.Tensor) -> Any:
        return x + 1 if torch.compiler.is_compiling() else x

    same(numbers() + 1, run(capture(f, (numbers(),)), f, (numbers(),)))


def test_callbacks_are_interpreted() -> None:
    def f(x: torch.Tensor) -> Any:
        seen = []

        def key(value: int) -> int:
            seen.append(value)
            return -value

        return sorted([1, 3, 2], key=key), seen, list(map(lambda v: x + v, [1])), list(filter(lambda v: v > 1, [1, 2]))

    check(f, lambda: (numbers(),))


def test_logging_of_constants_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("border")

    def f(x: torch.Tensor) -> Any:
        logger.warning("shape %s", x.shape)
        return x + 1

    with caplog.at_level(logging.WARNING, "border"):
        frame = capture(f, (numbers(),))
        assert not caplog.records
        run(frame, f, (numbers(),))
        run(frame, f, (numbers(),))
    assert [record.getMessage() for record in caplog.records] == ["shape torch.Size([3, 4])"] * 2


def test_a_cached_function_that_warns_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Logger:
        @functools.lru_cache(None)
        def once(self, text: str) -> None:
            print(text)

    logger = Logger()

    def f(x: torch.Tensor) -> Any:
        logger.once("only once")
        return x + 1

    frame = capture(f, (numbers(),))
    for _ in range(2):
        same(numbers() + 1, run(frame, f, (numbers(),)))
    assert capsys.readouterr().out == "only once\n"


def test_a_cached_function_of_constants_answers_from_its_cache() -> None:
    @functools.lru_cache(None)
    def table(size: int) -> torch.Tensor:
        COLLECTED.append(size)
        return torch.ones(size)

    def f(x: torch.Tensor) -> Any:
        return x * table(4)

    COLLECTED.clear()
    table(4)
    frame = check(f, lambda: (numbers(),))
    assert COLLECTED == [4] and len(frame.inputs) == 2


def test_classes_with_new_init_and_metaclass() -> None:
    class Meta(type):
        def __call__(cls, *args: Any) -> Any:
            made = super().__call__(*args)
            made.by_meta = True
            return made

    class Made(metaclass=Meta):
        def __new__(cls, value: Any) -> Any:
            made = super().__new__(cls)
            made.from_new = value
            return made

        def __init__(self, value: Any) -> None:
            self.value = value * 2

    def f(x: torch.Tensor) -> Any:
        made = Made(x)
        return made.value, made.from_new, made.by_meta, made

    check(f, lambda: (numbers(),))


def test_a_user_exception_class_is_caught() -> None:
    class Stop(ValueError):
        def __init__(self, value: Any) -> None:
            super().__init__("stopped", value)
            self.value = value

    def f(x: torch.Tensor) -> Any:
        try:
            raise Stop(x)
        except ValueError as error:
            return error.value + 1, error.args[0], isinstance(error, Stop)

    check(f, lambda: (numbers(),))


def test_autocast_and_no_grad_reach_the_graph() -> None:
    def f(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.T
        with torch.no_grad():
            z = x * 2
        return y, z.requires_grad, (x * 2).requires_grad

    def make() -> tuple[Any, ...]:
        return (numbers().requires_grad_(),)

    check(f, make)
    check(f, make, "torch")


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_what_einsum_asks_about_its_order_is_guarded(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Path:
        """Stands for the package opt_einsum, which may not be installed."""

        @staticmethod
        def contract_path(equation: str, *operands: torch.Tensor, optimize: str) -> Any:
            return [(0, 1), (0, 1)], None

    flags = vars(torch.backends.opt_einsum)["m"]
    for name, value in (("_opt_einsum", Path), ("is_available", lambda: True), ("enabled", True)):
        monkeypatch.setattr(flags, name, value)
    compiled = fusewright.compile(lambda x: torch.einsum("ij,kj,kl->il", [x, x, x]), backend=backend)
    x, layouts = torch.arange(6.0).view(2, 3), set()
    for enabled in (True, False, True):
        monkeypatch.setattr(flags, "enabled", enabled)
        expected = torch.einsum("ij,kj,kl->il", x, x, x)
        layouts.add(expected.stride())
        same(compiled(x), expected)
        assert compiled(x).stride() == expected.stride()
    assert len(layouts) == 2


def test_a_function_that_is_registered_later_is_found():
    @functools.singledispatch
    def apply(value, x):
        return x + 1

    def f(x, value):
        return apply(value, x) * 2

    compiled = fusewright.compile(f, backend="eager")
    x = torch.ones(2)
    assert torch.equal(compiled(x, "a"), f(x, "a"))
    apply.register(str)(lambda value, x: x * 5)
    assert torch.equal(compiled(x, "a"), f(x, "a"))
    assert torch.equal(compiled(x, 1), f(x, 1))


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_function_that_a_torch_function_calls_is_interpreted(backend):
    weights = [1.0]

    def distance(a, b):
        return (a - b).abs().sum(1) * weights[0]

    loss = torch.nn.functional.triplet_margin_with_distance_loss
    norm = torch.nn.PairwiseDistance()

    def f(a, b, c):
        return loss(a, b, c, distance_function=distance), loss(a, b, c, distance_function=norm, swap=True)

    compiled = fusewright.compile(f, fullgraph=True, backend=backend)
    triple = [torch.randn(4, 5) for _ in range(3)]
    for weights[0] in (1.0, 3.0):
        for mine, theirs in zip(compiled(*triple), f(*triple)):
            torch.testing.assert_close(mine, theirs)


@torch.jit.script
def scripted(x: torch.Tensor, times: int) -> torch.Tensor:
    return torch.relu(x) * times


def test_scripted_functions_are_captured_and_traced_ones_break() -> None:
    x = torch.randn(8)
    compiled = fusewright.compile(lambda x: scripted(x, 3) + scripted(x.cos(), times=2), fullgraph=True)
    torch.testing.assert_close(compiled(x), scripted(x, 3) + scripted(x.cos(), 2))
    traced = torch.jit.trace(lambda x: x * 2, x)
    torch.testing.assert_close(fusewright.compile(lambda x: traced(x.cos()) + 1)(x), traced(x.cos()) + 1)


SORTS: dict[str, Callable[[list[Any]], Any]] = {
    "reads the list": lambda values: [values.sort(key=lambda value: seen(len(values), value)), values],
    "changes the list": lambda values: values.sort(key=lambda value: values.append(value) or value),
    "raises": lambda values: values.sort(key=lambda value: 6 // (value - 2)),
    "compares": lambda values: values.sort(key=functools.cmp_to_key(lambda a, b: b - a + len(values))),
    "backwards": lambda values: [values.sort(key=lambda value: -value, reverse=True), values],
}
SEEN: list[int] = []


def seen(length: int, value: Any) -> Any:
    SEEN.append(length)
    return value


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("name", SORTS)
def test_a_list_is_empty_while_it_is_sorted(name: str, backend: str) -> None:
    found = []
    for function in (SORTS[name], fusewright.compile(SORTS[name], backend=backend)):
        values = [3, 1, 2]
        SEEN.clear()
        try:
            result = repr(function(values))
        except (ValueError, ZeroDivisionError) as error:
            result = repr(error)
        found.append((result, list(values), list(SEEN)))
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", ["eager", "native", "aot_eager"])
@pytest.mark.parametrize("kind", ["numbers", "leaf", "result"])
@pytest.mark.filterwarnings("ignore:torch.asarray")
def test_what_asarray_gives_back_requires_a_gradient_as_in_eager(kind: str, backend: str) -> None:
    def made() -> torch.Tensor:
        x = torch.ones(3, requires_grad=kind != "numbers")
        return x * 2 if kind == "result" else x

    def seen(function: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        x = made()
        y = function(x, given)
        return x.requires_grad, y.requires_grad, y is x, y.grad_fn is None, y.dtype, y.data_ptr() == x.data_ptr()

    def program(x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        return torch.asarray(x, **given)

    compiled = fusewright.compile(program, backend=backend, recompile_limit=64)
    flags: list[dict[str, Any]] = [{}, {"requires_grad": False}, {"requires_grad": True}]
    for given in (one | more for one in flags for more in ({}, {"copy": True}, {"dtype": torch.float64})):
        for _ in range(2):
            assert seen(compiled, given) == seen(program, given), given
