"""What the shape rules share: questions about sizes and strides, broadcasting, type promotion, and TensorIterator's
output layout.

Always holds: a question that symbolic sizes leave open raises `Undecided`, which `shape_rules` turns into "ask the meta
kernel"; inside `asking`, its answer becomes a guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import combinations
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.sizes.expressions import Dim, Expr, Relation, known_eq, known_le, known_lt
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

Rule = Callable[..., object]
Number = int | float | bool | complex


class Undecided(Exception):
    """The answer depends on the value of a symbolic size, or the arguments are not valid."""


_asked: ContextVar[Callable[[Relation], bool] | None] = ContextVar("asked", default=None)


@contextmanager
def asking(answer: Callable[[Relation], bool]) -> Iterator[None]:
    """`answer` says what symbolic sizes leave open (`ShapeEnv.guard`)."""
    token = _asked.set(answer)
    try:
        yield
    finally:
        _asked.reset(token)


def _open(relation: Relation) -> bool:
    answer = _asked.get()
    if answer is None:
        raise Undecided
    return answer(relation)


def same(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal."""
    if a is b or a == b:
        return True
    if isinstance(a, int) and isinstance(b, int):
        return False
    answer = known_eq(a, b)
    return _open(Relation("==", a, b)) if answer is None else answer


def less(a: Dim, b: Dim) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    answer = known_lt(a, b)
    return _open(Relation("<", a, b)) if answer is None else answer


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def axis_of(dim: int, rank: int) -> int:
    """A non-negative dimension index; a tensor without dimensions counts as having one."""
    bound = max(rank, 1)
    if not -bound <= dim < bound:
        raise Undecided
    return dim % bound


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The broadcast shape."""
    result: list[Dim] = list(max(shapes, key=len))  # type: ignore[arg-type]
    for shape in shapes:
        start = len(result) - len(shape)
        for axis, size in enumerate(shape, start):
            now = result[axis]
            if size is now or size == now or size == 1:
                continue
            if now == 1:
                result[axis] = size
            elif not same(now, size):  # one of them may still be a symbolic 1
                raise Undecided
    return tuple(result)


def fresh(shape: Sequence[Dim], like: TensorType, dtype: torch.dtype | None = None) -> TensorType:
    """A row-major result on the device of `like`."""
    return TensorType(tuple(shape), contiguous_strides(tuple(shape)), dtype or like.dtype, like.device)


# --- layouts ----------------------------------------------------------------------------------------------------------


def is_contiguous(t: TensorType) -> bool:
    if any(size == 0 for size in t.shape):
        return True
    running: Dim = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride), strict=True):
        if size != 1:
            if not same(stride, running):
                return False
            running = running * size
    return True


def channels_last_strides(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Strides of NHWC or NDHWC for a shape that is written NCHW or NCDHW."""
    order = [1, *range(len(shape) - 1, 1, -1), 0]
    strides: list[Dim] = [0] * len(shape)
    running: Dim = 1
    for axis in order:
        strides[axis] = running
        running = running * (1 if shape[axis] == 0 else shape[axis])
    return tuple(strides)


def is_channels_last(t: TensorType) -> bool:
    """Contiguous in channels-last order (4 or 5 dimensions)."""
    if t.ndim not in (4, 5):
        return False
    if any(size == 0 for size in t.shape):
        return True
    return all(
        size == 1 or same(a, b) for size, a, b in zip(t.shape, t.stride, channels_last_strides(t.shape), strict=True)
    )


def _is_stacked(dims: list[tuple[Dim, Dim]]) -> bool:
    """Whether each (size, stride), in some order, steps over just those before it. Asks nothing."""
    running: Dim = 1
    while dims:
        following = next((dim for dim in dims if dim[1] == running), None)
        if following is None:
            return False
        dims = [dim for dim in dims if dim is not following]
        running = running * following[0]
    return True


def is_dense(t: TensorType) -> bool:
    """Non-overlapping and dense (c10/core/TensorImpl.cpp, compute_non_overlapping_and_dense)."""
    if any(isinstance(s, Expr) for s in (*t.shape, *t.stride)):
        dims = [dim for dim in zip(t.shape, t.stride, strict=True) if dim[0] != 1]
        if _is_stacked(dims) or is_contiguous(t) or is_channels_last(t):  # the first asks nothing
            return True
        unknown = [dim for dim in dims if isinstance(dim[0], Expr)]
        return any(
            _is_stacked([dim for dim in dims if id(dim) not in map(id, single)])
            and all(same(size, 1) for size, _ in single)
            for count in range(len(unknown) + 1)
            for single in combinations(unknown, count)
        )
    axes = sorted(
        (axis for axis in range(t.ndim) if t.shape[axis] >= 2), key=lambda axis: t.stride[axis]  # type: ignore
    )
    if any(size == 0 for size in t.shape):
        axes = sorted(range(t.ndim), key=lambda axis: (t.shape[axis] < 2, t.stride[axis]))  # type: ignore[operator]
    running = 1
    for axis in axes:
        if t.shape[axis] >= 2:  # type: ignore[operator]
            if t.stride[axis] != running:
                return False
            running *= t.shape[axis]  # type: ignore[assignment]
    return True


def sort_axes(shape: Sequence[Dim], operands: Sequence[Sequence[Dim]]) -> list[int]:
    """The axes from innermost to outermost, as TensorIteratorBase::reorder_dimensions orders them
    (ATen/native/TensorIterator.cpp)."""
    order = list(range(len(shape) - 1, -1, -1))

    def should_swap(a: int, b: int) -> int:
        for strides in operands:
            if strides[a] == 0 or strides[b] == 0:
                continue
            if same(strides[a], strides[b]):
                if less(shape[b], shape[a]):
                    return 1
            else:
                return -1 if less(strides[a], strides[b]) else 1
        return 0

    for i in range(1, len(order)):
        moving = i
        for j in range(i - 1, -1, -1):
            swap = should_swap(order[j], order[moving])
            if swap > 0:
                order[j], order[moving] = order[moving], order[j]
                moving = j
            elif swap < 0:
                break
    return order


def dense_in_order(shape: Sequence[Dim], order: Sequence[int]) -> tuple[Dim, ...]:
    """Dense strides with the axes laid out in `order`, innermost first."""
    if list(order) == list(range(len(shape) - 1, -1, -1)):
        return contiguous_strides(tuple(shape))
    strides: list[Dim] = [0] * len(shape)
    running: Dim = 1
    for axis in order:
        strides[axis] = running
        running = running * shape[axis]
    return tuple(strides)


def iterator_strides(
    shape: tuple[Dim, ...], operands: Sequence[TensorType], has_number: bool = False
) -> tuple[Dim, ...]:
    """The strides that TensorIterator gives a new output over these operands (in the iterator's order)."""
    first = operands[0]
    if len(operands) == 1 or all(t.shape == first.shape for t in operands):
        try:
            if not (has_number and first.shape):
                if all(is_contiguous(t) for t in operands):
                    return contiguous_strides(shape)
                if len(shape) == 4 and all(is_channels_last(t) for t in operands):
                    return channels_last_strides(shape)
                if all(is_dense(t) for t in operands) and all(t.stride == first.stride for t in operands):
                    return first.stride
            elif len(operands) == 1 and 0 not in shape and first.stride == contiguous_strides(shape):
                return first.stride  # also along dimensions of size 1
        except Undecided:  # of sizes of 2 and more, the order of the strides says the same
            if not all(known_le(2, size) for size in shape):
                raise
    if len(shape) <= 1:
        return contiguous_strides(shape)
    return dense_in_order(shape, sort_axes(shape, [_spread(t, shape) for t in operands]))


def _spread(t: TensorType, shape: tuple[Dim, ...]) -> list[Dim]:
    """The strides of `t` broadcast to `shape`."""
    missing = len(shape) - t.ndim
    spread: list[Dim] = [0] * missing
    for size, stride, target in zip(t.shape, t.stride, shape[missing:], strict=True):
        spread.append(0 if size == 1 and target != 1 else stride)
    return spread


def preserved_strides(t: TensorType) -> tuple[Dim, ...]:
    """The strides of empty_like(t) and clone(t): those of t when it is dense, else dense in the order of its
    strides."""
    if is_dense(t):
        return t.stride
    return dense_in_order(t.shape, sort_axes(t.shape, [t.stride]))


def suggests_channels_last(t: TensorType) -> bool:
    """t.suggest_memory_format() (c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4 and 3d_s5)."""
    if t.ndim not in (4, 5) or t.stride[1] == 0:
        return False
    channels = t.shape[1]
    if isinstance(channels, int) and channels > 1 and not all(isinstance(size, int) for size in t.shape):
        # whatever the sizes: the innermost step is below that of several channels
        if t.stride == contiguous_strides(t.shape):
            return False
        if t.stride == channels_last_strides(t.shape):
            return True
    least: Dim = 0
    for axis in (1, *range(t.ndim - 1, 1, -1), 0):
        size, stride = t.shape[axis], t.stride[axis]
        if size == 0 or less(stride, least) or (axis == 0 and same(least, t.stride[1])):
            return False
        least = stride * size if less(1, size) else stride
    return True


def is_surely_channels_last(t: TensorType) -> bool:
    """Whether `suggests_channels_last` holds for whatever symbolic sizes and steps stand for."""
    if all(isinstance(number, int) for number in (*t.shape, *t.stride)):
        return suggests_channels_last(t)
    return t.stride == channels_last_strides(t.shape)


def convolves_channels_last(input: TensorType, weight: TensorType) -> bool:
    """Whether a convolution computes in channels-last format, where it has the choice: an argument suggests so. One
    over a line is one over images of a single row, and copies an input that is not contiguous."""
    if input.ndim == 3:
        input, weight = as_row(input if is_contiguous(input) else fresh(input.shape, input)), as_row(weight)
    return suggests_channels_last(input) or suggests_channels_last(weight)


def as_row(line: TensorType) -> TensorType:
    (*outer, size), (*steps, step) = line.shape, line.stride
    return replace(line, shape=(*outer, 1, size), stride=(*steps, size * step, step))


def in_format(shape: Sequence[Dim], last: bool) -> tuple[Dim, ...]:
    """Strides of lines, images or volumes: channels-last or contiguous."""
    if last and len(shape) == 3:
        return (shape[1] * shape[2], 1, shape[1])
    return channels_last_strides(shape) if last else contiguous_strides(tuple(shape))


def suggested_strides(t: TensorType, shape: Sequence[Dim] | None = None) -> tuple[Dim, ...]:
    """Strides of `shape` (by default that of t) in t.suggest_memory_format()."""
    shape = tuple(t.shape if shape is None else shape)
    return channels_last_strides(shape) if suggests_channels_last(t) else contiguous_strides(shape)


# --- dtypes -----------------------------------------------------------------------------------------------------------

_UNDEFINED = None


def holds(dtype: torch.dtype, number: bool | int | float) -> bool:
    """Whether eager writes the number into a tensor of this dtype: it raises where the number is outside the range."""
    if dtype is torch.bool or dtype.is_complex or (dtype.is_floating_point and not math.isfinite(number)):
        return True
    limits: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min <= number <= limits.max


def promote(*values: object) -> torch.dtype:
    """The dtype of an operator over these tensors and numbers (ATen/native/TypeProperties.cpp, result_type)."""
    dimensioned: torch.dtype | None = _UNDEFINED
    scalar: torch.dtype | None = _UNDEFINED
    number: torch.dtype | None = _UNDEFINED
    for value in values:
        if isinstance(value, TensorType):
            if value.shape:
                dimensioned = value.dtype if dimensioned is None else torch.promote_types(dimensioned, value.dtype)
            else:
                scalar = value.dtype if scalar is None else torch.promote_types(scalar, value.dtype)
        elif value is not None:
            dtype = number_dtype(value)
            number = dtype if number is None else torch.promote_types(number, dtype)
    result = _combine(dimensioned, _combine(scalar, number))
    if result is None:
        raise Undecided
    return result


def number_dtype(value: object) -> torch.dtype:
    """The dtype that a Python number takes part in promotion with."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, (int, Expr)):
        return torch.int64
    if isinstance(value, float):
        return torch.get_default_dtype()
    if isinstance(value, complex):
        return complex_of(torch.get_default_dtype())
    raise Undecided


def complex_of(dtype: torch.dtype) -> torch.dtype:
    return {torch.float16: torch.complex32, torch.float64: torch.complex128}.get(dtype, torch.complex64)


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return lower if higher is None else higher
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return complex_of(higher) if lower.is_complex else higher
    if higher == torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def is_integral(dtype: torch.dtype) -> bool:
    """Integers and bool."""
    return not dtype.is_floating_point and not dtype.is_complex


def common_device(*tensors: TensorType) -> torch.device:
    """The device of the result; tensors without dimensions on the CPU go with any other device."""
    device = next((t.device for t in tensors if t.shape), tensors[0].device)
    for t in tensors:
        if t.device != device:
            if not t.shape and t.device.type == "cpu":
                continue
            if not any(x.shape for x in tensors) and device.type == "cpu":
                device = t.device
                continue
            raise Undecided
    return device
