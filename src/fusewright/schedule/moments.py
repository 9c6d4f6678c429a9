"""A mean and the sum of squared deviations from it, over data that is read from memory once.

Takes reductions that are cut into chunks; gives those of the chunks and their combination. Each chunk has a mean of its own, its deviations
are taken from that one while the chunk is still near the processor, and chunks combine as Chan, Golub and LeVeque (1979) do:
sum of all chunks of (squares + n * (mean of the chunk - mean)^2). Always holds: it is at least as accurate as two passes over everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusewright.graph.sizes import Dim, Expr, product, substitute
from fusewright.loops import ir
from fusewright.loops.ir import Apply, Axis, Buffer, Constant, Expression, Load, LoopProgram, Reduction
from fusewright.records import dataclass, replace
from fusewright.schedule.expressions import Rewriter


@dataclass(frozen=True, slots=True)
class Chunks:
    """A reduction cut into chunks: axes of its partial results (`chunk`: those that number them), what each still walks, the value there,
    and where partial results are kept."""

    axes: tuple[Axis, ...]
    chunk: tuple[Axis, ...]
    rest: tuple[Axis, ...]
    value: Expression
    buffer: Buffer
    index: Dim

    def reduction(self, operation: Reduction, value: Expression) -> Reduction:
        """The reduction of each chunk, of `value`."""
        return replace(
            operation, name=f"{operation.name}_partial", axes=self.axes, reduced=self.rest, value=value, buffer=self.buffer.name,
            index=self.index, finish=ir.local_value("acc", value.dtype),
        )  # fmt: skip


def find_moments(program: LoopProgram) -> dict[str, str]:
    """Sum of squared deviations from a mean → the sum that this mean comes from, by the names of the operations."""
    means: dict[str, Reduction] = {}
    found: dict[str, str] = {}
    for operation in program.operations:
        if not isinstance(operation, Reduction) or operation.kind != "sum":
            continue
        mean = _mean_deviated_from(operation, means)
        if mean is not None:
            found[operation.name] = mean.name
        elif _is_mean(operation):
            means[operation.buffer] = operation
    return found


def _is_mean(operation: Reduction) -> bool:
    """Whether it stores its accumulator over the number of its points."""
    count = product(axis.extent for axis in operation.reduced)
    match operation.finish:
        case Apply(op="div", args=(ir.LocalValue(), Constant(value=divisor))):
            return isinstance(count, int) and divisor == count
    return False


def _mean_deviated_from(operation: Reduction, means: Mapping[str, Reduction]) -> Reduction | None:
    match operation.value:
        case Apply(op="mul", args=(Apply(op="sub", args=(x, Load(buffer=name, index=index, bindings=()))) as deviation, same)):
            mean = means.get(name)
            if mean is None or same is not deviation or x.dtype is not mean.value.dtype:
                return None
            renamed = _same_space(mean, operation)
            if renamed is not None and _moved(mean.value, renamed) is x and substitute(mean.index, renamed) == index:
                return mean
    return None


def _same_space(mean: Reduction, operation: Reduction) -> dict[Expr, Dim] | None:
    """The loop variables of the first as those of the second, where both walk the same extents."""
    pairs = list(zip((*mean.axes, *mean.reduced), (*operation.axes, *operation.reduced)))
    if len(mean.axes) != len(operation.axes) or len(mean.reduced) != len(operation.reduced):
        return None
    if any(a.extent != b.extent for a, b in pairs):
        return None
    return {a.symbol: b.symbol for a, b in pairs}


def _moved(value: Expression, renamed: Mapping[Expr, Dim]) -> Expression:
    mapping = dict(renamed)
    return Rewriter(
        dim=lambda index: substitute(index, mapping), load=lambda node: None, local=lambda node: node, bind=lambda old, value: old
    ).visit(value)


def squares_of_chunks(operation: Reduction, chunks: Chunks, sums: Chunks) -> tuple[Reduction, Reduction]:
    """The squared deviations of each chunk from its own mean, and what they give together. sums: of the same chunks."""
    dtype = chunks.value.dtype
    points = ir.constant(math.prod(_known(axis) for axis in chunks.rest), dtype)
    match operation.value, chunks.value:
        case Apply(args=(Apply(args=(_, mean)), _)), Apply(args=(Apply(args=(x, _)), _)):
            pass
        case _:
            raise AssertionError("not a sum of squared deviations")
    # Both were cut alike, but into loop variables of their own.
    renamed: dict[Expr, Dim] = {a.symbol: b.symbol for a, b in zip(sums.axes, chunks.axes)}
    total = ir.load(sums.buffer.name, substitute(sums.index, renamed), sums.buffer.dtype)
    own_mean = ir.apply("div", total, points, dtype=dtype)
    inside = _square(ir.apply("sub", x, own_mean, dtype=dtype))
    between = _square(ir.apply("sub", own_mean, mean, dtype=dtype))
    squares = ir.load(chunks.buffer.name, chunks.index, dtype)
    value = ir.apply("add", squares, ir.apply("mul", points, between, dtype=dtype), dtype=dtype)
    return chunks.reduction(operation, inside), replace(operation, reduced=chunks.chunk, value=value)


def _square(value: Expression) -> Expression:
    return ir.apply("mul", value, value, dtype=value.dtype)


def _known(axis: Axis) -> int:
    assert isinstance(axis.extent, int)
    return axis.extent
