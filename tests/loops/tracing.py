"""Graphs for the lowering tests: functional ATen graphs of plain functions, with their types.

`trace` uses PyTorch's make_fx, so that most tests of this stage do not depend on the stages before it; `record` uses our own recorder, for
functions that mutate and for symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.backends import gpu
from fusewright.base.records import replace
from fusewright.graph.passes.clean.functionalise import functionalise
from fusewright.graph.passes.clean.specialise import specialise
from fusewright.graph.passes.context import PassContext
from fusewright.loops.ir import LoopProgram
from fusewright.loops.lower import lower
from fusewright.record.recorder import Recorder
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import TensorType
from tests.loops import reference


def type_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorType(tuple(value.shape), value.stride(), value.dtype, value.device, False, value.storage_offset())
    if isinstance(value, (tuple, list)):
        return tuple(type_of(item) for item in value)
    return value


class Typer(torch.fx.Interpreter):
    """Runs a graph and notes the type of every value."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["type"] = type_of(result)
        return result


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> GraphModule:
    """The ATen graph of `function` on tensors `inputs`."""
    copies = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) if t.numel() else t.clone() for t in inputs
    ]
    module = make_fx(lambda *args: function(*args))(*copies)
    Typer(module).run(*[t.clone() if is_dense(t) else t for t in inputs])
    module.graph.eliminate_dead_code()
    return module


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.storage_offset() == 0


def record(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    symbolic: Mapping[int, Mapping[int, str]] | None = None,
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The functional graph of a function that may mutate, by our own recorder. `symbolic`: input -> dimension -> name of its size."""
    symbolic = symbolic or {}
    names = {name: inputs[k].shape[dim] for k, dims in symbolic.items() for dim, name in dims.items()}
    env = ShapeEnv() if names else None
    symbols = {name: env.create(name, hint, None) for name, hint in names.items()} if env else {}
    recorder = Recorder("aten", env)
    traced = [
        recorder.input(t, f"x{k}", {dim: symbols[name] for dim, name in symbolic.get(k, {}).items()})
        for k, t in enumerate(inputs)
    ]
    result = recorder.call(lambda: function(*traced))
    graph = recorder.finish(list(result) if isinstance(result, (tuple, list)) else [result])
    return specialise(functionalise(graph), PassContext()), recorder.constants


def on_a_gpu(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    symbolic: Mapping[int, Mapping[int, str]] | None = None,
) -> LoopProgram:
    """The loops of what lies on a GPU, whether there is one or not."""
    graph, constants = record(function, inputs, symbolic)
    for node in graph.nodes:
        if "type" in node.meta:
            node.meta["type"] = _moved(node.meta["type"])
    return lower(graph, constants, refuses=gpu.refuses(lambda reason: None))


def _moved(kind: Any) -> Any:
    if isinstance(kind, tuple):
        return tuple(map(_moved, kind))
    return replace(kind, device=torch.device("cuda", 0)) if isinstance(kind, TensorType) else kind


def lowered(function: Callable[..., Any], inputs: Sequence[torch.Tensor], mutating: bool = False) -> LoopProgram:
    """The function's loops. mutating: recorded and functionalised by our own stages, else traced by make_fx."""
    if mutating:
        return lower(*record(function, inputs))
    module = trace(function, inputs)
    constants = {str(n.target): getattr(module, str(n.target)) for n in module.graph.nodes if n.op == "get_attr"}
    return lower(module.graph, constants)


def run(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], mutating: bool = False
) -> tuple[LoopProgram, list[Any]]:
    """The function's loops, and what the reference interpreter makes of them."""
    program = lowered(function, inputs, mutating)
    return program, reference.run(program, inputs)
