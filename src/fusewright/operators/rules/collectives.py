"""Shape rules of collectives: `_c10d_functional` with contiguous results, whatever the arguments' strides are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.operators import messages
from fusewright.operators.rules.common import Rule, fresh
from fusewright.sizes.expressions import Dim, Sum, floor_div
from fusewright.sizes.tensor_type import TensorType

NAMESPACE = "_c10d_functional"


def _alike(input: TensorType, *constants: object) -> object:
    return fresh(input.shape, input)


def _gathered(input: TensorType, group_size: int, group_name: object) -> object:
    return fresh((input.shape[0] * group_size, *input.shape[1:]), input) if input.shape else NotImplemented


def _scattered(input: TensorType, reduce_op: str, group_size: int, group_name: object) -> object:
    first: Dim = input.shape[0] if input.shape else 0
    if not isinstance(first, int) and not _divides(first, group_size):
        return NotImplemented
    if not input.shape or (isinstance(first, int) and first % group_size):
        return NotImplemented
    return fresh((floor_div(first, group_size), *input.shape[1:]), input)


def _divides(size: Dim, by: int) -> bool:
    """Whether the group's size divides each term of a symbolic one."""
    return isinstance(size, Sum) and size.constant % by == 0 and all(count % by == 0 for _, count in size.terms)


def _exchanged(
    input: TensorType, output_split_sizes: Sequence[Dim], input_split_sizes: Sequence[Dim], group_name: object
) -> object:
    if not input.shape or not output_split_sizes:
        return NotImplemented
    first: Any = 0
    for size in output_split_sizes:
        first = first + size
    return fresh((first, *input.shape[1:]), input)


def _each(rule: Callable[..., object]) -> Rule:
    """The rule of a coalesced collective."""

    def listed(inputs: Sequence[TensorType], *constants: object) -> object:
        found = tuple(rule(one, *constants) for one in inputs)
        return NotImplemented if any(one is NotImplemented for one in found) else found

    return listed


_BY_NAME: dict[str, Rule] = {
    "all_reduce": _alike,
    "broadcast": _alike,
    "wait_tensor": lambda tensor: tensor,
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
    "all_to_all_single": _exchanged,
    "all_reduce_coalesced": _each(_alike),
    "all_gather_into_tensor_coalesced": _each(_gathered),
    "reduce_scatter_tensor_coalesced": _each(_scattered),
}


def _result(shape: Sequence[Dim], input: TensorType) -> object:
    return fresh(tuple(shape), input)


def _exchanged_messages(
    inputs: Sequence[TensorType], kinds: Sequence[str], peers: object, tags: object, group_name: object
) -> object:
    return tuple(
        _result((0,) if kind == "isend" else given.shape, given) for given, kind in zip(inputs, kinds, strict=True)
    )


_MESSAGES: dict[str, Rule] = {
    "reduce": _alike,
    "receive": _alike,
    "gather": lambda input, dst, results, group_name: _result((results, *input.shape), input),
    "scatter": lambda input, src, size, group_name: _result(size, input),
    "send": lambda input, dst, tag, group_name: _result((0,), input),
    "exchange": _exchanged_messages,
    "barrier": lambda token, device_ids, group_name: _result((0,), token),
}
# A PyTorch without torch.distributed has none of them.
RULES: dict[OpOverload, Rule] = {
    getattr(torch.ops, NAMESPACE).__getattr__(name).default: rule
    for name, rule in _BY_NAME.items()
    if torch.distributed.is_available()
} | {getattr(torch.ops, messages.NAMESPACE).__getattr__(name).default: rule for name, rule in _MESSAGES.items()}
