"""Operators that work otherwise when the grad mode is on: in a graph that trains they run as in eager.

Takes a functional graph on its way to code; gives it with such calls replaced. Always holds: autograd itself stays off
(its keys are excluded while they run), so nothing is recorded; results have the types that the graph says.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

aten = torch.ops.aten
_WORKSPACE_OUT, _WORKSPACE_IN = 3, 22


def mkldnn_rnn_layer(*args: Any) -> tuple[Any, ...]:
    """aten::mkldnn_rnn_layer in training, which gives the workspace that its backward needs only when the grad mode is
    on.

    How large that is, only the library knows; the graph says 0 elements. So it travels as a view of 0 elements, with
    all of its memory.
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        results = list(aten.mkldnn_rnn_layer.default(*args))
    results[_WORKSPACE_OUT] = results[_WORKSPACE_OUT].as_strided((0,), (1,))
    return tuple(results)


def mkldnn_rnn_layer_backward(*args: Any) -> Any:
    """aten::mkldnn_rnn_layer_backward with the workspace as `mkldnn_rnn_layer` gives it."""
    given = list(args)
    workspace = given[_WORKSPACE_IN]
    given[_WORKSPACE_IN] = workspace.as_strided((workspace.untyped_storage().nbytes(),), (1,), 0)
    return aten.mkldnn_rnn_layer_backward.default(*given)


_ROWS: dict[object, Any] = {
    aten.mkldnn_rnn_layer.default: mkldnn_rnn_layer,
    aten.mkldnn_rnn_layer_backward.default: mkldnn_rnn_layer_backward,
}


_TRAIN = {mkldnn_rnn_layer: 15, mkldnn_rnn_layer_backward: 18}  # the argument that says so


def run_with_grad_mode(graph: torch.fx.Graph) -> None:
    """Replaces the calls in place."""
    for node in graph.nodes:
        row = _ROWS.get(node.target) if node.op == "call_function" and not node.kwargs else None
        if row is not None and node.args[_TRAIN[row]] and (row is mkldnn_rnn_layer_backward or _gives_workspace(node)):
            node.target = row


def _gives_workspace(node: torch.fx.Node) -> bool:
    """Whether anything reads the workspace; a graph without a backward leaves it."""
    return any(user.target is not operator.getitem or user.args[1] == _WORKSPACE_OUT for user in node.users)
