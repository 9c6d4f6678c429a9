"""What the lowering tests share: run a function eagerly and through its loops, and compare values, dtypes, strides and aliasing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusewright.loops.ir import Extern, LoopProgram
from tests.loops import tracing

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    # Half results are rounded once here and after every operator in eager.
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


def compare(found: Any, wanted: Any) -> None:
    if not isinstance(wanted, Tensor):
        assert found == wanted
        return
    torch.testing.assert_close(found, wanted, equal_nan=True, **TOLERANCE.get(wanted.dtype, {}))
    if wanted.numel():
        laid_out = [(a, b) for a, b, n in zip(found.stride(), wanted.stride(), wanted.shape) if n > 1]
        assert all(a == b for a, b in laid_out), f"strides {found.stride()}, eager has {wanted.stride()}"


def check(
    function: Callable[..., Any], *inputs: Tensor, externs: Sequence[str] = (), mutating: bool = False
) -> LoopProgram:
    """Compares with eager; `externs` are the operators (without "aten.") that may and must stay library calls. Inputs may be updated."""
    ours = [clone_with_layout(t) for t in inputs]
    theirs = [clone_with_layout(t) for t in inputs]
    program, found = tracing.run(function, ours, mutating)
    wanted = function(*theirs)
    wanted = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        compare(a, b)
    for a, b in zip(ours, theirs):
        compare(a, b)
    assert sorted(called(program)) == sorted(externs), f"library calls are left: {called(program)}"
    return program


def clone_with_layout(tensor: Tensor) -> Tensor:
    """A copy over a copy of the whole storage: strides, gaps and offset included."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def called(program: LoopProgram) -> list[str]:
    """The names of the library operators that the program calls, each once."""
    return list(Counter(str(op.target).removeprefix("aten.") for op in program.operations if isinstance(op, Extern)))
