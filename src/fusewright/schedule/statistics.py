"""A mean and the sum of squared deviations from it, in one pass over memory.

Takes reductions that are cut into chunks; gives those of the chunks and their combination. Each chunk accumulates x -
shift and its square, where shift is the mean of a few of the chunk's own values, so that nothing large cancels; chunks
combine as Chan, Golub and LeVeque (1979) do: the sum over chunks of (squares about the chunk's mean + n * (mean of the
chunk - mean)^2).
Always holds: the error is that of two passes over everything, unless a chunk's spread is far smaller than that of its
first values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fusewright.base.records import dataclass, replace
from fusewright.loops import ir
from fusewright.loops.ir import Apply, Axis, Buffer, Constant, Expression, Load, Operation, Reduction
from fusewright.schedule.expressions import Rewriter
from fusewright.sizes.expressions import Dim, Expr, loop_symbol, product, substitute

SHIFT_POINTS = 32
"""Values of a chunk whose mean it is shifted by: one that is far off moves their mean little."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """A reduction cut into chunks: axes of its partial results (`chunk`: those that number them), what each still
    walks, the value there, and where partial results are kept."""

    axes: tuple[Axis, ...]
    chunk: tuple[Axis, ...]
    rest: tuple[Axis, ...]
    value: Expression
    buffer: Buffer
    index: Dim

    def reduction(self, operation: Reduction, value: Expression) -> Reduction:
        """The reduction of each chunk, of `value`."""
        return replace(
            operation, name=f"{operation.name}_partial", axes=self.axes, reduced=self.rest, value=value,
            buffer=self.buffer.name,
            index=self.index, finish=ir.local_value("acc", value.dtype),
        )  # fmt: skip


def find_statistics(operations: Sequence[Operation]) -> dict[int, int]:
    """Sum of squared deviations from a mean → the sum that this mean comes from, by their positions."""
    means: dict[str, tuple[int, Reduction]] = {}
    found: dict[int, int] = {}
    for position, operation in enumerate(operations):
        if not isinstance(operation, Reduction) or operation.kind != "sum":
            continue
        name = _mean_deviated_from(operation, means)
        if name is not None:
            found[position] = means[name][0]
        elif _is_mean(operation):
            means[operation.buffer] = position, operation
    return found


def _is_mean(operation: Reduction) -> bool:
    """Whether it stores its accumulator over the number of its points."""
    count = product(axis.extent for axis in operation.reduced)
    match operation.finish:
        case Apply(op="div", args=(ir.LocalValue(), Constant(value=divisor))):
            return isinstance(count, int) and divisor == count
    return False


def _mean_deviated_from(operation: Reduction, means: Mapping[str, tuple[int, Reduction]]) -> str | None:
    """The buffer of the mean."""
    match operation.value:
        case Apply(
            op="mul", args=(Apply(op="sub", args=(x, Load(buffer=name, index=index, bindings=()))) as deviation, same)
        ):
            _, mean = means.get(name, (0, None))
            if mean is None or same is not deviation or x.dtype is not mean.value.dtype:
                return None
            renamed = _same_space(mean, operation)
            if renamed is not None and _moved(mean.value, renamed) is x and substitute(mean.index, renamed) == index:
                return name
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
        dim=lambda index: substitute(index, mapping),
        load=lambda node: None,
        local=lambda node: node,
        bind=lambda old, value: old,
    ).visit(value)


def statistics_of_chunks(
    mean: Reduction, sums: Chunks, squares: Reduction, chunks: Chunks
) -> tuple[Buffer, tuple[Reduction, ...], tuple[Reduction, ...]]:
    """(memory for the shifts, what stands for `mean`, what stands for `squares`): `sums` and `chunks` are the same cut
    of each."""
    first, value = _first_values(sums)
    shifts = replace(sums.buffer, name=f"{mean.buffer}_shift")
    shift = replace(
        mean, name=f"{mean.name}_shift", axes=sums.axes, reduced=(first,), value=value, buffer=shifts.name,
        index=sums.index,
        finish=_or_zero(_divided(ir.local_value("acc", value.dtype), _known(first))),
    )  # fmt: skip
    match squares.value, chunks.value:
        case Apply(args=(Apply(args=(_, average)), _)), Apply(args=(Apply(args=(x, _)), _)):
            pass
        case _:
            raise AssertionError("not a sum of squared deviations")
    dtype = x.dtype
    # Both were cut alike, but into loop variables of their own.
    renamed: dict[Expr, Dim] = {a.symbol: b.symbol for a, b in zip(sums.axes, chunks.axes)}
    there = substitute(sums.index, renamed)
    points = math.prod(map(_known, chunks.rest))
    count = ir.constant(points, dtype)
    its_shift, its_sum = ir.load(shifts.name, sums.index, dtype), ir.load(sums.buffer.name, sums.index, dtype)
    total = _apply("add", _apply("mul", count, its_shift), its_sum)
    shifted, left = ir.load(shifts.name, there, dtype), ir.load(sums.buffer.name, there, dtype)
    root = ir.load(chunks.buffer.name, chunks.index, dtype)
    inside = _apply("maximum", _apply("sub", root, _divided(_square(left), points)), ir.constant(0, dtype))
    own_mean = _apply("add", shifted, _divided(left, points))
    between = _apply("mul", count, _square(_apply("sub", own_mean, average)))
    in_chunks = sums.reduction(mean, _apply("sub", sums.value, its_shift))
    squares_in_chunks = chunks.reduction(squares, _square(_apply("sub", x, shifted)))
    return (
        shifts,
        (shift, in_chunks, replace(mean, reduced=sums.chunk, value=total)),
        (squares_in_chunks, replace(squares, reduced=chunks.chunk, value=_apply("add", inside, between))),
    )


def _first_values(chunks: Chunks) -> tuple[Axis, Expression]:
    """An axis over the first few points of each chunk, along its longest one, and the value there."""
    longest = max(chunks.rest, key=_known)
    extent = min(_known(longest), SHIFT_POINTS)
    axis = Axis(loop_symbol("f", extent), extent)
    mapping: dict[Expr, Dim] = {other.symbol: 0 for other in chunks.rest}
    mapping[longest.symbol] = axis.symbol
    return axis, _moved(chunks.value, mapping)


def _apply(op: str, *args: Expression) -> Expression:
    return ir.apply(op, *args, dtype=args[0].dtype)


def _or_zero(value: Expression) -> Expression:
    """Zero where the value is not finite: a mean of infinities is infinite, and no difference of such."""
    finite = ir.apply("isfinite", value, dtype=torch.bool)
    return ir.apply("where", finite, value, ir.constant(0, value.dtype), dtype=value.dtype)


def _divided(value: Expression, count: int) -> Expression:
    return _apply("div", value, ir.constant(count, value.dtype))


def _square(value: Expression) -> Expression:
    return _apply("mul", value, value)


def _known(axis: Axis) -> int:
    assert isinstance(axis.extent, int)
    return axis.extent
