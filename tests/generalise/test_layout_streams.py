"""Random programs over tensors of changing sizes, layouts and ranks: each call gives what eager gives, and leaves the memory that eager leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Compiled, Event, InternalError, Reused
from fusewright.tools import served_cases
from tests.generalise.layout_programs import program

SAMPLE, SWEEP = 30, 4000


def window(shape: tuple[int, ...], *place: slice) -> torch.Tensor:
    return torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)[(*place,)]


STREAMS: dict[str, tuple[Callable[..., Any], list[Callable[[], tuple[torch.Tensor, ...]]]]] = {
    "columns": (lambda x: x * 2, [lambda w=w, k=k: (window((3, w), slice(None), slice(k)),) for w, k in ((4, 1), (6, 3), (5, 1))]),
    "writes to columns": (
        lambda x: x.add_(1), [lambda w=w, k=k: (window((30, w), slice(None), slice(k)),) for w, k in ((4, 1), (200000, 3), (2, 1))],
    ),
    "first columns of caches": (
        lambda x: (x * 2, x.sum(0)), [lambda n=n, w=w: (window((n, w), slice(None), slice(1)),) for n, w in ((3, 4), (5, 4), (5, 9), (1, 3))],
    ),
    "one row after an expanded one": (
        lambda x: (x + 1, x.sum(1)),
        [
            lambda: (torch.arange(4.0).expand(3, 4),), lambda: (torch.arange(6.0).expand(5, 6),), lambda: (window((1, 6)),),
            lambda: (window((4, 6), slice(2, 3)),), lambda: (torch.empty(0, 6),),
        ],
    ),
    "no column after an expanded one": (
        lambda x: x.reshape(-1).sum(-1), [lambda n=n: (torch.empty(1, 1).fill_(2).expand(n, 1) if n else torch.empty(0, 1),) for n in (1, 2, 0)],
    ),
    "another rank": (
        lambda x, v: x + v, [lambda s=s: (window((2, s[-1])), window(s)) for s in ((1, 3), (1, 4), (4,), (1, 1), (1,))],
    ),
    "a view of what is expanded in front": (
        lambda x: x.expand(2, *x.shape).view(-1) + 1, [lambda s=s: (window(s),) for s in ((1, 5, 8, 4), (1, 1, 3, 1), (3, 5, 8, 4))],
    ),
    "a view of rows of a larger tensor": (
        lambda x: x.view(-1) * 2, [lambda n=n, w=w, k=k: (window((n, 1, w), slice(None), slice(None), slice(k)),) for n, w, k in ((4, 5, 5), (4, 5, 3), (6, 4, 2), (1, 4, 2))],
    ),
    "a value from another layout": (
        lambda x, y: (x.copy_(y) + y, x * 2), [lambda n=n: (window((n, 10), slice(None), slice(None, None, 2)), window((5, n)).t()) for n in (4, 3, 6, 1)],
    ),
    "writes to a part of what is expanded": (
        lambda x: x[:, 0].mul_(2) + x[0], [lambda n=n: (torch.ones(n, 1).expand(n, 3),) for n in (2, 4, 5, 1)],
    ),
    "the strides of single elements": (
        lambda x: (x.relu(), x.relu().stride(), (x.clone() + x).stride()),
        [lambda n=n, s=s: (window((n, 3, 4, 5))[:s, :s].transpose(2, 3),) for n, s in ((2, 3), (1, 3), (1, 1), (4, 1), (1, 2), (5, 4))],
    ),
    "writes to a part of windows": (
        lambda x: (x[..., :1].mul_(3), x + 1), [lambda n=n: (window((n + 3,)).as_strided((n, 3), (1, 1)),) for n in (4, 6, 5, 1, 7)],
    ),
}  # fmt: skip
"""Programs, and what makes the arguments of one call after another."""


def described(value: Any, known: list[torch.Tensor]) -> Any:
    """What a result is besides its elements. `known`: the tensors met before it; whose memory it has in common is told by their place."""
    if isinstance(value, (tuple, list)):
        return tuple(described(item, known) for item in value)
    if not isinstance(value, torch.Tensor):
        return type(value), value
    same = next((place for place, other in enumerate(known[:2]) if other is value), None)  # an argument
    shared = layout = None
    if value.numel():
        address = value.untyped_storage().data_ptr()
        shared = next(
            (
                place
                for place, other in enumerate(known)
                if other.numel() and other.untyped_storage().data_ptr() == address
            ),
            None,
        )
        layout = [stride for size, stride in zip(value.shape, value.stride()) if size != 1]
        layout = (layout, value.storage_offset()) if shared is not None else layout
    known.append(value)
    return tuple(value.shape), value.dtype, same, shared, layout


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor lies in."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def outcome(function: Any, args: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """(what tells the call apart from others, the elements of its results and of its arguments' memory)."""
    memory = [whole(arg) for arg in args]
    try:
        result = function(*args)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return type(error), memory
    known = list(args)
    facts = [(tuple(arg.shape), arg.stride()) for arg in args if arg.numel() and 1 not in arg.shape]
    return (described(result, known), facts), [*tensors(result), *memory]


def compare(function: Any, calls: Sequence[Callable[[], Sequence[torch.Tensor]]], where: str, **options: Any) -> None:
    """One program over its stream of calls; each makes its arguments anew."""
    events: list[Event] = []
    compiled = fusewright.compile(function, recompile_limit=32, **options)
    with torch.no_grad(), STREAM.listening(events.append), STREAM.listening(served_cases.listen):
        for number, arguments in enumerate(calls):
            given = arguments()
            here = f"{where}, call {number} of {[(tuple(arg.shape), arg.stride()) for arg in given]}"
            expected, elements = outcome(function, given)
            try:
                found, mine = outcome(compiled, arguments())
            except Exception as error:
                raise AssertionError(f"{here}: {type(error).__name__}: {error}") from error
            assert found == expected, f"{here}: expected {expected}, found {found}"
            for place, (one, other) in enumerate(zip(mine, elements, strict=True)):
                torch.testing.assert_close(
                    one,
                    other,
                    rtol=1e-4,
                    atol=1e-4,
                    equal_nan=True,
                    check_stride=False,
                    msg=lambda text: f"{here}: tensor {place}: {text}",
                )
    bad = [event for event in events if isinstance(event, InternalError)]
    assert not bad, f"{where}: {bad}"


def check(seed: int) -> None:
    function, cases, source = program(seed)
    texts = "\n".join(map(str, cases))
    compare(
        function,
        [case.tensors for case in cases],
        f"seed {seed}:\n{source}{texts}\n",
        dynamic=True if seed % 3 == 0 else None,
    )


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", STREAMS)
def test_given(name: str, dynamic: bool | None) -> None:
    function, calls = STREAMS[name]
    compare(function, calls, name, dynamic=dynamic)


def test_what_leaves_a_frame_under_one_name_may_be_two_objects() -> None:
    """Both graphs, and the texts of what is made of their results, are equal."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[], int]]:
        return x * 2, (lambda: 1) if x.shape[0] == 1 else (lambda: 2)

    compiled = fusewright.compile(f, dynamic=True)
    with torch.no_grad():
        assert [compiled(torch.ones(n, 4))[1]() for n in (3, 5, 1, 4)] == [2, 2, 1, 2]


def test_code_is_reused_under_the_settings_that_it_was_made_under() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.t().reshape(-1) * 2

    events: list[Event] = []
    compiled = fusewright.compile(f, dynamic=True)
    with torch.no_grad(), STREAM.listening(events.append):
        compiled(torch.randn(5, 4))
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            compiled(torch.randn(0, 4))
        finally:
            torch.set_num_threads(threads)
        compiled(torch.randn(0, 4))
    assert [type(event) for event in events if isinstance(event, Compiled | Reused)] == [Compiled, Compiled, Reused]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(SAMPLE // 10))
def test_streams(part: int) -> None:
    for seed in range(part * 10, part * 10 + 10):
        check(seed)
        fusewright.reset()


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(SWEEP // 100))
def test_sweep(part: int) -> None:
    for seed in range(1000 + part * 100, 1100 + part * 100):
        check(seed)
        fusewright.reset()
