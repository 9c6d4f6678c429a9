"""`fusewright.aot`: a backend made of a user's compilers of ATen graphs, one for each direction.

Takes fw_compiler and bw_compiler, each called as compiler(gm, example_inputs), and a partition; gives a Backend. Always
holds: the graphs are functional (writes into inputs stand at the end, as `copy_`); the forward returns (outputs...,
saved values...), the backward takes (saved values..., tangents...) and returns the gradients of those inputs that have
one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fusewright.autograd.joint import JointGraph, Split
from fusewright.autograd.partition import split
from fusewright.backends.joint import compile_joint
from fusewright.backends.registry import (
    Backend,
    GraphToCompile,
    as_tuple,
    below_autograd,
    by_operators,
    counts_of,
)
from fusewright.backends.repeat import repeatable
from fusewright.base.errors import BackendError, OptionError
from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.graph import passes
from fusewright.graph.grad_mode import run_with_grad_mode
from fusewright.record.torch_level import sizes_as_nodes
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import TensorType

Compiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def aot(
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition: Callable[[JointGraph], Split] | None = None,
) -> Backend:
    """A backend for `compile(backend=...)` that receives functional ATen graphs.

    fw_compiler  compiler(gm, example_inputs) → callable over the same flat inputs; called for the forward, or for the
                 whole graph when no gradient is wanted. `gm` is a torch.fx.GraphModule of ATen overloads, each node
                 with meta["type"] (shape, strides in elements, dtype, device) and meta["location"]; example_inputs are
                 the real inputs (tensors, ints for symbolic sizes)
    bw_compiler  the same for the backward (default: fw_compiler); its example inputs have the right sizes and arbitrary
        contents
    partition    cuts the joint graph: partition(JointGraph) → Split (default: fusewright.autograd.partition.split, a
        minimum cut)

    Raises OptionError for something that is not callable; what a compiler raises reaches the user as BackendError.
    """
    for name, value in (("fw_compiler", fw_compiler), ("bw_compiler", bw_compiler), ("partition", partition)):
        if not callable(value) and (value is not None or name == "fw_compiler"):
            raise OptionError(f"aot takes callables, got {name}={value!r}")
    compilers = {"forward": fw_compiler, "backward": bw_compiler or fw_compiler}

    def compile_graph(to_compile: GraphToCompile) -> Callable[..., Any]:
        graph = passes.run(to_compile.graph)
        half = functools.partial(_compile_half, to_compile, compilers)
        if to_compile.backward is None:
            return half(graph, "forward")
        return compile_joint(graph, to_compile, half, partition or split)

    return Backend("aot", "aten", compile_graph, follows_autograd=False, trains=True)


def lowered(backend: Backend, to_compile: GraphToCompile) -> Callable[..., Any]:
    """The callable of a graph at ATen level, for a backend that takes torch-level ones: it compiles the functional
    forward; PyTorch's operators run the backward, as they do below a torch-level graph. A failure at run time has the
    call repeated eagerly."""
    graph = passes.run(to_compile.graph)
    half = functools.partial(_lowered_half, backend, to_compile)
    if to_compile.backward is None:
        return repeatable(half(graph, "forward"), graph)
    return repeatable(compile_joint(graph, to_compile, half), graph)


def _lowered_half(
    backend: Backend, to_compile: GraphToCompile, graph: torch.fx.Graph, direction: str
) -> Callable[..., Any]:
    if direction != "forward":
        return by_operators(to_compile.without_examples(), graph)
    run_with_grad_mode(graph)
    sizes_as_nodes(graph)
    inputs = tuple(to_compile.real_inputs())
    counts = counts_of(graph)  # a compiler may change the graph
    run = backend.compile(replace(to_compile, graph=graph, example_inputs=inputs, backward=None))
    return below_autograd(run, counts)


def _compile_half(
    to_compile: GraphToCompile, compilers: dict[str, Compiler], graph: torch.fx.Graph, direction: str
) -> Callable[..., Any]:
    env = next((node.meta.get("env") for node in to_compile.graph.nodes if node.op == "output"), None)
    if direction == "forward":
        inputs = to_compile.real_inputs()
    else:
        inputs = [_example(node.meta["type"], env) for node in graph.nodes if node.op == "placeholder"]
    run_with_grad_mode(graph)
    counts = counts_of(graph)  # a compiler may change the graph
    try:
        compiled = compilers[direction](to_compile.module(graph), inputs)
    except Exception as error:
        what = f"the {direction} compiler given to aot failed on the graph of {to_compile.function}"
        raise BackendError(f"{what}: {type(error).__name__}: {error}") from error
    if not callable(compiled):
        raise BackendError(
            f"the {direction} compiler given to aot returned {type(compiled).__name__}; it must return a callable"
        )
    return below_autograd(as_tuple(compiled), counts)


def _example(kind: Any, env: ShapeEnv | None) -> Any:
    """An uninitialised tensor of this type, or the example's value of a size."""

    def size(dim: Any) -> int:
        return dim if isinstance(dim, int) or env is None else env.hint(dim)

    if isinstance(kind, TensorType):
        shape, stride = [size(dim) for dim in kind.shape], [size(dim) for dim in kind.stride]
        return torch.empty_strided(shape, stride, dtype=kind.dtype, device=kind.device)
    return size(kind)
