"""Collectives, and messages between two processes, for which PyTorch has no functional operator, as operators.

Takes tensors and a process group's name; gives new tensors. Always holds: eager's own call does it, on a tensor that
nobody else has, and it has been waited for when the operator returns. Where eager leaves something in the tensor of
a process that gets no result (`reduce`), so does the operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMESPACE = "fusewright_c10d"

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define("reduce(Tensor input, str reduce_op, int dst, str group_name) -> Tensor")
_LIBRARY.define("gather(Tensor input, int dst, int results, str group_name) -> Tensor")
_LIBRARY.define("scatter(Tensor input, int src, SymInt[] size, str group_name) -> Tensor")
_LIBRARY.define("send(Tensor input, int dst, int tag, str group_name) -> Tensor")
_LIBRARY.define("receive(Tensor input, int src, int tag, str group_name) -> Tensor")
PAIRED = frozenset({"send", "receive"})
"""One process of the two calls one, the other the other."""


def _c10d() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]


def _reduce(input: torch.Tensor, reduce_op: str, dst: int, group_name: str) -> torch.Tensor:
    c10d, result = _c10d(), input.clone(memory_format=torch.contiguous_format)
    operation = getattr(c10d.ReduceOp, reduce_op.upper())
    c10d.reduce(result, op=operation, group=c10d._resolve_process_group(group_name), group_dst=dst)
    return result


def _gather(input: torch.Tensor, dst: int, results: int, group_name: str) -> torch.Tensor:
    c10d = _c10d()
    made = input.new_empty((results, *input.shape))
    parts = list(made.unbind()) if results else None
    c10d.gather(input.contiguous(), parts, group=c10d._resolve_process_group(group_name), group_dst=dst)
    return made


def _scatter(input: torch.Tensor, src: int, size: Sequence[int], group_name: str) -> torch.Tensor:
    c10d, made = _c10d(), input.new_empty(tuple(size))
    parts = [part.contiguous() for part in input.unbind()] if input.shape[0] else None
    c10d.scatter(made, parts, group=c10d._resolve_process_group(group_name), group_src=src)
    return made


def _send(input: torch.Tensor, dst: int, tag: int, group_name: str) -> torch.Tensor:
    c10d = _c10d()
    c10d.send(input.contiguous(), group=c10d._resolve_process_group(group_name), tag=tag, group_dst=dst)
    return input.new_empty(0)


def _receive(input: torch.Tensor, src: int, tag: int, group_name: str) -> torch.Tensor:
    c10d, made = _c10d(), torch.empty_like(input, memory_format=torch.contiguous_format)
    c10d.recv(made, group=c10d._resolve_process_group(group_name), tag=tag, group_src=src)
    return made


_IMPLEMENTED: dict[str, Callable[..., torch.Tensor]] = {
    "reduce": _reduce, "gather": _gather, "scatter": _scatter, "send": _send, "receive": _receive,
}  # fmt: skip
for _name, _call in _IMPLEMENTED.items():
    _LIBRARY.impl(_name, _call, "CompositeExplicitAutograd")
