"""Graphs for the lowering tests: functional ATen graphs of plain functions, with the types that capture would give.

PyTorch's make_fx serves here only because the tests of this stage must not depend on the stages before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.graph.types import TensorType
from fusewright.loops.ir import LoopProgram
from fusewright.loops.lower import lower
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


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor], mutating: bool = False) -> GraphModule:
    """The ATen graph of `function` on tensors `inputs`; of one that mutates, functional with copy_ into placeholders at the end."""
    copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) if t.numel() else t.clone() for t in inputs]
    plain = lambda *args: function(*args)
    module = make_fx(functionalize(plain, remove="mutations") if mutating else plain)(*copies)
    Typer(module).run(*[t.clone() if is_dense(t) else t for t in inputs])
    module.graph.eliminate_dead_code()
    return module


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.storage_offset() == 0


def lowered(function: Callable[..., Any], inputs: Sequence[torch.Tensor], mutating: bool = False) -> LoopProgram:
    module = trace(function, inputs, mutating)
    constants = {str(n.target): getattr(module, str(n.target)) for n in module.graph.nodes if n.op == "get_attr"}
    return lower(module.graph, constants)


def run(function: Callable[..., Any], inputs: Sequence[torch.Tensor], mutating: bool = False) -> tuple[LoopProgram, list[Any]]:
    """The function's loops, and what the reference interpreter makes of them."""
    program = lowered(function, inputs, mutating)
    return program, reference.run(program, inputs)
