"""Backend `cudagraphs`: PyTorch's own operators, recorded as a CUDA graph and replayed with one launch.

Takes ATen graphs, forward and backward; gives callables that copy their inputs into fixed buffers, replay, and copy the
results out.
Always holds: a graph with an input on another device, one that writes into an input, and one whose results share memory
run operator by operator, and an event says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fusewright.backends.joint import compile_joint
from fusewright.backends.registry import Backend, GraphToCompile, below_autograd, by_operators
from fusewright.backends.repeat import repeatable
from fusewright.base.events import Hint
from fusewright.base.pytorch import torch
from fusewright.graph import passes
from fusewright.graph.generators import Drawn, drawing_devices, states_of
from fusewright.operators.overlap import view_chain
from fusewright.operators.schema import facts
from fusewright.sizes.tensor_type import TensorType

_WARM_UP_RUNS = 2  # libraries allocate workspaces and choose algorithms in their first runs


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    graph = passes.run(to_compile.graph)
    if to_compile.backward is None:
        return repeatable(_half(to_compile, graph, "forward"), graph)
    to_compile = to_compile.without_examples()
    half = functools.partial(_half, to_compile)
    return repeatable(compile_joint(graph, to_compile, half), graph)


def _half(to_compile: GraphToCompile, graph: torch.fx.Graph, direction: str) -> Callable[..., Any]:
    reason = (to_compile.backward is None and _shared(graph)) or _obstacle(graph)
    if reason:
        to_compile.notify(Hint(to_compile.function, f"no CUDA graph for the {direction}: {reason}"))
        return by_operators(to_compile, graph)
    return below_autograd(_Replayed(by_operators(to_compile, graph), drawing_devices(graph)), {})


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


def _shared(graph: torch.fx.Graph) -> str:
    """Which results, of a graph that is no half of one, would no longer share memory; "" where none does."""
    results = graph.output_node().all_input_nodes
    roots = [view_chain(one)[0] for one in results if isinstance(one.meta["type"], TensorType)]
    if len({*roots}) < len(roots) or any(root.op != "call_function" for root in roots):
        return "a result shares memory with another, or with an input"
    return ""


class _Replayed:
    """A callable that is recorded at its first call."""

    def __init__(self, run: Callable[..., Any], drawn: Sequence[Drawn]) -> None:
        self.run, self.drawn = run, drawn
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
        states = states_of(self.drawn)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                self.run(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        if states is not None:  # the numbers that the call itself draws come first
            states.restore()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.outputs = self.run(*self.inputs)
        self.graph = graph


BACKEND = Backend("cudagraphs", "aten", _compile, follows_autograd=False, trains=True, dynamic=False)
