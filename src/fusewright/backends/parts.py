"""Graphs with sizes that depend on data, compiled in parts: each part begins where a size is known that the part before
has given.

Takes a functional graph whose nodes may carry meta[GIVES] (record/data_sizes.py); gives the parts, each a graph of its
own with the sizes as inputs, and the callable that runs them one after the other. Always holds: a size is checked
against everything that capture took for granted of it before the part that depends on it runs; a check that fails, like
any failure at run time, has the whole call repeated eagerly, and nothing was written to an input before (only the last
part writes), nor were random numbers drawn that eager would miss.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from fusewright.base.errors import CannotFunctionalise, RuntimeFallback
from fusewright.base.records import dataclass
from fusewright.graph.builder import env_of
from fusewright.graph.generators import Drawn, drawing_devices, states_of
from fusewright.operators.data_dependent import GIVES
from fusewright.operators.schema import facts
from fusewright.sizes.expressions import Expr, Relation, Symbol, bounds, evaluate, free_symbols
from fusewright.sizes.tensor_type import TensorType

Node = torch.fx.Node
Name = Node | Symbol


@dataclass(slots=True)
class Part:
    """graph: its placeholders stand for `reads` (nodes of the whole graph, and sizes), its outputs are the values of
    `gives`; None when there is nothing to compile. runs: the operators that give sizes, and the reads of their results,
    called one by one after it."""

    graph: torch.fx.Graph | None
    reads: tuple[Name, ...]
    gives: tuple[Node, ...]
    runs: tuple[Node, ...]


def has_data_sizes(graph: torch.fx.Graph) -> bool:
    return any(GIVES in node.meta for node in graph.nodes)


# --- the split --------------------------------------------------------------------------------------------------------


def symbols_of(value: object) -> set[Symbol]:
    """The size symbols in a type, or in an argument of a node."""
    if isinstance(value, TensorType):
        return symbols_of((value.shape, value.stride, value.offset))
    if isinstance(value, Expr):
        return set(free_symbols(value))
    if isinstance(value, (list, tuple)):
        return {symbol for item in value for symbol in symbols_of(item)}
    if isinstance(value, slice):
        return symbols_of((value.start, value.stop, value.step))
    return set()


def used_symbols(node: Node) -> set[Symbol]:
    return symbols_of(node.meta.get("type")) | symbols_of(node.args) | symbols_of(tuple(node.kwargs.values()))


def _is_run(node: Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, Node) and GIVES in source.meta


def _levels(graph: torch.fx.Graph) -> dict[Node, int]:
    """The part in which each operator runs. Raises CannotFunctionalise for graphs whose order cannot be kept."""
    levels: dict[Node, int] = {}
    known: dict[Symbol, int] = {}  # the first part that may use the size
    ordered = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.meta.get("writes_private"):
            raise CannotFunctionalise(
                "an operator that updates its argument, in a graph with sizes that depend on data"
            )
        if node.target is operator.getitem and _is_run(node):
            levels[node] = levels[node.args[0]]  # type: ignore[index]
            continue
        given = node.meta.get(GIVES)
        level = max(
            (levels[source] + _is_run(source) for source in node.all_input_nodes if source in levels), default=0
        )
        for symbol in used_symbols(node):
            if given is None or symbol is not given[0]:
                level = max(level, known.get(symbol, 0))
        if node.meta.get("random") or _has_effect(node):
            level = ordered = max(level, ordered)
        levels[node] = level
        if given is not None:
            known[given[0]] = level + 1
    last = max([*levels.values(), *known.values()], default=0)
    for node in graph.nodes:
        if node.meta.get("epilogue"):
            levels[node] = last
    return levels


def _has_effect(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and facts(node.target).effect


def split(graph: torch.fx.Graph) -> list[Part]:
    """The parts of `graph`, in order."""
    levels = _levels(graph)
    wanted = set(next(iter(reversed(graph.nodes))).all_input_nodes)
    makers = {
        node.meta["type"]: node
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(node.meta["type"], Symbol)
    }
    parts: list[Part] = []
    for level in sorted(set(levels.values())):
        inside = [node for node in graph.nodes if levels.get(node) == level]
        kept = [node for node in inside if not _is_run(node)]
        runs = tuple(node for node in inside if _is_run(node))
        own = frozenset(kept)
        read = [node for node in kept if node in wanted or any(user not in own for user in node.users)]
        gives = tuple(node for node in read if isinstance(node.meta.get("type"), TensorType))
        parts.append(_part(kept, runs, gives, makers, env_of(graph)))
    return parts


def _part(kept: list[Node], runs: tuple[Node, ...], gives: tuple[Node, ...], makers: dict[Any, Node], env: Any) -> Part:
    if not kept:
        return Part(None, (), (), runs)
    own = frozenset(kept)
    outside = dict.fromkeys(source for node in kept for source in node.all_input_nodes if source not in own)
    symbols = {symbol for node in (*kept, *outside) for symbol in used_symbols(node)}
    needs: dict[Name, None] = dict.fromkeys(
        (*outside, *(makers.get(symbol, symbol) for symbol in sorted(symbols, key=str)))
    )
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    reads: list[Name] = [name for name in needs if not isinstance(name, Node) or name.op != "get_attr"]
    for name in reads:
        kind = name.meta["type"] if isinstance(name, Node) else name
        placeholder = graph.placeholder(kind.name if isinstance(kind, Symbol) else name.name)
        placeholder.meta.update(type=kind, location=())
        if isinstance(name, Node):
            copies[name] = placeholder
    for name in needs:
        if isinstance(name, Node) and name.op == "get_attr":
            copies[name] = graph.node_copy(name)
    for node in kept:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    made = graph.output(tuple(copies[node] for node in gives))
    made.meta.update(type=tuple(node.meta["type"] for node in gives), location=(), env=env)
    graph.lint()
    return Part(graph, tuple(reads), gives, runs)


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class InParts:
    """The callable over the whole graph's inputs."""

    parts: Sequence[tuple[Part, Callable[..., Any] | None]]
    inputs: tuple[Node, ...]
    outputs: tuple[Any, ...]
    checks: tuple[Relation, ...]
    constants: dict[Node, torch.Tensor]
    random: tuple[Drawn, ...]

    def __call__(self, *given: Any) -> Any:
        states = states_of(self.random)
        try:
            return self._run(given)
        except RuntimeFallback:
            if states is not None:  # else a CUDA graph is being recorded, which a repeated call ends anyway
                states.restore()
            raise

    def _run(self, given: tuple[Any, ...]) -> Any:
        values: dict[Any, Any] = {**self.constants, **dict(zip(self.inputs, given, strict=True))}
        sizes: dict[Any, int] = {
            node.meta["type"]: values[node] for node in self.inputs if isinstance(node.meta["type"], Symbol)
        }
        for part, run in self.parts:
            if run is not None:
                values.update(zip(part.gives, run(*(values[name] for name in part.reads)), strict=True))
            if part.runs:
                for node in part.runs:
                    self._call(node, values, sizes)
                self._check(part.runs, values, sizes)
        return tuple(_resolved(value, values, sizes) for value in self.outputs)

    def _call(self, node: Node, values: dict[Any, Any], sizes: dict[Any, int]) -> None:
        """An operator that gives a size: its result, and the size."""
        args = [_resolved(value, values, sizes) for value in node.args]
        keywords = {name: _resolved(value, values, sizes) for name, value in node.kwargs.items()}
        try:
            found = values[node] = node.target(*args, **keywords)  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError) as error:
            raise RuntimeFallback(str(error)) from error
        given = node.meta.get(GIVES)
        if given is not None:
            symbol, dim, index = given
            sizes[symbol] = values[symbol] = (
                found if dim is None else (found if index is None else found[index]).shape[dim]
            )

    def _check(self, runs: Sequence[Node], values: dict[Any, Any], sizes: dict[Any, int]) -> None:
        for relation in self.checks:
            known = all(symbol in sizes for symbol in (*free_symbols(relation.left), *free_symbols(relation.right)))
            if known and not relation.holds(sizes):
                raise RuntimeFallback(
                    f"a size that depends on data is not what was taken for granted: {relation} does not hold"
                )
        for node in runs:
            found, kinds = values[node], node.meta["type"]
            for tensor, kind in zip(found, kinds) if isinstance(kinds, tuple) else ((found, kinds),):
                if isinstance(kind, TensorType) and not _is_as_recorded(tensor, kind, sizes):
                    raise RuntimeFallback(
                        f"{node.target} gave a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                    )


def _is_as_recorded(tensor: torch.Tensor, kind: TensorType, sizes: dict[Any, int]) -> bool:
    shape = tuple(evaluate(size, sizes) for size in kind.shape)
    strides = zip(shape, tensor.stride(), kind.stride)
    return shape == tuple(tensor.shape) and all(
        size < 2 or 0 in shape or found == evaluate(expected, sizes) for size, found, expected in strides
    )


def _resolved(value: Any, values: dict[Any, Any], sizes: dict[Any, int]) -> Any:
    if isinstance(value, Node):
        return values[value] if value in values else evaluate(value.meta["type"], sizes)
    if isinstance(value, (list, tuple)):
        return [_resolved(item, values, sizes) for item in value]
    return evaluate(value, sizes) if isinstance(value, Expr) else value


def in_parts(
    graph: torch.fx.Graph,
    constants: dict[str, torch.Tensor],
    compile_part: Callable[[torch.fx.Graph, str], Callable[..., Any]],
) -> InParts:
    """The callable of a graph with sizes that depend on data. `compile_part(graph, name)` compiles one part."""
    env = env_of(graph)
    assert env is not None
    output = next(iter(reversed(graph.nodes)))
    parts = split(graph)
    compiled = [
        (part, None if part.graph is None else compile_part(part.graph, f"part {index}"))
        for index, part in enumerate(parts)
    ]
    ranges = [
        Relation("<=", left, right)
        for symbol in env.unbacked
        for low, high in [bounds(symbol)]
        for left, right in ((low, symbol), (symbol, high))
        if left is not None and right is not None
    ]
    return InParts(
        compiled,
        tuple(graph.find_nodes(op="placeholder")),
        tuple(output.args[0]),  # type: ignore[arg-type]
        (*ranges, *env.assertions()),
        {node: constants[str(node.target)] for node in graph.find_nodes(op="get_attr")},
        drawing_devices(graph),
    )


__all__ = ["InParts", "Part", "has_data_sizes", "in_parts", "split"]
