"""Layers that repeat: a call of a module is replayed where a call of another module of its class did the same.

Takes calls of modules from outside; gives their results, by interpreting `forward`, or by repeating what an earlier
call (the *example*) recorded, with the tensors of this module in place of the example's.
Always holds: a replay does what interpreting would have done. Interpreted code is a function of what it sees: its
arguments, the settings, and what it reads of outside objects, each of which is a guard. So a call is replayed only if
its arguments are alike, the settings are the same, the program has changed nothing in between (what it has changed
before, neither call has met), and each guard on something below the example's module holds on the same path below this
one, where it is then a guard too. Which objects are the same object is seen as well: paths of the example that met at
one object must meet, and an object that the example has seen otherwise than by such a path is never another's
counterpart. An example with effects, writes to others' tensors, symbols or hooks on gradients is not replayed.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections import deque
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload
from torch.fx.node import map_arg

from fusewright._native import isinstance
from fusewright.base.location import Location, Moved
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.base.signals import Retry
from fusewright.capture.border.aliasing import written_arguments
from fusewright.capture.border.copying import (
    alike,
    containers,
    is_plain_function,
    is_question,
    mapped,
    nodes_between,
    repeatable,
    shared_by,
)
from fusewright.capture.border.effects import DELETED, Shadow, attributes_changed, changed, contents, stamp
from fusewright.capture.border.paths import ABSENT, READ, REBASE, Path, Paths, Refused
from fusewright.capture.border.values import context, number
from fusewright.capture.border.values.constant import EQUALS_TYPES, FROZEN_TYPES, IS_TYPES, MADE_AFRESH, is_constant
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.bytecode.instructions import NULL
from fusewright.capture.guards.check import HOLDS, SourceError, evaluate
from fusewright.capture.guards.sources import InstanceDict, Source, module_path
from fusewright.capture.guards.types import MISSING, AnswersAgain, Guard, GuardKind
from fusewright.graph.nodes import add_node, leaves
from fusewright.record.traced_tensor import TracedTensor, make_traced
from fusewright.sizes.symint import dim_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Outside, World

LEAST_OPERATORS = 3
"""A module that records fewer is interpreted as quickly."""
MOST_EXAMPLES = 4
"""Of one class with arguments of one kind (a first and a last layer may differ from those between)."""

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_UNCHANGING = (torch.Tensor, torch.SymInt, torch.SymBool, *(FROZEN_TYPES - MADE_AFRESH.keys()))
_NOTHING = (MISSING, DELETED, NULL)
_SUBJECTS: tuple[GuardKind, ...] = ("TYPE", "IS", "EQUALS", "LENGTH", "KEYS", "ABSENT", "CALL", "BOUND", "SAME")


@dataclass(frozen=True, slots=True)
class _Here:
    """Where the logs stood, and what interpreted code could see besides its arguments and outside objects."""

    guards: int
    records: int
    touched: int
    calls: int
    operators: int
    last_node: torch.fx.Node | None
    settings: tuple[object, ...]
    counts: tuple[object, ...]
    stack: tuple[Location, ...]
    kept: tuple[object, ...]  # whose identities the settings mention


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a torch function, the settings that it was made under, and the user's stack. alone: its nodes are all
    that it leaves behind (at ATen level they alone are kept)."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: object
    alone: bool
    settings: object = None
    where: tuple[Location, ...] = ()


@dataclass(slots=True)
class _Example:
    """A call that was interpreted. The second half is filled in when a call that may be alike is met."""

    module: torch.nn.Module
    source: Source
    arguments: tuple[object, ...]
    result: object
    start: _Here
    end: _Here
    refused: bool = False
    paths: list[Path] | None = None
    records: list[tuple[int, Outside]] = field(default_factory=list)
    same: list[tuple[int, Source, int | None]] = field(default_factory=list)
    seen: frozenset[int] = frozenset()
    nodes: list[torch.fx.Node] = field(default_factory=list)
    calls: list[_Call] | None = None  # None: the nodes are copied


@dataclass(frozen=True, slots=True)
class Copied:
    """What a replay has copied: for the values that the example was given the ones that stand for them, for its nodes
    their copies."""

    given: dict[torch.fx.Node, torch.fx.Node]
    made: dict[torch.fx.Node, torch.fx.Node]


class Repeats:
    """The examples of one capture."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.enabled = True
        self.count = 0
        self.calls: list[_Call] = []
        self.touched: list[object] = []
        self.copied: list[Copied] = []
        self._examples: dict[object, list[_Example]] = {}

    def forget(self) -> None:
        """Lets go of everything."""
        for table in (self.calls, self.touched, self.copied, self._examples):
            table.clear()

    def call(self, module: torch.nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """forward(*args, **kwargs), where `forward` is what calling `module` comes to."""
        world = self.world
        tracer = world.tracer
        source = world.source_of(module)
        if (
            not self.enabled
            or source is None
            or type(forward) is not types.MethodType
            or forward.__self__ is not module
        ):
            return tracer.call(forward, args, kwargs)
        if not object.__getattribute__(module, "__dict__").get("_modules"):  # a question of cost only
            return tracer.call(forward, args, kwargs)
        given = (*args, *kwargs.values())
        try:
            signature = (type(module), forward.__func__, tuple(kwargs), self._signature(given))
            start = self._here()
        except Refused:
            return tracer.call(forward, args, kwargs)
        examples = self._examples.setdefault(signature, [])
        for example in examples:
            if not example.refused and example.start.settings == start.settings:
                try:
                    return self._replay(example, module, source, given, start)
                except Refused:
                    pass
        result = tracer.call(forward, args, kwargs)
        try:
            end = self._here()
        except Refused:
            return result
        if (
            len(examples) < MOST_EXAMPLES
            and end.operators - start.operators >= LEAST_OPERATORS
            and (end.settings, end.counts) == (start.settings, start.counts)
        ):
            examples.append(_Example(module, source, given, result, start, end))
        return result

    # --- what a call sees ---------------------------------------------------------------------------------------------

    def _signature(self, values: tuple[object, ...]) -> tuple[object, ...]:
        """What interpreted code can tell about its arguments; equal for calls that it cannot tell apart by them."""
        order: dict[int, int] = {}
        return tuple(self._kind(value, order) for value in values)

    def _kind(self, value: Any, order: dict[int, int]) -> object:
        kind = type(value)
        if kind is TracedTensor:
            return self._tensor_kind(value, order)
        if kind in (int, bool, str, bytes, type(None)) or kind in IS_TYPES:
            return kind, value
        if kind is float:
            return kind, value.hex()
        if kind is tuple or kind is torch.Size:
            return kind, tuple(self._kind(element, order) for element in value)
        if kind is torch.SymInt:
            return kind, dim_of(value)
        if kind in EQUALS_TYPES and kind is not complex:
            return kind, value
        record = self.world.outside(value)
        if record is None or isinstance(record.real, _CONTAINERS):
            raise Refused
        return id(value)  # the very object

    def _tensor_kind(self, tensor: TracedTensor, order: dict[int, int]) -> object:
        first = order.setdefault(id(tensor), len(order))
        world = self.world
        if tensor.recorder is not world.recorder or tensor.reshaped or world.recorder.known_value(tensor) is not None:
            raise Refused
        if world.outside(tensor) is not None:
            return first, id(tensor)
        if tensor.is_input:
            raise Refused
        facts = (
            tensor.requires_grad,
            tensor.is_leaf,
            tensor.is_inference(),
            tensor.input_storage,
            tensor.viewed is None,
        )
        return first, tensor.tensor_type, tensor.original_class, *facts

    def _here(self) -> _Here:
        world, recorder = self.world, self.world.recorder
        tracer, env = world.tracer, recorder.env
        effects = world.effects
        if effects.slots or effects.cells or world.unread or any(world.tensor_attributes.values()):
            raise Refused
        if world.uses_arrays or world.generators or recorder.has_floats or tracer.is_handling():
            raise Refused
        state = context.snapshot(world.settings_changed)
        if state.function_modes or torch._C._functorch.peek_interpreter_stack() is not None:
            raise Refused  # they may keep a state of their own
        kept = tuple(_held(shadow) for shadow in effects.shadows if _is_written(shadow))
        if not all(_is_unchanging(one) or world.outside(one) is not None for one in itertools.chain(*kept)):
            raise Refused  # objects of the program's own, which both calls may change: none says that it is read there
        return _Here(
            guards=len(world._guards),
            records=len(world._by_real),
            touched=len(self.touched),
            calls=len(self.calls),
            operators=recorder.op_count,
            last_node=next(iter(reversed(recorder.graph.nodes)), None),
            settings=(
                state,
                recorder.recompute,
                tracer.suspended(),
                torch._C._len_torch_dispatch_stack(),
                world.store_count,
                stamp(effects)[0],
            ),
            counts=(
                len(effects.calls),
                len(world.numbers),
                len(recorder.submodules),
                len(recorder.constants),
                recorder.user_code,
                recorder.freed,
                len(recorder.read_sizes),
                0 if recorder.speculation is None else recorder.speculation.count,
                len(tracer.branches.joined),
                None if env is None else (len(env.symbols), len(env.unbacked)),
            ),
            stack=tracer.stack(),
            kept=kept,
        )

    # --- the example --------------------------------------------------------------------------------------------------

    def log(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Notes a call of a torch function (its arguments as they are now)."""
        if not self.enabled:
            return
        recorder = self.world.recorder
        alone = not torch.is_grad_enabled()  # else autograd has a part in it
        if recorder.level == "torch":  # a node does not say what the call writes to
            alone = alone and not recorder.changes and is_plain_function(function)
        elif alone:
            self.calls.append(_Call(function, (), {}, result, True))
            return
        settings = context.snapshot(self.world.settings_changed), recorder.recompute
        self.calls.append(
            _Call(function, mapped(args, _same), mapped(kwargs, _same), result, alone, settings, recorder.location())
        )

    def _prepare(self, example: _Example) -> None:
        """What the example has seen and done, as paths below its module. Raises Refused if it cannot be repeated."""
        world = self.world
        paths = Paths(example.source)
        start, end = example.start, example.end
        touched = self.touched[start.touched : end.touched]
        for record in itertools.islice(world._by_real.values(), end.records):
            at = paths.find(record.source)
            if at:
                example.records.append((at, record))
                if isinstance(record.real, torch.Tensor):
                    if type(record.value) is not TracedTensor:
                        raise Refused
                    paths.steps[at].tensor = record.real
        below = {id(record.real) for _, record in example.records} | {id(example.module)}
        for value in touched:
            read_natively = value.shadow is not None if type(value) is OutsideDict else isinstance(value, _CONTAINERS)
            if read_natively and world.outside(value) is not None and id(world.real_of(value)) not in below:
                raise Refused  # what it holds may have been seen
            if world.outside(value) is None and not _is_unchanging(value):
                raise Refused  # an object of the program's own, which another call may find changed
        example.seen = frozenset(
            id(world.real_of(value)) for value in (example.module, *touched, *_flat(example.arguments))
        )
        for index, guard in enumerate(itertools.islice(world._guards.values(), end.guards)):
            self._place(example, paths, guard, index >= start.guards)
        example.paths = paths.steps
        self._prepare_graph(example)

    def _place(self, example: _Example, paths: Paths, guard: Guard, asked: bool) -> None:
        """Hangs a guard on the path that it is about. `asked`: during the example's call."""
        at = paths.find(guard.source)
        other = paths.find(guard.value) if guard.kind == "SAME" else None  # type: ignore[arg-type]
        if at is None and other is None:
            answer = guard.value
            if asked and guard.kind == "CALL" and not (isinstance(answer, AnswersAgain) and is_question(answer)):
                raise Refused  # of objects to which no path leads
            return
        if at is None or guard.kind not in _SUBJECTS:
            raise Refused
        if guard.kind == "SAME":
            example.same.append((at, guard.value, other))  # type: ignore[arg-type]
        else:
            paths.steps[at].guards.insert(0 if guard.kind == "TYPE" else len(paths.steps[at].guards), guard)
            paths.steps[at].optional |= guard.kind == "BOUND" and not guard.value

    def _prepare_graph(self, example: _Example) -> None:
        """The nodes that the example recorded, or its calls: raises Refused if they depend on more than arguments and
        what was read."""
        recorder = self.world.recorder
        start, end = example.start, example.end
        calls = self.calls[start.calls : end.calls]
        if len(calls) != end.operators - start.operators:
            raise Refused
        between = nodes_between(recorder.graph, start.last_node, end.last_node)
        example.nodes = nodes = [node for node in between if node.op != "placeholder"]
        plain = all(call.alone for call in calls)
        loaded = (record.value for _, record in example.records)
        given = [value for value in (*_flat(example.arguments), *loaded) if type(value) is TracedTensor]
        known = {value.node for value in given}
        own: set[torch.fx.Node] = set()  # in memory that the example's call has made
        for node in nodes:
            if own.issuperset(shared_by(node)):
                own.add(node)
            if isinstance(node.target, OpOverload):
                if not own.issuperset(one for one in leaves(written_arguments(node)) if one is not None):
                    raise Refused
                plain = plain and node.target.namespace == "aten"  # not the generator's draws, which are numbered
            elif node.op != "get_attr" and recorder.level == "aten" and node.target is not operator.getitem:
                raise Refused
            plain = plain and all(
                read in known or read.op in ("placeholder", "get_attr") for read in node.all_input_nodes
            )
            known.add(node)
        settings = (start.settings[0], recorder.recompute)
        # At torch level a call that gives its argument back makes it stand for another node.
        if plain and (recorder.level == "aten" or repeatable(example.result, known)):
            tensors = known
        elif all(call.settings == settings for call in calls):
            example.calls = calls
            tensors = {value.node for value in given}
            for call in calls:
                if not (is_plain_function(call.function) and repeatable((call.args, call.kwargs), tensors)):
                    raise Refused
                tensors |= {value.node for value in _flat(call.result) if type(value) is TracedTensor}
        else:
            raise Refused
        if not repeatable(example.result, tensors) or any(
            type(part) in (list, dict) for part in containers(example.result)
        ):
            raise Refused
        if example.calls is None and any(
            type(value) is TracedTensor and value.requires_grad and value.node in nodes
            for value in _flat(example.result)
        ):
            raise Refused

    # --- the replay ---------------------------------------------------------------------------------------------------

    def _replay(
        self, example: _Example, module: torch.nn.Module, source: Source, given: tuple[object, ...], here: _Here
    ) -> object:
        if example.paths is None:
            try:
                self._prepare(example)
            except Refused:
                example.refused = True
                raise
        objects = self._matched(example, module)
        sources = self._adopt(example, source, objects)
        world = self.world
        values = {id(old): mine for mine, old in zip(_flat(given), _flat(example.arguments), strict=True)}
        for at, record in example.records:
            real = objects[at]
            if type(record.value) is OutsideDict and isinstance(record.source, InstanceDict):
                world.dict_stand_in(real, sources[at])
                continue
            made = values[id(record.value)] = world.load(real, sources[at])
            if type(record.value) is TracedTensor and (
                type(made) is not TracedTensor or made.tensor_type != record.value.tensor_type
            ):
                raise Retry(replays=False)
        self.count += 1
        repeat = self._copy_nodes if example.calls is None else self._repeat_calls
        paths = module_path(example.source), module_path(source)
        return repeat(example, values, Moved(here.stack, len(example.start.stack), paths))

    def _matched(self, example: _Example, module: torch.nn.Module) -> list[Any]:
        """The object at each path below `module`. Raises Refused unless interpreting would see the same there as the
        example did."""
        assert example.paths is not None
        objects: list[Any] = []
        try:
            for path in example.paths:
                now = ABSENT if objects else module
                try:
                    if objects:
                        now = READ[type(path.source)](objects[path.parent], path.source)
                except (KeyError, IndexError, AttributeError, ValueError):
                    if not path.optional:
                        raise
                objects.append(now)
                if not all(_holds(guard, now) for guard in path.guards) or (
                    path.tensor is not None and not alike(now, path.tensor)
                ):
                    raise Refused
            for at, elsewhere, other in example.same:
                if objects[at] is not (self._evaluate(elsewhere) if other is None else objects[other]):
                    raise Refused
        except Refused:
            raise
        except Exception as error:  # as with any guard, an exception is the answer no
            raise Refused from error
        effects = self.world.effects
        written = {id(shadow.real) for shadow in effects.shadows if _is_written(shadow)} | self.world.stored.keys()
        theirs: dict[int, object] = {}
        for mine, old in ((module, example.module), *((objects[at], record.real) for at, record in example.records)):
            if theirs.setdefault(id(mine), old) is not old:
                raise Refused
            if mine is not old and (id(mine) in example.seen or id(mine) in written or id(old) in written):
                raise Refused
        return objects

    def _evaluate(self, source: Source) -> object:
        tracer = self.world.tracer
        try:
            return evaluate(source, tracer.locals, tracer.function)
        except SourceError:
            raise Refused from None

    def _adopt(self, example: _Example, source: Source, objects: list[Any]) -> list[Source]:
        """Adds the guards of the example, on the paths below this module; gives the sources of the paths."""
        assert example.paths is not None
        world = self.world
        sources = [source]
        for path in example.paths[1:]:
            sources.append(REBASE[type(path.source)](path.source, sources[path.parent]))
        for at, record in example.records:
            known = world.record_of(objects[at])
            if known is not None and objects[at] is not record.real and known.source != sources[at]:
                raise Refused
        for path, mine in zip(example.paths, sources):
            for guard in path.guards:
                if guard.kind == "EQUALS" and _has_changed(world, guard.value, mine):
                    raise Refused
        for path, mine in zip(example.paths, sources):
            for guard in path.guards:
                world.guard(guard.kind, mine, guard.value)
        for at, elsewhere, other in example.same:
            world.guard("SAME", sources[at], elsewhere if other is None else sources[other])
        return sources

    def _copy_nodes(self, example: _Example, values: dict[int, object], moved: Moved) -> object:
        """The example's nodes once more, over this call's values."""
        recorder = self.world.recorder
        graph = recorder.graph
        made: dict[torch.fx.Node, torch.fx.Node] = {}
        for old in (*_flat(example.arguments), *(record.value for _, record in example.records)):
            if type(old) is TracedTensor:
                made[old.node] = values[id(old)].node  # type: ignore[attr-defined]
        copied = Copied(dict(made), {})
        locations: dict[int, tuple[Location, ...]] = {}

        def renamed(node: torch.fx.Node) -> torch.fx.Node:
            return made.get(node, node)

        for node in example.nodes:
            if node.op == "get_attr":
                continue
            args, kwargs = map_arg(node.args, renamed), map_arg(node.kwargs, renamed) if node.kwargs else {}
            copy = made[node] = copied.made[node] = add_node(graph, node.op, node.target, args, kwargs)
            copy.meta.update(node.meta)
            where = node.meta["location"]
            location = locations.get(id(where))
            if location is None:
                location = locations[id(where)] = moved.stack(where)
            copy.meta["location"] = location
        self.copied.append(copied)
        recorder.op_count += example.end.operators - example.start.operators
        self.calls += self.calls[example.start.calls : example.end.calls]

        def tensor(old: TracedTensor) -> TracedTensor:
            found = values.get(id(old))
            if found is None:
                node = made.get(old.node)
                if node is None:
                    return old  # an input that both calls read
                found = make_traced(recorder, node, old.tensor_type)
                found.original_class, found.input_storage, found.reshaped = (
                    old.original_class,
                    old.input_storage,
                    old.reshaped,
                )
                found.viewed = None if old.viewed is None else tensor(old.viewed)
                values[id(old)] = found
            return found  # type: ignore[return-value]

        return mapped(example.result, tensor)

    def _repeat_calls(self, example: _Example, values: dict[int, object], moved: Moved) -> object:
        """The example's calls of torch functions once more, on this call's values."""
        world = self.world

        def tensor(old: TracedTensor) -> TracedTensor:
            return values.get(id(old), old)  # type: ignore[return-value]

        recorder = world.recorder
        location = recorder.location
        try:
            for call in example.calls or ():
                where = moved.stack(call.where)
                recorder.location = lambda where=where: where  # type: ignore[misc]
                again = world.torch_call(call.function, mapped(call.args, tensor), mapped(call.kwargs, tensor))
                _note_results(call.result, again, values)
        finally:
            recorder.location = location
        return mapped(example.result, tensor)


def _is_unchanging(value: object) -> bool:
    if type(value) is slice:
        value = value.start, value.stop, value.step
    if type(value) is tuple:
        return all(map(_is_unchanging, value))
    return isinstance(value, _UNCHANGING) or any(value is one for one in _NOTHING) or is_constant(value)


def _is_written(shadow: Shadow) -> bool:
    return changed(shadow) or attributes_changed(shadow)


def _held(shadow: Shadow) -> tuple[object, ...]:
    attributes = () if shadow.attributes is None else object.__getattribute__(shadow.value, "__dict__").values()
    return (*contents(shadow.value), *attributes)


def _holds(guard: Guard, now: object) -> bool:
    if guard.kind == "BOUND":
        return (now is not ABSENT) is guard.value
    return HOLDS[guard.kind](guard.value, now)


def _has_changed(world: World, value: Any, source: Source) -> bool:
    """Whether this place has held other numbers (it is noted that it holds these)."""
    if type(value) in (int, float):
        return number.has_changed(world, value, source)
    return type(value) is tuple and number.tuple_has_changed(world, value, source)


def _same(tensor: TracedTensor) -> TracedTensor:
    return tensor


def _flat(value: object) -> list[Any]:
    return list(leaves(value))


def _note_results(old: Any, new: Any, values: dict[int, object]) -> None:
    """Notes what stands for the results of a repeated call. Raises Retry if they are of another kind."""
    if type(old) is not type(new):
        raise Retry(replays=False)
    if type(old) is TracedTensor:
        if old.tensor_type != new.tensor_type or old.requires_grad != new.requires_grad:
            raise Retry(replays=False)
        values.setdefault(id(old), new)
    elif isinstance(old, (list, tuple)):
        if len(old) != len(new):
            raise Retry(replays=False)
        for one, other in zip(old, new):
            _note_results(one, other, values)
