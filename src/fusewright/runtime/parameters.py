"""Prepared values of a plan: computed from parameters when these have changed, checked natively at every call.

Takes a plan whose last inputs are a `Prepacking`'s usual sizes and results; gives a callable without them.
Always holds: see csrc/parameters.cpp; where PyTorch does not tell a tensor's version, the values are computed at every
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusewright import _native
from fusewright.base.errors import RuntimeFallback
from fusewright.graph.freezing import Prepacking

SAMPLES = 4
"""Places of each parameter whose content is compared at every call: in-place writes through `.data` have no version."""


def sample_offsets(parameter: torch.Tensor) -> tuple[int, ...]:
    """Byte offsets, from the first element, of four-byte words inside a parameter's memory; () when it has gaps or is
    too small."""
    size = parameter.nbytes
    dense = parameter.is_contiguous() or parameter.t().is_contiguous() if parameter.dim() <= 2 else _is_dense(parameter)
    if not dense or size < 4:
        return ()
    last = size - 4
    return tuple(sorted({last * part // (SAMPLES - 1) // 4 * 4 for part in range(SAMPLES)}))


def _is_dense(parameter: torch.Tensor) -> bool:
    order = sorted(range(parameter.dim()), key=lambda axis: (parameter.stride(axis), parameter.size(axis)))
    expected = 1
    for axis in order:
        if parameter.size(axis) != 1 and parameter.stride(axis) != expected:
            return False
        expected *= parameter.size(axis)
    return True


def _preparer(prepacking: Prepacking) -> Callable[..., Any]:
    count = len(prepacking.inputs)

    def prepare(*given: Any) -> Any:
        parameters, sizes = given[:count], given[count:]
        try:
            values = (*sizes, *prepacking.run(parameters, sizes))
        except (ValueError, RuntimeError) as error:
            raise RuntimeFallback(f"what depends on parameters alone could not be computed: {error}") from error
        return values, tuple(parameter.detach() for parameter in parameters), tuple(map(sample_offsets, parameters))

    return prepare


def with_prepacking(plan: Callable[..., Any], prepacking: Prepacking, inputs: int) -> Callable[..., Any]:
    """`plan` without its last inputs, which are prepared. `inputs`: how many are left."""
    prepare = _preparer(prepacking)
    sizes = tuple(position for position, _ in prepacking.usual)
    try:
        return _native.PreparedPlan(plan, prepare, inputs, prepacking.inputs, sizes)
    except NotImplementedError:
        return lambda *given: plan(
            *given, *prepare(*(given[position] for position in (*prepacking.inputs, *sizes)))[0]
        )
