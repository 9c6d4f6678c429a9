"""Collectives, and messages between two processes, for which PyTorch has no functional operator, as operators.

Takes tensors and a process group's name; gives new tensors. Always holds: eager's own call does it, on a tensor that
nobody else has; like a functional collective it has only begun when the operator returns, and PyTorch's own
`_c10d_functional.wait_tensor` waits for its result. Where eager leaves something in the tensor of a process that gets
no result (`reduce`), so does the operator. What gives no result gives a tensor without elements, to wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from fusewright.base.pytorch import torch

NAMESPACE = "fusewright_c10d"

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define("reduce(Tensor input, str reduce_op, int dst, str group_name) -> Tensor")
_LIBRARY.define("gather(Tensor input, int dst, int results, str group_name) -> Tensor")
_LIBRARY.define("scatter(Tensor input, int src, SymInt[] size, str group_name) -> Tensor")
_LIBRARY.define("send(Tensor input, int dst, int tag, str group_name) -> Tensor")
_LIBRARY.define("receive(Tensor input, int src, int tag, str group_name) -> Tensor")
_LIBRARY.define("exchange(Tensor[] inputs, str[] kinds, int[] peers, int[] tags, str group_name) -> Tensor[]")
_LIBRARY.define("barrier(Tensor token, int[] device_ids, str group_name) -> Tensor")
PAIRED = frozenset({"send", "receive", "exchange"})
"""What processes of a group call at most with some of the others: their lists need not be alike."""


def _c10d() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]


def _group(name: str) -> Any:
    return _c10d()._resolve_process_group(name)


def _begun(result: torch.Tensor, work: Any) -> torch.Tensor:
    """The result, of which PyTorch knows now what a wait for it waits for."""
    if work is not None:  # a backend may have finished already
        torch._C._distributed_c10d._register_work(result, work)  # type: ignore[attr-defined]
    return result


def _reduce(input: torch.Tensor, reduce_op: str, dst: int, group_name: str) -> torch.Tensor:
    c10d, result = _c10d(), input.clone(memory_format=torch.contiguous_format)
    operation = getattr(c10d.ReduceOp, reduce_op.upper())
    return _begun(result, c10d.reduce(result, op=operation, group=_group(group_name), group_dst=dst, async_op=True))


def _gather(input: torch.Tensor, dst: int, results: int, group_name: str) -> torch.Tensor:
    made = input.new_empty((results, *input.shape))
    parts = list(made.unbind()) if results else None
    work = _c10d().gather(input.contiguous(), parts, group=_group(group_name), group_dst=dst, async_op=True)
    return _begun(made, work)


def _scatter(input: torch.Tensor, src: int, size: Sequence[int], group_name: str) -> torch.Tensor:
    made = input.new_empty(tuple(size))
    parts = [part.contiguous() for part in input.unbind()] if input.shape[0] else None
    return _begun(made, _c10d().scatter(made, parts, group=_group(group_name), group_src=src, async_op=True))


def _send(input: torch.Tensor, dst: int, tag: int, group_name: str) -> torch.Tensor:
    work = _c10d().isend(input.contiguous(), group=_group(group_name), tag=tag, group_dst=dst)
    return _begun(input.new_empty(0), work)


def _receive(input: torch.Tensor, src: int, tag: int, group_name: str) -> torch.Tensor:
    made = torch.empty_like(input, memory_format=torch.contiguous_format)
    return _begun(made, _c10d().irecv(made, group=_group(group_name), tag=tag, group_src=src))


def _exchange(
    inputs: Sequence[torch.Tensor], kinds: Sequence[str], peers: Sequence[int], tags: Sequence[int], group_name: str
) -> list[torch.Tensor]:
    """A batch of messages. A result for each: what is received, or a tensor without elements for what is sent."""
    c10d, group = _c10d(), _group(group_name)
    results, operations = [], []
    for given, kind, peer, tag in zip(inputs, kinds, peers, tags, strict=True):
        sends = kind == "isend"
        own = given.contiguous() if sends else torch.empty_like(given, memory_format=torch.contiguous_format)
        operations.append(c10d.P2POp(getattr(c10d, kind), own, group=group, tag=tag, group_peer=peer))
        results.append(given.new_empty(0) if sends else own)
    works = c10d.batch_isend_irecv(operations)
    if len(works) == len(results):
        return [_begun(result, work) for result, work in zip(results, works, strict=True)]
    for work in works:  # one for the whole batch
        for result in results:
            _begun(result, work)
    return results


def _barrier(token: torch.Tensor, device_ids: Sequence[int], group_name: str) -> torch.Tensor:
    work = _c10d().barrier(group=_group(group_name), async_op=True, device_ids=list(device_ids) or None)
    return _begun(token.new_empty(0), work)


_IMPLEMENTED: dict[str, Callable[..., Any]] = {
    "reduce": _reduce, "gather": _gather, "scatter": _scatter, "send": _send, "receive": _receive,
    "exchange": _exchange, "barrier": _barrier,
}  # fmt: skip
for _name, _call in _IMPLEMENTED.items():
    _LIBRARY.impl(_name, _call, "CompositeExplicitAutograd")
