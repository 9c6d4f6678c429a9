"""Matrix products of a plan as kernels of our own: where they stand, and what may take their place.

Takes a scheduled `Plan`; gives a `Site` for each library product (matrix products, batched ones, convolutions over
channels-last images), and for a site its `Variant`s: kernels that do what the library's operator does, with the
pointwise kernel that follows as their last part (`fused`), with the inner dimension cut into slices that the following
kernel adds up (`sliced`), or alone (`plain`). `replaced` puts a variant into a plan (few_rows.py: beside what it stands
for). Always holds: a variant computes what the steps that it stands for compute, products summed in float32; sizes are
numbers, but for the rows of few_rows.py; nothing between the operator and the kernel that follows reads the result or
writes an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from fusewright.base.records import dataclass, replace
from fusewright.loops import ir
from fusewright.loops.externs import references, schema_name
from fusewright.loops.ir import Axis, Buffer, BufferRef, Expression, Extern, Load, Store
from fusewright.schedule.build import sizes_used
from fusewright.schedule.dependencies import extern_reads
from fusewright.schedule.expressions import Rewriter, survey
from fusewright.schedule.plan import (
    Define,
    Kernel,
    Operand,
    Plan,
    Product,
    RunExtern,
    RunKernel,
    Stage,
    Statement,
    Step,
    roots,
)
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
LEAST_INNER = 16
LEAST_CHANNELS = 32
"""Of a convolution: a block of the inner dimension lies within one position of the window."""
LOCAL = "product"

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
        return _axes(self.batch, self.rows, self.columns)

    @property
    def work(self) -> int:
        """Multiplications."""
        return self.batch * self.known_rows * self.columns * self.inner


@dataclass(frozen=True, slots=True)
class Variant:
    """Kernels in the order in which they run, in place of a site's steps, and buffers that they add to the plan."""

    name: str
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...] = ()

    @property
    def product(self) -> Kernel:
        return next(kernel for kernel in self.kernels if kernel.product is not None)


def _axes(batch: int, rows: Dim, columns: int) -> tuple[Axis, Axis, Axis]:
    extents: tuple[tuple[str, Dim], ...] = ((BATCH, batch), (ROW, rows), (COLUMN, columns))
    return tuple(Axis(sizes.loop_symbol(name, extent), extent) for name, extent in extents)  # type: ignore[return-value]


def inner_symbol(length: int) -> Expr:
    """What a product sums over."""
    return sizes.loop_symbol("k", length)


# --- finding
# ----------------------------------------------------------------------------------------------------------------


def find(plan: Plan) -> list[Site]:
    """The plan's products that a kernel of ours may compute, in order."""
    found = []
    for number, step in enumerate(plan.steps):
        if isinstance(step, RunExtern):
            describe = _OPERATORS.get(schema_name(step.extern.target) or "")
            site = (
                None
                if describe is None or not is_plain(plan, step.extern, static=True)
                else describe(plan, number, step.extern)
            )
            if site is not None:
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
    if inner < LEAST_INNER or not _is_row_major(result, range(len(result.shape))):
        return None
    (b, m, n), k = (axis.symbol for axis in _axes(batch, rows, columns)), inner_symbol(inner)
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
    (_, m, n), k = (axis.symbol for axis in _axes(1, rows, outputs)), inner_symbol(inner)
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


def touched(plan: Plan, number: int) -> tuple[set[str], set[str]]:
    """(buffers that a step reads, buffers that it writes)."""
    step = plan.steps[number]
    if isinstance(step, RunExtern):
        written = {name for name in (*step.extern.outputs, *step.extern.mutates) if name is not None}
        return set(extern_reads(step.extern)), written
    kernel = plan.kernels[step.kernel]
    return set(kernel.buffers), set(kernel.written)


def is_private(plan: Plan, name: str) -> bool:
    """Whether a buffer lives within a call and nobody gets it."""
    given = {output.buffer if output.ref is None else output.ref.buffer for output in plan.outputs}
    return plan.buffers[name].role == "temporary" and name not in given


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
    """Whether the kernel may become part of a product: it runs in the same place, over sizes that are numbers (unless
    not `static`), and writes to memory that nobody else sees yet."""
    device = {plan.buffers[name].device for name in kernel.buffers}
    fresh = all(plan.buffers[name].role in ("temporary", "output") and name not in operands for name in kernel.written)
    extents = [axis.extent for axis in kernel.outer] + [axis.extent for stage in kernel.stages for axis in stage.axes]
    known = not kernel.sizes and all(isinstance(extent, int) for extent in extents)
    return len(device) == 1 and fresh and (known or not static)


# --- variants
# ---------------------------------------------------------------------------------------------------------------


def variants(plan: Plan, site: Site, slices: Iterable[int] = ()) -> list[Variant]:
    """What may take the place of the site: fused with what follows, or plain; and cut into each number of slices that
    is possible."""
    joined = fused(plan, site)
    found = [plain(plan, site) if joined is None else joined]
    found += [made for count in slices if count > 1 and (made := sliced(plan, site, count)) is not None]
    return found


def _value(site: Site, summed: Expression) -> Expression:
    """An element of the result from the sum of its products."""
    if site.scale != 1:
        summed = ir.apply("mul", summed, ir.constant(site.scale, torch.float32), dtype=torch.float32)
    if site.bias is not None:
        added = ir.cast(site.bias, torch.float32)
        if site.bias_scale != 1:
            added = ir.apply("mul", added, ir.constant(site.bias_scale, torch.float32), dtype=torch.float32)
        summed = ir.apply("add", summed, added, dtype=torch.float32)
    return ir.cast(summed, site.result.dtype)


def _place(site: Site) -> Dim:
    """Where an element of the result lies, over the outer symbols."""
    b, m, n = (axis.symbol for axis in site.axes)
    place = m * site.columns + n
    return place if site.batch == 1 else place + b * (site.rows * site.columns)


def _kernel(
    site: Site,
    name: str,
    axes: Sequence[Axis],
    statements: Sequence[Statement],
    product: Product | None,
    like: Kernel | None,
    symbols: Collection[Expr] = (),
) -> Kernel:
    """A pointwise kernel, after a product where one is given. `symbols`: of the plan's sizes."""
    stage = Stage((), tuple(statements))
    dtypes: dict[str, torch.dtype] = {}
    if product is not None:
        for side in (product.left, product.right):
            dtypes |= (
                {side.buffer: side.dtype}
                if side.value is None
                else {load.buffer: load.dtype for load in survey([side.value]).loads}
            )
    dtypes |= {load.buffer: load.dtype for load in survey(_roots((stage,))).loads}
    used: tuple[Expr, ...] = ()
    if not isinstance(site.rows, int):
        operands = () if product is None else (product.left.outer, product.right.outer)
        used = sizes_used([*(axis.extent for axis in axes), *operands], [stage], (), symbols)
    return Kernel(
        name,
        tuple(axes),
        (stage,),
        *_parameters(dtypes, statements, like, site),
        sizes=used,
        locations=tuple(dict.fromkeys((*site.extern.locations, *(like.locations if like else ())))),
        origins=tuple(dict.fromkeys((site.extern.name, *(like.origins if like else ())))),
        product=product,
    )


def _parameters(
    read: dict[str, torch.dtype], statements: Iterable[Statement], like: Kernel | None, site: Site
) -> tuple[tuple[str, ...], tuple[torch.dtype, ...], frozenset[str]]:
    """(buffers, their dtypes, those that are written), reads first."""
    known = {} if like is None else dict(zip(like.buffers, like.dtypes))
    written = [statement.buffer for statement in statements if isinstance(statement, Store)]
    dtypes = {name: dtype for name, dtype in read.items() if name not in written}
    for statement in statements:
        if isinstance(statement, Store):
            dtypes[statement.buffer] = known.get(statement.buffer, statement.value.dtype)
    return tuple(dtypes), tuple(dtypes.values()), frozenset(written)


def _roots(stages: Iterable[Stage]) -> list[Expression]:
    return [root for stage in stages for statement in stage.statements for root in roots(statement)]


def _is_full() -> bool:
    """Whether float32 is to be multiplied as float32 (the setting is one that graphs are guarded by)."""
    return torch.get_float32_matmul_precision() == "highest"


def whole(site: Site) -> Product:
    """All of the site's product, in one part."""
    return Product(LOCAL, site.left, site.right, inner_symbol(site.inner), site.inner, _is_full(), most=site.most)


def _before(site: Site) -> tuple[tuple[Kernel, ...], tuple[Buffer, ...]]:
    return ((), ()) if site.relayout is None else ((site.relayout[0],), (site.relayout[1],))


def _follower(plan: Plan, site: Site) -> Kernel | None:
    if site.following < 0:
        return None
    step = plan.steps[site.following]
    assert isinstance(step, RunKernel)
    return plan.kernels[step.kernel]


def plain(plan: Plan, site: Site) -> Variant:
    """The product alone."""
    store = Store(site.result.name, _place(site), _value(site, ir.local_value(LOCAL, torch.float32)))
    kernel = _kernel(
        site, f"product_{site.result.name}_{site.step}", site.axes, [store], whole(site), None, plan.size_symbols
    )
    before, added = _before(site)
    follower = _follower(plan, site)
    return Variant("plain", (*before, kernel, *([follower] if follower is not None else [])), added)


def fused(plan: Plan, site: Site) -> Variant | None:
    """The product with the pointwise kernel that follows; None where it is no such kernel."""
    kernel = _follower(plan, site)
    mapping = None if kernel is None else _points(site, kernel)
    if kernel is None or mapping is None:
        return None
    value = _value(site, ir.local_value(LOCAL, torch.float32))
    rewriter = Rewriter(
        lambda dim: sizes.substitute(dim, mapping),
        lambda load: value if load.buffer == site.result.name else None,
        lambda local: local,
        lambda old, new: old,
    )
    statements = [_rewritten(rewriter, statement) for stage in kernel.stages for statement in stage.statements]
    if site.kept:
        statements.insert(0, Store(site.result.name, _place(site), value))
    made = _kernel(
        site, f"product_{kernel.name}_{site.step}", site.axes, statements, whole(site), kernel, plan.size_symbols
    )
    before, added = _before(site)
    return Variant("fused", (*before, made), added)


def substituted(value: Expression, mapping: dict[Expr, Dim]) -> Expression:
    """The value with its loop symbols in terms of others."""
    keep = Rewriter(
        lambda dim: sizes.substitute(dim, mapping), lambda load: None, lambda local: local, lambda old, new: old
    )
    return keep.visit(value)


def _rewritten(rewriter: Rewriter, statement: Statement) -> Statement:
    if isinstance(statement, Store):
        bindings, index = rewriter.bindings(statement.bindings, rewriter.dim(statement.index))
        return replace(statement, index=index, value=rewriter.visit(statement.value), bindings=bindings)
    return replace(statement, value=rewriter.visit(statement.value))


def _points(site: Site, kernel: Kernel) -> dict[Expr, Dim] | None:
    """The kernel's loop symbols over the product's, where each of its points reads one element of the result, and each
    element is read at one point."""
    if len(kernel.stages) != 1 or kernel.scratch or kernel.product is not None:
        return None
    (stage,) = kernel.stages
    if not all(isinstance(s, Define) or (isinstance(s, Store) and s.mode == "write") for s in stage.statements):
        return None
    indices = {load.index for load in survey(_roots((stage,))).loads if load.buffer == site.result.name}
    bound = [load for load in survey(_roots((stage,))).loads if load.buffer == site.result.name and load.bindings]
    if len(indices) != 1 or bound:
        return None
    (index,) = indices
    return digits(index, [*kernel.outer, *stage.axes], _place(site), site.batch * site.rows * site.columns)


def digits(index: Dim, axes: Sequence[Axis], place: Dim, total: Dim) -> dict[Expr, Dim] | None:
    """Each axis in terms of `place` (0..total-1), where `index` over the axes takes each of these values once: where
    the axes are the digits of a number."""
    strides: dict[Expr, Dim] = {}
    rest = index
    mapping: dict[Expr, Dim] = {}
    for axis in axes:
        if axis.extent == 1:
            mapping[axis.symbol] = 0
            rest = sizes.substitute(rest, {axis.symbol: 0})
            continue
        stride = sizes.coefficient(index, axis.symbol)
        if stride is None:
            return None
        strides[axis.symbol] = stride
        rest = rest - axis.symbol * stride
    expected: Dim = 1
    left = [axis for axis in axes if axis.symbol in strides]
    while left:
        digit = next((axis for axis in left if strides[axis.symbol] == expected), None)
        if digit is None:
            return None
        left.remove(digit)
        value = place if expected == 1 else sizes.floor_div(place, expected)
        expected = expected * digit.extent
        mapping[digit.symbol] = value if expected == total else sizes.modulo(value, digit.extent)
    return mapping if expected == total and isinstance(rest, int) and rest == 0 else None


def sliced(plan: Plan, site: Site, count: int) -> Variant | None:
    """The inner dimension in `count` parts, whose sums the following kernel adds up (or one of our own, where the
    result has other readers). None where they would not be equal, or where the product is a batch already."""
    if site.batch != 1 or site.inner % count or (site.inner // count) % LEAST_INNER:
        return None
    length = site.inner // count
    part, m, n = (axis.symbol for axis in _axes(count, site.rows, site.columns))
    k = inner_symbol(length)
    position = {inner_symbol(site.inner): part * length + k}

    def cut(side: Operand) -> Operand:
        if side.value is not None:
            return replace(side, value=substituted(side.value, position))
        inner = sizes.substitute(side.inner, position)
        if any(k in sizes.free_symbols(within) for _, within, _ in side.checks) or sizes.coefficient(inner, k) is None:
            return side
        whole = sizes.substitute(inner, {part: 0})
        return Operand(side.buffer, side.dtype, side.outer + (inner - whole), whole, side.checks)

    sides = cut(site.left), cut(site.right)
    if site.left in sides or site.right in sides:
        return None
    elements = site.rows * site.columns
    strides = (elements, site.columns, 1)
    partial = Buffer(
        f"{site.result.name}_parts",
        (count, site.rows, site.columns),
        strides,
        torch.float32,
        site.result.device,
        "temporary",
    )
    place = part * elements + m * site.columns + n
    store = Store(partial.name, place, ir.local_value(LOCAL, torch.float32))
    product = Product(LOCAL, *sides, k, length, _is_full())
    parts = _kernel(
        site, f"product_{site.result.name}_{site.step}", _axes(count, site.rows, site.columns), [store], product, None
    )

    def total(index: Dim) -> Expression:
        summed: list[Expression] = [
            ir.load(partial.name, index + number * elements, torch.float32) for number in range(count)
        ]
        while len(summed) > 1:  # in pairs: a tree of sums
            pairs = [summed[at : at + 2] for at in range(0, len(summed), 2)]
            summed = [ir.apply("add", *pair, dtype=torch.float32) if len(pair) == 2 else pair[0] for pair in pairs]
        return summed[0]

    before, added = _before(site)
    follower = _follower(plan, site)
    if follower is None or site.kept:
        _, rows, columns = site.axes
        index = rows.symbol * site.columns + columns.symbol
        store = Store(site.result.name, index, _value(site, total(index)))
        joined = _kernel(site, f"sum_{site.result.name}_{site.step}", site.axes[1:], [store], None, None)
        joined = _renamed_axes(joined)
        return Variant(
            f"{count} slices",
            (*before, parts, joined, *([follower] if follower is not None else [])),
            (*added, partial),
        )
    taken = _reading_parts(site, follower, total)
    return Variant(f"{count} slices", (*before, parts, taken), (*added, partial))


def _renamed_axes(kernel: Kernel) -> Kernel:
    """The kernel with its axes called o0, o1, … again."""
    axes = tuple(Axis(sizes.loop_symbol(f"o{k}", axis.extent), axis.extent) for k, axis in enumerate(kernel.outer))
    mapping: dict[Expr, Dim] = {old.symbol: new.symbol for old, new in zip(kernel.outer, axes)}
    rewriter = Rewriter(
        lambda dim: sizes.substitute(dim, mapping), lambda load: None, lambda local: local, lambda old, new: old
    )
    stages = tuple(
        replace(s, statements=tuple(_rewritten(rewriter, statement) for statement in s.statements))
        for s in kernel.stages
    )
    return replace(kernel, outer=axes, stages=stages)


def _reading_parts(site: Site, kernel: Kernel, total: Callable[[Dim], Expression]) -> Kernel:
    """The kernel that follows, with the result's elements made from the parts."""

    def load(node: Load) -> Expression | None:
        if node.buffer != site.result.name:
            return None
        place = node.index
        row, column = sizes.floor_div(place, site.columns), sizes.modulo(place, site.columns)
        summed = total(place)
        value = _value(site, summed)
        if site.bias is None:
            return value
        _, m, n = (axis.symbol for axis in site.axes)
        at: dict[Expr, Dim] = {m: row, n: column}
        bias = ir.load(site.bias.buffer, sizes.substitute(site.bias.index, at), site.bias.dtype)
        return _value(replace(site, bias=bias), summed)

    rewriter = Rewriter(lambda dim: dim, load, lambda local: local, lambda old, new: old)
    stages = tuple(
        replace(s, statements=tuple(_rewritten(rewriter, statement) for statement in s.statements))
        for s in kernel.stages
    )
    own = {scratch.name for scratch in kernel.scratch}
    known = dict(zip(kernel.buffers, kernel.dtypes))
    read = {node.buffer: node.dtype for node in survey(_roots(stages)).loads if node.buffer not in own}
    names = [name for name in read if name not in kernel.written] + [
        name for name in kernel.buffers if name in kernel.written
    ]
    dtypes = tuple(known.get(name) or read[name] for name in names)
    return replace(kernel, stages=stages, buffers=tuple(names), dtypes=dtypes, inplace=())


# --- products side by side
# --------------------------------------------------------------------------------------------------


def groups(plan: Plan, sites: Sequence[Site]) -> list[tuple[Site, ...]]:
    """Products of one left operand by matrices of equal layout, which nothing in the plan writes: they can run as one
    kernel in the place of the first."""
    changed = {name for number in range(len(plan.steps)) for name in touched(plan, number)[1]}
    found: dict[object, list[Site]] = {}
    for site in sites:
        others = [site.right.buffer, *([site.bias.buffer] if site.bias is not None else [])]
        if site.batch != 1 or site.relayout is not None or site.left.checks or changed.intersection(others):
            continue
        bias = None if site.bias is None else (site.bias.index, site.bias.dtype)
        right = replace(site.right, buffer="")
        result = (site.result.shape, site.result.stride, site.result.device)
        key = (site.rows, site.columns, site.inner, site.left, right, bias, site.bias_scale, site.scale, result)
        found.setdefault(key, []).append(site)
    made = (tuple(members) for members in found.values() if len(members) > 1)
    return [group for group in made if not _is_written(plan, group[0].left.buffer, group[0].step, group[-1].step)]


def _is_written(plan: Plan, buffer: str, first: int, last: int) -> bool:
    return any(buffer in touched(plan, number)[1] for number in range(first, last + 1))


def together(group: Sequence[Site]) -> Kernel:
    """One kernel for the products of a group: a batch, of which each product has matrices of its own."""
    site = group[0]
    axes = _axes(len(group), site.rows, site.columns)
    rights, results = tuple(s.right.buffer for s in group), tuple(s.result.name for s in group)
    chosen = [("right", rights), ("result", results)]
    one = site
    if site.bias is not None:
        biases = tuple(s.bias.buffer for s in group if s.bias is not None)
        chosen.append(("bias", biases))
        one = replace(site, bias=ir.load("bias", site.bias.index, site.bias.dtype))
    product = replace(whole(site), right=replace(site.right, buffer="right"), chosen=tuple(chosen))
    store = Store("result", _place(site), _value(one, ir.local_value(LOCAL, torch.float32)))
    reads = dict.fromkeys((site.left.buffer, *rights, *(biases if site.bias is not None else ())))
    names = (*reads, *results)
    dtypes = {site.left.buffer: site.left.dtype} | {s.right.buffer: s.right.dtype for s in group}
    dtypes |= {s.bias.buffer: s.bias.dtype for s in group if s.bias is not None} | dict.fromkeys(
        results, site.result.dtype
    )
    return Kernel(
        f"products_{site.result.name}_{site.step}",
        axes,
        (Stage((), (store,)),),
        names,
        tuple(dtypes[name] for name in names),
        frozenset(results),
        locations=tuple(dict.fromkeys(location for s in group for location in s.extern.locations)),
        origins=tuple(dict.fromkeys(s.extern.name for s in group)),
        product=product,
    )


# --- putting variants into plans
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replacement:
    """Kernels in place of steps, where step number `at` stood."""

    steps: tuple[int, ...]
    at: int
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...] = ()


def alone(site: Site) -> Site:
    """The site without the kernel that follows."""
    return replace(site, following=-1, kept=True)


def steps_of(site: Site) -> tuple[int, ...]:
    """The numbers of the steps that a variant stands for."""
    return (site.step,) if site.following < 0 else (site.step, site.following)


def of_variant(site: Site, variant: Variant) -> Replacement:
    numbers = steps_of(site)
    return Replacement(numbers, numbers[-1], variant.kernels, variant.buffers)


def of_group(group: Sequence[Site], kernel: Kernel) -> Replacement:
    numbers = tuple(site.step for site in group)
    return Replacement(numbers, numbers[0], (kernel,))


def replaced(plan: Plan, chosen: Sequence[Replacement]) -> Plan:
    """The plan with these in place (no two take the same step away). Its temporaries have no places: see
    `schedule.with_memory`."""
    kernels = dict(plan.kernels)
    buffers = dict(plan.buffers)
    put: dict[int, tuple[Kernel, ...]] = {}
    gone: set[int] = set()
    for one in chosen:
        assert gone.isdisjoint(one.steps), "two replacements of one step"
        gone.update(one.steps)
        put[one.at] = one.kernels
        buffers.update({buffer.name: buffer for buffer in one.buffers})
        for number in one.steps:
            step = plan.steps[number]
            if isinstance(step, RunKernel):
                del kernels[step.kernel]
        kernels.update({kernel.name: kernel for kernel in one.kernels})
    steps: list[Step] = []
    for number, step in enumerate(plan.steps):
        if number in put:
            steps.extend(RunKernel(kernel.name) for kernel in put[number])
        elif number not in gone:
            if number - 1 in gone and isinstance(step, RunKernel):  # what it ran together with has gone
                step = RunKernel(step.kernel)
            steps.append(step)
    return without_memory(plan, kernels, buffers, steps)


def without_memory(plan: Plan, kernels: dict[str, Kernel], buffers: dict[str, Buffer], steps: Sequence[Step]) -> Plan:
    """The plan with other steps, and those buffers that they use."""
    used = set(plan.inputs)
    for made in kernels.values():
        used.update(made.buffers)
    for step in steps:
        if isinstance(step, RunExtern):
            used.update(extern_reads(step.extern))
            used.update(name for name in (*step.extern.outputs, *step.extern.mutates) if name is not None)
    for output in plan.outputs:
        used.add(output.buffer if output.ref is None else output.ref.buffer)
    buffers = {name: buffer for name, buffer in buffers.items() if name in used}
    return replace(
        plan,
        kernels=kernels,
        buffers=buffers,
        steps=tuple(steps),
        placements={},
        arena_size=0,
        last_use={},
        takes_over={},
    )
