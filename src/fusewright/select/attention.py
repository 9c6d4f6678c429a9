"""Attention by kernels of ours: beside the library's operator where sizes are known at run time only, else in its
place.

Takes a scheduled `Plan`; gives its attention operators that a kernel may stand for, and the plan with kernels beside
them (sizes decide in each call which one runs) or instead of them. A kernel that only copies keys or values for the
operator (the heads of a group side by side) is part of the operator's way; ours reads what it copies. Always holds:
both ways write the same buffer, and each step of them has its condition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusewright.base.records import dataclass, replace
from fusewright.loops.ir import Axis, BufferRef, Extern, Load, Store
from fusewright.schedule.build import sizes_used
from fusewright.schedule.plan import Attention, Kernel, Plan, Rows, RunExtern, RunKernel, Step
from fusewright.select.replacement import is_private, touched, with_steps
from fusewright.select.variants import digits
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, known_eq

OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class Site:
    """step: number in the plan. copies: those of kernels that only the operator needs. attention: the kernel's. fits: a
    size that is 1 where the operands fit together, else 0 (the operator then says what is wrong). work: multiplications
    of queries by keys."""

    step: int
    copies: tuple[int, ...]
    kernel: Kernel
    attention: Attention
    fits: Dim
    work: Dim

    @property
    def is_known(self) -> bool:
        """Whether all sizes are; the operands then fit together."""
        return all(
            isinstance(dim, int)
            for dim in (self.fits, self.attention.columns, *(axis.extent for axis in self.kernel.outer))
        )


def find(plan: Plan) -> list[Site]:
    """The plan's attention that fits together, or may."""
    found = (_site(plan, number, step) for number, step in enumerate(plan.steps) if isinstance(step, RunExtern))
    return [site for site in found if site is not None]


def _site(plan: Plan, number: int, step: RunExtern) -> Site | None:
    extern = step.extern
    if (
        extern.target is not OPERATOR
        or step.when is not None
        or extern.mutates
        or extern.outputs[0] is None
        or any(extern.outputs[1:])
    ):
        return None
    arguments = dict(zip(("query", "key", "value", "dropout_p", "is_causal"), extern.args)) | dict(extern.kwargs)
    query, key, value, mask = (arguments.get(name) for name in ("query", "key", "value", "attn_mask"))
    buffer = plan.buffers[extern.outputs[0]]
    result = BufferRef(buffer.name, buffer.shape, buffer.stride, 0, buffer.dtype)
    refs = [query, key, value, result]
    if arguments.get("dropout_p", 0.0) != 0.0 or not all(
        isinstance(ref, BufferRef) and len(ref.shape) == 4 for ref in refs
    ):
        return None
    if any(ref.stride[3] != 1 for ref in refs):  # type: ignore[union-attr]
        return None
    (batch, heads, rows, features), columns = query.shape, key.shape[2]  # type: ignore[union-attr]
    scale = arguments.get("scale")
    if not isinstance(features, int) or not features or not isinstance(scale, (float, int, type(None))):
        return None
    wanted = [(batch, heads, columns, features), (batch, heads, columns, features), (batch, heads, rows, features)]
    fits = sizes.product(
        _equal(*pair) for shape, ref in zip(wanted, refs[1:]) for pair in zip(shape, ref.shape)  # type: ignore
    )
    outer = tuple(Axis(sizes.loop_symbol(f"o{k}", extent), extent) for k, extent in enumerate((batch, heads, rows)))
    masked = None
    if mask is not None:
        aligned = _aligned(mask, (batch, heads, rows))
        if aligned is None:
            return None
        fits = fits * _equal(aligned.shape[3], columns)
        masked = _rows(aligned, outer)
    if fits == 0:
        return None
    sources = [_source(plan, number, ref, outer) for ref in (key, value)]  # type: ignore[arg-type]
    copies = tuple(source[0] for source in sources if source is not None)
    keys, values = (
        _rows(ref, outer[:2], ref.stride[2]) if source is None else source[1]  # type: ignore[union-attr, arg-type]
        for ref, source in zip((key, value), sources)
    )
    given = 1.0 / math.sqrt(features) if scale is None else float(scale)
    causal = bool(arguments.get("is_causal", False))
    queries = _rows(query, outer)  # type: ignore[arg-type]
    attention = Attention(queries, keys, values, masked, _rows(result, outer), columns, features, given, causal)
    kernel = _kernel(plan, extern, attention, outer)
    return Site(number, copies, kernel, attention, fits, sizes.product([batch, heads, rows, columns, features]))


def _rows(ref: BufferRef, axes: Sequence[Axis], step: Dim = 0) -> Rows:
    """The rows of an operand; dimensions of size 1 stay where they are."""
    index = ref.offset
    for axis, size, stride in zip(axes, ref.shape, ref.stride):
        if size != 1:
            index = index + axis.symbol * stride
    return Rows(ref.buffer, ref.dtype, index, step)


def _aligned(mask: object, extents: Sequence[Dim]) -> BufferRef | None:
    """The mask with four dimensions; None where that is not what it is, or where its columns do not lie side by
    side."""
    if not isinstance(mask, BufferRef) or not 1 <= len(mask.shape) <= 4 or mask.stride[-1] != 1:
        return None
    missing = 4 - len(mask.shape)
    shape = (*(1,) * missing, *mask.shape)
    if not all(size == 1 or known_eq(size, extent) for size, extent in zip(shape, extents)):
        return None
    return replace(mask, shape=shape, stride=(*(0,) * missing, *mask.stride))


def _equal(one: Dim, other: Dim) -> Dim:
    """1 where the sizes are equal, else 0."""
    if known_eq(one, other):
        return 1
    return sizes.maximum(0, 1 - (sizes.maximum(one, other) - sizes.minimum(one, other)))


def _source(plan: Plan, number: int, ref: BufferRef, outer: Sequence[Axis]) -> tuple[int, Rows] | None:
    """What keys or values are a copy of, and the number of the step that copies them for the operator alone."""
    touches = [at for at in range(len(plan.steps)) if ref.buffer in set().union(*touched(plan, at))]
    step = plan.steps[touches[0]]
    if len(touches) != 2 or touches[1] != number or not is_private(plan, ref.buffer) or not isinstance(step, RunKernel):
        return None
    kernel = plan.kernels[step.kernel]
    statements = [statement for stage in kernel.stages for statement in stage.statements]
    if step.when is not None or kernel.scratch or len(statements) != 1:
        return None
    (store,) = statements
    if not isinstance(store, Store) or store.mode != "write" or store.bindings:
        return None
    load = store.value
    if not isinstance(load, Load) or load.bindings or load.dtype is not ref.dtype:
        return None
    if any(load.buffer in touched(plan, at)[1] for at in range(touches[0] + 1, number)):
        return None
    axes = [*kernel.outer, *kernel.stages[0].axes]
    column, feature = (sizes.loop_symbol(name, size) for name, size in zip(("column", "feature"), ref.shape[2:]))
    place = _rows(ref, outer[:2]).outer + column * ref.stride[2] + feature
    points = digits(store.index, axes, place, sizes.product(axis.extent for axis in axes))
    if points is None:
        return None
    index = sizes.substitute(load.index, points)
    along, across = sizes.coefficient(index, column), sizes.coefficient(index, feature)
    if along is None or across != 1:
        return None
    return touches[0], Rows(load.buffer, load.dtype, index - column * along - feature, along)


def _kernel(plan: Plan, extern: Extern, attention: Attention, outer: tuple[Axis, ...]) -> Kernel:
    operands = attention.operands
    dtypes = {rows.buffer: plan.buffers[rows.buffer].dtype for rows in operands}
    extents = [axis.extent for axis in outer]
    dims = [*extents, attention.columns, *(dim for rows in operands for dim in (rows.outer, rows.step))]
    return Kernel(
        f"attention_{extern.name}",
        outer,
        (),
        tuple(dtypes),
        tuple(dtypes.values()),
        frozenset({attention.result.buffer}),
        sizes=sizes_used(dims, (), (), plan.size_symbols),
        locations=extern.locations,
        origins=(extern.name,),
        attention=attention,
    )


def beside(plan: Plan, chosen: Sequence[Site], most_work: int) -> Plan:
    """The plan with the sites' kernels beside their operators: a kernel for up to `most_work` multiplications, the
    operator for more."""
    kernels = dict(plan.kernels) | {site.kernel.name: site.kernel for site in chosen}
    steps: list[tuple[Step, ...]] = [(step,) for step in plan.steps]
    for site in chosen:
        few = sizes.maximum(sizes.minimum(most_work + 1 - site.work, 1), 0) * site.fits
        for copy in site.copies:
            steps[copy] = (replace(plan.steps[copy], when=1 - few),)
        steps[site.step] = (RunKernel(site.kernel.name, when=few), replace(plan.steps[site.step], when=1 - few))
    return with_steps(plan, kernels, dict(plan.buffers), [step for group in steps for step in group])


def replaced(plan: Plan, chosen: Sequence[tuple[Site, bool]]) -> Plan:
    """The plan with kernels in place of the sites' operators, whose operands fit together. With each site: whether its
    kernel is for many rows at a time."""
    own = {site.step: replace(site.kernel, attention=replace(site.attention, many=many)) for site, many in chosen}
    gone = {copy for site, _ in chosen for copy in site.copies}
    steps: list[Step] = []
    for number, step in enumerate(plan.steps):
        if number in own:
            steps.append(RunKernel(own[number].name))
        elif number not in gone:
            if number - 1 in gone and isinstance(step, RunKernel):  # what it ran together with has gone
                step = RunKernel(step.kernel, when=step.when)
            steps.append(step)
    used = {step.kernel for step in steps if isinstance(step, RunKernel)}
    kernels = dict(plan.kernels) | {kernel.name: kernel for kernel in own.values()}
    return with_steps(
        plan, {name: kernel for name, kernel in kernels.items() if name in used}, dict(plan.buffers), steps
    )
