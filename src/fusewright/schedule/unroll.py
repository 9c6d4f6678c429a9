"""The steps of many equal bodies from those of a few: what is scheduled for one body serves the next ones with other
buffers.

Takes the ordered steps of a program with a few bodies (graph/repeated_layers.py) and says how many were left out; gives
the steps of all.
Always holds: two stretches of steps, one a body, were found to be the same but for names: temporaries made in lowering
the same node of the next body, the next body's own inputs in place of one body's, and all else equal. The steps that
are added are the second stretch with these names moved on, so they compute from one body's values what the second
stretch computes from the first one's. Anything else is `Irregular`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusewright.base.location import Location
from fusewright.base.records import dataclass, replace
from fusewright.loops import ir
from fusewright.loops.ir import Buffer, BufferRef, Expression, Extern, Output, Store
from fusewright.schedule.dependencies import extern_reads
from fusewright.schedule.expressions import Rewriter
from fusewright.schedule.plan import Kernel, Reduce, RunExtern, RunKernel, ScanStep, Stage, Statement, Step

Rename = Callable[[str], str]
_PARTIAL = "_partial"
"""What the temporaries are called that schedule/split.py adds for one of lowering's."""


class Irregular(Exception):
    """The steps of one body are not those of the one before with other names."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """body: of a node, the number of its body. following: a node → the same node of the next body. own: the name of an
    input that one body has of its own → that of the next body. times: how many bodies are to be added. lines: for each
    of them, what its operators are put down to in place of the second stretch's lines."""

    body: Mapping[str, int]
    following: Mapping[str, str]
    own: Mapping[str, str]
    times: int
    lines: Sequence[Mapping[Location, Location]] = ()


@dataclass(slots=True)
class Steps:
    """What `unroll` takes and gives."""

    steps: list[Step]
    kernels: dict[str, Kernel]
    buffers: dict[str, Buffer]
    outputs: tuple[Output, ...]


def unroll(given: Steps, makers: Mapping[str, str], repeat: Repeat) -> Steps:
    """`makers`: of a temporary, the node in whose lowering it was made. Raises Irregular."""
    return _Unroller(given, makers, repeat).run()


class _Unroller:
    def __init__(self, given: Steps, makers: Mapping[str, str], repeat: Repeat) -> None:
        self.given, self.makers, self.repeat = given, makers, repeat
        self.made: dict[str, list[str]] = {}  # by node
        for buffer, node in makers.items():
            self.made.setdefault(node, []).append(buffer)
        self.owned = {*repeat.own, *repeat.own.values()}
        self.next: dict[str, str] = {}  # of what the first stretch touches, what the second one touches in its place

    def run(self) -> Steps:
        given = self.given
        first, second, end = self.stretches()
        self.before, self.inside = self.written(first, second), self.written(second, end)
        for ours, theirs in zip(given.steps[first:second], given.steps[second:end]):
            self.compare(ours, theirs)
        steps, kernels, buffers = given.steps[:end], dict(given.kernels), dict(given.buffers)
        if any(given.buffers[name].role != "temporary" for name in self.inside):
            raise Irregular("a body gives results")
        for turn in range(1, self.repeat.times + 1):
            for name in self.inside:
                new = _numbered(name, turn)
                buffers[new] = replace(given.buffers[name], name=new)
            for step in given.steps[second:end]:
                rename: Rename = lambda name, turn=turn: self.in_turn(name, turn)  # type: ignore  # noqa: E731
                steps.append(self.renamed(step, rename, kernels, turn, self.lines(turn)))
        rest: set[str] = self.written(end, len(given.steps))

        def after(name: str) -> str:
            return name if name in rest else self.behind(name)

        for step in given.steps[end:]:
            steps.append(self.renamed(step, after, kernels, 0, self.lines(self.repeat.times)))
        return Steps(steps, kernels, buffers, tuple(_moved_output(output, after) for output in given.outputs))

    # --- where the bodies are -----------------------------------------------------------------------------------------

    def stretches(self) -> tuple[int, int, int]:
        """Where two stretches of equal length begin, and where the second one ends."""
        for position, step in enumerate(self.given.steps):
            for name in sorted(self.writes(step)):
                if self.repeat.body.get(self.makers.get(name, "")) == 2:
                    other = self.successor(name)
                    second = next((k for k, later in enumerate(self.given.steps) if other in self.writes(later)), -1)
                    end = 2 * second - position
                    if second <= position or end > len(self.given.steps):
                        raise Irregular("bodies overlap")
                    return position, second, end
        raise Irregular("a body has no memory of its own")

    def writes(self, step: Step) -> frozenset[str]:
        if isinstance(step, RunKernel):
            return self.given.kernels[step.kernel].written
        return frozenset(name for name in (*step.extern.outputs, *step.extern.mutates) if name is not None)

    def written(self, start: int, end: int) -> set[str]:
        return set().union(*map(self.writes, self.given.steps[start:end]))

    def successor(self, name: str) -> str | None:
        """The temporary of the next body that is made where this one is in its body."""
        base = name.removesuffix(_PARTIAL)
        node = self.makers.get(base)
        following = None if node is None else self.repeat.following.get(node)
        if node is None or following is None:
            return None
        place, others = self.made[node].index(base), self.made.get(following, [])
        return others[place] + name[len(base) :] if len(others) == len(self.made[node]) else None

    # --- whether they are the same ------------------------------------------------------------------------------------

    def compare(self, ours: Step, theirs: Step) -> None:
        """Raises Irregular unless `theirs` is `ours` with other buffers."""
        if isinstance(ours, RunKernel) and isinstance(theirs, RunKernel):
            left, right = self.given.kernels[ours.kernel], self.given.kernels[theirs.kernel]
            names = {a: self.pair(a, b) for a, b in zip(left.buffers, right.buffers)}
            alike = ours.horizontal == theirs.horizontal and len(left.buffers) == len(right.buffers)
            if not alike or not _same_kernel(
                _renamed_kernel(left, left.name, lambda name: names.get(name, name)), right
            ):
                raise Irregular(f"{left.name} and {right.name} differ")
            return
        if not isinstance(ours, RunExtern) or not isinstance(theirs, RunExtern):
            raise Irregular("a kernel stands where an operator stood")
        one, other = ours.extern, theirs.extern
        if one.mutates or other.mutates or len(one.outputs) != len(other.outputs):
            raise Irregular(f"{one.name} writes to what it is given")
        for a, b in (*zip(extern_reads(one), extern_reads(other)), *zip(one.outputs, other.outputs)):
            if a is not None and b is not None:
                self.pair(a, b)
        moved = _renamed_extern(one, lambda name: self.next[name])
        for field in ("target", "placement", "ordered", "outputs"):
            if getattr(moved, field) != getattr(other, field):
                raise Irregular(f"{one.name} and {other.name} differ")
        if not _same(moved.args, other.args) or not _same(moved.kwargs, other.kwargs) or moved.skinny != other.skinny:
            raise Irregular(f"{one.name} and {other.name} differ")

    def pair(self, ours: str, theirs: str) -> str:
        """`theirs`, where it may stand for `ours` in the next body."""
        if self.next.setdefault(ours, theirs) != theirs:
            raise Irregular(f"{ours} is two buffers in the next body")
        a, b = self.given.buffers[ours], self.given.buffers[theirs]
        if ours == theirs:
            fits = ours not in self.before and ours not in self.inside and ours not in self.owned
        elif ours in self.repeat.own:
            fits = self.repeat.own[ours] == theirs
        elif theirs in self.inside:
            fits = ours in self.before and self.successor(ours) == theirs
        else:
            fits = theirs in self.before and ours not in self.before and self.successor(ours) == theirs
        if not fits or replace(a, name="", position=0) != replace(b, name="", position=0):
            raise Irregular(f"{theirs} does not follow {ours}")
        return theirs

    # --- other names --------------------------------------------------------------------------------------------------

    def in_turn(self, name: str, turn: int) -> str:
        """What an added stretch has in place of a buffer of the second one."""
        if name in self.inside:
            return _numbered(name, turn)
        if name in self.before:
            following = self.next[name]
            return following if turn == 1 else _numbered(following, turn - 1)
        return self.own(name, turn) if name in self.owned else name

    def behind(self, name: str) -> str:
        """What the steps behind all bodies have in place of a buffer that they do not write."""
        if name in self.inside:
            return _numbered(name, self.repeat.times)
        if name in self.owned:
            return self.own(name, self.repeat.times)
        shared = self.next.get(name) == name
        if not shared and (name in self.before or self.makers.get(name.removesuffix(_PARTIAL), "") in self.repeat.body):
            raise Irregular(f"{name} is read far behind where it is made")
        return name

    def own(self, name: str, turns: int) -> str:
        for _ in range(turns):
            if name not in self.repeat.own:
                raise Irregular(f"no body has its own {name}")
            name = self.repeat.own[name]
        return name

    def lines(self, turn: int) -> Mapping[Location, Location]:
        return self.repeat.lines[turn - 1] if 0 < turn <= len(self.repeat.lines) else {}

    def renamed(
        self, step: Step, rename: Rename, kernels: dict[str, Kernel], turn: int, lines: Mapping[Location, Location]
    ) -> Step:
        """The step on other buffers. Its kernel is a new one in `kernels`, or for turn 0 takes the place of the old
        one."""
        if isinstance(step, RunExtern):
            extern = step.extern
            name = _numbered(extern.name, turn) if turn else extern.name
            places = _moved_lines(extern.locations, lines)
            return RunExtern(replace(_renamed_extern(extern, rename), name=name, locations=places))
        name = _numbered(step.kernel, turn) if turn else step.kernel
        kernel = self.given.kernels[step.kernel]
        if lines:
            kernel = replace(kernel, locations=_moved_lines(kernel.locations, lines))
        kernels[name] = _renamed_kernel(kernel, name, rename)
        return RunKernel(name, step.horizontal)


def _moved_lines(locations: tuple[Location, ...], lines: Mapping[Location, Location]) -> tuple[Location, ...]:
    return tuple(dict.fromkeys(lines.get(location, location) for location in locations))


def _numbered(name: str, turn: int) -> str:
    return f"{name}x{turn}"


# --- renaming ---------------------------------------------------------------------------------------------------------


def _renamed_kernel(kernel: Kernel, name: str, rename: Rename) -> Kernel:
    names = {old: rename(old) for old in kernel.buffers}
    if all(old == new for old, new in names.items()):
        return kernel if name == kernel.name else replace(kernel, name=name)

    def load(node: ir.Load) -> Expression | None:
        if node.buffer not in names:
            return None
        bindings, index = rewriter.bindings(node.bindings, node.index)
        return ir.load(names[node.buffer], index, node.dtype, bindings)

    def statement(old: Statement) -> Statement:
        if isinstance(old, Store):
            bindings, index = rewriter.bindings(old.bindings, old.index)
            return Store(names.get(old.buffer, old.buffer), index, rewriter.visit(old.value), old.mode, bindings)
        if isinstance(old, Reduce):
            return Reduce(old.local, old.kind, rewriter.visit(old.value))
        if isinstance(old, ScanStep):
            return ScanStep(old.local, old.kind, rewriter.visit(old.value), old.position)
        return type(old)(old.local, rewriter.visit(old.value))

    rewriter = Rewriter(dim=lambda dim: dim, load=load, local=lambda node: node, bind=lambda symbol, value: symbol)
    return replace(
        kernel,
        name=name,
        stages=tuple(Stage(stage.axes, tuple(map(statement, stage.statements))) for stage in kernel.stages),
        buffers=tuple(names.values()),
        written=frozenset(names[old] for old in kernel.written),
    )


_KERNEL = ("outer", "stages", "buffers", "dtypes", "written", "sizes", "scratch", "inplace", "product")


def _same_kernel(one: Kernel, other: Kernel) -> bool:
    return all(getattr(one, field) == getattr(other, field) for field in _KERNEL) and one.product is None


def _renamed_extern(extern: Extern, rename: Rename) -> Extern:
    return replace(
        extern,
        args=_moved(extern.args, rename),
        kwargs=_moved(extern.kwargs, rename),
        outputs=tuple(None if name is None else rename(name) for name in extern.outputs),
        mutates=tuple(map(rename, extern.mutates)),
        keeps=_moved(extern.keeps, rename),
        skinny=None if extern.skinny is None else replace(extern.skinny, args=_moved(extern.skinny.args, rename)),
    )


def _moved(value: Any, rename: Rename) -> Any:
    if isinstance(value, BufferRef):
        return BufferRef(rename(value.buffer), value.shape, value.stride, value.offset, value.dtype)
    if isinstance(value, (tuple, list)):
        return type(value)([_moved(item, rename) for item in value])
    return value


def _moved_output(output: Output, rename: Rename) -> Output:
    ref = None if output.ref is None else _moved(output.ref, rename)
    return replace(output, buffer=rename(output.buffer) if output.buffer else "", ref=ref)


def _same(one: object, other: object) -> bool:
    """Whether arguments are equal and of the same types (1, True and 1.0 are not)."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other
