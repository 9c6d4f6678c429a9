"""Calls whose result depends on a comparison of sizes: both branches are recorded, so that one version serves the sizes
of either.

Takes a call of a Python function that is interpreted; gives its result. Where the function itself compares symbolic
sizes (`if height == width: return table`) and gives a tensor, it is interpreted once for each outcome, and the result
is chosen by the sizes at run time; no outcome becomes a guard. Always holds: nothing that is recorded for one outcome
takes it for granted, so it may run for any sizes; branches that have an effect, draw random numbers, read something new
from outside, make guards of their own, cost a matrix product or do not give plain tensors that are the same size for
their outcome raise `Retry`, and the frame is captured again with the comparison as a guard, as it is everywhere else. A
chosen result is a tensor of its own: where the program could tell (it writes to it, returns it, or asks for its
identity or gradient), `Retry` is raised as well.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.base.signals import Retry, Signal, UserException
from fusewright.capture.border.aliasing import root_of, written_since
from fusewright.capture.border.effects import stamp
from fusewright.capture.border.native import native
from fusewright.capture.bytecode.instructions import CO_GENERATOR
from fusewright.operators.schema import facts
from fusewright.record.traced_tensor import TracedTensor
from fusewright.sizes.expressions import Dim, Relation
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.symint import SymNode, size_of
from fusewright.sizes.tensor_type import contiguous_strides

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Frame, Tracer

aten = torch.ops.aten

GUARDED = "guarded"
"""What is noted of a code object, beside the sizes that were seen, when its branches cannot be joined."""
MOST_BRANCHES = 4
MOST_OPERATORS = 16
"""That one way may record: all of them run at every call."""
_HEAVY = frozenset({
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten.sort.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
})  # fmt: skip
_VALUES = (int, float, bool, str, type(None), torch.SymInt, torch.dtype, torch.device, torch.nn.Module)

GROWS = 4

Path = tuple[tuple[Relation, bool], ...]


@dataclass(slots=True)
class Fork:
    """A frame whose comparisons of sizes are open. `answers`: what they are in this run; `known`: the sizes, with these
    answers learnt."""

    frame: Frame
    known: ShapeEnv
    around: Fork | None
    answers: dict[Relation, bool] = field(default_factory=dict)
    asked: list[tuple[Relation, bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Way:
    """One outcome: the answers that lead to it, the sizes with these learnt, and the result."""

    path: Path
    known: ShapeEnv
    result: TracedTensor


class Branches:
    """The calls of one attempt of which both branches may be taken."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.fork: Fork | None = None
        self.joined: list[tuple[TracedTensor, set[torch.fx.Node], types.CodeType]] = []  # in whose memory it may lie

    def may_fork(self, tracer: Tracer, function: types.FunctionType, arguments: list[Any]) -> bool:
        """Whether a call's comparisons are left open: its arguments cannot be changed by it, so it may be interpreted
        again."""
        if not self.enabled or tracer.recorder.env is None or not tracer.recorder.env.symbols:
            return False
        code = function.__code__
        if (code, GUARDED) in tracer.history:
            return False
        if function.__closure__ is not None or code.co_flags & CO_GENERATOR:
            return False
        return all(type(value) is TracedTensor or isinstance(value, _VALUES) for value in arguments)

    def call(self, tracer: Tracer, function: types.FunctionType, make: Callable[[], Frame]) -> object:
        """The call whose frame `make` makes."""
        start, before = _state(tracer), _last_node(tracer)
        asked, result = self._run(tracer, make(), ())
        if not asked:
            return result
        now = _state(tracer)
        if (
            type(result) is TracedTensor
            and now[GROWS:] == start[GROWS:]
            and _is_light(tracer, before, 1)
            and not _may_train(tracer)
        ):
            return _Joining(self, tracer, function.__code__, make, now).join(asked, result)
        env = tracer.recorder.env
        assert env is not None
        for relation, _ in asked:
            env.guard(relation)
        return result

    def _run(self, tracer: Tracer, frame: Frame, path: Path) -> tuple[Path, object]:
        """Interprets the frame with the answers of `path`: all that was asked, and the result."""
        env = tracer.recorder.env
        assert env is not None
        self.fork = fork = Fork(frame, env, self.fork, dict(path), list(path))
        if path:
            fork.known = env.copy()
            for relation, answer in path:
                fork.known.suppose(relation if answer else relation.negated())
        try:
            result = tracer.execute(frame, None)
            return tuple(fork.asked), result
        except BaseException:
            if not path:  # the comparisons decided as they do everywhere
                for relation, _ in fork.asked:
                    env.guard(relation)
            raise
        finally:
            self.fork = fork.around

    def answer(self, tracer: Tracer, comparison: Any) -> bool:
        """The outcome of a comparison of sizes, or of a size with zero."""
        fork = self.fork
        node: Any = comparison.node if type(comparison) is torch.SymBool else None
        relation = node.value if isinstance(node, SymNode) else None
        if fork is None or not isinstance(relation, Relation) or not node.has_hint():
            return bool(native(bool, comparison))
        around: Fork | None = fork
        while around is not None:
            if relation in around.answers:
                return around.answers[relation]
            around = around.around
        if tracer.frame is not fork.frame or fork.known.generally(relation) is not None:
            return self._decided(fork, relation, comparison)
        answer = bool(node._concrete_hint())
        fork.answers[relation] = answer
        fork.asked.append((relation, answer))
        return answer

    def _decided(self, fork: Fork, relation: Relation, comparison: Any) -> bool:
        answer = fork.known.known(relation)
        return bool(native(bool, comparison)) if answer is None else answer

    def check(self, outputs: tuple[object, ...], tells: bool) -> None:
        """Raises Retry where the program can tell a chosen result from what eager has: it has written to it or to what
        it was chosen from, or returns it or a view of it. `tells`: the program wants gradients, or has asked whether
        two tensors are the same object."""
        leaving = {id(_root(value)) for value in outputs if isinstance(value, TracedTensor)}
        for result, memory, code in self.joined:
            if tells or id(result) in leaving or not memory.isdisjoint(written_since(result.node)):
                raise Retry(guarded=frozenset({code}))


def _root(value: TracedTensor) -> TracedTensor:
    """What a tensor is a view of, or may be."""
    while value.viewed is not None:
        value = value.viewed
    return value


def _state(tracer: Tracer) -> tuple[object, ...]:
    """What a call that has no effect and reads nothing new leaves as it was. The first GROWS grow by what is read or
    asked."""
    world, recorder = tracer.world, tracer.recorder
    env = recorder.env
    assert env is not None
    return (
        len(env.guards), len(world.input_sources), len(env.symbols), len(world.numbers),
        stamp(world.effects), world.store_count, len(recorder.submodules), recorder.freed, len(recorder.read_sizes),
        tracer.suspended(),
        torch.is_grad_enabled(),
    )  # fmt: skip


def _may_train(tracer: Tracer) -> bool:
    """Whether gradients may be wanted: they would flow through both branches."""
    return torch.is_grad_enabled() and any(
        isinstance(real, torch.Tensor) and real.requires_grad for _, real in tracer.recorder.inputs
    )


def _last_node(tracer: Tracer) -> torch.fx.Node:
    """The last node of the graph so far, or the mark in front of the first."""
    return next(iter(reversed(tracer.recorder.graph.nodes)), tracer.recorder.graph._root)  # type: ignore[no-any-return]


def _is_light(tracer: Tracer, before: torch.fx.Node, branches: int) -> bool:
    """Whether what was recorded after `before`, for that many branches, may run at every call: it has no effect and
    costs little."""
    count, node = 0, before.next
    while node.op != "root":
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            known = facts(node.target)
            if node.target in _HEAVY or known.written or known.random or known.effect or node.meta.get("random"):
                return False
            count += not known.is_view
        node = node.next
    return count <= MOST_OPERATORS * branches


class _Joining:
    """The branches of one call."""

    def __init__(
        self,
        branches: Branches,
        tracer: Tracer,
        code: types.CodeType,
        make: Callable[[], Frame],
        start: tuple[object, ...],
    ) -> None:
        self.branches, self.tracer, self.code, self.make, self.start = branches, tracer, code, make, start
        self.recorder = tracer.recorder
        assert tracer.recorder.env is not None
        self.env: ShapeEnv = tracer.recorder.env
        self.found: list[_Way] = []

    def join(self, asked: Path, result: TracedTensor) -> TracedTensor:
        before = _last_node(self.tracer)
        tree = self.tree(asked, result, 0)
        if not _is_light(self.tracer, before, len(self.found) - 1):
            raise self.refuse()
        base = self.base()
        chosen = self.choose(tree, base)
        memory = {root_of(value) for value in (chosen, *(way.result for way in self.found))}
        self.branches.joined.append((chosen, memory, self.code))
        return chosen

    def refuse(self) -> Retry:
        return Retry(guarded=frozenset({self.code}))

    def tree(self, asked: Path, result: object, depth: int) -> Any:
        """(comparison, tree where it holds, tree where it does not), or a _Way."""
        if depth == len(asked):
            return self.way(asked, result)
        relation, answer = asked[depth]
        same = self.tree(asked, result, depth + 1)
        path = (*asked[:depth], (relation, not answer))
        try:
            more, other = self.branches._run(self.tracer, self.make(), path)
        except (UserException, Signal) as signal:
            raise self.refuse() from signal
        if _state(self.tracer) != self.start:
            raise self.refuse()
        different = self.tree(more, other, depth + 1)
        return (relation, same, different) if answer else (relation, different, same)

    def way(self, path: Path, result: object) -> _Way:
        if type(result) is not TracedTensor or len(self.found) == MOST_BRANCHES or result.recorder is not self.recorder:
            raise self.refuse()
        type_ = result.tensor_type
        dense = contiguous_strides(type_.shape)
        if any(size != 1 and stride != step for size, stride, step in zip(type_.shape, type_.stride, dense)):
            raise self.refuse()
        if (
            (result.requires_grad and torch.is_grad_enabled())
            or result.reshaped
            or self.recorder.known_value(result) is not None
        ):
            raise self.refuse()
        known = self.env.copy()
        for relation, answer in path:
            known.suppose(relation if answer else relation.negated())
        made = _Way(path, known, result)
        self.found.append(made)
        return made

    def base(self) -> _Way:
        """The way whose sizes are, for each other way's outcome, those of that way."""
        for base in self.found:
            type_ = base.result.tensor_type
            if all(self.fits(other, type_) for other in self.found):
                return base
        raise self.refuse()

    def fits(self, way: _Way, wanted: Any) -> bool:
        type_ = way.result.tensor_type
        if (type_.dtype, type_.device, type_.ndim) != (wanted.dtype, wanted.device, wanted.ndim):
            return False
        for size, other in zip(type_.shape, wanted.shape):
            if way.known.known(Relation("==", size, other)) is not True:
                return False
            if size != other and way.known.known(Relation("<=", 1, size)) is not True:
                return False
        return True

    def choose(self, tree: Any, base: _Way) -> TracedTensor:
        if isinstance(tree, _Way):
            return self.as_large(tree.result, base.result.tensor_type.shape)
        relation, holds, fails = tree
        call = self.tracer.world.torch_call
        if isinstance(holds, _Way) and isinstance(fails, _Way) and holds.result is fails.result:
            return self.choose(holds, base)
        return call(
            torch.where, (self.condition(relation), self.choose(holds, base), self.choose(fails, base)), {}
        )

    def condition(self, relation: Relation) -> object:
        call = self.tracer.world.torch_call
        sides = [
            call(torch.full, ((), size_of(side, self.env)), {"dtype": torch.int64})
            for side in (relation.left, relation.right)
        ]
        function = {"==": torch.eq, "!=": torch.ne, "<": torch.lt, "<=": torch.le}[relation.op]
        return call(function, tuple(sides), {})

    def as_large(self, result: TracedTensor, shape: tuple[Dim, ...]) -> TracedTensor:
        """The result with these sizes: where its own are others, its last elements stand for those that are never
        chosen."""
        call = self.tracer.world.torch_call
        for axis, (size, wanted) in enumerate(zip(result.tensor_type.shape, shape)):
            if size != wanted:
                places = call(torch.arange, (size_of(wanted, self.env),), {})
                places = call(torch.clamp, (places,), {"max": size_of(size - 1, self.env)})
                result = call(torch.index_select, (result, axis, places), {})
        return result
