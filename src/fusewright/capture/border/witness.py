"""A log of what a capture asked about sizes that it takes to be larger than they are.

Takes the calls of torch functions and the questions about traced tensors; gives them with the questions about sizes
that each made.
Always holds: what is recorded is what a plain recorder records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx
from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.records import dataclass
from fusewright.capture.border.copying import mapped
from fusewright.capture.border.native import native
from fusewright.capture.border.values import context
from fusewright.record.recorder import Recorder
from fusewright.record.traced_tensor import TracedTensor

Node = torch.fx.Node


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a torch function: the last nodes before and after it, the questions asked in it (from, to), the
    settings that it was made under."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: object
    before: Node | None
    last: Node | None
    asked: tuple[int, int]
    settings: context.TorchState


class Witness(Recorder):
    """A recorder that keeps a log of what was asked about sizes that are taken to be larger than they are, and
    where."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[Call] = []
        self.inferred: list[
            tuple[Node | None, int, int]
        ] = []  # the last node before an operator's, the questions asked for its type
        self.unclear = ""

    def call(
        self, fn: Callable[..., object], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        env: Any = self.env
        if not env.taken:
            return super().call(fn, args, kwargs)
        if self._depth:
            self.unclear = "a call inside of a call"
            return super().call(fn, args, kwargs)
        given = mapped(tuple(args), _same), mapped(dict(kwargs or {}), _same)
        before, start = last_node(self), len(env.asked)
        result = super().call(fn, args, kwargs)
        self.calls.append(
            Call(fn, *given, result, before, last_node(self), (start, len(env.asked)), context.snapshot())
        )
        return result

    def infer(self, func: OpOverload, args: list[object], kwargs: dict[str, object]) -> object:
        asked = self.env.asked  # type: ignore[union-attr]
        if asked is None:
            return super().infer(func, args, kwargs)
        before, start = last_node(self), len(asked)
        result = super().infer(func, args, kwargs)
        if len(asked) > start:
            self.inferred.append((before, start, len(asked)))
        return result

    def rebinds(self, how: str) -> None:
        self.unclear = how


def _same(tensor: TracedTensor) -> TracedTensor:
    return tensor


def asked(recorder: Recorder, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs), a question about how traced tensors are laid out: it is no part of the graph, but of
    the log."""
    env: Any = recorder.env
    if not isinstance(recorder, Witness) or not env.taken:
        return native(function, *args, **kwargs)
    last, start = last_node(recorder), len(env.asked)
    result = native(function, *args, **kwargs)
    recorder.calls.append(Call(function, args, kwargs, result, last, last, (start, len(env.asked)), context.snapshot()))
    return result


def last_node(recorder: Recorder) -> Node | None:
    return next(iter(reversed(recorder.graph.nodes)), None)
