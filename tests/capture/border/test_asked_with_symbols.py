"""What native code asks of tensors whose sizes are symbols: it gets eager's answer or error, and no error of PyTorch's about symbols."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, InternalError


@dataclasses.dataclass
class Holder:
    held: object = 1


ASKED: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: Holder(x) == Holder(y), lambda x, y: Holder(x) == Holder(), lambda x, y: (x,) == (y,),
    lambda x, y: [x] == [1], lambda x, y: {1: x} == {1: y}, lambda x, y: {1: x} == {1: 2}, lambda x, y: (x,) < (y,),
    lambda x, y: x in [y], lambda x, y: x in (1, y), lambda x, y: [y].index(x), lambda x, y: [1, y].count(x),
    lambda x, y: collections.deque([x]) == collections.deque([y]), lambda x, y: sorted([x, y]),
    lambda x, y: max(x, y), lambda x, y: max([x, y]), lambda x, y: bool(x), lambda x, y: not x,
    lambda x, y: any([x, y]), lambda x, y: all([x]), lambda x, y: list(filter(None, [x])), lambda x, y: int(x),
    lambda x, y: float(x), lambda x, y: complex(x), lambda x, y: [0, 1][x], lambda x, y: range(x),
    lambda x, y: x.item(), lambda x, y: x.tolist(), lambda x, y: len(x.reshape(())),
    lambda x, y: list(x.sum()), lambda x, y: x.__index__(), lambda x, y: x.__bool__(), lambda x, y: x.is_nonzero(),
    lambda x, y: torch.is_nonzero(x), lambda x, y: torch.equal(x, y), lambda x, y: bytes(x), lambda x, y: divmod(x, y),
    lambda x, y: divmod(3, x), lambda x, y: operator.index(x), lambda x, y: x.nbytes, lambda x, y: x.is_same_size(y),
    lambda x, y: x.numel(), lambda x, y: (x.shape, 1) == (y.shape, 1), lambda x, y: x.untyped_storage().nbytes(),
    lambda x, y: torch.broadcast_shapes(x.shape, y.shape), lambda x, y: x.is_set_to(y), lambda x, y: x[5],
)  # fmt: skip


def program(x: torch.Tensor, y: torch.Tensor, ask: Any) -> Any:
    z = x + 1
    try:
        return z, "gave", ask(x, y)
    except Exception as error:
        return z, type(error), str(error)


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_as_eager(backend: str) -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.arange(1.0, 7.0).reshape(2, 3)
    heard: list[Any] = []
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        for place, ask in enumerate(ASKED):
            compiled = fusewright.compile(program, backend=backend, dynamic=True)
            assert str(compiled(x, y, ask)) == str(program(x, y, ask)), place
    assert not heard
