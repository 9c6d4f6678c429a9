"""Calls that are repeated eagerly when the compiled code fails.

Takes a callable over a graph's inputs; gives one that raises RuntimeFallback where the program itself must say what
happens. Always holds: what the failed call has written to or drawn is put back first.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from fusewright.base.errors import RuntimeFallback
from fusewright.base.pytorch import as_bytes, torch
from fusewright.capture.border.values import context
from fusewright.graph.collectives import is_collective
from fusewright.graph.generators import CPU, Drawn, drawing_devices, states_of
from fusewright.operators import generator_states
from fusewright.operators.host_draws import MODULES
from fusewright.operators.philox import BERNOULLI
from fusewright.operators.schema import facts
from fusewright.record.torch_level import CHECK
from fusewright.sizes.tensor_type import TensorType


def repeatable(
    run: Callable[..., Any], graph: torch.fx.Graph, torch_level: bool = False, checks_alone: bool = False
) -> Callable[..., Any]:
    """`run` of a graph, whose failure means that the call is repeated eagerly: the user's program decides what becomes
    of the error, and gets its own traceback and side effects. Inputs that the graph has written to by then get their
    old content back (one at ATen level writes when nothing can fail any more), and generators that it drew from their
    state. `checks_alone`: only the failure of a check that capture has put into the graph. Not so with collectives:
    other processes take part in them once."""
    if torch_level:
        run = leaving_settings(run, graph)
    if any(map(is_collective, graph.nodes)):
        return run
    writes = torch_level and any(node.meta.get("writes") for node in graph.nodes)
    drawn = _drawn_at_torch_level(graph) if torch_level else drawing_devices(graph)

    def attempt(*inputs: Any) -> Any:
        kept = (
            [(value, _version(value), value.detach().clone()) for value in inputs if isinstance(value, torch.Tensor)]
            if writes
            else ()
        )
        states = states_of(drawn)
        try:
            return run(*inputs)
        except Exception as error:
            if _stops_a_checkpoint(error) or (checks_alone and CHECK not in str(error)):
                raise
            if states is not None:
                states.restore()
            with torch.no_grad():
                for value, version, content in kept:
                    if _version(value) != version or (version < 0 and torch.is_inference_mode_enabled()):
                        _give_back(value, content)
                    elif type(value) in _PLAIN and not _same_bytes(value, content):
                        _give_back(value.data, content)  # what is written to through `data` counts no write
            raise RuntimeFallback(f"{type(error).__name__}: {error}") from error

    return attempt


def leaving_settings(run: Callable[..., Any], graph: torch.fx.Graph) -> Callable[..., Any]:
    """`run` of a torch-level graph, whose failure leaves PyTorch's settings as it found them. Where the graph changes
    them and back, the program has a `with` statement."""
    if not any(node.target in context.SETTERS for node in graph.nodes):
        return run

    def attempt(*inputs: Any) -> Any:
        before = context.snapshot()
        try:
            return run(*inputs)
        except BaseException:
            context.restore(before)
            raise

    return attempt


def _give_back(value: torch.Tensor, content: torch.Tensor) -> None:
    """`value.copy_(content)`, also where elements share memory: PyTorch refuses that of a tensor that was expanded."""
    if value.layout is torch.strided:
        for dim, (size, step) in enumerate(zip(value.shape, value.stride(), strict=True)):
            if step == 0 and size > 1:
                value, content = value.narrow(dim, 0, 1), content.narrow(dim, 0, 1)
    value.copy_(content)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _same_bytes(value: torch.Tensor, content: torch.Tensor) -> bool:
    """Whether they hold the same: NaN is, and the zeros are not. What has no bytes of its own is not asked for them."""
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return True
    return torch.equal(as_bytes(value), as_bytes(content))


def draws_once(run: Callable[..., Any], graph: torch.fx.Graph) -> Callable[..., Any]:
    """`run` of a graph at ATen level, of which a call that raises RuntimeFallback has drawn no random numbers: the same
    ones are drawn by the call that repeats it. Itself where the graph draws none, or has no operator that may refuse
    what it is given."""
    devices = drawing_devices(graph)
    if not devices or not any(map(_may_refuse, graph.nodes)):
        return run

    def attempt(*inputs: Any) -> Any:
        states = states_of(devices)
        try:
            return run(*inputs)
        except RuntimeFallback:
            if states is not None:
                states.restore()
            raise

    return attempt


def _may_refuse(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, OpOverload):
        return True
    known = facts(node.target)
    foreign = node.target.namespace != "aten" and node.target is not BERNOULLI
    return known.may_fail or known.product or known.effect or foreign


def _stops_a_checkpoint(error: Exception) -> bool:
    """Whether a checkpoint around the call has all that it wanted to compute again: PyTorch ends the forward with an
    exception then."""
    module = sys.modules.get("torch.utils.checkpoint")
    return module is not None and isinstance(error, module._StopRecomputationError)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not count, nor does one that was until `.data =` gave it another's
        return -1


def has_checks(graph: torch.fx.Graph) -> bool:
    """Whether capture has put checks into a torch-level graph (record/checks.py)."""
    return any(CHECK in node.args for node in graph.nodes)


def _drawn_at_torch_level(graph: torch.fx.Graph) -> tuple[Drawn, ...]:
    """The generators that a graph may have drawn from when it fails: where it has checks, what stands behind the one
    that fails may draw too."""
    hosts = has_checks(graph) or any(node.target in generator_states.OPERATORS for node in graph.nodes)
    if not hosts and not any(node.meta.get("random") for node in graph.nodes):
        return ()
    kinds = [node.meta.get("type") for node in graph.find_nodes(op="placeholder")]
    devices = (kind.device for kind in kinds if isinstance(kind, TensorType))
    return tuple(dict.fromkeys((CPU, *((MODULES,) if hosts else ()), *devices)))
