"""Backend `cudagraphs`: PyTorch's own operators, recorded as a CUDA graph and replayed with one launch.

Takes ATen graphs, forward and backward; gives callables that copy their inputs into fixed buffers, replay, and copy the
results out.
Always holds: a graph with an input on another device, or that writes into an input, runs operator by operator, and an
event says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusewright.backends.joint import compile_joint
from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.base.events import Hint
from fusewright.base.pytorch import torch
from fusewright.graph import passes
from fusewright.operators.schema import facts

_WARM_UP_RUNS = 2  # libraries allocate workspaces and choose algorithms in their first runs


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    graph = passes.run(to_compile.graph)
    if to_compile.backward is None:
        return _half(to_compile, graph, "forward")
    return compile_joint(graph, to_compile, lambda half, direction: _half(to_compile, half, direction))


def _half(to_compile: GraphToCompile, graph: torch.fx.Graph, direction: str) -> Callable[..., Any]:
    run = to_compile.module(graph).forward
    reason = _obstacle(graph)
    if reason:
        to_compile.notify(Hint(to_compile.function, f"no CUDA graph for the {direction}: {reason}"))
        return run
    return _Replayed(run)


def _obstacle(graph: torch.fx.Graph) -> str:
    """Why this graph cannot be replayed; "" when it can."""
    for node in graph.nodes:
        if node.op == "placeholder":
            device = getattr(node.meta["type"], "device", None)
            if device is None or device.type != "cuda":
                return f"the input {node.name} is not a CUDA tensor"
        elif isinstance(node.target, torch._ops.OpOverload):
            written = [node.args[index] for index in facts(node.target).written if index < len(node.args)]
            if any(isinstance(value, torch.fx.Node) and value.op == "placeholder" for value in written):
                return "the program writes into an input"
    return ""


class _Replayed:
    """A callable that is recorded at its first call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.graph: Any = None
        self.inputs: list[torch.Tensor] = []
        self.outputs: Sequence[Any] = ()

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        if self.graph is None:
            self._record(inputs)
        for buffer, value in zip(self.inputs, inputs):
            buffer.copy_(value)
        self.graph.replay()
        return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in self.outputs)

    def _record(self, inputs: tuple[torch.Tensor, ...]) -> None:
        self.inputs = [torch.empty_like(value).copy_(value) for value in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                self.run(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.outputs = self.run(*self.inputs)
        self.graph = graph


BACKEND = Backend("cudagraphs", "aten", _compile, follows_autograd=False, trains=True, dynamic=False)
