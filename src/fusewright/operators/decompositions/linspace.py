"""torch.linspace over a symbolic number of steps, whose operator needs the number.

Takes the call's arguments; gives the recorded result, or None for what this file does not know. Always holds: as in
eager's kernel, the first half counts up from the start and the second half down from the end, so that both ends are
exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.sizes.expressions import Relation
from fusewright.sizes.interfaces import Recorder
from fusewright.sizes.symint import dim_of

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_DTYPES = (torch.float32, torch.float64)  # eager computes in the result's own precision


def linspace(recorder: Recorder, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `torch.linspace(*args, **kwargs)`, or None."""
    given: dict[str, Any] = dict(zip(("start", "end", "steps"), args)) | kwargs
    start: Any = given.get("start")
    end: Any = given.get("end")
    steps: Any = given.get("steps")
    options = {
        name: value for name, value in given.items() if name not in ("start", "end", "steps") and value is not None
    }
    dtype = options.get("dtype", torch.get_default_dtype())
    if len(args) > 3 or type(steps) is not torch.SymInt or recorder.level != "aten" or dtype not in _DTYPES:
        return None
    if type(start) not in _NUMBERS or type(end) not in _NUMBERS or not options.keys() <= {"dtype", "device"}:
        return None
    assert recorder.env is not None  # a symbolic number of steps came with it
    if not recorder.env.guard(Relation("<=", 0, dim_of(steps))):
        return None  # eager's error
    places = call(torch.arange, (steps,), {**options, "dtype": dtype})
    step = (end - start) / torch.sym_max(steps - 1, 1)
    up = call(torch.add, (call(torch.mul, (places, step), {}), start), {})
    down = call(torch.rsub, (call(torch.mul, (call(torch.rsub, (places, steps - 1), {}), step), {}), end), {})
    return call(torch.where, (call(torch.lt, (places, torch.sym_max(steps // 2, 1)), {}), up, down), {})
