"""A plan's invariants, checked: for tests and for debug runs after every schedule.

Takes a `Plan`; raises `PlanError` naming the kernel and the rule that is broken. Always holds after it passes: names
are defined before they are read, stages keep the rules of `plan.py`, every buffer is written before it is read, and
live buffers do not overlap in the arena; inputs are written to when every check has passed.
"""

from __future__ import annotations

from fusewright.loops.ir import Axis, Store
from fusewright.schedule.dependencies import extern_reads
from fusewright.schedule.expressions import survey
from fusewright.schedule.horizontal_fusion import regions
from fusewright.schedule.plan import (
    UNBOUNDED,
    Define,
    Kernel,
    Plan,
    Product,
    Reduce,
    RunKernel,
    ScanStep,
    Stage,
    Statement,
    roots,
)
from fusewright.sizes.expressions import Dim, Expr, free_symbols, is_multiple, known_le


class PlanError(AssertionError):
    """A scheduled plan breaks its own rules: a defect of the scheduler."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


def verify(plan: Plan) -> None:
    for kernel in plan.kernels.values():
        verify_kernel(kernel)
        for name, dtype in zip(kernel.buffers, kernel.dtypes):
            _require(name in plan.buffers, f"{kernel.name}: buffer {name} is not in the plan")
            _require(plan.buffers[name].element == dtype, f"{kernel.name}: {name} has another dtype in the plan")
    _verify_order(plan)
    _verify_checks(plan)
    _verify_horizontal(plan)
    _verify_arena(plan)


# --- kernels ----------------------------------------------------------------------------------------------------------


def verify_kernel(kernel: Kernel) -> None:
    name = kernel.name
    _require(
        len(kernel.buffers) == len(set(kernel.buffers)) == len(kernel.dtypes),
        f"{name}: buffers and dtypes do not match",
    )
    _verify_symbols(name, kernel.outer, "o")
    scratch = {item.name for item in kernel.scratch}
    known = scratch | set(kernel.buffers)
    chosen = dict(kernel.product.chosen) if kernel.product is not None else {}
    _require(
        known.issuperset(buffer for buffers in chosen.values() for buffer in buffers),
        f"{name}: a chosen buffer is no parameter",
    )
    known |= chosen.keys()
    written = kernel.written | {name for name, buffers in chosen.items() if kernel.written.issuperset(buffers)}
    outer_symbols = {axis.symbol for axis in kernel.outer}
    visible: set[str] = set() if kernel.product is None else _locals(kernel.product)
    if kernel.product is not None:
        _verify_operands(kernel, kernel.product, known)
    stored_before: set[str] = set()
    for number, stage in enumerate(kernel.stages):
        _verify_symbols(name, stage.axes, "i")
        allowed = outer_symbols | {axis.symbol for axis in stage.axes} | set(kernel.sizes)
        here = set(visible)
        later: set[str] = set()
        stored: set[str] = set()
        scans = [s for s in stage.statements if isinstance(s, ScanStep)]
        _require(not scans or len(stage.axes) == 1, f"{name}: stage {number} scans along {len(stage.axes)} axes")
        for statement in stage.statements:
            found = survey(roots(statement))
            undefined = found.locals - here
            _require(not undefined, f"{name}: stage {number} reads undefined locals {sorted(undefined)}")
            for load in found.loads:
                _require(load.buffer in known, f"{name}: {load.buffer} is no parameter")
                _require(load.buffer not in stored, f"{name}: stage {number} loads {load.buffer} after storing it")
                _require(
                    load.buffer not in scratch or load.buffer in stored_before,
                    f"{name}: {load.buffer} is read before it is filled",
                )
            bound = {sym for load in found.loads for sym, _ in load.bindings}
            dims: list[Dim] = list(found.dims)
            if isinstance(statement, Store):
                _require(statement.buffer in known, f"{name}: {statement.buffer} is no parameter")
                _require(
                    statement.buffer in scratch or statement.buffer in written,
                    f"{name}: {statement.buffer} is not in written",
                )
                stored.add(statement.buffer)
                dims.append(statement.index)
                bound |= {sym for sym, _ in statement.bindings}
                if statement.buffer in scratch:
                    _require(
                        free_symbols(statement.index).isdisjoint(outer_symbols),
                        f"{name}: scratch index with an outer axis",
                    )
            for dim in dims:
                loose = {sym for sym in free_symbols(dim) if sym not in allowed and sym not in bound}
                _require(not loose, f"{name}: stage {number} uses unknown symbols {loose} in {dim}")
            _define(statement, stage, here, later)
        visible |= later
        stored_before |= stored


def _locals(product: Product) -> set[str]:
    of_softmax = set() if product.softmax is None else {product.softmax.most, product.softmax.total}
    return {product.local, *of_softmax, *(one.local for one in product.besides)}


def _verify_operands(kernel: Kernel, product: Product, known: set[str], outer: frozenset[Expr] = frozenset()) -> None:
    allowed = {product.k, *(axis.symbol for axis in kernel.outer), *outer}
    made: set[str] = set()
    if product.softmax is not None:
        made = {product.softmax.scores.local, product.softmax.most}
        _verify_operands(kernel, product.softmax.scores, known, frozenset({product.k}))
    for part in () if product.chain is None else product.chain.parts:
        made.add(part.local)
        _verify_operands(kernel, part, known, frozenset({product.k}))
    for one in product.besides:
        _require(one.left == product.left and one.k is product.k, f"{kernel.name}: {one.local} is of another operand")
        _verify_operands(kernel, one, known, outer)
    for side in (product.left, product.right):
        if side.value is None:
            _require(side.buffer in known, f"{kernel.name}: {side.buffer} is no parameter")
            continue
        _require(
            side.value.dtype is side.dtype and not side.checks,
            f"{kernel.name}: an operand of {side.dtype} is not what is computed",
        )
        found = survey([side.value])
        for load in found.loads:
            _require(
                load.buffer in known - kernel.written, f"{kernel.name}: {load.buffer} is no parameter that is only read"
            )
        loose = {symbol for dim in found.dims for symbol in free_symbols(dim)} - allowed
        _require(found.locals <= made, f"{kernel.name}: an operand reads locals {sorted(found.locals)}")
        _require(not loose, f"{kernel.name}: an operand uses unknown symbols {loose}")


def _define(statement: Statement, stage: Stage, here: set[str], later: set[str]) -> None:
    if isinstance(statement, Define):
        here.add(statement.local)
        if not stage.axes:
            later.add(statement.local)
    elif isinstance(statement, Reduce):
        later.add(statement.local)
    elif isinstance(statement, ScanStep):
        here.add(statement.local)
        if statement.position is not None:
            here.add(statement.position)


def _verify_symbols(name: str, axes: tuple[Axis, ...], prefix: str) -> None:
    for k, axis in enumerate(axes):
        _require(str(axis.symbol) == f"{prefix}{k}", f"{name}: axis {k} is called {axis.symbol}")


# --- order and memory -------------------------------------------------------------------------------------------------


def _touched(plan: Plan, number: int) -> tuple[set[str], set[str]]:
    step = plan.steps[number]
    if isinstance(step, RunKernel):
        kernel = plan.kernels[step.kernel]
        writes = set(kernel.written)
        reads = set()
        for stage in kernel.stages:
            for statement in stage.statements:
                reads |= {load.buffer for load in survey(roots(statement)).loads if load.buffer in kernel.buffers}
        first = _first_writes(kernel)
        return reads - first, writes
    extern = step.extern
    return set(extern_reads(extern)) | set(extern.mutates), {
        *(name for name in extern.outputs if name is not None),
        *extern.mutates,
    }


def _verify_checks(plan: Plan) -> None:
    changed: set[str] = set()
    for number in range(len(plan.steps)):
        writes = _touched(plan, number)[1]
        _require(
            bool(writes) or not changed,
            f"step {number} may fail, its call cannot be repeated: {sorted(changed)} is written to before it",
        )
        changed |= {name for name in writes if plan.buffers[name].role == "input"}


def _first_writes(kernel: Kernel) -> set[str]:
    """Buffers that the kernel stores in an earlier stage than it loads them."""
    first: set[str] = set()
    read: set[str] = set()
    for stage in kernel.stages:
        for statement in stage.statements:
            read |= {load.buffer for load in survey(roots(statement)).loads}
        first |= {
            s.buffer for s in stage.statements if isinstance(s, Store) and s.mode == "write" and s.buffer not in read
        }
    return first


def _verify_order(plan: Plan) -> None:
    # By buffer: under which conditions it was written.
    filled: dict[str, set[Dim | None]] = {
        name: {None}
        for name, buffer in plan.buffers.items()
        if buffer.role in ("input", "constant") or 0 in buffer.shape  # of which nothing is read
    }
    for number, step in enumerate(plan.steps):
        reads, writes = _touched(plan, number)
        label = step.kernel if isinstance(step, RunKernel) else step.extern.name
        missing = [name for name in reads if not _is_filled(filled.get(name, set()), step.when)]
        _require(not missing, f"step {number} ({label}) reads {sorted(missing)} before anything wrote it")
        if isinstance(step, RunKernel):
            product = plan.kernels[step.kernel].product
            _require(
                product is None or product.most in (0, UNBOUNDED) or step.when is not None,
                f"{label} is for few rows, but runs for any",
            )
        for name in writes:
            filled.setdefault(name, set()).add(step.when)
    for output in plan.outputs:
        if output.kind in ("buffer", "view"):
            name = output.buffer if output.kind == "buffer" or output.ref is None else output.ref.buffer
            _require(_is_filled(filled.get(name, set()), None), f"output {name} is never written")


def _is_filled(conditions: set[Dim | None], when: Dim | None) -> bool:
    """Whether one of the writes happened whenever `when` holds."""
    return (
        None in conditions or when in conditions or any(1 - one in conditions for one in conditions if one is not None)
    )


def _verify_horizontal(plan: Plan) -> None:
    """Kernels that run at the same time write nothing that another one of them touches."""
    touched: set[str] = set()
    written: set[str] = set()
    for number, step in enumerate(plan.steps):
        reads, writes = _touched(plan, number)
        if isinstance(step, RunKernel) and step.horizontal:
            _require(
                number > 0 and isinstance(plan.steps[number - 1], RunKernel),
                f"step {number} runs at the same time as no kernel",
            )
            clash = (reads | writes) & written | writes & touched
            _require(
                not clash, f"step {number} ({step.kernel}) runs at the same time as kernels that touch {sorted(clash)}"
            )
        else:
            touched, written = set(), set()
        touched |= reads | writes
        written |= writes


def _verify_arena(plan: Plan) -> None:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, region in enumerate(regions(plan.steps)):
        reads, writes = _touched(plan, number)
        for name in reads | writes:
            if plan.buffers[name].role in ("temporary", "output"):
                first.setdefault(name, region)
                last[name] = region
    for output in plan.outputs:
        name = output.buffer if output.kind == "buffer" or output.ref is None else output.ref.buffer
        if name in last:
            last[name] = len(plan.steps)
    for name in first:
        temporary = plan.buffers[name].role == "temporary"
        places = (name in plan.placements) + (name in plan.last_use)
        _require(places == temporary, f"{name} is placed twice or not at all")
    pairs = {pair: name for name, kernel in plan.kernels.items() for pair in kernel.inplace}
    allowed = {frozenset(pair) for pair in pairs}
    _require(len({*plan.takes_over.values()}) == len(plan.takes_over), "two buffers take over the same memory")
    for written, read in plan.takes_over.items():
        _require((read, written) in pairs, f"{written} takes over {read}, but no kernel writes it there")
        _require(last[read] == first[written], f"{written} takes over {read} while both are in use")
        _require(read not in plan.placements, f"{written} takes over {read}, which is in the arena")
    placed = sorted(plan.placements)
    for k, a in enumerate(placed):
        place = plan.placements[a]
        _require(is_multiple(place.offset, 64), f"{a} is not aligned")
        for b in placed[k + 1 :]:
            other = plan.placements[b]
            if last[a] < first[b] or last[b] < first[a] or frozenset((a, b)) in allowed:
                continue
            _require(_disjoint(place.offset, place.size, other.offset, other.size), f"{a} and {b} overlap in the arena")


def _disjoint(a: Dim, a_size: Dim, b: Dim, b_size: Dim) -> bool:
    gap, other = b - (a + a_size), a - (b + b_size)
    return any(_not_negative(d) for d in (gap, other))


def _not_negative(d: Dim) -> bool:
    return known_le(0, d) is True
