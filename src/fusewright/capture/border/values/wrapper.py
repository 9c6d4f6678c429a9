"""Tensor subclasses that wrap other tensors (quantised weights, say): their parts are graph inputs.

Takes a tensor whose class has PyTorch's contract for such classes (`__tensor_flatten__`, `__tensor_unflatten__`: all
that it is are its parts and a context); gives one of the same class, made of traced parts. Its own code
(`__torch_function__`, `__torch_dispatch__`) runs as in eager, under the recorder, and what it does to the parts is
recorded. One that requires a gradient has its parts' gradients (record/apart.py).
Always holds: of a parameter the very object is guarded, of any other its context by equality; the attributes too. One
whose attributes its own code writes to breaks the graph.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type

from fusewright._native import isinstance
from fusewright.base.pytorch import methods, torch
from fusewright.base.records import dataclass, field
from fusewright.base.signals import GraphBreak, UserException
from fusewright.capture.border.native import unwatched
from fusewright.capture.border.values import cls as classes, nested
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.guards import MISSING
from fusewright.capture.guards.sources import Attribute, InstanceDict, Item, Source, WrappedPart
from fusewright.record import apart
from fusewright.record.apart import Apart, Form, Makeup, Together
from fusewright.record.traced_tensor import TracedTensor, version_of, with_history
from fusewright.sizes.symint import dim_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

CODE = "unsupported-tensor"
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


@dataclass(slots=True)
class Wrapped:
    """A stand-in, and its attributes (None: its own code keeps what it likes there), history and version when it was
    made."""

    value: Any
    attributes: dict[str, object] | None
    history: object
    version: int


@dataclass(slots=True)
class Wrappers:
    """What an attempt knows of such tensors. no_gradients: it may be assumed that no gradient is turned on inside;
    without_history: one was loaded as if it needed none; masks: of DTensors' placements (None: no DTensor was met)."""

    loaded: list[Wrapped] = field(default_factory=list)
    no_gradients: bool = True
    without_history: bool = False
    masks: list[Any] | None = None


def is_wrapper(real: object) -> bool:
    """Whether the tensor is made of others, by the contract. Of PyTorch's own such classes DTensor and jagged nested
    tensors are taken."""
    kind = type(real)
    if kind is TracedTensor or kind in PLAIN or not issubclass(kind, torch.Tensor):
        return False
    return is_traceable_wrapper_subclass(real) and not of_torch(kind)  # type: ignore[arg-type]


def of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.") and not (apart.is_distributed(kind) or nested.is_jagged(kind))


def has_parts(kind: Any) -> bool:
    """Whether instances of the class can be wrappers."""
    return is_traceable_wrapper_subclass_type(kind) and not of_torch(kind)


def construct(world: World, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`kind(*args, **kwargs)`: its own code runs, as that of its operators does."""
    if world.recorder.level != "aten":
        world.recorder.lacks_form(CODE, f"a {kind.__qualname__} is made, which graphs at torch level do not take apart")
    return world.torch_call(kind, args, kwargs)


def load_wrapper(world: World, real: torch.Tensor, source: Source) -> torch.Tensor:
    """The stand-in of a wrapper from outside. Its parts are found below `source`."""
    if nested.is_jagged(type(real)):
        made = nested.load_jagged(world, real, source)
        world.wrappers.loaded.append(Wrapped(made, None, made.grad_fn, version_of(made)))
        return made
    what = f"{source.text()}, a {type(real).__qualname__},"
    if world.recorder.level != "aten":
        world.recorder.lacks_form(CODE, f"{what} is a tensor subclass, which graphs at torch level do not take apart")
    own = taken_apart(real, what)
    inner = {name: unwatched(getattr, real, name) for name in own.names}
    form = Form(own) if real.requires_grad else None
    if form is not None and world.wrappers.no_gradients and not torch.is_grad_enabled():
        form, world.wrappers.without_history = None, True
    if form is not None and any(part.requires_grad for part in inner.values()):
        raise GraphBreak(CODE, f"{what} requires a gradient, and so does a part of it")
    known = None if isinstance(real, torch.nn.Parameter) else apart.kept(own)
    world.guard("TYPE", source, type(real))
    world.guard("CALL", source, _IsStill(real) if known is None else _IsAlike(real, known))
    layout: Any = apart.layout_of(real)
    if apart.is_distributed(type(real)):
        _note_distributed(world, real)
    attributes = object.__getattribute__(real, "__dict__")
    parts: list[Any] = []
    linked: list[torch.Tensor] = []
    for index, (name, part) in enumerate(inner.items(), 1):
        where = Item(InstanceDict(source), name) if attributes.get(name) is part else Attribute(source, name)
        inside = world.load(part, where)
        if not (world.recorder_owns(inside) or is_wrapper(inside)):
            raise GraphBreak(CODE, f"{what} has a part {name!r} that is no tensor")
        if any(type(size) is not int for size in inside.shape) and known is None:
            raise GraphBreak(CODE, f"{what}, a parameter, has a part {name!r} of symbolic size")
        parts.append(inside)
        if form is not None and apart.carries_gradient(inside):
            linked.append(_linked(world, inside, where, WrappedPart(source, form, index)))
    held: tuple[object, ...] = (*own.context, own.context) if isinstance(own.context, tuple) else (own.context,)
    for name, value in attributes.items():
        if name not in inner and not any(value is one for one in held if known is not None):
            _guard_attribute(world, value, Item(InstanceDict(source), name))
    if known is not None:
        laid_out = _LaidOut(own.names, layout, list(inner.values()), parts)
        world.guard("CALL", source, laid_out)
        layout = laid_out.of(parts)
    if form is not None:
        linked.insert(0, _carrier(world, real, source, form, layout[0]))

    def make() -> torch.Tensor:
        return own.make(parts, *layout)

    made = unwatched(make) if form is None else _together(world, make, form, parts, linked)
    if type(made) is not type(real) or made.requires_grad != (form is not None):
        raise GraphBreak(CODE, f"{what} is not what its __tensor_unflatten__ makes")
    for name, value in attributes.items():
        if name not in inner:
            made.__dict__.setdefault(name, value)
    world.wrappers.loaded.append(Wrapped(made, dict(made.__dict__), made.grad_fn, version_of(made)))
    return world.stand_in(real, source, made)  # type: ignore[no-any-return]


def taken_apart(real: Any, what: str) -> Makeup:
    try:
        return unwatched(apart.makeup, real)  # type: ignore[no-any-return]
    except UserException as error:  # its constructor may still be running
        raise GraphBreak(CODE, f"{what} cannot be taken apart ({error.exception})") from None


def _carrier(world: World, real: torch.Tensor, source: Source, form: Form, size: Any) -> torch.Tensor:
    """The input that a gradient without parts is the gradient of."""
    world.repeats.enabled = False
    world.recorder.wrapped = True
    symbolic: Any = {axis: dim_of(one) for axis, one in enumerate(size) if type(one) is not int}
    traced = world.recorder.input(apart.carrier(real), "carrier", symbolic, requires_grad=True)
    world.input_sources.append(WrappedPart(source, form, 0))
    return traced  # type: ignore[no-any-return]


def _linked(world: World, inside: Any, where: Source, source: WrappedPart) -> torch.Tensor:
    """A tensor for the same input as `inside`, with a history, as the input will have."""
    if world.input_sources[-1] != where:  # it was not loaded just now, or its own parts were
        raise GraphBreak(CODE, f"{where.text()} is an input besides, or wraps tensors itself")
    world.input_sources[-1] = source
    return with_history(inside)


def _together(world: World, make: Any, form: Form, parts: list[Any], linked: list[torch.Tensor]) -> Any:
    with torch.enable_grad():
        return world.recorder.call(Together.apply, (make, form, parts, *linked))


@dataclass(slots=True)
class Leaving:
    """A wrapper that was made inside: its parts and layout, and what makes one of real ones."""

    parts: list[Any]
    layout: tuple[Any, ...]
    together: Callable[..., torch.Tensor]


def leaving(world: World, value: Any) -> Leaving:
    """Takes apart what leaves the graph."""
    found = _leaving(world, value)
    found.together = functools.partial(_as_it_was_made, value.requires_grad, value.is_inference(), found.together)
    return found


def _as_it_was_made(grad: bool, inference: bool, together: Callable[..., torch.Tensor], *parts: Any) -> torch.Tensor:
    """`together(*parts)`, in the modes in which the program made the wrapper."""
    if torch.is_inference_mode_enabled() == inference and (torch.is_grad_enabled() or not grad):
        return together(*parts)
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        return together(*parts)


def _leaving(world: World, value: Any) -> Leaving:
    what = f"a {type(value).__qualname__} that leaves the graph"
    if value.requires_grad and value.is_leaf:
        raise GraphBreak(CODE, f"{what} is a leaf")
    if nested.is_jagged(type(value)):
        crossing, make = nested.leaving_parts(world, value)
        return Leaving(crossing, (), make)
    own = taken_apart(value, what)
    if not apart.is_immutable(own.context):
        raise GraphBreak(CODE, f"{what} has a context that can be written to: {own.context!r}")
    parts = apart.parts_of(value, own.names)
    layout = apart.layout_of(value)
    alike = unwatched(own.make, parts, *layout)
    if type(alike) is not type(value) or alike.__dict__.keys() != value.__dict__.keys():
        raise GraphBreak(CODE, f"{what} is not what its __tensor_unflatten__ makes")
    form = Form(own)
    if not value.requires_grad:
        return Leaving(parts, layout, functools.partial(apart.without_history, form))
    if value._is_view():
        raise GraphBreak(CODE, f"{what} is a view with a history")
    form.gradient = apart.of_gradients(own)
    if form.gradient is None:
        form.gradient = own
        with torch.no_grad():
            natural = [world.recorder.call(fn, (value.detach(),)) for fn in (torch.ones_like, torch.sum)]
        if any(apart.makeup(one) != own for one in natural):
            raise GraphBreak(CODE, f"{what} has a history, and its gradient may be of another class or context")
    with torch.enable_grad():
        parts = [*world.recorder.call(Apart.apply, (form, False, value))]  # type: ignore[misc]
    world.recorder.wrapped = True
    return Leaving(parts, layout, functools.partial(apart.together, form))


def store(world: World, tensor: torch.Tensor, name: str, value: object) -> None:
    """`tensor.name = value`: a wrapper that was made inside is changed itself."""
    kind = type(tensor)
    own_rule = classes.lookup(kind, "__setattr__") is not classes.lookup(torch.Tensor, "__setattr__")
    known = classes.lookup(kind, name)
    if world.outside(tensor) is not None or own_rule or known is not MISSING or not is_constant(value):
        raise GraphBreak("tensor-attribute", f"a store to an attribute of a {kind.__qualname__}")
    tensor.__dict__[name] = value


def dispatch_settings() -> tuple[object, ...]:
    """What DTensor's own code depends on besides its operands: `loss_parallel`, `implicit_replication`."""
    dispatcher = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    return (*dispatcher._custom_op_handlers.items(), dispatcher._allow_implicit_replication)


def _note_distributed(world: World, tensor: Any) -> None:
    """Guards the settings once. A placement that masks rows keeps a tensor of this capture: `forget_masks` drops it."""
    if world.wrappers.masks is None:
        world.wrappers.masks = []
        world.guard_answer(dispatch_settings, (), dispatch_settings())
    world.wrappers.masks += [one.mask_buffer for one in tensor._spec.placements if hasattr(one, "mask_buffer")]


def forget_masks(world: World) -> None:
    """Called at the end of every attempt: PyTorch keeps placements for further calls."""
    for buffer in world.wrappers.masks or ():
        if isinstance(buffer.data, TracedTensor):
            buffer.data, buffer.refcount = None, 0


def check_result(world: World, fn: object, result: object) -> None:
    """Raises GraphBreak where a function has given a tensor, in whatever containers, that the graph knows nothing of:
    of a class that sees operators first and may hold traced tensors, or a real one."""
    if isinstance(result, torch.Tensor):
        functorch = torch._C._functorch.is_functorch_wrapped_tensor(result)
        known = world.recorder_owns(result) or functorch or (world.recorder.level == "aten" and is_wrapper(result))
        if known and apart.is_distributed(type(result)):
            _note_distributed(world, result)
        if not known and is_wrapper(result):
            what = f"{getattr(fn, '__qualname__', fn)} gives a {type(result).__qualname__}"
            world.recorder.lacks_form(CODE, f"{what}, which graphs at torch level do not take apart")
        if not known and world.outside(result) is None:
            raise GraphBreak(
                CODE,
                f"{getattr(fn, '__qualname__', fn)} gives a {type(result).__qualname__} that is no part of the graph",
            )
    elif isinstance(result, (list, tuple)):
        for part in result:
            check_result(world, fn, part)
    elif isinstance(result, dict):
        for part in result.values():
            check_result(world, fn, part)


class _IsStill:
    """Guard callable: it is the very tensor. Does not keep it alive."""

    __slots__ = ("name", "reference", "requires_grad")

    def __init__(self, real: torch.Tensor) -> None:
        self.name, self.requires_grad = type(real).__qualname__, real.requires_grad
        self.reference = weakref.ref(real)

    def __call__(self, subject: Any) -> bool:
        known = self.reference()
        return known is not None and known is subject and known.requires_grad == self.requires_grad

    def __repr__(self) -> str:
        return f"is the same {self.name}"


class _IsAlike:
    """Guard callable: a tensor of the same class and context. spec: of a DTensor that was; tensors share theirs."""

    __slots__ = ("known", "requires_grad", "spec")

    def __init__(self, real: torch.Tensor, known: Makeup) -> None:
        self.known, self.requires_grad = known, real.requires_grad
        self.spec: Any = None

    def __call__(self, subject: Any) -> bool:
        if subject.requires_grad != self.requires_grad:
            return False
        distributed = apart.is_distributed(type(subject))
        if distributed and self.spec is not None and subject._spec is self.spec:
            return True
        alike = apart.makeup(subject) == self.known
        if alike and distributed:
            self.spec = subject._spec
        return alike

    def __repr__(self) -> str:
        return f"is a {self.known.kind.__qualname__} of context {self.known.context!r}"  # type: ignore[union-attr]


_READS: tuple[Any, Any] = (methods.size, methods.stride)


class _LaidOut:
    """Guard callable: a tensor whose sizes and strides are what they were, or those of its parts that vary."""

    __slots__ = ("layout", "names")

    def __init__(self, names: tuple[str, ...], layout: Any, inner: list[torch.Tensor], parts: list[Any]) -> None:
        """layout: of the real tensor, which `inner` are the parts of; parts: what stands for them."""
        self.names = names
        self.layout = tuple(
            tuple(_found(axis, value, len(of), reads, inner, parts) for axis, value in enumerate(of))
            for of, reads in zip(layout, _READS)
        )

    def of(self, parts: list[Any]) -> tuple[tuple[Any, ...], ...]:
        """The sizes and strides of a tensor with these parts."""
        return tuple(
            tuple(reads(parts[value[0]])[value[1]] if isinstance(value, tuple) else value for value in of)
            for of, reads in zip(self.layout, _READS)
        )

    def __call__(self, subject: Any) -> bool:
        size, stride = apart.layout_of(subject)
        return (tuple(size), tuple(stride)) == self.of(apart.parts_of(subject, self.names))

    def __repr__(self) -> str:
        return f"has sizes and strides {self.layout}"


def _found(axis: int, value: int, ndim: int, reads: Any, inner: list[torch.Tensor], parts: list[Any]) -> Any:
    """(the part that varies and has this size or stride, its axis), or the number."""
    for place, (real, inside) in enumerate(zip(inner, parts)):
        if real.ndim == ndim and reads(real)[axis] == value and type(reads(inside)[axis]) is not int:
            return place, axis
    return value


def _guard_attribute(world: World, value: Any, source: Source) -> None:
    """Guards what the class's own code may read of an attribute: constants and containers by value, and what objects
    hold."""
    world.load(value, source)
    if not isinstance(value, (type, torch.Tensor)) and classes.is_heap_type(type(value)):
        for name, held in classes.own_attributes(value).items():
            if world.record_of(held) is None:
                _guard_attribute(world, held, Item(InstanceDict(source), name))


def check_unchanged(world: World) -> None:
    """Called at the end of an attempt. Raises GraphBreak for a wrapper from outside whose attributes were written to,
    or whose history was changed by a write in place."""
    for one in world.wrappers.loaded:
        now, before = one.value.__dict__, one.attributes
        if before is not None and (
            now.keys() != before.keys() or any(now[name] is not held for name, held in before.items())
        ):
            raise GraphBreak(CODE, f"an attribute of a {type(one.value).__qualname__} was written to")
        if one.value.grad_fn is not one.history:
            raise GraphBreak(CODE, f"a {type(one.value).__qualname__} with a history was written to in place")
        if version_of(one.value) != one.version:  # the graph writes to the parts: autograd shall know of the whole
            one.version = version_of(one.value)
            world.effects.defer(torch.autograd.graph.increment_version, (one.value,), {}, "")
