"""What goes over objects of the program's asks each for an iterator, and for its elements, when CPython does: once, in
the order of eager, also where the graph is broken in between.

Each program is run twice on each class, eagerly and compiled; its results and what the methods noted must be equal.
"""

from __future__ import annotations

import collections
import enum
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusewright

CALLED: list[Any] = []


class Made:
    """Its iterator is a list's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[int]:
        CALLED.append(("iter", self.number))
        return iter([self.number, self.number + 1])


class Generating(Made):
    """Its iterator is a generator, which native code makes by a call of its own."""

    def __iter__(self) -> Iterator[int]:
        CALLED.append(("begin", self.number))
        yield self.number
        CALLED.append(("go on", self.number))
        yield self.number


class Itself(Made):
    """Its own iterator: to ask it again begins anew."""

    def __iter__(self) -> Iterator[int]:
        CALLED.append(("iter", self.number))
        self.given = 0
        return self

    def __next__(self) -> int:
        self.given += 1
        CALLED.append(("next", self.number, self.given))
        if self.given > 2:
            raise StopIteration
        return self.given


def extended(made: Callable[[int], Any]) -> list[int]:
    numbers = [0]
    numbers.extend(made(1))
    return numbers


def put_in(made: Callable[[int], Any]) -> list[int]:
    numbers = [0, 5]
    numbers[:1] = made(1)
    return numbers


def updated(made: Callable[[int], Any]) -> set[int]:
    numbers: set[int] = set()
    numbers.update(made(1), made(2))
    return numbers


OVER: dict[str, Callable[[Callable[[int], Any]], Any]] = {
    "chain": lambda made: itertools.chain(made(1), made(2)),
    "chain of a number": lambda made: itertools.chain(made(1), 5, made(2)),
    "chain.from_iterable": lambda made: itertools.chain.from_iterable([made(1), made(2)]),
    "product": lambda made: itertools.product(made(1), made(2)),
    "product of a number": lambda made: itertools.product(made(1), 5, made(2)),
    "zip": lambda made: zip(made(1), made(2), strict=True),
    "zip of a number": lambda made: zip(made(1), 5, made(2), strict=False),
    "map": lambda made: map(max, made(1), made(2)),
    "filter": lambda made: filter(None, made(1)),
    "enumerate": lambda made: enumerate(made(1)),
    "zip_longest": lambda made: itertools.zip_longest(made(1), made(2)),
    "compress": lambda made: itertools.compress(made(1), made(0)),
    "starmap": lambda made: itertools.starmap(max, zip(made(1), made(2), strict=True)),
    "islice": lambda made: itertools.islice(made(1), 1),
    "cycle": lambda made: itertools.islice(itertools.cycle(made(1)), 5),
    "accumulate": lambda made: itertools.accumulate(made(1)),
    "pairwise": lambda made: itertools.pairwise(made(1)),
    "groupby": lambda made: ((key, list(each)) for key, each in itertools.groupby(made(1))),
    "combinations": lambda made: itertools.combinations(made(1), 2),
    "takewhile": lambda made: itertools.takewhile(lambda number: number < 2, made(1)),
    "tee": lambda made: itertools.tee(made(1))[1],
    "merge": lambda made: heapq.merge(made(1), made(2)),
    "sorted": lambda made: sorted(made(1)),
    "extend": extended,
    "a slice": put_in,
    "Counter": lambda made: collections.Counter(made(1)),
    "deque": lambda made: collections.deque(made(1), 3),
    "update": updated,
    "union": lambda made: set().union(made(1), made(4)),
    "intersection": lambda made: {1, 2}.intersection(made(1), made(1)),
    "bytes": lambda made: bytes(made(1)),
    "indexOf": lambda made: [operator.indexOf(made(1), 1)],
}


@pytest.mark.parametrize("broken", ["nowhere", "before it is used", "while it is used"])
@pytest.mark.parametrize("over", OVER)
def test_asked_as_in_eager(over: str, broken: str) -> None:
    make = OVER[over]

    def program(x: torch.Tensor, made: Callable[[int], Any]) -> Any:
        goes = make(made)
        CALLED.append("made")
        if broken == "before it is used":
            fusewright.graph_break()
        given = []
        for one in goes:
            CALLED.append(one)
            given.append(one)
            if broken == "while it is used":
                fusewright.graph_break()
        return x + len(given), given

    def run(function: Callable[..., Any], made: Callable[[int], Any]) -> Any:
        CALLED.clear()
        try:
            total, given = function(torch.zeros(1), made)
        except TypeError as error:
            return str(error), list(CALLED)
        return float(total), given, list(CALLED)

    compiled = fusewright.compile(program, backend="eager")
    for made in (Made, Generating, Itself):
        for _ in range(2):
            assert run(compiled, made) == run(program, made)


def test_a_tensor_that_divides_a_list_of_the_programs_multiplies_it() -> None:
    """`Tensor.__rtruediv__` is Python code of PyTorch's, which asks for another operator."""

    class Listed(list[float]):
        def __rmul__(self, other: Any) -> Any:
            CALLED.append(type(other).__name__)
            return 2.0

    def program(x: torch.Tensor) -> Any:
        return Listed([1.0]) / (x + 1)

    compiled = fusewright.compile(program, backend="eager")
    for _ in range(2):
        CALLED.clear()
        assert (compiled(torch.ones(2)), CALLED) == (2.0, ["Tensor"])


class Rank(enum.IntEnum):
    LOW = 1
    HIGH = 2


def caught(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)


NUMBERED: dict[str, Callable[[Any, Any], Any]] = {
    "enumerate": lambda over, number: list(enumerate(over, number)),
    "islice": lambda over, number: list(itertools.islice(over, number)),
    "combinations": lambda over, number: list(itertools.combinations(over, number)),
    "permutations": lambda over, number: list(itertools.permutations(over, number)),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_a_number_behind_an_iterable_may_be_a_tensor(name: str) -> None:
    """Which one with dimensions is iterable, too. The program catches what is said of others."""
    use = NUMBERED[name]

    def program(x: torch.Tensor, over: Any) -> Any:
        number = x * 1
        return caught(lambda: use(over, number))

    compiled = fusewright.compile(program, backend="eager")
    for over in ([1, 2], (1, 2), "ab", {"a": 1}, range(3)):
        for x in (torch.tensor(1), torch.tensor([1]), torch.ones(3), torch.ones(())):
            assert compiled(x, over) == program(x, over), (over, x)


@pytest.mark.parametrize("other", [Rank.HIGH, True, 2.5, type("Whole", (int,), {})(3)], ids=repr)
def test_products_of_numbers_of_the_run_and_of_others(other: Any) -> None:
    def program(numbers: list[Any], start: int) -> Any:
        return caught(lambda: (math.prod(numbers), math.prod(numbers, start=start)))

    compiled = fusewright.compile(program, backend="eager", dynamic=True, recompile_limit=64)
    for number in range(1, 6):
        for numbers in ([number, other], [other, number], [number, number + 1], []):
            assert compiled(numbers, number) == program(numbers, number)
