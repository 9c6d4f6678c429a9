"""Matrix products of a plan: where they stand.

Takes a scheduled `Plan`; gives a `Site` for each library product (matrix products, batched ones, convolutions over
channels-last images) that a generated kernel may compute, with the kernel that reads its result next. Always holds:
sizes are numbers, but for the rows of skinny_gemm.py; nothing between the operator and the kernel that follows reads
the result or writes an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fusewright.base.records import dataclass, replace
from fusewright.loops import ir
from fusewright.loops.externs import references, schema_name
from fusewright.loops.ir import Axis, Buffer, BufferRef, Extern, Load, Store
from fusewright.schedule.dependencies import extern_reads
from fusewright.schedule.plan import (
    Kernel,
    Operand,
    Plan,
    RunExtern,
    RunKernel,
    Stage,
)
from fusewright.select.replacement import is_private, touched
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
LEAST_INNER = 16
LEAST_CHANNELS = 32
"""Of a convolution: a block of the inner dimension lies within one position of the window."""

BATCH, ROW, COLUMN = "o0", "o1", "o2"


@dataclass(frozen=True, slots=True)
class Site:
    """A library product and the kernel that reads its result next.

    step: its number in the plan; following: that of the kernel,
    -1 where there is none that a variant may take over. batch, rows, columns,
    inner: of the product. left, right: over the outer symbols of `axes` and `k`. result: the buffer. bias: what is
    added, over the same symbols, with its factor; scale: the product's. kept: the result has other readers than the
    kernel that follows. relayout: a kernel that must run first (a convolution's weight, window by window), and its
    buffer. most: rows that a variant is for, where their number is not known; 0 where it is, or where that is for
    whoever found the site to say.
    """

    step: int
    following: int
    extern: Extern
    batch: int
    rows: Dim
    columns: int
    inner: int
    left: Operand
    right: Operand
    result: Buffer
    bias: Load | None = None
    bias_scale: float = 1.0
    scale: float = 1.0
    kept: bool = False
    relayout: tuple[Kernel, Buffer] | None = None
    most: int = 0

    @property
    def known_rows(self) -> int:
        """The number of rows, of a site whose sizes are numbers."""
        assert isinstance(self.rows, int)
        return self.rows

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return axes_of(self.batch, self.rows, self.columns)

    @property
    def work(self) -> int:
        """Multiplications."""
        return self.batch * self.known_rows * self.columns * self.inner


def axes_of(batch: int, rows: Dim, columns: int) -> tuple[Axis, Axis, Axis]:
    extents: tuple[tuple[str, Dim], ...] = ((BATCH, batch), (ROW, rows), (COLUMN, columns))
    return tuple(Axis(sizes.loop_symbol(name, extent), extent) for name, extent in extents)  # type: ignore


def inner_symbol(length: int) -> Expr:
    """What a product sums over."""
    return sizes.loop_symbol("k", length)


def alone(site: Site) -> Site:
    """The site without the kernel that follows."""
    return replace(site, following=-1, kept=True)


def steps_of(site: Site) -> tuple[int, ...]:
    """The numbers of the steps that a variant stands for."""
    return (site.step,) if site.following < 0 else (site.step, site.following)


def find(plan: Plan, least_inner: int = LEAST_INNER) -> list[Site]:
    """The plan's products that a kernel of ours may compute, in order. least_inner: of their inner dimension."""
    found = []
    for number, step in enumerate(plan.steps):
        if isinstance(step, RunExtern):
            describe = _OPERATORS.get(schema_name(step.extern.target) or "")
            site = (
                None
                if describe is None or not is_plain(plan, step.extern, static=True)
                else describe(plan, number, step.extern)
            )
            if site is not None and site.inner >= least_inner:
                found.append(with_following(plan, site))
    return found


def is_plain(plan: Plan, extern: Extern, static: bool) -> bool:
    """Whether the call reads and writes floats of one type in one place. static: and all its sizes are numbers."""
    refs = references((extern.args, extern.kwargs))
    (output,) = extern.outputs if len(extern.outputs) == 1 else (None,)
    if output is None or extern.mutates:
        return False
    buffer = plan.buffers[output]
    shapes = [(*ref.shape, *ref.stride, ref.offset) for ref in refs] + [(*buffer.shape, *buffer.stride)]
    if (static and not all(isinstance(d, int) for shape in shapes for d in shape)) or any(
        0 in ref.shape for ref in refs
    ):
        return False
    same_place = {plan.buffers[ref.buffer].device for ref in refs} == {buffer.device}
    return same_place and buffer.dtype in DTYPES and all(ref.dtype is buffer.dtype for ref in refs)


def _argument(extern: Extern, position: int, name: str, default: object) -> object:
    if position < len(extern.args):
        return extern.args[position]
    return dict(extern.kwargs).get(name, default)


def _is_row_major(buffer: Buffer, order: Sequence[int]) -> bool:
    """Whether the elements lie one after the other, the dimensions in this order."""
    stride = 1
    for dim in reversed(order):
        if buffer.shape[dim] != 1 and buffer.stride[dim] != stride:
            return False
        stride *= buffer.shape[dim]  # type: ignore[assignment,operator]
    return True


def _matrix(ref: BufferRef, at: Sequence[Expr], k: Expr) -> Operand:
    """A matrix, or a batch of them. `at`: the symbols of its dimensions, `k` among them."""
    outer: Dim = ref.offset
    inner: Dim = 0
    for symbol, size, stride in zip(at, ref.shape, ref.stride):
        if size == 1:
            continue
        if symbol is k:
            inner = inner + symbol * stride
        else:
            outer = outer + symbol * stride
    return Operand(ref.buffer, ref.dtype, outer, inner)


def _broadcast(ref: BufferRef, at: Sequence[Expr]) -> Load:
    """An element of what broadcasts over the dimensions `at`."""
    index: Dim = ref.offset
    for symbol, size, stride in zip(reversed(at), reversed(ref.shape), reversed(ref.stride)):
        if size != 1:
            index = index + symbol * stride
    return ir.load(ref.buffer, index, ref.dtype)


def _product(plan: Plan, step: int, extern: Extern, bias: int | None) -> Site | None:
    """mm, bmm (`bias` None), and addmm, baddbmm (the bias is the first argument)."""
    first = 0 if bias is None else 1
    if len(extern.args) < first + 2:
        return None
    left, right = extern.args[first], extern.args[first + 1]
    assert isinstance(left, BufferRef) and isinstance(right, BufferRef) and extern.outputs[0] is not None
    result = plan.buffers[extern.outputs[0]]
    batched = len(left.shape) == 3
    rows, inner = left.shape[-2:]
    columns = right.shape[-1]
    batch = left.shape[0] if batched else 1
    if not isinstance(inner, int) or not isinstance(columns, int) or not isinstance(batch, int):
        return None
    if not _is_row_major(result, range(len(result.shape))):
        return None
    (b, m, n), k = (axis.symbol for axis in axes_of(batch, rows, columns)), inner_symbol(inner)
    dims = (lambda *d: (b, *d)) if batched else (lambda *d: d)
    site = Site(
        step,
        -1,
        extern,
        batch,
        rows,
        columns,
        inner,
        _matrix(left, dims(m, k), k),
        _matrix(right, dims(k, n), k),
        result,
    )
    if bias is None:
        return site
    beta, alpha = _argument(extern, 3, "beta", 1), _argument(extern, 4, "alpha", 1)
    added = extern.args[0]
    if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)) or not isinstance(added, BufferRef):
        return None
    load = None if beta == 0 else _broadcast(added, dims(m, n))
    return replace(site, bias=load, bias_scale=float(beta), scale=float(alpha))


def _pair(value: object) -> tuple[int, int] | None:
    items = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(items) == 1:
        items *= 2
    return items if len(items) == 2 and all(type(item) is int for item in items) else None  # type: ignore[return-value]


def _convolution(plan: Plan, step: int, extern: Extern) -> Site | None:
    """A 2-D convolution over channels-last images in half precision: a product of pixels by the elements of their
    windows."""
    if len(extern.args) != len(extern.target._schema.arguments):
        return None
    x, weight, bias, stride, padding, dilation, transposed, _, groups = extern.args
    moves = [_pair(item) for item in (stride, padding, dilation)]
    assert extern.outputs[0] is not None
    result = plan.buffers[extern.outputs[0]]
    if transposed or groups != 1 or None in moves or len(result.shape) != 4 or x.dtype is torch.float32:
        return None
    if not _is_row_major(result, (0, 2, 3, 1)) or x.stride[1] != 1:
        return None
    images, channels, height, width = x.shape
    outputs, _, rows_of_window, columns_of_window = weight.shape
    (step_y, step_x), (pad_y, pad_x), (far_y, far_x) = moves  # type: ignore[misc]
    if channels % LEAST_CHANNELS:
        return None
    out_height, out_width = result.shape[2], result.shape[3]
    rows = images * out_height * out_width
    inner = rows_of_window * columns_of_window * channels
    (_, m, n), k = (axis.symbol for axis in axes_of(1, rows, outputs)), inner_symbol(inner)
    image, pixel = sizes.floor_div(m, out_height * out_width), sizes.modulo(m, out_height * out_width)
    y, x_ = sizes.floor_div(pixel, out_width) * step_y - pad_y, sizes.modulo(pixel, out_width) * step_x - pad_x
    place, channel = sizes.floor_div(k, channels), sizes.modulo(k, channels)
    window_y, window_x = (
        sizes.floor_div(place, columns_of_window) * far_y,
        sizes.modulo(place, columns_of_window) * far_x,
    )
    outer = x.offset + image * x.stride[0] + y * x.stride[2] + x_ * x.stride[3]
    checks = []
    for at, within, move, pad, extent, out, window in (
        (y, window_y, step_y, pad_y, height, out_height, (rows_of_window - 1) * far_y),
        (x_, window_x, step_x, pad_x, width, out_width, (columns_of_window - 1) * far_x),
    ):
        if pad or (out - 1) * move + window >= extent:
            checks.append((at, within, extent))
    left = Operand(x.buffer, x.dtype, outer, window_y * x.stride[2] + window_x * x.stride[3] + channel, tuple(checks))
    relayout = None
    if rows_of_window * columns_of_window == 1 or weight.stride[1] == 1:
        places = (
            sizes.floor_div(place, columns_of_window) * weight.stride[2]
            + sizes.modulo(place, columns_of_window) * weight.stride[3]
        )
        right = Operand(
            weight.buffer, weight.dtype, weight.offset + n * weight.stride[0], places + channel * weight.stride[1]
        )
    else:
        relayout = _window_by_window(step, weight, result)
        right = Operand(relayout[1].name, weight.dtype, n * inner, k)
    site = Site(step, -1, extern, 1, rows, outputs, inner, left, right, result, relayout=relayout)
    return (
        site if bias is None else replace(site, bias=ir.load(bias.buffer, bias.offset + n * bias.stride[0], bias.dtype))
    )


def _number(d: Dim) -> int:
    assert isinstance(d, int)
    return d


def _window_by_window(step: int, weight: BufferRef, result: Buffer) -> tuple[Kernel, Buffer]:
    """A copy of a convolution's weight with its channels innermost."""
    shape = tuple(_number(weight.shape[dim]) for dim in (0, 2, 3, 1))
    axes = tuple(Axis(sizes.loop_symbol(f"o{k}", extent), extent) for k, extent in enumerate(shape))
    read: Dim = weight.offset
    write: Dim = 0
    for axis, dim in zip(axes, (0, 2, 3, 1)):
        read = read + axis.symbol * weight.stride[dim]
        write = write * axis.extent + axis.symbol
    name = f"{result.name}_weight"
    strides = tuple(sizes.product(shape[k + 1 :]) for k in range(4))
    buffer = Buffer(name, shape, strides, weight.dtype, result.device, "temporary")
    store = Store(name, write, ir.load(weight.buffer, read, weight.dtype))
    stage = Stage((), (store,))
    names, dtypes = (weight.buffer, name), (weight.dtype, weight.dtype)
    return Kernel(f"weight_of_{result.name}_{step}", axes, (stage,), names, dtypes, frozenset({name})), buffer


MATRICES: dict[str, Callable[[Plan, int, Extern], Site | None]] = {
    "aten::mm": lambda plan, step, extern: _product(plan, step, extern, None),
    "aten::addmm": lambda plan, step, extern: _product(plan, step, extern, 0),
}
_OPERATORS = {
    **MATRICES,
    "aten::bmm": lambda plan, step, extern: _product(plan, step, extern, None),
    "aten::baddbmm": lambda plan, step, extern: _product(plan, step, extern, 0),
    "aten::convolution": _convolution,
}


def with_following(plan: Plan, site: Site) -> Site:
    """The site with the kernel that reads its result next, if a variant may stand in that place."""
    operands = {*extern_reads(site.extern)}
    kept = not is_private(plan, site.result.name)
    following = -1
    for number in range(site.step + 1, len(plan.steps)):
        reads, written = touched(plan, number)
        if following >= 0:
            kept = kept or site.result.name in reads
            continue
        if site.result.name in reads | written:
            step = plan.steps[number]
            static = isinstance(site.rows, int)
            if not isinstance(step, RunKernel) or site.result.name in written or step.when is not None:
                break
            if not _is_movable(plan, plan.kernels[step.kernel], operands, static):
                break
            following = number
        elif written & operands:
            break
    return replace(site, following=following, kept=kept)


def _is_movable(plan: Plan, kernel: Kernel, operands: set[str], static: bool) -> bool:
    """Whether the kernel may become part of a product: it holds none itself, runs in the same place, over sizes that
    are numbers (unless not `static`), and writes to memory that nobody else sees yet."""
    if kernel.product is not None or kernel.attention is not None:
        return False
    device = {plan.buffers[name].device for name in kernel.buffers}
    fresh = all(plan.buffers[name].role in ("temporary", "output") and name not in operands for name in kernel.written)
    extents = [axis.extent for axis in kernel.outer] + [axis.extent for stage in kernel.stages for axis in stage.axes]
    known = not kernel.sizes and all(isinstance(extent, int) for extent in extents)
    return len(device) == 1 and fresh and (known or not static)
