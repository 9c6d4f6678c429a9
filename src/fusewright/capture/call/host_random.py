"""Calls of the random generators of Python and NumPy, and of clocks: drawn and read when the compiled code runs.

Takes a call of a method of the modules' own generators, or of a `random.Random` of the program's; gives a number or an
array whose value nobody knows yet. Always holds: a draw is an operator of the graph (operators/host_draws.py), so the
generator advances as in eager; what cannot be one (NumPy's other generators, a seed, a choice) is a graph break.
"""

from __future__ import annotations

import math
import random
import sys
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.foresight import MOST
from fusewright.capture.border.native import native
from fusewright.capture.border.values import array as arrays
from fusewright.operators.host_draws import CLOCK, CLOCKS, DRAWS, HOST_DRAW, limits, numbered
from fusewright.sizes.symfloat import float_of_input, float_of_tensor
from fusewright.sizes.tensor_type import TensorType

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]


def is_generator(owner: object) -> bool:
    """Whether it is a generator of Python or NumPy; without `numpy.random`, which NumPy imports when it is first asked
    for, none is NumPy's."""
    kind = type(owner)  # not its `__class__`, which may be the program's code
    if issubclass(kind, random.Random):
        return True
    return "numpy.random" in sys.modules and issubclass(kind, (np.random.RandomState, np.random.Generator))


def _is_numpys(owner: object) -> bool:
    rand: Any = np.random.rand
    return owner is rand.__self__


def draws(owner: Any, method: Any) -> bool:
    """Whether a method of a generator is a row's concern: what is written in Python is interpreted, unless a row draws
    it as a whole."""
    if type(method) is not types.FunctionType:
        return True
    return type(owner) is random.Random and f"random.{method.__name__}" in DRAWS


def call_method(tracer: Tracer, name: str, owner: Any, args: Args, kwargs: Kwargs) -> Any:
    """`owner.name(*args, **kwargs)` of a generator."""
    world, recorder = tracer.world, tracer.recorder
    row = f"{'random' if isinstance(owner, random.Random) else 'numpy.random'}.{name}"
    if row not in DRAWS or not (owner is _PYTHON or type(owner) is random.Random or _is_numpys(owner)):
        raise GraphBreak("host-random", f"{type(owner).__qualname__}.{name}")
    world.guard_identity(owner)
    parameters, size = _given(row, args, kwargs)
    drawn = row
    if type(owner) is random.Random and owner is not _PYTHON:
        if not world.is_raw(owner):
            raise GraphBreak("host-random", "a generator that was made inside")
        drawn += numbered(owner)
    index = world.foreseen.note(drawn, parameters, size)
    if size is not None:
        world.uses_arrays = True
        return arrays.result(world, world.torch_call(HOST_DRAW, (drawn, parameters, size), {}))
    whole = DRAWS[row].dtype is torch.int64
    if recorder.env is None or (whole and not tracer.assumptions.data_sizes):
        raise GraphBreak("host-random", f"a number drawn by {row}")
    if recorder.level != "aten" and not whole:
        recorder.lacks_form("host-random", f"a number drawn by {row}")
    tensor = world.torch_call(HOST_DRAW, (drawn, parameters, None), {})
    if tracer.assumptions.foresees:
        if not whole:
            return float_of_input(recorder, tensor, world.foreseen.float(index))
        value = world.foreseen.int(index, limits(drawn, parameters))
        if value is not None:
            return value
        if name.startswith("_randbelow"):  # a choice, a shuffle or a sample asks which element it is
            raise GraphBreak("host-random", f"a choice among more than {MOST}")
    return world.torch_call(torch._C.TensorBase.item, (tensor,), {}) if whole else float_of_tensor(recorder, tensor)


def _clock(name: str) -> Callable[[Tracer, Args, Kwargs], Any]:
    """A reading of a clock, as a number that is known when the graph runs."""

    def read(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
        recorder = tracer.recorder
        if recorder.env is None:
            raise GraphBreak("clock", f"time.{name}")
        if recorder.level != "aten":
            recorder.lacks_form("clock", f"time.{name}")
        nodes = recorder.graph.nodes
        after = [node for node in nodes if not node.users and isinstance(node.meta.get("type"), TensorType)]
        after = [node for node in after if node.op == "call_function"]
        return float_of_tensor(recorder, recorder.record(CLOCK, (name, after), TensorType((), (), torch.float64, _CPU)))

    return read


_CPU = torch.device("cpu")
ROWS = [(getattr(time, name), _clock(name)) for name in CLOCKS]


def _given(row: str, args: Args, kwargs: Kwargs) -> tuple[list[Any], list[int] | None]:
    """(the parameters, the shape of an array): numbers that are known, and that the generator does not refuse."""
    try:
        parameters, size = DRAWS[row].signature(*args, **kwargs)
    except TypeError as error:
        raise GraphBreak("host-random", f"{row}: {error}") from error
    size = (size,) if type(size) is int else size
    known = all(type(value) in (int, float) for value in parameters)
    shaped = size is None or (
        type(size) in (tuple, list) and all(type(extent) is int and extent > 0 for extent in size)
    )
    if known and not _is_allowed(row, parameters) and row.startswith("random."):  # what Python raises, if it does
        native(getattr(random.Random(0), row.partition(".")[2]), *parameters)
    if not known or not shaped or size in ((), []) or not _is_allowed(row, parameters):
        raise GraphBreak("host-random", f"{row} with parameters that are no plain numbers")
    return list(parameters), None if size is None else list(size)


def _is_allowed(row: str, parameters: tuple[Any, ...]) -> bool:
    if DRAWS[row].dtype is torch.int64:
        fit = all(type(value) is int and -(2**63) <= value <= 2**63 for value in parameters)
        return fit and _WHOLE[row](parameters)
    if row == "numpy.random.normal" and not parameters[1] >= 0:
        return False
    return all(math.isfinite(value) for value in parameters)


_WHOLE: dict[str, Callable[[tuple[Any, ...]], bool]] = {
    "numpy.random.randint": lambda given: given[0] < given[1],
    "numpy.random.permutation": lambda given: given[0] > 0,
    "random._randbelow_with_getrandbits": lambda given: 0 < given[0] < 2**63,
    "random.randint": lambda given: given[0] <= given[1] < 2**63,
    "random.randrange": lambda given: given[2] != 0 and len(range(*given)) > 0,
}
"""By the rows whose result is an int: whether the generator takes the parameters, and 64 bits hold what it gives."""
