"""Runs functional ATen graphs by XLA: one `jax.jit` for each set of sizes, of which a bounded number is kept.

Takes graphs from the passes, joint ones too; gives callables over torch tensors, which go to jax and back by DLPack.
Always holds: views of inputs and of results, and writes into inputs, are made by PyTorch, so that results share memory
as eager's do; an operator without a row is an error under fullgraph, else its graph runs with PyTorch's operators.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from torch.fx.node import map_arg

from fusewright.backends.joint import compile_joint
from fusewright.backends.registry import Backend, GraphToCompile, below_autograd, by_operators, counts_of
from fusewright.backends.repeat import repeatable
from fusewright.backends.xla.rows import ROWS
from fusewright.backends.xla.table import DTYPES, FailedRow, NoRow, Values, is_half
from fusewright.base.errors import BackendError, InternalErrorWarning, RuntimeFallback, warn
from fusewright.base.events import FellBack
from fusewright.base.pytorch import torch
from fusewright.graph import passes
from fusewright.graph.nodes import written
from fusewright.operators.spmd import LEAVE
from fusewright.sizes.tensor_type import TensorType

KEPT_SIZES = 32
"""Sets of sizes of one graph whose machine code is kept."""


Make = Callable[[torch.fx.Graph, dict[str, Any]], "Program"]


def _compile(to_compile: GraphToCompile) -> Callable[..., Any]:
    return compile_by(passes.run(to_compile.graph), to_compile, Program)


def compile_by(graph: torch.fx.Graph, to_compile: GraphToCompile, make: Make) -> Callable[..., Any]:
    """`graph`, the functional form of `to_compile.graph`, as a callable; `make` gives the program of each half."""
    if to_compile.backward is None:
        return repeatable(_half(make, to_compile, graph, "forward"), graph)
    half = functools.partial(_half, make, to_compile.without_examples())
    return repeatable(compile_joint(graph, to_compile, half), graph)


def _half(make: Make, to_compile: GraphToCompile, graph: torch.fx.Graph, direction: str) -> Callable[..., Any]:
    program = _program(make, to_compile, graph, direction)
    if program is not None:
        return below_autograd(program.run, counts_of(graph))
    return by_operators(to_compile, graph)


def _program(make: Make, to_compile: GraphToCompile, graph: torch.fx.Graph, direction: str) -> Program | None:
    """None, after an event, for a graph that XLA does not compute. Raises BackendError under fullgraph."""
    try:
        return make(graph, to_compile.constants)
    except NoRow as error:
        reason = str(error)
        if isinstance(error, FailedRow):
            why = f"{to_compile.function} runs with PyTorch's operators: {reason}"
            warn(why, InternalErrorWarning)
    if to_compile.settings.fullgraph:
        raise BackendError(f"backend 'xla', {direction} of {to_compile.function}: {reason}")
    to_compile.notify(FellBack(f"{to_compile.function} {direction}", reason))
    return None


def _name(node: torch.fx.Node) -> str:
    return str(node.target).removeprefix("aten.")


def _without_row(node: torch.fx.Node) -> str | None:
    """What XLA cannot compute at this node, if anything."""
    if node.op == "output" or node.target in (operator.getitem, written) or writes(node):
        return None
    if node.op == "call_function" and _name(node) not in ROWS:
        return str(node.target)
    kinds = node.meta["type"] if isinstance(node.meta["type"], tuple) else (node.meta["type"],)
    odd = [kind.dtype for kind in kinds if isinstance(kind, TensorType) and kind.dtype not in DTYPES]
    kind = node.meta["type"]
    if node.op == "call_function" and isinstance(kind, TensorType) and kind.ndim > 1 and 0 in kind.shape:
        return f"{node.target} of an empty tensor"  # whose strides are not what jax's would be
    return f"{node.target} of {odd[0]}" if odd else None


def writes(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


def is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and len(schema.returns) == 1 and any(a.alias_info is not None for a in schema.arguments)


class Program:
    """A graph as a callable. `tail`: the nodes that PyTorch runs, behind those of XLA; `wanted`: what it reads."""

    axes: tuple[str, ...] = ()
    """Of the mesh that the graph runs on."""

    def __init__(self, graph: torch.fx.Graph, constants: dict[str, Any]) -> None:
        missing = sorted({name for node in graph.nodes if (name := _without_row(node)) is not None})
        if missing:
            raise NoRow(f"XLA has no row for {', '.join(missing)}")
        self.graph = graph
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        attributes = [node for node in graph.nodes if node.op == "get_attr"]
        self.constants = [constants[node.target] for node in attributes]
        self.inputs += attributes  # they may change between calls
        self.output = graph.output_node()
        tail = {node for node in graph.nodes if writes(node)}
        pending = [*self.output.all_input_nodes, *(node for write in tail for node in write.all_input_nodes)]
        wanted = set()
        while pending:
            node = pending.pop()
            if node in tail or node in wanted or node in self.inputs:
                continue
            if self.by_torch(node):
                tail.add(node)
                pending.extend(node.all_input_nodes)
            else:
                wanted.add(node)
        self.tail = [node for node in graph.nodes if node in tail]
        self.wanted = [node for node in graph.nodes if node in wanted]
        self._compiled: dict[Any, Any] = {}
        self._check_rows()

    def by_torch(self, node: torch.fx.Node) -> bool:
        """Whether PyTorch makes what is read behind XLA, so that it shares memory as eager's does."""
        return is_view(node)

    def _check_rows(self) -> None:
        """Raises NoRow, before any call, for what rows do not take. Sizes are known unless they depend on data."""
        kinds = [node.meta["type"] for node in self.inputs]
        shapes = [
            (self.shape_of(node), kind.dtype) if isinstance(kind, TensorType) else ((), torch.bool)
            for node, kind in zip(self.inputs, kinds)
        ]
        if all(isinstance(kind, TensorType) for kind in kinds) and _fixed(
            size for shape, _ in shapes for size in shape
        ):
            with jax.enable_x64(True):
                structs = [jax.ShapeDtypeStruct(shape, DTYPES[dtype]) for shape, dtype in shapes]
                jax.eval_shape(self.function(()), *structs)

    def shape_of(self, node: torch.fx.Node) -> Sequence[Any]:
        """Of the tensor that an input is."""
        shape: Sequence[Any] = node.meta["type"].shape
        return shape

    def function(self, numbers: tuple[Any, ...]) -> Callable[..., Any]:
        """What is compiled: arrays → `trace`'s results."""
        return functools.partial(self.trace, numbers)

    def trace(self, numbers: Sequence[Any], *arrays: Any) -> Any:
        """The wanted values, and whether eager would raise an error."""
        left, given = iter(arrays), iter(numbers)
        known: dict[Any, Any] = {}
        values = Values(axes=self.axes)
        for node in self.inputs:
            known[node] = next(left) if isinstance(node.meta["type"], TensorType) else next(given)
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                continue
            if node.op == "call_function" and not writes(node):
                known[node] = _compute(values, node, known)
        bad = functools.reduce(jnp.logical_or, values.bad) if values.bad else None
        return [known[node] for node in self.wanted], bad

    def split(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """Sizes, and tensors as arrays: without a copy where they are dense."""
        numbers = tuple(value for value in inputs if not isinstance(value, torch.Tensor))
        tensors = [(node, one) for node, one in zip(self.inputs, inputs) if isinstance(one, torch.Tensor)]
        return numbers, [self.placed(node, array_of(value)) for node, value in tensors]

    def placed(self, node: torch.fx.Node, array: Any) -> Any:
        """An input, where XLA reads it."""
        return array

    def gathered(self, array: Any) -> Any:
        """A result, where PyTorch reads it."""
        return array

    def jitted(self, numbers: tuple[Any, ...], arrays: list[Any]) -> Any:
        key = (numbers, tuple((value.shape, value.dtype) for value in arrays))
        found = self._compiled.pop(key, None)
        if found is None:
            found = jax.jit(self.function(numbers))
            if len(self._compiled) >= KEPT_SIZES:
                self._compiled.pop(next(iter(self._compiled)))
        self._compiled[key] = found  # the latest stands last
        return found

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        inputs = (*inputs, *self.constants)
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            numbers, arrays = self.split(inputs)
            made, bad = jax.block_until_ready(self.jitted(numbers, arrays)(*arrays))
            if bad is not None and bad:
                raise RuntimeFallback("an argument for which eager raises an error, or has a result of its own machine")
        known = dict(zip(self.inputs, inputs))
        taken = {value.data_ptr() for value in inputs if isinstance(value, torch.Tensor)}
        for node, array in zip(self.wanted, made):
            known[node] = _tensor(jax.tree.map(self.gathered, array), node.meta["type"], taken)
        for node in self.tail:
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
        results: Any = map_arg(self.output.args[0], known.__getitem__)
        return tuple(results)


def array_of(value: torch.Tensor) -> Any:
    """Of the tensor's own memory where it is dense and lies as jax wants it."""
    if not value.numel():
        return jnp.zeros(value.shape, DTYPES[value.dtype])
    return jax.dlpack.from_dlpack(value.detach().resolve_neg().contiguous())


def _tensor(array: Any, kind: Any, taken: set[int]) -> Any:
    """A result as a tensor of its own memory: jax hands on an argument that is returned as it came."""
    if array is None:
        return None
    if not isinstance(kind, TensorType):
        return tuple(_tensor(part, each, taken) for part, each in zip(array, kind))
    value = torch.from_dlpack(array) if array.size else torch.empty(array.shape, dtype=kind.dtype, device=kind.device)
    stride = [size for size in kind.stride if isinstance(size, int)]
    if len(stride) == value.dim() and tuple(stride) != value.stride():
        value = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
    elif value.data_ptr() in taken:
        value = value.clone()
    taken.add(value.data_ptr())
    return value


def _compute(values: Values, node: torch.fx.Node, known: dict[Any, Any]) -> Any:
    args: Any
    args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)  # type: ignore[misc]
    if node.target is operator.getitem:
        return args[0][args[1]]
    kind = node.meta["type"]
    if node.target is written:
        copy, by = node.args
        return _narrowed(known[by, by.args.index(copy)], kind)  # type: ignore[index, union-attr]
    row = ROWS[_name(node)]
    values.kind, values.wrote = kind, {}
    if row.widens:
        args, kwargs = jax.tree.map(_widened, (args, kwargs), is_leaf=lambda value: value is None)
    try:
        made = _narrowed(row.compute(values, *args, **kwargs), kind)
    except NoRow as error:
        raise NoRow(f"XLA has no row for {node.target}: {error}") from None
    except Exception as error:
        raise FailedRow(f"XLA's row for {node.target}: {type(error).__name__}: {error}") from error
    for each, one in zip(made, kind) if isinstance(kind, (tuple, list)) else ((made, kind),):
        fixed = each is not None and _fixed(one.shape) and node.target is not LEAVE  # whose type is the whole's
        if fixed and each.shape != tuple(one.shape):
            raise FailedRow(f"XLA's row for {node.target} gives {each.shape}, PyTorch {tuple(one.shape)}")
    known.update({(node, position): value for position, value in values.wrote.items()})
    return made


def _fixed(sizes: Iterable[Any]) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _widened(value: Any) -> Any:
    return value.astype(jnp.float32) if isinstance(value, jax.Array) and is_half(value.dtype) else value


def _narrowed(made: Any, kind: Any) -> Any:
    if kind is None or made is None:
        return made
    if isinstance(kind, (tuple, list)):
        return tuple(None if value is None else _narrowed(value, each) for value, each in zip(made, kind))
    return made.astype(DTYPES[kind.dtype])


class Texts:
    """A backend for fullgraph that keeps what it gives to XLA as text: StableHLO, or HLO before or after XLA's own
    passes."""

    def __init__(self, kind: str) -> None:
        self.kind, self.texts = kind, list[str]()
        self.backend = Backend("xla", "aten", self._compile, follows_autograd=False, dynamic=False)

    def _compile(self, to_compile: GraphToCompile) -> Callable[..., Any]:
        graph = passes.run(to_compile.graph)
        program = _program(Program, to_compile, graph, "forward")
        assert program is not None
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            numbers, arrays = program.split((*to_compile.example_inputs, *program.constants))
            lowered = program.jitted(numbers, arrays).lower(*arrays)
            if self.kind == "optimized":
                self.texts.append(lowered.compile().as_text())
            else:
                self.texts.append(lowered.as_text(self.kind))
        return below_autograd(program.run, counts_of(graph))


BACKEND = Backend("xla", "aten", _compile, follows_autograd=False, trains=True, dynamic=False)
