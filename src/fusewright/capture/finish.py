"""Reconstruction: the generated Python source of a captured frame's `finish` function.

Takes a finished capture attempt and the `Continuation` (values that must exist, and the lines to run then); gives the function
`finish(__outputs, __function, *locals)`, its text, and the values that the graph must return, in order.
Always holds: every value is computed before the first effect is replayed (a source read afterwards could see the effect); an object that is
reached twice is built once; what existed outside is read from its source, never copied; what cannot be rebuilt is a graph break.
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import itertools
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fusewright.capture.absent import AbsentTraceback
from fusewright.capture.continuation import RESULT, Continuation
from fusewright.capture.effects import DELETED, Shadow, changed, contents
from fusewright.capture.generators import InterpretedGenerator
from fusewright.capture.native import Trampoline, TrampolineIterator
from fusewright.capture.protocols import SequenceIterator
from fusewright.capture.signals import GraphBreak
from fusewright.capture.sources import Constant, Item, Local, Source
from fusewright.capture.values import cls as classes
from fusewright.capture.values import context
from fusewright.capture.values.constant import FROZEN_TYPES
from fusewright.capture.values.dict import OutsideDict
from fusewright.capture.values.function import is_free_function
from fusewright.graph.runtime_float import node_of

if TYPE_CHECKING:
    from fusewright.capture.tracer import Tracer
    from fusewright.capture.world import World

OUTPUTS = "__outputs"
FUNCTION = "__function"


@dataclass(frozen=True, slots=True)
class Finish:
    """function  None when the frame returns the graph's only output and does nothing else
    text      the source, for people
    outputs   the traced tensors and symbolic sizes that the graph must return, in order"""

    function: Callable[..., object] | None
    text: str
    outputs: tuple[object, ...]


def build(tracer: Tracer, continuation: Continuation) -> Finish:
    """The finish function of an attempt that ran to its end or to its break. Raises GraphBreak for what cannot be rebuilt."""
    world = tracer.world
    arguments = _argument_names(tracer)
    world.reserve_names(continuation.constants)
    code = _Code(world, dict(continuation.constants))
    state = world.final_state()
    writes = [shadow for shadow in world.effects.shadows if changed(shadow) or _attributes_changed(shadow)]
    plain = (
        not (writes or world.written_dicts() or world.effects.slots or world.effects.cells or world.effects.calls) and state == world.state
    )
    if plain and continuation.names == (RESULT,) and continuation.lines == (f"return {RESULT}",):
        (value,) = continuation.values
        if (
            isinstance(value, torch.Tensor)
            and world.outside(value) is None
            and not world.tensor_attributes.get(id(value))
            and not _must_be_detached(world, value)
        ):
            return Finish(None, "", (value,))
    if tracer.recorder.level == "torch":  # the graph leaves the settings as it found them
        for function, args in context.changes(state, world.state):
            world.torch_call(function, args, {})
    roots = [*continuation.values, *_written_values(world, writes)]
    code.count(roots)
    for name, value in zip(continuation.names, continuation.values, strict=False):
        code.name_root(name, value)
    body = code.lines
    replays = _replay(world, code, writes)
    body += replays
    body += _restore_state(world, code, state)
    body += [f"del {OUTPUTS}"] if continuation.lines[-1] != f"return {RESULT}" else []
    body += continuation.lines
    text = "\n".join([f"def finish({', '.join([OUTPUTS, FUNCTION, *arguments])}):", *(f"    {line}" for line in body)]) + "\n"
    namespace: dict[str, Any] = {"__builtins__": __builtins__, **code.constants}
    name = f"<fusewright finish of {tracer.function.__qualname__}>"
    exec(compile(text, name, "exec"), namespace)  # our own text, made in this process
    return Finish(namespace["finish"], text, tuple(code.outputs))


def visible(tracer: Tracer, continuation: Continuation) -> tuple[object, ...]:
    """What `build` would see, by identity: equal before and after some interpreted code ran if that had no effect on it."""
    world = tracer.world
    writes = [shadow for shadow in world.effects.shadows if changed(shadow) or _attributes_changed(shadow)]
    found: list[object] = [len(world.effects.calls)]
    seen: set[int] = set()
    pending = [*continuation.values, *_written_values(world, writes)]
    while pending:
        value = pending.pop()
        if isinstance(value, _Contents):
            value = value.shadow.value
        elif type(value) in _ATOMS or world.outside(value) is not None or isinstance(value, (torch.Tensor, type, types.ModuleType)):
            found.append(value if type(value) in _ATOMS else id(value))
            continue
        if id(value) not in seen:
            seen.add(id(value))
            parts = list(_parts(value))
            found.append((id(value), len(parts)))
            pending += parts
    return tuple(found)


def _argument_names(tracer: Tracer) -> list[str]:
    code = tracer.function.__code__
    names = code.co_varnames[: len(tracer.locals)]
    used: list[str] = []
    for index, name in enumerate(names):
        used.append(Local(index, name).text())
    return used


def _attributes_changed(shadow: Shadow) -> bool:
    if shadow.attributes is None:
        return False
    now = object.__getattribute__(shadow.value, "__dict__")
    return now.keys() != shadow.attributes.keys() or any(now[name] is not value for name, value in shadow.attributes.items())


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
    values += [store.value for store in world.effects.cells.values()]
    for call in world.effects.calls:
        values += [call.function, *call.args, *call.kwargs.values()]
    return values


class _Contents:
    """The content of a shadow (the shadow itself stands for its outside object)."""

    __slots__ = ("shadow",)

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow


def _replay(world: World, code: _Code, writes: list[Shadow]) -> list[str]:
    """The effects, as lines; the values they need are computed (into code.lines) before any of them runs."""
    lines: list[str] = []
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
            lines.append(f"object.__delattr__({target}, {store.name!r})")
        else:
            lines.append(f"{setter}({target}, {store.name!r}, {code.temporary(code.expression(store.value))})")
    for stored in world.effects.cells.values():
        cell = code.temporary(code.cell(stored.cell))
        lines.append(f"{cell}.cell_contents = {code.temporary(code.expression(stored.value))}")
    for call in world.effects.calls:
        arguments = [code.expression(value) for value in call.args]
        arguments += [f"{name}={code.expression(value)}" for name, value in call.kwargs.items()]
        lines.append(f"{code.expression(call.function)}({', '.join(arguments)})")
    return lines


def _write_back(code: _Code, shadow: Shadow) -> list[str]:
    """Brings an outside container's content to its shadow's, by the builtin's own methods."""
    target = code.temporary(code.source(shadow.source))
    lines: list[str] = []
    value = shadow.value
    if changed(shadow):
        base = next(base for base in _WRITERS if isinstance(value, base))
        content = code.temporary(_content_text(code, value))
        lines += [line.format(target=target, content=content, base=code.bind(base.__name__, base)) for line in _WRITERS[base]]
    if _attributes_changed(shadow):
        attributes = object.__getattribute__(value, "__dict__")
        text = ", ".join(f"{name!r}: {code.expression(attribute)}" for name, attribute in attributes.items())
        made = code.temporary(f"{{{text}}}")
        lines += [f"{target}.__dict__.clear()", f"{target}.__dict__.update({made})"]
    return lines


_WRITERS: dict[type, tuple[str, ...]] = {
    collections.OrderedDict: (
        "{base}.clear({target})",
        "for __key, __value in {content}.items(): {base}.__setitem__({target}, __key, __value)",
    ),
    dict: ("dict.clear({target})", "dict.update({target}, {content})"),
    list: ("list.__setitem__({target}, slice(None), {content})",),
    bytearray: ("bytearray.__setitem__({target}, slice(None), {content})",),
    set: ("set.clear({target})", "set.update({target}, {content})"),
    collections.deque: ("{base}.clear({target})", "{base}.extend({target}, {content})"),
}


def _content_text(code: _Code, value: Any) -> str:
    if isinstance(value, dict):
        keys = collections.OrderedDict.__iter__(value) if isinstance(value, collections.OrderedDict) else dict.__iter__(value)
        return "{" + ", ".join(f"{code.expression(key)}: {code.expression(dict.__getitem__(value, key))}" for key in keys) + "}"
    return "[" + ", ".join(code.expression(element) for element in value) + "]"


def _restore_state(world: World, code: _Code, state: context.TorchState) -> list[str]:
    lines = []
    for function, args in context.changes(world.state, state):
        name = code.bind(getattr(function, "__name__", "setter"), function)
        lines.append(f"{name}({', '.join(code.expression(value) for value in args)})")
    return lines


_ATOMS: frozenset[type] = frozenset({int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)})

# Iterators that can say how to make them again, where they stand.
_ITERATORS: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), type(iter(b"")), type(iter({})), type(iter({}.values())),
    type(iter({}.items())),
    type(iter(set())), type(reversed([])), type(iter(range(1 << 70))), enumerate, zip, map, filter, reversed, itertools.chain,
    itertools.islice,
    itertools.count, itertools.repeat, itertools.cycle, itertools.accumulate, itertools.product, itertools.starmap, itertools.zip_longest,
    itertools.compress, itertools.takewhile, itertools.dropwhile, itertools.combinations, itertools.permutations,
    type(reversed({})), type(iter(collections.deque())),
)  # fmt: skip


@dataclass(slots=True)
class _Code:
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
    next_name: int = 0

    # Names.

    def bind(self, hint: str, value: object) -> str:
        """A global of the generated function."""
        name = self.world.constant(value, hint).name
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
            if isinstance(source, Constant):
                known = source.name
                self.constants[known] = source.obj
            else:
                self._bind_constants(source)
                known = self.temporary(source.text())
            self.sources[source] = known
        return known

    def _bind_constants(self, source: Any) -> None:
        """Globals for the constants at the root of a path."""
        while source is not None:
            if isinstance(source, Constant):
                self.constants[source.name] = source.obj
            elif isinstance(source, Item) and (name := source.key_name()) is not None:
                self.constants[name] = source.key
            source = getattr(source, "base", None)

    # Counting references, so that an object that is reached once can be written in place.

    def count(self, roots: list[object]) -> None:
        """Notes how often each inside container is reached."""
        pending = list(reversed(roots))
        while pending:
            value = pending.pop()
            if type(value) is _Contents:
                pending += reversed(list(_parts(value.shadow.value)))
                continue
            if (
                type(value) in _ATOMS
                or self.world.outside(value) is not None
                or issubclass(type(value), (torch.Tensor, type, types.ModuleType))
            ):
                continue
            self.counts[id(value)] = self.counts.get(id(value), 0) + 1
            if self.counts[id(value)] == 1:
                self.alive.append(value)
                pending += reversed(list(_parts(value)))

    def name_root(self, name: str, value: object) -> None:
        """`name` is to hold `value`."""
        text = self.expression(value)
        if text != name:
            self.lines.append(f"{name} = {text}")

    # Expressions.

    def expression(self, value: Any) -> str:
        """An expression for `value`; may add lines that must run before it."""
        kind = type(value)
        if kind in _ATOMS:
            return _atom(self, value)
        if id(value) in self.names:
            return self.names[id(value)]
        record = self.world.outside(value)
        if record is not None:
            return self.source(record.source)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is OutsideDict:  # materialised: the shadow has taken over
            return self.source(value.source)
        builder = _BUILDERS.get(kind) or next((builder for base, builder in _BASE_BUILDERS if isinstance(value, base)), _build_object)
        shared = self.counts.get(id(value), 0) > 1 or id(value) not in self.counts
        if id(value) in self.building:
            raise GraphBreak("cannot-rebuild", f"a cycle through an immutable {kind.__qualname__}")
        self.building.add(id(value))
        text = builder(self, value)
        self.building.discard(id(value))
        if id(value) in self.names:
            return self.names[id(value)]
        if shared and not text.isidentifier():
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

    def _tensor(self, value: torch.Tensor) -> str:
        text = self.output(value)
        if _must_be_detached(self.world, value):
            text = self.start(value, f"{text}.detach()")
        attributes = self.world.tensor_attributes.get(id(value))
        if attributes:
            text = self.start(value, text)
            for name, attribute in attributes.items():
                self.lines.append(f"{text}.{name} = {self.expression(attribute)}")
        return text

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


def _must_be_detached(world: World, value: Any) -> bool:
    """Whether a result that needs no gradient is a view of an input that does: the graph's own views would follow that."""
    if world.recorder.level != "aten" or value.requires_grad:
        return False
    node = value.node
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if node.target is not operator.getitem and (schema is None or not any(result.alias_info is not None for result in schema.returns)):
            return False
        node = node.args[0]
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.requires_grad


_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def _parts(value: Any) -> Any:
    """The values that an inside object is built from."""
    kind = type(value)
    if isinstance(value, dict):
        yield from itertools.chain.from_iterable(dict.items(value))
        if isinstance(value, collections.defaultdict):
            yield value.default_factory
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        yield from contents(value)
    elif kind is types.CellType:
        try:
            yield value.cell_contents
        except ValueError:
            return
    elif kind is types.FunctionType:
        yield from value.__closure__ or ()
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from value.__dict__.values()
    elif kind is types.MethodType:
        yield from (value.__func__, value.__self__)
    elif kind is functools.partial:
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind is slice:
        yield from (value.start, value.stop, value.step)
    elif kind is Trampoline:
        yield value.function
    elif kind in _VIEWS:
        yield _viewed(value)
    elif kind in (staticmethod, classmethod):
        yield value.__func__
    elif isinstance(value, _ITERATORS):
        yield from _state_parts(value.__reduce__())
    elif isinstance(value, BaseException):
        yield from value.args
    if (
        getattr(kind, "__dictoffset__", 0)
        and kind is not types.FunctionType
        and not isinstance(value, (type, types.ModuleType, functools.partial))
    ):
        yield from object.__getattribute__(value, "__dict__").values()


def _state_parts(reduced: Any) -> Any:
    yield from reduced[1]
    if len(reduced) > 2 and reduced[2] is not None:
        yield reduced[2]


def _atom(code: _Code, value: Any) -> str:
    if type(value) is float and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    if type(value) is complex:
        return f"complex({_atom(code, value.real)}, {_atom(code, value.imag)})"
    return repr(value)


def _build_list(code: _Code, value: list) -> str:
    if code.counts.get(id(value), 0) > 1 or _reaches_itself(value):
        name = code.start(value, "[]")
        elements = ", ".join(code.expression(element) for element in value)
        if elements:
            code.lines.append(f"{name}.extend([{elements}])")
        return name
    return f"[{', '.join(code.expression(element) for element in value)}]"


def _build_dict(code: _Code, value: dict) -> str:
    if code.counts.get(id(value), 0) > 1 or _reaches_itself(value):
        name = code.start(value, "{}")
        if value:
            code.lines.append(f"{name}.update({_content_text(code, value)})")
        return name
    return _content_text(code, value)


def _reaches_itself(value: Any) -> bool:
    """Whether a container holds itself somewhere below (through containers and instances)."""
    seen: set[int] = set()
    pending = list(_parts(value))
    while pending:
        part = pending.pop()
        if part is value:
            return True
        if (
            id(part) not in seen
            and type(part) not in _ATOMS
            and not isinstance(part, (torch.Tensor, type, types.ModuleType, torch.nn.Module))
        ):
            seen.add(id(part))
            pending += list(_parts(part))
    return False


def _build_tuple(code: _Code, value: tuple) -> str:
    elements = [code.expression(element) for element in tuple.__iter__(value)]
    text = f"({', '.join(elements)}{',' if len(elements) == 1 else ''})"
    kind = type(value)
    if kind is tuple:
        return text
    if isinstance(value, torch.Size):
        return f"{code.bind('Size', torch.Size)}({text})"
    if hasattr(kind, "n_sequence_fields"):  # the result types of native operators
        return f"{code.bind(kind.__name__, kind)}({text})"
    made = f"tuple.__new__({code.bind(kind.__name__, kind)}, {text})"
    return _with_attributes(code, value, made)


def _build_set(code: _Code, value: set | frozenset) -> str:
    elements = ", ".join(code.expression(element) for element in value)
    base = "frozenset" if isinstance(value, frozenset) else "set"
    kind = type(value)
    if kind in (set, frozenset):
        return f"{base}([{elements}])" if base == "frozenset" or not elements else f"{{{elements}}}"
    made = code.start(value, f"{base}.__new__({code.bind(kind.__name__, kind)}" + (f", [{elements}])" if base == "frozenset" else ")"))
    if base == "set" and elements:
        code.lines.append(f"set.update({made}, [{elements}])")
    return _with_attributes(code, value, made)


def _build_container_subclass(code: _Code, value: Any) -> str:
    """An instance of a subclass of a builtin container: made without running user code, then filled."""
    kind = type(value)
    base = next(
        base for base in (collections.OrderedDict, collections.defaultdict, collections.deque, dict, list) if isinstance(value, base)
    )
    base_name = base.__name__ if base in (dict, list) else code.bind(base.__name__, base)
    name = code.start(value, f"{base_name}.__new__({code.bind(kind.__name__, kind)})")
    if base is collections.defaultdict:
        code.lines.append(f"{base_name}.__init__({name}, {code.expression(value.default_factory)})")
    if base is collections.deque:
        code.lines.append(f"{base_name}.__init__({name}, [{', '.join(code.expression(element) for element in value)}], {value.maxlen!r})")
    elif base is list:
        code.lines.append(f"list.extend({name}, [{', '.join(code.expression(element) for element in list.__iter__(value))}])")
    else:
        keys = collections.OrderedDict.__iter__(value) if base is collections.OrderedDict else dict.__iter__(value)
        for key in list(keys):
            code.lines.append(f"{base_name}.__setitem__({name}, {code.expression(key)}, {code.expression(dict.__getitem__(value, key))})")
    return _with_attributes(code, value, name)


def _with_attributes(code: _Code, value: Any, text: str) -> str:
    """Fills the instance dictionary and slots of the object that `text` makes."""
    kind = type(value)
    attributes = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else {}
    slots = [(name, member.__get__(value)) for name, member in classes.slots(kind) if _is_bound(member, value)]
    if not attributes and not slots:
        return text
    name = text if text.isidentifier() else code.start(value, text)
    if attributes:
        pairs = ", ".join(f"{key!r}: {code.expression(attribute)}" for key, attribute in attributes.items())
        code.lines.append(f"{name}.__dict__.update({{{pairs}}})")
    for slot, content in slots:
        code.lines.append(f"object.__setattr__({name}, {slot!r}, {code.expression(content)})")
    return name


def _is_bound(member: types.MemberDescriptorType, value: object) -> bool:
    try:
        member.__get__(value)
    except AttributeError:
        return False
    return True


def _build_object(code: _Code, value: Any) -> str:
    """An instance of a user class."""
    kind = type(value)
    if isinstance(value, _ITERATORS):
        return _build_iterator(code, value)
    base = next((base for base in (int, float, complex, str, bytes) if isinstance(value, base)), None)
    if base is not None:
        made = f"{base.__name__}.__new__({code.expression(kind)}, {_atom(code, base(value))})"
        return _with_attributes(code, value, made)
    if classes.native_new(kind) is not object.__new__:
        raise GraphBreak("cannot-rebuild", f"a {kind.__module__}.{kind.__qualname__} that was made in the compiled function")
    name = code.start(value, f"object.__new__({code.expression(kind)})")
    return _with_attributes(code, value, name)


def _build_iterator(code: _Code, value: Any) -> str:
    reduced = value.__reduce__()
    maker, args, *state = reduced
    text = f"{code.bind(getattr(maker, '__name__', 'maker'), maker)}({', '.join(code.expression(argument) for argument in args)})"
    if state and state[0] is not None:
        name = code.start(value, text)
        code.lines.append(f"{name}.__setstate__({code.expression(state[0])})")
        return name
    return code.start(value, text)


def _build_cell(code: _Code, value: types.CellType) -> str:
    if code.world.is_outside_cell(value):
        return code.cell(value)
    name = code.start(value, f"{code.bind('CellType', types.CellType)}()")
    _fill_cell(code, value)
    return name


def _fill_cell(code: _Code, cell: types.CellType) -> None:
    try:
        content = cell.cell_contents
    except ValueError:
        return
    code.lines.append(f"{code.names[id(cell)]}.cell_contents = {code.expression(content)}")


def _build_function(code: _Code, value: types.FunctionType) -> str:
    """A closure made inside: the same code over rebuilt cells."""
    if value.__globals__ is code.world.tracer.function.__globals__:
        namespace = f"{FUNCTION}.__globals__"
    else:
        namespace = code.bind("globals", value.__globals__)
    # Cells first, empty: what they hold may be the function itself.
    empty = []
    for cell in value.__closure__ or ():
        if id(cell) not in code.names and not code.world.is_outside_cell(cell):
            code.start(cell, f"{code.bind('CellType', types.CellType)}()")
            empty.append(cell)
    cells = [code.cell(cell) for cell in value.__closure__ or ()]
    closure = f"({', '.join(cells)},)" if cells else "None"
    defaults = "None" if value.__defaults__ is None else _build_tuple(code, value.__defaults__)
    maker = code.bind("FunctionType", types.FunctionType)
    made = f"{maker}({code.bind(f'code_{value.__name__}', value.__code__)}, {namespace}, {value.__name__!r}, {defaults}, {closure})"
    name = code.start(value, made)
    for cell in empty:
        _fill_cell(code, cell)
    if value.__kwdefaults__:
        code.lines.append(f"{name}.__kwdefaults__ = {_content_text(code, value.__kwdefaults__)}")
    if value.__qualname__ != value.__code__.co_qualname:
        code.lines.append(f"{name}.__qualname__ = {value.__qualname__!r}")
    if value.__doc__ != (
        value.__code__.co_consts[0] if value.__code__.co_consts and isinstance(value.__code__.co_consts[0], str) else None
    ):
        code.lines.append(f"{name}.__doc__ = {code.expression(value.__doc__)}")
    if value.__module__ != value.__globals__.get("__name__"):
        code.lines.append(f"{name}.__module__ = {code.expression(value.__module__)}")
    if value.__annotations__:
        code.lines.append(f"{name}.__annotations__ = {_content_text(code, value.__annotations__)}")
    if value.__dict__:
        code.lines.append(f"{name}.__dict__.update({_content_text(code, value.__dict__)})")
    return name


def _build_method(code: _Code, value: types.MethodType) -> str:
    return f"{code.bind('MethodType', types.MethodType)}({code.expression(value.__func__)}, {code.expression(value.__self__)})"


def _build_float(code: _Code, value: Any) -> str:
    """A run-time float: the compiled code computes it as a tensor of one element."""
    node = node_of(value)
    if node is None:
        return _atom(code, float(value))
    return f"{code.output(node.operand())}.item()"


def _build_builtin(code: _Code, value: Any) -> str:
    owner = value.__self__
    if isinstance(owner, type) or (isinstance(value, types.BuiltinFunctionType) and is_free_function(value)):
        return code.bind(value.__name__, value)
    descriptor = classes.descriptor_of(value, owner)
    if descriptor is None:
        raise GraphBreak("cannot-rebuild", f"the method {value.__name__} of a {type(owner).__qualname__}")
    if descriptor is classes.lookup(type(owner), value.__name__):
        return f"{code.expression(owner)}.{value.__name__}"
    return f"{code.bind(value.__name__, descriptor)}.__get__({code.expression(owner)})"  # as `super().__init__` finds it


def _build_partial(code: _Code, value: functools.partial) -> str:
    arguments = [code.expression(value.func), *(code.expression(argument) for argument in value.args)]
    if value.keywords:
        arguments.append(f"**{_content_text(code, value.keywords)}")
    return _with_attributes(code, value, f"{code.bind('partial', functools.partial)}({', '.join(arguments)})")


def _build_exception(code: _Code, value: BaseException) -> str:
    kind = type(value)
    if code.world.tracer.was_raised(value):
        raise GraphBreak("cannot-rebuild", f"a {kind.__qualname__} that was raised and caught: its traceback would be lost")
    arguments = ", ".join(code.expression(argument) for argument in value.args)
    name = code.start(value, f"{code.expression(kind)}.__new__({', '.join(filter(None, (code.expression(kind), arguments)))})")
    code.lines.append(f"{name}.args = ({arguments}{',' if len(value.args) == 1 else ''})")
    for link in ("__cause__", "__context__"):
        linked = getattr(value, link)
        if linked is not None:
            code.lines.append(f"{name}.{link} = {code.expression(linked)}")
    if value.__suppress_context__:
        code.lines.append(f"{name}.__suppress_context__ = True")
    return _with_attributes(code, value, name)


def _build_class(code: _Code, value: type) -> str:
    if code.world.is_inside_class(value):
        raise GraphBreak("cannot-rebuild", f"the class {value.__qualname__}, which each call of the compiled function makes anew")
    return code.bind(value.__name__, value)


def _build_bound(code: _Code, value: Any) -> str:
    return code.bind(getattr(value, "__name__", type(value).__name__), value)


def _build_slice(code: _Code, value: slice) -> str:
    return f"slice({', '.join(code.expression(part) for part in (value.start, value.stop, value.step))})"


def _build_trampoline(code: _Code, value: Trampoline) -> str:
    return code.expression(value.function)


def _build_wrapped(code: _Code, value: Any) -> str:
    return f"{type(value).__name__}({code.expression(value.__func__)})"


def _refuse(what: str) -> Callable[[_Code, Any], str]:
    def refuse(code: _Code, value: Any) -> str:
        raise GraphBreak("cannot-rebuild", what)

    return refuse


def _build_trampoline_iterator(code: _Code, value: TrampolineIterator) -> str:
    return code.expression(value.iterator)


def _build_super(code: _Code, value: Any) -> str:
    return f"super({code.expression(value.__thisclass__)}, {code.expression(value.__self__)})"


def _viewed(view: Any) -> Any:
    """The dict that a view shows."""
    return next(referent for referent in gc.get_referents(view) if isinstance(referent, dict))


def _build_view(method: str) -> Callable[[_Code, Any], str]:
    def build_view(code: _Code, value: Any) -> str:
        return f"{code.expression(_viewed(value))}.{method}()"

    return build_view


_BUILDERS: dict[type, Callable[[_Code, Any], str]] = {
    list: _build_list,
    dict: _build_dict,
    tuple: _build_tuple,
    set: _build_set,
    frozenset: _build_set,
    slice: _build_slice,
    types.CellType: _build_cell,
    types.FunctionType: _build_function,
    types.MethodType: _build_method,
    types.BuiltinFunctionType: _build_builtin,
    types.MethodWrapperType: _build_builtin,
    classes.BUILTIN_METHOD: _build_builtin,
    functools.partial: _build_partial,
    Trampoline: _build_trampoline,
    TrampolineIterator: _build_trampoline_iterator,
    super: _build_super,
    staticmethod: _build_wrapped,
    classmethod: _build_wrapped,
    torch.SymInt: _Code.output,
    torch.SymFloat: _build_float,
    torch.SymBool: lambda code, value: repr(value.node.guard_bool("", 0)),
    InterpretedGenerator: _refuse("a generator that is alive at this point"),
    AbsentTraceback: _refuse("a traceback"),
    SequenceIterator: _refuse("a live iterator over an object that has __getitem__ alone"),
    types.MappingProxyType: _refuse("a mappingproxy made in the compiled function"),
    type({}.keys()): _build_view("keys"),
    type({}.values()): _build_view("values"),
    type({}.items()): _build_view("items"),
    range: lambda code, value: repr(value),
    bytearray: lambda code, value: repr(value),
    torch.device: _build_bound,
    **dict.fromkeys(FROZEN_TYPES, _build_bound),
    torch.dtype: lambda code, value: code.bind(str(value).removeprefix("torch."), value),
    torch.layout: _build_bound,
    torch.memory_format: _build_bound,
}
_BASE_BUILDERS: tuple[tuple[Any, Callable[[_Code, Any], str]], ...] = (
    (enum.Enum, lambda code, value: code.bind(f"{type(value).__name__}_{value.name}", value)),
    (type, _build_class),
    (types.ModuleType, lambda code, value: code.bind(value.__name__, value)),
    (dict, _build_container_subclass),
    (list, _build_container_subclass),
    (collections.deque, _build_container_subclass),
    (tuple, _build_tuple),
    ((set, frozenset), _build_set),
    (BaseException, _build_exception),
)
