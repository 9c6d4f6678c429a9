"""Jagged nested tensors: their values and offsets are graph inputs.

Takes a `torch.nested` tensor of layout jagged; gives one made of traced parts, whose own code runs under the recorder.
Its values cross as what PyTorch's differentiable `values()` gives, so that gradients find their way by themselves.
Always holds: the length of the ragged dimension is a number of no graph: it is known by the offsets, and one version
serves all lengths.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.base.signals import GraphBreak
from fusewright.capture.guards.sources import Attribute, Item, JaggedValues, Source
from fusewright.record.traced_tensor import with_history

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

CODE = "unsupported-tensor"
_MODULE = "torch.nested._internal.nested_tensor"
_CACHED = ("min_seqlen", "max_seqlen")
_CACHE = "_metadata_cache"


def is_jagged(kind: type) -> bool:
    """Whether it is the class of PyTorch's jagged tensors."""
    return kind.__module__ == _MODULE and kind.__name__ == "NestedTensor"


def is_cached_length(source: Source) -> bool:
    """Whether it leads to a length that a jagged tensor keeps, as a tensor of that size, which its constructor marks as
    dynamic."""
    return isinstance(source, Item) and isinstance(source.base, Attribute) and source.base.name == _CACHE


@dataclass(frozen=True, slots=True)
class _IsJagged:
    """Guard callable: a jagged tensor with the same parts. Their types have guards of their own."""

    ragged: int
    parts: tuple[bool, ...]
    requires_grad: bool

    def __call__(self, subject: Any) -> bool:
        return _makeup(subject) == (self.ragged, self.parts, self.requires_grad)

    def __repr__(self) -> str:
        return f"is ragged in dimension {self.ragged}"


def _makeup(tensor: Any) -> tuple[int, tuple[bool, ...], bool]:
    cached = tensor._metadata_cache
    given = (tensor._lengths is not None, *(cached.get(name) is not None for name in _CACHED))
    return tensor._ragged_idx, given, tensor.requires_grad


def load_jagged(world: World, real: Any, source: Source) -> torch.Tensor:
    """The stand-in of a jagged tensor from outside."""
    if world.recorder.level != "aten":
        world.recorder.lacks_form(CODE, f"{source.text()} is a nested tensor, which graphs at torch level do not take")
    world.guard("TYPE", source, type(real))
    world.guard("CALL", source, _IsJagged(*_makeup(real)))
    where = Attribute(source, "_values")
    values = world.load(real._values, where)
    if real.requires_grad:
        if world.input_sources[-1] != where:
            raise GraphBreak(CODE, f"the values of {source.text()} are an input besides")
        if real._values.requires_grad and real._values.is_leaf:  # gradients of it would have two ways
            raise GraphBreak(CODE, f"the values of {source.text()} are a leaf")
        world.input_sources[-1] = JaggedValues(source)
        world.recorder.wrapped = True
        values = with_history(values)
    parts = [world.load(real._offsets, Attribute(source, "_offsets"))]
    parts.append(None if real._lengths is None else world.load(real._lengths, Attribute(source, "_lengths")))
    cache = Attribute(source, _CACHE)
    for name in _CACHED:
        held = real._metadata_cache.get(name)
        parts.append(None if held is None else world.load(held, Item(cache, name)))
    made = world.recorder.call(_nested, (values, *parts, real._ragged_idx))
    return world.stand_in(real, source, made)  # type: ignore[no-any-return]


def _nested(values: Any, offsets: Any, lengths: Any, least: Any, most: Any, ragged: int) -> Any:
    module: Any = sys.modules[_MODULE]
    dummy = module._nt_view_dummy()
    return torch._nested_view_from_jagged(values, offsets, dummy, lengths, ragged, least, most)  # type: ignore


def leaving_parts(world: World, value: Any) -> tuple[list[Any], functools.partial[Any]]:
    """The parts of a jagged tensor that leaves the graph, and what makes one of real ones."""
    with torch.set_grad_enabled(value.requires_grad or torch.is_grad_enabled()):
        values = world.recorder.call(torch._nested_get_values, (value,))  # type: ignore[attr-defined]
    ragged, given, _ = _makeup(value)
    others = [value._offsets, value._lengths, *(value._metadata_cache.get(name) for name in _CACHED)]
    parts = [values, *(one for one in others if one is not None)]
    return parts, functools.partial(together, type(value), ragged, given)


def together(kind: Any, ragged: int, given: tuple[bool, ...], values: Any, offsets: Any, *others: Any) -> torch.Tensor:
    """A jagged tensor behind the graph, of its values with their history."""
    if values.requires_grad:
        return _Nest.apply(values, functools.partial(together, kind, ragged, given), offsets, *others)  # type: ignore
    following = iter(others)
    lengths, *cached = (next(following) if one else None for one in given)
    cache = {name: held for name, held in zip(_CACHED, cached, strict=True) if held is not None}
    return kind(values, offsets, lengths=lengths, _ragged_idx=ragged, _metadata_cache=cache)  # type: ignore


class _Nest(torch.autograd.Function):
    """forward(ctx, values, make, offsets, *others) → the jagged tensor of these values."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, make: Any, *others: torch.Tensor) -> Any:
        ctx.count = len(others)
        return make(values.detach(), *others)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        values = gradient.values() if is_jagged(type(gradient)) else gradient
        return values, None, *(None,) * ctx.count


def outside_values(tensor: Any) -> torch.Tensor:
    """What the graph takes of a jagged tensor with a history."""
    with torch.enable_grad():  # the frame may have begun without gradients, and turned them on
        return torch._nested_get_values(tensor)  # type: ignore[attr-defined, no-any-return]


__all__ = ["is_jagged", "leaving_parts", "load_jagged", "outside_values"]
