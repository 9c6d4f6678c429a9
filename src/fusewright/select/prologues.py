"""Pointwise kernels in front of products: an operand that a product kernel computes for itself, instead of reading it
from memory.

Takes a scheduled `Plan` and a `Site`; gives `Producer`s (the stored values that the site's product alone reads) and the
site with operands that are expressions over what their producers read. Always holds: the expression is the one that was
stored, so its value is rounded to the operand's type at the same place; nothing between the producer and the product's
place writes to what the producer reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from fusewright.base.records import dataclass, replace
from fusewright.base.thresholds import MOST_PROLOGUE_NODES
from fusewright.loops import ir
from fusewright.loops.ir import Apply, Buffer, Expression, LocalValue, Store
from fusewright.schedule.expressions import survey
from fusewright.schedule.plan import Define, Kernel, Operand, Plan, Reduce, RunKernel, Stage, Statement, roots
from fusewright.select.replacement import Replacement, is_private, touched
from fusewright.select.sites import Site, steps_of
from fusewright.select.statements import Different, Statements
from fusewright.select.variants import digits, substituted
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim

SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class Producer:
    """step: of a pointwise kernel; buffer: what the product reads of it, as its operand `side`; value: an element, over
    the product's outer symbols and `k`; alone: a kernel that stores this buffer and nothing else."""

    step: int
    side: str
    buffer: str
    value: Expression
    alone: Kernel


def uses(plan: Plan) -> dict[str, list[int]]:
    """The numbers of the steps that touch each buffer."""
    found: dict[str, list[int]] = {}
    for number in range(len(plan.steps)):
        for name in set().union(*touched(plan, number)):
            found.setdefault(name, []).append(number)
    return found


def producers(
    plan: Plan, site: Site, used: Mapping[str, Sequence[int]], taken: Collection[int] = ()
) -> tuple[Producer, ...]:
    """Of the site's operands, at most one a side. used: what `uses` gives; taken: steps that have gone."""
    if site.left.buffer == site.right.buffer:
        return ()
    found = (_producer(plan, site, side, used, taken) for side in SIDES)
    return tuple(producer for producer in found if producer is not None)


def wideners(
    plan: Plan, site: Site, used: Mapping[str, Sequence[int]], taken: Collection[int] = ()
) -> tuple[Producer, ...]:
    """Of the site's operands, those that a kernel of several stages stores as float32, halves before: whoever reads
    halves may have it store them. Their values stand for what is stored, and are none to compute."""
    found = []
    for side in SIDES if site.left.buffer != site.right.buffer else ():
        number, kernel = _writer(plan, site, side, used, taken) or (-1, None)
        name = getattr(site, side).buffer
        if kernel is None or len(kernel.stages) == 1 or kernel.product is not None:
            continue
        statements = [statement for stage in kernel.stages for statement in stage.statements]
        known = {one.local: one.value for one in statements if isinstance(one, Define)}
        stores = [one for one in statements if isinstance(one, Store) and one.buffer == name]
        read = {load.buffer for load in survey([root for one in statements for root in roots(one)]).loads}
        if len(stores) != 1 or stores[0].mode != "write" or name in read:  # a later stage may read it as float32
            continue
        value = stores[0].value
        value = known.get(value.name, value) if isinstance(value, LocalValue) else value
        if not isinstance(value, Apply) or value.op != "cast" or value.dtype is not torch.float32:
            continue
        stand_in = ir.cast(ir.local_value(name, value.args[0].dtype), value.dtype)
        found.append(Producer(number, side, name, stand_in, kernel))
    return tuple(found)


def _writer(
    plan: Plan, site: Site, side: str, used: Mapping[str, Sequence[int]], taken: Collection[int]
) -> tuple[int, Kernel] | None:
    """The step and the kernel whose result the site's product alone reads, as that operand."""
    operand: Operand = getattr(site, side)
    name = operand.buffer
    touching = used.get(name, ())  # a buffer of the site's own is touched by no step of the plan
    if (
        operand.checks
        or len(touching) != 2
        or touching[1] != site.step
        or touching[0] in taken
        or not is_private(plan, name)
    ):
        return None
    step = plan.steps[touching[0]]
    return (touching[0], plan.kernels[step.kernel]) if isinstance(step, RunKernel) else None


def _producer(
    plan: Plan, site: Site, side: str, used: Mapping[str, Sequence[int]], taken: Collection[int]
) -> Producer | None:
    written = _writer(plan, site, side, used, taken)
    if written is None:
        return None
    number, kernel = written
    operand: Operand = getattr(site, side)
    name = operand.buffer
    stored = _stored(kernel, name)
    if stored is None or len({plan.buffers[buffer].device for buffer in (*kernel.buffers, site.result.name)}) != 1:
        return None
    value, index = stored
    axes = [*kernel.outer, *kernel.stages[0].axes]
    total = sizes.product(axis.extent for axis in axes)
    points = digits(index, axes, operand.outer + operand.inner, total) if isinstance(total, int) else None
    if points is None:
        return None
    read = {load.buffer for load in survey([value]).loads}
    if any(read & touched(plan, later)[1] for later in range(number, max(steps_of(site)) + 1)):
        return None
    alone = without(kernel, kernel.written - {name}, f"{kernel.name}_{name}")
    assert alone is not None
    return Producer(number, side, name, substituted(value, points), alone)


def _stored(kernel: Kernel, name: str) -> tuple[Expression, Dim] | None:
    """(value, index) of the kernel's only store to a buffer, over its axes alone; None where it is not a pointwise
    kernel, or gathers."""
    if len(kernel.stages) != 1 or kernel.scratch or kernel.product is not None or kernel.sizes:
        return None
    found: list[Store] = []
    try:
        Statements().read(kernel, _refused, lambda stage, store: found.append(store))
    except Different:
        return None
    kept = [store for store in found if store.buffer == name]
    if len(kept) != 1:
        return None
    value = kept[0].value
    seen = survey([value])
    if seen.nodes > MOST_PROLOGUE_NODES or any(load.bindings for load in seen.loads) or seen.checks or seen.locals:
        return None
    return value, kept[0].index


def _refused(stage: Stage, statement: Reduce) -> None:
    raise Different


def computing(site: Site, chosen: Sequence[Producer]) -> Site:
    """The site with these operands computed from what their producers read."""
    for producer in chosen:
        operand = replace(getattr(site, producer.side), value=producer.value)
        lines = dict.fromkeys((*producer.alone.locations, *site.extern.locations))
        site = replace(site, extern=replace(site.extern, locations=tuple(lines)), **{producer.side: operand})
    return site


def without(kernel: Kernel, dropped: Collection[str], name: str = "") -> Kernel | None:
    """The pointwise kernel without its stores to these buffers; None where none is left."""
    (stage,) = kernel.stages
    kept = [
        statement
        for statement in stage.statements
        if not isinstance(statement, Store) or statement.buffer not in dropped
    ]
    needed: set[str] = set()
    statements = []
    for statement in reversed(kept):
        if isinstance(statement, Define) and statement.local not in needed:
            continue
        needed |= survey(roots(statement)).locals
        statements.append(statement)
    written = kernel.written - set(dropped)
    if not written:
        return None
    read = {load.buffer for load in survey([root for statement in statements for root in roots(statement)]).loads}
    touched_ = [(buffer, dtype) for buffer, dtype in zip(kernel.buffers, kernel.dtypes) if buffer in read | written]
    return replace(
        kernel,
        name=name or kernel.name,
        stages=(replace(stage, statements=tuple(reversed(statements))),),
        buffers=tuple(buffer for buffer, _ in touched_),
        dtypes=tuple(dtype for _, dtype in touched_),
        written=written,
        inplace=(),
    )


def narrowed(plan: Plan, widened: Iterable[Producer]) -> dict[str, Buffer]:
    """The buffers that these store, as halves."""
    return {
        one.buffer: replace(plan.buffers[one.buffer], dtype=one.value.args[0].dtype)  # type: ignore[attr-defined]
        for one in widened
    }


def _storing(kernel: Kernel, buffers: Mapping[str, Buffer]) -> Kernel:
    """The kernel that stores halves in these, where it widened them."""
    known: dict[str, Expression] = {}

    def halved(statement: Statement) -> Statement:
        if isinstance(statement, Define):
            known[statement.local] = statement.value
        if not isinstance(statement, Store) or statement.buffer not in buffers:
            return statement
        value = statement.value
        value = known.get(value.name, value) if isinstance(value, LocalValue) else value
        assert isinstance(value, Apply) and value.op == "cast"
        return replace(statement, value=value.args[0])

    stages = (replace(stage, statements=tuple(map(halved, stage.statements))) for stage in kernel.stages)
    dtypes = (buffers[name].dtype if name in buffers else dtype for name, dtype in zip(kernel.buffers, kernel.dtypes))
    return replace(kernel, stages=tuple(stages), dtypes=tuple(dtypes), inplace=())


def of_producers(
    plan: Plan, chosen: Sequence[Producer], widened: Sequence[Producer] = ()
) -> list[Replacement]:
    """What is left of the producers' kernels, in their places, once products compute the chosen ones' buffers
    themselves, and read the others as halves."""
    dropped: dict[int, set[str]] = {}
    halves = narrowed(plan, widened)
    for producer in (*chosen, *widened):
        dropped.setdefault(producer.step, set()).add(producer.buffer)
    found = []
    for number, buffers in dropped.items():
        step = plan.steps[number]
        assert isinstance(step, RunKernel)
        kernel = plan.kernels[step.kernel]
        stored = {name: halves[name] for name in buffers if name in halves}
        narrow = _storing(kernel, stored)
        rest = without(narrow, buffers - stored.keys()) if buffers != stored.keys() else narrow
        found.append(Replacement((number,), number, () if rest is None else (rest,), tuple(stored.values())))
    return found
