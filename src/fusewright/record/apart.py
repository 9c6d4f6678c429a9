"""Tensors that wrap others, taken apart and put together so that autograd follows.

Takes a wrapper, or the parts of one; gives its parts, or the wrapper. The same two functions stand on both sides of a
graph: outside a wrapper is taken apart in front of the graph and put together behind it, inside the other way round.
Always holds: the gradient of a wrapper crosses as the gradients of its parts, or, where it is a plain tensor, as that
of the carrier, a tensor of the wrapper's shape that takes no memory; it is of the class and context that the graph was
recorded with, or an error says so.
"""

from __future__ import annotations

import copy
import enum
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass

Parts = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Makeup:
    """What a wrapper is besides its parts and its size. kind None: a plain tensor; others: the parts that are no
    tensors, by name (a DTensor's mesh)."""

    kind: type | None
    names: tuple[str, ...] = ()
    context: Any = None
    others: tuple[tuple[str, Any], ...] = ()

    def make(self, parts: Parts, size: Any, stride: Any) -> torch.Tensor:
        assert self.kind is not None
        if is_distributed(self.kind):
            return _distributed(self, parts[0], size, stride)
        inner = dict(zip(self.names, parts, strict=True)) | dict(self.others)
        kind: Any = self.kind
        return kind.__tensor_unflatten__(inner, self.context, size, stride)  # type: ignore[no-any-return]


PLAIN = Makeup(None)


def makeup(tensor: Any) -> Makeup:
    """Of a wrapper or of a plain tensor; the context is the tensor's own object."""
    if not is_traceable_wrapper_subclass(tensor):
        return PLAIN
    kind: Any = type(tensor)
    if is_distributed(kind):
        spec: Any = tensor._spec  # type: ignore[attr-defined]
        of_spec = (spec.placements, spec.tensor_meta.dtype, spec.shard_order)
        return Makeup(kind, ("_local_tensor",), of_spec, (("device_mesh", spec.mesh),))
    names, context = tensor.__tensor_flatten__()
    parts = tuple(name for name in names if isinstance(getattr(tensor, name), torch.Tensor))
    others = tuple((name, getattr(tensor, name)) for name in names if name not in parts)
    return Makeup(kind, parts, context, others)


def _distributed(own: Makeup, part: torch.Tensor, size: Any, stride: Any) -> torch.Tensor:
    ((_, mesh),) = own.others
    key: Any = (id(mesh), own.context, tuple(size), tuple(stride))
    try:
        spec = _SPECS.get(key)
    except TypeError:  # symbolic sizes have no hash
        spec, key = None, None
    if spec is None or spec.mesh is not mesh:
        placements, dtype, order = own.context
        module: Any = sys.modules["torch.distributed.tensor._dtensor_spec"]
        meta = module.TensorMeta(torch.Size(size), tuple(stride), dtype)
        spec = module.DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=order)
        if key is not None and is_immutable(own.context):
            if len(_SPECS) >= MOST_SPECS:
                _SPECS.clear()
            _SPECS[key] = spec
    kind: Any = own.kind
    return kind(part, spec, requires_grad=False)  # type: ignore[no-any-return]


MOST_SPECS = 1 << 10
_SPECS: dict[Any, Any] = {}
"""DTensor's specifications: making one takes longer than all the rest. PyTorch's operators share theirs, too. By the
mesh itself: another mesh may be equal, and have other process groups."""


def is_distributed(kind: type) -> bool:
    """Whether it is PyTorch's DTensor. Its own code runs in C++, which asks no `__torch_dispatch__`; what its
    `__tensor_flatten__` gives differs from one PyTorch to the next, so its specification is read instead."""
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.tensor")


def of_gradients(own: Makeup) -> Makeup | None:
    """What each gradient of a DTensor is brought to: its own placements, but replicated where they await a sum. None
    for other classes, whose contract does not say."""
    if own.kind is None or not is_distributed(own.kind):
        return None
    placements, *more = own.context
    replicated = sys.modules["torch.distributed.tensor"].Replicate()
    settled = tuple(replicated if one.is_partial() else one for one in placements)
    return Makeup(own.kind, own.names, (settled, *more), own.others)


def kept(value: Makeup) -> Makeup | None:
    """A copy that later writes to the context do not reach. None where a copy is not equal, so that nothing can be
    compared with it."""
    if is_immutable(value.context):
        return value
    try:
        context = copy.deepcopy(value.context)
        return Makeup(value.kind, value.names, context, value.others) if bool(context == value.context) else None
    except Exception:  # the user's own __deepcopy__ and __eq__
        return None


_ATOMS = (int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)


# Not `_MaskPartial`, which holds a tensor of one call.
_PLACEMENTS = frozenset({"Shard", "Replicate", "Partial", "_StridedShard"})


def is_immutable(context: object) -> bool:
    """Whether results can share a context: nobody can write to it, and it holds nothing of one recording."""
    if isinstance(context, (tuple, frozenset)):
        return all(map(is_immutable, context))
    if isinstance(context, (*_ATOMS, torch.memory_format, type, enum.Enum)):
        return True
    kind = type(context)
    if kind.__module__ == "torch.distributed.tensor.placement_types" and kind.__name__ in _PLACEMENTS:
        return True
    settings = getattr(type(context), "__dataclass_params__", None)
    return settings is not None and settings.frozen and all(map(is_immutable, vars(context).values()))


def parts_of(tensor: Any, names: Sequence[str]) -> list[torch.Tensor]:
    return [getattr(tensor, name) for name in names]


def carries_gradient(part: torch.Tensor) -> bool:
    return part.dtype.is_floating_point or part.dtype.is_complex


class Form:
    """How one wrapper crosses the border of the graph.

    own       what it is
    gradient  what its gradient is: None until the backward has been recorded
    like      the part that the gradient is laid out as: None where it is laid out as the wrapper itself
    """

    __slots__ = ("gradient", "like", "own")

    def __init__(self, own: Makeup, gradient: Makeup | None = None) -> None:
        self.own, self.gradient = own, gradient
        self.like: int | None = None

    def split(self, gradient: torch.Tensor, own: Parts) -> list[torch.Tensor | None]:
        """The gradients of the carrier and of the parts that have one."""
        gradient = self._alike(gradient, own)
        found = makeup(gradient)
        if self.gradient is None:
            self.gradient = found if is_immutable(found.context) else None
            self.like = _like(gradient, found)
        if found != self.gradient:
            raise RuntimeError(f"the gradient of a {_said(self.own)} is a {_said(found)}, not {_said(self.gradient)}")
        if found.kind is None:
            return [gradient, *(None for part in own if carries_gradient(part))]
        given = parts_of(gradient, found.names)
        for mine, theirs in zip(own, given, strict=True):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise RuntimeError(f"the gradient of a {_said(self.own)} has parts of other shapes or dtypes")
            if not carries_gradient(mine) and not same_value(mine, theirs):
                raise RuntimeError(f"the gradient of a {_said(self.own)} has other integers than it")
        return [None, *(part for part in given if carries_gradient(part))]

    def _alike(self, gradient: Any, own: Parts) -> Any:
        """A distributed gradient with the placements that were recorded, or those of the tensor itself if its part has
        another shape otherwise."""
        if not is_distributed(type(gradient)):
            return gradient
        wanted = self.gradient
        if wanted is None and [part.shape for part in parts_of(gradient, self.own.names)] != [p.shape for p in own]:
            wanted = self.own
        if wanted is None or wanted.kind is not self.own.kind or makeup(gradient) == wanted:
            return gradient
        return gradient.redistribute(gradient.device_mesh, wanted.context[0])

    def join(self, carried: torch.Tensor | None, given: Parts, own: Parts, layout: Any) -> torch.Tensor | None:
        """The gradient of which these are parts. own: the parts of the wrapper itself; layout: its size and stride."""
        if carried is not None:
            return carried
        if self.gradient is None or all(part is None for part in given):
            return None
        following = iter(given)
        parts = [_or_zeros(next(following), part) if carries_gradient(part) else part for part in own]
        return self.gradient.make(parts, *(layout if self.like is None else layout_of(parts[self.like])))


def _like(gradient: torch.Tensor, found: Makeup) -> int | None:
    if found.kind is None or is_distributed(found.kind):
        return None
    layouts = map(layout_of, parts_of(gradient, found.names))
    return next((place for place, layout in enumerate(layouts) if layout == layout_of(gradient)), None)


def _said(value: Makeup | None) -> str:
    if value is None or value.kind is None:
        return "plain tensor"
    return f"{value.kind.__qualname__} of context {value.context!r}"


def _or_zeros(gradient: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(part) if gradient is None else gradient


def same_value(mine: Any, theirs: Any) -> bool:
    """Whether two tensors are one: the object, or a result of the recording that is."""
    node = getattr(mine, "node", None)
    if node is not None:
        return node is getattr(theirs, "node", None)
    return mine is theirs or torch.equal(mine, theirs)


class Apart(torch.autograd.Function):
    """forward(ctx, form, with a carrier, wrapper) → its parts, behind its carrier."""

    @staticmethod
    def forward(ctx: Any, form: Form, carried: bool, wrapper: Any) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.form, ctx.carried, ctx.layout = form, carried, layout_of(wrapper)
        ctx.own = parts_of(wrapper, form.own.names)
        parts = [part.detach() for part in ctx.own]
        ctx.mark_non_differentiable(*(part for part in parts if not carries_gradient(part)))
        return (carrier(wrapper), *parts) if carried else tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        carried, given = (gradients[0], gradients[1:]) if ctx.carried else (None, gradients)
        floats = [one for one, part in zip(given, ctx.own, strict=True) if carries_gradient(part)]
        return None, None, ctx.form.join(carried, floats, ctx.own, ctx.layout)


class Together(torch.autograd.Function):
    """forward(ctx, make, form, parts, carrier, *linked) → the wrapper of the parts (a list, which autograd does not
    look into). linked: what the gradients of the floating-point ones go to."""

    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], torch.Tensor], form: Form, parts: list[torch.Tensor], *linked: Any
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.form, ctx.parts = form, parts
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, None, *ctx.form.split(gradient, ctx.parts))


def layout_of(wrapper: torch.Tensor) -> tuple[Any, Any]:
    with torch._C.DisableTorchFunctionSubclass():
        return wrapper.shape, wrapper.stride()


def carrier(wrapper: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty((), dtype=wrapper.dtype, device=wrapper.device).expand(wrapper.shape)


def together(form: Form, size: Any, stride: Any, *parts: torch.Tensor) -> torch.Tensor:
    """The wrapper behind a graph whose outputs its parts are, with their history."""
    inner = [part.detach() for part in parts]
    linked = [part for part in parts if carries_gradient(part)]
    made: Any = Together.apply(lambda: form.own.make(inner, size, stride), form, inner, None, *linked)
    return made  # type: ignore[no-any-return]


def without_history(form: Form, size: Any, stride: Any, *parts: torch.Tensor) -> torch.Tensor:
    """The wrapper behind a graph of one that requires no gradient."""
    return form.own.make(parts, size, stride)
