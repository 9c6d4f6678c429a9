"""A product, a softmax over its rows, and a product with that: one kernel on a GPU, which stores no scores.

Takes a scheduled `Plan` whose sizes are numbers; gives it with such kernels in place: scores may be any expression of a
product's element, of indices and of what else the softmax's kernel reads. Always holds: sums and scores are float32,
and weights are rounded to the type that the second product reads, before they are divided by their sum instead of
after; a row without a score above negative infinity gives what the softmax gave. Blocks of scores that are certainly
negative infinity (`where(condition, ..., -inf)`) are left out, unless an index that is checked might be there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from fusewright.base.records import dataclass, field, replace
from fusewright.codegen.triton.operations import HALVES
from fusewright.loops import ir
from fusewright.loops.ir import Apply, Axis, Buffer, Constant, Expression, Load, Store
from fusewright.schedule.expressions import Rewriter, survey
from fusewright.schedule.plan import Define, Kernel, Operand, Plan, Product, Reduce, RunKernel, Softmax, Stage
from fusewright.select import places, prologues, replacement, sites, variants
from fusewright.select.prologues import Producer
from fusewright.select.replacement import Replacement, Span, is_private, is_undisturbed
from fusewright.select.sites import Site
from fusewright.select.statements import Different, Statements
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

MOST_FEATURES = 256
SCORES, SOFTMAX = "scores", "softmax"


@dataclass(slots=True)
class _Rows:
    """A softmax's kernel, statement by statement. score: of a place in the row; most: the local of the largest;
    totals: locals of sums of exponentials, and whether infinities were taken from them; weight: what is stored for each
    place; stores: those of a row."""

    result: str  # the scores' buffer
    weights: str
    axis: Axis | None = None
    score: Expression | None = None
    most: str = ""
    totals: dict[str, bool] = field(default_factory=dict)
    weight: Store | None = None
    stores: list[Store] = field(default_factory=list)
    names: Statements = field(default_factory=Statements)

    def read(self, kernel: Kernel) -> None:
        axes = {stage.axes for stage in kernel.stages if stage.axes}
        if len(axes) > 1 or any(len(row) > 1 for row in axes):
            raise Different
        self.axis = next((row[0] for row in axes), None)
        self.names.read(kernel, self._reduced, self._stored)

    def _reduced(self, stage: Stage, statement: Reduce) -> None:
        value = statement.value
        if value.dtype is not torch.float32:
            raise Different
        if statement.kind == "max" and self.score is None:
            self.score, self.most = value, statement.local
        elif statement.kind == "max" and value is self.score:
            self.names.known[statement.local] = ir.local_value(self.most, torch.float32)
        elif statement.kind == "sum" and self.score is not None:
            self.totals[statement.local] = self._is_safe(value)
        else:
            raise Different

    def _stored(self, stage: Stage, statement: Store) -> None:
        if statement.buffer == self.weights and stage.axes and self.weight is None:
            self.weight = statement
        elif not stage.axes:
            self.stores.append(statement)
        else:
            raise Different

    def _is_safe(self, value: Expression) -> bool:
        """Whether 0 is taken in place of an infinite maximum, in an exponential of the difference to it."""
        most = ir.local_value(self.most, torch.float32)
        for safe in (False, True):
            if value is self._exponential(_finite(most) if safe else most):
                return safe
        raise Different

    def _exponential(self, most: Expression) -> Expression:
        assert self.score is not None
        difference = ir.apply("sub", self.score, most, dtype=torch.float32)
        return ir.apply("exp", difference, dtype=torch.float32)

    def share(self) -> tuple[Expression, torch.dtype]:
        """(what an exponential is multiplied by to be the weight, of its row alone; the type it is rounded to)."""
        if self.weight is None or self.score is None:
            raise Different
        found: list[torch.dtype] = []
        exponential = self._exponential(ir.local_value(self.most, torch.float32))
        factor = _factor(self.weight.value, exponential, found)
        if any(load.buffer == self.result for load in survey([factor]).loads):
            raise Different
        return factor, found[0] if found else torch.float32


def _finite(most: Expression) -> Expression:
    infinite = ir.apply("isinf", most, dtype=torch.bool)
    return ir.apply("where", infinite, ir.constant(0, torch.float32), most, dtype=torch.float32)


def _factor(value: Expression, of: Expression, rounded: list[torch.dtype]) -> Expression:
    """What `of` is multiplied by in `value`, roundings to halves apart."""
    if value is of:
        return ir.constant(1, torch.float32)
    match value:
        case Apply(op="cast", args=(inner,)) if value.dtype in (*HALVES, torch.float32):
            if value.dtype in HALVES:
                rounded.append(value.dtype)
            return _factor(inner, of, rounded)
        case Apply(op="where", args=(mask, Constant(value=0.0) as zero, inner)):
            return ir.apply("where", mask, ir.constant(zero.value, torch.float32), _factor(inner, of, rounded),
                            dtype=torch.float32)  # fmt: skip
        case Apply(op="mul" | "div" as op, args=(inner, by)):
            return ir.apply(op, _factor(inner, of, rounded), by, dtype=torch.float32)
    raise Different


# --- sites ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """steps: that the kernel stands for; at: where it runs."""

    steps: tuple[int, ...]
    at: int
    kernel: Kernel
    producers: tuple[Producer, ...]


def fused(plan: Plan, takes: Callable[[Kernel, Mapping[str, Buffer]], bool]) -> Plan:
    """The plan with a kernel for each attention on a GPU. takes: whether there is code for it."""
    every = sites.find(plan, least_inner=1)
    products = {site.result.name: site for site in every}
    used = prologues.uses(plan)
    gone: set[int] = set()
    chosen: list[_Found] = []
    for site in every:
        found = _found(plan, products, site, used, gone)
        if found is None:
            continue
        halves = prologues.narrowed(plan, filter(_is_widened, found.producers))
        if not takes(found.kernel, plan.buffers | halves):
            continue
        gone.update(found.steps, (producer.step for producer in found.producers))
        chosen.append(found)
    if not chosen:
        return plan
    puts = [Replacement(found.steps, found.at, (found.kernel,)) for found in chosen]
    producers = [one for found in chosen for one in found.producers]
    copies, widened = ([one for one in producers if _is_widened(one) is wanted] for wanted in (False, True))
    return replacement.replaced(plan, [*prologues.of_producers(plan, copies, widened), *puts])


def _is_widened(producer: Producer) -> bool:
    """Whether what is stored are halves, as float32, of no other memory."""
    value = producer.value
    widened = isinstance(value, Apply) and value.op == "cast" and value.dtype is torch.float32
    return widened and value.args[0].dtype in HALVES and copied(value) is None  # type: ignore[attr-defined]


def _found(
    plan: Plan, products: dict[str, Site], site: Site, used: dict[str, list[int]], gone: set[int]
) -> _Found | None:
    """The attention whose second product the site is."""
    weights = site.left.buffer
    touching = used.get(weights, ())
    if site.columns > MOST_FEATURES or len(touching) != 2 or touching[1] != site.step or not is_private(plan, weights):
        return None
    number = touching[0]
    step = plan.steps[number]
    if not isinstance(step, RunKernel) or step.when is not None or site.relayout is not None:
        return None
    kernel = plan.kernels[step.kernel]
    inner = next((products[name] for name in kernel.buffers if name in products and name != site.result.name), None)
    if inner is None or used[inner.result.name] != [inner.step, number] or not is_private(plan, inner.result.name):
        return None
    if (inner.batch, inner.rows, inner.columns) != (site.batch, site.rows, site.inner) or inner.inner > MOST_FEATURES:
        return None
    if inner.bias is not None or inner.scale != 1 or inner.relayout is not None or site.most or inner.most:
        return None
    steps = tuple(dict.fromkeys((inner.step, number, *sites.steps_of(site))))
    if gone & set(steps):
        site = sites.alone(site)
        steps = (inner.step, number, site.step)
    rows = _Rows(inner.result.name, weights)
    try:
        rows.read(kernel)
        return None if gone & set(steps) else _joined(plan, (inner, site), rows, kernel, steps, (used, gone))
    except Different:
        return None


def _joined(
    plan: Plan, pair: tuple[Site, Site], rows: _Rows, kernel: Kernel, steps: tuple[int, ...],
    taken: tuple[dict[str, list[int]], set[int]],
) -> _Found | None:  # fmt: skip
    inner, site = pair
    column = Axis(sites.inner_symbol(site.inner), site.inner)
    b, m, _ = (axis.symbol for axis in site.axes)
    place = column.symbol + (b * (site.known_rows * site.inner) if site.batch > 1 else 0)
    place = place + (m * site.inner if site.known_rows > 1 else 0)
    share, rounded = rows.share()
    assert rows.score is not None and rows.weight is not None
    points = _points(rows, kernel, place, site.batch * site.known_rows * site.inner)
    if points is None or sizes.substitute(rows.weight.index, points) != place:
        return None
    if site.left.outer + site.left.inner != place:
        return None
    made = ir.cast(ir.cast(ir.local_value(SCORES, torch.float32), inner.result.dtype), torch.float32)

    def moved(value: Expression) -> Expression:
        return Rewriter(
            lambda dim: sizes.substitute(dim, points),
            lambda load: made if load.buffer == inner.result.name else None,
            lambda local: local,
            lambda old, new: old,
        ).visit(value)

    score, share = moved(rows.score), moved(share)
    stores = [replace(s, index=sizes.substitute(s.index, points), value=moved(s.value)) for s in rows.stores]
    later = [share, *(store.value for store in stores)]
    if any(column.symbol in sizes.free_symbols(dim) for dim in (*survey(later).dims, *(s.index for s in stores))):
        return None
    producers = tuple(
        one
        for of in (inner, site)
        for one in (*prologues.producers(plan, of, *taken), *prologues.wideners(plan, of, *taken))
        if (of is inner or one.side == "right") and (copied(one.value) is not None or _is_widened(one))
    )
    by_buffer = {one.buffer: one for one in producers}
    d = sizes.loop_symbol("d", inner.inner)
    renamed: dict[Expr, Expr] = {sites.inner_symbol(inner.inner): d}
    across = dict(renamed)
    if inner.columns > 1:
        across[inner.axes[2].symbol] = column.symbol
    scores = Product(
        SCORES, read_operand(inner.left, by_buffer, renamed, d), read_operand(inner.right, by_buffer, across, d), d,
        inner.inner, variants.whole(inner).full,
    )  # fmt: skip
    right = read_operand(site.right, by_buffer, {}, column.symbol)
    total = next((name for name, safe in rows.totals.items() if not safe), f"{rows.most}_total")
    softmax = Softmax(scores, score, rows.most, total, places.of_score(score, site.axes[1], column))
    shifted = ir.apply("sub", score, ir.local_value(rows.most, torch.float32), dtype=torch.float32)
    weight = ir.cast(ir.apply("exp", shifted, dtype=torch.float32), rounded)
    left = Operand(weight_name(inner), rounded, 0, 0, value=weight)
    whole = replace(site, left=left, right=right)
    variant = variants.fused(plan, whole) if site.following >= 0 else variants.plain(plan, whole)
    reads_rows = variant is not None and any(store.buffer in variant.kernels[0].buffers for store in stores)
    if variant is None or reads_rows:
        whole = sites.alone(whole)
        steps = tuple(number for number in steps if number != site.following)
        variant = variants.plain(plan, whole)
    return _checked(plan, _with(variant.kernels[0], softmax, rows, (share, stores), plan), steps, producers, kernel)


def weight_name(inner: Site) -> str:
    return f"{inner.result.name}_weights"


def _points(rows: _Rows, kernel: Kernel, place: Dim, total: int) -> dict[Expr, Dim] | None:
    assert rows.score is not None
    if rows.axis is None:
        return None
    loads = [load for load in survey([rows.score]).loads if load.buffer == rows.result]
    if not loads or any(load.bindings or load.index != loads[0].index for load in loads):
        return None
    return variants.digits(loads[0].index, [*kernel.outer, rows.axis], place, total)


def copied(value: Expression) -> Load | None:
    """What an operand is a copy of, in its own type or another."""
    while isinstance(value, Apply) and value.op == "cast" and value.args[0].dtype.is_floating_point:
        inner = value.args[0]
        if value.dtype is not torch.float32 and value.dtype is not inner.dtype:
            return None
        value = inner
    return value if isinstance(value, Load) and not value.bindings and value.dtype in sites.DTYPES else None


def read_operand(operand: Operand, by_buffer: dict[str, Producer], mapping: dict[Expr, Expr], k: Expr) -> Operand:
    """The operand over other symbols, read from where it was copied from, or as it was before it was widened."""
    producer = by_buffer.get(operand.buffer)
    load = None if producer is None else copied(producer.value)
    index, buffer, dtype = operand.outer + operand.inner, operand.buffer, operand.dtype
    if producer is not None and _is_widened(producer):
        dtype = producer.value.args[0].dtype  # type: ignore[attr-defined]
    if load is not None:
        index, buffer, dtype = load.index, load.buffer, load.dtype
    index = sizes.substitute(index, mapping)
    inner = sizes.coefficient(index, k)
    if inner is None:
        raise Different
    return Operand(buffer, dtype, index - k * inner, k * inner)


def _with(kernel: Kernel, softmax: Softmax, rows: _Rows, shares: tuple[Expression, list[Store]], plan: Plan) -> Kernel:
    """The second product's kernel as that of all."""
    share, stores = shares
    product = kernel.product
    assert product is not None
    summed = ir.local_value(SOFTMAX, torch.float32)
    most, total = (ir.local_value(name, torch.float32) for name in (softmax.most, softmax.total))
    zero, infinity = ir.constant(0, torch.float32), ir.constant(math.inf, torch.float32)
    safe = ir.apply(
        "where", ir.apply("isinf", most, dtype=torch.bool),
        ir.apply("where", ir.apply("gt", most, zero, dtype=torch.bool), infinity, zero, dtype=torch.float32),
        total, dtype=torch.float32,
    )  # fmt: skip
    alike: list[Define] = [
        Define(name, safe if is_safe else total) for name, is_safe in rows.totals.items() if name != softmax.total
    ]
    result = Define(product.local, ir.apply("mul", summed, share, dtype=torch.float32))
    (stage,) = kernel.stages
    stage = replace(stage, statements=(*alike, *stores, result, *stage.statements))
    dtypes = {load.buffer: load.dtype for load in survey([share, *(store.value for store in stores)]).loads}
    dtypes |= {side.buffer: side.dtype for side in (softmax.scores.left, softmax.scores.right)}
    dtypes |= dict(zip(kernel.buffers, kernel.dtypes))
    written = {store.buffer: plan.buffers[store.buffer].dtype for store in stores}
    names = [*(name for name in dtypes if name not in kernel.written), *kernel.written, *written]
    dtypes |= written
    return replace(
        kernel,
        stages=(stage,),
        name=f"attention_{kernel.name.removeprefix('product_')}",
        buffers=tuple(names),
        dtypes=tuple(dtypes[name] for name in names),
        written=kernel.written | set(written),
        product=replace(product, local=SOFTMAX, softmax=softmax),
    )


def _checked(
    plan: Plan, kernel: Kernel, steps: Sequence[int], producers: tuple[Producer, ...], rows: Kernel
) -> _Found | None:
    """Nothing between the steps, the second of which made the weights, disturbs the kernel."""
    assert kernel.product is not None and kernel.product.softmax is not None
    scores = kernel.product.softmax.scores
    early = frozenset((scores.left.buffer, scores.right.buffer))
    last = max(steps)
    if not is_undisturbed(plan, kernel, Span(frozenset(steps), last, steps[1], early, rows.written)):
        return None
    lines = tuple(dict.fromkeys((*rows.locations, *kernel.locations)))
    origins = tuple(dict.fromkeys((*rows.origins, *kernel.origins)))
    return _Found(tuple(steps), last, replace(kernel, locations=lines, origins=origins), producers)

