"""From guards to a native guard program: each source evaluated once, each guard one instruction, in a sound and quick
order.

Takes the guards that `World` collected and the sources of the graph's inputs; gives a `GuardProgram` (csrc/guards.cpp).
Always holds: an instruction that reads an object stands after the guards on that object; slots are numbered in the
order in which they are written. The order is: arguments without parts, global state, type attributes, then the other
trees from small to large, then guards over several objects, then guards that call Python.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base.records import dataclass, field
from fusewright.capture.guards.check import (
    SourceError,
    Tree,
    evaluate,
    failure_text,
    guard_holds,
    is_constant_key,
    readable,
    relation_of,
    storages_are_apart,
    symbols_in,
    tensor_matches,
)
from fusewright.capture.guards.sources import (
    Attribute,
    Closure,
    Computed,
    Constant,
    DictKey,
    FunctionSource,
    Global,
    InstanceDict,
    Item,
    Local,
    ProxiedDict,
    Referent,
    Source,
    TensorSize,
    TensorStride,
    TypeOf,
    Weak,
)
from fusewright.capture.guards.torch_state import DTYPE_CODES, NATIVE_DEVICES, key_sets, native_state, state_holds
from fusewright.capture.guards.types import GlobalState, Guard, Missing, TensorGuard

_OP = {name: code for code, name in enumerate(_native.OPCODES)}
_RELATION = {name: code for code, name in enumerate(_native.RELATIONS)}
_RELATION_NAMES = {
    "+": "ADD",
    "-": "SUB",
    "*": "MUL",
    "//": "FLOORDIV",
    "%": "MOD",
    "min": "MIN",
    "max": "MAX",
    "neg": "NEG",
    "==": "EQ",
    "!=": "NE",
    "<": "LT",
    "<=": "LE",
    ">": "GT",
    ">=": "GE",
    "and": "AND",
    "or": "OR",
    "not": "NOT",
}
_NO_INDEX = -(2**31)
# Attributes that csrc/values.cpp reads straight from the C structure (its FieldCode).
_FIELDS = {
    "__globals__": 1,
    "__defaults__": 2,
    "__kwdefaults__": 3,
    "__closure__": 4,
    "__code__": 5,
    "cell_contents": 6,
    "__self__": 7,
    "__func__": 8,
}
_FIELD_TYPES = {
    **dict.fromkeys(range(1, 6), types.FunctionType),
    6: types.CellType,
    7: types.MethodType,
    8: types.MethodType,
}
_HEAP_TYPE = 1 << 9
_SUBJECT_ORDER = {
    kind: i for i, kind in enumerate(("BOUND", "TYPE", "IS", "EQUALS", "TENSOR", "LENGTH", "KEYS", "ABSENT", "CALL"))
}
_OF_DICT = frozenset({"KEYS", "ABSENT"})
_IN_DICT = frozenset({Item, DictKey, Global})
_OF_SEVERAL = ("SAME", "DIFFERENT", "NO_OVERLAP", "SIZE")


class GuardProgram(_native.GuardProgram):
    """`check(locals, function) -> bool`, `inputs(locals, function) -> tuple | None`, and why it failed.

    guards, sources: what it was built from. Instances are made by `build_program`.
    """

    __slots__ = ("_blame", "_symbols", "guards", "sources")
    guards: tuple[Guard, ...]
    sources: tuple[Source, ...]
    _blame: list[tuple[Guard | None, Source | None]]
    _symbols: Mapping[str, Source]

    def failure(self, locals: tuple[object, ...], function: types.FunctionType) -> tuple[Guard | None, str]:
        """The first guard that fails on this frame, and how; (None, text) when none does, or when an input of the graph
        is gone."""
        at = self.failing(locals, function)
        if at is None:
            return None, "every guard holds"
        guard, source = self._blame[at]
        if guard is not None and not guard_holds(guard, locals, function, self._symbols):
            return guard, failure_text(guard, locals, function, self._symbols)
        if source is not None:
            try:
                evaluate(source, locals, function)
            except SourceError:
                return guard, f"{readable(source)} is gone"
            return guard, f"{readable(source)} changed"
        return guard, failure_text(guard, locals, function, self._symbols) if guard is not None else "a guard fails"


class _Row(NamedTuple):
    """An instruction but for its code; what each field means to a code is said in guard_code.h."""

    slot: int = 0
    base: int = 0
    arg: int = 0
    skip: int = 0
    optional: bool = False
    value: object = None
    detail: object = None


@dataclass(slots=True)
class _Node:
    """One distinct source: its parent, its children, the guards on it, and (once emitted) its slot."""

    source: Source | None
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    slot: int = -1
    optional: bool = False
    first_guard: Guard | None = None
    weight: int = 0

    def expected_type(self) -> type | None:
        for guard in self.guards:
            if guard.kind == "TYPE":
                return guard.value  # type: ignore[return-value]
        return None

    def is_dict(self) -> bool:
        if self.source is None or type(self.source) in (InstanceDict, ProxiedDict):
            return True
        expected = self.expected_type()
        if expected is not None:
            return issubclass(expected, dict)
        if isinstance(self.source, Constant):
            return isinstance(self.source.obj, dict)
        if isinstance(self.source, Attribute) and self.source.name == "__globals__":
            return True
        return any(isinstance(child.source, Item) and not isinstance(child.source.key, int) for child in self.children)


class _Builder:
    def __init__(self, guards: Iterable[Guard], symbols: Mapping[str, Source]) -> None:
        self.guards = tuple(guards)
        self.symbols = symbols
        self.by_id: dict[int, _Node] = {}
        self.by_key: dict[tuple[object, ...], _Node] = {}
        self.roots: list[_Node] = []
        self.globals: _Node | None = None
        self.builtins_slot = -1
        self.instructions: list[tuple[object, ...]] = []
        self.blame: list[tuple[Guard | None, Source | None]] = []
        self.slots = 0
        self.int_slots: dict[tuple[int, str, int], int] = {}
        self.current: Guard | None = None

    # --- the tree of sources ---

    def node(self, source: Source) -> _Node:
        """The node of a source; equal paths share one. Hashing goes by parent, so that deep paths stay cheap."""
        found = self.by_id.get(id(source))
        if found is not None:
            return found
        base: Source | None = getattr(source, "base", None)
        parent = self.node(base) if base is not None else self._globals() if isinstance(source, Global) else None
        key = _node_key(source, parent)
        found = self.by_key.get(key)
        if found is None:
            found = self.by_key[key] = _Node(source, parent)
            found.first_guard = self.current
            (self.roots if parent is None else parent.children).append(found)
        self.by_id[id(source)] = found
        return found

    def _globals(self) -> _Node:
        if self.globals is None:
            self.globals = _Node(None, None)
            self.roots.append(self.globals)
        return self.globals

    def attach(self) -> None:
        """Hangs every guard on the nodes that it looks at."""
        seen: set[tuple[object, ...]] = set()
        for guard in self.guards:
            self.current = guard
            if guard.kind in ("STATE", "TYPE_ATTRIBUTE"):
                continue
            if guard.kind in _OF_SEVERAL:
                for source in self.sources_of(guard):
                    self.object_node(source)
                continue
            if isinstance(guard.source, TensorSize | TensorStride):
                self.node(guard.source.base)
                continue
            node = self.node(guard.source)
            mark = (guard.kind, id(node), id(guard.value))
            if mark not in seen:
                seen.add(mark)
                node.guards.append(guard)
                node.first_guard = node.first_guard or guard
                node.optional |= guard.kind == "BOUND" and not guard.value
        self.current = None

    def object_node(self, source: Source) -> _Node:
        """The node of the object that a source reads an integer from, or of the source itself."""
        return self.node(source.base if isinstance(source, TensorSize | TensorStride) else source)

    def sources_of(self, guard: Guard) -> tuple[Source, ...]:
        if guard.kind == "SAME":
            return guard.source, guard.value  # type: ignore[return-value]
        if guard.kind == "SIZE":
            tree, symbols = relation_of(guard, self.symbols)
            return tuple(symbols[name] for name in symbols_in(tree))
        return tuple(guard.value)  # type: ignore[arg-type]

    # --- emission ---

    def emit(self, op: str, row: _Row, guard: Guard | None = None, source: Source | None = None) -> int:
        """guard, source: what to name where the instruction fails."""
        self.instructions.append((_OP[op], *row))
        self.blame.append((guard, source))
        return len(self.instructions) - 1

    def patch_skip(self, at: int, skip: int) -> None:
        row = self.instructions[at]
        self.instructions[at] = (*row[:4], skip, *row[5:])

    def new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def emit_all(self) -> None:
        light = [root for root in self.roots if isinstance(root.source, Local) and not root.children]
        self.weigh()
        heavy = sorted((root for root in self.roots if root not in light), key=lambda root: root.weight)
        for root in light:
            self.emit_tree(root)
        for guard in self.guards:
            if guard.kind == "STATE":
                self.emit_state(guard)
        self.emit_questions()
        self.emit_type_attributes()
        for root in heavy:
            self.emit_tree(root)
        for guard in self.guards:
            if guard.kind in _OF_SEVERAL:
                self.emit_of_several(guard)
            elif isinstance(guard.source, TensorSize | TensorStride):
                self.emit_extent_guard(guard)
        for node in list(self.by_key.values()):
            for guard in node.guards:
                if guard.kind == "CALL" and not isinstance(guard.source, FunctionSource):
                    self.emit("CALL", _Row(node.slot, self.slots, value=guard.value), guard)

    def weigh(self) -> None:
        """How many nodes and guards there are from each node down."""
        for node in reversed(self.by_key.values()):  # children stand behind their parents
            node.weight += 1 + len(node.guards)
            if node.parent is not None:
                node.parent.weight += node.weight

    def emit_questions(self) -> None:
        """Calls that ask the outside world and look at nothing here: early, while there is little to keep alive
        meanwhile."""
        questions = [
            guard for guard in self.guards if guard.kind == "CALL" and isinstance(guard.source, FunctionSource)
        ]
        if questions:
            slot = self.new_slot()
            self.emit("FUNCTION", _Row(slot))
            for guard in questions:
                self.emit("CALL", _Row(slot, self.slots, value=guard.value), guard)

    def emit_tree(self, node: _Node) -> None:
        self.emit_source(node)
        self.emit_guards(node, node.guards)
        self.emit_children(node)

    def emit_children(self, node: _Node) -> None:
        children, guards = node.children, node.guards
        if not children and not any(guard.kind in _OF_DICT for guard in guards):
            return
        is_dict = node.is_dict()
        in_dict = [child for child in children if type(child.source) in _IN_DICT] if is_dict else []
        of_dict = [guard for guard in guards if guard.kind in _OF_DICT] if is_dict else []
        checked: set[int] = set()  # ids of guards
        if in_dict or of_dict:
            block = self.emit("BLOCK", _Row(base=node.slot, arg=self.builtins_slot if node.source is None else -1))
            for guard in of_dict:
                self.emit_guard(node, guard)
            for child in in_dict:
                self.emit_source(child)
                fixed = [guard for guard in child.guards if _follows_from_identity(guard)]
                if fixed:
                    self.emit_guards(child, fixed)
                    checked.update(map(id, fixed))
            self.patch_skip(block, self.emit("BLOCK_END", _Row(skip=block)) + 1)
        for child in children:
            if child.slot < 0:
                self.emit_tree(child)
                continue
            left = [guard for guard in child.guards if id(guard) not in checked]
            if left:
                self.emit_guards(child, left)
            self.emit_children(child)

    def emit_source(self, node: _Node) -> None:
        source, base = node.source, node.parent.slot if node.parent is not None else 0
        if source is None:
            node.slot = self.new_slot()
            self.emit("GLOBALS", _Row(node.slot))
            self.builtins_slot = self.new_slot()
            self.emit("BUILTINS", _Row(self.builtins_slot))
            return
        op, arg, value = _source_instruction(source, node.parent, self.builtins_slot)
        node.slot = self.slots
        self.slots += 1
        self.instructions.append((_OP[op], node.slot, base, arg, 0, node.optional, value, None))
        self.blame.append((node.first_guard, source))

    def emit_guards(self, node: _Node, guards: list[Guard]) -> None:
        if len(guards) > 1:
            guards = sorted(guards, key=_subject_order)
        for guard in guards:
            if guard.kind != "CALL" and not (guard.kind in _OF_DICT and node.is_dict()):
                self.emit_guard(node, guard)

    def emit_guard(self, node: _Node, guard: Guard) -> None:
        op: str = guard.kind
        arg, value, detail = 0, guard.value, None
        if op == "BOUND":
            op = "BOUND" if guard.value else "UNBOUND"
        elif op == "LENGTH":
            assert isinstance(guard.value, int)
            arg, value = guard.value, None
        elif op == "ABSENT":
            arg = int(not is_constant_key(guard.value))
        elif op == "IS" and type(guard.held) is Weak:
            op, value = "WEAK_IS", guard.held
        elif op == "TENSOR":
            value, detail = None, _tensor_detail(guard.value)  # type: ignore[arg-type]
        self.instructions.append((_OP[op], node.slot, self.slots, arg, 0, False, value, detail))
        self.blame.append((guard, None))

    def emit_state(self, guard: Guard) -> None:
        assert isinstance(guard.value, GlobalState)
        native = native_state(guard.value)
        row = _Row(base=self.slots, arg=int(native is not None), value=guard.value, detail=native)
        self.emit("STATE", row, guard)

    def emit_type_attributes(self) -> None:
        by_type: dict[type, list[Guard]] = {}
        for guard in self.guards:
            if guard.kind == "TYPE_ATTRIBUTE":
                by_type.setdefault(guard.value[0], []).append(guard)  # type: ignore[index]
        for cls, guards in by_type.items():
            block = self.emit("TYPE_BLOCK", _Row(value=cls))
            for guard in guards:
                _, name, wanted = cast("tuple[type, str, object]", guard.value)
                value = (cls, name) if isinstance(wanted, Missing) else (cls, name, wanted)
                last = block if guard is guards[-1] else -1
                self.emit("TYPE_ATTRIBUTE", _Row(arg=int(name == "__mro__"), skip=last, value=value), guard)
            self.patch_skip(block, len(self.instructions))

    def emit_of_several(self, guard: Guard) -> None:
        if guard.kind == "SIZE":
            tree, symbols = relation_of(guard, self.symbols)
            places = {name: self.int_slot(symbols[name], guard) for name in symbols_in(tree)}
            self.emit("SIZE", _Row(detail=tuple(_postfix(tree, places))), guard)
            return
        nodes = [self.node(source) for source in self.sources_of(guard)]
        if guard.kind == "SAME":
            self.emit("SAME", _Row(nodes[0].slot, nodes[1].slot), guard)
            return
        fallback = storages_are_apart if guard.kind == "NO_OVERLAP" else None
        self.emit(guard.kind, _Row(value=fallback, detail=tuple(node.slot for node in nodes)), guard)

    def emit_extent_guard(self, guard: Guard) -> None:
        """A guard on a tensor's size or stride as such."""
        if guard.kind == "TYPE" and guard.value is int:
            return
        if guard.kind != "EQUALS" or type(guard.value) is not int:
            raise ValueError(f"a guard of kind {guard.kind} cannot look at {guard.source.text()}")
        place = self.int_slot(guard.source, guard)
        equal = (_RELATION["SYM"], place, _RELATION["CONST"], guard.value, _RELATION["EQ"])
        self.emit("SIZE", _Row(detail=equal), guard)

    def int_slot(self, source: Source, guard: Guard | None) -> int:
        """The number of the int64 that holds a size, a stride or the value of a Python int; read where it is first
        asked for."""
        op = {TensorSize: "SIZE_OF", TensorStride: "STRIDE_OF"}.get(type(source), "INT_OF")
        node, dim = self.object_node(source), source.dim if isinstance(source, TensorSize | TensorStride) else 0
        key = (id(node), op, dim)
        place = self.int_slots.get(key)
        if place is None:
            place = self.int_slots[key] = len(self.int_slots)
            native = any(guard.kind == "TENSOR" for guard in node.guards)
            self.emit(op, _Row(place, node.slot, dim, optional=native), guard, source)
        return place


def _subject_order(guard: Guard) -> int:
    return _SUBJECT_ORDER[guard.kind]


def _node_key(source: Source, parent: _Node | None) -> tuple[object, ...]:
    row = _NODE_KEYS.get(type(source))
    return (type(source), id(parent)) if row is None else row(source, parent)


def _item_key(source: Item, parent: _Node | None) -> tuple[object, ...]:
    key = source.key
    if type(key) is str:
        return Item, id(parent), str, key
    return (Item, id(parent), type(key), key) if is_constant_key(key) else (Item, id(parent), None, id(key))


_NODE_KEYS: dict[type, Callable[[Any, _Node | None], tuple[object, ...]]] = {
    Computed: lambda source, parent: (Computed, id(parent), source.function),
    Constant: lambda source, parent: (Constant, source.obj_id),
    Item: _item_key,
    DictKey: lambda source, parent: (DictKey, id(parent), source.index),
    Attribute: lambda source, parent: (Attribute, id(parent), source.name),
    Global: lambda source, parent: (Global, id(parent), source.name),
    Local: lambda source, parent: (Local, source.index),
    Closure: lambda source, parent: (Closure, source.index),
}


def _source_instruction(source: Source, parent: _Node | None, builtins_slot: int) -> tuple[str, int, object]:
    """(opcode, arg, object) of a source."""
    row = _SOURCE_INSTRUCTIONS.get(type(source))
    if row is None:
        raise ValueError(f"{type(source).__name__} is no source of an object: {source.text()}")
    return row(source, parent, builtins_slot)


def _item_instruction(source: Item, parent: _Node | None, builtins_slot: int) -> tuple[str, int, object]:
    key = source.key
    if not is_constant_key(key):
        return "IDENTITY_ITEM", 0, key
    return "ITEM", key if isinstance(key, int) and _NO_INDEX < key < -_NO_INDEX else _NO_INDEX, key


def _attribute_instruction(source: Attribute, parent: _Node | None, builtins_slot: int) -> tuple[str, int, object]:
    code = _FIELDS.get(source.name, 0)
    assert parent is not None
    base = types.FunctionType if isinstance(parent.source, FunctionSource) else parent.expected_type()
    if isinstance(parent.source, Constant):
        base = type(parent.source.obj)
    if code and base is _FIELD_TYPES[code]:
        return "ATTRIBUTE", code, None
    return "ATTRIBUTE", 0, source.name


_SOURCE_INSTRUCTIONS: dict[type, Callable[[Any, _Node | None, int], tuple[str, int, object]]] = {
    Local: lambda source, parent, builtins_slot: ("LOCAL", source.index, None),
    FunctionSource: lambda source, parent, builtins_slot: ("FUNCTION", 0, None),
    Constant: lambda source, parent, builtins_slot: (
        "WEAK_CONSTANT" if source.is_weak else "CONSTANT",
        0,
        source.held,
    ),
    Global: lambda source, parent, builtins_slot: ("GLOBAL_ITEM", builtins_slot, source.name),
    Closure: lambda source, parent, builtins_slot: ("CLOSURE", source.index, None),
    TypeOf: lambda source, parent, builtins_slot: ("TYPE_OF", 0, None),
    Referent: lambda source, parent, builtins_slot: ("REFERENT", 0, None),
    Computed: lambda source, parent, builtins_slot: ("COMPUTED", 0, source.function),
    InstanceDict: lambda source, parent, builtins_slot: ("INSTANCE_DICT", 0, None),
    ProxiedDict: lambda source, parent, builtins_slot: ("INSTANCE_DICT", 0, None),
    Item: _item_instruction,
    DictKey: lambda source, parent, builtins_slot: ("DICT_KEY", source.index, None),
    Attribute: _attribute_instruction,
}


def _follows_from_identity(guard: Guard) -> bool:
    """Whether the guard still holds as long as the source gives the same object: nothing about the object itself can
    change it."""
    if guard.kind == "TYPE":
        assert isinstance(guard.value, type)
        return not guard.value.__flags__ & _HEAP_TYPE  # only instances of heap types can be given another class
    return guard.kind in ("IS", "EQUALS")


def _tensor_detail(guard: TensorGuard) -> tuple[object, ...]:
    native = guard.device.type in NATIVE_DEVICES and guard.dtype in DTYPE_CODES
    normal, inference = key_sets(guard.device) if native else (0, 0)
    wanted = (
        (normal, inference)
        if guard.inference is None
        else (inference, inference)
        if guard.inference
        else (normal, normal)
    )
    index = guard.device.index if guard.device.type == "cuda" and guard.device.index is not None else -2
    requires_grad = -1 if guard.requires_grad is None else int(guard.requires_grad)
    dtype = DTYPE_CODES.get(guard.dtype, -1)
    return (
        guard.cls,
        native,
        wanted,
        dtype,
        index,
        requires_grad,
        tuple(guard.shape),
        tuple(guard.stride),
        tensor_matches(guard),
    )


def _postfix(tree: Tree, places: Mapping[str, int]) -> list[int]:
    if isinstance(tree, int):
        return [_RELATION["CONST"], int(tree)]
    if tree[0] == "const":
        return [_RELATION["CONST"], tree[1]]
    if tree[0] == "sym":
        return [_RELATION["SYM"], places[tree[1]]]
    operands = [_postfix(operand, places) for operand in tree[1:]]
    return [*(word for operand in operands for word in operand), _RELATION[_RELATION_NAMES[tree[0]]]]


def build_program(
    guards: Iterable[Guard], inputs: Iterable[Source], symbols: Mapping[str, Source] | None = None
) -> GuardProgram:
    """The native program of these guards; `inputs` gives the source of each input of the graph, in order.

    symbols: the source of each symbolic size, for SIZE guards whose value does not bring its own.
    Raises ValueError for a guard or source that has no native form (none of those that `World` makes).
    """
    inputs = tuple(inputs)
    builder = _Builder(guards, symbols or {})
    builder.attach()
    for source in inputs:
        builder.object_node(source)
    builder.emit_all()
    places = []
    for source in inputs:
        extent = isinstance(source, TensorSize | TensorStride)
        places.append((extent, builder.int_slot(source, None) if extent else builder.node(source).slot))
    program = GuardProgram(builder.slots, len(builder.int_slots), builder.instructions, places, state_holds)
    program.guards, program.sources = builder.guards, inputs
    program._blame, program._symbols = builder.blame, dict(builder.symbols)
    for node in builder.by_key.values():
        node.parent = None  # no cycles: the tree is gone when this returns
    return program
