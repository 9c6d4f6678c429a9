"""The tensors that a call is given as `out`: whether they were written to, and what becomes of those that the operator
lays out itself.

Takes traced tensors and the recorder's graph. Always holds: after a call that did not break, each `out` tensor
stands for what eager would have left in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.records import dataclass
from fusewright.base.signals import GraphBreak
from fusewright.operators.meta_kernels import MetadataChanged
from fusewright.operators.schema import argument, facts, functional_form
from fusewright.record.traced_tensor import TracedTensor, replace_metadata, version_of

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Watched:
    """The `out` tensors of a call that is about to run, each with its node and version, and the graph's last node."""

    graph: torch.fx.Graph
    tensors: tuple[tuple[TracedTensor, torch.fx.Node, int], ...]
    last: torch.fx.Node | None

    def check_written(self, name: str) -> None:
        """PyTorch's composite operators compute beside an `out` tensor that is a subclass, now and then, and never
        write to it."""
        unwritten = [
            t
            for t, node, version in self.tensors
            if t.node is node and version_of(t) == version and 0 not in t.tensor_type.shape
        ]
        if not unwritten:
            return
        for node in reversed(self.graph.nodes):
            if node is self.last:
                break
            if isinstance(node.target, OpOverload):
                written = [argument(node.target, node.args, node.kwargs, index) for index in facts(node.target).written]
                unwritten = [t for t in unwritten if t.node not in written]
        if unwritten:
            raise GraphBreak("operator-failed", f"{name} does not write to its `out` tensor when it is traced")


def watch(graph: torch.fx.Graph, fn: object, kwargs: Mapping[str, object]) -> Watched | None:
    """What `out` is before the call of `fn`; None where it holds no traced tensor, or is only read."""
    if isinstance(fn, OpOverload) and not any(one.is_out for one in fn._schema.arguments):
        return None  # the backward of attention takes its result by this name
    out = kwargs["out"]
    traced = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, TracedTensor)]
    if not traced:
        return None
    before = tuple((t, t.node, version_of(t)) for t in traced)
    return Watched(graph, before, next(iter(reversed(graph.nodes)), None))


def lay_out_again(
    recorder: Recorder,
    func: OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    error: MetadataChanged,
) -> object:
    """`out=` tensors that the operator lays out itself: of the right shape they are copied to; an empty tensor made
    in this capture becomes the result, as eager resizes it without a warning."""
    recorder.rebinds("a result that is resized")
    form = functional_form(func)
    names = [a.name for a in func._schema.arguments if a.is_out]
    targets = [kwargs.get(name) for name in names]
    if form is None or not names or len(facts(func).returned) != len(names):
        raise GraphBreak("inplace-metadata", str(error)) from error
    made = recorder.dispatch(form, args, {name: value for name, value in kwargs.items() if name not in names})
    results = [made] if isinstance(made, torch.Tensor) else made
    for target, result in zip(targets, results, strict=True):
        if not isinstance(target, TracedTensor) or not isinstance(result, TracedTensor) or target.dtype != result.dtype:
            raise GraphBreak("inplace-metadata", str(error)) from error
        if target.tensor_type.shape == result.tensor_type.shape:
            recorder.dispatch(aten.copy_.default, (target, result), {})
        elif (
            target.input_storage
            or target.viewed is not None  # what it views sees the elements that it gets
            or 0 not in target.tensor_type.shape
            or recorder.level != "aten"
        ):
            raise GraphBreak("inplace-metadata", str(error)) from error
        else:
            replace_metadata(target, result)
            target.node, target.tensor_type = result.node, result.tensor_type
    return targets[0] if len(targets) == 1 else tuple(targets)
