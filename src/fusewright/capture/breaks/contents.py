"""What the values that outlive a graph are made of, and what is asked of the code that builds them again.

Takes a value; gives the values that it holds, or the text of one that holds none. Always holds: each part that a
builder of `rebuild.py` reads is among the parts that are given here.
"""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import itertools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from fusewright._native import isinstance
from fusewright.base.exception_fields import args_of, cause_of, context_of
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.effects import contents, registration
from fusewright.capture.border.interfaces import World
from fusewright.capture.border.native import Trampoline
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.array import TracedArray
from fusewright.capture.border.values.array_calls import ArrayMethod
from fusewright.capture.border.values.constant import FROZEN_TYPES, MADE_AFRESH, TYPE_PARAMETERS
from fusewright.capture.border.values.dict import VIEWS, factory_of
from fusewright.capture.border.values.iterator import reduced
from fusewright.capture.border.values.memory import Address, Storage
from fusewright.capture.border.values.text import Carried, TensorText
from fusewright.capture.guards.sources import Source
from fusewright.capture.interpret.generators import InterpretedGenerator

FUNCTION = "__function"


ATOMS: frozenset[type] = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)}
)


_KINDS: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), type(iter("\u0100")), type(iter(b"")),
    type(iter({})),
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
# Iterators that can say how to make them again, where they stand. (From CPython 3.14 on those of itertools cannot.)
ITERATORS = tuple(kind for kind in _KINDS if "__reduce__" in kind.__dict__)

# What makes an iterator that has ended, and says no longer what it went over.
ENDED_ITERATORS: dict[type, str] = {
    type(iter([])): "iter([])",
    type(reversed([])): "reversed([])",
    type(iter(())): "iter(())",
    type(iter("")): "iter('')",
    type(iter("\u0100")): "iter('\u0100')",
    type(iter(b"")): "iter(b'')",
    reversed: "reversed(())",
    itertools.chain: "{itertools}.chain()",
    itertools.islice: "{itertools}.islice((), 0)",
}


def rest_of(iterator: Any) -> Iterator[Any]:
    """What the iterator still gives, for native code that asks for an iterator: it has asked this one's `__iter__`."""
    return itertools.starmap(functools.partial(next, iterator), itertools.repeat(()))


# Methods that are written in C, with what they belong to.
BOUND = (types.BuiltinFunctionType, types.MethodWrapperType, classes.BUILTIN_METHOD)
# Those over dicts and sets cannot: by the type, what makes one of such a container.
HASHED_ITERATORS: dict[type, str] = {
    type(iter({})): "dict.__iter__({})",
    type(iter({}.values())): "iter(dict.values({}))",
    type(iter({}.items())): "iter(dict.items({}))",
    type(reversed({})): "dict.__reversed__({})",
    type(iter(set())): "set.__iter__({})",
}
"""Subclasses may say otherwise what their iterators are: such an iterator is the base's."""


def iterated(iterator: Any) -> tuple[Any, ...]:
    """The dict or set that an iterator goes over, and how many elements it has given; nothing once it has ended."""
    held = [one for one in gc.get_referents(iterator) if isinstance(one, dict | set | frozenset)]
    if not held:
        return ()
    size = dict.__len__(held[0]) if isinstance(held[0], dict) else len(contents(held[0]))
    return held[0], size - iterator.__length_hint__()


class Code(Protocol):
    """The code under construction (finish.py)."""

    building: set[int]
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
    return "[" + ", ".join(code.expression(element) for element in contents(value)) + "]"


def parts(value: Any) -> Any:
    """The values that an inside object is built from."""
    kind = type(value)
    if kind in FROZEN_TYPES:  # bound as it is, unless the call has made it
        yield from gc.get_referents(value) if kind in MADE_AFRESH or kind in TYPE_PARAMETERS else ()
        return
    if isinstance(value, dict):
        yield from itertools.chain.from_iterable(dict.items(value))
        if isinstance(value, collections.defaultdict):
            yield factory_of(value)
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        yield from contents(value)
    elif kind is types.CellType:
        try:
            yield value.cell_contents
        except ValueError:
            return
    elif kind is types.FunctionType:
        yield from (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__doc__)
        yield from value.__dict__.values()
        annotate = getattr(value, "__annotate__", None)  # from CPython 3.14 on
        yield value.__annotations__ if annotate is None else annotate
        yield getattr(value, "__type_params__", ())  # from CPython 3.12 on
    elif kind is types.MethodType:
        yield from (value.__func__, value.__self__)
    elif kind in BOUND:
        if not isinstance(value.__self__, type | types.ModuleType):
            yield value.__self__
    elif kind is super:
        yield value.__self__
    elif kind is functools.partial:
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind in (TracedArray, Address, Storage):
        yield value.tensor
    elif kind is ArrayMethod:
        yield value.array
    elif kind is RemovableHandle and (made := registration(value)) is not None:
        yield from made
        return
    elif kind is slice:
        yield from (value.start, value.stop, value.step)
    elif kind is Trampoline:
        yield value.function
    elif kind is Carried and value.copied is not None:
        yield value.copied[1]
    elif kind is TensorText:
        yield from (piece[0] for piece in value.pieces if type(piece) is tuple)
    elif kind in VIEWS or kind is types.MappingProxyType:
        yield viewed(value)
    elif kind in (staticmethod, classmethod):
        yield value.__func__
    elif kind is weakref.ref:
        yield value()
    elif kind in HASHED_ITERATORS:
        yield from iterated(value)[:1]
    elif isinstance(value, ITERATORS):
        yield from _state_parts(reduced(value))
    elif isinstance(value, BaseException):
        yield from (args_of(value), cause_of(value), context_of(value))
        yield from (held(field, value) for field in exception_fields(kind))
    elif kind is InterpretedGenerator and is_waiting(value):
        yield from (value.frame.function, *value.frame.locals[: argument_count(value.frame.function.__code__)])
    if (
        classes.has_dict(kind)
        and kind is not types.FunctionType
        and not isinstance(value, (type, types.ModuleType, functools.partial))
    ):
        yield from object.__getattribute__(value, "__dict__").values()
    if kind.__flags__ & _HEAP_TYPE and not kind.__module__.startswith("fusewright."):
        yield from (content for _, content in slot_contents(value))


_HEAP_TYPE = 1 << 9


def slot_contents(value: Any) -> Any:
    """The slots of an object that hold something: (name, what it holds)."""
    for name, member in classes.slots(type(value)):
        try:
            yield name, member.__get__(value)
        except AttributeError:
            continue


def _state_parts(made: Any) -> Any:
    yield from made[1]
    if len(made) > 2 and made[2] is not None:
        yield made[2]


def atom(code: Code, value: Any) -> str:
    if type(value) is int and value in code.world.identities:
        raise GraphBreak("opaque-object", "the identity of an object that the call makes, which is made anew")
    if type(value) is float and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    if type(value) is complex:
        return f"complex({atom(code, value.real)}, {atom(code, value.imag)})"
    return repr(value)


def start_cells(code: Code, cells: Iterable[types.CellType]) -> list[types.CellType]:
    """Makes those of the cells that are not there yet, empty; gives them."""
    empty = []
    for cell in cells:
        if id(cell) not in code.names and not code.world.is_outside_cell(cell):
            code.start(cell, f"{code.bind('CellType', types.CellType)}()")
            empty.append(cell)
    return empty


def fill_cells(code: Code, cells: list[types.CellType]) -> None:
    for cell in cells:
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        code.lines.append(f"{code.names[id(cell)]}.cell_contents = {code.expression(content)}")


def reaches_itself(value: Any) -> bool:
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


def argument_count(code: types.CodeType) -> int:
    """How many argument slots a frame of `code` has."""
    flags = code.co_flags
    return (
        code.co_argcount
        + code.co_kwonlyargcount
        + bool(flags & inspect.CO_VARARGS)
        + bool(flags & inspect.CO_VARKEYWORDS)
    )


def is_waiting(generator: InterpretedGenerator) -> bool:
    """Whether the generator has not begun, and its arguments are where the call has put them."""
    frame = generator.frame
    own = frame.locals[: argument_count(frame.function.__code__)]
    return (
        not generator.started
        and not frame.finished
        and not any(generator.tracer.is_inside_cell(value) for value in own)
    )


def exception_fields(kind: type) -> Any:
    """Descriptors of what an exception holds beside its arguments: fields of builtin classes (`AttributeError.obj`) and
    slots."""
    if issubclass(kind, BaseExceptionGroup):  # its fields follow from its arguments, and cannot be written
        return
    for base in kind.__mro__:
        for field in vars(base).values():
            if type(field) is types.MemberDescriptorType and field.__name__ not in _OF_ALL_EXCEPTIONS:
                yield field


def held(field: Any, value: BaseException) -> object:
    try:
        return field.__get__(value)
    except AttributeError:  # an empty slot
        return None


_OF_ALL_EXCEPTIONS = frozenset(vars(BaseException))


def viewed(view: Any) -> Any:
    """The dict that a view shows, or the mapping that a mappingproxy does."""
    (shown,) = gc.get_referents(view)
    return shown
