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
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base.exception_fields import (
    args_of,
    cause_of,
    context_of,
    set_args,
    set_cause,
    set_context,
    set_suppresses_context,
    set_traceback,
    suppresses_context,
    traceback_of,
)
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.absent import AbsentTraceback, look_alike
from fusewright.capture.border.effects import changed, contents, registration
from fusewright.capture.border.native import Trampoline, TrampolineIterator
from fusewright.capture.border.sequence_iterator import ReversedSequence, SequenceIterator
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.array import TracedArray
from fusewright.capture.border.values.array_calls import ArrayMethod
from fusewright.capture.border.values.constant import FROZEN_TYPES, MADE_AFRESH, PLACEMENTS
from fusewright.capture.border.values.dict import VIEWS, factory_of
from fusewright.capture.border.values.function import is_free_function
from fusewright.capture.border.values.gradient_node import GradientNode
from fusewright.capture.border.values.iterator import own_maker, reduced, set_state
from fusewright.capture.border.values.list import length_limit
from fusewright.capture.border.values.memory import Address, Storage
from fusewright.capture.border.values.symbolic import is_open
from fusewright.capture.border.values.text import Carried, TensorText, refuse_if_shown
from fusewright.capture.breaks import typing_objects
from fusewright.capture.breaks.contents import (
    ENDED_ITERATORS,
    FUNCTION,
    HASHED_ITERATORS,
    ITERATORS,
    Code,
    argument_count,
    atom,
    content_text,
    exception_fields,
    fill_cells,
    held,
    is_waiting,
    iterated,
    reaches_itself,
    rest_of,
    slot_contents,
    start_cells,
    viewed,
)
from fusewright.capture.call import transforms as call_transforms
from fusewright.capture.guards.sources import Local
from fusewright.capture.interpret.generators import InterpretedGenerator
from fusewright.capture.interpret.pending import Pending
from fusewright.capture.interpret.tracebacks import Place, chain
from fusewright.sizes.symfloat import node_of
from fusewright.sizes.symint import size_of


def _build_carried(code: Code, value: Carried) -> str:
    copier, of = value.copied or value.refuse()
    return code.start(value, f"{code.bind(copier.__name__, copier)}({code.expression(of)})")


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
    if code.counts.get(id(value), 0) > 1 or reaches_itself(value):
        name = code.start(value, "[]")
        elements = ", ".join(code.expression(element) for element in value)
        if elements:
            code.lines.append(f"{name}.extend([{elements}])")
        return name
    return f"[{', '.join(code.expression(element) for element in value)}]"


def _build_dict(code: Code, value: dict) -> str:
    if code.counts.get(id(value), 0) > 1 or reaches_itself(value):
        name = code.start(value, "{}")
        if value:
            code.lines.append(f"{name}.update({content_text(code, value)})")
        return name
    return content_text(code, value)


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
    kind = type(value)
    if not contents(value) and kind in (set, frozenset):
        return f"{kind.__name__}()"
    made = set_text(code, value, code.bind(kind.__name__, kind))
    if kind in (set, frozenset):
        return made
    return _with_attributes(code, value, code.start(value, made))


def set_text(code: Code, value: set | frozenset, target: str) -> str:
    """A call that gives the set `target`, or a new one of that class, what `value` holds, in its order: that follows
    from all that was ever added and removed."""
    elements = contents(value)
    known = tuple(_is_interpreted_hash(element) for element in elements)
    layout = code.bind("layout", _native.set_layout(value))
    held = code.temporary(f"[{', '.join(code.expression(element) for element in elements)}]")
    return f"{code.bind('set_filled', _native.set_filled)}({target}, {layout}, {known!r}, {held})"


def _is_interpreted_hash(element: object) -> bool:
    """Whether the capture has interpreted the element's `__hash__` (that of a tensor goes by identity)."""
    if isinstance(element, torch.Tensor):
        return False
    return isinstance(classes.lookup(type(element), "__hash__"), types.FunctionType)


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
        code.lines.append(f"{base_name}.__init__({name}, {code.expression(factory_of(value))})")
    if base is collections.deque:
        code.lines.append(
            f"{base_name}.__init__({name}, [{', '.join(code.expression(element) for element in contents(value))}], "
            f"{length_limit(value)!r})"
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


def dict_of(text: str, kind: type) -> str:
    """The instance dictionary, without asking an object of a class with a `__getattribute__` of the program's."""
    return f'object.__getattribute__({text}, "__dict__")' if classes.is_hooked(kind) else f"{text}.__dict__"


def _with_attributes(code: Code, value: Any, text: str) -> str:
    """Fills the instance dictionary and slots of the object that `text` makes."""
    kind = type(value)
    attributes = object.__getattribute__(value, "__dict__") if classes.has_dict(kind) else {}
    slots = list(slot_contents(value))
    if not attributes and not slots:
        return text
    name = text if text.isidentifier() else code.start(value, text)
    if attributes:
        pairs = ", ".join(f"{key!r}: {code.expression(attribute)}" for key, attribute in attributes.items())
        code.lines.append(f"{dict_of(name, kind)}.update({{{pairs}}})")
    for slot, content in slots:
        code.lines.append(f"object.__setattr__({name}, {slot!r}, {code.expression(content)})")
    return name


def build_object(code: Code, value: Any) -> str:
    """An instance of a user class."""
    kind = type(value)
    if kind in HASHED_ITERATORS:
        return _build_hashed_iterator(code, value)
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


def _build_hashed_iterator(code: Code, value: Any) -> str:
    """An iterator over a dict or a set: made of that again, so that it sees what happens to it."""
    row, found = HASHED_ITERATORS[type(value)], iterated(value)
    if not found:  # it has ended
        name = code.start(value, row.format("set()" if isinstance(value, type(iter(set()))) else "{}"))
        code.lines.append(f"next({name}, None)")
        return name
    held, given = found
    _must_be_unchanged(code, held)
    try:
        value.__reduce__()
    except RuntimeError:
        raise GraphBreak("cannot-rebuild", "an iterator over what has changed its size since") from None
    if given and isinstance(held, set | frozenset):  # the order of another set is another
        raise GraphBreak("cannot-rebuild", "an iterator in the middle of a set")
    row = row.replace("set.", "frozenset.") if isinstance(held, frozenset) else row
    name = code.start(value, row.format(code.expression(held)))
    code.lines += [f"next({name})"] * given
    return name


def _must_be_unchanged(code: Code, held: Any) -> None:
    """Iterators are made before the effects are replayed, and look at what they iterate over when they are made."""
    if any(shadow.value is held and changed(shadow) for shadow in code.world.effects.shadows):
        raise GraphBreak("cannot-rebuild", "an iterator over what the call has changed")


def _build_iterator(code: Code, value: Any) -> str:
    maker, args, *state = reduced(value)
    ended = not state or (maker is itertools.islice and len(args) == 2)
    if ended and (row := ENDED_ITERATORS.get(type(value))) is not None:
        name = code.start(value, row.format(itertools=code.bind("itertools", itertools)))
        code.lines.append(f"list({name})")
        return name
    if maker is not iter:  # which asks a list for each element when that is wanted
        for argument in args:
            _must_be_unchanged(code, argument)
    elif state and type(state[0]) is int:  # more than what it goes over has before the effects are replayed
        for shadow in code.world.effects.shadows:
            if shadow.value is args[0] and state[0] > len(shadow.items):
                raise GraphBreak("cannot-rebuild", "an iterator over what the call has changed")
    maker = own_maker(maker, args)
    if maker is reversed and isinstance(classes.lookup(type(args[0]), "__len__"), types.FunctionType):
        raise GraphBreak("cannot-rebuild", f"a reversed iterator over a {type(args[0]).__qualname__}")  # it asks again
    if state and type(state[0]) is int:
        set_state(again := maker(*args), state[0])
        if reduced(again)[2:] != (state[0],):  # a list that has become shorter cuts it
            raise GraphBreak("cannot-rebuild", "an iterator that stands behind the end of what it goes over")
    arguments = ", ".join(code.expression(argument) for argument in args)
    text = f"{code.bind(getattr(maker, '__name__', 'maker'), maker)}({arguments})"
    if state and state[0] is not None:
        name = code.start(value, text)
        code.lines.append(f"{code.bind('set_state', set_state)}({name}, {code.expression(state[0])})")
        return name
    return code.start(value, text)


def _build_cell(code: Code, value: types.CellType) -> str:
    if code.world.is_outside_cell(value):
        return code.cell(value)
    fill_cells(code, start_cells(code, (value,)))
    return code.names[id(value)]


def _build_function(code: Code, value: types.FunctionType) -> str:
    """A closure made inside: the same code over rebuilt cells."""
    if call_transforms.holds_tensors(value):
        raise GraphBreak("functorch-transform", f"{value.__qualname__} leaves the frame")
    if value.__globals__ is code.world.tracer.function.__globals__:
        namespace = f"{FUNCTION}.__globals__"
    else:
        namespace = code.bind("globals", value.__globals__)
    empty = start_cells(code, value.__closure__ or ())  # what they hold may be the function itself
    closure, defaults = code.expression(value.__closure__), code.expression(value.__defaults__)
    maker = code.bind("FunctionType", types.FunctionType)
    body = code.bind(f"code_{value.__name__}", value.__code__)
    made = f"{maker}({body}, {namespace}, {value.__name__!r}, {defaults}, {closure})"
    name = code.start(value, made)
    fill_cells(code, empty)
    if value.__kwdefaults__ is not None:
        code.lines.append(f"{name}.__kwdefaults__ = {code.expression(value.__kwdefaults__)}")
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
    annotate = getattr(value, "__annotate__", None)  # from CPython 3.14 on annotations are computed when asked for
    if annotate is not None:
        others = (value.__globals__, getattr(value, "__builtins__", None), value.__kwdefaults__, value.__dict__)
        known = set(map(id, others))
        if any(type(one) is dict and id(one) not in known for one in gc.get_referents(value)):  # and kept from then on
            raise GraphBreak("cannot-rebuild", f"the function {value.__qualname__}, whose annotations were asked for")
        code.lines.append(f"{name}.__annotate__ = {code.expression(annotate)}")
    elif (held := value.__annotations__) or code.counts.get(id(held), 0) > 1 or code.world.outside(held) is not None:
        code.lines.append(f"{name}.__annotations__ = {code.expression(held)}")
    if parameters := getattr(value, "__type_params__", ()):  # from CPython 3.12 on
        code.lines.append(f"{name}.__type_params__ = {code.expression(parameters)}")
    if value.__dict__:
        code.lines.append(f"{name}.__dict__.update({content_text(code, value.__dict__)})")
    return name


def _build_method(code: Code, value: types.MethodType) -> str:
    if look_alike(value) is not None:  # a stand-in's
        return f"{code.expression(value.__self__)}.{value.__func__.__name__}"
    maker = code.bind("MethodType", types.MethodType)
    return f"{maker}({code.expression(value.__func__)}, {code.expression(value.__self__)})"


def _build_generator(code: Code, value: InterpretedGenerator) -> str:
    """A generator that has not begun: its function is called again, with the same arguments. Its body then runs
    eagerly."""
    if not is_waiting(value) or reaches_itself(value):
        raise GraphBreak("cannot-rebuild", "a generator that is alive at this point")
    function = value.frame.function
    names, flags = function.__code__.co_varnames, function.__code__.co_flags
    plain, keyword = function.__code__.co_argcount, function.__code__.co_kwonlyargcount
    given = [code.expression(argument) for argument in value.frame.locals[: argument_count(function.__code__)]]
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
    if descriptor is classes.lookup(type(owner), value.__name__) and not classes.is_hooked(type(owner)):
        return f"({code.expression(owner)}).{value.__name__}"  # a number too
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
    given = args_of(value)
    is_begun = id(given) in code.building  # it holds what has led here
    arguments = code.temporary(_build_tuple(code, given) if is_begun else code.expression(given))
    name = code.start(value, f"{code.expression(kind)}.__new__({code.expression(kind)}, *{arguments})")
    code.lines.append(f"{code.bind('set_args', set_args)}({name}, {arguments})")
    cause, context = cause_of(value), context_of(value)
    for hint, setter, linked in (("set_cause", set_cause, cause), ("set_context", set_context, context)):
        if linked is not None:
            code.lines.append(f"{code.bind(hint, setter)}({name}, {code.expression(linked)})")
    if suppresses_context(value) != (cause is not None):
        shown = code.bind("set_suppresses_context", set_suppresses_context)
        code.lines.append(f"{shown}({name}, {suppresses_context(value)})")
    for field in exception_fields(kind):
        kept = held(field, value)
        if kept is not None:
            code.lines.append(f"{code.bind(field.__name__, field)}.__set__({name}, {code.expression(kept)})")
    traceback = code.world.tracer.traceback_of(value)
    if id(value) in code.world.tracer.open_contexts and context is None:
        code.lines.append(f"{code.bind('set_context', set_context)}({name}, {code.bind('exception', sys.exception)}())")
    if traceback is not None:
        code.lines.append(f"{code.bind('set_traceback', set_traceback)}({name}, {code.expression(traceback)})")
    return _with_attributes(code, value, name)


def _build_traceback(code: Code, value: AbsentTraceback) -> str:
    source = code.world.source_of(value.error)
    inner = "None" if source is None else f"{code.bind('traceback_of', traceback_of)}({code.source(source)})"
    places = [code.bind("place", Place(*left)) for left in value.left]
    return code.keep(value, code.temporary(f"{code.bind('chain', chain)}({', '.join([inner, *places])})"))


def _build_class(code: Code, value: type) -> str:
    if code.world.is_inside_class(value):
        raise GraphBreak(
            "cannot-rebuild", f"the class {value.__qualname__}, which each call of the compiled function makes anew"
        )
    return code.bind(value.__name__, value)


def _build_bound(code: Code, value: Any) -> str:
    if id(value) in code.world.made:
        how = MADE_AFRESH[type(value)]
        if how is None:
            return build_object(code, value)
        maker, arguments = how(value)
        return f"{code.expression(maker)}({', '.join(map(code.expression, arguments))})"
    parts = gc.get_referents(value) if type(value) in FROZEN_TYPES else ()
    refuse_if_shown(list(parts))  # of a property, say
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
    iterator = code.expression(value.iterator)
    asked = isinstance(classes.lookup(type(value.iterator), "__iter__"), types.FunctionType)
    return f"{code.bind('rest_of', rest_of)}({iterator})" if asked else iterator


def _build_super(code: Code, value: Any) -> str:
    return f"super({code.expression(value.__thisclass__)}, {code.expression(value.__self__)})"


def _build_view(code: Code, value: Any) -> str:
    return f"{code.bind('view', VIEWS[type(value)])}({code.expression(viewed(value))})"


def _build_proxy(code: Code, value: types.MappingProxyType[Any, Any]) -> str:
    shown = viewed(value)
    if isinstance(shown, dict) and "__module__" in shown:
        raise GraphBreak("cannot-rebuild", "the namespace of a class made in the compiled function")
    return f"{code.bind('proxy', types.MappingProxyType)}({code.expression(shown)})"


def _build_handle(code: Code, value: RemovableHandle) -> str:
    made = registration(value)
    if made is None:
        code.world.effects.handle_leaves = True
        return build_object(code, value)
    function, tensor, hook = made
    own = type(hook) is types.FunctionType and code.world.outside(hook) is None
    empty = start_cells(code, (own and hook.__closure__) or ())  # for a hook that removes itself
    text = code.start(value, f"{code.expression(function)}({code.expression(tensor)}, {code.expression(hook)})")
    fill_cells(code, empty)
    return text


def _build_reference(code: Code, value: weakref.ref[Any]) -> str:
    found = value()
    if found is None:
        raise GraphBreak("cannot-rebuild", "a weak reference to what is gone")
    return code.start(value, f"{code.bind('ref', weakref.ref)}({code.temporary(code.expression(found))})")


def _build_random_generator(code: Code, value: torch.Generator) -> str:
    made = code.start(value, f"{code.bind('Generator', torch.Generator)}()")
    known = code.world.generators.get(id(value))
    if known is None:
        raise GraphBreak("cannot-rebuild", "a copy of a random generator")
    owned = code.world.recorder_owns(known[1])
    code.lines.append(f"{made}.set_state({code.expression(known[1]) if owned else code.bind('state', known[1])})")
    return made


def _refuse_node(code: Code, value: GradientNode) -> str:
    raise GraphBreak("tensor-address", "an autograd node leaves the compiled function")


def _build_of_memory(code: Code, value: Address | Storage) -> str:
    if code.world.effects.data:
        raise GraphBreak("tensor-address", f"{value.what} is handed on, after a store to Tensor.data")
    return f"{code.expression(value.tensor)}.{value.text}"


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
    Carried: _build_carried,
    torch.SymInt: lambda code, value: code.output(value),
    torch.SymFloat: _build_float,
    torch.SymBool: _build_comparison,
    InterpretedGenerator: _build_generator,
    AbsentTraceback: _build_traceback,
    Pending: lambda code, value: code.source(Local(value.slot, value.name)),
    RemovableHandle: _build_handle,
    torch.Generator: _build_random_generator,
    weakref.ref: _build_reference,
    Address: _build_of_memory,
    GradientNode: _refuse_node,
    Storage: _build_of_memory,
    **dict.fromkeys((SequenceIterator, ReversedSequence), _refuse("a live iterator over an object by its __getitem__")),
    types.MappingProxyType: _build_proxy,
    **dict.fromkeys(VIEWS, _build_view),
    range: lambda code, value: repr(value),
    bytearray: lambda code, value: repr(value),
    **dict.fromkeys((torch.device, torch.layout, torch.memory_format, *FROZEN_TYPES), _build_bound),
    **dict.fromkeys(typing_objects.KINDS, typing_objects.build),
    torch.dtype: lambda code, value: code.bind(str(value).removeprefix("torch."), value),
}
BASE_BUILDERS: tuple[tuple[Any, Callable[[Code, Any], str]], ...] = (
    (PLACEMENTS, _build_bound),
    (enum.Enum, lambda code, value: code.bind(f"{type(value).__name__}_{vars(value).get('_name_', '')}", value)),
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
