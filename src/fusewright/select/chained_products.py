"""Products that read, element by element, what other products gave: each becomes one kernel on a GPU, which computes
those elements block by block and stores none of them.

Takes a scheduled `Plan` whose sizes are numbers; gives it with such kernels in place. The gradients of attention are of
this kind: scores and the gradients of their weights are products of halves, a kernel makes operands of both, and three
products read these. Each computes the scores again, which is quicker than to read them. What that kernel sums over
other memory (a number for each row) becomes a kernel of its own. Always holds: parts are summed in float32 and rounded
as their results were; operands are rounded as they were when they were stored; nothing else reads what is not stored
any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fusewright.base.records import dataclass, field, replace
from fusewright.codegen.triton.operations import HALVES
from fusewright.loops import ir
from fusewright.loops.ir import Axis, Buffer, Expression, Load, Store
from fusewright.schedule.expressions import Rewriter, survey
from fusewright.schedule.plan import Chain, Kernel, Plan, Product, Reduce, RunKernel, Stage
from fusewright.select import places, prologues, replacement, sites, variants
from fusewright.select.fused_attention import MOST_FEATURES, copied, read_operand
from fusewright.select.prologues import Producer
from fusewright.select.replacement import Replacement, Span, is_private, is_undisturbed
from fusewright.select.sites import Site
from fusewright.select.statements import Different, Statements
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

MOST_PARTS, MOST_READERS = 3, 4
LEAST = 16
"""Rows, and places that are summed over."""
_SUMS = ("sum", "max", "min")


@dataclass(slots=True)
class _Elements:
    """A kernel, statement by statement. stores: what it stores in each buffer, and the axes around that; sums: its
    reductions, which read no product's result, each as the load of a buffer of the kernel's outer points."""

    kernel: Kernel
    results: frozenset[str]
    device: torch.device
    stores: dict[str, tuple[Store, tuple[Axis, ...]]] = field(default_factory=dict)
    sums: list[tuple[tuple[Axis, ...], Reduce]] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    names: Statements = field(default_factory=Statements)

    def read(self) -> None:
        self.names.read(self.kernel, self._reduced, self._stored)

    def _stored(self, stage: Stage, statement: Store) -> None:
        if statement.buffer in self.stores:
            raise Different
        self.stores[statement.buffer] = statement, stage.axes

    def _reduced(self, stage: Stage, statement: Reduce) -> None:
        value, outer = statement.value, self.kernel.outer
        shape = tuple(axis.extent for axis in outer)
        if statement.kind not in _SUMS or any(load.buffer in self.results for load in survey([value]).loads):
            raise Different
        name = f"{self.kernel.name}_{statement.local}"
        strides = tuple(sizes.product(shape[place + 1 :]) for place in range(len(shape)))
        self.buffers.append(Buffer(name, shape, strides, value.dtype, self.device, "temporary"))
        index: Dim = 0
        for axis, stride in zip(outer, strides):
            index = index + axis.symbol * stride
        self.names.known[statement.local] = ir.load(name, index, value.dtype)
        self.sums.append((stage.axes, statement))

    def rows(self) -> Kernel | None:
        """The kernel of the sums."""
        if not self.sums:
            return None
        stages: list[Stage] = []
        reads: dict[str, torch.dtype] = {}
        for buffer, (axes, statement) in zip(self.buffers, self.sums):
            load = self.names.known[statement.local]
            assert isinstance(load, Load)
            value = ir.local_value(statement.local, load.dtype)
            stages += [Stage(axes, (statement,)), Stage((), (Store(buffer.name, load.index, value),))]
            reads |= {one.buffer: one.dtype for one in survey([statement.value]).loads}
        written = {buffer.name: buffer.dtype for buffer in self.buffers}
        return replace(
            self.kernel, name=f"rows_of_{self.kernel.name}", stages=tuple(stages), buffers=(*reads, *written),
            dtypes=(*reads.values(), *written.values()), written=frozenset(written), scratch=(), inplace=(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Group:
    """steps: that go (the parts and the kernel between); at: where the sums of rows are computed; made: the kernels of
    the products that read the operands, each with the steps that it stands for."""

    steps: tuple[int, ...]
    at: int
    rows: Kernel | None
    buffers: tuple[Buffer, ...]
    made: tuple[tuple[tuple[int, ...], Kernel], ...]
    producers: tuple[Producer, ...]


def fused(plan: Plan, takes: Callable[[Kernel, Mapping[str, Buffer]], bool]) -> Plan:
    """The plan with a kernel for each product of such operands. takes: whether there is code for it, given the buffers
    that it touches."""
    every = sites.find(plan)
    products = {site.result.name: site for site in every}
    used = prologues.uses(plan)
    gone: set[int] = set()
    chosen: list[_Group] = []
    for number, step in enumerate(plan.steps):
        if number in gone or not isinstance(step, RunKernel) or step.when is not None:
            continue
        try:
            group = _group(plan, number, plan.kernels[step.kernel], products, (used, gone))
        except Different:
            continue
        if group is None:
            continue
        buffers = plan.buffers | {buffer.name: buffer for buffer in group.buffers}
        made = [kernel for _, kernel in group.made] + ([] if group.rows is None else [group.rows])
        if not all(takes(kernel, buffers) for kernel in made):
            continue
        gone.update(group.steps, *(steps for steps, _ in group.made), (one.step for one in group.producers))
        chosen.append(group)
    if not chosen:
        return plan
    puts = prologues.of_producers(plan, [one for group in chosen for one in group.producers])
    for group in chosen:
        rows = () if group.rows is None else (group.rows,)
        puts.append(Replacement(group.steps, group.at, rows, group.buffers))
        puts += [Replacement(steps, max(steps), (kernel,)) for steps, kernel in group.made]
    return replacement.replaced(plan, puts)


def _group(
    plan: Plan, number: int, kernel: Kernel, products: dict[str, Site], taken: tuple[dict[str, list[int]], set[int]]
) -> _Group | None:
    """The group whose operands the kernel at this step makes."""
    used, gone = taken
    parts = {name: products[name] for name in kernel.buffers if name in products and name not in kernel.written}
    readers = [site for site in products.values() if site.left.buffer in kernel.written]
    if not 1 <= len(parts) <= MOST_PARTS or not 1 <= len(readers) <= MOST_READERS or kernel.product or kernel.attention:
        return None
    if not all(_is_part(plan, part) and used[name] == [part.step, number] for name, part in parts.items()):
        return None
    if not all(_is_reader(site) for site in readers):
        return None
    for name in kernel.written:
        reading = sorted(site.step for site in readers if site.left.buffer == name)
        if not is_private(plan, name) or used[name] != [number, *reading]:
            return None
    steps = (*(part.step for part in parts.values()), number)
    if gone & {*steps, *(site.step for site in readers)}:
        return None
    elements = _Elements(kernel, frozenset(parts), readers[0].result.device)
    elements.read()
    producers: dict[str, Producer] = {}
    for part in parts.values():
        producers |= {one.buffer: one for one in prologues.producers(plan, part, *taken)}
    for site in readers:
        of_site = prologues.producers(plan, site, *taken)
        producers |= {one.buffer: one for one in of_site if one.side == "right"}
    producers = {name: one for name, one in producers.items() if copied(one.value) is not None}
    group_steps = frozenset((*steps, *(site.step for site in readers)))
    made: list[tuple[tuple[int, ...], Kernel]] = []
    following: set[int] = set()
    for site in readers:
        if site.following in following or site.following in gone:
            site = sites.alone(site)
        found = _joined(plan, site, parts, elements, producers)
        if site.following >= 0 and not (found is not None and _stands(plan, *found, (group_steps, number))):
            site = sites.alone(site)
            found = _joined(plan, site, parts, elements, producers)
        if found is None or not _stands(plan, *found, (group_steps, number)):
            return None
        following.update(found[0])
        made.append(found)
    return _Group(steps, number, elements.rows(), tuple(elements.buffers), tuple(made), tuple(producers.values()))


def _is_part(plan: Plan, site: Site) -> bool:
    plain = site.bias is None and site.scale == 1 and site.relayout is None and not site.most and site.batch > 1
    return plain and is_private(plan, site.result.name) and site.inner <= MOST_FEATURES and not _checks(site)


def _is_reader(site: Site) -> bool:
    small = site.columns <= MOST_FEATURES and site.known_rows >= LEAST and site.inner >= LEAST
    return small and site.batch > 1 and site.relayout is None and not site.most and not _checks(site)


def _checks(site: Site) -> bool:
    return bool(site.left.checks or site.right.checks or site.left.buffer == site.right.buffer)


def _joined(
    plan: Plan, site: Site, parts: dict[str, Site], elements: _Elements, producers: dict[str, Producer]
) -> tuple[tuple[int, ...], Kernel] | None:
    """The kernel of a product, and the steps that it stands for."""
    store, axes = elements.stores[site.left.buffer]
    column = Axis(sites.inner_symbol(site.inner), site.inner)
    total = site.batch * site.known_rows * site.inner
    points = variants.digits(store.index, [*elements.kernel.outer, *axes], site.left.outer + site.left.inner, total)
    if points is None:
        return None
    made: dict[str, Product] = {}

    def load(node: Load) -> Expression | None:
        part = parts.get(node.buffer)
        if part is None:
            return None
        if node.buffer not in made:
            made[node.buffer] = _part(part, site, _is_turned(part, site, node, points), producers, len(made))
        elif node.bindings or _is_turned(part, site, node, points) is None:
            raise Different
        return ir.cast(ir.local_value(made[node.buffer].local, torch.float32), part.result.dtype)

    value = Rewriter(lambda dim: sizes.substitute(dim, points), load, lambda local: local, lambda old, new: old).visit(
        store.value
    )
    if not made or survey([value]).locals != {part.local for part in made.values()} or value.dtype not in HALVES:
        return None
    right = read_operand(site.right, producers, {}, column.symbol)
    sides = [right, *(side for part in made.values() for side in (part.left, part.right))]
    if any(side.dtype not in HALVES for side in sides):
        return None
    whole = replace(site, left=replace(site.left, outer=0, inner=0, dtype=value.dtype, value=value), right=right)
    steps = sites.steps_of(site)
    variant = variants.fused(plan, whole) if site.following >= 0 else variants.plain(plan, whole)
    if variant is None:
        variant, steps = variants.plain(plan, sites.alone(whole)), (site.step,)
    chain = Chain(tuple(made.values()), places.of_value(value, site.axes[1], column))
    return steps, _with(variant.kernels[0], chain, elements.kernel)


def _is_turned(part: Site, site: Site, node: Load, points: dict[Expr, Dim]) -> bool | None:
    """Whether the part's rows are the product's places, instead of its rows."""
    index = sizes.substitute(node.index, points)
    b, m, _ = (axis.symbol for axis in site.axes)
    k = sites.inner_symbol(site.inner)
    first = b * (part.known_rows * part.columns)
    if node.bindings or part.batch != site.batch:
        raise Different
    if (part.rows, part.columns) == (site.rows, site.inner) and index == first + m * part.columns + k:
        return False
    if (part.columns, part.rows) == (site.rows, site.inner) and index == first + k * part.columns + m:
        return True
    raise Different


def _part(part: Site, site: Site, turned: bool | None, producers: dict[str, Producer], number: int) -> Product:
    """The part's product over the symbols of the product that reads it."""
    d = sizes.loop_symbol("d", part.inner)
    b, row, across = (axis.symbol for axis in part.axes)
    k = sites.inner_symbol(site.inner)
    to: dict[Expr, Expr] = {b: site.axes[0].symbol, sites.inner_symbol(part.inner): d}
    ends = (k, site.axes[1].symbol) if turned else (site.axes[1].symbol, k)
    sides = (part.right, part.left) if turned else (part.left, part.right)
    to |= dict(zip((row, across), ends))
    left, right = (read_operand(side, producers, to, d) for side in sides)
    return Product(f"part{number}", left, right, d, part.inner, variants.whole(part).full)


def _with(kernel: Kernel, chain: Chain, between: Kernel) -> Kernel:
    product = kernel.product
    assert product is not None
    dtypes = {side.buffer: side.dtype for part in chain.parts for side in (part.left, part.right)}
    dtypes |= dict(zip(kernel.buffers, kernel.dtypes))
    names = [*(name for name in dtypes if name not in kernel.written), *kernel.written]
    return replace(
        kernel,
        name=f"chained_{kernel.name.removeprefix('product_')}",
        buffers=tuple(names),
        dtypes=tuple(dtypes[name] for name in names),
        locations=tuple(dict.fromkeys((*between.locations, *kernel.locations))),
        origins=tuple(dict.fromkeys((*between.origins, *kernel.origins))),
        product=replace(product, chain=chain),
    )


def _stands(plan: Plan, steps: Sequence[int], kernel: Kernel, group: tuple[frozenset[int], int]) -> bool:
    """Whether nothing disturbs the kernel in its place. group: its steps, and which of them made the operands."""
    every, between = group
    assert kernel.product is not None and kernel.product.chain is not None
    early = frozenset(side.buffer for part in kernel.product.chain.parts for side in (part.left, part.right))
    return is_undisturbed(plan, kernel, Span(every | frozenset(steps), max(steps), between, early))
