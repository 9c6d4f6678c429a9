"""World: the border between the inside (objects made during this capture) and the outside (whatever existed before).

Takes real outside objects with their sources; gives what stands for them inside; collects the guards and effects.
Always holds: what came from outside is in the table `_by_value` (identity of the stand-in) and `_by_real` (identity of
the original); everything else on the interpreter's stack was made inside and is free to use. This file dispatches by
type: what a type means is in values/, what an operator does in protocols.py, what a call does in calls.py.
"""

from __future__ import annotations

import builtins
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fusewright._native import isinstance
from fusewright.base.records import replace
from fusewright.base.signals import GraphBreak, Retry, UserException
from fusewright.capture.border import formatting, imports, protocols, torch_function
from fusewright.capture.border.absent import STAND_FOR, look_alike
from fusewright.capture.border.aliasing import alias_guards
from fusewright.capture.border.attributes import BASE_DELATTRS, BASE_GETATTRS, BASE_SETATTRS, GETATTRS, ByType
from fusewright.capture.border.effects import DELETED, DeferredCall, Effects, Shadow
from fusewright.capture.border.foresight import Foreseen
from fusewright.capture.border.interfaces import Outside, Tracer
from fusewright.capture.border.loaders import BASE_LOADERS, LOADERS
from fusewright.capture.border.looked_up import as_written, interpreted
from fusewright.capture.border.memoise import Repeats
from fusewright.capture.border.native import unwatched, without_warnings
from fusewright.capture.border.native_ready import for_native
from fusewright.capture.border.values import (
    array,
    cls as classes,
    context,
    function as functions,
    generator,
    iterator as iterators,
    list as lists,
    number,
    object as objects,
    tensor,
    wrapper,
)
from fusewright.capture.border.values.dict import OutsideDict
from fusewright.capture.bytecode.instructions import NULL
from fusewright.capture.guards import MISSING, MOST_GUARDS, AnswersAgain, Guard, GuardKind
from fusewright.capture.guards.abstract_classes import AbstractChecks
from fusewright.capture.guards.sources import Attribute, Closure, Constant, FunctionSource, InstanceDict, Item, Source
from fusewright.capture.guards.torch_state import capture_global_state
from fusewright.record.traced_tensor import TracedTensor


class World:
    """See the module's docstring, and "The border" in docs/architecture.md. Operators are in protocols.py."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.effects = Effects()
        self.input_sources: list[Source] = []
        self.inputs: list[tuple[torch.Tensor, Source, torch.Tensor]] = []
        self.module_sources: set[Source] = set()
        self.wrappers = wrapper.Wrappers()
        self.uses_arrays = False  # NumPy arrays are traced
        self.arrays: list[tuple[Any, Source, torch.Tensor]] = []  # those that are inputs
        # random generators of the program's: (it, its state, the call that writes that back)
        self.generators: dict[int, tuple[Any, Any, Any]] = {}
        self.iterators: dict[int, DeferredCall] = {}  # that are advanced: what does so behind the graph
        self.foreseen = Foreseen(self)
        self.cached: dict[int, dict[Any, Any]] = {}  # what cached functions gave in this call
        self.deep_copies: dict[int, tuple[Any, dict[Any, Any]]] = {}  # by identity: the memo of one, the memories met
        self.recordings, self.error_states = [], []  # open contexts that record warnings; set how NumPy treats errors
        self.advanced: dict[int, Any] = {}  # generators, natively
        self.tensor_attributes: dict[int, dict[str, object]] = {}
        self.owners: dict[int, tuple[object, str]] = {}  # of dicts that were asked for: whose they are, and what
        self.numbers: dict[Source, tuple[Any, Any]] = {}  # that change: what stands for each, and its OutsideFloat
        self.gradient_nodes: dict[object, Any] = {}
        self.number_tests: tuple[dict[Source, Any], dict[object, Any]] = ({}, {})  # see values/tensor_number.py
        self.may_infer, self.infers, self.inference_guards = True, False, []  # it may be entered; was; what is open
        self.overridden, self.disablers = False, []  # tensors have classes of the program's; open contexts without
        self.settings_changed = False  # the program has called what sets one of context.SETTINGS
        self.global_hooks_checked = False
        self.abstract_checks = AbstractChecks()
        self.state = context.snapshot()
        self.initial = capture_global_state()
        self.requires_grad_matters = self.initial.grad_enabled
        self.unread: dict[int, Shadow] = {}  # lists of which no element stands in the stand-in, by that
        self.repeats = Repeats(self)
        self.touched = self.repeats.touched  # what was handed out, in order
        self.stored: dict[int, OutsideDict] = {}  # what has been stored to, by the identity of the real dict
        self.store_count = 0
        self.as_written: dict[int, tuple[int, bool]] = {}  # see looked_up.py
        self.intent = ""  # what the next instructions do with what is being loaded now: see lists.intent_of
        self._guards: dict[object, Guard] = {}
        self._by_real: dict[int, Outside] = {}
        self._by_value: dict[int, Outside] = {}
        self._alive: list[object] = []
        self._loaders, self._getters = ByType({}, BASE_LOADERS), ByType(GETATTRS, BASE_GETATTRS)
        self._setters, self._deleters = ByType({}, BASE_SETATTRS), ByType({}, BASE_DELATTRS)
        self.made: dict[int, Any] = {}  # of MADE_AFRESH and type parameters, by this capture
        self.identities: dict[int, object] = {}  # what this capture has made, by the id or hash that was asked for
        self.looked_up: dict[tuple[type, str], Any] = {}  # in classes, guarded, while the program stores to none
        self.dict_kinds: dict[type, tuple[bool, bool]] = {}  # see values/object.py
        self._inside: dict[int, object] = {}  # classes and functions that it has made, and what such classes hold
        self._constants: dict[int, Constant] = {}
        self._constant_names: set[str] = set(tracer.function.__code__.co_varnames)
        self._dicts: list[OutsideDict] = []
        self._root_cells = {
            id(cell): Closure(index, name)
            for index, (name, cell) in enumerate(
                zip(tracer.function.__code__.co_freevars, tracer.function.__closure__ or (), strict=False)
            )
        }

    @property
    def recorder(self) -> Any:
        """The recorder of this attempt."""
        return self.tracer.recorder

    # The tables of outside objects.

    def load(self, real: Any, source: Source) -> Any:
        """What stands inside for `real`, which came from `source`; guards what that rests on."""
        known = self._by_real.get(id(real))
        if known is not None:
            if known.source != source:
                self._guard_same(known, source)
            self.touched.append(known.value)
            return self.use(known.value) if self.unread else known.value
        if id(real) in self._inside:
            return real
        loader = LOADERS.get(type(real))
        if loader is None:
            if self._is_inside_already(real):
                return real
            loader = self._loaders[type(real)]
        value = loader(self, real, source)
        self.touched.append(value)
        return value

    def use(self, value: Any) -> Any:
        """Called for what is handed out again: a list that was not read is read now, unless all that is done with it
        can do without."""
        if self.unread and not self.intent:
            unread = self.unread.pop(id(value), None)
            if unread is not None:
                lists.read_list(self, unread)
        return value

    def _is_inside_already(self, real: object) -> bool:
        # A traced tensor, or a stand-in, that was stored in an inside object which is now reached by a source.
        return id(real) in self._by_value or self.recorder_owns(real)

    def recorder_owns(self, value: object) -> bool:
        """Whether `value` is a traced tensor of this attempt."""
        return self.recorder.owns(value)

    def _guard_same(self, known: Outside, source: Source) -> None:
        if isinstance(source, Constant):
            self.guard("IS", known.source, known.real)
        elif isinstance(known.source, Constant):
            self.guard("IS", source, known.real)
        else:
            self.guard("SAME", source, known.source)

    def stand_in(self, real: Any, source: Source, value: Any) -> Any:
        """Registers `value` as what stands for `real`; gives `value`."""
        self._by_real[id(real)] = self._by_value[id(value)] = Outside(real, source, value)
        if type(value) is OutsideDict:
            self._dicts.append(value)
        return value

    def number_stand_in(self, real: object, source: Source, value: object) -> None:
        """Registers what stands for a number; not found by `real`, since the same number elsewhere is another one."""
        self._by_value[id(value)] = Outside(real, source, value)

    def replace_stand_in(self, real: Any, value: Any) -> None:
        """A materialised dict takes over from its lazy stand-in, which interpreted code may still hold."""
        lazy = self._by_real[id(real)]
        self._alive.append(lazy.value)
        # A proxy's reads from the dict behind it, and stands for the proxy.
        self._by_real[id(real)] = self._by_value[id(value)] = Outside(real, lazy.source, value)

    def dict_stand_in(self, real: Any, source: Source) -> Any:
        """The stand-in of an instance dictionary or of globals: as `load`, without a guard on its type."""
        known = self._by_real.get(id(real))
        if known is not None:
            if source != known.source and InstanceDict in (type(source), type(known.source)):  # one dict
                self._guard_same(known, source)
            return known.value
        return self.stand_in(real, source, OutsideDict(self, real, source))

    def known_stand_in(self, real: object) -> Any:
        """What stands for `real` if it has been met, else None."""
        known = self._by_real.get(id(real))
        return None if known is None else known.value

    def record_of(self, real: object) -> Outside | None:
        """The record of an outside object that has been met."""
        return self._by_real.get(id(real))

    def outside(self, value: object) -> Outside | None:
        """The record of an outside object's stand-in, None for what was made inside."""
        record = self._by_value.get(id(value))
        return record if record is not None and record.value is value else None

    def is_raw(self, value: object) -> bool:
        """Whether `value` is an outside object handed out as it is."""
        record = self._by_value.get(id(value))
        return record is not None and record.real is value

    def source_of(self, obj: object) -> Source | None:
        """The source of an outside object's stand-in."""
        record = self.outside(obj)
        return record.source if record is not None else None

    def real_of(self, value: object) -> Any:
        """The outside object that `value` stands for; `value` itself when it was made inside."""
        record = self.outside(value)
        return record.real if record is not None else value

    def constant(self, obj: object, hint: str) -> Constant:
        """A source for an object that is known for good once others are guarded; the compiled code keeps it alive."""
        known = self._constants.get(id(obj))
        if known is None:
            stem = "_" + ("".join(letter if letter.isalnum() else "_" for letter in hint) or "object")
            names = (f"{stem}_{count}" if count else stem for count in range(len(self._constant_names) + 1))
            name = next(name for name in names if name not in self._constant_names)
            self._constant_names.add(name)
            known = self._constants[id(obj)] = Constant.of(obj, name)
            self._alive.append(obj)
        return known

    def reserve_names(self, names: Iterable[str]) -> None:
        """Names of the generated function that no constant may take."""
        self._constant_names.update(names)

    def is_inside_class(self, cls: type) -> bool:
        """Whether the class was made by a class statement or `type(...)` during this capture."""
        return id(cls) in self._inside

    def note_inside_class(self, cls: type) -> None:
        """Called for each class that is made during this capture, and again when it has got something else to hold."""
        self._inside.update({id(one): one for one in (cls, *classes.held_inside(self, cls))})

    def note_inside_function(self, function: types.FunctionType) -> None:
        """Called for each function that is made during this capture."""
        self._inside[id(function)] = function

    def load_function(self, function: types.FunctionType) -> bool:
        """Called for each function that is interpreted: False when it was made inside, else its code is guarded."""
        if id(function) in self._inside:
            return False
        if self.outside(function) is None:
            self.load(function, self.constant(function, function.__name__))
        where = self._by_value[id(function)].source
        if function is not self.tracer.function:  # a compiled function looks at its own code
            self.guard("IS", Attribute(where, "__code__"), function.__code__)
            functions.load_weak(self, function, where)
        return True

    def guard_method(self, obj: object, function: types.FunctionType) -> None:
        """Guards that native code finds `function` in the class of `obj`, under whatever name it looked for."""
        kind = self.type_of(obj)
        for name in {name for base in kind.__mro__ for name, found in base.__dict__.items() if found is function}:
            classes.guarded_lookup(self, kind, name)

    def has_stand_ins(self) -> bool:
        """Whether any lazy stand-in exists, so that native code must be kept from seeing one."""
        return bool(self._dicts)

    # Guards.

    def guard(self, kind: GuardKind, source: Source, value: object) -> None:
        """Adds a guard once; facts about an object that is known by identity need none where the fact cannot change."""
        if isinstance(source, Constant) and (
            kind in ("IS", "EQUALS") or (kind == "TYPE" and not value.__flags__ & (1 << 9))  # type: ignore
        ):
            return
        key = (kind, source, value) if kind in ("ABSENT", "CALL", "NO_OVERLAP") else (kind, source)
        if key not in self._guards:
            self._guards[key] = Guard.of(kind, source, value)
            if len(self._guards) > MOST_GUARDS:
                raise GraphBreak("large-container", source.text())

    def guard_identity(self, value: object) -> None:
        """Guards that an outside object with a path is the very object: it serves as a key. Constants are guarded by
        value already."""
        record = self.outside(value)
        if record is not None and not isinstance(record.source, Constant):
            self.guard("IS", record.source, record.real)

    def guard_bases(self, cls: type) -> None:
        """Guards the bases of a class: `__bases__` may be assigned to."""
        if cls.__flags__ & (1 << 9):
            self.guard_type_attribute(cls, "__mro__", cls.__mro__)

    def guard_answer(
        self, function: Callable[..., object], args: tuple[object, ...], value: object, identical: bool = False
    ) -> None:
        """Guards that `function(*args)`, which is asked again at each call, keeps its answer."""
        self.guard("CALL", FunctionSource(), AnswersAgain(function, args, value, identical))

    def guard_type_attribute(self, cls: type, name: str, found: object) -> None:
        """Guards what the MRO of `cls` holds under `name` (a class of this capture cannot be met again)."""
        if id(cls) in self._inside:
            cls = next(base for base in cls.__mro__ if id(base) not in self._inside)
            found = classes.lookup(cls, name)
        key = ("TYPE_ATTRIBUTE", cls, name)
        if key not in self._guards:
            self._guards[key] = Guard("TYPE_ATTRIBUTE", self.constant(cls, cls.__name__), (cls, name, found))

    def guards(self) -> tuple[Guard, ...]:
        """All guards of this capture, settings first; called once, at the end."""
        settings = Guard("STATE", FunctionSource(), self.initial, "settings of PyTorch")
        sizes = tensor.size_guards(self)
        tensors = [
            Guard("TENSOR", source, tensor.tensor_guard(self, real, traced), "a tensor that the graph reads")
            for real, source, traced in self.inputs
        ]
        if self.abstract_checks.answers:
            self.guard("CALL", FunctionSource(), self.abstract_checks)
        return (settings, *self._guards.values(), *number.number_guards(self), *tensors, *sizes, *alias_guards(self))

    def outside_objects(self) -> Iterable[Outside]:
        """The records of all outside objects."""
        return self._by_real.values()

    def written_objects(self) -> set[int]:
        """Identities of the outside objects (and instance dictionaries) that may have been written to."""
        written = {id(self.real_of(store.target)) for store in self.effects.slots.values()}
        written |= {id(namespace.real) for namespace in self._dicts if namespace.stores}
        written |= self.generators.keys()
        return written | {id(shadow.real) for shadow in self.effects.shadows}

    # Names.

    def globals_dict(self, func: types.FunctionType) -> Any:
        """The stand-in of a function's globals."""
        namespace = func.__globals__
        known = self._by_real.get(id(namespace))
        if known is not None:
            return known.value
        if namespace is self.tracer.function.__globals__:
            source: Source = Attribute(FunctionSource(), "__globals__")
        else:
            source = self.constant(namespace, f"globals_of_{namespace.get('__name__', 'module')}")
        return self.dict_stand_in(namespace, source)

    def load_global(self, func: types.FunctionType, name: str) -> Any:
        """A global name of the frame of `func`, falling to builtins."""
        value = objects.read_namespace(self.globals_dict(func), name)
        if value is not MISSING:
            return value
        namespace = getattr(func, "__builtins__", builtins.__dict__)
        value = objects.read_namespace(self.dict_stand_in(namespace, self.constant(namespace, "builtins")), name)
        if value is MISSING:
            raise UserException(NameError(f"name '{name}' is not defined", name=name))
        return value

    def store_global(self, func: types.FunctionType, name: str, value: object) -> None:
        """`global name; name = value`: held back until `finish`."""
        protocols.setitem(self, self.globals_dict(func), name, value)

    def delete_global(self, func: types.FunctionType, name: str) -> None:
        """`global name; del name`."""
        try:
            protocols.delitem(self, self.globals_dict(func), name)
        except UserException:
            raise UserException(NameError(f"name '{name}' is not defined", name=name)) from None

    def cell_source(self, cell: types.CellType) -> Source:
        """Where the content of an outside cell is read from."""
        closure = self._root_cells.get(id(cell))
        if closure is not None:
            return closure
        record = self.outside(cell)
        return Attribute(record.source if record is not None else self.constant(cell, "cell"), "cell_contents")

    def load_cell(self, cell: types.CellType) -> Any:
        """The content of a closure cell of an outside function; NULL when it is empty."""
        stored = self.effects.cells.get(id(cell))
        if stored is not None:
            return NULL if stored.value is DELETED else stored.value
        source = self.cell_source(cell)
        try:
            content = cell.cell_contents
        except ValueError:
            self.guard("BOUND", source, False)
            return NULL
        return self.load(content, source)

    def store_cell(self, cell: types.CellType, value: object) -> None:
        """A store to an outside cell (`nonlocal`): held back."""
        self._alive.append(cell)
        self.effects.store_cell(cell, value)

    def root_cell_index(self, cell: types.CellType) -> int | None:
        """The place of a cell in the root function's closure."""
        closure = self._root_cells.get(id(cell))
        return closure.index if closure is not None else None

    def is_outside_cell(self, cell: types.CellType) -> bool:
        """Whether the cell existed before capture."""
        return not self.tracer.is_inside_cell(cell)

    def load_default(self, func: types.FunctionType, which: int | str | None) -> Any:
        """A default, by its place in `__defaults__` or its name in `__kwdefaults__`; None guards that there is none."""
        values: Any = func.__defaults__ if isinstance(which, int) else functions.keyword_defaults(self, func)
        value = None if which is None else values[which]
        if id(func) in self._inside:
            return value
        record = self.outside(func)
        where: Source = self.constant(func, func.__name__) if record is None else record.source
        where = FunctionSource() if func is self.tracer.function else where
        if which is None:
            return functions.guard_defaults(self, func, where)
        table = Attribute(where, "__defaults__" if isinstance(which, int) else "__kwdefaults__")
        if isinstance(which, str) or not isinstance(where, Constant) or where.is_weak:
            return self.load(value, Item(table, which))
        self.guard("IS", table, values)  # a tuple never changes: what it holds is known for good
        return self.load(value, self.constant(value, f"default_of_{func.__name__}"))

    # Attributes.

    def type_of(self, obj: object) -> type:
        """`type(obj)` as eager would answer it."""
        record = self._by_value.get(id(obj))
        if record is not None and record.value is obj:
            return type(record.real)
        if issubclass(type(obj), torch.Tensor):
            if type(obj) is TracedTensor:
                return obj.python_class
            return type(obj) if wrapper.is_wrapper(obj) else torch.Tensor
        if type(obj) is array.TracedArray:
            return array.array_type(obj)
        if type(obj) in STAND_FOR:
            return STAND_FOR[type(obj)]
        if (alike := look_alike(obj)) is not None:
            return type(alike)
        return dict if type(obj) is OutsideDict else number.python_type(obj) or type(obj)

    def getattr(self, obj: Any, name: str) -> Any:
        """`obj.name`, Python's full attribute protocol."""
        try:
            return self._getters[type(obj)](self, obj, name)
        except UserException as signal:
            objects.note_missing(self, signal.exception, obj, name)
            raise

    def setattr(self, obj: Any, name: str, value: object) -> None:
        """`obj.name = value`."""
        self._setters[type(obj)](self, obj, name, value)

    def delattr(self, obj: Any, name: str) -> None:
        """`del obj.name`."""
        self._deleters[type(obj)](self, obj, name)

    def bind(self, found: object, obj: object, kind: type, name: str) -> Any:
        """See values/object.py."""
        return objects.bind(self, found, obj, kind, name)

    def is_data_descriptor(self, found: object, reads: bool = False) -> bool:
        """See values/object.py."""
        return objects.is_data_descriptor(self, found, reads)

    def unary(self, op: str, obj: Any) -> Any:
        """`op obj`; op is one of + - ~ not."""
        return protocols.unary(self, op, obj)

    def binary(self, op: str, left: Any, right: Any, inplace: bool = False) -> Any:
        """`left op right`; op as it is written (`+`, `@`, `**`…), with or without a trailing `=`."""
        return protocols.binary(self, op, left, right, inplace)

    def compare(self, op: str, left: Any, right: Any) -> Any:
        """`left op right`; op is one of < <= == != > >= is, is not, in, not in."""
        return protocols.compare(self, op, left, right)

    def contains(self, container: Any, item: Any) -> bool:
        """`item in container`."""
        return protocols.contains(self, container, item)

    def getitem(self, obj: Any, key: Any) -> Any:
        """`obj[key]`."""
        return protocols.getitem(self, obj, key)

    def setitem(self, obj: Any, key: Any, value: Any) -> None:
        """`obj[key] = value`."""
        protocols.setitem(self, obj, key, value)

    def delitem(self, obj: Any, key: Any) -> None:
        """`del obj[key]`."""
        protocols.delitem(self, obj, key)

    def truth(self, obj: Any) -> bool:
        """`bool(obj)`; a tensor's is a graph break."""
        return protocols.truth(self, lists.length(self, obj) if id(obj) in self.unread else obj)

    def iterate(self, obj: Any) -> Iterator[Any]:
        """`iter(obj)`."""
        return protocols.iterate(self, obj)

    def ask_length(self, obj: Any) -> None:
        """`operator.length_hint(obj)`, for what it may do."""
        protocols.ask_length(self, obj)

    def next(self, iterator: Any) -> Any:
        """`next(iterator)`; UserException(StopIteration) at the end."""
        return protocols.advance(self, iterator)

    def format(self, value: Any, conversion: int, spec: str) -> str:
        """`f"{value!conversion:spec}"`; conversion: 0 none, or the code of s, r, a (1, 2, 3 in bytecode)."""
        return formatting.format_value(self, value, conversion, spec)

    def materialise(self, value: Any) -> Any:
        """What native code may see: the real dict behind a lazy stand-in, other values as they are."""
        return value.as_native() if type(value) is OutsideDict else value

    def torch_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function, method or operator: run natively on traced tensors, and recorded."""
        if self.uses_arrays and fn in (operator.getitem, operator.setitem):  # an array as index is as a tensor
            args = (args[0], array.as_index(args[1]), *args[2:])
        given = (*args, *kwargs.values())
        if any(isinstance(argument, np.ndarray) for argument in given) or (self.uses_arrays and array.has_array(given)):
            self.recorder.lacks_form("opaque-object", f"a NumPy array given to {getattr(fn, '__name__', fn)}")
        if any(isinstance(argument, torch.Generator) for argument in given):
            return generator.drawing(self, fn, args, kwargs)
        objects = torch_function.overriding(args, kwargs)
        if objects and (answer := torch_function.overridden(self, fn, args, kwargs, objects)) is not MISSING:
            return answer
        torch_function.refuse_asking(self, fn, given)
        if not as_written(self, fn):
            return interpreted(self, fn, args, kwargs)
        args = tuple(for_native(self, argument) for argument in args)
        kwargs = {name: for_native(self, argument) for name, argument in kwargs.items()}
        call = functools.partial(without_warnings, self.recorder.call) if self.recordings else self.recorder.call
        result = unwatched(call, fn, args, kwargs)
        if type(result) is not TracedTensor:
            wrapper.check_result(self, fn, result)
        self.repeats.log(fn, args, kwargs, result)
        return result

    def repeated_call(
        self, module: torch.nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a module, replayed where a call of another module of its class did the same (border/memoise.py)."""
        return self.repeats.call(module, forward, args, kwargs)

    def import_name(self, namespace: Any, name: str, fromlist: Any, level: int) -> Any:
        """`import name`: a module that is loaded already is guarded by the attributes that are read from it."""
        return imports.import_name(self, namespace, name, fromlist, level)

    def import_from(self, origin: types.ModuleType, name: str) -> Any:
        """`from origin import name`."""
        return imports.import_from(self, origin, name)

    # The end of an attempt.

    def written_dicts(self) -> list[OutsideDict]:
        """Lazy stand-ins with stores to replay."""
        return [namespace for namespace in self._dicts if namespace.shadow is None and namespace.stores]

    def final_state(self) -> context.TorchState:
        """The settings of PyTorch now; contexts that cannot be left open at this point are a graph break."""
        wrapper.check_unchanged(self)
        if self.inference_guards:
            raise Retry(inference=False)
        if self.disablers or self.error_states or self.recordings:
            what = "__torch_function__ or saved tensors" if self.disablers else "recorded warnings"
            what = "NumPy's treatment of errors" if self.error_states else what
            raise GraphBreak("open-context", f"a context of {what} is open across a graph break")
        now, then = context.snapshot(self.settings_changed), self.state
        if not self.settings_changed:  # an operator may have: PyTorch orders the kernels of attention at its first one
            now = replace(now, settings=then.settings)
        if now.function_modes != then.function_modes or now.inference_mode != then.inference_mode:
            raise GraphBreak("open-context", "a device or inference_mode context is open across a graph break")
        return now

    def close(self) -> None:
        """Puts PyTorch's settings back; called at the end of every attempt, whatever its outcome."""
        wrapper.forget_masks(self)
        iterators.close(self)
        for contexts in (self.disablers, self.inference_guards, self.error_states):
            while contexts:
                contexts.pop().__exit__(None, None, None)
        context.leave(self.state, self.settings_changed)

    def forget(self) -> None:
        """Lets go of every outside object: an attempt is full of reference cycles, and what it looked at must not have
        to wait for the collector."""
        for table in (*vars(self).values(), *self.number_tests, self.recorder.inputs, self.wrappers.loaded):
            if isinstance(table, dict | list | set):
                table.clear()
        self.repeats.forget()
        self.foreseen.world = None  # it is a guard
        self.effects = Effects()
