"""Generated kernels for a library product.

Takes a `Site`; gives its `Variant`s: kernels that do what the library's operator does, with the pointwise kernel that
follows as their last part (`fused`), with the inner dimension cut into parts that the following kernel adds up
(`split_k`), or alone (`plain`); and one kernel for products of one left operand (`horizontal`), or for those and the
kernel that alone reads their results (`dual`). Always holds: a variant computes what the steps that it stands for
compute, products summed in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, replace
from fusewright.base.thresholds import SKINNY
from fusewright.loops import ir
from fusewright.loops.ir import Axis, Buffer, Expression, Load, Store
from fusewright.schedule.build import sizes_used
from fusewright.schedule.expressions import Rewriter, survey
from fusewright.schedule.plan import (
    Define,
    Kernel,
    Operand,
    Plan,
    Product,
    RunKernel,
    Stage,
    Statement,
    roots,
)
from fusewright.select.replacement import Replacement, touched
from fusewright.select.sites import LEAST_INNER, Site, axes_of, inner_symbol, steps_of, with_following
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

LOCAL = "product"
MOST_PARTS = 16
"""Of products that run as one kernel, which chooses the matrices of each."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Kernels in the order in which they run, in place of a site's steps, and buffers that they add to the plan."""

    name: str
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...] = ()

    @property
    def product(self) -> Kernel:
        return next(kernel for kernel in self.kernels if kernel.product is not None)


def variants(plan: Plan, site: Site, slices: Iterable[int] = ()) -> list[Variant]:
    """What may take the place of the site: fused with what follows, or plain; and cut into each number of slices that
    is possible."""
    joined = fused(plan, site)
    found = [plain(plan, site) if joined is None else joined]
    found += [made for count in slices if count > 1 and (made := split_k(plan, site, count)) is not None]
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
        for side in (product.left, *(one.right for one in (product, *product.besides))):
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
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # there is no one answer
        return False


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
    statements = _epilogue(kernel, mapping, {site.result.name: value})
    if site.kept:
        statements.insert(0, Store(site.result.name, _place(site), value))
    made = _kernel(
        site, f"product_{kernel.name}_{site.step}", site.axes, statements, whole(site), kernel, plan.size_symbols
    )
    before, added = _before(site)
    return Variant("fused", (*before, made), added)


def _epilogue(kernel: Kernel, points: dict[Expr, Dim], values: Mapping[str, Expression]) -> list[Statement]:
    """The kernel's statements over a product's symbols, with what it would read of these buffers in the loads'
    places."""
    rewriter = Rewriter(
        lambda dim: sizes.substitute(dim, points),
        lambda load: values.get(load.buffer),
        lambda local: local,
        lambda old, new: old,
    )
    return [_rewritten(rewriter, statement) for stage in kernel.stages for statement in stage.statements]


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


def split_k(plan: Plan, site: Site, count: int) -> Variant | None:
    """The inner dimension in `count` parts, whose sums the following kernel adds up (or one of our own, where the
    result has other readers). None where they would not be equal, or where the product is a batch already."""
    if site.batch != 1 or site.inner % count or (site.inner // count) % LEAST_INNER:
        return None
    length = site.inner // count
    part, m, n = (axis.symbol for axis in axes_of(count, site.rows, site.columns))
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
        site, f"product_{site.result.name}_{site.step}", axes_of(count, site.rows, site.columns), [store], product, None
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


# --------------------------------------------------------------------------------------------------


def groups(plan: Plan, sites: Sequence[Site]) -> list[tuple[Site, ...]]:
    """Products of one left operand by matrices of equal layout, which nothing in the plan writes: they can run as one
    kernel in the place of the first. Skinny ones wait for memory alone, so these may differ in columns."""
    changed = {name for number in range(len(plan.steps)) for name in touched(plan, number)[1]}
    equal: dict[tuple[int, object], list[Site]] = {}
    for site in sites:
        others = [site.right.buffer, *([site.bias.buffer] if site.bias is not None else [])]
        if site.batch == 1 and site.relayout is None and not site.left.checks and not changed.intersection(others):
            equal.setdefault((site.columns, _alike(site)), []).append(site)
    found: dict[object, list[Site]] = {}
    for (columns, alike), members in equal.items():
        joins = members[0].known_rows <= SKINNY and dual(plan, members) is None
        found.setdefault(alike if joins else (columns, alike), []).extend(members)
    made = []
    for members in found.values():
        members.sort(key=lambda site: site.step)
        if len(members) > 1 and len(_parts_of(members)) <= MOST_PARTS:
            made.append(tuple(members))
    return [group for group in made if not _is_written(plan, group[0].left.buffer, group[0].step, group[-1].step)]


def _alike(site: Site) -> tuple[object, ...]:
    """What products that run as one kernel share, beside their columns."""
    any_column = {site.axes[2].symbol: sizes.loop_symbol("column", 1 << 62)}
    right = replace(site.right, buffer="", outer=sizes.substitute(site.right.outer, any_column))
    bias = None if site.bias is None else (sizes.substitute(site.bias.index, any_column), site.bias.dtype)
    return (site.rows, site.inner, site.left, right, bias, site.bias_scale, site.scale, site.result.device)


def _is_written(plan: Plan, buffer: str, first: int, last: int) -> bool:
    return any(buffer in touched(plan, number)[1] for number in range(first, last + 1))


def _parts_of(group: Sequence[Site]) -> list[tuple[Site, int]]:
    """The group's products in parts of one width, each with the first of its columns."""
    width = math.gcd(*(site.columns for site in group))
    return [(site, first) for site in group for first in range(0, site.columns, width)]


def _by_part(values: Sequence[int], part: Expr) -> Dim:
    """values[part]"""
    found: Dim = values[0]
    for number, (before, after) in enumerate(itertools.pairwise(values), 1):
        found = found + (after - before) * sizes.maximum(0, sizes.minimum(1, part - (number - 1)))
    return found


def horizontal(group: Sequence[Site]) -> Kernel:
    """One kernel for the products of a group: a batch of parts of one width, of which each has matrices of its own."""
    site, parts = group[0], _parts_of(group)
    axes = axes_of(len(parts), site.rows, sum(one.columns for one in group) // len(parts))
    part, row, column = (axis.symbol for axis in axes)
    first = _by_part([first for _, first in parts], part)
    place = {site.axes[2].symbol: first + column}
    rights, results = tuple(s.right.buffer for s, _ in parts), tuple(s.result.name for s, _ in parts)
    chosen = [("right", rights), ("result", results)]
    one, biases = site, tuple(s.bias.buffer for s, _ in parts if s.bias is not None)
    if site.bias is not None:
        chosen.append(("bias", biases))
        one = replace(site, bias=ir.load("bias", sizes.substitute(site.bias.index, place), site.bias.dtype))
    right = replace(site.right, buffer="right", outer=sizes.substitute(site.right.outer, place))
    product = replace(whole(site), right=right, chosen=tuple(chosen))
    strides = _by_part([s.columns for s, _ in parts], part)
    store = Store("result", row * strides + first + column, _value(one, ir.local_value(LOCAL, torch.float32)))
    names = tuple(dict.fromkeys((site.left.buffer, *rights, *biases, *results)))
    dtypes = {site.left.buffer: site.left.dtype} | {s.right.buffer: s.right.dtype for s in group}
    dtypes |= {s.bias.buffer: s.bias.dtype for s in group if s.bias is not None}
    dtypes |= dict.fromkeys(results, site.result.dtype)
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


def dual(plan: Plan, group: Sequence[Site]) -> tuple[Kernel, int] | None:
    """One kernel for a group whose results are read by one pointwise kernel alone, with that kernel as its last part,
    and the number of its step (of two products: a dual GEMM); None where there is no such kernel."""
    members = [with_following(plan, site) for site in group]
    first = members[0]
    kernel = _follower(plan, first)
    if kernel is None or any(site.following != first.following or site.kept for site in members):
        return None
    points = [_points(site, kernel) for site in members]
    if points[0] is None or any(one != points[0] for one in points):
        return None
    locals_ = [LOCAL, *(f"{LOCAL}{number}" for number in range(1, len(members)))]
    values = {
        site.result.name: _value(site, ir.local_value(local, torch.float32)) for site, local in zip(members, locals_)
    }
    products = [replace(whole(site), local=local) for site, local in zip(members, locals_)]
    made = _kernel(
        first,
        f"products_{kernel.name}_{first.step}",
        first.axes,
        _epilogue(kernel, points[0], values),
        replace(products[0], besides=tuple(products[1:])),
        kernel,
        plan.size_symbols,
    )
    locations = (location for site in members for location in site.extern.locations)
    origins = (site.extern.name for site in members)
    return replace(
        made,
        locations=tuple(dict.fromkeys((*locations, *made.locations))),
        origins=tuple(dict.fromkeys((*origins, *made.origins))),
    ), first.following


def of_variant(site: Site, variant: Variant) -> Replacement:
    numbers = steps_of(site)
    return Replacement(numbers, numbers[-1], variant.kernels, variant.buffers)


def of_group(group: Sequence[Site], kernel: Kernel, following: int = -1) -> Replacement:
    """The kernel in the place of the group's first product; or, with the step of the kernel that is its last part, in
    that place."""
    numbers = tuple(site.step for site in group)
    if following < 0:
        return Replacement(numbers, numbers[0], (kernel,))
    return Replacement((*numbers, following), following, (kernel,))
