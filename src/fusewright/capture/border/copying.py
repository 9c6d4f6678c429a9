"""What may be recorded a second time: calls of torch functions, their values, and the nodes that they left.

Takes recorded nodes and values; gives whether they repeat, the nodes between two places, the memory that nodes share,
and the same containers around other tensors. Always holds: nothing is recorded here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.capture.border.values.constant import is_constant
from fusewright.capture.guards.types import AnswersAgain
from fusewright.graph.nodes import leaves
from fusewright.operators.schema import argument, facts, list_of_views
from fusewright.record.traced_tensor import TracedTensor

if TYPE_CHECKING:
    pass


_DESCRIPTIONS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)


def is_plain_function(function: Any) -> bool:
    """Whether a torch function holds no value of the capture's."""
    if isinstance(function, types.FunctionType):
        return function.__closure__ is None
    if isinstance(function, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return not isinstance(function.__self__, torch.Tensor)
    return isinstance(function, _DESCRIPTIONS)


def repeatable(value: Any, tensors: set[torch.fx.Node]) -> bool:
    """Whether `value` is made of constants and of tensors that stand for these nodes or for inputs."""
    kind = type(value)
    if kind is TracedTensor:
        return not value.reshaped and (value.node in tensors or value.is_input)
    if kind in (tuple, list, torch.Size):
        return all(repeatable(element, tensors) for element in value)
    if kind is dict:
        return all(type(key) is str and repeatable(element, tensors) for key, element in value.items())
    if kind is slice:
        return all(type(part) in (int, torch.SymInt, type(None)) for part in (value.start, value.stop, value.step))
    return kind is torch.SymInt or is_constant(value)


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list, dict)):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from containers(part)


def shared_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes whose memory an operator's results may lie in."""
    if not isinstance(node.target, OpOverload):
        return list(node.all_input_nodes)
    places = {alias[1] for alias in facts(node.target).returned if alias is not None}
    views = list_of_views(node.target)
    if views is not None:
        places.add(views)
    kwargs: Any = node.kwargs
    found = leaves([argument(node.target, node.args, kwargs, place) for place in places])
    return [one for one in found if isinstance(one, torch.fx.Node)]


def nodes_between(
    graph: torch.fx.Graph, start: torch.fx.Node | None, end: torch.fx.Node | None
) -> Iterator[torch.fx.Node]:
    """The nodes after `start` up to `end`."""
    node = start
    while node is not end:
        node = graph._root.next if node is None else node.next
        yield node


def mapped(value: Any, tensor: Callable[[TracedTensor], TracedTensor]) -> Any:
    """The same containers, made anew, with other tensors."""
    kind = type(value)
    if kind is TracedTensor:
        return tensor(value)
    if kind is tuple or kind is list:
        return kind([mapped(element, tensor) for element in value])
    if kind is dict:
        return {key: mapped(element, tensor) for key, element in value.items()}
    return value


def is_question(answer: AnswersAgain) -> bool:
    """Whether a question to the outside world is about constants and classes alone."""
    return not isinstance(answer.function, functools.partial) and all(
        is_constant(one) or isinstance(one, type) for one in answer.args
    )


def alike(mine: Any, theirs: torch.Tensor) -> bool:
    """Whether two outside tensors make inputs of one kind."""
    return (
        type(mine) is type(theirs)
        and mine.dtype == theirs.dtype
        and mine.shape == theirs.shape
        and mine.layout == theirs.layout == torch.strided
        and mine.stride() == theirs.stride()
        and mine.device == theirs.device
        and mine.requires_grad == theirs.requires_grad
        and mine.is_leaf == theirs.is_leaf
        and torch._C._dispatch_keys(mine).raw_repr() == torch._C._dispatch_keys(theirs).raw_repr()
    )
