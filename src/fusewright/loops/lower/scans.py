"""Running accumulations along one dimension: cumsum, cumprod, cummax, cummin, logcumsumexp.

Takes a tensor and a dimension; gives realised values, one `Scan` each. Always holds: on a CPU float32 sums and products
accumulate in double precision and halves in float32, as ATen's do.
"""

from __future__ import annotations

import torch

from fusewright.loops import ir
from fusewright.loops.ir import Axis, Scan
from fusewright.loops.lower import expressions as ex
from fusewright.loops.lower.driver import Call
from fusewright.loops.lower.registry import Fallback, lowers
from fusewright.loops.lower.values import Value, axes_of, axis_symbols, flat_index, is_one, normalize_dim

KINDS = {
    "cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min", "logcumsumexp": "logaddexp",
}  # fmt: skip


def run_along(
    call: Call, self: Value, dim: int, working: torch.dtype, result_type: object, position_type: object = None
) -> list[Value]:
    low = call.lowering
    if self.ndim == 0:
        raise Fallback("a scan of a scalar")
    dim = normalize_dim(dim, self.ndim)
    if is_one(self.shape[dim]):
        raise Fallback("a scan of one element")
    symbols = axis_symbols(self.shape)
    kept = [k for k in range(self.ndim) if k != dim]
    axes = axes_of([symbols[k] for k in kept], [self.shape[k] for k in kept])
    scanned = Axis(symbols[dim], self.shape[dim])  # type: ignore[arg-type]
    results = [low.new_buffer(type_) for type_ in (result_type, position_type) if type_ is not None]  # type: ignore
    index = flat_index(symbols, results[0].stride)
    if any(buffer.stride != results[0].stride for buffer in results):
        raise Fallback("results of different layouts")
    kind = KINDS[call.target._schema.name.partition("::")[2]]
    finish = ir.cast(ex.accumulator(working), results[0].dtype)
    value = low.read(self, symbols, working)
    if position_type is not None:
        value = ex.rounded(value, self.dtype)
    low.emit(
        Scan(
            low.operation_name(), axes, scanned, kind, value,  # type: ignore[arg-type]
            results[0].name, index, finish,
            results[1].name if len(results) > 1 else None, low.locations,
        )
    )  # fmt: skip
    types = [result_type] if position_type is None else [result_type, position_type]
    return [low.buffer_value(type_, buffer) for type_, buffer in zip(types, results)]  # type: ignore[arg-type]


def accumulation_dtype(call: Call, dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float32 and call.type.device.type == "cpu" else ex.compute_dtype(dtype)


@lowers("cumsum", "cumprod")
def cumulative(call: Call, self: Value, dim: int, *, dtype: torch.dtype | None = None) -> Value:
    return run_along(call, self, dim, accumulation_dtype(call, call.type.dtype), call.type)[0]


@lowers("logcumsumexp")
def logcumsumexp(call: Call, self: Value, dim: int) -> Value:
    return run_along(call, self, dim, accumulation_dtype(call, call.type.dtype), call.type)[0]


@lowers("cummax", "cummin")
def cumulative_extreme(call: Call, self: Value, dim: int) -> tuple[Value, Value]:
    if self.dtype is torch.bool:
        raise Fallback("an extreme of bools")
    result, position = run_along(call, self, dim, ex.compute_dtype(self.dtype), *call.type)
    return result, position
