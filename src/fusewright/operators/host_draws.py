"""Draws from the random generators of Python and NumPy, and readings of clocks, as operators: a graph draws at every
call what eager would.

Takes the name of a row of DRAWS, its parameters and, for arrays, a shape; gives a tensor on the CPU. Always holds: the
generators are those of the modules `random` and `numpy.random`, or instances of `random.Random` that this process has
numbered ("random.gauss#3"); draws stay in order and are never removed or merged.
"""

from __future__ import annotations

import itertools
import random
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define(
    "host_draw(str name, Scalar[] parameters, int[]? size) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
HOST_DRAW = torch.ops.fusewright.host_draw.default


@dataclass(frozen=True, slots=True)
class Draw:
    """signature  what gives (parameters, shape or None) for the arguments of a call
    dtype      of the tensor: float64 or int64
    by_sizes   the shape is given by the positional arguments, not by `size`
    follows    the shape follows from the parameters, and is not given
    """

    signature: Callable[..., tuple[tuple[Any, ...], Any]]
    dtype: torch.dtype = torch.float64
    by_sizes: bool = False
    follows: bool = False


def _range(start: Any, stop: Any = None, step: Any = 1) -> tuple[tuple[Any, ...], None]:
    return ((0, start, step) if stop is None else (start, stop, step)), None


DRAWS: dict[str, Draw] = {
    "random.random": Draw(lambda: ((), None)),
    "random.gauss": Draw(lambda mu=0.0, sigma=1.0: ((mu, sigma), None)),
    "random.normalvariate": Draw(lambda mu=0.0, sigma=1.0: ((mu, sigma), None)),
    "random.lognormvariate": Draw(lambda mu, sigma: ((mu, sigma), None)),
    "random.triangular": Draw(lambda low=0.0, high=1.0, *mode: ((low, high, *mode), None)),
    "random.randint": Draw(lambda a, b: ((a, b), None), torch.int64),
    "random.randrange": Draw(_range, torch.int64),
    "random._randbelow_with_getrandbits": Draw(lambda n: ((n,), None), torch.int64),
    "numpy.random.permutation": Draw(lambda n: ((n,), (n,)), torch.int64, follows=True),
    "numpy.random.random": Draw(lambda size=None: ((), size)),
    "numpy.random.random_sample": Draw(lambda size=None: ((), size)),
    "numpy.random.standard_normal": Draw(lambda size=None: ((), size)),
    "numpy.random.uniform": Draw(lambda low=0.0, high=1.0, size=None: ((low, high), size)),
    "numpy.random.normal": Draw(lambda loc=0.0, scale=1.0, size=None: ((loc, scale), size)),
    "numpy.random.rand": Draw(lambda *size: ((), size or None), by_sizes=True),
    "numpy.random.randn": Draw(lambda *size: ((), size or None), by_sizes=True),
    "numpy.random.randint": Draw(
        lambda low, high=None, size=None: ((0, low) if high is None else (low, high), size), torch.int64
    ),
}
"""By module and method of the module's own generator. NumPy imports `numpy.random` when it is first asked for: nothing
here asks before a draw."""


_NUMBERED: weakref.WeakValueDictionary[int, random.Random] = weakref.WeakValueDictionary()
_numbers = itertools.count()
MODULES = "random, numpy.random"
"""The generators of these modules. To ask for their states takes longer than a small graph."""


def numbered(generator: random.Random) -> str:
    """What follows a row's name where an instance is drawn from. It stands for the instance as long as that lives."""
    found = next((number for number, known in _NUMBERED.items() if known is generator), None)
    if found is None:
        found = next(_numbers)
        _NUMBERED[found] = generator
    return f"#{found}"


def row_of(name: str) -> Draw:
    """The row that a node's name stands for."""
    return DRAWS[name.partition("#")[0]]


def limits(name: str, parameters: Sequence[int]) -> tuple[int | None, int | None]:
    """The least and the greatest int that a draw can give; None where it may be below 0."""
    spans = name.startswith(("random.randrange", "random._randbelow", "numpy"))
    values = range(*parameters) if spans else (parameters[0], parameters[-1])
    ends = sorted((values[0], values[-1]))
    return (ends[0], ends[1]) if ends[0] >= 0 else (None, None)


def drawn_from(name: str) -> str:
    """The generators that a draw of this name changes: MODULES, or an instance."""
    return name[name.index("#") :] if "#" in name else MODULES


def states(drawn: str) -> tuple[tuple[Callable[[Any], object], Any], ...]:
    """The states now of what `drawn_from` gives, each with the function that restores it."""
    if drawn == MODULES:
        return (random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())
    instance = _NUMBERED[int(drawn[1:])]
    return ((instance.setstate, instance.getstate()),)


def _draw(name: str, parameters: Sequence[Any], size: Sequence[int] | None) -> torch.Tensor:
    name, _, number = name.partition("#")
    row = DRAWS[name]
    module, _, method = name.rpartition(".")
    of_module = random.random.__self__ if module == "random" else np.random  # type: ignore[attr-defined]
    value = _drawn(row, getattr(_NUMBERED[int(number)] if number else of_module, method), parameters, size)
    return torch.as_tensor(value, dtype=row.dtype, device="cpu")


def _drawn(row: Draw, function: Any, parameters: Sequence[Any], size: Sequence[int] | None) -> Any:
    if size is None or row.follows:
        return function(*parameters)
    return function(*size) if row.by_sizes else function(*parameters, size=tuple(size))


Call = tuple[str, Sequence[Any], Sequence[int] | None]


def foreseen(calls: Sequence[Call]) -> Any:
    """What the last of these draws is going to give, if they are the next ones. No generator moves."""
    name = calls[-1][0]
    _, state = states(drawn_from(name))[name.startswith("numpy")]
    scratch: Any = np.random.RandomState() if name.startswith("numpy") else random.Random()
    (scratch.set_state if name.startswith("numpy") else scratch.setstate)(state)
    value: Any = None
    for name, parameters, size in calls:
        row = name.partition("#")[0]
        value = _drawn(DRAWS[row], getattr(scratch, row.rpartition(".")[2]), parameters, size)
    return value


_LIBRARY.impl("host_draw", _draw, "CompositeExplicitAutograd")


_LIBRARY.define("clock(str name, Tensor[] after) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
CLOCK = torch.ops.fusewright.clock.default
CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
"""Of the module `time`. One is read once the tensors that it comes after are computed: what a program times between
two readings is what lies between them."""


def _read(name: str, after: Sequence[torch.Tensor]) -> torch.Tensor:
    if name not in CLOCKS:  # a file may say anything
        raise ValueError(f"{name[:40]!r} is no clock")
    return torch.tensor(getattr(time, name)(), dtype=torch.float64, device="cpu")


_LIBRARY.impl("clock", _read, "CompositeExplicitAutograd")
