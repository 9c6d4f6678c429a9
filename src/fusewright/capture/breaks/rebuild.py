"""Rebuilding: one row per type, how an object that was made during capture is made again by generated code.

Takes an inside object and the code under construction (finish.Code); gives an expression, and adds the lines that must
    run before it.
Always holds: an object is made before its content where a cycle could reach it; no user code runs; what has no row is
made attribute by attribute, or is a graph break.
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from fusewright.base.signals import GraphBreak
from fusewright.capture.border.absent import AbsentTraceback
from fusewright.capture.border.effects import contents
from fusewright.capture.border.interfaces import World
from fusewright.capture.border.native import Trampoline, TrampolineIterator
from fusewright.capture.border.protocols import SequenceIterator
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.array import ArrayMethod, TracedArray
from fusewright.capture.border.values.constant import FROZEN_TYPES
from fusewright.capture.border.values.function import is_free_function
from fusewright.capture.border.values.symbolic import is_open
from fusewright.capture.border.values.text import TensorText
from fusewright.capture.call import transforms as call_transforms
from fusewright.capture.guards.sources import Local, Source
from fusewright.capture.interpret.generators import InterpretedGenerator
from fusewright.capture.interpret.pending import Pending
from fusewright.capture.interpret.tracebacks import Place, chain
from fusewright.sizes.symfloat import node_of
from fusewright.sizes.symint import size_of

FUNCTION = "__function"

ATOMS: frozenset[type] = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)}
)

# Iterators that can say how to make them again, where they stand.
ITERATORS: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), type(iter(b"")), type(iter({})),
    type(iter({}.values())),
    type(iter({}.items())),
    type(iter(set())), type(reversed([])), type(iter(range(1 << 70))), enumerate, zip, map, filter, reversed,
    itertools.chain,
    itertools.islice,
    itertools.count, itertools.repeat, itertools.cycle, itertools.accumulate, itertools.product, itertools.starmap,
    itertools.zip_longest,
    itertools.compress, itertools.takewhile, itertools.dropwhile, itertools.combinations, itertools.permutations,
    type(reversed({})), type(iter(collections.deque())),
)  # fmt: skip


class Code(Protocol):
    """The code under construction (finish.py)."""

    counts: dict[int, int]
    lines: list[str]
    names: dict[int, str]

    @property
    def world(self) -> World: ...

    def bind(self, hint: str, value: object) -> str: ...

    def temporary(self, text: str) -> str: ...

    def source(self, source: Source) -> str: ...

    def expression(self, value: Any) -> str: ...

    def keep(self, value: object, name: str) -> str: ...

    def start(self, value: object, text: str) -> str: ...

    def output(self, value: object) -> str: ...

    def cell(self, cell: types.CellType) -> str: ...


def content_text(code: Code, value: Any) -> str:
    if isinstance(value, dict):
        keys = (
            collections.OrderedDict.__iter__(value)
            if isinstance(value, collections.OrderedDict)
            else dict.__iter__(value)
        )
        return (
            "{"
            + ", ".join(f"{code.expression(key)}: {code.expression(dict.__getitem__(value, key))}" for key in keys)
            + "}"
        )
    return "[" + ", ".join(code.expression(element) for element in value) + "]"


_SHOWN: tuple[dict[Any, Any], ...] = ({}, collections.OrderedDict())
_VIEWS = {type(getattr(made, method)()): method for made in _SHOWN for method in ("keys", "values", "items")}


def parts(value: Any) -> Any:
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
    elif kind is TracedArray:
        yield value.tensor
    elif kind is ArrayMethod:
        yield value.array
    elif kind is slice:
        yield from (value.start, value.stop, value.step)
    elif kind is Trampoline:
        yield value.function
    elif kind is TensorText:
        yield from (piece[0] for piece in value.pieces if type(piece) is tuple)
    elif kind in _VIEWS:
        yield _viewed(value)
    elif kind in (staticmethod, classmethod):
        yield value.__func__
    elif isinstance(value, ITERATORS):
        yield from _state_parts(value.__reduce__())
    elif isinstance(value, BaseException):
        yield from value.args
        yield from (_held(field, value) for field in _exception_fields(kind))
    elif kind is InterpretedGenerator and _is_waiting(value):
        yield from (value.frame.function, *value.frame.locals[: _argument_count(value.frame.function.__code__)])
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


def atom(code: Code, value: Any) -> str:
    if type(value) is float and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    if type(value) is complex:
        return f"complex({atom(code, value.real)}, {atom(code, value.imag)})"
    return repr(value)


def _build_text(code: Code, value: TensorText) -> str:
    made: list[str] = []
    for piece in value.pieces:
        if type(piece) is str:
            made.append(repr(piece))
            continue
        tensor, make, arguments, version = piece
        if tensor._version != version:
            raise GraphBreak("print-tensor", "the text of a tensor that was written to afterwards")
        made.append(f"{code.bind(make.__name__, make)}({', '.join([code.expression(tensor), *map(repr, arguments)])})")
    return f"''.join(({', '.join(made)},))"


def _build_list(code: Code, value: list) -> str:
    if code.counts.get(id(value), 0) > 1 or _reaches_itself(value):
        name = code.start(value, "[]")
        elements = ", ".join(code.expression(element) for element in value)
        if elements:
            code.lines.append(f"{name}.extend([{elements}])")
        return name
    return f"[{', '.join(code.expression(element) for element in value)}]"


def _build_dict(code: Code, value: dict) -> str:
    if code.counts.get(id(value), 0) > 1 or _reaches_itself(value):
        name = code.start(value, "{}")
        if value:
            code.lines.append(f"{name}.update({content_text(code, value)})")
        return name
    return content_text(code, value)


def _reaches_itself(value: Any) -> bool:
    """Whether a container holds itself somewhere below (through containers and instances)."""
    seen: set[int] = set()
    pending = list(parts(value))
    while pending:
        part = pending.pop()
        if part is value:
            return True
        if (
            id(part) not in seen
            and type(part) not in ATOMS
            and not isinstance(part, (torch.Tensor, type, types.ModuleType, torch.nn.Module))
        ):
            seen.add(id(part))
            pending += list(parts(part))
    return False


def _build_tuple(code: Code, value: tuple) -> str:
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


def _build_set(code: Code, value: set | frozenset) -> str:
    elements = ", ".join(code.expression(element) for element in value)
    base = "frozenset" if isinstance(value, frozenset) else "set"
    kind = type(value)
    if kind in (set, frozenset):
        return f"{base}([{elements}])" if base == "frozenset" or not elements else f"{{{elements}}}"
    made = code.start(
        value, f"{base}.__new__({code.bind(kind.__name__, kind)}" + (f", [{elements}])" if base == "frozenset" else ")")
    )
    if base == "set" and elements:
        code.lines.append(f"set.update({made}, [{elements}])")
    return _with_attributes(code, value, made)


def _build_container_subclass(code: Code, value: Any) -> str:
    """An instance of a subclass of a builtin container: made without running user code, then filled."""
    kind = type(value)
    base = next(
        base
        for base in (collections.OrderedDict, collections.defaultdict, collections.deque, dict, list)
        if isinstance(value, base)
    )
    base_name = base.__name__ if base in (dict, list) else code.bind(base.__name__, base)
    name = code.start(value, f"{base_name}.__new__({code.bind(kind.__name__, kind)})")
    if base is collections.defaultdict:
        code.lines.append(f"{base_name}.__init__({name}, {code.expression(value.default_factory)})")
    if base is collections.deque:
        code.lines.append(
            f"{base_name}.__init__({name}, [{', '.join(code.expression(element) for element in value)}], "
            f"{value.maxlen!r})"
        )
    elif base is list:
        code.lines.append(
            f"list.extend({name}, [{', '.join(code.expression(element) for element in list.__iter__(value))}])"
        )
    else:
        keys = collections.OrderedDict.__iter__(value) if base is collections.OrderedDict else dict.__iter__(value)
        for key in list(keys):
            code.lines.append(
                f"{base_name}.__setitem__({name}, {code.expression(key)}, "
                f"{code.expression(dict.__getitem__(value, key))})"
            )
    return _with_attributes(code, value, name)


def _with_attributes(code: Code, value: Any, text: str) -> str:
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


def build_object(code: Code, value: Any) -> str:
    """An instance of a user class."""
    kind = type(value)
    if isinstance(value, ITERATORS):
        return _build_iterator(code, value)
    base = next((base for base in (int, float, complex, str, bytes) if isinstance(value, base)), None)
    if base is not None and classes.native_new(kind) is base.__new__:
        made = f"{base.__name__}.__new__({code.expression(kind)}, {atom(code, base(value))})"
        return _with_attributes(code, value, made)
    if classes.native_new(kind) is not object.__new__:
        raise GraphBreak(
            "cannot-rebuild", f"a {kind.__module__}.{kind.__qualname__} that was made in the compiled function"
        )
    name = code.start(value, f"object.__new__({code.expression(kind)})")
    return _with_attributes(code, value, name)


def _build_iterator(code: Code, value: Any) -> str:
    reduced = value.__reduce__()
    maker, args, *state = reduced
    arguments = ", ".join(code.expression(argument) for argument in args)
    text = f"{code.bind(getattr(maker, '__name__', 'maker'), maker)}({arguments})"
    if state and state[0] is not None:
        name = code.start(value, text)
        code.lines.append(f"{name}.__setstate__({code.expression(state[0])})")
        return name
    return code.start(value, text)


def _build_cell(code: Code, value: types.CellType) -> str:
    if code.world.is_outside_cell(value):
        return code.cell(value)
    name = code.start(value, f"{code.bind('CellType', types.CellType)}()")
    _fill_cell(code, value)
    return name


def _fill_cell(code: Code, cell: types.CellType) -> None:
    try:
        content = cell.cell_contents
    except ValueError:
        return
    code.lines.append(f"{code.names[id(cell)]}.cell_contents = {code.expression(content)}")


def _build_function(code: Code, value: types.FunctionType) -> str:
    """A closure made inside: the same code over rebuilt cells."""
    if call_transforms.holds_tensors(value):
        raise GraphBreak("functorch-transform", f"{value.__qualname__} leaves the frame")
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
    body = code.bind(f"code_{value.__name__}", value.__code__)
    made = f"{maker}({body}, {namespace}, {value.__name__!r}, {defaults}, {closure})"
    name = code.start(value, made)
    for cell in empty:
        _fill_cell(code, cell)
    if value.__kwdefaults__:
        code.lines.append(f"{name}.__kwdefaults__ = {content_text(code, value.__kwdefaults__)}")
    if value.__qualname__ != value.__code__.co_qualname:
        code.lines.append(f"{name}.__qualname__ = {value.__qualname__!r}")
    if value.__doc__ != (
        value.__code__.co_consts[0]
        if value.__code__.co_consts and isinstance(value.__code__.co_consts[0], str)
        else None
    ):
        code.lines.append(f"{name}.__doc__ = {code.expression(value.__doc__)}")
    if value.__module__ != value.__globals__.get("__name__"):
        code.lines.append(f"{name}.__module__ = {code.expression(value.__module__)}")
    if value.__annotations__:
        code.lines.append(f"{name}.__annotations__ = {content_text(code, value.__annotations__)}")
    if value.__dict__:
        code.lines.append(f"{name}.__dict__.update({content_text(code, value.__dict__)})")
    return name


def _build_method(code: Code, value: types.MethodType) -> str:
    maker = code.bind("MethodType", types.MethodType)
    return f"{maker}({code.expression(value.__func__)}, {code.expression(value.__self__)})"


def _argument_count(code: types.CodeType) -> int:
    """How many argument slots a frame of `code` has."""
    flags = code.co_flags
    return (
        code.co_argcount
        + code.co_kwonlyargcount
        + bool(flags & inspect.CO_VARARGS)
        + bool(flags & inspect.CO_VARKEYWORDS)
    )


def _is_waiting(generator: InterpretedGenerator) -> bool:
    """Whether the generator has not begun, and its arguments are where the call has put them."""
    frame = generator.frame
    own = frame.locals[: _argument_count(frame.function.__code__)]
    return (
        not generator.started
        and not frame.finished
        and not any(generator.tracer.is_inside_cell(value) for value in own)
    )


def _build_generator(code: Code, value: InterpretedGenerator) -> str:
    """A generator that has not begun: its function is called again, with the same arguments. Its body then runs
    eagerly."""
    if not _is_waiting(value) or _reaches_itself(value):
        raise GraphBreak("cannot-rebuild", "a generator that is alive at this point")
    function = value.frame.function
    names, flags = function.__code__.co_varnames, function.__code__.co_flags
    plain, keyword = function.__code__.co_argcount, function.__code__.co_kwonlyargcount
    given = [code.expression(argument) for argument in value.frame.locals[: _argument_count(function.__code__)]]
    rest = given[plain + keyword :]
    arguments = given[:plain]
    arguments += [f"*{rest.pop(0)}"] if flags & inspect.CO_VARARGS else []
    arguments += [f"{name}={text}" for name, text in zip(names[plain : plain + keyword], given[plain:])]
    arguments += [f"**{rest.pop(0)}"] if flags & inspect.CO_VARKEYWORDS else []
    return code.start(value, f"{code.expression(function)}({', '.join(arguments)})")


def _build_float(code: Code, value: Any) -> str:
    """A run-time float: the compiled code computes it as a tensor of one element."""
    node = node_of(value)
    if node is None:
        return atom(code, float(value))
    return f"{code.output(node.operand())}.item()"


def _build_builtin(code: Code, value: Any) -> str:
    owner = value.__self__
    if isinstance(owner, type) or (isinstance(value, types.BuiltinFunctionType) and is_free_function(value)):
        return code.bind(value.__name__, value)
    descriptor = classes.descriptor_of(value, owner)
    if descriptor is None:
        raise GraphBreak("cannot-rebuild", f"the method {value.__name__} of a {type(owner).__qualname__}")
    if descriptor is classes.lookup(type(owner), value.__name__):
        return f"{code.expression(owner)}.{value.__name__}"
    return (
        f"{code.bind(value.__name__, descriptor)}.__get__({code.expression(owner)})"  # as `super().__init__` finds it
    )


def _build_partial(code: Code, value: functools.partial) -> str:
    arguments = [code.expression(value.func), *(code.expression(argument) for argument in value.args)]
    if value.keywords:
        arguments.append(f"**{content_text(code, value.keywords)}")
    return _with_attributes(code, value, f"{code.bind('partial', functools.partial)}({', '.join(arguments)})")


def _build_exception(code: Code, value: BaseException) -> str:
    kind = type(value)
    arguments = ", ".join(code.expression(argument) for argument in value.args)
    name = code.start(
        value, f"{code.expression(kind)}.__new__({', '.join(filter(None, (code.expression(kind), arguments)))})"
    )
    code.lines.append(f"{name}.args = ({arguments}{',' if len(value.args) == 1 else ''})")
    for link in ("__cause__", "__context__"):
        linked = getattr(value, link)
        if linked is not None:
            code.lines.append(f"{name}.{link} = {code.expression(linked)}")
    if value.__suppress_context__ != (value.__cause__ is not None):
        code.lines.append(f"{name}.__suppress_context__ = {value.__suppress_context__}")
    for field in _exception_fields(kind):
        held = _held(field, value)
        if held is not None:
            code.lines.append(f"{code.bind(field.__name__, field)}.__set__({name}, {code.expression(held)})")
    traceback = code.world.tracer.traceback_of(value)
    if id(value) in code.world.tracer.open_contexts and value.__context__ is None:
        code.lines.append(f"{name}.__context__ = {code.bind('exception', sys.exception)}()")
    if traceback is not None:
        code.lines.append(f"{name}.__traceback__ = {code.expression(traceback)}")
    return _with_attributes(code, value, name)


def _exception_fields(kind: type) -> Any:
    """Descriptors of what an exception holds beside its arguments: fields of builtin classes (`AttributeError.obj`) and
    slots."""
    if issubclass(kind, BaseExceptionGroup):  # its fields follow from its arguments, and cannot be written
        return
    for base in kind.__mro__:
        for field in vars(base).values():
            if type(field) is types.MemberDescriptorType and field.__name__ not in _OF_ALL_EXCEPTIONS:
                yield field


def _held(field: Any, value: BaseException) -> object:
    try:
        return field.__get__(value)
    except AttributeError:  # an empty slot
        return None


_OF_ALL_EXCEPTIONS = frozenset(vars(BaseException))


def _build_traceback(code: Code, value: AbsentTraceback) -> str:
    source = code.world.source_of(value.error)
    inner = "None" if source is None else f"{code.source(source)}.__traceback__"
    places = [code.bind("place", Place(*left)) for left in value.left]
    return code.keep(value, code.temporary(f"{code.bind('chain', chain)}({', '.join([inner, *places])})"))


def _build_class(code: Code, value: type) -> str:
    if code.world.is_inside_class(value):
        raise GraphBreak(
            "cannot-rebuild", f"the class {value.__qualname__}, which each call of the compiled function makes anew"
        )
    return code.bind(value.__name__, value)


def _build_bound(code: Code, value: Any) -> str:
    return code.bind(getattr(value, "__name__", type(value).__name__), value)


def _build_slice(code: Code, value: slice) -> str:
    return f"slice({', '.join(code.expression(part) for part in (value.start, value.stop, value.step))})"


def _build_trampoline(code: Code, value: Trampoline) -> str:
    return code.expression(value.function)


def _build_wrapped(code: Code, value: Any) -> str:
    return f"{type(value).__name__}({code.expression(value.__func__)})"


def _refuse(what: str) -> Callable[[Code, Any], str]:
    def refuse(code: Code, value: Any) -> str:
        raise GraphBreak("cannot-rebuild", what)

    return refuse


def _build_trampoline_iterator(code: Code, value: TrampolineIterator) -> str:
    return code.expression(value.iterator)


def _build_super(code: Code, value: Any) -> str:
    return f"super({code.expression(value.__thisclass__)}, {code.expression(value.__self__)})"


def _viewed(view: Any) -> Any:
    """The dict that a view shows."""
    return next(referent for referent in gc.get_referents(view) if isinstance(referent, dict))


def _build_view(code: Code, value: Any) -> str:
    return f"{code.expression(_viewed(value))}.{_VIEWS[type(value)]}()"


def _build_comparison(code: Code, value: torch.SymBool) -> str:
    """An answer that is guarded; of sizes that depend on data, the comparison itself."""
    if not is_open(value):
        return repr(value.node.guard_bool("", 0))
    relation, env = value.node.value, value.node.env
    left, right = (
        str(side) if isinstance(side, int) else code.output(size_of(side, env))
        for side in (relation.left, relation.right)
    )
    return f"({left} {relation.op} {right})"


BUILDERS: dict[type, Callable[[Code, Any], str]] = {
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
    TracedArray: lambda code, value: f"{code.expression(value.tensor)}.numpy(){'[()]' if value.scalar else ''}",
    ArrayMethod: lambda code, value: f"{code.expression(value.array)}.{value.name}",
    staticmethod: _build_wrapped,
    classmethod: _build_wrapped,
    TensorText: _build_text,
    torch.SymInt: lambda code, value: code.output(value),
    torch.SymFloat: _build_float,
    torch.SymBool: _build_comparison,
    InterpretedGenerator: _build_generator,
    AbsentTraceback: _build_traceback,
    Pending: lambda code, value: code.source(Local(value.slot, value.name)),
    SequenceIterator: _refuse("a live iterator over an object that has __getitem__ alone"),
    types.MappingProxyType: _refuse("a mappingproxy made in the compiled function"),
    **dict.fromkeys(_VIEWS, _build_view),
    range: lambda code, value: repr(value),
    bytearray: lambda code, value: repr(value),
    torch.device: _build_bound,
    **dict.fromkeys(FROZEN_TYPES, _build_bound),
    torch.dtype: lambda code, value: code.bind(str(value).removeprefix("torch."), value),
    torch.layout: _build_bound,
    torch.memory_format: _build_bound,
}
BASE_BUILDERS: tuple[tuple[Any, Callable[[Code, Any], str]], ...] = (
    (enum.Enum, lambda code, value: code.bind(f"{type(value).__name__}_{value.name}", value)),
    (np.generic, _build_bound),
    (type, _build_class),
    (types.ModuleType, lambda code, value: code.bind(value.__name__, value)),
    (dict, _build_container_subclass),
    (list, _build_container_subclass),
    (collections.deque, _build_container_subclass),
    (tuple, _build_tuple),
    ((set, frozenset), _build_set),
    (BaseException, _build_exception),
)
