"""Values that define `__torch_function__`: a torch function that meets one calls its override instead.

Takes a call of a torch function with its arguments; gives the override's result. Always holds: the overrides are asked
in PyTorch's order (subclasses first, then from left to right), and are interpreted. For tensors, PyTorch itself says
whether a function asks at all, and by which name: it is called with probes in place of the traced tensors.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.native import unwatched
from fusewright.capture.border.values import cls as classes
from fusewright.capture.border.values.memory import refuse_hidden_base
from fusewright.capture.guards import MISSING
from fusewright.graph.nodes import leaves
from fusewright.record.traced_tensor import TracedTensor

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
enabled: Callable[[], bool] = torch._C._is_torch_function_enabled


def overriding(args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments (or elements of lists and tuples among them) whose class has an override, one of each class, in the
    order of asking."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        for element in value if type(value) in (list, tuple) else (value,):
            kind = type(element)
            if kind is TracedTensor:
                kind = element.python_class
                if kind is torch.Tensor:
                    continue
            elif not kind.__flags__ & (1 << 9) or isinstance(element, torch.Tensor):
                continue
            if override_of(kind) is not None:
                if any(_class(other) is kind for other in found):
                    continue
                place = next(
                    (place for place, other in enumerate(found) if issubclass(kind, _class(other))), len(found)
                )
                found.insert(place, element)
    return found


_ASKED = (
    "__getattr__", "__getattribute__", "__index__", "__int__", "__float__", "__complex__", "__bool__", "__len__",
    "__getitem__", "__iter__", "__array__", "__class__",
)  # fmt: skip
"""What PyTorch's own code asks of an argument of any class, to find out what it may be."""
_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType, type(None))


def refuse_asking(world: World, fn: Any, given: Iterable[Any]) -> None:
    """A graph break where PyTorch would run the program's code to find out what an argument is: how often it asks is
    eager's business, and what the answer depends on is not guarded. So too where a traced tensor does not know its
    own answer."""
    for value in given:
        kind = type(value)
        if kind is TracedTensor:
            if torch.is_grad_enabled():
                refuse_hidden_base(world, value)
        elif kind is list or kind is tuple:
            refuse_asking(world, fn, value)
        elif kind is slice:
            refuse_asking(world, fn, (value.start, value.stop, value.step))
        elif kind.__flags__ & (1 << 9) and not issubclass(kind, torch.Tensor) and not _is_library(kind):
            for name in (*_ASKED, *_OF_OTHERS.get(fn, ())):
                found = classes.guarded_lookup(world, kind, name)
                if found is not MISSING and not isinstance(found, _IN_C):
                    asking = getattr(fn, "__name__", fn)
                    raise GraphBreak("opaque-object", f"{kind.__qualname__}.{name}, which {asking} may ask")


_OF_OTHERS: dict[Any, tuple[str, ...]] = {
    operator.ne: ("__eq__",),
    methods.__rtruediv__: ("__rmul__",),  # it multiplies by the reciprocal
}
"""The special methods that PyTorch's code of one operator calls of another."""


def _is_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "fusewright")


def is_traced_subclass(value: object) -> bool:
    """Whether a traced tensor stands for one of a class of the program's."""
    return type(value) is TracedTensor and value.python_class not in _PLAIN


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes of PyTorch's that have no code of their own which a program could tell."""


def _class(value: Any) -> type:
    return value.python_class if type(value) is TracedTensor else type(value)


def override_of(kind: type) -> Any:
    """What a class has under `__torch_function__`, if it has one that does something."""
    found = classes.lookup(kind, "__torch_function__")
    if found is MISSING or kind is torch.Tensor or kind.__module__.startswith(("torch.", "fusewright.")):
        return None
    return None if found is torch._C._disabled_torch_function_impl else found


def overridden(world: World, fn: Callable[..., Any], args: Args, kwargs: Kwargs, objects: list[Any]) -> Any:
    """A call that reached the recorder with such arguments; MISSING where it is to be recorded as it is."""
    if not enabled():
        return MISSING
    if any(type(one) is TracedTensor for one in objects):
        return _probed(world, fn, args, kwargs)
    if not isinstance(fn, (types.FunctionType, types.BuiltinFunctionType)):
        raise GraphBreak(
            "unsupported-tensor", f"an operator on a {type(objects[0]).__qualname__}, which has a __torch_function__"
        )
    answer = _ask(world, fn, args, kwargs, objects)
    if answer is not NotImplemented:
        return answer
    name = f"'{fn.__module__}.{fn.__name__}'"
    message = f"no implementation found for {name} on types that implement __torch_function__: "
    raise UserException(TypeError(f"{message}{[_class(one) for one in objects]!r}"))


def _ask(world: World, fn: Callable[..., Any], args: Args, kwargs: Kwargs, objects: list[Any]) -> Any:
    """What PyTorch's C++ does for a function with overloaded arguments."""
    kinds = tuple(_class(one) for one in objects)
    for kind in kinds:
        if isinstance(override_of(kind), types.FunctionType):
            # PyTorch calls it on the object, with a warning
            raise GraphBreak("unsupported-tensor", f"{kind.__qualname__}.__torch_function__, which is a plain method")
        result = world.tracer.call(world.getattr(kind, "__torch_function__"), (fn, kinds, args, kwargs))
        if result is not NotImplemented:
            return result
    return NotImplemented


# Probes.


class _Elsewhere(BaseException):
    """A library function written in Python lets the functions inside of it ask: it is interpreted."""


class _Asking:
    """One call with probes. asked: some override was reached."""

    __slots__ = ("asked", "declined", "fn", "real", "world")

    def __init__(self, world: World, fn: Any) -> None:
        self.world, self.fn, self.asked = world, fn, False
        self.declined: Any = None
        self.real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def probe(self, traced: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            plain = torch.empty((), dtype=traced.dtype, device="cpu")
            made = plain.as_subclass(_probe_class(traced.python_class))  # type: ignore
        made.__dict__["asking"] = self
        self.real[id(made)] = (made, traced)
        return made

    def back(self, value: Any) -> Any:
        known = self.real.get(id(value))
        return value if known is None else known[1]


class _Probe(torch.Tensor):
    """Stands for a traced tensor whose class overrides functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        kwargs = kwargs or {}
        asking = next(one for one in leaves((args, kwargs)) if isinstance(one, _Probe)).__dict__["asking"]
        if isinstance(asking.fn, _PYTHON_FUNCTION) and func is not asking.fn:
            raise _Elsewhere
        asking.asked = True
        args, kwargs = _mapped(args, asking.back), _mapped(kwargs, asking.back)
        if asking.declined is func:  # all classes were asked at once
            return NotImplemented
        try:
            answer = _ask(asking.world, func, args, kwargs, overriding(args, kwargs))
            asking.declined = func if answer is NotImplemented else None
            return answer
        except UserException as signal:
            error = signal.exception
        raise error


def _probe_class(kind: type) -> type:
    """Complaints of PyTorch's name the program's class."""
    known = _PROBES.get(kind)
    if known is None:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        known = _PROBES[kind] = type(kind.__name__, (_Probe,), names)
    return known


_PROBES: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()
_PYTHON_FUNCTION = types.FunctionType


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, change) for part in value)
    if type(value) is dict:
        return {name: _mapped(part, change) for name, part in value.items()}
    if type(value) is slice:
        return slice(change(value.start), change(value.stop), change(value.step))
    return change(value)


def _probed(world: World, fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    special = _special_method(world, fn, args)
    if special is not MISSING:
        return special
    asking = _Asking(world, fn)
    made: dict[int, torch.Tensor] = {}

    def exchanged(value: Any) -> Any:
        if type(value) is not TracedTensor or override_of(value.python_class) is None:
            return value
        if id(value) not in made:
            made[id(value)] = asking.probe(value)
        return made[id(value)]

    try:
        result = unwatched(fn, *_mapped(args, exchanged), **_mapped(kwargs, exchanged))
    except _Elsewhere:
        return world.tracer.inline(fn, args, kwargs)
    except UserException:
        if asking.asked:
            raise
    if asking.asked:
        return result if result is None or id(result) not in asking.real else asking.back(result)
    with torch._C.DisableTorchFunctionSubclass():
        return world.tracer.call(fn, args, kwargs)


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split()
_SPECIAL: dict[Any, tuple[tuple[int, str], ...]] = {
    **{
        getattr(operator, f"__{prefix}{name}__"): (
            *(((0, f"__i{name}__"),) if prefix else ()), (0, f"__{name}__"), (1, f"__r{name}__"),
        )
        for name in _ARITHMETIC
        for prefix in ("", "i")
    },
    **{
        getattr(operator, name): ((0, f"__{name}__"), (1, f"__{other}__"))
        for name, other in zip("lt le eq ne gt ge".split(), "gt ge eq ne lt le".split(), strict=True)
    },
    **{getattr(operator, name): ((0, f"__{name}__"),) for name in ("neg", "pos", "invert", "getitem", "setitem")},
}  # fmt: skip
"""The special methods that Python looks for, as (operand, name)."""


def _special_method(world: World, fn: Any, args: Args) -> Any:
    """An operator by the special methods of the program's own class; MISSING where it has none of its own."""
    try:
        steps = _SPECIAL.get(fn, ())
    except TypeError:  # not hashable
        return MISSING
    methods = [_own(world, args[place], name) if place < len(args) else None for place, name in steps]
    if not any(methods):
        return MISSING
    sides = [(method, args[place], args[1 - place :][:1] if place else args[1:], name)
             for (place, name), method in zip(steps, methods, strict=True)]  # fmt: skip
    if len(args) == 2 and methods[-1] and steps[-1][0] and _class(args[0]) is not _class(args[1]):
        if issubclass(_class(args[1]), _class(args[0])):
            sides.insert(len(sides) - 2, sides.pop())
    for method, receiver, others, name in sides:
        if method is None and isinstance(receiver, torch.Tensor) and hasattr(torch.Tensor, name):
            method = getattr(torch.Tensor, name)
        if method is not None:
            result = world.tracer.call(method, (receiver, *others))
            if result is not NotImplemented:
                return result
    raise GraphBreak("unsupported-tensor", f"{fn.__name__} of a class that does not implement it")


def _own(world: World, value: Any, name: str) -> types.FunctionType | None:
    if not is_traced_subclass(value):
        return None
    method = classes.python_method(world, value.python_class, name)
    return method if method is not None and not method.__module__.startswith("torch.") else None


def intercept(tracer: Tracer, fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """Any call while tensors of such classes are about: MISSING where no override has a say in it."""
    owner = getattr(fn, "__self__", None)
    if type(owner) is TracedTensor:
        if isinstance(fn, types.MethodType) or fn.__name__ in _NEVER:
            return MISSING
        fn, args = getattr(torch.Tensor, fn.__name__), (owner, *args)
    if not enabled() or not _may_ask(fn):
        return MISSING
    objects = overriding(args, kwargs)
    if not any(type(one) is TracedTensor for one in objects):
        return MISSING
    return _probed(tracer.world, fn, args, kwargs)


_NEVER = frozenset({
    "as_subclass", "__init__", "__setattr__", "__getattribute__", "__delattr__", "__new__", "_make_subclass",
    "_make_wrapper_subclass", "__class__", "__dict__", "__reduce_ex__", "__init_subclass__", "__subclasshook__",
})  # fmt: skip
_OF_TENSORS = (torch._C.TensorBase, torch.Tensor)
_LIBRARY = frozenset({"torch._tensor", "torch.functional", "torch.nn.functional", "torch.special", "torch.linalg"})


def _may_ask(fn: Any) -> bool:
    kind = type(fn)
    if kind is types.FunctionType:
        if (fn.__globals__.get("__name__") or "") not in _LIBRARY:
            return False
        return fn.__name__ not in ("__torch_function__", "has_torch_function") and not fn.__name__.startswith("_has_")
    if kind in (types.MethodDescriptorType, types.WrapperDescriptorType):
        return fn.__objclass__ in _OF_TENSORS and fn.__name__ not in _NEVER
    if kind is types.MethodWrapperType:
        return is_accessor(fn)
    if kind is types.BuiltinFunctionType:
        origin = fn.__self__
        name = origin.__name__ if isinstance(origin, types.ModuleType) else fn.__module__ or ""
        if fn.__name__ in _NEVER:
            return False
        return (origin is None and name == "torch") or name.startswith(_C_MODULES)
    return kind in (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


_C_MODULES = ("torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special", "torch._C._sparse")


def is_accessor(fn: Any) -> bool:
    """Whether it is `torch.Tensor.shape.__get__` or the like: what an override is told of a read or a store."""
    owner = getattr(fn, "__self__", None)
    return (
        type(fn) is types.MethodWrapperType
        and fn.__name__ in ("__get__", "__set__", "__delete__")
        and (
            type(owner) is property or (type(owner) is types.GetSetDescriptorType and owner.__objclass__ in _OF_TENSORS)
        )
    )


def refuse_unasked(recorder: Any, args: Any, kwargs: Any) -> None:
    """For the recorder: an operator on a tensor whose class was not asked first."""
    if enabled():
        for value in leaves((args, kwargs)):
            if type(value) is TracedTensor and override_of(value.python_class) is not None:
                raise GraphBreak(
                    "unsupported-tensor", f"native code computes with a {value.python_class.__qualname__} by itself"
                )
