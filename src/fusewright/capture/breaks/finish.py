"""Reconstruction: the generated Python source of a captured frame's `finish` function.

Takes a finished capture attempt and the `Continuation` (values that must exist, and the lines to run then); gives the
function `finish(__outputs, __function, *locals)`, its text, and the values that the graph must return, in order.
Always holds: every value is computed before the first effect is replayed (a source read afterwards could see the
effect); an object that is reached twice is built once; what existed outside is read from its source, never copied; what
cannot be rebuilt is a graph break.
"""

from __future__ import annotations

import collections
import functools
import gc
import re
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch, with_history_as, without_history_as
from fusewright.base.records import dataclass, field
from fusewright.base.signals import GraphBreak
from fusewright.capture.border import aliasing
from fusewright.capture.border.effects import DELETED, Shadow, attributes_changed, changed, keep
from fusewright.capture.border.torch_function import is_traced_subclass
from fusewright.capture.border.values import context
from fusewright.capture.border.values.constant import FROZEN_TYPES
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.border.values.wrapper import is_wrapper, leaving
from fusewright.capture.breaks.contents import ATOMS, FUNCTION, atom, content_text, parts
from fusewright.capture.breaks.last_references import refuse_finalizers
from fusewright.capture.breaks.rebuild import BASE_BUILDERS, BUILDERS, build_object, dict_of, set_text
from fusewright.capture.guards.sources import (
    Computed,
    Constant,
    DictKey,
    Item,
    Local,
    ProxiedDict,
    Source,
    owner_name,
)
from fusewright.capture.interpret.continuation import LET_GO, RESULT, Continuation
from fusewright.capture.interpret.tracebacks import Place
from fusewright.operators.schema import facts
from fusewright.record.traced_tensor import version_of
from fusewright.sizes.tensor_type import symbols_in

if TYPE_CHECKING:
    from fusewright.capture.border.world import World
    from fusewright.capture.interpret.interpreter import Tracer

OUTPUTS = "__outputs"
NESTED = 32
"""Levels of containers in one expression: Python's parser takes 200 brackets."""


@dataclass(frozen=True, slots=True)
class Finish:
    """function  None when the frame returns the graph's only output and does nothing else
    text      the source, for people
    outputs   the traced tensors and symbolic sizes that the graph must return, in order
    effects   what existed before and is changed, besides tensors"""

    function: Callable[..., object] | None
    text: str
    outputs: tuple[object, ...]
    effects: tuple[str, ...] = ()


def build(tracer: Tracer, continuation: Continuation) -> Finish:
    """The finish function of an attempt that ran to its end or to its break. Raises GraphBreak for what cannot be
    rebuilt."""
    world = tracer.world
    arguments = _argument_names(tracer)
    world.reserve_names(continuation.constants)
    code = Code(world, dict(continuation.constants))
    state = world.final_state()
    writes = [shadow for shadow in world.effects.shadows if changed(shadow) or attributes_changed(shadow)]
    plain = (
        not (writes or world.written_dicts() or world.effects.slots or world.effects.cells or world.effects.calls)
        and not tracer.grown_tracebacks()
        and state == world.state
    )
    if plain and continuation.names == (RESULT,) and continuation.lines == (f"return {RESULT}",):
        (value,) = continuation.values
        if (
            world.recorder_owns(value)
            and value.python_class is torch.Tensor  # type: ignore[attr-defined]
            and _gradient(value) is None
            and world.outside(value) is None
            and not world.tensor_attributes.get(id(value))
            and not aliasing.is_older(value)
            and aliasing.to_autograd(value, False, world.state.grad_enabled) is None
        ):
            return Finish(None, "", (value,))
    refuse_finalizers(world)
    if tracer.recorder.level == "torch":  # the graph leaves the settings as it found them
        for function, args in context.changes(state, world.state):
            world.torch_call(function, args, {})
    roots = [*continuation.values, *_written_values(world, writes)]
    code.count(roots)
    code.age_views()
    for call in world.effects.calls:
        if call.function is keep:  # hooks stand in the order of the program, whoever else holds their handles
            code.expression(*call.args)
    for name, value in zip(continuation.names, continuation.values, strict=False):
        code.name_root(name, value)
    body = code.lines
    replays = _replay(world, code, writes)
    body += replays
    restored = _restore_state(world, code, state)
    body += restored
    body += [f"del {OUTPUTS}"] if continuation.lines[-1] != f"return {RESULT}" else []
    body += continuation.lines
    _let_go(body)
    text = (
        "\n".join([f"def finish({', '.join([OUTPUTS, FUNCTION, *arguments])}):", *(f"    {line}" for line in body)])
        + "\n"
    )
    namespace: dict[str, Any] = {"__builtins__": __builtins__, **code.constants}
    name = f"<fusewright finish of {tracer.function.__qualname__}>"
    exec(compile(text, name, "exec"), namespace)  # our own text, made in this process
    made = namespace.pop("finish")  # which holds the namespace
    return Finish(made, text, tuple(code.outputs), (*_changes(world, writes), *restored))


def _let_go(body: list[str]) -> None:
    """In each place of `LET_GO`: an object that nothing behind it mentions would outlive the instruction that used it
    up until the resume function has returned, and its finalizer, or a generator's `finally`, would run too late. The
    instruction itself may ask a weak reference."""
    gone: set[str] = set()
    while LET_GO in body:
        place = body.index(LET_GO)
        mentioned = set(re.findall(r"\w+", "\n".join(body[place + 1 :]))) | gone
        assigned = dict.fromkeys(match[1] for line in body[:place] if (match := re.match(r" *(__\w+) = ", line)))
        unused = [name for name in assigned if name not in mentioned]
        body[place : place + 1] = [f"{' = '.join(unused)} = None"] if unused else []
        gone.update(unused)


def visible(tracer: Tracer, continuation: Continuation) -> tuple[object, ...]:
    """What `build` would see, by identity: equal before and after some interpreted code ran if that had no effect on
    it."""
    world = tracer.world
    writes = [shadow for shadow in world.effects.shadows if changed(shadow) or attributes_changed(shadow)]
    found: list[object] = [len(world.effects.calls), world.effects.removed_inside]
    seen: set[int] = set()
    pending = [*continuation.values, *_written_values(world, writes)]
    while pending:
        value = pending.pop()
        if isinstance(value, _Contents):
            value = value.shadow.value
        elif (
            type(value) in ATOMS
            or world.outside(value) is not None
            or isinstance(value, (torch.Tensor, type, types.ModuleType))
        ):
            found.append(value if type(value) in ATOMS else id(value))
            continue
        if id(value) not in seen:
            seen.add(id(value))
            inner = list(parts(value))
            found.append((id(value), len(inner)))
            pending += inner
    return tuple(found)


def _argument_names(tracer: Tracer) -> list[str]:
    code = tracer.function.__code__
    names = code.co_varnames[: len(tracer.locals)]
    used: list[str] = []
    for index, name in enumerate(names):
        used.append(Local(index, name).text())
    return used


def _written_values(world: World, writes: list[Shadow]) -> list[object]:
    """Every value that the replay of effects mentions."""
    values: list[object] = []
    for shadow in writes:
        values.append(_Contents(shadow))
        if shadow.attributes is not None:
            values += object.__getattribute__(shadow.value, "__dict__").values()
    for namespace in world.written_dicts():
        values += [part for pair in namespace.stores.items() for part in pair if part is not DELETED]
    for store in world.effects.slots.values():
        values += [store.target, *([] if store.value is DELETED else [store.value])]
    values += [store.value for store in world.effects.cells.values() if store.value is not DELETED]
    for call in world.effects.calls:
        values += [call.function, *call.args, *call.kwargs.values()]
    return values


def _changes(world: World, writes: list[Shadow]) -> Iterator[str]:
    """What the replay changes for good; a value that is stored where it was already changes nothing."""
    yield from (shadow.source.text() for shadow in writes)
    for namespace in world.written_dicts():
        for key, value in namespace.stores.items():
            before = namespace.real.get(key, DELETED)
            known = world.outside(value)
            value = value if known is None else known.real
            if value is not before and not (type(value) is type(before) and type(value) in ATOMS and value == before):
                yield f"{namespace.source.text()}[{key!r}]"
    yield from (f".{store.name}" for store in world.effects.slots.values())
    yield from ("a variable of an enclosing function" for _ in world.effects.cells)
    yield from (call.changes for call in world.effects.calls if call.changes)


class _Contents:
    """The content of a shadow (the shadow itself stands for its outside object)."""

    __slots__ = ("shadow",)

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow


def _check_hooked(world: World) -> None:
    """Hooks are registered behind the graph. In eager a tensor that is written to with its history has two gradients,
    before and behind the write; a view that is written to without loses the hooks that it had; and one that was made
    under `no_grad` takes none behind the write."""
    recorder = world.recorder
    for tensor, version in world.effects.hooked.values():
        node = next(node for node, _ in recorder.inputs if node.meta.get("example_value") is tensor)
        if recorder.history_changed(node) or version_of(tensor) != version:
            raise GraphBreak("autograd-call", "a tensor is written to after it was given a hook")


def _replay(world: World, code: Code, writes: list[Shadow]) -> list[str]:
    """The effects, as lines; the values they need are computed (into code.lines) before any of them runs."""
    lines: list[str] = []
    for raised in world.tracer.grown_tracebacks():
        error = code.temporary(code.expression(raised.error))
        lines += [f"{code.bind('place', Place(*left))}({error})" for left in raised.left]
    for shadow in writes:
        lines += _write_back(code, shadow)
    for namespace in world.written_dicts():
        target = code.temporary(code.source(namespace.source))
        for key, value in namespace.stores.items():
            key_text = code.expression(key)
            lines.append(
                f"{target}.pop({key_text}, None)"
                if value is DELETED
                else f"{target}[{key_text}] = {code.temporary(code.expression(value))}"
            )
    for store in world.effects.slots.values():
        target = code.temporary(code.expression(store.target))
        setter = code.bind("type_setattr", type.__setattr__) if isinstance(store.target, type) else "object.__setattr__"
        if store.value is DELETED:
            lines.append(f"object.__setattr__({target}, {store.name!r}, None)")  # the call may have filled it first
            lines.append(f"object.__delattr__({target}, {store.name!r})")
        else:
            lines.append(f"{setter}({target}, {store.name!r}, {code.temporary(code.expression(store.value))})")
    for stored in world.effects.cells.values():
        cell = code.temporary(code.cell(stored.cell))
        if stored.value is DELETED:
            lines.append(f"del {cell}.cell_contents")
        else:
            lines.append(f"{cell}.cell_contents = {code.temporary(code.expression(stored.value))}")
    _check_hooked(world)
    for call in world.effects.calls:
        arguments = [code.expression(value) for value in call.args]
        arguments += [f"{name}={code.expression(value)}" for name, value in call.kwargs.items()]
        lines.append(f"{code.expression(call.function)}({', '.join(arguments)})")
    return lines


def _write_back(code: Code, shadow: Shadow) -> list[str]:
    """Brings an outside container's content to its shadow's, by the builtin's own methods."""
    target = code.temporary(code.source(shadow.source))
    lines: list[str] = []
    value: Any = shadow.value
    if shadow.appended:
        return [f"{target}.extend({code.temporary(content_text(code, value))})"] if value else []
    if changed(shadow):
        base = next(base for base in _WRITERS if isinstance(value, base))
        content = set_text(code, value, target) if base is set else code.temporary(content_text(code, value))
        lines += [
            line.format(target=target, content=content, base=code.bind(base.__name__, base)) for line in _WRITERS[base]
        ]
    if attributes_changed(shadow):
        attributes = object.__getattribute__(value, "__dict__")
        text = ", ".join(f"{name!r}: {code.expression(attribute)}" for name, attribute in attributes.items())
        made = code.temporary(f"{{{text}}}")
        held = dict_of(target, type(value))
        lines += [f"{held}.clear()", f"{held}.update({made})"]
    return lines


_WRITERS: dict[type, tuple[str, ...]] = {
    collections.OrderedDict: (
        "{base}.clear({target})",
        "for __key, __value in {content}.items(): {base}.__setitem__({target}, __key, __value)",
    ),
    dict: ("dict.clear({target})", "dict.update({target}, {content})"),
    list: ("list.__setitem__({target}, slice(None), {content})",),
    bytearray: ("bytearray.__setitem__({target}, slice(None), {content})",),
    set: ("{content}",),
    collections.deque: ("{base}.clear({target})", "{base}.extend({target}, {content})"),
}


def _restore_state(world: World, code: Code, state: context.TorchState) -> list[str]:
    lines = []
    for function, args in context.changes(world.state, state):
        name = code.bind(getattr(function, "__name__", "setter"), function)
        lines.append(f"{name}({', '.join(code.expression(value) for value in args)})")
    return lines


@dataclass(slots=True)
class Code:
    """The text under construction. `names`: id of an inside object → the variable that holds it."""

    world: World
    constants: dict[str, object]
    lines: list[str] = field(default_factory=list)
    outputs: list[object] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    building: set[int] = field(default_factory=set)
    alive: list[object] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    sources: dict[Source, str] = field(default_factory=dict)
    older: dict[int, torch.fx.Node] = field(default_factory=dict)
    next_name: int = 0

    # Names.

    def bind(self, hint: str, value: object) -> str:
        """A global of the generated function."""
        known = self.world.constant(value, hint)
        # The name of one that a path begins at is that of the weak reference.
        name = self.world.constant(known.held, hint).name if known.is_weak else known.name
        self.constants[name] = value
        return name

    def fresh(self, stem: str = "v") -> str:
        """A new variable."""
        self.next_name += 1
        return f"__{stem}{self.next_name}"

    def temporary(self, text: str) -> str:
        """`text` as a variable, computed here and now, unless it is a name or a literal already."""
        if text.isidentifier() or text[:1] in "'\"0123456789":
            return text
        name = self.fresh()
        self.lines.append(f"{name} = {text}")
        return name

    def source(self, source: Source) -> str:
        """An outside object's path; computed once."""
        known = self.sources.get(source)
        if known is None:
            if isinstance(source, ProxiedDict):  # in text it is the proxy, which nobody can write to
                behind = self.bind("get_referents", gc.get_referents)
                known = self.temporary(f"{behind}({self.source(source.base)})[0]")
            else:
                self._bind_constants(source)
                known = self.temporary(source.text())
            self.sources[source] = known
        return known

    def _bind_constants(self, source: Any) -> None:
        """Globals for the constants at the root of a path."""
        while source is not None:
            if isinstance(source, Constant):
                self.constants[source.name] = source.held
            elif isinstance(source, Computed):
                self.constants[source.name] = source.function
            elif isinstance(source, Item) and (name := source.key_name()) is not None:
                self.constants[name] = source.key
            if isinstance(source, (Item, DictKey)) and source.owner is not None:
                self.constants[owner_name(source.owner)] = source.owner
            source = getattr(source, "base", None)

    # Counting references, so that an object that is reached once can be written in place.

    def count(self, roots: list[object]) -> None:
        """Notes how often each inside container is reached."""
        pending = list(reversed(roots))
        while pending:
            value = pending.pop()
            if type(value) is _Contents:
                pending += reversed(list(parts(value.shadow.value)))
                continue
            if (
                type(value) in ATOMS
                or self.world.outside(value) is not None
                or issubclass(type(value), (type, types.ModuleType))
                or (type(value) in FROZEN_TYPES and id(value) not in self.world.made)
            ):
                continue
            self.counts[id(value)] = self.counts.get(id(value), 0) + 1
            if self.counts[id(value)] == 1:
                self.alive.append(value)
                tensor = issubclass(type(value), torch.Tensor)
                attributes = self.world.tensor_attributes.get(id(value), {}) if tensor else {}
                pending += reversed(list(attributes.values() if tensor else parts(value)))
                if (owned := self.owner_of(value)) is not None:
                    pending.append(owned[0])

    def age_views(self) -> None:
        """First of all the views from before the last write: those of one argument share its version."""
        tensors = [value for value in self.alive if self.world.recorder_owns(value)]
        self.older = {id(value): aliasing.root_of(value) for value in tensors if aliasing.is_older(value)}
        for value in [value for value in tensors if id(value) in self.older]:
            self.expression(value)

    def owner_of(self, value: object) -> tuple[object, str] | None:
        """The object made inside whose dict this is, and under which name."""
        owned = self.world.owners.get(id(value))
        if owned is None:
            return None
        owner, name = owned
        of_tensor = isinstance(owner, torch.Tensor)
        held = self.world.tensor_attributes.get(id(owner)) if of_tensor else object.__getattribute__(owner, name)
        return owned if held is value else None

    def name_root(self, name: str, value: object) -> None:
        """`name` is to hold `value`."""
        text = self.expression(value)
        if text != name:
            self.lines.append(f"{name} = {text}")

    # Expressions.

    def expression(self, value: Any) -> str:
        """An expression for `value`; may add lines that must run before it."""
        kind = type(value)
        if kind in ATOMS:
            return atom(self, value)
        if id(value) in self.names:
            return self.names[id(value)]
        record = self.world.outside(value)
        if record is not None:
            return self.source(record.source)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is OutsideDict:  # materialised: the shadow has taken over
            return self.source(value.source)
        if (owned := self.owner_of(value)) is not None:
            owner, name = owned
            text = self.expression(owner)
            text = dict_of(text, type(owner)) if name == "__dict__" else f"{text}.{name}"
            return self.keep(value, self.temporary(text))
        builder = BUILDERS.get(kind) or next(
            (builder for base, builder in BASE_BUILDERS if isinstance(value, base)), build_object
        )
        shared = self.counts.get(id(value), 0) > 1 or id(value) not in self.counts
        if id(value) in self.building:
            raise GraphBreak("cannot-rebuild", f"a cycle through an immutable {kind.__qualname__}")
        self.building.add(id(value))
        text = builder(self, value)
        self.building.discard(id(value))
        deep = len(self.building) % NESTED == NESTED - 1
        if id(value) in self.names:
            return self.names[id(value)]
        if (shared or deep) and not text.isidentifier():
            name = self.temporary(text)
            if not name[0].isdigit() and name[0] not in "'\"":
                self.keep(value, name)
            return name
        return text

    def keep(self, value: object, name: str) -> str:
        """From now on `name` holds `value`."""
        self.names[id(value)] = name
        self.alive.append(value)
        return name

    def start(self, value: object, text: str) -> str:
        """Creates a mutable object before its content is known, so that a cycle finds it."""
        name = self.fresh()
        self.lines.append(f"{name} = {text}")
        return self.keep(value, name)

    def output(self, value: object) -> str:
        """The value as an output of the graph."""
        position = self.positions.get(id(value))
        if position is None:
            position = self.positions[id(value)] = len(self.outputs)
            self.outputs.append(value)
        return f"{OUTPUTS}[{position}]"

    def _tensor(self, value: Any) -> str:
        if is_wrapper(value):
            return self._wrapper(value)
        if not self.world.recorder_owns(value):
            raise GraphBreak(
                "functorch-transform", "a tensor leaves the transform (vmap, grad, jvp) that it belongs to"
            )
        text = self._known_to_autograd(value, self._recast(value) or self.output(value))
        attributes = self.world.tensor_attributes.get(id(value))
        kind: type = value.python_class
        if kind is torch.nn.Parameter or (kind is not torch.Tensor and value.made_leaf):
            text = self.start(value, text)  # a leaf of autograd must stay the very tensor
            self.lines.append(f"{text}.__class__ = {self.bind(kind.__name__, kind)}")
        elif is_traced_subclass(value):
            bound = self.bind(kind.__name__, kind)
            unfollowed = without_history_as if value.grad_fn is None else with_history_as
            make = unfollowed if value.requires_grad else methods.as_subclass
            text = self.start(value, f"{self.bind('as_subclass', make)}({text}, {bound})")
        if kind is not torch.Tensor:
            pairs = ", ".join(f"{name!r}: {self.expression(part)}" for name, part in (attributes or {}).items())
            if pairs:
                self.lines.append(f"{text}.__dict__.update({{{pairs}}})")
        elif attributes:
            text = self.start(value, text)
            for name, attribute in attributes.items():
                self.lines.append(f"{text}.{name} = {self.expression(attribute)}")
        gradient = _gradient(value)
        if gradient is not None:
            text = self.start(value, text)
            self.lines.append(f"{text}.grad = {self.expression(gradient)}")
        return text

    def _known_to_autograd(self, value: Any, text: str) -> str:
        """An output as the view that autograd took it for when the program made it."""
        made: Any = aliasing.to_autograd(value, True, self.world.state.grad_enabled)
        detached, older = made in aliasing.DETACHES, id(value) in self.older and value.viewed is not None
        whole = aliasing.whole_of(value, self.alive) if detached else None
        if whole is not None:
            return self.start(value, f"{self.bind('part', aliasing.part)}({self.expression(whole)}, {text})")
        if made is None and self.older and not older and value.viewed is not None and not value.requires_grad:
            if aliasing.root_of(value) in self.older.values():
                made = torch.ops.aten.alias.default
        if made is not None:
            text = f"{self.bind('view', made)}({text})"
        if older and not detached:
            text = f"{self.bind('older', aliasing.older)}({text})"
        return self.start(value, text) if made is not None or older else text

    def _recast(self, value: Any) -> str:
        """A view under another dtype as a call behind the graph, whose memory it shares with what it is a view of; ""
        where it is none, or the graph returns it."""
        calls: list[Any] = []
        recast, result = False, value
        while value.viewed is not None and not value.reshaped and self.world.recorder.level == "aten":
            node, viewed = value.node, value.viewed
            if not isinstance(node.target, OpOverload) or node.args[0] is not viewed.node or value.requires_grad:
                return ""
            recast = recast or facts(node.target).recasts
            calls.append((node.target, node.args[1:], node.kwargs))
            value = viewed
        if not recast or value.requires_grad or any(symbols_in(one[1:]) for one in calls):
            return ""
        text = self.expression(value)
        for target, args, kwargs in reversed(calls):
            text = f"{self.bind('view', functools.partial(_viewed, target, args, kwargs))}({text})"
        return self.start(result, text)  # one object wherever it is

    def _wrapper(self, value: Any) -> str:
        """A tensor that wraps others, made inside: put together behind the graph."""
        left = leaving(self.world, value)
        self.alive.append(left.parts)
        given = [*(self.expression(tuple(one)) for one in left.layout), *map(self.expression, left.parts)]
        return self.start(value, f"{self.bind('together', left.together)}({', '.join(given)})")

    def cell(self, cell: types.CellType) -> str:
        """A closure cell, outside (bound as it is, or through the root function) or made inside."""
        if id(cell) in self.names:
            return self.names[id(cell)]
        source = self.world.root_cell_index(cell)
        if source is not None:
            return self.keep(cell, self.temporary(f"{FUNCTION}.__closure__[{source}]"))
        if self.world.is_outside_cell(cell):
            record = self.world.outside(cell)
            return self.source(record.source) if record is not None else self.bind("cell", cell)
        return self.expression(cell)


def _viewed(target: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> torch.Tensor:
    return target(tensor, *args, **kwargs)  # type: ignore[no-any-return]


def _gradient(value: Any) -> torch.Tensor | None:
    """What a backward inside has accumulated in a leaf that was made inside."""
    return value.grad if value.made_leaf else None
