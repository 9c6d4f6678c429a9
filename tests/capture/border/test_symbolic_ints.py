"""Python ints that change from call to call: symbolic from the second value on, with eager's results for whatever a program does with them."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import math
import operator
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Captured
from fusewright.tools.bench import same

Program = Callable[[torch.Tensor, int], Any]

# Programs that keep the int symbolic: two captures serve all values.
SYMBOLIC: dict[str, Program] = {
    "isinstance": lambda x, n: x * (2 if isinstance(n, int) else 3),
    "type": lambda x, n: x * (2 if type(n) is int else 3),
    "arange": lambda x, n: x.sum() + torch.arange(n),
    "repeat": lambda x, n: x.repeat(n),
    "scalars": lambda x, n: torch.add(x, x, alpha=n) + (x > n) + x.clamp(max=n) + x.pow(n),
    "eye": lambda x, n: torch.eye(n) + torch.zeros(n, n) + torch.tril(torch.ones(n, n)),
    "arithmetic": lambda x, n: x * (n * 3 - 1) + n // 2,
}

made_of: dict[type, Callable[..., Any]] = {set: set}


def hashed(function: Callable[[], Any]) -> Any:
    """What the function gives; a program that looks after its own errors would see one that eager does not raise."""
    try:
        return function()
    except TypeError as error:
        return str(error)


@functools.lru_cache
def remembered(sizes: tuple[int, ...]) -> int:
    return sum(sizes)


# Programs that need the value: it is guarded.
SPECIALISED: dict[str, Program] = {
    "dict": lambda x, n: x * {6: 1.0, 7: 2.0, 8: 3.0}.get(n, 9.0),
    "in": lambda x, n: x * (2 if n in {6, 7} else 3) * (2 if n in (6, 7) else 3),
    "keys": lambda x, n: x * len({n: 1, 7: 2}) * len({n, 6}),
    "index": lambda x, n: x + list(range(20))[n] + sum([1.0] * n),
    "text": lambda x, n: (
        x * len(f"{n}" + str(n) + f"{n:4d}" + "%d" % n + "{}".format(n) + "ab" * n)  # noqa: UP031, UP032
        + int(str(n))
        + int(f"{(n,)}"[1:-2])
    ),
    "sets": lambda x, n: hashed(lambda: (
        x * len(made_of[set]([n, 7])), made_of[set]((n, 1)), frozenset(iter([n])), {1, 7}.union([n]),
        {1, 7} & set(map(abs, [n, 7])),
        {(n, 1): n}, dict.fromkeys([n]), collections.Counter([n, 7, n]), dict(zip([n], "a")), {1, 7}.isdisjoint([n]),
    )),
    "hashes": lambda x, n: hashed(lambda: (x * hash((n, 2)), remembered((n, 3)), set(zip([n], [7])), {n} <= {7, 8})),
    "maths": lambda x, n: x / math.sqrt(n) + math.gcd(n, 4) + math.ceil(n / 4) + n**-0.5 + 2**n + round(n * 1.5),
    "bits": lambda x, n: x * (n & 1) + (n << 1) + (n >> 1) + (n | 8) + n.bit_length() + (~n) + hash(n),
    "divmod": lambda x, n: x * divmod(n, 4)[1] + n % 3 + float(n) + bool(n),
    "order": lambda x, n: x * min(n, 7) + max(n, 3) + sorted([n, 3, 9])[1] + (n > 7),
    "loop": lambda x, n: functools.reduce(lambda a, b: a + b, [x * i for i in range(n)], x),
    "result": lambda x, n: (x + 1, n, n + 1, [n], {"a": n}, n * 0.5, n > 7),
}


def types_of(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [types_of(item) for item in value]
    return [types_of(item) for item in value.values()] if isinstance(value, dict) else type(value)


def run(program: Program) -> int:
    """Compares the compiled program with eager over several values; gives the number of captures."""
    captures: list[Captured] = []
    compiled = fusewright.compile(program, fullgraph=True)
    x = torch.randn(4)
    with STREAM.listening(lambda event: captures.append(event) if isinstance(event, Captured) else None):
        for n in (6, 7, 8, 9, 1, 0, 6):
            try:
                expected = program(x, n)
            except ZeroDivisionError:
                continue
            got = compiled(x, n)
            assert same(got, expected) and types_of(got) == types_of(expected), n
    return len(captures)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_an_int_that_changes_becomes_symbolic(name: str) -> None:
    assert run(SYMBOLIC[name]) <= 4  # the first value, the symbolic one, 1 and 0


@pytest.mark.parametrize("name", SPECIALISED)
def test_a_program_that_needs_the_value_gets_it(name: str) -> None:
    run(SPECIALISED[name])


@dataclass
class State:
    position: int
    table: torch.Tensor


def test_a_counter_and_a_growing_tensor_of_an_argument_object_are_symbolic_at_once() -> None:
    def step(x: torch.Tensor, state: State) -> torch.Tensor:
        state.table = torch.cat([state.table, x])
        state.position += x.shape[0]
        return state.table.sum(0) + state.position

    captures: list[Captured] = []
    compiled = fusewright.compile(step, fullgraph=True)
    mine, theirs = State(2, torch.randn(3, 4)), State(2, torch.empty(0))
    theirs.table = mine.table
    with STREAM.listening(lambda event: captures.append(event) if isinstance(event, Captured) else None):
        for _ in range(6):
            x = torch.randn(2, 4)
            assert torch.equal(compiled(x, mine), step(x, theirs))
            assert (
                mine.position == theirs.position
                and type(mine.position) is int
                and torch.equal(mine.table, theirs.table)
            )
    assert len(captures) == 1  # what leaves a larger tensor in its argument will meet it again


def test_what_a_module_holds_stays_static() -> None:
    class Scale(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size
            self.register_buffer("weight", torch.randn(size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.size

    captures: list[Captured] = []
    with STREAM.listening(lambda event: captures.append(event) if isinstance(event, Captured) else None):
        for size in (3, 4, 5):
            module, x = Scale(size), torch.randn(size)
            assert torch.equal(fusewright.compile(module)(x), module(x))
    weights = [
        node.meta["type"]
        for event in captures
        for node in event.graph.nodes
        if node.op == "placeholder" and "weight" in node.name
    ]
    assert [tuple(weight.shape) for weight in weights] == [(3,), (4,), (5,)]


@pytest.mark.parametrize(
    "shape", [lambda n: (1, n), lambda n: (1, 3, n, 4), lambda n: (2, 1, n, 4), lambda n: (n, 1, 4)]
)
def test_a_dimension_of_size_one_has_no_stride_of_its_own(shape: Callable[[int], tuple[int, ...]]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x * 2], dim=-1) * 3

    captures: list[Captured] = []
    compiled = fusewright.compile(program, fullgraph=True)
    with STREAM.listening(lambda event: captures.append(event) if isinstance(event, Captured) else None):
        for n in (5, 6, 7, 8, 9):
            x = torch.randn(shape(n))
            assert torch.equal(compiled(x), program(x))
    assert len(captures) == 2


# What Python refuses for some values, its result unused: as a tensor operation it would give an infinity or NaN.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "division": lambda n: 1 / (n - 3),
    "floor division": lambda n: n // (n - 3),
    "remainder": lambda n: n % (n - 3),
    "logarithm": lambda n: math.log(n - 3),
    "root": lambda n: math.sqrt(n - 3),
    "root of a quotient": lambda n: math.sqrt(1 / (n - 2.5)),
    "power": lambda n: (n - 3.0) ** -1,
    "overflow": lambda n: math.exp(n * 100),
    "overflow of a power": lambda n: 1e100**n,
    "cosine": lambda n: math.cos(n * 1e308),
}


@pytest.mark.parametrize(("kind", "dynamic"), [(int, None), (int, True), (float, None)])
@pytest.mark.parametrize("name", REFUSED)
def test_what_python_refuses(name: str, dynamic: bool | None, kind: type) -> None:
    compute = REFUSED[name]

    def program(x: torch.Tensor, n: Any) -> torch.Tensor:
        try:
            compute(n)
        except (ArithmeticError, ValueError) as error:
            return x * len(str(error))
        return x + 1

    compiled = fusewright.compile(program, dynamic=dynamic, recompile_limit=20)
    x = torch.ones(2)
    for n in (7, 6, 3, 2, 1, 8, 0, 3, 4):
        assert torch.equal(compiled(x, kind(n)), program(x, kind(n))), n


def test_a_refusal_costs_no_compile() -> None:
    captures: list[Captured] = []
    compiled = fusewright.compile(lambda x, n: x / math.sqrt(n) + math.exp(-n / 100) + 0.9**n, fullgraph=True)
    with STREAM.listening(lambda event: captures.append(event) if isinstance(event, Captured) else None):
        for n in range(1, 9):
            compiled(torch.ones(2), n)
    assert len(captures) == 2


def _stored(x: torch.Tensor, i: int) -> torch.Tensor:
    y = x.clone()
    y[i] += 1
    y[:, i] = x[:, 0]
    y[i, 1:] = x[i - 1, 1:]
    y[i + 1 :] *= 2
    return y


def _masked(x: torch.Tensor, i: int) -> torch.Tensor:
    y = x > 0.5
    y[i + 1 :] &= x[i + 1 :] > 0.7
    return y


INDEXED = {
    "row": lambda x, i: x[i] * 2,
    "column": lambda x, i: x[:, i] * 2,
    "from the end": lambda x, i: x[-i - 1] * 2,
    "beside others": lambda x, i: x[..., None, i, :i] * 2,
    "two": lambda x, i: x[i, i] * 2,
    "no number": lambda x, i: (x[None] * i, x[()] * i, x[None, i]),
    "stores": _stored,
    "stores of a part": _masked,
}


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_varies_needs_no_compile_for_each_value(name: str, backend: str) -> None:
    function, graphs = INDEXED[name], []

    def counting(gm: torch.fx.GraphModule, inputs: list[object]) -> object:
        graphs.append(gm)
        return gm.forward

    compiled = fusewright.compile(function, fullgraph=True, backend=counting if backend == "eager" else backend)
    x = torch.rand(9, 9)
    for i in (2, 3, 4, 5, 6, 7):
        torch.testing.assert_close(compiled(x, i), function(x, i))
    assert len(graphs) <= 3
    with pytest.raises(IndexError):
        fusewright.compile(INDEXED["row"], backend=backend)(x, 9)


SHOWN: tuple[Callable[[Any], Any], ...] = (
    str, repr, lambda held: f"{held}{held!r:>9}", lambda held: operator.mod("%s %s", (held, 1)), "{}".format, lambda held: str((held,)),
    lambda held: held.__repr__(), lambda held: str(ValueError(held)), lambda held: str({"a": [held]}), print,
)  # fmt: skip


def test_the_text_of_a_container_that_holds_itself(capsys: pytest.CaptureFixture[str]) -> None:
    listed: list[Any] = [1, 2]
    named: dict[str, Any] = {"n": 3, "l": listed}
    listed.append((named, listed))

    def program(x: torch.Tensor, show: Any, inside: bool) -> Any:
        own = [named["n"]]
        own.append(own)
        return show(own if inside else named), x + 1

    for show in SHOWN:
        for inside in (False, True):
            compiled = fusewright.compile(program)
            for number in (3, 4, 5):
                named["n"] = listed[0] = number
                ours = compiled(torch.ones(1), show, inside)[0], capsys.readouterr().out
                assert ours == (program(torch.ones(1), show, inside)[0], capsys.readouterr().out)


def test_what_holds_itself_often_is_compared_at_once() -> None:
    """What is looked for in it is looked for once in each container, not once on each way to it."""
    listed: list[Any] = [1]
    listed += [listed] * 40

    def program(x: torch.Tensor, n: int) -> Any:
        return max(listed, listed) is listed, listed <= listed, listed == [n], [n, listed] == [n, listed], x * n

    compiled = fusewright.compile(program, dynamic=True)
    for n in (2, 3):
        assert compiled(torch.ones(1), n)[0] is True


KEEPING: dict[str, Callable[[int], Any]] = {
    "fraction": lambda n: fractions.Fraction(n), "of two": lambda n: fractions.Fraction(n, 7),
    "sum": lambda n: fractions.Fraction(1, 3) + n, "product": lambda n: n * fractions.Fraction(1, 3),
    "limited": lambda n: fractions.Fraction(355, 113).limit_denominator(n), "number": lambda n: uuid.UUID(int=n),
    "date": lambda n: datetime.date(2000, 1, n), "decimal": lambda n: decimal.Decimal(n) / 3,
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", KEEPING)
def test_what_leaves_as_it_is_holds_the_number_of_its_call(name: str, dynamic: bool | None) -> None:
    program = KEEPING[name]
    compiled = fusewright.compile(program, dynamic=dynamic)
    for n in (2, 3, 4, 5, 20):
        assert compiled(n) == program(n)
        assert repr(compiled(n)) == repr(program(n))


TWO = 2
IDENTITY: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "a constant": lambda x, n: (n is TWO, n is not TWO, operator.is_(n, 3), operator.is_not(n, 300)),
    "none of the kind": lambda x, n: (n is None, n is True, n is x, n is float(TWO)),
    "itself": lambda x, n: (n is n, [n][0] is n, n + 0 is n, n + 1 is n),
    "a size": lambda x, n: (x.shape[0] is n, x.shape[0] is x.size(0), len(x) is x.shape[0], x.numel() is x.shape[0]),
    "elements": lambda x, n: ([v for v in (1, 2, 3) if v is n], {a: b for a in [2, 300] for b in [n] if a is not b}),
    "negative": lambda x, n: (-n is -TWO, -n - 4 is -3 - TWO, n - n is TWO - 2),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", IDENTITY)
def test_small_ints_are_one_object_each(name: str, dynamic: bool | None) -> None:
    def program(x: torch.Tensor, n: int) -> Any:
        return IDENTITY[name](x, n), x * n

    compiled = fusewright.compile(program, backend="eager", dynamic=dynamic)
    for n in (3, 2, 5, 2, 1):
        for size in (n, 4):
            assert compiled(torch.ones(size), n)[0] == program(torch.ones(size), n)[0]
